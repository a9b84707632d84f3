"""Measures the cost of simulating worker groups on a device, and of the direction of their
matrices.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.curve import POINTS, SYNC_EVERY, Curve
from benchmarks.models import TEN_MILLION, TINY, Size
from benchmarks.training import AllAtOnce, Loop
from lightning_sdiloco.algorithm.direction import directed_by, direction_for
from tests.gpu.task import Found, Place

GOAL = 1.15
"""The step time of simulated groups relative to that of the same models without an engine."""

WIDTHS = {
    "0.5M": Size(4, 96, 3, 128),
    "10M": TEN_MILLION,
    "125M": Size(18, 768, 12, 512),
    "1B": Size(20, 2048, 16, 512),
    "6.4B": Size(32, 4096, 32, 512),
}
"""The models whose matrices are mapped."""

TIMES = 5


def simulated(groups: int, place: Place, rank: int, world_size: int) -> Found:
    """Measures the step of groups that train at once in one process, with and without the exchange
    between them.
    """
    curve = Curve(POINTS["tiny" if place.quick else "10M"], "python", place.device)
    training = curve.grouped(groups, seed=0)
    steps = SYNC_EVERY if place.quick else 3 * SYNC_EVERY
    loop = Loop(training, training.text())
    loop.run(steps=SYNC_EVERY)
    alone = AllAtOnce(training, groups)
    batches = training.text().batches(0, groups * training.batch)
    plainly = partial(_steps, alone, batches, training.batch, steps)
    plainly()
    joined_s = list[float]()
    plain_s = list[float]()
    for _ in range(1 if place.quick else TIMES):
        joined_s.append(_seconds(place, partial(loop.run, steps=loop.step + steps)) / steps)
        plain_s.append(_seconds(place, plainly) / steps)
    return {
        "groups": groups,
        "step_ms": 1e3 * median(joined_s),
        "plain_step_ms": 1e3 * median(plain_s),
        "headline": {
            f"10M, {groups} simulated groups: step over plain": median(joined_s) / median(plain_s)
        },
    }


def _steps(
    groups: AllAtOnce, batches: Iterator[tuple[Tensor, Tensor]], windows: int, steps: int
) -> None:
    trained = [windows for _ in groups.models]
    for batch in islice(batches, steps):
        groups.step(batch, trained)


def _seconds(place: Place, work: Any) -> float:
    place.module.synchronize()
    began = time.perf_counter()
    work()
    place.module.synchronize()
    return time.perf_counter() - began


def matrices_of_block(size: Size, device: str) -> Mapping[str, Tensor]:
    """Returns a possible mean outer gradient of a block, in the form that `direct` maps."""
    width = size.width
    shapes = {
        "qkv": (3 * width, width),
        "attention_out": (width, width),
        "mlp_in": (4 * width, width),
        "mlp_out": (width, 4 * width),
    }
    return {name: torch.randn(1, *shape, device=device) for name, shape in shapes.items()}


@torch.no_grad()
def mapped(place: Place, rank: int, world_size: int) -> Found:
    """Measures the time for the matrices of all blocks of a model in a round."""
    direction = direction_for("equalised")
    assert direction is not None, "the name is that of a direction"
    rows = dict[str, dict[str, float]]()
    headline = dict[str, float]()
    sizes = {"tiny": TINY} if place.quick else WIDTHS
    for name, size in sizes.items():
        matrices = matrices_of_block(size, place.device)
        work = partial(directed_by, direction, matrices)
        _seconds(place, work)
        seconds = size.layers * median([_seconds(place, work) for _ in range(3)])
        values = size.layers * sum(matrix.numel() for matrix in matrices.values())
        rows[name] = {"milliseconds": 1e3 * seconds, "values": values}
        headline[f"{name}, direction of all blocks, ms"] = 1e3 * seconds
    return {"models": rows, "headline": headline}
