"""How much worse than DDP a setting is: pairs of runs on the same data and start, as a table and
as a picture.
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
"""What has fewer rounds tells nothing of a setting, and is left out."""

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
        return [
            one["loss"] - plain["loss"] for one, plain in zip(self.ours, self.plain, strict=True)
        ]

    @property
    def percent(self) -> list[float]:
        """How much worse it is, in percent of the other's loss."""
        return [
            100 * (one["loss"] / plain["loss"] - 1)
            for one, plain in zip(self.ours, self.plain, strict=True)
        ]

    @property
    def verdict(self) -> str:
        """What the interval says: nothing where it holds 0."""
        half = half_width(self.percent)
        more = mean(self.percent)
        return (
            ""
            if half is None
            else "no difference"
            if abs(more) <= half
            else "worse"
            if more > 0
            else "better"
        )

    def cells(self) -> list[str]:
        one = self.ours[0]
        ddp = self.plain[0]
        return [
            self.name,
            f"{one['rounds']}",
            f"{one['budget']:g}",
            f"{one['passes']:.2g}",
            f"{len(self.ours)}",
            f"{ddp['lr']:g}",
            f"{one['lr']:g}",
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
    return f"{mean(values):+.{digits}f} ± {'?' if half is None else f'{half:.{digits}f}'}"


def compared(runs: Runs, settings: Mapping[str, Pairs]) -> list[Comparison]:
    """Returns the settings of which something was made, with their DDP."""
    found = []
    for name, pairs in settings.items():
        made = [(runs.get(one), runs.get(ddp)) for one, ddp in pairs]
        both = [(one, ddp) for one, ddp in made if one is not None and ddp is not None]
        if both:
            found.append(Comparison(name, *zip(*both, strict=True)))
    return found


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
    rows = [one.cells() for one in comparisons]
    report.show(title, COLUMNS, rows, " ".join(filter(None, [explained, caption])))
    runs.write(headline(comparisons), options.quick)
    draw(comparisons, options.picture)


def headline(comparisons: Iterable[Comparison]) -> dict[str, float]:
    """Returns the mean difference from DDP, in nats, by setting."""
    return {one.name: mean(one.nats) for one in comparisons}


def draw(comparisons: Sequence[Comparison], path: Path | None) -> None:
    """Draws how much worse than DDP each setting is, with its interval; grey where that holds 0."""
    if path is None:
        return
    # Not at the head: a machine on which only numbers are measured may not have what draws.
    from benchmarks.picture import GREY, figure, save

    picture, (axes,) = figure(height=1.2 + 0.25 * len(comparisons))
    for position, one in enumerate(comparisons):
        plot(axes, position, one)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(
        [-position for position in range(len(comparisons))],
        [one.name for one in comparisons],
        fontsize=8,
    )
    axes.set_xlabel("validation loss above that of DDP, in %, with its 95 % interval")
    save(picture, path)


def plot(axes: Any, position: int, one: Comparison) -> None:
    """Draws by how many percent a setting is worse, with its interval; grey where that holds 0."""
    from benchmarks.picture import BLUE, GREY, RED

    color = {"worse": RED, "better": BLUE}.get(one.verdict, GREY)
    half = half_width(one.percent)
    axes.errorbar(mean(one.percent), -position, xerr=half, fmt="o", color=color, capsize=3)
