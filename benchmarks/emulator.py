"""Connects network namespaces by slow links, as a star of sites whose packets are delayed as on
real links.

This is a separate process, started by `benchmarks.links`. It needs root, Linux and only the
standard library. Each site has a TUN device, and a packet that is read from one device is written
to another at the time at which it would arrive. TCP passes segments of up to 64 KB, which are
counted as the packets of 1500 bytes that they represent. So a link of 1 Gbit/s costs a third of a
core.

A line of JSON on standard input changes the link of one site. It contains the site's number as
``site``, and fields of `Site`.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN = 1
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_ETHERNET = 14
_AT_ONCE = 16  # packets that are read from one site before the next site's turn
_VNET = struct.Struct("<BBHH")  # <linux/virtio_net.h>, of its 10 bytes the first 6
_PR_SET_PDEATHSIG = 1
_FROM, _TO = (
    slice(22, 26),
    slice(26, 30),
)  # the addresses in a packet of IPv4, behind the header of virtio


@dataclass
class Site:
    """A site: its link to the star, which is the same in both directions except for `up_rate` and
    for cuts.
    """

    device: int
    rate: float
    loss: float
    up_rate: float | None = None
    cut_out: bool = False
    cut_in: bool = False
    nat: bool = False
    up: float = 0.0
    down: float = 0.0
    arrived: dict[int, float] = field(default_factory=dict)
    flows: set[bytes] = field(default_factory=set)

    @property
    def sends(self) -> float:
        """The bytes that it can send per second; 0 means unlimited."""
        return self.rate if self.up_rate is None else self.up_rate

    def change(self, **fields: Any) -> None:
        """Changes the link. If a NAT is named, it loses its state."""
        if "nat" in fields:
            self.flows.clear()
        for name, value in fields.items():
            setattr(self, name, value)

    def lets_out(self, packet: bytes) -> bool:
        if self.nat and _begins(packet):
            self.flows.add(_flow(packet, _FROM, _TO))
        return not self.cut_out and (not self.nat or _flow(packet, _FROM, _TO) in self.flows)

    def lets_in(self, packet: bytes) -> bool:
        return not self.cut_in and (not self.nat or _flow(packet, _TO, _FROM) in self.flows)


def _flow(packet: bytes, inside: slice, outside: slice) -> bytes:
    """Identifies the connection of a packet for a NAT, in either direction: addresses and ports."""
    ports = 10 + 4 * (packet[10] & 15)
    port = {_FROM.start: packet[ports : ports + 2], _TO.start: packet[ports + 2 : ports + 4]}
    return packet[inside] + port[inside.start] + packet[outside] + port[outside.start]


def _begins(packet: bytes) -> bool:
    """Returns whether a packet begins a connection: the first packet of TCP, or any packet of
    another protocol.
    """
    return (
        packet[19] != socket.IPPROTO_TCP or packet[10 + 4 * (packet[10] & 15) + 13] & 0x12 == 0x02
    )


@dataclass(frozen=True)
class Link:
    """The settings of all links: the delay between two sites, and the length of queues, in
    seconds.
    """

    delay: float
    queue: float


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    choices = json.loads(sys.argv[1])
    site_link = {name: choices["link"].pop(name) for name in ("rate", "loss")}
    link = Link(**choices["link"])
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    sites = [Site(_device(libc, home, name, host), **site_link) for name, host in choices["sites"]]
    hosts = {
        socket.inet_aton(host): site
        for (_, host), site in zip(choices["sites"], sites, strict=True)
    }
    os.nice(-10)  # waiting for the processor would make links slower
    print("ready", flush=True)
    Star(link, sites, hosts).run()


def _device(libc: Any, home: int, name: str, host: str) -> int:
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        device, _TUNSETIFF, struct.pack("16sH22x", b"wan0", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    )
    fcntl.ioctl(device, _TUNSETOFFLOAD, 1 | 2)
    for words in (
        "link set lo up",
        f"addr add {host}/24 dev wan0",
        "link set wan0 mtu 1500 txqueuelen 10000 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    libc.setns(home, _CLONE_NEWNET)
    return device


class Star:
    """The packets on their way."""

    def __init__(self, link: Link, sites: list[Site], hosts: dict[bytes, Site]) -> None:
        self._link = link
        self._sites = {site.device: site for site in sites}
        self._hosts = hosts
        # The time, a number that keeps the order, whether it has passed the receiver's link,
        # sender, receiver, bytes, packet.
        self._waiting: list[tuple[float, int, bool, Site, Site, int, bytes]] = []
        self._number = 0

    def run(self) -> None:
        stdin = sys.stdin.fileno()
        devices = [*self._sites, stdin]
        while True:
            wait = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for device in select.select(devices, [], [], wait)[0]:
                if device == stdin:
                    lines = os.read(stdin, 1 << 16)
                    self._change(lines)
                    devices = devices if lines else list(self._sites)
                else:
                    self._read(self._sites[device])
            self._deliver()

    def _change(self, lines: bytes) -> None:
        sites = list(self._sites.values())
        for line in lines.splitlines():
            change = json.loads(line)
            sites[change.pop("site")].change(**change)

    def _read(self, site: Site) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(site.device, 70_000)
            except BlockingIOError:
                return
            to = self._hosts.get(packet[26:30])
            if packet[10] >> 4 == 4 and to is not None and to is not site and site.lets_out(packet):
                self._send(site, to, packet)

    def _send(self, site: Site, to: Site, packet: bytes) -> None:
        _, segmented, header, size = _VNET.unpack_from(packet)
        length = len(packet) - 10
        count = 1
        wire = length + _ETHERNET
        if segmented and size:
            count = -(-(length - header) // size)
            wire = length - header + count * (header + _ETHERNET)
        moment = time.monotonic()
        link = self._link
        if site.sends:
            if site.up - moment > link.queue:
                return
            moment = site.up = max(moment, site.up) + wire / site.sends
        loss = max(site.loss, to.loss)
        if loss and random.random() < 1 - (1 - loss) ** count:
            return
        moment = site.arrived[to.device] = max(
            moment + link.delay, site.arrived.get(to.device, 0.0)
        )
        self._wait(moment, False, site, to, wire, packet)

    def _wait(
        self, moment: float, through: bool, site: Site, to: Site, wire: int, packet: bytes
    ) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (moment, self._number, through, site, to, wire, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            moment, _, through, site, to, wire, packet = heapq.heappop(self._waiting)
            if not through and not to.lets_in(packet):
                continue
            if to.rate and not through:
                if to.down - moment > self._link.queue:
                    continue
                # A packet from an equally fast link waits only behind packets of other sites.
                sent_by = moment - wire / site.sends if site.sends else moment
                to.down = max(max(sent_by, to.down) + wire / to.rate, moment)
                if to.down > moment:
                    self._wait(to.down, True, site, to, wire, packet)
                    continue
            try:
                os.write(to.device, packet)
            except OSError:
                continue


if __name__ == "__main__":
    main()
