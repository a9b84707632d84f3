"""SelSync for worker groups (arXiv 2307.07950): launch less often while outer gradients hardly
change.

    python examples/methods/selsync.py

With a Trainer, use `StreamingDiLoCoStrategy(schedule=Selective(threshold=0.3, most=4))`.
"""

from side_by_side import compare

from lightning_sdiloco import Selective

if __name__ == "__main__":
    compare(
        {
            "every 20 steps": {},
            "Selective(threshold=0.3, most=4)": {"schedule": Selective(threshold=0.3, most=4)},
            "every 40 steps": {"sync_every": 40},
        },
        sync_every=20,
        overlap_steps=2,
    )
