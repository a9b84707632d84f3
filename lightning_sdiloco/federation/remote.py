"""A site's end of the connection to its hub: see [Note: how a site uses its connection].

[Note: a site of several ranks] Every rank has a connection, under the same name and incarnation.
That of the first one says hello, contributes, and hears; the others move payloads and say nothing.
A contribution names the payloads of all ranks, and the hub takes it when the last of them is in its
store: one rank's alone never counts. So what a site sends
does not grow with its ranks, and neither does what it fetches: `places_of` gives every payload of
another site to one rank.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any

from lightning_sdiloco.errors import ExchangeError, Refused
from lightning_sdiloco.federation.client import Answer, Transport
from lightning_sdiloco.federation.codec import Bytes, key_of, plain, read
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.messages import (
    Amended,
    Call,
    Called,
    Contribution,
    Event,
    Lost,
    Payload,
    Record,
    Recorded,
    StateArrived,
    StateHeader,
    StateOffered,
    StateWanted,
    Told,
    Waiting,
    Welcomed,
    said_in,
)
from lightning_sdiloco.federation.run_config import RunConfig, Terms
from lightning_sdiloco.federation.wire import CHUNK, Busy, Header, HubError, HubUnreachable

log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds after which a state is asked for again
_FIRST = 60.0  # seconds after which a hub that was never there is given up
_LONGEST_LEASE = 12.0  # seconds after which a name in use does not belong to a process that died
# records whose payloads are here, and not read yet, before no more are fetched: they take memory
_UNREAD = 32
# Small messages do not wait behind large ones, nor states behind payloads, nor anything for a hub
# that is gone.
_THREADS = {"senders": 8, "calls": 8, "records": _UNREAD, "large": 8, "states": 32}


def places_of(rank: int, ranks: int, payloads: int) -> list[int]:
    """Returns which of a contribution's payloads a rank fetches: each is fetched by one rank of a
    site.

    Examples:
        >>> [places_of(rank, 2, payloads=4) for rank in range(2)], [places_of(rank, 4, payloads=2) for rank in range(4)]
        ([[0, 1], [2, 3]], [[0], [], [1], []])
    """
    return [place for place in range(payloads) if place * ranks // payloads == rank]


class HubConnection:
    """A rank's connection to a hub, with its own threads. Its events wait until training reads
    them.
    """

    def __init__(
        self, client: Transport, rank: int = 0, ranks: int = 1, patience: float = 3600.0
    ) -> None:
        self._client = client
        self._rank = rank
        self._ranks = ranks
        self._patience = patience
        self.site = client.identity.name
        self.incarnation = client.incarnation
        self.now = client.now
        self.sends_bytes_per_s = client.sends_bytes_per_s
        # The hello and the heartbeat that the transport says; which rounds have landed last, None
        # without a state.
        self.words: tuple[Header, Header] = {}, {}
        self.applied: Sequence[int | None] = ()
        self.amended: Terms | None = None
        self._agreed = b""
        self.lease = 0.0
        # No call of the client is made under it: where hub and site are in one process, the hub has
        # a lock too.
        self._changed = threading.Condition(threading.RLock())
        self._closed = threading.Event()
        self._nudge = threading.Event()
        self._pools = {
            name: client.pool(threads, f"hub-{name}") for name, threads in _THREADS.items()
        }
        self._pending: set[Future[None]] = set()
        # The last contribution to each fragment, until it is overtaken, and which of them have been
        # sent before.
        self._outbox: dict[int, tuple[Contribution, Mapping[str, Bytes]]] = {}
        self._sending: set[Contribution] = set()
        self._begun: set[Contribution] = set()
        self._early: dict[str, tuple[int, int, Future[Bytes]]] = {}
        self._told: list[Told] = []
        self._error: Exception | None = None
        # Records that are being fetched, and those that wait for room; from which rounds on they
        # are of use.
        self._coming: set[str] = set()
        self._waiting: list[Record] = []
        self._kept: Sequence[int] = ()
        # The hub refuses what comes before it has let the site in; then all goes that is
        # outstanding.
        self._let_in = rank > 0
        self._listens = self._asking = False
        self._ask_at = float("-inf")
        self._busy_since: float | None = None
        self._away_since: float | None = None

    # Before training

    def reach(self, seconds: float = _FIRST) -> None:
        advice = " Each rank of a site calls the hub itself: its machine must reach the hub, and needs the keys."
        self._insist(lambda: self._client.call("ping"), seconds, advice)

    def _insist(
        self, ask: Callable[[], Answer], seconds: float = _FIRST, advice: str = ""
    ) -> Answer:
        """Asks until there is an answer, for some seconds; while the name is in use, for as long
        as a dead one is.
        """
        began = self.now()
        told = ""
        tries = 0
        while True:
            try:
                return ask()
            except HubError as error:
                if isinstance(error, Busy) and self.now() > began + _LONGEST_LEASE:
                    raise Refused(str(error)) from error
                if self.now() > began + seconds or not self._client.pause(self._closed, tries):
                    raise ExchangeError(
                        f"A rank of {self.site} has not reached the hub: {error}{advice}"
                    ) from error
                if str(error) != told:
                    log.warning("%s waits for its hub: %s", self.site, told := str(error))
                tries = min(tries + 1, 2)

    def agree(self, run_config: RunConfig) -> RunConfig:
        def ask() -> RunConfig:
            answer = self._bring(run_config.to_bytes())
            key = str(answer.get("run_config"))
            terms = answer.get("terms")
            self.amended = None if terms is None else read(Terms, terms, "terms")
            return (
                run_config
                if key == run_config.key
                else RunConfig.from_bytes(bytes(self._client.get(key)))
            )

        agreed = self._insist(ask)
        self._agreed = agreed.to_bytes()
        return agreed

    def _bring(self, run_config: bytes) -> Header:
        return self._client.send(run_config, {"site": self.site, "kind": "run_config"})

    def hello(self, follower: Follower) -> None:
        self.heartbeat(follower)
        self.lease = follower.terms.lease
        if self._listens or self._rank:
            self._submit("calls", self._call, "hello", self.words[0])
        else:
            self._listens = True
            self._client.listen(self)

    # What training says

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        with self._changed:
            self._outbox[own.fragment] = own, dict(blobs)
        if self._let_in:
            self._start(own)

    def keep(self, outstanding: Collection[Contribution]) -> None:
        """Forgets all contributions but those that may still count."""
        with self._changed:
            self._outbox = {
                fragment: kept for fragment, kept in self._outbox.items() if kept[0] in outstanding
            }
            self._begun = {own for own in self._begun if own in outstanding}

    def prefetch(self, own: Contribution) -> None:
        """Begins to fetch large payloads that will be needed if they count."""
        if own.site != self.site and not self._closed.is_set():
            with self._changed:
                for payload in self._wanted(own.payloads):
                    if payload.size > CHUNK and payload.key not in self._early:
                        self._early[payload.key] = own.fragment, own.round, self._begin(payload)

    def _wanted(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [payloads[place] for place in places_of(self._rank, self._ranks, len(payloads))]

    def fetch(self, record: Record) -> None:
        self._submit("records", self._deliver, record)

    def heartbeat(self, follower: Follower) -> None:
        hello = follower.hello(self._client.identity.run)
        heartbeat = follower.heartbeat()
        self.words = (
            {"site": self.site, "hello": plain(hello)},
            {"site": self.site, "heartbeat": plain(heartbeat)},
        )
        self.keep(follower.outstanding())
        applied = [None if own.digest is None else own.applied.round for own in follower.fragments]
        if applied != self.applied:
            self.applied = applied
            self._fetch_waiting()
        self._client.turn()

    def skip(self, call: Call) -> None:
        self._submit("calls", self._call, "skip", None, call.to_bytes())

    def ask(self, without: Collection[str] = ()) -> None:
        if self._let_in and not self._asking and self.now() >= self._ask_at:
            self._asking, self._ask_at = True, self.now() + _AGAIN
            self._submit("calls", self._call, "state", {"without": sorted(without)})

    def give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        if not self._rank:
            self._submit("calls", self._give, request, header, list(parts))

    def leave(self) -> None:
        with self._changed:
            pending = set(self._pending)

        def after_all_else() -> None:
            wait(pending)
            self._call("leave")

        self._submit("calls", after_all_else)

    # What training hears

    def events(self) -> list[Told]:
        """Returns what was heard, or raises the last word when there is nothing else."""
        self._client.turn()
        away = self._away_since
        if self._rank and away is not None and self.now() - away > self._patience:
            raise ExchangeError(
                f"A rank of {self.site} has not reached the hub for longer than"
                f" patience={self._patience:.0f} s. The"
                " site's checkpoint holds what it trained: restart it when the hub can be reached."
            )
        with self._changed:
            told = self._told
            self._told = []
            if not told and self._error:
                raise self._error
        if told:
            self._fetch_waiting()
        return told

    def wait(self, timeout: float) -> bool:
        """Waits until there is something to hear; other ranks than the first do not: they wait for
        that one.
        """
        return not self._rank and self._client.wait(
            self._changed, lambda: bool(self._told or self._error), timeout
        )

    def close(self, timeout: float = 5.0) -> None:
        with self._changed:
            pending = set(self._pending)
        wait(pending, timeout)
        self._closed.set()
        self._nudge.set()
        self._client.close(timeout)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    # In the background

    def _submit(self, pool: str, task: Callable[..., object], *arguments: Any) -> None:
        def run() -> None:
            try:
                task(*arguments)
            except (HubError, Refused, CancelledError) as error:
                # What matters is said again with the next hello.
                log.info("%s: %s", self.site, error)
            except Exception as error:
                self.fail(error)

        if not self._closed.is_set():
            future = self._pools[pool].submit(run)
            if pool in ("senders", "calls"):
                with self._changed:
                    self._pending.add(future)
                future.add_done_callback(self._pending.discard)

    def fail(self, error: Exception) -> None:
        """Notes an error; at the end, when threads find all closed, that is expected."""
        if not isinstance(error, Refused) and not self._closed.is_set():
            log.error("%s: the connection to the hub failed", self.site, exc_info=error)
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _call(self, name: str, about: Mapping[str, Any] | None = None, body: bytes = b"") -> Header:
        """Sends something to the hub; the first rank does so for all."""
        return (
            {}
            if self._rank
            else self._client.call(name, {"site": self.site, **(about or {})}, body)[0]
        )

    def _start(self, own: Contribution) -> None:
        with self._changed:
            if own in self._sending:
                return
            self._sending.add(own)
        self._submit("senders", self._send, own)

    def _send(self, own: Contribution) -> None:
        """Sends the payloads of a contribution until they are taken, or it is overtaken."""
        try:
            tries = 0
            while (
                not self._closed.is_set()
                and (kept := self._outbox.get(own.fragment))
                and kept[0] == own
            ):
                # A hub that is back is tried at once; one that refuses, ever more seldom, however
                # often it says hello.
                nudge = self._nudge
                is_refused = False
                try:
                    if self._is_taken(own, kept[1]):
                        return
                except Refused as error:
                    is_refused = True
                    # Where another rank sends, the first one may have to say hello first.
                    level = logging.INFO if self._rank or tries else logging.WARNING
                    told = (own.round, own.fragment)
                    log.log(
                        level,
                        "%s: round %d of fragment %d was not taken: %s",
                        self.site,
                        *told,
                        error,
                    )
                    self._submit("calls", self._call, "hello", self.words[0])
                if not self._client.pause(self._closed if is_refused else nudge, tries):
                    return
                tries = tries + 1 if is_refused or not nudge.is_set() else 0
        finally:
            with self._changed:
                self._sending.discard(own)

    def _is_taken(self, own: Contribution, blobs: Mapping[str, Bytes]) -> bool:
        with self._changed:  # a set must not change while `keep` reads it
            is_first = own not in self._begun
            self._begun.add(own)
        try:
            for key, blob in blobs.items():
                began = self.now()
                self._client.send(blob, {"site": self.site, "kind": "payload"}, key=key)
                # Later some of it may be there already.
                if is_first and (seconds := self.now() - began) > 0:
                    self.sends_bytes_per_s = len(blob) / seconds
            answer = self._call("contribute", None, own.to_bytes())
        except HubUnreachable as error:
            self._missed(error)
            return False
        except HubError as error:
            self._put(Waiting(str(error)))
            return False
        self._away_since = None
        # With all payloads sent and some missing, they were dropped as they arrived.
        return answer.get("answer") != "waiting" or len(blobs) < len(
            {payload.key for payload in own.payloads}
        )

    def _missed(self, error: Exception) -> None:
        self._away_since = self.now() if self._away_since is None else self._away_since
        log.info("%s: %s", self.site, error)

    def _deliver(self, record: Record) -> None:
        """Announces a record when all wanted payloads are here, or some are gone."""
        blobs = self._blobs(
            [payload for payloads in record.sources for payload in self._wanted(payloads)]
        )
        with self._changed:
            # What came early and did not count is not needed.
            self._early = {
                key: early
                for key, early in self._early.items()
                if early[0] != record.fragment or early[1] > record.round
            }
            # Events of an earlier connection come again, or did not happen in a run that was
            # founded again.
            if self._rank or record.key in self._coming:
                self._coming.discard(record.key)
                self._close(record, blobs)

    def _close(self, record: Record, blobs: Mapping[str, Bytes] | None) -> None:
        """Announces a record, and forgets what this site has contributed to its round, or to
        earlier ones.
        """
        kept = self._outbox.get(record.fragment)
        if kept and kept[0].round <= record.round:
            del self._outbox[record.fragment]
        self._put(Recorded(record, blobs))

    def _put(self, told: Told) -> None:
        with self._changed:
            self._told.append(told)
            self._changed.notify_all()

    def _blobs(self, payloads: Sequence[Payload], pool: str = "large") -> dict[str, Bytes] | None:
        """Returns blobs: the small ones come in one stream, the others at the same time; None if
        some of it is gone.
        """
        with self._changed:
            here = {key: blob for _, blobs in self._outbox.values() for key, blob in blobs.items()}
            wanted = [one for one in dict.fromkeys(payloads) if one.key not in here]
            small = [one for one in wanted if one.size <= CHUNK]
            futures = {
                one.key: early[2]
                if (early := self._early.get(one.key))
                and not (early[2].done() and early[2].exception())
                else self._begin(one, pool)
                for one in wanted
                if one.size > CHUNK
            }
        try:
            if small:
                here |= self._insistently(lambda: self._client.get_small(small))
            return {
                one.key: futures[one.key].result() if one.key in futures else here[one.key]
                for one in payloads
            }
        except (HubUnreachable, CancelledError):
            # It comes again on the next connection.
            raise
        except Exception as error:
            log.warning("a payload is not available: %s", error)
            return None

    def _begin(self, payload: Payload, pool: str = "large") -> "Future[Bytes]":
        return self._pools[pool].submit(
            self._insistently, lambda: self._client.get(payload.key, payload.size)
        )

    def _insistently(self, fetch: Callable[[], Answer]) -> Answer:
        """Fetches again where a connection broke; what comes again on a new one is fetched
        again.
        """
        tries = 0
        while True:
            try:
                came = fetch()
                self._away_since = None
                return came
            except HubUnreachable as error:
                self._missed(error)
                if (
                    not self._let_in
                    or self._closed.is_set()
                    or not self._client.pause(self._closed, tries)
                ):
                    raise
                tries += 1

    def _give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        named = [Payload(key_of(part), memoryview(part).nbytes) for part in parts]
        about = {"site": self.site, "kind": "state"}
        with self._client.pool(_THREADS["calls"], "hub-giver") as pool:
            list(
                pool.map(
                    lambda part, own: self._client.send(part, about, key=own.key), parts, named
                )
            )
        self._call("give", {"request": request, "parts": plain(named)}, header.to_bytes())

    # Listening; nothing here waits, or a hub that is gone would be noticed late

    def hear(self, event: Event) -> None:
        said = said_in(event)
        if not isinstance(said, Lost):
            self._busy_since = None
        match said:
            case Recorded():
                # Told at once where its payloads are of no use, and otherwise when these are here.
                record = said.record
                with self._changed:
                    is_dropped = bool(self._kept) and record.round < self._kept[record.fragment]
                    if is_dropped:
                        self._close(record, None)
                    elif record.key not in self._coming and not self._is_applied(record):
                        self._waiting.append(record)
                    if not is_dropped and not self._is_useful(record):
                        self._put(Recorded(record, None))
                self._fetch_waiting()
            case Welcomed():
                with self._changed:
                    self._let_in = True
                    self._asking = False
                    self._ask_at = float("-inf")
                    # What waits comes again.
                    self._kept = said.welcome.kept
                    self._waiting.clear()
                    outstanding = [own for own, _ in self._outbox.values()]
                self._put(said)
                # Pending retries run at once.
                before = self._nudge
                self._nudge = threading.Event()
                before.set()
                for own in outstanding:
                    self._start(own)
            case Called():
                self._put(said)
                if said.own:
                    self.prefetch(said.own)
            case StateWanted() | Amended():
                self._put(said)
            case StateOffered():
                self._submit("calls", self._fetch_state, said)
            case Waiting():
                self._asking = False
                self._put(said)
            case Lost():
                self._let_in = self._asking = False
                # Pending fetches may not arrive.
                self._coming.clear()
                if event.header.get("kind") == "Missing" and not self._rank:
                    # A hub that has lost its ledger knows nothing of the run.
                    self._submit("calls", self._bring, self._agreed)
                if said.is_busy:
                    # A process that died is not in the way for longer than its lease.
                    self._busy_since = self.now() if self._busy_since is None else self._busy_since
                    if self.now() > self._busy_since + self.lease + 1.0:
                        raise Refused(said.why)
                self._put(said)

    def _fetch_state(self, offered: StateOffered) -> None:
        blobs = self._blobs(offered.parts, pool="states")
        self._asking = False
        if blobs is not None:
            parts = tuple(blobs[part.key] for part in offered.parts)
            self._put(StateArrived(offered.header, parts, offered.source))

    def _fetch_waiting(self) -> None:
        """Fetches for the records that wait, as far as there is room."""
        with self._changed:
            unread = sum(
                isinstance(told, Recorded) and told.blobs is not None for told in self._told
            )
            room = max(0, _UNREAD - unread - len(self._coming))
            left = [record for record in self._waiting if not self._is_applied(record)]
            begun = [record for record in left if self._is_useful(record)][:room]
            self._coming.update(record.key for record in begun)
            self._waiting = [record for record in left if record.key not in self._coming]
        for record in begun:
            self.fetch(record)

    def _is_applied(self, record: Record) -> bool:
        applied = self.applied[record.fragment] if self.applied else None
        return applied is not None and record.round <= applied

    def _is_useful(self, record: Record) -> bool:
        """Whether a record can be applied when those before it are, without a state."""
        if not self._kept or not self.applied:
            return True
        applied = self.applied[record.fragment]
        return applied is not None and self._kept[record.fragment] <= applied + 1 <= record.round
