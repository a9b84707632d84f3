"""Estimates how far the clocks of the ranks are apart, from messages between them, as NTP does."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_sdiloco.comm import Communicator

# Exchanges in one measurement, of which the best counts.
_EXCHANGES = 8


class Exchange(NamedTuple):
    """One exchange of messages among all ranks, as one rank saw it on its own clock."""

    sent: float
    received: float


class ClockOffset(NamedTuple):
    """How far the clock of a rank is ahead of that of rank 0."""

    seconds: float
    uncertainty: float


Clock = Callable[[float], float]
"""Converts a moment of ``time.perf_counter()`` to seconds since 1970."""


def wall_clock() -> Clock:
    """Returns a clock that shows the time of day now, and then runs as steadily as ``time.perf_counter()``."""
    ahead = time.time() - time.perf_counter()
    return lambda moment: ahead + moment


def measured(clock: Clock, world: Communicator) -> ClockOffset:
    """Measures how far the clock of this rank is ahead of that of rank 0. All ranks must call it."""
    exchanges = []
    for _ in range(_EXCHANGES):
        sent = clock(time.perf_counter())
        world.all_gather_object(None)
        exchanges.append(Exchange(sent, clock(time.perf_counter())))
    return estimated([Exchange(*one) for one in world.all_gather_object(exchanges)[0]], exchanges)


def estimated(reference: Sequence[Exchange], own: Sequence[Exchange]) -> ClockOffset:
    """Estimates the offset of a clock from what it and a reference showed in the same exchanges.

    Nobody has a message before it was sent. So this clock is ahead by at least the time that it showed on sending minus
    the one that the reference showed on receiving, and by at most the reverse.

    Args:
        reference: The exchanges on the clock of rank 0.
        own: The same exchanges on this clock.

    Examples:
        >>> reference = [Exchange(10.0, 10.3), Exchange(11.0, 11.1)]
        >>> own = [Exchange(15.0, 15.4), Exchange(16.0, 16.1)]
        >>> offset = estimated(reference, own)
        >>> round(offset.seconds, 3), round(offset.uncertainty, 3)
        (5.0, 0.1)
    """
    pairs = list(zip(reference, own, strict=True))
    least = max(mine.sent - zero.received for zero, mine in pairs)
    most = min(mine.received - zero.sent for zero, mine in pairs)
    return ClockOffset((least + most) / 2, (most - least) / 2)
