"""Executable specification of Streaming DiLoCo: Algorithm 2 of arXiv 2501.18512 in plain loops.

It imports nothing from the package it is held against. The letters of the paper: M groups, P
fragments, H inner steps between two launches of a fragment (`sync_every`), tau from launch to
landing (`overlap_steps`), alpha (`mixing`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Result:
    """The whole trajectory; `[t - 1]` is the state after inner step t and everything that landed
    in it.
    """

    locals: list[list[dict[str, Tensor]]] = field(
        default_factory=list
    )  # [t - 1][group][name], dtype of the model
    outers: list[dict[str, Tensor]] = field(default_factory=list)  # [t - 1][name], float32
    launches: list[tuple[int, int]] = field(default_factory=list)  # (step, fragment), in order
    landings: list[tuple[int, int]] = field(
        default_factory=list
    )  # (step, fragment), those after the last step too
    outer: dict[str, Tensor] = field(default_factory=dict)  # [name], when everything is finished


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
    return mean(
        [weight * tensor for weight, tensor in zip(weights, tensors, strict=True)], sum(weights)
    )


def outer_step(
    outer: Tensor, buffer: Tensor | None, gradient: Tensor, lr: float, mu: float
) -> tuple[Tensor, Tensor]:
    """One step of Nesterov SGD (`torch.optim.SGD(nesterov=True)`): the new outer parameter and
    momentum buffer.
    """
    buffer = gradient if buffer is None else mu * buffer + gradient
    return outer - lr * (gradient + mu * buffer), buffer


def run(
    models: Sequence[
        nn.Module
    ],  # one per group, equal at first; in the end each holds the finished outer parameters
    optimizers: Sequence[torch.optim.Optimizer],  # the inner one of each group
    batch: Callable[[int, int], tuple[Any, Any]],  # (group, step), which counts from 1, to (x, y)
    loss: Callable[[Any, Any], Tensor],  # (model(x), y) to a scalar
    *,
    fragments: Sequence[
        Sequence[str]
    ],  # the names of the trainable parameters, each in one fragment
    steps: int,  # T
    sync_every: int,  # H
    overlap_steps: int,  # tau, less than H; 0 lands in the step of the launch
    mixing: float,  # alpha, the share of the local parameters kept on landing
    outer_lr: float | Callable[[int], float],  # or by the outer steps of the fragment before
    outer_momentum: float,  # Nesterov's; 0 is plain SGD
    dense: tuple[int, int, int] | None = None,  # the first rounds: how many, and their H and tau
    idle: Callable[[int, int], bool] = lambda group, step: (
        False
    ),  # whether the group does not train in the step
    micro_batches: Callable[[int, int], int] = lambda group, step: (
        1
    ),  # trained in the step: by these a group weighs
    direction: Callable[[Tensor], Tensor] = lambda gradient: (
        gradient
    ),  # of the mean outer gradient of a parameter
    # a landing moves the local parameters as the outer ones since the launch, not by line 12
    carries: bool = False,
) -> Result:
    """Trains the models in place."""
    local = [
        {name: p for name, p in model.named_parameters() if p.requires_grad} for model in models
    ]
    assert sorted(local[0]) == sorted(name for fragment in fragments for name in fragment), (
        "each name in one fragment"
    )
    assert all(torch.equal(group[name], local[0][name]) for group in local for name in group), (
        "groups start equal"
    )
    outer = {name: p.detach().float().clone() for name, p in local[0].items()}
    momentum: dict[str, Tensor | None] = dict.fromkeys(outer)
    in_flight: dict[
        int, tuple[int, dict[str, list[Tensor]]]
    ] = {}  # fragment -> landing step, name -> delta per group
    dense_rounds, dense_every, dense_overlap = dense or (0, sync_every, overlap_steps)
    dense_steps = dense_rounds * dense_every
    launched = [0 for _ in fragments]
    rate = outer_lr if callable(outer_lr) else lambda number: outer_lr
    outer_steps = [0 for _ in fragments]
    trained = [[0 for _ in models] for _ in fragments]  # [fragment][group]: since the last launch
    weights: dict[int, list[int]] = {}  # of the launch in flight, by group
    result = Result(outer=outer)

    def land(step: int, p: int) -> None:  # lines 10 to 12
        _, deltas = in_flight.pop(p)
        is_dense = launched[p] <= dense_rounds
        mu = dense_momentum(dense_every, outer_momentum) if is_dense else outer_momentum
        for name in fragments[p] if any(weights[p]) else ():
            delta = direction(weighted_mean(deltas[name], weights[p]))  # line 8
            lr = rate(0 if is_dense else outer_steps[p])
            sent = [outer[name] - own for own in deltas[name]]
            outer[name], momentum[name] = outer_step(outer[name], momentum[name], delta, lr, mu)
            for group, before in zip(local, sent, strict=True):
                own = group[name].float()
                group[name].copy_(
                    own + outer[name] - before
                    if carries
                    else mixing * own + (1 - mixing) * outer[name]
                )
        if any(weights[p]):  # for the rate, all dense rounds together are the first round
            outer_steps[p] = 1 if is_dense else outer_steps[p] + 1
        result.landings.append((step, p))

    def take_mean(names: Sequence[str]) -> None:
        for name in names:
            outer[name] = outer[name] - mean([outer[name] - group[name].float() for group in local])
            for group in local:
                group[name].copy_(outer[name])

    for step in range(1, steps + 1):  # line 2
        for m in range(len(models)):  # line 1
            if idle(m, step):
                continue
            for counts in trained:
                counts[m] += micro_batches(m, step)
            x, y = batch(m, step)  # line 3
            optimizers[m].zero_grad()
            loss(models[m](x), y).backward()  # line 4
        training = [m for m in range(len(models)) if not idle(m, step)]
        for m in training:
            optimizers[m].step()  # line 5
        with torch.no_grad():
            for p in range(len(fragments)):
                if launched[p] < dense_rounds:
                    is_due = is_launched(step, p, len(fragments), dense_every)
                    lands_at = step + dense_overlap
                else:
                    is_due = is_launched(step - dense_steps, p, len(fragments), sync_every)
                    lands_at = step + overlap_steps
                if is_due:  # 6, 7
                    launched[p] += 1
                    in_flight[p] = (
                        lands_at,
                        {n: [outer[n] - g[n].float() for g in local] for n in fragments[p]},
                    )
                    weights[p], trained[p] = trained[p], [0 for _ in models]
                    result.launches.append((step, p))
            for p in list(in_flight):
                if in_flight[p][0] == step:  # line 9
                    land(step, p)
        result.locals.append(
            [{name: p.detach().clone() for name, p in group.items()} for group in local]
        )
        result.outers.append({name: tensor.clone() for name, tensor in outer.items()})

    with torch.no_grad():
        for p in list(in_flight):  # in launch order
            land(steps, p)
        take_mean(list(outer))
        for name in outer:
            for group in local:
                group[name].copy_(outer[name])
    return result
