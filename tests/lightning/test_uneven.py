"""Worker groups whose loaders end at different steps end every epoch together, and never hang."""

import csv
import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sdiloco.lightning.requests import Request, Requests
from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import (
    CHOICES,
    DISTRIBUTIONS,
    Announced,
    Place,
    Stream,
    Warned,
    assert_together,
    epochs,
    fit,
    gan,
    noting,
    run_fit,
    stream,
    uneven_streams,
)
from tests.ranks import run_processes

# Known lengths


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_of_known_lengths_the_fewest_batches_decide(world_size: int, distribution: str) -> None:
    def loader(place: Place) -> Any:
        return Announced(place, 10 if place[0] else 7)

    ranks = fit(world_size, loader, distribution)
    common = assert_together(ranks)
    assert epochs(common) == [7, 7]
    assert common["inner_steps"] == common["global_step"] == 14
    assert common["announced"] == 7
    assert common["validated"] == [(0, 6), (1, 6)]
    assert [rank["idle"] for rank in ranks] == [[]] * world_size
    said = "Worker groups have unequal numbers of batches: group 0 has 7, group 1 has 10. Every epoch ends after 7"
    assert [len(rank["warned"]) for rank in ranks] == [1] + [0] * (world_size - 1)
    assert ranks[0]["warned"][0].startswith(said)


def test_ranks_of_one_group_may_announce_different_lengths() -> None:
    ranks = fit(4, lambda place: Announced(place, 5 + place[0] + 2 * place[1]))
    assert epochs(assert_together(ranks)) == [5, 5]
    assert "group 0 has 5 and 7, group 1 has 6 and 8" in ranks[0]["warned"][0]


def test_equal_lengths_are_left_as_they_are_without_a_word() -> None:
    ranks = fit(2, lambda place: Announced(place, 6), val_check_interval=0.5)
    common = assert_together(ranks)
    assert epochs(common) == [6, 6]
    assert common["validated"] == [(0, 2), (0, 5), (1, 2), (1, 5)]
    assert [rank["warned"] for rank in ranks] == [[], []]


def test_validation_by_a_share_of_the_epoch_counts_the_batches_that_were_agreed_on() -> None:
    ranks = fit(2, lambda place: Announced(place, 12 if place[0] else 8), val_check_interval=0.5)
    assert assert_together(ranks)["validated"] == [(0, 3), (0, 7), (1, 3), (1, 7)]


@pytest.mark.parametrize(("limit", "expected"), [(0.5, 4), (5, 5), (9, 8)])
def test_limits_come_before_the_agreement(limit: float, expected: int) -> None:
    ranks = fit(2, lambda place: Announced(place, 8 + 4 * place[0]), limit_train_batches=limit)
    assert epochs(assert_together(ranks)) == [expected, expected]


def test_a_number_of_batches_is_a_length_for_loaders_that_have_none() -> None:
    """What the warning about idle batches advises."""
    ranks = fit(2, partial(uneven_streams, 7, 10), limit_train_batches=5)
    assert epochs(assert_together(ranks)) == [5, 5]
    assert [rank["idle"] + rank["warned"] for rank in ranks] == [[], []]


def test_a_known_length_holds_for_groups_that_have_none() -> None:
    """Lightning adds up lengths over all ranks only where a loader has one, so these must not meet in a collective."""

    def loader(place: Place) -> Any:
        return Announced(place, 6) if place[0] == 0 else stream(place, 20)

    ranks = fit(2, loader, val_check_interval=1.0)
    common = assert_together(ranks)
    assert epochs(common) == [6, 6]
    assert common["validated"] == [(0, 5), (1, 5)]
    assert "group 0 has 6, group 1 has an unknown number" in ranks[0]["warned"][0]
    assert [rank["idle"] for rank in ranks] == [[], []]


@pytest.mark.parametrize(
    ("loader", "choices", "expected"),
    [
        (lambda place: Announced(place, 8 * place[0]), {}, "group 0 has 0, group 1 has 8"),
        (lambda place: stream(place, 8 * place[0]), {}, "group 0 has 0, group 1 has an unknown number"),
        (lambda place: Announced(place, 4 + 8 * place[0]), {"val_check_interval": 6}, "val_check_interval"),
        (
            lambda place: Announced(place, 4) if place[0] else stream(place, 8),
            {"val_check_interval": 0.5},
            "val_check_interval",
        ),
        (lambda place: Announced(place, 5 + 20 * place[0]), {"limit_train_batches": 0.1}, "limit_train_batches"),
    ],
    ids=[
        "no batches",
        "an empty stream",
        "validation after the end",
        "a share of an unknown length",
        "too small a share",
    ],
)
def test_data_that_cannot_work_is_refused_by_all_ranks(
    loader: Callable[[Place], Any], choices: dict[str, Any], expected: str
) -> None:
    errors = run_processes(lambda *place: run_fit(*place, loader, **choices), 2, expect_failure=True)
    assert sorted(errors) == [0, 1]
    assert all(expected in error for error in errors.values())
    # Whose data it is says it with Lightning's own error, the others with ours.
    assert any("ValueError" in error for error in errors.values())
    assert not any("ExchangeError" in error for error in errors.values())


def test_lengths_are_agreed_on_again_when_loaders_are_reloaded_and_only_then() -> None:
    def reloading(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))

        class Reloading(base):  # type: ignore[misc, valid-type]
            def train_dataloader(self) -> Any:
                group = self.trainer.strategy.topology.group_index
                return Announced((group, 0, 1), 6 - self.trainer.current_epoch + group)

            def on_train_epoch_start(self) -> None:
                self.agreed = len(said.texts)

        said = Warned()
        return Reloading()

    def run(rank: int, world_size: int) -> dict[str, Any]:
        return run_fit(
            rank, world_size, lambda place: None, make=reloading, reload_dataloaders_every_n_epochs=2, max_epochs=4
        )

    ranks = run_processes(run, 2)
    assert epochs(assert_together(ranks)) == [6, 6, 4, 4]
    assert len(ranks[0]["warned"]) == 2


def test_the_number_of_steps_that_a_module_asks_for_is_the_agreed_one() -> None:
    def asking(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))

        class Asking(base):  # type: ignore[misc, valid-type]
            def configure_optimizers(self) -> Any:
                self.expected = self.trainer.estimated_stepping_batches
                return super().configure_optimizers()

        return Asking()

    def run(rank: int, world_size: int) -> dict[str, Any]:
        return run_fit(
            rank, world_size, lambda place: Announced(place, 5 + place[0]), make=asking, inspect=lambda _, m: m.expected
        )

    assert [rank["inspected"] for rank in run_processes(run, 2)] == [10, 10]


# What counts steps goes on in idle batches


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_that_counts_steps_happens_in_all_groups_after_the_same_one(distribution: str, tmp_path: Path) -> None:
    """Checkpoints, validation, learning rates, early stopping and the progress bar, some in idle batches."""

    def scheduled(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))

        class Scheduled(base):  # type: ignore[misc, valid-type]
            def configure_optimizers(self) -> Any:
                optimizer = super().configure_optimizers()
                lr = torch.optim.lr_scheduler
                by_step = {"scheduler": lr.StepLR(optimizer, 1, gamma=0.99), "interval": "step"}
                by_epoch = {"scheduler": lr.StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}
                return [optimizer], [by_step, by_epoch]

        return Scheduled()

    def run(rank: int, world_size: int) -> dict[str, Any]:
        pl = importlib.import_module(distribution)
        saved: list[int] = []

        class Noting(pl.callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
            def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
                saved.append(trainer.global_step)
                super()._save_checkpoint(trainer, filepath)

        callbacks = [
            Noting(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1),
            pl.callbacks.EarlyStopping("val", patience=3, min_delta=10.0),
            pl.callbacks.LearningRateMonitor(),
        ]
        logger = importlib.import_module(f"{distribution}.loggers").CSVLogger(tmp_path / str(rank))
        result = run_fit(
            rank,
            world_size,
            partial(uneven_streams, 5, 25),
            distribution,
            make=scheduled,
            inspect=lambda trainer, module: (
                saved,
                trainer.optimizers[0].param_groups[0]["lr"],
                [s.last_epoch for s in (c.scheduler for c in trainer.lr_scheduler_configs)],
            ),
            callbacks=callbacks,
            logger=logger,
            enable_checkpointing=True,
            enable_progress_bar=True,
            max_epochs=9,
            val_check_interval=4,
            log_every_n_steps=2,
        )
        result["common"]["inspected"] = result["inspected"]
        return result

    ranks = run_processes(run, 2)
    common = assert_together(ranks)
    saved, lr, made = common["inspected"]
    steps = common["global_step"]
    assert len(ranks[0]["idle"]) > 5
    assert saved == list(range(3, steps + 1, 3))
    assert {f"step={step}.ckpt" for step in saved} == {path.name for path in tmp_path.glob("*.ckpt")}
    assert made == [steps, len(epochs(common))]
    assert lr == pytest.approx(0.05 * 0.99**steps * 0.5 ** len(epochs(common)))
    assert all((index + 1) % 4 == 0 for _, index in common["validated"])
    assert 1 < common["epoch"] < 9, "early stopping stopped all of them"


@pytest.mark.parametrize("max_steps", [6, 8, 9, 10, 11])
def test_a_limit_of_steps_is_reached_by_all_in_idle_batches_too(max_steps: int) -> None:
    ranks = fit(2, partial(uneven_streams, 5, 25), max_steps=max_steps, max_epochs=-1)
    common = assert_together(ranks)
    assert common["inner_steps"] == common["global_step"] == max_steps


@pytest.mark.parametrize("lengths", [(5, 30), (6, 30), (30, 7)])
def test_accumulated_batches_count_as_in_groups_that_train(lengths: tuple[int, int]) -> None:
    ranks = fit(2, partial(uneven_streams, *lengths), accumulate_grad_batches=3, max_epochs=3)
    common = assert_together(ranks)
    assert common["inner_steps"] == common["global_step"]
    assert all(length % 3 == 0 for length in epochs(common)), "an epoch ends with a whole step"
    assert common["global_step"] == sum(epochs(common)) // 3


def test_the_last_batch_of_a_known_length_ends_an_accumulation_in_idle_groups_too() -> None:
    def loader(place: Place) -> Any:
        return Announced(place, 10 - 4 * place[0], announced=10)

    ranks = fit(2, loader, accumulate_grad_batches=4, max_epochs=2)
    common = assert_together(ranks)
    assert epochs(common) == [10, 10]
    assert common["global_step"] == common["inner_steps"] == 6


def test_idle_batches_in_manual_optimization_count_as_many_steps_as_others() -> None:
    ranks = fit(2, partial(uneven_streams, 5, 25), make=gan)
    common = assert_together(ranks)
    assert epochs(common) == [10, 8]
    assert common["global_step"] == 2 * common["inner_steps"] == 36


def test_nothing_is_logged_again_for_an_idle_batch(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> dict[str, Any]:
        logger = importlib.import_module(f"{LIGHTNING}.loggers").CSVLogger(tmp_path / str(rank), "", "")
        loader = partial(uneven_streams, 5, 25)
        return run_fit(rank, world_size, loader, logger=logger, log_every_n_steps=1, max_epochs=1)

    assert_together(run_processes(run, 2))
    with (tmp_path / "0" / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]] == [0, 1, 2, 3, 4]


def test_a_tuner_trains_each_rank_for_itself_and_the_fit_after_it_ends_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes all callbacks away, so nobody counts idle batches; losses per epoch are reduced over all ranks."""
    monkeypatch.chdir(tmp_path)

    def tuned(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))

        class Tuned(base):  # type: ignore[misc, valid-type]
            lr = 0.05

            def on_train_start(self) -> None:
                self.batches.clear()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=self.lr)

        return Tuned()

    def run(rank: int, world_size: int) -> dict[str, Any]:
        finder = importlib.import_module(f"{LIGHTNING}.callbacks").LearningRateFinder(num_training_steps=20)
        return run_fit(rank, world_size, partial(uneven_streams, 7, 10), make=tuned, callbacks=[finder])

    assert epochs(assert_together(run_processes(run, 2))) == [10, 10]


def test_a_fit_leaves_nothing_behind_and_the_next_agrees_anew() -> None:
    def run(rank: int, world_size: int) -> Any:
        model, strategy = noting(LIGHTNING), fits.strategy(worker_groups=2, **CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_epochs=1)
        before = set(vars(trainer.fit_loop)), set(vars(trainer.fit_loop.epoch_loop))
        trainer.fit(model, uneven_streams(5, 8, (rank, 0, 1)))
        steps = trainer.global_step
        assert (set(vars(trainer.fit_loop)), set(vars(trainer.fit_loop.epoch_loop))) == before
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, Announced((rank, 0, 1), 5 + rank))
        return steps, trainer.global_step

    assert run_processes(run, 2) == [(8, 13), (8, 13)]


# What hooks and loaders see


def test_a_batch_of_none_from_a_loader_counts_as_idle_in_its_group() -> None:
    class Gaps(Stream):
        def __iter__(self) -> Iterator[Any]:
            for index, parts in enumerate(super().__iter__()):
                yield None if self.place[0] == 1 and index in (2, 3) else parts

    ranks = fit(2, lambda place: DataLoader(Gaps(place, 100), batch_size=None), max_steps=10)
    assert assert_together(ranks)["inner_steps"] == 10
    assert [rank["idle"] for rank in ranks] == [[], [3, 4]]


def test_hooks_that_move_batches_do_not_see_idle_ones() -> None:
    def moving(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))

        class Moving(base):  # type: ignore[misc, valid-type]
            def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
                return [part.to(device) for part in batch]

            def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                return [part + 0 for part in batch]

        return Moving()

    ranks = fit(2, partial(uneven_streams, 5, 25), make=moving, max_epochs=1)
    assert assert_together(ranks)["inner_steps"] == 10
    assert len(ranks[0]["idle"]) == 5


def test_several_loaders_in_one_are_one() -> None:
    def several(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))

        class Several(base):  # type: ignore[misc, valid-type]
            def training_step(self, parts: Any, index: int) -> Any:
                return super().training_step(parts["a"], index) + super(base, self).training_step(parts["b"], index)

        return Several()

    def loader(place: Place) -> Any:
        return {"a": stream(place, 5), "b": stream(place, 3 + 4 * place[0])}

    ranks = fit(2, loader, make=several, max_epochs=1)
    assert_together(ranks)
    # The longest decides within a group.
    assert [len(rank["idle"]) for rank in ranks] == [2, 0]


def taking(distribution: str, seed: int) -> Any:
    """A module that takes its batches from the iterator."""
    base = type(noting(distribution, seed=seed))

    class Taking(base):  # type: ignore[misc, valid-type]
        def training_step(self, dataloader_iter: Any) -> Any:
            parts, index, _ = next(dataloader_iter)
            return super().training_step(parts, index)

    return Taking()


def test_known_lengths_hold_for_a_training_step_that_takes_its_batches_itself() -> None:
    ranks = fit(2, lambda place: Announced(place, 7 + 3 * place[0]), make=taking)
    assert epochs(assert_together(ranks)) == [7, 7]


def test_unknown_lengths_in_a_training_step_that_takes_its_batches_itself_end_with_an_error() -> None:
    def run(rank: int, world_size: int) -> dict[str, Any]:
        choices = {**CHOICES, "timeout": timedelta(seconds=3)}
        return run_fit(rank, world_size, partial(uneven_streams, 7, 10), make=taking, choices=choices)

    errors = run_processes(run, 2, expect_failure=True)
    assert sorted(errors) == [0, 1]


# Requests


class Launching:
    """As much of an engine as requests need."""

    def __init__(self) -> None:
        self.inner_steps = 0
        self.pending = 0

    def request(self, bits: int) -> None:
        self.pending |= bits

    def withdraw(self, bits: int) -> None:
        self.pending &= ~bits


def landing(launched_at: int, requests: int) -> Any:
    """As much of a landing as requests need."""
    return SimpleNamespace(launched_at=launched_at, requests=requests)


def test_what_was_launched_before_or_with_the_end_of_an_epoch_does_not_end_the_next() -> None:
    engine = Launching()
    requests = Requests(engine)  # type: ignore[arg-type]
    engine.inner_steps = 10
    assert requests.land([landing(8, Request.END_EPOCH)]) == Request.END_EPOCH
    for launched_at in (9, 10):
        engine.inner_steps = launched_at + 2
        assert requests.land([landing(launched_at, Request.END_EPOCH)]) == 0
    engine.inner_steps = 13
    assert requests.land([landing(11, Request.END_EPOCH)]) == Request.END_EPOCH
    requests.ask(Request.END_EPOCH)
    requests.settle(Request.END_EPOCH)
    assert engine.pending == 0
