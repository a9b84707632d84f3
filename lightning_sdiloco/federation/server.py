"""The hub's side of the connections to all sites. The server identifies callers and transfers blobs
and events. The coordinator makes all decisions.
"""

import logging
import os
import queue
import random
import resource
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
from typing import TypeVar

from typing_extensions import override

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.epoch import Epoch
from lightning_sdiloco.federation.keys import (
    LOOKING,
    Bundle,
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
from lightning_sdiloco.federation.store import BlobStore, Ranges, SQLiteLedger, Upload
from lightning_sdiloco.federation.wire import (
    CHUNK,
    CODES,
    SERVER_OPTIONS,
    SERVICE,
    Busy,
    Context,
    Extra,
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

_Request = TypeVar("_Request")

log = logging.getLogger(__name__)

# The number of calls served at the same time. A site makes one call per connection and one
# long-lived call.
MAX_CALLS = 512
_FOR_OPERATORS = 32  # additional calls that are reserved for operators
_MOST_OF_ONE = {"site": 256}  # open calls per certificate, by role
_MOST_OF_OTHERS = 32
_SILENT = 10.0  # seconds within which a call must identify its caller
MAX_UPLOADS = 64  # blobs that one holder may be sending at the same time
# The maximum number of unread events of a peer. One more event ends its connection.
MAX_EVENTS = 1024
MAX_WATCHING = 16  # concurrent watches per holder; a site needs one
_GIVEN_UP = 600.0  # seconds without a connection after which an incomplete blob is dropped
_AGAIN = 1.0  # seconds after which a failed attempt is repeated
_FEW_DESCRIPTORS = 64  # the hub warns if this process has fewer unused descriptors
_DESCRIPTORS = Path("/proc/self/fd")
_NOISE = random.Random(0).randbytes(CHUNK)  # answers to pings; no device on the way can compress it


class Session:
    """A watching peer with its unread events."""

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
            self.end(NoSpace(f"{self.peer.name!r} is not reading its events."))

    def end(self, error: Failure | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._waiting.put(error)

    def events(self, first: Iterable[Event], heartbeat: float) -> Iterator[Event]:
        """Yields pending events, or a heartbeat if there are none."""
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
    """Admission control for calls before their content is read. The number of calls per certificate
    is limited, and silent calls are ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._open: Counter[tuple[str, str]] = Counter()
        self._silent: dict[Context, float] = {}

    @contextmanager
    def passed(self, context: Context, is_certified: bool) -> Iterator[None]:
        """Holds a slot while a call is running."""
        role = "site"
        name = ""
        limit = MAX_CALLS
        if is_certified:
            holder = holder_of(context)
            role = holder.role
            name = holder.name
            limit = _MOST_OF_ONE.get(role, _MOST_OF_OTHERS)
        with self._lock:
            total = self._open.total()
            is_full = role != "operator" and total >= MAX_CALLS
            if is_full or self._open[role, name] >= limit:
                raise HubUnreachable(
                    f"{name!r} has too many open calls ({self._open[role, name]} of {total})."
                )
            self._open[role, name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[role, name] -= 1
                self._open += Counter()  # drops peers without open calls

    def first(self, requests: Iterator[bytes], context: Context) -> bytes | None:
        """Waits up to a time limit for the first message of a stream."""
        with self._lock:
            self._silent[context] = time.monotonic() + _SILENT
        try:
            return next(requests, None)
        finally:
            with self._lock:
                del self._silent[context]

    def watch(self) -> None:
        """Ends silent streams until `close` is called."""
        while not self._closed.wait(_AGAIN):
            with self._lock:
                now = time.monotonic()
                late = [context for context, deadline in self._silent.items() if deadline < now]
            for context in late:
                context.cancel()

    def close(self) -> None:
        self._closed.set()


class Hub:
    """The server that sites call over gRPC, by default with TLS and certificates on both sides."""

    def __init__(
        self,
        calls: Coordinator,
        store: BlobStore,
        run: str,
        listen: str = "127.0.0.1:0",
        keys: str | Path | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
    ) -> None:
        self.store = store
        # The epoch is part of each answer and event. A hub with files on disk has its epoch there.
        self._stamp: Header = {}
        self._calls = calls
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        # By site: the session of the current incarnation.
        self._of_site: dict[str, Session] = {}
        # By site that has watched: whether it has left since.
        self._has_left: dict[str, bool] = {}
        # By role, name and key: blobs that have arrived in part.
        self._arriving: dict[tuple[str, str, str], Upload] = {}
        self._run = run
        self._bundle = _bundle_of_hub(run, keys, insecure)
        grpc = extra("grpc")
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS + _FOR_OPERATORS, thread_name_prefix="hub"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS + _FOR_OPERATORS,
        )
        self._door = Door()
        self._add_handlers(
            SERVICE,
            {
                "put": grpc.stream_unary_rpc_method_handler(self._answering(self._put)),
                "get": grpc.unary_stream_rpc_method_handler(self._streaming(self._get)),
                "call": grpc.unary_unary_rpc_method_handler(self._answering(self._call)),
                "watch": grpc.stream_stream_rpc_method_handler(self._streaming(self._watch)),
            },
        )
        health = extra("grpc_health.v1.health")
        self._messages = extra("grpc_health.v1.health_pb2")
        self._health = health.HealthServicer()
        self._set_health("NOT_SERVING")
        # Every caller that TLS admits gets the hub's status, without a header. `Watch` is not
        # offered, because it would occupy a thread for each caller.
        check = grpc.unary_unary_rpc_method_handler(
            self._health.Check,
            self._messages.HealthCheckRequest.FromString,
            self._messages.HealthCheckResponse.SerializeToString,
        )
        self._add_handlers(health.SERVICE_NAME, {"Check": check})
        self.port = self._bind(listen)
        if not self.port:
            raise ValueError(
                f"listen={listen!r} cannot be used. Set listen to an address of this machine and a"
                " free port."
            )

    def _add_handlers(self, service: str, handlers: dict[str, Extra]) -> None:
        handler = extra("grpc").method_handlers_generic_handler(service, handlers)
        self._server.add_generic_rpc_handlers((handler,))

    def _bind(self, listen: str) -> int:
        """Returns the port on which the hub listens, or 0 if the address is unavailable."""
        bundle = self._bundle
        try:
            if bundle is None:
                return int(self._server.add_insecure_port(listen))
            credentials = extra("grpc").ssl_server_credentials(
                [(bundle.key, bundle.certificate)], bundle.authority, require_client_auth=True
            )
            return int(self._server.add_secure_port(listen, credentials))
        except RuntimeError:
            return 0

    def start(self) -> None:
        self._calls.start(self.push)
        self._serve()

    def is_serving(self) -> bool:
        """Returns whether the health service reports that the hub has started and is not shutting
        down.
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

    @property
    def is_in_use(self) -> bool:
        """True if any site is connected."""
        return bool(self._of_site)

    @property
    def have_all_left(self) -> bool:
        """True if all sites that have ever connected have left deliberately."""
        with self._lock:
            return bool(self._has_left) and all(self._has_left.values())

    def close(self, grace: float = 0.5) -> None:
        self._health.enter_graceful_shutdown()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.end()
        self._door.close()
        self._server.stop(grace).wait()

    def push(self, event: Event, to: Collection[str] | None = None) -> None:
        with self._lock:
            sessions = [
                session for session in self._sessions if to is None or session.peer.name in to
            ]
        for session in sessions:
            session.push(event)

    def _read(
        self, call: str, message: bytes | None, context: Context
    ) -> tuple[Peer, Header, Header, bytes]:
        """Returns the caller, the full header, the part of the header that describes the call, and
        the body.
        """
        if message is None:
            raise Malformed("a call must start with a header.")
        header, body = unpack(message)
        if call == "call":
            call = str(header.get("call"))[:80]
        peer = peer_of(self._run, self._bundle, call, header, context)
        with self._lock:
            current = self._of_site.get(peer.name)
        # While an incarnation of a site watches and has a lease, no other incarnation may make
        # calls.
        is_other = current is not None and current.peer.incarnation != peer.incarnation
        is_site = call not in LOOKING and peer.role == "site"
        if is_site and is_other and self._calls.is_present(peer.name):
            raise Busy(
                f"the name {peer.name} is in use by a running process with an incarnation other"
                f" than {peer.incarnation!r}."
            )
        return peer, header, header.get("about", {}), body

    # Blobs

    def _put(self, requests: Iterator[bytes], context: Context) -> bytes:
        """Receives a part of a blob, which may be empty. The answer either reports that the blob
        has been stored or lists the missing parts.
        """
        peer, header, about, _ = self._read("put", self._door.first(requests, context), context)
        key = checked_key(header.get("key"))
        size = checked_size(header.get("size"), self.store.max_blob, "blob")
        start = checked_size(header.get("start", 0), size, "part")
        self._calls.admit(peer, about, key, size)
        try:
            missing = self._take(peer, key, size, start, requests)
        except NoSpace as error:
            self._calls.lacks_room(peer, about, error)
            raise
        if missing is not None:
            return pack({**self._stamp, "stored": False, "missing": missing})
        answer = self._calls.stored(peer, about, key, size)
        return pack({**self._stamp, "stored": True, "answer": answer})

    def _take(
        self, peer: Peer, key: str, size: int, start: int, pieces: Iterator[bytes]
    ) -> Ranges | None:
        """Receives the pieces of a blob, beginning at a start position. Returns the missing parts,
        or None if the blob has been stored. An empty list means that another call is about to store
        the blob.
        """
        with suppress(Missing):
            self.store.size(key)
            return None
        upload = self._upload(peer, key, size)
        # Empty blobs and blobs whose sender asks what is missing may already be complete.
        is_complete = not upload.missing
        for piece in pieces:
            is_complete = upload.take(start, piece) or is_complete
            start += len(piece)
        if not is_complete:
            return upload.missing
        try:
            upload.commit()
        finally:
            with self._lock:
                self._arriving.pop((peer.role, peer.name, key), None)
        return None

    def _upload(self, peer: Peer, key: str, size: int) -> Upload:
        place = (peer.role, peer.name, key)
        now = time.monotonic()
        with self._lock:
            given_up = [
                place for place, upload in self._arriving.items() if upload.used < now - _GIVEN_UP
            ]
            for old_place in given_up:
                self._arriving.pop(old_place).discard()
            if place not in self._arriving:
                uploads = sum(sender[:2] == place[:2] for sender in self._arriving)
                if uploads >= MAX_UPLOADS:
                    raise NoSpace(f"{peer.name!r} is already sending {MAX_UPLOADS} blobs.")
                self._arriving[place] = self.store.begin(key, size)
            upload = self._arriving[place]
            upload.used = now
        if upload.size != size:
            raise Malformed(
                f"blob {key} has {upload.size:,} bytes on another connection, but {size:,} on this"
                " one."
            )
        return upload

    def _get(self, message: bytes, context: Context) -> Iterator[bytes]:
        """Sends either a blob's size followed by part of the blob, or several small blobs one after
        another.
        """
        _, header, _, keys = self._read("get", message, context)
        if keys:
            starts = range(0, len(keys), 32)
            yield from self._together([keys[start : start + 32].hex() for start in starts])
            return
        key = checked_key(header.get("key"))
        size = self.store.size(key)
        start = checked_size(header.get("start", 0), size, "part")
        end = checked_size(header.get("end", size), size, "part")
        yield pack({"size": size})
        for position in range(start, end, CHUNK):
            yield self.store.read(key, position, min(position + CHUNK, end))

    def _together(self, keys: Sequence[str]) -> Iterator[bytes]:
        waiting = bytearray()
        for key in map(checked_key, keys):
            size = self.store.size(key)
            if size > CHUNK:
                raise Refused(f"a blob of {size:,} bytes must be fetched separately.")
            waiting += self.store.read(key, 0, size)
            if len(waiting) >= CHUNK:
                yield bytes(waiting[:CHUNK])
                del waiting[:CHUNK]
        yield bytes(waiting)

    # Calls and events

    def _call(self, message: bytes, context: Context) -> bytes:
        peer, header, about, body = self._read("call", message, context)
        if header["call"] == "ping":
            # Sites measure their bandwidth with pings: they get as many bytes as they request.
            answer: Header = {}
            if "bytes" in about:
                body = _NOISE[: checked_size(about["bytes"], CHUNK, "answer")]
            if about.get("clock"):
                answer["clock"] = wall_clock()
        else:
            answer, body = self._calls.call(peer, header["call"], about, body)
        if header["call"] == "leave":
            self._has_left[peer.name] = True
        return pack({**self._stamp, **answer}, body)

    def _watch(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        peer, _, about, _ = self._read("watch", self._door.first(requests, context), context)
        session = Session(peer)
        with self._lock:
            names = [watching.peer.name for watching in self._sessions]
            if names.count(peer.name) >= MAX_WATCHING:
                raise NoSpace(f"{peer.name!r} already has {MAX_WATCHING} open watches.")
            self._sessions.append(session)
        try:
            first = self._calls.hello(peer, about)
            session.admitted = True
            if peer.role == "site":
                with self._lock:
                    before = self._of_site.get(peer.name)
                    self._of_site[peer.name] = session
                    self._has_left[peer.name] = False
                if before is not None:
                    before.end(Refused(f"site {peer.name!r} has opened a watch from elsewhere."))
            name = f"heartbeats-{secrets.token_hex(2)}"
            threading.Thread(
                target=self._read_heartbeats,
                args=(session, requests, context),
                name=name,
                daemon=True,
            ).start()
            for event in session.events(first, self._heartbeat):
                header = {**self._stamp, "kind": event.kind, "about": event.header}
                yield pack(header, event.body)
        finally:
            session.end()
            with self._lock:
                self._sessions.remove(session)
                is_current = self._of_site.get(peer.name) is session
                if is_current:
                    del self._of_site[peer.name]
            if is_current or (peer.role != "site" and session.admitted):
                self._calls.gone(peer)

    def _read_heartbeats(
        self, session: Session, requests: Iterator[bytes], context: Context
    ) -> None:
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
            # gRPC ends a broken stream with a bare exception.
            log.debug("%s stopped: %r", peer.name, error)
        session.end()

    def _streaming(
        self, stream: Callable[[_Request, Context], Iterator[bytes]]
    ) -> Callable[[_Request, Context], Iterator[bytes]]:
        """Wraps a call so that a failure ends the call with a status code and reveals no internals
        to strangers.
        """

        def guarded(request: _Request, context: Context) -> Iterator[bytes]:
            try:
                with self._door.passed(context, self._bundle is not None):
                    yield from stream(request, context)
            except Exception as error:
                if not context.is_active():
                    raise
                codes = extra("grpc").StatusCode
                if isinstance(error, Failure):
                    # Each error is logged in one line, whatever a stranger has sent. NoSpace is an
                    # error, because the operator must make space.
                    reason = " ".join(str(error).split())
                    level = logging.ERROR if isinstance(error, NoSpace) else logging.INFO
                    log.log(level, "%s: %s", context.peer(), reason)
                    code = getattr(codes, CODES.get(type(error), "INTERNAL"))
                    context.abort(code, reason[:1000])
                log.exception("a call of %s failed", context.peer())
                context.abort(codes.INTERNAL, "the hub failed. See the hub's log.")

        return guarded

    def _answering(
        self, answer: Callable[[_Request, Context], bytes]
    ) -> Callable[[_Request, Context], bytes]:
        """Wraps a call that has a single answer, in the same way as `_streaming`."""

        def stream(request: _Request, context: Context) -> Iterator[bytes]:
            yield answer(request, context)

        guarded = self._streaming(stream)
        return lambda request, context: next(guarded(request, context))


def _bundle_of_hub(run: str, keys: str | Path | None, insecure: bool) -> Bundle | None:
    if (keys is None) != insecure:
        raise ValueError(
            "A hub needs either keys or insecure=True. Create keys with: sdiloco keys init FOLDER"
            " --run RUN."
        )
    if keys is None:
        warnings.warn(
            "The hub is running without TLS (insecure=True), so anyone who can reach its port can"
            " read and change everything.",
            stacklevel=3,
        )
        return None
    bundle = load(keys, "hub").bound(run)
    if bundle.identity.role != "hub":
        owner = f"{bundle.identity.role} {bundle.identity.name!r}"
        raise ValueError(
            f"The keys belong to {owner}, but a hub needs its own keys. Use hub.bundle."
        )
    return bundle


def raise_limit_of_descriptors() -> None:
    """Raises this process's limit on open connections and files to the machine's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems allow less than they report.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def scarce_descriptors() -> str | None:
    """Returns a warning if this process is known to be running out of descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or not _DESCRIPTORS.exists():
        return None
    used = len(os.listdir(_DESCRIPTORS))
    if used <= limit - _FEW_DESCRIPTORS:
        return None
    return (
        f"{used:,} of {limit:,} descriptors are in use, and connections from strangers may lock out"
        " sites. Configure a firewall to admit only the sites, or raise the limit (ulimit -n)."
    )


class HubService(Hub):
    """A hub that serves a run from files on disk."""

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
                f"ledger={str(ledger)!r} is a URL, but the ledger must be a file on the hub's"
                " machine. Set ledger to a path. If the hub stops, restart it with the same ledger."
                " Sites continue training in the meantime."
            )
        if backups is not None and Path(backups).resolve() == Path(ledger).resolve().parent:
            raise ValueError(
                f"backups={str(backups)!r} is the folder of the run itself, and a backup would"
                " overwrite the run. Choose a different folder on another disk."
            )
        if quorum is not None:
            imported(quorum)  # now, so that errors appear before a site names it
        raise_limit_of_descriptors()
        self._has_warned_of_descriptors = False
        self._look_at_descriptors = time.monotonic()
        self._awake = threading.Event()
        self._closed = threading.Event()
        self.ledger = SQLiteLedger(ledger, must_exist=sites is None)
        try:
            blobs = BlobStore(Path(ledger).with_suffix(".store") if store is None else store)
            blobs.drop_incomplete()
            find = partial(built_in, named=quorum)
            self.coordinator = Coordinator(
                run, self.ledger, blobs, sites, find_quorum=find, refound=refound
            )
            self.coordinator.backup_folder = None if backups is None else Path(backups)
            super().__init__(self.coordinator, blobs, run, listen, keys, insecure, heartbeat)
            # This call ends an earlier hub, so nothing after it may refuse to serve.
            self._epoch = Epoch(Path(ledger))
            self._stamp = {"epoch": self._epoch.number}
            self.ledger.before_write = self._epoch.require
        except BaseException:
            self.ledger.close()
            raise
        self._ticker = threading.Thread(target=self._tick, name="hub-clock", daemon=True)
        self._copier = threading.Thread(
            target=self._back_up, args=(backups_every,), name="hub-backup", daemon=True
        )

    def require_latest(self) -> None:
        """Raises ValueError if another hub has started on this ledger, as described in [Note: two
        hubs].
        """
        try:
            self._epoch.require()
        except HubUnreachable as error:
            raise ValueError(f"This hub ends: {error}") from error

    @override
    def start(self) -> None:
        self.coordinator.start(self.push, self._awake.set)
        self._serve()
        self._ticker.start()
        if self.coordinator.backup_folder is not None:
            self._copier.start()

    @override
    def close(self, grace: float = 0.5) -> None:
        # The health status changes first, because a copy in progress may take a long time to
        # finish.
        self._health.enter_graceful_shutdown()
        self._closed.set()
        self._awake.set()
        for thread in (self._ticker, self._copier):
            if thread.ident is not None:
                thread.join()
        super().close(grace)
        # Calls that are still being answered no longer inform sites.
        self.coordinator.start(lambda event, to=None: None)
        self.ledger.close()

    def _back_up(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self.coordinator.room.back_up(self.coordinator.backup_folder or Path())
            except (HubError, Refused, OSError) as error:
                log.error("the run could not be copied: %s", error)

    def _warn_of_descriptors(self) -> None:
        now = time.monotonic()
        if now < self._look_at_descriptors:
            return
        self._look_at_descriptors = now + _AGAIN
        warning = scarce_descriptors()
        if warning and not self._has_warned_of_descriptors:
            log.error("%s", warning)
        self._has_warned_of_descriptors = warning is not None

    def _tick(self) -> None:
        while not self._closed.is_set():
            self._warn_of_descriptors()
            try:
                # Dropping blobs is not a write to the ledger, which would check this.
                self._epoch.require()
                seconds = self.coordinator.tick()
            except HubError as error:
                log.warning("%s", error)
                seconds = _AGAIN
            except Exception:
                log.exception("a periodic task of the hub failed and will be retried")
                seconds = _AGAIN
            began = time.monotonic()
            self._awake.wait(seconds)
            self._awake.clear()
            # If the process was stopped, this is most likely the place.
            self.coordinator.resumed(time.monotonic() - began - seconds)
