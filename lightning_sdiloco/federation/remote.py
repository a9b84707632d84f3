"""A site's end of the connection to its hub over gRPC: see [Note: how a site uses its connection].

[Note: a site of several ranks] The first rank has the `HubConnection` of the site: it says hello, contributes, and
hears. Every other rank has `HubShards`, under the same name and life, which move payloads and nothing else. A
contribution names the payloads of all ranks, and the hub takes it when the last of them is in its store: one rank's
alone never counts. So what a site sends does not grow with its ranks, and neither does what it fetches: `places_of`
gives every payload of another site to one rank.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from lightning_sdiloco.errors import ExchangeError, Refused
from lightning_sdiloco.federation.charter import Charter
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.codec import Bytes, key_of, plain
from lightning_sdiloco.federation.connection import (
    Called,
    Fetched,
    Lost,
    Recorded,
    Said,
    StateArrived,
    StateOffered,
    StateWanted,
    Told,
    Waiting,
    Wanted,
    Welcomed,
    said_in,
)
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.messages import Call, Contribution, Payload, Record, StateHeader
from lightning_sdiloco.federation.wire import MAX_BLOB, Busy, HubError, HubUnreachable

log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds after which something is tried again that did not succeed
_LONGEST_LEASE = 12.0  # seconds after which a name that is in use is not that of a process that died
_THREADS = 8
_AT_ONCE = 32
_LARGE_AT_ONCE = 8
_SMALL = 256 << 10  # bytes that travel over one connection
_UNREAD = 32  # records whose payloads are here, and not read yet, before no more are fetched: they take memory

Done = Callable[[Mapping[str, Bytes] | None], None]


def all_payloads(own: Contribution) -> Sequence[Payload]:
    return own.payloads


def places_of(rank: int, ranks: int, payloads: int) -> list[int]:
    """Returns which of a contribution's payloads a rank fetches: each is fetched by one rank of a site.

    Args:
        rank: The rank.
        ranks: How many there are. From a site of as many, each fetches the payload of its own number.
        payloads: How many payloads there are.

    Examples:
        >>> [places_of(rank, 2, payloads=4) for rank in range(2)], [places_of(rank, 4, payloads=2) for rank in range(4)]
        ([[0, 1], [2, 3]], [[0], [], [1], []])
    """
    return [place for place in range(payloads) if place * ranks // payloads == rank]


def payloads_of(rank: int, ranks: int) -> Wanted:
    """Returns what tells which payloads of a contribution a rank fetches; see `places_of`."""
    return lambda own: [own.payloads[place] for place in places_of(rank, ranks, len(own.payloads))]


class Outbox:
    """Keeps contributions with their payloads, the last of each fragment, until they are overtaken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Contribution, Mapping[str, Bytes]]] = {}
        self._begun: set[Contribution] = set()

    def begins(self, own: Contribution) -> bool:
        """Tells, once, that a contribution is sent for the first time: later some of it may be there already."""
        with self._lock:
            is_first = own not in self._begun
            self._begun = {own, *(one for one, _ in self._kept.values() if one in self._begun)}
            return is_first

    def put(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        with self._lock:
            self._kept[own.fragment] = own, blobs

    def blobs(self, own: Contribution) -> Mapping[str, Bytes] | None:
        kept = self._kept.get(own.fragment)
        return kept[1] if kept and kept[0] == own else None

    def all_blobs(self) -> dict[str, Bytes]:
        with self._lock:
            return {key: blob for _, blobs in self._kept.values() for key, blob in blobs.items()}

    def outstanding(self) -> list[Contribution]:
        with self._lock:
            return [own for own, _ in self._kept.values()]

    def hear(self, record: Record) -> None:
        with self._lock:
            kept = self._kept.get(record.fragment)
            if kept and kept[0].round <= record.round:
                del self._kept[record.fragment]

    def only(self, owns: Collection[Contribution]) -> None:
        with self._lock:
            self._kept = {fragment: kept for fragment, kept in self._kept.items() if kept[0] in owns}


class Inbox:
    """A queue with a last word: the error that ends the connection."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._told: list[Told] = []
        self._error: Exception | None = None

    def put(self, told: Told) -> None:
        with self._changed:
            self._told.append(told)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self) -> list[Told]:
        """Returns what was heard, or raises the last word when there is nothing else."""
        with self._changed:
            told, self._told = self._told, []
            self._changed.notify_all()
            if not told and self._error:
                raise self._error
            return told

    def wait(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._told or self._error), timeout)

    @property
    def payloads(self) -> int:
        """How many records are there to be read that have payloads, which take memory."""
        with self._changed:
            return sum(isinstance(told, Recorded) and told.blobs is not None for told in self._told)


class Fetching:
    """Fetches blobs in threads of its own: many small ones at the same time, each of which waits for a round trip."""

    def __init__(self, get: Callable[[Payload], Bytes]) -> None:
        self._get = get
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hub-fetching")
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self._lock = threading.RLock()
        self._early: dict[str, tuple[int, int, Future[Bytes]]] = {}

    def prefetch(self, own: Contribution, payloads: Sequence[Payload]) -> None:
        """Begins to fetch payloads that will be needed if they count."""
        with self._lock:
            for payload in payloads:
                if payload.key not in self._early:
                    self._early[payload.key] = own.fragment, own.round, self._begin(payload)

    def fetch(self, payloads: Sequence[Payload], here: Mapping[str, Bytes], done: Done) -> None:
        found = {key: here[key] for key, _ in payloads if key in here}
        futures = {payload.key: self._future(payload) for payload in payloads if payload.key not in here}
        if not futures:
            done(found)
            return
        left = [len(futures)]

        def one_is_there(_: object) -> None:
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
            self._finish(found, futures, done)

        for future in futures.values():
            future.add_done_callback(one_is_there)

    def forget(self, fragment: int, round: int) -> None:
        """Drops what was fetched early for a round, or one before it, and did not count."""
        with self._lock:
            self._early = {key: early for key, early in self._early.items() if early[0] != fragment or early[1] > round}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _future(self, payload: Payload) -> "Future[Bytes]":
        with self._lock:
            early = self._early.get(payload.key)
            failed = early is not None and early[2].done() and early[2].exception() is not None
            return self._begin(payload) if early is None or failed else early[2]

    def _begin(self, payload: Payload) -> "Future[Bytes]":
        if payload.size <= _SMALL:
            return self._pool.submit(self._get, payload)

        def get() -> Bytes:
            with self._large:
                return self._get(payload)

        return self._pool.submit(get)

    def _finish(self, found: dict[str, Bytes], futures: Mapping[str, "Future[Bytes]"], done: Done) -> None:
        errors = [error for future in futures.values() if not future.cancelled() and (error := future.exception())]
        if any(future.cancelled() for future in futures.values()) or any(isinstance(e, HubUnreachable) for e in errors):
            return
        for error in errors:
            log.warning("a payload cannot be had: %s", error)
        done(None if errors else found | {key: future.result() for key, future in futures.items()})


def each_once(payloads: Sequence[Payload]) -> list[Payload]:
    return list(dict.fromkeys(payloads))


class RecordsToFetch:
    """Takes records from the network, and puts them into the inbox: at once where their payloads are of no use."""

    def __init__(
        self,
        fetching: Fetching,
        inbox: Inbox,
        outbox: Outbox,
        wanted: Callable[[Contribution], Sequence[Payload]],
    ) -> None:
        self._fetching, self._inbox, self._outbox, self._wanted = fetching, inbox, outbox, wanted
        self._lock = threading.Lock()
        self._kept: Sequence[int] = ()
        self._applied: Sequence[int | None] = ()
        self._waiting: list[Record] = []
        self._coming: set[str] = set()

    def begin(self, kept: Sequence[int]) -> None:
        """Begins anew on a new connection: what waits is told again."""
        with self._lock:
            self._kept = kept
            self._waiting.clear()

    def lose(self) -> None:
        """Hears that the connection is lost: what is being fetched may not come."""
        with self._lock:
            self._coming.clear()

    def follow(self, follower: Follower) -> None:
        """Copies how far the site is; some records may be of use now."""
        applied = [None if own.digest is None else own.applied.round for own in follower.fragments]
        with self._lock:
            if applied == self._applied:
                return
            self._applied = applied
        self.go_on()

    def hear(self, record: Record) -> None:
        with self._lock:
            told_before = record.key in self._coming
            dropped = bool(self._kept) and record.round < self._kept[record.fragment]
            useful = self._is_useful(record)
            if not (told_before or dropped or self._is_applied(record)):
                self._waiting.append(record)
        if dropped:
            self._outbox.hear(record)
        if dropped or not useful:
            self._inbox.put(Recorded(record, None))
        self.go_on()

    def go_on(self) -> None:
        """Fetches for the records that wait, as far as there is room."""
        with self._lock:
            room = max(0, _UNREAD - self._inbox.payloads - len(self._coming))
            left = [record for record in self._waiting if not self._is_applied(record)]
            begun = [record for record in left if self._is_useful(record)][:room]
            self._coming.update(record.key for record in begun)
            self._waiting = [record for record in left if record.key not in self._coming]
        for record in begun:
            self._fetch(record)

    def _is_applied(self, record: Record) -> bool:
        applied = self._applied[record.fragment] if self._applied else None
        return applied is not None and record.round <= applied

    def _is_useful(self, record: Record) -> bool:
        """Whether a record can be applied when those before it are, without a state."""
        if not self._kept or not self._applied:
            return True
        applied = self._applied[record.fragment]
        return applied is not None and self._kept[record.fragment] <= applied + 1 <= record.round

    def _fetch(self, record: Record) -> None:
        payloads = each_once([payload for one in record.counted for payload in self._wanted(one)])

        def there(blobs: Mapping[str, Bytes] | None) -> None:
            self._outbox.hear(record)
            self._fetching.forget(record.fragment, record.round)
            # Before it leaves those that are coming, or there would seem to be room.
            self._inbox.put(Recorded(record, blobs))
            with self._lock:
                self._coming.discard(record.key)

        self._fetching.fetch(payloads, self._outbox.all_blobs(), there)


class HubShards:
    """Moves the payloads of a rank to and from a hub. It has threads of its own."""

    def __init__(
        self,
        hub: str,
        run: str,
        site: str,
        life: str | None = None,
        keys: str | Path | None = None,
        insecure: bool = False,
        wanted: Wanted = all_payloads,
        patience: float = 3600.0,
        **connects: Any,
    ) -> None:
        self._client = HubClient(hub, run, site, keys, insecure, life=life, **connects)
        self.site, self.life, self._about = site, self._client.life, {"site": site}
        self._wanted, self._patience = wanted, patience
        self._outbox, self._fetching = Outbox(), Fetching(self._get)
        # What is small does not wait behind payloads on their way to a hub that is gone.
        self._senders = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-sender")
        self._lock = threading.Lock()
        self._sending: dict[Contribution, Future[None]] = {}
        self._fetched: dict[str, Mapping[str, Bytes] | None] = {}
        self._away_since: float | None = None
        self.sends_bytes_per_s = 0.0
        self._closed, self._nudge = threading.Event(), threading.Event()

    def reach(self, timeout: float = 60.0) -> None:
        until = time.monotonic() + timeout
        while True:
            try:
                self._client.call("ping")
                return
            except HubError as error:
                if time.monotonic() > until:
                    raise ExchangeError(
                        f"A rank of {self.site} has not reached the hub: {error} Every rank of a site speaks with the"
                        " hub itself: its machine needs the way there, and the keys."
                    ) from error
                self._closed.wait(_AGAIN)

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        self._outbox.put(own, dict(blobs))
        self._start(own)

    def keep(self, outstanding: Collection[Contribution]) -> None:
        self._outbox.only(outstanding)

    def prefetch(self, own: Contribution) -> None:
        if own.site != self.site:
            self._fetching.prefetch(own, each_once(self._wanted(own)))

    def fetch(self, record: Record) -> None:
        def there(blobs: Mapping[str, Bytes] | None) -> None:
            self._fetching.forget(record.fragment, record.round)
            with self._lock:
                self._fetched[record.key] = blobs

        payloads = each_once([payload for own in record.counted for payload in self._wanted(own)])
        self._fetching.fetch(payloads, self._outbox.all_blobs(), there)

    def fetched(self) -> Fetched:
        away = self._away_since
        if away is not None and time.monotonic() - away > self._patience:
            raise ExchangeError(
                f"A rank of {self.site} has not reached the hub for more than patience={self._patience:.0f} s. The"
                " checkpoint of the site holds what it trained: start it again when the hub can be reached."
            )
        with self._lock:
            fetched, self._fetched = self._fetched, {}
        return fetched

    def close(self, timeout: float = 2 * _AGAIN) -> None:
        with self._lock:
            sending = set(self._sending.values())
        wait(sending, timeout)
        self._closed.set()
        self._nudge.set()
        self._client.close()
        self._fetching.close()
        self._senders.shutdown(wait=False, cancel_futures=True)

    # In the background

    def _start(self, own: Contribution) -> None:
        with self._lock:
            if own not in self._sending and not self._closed.is_set():
                self._sending[own] = self._senders.submit(self._send, own)

    def _send(self, own: Contribution) -> None:
        """Sends the payloads of a contribution until they are taken, or it is overtaken."""
        try:
            while not self._closed.is_set() and (blobs := self._outbox.blobs(own)) is not None:
                nudge = self._nudge
                if self._is_taken(own, blobs):
                    return
                nudge.wait(_AGAIN)
        except Exception as error:
            log.exception("%s: the connection to the hub failed", self.site)
            self._fail(error)
        finally:
            with self._lock:
                self._sending.pop(own, None)

    def _is_taken(self, own: Contribution, blobs: Mapping[str, Bytes]) -> bool:
        try:
            self._leave(own, blobs)
        except (HubError, Refused) as error:
            # The first rank of the site may have to say hello first.
            self._missed(error)
            return False
        self._away_since = None
        return True

    def _leave(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        is_first = self._outbox.begins(own)
        for key, blob in blobs.items():
            began = time.monotonic()
            self._client.send(blob, {**self._about, "kind": "payload"}, key=key)
            if is_first:
                self.sends_bytes_per_s = len(blob) / max(time.monotonic() - began, 1e-6)

    def _get(self, payload: Payload) -> Bytes:
        while not self._closed.is_set():
            try:
                blob = self._client.get(payload.key, payload.size)
                self._away_since = None
                return blob
            except HubUnreachable as error:
                self._missed(error)
                self._closed.wait(_AGAIN)
        raise HubUnreachable("this rank has ended")

    def _missed(self, error: Exception) -> None:
        if isinstance(error, HubUnreachable) and self._away_since is None:
            self._away_since = time.monotonic()
        log.info("%s: %s", self.site, error)

    def _fail(self, error: Exception) -> None:
        """Hears of what cannot be: the first rank tells training of it."""


class HubConnection(HubShards):
    """A site's connection to a hub over gRPC. It has threads of its own."""

    def __init__(
        self,
        hub: str,
        run: str,
        site: str,
        keys: str | Path | None = None,
        insecure: bool = False,
        patience: float = 60.0,
        wanted: Wanted = all_payloads,
        channels: int = 8,
        beat: float = 1.0,
        max_blob: int = MAX_BLOB,
    ) -> None:
        connects = {"channels": channels, "beat": beat, "max_blob": max_blob}
        super().__init__(hub, run, site, None, keys, insecure, wanted, patience, **connects)
        self._run = run
        self._inbox, self._fetching_states = Inbox(), Fetching(self._get)
        self._records = RecordsToFetch(self._fetching, self._inbox, self._outbox, wanted)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-connection")
        self._pending: set[Future[None]] = set()
        self._hello = self._beat = None
        self._lease = 0.0
        self._listener: threading.Thread | None = None
        self._let_in = False
        self._busy_since: float | None = None
        self._asking = False
        self._ask_at = 0.0

    # Before training

    def agree(self, charter: Charter) -> Charter:
        def brought() -> Charter:
            answer = self._client.send(charter.to_bytes(), {**self._about, "kind": "charter"})
            key = str(answer.get("charter"))
            return charter if key == charter.key else Charter.from_bytes(bytes(self._client.get(key)))

        until = time.monotonic() + self._patience
        while True:
            try:
                return brought()
            except HubError as error:
                if isinstance(error, Busy) and time.monotonic() > until - self._patience + _LONGEST_LEASE:
                    raise Refused(str(error)) from error
                if time.monotonic() > until:
                    raise ExchangeError(f"{self.site} has not reached its hub: {error}") from error
                log.warning("%s waits for its hub: %s", self.site, error)
                self._closed.wait(_AGAIN)

    def hello(self, follower: Follower) -> None:
        self.beat(follower)
        self._lease = follower.terms.lease
        if self._listener is None:
            self._listener = threading.Thread(target=self._listen, name="hub-listener", daemon=True)
            self._listener.start()
        else:
            self._in_background(lambda: self._call("hello", {"hello": self._hello}))

    # What training says

    def beat(self, follower: Follower) -> None:
        self._hello = plain(follower.hello(self._run))
        self._beat = plain(follower.beat())
        self._outbox.only(follower.outstanding())
        self._records.follow(follower)

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        self._outbox.put(own, dict(blobs))
        # Before the hub has let this site in it refuses what it sends. Then all goes that is outstanding.
        if self._let_in:
            self._start(own)

    def skip(self, call: Call) -> None:
        self._in_background(lambda: self._call("skip", body=call.to_bytes()))

    def ask(self, without: Collection[str] = ()) -> None:
        if self._let_in and not self._asking and time.monotonic() >= self._ask_at:
            self._asking, self._ask_at = True, time.monotonic() + _AGAIN
            self._in_background(lambda: self._call("state", {"without": sorted(without)}))

    def give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        kept = list(parts)
        self._in_background(lambda: self._give(request, header, kept))

    def leave(self) -> None:
        with self._lock:
            pending = {*self._pending, *self._sending.values()}

        def after_all_else() -> None:
            wait(pending)
            self._call("leave")

        self._in_background(after_all_else)

    # What training hears

    def now(self) -> float:
        return time.monotonic()

    def events(self) -> list[Told]:
        told = self._inbox.take()
        if told:
            self._records.go_on()
        return told

    def wait(self, timeout: float) -> bool:
        return self._inbox.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        until = time.monotonic() + timeout
        with self._lock:
            pending = set(self._pending)
        wait(pending, timeout)
        super().close(max(0.0, until - time.monotonic()))
        self._fetching_states.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._listener:
            self._listener.join(timeout)

    # In the background: sending

    def _in_background(self, task: Callable[[], object]) -> None:
        def run() -> None:
            try:
                task()
            except (HubError, Refused) as error:
                # What matters is said again with the next hello.
                log.info("%s: %s", self.site, error)
            except Exception as error:
                log.exception("%s: the connection to the hub failed", self.site)
                self._inbox.fail(error)

        with self._lock:
            if self._closed.is_set():
                return
            future = self._pool.submit(run)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def _fail(self, error: Exception) -> None:
        self._inbox.fail(error)

    def _call(self, name: str, about: Mapping[str, Any] | None = None, body: bytes = b"") -> dict[str, Any]:
        return self._client.call(name, {**self._about, **(about or {})}, body)[0]

    def _is_taken(self, own: Contribution, blobs: Mapping[str, Bytes]) -> bool:
        try:
            self._leave(own, blobs)
            answer = self._call("contribute", body=own.to_bytes())
        except HubUnreachable:
            return False
        except Refused as error:
            log.warning("%s: round %d of fragment %d was not taken: %s", self.site, own.round, own.fragment, error)
            self._in_background(lambda: self._call("hello", {"hello": self._hello}))
            return False
        except HubError as error:
            self._inbox.put(Waiting(str(error)))
            return False
        # With all payloads sent and some missing, they were dropped as they arrived.
        return answer.get("answer") != "waiting" or len(blobs) < len({payload.key for payload in own.payloads})

    def _give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        about = {**self._about, "kind": "state"}

        def sent(part: Bytes) -> list[str | int]:
            key = key_of(part)
            self._client.send(part, about, key=key)
            return [key, memoryview(part).nbytes]

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-giver") as pool:
            named = list(pool.map(sent, parts))
        self._call("give", {"request": request, "parts": named}, header.to_bytes())

    # In the background: fetching

    def _get(self, payload: Payload) -> Bytes:
        """Fetches a blob, again where a connection broke; what is told again on a new one is fetched again."""
        while True:
            try:
                return self._client.get(payload.key, payload.size)
            except HubUnreachable:
                if not self._let_in or self._closed.wait(_AGAIN):
                    raise

    # In the background: listening; nothing here waits, or a hub that is gone would be noticed late

    def _listen(self) -> None:
        try:
            events = self._client.events(
                lambda: {**self._about, "hello": self._hello}, lambda: {**self._about, "beat": self._beat}
            )
            for event in events:
                self._hear(said_in(event))
        except (HubError, ValueError) as error:
            self._inbox.fail(Refused(str(error)))
        except Exception as error:
            log.exception("%s: the connection to the hub failed", self.site)
            self._inbox.fail(error)

    def _hear(self, said: Said | None) -> None:
        if not isinstance(said, Lost):
            self._busy_since = None
        match said:
            case Recorded():
                self._records.hear(said.record)
            case Welcomed():
                self._let_in, self._asking, self._ask_at = True, False, 0.0
                self._records.begin(said.welcome.kept)
                self._inbox.put(said)
                # What is being tried again goes on at once.
                before, self._nudge = self._nudge, threading.Event()
                before.set()
                for own in self._outbox.outstanding():
                    self._start(own)
            case Called():
                self._inbox.put(said)
                if said.own:
                    self.prefetch(said.own)
            case StateWanted():
                self._inbox.put(said)
            case StateOffered():
                self._fetch_state(said)
            case Waiting():
                self._asking = False
                self._inbox.put(said)
            case Lost():
                self._lose(said)

    def _fetch_state(self, offered: StateOffered) -> None:
        def there(blobs: Mapping[str, Bytes] | None) -> None:
            self._asking = False
            if blobs is not None:
                parts = tuple(blobs[part.key] for part in offered.parts)
                self._inbox.put(StateArrived(offered.header, parts, offered.source))

        # Payloads that have to be fetched too are not before it.
        self._fetching_states.fetch(each_once(offered.parts), {}, there)

    def _lose(self, lost: Lost) -> None:
        self._let_in = self._asking = False
        self._records.lose()
        if lost.is_busy:
            # A process that died is not in the way for longer than its lease.
            now = time.monotonic()
            self._busy_since = now if self._busy_since is None else self._busy_since
            if now > self._busy_since + self._lease + _AGAIN:
                raise Refused(lost.why)
        self._inbox.put(lost)
