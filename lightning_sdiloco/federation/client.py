"""A site's end of the connections to its hub: calls fail soon where it is gone, and it is found again by itself."""

import itertools
import random
import secrets
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.codec import Bytes, key_of
from lightning_sdiloco.federation.keys import Identity, Peer, Role, bundle_of, host_of
from lightning_sdiloco.federation.messages import Event
from lightning_sdiloco.federation.wire import (
    AWAY,
    CHUNK,
    CLIENT_OPTIONS,
    ERRORS,
    MAX_BLOB,
    PROTOCOL,
    SERVICE,
    Altered,
    Failure,
    Header,
    HubError,
    HubUnreachable,
    checked_key,
    checked_size,
    extra,
    pack,
    unpack,
)

LEAST_RATE = 64 << 10
"""Bytes per second below which a blob is given up in the end: half of 1 Mbit/s."""

PATIENCE = 30.0
"""Seconds without any progress after which a connection is given up."""

_SILENT_BEATS = 4  # beats of the hub that may be missing before it counts as gone
_LONGEST_PAUSE = 2.0  # seconds: a link that heals is noticed with the next try
_PAUSE = 0.2  # seconds before a blob is tried again, twice as long each time that nothing moved
_STUCK = 4
_AGAIN = 1.0  # seconds after which something is tried again that did not succeed
_THREADS = 128

# How the way to a hub is measured: with pings, so many at a time on a connection and bytes in each, until it is busy.
_MOST_BYTES = 128 << 20
_CALLS = 20
_STEPS = ((1, CHUNK // 16), (1, CHUNK // 4), (1, CHUNK), (4, CHUNK))
_NOISE = random.Random(0).randbytes(CHUNK)  # nothing on the way makes it smaller

Answer = TypeVar("Answer")
_Parts = list[list[int]]


def hub_addresses(hub: str) -> list[tuple[str, int]]:
    if "://" in hub or hub.startswith("/"):
        raise ValueError(
            f"hub={hub!r} is a folder or bucket, and sites meet at a hub: start one on a machine that all of them reach"
            " (sdiloco hub), and give its ADDRESS:PORT. It keeps payloads in a folder or bucket with --store."
        )
    places = []
    for one in map(str.strip, hub.split(",")):
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"hub={one!r} is no address: give one with a port, such as a.example:29400.")
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"hub={one!r} has port {port}: a port is a number from 1 to 65535.")
        places.append((host.strip("[]"), int(port)))
    return places


class HubClient:
    """Connects to a hub: one connection for calls and events, and some over which the parts of blobs travel.

    A blob is cut into a part for each of those: where packets are lost, eight connections carry five times as much as
    one. What has arrived of a part is not sent again when its connection breaks.
    """

    def __init__(
        self,
        hub: str,
        run: str,
        name: str,
        keys: str | Path | None = None,
        insecure: bool = False,
        role: Role = "site",
        channels: int = 8,
        timeout: float = 10.0,
        beat: float = 1.0,
        max_blob: int = MAX_BLOB,
        life: str | None = None,
    ) -> None:
        if channels < 1:
            raise ValueError(f"channels={channels} is out of range: it must be at least 1.")
        self._grpc = extra("grpc")
        bundle = bundle_of(hub, name, keys, insecure)
        if bundle is not None:
            bundle = bundle.bound(run)
        else:
            warnings.warn(
                f"What goes to hub {hub} can be read and changed by others on the way (insecure=True).", stacklevel=2
            )
        self.identity = Identity(run, role, name) if bundle is None else bundle.identity._replace(run=run)
        self.life = life or secrets.token_hex(8)
        self.max_blob, self._bundle, self._beat, self._timeout = max_blob, bundle, beat, timeout
        hub_addresses(hub)
        self._hubs, self._turn = [one.strip() for one in hub.split(",")], 0
        self._channels = [self._channel() for _ in range(channels + 1)]
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-client")
        self.away: str | None = None  # why the hub counts as gone
        self._listening = False
        self._closed = threading.Event()

    def call(
        self, name: str, about: Header | None = None, body: bytes = b"", timeout: float | None = None
    ) -> tuple[Header, bytes]:
        message = pack(self._header(about) | {"call": name}, body)
        return self._from_any(lambda: unpack(self._asked(message, None, timeout)))

    def send(
        self, blob: Bytes, about: Header | None = None, key: str | None = None, timeout: float | None = None
    ) -> Header:
        """Leaves a blob at the hub, and says what it is; returns the hub's answer."""
        view = memoryview(blob).cast("B")
        header = self._header(about) | {"key": key or key_of(view), "size": len(view)}
        return self._from_any(lambda: self._sent(header, view, timeout))

    def get(self, key: str, size: int | None = None, timeout: float | None = None) -> bytearray:
        checked_key(key)
        return self._from_any(lambda: self._fetched(key, size, timeout))

    def events(self, hello: Callable[[], Header], beat: Callable[[], Header] = dict) -> Iterator[Event]:
        """Yields what the hub tells, of its own accord and for as long as the client is not closed."""
        broken, self._listening = 0, True
        try:
            while not self._closed.is_set():
                why, kind = f"hub {self._hub} ended the connection.", "HubUnreachable"
                try:
                    for event in self._connection(hello(), beat, self._beat * _SILENT_BEATS * 2**broken):
                        broken = 0
                        if event.kind != "beat":
                            yield event
                except (Refused, Altered):
                    raise
                except HubError as error:
                    why, kind = str(error), type(error).__name__
                if self._closed.is_set():
                    return
                # What waits for it ends at once, and all connections are made anew.
                self.away = why
                self._look_elsewhere()
                yield Event("lost", {"why": why, "kind": kind})
                self._closed.wait(min(self._beat * 2**broken / 5, _LONGEST_PAUSE))
                broken = min(broken + 1, 10)
        finally:
            self._listening = False
            # Nobody would notice that it is back.
            self.away = None

    def round_trip(self) -> float:
        """Returns how many seconds a small call takes: the median of several, by the clock of this end alone."""
        message, seconds = pack(self._header() | {"call": "ping"}), []
        # The first one makes the connection.
        for _ in range(_CALLS + 1):
            began = time.perf_counter()
            self._asked(message)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])

    def bandwidth(self, up: bool, seconds: float, most: int = _MOST_BYTES) -> float:
        """Returns the bits per second that get through in a direction, over all connections for blobs together."""
        moments: list[float] = []

        def ask(channel: Any, message: bytes, size: int, most: int, until: float) -> None:
            while True:
                self._asked(message, channel)
                moments.append(time.perf_counter())
                if moments[-1] >= until or len(moments) * size >= most:
                    return

        def burst(at_once: int, size: int, most: int = 0, until: float = 0.0) -> float:
            about = {"about": {"bytes": 0 if up else size}}
            message = pack(self._header() | {"call": "ping"} | about, _NOISE[: size if up else 0])
            moments.clear()
            began = time.perf_counter()
            ways = [channel for channel in self._channels[1:] for _ in range(at_once)]
            if errors := self._at_once(
                [partial(ask, way, message, size, most, until) for way in ways], moments.__len__
            ):
                raise errors[0]
            # A connection starts slowly: what counts is the second half of the time.
            middle = (began + max(moments)) / 2
            return 8 * size * sum(moment > middle for moment in moments) / max(max(moments) - middle, 1e-9)

        burst(1, 0)
        for at_once, size in _STEPS:
            began = time.perf_counter()
            burst(at_once, size)
            if time.perf_counter() - began > seconds / 4:
                break
        return burst(at_once, size, most, time.perf_counter() + seconds)

    now = staticmethod(time.monotonic)

    def pool(self, threads: int, name: str) -> Executor:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)

    def pause(self, over: threading.Event) -> bool:
        """Waits a moment before another try, or until something is over; tells whether there is another try."""
        over.wait(_AGAIN)
        return not self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        for channel in self._channels:
            channel.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # Blobs

    def _sent(self, header: Header, blob: memoryview, timeout: float | None) -> Header:
        attempts = _Attempts(self, timeout or PATIENCE + len(blob) / LEAST_RATE)
        missing: _Parts = [[0, len(blob)]]
        answers, progress = list[Header](), [0]

        def send(calls: list[Any], channel: Any, part: list[int]) -> None:
            messages = self._messages(header, blob[: part[1]], part[0], progress)
            call = self._method("stream_unary", "put", channel).future(messages, attempts.left())
            calls.append(call)
            answers.append(unpack(call.result())[0])
            progress[0] += 1

        while True:
            parts = self._parts(missing) or [[0, 0]]
            answers.clear()
            errors = self._over_all(send, parts, progress)
            for answer in answers:
                if answer.get("stored") is True:
                    return dict(answer.get("answer", {}))
            attempts.after(errors, moved=progress[0] > len(parts))
            # Without a part, the call asks what has arrived; with others on their way, its answer is of no use.
            missing = [] if missing or not answers else _checked_parts(answers[-1].get("missing"), len(blob))

    def _messages(self, header: Header, blob: memoryview, start: int, progress: list[int]) -> Iterator[bytes]:
        yield pack(header | {"start": start})
        for at in range(start, len(blob), CHUNK):
            progress[0] += 1
            yield bytes(blob[at : at + CHUNK])

    def _fetched(self, key: str, size: int | None, timeout: float | None) -> bytearray:
        attempts = _Attempts(self, timeout or PATIENCE + (self.max_blob if size is None else size) / LEAST_RATE)
        header, progress = self._header() | {"key": key}, [0]
        sizes = [] if size is None else [checked_size(size, self.max_blob, "blob")]
        blob, missing = bytearray(size or 0), [[0, size or 0]]

        def fetch(calls: list[Any], channel: Any, part: list[int]) -> None:
            message = pack(header | {"start": part[0], "end": part[1]})
            call = self._method("unary_stream", "get", channel)(message, timeout=attempts.left())
            calls.append(call)
            sizes.append(self._size_of(call))
            if sizes[-1] != sizes[0]:
                raise Malformed(f"blob {key} has {sizes[0]:,} bytes, and the hub says {sizes[-1]:,}.")
            for piece in call:
                if part[0] + len(piece) > part[1]:
                    raise Malformed("the hub sends more than it was asked for.")
                blob[part[0] : part[0] + len(piece)] = piece
                part[0] += len(piece)
                progress[0] += 1
            if part[0] < part[1]:
                raise HubUnreachable(f"hub {self._hub} ended a blob too early.")

        while True:
            parts = self._parts(missing) or [[0, 0]]
            errors = self._over_all(fetch, parts, progress)
            if errors:
                attempts.after(errors, moved=bool(progress[0]))
                missing = [part for part in parts if part[0] < part[1]]
            elif len(blob) < sizes[0]:
                # Now its size is known.
                blob, missing = bytearray(sizes[0]), [[0, sizes[0]]]
            elif key_of(blob) != key:
                raise Altered(f"the hub sent other bytes than those whose digest is {key}.")
            else:
                return blob

    def _size_of(self, call: Any) -> int:
        return checked_size(unpack(next(iter(call), b""))[0].get("size"), self.max_blob, "blob")

    def _parts(self, missing: _Parts) -> _Parts:
        each = max(CHUNK, -(-sum(end - start for start, end in missing) // (len(self._channels) - 1)))
        return [[at, min(at + each, end)] for start, end in missing for at in range(start, end, each)]

    def _over_all(
        self, move: Callable[[list[Any], Any, list[int]], None], parts: _Parts, progress: list[int]
    ) -> list[Failure]:
        """Moves parts at the same time, over a connection each; returns what became of those that failed."""
        progress[0] = 0
        with self._calls() as calls:
            ways = zip(itertools.cycle(self._channels[1:]), parts)
            return self._at_once([partial(move, calls, *way) for way in ways], lambda: progress[0])

    def _at_once(self, tasks: Sequence[Callable[[], None]], progress: Callable[[], int]) -> list[Failure]:
        """Runs tasks, each of which waits for calls, at the same time; returns what became of those that failed."""
        futures = [self._pool.submit(task) for task in tasks]
        waiting: set[Future[None]] = set(futures)
        before = progress()
        while waiting:
            done, waiting = wait(waiting, timeout=PATIENCE, return_when="FIRST_COMPLETED")
            now = progress()
            if not done and now == before:
                return [HubUnreachable(f"hub {self._hub}: no progress within {PATIENCE:g} s.")]
            before = now
        return [self._error(error) for error in (future.exception() for future in futures) if error is not None]

    # Connections

    @property
    def _hub(self) -> str:
        return self._hubs[self._turn]

    def _header(self, about: Header | None = None) -> Header:
        who = self.identity._asdict() | {"life": self.life, "protocol": PROTOCOL}
        return {"from": who} if about is None else {"from": who, "about": about}

    def _from_any(self, ask: Callable[[], Answer]) -> Answer:
        """Asks at each address until one answers; while `events` is at work, it knows where the hub is."""
        for _ in self._hubs[1:]:
            try:
                return ask()
            except HubUnreachable:
                if self._listening or self._closed.is_set():
                    raise
                self._look_elsewhere()
        return ask()

    def _asked(self, message: bytes, channel: Any = None, timeout: float | None = None) -> bytes:
        with self._calls() as calls:
            try:
                calls.append(self._method("unary_unary", "call", channel).future(message, timeout or self._timeout))
                return bytes(calls[0].result())
            except Exception as error:
                raise self._error(error) from error

    def _method(self, kind: str, name: str, channel: Any = None) -> Any:
        return getattr(channel or self._channels[0], kind)(f"/{SERVICE}/{name}")

    @contextmanager
    def _calls(self) -> Iterator[list[Any]]:
        """Yields a list for calls, of which those that are still running at the end are cancelled."""
        calls: list[Any] = []
        self.require()
        try:
            yield calls
        except ValueError as error:
            raise self._error(error) from error
        finally:
            for call in calls:
                call.cancel()

    def require(self) -> None:
        if self._closed.is_set():
            raise HubUnreachable(f"the connection to hub {self._hub} has been closed.")
        if (why := self.away) is not None:
            raise HubUnreachable(why)

    def _look_elsewhere(self) -> None:
        self._turn = (self._turn + 1) % len(self._hubs)
        before = self._channels
        if not self._closed.is_set():
            self._channels = [self._channel() for _ in before]
        for channel in before:
            channel.close()

    def _channel(self) -> Any:
        bundle = self._bundle
        if bundle is None:
            return self._grpc.insecure_channel(self._hub, CLIENT_OPTIONS)
        credentials = self._grpc.ssl_channel_credentials(bundle.authority, bundle.key, bundle.certificate)
        name = ("grpc.ssl_target_name_override", host_of(bundle.identity.run))
        return self._grpc.secure_channel(self._hub, credentials, [*CLIENT_OPTIONS, name])

    def _error(self, error: BaseException) -> Failure:
        if isinstance(error, Failure):
            return error
        if isinstance(error, self._grpc.RpcError):
            if self.away is not None:
                return HubUnreachable(self.away)
            code, details = error.code().name, error.details() or ""
            if code in AWAY or details.startswith("Concurrent RPC limit"):
                if "andshake" in details or "erification" in details or "SSL" in details:
                    details += " (does the hub have keys of the same authority and run, and is TLS on at both ends?)"
                return HubUnreachable(f"hub {self._hub} does not answer: {code.lower()}, {details[:400]}")
            return ERRORS.get(code, HubError)(f"hub {self._hub}: {details[:1000]}")
        if isinstance(error, self._grpc.FutureCancelledError):
            return HubUnreachable(self.away or f"the call to hub {self._hub} was cancelled.")
        if isinstance(error, ValueError) and str(error).startswith("Cannot invoke RPC"):
            return HubUnreachable(self.away or f"the connection to hub {self._hub} is made anew.")
        raise error

    def _connection(self, hello: Header, beat: Callable[[], Header], patience: float) -> Iterator[Event]:
        ear = _Ear(min(self._timeout, patience))
        over = threading.Event()

        def said() -> Iterator[bytes]:
            yield pack(self._header(hello))
            # gRPC takes the next message when this one has left. How long a connection takes to be made, it knows.
            ear.begin()
            while not over.wait(self._beat):
                if ear.silent():
                    call.cancel()
                    return
                yield pack({"about": beat()})

        call = self._method("stream_stream", "watch")(said())
        try:
            while True:
                with ear:
                    message = next(call, None)
                if message is None:
                    return
                self.away = None
                ear.patience = _SILENT_BEATS * self._beat
                header, body = unpack(message)
                yield Event(str(header.get("kind")), header.get("about", {}), body)
        except Exception as error:
            if ear.silent():
                raise HubUnreachable(f"hub {self._hub} has been silent for {ear.patience:g} s.") from error
            raise self._error(error) from error
        finally:
            over.set()
            call.cancel()


class Inline(Executor):
    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class InProcessClient:
    """A site's way to a hub in this process: nothing is lost, and nothing is late."""

    def __init__(self, hub: Any, site: str) -> None:
        self.hub, self.identity, self.life = hub, Identity(hub.run, "site", site), secrets.token_hex(8)
        self.peer = Peer("site", site, self.life, "memory")

    def call(self, name: str, about: Header | None = None, body: bytes = b"") -> tuple[Header, bytes]:
        connection = self.hub.connections.get(self.identity.name)
        if connection is None or connection.life != self.life:
            raise HubUnreachable("the connection is lost")
        answer = self.hub.calls.call(self.peer, name, about or {}, body)
        self.hub.coordinator.tick()
        return answer

    def send(self, blob: Bytes, about: Header | None = None, key: str | None = None) -> Header:
        self.hub.store.put(blob)
        return self.hub.calls.stored(self.peer, about or {}, key or key_of(blob), memoryview(blob).nbytes)

    def get(self, key: str, size: int | None = None) -> Bytes:
        return self.hub.store.get(key)

    def events(self, hello: Callable[[], Header], beat: Callable[[], Header] = dict) -> Iterator[Event]:
        """Returns the first events alone: those that come later are pushed."""
        return iter(self.hub.calls.hello(self.peer, hello()))

    def now(self) -> float:
        return self.hub.clock()

    def pool(self, threads: int, name: str) -> Executor:
        return Inline()

    def pause(self, over: threading.Event) -> bool:
        """Waits for nothing: what did not go now goes with the next hello."""
        return False

    def close(self) -> None:
        pass


Transport = HubClient | InProcessClient
"""A site's way to its hub."""


class _Attempts:
    """How often a blob is tried again: until the deadline, and only while errors are of the network."""

    def __init__(self, client: HubClient, seconds: float) -> None:
        self._client, self._deadline = client, time.monotonic() + seconds
        self._ever, self._stuck = False, 0

    def left(self) -> float:
        self._client.require()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise HubUnreachable("the blob did not get through to or from the hub in time.")
        return left

    def after(self, errors: list[Failure], moved: bool) -> None:
        """Raises what ends the attempts, and waits a little otherwise."""
        for error in errors:
            if not isinstance(error, HubUnreachable):
                raise error
        # Where a connection was there and broke, the next is there in some seconds, or the hub is gone.
        self._ever, self._stuck = self._ever or moved, 0 if moved else self._stuck + 1
        if errors and (not self._ever or self._stuck > _STUCK):
            raise errors[0]
        if errors or self._stuck:
            self._client._closed.wait(_PAUSE * 2**self._stuck)


def _checked_parts(parts: Any, size: int) -> _Parts:
    if not isinstance(parts, list):
        raise Malformed("what is missing of a blob is a list of pairs.")
    end = 0
    for part in parts:
        if not isinstance(part, list) or len(part) != 2 or not all(type(number) is int for number in part):
            raise Malformed("what is missing of a blob is said in pairs of numbers.")
        if not end <= part[0] < part[1] <= size:
            raise Malformed(f"bytes {part[0]:,} to {part[1]:,} are none of a blob of {size:,}, or not in order.")
        end = part[1]
    return parts


class _Ear:
    """Knows for how long the hub has been listened to in vain: not while what it said is being worked on."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = threading.Lock()
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        # What ended in an error may have been cancelled for the silence.
        if error[0] is None:
            with self._lock:
                self._since = None

    def begin(self) -> None:
        """Begins to count: the hub can have heard what was said."""
        with self._lock:
            self._since = self._since and time.monotonic()

    def silent(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > self.patience
