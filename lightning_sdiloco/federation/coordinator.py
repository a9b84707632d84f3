"""The coordinator of a run at the hub. The coordinator applies the rules, stores its decisions
durably, and then informs the sites.

Every call is made on behalf of a `Peer` whose permissions have already been checked.

[Note: where data is kept] Records and notes are stored in a journal, which can write multiple
records and notes atomically. Payloads and states are blobs in a store. A blob is stored durably
before any record or note names it. The store drops a blob once three conditions hold: no record or
note names the blob, no message in transit can name it (`UnnamedBlobs`), and no connected site is
fetching it.

[Note: one at a time] All changes to a run are made under a single lock. The lock is not held while
blobs are transferred. Every method in this module follows the order in [Note: durable before
visible] in `federation/ledger.py`.
"""

import itertools
import json
import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import get_type_hints

from lightning_sdiloco.algorithm.guard import AGAINST, AGAINST_OTHERS
from lightning_sdiloco.errors import AgreementError, Malformed, Refused
from lightning_sdiloco.federation.codec import Json, RoundNumber, decoded, encoded, plain, read
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.ledger import Answer, Founding, Ledger, Member
from lightning_sdiloco.federation.lost_payloads import LostPayloads
from lightning_sdiloco.federation.messages import (
    MOST_BYTES,
    Amended,
    Call,
    Called,
    Contribution,
    Event,
    Heartbeat,
    Hello,
    InnerRate,
    LeftOut,
    Parts,
    Payload,
    Position,
    Record,
    RoundId,
    Snapshot,
    StateHeader,
    StepCounts,
    StepsOfOthers,
    Waiting,
    Welcome,
    Welcomed,
    event_of,
)
from lightning_sdiloco.federation.quorum import Quorum, built_in, quorum_of
from lightning_sdiloco.federation.room import RecordIndex, Room
from lightning_sdiloco.federation.run_config import AMENDABLE, RunConfig, Terms
from lightning_sdiloco.federation.state_requests import Need, States, holds
from lightning_sdiloco.federation.store import BlobStore, InMemoryStore, SQLiteLedger
from lightning_sdiloco.federation.wire import CHUNK, Busy, Header, HubError, Missing, NoSpace

log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds after which a failed attempt is repeated
_MOST_BEGUN = 128  # blobs of a site whose start times are remembered

_TERMS = {
    name: hint
    for name, hint in get_type_hints(Terms, include_extras=True).items()
    if name in AMENDABLE
}

Status = dict[str, Json]


@dataclass
class SiteStatistics:
    """A site's statistics for `Coordinator.status`. ``began`` contains the time at which each blob
    started to arrive. Each heartbeat sets ``trained_steps``, ``lost_steps``, ``inner_lr``,
    ``cosine``, ``against`` and ``steps``. ``excluded`` contains the sources whose states the site
    has refused since it last had a usable state.
    """

    heard_at: float = 0.0
    incarnation: str = ""
    incarnations: int = 0
    late: int = 0
    trained_steps: int = 0
    lost_steps: int = 0
    inner_lr: float | None = None
    cosine: float = 0.0
    against: int = 0
    steps: StepCounts | None = None
    not_finite: int = 0
    too_long: int = 0
    wrong_buffers: int = 0
    refused_states: int = 0
    excluded: Collection[str] = ()
    bytes: int = 0
    rate: float = 0.0
    began: dict[str, float] = field(default_factory=dict)

    def count(self, record: Record, left_out: LeftOut) -> None:
        self.not_finite += left_out.reason == "not finite"
        self.too_long += left_out.is_by_guard
        self.wrong_buffers += left_out.is_of_buffers
        log.warning(
            "round %d of fragment %d leaves out the %s of %s: %s",
            record.round,
            record.fragment,
            "buffers" if left_out.is_of_buffers else "contribution",
            left_out.site,
            record.why(left_out.site),
        )


class Coordinator:
    """Serves a single run. All methods are thread-safe."""

    def __init__(
        self,
        run: str,
        journal: SQLiteLedger,
        store: BlobStore | InMemoryStore,
        sites: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        find_quorum: Callable[[str], type[Quorum]] = built_in,
        refound: bool = False,
    ) -> None:
        self.run_config = _founded_run_config(run, journal, sites, refound)
        self.run = run
        self.journal = journal
        self.store = store
        self.statistics: defaultdict[str, SiteStatistics] = defaultdict(SiteStatistics)
        # The reason why rounds cannot close; None if they can.
        self.trouble: str | None = None
        self._clock = clock
        self._find_quorum = find_quorum
        self._lock = threading.RLock()
        self._notify: Callable[..., None] = lambda event, to=None: None
        self._wake: Callable[[], None] = lambda: None
        self._founding = Founding(sites or 1, find_quorum, refound)
        self._states = States(journal, store, clock, lambda event, to: self._notify(event, to))
        self._lost = LostPayloads(store)
        self._index = RecordIndex([])
        is_new = self.run_config is None
        self.room = Room(journal, store, self._states, clock, self._lock, is_new)
        self._ledger = self._opened() if self.run_config else None
        # By fragment and site: contributions whose payloads are still arriving, and the incarnation
        # that sends them.
        self._arriving: dict[tuple[int, str], tuple[Contribution, str]] = {}
        # The time at which the sites are next reminded why rounds stay open.
        self._remind_at = -math.inf
        self._call_at = clock()
        # By fragment: the last announced call.
        self._called: dict[int, Call] = {}
        self._averaging = threading.Lock()
        self.backup_folder: Path | None = None

    # Durable state

    def _opened(self) -> Ledger:
        """Reads the ledger from the journal."""
        assert self.run_config is not None, "the run has been founded"
        terms = self.terms
        notes = self.journal.notes
        base = self._base
        self._index = RecordIndex([position.round for position in base] or [0] * terms.fragments)
        ledger = Ledger(
            terms,
            self.run_config.key,
            self._clock(),
            (self._index.add(Record.from_bytes(text)) for _, text in self.journal.read()),
            (Contribution.from_bytes(text) for text in notes("open/").values()),
            [snapshot.header for snapshot in self._states.snapshots.values()],
            quorum=quorum_of(terms.quorum, self._find_quorum),
            evicted=[(name.split("/")[1], name.split("/")[2]) for name in notes("evicted/")],
            base=base,
        )
        if notes("ending"):
            ledger.end()
        self.room.follow(ledger, self._index)
        return ledger

    @property
    def _base(self) -> tuple[Position, ...]:
        """The positions at which the records start if the run was refounded."""
        text = self.journal.notes("base").get("base")
        return () if text is None else read(tuple[Position, ...], decoded(text, MOST_BYTES), "base")

    @property
    def terms(self) -> Terms:
        """The terms of the run, including amendments."""
        assert self.run_config is not None, "the run has been founded"
        text = self.journal.notes("terms").get("terms")
        if text is None:
            return self.run_config.terms
        terms: Terms = read(Terms, decoded(text, MOST_BYTES), "terms")
        return terms

    @property
    def _amended(self) -> Terms | None:
        if self.run_config is None or self.terms == self.run_config.terms:
            return None
        return self.terms

    def _missing(self, applied: Sequence[Position], kept_from: Sequence[int]) -> Iterator[bytes]:
        """Yields the records that a site lacks, one at a time, as fast as the site reads them."""
        # By fragment: the index of the first record that the site lacks.
        numbers = {}
        for fragment, position in enumerate(applied):
            known_round = position.round or RoundNumber(kept_from[fragment] - 1)
            number = self._index.next_number(fragment, known_round)
            if number is not None:
                numbers[fragment] = number
        if not numbers:
            return
        for seq, text in self.journal.read(min(numbers.values()) - 1):
            if seq >= numbers.get(Record.from_bytes(text).fragment, seq + 1):
                yield text

    def start(self, notify: Callable[..., None], wake: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self._wake = wake

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            raise Refused(
                f"run {self.run!r} has not been founded yet. Sites still missing:"
                f" {self._founding.missing}"
            )
        return self._ledger

    # Sites come and go

    def agree(self, site: str, run_config: RunConfig) -> RunConfig:
        """Receives a site's run config and returns the run config on which the run is founded."""
        with self._lock:
            return self.run_config or self._founding.propose(site, run_config)

    def hello(self, peer: Peer, about: Header) -> Iterable[Event]:
        if peer.role != "site":
            return ()
        hello = read(Hello, about.get("hello"), "hello")
        _require_own(peer, hello.site, hello.incarnation)
        if hello.run != self.run:
            raise Refused(f"this hub serves run {self.run!r}, not {hello.run!r}")
        with self._lock:
            run_config = self.run_config
            if run_config is None:
                if any(position.round for position in hello.applied) and not self._founding.again:
                    raise Refused(
                        f"this hub has no run yet, but {hello.site} has applied records of a run."
                        " Start the hub with that run's ledger, or with --refound if the ledger is"
                        " lost"
                    )
                self._founding.hello(hello, self._brought(hello.run_config))
                log.info(
                    "%s has connected to found the run. Sites still missing: %d",
                    hello.site,
                    self._founding.missing,
                )
                return [event_of(Waiting(self._ask_founder()))]
            if hello.run_config != run_config.key:
                self._brought(hello.run_config).require_same(run_config)
            return self._welcome(hello)

    def _brought(self, key: str) -> RunConfig:
        try:
            if self.store.size(key) > RunConfig.most_bytes:
                raise Malformed("the blob is too large for a run config.")
            return RunConfig.from_bytes(self.store.get(key))
        except Missing:
            raise Missing("a site must send its run config before its hello.") from None

    def _ask_founder(self) -> str:
        """Requests the state at round 0 from the founder once enough sites have joined. Returns the
        reason why sites are waiting.
        """
        if self._founding.missing:
            return (
                f"run {self.run!r} is being founded. Sites still missing: {self._founding.missing}"
            )
        if self._founding.again:
            self._found_again()
            return f"run {self.run!r} continues from the state of its sites"
        founder = self._founding.founder
        if not self._states.founds:
            self._states.ask_donor(founder, founding=True)
        return f"run {self.run!r} is being founded on the parameters of {founder}"

    def _found_again(self) -> None:
        """Continues the run from the position that most sites share. The ledger has no records, so
        a site must send a snapshot immediately.
        """
        founding = self._founding
        has_records = any(position.round for position in founding.base)
        if len(founding.base) != founding.run_config.terms.fragments or not has_records:
            raise Refused(
                "no site has applied records of this run. Found the run without --refound"
            )
        notes = {
            "run_config": founding.run_config.to_bytes(),
            "base": encoded(plain(founding.base)),
        }
        self.journal.note(notes)
        self.run_config = founding.run_config
        self._ledger = self._opened()
        log.warning(
            "run %s has been founded again, at rounds %s",
            self.run,
            [position.round for position in founding.base],
        )
        self._welcome_all()

    def _welcome_all(self) -> None:
        """Welcomes all founding sites."""
        for hello in self._founding.hellos.values():
            for event in self._welcome(hello):
                self._notify(event, [hello.site])

    def _welcome(self, hello: Hello) -> Iterator[Event]:
        now = self._clock()
        ledger = self.ledger
        conflict = ledger.conflict_of(hello, now)
        if conflict:
            raise Busy(conflict)
        is_new = not ledger.has_joined(hello)
        welcome = replace(
            ledger.hello(hello, now),
            rolled_back=bool(self.journal.notes("rolled_back")),
            terms=self._amended,
            founded_again=bool(self._base),
        )
        statistics = self.statistics[hello.site]
        statistics.heard_at = now
        statistics.incarnations += hello.incarnation != statistics.incarnation
        statistics.incarnation = hello.incarnation
        if is_new:
            log.info("%s has joined", hello.site)
        records = (Event("record", {}, text) for text in self._missing(hello.applied, welcome.kept))
        calls = [event_of(Called(call)) for call in ledger.calls()]
        first = [event_of(Welcomed(welcome, ledger.snapshots.best))]
        if is_new:
            first += self._schedule_of_others(hello.site, now)
        return itertools.chain(first, records, calls)

    def _schedule_of_others(self, site: str, now: float) -> Iterator[Event]:
        """Yields the inner learning rate and the inner steps of all other connected sites."""
        rates = []
        trained = []
        planned = []
        for name in set(self.ledger.present(now)) - {site}:
            rate = self.statistics[name].inner_lr
            steps = self.statistics[name].steps
            if rate is not None:
                rates.append(rate)
            if steps is not None:
                trained.append(steps.trained)
                if steps.planned is not None:
                    planned.append(steps.planned)
        if rates:
            yield event_of(InnerRate(median_low(rates)))
        if trained:
            bounds = None
            if len(planned) == len(trained):
                bounds = min(planned), max(planned)
            yield event_of(StepsOfOthers(median_low(trained), bounds))

    def heartbeat(self, peer: Peer, about: Header) -> None:
        if peer.role != "site":
            return
        heartbeat = read(Heartbeat, about.get("heartbeat"), "heartbeat")
        steps = read(StepCounts | None, about.get("steps"), "steps")
        _require_own(peer, heartbeat.site, heartbeat.incarnation)
        with self._lock:
            if self._ledger is None:
                return
            self._ledger.require_not_evicted(heartbeat.site, heartbeat.incarnation)
            member = self._ledger.members.get(heartbeat.site)
            followed = member is not None and member.follows
            try:
                self._ledger.heartbeat(heartbeat, self._clock())
            except Refused as error:
                raise HubError(str(error)) from None
            now = self._clock()
            statistics = self.statistics[heartbeat.site]
            statistics.heard_at = now
            statistics.trained_steps = heartbeat.trained_steps
            statistics.lost_steps = heartbeat.lost_steps
            statistics.inner_lr = heartbeat.inner_lr
            statistics.cosine = heartbeat.cosine / 100
            if heartbeat.against >= AGAINST > statistics.against:
                log.warning(
                    "%s's contributions point against the other sites: %s",
                    heartbeat.site,
                    AGAINST_OTHERS,
                )
            statistics.against = heartbeat.against
            statistics.steps = steps
            self.room.unnamed.renew(peer, now + self._ledger.terms.lease)
        if heartbeat.follows and not followed:
            self._wake()

    def is_present(self, site: str) -> bool:
        """Returns whether a site has a lease. Before the run is founded, every site counts as
        present.
        """
        with self._lock:
            return self._ledger is None or site in self._ledger.present(self._clock())

    def gone(self, peer: Peer) -> None:
        if peer.role != "site":
            return
        site = peer.name
        with self._lock:
            if self._ledger is None:
                was_member = self._founding.gone(site)
            else:
                was_member = self._ledger.leave(site, peer.incarnation, self._clock())
            if was_member:
                log.info("%s has left", site)
            for fragment, sender in list(self._arriving):
                if sender == site:
                    del self._arriving[fragment, sender]
            self._ask_others(gone=site)
        self._wake()

    # Blobs and contributions

    def admit(self, peer: Peer, about: Header, key: str, size: int) -> None:
        """Admits an incoming blob, which may be a run config, or a payload or state from a
        member.
        """
        kind = about.get("kind")
        if kind == "run_config":
            if size > RunConfig.most_bytes:
                raise Refused(
                    f"a run config of {size:,} bytes exceeds the limit of {RunConfig.most_bytes:,}."
                )
            with self._lock:
                self.room.keep_unnamed(key, peer)
            return
        if kind not in ("payload", "state"):
            raise Malformed("a blob must be a run config, a payload or a part of a state.")
        with self._lock:
            self._require_member(peer)
            limit = (self.run_config or self._founding.run_config).most_bytes_of(kind)
            if size > limit:
                raise Refused(
                    f"a {kind} of {size:,} bytes exceeds this run's limit of {limit:,} bytes."
                )
            began = self.statistics[peer.name].began
            if len(began) < _MOST_BEGUN:
                began.setdefault(key, self._clock())
            self._keep_arriving(key, kind, peer)

    def _keep_arriving(self, key: str, kind: str, sender: Peer) -> None:
        if kind == "state":
            self._states.note_sending(sender.name, key)
        else:
            self.room.keep_unnamed(key, sender)

    def lacks_room(self, peer: Peer, about: Header, error: NoSpace) -> None:
        """Handles a blob that the store has rejected because of a lack of space."""
        with self._lock:
            self.room.refuse(error)
            if about.get("kind") == "state":
                self._states.note_no_room(peer.name)

    def _require_member(self, peer: Peer) -> None:
        member: Member | Hello | None = self._founding.hellos.get(peer.name)
        if self._ledger:
            member = self._ledger.members.get(peer.name)
        if member is None or member.incarnation != peer.incarnation:
            if self._ledger:
                self._ledger.require_not_evicted(peer.name, peer.incarnation)
            raise Refused(f"{peer.name} has not said hello")

    def stored(self, peer: Peer, about: Header, key: str, size: int) -> Header:
        """Handles a blob that has been stored. Run configs are answered, and contributions and
        states that were waiting for the blob are processed.
        """
        if about.get("kind") == "run_config":
            return self._answer_run_config(peer, key)
        with self._lock:
            statistics = self.statistics[peer.name]
            now = self._clock()
            seconds = now - statistics.began.pop(key, now)
            statistics.bytes += size
            if seconds > 0:
                statistics.rate = size / seconds
            self._keep_arriving(key, str(about.get("kind")), peer)
            self.room.note_stored()
            for (_, site), (contribution, incarnation) in list(self._arriving.items()):
                if site != peer.name:
                    continue
                try:
                    self.contribute(contribution, incarnation)
                except Refused as error:
                    log.info("%s: %s", peer.name, error)
            self._hand_on()
        return {}

    def _answer_run_config(self, peer: Peer, key: str) -> Header:
        run_config = self.agree(peer.name, self._brought(key))
        with self._lock:
            self.room.keep_unnamed(run_config.key, peer)
        try:
            self.store.size(run_config.key)
        except Missing:
            self.store.put(run_config.to_bytes())
        answer: Header = {"run_config": run_config.key}
        amended = self._amended
        if amended:
            answer["terms"] = plain(amended)
        return answer

    def contribute(self, contribution: Contribution, incarnation: str) -> str:
        """Adds a contribution as soon as its payloads are in the store."""
        site = contribution.site
        fragment = contribution.fragment
        sender = Peer("site", site, incarnation)
        with self._lock:
            arriving = self._arriving.pop((fragment, site), None)
            if arriving is not None and arriving[0] != contribution:
                self.room.unnamed.discard(arriving[0].payloads, sender)
            answer = self.ledger.examine(contribution, incarnation)
            has_payloads = holds(self.store, contribution.payloads)
            if answer is Answer.LATE:
                self.statistics[site].late += not self.ledger.has_counted(contribution)
                if has_payloads:
                    self.ledger.contribute(contribution, incarnation, self._clock())
            if answer is not Answer.OPEN:
                self.room.unnamed.discard(contribution.payloads, sender)
                return answer.value
            if not contribution.payloads:
                raise Refused(
                    f"the contribution of {site} to round {contribution.round} of fragment"
                    f" {fragment} has no payloads"
                )
            self._require_size(contribution)
            if not has_payloads:
                self._arriving[fragment, site] = contribution, incarnation
                return "waiting"
            self.journal.note({f"open/{fragment:06d}/{site}": contribution.to_bytes()})
            self.room.unnamed.discard(contribution.payloads, sender)
            self.ledger.contribute(contribution, incarnation, self._clock())
            self._call(contribution)
        self._wake()
        return Answer.OPEN.value

    def _require_size(self, contribution: Contribution) -> None:
        """Raises Refused if the hub would have to average payloads that it cannot decode."""
        code = self.ledger.terms.hub_mean
        if code is None:
            return
        from lightning_sdiloco.federation.mean import has_sizes  # only such a hub needs numpy

        assert self.run_config is not None, "the run has been founded"
        if not has_sizes(contribution, self.run_config.sizes(contribution.fragment), code):
            raise Refused(
                f"the payloads of {contribution.site} do not have the sizes required for fragment"
                f" {contribution.fragment}"
            )

    # Calls

    def call(self, peer: Peer, name: str, about: Header, body: bytes) -> tuple[Header, bytes]:
        """Answers a call from a site or an operator. `keys.MAY` lists the roles that may make each
        call.
        """
        match name:
            case "hello":
                for event in self.hello(peer, about):
                    self._notify(event, [peer.name])
            case "contribute":
                contribution = Contribution.from_bytes(body)
                _require_own(peer, contribution.site)
                return {"answer": self.contribute(contribution, peer.incarnation)}, b""
            case "skip":
                call = Call.from_bytes(body)
                with self._lock:
                    self.ledger.skip(peer.name, peer.incarnation, call, self._clock())
                self._wake()
            case "state":
                return self._ask_for_state(peer, about), b""
            case "give":
                header = StateHeader.from_bytes(body)
                parts = read(Parts, about.get("parts"), "parts")
                self.give(peer.name, str(about.get("request")), header, parts)
            case "leave":
                self.gone(peer)
            case "status":
                return {}, json.dumps(self.status()).encode()
            case _:
                return self._operate(name, about), b""
        return {}, b""

    def _operate(self, name: str, about: Header) -> Header:
        match name:
            case "evict":
                self._evict(str(about.get("who")))
            case "end":
                self.end()
            case "backup":
                if self.backup_folder is None:
                    raise Refused(
                        "this hub was started without a backup folder (sdiloco hub --backups"
                        " FOLDER)"
                    )
                records = self.room.back_up(self.backup_folder)
                return {"records": records, "folder": str(self.backup_folder)}
            case "amend":
                return {"terms": plain(self.amend(about.get("terms")))}
            case "rollback":
                return {"records": self._roll_back(read(int, about.get("round"), "round"))}
            case _:
                raise Refused(f"this hub does not support the call {name}.")
        return {}

    # States

    def _ask_for_state(self, peer: Peer, about: Header) -> Header:
        """Obtains a state for a site. If the site lacks only payloads that are intact at the hub,
        the hub resends the corresponding records instead.
        """
        without = read(tuple[str, ...], about.get("without"), "without")
        lacked_rounds = read(tuple[RoundId, ...], about.get("lacks", []), "lacks")
        with self._lock:
            self._require_member(peer)
            records = [self._record_of(lacked) for lacked in lacked_rounds]
            refused = set(without).difference(self.statistics[peer.name].excluded)
            self.statistics[peer.name].excluded = without
            blobs = self._states.fetched_by(peer.name) if refused else []
        if refused:
            self._note_refused(peer.name, refused, self._lost.damaged_blobs(blobs))
        has_lost = False
        for record in records:
            # Reading the payloads takes a while, so the lock is not held.
            damaged = self._lost.damaged(record)
            with self._lock:
                if damaged:
                    has_lost = True
                    self._lost.note(record, damaged)
                else:
                    self._lost.forget(record)
                    self._notify(Event("record", {}, record.to_bytes()), [peer.name])
        if records and not has_lost:
            return {"records": True}
        with self._lock:
            need = Need(frozenset(without), lacked_rounds)
            self._states.ask(self.ledger, peer.name, need)
        return {}

    def _note_refused(
        self, site: str, sources: Iterable[str], damaged: Collection[Payload]
    ) -> None:
        """Registers that a site could not use the states from some sources."""
        why = "its log says why"
        if damaged:
            why = "blobs of it are gone from the store, or were altered there"
        with self._lock:
            for source in sources:
                self.statistics[site].refused_states += 1
                log.error("%s refuses the state of %s: %s", site, source, why)
            for header in self._states.damaged_snapshots(damaged):
                self.ledger.snapshots.drop(header)

    def _record_of(self, round_id: RoundId) -> Record:
        fragment, round = round_id
        number = None
        if fragment < self.ledger.terms.fragments:
            number = self._index.next_number(fragment, RoundNumber(round - 1))
        if number is None:
            raise Refused(f"round {round} of fragment {fragment} is not closed")
        _, text = next(self.journal.read(number - 1))
        return Record.from_bytes(text)

    def give(self, site: str, name: str, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Receives a state from a site and forwards the state once its blobs are in the store."""
        with self._lock:
            run_config = self.run_config or self._founding.run_config
            request = self._states.request(name, site)
            if request is None:
                raise Refused(f"this state of {site} is no longer needed")
            fragments = run_config.terms.fragments
            if not len(header.applied) == len(header.digests) == fragments:
                raise Refused(f"a state of this run must have {fragments} fragments")
            if request.founding and any(
                position != Position.start(run_config.key) for position in header.applied
            ):
                raise Refused("a run must be founded on a state at round 0")
            request.state = Snapshot(header, tuple(parts))
            self._hand_on()
        self._wake()

    def _hand_on(self) -> None:
        """Forwards complete states to the sites that need them."""
        for request, state in self._states.complete():
            if request.founding:
                self._found_run(state)
            if request.for_snapshot:
                self._states.keep(state, {})
                self._check_snapshot(state.header)
                log.info("%s has sent a state as a snapshot", request.donor)
            self._states.hand_on(request, state, self.ledger.terms.lease)

    def _found_run(self, state: Snapshot) -> None:
        run_config = self._founding.run_config
        self._states.keep(state, {"run_config": run_config.to_bytes()})
        self.run_config = run_config
        self._ledger = self._opened()
        log.info("run %s has been founded", self.run)
        self._welcome_all()

    def _check_snapshot(self, header: StateHeader) -> None:
        """Compares a new snapshot with the rounds that closed during its transfer."""
        snapshots = self.ledger.snapshots
        snapshots.add(header)
        for fragment, position in enumerate(header.applied):
            number = self._index.next_number(fragment, position.round)
            if number is not None:
                _, text = next(self.journal.read(number - 1))
                snapshots.check(Record.from_bytes(text))

    def _ask_others(self, gone: str | None = None) -> None:
        """Reassigns requests to other sites if the donor does not answer, has left, or no longer
        sends heartbeats.
        """
        if self._states.give_up(self._ledger, gone):
            self._ask_founder()

    # Calls from an operator

    def _evict(self, site: str) -> None:
        with self._lock:
            ledger = self.ledger
            member = ledger.members.get(site)
            has_contributed = any(site in round.contributions for round in ledger.open.values())
            if member is None and not has_contributed:
                raise Refused(
                    f"site {site!r} is not connected. Connected sites:"
                    f" {', '.join(sorted(ledger.members)) or 'none'}"
                )
            notes = dict[str, bytes | None]()
            if member:
                notes[f"evicted/{site}/{member.incarnation}"] = b""
            for name in self.journal.notes("open/"):
                if name.endswith(f"/{site}"):
                    notes[name] = None
            self.journal.note(notes)
            ledger.evict(site)
            log.warning("%s was evicted by an operator", site)
        self._wake()

    def end(self) -> None:
        """Ends the run and announces the rounds that sites should launch for, as described in
        [Note: the last round].
        """
        with self._lock:
            ledger = self.ledger
            self.journal.note({"ending": b"1"})
            ledger.end()
            log.warning(
                "an operator is ending the run. Open rounds will close, followed by the last round"
            )
            self._call()
        self._wake()

    def amend(self, changes: Json) -> Terms:
        """Amends the terms of the run durably and informs all sites."""
        with self._lock:
            ledger = self.ledger
            amendments = _amendments(changes)
            if any(map(ledger.has_ended, range(len(ledger.closed)))):
                raise Refused(
                    "the run or some of its fragments have ended, so the terms can no longer change"
                )
            try:
                terms = replace(ledger.terms, **amendments)
                quorum = quorum_of(terms.quorum, self._find_quorum)
            except ValueError as error:
                raise Refused(str(error)) from None
            self.journal.note({"terms": encoded(plain(terms))})
            ledger.amend(terms, quorum)
            log.warning("an operator has amended the terms of the run: %s", amendments)
            self._notify(event_of(Amended(terms)))
            self._call()  # the amendment may change which round is the last
        self._wake()
        return terms

    def _roll_back(self, round: RoundNumber) -> int:
        """Drops the first record after the given round and all subsequent records, and reloads the
        ledger.
        """
        with self._lock:
            fragments = range(len(self.ledger.closed))
            later = [self._index.next_number(fragment, round) for fragment in fragments]
            count = min(
                (number for number in later if number is not None), default=self._index.records
            )
            snapshots = self._states.snapshots_until(self._index.rounds_before(count))
            if not snapshots:
                raise Refused(
                    f"round={round} is too far back. The hub's oldest state is from round"
                    f" {self._states.oldest_round}. Choose that round or a later one."
                )
            notes: dict[str, bytes | None] = {}
            for name in self.journal.notes():
                if name.startswith(("snapshot/", "open/", "residual/")) and name not in snapshots:
                    notes[name] = None
            self.journal.cut(count, {**notes, "ending": None, "rolled_back": b"1"})
            self._states.snapshots = snapshots
            self._lost.clear()
            self.trouble = None
            ledger = self._opened()
            self._ledger = ledger
            # Sites must forget the dropped records before they receive the records that replace
            # them.
            welcome = Welcome(
                tuple(ledger.closed),
                ledger.kept_from,
                rolled_back=True,
                terms=self._amended,
                founded_again=bool(self._base),
            )
            self._notify(event_of(Welcomed(welcome, ledger.snapshots.best)))
            log.warning(
                "an operator has rolled the run back to round %d, with %d records remaining",
                round,
                count,
            )
        self._wake()
        return count

    # Status

    def status(self) -> Status:
        with self._lock:
            status: Status = {
                "run": self.run,
                "founded": self._ledger is not None,
                "trouble": self.trouble,
            }
            ledger = self._ledger
            if ledger is None:
                status["missing"] = self._founding.missing
                status["here"] = sorted(self._founding.hellos)
                return status
            run_config = None
            if self.run_config:
                run_config = self.run_config.summary() | {"terms": plain(self.terms)}
            snapshots = ledger.snapshots.headers
            now = self._clock()
            weights = Counter[str]()
            for history in ledger.history:
                for record in history:
                    for contribution in record.counted:
                        weights[contribution.site] += contribution.weight
            return status | {
                "lost_quorum": ledger.lost_quorum(now) is not None,
                "disk": {"still_needs": self.room.still_needs, "free": self.store.free},
                "run_config": run_config,
                "records": ledger.seq,
                "sites": {
                    site: self._site_status(ledger, site, now, weights)
                    for site in sorted({*ledger.members, *self.statistics})
                },
                "fragments": [
                    _fragment_status(ledger, fragment, now)
                    for fragment in range(len(ledger.closed))
                ],
                "snapshots": [_rounds_of(header.applied) for header in snapshots],
            }

    def _site_status(self, ledger: Ledger, site: str, now: float, weights: Counter[str]) -> Status:
        member = ledger.members.get(site)
        statistics = self.statistics.get(site)
        last_heartbeat = None
        if statistics is not None:
            last_heartbeat = round(now - statistics.heard_at, 3)
        statistics = statistics or SiteStatistics()
        steps = statistics.steps
        return {
            "state": _state_of(ledger, site, now),
            "incarnation": member.incarnation if member else None,
            "last_heartbeat": last_heartbeat,
            "rounds_behind": ledger.behind(site) if member else None,
            "share": round(weights[site] / (weights.total() or 1), 4),
            "late": statistics.late,
            "lost_steps": round(statistics.lost_steps / len(ledger.closed), 1),
            "lost_share": round(statistics.lost_steps / (statistics.trained_steps or 1), 4),
            "inner_lr": statistics.inner_lr,
            "inner_steps": steps and steps.trained,
            "planned_steps": steps and steps.planned,
            "cosine": statistics.cosine,
            "against": statistics.against,
            "not_finite": statistics.not_finite,
            "too_long": statistics.too_long,
            "wrong_buffers": statistics.wrong_buffers,
            "refused_states": statistics.refused_states,
            "incarnations": statistics.incarnations,
            "bytes": statistics.bytes,
            "bytes_per_second": round(statistics.rate),
        }

    # The clock

    def resumed(self, seconds: float) -> None:
        """Extends the leases of all sites if the hub's process was paused for a long time."""
        with self._lock:
            if self._ledger and seconds > self._ledger.terms.lease / 2:
                log.warning(
                    "the hub was paused for %.0f s and waits another lease for the sites that were"
                    " connected",
                    seconds,
                )
                self._ledger.resume(self._clock())

    def tick(self) -> float:
        """Closes due rounds and maintains states, snapshots and the store."""
        seconds = self._tick()
        self._average()
        return seconds

    def _tick(self) -> float:
        with self._lock:
            now = self._clock()
            self._ask_others()
            before = self.trouble
            self.trouble = self._close_due(now) or self._lasting_trouble(now)
            self._announce_trouble(before, now)
            if before and not self.trouble:
                log.warning("rounds can close again, because this problem is resolved: %s", before)
            ledger = self._ledger
            if ledger is None:
                return _AGAIN
            self.room.ask_for_snapshot()
            if now >= self._call_at:
                # A site that has missed its call receives the call again while the round is open.
                self._call_at = now + _AGAIN
                self._called.clear()
                self._call()
            self.room.tidy()
            return _AGAIN if self.trouble else max(0.0, min(_AGAIN, ledger.next_due(now) - now))

    def _lasting_trouble(self, now: float) -> str | None:
        """Returns the most important lasting problem, such as a lack of space, lost payloads,
        missing sites, or sites with more records than this hub.
        """
        if self._ledger is None:
            return self.room.trouble
        self._lost.forget_unneeded(self._ledger, now)
        # A mean that did not fit in the store is still waiting for space.
        waiting_for_room = self.trouble if self._ledger.closing else None
        return (
            self.room.trouble
            or waiting_for_room
            or self._lost.trouble(self._ledger, now)
            or self._ledger.lost_quorum(now)
            or self._older_than_sites(now)
        )

    def _older_than_sites(self, now: float) -> str | None:
        advice = self.ledger.older_than_sites(now)
        # After a rollback, this is intended.
        return None if advice and self.journal.notes("rolled_back") else advice

    def _close_due(self, now: float) -> str | None:
        """Forwards complete states and closes due rounds. If this fails, returns the reason."""
        try:
            self._hand_on()
            if self._ledger:
                for record in self._ledger.due(now):
                    if self._ledger.terms.hub_mean is None:
                        self._close(record)
                    else:
                        self._ledger.closing[record.fragment] = record
                self.room.drop_snapshots()
        except (AgreementError, NoSpace) as error:
            return str(error)
        return None

    def _announce_trouble(self, before: str | None, now: float) -> None:
        """Logs the reason why rounds stay open and sends it to the sites. Sites are informed once
        per lease, because new sites may have joined.
        """
        is_new = self.trouble != before
        if self.trouble and is_new:
            log.error("%s", self.trouble)
        if self._ledger and self.trouble and (is_new or now >= self._remind_at):
            self._remind_at = now + self._ledger.terms.lease
            self._notify(event_of(Waiting(self.trouble)))

    def _close(self, record: Record, notes: Mapping[str, bytes | None] | None = None) -> None:
        """Stores a record durably and then announces it."""
        text = record.to_bytes()
        dropped = dict.fromkeys(self.journal.notes(f"open/{record.fragment:06d}/"))
        self.journal.append(record.seq, text, dropped | dict(notes or {}))
        self.ledger.append(self._index.add(record))
        for left_out in record.left_out:
            self.statistics[left_out.site].count(record, left_out)
        self._notify(Event("record", {}, text))
        self._call()
        if record.final and all(map(self.ledger.has_ended, range(len(self.ledger.closed)))):
            log.info("run %s has ended", self.run)

    def _average(self) -> None:
        """Averages closing rounds one at a time. The lock is not held during averaging, so the run
        continues in the meantime.
        """
        if self._ledger is None or not self._ledger.closing:
            return
        if not self._averaging.acquire(blocking=False):
            return
        try:
            with self._lock:
                closing = list(self.ledger.closing.values())
                residuals = self.journal.notes("residual/")
            for record in closing:
                name = f"residual/{record.fragment:06d}"
                self._close_with_mean(record, name, residuals.get(name, b"").decode())
        except NoSpace as error:
            with self._lock:
                before = self.trouble
                self.trouble = str(error)
                self._announce_trouble(before, self._clock())
        finally:
            self._averaging.release()

    def _close_with_mean(self, record: Record, note: str, old_key: str) -> None:
        """Averages and closes a round. Also updates the note that contains the key of the residual
        in the store.
        """
        from lightning_sdiloco.federation.mean import averaged  # only such a hub needs numpy

        code = self.ledger.terms.hub_mean
        assert code is not None, "a record waits for its mean only with hub_mean"
        assert self.run_config is not None, "the run has been founded"
        sizes = self.run_config.sizes(record.fragment)
        old_residual = self.store.get(old_key) if old_key else None
        payload, residual = averaged(record, self.store.get, sizes, code, old_residual)
        mean = Payload(self.store.put(payload), len(payload))
        new_key = "" if residual is None else self.store.put(residual)
        with self._lock:
            if self.ledger.closing.get(record.fragment) is not record:
                return
            record = replace(record, seq=self.ledger.seq, mean=mean)
            self._close(record, {note: new_key.encode() or None})
            # The old residual is as large as a fragment in float32 and no longer needed.
            if old_key and old_key != new_key:
                self.room.drop(old_key)

    def _call(self, contribution: Contribution | None = None) -> None:
        """Announces the rounds that sites should launch for. Each round is announced only once. A
        contribution with large payloads is announced early so that sites can fetch the payloads
        before the contribution counts.
        """
        if contribution:
            is_small = all(payload.size <= CHUNK for payload in contribution.payloads)
            if is_small or self.ledger.terms.hub_mean:
                contribution = None
        for call in self.ledger.calls():
            early = None
            if contribution and contribution.fragment == call.fragment:
                early = contribution
            if early or self._called.get(call.fragment) != call:
                self._called[call.fragment] = call
                self._notify(event_of(Called(call, early)))


def _founded_run_config(
    run: str, journal: SQLiteLedger, sites: int | None, refound: bool
) -> RunConfig | None:
    """Returns the run config from the journal, or None if the run has not been founded yet."""
    text = journal.notes("run_config").get("run_config")
    if not text:
        if sites is None:
            raise ValueError(
                f"The ledger does not contain run {run!r} yet. Set the number of founding sites"
                " (sites) or use that run's ledger."
            )
        return None
    run_config = RunConfig.from_bytes(text)
    if refound:
        raise ValueError(
            "The ledger already contains this run. Start the hub without --refound, or use the path"
            " of a new ledger."
        )
    if run_config.run != run:
        raise ValueError(
            f"This ledger has run={run_config.run!r}, not {run!r}. Use the ledger's run or a"
            " different ledger."
        )
    return run_config


def _amendments(changes: object) -> dict[str, Json]:
    """Validates and returns an operator's changes to the terms."""
    if not isinstance(changes, dict):
        raise Malformed("the terms are not a JSON object.")
    unknown = sorted(map(str, changes.keys() - _TERMS.keys()))
    if unknown:
        raise Malformed(
            f"the term {unknown[0]!r} cannot be amended. Amendable terms are"
            f" {', '.join(AMENDABLE)}."
        )
    return {name: read(_TERMS[name], value, name) for name, value in changes.items()}


def _rounds_of(positions: Iterable[Position]) -> list[int]:
    return [position.round for position in positions]


def _fragment_status(ledger: Ledger, fragment: int, now: float) -> Status:
    opened = ledger.open.get(fragment)
    contributors = list[str]()
    missing = list[str]()
    if opened:
        contributors = sorted(opened.contributions)
        missing = [site for site in ledger.present(now) if site not in opened.arrived]
    return {
        "round": ledger.closed[fragment].round,
        "open": opened is not None,
        "here": contributors,
        "missing": missing,
        "ended": ledger.has_ended(fragment),
    }


def _state_of(ledger: Ledger, site: str, now: float) -> str:
    member = ledger.members.get(site)
    if member is None:
        return "gone"
    if member.until <= now:
        return "silent"
    if not member.connected:
        return "expected"
    return "follows" if ledger.can_contribute(site) else "joining"


def _require_own(peer: Peer, site: str, incarnation: str | None = None) -> None:
    if site != peer.name or incarnation not in (None, peer.incarnation):
        raise Refused(f"site {peer.name!r} may act only for itself and its current incarnation.")
