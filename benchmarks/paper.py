"""The ablations of Streaming DiLoCo (arXiv 2501.18512) in shape: does the order of the losses agree with the paper?

    python -m benchmarks.paper [--workers N] [--minutes M] [--quick] [--json FILE] [--picture FILE]

H, tau, alpha, the cut, bits, groups and overtraining, one factor at a time around two groups with H=50, on three seeds.
The paper has a model of 500 million parameters; this one has 44,000 in four blocks, and 16 tokens for each. So its
numbers are not to be expected here, but an order is. A claim of the paper agrees or disagrees where the 95 % interval
over the seeds says so, and is open where it holds 0.

With --json every run is kept at once, and runs that the file has are not made again: the same command goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks import report, runs
from benchmarks.comparison import Comparison, interval
from benchmarks.models import TINY, Size
from benchmarks.quality import TWO_GROUPS
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

ALIKE = 0.5
"""What the paper calls no difference may be one of so many percent here."""


class Claim(NamedTuple):
    """What the paper says of two values of a factor: the first one is worse than the second one, or as good."""

    first: str
    second: str
    is_worse: bool


class Ablation(NamedTuple):
    """One factor: where the paper has it, its values, each with what it changes, and what the paper says of them."""

    where: str
    values: Mapping[str, Mapping[str, Any]]
    claims: Sequence[Claim]


def of(name: str, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    return {f"{value}": {name: value} for value in values}


ABLATIONS = {
    "H": Ablation(
        "Figure 13",
        of("sync_every", [10, 20, 50, 100, 200, 500]),
        [Claim("500", "50", True), Claim("200", "50", True), Claim("100", "50", True), Claim("10", "50", False)],
    ),
    "bits": Ablation(
        "Figure 11",
        of("compression", ["fp32", "bf16", "fp8", "fp4", "int2"]),
        [Claim("fp4", "fp32", False), Claim("fp8", "fp32", False), Claim("bf16", "fp32", False)],
    ),
    "tau": Ablation(
        "Figure 8",
        of("overlap_steps", [1, 5, 10, 20, 40]),
        [Claim("5", "1", False), Claim("10", "1", False), Claim("40", "1", True)],
    ),
    "alpha": Ablation(
        "Figure 8", of("mixing", [0.0, 0.2, 0.5, 0.9]), [Claim("0.5", "0.0", False), Claim("0.9", "0.0", True)]
    ),
    "groups": Ablation("Figure 12, Table 6", of("groups", [2, 4, 8]), [Claim("4", "2", True), Claim("8", "4", True)]),
    "cut": Ablation(
        "Figure 6",
        of("fragments", ["strided:1", "strided:2", "sequential:2", "strided:4"]),
        [Claim("sequential:2", "strided:2", True)],
    ),
    "tokens for each parameter, beside DDP": Ablation("Tables 1 and 7", of("budget", [16.0, 64.0]), []),
}
"""The factors, the most telling first."""


def trainings(one: Training, ablation: Ablation, value: str, seeds: Sequence[int]) -> list[Training]:
    """Returns what one training becomes with a value of a factor, seed by seed."""
    changes = dict(ablation.values[value])
    about = {name: changes.pop(name) for name in ("groups", "budget") if name in changes}
    return [replace(one, choices={**BASE, **changes}, seed=seed, **about) for seed in seeds]


def ddp_of(training: Training) -> Training:
    return replace(training, choices=None, lr=DDP_RATE)


def judged(claim: Claim, kept: Runs, ablation: Ablation) -> list[str] | None:
    """Returns a row: a claim, by how much the first value is worse, and whether that agrees; None if runs are left."""
    first, second = ([kept.get(one) for one in trainings(ONE, ablation, value, SEEDS)] for value in claim[:2])
    made = [pair for pair in zip(first, second, strict=True) if None not in pair]
    if len(made) < len(SEEDS):
        return None
    compared = Comparison(claim.first, *zip(*made, strict=True))  # type: ignore[arg-type]
    more, half = mean(compared.percent), half_width(compared.percent) or float("inf")
    verdict = "open" if abs(more) <= half else "agrees" if (more > 0) == claim.is_worse else "disagrees"
    if not claim.is_worse:
        verdict = "agrees" if abs(more) <= max(ALIKE, half) or more < 0 else "disagrees"
    said = "worse than" if claim.is_worse else "as good as"
    return [f"{claim.first} is {said} {claim.second}", interval(compared.percent, digits=1), verdict]


def above_ddp(kept: Runs, one: Training, seeds: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Returns the losses that were made, in percent above DDP on the same seed, by factor and value."""
    found: dict[str, dict[str, list[float]]] = {}
    for factor, ablation in ABLATIONS.items():
        for value in ablation.values:
            made = [(kept.get(ours), kept.get(ddp_of(ours))) for ours in trainings(one, ablation, value, seeds)]
            gaps = [100 * (ours["loss"] / ddp["loss"] - 1) for ours, ddp in made if ours and ddp]
            if gaps:
                found.setdefault(factor, {})[value] = gaps
    return found


def draw(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path | None) -> None:
    """Draws a small panel for each factor: percent above DDP by value, a dot for each seed, and their mean."""
    if path is None:
        return
    # Not at the head: a machine on which only numbers are measured may not have what draws.
    from benchmarks.picture import BLUE, QUIET, figure, save

    picture, panels = figure(columns=len(found), height=2.8, widths=[2 + len(values) for values in found.values()])
    for axes, (factor, values) in zip(panels, found.items(), strict=True):
        for at, gaps in enumerate(values.values()):
            axes.scatter([at] * len(gaps), gaps, s=10, color=BLUE, alpha=0.5, linewidth=0)
        axes.plot([mean(gaps) for gaps in values.values()], color=BLUE, marker="_", markersize=9, linewidth=1)
        axes.axhline(0, color=QUIET, linewidth=1)
        axes.set_title(factor.partition(" ")[0], fontsize=9)
        axes.set_xticks(range(len(values)), list(values), rotation=60, fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
    panels[0].set_ylabel("% above DDP", fontsize=8)
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    options = runs.parsed(runs.parser(__doc__), arguments)
    kept, wanted = Runs("paper", options.json), ABLATIONS
    one, seeds = (QUICK, SEEDS[:1]) if options.quick else (ONE, SEEDS)
    if options.quick:
        wanted = {"bits": ABLATIONS["bits"]._replace(values=of("compression", ["fp32", "fp4"]))}
    every = [
        training
        for ablation in wanted.values()
        for value in ablation.values
        for ours in trainings(one, ablation, value, seeds)
        for training in (ours, ddp_of(ours))
    ]
    kept.make(every, options.workers, options.minutes)
    found = above_ddp(kept, one, seeds)
    for factor, values in found.items():
        rows = [[value, str(len(gaps)), interval(gaps, digits=1)] for value, gaps in values.items()]
        report.show(f"{factor} ({ABLATIONS[factor].where})", ["value", "seeds", "% above DDP"], rows)
    claims = [judged(claim, kept, ablation) for ablation in ABLATIONS.values() for claim in ablation.claims]
    report.show("What the paper says", ["claim", "% worse here", "verdict"], [row for row in claims if row])
    headline = {f"{factor} {value}": mean(gaps) for factor, values in found.items() for value, gaps in values.items()}
    kept.write(headline, options.quick)
    if found:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
