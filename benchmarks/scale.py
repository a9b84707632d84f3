"""What launch, landing, flight, memory and bytes become with 1 to 100 billion parameters and 2 to 64 groups, on paper.

Run it with ``python -m benchmarks.scale [--quick] [--json FILE] [--picture FILE]``. Nothing is trained: bytes,
fragments and schedule are those of the engine, time and memory are the planner's model, and a run whose groups are not
equally fast is played with a clock. The models and their step times are those of the paper's Table 4.
"""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import picture, report
from lightning_sdiloco.algorithm import CONTROL_BYTES, Settings, all_reduce_for
from lightning_sdiloco.engine.checkpoint.files import Entry
from lightning_sdiloco.planning import DataParallel, Groups, Link, Model, Streaming, paper, planner, play, through_hub

GROUPS = (2, 4, 8, 16, 32, 64)
GROUP_SIZE = {"1B": 1, "10B": 8, "100B": 64}
LINK = Link(gbit_s=10.0, round_trip=0.05)
SETTINGS = Settings()
STEPS = 10_000
"""Inner steps of a whole run."""
SPREAD = 0.03
"""Standard deviation of the speeds of groups that are not equally fast."""
PLAYED = 4 * SETTINGS.sync_every
"""Inner steps that are played with a clock."""


class Row(NamedTuple):
    """What a model and a number of groups take: seconds, bytes of a rank, and bytes that a group sends."""

    model: str
    groups: int
    group_size: int
    fragments: int
    launch_s: float
    landing_s: float
    flight_s: float
    flight_steps: float
    bytes_per_step: float
    share_of_ddp: float
    final_exchange_s: float
    device_bytes: int
    host_bytes: int
    utilisation: float
    unequal_speed: float
    """Speed of the run where groups are not equally fast, as a share of that where they are."""
    gbit_s_for_95: float | None
    gbit_s_for_95_without_round_trip: float | None
    paper_gbit_s_for_95: float


class Term(NamedTuple):
    """Something that grows with the groups, for a model and each number of groups."""

    name: str
    growth: str
    unit: str
    values: dict[int, float]


def model_of(name: str) -> Model:
    """A model of Table 4, in float32."""
    return Model.of_size(int(paper.MODELS[name].values), paper.MODELS[name].layers)


def groups_of(name: str, groups: int) -> Groups:
    """The groups that train it."""
    return Groups(paper.MODELS[name].step_time, groups, GROUP_SIZE[name])


def method_of(name: str, groups: int, settings: Settings = SETTINGS) -> Streaming:
    """The engine with a model of Table 4."""
    return Streaming(model_of(name), settings, groups_of(name, groups))


def final_bytes(name: str, groups: int) -> float:
    """What a group sends in the final exchange of a run."""
    without = method_of(name, groups, replace(SETTINGS, final_sync=False))
    return method_of(name, groups).bytes_in(STEPS) - without.bytes_in(STEPS)


def unequal_speed(method: Streaming) -> float:
    """Plays groups with speeds that are drawn, the first ones alike for any number, and with all at the average."""
    draw = random.Random(0)
    speeds = [max(0.5, draw.gauss(1.0, SPREAD)) for _ in range(method.groups.groups)]
    unequal, equal = (
        max(times.steps[-1] for times in play(method, LINK, PLAYED, each)) for each in (speeds, [1.0] * len(speeds))
    )
    return equal / unequal


def row(name: str, groups: int) -> Row:
    """Everything that is said about a model and a number of groups."""
    method = method_of(name, groups)
    cost = method.costs(0, LINK)
    hops = 1 + (cost.second_hop > 0)
    on_link = cost.cold + cost.second_hop + hops * LINK.round_trip
    flight = cost.encode + on_link + cost.average + cost.step
    ddp = DataParallel(model_of(name), method.groups)
    of_paper = next(e for e in paper.table_4() if e[:3] == (name, "streaming_overlap_fp4", 0.95))
    return Row(
        model=name,
        groups=groups,
        group_size=method.groups.group_size,
        fragments=len(method.numels),
        launch_s=cost.launch,
        landing_s=cost.land,
        flight_s=flight,
        flight_steps=flight / method.groups.step_time,
        bytes_per_step=method.bytes_per_step,
        share_of_ddp=method.bytes_per_step / ddp.bytes_per_step,
        final_exchange_s=final_bytes(name, groups) * 8e-9 / LINK.gbit_s,
        device_bytes=method.memory.device_bytes,
        host_bytes=method.memory.host_bytes,
        utilisation=method.utilisation(LINK),
        unequal_speed=unequal_speed(method),
        gbit_s_for_95=planner.predict(method, LINK, STEPS).gbit_s_for["0.95"],
        gbit_s_for_95_without_round_trip=planner.predict(method, Link(LINK.gbit_s), STEPS).gbit_s_for["0.95"],
        paper_gbit_s_for_95=of_paper.paper,
    )


def hub(name: str, number: int) -> float:
    """Gigabytes that a hub sends in a round."""
    return through_hub(model_of(name), SETTINGS, groups_of(name, number), LINK, LINK.gbit_s).bytes_out / 1e9


def manifest(ranks: int) -> float:
    """Kilobytes of the manifest of a checkpoint of so many ranks."""
    entries = [Entry(f"rank_{rank:05d}.pt", 10**9, "0" * 64)._asdict() for rank in range(ranks)]
    return len(json.dumps({"files": entries}, indent=2)) / 1e3


def terms(name: str, groups: tuple[int, ...]) -> list[Term]:
    """What grows with the groups, for one model."""
    codec, size = SETTINGS.codec, GROUP_SIZE[name]

    def each(value: Any) -> dict[int, float]:
        return {number: float(value(number)) for number in groups}

    def payloads(exchange: str, number: int) -> float:
        shard = -(-method_of(name, number).numels[0] // size)
        kind = all_reduce_for(exchange, number, codec, 0.0)
        sent = (number - 1) * (kind.payload_bytes(shard) + kind.second_hop_bytes(shard))
        return sent / codec.wire_bytes(shard)

    def padding(number: int) -> float:
        shard = -(-method_of(name, number).numels[0] // size)
        return all_reduce_for("two_shot", number, codec, 0.0).part_numel(shard) * number - shard

    def final_share(number: int) -> float:
        return 100 * final_bytes(name, number) / method_of(name, number).bytes_in(STEPS)

    def gathered(number: int) -> float:
        return method_of(name, number, replace(SETTINGS, exchange="gather")).memory.host_bytes / 1e9

    return [
        Term("sent in a flight, two shots", "2 (M - 1) / M", "payloads", each(lambda m: payloads("two_shot", m))),
        Term("sent in a flight, one shot", "M - 1", "payloads", each(lambda m: payloads("gather", m))),
        Term("final exchange, float32, two shots", "2 (M - 1) / M", "% of the bytes of a run", each(final_share)),
        Term("sent by a hub in a round", "M (M - 1)", "GB", each(lambda m: hub(name, m))),
        Term("host memory of a rank, two shots", "1", "GB", each(lambda m: method_of(name, m).memory.host_bytes / 1e9)),
        Term("host memory of a rank, one shot", "M", "GB", each(gathered)),
        Term("control vectors of a rank in a flight", "M - 1", "bytes", each(lambda m: CONTROL_BYTES * (m - 1))),
        Term(
            "digest of a rank in a flight, read", "1", "MB", each(lambda m: 4e-6 * method_of(name, m).numels[0] / size)
        ),
        Term("zeros that fill up parts", "M", "values", each(padding)),
        Term("connections of a rank", "M - 1", "", each(lambda m: m - 1)),
        Term("connections in all", "M (M - 1)", "", each(lambda m: m * (m - 1) * size)),
        Term("manifest of a checkpoint", "M", "kB", each(lambda m: manifest(m * size))),
        Term("speed with unequal groups", "slowest of M", "%", each(lambda m: 100 * unequal_speed(method_of(name, m)))),
    ]


def show(rows: list[Row], named: list[Term], name: str) -> None:
    """Prints both tables."""
    columns = ["model, groups of ranks", "launch, ms", "landing, ms", "flight, s (steps)", "MB per step"]
    columns += [
        "of DDP",
        "final exchange, s",
        "GB device",
        "GB host",
        "busy",
        "Gbit/s for 95 %",
        "without round trip",
        "paper",
    ]
    cells = [
        [
            f"{r.model}, {r.groups} of {r.group_size}",
            f"{1e3 * r.launch_s:.1f}",
            f"{1e3 * r.landing_s:.1f}",
            f"{r.flight_s:.2f} ({r.flight_steps:.1f})",
            f"{r.bytes_per_step / 1e6:,.1f}",
            f"1/{1 / r.share_of_ddp:,.0f}",
            f"{r.final_exchange_s:,.0f}",
            f"{r.device_bytes / 1e9:.1f}",
            f"{r.host_bytes / 1e9:.1f}",
            f"{r.utilisation:.1%}",
            *("never" if g is None else f"{g:.2f}" for g in (r.gbit_s_for_95, r.gbit_s_for_95_without_round_trip)),
            f"{r.paper_gbit_s_for_95:.1f}",
        ]
        for r in rows
    ]
    report.show(f"{LINK.gbit_s:g} Gbit/s in each direction, {1e3 * LINK.round_trip:g} ms round trip", columns, cells)
    groups = list(named[0].values)
    grown = [[t.name, t.growth, t.unit, *(f"{t.values[m]:,.4g}" for m in groups)] for t in named]
    report.show(f"What grows, {name}", ["", "grows as", "unit", *(f"M={m}" for m in groups)], grown)


def draw(named: list[Term], path: Path) -> None:
    """Draws how terms grow from the fewest groups on, in logarithms: a slope of 1 is proportional to the groups."""
    drawn, (axes,) = picture.figure(height=3.8)
    colours = (picture.BLUE, picture.RED, picture.ORANGE, picture.PURPLE)
    for term, colour in zip(named, colours, strict=False):
        first = next(iter(term.values.values()))
        axes.plot(list(term.values), [value / first for value in term.values.values()], "o-", color=colour)
        last = list(term.values)[-1]
        axes.annotate(f" {term.name}", (last, term.values[last] / first), color=colour, va="center", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="groups (M)", ylabel="times what it is with 2", xlim=(1.9, 600))
    axes.set_xticks(GROUPS, [str(number) for number in GROUPS])
    axes.minorticks_off()
    picture.save(drawn, path)


def main(arguments: list[str] | None = None) -> None:
    """Computes, prints and writes."""
    options = report.options(__doc__, arguments)
    models, groups = (("1B",), (2, 64)) if options.quick else (tuple(paper.MODELS), GROUPS)
    rows = [row(name, number) for name in models for number in groups]
    named = terms(models[-1], groups)
    show(rows, named, models[-1])
    if options.picture:
        draw(
            [term for term in named if term.unit in ("payloads", "GB", "% of the bytes of a run")][:4], options.picture
        )
    last = rows[-1]
    headline = {
        f"{last.model}, {last.groups} groups: {key}": value
        for key, value in last._asdict().items()
        if isinstance(value, float)
    }
    about = report.measured("scale", options.quick)
    written = {"rows": [r._asdict() for r in rows], "terms": [t._asdict() for t in named]}
    report.write(options.json, headline, about, link=asdict(LINK), steps=STEPS, spread=SPREAD, **written)


if __name__ == "__main__":
    main()
