"""``sdiloco simulate``: groups with a Trainer each have the losses of real processes, and what is
told of them.
"""

import importlib
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import yaml

from lightning_sdiloco.algorithm.config import Settings, recommended
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.compression import resolve
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.planning.methods import Absence
from lightning_sdiloco.planning.workload import Model
from lightning_sdiloco.tools.simulate.groups import Configuration, Run, check, run
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places, play_sites
from lightning_sdiloco.tools.simulate.threads import Turns
from tests.ranks import run_processes
from tests.tools import command
from tests.tools.command import not_refused_with
from tests.tools.simulated import Net

STRATEGY = "StreamingDiLoCoStrategy"
MODULES = "tests.tools.simulated"
LARGE = (f"lightning_sdiloco.{STRATEGY}", "tests.large.models.Large", "tests.large.models.Data")
OTHER = f"lightning_sdiloco.pytorch_lightning.{STRATEGY}"
OURS = {
    "lightning.pytorch": (LARGE[0], f"{MODULES}.Net", f"{MODULES}.Data"),
    "pytorch_lightning": (OTHER, f"{MODULES}.OtherNet", f"{MODULES}.OtherData"),
}
CHOICES = {"sync_every": 6, "overlap_steps": 2, "fragments": "strided:1"}
LINK = ["--bandwidth=0.001Gbit", "--round-trip=0.05", "--step-time=0.1"]


def write(folder: Path, kind: str = "lightning.pytorch", **trainer: Any) -> str:
    """The file of a LightningCLI, for a distribution or a large model."""
    strategy, net, data = OURS.get(kind, LARGE)
    own = {
        "accelerator": "cpu",
        "max_steps": 30,
        "strategy": {"class_path": strategy, "init_args": CHOICES},
    }
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    config = {
        "seed_everything": 3,
        "trainer": {**own, **off, **trainer},
        "model": {"class_path": net, "init_args": {} if kind in OURS else {"kind": kind}},
        "data": {"class_path": data},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


def simulated(file: str, groups: int = 2, *arguments: str, **choices: Any) -> Run:
    return run(Configuration((file,), arguments), groups, choices)


def losses(result: Run) -> list[list[float]]:
    return [group.losses for group in result.groups]


def told(folder: Path, *args: str) -> dict[str, Any]:
    """The JSON that the command writes, and the text that it prints."""
    text = command.told(
        "simulate", f"--config={write(folder)}", f"--json={folder / 'told.json'}", *args
    )
    return {**json.loads((folder / "told.json").read_text()), "text": text}


# The same as real processes


def real(rank: int, world_size: int, distribution: str, arguments: list[str]) -> dict[str, Any]:
    """Fits in this process, one of several, as a script with a LightningCLI would."""
    package = importlib.import_module(distribution)
    found: dict[str, Any] = {"losses": [], "validations": []}

    class Losses(package.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            found["losses"].append(float(outputs["loss"]))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                found["validations"].append(float(trainer.callback_metrics["val_loss"]))

    cli = importlib.import_module(f"{distribution}.cli").LightningCLI(
        args=["fit", *arguments, f"--trainer.devices={world_size}"],
        trainer_defaults={"callbacks": [Losses()]},
        save_config_callback=None,
    )
    return {
        **found,
        "outer": cli.trainer.strategy.outer_state_dict(),
        "report": cli.trainer.strategy.report(),
    }


@pytest.mark.parametrize(
    ("kind", "groups", "compression", "trainer"),
    [
        ("lightning.pytorch", 3, "fp4", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("pytorch_lightning", 2, "fp32", {"precision": "bf16-mixed"}),
        pytest.param(
            "deep", 3, "sparse", {"max_steps": 9, "val_check_interval": 4}, marks=pytest.mark.large
        ),
        pytest.param(
            "normed", 3, "int4", {"max_steps": 9, "val_check_interval": 4}, marks=pytest.mark.large
        ),
    ],
)
def test_the_simulator_gives_the_losses_of_real_processes(
    kind: str, groups: int, compression: str, trainer: dict[str, Any], tmp_path: Path
) -> None:
    file = write(tmp_path, kind, **trainer)
    arguments = [f"--config={file}", f"--trainer.strategy.init_args.compression={compression}"]
    distribution = kind if kind in OURS else "lightning.pytorch"
    expected = run_processes(real, groups, distribution, arguments)
    result = simulated(file, groups, compression=compression)
    assert losses(result) == [rank["losses"] for rank in expected]
    assert len({tuple(group.losses) for group in result.groups}) == groups, (
        "each has its own part of the data"
    )
    for rank, group in zip(expected, result.groups, strict=True):
        assert group.bytes_sent == rank["report"]["bytes_sent"] > 0
        assert group.inner_steps == trainer.get("max_steps", 30)
        assert all(
            torch.equal(result.outer[name], values) for name, values in rank["outer"].items()
        )
    logged = [validation.metrics["val_loss"] for validation in result.validations]
    assert logged == pytest.approx(expected[0]["validations"], rel=1e-6)
    assert len(logged) > 0


def test_the_demo_fits_as_its_own_command_line_would(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = importlib.import_module("pretrain_text")
    small = (
        "model.layers=1",
        "model.width=16",
        "model.heads=2",
        "data.context=16",
        "trainer.max_steps=6",
    )
    off = (
        "trainer.enable_checkpointing=false",
        "trainer.limit_val_batches=0",
        "trainer.logger=false",
    )
    # torch has Muon since 2.9.
    for more in ((), ("muon",))[: 1 + hasattr(torch.optim, "Muon")]:
        files = tuple(
            str(examples / "configs" / f"{name}.yaml") for name in ("base", "streaming_fp4", *more)
        )
        own = (script.PretrainCLI, script.ByteGPT, script.StandardLibraryText)
        result = run(
            Configuration(files, (*small, *off), *own), 2, {"sync_every": 3, "overlap_steps": 1}
        )
        assert [group.inner_steps for group in result.groups] == [6, 6]
        assert all(loss > 3 for group in result.groups for loss in group.losses)


def test_the_outer_model_is_evaluated_on_the_last_batches_unless_trained_by_hand(
    tmp_path: Path,
) -> None:
    # The last ten batches of both groups are all the data, which the last validation sees too.
    file = write(tmp_path, max_steps=20)
    result = simulated(file, 2, "data.length=100", sync_every=5, overlap_steps=0)
    assert result.validations[-1].step == 20
    assert result.outer_loss == pytest.approx(result.validations[-1].metrics["val_loss"])
    by_hand = simulated(file, 2, "model.by_hand=true")
    assert (by_hand.outer_loss, len(by_hand.groups[0].losses)) == (None, 20)
    # A configuration without arguments of the strategy takes the defaults.
    for strategy in ("auto", "streaming_diloco", "streaming_diloco_ddp_fork"):
        arguments = check(
            Configuration((write(tmp_path, strategy=strategy),)), 2, {"overlap_steps": 3}
        )
        assert (arguments.get("sync_every", 100), arguments["overlap_steps"]) == (100, 3)


def test_a_simulated_run_is_resumed_exactly(tmp_path: Path) -> None:
    folder = {"dirpath": str(tmp_path), "save_top_k": -1}
    checkpoint = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": folder}
    file = write(
        tmp_path, enable_checkpointing=True, callbacks=[checkpoint], max_steps=-1, max_epochs=2
    )
    whole = simulated(file)
    resumed = simulated(file, 2, f"ckpt_path={tmp_path / 'epoch=0-step=12.ckpt'}")
    # Twelve batches make an epoch, and with the twelfth a fragment is launched.
    assert losses(resumed) == [group.losses[12:] for group in whole.groups]
    assert all(torch.equal(resumed.outer[name], values) for name, values in whole.outer.items())


def test_choices_replace_those_of_the_file_and_nothing_is_left_behind(tmp_path: Path) -> None:
    environment = dict(os.environ)
    threads = threading.active_count()
    torch.manual_seed(11)
    random.seed(12)
    expected = torch.get_rng_state(), random.getstate()
    file = write(tmp_path, max_steps=12)
    result = simulated(file, 3, sync_every=10, compression="bf16", outer_lr=0.7)
    assert (result.settings.sync_every, result.settings.compression, result.settings.outer_lr) == (
        10,
        "bf16",
        0.7,
    )
    assert (result.settings.overlap_steps, len(result.groups)) == (2, 3)
    with pytest.raises(RuntimeError, match="the data of this group is broken"):
        simulated(file, 3, "model.fails_in_group=1")
    with pytest.raises(ValueError, match="trains nothing"):
        simulated(file, 2, "trainer.max_steps=0")
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert dict(os.environ) == environment
    assert threading.active_count() == threads


# Threads that take turns


def test_groups_that_wait_in_vain_get_an_error_and_a_clock_stops_while_others_run() -> None:
    turns: Turns[Any] = Turns(2)
    with pytest.raises(
        RuntimeError, match="wait for groups that wait for something else or have ended: 0"
    ):
        turns.run([lambda: turns.until(lambda: False), lambda: None])
    turns = Turns(2)
    done = threading.Event()

    def timed(work: Callable[[], object]) -> float:
        started = turns.seconds()
        work()
        return turns.seconds() - started

    def second() -> None:
        done.wait(0.2)
        done.set()

    waited, worked = turns.run(
        [lambda: timed(lambda: turns.until(done.is_set)), lambda: timed(second)]
    )
    assert waited < 0.1 < 0.2 <= worked


# What the command tells


def test_one_run_reports_losses_bytes_and_time(tmp_path: Path) -> None:
    answer = told(tmp_path, *LINK, "--set=trainer.max_steps=12", "--absence=1:1-4000")
    text = answer["text"]
    chosen = recommended(direction="elementwise")
    for line in (
        "2 worker groups, 12 inner steps each, 74 parameters",
        f"overlap_steps=2, mixing={chosen.mixing}, compression='fp4', outer_lr={chosen.outer_lr},"
        " outer_momentum=",
        "Outer model: loss ",
        "val_loss",
        "Predicted on 1 Mbit/s in each direction, 50 ms round trip, 0.1 s per inner step:",
        "DDP over all groups",
        "longer than timeout: a real run would end with an ExchangeError",
    ):
        assert line in text
    assert len([line for line in text.splitlines() if line[:2].strip() in ("0", "1")]) == 2
    assert max(map(len, text.splitlines()[:-1])) <= 120
    (only,) = answer["runs"]
    assert ([len(losses) for losses in only["losses"]], only["inner_steps"]) == ([12, 12], [12, 12])
    # Two fragments were launched after 6, 9 and 12 inner steps, and once more at the end.
    sizes = list(Model.of_parameters(trainable(Net())).fragments(Settings(fragments="strided:1")))
    launches = [("fp4", 0), ("fp4", 1), ("fp4", 0), ("fp32", 0), ("fp32", 1)]
    payload = sum(
        resolve(code).wire_bytes(sizes[fragment]) + CONTROL_BYTES for code, fragment in launches
    )
    assert payload <= only["bytes_sent"][0] <= payload + 5 * 2 * 8 * 4, "and buffers of BatchNorm"
    assert answer["circumstances"]["link"] == {"gbit_s": 0.001, "round_trip": 0.05, "loss": 0.0}


def test_speeds_and_absences_change_the_time_and_no_loss(tmp_path: Path) -> None:
    (even,), (uneven,) = (
        told(tmp_path, *LINK, *more)["runs"] for more in ((), ("--speeds=1,0.5", "--absence=0:1-3"))
    )
    assert even["losses"] == uneven["losses"]
    assert even["prediction"]["seconds"] > 30 * 0.1
    # Half as fast; a part of the absence of the other falls into the time that it waits anyway.
    assert 3 < uneven["prediction"]["seconds"] - even["prediction"]["seconds"] < 3 + 1.5
    # Three seconds of training; of the two of absence, some may be a wait as well.
    rest = uneven["prediction"]["seconds"] - 3
    assert rest - 2 - 0.1 < uneven["prediction"]["waited"][0] < rest
    assert uneven["prediction"]["ddp_seconds"] > even["prediction"]["ddp_seconds"] + 3
    # Nobody waits for a group whose loader is paced: from the first landing on it trains every
    # other inner step.
    paced = ["--set=data.paced=true", "--set=trainer.max_steps=60", "--set=trainer.max_epochs=-1"]
    (run_,) = told(tmp_path, *paced, *LINK, "--speeds=1,0.5")["runs"]
    first, second = run_["losses"]
    assert len(first) == 60
    assert 30 < len(second) < 38
    assert run_["prediction"]["seconds"] < 60 * 0.1 + 1.5


def test_a_sweep_runs_every_combination_and_shows_them_in_a_table(tmp_path: Path) -> None:
    sweeps = [
        "--sweep=groups=2,3",
        "--sweep=sync_every=5,10",
        "--sweep=compression=fp4",
        "--set=trainer.max_steps=12",
    ]
    # In the first round a validation takes an exchange of its own.
    answer = told(tmp_path, *sweeps, "--set=trainer.limit_val_batches=0")
    runs = answer["runs"]
    every = [(2, 5), (2, 10), (3, 5), (3, 10)]
    assert [(one["groups"], one["choices"]["sync_every"]) for one in runs] == every
    assert [(len(one["losses"]), int(one["settings"]["sync_every"])) for one in runs] == every
    rows = [line.split()[:3] for line in answer["text"].splitlines() if "fp4" in line]
    assert rows == [[str(groups), str(sync_every), "fp4"] for groups, sync_every in every]
    assert "redicted" not in answer["text"], "without a link"
    rarely, more_often, among_three = (runs[number]["bytes_sent"][0] for number in (1, 0, 2))
    # Twice as many others, but with two shots each gets a part.
    assert rarely < more_often < among_three < 2 * more_often


METHODS = """
as it is: {}
rarer: {schedule: {class_path: lightning_sdiloco.Selective, init_args: {threshold: 1.0e+9}}}
carry: {mixing: {class_path: lightning_sdiloco.Carry}, groups: 3}
"""


def test_methods_are_compared_by_name_and_seeds_pair_by_pair(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "methods.yaml").write_text(METHODS)
    methods = f"--methods={tmp_path / 'methods.yaml'}"
    picture = f"--picture={tmp_path / 'methods.svg'}"
    answer = told(tmp_path, methods, picture, "--set=trainer.max_steps=18", *LINK)
    plain, rarer, carry = answer["runs"]
    assert rarer["prediction"]["waited"][0] < plain["prediction"]["waited"][0], (
        "what was not launched takes no time"
    )
    assert rarer["bytes_sent"][0] < plain["bytes_sent"][0]
    assert (carry["groups"], carry["settings"]["mixing"]) == (3, "Carry()")
    names = ["as it is", "rarer", "carry"]
    assert [one["name"] for one in answer["runs"]] == names
    rows = [line.partition("  ")[0].strip() for line in answer["text"].splitlines()]
    assert [row for row in rows if row in names] == names

    sweep = ["--sweep=compression=fp32,fp32", "--seeds=3,4"]
    picture = f"--picture={tmp_path / 'seeds.svg'}"
    answer = told(tmp_path, *sweep, picture, "--set=trainer.max_steps=12", *LINK)
    runs = answer["runs"]
    assert [one["seed"] for one in runs] == [3, 4, 3, 4]
    assert runs[0]["losses"] == runs[2]["losses"] != runs[1]["losses"], "the seed alone decides"
    assert (tmp_path / "seeds.svg").read_text().count("compression=fp32") == 1, (
        "one line of the legend"
    )
    assert "+0.0 ± 0.0" in answer["text"]
    assert "Means over 2 seeds" in answer["text"]


DEVICES = ["--set=trainer.devices=4", "--set=trainer.strategy.init_args.worker_groups=2"]
REFUSED = [
    ([], "--config must be given"),
    (["--config=missing.yaml"], "config='missing.yaml' is not a file"),
    (["FILE", "--groups=0"], "groups=0 is out of range"),
    (
        ["FILE", "--sweep=width=1,2"],
        "varies 'width', which is unknown. Choose among groups, sync_every",
    ),
    (["FILE", "--sweep=sync_every"], "has no values"),
    (["FILE", "--sweep=groups=1.5"], "not a whole number"),
    (["FILE", "--sweep=sync_every=5", "--sweep=sync_every=6"], "names something twice"),
    (["FILE", "--sweep=compression=fp4,fp5"], "compression='fp5'"),
    (["FILE", "--sweep=overlap_steps=2,auto"], "overlap_steps='auto' cannot be simulated"),
    (
        ["FILE", "--round-trip=0.1"],
        "--round-trip is for predicting the time of a run on a link. Give its --bandwidth",
    ),
    (["FILE", "--bandwidth=1Gbit", "--speeds=1,x"], "speeds has 'x' where a number should be"),
    (["FILE", "--bandwidth=1Gbit", "--speeds=1"], "1 speeds for 2 worker groups"),
    (["FILE", "--cli=no_such.CLI"], "cli='no_such.CLI' cannot be imported"),
    (["FILE", "--set=trainer.no_such=1"], "no_such"),
    (["FILE", "--set=trainer.strategy=ddp"], "trainer.strategy='ddp' cannot be simulated"),
    (["FILE", *DEVICES], "2 worker groups for 4 processes"),
    (["FILE", "--seeds=1", "--sweep=sync_every=2,3"], "a comparison takes 2 to 10"),
    (["FILE", "--seeds=1,2"], "Say with --sweep or --methods what varies"),
    (["FILE", "--seeds=1,2", "--sites=2", "--step-time=1"], "do not work with --sites"),
    (["FILE", "--sites=2"], "--sites needs --step-time"),
    (["FILE", "--sites=1", "--step-time=1", "--absence=0:0-5"], "no site founds the run"),
    (["FILE", "--delays=1,2"], "Give --sites too"),
    (["--config=LIST"], "config='LIST' is not a YAML file of arguments"),
    (["--config=BROKEN"], "config='BROKEN' is not a YAML file of arguments"),
    (["FILE", "--methods=LIST"], "not a YAML file that maps names"),
    (["FILE", "--methods=RATE"], "'rate', which is unknown"),
]


@patch(
    "lightning_sdiloco.tools.simulate.command.run",
    Mock(side_effect=AssertionError("a run was started")),
)
def test_impossible_simulations_are_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"--config={write(tmp_path)}"
    monkeypatch.chdir(tmp_path)
    for name, text in (("LIST", "- a"), ("BROKEN", "a ?= b: c:"), ("RATE", "a: {rate: 3}")):
        Path(name).write_text(text)
    cases = [([file if arg == "FILE" else arg for arg in args], words) for args, words in REFUSED]
    assert not_refused_with("simulate", cases) == {}


# Sites of a federation in virtual time: the slow and the late cost the others nothing, and nothing
# counts twice

STEPS = 24
BATCH = 5


def test_slow_late_and_absent_sites_cost_others_nothing_and_their_steps_count_once(
    tmp_path: Path,
) -> None:
    def played(sites: int, federation: dict[str, Any] | None = None, **places: Any) -> FederatedRun:
        quiet = ("trainer.limit_val_batches=0", f"trainer.max_steps={STEPS}")
        configuration = Configuration((write(tmp_path),), quiet)
        return play_sites(
            configuration, sites, Places(step_time=1.0, **places), {"federation": federation or {}}
        )

    speed = 0.25
    even, uneven = (played(2, speeds=speeds) for speeds in ((1.0, 1.0), (1.0, speed)))
    fast, slow = uneven.sites
    # With its last step a site leaves, which may take as long as a round waits.
    assert fast.times[:-1] == even.sites[0].times[:-1]
    assert fast.times[-2] < STEPS < slow.times[int(STEPS * speed) + 1]
    assert slow.counted > 0 == even.sites[0].missed

    run = played(2, {"late": "carry"}, delays=(0.0, 12.0))
    on_time, late = run.sites
    assert on_time.late == 0 < late.late
    assert late.missed > 0
    assert max(late.weights[0]) > 6 * BATCH, "what was carried counts with what came after it"
    assert {sum(weights) for site in run.sites for weights in site.weights.values()} == {
        STEPS * BATCH
    }
    assert on_time.ended < late.ended

    run = played(3, absences=(Absence(1, 8.0, 40.0), Absence(2, 0.0, 12.0)))
    stays, stopped, joins = run.sites
    assert stays.times[-2] < STEPS
    assert stopped.times[6] < 8 < 40 < stopped.times[8]
    assert joins.times[0] > 12
    assert joins.counted > 0
    first = next(record for record in run.records if record.fragment == 0)
    assert [own.site for own in first.counted] == ["site-0", "site-1"]


def test_the_command_reports_each_site_reproducibly_with_the_configured_terms(
    tmp_path: Path,
) -> None:
    site = {
        "hub": "hub:1",
        "run": "llm",
        "site": "a",
        "insecure": True,
        "grace": 3.0,
        "lease": 60.0,
    }
    core = {"class_path": "tests.own_quorum.Core", "init_args": {"core": ["site-0", "site-1"]}}
    federation = {
        "class_path": "lightning_sdiloco.Federation",
        "init_args": {**site, "quorum": core},
    }
    strategy = {
        "class_path": OURS["lightning.pytorch"][0],
        "init_args": {**CHOICES, "federation": federation},
    }
    file = write(tmp_path, max_steps=STEPS, limit_val_batches=0, strategy=strategy)
    found = []
    args = [
        f"--config={file}",
        "--sites=3",
        "--step-time=1",
        "--bandwidth=0.001Gbit",
        "--delays=0,0,2",
    ]
    for name in ("one", "other"):
        found.append(
            (
                command.told("simulate", *args, f"--json={tmp_path / name}"),
                (tmp_path / name).read_text(),
            )
        )
    assert found[0] == found[1]
    text = found[0][0]
    sites = json.loads(found[0][1])["sites"]
    assert "3 sites, 74 parameters in 2 fragments" in text
    assert "grace=3 s, lease=60 s, quorum=tests.own_quorum.Core(core=['site-0', 'site-1'])" in text
    assert [len(site["losses"]) for site in sites] == [STEPS] * 3
    assert sites[0]["late"] == sites[1]["late"] == 0 < sites[2]["late"], "it is not waited for"
    assert max(map(len, text.splitlines())) <= 120
