"""What everything costs on a link that costs nothing: two worker groups against two Trainers on
their own.

    python -m benchmarks.overhead [--quick] [--json FILE] [--picture FILE]

Both pairs of processes train the same model on the same cores, with real work in every step. They
take turns of one round, while the other pair sleeps; the ratio is taken between neighbouring turns,
so that what else the machine does hits both alike. A round has every launch and every landing once.

Where the memory of a process comes to lie decides over a percent of its step time, as long as it
lives. So all of it is done several times, in new processes.
"""

import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.fits import Timed, fit
from benchmarks.models import DEMO, TEN_MILLION, TINY, Size, random_batches
from benchmarks.picture import BLUE, QUIET, RED, figure, save
from benchmarks.stamps import Stamps
from lightning_sdiloco import StreamingDiLoCoStrategy
from tests.ranks import run_processes

TARGETS = {"wall": 1.01, "cpu": 1.015}


@dataclass(frozen=True)
class Case:
    """What is trained, and how long."""

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
        """The step with which the first turn starts: from here on every round has all launches and
        landings.
        """
        return 2 * self.sync_every + self.overlap_steps - 1

    @property
    def steps(self) -> int:
        """All steps of a run; the last turn ends where another step begins."""
        return self.first + self.repeats * self.sync_every + 1


CASES = {
    "0.87M": Case(DEMO, batch=8, fragments="strided:1", repeats=8, runs=8),
    "10.9M": Case(TEN_MILLION, batch=4, fragments="strided:2", repeats=6, runs=4),
}
QUICK = {"tiny": Case(TINY, batch=2, fragments="strided:1", repeats=2, runs=2)}


class Seconds(NamedTuple):
    """A step of one turn, the mean over its steps and both ranks."""

    wall: float
    cpu: float


class Turns:
    """Lets two pairs of ranks run by turns: plain, streaming, streaming, plain, plain, and so
    on.
    """

    def __init__(self, case: Case, barrier: Barrier, mine: int) -> None:
        self._case = case
        self._barrier = barrier
        self._mine = mine
        self._began: tuple[float, float] | None = None
        self._turn = 0
        self.found: list[Seconds] = []

    def meet(self, step: int) -> None:
        """Ends a turn and waits for the next one, where there is one."""
        if step < self._case.first or (step - self._case.first) % self._case.sync_every:
            return
        if self._began is not None:
            wall, cpu = self._now()
            spans = wall - self._began[0], cpu - self._began[1]
            self.found.append(Seconds(*(span / self._case.sync_every for span in spans)))
        self._await_turn()
        self._began = self._now()

    def _await_turn(self) -> None:
        while self._turn < 2 * self._case.repeats:
            self._barrier.wait(timeout=600)
            turn = self._turn
            self._turn = self._turn + 1
            if (turn % 4 in (1, 2)) == bool(self._mine):
                return

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


Told = tuple[list[Seconds], dict[str, Any]]


def trained(case: Case, barrier: Barrier, rank: int, world_size: int) -> Told:
    """One of four ranks: the first two are worker groups, the others know of nobody."""
    turns = Turns(case, barrier, mine=int(rank < 2))
    module = Timed(case.size.make(), Stamps(), partial(torch.optim.AdamW, lr=1e-3), turns.meet)
    batches = random_batches(case.size, case.batch, seed=rank)
    if rank >= 2:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        fit(module, batches, case.steps, devices=1)
        return turns.found, {}
    os.environ["WORLD_SIZE"] = "2"
    strategy = StreamingDiLoCoStrategy(
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        fragments=case.fragments,
        compression=case.compression,
    )
    fit(module, batches, case.steps, strategy=strategy, devices=2)
    return turns.found, {
        **strategy.report(),
        "fragments": [fragment.nbytes // 4 for fragment in strategy.fragments],
    }


def measure(case: Case) -> dict[str, Any]:
    """All turns of both pairs, in new processes for each run."""
    runs = list[list[dict[str, Seconds]]]()
    told = dict[str, Any]()
    for number in range(case.runs):
        pairs, told = run(case)
        runs.append(pairs)
        medians = ", ".join(
            f"{what} {median(ratio(pair, what) for pair in pairs):.3f}" for what in TARGETS
        )
        report.said(f"run {number + 1} of {case.runs}: {medians}")
    pairs = [pair for own in runs for pair in own]
    return {
        "case": asdict(case),
        "runs": [
            [{name: seconds._asdict() for name, seconds in pair.items()} for pair in own]
            for own in runs
        ],
        "plain_step_s": median(pair["plain"].wall for pair in pairs),
        "wall": [ratio(pair, "wall") for pair in pairs],
        "cpu": [ratio(pair, "cpu") for pair in pairs],
        "told": told,
    }


def run(case: Case) -> tuple[list[dict[str, Seconds]], dict[str, Any]]:
    """All turns of both pairs in four processes; returns each two that belong together, and what a
    rank told.
    """
    barrier = multiprocessing.get_context("fork").Barrier(4)
    ranks = run_processes(partial(trained, case, barrier), 4, timeout=3600)
    streaming, plain = (
        list(map(both, *(found for found, _ in pair))) for pair in (ranks[:2], ranks[2:])
    )
    return [
        {"streaming": one, "plain": other} for one, other in zip(streaming, plain, strict=True)
    ], ranks[0][1]


def both(one: Seconds, other: Seconds) -> Seconds:
    return Seconds(*((a + b) / 2 for a, b in zip(one, other, strict=True)))


def ratio(pair: dict[str, Seconds], what: str) -> float:
    return float(getattr(pair["streaming"], what) / getattr(pair["plain"], what))


def row(name: str, found: dict[str, Any]) -> list[str]:

    def spread(values: list[float]) -> str:
        low, _, high = quantiles(values, n=4) if len(values) > 2 else (min(values), 0, max(values))
        return f"{median(values):.3f} ({low:.3f} to {high:.3f})"

    turns = f"{len(found['runs'])} x {len(found['runs'][0])}"
    numbers = [str(len(found["told"]["fragments"])), turns, f"{1000 * found['plain_step_s']:.1f}"]
    return [name, *numbers, spread(found["wall"]), spread(found["cpu"])]


def headline(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        f"{name}: {what} ratio": median(found[what])
        for name, found in results.items()
        for what in ("wall", "cpu")
    }


def draw(results: dict[str, dict[str, Any]], path: Path | None) -> None:
    """Draws the median of every run, and that of all pairs of turns."""
    if path is None:
        return
    picture, (axes,) = figure(height=2.6)
    labels = []
    for place, (name, found) in enumerate(results.items()):
        for offset, (what, color) in zip((0.15, -0.15), _COLORS.items(), strict=True):
            values = by_run(found, what)
            at = -place + offset
            axes.plot(
                values,
                [at] * len(values),
                "o",
                color=color,
                alpha=0.5,
                label=_LEGEND[what] if not place else None,
            )
            axes.plot([median(found[what])] * 2, [at - 0.12, at + 0.12], color=color, linewidth=2.5)
        labels.append(f"{name} parameters")
    for what, color in _COLORS.items():
        label = f"target of {_LEGEND[what]}: {TARGETS[what]}"
        axes.axvline(TARGETS[what], color=color, linestyle=":", linewidth=1.5, label=label)
    axes.axvline(1.0, color=QUIET, linewidth=1)
    axes.set_yticks([-place for place in range(len(results))], labels)
    axes.set_xlabel("two worker groups over two plain Trainers")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    save(picture, path)


def by_run(found: dict[str, Any], what: str) -> list[float]:
    left = iter(found[what])
    return [median(islice(left, len(pairs))) for pairs in found["runs"]]


_LEGEND = {"wall": "step time", "cpu": "processor time"}
_COLORS = {"wall": BLUE, "cpu": RED}


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    results = {}
    for name, case in (QUICK if options.quick else CASES).items():
        report.said(f"{name} parameters")
        results[name] = measure(case)
        report.write(
            options.json,
            headline(results),
            report.measured("overhead", options.quick),
            results=results,
        )
    columns = [
        "parameters",
        "fragments",
        "runs x pairs of turns",
        "plain step, ms",
        "step time, ratio",
        "processor time, ratio",
    ]
    report.show(
        "Two worker groups over two plain Trainers on the same cores: median (middle half)",
        columns,
        [row(name, found) for name, found in results.items()],
        "H=20, tau=5, fp4, loopback.",
    )
    draw(results, options.picture)


if __name__ == "__main__":
    main()
