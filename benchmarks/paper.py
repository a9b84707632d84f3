"""Repeats the ablations of Streaming DiLoCo (arXiv 2501.18512) at small scale, and compares the
order of the losses with the paper.

    python -m benchmarks.paper [--workers N] [--minutes M] [--quick] [--json FILE] [--picture FILE]

It varies H, tau, alpha, the fragments, bits, groups and overtraining, one factor at a time,
starting from two groups with H=50, on three seeds. The paper's model has 500 million parameters;
this one has 44,000 in four blocks, and 16 tokens per parameter. So the order of the results may
agree with the paper, but not the numbers. They are shown together with the results of
``benchmarks.quality`` for 0.11 million parameters: H and groups over five seeds, and H, tau, alpha
and bits over two.

The result agrees with a claim of the paper if the whole 95 % interval over the seeds is consistent
with it, disagrees if no part of the interval is, and is open otherwise.

With --json, every run is saved as soon as it ends, and runs that are already in the file are
skipped, so the same command continues.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks import quality, report, runs
from benchmarks.comparison import Comparison, compared, interval
from benchmarks.models import TINY, Size
from benchmarks.quality import TWO_GROUPS, Pair
from benchmarks.runs import Runs
from benchmarks.training import Training
from lightning_sdiloco.planning.units import half_width

SIZE = Size(layers=4, width=24, heads=2, context=128)
SEEDS = range(3)
BASE: dict[str, Any] = {**TWO_GROUPS, "sync_every": 50, "fragments": "strided"}
DDP_RATE = 6e-3
ONE = Training(SIZE, BASE, batch=1, lr=4e-3)
"""The base settings, of which every ablation changes one. All share its inner learning rate."""

QUICK = replace(ONE, size=TINY, budget=0.05)

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"

ALIKE = 0.5
"""The limit of "as good": worse by at most this, in percent."""


class Claim(NamedTuple):
    """A claim of the paper about two values of a factor: the first is worse than the second, or as
    good.
    """

    first: str
    second: str
    is_worse: bool


class Ablation(NamedTuple):
    """A factor: its place in the paper, its values and their changes to the settings, and the
    paper's claims about them.
    """

    where: str
    values: Mapping[str, Mapping[str, Any]]
    claims: Sequence[Claim]


def varied(name: str, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns the changes for each value of a setting, by the text of the value."""
    return {str(value): {name: value} for value in values}


ABLATIONS = {
    "H": Ablation(
        "Figure 13",
        varied("sync_every", [10, 20, 50, 100, 200, 500]),
        [
            Claim("500", "50", True),
            Claim("200", "50", True),
            Claim("100", "50", True),
            Claim("100", "20", True),
            Claim("10", "50", False),
        ],
    ),
    "bits": Ablation(
        "Figure 11",
        varied("compression", ["fp32", "bf16", "fp8", "fp4", "int2"]),
        [Claim("fp4", "fp32", False), Claim("fp8", "fp32", False), Claim("bf16", "fp32", False)],
    ),
    "tau": Ablation(
        "Figure 8",
        varied("overlap_steps", [1, 5, 10, 20, 40]),
        [
            Claim("5", "1", False),
            Claim("10", "1", False),
            Claim("10", "5", False),
            Claim("40", "1", True),
        ],
    ),
    "alpha": Ablation(
        "Figure 8",
        varied("mixing", [0.0, 0.2, 0.5, 0.9]),
        [Claim("0.5", "0.0", False), Claim("0.9", "0.0", True)],
    ),
    "groups": Ablation(
        "Figure 12, Table 6",
        varied("groups", [2, 4, 8]),
        [Claim("4", "2", True), Claim("8", "4", True)],
    ),
    "cut": Ablation(
        "Figure 6",
        varied("fragments", ["strided:1", "strided:2", "sequential:2", "strided:4"]),
        [Claim("sequential:2", "strided:2", True)],
    ),
    "tokens for each parameter, beside DDP": Ablation(
        "Tables 1 and 7", varied("budget", [16.0, 64.0]), []
    ),
}
"""The factors, the most informative first."""


class Model(NamedTuple):
    """The trainings of one model and the file of their runs, with worker groups and DDP, by factor,
    value and seed.
    """

    name: str
    kept: Runs
    seeds: Sequence[int]
    pair: Callable[[str, str, int], Pair | None]

    def pairs(self, factor: str, value: str) -> list[Pair]:
        return [pair for seed in self.seeds if (pair := self.pair(factor, value, seed)) is not None]


def small_pair(base: Training, factor: str, value: str, seed: int) -> Pair:
    """Returns a training with a value of a factor, and DDP on the same batches."""
    changes = dict(ABLATIONS[factor].values[value])
    fields = {name: changes.pop(name) for name in ("groups", "budget") if name in changes}
    ours = replace(base, choices={**BASE, **changes}, seed=seed, **fields)
    ddp = replace(ours, choices=None, lr=DDP_RATE)
    return ours, ddp


def larger_pair(factor: str, value: str, seed: int) -> Pair | None:
    """Returns the trainings of stage ``verdict`` of ``benchmarks.quality``: each number of groups
    at its best rates.
    """
    if factor == "groups":
        return quality.pair("0.1M", int(value), seed, sync_every=20)
    if factor == "H" and int(value) in quality.MODELS["0.1M"].every[2]:
        return quality.pair("0.1M", 2, seed, sync_every=int(value))
    return None


def screened_pair(factor: str, value: str, seed: int) -> Pair | None:
    """Returns the trainings of stage ``screen`` with two windows per step and the former default of
    fragments.
    """
    if factor not in ("H", "tau", "alpha", "bits"):
        return None
    choices = {**BASE, **ABLATIONS[factor].values[value]}
    del choices["fragments"]
    ours = Training(quality.MODELS["0.1M"].size, choices, batch=quality.BATCH, seed=seed)
    ddp = replace(ours, choices=None, lr=DDP_RATE)
    return ours, ddp


def made_before() -> list[Model]:
    """Returns the models whose runs ``benchmarks.quality`` has saved."""
    verdict_runs = Runs("quality", RESULTS / "quality.json")
    screen_runs = Runs("quality", RESULTS / "defaults.json")
    return [
        Model("0.11 million, 5 seeds", verdict_runs, quality.HELD_OUT, larger_pair),
        Model("0.11 million, 2 seeds", screen_runs, quality.TUNING, screened_pair),
    ]


def verdict(percent: Sequence[float], is_worse: bool) -> str:
    """Returns whether the 95 % interval is inside of what a claim allows, outside, or neither.

    Examples:
        >>> [verdict(percent, is_worse=True) for percent in ([1.0, 1.1, 0.9], [-2.0, 0.0, 2.0], [-1.0, -1.1, -0.9])]
        ['agrees', 'open', 'disagrees']
        >>> [verdict(percent, is_worse=False) for percent in ([0.1, 0.2, 0.1], [-2.0, 0.0, 2.0], [2.0, 2.1, 2.2])]
        ['agrees', 'open', 'disagrees']
    """
    half = half_width(percent)
    if half is None:
        return "open"
    low = mean(percent) - half
    high = mean(percent) + half
    if is_worse:
        agrees = low > 0
        disagrees = high < 0
    else:
        agrees = high < ALIKE
        disagrees = low > ALIKE
    if agrees:
        return "agrees"
    return "disagrees" if disagrees else "open"


def difference(factor: str, claim: Claim, model: Model) -> Comparison | None:
    """Compares the first value of a claim with the second; returns None without runs."""
    first = [ours for ours, _ in model.pairs(factor, claim.first)]
    second = [ours for ours, _ in model.pairs(factor, claim.second)]
    pairs = list(zip(first, second, strict=False))
    comparisons = compared(model.kept, {claim.first: pairs})
    return comparisons[0] if comparisons else None


def judged(factor: str, claim: Claim, model: Model) -> list[str] | None:
    """Returns a row with a claim, how much worse the first value is, and whether that agrees; None
    without runs.
    """
    comparison = difference(factor, claim, model)
    if comparison is None:
        return None
    percent = comparison.percent
    relation = "worse than" if claim.is_worse else "as good as"
    return [
        f"{factor}: {claim.first} is {relation} {claim.second}",
        model.name,
        str(len(percent)),
        interval(percent, digits=1),
        verdict(percent, claim.is_worse),
    ]


Gaps = Mapping[str, Sequence[Comparison]]
"""The comparisons with DDP on the same seeds, by factor; each is named after the value."""


def above_ddp(model: Model) -> Gaps:
    """Returns the comparisons of a model with DDP for which both runs exist."""
    gaps = {}
    for factor, ablation in ABLATIONS.items():
        pairs = {value: model.pairs(factor, value) for value in ablation.values}
        comparisons = compared(model.kept, pairs)
        if comparisons:
            gaps[factor] = comparisons
    return gaps


def draw(models: Mapping[str, Gaps], path: Path) -> None:
    """Draws a small panel for each factor: percent above DDP by value, with a dot for each seed and
    the mean.
    """
    # Imported here, because a machine that only measures may not have matplotlib.
    from benchmarks.picture import SERIES, figure, save

    colors = dict(zip(models, SERIES, strict=True))
    factors = [factor for factor in ABLATIONS if any(factor in gaps for gaps in models.values())]
    widths = [2 + len(ABLATIONS[factor].values) for factor in factors]
    picture, panels = figure(len(factors), height=3.2, widths=widths)
    for axes, factor in zip(panels, factors, strict=True):
        for name, gaps in models.items():
            _draw_gaps(axes, factor, gaps.get(factor, ()), colors[name])
        _label(axes, factor)
    panels[0].set_ylabel("% above DDP", fontsize=8)
    for name, gaps in models.items():
        if gaps:
            panels[0].plot([], [], color=colors[name], marker="o", markersize=3, label=name)
    picture.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(picture, path)


def _draw_gaps(axes: Any, factor: str, comparisons: Sequence[Comparison], color: str) -> None:
    values = list(ABLATIONS[factor].values)
    places = [values.index(comparison.name) for comparison in comparisons]
    for place, comparison in zip(places, comparisons, strict=True):
        percent = comparison.percent
        axes.scatter([place] * len(percent), percent, s=10, color=color, alpha=0.5, linewidth=0)
    means = [mean(comparison.percent) for comparison in comparisons]
    axes.plot(places, means, color=color, marker="_", markersize=9, linewidth=1)


def _label(axes: Any, factor: str) -> None:
    from benchmarks.picture import QUIET

    values = list(ABLATIONS[factor].values)
    axes.axhline(0, color=QUIET, linewidth=1)
    axes.set_title(factor.partition(" ")[0], fontsize=9)
    axes.set_xticks(range(len(values)), values, rotation=60, fontsize=7)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.tick_params(axis="y", labelsize=7)


def planned(model: Model, values: Mapping[str, Sequence[str]]) -> list[Training]:
    """Returns the trainings of a model, with all values on one seed before the next seed, so that
    the picture takes shape early.
    """
    trainings: list[Training] = []
    for factor in values:
        for seed in model.seeds:
            for value in values[factor]:
                trainings += model.pair(factor, value, seed) or ()
    return trainings


def show_gaps(models: Mapping[str, Gaps]) -> None:
    """Prints a table for each factor with the percentage by which every value is above DDP in every
    model.
    """
    columns = ["value", "model", "seeds", "% above DDP"]
    for factor, ablation in ABLATIONS.items():
        rows = []
        for name, gaps in models.items():
            for comparison in gaps.get(factor, ()):
                percent = comparison.percent
                gap = interval(percent, digits=1)
                rows.append([comparison.name, name, str(len(percent)), gap])
        if rows:
            report.show(f"{factor} ({ablation.where})", columns, rows)


def show_claims(models: Sequence[Model]) -> None:
    """Prints which claims of the paper agree, for every model with runs."""
    rows = []
    for factor, ablation in ABLATIONS.items():
        for claim, model in product(ablation.claims, models):
            row = judged(factor, claim, model)
            if row is not None:
                rows.append(row)
    columns = ["claim", "model", "seeds", "% worse here", ""]
    report.show("What the paper says", columns, rows)


def main(arguments: list[str] | None = None) -> None:
    options = runs.parsed(runs.parser(__doc__), arguments)
    finished = Runs("paper", options.json)
    if options.quick:
        values: Mapping[str, Sequence[str]] = {"bits": ["fp32", "fp4"]}
        model = Model("tiny", finished, SEEDS[:1], partial(small_pair, QUICK))
    else:
        values = {factor: list(ablation.values) for factor, ablation in ABLATIONS.items()}
        model = Model("44,000 parameters", finished, SEEDS, partial(small_pair, ONE))
    finished.make(planned(model, values), options.workers, options.minutes)
    models = [model, *made_before()]
    gaps = {model.name: above_ddp(model) for model in models}
    show_gaps(gaps)
    show_claims(models)
    headline = {
        f"{factor} {comparison.name}": mean(comparison.percent)
        for factor, comparisons in gaps[model.name].items()
        for comparison in comparisons
    }
    finished.write(headline, options.quick)
    if options.picture:
        draw(gaps, options.picture)


if __name__ == "__main__":
    main()
