"""A hub as a process: the coordinator behind gRPC, with a ledger and a store on disk, and its own monotonic clock."""

import json
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from lightning_sdiloco.comm import (
    MAX_BLOB,
    BlobStore,
    Event,
    Header,
    Hub,
    MailboxError,
    Missing,
    Peer,
    Push,
    SQLiteLedger,
)
from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation import Beat, Call, Charter, Contribution, Hello, StateHeader
from lightning_sdiloco.hub.coordinator import Coordinator
from lightning_sdiloco.hub.events import parts_of, text_of
from lightning_sdiloco.hub.history import History
from lightning_sdiloco.hub.quorums import Quorums
from lightning_sdiloco.hub.status import Status

log = logging.getLogger(__name__)

MAX_CHARTER = 64 << 20
"""Bytes of the largest charter."""

_AGAIN = 1.0  # seconds after which something is tried again that did not succeed


class CoordinatorHandler:
    """Hands what arrives over gRPC to a coordinator; see `Handler`. Who may call what has been looked at before."""

    def __init__(self, coordinator: Coordinator, store: BlobStore) -> None:
        self._coordinator, self._store = coordinator, store

    def start(self, push: Push) -> None:
        self._push = push

    def hello(self, peer: Peer, about: Header) -> Iterable[Event]:
        """Lets a site in. Others may watch, and are told what all are told; see `Handler.hello`."""
        return self._events(peer, about) if peer.role == "site" else ()

    def _events(self, peer: Peer, about: Header) -> Iterable[Event]:
        hello = Hello.from_bytes(text_of(about, "hello"))
        _require_own(peer, hello.site, hello.life)
        return self._coordinator.hello(hello, lambda: self._charter(hello.charter))

    def _charter(self, key: str) -> Charter:
        try:
            if self._store.size(key) > MAX_CHARTER:
                raise Malformed("a charter is not as large as that.")
            return Charter.from_bytes(self._store.get(key))
        except Missing:
            raise Refused("a site brings its charter before it says hello.") from None

    def beat(self, peer: Peer, about: Header) -> None:
        if peer.role == "site":
            beat = Beat.from_bytes(text_of(about, "beat"))
            _require_own(peer, beat.site, beat.life)
            self._coordinator.beat(beat)

    def gone(self, peer: Peer) -> None:
        if peer.role == "site":
            self._coordinator.gone(peer.name, peer.life)

    def admit(self, peer: Peer, about: Header, key: str, size: int) -> None:
        """Takes charters of some size, and of a site that is there payloads and states; see `Handler.admit`."""
        kind = about.get("kind")
        if kind == "charter":
            if size > MAX_CHARTER:
                raise Refused(f"a charter of {size:,} bytes is too large: at most {MAX_CHARTER:,} are taken.")
            return
        if kind not in ("payload", "state"):
            raise Malformed("a blob is a charter, a payload or a part of a state.")
        self._coordinator.require_here(peer.name, peer.life)
        self._coordinator.begins(peer.name, key, kind == "state")

    def stored(self, peer: Peer, about: Header, key: str, size: int) -> Header:
        if about.get("kind") == "charter":
            return {"charter": self._agreed(peer, key)}
        self._coordinator.stored(peer.name, key, size)
        return {}

    def _agreed(self, peer: Peer, key: str) -> str:
        charter = self._coordinator.agree(peer.name, self._charter(key))
        try:
            self._store.size(charter.key)
        except Missing:
            self._store.put(charter.to_bytes())
        return charter.key

    def call(self, peer: Peer, name: str, about: Header, body: bytes) -> tuple[Header, bytes]:
        answer = getattr(self, f"_on_{name}", None)
        if answer is None:
            raise Refused(f"this hub does not answer {name}.")
        said = answer(peer, about, body)
        return ({}, said) if isinstance(said, bytes) else (said or {}, b"")

    def _on_hello(self, peer: Peer, about: Header, body: bytes) -> None:
        for event in self._events(peer, about):
            self._push(event, [peer.name])

    def _on_contribute(self, peer: Peer, about: Header, body: bytes) -> Header:
        own = Contribution.from_bytes(body)
        _require_own(peer, own.site)
        return {"answer": self._coordinator.contribute(own, peer.life)}

    def _on_skip(self, peer: Peer, about: Header, body: bytes) -> None:
        self._coordinator.skip(peer.name, peer.life, Call.from_bytes(body))

    def _on_state(self, peer: Peer, about: Header, body: bytes) -> None:
        without = about.get("without")
        if not isinstance(without, list) or not all(isinstance(name, str) for name in without):
            raise Malformed("who asks for a state says whose states were refused.")
        self._coordinator.require_here(peer.name, peer.life)
        self._coordinator.ask(peer.name, without)

    def _on_give(self, peer: Peer, about: Header, body: bytes) -> None:
        header, parts = StateHeader.from_bytes(body), parts_of(about.get("parts"))
        self._coordinator.give(peer.name, str(about.get("request")), header, parts)

    def _on_leave(self, peer: Peer, about: Header, body: bytes) -> None:
        self._coordinator.gone(peer.name, peer.life)

    def _on_status(self, peer: Peer, about: Header, body: bytes) -> bytes:
        return json.dumps(self._coordinator.status()).encode()

    def _on_evict(self, peer: Peer, about: Header, body: bytes) -> None:
        self._coordinator.evict(str(about.get("who")))

    def _on_end(self, peer: Peer, about: Header, body: bytes) -> None:
        self._coordinator.end()

    def _on_rollback(self, peer: Peer, about: Header, body: bytes) -> Header:
        round = about.get("round")
        if type(round) is not int or round < 0:
            raise Malformed("a run is rolled back to a round.")
        return {"records": self._coordinator.roll_back(round)}


def _require_own(peer: Peer, site: str, life: str | None = None) -> None:
    if site != peer.name or life not in (None, peer.life):
        raise Refused(f"site {peer.name!r} speaks for itself, and for this start of it.")


class HubService:
    """Serves a run to its sites, from what is on disk."""

    def __init__(
        self,
        run: str,
        ledger: str | Path,
        sites: int | None = None,
        listen: str = "127.0.0.1:0",
        store: str | Path | None = None,
        keys: str | Path | None = None,
        insecure: bool = False,
        max_blob: int = MAX_BLOB,
        beat: float = 1.0,
        quorum: str | None = None,
    ) -> None:
        if "://" in str(ledger):
            raise ValueError(
                f"ledger={str(ledger)!r} is a URL, and a run has one hub, whose ledger is a file on its machine: give a"
                " path. Where that hub ends, start it again with it; sites train on meanwhile."
            )
        quorums = Quorums(quorum)
        self._awake, self._closed = threading.Event(), threading.Event()
        self.ledger = SQLiteLedger(ledger, must_exist=sites is None)
        try:
            blobs = BlobStore(Path(ledger).with_suffix(".store") if store is None else store, max_blob)
            self.coordinator = Coordinator(run, History(self.ledger, blobs, quorums), sites, time.monotonic)
            handler = CoordinatorHandler(self.coordinator, blobs)
            self._hub = Hub(handler, blobs, run, listen, keys=keys, insecure=insecure, beat=beat)
        except BaseException:
            self.ledger.close()
            raise
        self.port = self._hub.port
        self._ticker = threading.Thread(target=self._tick, name="hub-clock", daemon=True)

    def start(self) -> None:
        """Begins to serve."""
        self.coordinator.start(self._hub.push, self._awake.set)
        self._hub.start()
        self._ticker.start()

    def status(self) -> Status:
        """Returns what is to be seen of the run."""
        return self.coordinator.status()

    def close(self) -> None:
        """Ends all connections. What is durable is there for the next start."""
        self._closed.set()
        self._awake.set()
        if self._ticker.ident is not None:
            self._ticker.join()
        self._hub.close()
        # What is still being answered tells nobody.
        self.coordinator.start(lambda event, to=None: None, lambda: None)
        self.ledger.close()

    def _tick(self) -> None:
        while not self._closed.is_set():
            try:
                seconds = self.coordinator.tick()
            except MailboxError as error:
                log.warning("%s", error)
                seconds = _AGAIN
            except Exception:
                log.exception("the hub could not do what is due, and tries again")
                seconds = _AGAIN
            self._awake.wait(seconds)
            self._awake.clear()
