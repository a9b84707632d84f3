"""A site's connection to a hub over gRPC: `Connection` says what it promises."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from lightning_sdiloco.comm import MAX_BLOB, Busy, HubMailbox, HubUnreachable, MailboxError, key_of
from lightning_sdiloco.errors import ExchangeError, Refused
from lightning_sdiloco.federation import Call, Charter, Contribution, Follower, StateHeader
from lightning_sdiloco.hub.connection import (
    Called,
    Lost,
    StateArrived,
    StateWanted,
    Told,
    Waiting,
    Welcomed,
)
from lightning_sdiloco.hub.events import Heard, heard
from lightning_sdiloco.hub.fetching import Fetching, each_once
from lightning_sdiloco.hub.history import Bytes
from lightning_sdiloco.hub.inbox import Inbox
from lightning_sdiloco.hub.outbox import Outbox
from lightning_sdiloco.hub.records_to_fetch import RecordsToFetch
from lightning_sdiloco.hub.shards import Wanted, all_payloads

log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds after which something is tried again that did not succeed
_LONGEST_LEASE = 12.0  # seconds after which a name that is in use is not that of a process that died
_THREADS = 8


class HubConnection:
    """A site's connection to a hub over gRPC; see `Connection`. It has threads of its own."""

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
        self._mailbox = HubMailbox(hub, run, site, keys, insecure, channels=channels, beat=beat, max_blob=max_blob)
        self.site, self.life = site, self._mailbox.life
        self._run, self._patience, self._wanted = run, patience, wanted
        self._about = {"site": site}
        self._inbox, self._outbox = Inbox(), Outbox()
        self._fetching, self._fetching_states = Fetching(self._get), Fetching(self._get)
        self._records = RecordsToFetch(self._fetching, self._inbox, self._outbox, wanted)
        # What is small does not wait behind payloads on their way to a hub that is gone.
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-connection")
        self._senders = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-sender")
        self._lock = threading.Lock()
        self._pending: set[Future[None]] = set()
        self._sending: set[Contribution] = set()
        self._hello = self._beat = ""
        self._lease = 0.0
        self._closed, self._nudge = threading.Event(), threading.Event()
        self._listener: threading.Thread | None = None
        self._let_in = False
        self._busy_since: float | None = None
        self._asking = False
        self._ask_at = 0.0
        self.sends_bytes_per_s = 0.0

    # Before training

    def agree(self, charter: Charter) -> Charter:
        def brought() -> Charter:
            answer = self._mailbox.send(charter.to_bytes(), {**self._about, "kind": "charter"})
            key = str(answer.get("charter"))
            return charter if key == charter.key else Charter.from_bytes(bytes(self._mailbox.get(key)))

        until = time.monotonic() + self._patience
        while True:
            try:
                return brought()
            except MailboxError as error:
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
        self._hello = follower.hello(self._run).to_bytes().decode()
        self._beat = follower.beat().to_bytes().decode()
        self._outbox.only(follower.outstanding())
        self._records.follow(follower)

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        self._outbox.put(own, dict(blobs))
        # Before the hub has let this site in it refuses what it sends. Then all goes that is outstanding.
        if self._let_in:
            self._in_background(lambda: self._send(own), self._senders)

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
            pending = set(self._pending)

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
        with self._lock:
            pending = set(self._pending)
        wait(pending, timeout)
        self._closed.set()
        self._nudge.set()
        self._mailbox.close()
        for own in (self._fetching, self._fetching_states):
            own.close()
        for pool in (self._pool, self._senders):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._listener:
            self._listener.join(timeout)

    # In the background: sending

    def _in_background(self, task: Callable[[], object], pool: ThreadPoolExecutor | None = None) -> None:
        def run() -> None:
            try:
                task()
            except (MailboxError, Refused) as error:
                # What matters is said again with the next hello.
                log.info("%s: %s", self.site, error)
            except Exception as error:
                log.exception("%s: the connection to the hub failed", self.site)
                self._inbox.fail(error)

        with self._lock:
            if self._closed.is_set():
                return
            future = (pool or self._pool).submit(run)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def _call(self, name: str, about: Mapping[str, Any] | None = None, body: bytes = b"") -> dict[str, Any]:
        return self._mailbox.call(name, {**self._about, **(about or {})}, body)[0]

    def _send(self, own: Contribution) -> None:
        """Sends a contribution until the hub has answered, or it is overtaken."""
        with self._lock:
            if own in self._sending:
                return
            self._sending.add(own)
        try:
            while not self._closed.is_set() and (blobs := self._outbox.blobs(own)) is not None:
                nudge = self._nudge
                if self._is_taken(own, blobs):
                    return
                nudge.wait(_AGAIN)
        finally:
            with self._lock:
                self._sending.discard(own)

    def _is_taken(self, own: Contribution, blobs: Mapping[str, Bytes]) -> bool:
        is_first = self._outbox.begins(own)
        try:
            for key, blob in blobs.items():
                began = time.monotonic()
                self._mailbox.send(blob, {**self._about, "kind": "payload"}, key=key)
                if is_first:
                    self.sends_bytes_per_s = len(blob) / max(time.monotonic() - began, 1e-6)
            answer = self._call("contribute", body=own.to_bytes())
        except HubUnreachable:
            return False
        except Refused as error:
            log.warning("%s: round %d of fragment %d was not taken: %s", self.site, own.round, own.fragment, error)
            self._in_background(lambda: self._call("hello", {"hello": self._hello}))
            return False
        except MailboxError as error:
            self._inbox.put(Waiting(str(error)))
            return False
        # With all payloads sent and some missing, they were dropped as they arrived.
        return answer.get("answer") != "waiting" or len(blobs) < len({payload.key for payload in own.payloads})

    def _give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        about = {**self._about, "kind": "state"}

        def sent(part: Bytes) -> list[str | int]:
            key = key_of(part)
            self._mailbox.send(part, about, key=key)
            return [key, memoryview(part).nbytes]

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-giver") as pool:
            named = list(pool.map(sent, parts))
        self._call("give", {"request": request, "parts": named}, header.to_bytes())

    # In the background: fetching

    def _get(self, key: str) -> Bytes:
        """Fetches a blob, again where a connection broke; what is told again on a new one is fetched again."""
        while True:
            try:
                return self._mailbox.get(key)
            except HubUnreachable:
                if not self._let_in or self._closed.wait(_AGAIN):
                    raise

    # In the background: listening; nothing here waits, or a hub that is gone would be noticed late

    def _listen(self) -> None:
        try:
            events = self._mailbox.events(
                lambda: {**self._about, "hello": self._hello}, lambda: {**self._about, "beat": self._beat}
            )
            for event in events:
                self._hear(heard(event))
        except (MailboxError, ValueError) as error:
            self._inbox.fail(Refused(str(error)))
        except Exception as error:
            log.exception("%s: the connection to the hub failed", self.site)
            self._inbox.fail(error)

    def _hear(self, said: Heard) -> None:
        if said.kind != "lost":
            self._busy_since = None
        if said.record:
            self._records.hear(said.record)
        elif said.welcome:
            self._let_in, self._asking, self._ask_at = True, False, 0.0
            self._records.begin(said.welcome.kept)
            self._inbox.put(Welcomed(said.welcome, said.header))
            # What is being tried again goes on at once.
            before, self._nudge = self._nudge, threading.Event()
            before.set()
            for own in self._outbox.outstanding():
                self._in_background(lambda own=own: self._send(own), self._senders)  # type: ignore[misc]
        elif said.call:
            self._inbox.put(Called(said.call, said.own))
            if said.own and said.own.site != self.site:
                self._fetching.prefetch(said.own, each_once(self._wanted(said.own)))
        elif said.kind == "wanted":
            self._inbox.put(StateWanted(said.text, said.flag))
        elif said.kind == "state":
            self._hear_state(said)
        elif said.kind == "lost":
            self._hear_loss(said)
        elif said.kind == "waiting":
            self._asking = False
            self._inbox.put(Waiting(said.text))

    def _hear_state(self, said: Heard) -> None:
        header, keys = said.header, [part.key for part in said.parts]
        assert header is not None, "the event is a state"

        def there(blobs: Mapping[str, Bytes] | None) -> None:
            self._asking = False
            if blobs is not None:
                self._inbox.put(StateArrived(header, tuple(blobs[key] for key in keys), said.text))

        # Payloads that have to be fetched too are not before it.
        self._fetching_states.fetch(each_once(said.parts), {}, there)

    def _hear_loss(self, said: Heard) -> None:
        self._let_in = self._asking = False
        self._records.lose()
        if said.flag:
            # A process that died is not in the way for longer than its lease.
            now = time.monotonic()
            self._busy_since = now if self._busy_since is None else self._busy_since
            if now > self._busy_since + self._lease + _AGAIN:
                raise Refused(said.text)
        self._inbox.put(Lost(said.text))
