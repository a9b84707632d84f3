"""A hub in the threads of this process, with rules and without; and a line to it that can be
cut.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
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


def until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


# Without rules


class Noting:
    """Answers calls without rules: what a hub does with them is `Coordinator`'s business."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        self.seen: list[str] = []
        self.records: list[bytes] = []
        self.push: Any = None

    def start(self, push: Any) -> None:
        self.push = push

    def record(self, text: bytes) -> None:
        """Tells a record, also those who come later."""
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

    def gone(self, peer: Any) -> None:
        self.seen.append(f"gone {peer.name} {peer.incarnation[:2]}")

    def admit(self, peer: Any, about: dict[str, Any], key: str, size: int) -> None:
        if size != about.get("size", size):
            raise Refused("the run config says another size")

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
        known = {"run": RUN, "keys": self.keys, "heartbeat": 0.2, "timeout": 5.0}
        self.clients.append(
            HubClient(f"127.0.0.1:{port or self.port}", name=name, **{**known, **options})
        )
        return self.clients[-1]

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self.hub.close(0.1)


class Line:
    """A TCP connection to a port by way of another, which can be held up or cut."""

    def __init__(self, port: int) -> None:
        self.to = port
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
                    far = socket.create_connection(("127.0.0.1", self.to), timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._sockets += [near, far]
                for one, other, way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(
                        target=self._carry, args=(one, other, way), daemon=True
                    ).start()

    def _carry(self, one: socket.socket, other: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.flows.wait()
                if one in self._forgotten:
                    continue
                other.sendall(data)
                self.passed[way] += len(data)
                if self.passed[way] >= self.cut_after.get(way, 1 << 60):
                    del self.cut_after[way]
                    self.cut()
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


# With rules


class World:
    """A hub on disk, over gRPC, and scripted sites in this thread."""

    def __init__(self, folder: Path, keys: Path, terms: Terms = TERMS) -> None:
        self.folder = folder
        self.keys = keys
        self.terms = terms
        self.port = 0
        self.sites: dict[str, ScriptedSite] = {}
        self.open: list[Any] = []

    def start(
        self, sites: int | None = None, ledger: Path | None = None, **options: Any
    ) -> HubService:
        """Starts a hub at the same port as that before, if there was one."""
        options |= {"listen": f"127.0.0.1:{self.port}", "keys": self.keys, "heartbeat": 0.2}
        self.service = HubService(RUN, ledger or self.folder / "hub.sqlite", sites, **options)
        self.port = self.service.port
        self.service.start()
        return self.service

    def connect(self, name: str, **options: Any) -> HubConnection:
        client = HubClient(
            f"127.0.0.1:{self.port}", RUN, name, keys=self.keys, heartbeat=0.2, channels=2
        )
        self.open.append(HubConnection(client, **options))
        return self.open[-1]

    def join(self, *names: str, seed: int = 0) -> ScriptedSite:
        for name in names:
            self.sites[name] = joined(self.connect(name), self.terms, seed)
        return self.sites[names[-1]]

    def client(self, name: str) -> HubClient:
        self.open.append(HubClient(f"127.0.0.1:{self.port}", RUN, name, keys=self.keys))
        return self.open[-1]

    def asked(self, who: str) -> list[str]:
        """The options of a command with which somebody asks this hub."""
        return ["--hub", f"127.0.0.1:{self.port}", "--keys", str(self.keys / f"{who}.bundle")]

    def ask(self, name: str, call: str, **about: object) -> dict[str, Any]:
        header, body = self.client(name).call(call, about)
        return json.loads(body) if body else header

    def status(self) -> dict[str, Any]:
        return self.ask("viewer", "status")

    def run(self, true: Callable[[], object], longest_step: float = 60.0) -> None:
        """Trains until something is true, and no step may take longer than that."""
        end = time.monotonic() + 60.0
        while not true():
            assert time.monotonic() < end, f"it did not come true: {self.status()}"
            for site in self.sites.values():
                began = time.monotonic()
                site.step()
                assert time.monotonic() - began < longest_step
            time.sleep(0.005)

    def rounds(self, least: int, longest_step: float = 60.0) -> None:
        """Trains until all have landed so many rounds, after which they agree."""
        self.run(
            lambda: all(min(site.rounds) >= least for site in self.sites.values()), longest_step
        )
        require_agreement(self.sites.values())

    def more(self, rounds: int, longest_step: float = 60.0) -> None:
        self.rounds(max(max(site.rounds) for site in self.sites.values()) + rounds, longest_step)

    def found(self, *names: str, rounds: int = 0, **options: Any) -> ScriptedSite:
        """Starts a hub at which these sites found the run, and trains them for some rounds."""
        self.start(len(names), **options)
        last = self.join(*names)
        self.rounds(rounds)
        return last

    def kill(self, name: str) -> ScriptedSite:
        """Ends a site without a word, as the end of its process does."""
        site = self.sites.pop(name)
        site.connection.close(0)
        return site

    def close(self) -> None:
        for connection in self.open:
            connection.close(*([1.0] if isinstance(connection, HubConnection) else []))
        self.service.close()


def joined(connection: HubConnection, terms: Terms = TERMS, seed: int = 0) -> ScriptedSite:
    """A site that has said hello with the run config of its run."""
    own = run_config(terms)
    agreed = connection.agree(own)
    agreed.require_same(own)
    site = ScriptedSite(
        connection, agreed, [first_values(p, seed=seed) for p in range(terms.fragments)]
    )
    connection.hello(site.follower)
    return site


def require_agreement(sites: Iterable[ScriptedSite]) -> None:
    """Asserts that all sites with the same records have the same outer parameters."""
    held = {(p, own.rounds[p], row) for own in sites for p, row in enumerate(own.digests())}
    assert len({entry[:2] for entry in held}) == len(held)
