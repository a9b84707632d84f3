"""Measures the cost of worker groups in loss with ten million parameters and more, on one GPU; see
PLAN.md.

    python -m benchmarks.curve --corpus data/linux.xz [--size 10M] [--device cuda] [--workers N]
                               [--minutes M] [--quick] [--json FILE]

`benchmarks.corpus` makes the corpus. DDP (M=1) and 4 and 8 groups use the same total batch in each
step, so all train on the same tokens in the same order and number of steps. Groups use the settings
that the strategy chooses, except for H=30, as in the published curves.

Groups use the inner learning rate of a smaller model. DDP tries a second rate, and its better run
counts. For comparison, there are groups with elementwise outer steps, and DDP with the same outer
step. With --json, every run is saved as soon as it ends, and runs that are already in the file are
skipped. With --minutes, a training that is out of time continues with the next call.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Literal

import torch

from benchmarks import report, runs
from benchmarks.comparison import interval
from benchmarks.models import TEN_MILLION, TINY, Size
from benchmarks.quality import ELEMENTWISE, EQUALISED, chosen
from benchmarks.runs import Runs
from benchmarks.training import Run, Training
from lightning_sdiloco.algorithm.config import Settings, dense_for

SYNC_EVERY = 30
GROUPS = (8, 4)
SEEDS = (10, 11, 12)
VALIDATION_WINDOWS = 4096


@dataclass(frozen=True)
class Point:
    """A model of the curve.

    Attributes:
        size: Its shape.
        windows: The windows of all groups together in a step.
        lr: The inner learning rate of groups.
        ddp_lrs: The inner learning rates that DDP tries.
        budget: Tokens per parameter.
        validation_windows: The number of validation windows.
        precision: The precision of matrix products.
    """

    size: Size
    windows: int = 256
    lr: float = 2e-3
    ddp_lrs: tuple[float, ...] = (2e-3, 3e-3)
    budget: float = 20.0
    validation_windows: int = VALIDATION_WINDOWS
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"


POINTS = {
    "tiny": Point(TINY, windows=8, budget=1.0, validation_windows=16, precision="32-true"),
    "0.5M": Point(Size(4, 96, 3, 128), windows=16, lr=4.5e-3, ddp_lrs=(4.5e-3, 6e-3)),
    "10M": Point(TEN_MILLION),
    "25M": Point(Size(8, 512, 8, 128), lr=1.5e-3, ddp_lrs=(1.5e-3, 2.25e-3)),
}


@dataclass(frozen=True)
class Curve:
    """The trainings of a model."""

    point: Point
    corpus: str
    device: str

    def ddp(self, seed: int, lr: float | None = None) -> Training:
        point = self.point
        return Training(
            point.size,
            None,
            groups=1,
            budget=point.budget,
            batch=point.windows,
            lr=lr or point.lr,
            seed=seed,
            validation_windows=point.validation_windows,
            device=self.device,
            precision=point.precision,
            corpus=self.corpus,
        )

    def grouped(self, groups: int, seed: int, **choices: Any) -> Training:
        """Returns a training in groups with the strategy's choices, and with other choices."""
        ddp = self.ddp(seed)
        settings: dict[str, Any] = {"sync_every": SYNC_EVERY, "fragments": "strided"}
        settings["outer_optimizer"] = EQUALISED
        dense = dense_for(groups, ddp.steps, Settings(sync_every=SYNC_EVERY))
        if dense is not None:
            settings["dense_beginning"] = dense
        batch = self.point.windows // groups
        return replace(
            ddp, choices=chosen({**settings, **choices}, groups), groups=groups, batch=batch
        )

    def by_name(self, seed: int) -> dict[str, Training]:
        """Returns the trainings that are compared with DDP, the most informative first."""
        return {
            **{f"M={groups}": self.grouped(groups, seed) for groups in GROUPS},
            "M=8, every value by itself": self.grouped(8, seed, outer_optimizer=ELEMENTWISE),
            "M=1, with the outer step": self.grouped(1, seed),
            "M=4, every value by itself": self.grouped(4, seed, outer_optimizer=ELEMENTWISE),
        }

    def stages(self) -> Iterator[list[Training]]:
        """Yields the trainings, the most informative first."""
        yield [*self.tried(SEEDS[0]), *self.by_name(SEEDS[0]).values()]
        for seed in SEEDS[1:]:
            yield [*self.tried(seed), *(self.grouped(groups, seed) for groups in GROUPS)]

    def tried(self, seed: int) -> list[Training]:
        """Returns DDP at each of its rates."""
        return [self.ddp(seed, lr) for lr in self.point.ddp_lrs]

    def best_ddp(self, seed: int, finished: Runs) -> Run | None:
        """Returns DDP's better run; None until it has tried all its rates."""
        tried = self.tried(seed)
        finished_runs = [run for run in map(finished.get, tried) if run is not None]
        if len(finished_runs) < len(tried):
            return None
        return min(finished_runs, key=lambda run: float(run["loss"]))


def make(curve: Curve, finished: Runs, workers: int, minutes: float) -> None:
    """Runs all trainings, or as many as there is time for."""
    deadline = time.time() + 60 * minutes
    for trainings in curve.stages():
        left = (deadline - time.time()) / 60
        if left <= 0:
            return
        finished.make(trainings, workers, left)
        if any(finished.get(training) is None for training in trainings):
            return


def rows_of(curve: Curve, finished: Runs) -> dict[str, list[tuple[Run, Run]]]:
    """Returns the runs by name, each with the DDP run of the same seed."""
    rows = dict[str, list[tuple[Run, Run]]]()
    for seed in SEEDS:
        ddp = curve.best_ddp(seed, finished)
        if ddp is None:
            continue
        rows.setdefault("M=1", []).append((ddp, ddp))
        for name, training in curve.by_name(seed).items():
            run = finished.get(training)
            if run is not None:
                rows.setdefault(name, []).append((run, ddp))
    return rows


def percents(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """Returns how much higher the loss of runs is than DDP's, in percent."""
    return [100 * (run["loss"] / ddp["loss"] - 1) for run, ddp in pairs]


def tell(name: str, curve: Curve, finished: Runs, *, quick: bool) -> None:
    headline = dict[str, float]()
    rows = list[list[str]]()
    for setting, pairs in rows_of(curve, finished).items():
        loss = mean(run["loss"] for run, _ in pairs)
        headline[f"{name}, {setting}: loss"] = loss
        headline[f"{name}, {setting}: percent above DDP"] = mean(percents(pairs))
        rate = f"{pairs[0][0]['lr']:g}"
        gap = interval(percents(pairs), digits=2)
        rows.append([setting, str(len(pairs)), rate, f"{loss:.4f}", gap])
    columns = ["", "seeds", "inner rate", "loss, nats per byte", "percent above DDP"]
    report.show(f"{name}, H={SYNC_EVERY}, {curve.point.budget:g} tokens a parameter", columns, rows)
    finished.write(headline, quick)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.set_defaults(workers=1)
    parser.add_argument("--size", choices=POINTS, default="10M", help="default: %(default)s")
    parser.add_argument("--corpus", default="python", help="the file that benchmarks.corpus wrote")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s"
    )
    options = runs.parsed(parser, arguments)
    if options.quick:
        options.size = "tiny"
        options.device = "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch sees. There is none here.")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    curve = Curve(POINTS[options.size], options.corpus, options.device)
    finished = Runs("curve", options.json)
    make(curve, finished, options.workers, options.minutes)
    tell(options.size, curve, finished, quick=options.quick)


if __name__ == "__main__":
    main()
