"""Delayed Nesterov (arXiv 2401.09135): the outer momentum is applied once every few outer steps.

    python examples/methods/delayed_nesterov.py

With a Trainer, use `StreamingDiLoCoStrategy(outer_optimizer=partial(DelayedNesterov, lr=0.7,
momentum=0.9, every=4))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from side_by_side import compare
from torch import Tensor
from torch.optim import Optimizer


class DelayedNesterov(Optimizer):
    """In every step, parameters move by `lr / every` times the gradient. The momentum is updated
    with `every` gradients at once.

    The momentum moves the parameters in every `every`-th step, except for a share `spread` (c in
    the paper, at most `1 / every`) in each of the other steps. With `every=1`, this is torch's
    Nesterov SGD. It works elementwise, as an outer optimizer must.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.7,
        momentum: float = 0.9,
        every: int = 2,
        spread: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every, "spread": spread})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        every = group["every"]
        if not state:
            state.update(
                step=torch.tensor(0.0),
                momentum=torch.zeros_like(parameter),
                summed=torch.zeros_like(parameter),
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


if __name__ == "__main__":
    compare(
        {
            "Nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
            "DelayedNesterov(every=2)": {
                "outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2)
            },
            "DelayedNesterov(every=4)": {
                "outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=4)
            },
        },
        mixing=0.2,
        sync_every=20,
        overlap_steps=2,
    )
