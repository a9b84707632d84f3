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

END = 14
BATCHES = 5  # of an epoch of a Trainer
VALIDATES_EVERY = 3
VALIDATED = 9  # the group whose batches nobody trains
# What a user may choose for some names, where a model has them.
KINDS = {
    "*.constant_mask": ("mean", "first", "own"),
    "*.constant_exact": ("mean", "first", "own"),
    "*.constant_table": ("mean", "first"),
    "*.average": ("first", "own"),
    "*.teacher.*": ("mean", "first"),
    "*.unit_features": ("first", "own"),
    "*.running_mean": ("first", "own"),
}

Seen = dict[str, dict[str, str]]  # Fingerprints of a state_dict, by when it was seen.
Way = Callable[[int, int, "Example", Path, range], Seen]


class Example(NamedTuple):
    """A model, how it is trained, and after which step the run is stopped."""

    number: int
    groups: int
    size: int
    parts: list[int]
    stop: int
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
        return cls(number, groups, size, parts, chance.randrange(1, END), choices)

    def net(self, rank: int) -> nn.Module:
        """The model of a rank, which has drawn values of its own."""
        return tree(self.number, self.parts, rank)

    def batch(self, rank: int, step: int) -> list[Tensor]:
        """What a rank sees of a batch of its group."""
        return [part.chunk(self.size)[rank % self.size] for part in batch(rank // self.size, step)]


class Watched:
    """Takes note of what a rank shows in validations and ends with."""

    def __init__(self, example: Example) -> None:
        self.initial = example.net(0).state_dict()
        self.seen: Seen = {}

    def note(self, when: str, values: dict[str, Tensor], steps: int) -> None:
        self.check(when, values, steps)
        self.seen[when] = fingerprints(values)

    def check(self, when: str, values: dict[str, Tensor], steps: int) -> None:
        """Looks for constants that are not the initial ones, and for counters that have not
        counted the steps.
        """
        assert values.keys() == self.initial.keys(), when
        assert altered_constants(values, self.initial) == [], when
        assert broken(values, steps) == [], when


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.02
    )


def loss_of(model: nn.Module, parts: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(parts[0]), parts[1])


def in_trainer(rank: int, world_size: int, example: Example, path: Path, steps: range) -> Seen:
    """Fits in epochs of a few batches, and validates before the first and within them."""
    distribution = (LIGHTNING, OTHER)[example.number % 2]
    watched = Watched(example)
    last = steps.stop - 1

    def validation_step(self: Any, parts: list[Tensor], index: int) -> None:
        self.log("loss", self.loss(parts), sync_dist=True)
        watched.note(
            f"shown {self.trainer.global_step}", self.net.state_dict(), self.trainer.global_step
        )

    hooks = {
        "validation_step": validation_step,
        "configure_optimizers": lambda self: optimizer_of(self.net),
    }
    model = fits.module(distribution, net=example.net(rank), **hooks)
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=example.groups, **example.choices),
        devices=world_size,
        max_epochs=-1,
        max_steps=last,
        limit_val_batches=1,
        val_check_interval=VALIDATES_EVERY,
        check_val_every_n_epoch=None,
        callbacks=[at({last: save(path)}, distribution)] if last < END else [],
    )
    group, shard = divmod(rank, example.size)
    batches = Announced((group, shard, example.size), BATCHES)
    trainer.fit(
        model, batches, fits.batches(VALIDATED), ckpt_path=str(path) if steps.start > 1 else None
    )
    watched.note("end", model.net.state_dict(), last)
    if last < END and rank == 0:
        saved = torch.load(path, weights_only=True)["state_dict"]
        watched.check(
            "saved", {name.removeprefix("net."): values for name, values in saved.items()}, last
        )
    return watched.seen


def in_fabric(rank: int, world_size: int, example: Example, path: Path, steps: range) -> Seen:
    distribution = ("lightning.fabric", "lightning_fabric")[example.number % 2]
    watched = Watched(example)
    last = steps.stop - 1
    fabric = fabric_of(world_size, distribution, worker_groups=example.groups, **example.choices)
    net = example.net(rank)
    model, optimizer = fabric.setup(net, optimizer_of(net))
    state = {"model": model, "optimizer": optimizer}
    if steps.start > 1:
        fabric.load(path, state)
    for step in steps:
        fabric.backward(loss_of(model, example.batch(rank, step)))
        optimizer.step()
        optimizer.zero_grad()
        if step % VALIDATES_EVERY == 0:
            model.eval()
            with fabric.strategy.evaluate(), torch.no_grad():
                model(batch(VALIDATED, 0)[0])
                watched.note(f"shown {step}", net.state_dict(), step)
            model.train()
    if last < END:
        fabric.save(path, state)
    fabric.strategy.finish()
    watched.note("end", net.state_dict(), last)
    if last < END and rank == 0:
        watched.check("saved", torch.load(path, weights_only=True)["model"], last)
    return watched.seen


def in_plain_loop(rank: int, world_size: int, example: Example, path: Path, steps: range) -> Seen:
    watched = Watched(example)
    last = steps.stop - 1
    groups = WorkerGroups(example.groups)
    net = example.net(rank)
    optimizer = optimizer_of(net)
    model = (
        DistributedDataParallel(net, process_group=groups.process_group)
        if example.size > 1
        else net
    )
    engine = StreamingDiLoCo(
        model, worker_groups=groups, inner_optimizers=[optimizer], **example.choices
    )
    if steps.start > 1:
        engine.load(path)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, example.batch(rank, step)).backward()
        optimizer.step()
        engine.step()
        if step % VALIDATES_EVERY == 0:
            mean = None if engine.has_landed else engine.group_mean()
            with engine.evaluate(mean, own=engine.first_own()):
                watched.note(f"shown {step}", net.state_dict(), step)
    if last < END:
        engine.save(path)
    engine.finish()
    watched.note("end", net.state_dict(), last)
    return watched.seen


FEW = [(2, 1, 13), (2, 1, 123), (2, 2, 30), (4, 1, 55), (4, 2, 3)]
MANY = [
    *((2, 1, number) for number in range(200, 204)),
    *((2, 2, number) for number in range(300, 304)),
    *((4, 1, number) for number in range(400, 403)),
    *((4, 2, number) for number in range(501, 503)),
]
EXAMPLES = [*FEW, *(pytest.param(*example, marks=pytest.mark.large) for example in MANY)]


@pytest.mark.parametrize(("groups", "size", "number"), EXAMPLES)
@pytest.mark.parametrize("way", [in_trainer, in_fabric, in_plain_loop])
def test_ranks_of_random_models_agree_resume_exactly_and_keep_constants(
    way: Way, groups: int, size: int, number: int, tmp_path: Path
) -> None:
    """In a run that is never stopped, one that is saved and stopped, and one that is resumed from
    there.
    """
    example = Example.drawn(number, groups, size)
    spans = [range(1, END + 1), range(1, example.stop + 1), range(example.stop + 1, END + 1)]

    def run(rank: int, world_size: int) -> list[Seen]:
        return [way(rank, world_size, example, tmp_path / "saved.ckpt", steps) for steps in spans]

    start = run_ranks if way is in_plain_loop else run_processes
    ranks = start(run, groups * size, timeout=110.0)
    first_whole, first_stopped, _ = ranks[0]
    assert {
        f"shown {step}" for step in range(VALIDATES_EVERY, END, VALIDATES_EVERY)
    } <= first_whole.keys()
    for whole, stopped, resumed in ranks:
        assert unlike(whole, first_whole) == [], "ranks differ"
        assert unlike(stopped, first_stopped) == [], "ranks that stop differ"
        before = {when: values for when, values in stopped.items() if when != "end"}
        assert unlike({**before, **resumed}, whole) == [], "a resumed run differs"


def unlike(one: Seen, other: Seen) -> list[str]:
    """What does not have the same bits: when it was seen, and its name."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [
        f"{when}: {name}"
        for when in one
        for name in one[when]
        if one[when][name] != other[when].get(name)
    ]
