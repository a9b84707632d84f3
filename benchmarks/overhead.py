"""Measures the total overhead on a link without cost: two worker groups compared with two
independent Trainers.

    python -m benchmarks.overhead [--quick] [--json FILE] [--picture FILE]

Both pairs of processes train the same model on the same cores, with real work in every step. They
take turns of one round, while the other pair sleeps. The ratio is computed between neighbouring
turns, so that other load on the machine affects both alike. A round contains every launch and every
landing once.

The memory layout of a process affects its step time by more than a percent for its whole lifetime.
So everything is repeated several times, in new processes.
"""

import multiprocessing
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.fits import Timed, fit
from benchmarks.models import DEMO, TEN_MILLION, TINY, Size, random_batches
from benchmarks.picture import QUIET, SERIES, figure, save
from benchmarks.stamps import Stamps
from lightning_sdiloco import StreamingDiLoCoStrategy
from tests.ranks import run_processes

TARGETS = {"wall": 1.01, "cpu": 1.015}


@dataclass(frozen=True)
class Case:
    """The model, its settings, and the length of the training."""

    size: Size
    batch: int
    fragments: str
    repeats: int
    runs: int
    sync_every: int = 20
    overlap_steps: int = 5
    compression: str = "fp4"

    @property
    def first(self) -> int:
        """The step at which the first turn starts. From here on, every round has all launches and
        landings.
        """
        return 2 * self.sync_every + self.overlap_steps - 1

    @property
    def steps(self) -> int:
        """The steps of a run; one more begins after the last turn."""
        return self.first + self.repeats * self.sync_every + 1


CASES = {
    "0.87M": Case(DEMO, batch=8, fragments="strided:1", repeats=8, runs=8),
    "10.9M": Case(TEN_MILLION, batch=4, fragments="strided:2", repeats=6, runs=4),
}
QUICK = {"tiny": Case(TINY, batch=2, fragments="strided:1", repeats=2, runs=2)}


class Seconds(NamedTuple):
    """The step time of one turn, averaged over its steps and both ranks."""

    wall: float
    cpu: float


class Turns:
    """Lets two pairs of ranks run in turns: plain, streaming, streaming, plain, plain, and so
    on.
    """

    def __init__(self, case: Case, barrier: Barrier, is_streaming: bool) -> None:
        self._case = case
        self._barrier = barrier
        self._is_streaming = is_streaming
        self._began: tuple[float, float] | None = None
        self._turn = 0
        self.seconds: list[Seconds] = []

    def meet(self, step: int) -> None:
        """Ends a turn and waits for the next one, if there is one."""
        sync_every = self._case.sync_every
        if step < self._case.first or (step - self._case.first) % sync_every:
            return
        if self._began is not None:
            wall, cpu = self._now()
            wall_began, cpu_began = self._began
            self.seconds.append(
                Seconds((wall - wall_began) / sync_every, (cpu - cpu_began) / sync_every)
            )
        self._await_turn()
        self._began = self._now()

    def _await_turn(self) -> None:
        while self._turn < 2 * self._case.repeats:
            self._barrier.wait(timeout=600)
            turn = self._turn
            self._turn += 1
            if (turn % 4 in (1, 2)) == self._is_streaming:
                return

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


Told = tuple[list[Seconds], dict[str, Any]]


Pair = dict[str, Seconds]


def trained(case: Case, barrier: Barrier, rank: int, world_size: int) -> Told:
    """One of four ranks: the first two are worker groups, the others are independent."""
    turns = Turns(case, barrier, is_streaming=rank < 2)
    module = Timed(case.size.make(), Stamps(), partial(torch.optim.AdamW, lr=1e-3), turns.meet)
    batches = random_batches(case.size, case.batch, seed=rank)
    if rank >= 2:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        fit(module, batches, case.steps, devices=1)
        return turns.seconds, {}
    os.environ["WORLD_SIZE"] = "2"
    strategy = StreamingDiLoCoStrategy(
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        fragments=case.fragments,
        compression=case.compression,
    )
    fit(module, batches, case.steps, strategy=strategy, devices=2)
    numels = [fragment.nbytes // 4 for fragment in strategy.fragments]
    return turns.seconds, {**strategy.report(), "fragments": numels}


def measure(case: Case) -> dict[str, Any]:
    """Returns all turns of both pairs, in new processes for each run."""
    runs = list[list[Pair]]()
    totals = dict[str, Any]()
    for number in range(1, case.runs + 1):
        pairs, totals = run(case)
        runs.append(pairs)
        medians = [f"{kind} {median(ratios(pairs, kind)):.3f}" for kind in TARGETS]
        report.said(f"run {number} of {case.runs}: {', '.join(medians)}")
    pairs = list(chain.from_iterable(runs))
    return {
        "case": asdict(case),
        "runs": [[_as_dicts(pair) for pair in pairs_of_run] for pairs_of_run in runs],
        "plain_step_s": median(pair["plain"].wall for pair in pairs),
        "wall": ratios(pairs, "wall"),
        "cpu": ratios(pairs, "cpu"),
        "told": totals,
    }


def _as_dicts(pair: Pair) -> dict[str, Any]:
    return {name: seconds._asdict() for name, seconds in pair.items()}


def run(case: Case) -> tuple[list[Pair], dict[str, Any]]:
    """Runs all turns of both pairs in four processes; returns the matching turns, and the report of
    a rank.
    """
    barrier = multiprocessing.get_context("fork").Barrier(4)
    ranks = run_processes(partial(trained, case, barrier), 4, timeout=3600)
    seconds = [turns for turns, _ in ranks]
    streaming = map(mean_of, seconds[0], seconds[1])
    plain = map(mean_of, seconds[2], seconds[3])
    names = ("streaming", "plain")
    pairs = [dict(zip(names, turns, strict=True)) for turns in zip(streaming, plain, strict=True)]
    return pairs, ranks[0][1]


def mean_of(first: Seconds, second: Seconds) -> Seconds:
    return Seconds((first.wall + second.wall) / 2, (first.cpu + second.cpu) / 2)


def ratios(pairs: Iterable[Pair], kind: str) -> list[float]:
    """Returns the ratio of our time to that of plain training, pair by pair."""
    return [getattr(pair["streaming"], kind) / getattr(pair["plain"], kind) for pair in pairs]


def row(name: str, numbers: dict[str, Any]) -> list[str]:
    runs = numbers["runs"]
    return [
        name,
        str(len(numbers["told"]["fragments"])),
        f"{len(runs)} x {len(runs[0])}",
        f"{1000 * numbers['plain_step_s']:.1f}",
        spread(numbers["wall"]),
        spread(numbers["cpu"]),
    ]


def spread(values: list[float]) -> str:
    """Formats the median and the interquartile range of values."""
    low, _, high = quantiles(values, n=4) if len(values) > 2 else (min(values), 0, max(values))
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def headline(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        f"{name}: {kind} ratio": median(numbers[kind])
        for name, numbers in results.items()
        for kind in TARGETS
    }


def draw(results: dict[str, dict[str, Any]], path: Path | None) -> None:
    """Draws the median of every run and that of all pairs of turns."""
    if path is None:
        return
    picture, (axes,) = figure(height=2.6)
    for place, numbers in enumerate(results.values()):
        _plot(axes, numbers, "wall", 0.15 - place, is_first=not place)
        _plot(axes, numbers, "cpu", -0.15 - place, is_first=not place)
    for kind, target in TARGETS.items():
        label = f"target of {_LEGEND[kind]}: {target}"
        axes.axvline(target, color=_COLORS[kind], linestyle=":", linewidth=1.5, label=label)
    axes.axvline(1.0, color=QUIET, linewidth=1)
    labels = [f"{name} parameters" for name in results]
    axes.set_yticks([-place for place in range(len(results))], labels)
    axes.set_xlabel("time of two worker groups / time of two plain Trainers")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    save(picture, path)


def _plot(axes: Any, numbers: dict[str, Any], kind: str, height: float, is_first: bool) -> None:
    color = _COLORS[kind]
    label = _LEGEND[kind] if is_first else None
    medians = by_run(numbers, kind)
    axes.plot(medians, [height] * len(medians), "o", color=color, alpha=0.5, label=label)
    middle = median(numbers[kind])
    axes.plot([middle, middle], [height - 0.12, height + 0.12], color=color, linewidth=2.5)


def by_run(numbers: dict[str, Any], kind: str) -> list[float]:
    """Returns the median of each run."""
    values = iter(numbers[kind])
    return [median(islice(values, len(pairs))) for pairs in numbers["runs"]]


_LEGEND = {"wall": "step time", "cpu": "processor time"}
_COLORS = {"wall": SERIES[0], "cpu": SERIES[1]}


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    results = {}
    for name, case in (QUICK if options.quick else CASES).items():
        report.said(f"{name} parameters")
        results[name] = measure(case)
        about = report.measured("overhead", options.quick)
        report.write(options.json, headline(results), about, results=results)
    title = "Two worker groups over two plain Trainers on the same cores: median (middle half)"
    columns = ["parameters", "fragments", "runs x pairs of turns", "plain step, ms"]
    columns += ["step time, ratio", "processor time, ratio"]
    rows = [row(name, numbers) for name, numbers in results.items()]
    report.show(title, columns, rows, "H=20, tau=5, fp4, loopback.")
    draw(results, options.picture)


if __name__ == "__main__":
    main()
