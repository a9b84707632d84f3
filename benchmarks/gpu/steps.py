"""Measures the cost of inner steps: step time and memory with the engine relative to those without
it, and two groups on one device.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

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
"""The step time relative to that of a plain step."""

DDP_BYTES = 4
"""The bytes per parameter of DDP's buckets. The goal for memory is these, plus 1, plus the
fragments in flight."""

SIZES = {
    "125M": (Size(layers=18, width=768, heads=12, context=512), 16),
    "1B": (Size(layers=20, width=2048, heads=16, context=512), 8),
}
"""The models, each with its number of windows in a step."""

SYNC_EVERY = 20
OVERLAP_STEPS = 5
FRAGMENTS = 4

Row = dict[str, Any]


@dataclass
class Loop:
    """A plain training loop in bf16-mixed, as a Trainer would run it, with or without an engine."""

    place: Place
    size: Size
    batch: int

    def __post_init__(self) -> None:
        device = self.place.device
        is_cuda = self.place.is_cuda
        with torch.device(device) if is_cuda else nullcontext():
            self.model = self.size.make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=is_cuda)
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
        """Returns the mean duration of several steps."""
        self.place.module.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.place.module.synchronize()
        return (time.perf_counter() - began) / steps

    def peak(self, work: Callable[[], object]) -> int:
        """Returns the peak of allocated bytes on the device during a function; 0 on a CPU."""
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
    """The same few batches, which are already on the device."""
    moved = []
    for tokens, targets in islice(batches, 8):
        moved.append((tokens.to(device), targets.to(device)))
    return cycle(moved)


def cut(size: Size) -> list[list[str]]:
    parts = []
    for p in range(min(FRAGMENTS, size.layers)):
        parts.append([f"blocks.{block}.*" for block in range(p, size.layers, FRAGMENTS)])
    parts[0] += ["*embedding*"]
    parts[-1] += ["norm.*", "head.*"]
    return parts


def overhead(name: str, place: Place, rank: int, world_size: int) -> Found:
    """Measures step time and memory of one group, in alternating rounds with and without the
    engine.
    """
    size, batch = (TINY, 2) if place.quick else SIZES[name]
    sync_every, turns = (4, 1) if place.quick else (SYNC_EVERY, 6)
    numbers: dict[str, Any] = {"model": name}
    rows: dict[str, Row] = {}
    try:
        loop = Loop(place, size, batch)
        numel = sum(parameter.numel() for parameter in loop.model.parameters())
        loop.seconds(sync_every // 2)
        plain = loop.peak(lambda: loop.seconds(2))
        numbers |= {"parameters": numel, "plain_bytes": plain}
        for offload in _offloads(place):
            row = with_engine(loop, sync_every, turns, offload)
            rows[f"offload={offload}"] = _beside(plain, numel, row)
            row["goal_bytes_a_parameter"] = DDP_BYTES + 1 + row["in_flight_bytes"] / numel
        rows["DDP"] = _beside(plain, numel, with_ddp(loop, sync_every, turns))
    except torch.cuda.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        if "offload=True" not in rows:
            raise NotHere(f"the device has too little memory for {name}: {reason}") from None
        numbers["no memory"] = reason
    headline = {f"{name}, {key}: step time over plain": row["ratio"] for key, row in rows.items()}
    for key, row in rows.items():
        headline[f"{name}, {key}: extra bytes a parameter"] = row["extra_bytes_a_parameter"]
    return {**numbers, **rows, "goal": GOAL, "headline": headline}


def _offloads(place: Place) -> tuple[bool, ...]:
    """Returns whether the outer state is offloaded, for each measurement of a place."""
    if place.device == "cpu":
        return (False,)
    return (True,) if place.quick else (True, False)


def _beside(plain: int, numel: int, row: Row) -> Row:
    """Replaces the peak by the bytes per parameter beyond those of plain training."""
    row["extra_bytes_a_parameter"] = (row.pop("peak") - plain) / numel
    return row


def with_engine(loop: Loop, sync_every: int, turns: int, offload: bool) -> Row:
    engine = StreamingDiLoCo(
        loop.model, sync_every=sync_every, overlap_steps=min(OVERLAP_STEPS, sync_every - 1), fragments=cut(loop.size),
        outer_optimizer=OuterOptimizer(offload=offload),
    )  # fmt: skip
    loop.engine = engine
    loop.seconds(
        2 * sync_every
    )  # every launch and landing has taken place, and everything is compiled
    peak = loop.peak(lambda: loop.seconds(sync_every))
    in_flight = len(engine.rounds.in_flight)
    before = engine.report()
    times = in_turns(loop, "engine", engine, sync_every, turns)
    after = engine.report()
    engine.close()
    landings = after["landings"] - before["landings"]
    flown = after["in_flight_s"] - before["in_flight_s"]
    return {
        "peak": peak,
        **times,
        "exposed_wait_s": after["exposed_wait_s"] - before["exposed_wait_s"],
        "flight_s": flown / max(1, landings),
        # One float32 copy of each fragment that can be in flight at once.
        "in_flight_bytes": max(1, in_flight)
        * max(fragment.nbytes for fragment in engine.fragments),
    }


def in_turns(loop: Loop, name: str, addition: object, steps: int, turns: int) -> Row:
    """Measures steps with and without an attribute of a loop, in alternation."""
    ratios = []
    times = []
    for _ in range(turns):
        setattr(loop, name, None)
        times.append(loop.seconds(steps))
        setattr(loop, name, addition)
        ratios.append(loop.seconds(steps) / times[-1])
    setattr(loop, name, None)
    return {"ratio": median(ratios), "ratios": ratios, "plain_step_ms": 1e3 * median(times)}


def with_ddp(loop: Loop, sync_every: int, turns: int) -> Row:
    """Measures DDP with one rank, which sends nothing: its buckets, and its work around a step."""
    backend = "nccl" if loop.place.is_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        # Without existing gradients, as in the first step of a fit.
        loop.optimizer.zero_grad()
        ddp = DistributedDataParallel(loop.model)
        loop.ddp = ddp
        loop.seconds(sync_every // 2)
        peak = loop.peak(lambda: loop.seconds(2))
        return {"peak": peak, **in_turns(loop, "ddp", ddp, sync_every, turns)}
    finally:
        dist.destroy_process_group()


class Groups(NamedTuple):
    """Worker groups, and the backend between the ranks of a group; None is the device's own."""

    title: str
    number: int
    backend: str | None


def end_to_end(name: str, place: Place, rank: int, world_size: int) -> Found:
    """Trains two groups on one device with real Trainers over gloo."""
    groups = Groups(f"{name}, two groups on one device", 2, "gloo")
    return compared(groups, name, place, rank, world_size)


def on_several(name: str, number: int, place: Place, rank: int, world_size: int) -> Found:
    """Trains groups of devices with real Trainers: NCCL within a group and gloo between groups."""
    devices = world_size // number
    groups = Groups(f"{name}, {number} groups, devices of each: {devices}", number, None)
    if place.is_cuda and torch.cuda.device_count() < world_size:
        raise NotHere(
            f"this machine has {torch.cuda.device_count()} of {world_size} devices. On a machine"
            f" that has them, the step of {groups.title} would be timed, and compared with that of"
            " Trainers on their own and with that of DDP"
        )
    return compared(groups, name, place, rank, world_size)


def compared(groups: Groups, name: str, place: Place, rank: int, world_size: int) -> Found:
    """Measures the step of ours and of DDP relative to that of independent Trainers."""
    size, batch = (TINY, 2) if place.quick else SIZES[name]
    sync_every, rounds = (6, 2) if place.quick else (SYNC_EVERY, 3)
    steps = sync_every * rounds + 1
    common: dict[str, Any] = {
        "accelerator": "gpu" if place.is_cuda else "cpu",
        "precision": "bf16-mixed" if place.is_cuda else "32-true",
        "devices": [rank] if place.is_cuda and groups.backend is None else 1,
    }
    timed = partial(step_times, size, batch, rank)
    # Independent processes, side by side like the groups after them.
    nodes = {key: os.environ.pop(key) for key in ("WORLD_SIZE", "NODE_RANK")}
    plain = timed(steps, sync_every, **common)
    os.environ.update(nodes)
    common["num_nodes"] = world_size
    strategy = StreamingDiLoCoStrategy(
        worker_groups=groups.number,
        sync_every=sync_every,
        overlap_steps=min(OVERLAP_STEPS, sync_every - 1),
        process_group_backend=groups.backend,
        fragments=[[in_module(pattern) for pattern in part] for part in cut(size)],
    )
    streaming = timed(steps, sync_every, strategy=strategy, **common)
    totals = strategy.report()
    # DDP over the same connection between the processes, with only enough steps to time one.
    ddp = timed(8, 3, strategy=DDPStrategy(process_group_backend=groups.backend), **common)
    return {
        "model": name,
        "step_s": {"plain": plain, "streaming": streaming, "DDP": ddp},
        "report": totals,
        "headline": {
            f"{groups.title}, streaming: step over plain": streaming / plain,
            f"{groups.title}, DDP: step over plain": ddp / plain,
        },
    }


def in_module(pattern: str) -> str:
    """Returns a pattern of the model as one of the module that trains it."""
    return pattern if pattern.startswith("*") else f"net.{pattern}"


def step_times(size: Size, batch: int, rank: int, steps: int, first: int, **choices: Any) -> float:
    """Fits, and returns the mean step time after the first steps."""
    stamps = Stamps()
    module = Timed(size.make(), stamps, partial(torch.optim.AdamW, lr=1e-4))
    fit(module, random_batches(size, batch, seed=rank), steps, **choices)
    return (stamps.wall[-1] - stamps.wall[first]) / (len(stamps.wall) - 1 - first)
