"""Worker groups whose loaders end at different steps end every epoch together, and never hang."""

import csv
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import (
    CHOICES,
    Announced,
    Place,
    Stream,
    assert_together,
    epochs,
    gan,
    noting,
    run_fit,
    stream,
    uneven_streams,
)
from tests.ranks import run_processes


class Once(Announced):
    """Has batches in the first epoch only."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches, self.stream = self.stream, Stream(self.stream.place, 0)
        yield from batches


class Gaps(Stream):
    """Yields None on purpose in the second group."""

    def __iter__(self) -> Iterator[Any]:
        for index, parts in enumerate(super().__iter__()):
            yield None if self.place[0] == 1 and index in (2, 3) else parts


def of_module(**members: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of modules that have some methods of their own."""

    def make(distribution: str, seed: int) -> Any:
        base = type(noting(distribution, seed=seed))
        return type("Own", (base,), members)()

    return make


def in_two(self: Any, parts: Any, index: int) -> Any:
    return sum(type(self).__mro__[1].training_step(self, parts[name], index) for name in ("a", "b"))


def from_the_iterator(self: Any, dataloader_iter: Any) -> Any:
    parts, index, _ = next(dataloader_iter)
    return type(self).__mro__[1].training_step(self, parts, index)


def reloaded(self: Any) -> Any:
    group = self.trainer.strategy.topology.group_index
    return Announced((group, 0, 1), 6 - self.trainer.current_epoch + group)


def planned(self: Any) -> Any:
    assert self.trainer.estimated_stepping_batches == 14
    return torch.optim.SGD(self.parameters(), lr=0.05)


def scheduled(self: Any) -> Any:
    """The module's own optimizers, the first of which learns slower with every step and epoch."""
    configured = type(self).__mro__[1].configure_optimizers(self)
    optimizers = configured if isinstance(configured, list) else [configured]
    shares = {"step": 0.99, "epoch": 0.5}
    schedules = {by: torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=share) for by, share in shares.items()}
    return optimizers, [{"scheduler": schedule, "interval": by} for by, schedule in schedules.items()]


def moved(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
    return [part.to(device) for part in batch]


def copied(self: Any, batch: Any, dataloader_idx: int) -> Any:
    return [part + 0 for part in batch]


taking = of_module(training_step=from_the_iterator)


@dataclass
class Case:
    """Loaders of two groups, and what epochs they make together."""

    loader: Callable[[Place], Any]
    epochs: list[int]
    idle: tuple[list[int], ...] = ([], [])  # The global steps after idle batches of each group.
    says: tuple[str, ...] = ("", "")  # The groups, in one warning of each.
    validates: list[tuple[int, int]] | None = None  # Epoch and batch; at the end of each epoch if None.
    steps: int | None = None  # As many as batches if None.
    choices: dict[str, Any] = field(default_factory=dict)


def steps(*stretches: tuple[int, int]) -> list[int]:
    return [step for first, last in stretches for step in range(first, last + 1)]


def after(batches: int) -> str:
    return f"has no more batches in epoch 0 after {batches}, and others have."


def unequal(text: str, decided: int) -> tuple[str, str]:
    return f"Worker groups have unequal numbers of batches: {text}. Every epoch ends after {decided} in all", ""


# With sync_every=4 and overlap_steps=2 launches are after 4, 8, 12, ... inner steps, and land two later.
CASES = {
    # Known lengths: the fewest batches decide.
    "known": Case(
        lambda place: Announced(place, 10 if place[0] else 7),
        [7, 7],
        says=unequal("group 0 has 7, group 1 has 10", 7),
        choices={"make": of_module(configure_optimizers=planned)},
    ),
    "validation by a share of what was agreed on": Case(
        lambda place: Announced(place, 12 if place[0] else 8),
        [8, 8],
        says=unequal("group 0 has 8, group 1 has 12", 8),
        validates=[(0, 3), (0, 7), (1, 3), (1, 7)],
        choices={"val_check_interval": 0.5},
    ),
    "a limit": Case(lambda place: Announced(place, 8 + 4 * place[0]), [5, 5], choices={"limit_train_batches": 5}),
    "a share": Case(
        lambda place: Announced(place, 8 + 4 * place[0]),
        [4, 4],
        says=unequal("group 0 has 4, group 1 has 6", 4),
        choices={"limit_train_batches": 0.5},
    ),
    "known in one group": Case(
        lambda place: stream(place, 20) if place[0] else Announced(place, 6),
        [6, 6],
        says=unequal("group 0 has 6, group 1 has an unknown number", 6),
    ),
    "reloaded": Case(
        lambda place: None,
        [6, 6, 4, 4],
        says=unequal("group 0 has 6, group 1 has 7", 6),
        choices={
            "make": of_module(train_dataloader=reloaded),
            "reload_dataloaders_every_n_epochs": 2,
            "max_epochs": 4,
        },
    ),
    "dataloader_iter": Case(
        lambda place: Announced(place, 7 + 3 * place[0]),
        [7, 7],
        says=unequal("group 0 has 7, group 1 has 10", 7),
        choices={"make": taking},
    ),
    # Unknown lengths: all end after the last batch that any has ...
    "streams": Case(partial(uneven_streams, 7, 10), [10, 10], idle=(steps((8, 10), (18, 20)), []), says=(after(7), "")),
    "epochs shorter than a round": Case(
        partial(uneven_streams, 2, 3),
        [3, 3, 3],
        idle=([3, 6, 9], []),
        says=(after(2), ""),
        choices={"max_epochs": 3, "choices": {**CHOICES, "sync_every": 8}},
    ),
    "several loaders": Case(
        lambda place: {"a": stream(place, 5), "b": stream(place, 3 + 4 * place[0])},
        [7, 7],
        idle=(steps((6, 7), (13, 14)), []),
        says=(after(5), ""),
        choices={"make": of_module(training_step=in_two)},
    ),
    # ... or where the launch lands that tells of a group without data.
    "long streams": Case(
        partial(uneven_streams, 7, 30), [10, 12], idle=(steps((8, 10), (18, 22)), []), says=(after(7), "")
    ),
    "a launch in the last batch": Case(
        partial(uneven_streams, 8, 30), [10, 12], idle=(steps((9, 10), (19, 22)), []), says=(after(8), "")
    ),
    "several fragments": Case(  # Launches after 8, 10, 12, ... land three later.
        partial(uneven_streams, 9, 29),
        [13, 12],
        idle=(steps((10, 13), (23, 25)), []),
        says=(after(9), ""),
        choices={"choices": {"sync_every": 8, "overlap_steps": 3, "fragments": "strided:1"}},
    ),
    "no batch in a later epoch": Case(
        lambda place: DataLoader(Streams(place), batch_size=None) if place[0] else stream(place, 50),
        [10, 4],
        idle=([], steps((6, 14))),
        says=("Not every rank logged training_step.loss in epoch 1", after(5)),
    ),
    # A length that is announced and not kept.
    "short": Case(
        lambda place: Announced(place, 5 if place[0] else 30, announced=30),
        [10, 8],
        idle=([], steps((6, 10), (16, 18))),
        says=("", after(5)),
    ),
    "short in all": Case(lambda place: Announced(place, 5, announced=8), [5, 5], validates=[]),
    "short, and in flight when the epoch ends": Case(
        lambda place: Announced(place, 7 - place[0], announced=7),
        [7, 7, 7],
        idle=([], [7, 14, 21]),
        says=("", after(6)),
        choices={"choices": {**CHOICES, "sync_every": 7}, "max_epochs": 3},
    ),
    "no batch of those announced": Case(
        lambda place: (Once if place[0] else Announced)(place, 3),
        [3, 3],
        idle=([], [4, 5, 6]),
        says=("Not every rank logged training_step.loss in epoch 1", "epoch 1 after 0"),
        choices={"choices": {**CHOICES, "sync_every": 20}},
    ),
    # What idle batches count.
    "accumulation": Case(
        partial(uneven_streams, 5, 30),
        [18, 12],
        idle=([*sorted([2, 3, 4, 5] * 3), 6, *sorted([8, 9] * 3), 10], []),
        says=(after(5), ""),
        steps=10,
        choices={"accumulate_grad_batches": 3},
    ),
    "manual optimization": Case(
        partial(uneven_streams, 5, 25),
        [10, 8],
        idle=([12, 14, 16, 18, 20, 32, 34, 36], []),
        says=(after(5), ""),
        steps=36,
        choices={"make": gan},
    ),
    "None on purpose": Case(
        lambda place: DataLoader(Gaps(place, 100), batch_size=None),
        [10],
        idle=([], [3, 4]),
        validates=[],
        choices={"max_steps": 10},
    ),
    "hooks that move batches": Case(
        partial(uneven_streams, 5, 25),
        [10, 8],
        idle=(steps((6, 10), (16, 18)), []),
        says=(after(5), ""),
        choices={"make": of_module(transfer_batch_to_device=moved, on_after_batch_transfer=copied)},
    ),
    **{
        f"max_steps={most}": Case(
            partial(uneven_streams, 5, 25),
            [most] if most <= 10 else [10, most - 10],
            idle=(steps((6, min(most, 10))), []),
            says=(after(5), ""),
            validates=[] if most < 10 else [(0, 9)],
            choices={"max_steps": most, "max_epochs": -1},
        )
        for most in (9, 10, 11)
    },
}


# Of more ranks than two.
MORE = {
    "ranks of a group differ": Case(
        lambda place: Announced(place, 5 + place[0] + 2 * place[1]),
        [5, 5],
        says=unequal("group 0 has 5 and 7, group 1 has 6 and 8", 5),
    ),
    "three groups": Case(  # The launch after 4 lands after 6, and that after 12 lands after 14.
        lambda place: stream(place, (3, 9, 30)[place[0]]),
        [6, 8],
        idle=(steps((4, 6), (10, 14)), [], []),
        says=(after(3), "", ""),
        choices={"groups": 3},
    ),
}


class Streams(Stream):
    """Has five batches in the first epoch only, of no known length."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, 5)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super().__iter__()
        self.batches = 0


def run_cases(rank: int, world_size: int, names: list[str], distribution: str) -> list[Any]:
    cases = [(CASES | MORE)[name] for name in names]
    return [run_fit(rank, world_size, case.loader, distribution, **case.choices) for case in cases]


def assert_as_told(case: Case, ranks: list[dict[str, Any]]) -> None:
    common, size = assert_together(ranks), len(ranks) // case.choices.get("groups", 2)
    assert epochs(common) == case.epochs
    assert common["global_step"] == (case.steps or sum(case.epochs))
    assert common["validated"] == (
        case.validates if case.validates is not None else [(e, n - 1) for e, n in enumerate(case.epochs)]
    )
    assert [rank["idle"] for rank in ranks] == [case.idle[rank // size] for rank in range(len(ranks))]
    for rank, result in enumerate(ranks):
        said = case.says[rank // size] if rank % size == 0 else ""
        assert any(said in text for text in result["warned"]) if said else not result["warned"], result["warned"]


@pytest.mark.parametrize(
    ("distribution", "world_size", "names"),
    [
        (LIGHTNING, 2, list(CASES)),
        ("pytorch_lightning", 2, ["known", "known in one group", "long streams", "short", "manual optimization"]),
        (LIGHTNING, 3, ["three groups"]),
        (LIGHTNING, 4, ["ranks of a group differ", "streams"]),
    ],
)
def test_groups_end_every_epoch_after_the_same_batch(distribution: str, world_size: int, names: list[str]) -> None:
    ranks = run_processes(run_cases, world_size, names, distribution, timeout=180.0)
    wrong = {}
    for name, results in zip(names, zip(*ranks, strict=True), strict=True):
        try:
            assert_as_told((CASES | MORE)[name], list(results))
        except AssertionError as error:
            wrong[name] = str(error)
    assert wrong == {}


REFUSED: list[tuple[Callable[[Place], Any], dict[str, Any], str]] = [
    (lambda place: Announced(place, 8 * place[0]), {}, "group 0 has 0, group 1 has 8"),
    (lambda place: stream(place, 8 * place[0]), {}, "group 0 has 0, group 1 has an unknown number"),
    (lambda place: Announced(place, 4 + 8 * place[0]), {"val_check_interval": 6}, "val_check_interval"),
    (
        lambda place: Announced(place, 4) if place[0] else stream(place, 8),
        {"val_check_interval": 0.5},
        "val_check_interval",
    ),
    (lambda place: Announced(place, 5 + 20 * place[0]), {"limit_train_batches": 0.1}, "limit_train_batches"),
]


def test_data_that_cannot_work_is_refused_by_all_ranks() -> None:
    def run(rank: int, world_size: int) -> list[Exception]:
        errors = []
        for loader, choices, _ in REFUSED:
            with pytest.raises(Exception) as refusal:  # noqa: PT011  whose data it is says it with Lightning's own
                run_fit(rank, world_size, loader, **choices)
            errors.append((type(refusal.value).__name__, str(refusal.value)))
        return errors

    first, second = run_processes(run, 2)
    for (*_, expected), *errors in zip(REFUSED, first, second, strict=True):
        assert all(expected in text for _, text in errors)
        kinds = {kind for kind, _ in errors}
        assert "ValueError" in kinds
        assert kinds <= {"ValueError", "MisconfigurationException"}


def test_unknown_lengths_in_a_training_step_that_takes_its_batches_itself_end_with_an_error() -> None:
    def run(rank: int, world_size: int) -> dict[str, Any]:
        choices = {**CHOICES, "timeout": timedelta(seconds=2)}
        return run_fit(rank, world_size, partial(uneven_streams, 7, 10), make=taking, choices=choices)

    assert sorted(run_processes(run, 2, expect_failure=True)) == [0, 1]


def test_all_that_counts_steps_happens_in_all_groups_after_the_same_one(tmp_path: Path) -> None:
    """Checkpoints, validation, learning rates, early stopping, loggers and the progress bar, some in idle batches."""

    def run(rank: int, world_size: int) -> dict[str, Any]:
        callbacks = importlib.import_module(LIGHTNING).callbacks
        saved: list[int] = []

        class Noting(callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
            def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
                saved.append(trainer.global_step)
                super()._save_checkpoint(trainer, filepath)

        result = run_fit(
            rank,
            world_size,
            partial(uneven_streams, 5, 25),
            make=of_module(configure_optimizers=scheduled),
            inspect=lambda trainer, module: (
                saved,
                trainer.optimizers[0].param_groups[0]["lr"],
                [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs],
            ),
            callbacks=[
                Noting(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1),
                callbacks.EarlyStopping("val", patience=3, min_delta=10.0),
                callbacks.LearningRateMonitor(),
            ],
            logger=importlib.import_module(f"{LIGHTNING}.loggers").CSVLogger(tmp_path / str(rank), "", ""),
            enable_checkpointing=True,
            enable_progress_bar=True,
            max_epochs=9,
            val_check_interval=4,
            log_every_n_steps=1,
        )
        result["common"]["inspected"] = result["inspected"]
        return result

    ranks = run_processes(run, 2)
    common = assert_together(ranks)
    saved, lr, made = common["inspected"]
    steps, idle = common["global_step"], ranks[0]["idle"]
    assert len(idle) > 5
    assert saved == list(range(3, steps + 1, 3))
    assert {f"step={step}.ckpt" for step in saved} == {path.name for path in tmp_path.glob("*.ckpt")}
    assert made == [steps, len(epochs(common))]
    assert lr == pytest.approx(0.05 * 0.99**steps * 0.5 ** len(epochs(common)))
    assert all((index + 1) % 4 == 0 for _, index in common["validated"])
    assert 1 < common["epoch"] < 9, "early stopping stopped all of them"
    with (tmp_path / "0" / "metrics.csv").open() as file:
        logged = [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]]
    assert logged == [step for step in range(steps) if step + 1 not in idle], "nothing is logged again when idle"


def test_a_tuner_trains_each_rank_for_itself_and_the_fit_after_it_ends_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes all callbacks away, so nobody counts idle batches; losses per epoch are reduced over all ranks."""
    monkeypatch.chdir(tmp_path)
    tuned = of_module(
        on_train_start=lambda self: self.batches.clear(),
        configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=getattr(self, "lr", 0.05)),
    )

    def run(rank: int, world_size: int) -> dict[str, Any]:
        finder = importlib.import_module(f"{LIGHTNING}.callbacks").LearningRateFinder(num_training_steps=20)

        def make(*args: Any, **kwargs: Any) -> Any:
            module = tuned(*args, **kwargs)
            module.lr = 0.05
            return module

        return run_fit(rank, world_size, partial(uneven_streams, 7, 10), make=make, callbacks=[finder])

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


def test_a_group_that_ends_first_makes_the_others_wait_for_nothing() -> None:
    """Its loader takes a second to end. Meanwhile the other group trains up to its next launch and beyond."""
    ended: list[float] = []

    class Slow(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from super().__iter__()
            if self.place[0] == 0:
                time.sleep(1.0)
                ended.append(time.monotonic())

    def run(rank: int, world_size: int) -> list[float]:
        run_fit(
            rank,
            world_size,
            lambda place: DataLoader(Slow(place, 60 if place[0] else 5), batch_size=None),
            make=of_module(on_train_batch_end=lambda self, *_: ended.append(time.monotonic())),
            choices={**CHOICES, "sync_every": 20},
            max_epochs=1,
        )
        return ended

    first, second = run_processes(run, 2)
    assert second[20] < first[4] < second[21], "it launched after 20, and waits for its landing after 22"
    assert len(second) == 22


# Equal lengths that nobody knows


HOOKS = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_train_end",
)


def recording(distribution: str, seed: int, kind: str) -> Any:
    """A module that notes when which hook ran, with the learning rates."""
    noted: list[Any] = []

    def hook(name: str) -> Callable[..., None]:
        def note(self: Any, *_: Any, **__: Any) -> None:
            trainer = self.trainer
            rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
            at = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, trainer.global_step
            noted.append((name, *at, trainer.is_last_batch, *rates))

        return note

    base = type((gan if kind == "manual" else noting)(distribution, seed=seed))
    own = {name: hook(name) for name in HOOKS}
    module = type("Recording", (base,), {"configure_optimizers": scheduled, **own})()
    module.noted = noted
    return module


AS_WITH_DDP: list[tuple[dict[str, Any], str]] = [
    ({"max_steps": 21, "max_epochs": -1}, "plain"),
    ({"max_epochs": 3, "val_check_interval": 3}, "plain"),
    ({"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None}, "plain"),
    ({"max_epochs": 3, "check_val_every_n_epoch": 2}, "plain"),
    ({"max_epochs": 2, "accumulate_grad_batches": 3}, "plain"),
    ({"max_steps": 48, "max_epochs": -1}, "manual"),
    ({"max_epochs": 2, "min_epochs": 2, "limit_train_batches": 6}, "plain"),
]


def test_of_equal_unknown_lengths_all_happens_when_it_does_with_ddp() -> None:
    def run(rank: int, world_size: int) -> Any:
        told = []
        for choices, kind in AS_WITH_DDP:
            for strategy in ("ddp", fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 20})):
                model = recording(LIGHTNING, rank, kind)
                trainer = fits.trainer(strategy=strategy, devices=world_size, num_sanity_val_steps=0, **choices)
                trainer.fit(model, stream((rank, 0, 1), 8), stream((9, 0, 1), 2))
                told.append((model.noted, trainer.global_step, trainer.current_epoch))
        return told

    for told in run_processes(run, 2, timeout=120.0):
        for choices, ddp, ours in zip(AS_WITH_DDP, told[::2], told[1::2], strict=True):
            assert ours == ddp, choices
