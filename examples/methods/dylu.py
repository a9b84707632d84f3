"""Unequal speeds (DyLU, arXiv 2401.09135): a group that is half as fast trains half of the inner
steps.

    python examples/methods/dylu.py

With a Trainer it is `trainer.fit(model, Paced(loader))` in every group: the groups tell each other
how fast they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model

ALIKE = 0.05  # who is less than this behind the fastest is as fast: shares are measured


class Paced:
    """Yields a batch in as many inner steps as the group has time for, and None in the others, in
    which it is idle.

    In `t` inner steps `floor(speed * t)` are trained; 1 is the speed of the fastest. With "auto" it
    is found from the seconds of an inner step that all groups tell each other with their launches,
    and 1 before the first landing. A Trainer calls `follow` and makes None an idle step; in a loop
    of your own call it before training, and `engine.step(idle=True)` where the batch is None.
    `micro_batches` is accumulate_grad_batches.
    """

    def __init__(
        self, loader: Iterable[Any], speed: float | str = "auto", micro_batches: int = 1
    ) -> None:
        self.loader = loader
        self.measures = speed == "auto"
        self.micro_batches = micro_batches
        self.speed = 1.0 if speed == "auto" else float(speed)
        self.engine: StreamingDiLoCo | None = None
        self.heard: Any = None
        # What was yielded of this epoch, whether the group trains in this inner step, and what it
        # has time for.
        self.yielded = 0
        self.trains = False
        self.credit = 0.0
        self.resumed = False
        # A Trainer tells the sampler the epoch.
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)

    def follow(self, engine: StreamingDiLoCo) -> Paced:
        if engine.site is not None:
            raise ValueError(
                "Paced does not work with a federation: a site goes at its own speed, and nobody"
                " waits."
            )
        self.engine = engine
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.yielded = self.yielded if self.resumed else 0
        self.resumed = False
        batches = iter(self.loader)
        length = len(self) if hasattr(self.loader, "__len__") else float("inf")
        while self.yielded < length:
            if self.yielded % self.micro_batches == 0:
                self.trains = self.has_time()
            batch = next(batches, self) if self.trains else None
            if batch is self:
                return
            self.yielded += 1
            yield batch

    def has_time(self) -> bool:
        """Whether the group trains in the inner step that begins."""
        landing = self.engine.last_landing if self.engine is not None and self.measures else None
        if landing is not None and landing is not self.heard:
            # From what travelled alone: the ranks of a group find the same.
            assert self.engine is not None
            self.heard = landing
            own = landing.step_times[self.engine.topology.group_index]
            share = (
                min(seconds for seconds in landing.step_times if seconds > 0) / own
                if own > 0
                else self.speed
            )
            self.speed = share if share < 1 - ALIKE else 1.0
        self.credit += self.speed
        trains = self.credit > 1 - 1e-6
        self.credit -= trains
        return trains

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("yielded", "trains", "credit", "speed")}
        return {
            **own,
            "loader": self.loader.state_dict() if hasattr(self.loader, "state_dict") else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.yielded = state["yielded"]
        self.trains = state["trains"]
        self.credit = state["credit"]
        self.resumed = True
        self.speed = state["speed"] if self.measures else self.speed
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]


SPEEDS = (1.0, 1.0, 1.0, 0.5)
STEPS = 300


def train() -> None:
    """Trains four groups, of which the last is idle in every other inner step."""
    torch.manual_seed(0)
    truth = nn.Linear(16, 1)
    models = [nn.Linear(16, 1) for _ in SPEEDS]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    groups = SimulatedGroups(models, sync_every=10, overlap_steps=2, fragments=[["*"]])
    loaders = [Paced([torch.randn(8, 16) for _ in range(STEPS)], speed=speed) for speed in SPEEDS]
    for batches in zip(*loaders, strict=True):
        for model, optimizer, x in zip(models, optimizers, batches, strict=True):
            if x is not None:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), truth(x).detach()).backward()
                optimizer.step()
        groups.step(idle=[group for group, x in enumerate(batches) if x is None])
    groups.finish()
    x = torch.randn(256, 16)
    print(
        "loss of the outer model:"
        f" {float(nn.functional.mse_loss(models[0](x), truth(x)).detach()):.6f}"
    )


def seconds(speeds: Sequence[float]) -> float:
    """How long the run takes in virtual time, at a second per inner step of a fast group; idle
    steps take none.
    """
    idle = [
        [step for step, x in enumerate(Paced([0] * STEPS, speed), 1) if x is None]
        for speed in speeds
    ]
    method = Streaming(
        Model.of_size(10**6, layers=3), Settings(sync_every=10, overlap_steps=2), Groups(1.0, 4)
    )
    return max(times.end for times in play(method, Link(gbit_s=1.0), STEPS, SPEEDS, idle=idle))


if __name__ == "__main__":
    train()
    print(
        f"{STEPS} steps: {seconds([1.0] * 4):.0f} s where all wait, {seconds(SPEEDS):.0f} s where"
        " nobody does"
    )
