"""Measures the cost of worker groups for a vision model with BatchNorm, a ResNet-8 on generated
images, compared with DDP.

    python -m benchmarks.vision [--quick] [--json FILE]

Each image is a grating in noise, and its class is the direction of the grating. Four groups train
with H=20 and otherwise the strategy's choices. DDP averages the gradients of the same four batches
in every step. Both use SGD, each at the better of two rates, on two seeds for tuning and five
others. With batches of 16, the statistics of BatchNorm are those of a single group; running means
and variances are buffers, which the groups average.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from benchmarks import report
from benchmarks.comparison import interval
from benchmarks.models import lr_factor
from benchmarks.quality import HELD_OUT, TUNING
from lightning_sdiloco import SimulatedGroups

GROUPS = 4
BATCH = 16
SIDE = 16
CLASSES = 10
EVERY = 20
RATES = (0.05, 0.1)
STEPS = 800
JUDGED_BY = 2000
NOISE = 1.5
WAYS = {"DDP": False, "worker groups": True}


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.skip = nn.Conv2d(inputs, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    @override
    def forward(self, x: Tensor) -> Tensor:
        inside = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inside + self.skip(x))


def resnet8(seed: int) -> nn.Module:
    """Makes the ResNet of eight layers for small images, of 78,000 parameters."""
    torch.manual_seed(seed)
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Generates images of shape ``(count, 3, SIDE, SIDE)`` with their classes."""
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angle = (classes + 0.6 * torch.rand(count, generator=generator) - 0.3) * (math.pi / CLASSES)
    waves = (1.5 + 2 * torch.rand(count, generator=generator)) * 2 * math.pi / SIDE
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = angle.cos().view(-1, 1, 1) * rows + angle.sin().view(-1, 1, 1) * columns
    colors = torch.rand(count, 3, 1, 1, generator=generator)
    gratings = colors * torch.sin(waves.view(-1, 1, 1) * along + phase).unsqueeze(1)
    return gratings + NOISE * torch.randn(gratings.shape, generator=generator), classes


class Judged(NamedTuple):
    """How good a trained model is: cross-entropy in nats, and the share of the images in a wrong
    class, in percent.
    """

    loss: float
    error: float


def trained(in_groups: bool, lr: float, seed: int, steps: int) -> Judged:
    """Trains with seeds of its own for weights and images, and judges by images that all seeds
    share.
    """
    models = [resnet8(seed) for _ in range(GROUPS if in_groups else 1)]
    optimizers = [
        SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
        for model in models
    ]
    factor = partial(lr_factor, steps=steps, warmup=steps // 20)
    schedules = [LambdaLR(optimizer, factor) for optimizer in optimizers]
    streaming = None
    if in_groups:
        inner = [[optimizer] for optimizer in optimizers]
        streaming = SimulatedGroups(models, inner, sync_every=EVERY)
    for batches in batches_of(seed, steps):
        for model, (x, y) in zip(models * (GROUPS // len(models)), batches, strict=True):
            (F.cross_entropy(model(x), y) * len(models) / GROUPS).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if streaming is not None:
            streaming.step()
    if streaming is not None:
        streaming.finish()
    return judged(models[0])


def batches_of(seed: int, steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield [images(BATCH, generator) for _ in range(GROUPS)]


@torch.no_grad()
def judged(model: nn.Module) -> Judged:
    x, y = images(JUDGED_BY, torch.Generator().manual_seed(1000))
    logits = model.eval()(x)
    wrong = (logits.argmax(1) != y).float().mean()
    return Judged(float(F.cross_entropy(logits, y)), 100 * float(wrong))


def rate_losses(in_groups: bool, steps: int, seeds: Sequence[int]) -> dict[float, float]:
    """Returns the mean loss over some seeds at each inner learning rate."""
    return {lr: mean(trained(in_groups, lr, seed, steps).loss for seed in seeds) for lr in RATES}


def cells(name: str, lr: float, runs: Sequence[Judged]) -> list[str]:
    loss = mean(run.loss for run in runs)
    error = mean(run.error for run in runs)
    return [name, f"{lr:g}", f"{loss:.3f}", f"{error:.2f}"]


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    steps = 4 if options.quick else STEPS
    tuning = TUNING[:1] if options.quick else TUNING
    seeds = HELD_OUT[:1] if options.quick else HELD_OUT
    tried = {name: rate_losses(in_groups, steps, tuning) for name, in_groups in WAYS.items()}
    rows = []
    judged_runs = {}
    for name, losses in tried.items():
        best = min(losses, key=losses.__getitem__)
        judged_runs[name] = [trained(WAYS[name], best, seed, steps) for seed in seeds]
        rows.append(cells(name, best, judged_runs[name]))
    pairs = list(zip(judged_runs["worker groups"], judged_runs["DDP"], strict=True))
    loss_gaps = [100 * (ours.loss / ddp.loss - 1) for ours, ddp in pairs]
    error_gaps = [ours.error - ddp.error for ours, ddp in pairs]
    gaps = f"{interval(loss_gaps, digits=1)} % and {interval(error_gaps, digits=2)} points of error"
    caption = f"Over {len(seeds)} seeds groups lose {gaps} more than DDP."
    report.show("A ResNet-8 with BatchNorm", ["", "inner rate", "loss", "error, %"], rows, caption)
    headline = {"loss above DDP, %": mean(loss_gaps), "error above DDP, points": mean(error_gaps)}
    about = report.measured("vision", options.quick)
    report.write(options.json, headline, about, tried=tried, found=judged_runs)


if __name__ == "__main__":
    main()
