"""Measures flights over links of 30 Mbit/s: their duration compared with the transfer of their
bytes, and the cost for training.

Each flight is measured with paced connections, the default, and with connections that send as fast
as TCP allows.

Run it with ``python -m benchmarks.flights [--links] [--quick] [--json FILE]``; ``--links`` measures
faster and longer links, and one with a short queue. Every site is a network namespace with one
rank, so this needs root. Computation is replaced by sleep, and payloads are float32, so that two
cores are enough for eight sites. A flight may take as many inner steps as fit into the bound on its
time: while the bound is met, training never waits.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import report
from benchmarks.links import Links, require
from benchmarks.picture import QUIET, SERIES, figure, save
from lightning_sdiloco import Landing, StreamingDiLoCo
from lightning_sdiloco.comm.pacing import Connection
from lightning_sdiloco.compression import resolve
from tests.ranks import run_processes

BOUND = 1.1
"""The maximum duration of a flight, without two round trips, relative to the transfer of its
bytes."""

_PARTS = ("encode", "transfer", "decode", "relay", "outer_step")


class Case(NamedTuple):
    """Sites, their links, and the flights between them.

    Attributes:
        sites: Worker groups, of one rank each.
        values: Values of the fragment, the only one.
        compression: How the values are encoded.
        flights: The number of flights that count.
        before: The number of earlier flights, of which the first uses connections that have never
            sent.
        step_seconds: Seconds of an inner step.
        mbit_s: The bandwidth of every site's link in each direction.
        round_trip: The round trip time to another site, in seconds.
        queue: The maximum queue in front of a link, in seconds.
        congestion_control: TCP's congestion control.
        paced: Whether connections are paced.
    """

    sites: int
    values: int = 1_250_000
    compression: str = "fp32"
    flights: int = 8
    before: int = 1
    step_seconds: float = 0.1
    mbit_s: float = 30.0
    round_trip: float = 0.05
    queue: float = 0.1
    congestion_control: str = "cubic"
    paced: bool = True

    def on_link(self, nbytes: float) -> float:
        return nbytes * 8e-6 / self.mbit_s

    @property
    def overlap_steps(self) -> int:
        sent = 2 * (self.sites - 1) / self.sites * resolve(self.compression).wire_bytes(self.values)
        return math.ceil((BOUND * self.on_link(sent) + 2 * self.round_trip) / self.step_seconds)

    @property
    def sync_every(self) -> int:
        """The inner steps between two launches, so that a flight has landed some steps before the
        next launch.
        """
        return self.overlap_steps + 5


Spans = Mapping[str, tuple[float, float]]
"""The times at which a flight and its parts began and ended on one rank."""


class Ran(NamedTuple):
    """The numbers of one rank: the total seconds, and the spans and bytes of every flight."""

    seconds: float
    spans: list[Spans]
    sent: list[int]


class Found(NamedTuple):
    """The numbers of a case. Flights are medians, measured from the last launch until the last
    group has the result.
    """

    flight: float
    bytes_alone: float
    ratio: float
    without_round_trips: float
    parts: dict[str, float]
    flights: list[float]
    step: float
    unshaped_step: float
    kept: float


def measure(case: Case) -> Found:
    """Trains over slow links, and over unlimited links."""
    shaped = _ranks(case, is_shaped=True)
    unshaped = _ranks(case._replace(before=1), is_shaped=False)
    # The spans of every flight on all ranks.
    flights = list(zip(*(rank.spans for rank in shaped), strict=True))
    seconds = [_until_all_have_it(spans) for spans in flights]
    parts = [_slowest_parts(spans) for spans in flights]
    flight = median(seconds)
    trips = 2 * case.round_trip
    alone = case.on_link(median(nbytes for rank in shaped for nbytes in rank.sent))
    step = _step_seconds(case, shaped)
    unshaped_step = _step_seconds(case, unshaped)
    return Found(
        flight=flight,
        bytes_alone=alone,
        ratio=flight / (alone + trips),
        without_round_trips=(flight - trips) / alone,
        parts={name: median(flight_parts[name] for flight_parts in parts) for name in parts[0]},
        flights=seconds,
        step=step,
        unshaped_step=unshaped_step,
        kept=unshaped_step / step,
    )


def _until_all_have_it(spans: Sequence[Spans]) -> float:
    """Returns the seconds from the last launch of a flight until the last rank has its result."""
    launched = max(rank["flight"][0] for rank in spans)
    ended = max(rank["flight"][1] for rank in spans)
    return ended - launched


def _slowest_parts(spans: Sequence[Spans]) -> dict[str, float]:
    """Returns how long each part of a flight took on the rank that was slowest in it."""
    names = [name for name in _PARTS if name in spans[0]]
    return {name: max(rank[name][1] - rank[name][0] for rank in spans) for name in names}


def _step_seconds(case: Case, ranks: Sequence[Ran]) -> float:
    return max(rank.seconds for rank in ranks) / case.flights / case.sync_every


def _ranks(case: Case, is_shaped: bool) -> list[Ran]:
    rate = case.mbit_s * 1e6 if is_shaped else None
    delay = case.round_trip / 2 if is_shaped else 0.0
    control = case.congestion_control
    with Links(case.sites, rate, delay, queue=case.queue, congestion_control=control) as links:
        work = partial(_rank, case, links)
        return list(run_processes(work, case.sites, ranks_per_node=1, timeout=300.0))


def _rank(case: Case, links: Links, rank: int, world_size: int) -> Ran:
    links.enter(rank)
    os.environ.update(links.environment(rank))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    model = nn.Linear(case.values, 1, bias=False)
    with nullcontext() if case.paced else patch.object(Connection, "of_process", set):
        engine = StreamingDiLoCo(
            model,
            worker_groups=world_size,
            sync_every=case.sync_every,
            overlap_steps=case.overlap_steps,
            compression=case.compression,
        )
    landings: list[Landing] = []
    began = 0.0
    # Earlier flights are over when the steps that count begin.
    first = (case.before + 1) * case.sync_every - 1
    for step in range(first + case.flights * case.sync_every):
        if step == first:
            began = time.perf_counter()
            landings.clear()
        ready = time.perf_counter() + case.step_seconds
        if step % case.sync_every == case.sync_every - 1:
            with torch.no_grad():
                model.weight[0, rank] += 1e-3
        time.sleep(max(0.0, ready - time.perf_counter()))
        landings += engine.step()
    seconds = time.perf_counter() - began
    engine.finish()
    spans: list[Spans] = [dict(landing.spans) for landing in landings]
    return Ran(seconds, spans, sent=[landing.bytes_sent for landing in landings])


def cases(quick: bool) -> dict[str, Case]:
    if quick:
        return {"3 sites": Case(3, values=50_000, flights=2, step_seconds=0.02)}
    return _both_ways(
        {
            f"{sites} sites, {control}": Case(sites, congestion_control=control)
            for sites in (2, 4, 8)
            for control in ("cubic", "bbr")
        }
    )


def other_links() -> dict[str, Case]:
    """Cases with links other than those of 30 Mbit/s, all with CUBIC."""
    # The time that pacing needs to find the speed of a link with a long round trip.
    before = 12
    return _both_ways(
        {
            "4 sites, round trip of 200 ms": Case(4, before=before, round_trip=0.2),
            "4 sites, queue of 20 ms": Case(4, before=before, queue=0.02),
            "2 sites, 300 Mbit/s": Case(2, values=2_500_000, before=before, mbit_s=300.0),
            "2 sites, 1 Gbit/s": Case(2, values=10_000_000, before=before, mbit_s=1000.0),
        }
    )


def _both_ways(paced: Mapping[str, Case]) -> dict[str, Case]:
    ways = {"not paced": False, "paced": True}
    return {
        f"{name}, {way}": case._replace(paced=is_paced)
        for name, case in paced.items()
        for way, is_paced in ways.items()
    }


def show(measured: Mapping[str, Found]) -> None:
    columns = [
        "flight, s",
        "bytes alone, s",
        "ratio",
        "without round trips",
        "ms a step",
        "unshaped",
        "kept",
    ]
    rows = [
        [
            name,
            f"{numbers.flight:.3f}",
            f"{numbers.bytes_alone:.3f}",
            f"{numbers.ratio:.3f}",
            f"{numbers.without_round_trips:.3f}",
            f"{1e3 * numbers.step:.1f}",
            f"{1e3 * numbers.unshaped_step:.1f}",
            f"{numbers.kept:.3f}",
        ]
        for name, numbers in measured.items()
    ]
    report.show("Flights", ["", *columns], rows)
    rows = []
    for name, numbers in measured.items():
        parts = numbers.parts
        rows.append([name, *(f"{parts[p]:.3f}" if p in parts else "-" for p in _PARTS)])
    report.show("Parts of a flight in the slowest rank, s", ["", *_PARTS], rows)


def draw(measured: Mapping[str, Case], found: Mapping[str, Found], path: Path | None) -> None:
    """Draws every flight relative to the transfer of its bytes, paced and unpaced, for each
    congestion control.
    """
    if path is None:
        return
    controls = sorted({case.congestion_control for case in measured.values()}, reverse=True)
    sites = sorted({case.sites for case in measured.values()})
    picture, panels = figure(columns=len(controls), height=3.4)
    for axes, control in zip(panels, controls, strict=True):
        for name, case in measured.items():
            if case.congestion_control == control:
                _scatter(axes, sites.index(case.sites), case, found[name])
        axes.axhline(BOUND, color=QUIET, linewidth=1, linestyle="--")
        axes.set(title=control.upper(), ylim=(1.0, None), xlim=(-0.5, len(sites) - 0.5))
        axes.set_xticks(range(len(sites)), [f"{number} sites" for number in sites])
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(1.0, top)
    panels[0].set_ylabel("flight time / transfer time")
    handles, labels = panels[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    picture.legend(
        once.values(), once.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    save(picture, path)


def _scatter(axes: Any, place: int, case: Case, numbers: Found) -> None:
    """Draws the flights of a case next to each other, with paced ones on the right."""
    times = [(flight - 2 * case.round_trip) / numbers.bytes_alone for flight in numbers.flights]
    middle = place + (0.15 if case.paced else -0.15)
    last = max(1, len(times) - 1)
    places = [middle + 0.1 * (number / last - 0.5) for number in range(len(times))]
    color = SERIES[0] if case.paced else SERIES[1]
    label = "paced" if case.paced else "not paced"
    axes.scatter(places, times, s=18, color=color, label=label)


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--links", action="store_true", help="measure other links than those of 30 Mbit/s"
    )
    options = parser.parse_args(arguments)
    require()
    outcomes = dict[str, Found]()
    details = dict[str, dict[str, Any]]()
    headline = dict[str, float]()
    measured = other_links() if options.links else cases(options.quick)
    for name, case in measured.items():
        numbers = measure(case)
        about = report.measured("flights", options.quick)
        outcomes[name] = numbers
        details[name] = {"case": case._asdict(), "load": about["load"], **numbers._asdict()}
        for field in ("ratio", "without_round_trips", "kept"):
            headline[f"{name}: {field}"] = details[name][field]
        report.said(f"{name}: {numbers.flight:.2f} s, load {about['load'][0]}")
    show(outcomes)
    draw(measured, outcomes, options.picture)
    report.write(options.json, headline, about, found=details)


if __name__ == "__main__":
    main()
