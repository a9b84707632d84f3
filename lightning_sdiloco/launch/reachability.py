"""Whether every rank can reach the others, asked before process groups are made.

[Note: asked before] A process group connects its ranks when it is made, or with its first collective. Where one of them
cannot be reached it waits for its whole timeout, and its error names no address. So every rank first opens a port as
gloo will, on the same address, and every other one connects to it, in both directions: which of two ranks calls the
other is up to gloo.
"""

import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from lightning_sdiloco.launch.rendezvous import Rendezvous, reason, try_to_connect

_log = logging.getLogger(__name__)

# What connecting to one rank may take, and each part of the talk with it.
SECONDS = 10.0

# At once. A rank that reaches nobody is done after as many rounds of SECONDS as this goes into the other ranks.
_CONNECTIONS = 128

_SHOWN = 8

_TOKEN_BYTES = 16


class Failure(NamedTuple):
    """A connection that cannot be made.

    Attributes:
        source: The rank that tried.
        target: The rank that it tried to reach.
        address: Address and port at which the target listened.
        why: What went wrong.
    """

    source: int
    target: int
    address: str
    why: str


class Place(NamedTuple):
    """Where a rank stands, as it tells the others.

    Attributes:
        host: The name of its machine.
        group: Its worker group.
        token: What it answers to who connects.
        exchange: Address and port for other worker groups.
        inside: Address and port for its own worker group.
        error: Why it cannot listen; empty if it can.
    """

    host: str
    group: int
    token: str
    exchange: tuple[str, int]
    inside: tuple[str, int]
    error: str = ""

    def address_for(self, other: "Place") -> tuple[str, int]:
        """Where a rank of another place, or the same, finds this one."""
        address, port = self.inside if self.group == other.group else self.exchange
        return str(address), int(port)


class Listener:
    """Listens on an address and answers everybody, in a thread of its own.

    Args:
        address: The address.
        serve: What to do with each connection.
    """

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_CONNECTIONS)
        self._serve = serve
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="sdiloco-listener", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        # Closing alone does not wake a thread that waits for a connection.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("The socket was not connected: %s", error)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="sdiloco-answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(SECONDS)
            try:
                self._serve(connection)
            except OSError as error:
                _log.debug("A connection ended: %s", error)


def require_reachable(meeting: Rendezvous, group: int, exchange: Callable[[], str], inside: Callable[[], str]) -> None:
    """Refuses a world in which ranks cannot reach each other. All ranks must call it.

    Args:
        meeting: The ranks.
        group: The worker group of this one.
        exchange: The address on which this rank listens for other worker groups.
        inside: The address on which it listens for its own.

    Raises:
        ValueError: On every rank, with the connections that cannot be made, or with what is wrong with an address.
    """
    places, failures = find_failures(meeting, group, exchange, inside)
    if failures:
        raise ValueError(described(failures, places))


def find_failures(
    meeting: Rendezvous, group: int, exchange: Callable[[], str], inside: Callable[[], str]
) -> tuple[list[Place], list[Failure]]:
    """Tries all connections; see `require_reachable`. All ranks must call it.

    Returns:
        Where every rank stands, and the connections that cannot be made.

    Raises:
        ValueError: On every rank, if one of them cannot listen.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    listeners: list[Listener] = []

    def listen(address: str) -> tuple[str, int]:
        listeners.append(Listener(address, lambda connection: connection.sendall(token.encode())))
        return address, listeners[-1].port

    try:
        try:
            own = Place(socket.gethostname(), group, token, listen(exchange()), listen(inside()))
        except (ValueError, OSError) as error:
            own = Place(socket.gethostname(), group, token, ("", 0), ("", 0), str(error))
        places = [Place(*told) for told in meeting.all_gather("places", own)]
        _require_listening(places)
        failed = _unreached(meeting.rank, places)
        return places, [Failure(*told) for rank in meeting.all_gather("unreached", failed) for told in rank]
    finally:
        for listener in listeners:
            listener.close()


def _require_listening(places: list[Place]) -> None:
    errors = [f"rank {rank} on {place.host}: {place.error}" for rank, place in enumerate(places) if place.error]
    if errors:
        raise ValueError(f"{len(errors)} ranks cannot listen for others: {'; '.join(errors[:_SHOWN])}")


def _unreached(rank: int, places: list[Place]) -> list[Failure]:
    """The ranks that this one cannot reach."""
    others = [other for other in range(len(places)) if other != rank]
    if not others:
        return []
    with ThreadPoolExecutor(min(len(others), _CONNECTIONS)) as pool:
        errors = pool.map(lambda other: _tried(places[other].address_for(places[rank]), places[other].token), others)
        return [
            Failure(rank, other, _shown(places[other].address_for(places[rank])), error)
            for other, error in zip(others, errors, strict=True)
            if error
        ]


def _tried(address: tuple[str, int], token: str) -> str:
    """Why an address cannot be reached; empty if it can."""
    answer = bytearray()

    def read(connection: socket.socket) -> None:
        while len(answer) < len(token) and (part := connection.recv(len(token))):
            answer.extend(part)

    error = try_to_connect(*address, SECONDS, read)
    if error is not None:
        return f"no answer within {SECONDS:g} s" if reason(error) == "no answer" else reason(error)
    return "" if bytes(answer) == token.encode() else "something else answers there"


def _shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def described(failures: list[Failure], places: list[Place]) -> str:
    """The connections that cannot be made, and what to do.

    Args:
        failures: At least one.
        places: Where every rank stands.
    """
    broken = {(failure.source, failure.target) for failure in failures}
    lines = [
        f"  {_who(failure.source, places)} -> {_who(failure.target, places)} at {failure.address}: {failure.why};"
        f" the other direction {'fails too' if (failure.target, failure.source) in broken else 'works'}"
        for failure in failures[:_SHOWN]
    ]
    if len(failures) > _SHOWN:
        lines.append(f"  and {len(failures) - _SHOWN} more")
    pairs = len(places) * (len(places) - 1)
    return "\n".join(
        [f"{len(failures)} of {pairs} connections between ranks cannot be made:", *lines, advice(failures)]
    )


def advice(failures: Sequence[Failure]) -> str:
    """What to do about connections that cannot be made."""
    loopback = [failure for failure in failures if _is_loopback(failure.address.rpartition(":")[0].strip("[]"))]
    if loopback:
        return (
            f"Rank {loopback[0].target} listens on a loopback address, where only its own machine reaches it: there the"
            " host name stands for that address. Set GLOO_SOCKET_IFNAME to the interface that the others reach."
        )
    return (
        "Open all TCP ports between these machines in both directions: gloo listens on whatever port the system gives"
        " it. If a machine has several addresses, choose the interface with GLOO_SOCKET_IFNAME, or with"
        " SDILOCO_EXCHANGE_INTERFACE for what goes between worker groups."
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _who(rank: int, places: list[Place]) -> str:
    return f"rank {rank} (worker group {places[rank].group}, {places[rank].host})"
