"""Compares settings with DDP in pairs of runs with the same data and start, as a table and as a
picture.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import report
from benchmarks.runs import Runs, by_setting, parsed, parser
from benchmarks.training import Run, Training
from lightning_sdiloco.planning.units import half_width

FEWEST_ROUNDS = 14
"""A training with fewer rounds is not informative about a setting, and is left out."""

Pairs = Sequence[tuple[Training, Training]]
"""Trainings, each paired with one by DDP on the same data and from the same start."""


@dataclass(frozen=True)
class Comparison:
    """A setting and its reference, such as DDP, seed by seed, where both runs exist."""

    name: str
    ours: Sequence[Run]
    plain: Sequence[Run]

    @property
    def nats(self) -> list[float]:
        """The difference from the reference, in nats per byte; positive if it is worse."""
        runs = zip(self.ours, self.plain, strict=True)
        return [ours["loss"] - plain["loss"] for ours, plain in runs]

    @property
    def percent(self) -> list[float]:
        """The difference in percent of the reference's loss; positive if it is worse."""
        runs = zip(self.ours, self.plain, strict=True)
        return [100 * (ours["loss"] / plain["loss"] - 1) for ours, plain in runs]

    @property
    def verdict(self) -> str:
        """A text that says whether it is worse or better; an interval that contains 0 shows no
        difference.
        """
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
    """Formats the mean with half the width of its 95 % interval.

    >>> interval([0.01, 0.02, 0.03])
    '+0.020 ± 0.025'
    """
    half = half_width(values)
    spread = "?" if half is None else f"{half:.{digits}f}"
    return f"{mean(values):+.{digits}f} ± {spread}"


def compared(runs: Runs, settings: Mapping[str, Pairs]) -> list[Comparison]:
    """Returns the settings for which runs exist, with their DDP runs."""
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


Settings = Callable[[], Iterable[tuple[str, tuple[Training, Training]]]]
"""Returns pairs, each with the name of its setting."""


def run_stages(
    name: str,
    about: str | None,
    stages: Mapping[str, Settings],
    quick: Settings,
    subject: str,
    arguments: list[str] | None,
) -> None:
    """Runs the command of a benchmark whose pairs are made seed by seed, so that an interrupted
    stage has whole seeds.
    """
    command_line = parser(about)
    command_line.add_argument(
        "--stage", choices=stages, default="verdict", help="what to run (default: %(default)s)"
    )
    options = parsed(command_line, arguments)
    pairs = list(quick() if options.quick else stages[options.stage]())
    finished = Runs(name, options.json)
    trainings = [training for _, pair in pairs for training in pair]
    finished.make(trainings, options.workers, options.minutes)
    comparisons = compared(finished, by_setting(pairs))
    tell(f"{options.stage}: {subject}", comparisons, finished, options)


def tell(
    title: str,
    comparisons: Sequence[Comparison],
    runs: Runs,
    options: argparse.Namespace,
    caption: str = "",
) -> None:
    """Prints a row for each setting, and writes and draws the outputs that the command line
    requests.
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
    """Draws the difference of each setting from DDP with its interval; markers are hollow if the
    interval contains 0.
    """
    if path is None:
        return
    # Imported here, because a machine that only measures may not have matplotlib.
    from benchmarks.picture import figure, save
    from lightning_sdiloco.tools.output import STREAMING

    picture, (axes,) = figure(height=1.2 + 0.25 * len(comparisons))
    plot_all(axes, comparisons, STREAMING)
    axes.set_xlabel("validation loss above DDP's, %, with 95 % interval (hollow: contains 0)")
    save(picture, path)


def plot_all(axes: Any, comparisons: Sequence[Comparison], color: str) -> None:
    """Draws the difference of each setting in percent, one below the other, with their names."""
    from lightning_sdiloco.tools.output import DDP

    places = [-number for number in range(len(comparisons))]
    for place, comparison in zip(places, comparisons, strict=True):
        _plot(axes, place, comparison, color)
    axes.axvline(0, color=DDP, linewidth=1)
    axes.set_yticks(places, [comparison.name for comparison in comparisons], fontsize=8)


def _plot(axes: Any, place: int, comparison: Comparison, color: str) -> None:
    """Draws the difference of a setting in percent with its interval; the marker is hollow if the
    interval contains 0.
    """
    style = {"fmt": "o", "color": color, "capsize": 3}
    if comparison.verdict not in ("worse", "better"):
        style["mfc"] = axes.get_facecolor()
    half = half_width(comparison.percent)
    axes.errorbar(mean(comparison.percent), place, xerr=half, **style)
