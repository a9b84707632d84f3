"""What starts the processes to which faults happen."""

import multiprocessing
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.links import Links
from lightning_sdiloco.hub import add_keys, init_keys
from tests.chaos.faults import HUB
from tests.chaos.hub import serve
from tests.chaos.site import RUN, Place, train


class Process(Protocol):
    """A process, with the names that `multiprocessing` has for what can be done to it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class Federated:
    """Starts a hub and sites of a federation.

    Args:
        folder: Where they write.
        sites: The names of the sites.
        seconds: That an inner step takes at least.
        steps: After which sites end; -1: when the run does.
        links: The slow links, open, with the hub as number 0; None: the loopback.
        lease: That of the charter.
    """

    def __init__(
        self,
        folder: Path,
        sites: Sequence[str],
        seconds: float,
        steps: int = -1,
        links: Links | None = None,
        lease: float = 2.0,
    ) -> None:
        self._sites = len(sites)
        init_keys(folder / "keys", RUN)
        for site in sites:
            add_keys(folder / "keys", site)
        *ports, other = free_ports(2 + len(sites))
        # Where the hub is, and where it may be moved to, with the same ledger and store.
        address, own = ("127.0.0.1", (ports[0], other)) if links is None else (links.address(0), (29400, 29401))
        self._hubs = [f"{address}:{port}" for port in own]
        of_all = Place(folder, ",".join(self._hubs), 0, seconds, steps, lease=lease)
        self._places = {
            name: replace(of_all, port=port, namespace=links and links.names[number])
            for number, (name, port) in enumerate(zip((HUB, *sites), ports, strict=True))
        }
        # They begin with what they import, and with no thread of gRPC.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chaos.hub"])

    def start(self, name: str) -> Process:
        """Starts the hub or a site."""
        place = self._places[name]
        target: Any = train
        arguments: tuple[Any, ...] = name, place
        if name == HUB:
            target, arguments = serve, (self._sites, replace(place, hub=self._hubs[0]))
        process = self._context.Process(target=target, args=arguments)
        process.start()
        return process

    def move(self) -> None:
        """Lets the hub be started at its other address from now on."""
        self._hubs.reverse()


def free_ports(number: int) -> list[int]:
    """Those who look for a port at the same time may find the same one."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(one.getsockname()[1]) for one in listening]
    for one in listening:
        one.close()
    return ports
