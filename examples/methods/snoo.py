"""SNOO (arXiv 2510.15830): Nesterov momentum on the progress of one worker, without a second
machine.

    python examples/methods/snoo.py

With a Trainer, use `StreamingDiLoCoStrategy(worker_groups=1, **SNOO)`.
"""

from typing import Any

from side_by_side import compare

from lightning_sdiloco import OuterOptimizer

SNOO: dict[str, Any] = {
    "sync_every": 28,
    "overlap_steps": 0,
    "mixing": 0.0,
    "fragments": [["*"]],
    "compression": "fp32",
    "outer_lr": 0.68,
    "outer_momentum": 0.37,
    "outer_optimizer": OuterOptimizer(direction="elementwise"),
}
"""The settings of the paper. Without momentum, this is Lookahead."""

LOOKAHEAD = {**SNOO, "outer_lr": 0.5, "outer_momentum": 0.0}

if __name__ == "__main__":
    compare({"AdamW alone": {"sync_every": 10_000}, "Lookahead": LOOKAHEAD, "SNOO": SNOO}, groups=1)
