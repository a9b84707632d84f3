"""Measures the way to a hub with pings: how long one takes, and how many bytes get through in each direction."""

import random
import statistics
import threading
import time
from functools import partial
from typing import Any

from lightning_sdiloco.comm.mailbox.base import checked_size
from lightning_sdiloco.comm.mailbox.frames import CHUNK, Header, pack
from lightning_sdiloco.comm.mailbox.link import Link

MOST_BYTES = 128 << 20
"""How much is sent, at most, to measure a direction."""

_CALLS = 20
_STEPS = ((1, CHUNK // 16), (1, CHUNK // 4), (1, CHUNK), (4, CHUNK))  # calls at a time on a connection, bytes in each
_PATIENCE = 30.0

# Nothing on the way makes it smaller.
_NOISE = random.Random(0).randbytes(CHUNK)


def answer_to(about: Header, body: bytes) -> bytes:
    """Returns what a ping is answered with: its own bytes, or as many as it asks for."""
    return _NOISE[: checked_size(about["bytes"], CHUNK, "answer")] if "bytes" in about else body


def round_trip(link: Link, header: Header) -> float:
    """Returns how many seconds a small call takes: the median of several, by the clock of this end alone."""
    message = pack(header | {"call": "ping"})
    seconds = []
    # The first one makes the connection.
    for _ in range(_CALLS + 1):
        began = time.perf_counter()
        _ask(link, message, None)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def bandwidth(link: Link, header: Header, up: bool, seconds: float, most: int = MOST_BYTES) -> float:
    """Returns the bits per second that get through in a direction, over all connections for blobs together."""
    _Burst(link, header, up, 1, 0).run(1)
    # More and more at a time, until the link is busy for a while.
    for at_once, size in _STEPS:
        burst = _Burst(link, header, up, at_once, size)
        began = time.perf_counter()
        burst.run(1)
        if time.perf_counter() - began > seconds / 4:
            break
    burst.run(most, time.perf_counter() + seconds)
    return burst.rate()


class _Burst:
    """Pings on all connections, so many at a time on each, again and again."""

    def __init__(self, link: Link, header: Header, up: bool, at_once: int, size: int) -> None:
        self._link, self._size = link, size
        about = {"about": {"bytes": 0 if up else size}}
        self._message = pack(header | {"call": "ping"} | about, _NOISE[: size if up else 0])
        self._ways = [channel for channel in link.data for _ in range(at_once)]
        self._lock = threading.Lock()
        self._done: list[float] = []
        self._began = 0.0

    def run(self, most: int, until: float = 0.0) -> None:
        """Pings on every way at least once, until a time or so many bytes."""
        self._began, self._done = time.perf_counter(), []

        def ask(channel: Any) -> None:
            while True:
                _ask(self._link, self._message, channel)
                with self._lock:
                    self._done.append(time.perf_counter())
                if time.perf_counter() >= until or len(self._done) * self._size >= most:
                    return

        errors = self._link.errors_of([partial(ask, way) for way in self._ways], lambda: len(self._done), _PATIENCE)
        if errors:
            raise errors[0]

    def rate(self) -> float:
        """Returns the bits per second in the second half of the time: a connection starts slowly."""
        middle = (self._began + self._done[-1]) / 2
        after = sum(moment > middle for moment in self._done)
        return 8 * self._size * after / max(self._done[-1] - middle, 1e-9)


def _ask(link: Link, message: bytes, channel: Any) -> None:
    with link.cancelled_at_the_end() as take:
        try:
            take(link.method("unary_unary", "call", channel).future(message, link.timeout)).result()
        except Exception as error:
            raise link.error(error) from error
