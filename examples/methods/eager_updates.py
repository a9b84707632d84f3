"""Eager updates (arXiv 2502.12996): go on with the own part of a mean that takes the whole round to come.

    python examples/methods/eager_updates.py

With a Trainer it is `StreamingDiLoCoStrategy(mixing=Eager(), overlap_steps=99)`.
"""

from side_by_side import compare

from lightning_sdiloco import Eager

if __name__ == "__main__":
    compare(
        {
            "no overlap": {"mixing": 0.0, "overlap_steps": 0},
            "mixing=Eager()": {"mixing": Eager()},
            "mixing=0.2": {"mixing": 0.2},
            "mixing=0 (delayed)": {"mixing": 0.0},
        },
        sync_every=20,
        overlap_steps=19,
    )
