"""Trainings in which a method changes more than the engine's arguments: how much each group trains,
and how.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from benchmarks.drop_compute import Case, times
from benchmarks.models import next_byte_loss
from benchmarks.quality import DILOCO
from benchmarks.training import Group, NamedTraining, Run, Simulated
from lightning_sdiloco.compression import ByLink
from lightning_sdiloco.engine.drop_compute import best_drop
from lightning_sdiloco.engine.rounds import StepClock

from eager_updates import EagerGroups, Stay  # isort: skip  (on the path since benchmarks.models)
from local_momentum import LocalMomentum  # isort: skip


@dataclass(frozen=True)
class HalfSpeed(NamedTraining):
    """The last group is half as fast and trains in every other inner step, as with `Paced`."""

    @override
    def trained(self, group: int, step: int) -> int:
        return self.batch if group < self.groups - 1 or step % 2 else 0


@dataclass(frozen=True)
class Eager(NamedTraining):
    """Groups take eager updates, as in `examples/methods/eager_updates.py`."""

    @property
    @override
    def can_go_on(self) -> bool:
        return False  # the state of a group's own outer steps is not saved

    @override
    def method_choices(self) -> Mapping[str, Any]:
        return {"overlap_steps": 19, "mixing": Stay(), "outer_momentum": 0.5}

    @override
    def key(self) -> Run:
        key = super().key()
        return {**key, "choices": {**key["choices"], "outer_momentum": 0.5}}

    @override
    def simulated(
        self, models: Sequence[nn.Module], optimizers: Sequence[Sequence[Optimizer]]
    ) -> Simulated:
        return EagerGroups(models, optimizers, **self.engine_choices())


RANKS = 2
MICRO_BATCHES = 4
SIGMA = 0.5
MOST_DROPPED = 0.1
"""A group of `Dropping`: its ranks, their micro-batches per step, and the variation of their
times."""


@dataclass(frozen=True)
class Dropping(NamedTraining):
    """Ranks of a group skip micro-batches for which they are late, as with `DropCompute`."""

    @override
    def trained(self, group: int, step: int) -> int:
        ends = _times(1, 10**6 * self.seed + 10**5 * group + step).cumsum(-1)[:, 0]
        # The first and the last micro-batch of a step are always trained.
        late = (ends[:, : MICRO_BATCHES - 2] > _budget()).sum()
        return RANKS * MICRO_BATCHES - int(late)


def _times(steps: int, seed: int) -> Tensor:
    return times(Case(RANKS, MICRO_BATCHES, SIGMA), steps, seed)


@cache
def _budget() -> float:
    return best_drop(_times(4000, seed=-1).tolist(), overhead=0.0, most_dropped=MOST_DROPPED).budget


@dataclass(frozen=True)
class SlowUplink(NamedTraining):
    """The last group sends over a link that carries only the smallest code of `ByLink`; the others
    have fast links.
    """

    @override
    def method_choices(self) -> Mapping[str, Any]:
        return {"compression": ByLink(("fp4", "int2", "sparse"))}

    @override
    def simulated(
        self, models: Sequence[nn.Module], optimizers: Sequence[Sequence[Optimizer]]
    ) -> Simulated:
        groups = super().simulated(models, optimizers)
        for number, engine in enumerate(groups.engines):
            # An inner step takes a second. At one byte per second, almost nothing is sent while a
            # fragment is in flight, so the code with the fewest bytes is chosen.
            engine.rounds.link.fixed = 1e9 if number < self.groups - 1 else 1.0
            engine.rounds.step_clock = StepClock(1.0)
        return groups


@dataclass(frozen=True)
class FedGLOMO(NamedTraining):
    """Momentum with reduced variance at the server and in the groups, as in
    `examples/methods/fedglomo.py`.
    """

    beta: float = 0.5

    @property
    @override
    def can_go_on(self) -> bool:
        return False  # the models of the previous round are not saved

    @override
    def method_choices(self) -> Mapping[str, Any]:
        return {**DILOCO, "outer_optimizer": partial(SGD, lr=1.0, momentum=1 - self.beta)}

    @override
    def group(self) -> Group:
        return _GlomoGroup(self)


class _GlomoGroup(Group):
    """A group that trains from the outer parameters and, on the same batches, from those of the
    previous round.
    """

    _training: FedGLOMO

    def __init__(self, training: FedGLOMO) -> None:
        super().__init__(training)
        assert training.choices is not None
        self._every = int(training.choices["sync_every"])
        self._previous: nn.Module | None = None
        self._now = LocalMomentum(self.model, next_byte_loss)
        self._before: LocalMomentum | None = None
        self._batch = (torch.empty(0), torch.empty(0))

    @override
    def backward(self, tokens: Tensor, targets: Tensor, trained: int | None = None) -> None:
        if self.steps % self._every == 0:
            start = deepcopy(self.model)
            self._now = LocalMomentum(self.model, next_byte_loss)
            if self._previous is not None:
                self._before = LocalMomentum(self._previous, next_byte_loss)
            self._previous = start
        self._batch = tokens, targets

    @override
    def step(self) -> None:
        rate = self.lr
        self.steps += 1
        self._now.step(*self._batch, rate)
        if self._before is not None:
            self._before.step(*self._batch, rate)
            if self.steps % self._every == 0:
                self._before.add_to(self.model, 1 - self._training.beta)
