"""Draws how far worker groups are from data parallel over the size of the model: what others
measured, and our runs.

    python -m benchmarks.scaling [--json docs/benchmarks/quality.json] [--picture FILE]

Measured by others is "Communication-Efficient Language Model Training Scales Reliably and Robustly:
Scaling Laws for DiLoCo" (arXiv 2503.09799), with H=30 and 20 tokens per parameter, every method at
its own best batch and rates. Nobody has measured below 35 million parameters: a fit of both losses
and one of the gap alone, each a power law, say different things there, and all between them is
drawn as a band.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks import comparison, quality, report
from benchmarks.picture import BLUE, GREEN, ORANGE, QUIET, figure, save
from benchmarks.runs import Runs
from benchmarks.training import parameters
from lightning_sdiloco.planning.units import half_width

SIZES = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)
"""Parameters of the models of arXiv 2503.09799."""

GAPS: Mapping[int, Sequence[float]] = {
    2: (0.7, 0.5, 0.3, 0.1, 0.2, 0.2, -0.1),
    4: (2.0, 1.5, 1.1, 0.9, 0.7, 0.5, 0.3),
    8: (3.9, 3.1, 2.3, 2.0, 1.7, 1.3, 1.1),
}
"""Loss over that of data parallel there, in percent, by the number of groups."""

DATA_PARALLEL = (18.129, -0.0953)
LAWS = {2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""Their fits of the loss: A and a of ``A N**a``."""

COLORS = {2: GREEN, 4: BLUE, 8: ORANGE}
SHOWN = (8e4, 4e9)


class Point(NamedTuple):
    """What was measured here: parameters, groups, and percent above DDP with each seed."""

    parameters: int
    groups: int
    percent: Sequence[float]


def by_losses(groups: int, numel: float) -> float:
    """Returns the gap in percent that the fits of both losses say.

    Examples:
        >>> [round(by_losses(groups, 114_336), 1) for groups in LAWS]
        [1.6, 4.2, 7.7]
    """
    (a, slope), (plain, plain_slope) = LAWS[groups], DATA_PARALLEL
    return 100 * (a * numel**slope / (plain * numel**plain_slope) - 1)


def by_gap(groups: int, numel: float) -> float:
    """Returns the gap in percent that a power law of the gap says, fitted to those that are above
    zero.

    Examples:
        >>> [round(by_gap(groups, 114_336)) for groups in LAWS]
        [7, 26, 23]
    """
    positive = [(size, gap) for size, gap in zip(SIZES, GAPS[groups], strict=True) if gap > 0]
    sizes, gaps = np.log(positive).T
    slope, start = np.polyfit(sizes, gaps, 1)
    return float(np.exp(start + slope * np.log(numel)))


def points(finished: Runs) -> list[Point]:
    """Returns what the strategy does by itself on the seeds of the verdict; in two models two
    groups with H=50.
    """
    points = []
    alone = [(size, "alone") for size in ("0.1M", "0.5M", "2M")]
    for size, stage in (*alone, ("0.2M", "verdict"), ("0.5M", "verdict")):
        settings = quality.planned(quality.STAGES[stage], [size], None, "cpu")
        pairs = {
            name: training_pairs
            for name, training_pairs in settings.items()
            if ", rate " not in name and "H=100" not in name
        }
        for compared in comparison.compared(finished, pairs):
            groups = pairs[compared.name][0][0].groups
            numel = parameters(pairs[compared.name][0][0].size)
            points.append(Point(numel, groups, compared.percent))
    return points


def draw(measured: Sequence[Point], path: Path) -> None:
    picture, (axes,) = figure(height=4.0)
    numel = np.geomspace(*SHOWN, 100)
    small = numel[numel <= SIZES[0]]
    for groups, color in COLORS.items():
        axes.plot(
            SIZES, GAPS[groups], color=color, marker="o", markersize=3, label=f"{groups} groups"
        )
        laws = [[law(groups, size) for size in small] for law in (by_losses, by_gap)]
        axes.fill_between(small, *laws, color=color, alpha=0.15, linewidth=0)
        of_groups = [point for point in measured if point.groups == groups]
        bars = {
            "yerr": [half_width(point.percent) or 0.0 for point in of_groups],
            "color": color,
            "linestyle": "",
            "marker": "D",
            "capsize": 3,
        }
        shifted = [point.parameters * 1.15 ** (np.log2(groups) - 2) for point in of_groups]
        axes.errorbar(shifted, [mean(point.percent) for point in of_groups], **bars)
    axes.axhline(0, color=QUIET, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlim=SHOWN, ylim=(-6, 40), xlabel="parameters", ylabel="% above data parallel")
    axes.set_yticks([-5, -1, 0, 1, 2, 5, 10, 20], ["-5", "-1", "0", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    picture.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(picture, path)


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
    parser.add_argument("--picture", type=Path, help="a file to draw to, .svg or .png")
    options = parser.parse_args(arguments)
    measured = points(Runs("scaling", options.json))
    rows = [
        [f"{point.parameters:,}", str(point.groups), comparison.interval(point.percent, digits=1)]
        + [f"{law(point.groups, point.parameters):+.1f}" for law in (by_losses, by_gap)]
        for point in measured
    ]
    report.show(
        "% above DDP", ["parameters", "groups", "here", "law of losses", "law of the gap"], rows
    )
    if options.picture:
        draw(measured, options.picture)


if __name__ == "__main__":
    main()
