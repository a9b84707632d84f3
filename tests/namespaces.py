"""Sites of their own address and network counter on this machine: network namespaces joined by a
pair of interfaces.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import links

_HEADERS = 14 + 20 + 32  # Ethernet, IP, and TCP with its time stamps


@contextmanager
def two_sites() -> Iterator[list[str]]:
    """Two namespaces named after this process, with the addresses 10.79.0.1 and 10.79.0.2 on
    interface ``wire``.
    """
    names = [f"sdiloco{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {names[0]} link add name wire type veth peer name wire netns {names[1]}")
        for host, name in enumerate(names, start=1):
            _ip(f"-n {name} address add 10.79.0.{host}/24 dev wire")
            # Large packets, as a datacentre's card makes them.
            _ip(f"-n {name} link set wire mtu 65535 up")
            # Nothing gets lost here, so a late answer is no reason to send again.
            _ip(f"-n {name} route replace 10.79.0.0/24 dev wire rto_min 30s")
            settings = "net.ipv4.tcp_early_retrans=0 net.ipv4.tcp_recovery=0"
            _ip(f"netns exec {name} sysctl -qw {settings}")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        pytest.skip(f"network namespaces need root and iproute2 ({error})")
    try:
        yield names
    finally:
        _remove(names)


@contextmanager
def switched_sites(count: int) -> Iterator[list[str]]:
    """Namespaces with the addresses 10.79.0.1 and following on interface ``wire``, which a switch
    in a namespace of its own joins.
    """
    names = [f"sdiloco{os.getpid()}{side}" for side in range(count)]
    switch = f"sdiloco{os.getpid()}switch"
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add switch type bridge")
        _ip(f"-n {switch} link set switch up")
        for host, name in enumerate(names, start=1):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link add name wire type veth peer name port{host} netns {switch}")
            _ip(f"-n {name} address add 10.79.0.{host}/24 dev wire")
            _ip(f"-n {name} link set wire up")
            _ip(f"-n {switch} link set port{host} master switch up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove([*names, switch])
        pytest.skip(f"network namespaces need root and iproute2 ({error})")
    try:
        yield names
    finally:
        _remove([*names, switch])


def add_interface(name: str, interface: str, address: str) -> None:
    """Gives a namespace another interface with an address, to which the other one has no route."""
    _ip(f"-n {name} link add name {interface} type veth peer name {interface}0")
    _ip(f"-n {name} address add {address}/32 dev {interface}")
    for end in (interface, f"{interface}0"):
        _ip(f"-n {name} link set {end} up")


def lose_packets(name: str, address: str) -> None:
    """Packets of a namespace to an address get lost silently, as behind a firewall that drops
    them.
    """
    _ip(f"-n {name} route add {address}/32 dev wire")
    # A station that does not exist.
    _ip(f"-n {name} neighbour add {address} lladdr 02:00:00:00:00:01 dev wire nud permanent")


def enter(name: str) -> None:
    """Moves this process into a namespace; gloo then uses its interface ``wire``."""
    links.enter(name)
    os.environ.update(GLOO_SOCKET_IFNAME="wire", MASTER_ADDR="10.79.0.1")


def bytes_on_the_wire() -> tuple[int, int]:
    """Bytes that TCP carried over the interface ``wire`` of this process's namespace, received and
    sent.

    By the system's own counters of bytes and packets, without the packets' headers.
    """
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()]
    (numbers,) = (list(map(int, counters)) for name, *counters in lines if name == "wire:")
    return numbers[0] - _HEADERS * numbers[1], numbers[8] - _HEADERS * numbers[9]


def retransmitted() -> int:
    """Segments that TCP sent twice in this process's namespace: a late answer looks like a loss to
    it.
    """
    lines = [line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines()]
    names, values = (line for line in lines if line[0] == "Tcp:")
    return int(values[names.index("RetransSegs")])


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def _remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
