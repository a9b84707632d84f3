"""Sparse communication (arXiv 2009.09271): few values at a time, either the largest ones or random
ones.

    python examples/methods/sparse_communication.py

With a Trainer, use `StreamingDiLoCoStrategy(compression="top_k+memory")`, and so on. If you combine
a memory with random values, use no outer momentum.
"""

from typing import Any

from side_by_side import compare

from lightning_sdiloco.compression import ErrorFeedback, Int2, TopK

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
SENDERS = ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)

if __name__ == "__main__":
    compare(
        {
            "fp4": {},
            "top_k+memory": {"compression": "top_k+memory"},
            "random_k": {"compression": "random_k"},
            "random_k+memory": {"compression": "random_k+memory", **PLAIN},
            "random_block+memory": {"compression": "random_block+memory", **PLAIN},
            "sparse": {"compression": "sparse"},
            "sparse, over senders": {"compression": SENDERS},
        },
        steps=120,
        sync_every=10,
        overlap_steps=2,
    )
