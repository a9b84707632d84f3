"""Measures the speed of the passes over a fragment, as a share of the device's copy bandwidth.

A pass is an operation of a launch, a flight or a landing on every value. Its share is the time that
a plain copy of the minimum number of bytes would take, divided by the time of the pass: 1 is as
fast as memory allows.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_sdiloco import OuterOptimizer, StreamingDiLoCo
from lightning_sdiloco.algorithm.merge import Mix
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.compression.blockwise import Blockwise
from lightning_sdiloco.compression.fp4 import FP4
from lightning_sdiloco.engine.flight import norm_squared, outer_step
from lightning_sdiloco.engine.shards import digest
from tests.gpu.task import Found, Place

GOAL = 0.7
"""The share that a pass should reach."""

GROUPS = 2

TOGETHER = 8
"""The number of passes before the host waits, so that the device does not wait for the host."""


class Net(nn.Module):
    """A model with one parameter."""

    def __init__(self, numel: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel, device="cpu").to(device))


def seconds_of(place: Place, work: Callable[[], object], repeats: int) -> float:
    """Returns the median duration of some work, including all of its operations on the device."""
    seconds = []
    for repeat in range(repeats + 2):
        place.module.synchronize()
        began = time.perf_counter()
        for _ in range(TOGETHER):
            work()
        place.module.synchronize()
        if repeat >= 2:  # to warm up, and to compile
            seconds.append((time.perf_counter() - began) / TOGETHER)
    return median(seconds)


def passes(numel: int, place: Place) -> dict[str, tuple[float, Callable[[], object]]]:
    """Returns the passes by name: the bytes per value that each must read and write, and its
    function.
    """
    model = Net(numel, place.device)
    fp4 = FP4()
    engine = StreamingDiLoCo(
        model, fragments=[["*"]], outer_optimizer=OuterOptimizer(offload=False)
    )
    (fragment,) = engine.fragmented_model.fragments
    outer = fragment.outer.values
    gradient = (torch.randn(numel, device="cpu") / 100).to(place.device)
    payloads = [(fp4.encode(gradient), 1.0)] * GROUPS
    coded = fp4.wire_bytes(numel) / numel
    mean = torch.empty_like(gradient)
    step = partial(
        outer_step,
        fragment,
        values=outer,
        gradient=gradient,
        group=Communicator(),
        is_dense=False,
    )
    # With the momentum of an earlier step, as in every round except the first.
    before = fragment.outer._replace(state=step(before=fragment.outer).state)
    encode_bytes = 4 + coded
    mean_bytes = 4 + GROUPS * coded
    works: dict[str, tuple[float, Callable[[], object]]] = {
        "launch: outer minus local": (12, partial(fragment.layout.outer_gradient, outer)),
        "encode fp4": (encode_bytes, partial(fp4.encode, gradient)),
        "encode fp4, operations of torch": (encode_bytes, partial(Blockwise.encode, fp4, gradient)),
        "mean of two fp4": (mean_bytes, partial(fp4.mean, payloads, mean)),
        "mean of two fp4, operations of torch": (
            mean_bytes,
            partial(Compression.mean, fp4, payloads, mean),
        ),
        "outer step": (20, partial(step, before=before)),
        "digest": (4, partial(digest, outer)),
        "norm": (4, partial(norm_squared, gradient)),
        "landing: merge": (12, partial(fragment.layout.land, Mix(0.5), [gradient], 5)),
    }
    # Without a graph, as in the engine.
    return {name: (nbytes, torch.no_grad()(work)) for name, (nbytes, work) in works.items()}


def shares(place: Place, rank: int, world_size: int) -> Found:
    numel = 1 << (14 if place.quick else 26)
    repeats = 2 if place.quick else 15
    values = torch.randn(numel, device="cpu").to(place.device)
    copy = torch.empty_like(values)
    bandwidth = 8 * numel / seconds_of(place, partial(copy.copy_, values), repeats)
    rows: dict[str, dict[str, Any]] = {}
    headline = {"copy, GB/s": bandwidth / 1e9}
    for name, (nbytes, work) in passes(numel, place).items():
        seconds = seconds_of(place, work, repeats)
        share = nbytes * numel / seconds / bandwidth
        headline[f"{name}, share of copy bandwidth"] = share
        rows[name] = {
            "milliseconds": 1e3 * seconds,
            "bytes_a_value": nbytes,
            "share_of_copy": share,
        }
    return {
        "values": numel,
        "copy_gb_s": bandwidth / 1e9,
        "passes": rows,
        "goal": GOAL,
        "below the goal": [name for name, row in rows.items() if row["share_of_copy"] < GOAL],
        "headline": headline,
    }
