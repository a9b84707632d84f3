"""Paces a rank's messages so that messages sent together arrive together.

Pacing was measured with ``python -m benchmarks.flights``. Over links of 30 Mbit/s with round trips
of 50 ms, flights of 2, 4 and 8 sites take 1.05, 1.10 and 1.09 times as long as the bare transfer of
their bytes. Without pacing, the same flights take 1.31, 1.54 and 1.45 times as long.

[Note: why pace] A mean waits for the slowest message, and TCP shares a link fairly only in the long
run. When seven connections send for a second, some get half the bandwidth of others. After a pause,
all connections start slowly and then overflow the link's queue. The kernel therefore limits each
connection to its share of the bandwidth.

After each message, the bandwidth of the link is estimated from the kernel's counters. If packets
were queued or lost, the rate is reduced in proportion. Otherwise, the rate rises in growing steps.
A rate that is too low is therefore corrected quickly, and the link's bandwidth may change at any
time.

gloo opens the connections in this process. Connections can be found only on Linux, so messages are
not paced on other systems.
"""

import os
import socket
import stat
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

_MAX_PACING_RATE = 47
_UNLIMITED = 2**64 - 1
# The length of the part of the kernel's `struct tcp_info` that is read here (Linux 4.10), and the
# position of each number.
_INFO_BYTES = 176
_FIELDS = struct.Struct("=24x I 40x I 28x I 16x Q 20x I 4x I Q Q")

_SHORTEST_S = 0.05
_SHORTEST = 1 << 16
"""The minimum duration and size of messages that are paced and measured. Smaller messages fit into
the link's queue."""

_QUEUE_S = 0.015
_QUEUE_SHARE = 0.03
_LOST_SHARE = 0.005
"""The limits on queueing time (in seconds and as a share of the transfer) and on packet loss. A
rate that exceeds one of these limits is too high."""

_UNKNOWN_STEP = 0.08
_FIRST_STEP = 0.01
_LARGEST_STEP = 0.5
"""The relative increase in a rate before its first reduction, the first increase after a reduction
(doubled with each further increase), and the maximum increase."""

_MOST = 1.25
_LEAST = 1.05
"""The upper bound on the rate as a multiple of the delivery rate, and the lower bound as a multiple
of the sending rate."""

_REMEMBERED = 8
"""The number of recent hops to compare. Queueing or loss that occurs in all of these hops is not
caused by the rate."""


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
        """Returns the change since an earlier reading. Round trips and speed keep their current
        values.
        """
        busy_s = self.busy_s - before.busy_s
        if not before.on_the_way:
            # The first packet found an empty link.
            busy_s -= self.shortest_round_trip
        return self._replace(
            nbytes=self.nbytes - before.nbytes,
            packets=self.packets - before.packets,
            sent_again=self.sent_again - before.sent_again,
            busy_s=busy_s,
        )


class Connection(NamedTuple):
    """An open TCP connection of this process, possibly opened by another library."""

    descriptor: int
    inode: int

    @staticmethod
    def of_process() -> "set[Connection]":
        connections = set[Connection]()
        descriptors = Path("/proc/self/fd")
        # With a default timeout, inspecting a socket would also make it non-blocking for its owner.
        if socket.getdefaulttimeout() is not None or not descriptors.is_dir():
            return connections
        for name in os.listdir(descriptors):
            descriptor = int(name)
            with suppress(OSError):
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode) and _is_connection(descriptor):
                    connections.add(Connection(descriptor, status.st_ino))
        return connections

    def counters(self) -> Counters:
        with self._opened() as opened:
            counted = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(counted) < _INFO_BYTES:
            raise OSError(
                "This kernel is older than 4.10 and does not report how long a connection was busy."
            )
        on_the_way, trip, again, acked, shortest, packets, rate, busy = _FIELDS.unpack_from(counted)
        return Counters(
            nbytes=acked,
            packets=packets,
            sent_again=again,
            busy_s=1e-6 * busy,
            round_trip=1e-6 * trip,
            shortest_round_trip=1e-6 * shortest,
            bytes_per_s=float(rate),
            on_the_way=on_the_way,
        )

    def limit(self, bytes_per_s: float | None) -> None:
        """Limits the connection's rate. None leaves the rate to congestion control."""
        rate = _UNLIMITED
        if bytes_per_s is not None:
            rate = max(1, int(bytes_per_s))
        with self._opened() as opened:
            opened.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", rate))

    @contextmanager
    def _opened(self) -> Iterator[socket.socket]:
        """Opens the socket without taking ownership of the descriptor."""
        if os.fstat(self.descriptor).st_ino != self.inode:
            raise OSError(f"The connection with descriptor {self.descriptor} no longer exists.")
        # Given a family and a type, Python does not query the kernel for them.
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self.descriptor)
        try:
            yield opened
        finally:
            opened.detach()


def _is_connection(descriptor: int) -> bool:
    """Returns whether a socket is a TCP connection. Raises OSError if the socket is not
    connected.
    """
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        opened.getpeername()
        is_internet = opened.family in (socket.AF_INET, socket.AF_INET6)
        return is_internet and opened.type == socket.SOCK_STREAM


class Sent(NamedTuple):
    nbytes: int
    seconds: float
    queued_s: float
    lost: float
    delivered: float

    @staticmethod
    def over(connections: Sequence[Counters]) -> "Sent":
        """Combines the counters of the connections that carried a set of messages."""
        packets = sum(counters.packets for counters in connections)
        sent_again = sum(counters.sent_again for counters in connections)
        return Sent(
            nbytes=sum(counters.nbytes for counters in connections),
            seconds=max(counters.busy_s for counters in connections),
            queued_s=median(
                counters.round_trip - counters.shortest_round_trip for counters in connections
            ),
            lost=sent_again / max(1, packets),
            delivered=sum(counters.bytes_per_s for counters in connections),
        )


class Pace:
    """A rank's adaptive sending rate.

    Attributes:
        bytes_per_s: The combined rate of all connections, or None if congestion control sets the
            rate.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._step = _UNKNOWN_STEP
        self._last: deque[Sent] = deque(maxlen=_REMEMBERED)

    def learn(self, sent: Sent) -> None:
        """Updates the rate based on measurements of messages that were sent at the current rate."""
        if sent.seconds < _SHORTEST_S:
            return
        queued_s = sent.queued_s
        lost = sent.lost
        self._last.append(sent)
        if len(self._last) == _REMEMBERED:
            # The minimum queueing time and loss do not depend on the sending rate.
            queued_s -= min(hop.queued_s for hop in self._last)
            lost -= min(hop.lost for hop in self._last)
        too_fast = queued_s > max(_QUEUE_S, _QUEUE_SHARE * sent.seconds) or lost > _LOST_SHARE
        if self.bytes_per_s is None:
            if too_fast:
                # A first rate that is too high costs less than a first rate that is too low,
                # because messages then travel as if they were not paced. After a loss, connections
                # may end at a fraction of their speed.
                self.bytes_per_s = _MOST * max(sent.delivered, sent.nbytes / sent.seconds)
            return
        most = _MOST * sent.delivered
        least = _LEAST * sent.nbytes / sent.seconds
        if too_fast:
            factor = (1 - lost) * sent.seconds / (sent.seconds + queued_s)
            self._step = _FIRST_STEP
        else:
            factor = 1 + self._step
            self._step = min(2 * self._step, _LARGEST_STEP)
            # A message that ends before its connections reach full speed is no evidence against a
            # higher rate.
            most = max(most, self.bytes_per_s)
        self.bytes_per_s = max(min(factor * self.bytes_per_s, most), least)


class Pacing:
    """Paces the connections over which a rank sends messages together. All methods are
    thread-safe.
    """

    def __init__(self, connections: Set[Connection] = frozenset()) -> None:
        self._connections = list(connections)
        self._before: list[Counters] = []
        self._pace = Pace()
        self._limit: float | None = None
        self._lock = threading.Lock()

    def prepare(self, sizes: Sequence[int]) -> None:
        """Sets the rate for the next messages based on measurements of the previous messages. Call
        this method before sending.
        """
        nbytes = sum(sizes)
        if not self._connections or not nbytes:
            return
        # If a connection is gone, waiting for its message raises the error.
        with self._lock, suppress(OSError):
            if nbytes >= _SHORTEST:
                self._learn()
            rate = self._pace.bytes_per_s
            limit = None
            if rate is not None and nbytes >= max(_SHORTEST, rate * _SHORTEST_S):
                # The largest message should end when all others do.
                limit = rate * max(sizes) / nbytes
            if limit != self._limit:
                for connection in self._connections:
                    connection.limit(limit)
                self._limit = limit

    def _learn(self) -> None:
        counters = [connection.counters() for connection in self._connections]
        before = self._before or counters
        self._before = counters
        since = [after.since(then) for then, after in zip(before, counters, strict=True)]
        # Connections that carried less carried only control vectors, or no messages at all.
        least = max(counters.nbytes for counters in since) / 4
        carriers = [counters for counters in since if counters.nbytes > least]
        if carriers:
            self._pace.learn(Sent.over(carriers))
