"""Dynamic communication thresholding (DCT, arXiv 2010.08899): a threshold is reused for several
launches.

    python examples/methods/dct.py

With a Trainer, use `StreamingDiLoCoStrategy(compression="threshold+memory")`. Values below the
threshold are kept in the memory, so payloads are shorter while the groups change little.
"""

from side_by_side import compare

from lightning_sdiloco.compression import ErrorFeedback, Int2, Threshold

if __name__ == "__main__":
    compare(
        {
            f"made again every {every}": {
                "compression": ErrorFeedback(Threshold(1 / 64, Int2(), every=every))
            }
            for every in (1, 5, 20)
        },
        steps=300,
        sync_every=10,
        overlap_steps=2,
    )
