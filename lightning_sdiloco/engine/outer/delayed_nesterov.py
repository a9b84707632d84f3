"""Delayed Nesterov: an outer optimizer whose momentum moves once in several outer steps."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override


class DelayedNesterov(Optimizer):
    """Nesterov's momentum over the mean of several outer gradients, as in asynchronous DiLoCo (arXiv 2401.09135).

    Every step moves by ``lr / every`` times its own gradient. The momentum takes in the sum of ``every`` gradients at
    once, and moves the parameters then; with ``spread`` a part of that move happens in each of the steps before. Give
    it as ``outer_optimizer``: where each outer step has the gradients of few sites, its momentum is less noisy.

    Args:
        params: The flat shards.
        lr: Learning rate.
        momentum: Momentum, at least 0 and below 1.
        every: Steps between two moves of the momentum, at least 1. With 1 it is torch's Nesterov SGD.
        spread: Share of the momentum's move in each step that is no ``every``-th (c in the paper), from 0 to
            ``1 / every``.

    Raises:
        ValueError: If one is out of its range.

    Examples:
        >>> value = torch.zeros(1, requires_grad=True)
        >>> value.grad = torch.ones(1)
        >>> optimizer = DelayedNesterov([value], lr=1.0, momentum=0.5, every=2)
        >>> moved = []
        >>> for _ in range(4):
        ...     optimizer.step()
        ...     moved.append(value.item())
        >>> moved
        [-0.5, -1.5, -2.0, -3.25]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.7,
        momentum: float = 0.9,
        every: int = 2,
        spread: float = 0.0,
    ) -> None:
        for name, holds, rule in (
            ("lr", lr >= 0, "at least 0"),
            ("momentum", 0 <= momentum < 1, "at least 0 and below 1"),
            ("every", isinstance(every, int) and every >= 1, "a whole number of at least 1"),
            ("spread", 0 <= spread <= 1 / max(1, every), "at least 0 and at most 1 / every"),
        ):
            if not holds:
                raise ValueError(f"{name}={locals()[name]!r} is out of range: it must be {rule}. Choose another one.")
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every, "spread": spread})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Makes a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient, every = self.state[parameter], parameter.grad, group["every"]
        assert gradient is not None
        if not state:
            state.update(
                step=torch.tensor(0.0), momentum=torch.zeros_like(parameter), summed=torch.zeros_like(parameter)
            )
        state["step"] += 1
        state["summed"].add_(gradient)
        share = group["spread"]
        if state["step"] % every == 0:
            share = 1 - group["spread"] * (every - 1)
            state["momentum"].mul_(group["momentum"]).add_(state["summed"], alpha=1 / every)
            state["summed"].zero_()
        parameter.add_(state["momentum"], alpha=-group["lr"] * share * group["momentum"])
        parameter.add_(gradient, alpha=-group["lr"] / every)
