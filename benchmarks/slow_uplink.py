"""Measures what a slow uplink of one worker group costs the others, with one code for all and with `ByLink`.

Run it with ``python -m benchmarks.slow_uplink [--quick] [--json FILE]``. Every group is a network namespace with one
rank, so this needs root. Links carry 100 Mbit/s, but what the last group sends goes over 10. A step takes a fixed time,
most of it asleep. The first rounds do not count: in them nobody knows the links, and TCP recovers from that.
"""

import os
import time
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import report
from benchmarks.links import Links, missing
from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.compression import ByLink, Compression
from tests.ranks import run_processes


class Case(NamedTuple):
    """What is measured.

    Attributes:
        groups: Worker groups, of one rank each.
        width: Width of each of the layers, of which each is a fragment.
        layers: How many there are.
        step_seconds: Seconds of an inner step.
        sync_every: As for the engine.
        overlap_steps: As for the engine.
        rounds: Rounds that count.
        mbit_s: What the links carry.
        up_mbit_s: What the last group's carries of what it sends.
        one_way_delay: Seconds between two groups.
    """

    groups: int = 3
    width: int = 500
    layers: int = 4
    step_seconds: float = 0.04
    sync_every: int = 20
    overlap_steps: int = 2
    rounds: int = 4
    mbit_s: float = 100.0
    up_mbit_s: float = 10.0
    one_way_delay: float = 0.005

    @property
    def first(self) -> int:
        """Steps that do not count."""
        return 4 * self.sync_every

    @property
    def steps(self) -> int:
        """Steps that do."""
        return self.rounds * self.sync_every


class Found(NamedTuple):
    """What was measured.

    Attributes:
        seconds: Seconds of a step that counts: the mean over steps and groups.
        bytes: Bytes that each group sent in a round that counts.
    """

    seconds: float
    bytes: list[float]


RUNS: dict[str, tuple[str | Compression, bool]] = {
    "fp4, without the slow uplink": ("fp4", False),
    "fp4": ("fp4", True),
    "ByLink": (ByLink(menu=("fp4", "int2", "sparse")), True),
}
"""Which compression, and whether the uplink of the last group is slow."""


def measure(case: Case, compression: str | Compression, is_slow: bool) -> Found:
    """Trains over links of this machine.

    Args:
        case: What is measured.
        compression: How outer gradients are encoded.
        is_slow: Whether the last group has a slow uplink.
    """
    with Links(case.groups, case.mbit_s * 1e6, case.one_way_delay) as links:
        if is_slow:
            links.change(case.groups - 1, up_rate=case.up_mbit_s * 1e6 / 8)
        rank = partial(_rank, case, compression, links)
        ranks = run_processes(rank, case.groups, ranks_per_node=1, timeout=120.0)
    return Found(
        sum(seconds for seconds, _ in ranks) / case.groups / case.steps, [sent / case.rounds for _, sent in ranks]
    )


def _rank(case: Case, compression: Any, links: Links, rank: int, world_size: int) -> tuple[float, float]:
    links.enter(rank)
    os.environ.update(links.environment(rank))
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    model = nn.Sequential(*(nn.Linear(case.width, case.width, bias=False) for _ in range(case.layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = StreamingDiLoCo(
        model,
        worker_groups=world_size,
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        fragments=[[f"{layer}.*"] for layer in range(case.layers)],
        compression=compression,
        exchange="gather",
    )
    generator = torch.Generator().manual_seed(rank)
    began, sent = 0.0, 0.0
    for step in range(case.first + case.steps):
        if step == case.first:
            began, sent = time.perf_counter(), engine.report()["bytes_sent"]
        ready = time.perf_counter() + case.step_seconds
        optimizer.zero_grad()
        model(torch.randn(4, case.width, generator=generator)).square().mean().backward()
        optimizer.step()
        time.sleep(max(0.0, ready - time.perf_counter()))
        engine.step()
    seconds, sent = time.perf_counter() - began, engine.report()["bytes_sent"] - sent
    engine.finish()
    return seconds, sent


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    options = report.options(__doc__, arguments)
    if (lacks := missing()) is not None:
        raise SystemExit(lacks)
    case = Case(rounds=1) if options.quick else Case()
    found = {name: measure(case, *run) for name, run in RUNS.items()}
    rows = [
        [name, f"{1e3 * one.seconds:.1f}", f"{one.bytes[0] / 1e3:.0f}", f"{one.bytes[-1] / 1e3:.0f}"]
        for name, one in found.items()
    ]
    size = case.layers * case.width**2
    title = f"{size:,} parameters, {case.groups} groups, {case.up_mbit_s:g} Mbit/s up in one of them"
    report.show(title, ["", "ms a step", "kB a round: fast", "slow"], rows)
    headline = {f"{name}, seconds a step": one.seconds for name, one in found.items()}
    about = report.measured("slow_uplink", options.quick)
    told = {name: one._asdict() for name, one in found.items()}
    report.write(options.json, headline, about, case=case._asdict(), found=told)


if __name__ == "__main__":
    main()
