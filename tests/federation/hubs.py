"""A hub in the threads of this process, with rules and without; and a line to it that can be
cut.
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.messages import Event
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.run_config import Terms
from lightning_sdiloco.federation.server import Hub, HubService
from lightning_sdiloco.federation.store import BlobStore
from tests.federation.scripted import RUN, ScriptedSite, first_values, run_config

HOLDERS = {**dict.fromkeys(("site-a", "site-b", "a", "b", "c"), "site"), "second": "hub"}
HOLDERS |= {"boss": "operator", "viewer": "reader"}
TERMS = Terms(fragments=2, sync_every=8, overlap_steps=2, grace=1.0, lease=2.0)


def require_extra() -> None:
    """Skips where only the package itself is installed."""
    pytest.importorskip("grpc")
    pytest.importorskip("grpc_health")
    pytest.importorskip("cryptography")


def make_keys(folder: Path) -> Path:
    """Keys for a hub and holders of every role."""
    init_keys(folder, RUN)
    for name, role in HOLDERS.items():
        add_keys(folder, name, role)  # type: ignore[arg-type]
    return folder


def put(site: HubClient, blob: bytes) -> str:
    site.send(blob)
    return key_of(blob)


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


# Without rules


class Noting:
    """Answers calls without rules, which are `Coordinator`'s business, and notes them."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        self.seen: list[str] = []
        self.records: list[bytes] = []
        self.push: Any = None

    def start(self, push: Any) -> None:
        self.push = push

    def record(self, text: bytes) -> None:
        """Sends a record to all who watch, and to those who come later."""
        self.records.append(text)
        self.push(Event("record", {"seq": len(self.records) - 1}, text))

    def hello(self, peer: Any, about: dict[str, Any]) -> list[Event]:
        if about.get("refused"):
            raise Refused("another run config")
        self.seen.append(f"hello {peer.name} {peer.incarnation[:2]}")
        records = [Event("record", {"seq": seq}, text) for seq, text in enumerate(self.records)]
        return records or [Event("welcome", {"to": peer.name})]

    def heartbeat(self, peer: Any, about: dict[str, Any]) -> None:
        self.seen.append(f"heartbeat {peer.name}")

    def is_present(self, site: str) -> bool:
        return True

    def gone(self, peer: Any) -> None:
        self.seen.append(f"gone {peer.name} {peer.incarnation[:2]}")

    def admit(self, peer: Any, about: dict[str, Any], key: str, size: int) -> None:
        if size != about.get("size", size):
            raise Refused("the run config says another size")

    def lacks_room(self, peer: Any, about: dict[str, Any], error: Exception) -> None:
        self.seen.append(f"no room for {peer.name}")

    def stored(self, peer: Any, about: dict[str, Any], key: str, size: int) -> dict[str, Any]:
        if (peer.name, key) in self.taken:
            return {"said": "known"}
        self.taken.append((peer.name, key))
        return {"said": "open"}

    def call(
        self, peer: Any, name: str, about: dict[str, Any], body: bytes
    ) -> tuple[dict[str, Any], bytes]:
        return {"asked": name}, body


class Served(AbstractContextManager["Served"]):
    """A hub without rules, and what it keeps blobs in."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.keys = keys
        self.handler = Noting()
        self.store = BlobStore(folder / "store", max_blob=64 << 20)
        # It answers as a Coordinator does.
        self.hub = Hub(self.handler, self.store, RUN, keys=keys, heartbeat=0.2)  # type: ignore[arg-type]
        self.port = self.hub.port
        self.hub.start()
        self.clients: list[HubClient] = []

    def client(self, name: str = "site-a", port: int | None = None, **options: Any) -> HubClient:
        defaults = {"run": RUN, "keys": self.keys, "heartbeat": 0.2, "timeout": 5.0}
        address = f"127.0.0.1:{port or self.port}"
        client = HubClient(address, name=name, **{**defaults, **options})
        self.clients.append(client)
        return client

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self.hub.close(0.1)


class Line:
    """A TCP connection to a port by way of another, which can be held up or cut."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.flows = threading.Event()
        self.flows.set()
        self.passed = {"up": 0, "down": 0}
        self.cut_after: dict[str, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections; new ones can be made."""
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Carries nothing on the connections that there are, and leaves them open, as a NAT does
        that was restarted.
        """
        self._forgotten.update(self._sockets)

    def close(self) -> None:
        self._listener.close()
        self.flows.set()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._sockets += [near, far]
                self._carry_in_thread(near, far, "up")
                self._carry_in_thread(far, near, "down")

    def _carry_in_thread(self, *flow: Any) -> None:
        threading.Thread(target=self._carry, args=flow, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while received := source.recv(1 << 16):
                self.flows.wait()
                if source in self._forgotten:
                    continue
                sink.sendall(received)
                self.passed[way] += len(received)
                if self.passed[way] >= self.cut_after.get(way, 1 << 60):
                    del self.cut_after[way]
                    self.cut()
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class SlowLine(Line):
    """A line on which every byte takes some seconds; making a connection to its near end does
    not.
    """

    delay = 2.0

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        pending = queue.SimpleQueue[tuple[float, bytes]]()
        threading.Thread(target=self._deliver, args=(pending, sink), daemon=True).start()
        received = b"more"
        while received:
            received = b""
            with suppress(OSError):
                received = source.recv(1 << 16)
            pending.put((time.monotonic() + self.delay, received))

    def _deliver(self, pending: "queue.SimpleQueue[tuple[float, bytes]]", sink: Any) -> None:
        with suppress(OSError):
            while True:
                arrives_at, received = pending.get()
                time.sleep(max(0.0, arrives_at - time.monotonic()))
                if not received:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(received)


# With rules


class World:
    """A hub on disk, over gRPC, and scripted sites in this thread."""

    service: HubService  # of the last start

    def __init__(self, folder: Path, keys: Path, terms: Terms = TERMS) -> None:
        self.folder = folder
        self.keys = keys
        self.terms = terms
        self.port = 0
        self.sites: dict[str, ScriptedSite] = {}
        self.clients: list[HubClient] = []
        self.connections: list[HubConnection] = []

    def start(
        self, sites: int | None = None, ledger: Path | None = None, **options: Any
    ) -> HubService:
        """Starts a hub at the same port as that before, if there was one."""
        options |= {"listen": self.address, "keys": self.keys, "heartbeat": 0.2}
        self.service = HubService(RUN, ledger or self.folder / "hub.sqlite", sites, **options)
        self.port = self.service.port
        self.service.start()
        return self.service

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self, name: str, **options: Any) -> HubConnection:
        client = HubClient(self.address, RUN, name, keys=self.keys, heartbeat=0.2, channels=2)
        connection = HubConnection(client, **options)
        self.connections.append(connection)
        return connection

    def join(self, *names: str, seed: int = 0) -> ScriptedSite:
        for name in names:
            self.sites[name] = joined(self.connect(name), self.terms, seed)
        return self.sites[names[-1]]

    def client(self, name: str) -> HubClient:
        client = HubClient(self.address, RUN, name, keys=self.keys)
        self.clients.append(client)
        return client

    def options_of(self, holder: str) -> list[str]:
        """The options of a command with which the holder of a key calls this hub."""
        return ["--hub", self.address, "--keys", str(self.keys / f"{holder}.bundle")]

    def ask(self, name: str, call: str, **arguments: object) -> dict[str, Any]:
        header, body = self.client(name).call(call, arguments)
        return json.loads(body) if body else header

    def status(self) -> dict[str, Any]:
        return self.ask("viewer", "status")

    def state_of(self, site: str) -> str:
        return self.service.coordinator.status()["sites"][site]["state"]

    def run(self, condition: Callable[[], object], longest_step: float = 60.0) -> None:
        """Trains until something is true, and no step may take longer than that."""
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, f"it did not come true: {self.status()}"
            for site in self.sites.values():
                began = time.monotonic()
                site.step()
                assert time.monotonic() - began < longest_step
            time.sleep(0.005)

    def rounds(self, least: int, longest_step: float = 60.0) -> None:
        """Trains until all have landed so many rounds, after which they agree."""
        sites = self.sites.values()
        self.run(lambda: all(min(site.rounds) >= least for site in sites), longest_step)
        self.require_agreement()

    def more(self, rounds: int, longest_step: float = 60.0) -> None:
        last = max(max(site.rounds) for site in self.sites.values())
        self.rounds(last + rounds, longest_step)

    def require_agreement(self) -> None:
        """Asserts that all sites with the same records have the same outer parameters."""
        digests: dict[tuple[int, int], int] = {}
        for site in self.sites.values():
            for fragment, digest in enumerate(site.digests()):
                position = (fragment, site.rounds[fragment])
                assert digests.setdefault(position, digest) == digest

    def found_run(self, *names: str, rounds: int = 0, **options: Any) -> ScriptedSite:
        """Starts a hub at which these sites found the run, and trains them for some rounds."""
        self.start(len(names), **options)
        last = self.join(*names)
        self.rounds(rounds)
        return last

    def kill(self, *names: str) -> None:
        """Ends sites without a word, as the end of a process does."""
        for name in names:
            self.sites.pop(name).connection.close(0)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for connection in self.connections:
            connection.close(1.0)
        self.service.close()


def joined(connection: HubConnection, terms: Terms = TERMS, seed: int = 0) -> ScriptedSite:
    """A site that has said hello with the run config of its run."""
    proposed = run_config(terms)
    agreed = connection.agree(proposed)
    agreed.require_same(proposed)
    values = [first_values(p, seed=seed) for p in range(terms.fragments)]
    site = ScriptedSite(connection, agreed, values)
    connection.hello(site.follower)
    return site
