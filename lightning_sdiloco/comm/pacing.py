"""Paces what a rank sends, so that messages which leave together get through together.

What it is worth (``python -m benchmarks.flights``): over links of 30 Mbit/s with round trips of 50
ms, flights of 2, 4 and 8 sites take 1.05, 1.10 and 1.09 times as long as their bytes take alone;
without it 1.31, 1.54 and 1.45 times.

[Note: why pace] A mean waits for the slowest message. TCP shares a link fairly in the long run: of
seven connections that send for a second, some get half of what others do, and after a pause all
begin slowly and then overrun the queue of the link. So each connection sends at its share of what
the link carries, and no faster, which the kernel sees to.

What the link carries is learned from message to message, as the kernel counts them. Where packets
had to queue or got lost, the next ones go slower, by what queued and was lost; where not, they go
faster, and the more so the longer it goes well. So a rate that is too low is soon given up, and
links may change at any time.

gloo has opened the connections in this process. They are found on Linux; elsewhere nothing is
paced.
"""

import os
import socket
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_MAX_PACING_RATE = 47
_UNLIMITED = 2**64 - 1
# Bytes of the kernel's `struct tcp_info` up to what is read here (Linux 4.10), and where each
# number stands.
_INFO_BYTES = 176
_FIELDS = struct.Struct("=24x I 40x I 28x I 16x Q 20x I 4x I Q Q")

_SHORTEST_S = 0.05
_SHORTEST = 1 << 16
"""Messages that take less time or have fewer bytes are not paced, and nothing is learned: a queue
holds them all."""

_QUEUE_S = 0.015
_QUEUE_SHARE = 0.03
_LOST_SHARE = 0.005
"""Too much: these seconds in queues, if they are that share of the time, or this many packets
lost."""

_UNKNOWN_STEP = 0.08
_FIRST_STEP = 0.01
_LARGEST_STEP = 0.5
"""By what share a rate grows before and after it was too high, twice as much each time, and at
most."""

_MOST = 1.25
_LEAST = 1.05
"""A rate is at most this many times what connections delivered in the end, at least this many times
what they sent."""

_REMEMBERED = 8
"""What queues or gets lost in each of this many last hops does so however fast messages leave."""


class Counters(NamedTuple):
    nbytes: int
    packets: int
    sent_again: int
    busy_s: float
    round_trip: float
    shortest_round_trip: float
    bytes_per_s: float
    on_the_way: int

    def since(self, before: "Counters") -> "Counters":
        """Returns what it has sent since then, with the round trips and the speed of now."""
        waited = 0.0 if before.on_the_way else self.shortest_round_trip
        return self._replace(
            nbytes=self.nbytes - before.nbytes,
            packets=self.packets - before.packets,
            sent_again=self.sent_again - before.sent_again,
            busy_s=self.busy_s - before.busy_s - waited,
        )


class Connection(NamedTuple):
    """A connection of this process, of whatever origin."""

    descriptor: int
    inode: int

    @staticmethod
    def of_process() -> "set[Connection]":
        found = set[Connection]()
        descriptors = Path("/proc/self/fd")
        # A default timeout would make the owner's socket one that does not block, as soon as Python
        # looks at it.
        if socket.getdefaulttimeout() is not None or not descriptors.is_dir():
            return found
        for name in os.listdir(descriptors):
            with suppress(OSError):
                about = os.fstat(int(name))
                if stat.S_ISSOCK(about.st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as opened:
                        opened.getpeername()
                        if opened.type == socket.SOCK_STREAM and opened.family in (
                            socket.AF_INET,
                            socket.AF_INET6,
                        ):
                            found.add(Connection(int(name), about.st_ino))
        return found

    def counters(self) -> Counters:
        told = self._with(
            lambda opened: opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        )
        if len(told) < _INFO_BYTES:
            raise OSError(
                "This Linux is older than 4.10, and does not say how long a connection was busy."
            )
        on_the_way, trip, again, acked, shortest, packets, rate, busy = _FIELDS.unpack_from(told)
        return Counters(
            acked,
            packets,
            again,
            1e-6 * busy,
            1e-6 * trip,
            1e-6 * shortest,
            float(rate),
            on_the_way,
        )

    def limit(self, bytes_per_s: float | None) -> None:
        """Limits its rate; None: as fast as its congestion control allows."""
        rate = struct.pack("@L", _UNLIMITED if bytes_per_s is None else max(1, int(bytes_per_s)))
        self._with(lambda opened: opened.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate))

    def _with(self, act: Callable[[socket.socket], Any]) -> Any:
        """Does something with the socket, which stays its owner's."""
        if os.fstat(self.descriptor).st_ino != self.inode:
            raise OSError(f"The connection of descriptor {self.descriptor} is no longer there.")
        # Told what it is, Python does not ask the kernel.
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self.descriptor)
        try:
            return act(opened)
        finally:
            opened.detach()


class Sent(NamedTuple):
    nbytes: int
    seconds: float
    queued_s: float
    lost: float
    delivered: float

    @staticmethod
    def over(connections: Sequence[Counters]) -> "Sent":
        """Returns it for the connections that carried the messages, from what they counted
        meanwhile.
        """
        return Sent(
            nbytes=sum(one.nbytes for one in connections),
            seconds=max(one.busy_s for one in connections),
            queued_s=median(one.round_trip - one.shortest_round_trip for one in connections),
            lost=sum(one.sent_again for one in connections)
            / max(1, sum(one.packets for one in connections)),
            delivered=sum(one.bytes_per_s for one in connections),
        )


class Pace:
    """Learns how fast a rank may send.

    Attributes:
        bytes_per_s: Over all connections together; None: as fast as their congestion control
            allows.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._step = _UNKNOWN_STEP
        self._last: deque[Sent] = deque(maxlen=_REMEMBERED)

    def learn(self, sent: Sent) -> None:
        """Takes in how messages got through that were paced as said here."""
        if sent.seconds < _SHORTEST_S:
            return
        queued_s = sent.queued_s
        lost = sent.lost
        self._last.append(sent)
        if len(self._last) == _REMEMBERED:
            # What queues and gets lost always, does so however fast messages leave.
            queued_s -= min(one.queued_s for one in self._last)
            lost -= min(one.lost for one in self._last)
        too_fast = queued_s > max(_QUEUE_S, _QUEUE_SHARE * sent.seconds) or lost > _LOST_SHARE
        if self.bytes_per_s is None:
            # A first rate that is too high costs less than one too low: it is as if nothing were
            # paced. After a loss connections may end at a fraction of their speed.
            first = _MOST * max(sent.delivered, sent.nbytes / sent.seconds)
            self.bytes_per_s = first if too_fast else None
            return
        most = _MOST * sent.delivered
        least = _LEAST * sent.nbytes / sent.seconds
        if too_fast:
            factor = (1 - lost) * sent.seconds / (sent.seconds + queued_s)
            self._step = _FIRST_STEP
        else:
            factor = 1 + self._step
            self._step = min(2 * self._step, _LARGEST_STEP)
            # A message that is through before its connections are at their speed says nothing
            # against a higher one.
            most = max(most, self.bytes_per_s)
        self.bytes_per_s = max(min(factor * self.bytes_per_s, most), least)


class Pacing:
    """Paces the connections of a rank over which messages leave together. Its methods may be
    called by any thread.
    """

    def __init__(self, connections: Set[Connection] = frozenset()) -> None:
        self._connections = list(connections)
        self._before: list[Counters] = []
        self._pace = Pace()
        self._limit: float | None = None
        self._lock = threading.Lock()

    def prepare(self, sizes: Sequence[int]) -> None:
        """Learns from the last messages how fast the next ones may leave; call it before they
        do.
        """
        if not self._connections or not (nbytes := sum(sizes)):
            return
        # If a connection is gone, the wait for its message says so.
        with self._lock, suppress(OSError):
            if nbytes >= _SHORTEST:
                self._learn()
            rate = self._pace.bytes_per_s
            is_long = rate is not None and nbytes >= max(_SHORTEST, rate * _SHORTEST_S)
            # So the largest message is through when all others are.
            limit = rate * max(sizes) / nbytes if rate is not None and is_long else None
            if limit != self._limit:
                for connection in self._connections:
                    connection.limit(limit)
                self._limit = limit

    def _learn(self) -> None:
        counters = [connection.counters() for connection in self._connections]
        before = self._before or counters
        self._before = counters
        since = [after.since(then) for then, after in zip(before, counters, strict=True)]
        # Where less went, it was words, or there was no message for the other side.
        least = max(one.nbytes for one in since) / 4
        carried = [one for one in since if one.nbytes > least]
        if carried:
            self._pace.learn(Sent.over(carried))
