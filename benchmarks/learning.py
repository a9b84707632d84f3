"""A training whose loss is followed over time: text, an inner optimizer with a schedule, and what
was learned by when.

Needs nothing but torch, so that it runs in a peer's Python too. The windows of text come from a
file, and what a validation would look at goes to files: each rank writes down its model at some
steps, and whoever started the ranks validates it afterwards. So no validation is in any of the
times.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from benchmarks.case import Case
from benchmarks.models import adamw, lr_factor
from benchmarks.stamps import Stamps

WINDOWS = "windows.pt"
"""The file of the windows, in the folder of a case: ``uint8`` of shape
``(steps, windows, context + 1)``."""


@dataclass(frozen=True)
class LearningCase(Case):
    """A training from a file of windows, with snapshots on the way.

    Attributes:
        folder: Where the windows are, and where snapshots go.
        steps: Steps of the schedule of the learning rate.
        points: Snapshots, at equal distances, the last one at the end.
        lr: Learning rate of the inner optimizer after its warm-up.
        warmup: Share of the steps in which the learning rate rises.
        weight_decay: Decay of matrices and embeddings; norms have none.
        clip: The largest norm of a gradient.
    """

    folder: str = ""
    steps: int = 0
    points: int = 1
    lr: float = 4.5e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0

    outer_lr: ClassVar[float] = 0.7

    @override
    def inner(self, parameters: Iterable[Any], updates: int | None = None) -> Optimizer:
        optimizer = adamw(parameters, self.lr, self.weight_decay)
        steps = self.steps if updates is None else updates
        warmup = round(self.warmup * steps)
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, steps, warmup=warmup))
        # With the optimizer itself, because the loops know nothing of schedules.
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    @override
    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        for windows in torch.load(Path(self.folder, WINDOWS)):
            rank_windows = windows[rank * self.batch : (rank + 1) * self.batch].long()
            yield rank_windows[:, :-1], rank_windows[:, 1:]

    @override
    def stamps(self, net: nn.Module, rank: int) -> Stamps:
        return Snapshots(self, net, rank)

    @property
    def snapshot_steps(self) -> list[int]:
        return [round(self.steps * point / self.points) for point in range(1, self.points + 1)]


class Snapshots(Stamps):
    """Stamps whose clock stands still while the model is written down, and that clip the
    gradients.
    """

    def __init__(self, case: LearningCase, net: nn.Module, rank: int) -> None:
        super().__init__(case.step_seconds)
        self.model = net.state_dict
        self._case = case
        self._net = net
        self._rank = rank
        self._steps = set(case.snapshot_steps)

    @override
    def begin(self) -> None:
        super().begin()
        done = len(self.wall) - 1
        if done in self._steps:
            started = time.perf_counter()
            self._write(done)
            self.stopped += time.perf_counter() - started

    @override
    def pad(self) -> None:
        super().pad()
        nn.utils.clip_grad_norm_(self._net.parameters(), self._case.clip)

    def _write(self, step: int) -> None:
        path = Path(self._case.folder, f"{step}-{self._rank}.pt")
        spans = {
            name: series[-1] - series[0]
            for name, series in (("seconds", self.wall), ("bytes", self.sent))
        }
        # Whole or not at all: the rank may be killed at any time.
        torch.save({**spans, "model": self.model()}, path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)


def snapshots(
    case: LearningCase, ranks: int
) -> Iterator[tuple[dict[str, float], dict[str, Tensor]]]:
    """Yields what the ranks wrote down, step by step: what it took by then, and the mean of their
    models.
    """
    for step in case.snapshot_steps:
        paths = [Path(case.folder, f"{step}-{rank}.pt") for rank in range(ranks)]
        if all(path.exists() for path in paths):
            ranks_models = [torch.load(path) for path in paths]
            took = {
                "step": step,
                "seconds": max(model["seconds"] for model in ranks_models),
                "bytes": sum(model["bytes"] for model in ranks_models) / ranks,
            }
            yield (
                took,
                {
                    name: sum(model["model"][name] for model in ranks_models) / ranks
                    for name in ranks_models[0]["model"]
                },
            )
