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
    return _address(GLOO, os.environ.get(GLOO, ""))


def exchange_address() -> str:
    """Returns the address on which gloo listens for ranks of other worker groups."""
    return _address(EXCHANGE, _exchange_interface()) if has_exchange_interface() else group_address()


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
    os.environ[GLOO] = _exchange_interface()
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO]
        else:
            os.environ[GLOO] = before


def _exchange_interface() -> str:
    """Returns the name of the interface that the variable names, or whose address it gives."""
    given = os.environ[EXCHANGE]
    addresses = _interfaces()
    if given in addresses:
        return given
    for name, address in addresses.items():
        if given == address:
            return name
    raise ValueError(_unknown(EXCHANGE, given))


def _address(variable: str, interface: str) -> str:
    if not interface:
        return _address_of_host()
    if sys.platform != "linux":
        raise ValueError(f"{variable}={interface!r}: interfaces can be chosen on Linux only. Leave {variable} out.")
    # gloo takes a list of interfaces, and every connection uses one of them.
    address = _interfaces().get(interface.partition(",")[0])
    if address is None:
        raise ValueError(_unknown(variable, interface))
    return address


def _unknown(variable: str, given: str) -> str:
    known = ", ".join(f"{name} ({address})" for name, address in _interfaces().items())
    return (
        f"{variable}={given!r} is no interface with an IPv4 address on {socket.gethostname()}, which has {known}. Set"
        f" {variable} to one of these on this machine."
    )


def _interfaces() -> dict[str, str]:
    """Returns the interfaces of this machine that have an IPv4 address, each with that address."""
    import fcntl  # it does not exist on every system

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


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
