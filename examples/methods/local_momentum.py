"""Local steps whose momentum corrects for the position of the last gradient; see `fedglomo`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A function from a model, inputs and targets to the loss."""


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


class LocalMomentum:
    """Trains a model by SGD with FedGLOMO's momentum: v + g(now) - g(before), both on the same
    batch.
    """

    def __init__(self, model: nn.Module, loss: Loss = squared_error) -> None:
        self.model = model
        self._loss = loss
        self._start = deepcopy(model)
        self._before = deepcopy(model)
        self._momentum: tuple[Tensor, ...] | None = None

    def step(self, x: Tensor, y: Tensor, lr: float) -> None:
        now = self._gradient(self.model, x, y)
        before = self._gradient(self._before, x, y)
        changes = zip(now, self._momentum or before, before, strict=True)
        self._momentum = tuple(new + momentum - old for new, momentum, old in changes)
        self._before.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            for parameter, step in zip(self.model.parameters(), self._momentum, strict=True):
                parameter.sub_(step, alpha=lr)

    @torch.no_grad()
    def add_to(self, model: nn.Module, share: float) -> None:
        """Adds a share of this model's progress, start minus end, to another model."""
        parts = zip(
            model.parameters(), self._start.parameters(), self.model.parameters(), strict=True
        )
        for parameter, start, end in parts:
            parameter.add_(start - end, alpha=share)

    def _gradient(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._loss(model, x, y), list(model.parameters()))
