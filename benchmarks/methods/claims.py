"""What each seed system claims, put to the test where its claim can hold: a number or a picture for
each.

    python -m benchmarks.methods.claims [NAME ...] [--quick] [--json FILE] [--picture FILE]

Some rest on rules and virtual time, some on small trainings, some on links between network
namespaces (root). With --json every row is kept at once, and rows that the file has are not made
again.
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
from benchmarks.picture import BLUE, GREEN, GREY, RED, figure, save
from lightning_sdiloco.planning.units import half_width

Row = dict[str, Any]
SEEDS = range(3)


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        about: What is asked.
        measure: Makes the numbers of a row from its case.
        cases: The values of each argument; all combinations are rows.
        quick: Other values, to show that it runs.
        beside: The method that the losses of others are compared with, seed by seed.
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
    """Yields the rows of a claim that are not there yet."""
    claim = CLAIMS[name]
    for case in claim.rows(quick):
        key = json.loads(json.dumps({"claim": name, **case}, default=str))
        if not any(row.items() >= key.items() for row in rows):
            yield {**key, **claim.measure(**case)}


def together(rows: Sequence[Row], name: str) -> list[tuple[Row, list[Row]]]:
    """Returns the rows of a claim that differ in their seed alone, with what they share."""
    found: dict[str, tuple[Row, list[Row]]] = {}
    for row in rows:
        if row["claim"] == name:
            shared = {key: row[key] for key in CLAIMS[name].cases if key not in ("seed", "repeat")}
            found.setdefault(json.dumps(shared), (shared, []))[1].append(row)
    return list(found.values())


def summary(rows: Sequence[Row], name: str) -> list[Row]:
    """Returns what rows that differ in their seed have in the mean, and how their losses differ
    from the other's.
    """
    claim = CLAIMS[name]
    groups = together(rows, name)
    found = list[Row]()
    for shared, own in groups:
        numbers = [key for key, value in own[0].items() if isinstance(value, float)]
        each: Row = {
            **shared,
            **{key: mean(row[key] for row in own) for key in numbers if key not in shared},
        }
        plain = next(
            (of for other, of in groups if other == {**shared, "method": claim.beside}), []
        )
        if plain and plain is not own:
            both = list(zip(own, plain, strict=False))
            percent = [100 * (one["loss"] / other["loss"] - 1) for one, other in both]
            each |= {
                "percent": mean(percent),
                "half_width": half_width(percent),
                "interval": interval(percent, 1),
            }
        found.append(each)
    return found


def _headline(rows: Sequence[Row]) -> dict[str, float]:
    named = ("percent", "gain", "goodput", "speed_up", "step")
    return {
        ", ".join(
            [name, *(f"{key}={each[key]}" for key in CLAIMS[name].cases if key in each), key]
        ): each[key]
        for name in CLAIMS
        for each in summary(rows, name)
        for key in named
        if key in each
    }


def _show(rows: Sequence[Row], name: str) -> None:
    each = summary(rows, name)
    columns = list(
        dict.fromkeys(key for one in each for key in one if key not in ("percent", "half_width"))
    )
    cells = [[_cell(one.get(key, "")) for key in columns] for one in each]
    report.show(f"{name}: {CLAIMS[name].about}", columns, cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(rows: Sequence[Row], path: Path | None) -> None:
    """Draws what grows: DropCompute's gain with ranks, goodput with sites, the speed-up of ByLink
    with the ratio.
    """
    if path is None:
        return
    picture, (drops, goodput, speed) = figure(columns=3, height=3.0)
    for axes, name, along, about, lines in (
        (
            drops,
            "drop_compute",
            "ranks",
            "gain of DropCompute, %",
            {"sigma": [(0.2, BLUE), (0.6, RED)]},
        ),
        (
            goodput,
            "backup_workers",
            "sites",
            "goodput, %",
            {"quorum": [(False, GREY), (True, GREEN)]},
        ),
        (speed, "fusionllm", "ratio", "speed-up by ByLink", {"": [(None, BLUE)]}),
    ):
        ((key, values),) = lines.items()
        number = {"drop_compute": "gain", "backup_workers": "goodput", "fusionllm": "speed_up"}[
            name
        ]
        for value, color in values:
            own = [each for each in summary(rows, name) if each.get(key) == value]
            scale = 1 if name == "fusionllm" else 100
            label = {
                "sigma": f"σ {value}",
                "quorum": "quorum of half" if value else "waits for all",
            }.get(key)
            points = [each[along] for each in own], [scale * each[number] for each in own]
            axes.plot(*points, "o-", color=color, label=label, markersize=4)
        axes.set_xscale("log")
        axes.set_xlabel({"ratio": "others' uplinks over the slowest"}.get(along, along))
        axes.set_title(about, fontsize=10)
        if key:
            axes.legend(frameon=False, fontsize=8)
    goodput.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    drops.set_xticks([8, 32, 128], ["8", "32", "128"])
    for axes in (drops, goodput):
        axes.minorticks_off()
        axes.set_ylim(bottom=0, top=100 if axes is goodput else None)
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(CLAIMS)}; all if none is given"
    )
    options = parser.parse_args(arguments)
    unknown = sorted({*options.names} - CLAIMS.keys())
    if unknown:
        parser.error(f"{unknown[0]!r} is no claim. Choose among {', '.join(CLAIMS)}.")
    path = options.json
    rows: list[Row] = (
        json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    )
    for name in options.names or CLAIMS:
        for row in measured(rows, name, options.quick):
            rows.append(row)
            report.write(
                path, _headline(rows), report.measured("methods.claims", options.quick), rows=rows
            )
        _show(rows, name)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
