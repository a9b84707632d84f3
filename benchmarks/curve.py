"""What worker groups cost in loss at ten million parameters and more, on one GPU; see PLAN.md.

    python -m benchmarks.curve --corpus data/linux.xz [--size 10M] [--device cuda] [--workers N]
                               [--minutes M] [--quick] [--json FILE]

`benchmarks.corpus` makes the corpus. DDP (M=1) and 4 and 8 groups share one batch in each step, so
all train on the same tokens in the same order, in as many steps. Groups have the settings that the
strategy chooses by itself, but for an H of 30, that of the published curves.

First each method tries inner learning rates in a quarter of the steps, and rates beyond these as
long as the best is at an end. With its best rate it then trains on other seeds, and beside it DDP
with the same outer step, and groups with what is new in the method left out. With --json every run
is kept at once, and runs that the file has are not made again; with --minutes a training whose time
is up goes on with the next call.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch

from benchmarks import report, runs
from benchmarks.comparison import interval
from benchmarks.models import TEN_MILLION, TINY, Size
from benchmarks.quality import ELEMENTWISE, EQUALISED, chosen
from benchmarks.runs import Runs
from benchmarks.training import Run, Training
from lightning_sdiloco.algorithm.config import Settings, dense_for

SYNC_EVERY = 30
GROUPS = (8, 4, 1)
TUNING_SEED = 0
TUNING_SHARE = 0.25
"""Of the tokens, with which rates are tried."""

SEEDS = (10, 11, 12)
VALIDATION_WINDOWS = 4096


@dataclass(frozen=True)
class Point:
    """A model of the curve.

    Attributes:
        size: Its shape.
        windows: Windows of all groups together in a step.
        rates: The inner learning rates that every method tries first.
        budget: Tokens per parameter.
        validation_windows: Windows to judge by.
        precision: That of products.
    """

    size: Size
    windows: int = 256
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    budget: float = 20.0
    validation_windows: int = VALIDATION_WINDOWS
    precision: str = "bf16-mixed"


POINTS = {
    "tiny": Point(TINY, windows=8, budget=1.0, validation_windows=16, precision="32-true"),
    "0.5M": Point(Size(4, 96, 3, 128), windows=16, rates=(2e-3, 4e-3, 8e-3)),
    "10M": Point(TEN_MILLION),
    "25M": Point(Size(8, 512, 8, 128), rates=(5e-4, 1e-3, 2e-3)),
}


@dataclass(frozen=True)
class Curve:
    """The trainings of a model."""

    point: Point
    corpus: str
    device: str

    def ddp(self, lr: float, seed: int) -> Training:
        point = self.point
        training: Any = Training
        return training(
            point.size,
            None,
            groups=1,
            budget=point.budget,
            batch=point.windows,
            lr=lr,
            seed=seed,
            validation_windows=point.validation_windows,
            device=self.device,
            precision=point.precision,
            corpus=self.corpus,
        )

    def grouped(self, groups: int, lr: float, seed: int, **choices: Any) -> Training:
        """Makes groups with what the strategy chooses by itself, and with other choices."""
        ddp = self.ddp(lr, seed)
        given: dict[str, Any] = {"sync_every": SYNC_EVERY, "fragments": "strided"}
        given["outer_optimizer"] = EQUALISED
        dense = dense_for(groups, ddp.steps, Settings(sync_every=SYNC_EVERY))
        if dense is not None:
            given["dense_beginning"] = dense
        batch = self.point.windows // groups
        return replace(
            ddp, choices=chosen({**given, **choices}, groups), groups=groups, batch=batch
        )

    def plain(self, groups: int, lr: float, seed: int) -> Training:
        """Makes a training of the method that so many groups stand for: DDP, if it is one."""
        return self.ddp(lr, seed) if groups == 1 else self.grouped(groups, lr, seed)

    def tuning(self, groups: int, lr: float) -> Training:
        """Makes a shorter training that tries a rate."""
        point = replace(self.point, budget=TUNING_SHARE * self.point.budget)
        return replace(self, point=point).plain(groups, lr, TUNING_SEED)

    def rates(self, groups: int, finished: Runs) -> list[float]:
        """Returns the rates to try: those of the model, and further ones while the best of them is
        at an end.
        """
        tried = list(self.point.rates)
        while True:
            by_rate = self._losses(groups, tried, finished)
            if len(by_rate) < len(tried):
                return tried
            best = min(by_rate, key=lambda rate: by_rate[rate])
            if best == max(tried):
                tried.append(2 * best)
            elif best == min(tried):
                tried.append(best / 2)
            else:
                return tried

    def best_rate(self, groups: int, finished: Runs) -> float | None:
        """Returns the best rate; None until all have been tried."""
        tried = self.rates(groups, finished)
        by_rate = self._losses(groups, tried, finished)
        if len(by_rate) < len(tried):
            return None
        return min(by_rate, key=lambda rate: by_rate[rate])

    def _losses(self, groups: int, rates: list[float], finished: Runs) -> dict[float, float]:
        losses = dict[float, float]()
        for rate in rates:
            run = finished.get(self.tuning(groups, rate))
            if run is not None:
                losses[rate] = run["loss"]
        return losses

    def controls(self, best: dict[int, float], seed: int) -> dict[str, Training]:
        """Returns what is trained beside the methods, by name."""
        named = dict[str, Training]()
        for groups in GROUPS[:-1]:
            name = f"M={groups}, every value by itself"
            named[name] = self.grouped(groups, best[groups], seed, outer_optimizer=ELEMENTWISE)
        named["M=1, with the outer step"] = self.grouped(1, best[1], seed)
        return named

    def stages(self, finished: Runs) -> Iterator[list[Training]]:
        """Yields what can be trained next, what is worth most first."""
        while missing := self._untried(finished):
            yield missing
        best = self.best(finished)
        first = [self.plain(groups, best[groups], SEEDS[0]) for groups in GROUPS]
        yield [*first, *self.controls(best, SEEDS[0]).values()]
        for seed in SEEDS[1:]:
            yield [self.plain(groups, best[groups], seed) for groups in GROUPS]

    def _untried(self, finished: Runs) -> list[Training]:
        """Returns what tries the rates that are not known yet."""
        trainings = list[Training]()
        for groups in GROUPS:
            for rate in self.rates(groups, finished):
                trainings.append(self.tuning(groups, rate))
        return [training for training in trainings if finished.get(training) is None]

    def best(self, finished: Runs) -> dict[int, float]:
        """Returns the best rates of the methods that have tried all of theirs."""
        best = dict[int, float]()
        for groups in GROUPS:
            rate = self.best_rate(groups, finished)
            if rate is not None:
                best[groups] = rate
        return best


def make(curve: Curve, finished: Runs, workers: int, minutes: float) -> None:
    """Makes all trainings, or as many as there is time for."""
    deadline = time.time() + 60 * minutes
    for trainings in curve.stages(finished):
        left = (deadline - time.time()) / 60
        if left <= 0:
            return
        finished.make(trainings, workers, left)
        if any(finished.get(training) is None for training in trainings):
            return


def rows_of(curve: Curve, finished: Runs) -> Iterator[tuple[str, list[Run], list[Run]]]:
    """Yields what was trained by name, with DDP on the same seeds."""
    best = curve.best(finished)
    if 1 not in best:
        return
    for groups in best:
        pairs = list[tuple[Run, Run]]()
        for seed in SEEDS:
            run = finished.get(curve.plain(groups, best[groups], seed))
            ddp = finished.get(curve.ddp(best[1], seed))
            if run is not None and ddp is not None:
                pairs.append((run, ddp))
        if pairs:
            yield f"M={groups}", [run for run, _ in pairs], [ddp for _, ddp in pairs]
    if len(best) == len(GROUPS):
        ddp = finished.get(curve.ddp(best[1], SEEDS[0]))
        for name, training in curve.controls(best, SEEDS[0]).items():
            run = finished.get(training)
            if run is not None and ddp is not None:
                yield name, [run], [ddp]


def tell(name: str, curve: Curve, finished: Runs, *, quick: bool) -> None:
    headline = dict[str, float]()
    rows = list[list[str]]()
    for setting, of_setting, of_ddp in rows_of(curve, finished):
        percent = list[float]()
        for run, ddp in zip(of_setting, of_ddp, strict=True):
            percent.append(100 * (run["loss"] / ddp["loss"] - 1))
        loss = mean(run["loss"] for run in of_setting)
        headline[f"{name}, {setting}: loss"] = loss
        headline[f"{name}, {setting}: percent above DDP"] = mean(percent)
        seeds = str(len(of_setting))
        rate = f"{of_setting[0]['lr']:g}"
        rows.append([setting, seeds, rate, f"{loss:.4f}", interval(percent, digits=2)])
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
