"""Measures the memory of a rank and the cost of a flight, by parameters, worker groups and
fragments.

    python -m benchmarks.memory [--quick] [--json FILE] [--picture FILE]

First, it measures how much the resident memory of a rank grows during training, for each method,
with and without the end, at which the last exchange lands. Then it measures only the engine, in
real processes: the processor time that a launch and a landing take in the training thread and in
the background. The peers need separate Python environments: benchmarks/peers/install.sh.
"""

import gc
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.case import Case
from benchmarks.models import Size
from benchmarks.picture import NO_EXCHANGE, SERIES, counted, figure, save
from benchmarks.sites import Job, results
from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.engine.turns import in_turns, turns_of
from lightning_sdiloco.tools.output import DDP, DILOCO, STREAMING
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
    "alone": ("no exchange", NO_EXCHANGE),
    "lightning_ddp": ("Lightning DDP", DDP),
    "torchft": ("torchft DiLoCo, fp32", DILOCO),
    "streaming": ("Streaming DiLoCo, fp4", STREAMING),
}

# The peaks in the rows of methods: in rounds, and including the end after the last inner step.
PEAKS = {"memory": "bytes per parameter", "memory_to_the_end": "bytes per parameter with the end"}

PARTS = ("launch", "landing", "background")
"""The parts of a flight whose processor time is measured."""

Row = dict[str, Any]

# -------------------------------------------------------------------------------------------------
# Memory
# -------------------------------------------------------------------------------------------------


def memory(sizes: dict[str, Size], methods: list[str]) -> list[Row]:
    """The growth of a rank during training, with an inner optimizer without state."""
    names = list(product(sizes, methods))
    # Several rounds, so that everything that is kept or in flight is allocated at the same time.
    jobs = []
    for name, method in names:
        case = Case(sizes[name], 4, step_seconds=0.0, sync_every=8, overlap_steps=1)
        jobs.append(Job(method, case, sites=2, mbit_s=None, first=1, counted=22))
    rows = []
    for (name, method), (job, numbers) in zip(names, results(jobs), strict=True):
        numel = parameters(job.case.size)
        rows.append({"size": name, "parameters": numel, "method": method, **numbers})
        peaks = [
            f"{numbers[peak] / numel:.1f} {unit}" for peak, unit in PEAKS.items() if peak in numbers
        ]
        report.said(f"{name}, {method}: {', '.join(peaks) or numbers['reason']}")
    return rows


def parameters(size: Size) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in size.make().parameters())


# -------------------------------------------------------------------------------------------------
# Flights
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flights:
    """A model that is divided and exchanged, without training."""

    size: Size
    groups: int = 2
    fragments: int = 4
    rounds: int = 3


def flown(flights: Flights, rank: int, world_size: int) -> Row:
    """The cost of the flights of one rank: medians in seconds of processor time."""
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
        inner_step = turns_of(engine.step)
        next(inner_step)
        launched = time.thread_time()
        # The processor time of this thread, which excludes waits for the others.
        landed = in_turns([inner_step])[0]
        if landed:
            landings.append(time.thread_time() - launched)
            everything[-1] += time.process_time() - whole
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(1e-3)
        elif engine.rounds.in_flight:
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
        numbers = run_ranks(partial(flown, flights), flights.groups, timeout=900)[0]
        numel = parameters(flights.size)
        rows.append({"name": name, **asdict(flights), "parameters": numel, **numbers})
        launch = f"launch {1e3 * numbers['launch']:.2f} ms"
        report.said(f"{name}: {launch}, landing {1e3 * numbers['landing']:.2f} ms")
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
        for part in PARTS:
            numbers[f"{row['name']}: {part}, ns per value"] = ns_per_value(row, part)
    return numbers


def ns_per_value(row: Row, part: str) -> float:
    """Returns the nanoseconds that a part of a flight takes for each value of a fragment."""
    values = row["parameters"] / row["fragments"]
    return float(row[part] * 1e9 / values)


def show(memories: list[Row], flown: list[Row]) -> None:
    title = "Peak memory of a rank over that before training"
    show_peaks(memories, "memory", f"{title}, until the last inner step")
    show_peaks(memories, "memory_to_the_end", f"{title}, with the end")
    report.show_left_out(
        f"{METHODS[row['method']][0]}: {row['reason']}" for row in memories if "reason" in row
    )
    table = []
    for row in flown:
        values = row["parameters"] / row["fragments"]
        shape = [str(row["groups"]), str(row["fragments"]), f"{values:,.0f}"]
        times = [f"{1e3 * row[part]:.2f} ({ns_per_value(row, part):.2f})" for part in PARTS]
        table.append([row["name"], *shape, f"{row['bytes']:,.0f}", *times])
    columns = ["", "M", "P", "values in a fragment", "bytes sent per flight"]
    columns += [f"{part}, ms (ns per value)" for part in PARTS]
    caption = "Processor time of a flight: of the training thread at launch and landing, of all others between them."
    report.show("What a flight costs", columns, table, caption)


def show_peaks(memories: list[Row], peak: str, caption: str) -> None:
    sizes = {row["size"]: row["parameters"] for row in memories}
    by_name = {(row["method"], row["size"]): row for row in memories}
    table = []
    for method in dict.fromkeys(row["method"] for row in memories):
        cells = []
        for size, numel in sizes.items():
            nbytes = by_name[method, size].get(peak)
            cells.append("-" if nbytes is None else f"{nbytes / 1e6:,.0f} ({nbytes / numel:.1f})")
        table.append([METHODS[method][0], *cells])
    columns = ["method", *(f"{numel:,} parameters" for numel in sizes.values())]
    report.show(f"{caption}, MB (bytes per parameter)", columns, table)


def draw(memories: list[Row], flown: list[Row], path: Path | None) -> None:
    if path is None:
        return
    picture, (left, right) = figure(columns=2, height=3.4)
    for method, (label, color) in METHODS.items():
        rows = [row for row in memories if row["method"] == method and "memory" in row]
        peaks = [row["memory"] / row["parameters"] for row in rows]
        _plot(left, rows, peaks, color, label)
    left.set_title("peak memory, bytes per parameter")
    left.set_ylim(bottom=0)
    rows = [row for row in flown if row["groups"] == 2 and row["fragments"] == 4]
    for part, color in zip(PARTS, SERIES, strict=True):
        _plot(right, rows, [1e3 * row[part] for row in rows], color, part)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(counted)
    right.set_title("processor time of a flight, ms")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel("parameters")
        axes.xaxis.set_major_formatter(counted)
    save(picture, path)


def _plot(axes: Any, rows: list[Row], numbers: list[float], color: str, label: str) -> None:
    """Draws numbers over the number of parameters in their rows."""
    axes.plot([row["parameters"] for row in rows], numbers, "o-", color=color, label=label)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    flown_rows = costs(flights(options.quick))
    methods = [method for method in METHODS if not options.quick or method != "torchft"]
    memories = memory(QUICK if options.quick else SIZES, methods)
    numbers = headline(memories, flown_rows)
    about = report.measured("memory", options.quick)
    report.write(options.json, numbers, about, memory=memories, flights=flown_rows)
    show(memories, flown_rows)
    draw(memories, flown_rows, options.picture)


if __name__ == "__main__":
    main()
