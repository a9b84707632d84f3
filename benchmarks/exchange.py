"""Measures what the second rounding of two shots costs, on real outer gradients, beside a gather and its bytes.

Run it with ``python -m benchmarks.exchange [--quick] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.outer_gradients import Replicas, Training, outer_gradients
from lightning_sdiloco.algorithm.reduce import AllReduce, TwoShotAllReduce
from lightning_sdiloco.algorithm.weighting import Count
from lightning_sdiloco.compression import COMPRESSIONS, FP4, Compression, ErrorFeedback, Float32, Int2, RandomK, TopK

TRAINING = Training(width=64, layers=2, context=64, rounds=16)
QUICK = Training(width=32, layers=2, context=32, rounds=3, sync_every=5)
GROUPS = (2, 3, 4, 8)

FAMILY: dict[str, Compression] = {
    **{name: codec for name, codec in COMPRESSIONS.items() if not codec.varies()},
    "ErrorFeedback(FP4())": ErrorFeedback(FP4()),
    "ErrorFeedback(Int2())": ErrorFeedback(Int2()),
    "RandomK(32, Float32())": RandomK(32, Float32()),
    "TopK(0.03, Int2())": TopK(0.03, Int2()),
}


def means(
    shots: AllReduce, gradients: Replicas, memories: list[Tensor | None], residuals: list[Tensor | None]
) -> Tensor:
    """The mean of a round in one place. What is remembered is replaced."""
    count = Count(dict.fromkeys(range(shots.groups), 1.0))
    mean = shots.reduce_locally(gradients, memories, residuals, count)
    encoded = [shots.encode(*own) for own in zip(gradients, memories, strict=True)]
    for group, residual in enumerate(residuals):
        part = shots.mean([one.payloads[group] for one in encoded], count, like=gradients[0])
        hop = shots.second_hop(part, residual)
        residuals[group] = None if hop is None else hop.residual
    memories[:] = [one.memory for one in encoded]
    return mean


def error_of_the_sum(
    kind: type[AllReduce], codec: Compression, rounds: list[Replicas], groups: int, forgets: bool
) -> float:
    """Relative error of the means of all rounds added up: what the outer parameters are off by."""
    memories: list[Tensor | None] = [None] * groups
    residuals: list[Tensor | None] = [None] * groups
    sent, true = torch.zeros_like(rounds[0][0]).double(), torch.zeros_like(rounds[0][0]).double()
    for step, gradients in enumerate(rounds):
        sent += means(kind(groups, codec.at(step), 0.0), gradients[:groups], memories, residuals)
        true += torch.stack(gradients[:groups]).double().mean(0)
        if forgets:
            residuals = [None] * groups
    return float((sent - true).norm() / true.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what the second rounding of two shots costs.")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all numbers")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    training = QUICK if asked.quick else TRAINING
    rounds = outer_gradients(training, max(GROUPS))
    numel, headline = rounds[0][0].numel(), {}
    print(f"{numel:,} parameters, {training.rounds} rounds of {training.sync_every} inner steps\n")
    print("| compression | M | bytes of two shots, of a gather's | gather | two shots | two shots that forget |")
    print("|---|---|---|---|---|---|")
    for name, codec in FAMILY.items():
        for groups in GROUPS:
            gather, two = AllReduce(groups, codec, 0.0), TwoShotAllReduce(groups, codec, 0.0)
            share = (two.payload_bytes(numel) + two.second_hop_bytes(numel)) / gather.payload_bytes(numel)
            errors = [
                error_of_the_sum(kind, codec, rounds, groups, forgets)
                for kind, forgets in ((AllReduce, False), (TwoShotAllReduce, False), (TwoShotAllReduce, True))
            ]
            told = " | ".join(f"{error:.4f}" for error in errors)
            print(f"| `{name}` | {groups} | {share:.2f} | {told} |", flush=True)
            for what, error in zip(("gather", "two shots", "two shots that forget"), errors, strict=True):
                headline[f"{name}, {groups} groups: {what}"] = error
    if asked.json:
        asked.json.write_text(json.dumps({"headline": headline, "torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
