"""GPA inside groups (generalized primal averaging, arXiv 2512.17131): an inner optimizer that
averages its steps.

    python examples/methods/gpa.py

It already smooths, so an outer step with momentum smooths a second time; a warning says so. Groups
share y, which is the model.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from side_by_side import compare
from torch.optim import AdamW
from typing_extensions import override


class GPA(AdamW):
    """AdamW on z, with gradients at y = my x + (1 - my) z, where x = mx x + (1 - mx) z is the
    average.

    The parameters are y in training, and x between `eval` and `train`. ``mx ** 32`` is about 0.9.
    """

    def __init__(
        self, params: Any, lr: float, mx: float = 0.9967, my: float = 0.7, **choices: Any
    ) -> None:
        super().__init__(params, lr, **choices)
        self.mx = mx
        self.my = my

    @override
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps z, and moves y accordingly."""
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        trained = [p for p in parameters if p.grad is not None]
        y = [p.clone() for p in trained]
        z = [self.state[p].get("z", p_y) for p, p_y in zip(trained, y, strict=True)]
        torch._foreach_copy_(trained, z)
        super().step(closure)
        for p, p_y, p_z in zip(trained, y, z, strict=True):
            self.state[p]["z"] = p.clone()
            p.copy_(p_y.lerp(p_z, 1 - self.mx) + (1 - self.mx * self.my) * (p - p_z))

    @torch.no_grad()
    def eval(self) -> None:
        """Shows x, for validation and checkpoints."""
        for p, state in self.state.items():
            p.lerp_(state["z"], 1 - 1 / self.my)

    @torch.no_grad()
    def train(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["z"], 1 - self.my)


if __name__ == "__main__":
    both = {"with outer momentum": {}, "without": {"outer_lr": 1.0, "outer_momentum": 0.0}}
    compare(both, optimizer=lambda model, lr: GPA(model.parameters(), lr), sync_every=20)
