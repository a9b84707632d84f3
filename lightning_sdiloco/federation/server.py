"""The hub's end of the connections to all sites: it knows who calls, moves blobs and events, and
leaves the rest.
"""

import logging
import queue
import random
import secrets
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.keys import (
    LOOKING,
    Peer,
    holder_of,
    load,
    peer_of,
    require_valid,
    speaks_for_itself,
    wall_clock,
)
from lightning_sdiloco.federation.messages import Event
from lightning_sdiloco.federation.quorum import built_in, imported
from lightning_sdiloco.federation.store import BlobStore, SQLiteLedger, Upload
from lightning_sdiloco.federation.wire import (
    CHUNK,
    CODES,
    SERVER_OPTIONS,
    SERVICE,
    Busy,
    Failure,
    Header,
    HubError,
    HubUnreachable,
    Missing,
    NoSpace,
    checked_key,
    checked_size,
    extra,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

# that are served at the same time; a site makes one for each of its connections, and one that stays
MAX_CALLS = 512
_FOR_OPERATORS = 32  # further ones, so that there is always room for them
_MOST_OF_ONE = {"site": 256}  # calls that one certificate may have open; others fewer
_MOST_OF_OTHERS = 32
_SILENT = 10.0  # seconds within which a call says who makes it
MAX_UPLOADS = 64  # blobs that one holder may be sending at the same time
# that wait for a peer that does not read them; with one more it is sent away, and must start again
MAX_EVENTS = 1024
MAX_WATCHING = 16  # how often a holder that is no site may watch at the same time
_GIVEN_UP = 600.0  # seconds without a connection after which what has arrived of a blob is dropped
_AGAIN = 1.0  # seconds after which something is tried again that did not succeed
_NOISE = random.Random(0).randbytes(
    CHUNK
)  # what pings are answered with; nothing on the way makes it smaller


class Session:
    """A watching peer: its events wait until it reads them."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.admitted = False
        self._ended = False
        self._waiting: queue.SimpleQueue[Event | Failure | None] = queue.SimpleQueue()

    def push(self, event: Event) -> None:
        if not self._ended and self._waiting.qsize() < MAX_EVENTS:
            self._waiting.put(event)
        elif not self._ended:
            with suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait()
            self.end(NoSpace(f"{self.peer.name!r} does not read its events."))

    def end(self, error: Failure | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._waiting.put(error)

    def events(self, first: Iterable[Event], heartbeat: float) -> Iterator[Event]:
        """Yields waiting events, and a heartbeat if there are none."""
        yield from first
        while True:
            try:
                event = self._waiting.get(timeout=heartbeat)
            except queue.Empty:
                event = Event("heartbeat", {})
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            yield event


class Door:
    """Lets a call in before anything of it is read: a limited number per certificate, none that
    stays silent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._open: Counter[tuple[str, str]] = Counter()
        self._silent: dict[Any, float] = {}

    @contextmanager
    def passed(self, context: Any, is_certified: bool) -> Iterator[None]:
        """Holds a place for a call as long as it lasts."""
        holder = holder_of(context) if is_certified else None
        who = ("site", "") if holder is None else (holder.role, holder.name)
        most = MAX_CALLS if holder is None else _MOST_OF_ONE.get(who[0], _MOST_OF_OTHERS)
        with self._lock:
            if self._open[who] >= most or (
                who[0] != "operator" and self._open.total() >= MAX_CALLS
            ):
                raise HubUnreachable(
                    f"{who[1]!r} has {self._open[who]} calls open, of {self._open.total()} in"
                    " all: too many."
                )
            self._open[who] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[who] -= 1
                self._open += Counter()  # drops peers without any

    def first(self, requests: Iterator[bytes], context: Any) -> bytes | None:
        """Returns the first message of a stream, which has a moment for it."""
        with self._lock:
            self._silent[context] = time.monotonic() + _SILENT
        try:
            return next(requests, None)
        finally:
            with self._lock:
                del self._silent[context]

    def watch(self) -> None:
        """Ends streams that stay silent, until `close`."""
        while not self._closed.wait(_AGAIN):
            with self._lock:
                late = [
                    context for context, until in self._silent.items() if until < time.monotonic()
                ]
            for context in late:
                context.cancel()

    def close(self) -> None:
        self._closed.set()


class Hub:
    """Serves sites over gRPC, with TLS and certificates at both ends by default."""

    def __init__(
        self,
        calls: Any,
        store: BlobStore,
        run: str,
        listen: str = "127.0.0.1:0",
        keys: str | Path | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
    ) -> None:
        self.store = store
        self._calls = calls
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        self._of_site: dict[str, Session] = {}
        self._arriving: dict[tuple[str, str, str], Upload] = {}
        if (keys is None) != insecure:
            raise ValueError(
                "A hub needs either keys or insecure=True. Make keys with: sdiloco keys init"
                " FOLDER --run RUN."
            )
        bundle = None if keys is None else load(keys, "hub").bound(run)
        if bundle is None:
            warnings.warn(
                "The hub serves without TLS: anyone who reaches its port can read and change all"
                " (insecure=True).",
                stacklevel=2,
            )
        elif bundle.identity.role != "hub":
            whose = f"{bundle.identity.role} {bundle.identity.name!r}"
            raise ValueError(
                f"The keys belong to {whose}, but a hub needs its own: give hub.bundle."
            )
        self._run = run
        self._bundle = bundle
        grpc = extra("grpc")
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS + _FOR_OPERATORS, thread_name_prefix="hub"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS + _FOR_OPERATORS,
        )
        self._door = Door()
        handlers = {
            "put": grpc.stream_unary_rpc_method_handler(self._answering(self._put)),
            "get": grpc.unary_stream_rpc_method_handler(self._telling(self._get)),
            "call": grpc.unary_unary_rpc_method_handler(self._answering(self._call)),
            "watch": grpc.stream_stream_rpc_method_handler(self._telling(self._watch)),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        health = extra("grpc_health.v1.health")
        self._messages = extra("grpc_health.v1.health_pb2")
        self._health = health.HealthServicer()
        self._set_health("NOT_SERVING")
        # It gives its status to all that TLS lets in, without a header. `Watch` would hold a thread
        # for each caller.
        check = grpc.unary_unary_rpc_method_handler(
            self._health.Check,
            self._messages.HealthCheckRequest.FromString,
            self._messages.HealthCheckResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),)
        )
        try:
            if bundle is None:
                self.port = int(self._server.add_insecure_port(listen))
            else:
                pair = [(bundle.key, bundle.certificate)]
                credentials = grpc.ssl_server_credentials(
                    pair, bundle.authority, require_client_auth=True
                )
                self.port = int(self._server.add_secure_port(listen, credentials))
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise ValueError(
                f"listen={listen!r} cannot be used: give a free port and an address of this"
                " machine."
            )

    def start(self) -> None:
        self._calls.start(self.push)
        self._serve()

    def is_serving(self) -> bool:
        """Returns what the health service answers: whether the hub has started, and is not
        ending.
        """
        answer = self._health.Check(self._messages.HealthCheckRequest(), None)
        return bool(answer.status == self._messages.HealthCheckResponse.SERVING)

    def _set_health(self, status: str) -> None:
        for service in ("", SERVICE):
            self._health.set(
                service, self._messages.HealthCheckResponse.ServingStatus.Value(status)
            )

    def _serve(self) -> None:
        self._server.start()
        self._set_health("SERVING")
        threading.Thread(target=self._door.watch, name="hub-door", daemon=True).start()

    def close(self, grace: float = 0.5) -> None:
        self._health.enter_graceful_shutdown()
        with self._lock:
            ended = list(self._sessions)
        for session in ended:
            session.end()
        self._door.close()
        self._server.stop(grace).wait()

    def push(self, event: Event, to: Collection[str] | None = None) -> None:
        with self._lock:
            told = [session for session in self._sessions if to is None or session.peer.name in to]
        for session in told:
            session.push(event)

    def _asked(
        self, call: str, message: bytes | None, context: Any
    ) -> tuple[Peer, Header, Header, bytes]:
        """Returns who asks, the whole header, what the call is about, and the bytes that belong to
        it.
        """
        if message is None:
            raise Malformed("a call begins with a header.")
        header, body = unpack(message)
        call = str(header.get("call"))[:80] if call == "call" else call
        peer = peer_of(self._run, self._bundle, call, header, context)
        with self._lock:
            current = self._of_site.get(peer.name)
        # No other incarnation of a site calls than that which watches now, before or after it.
        watches = peer.incarnation if current is None else current.peer.incarnation
        if call not in LOOKING and peer.role == "site" and peer.incarnation != watches:
            raise Busy(
                f"the name {peer.name} is in use by a running process: incarnation"
                f" {peer.incarnation!r} is not the one"
                " that watches."
            )
        return peer, header, header.get("about", {}), body

    # Blobs

    def _put(self, requests: Iterator[bytes], context: Any) -> bytes:
        """Takes a part of a blob, or none, and says what has become of it, or what is missing."""
        peer, header, about, _ = self._asked("put", self._door.first(requests, context), context)
        key = checked_key(header.get("key"))
        size = checked_size(header.get("size"), self.store.max_blob, "blob")
        start = checked_size(header.get("start", 0), size, "part")
        self._calls.admit(peer, about, key, size)
        try:
            self.store.size(key)
        except Missing:
            upload = self._upload(peer, key, size)
            # Complete at once: an empty blob, or one whose sender asks what became of it.
            complete = not upload.missing
            for message in requests:
                complete = upload.take(start, message) or complete
                start += len(message)
            if not complete:
                return pack({"stored": False, "missing": upload.missing})
            try:
                upload.commit()
            finally:
                with self._lock:
                    self._arriving.pop((peer.role, peer.name, key), None)
        return pack({"stored": True, "answer": self._calls.stored(peer, about, key, size)})

    def _upload(self, peer: Peer, key: str, size: int) -> Upload:
        place = (peer.role, peer.name, key)
        now = time.monotonic()
        with self._lock:
            for other in [
                own for own, upload in self._arriving.items() if upload.used < now - _GIVEN_UP
            ]:
                self._arriving.pop(other).discard()
            if place not in self._arriving:
                if sum(other[:2] == place[:2] for other in self._arriving) >= MAX_UPLOADS:
                    raise NoSpace(f"{peer.name!r} is sending {MAX_UPLOADS} blobs already.")
                self._arriving[place] = self.store.begin(key, size)
            upload = self._arriving[place]
            upload.used = now
        if upload.size != size:
            raise Malformed(
                f"blob {key} has {upload.size:,} bytes on another connection, but {size:,} here."
            )
        return upload

    def _get(self, message: bytes, context: Any) -> Iterator[bytes]:
        """Sends the size of a blob, and then a part of it; or several small ones, one behind the
        other.
        """
        _, header, _, keys = self._asked("get", message, context)
        if keys:
            yield from self._together([keys[at : at + 32].hex() for at in range(0, len(keys), 32)])
            return
        key = checked_key(header.get("key"))
        size = self.store.size(key)
        start = checked_size(header.get("start", 0), size, "part")
        end = checked_size(header.get("end", size), size, "part")
        yield pack({"size": size})
        for at in range(start, end, CHUNK):
            yield self.store.read(key, at, min(at + CHUNK, end))

    def _together(self, keys: Sequence[str]) -> Iterator[bytes]:
        waiting = bytearray()
        for key in map(checked_key, keys):
            size = self.store.size(key)
            if size > CHUNK:
                raise Refused(f"fetch a blob of {size:,} bytes on its own.")
            waiting += self.store.read(key, 0, size)
            if len(waiting) >= CHUNK:
                yield bytes(waiting[:CHUNK])
                del waiting[:CHUNK]
        yield bytes(waiting)

    # Words

    def _call(self, message: bytes, context: Any) -> bytes:
        peer, header, about, body = self._asked("call", message, context)
        if header["call"] == "ping":
            # Its own bytes, or as many as it asks for: so the way is measured.
            answer = (
                _NOISE[: checked_size(about["bytes"], CHUNK, "answer")]
                if "bytes" in about
                else body
            )
            return pack({"clock": wall_clock()} if about.get("clock") else {}, answer)
        return pack(*self._calls.call(peer, header["call"], about, body))

    def _watch(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        peer, _, about, _ = self._asked("watch", self._door.first(requests, context), context)
        session = Session(peer)
        with self._lock:
            if sum(other.peer.name == peer.name for other in self._sessions) >= MAX_WATCHING:
                raise NoSpace(f"{peer.name!r} watches {MAX_WATCHING} times already.")
            self._sessions.append(session)
        try:
            first = self._calls.hello(peer, about)
            session.admitted = True
            if peer.role == "site":
                with self._lock:
                    before, self._of_site[peer.name] = self._of_site.get(peer.name), session
                if before is not None:
                    before.end(Refused(f"site {peer.name!r} watches from elsewhere."))
            name = f"heartbeats-{secrets.token_hex(2)}"
            threading.Thread(
                target=self._read_heartbeats,
                args=(session, requests, context),
                name=name,
                daemon=True,
            ).start()
            for event in session.events(first, self._heartbeat):
                yield pack({"kind": event.kind, "about": event.header}, event.body)
        finally:
            session.end()
            with self._lock:
                self._sessions.remove(session)
                is_current = self._of_site.get(peer.name) is session
                if is_current:
                    del self._of_site[peer.name]
            if is_current or (peer.role != "site" and session.admitted):
                self._calls.gone(peer)

    def _read_heartbeats(self, session: Session, requests: Iterator[bytes], context: Any) -> None:
        peer = session.peer
        try:
            for message in requests:
                if self._bundle is not None:
                    require_valid(self._bundle, context)
                about = unpack(message)[0].get("about", {})
                self._calls.heartbeat(peer, speaks_for_itself(peer.role, peer.name, about))
        except (HubError, Refused) as error:
            session.end(error)
        except Exception as error:
            # gRPC ends a broken stream with an exception that is nothing but itself.
            log.debug("%s stopped: %r", peer.name, error)
        session.end()

    def _telling(
        self, tell: Callable[[Any, Any], Iterator[bytes]]
    ) -> Callable[[Any, Any], Iterator[bytes]]:
        """Returns a call that ends with the status of what goes wrong, and does not show a
        stranger our insides.
        """

        def told(request: Any, context: Any) -> Iterator[bytes]:
            try:
                with self._door.passed(context, self._bundle is not None):
                    yield from tell(request, context)
            except Exception as error:
                if not context.is_active():
                    raise
                codes = extra("grpc").StatusCode
                if isinstance(error, Failure):
                    # A line each, whatever a stranger has sent. The operator has to make room.
                    why = " ".join(str(error).split())
                    log.log(
                        logging.ERROR if isinstance(error, NoSpace) else logging.INFO,
                        "%s: %s",
                        context.peer(),
                        why,
                    )
                    context.abort(getattr(codes, CODES.get(type(error), "INTERNAL")), why[:1000])
                log.exception("a call of %s failed", context.peer())
                context.abort(codes.INTERNAL, "the hub failed; see its log.")

        return told

    def _answering(self, answer: Callable[[Any, Any], bytes]) -> Callable[[Any, Any], bytes]:
        """As `_telling`, for calls with one answer."""
        told = self._telling(lambda request, context: iter([answer(request, context)]))
        return lambda request, context: next(told(request, context))


class HubService(Hub):
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
        heartbeat: float = 1.0,
        quorum: str | None = None,
        backups: str | Path | None = None,
        backups_every: float = 3600.0,
        refound: bool = False,
    ) -> None:
        if "://" in str(ledger):
            raise ValueError(
                f"ledger={str(ledger)!r} is a URL, but a run has one hub, whose ledger is a file"
                " on its machine: give a"
                " path. If that hub ends, restart it with its ledger; sites train on meanwhile."
            )
        if backups is not None and Path(backups).resolve() == Path(ledger).resolve().parent:
            raise ValueError(
                f"backups={str(backups)!r} is not a place for copies: the run itself is in that"
                " folder, and a copy"
                " would overwrite it. Give another folder, on another disk."
            )
        if quorum is not None:
            imported(quorum)  # now, and not when a site names it
        self._awake = threading.Event()
        self._closed = threading.Event()
        self.ledger = SQLiteLedger(ledger, must_exist=sites is None)
        try:
            blobs = BlobStore(Path(ledger).with_suffix(".store") if store is None else store)
            find = partial(built_in, named=quorum)
            self.coordinator = Coordinator(
                run, self.ledger, blobs, sites, find_quorum=find, refound=refound
            )
            self.coordinator.backup_folder = None if backups is None else Path(backups)
            super().__init__(self.coordinator, blobs, run, listen, keys, insecure, heartbeat)
        except BaseException:
            self.ledger.close()
            raise
        self._ticker = threading.Thread(target=self._tick, name="hub-clock", daemon=True)
        self._copier = threading.Thread(
            target=self._back_up, args=(backups_every,), name="hub-backup", daemon=True
        )

    @override
    def start(self) -> None:
        self.coordinator.start(self.push, self._awake.set)
        self._serve()
        self._ticker.start()
        if self.coordinator.backup_folder is not None:
            self._copier.start()

    @override
    def close(self, grace: float = 0.5) -> None:
        # first of all: a copy that is being made may take long to end
        self._health.enter_graceful_shutdown()
        self._closed.set()
        self._awake.set()
        for thread in (self._ticker, self._copier):
            if thread.ident is not None:
                thread.join()
        super().close(grace)
        # What is still being answered informs no site.
        self.coordinator.start(lambda event, to=None: None)
        self.ledger.close()

    def _back_up(self, every: float) -> None:
        while not self._closed.wait(every):
            try:
                self.coordinator.back_up(self.coordinator.backup_folder or Path())
            except (HubError, Refused, OSError) as error:
                log.error("the run could not be copied: %s", error)

    def _tick(self) -> None:
        while not self._closed.is_set():
            try:
                seconds = self.coordinator.tick()
            except HubError as error:
                log.warning("%s", error)
                seconds = _AGAIN
            except Exception:
                log.exception("the hub could not do its regular work, and tries again")
                seconds = _AGAIN
            self._awake.wait(seconds)
            self._awake.clear()
