"""FedGLOMO (arXiv 2012.04061): momentum at the server and in every group, both with reduced
variance.

    python examples/methods/fedglomo.py

A group trains from the outer parameters and, on the same batches, from those of the previous round.
Its outer gradient is d(now) - (1 - beta) d(before); the momentum 1 - beta of the outer SGD adds the
rest. This costs four gradients per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from local_momentum import LocalMomentum
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups

SETTINGS: dict[str, Any] = {
    "overlap_steps": 0,
    "mixing": 0.0,
    "fragments": [["*"]],
    "compression": "fp32",
}
Batch = Callable[[int, int], tuple[Tensor, Tensor]]
"""A function from group and step to inputs and targets."""


def train(
    models: Sequence[nn.Module], batch: Batch, rounds: int, steps: int, lr: float, beta: float
) -> None:
    outer = partial(torch.optim.SGD, lr=1.0, momentum=1 - beta)
    groups = SimulatedGroups(models, **SETTINGS, sync_every=steps, outer_optimizer=outer)
    previous: Sequence[nn.Module | None] = [None] * len(models)
    for first in range(1, rounds * steps + 1, steps):
        starts = [deepcopy(model) for model in models]
        before = [None if old is None else LocalMomentum(old) for old in previous]
        now = [LocalMomentum(model) for model in models]
        for step in range(first, first + steps):
            is_last = step == first + steps - 1
            for group, (new, old) in enumerate(zip(now, before, strict=True)):
                new.step(*batch(group, step), lr)
                if old is not None:
                    old.step(*batch(group, step), lr)
                    if is_last:
                        old.add_to(new.model, 1 - beta)
            groups.step()
        previous = starts


def line(group: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns points on a noisy line, which differs slightly between groups."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * group + step))
    noise = torch.randn(4, 1, generator=torch.Generator().manual_seed(-1000 * group - step - 1))
    return x, x.sum(1, keepdim=True) + 0.1 * group * x[:, :1] + noise


if __name__ == "__main__":
    for beta in (1.0, 0.5, 0.2):
        models = [nn.Linear(8, 1) for _ in range(4)]
        train(models, line, rounds=40, steps=5, lr=0.05, beta=beta)
        off = (models[0].weight - torch.tensor([1.15] + [1.0] * 7)).norm()
        print(f"beta={beta}: the weights are {off:.3f} away from the best ones")
