"""Fits with uneven data go on, from a checkpoint, to the bits of one that was not interrupted."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import (
    CHOICES,
    Place,
    Stateful,
    Stream,
    assert_together,
    epochs,
    noting,
    run_fit,
    stream,
)
from tests.ranks import run_processes


def dropping(distribution: str, seed: int) -> Any:
    """A module that draws random numbers in training and, as a generative one may, in validation."""
    base = type(noting(distribution, seed=seed))

    class Dropping(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*self.net, nn.Dropout(0.2))

        def validation_step(self, parts: Any, index: int) -> None:
            super().validation_step((parts[0] + torch.randn_like(parts[0]), parts[1]), index)

    return Dropping()


class Sized(Stateful):
    """Announces a length, and can be taken up again in the middle; its place does not wait for the first batch."""

    def __init__(self, place: Place, batches: int, announced: int) -> None:
        super().__init__(place, batches)
        self.announced = announced

    def __len__(self) -> int:
        return self.announced

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self.resumed = self.step if self.resumed else 0, False
        return self._from(start)

    def _from(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step, parts in enumerate(list(self.stream)[start:], start + 1):
            self.step = step
            yield parts


class Once(Stream):
    """Has batches in the first epoch only."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super().__iter__()
        self.batches = 0


def only_once(place: Place, resumed: bool) -> Any:
    # The resumed fit begins with the second epoch.
    return DataLoader(Once(place, 0 if resumed else 5), batch_size=None) if place[0] else stream(place, 50)


@dataclass
class Case:
    """Loaders of two groups, their epochs, when a fit saves, and from which of its checkpoints it goes on."""

    loader: Callable[[Place, bool], Any]
    epochs: list[int]
    saves: dict[str, Any]
    steps: tuple[int, ...]
    is_after_all: bool = False  # Whether what is due at the end of the batch was done when it saved.
    choices: dict[str, Any] = field(default_factory=lambda: {"max_epochs": 3})


EVERY_STEP = {"every_n_train_steps": 1}
CASES = {
    # 5: the last batch; 9: idle, the request in flight; 11: in the next epoch; 16: idle, just launched.
    "while a group is idle": Case(
        lambda place, _: Stateful(place, 5 + 20 * place[0]), [10, 8, 8], EVERY_STEP, (5, 9, 11, 16)
    ),
    "after an epoch": Case(
        lambda place, _: Stateful(place, 5 + 20 * place[0]), [10, 8, 8], {"every_n_epochs": 1}, (10,), True
    ),
    # The loader of the second group is cut short.
    "with the last batch of an epoch of known length": Case(
        lambda place, _: Sized(place, 5 + 3 * place[0], 5 + 3 * place[0]), [5, 5, 5], EVERY_STEP, (5,)
    ),
    # 5: the last batch of an epoch; 6: the first; 9: in flight.
    "where all end together": Case(
        lambda place, _: Stateful(place, 5),
        [5, 5, 3],
        EVERY_STEP,
        (5, 6, 9),
        choices={"max_steps": 13, "max_epochs": -1},
    ),
    "without data in the next epoch": Case(
        only_once, [10, 4], {"every_n_epochs": 1, "save_on_train_epoch_end": True}, (10,), True, {"max_epochs": 2}
    ),
    # The first group logged nothing in training_step since then, and no launch tells of it before the agreed length.
    "idle up to the agreed length": Case(
        lambda place, _: Sized(place, 5 + 4 * place[0], 9),
        [9, 9],
        EVERY_STEP,
        (7,),
        choices={"max_epochs": 2, "choices": {**CHOICES, "sync_every": 20}},
    ),
}


def run_cases(rank: int, world_size: int, names: list[str], distribution: str, folder: Path) -> Any:
    """For each case what a fit did, and what those did that went on from its checkpoints."""
    callbacks = importlib.import_module(distribution).callbacks
    found = []
    for number, name in enumerate(names):
        case, folders = CASES[name], folder / str(number)

        def run(step: int, case: Case = case, folders: Path = folders) -> dict[str, Any]:
            saving = callbacks.ModelCheckpoint(folders / str(step), filename="{step}", save_top_k=-1, **case.saves)
            return run_fit(
                rank,
                world_size,
                lambda place: case.loader(place, step > 0),
                distribution,
                make=dropping,
                resume=str(folders / "0" / f"step={step}.ckpt") if step else None,
                callbacks=[saving],
                enable_checkpointing=True,
                inspect=lambda trainer, module: trainer.fit_loop.epoch_loop._batches_that_stepped,
                **case.choices,
            )

        found.append((run(0), [run(step) for step in case.steps]))
    return found


@pytest.mark.parametrize(
    ("distribution", "names"),
    [(LIGHTNING, list(CASES)), ("pytorch_lightning", ["while a group is idle", "without data in the next epoch"])],
)
def test_a_fit_resumed_gives_the_bits_of_one_that_was_not_interrupted(
    distribution: str, names: list[str], tmp_path: Path
) -> None:
    ranks = run_processes(run_cases, 2, names, distribution, tmp_path, timeout=240.0)
    for name, results in zip(names, zip(*ranks, strict=True), strict=True):
        case = CASES[name]
        assert epochs(assert_together([plain for plain, _ in results])) == case.epochs, name
        for plain, all_resumed in results:
            at = {(epoch, batch): step for epoch, batch, step in plain["common"]["batches"]}
            for step, resumed in zip(case.steps, all_resumed, strict=True):
                told, ours, theirs = (name, step), resumed["common"], plain["common"]
                assert ours["batches"] == [noted for noted in theirs["batches"] if noted[2] > step], told
                assert ours["validated"] == [v for v in theirs["validated"] if at[v] >= step + case.is_after_all], told
                assert ours["metrics"] == theirs["metrics"], told
                assert resumed["idle"] == [idle for idle in plain["idle"] if idle > step], told
                assert resumed["inspected"] == plain["inspected"], told
                assert all(torch.equal(resumed["outer"][key], values) for key, values in plain["outer"].items()), told


def test_a_fit_that_ended_by_steps_has_looked_at_no_batch_that_a_longer_one_misses(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        callbacks = importlib.import_module(LIGHTNING).callbacks
        saving = callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1)
        path = str(tmp_path / "step=3.ckpt")
        choices = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": 3}
        trained = run_fit(rank, world_size, lambda place: Stateful(place, 8), **choices)
        again = run_fit(rank, world_size, lambda place: Stateful(place, 8), resume=path, max_steps=8)
        return trained["common"]["batches"] + again["common"]["batches"]

    for noted in run_processes(run, 2):
        assert [step for _, _, step in noted] == list(range(1, 9))
