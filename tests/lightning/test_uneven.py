"""Worker groups whose loaders end at different steps end every epoch together, never hang, and
resume exactly.
"""

import csv
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_sdiloco import DropCompute
from tests import fits
from tests.bits import same
from tests.fits import LIGHTNING, Announced, Place, Stream, batches
from tests.lightning.test_checkpoint import saving
from tests.methods import Paced
from tests.ranks import agreed, in_ranks, run_processes
from tests.training import mlp

pl = importlib.import_module(LIGHTNING)
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": [["*"]]}


class Ended(NamedTuple):
    """A batch that has ended, and the inner steps made by then."""

    epoch: int
    index: int
    step: int


def training_step(self: Any, parts: Any, index: int) -> Any:
    loss = self.loss(parts)
    self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=8)
    return loss


def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    self.log("ended", 1.0, sync_dist=True, batch_size=8)
    step = self.trainer.global_step
    self.batches.append(Ended(self.trainer.current_epoch, batch_idx, step))
    if batch is None:
        self.idle.append(step)


def validation_step(self: Any, parts: Any, index: int) -> None:
    noisy = parts[0] + torch.randn_like(parts[0])  # as a generative model may draw
    self.log("val", nn.functional.mse_loss(self.net(noisy), parts[1]), sync_dist=True)


def on_validation_epoch_end(self: Any) -> None:
    if not self.trainer.sanity_checking:
        self.validated.append((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))


HOOKS = (training_step, on_train_batch_end, validation_step, on_validation_epoch_end)


def noting(distribution: str = LIGHTNING, inner: str = "sgd", seed: int = 0, **members: Any) -> Any:
    """A module that logs over all ranks, draws random numbers, notes what happens, and has members
    of its own.
    """
    hooks = {hook.__name__: hook for hook in HOOKS}
    notes: dict[str, Any] = {"batches": [], "idle": [], "validated": []}
    net = nn.Sequential(*mlp(seed), nn.Dropout(0.2))
    return fits.module(distribution, inner, seed, net, **{**hooks, **notes, **members})


def train_both(self: Any, parts: Any, index: int) -> None:
    for optimizer in self.optimizers():
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
        optimizer.step()


def two_optimizers(self: Any) -> Any:
    return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net[:3], self.net[3:])]


def gan(
    distribution: str = LIGHTNING, inner: str = "sgd", seed: int = 0, **members: Callable[..., Any]
) -> Any:
    """Manual optimization with two optimizers."""
    hooks = {"training_step": train_both, "configure_optimizers": two_optimizers}
    base = type(noting(distribution, seed=seed, **hooks))
    module = type("Gan", (base,), members)()
    module.automatic_optimization = False
    return module


METRICS = ("loss_epoch", "ended", "val")


def notes_of(trainer: Any, model: Any) -> dict[str, Any]:
    """The notes of a fit; those under ``"common"`` must be the same in all ranks."""
    metrics = trainer.callback_metrics
    return {
        "common": {
            "batches": model.batches,
            "validated": model.validated,
            "metrics": {name: float(metrics.get(name, inf)) for name in METRICS},
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
        },
        "idle": model.idle,
        "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "schedulers": [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs],
    }


def run_fit(
    rank: int,
    world_size: int,
    loader: Callable[[Place], Any],
    distribution: str = LIGHTNING,
    groups: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Fits in this rank, and returns its notes.

    The options are ``settings`` of the strategy, ``make`` and ``resume`` as of `fits.fit`, and
    those of a Trainer.
    """
    warnings = fits.said_by("lightning_sdiloco.lightning.epochs")
    settings = CHOICES | options.pop("settings", {})
    make = options.pop("make", noting)
    resume = options.pop("resume", None)
    size = world_size // groups
    fitted = fits.fit(
        rank,
        world_size,
        groups,
        -1,
        settings,
        distribution,
        make=make,
        inspect=notes_of,
        trainer_choices={"max_epochs": 2, "num_sanity_val_steps": 0, **options},
        resume=resume,
        loader=loader((rank // size, rank % size, size)),
        validation=batches(9, 0, 1, 2),
    )
    return {**fitted, **fitted["inspected"], "warnings": warnings}


def epochs(common: dict[str, Any]) -> list[int]:
    """How many batches each epoch had."""
    numbers = [batch.epoch for batch in common["batches"]]
    return [numbers.count(epoch) for epoch in range(max(numbers) + 1)]


def in_two(self: Any, parts: Any, index: int) -> Any:
    return training_step(self, parts["a"], index) + training_step(self, parts["b"], index)


def step_of_the_iterator(self: Any, dataloader_iter: Any) -> Any:
    parts, index, _ = next(dataloader_iter)
    return training_step(self, parts, index)


from_the_iterator = partial(noting, training_step=step_of_the_iterator)


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
    slower = partial(torch.optim.lr_scheduler.StepLR, optimizers[0], 1)
    return optimizers, [
        {"scheduler": slower(gamma=0.99), "interval": "step"},
        {"scheduler": slower(gamma=0.5), "interval": "epoch"},
    ]


TUNED: dict[str, Any] = {
    "lr": 0.05,
    "on_train_start": lambda self: self.batches.clear(),
    "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=self.lr),
}
FINDER = pl.callbacks.LearningRateFinder(num_training_steps=20)
UNLOGGED = "Not every rank logged training_step.loss in epoch 1"


@dataclass
class Case:
    """The numbers of batches of each group, and the epochs that the groups make together."""

    batches: tuple[int, ...]
    epochs: list[int]
    lengths: tuple[int | None, ...] = ()
    """The lengths that loaders announce; None: unknown."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `run_fit`."""
    later: tuple[int, ...] = ()
    """The numbers of batches in later epochs, if they differ."""
    loader: Callable[[Place], Any] | None = None
    """Replaces the loader of these numbers."""
    warnings: tuple[str, ...] = ()
    """Of each group. By default: which group has no more batches."""
    validates: list[tuple[int, int]] | None = None
    """Epochs and batches. By default: the end of each epoch."""
    steps: int | None = None
    """By default: as many as batches."""
    idle: tuple[list[int], ...] | None = None
    """The idle steps of each group. By default: from its last batch to the end of the epoch."""
    resumes: tuple[float, ...] = ()
    """Steps from which the fit is resumed; a half: from the end of the epoch."""

    def load(self, place: Place, later: bool = False) -> Any:
        """The batches of a rank, or those of later epochs only."""
        if self.loader is not None:
            return self.loader(place)
        group = place[0]
        later_batches = (self.later or self.batches)[group]
        first_batches = later_batches if later else self.batches[group]
        if not self.lengths or self.lengths[group] is None:
            return Stream(place, first_batches, later_batches)
        return Announced(place, first_batches, self.lengths[group], later_batches)

    def play(self, rank: int, world_size: int, distribution: str, folder: Path) -> None:
        """Fits, and resumes from checkpoints of that fit."""
        groups = len(self.batches)
        fit = partial(run_fit, rank, world_size, distribution=distribution, groups=groups)
        plain = fit(self.load, **self.saving_options(distribution, folder))
        assert agreed([plain["common"], plain["report"]["landings"]])
        assert agreed(plain["outer"])
        assert agreed(plain["model"])
        group, shard = divmod(rank, world_size // groups)
        self.check(plain, group)
        self.check_warnings(plain["warnings"], group, shard)
        for step in self.resumes:
            at_epoch_end = step % 1 > 0
            loader = partial(self.load, later=at_epoch_end)
            path = f"{'epochs' if at_epoch_end else 'steps'}/step={int(step)}.ckpt"
            resumed = fit(loader, resume=folder / path, **self.options)
            assert_goes_on(resumed, plain, step)

    def saving_options(self, distribution: str, folder: Path) -> dict[str, Any]:
        """The options of a fit that saves often if the case resumes."""
        callbacks = list(self.options.get("callbacks", []))
        steps = {int(step) for step in self.resumes if step % 1 == 0}
        for step in steps:
            callbacks += saving(distribution, folder / "steps", every_n_train_steps=step)
        if self.resumes:
            callbacks += saving(distribution, folder / "epochs", every_n_epochs=1)
        saves = {"callbacks": callbacks, "enable_checkpointing": bool(self.resumes)}
        return {**self.options, **saves}

    def check(self, fitted: dict[str, Any], group: int) -> None:
        common = fitted["common"]
        assert epochs(common) == self.epochs
        assert common["global_step"] == (self.steps or sum(self.epochs))
        ends = [(epoch, length - 1) for epoch, length in enumerate(self.epochs)]
        assert common["validated"] == (ends if self.validates is None else self.validates)
        if self.idle:
            assert fitted["idle"] == self.idle[group]
        else:
            assert fitted["idle"] == self.steps_without_data(common["batches"], group)

    def steps_without_data(self, batches: list[Ended], group: int) -> list[int]:
        first_batches = self.batches[group]
        later_batches = (self.later or self.batches)[group]
        steps = []
        for epoch, index, step in batches:
            if index >= (first_batches if epoch == 0 else later_batches):
                steps.append(step)
        return steps

    def check_warnings(self, messages: list[str], group: int, shard: int) -> None:
        """The first rank of a group warns."""
        batches = self.batches[group]
        warning = after(batches) if batches < self.epochs[0] else ""
        if self.warnings:
            warning = self.warnings[group]
        if warning and shard == 0:
            assert any(warning in message for message in messages)
        else:
            assert messages == []


def assert_goes_on(resumed: dict[str, Any], plain: dict[str, Any], after_step: float) -> None:
    """A resumed fit makes the batches and validations that come after a step, with equal bits."""
    batches = plain["common"]["batches"]
    common = resumed["common"]
    assert common["batches"] == [batch for batch in batches if batch.step > after_step]
    steps = {(batch.epoch, batch.index): batch.step for batch in batches}
    validated = plain["common"]["validated"]
    assert common["validated"] == [batch for batch in validated if steps[batch] >= after_step]
    for name in ("global_step", "epoch", "metrics"):
        assert common[name] == plain["common"][name]
    assert resumed["idle"] == [step for step in plain["idle"] if step > after_step]
    assert resumed["stepped"] == plain["stepped"]
    assert same(resumed["outer"], plain["outer"])


def after(batches: int) -> str:
    return f"has no more data in epoch 0 after {batches} batches, but other groups do."


def unequal(*numbers: int | str, decided: int) -> tuple[str, str]:
    """The warnings of two groups about unequal numbers of batches."""
    text = ", ".join(f"group {group} has {number}" for group, number in enumerate(numbers))
    warning = (
        f"Worker groups have unequal numbers of batches: {text}. In all groups, every epoch ends"
    )
    return f"{warning} after {decided} batches", ""


def case(
    batches: tuple[int, ...],
    epochs: list[int],
    lengths: tuple[int | None, ...] = (),
    **choices: Any,
) -> Case:
    """A case. The choices are its fields and the options of `run_fit`."""
    fields = {name: choices.pop(name) for name in Case.__dataclass_fields__ if name in choices}
    return Case(batches, epochs, lengths, choices, **fields)


FEWEST = unequal(7, 10, decided=7)
# With sync_every=4 and overlap_steps=2 launches are after 4, 8, 12, ... inner steps, and land two
# later.
CASES = {
    # Known lengths: the fewest batches decide.
    "known": case(
        (7, 10),
        [7, 7],
        (7, 10),
        make=partial(noting, configure_optimizers=planned),
        warnings=FEWEST,
    ),
    "a share, and validation by one of what was agreed on": case(
        (8, 12),
        [4, 4],
        (8, 12),
        warnings=unequal(4, 6, decided=4),
        validates=[(0, 1), (0, 3), (1, 1), (1, 3)],
        limit_train_batches=0.5,
        val_check_interval=0.5,
    ),
    "known in one group": case(
        (6, 20), [6, 6], (6, None), warnings=unequal(6, "an unknown number", decided=6)
    ),
    "reloaded": case(
        (6, 7),
        [6, 6, 4, 4],
        loader=lambda place: None,
        warnings=unequal(6, 7, decided=6),
        make=partial(noting, train_dataloader=reloaded),
        reload_dataloaders_every_n_epochs=2,
        max_epochs=4,
    ),
    "dataloader_iter": case((7, 10), [7, 7], (7, 10), make=from_the_iterator, warnings=FEWEST),
    # Unknown lengths: all end after the last batch that any has ...
    "streams": case((7, 10), [10, 10]),
    "epochs shorter than a round": case(
        (2, 3), [3, 3, 3], max_epochs=3, settings={"sync_every": 8}
    ),
    "several loaders": case(
        (5, 7),
        [7, 7],
        loader=lambda place: {"a": batches(*place, 5), "b": batches(*place, 3 + 4 * place[0])},
        make=partial(noting, training_step=in_two),
    ),
    # ... or where the launch lands that tells of a group without data.
    "long streams": case((7, 30), [10, 12]),
    "a launch in the last batch": case((8, 30), [10, 12]),
    # Launches after 8, 10, 12, ... land three later.
    "several fragments": case(
        (9, 29), [13, 12], settings={"sync_every": 8, "overlap_steps": 3, "fragments": "strided:1"}
    ),
    "no batch in a later epoch": case(
        (50, 5), [10, 4], later=(50, 0), warnings=(UNLOGGED, after(5)), resumes=(10.5,)
    ),
    # A length that is announced and not kept.
    "short": case((30, 5), [10, 8], (30, 30)),
    "short in all": case((5, 5), [5, 5], (8, 8), validates=[]),
    "short, and in flight when the epoch ends": case(
        (7, 6), [7, 7, 7], (7, 7), settings={"sync_every": 7}, max_epochs=3
    ),
    "no batch of those announced": case(
        (3, 3),
        [3, 3],
        (3, 3),
        later=(3, 0),
        warnings=(UNLOGGED, "epoch 1 after 0"),
        settings={"sync_every": 20},
    ),
    # What idle batches count.
    "accumulation": case((5, 30), [18, 12], steps=10, accumulate_grad_batches=3),
    "manual optimization": case((5, 25), [10, 8], steps=36, make=gan),
    "max_steps": case((5, 25), [10, 1], validates=[(0, 9)], max_steps=11, max_epochs=-1),
    # 5: the last batch; 9: idle, the request in flight; after the epoch; 11: in the next; 16: idle,
    # just launched.
    "resumed": case((5, 25), [10, 8, 8], resumes=(5, 9, 10.5, 11, 16), max_epochs=3),
    # The loader of the second group is cut short.
    "resumed with the last batch of an epoch of known length": case(
        (5, 8), [5, 5], (5, 8), warnings=unequal(5, 8, decided=5), resumes=(5,)
    ),
    # 5: the last batch of an epoch; 6: the first; 9: in flight.
    "resumed where all end together": case(
        (5, 5),
        [5, 5, 3],
        validates=[(0, 4), (1, 4)],
        resumes=(5, 6, 9),
        max_steps=13,
        max_epochs=-1,
    ),
    # The first group logged nothing in training_step since then, and no launch tells of it before
    # the agreed length.
    "resumed, idle up to the agreed length": case(
        (5, 9), [9, 9], (9, 9), resumes=(7,), settings={"sync_every": 20}
    ),
    "a loader that yields None on purpose": case(
        (20, 20),
        [14],
        loader=lambda place: Paced(Announced(place, 20), speed=0.5 if place[0] else 1.0),
        validates=[],
        idle=([], [1, 3, 5, 7, 9, 11, 13]),
        resumes=(6,),
        max_steps=14,
        max_epochs=-1,
    ),
    # It takes all callbacks away, so nobody counts idle batches, and trains each rank for itself.
    "a tuner": case((7, 10), [10, 10], make=partial(noting, **TUNED), callbacks=[FINDER]),
    # Of more ranks than two.
    "ranks of a group differ": case(
        (5, 6),
        [5, 5],
        loader=lambda place: Announced(place, 5 + place[0] + 2 * place[1]),
        warnings=unequal("5 and 7", "6 and 8", decided=5),
    ),
    # The launch after 4 lands after 6, and that after 12 lands after 14.
    "three groups": case((3, 9, 30), [6, 8]),
}


@pytest.mark.parametrize(
    ("distribution", "world_size", "names"),
    [
        (LIGHTNING, 2, [*CASES][:-2]),
        (
            "pytorch_lightning",
            2,
            ["known", "long streams", "manual optimization", "no batch in a later epoch"],
        ),
        (LIGHTNING, 3, ["three groups"]),
        (LIGHTNING, 4, ["ranks of a group differ", "streams"]),
    ],
)
def test_groups_end_every_epoch_after_the_same_batch(
    distribution: str,
    world_size: int,
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a fit that is resumed there goes on bit for bit."""
    monkeypatch.chdir(tmp_path)

    def run(rank: int, world_size: int) -> None:
        for name in names:
            try:
                CASES[name].play(rank, world_size, distribution, tmp_path / name)
            except AssertionError as error:
                raise AssertionError(name) from error

    run_processes(run, world_size, timeout=240.0)


def announced(*numbers: int) -> Callable[[Place], Any]:
    """The loader of groups with these numbers of batches."""
    return lambda place: Announced(place, numbers[place[0]])


def dropping(place: Place) -> Any:
    return DropCompute(2)(Announced(place, 14))


IMPOSSIBLE: list[tuple[str, Callable[[Place], Any], dict[str, Any]]] = [
    ("group 0 has 0, group 1 has 8", announced(0, 8), {}),
    (
        "group 0 has 0, group 1 has an unknown number",
        lambda place: batches(*place, 8 * place[0]),
        {},
    ),
    ("val_check_interval", announced(4, 12), {"val_check_interval": 6}),
    ("val_check_interval", case((8, 4), [], (None, 4)).load, {"val_check_interval": 0.5}),
    ("limit_train_batches", announced(5, 25), {"limit_train_batches": 0.1}),
    ("accumulate_grad_batches=3 differ", dropping, {"accumulate_grad_batches": 3}),
    ("does not work with manual", dropping, {"make": gan}),
]


@in_ranks(2)
def test_data_that_cannot_work_is_refused_by_all_ranks(rank: int) -> None:
    for words, loader, options in IMPOSSIBLE:
        with pytest.raises((ValueError, MisconfigurationException), match=words) as caught:
            run_fit(rank, 2, loader, **options)
        # The rank with these data may raise Lightning's own error; the others raise a ValueError.
        kinds: list[Any] = [None] * 2
        torch.distributed.all_gather_object(kinds, caught.type)
        assert ValueError in kinds


def test_unknown_lengths_end_with_an_error_in_steps_that_take_their_own_batches() -> None:
    settings = {"timeout": timedelta(seconds=2)}
    loader = CASES["streams"].load
    run = partial(run_fit, loader=loader, make=from_the_iterator, settings=settings)
    assert sorted(run_processes(run, 2, expect_failure=True)) == [0, 1]


def moved(self: Any, batch: Any, device: Any, index: int) -> Any:
    return [part.to(device) for part in batch]


def after_the_move(self: Any, batch: Any, index: int) -> Any:
    return [part + 0 for part in batch]


@in_ranks(2)
def test_all_that_counts_steps_happens_in_all_groups_after_the_same_one(
    rank: int, tmp_path: Path
) -> None:
    """Checkpoints, validation, learning rates, early stopping, loggers and the progress bar, some
    in idle batches.
    """
    saved: list[int] = []
    make = partial(
        noting,
        configure_optimizers=scheduled,
        transfer_batch_to_device=moved,
        on_after_batch_transfer=after_the_move,
        on_save_checkpoint=lambda self, _: saved.append(self.trainer.global_step),
    )
    options = {
        "logger": CSVLogger(tmp_path / str(rank), "", ""),
        "callbacks": [
            *saving(LIGHTNING, tmp_path, every_n_train_steps=3),
            pl.callbacks.EarlyStopping("val", patience=3, min_delta=10.0),
            pl.callbacks.LearningRateMonitor(),
        ],
        "max_epochs": 9,
        "val_check_interval": 4,
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
        "enable_progress_bar": True,
    }
    fitted = run_fit(rank, 2, CASES["resumed"].load, make=make, **options)
    common = fitted["common"]
    steps = common["global_step"]
    ended_epochs = len(epochs(common))
    assert agreed([common])
    assert agreed(fitted["outer"])
    assert saved == list(range(3, steps + 1, 3))
    assert set(tmp_path.glob("*.ckpt")) == {tmp_path / f"step={step}.ckpt" for step in saved}
    assert fitted["schedulers"] == [steps, ended_epochs]
    assert fitted["learning_rate"] == pytest.approx(0.05 * 0.99**steps * 0.5**ended_epochs)
    assert all((index + 1) % 4 == 0 for _, index in common["validated"])
    assert 1 < common["epoch"] < 9, "early stopping stopped all of them"
    if rank == 0:
        assert len(fitted["idle"]) > 5
        trained = [step for step in range(steps) if step + 1 not in fitted["idle"]]
        assert logged_steps(tmp_path / "0") == trained, "nothing is logged again when idle"


def logged_steps(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]]


def test_a_group_that_ends_first_makes_the_others_wait_for_nothing() -> None:
    """Its loader takes a second to end. Meanwhile the other group trains up to its next launch and
    beyond.
    """
    times: list[float] = []

    class Slow(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            if self.place[0] == 0:
                time.sleep(1.0)
                times.append(time.monotonic())

    def run(rank: int, world_size: int) -> list[float]:
        load = lambda place: DataLoader(Slow(place, 60 if place[0] else 5), batch_size=None)  # noqa: E731
        make = partial(noting, on_train_batch_end=lambda self, *_: times.append(time.monotonic()))
        run_fit(rank, world_size, load, make=make, settings={"sync_every": 20}, max_epochs=1)
        return times

    first, second = run_processes(run, 2)
    # It launched after 20, and waits for its landing after 22.
    assert second[20] < first[4] < second[21]
    assert len(second) == 22


NOTED_HOOKS = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_train_end",
)
AS_WITH_DDP: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (noting, {"max_steps": 21, "max_epochs": -1}),
    (noting, {"max_epochs": 3, "val_check_interval": 3}),
    (noting, {"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None}),
    (noting, {"max_epochs": 3, "check_val_every_n_epoch": 2}),
    (noting, {"max_epochs": 2, "accumulate_grad_batches": 3}),
    (gan, {"max_steps": 48, "max_epochs": -1}),
    (noting, {"max_epochs": 2, "min_epochs": 2, "limit_train_batches": 6}),
]


def events_of_a_fit(rank: int, strategy: Any, make: Any, choices: dict[str, Any]) -> list[Any]:
    """The hooks that are called, each with the counts and learning rates of that moment."""
    events: list[Any] = []

    def noting_hook(name: str) -> Callable[..., None]:
        def note(self: Any, *_: Any, **__: Any) -> None:
            trainer = self.trainer
            rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
            loop = trainer.fit_loop.epoch_loop
            counts = trainer.current_epoch, loop.batch_idx, trainer.global_step
            events.append((name, *counts, trainer.is_last_batch, *rates))

        return note

    hooks = {name: noting_hook(name) for name in NOTED_HOOKS}
    model = make(seed=rank, configure_optimizers=scheduled, **hooks)
    trainer = fits.trainer(strategy=strategy, devices=2, num_sanity_val_steps=0, **choices)
    trainer.fit(model, batches(rank, 0, 1, 8), batches(9, 0, 1, 2))
    return [*events, trainer.global_step, trainer.current_epoch]


@in_ranks(2)
def test_of_equal_unknown_lengths_all_happens_when_it_does_with_ddp(rank: int) -> None:
    for make, choices in AS_WITH_DDP:
        ours = fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 20})
        events = events_of_a_fit(rank, ours, make, choices)
        assert events == events_of_a_fit(rank, "ddp", make, choices), choices


@in_ranks(2)
def test_a_fit_that_ended_by_steps_has_looked_at_no_batch_that_a_longer_one_misses(
    rank: int, tmp_path: Path
) -> None:
    loader = case((8, 8), []).load
    ended: list[Ended] = []
    for steps, resume in ((3, None), (8, tmp_path / "step=3.ckpt")):
        options = {
            "max_steps": steps,
            "callbacks": saving(LIGHTNING, tmp_path, every_n_train_steps=1),
            "enable_checkpointing": True,
            "resume": resume,
        }
        ended += run_fit(rank, 2, loader, **options)["common"]["batches"]
    assert [batch.step for batch in ended] == list(range(1, 9))


@in_ranks(4)
def test_a_rank_leaves_micro_batches_out_and_its_group_weighs_less(rank: int) -> None:
    left_out: list[int] = []
    weights: list[float] = []

    def note_weight(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch is None:
            left_out.append(batch_idx)
        weights.append(self.trainer.strategy.engine.fragmented_model.fragments[0].weight)

    def load(place: Place) -> Any:
        """Of every other step, one rank of the second group leaves out all that it may."""
        budget = 0.0 if place[:2] == (1, 1) else inf
        return DropCompute(3, budget=budget)(Announced(place, 14))

    # Without logging, which waits for all ranks of a group.
    quietly = lambda self, parts, index: self.loss(parts)  # noqa: E731
    make = partial(noting, training_step=quietly, on_train_batch_end=note_weight)
    fitted = run_fit(rank, 4, load, max_epochs=1, accumulate_grad_batches=3, make=make)
    assert fitted["report"]["inner_steps"] == 5
    # Four inner steps of three micro-batches, and one of two; the first launch is after the fourth.
    if rank < 3:
        assert left_out == []
        assert weights[8] == 9
    else:
        assert left_out == [1, 4, 7, 10]
        assert weights[8] == 6
    assert agreed(fitted["outer"])
