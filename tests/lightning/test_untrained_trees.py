"""Random models that mix untrained state of every kind, in real processes: a Trainer, a loop of
Fabric, a plain loop.

A test has the number of its example, so that one that fails is played again alone.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import DenseBeginning, StreamingDiLoCo, WorkerGroups
from tests import fits
from tests.bits import fingerprints
from tests.fits import LIGHTNING, OTHER, Announced, at, save
from tests.lightning.test_fabric import fabric_of
from tests.ranks import run_processes, run_ranks
from tests.training import batch
from tests.untrained_parts import PARTS, altered_constants, broken, tree

LONGEST = 14  # inner steps of a run
BATCHES = 5  # of an epoch of a Trainer
VALIDATES_EVERY = 3
VALIDATED = 9  # the group whose batches nobody trains
# The choices of a user for some names, in models that have them.
KINDS = {
    "*.constant_mask": ("mean", "first", "own"),
    "*.constant_exact": ("mean", "first", "own"),
    "*.constant_table": ("mean", "first"),
    "*.average": ("first", "own"),
    "*.teacher.*": ("mean", "first"),
    "*.unit_features": ("first", "own"),
    "*.running_mean": ("first", "own"),
}

Fingerprints = dict[str, dict[str, str]]  # of a state_dict, by when it was seen
Way = Callable[["Run"], Fingerprints]


class Example(NamedTuple):
    """A model, how it is trained, and after which steps the run is saved and ends."""

    number: int
    groups: int
    size: int
    parts: list[int]
    save: int
    end: int
    choices: dict[str, Any]

    @classmethod
    def drawn(cls, number: int, groups: int, size: int) -> "Example":
        chance = random.Random(number)
        parts = chance.choices(range(len(PARTS)), k=chance.randint(3, 6))
        names = ["." + name for name in tree(number, parts).state_dict()]
        untrained = {}
        for pattern, kinds in KINDS.items():
            if chance.random() < 0.3 and any(pattern.strip("*") in name for name in names):
                untrained[pattern] = chance.choice(kinds)
        choices = {
            "sync_every": 4,
            "overlap_steps": chance.choice([0, 1, 2]),
            "mixing": chance.choice([0.0, 0.2, 1.0]),
            "fragments": chance.choice([1, 2, "strided:1"]),
            "compression": chance.choice(["fp32", "fp4"]),
            "dense_beginning": chance.choice([None, None, DenseBeginning(2, 2)]),
            "untrained": untrained,
        }
        save = chance.randrange(1, LONGEST)
        end = chance.randint(max(save + 1, LONGEST - 4), LONGEST)
        return cls(number, groups, size, parts, save, end, choices)

    def net(self, rank: int) -> nn.Module:
        """The model of a rank; each rank draws other values."""
        return tree(self.number, self.parts, rank)


class Run:
    """A rank that trains an example, from its start or from a file, and notes the values that it
    shows in validations and ends with.
    """

    def __init__(self, rank: int, example: Example, path: Path, is_resumed: bool) -> None:
        self.rank = rank
        self.example = example
        self.world_size = example.groups * example.size
        self.path = path
        self.is_resumed = is_resumed
        self.steps = range(example.save + 1 if is_resumed else 1, example.end + 1)
        self.initial = example.net(0).state_dict()
        self.net = example.net(rank)
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.02)
        self.noted: Fingerprints = {}

    @property
    def place(self) -> tuple[int, int, int]:
        group, shard = divmod(self.rank, self.example.size)
        return group, shard, self.example.size

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of the part of a batch that this rank sees."""
        group, shard, shards = self.place
        x, y = (part.chunk(shards)[shard] for part in batch(group, step))
        return nn.functional.mse_loss(model(x), y)

    def note_shown(self, step: int) -> None:
        self.note(f"shown {step}", step)

    def end(self) -> Fingerprints:
        self.note("end", self.example.end)
        return self.noted

    def note(self, when: str, steps: int) -> None:
        values = self.net.state_dict()
        self.check(when, values, steps)
        self.noted[when] = fingerprints(values)

    def check_saved(self, values: dict[str, Tensor]) -> None:
        self.check("saved", values, self.example.save)

    def check(self, when: str, values: dict[str, Tensor], steps: int) -> None:
        """Asserts that constants are the initial ones, and that counters have counted the steps."""
        assert values.keys() == self.initial.keys(), when
        assert altered_constants(values, self.initial) == [], when
        assert broken(values, steps) == [], when


def in_trainer(run: Run) -> Fingerprints:
    """Fits in epochs of a few batches, and validates before the first and within them."""
    example = run.example
    distribution = (LIGHTNING, OTHER)[example.number % 2]

    def validation_step(self: Any, parts: list[Tensor], index: int) -> None:
        self.log("loss", self.loss(parts), sync_dist=True)
        run.note_shown(self.trainer.global_step)

    module = fits.module(
        distribution,
        net=run.net,
        validation_step=validation_step,
        configure_optimizers=lambda self: run.optimizer,
    )
    callbacks = []
    if not run.is_resumed:
        callbacks.append(at({example.save: save(run.path)}, distribution))
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=example.groups, **example.choices),
        devices=run.world_size,
        max_epochs=-1,
        max_steps=example.end,
        limit_val_batches=1,
        val_check_interval=VALIDATES_EVERY,
        check_val_every_n_epoch=None,
        callbacks=callbacks,
    )
    loader = Announced(run.place, BATCHES)
    start = str(run.path) if run.is_resumed else None
    trainer.fit(module, loader, fits.batches(VALIDATED), ckpt_path=start)
    if not run.is_resumed and run.rank == 0:
        saved = torch.load(run.path, weights_only=True)["state_dict"]
        run.check_saved({name.removeprefix("net."): values for name, values in saved.items()})
    return run.end()


def in_fabric(run: Run) -> Fingerprints:
    example = run.example
    distribution = ("lightning.fabric", "lightning_fabric")[example.number % 2]
    choices = {"worker_groups": example.groups, **example.choices}
    fabric = fabric_of(run.world_size, distribution, **choices)
    model, optimizer = fabric.setup(run.net, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    if run.is_resumed:
        fabric.load(run.path, state)
    for step in run.steps:
        fabric.backward(run.loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        if step % VALIDATES_EVERY == 0:
            model.eval()
            with fabric.strategy.evaluate(), torch.no_grad():
                model(batch(VALIDATED, 0)[0])
                run.note_shown(step)
            model.train()
        if step == example.save:
            fabric.save(run.path, state)
    fabric.strategy.finish()
    if not run.is_resumed and run.rank == 0:
        run.check_saved(torch.load(run.path, weights_only=True)["model"])
    return run.end()


def in_plain_loop(run: Run) -> Fingerprints:
    groups = WorkerGroups(run.example.groups)
    model: nn.Module = run.net
    if run.example.size > 1:
        model = DistributedDataParallel(run.net, process_group=groups.process_group)
    engine = StreamingDiLoCo(
        model, worker_groups=groups, inner_optimizers=[run.optimizer], **run.example.choices
    )
    if run.is_resumed:
        engine.load(run.path)
    for step in run.steps:
        run.optimizer.zero_grad()
        run.loss(model, step).backward()
        run.optimizer.step()
        engine.step()
        if step % VALIDATES_EVERY == 0:
            mean = None if engine.has_landed else engine.group_mean()
            view = engine.fragmented_model.view
            with view.shown(mean, own=view.first_own()):
                run.note_shown(step)
        if step == run.example.save:
            engine.save(run.path)
    engine.finish()
    return run.end()


class TwoRuns(NamedTuple):
    """A run that is saved on its way, and one that resumes from that file."""

    uninterrupted: Fingerprints
    resumed: Fingerprints


def train_twice(rank: int, world_size: int, way: Way, example: Example, path: Path) -> TwoRuns:
    uninterrupted = way(Run(rank, example, path, is_resumed=False))
    return TwoRuns(uninterrupted, way(Run(rank, example, path, is_resumed=True)))


FEW = [(2, 1, 13), (2, 1, 123), (2, 2, 30), (4, 1, 55), (3, 2, 3)]
MANY = [
    *((2, 1, number) for number in range(200, 204)),
    *((2, 2, number) for number in range(300, 304)),
    *((4, 1, number) for number in range(400, 403)),
    *((3, 2, number) for number in range(501, 503)),
]
EXAMPLES = [*FEW, *(pytest.param(*example, marks=pytest.mark.large) for example in MANY)]


@pytest.mark.parametrize(("groups", "size", "number"), EXAMPLES)
@pytest.mark.parametrize("way", [in_trainer, in_fabric, in_plain_loop])
def test_ranks_of_random_models_agree_resume_exactly_and_keep_constants(
    way: Way, groups: int, size: int, number: int, tmp_path: Path
) -> None:
    example = Example.drawn(number, groups, size)
    start = run_ranks if way is in_plain_loop else run_processes
    path = tmp_path / "saved.ckpt"
    ranks = start(train_twice, groups * size, way, example, path, timeout=110.0)
    first = ranks[0]
    shown = [f"shown {step}" for step in range(VALIDATES_EVERY, example.end, VALIDATES_EVERY)]
    shown_after_the_save = shown[example.save // VALIDATES_EVERY :]
    assert first.uninterrupted.keys() >= {*shown, "end"}
    for runs in ranks:
        assert unlike(runs.uninterrupted, first.uninterrupted) == [], "ranks differ"
        assert runs.resumed.keys() >= {*shown_after_the_save, "end"}
        later = {when: runs.uninterrupted[when] for when in runs.resumed}
        assert unlike(runs.resumed, later) == [], "a resumed run differs"


def unlike(actual: Fingerprints, expected: Fingerprints) -> list[str]:
    """The times and names of values that differ in a bit."""
    if actual.keys() != expected.keys():
        return sorted(actual.keys() ^ expected.keys())
    differing = []
    for when, values in actual.items():
        for name, fingerprint in values.items():
            if fingerprint != expected[when].get(name):
                differing.append(f"{when}: {name}")
    return differing
