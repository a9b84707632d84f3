"""On which address a rank listens: gloo's choice for what stays in a worker group, and one of its own between groups.

gloo takes the interface that ``GLOO_SOCKET_IFNAME`` names, and otherwise the address of the host name. Where a worker
group has a faster network than the way between groups, ``SDILOCO_EXCHANGE_INTERFACE`` names the interface for the
process groups that join worker groups; it is another one on every machine, so it is no argument of the strategy.
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
    """The address on which gloo listens for ranks of the same worker group.

    Raises:
        ValueError: If ``GLOO_SOCKET_IFNAME`` names no interface with an IPv4 address.
    """
    return _address(GLOO, os.environ.get(GLOO, ""))


def exchange_address() -> str:
    """The address on which gloo listens for ranks of other worker groups.

    Raises:
        ValueError: If a variable names no interface with an IPv4 address.
    """
    return _address(EXCHANGE, _exchange_interface()) if os.environ.get(EXCHANGE) else group_address()


@contextmanager
def for_exchange() -> Iterator[None]:
    """Lets gloo listen on the interface for the exchange while process groups are made that join worker groups.

    Raises:
        ValueError: If ``SDILOCO_EXCHANGE_INTERFACE`` names no interface.
    """
    if not os.environ.get(EXCHANGE):
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
    """The name of the interface that a name or an address stands for."""
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
    # gloo takes a list, of which every connection uses one.
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
    """The interfaces of this machine that have an IPv4 address, and that address."""
    import fcntl  # not everywhere

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
    """As gloo chooses: the first address of the host name that is one of this machine, otherwise the loopback."""
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
