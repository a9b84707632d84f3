"""Worker groups whose loaders end at different steps end every epoch together, and never hang."""

import csv
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_sdiloco.lightning.requests import Request, Requests
from tests import fits
from tests.fits import LIGHTNING
from tests.ranks import run_processes
from tests.training import batch

DISTRIBUTIONS = [LIGHTNING, "pytorch_lightning"]
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": [["*"]]}
Place = tuple[int, int, int]


# Loaders


class Stream(IterableDataset):  # type: ignore[type-arg]
    """So many batches of a group, without a length; a rank of a group of several sees its part of each."""

    def __init__(self, place: Place, batches: int) -> None:
        self.place, self.batches = place, batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        group, shard, shards = self.place
        for step in range(1, self.batches + 1):
            x, y = batch(group, step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]


class Announced:
    """A loader that announces a length, which may be wrong."""

    def __init__(self, place: Place, batches: int, announced: int | None = None) -> None:
        self.stream = Stream(place, batches)
        self.announced = batches if announced is None else announced

    def __len__(self) -> int:
        return self.announced

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.stream)


class Stateful:
    """A loader without a length that can be taken up again in the middle."""

    def __init__(self, place: Place, batches: int) -> None:
        self.stream, self.step, self.resumed = Stream(place, batches), 0, False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.step, self.resumed = self.step if self.resumed else 0, False
        for parts in list(self.stream)[self.step :]:
            self.step += 1
            yield parts

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.resumed = state["step"], True


def stream(place: Place, batches: int) -> Any:
    return DataLoader(Stream(place, batches), batch_size=None)


def uneven_streams(first: int, second: int, place: Place) -> Any:
    """For two groups."""
    return stream(place, (first, second)[place[0]])


# Fits


def noting(distribution: str, inner: str = "sgd", seed: int = 0) -> Any:
    """A module that logs over all ranks, and notes what happens to it."""
    base = type(fits.module(distribution, inner, seed))

    class Noting(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[tuple[int, int, int]] = []
            self.idle: list[int] = []
            self.validated: list[tuple[int, int]] = []

        def training_step(self, parts: Any, index: int) -> Any:
            loss = super().training_step(parts, index)
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=8)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("ended", 1.0, sync_dist=True, batch_size=8)
            self.batches.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step))
            if batch is None:
                self.idle.append(self.trainer.global_step)

        def validation_step(self, parts: Any, index: int) -> None:
            self.log("val", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.validated.append((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))

    return Noting()


class Warned(logging.Handler):
    """Keeps what the package says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("lightning_sdiloco.lightning.host").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run_fit(
    rank: int,
    world_size: int,
    loader: Callable[[Place], Any],
    distribution: str = LIGHTNING,
    groups: int = 2,
    make: Callable[..., Any] = noting,
    resume: str | None = None,
    inspect: Callable[[Any, Any], Any] = lambda trainer, module: None,
    choices: dict[str, Any] = CHOICES,
    **trainer_choices: Any,
) -> dict[str, Any]:
    """Fits in this rank; what must be the same in all ranks is under ``"common"``."""
    warned = Warned()
    size = world_size // groups
    place = rank // size, rank % size, size
    model = make(distribution, seed=rank)
    strategy = fits.strategy(distribution, worker_groups=groups, **choices)
    trainer = fits.trainer(
        distribution,
        **{"strategy": strategy, "devices": world_size, "max_epochs": 2, "num_sanity_val_steps": 0, **trainer_choices},
    )
    trainer.fit(model, loader(place), stream((9, 0, 1), 2), ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    report = strategy.report()
    return {
        "common": {
            "batches": model.batches,
            "validated": model.validated,
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "inner_steps": report["inner_steps"],
            "landings": report["landings"],
            "announced": trainer.num_training_batches,
            "metrics": {name: metrics[name] for name in ("loss_epoch", "ended", "val") if name in metrics},
        },
        "outer": strategy.outer_state_dict(),
        "model": {name: p.detach().clone() for name, p in model.named_parameters()},
        "idle": model.idle,
        "warned": warned.texts,
        "inspected": inspect(trainer, model),
    }


def assert_together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks did the same and hold the same outer parameters. Returns what they did."""
    first = ranks[0]
    for other in ranks[1:]:
        assert other["common"] == first["common"]
        for name, values in first["outer"].items():
            assert torch.equal(other["outer"][name], values), name
            assert torch.equal(other["model"][name], first["model"][name]), name
    common: dict[str, Any] = first["common"]
    return common


def epochs(common: dict[str, Any]) -> list[int]:
    """How many batches each epoch had."""
    numbers = [epoch for epoch, _, _ in common["batches"]]
    return [numbers.count(epoch) for epoch in range(max(numbers) + 1)]


def fit(world_size: int, loader: Callable[[Place], Any], *args: Any, **choices: Any) -> list[dict[str, Any]]:
    """Fits in so many ranks."""
    return list(run_processes(lambda *place: run_fit(*place, loader, *args, **choices), world_size))


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


# Unknown lengths


@pytest.mark.parametrize(
    ("lengths", "world_size", "distribution"),
    [
        *(((7, 10), world_size, distribution) for world_size in (2, 4) for distribution in DISTRIBUTIONS),
        ((10, 7), 2, LIGHTNING),
        ((7, 7), 2, LIGHTNING),
    ],
)
def test_of_unknown_lengths_all_end_after_the_last_batch_that_any_has(
    lengths: tuple[int, int], world_size: int, distribution: str
) -> None:
    ranks = fit(world_size, partial(uneven_streams, *lengths), distribution)
    common = assert_together(ranks)
    longest = max(lengths)
    assert epochs(common) == [longest, longest]
    assert common["inner_steps"] == common["global_step"] == 2 * longest
    assert common["validated"] == [(0, longest - 1), (1, longest - 1)]
    size = world_size // 2
    for rank, result in enumerate(ranks):
        length = lengths[rank // size]
        assert result["idle"] == [*range(length + 1, longest + 1), *range(longest + length + 1, 2 * longest + 1)]
        says = rank % size == 0 and length < longest
        assert len(result["warned"]) == says
        assert not says or f"Worker group {rank // size} has no more batches in epoch" in result["warned"][0]


@pytest.mark.parametrize("lengths", [(7, 30), (30, 7), (3, 9, 30), (3, 9, 10)])
def test_of_unknown_lengths_all_end_where_the_launch_lands_that_says_so(lengths: tuple[int, ...]) -> None:
    ranks = fit(len(lengths), lambda place: stream(place, lengths[place[0]]), groups=len(lengths))
    common = assert_together(ranks)
    # With 7: no 8th batch; the launch after 8 lands after 10. In the second epoch there is none at inner step 18, and
    # the launch after 20 lands after 22. With 3 the launch after 4 lands after 6, and that after 12 lands after 14.
    assert epochs(common) == ([10, 12] if 7 in lengths else [6, 8])
    assert common["validated"] == [(epoch, batches - 1) for epoch, batches in enumerate(epochs(common))]


def test_a_group_that_ends_first_makes_the_others_wait_for_nothing() -> None:
    """Its loader takes a second to end. Meanwhile the other group trains up to its next launch and beyond."""

    class Slow(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from super().__iter__()
            if self.place[0] == 0:
                time.sleep(1.0)
                ended.append(time.monotonic())

    ended: list[float] = []

    def clocked(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))

        class Clocked(base):  # type: ignore[misc, valid-type]
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                ended.append(time.monotonic())

        return Clocked()

    def run(rank: int, world_size: int) -> list[float]:
        choices = {**CHOICES, "sync_every": 20}
        loader = partial(lambda place: DataLoader(Slow(place, 60 if place[0] else 5), batch_size=None))
        run_fit(rank, world_size, loader, make=clocked, choices=choices, max_epochs=1)
        return ended

    first, second = run_processes(run, 2)
    assert second[20] < first[5] < second[21], "it launched after 20, and waits for its landing after 22"
    assert len(second) == 22


def recording(distribution: str, seed: int, kind: str = "plain") -> Any:
    """A module that notes when which hook ran, with the learning rates."""
    base = type((gan if kind == "manual" else noting)(distribution, seed=seed))

    class Recording(base):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            optimizers = configured if isinstance(configured, list) else [configured]
            lr = torch.optim.lr_scheduler
            by_step = {"scheduler": lr.StepLR(optimizers[0], 1, gamma=0.99), "interval": "step"}
            by_epoch = {"scheduler": lr.StepLR(optimizers[0], 1, gamma=0.5), "interval": "epoch"}
            return optimizers, [by_step, by_epoch]

        def note(self, name: str) -> None:
            loop = self.trainer.fit_loop.epoch_loop
            # Where val_check_interval asks for a validation after the last batch, rates change after it, not before.
            rates = [o.param_groups[0]["lr"] for o in self.trainer.optimizers if name != "validation"]
            self.noted.append((name, self.trainer.current_epoch, loop.batch_idx, self.trainer.global_step, *rates))

        def on_train_start(self) -> None:
            self.noted: list[Any] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.note("batch")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.note("step")

        def on_train_epoch_end(self) -> None:
            self.note("epoch")

        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            if not self.trainer.sanity_checking:
                self.note("validation")

        def on_train_end(self) -> None:
            self.note("end")

    return Recording()


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ({"max_steps": 21, "max_epochs": -1}, "plain"),
        ({"max_steps": 24, "max_epochs": -1}, "plain"),
        ({"max_epochs": 3}, "plain"),
        ({"max_epochs": 3, "val_check_interval": 3}, "plain"),
        ({"max_epochs": 3, "val_check_interval": 4}, "plain"),
        ({"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None}, "plain"),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, "plain"),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, "plain"),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, "plain"),
        ({"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 3}, "plain"),
        ({"max_steps": 48, "max_epochs": -1}, "manual"),
        ({"max_epochs": 2, "min_epochs": 2, "limit_train_batches": 6}, "plain"),
    ],
    ids=str,
)
def test_of_equal_unknown_lengths_all_happens_when_it_does_with_ddp(choices: dict[str, Any], kind: str) -> None:
    def run(rank: int, world_size: int) -> Any:
        told = []
        for strategy in ("ddp", fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 20})):
            model = recording(LIGHTNING, seed=rank, kind=kind)
            trainer = fits.trainer(strategy=strategy, devices=world_size, num_sanity_val_steps=0, **choices)
            trainer.fit(model, stream((rank, 0, 1), 8), stream((9, 0, 1), 2))
            told.append((model.noted, trainer.global_step, trainer.current_epoch))
        return told

    for ddp, ours in run_processes(run, 2):
        assert ours == ddp


def test_a_group_that_finds_no_batch_asks_with_a_launch_of_the_same_inner_step() -> None:
    for length, expected in ((7, 10), (8, 14)):
        ranks = fit(2, lambda place, length=length: stream(place, 30 if place[0] else length), max_epochs=1)
        assert epochs(assert_together(ranks)) == [expected]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_loader_that_ends_before_the_length_it_announced_ends_the_epoch_for_all(distribution: str) -> None:
    def loader(place: Place) -> Any:
        return Announced(place, 5 if place[0] else 30, announced=30)

    ranks = fit(2, loader, distribution)
    common = assert_together(ranks)
    # No 6th of 30 batches; the launch after 8 lands after 10. Then none at inner step 16, whose launch lands after 18.
    assert epochs(common) == [10, 8]
    assert common["validated"] == [(0, 9), (1, 7)], "once at the end of each, as val_check_interval=1.0 asks"
    assert ranks[0]["idle"] == []


def test_a_request_that_is_in_flight_when_an_epoch_ends_does_not_end_the_next() -> None:
    def loader(place: Place) -> Any:
        return Announced(place, 7 - place[0], announced=7)

    # Group 1 has no 7th batch. What it asks for then travels with the launch after 7, which lands after 9, or is not
    # launched yet when the epoch ends.
    for sync_every in (7, 8):
        ranks = fit(2, loader, choices={**CHOICES, "sync_every": sync_every}, max_epochs=3)
        assert epochs(assert_together(ranks)) == [7, 7, 7]
        assert ranks[1]["idle"] == [7, 14, 21]


def test_a_group_without_a_single_batch_in_a_later_epoch_makes_none_wait() -> None:
    class Once(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from super().__iter__()
            self.batches = 0

    def loader(place: Place) -> Any:
        return DataLoader(Once(place, 5), batch_size=None) if place[0] else stream(place, 50)

    ranks = fit(2, loader)
    common = assert_together(ranks)
    # In the second epoch it asks with the launch after 12.
    assert epochs(common) == [10, 4]
    assert len(ranks[1]["idle"]) == 5 + 4
    # It logged nothing in training_step in that epoch, so Lightning's reduction would wait for it for ever.
    assert "Not every rank logged training_step.loss in epoch 1" in ranks[0]["warned"][-1]


def test_a_group_without_a_single_batch_of_those_it_announced_makes_none_wait() -> None:
    """The epoch ends by its length, before a launch could tell."""

    class Once(Announced):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            batches, self.stream = self.stream, Stream(self.stream.place, 0)
            yield from batches

    ranks = fit(2, lambda place: (Once if place[0] else Announced)(place, 3), choices={**CHOICES, "sync_every": 20})
    assert epochs(assert_together(ranks)) == [3, 3]
    assert ranks[1]["idle"] == [4, 5, 6]
    assert "Not every rank logged training_step.loss in epoch 1" in ranks[0]["warned"][-1]


def test_epochs_shorter_than_a_round_still_exchange() -> None:
    ranks = fit(
        2,
        lambda place: stream(place, 2 + place[0]),
        choices={**CHOICES, "sync_every": 8},
        max_epochs=6,
    )
    common = assert_together(ranks)
    assert epochs(common) == [3] * 6
    assert common["landings"] == 2


def test_several_fragments_carry_the_request_with_the_next_launch_of_any() -> None:
    ranks = fit(
        2,
        partial(uneven_streams, 9, 29),
        choices={"sync_every": 8, "overlap_steps": 3, "layers_per_fragment": 1},
        max_epochs=3,
    )
    # Four fragments: launches after 8, 10, 12, ... and landings 3 later. No batch at inner steps 10, 23 and 37.
    assert epochs(assert_together(ranks)) == [13, 14, 14]


def test_one_worker_group_ends_its_epochs_as_usual() -> None:
    ranks = fit(2, lambda place: stream(place, 5), groups=1)
    common = assert_together(ranks)
    assert epochs(common) == [5, 5]
    assert common["inner_steps"] == 10
    assert ranks[0]["idle"] == ranks[0]["warned"] == []


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


def gan(distribution: str, seed: int) -> Any:
    """Manual optimization with two optimizers."""
    base = type(noting(distribution, seed=seed))

    class Two(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, parts: Any, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net[:3], self.net[3:])]

    return Two()


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


# Checkpoints


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
    steps = (4, 5, 7, 9, 10, 11, 16, 17, 18, 26) if distribution == LIGHTNING else (7, 10)
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
