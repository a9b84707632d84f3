"""What inner steps cost: step time and memory with the engine over those without it, and two
groups on one device.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fits import Timed, fit
from benchmarks.models import TINY, Size, next_byte_loss, random_batches
from benchmarks.stamps import Stamps
from lightning_sdiloco import OuterOptimizer, StreamingDiLoCo, StreamingDiLoCoStrategy
from tests.gpu.task import Found, NotHere, Place

GOAL = 1.01
"""The step time over that of a plain step."""

DDP_BYTES = 4
"""Bytes a parameter that DDP takes for its buckets. They, 1 more, and what is in flight are the
goal for memory."""

SIZES = {
    "125M": (Size(layers=18, width=768, heads=12, context=512), 16),
    "1B": (Size(layers=20, width=2048, heads=16, context=512), 8),
}
"""The models, each with the windows of a step."""

SYNC_EVERY = 20
OVERLAP_STEPS = 5
FRAGMENTS = 4


@dataclass
class Loop:
    """A plain training loop in bf16-mixed, as a Trainer would run it, with or without an engine."""

    place: Place
    size: Size
    batch: int

    def __post_init__(self) -> None:
        device = self.place.device
        if self.place.is_cuda:
            with torch.device(device):
                self.model: nn.Module = self.size.make()
        else:
            self.model = self.size.make().to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=self.place.is_cuda
        )
        self.engine: StreamingDiLoCo | None = None
        self.ddp: nn.Module | None = None
        self._batches = on_device(random_batches(self.size, self.batch), device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.place.is_cuda):
            loss = next_byte_loss(self.ddp or self.model, *next(self._batches))
        loss.backward()
        self.optimizer.step()
        if self.engine is not None:
            self.engine.step()

    def seconds(self, steps: int) -> float:
        """Returns how long a step takes in the mean over some."""
        self.place.module.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.place.module.synchronize()
        return (time.perf_counter() - began) / steps

    def peak(self, work: Callable[[], object]) -> int:
        """Returns the most bytes that the device holds while something is done; 0 on a CPU."""
        if self.place.device == "cpu":
            work()
            return 0
        self.place.module.reset_peak_memory_stats()
        work()
        self.place.module.synchronize()
        return int(self.place.module.max_memory_allocated())


def on_device(
    batches: Iterator[tuple[Tensor, Tensor]], device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same few batches, which lie on a device already."""
    kept = [tuple(part.to(device) for part in next(batches)) for _ in range(8)]
    while True:
        yield from kept  # type: ignore[misc]


def cut(size: Size) -> list[list[str]]:
    parts = [
        [f"blocks.{block}.*" for block in range(p, size.layers, FRAGMENTS)]
        for p in range(FRAGMENTS)
    ]
    parts = [part for part in parts if part]
    parts[0] += ["*embedding*"]
    parts[-1] += ["norm.*", "head.*"]
    return parts


def overhead(name: str, place: Place, rank: int, world_size: int) -> Found:
    """Measures step time and memory of one group with the engine, in turns of a round with and
    without it.
    """
    size, batch = (TINY, 2) if place.quick else SIZES[name]
    every, turns = (4, 1) if place.quick else (SYNC_EVERY, 6)
    found: dict[str, Any] = {"model": name}
    try:
        loop = Loop(place, size, batch)
        numel = sum(parameter.numel() for parameter in loop.model.parameters())
        loop.seconds(every // 2)
        plain = loop.peak(lambda: loop.seconds(2))
        found |= {"parameters": numel, "plain_bytes": plain}
        for offload in (
            (False,) if place.device == "cpu" else (True,) if place.quick else (True, False)
        ):
            row = with_engine(loop, every, turns, offload)
            row["extra_bytes_a_parameter"] = (row.pop("peak") - plain) / numel
            row["goal_bytes_a_parameter"] = DDP_BYTES + 1 + row["in_flight_bytes"] / numel
            found[f"offload={offload}"] = row
        row = with_ddp(loop, every, turns)
        found["DDP"] = {**row, "extra_bytes_a_parameter": (row.pop("peak") - plain) / numel}
    except torch.cuda.OutOfMemoryError as error:
        if "offload=True" not in found:
            raise NotHere(
                f"the device has too little memory for {name}: {str(error).splitlines()[0]}"
            ) from None
        found["no memory"] = str(error).splitlines()[0]
    rows = {key: row for key, row in found.items() if isinstance(row, dict)}
    told = {f"{name}, {key}: step time over plain": row["ratio"] for key, row in rows.items()}
    told |= {
        f"{name}, {key}: extra bytes a parameter": row["extra_bytes_a_parameter"]
        for key, row in rows.items()
    }
    return {**found, "goal": GOAL, "headline": told}


def with_engine(loop: Loop, every: int, turns: int, offload: bool) -> dict[str, Any]:
    engine = StreamingDiLoCo(
        loop.model, sync_every=every, overlap_steps=min(OVERLAP_STEPS, every - 1), fragments=cut(loop.size),
        outer_optimizer=OuterOptimizer(offload=offload),
    )  # fmt: skip
    loop.engine = engine
    loop.seconds(2 * every)  # every launch and landing has been there, and all that is compiled
    peak = loop.peak(lambda: loop.seconds(every))
    in_flight = len(engine.in_flight)
    before = engine.report()
    found = in_turns(loop, "engine", engine, every, turns)
    told = {
        name: engine.report()[name] - before[name]
        for name in ("exposed_wait_s", "in_flight_s", "landings")
    }
    engine.close()
    return {
        "peak": peak,
        **found,
        "exposed_wait_s": told["exposed_wait_s"],
        "flight_s": told["in_flight_s"] / max(1, told["landings"]),
        # One float32 copy of each fragment that can be in flight at once.
        "in_flight_bytes": max(1, in_flight)
        * max(fragment.nbytes for fragment in engine.fragments),
    }


def in_turns(loop: Loop, name: str, own: object, steps: int, turns: int) -> dict[str, Any]:
    """Measures some steps without and with an attribute of a loop, by turns."""
    ratios = []
    times = []
    for _ in range(turns):
        setattr(loop, name, None)
        times.append(loop.seconds(steps))
        setattr(loop, name, own)
        ratios.append(loop.seconds(steps) / times[-1])
    setattr(loop, name, None)
    return {"ratio": median(ratios), "ratios": ratios, "plain_step_ms": 1e3 * median(times)}


def with_ddp(loop: Loop, every: int, turns: int) -> dict[str, Any]:
    """Measures DDP with one rank, which has nothing to send: its buckets, and what it does around
    a step.
    """
    backend = "nccl" if loop.place.is_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        # Without gradients that are there already, as in the first step of a fit.
        loop.optimizer.zero_grad()
        loop.ddp = ddp = DistributedDataParallel(loop.model)
        loop.seconds(every // 2)
        peak = loop.peak(lambda: loop.seconds(2))
        return {"peak": peak, **in_turns(loop, "ddp", ddp, every, turns)}
    finally:
        dist.destroy_process_group()


def end_to_end(name: str, place: Place, rank: int, world_size: int) -> Found:
    """Trains two groups on one device with real Trainers over gloo, between two on their own and
    two of DDP.
    """
    size, batch = (TINY, 2) if place.quick else SIZES[name]
    every, rounds = (6, 2) if place.quick else (SYNC_EVERY, 3)
    steps = every * rounds + 1
    found = {}
    common: dict[str, Any] = {
        "accelerator": "gpu" if place.is_cuda else "cpu",
        "precision": "bf16-mixed" if place.is_cuda else "32-true",
        "devices": 1,
    }
    # Processes that know of nobody, side by side like the groups after them.
    groups = {key: os.environ.pop(key) for key in ("WORLD_SIZE", "NODE_RANK")}
    found["plain"] = step_times(size, batch, rank, steps, every, **common)
    os.environ.update(groups)
    strategy = StreamingDiLoCoStrategy(
        sync_every=every, overlap_steps=min(OVERLAP_STEPS, every - 1), process_group_backend="gloo",
        fragments=[[f"net.{pattern}" if pattern[0] != "*" else pattern for pattern in part] for part in cut(size)],
    )  # fmt: skip
    found["streaming"] = step_times(
        size, batch, rank, steps, every, strategy=strategy, num_nodes=2, **common
    )
    told = strategy.report()
    # DDP on the same way between the processes, in as few steps as show what one takes.
    ddp = DDPStrategy(process_group_backend="gloo")
    found["DDP"] = step_times(size, batch, rank, 8, 3, strategy=ddp, num_nodes=2, **common)
    ratios = {key: found[key] / found["plain"] for key in ("streaming", "DDP")}
    return {
        "model": name,
        "step_s": found,
        "report": told,
        "headline": {
            f"{name}, two groups on one device, {key}: step over plain": ratios[key]
            for key in ratios
        },
    }


def step_times(size: Size, batch: int, rank: int, steps: int, first: int, **choices: Any) -> float:
    """Fits, and returns the mean time of a step after the first ones."""
    stamps = Stamps()
    module = Timed(size.make(), stamps, partial(torch.optim.AdamW, lr=1e-4))
    fit(module, random_batches(size, batch, seed=rank), steps, **choices)
    return (stamps.wall[-1] - stamps.wall[first]) / (len(stamps.wall) - 1 - first)
