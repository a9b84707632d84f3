"""Worker groups whose loaders end at different steps end every epoch together, never hang, and resume exactly."""

import csv
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_sdiloco import DropCompute
from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import (
    CHOICES,
    Announced,
    Place,
    Stream,
    assert_together,
    epochs,
    fit,
    gan,
    noting,
    run_fit,
    same,
    stream,
)
from tests.methods import Paced
from tests.ranks import run_processes

pl = importlib.import_module(LIGHTNING)


class Gaps(Stream):
    """Yields None on purpose in the second group."""

    def __iter__(self) -> Iterator[Any]:
        for index, parts in enumerate(super().__iter__()):
            yield None if self.place[0] == 1 and index in (2, 3) else parts


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


MOVES: dict[str, Any] = {
    "transfer_batch_to_device": lambda self, batch, device, index: [part.to(device) for part in batch],
    "on_after_batch_transfer": lambda self, batch, index: [part + 0 for part in batch],
}
UNLOGGED = "Not every rank logged training_step.loss in epoch 1"


@dataclass
class Case:
    """How many batches each group has, what its loader announces, and what epochs they make together.

    Where a group has had its batches, it is idle until the epoch ends, and warns; of unequal lengths group 0 warns.
    """

    batches: tuple[int, ...]
    epochs: list[int]
    lengths: tuple[int | None, ...] = ()  # None: unknown
    choices: dict[str, Any] = field(default_factory=dict)
    later: tuple[int, ...] = ()  # Batches in later epochs, if others
    loader: Callable[[Place], Any] | None = None  # Another one
    says: tuple[str, ...] | None = None
    idle: tuple[list[int], ...] | None = None
    validates: list[tuple[int, int]] | None = None  # Epoch and batch; at the end of each epoch if None
    steps: int | None = None  # As many as batches if None

    def load(self, place: Place) -> Any:
        group = place[0]
        length, later = (self.lengths or [None] * 9)[group], (self.later or self.batches)[group]
        if self.loader is not None:
            return self.loader(place)
        if length is None:
            return stream(place, self.batches[group], later)
        return Announced(place, self.batches[group], length, later)

    def idle_in(self, group: int) -> list[int]:
        if self.idle is not None:
            return self.idle[group]
        found, start = [], 0
        for number, length in enumerate(self.epochs):
            own = (self.later if number and self.later else self.batches)[group]
            found += range(start + own + 1, start + length + 1)
            start += length
        return found

    def said_by(self, group: int) -> str:
        if self.says is not None:
            return self.says[group]
        if len(set(self.lengths)) > 1:
            texts = [f"group {g} has {'an unknown number' if n is None else n}" for g, n in enumerate(self.lengths)]
            return unequal(", ".join(texts), self.epochs[0]) if group == 0 else ""
        return after(self.batches[group]) if self.batches[group] < self.epochs[0] else ""

    def assert_as_told(self, ranks: list[dict[str, Any]]) -> None:
        common, size = assert_together(ranks), len(ranks) // self.choices.get("groups", 2)
        assert epochs(common) == self.epochs
        assert common["global_step"] == (self.steps or sum(self.epochs))
        ends = [(epoch, length - 1) for epoch, length in enumerate(self.epochs)]
        assert common["validated"] == (ends if self.validates is None else self.validates)
        assert [rank["idle"] for rank in ranks] == [self.idle_in(rank // size) for rank in range(len(ranks))]
        for rank, result in enumerate(ranks):
            said = self.said_by(rank // size) if rank % size == 0 else ""
            assert any(said in text for text in result["warned"]) if said else not result["warned"], result["warned"]


def after(batches: int) -> str:
    return f"has no more batches in epoch 0 after {batches}, and others have."


def unequal(text: str, decided: int) -> str:
    return f"Worker groups have unequal numbers of batches: {text}. Every epoch ends after {decided} in all"


def of_fewest(one: int, other: int, **choices: Any) -> Case:
    return Case((one, other), [one, one], (one, other), choices)


# With sync_every=4 and overlap_steps=2 launches are after 4, 8, 12, ... inner steps, and land two later.
CASES = {
    # Known lengths: the fewest batches decide.
    "known": of_fewest(7, 10, make=partial(noting, configure_optimizers=planned)),
    "validation by a share of what was agreed on": Case(
        (8, 12), [8, 8], (8, 12), {"val_check_interval": 0.5}, validates=[(0, 3), (0, 7), (1, 3), (1, 7)]
    ),
    "a share": Case(
        (8, 12), [4, 4], (8, 12), {"limit_train_batches": 0.5}, says=(unequal("group 0 has 4, group 1 has 6", 4), "")
    ),
    "known in one group": Case((6, 20), [6, 6], (6, None)),
    "reloaded": Case(
        (6, 7),
        [6, 6, 4, 4],
        (6, 7),
        {"make": partial(noting, train_dataloader=reloaded), "reload_dataloaders_every_n_epochs": 2, "max_epochs": 4},
        loader=lambda place: None,
        idle=([], []),
    ),
    "dataloader_iter": of_fewest(7, 10, make=partial(noting, training_step=from_the_iterator)),
    # Unknown lengths: all end after the last batch that any has ...
    "streams": Case((7, 10), [10, 10]),
    "epochs shorter than a round": Case(
        (2, 3), [3, 3, 3], choices={"max_epochs": 3, "choices": {**CHOICES, "sync_every": 8}}
    ),
    "several loaders": Case(
        (5, 7),
        [7, 7],
        choices={"make": partial(noting, training_step=in_two)},
        loader=lambda place: {"a": stream(place, 5), "b": stream(place, 3 + 4 * place[0])},
    ),
    # ... or where the launch lands that tells of a group without data.
    "long streams": Case((7, 30), [10, 12]),
    "a launch in the last batch": Case((8, 30), [10, 12]),
    "several fragments": Case(  # Launches after 8, 10, 12, ... land three later.
        (9, 29), [13, 12], choices={"choices": {"sync_every": 8, "overlap_steps": 3, "fragments": "strided:1"}}
    ),
    "no batch in a later epoch": Case((50, 5), [10, 4], later=(50, 0), says=(UNLOGGED, after(5))),
    # A length that is announced and not kept.
    "short": Case((30, 5), [10, 8], (30, 30)),
    "short in all": Case((5, 5), [5, 5], (8, 8), validates=[]),
    "short, and in flight when the epoch ends": Case(
        (7, 6), [7, 7, 7], (7, 7), {"choices": {**CHOICES, "sync_every": 7}, "max_epochs": 3}
    ),
    "no batch of those announced": Case(
        (3, 3),
        [3, 3],
        (3, 3),
        {"choices": {**CHOICES, "sync_every": 20}},
        later=(3, 0),
        says=(UNLOGGED, "epoch 1 after 0"),
    ),
    # What idle batches count.
    "accumulation": Case(
        (5, 30),
        [18, 12],
        choices={"accumulate_grad_batches": 3},
        idle=([2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 8, 8, 8, 9, 9, 9, 10], []),
        steps=10,
    ),
    "manual optimization": Case(
        (5, 25), [10, 8], choices={"make": gan}, idle=([12, 14, 16, 18, 20, 32, 34, 36], []), steps=36
    ),
    "None on purpose": Case(
        (10, 10),
        [10],
        choices={"max_steps": 10},
        loader=lambda place: DataLoader(Gaps(place, 100), batch_size=None),
        idle=([], [3, 4]),
        validates=[],
    ),
    "hooks that move batches": Case((5, 25), [10, 8], choices={"make": partial(noting, **MOVES)}),
    "max_steps=9": Case((5, 25), [9], choices={"max_steps": 9, "max_epochs": -1}, validates=[]),
    "max_steps=11": Case((5, 25), [10, 1], choices={"max_steps": 11, "max_epochs": -1}, validates=[(0, 9)]),
    # Of more ranks than two.
    "ranks of a group differ": Case(
        (5, 6),
        [5, 5],
        loader=lambda place: Announced(place, 5 + place[0] + 2 * place[1]),
        says=(unequal("group 0 has 5 and 7, group 1 has 6 and 8", 5), ""),
    ),
    # The launch after 4 lands after 6, and that after 12 lands after 14.
    "three groups": Case((3, 9, 30), [6, 8], choices={"groups": 3}),
}


@pytest.mark.parametrize(
    ("distribution", "world_size", "names"),
    [
        (LIGHTNING, 2, [*CASES][:-2]),
        ("pytorch_lightning", 2, ["known", "long streams", "manual optimization"]),
        (LIGHTNING, 3, ["three groups"]),
        (LIGHTNING, 4, ["ranks of a group differ", "streams"]),
    ],
)
def test_groups_end_every_epoch_after_the_same_batch(distribution: str, world_size: int, names: list[str]) -> None:
    def run(rank: int, world_size: int) -> list[Any]:
        return [run_fit(rank, world_size, CASES[name].load, distribution, **CASES[name].choices) for name in names]

    wrong = {}
    for name, *results in zip(names, *run_processes(run, world_size, timeout=180.0), strict=True):
        try:
            CASES[name].assert_as_told(results)
        except AssertionError as error:
            wrong[name] = str(error)
    assert wrong == {}


def test_data_that_cannot_work_is_refused_by_all_ranks() -> None:
    cases: list[tuple[Case, str]] = [
        (Case((0, 8), [], (0, 8)), "group 0 has 0, group 1 has 8"),
        (Case((0, 8), []), "group 0 has 0, group 1 has an unknown number"),
        (Case((4, 12), [], (4, 12), {"val_check_interval": 6}), "val_check_interval"),
        (Case((8, 4), [], (None, 4), {"val_check_interval": 0.5}), "val_check_interval"),
        (Case((5, 25), [], (5, 25), {"limit_train_batches": 0.1}), "limit_train_batches"),
        (
            Case((14, 14), [], loader=lambda place: DropCompute(2)(Announced(place, 14))),
            "accumulate_grad_batches=3 differ",
        ),
        (
            Case((14, 14), [], choices={"make": gan}, loader=lambda place: DropCompute(3)(Announced(place, 14))),
            "does not go with manual optimization",
        ),
    ]
    cases[5][0].choices["accumulate_grad_batches"] = 3

    def run(rank: int, world_size: int) -> list[tuple[str, str]]:
        errors = []
        for case, _ in cases:
            with pytest.raises(Exception) as refusal:  # noqa: PT011  whose data it is says it with Lightning's own
                run_fit(rank, world_size, case.load, **case.choices)
            errors.append((type(refusal.value).__name__, str(refusal.value)))
        return errors

    for (_, expected), *errors in zip(cases, *run_processes(run, 2), strict=True):
        assert [text for _, text in errors if expected not in text] == []
        kinds = {kind for kind, _ in errors}
        assert "ValueError" in kinds
        assert kinds <= {"ValueError", "MisconfigurationException"}


def test_unknown_lengths_in_a_training_step_that_takes_its_batches_itself_end_with_an_error() -> None:
    def run(rank: int, world_size: int) -> None:
        make, choices = partial(noting, training_step=from_the_iterator), {**CHOICES, "timeout": timedelta(seconds=2)}
        run_fit(rank, world_size, CASES["streams"].load, make=make, choices=choices)

    assert sorted(run_processes(run, 2, expect_failure=True)) == [0, 1]


def test_all_that_counts_steps_happens_in_all_groups_after_the_same_one(tmp_path: Path) -> None:
    """Checkpoints, validation, learning rates, early stopping, loggers and the progress bar, some in idle batches."""

    def run(rank: int, world_size: int) -> dict[str, Any]:
        saved: list[int] = []

        class Noting(pl.callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
            def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
                saved.append(trainer.global_step)
                super()._save_checkpoint(trainer, filepath)

        result = run_fit(
            rank,
            world_size,
            CASES["hooks that move batches"].load,
            make=partial(noting, configure_optimizers=scheduled),
            inspect=lambda trainer, module: (
                saved,
                trainer.optimizers[0].param_groups[0]["lr"],
                [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs],
            ),
            callbacks=[
                Noting(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1),
                pl.callbacks.EarlyStopping("val", patience=3, min_delta=10.0),
                pl.callbacks.LearningRateMonitor(),
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
    own: dict[str, Any] = {
        "lr": 0.05,
        "on_train_start": lambda self: self.batches.clear(),
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=self.lr),
    }

    def run(rank: int, world_size: int) -> dict[str, Any]:
        finder = pl.callbacks.LearningRateFinder(num_training_steps=20)
        return run_fit(rank, world_size, CASES["streams"].load, make=partial(noting, **own), callbacks=[finder])

    assert epochs(assert_together(run_processes(run, 2))) == [10, 10]


def test_a_fit_leaves_nothing_behind_and_the_next_agrees_anew() -> None:
    def run(rank: int, world_size: int) -> Any:
        model, strategy = noting(LIGHTNING), fits.strategy(worker_groups=2, **CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_epochs=1)
        before = set(vars(trainer.fit_loop)), set(vars(trainer.fit_loop.epoch_loop))
        trainer.fit(model, stream((rank, 0, 1), 5 + 3 * rank))
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
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            if self.place[0] == 0:
                time.sleep(1.0)
                ended.append(time.monotonic())

    def run(rank: int, world_size: int) -> list[float]:
        run_fit(
            rank,
            world_size,
            lambda place: DataLoader(Slow(place, 60 if place[0] else 5), batch_size=None),
            make=partial(noting, on_train_batch_end=lambda self, *_: ended.append(time.monotonic())),
            choices={**CHOICES, "sync_every": 20},
            max_epochs=1,
        )
        return ended

    first, second = run_processes(run, 2)
    assert second[20] < first[4] < second[21], "it launched after 20, and waits for its landing after 22"
    assert len(second) == 22


HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end")
HOOKS += ("on_validation_epoch_end", "on_train_end")


def test_of_equal_unknown_lengths_all_happens_when_it_does_with_ddp() -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"max_steps": 21, "max_epochs": -1}, noting),
        ({"max_epochs": 3, "val_check_interval": 3}, noting),
        ({"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None}, noting),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, noting),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, noting),
        ({"max_steps": 48, "max_epochs": -1}, gan),
        ({"max_epochs": 2, "min_epochs": 2, "limit_train_batches": 6}, noting),
    ]

    def play(rank: int, strategy: Any, make: Any, choices: dict[str, Any]) -> Any:
        noted: list[Any] = []

        def hook(name: str) -> Callable[..., None]:
            def note(self: Any, *_: Any, **__: Any) -> None:
                loop, rates = (
                    self.trainer.fit_loop.epoch_loop,
                    [o.param_groups[0]["lr"] for o in self.trainer.optimizers],
                )
                at = self.trainer.current_epoch, loop.batch_idx, self.trainer.global_step
                noted.append((name, *at, self.trainer.is_last_batch, *rates))

            return note

        model = make(LIGHTNING, seed=rank, configure_optimizers=scheduled, **{name: hook(name) for name in HOOKS})
        trainer = fits.trainer(strategy=strategy, devices=2, num_sanity_val_steps=0, **choices)
        trainer.fit(model, stream((rank, 0, 1), 8), stream((9, 0, 1), 2))
        return noted, trainer.global_step, trainer.current_epoch

    def run(rank: int, world_size: int) -> list[Any]:
        wrong = []
        for choices, make in cases:
            ours = fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 20})
            if play(rank, ours, make, choices) != play(rank, "ddp", make, choices):
                wrong.append(choices)
        return wrong

    assert run_processes(run, 2, timeout=120.0) == [[], []]


# Resuming


def dropping(distribution: str, seed: int) -> Any:
    """A module that draws random numbers in training and, as a generative one may, in validation."""

    def validation_step(self: Any, parts: Any, index: int) -> None:
        type(self).__mro__[1].validation_step(self, (parts[0] + torch.randn_like(parts[0]), parts[1]), index)

    module = noting(distribution, seed=seed, validation_step=validation_step)
    module.net = nn.Sequential(*module.net, nn.Dropout(0.2))
    return module


@dataclass
class Resumed:
    """When a fit saves, and from which of its checkpoints it goes on."""

    loader: Callable[[Place, bool], Any]  # The bool: of a fit that is resumed
    epochs: list[int]
    steps: tuple[int, ...]
    saves: dict[str, Any] = field(default_factory=lambda: {"every_n_train_steps": 1})
    choices: dict[str, Any] = field(default_factory=lambda: {"max_epochs": 3})

    def run(self, rank: int, distribution: str, folder: Path, step: int = 0) -> dict[str, Any]:
        callbacks = importlib.import_module(distribution).callbacks
        return run_fit(
            rank,
            2,
            lambda place: self.loader(place, step > 0),
            distribution,
            make=dropping,
            resume=str(folder / "0" / f"step={step}.ckpt") if step else None,
            callbacks=[callbacks.ModelCheckpoint(folder / str(step), filename="{step}", save_top_k=-1, **self.saves)],
            enable_checkpointing=True,
            inspect=lambda trainer, module: trainer.fit_loop.epoch_loop._batches_that_stepped,
            **self.choices,
        )


def uneven(place: Place, _: bool) -> Any:
    return Stream(place, 5 + 20 * place[0])


def only_once(place: Place, resumed: bool) -> Any:
    # The resumed fit begins with the second epoch.
    return stream(place, 0 if resumed else 5, later=0) if place[0] else stream(place, 50)


RESUMED = {
    # 5: the last batch; 9: idle, the request in flight; 11: in the next epoch; 16: idle, just launched.
    "while a group is idle": Resumed(uneven, [10, 8, 8], (5, 9, 11, 16)),
    "after an epoch": Resumed(uneven, [10, 8, 8], (10,), {"every_n_epochs": 1}),
    # The loader of the second group is cut short.
    "with the last batch of an epoch of known length": Resumed(
        lambda place, _: Announced(place, 5 + 3 * place[0]), [5, 5, 5], (5,)
    ),
    # 5: the last batch of an epoch; 6: the first; 9: in flight.
    "where all end together": Resumed(
        lambda place, _: Stream(place, 5), [5, 5, 3], (5, 6, 9), choices={"max_steps": 13, "max_epochs": -1}
    ),
    "without data in the next epoch": Resumed(
        only_once, [10, 4], (10,), {"every_n_epochs": 1, "save_on_train_epoch_end": True}, {"max_epochs": 2}
    ),
    # The first group logged nothing in training_step since then, and no launch tells of it before the agreed length.
    "idle up to the agreed length": Resumed(
        lambda place, _: Announced(place, 5 + 4 * place[0], 9),
        [9, 9],
        (7,),
        choices={"max_epochs": 2, "choices": {**CHOICES, "sync_every": 20}},
    ),
}


@pytest.mark.parametrize(
    ("distribution", "names"),
    [(LIGHTNING, [*RESUMED]), ("pytorch_lightning", ["without data in the next epoch"])],
)
def test_a_fit_resumed_gives_the_bits_of_one_that_was_not_interrupted(
    distribution: str, names: list[str], tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        return [
            [RESUMED[name].run(rank, distribution, tmp_path / name, step) for step in (0, *RESUMED[name].steps)]
            for name in names
        ]

    wrong = {}
    for name, *ranks in zip(names, *run_processes(run, 2, timeout=240.0), strict=True):
        case = RESUMED[name]
        assert epochs(assert_together([fits[0] for fits in ranks])) == case.epochs, name
        for plain, *all_resumed in ranks:
            at = {(epoch, batch): step for epoch, batch, step in plain["common"]["batches"]}
            for step, resumed in zip(case.steps, all_resumed, strict=True):
                ours, theirs = resumed["common"], plain["common"]
                first = step + ("every_n_epochs" in case.saves)  # what is due at the end of the batch was done then
                right = {
                    "batches": ours["batches"] == [noted for noted in theirs["batches"] if noted[2] > step],
                    "validated": ours["validated"] == [v for v in theirs["validated"] if at[v] >= first],
                    "metrics": ours["metrics"] == theirs["metrics"],
                    "idle": resumed["idle"] == [idle for idle in plain["idle"] if idle > step],
                    "inspected": resumed["inspected"] == plain["inspected"],
                    "outer": same(resumed["outer"], plain["outer"]),
                }
                if not all(right.values()):
                    wrong[name, step] = right
    assert wrong == {}


def test_a_fit_that_ended_by_steps_has_looked_at_no_batch_that_a_longer_one_misses(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        case = Resumed(lambda place, _: Stream(place, 8), [], (), choices={"max_steps": 3})
        trained = case.run(rank, LIGHTNING, tmp_path)
        case.choices = {"max_steps": 8}
        return trained["common"]["batches"] + case.run(rank, LIGHTNING, tmp_path, 3)["common"]["batches"]

    for noted in run_processes(run, 2):
        assert [step for _, _, step in noted] == list(range(1, 9))


# Loaders that yield None on purpose


def test_a_paced_group_is_idle_in_its_share_of_the_steps_and_resumes_where_it_was(tmp_path: Path) -> None:
    def paced(place: Place, _: bool) -> Any:
        return Paced(Announced(place, 14), speed=0.5) if place[0] else Announced(place, 14)

    def run(rank: int, world_size: int) -> Any:
        case = Resumed(paced, [14], (6,), {"every_n_train_steps": 6}, {"max_epochs": 1})
        return [case.run(rank, LIGHTNING, tmp_path, step) for step in (0, 6)]

    (first, first_resumed), (second, second_resumed) = run_processes(run, 2)
    assert first["common"] == {**second["common"], "metrics": first["common"]["metrics"]}
    assert first["common"]["inner_steps"] == first["common"]["global_step"] == 14
    assert (first["idle"], second["idle"]) == ([], [1, 3, 5, 7, 9, 11, 13])
    assert second_resumed["idle"] == [7, 9, 11, 13]
    assert all(same(first["outer"], rank["outer"]) for rank in (second, first_resumed, second_resumed))
    assert first["warned"] == second["warned"] == []


def test_a_rank_leaves_micro_batches_out_and_its_group_weighs_less() -> None:
    def train_quietly(self: Any, parts: Any, index: int) -> Any:
        return (
            type(self).__mro__[2].training_step(self, parts, index)
        )  # what is logged over a group waits for all of it

    def note_weight(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.idle += [batch_idx] if batch is None else []
        self.batches.append(self.trainer.strategy.engine.rounds.fragments[0].weight)

    def dropping(place: Place) -> Any:
        """All that may be left out is, of every other step on one rank of the second group."""
        return DropCompute(3, budget=0.0 if place[:2] == (1, 1) else inf)(Announced(place, 14))

    choices = {"max_epochs": 1, "accumulate_grad_batches": 3}
    own = {"training_step": train_quietly, "on_train_batch_end": note_weight}
    ranks = fit(4, dropping, **choices, make=partial(noting, **own))
    assert [rank["common"]["inner_steps"] for rank in ranks] == [5] * 4
    # Four inner steps of three micro-batches, and one of two; the first launch is after the fourth.
    assert [rank["idle"] for rank in ranks] == [[], [], [], [1, 4, 7, 10]]
    assert [rank["common"]["batches"][8] for rank in ranks] == [9, 9, 9, 6]
    assert all(same(rank["outer"], ranks[0]["outer"]) for rank in ranks)
    # Where nothing is late, the last bit is that of the run without it.
    never = fit(2, lambda place: DropCompute(3, budget="auto")(Announced(place, 14)), **choices)
    without = fit(2, lambda place: Announced(place, 14), **choices)
    assert same(never[0]["outer"], without[0]["outer"])
