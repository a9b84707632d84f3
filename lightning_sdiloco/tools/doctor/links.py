"""Measures the links between worker groups: round trip, and the bandwidth of one TCP connection."""

import socket
import statistics
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from lightning_sdiloco.launch import Listener, Rendezvous, reason, try_to_connect

# How long one direction is measured. The second half counts: a connection starts slowly.
SECONDS = 3.0

_PINGS = 10
_BLOCK = 1 << 20
_RATE = struct.Struct(">d")


class MeasuredLink(NamedTuple):
    """One direction between two worker groups."""

    source: int
    target: int
    round_trip: float = 0.0
    bits_per_second: float = 0.0
    error: str = ""


def measure(
    rendezvous: Rendezvous, groups: int, group: int, speaks: bool, address: str, seconds: float = SECONDS
) -> list[MeasuredLink]:
    """Measures between the first ranks of all worker groups. All ranks must call it."""
    listener = Listener(address, lambda connection: _serve(connection, seconds))
    try:
        told = rendezvous.all_gather("links", [group, address, listener.port] if speaks else None)
        endpoints = {one[0]: (str(one[1]), int(one[2])) for one in told if one is not None}
        round_trips = {other: _round_trip(endpoints[other]) for other in endpoints if other != group} if speaks else {}
        rendezvous.all_gather("round trips", None)
        links = []
        for step in range(1, groups):
            other = (group + step) % groups
            if speaks:
                links.append(_link(group, other, endpoints[other], round_trips[other], seconds))
            rendezvous.all_gather(f"round {step}", None)
        return [MeasuredLink(*link) for rank in rendezvous.all_gather("measured", links) for link in rank]
    finally:
        listener.close()


def _link(group: int, other: int, address: tuple[str, int], round_trip: float | str, seconds: float) -> MeasuredLink:
    if isinstance(round_trip, str):
        return MeasuredLink(group, other, error=round_trip)
    rates: list[float] = []
    error = try_to_connect(*address, 4 * seconds + 10, lambda connection: rates.append(_sent(connection, seconds)))
    return (
        MeasuredLink(group, other, error=reason(error)) if error else MeasuredLink(group, other, round_trip, rates[0])
    )


def _round_trip(address: tuple[str, int]) -> float | str:
    seconds: list[float] = []

    def ping(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            start = time.monotonic()
            connection.sendall(b"p")
            _receive(connection, 1)
            seconds.append(time.monotonic() - start)

    error = try_to_connect(*address, 10.0, ping)
    return statistics.median(seconds) if error is None else reason(error)


def _sent(connection: socket.socket, seconds: float) -> float:
    """Sends for some seconds and returns the bits per second that the other side has counted."""
    block = bytes(_BLOCK)
    deadline = time.monotonic() + seconds
    connection.sendall(b"s")
    while time.monotonic() < deadline:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)
    return float(_RATE.unpack(_receive(connection, _RATE.size))[0])


def _serve(connection: socket.socket, seconds: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while kind := connection.recv(1):
        if kind == b"p":
            connection.sendall(kind)
        else:
            connection.sendall(_RATE.pack(_received(connection.recv_into, seconds)))
            return


def _received(receive: Callable[[memoryview], int], seconds: float) -> float:
    """Returns the bits per second that come in the second half of the time."""
    block = memoryview(bytearray(_BLOCK))
    start = time.monotonic()
    middle, counted, last = None, 0, start
    while count := receive(block):
        last = time.monotonic()
        if middle is not None:
            counted += count
        elif last - start > seconds / 2:
            middle = last
    return 8 * counted / (last - middle) if middle is not None and last > middle else 0.0


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received
