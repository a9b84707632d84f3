"""A site's connections to its hub, over gRPC or in memory. gRPC calls fail quickly while the hub is
unreachable and succeed again once it is back.
"""

import itertools
import random
import secrets
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from typing_extensions import override

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.codec import Bytes, key_of, read
from lightning_sdiloco.federation.keys import Identity, Peer, Role, bundle_of, host_of
from lightning_sdiloco.federation.messages import Event, Payload, Recorded, StateOffered, read_event
from lightning_sdiloco.federation.wire import (
    AWAY,
    CHUNK,
    CLIENT_OPTIONS,
    ERRORS,
    LONGEST_CONNECTING_MS,
    MAX_BLOB,
    PROTOCOL,
    SERVICE,
    Altered,
    Busy,
    Channel,
    Extra,
    Failure,
    Header,
    HubError,
    HubUnreachable,
    backoff,
    checked_key,
    checked_size,
    extra,
    pack,
    unpack,
)

# The rate in bytes per second below which a blob is eventually given up: half of 1 Mbit/s.
LEAST_RATE = 64 << 10
PATIENCE = 30.0  # seconds without progress after which a connection is given up
_SILENT_HEARTBEATS = 4  # missed hub heartbeats after which the hub counts as gone
_LONGEST_PAUSE = 2.0  # seconds: a recovered link is noticed at the next attempt
_PAUSE = 0.2  # seconds before a blob is retried, doubled after each attempt that moves nothing
_STUCK = 4
# The seconds that a call may take if it must first connect.
_CONNECTING = LONGEST_CONNECTING_MS / 1000 + 8.0
LIMIT_OF_DISTANCE = "is the round trip to the hub longer than the limit of 6 s?"
_THREADS = 128

# The bandwidth to a hub is measured with pings: this many concurrent pings on a connection, of this
# many bytes each, until the connection is busy.
_MOST_BYTES = 128 << 20
_CALLS = 20
_STEPS = ((1, CHUNK // 16), (1, CHUNK // 4), (1, CHUNK), (4, CHUNK))
_NOISE = random.Random(0).randbytes(CHUNK)  # no device on the way can compress it

if TYPE_CHECKING:
    from lightning_sdiloco.federation.coordinator import Coordinator
    from lightning_sdiloco.federation.store import InMemoryStore

Answer = TypeVar("Answer")
_Parts = list[list[int]]


AnyLink = Any
"""A `VirtualLink` from `federation.memory`, or None. That module imports this one, so the type
cannot be named here."""


class EventListener(Protocol):
    """A connection that receives a site's events and supplies the site's messages to the hub."""

    hello_header: Header
    heartbeat_header: Header
    lease: float

    def hear(self, event: Event) -> None: ...

    def fail(self, error: Exception) -> None: ...


class HubInMemory(Protocol):
    run: str
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    store: "InMemoryStore"
    clients: "dict[str, InProcessClient]"
    coordinator: "Coordinator"


class _Attempt:
    """A single attempt to transfer a blob in parts, using multiple threads.

    Attributes:
        timeout: The time limit of the attempt in seconds.
        calls: The calls of the attempt, which are cancelled when the attempt ends.
        progress: A counter that increases whenever bytes are transferred.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.calls: list[Extra] = []
        self.progress = 0


def hub_addresses(hub: str) -> list[tuple[str, int]]:
    if "://" in hub or hub.startswith("/"):
        raise ValueError(
            f"hub={hub!r} is a folder or bucket, but sites connect to a hub. Start a hub on a"
            " machine that all sites can reach (sdiloco hub), and set hub to its ADDRESS:PORT. The"
            " hub can store payloads in a folder or bucket (--store)."
        )
    addresses = []
    for text in map(str.strip, hub.split(",")):
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(
                f"hub={text!r} is not an address. Use HOST:PORT, for example a.example:29400."
            )
        if not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"hub={text!r} has port {port}, but a port must be a number from 1 to 65535."
            )
        addresses.append((host.strip("[]"), int(port)))
    return addresses


class HubClient:
    """A gRPC client for a hub, with one connection for calls and events and multiple connections
    for parts of blobs.
    """

    def __init__(
        self,
        hub: str,
        run: str,
        name: str,
        keys: str | Path | None = None,
        insecure: bool = False,
        role: Role = "site",
        channels: int = 8,  # with packet loss, eight carry five times as much as one connection
        timeout: float = 10.0,
        heartbeat: float = 1.0,
        incarnation: str = "",
    ) -> None:
        if channels < 1:
            raise ValueError(f"channels={channels} is out of range: it must be at least 1.")
        self._grpc = extra("grpc")
        bundle = bundle_of(hub, name, keys, insecure)
        self.identity = Identity(run, role, name)
        if bundle is not None:
            bundle = bundle.bound(run)
            self.identity = bundle.identity._replace(run=run)
        else:
            warnings.warn(
                f"The connection to hub {hub} is not encrypted (insecure=True), so anyone on the"
                " network path can read and change the traffic.",
                stacklevel=2,
            )
        self.incarnation = incarnation or secrets.token_hex(8)
        self.max_blob = MAX_BLOB
        self._bundle = bundle
        self._heartbeat = heartbeat
        self._timeout = timeout
        hub_addresses(hub)
        self._hubs = [address.strip() for address in hub.split(",")]
        self._turn = 0
        self._channels = [self._channel() for _ in range(channels + 1)]
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-client")
        self.away: str | None = None  # why the hub counts as gone
        self._epoch = 0  # the latest epoch seen in this run
        self._listening = False
        self._listener: threading.Thread | None = None
        self._closed = threading.Event()

    def call(
        self, name: str, about: Header | None = None, body: bytes = b""
    ) -> tuple[Header, bytes]:
        message = pack(self._header(about) | {"call": name}, body)
        return self._from_any(lambda: self._unpacked(self._answer(message)))

    def send(self, blob: Bytes, about: Header | None = None, key: str | None = None) -> Header:
        """Sends a blob and its kind to the hub and returns the hub's answer."""
        view = memoryview(blob).cast("B")
        header = self._header(about) | {"key": key or key_of(view), "size": len(view)}
        return self._from_any(lambda: self._sent(header, view))

    def get(self, key: str, size: int | None = None) -> bytearray:
        message = pack(self._header() | {"key": checked_key(key), "start": 0, "end": 0})

        def ask() -> int:
            self.require()
            try:
                get = self._method("unary_stream", "get")
                return self._size_of(get(message, timeout=self._timeout))
            except Exception as error:
                raise self._error(error) from error

        size = self._from_any(ask) if size is None else checked_size(size, self.max_blob, "blob")
        return self._from_any(lambda: self._fetched(key, size))

    def get_small(self, wanted: Sequence[Payload]) -> dict[str, Bytes]:
        """Fetches multiple blobs in one stream, which costs the hub about as much as sending a
        single blob.
        """
        size = sum(payload.size for payload in wanted)
        keys = b"".join(bytes.fromhex(payload.key) for payload in wanted)
        message = pack(self._header(), keys)
        stream = memoryview(self._from_any(lambda: self._joined(message, size)))
        blobs = dict[str, Bytes]()
        position = 0
        for payload in wanted:
            end = position + payload.size
            blobs[payload.key] = stream[position:end]
            position = end
            if key_of(blobs[payload.key]) != payload.key:
                raise Altered(f"the hub sent altered bytes that do not match digest {payload.key}.")
        return blobs

    def _joined(self, message: bytes, size: int) -> bytearray:
        """Fetches a stream of blobs with ``size`` bytes in total."""
        self.require()
        channel = random.choice(self._channels[1:])
        stream = bytearray()
        try:
            get = self._method("unary_stream", "get", channel)
            for piece in get(message, PATIENCE + size / LEAST_RATE):
                stream += piece
                if len(stream) > size:
                    raise Malformed("the hub sent more than was requested.")
        except Exception as error:
            raise self._error(error) from error
        if len(stream) < size:
            raise HubUnreachable(f"hub {self._hub} ended a stream prematurely.")
        return stream

    def events(
        self, hello: Callable[[], Header], heartbeat: Callable[[], Header] = dict
    ) -> Iterator[Event]:
        """Yields the hub's events until the client is closed. A "lost" event is inserted whenever a
        connection fails.
        """
        failures = 0
        self._listening = True
        try:
            while not self._closed.is_set():
                why = f"hub {self._hub} ended the connection."
                kind = "HubUnreachable"
                try:
                    patience = self._heartbeat * _SILENT_HEARTBEATS * 2**failures
                    for event in self._connection(hello(), heartbeat, patience):
                        failures = 0
                        if event.kind != "heartbeat":
                            yield event
                except (Refused, Altered):
                    raise
                except HubError as error:
                    why = str(error)
                    kind = type(error).__name__
                if self._closed.is_set():
                    return
                # Calls that wait for the hub fail immediately, and new connections are made. A hub
                # that reports a missing blob is still reachable.
                self.away = None if kind == "Missing" else why
                if self.away is not None:
                    self._look_elsewhere()
                yield Event("lost", {"why": why, "kind": kind})
                self._closed.wait(backoff(failures, self._heartbeat / 5, _LONGEST_PAUSE))
                failures = min(failures + 1, 10)
        finally:
            self._listening = False
            # Otherwise, calls would keep failing after the hub returns.
            self.away = None

    def round_trip(self) -> float:
        """Measures the duration of a small call as the median of several calls, in seconds."""
        message = pack(self._header() | {"call": "ping"})
        seconds = []
        self._answer(message, seconds=_CONNECTING)
        for _ in range(_CALLS):
            began = time.perf_counter()
            self._answer(message)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def bandwidth(self, up: bool, seconds: float) -> float:
        """Measures the total bandwidth of all blob connections in one direction, in bits per
        second.
        """
        message = self._ping(0, 0)
        connecting = [
            partial(self._answer, message, channel, _CONNECTING) for channel in self._channels[1:]
        ]
        _raise_first(self._at_once(connecting, lambda: 0))
        for at_once, size in _STEPS:
            began = time.perf_counter()
            self._burst(up, at_once, size)
            if time.perf_counter() - began > seconds / 4:
                break
        return self._burst(up, at_once, size, _MOST_BYTES, time.perf_counter() + seconds)

    def _burst(self, up: bool, at_once: int, size: int, most: int = 0, until: float = 0.0) -> float:
        """Sends concurrent pings over all connections until a time limit or a byte limit is
        reached. Returns the rate in bits per second.
        """
        message = self._ping(size if up else 0, 0 if up else size)
        moments = list[float]()

        def ping(channel: Channel) -> None:
            while True:
                self._answer(message, channel)
                moments.append(time.perf_counter())
                if moments[-1] >= until or len(moments) * size >= most:
                    return

        began = time.perf_counter()
        tasks = [partial(ping, channel) for channel in self._channels[1:] * at_once]
        _raise_first(self._at_once(tasks, moments.__len__))
        # Connections start slowly, so only the second half of the time is measured.
        middle = (began + max(moments)) / 2
        answers = sum(moment > middle for moment in moments)
        return 8 * size * answers / max(max(moments) - middle, 1e-9)

    def _ping(self, sent_bytes: int, answer_bytes: int) -> bytes:
        header = self._header() | {"call": "ping", "about": {"bytes": answer_bytes}}
        return pack(header, _NOISE[:sent_bytes])

    # The transport of a connection

    sends_bytes_per_s = 0.0  # set by the connection, which measures it
    now = staticmethod(time.monotonic)

    def listen(self, connection: EventListener) -> None:
        """Starts a thread that passes the hub's events and errors to a connection, and the
        connection's hello and heartbeats to the hub.
        """

        def run() -> None:
            try:
                for event in self.events(
                    lambda: connection.hello_header, lambda: connection.heartbeat_header
                ):
                    connection.hear(event)
            except Exception as error:
                connection.fail(
                    Refused(str(error)) if isinstance(error, HubError | ValueError) else error
                )

        self._listener = threading.Thread(target=run, name="hub-listener", daemon=True)
        self._listener.start()

    def turn(self) -> None:
        """Does nothing, because the hub has its own clock and the listening thread sends
        heartbeats.
        """

    def wait(
        self, changed: threading.Condition, is_over: Callable[[], bool], timeout: float
    ) -> bool:
        with changed:
            return changed.wait_for(is_over, timeout)

    def pool(self, threads: int, name: str) -> Executor:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)

    def pause(self, over: threading.Event, tries: int = 0) -> bool:
        """Waits until the next attempt is due or an event is set. Returns whether to try again."""
        over.wait(backoff(tries))
        return not self._closed.is_set()

    def close(self, timeout: float = 0.0) -> None:
        self._closed.set()
        for channel in self._channels:
            channel.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._listener:
            self._listener.join(timeout)

    # Blobs

    def _sent(self, header: Header, blob: memoryview) -> Header:
        answers: list[Header] = []

        def send(attempt: _Attempt, channel: Channel, part: list[int]) -> None:
            messages = self._messages(header, blob[: part[1]], part[0], attempt)
            put = self._method("stream_unary", "put", channel)
            call = put.future(messages, attempt.timeout)
            attempt.calls.append(call)
            answers.append(self._unpacked(call.result())[0])
            attempt.progress += 1

        def remaining(parts: _Parts) -> _Parts | None:
            if any(answer.get("stored") is True for answer in answers):
                return None
            # A call without a part asks which parts have arrived. While other parts are in transit,
            # the answers are useless.
            missing = answers[-1].get("missing") if answers and parts == [[0, 0]] else []
            answers.clear()
            return _checked_parts(missing, len(blob))

        self._move([[0, len(blob)]], len(blob), send, remaining)
        answer = next(answer for answer in answers if answer.get("stored") is True)
        return dict(answer.get("answer", {}))

    def _messages(
        self, header: Header, blob: memoryview, start: int, attempt: _Attempt
    ) -> Iterator[bytes]:
        yield pack(header | {"start": start})
        for position in range(start, len(blob), CHUNK):
            # gRPC accepts the first piece even if no data gets through, so it does not count as
            # progress.
            if position > start:
                attempt.progress += 1
            yield bytes(blob[position : position + CHUNK])

    def _fetched(self, key: str, size: int) -> bytearray:
        header = self._header() | {"key": key}
        blob = bytearray(size)

        def fetch(attempt: _Attempt, channel: Channel, part: list[int]) -> None:
            message = pack(header | {"start": part[0], "end": part[1]})
            call = self._method("unary_stream", "get", channel)(message, timeout=attempt.timeout)
            attempt.calls.append(call)
            announced_size = self._size_of(call)
            if announced_size != size:
                raise Malformed(
                    f"blob {key} has {size:,} bytes, but the hub announced {announced_size:,}."
                )
            for piece in call:
                end = part[0] + len(piece)
                if end > part[1]:
                    raise Malformed("the hub sent more than was requested.")
                blob[part[0] : end] = piece
                part[0] = end
                attempt.progress += 1
            if part[0] < part[1]:
                raise HubUnreachable(f"hub {self._hub} ended a blob prematurely.")

        def remaining(parts: _Parts) -> _Parts | None:
            return [part for part in parts if part[0] < part[1]] or None

        self._move([[0, size]], size, fetch, remaining)
        if key_of(blob) != key:
            raise Altered(f"the hub sent altered bytes that do not match digest {key}.")
        return blob

    def _size_of(self, call: Extra) -> int:
        return checked_size(unpack(next(iter(call), b""))[0].get("size"), self.max_blob, "blob")

    def _move(
        self,
        missing: _Parts | None,
        size: int,
        move: Callable[[_Attempt, Channel, list[int]], None],
        remaining: Callable[[_Parts], _Parts | None],
    ) -> None:
        """Transfers the parts of a blob over all connections. If all errors are network errors,
        missing parts are retried.
        """
        deadline = time.monotonic() + PATIENCE + size / LEAST_RATE
        has_moved = False
        stuck = 0
        while missing is not None:
            self.require()
            attempt = _Attempt(deadline - time.monotonic())
            if attempt.timeout <= 0:
                raise HubUnreachable("the blob was not transferred to or from the hub in time.")
            parts = self._cut(missing)
            errors = self._move_parts(attempt, parts, move)
            missing = remaining(parts)
            if missing is None:
                return
            for error in errors:
                if not isinstance(error, HubUnreachable):
                    raise error
            # After a working connection breaks, a new one is made within seconds unless the hub is
            # gone.
            has_moved = has_moved or attempt.progress > 0
            stuck = 0 if attempt.progress else stuck + 1
            if errors and (not has_moved or stuck > _STUCK):
                raise errors[0]
            if errors or stuck:
                self._closed.wait(backoff(stuck, _PAUSE))

    def _cut(self, missing: _Parts) -> _Parts:
        """Divides the missing bytes of a blob equally among the connections. If nothing is missing,
        returns a single empty part.
        """
        total = sum(end - start for start, end in missing)
        size = max(CHUNK, -(-total // (len(self._channels) - 1)))
        parts = []
        for start, end in missing:
            for position in range(start, end, size):
                parts.append([position, min(position + size, end)])
        return parts or [[0, 0]]

    def _move_parts(
        self,
        attempt: _Attempt,
        parts: _Parts,
        move: Callable[[_Attempt, Channel, list[int]], None],
    ) -> list[Failure]:
        channels = itertools.cycle(self._channels[1:])
        tasks = [partial(move, attempt, next(channels), part) for part in parts]
        try:
            return self._at_once(tasks, lambda: attempt.progress)
        finally:
            for call in attempt.calls:
                call.cancel()

    def _at_once(
        self, tasks: Sequence[Callable[[], object]], progress: Callable[[], int]
    ) -> list[Failure]:
        """Runs tasks that wait for calls in concurrent threads and returns their failures."""
        futures = [self._pool.submit(task) for task in tasks]
        waiting: set[Future[object]] = set(futures)
        before = progress()
        while waiting:
            done, waiting = wait(waiting, timeout=PATIENCE, return_when="FIRST_COMPLETED")
            now = progress()
            if not done and now == before:
                return [HubUnreachable(f"hub {self._hub} made no progress within {PATIENCE:g} s.")]
            before = now
        errors = [future.exception() for future in futures]
        return [self._error(error) for error in errors if error is not None]

    # Connections

    @property
    def _hub(self) -> str:
        return self._hubs[self._turn]

    def _header(self, about: Header | None = None) -> Header:
        header: Header = {
            "from": self.identity._asdict()
            | {"incarnation": self.incarnation, "protocol": PROTOCOL}
        }
        if about is not None:
            header["about"] = about
        return header

    def _from_any(self, ask: Callable[[], Answer]) -> Answer:
        """Tries each address until one answers. While `events` is running, only the known address
        is used.
        """
        for _ in self._hubs[1:]:
            try:
                return ask()
            except HubUnreachable:
                if self._listening or self._closed.is_set():
                    raise
                self._look_elsewhere()
        return ask()

    def _answer(
        self, message: bytes, channel: Channel = None, seconds: float | None = None
    ) -> bytes:
        self.require()
        try:
            call = self._method("unary_unary", "call", channel)
            return bytes(call.future(message, seconds or self._timeout).result())
        except Exception as error:
            raise self._error(error) from error

    def _unpacked(self, message: bytes) -> tuple[Header, bytes]:
        """Returns the header and body of an answer. Raises HubUnreachable if an earlier hub sent
        the answer.
        """
        header, body = unpack(message)
        epoch = header.pop("epoch", 0)
        # Hubs of earlier versions have no epoch.
        if isinstance(epoch, int) and epoch:
            if epoch < self._epoch:
                raise HubUnreachable(
                    f"hub {self._hub} has epoch {epoch}, but this site has already followed a later"
                    f" hub of this run (epoch {self._epoch}). Stop the earlier hub. If you"
                    " refounded the run, the clock on the hub's machine is behind. Correct the"
                    " clock and restart the hub."
                )
            self._epoch = epoch
        return header, body

    def _method(self, kind: str, name: str, channel: Channel = None) -> Extra:
        return getattr(channel or self._channels[0], kind)(f"/{SERVICE}/{name}")

    def require(self) -> None:
        if self._closed.is_set():
            raise HubUnreachable(f"the connection to hub {self._hub} has been closed.")
        why = self.away
        if why is not None:
            raise HubUnreachable(why)

    def _look_elsewhere(self) -> None:
        self._turn = (self._turn + 1) % len(self._hubs)
        before = self._channels
        if not self._closed.is_set():
            self._channels = [self._channel() for _ in before]
        for channel in before:
            channel.close()

    def _channel(self) -> Channel:
        bundle = self._bundle
        if bundle is None:
            return self._grpc.insecure_channel(self._hub, CLIENT_OPTIONS)
        credentials = self._grpc.ssl_channel_credentials(
            bundle.authority, bundle.key, bundle.certificate
        )
        name = ("grpc.ssl_target_name_override", host_of(bundle.identity.run))
        return self._grpc.secure_channel(self._hub, credentials, [*CLIENT_OPTIONS, name])

    def _error(self, error: BaseException) -> Failure:
        if isinstance(error, Failure):
            return error
        if isinstance(error, self._grpc.RpcError):
            return self._rpc_error(error)
        if isinstance(error, self._grpc.FutureCancelledError):
            return HubUnreachable(self.away or f"the call to hub {self._hub} was cancelled.")
        if isinstance(error, ValueError) and str(error).startswith("Cannot invoke RPC"):
            return HubUnreachable(
                self.away or f"the connection to hub {self._hub} is being restored."
            )
        raise error

    def _rpc_error(self, error: Extra) -> Failure:
        code = error.code().name
        details = error.details() or ""
        if code not in AWAY and not details.startswith("Concurrent RPC limit"):
            return ERRORS.get(code, HubError)(f"hub {self._hub}: {details[:1000]}")
        if self.away is not None:
            return HubUnreachable(self.away)
        if any(word in details for word in ("andshake", "erification", "SSL")):
            details += " (do both sides use TLS and keys of the same authority and run?)"
        if "SETTINGS" in details:
            details += f" ({LIMIT_OF_DISTANCE})"
        return HubUnreachable(f"hub {self._hub} does not answer: {code.lower()}, {details[:400]}")

    def _connection(
        self, hello: Header, heartbeat: Callable[[], Header], patience: float
    ) -> Iterator[Event]:
        """Yields the events and heartbeats of a single connection until the connection fails or
        ends.
        """
        over = threading.Event()
        lock = threading.Lock()
        patience = min(self._timeout, patience)
        # The time since which the hub has been silent; None while its last message is being
        # handled.
        silent_since: float | None = None

        def is_silent() -> bool:
            return silent_since is not None and time.monotonic() - silent_since > patience

        def requests() -> Iterator[bytes]:
            nonlocal silent_since
            yield pack(self._header(hello))
            # gRPC requests the next message once this one is sent. It also decides how long
            # connecting may take.
            with lock:
                silent_since = silent_since and time.monotonic()
            while not over.wait(self._heartbeat):
                if is_silent():
                    call.cancel()
                    return
                yield pack({"about": heartbeat()})

        call = self._method("stream_stream", "watch")(requests())
        try:
            while True:
                silent_since = time.monotonic()
                message = next(call, None)
                with lock:
                    silent_since = None
                if message is None:
                    return
                self.away = None
                patience = _SILENT_HEARTBEATS * self._heartbeat
                header, body = self._unpacked(message)
                yield Event(str(header.get("kind")), header.get("about", {}), body)
        except Exception as error:
            if is_silent():
                raise HubUnreachable(
                    f"hub {self._hub} has been silent for {patience:g} s."
                ) from error
            raise self._error(error) from error
        finally:
            over.set()
            call.cancel()


def _raise_first(errors: Sequence[Failure]) -> None:
    if errors:
        raise errors[0]


class _Way:
    """One direction of a link. Messages arrive in order, or immediately if there is no link."""

    def __init__(self, link: AnyLink, delay: float = 0.0) -> None:
        self._link = link
        self._delay = delay
        self._free_at = 0.0

    def carry(self, nbytes: int, arrive: Callable[[], Answer]) -> Answer | None:
        """Calls ``arrive`` when the given number of bytes has arrived. Returns the result only if
        the bytes arrive immediately.
        """
        if self._link is None:
            return arrive()

        def try_to_arrive() -> None:
            # The message is resent when the site is back.
            with suppress(HubError, Refused):
                arrive()

        time = self._link.time
        self._free_at = max(self._free_at, time.now) + nbytes * self._link.seconds_per_byte
        return time.schedule(self._free_at + self._link.latency + self._delay, try_to_arrive)


class _Inline(Executor):
    @override
    def submit(
        self, fn: Callable[..., Answer], /, *args: object, **kwargs: object
    ) -> Future[Answer]:
        future = Future[Answer]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class InProcessClient:
    """A site's connection to a hub in the same process. Messages are never lost and are delayed
    only if there is a link.
    """

    def __init__(
        self, hub: HubInMemory, site: str, link: AnyLink = None, incarnation: str = ""
    ) -> None:
        self.identity = Identity(hub.run, "site", site)
        self.incarnation = incarnation or secrets.token_hex(8)
        self.now = hub.clock
        self.sends_bytes_per_s = 0.0
        if link and link.seconds_per_byte:
            self.sends_bytes_per_s = 1 / link.seconds_per_byte
        self._hub = hub
        self._link = link
        self._peer = Peer("site", site, self.incarnation)
        self._up = _Way(link, link.delay if link else 0.0)
        self._down = _Way(link)
        # `listen` sets this before any message is sent.
        self._connection: EventListener
        self._is_over = False

    def call(
        self, name: str, about: Header | None = None, body: bytes = b""
    ) -> tuple[Header, bytes]:
        def arrives() -> tuple[Header, bytes]:
            if not self.is_connected:
                raise HubUnreachable("the connection has been lost")
            answer = self._hub.coordinator.call(self._peer, name, about or {}, body)
            self._hub.coordinator.tick()
            return answer

        if name in ("hello", "ping"):
            if name == "hello":
                self._connect()
            return {}, b""
        if name in ("contribute", "give"):
            # These calls name payloads and states, so they must arrive after those blobs.
            return self._up.carry(0, arrives) or ({}, b"")
        return arrives()

    def send(self, blob: Bytes, about: Header | None = None, key: str | None = None) -> Header:
        about = about or {}
        size = memoryview(blob).nbytes

        def arrives() -> Header:
            self._hub.store.put(blob)
            return self._hub.coordinator.stored(self._peer, about, key or key_of(blob), size)

        if about.get("kind") == "run_config":
            return arrives()
        return self._up.carry(size, arrives) or {}

    def get(self, key: str, size: int | None = None) -> Bytes:
        return self._hub.store.get(key)

    def get_small(self, wanted: Sequence[Payload]) -> dict[str, Bytes]:
        return {payload.key: self._hub.store.get(payload.key) for payload in wanted}

    def pool(self, threads: int, name: str) -> Executor:
        return _Inline()

    def pause(self, over: threading.Event, tries: int = 0) -> bool:
        """Returns immediately, because unsent messages are sent after the next hello."""
        return False

    def listen(self, connection: EventListener) -> None:
        self._connection = connection
        self._connect()
        if self._link:
            self._live(self._link, connection.lease / 4)

    def _connect(self) -> None:
        site = self.identity.name
        before = self._hub.clients.get(site)
        self._hub.clients[site] = self
        try:
            for event in self._hub.coordinator.hello(self._peer, self._connection.hello_header):
                self.hear(event)
        except (Refused, Busy) as error:
            if before is not None:
                self._hub.clients[site] = before
            self._ends(Refused(str(error)))
        self.turn()

    def _live(self, link: AnyLink, interval: float) -> None:
        """Sends heartbeats at regular intervals, as the network threads of a training site do."""
        if self._is_over:
            return
        if self.is_connected and not link.is_away(self.now()):
            # A refused site receives the refusal at its next step.
            with suppress(HubError, Refused):
                self._hub.coordinator.heartbeat(self._peer, self._connection.heartbeat_header)
        self._hub.coordinator.tick()
        link.time.schedule(self.now() + interval, partial(self._live, link, interval))

    def hear(self, event: Event) -> None:
        nbytes = 0
        hub_event = read_event(event)
        if isinstance(hub_event, Recorded):
            # A site already has its own payloads.
            contribution = hub_event.record.of(self.identity.name)
            sent = contribution.payloads if contribution else ()
            for payloads in hub_event.record.sources:
                nbytes += sum(payload.size for payload in payloads if payload not in sent)
        elif isinstance(hub_event, StateOffered):
            nbytes = sum(part.size for part in hub_event.parts)
        self._down.carry(nbytes, partial(self._connection.hear, event))

    def turn(self) -> None:
        """Sends a heartbeat and runs any work that is due at the hub."""
        if not self.is_connected:
            return
        try:
            self._hub.coordinator.heartbeat(self._peer, self._connection.heartbeat_header)
        except HubError:
            self._connect()
        except Refused as error:
            self._ends(error)
        self._hub.coordinator.tick()

    def wait(
        self, changed: threading.Condition, is_over: Callable[[], bool], timeout: float
    ) -> bool:
        self._hub.coordinator.tick()
        if not is_over() and self._link:
            self._link.time.passes(self._link.site, max(timeout, self._link.moment))
        elif not is_over():
            self._hub.sleep(timeout)
            self._hub.coordinator.tick()
        return is_over()

    # The end of a connection

    @property
    def is_connected(self) -> bool:
        return self._hub.clients.get(self.identity.name) is self

    def leave(self) -> None:
        if self.is_connected:
            del self._hub.clients[self.identity.name]
            self._hub.coordinator.gone(self._peer)

    def _ends(self, error: Refused) -> None:
        if self.is_connected:
            del self._hub.clients[self.identity.name]
        self._connection.fail(error)

    def close(self, timeout: float = 0.0) -> None:
        self.leave()
        self._is_over = True


Transport = HubClient | InProcessClient


def _checked_parts(missing: object, size: int) -> _Parts:
    parts = read(tuple[tuple[int, int], ...], missing, "missing")
    before = 0
    for start, end in parts:
        if not before <= start < end <= size:
            raise Malformed(
                f"bytes {start:,} to {end:,} are out of order or outside a blob of {size:,} bytes."
            )
        before = end
    return [list(part) for part in parts]
