"""Measures how much of its speed each method keeps on slow links: two and four sites, 50 ms round
trip, 1000 to 10 Mbit/s.

    python -m benchmarks.slow_links [--quick] [--json FILE] [--picture FILE]

Every site is a network namespace with one rank, so this needs root. Steps run on a virtual
accelerator: forward and backward take 200 ms, mostly asleep, so that two cores are enough for four
ranks and step times are steady. With --json, every row is saved as soon as it is measured, and rows
that are already in the file are skipped unless they failed.

The peers need separate Python environments: benchmarks/peers/install.sh. A peer that is not
installed is left out, with the reason.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.case import Case
from benchmarks.links import Links, require
from benchmarks.models import Size
from benchmarks.picture import ACCELERATE, DDP_HALF, POST_LOCAL_SGD, POWER_SGD, figure, save
from benchmarks.sites import Job, results
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.launch.rendezvous import rendezvous_at
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools import doctor
from lightning_sdiloco.tools.output import DDP, DILOCO, STREAMING
from tests.ranks import run_processes

CASE = Case(Size(layers=8, width=320, heads=5, context=16), fragments=4)
"""10 million parameters in four fragments of equal size; H=20, tau=4, fp4."""

QUICK = Case(Size(layers=4, width=32, heads=2, context=16), fragments=4, step_seconds=0.05)

RATES: tuple[float | None, ...] = (None, 1000, 100, 30, 10)
"""Mbit/s; None means the loopback interface, as fast as this machine allows."""

ROUND_TRIP = 0.05

METHODS = {
    "streaming": ("Streaming DiLoCo, fp4", STREAMING),
    "torchft": ("torchft DiLoCo, fp32", DILOCO),
    "post_local_sgd": ("post-local SGD", POST_LOCAL_SGD),
    "accelerate": ("accelerate LocalSGD", ACCELERATE),
    "ddp_powersgd": ("DDP, PowerSGD rank 2", POWER_SGD),
    "ddp_fp16": ("DDP, fp16", DDP_HALF),
    "ddp_bf16": ("DDP, bf16", DDP_HALF),
    "lightning_ddp": ("Lightning DDP", DDP),
}
"""Names and colors. Every run checks whether the bf16 hook works by now."""

_EVERY_STEP = ("lightning_ddp", "ddp_fp16", "ddp_bf16")

_STEPS_ON_SLOW_LINKS: dict[float | None, int] = {100: 4, 30: 2}
"""The number of steps of these methods that count, by Mbit/s; on slower links it is one."""

Row = dict[str, Any]


def lengths(method: str, mbit_s: float | None, case: Case) -> tuple[int, int]:
    """The number of steps that do not count, and of steps that do."""
    fast = mbit_s is None or mbit_s >= 1000
    rounds = 2 if fast else 1
    if method in _EVERY_STEP:
        return (3, 10) if fast else (1, _STEPS_ON_SLOW_LINKS.get(mbit_s, 1))
    if method == "ddp_powersgd":
        return 3, 10
    if method == "streaming":
        return 2 * case.sync_every, 2 * case.sync_every
    if method == "torchft":
        return case.sync_every // 2, rounds * case.sync_every
    return 2, rounds * case.sync_every


def jobs(quick: bool) -> Iterator[Job]:
    """Yields the measurements: every method on each link and with each number of sites."""
    case = QUICK if quick else CASE
    links = (None, 10) if quick else RATES
    numbers_of_sites = (2,) if quick else (2, 4)
    methods = ("streaming", "lightning_ddp", "post_local_sgd") if quick else METHODS
    for mbit_s, sites in product(links, numbers_of_sites):
        if mbit_s is None:
            yield Job("alone", case, sites, mbit_s, 2, case.sync_every)
        for method in methods:
            if method == "ddp_bf16" and (mbit_s is not None or sites != 2):
                continue
            first, counted = lengths(method, mbit_s, case)
            delay = ROUND_TRIP / 2
            yield Job(method, case, sites, mbit_s, first, counted, one_way_delay=delay)


def measured_links(rows: list[Row], quick: bool) -> Iterator[Row]:
    """Measures the links of our runs with the doctor, except for those that are already in the
    rows.
    """
    for job in jobs(quick):
        if job.method != "streaming" or job.mbit_s is None:
            continue
        if row_of(rows, "doctor", job.sites, job.mbit_s):
            continue
        with Links(job.sites, job.mbit_s * 1e6, ROUND_TRIP / 2) as links:
            measured = run_processes(_doctor, job.sites, links)[0]
        # The rate of a connection on the slowest link, while all sites send.
        rate = min(link.bits_per_second for link in measured)
        round_trip = median(link.round_trip for link in measured)
        yield {
            **key(job),
            "method": "doctor",
            "bits_per_second": rate,
            "round_trip": round_trip,
        }


def _doctor(rank: int, world_size: int, links: Links) -> list[doctor.MeasuredLink]:
    links.enter(rank)
    os.environ.update(links.environment(rank))
    rendezvous = rendezvous_at(links.address(0), 29500, rank, world_size, timedelta(seconds=30))
    return doctor.measure(
        rendezvous, world_size, rank, True, links.address(rank), seconds=1.0, progress=report.said
    )


def key(job: Job) -> Row:
    return {
        "method": job.method,
        "sites": job.sites,
        "mbit_s": job.mbit_s,
        "case": asdict(job.case),
    }


def measure(quick: bool, path: Path | None) -> list[Row]:
    rows = [row for row in report.kept_rows(path) if "reason" not in row]
    wanted = [
        job for job in jobs(quick) if not any(row.items() >= key(job).items() for row in rows)
    ]
    if any(job.mbit_s is not None for job in wanted):
        require()

    def keep(row: Row) -> None:
        rows.append(row)
        report.write(path, headline(rows), report.measured("slow_links", quick), rows=rows)

    for row in measured_links(rows, quick):
        keep(row)
        link = f"{row['sites']} sites, {row['mbit_s']} Mbit/s"
        report.said(f"doctor, {link}: {row['bits_per_second'] / 1e6:.1f} Mbit/s")
    for job, numbers in results(wanted):
        keep({**key(job), "steps": job.counted, **numbers})
        outcome = numbers.get("reason") or f"{1000 * numbers['seconds']:.0f} ms"
        report.said(f"{job.method}, {job.sites} sites, {job.mbit_s or 'no'} Mbit/s: {outcome}")
    return rows


# -------------------------------------------------------------------------------------------------
# The results
# -------------------------------------------------------------------------------------------------


def row_of(rows: list[Row], method: str, sites: int, mbit_s: float | None) -> Row:
    for row in rows:
        if (row["method"], row["sites"], row["mbit_s"]) == (method, sites, mbit_s):
            return row
    return {}


def relative(rows: list[Row], row: Row) -> float | None:
    """Returns the throughput relative to the same method on the loopback interface."""
    base = row_of(rows, row.get("method", ""), row.get("sites", 0), None)
    return base["seconds"] / row["seconds"] if "seconds" in row and "seconds" in base else None


def plan(case: Case, sites: int, step_time: float | None = None) -> Streaming:
    """Plans our run like `sdiloco plan`, by default with the virtual accelerator's step."""
    settings = Settings(
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        mixing=case.mixing,
        fragments=case.patterns(""),
        compression=case.compression,
    )
    seconds = case.step_seconds if step_time is None else step_time
    groups = Groups(step_time=seconds, groups=sites, memory_rate=10e9)
    return Streaming(_model(case), settings, groups)


@cache
def _model(case: Case) -> Model:
    return Model.of_parameters(trainable(case.net()))


def fits(method: Streaming, case: Case, mbit_s: float) -> bool:
    """Returns whether a fragment and a round trip fit into tau steps, and all fragments into H
    steps.
    """
    span = case.overlap_steps * case.step_seconds
    fragment = method.peak_gbit_s * span * 1000 / mbit_s
    everything = method.bytes_per_step * 8 / case.step_seconds / 1e6
    return fragment + ROUND_TRIP <= span and everything <= mbit_s


def predictions(rows: list[Row]) -> list[Row]:
    """Returns our measured and predicted utilisation, and whether the link is fast enough."""
    return [
        _prediction(rows, row)
        for row in rows
        if row["method"] == "streaming" and row["mbit_s"] is not None and "seconds" in row
    ]


def _prediction(rows: list[Row], row: Row) -> Row:
    sites = row["sites"]
    mbit_s = row["mbit_s"]
    case = Case(**{**row["case"], "size": Size(**row["case"]["size"])})
    step_seconds = row_of(rows, "alone", sites, None)["seconds"]
    planned = plan(case, sites)
    predicted = plan(case, sites, step_seconds)
    doctors = row_of(rows, "doctor", sites, mbit_s)
    link = Link(gbit_s=doctors["bits_per_second"] / 1e9, round_trip=doctors["round_trip"])
    skipped, counted = lengths("streaming", mbit_s, case)
    step_ends = play(predicted, link, skipped + counted + 1, [1.0] * sites)[0].steps
    return {
        "sites": sites,
        "mbit_s": mbit_s,
        "doctor_mbit_s": doctors["bits_per_second"] / 1e6,
        "fits": fits(planned, case, mbit_s),
        "relative": relative(rows, row),
        "utilisation": step_seconds / row["seconds"],
        "predicted": predicted.utilisation(link),
        "seconds": row["seconds"],
        "simulated": (step_ends[-2] - step_ends[skipped - 1]) / counted,
        "bytes_per_step": row["bytes"],
        "predicted_bytes_per_step": planned.bytes_per_step,
    }


def headline(rows: list[Row]) -> dict[str, float]:
    """Returns our throughput relative to the loopback interface, and the comparison with the best
    peer.
    """
    numbers = {}
    for row in rows:
        share = relative(rows, row)
        if row["mbit_s"] is not None and share is not None:
            link = f"{row['sites']} sites, {row['mbit_s']:g} Mbit/s"
            numbers[f"{row['method']}, {link}: throughput kept"] = share
    for sites, mbit_s in product((2, 4), RATES[1:]):
        ours = row_of(rows, "streaming", sites, mbit_s)
        peers = [row_of(rows, method, sites, mbit_s) for method in METHODS if method != "streaming"]
        best = min((peer["seconds"] for peer in peers if "seconds" in peer), default=None)
        if best is not None and "seconds" in ours:
            name = f"{sites} sites, {mbit_s:g} Mbit/s: best peer's step over ours"
            numbers[name] = best / ours["seconds"]
    return numbers


def show(rows: list[Row]) -> None:
    """Prints a table for each number of sites and the prediction."""
    for sites in dict.fromkeys(row["sites"] for row in rows):
        show_steps(rows, sites)
    report.show_left_out(
        f"{METHODS[row['method']][0]}: {row['reason']}" for row in rows if "reason" in row
    )
    show_predictions(rows)


def show_steps(rows: list[Row], sites: int) -> None:
    """Prints the duration of a step with a number of sites, by method and link."""
    rates = list(dict.fromkeys(row["mbit_s"] for row in rows if row["method"] != "doctor"))
    table = []
    for method, (name, _) in METHODS.items():
        over_links = [row_of(rows, method, sites, mbit_s) for mbit_s in rates]
        if any(over_links):
            sent = [f"{row['bytes'] / 1e6:.3g}" for row in over_links[1:] if "bytes" in row]
            cells = [cell(rows, row) for row in over_links]
            table.append([name, *cells, *(sent[:1] or ["-"])])
    columns = [f"{rate:g} Mbit/s" if rate else "loopback" for rate in rates]
    caption = ""
    alone = row_of(rows, "alone", sites, None)
    if "seconds" in alone:
        case = rows[0]["case"]
        settings = f"H={case['sync_every']}, tau={case['overlap_steps']}"
        caption = f"{settings}. Without any exchange: {1000 * alone['seconds']:.0f} ms."
    title = f"{sites} sites: ms per step (throughput relative to the loopback)"
    report.show(title, ["method", *columns, "MB sent per step"], table, caption)


def cell(rows: list[Row], row: Row) -> str:
    if "seconds" not in row:
        return "-"
    text = f"{1000 * row['seconds']:.0f}"
    share = relative(rows, row)
    if share is not None and row["mbit_s"] is not None:
        text += f" ({share:.2f})"
    if row["steps"] < 10:
        text += f" [{row['steps']} steps]"
    return text


def show_predictions(rows: list[Row]) -> None:
    """Prints the planner's predictions next to the measurements."""
    predicted = ["utilisation", "planned", "ms per step", "simulated", "bytes", "planned"]
    columns = ["link", "doctor", "suffices", "kept", *predicted]
    table = [
        [
            f"{row['sites']} sites, {row['mbit_s']:g} Mbit/s",
            f"{row['doctor_mbit_s']:.1f}",
            "yes" if row["fits"] else "no",
            f"{row['relative']:.3f}" if row["relative"] else "-",
            f"{row['utilisation']:.3f}",
            f"{row['predicted']:.3f}",
            f"{1000 * row['seconds']:.0f}",
            f"{1000 * row['simulated']:.0f}",
            f"{row['bytes_per_step']:,.0f}",
            f"{row['predicted_bytes_per_step']:,.0f}",
        ]
        for row in predictions(rows)
    ]
    caption = (
        "doctor: Mbit/s that sdiloco doctor measures; planner and simulator predict from that and"
        " the step without any exchange. suffices: a fragment and one round trip fit in tau steps,"
        " and all fragments in H steps. kept: throughput relative to the loopback. bytes: per step,"
        " by the interface's counter."
    )
    report.show("Streaming DiLoCo: measured and planned", columns, table, caption)


def draw(rows: list[Row], path: Path | None) -> None:
    if path is None:
        return
    numbers_of_sites = list(dict.fromkeys(row["sites"] for row in rows))
    picture, panels = figure(columns=len(numbers_of_sites), height=4.0)
    for sites, axes in zip(numbers_of_sites, panels, strict=True):
        for method in METHODS:
            _plot(axes, rows, method, sites)
        axes.set_xscale("log")
        axes.set_xticks([10, 30, 100, 1000], ["10", "30", "100", "1000"])
        axes.minorticks_off()
        axes.set_ylim(0, 1.08)
        axes.set_title(f"{sites} sites")
        axes.set_xlabel("Mbit/s")
    panels[0].set_ylabel("throughput relative to the loopback")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(picture, path)


def _plot(axes: Any, rows: list[Row], method: str, sites: int) -> None:
    on_links = [
        row
        for row in rows
        if (row["method"], row["sites"]) == (method, sites) and row["mbit_s"] and "seconds" in row
    ]
    if not on_links:
        return
    on_links.sort(key=lambda row: row["mbit_s"])
    rates = [row["mbit_s"] for row in on_links]
    shares = [relative(rows, row) or 0 for row in on_links]
    label, color = METHODS[method]
    width = 2.5 if method == "streaming" else 1.5
    axes.plot(rates, shares, "o-", color=color, label=label, linewidth=width)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    rows = measure(options.quick, options.json)
    show(rows)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
