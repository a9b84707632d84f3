"""Signals end all ranks after the same inner step, with a checkpoint that goes on as if nothing had happened."""

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import fits
from tests.fits import LIGHTNING
from tests.ranks import run_processes
from tests.test_checkpoint import CHOICES, StatefulBatches, assert_same, traced
from tests.training import batch

DISTRIBUTIONS = [LIGHTNING, "pytorch_lightning"]
STEPS = 30
# With CHOICES fragment p launches after 8 + 2p, 16 + 2p, ... and lands five steps later.
SIGNALLED, ENDED = 14, 19


class Epochs(StatefulBatches):
    """A loader that can be taken up again in the middle, and starts anew after its end."""

    def __init__(self, group: int, shard: int, shards: int, length: int) -> None:
        super().__init__(group, shard, shards, length)
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.step == self.length:
            self.step, self.epoch = 0, self.epoch + 1
        group, shard, shards = self.place
        while self.step < self.length:
            self.step += 1
            x, y = batch(group, self.step + self.epoch * self.length)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]


Signalled = dict[str, dict[int, list[int]]]
"""Hook -> step that runs or has just been made -> signals that the process gets there."""


def listening(distribution: str, seed: int, signalled: Signalled, said: list[str]) -> Any:
    """A traced module that sends its own process signals, and notes what happens between steps."""
    base = type(traced(distribution, seed))

    class Listening(base):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            stepped = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            self.trace[self.trainer.global_step]["batches that stepped"] = torch.tensor(stepped)

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self._signal("training_step", self.trainer.global_step + 1)
            return super().training_step(parts, index)

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            said.append(f"validation batch {index} after step {self.trainer.global_step}")
            self._signal("validation_step", self.trainer.global_step)

        def on_train_epoch_end(self) -> None:
            said.append(f"epoch end after step {self.trainer.global_step}")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            said.append(f"save after step {self.trainer.global_step}")
            self._signal("on_save_checkpoint", self.trainer.global_step)

        def on_train_end(self) -> None:
            self._signal("on_train_end", self.trainer.global_step)

        def _signal(self, hook: str, step: int) -> None:
            for number in signalled.get(hook, {}).get(step, ()):
                os.kill(os.getpid(), number)

    model = Listening()
    model.trace = {}
    return model


def run(
    rank: int,
    world_size: int,
    folder: Path,
    signalled: dict[int, Signalled],
    resume: str | None = None,
    distribution: str = LIGHTNING,
    length: int = 100,
    limits: dict[str, Any] | None = None,
    checkpoints: bool = True,
    **choices: Any,
) -> dict[str, Any]:
    """Fits in this rank of two groups, and returns what happened."""
    size, said = world_size // 2, []
    model = listening(distribution, rank, signalled.get(rank, {}), said)
    callbacks = importlib.import_module(distribution).callbacks
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=2, **CHOICES),
        devices=world_size,
        default_root_dir=folder,
        enable_checkpointing=checkpoints,
        callbacks=[callbacks.ModelCheckpoint(folder / "checkpoints", save_top_k=0)] if checkpoints else [],
        **{"max_steps": STEPS, "num_sanity_val_steps": 0, **(limits or {}), **choices},
    )
    torch.manual_seed(100 + rank)
    ended = ""
    try:
        trainer.fit(
            model,
            Epochs(rank // size, rank % size, size, length),
            Epochs(0, 0, 1, 3) if limits else None,
            ckpt_path=resume,
        )
    except BaseException as error:
        ended = type(error).__name__
    return {
        "trace": model.trace,
        "said": said,
        "ended": ended,
        "step": trainer.global_step,
        "outer": trainer.strategy.outer_state_dict() if not ended else {},
    }


TERMINATED = {"training_step": {SIGNALLED: [signal.SIGTERM]}}


@pytest.mark.parametrize(
    ("distribution", "world_size", "signalled"),
    [(LIGHTNING, 2, 0), (LIGHTNING, 2, 1), (LIGHTNING, 4, 2), ("pytorch_lightning", 2, 1)],
)
def test_a_fit_that_one_rank_was_told_to_terminate_goes_on_as_if_nothing_had_happened(
    distribution: str, world_size: int, signalled: int, tmp_path: Path, caplog: Any
) -> None:
    plain = run_processes(run, world_size, tmp_path, {}, None, distribution)
    ended = run_processes(run, world_size, tmp_path, {signalled: TERMINATED}, None, distribution)
    assert [(rank["ended"], rank["step"]) for rank in ended] == [("SIGTERMException", ENDED)] * world_size
    saved = tmp_path / "checkpoints" / f"terminated-step={ENDED}.ckpt"
    assert list(tmp_path.rglob("*.ckpt")) == [saved]
    for one, other in zip(run_processes(run, world_size, tmp_path, {}, str(saved), distribution), plain, strict=True):
        assert one["ended"] == ""
        assert sorted(one["trace"]) == list(range(ENDED, STEPS))
        for at, values in one["trace"].items():
            assert_same(values, other["trace"][at])
        assert_same(one["outer"], other["outer"])


@pytest.mark.parametrize("limits", [{"max_epochs": 4, "max_steps": -1}, {"max_steps": 32}])
@pytest.mark.parametrize(
    ("length", "validation", "place"),
    [
        (19, {}, "the end of an epoch with its validation"),
        (19, {"limit_val_batches": 0}, "the end of an epoch without validation"),
        (8, {"val_check_interval": 19, "check_val_every_n_epoch": None}, "a validation in the middle of an epoch"),
        (8, {"check_val_every_n_epoch": 2}, "in the middle of an epoch"),
    ],
)
def test_what_is_due_where_a_fit_ends_is_done_once(
    length: int, validation: dict[str, Any], limits: dict[str, Any], place: str, tmp_path: Path
) -> None:
    def fit(signalled: dict[int, Signalled], resume: str | None = None) -> Any:
        return run_processes(run, 2, tmp_path, signalled, resume, LIGHTNING, length, {**limits, **validation})

    plain, ended = fit({}), fit({1: TERMINATED})
    assert [(rank["ended"], rank["step"]) for rank in ended] == [("SIGTERMException", ENDED)] * 2
    resumed = fit({}, str(tmp_path / "checkpoints" / f"terminated-step={ENDED}.ckpt"))
    for one, first, other in zip(resumed, ended, plain, strict=True):
        assert [*first["said"], *one["said"]] == [
            *other["said"][: len(first["said"]) - 1],
            f"save after step {ENDED}",
            *other["said"][len(first["said"]) - 1 :],
        ]
        assert one["trace"].keys() == {at for at in other["trace"] if at >= ENDED}
        for at, values in one["trace"].items():
            assert_same(values, other["trace"][at])
        assert_same(one["outer"], other["outer"])
