"""Reports of a run: logged scalars, the progress bar, the records of the ranks, and their
timeline.
"""

import csv
import importlib
import io
import json
import math
import re
import resource
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR, LinearLR

import lightning_sdiloco
from lightning_sdiloco import (
    FP4,
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
from lightning_sdiloco.algorithm.schedule import Every, Timetable
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from lightning_sdiloco.lightning.monitor import Interval, progress, scalars_of
from lightning_sdiloco.tools.run_files import LandingRecord, Rank, read_run, trace
from tests import fits
from tests.bits import same
from tests.fits import LIGHTNING, OTHER, SHORT, callbacks_of, fit, refusal, said_by
from tests.methods import ByNorm
from tests.ranks import in_ranks, run_processes, run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

DOCS = Path(lightning_sdiloco.__file__).parents[1] / "docs"
PAGE = (DOCS / "monitoring.md").read_text()
CITIES = (DOCS / "two-cities.md").read_text()
# By default so short a fit would step elementwise.
EQUALISED = {"outer_optimizer": OuterOptimizer(direction="equalised")}


def monitoring(**choices: Any) -> dict[str, Any]:
    """The arguments of a Trainer with a monitor."""
    return {"callbacks": [StreamingDiLoCoMonitor(**choices)]}


def landing(**fields: Any) -> Landing:
    """A landing of which a test needs only some fields."""
    numbers = dict.fromkeys(Landing._fields, 0)
    lists = ("group_norms", "counted", "left_out", "outlying", "wrong_buffers")
    groups = dict.fromkeys(lists, ())
    spans = {"transfer": (1.0, 1.5), "land": (9.0, 10.0)}
    defaults = {"diagnostics": None, "spans": spans, "on_link_s": 0.5}
    return Landing(**{**numbers, **groups, **defaults, **fields})


class ShownByRank(NamedTuple):
    """Lines, bytes of the landings, and landings of the first fragment, in a fit of one rank."""

    lines: list[str]
    sent_bytes: list[int]
    landings: list[Landing]


class World(NamedTuple):
    """A fit of two groups, with its records and its timeline."""

    folder: Path
    ranks: list[ShownByRank]

    @property
    def records(self) -> Path:
        return self.folder / "sdiloco"

    @property
    def timeline(self) -> Path:
        return self.folder / "traces" / "trace.json"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    """Two groups of one rank and of two, by the number of all ranks."""
    fits_by_size = {}
    for world_size in (2, 4):
        folder = tmp_path_factory.mktemp("world")
        fits_by_size[world_size] = World(folder, run_processes(fitted, world_size, folder))
    return fits_by_size


def fitted(rank: int, world_size: int, folder: Path) -> ShownByRank:
    """Fits 14 steps."""
    messages = said_by(LIGHTNING, OTHER)
    landings = list[Landing]()

    def note(trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        landed = engine.history.last_landing
        # The final exchange sends more.
        if not engine.is_finished and landed and landed not in landings:
            landings.append(landed)

    settings = {"outer_lr": 0.75, "outer_momentum": 0.5, "mixing": 0.25, "compression": "fp32"}
    world = World(folder, [])
    monitor = StreamingDiLoCoMonitor(
        diagnostics=True, timeline=str(world.timeline), folder=str(world.records)
    )
    arguments = {
        "callbacks": [monitor, fits.on(on_train_batch_end=note)],
        "log_every_n_steps": 2,
    }
    fit(rank, world_size, 2, 14, {**SHORT, **settings, **EQUALISED}, trainer_choices=arguments)
    lines = [text for text in messages if text.startswith("Streaming DiLoCo")]
    sent_bytes = sorted({landed.bytes_sent for landed in landings})
    return ShownByRank(lines, sent_bytes, [landed for landed in landings if landed.fragment == 0])


# Diagnostics


class Launch(NamedTuple):
    """A launch of the second layer: its outer parameters, and the outer gradients of all groups."""

    outer: Tensor
    gradients: list[Tensor]


def launch_of(groups: SimulatedGroups, models: Sequence[Any]) -> Launch:
    outer_state = groups.outer_state_dict()
    outer = parameters_to_vector([outer_state["2.weight"], outer_state["2.bias"]])
    gradients = [outer - parameters_to_vector(model[2].parameters()).detach() for model in models]
    return Launch(outer, gradients)


def momentum_of(groups: SimulatedGroups, group: int) -> Tensor:
    record = groups.engines[group].state_dict()["fragments"][1]
    return record["state"]["momentum_buffer"]


def decoded(gradient: Tensor) -> Tensor:
    codec = FP4()
    values = torch.empty_like(gradient)
    codec.decode(codec.encode(gradient), values)
    return values


def assert_diagnosed(landed: Landing, launch: Launch, group: int, momentum: Tensor) -> None:
    gradient = launch.gradients[group]
    received = [decoded(own_gradient) for own_gradient in launch.gradients]
    mean = torch.stack(received).mean(dim=0)
    norms = [float(own_gradient.norm()) for own_gradient in launch.gradients]
    cosines = [float(torch.cosine_similarity(values, mean, dim=0)) for values in received]
    distance = float(gradient.norm() / launch.outer.norm())
    error = float((received[group] - gradient).norm() / gradient.norm())
    diagnostics = landed.diagnostics
    assert diagnostics is not None
    assert 0.01 < error < 0.5
    assert landed.group_norms == pytest.approx(norms, rel=1e-5)
    assert diagnostics.cosines == pytest.approx(cosines, rel=1e-5)
    assert diagnostics.local_distance == pytest.approx(distance, rel=1e-5)
    assert diagnostics.outer_momentum_norm == pytest.approx(float(momentum.norm()), rel=1e-5)
    assert diagnostics.compression_error == pytest.approx(error, rel=1e-4)


def assert_same_diagnostics(actual: Landing, expected: Landing) -> None:
    assert actual.diagnostics is not None
    assert expected.diagnostics is not None
    for name, number in expected.diagnostics._asdict().items():
        assert getattr(actual.diagnostics, name) == pytest.approx(number, rel=1e-4), name


def test_diagnostics_are_those_of_a_direct_computation() -> None:
    models = [mlp(), mlp()]
    groups = SimulatedGroups(
        models, sync_every=2, overlap_steps=1, fragments=LAYERS, compression="fp4"
    )
    for engine in groups.engines:
        engine.rounds.diagnose()
    optimizers = [inner_optimizer("sgd", model) for model in models]
    launches: dict[int, Launch] = {}
    compared = 0
    for step in range(1, 9):
        for group, model in enumerate(models):
            train_step(model, optimizers[group], group, step)
        if 1 in groups.engines[0].rounds.timetable.schedule.launches(step):
            launches[step] = launch_of(groups, models)
        for group, landings in enumerate(groups.step()):
            for landed in landings:
                if landed.fragment == 1:
                    launch = launches[landed.launched_at]
                    assert_diagnosed(landed, launch, group, momentum_of(groups, group))
                    compared += 1
    assert compared == 6


def test_diagnostics_add_up_over_shards(worlds: dict[int, World]) -> None:
    of_single_ranks = [shown.landings[0] for shown in worlds[2].ranks]
    of_shards = [shown.landings[0] for shown in worlds[4].ranks]
    assert_same_diagnostics(of_shards[0], of_single_ranks[0])
    assert_same_diagnostics(of_shards[1], of_single_ranks[0])
    assert_same_diagnostics(of_shards[2], of_single_ranks[1])


# A monitor


true_time = time.time


def shift_clock(seconds: float) -> None:
    """Shifts the clock of this rank."""
    time.time = lambda: true_time() + seconds


def flights_of(rank: Rank) -> dict[tuple[int, int, bool], LandingRecord]:
    return {(flight.launched_at, flight.fragment, flight.final): flight for flight in rank.landings}


def assert_flights_overlap(first: Rank, second: Rank) -> None:
    first_flights = flights_of(first)
    second_flights = flights_of(second)
    assert first_flights.keys() == second_flights.keys() != set()
    for key, flight in first_flights.items():
        first_spans = flight.spans
        second_spans = second_flights[key].spans
        last_launch = max(first_spans["launch"][0], second_spans["launch"][0])
        first_end = min(first_spans["flight"][1], second_spans["flight"][1])
        assert last_launch < first_end + 1e-6


@in_ranks(2)
def test_a_monitor_changes_no_bit_of_training_and_aligns_clocks(rank: int, tmp_path: Path) -> None:
    policies = {"schedule": Selective(), "weighing": ByNorm(), "mixing": Carry()}
    cases = [
        ("fp4", {}, 1000.0),
        ("sparse", {"compression": "sparse"}, -1000.0),
        ("policies", policies, 0.0),
    ]
    for name, choices, shift in cases:
        folder = tmp_path / name
        plain = fit(rank, 2, 2, 11, {**SHORT, **choices})
        shift_clock(shift * rank)
        monitor = monitoring(folder=str(folder))
        watched = fit(rank, 2, 2, 11, {**SHORT, **choices}, trainer_choices=monitor)
        assert same(plain["outer"], watched["outer"]), name
        sent_bytes = watched["report"]["bytes_sent"]
        assert sent_bytes == plain["report"]["bytes_sent"], "no traffic between groups either"
        torch.distributed.barrier()
        ranks = read_run(folder).ranks
        began = json.loads((folder / "rank_00001.jsonl").read_text().splitlines()[0])["time"]
        assert ranks[1].starts[0][0] == pytest.approx(began - shift, abs=5)
        assert_flights_overlap(ranks[0], ranks[1])
    settings = ranks[0].about["settings"]
    assert settings["mixing"] == "Carry()"
    assert settings["schedule"] == repr(Selective())


@in_ranks(2)
def test_monitors_that_ranks_do_not_share_or_that_watch_ddp_are_refused(
    rank: int, tmp_path: Path
) -> None:
    unequal = monitoring(folder=str(tmp_path), diagnostics=rank == 0)
    assert "diagnostics" in refusal(fit, rank, 2, 2, 6, SHORT, trainer_choices=unequal)
    trainer = fits.trainer(strategy="ddp", devices=2, **monitoring(), max_steps=1)
    assert "the strategy is DDPStrategy" in refusal(trainer.fit, fits.module(), [0])


def test_a_monitor_is_refused_when_it_is_made_without_a_valid_path() -> None:
    for name in ("timeline", "folder"):
        message = refusal(StreamingDiLoCoMonitor, **{name: True})
        expected = f"{name}=True is of type bool, not a path. Pass a path, for example {name}='"
        assert message.startswith(expected)
        StreamingDiLoCoMonitor(**{name: Path("somewhere")})
    message = refusal(StreamingDiLoCoMonitor, diagnostics="no")
    assert message.startswith("diagnostics='no' is not a Boolean")


# Lines about the outer optimizer


OUTER_OPTIMIZERS = {
    "SGD(lr=0.001, momentum=0)": torch.optim.SGD,
    "SGD(lr=0.4, momentum=0.8, nesterov=True)": partial(
        torch.optim.SGD, lr=0.4, momentum=0.8, nesterov=True
    ),
    "AdamW(lr=0.0625, betas=(0.9, 0.999))": OuterOptimizer(
        partial(torch.optim.AdamW, lr=torch.tensor(0.0625))
    ),
}


def train_with_fabric(strategy: Any) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = mlp()
    model, optimizer = fabric.setup(net, inner_optimizer("sgd", net))
    fabric.backward(model(torch.ones(8, 5)).square().mean())
    optimizer.step()
    fabric.strategy.finish()


def lines_with(messages: list[str], words: str) -> list[str]:
    return [line for line in messages if words in line]


@in_ranks(2)
def test_the_first_line_shows_rate_and_momentum_of_any_outer_optimizer(rank: int) -> None:
    for summary, make in OUTER_OPTIMIZERS.items():
        choices = {"sync_every": 2, "fragments": 1, "outer_optimizer": make}
        messages = said_by(LIGHTNING, OTHER, "lightning.fabric", "lightning_sdiloco")
        strategy = StreamingDiLoCoStrategy(**choices)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=3)
        trainer.fit(fits.module(), fits.SomeBatches(rank, 4))
        train_with_fabric(StreamingDiLoCoFabricStrategy(**choices))
        first_lines = lines_with(messages, "The first launch follows")
        summaries = lines_with(first_lines, f", outer_optimizer={summary}. ")
        assert len(summaries) == 2 * (rank == 0), messages
        warnings = lines_with(messages, f"The outer optimizer is {summary}")
        assert len(warnings) == 2 * (rank == 0) * (make is torch.optim.SGD)


# A schedule counts with the rate that it reaches.
REACHES_MORE = OuterOptimizer(lr_schedule=partial(LinearLR, start_factor=0.01))
STAYS_LOW = OuterOptimizer(lr_schedule=partial(LambdaLR, lr_lambda=lambda _: 0.01))


@pytest.mark.parametrize(
    ("choices", "is_low"),
    [
        ({"outer_optimizer": torch.optim.SGD}, True),
        ({"outer_optimizer": partial(torch.optim.AdamW, lr=0.01)}, True),
        ({"outer_lr": 0.04}, True),
        ({"outer_lr": 0.05}, False),
        ({}, False),
        ({"outer_optimizer": REACHES_MORE}, False),
        ({"outer_optimizer": STAYS_LOW}, True),
    ],
)
def test_a_low_outer_rate_is_warned_of_once_in_a_loop_of_ones_own(
    choices: dict[str, Any], is_low: bool, caplog: pytest.LogCaptureFixture
) -> None:
    SimulatedGroups([mlp() for _ in range(3)], **choices)
    warnings = lines_with(caplog.messages, "hardly follows")
    assert len(warnings) == is_low
    for line in warnings:
        assert "partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)" in line


# Records


def steps_of(rank: Rank) -> list[int]:
    return [step.step for step in rank.steps]


def limiting(path: Path) -> Any:
    """A callback that limits files of rank 1 to the length of this one, from step 6 to step 9."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 6:
            nearly_full = (path.stat().st_size + 20, limits[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, nearly_full)
        if trainer.global_rank == 1 and trainer.global_step == 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return fits.on(on_train_batch_start=limit)


@in_ranks(2)
def test_a_record_that_finds_no_room_ends_with_a_warning_and_training_goes_on(
    rank: int, tmp_path: Path
) -> None:
    path = tmp_path / "rank_00001.jsonl"
    messages = said_by("lightning_sdiloco")
    message = refusal(read_run, tmp_path)
    assert "contains no records (rank_00000.jsonl and so on). Pass a folder" in message
    # The next start of the run does not suffer from half a line.
    for callbacks in ([limiting(path)], []):
        monitor = StreamingDiLoCoMonitor(folder=str(tmp_path))
        arguments = {"callbacks": [monitor, *callbacks]}
        report = fit(rank, 2, 2, 11, SHORT, trainer_choices=arguments)["report"]
        assert report["inner_steps"] == 11
    warnings = lines_with(messages, "cannot be written")
    assert [f"{path} " in text for text in warnings] == [True] * rank
    torch.distributed.barrier()
    first, second = read_run(tmp_path).ranks
    assert steps_of(first) == [*range(1, 12)] * 2
    assert steps_of(second) == [*range(1, 7), *range(1, 12)]
    assert [len(first.starts), len(second.starts)] == [2, 2]


# Scalars and progress bars


UNKNOWN_RATE = landing(bytes_sent=1_000_000, bytes_received=1_000_000, on_link_s=math.nan)


def test_the_link_rate_is_the_busier_directions_and_unknown_numbers_are_not_shown() -> None:
    busy_downlink = landing(bytes_sent=1_000_000, bytes_received=3_000_000)
    assert busy_downlink.link_gbit_s == pytest.approx(0.048)
    assert landing().link_gbit_s == 0
    assert "sdiloco/link_gbit_s" not in scalars_of(UNKNOWN_RATE)
    # One group without momentum has neither other groups to compare with nor a momentum.
    groups = SimulatedGroups([nn.Linear(2, 2)], sync_every=1, overlap_steps=0, outer_momentum=0.0)
    groups.engines[0].rounds.diagnose()
    scalars = scalars_of(groups.step()[0][0])
    assert "sdiloco/local_distance" in scalars
    assert "sdiloco/outer_momentum_norm" not in scalars
    assert "sdiloco/cosine_group_0" not in scalars
    assert not any(math.isnan(number) for number in scalars.values())


def test_progress_fits_into_a_line_and_shows_neither_unknown_rates_nor_dense_rounds() -> None:
    engine = SimpleNamespace(
        rounds=SimpleNamespace(
            in_flight=(0, 1, 2, 3),
            timetable=Timetable(Schedule(20, 5, 4, DenseBeginning(rounds=3)), Every(), 10),
        ),
        fragmented_model=SimpleNamespace(outer_steps=12),
        history=SimpleNamespace(last_landing=UNKNOWN_RATE),
        inner_steps=310,
    )
    assert progress(engine, columns=34) == {"outer_step": "12", "in_flight": "0, 1, +2"}
    assert progress(engine)["link"] == "-"
    engine.inner_steps = 19
    assert progress(engine)["outer_step"] == "dense 2"


def test_an_interval_ends_after_a_round_with_the_share_that_did_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interval = Interval(sync_every=10, first_step=0)
    assert "sdiloco/peak_gbit_s" not in interval.scalars_with(UNKNOWN_RATE._replace(landed_at=10))
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        interval = Interval(sync_every=10, first_step=0)
    fast = landing(landed_at=5, exposed_wait_s=1.0, bytes_sent=125_000_000)
    assert interval.scalars_with(fast) == {}
    scalars = interval.scalars_with(landing(landed_at=10, exposed_wait_s=1.5, bytes_sent=1))
    assert scalars == {"sdiloco/compute_utilisation": 0.75, "sdiloco/peak_gbit_s": 2.0}
    assert interval.scalars_with(landing(landed_at=15)) == {}


def link_rates(rank: int, world_size: int) -> list[float]:
    """Rates of a group that launches late, in steps 6 to 9, and of one that collects late."""
    topology = Topology.of_world(GroupLayout(2, 2), timedelta(seconds=30))
    engine = StreamingDiLoCo(
        nn.Linear(1000, 1000), topology=topology, sync_every=2, overlap_steps=1, compression="fp32"
    )
    exchange = engine.topology.exchange
    post = exchange.post
    rates: list[float] = []

    def post_and_stall(*messages: Any) -> Any:
        posted = post(*messages)
        if rank == 0 and engine.inner_steps < 6:
            time.sleep(0.3)
        return posted

    exchange.post = post_and_stall
    for step in range(1, 12):
        if rank == 1 and 6 <= step < 10:
            time.sleep(0.2)
        rates += [landed.link_gbit_s for landed in engine.step()]
    engine.finish()
    return rates


def test_a_message_that_waited_for_its_receiver_gives_no_rate() -> None:
    """Two groups on a loopback of some Gbit/s, of which one launches late, and one looks late."""
    first, second = run_ranks(link_rates, 2)
    # 32 Mbit in no less than their time on the link: neither the rate that 0.2 seconds would give,
    # nor an infinite one.
    for rate in (*first, *second):
        assert math.isnan(rate) or 0.2 < rate < 60, (first, second)
    assert all(math.isnan(rate) for rate in first[:2]), first


# Loggers


def fit_with_loggers(rank: int, world_size: int, folder: Path) -> None:
    """Fits three groups in two shots with two loggers and validations."""

    def validation_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(parts), sync_dist=True)

    loggers = importlib.import_module(f"{OTHER}.loggers")
    both = [loggers.CSVLogger(folder, "", ""), loggers.TensorBoardLogger(folder / "board", "", "")]
    monitor = lightning_sdiloco.pytorch_lightning.StreamingDiLoCoMonitor(diagnostics=True)
    intervals = {"log_every_n_steps": 2, "val_check_interval": 4}
    fit(
        rank,
        world_size,
        3,
        15,
        {**SHORT, **EQUALISED},
        OTHER,
        trainer_choices={"callbacks": [monitor], "logger": both, **intervals},
        make=partial(fits.module, validation_step=validation_step),
        loader=fits.SomeBatches(rank, 16),
        validation=fits.SomeBatches(0, 2),
    )


def columns_of(path: Path) -> dict[str, list[str]]:
    """Our columns in a file of the CSVLogger."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    columns = {}
    for name in rows[0]:
        if name.startswith("sdiloco/"):
            columns[name] = [row[name] for row in rows]
    return columns


def assert_columns(columns: dict[str, list[str]]) -> None:
    """Every scalar is in the file for every logged step with a landing, and on the page."""
    for name in ("sdiloco/link_gbit_s", "sdiloco/peak_gbit_s"):
        columns.pop(name, None)
    assert len(columns) == 28
    shares = [float(share) for share in columns.pop("sdiloco/compute_utilisation") if share]
    assert [0 <= share <= 1 for share in shares] == [True] * 2
    rows_with_landings = [n for n, norm in enumerate(columns["sdiloco/outer_grad_norm"]) if norm]
    assert rows_with_landings
    for name, cells in columns.items():
        assert f"| `{re.sub('_[012]$', '', name)}" in PAGE, name
        assert all(cells[number] for number in rows_with_landings), name


def assert_layout(events: EventAccumulator) -> None:
    """TensorBoard gets a layout of the scalars."""
    layout = Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    (section,) = layout.category
    assert section.title == "Streaming DiLoCo"
    charts = {chart.title: list(chart.multiline.tag) for chart in section.chart}
    assert charts["Outer gradient"] == [
        "sdiloco/outer_grad_norm",
        "sdiloco/direction_norm",
        "sdiloco/outer_grad_norm_group_.*",
    ]
    assert "sdiloco/outer_grad_norm_group_1" in events.Tags()["scalars"]


def test_three_groups_in_two_shots_are_logged_and_recorded_with_their_validations(
    tmp_path: Path,
) -> None:
    run_processes(fit_with_loggers, 3, tmp_path)
    assert_columns(columns_of(tmp_path / "metrics.csv"))
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert_layout(events)
    # Records are in the folder of the first logger.
    for rank in read_run(tmp_path / "sdiloco").ranks:
        assert {landed.exchange for landed in rank.landings} == {"two_shot"}
        assert [step for step, loss in rank.losses if loss > 0] == [2, 4, 6, 8, 10, 12, 14]
        assert [validation.step for validation in rank.validations] == [4, 8, 12]
        for validation in rank.validations:
            began, ended = validation.span
            assert validation.metrics.keys() == {"val_loss"}
            assert began < ended


class ShownByBar(NamedTuple):
    """The metrics of a progress bar after every batch, and its lines after the eleventh."""

    metrics: list[dict[str, Any]]
    lines: int


def fit_with_bar(rank: int, distribution: str, bar: Any, strategy: Any) -> ShownByBar:
    metrics: list[dict[str, Any]] = []
    console = Console(width=80, record=True, file=io.StringIO())

    def look(trainer: Any, module: Any, *_: Any) -> None:
        module.log("train_loss", 0.5, prog_bar=True)
        metrics.append(bar.get_metrics(trainer, module))
        if trainer.global_step == 11 and getattr(bar, "progress", None):
            console.print(bar.progress.get_renderable())

    looking = fits.on(distribution, on_train_batch_end=look)
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        devices=2,
        callbacks=[bar, looking],
        enable_progress_bar=True,
        max_steps=12,
    )
    trainer.fit(fits.module(distribution, seed=rank), fits.SomeBatches(rank, 20))
    return ShownByBar(metrics, len(console.export_text().strip().splitlines()))


@in_ranks(2)
def test_progress_bars_show_rounds_flights_waits_and_the_link_in_one_line_more(
    rank: int, distribution: str
) -> None:
    show = partial(fit_with_bar, rank, distribution)
    callbacks = callbacks_of(distribution)
    choices = {**SHORT, "overlap_steps": 3, "worker_groups": 2}

    metrics = show(callbacks.TQDMProgressBar(), fits.strategy(distribution, **choices)).metrics
    assert metrics[0].keys() >= {"outer_step", "in_flight", "exposed_wait", "link"}
    assert metrics[0]["exposed_wait"] == "-"
    assert metrics[0]["link"] == "-"
    assert metrics[8]["exposed_wait"].endswith(" ms")
    assert metrics[8]["link"].endswith("bit/s") or metrics[8]["link"] == "-"

    rich = partial(callbacks.RichProgressBar, console_kwargs={"width": 80})
    with_us = show(rich(), fits.strategy(distribution, **choices))
    with_ddp = show(rich(), "ddp")
    assert "outer_step" in with_us.metrics[0], "there is room for no more"
    assert with_ddp.lines <= with_us.lines <= with_ddp.lines + 1
    assert (with_ddp.lines > 0) == (rank == 0)


# The timeline


def intervals_of(rank: Rank) -> list[tuple[float, float, str]]:
    """The work and the waits of the training thread, in order."""
    intervals = [(*step.span, "step") for step in rank.steps]
    for landed in rank.landings:
        intervals += [(*landed.spans[name], name) for name in ("launch", "wait", "land")]
    return sorted(intervals)


def assert_in_order(landed: LandingRecord) -> None:
    spans = landed.spans
    launch_end = spans["launch"][1]
    flight_start, flight_end = spans["flight"]
    assert flight_start == pytest.approx(launch_end, abs=1e-5), "it starts at its launch"
    assert flight_end <= spans["wait"][1] + 1e-4, "and ends before its landing"
    phases = ("launch", "encode", "transfer", "decode", "outer_step", "land")
    for earlier, later in pairwise(phases):
        assert spans[earlier][1] <= spans[later][0] + 1e-5, (earlier, later)


def test_the_intervals_of_the_training_thread_add_up_to_its_wall_time(
    worlds: dict[int, World],
) -> None:
    ranks = read_run(worlds[4].records).ranks
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert steps_of(rank) == list(range(1, 15))
        assert {landed.exchange for landed in rank.landings} == {"gather"}
        assert {landed.final for landed in rank.landings} == {False, True}
        intervals = intervals_of(rank)
        for earlier, later in pairwise(intervals):
            assert earlier[1] <= later[0] + 1e-5, f"{earlier} and {later} overlap"
        last_end = rank.steps[-1].done
        wall = last_end - rank.steps[0].span[0]
        busy = sum(ended - began for began, ended, _ in intervals if ended <= last_end + 1e-6)
        assert wall * 0.8 <= busy <= wall + 1e-4
        for landed in rank.landings:
            assert_in_order(landed)


Event = dict[str, Any]


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


def times_of_arrows(events: list[Event], phase: str) -> dict[int, float]:
    return {event["id"]: event["ts"] for event in events if event["ph"] == phase}


def assert_drawn(rank: int, events: list[Event]) -> None:
    """Asserts that the timeline shows every step and every flight of a rank."""
    (process,) = {event["args"]["name"] for event in named(events, "process_name")}
    assert process == f"group {rank}"
    rows = {event["tid"]: event["args"]["name"] for event in named(events, "thread_name")}
    assert rows == {
        0: "training",
        1: "fragment 0",
        2: "fragment 1",
        3: "fragment 2",
        4: "fragment 3",
    }
    assert len(named(events, "step")) == 14
    launches = []
    for event in named(events, "flight"):
        if event["ph"] == "X":
            launches.append((event["args"]["launched_at"], event["args"]["fragment"]))
    # Fragment p launches after inner steps 4 + p, 8 + p, 12 + p; what is in flight at the end
    # lands.
    assert sorted(launches) == [(step, (step - 4) % 4) for step in range(4, 15)]
    assert len(named(events, "final flight")) == 4
    starts = times_of_arrows(events, "s")
    ends = times_of_arrows(events, "f")
    assert starts.keys() == ends.keys()
    assert all(began < ends[number] for number, began in starts.items())


def test_the_timeline_has_every_rank_and_every_flight_from_launch_to_landing(
    worlds: dict[int, World],
) -> None:
    world = worlds[2]
    timeline = json.loads(world.timeline.read_text())
    run = read_run(world.records)
    assert timeline == json.loads(json.dumps(trace(run)))
    events = timeline["traceEvents"]
    for rank in run.ranks:
        assert_drawn(rank.rank, [event for event in events if event["pid"] == rank.rank])
    assert min(event["ts"] for event in events if "ts" in event) == 0
    # On hosts that keep time, nothing is shifted.
    start = json.loads((world.records / "rank_00001.jsonl").read_text().splitlines()[0])
    assert run.ranks[1].starts[0][0] == start["time"]


# Two lines in the log


BITS = {"kbit/s": 1e3, "Mbit/s": 1e6}
START = (
    "Streaming DiLoCo: 2 worker groups of 2 ranks, 4 fragments, sync_every=4, overlap_steps=2,"
    " outer_lr=0.75, outer_momentum=0.5, mixing=0.25, direction=equalised. Each rank sends"
    " {} bytes to {} bytes per fragment. The first launch follows inner step 4."
)


def without_numbers(text: str) -> str:
    """Returns a line without its numbers, and without the reason of a ``sync_every`` that was left
    out.
    """
    without = re.sub(r"[\d.]+( (bytes|kB|MB)| [kM]bit/s)?", "N", text)
    return without.replace(" (for the N,N inner steps of this fit)", "")


def lines_of(page: str) -> list[str]:
    return re.findall("^Streaming DiLoCo: .*", page, re.MULTILINE)


def test_one_line_lists_active_settings_and_another_the_load_of_the_link(
    worlds: dict[int, World],
) -> None:
    first, *further = worlds[4].ranks
    assert [shown.lines for shown in further] == [[]] * 3
    start, load = first.lines
    largest = first.sent_bytes[-1]
    assert start == START.format(first.sent_bytes[0], largest)
    (step_seconds,) = re.findall(r"an inner step takes (\S+) s", load)
    ((window, rate, unit),) = re.findall(r"leaves (\S+) s .* carry (\S+) ([kM]bit/s)", load)
    assert float(window) == pytest.approx(2 * float(step_seconds), rel=0.02)
    # All four fragments in four steps are more than the largest in two.
    assert float(rate) * BITS[unit] >= 8 * largest / float(window) * 0.98
    assert 1 <= float(rate) < 1000
    on_page = [without_numbers(line) for line in lines_of(PAGE)]
    assert on_page == [without_numbers(start), without_numbers(load)]
    # A guide shows them shortened, for groups of one rank.
    for shortened, line in zip(lines_of(CITIES), (start, load), strict=True):
        for part in shortened.replace("1 rank,", "2 ranks,").split("..."):
            assert without_numbers(part) in without_numbers(line), shortened
