"""DropCompute (arXiv 2306.10598): a rank that is late in an inner step skips the rest of its
micro-batches.

    python examples/methods/drop_compute.py

With a Trainer, use `trainer.fit(model, DropCompute(8)(loader))` and `accumulate_grad_batches=8`.
"""

import random
import time

import torch
from torch import nn

from lightning_sdiloco import DropCompute, StreamingDiLoCo
from lightning_sdiloco.engine.drop_compute import best_drop

MICRO_BATCHES = 8


def train(budget: float, steps: int = 40) -> None:
    torch.manual_seed(0)
    random.seed(0)
    truth = nn.Linear(16, 1)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = StreamingDiLoCo(model, sync_every=10, overlap_steps=2, fragments=[["*"]])
    # If a group has several ranks, budget="auto" and `.follow(engine)` let them choose it.
    loader = DropCompute(MICRO_BATCHES, budget)(
        [torch.randn(8, 16) for _ in range(steps * MICRO_BATCHES)]
    )
    began = time.perf_counter()
    for x in loader:
        if x is not None:
            time.sleep(random.lognormvariate(-6.5, 0.6))
            # With DistributedDataParallel, do this inside model.no_sync(), unless loader.is_last.
            (nn.functional.mse_loss(model(x), truth(x).detach()) / MICRO_BATCHES).backward()
        if loader.is_last:
            optimizer.step()
            optimizer.zero_grad()
            engine.step(trained=loader.trained)
    seconds = time.perf_counter() - began
    engine.finish()
    left_out = loader.dropped / len(loader)
    print(
        f"budget {budget:.4f} s: {seconds / steps * 1e3:.1f} ms a step, {left_out:.1%} of the"
        " micro-batches left out"
    )


if __name__ == "__main__":
    train(float("inf"))
    train(0.011)
    random.seed(1)
    measured = [
        [[random.lognormvariate(0, 0.2) for _ in range(12)] for _ in range(200)] for _ in range(8)
    ]
    found = best_drop(measured, overhead=0.0, most_dropped=0.1)
    print(
        f"8 ranks with 12 micro-batches that vary by 20 %: {found.gain:+.1%} by leaving out"
        f" {found.dropped:.1%}"
    )
