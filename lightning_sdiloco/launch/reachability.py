"""The addresses that a rank listens on, and a check that all ranks can reach each other.

gloo uses the interface in ``GLOO_SOCKET_IFNAME`` or, if that variable is not set, the address that
the host name resolves to. If worker groups have a faster internal network,
``SDILOCO_EXCHANGE_INTERFACE`` names the interface for the process groups between worker groups. The
interface is not an argument of the strategy because it may differ between machines.

[Note: reachability first] A process group connects its ranks when it is created, or in its first
collective. If a rank cannot be reached, the process group waits until its timeout, and the error
does not name an address. Therefore, every rank first opens a port on the address that gloo will
listen on, and all other ranks connect to this port. Each pair of ranks is tested in both
directions, because gloo chooses which rank connects to the other.
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
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_sdiloco.launch.rendezvous import Rendezvous, reason, try_to_connect

_log = logging.getLogger(__name__)

GLOO = "GLOO_SOCKET_IFNAME"
EXCHANGE = "SDILOCO_EXCHANGE_INTERFACE"

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def group_address() -> str:
    """Returns the address that gloo listens on for ranks of the same worker group."""
    if os.environ.get(GLOO):
        return _chosen(GLOO)[1]
    # gloo chooses the first address of the host name that this machine has, or the loopback address
    # if there is none.
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return str(address[0])
    return "127.0.0.1"


def exchange_address() -> str:
    """Returns the address that gloo listens on for ranks of other worker groups."""
    if has_exchange_interface():
        return _chosen(EXCHANGE)[1]
    return group_address()


def has_exchange_interface() -> bool:
    """Returns whether ``SDILOCO_EXCHANGE_INTERFACE`` is set."""
    return bool(os.environ.get(EXCHANGE))


@contextmanager
def for_exchange() -> Iterator[None]:
    """Makes gloo listen on the interface for the exchange while process groups are created."""
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
    """Returns the name and address of the interface that a variable selects.
    ``SDILOCO_EXCHANGE_INTERFACE`` may contain an address instead of a name.
    """
    choice = os.environ[variable]
    if sys.platform != "linux":
        raise ValueError(
            f"{variable}={choice!r}: interfaces can be selected only on Linux. Unset {variable}."
        )
    interfaces = _interfaces()
    for name, address in interfaces.items():
        # gloo accepts a list of interfaces, and every connection uses one of them.
        if name == choice.partition(",")[0] or (variable == EXCHANGE and address == choice):
            return name, address
    shown = ", ".join(f"{name} ({address})" for name, address in interfaces.items())
    raise ValueError(
        f"{variable}={choice!r} is not an interface with an IPv4 address on {socket.gethostname()}."
        f" The interfaces are {shown}. On this machine, set {variable} to one of these interfaces."
    )


def _interfaces() -> dict[str, str]:
    """Returns the interfaces of this Linux machine with their IPv4 addresses."""
    import fcntl  # not available on every system

    addresses = dict[str, str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


# Connections between all ranks

# The time limit for connecting to one rank, and for each send or receive after that.
SECONDS = 10.0

# The number of connections that are tried at the same time. If a rank cannot reach any other rank,
# each batch of connections takes SECONDS.
_CONNECTIONS = 128

_SHOWN = 8

_TOKEN_BYTES = 16


class BrokenConnection(NamedTuple):
    source: int
    target: int
    address: str
    why: str


class Endpoints(NamedTuple):
    """The addresses that a rank announces to all other ranks."""

    host: str
    group: int
    token: str
    exchange: tuple[str, int]
    inside: tuple[str, int]
    error: str = ""


class Listener(ThreadingTCPServer):
    """Listens on an address and answers every connection in a separate thread."""

    daemon_threads = True
    request_queue_size = _CONNECTIONS

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        if ":" in address:
            self.address_family = socket.AF_INET6
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
    """Raises an error if ranks cannot reach each other. All ranks must call this function.

    Args:
        rendezvous: The rendezvous of all ranks.
        group: The worker group of this rank.
        exchange: Returns the address that this rank listens on for ranks of other groups.
        inside: Returns the address that this rank listens on for ranks of the same group.
    """
    endpoints, broken = find_broken_connections(rendezvous, group, exchange, inside)
    if not broken:
        return
    names = [
        f"rank {rank} (worker group {endpoint.group}, {endpoint.host})"
        for rank, endpoint in enumerate(endpoints)
    ]
    pairs = {(connection.source, connection.target) for connection in broken}
    lines = [
        f"{len(broken)} of {len(names) * (len(names) - 1)} connections between ranks cannot be"
        " made:"
    ]
    for source, target, address, why in broken[:_SHOWN]:
        back = "works"
        if (target, source) in pairs:
            back = "also fails"
        way = f"{names[source]} -> {names[target]} at {address}"
        lines.append(f"  {way}: {why}; the other direction {back}")
    if len(broken) > _SHOWN:
        lines.append(f"  and {len(broken) - _SHOWN} more")
    raise ValueError("\n".join([*lines, advice(broken)]))


def find_broken_connections(
    rendezvous: Rendezvous, group: int, exchange: Callable[[], str], inside: Callable[[], str]
) -> tuple[list[Endpoints], list[BrokenConnection]]:
    """Tries all connections for `require_reachable`. All ranks must call this function."""
    token = secrets.token_hex(_TOKEN_BYTES)
    with ExitStack() as listeners:

        def listen(address: str) -> tuple[str, int]:
            listener = Listener(address, lambda connection: connection.sendall(token.encode()))
            listeners.callback(listener.close)
            return address, listener.port

        endpoint = Endpoints(socket.gethostname(), group, token, ("", 0), ("", 0))
        try:
            endpoint = endpoint._replace(exchange=listen(exchange()), inside=listen(inside()))
        except (ValueError, OSError) as error:
            endpoint = endpoint._replace(error=str(error))
        endpoints = [Endpoints(*fields) for fields in rendezvous.all_gather("endpoints", endpoint)]
        _require_listening(endpoints)
        targets = [rank for rank in range(len(endpoints)) if rank != rendezvous.rank]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            tried = pool.map(lambda target: _try(rendezvous.rank, target, endpoints), targets)
            broken = [connection for connection in tried if connection is not None]
        by_rank = rendezvous.all_gather("unreached", broken)
        return endpoints, [BrokenConnection(*fields) for fields in chain.from_iterable(by_rank)]


def _require_listening(endpoints: Sequence[Endpoints]) -> None:
    errors = [
        f"rank {rank} on {endpoint.host}: {endpoint.error}"
        for rank, endpoint in enumerate(endpoints)
        if endpoint.error
    ]
    if errors:
        raise ValueError(
            f"{len(errors)} ranks cannot listen for other ranks: {'; '.join(errors[:_SHOWN])}"
        )


def _try(source: int, target: int, endpoints: Sequence[Endpoints]) -> BrokenConnection | None:
    """Connects to another rank, and returns the connection if it fails."""
    endpoint = endpoints[target]
    host, port = endpoint.exchange
    if endpoint.group == endpoints[source].group:
        host, port = endpoint.inside
    answer = bytearray()

    def read(connection: socket.socket) -> None:
        while len(answer) < len(endpoint.token):
            part = connection.recv(len(endpoint.token))
            if not part:
                break
            answer.extend(part)

    error = try_to_connect(host, port, SECONDS, read)
    if error is None and bytes(answer) == endpoint.token.encode():
        return None
    why = "something else answers there"
    if error is not None:
        why = reason(error)
    if why == "no answer":
        why = f"no answer within {SECONDS:g} s"
    if ":" in host:
        host = f"[{host}]"
    return BrokenConnection(source, target, f"{host}:{port}", why)


def advice(broken: Sequence[BrokenConnection]) -> str:
    """Returns advice for failed connections."""
    for connection in broken:
        host = connection.address.rpartition(":")[0].strip("[]")
        if ipaddress.ip_address(host).is_loopback:
            return (
                f"Rank {connection.target} listens on a loopback address, which only its own"
                " machine can reach, because its host name resolves to that address. Set"
                " GLOO_SOCKET_IFNAME to an interface that the other machines can reach."
            )
    return (
        "Open all TCP ports between these machines in both directions, because gloo uses any free"
        " port. If a machine has multiple addresses, select the interface with GLOO_SOCKET_IFNAME,"
        " or with SDILOCO_EXCHANGE_INTERFACE for the traffic between worker groups."
    )
