"""Claims that are tested on shaped links: sites are network namespaces with one rank each, and one
site is slower.
"""

import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.links import Links, missing
from benchmarks.methods.computed import Numbers
from lightning_sdiloco import StreamingDiLoCo, TwoShot, WorkerGroups
from tests.ranks import run_processes

MBIT_S = 40.0
STEP_SECONDS = 0.02
SYNC_EVERY = 10
LAYERS = 8
WIDTH = 512


def parts(method: str, sites: int, repeat: int, rounds: int = 20) -> Numbers:
    """Averages in two shots while the last link has half the bandwidth and slows training down."""
    links = [1.0] * (sites - 1) + [0.5]
    exchange = TwoShot("by_bandwidth", links=links) if method == "by_bandwidth" else "two_shot"
    slow = {"rate": MBIT_S / 2 * 1e6 / 8}
    return _measured(sites, slow, rounds, {"compression": "fp4", "exchange": exchange})


def _measured(sites: int, slow: dict[str, float], rounds: int, choices: dict[str, Any]) -> Numbers:
    lacks = missing()
    if lacks is not None:
        raise SystemExit(lacks)
    with Links(sites, MBIT_S * 1e6, 0.005) as links:
        links.change(sites - 1, **slow)
        measured = run_processes(
            partial(_rank, links, rounds, choices), sites, ranks_per_node=1, timeout=600
        )
    return {"step": max(seconds for seconds, _ in measured), "bytes": measured[0][1]}


def _rank(
    links: Links, rounds: int, choices: dict[str, Any], rank: int, world_size: int
) -> tuple[float, float]:
    links.enter(rank)
    os.environ.update(links.environment(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine = StreamingDiLoCo(
        model,
        worker_groups=WorkerGroups(world_size),
        sync_every=SYNC_EVERY,
        overlap_steps=8,
        fragments=4,
        **choices,
    )
    warm = 4 * SYNC_EVERY
    for step in range(warm + rounds * SYNC_EVERY):
        if step == warm:
            begun = time.perf_counter()
            sent = engine.report()["bytes_sent"]
        with torch.no_grad():  # nothing is learned, but outer gradients must not be zero
            for parameter in model.parameters():
                parameter.add_(torch.randn(()) * 1e-3)
        time.sleep(STEP_SECONDS)
        engine.step()
    took = time.perf_counter() - begun
    sent = engine.report()["bytes_sent"] - sent
    engine.finish()
    torch.distributed.destroy_process_group()
    return took / (rounds * SYNC_EVERY), sent / rounds
