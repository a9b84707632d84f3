"""EDiT's weighing of groups (arXiv 2412.07210).

    python examples/methods/edit.py

With a Trainer it is `StreamingDiLoCoStrategy(weighing=ByNorm(temperature=1.0))`.
"""

from side_by_side import compare

from lightning_sdiloco import ByMedian, ByNorm, ZScore

if __name__ == "__main__":
    compare(
        {
            "by the steps trained": {},
            "ByNorm(temperature=1.0)": {"weighing": ByNorm(temperature=1.0)},
            "ZScore(warmup=5)": {"weighing": ZScore(warmup=5)},
            "ByMedian()": {"weighing": ByMedian()},
        },
        groups=3,
        steps=300,
        sync_every=20,
        overlap_steps=2,
    )
