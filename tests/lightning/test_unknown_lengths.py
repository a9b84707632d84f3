"""Worker groups whose loaders do not know their length end an epoch where the data of all has ended."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import (
    CHOICES,
    DISTRIBUTIONS,
    Announced,
    Place,
    Stream,
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
