"""Delayed Nesterov (arXiv 2401.09135): the outer momentum moves once in several outer steps.

    python examples/methods/delayed_nesterov.py

With a Trainer it is `StreamingDiLoCoStrategy(outer_optimizer=partial(DelayedNesterov, lr=0.7, momentum=0.9, every=4))`.
"""

from functools import partial

from side_by_side import compare

from lightning_sdiloco import DelayedNesterov

if __name__ == "__main__":
    compare(
        {
            "Nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
            "DelayedNesterov(every=2)": {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2)},
            "DelayedNesterov(every=4)": {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=4)},
        },
        mixing=0.2,
        sync_every=20,
        overlap_steps=2,
    )
