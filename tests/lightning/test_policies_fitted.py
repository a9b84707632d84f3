"""Every policy once with a real Trainer, with more than 100,000 parameters: the bits are those of the simulation."""

from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdiloco import (
    Carry,
    DropCompute,
    Selective,
    SimulatedGroups,
    StreamingDiLoCoMonitor,
    TwoShot,
)
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int2, Threshold, TopK
from tests import fits
from tests.methods import ByMedian, ByNorm, DelayedNesterov, Paced, ZScore
from tests.ranks import run_processes
from tests.training import inner_optimizer

STEPS = 12
SHARED: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:2", "exchange": "gather"}
POLICIES: dict[str, dict[str, Any]] = {
    "selective": {"schedule": Selective(0.4)},
    "by_norm": {"weighing": ByNorm()},
    "z_score": {"weighing": ZScore(warmup=1)},
    "by_median": {"weighing": ByMedian()},
    "carry": {"mixing": Carry()},
    "delayed_nesterov": {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2)},
    "random_k": {"compression": "random_k+memory"},
    "random_block": {"compression": "random_block"},
    "two_shot": {"exchange": TwoShot([0.75, 0.25])},
    "threshold": {"compression": ErrorFeedback(Threshold(1 / 16, Int2(), every=2))},
    "senders": {"compression": ErrorFeedback(TopK(1 / 16, Int2(), over="senders"))},
    # On this machine every link carries the first code in time.
    "by_link": {"compression": ByLink(["fp4+memory", "sparse"], within=1000.0)},
    "paced": {"schedule": Selective(0.4)},
    "drop_compute": {"compression": "sparse"},
}


def net() -> nn.Module:
    """106,000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 400), nn.Tanh(), nn.Linear(400, 3))


def batches(group: int) -> list[tuple[Tensor, Tensor]]:
    """More of them than there are inner steps, for two micro-batches each."""
    return fits.SomeBatches(group, 2 * STEPS).batches


def fitted(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    torch.set_num_threads(1)
    outer = {}
    for name, choices in POLICIES.items():
        loader: Any = DataLoader(batches(rank), batch_size=None)  # type: ignore[arg-type]
        more: dict[str, Any] = {}
        if name == "paced":
            loader = Paced(loader, speed=0.5 if rank else 1.0)
        if name == "drop_compute":
            loader = DropCompute(2, budget=inf)(loader)
            more = {"accumulate_grad_batches": 2, "callbacks": [StreamingDiLoCoMonitor(folder=str(folder))]}
        strategy = fits.strategy(worker_groups=2, **{**SHARED, **choices})
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=STEPS, use_distributed_sampler=False, **more)
        trainer.fit(fits.module(net=net(), inner="adamw"), loader)
        outer[name] = {key.removeprefix("net."): values for key, values in strategy.outer_state_dict().items()}
    return outer


def simulated(name: str) -> dict[str, Tensor]:
    models = [net() for _ in range(2)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    groups = SimulatedGroups(models, **{**SHARED, **POLICIES[name]})
    every = [iter(batches(group)) for group in range(2)]
    micro_batches = 2 if name == "drop_compute" else 1
    for step in range(1, STEPS + 1):
        idle = {1} if name == "paced" and step % 2 else set[int]()
        for group in {0, 1} - idle:
            optimizers[group].zero_grad()
            for x, y in [next(every[group]) for _ in range(micro_batches)]:
                (nn.functional.mse_loss(models[group](x), y) / micro_batches).backward()
            optimizers[group].step()
        groups.step(idle=idle, trained=[micro_batches] * 2)
    groups.finish()
    return groups.outer_state_dict()


@pytest.mark.timeout(180)
def test_a_trainer_does_what_the_simulation_does_with_every_policy(tmp_path: Path) -> None:
    first, second = run_processes(fitted, 2, tmp_path, timeout=150.0)
    different = []
    for name in POLICIES:
        expected = simulated(name)
        for outer in (first[name], second[name]):
            different += [name for key in expected if not torch.equal(outer[key], expected[key])]
    assert not different
    assert list(tmp_path.rglob("*.jsonl")), "the monitor has written its records"
