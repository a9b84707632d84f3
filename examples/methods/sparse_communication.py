"""Sparse communication (arXiv 2009.09271): few values at a time, those that are largest or those that chance picks.

    python examples/methods/sparse_communication.py

With a Trainer it is `StreamingDiLoCoStrategy(compression="top_k+memory")`, and so on.
"""

from side_by_side import compare

from lightning_sdiloco.compression import ErrorFeedback, Int2, TopK

if __name__ == "__main__":
    senders = ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)
    names = [f"{kind}{memory}" for kind in ("top_k", "random_k", "random_block") for memory in ("", "+memory")]
    compare(
        {
            "fp4": {},
            **{name: {"compression": name} for name in names},
            "sparse": {"compression": "sparse"},
            "sparse, over senders": {"compression": senders},
        },
        steps=150,
        sync_every=10,
        overlap_steps=2,
    )
