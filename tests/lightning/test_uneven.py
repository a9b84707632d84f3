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
from typing import Any

import pytest
import torch
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


def training_step(self: Any, parts: Any, index: int) -> Any:
    loss = self.loss(parts)
    self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=8)
    return loss


def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    self.log("ended", 1.0, sync_dist=True, batch_size=8)
    self.batches.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step))
    self.idle.extend([self.trainer.global_step] if batch is None else [])


def validation_step(self: Any, parts: Any, index: int) -> None:
    noisy = parts[0] + torch.randn_like(parts[0])  # as a generative model may draw
    self.log("val", nn.functional.mse_loss(self.net(noisy), parts[1]), sync_dist=True)


def on_validation_epoch_end(self: Any) -> None:
    if not self.trainer.sanity_checking:
        self.validated.append((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))


def noting(distribution: str = LIGHTNING, inner: str = "sgd", seed: int = 0, **members: Any) -> Any:
    """A module that logs over all ranks, draws random numbers, notes what happens, and has members
    of its own.
    """
    hooks = (training_step, on_train_batch_end, validation_step, on_validation_epoch_end)
    noted = {**{hook.__name__: hook for hook in hooks}, "batches": [], "idle": [], "validated": []}
    net = nn.Sequential(*mlp(seed), nn.Dropout(0.2))
    return fits.module(distribution, inner, seed, net, **{**noted, **members})


def gan(
    distribution: str = LIGHTNING, inner: str = "sgd", seed: int = 0, **members: Callable[..., Any]
) -> Any:
    """Manual optimization with two optimizers."""

    def training_step(self: Any, parts: Any, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
            optimizer.step()

    def configure_optimizers(self: Any) -> Any:
        return [
            torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net[:3], self.net[3:])
        ]

    own = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    module = type("Gan", (type(noting(distribution, seed=seed, **own)),), members)()
    module.automatic_optimization = False
    return module


def run_fit(
    rank: int,
    world_size: int,
    loader: Callable[[Place], Any],
    distribution: str = LIGHTNING,
    groups: int = 2,
    choices: dict[str, Any] = {},  # noqa: B006
    make: Callable[..., Any] = noting,
    resume: Path | None = None,
    inspect: Callable[[Any, Any], Any] = lambda trainer, module: None,
    **trainer_choices: Any,
) -> dict[str, Any]:
    """Fits in this rank; what must be the same in all ranks is under ``"common"``."""

    def look(trainer: Any, model: Any) -> dict[str, Any]:
        metrics = {
            n: float(trainer.callback_metrics.get(n, inf)) for n in ("loss_epoch", "ended", "val")
        }
        common = {"batches": model.batches, "validated": model.validated, "metrics": metrics}
        common |= {"global_step": trainer.global_step, "epoch": trainer.current_epoch}
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        return {
            "common": common,
            "idle": model.idle,
            "stepped": stepped,
            "inspected": inspect(trainer, model),
        }

    warned = fits.said_by("lightning_sdiloco.lightning.epochs")
    size = world_size // groups
    place = (rank // size, rank % size, size)
    how = {"max_epochs": 2, "num_sanity_val_steps": 0, **trainer_choices}
    own: dict[str, Any] = {"make": make, "inspect": look, "trainer_choices": how, "resume": resume}
    own |= {"loader": loader(place), "validation": batches(9, 0, 1, 2)}
    fitted = fits.fit(rank, world_size, groups, -1, CHOICES | choices, distribution, **own)
    return {**fitted, **fitted.pop("inspected"), "warned": warned}


def epochs(common: dict[str, Any]) -> list[int]:
    """How many batches each epoch had."""
    numbers = [epoch for epoch, _, _ in common["batches"]]
    return [numbers.count(epoch) for epoch in range(max(numbers) + 1)]


def in_two(self: Any, parts: Any, index: int) -> Any:
    return sum(training_step(self, parts[name], index) for name in ("a", "b"))


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
    shares = {"step": 0.99, "epoch": 0.5}
    schedules = {
        by: torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=share)
        for by, share in shares.items()
    }
    return optimizers, [
        {"scheduler": schedule, "interval": by} for by, schedule in schedules.items()
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
    """How many batches each group has, what its loader announces, and what epochs they make
    together.
    """

    batches: tuple[int, ...]
    epochs: list[int]
    lengths: tuple[int | None, ...] = ()  # None: unknown
    given: dict[str, Any] = field(default_factory=dict)  # To `run_fit`
    later: tuple[int, ...] = ()  # Batches in later epochs, if others
    loader: Callable[[Place], Any] | None = None  # Another one
    says: tuple[str, ...] = ()
    validates: list[tuple[int, int]] | None = (
        None  # Epoch and batch; at the end of each epoch if None
    )
    steps: int | None = None  # As many as batches if None
    idle: tuple[list[int], ...] | None = (
        None  # Where a group has had its batches, until the epoch ends, if None
    )
    resumes: tuple[
        float, ...
    ] = ()  # From which steps it is resumed; and a half: from the end of the epoch

    def load(self, place: Place, later: bool = False) -> Any:
        """The batches of a rank, or those of later epochs alone."""
        if self.loader is not None:
            return self.loader(place)
        group = place[0]
        others = (self.later or self.batches)[group]
        number = others if later else self.batches[group]
        if not self.lengths or self.lengths[group] is None:
            return Stream(place, number, others)
        return Announced(place, number, self.lengths[group], others)

    def play(self, rank: int, world_size: int, distribution: str, folder: Path) -> None:
        """Fits, and resumes from checkpoints of that. A group that is idle says so once."""
        often = saving(distribution, folder / "steps", every_n_train_steps=1)
        often += saving(distribution, folder / "epochs", every_n_epochs=1)
        callbacks = [*self.given.get("callbacks", []), *(often if self.resumes else [])]
        own: dict[str, Any] = {
            **self.given,
            "callbacks": callbacks,
            "enable_checkpointing": bool(self.resumes),
        }
        plain = run_fit(rank, world_size, self.load, distribution, **own)
        common = plain["common"]
        size = world_size // self.given.get("groups", 2)
        assert agreed([common, plain["report"]["landings"]])
        assert [agreed(plain["outer"]), agreed(plain["model"])] == [True, True]
        assert epochs(common) == self.epochs
        assert common["global_step"] == (self.steps or sum(self.epochs))
        ends = [(epoch, length - 1) for epoch, length in enumerate(self.epochs)]
        assert common["validated"] == (ends if self.validates is None else self.validates)
        group = rank // size
        numbers = [self.batches[group], (self.later or self.batches)[group]]
        idle = [step for epoch, index, step in common["batches"] if index >= numbers[min(epoch, 1)]]
        assert plain["idle"] == (self.idle[group] if self.idle else idle)
        says = (
            self.says[group]
            if self.says
            else after(numbers[0])
            if numbers[0] < self.epochs[0]
            else ""
        )
        says = says if rank % size == 0 else ""
        assert any(says in text for text in plain["warned"]) if says else not plain["warned"]
        at = {(epoch, batch): step for epoch, batch, step in common["batches"]}
        for step in self.resumes:
            loader = partial(self.load, later=step % 1 > 0)
            resume = folder / ("epochs" if step % 1 else "steps") / f"step={int(step)}.ckpt"
            resumed = run_fit(rank, world_size, loader, distribution, resume=resume, **self.given)
            rest = resumed["common"]
            assert rest["batches"] == [noted for noted in common["batches"] if noted[2] > step]
            assert rest["validated"] == [
                noted for noted in common["validated"] if at[noted] >= step
            ]
            for name in ("global_step", "epoch", "metrics"):
                assert rest[name] == common[name]
            assert resumed["idle"] == [noted for noted in plain["idle"] if noted > step]
            assert resumed["stepped"] == plain["stepped"]
            assert same(resumed["outer"], plain["outer"])


def after(batches: int) -> str:
    return f"has no more batches in epoch 0 after {batches}, but others have."


def unequal(*numbers: int | str, decided: int) -> tuple[str, str]:
    text = ", ".join(f"group {group} has {number}" for group, number in enumerate(numbers))
    return (
        f"Worker groups have unequal numbers of batches: {text}. Every epoch ends after {decided}"
        " in all",
        "",
    )


def case(
    batches: tuple[int, ...], epochs: list[int], lengths: tuple[int | None, ...] = (), **more: Any
) -> Case:
    """A case of which all that is none of its fields is given to `run_fit`."""
    fields = {name: more.pop(name) for name in Case.__dataclass_fields__ if name in more}
    return Case(batches, epochs, lengths, more, **fields)


FEWEST = unequal(7, 10, decided=7)
# With sync_every=4 and overlap_steps=2 launches are after 4, 8, 12, ... inner steps, and land two
# later.
CASES = {
    # Known lengths: the fewest batches decide.
    "known": case(
        (7, 10), [7, 7], (7, 10), make=partial(noting, configure_optimizers=planned), says=FEWEST
    ),
    "a share, and validation by one of what was agreed on": case(
        (8, 12),
        [4, 4],
        (8, 12),
        says=unequal(4, 6, decided=4),
        validates=[(0, 1), (0, 3), (1, 1), (1, 3)],
        limit_train_batches=0.5,
        val_check_interval=0.5,
    ),
    "known in one group": case(
        (6, 20), [6, 6], (6, None), says=unequal(6, "an unknown number", decided=6)
    ),
    "reloaded": case(
        (6, 7),
        [6, 6, 4, 4],
        loader=lambda place: None,
        says=unequal(6, 7, decided=6),
        make=partial(noting, train_dataloader=reloaded),
        reload_dataloaders_every_n_epochs=2,
        max_epochs=4,
    ),
    "dataloader_iter": case((7, 10), [7, 7], (7, 10), make=from_the_iterator, says=FEWEST),
    # Unknown lengths: all end after the last batch that any has ...
    "streams": case((7, 10), [10, 10]),
    "epochs shorter than a round": case((2, 3), [3, 3, 3], max_epochs=3, choices={"sync_every": 8}),
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
        (9, 29), [13, 12], choices={"sync_every": 8, "overlap_steps": 3, "fragments": "strided:1"}
    ),
    "no batch in a later epoch": case(
        (50, 5), [10, 4], later=(50, 0), says=(UNLOGGED, after(5)), resumes=(10.5,)
    ),
    # A length that is announced and not kept.
    "short": case((30, 5), [10, 8], (30, 30)),
    "short in all": case((5, 5), [5, 5], (8, 8), validates=[]),
    "short, and in flight when the epoch ends": case(
        (7, 6), [7, 7, 7], (7, 7), choices={"sync_every": 7}, max_epochs=3
    ),
    "no batch of those announced": case(
        (3, 3),
        [3, 3],
        (3, 3),
        later=(3, 0),
        says=(UNLOGGED, "epoch 1 after 0"),
        choices={"sync_every": 20},
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
        (5, 8), [5, 5], (5, 8), says=unequal(5, 8, decided=5), resumes=(5,)
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
        (5, 9), [9, 9], (9, 9), resumes=(7,), choices={"sync_every": 20}
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
        says=unequal("5 and 7", "6 and 8", decided=5),
    ),
    # The launch after 4 lands after 6, and that after 12 lands after 14.
    "three groups": case((3, 9, 30), [6, 8], groups=3),
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


@in_ranks(2)
def test_data_that_cannot_work_is_refused_by_all_ranks(rank: int) -> None:
    dropping = lambda place: DropCompute(2)(Announced(place, 14))  # noqa: E731
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("group 0 has 0, group 1 has 8", lambda place: Announced(place, 8 * place[0]), {}),
        (
            "group 0 has 0, group 1 has an unknown number",
            lambda place: batches(*place, 8 * place[0]),
            {},
        ),
        (
            "val_check_interval",
            lambda place: Announced(place, 4 + 8 * place[0]),
            {"val_check_interval": 6},
        ),
        ("val_check_interval", case((8, 4), [], (None, 4)).load, {"val_check_interval": 0.5}),
        (
            "limit_train_batches",
            lambda place: Announced(place, 5 + 20 * place[0]),
            {"limit_train_batches": 0.1},
        ),
        ("accumulate_grad_batches=3 differ", dropping, {"accumulate_grad_batches": 3}),
        ("does not work with manual", dropping, {"make": gan}),
    ]
    for words, loader, choices in cases:
        with pytest.raises((ValueError, MisconfigurationException), match=words) as caught:
            run_fit(rank, 2, loader, **choices)
        # Whose data it is says it with Lightning's own; the others always with a ValueError.
        kinds: list[Any] = [None] * 2
        torch.distributed.all_gather_object(kinds, caught.type)
        assert ValueError in kinds


def test_unknown_lengths_end_with_an_error_in_steps_that_take_their_own_batches() -> None:
    def run(rank: int, world_size: int) -> None:
        choices = {"timeout": timedelta(seconds=2)}
        run_fit(rank, world_size, CASES["streams"].load, make=from_the_iterator, choices=choices)

    assert sorted(run_processes(run, 2, expect_failure=True)) == [0, 1]


@in_ranks(2)
def test_all_that_counts_steps_happens_in_all_groups_after_the_same_one(
    rank: int, tmp_path: Path
) -> None:
    """Checkpoints, validation, learning rates, early stopping, loggers and the progress bar, some
    in idle batches.
    """
    saved: list[int] = []

    def look(trainer: Any, module: Any) -> tuple[float, list[int]]:
        made = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
        return trainer.optimizers[0].param_groups[0]["lr"], made

    hooks = {
        "transfer_batch_to_device": lambda self, batch, device, index: [
            part.to(device) for part in batch
        ],
        "on_after_batch_transfer": lambda self, batch, index: [part + 0 for part in batch],
        "on_save_checkpoint": lambda self, _: saved.append(self.trainer.global_step),
    }
    callbacks = saving(LIGHTNING, tmp_path, every_n_train_steps=3)
    callbacks += [
        pl.callbacks.EarlyStopping("val", patience=3, min_delta=10.0),
        pl.callbacks.LearningRateMonitor(),
    ]
    logger = importlib.import_module(f"{LIGHTNING}.loggers").CSVLogger(tmp_path / str(rank), "", "")
    more = {
        "logger": logger,
        "callbacks": callbacks,
        "max_epochs": 9,
        "val_check_interval": 4,
        "log_every_n_steps": 1,
    }
    more |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar"), True)
    make = partial(noting, configure_optimizers=scheduled, **hooks)
    result = run_fit(rank, 2, CASES["resumed"].load, make=make, inspect=look, **more)
    common, idle, (lr, made) = result["common"], result["idle"], result["inspected"]
    steps = common["global_step"]
    assert agreed([common])
    assert agreed(result["outer"])
    assert saved == list(range(3, steps + 1, 3))
    assert {f"step={step}.ckpt" for step in saved} == {
        path.name for path in tmp_path.glob("*.ckpt")
    }
    assert made == [steps, len(epochs(common))]
    assert lr == pytest.approx(0.05 * 0.99**steps * 0.5 ** len(epochs(common)))
    assert all((index + 1) % 4 == 0 for _, index in common["validated"])
    assert 1 < common["epoch"] < 9, "early stopping stopped all of them"
    if rank == 0:
        assert len(idle) > 5
        with (tmp_path / "0" / "metrics.csv").open() as file:
            logged = [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]]
        assert logged == [step for step in range(steps) if step + 1 not in idle], (
            "nothing is logged again when idle"
        )


def test_a_group_that_ends_first_makes_the_others_wait_for_nothing() -> None:
    """Its loader takes a second to end. Meanwhile the other group trains up to its next launch and
    beyond.
    """
    ended: list[float] = []

    class Slow(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            if self.place[0] == 0:
                time.sleep(1.0)
                ended.append(time.monotonic())

    def run(rank: int, world_size: int) -> list[float]:
        load = lambda place: DataLoader(Slow(place, 60 if place[0] else 5), batch_size=None)  # noqa: E731
        make = partial(noting, on_train_batch_end=lambda self, *_: ended.append(time.monotonic()))
        run_fit(rank, world_size, load, make=make, choices={"sync_every": 20}, max_epochs=1)
        return ended

    first, second = run_processes(run, 2)
    assert second[20] < first[4] < second[21], (
        "it launched after 20, and waits for its landing after 22"
    )
    assert len(second) == 22


HOOKS = "train_batch_start before_optimizer_step train_batch_end train_epoch_end validation_epoch_end train_end"


@in_ranks(2)
def test_of_equal_unknown_lengths_all_happens_when_it_does_with_ddp(rank: int) -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"max_steps": 21, "max_epochs": -1}, noting),
        ({"max_epochs": 3, "val_check_interval": 3}, noting),
        ({"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None}, noting),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, noting),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, noting),
        ({"max_steps": 48, "max_epochs": -1}, gan),
        ({"max_epochs": 2, "min_epochs": 2, "limit_train_batches": 6}, noting),
    ]

    def play(strategy: Any, make: Any, choices: dict[str, Any]) -> Any:
        noted: list[Any] = []

        def note(name: str, self: Any, *_: Any, **__: Any) -> None:
            trainer = self.trainer
            rates = [o.param_groups[0]["lr"] for o in self.trainer.optimizers]
            at = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, trainer.global_step
            noted.append((name, *at, trainer.is_last_batch, *rates))

        hooks = {
            f"on_{name}": lambda *its, name=name, **__: note(name, *its) for name in HOOKS.split()
        }
        model = make(seed=rank, configure_optimizers=scheduled, **hooks)
        trainer = fits.trainer(strategy=strategy, devices=2, num_sanity_val_steps=0, **choices)
        trainer.fit(model, batches(rank, 0, 1, 8), batches(9, 0, 1, 2))
        return noted, trainer.global_step, trainer.current_epoch

    for choices, make in cases:
        ours = fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 20})
        assert play(ours, make, choices) == play("ddp", make, choices), choices


@in_ranks(2)
def test_a_fit_that_ended_by_steps_has_looked_at_no_batch_that_a_longer_one_misses(
    rank: int, tmp_path: Path
) -> None:
    noted: list[int] = []
    for steps, resume in ((3, None), (8, tmp_path / "step=3.ckpt")):
        saves = saving(LIGHTNING, tmp_path, every_n_train_steps=1)
        choices = {
            "max_steps": steps,
            "callbacks": saves,
            "enable_checkpointing": True,
            "resume": resume,
        }
        noted += [
            step
            for *_, step in run_fit(rank, 2, case((8, 8), []).load, **choices)["common"]["batches"]
        ]
    assert noted == list(range(1, 9))


@in_ranks(4)
def test_a_rank_leaves_micro_batches_out_and_its_group_weighs_less(rank: int) -> None:
    def note_weight(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.idle += [batch_idx] if batch is None else []
        self.batches.append(self.trainer.strategy.engine.rounds.fragments[0].weight)

    def dropping(place: Place) -> Any:
        """All that may be left out is, of every other step on one rank of the second group."""
        return DropCompute(3, budget=0.0 if place[:2] == (1, 1) else inf)(Announced(place, 14))

    # Without logging, which waits for all ranks of a group.
    quietly = lambda self, parts, index: self.loss(parts)  # noqa: E731
    make = partial(noting, training_step=quietly, on_train_batch_end=note_weight)
    trained = run_fit(rank, 4, dropping, max_epochs=1, accumulate_grad_batches=3, make=make)
    assert trained["report"]["inner_steps"] == 5
    # Four inner steps of three micro-batches, and one of two; the first launch is after the fourth.
    assert (trained["idle"], trained["common"]["batches"][8]) == (
        ([], 9) if rank < 3 else ([1, 4, 7, 10], 6)
    )
    assert agreed(trained["outer"])
