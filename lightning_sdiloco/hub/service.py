"""A hub as a process: the coordinator behind gRPC, with a ledger and a store on disk, and its own monotonic clock."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from lightning_sdiloco.comm import (
    MAX_BLOB,
    BlobStore,
    Event,
    Header,
    Hub,
    MailboxError,
    Missing,
    NotActive,
    Peer,
    Push,
)
from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation import Beat, Call, Charter, Contribution, Hello, Measurement, StateHeader, read
from lightning_sdiloco.hub.coordinator import Coordinator
from lightning_sdiloco.hub.events import parts_of, text_of
from lightning_sdiloco.hub.history import History, Store
from lightning_sdiloco.hub.quorums import Quorums
from lightning_sdiloco.hub.seat import Kept, checked_store, seat_at
from lightning_sdiloco.hub.status import Status

log = logging.getLogger(__name__)

MAX_CHARTER = 64 << 20
"""Bytes of the largest charter."""

_AGAIN = 1.0  # seconds after which something is tried again that did not succeed


class Blobs(Store, Protocol):
    """The store of a hub, where it may leave a blob itself."""

    def put(self, blob: bytes) -> str:
        """Stores a blob and returns its key."""


class CoordinatorHandler:
    """Hands what arrives over gRPC to a coordinator; see `Handler`. Who may call what has been looked at before."""

    def __init__(self, coordinator: Callable[[], Coordinator], store: Blobs) -> None:
        self._active, self._store = coordinator, store

    @property
    def _coordinator(self) -> Coordinator:
        return self._active()

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
        with contextlib.suppress(NotActive):
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

    def _on_settle(self, peer: Peer, about: Header, body: bytes) -> bytes:
        own, chosen = about.get("measured"), about.get("chosen")
        known = self._coordinator.settle(
            peer.name,
            None if own is None else read(Measurement, own, "measured"),
            None if chosen is None else read(Mapping[str, str], chosen, "chosen"),
        )
        return known.to_bytes()

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
    """Serves a run to its sites, from what is on disk, or in etcd together with other hubs."""

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
        self._quorums = Quorums(quorum)
        self._run, self._sites = run, sites
        self._awake, self._closed = threading.Event(), threading.Event()
        self._seat = seat_at(ledger, f"{socket.gethostname()} ({listen})", sites is None, insecure)
        store = checked_store(ledger, store)
        self._journal: Kept | None = None
        self._coordinator: Coordinator | None = None
        self._why = ""
        self._hub: Hub | None = None
        try:
            self._journal = self._seat.take()
            self._blobs = BlobStore(store, max_blob)
            self._take_over()
            handler = CoordinatorHandler(lambda: self.coordinator, self._blobs)
            self._hub = Hub(handler, self._blobs, run, listen, keys=keys, insecure=insecure, beat=beat)
        except BaseException:
            self._give_up()
            raise
        self.port = self._hub.port
        self._ticker = threading.Thread(target=self._tick, name="hub-clock", daemon=True)

    @property
    def coordinator(self) -> Coordinator:
        """What decides."""
        if (coordinator := self._coordinator) is None:
            raise NotActive(self._why)
        return coordinator

    def start(self) -> None:
        """Begins to serve."""
        assert self._hub is not None, "it was made"
        self._begin()
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
        assert self._hub is not None, "it was made"
        self._hub.close()
        self._give_up()

    def _take_over(self) -> bool:
        """Becomes the active hub, if there is no other one."""
        self._journal = self._journal or self._seat.take()
        if self._journal is None:
            self._why = f"this hub waits: {self._seat.holder or 'another one'} is the active one."
            return False
        try:
            history = History(self._journal, self._blobs, self._quorums)
            self._coordinator = Coordinator(self._run, history, self._sites, time.monotonic)
        except BaseException:
            self._give_up()
            raise
        return True

    def _begin(self) -> None:
        if self._coordinator and self._hub:
            self._coordinator.start(self._hub.push, self._awake.set)

    def _step_down(self, why: str) -> None:
        """Takes nothing new: another hub does. This one may become the active one again, and begins anew then."""
        log.error("%s Nothing new is taken here.", why)
        self._why = why
        self._give_up()
        if self._hub:
            self._hub.send_away(NotActive(why))

    def _give_up(self) -> None:
        if self._coordinator:
            # What is still being answered tells nobody.
            self._coordinator.start(lambda event, to=None: None, lambda: None)
        self._coordinator = None
        if self._journal:
            self._journal.close()
        self._journal = None

    def _tick(self) -> None:
        while not self._closed.is_set():
            try:
                seconds = self._turn()
            except NotActive as error:
                self._step_down(str(error))
                seconds = _AGAIN
            except MailboxError as error:
                log.warning("%s", error)
                seconds = _AGAIN
            except Exception:
                log.exception("the hub could not do what is due, and tries again")
                seconds = _AGAIN
            self._awake.wait(seconds)
            self._awake.clear()

    def _turn(self) -> float:
        if self._coordinator is None:
            if self._take_over():
                log.warning("this hub is the active one now, after %s records", self.status().get("records", 0))
                self._begin()
            return _AGAIN
        if self._journal and not self._journal.held:
            raise NotActive("this hub is not the active one any more: its lease was not renewed in time.")
        return self._coordinator.tick()
