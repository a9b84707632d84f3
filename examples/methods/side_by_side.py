"""Trains a small GPT in simulated worker groups, once for each of several choices, and prints what
each costs.

All runs use the same text, order and initial weights. Half a minute of training shows that a method
runs and how much it sends, but not which method learns better; see the benchmarks for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt import GPT
from text_data import Windows, standard_library_sources

CONTEXT = 64
BATCH = 2


def loss_of(model: nn.Module, windows: list[tuple[Tensor, Tensor]]) -> Tensor:
    tokens = torch.stack([x for x, _ in windows])
    targets = torch.stack([y for _, y in windows])
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@cache
def text() -> Windows:
    sources = b"\0".join(path.read_bytes() for path in standard_library_sources()[:200])
    return Windows(torch.frombuffer(bytearray(sources), dtype=torch.uint8), CONTEXT)


MakeOptimizer = Callable[..., torch.optim.Optimizer]


def train(
    groups: int, steps: int, choices: Mapping[str, Any], optimizer: MakeOptimizer
) -> tuple[float, float, int]:
    """Trains from scratch; returns the validation loss, the megabytes that a group sent, and the
    number of launches.
    """
    torch.manual_seed(0)
    windows = text()
    order = torch.randperm(len(windows)).tolist()
    held_out = [windows[order.pop()] for _ in range(128)]
    models = [GPT(layers=2, width=32, heads=2, context=CONTEXT) for _ in range(groups)]
    optimizers = [optimizer(model, lr=6e-3) for model in models]
    settings = dict(choices)
    make_groups = settings.pop("simulated", SimulatedGroups)
    simulated = make_groups(models, [[inner] for inner in optimizers], **settings)
    for _ in range(steps):
        for model, inner in zip(models, optimizers, strict=True):
            inner.zero_grad()
            loss_of(model, [windows[order.pop()] for _ in range(BATCH)]).backward()
            inner.step()
        simulated.step()
    simulated.finish()
    report = simulated.engines[0].report()
    with torch.no_grad():
        loss = float(loss_of(models[0], held_out))
    return loss, report["bytes_sent"] / 1e6, int(report["launches"])


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def compare(
    methods: Mapping[str, Mapping[str, Any]],
    groups: int = 2,
    steps: int = 400,
    optimizer: MakeOptimizer = adamw,
    **shared: Any,
) -> None:
    """Trains with each of several choices for the engine, in addition to the shared ones, and
    prints a table.

    The choice `simulated` is a class to use instead of `SimulatedGroups`.
    """
    print(f"{'':<34} {'loss':>7} {'MB sent':>8} {'launches':>9}")
    for name, choices in methods.items():
        loss, megabytes, launches = train(groups, steps, {**shared, **choices}, optimizer)
        print(f"{name:<34} {loss:>7.3f} {megabytes:>8.2f} {launches:>9}", flush=True)
