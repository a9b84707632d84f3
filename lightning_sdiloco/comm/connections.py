"""TCP connections that a library has opened in this process: what the kernel counts, and how fast they may send.

Linux only; elsewhere none are found.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_MAX_PACING_RATE = 47
_UNLIMITED = 2**64 - 1
# Bytes of the kernel's `struct tcp_info` up to what is read here (Linux 4.10), and where each number stands.
_INFO_BYTES = 176
_FIELDS = struct.Struct("=24x I 40x I 28x I 16x Q 20x I 4x I Q Q")


class Counters(NamedTuple):
    """Tells what a connection has sent so far."""

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
    """A connection of this process, whoever has opened it."""

    descriptor: int
    inode: int

    @staticmethod
    def of_process() -> "set[Connection]":
        """Returns all that this process has, over IPv4 and IPv6."""
        found, descriptors = set[Connection](), Path("/proc/self/fd")
        # A default timeout would make the owner's socket one that does not block, as soon as Python looks at it.
        if socket.getdefaulttimeout() is not None or not descriptors.is_dir():
            return found
        for name in os.listdir(descriptors):
            with suppress(OSError):
                about = os.fstat(int(name))
                one = Connection(int(name), about.st_ino)
                if stat.S_ISSOCK(about.st_mode) and one._is_tcp():
                    found.add(one)
        return found

    def counters(self) -> Counters:
        """Returns what the kernel has counted."""
        with self._opened() as opened:
            told = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(told) < _INFO_BYTES:
            raise OSError("This Linux is older than 4.10, and does not tell how long a connection was busy.")
        on_the_way, trip, again, acked, shortest, packets, rate, busy = _FIELDS.unpack_from(told)
        return Counters(acked, packets, again, 1e-6 * busy, 1e-6 * trip, 1e-6 * shortest, float(rate), on_the_way)

    def limit(self, bytes_per_s: float | None) -> None:
        """Lets it send that fast at most; None: as fast as its congestion control allows."""
        rate = _UNLIMITED if bytes_per_s is None else max(1, int(bytes_per_s))
        with self._opened() as opened:
            opened.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", rate))

    def _is_tcp(self) -> bool:
        with self._opened() as opened:
            opened.getpeername()
            return opened.type == socket.SOCK_STREAM and opened.family in (socket.AF_INET, socket.AF_INET6)

    @contextmanager
    def _opened(self) -> Iterator[socket.socket]:
        copy = os.dup(self.descriptor)
        if os.fstat(copy).st_ino != self.inode:
            os.close(copy)
            raise OSError(f"The connection of descriptor {self.descriptor} is no longer there.")
        with socket.socket(fileno=copy) as opened:
            yield opened
