"""The ablations of Streaming DiLoCo (arXiv 2501.18512) in shape: does the order of the losses agree
with the paper?

    python -m benchmarks.paper [--workers N] [--minutes M] [--quick] [--json FILE] [--picture FILE]

H, tau, alpha, the cut, bits, groups and overtraining, one factor at a time around two groups with
H=50, on three seeds. The paper has a model of 500 million parameters; this one has 44,000 in four
blocks, and 16 tokens for each. So its numbers are not to be expected here, but an order is. Beside
it stands what ``benchmarks.quality`` has kept of 0.11 million parameters: H and groups over five
seeds, and H, tau, alpha and bits over two.

A claim of the paper agrees where the whole 95 % interval over the seeds lies in what it says,
disagrees where none of it does, and is open otherwise.

With --json every run is kept at once, and runs that the file has are not made again: the same
command goes on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
"""What all ablations change one thing of. No setting has an inner learning rate of its own."""

QUICK = replace(ONE, size=TINY, budget=0.05)

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"

ALIKE = 0.5
"""As good means: worse by no more than this, in percent."""


class Claim(NamedTuple):
    """What the paper says of two values of a factor: the first one is worse than the second one,
    or as good.
    """

    first: str
    second: str
    is_worse: bool


class Ablation(NamedTuple):
    """One factor: where the paper has it, its values, each with what it changes, and what the
    paper says of them.
    """

    where: str
    values: Mapping[str, Mapping[str, Any]]
    claims: Sequence[Claim]


def of(name: str, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    return {f"{value}": {name: value} for value in values}


ABLATIONS = {
    "H": Ablation(
        "Figure 13",
        of("sync_every", [10, 20, 50, 100, 200, 500]),
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
        of("compression", ["fp32", "bf16", "fp8", "fp4", "int2"]),
        [Claim("fp4", "fp32", False), Claim("fp8", "fp32", False), Claim("bf16", "fp32", False)],
    ),
    "tau": Ablation(
        "Figure 8",
        of("overlap_steps", [1, 5, 10, 20, 40]),
        [
            Claim("5", "1", False),
            Claim("10", "1", False),
            Claim("10", "5", False),
            Claim("40", "1", True),
        ],
    ),
    "alpha": Ablation(
        "Figure 8",
        of("mixing", [0.0, 0.2, 0.5, 0.9]),
        [Claim("0.5", "0.0", False), Claim("0.9", "0.0", True)],
    ),
    "groups": Ablation(
        "Figure 12, Table 6",
        of("groups", [2, 4, 8]),
        [Claim("4", "2", True), Claim("8", "4", True)],
    ),
    "cut": Ablation(
        "Figure 6",
        of("fragments", ["strided:1", "strided:2", "sequential:2", "strided:4"]),
        [Claim("sequential:2", "strided:2", True)],
    ),
    "tokens for each parameter, beside DDP": Ablation(
        "Tables 1 and 7", of("budget", [16.0, 64.0]), []
    ),
}
"""The factors, the most telling first."""


class Model(NamedTuple):
    """Trainings of one model and the file of their runs: worker groups and DDP, by factor, value
    and seed.
    """

    name: str
    kept: Runs
    seeds: Sequence[int]
    pair: Callable[[str, str, int], Pair | None]

    def pairs(self, factor: str, value: str) -> list[Pair]:
        return [pair for seed in self.seeds if (pair := self.pair(factor, value, seed)) is not None]


def small_pair(one: Training, factor: str, value: str, seed: int) -> Pair:
    """Returns what one training becomes with a value of a factor, and DDP on the same batches."""
    changes = dict(ABLATIONS[factor].values[value])
    about = {name: changes.pop(name) for name in ("groups", "budget") if name in changes}
    ours = replace(one, choices={**BASE, **changes}, seed=seed, **about)
    return ours, replace(ours, choices=None, lr=DDP_RATE)


def larger_pair(factor: str, value: str, seed: int) -> Pair | None:
    """Returns what stage ``verdict`` of ``benchmarks.quality`` has trained: each number of groups
    at its best rates.
    """
    if factor == "H" and int(value) in quality.MODELS["0.1M"].every[2]:
        return quality.pair("0.1M", 2, seed, sync_every=int(value))
    return quality.pair("0.1M", int(value), seed, sync_every=20) if factor == "groups" else None


def screened_pair(factor: str, value: str, seed: int) -> Pair | None:
    """Returns what stage ``screen`` had trained with two windows a step, when the cut was the
    default of then.
    """
    if factor not in ("H", "tau", "alpha", "bits"):
        return None
    choices = {**BASE, **ABLATIONS[factor].values[value]}
    del choices["fragments"]
    ours = Training(quality.MODELS["0.1M"].size, choices, batch=quality.BATCH, seed=seed)
    return ours, replace(ours, choices=None, lr=DDP_RATE)


def made_before() -> list[Model]:
    """Returns the models of which ``benchmarks.quality`` has kept the runs."""
    quality_runs, screen = (
        Runs("quality", RESULTS / f"{name}.json") for name in ("quality", "defaults")
    )
    return [
        Model("0.11 million, 5 seeds", quality_runs, quality.HELD_OUT, larger_pair),
        Model("0.11 million, 2 seeds", screen, quality.TUNING, screened_pair),
    ]


def verdict(percent: Sequence[float], is_worse: bool) -> str:
    """Says whether the 95 % interval is inside of what a claim says, outside, or neither.

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
    inside, outside = (low > 0, high < 0) if is_worse else (high < ALIKE, low > ALIKE)
    return "agrees" if inside else "disagrees" if outside else "open"


def judged(factor: str, claim: Claim, model: Model) -> list[str] | None:
    """Returns a row: a claim, by how much the first value is worse, and whether that agrees; None
    without runs.
    """
    both = [
        [ours for ours, _ in model.pairs(factor, value)] for value in (claim.first, claim.second)
    ]
    found = compared(model.kept, {claim.first: list(zip(*both, strict=False))})
    if not found:
        return None
    percent = found[0].percent
    said = "worse than" if claim.is_worse else "as good as"
    text = f"{factor}: {claim.first} is {said} {claim.second}"
    return [
        text,
        model.name,
        str(len(percent)),
        interval(percent, digits=1),
        verdict(percent, claim.is_worse),
    ]


def above_ddp(model: Model) -> dict[str, list[Comparison]]:
    """Returns what was made, beside DDP on the same seeds, by factor; each value is the name of
    its comparison.
    """
    every = {
        factor: compared(
            model.kept, {value: model.pairs(factor, value) for value in ablation.values}
        )
        for factor, ablation in ABLATIONS.items()
    }
    return {factor: found for factor, found in every.items() if found}


def draw(models: Mapping[str, Mapping[str, Sequence[Comparison]]], path: Path) -> None:
    """Draws a small panel for each factor: percent above DDP by value, a dot for each seed, and
    their mean.
    """
    # Not at the head: a machine on which only numbers are measured may not have what draws.
    from benchmarks.picture import BLUE, GREEN, ORANGE, QUIET, figure, save

    factors = [factor for factor in ABLATIONS if any(factor in found for found in models.values())]
    values = {factor: list(ABLATIONS[factor].values) for factor in factors}
    picture, panels = figure(
        len(factors), height=3.2, widths=[2 + len(values[factor]) for factor in factors]
    )
    for axes, factor in zip(panels, factors, strict=True):
        for every, color in zip(models.values(), (BLUE, ORANGE, GREEN), strict=True):
            found = every.get(factor, ())
            places = [values[factor].index(one.name) for one in found]
            for at, one in zip(places, found, strict=True):
                axes.scatter(
                    [at] * len(one.percent), one.percent, s=10, color=color, alpha=0.5, linewidth=0
                )
            axes.plot(
                places,
                [mean(one.percent) for one in found],
                color=color,
                marker="_",
                markersize=9,
                linewidth=1,
            )
        axes.axhline(0, color=QUIET, linewidth=1)
        axes.set_title(factor.partition(" ")[0], fontsize=9)
        axes.set_xticks(range(len(values[factor])), values[factor], rotation=60, fontsize=7)
        axes.set_xlim(-0.5, len(values[factor]) - 0.5)
        axes.tick_params(axis="y", labelsize=7)
    panels[0].set_ylabel("% above DDP", fontsize=8)
    for (name, own), color in zip(models.items(), (BLUE, ORANGE, GREEN), strict=True):
        if own:
            panels[0].plot([], [], color=color, marker="o", markersize=3, label=name)
    picture.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    options = runs.parsed(runs.parser(__doc__), arguments)
    wanted = {factor: list(ablation.values) for factor, ablation in ABLATIONS.items()}
    model = Model("44,000 parameters", Runs("paper", options.json), SEEDS, partial(small_pair, ONE))
    if options.quick:
        wanted = {"bits": ["fp32", "fp4"]}
        model = model._replace(name="tiny", seeds=SEEDS[:1], pair=partial(small_pair, QUICK))
    # All values on one seed before the next seed: so the picture has a shape early.
    every = [
        model.pair(factor, value, seed)
        for factor in wanted
        for seed in model.seeds
        for value in wanted[factor]
    ]
    model.kept.make(
        (one for pair in every if pair for one in pair), options.workers, options.minutes
    )
    models = [model, *made_before()]
    found = {one.name: above_ddp(one) for one in models}
    for factor, ablation in ABLATIONS.items():
        rows = [
            [one.name, name, str(len(one.ours)), interval(one.percent, digits=1)]
            for name, by_factor in found.items()
            for one in by_factor.get(factor, ())
        ]
        if rows:
            report.show(
                f"{factor} ({ablation.where})", ["value", "model", "seeds", "% above DDP"], rows
            )
    claims = [
        judged(factor, claim, one)
        for factor, ablation in ABLATIONS.items()
        for claim in ablation.claims
        for one in models
    ]
    report.show(
        "What the paper says",
        ["claim", "model", "seeds", "% worse here", ""],
        [row for row in claims if row],
    )
    own = found[model.name]
    headline = {f"{factor} {one.name}": mean(one.percent) for factor in own for one in own[factor]}
    model.kept.write(headline, options.quick)
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
