"""A hub in the threads of this process, its sites, and a line to it that can be cut."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.hub import BlobStore, Event, Hub, HubClient, add_keys, init_keys, key_of

RUN = "run-1"
SITES = ("site-a", "site-b", "a", "b", "c")
HOLDERS = {**dict.fromkeys(SITES, "site"), "second": "hub", "boss": "operator", "viewer": "reader"}


def require_extra() -> None:
    """Skips where only the package itself is installed."""
    pytest.importorskip("grpc")
    pytest.importorskip("cryptography")


def make_keys(folder: Path, run: str | None = RUN) -> Path:
    """Keys for a hub and holders of every role."""
    init_keys(folder, run)
    for name, role in HOLDERS.items():
        add_keys(folder, name, role)  # type: ignore[arg-type]
    return folder


class Noting:
    """Answers calls without rules: what a hub does with them is `Coordinator`'s business, and tested with it."""

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
            raise Refused("another charter")
        self.seen.append(f"hello {peer.name} {peer.life[:2]}")
        records = [Event("record", {"seq": seq}, text) for seq, text in enumerate(self.records)]
        return records or [Event("welcome", {"to": peer.name})]

    def beat(self, peer: Any, about: dict[str, Any]) -> None:
        self.seen.append(f"beat {peer.name}")

    def gone(self, peer: Any) -> None:
        self.seen.append(f"gone {peer.name} {peer.life[:2]}")

    def admit(self, peer: Any, about: dict[str, Any], key: str, size: int) -> None:
        if size != about.get("size", size):
            raise Refused("the charter says another size")

    def stored(self, peer: Any, about: dict[str, Any], key: str, size: int) -> dict[str, Any]:
        if (peer.name, key) in self.taken:
            return {"said": "known"}
        self.taken.append((peer.name, key))
        return {"said": "open"}

    def call(self, peer: Any, name: str, about: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return {"asked": name}, body


class Served:
    """A hub without rules, and what it keeps blobs in."""

    def __init__(self, folder: Path, keys: Path | None, listen: str = "127.0.0.1:0") -> None:
        self.keys = keys
        self.store = BlobStore(folder / "store", max_blob=64 << 20)
        self.handler = Noting()
        self.hub = Hub(self.handler, self.store, RUN, listen, keys=keys, insecure=keys is None, beat=0.2)
        self.port = self.hub.port
        self.hub.start()
        self.mailboxes: list[HubClient] = []

    def mailbox(self, name: str = "site-a", port: int | None = None, **options: Any) -> HubClient:
        options = {"keys": self.keys, "insecure": self.keys is None, "beat": 0.2, "run": RUN, "timeout": 5.0} | options
        mailbox = HubClient(f"127.0.0.1:{port or self.port}", name=name, **options)
        self.mailboxes.append(mailbox)
        return mailbox

    def close(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.close()
        self.hub.close(0.1)


@contextmanager
def serving(folder: Path, keys: Path | None, **options: Any) -> Iterator[Served]:
    served = Served(folder, keys, **options)
    try:
        yield served
    finally:
        served.close()


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
        """Carries nothing on the connections that there are, and leaves them open, as a NAT does that was restarted."""
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
                    threading.Thread(target=self._carry, args=(one, other, way), daemon=True).start()

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


def put(site: HubClient, blob: bytes) -> str:
    """Sends a blob; returns its key."""
    site.send(blob)
    return key_of(blob)


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits for something to be true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)
