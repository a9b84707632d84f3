"""Tests the claim of each published system where it can hold, with a number or a picture for each.

    python -m benchmarks.methods.claims [NAME ...] [--quick] [--json FILE] [--picture FILE]

Some tests use rules and virtual time, some use small trainings, and some use links between network
namespaces (root). With --json, every row is saved as soon as it is measured, and rows that are
already in the file are skipped.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import report
from benchmarks.comparison import interval
from benchmarks.methods import computed, shaped, small
from benchmarks.models import TINY
from benchmarks.picture import SERIES, counted, figure, save
from lightning_sdiloco.planning.units import half_width

Row = dict[str, Any]
SEEDS = range(3)


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        about: The question.
        measure: A function that measures the numbers of a row from its case.
        cases: The values of each argument; all combinations are rows.
        quick: Other values, which only show that it runs.
        beside: The method with which the losses of others are compared, seed by seed.
    """

    about: str
    measure: Callable[..., Mapping[str, Any]]
    cases: Mapping[str, Sequence[Any]]
    quick: Mapping[str, Sequence[Any]]
    beside: str | None = None

    def rows(self, quick: bool) -> Iterator[Row]:
        chosen = {**self.cases, **self.quick} if quick else self.cases
        yield from (dict(zip(chosen, values, strict=True)) for values in product(*chosen.values()))


_RING = list(small.ROUTES)[1:3]
_PAIRS = ["all with all", *list(small.ROUTES)[3:]]
_SHORT: dict[str, Sequence[Any]] = {"seed": [0], "rounds": [4]}

CLAIMS: Mapping[str, Claim] = {
    "drop_compute": Claim(
        "DropCompute by ranks: chosen from 50 inner steps, counted in 500 others",
        computed.dropping,
        {"sigma": [0.2, 0.6], "ranks": [8, 16, 32, 64, 128, 200], "seed": SEEDS},
        {"ranks": [8], "seed": [0]},
    ),
    "backup_workers": Claim(
        "goodput by sites, with a quorum of half of them and without",
        computed.backups,
        {"quorum": [False, True], "sites": [2, 4, 8, 16, 32], "seed": SEEDS},
        {**_SHORT, "sites": [2]},
    ),
    "fusionllm": Claim(
        "ByLink by how much slower one uplink is, in virtual time",
        computed.slow_uplink,
        {"ratio": [1, 3, 10, 30, 100, 300, 1000]},
        {"ratio": [1000], "steps": [300]},
    ),
    "uneven_parts": Claim(
        "two shots on shaped links, one with half the bandwidth",
        shaped.parts,
        {"repeat": [0, 1], "sites": [4, 3], "method": ["equal", "by_bandwidth"]},
        {"sites": [3], "rounds": [3], "repeat": [0]},
    ),
    "a2cid2": Claim(
        "neighbours on a ring: loss of what a group holds",
        small.gossip,
        {"seed": SEEDS, "groups": [8, 16, 32, 64], "method": _RING},
        {**_SHORT, "groups": [8]},
        beside="Ring(accelerated=False)",
    ),
    "saps_psgd": Claim(
        "pairs that send 1/100 of the values",
        small.gossip,
        {"seed": SEEDS, "groups": [16, 32], "method": _PAIRS, "sync_every": [2], "rounds": [150]},
        {**_SHORT, "groups": [16]},
        beside="all with all",
    ),
    "fedglomo": Claim(
        "5 of 50 unequal clients in a round, loss over all their points",
        small.glomo,
        {"seed": range(5), "lr": [0.1, 0.3], "method": ["FedAvg", "FedGLOMO, beta=0.5"]},
        {**_SHORT, "lr": [0.1]},
        beside="FedAvg",
    ),
    "selsync": Claim(
        "two groups on a link that carries half of what H=20 sends, in virtual time",
        small.over_time,
        {"seed": SEEDS, "method": list(small.SCHEDULES)},
        {"seed": [0], "budget": [0.1], "size": [TINY]},
        beside="H=20",
    ),
    "tables": Claim(
        "a model of embedding tables",
        small.tables,
        {"groups": [2], "seed": SEEDS, "method": list(small.COMPRESSIONS)},
        {**_SHORT, "groups": [2]},
        beside="fp4",
    ),
}
"""The claims by name."""


def measured(rows: list[Row], name: str, quick: bool) -> Iterator[Row]:
    """Yields the rows of a claim that do not exist yet."""
    claim = CLAIMS[name]
    for case in claim.rows(quick):
        key = json.loads(json.dumps({"claim": name, **case}, default=str))
        if not any(row.items() >= key.items() for row in rows):
            yield {**key, **claim.measure(**case)}


def together(rows: Sequence[Row], name: str) -> list[tuple[Row, list[Row]]]:
    """Returns groups of rows of a claim that differ only in their seed, with their common
    values.
    """
    arguments = [key for key in CLAIMS[name].cases if key not in ("seed", "repeat")]
    groups: dict[str, tuple[Row, list[Row]]] = {}
    for row in rows:
        if row["claim"] == name:
            shared = {argument: row[argument] for argument in arguments}
            _, seeds = groups.setdefault(json.dumps(shared), (shared, []))
            seeds.append(row)
    return list(groups.values())


def summary(rows: Sequence[Row], name: str) -> list[Row]:
    """Returns the means of rows that differ in their seed, and the differences of their losses from
    the reference method's.
    """
    groups = together(rows, name)
    means = []
    for shared, seeds in groups:
        row = dict(shared)
        for key, value in seeds[0].items():
            if isinstance(value, float) and key not in shared:
                row[key] = mean(seed[key] for seed in seeds)
        plain_case = {**shared, "method": CLAIMS[name].beside}
        for case, plain_seeds in groups:
            if case == plain_case and plain_seeds is not seeds:
                row |= _difference(seeds, plain_seeds)
        means.append(row)
    return means


def _difference(rows: Sequence[Row], plain_rows: Sequence[Row]) -> Row:
    """Returns the differences of losses from those of other rows in percent, seed by seed."""
    pairs = zip(rows, plain_rows, strict=False)
    percent = [100 * (row["loss"] / plain["loss"] - 1) for row, plain in pairs]
    return {
        "percent": mean(percent),
        "half_width": half_width(percent),
        "interval": interval(percent, 1),
    }


def _headline(rows: Sequence[Row]) -> dict[str, float]:
    headline = {}
    for name, claim in CLAIMS.items():
        for row in summary(rows, name):
            case = [name, *(f"{key}={row[key]}" for key in claim.cases if key in row)]
            for number in ("percent", "gain", "goodput", "speed_up", "step"):
                if number in row:
                    headline[", ".join([*case, number])] = row[number]
    return headline


def _show(rows: Sequence[Row], name: str) -> None:
    means = summary(rows, name)
    hidden = ("percent", "half_width")
    columns = list(dict.fromkeys(key for row in means for key in row if key not in hidden))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in means]
    report.show(f"{name}: {CLAIMS[name].about}", columns, cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(rows: Sequence[Row], path: Path | None) -> None:
    """Draws DropCompute's gain over ranks, goodput over sites, and the speed-up of ByLink over the
    ratio.
    """
    if path is None:
        return
    picture, (drops, goodput, speed) = figure(columns=3, height=3.0)
    gains = summary(rows, "drop_compute")
    for sigma, color in zip((0.2, 0.6), SERIES, strict=False):
        shown = [row for row in gains if row["sigma"] == sigma]
        _plot(drops, shown, "ranks", "gain", 100, color=color, label=f"σ {sigma}")
    drops.set_title("gain of DropCompute, %", fontsize=10)
    goodputs = summary(rows, "backup_workers")
    quorums = {"waits for all": False, "quorum of half": True}
    for (label, quorum), color in zip(quorums.items(), SERIES, strict=False):
        shown = [row for row in goodputs if row["quorum"] == quorum]
        _plot(goodput, shown, "sites", "goodput", 100, color=color, label=label)
    goodput.set_title("goodput, %", fontsize=10)
    _plot(speed, summary(rows, "fusionllm"), "ratio", "speed_up", 1, color=SERIES[0])
    speed.set_title("speed-up by ByLink", fontsize=10)
    speed.set_xlabel("others' uplinks / the slowest")
    speed.xaxis.set_major_formatter(counted)
    for axes in (drops, goodput):
        axes.legend(frameon=False, fontsize=8)
    goodput.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    drops.set_xticks([8, 32, 128], ["8", "32", "128"])
    for axes, top in ((drops, None), (goodput, 100)):
        axes.minorticks_off()
        axes.set_ylim(bottom=0, top=top)
    save(picture, path)


def _plot(
    axes: Any, rows: Sequence[Row], along: str, number: str, scale: float, **style: Any
) -> None:
    """Draws one number of rows over another."""
    numbers = [scale * row[number] for row in rows]
    axes.plot([row[along] for row in rows], numbers, "o-", markersize=4, **style)
    axes.set_xscale("log")
    axes.set_xlabel(along)


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(CLAIMS)}; all if none is given"
    )
    options = parser.parse_args(arguments)
    unknown = sorted({*options.names} - CLAIMS.keys())
    if unknown:
        parser.error(f"{unknown[0]!r} is no claim. Choose among {', '.join(CLAIMS)}.")
    rows = report.kept_rows(options.json)
    for name in options.names or CLAIMS:
        for row in measured(rows, name, options.quick):
            rows.append(row)
            about = report.measured("methods.claims", options.quick)
            report.write(options.json, _headline(rows), about, rows=rows)
        _show(rows, name)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
