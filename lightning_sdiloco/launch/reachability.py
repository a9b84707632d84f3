"""Checks that every rank reaches all others, before process groups are made.

[Note: reachability first] A process group connects its ranks when it is made, or with its first collective. If a rank
cannot be reached, the process group waits for its whole timeout, and its error names no address. So every rank first
opens a port on the address on which gloo will listen, and all others connect to it. Each pair is tried in both
directions, since which of two ranks calls the other is up to gloo.
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

# How long it may take to connect to one rank, and for each send or receive after that.
SECONDS = 10.0

# How many are tried at once. A rank that reaches nobody needs SECONDS for each batch of this many other ranks.
_CONNECTIONS = 128

_SHOWN = 8

_TOKEN_BYTES = 16


class BrokenConnection(NamedTuple):
    """A connection that cannot be made."""

    source: int
    target: int
    address: str
    why: str


class Endpoints(NamedTuple):
    """The addresses on which a rank listens, as it tells the others."""

    host: str
    group: int
    token: str
    exchange: tuple[str, int]
    inside: tuple[str, int]
    error: str = ""

    def address_for(self, other: "Endpoints") -> tuple[str, int]:
        """Returns the address and port at which another rank finds this one."""
        address, port = self.inside if self.group == other.group else self.exchange
        return str(address), int(port)


class Listener:
    """Listens on an address and answers every connection, in a thread of its own."""

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_CONNECTIONS)
        self._serve = serve
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="sdiloco-listener", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
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


def require_reachable(
    rendezvous: Rendezvous, group: int, exchange: Callable[[], str], inside: Callable[[], str]
) -> None:
    """Raises an error if ranks cannot reach each other. All ranks must call it."""
    endpoints, broken = find_broken_connections(rendezvous, group, exchange, inside)
    if broken:
        raise ValueError(described(broken, endpoints))


def find_broken_connections(
    rendezvous: Rendezvous, group: int, exchange: Callable[[], str], inside: Callable[[], str]
) -> tuple[list[Endpoints], list[BrokenConnection]]:
    """Tries all connections; see `require_reachable`. All ranks must call it."""
    token = secrets.token_hex(_TOKEN_BYTES)
    listeners: list[Listener] = []

    def listen(address: str) -> tuple[str, int]:
        listeners.append(Listener(address, lambda connection: connection.sendall(token.encode())))
        return address, listeners[-1].port

    try:
        try:
            own = Endpoints(socket.gethostname(), group, token, listen(exchange()), listen(inside()))
        except (ValueError, OSError) as error:
            own = Endpoints(socket.gethostname(), group, token, ("", 0), ("", 0), str(error))
        endpoints = [Endpoints(*told) for told in rendezvous.all_gather("endpoints", own)]
        _require_listening(endpoints)
        broken = _unreached(rendezvous.rank, endpoints)
        return endpoints, [
            BrokenConnection(*told) for rank in rendezvous.all_gather("unreached", broken) for told in rank
        ]
    finally:
        for listener in listeners:
            listener.close()


def _require_listening(endpoints: list[Endpoints]) -> None:
    errors = [f"rank {rank} on {one.host}: {one.error}" for rank, one in enumerate(endpoints) if one.error]
    if errors:
        raise ValueError(f"{len(errors)} ranks cannot listen for others: {'; '.join(errors[:_SHOWN])}")


def _unreached(rank: int, endpoints: list[Endpoints]) -> list[BrokenConnection]:
    """Tries to reach all other ranks and returns the connections that cannot be made."""
    others = [other for other in range(len(endpoints)) if other != rank]
    if not others:
        return []
    with ThreadPoolExecutor(min(len(others), _CONNECTIONS)) as pool:
        errors = pool.map(
            lambda other: _try(endpoints[other].address_for(endpoints[rank]), endpoints[other].token), others
        )
        return [
            BrokenConnection(rank, other, _shown(endpoints[other].address_for(endpoints[rank])), error)
            for other, error in zip(others, errors, strict=True)
            if error
        ]


def _try(address: tuple[str, int], token: str) -> str:
    """Tries to reach an address and returns why it cannot be reached; empty if it can."""
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


def described(broken: list[BrokenConnection], endpoints: list[Endpoints]) -> str:
    """Returns a text that lists the connections that cannot be made and says what to do about them."""
    pairs = {(connection.source, connection.target) for connection in broken}
    lines = [
        f"  {_who(one.source, endpoints)} -> {_who(one.target, endpoints)} at {one.address}: {one.why};"
        f" the other direction {'fails too' if (one.target, one.source) in pairs else 'works'}"
        for one in broken[:_SHOWN]
    ]
    if len(broken) > _SHOWN:
        lines.append(f"  and {len(broken) - _SHOWN} more")
    all_pairs = len(endpoints) * (len(endpoints) - 1)
    return "\n".join(
        [f"{len(broken)} of {all_pairs} connections between ranks cannot be made:", *lines, advice(broken)]
    )


def advice(broken: Sequence[BrokenConnection]) -> str:
    """Returns what to do about connections that cannot be made."""
    loopback = [connection for connection in broken if _is_loopback(connection.address.rpartition(":")[0].strip("[]"))]
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


def _who(rank: int, endpoints: list[Endpoints]) -> str:
    return f"rank {rank} (worker group {endpoints[rank].group}, {endpoints[rank].host})"
