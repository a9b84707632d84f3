"""Draws the gap between worker groups and data parallelism over the model size, from published
measurements and from our runs.

    python -m benchmarks.scaling [--json docs/benchmarks/quality.json]
                                 [--curve docs/benchmarks/curve.json] [--picture FILE]

The published measurements are from "Communication-Efficient Language Model Training Scales Reliably
and Robustly: Scaling Laws for DiLoCo" (arXiv 2503.09799), with H=30 and 20 tokens per parameter,
every method at its own best batch and rates. They do not go below 35 million parameters. There, a
power-law fit of both losses and one of only the gap differ, and the range between them is drawn as
a band.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks import comparison, curve, quality, report
from benchmarks.picture import QUIET, SERIES, counted, figure, save
from benchmarks.runs import Runs
from benchmarks.training import parameters
from lightning_sdiloco.planning.units import half_width

SIZES = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)
"""The parameters of the models in arXiv 2503.09799."""

GAPS: Mapping[int, Sequence[float]] = {
    2: (0.7, 0.5, 0.3, 0.1, 0.2, 0.2, -0.1),
    4: (2.0, 1.5, 1.1, 0.9, 0.7, 0.5, 0.3),
    8: (3.9, 3.1, 2.3, 2.0, 1.7, 1.3, 1.1),
}
"""The loss above that of data parallelism in that paper, in percent, by the number of groups."""

DATA_PARALLEL = (18.129, -0.0953)
LAWS = {2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""Their fits of the loss: A and a of ``A N**a``."""

COLORS = dict(zip((2, 4, 8), SERIES, strict=True))
SHOWN = (8e4, 4e9)


class Point(NamedTuple):
    """One of our measurements: parameters, groups, and percent above DDP for each seed."""

    parameters: int
    groups: int
    percent: Sequence[float]


def by_losses(groups: int, numel: float) -> float:
    """Returns the gap in percent according to the fits of both losses.

    Examples:
        >>> [round(by_losses(groups, 114_336), 1) for groups in LAWS]
        [1.6, 4.2, 7.7]
    """
    factor, exponent = LAWS[groups]
    plain_factor, plain_exponent = DATA_PARALLEL
    return 100 * (factor * numel**exponent / (plain_factor * numel**plain_exponent) - 1)


def by_gap(groups: int, numel: float) -> float:
    """Returns the gap in percent according to a power law that is fitted to the positive gaps.

    Examples:
        >>> [round(by_gap(groups, 114_336)) for groups in LAWS]
        [7, 26, 23]
    """
    positive = [(size, gap) for size, gap in zip(SIZES, GAPS[groups], strict=True) if gap > 0]
    sizes, gaps = np.log(positive).T
    slope, start = np.polyfit(sizes, gaps, 1)
    return float(np.exp(start + slope * np.log(numel)))


def points(finished: Runs) -> list[Point]:
    """Returns the results of the bare name on the seeds of the verdict, and for two models those of
    two groups with H=50.
    """
    points = []
    stages = [(size, "alone") for size in ("0.1M", "0.5M", "2M")]
    for size, stage in (*stages, ("0.2M", "verdict"), ("0.5M", "verdict")):
        settings = quality.planned(quality.STAGES[stage], [size], None, "cpu")
        part = "bare name" if stage == "alone" else "H=50"
        wanted = {name: pairs for name, pairs in settings.items() if part in name}
        for compared in comparison.compared(finished, wanted):
            training, _ = wanted[compared.name][0]
            points.append(Point(parameters(training.size), training.groups, compared.percent))
    return points


def points_of_curve(finished: Runs) -> list[Point]:
    """Returns the gaps of groups on a GPU to the better of DDP's runs, where runs exist."""
    points = []
    for point in curve.POINTS.values():
        rows = curve.rows_of(curve.Curve(point, "data/linux.xz", "cuda"), finished)
        for groups in curve.GROUPS:
            pairs = rows.get(f"M={groups}", [])
            if pairs:
                percent = curve.percents(pairs)
                points.append(Point(parameters(point.size), groups, percent))
    return points


def draw(measured: Sequence[Point], path: Path) -> None:
    picture, (axes,) = figure(height=4.0)
    for groups, color in COLORS.items():
        _plot(axes, groups, color, [point for point in measured if point.groups == groups])
    axes.axhline(0, color=QUIET, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlim=SHOWN, ylim=(-6, 40), xlabel="parameters", ylabel="% above data parallel")
    axes.set_yticks([-5, -1, 0, 1, 2, 5, 10, 20], ["-5", "-1", "0", "1", "2", "5", "10", "20"])
    axes.xaxis.set_major_formatter(counted)
    axes.minorticks_off()
    picture.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(picture, path)


def _plot(axes: Any, groups: int, color: str, measured: Sequence[Point]) -> None:
    """Draws the gap for a number of groups: as published, by both laws, and as measured here."""
    label = f"{groups} groups"
    axes.plot(SIZES, GAPS[groups], color=color, marker="o", markersize=3, label=label)
    numel = np.geomspace(*SHOWN, 100)
    small = numel[numel <= SIZES[0]]
    laws = [[law(groups, size) for size in small] for law in (by_losses, by_gap)]
    axes.fill_between(small, *laws, color=color, alpha=0.15, linewidth=0)
    # Next to each other, not on top of each other.
    sizes = [point.parameters * 1.15 ** (np.log2(groups) - 2) for point in measured]
    means = [mean(point.percent) for point in measured]
    halves = [half_width(point.percent) or 0.0 for point in measured]
    style = {"color": color, "linestyle": "", "marker": "D", "capsize": 3}
    axes.errorbar(sizes, means, yerr=halves, **style)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("docs/benchmarks/quality.json"),
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--curve",
        type=Path,
        default=Path("docs/benchmarks/curve.json"),
        help="(default: %(default)s)",
    )
    parser.add_argument("--picture", type=Path, help="a file to draw to, .svg or .png")
    options = parser.parse_args(arguments)
    measured = points(Runs("scaling", options.json))
    measured += points_of_curve(Runs("scaling", options.curve))
    rows = []
    for numel, groups, percent in measured:
        laws = [f"{law(groups, numel):+.1f}" for law in (by_losses, by_gap)]
        gap = comparison.interval(percent, digits=1)
        rows.append([f"{numel:,}", str(groups), gap, *laws])
    columns = ["parameters", "groups", "here", "law of losses", "law of the gap"]
    report.show("% above DDP", columns, rows)
    if options.picture:
        draw(measured, options.picture)


if __name__ == "__main__":
    main()
