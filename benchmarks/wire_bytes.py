"""What crosses a link: by the interface's own counter, by report(), and by arithmetic; and at most
within 100 ms.

    python -m benchmarks.wire_bytes [--quick] [--json FILE] [--picture FILE]

Two sites with 1 Gbit/s and a round trip of 50 ms, so this needs root. The peers need Pythons of
their own: benchmarks/peers/install.sh.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.case import Case
from benchmarks.links import missing
from benchmarks.picture import figure, save
from benchmarks.sites import Found, Job, results
from benchmarks.slow_links import CASE, METHODS, QUICK
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.planning.methods import Streaming
from lightning_sdiloco.planning.workload import Groups, Model

STEPS = 10_000
"""The length of a run for which the bytes are extrapolated."""

MBIT_S = 1000

HEADERS = 52
"""Bytes of a packet's headers, IP's and TCP's with time stamps. A packet that only acknowledges is
nothing else."""

COUNTED = ("interface", "interface without headers", "report")
"""What is set beside the arithmetic."""

OURS = {
    "Streaming DiLoCo, fp4": "fp4",
    "Streaming DiLoCo, fp32": "fp32",
    "Streaming DiLoCo, sparse": "sparse",
}


def jobs(quick: bool) -> dict[str, Job]:
    """What is measured, by its name. Ours from just before the first launch, so that all launches
    count.
    """
    case = QUICK if quick else CASE
    rounds = 2 if quick else 4
    found = {}
    for name, compression in OURS.items():
        own = replace(case, compression=compression)
        steps = rounds * case.sync_every
        found[name] = Job("streaming", own, 2, MBIT_S, case.sync_every - 1, steps + 1, sampled=True)
    found["torchft DiLoCo, fp32"] = Job(
        "torchft", case, 2, MBIT_S, case.sync_every // 2, 2 * case.sync_every
    )
    found["Lightning DDP"] = Job("lightning_ddp", case, 2, MBIT_S, 1, 10)
    found["DDP, fp16"] = Job("ddp_fp16", case, 2, MBIT_S, 1, 10)
    found["DDP, PowerSGD rank 2"] = Job("ddp_powersgd", case, 2, MBIT_S, 3, 10)
    if quick:
        found = {name: job for name, job in found.items() if name in (*OURS, "Lightning DDP")}
    return {name: replace(job, sampled=True) for name, job in found.items()}


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


def counted(job: Job, found: Found) -> dict[str, float]:
    """Of ours: what the counter, report() and arithmetic say of the whole run from the first
    launch on.
    """
    return {
        "interface": found["bytes_to_the_end"],
        "interface without headers": found["bytes_to_the_end"]
        - HEADERS * found["packets_to_the_end"],
        "report": found["told"]["bytes_sent"],
        "arithmetic": planned(job.case).bytes_in(found["told"]["inner_steps"]),
    }


def per_step(job: Job, found: Found) -> float:
    """Bytes per step in the long run. Ours and torchft are measured over whole rounds."""
    if job.method != "streaming":
        return float(found["bytes"])
    # A run of some rounds begins with one in which nothing is launched yet.
    return (
        float(found["bytes_to_the_end"])
        / found["told"]["launches"]
        * job.case.fragments
        / job.case.sync_every
    )


def headline(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How far counter and report() are from the arithmetic, bytes per step, peaks."""
    numbers = {}
    for name, row in rows.items():
        if "bytes_per_step" in row:
            numbers[f"{name}: bytes per step"] = row["bytes_per_step"]
            numbers[f"{name}: peak Mbit/s over 100 ms"] = row["peak_mbit_s"]
        for what in COUNTED if "counted" in row else ():
            numbers[f"{name}: {what} over arithmetic"] = (
                row["counted"][what] / row["counted"]["arithmetic"]
            )
    return numbers


def show(rows: dict[str, dict[str, Any]]) -> None:
    table = []
    for name, row in rows.items():
        if "counted" in row:
            counts = row["counted"]
            shares = [f"{counts[what] / counts['arithmetic']:.4f}" for what in COUNTED]
            table.append(
                [name, *(f"{counts[what]:,.0f}" for what in (*COUNTED, "arithmetic")), *shares]
            )
    caption = "The last three as shares of the arithmetic. Headers: 52 bytes of every packet."
    columns = ["", *COUNTED, "arithmetic", *COUNTED]
    report.show(
        "Bytes that one site sent in a run, from its first launch on", columns, table, caption
    )
    base = rows["Lightning DDP"].get("bytes_per_step")
    table = []
    for name, row in rows.items():
        if "bytes_per_step" in row:
            total = f"{row['bytes_per_step'] * STEPS / 1e9:.3g}"
            share = f"1/{base / row['bytes_per_step']:.0f}" if base else "-"
            table.append(
                [name, f"{row['bytes_per_step']:,.0f}", total, share, f"{row['peak_mbit_s']:.0f}"]
            )
    columns = ["", "bytes per step", f"GB in {STEPS:,} steps", "of DDP", "peak Mbit/s over 100 ms"]
    report.show(f"What one site sends, on a link of {MBIT_S} Mbit/s", columns, table)
    for name, row in rows.items():
        if "reason" in row:
            print(f"\nLeft out: {name}: {row['reason']}")


def draw(rows: dict[str, dict[str, Any]], path: Path | None) -> None:
    if path is None:
        return
    found = {name: row for name, row in reversed(rows.items()) if "bytes_per_step" in row}
    picture, panels = figure(columns=2, height=2.8)
    for axes, what, title in zip(
        panels,
        ("bytes_per_step", "peak_mbit_s"),
        ("bytes per step", "peak over any 100 ms, Mbit/s"),
        strict=True,
    ):
        colors = [
            next((c for label, c in METHODS.values() if label == name), METHODS["streaming"][1])
            for name in found
        ]
        axes.barh(range(len(found)), [row[what] for row in found.values()], color=colors)
        axes.set_xscale("log")
        axes.set_title(title)
        axes.set_yticks(range(len(found)), list(found) if axes is panels[0] else [])
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    lacks = missing()
    if lacks is not None:
        raise SystemExit(lacks)
    rows: dict[str, dict[str, Any]] = {}
    wanted = jobs(options.quick)
    for (name, job), (_, found) in zip(wanted.items(), results(list(wanted.values())), strict=True):
        rows[name] = {"job": asdict(job), **found}
        if "seconds" in found:
            rows[name]["bytes_per_step"] = per_step(job, found)
            if job.method == "streaming":
                rows[name]["counted"] = counted(job, found)
        report.said(f"{name}: {found.get('reason') or round(rows[name]['bytes_per_step'])}")
        about = report.measured("wire_bytes", options.quick)
        report.write(options.json, headline(rows), about, rows=rows)
    show(rows)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
