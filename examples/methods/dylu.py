"""Unequal speeds (DyLU, arXiv 2401.09135): a group that is half as fast trains half of the inner steps.

    python examples/methods/dylu.py

With a Trainer it is `trainer.fit(model, Paced(loader))` in every group: the groups tell each other how fast they are.
"""

import torch
from torch import nn

from lightning_sdiloco import Paced, SimulatedGroups
from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.planning import Groups, Link, Model, Streaming, play

SPEEDS = (1.0, 1.0, 1.0, 0.5)
STEPS = 300


def train() -> list[list[int]]:
    """Trains four groups, and returns the inner steps in which each was idle."""
    torch.manual_seed(0)
    truth = nn.Linear(16, 1)
    models = [nn.Linear(16, 1) for _ in SPEEDS]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    groups = SimulatedGroups(models, sync_every=10, overlap_steps=2, fragments=[["*"]])
    # In a loop of your own, `Paced(loader).follow(engine)` finds out the speed.
    loaders = [Paced([torch.randn(8, 16) for _ in range(STEPS)], speed=speed) for speed in SPEEDS]
    idle: list[list[int]] = [[] for _ in SPEEDS]
    for step, batches in enumerate(zip(*loaders, strict=True), start=1):
        for group, x in enumerate(batches):
            if x is None:
                idle[group].append(step)
                continue
            optimizers[group].zero_grad()
            nn.functional.mse_loss(models[group](x), truth(x).detach()).backward()
            optimizers[group].step()
        groups.step(idle=[group for group, x in enumerate(batches) if x is None])
    groups.finish()
    x = torch.randn(256, 16)
    print(f"loss of the outer model: {float(nn.functional.mse_loss(models[0](x), truth(x)).detach()):.6f}")
    return idle


def seconds(idle: list[list[int]]) -> float:
    """How long the run takes in virtual time, at a second per inner step of a fast group."""
    method = Streaming(Model.of_size(10**6, layers=3), Settings(sync_every=10, overlap_steps=2), Groups(1.0, 4))
    return max(times.end for times in play(method, Link(gbit_s=1.0), STEPS, SPEEDS, idle=idle))


if __name__ == "__main__":
    paced = train()
    print(f"{STEPS} steps: {seconds([[]] * 4):.0f} s where all wait, {seconds(paced):.0f} s where nobody does")
