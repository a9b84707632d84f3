"""Compares the bytes on a link by the interface's counter, by report(), and by arithmetic, and
measures the peak within 100 ms.

    python -m benchmarks.wire_bytes [--quick] [--json FILE] [--picture FILE]

It uses two sites with 1 Gbit/s and a round trip of 50 ms in network namespaces, so this needs root.
The peers need separate Python environments: benchmarks/peers/install.sh.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.case import Case
from benchmarks.links import require
from benchmarks.picture import figure, save
from benchmarks.sites import Found, Job, results
from benchmarks.slow_links import CASE, METHODS, QUICK
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.planning.methods import Streaming
from lightning_sdiloco.planning.units import readable, readable_rate
from lightning_sdiloco.planning.workload import Groups, Model

STEPS = 10_000
"""The length of a run for which the bytes are extrapolated."""

SITES = 2
MBIT_S = 1000

HEADERS = 52
"""Bytes of a packet's headers, IP's and TCP's with time stamps. A packet that only acknowledges is
nothing else."""

COUNTED = ("interface", "interface without headers", "report")
"""The counts that are compared with the arithmetic."""

Row = dict[str, Any]

OURS = {
    "Streaming DiLoCo, fp4": "fp4",
    "Streaming DiLoCo, fp32": "fp32",
    "Streaming DiLoCo, sparse": "sparse",
}


def jobs(quick: bool) -> dict[str, Job]:
    """Makes the jobs by name. Ours count from just before the first launch, so that all launches
    count.
    """
    case = QUICK if quick else CASE
    sync_every = case.sync_every
    rounds = 2 if quick else 4
    named = {
        name: Job(
            "streaming",
            replace(case, compression=compression),
            SITES,
            MBIT_S,
            sync_every - 1,
            rounds * sync_every + 1,
        )
        for name, compression in OURS.items()
    }
    if not quick:
        named["torchft DiLoCo, fp32"] = Job(
            "torchft", case, SITES, MBIT_S, sync_every // 2, 2 * sync_every
        )
    named["Lightning DDP"] = Job("lightning_ddp", case, SITES, MBIT_S, 1, 10)
    if not quick:
        named["DDP, fp16"] = Job("ddp_fp16", case, SITES, MBIT_S, 1, 10)
        named["DDP, PowerSGD rank 2"] = Job("ddp_powersgd", case, SITES, MBIT_S, 3, 10)
    return {name: replace(job, sampled=True) for name, job in named.items()}


def planned(case: Case) -> Streaming:
    settings = Settings(
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        fragments=case.patterns(""),
        compression=case.compression,
    )
    return Streaming(
        Model.of_parameters(trainable(case.net())), settings, Groups(step_time=case.step_seconds)
    )


def counted(job: Job, numbers: Found) -> dict[str, float]:
    """Of ours: what the counter, report() and arithmetic say of the whole run from the first
    launch on.
    """
    nbytes = numbers["bytes_to_the_end"]
    totals = numbers["told"]
    return {
        "interface": nbytes,
        "interface without headers": nbytes - HEADERS * numbers["packets_to_the_end"],
        "report": totals["bytes_sent"],
        "arithmetic": planned(job.case).bytes_in(totals["inner_steps"]),
    }


def per_step(job: Job, numbers: Found) -> float:
    """Bytes per step in the long run. Ours and torchft are measured over whole rounds."""
    if job.method != "streaming":
        return float(numbers["bytes"])
    # A run of some rounds begins with one in which nothing is launched yet.
    per_launch = float(numbers["bytes_to_the_end"]) / numbers["told"]["launches"]
    return per_launch * job.case.fragments / job.case.sync_every


def headline(rows: dict[str, Row]) -> dict[str, float]:
    """How far counter and report() are from the arithmetic, bytes per step, peaks."""
    numbers = {}
    for name, row in rows.items():
        if "bytes_per_step" in row:
            numbers[f"{name}: bytes per step"] = row["bytes_per_step"]
            numbers[f"{name}: peak Mbit/s over 100 ms"] = row["peak_mbit_s"]
        if "counted" in row:
            for source, share in shares(row).items():
                numbers[f"{name}: {source} over arithmetic"] = share
    return numbers


def shares(row: Row) -> dict[str, float]:
    """Returns what was counted as shares of the arithmetic."""
    counts = row["counted"]
    return {source: counts[source] / counts["arithmetic"] for source in COUNTED}


def show(rows: dict[str, Row]) -> None:
    show_counts({name: row for name, row in rows.items() if "counted" in row})
    show_traffic({name: row for name, row in rows.items() if "bytes_per_step" in row})
    report.show_left_out(
        f"{name}: {row['reason']}" for name, row in rows.items() if "reason" in row
    )


def show_counts(rows: dict[str, Row]) -> None:
    """Prints the bytes of whole runs of ours, by every way to count them."""
    columns = ["", *COUNTED, "arithmetic", *COUNTED]
    table = []
    for name, row in rows.items():
        counts = [f"{row['counted'][source]:,.0f}" for source in (*COUNTED, "arithmetic")]
        table.append([name, *counts, *(f"{share:.4f}" for share in shares(row).values())])
    title = "Bytes that one site sent in a run, from its first launch on"
    caption = "The last three as shares of the arithmetic. Headers: 52 bytes of every packet."
    report.show(title, columns, table, caption)


def show_traffic(rows: dict[str, Row]) -> None:
    """Prints the bytes per step and the peaks of all methods."""
    columns = ["", "bytes per step", f"GB in {STEPS:,} steps", "of DDP", "peak Mbit/s over 100 ms"]
    base = rows.get("Lightning DDP", {}).get("bytes_per_step")
    table = []
    for name, row in rows.items():
        nbytes = row["bytes_per_step"]
        total = f"{nbytes * STEPS / 1e9:.3g}"
        share = f"1/{base / nbytes:.0f}" if base else "-"
        table.append([name, f"{nbytes:,.0f}", total, share, f"{row['peak_mbit_s']:.0f}"])
    report.show(f"What one site sends, on a link of {MBIT_S} Mbit/s", columns, table)


def draw(rows: dict[str, Row], path: Path | None) -> None:
    if path is None:
        return
    drawn = {name: row for name, row in reversed(rows.items()) if "bytes_per_step" in row}
    by_label = dict(METHODS.values())
    colors = [by_label.get(name, METHODS["streaming"][1]) for name in drawn]
    places = range(len(drawn))
    picture, (steps, peaks) = figure(columns=2, height=2.8)
    steps.barh(places, [row["bytes_per_step"] for row in drawn.values()], color=colors)
    peaks.barh(places, [row["peak_mbit_s"] for row in drawn.values()], color=colors)
    for axes in (steps, peaks):
        axes.set_xscale("log")
    steps.xaxis.set_major_formatter(lambda nbytes, _: readable(nbytes))
    peaks.xaxis.set_major_formatter(lambda mbit_s, _: readable_rate(mbit_s / 1000))
    steps.set_title("bytes per step")
    peaks.set_title("peak over any 100 ms")
    steps.set_yticks(places, list(drawn))
    peaks.set_yticks(places, [])
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    require()
    rows: dict[str, Row] = {}
    wanted = jobs(options.quick)
    outcomes = results(list(wanted.values()))
    for name, (job, numbers) in zip(wanted, outcomes, strict=True):
        row = {"job": asdict(job), **numbers}
        rows[name] = row
        if "seconds" in numbers:
            row["bytes_per_step"] = per_step(job, numbers)
            if job.method == "streaming":
                row["counted"] = counted(job, numbers)
        report.said(f"{name}: {numbers.get('reason') or round(row['bytes_per_step'])}")
        about = report.measured("wire_bytes", options.quick)
        report.write(options.json, headline(rows), about, rows=rows)
    show(rows)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
