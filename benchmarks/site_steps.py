"""Measures the cost of a step in a federation relative to groups launched together, with
computation replaced by sleep.

    python -m benchmarks.site_steps [--quick] [--json FILE]

A hub and two sites, with keys and TLS over the loopback interface, run at the same time as two
worker groups that were launched together. They have the same model, settings and sleeps, so that
other load on the machine affects both alike. A round has `SYNC_EVERY` steps, with every launch and
every landing once. The first three rounds are left out.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from threading import Thread
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks import report
from benchmarks.fits import fit
from lightning_sdiloco import Federation, StreamingDiLoCoStrategy
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.server import HubService
from tests.chaos.processes import BATCH, SYNC_EVERY, Net
from tests.large.models import FEATURES, TARGETS
from tests.ranks import run_processes

RUN = "steps"
SITES = ("a", "b")
TARGET = 1.01
FIRST = 3 * SYNC_EVERY


class Times(Callback):
    """Records the time after every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    @override
    def on_train_batch_end(self, *_: object) -> None:
        self.ends.append(time.perf_counter())

    def rounds(self) -> list[float]:
        """Returns the mean seconds of a step in each round."""
        ends = self.ends[FIRST - 1 :: SYNC_EVERY]
        return [(last - first) / SYNC_EVERY for first, last in zip(ends, ends[1:], strict=False)]


def trained(seconds: float, steps: int, group: int, federation: Federation | None) -> list[float]:
    """Trains, and returns the mean seconds of a step in each round."""
    torch.set_num_threads(1)
    pl.seed_everything(0)
    times = Times()
    strategy = StreamingDiLoCoStrategy(
        sync_every=SYNC_EVERY, overlap_steps=5, fragments="strided:2", federation=federation
    )
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(512, FEATURES, generator=generator)
    y = torch.randn(512, TARGETS, generator=generator)
    batches = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    endless = (batch for _ in iter(int, 1) for batch in batches)
    devices = 1 if federation else len(SITES)
    fit(Net(seconds), endless, steps, strategy=strategy, devices=devices, callbacks=[times])
    return times.rounds()


def site(
    seconds: float, steps: int, federation: Callable[..., Federation], rank: int, world_size: int
) -> list[float]:
    """Runs a site, which is a separate world."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return trained(seconds, steps, rank, federation(site=SITES[rank]))


def group(seconds: float, steps: int, rank: int, world_size: int) -> list[float]:
    """Runs a worker group of those that are launched together."""
    return trained(seconds, steps, rank, None)


def serve(folder: Path, pipe: Any) -> None:
    """Runs the hub until it is killed."""
    service = HubService(
        RUN, folder / "hub.sqlite", sites=len(SITES), listen="127.0.0.1:0", keys=folder / "keys"
    )
    service.start()
    pipe.send(service.port)
    while True:
        time.sleep(1.0)


def measure(seconds: float, steps: int) -> dict[str, list[float]]:
    """Trains both at the same time, and returns the seconds of a step in each round, averaged over
    both ranks.
    """
    ranks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys"
        init_keys(keys, RUN)
        for site_name in SITES:
            add_keys(keys, site_name)
        receiver, sender = multiprocessing.Pipe()
        hub = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, sender))
        hub.start()
        address = f"127.0.0.1:{receiver.recv()}"
        federation = partial(Federation, hub=address, run=RUN, keys=keys)
        ways = {
            "federation": partial(site, seconds, steps, federation),
            "fixed": partial(group, seconds, steps),
        }

        def play(name: str) -> None:
            ranks[name] = run_processes(ways[name], len(SITES), timeout=600)

        threads = [Thread(target=play, args=(name,)) for name in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hub.kill()
        hub.join()
    return {name: [mean(both) for both in zip(*ranks[name], strict=True)] for name in ways}


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    sleep = 0.01 if options.quick else 0.1
    rounds = 1 if options.quick else 25
    steps = measure(sleep, FIRST + rounds * SYNC_EVERY)
    ratios = [ours / fixed for ours, fixed in zip(steps["federation"], steps["fixed"], strict=True)]
    rows = [
        [name, f"{1e3 * median(seconds):.2f}", f"{1e3 * max(seconds):.2f}"]
        for name, seconds in steps.items()
    ]
    report.show("A step", ["world", "median of rounds, ms", "slowest round, ms"], rows)
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    middle = f"middle half {low:.4f} to {high:.4f}"
    print(f"ratio: {median(ratios):.4f} ({middle}), {len(ratios)} rounds")
    headline = {"step time over that of the fixed world": median(ratios), "target": TARGET}
    about = report.measured("site_steps", options.quick)
    case = {"sleep": sleep, "sync_every": SYNC_EVERY, "overlap_steps": 5, "sites": len(SITES)}
    report.write(options.json, headline, about, case=case, rounds=steps)


if __name__ == "__main__":
    main()
