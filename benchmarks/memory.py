"""Memory of a rank, and what a flight costs: over parameters, worker groups and fragments.

    python -m benchmarks.memory [--quick] [--json FILE] [--picture FILE]

First how much the resident memory of a rank grows while it trains, for each method, without and
with the end, at which the last exchange lands. Then the engine alone in real processes: the
processor time that a launch and a landing take from the training thread, and what the background
takes. The peers need Pythons of their own: benchmarks/peers/install.sh.
"""

import gc
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.case import Case
from benchmarks.models import Size
from benchmarks.picture import BLUE, GREEN, GREY, PURPLE, RED, figure, save
from benchmarks.sites import Job, results
from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.engine.turns import alone
from tests.ranks import run_ranks

SIZES = {
    "1M": Size(layers=8, width=96, heads=4, context=16),
    "3M": Size(layers=8, width=176, heads=4, context=16),
    "10M": Size(layers=8, width=320, heads=5, context=16),
    "30M": Size(layers=8, width=560, heads=8, context=16),
    "100M": Size(layers=8, width=1024, heads=8, context=16),
}
QUICK = {"tiny": Size(layers=8, width=32, heads=2, context=16)}

METHODS = {
    "alone": ("no exchange", GREY),
    "lightning_ddp": ("Lightning DDP", BLUE),
    "torchft": ("torchft DiLoCo, fp32", PURPLE),
    "streaming": ("Streaming DiLoCo, fp4", RED),
}

# What is read from the rows of methods: in rounds, and with what comes after the last inner step.
PEAKS = {"memory": "bytes per parameter", "memory_to_the_end": "bytes per parameter with the end"}

Row = dict[str, Any]

# -------------------------------------------------------------------------------------------------
# Memory
# -------------------------------------------------------------------------------------------------


def memory(sizes: dict[str, Size], methods: list[str]) -> list[Row]:
    """How much a rank grows while it trains, with an inner optimizer that has no state."""
    # Several rounds, so that everything that is kept or in flight has been there at once.
    wanted = {
        (name, method): Job(
            method, Case(size, 4, step_seconds=0.0, sync_every=8, overlap_steps=1), 2, None, 1, 22
        )
        for name, size in sizes.items()
        for method in methods
    }
    rows = []
    for ((name, method), job), (_, found) in zip(
        wanted.items(), results(list(wanted.values())), strict=True
    ):
        numel = parameters(job.case.size)
        rows.append({"size": name, "parameters": numel, "method": method, **found})
        peaks = [
            f"{found[peak] / numel:.1f} {unit}" for peak, unit in PEAKS.items() if peak in found
        ]
        report.said(f"{name}, {method}: {', '.join(peaks) or found['reason']}")
    return rows


def parameters(size: Size) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in size.make().parameters())


# -------------------------------------------------------------------------------------------------
# Flights
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flights:
    """A model that is cut and exchanged, without training."""

    size: Size
    groups: int = 2
    fragments: int = 4
    rounds: int = 3


def flown(flights: Flights, rank: int, world_size: int) -> Row:
    """What the flights of one rank cost, each the median, in seconds of processor time."""
    net = flights.size.make()
    patterns = Case(flights.size, flights.fragments).patterns("")
    engine = StreamingDiLoCo(
        net, sync_every=2 * flights.fragments, overlap_steps=1, fragments=patterns
    )
    gc.disable()
    launches: list[float] = []
    landings: list[float] = []
    everything: list[float] = []
    for _ in range(flights.rounds * 2 * flights.fragments):
        whole = time.process_time()
        before = time.thread_time()
        inner_step = engine.stepping()
        next(inner_step)
        launched = time.thread_time()
        # Processor time of this thread: waiting for the others is none.
        landed = alone(inner_step)
        if landed:
            landings.append(time.thread_time() - launched)
            everything[-1] += time.process_time() - whole
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(1e-3)
        elif engine.in_flight:
            launches.append(launched - before)
            everything.append(time.process_time() - whole)
    told = engine.report()
    dist.barrier()
    engine.close()
    return {
        "launch": median(launches[1:]),
        "landing": median(landings[1:]),
        "background": max(
            0.0, median(everything[1:]) - median(launches[1:]) - median(landings[1:])
        ),
        "bytes": told["bytes_sent"] / told["landings"],
    }


def costs(wanted: dict[str, Flights]) -> list[Row]:
    rows = []
    for name, flights in wanted.items():
        found = run_ranks(partial(flown, flights), flights.groups, timeout=900)[0]
        numel = parameters(flights.size)
        rows.append({"name": name, **asdict(flights), "parameters": numel, **found})
        report.said(
            f"{name}: launch {1e3 * found['launch']:.2f} ms, landing {1e3 * found['landing']:.2f}"
            " ms"
        )
    return rows


def flights(quick: bool) -> dict[str, Flights]:
    if quick:
        return {
            "tiny": Flights(QUICK["tiny"], rounds=2),
            "tiny, M=4": Flights(QUICK["tiny"], groups=4, rounds=2),
        }
    over_size = {f"{name} parameters": Flights(size) for name, size in SIZES.items()}
    over_groups = {f"10M, M={groups}": Flights(SIZES["10M"], groups=groups) for groups in (4, 8)}
    over_fragments = {
        f"10M, P={count}": Flights(SIZES["10M"], fragments=count) for count in (1, 2, 8)
    }
    return over_size | over_groups | over_fragments


# -------------------------------------------------------------------------------------------------
# Report
# -------------------------------------------------------------------------------------------------


def headline(memories: list[Row], flown: list[Row]) -> dict[str, float]:
    numbers = {}
    for row in memories:
        for peak, name in PEAKS.items():
            if peak in row:
                numbers[f"{row['method']}, {row['size']}: {name}"] = row[peak] / row["parameters"]
    for row in flown:
        values = row["parameters"] / row["fragments"]
        for what in ("launch", "landing", "background"):
            numbers[f"{row['name']}: {what}, ns per value"] = row[what] * 1e9 / values
    return numbers


def show(memories: list[Row], flown: list[Row]) -> None:
    for peak, caption in {
        "memory": "until the last inner step",
        "memory_to_the_end": "with the end",
    }.items():
        show_peaks(memories, peak, f"Peak memory of a rank over that before training, {caption}")
    for reason in dict.fromkeys(
        f"{METHODS[r['method']][0]}: {r['reason']}" for r in memories if "reason" in r
    ):
        print(f"\nLeft out: {reason}")
    table = []
    for row in flown:
        values = row["parameters"] / row["fragments"]
        times = [f"{1e3 * row[what]:.2f}" for what in ("launch", "landing", "background")]
        each = [f"{row[what] * 1e9 / values:.2f}" for what in ("launch", "landing", "background")]
        shape = [
            str(row["groups"]),
            str(row["fragments"]),
            f"{values:,.0f}",
            f"{row['bytes']:,.0f}",
        ]
        table.append(
            [row["name"], *shape, *(f"{a} ({b})" for a, b in zip(times, each, strict=True))]
        )
    columns = ["", "M", "P", "values in a fragment", "bytes sent per flight"]
    columns += [f"{what}, ms (ns per value)" for what in ("launch", "landing", "background")]
    caption = "Processor time of a flight: of the training thread at launch and landing, of all others between them."
    report.show("What a flight costs", columns, table, caption)


def show_peaks(memories: list[Row], peak: str, caption: str) -> None:
    sizes = list(dict.fromkeys((row["size"], row["parameters"]) for row in memories))
    table = []
    for method in dict.fromkeys(row["method"] for row in memories):
        cells = []
        for size, numel in sizes:
            row = next(row for row in memories if (row["method"], row["size"]) == (method, size))
            cells.append(
                f"{row[peak] / 1e6:,.0f} ({row[peak] / numel:.1f})" if peak in row else "-"
            )
        table.append([METHODS[method][0], *cells])
    columns = ["method", *(f"{numel:,} parameters" for _, numel in sizes)]
    report.show(f"{caption}, MB (bytes per parameter)", columns, table)


def draw(memories: list[Row], flown: list[Row], path: Path | None) -> None:
    if path is None:
        return
    picture, (left, right) = figure(columns=2, height=3.4)
    for method, (label, color) in METHODS.items():
        found = [row for row in memories if row["method"] == method and "memory" in row]
        points = (
            [row["parameters"] for row in found],
            [row["memory"] / row["parameters"] for row in found],
        )
        left.plot(*points, "o-", color=color, label=label)
    left.set_title("peak memory, bytes per parameter")
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    found = [row for row in flown if row["groups"] == 2 and row["fragments"] == 4]
    for what, color in (("launch", BLUE), ("landing", GREEN), ("background", RED)):
        points = [row["parameters"] for row in found], [1e3 * row[what] for row in found]
        right.plot(*points, "o-", color=color, label=what)
    right.set_yscale("log")
    right.set_title("processor time of a flight, ms")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("parameters")
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    flown_ = costs(flights(options.quick))
    methods = [method for method in METHODS if not options.quick or method != "torchft"]
    memories = memory(QUICK if options.quick else SIZES, methods)
    about = report.measured("memory", options.quick)
    report.write(options.json, headline(memories, flown_), about, memory=memories, flights=flown_)
    show(memories, flown_)
    draw(memories, flown_, options.picture)


if __name__ == "__main__":
    main()
