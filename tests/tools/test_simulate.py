"""``sdiloco simulate``: groups with a Trainer each have the losses of real processes, and the
command reports them.
"""

import importlib
import json
import os
import random
import threading
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
from tests.bits import same
from tests.ranks import run_processes
from tests.scripts import ROOT
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
    strategy, net, data_module = OURS.get(kind, LARGE)
    config = {
        "seed_everything": 3,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 30,
            "strategy": {"class_path": strategy, "init_args": CHOICES},
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **trainer,
        },
        "model": {"class_path": net, "init_args": {} if kind in OURS else {"kind": kind}},
        "data": {"class_path": data_module},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


def simulated(file: str, groups: int = 2, *arguments: str, **choices: Any) -> Run:
    return run(Configuration((file,), arguments), groups, choices)


def losses(simulation: Run) -> list[list[float]]:
    return [group.losses for group in simulation.groups]


def answered(folder: Path, *args: str) -> dict[str, Any]:
    """The JSON that the command writes, and the text that it prints."""
    file = folder / "answer.json"
    text = command.told("simulate", f"--config={write(folder)}", f"--json={file}", *args)
    return {**json.loads(file.read_text()), "text": text}


# The same as real processes


def real(rank: int, world_size: int, distribution: str, arguments: list[str]) -> dict[str, Any]:
    """Fits in this process, one of several, as a script with a LightningCLI would."""
    package = importlib.import_module(distribution)
    losses: list[float] = []
    validations: list[float] = []

    class Losses(package.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                validations.append(float(trainer.callback_metrics["val_loss"]))

    cli = importlib.import_module(f"{distribution}.cli").LightningCLI(
        args=["fit", *arguments, f"--trainer.devices={world_size}"],
        trainer_defaults={"callbacks": [Losses()]},
        save_config_callback=None,
    )
    strategy = cli.trainer.strategy
    return {
        "losses": losses,
        "validations": validations,
        "outer": strategy.outer_state_dict(),
        "report": strategy.report(),
    }


@pytest.mark.parametrize(
    ("kind", "groups", "compression", "trainer"),
    [
        (
            "lightning.pytorch",
            3,
            "fp4",
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_steps": 15},
        ),
        ("pytorch_lightning", 2, "fp32", {"precision": "bf16-mixed", "max_steps": 15}),
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
    simulation = simulated(file, groups, compression=compression)
    assert losses(simulation) == [rank["losses"] for rank in expected]
    parts_of_data = {tuple(group.losses) for group in simulation.groups}
    assert len(parts_of_data) == groups
    for rank, group in zip(expected, simulation.groups, strict=True):
        assert group.bytes_sent == rank["report"]["bytes_sent"] > 0
        assert group.inner_steps == trainer["max_steps"]
        assert same(simulation.outer, rank["outer"])
    logged = [validation.metrics["val_loss"] for validation in simulation.validations]
    assert logged == pytest.approx(expected[0]["validations"], rel=1e-6)
    assert len(logged) > 0


SMALL_DEMO = (
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "data.context=16",
    "trainer.max_steps=6",
    "trainer.enable_checkpointing=false",
    "trainer.limit_val_batches=0",
    "trainer.logger=false",
)
DEMOS = [["base", "streaming_fp4"]]
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    DEMOS.append(["base", "streaming_fp4", "muon"])


def test_the_demo_fits_as_its_own_command_line_would(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = ROOT / "examples"
    monkeypatch.syspath_prepend(str(examples))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = importlib.import_module("pretrain_text")
    classes = (script.PretrainCLI, script.ByteGPT, script.StandardLibraryText)
    for names in DEMOS:
        files = tuple(str(examples / "configs" / f"{name}.yaml") for name in names)
        configuration = Configuration(files, SMALL_DEMO, *classes)
        simulation = run(configuration, 2, {"sync_every": 3, "overlap_steps": 1})
        assert [group.inner_steps for group in simulation.groups] == [6, 6]
        assert min(map(min, losses(simulation))) > 3


def test_the_outer_model_is_evaluated_on_the_last_batches_unless_trained_by_hand(
    tmp_path: Path,
) -> None:
    # The last ten batches of both groups are all the data, which the last validation sees too.
    file = write(tmp_path, max_steps=20)
    simulation = simulated(file, 2, "data.length=100", sync_every=5, overlap_steps=0)
    assert simulation.validations[-1].step == 20
    assert simulation.outer_loss == pytest.approx(simulation.validations[-1].metrics["val_loss"])
    by_hand = simulated(file, 2, "model.by_hand=true")
    assert by_hand.outer_loss is None
    assert len(by_hand.groups[0].losses) == 20


def test_a_configuration_without_arguments_of_the_strategy_takes_the_defaults(
    tmp_path: Path,
) -> None:
    for strategy in ("auto", "streaming_diloco", "streaming_diloco_ddp_fork"):
        configuration = Configuration((write(tmp_path, strategy=strategy),))
        arguments = check(configuration, 2, {"overlap_steps": 3})
        assert arguments.get("sync_every") is None
        assert arguments["overlap_steps"] == 3


def test_a_simulated_run_is_resumed_exactly(tmp_path: Path) -> None:
    checkpoint = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(tmp_path), "save_top_k": -1},
    }
    file = write(
        tmp_path, enable_checkpointing=True, callbacks=[checkpoint], max_steps=-1, max_epochs=2
    )
    unbroken = simulated(file)
    resumed = simulated(file, 2, f"ckpt_path={tmp_path / 'epoch=0-step=12.ckpt'}")
    # Twelve batches make an epoch, and with the twelfth a fragment is launched.
    assert losses(resumed) == [group.losses[12:] for group in unbroken.groups]
    assert same(resumed.outer, unbroken.outer)


def test_choices_replace_those_of_the_file_and_nothing_is_left_behind(tmp_path: Path) -> None:
    environment = dict(os.environ)
    threads = threading.active_count()
    torch.manual_seed(11)
    random.seed(12)
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    file = write(tmp_path, max_steps=12)
    simulation = simulated(file, 3, sync_every=10, compression="bf16", outer_lr=0.7)
    settings = simulation.settings
    assert (settings.sync_every, settings.compression, settings.outer_lr) == (10, "bf16", 0.7)
    assert settings.overlap_steps == 2
    assert len(simulation.groups) == 3
    with pytest.raises(RuntimeError, match="the data of this group is broken"):
        simulated(file, 3, "model.fails_in_group=1")
    with pytest.raises(ValueError, match="No training took place"):
        simulated(file, 2, "trainer.max_steps=0")
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert dict(os.environ) == environment
    assert threading.active_count() == threads


# Threads that take turns


def test_groups_that_wait_in_vain_get_an_error() -> None:
    turns: Turns[Any] = Turns(2)
    words = "waiting for groups that have ended or are waiting at a different point: 0"
    with pytest.raises(RuntimeError, match=words):
        turns.run([lambda: turns.until(lambda: False), lambda: None])


def test_the_clock_of_a_group_stops_while_others_run() -> None:
    turns: Turns[Any] = Turns(2)
    done = threading.Event()

    def wait() -> float:
        began = turns.seconds()
        turns.until(done.is_set)
        return turns.seconds() - began

    def work() -> float:
        began = turns.seconds()
        done.wait(0.2)
        done.set()
        return turns.seconds() - began

    waited, worked = turns.run([wait, work])
    assert waited < 0.1 < 0.2 <= worked


# The reports of the command


def test_one_run_reports_losses_bytes_and_time(tmp_path: Path) -> None:
    answer = answered(tmp_path, *LINK, "--set=trainer.max_steps=12", "--absence=1:1-4000")
    outer = recommended(direction="elementwise")
    text = answer["text"]
    for words in (
        "2 worker groups, 12 inner steps each, 74 parameters",
        f"overlap_steps=2, mixing={outer.mixing}, compression='fp4', outer_lr={outer.outer_lr},"
        " outer_momentum=",
        "Outer model: loss ",
        "val_loss",
        "Predicted on 1 Mbit/s in each direction, 50 ms round trip, 0.1 s per inner step:",
        "DDP over all groups",
        "which is longer than the timeout. A real run would end with an ExchangeError",
    ):
        assert words in text
    assert max(map(len, text.splitlines()[:-1])) <= 120
    rows_of_groups = [line for line in text.splitlines() if line[:2].strip() in ("0", "1")]
    assert len(rows_of_groups) == 2
    (report,) = answer["runs"]
    assert [len(losses) for losses in report["losses"]] == [12, 12]
    assert report["inner_steps"] == [12, 12]
    # Two fragments were launched after 6, 9 and 12 inner steps, and once more at the end.
    sizes = list(Model.of_parameters(trainable(Net())).fragments(Settings(fragments="strided:1")))
    payload = 0
    for code, fragment in (("fp4", 0), ("fp4", 1), ("fp4", 0), ("fp32", 0), ("fp32", 1)):
        payload += resolve(code).wire_bytes(sizes[fragment]) + CONTROL_BYTES
    buffers_of_batch_norm = 5 * 2 * 8 * 4
    assert payload <= report["bytes_sent"][0] <= payload + buffers_of_batch_norm
    assert answer["circumstances"]["link"] == {"gbit_s": 0.001, "round_trip": 0.05, "loss": 0.0}


def test_speeds_and_absences_change_the_time_and_no_loss(tmp_path: Path) -> None:
    (even,) = answered(tmp_path, *LINK)["runs"]
    (uneven,) = answered(tmp_path, *LINK, "--speeds=1,0.5", "--absence=0:1-3")["runs"]
    assert even["losses"] == uneven["losses"]
    predicted_even = even["prediction"]
    predicted = uneven["prediction"]
    assert predicted_even["seconds"] > 30 * 0.1
    # Half as fast; a part of the absence of the other falls into the time that it waits anyway.
    assert 3 < predicted["seconds"] - predicted_even["seconds"] < 3 + 1.5
    # Three seconds of training; of the two of absence, some may be a wait as well.
    not_training = predicted["seconds"] - 3
    assert not_training - 2 - 0.1 < predicted["waited"][0] < not_training
    assert predicted["ddp_seconds"] > predicted_even["ddp_seconds"] + 3


def test_nobody_waits_for_a_group_whose_loader_is_paced(tmp_path: Path) -> None:
    """From the first landing on it trains every other inner step."""
    settings = ("data.paced=true", "trainer.max_steps=60", "trainer.max_epochs=-1")
    options = [f"--set={setting}" for setting in settings]
    (paced,) = answered(tmp_path, *options, *LINK, "--speeds=1,0.5")["runs"]
    first, second = paced["losses"]
    assert len(first) == 60
    assert 30 < len(second) < 38
    assert paced["prediction"]["seconds"] < 60 * 0.1 + 1.5


def test_a_sweep_runs_every_combination_and_shows_them_in_a_table(tmp_path: Path) -> None:
    options = [
        "--sweep=groups=2,3",
        "--sweep=sync_every=5,10",
        "--sweep=compression=fp4",
        "--set=trainer.max_steps=12",
        # In the first round a validation takes an exchange of its own.
        "--set=trainer.limit_val_batches=0",
    ]
    answer = answered(tmp_path, *options)
    runs = answer["runs"]
    combinations = [(2, 5), (2, 10), (3, 5), (3, 10)]
    assert [(run["groups"], run["choices"]["sync_every"]) for run in runs] == combinations
    settings = [(len(run["losses"]), int(run["settings"]["sync_every"])) for run in runs]
    assert settings == combinations
    rows = [line.split()[:3] for line in answer["text"].splitlines() if "fp4" in line]
    assert rows == [[str(groups), str(sync_every), "fp4"] for groups, sync_every in combinations]
    assert "redicted" not in answer["text"], "without a link"
    more_often, rarely, among_three, _ = (run["bytes_sent"][0] for run in runs)
    # Twice as many others, but with two shots each gets a part.
    assert rarely < more_often < among_three < 2 * more_often


METHODS = """
as it is: {}
rarer: {schedule: {class_path: lightning_sdiloco.Selective, init_args: {threshold: 1.0e+9}}}
carry: {mixing: {class_path: lightning_sdiloco.Carry}, groups: 3}
"""


def test_methods_are_compared_by_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "methods.yaml"
    file.write_text(METHODS)
    options = [f"--methods={file}", f"--picture={tmp_path / 'methods.svg'}"]
    answer = answered(tmp_path, *options, "--set=trainer.max_steps=18", *LINK)
    plain, rarer, carry = answer["runs"]
    # A flight that was not launched takes no time.
    assert rarer["prediction"]["waited"][0] < plain["prediction"]["waited"][0]
    assert rarer["bytes_sent"][0] < plain["bytes_sent"][0]
    assert carry["groups"] == 3
    assert carry["settings"]["mixing"] == "Carry()"
    names = ["as it is", "rarer", "carry"]
    assert [run["name"] for run in answer["runs"]] == names
    rows = [line.partition("  ")[0].strip() for line in answer["text"].splitlines()]
    assert [row for row in rows if row in names] == names


def test_seeds_are_compared_pair_by_pair(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "seeds.svg"
    options = ["--sweep=compression=fp32,fp32", "--seeds=3,4", f"--picture={picture}"]
    answer = answered(tmp_path, *options, "--set=trainer.max_steps=12", *LINK)
    runs = answer["runs"]
    assert [run["seed"] for run in runs] == [3, 4, 3, 4]
    assert runs[0]["losses"] == runs[2]["losses"] != runs[1]["losses"], "the seed alone decides"
    lines_of_legend = picture.read_text().count("compression=fp32")
    assert lines_of_legend == 1
    assert "+0.0 ± 0.0" in answer["text"]
    assert "are means over 2 seeds" in answer["text"]


# options, with FILE for a sound configuration, and words of the error
REFUSED = {
    "": "--config is missing",
    "--config=missing.yaml": "config='missing.yaml' is not a file",
    "FILE --groups=0": "groups=0 is out of range",
    "FILE --sweep=width=1,2": "varies 'width', which is unknown. Choose among groups, sync_every",
    "FILE --sweep=sync_every": "has no values",
    "FILE --sweep=groups=1.5": "must be a whole number",
    "FILE --sweep=sync_every=5 --sweep=sync_every=6": "contains the same argument twice",
    "FILE --sweep=compression=fp4,fp5": "compression='fp5'",
    "FILE --sweep=overlap_steps=2,auto": "overlap_steps='auto' cannot be simulated",
    "FILE --round-trip=0.1": (
        "--round-trip is used only to predict the time of a run on a link. Also pass the --bandwidth"
    ),
    "FILE --bandwidth=1Gbit --speeds=1,x": "speeds has 'x' where a number is expected",
    "FILE --bandwidth=1Gbit --speeds=1": "1 speeds for 2 worker groups",
    "FILE --cli=no_such.CLI": "cli='no_such.CLI' cannot be imported",
    "FILE --set=trainer.no_such=1": "no_such",
    "FILE --set=trainer.strategy=ddp": "trainer.strategy='ddp' cannot be simulated",
    "FILE --set=trainer.devices=4 --set=trainer.strategy.init_args.worker_groups=2": (
        "2 worker groups for 4 processes"
    ),
    "FILE --seeds=1 --sweep=sync_every=2,3": "a comparison requires 2 to 10",
    "FILE --seeds=1,2": "Use --sweep or --methods to define several runs",
    "FILE --seeds=1,2 --sites=2 --step-time=1": "do not work with --sites",
    "FILE --sites=2": "--sites requires --step-time",
    "FILE --sites=1 --step-time=1 --absence=0:0-5": "no site founds the run",
    "FILE --delays=1,2": "Also pass --sites",
    "--config=LIST": "config='LIST' is not a YAML file of arguments",
    "--config=BROKEN": "config='BROKEN' is not a YAML file of arguments",
    "FILE --methods=LIST": "not a YAML file that maps names",
    "FILE --methods=RATE": "'rate', which is unknown",
}


@patch(
    "lightning_sdiloco.tools.simulate.command.run",
    Mock(side_effect=AssertionError("a run was started")),
)
def test_impossible_simulations_are_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"--config={write(tmp_path)}"
    monkeypatch.chdir(tmp_path)
    Path("LIST").write_text("- a")
    Path("BROKEN").write_text("a ?= b: c:")
    Path("RATE").write_text("a: {rate: 3}")
    cases = [(line.replace("FILE", file).split(), words) for line, words in REFUSED.items()]
    assert not_refused_with("simulate", cases) == {}


# Sites of a federation in virtual time: the slow and the late cost the others nothing, and nothing
# counts twice

STEPS = 24
BATCH = 5


def played(
    folder: Path, sites: int, federation: dict[str, Any] | None = None, **places: Any
) -> FederatedRun:
    arguments = ("trainer.limit_val_batches=0", f"trainer.max_steps={STEPS}")
    configuration = Configuration((write(folder),), arguments)
    options = {"federation": federation or {}}
    return play_sites(configuration, sites, Places(step_time=1.0, **places), options)


def test_a_slow_site_costs_others_no_time(tmp_path: Path) -> None:
    speed = 0.25
    even = played(tmp_path, 2, speeds=(1.0, 1.0))
    uneven = played(tmp_path, 2, speeds=(1.0, speed))
    fast, slow = uneven.sites
    # With its last step a site leaves, which may take as long as a round waits.
    assert fast.times[:-1] == even.sites[0].times[:-1]
    assert fast.times[-2] < STEPS < slow.times[int(STEPS * speed) + 1]
    assert slow.counted > 0 == even.sites[0].missed


def test_steps_of_a_site_whose_contributions_are_late_count_once(tmp_path: Path) -> None:
    run = played(tmp_path, 2, {"late": "carry"}, delays=(0.0, 12.0))
    on_time, late = run.sites
    assert on_time.late == 0 < late.late
    assert late.missed > 0
    assert max(late.weights[0]) > 6 * BATCH, "a carried contribution counts with the next one"
    for site in run.sites:
        for weights in site.weights.values():
            assert sum(weights) == STEPS * BATCH
    assert on_time.ended < late.ended


def test_absent_sites_cost_others_no_time(tmp_path: Path) -> None:
    run = played(tmp_path, 3, absences=(Absence(1, 8.0, 40.0), Absence(2, 0.0, 12.0)))
    stays, stopped, joins = run.sites
    assert stays.times[-2] < STEPS
    assert stopped.times[6] < 8 < 40 < stopped.times[8]
    assert joins.times[0] > 12
    assert joins.counted > 0
    first_record = next(record for record in run.records if record.fragment == 0)
    assert [entry.site for entry in first_record.counted] == ["site-0", "site-1"]


def federated_strategy() -> dict[str, Any]:
    """The strategy of a configuration whose federation has terms and a quorum of the user."""
    quorum = {"class_path": "tests.own_quorum.Core", "init_args": {"core": ["site-0", "site-1"]}}
    terms = {
        "hub": "hub:1",
        "run": "llm",
        "site": "a",
        "insecure": True,
        "grace": 3.0,
        "lease": 60.0,
        "quorum": quorum,
    }
    federation = {"class_path": "lightning_sdiloco.Federation", "init_args": terms}
    return {
        "class_path": f"lightning_sdiloco.{STRATEGY}",
        "init_args": {**CHOICES, "federation": federation},
    }


def test_the_command_reports_each_site_reproducibly_with_the_configured_terms(
    tmp_path: Path,
) -> None:
    strategy = federated_strategy()
    config = write(tmp_path, max_steps=STEPS, limit_val_batches=0, strategy=strategy)
    options = "--sites=3 --step-time=1 --bandwidth=0.001Gbit --delays=0,0,2"
    command_line = ["simulate", f"--config={config}", *options.split()]
    file = tmp_path / "sites.json"
    text = command.told(*command_line, f"--json={file}")
    answer = file.read_text()
    assert command.told(*command_line, f"--json={file}") == text
    assert file.read_text() == answer
    sites = json.loads(answer)["sites"]
    assert "3 sites, 74 parameters in 2 fragments" in text
    assert "grace=3 s, lease=60 s, quorum=tests.own_quorum.Core(core=['site-0', 'site-1'])" in text
    assert [len(site["losses"]) for site in sites] == [STEPS] * 3
    assert sites[0]["late"] == sites[1]["late"] == 0 < sites[2]["late"], "it is not waited for"
    assert max(map(len, text.splitlines())) <= 120
