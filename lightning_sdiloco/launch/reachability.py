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
    """Raises an error if ranks cannot reach each other. All ranks must call it.

    Args:
        rendezvous: Where all ranks meet.
        group: The worker group of this rank.
        exchange: Chooses the address on which it listens for ranks of other groups.
        inside: Chooses that for ranks of its own group.
    """
    endpoints, broken = find_broken_connections(rendezvous, group, exchange, inside)
    if not broken:
        return
    names = [f"rank {rank} (worker group {own.group}, {own.host})" for rank, own in enumerate(endpoints)]
    pairs = {(one.source, one.target) for one in broken}
    lines = [f"{len(broken)} of {len(names) * (len(names) - 1)} connections between ranks cannot be made:"]
    for one in broken[:_SHOWN]:
        back = "fails too" if (one.target, one.source) in pairs else "works"
        way = f"{names[one.source]} -> {names[one.target]} at {one.address}"
        lines.append(f"  {way}: {one.why}; the other direction {back}")
    if len(broken) > _SHOWN:
        lines.append(f"  and {len(broken) - _SHOWN} more")
    raise ValueError("\n".join([*lines, advice(broken)]))


def find_broken_connections(
    rendezvous: Rendezvous, group: int, exchange: Callable[[], str], inside: Callable[[], str]
) -> tuple[list[Endpoints], list[BrokenConnection]]:
    """Tries all connections; see `require_reachable`. All ranks must call it."""
    host, token = socket.gethostname(), secrets.token_hex(_TOKEN_BYTES)
    listeners: list[Listener] = []

    def listen(address: str) -> tuple[str, int]:
        listeners.append(Listener(address, lambda connection: connection.sendall(token.encode())))
        return address, listeners[-1].port

    try:
        try:
            own = Endpoints(host, group, token, listen(exchange()), listen(inside()))
        except (ValueError, OSError) as error:
            own = Endpoints(host, group, token, ("", 0), ("", 0), str(error))
        endpoints = [Endpoints(*told) for told in rendezvous.all_gather("endpoints", own)]
        errors = [f"rank {rank} on {one.host}: {one.error}" for rank, one in enumerate(endpoints) if one.error]
        if errors:
            raise ValueError(f"{len(errors)} ranks cannot listen for others: {'; '.join(errors[:_SHOWN])}")
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            others = [other for other in range(len(endpoints)) if other != rendezvous.rank]
            tried = pool.map(lambda other: _try(rendezvous.rank, other, endpoints), others)
            broken = [one for one in tried if one is not None]
        told = rendezvous.all_gather("unreached", broken)
        return endpoints, [BrokenConnection(*one) for of_rank in told for one in of_rank]
    finally:
        for listener in listeners:
            listener.close()


def _try(source: int, target: int, endpoints: Sequence[Endpoints]) -> BrokenConnection | None:
    """Connects to another rank, and returns what is broken, if anything."""
    own, other = endpoints[source], endpoints[target]
    host, port = other.inside if own.group == other.group else other.exchange
    answer = bytearray()

    def read(connection: socket.socket) -> None:
        while len(answer) < len(other.token) and (part := connection.recv(len(other.token))):
            answer.extend(part)

    error = try_to_connect(host, port, SECONDS, read)
    if error is None and bytes(answer) == other.token.encode():
        return None
    why = "something else answers there" if error is None else reason(error)
    why = f"no answer within {SECONDS:g} s" if why == "no answer" else why
    return BrokenConnection(source, target, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", why)


def advice(broken: Sequence[BrokenConnection]) -> str:
    """Returns what to do about connections that cannot be made."""
    hosts = [one.address.rpartition(":")[0].strip("[]") for one in broken]
    loopback = [one for one, host in zip(broken, hosts, strict=True) if ipaddress.ip_address(host).is_loopback]
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
