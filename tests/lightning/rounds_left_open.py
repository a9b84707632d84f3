"""Callbacks for ranks of sites: one site leaves a round open, and another one is started again meanwhile.

All wait for the *moment*: some rounds have landed, nothing is in flight, and some steps are held. Every start comes to
it between a landing and its next launch. All ranks of a site come to it after the same step.
"""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_sdiloco.federation import Progress
from tests.lightning.federated_site import Notes

STEPS_HELD = 5
"""With them a site answers a call."""
GOES_ON = "goes_on"
"""The file for which a site waits that leaves a round open."""
HELD = "held.ckpt"
"""The checkpoint of the last moment."""


def progress(trainer: pl.Trainer) -> Progress:
    """What this rank knows of the only fragment."""
    (own,) = trainer.strategy.engine.loop.follower.fragments
    return own


def is_moment(own: Progress) -> bool:
    return own.applied.round >= 2 and own.flight is None and own.steps >= STEPS_HELD


def trained(trainer: pl.Trainer) -> Tensor:
    """What the site has trained: its outer parameters minus the local ones, whole and flat. All ranks call it."""
    outer = trainer.strategy.outer_state_dict()
    local = {name: own.detach().full_tensor() for name, own in trainer.lightning_module.named_parameters()}
    assert local.keys() == outer.keys()
    return torch.cat([(outer[name] - local[name]).flatten() for name in local])


def largest(values: Tensor) -> float:
    return float(values.abs().max())


class Leaves(Callback):
    """Trains until the moment, and then no more before there is a file: the next round stays open."""

    def __init__(self, notes: Notes, folder: Path) -> None:
        self._notes, self._goes_on, self._has_left = notes, folder.parent / GOES_ON, False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        own = progress(trainer)
        if self._has_left or not is_moment(own):
            return
        self._has_left = True
        self._notes.write(left=own.applied.round)
        while not self._goes_on.exists():
            time.sleep(0.05)


class Saves(Callback):
    """Saves at the moment of every round."""

    def __init__(self, notes: Notes, folder: Path) -> None:
        self._notes, self._path, self._round = notes, folder / HELD, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        own = progress(trainer)
        if is_moment(own) and own.applied.round > self._round:
            self._round = own.applied.round
            trainer.save_checkpoint(self._path)
            self._notes.write(saved=self._round, steps=own.steps, trained=largest(trained(trainer)))


class Compares(Callback):
    """Looks at what the site has trained, before its first step and around its first landing, and ends soon after."""

    def __init__(self, notes: Notes, folder: Path) -> None:
        self._notes, self._ends = notes, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if not self._ends:
            self._ends = -1
            self._notes.write(began=progress(trainer).applied.round, trained=largest(trained(trainer)))
            self._look_at(trainer)

    def _look_at(self, trainer: pl.Trainer) -> None:
        engine: Any = trainer.strategy.engine
        make_step = engine.step

        def step(**choices: Any) -> Any:
            round, before = progress(trainer).applied.round, trained(trainer)
            landings = make_step(**choices)
            if self._ends < 0 and progress(trainer).applied.round > round:
                after = trained(trainer)
                self._notes.write(landed=round + 1, trained=largest(after), other=largest(after - before))
                self._ends = engine.inner_steps + 2 * STEPS_HELD
            return landings

        engine.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if 0 < self._ends <= trainer.strategy.engine.inner_steps:
            trainer.should_stop = True
