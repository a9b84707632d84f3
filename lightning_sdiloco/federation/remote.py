"""A site's side of the connection to its hub, described in [Note: how a site uses its connection].

[Note: a site of several ranks] Every rank has a connection with the same name and incarnation. The
first rank's connection sends the hello and the contributions and receives events. All other
connections only transfer payloads. A contribution names the payloads of all ranks. The hub accepts
the contribution when all of these payloads are in its store, so no payload counts without the
others. The traffic of a site does not grow with its number of ranks, because `places_of` assigns
every payload of another site to exactly one rank.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import NamedTuple

from lightning_sdiloco.errors import ExchangeError, Refused
from lightning_sdiloco.federation.client import Answer, Transport
from lightning_sdiloco.federation.codec import Bytes, RoundNumber, key_of, plain, read
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.messages import (
    Amended,
    Call,
    Called,
    Contribution,
    Event,
    InnerRate,
    Lost,
    Payload,
    Record,
    Recorded,
    RoundId,
    SiteEvent,
    StateArrived,
    StateHeader,
    StateOffered,
    StateWanted,
    StepsOfOthers,
    Waiting,
    Welcome,
    Welcomed,
    read_event,
)
from lightning_sdiloco.federation.run_config import RunConfig, Terms
from lightning_sdiloco.federation.wire import CHUNK, Busy, Header, HubError, HubUnreachable

log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds after which a state is requested again
# Seconds after the end of a lease within which the hub notices it.
_MARGIN = 2.0
# Fetching pauses at this number of unread records, because their payloads take memory.
_UNREAD = 32
# Small messages do not wait behind large ones, states do not wait behind payloads, and nothing
# waits for a hub that is gone.
_THREADS = {"senders": 8, "calls": 8, "records": _UNREAD, "large": 8, "states": 32}


def places_of(rank: int, ranks: int, payloads: int) -> list[int]:
    """Returns the positions of the payloads that a rank must fetch from a contribution. Each
    payload is fetched by exactly one rank of a site.

    Examples:
        >>> [places_of(rank, 2, payloads=4) for rank in range(2)], [places_of(rank, 4, payloads=2) for rank in range(4)]
        ([[0, 1], [2, 3]], [[0], [], [1], []])
    """
    return [place for place in range(payloads) if place * ranks // payloads == rank]


class Early(NamedTuple):
    """A large payload that is fetched before it is known whether its contribution counts."""

    fragment: int
    round: RoundNumber
    future: "Future[Bytes]"


class Outbox:
    """The contributions in transit to the hub. For each fragment, the outbox keeps the latest
    contribution until it is overtaken. The owning connection holds a lock during every call that
    changes the outbox.
    """

    def __init__(self) -> None:
        # By fragment: a contribution, and the payloads of this rank by key.
        self._entries: dict[int, tuple[Contribution, Mapping[str, Bytes]]] = {}
        # Contributions that a thread is sending, and those whose payloads were sent before.
        self._sending: set[Contribution] = set()
        self._tried: set[Contribution] = set()

    def put(self, contribution: Contribution, blobs: Mapping[str, Bytes]) -> None:
        self._entries[contribution.fragment] = contribution, dict(blobs)

    def keep(self, outstanding: Collection[Contribution]) -> None:
        """Drops all contributions except the outstanding ones."""
        for contribution in self.contributions():
            if contribution not in outstanding:
                del self._entries[contribution.fragment]
        self._tried.intersection_update(outstanding)

    def drop(self, record: Record) -> None:
        """Drops the contribution to a record's round or to an earlier round."""
        entry = self._entries.get(record.fragment)
        if entry and entry[0].round <= record.round:
            del self._entries[record.fragment]

    def contributions(self) -> list[Contribution]:
        return [contribution for contribution, _ in self._entries.values()]

    def blobs(self) -> dict[str, Bytes]:
        """Returns the payloads of all contributions by key."""
        blobs = dict[str, Bytes]()
        for _, sent in self._entries.values():
            blobs |= sent
        return blobs

    def blobs_of(self, contribution: Contribution) -> Mapping[str, Bytes] | None:
        """Returns the payloads of a contribution, or None if it was overtaken."""
        entry = self._entries.get(contribution.fragment)
        return entry[1] if entry and entry[0] == contribution else None

    def begin(self, contribution: Contribution) -> bool:
        """Returns whether to send a contribution. The result is False if a thread is already
        sending it.
        """
        if contribution in self._sending:
            return False
        self._sending.add(contribution)
        return True

    def end(self, contribution: Contribution) -> None:
        self._sending.discard(contribution)

    def is_first_try(self, contribution: Contribution) -> bool:
        """Registers an attempt and returns whether it is the first."""
        is_first = contribution not in self._tried
        self._tried.add(contribution)
        return is_first


class RecordQueue:
    """The records waiting to be passed to training. The owning connection holds a lock during every
    call.

    Attributes:
        applied: The last round of each fragment that has landed, or None if the site has no state.
        kept_from: The first round of each fragment whose payloads the hub keeps.
        fetching: The records whose payloads are being fetched, by key.
    """

    def __init__(self) -> None:
        self.applied: Sequence[int | None] = ()
        self.kept_from: Sequence[int] = ()
        self.fetching: dict[str, Record] = {}
        self._waiting: list[Record] = []

    def add(self, record: Record) -> None:
        if record.key not in self.fetching:
            self._waiting.append(record)

    def welcome(self, welcome: Welcome) -> None:
        """Resets the queue after a welcome, because the hub resends all records except those that
        were rolled back.
        """
        self.kept_from = welcome.kept
        self._waiting.clear()
        for key, record in list(self.fetching.items()):
            if record.round > welcome.closed[record.fragment].round:
                del self.fetching[key]

    def take(self, room: int) -> list[Record]:
        """Takes up to ``room`` records from the queue to fetch now."""
        waiting = [record for record in self._waiting if not self._is_applied(record)]
        taken = [record for record in waiting if self.is_useful(record)][:room]
        for record in taken:
            self.fetching[record.key] = record
        self._waiting = [record for record in waiting if record.key not in self.fetching]
        return taken

    def is_dropped(self, record: Record) -> bool:
        """Returns whether the hub has dropped the payloads of a record."""
        return bool(self.kept_from) and record.round < self.kept_from[record.fragment]

    def _is_applied(self, record: Record) -> bool:
        applied = self.applied[record.fragment] if self.applied else None
        return applied is not None and record.round <= applied

    def is_useful(self, record: Record) -> bool:
        """Returns whether a record can be applied after the earlier records without fetching a
        state.
        """
        if not self.kept_from or not self.applied:
            return True
        applied = self.applied[record.fragment]
        return (
            applied is not None and self.kept_from[record.fragment] <= applied + 1 <= record.round
        )


class HubConnection:
    """A rank's connection to a hub. The connection has its own threads and queues events until
    training reads them.

    Attributes:
        hello_header: The hello that the transport sends on every new connection.
        heartbeat_header: The heartbeat that the transport sends.
        amended: The amended terms of the run, or None if the terms have not been amended.
        sends_bytes_per_s: The sending rate of the last large payload.
    """

    def __init__(
        self,
        client: Transport,
        rank: int = 0,
        ranks: int = 1,
        patience: float = 3600.0,
        lease: float = 10.0,
    ) -> None:
        self._client = client
        self._rank = rank
        self._ranks = ranks
        self._patience = patience
        self.site = client.identity.name
        self.incarnation = client.incarnation
        self.now = client.now
        self.sends_bytes_per_s = client.sends_bytes_per_s
        self.hello_header: Header = {}
        self.heartbeat_header: Header = {}
        self.amended: Terms | None = None
        self._run_config = b""
        self.lease = lease
        # Guards state that threads share. No client call is made while it is held, because a hub in
        # the same process also has a lock.
        self._changed = threading.Condition(threading.RLock())
        self._closed = threading.Event()
        # Set when the hub is back, so that pending retries run at once.
        self._nudge = threading.Event()
        self._pools = {
            name: client.pool(threads, f"hub-{name}") for name, threads in _THREADS.items()
        }
        self._pending: set[Future[None]] = set()
        self._outbox = Outbox()
        # By key: the payloads of contributions that may count.
        self._early: dict[str, Early] = {}
        self._events: list[SiteEvent] = []
        self._error: Exception | None = None
        self.records = RecordQueue()
        # The hub refuses all calls until it has accepted the site; then all outstanding
        # contributions are sent.
        self._let_in = rank > 0
        self._listens = False
        # Whether a state is being requested, and the earliest time to request it again.
        self._asking = False
        self._ask_at = float("-inf")
        # The time since which the hub has reported that the name is in use.
        self._busy_since: float | None = None
        # The time since which payloads have not reached the hub.
        self._away_since: float | None = None

    # Before training

    def reach(self) -> None:
        advice = " Each rank of a site calls the hub directly, so its machine needs the keys and access to the hub."
        self._insist(lambda: self._client.call("ping"), advice)

    def _insist(self, ask: Callable[[], Answer], advice: str = "") -> Answer:
        """Retries a request until the hub answers or ``patience`` seconds have passed. If the
        site's name is in use, retries end when the lease of a dead process would have expired.
        """
        began = self.now()
        warned_of = ""
        tries = 0
        while True:
            try:
                return ask()
            except HubError as error:
                if isinstance(error, Busy) and self.now() > began + self.lease + _MARGIN:
                    raise Refused(str(error)) from error
                if self.now() > began + self._patience or not self._client.pause(
                    self._closed, tries
                ):
                    raise ExchangeError(
                        f"A rank of {self.site} has not reached the hub for"
                        f" patience={self._patience:.0f} s: {error}{advice}"
                    ) from error
                if str(error) != warned_of:
                    warned_of = str(error)
                    log.warning("%s is waiting for its hub: %s", self.site, warned_of)
                tries = min(tries + 1, 2)

    def agree(self, run_config: RunConfig) -> RunConfig:
        def ask() -> RunConfig:
            answer = self._bring(run_config.to_bytes())
            key = str(answer.get("run_config"))
            terms = answer.get("terms")
            self.amended = None if terms is None else read(Terms, terms, "terms")
            if key == run_config.key:
                return run_config
            return RunConfig.from_bytes(bytes(self._client.get(key)))

        agreed = self._insist(ask)
        self._run_config = agreed.to_bytes()
        return agreed

    def _bring(self, run_config: bytes) -> Header:
        return self._client.send(run_config, {"site": self.site, "kind": "run_config"})

    def hello(self, follower: Follower) -> None:
        self.heartbeat(follower)
        self.lease = follower.terms.lease
        if self._listens or self._rank:
            self._say_hello()
        else:
            self._listens = True
            self._client.listen(self)

    # Calls from training

    def contribute(self, contribution: Contribution, blobs: Mapping[str, Bytes]) -> None:
        with self._changed:
            self._outbox.put(contribution, blobs)
        if self._let_in:
            self._start(contribution)

    def prefetch(self, contribution: Contribution) -> None:
        """Starts fetching large payloads that may be needed."""
        if contribution.site == self.site or self._closed.is_set():
            return
        with self._changed:
            for payload in self._wanted(contribution.payloads):
                if payload.size > CHUNK and payload.key not in self._early:
                    self._early[payload.key] = Early(
                        contribution.fragment, contribution.round, self._begin(payload)
                    )

    def _wanted(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [payloads[place] for place in places_of(self._rank, self._ranks, len(payloads))]

    def fetch(self, record: Record) -> None:
        self._submit("records", self._deliver, record)

    def heartbeat(self, follower: Follower) -> None:
        hello = follower.hello(self._client.identity.run)
        self.hello_header = {"site": self.site, "hello": plain(hello)}
        self.heartbeat_header = {
            "site": self.site,
            "heartbeat": plain(follower.heartbeat()),
            "steps": plain(follower.step_counts),
        }
        with self._changed:
            self._outbox.keep(follower.outstanding())
        applied = [
            None if progress.digest is None else progress.applied.round
            for progress in follower.fragments
        ]
        if applied != self.records.applied:
            self.records.applied = applied
            self._fetch_waiting()
        self._client.turn()

    def skip(self, call: Call) -> None:
        self._submit("calls", self._call, "skip", None, call.to_bytes())

    def ask(self, without: Collection[str] = (), lacked: Sequence[RoundId] = ()) -> None:
        """Requests a state from any source that is not excluded, or payloads that the hub has
        lost.
        """
        about: Header = {"without": sorted(without)}
        if lacked:
            about["lacks"] = plain(lacked)
        if self._let_in and not self._asking and self.now() >= self._ask_at:
            self._asking = True
            self._ask_at = self.now() + _AGAIN
            self._submit("calls", self._ask, about)

    def _ask(self, about: Header) -> None:
        try:
            answer = self._call("state", about)
        except Refused:
            # After a rollback, rounds that this site has received may no longer exist.
            self._say_hello()
            raise
        if answer.get("records"):
            # Records arrive again instead of a state.
            self._asking = False

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

    # Events for training

    def events(self) -> list[SiteEvent]:
        """Returns the events since the last call, or raises the error that ended the event
        stream.
        """
        self._client.turn()
        away_since = self._away_since
        if self._rank and away_since is not None and self.now() - away_since > self._patience:
            raise ExchangeError(
                f"A rank of {self.site} has not reached the hub for more than"
                f" patience={self._patience:.0f} s. The site's training is saved in its checkpoint."
                " Restart the site once the hub can be reached again."
            )
        with self._changed:
            events = self._events
            self._events = []
            if not events and self._error:
                raise self._error
        if events:
            self._fetch_waiting()
        return events

    def wait(self, timeout: float) -> bool:
        """Waits for an event on the first rank. All other ranks return immediately, because they
        wait for the first rank elsewhere.
        """
        return not self._rank and self._client.wait(
            self._changed, lambda: bool(self._events or self._error), timeout
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

    def _submit(self, pool: str, task: Callable[..., object], *arguments: object) -> None:
        def run() -> None:
            try:
                task(*arguments)
            except (HubError, Refused, CancelledError) as error:
                # Everything that matters is resent after the next hello.
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
        """Stores an error. After the connection has closed, errors in threads are expected and are
        not logged.
        """
        if not isinstance(error, Refused) and not self._closed.is_set():
            log.error("%s: the connection to the hub failed", self.site, exc_info=error)
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _call(
        self, name: str, about: Mapping[str, object] | None = None, body: bytes = b""
    ) -> Header:
        """Makes a call to the hub on behalf of all ranks. Only the first rank calls the hub."""
        if self._rank:
            return {}
        return self._client.call(name, {"site": self.site, **(about or {})}, body)[0]

    def _say_hello(self) -> None:
        self._submit("calls", self._call, "hello", self.hello_header)

    def _start(self, contribution: Contribution) -> None:
        with self._changed:
            begins = self._outbox.begin(contribution)
        if begins:
            self._submit("senders", self._send, contribution)

    def _send(self, contribution: Contribution) -> None:
        """Resends the payloads of a contribution until the hub accepts them or the contribution is
        overtaken.
        """
        try:
            tries = 0
            while (blobs := self._unsent(contribution)) is not None:
                # A site retries immediately when the hub is back. If the hub refuses, the site
                # retries less and less often, regardless of new hellos.
                nudge = self._nudge
                is_refused = False
                try:
                    if self._is_taken(contribution, blobs):
                        return
                except Refused as error:
                    is_refused = True
                    # The first rank may have to say hello before another rank can send.
                    log.log(
                        logging.INFO if self._rank or tries else logging.WARNING,
                        "%s: round %d of fragment %d was not accepted: %s",
                        self.site,
                        contribution.round,
                        contribution.fragment,
                        error,
                    )
                    self._say_hello()
                if not self._client.pause(self._closed if is_refused else nudge, tries):
                    return
                tries = tries + 1 if is_refused or not nudge.is_set() else 0
        finally:
            with self._changed:
                self._outbox.end(contribution)

    def _unsent(self, contribution: Contribution) -> Mapping[str, Bytes] | None:
        """Returns a contribution's payloads if the contribution may still count, or None
        otherwise.
        """
        return None if self._closed.is_set() else self._outbox.blobs_of(contribution)

    def _is_taken(self, contribution: Contribution, blobs: Mapping[str, Bytes]) -> bool:
        with self._changed:
            is_first = self._outbox.is_first_try(contribution)
        try:
            for key, blob in blobs.items():
                began = self.now()
                self._client.send(blob, {"site": self.site, "kind": "payload"}, key=key)
                seconds = self.now() - began
                # In later attempts, the hub may already have part of the payloads.
                if is_first and seconds > 0:
                    self.sends_bytes_per_s = len(blob) / seconds
            answer = self._call("contribute", None, contribution.to_bytes())
        except HubUnreachable as error:
            self._missed(error)
            return False
        except HubError as error:
            self._put(Waiting(str(error)))
            return False
        self._away_since = None
        if answer.get("answer") != "waiting":
            return True
        # If this rank has sent all payloads and some are missing, the store has dropped them on
        # arrival.
        return len(blobs) < len({payload.key for payload in contribution.payloads})

    def _missed(self, error: Exception) -> None:
        if self._away_since is None:
            self._away_since = self.now()
        log.info("%s: %s", self.site, error)

    def _deliver(self, record: Record) -> None:
        """Fetches the required payloads of a record and then announces the record, even if some
        payloads are missing.
        """
        wanted = [payload for payloads in record.sources for payload in self._wanted(payloads)]
        blobs = self._blobs(wanted)
        with self._changed:
            for key, early in list(self._early.items()):
                # Early payloads that do not count are not needed.
                if early.fragment == record.fragment and early.round <= record.round:
                    del self._early[key]
            # A record from an earlier connection arrives again, or no longer exists in a run that
            # was refounded or rolled back.
            if self.records.fetching.pop(record.key, None) or self._rank:
                self._close(record, blobs)

    def _close(self, record: Record, blobs: Mapping[str, Bytes] | None) -> None:
        """Announces a record and drops this site's contribution to that round or to an earlier
        one.
        """
        self._outbox.drop(record)
        self._put(Recorded(record, blobs))

    def _put(self, event: SiteEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _blobs(self, payloads: Sequence[Payload], pool: str = "large") -> dict[str, Bytes] | None:
        """Fetches small blobs in a single stream and large blobs concurrently. Returns None if some
        blobs are missing.
        """
        with self._changed:
            blobs = self._outbox.blobs()
            wanted = [need for need in dict.fromkeys(payloads) if need.key not in blobs]
            small = [payload for payload in wanted if payload.size <= CHUNK]
            futures = {
                payload.key: self._early_future(payload) or self._begin(payload, pool)
                for payload in wanted
                if payload.size > CHUNK
            }
        try:
            if small:
                blobs |= self._insistently(lambda: self._client.get_small(small))
            for key, future in futures.items():
                blobs[key] = future.result()
            return {payload.key: blobs[payload.key] for payload in payloads}
        except (HubUnreachable, CancelledError):
            # The record arrives again on the next connection.
            raise
        except Exception as error:
            log.warning("a payload is not available: %s", error)
            return None

    def _early_future(self, payload: Payload) -> "Future[Bytes] | None":
        early = self._early.get(payload.key)
        if early is None or (early.future.done() and early.future.exception()):
            return None
        return early.future

    def _begin(self, payload: Payload, pool: str = "large") -> "Future[Bytes]":
        return self._pools[pool].submit(
            self._insistently, lambda: self._client.get(payload.key, payload.size)
        )

    def _insistently(self, fetch: Callable[[], Answer]) -> Answer:
        """Retries a fetch after a connection breaks, unless the hub will resend everything on a new
        connection.
        """
        tries = 0
        while True:
            try:
                fetched = fetch()
                self._away_since = None
                return fetched
            except HubUnreachable as error:
                self._missed(error)
                if not self._let_in or self._closed.is_set():
                    raise
                if not self._client.pause(self._closed, tries):
                    raise
                tries += 1

    def _give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        payloads = [Payload(key_of(part), memoryview(part).nbytes) for part in parts]
        about = {"site": self.site, "kind": "state"}

        def send(part: Bytes, payload: Payload) -> None:
            self._client.send(part, about, key=payload.key)

        with self._client.pool(_THREADS["calls"], "hub-giver") as pool:
            list(pool.map(send, parts, payloads))
        self._call("give", {"request": request, "parts": plain(payloads)}, header.to_bytes())

    # Listening. Nothing here waits, because then a lost hub would be noticed late

    def hear(self, event: Event) -> None:
        """Handles an event from the hub or from the transport."""
        hub_event = read_event(event)
        if not isinstance(hub_event, Lost):
            self._busy_since = None
        match hub_event:
            case Recorded():
                self._hear_record(hub_event.record)
            case Welcomed():
                self._hear_welcome(hub_event)
            case Called():
                self._put(hub_event)
                if hub_event.own:
                    self.prefetch(hub_event.own)
            case StateWanted() | Amended() | InnerRate() | StepsOfOthers():
                self._put(hub_event)
            case StateOffered():
                self._submit("calls", self._fetch_state, hub_event)
            case Waiting():
                self._asking = False
                self._put(hub_event)
            case Lost():
                self._hear_lost(hub_event, event.header.get("kind") == "Missing")

    def _hear_record(self, record: Record) -> None:
        # If its payloads are useless, a record is announced immediately. Otherwise, it is announced
        # when the payloads have arrived.
        with self._changed:
            if self.records.is_dropped(record):
                self._close(record, None)
            else:
                self.records.add(record)
                if not self.records.is_useful(record):
                    self._put(Recorded(record, None))
        self._fetch_waiting()

    def _hear_welcome(self, event: Welcomed) -> None:
        with self._changed:
            self._let_in = True
            self._asking = False
            self._ask_at = float("-inf")
            self.records.welcome(event.welcome)
            outstanding = self._outbox.contributions()
        self._put(event)
        pending_retries = self._nudge
        self._nudge = threading.Event()
        pending_retries.set()
        for contribution in outstanding:
            self._start(contribution)

    def _hear_lost(self, event: Lost, lacks_run_config: bool) -> None:
        self._let_in = False
        self._asking = False
        # Pending fetches may never complete.
        self.records.fetching.clear()
        if lacks_run_config and not self._rank:
            # A hub that has lost its ledger has no record of the run.
            self._submit("calls", self._bring, self._run_config)
        if event.is_busy:
            # A dead process blocks the name only for the length of its lease.
            if self._busy_since is None:
                self._busy_since = self.now()
            if self.now() > self._busy_since + self.lease + _MARGIN:
                raise Refused(event.why)
        self._put(event)

    def _fetch_state(self, offered: StateOffered) -> None:
        blobs = self._blobs(offered.parts, pool="states")
        self._asking = False
        parts: tuple[Bytes, ...] = ()
        if blobs is not None:
            parts = tuple(blobs[part.key] for part in offered.parts)
        self._put(StateArrived(offered.header, parts, offered.source))

    def _fetch_waiting(self) -> None:
        """Fetches the payloads of waiting records as far as the memory limit allows."""
        with self._changed:
            unread = sum(
                isinstance(event, Recorded) and event.blobs is not None for event in self._events
            )
            records = self.records.take(max(0, _UNREAD - unread - len(self.records.fetching)))
        for record in records:
            self.fetch(record)
