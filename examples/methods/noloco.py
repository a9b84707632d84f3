"""Random pairs with an outer momentum in each group (NoLoCo), compared with rounds of all groups.

    python examples/methods/noloco.py

With a Trainer, use `StreamingDiLoCoStrategy(route=RandomPairs(), compression="int8")`.
"""

from side_by_side import compare

from lightning_sdiloco import RandomPairs

if __name__ == "__main__":
    compare(
        {
            "all with all": {},
            "RandomPairs()": {
                "route": RandomPairs(),
                "compression": "int8",
                "outer_lr": 0.7,
                "outer_momentum": 0.5,
            },
            "... in float32": {
                "route": RandomPairs(),
                "compression": "fp32",
                "outer_lr": 0.7,
                "outer_momentum": 0.5,
            },
        },
        groups=4,
        steps=200,
        sync_every=10,
        overlap_steps=2,
    )
