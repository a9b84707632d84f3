"""How much of its speed each method keeps on slow links: two and four sites, 50 ms round trip, 1000
to 10 Mbit/s.

    python -m benchmarks.slow_links [--quick] [--json FILE] [--picture FILE]

Every site is a network namespace with one rank, so this needs root. The step is that of a virtual
accelerator: forward and backward take 200 ms, most of it asleep, so that two cores are enough for
four ranks and step times are steady. With --json every row is kept at once, and rows that the file
has are not measured again, unless they failed.

The peers need Pythons of their own: benchmarks/peers/install.sh. One that is not there is left out,
with the reason.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.case import Case
from benchmarks.links import Links, missing
from benchmarks.models import Size
from benchmarks.picture import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, TEAL, figure, save
from benchmarks.sites import Job, results
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.launch.rendezvous import rendezvous_at
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools import doctor
from tests.ranks import run_processes

CASE = Case(Size(layers=8, width=320, heads=5, context=16), fragments=4)
"""10 million parameters in four fragments of equal size; H=20, tau=4, fp4."""

QUICK = Case(Size(layers=4, width=32, heads=2, context=16), fragments=4, step_seconds=0.05)

RATES: tuple[float | None, ...] = (None, 1000, 100, 30, 10)
"""Mbit/s; None is the loopback, as fast as this machine can."""

ROUND_TRIP = 0.05

METHODS = {
    "streaming": ("Streaming DiLoCo, fp4", RED),
    "torchft": ("torchft DiLoCo, fp32", PURPLE),
    "post_local_sgd": ("post-local SGD", TEAL),
    "accelerate": ("accelerate LocalSGD", ORANGE),
    "ddp_powersgd": ("DDP, PowerSGD rank 2", BLUE),
    "ddp_fp16": ("DDP, fp16", GREEN),
    "ddp_bf16": ("DDP, bf16", GREEN),
    "lightning_ddp": ("Lightning DDP", GREY),
}
"""Names and colors. The bf16 hook is asked in every run whether it works by now."""

_EVERY_STEP = ("lightning_ddp", "ddp_fp16", "ddp_bf16")

Row = dict[str, Any]


def lengths(method: str, mbit_s: float | None, case: Case) -> tuple[int, int]:
    """Steps that do not count, and steps that do."""
    fast = mbit_s is None or mbit_s >= 1000
    if method in _EVERY_STEP:
        return (3, 10) if fast else (1, {100.0: 4, 30.0: 2}.get(mbit_s or 0.0, 1))
    if method == "ddp_powersgd":
        return 3, 10
    if method == "streaming":
        return 2 * case.sync_every, 2 * case.sync_every
    if method == "torchft":
        return case.sync_every // 2, case.sync_every * (2 if fast else 1)
    return 2, case.sync_every * (2 if fast else 1)


def jobs(quick: bool) -> Iterator[Job]:
    case = QUICK if quick else CASE
    for mbit_s in (None, 10) if quick else RATES:
        for sites in (2,) if quick else (2, 4):
            if mbit_s is None:
                yield Job("alone", case, sites, mbit_s, 2, case.sync_every)
            for method in ("streaming", "lightning_ddp", "post_local_sgd") if quick else METHODS:
                if method == "ddp_bf16" and (mbit_s is not None or sites != 2):
                    continue
                yield Job(
                    method,
                    case,
                    sites,
                    mbit_s,
                    *lengths(method, mbit_s, case),
                    one_way_delay=ROUND_TRIP / 2,
                )


def measured_links(rows: list[Row], quick: bool) -> Iterator[Row]:
    """What the doctor says of the links of ours, but for what the rows have."""
    for job in jobs(quick):
        if (
            job.method == "streaming"
            and job.mbit_s is not None
            and not row_of(rows, "doctor", job.sites, job.mbit_s)
        ):
            with Links(job.sites, job.mbit_s * 1e6, ROUND_TRIP / 2) as links:
                found = run_processes(_doctor, job.sites, links)[0]
            # What a connection carries on the slowest link, while all sites send.
            rate = min(link.bits_per_second for link in found)
            round_trip = median(link.round_trip for link in found)
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
    kept = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    rows: list[Row] = [row for row in kept if "reason" not in row]
    wanted = [
        job for job in jobs(quick) if not any(row.items() >= key(job).items() for row in rows)
    ]
    if any(job.mbit_s is not None for job in wanted) and (lacks := missing()) is not None:
        raise SystemExit(lacks)
    for row in measured_links(rows, quick):
        rows.append(row)
        report.write(path, headline(rows), report.measured("slow_links", quick), rows=rows)
        report.said(
            f"doctor, {row['sites']} sites, {row['mbit_s']} Mbit/s:"
            f" {row['bits_per_second'] / 1e6:.1f} Mbit/s"
        )
    for job, found in results(wanted):
        rows.append({**key(job), "steps": job.counted, **found})
        told = f"{1000 * found['seconds']:.0f} ms" if "seconds" in found else found["reason"]
        report.said(f"{job.method}, {job.sites} sites, {job.mbit_s or 'no'} Mbit/s: {told}")
        report.write(path, headline(rows), report.measured("slow_links", quick), rows=rows)
    return rows


# -------------------------------------------------------------------------------------------------
# What it means
# -------------------------------------------------------------------------------------------------


def row_of(rows: list[Row], method: str, sites: int, mbit_s: float | None) -> Row:
    same = [r for r in rows if (r["method"], r["sites"], r["mbit_s"]) == (method, sites, mbit_s)]
    return same[0] if same else {}


def relative(rows: list[Row], row: Row) -> float | None:
    """Throughput relative to the same method on the loopback."""
    base = row_of(rows, row.get("method", ""), row.get("sites", 0), None)
    return base["seconds"] / row["seconds"] if "seconds" in row and "seconds" in base else None


def plan(case: Case, sites: int) -> Streaming:
    """What `sdiloco plan` says of ours, with the step of the virtual accelerator."""
    settings = Settings(
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        mixing=case.mixing,
        fragments=case.patterns(""),
        compression=case.compression,
    )
    groups = Groups(step_time=case.step_seconds, groups=sites, memory_rate=10e9)
    return Streaming(Model.of_parameters(trainable(case.net())), settings, groups)


def fits(method: Streaming, case: Case, mbit_s: float) -> bool:
    """Whether a fragment and one round trip fit in tau steps, and all fragments in H steps."""
    span = case.overlap_steps * case.step_seconds
    fragment = method.peak_gbit_s * span * 1000 / mbit_s
    everything = method.bytes_per_step * 8 / case.step_seconds / 1e6
    return fragment + ROUND_TRIP <= span and everything <= mbit_s


def predictions(rows: list[Row]) -> list[Row]:
    """Measured and predicted utilisation of ours, and whether the link suffices."""
    found = []
    for row in rows:
        if row["method"] == "streaming" and row["mbit_s"] is not None and "seconds" in row:
            case = Case(**{**row["case"], "size": Size(**row["case"]["size"])})
            method = plan(case, row["sites"])
            step = row_of(rows, "alone", row["sites"], None)["seconds"]
            groups = Groups(step_time=step, groups=row["sites"], memory_rate=10e9)
            predicted = Streaming(
                Model.of_parameters(trainable(case.net())), method.settings, groups
            )
            seen = row_of(rows, "doctor", row["sites"], row["mbit_s"])
            link = Link(gbit_s=seen["bits_per_second"] / 1e9, round_trip=seen["round_trip"])
            skipped, counted = lengths("streaming", row["mbit_s"], case)
            ends = play(predicted, link, skipped + counted + 1, [1.0] * row["sites"])[0].steps
            found.append(
                {
                    "sites": row["sites"],
                    "mbit_s": row["mbit_s"],
                    "doctor_mbit_s": seen["bits_per_second"] / 1e6,
                    "fits": fits(method, case, row["mbit_s"]),
                    "relative": relative(rows, row),
                    "utilisation": step / row["seconds"],
                    "predicted": predicted.utilisation(link),
                    "seconds": row["seconds"],
                    "simulated": (ends[-2] - ends[skipped - 1]) / counted,
                    "bytes_per_step": row["bytes"],
                    "predicted_bytes_per_step": method.bytes_per_step,
                }
            )
    return found


def headline(rows: list[Row]) -> dict[str, float]:
    """Throughput of ours relative to the loopback, and how it compares with the best peer."""
    numbers = {}
    for row in rows:
        share = relative(rows, row)
        if row["mbit_s"] is not None and share is not None:
            numbers[
                f"{row['method']}, {row['sites']} sites, {row['mbit_s']:g} Mbit/s: throughput kept"
            ] = share
    for sites in (2, 4):
        for mbit_s in RATES[1:]:
            own = row_of(rows, "streaming", sites, mbit_s)
            others = [
                row_of(rows, method, sites, mbit_s) for method in METHODS if method != "streaming"
            ]
            best = min((other["seconds"] for other in others if "seconds" in other), default=None)
            if best is not None and "seconds" in own:
                numbers[f"{sites} sites, {mbit_s:g} Mbit/s: best peer's step over ours"] = (
                    best / own["seconds"]
                )
    return numbers


def show(rows: list[Row]) -> None:
    """Prints a table for each number of sites, and the prediction."""
    case = rows[0]["case"]
    rates = list(dict.fromkeys(row["mbit_s"] for row in rows if row["method"] != "doctor"))
    for sites in dict.fromkeys(row["sites"] for row in rows):
        table = []
        for method in METHODS:
            found = [row_of(rows, method, sites, mbit_s) for mbit_s in rates]
            if any(found):
                sent = next(
                    (f"{row['bytes'] / 1e6:.3g}" for row in found[1:] if "bytes" in row), "-"
                )
                table.append([METHODS[method][0], *(cell(rows, row) for row in found), sent])
        step = row_of(rows, "alone", sites, None)
        title = f"{sites} sites: ms per step (throughput relative to the loopback)"
        columns = [
            "method",
            *(f"{rate:g} Mbit/s" if rate else "loopback" for rate in rates),
            "MB sent per step",
        ]
        caption = f"H={case['sync_every']}, tau={case['overlap_steps']}. Without any exchange: "
        report.show(
            title,
            columns,
            table,
            f"{caption}{1000 * step['seconds']:.0f} ms." if "seconds" in step else "",
        )
    for reason in dict.fromkeys(
        f"{METHODS[r['method']][0]}: {r['reason']}" for r in rows if "reason" in r
    ):
        print(f"\nLeft out: {reason}")
    show_predictions(rows)


def cell(rows: list[Row], row: Row) -> str:
    if "seconds" not in row:
        return "-"
    share = relative(rows, row)
    kept = f" ({share:.2f})" if share is not None and row["mbit_s"] is not None else ""
    few = f" [{row['steps']} steps]" if row["steps"] < 10 else ""
    return f"{1000 * row['seconds']:.0f}{kept}{few}"


def show_predictions(rows: list[Row]) -> None:
    """Prints what the planner says beside what was measured."""
    predicted = ["utilisation", "planned", "ms per step", "simulated", "bytes", "planned"]
    columns = ["link", "doctor", "suffices", "kept", *predicted]
    table = [
        [
            f"{found['sites']} sites, {found['mbit_s']:g} Mbit/s",
            f"{found['doctor_mbit_s']:.1f}",
            "yes" if found["fits"] else "no",
            f"{found['relative']:.3f}" if found["relative"] else "-",
            f"{found['utilisation']:.3f}",
            f"{found['predicted']:.3f}",
            f"{1000 * found['seconds']:.0f}",
            f"{1000 * found['simulated']:.0f}",
            f"{found['bytes_per_step']:,.0f}",
            f"{found['predicted_bytes_per_step']:,.0f}",
        ]
        for found in predictions(rows)
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
    sites = list(dict.fromkeys(row["sites"] for row in rows))
    picture, panels = figure(columns=len(sites), height=4.0)
    for number, axes in zip(sites, panels, strict=True):
        for method, (label, color) in METHODS.items():
            found = [
                r
                for r in rows
                if (r["method"], r["sites"]) == (method, number) and r["mbit_s"] and "seconds" in r
            ]
            found.sort(key=lambda row: row["mbit_s"])
            if found:
                points = (
                    [row["mbit_s"] for row in found],
                    [relative(rows, row) or 0 for row in found],
                )
                axes.plot(
                    *points,
                    "o-",
                    color=color,
                    label=label,
                    linewidth=2.5 if method == "streaming" else 1.5,
                )
        axes.set_xscale("log")
        axes.set_xticks([10, 30, 100, 1000], ["10", "30", "100", "1000"])
        axes.minorticks_off()
        axes.set_ylim(0, 1.08)
        axes.set_title(f"{number} sites")
        axes.set_xlabel("Mbit/s")
    panels[0].set_ylabel("throughput relative to the loopback")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    rows = measure(options.quick, options.json)
    show(rows)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
