"""Eager updates (arXiv 2502.12996): go on with the own part of a mean that takes the whole round to
come.

    python examples/methods/eager_updates.py

In a loop of your own, around every `engine.step()`: `eager.before_step()` and `eager.after_step()`,
and at the end `eager.finish()` in place of `engine.finish()`. The engine has `mixing=Stay()` and an
outer SGD: its step is linear, so that a group has a part of it.
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
    """Leaves local values as they are at a landing: the next launch takes the outer parameters
    in.
    """

    kept: float = 0.0  # of what the compression did not send, and of buffers

    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        return ()

    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None: ...


class EagerUpdates:
    """Makes the own outer steps of a group: `v = mu v + d / M`, and `local = outer - lr (d / M + mu
    v)`, d = delta.

    The outer parameters make their steps with the mean of all groups, as ever, and are bitwise
    equal in all of them.
    """

    def __init__(self, engine: StreamingDiLoCo, model: nn.Module) -> None:
        self.engine = engine
        self.parameters = {name: p.data for name, p in model.named_parameters()}
        self.lr, self.momentum = (engine.report()[name] for name in ("outer_lr", "outer_momentum"))
        # By parameter: from where the inner steps began, and the momentum of the own parts.
        self.began: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Lets the engine measure what is launched next from where the inner steps began."""
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
        """Restarts from the outer parameters plus its own part of the step to come."""
        for name, gradient in self.gradients.items():
            # What is not finite is no step: the group goes on from the outer parameters.
            part = (
                gradient / self.engine.topology.num_groups
                if gradient.isfinite().all()
                else 0 * self.outer[name]
            )
            self.v[name] = self.momentum * self.v.get(name, torch.zeros_like(part)) + part
            self.began[name] = self.outer[name] - self.lr * (part + self.momentum * self.v[name])
            self.parameters[name].copy_(self.began[name])

    def rejoin(self) -> None:
        """Moves the parameters to where inner steps from the outer parameters of now had led, once
        all has landed.
        """
        outer = self.engine.outer_state_dict()
        for name, began in self.began.items():
            self.parameters[name].add_(outer[name] - began)
        self.began = {}

    @takes_turns
    def finish(self) -> Turns[None]:
        """Ends training, in place of `engine.finish`."""
        ending = turns_of(self.engine.finish)
        next(ending)  # All that was in flight has landed.
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
