"""Exchanges between neighbours on a ring, with and without the continuous momentum of A2CiD2.

    python examples/methods/a2cid2.py

With a Trainer, use `StreamingDiLoCoStrategy(route=Ring(), compression="int8")`.
"""

from side_by_side import compare

from lightning_sdiloco import Ring

if __name__ == "__main__":
    compare(
        {
            "Ring()": {"route": Ring(), "compression": "int8"},
            "Ring(accelerated=False)": {
                "route": Ring(accelerated=False),
                "compression": "int8",
                "outer_lr": 1.0,
                "outer_momentum": 0.0,
            },
        },
        groups=4,
        steps=200,
        sync_every=10,
        overlap_steps=2,
    )
