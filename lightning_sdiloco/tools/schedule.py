"""Runs ``sdiloco schedule``: prints after which inner steps fragments launch and land."""

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.schedule import Schedule


def schedule(
    sync_every: int = 100, overlap_steps: int = 5, fragments: int = 8, first: int = 1, last: int | None = None
) -> str:
    """Print after which inner steps fragments launch and land.

    Args:
        sync_every: Inner steps between two launches of the same fragment.
        overlap_steps: Inner steps between the launch of a fragment and its landing.
        fragments: Number of fragments.
        first: First inner step of the table.
        last: Last inner step of the table. By default far enough to show two rounds.

    Raises:
        ValueError: If a value is out of its range; for ``sync_every`` and ``overlap_steps`` as `Settings` says it.

    Examples:
        >>> print(schedule(sync_every=6, overlap_steps=2, fragments=2, last=12))
        step  launches  lands
           6  0         -
           8  -         0
           9  1         -
          11  -         1
          12  0         -
    """
    Settings(sync_every=sync_every, overlap_steps=overlap_steps)
    _require_at_least(1, "fragments", fragments, "Give the number of fragments that the model is cut into.")
    _require_at_least(1, "first", first, "Inner steps count from 1.")
    if last is None:
        last = first + 3 * sync_every - 2 + overlap_steps
    _require_at_least(first, "last", last, "It is the last inner step of the table, and first the first.")
    return Schedule(sync_every, overlap_steps, fragments).table(first, last)


def _require_at_least(least: int, name: str, value: int, advice: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value} is out of range: it must be at least {least}. {advice}")
