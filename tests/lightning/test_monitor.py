"""What a run tells of itself: logged scalars, the progress bar, the records of the ranks, and the
timeline of them.
"""

import importlib
import io
import json
import math
import re
import resource
import time
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR

import lightning_sdiloco
from lightning_sdiloco import (
    Carry,
    DenseBeginning,
    Landing,
    OuterOptimizer,
    Schedule,
    Selective,
    SimulatedGroups,
    StreamingDiLoCo,
    StreamingDiLoCoFabricStrategy,
    StreamingDiLoCoMonitor,
    StreamingDiLoCoStrategy,
)
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from lightning_sdiloco.lightning.monitor import Interval, progress, scalars_of
from lightning_sdiloco.tools.run_files import read_run, trace
from tests import fits
from tests.bits import same
from tests.fits import LIGHTNING, OTHER, SHORT, fit, refusal, said_by
from tests.methods import ByNorm
from tests.ranks import in_ranks, run_processes, run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

DOCS = Path(lightning_sdiloco.__file__).parents[1] / "docs"
PAGE = (DOCS / "monitoring.md").read_text()
CITIES = (DOCS / "two-cities.md").read_text()


def landing(**told: Any) -> Landing:
    groups = dict.fromkeys(("group_norms", "counted", "left_out", "outlying"), ())
    own: dict[str, Any] = {
        "diagnostics": None,
        "spans": {"transfer": (1.0, 1.5), "land": (9.0, 10.0)},
    }
    return Landing(
        **{**dict.fromkeys(Landing._fields, 0), **groups, **own, "on_link_s": 0.5, **told}
    )


def test_diagnostics_are_those_of_a_direct_computation_and_add_up_over_shards(
    worlds: dict[int, Any],
) -> None:
    models = [mlp(), mlp()]
    groups = SimulatedGroups(
        models, sync_every=2, overlap_steps=1, fragments=LAYERS, compression="fp4"
    )
    for engine in groups.engines:
        engine.diagnose()
    optimizers = [inner_optimizer("sgd", model) for model in models]
    codec = lightning_sdiloco.FP4()
    launched: dict[int, tuple[Tensor, list[Tensor]]] = {}
    compared = 0
    flat = nn.utils.parameters_to_vector
    for step in range(1, 9):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        if 1 in groups.engines[0].schedule.launches(step):
            outer = flat(
                values
                for name, values in groups.outer_state_dict().items()
                if name.startswith("2.")
            )
            launched[step] = (
                outer,
                [outer - flat(model[2].parameters()).detach() for model in models],
            )
        for group, landings in enumerate(groups.step()):
            for landed in [landed for landed in landings if landed.fragment == 1]:
                outer, gradients = launched[landed.launched_at]
                decoded = [
                    codec.decode(codec.encode(g), out := torch.empty_like(g)) or out
                    for g in gradients
                ]
                mean = torch.stack(decoded).mean(dim=0)
                told = landed.diagnostics
                own = gradients[group]
                momentum = groups.engines[group].state_dict()["fragments"][1]["state"][
                    "momentum_buffer"
                ]
                lost = float((decoded[group] - own).norm() / own.norm())
                assert 0.01 < lost < 0.5
                assert landed.group_norms == pytest.approx(
                    [float(g.norm()) for g in gradients], rel=1e-5
                )
                cosines = [
                    float(torch.cosine_similarity(gradient, mean, dim=0)) for gradient in decoded
                ]
                assert told.cosines == pytest.approx(cosines, rel=1e-5)
                assert told.local_distance == pytest.approx(
                    float(own.norm() / outer.norm()), rel=1e-5
                )
                assert told.outer_momentum_norm == pytest.approx(float(momentum.norm()), rel=1e-5)
                assert told.compression_error == pytest.approx(lost, rel=1e-4)
                compared += 1
    assert compared == 6
    one, two = ([landings[0] for _, _, landings in worlds[world_size][1]] for world_size in (2, 4))
    for alone, shared in ((one[0], two[0]), (one[0], two[1]), (one[1], two[2])):
        for name, value in alone.diagnostics._asdict().items():
            assert getattr(shared.diagnostics, name) == pytest.approx(value, rel=1e-4), name


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[Any]]]:
    """Two groups of one rank and of two: a folder with records and timeline, and what each rank
    saw, by ranks.
    """
    folders = {world_size: tmp_path_factory.mktemp("world") for world_size in (2, 4)}
    return {size: (folder, run_processes(fitted, size, folder)) for size, folder in folders.items()}


# So short a fit would step elementwise.
EQUALISED = {"outer_optimizer": OuterOptimizer(direction="equalised")}


def fitted(rank: int, world_size: int, folder: Path) -> Any:
    """Fits 14 steps, and returns what was said, the bytes of each landing, and the landings of the
    first fragment.
    """
    said = said_by(LIGHTNING, OTHER)
    sent = set[int]()
    landings = list[Landing]()

    def look(trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        landed = (
            None if engine.is_finished else engine.last_landing
        )  # the final exchange sends more
        if landed:
            sent.add(landed.bytes_sent)
            landings.extend([landed] if landed.fragment == 0 and landed not in landings else [])

    numbers = {
        "outer_lr": 0.75,
        "outer_momentum": 0.5,
        "mixing": 0.25,
        "compression": "fp32",
        **EQUALISED,
    }
    own = {"timeline": str(folder / "traces" / "trace.json"), "folder": str(folder / "sdiloco")}
    watching = [
        StreamingDiLoCoMonitor(diagnostics=True, **own),
        pl.callbacks.LambdaCallback(on_train_batch_end=look),
    ]
    choices = {"callbacks": watching, "log_every_n_steps": 2}
    fit(rank, world_size, 2, 14, {**SHORT, **numbers}, trainer_choices=choices)
    return [text for text in said if text.startswith("Streaming DiLoCo")], sorted(sent), landings


@in_ranks(2)
def test_a_monitor_changes_no_bit_of_training_and_aligns_clocks(rank: int, tmp_path: Path) -> None:
    policies = {"schedule": Selective(), "weighing": ByNorm(), "mixing": Carry()}
    true = time.time
    for name, choices, shift in (
        ("fp4", {}, 1000.0),
        ("sparse", {"compression": "sparse"}, -1000.0),
        ("policies", policies, 0.0),
    ):
        plain = fit(rank, 2, 2, 11, {**SHORT, **choices})
        time.time = lambda: true() + shift * rank  # noqa: B023  it is called before the next
        watching = {"callbacks": [StreamingDiLoCoMonitor(folder=str(tmp_path / name))]}
        watched = fit(rank, 2, 2, 11, {**SHORT, **choices}, trainer_choices=watching)
        assert same(plain["outer"], watched["outer"]), name
        assert plain["report"]["bytes_sent"] == watched["report"]["bytes_sent"], (
            "no traffic between groups either"
        )
        torch.distributed.barrier()
        ranks = read_run(tmp_path / name).ranks
        began = json.loads((tmp_path / name / "rank_00001.jsonl").read_text().splitlines()[0])[
            "time"
        ]
        assert ranks[1].starts[0][0] == pytest.approx(began - shift, abs=5)
        mine, theirs = (
            {(f.launched_at, f.fragment, f.final): f.spans for f in own.landings} for own in ranks
        )
        assert mine.keys() == theirs.keys() != set()
        for flight, spans in mine.items():
            other = theirs[flight]
            assert (
                max(spans["launch"][0], other["launch"][0])
                < min(spans["flight"][1], other["flight"][1]) + 1e-6
            )
    settings = ranks[0].about["settings"]
    assert settings | {"mixing": "Carry()", "schedule": repr(Selective())} == settings
    not_in_all_ranks = {
        "callbacks": [StreamingDiLoCoMonitor(folder=str(tmp_path), diagnostics=rank == 0)]
    }
    assert "diagnostics" in refusal(fit, rank, 2, 2, 6, SHORT, trainer_choices=not_in_all_ranks)
    of_ddp = fits.trainer(
        strategy="ddp", devices=2, callbacks=[StreamingDiLoCoMonitor()], max_steps=1
    )
    assert "the strategy is DDPStrategy" in refusal(of_ddp.fit, fits.module(), [0])


OUTER_OPTIMIZERS = {
    "SGD(lr=0.001, momentum=0)": torch.optim.SGD,
    "SGD(lr=0.4, momentum=0.8, nesterov=True)": partial(
        torch.optim.SGD, lr=0.4, momentum=0.8, nesterov=True
    ),
    "AdamW(lr=0.0625, betas=(0.9, 0.999))": OuterOptimizer(
        partial(torch.optim.AdamW, lr=torch.tensor(0.0625))
    ),
}


@in_ranks(2)
def test_the_first_line_shows_rate_and_momentum_of_any_outer_optimizer(rank: int) -> None:
    for summary, make in OUTER_OPTIMIZERS.items():
        choices: dict[str, Any] = {"sync_every": 2, "fragments": 1, "outer_optimizer": make}
        said = said_by(LIGHTNING, OTHER, "lightning.fabric", "lightning_sdiloco")
        strategy = StreamingDiLoCoStrategy(**choices)
        fits.trainer(strategy=strategy, devices=2, max_steps=3).fit(
            fits.module(), fits.SomeBatches(rank, 4)
        )
        fabric = L.Fabric(
            accelerator="cpu", devices=2, strategy=StreamingDiLoCoFabricStrategy(**choices)
        )
        fabric.launch()
        model, optimizer = fabric.setup(net := mlp(), inner_optimizer("sgd", net))
        fabric.backward(model(torch.ones(8, 5)).square().mean())
        optimizer.step()
        fabric.strategy.finish()
        shown = [line for line in said if "the first launch follows" in line]
        assert len([line for line in shown if f", outer_optimizer={summary};" in line]) == 2 * (
            rank == 0
        ), said
        warned = [line for line in said if f"The outer optimizer is {summary}" in line]
        assert len(warned) == 2 * (rank == 0) * (make is torch.optim.SGD)


@pytest.mark.parametrize(
    ("choices", "is_low"),
    [
        ({"outer_optimizer": torch.optim.SGD}, True),
        ({"outer_optimizer": partial(torch.optim.AdamW, lr=0.01)}, True),
        ({"outer_lr": 0.04}, True),
        ({"outer_lr": 0.05}, False),
        ({}, False),
        # What a schedule reaches counts.
        (
            {"outer_optimizer": OuterOptimizer(lr_schedule=partial(LinearLR, start_factor=0.01))},
            False,
        ),
        (
            {
                "outer_optimizer": OuterOptimizer(
                    lr_schedule=partial(LambdaLR, lr_lambda=lambda _: 0.01)
                )
            },
            True,
        ),
    ],
)
def test_a_low_outer_rate_is_warned_of_once_in_a_loop_of_ones_own(
    choices: dict[str, Any], is_low: bool, caplog: pytest.LogCaptureFixture
) -> None:
    SimulatedGroups([mlp() for _ in range(3)], **choices)
    warned = [line for line in caplog.messages if "hardly follows" in line]
    assert len(warned) == is_low
    assert all(
        "partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)" in line for line in warned
    )


def test_a_monitor_is_refused_when_it_is_made_without_a_valid_path() -> None:
    for name in ("timeline", "folder"):
        told = refusal(StreamingDiLoCoMonitor, **{name: True})
        assert told.startswith(
            f"{name}=True is of type bool, not a path. Give one, such as {name}='"
        )
        StreamingDiLoCoMonitor(**{name: Path("somewhere")})
    assert refusal(StreamingDiLoCoMonitor, diagnostics="no").startswith(
        "diagnostics='no' is neither True nor False"
    )


@in_ranks(2)
def test_a_record_that_finds_no_room_ends_with_a_warning_and_training_goes_on(
    rank: int, tmp_path: Path
) -> None:
    path = tmp_path / "rank_00001.jsonl"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = said_by("lightning_sdiloco")

    def limit(trainer: Any, *_: Any) -> None:
        if rank == 1 and trainer.global_step in (6, 9):
            room = path.stat().st_size + 20 if trainer.global_step == 6 else unlimited[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))

    assert "holds no records (rank_00000.jsonl and so on). Give the folder" in refusal(
        read_run, tmp_path
    )
    # The next start of the run does not suffer from half a line.
    for callbacks in ([pl.callbacks.LambdaCallback(on_train_batch_start=limit)], []):
        choices = {"callbacks": [StreamingDiLoCoMonitor(folder=str(tmp_path)), *callbacks]}
        assert fit(rank, 2, 2, 11, SHORT, trainer_choices=choices)["report"]["inner_steps"] == 11
    assert [f"{path} " in text for text in said if "cannot be written" in text] == [True] * rank
    torch.distributed.barrier()
    ranks = read_run(tmp_path).ranks
    assert [[step.step for step in own.steps] for own in ranks] == [
        [*range(1, 12)] * 2,
        [*range(1, 7), *range(1, 12)],
    ]
    assert [len(own.starts) for own in ranks] == [2, 2]


def test_the_link_rate_is_the_busier_directions_and_unknown_numbers_are_not_shown() -> None:
    assert landing(bytes_sent=1_000_000, bytes_received=3_000_000).link_gbit_s == pytest.approx(
        0.048
    )
    assert landing().link_gbit_s == 0
    unknown = landing(bytes_sent=1_000_000, bytes_received=1_000_000, on_link_s=math.nan)
    assert "sdiloco/link_gbit_s" not in scalars_of(unknown)
    schedule = Schedule(20, 5, 4, DenseBeginning(rounds=3))
    bar: Any = SimpleNamespace(round=12, in_flight=(0, 1, 2, 3), last_landing=unknown)
    bar.schedule = schedule
    bar.steps_in_rounds = 300
    assert progress(bar, columns=34) == {"outer_step": "12", "in_flight": "0, 1, +2"}
    assert progress(bar)["link"] == "-"
    bar.steps_in_rounds = 9
    assert progress(bar)["outer_step"] == "dense 2"
    # One group without momentum has neither others to compare with nor a momentum.
    groups = SimulatedGroups([nn.Linear(2, 2)], sync_every=1, overlap_steps=0, outer_momentum=0.0)
    groups.engines[0].diagnose()
    names = scalars_of(groups.step()[0][0])
    assert "sdiloco/local_distance" in names
    assert not {"sdiloco/outer_momentum_norm", "sdiloco/cosine_group_0"} & set(names)
    assert not any(math.isnan(number) for number in names.values())
    # An interval ends after a round, and says what share of it was not waited for.
    ended = Interval(sync_every=10, first_step=0).scalars_with(unknown._replace(landed_at=10))
    assert "sdiloco/peak_gbit_s" not in ended
    interval = Interval(sync_every=10, first_step=0)
    interval._began = 0.0
    assert (
        interval.scalars_with(landing(landed_at=5, exposed_wait_s=1.0, bytes_sent=125_000_000))
        == {}
    )
    ended = interval.scalars_with(landing(landed_at=10, exposed_wait_s=1.5, bytes_sent=1))
    assert ended == {"sdiloco/compute_utilisation": 0.75, "sdiloco/peak_gbit_s": 2.0}
    assert interval.scalars_with(landing(landed_at=15)) == {}


def test_a_message_that_waited_for_its_receiver_gives_no_rate() -> None:
    """Two groups on a loopback of some Gbit/s, of which one launches late, and one looks late."""

    def run(rank: int, world_size: int) -> list[float]:
        topology = Topology.of_world(GroupLayout(2, 2), timedelta(seconds=30))
        model = nn.Linear(1000, 1000)
        engine = StreamingDiLoCo(
            model, topology=topology, sync_every=2, overlap_steps=1, compression="fp32"
        )
        exchange = engine.topology.exchange
        post = exchange.post
        rates = []

        def busy(*messages: Any) -> Any:
            posted = post(*messages)
            if rank == 0 and engine.inner_steps < 6:
                time.sleep(0.3)
            return posted

        exchange.post = busy
        for step in range(1, 12):
            if rank == 1 and 6 <= step < 10:
                time.sleep(0.2)
            rates += [landed.link_gbit_s for landed in engine.step()]
        engine.finish()
        return rates

    for rank, rates in enumerate(run_ranks(run, 2)):
        # 32 Mbit in no less than their time on the link: neither what 0.2 seconds would make of it,
        # nor no time at all.
        assert all(math.isnan(rate) or 0.2 < rate < 60 for rate in rates), rates
        assert rank == 1 or all(math.isnan(rate) for rate in rates[:2]), rates


def test_three_groups_in_two_shots_are_logged_and_recorded_with_their_validations(
    tmp_path: Path,
) -> None:
    def validation_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(parts), sync_dist=True)

    def run(rank: int, world_size: int) -> None:
        of = importlib.import_module(f"{OTHER}.loggers")
        loggers = [
            kind(folder, "", "")
            for kind, folder in ((of.CSVLogger, tmp_path), (of.TensorBoardLogger, board))
        ]
        watch = lightning_sdiloco.pytorch_lightning.StreamingDiLoCoMonitor(diagnostics=True)
        more = {
            "callbacks": [watch],
            "logger": loggers,
            "log_every_n_steps": 2,
            "val_check_interval": 4,
        }
        loaders = {"loader": fits.SomeBatches(rank, 16), "validation": fits.SomeBatches(0, 2)}
        make = partial(fits.module, validation_step=validation_step)
        fit(
            rank,
            3,
            3,
            15,
            {**SHORT, **EQUALISED},
            OTHER,
            trainer_choices=more,
            make=make,
            **loaders,
        )

    board = tmp_path / "board"
    run_processes(run, 3)
    # Every scalar is in the file of the logger for every logged step with a landing, and on the
    # page.
    header, *rows = (
        [*row.split(",")] for row in (tmp_path / "metrics.csv").read_text().splitlines()
    )
    columns = {
        name: [row[number] for row in rows]
        for number, name in enumerate(header)
        if name[:8] == "sdiloco/"
    }
    for name in ("sdiloco/link_gbit_s", "sdiloco/peak_gbit_s"):
        columns.pop(name, None)
    assert len(columns) == 27
    assert [
        0 <= float(share) <= 1 for share in columns.pop("sdiloco/compute_utilisation") if share
    ] == [True] * 2
    assert [name for name in columns if f"| `{re.sub('_[012]$', '', name)}" not in PAGE] == []
    landed = [index for index, total in enumerate(columns["sdiloco/outer_grad_norm"]) if total]
    assert landed
    assert [
        name for name, values in columns.items() if not all(values[index] for index in landed)
    ] == []
    # TensorBoard gets a layout of them.
    events = EventAccumulator(str(board))
    events.Reload()
    layout = Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    (section,) = layout.category
    charts = {chart.title: list(chart.multiline.tag) for chart in section.chart}
    assert section.title == "Streaming DiLoCo"
    assert charts["Outer gradient"] == [
        "sdiloco/outer_grad_norm",
        "sdiloco/direction_norm",
        "sdiloco/outer_grad_norm_group_.*",
    ]
    assert "sdiloco/outer_grad_norm_group_1" in events.Tags()["scalars"]
    # Records are beside what the first logger writes.
    for rank in read_run(tmp_path / "sdiloco").ranks:
        assert {landed.exchange for landed in rank.landings} == {"two_shot"}
        assert [step for step, loss in rank.losses if loss > 0] == [2, 4, 6, 8, 10, 12, 14]
        tested = [(its.step, *its.metrics, its.span[0] < its.span[1]) for its in rank.validations]
        assert tested == [(step, "val_loss", True) for step in (4, 8, 12)]


@in_ranks(2)
def test_progress_bars_show_rounds_flights_waits_and_the_link_in_one_line_more(
    rank: int, distribution: str
) -> None:
    callbacks = importlib.import_module(f"{distribution}.callbacks")

    def fitted(bar: Any, strategy: Any) -> tuple[list[dict[str, Any]], int]:
        """What the bar shows after every batch, and on how many lines after the eleventh."""
        metrics: list[dict[str, Any]] = []
        console = Console(width=80, record=True, file=io.StringIO())

        def look(trainer: Any, module: Any, *_: Any) -> None:
            module.log("train_loss", 0.5, prog_bar=True)
            metrics.append(bar.get_metrics(trainer, module))
            if trainer.global_step == 11 and getattr(bar, "progress", None):
                console.print(bar.progress.get_renderable())

        watching = [bar, callbacks.LambdaCallback(on_train_batch_end=look)]
        more = {"callbacks": watching, "enable_progress_bar": True, "max_steps": 12}
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, **more)
        trainer.fit(fits.module(distribution, seed=rank), fits.SomeBatches(rank, 20))
        return metrics, len(console.export_text().strip().splitlines())

    ours = partial(fits.strategy, distribution, worker_groups=2, **{**SHORT, "overlap_steps": 3})
    rich = partial(callbacks.RichProgressBar, console_kwargs={"width": 80})
    metrics, _ = fitted(callbacks.TQDMProgressBar(), ours())
    assert metrics[0].keys() >= {"outer_step", "in_flight", "exposed_wait", "link"}
    assert (metrics[0]["exposed_wait"], metrics[0]["link"]) == ("-", "-")
    assert metrics[8]["exposed_wait"].endswith(" ms")
    assert metrics[8]["link"].endswith("bit/s") or metrics[8]["link"] == "-"
    (metrics, lines), (_, of_ddp) = fitted(rich(), ours()), fitted(rich(), "ddp")
    assert "outer_step" in metrics[0], "there is room for no more"
    assert of_ddp <= lines <= of_ddp + 1
    assert (of_ddp > 0) == (rank == 0)


def test_the_intervals_of_the_training_thread_add_up_to_its_wall_time(
    worlds: dict[int, Any],
) -> None:
    run = read_run(worlds[4][0] / "sdiloco")
    assert [rank.rank for rank in run.ranks] == [0, 1, 2, 3]
    for rank in run.ranks:
        assert [step.step for step in rank.steps] == list(range(1, 15))
        assert {landed.exchange for landed in rank.landings} == {"gather"}
        assert {landed.final for landed in rank.landings} == {False, True}
        # What the training thread did, in order.
        pieces = [(*step.span, "step") for step in rank.steps]
        pieces += [
            (*own.spans[name], name) for own in rank.landings for name in ("launch", "wait", "land")
        ]
        for one, other in pairwise(sorted(pieces)):
            assert one[1] <= other[0] + 1e-5, f"{one} and {other} overlap"
        wall = rank.steps[-1].done - rank.steps[0].span[0]
        busy = sum(
            ended - began for began, ended, _ in pieces if ended <= rank.steps[-1].done + 1e-6
        )
        assert wall * 0.8 <= busy <= wall + 1e-4
        for landed in rank.landings:
            spans = landed.spans
            assert spans["flight"][0] == pytest.approx(spans["launch"][1], abs=1e-5), (
                "it starts at its launch"
            )
            assert spans["flight"][1] <= spans["wait"][1] + 1e-4, "and ends before its landing"
            order = [
                spans[name]
                for name in ("launch", "encode", "transfer", "decode", "outer_step", "land")
            ]
            assert all(one[1] <= other[0] + 1e-5 for one, other in pairwise(order))


def test_the_timeline_has_every_rank_and_every_flight_from_launch_to_landing(
    worlds: dict[int, Any],
) -> None:
    folder, _ = worlds[2]
    told = json.loads((folder / "traces" / "trace.json").read_text())
    run = read_run(folder / "sdiloco")
    assert told == json.loads(json.dumps(trace(run)))
    events = told["traceEvents"]
    for rank in run.ranks:
        own = [event for event in events if event["pid"] == rank.rank]
        assert {e["args"]["name"] for e in own if e["name"] == "process_name"} == {
            f"group {rank.rank}"
        }
        rows = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
        assert rows == {
            0: "training",
            **{1 + fragment: f"fragment {fragment}" for fragment in range(4)},
        }
        assert len([e for e in own if e["name"] == "step"]) == 14
        flights = [e for e in own if e["ph"] == "X" and e["name"] == "flight"]
        # Fragment p launches after inner steps 4 + p, 8 + p, 12 + p; what is in flight at the end
        # lands.
        launches = [(step, (step - 4) % 4) for step in range(4, 15)]
        assert (
            sorted((e["args"]["launched_at"], e["args"]["fragment"]) for e in flights) == launches
        )
        assert len([e for e in own if e["name"] == "final flight"]) == 4
        arrows = {e["id"]: e["ts"] for e in own if e["ph"] == "s"}
        ends = {e["id"]: e["ts"] for e in own if e["ph"] == "f"}
        assert arrows.keys() == ends.keys()
        assert all(began < ends[number] for number, began in arrows.items())
    assert min(event["ts"] for event in events if "ts" in event) == 0
    # On hosts that keep time, nothing is shifted.
    raw = json.loads((folder / "sdiloco" / "rank_00001.jsonl").read_text().splitlines()[0])
    assert run.ranks[1].starts[0][0] == raw["time"]


def test_one_line_lists_active_settings_and_another_the_load_of_the_link(
    worlds: dict[int, Any],
) -> None:
    (lines, sent, _), *others = worlds[4][1]
    assert [told for told, *_ in others] == [[]] * 3
    start, measured = lines
    assert start == (
        "Streaming DiLoCo: 2 worker groups of 2 ranks, 4 fragments, sync_every=4, overlap_steps=2,"
        " outer_lr=0.75, outer_momentum=0.5, mixing=0.25, direction=equalised; each rank sends"
        f" {sent[0]} bytes to {sent[-1]} bytes a fragment; the first launch follows inner step 4."
    )
    seconds = float(re.findall(r"an inner step takes (\S+) s", measured)[0])
    [(window, rate, unit)] = re.findall(
        r"gives the link (\S+) s .* carry (\S+) ([kM]bit/s)", measured
    )
    window = float(window)
    rate = float(rate) * {"kbit/s": 1e3, "Mbit/s": 1e6}[unit]
    assert window == pytest.approx(2 * seconds, rel=0.02)
    # All four fragments in four steps are more than the largest in two.
    assert rate >= 8 * sent[-1] / window * 0.98
    assert 1 <= float(re.findall(r"carry (\S+)", measured)[0]) < 1000
    without_numbers = partial(re.sub, r"[\d.]+( (bytes|kB|MB)| [kM]bit/s)?", "N")
    shown = re.findall("^Streaming DiLoCo: .*", PAGE, re.MULTILINE)
    assert list(map(without_numbers, shown)) == list(map(without_numbers, (start, measured)))
    # A guide shows them shortened, for groups of one rank.
    guide = re.findall("^Streaming DiLoCo: .*", CITIES, re.MULTILINE)
    for line, made in zip(guide, (start, measured), strict=True):
        parts = line.replace("1 rank,", "2 ranks,").split("...")
        assert all(without_numbers(part) in without_numbers(made) for part in parts), line
