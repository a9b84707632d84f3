"""Pairs over fast links that take each other's mean (SAPS-PSGD), with a mask that all share.

    python examples/methods/saps_psgd.py

With a Trainer it is `StreamingDiLoCoStrategy(route=FastestPairs(speeds=...), outer_lr=1,
outer_momentum=0)`.
"""

from side_by_side import compare

from lightning_sdiloco import FastestPairs
from lightning_sdiloco.compression import Int8, RandomK

MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0}
# Groups 0 and 1 stand at one site and 2 and 3 at another, with a slow link between them.
ROUTE = FastestPairs(speeds=((1, 10, 1, 1), (10, 1, 1, 1), (1, 1, 1, 10), (1, 1, 10, 1)), window=3)

if __name__ == "__main__":
    compare(
        {
            "FastestPairs": {"route": ROUTE, "compression": "int8", **MEAN},
            "... one value of 4": {"route": ROUTE, "compression": RandomK(4, Int8()), **MEAN},
            "... links alike": {"route": FastestPairs(), "compression": "int8", **MEAN},
        },
        groups=4,
        steps=200,
        sync_every=10,
        overlap_steps=2,
    )
