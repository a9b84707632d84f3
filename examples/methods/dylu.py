"""Unequal speeds (DyLU, arXiv 2401.09135): a group at half speed trains in half of the inner steps.

    python examples/methods/dylu.py

With a Trainer, use `trainer.fit(model, Paced(loader))` in every group. The groups share their
speeds.
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

ALIKE = 0.05  # smaller differences from the fastest group are ignored, because speeds are measured
END = object()


class Paced:
    """Yields a batch in inner steps for which the group has time, and None in the others.

    Of `t` inner steps, `floor(speed * t)` are trained; 1 is the speed of the fastest group. With
    "auto", the speed is computed from the step times that groups send with their launches, and is 1
    before the first landing. A Trainer calls `follow` and treats None as an idle step. In your own
    loop, call `follow` before training, and `engine.step(idle=True)` if the batch is None.
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
        self.landing: Any = None  # the last landing whose step times are known
        self.yielded = 0  # batches of this epoch, including None
        self.trains = False  # whether the group trains in this inner step
        self.credit = 0.0  # inner steps for which the group has time
        self.resumed = False
        self.sampler = getattr(loader, "sampler", None)  # a Trainer sets its epoch
        self.batch_sampler = getattr(loader, "batch_sampler", None)

    def follow(self, engine: StreamingDiLoCo) -> Paced:
        if engine.site is not None:
            reason = "a site goes at its own speed, and nobody waits."
            raise ValueError(f"Paced does not work with a federation: {reason}")
        self.engine = engine
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if not self.resumed:
            self.yielded = 0
        self.resumed = False
        batches = iter(self.loader)
        length = len(self) if hasattr(self.loader, "__len__") else float("inf")
        while self.yielded < length:
            if self.yielded % self.micro_batches == 0:
                self.trains = self.has_time()
            batch = next(batches, END) if self.trains else None
            if batch is END:
                return
            self.yielded += 1
            yield batch

    def has_time(self) -> bool:
        """Returns whether the group trains in the inner step that begins."""
        if self.engine is not None and self.measures:
            self.measure(self.engine)
        self.credit += self.speed
        trains = self.credit > 1 - 1e-6
        self.credit -= trains
        return trains

    def measure(self, engine: StreamingDiLoCo) -> None:
        """Computes the speed only from exchanged values, so that all ranks of a group get the same
        result.
        """
        landing = engine.history.last_landing
        if landing is None or landing is self.landing:
            return
        self.landing = landing
        seconds = landing.step_times[engine.topology.group_index]
        if seconds > 0:
            self.speed = min(time for time in landing.step_times if time > 0) / seconds
        if self.speed >= 1 - ALIKE:
            self.speed = 1.0

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("yielded", "trains", "credit", "speed")}
        loader_state = getattr(self.loader, "state_dict", lambda: None)
        return {**state, "loader": loader_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.yielded = state["yielded"]
        self.trains = state["trains"]
        self.credit = state["credit"]
        self.resumed = True
        if self.measures:
            self.speed = state["speed"]
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]


SPEEDS = (1.0, 1.0, 1.0, 0.5)
STEPS = 300


def train() -> None:
    """Trains four groups, of which the last is idle in every other inner step."""
    torch.manual_seed(0)
    truth = nn.Linear(16, 1)
    models = [nn.Linear(16, 1) for _ in SPEEDS]
    optimizer = torch.optim.SGD(nn.ModuleList(models).parameters(), lr=0.05)
    groups = SimulatedGroups(models, sync_every=10, overlap_steps=2, fragments=[["*"]])
    loaders = [Paced([torch.randn(8, 16) for _ in range(STEPS)], speed=speed) for speed in SPEEDS]
    for batches in zip(*loaders, strict=True):
        optimizer.zero_grad()
        for model, x in zip(models, batches, strict=True):
            if x is not None:
                nn.functional.mse_loss(model(x), truth(x).detach()).backward()
        optimizer.step()
        groups.step(idle=[group for group, x in enumerate(batches) if x is None])
    groups.finish()
    x = torch.randn(256, 16)
    loss = float(nn.functional.mse_loss(models[0](x), truth(x)).detach())
    print(f"loss of the outer model: {loss:.6f}")


def seconds(speeds: Sequence[float]) -> float:
    """Returns the duration of the run if an inner step of a fast group takes a second and an idle
    step no time.
    """
    loaders = [Paced([0] * STEPS, speed) for speed in speeds]
    idle = [[step for step, x in enumerate(loader, 1) if x is None] for loader in loaders]
    settings = Settings(sync_every=10, overlap_steps=2)
    method = Streaming(Model.of_size(10**6, layers=3), settings, Groups(1.0, 4))
    return max(times.end for times in play(method, Link(gbit_s=1.0), STEPS, SPEEDS, idle=idle))


if __name__ == "__main__":
    train()
    waiting = f"{seconds([1.0] * 4):.0f} s where all wait"
    print(f"{STEPS} steps: {waiting}, {seconds(SPEEDS):.0f} s where nobody does")
