"""Simulated groups of a real Trainer each: the same losses as real processes, and nothing left behind."""

import importlib
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_sdiloco.tools.simulate.groups import Configuration, Run, check, run
from lightning_sdiloco.tools.simulate.threads import Turns
from tests.ranks import run_processes

OURS = {
    "lightning.pytorch": ("lightning_sdiloco.StreamingDiLoCoStrategy", "Net", "Data"),
    "pytorch_lightning": ("lightning_sdiloco.pytorch_lightning.StreamingDiLoCoStrategy", "OtherNet", "OtherData"),
}
CHOICES = {"sync_every": 6, "overlap_steps": 2, "fragments": "strided:1"}


def write(folder: Path, distribution: str = "lightning.pytorch", **trainer: Any) -> str:
    """The file of a LightningCLI."""
    strategy, net, data = OURS[distribution]
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    config = {
        "seed_everything": 3,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 30,
            "strategy": {"class_path": strategy, "init_args": CHOICES},
            **off,
            **trainer,
        },
        "model": {"class_path": f"tests.simulated.{net}"},
        "data": {"class_path": f"tests.simulated.{data}"},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


def simulated(file: str, groups: int = 2, *arguments: str, **choices: Any) -> Run:
    return run(Configuration((file,), arguments), groups, choices)


def losses(result: Run) -> list[list[float]]:
    return [group.losses for group in result.groups]


# The same as real processes


def real(rank: int, world_size: int, distribution: str, arguments: list[str]) -> dict[str, Any]:
    """Fits in this process, one of several, as a script with a LightningCLI would."""
    package = importlib.import_module(distribution)
    told: dict[str, Any] = {"losses": [], "validations": []}

    class Losses(package.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            told["losses"].append(float(outputs["loss"]))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                told["validations"].append(float(trainer.callback_metrics["val_loss"]))

    cli = importlib.import_module(f"{distribution}.cli").LightningCLI(
        args=["fit", *arguments, f"--trainer.devices={world_size}"],
        trainer_defaults={"callbacks": [Losses()]},
        save_config_callback=None,
    )
    return {**told, "outer": cli.trainer.strategy.outer_state_dict(), "report": cli.trainer.strategy.report()}


@pytest.mark.parametrize(
    ("distribution", "groups", "compression", "trainer"),
    [
        ("lightning.pytorch", 2, "fp32", {}),
        ("lightning.pytorch", 3, "fp4", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("pytorch_lightning", 2, "fp4", {"precision": "bf16-mixed"}),
    ],
)
def test_the_simulator_gives_the_losses_of_real_processes(
    distribution: str, groups: int, compression: str, trainer: dict[str, Any], tmp_path: Path
) -> None:
    file = write(tmp_path, distribution, **trainer)
    arguments = [f"--config={file}", f"--trainer.strategy.init_args.compression={compression}"]
    expected = run_processes(real, groups, distribution, arguments)
    result = simulated(file, groups, compression=compression)
    assert losses(result) == [rank["losses"] for rank in expected]
    assert len({tuple(group.losses) for group in result.groups}) == groups, "each has its own part of the data"
    for rank, group in zip(expected, result.groups, strict=True):
        assert group.bytes_sent == rank["report"]["bytes_sent"] > 0
        assert group.inner_steps == 30
        assert all(torch.equal(result.outer[name], values) for name, values in rank["outer"].items())
    logged = [validation.metrics["val_loss"] for validation in result.validations]
    assert logged == pytest.approx(expected[0]["validations"], rel=1e-6)
    assert len(logged) > 0


@pytest.mark.parametrize("more", [(), ("muon",)])
def test_the_demo_fits_as_its_own_command_line_would(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if more and not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch 2.9, which has Muon")
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = importlib.import_module("pretrain_text")
    files = tuple(str(examples / "configs" / f"{name}.yaml") for name in ("base", "streaming_fp4", *more))
    small = ("model.layers=1", "model.width=16", "model.heads=2", "data.context=16", "trainer.max_steps=6")
    off = ("trainer.enable_checkpointing=false", "trainer.limit_val_batches=0", "trainer.logger=false")
    configuration = Configuration(files, (*small, *off), script.PretrainCLI, script.ByteGPT, script.StandardLibraryText)
    result = run(configuration, 2, {"sync_every": 3, "overlap_steps": 1})
    assert [group.inner_steps for group in result.groups] == [6, 6]
    assert all(loss > 3 for group in result.groups for loss in group.losses)


# What is told


def test_the_outer_model_is_evaluated_on_the_last_batches(tmp_path: Path) -> None:
    # The last ten batches of both groups are all the data, which the last validation sees too.
    data = ["data.length=100", "trainer.max_steps=20"]
    result = simulated(write(tmp_path), 2, *data, sync_every=5, overlap_steps=0)
    assert result.validations[-1].step == 20
    assert result.outer_loss == pytest.approx(result.validations[-1].metrics["val_loss"])


def test_a_module_that_trains_by_hand_is_not_evaluated(tmp_path: Path) -> None:
    result = simulated(write(tmp_path), 2, "model.class_path=tests.simulated.ByHand")
    assert result.outer_loss is None
    assert len(result.groups[0].losses) == 30


def test_a_configuration_without_arguments_of_the_strategy_takes_the_defaults(tmp_path: Path) -> None:
    for strategy in ("auto", "streaming_diloco", "streaming_diloco_ddp_fork"):
        arguments = check(Configuration((write(tmp_path, strategy=strategy),)), 2, {"overlap_steps": 3})
        assert (arguments.get("sync_every", 100), arguments["overlap_steps"]) == (100, 3)


def test_a_simulated_run_is_resumed_exactly(tmp_path: Path) -> None:
    checkpoint = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(tmp_path), "save_top_k": -1},
    }
    file = write(tmp_path, enable_checkpointing=True, callbacks=[checkpoint], max_steps=-1, max_epochs=3)
    whole = simulated(file)
    resumed = simulated(file, 2, f"ckpt_path={tmp_path / 'epoch=0-step=12.ckpt'}")
    # Twelve batches make an epoch, and with the twelfth a fragment is launched.
    assert losses(resumed) == [group.losses[12:] for group in whole.groups]
    assert all(torch.equal(resumed.outer[name], values) for name, values in whole.outer.items())


# What is left behind


def test_choices_replace_those_of_the_file_and_nothing_is_left_behind(tmp_path: Path) -> None:
    environment, threads = dict(os.environ), threading.active_count()
    torch.manual_seed(11)
    random.seed(12)
    expected = torch.get_rng_state(), random.getstate()
    result = simulated(write(tmp_path), 3, sync_every=10, compression="bf16", outer_lr=0.7)
    assert (result.settings.sync_every, result.settings.compression, result.settings.outer_lr) == (10, "bf16", 0.7)
    assert result.settings.overlap_steps == 2
    assert len(result.groups) == 3
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert dict(os.environ) == environment
    assert threading.active_count() == threads


# What goes wrong


def test_an_error_in_one_group_ends_all_and_is_raised(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="the data of this group is broken"):
        simulated(write(tmp_path), 3, "model.fails_in_group=1")
    assert threading.active_count() == threads


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[list[str], int, str]] = [
        (["trainer.strategy=ddp"], 2, "trainer.strategy='ddp' cannot be simulated"),
        (["trainer.devices=4", "trainer.strategy.init_args.worker_groups=2"], 2, "2 worker groups for 4 processes"),
        (["trainer.max_steps=0"], 2, "trains nothing"),
        (["trainer.strategy.init_args.sync_every=2"], 2, "overlap_steps=2 is out of range"),
        ([], 0, "groups=0 is out of range"),
    ]
    for arguments, groups, words in cases:
        with pytest.raises(ValueError, match=words):
            simulated(write(tmp_path), groups, *arguments)


def test_groups_that_wait_for_different_things_are_told_at_once() -> None:
    turns: Turns[None] = Turns(2)
    with pytest.raises(RuntimeError, match="wait for others that wait for something else or have ended: 0"):
        turns.run([lambda: turns.until(lambda: False), lambda: None])


def test_the_clock_of_a_thread_stands_still_while_others_run() -> None:
    turns: Turns[float] = Turns(2)
    done = []

    def first() -> float:
        started = turns.seconds()
        turns.until(lambda: bool(done))
        return turns.seconds() - started

    def second() -> float:
        started = turns.seconds()
        threading.Event().wait(0.2)
        done.append(True)
        return turns.seconds() - started

    waited, worked = turns.run([first, second])
    assert waited < 0.1 < 0.2 <= worked
