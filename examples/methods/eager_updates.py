"""Eager updates (arXiv 2502.12996): continue with the group's own part of a mean that takes a whole
round to arrive.

    python examples/methods/eager_updates.py

In your own loop, call `eager.before_step()` and `eager.after_step()` around every `engine.step()`,
and `eager.finish()` instead of `engine.finish()` at the end. The engine needs `mixing=Stay()` and
an outer SGD, whose step is linear, so that each group has its own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from side_by_side import compare
from torch import Tensor, nn

from lightning_sdiloco import LandingRule, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.engine.turns import Turns, in_turns, takes_turns, turns_of


@dataclass(frozen=True)
class Stay(LandingRule):
    """Leaves local values unchanged at a landing; the next launch takes in the outer parameters."""

    kept: float = 0.0  # the share of compression errors and of buffers that is kept

    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        return ()

    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None: ...


class EagerUpdates:
    """Takes a group's own outer steps: `v = mu v + d / M`, and `local = outer - lr (d / M + mu v)`,
    d = delta.

    The outer parameters take their steps with the mean of all groups, as always, and are
    bit-identical in all groups.
    """

    def __init__(self, engine: StreamingDiLoCo, model: nn.Module) -> None:
        self.engine = engine
        self.parameters = {name: p.data for name, p in model.named_parameters()}
        self.lr, self.momentum = (engine.report()[name] for name in ("outer_lr", "outer_momentum"))
        # By parameter: the values from which the inner steps began, and the momentum of the group's
        # own parts.
        self.began: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Makes the engine measure the next launches from the values at which the inner steps
        began.
        """
        due = [
            name
            for fragment in self.engine.rounds.timetable.due(self.engine.inner_steps + 1)
            for name in self.engine.fragments[fragment].names
        ]
        self.outer = self.engine.outer_state_dict() if due else {}
        self.gradients = {
            name: self.began.get(name, self.outer[name]) - self.parameters[name] for name in due
        }
        for name, gradient in self.gradients.items():
            self.parameters[name].copy_(self.outer[name] - gradient)

    def after_step(self) -> None:
        """Restarts from the outer parameters plus the group's own part of the pending step."""
        for name, gradient in self.gradients.items():
            # Values that are not finite are not a step: the group continues from the outer
            # parameters.
            part = (
                gradient / self.engine.topology.num_groups
                if gradient.isfinite().all()
                else 0 * self.outer[name]
            )
            self.v[name] = self.momentum * self.v.get(name, torch.zeros_like(part)) + part
            self.began[name] = self.outer[name] - self.lr * (part + self.momentum * self.v[name])
            self.parameters[name].copy_(self.began[name])

    def rejoin(self) -> None:
        """Moves the parameters to where the inner steps would have led from the current outer
        parameters, once all has landed.
        """
        outer = self.engine.outer_state_dict()
        for name, began in self.began.items():
            self.parameters[name].add_(outer[name] - began)
        self.began = {}

    @takes_turns
    def finish(self) -> Turns[None]:
        """Ends training, in place of `engine.finish`."""
        ending = turns_of(self.engine.finish)
        next(ending)  # All fragments in flight have landed.
        self.rejoin()
        yield
        yield from ending


class EagerGroups(SimulatedGroups):
    def __init__(
        self, models: Sequence[nn.Module], inner_optimizers: Any = (), **settings: Any
    ) -> None:
        super().__init__(
            models, inner_optimizers, **{"mixing": Stay(), "outer_momentum": 0.5, **settings}
        )
        self.eager = [EagerUpdates(*both) for both in zip(self.engines, models, strict=True)]

    def step(self, **how: Any) -> Any:
        for eager in self.eager:
            eager.before_step()
        landed = super().step(**how)
        for eager in self.eager:
            eager.after_step()
        return landed

    def finish(self) -> None:
        in_turns([turns_of(eager.finish) for eager in self.eager])


if __name__ == "__main__":
    compare(
        {
            "no overlap": {"mixing": 0.0, "overlap_steps": 0},
            "eager updates": {"simulated": EagerGroups},
            "mixing=0.2": {"mixing": 0.2},
            "mixing=0 (delayed)": {"mixing": 0.0},
        },
        sync_every=20,
        overlap_steps=19,
    )
