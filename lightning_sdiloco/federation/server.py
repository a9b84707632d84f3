"""The hub's end of the connections to all sites: it knows who calls, moves blobs and events, and leaves the rest."""

import functools
import json
import logging
import random
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.charter import Charter
from lightning_sdiloco.federation.codec import read
from lightning_sdiloco.federation.connection import Parts
from lightning_sdiloco.federation.coordinator import Coordinator, Status
from lightning_sdiloco.federation.journal import History, Quorums, SQLiteLedger
from lightning_sdiloco.federation.keys import LOOKING, Access, Peer, load, speaks_for_itself
from lightning_sdiloco.federation.messages import Beat, Call, Contribution, Hello, StateHeader
from lightning_sdiloco.federation.store import BlobStore, Upload
from lightning_sdiloco.federation.wire import (
    CHUNK,
    MAX_BLOB,
    SERVER_OPTIONS,
    SERVICE,
    Busy,
    Event,
    Failure,
    Header,
    HubError,
    Missing,
    NoSpace,
    checked_key,
    checked_size,
    extra,
    pack,
    status_of,
    unpack,
)

log = logging.getLogger(__name__)

MAX_CALLS = 512
"""Calls that are served at the same time; a site makes one for each of its connections, and one that stays."""

Push = Callable[..., None]


MAX_UPLOADS = 64
"""Blobs that one holder may be sending at the same time."""

MAX_EVENTS = 1024
"""Events that wait for somebody who does not read them. With one more it is sent away, and begins anew."""

MAX_WATCHING = 16
"""How often a holder that is no site may watch at the same time."""

BEAT = Event("beat", {})

_GIVEN_UP = 600.0  # seconds without a connection after which what has arrived of a blob is dropped

# What pings are answered with; nothing on the way makes it smaller.
_NOISE = random.Random(0).randbytes(CHUNK)

MAX_CHARTER = 64 << 20
"""Bytes of the largest charter."""

_AGAIN = 1.0  # seconds after which something is tried again that did not succeed


class Session:
    """One who watches."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.admitted = False
        self._changed = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._ended = False
        self._error: Failure | None = None

    def push(self, event: Event) -> None:
        with self._changed:
            if len(self._waiting) >= MAX_EVENTS:
                self._ended, self._error = True, NoSpace(f"{self.peer.name!r} does not read what it is told.")
                self._waiting.clear()
            elif not self._ended:
                self._waiting.append(event)
            self._changed.notify_all()

    def end(self, error: Failure | None = None) -> None:
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
            self._changed.notify_all()

    def events(self, first: Iterator[Event], beat: float) -> Iterator[Event]:
        """Yields what is to be told, and a beat where there is nothing."""
        yield from first
        while True:
            with self._changed:
                if not self._waiting and not self._ended:
                    self._changed.wait(beat)
                event = self._waiting.popleft() if self._waiting else None
                if event is None and self._ended:
                    break
            yield event or BEAT
        if self._error is not None:
            raise self._error


class Sessions:
    """All who watch. A site does so once; it is one life of it, and a new one takes the place of the old."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Session] = []
        self._of_site: dict[str, Session] = {}

    def opened(self, peer: Peer) -> Session:
        session = Session(peer)
        with self._lock:
            if sum(other.peer.name == peer.name for other in self._all) >= MAX_WATCHING:
                raise NoSpace(f"{peer.name!r} watches {MAX_WATCHING} times already.")
            self._all.append(session)
        return session

    def admitted(self, session: Session) -> None:
        """Notes that a session has been let in. An earlier one of the same site ends."""
        session.admitted = True
        if session.peer.role != "site":
            return
        with self._lock:
            before = self._of_site.get(session.peer.name)
            self._of_site[session.peer.name] = session
        if before is not None:
            before.end(Refused(f"site {session.peer.name!r} watches from elsewhere."))

    def closed(self, session: Session) -> bool:
        session.end()
        with self._lock:
            self._all.remove(session)
            current = self._of_site.get(session.peer.name)
            if session.peer.role != "site":
                return session.admitted
            if current is session:
                del self._of_site[session.peer.name]
            return current is session

    def check_life(self, peer: Peer) -> None:
        """Refuses the call of another life of a site than that which watches now, before or after it."""
        with self._lock:
            current = self._of_site.get(peer.name)
        if peer.role == "site" and current is not None and current.peer.life != peer.life:
            raise Busy(
                f"the name {peer.name} is in use by a living process: life {peer.life!r} is not the one that watches."
            )

    def push(self, event: Event, to: Collection[str] | None) -> None:
        with self._lock:
            told = [session for session in self._all if to is None or session.peer.name in to]
        for session in told:
            session.push(event)

    def end_all(self) -> None:
        with self._lock:
            ended = list(self._all)
        for session in ended:
            session.end()


class Uploads:
    """Blobs that arrive. What has arrived stays for a while if connections break, and is not sent again."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._arriving: dict[tuple[str, str, str], Upload] = {}

    def of(self, peer: Peer, key: str, size: int) -> Upload:
        place, now = (peer.role, peer.name, key), time.monotonic()
        with self._lock:
            for other in [own for own, upload in self._arriving.items() if upload.used < now - _GIVEN_UP]:
                self._arriving.pop(other).discard()
            if place not in self._arriving:
                if sum(other[:2] == place[:2] for other in self._arriving) >= MAX_UPLOADS:
                    raise NoSpace(f"{peer.name!r} is sending {MAX_UPLOADS} blobs already.")
                self._arriving[place] = self._store.begin(key, size)
            upload = self._arriving[place]
            upload.used = now
        if upload.size != size:
            raise Malformed(f"blob {key} has {upload.size:,} bytes on another connection, and here {size:,}.")
        return upload

    def commit(self, peer: Peer, upload: Upload) -> None:
        """Stores a blob that is complete, as `Upload.commit` does; whatever comes of it, its upload is over."""
        try:
            upload.commit()
        finally:
            with self._lock:
                self._arriving.pop((peer.role, peer.name, upload.key), None)


class CoordinatorHandler:
    """Hands what arrives over gRPC to a coordinator. Who may call what has been looked at before."""

    def __init__(self, coordinator: Coordinator, store: BlobStore) -> None:
        self._coordinator, self._store = coordinator, store

    def start(self, push: Push) -> None:
        self._push = push

    def hello(self, peer: Peer, about: Header) -> Iterable[Event]:
        return self._events(peer, about) if peer.role == "site" else ()

    def _events(self, peer: Peer, about: Header) -> Iterable[Event]:
        hello = read(Hello, about.get("hello"), "hello")
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
            beat = read(Beat, about.get("beat"), "beat")
            _require_own(peer, beat.site, beat.life)
            self._coordinator.beat(beat)

    def gone(self, peer: Peer) -> None:
        if peer.role == "site":
            self._coordinator.gone(peer.name, peer.life)

    def admit(self, peer: Peer, about: Header, key: str, size: int) -> None:
        """Takes charters of some size, and of a site that is there payloads and states."""
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
        coordinator, site = self._coordinator, peer.name
        match name:
            case "hello":
                for event in self._events(peer, about):
                    self._push(event, [site])
            case "contribute":
                own = Contribution.from_bytes(body)
                _require_own(peer, own.site)
                return {"answer": coordinator.contribute(own, peer.life)}, b""
            case "skip":
                coordinator.skip(site, peer.life, Call.from_bytes(body))
            case "state":
                without = about.get("without")
                if not isinstance(without, list) or not all(isinstance(one, str) for one in without):
                    raise Malformed("who asks for a state says whose states were refused.")
                coordinator.require_here(site, peer.life)
                coordinator.ask(site, without)
            case "give":
                header, parts = StateHeader.from_bytes(body), read(Parts, about.get("parts"), "parts")
                coordinator.give(site, str(about.get("request")), header, parts)
            case "leave":
                coordinator.gone(site, peer.life)
            case "status":
                return {}, json.dumps(coordinator.status()).encode()
            case "evict":
                coordinator.evict(str(about.get("who")))
            case "end":
                coordinator.end()
            case "rollback":
                round = about.get("round")
                if type(round) is not int or round < 0:
                    raise Malformed("a run is rolled back to a round.")
                return {"records": coordinator.roll_back(round)}, b""
            case _:
                raise Refused(f"this hub does not answer {name}.")
        return {}, b""


def _require_own(peer: Peer, site: str, life: str | None = None) -> None:
    if site != peer.name or life not in (None, peer.life):
        raise Refused(f"site {peer.name!r} speaks for itself, and for this start of it.")


class Hub:
    """Serves sites over gRPC, with TLS and certificates at both ends unless it is told otherwise."""

    def __init__(
        self,
        handler: CoordinatorHandler,
        store: BlobStore,
        run: str,
        listen: str = "127.0.0.1:0",
        keys: str | Path | None = None,
        insecure: bool = False,
        beat: float = 1.0,
    ) -> None:
        self.store = store
        self._handler, self._beat = handler, beat
        self._grpc = extra("grpc")
        self._sessions, self._uploads = Sessions(), Uploads(store)
        self._server = self._grpc.server(
            ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="hub"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        if (keys is None) != insecure:
            raise ValueError(
                "A hub needs either keys or insecure=True. Make keys with: sdiloco keys init FOLDER --run RUN."
            )
        if keys is None:
            warnings.warn(
                "The hub serves without TLS: whoever reaches its port can read and change everything (insecure=True).",
                stacklevel=2,
            )
            self._access = Access(run, certified=False)
        else:
            bundle = load(keys).bound(run)
            if bundle.identity.role != "hub":
                whose = f"{bundle.identity.role} {bundle.identity.name!r}"
                raise ValueError(f"The keys are those of {whose}, and a hub needs its own: give hub.bundle.")
            self._access = Access(run, certified=True, revoked=bundle.revoked)
        self._add_calls()
        self.port = self._listen(listen, None if keys is None else bundle)

    def start(self) -> None:
        self._handler.start(self.push)
        self._server.start()

    def close(self, grace: float = 0.5) -> None:
        self._sessions.end_all()
        self._server.stop(grace).wait()

    def push(self, event: Event, to: Collection[str] | None = None) -> None:
        self._sessions.push(event, to)

    def _listen(self, listen: str, bundle: Any) -> int:
        try:
            if bundle is None:
                port = self._server.add_insecure_port(listen)
            else:
                pair = [(bundle.key, bundle.certificate)]
                credentials = self._grpc.ssl_server_credentials(pair, bundle.authority, require_client_auth=True)
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ValueError(
                f"listen={listen!r} cannot be listened on: give a free port and an address of this machine."
            )
        return int(port)

    def _add_calls(self) -> None:
        grpc = self._grpc
        calls = {
            "put": grpc.stream_unary_rpc_method_handler(_answering(self._put)),
            "get": grpc.unary_stream_rpc_method_handler(_telling(self._get)),
            "call": grpc.unary_unary_rpc_method_handler(_answering(self._call)),
            "watch": grpc.stream_stream_rpc_method_handler(_telling(self._watch)),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))

    def _asked(self, call: str, message: bytes | None, context: Any) -> tuple[Peer, Header, Header, bytes]:
        """Returns who asks, the whole header, what the call is about, and the bytes that belong to it."""
        if message is None:
            raise Malformed("a call begins with a header.")
        header, body = unpack(message)
        call = str(header.get("call"))[:80] if call == "call" else call
        peer = self._access.peer(call, header, context)
        if call not in LOOKING:
            self._sessions.check_life(peer)
        return peer, header, header.get("about", {}), body

    def _put(self, requests: Iterator[bytes], context: Any) -> bytes:
        """Takes a part of a blob, or none, and says what has become of it, or what is missing."""
        peer, header, about, _ = self._asked("put", next(requests, None), context)
        key, size = checked_key(header.get("key")), checked_size(header.get("size"), self.store.max_blob, "blob")
        start = checked_size(header.get("start", 0), size, "part")
        self._handler.admit(peer, about, key, size)
        if not self._holds(key):
            upload = self._uploads.of(peer, key, size)
            # Complete at once: an empty blob, or one whose sender asks what became of it.
            complete = upload.complete
            for message in requests:
                complete = upload.take(start, message) or complete
                start += len(message)
            if not complete:
                return pack({"stored": False, "missing": upload.missing})
            self._uploads.commit(peer, upload)
        return pack({"stored": True, "answer": self._handler.stored(peer, about, key, size)})

    def _holds(self, key: str) -> bool:
        try:
            self.store.size(key)
        except Missing:
            return False
        return True

    def _get(self, message: bytes, context: Any) -> Iterator[bytes]:
        """Sends the size of a blob, and then a part of it."""
        _, header, _, _ = self._asked("get", message, context)
        key = checked_key(header.get("key"))
        size = self.store.size(key)
        start = checked_size(header.get("start", 0), size, "part")
        end = checked_size(header.get("end", size), size, "part")
        yield pack({"size": size})
        for at in range(start, end, CHUNK):
            yield self.store.read(key, at, min(at + CHUNK, end))

    def _call(self, message: bytes, context: Any) -> bytes:
        peer, header, about, body = self._asked("call", message, context)
        if header["call"] == "ping":
            # Its own bytes, or as many as it asks for: so the way is measured.
            return pack({}, _NOISE[: checked_size(about["bytes"], CHUNK, "answer")] if "bytes" in about else body)
        return pack(*self._handler.call(peer, header["call"], about, body))

    def _watch(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        peer, _, about, _ = self._asked("watch", next(requests, None), context)
        session = self._sessions.opened(peer)
        try:
            first = iter(self._handler.hello(peer, about))
            self._sessions.admitted(session)
            reader = threading.Thread(
                target=self._read_beats, args=(session, requests), name=f"beats-{secrets.token_hex(2)}", daemon=True
            )
            reader.start()
            for event in session.events(first, self._beat):
                yield pack({"kind": event.kind, "about": event.header}, event.body)
        finally:
            if self._sessions.closed(session):
                self._handler.gone(peer)

    def _read_beats(self, session: Session, requests: Iterator[bytes]) -> None:
        peer = session.peer
        try:
            for message in requests:
                about = unpack(message)[0].get("about", {})
                self._handler.beat(peer, speaks_for_itself(peer.role, peer.name, about))
        except (HubError, Refused) as error:
            session.end(error)
        except Exception as error:
            # gRPC ends a broken stream with an exception that is nothing but itself.
            log.debug("%s stopped: %r", peer.name, error)
        session.end()


def _answering(answer: Callable[[Any, Any], bytes]) -> Callable[[Any, Any], bytes]:
    """Returns a call that ends with the status of what goes wrong, and does not show a stranger our insides."""

    @functools.wraps(answer)
    def answered(request: Any, context: Any) -> bytes:
        try:
            return answer(request, context)
        except Exception as error:
            _abort(context, error)
            raise  # abort has raised

    return answered


def _telling(tell: Callable[[Any, Any], Iterator[bytes]]) -> Callable[[Any, Any], Iterator[bytes]]:
    """As `_answering`, for calls with several answers."""

    @functools.wraps(tell)
    def told(request: Any, context: Any) -> Iterator[bytes]:
        try:
            yield from tell(request, context)
        except Exception as error:
            _abort(context, error)

    return told


def _abort(context: Any, error: Exception) -> None:
    if not context.is_active():
        raise error
    if isinstance(error, Failure):
        # Somebody has to make room.
        log.log(logging.ERROR if isinstance(error, NoSpace) else logging.INFO, "%s: %s", context.peer(), error)
        context.abort(status_of(error), str(error)[:1000])
    log.exception("a call of %s failed", context.peer())
    context.abort(extra("grpc").StatusCode.INTERNAL, "the hub failed; its log says why.")


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
        self.coordinator.start(self._hub.push, self._awake.set)
        self._hub.start()
        self._ticker.start()

    def status(self) -> Status:
        return self.coordinator.status()

    def close(self) -> None:
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
            except HubError as error:
                log.warning("%s", error)
                seconds = _AGAIN
            except Exception:
                log.exception("the hub could not do what is due, and tries again")
                seconds = _AGAIN
            self._awake.wait(seconds)
            self._awake.clear()
