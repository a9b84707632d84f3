"""Executable specification of Streaming DiLoCo: Algorithm 2 of arXiv 2501.18512 in plain loops.

It imports nothing from the package it is held against. The letters of the paper: M groups, P
fragments, H inner steps between two launches of a fragment (`sync_every`), tau from launch to
landing (`overlap_steps`), alpha (`mixing`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class Result:
    """The whole trajectory.

    Attributes:
        locals: By inner step, group and name: the local parameters after the step and everything
            that landed in it, in the type of the model.
        outers: By inner step and name: the outer parameters then, float32.
        launches: Steps and fragments, in order.
        landings: Steps and fragments, in order, those after the last step too.
        outer: By name: the outer parameters when everything is finished.
    """

    locals: list[list[dict[str, Tensor]]] = field(default_factory=list)
    outers: list[dict[str, Tensor]] = field(default_factory=list)
    launches: list[tuple[int, int]] = field(default_factory=list)
    landings: list[tuple[int, int]] = field(default_factory=list)
    outer: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        fragments: The names of the trainable parameters, each in one fragment.
        sync_every: H.
        overlap_steps: tau, less than H; 0 lands in the step of the launch.
        mixing: alpha, the share of the local parameters kept on landing.
        outer_lr: A number, or a function of the outer steps that the fragment has done before.
        outer_momentum: Nesterov's; 0 is plain SGD.
        dense: How many rounds at first are dense, and their H and tau.
        idle: By group and step: True if the group does not train in the step.
        micro_batches: By group and step: those trained, which weigh the group.
        direction: Changes the mean outer gradient of a parameter.
        carries: True if a landing moves the local parameters as the outer ones have moved since the
            launch, instead of line 12.
    """

    fragments: Sequence[Sequence[str]]
    sync_every: int
    overlap_steps: int
    mixing: float
    outer_lr: float | Callable[[int], float]
    outer_momentum: float
    dense: tuple[int, int, int] | None = None
    idle: Callable[[int, int], bool] = lambda group, step: False
    micro_batches: Callable[[int, int], int] = lambda group, step: 1
    direction: Callable[[Tensor], Tensor] = lambda gradient: gradient
    carries: bool = False


class Flight(NamedTuple):
    """A launched fragment: the outer gradients by name and group, and the groups' weights."""

    landing_step: int
    deltas: dict[str, list[Tensor]]
    weights: list[int]
    is_dense: bool


def is_launched(step: int, fragment: int, num_fragments: int, sync_every: int) -> bool:
    """Line 6, and no launch before the fragment has done H steps; `fragment` counts from 0, `step`
    from 1.
    """
    offset = fragment * sync_every // num_fragments
    return step >= sync_every + offset and (step - offset) % sync_every == 0


def dense_momentum(dense_every: int, mu: float) -> float:
    """The momentum of rounds of so few inner steps, to two digits."""
    return min(mu, round(max(0.5, 1 - 1.5 / dense_every), 2))


def mean(tensors: Sequence[Tensor], total_weight: int = 0) -> Tensor:
    """Sum in group order, then one division."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / (total_weight or len(tensors))


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Each group by the micro-batches that it trained; the plain mean where all trained as many."""
    if len(set(weights)) == 1:
        return mean(tensors)
    weighted = [weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]
    return mean(weighted, sum(weights))


def outer_step(
    outer: Tensor, buffer: Tensor | None, gradient: Tensor, lr: float, mu: float
) -> tuple[Tensor, Tensor]:
    """One step of Nesterov SGD (`torch.optim.SGD(nesterov=True)`): the new outer parameter and
    momentum buffer.
    """
    buffer = gradient if buffer is None else mu * buffer + gradient
    return outer - lr * (gradient + mu * buffer), buffer


class Loops:
    """The state between steps: m numbers the groups, p the fragments."""

    def __init__(self, models: Sequence[nn.Module], settings: Settings) -> None:
        self.settings = settings
        self.local = []
        for model in models:
            parameters = dict(model.named_parameters())
            self.local.append({n: p for n, p in parameters.items() if p.requires_grad})
        self.outer = {name: p.detach().float().clone() for name, p in self.local[0].items()}
        self.momentum: dict[str, Tensor | None] = dict.fromkeys(self.outer)
        self.in_flight: dict[int, Flight] = {}  # in launch order
        self.launched = [0 for _ in settings.fragments]
        self.outer_steps = [0 for _ in settings.fragments]
        # By fragment and group: the micro-batches since the last launch.
        self.trained = [[0 for _ in models] for _ in settings.fragments]
        self.trajectory = Result(outer=self.outer)

    def check(self) -> None:
        """Each name is in one fragment, and the groups start equal."""
        names = list(chain.from_iterable(self.settings.fragments))
        assert sorted(self.local[0]) == sorted(names), "each name in one fragment"
        for group in self.local:
            assert all(torch.equal(group[n], self.local[0][n]) for n in group), "groups start equal"

    def launch_due(self, step: int) -> None:
        for p in range(len(self.settings.fragments)):
            self.launch_if_due(step, p)

    def land_due(self, step: int) -> None:
        for p, flight in list(self.in_flight.items()):
            if flight.landing_step == step:  # line 9
                self.land(step, p)

    def launch_if_due(self, step: int, p: int) -> None:  # lines 6 and 7
        settings = self.settings
        dense_rounds, sync_every, overlap_steps = settings.dense or (0, 0, 0)
        is_dense = self.launched[p] < dense_rounds
        step_in_rounds = step
        if not is_dense:
            step_in_rounds = step - dense_rounds * sync_every
            sync_every = settings.sync_every
            overlap_steps = settings.overlap_steps
        if not is_launched(step_in_rounds, p, len(settings.fragments), sync_every):
            return
        deltas: dict[str, list[Tensor]] = {}
        for name in settings.fragments[p]:
            deltas[name] = [self.outer[name] - group[name].float() for group in self.local]
        self.in_flight[p] = Flight(step + overlap_steps, deltas, self.trained[p], is_dense)
        self.trained[p] = [0 for _ in self.local]
        self.launched[p] += 1
        self.trajectory.launches.append((step, p))

    def land(self, step: int, p: int) -> None:
        flight = self.in_flight.pop(p)
        if any(flight.weights):
            for name in self.settings.fragments[p]:
                self.land_parameter(name, flight, self.outer_steps[p])
            # For the rate, all dense rounds together are the first round.
            self.outer_steps[p] = 1 if flight.is_dense else self.outer_steps[p] + 1
        self.trajectory.landings.append((step, p))

    def land_parameter(self, name: str, flight: Flight, outer_steps: int) -> None:
        settings = self.settings
        lr, mu = self.rates(flight, outer_steps)
        deltas = flight.deltas[name]
        sent = [self.outer[name] - delta for delta in deltas]
        mean_delta = settings.direction(weighted_mean(deltas, flight.weights))  # line 8
        outer, momentum = outer_step(self.outer[name], self.momentum[name], mean_delta, lr, mu)
        self.outer[name] = outer  # lines 10 and 11
        self.momentum[name] = momentum
        for group, local_at_launch in zip(self.local, sent, strict=True):  # line 12
            local = group[name].float()
            if settings.carries:
                mixed = local + outer - local_at_launch
            else:
                mixed = settings.mixing * local + (1 - settings.mixing) * outer
            group[name].copy_(mixed)

    def rates(self, flight: Flight, outer_steps: int) -> tuple[float, float]:
        """The outer learning rate and momentum of a landing."""
        lr = self.settings.outer_lr
        if callable(lr):
            lr = lr(0 if flight.is_dense else outer_steps)
        mu = self.settings.outer_momentum
        if flight.is_dense and self.settings.dense is not None:
            mu = dense_momentum(self.settings.dense[1], mu)
        return lr, mu

    def record(self) -> None:
        copies = [{n: p.detach().clone() for n, p in group.items()} for group in self.local]
        self.trajectory.locals.append(copies)
        self.trajectory.outers.append({name: tensor.clone() for name, tensor in self.outer.items()})

    def finish(self, steps: int) -> None:
        """Lands all flights; then all groups take the plain mean of their local parameters."""
        for p in list(self.in_flight):
            self.land(steps, p)
        for name, outer in self.outer.items():
            self.outer[name] = outer - mean([outer - group[name].float() for group in self.local])
            for group in self.local:
                group[name].copy_(self.outer[name])


def run(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Callable[[int, int], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    *,
    steps: int,
    **choices: Any,
) -> Result:
    """Trains the models in place.

    Args:
        models: One of each group, equal at first; in the end each holds the finished outer
            parameters.
        optimizers: The inner one of each group.
        batch: By group and step, which is from 1: x and y.
        loss: A scalar, of model(x) and y.
        steps: T.
        choices: Those of `Settings`.
    """
    settings = Settings(**choices)
    loops = Loops(models, settings)
    loops.check()
    for step in range(1, steps + 1):  # line 2
        training = [m for m in range(len(models)) if not settings.idle(m, step)]
        for m in training:  # line 1
            for counts in loops.trained:
                counts[m] += settings.micro_batches(m, step)
            x, y = batch(m, step)  # line 3
            optimizers[m].zero_grad()
            loss(models[m](x), y).backward()  # line 4
        for m in training:
            optimizers[m].step()  # line 5
        with torch.no_grad():
            loops.launch_due(step)
            loops.land_due(step)
        loops.record()
    with torch.no_grad():
        loops.finish(steps)
    return loops.trajectory
