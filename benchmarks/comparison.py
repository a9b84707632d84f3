"""Compares settings with DDP in pairs of runs with the same data and start, as a table and as a
picture.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import report
from benchmarks.runs import Runs
from benchmarks.training import Run, Training
from lightning_sdiloco.planning.units import half_width

FEWEST_ROUNDS = 14
"""A training with fewer rounds says nothing about a setting, and is left out."""

Pairs = Sequence[tuple[Training, Training]]
"""Trainings, each with the one by DDP on the same data and from the same start."""


@dataclass(frozen=True)
class Comparison:
    """A setting and what it is compared with, such as DDP, seed by seed, as far as both were
    made.
    """

    name: str
    ours: Sequence[Run]
    plain: Sequence[Run]

    @property
    def nats(self) -> list[float]:
        """How much worse it is, in nats per byte."""
        runs = zip(self.ours, self.plain, strict=True)
        return [ours["loss"] - plain["loss"] for ours, plain in runs]

    @property
    def percent(self) -> list[float]:
        """How much worse it is, in percent of the other's loss."""
        runs = zip(self.ours, self.plain, strict=True)
        return [100 * (ours["loss"] / plain["loss"] - 1) for ours, plain in runs]

    @property
    def verdict(self) -> str:
        """Says if it is worse or better; an interval that contains 0 shows no difference."""
        half = half_width(self.percent)
        if half is None:
            return ""
        more = mean(self.percent)
        if abs(more) <= half:
            return "no difference"
        return "worse" if more > 0 else "better"

    def cells(self) -> list[str]:
        ours = self.ours[0]
        ddp = self.plain[0]
        return [
            self.name,
            f"{ours['rounds']}",
            f"{ours['budget']:g}",
            f"{ours['passes']:.2g}",
            f"{len(self.ours)}",
            f"{ddp['lr']:g}",
            f"{ours['lr']:g}",
            f"{mean(run['loss'] for run in self.plain):.3f}",
            f"{mean(run['loss'] for run in self.ours):.3f}",
            interval(self.nats),
            interval(self.percent, digits=1),
        ]


COLUMNS = ["setting", "rounds", "tokens/parameter", "passes", "seeds", "rate of DDP", "of ours"]
COLUMNS += ["loss of DDP", "of ours", "minus DDP", "in %"]


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Returns the mean with half the width of its 95 % interval.

    >>> interval([0.01, 0.02, 0.03])
    '+0.020 ± 0.025'
    """
    half = half_width(values)
    spread = "?" if half is None else f"{half:.{digits}f}"
    return f"{mean(values):+.{digits}f} ± {spread}"


def compared(runs: Runs, settings: Mapping[str, Pairs]) -> list[Comparison]:
    """Returns the settings of which something was made, with their DDP."""
    comparisons = []
    for name, pairs in settings.items():
        ours: list[Run] = []
        plain: list[Run] = []
        for training, ddp in pairs:
            run = runs.get(training)
            ddp_run = runs.get(ddp)
            if run is not None and ddp_run is not None:
                ours.append(run)
                plain.append(ddp_run)
        if ours:
            comparisons.append(Comparison(name, ours, plain))
    return comparisons


def tell(
    title: str,
    comparisons: Sequence[Comparison],
    runs: Runs,
    options: argparse.Namespace,
    caption: str = "",
) -> None:
    """Prints a row for each setting, and writes and draws what the command line of a benchmark
    asks for.
    """
    explained = (
        "Loss in nats per byte; the difference is the mean over the seeds, with its 95 % interval."
    )
    rows = [comparison.cells() for comparison in comparisons]
    report.show(title, COLUMNS, rows, f"{explained} {caption}".strip())
    runs.write(headline(comparisons), options.quick)
    draw(comparisons, options.picture)


def headline(comparisons: Iterable[Comparison]) -> dict[str, float]:
    """Returns the mean difference from DDP, in nats, by setting."""
    return {comparison.name: mean(comparison.nats) for comparison in comparisons}


def draw(comparisons: Sequence[Comparison], path: Path | None) -> None:
    """Draws how much worse than DDP each setting is, with its interval; hollow where that holds 0."""
    if path is None:
        return
    # Not at the head: a machine on which only numbers are measured may not have what draws.
    from benchmarks.picture import figure, save
    from lightning_sdiloco.tools.output import STREAMING

    picture, (axes,) = figure(height=1.2 + 0.25 * len(comparisons))
    plot_all(axes, comparisons, STREAMING)
    axes.set_xlabel("validation loss above DDP's, %, with 95 % interval (hollow: contains 0)")
    save(picture, path)


def plot_all(axes: Any, comparisons: Sequence[Comparison], color: str) -> None:
    """Draws by how many percent each setting is worse, one below the other, and their names."""
    from lightning_sdiloco.tools.output import DDP

    places = [-number for number in range(len(comparisons))]
    for place, comparison in zip(places, comparisons, strict=True):
        _plot(axes, place, comparison, color)
    axes.axvline(0, color=DDP, linewidth=1)
    axes.set_yticks(places, [comparison.name for comparison in comparisons], fontsize=8)


def _plot(axes: Any, place: int, comparison: Comparison, color: str) -> None:
    """Draws by how many percent a setting is worse, with its interval; hollow where that holds 0."""
    style = {"fmt": "o", "color": color, "capsize": 3}
    if comparison.verdict not in ("worse", "better"):
        style["mfc"] = axes.get_facecolor()
    half = half_width(comparison.percent)
    axes.errorbar(mean(comparison.percent), place, xerr=half, **style)
