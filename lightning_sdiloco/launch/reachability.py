"""On which address a rank listens, and whether all others reach it, before process groups are made.

gloo takes the interface that ``GLOO_SOCKET_IFNAME`` names, and otherwise the address of the host
name. Where the network inside a worker group is faster than the one between groups,
``SDILOCO_EXCHANGE_INTERFACE`` names the interface for the process groups that join worker groups.
It differs between machines, so it is no argument of the strategy.

[Note: reachability first] A process group connects its ranks when it is made, or with its first
collective. If a rank cannot be reached, the process group waits for its whole timeout, and its
error names no address. So every rank first opens a port on the address on which gloo will listen,
and all others connect to it. Each pair is tried in both directions, since which of two ranks calls
the other is up to gloo.
"""

import ipaddress
import logging
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_sdiloco.launch.rendezvous import Rendezvous, reason, try_to_connect

_log = logging.getLogger(__name__)

GLOO = "GLOO_SOCKET_IFNAME"
EXCHANGE = "SDILOCO_EXCHANGE_INTERFACE"

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def group_address() -> str:
    """Returns the address on which gloo listens for ranks of the same worker group."""
    if os.environ.get(GLOO):
        return _chosen(GLOO)[1]
    # What gloo chooses: the first address of the host name that this machine has, otherwise the
    # loopback.
    try:
        known = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        known = []
    for family, kind, protocol, _, place in known:
        with suppress(OSError), socket.socket(family, kind, protocol) as trying:
            trying.bind(place)
            return str(place[0])
    return "127.0.0.1"


def exchange_address() -> str:
    """Returns the address on which gloo listens for ranks of other worker groups."""
    return _chosen(EXCHANGE)[1] if has_exchange_interface() else group_address()


def has_exchange_interface() -> bool:
    """Returns whether ``SDILOCO_EXCHANGE_INTERFACE`` names an interface for what joins worker
    groups.
    """
    return bool(os.environ.get(EXCHANGE))


@contextmanager
def for_exchange() -> Iterator[None]:
    """Makes gloo listen on the interface for the exchange, while process groups that join worker
    groups are made.
    """
    if not has_exchange_interface():
        yield
        return
    before = os.environ.get(GLOO)
    os.environ[GLOO] = _chosen(EXCHANGE)[0]
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO]
        else:
            os.environ[GLOO] = before


def _chosen(variable: str) -> tuple[str, str]:
    """Returns name and address of the interface that a variable chooses; the exchange's may give
    the address.
    """
    given = os.environ[variable]
    if sys.platform != "linux":
        raise ValueError(
            f"{variable}={given!r}: interfaces can be chosen only on Linux. Leave {variable} out."
        )
    import fcntl  # it does not exist on every system

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    for name, address in found.items():
        # gloo takes a list of interfaces, and every connection uses one of them.
        if name == given.partition(",")[0] or (variable == EXCHANGE and address == given):
            return name, address
    known = ", ".join(f"{name} ({address})" for name, address in found.items())
    raise ValueError(
        f"{variable}={given!r} is not an interface with an IPv4 address on {socket.gethostname()},"
        f" which has {known}. Set {variable} to one of these on this machine."
    )


# Whether all ranks reach each other

# How long it may take to connect to one rank, and for each send or receive after that.
SECONDS = 10.0

# How many are tried at once. A rank that reaches no other needs SECONDS for each batch of this many
# other ranks.
_CONNECTIONS = 128

_SHOWN = 8

_TOKEN_BYTES = 16


class BrokenConnection(NamedTuple):
    source: int
    target: int
    address: str
    why: str


class Endpoints(NamedTuple):
    """The addresses on which a rank listens, as it announces them."""

    host: str
    group: int
    token: str
    exchange: tuple[str, int]
    inside: tuple[str, int]
    error: str = ""


class Listener(ThreadingTCPServer):
    """Listens on an address and answers every connection, in its own thread."""

    daemon_threads = True
    request_queue_size = _CONNECTIONS

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), BaseRequestHandler)
        self._serve = serve
        self.port = int(self.server_address[1])
        threading.Thread(
            target=self.serve_forever, args=(0.02,), name="sdiloco-listener", daemon=True
        ).start()

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(SECONDS)
        try:
            self._serve(request)
        except OSError as error:
            _log.debug("A connection ended: %s", error)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


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
    names = [
        f"rank {rank} (worker group {own.group}, {own.host})" for rank, own in enumerate(endpoints)
    ]
    pairs = {(one.source, one.target) for one in broken}
    lines = [
        f"{len(broken)} of {len(names) * (len(names) - 1)} connections between ranks cannot be"
        " made:"
    ]
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
    host = socket.gethostname()
    token = secrets.token_hex(_TOKEN_BYTES)
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
        errors = [
            f"rank {rank} on {one.host}: {one.error}"
            for rank, one in enumerate(endpoints)
            if one.error
        ]
        if errors:
            raise ValueError(
                f"{len(errors)} ranks cannot listen for others: {'; '.join(errors[:_SHOWN])}"
            )
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
    own = endpoints[source]
    other = endpoints[target]
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
    return BrokenConnection(
        source, target, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", why
    )


def advice(broken: Sequence[BrokenConnection]) -> str:
    """Returns what to do about connections that cannot be made."""
    hosts = [one.address.rpartition(":")[0].strip("[]") for one in broken]
    loopback = [
        one
        for one, host in zip(broken, hosts, strict=True)
        if ipaddress.ip_address(host).is_loopback
    ]
    if loopback:
        return (
            f"Rank {loopback[0].target} listens on a loopback address, which only its own machine"
            " reaches: its host name stands for that address there. Set GLOO_SOCKET_IFNAME to the"
            " interface that the others reach."
        )
    return (
        "Open all TCP ports between these machines in both directions: gloo listens on any port"
        " the system gives it. If"
        " a machine has several addresses, choose the interface with GLOO_SOCKET_IFNAME, or with"
        " SDILOCO_EXCHANGE_INTERFACE for the traffic between worker groups."
    )
