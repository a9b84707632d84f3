"""On which address a rank listens: gloo's choice within a worker group, and perhaps another one between groups.

gloo takes the interface that ``GLOO_SOCKET_IFNAME`` names, and otherwise the address of the host name. Where the
network inside a worker group is faster than the one between groups, ``SDILOCO_EXCHANGE_INTERFACE`` names the interface
for the process groups that join worker groups. It differs between machines, so it is no argument of the strategy.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GLOO = "GLOO_SOCKET_IFNAME"
EXCHANGE = "SDILOCO_EXCHANGE_INTERFACE"

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def group_address() -> str:
    """Returns the address on which gloo listens for ranks of the same worker group."""
    return _chosen(GLOO)[1] if os.environ.get(GLOO) else _address_of_host()


def exchange_address() -> str:
    """Returns the address on which gloo listens for ranks of other worker groups."""
    return _chosen(EXCHANGE)[1] if has_exchange_interface() else group_address()


def has_exchange_interface() -> bool:
    """Returns whether ``SDILOCO_EXCHANGE_INTERFACE`` names an interface for what joins worker groups."""
    return bool(os.environ.get(EXCHANGE))


@contextmanager
def for_exchange() -> Iterator[None]:
    """Lets gloo listen on the interface for the exchange, while process groups that join worker groups are made."""
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
    """Returns name and address of the interface that a variable chooses; that of the exchange may give the address."""
    given = os.environ[variable]
    if sys.platform != "linux":
        raise ValueError(f"{variable}={given!r}: interfaces can be chosen on Linux only. Leave {variable} out.")
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
        f"{variable}={given!r} is no interface with an IPv4 address on {socket.gethostname()}, which has {known}. Set"
        f" {variable} to one of these on this machine."
    )


def _address_of_host() -> str:
    """Returns what gloo chooses: the first address of the host name that this machine has, otherwise the loopback."""
    try:
        known = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        known = []
    for family, kind, protocol, _, place in known:
        try:
            with socket.socket(family, kind, protocol) as trying:
                trying.bind(place)
        except OSError:
            continue
        return str(place[0])
    return "127.0.0.1"
