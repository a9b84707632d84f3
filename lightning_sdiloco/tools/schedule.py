"""Runs ``sdiloco schedule``, which prints a table of launches and landings."""

from lightning_sdiloco.algorithm.config import Settings, overlap_for
from lightning_sdiloco.algorithm.schedule import DenseBeginning
from lightning_sdiloco.planning.link import require


def schedule(
    sync_every: int = 100,
    overlap_steps: int | None = None,
    fragments: int = 8,
    first: int = 1,
    last: int | None = None,
    dense_rounds: int = 0,
    dense_sync_every: int = 4,
) -> str:
    """Print the inner steps after which fragments launch and land.

    Args:
        sync_every: Number of inner steps between two launches of the same fragment.
        overlap_steps: Number of inner steps between the launch of a fragment and its landing. The
            default is 5, or fewer in short rounds.
        fragments: Number of fragments.
        first: First inner step shown in the table.
        last: Last inner step shown in the table. By default, the table shows two rounds.
        dense_rounds: Number of rounds of the dense beginning, if the run has one.
        dense_sync_every: Number of inner steps between two launches of the same fragment in the
            dense beginning.

    Examples:
        $ sdiloco schedule --sync-every 20 --overlap-steps 5 --fragments 4

        >>> print(schedule(sync_every=6, overlap_steps=2, fragments=2, last=12))
        step  launches  lands
           6  0         -
           8  -         0
           9  1         -
          11  -         1
          12  0         -
    """
    overlap_steps = overlap_for(sync_every, overlap_steps)
    require(dense_rounds >= 0, "dense_rounds", dense_rounds, "at least 0")
    dense = DenseBeginning(dense_rounds, dense_sync_every) if dense_rounds else None
    settings = Settings(sync_every=sync_every, overlap_steps=overlap_steps, dense_beginning=dense)
    require(fragments >= 1, "fragments", fragments, "at least 1")
    require(first >= 1, "first", first, "at least 1")
    shown = settings.schedule_of(fragments)
    if last is None:
        last = first + shown.dense_steps + 3 * sync_every - 2 + overlap_steps
    require(last >= first, "last", last, f"at least {first}, the first step")
    return shown.table(first, last)
