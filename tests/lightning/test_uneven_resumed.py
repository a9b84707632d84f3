"""Fits with uneven data go on, from a checkpoint, to the bits of one that was not interrupted."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import (
    CHOICES,
    Announced,
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

DISTRIBUTIONS = [LIGHTNING, "pytorch_lightning"]


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


@pytest.mark.parametrize("loader", [Stateful, Announced])
def test_a_fit_resumed_from_the_end_of_an_epoch_gives_the_same_bits(loader: Any, tmp_path: Path) -> None:
    def fit_saving(resume: str | None = None) -> list[dict[str, Any]]:
        def run(rank: int, world_size: int) -> dict[str, Any]:
            pl = importlib.import_module(LIGHTNING)
            saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
            return run_fit(
                rank,
                world_size,
                lambda place: loader(place, 5 + 20 * place[0]),
                resume=resume,
                callbacks=[] if resume else [saving],
                enable_checkpointing=resume is None,
                max_epochs=3,
            )

        ranks = run_processes(run, 2)
        assert_together(ranks)
        return list(ranks)

    plain = fit_saving()
    for epoch in (0, 1):
        resumed = fit_saving(str(tmp_path / f"epoch={epoch}.ckpt"))
        for one, other in zip(resumed, plain, strict=True):
            assert one["common"]["batches"] == [noted for noted in other["common"]["batches"] if noted[0] > epoch]
            assert one["common"]["validated"] == other["common"]["validated"][epoch + 1 :]
            for name, values in other["outer"].items():
                assert torch.equal(one["outer"][name], values), name


def test_a_loader_that_is_cut_short_begins_anew_where_the_last_batch_of_an_epoch_is_resumed(tmp_path: Path) -> None:
    class Both(Stateful):
        def __len__(self) -> int:
            return self.stream.batches

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            start, self.resumed = self.step if self.resumed else 0, False
            return self.starting(start)

        def starting(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
            for step, parts in enumerate(list(self.stream)[start:], start + 1):
                self.step = step
                yield parts

    def fit_saving(resume: str | None = None) -> list[dict[str, Any]]:
        def run(rank: int, world_size: int) -> dict[str, Any]:
            pl = importlib.import_module(LIGHTNING)
            saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
            return run_fit(
                rank,
                world_size,
                lambda place: Both(place, 5 + 3 * place[0]),
                resume=resume,
                callbacks=[] if resume else [saving],
                enable_checkpointing=resume is None,
            )

        return list(run_processes(run, 2))

    plain = fit_saving()
    resumed = fit_saving(str(tmp_path / "step=5.ckpt"))
    assert epochs(assert_together(plain)) == [5, 5]
    for name, values in plain[0]["outer"].items():
        assert torch.equal(resumed[0]["outer"][name], values), name


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_fit_resumed_while_a_group_is_idle_gives_the_same_bits(distribution: str, tmp_path: Path) -> None:
    def fit_saving(folder: Path, resume: str | None = None) -> list[dict[str, Any]]:
        def run(rank: int, world_size: int) -> dict[str, Any]:
            pl = importlib.import_module(distribution)
            saving = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            return run_fit(
                rank,
                world_size,
                lambda place: Stateful(place, 5 + 20 * place[0]),
                distribution,
                make=dropping,
                resume=resume,
                callbacks=[saving],
                enable_checkpointing=True,
                max_epochs=3,
            )

        ranks = run_processes(run, 2)
        assert_together(ranks)
        return list(ranks)

    plain = fit_saving(tmp_path / "plain")
    assert epochs(plain[0]["common"]) == [10, 8, 8]
    # 5: the last batch; 7: idle; 9: idle, the request in flight; 11: in the next epoch; 16: idle, just launched.
    steps = (5, 7, 9, 11, 16, 18) if distribution == LIGHTNING else (7, 10)
    for step in steps:
        resumed = fit_saving(tmp_path / str(step), str(tmp_path / "plain" / f"step={step}.ckpt"))
        for one, other in zip(resumed, plain, strict=True):
            assert one["common"]["batches"] == [noted for noted in other["common"]["batches"] if noted[2] > step], step
            assert one["common"]["validated"] == other["common"]["validated"][sum(step > end for end in (10, 18, 26)) :]
            assert one["common"]["metrics"] == other["common"]["metrics"], step
            assert one["idle"] == [at for at in other["idle"] if at > step]
            for name, values in other["outer"].items():
                assert torch.equal(one["outer"][name], values), (step, name)


@pytest.mark.parametrize("saves", [{"every_n_train_steps": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": False}])
def test_a_fit_resumed_where_all_groups_end_together_gives_the_same_bits(saves: dict[str, Any], tmp_path: Path) -> None:
    def fit_saving(folder: Path, resume: str | None = None) -> list[dict[str, Any]]:
        def run(rank: int, world_size: int) -> dict[str, Any]:
            pl = importlib.import_module(LIGHTNING)
            return run_fit(
                rank,
                world_size,
                lambda place: Stateful(place, 5),
                make=dropping,
                resume=resume,
                callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **saves)],
                enable_checkpointing=True,
                max_steps=13,
                max_epochs=-1,
                inspect=lambda trainer, module: trainer.fit_loop.epoch_loop._batches_that_stepped,
            )

        ranks = run_processes(run, 2)
        assert_together(ranks)
        return list(ranks)

    plain = fit_saving(tmp_path / "plain")
    assert epochs(plain[0]["common"]) == [5, 5, 3]
    # 5: the last batch of an epoch, or after it; 6: the first; 9: in flight.
    for step in (4, 5, 6, 9, 10) if "every_n_train_steps" in saves else (5, 10):
        resumed = fit_saving(tmp_path / str(step), str(tmp_path / "plain" / f"step={step}.ckpt"))
        for one, other in zip(resumed, plain, strict=True):
            assert one["common"]["batches"] == [noted for noted in other["common"]["batches"] if noted[2] > step], step
            assert one["common"]["metrics"] == other["common"]["metrics"], step
            assert one["inspected"] == other["inspected"], step
            for name, values in other["outer"].items():
                assert torch.equal(one["outer"][name], values), (step, name)


def test_a_fit_that_ended_by_steps_has_looked_at_no_batch_that_a_longer_one_misses(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        pl = importlib.import_module(LIGHTNING)
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1)
        loader = Stateful((rank, 0, 1), 8)
        trained = run_fit(
            rank, world_size, lambda place: loader, callbacks=[saving], enable_checkpointing=True, max_steps=3
        )
        path = str(tmp_path / "step=3.ckpt")
        again = run_fit(rank, world_size, lambda place: Stateful(place, 8), resume=path, max_steps=8)
        return trained["common"]["batches"], again["common"]["batches"]

    for first, second in run_processes(run, 2):
        assert [noted[2] for noted in first + second] == list(range(1, 9))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_fit_resumed_where_a_group_has_no_data_in_the_next_epoch_gives_the_same_bits(
    distribution: str, tmp_path: Path
) -> None:
    class Once(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from super().__iter__()
            self.batches = 0

    def fit_saving(resume: str | None = None) -> list[dict[str, Any]]:
        def loader(place: Place) -> Any:
            # The resumed fit begins with the second epoch.
            return DataLoader(Once(place, 0 if resume else 5), batch_size=None) if place[0] else stream(place, 50)

        def run(rank: int, world_size: int) -> dict[str, Any]:
            pl = importlib.import_module(distribution)
            saving = pl.callbacks.ModelCheckpoint(
                tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True
            )
            return run_fit(
                rank, world_size, loader, distribution, make=dropping, resume=resume, callbacks=[saving],
                enable_checkpointing=True,
            )  # fmt: skip

        return list(run_processes(run, 2))

    plain = fit_saving()
    assert epochs(assert_together(plain)) == [10, 4]
    for one, other in zip(fit_saving(str(tmp_path / "epoch=0.ckpt")), plain, strict=True):
        assert one["common"]["batches"] == [noted for noted in other["common"]["batches"] if noted[0] > 0]
        for name, values in other["outer"].items():
            assert torch.equal(one["outer"][name], values), name


def test_a_group_that_is_idle_since_a_resume_makes_nobody_wait_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    """It logged nothing in training_step since then, and no launch tells of it before the agreed length is reached."""

    class Both(Stateful):
        def __len__(self) -> int:
            return 9

    def fit_saving(resume: str | None = None) -> list[dict[str, Any]]:
        def run(rank: int, world_size: int) -> dict[str, Any]:
            pl = importlib.import_module(LIGHTNING)
            saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            return run_fit(
                rank,
                world_size,
                lambda place: Both(place, 5 + 4 * place[0]),
                resume=resume,
                callbacks=[] if resume else [saving],
                enable_checkpointing=resume is None,
                choices={**CHOICES, "sync_every": 20},
            )

        ranks = run_processes(run, 2)
        assert_together(ranks)
        return list(ranks)

    plain = fit_saving()
    resumed = fit_saving(str(tmp_path / "step=7.ckpt"))
    assert [rank["idle"] for rank in resumed] == [[8, 9, 15, 16, 17, 18], []]
    for name, values in plain[0]["outer"].items():
        assert torch.equal(resumed[0]["outer"][name], values), name
