"""The coordinator: a run at its hub. It asks the rules, makes durable what they say, then informs
the sites.

What arrives comes with a `Peer`, whose right to call has been looked at before.

[Note: what lies where] Records and notes lie in a journal, which takes several of them at once or
none. Payloads and states are blobs in a store. A blob is durable before a record or a note names
it, and is dropped when none does.

[Note: one at a time] All that happens to a run happens under one lock, the times in between belong
to transfers of blobs. See [Note: durable before visible] in `federation/ledger.py` for the order,
which every method here keeps.
"""

import itertools
import json
import logging
import secrets
import threading
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from lightning_sdiloco.errors import AgreementError, Malformed, Refused
from lightning_sdiloco.federation.codec import decoded, encoded, plain, read
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.ledger import Answer, Founding, Ledger
from lightning_sdiloco.federation.messages import (
    MOST_BYTES,
    Amended,
    Call,
    Called,
    Contribution,
    Event,
    Heartbeat,
    Hello,
    Parts,
    Payload,
    Position,
    Record,
    Snapshot,
    StateHeader,
    StateOffered,
    StateWanted,
    Waiting,
    Welcomed,
    event_of,
)
from lightning_sdiloco.federation.quorum import built_in, quorum_of
from lightning_sdiloco.federation.run_config import (
    AMENDABLE,
    RETENTION,
    SNAPSHOT_EVERY,
    RunConfig,
    Terms,
)
from lightning_sdiloco.federation.store import BlobStore, InMemoryStore, SQLiteLedger, sync_folder
from lightning_sdiloco.federation.wire import CHUNK, Busy, Header, HubError, Missing, NoSpace

log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds after which something is tried again that did not succeed
_TIDY_EVERY = 60.0
_MOST_BEGUN = 128  # blobs of a site whose beginning is remembered

# seconds after which another site is asked for a state that the first has not begun to send
_PATIENCE = 60.0
# seconds that it may take to send a state, and for which one that was handed on can be fetched
_SENDING = 3600.0
_SNAPSHOT = "the snapshot"  # the source of a state that the hub itself has kept

_TERMS = {
    name: hint
    for name, hint in get_type_hints(Terms, include_extras=True).items()
    if name in AMENDABLE
}

Status = dict[str, Any]


@dataclass
class StateRequest:
    """A state that was asked for. One answer serves all who asked the same donor meanwhile."""

    name: str
    donor: str
    until: float
    askers: dict[str, frozenset[str]] = field(default_factory=dict)
    for_snapshot: bool = False
    founding: bool = False
    given: tuple[StateHeader, tuple[Payload, ...]] | None = None


@dataclass
class SiteStatistics:
    heard_at: float = 0.0
    incarnation: str = ""
    incarnations: int = 0
    late: int = 0
    not_finite: int = 0
    too_long: int = 0
    bytes: int = 0
    rate: float = 0.0
    began: dict[str, float] = field(default_factory=dict)


class Coordinator:
    """Serves one run. All methods may be called from several threads."""

    def __init__(
        self,
        run: str,
        journal: SQLiteLedger,
        store: BlobStore | InMemoryStore,
        sites: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        find_quorum: Callable[[str], type[Any]] = built_in,
        refound: bool = False,
    ) -> None:
        text = journal.notes("run_config").get("run_config")
        self.run_config = RunConfig.from_bytes(text) if text else None
        if self.run_config is None and sites is None:
            raise ValueError(
                f"The ledger has no run {run!r} yet. Say how many sites found it (sites), or"
                " give that run's ledger."
            )
        if self.run_config is not None and refound:
            raise ValueError(
                "The ledger has this run: start the hub without --refound, or give the path of a"
                " new ledger."
            )
        if self.run_config is not None and self.run_config.run != run:
            raise ValueError(
                f"This ledger has run={self.run_config.run!r}, not {run!r}. Give that run, or"
                " another ledger."
            )
        self.run = run
        self.journal = journal
        self.store = store
        self.statistics: defaultdict[str, SiteStatistics] = defaultdict(SiteStatistics)
        self.trouble: str | None = None
        self._clock = clock
        self._find_quorum = find_quorum
        self._lock = threading.RLock()
        self._tell: Callable[..., None] = lambda event, to=None: None
        self._wake: Callable[[], None] = lambda: None
        self._founding = Founding(sites or 1, find_quorum, refound)
        self._snapshots: dict[str, Snapshot] = {}
        for name, text in journal.notes("snapshot/").items():
            self._snapshots[name] = read(Snapshot, decoded(text, MOST_BYTES), "snapshot")
        # The numbers of each fragment's records, and the keys of the payloads that they name.
        self._numbers: list[array[int]] = []
        self._named: list[deque[tuple[int, tuple[str, ...]]]] = []
        self._ledger = self._opened() if self.run_config else None
        self._arriving: dict[tuple[int, str], tuple[Contribution, str]] = {}
        self._tidy_at = clock() + _TIDY_EVERY
        self._requests: dict[str, StateRequest] = {}
        self._handed: list[tuple[float, tuple[Payload, ...]]] = []
        self._snapshot_at = self._call_at = clock()
        self._called: dict[int, Call] = {}
        self._backing_up: set[str] = set()
        self._copying = threading.Lock()
        self._averaging = threading.Lock()
        self.backup_folder: Path | None = None

    # Durable state

    def _opened(self) -> Ledger:
        assert self.run_config is not None, "the run has been founded"
        terms = self.terms
        notes = self.journal.notes
        self._numbers = [array("q") for _ in range(terms.fragments)]
        self._named = [deque() for _ in range(terms.fragments)]
        ledger = Ledger(
            terms,
            self.run_config.key,
            self._clock(),
            (self._indexed(Record.from_bytes(text)) for _, text in self.journal.read()),
            (Contribution.from_bytes(text) for text in notes("open/").values()),
            [own.header for own in self._snapshots.values()],
            quorum=quorum_of(terms.quorum, self._find_quorum),
            evicted=[(name.split("/")[1], name.split("/")[2]) for name in notes("evicted/")],
            base=self._base,
        )
        if notes("ending"):
            ledger.end()
        return ledger

    @property
    def _base(self) -> tuple[Position, ...]:
        """Where the records begin, if the run was founded again."""
        text = self.journal.notes("base").get("base")
        return () if text is None else read(tuple[Position, ...], decoded(text, MOST_BYTES), "base")

    @property
    def terms(self) -> Terms:
        """The terms of the run, as they were founded or amended."""
        assert self.run_config is not None, "the run has been founded"
        text = self.journal.notes("terms").get("terms")
        return (
            self.run_config.terms
            if text is None
            else read(Terms, decoded(text, MOST_BYTES), "terms")
        )

    @property
    def _amended(self) -> Terms | None:
        return (
            None if self.run_config is None or self.terms == self.run_config.terms else self.terms
        )

    def _indexed(self, record: Record) -> Record:
        self._numbers[record.fragment].append(record.seq)
        keys = tuple(payload.key for payloads in record.sources for payload in payloads)
        self._named[record.fragment].append((record.round, keys))
        return record

    def holds(self, parts: Sequence[Payload]) -> bool:
        try:
            return all(self.store.size(part.key) == part.size for part in parts)
        except Missing:
            return False

    def _missing(self, applied: Sequence[Position], kept: Sequence[int]) -> Iterator[bytes]:
        """Yields the records that a site lacks, one by one, as fast as it takes them."""
        base = [at.round for at in self.ledger.base]
        first = [
            max(at.round, 0 if at.round else kept[p] - 1, base[p]) - base[p]
            for p, at in enumerate(applied)
        ]
        # The number of the first record of each fragment that is lacking.
        numbers = {p: own[first[p]] for p, own in enumerate(self._numbers) if first[p] < len(own)}
        for seq, text in self.journal.read(min(numbers.values()) - 1) if numbers else ():
            if seq >= numbers.get(Record.from_bytes(text).fragment, seq + 1):
                yield text

    def _needed(self, kept: Sequence[int]) -> set[str]:
        self._handed = [own for own in self._handed if own[0] > self._clock()]
        given = [request.given[1] for request in self._requests.values() if request.given]
        states = [
            *given,
            *(parts for _, parts in self._handed),
            *(own.parts for own in self._snapshots.values()),
        ]
        needed = {part.key for parts in states for part in parts}
        for named, first in zip(self._named, kept, strict=True):
            while named and named[0][0] < first:
                named.popleft()
            needed.update(key for _, keys in named for key in keys)
        for text in self.journal.notes("open/").values():
            needed.update(payload.key for payload in Contribution.from_bytes(text).payloads)
        needed.update(text.decode() for text in self.journal.notes("residual/").values())
        return needed | self._backing_up

    def back_up(self, folder: Path) -> int:
        """Copies ledger and blobs into a folder, from which a hub can be started; returns how many
        records it holds.

        It copies the run at one moment, while it goes on. An incomplete copy replaces none.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy = BlobStore(folder / "hub.store")
        ledger = folder / "hub.sqlite"
        assert isinstance(self.store, BlobStore), "what is in memory alone needs no copy"
        with self._copying:
            with self._lock:
                records = self.ledger.seq
                named = self._needed(self.ledger.kept)
                self._backing_up = named
                self.journal.back_up(folder / "next.sqlite")
            try:
                for key in named:
                    try:
                        copy.size(key)
                    except Missing:
                        copy.copy(self.store, key)
            finally:
                self._backing_up = set()
            (folder / "next.sqlite").replace(ledger)
            sync_folder(folder)
            copy.retain(named, age=0.0)
        log.info("a copy of the run is in %s, with %d records", folder, records)
        return records

    def start(self, tell: Callable[..., None], wake: Callable[[], None] = lambda: None) -> None:
        self._tell = tell
        self._wake = wake

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            raise Refused(
                f"run {self.run!r} has not been founded yet: {self._founding.missing} more sites"
                " are needed"
            )
        return self._ledger

    # Sites come and go

    def agree(self, site: str, run_config: RunConfig) -> RunConfig:
        """Takes the run config that a site brings; returns the run's."""
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
                if any(at.round for at in hello.applied) and not self._founding.again:
                    raise Refused(
                        f"this hub has no run yet, but {hello.site} has applied records of one:"
                        " start the hub with that"
                        " run's ledger, or with --refound if it is lost"
                    )
                self._founding.hello(hello, self._brought(hello.run_config))
                log.info(
                    "%s is here to found the run; sites still missing: %d",
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
                raise Malformed("this is too large for a run config.")
            return RunConfig.from_bytes(self.store.get(key))
        except Missing:
            raise Missing("a site must send its run config before it says hello.") from None

    def _ask_founder(self) -> str:
        """Asks a site for the state at round 0, if there are enough; returns what is waited for."""
        if self._founding.missing:
            return (
                f"run {self.run!r} is being founded: {self._founding.missing} more sites are needed"
            )
        if self._founding.again:
            self._found_again()
            return f"run {self.run!r} continues from what its sites hold"
        founder = self._founding.founder
        if not any(request.founding for request in self._requests.values()):
            self._ask_donor(founder, founding=True)
        return f"run {self.run!r} is being founded on the parameters of {founder}"

    def _found_again(self) -> None:
        """Goes on where most of the sites are. There are no records, and a site leaves a snapshot
        at once.
        """
        founding = self._founding
        if len(founding.base) != founding.run_config.terms.fragments or not any(
            at.round for at in founding.base
        ):
            raise Refused("no site has applied records of this run: found it without --refound")
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
            [at.round for at in founding.base],
        )
        for hello in founding.hellos.values():
            for event in self._welcome(hello):
                self._tell(event, [hello.site])

    def _welcome(self, hello: Hello) -> Iterator[Event]:
        now = self._clock()
        ledger = self.ledger
        member = ledger.members.get(hello.site)
        if (
            member
            and member.connected
            and member.incarnation != hello.incarnation
            and member.until > now
        ):
            raise Busy(
                f"the name {hello.site} is in use by a running process: stop it first, or wait"
                f" {member.until - now:.1f}"
                " s if it is dead"
            )
        is_new = not (member and member.connected and member.incarnation == hello.incarnation)
        rolled_back = bool(self.journal.notes("rolled_back"))
        welcome = replace(
            ledger.hello(hello, now),
            rolled_back=rolled_back,
            terms=self._amended,
            founded_again=bool(self._base),
        )
        counted = self.statistics[hello.site]
        counted.heard_at = now
        counted.incarnations = counted.incarnations + (hello.incarnation != counted.incarnation)
        counted.incarnation = hello.incarnation
        if is_new:
            log.info("%s has joined", hello.site)
        records = (Event("record", {}, text) for text in self._missing(hello.applied, welcome.kept))
        calls = [event_of(Called(call)) for call in ledger.calls()]
        return itertools.chain([event_of(Welcomed(welcome, ledger.snapshots.best))], records, calls)

    def heartbeat(self, peer: Peer, about: Header) -> None:
        if peer.role != "site":
            return
        heartbeat = read(Heartbeat, about.get("heartbeat"), "heartbeat")
        _require_own(peer, heartbeat.site, heartbeat.incarnation)
        with self._lock:
            if self._ledger is None:
                return
            if (heartbeat.site, heartbeat.incarnation) in self._ledger.evicted:
                raise Refused(f"{heartbeat.site} was evicted from the run: ask its operator")
            member = self._ledger.members.get(heartbeat.site)
            followed = member is not None and member.follows
            try:
                self._ledger.heartbeat(heartbeat, self._clock())
            except Refused as error:
                raise HubError(str(error)) from None
            self.statistics[heartbeat.site].heard_at = self._clock()
        if heartbeat.follows and not followed:
            self._wake()

    def gone(self, peer: Peer) -> None:
        if peer.role != "site":
            return
        site = peer.name
        with self._lock:
            is_founding = self._ledger is None
            if (
                self._founding.gone(site)
                if is_founding
                else self.ledger.leave(site, peer.incarnation)
            ):
                log.info("%s has left", site)
            self._arriving = {
                place: own for place, own in self._arriving.items() if place[1] != site
            }
            self._ask_others(gone=site)
        self._wake()

    # What they send

    def admit(self, peer: Peer, about: Header, key: str, size: int) -> None:
        """Takes run configs of some size, and of a site that is there payloads and states."""
        kind = about.get("kind")
        if kind == "run_config":
            if size > RunConfig.most_bytes:
                raise Refused(
                    f"a run config of {size:,} bytes is too large: the limit is"
                    f" {RunConfig.most_bytes:,}."
                )
            return
        if kind not in ("payload", "state"):
            raise Malformed("a blob is a run config, a payload or a part of a state.")
        with self._lock:
            self._require_here(peer)
            most = (self.run_config or self._founding.run_config).most_bytes_of(kind)
            if size > most:
                raise Refused(
                    f"a {kind} of {size:,} bytes is too large for this run: the limit is {most:,}."
                )
            began = self.statistics[peer.name].began
            if len(began) < _MOST_BEGUN:
                began.setdefault(key, self._clock())
            for request in self._requests.values() if kind == "state" else ():
                if request.donor == peer.name:
                    request.until = max(request.until, self._clock() + _SENDING)

    def _require_here(self, peer: Peer) -> None:
        member = (
            self._ledger.members.get(peer.name)
            if self._ledger
            else self._founding.hellos.get(peer.name)
        )
        if member is None or member.incarnation != peer.incarnation:
            raise Refused(f"{peer.name} has not said hello")

    def stored(self, peer: Peer, about: Header, key: str, size: int) -> Header:
        """Notes that a blob is in the store: a run config is answered, and what waited for blobs
        continues.
        """
        if about.get("kind") == "run_config":
            run_config = self.agree(peer.name, self._brought(key))
            try:
                self.store.size(run_config.key)
            except Missing:
                self.store.put(run_config.to_bytes())
            amended = self._amended
            return {"run_config": run_config.key} | ({"terms": plain(amended)} if amended else {})
        with self._lock:
            counted = self.statistics[peer.name]
            now = self._clock()
            seconds = now - counted.began.pop(key, now)
            counted.bytes += size
            counted.rate = size / seconds if seconds > 0 else counted.rate
            for own, incarnation in [
                own for place, own in self._arriving.items() if place[1] == peer.name
            ]:
                try:
                    self.contribute(own, incarnation)
                except Refused as error:
                    log.info("%s: %s", peer.name, error)
            self._hand_on()
        return {}

    def contribute(self, own: Contribution, incarnation: str) -> str:
        """Takes a contribution, when its payloads are in the store."""
        with self._lock:
            self._arriving.pop((own.fragment, own.site), None)
            answer = self.ledger.examine(own, incarnation)
            is_here = self.holds(own.payloads)
            if answer is Answer.LATE:
                self.statistics[own.site].late += 1
                if is_here:
                    self.ledger.contribute(own, incarnation, self._clock())
            if answer is not Answer.OPEN:
                return answer.value
            if not own.payloads:
                raise Refused(
                    f"{own.site} contributes nothing to round {own.round} of fragment"
                    f" {own.fragment}"
                )
            self._require_size(own)
            if not is_here:
                self._arriving[own.fragment, own.site] = own, incarnation
                return "waiting"
            self.journal.note({f"open/{own.fragment:06d}/{own.site}": own.to_bytes()})
            self.ledger.contribute(own, incarnation, self._clock())
            self._call(own)
        self._wake()
        return Answer.OPEN.value

    def _require_size(self, own: Contribution) -> None:
        """Refuses payloads that the hub could not read, where it is the hub that reads them."""
        code = self.ledger.terms.hub_mean
        if code is None:
            return
        from lightning_sdiloco.federation.mean import has_sizes  # only who chose it needs numpy

        assert self.run_config is not None, "the run has been founded"
        if not has_sizes(own, self.run_config.sizes(own.fragment), code):
            raise Refused(
                f"payloads of {own.site} do not have the sizes of fragment {own.fragment}"
            )

    def call(self, peer: Peer, name: str, about: Header, body: bytes) -> tuple[Header, bytes]:
        site = peer.name
        match name:
            case "hello":
                for event in self.hello(peer, about):
                    self._tell(event, [site])
            case "contribute":
                own = Contribution.from_bytes(body)
                _require_own(peer, own.site)
                return {"answer": self.contribute(own, peer.incarnation)}, b""
            case "skip":
                call = Call.from_bytes(body)
                with self._lock:
                    self.ledger.skip(site, peer.incarnation, call, self._clock())
                self._wake()
            case "state":
                without = read(tuple[str, ...], about.get("without"), "without")
                with self._lock:
                    self._require_here(peer)
                    self._ask(site, without)
            case "give":
                header = StateHeader.from_bytes(body)
                parts = read(Parts, about.get("parts"), "parts")
                self.give(site, str(about.get("request")), header, parts)
            case "leave":
                self.gone(peer)
            case "status":
                return {}, json.dumps(self.status()).encode()
            case "evict":
                self._evict(str(about.get("who")))
            case "end":
                self.end()
            case "backup":
                if self.backup_folder is None:
                    raise Refused(
                        "this hub was started without a folder for copies (sdiloco hub --backups"
                        " FOLDER)"
                    )
                return {
                    "records": self.back_up(self.backup_folder),
                    "folder": str(self.backup_folder),
                }, b""
            case "amend":
                return {"terms": plain(self.amend(about.get("terms")))}, b""
            case "rollback":
                return {"records": self._roll_back(read(int, about.get("round"), "round"))}, b""
            case _:
                raise Refused(f"this hub does not know {name}.")
        return {}, b""

    # States

    def _ask(self, site: str, without: Collection[str]) -> None:
        """Gets a state for a site: from a donor, which is asked, or from the snapshot."""
        if any(site in request.askers for request in self._requests.values()):
            return
        open_to_all = (one for one in self._requests.values() if not one.founding and not one.given)
        request = next((one for one in open_to_all if one.donor not in {site, *without}), None)
        source = None if request else self.ledger.source(site, self._clock(), without)
        if isinstance(source, str):
            request = self._ask_donor(source)
        if request:
            request.askers[site] = frozenset(without)
        elif isinstance(source, StateHeader) and _SNAPSHOT not in without:
            parts = next(own.parts for own in self._snapshots.values() if own.header == source)
            self._tell(event_of(StateOffered(_SNAPSHOT, source, parts)), [site])
        else:
            log.warning(
                "%s needs a state, but no site has one: waiting for a site that comes back with"
                " one",
                site,
            )
            why = "no site has a state: waiting for one that comes back with it"
            self._tell(event_of(Waiting(why)), [site])

    def _ask_donor(self, donor: str, founding: bool = False) -> StateRequest:
        request = StateRequest(
            secrets.token_hex(8), donor, self._clock() + _PATIENCE, founding=founding
        )
        self._requests[request.name] = request
        self._tell(event_of(StateWanted(request.name, founding)), [donor])
        return request

    def give(self, site: str, name: str, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Takes the state that a site gives, and hands it on when its blobs are in the store."""
        with self._lock:
            request = self._requests.get(name)
            run_config = self.run_config or self._founding.run_config
            if request is None or request.donor != site:
                raise Refused(f"this state of {site} is no longer wanted")
            fragments = run_config.terms.fragments
            if not len(header.applied) == len(header.digests) == fragments:
                raise Refused(f"a state of this run has {fragments} fragments")
            if request.founding and any(at != Position(0, run_config.key) for at in header.applied):
                raise Refused("a run is founded on a state at round 0")
            request.given = header, tuple(parts)
            self._hand_on()
        self._wake()

    def _hand_on(self) -> None:
        """Hands given states, once all blobs are in the store, to the sites that wanted them."""
        for request in [
            one for one in self._requests.values() if one.given and self.holds(one.given[1])
        ]:
            assert request.given is not None, "the request is complete"
            header, parts = request.given
            if request.founding:
                self._snapshot(header, parts, {"run_config": self._founding.run_config.to_bytes()})
                self.run_config = self._founding.run_config
                self._ledger = self._opened()
                log.info("run %s has been founded", self.run)
                for hello in self._founding.hellos.values():
                    for event in self._welcome(hello):
                        self._tell(event, [hello.site])
            if request.for_snapshot:
                self._snapshot(header, parts, {})
                self.ledger.snapshots.add(header)
                # While it was sent, rounds have closed.
                for fragment, (at, base) in enumerate(
                    zip(header.applied, self.ledger.base, strict=True)
                ):
                    for seq in self._numbers[fragment][at.round - base.round :][:1]:
                        self.ledger.snapshots.check(
                            Record.from_bytes(next(self.journal.read(seq - 1))[1])
                        )
                log.info("%s has left a state as a snapshot", request.donor)
            del self._requests[request.name]
            if request.askers:
                self._handed.append((self._clock() + _SENDING, parts))
                self._tell(
                    event_of(StateOffered(request.donor, header, parts)), list(request.askers)
                )

    def _snapshot(
        self, header: StateHeader, parts: tuple[Payload, ...], notes: Mapping[str, bytes]
    ) -> None:
        number = 1 + max((int(name.partition("/")[2]) for name in self._snapshots), default=-1)
        name = f"snapshot/{number:06d}"
        snapshot = Snapshot(header, parts)
        self.journal.note({**notes, name: encoded(plain(snapshot))})
        self._snapshots[name] = snapshot

    def _ask_others(self, gone: str | None = None) -> None:
        """Asks another site if a donor does not answer, or has gone, or sends no heartbeat."""
        ledger = self._ledger
        now = self._clock()
        founds = False
        silent = (
            {site for site, own in ledger.members.items() if own.until <= now} if ledger else ()
        )
        for request in [
            own
            for own in self._requests.values()
            if own.until <= now or own.donor in {gone, *silent}
        ]:
            del self._requests[request.name]
            founds = founds or request.founding
            for site, without in request.askers.items():
                if site != gone and ledger:
                    self._ask(site, without | {request.donor})
        if founds:
            self._ask_founder()

    # What an operator asks

    def _evict(self, site: str) -> None:
        with self._lock:
            ledger = self.ledger
            member = ledger.members.get(site)
            if member is None and not any(site in opened.here for opened in ledger.open.values()):
                raise Refused(
                    f"there is no site {site!r} here, only:"
                    f" {', '.join(sorted(ledger.members)) or 'none'}"
                )
            notes: dict[str, bytes | None] = (
                {f"evicted/{site}/{member.incarnation}": b""} if member else {}
            )
            notes |= dict.fromkeys(
                name for name in self.journal.notes("open/") if name.endswith(f"/{site}")
            )
            self.journal.note(notes)
            ledger.evict(site)
            log.warning("%s was evicted by an operator", site)
        self._wake()

    def end(self) -> None:
        """Ends the run, and announces the rounds to launch for; see [Note: the last round]."""
        with self._lock:
            ledger = self.ledger
            self.journal.note({"ending": b"1"})
            ledger.end()
            log.warning("an operator ends the run: open rounds close, then comes the last round")
            self._call()
        self._wake()

    def amend(self, changes: Any) -> Terms:
        """Amends the terms of the run, durably, and informs all sites."""
        with self._lock:
            ledger = self.ledger
            known = {name: read(_TERMS[name], own, name) for name, own in dict(changes).items()}
            if any(map(ledger.has_ended, range(len(ledger.closed)))):
                raise Refused(
                    "the run has ended, or some of its fragments have: its terms can no longer"
                    " change"
                )
            try:
                terms = replace(ledger.terms, **known)
                quorum = quorum_of(terms.quorum, self._find_quorum)
            except ValueError as error:
                raise Refused(str(error)) from None
            self.journal.note({"terms": encoded(plain(terms))})
            ledger.amend(terms, quorum)
            log.warning("an operator has amended the terms of the run: %s", known)
            self._tell(event_of(Amended(terms)))
            self._call()  # it may no longer be the last round, or be it now
        self._wake()
        return terms

    def _roll_back(self, round: int) -> int:
        """Drops the first record of a later round and all that were written after it, in the
        ledger too.
        """
        with self._lock:
            _ = self.ledger
            last = sum(map(len, self._numbers))
            base = [at.round for at in self.ledger.base]
            later = [
                own[max(0, round - base[p])]
                for p, own in enumerate(self._numbers)
                if len(own) > round - base[p]
            ]
            count = min(later, default=last)
            rounds = [
                base[p] + sum(number < count for number in own)
                for p, own in enumerate(self._numbers)
            ]
            kept = {
                name: own
                for name, own in self._snapshots.items()
                if all(at.round <= rounds[p] for p, at in enumerate(own.header.applied))
            }
            if not kept:
                oldest = max(
                    (
                        at.round
                        for own in [*self._snapshots.values()][:1]
                        for at in own.header.applied
                    ),
                    default=0,
                )
                raise Refused(
                    f"round={round} is too far back: the oldest state that the hub keeps is from"
                    f" round {oldest}. Give"
                    " that round, or a later one."
                )
            gone = [
                name
                for name in self.journal.notes()
                if name.startswith(("snapshot/", "open/", "residual/")) and name not in kept
            ]
            self.journal.cut(count, {**dict.fromkeys(gone), "ending": None, "rolled_back": b"1"})
            self._snapshots = kept
            self.trouble = None
            self._ledger = self._opened()
            log.warning(
                "an operator has rolled the run back to round %d: %d records are left", round, count
            )
        self._wake()
        return count

    def _still_needs(self, ledger: Ledger) -> int:
        """Returns how many bytes more the store will hold before a snapshot makes room: payloads,
        and a state.
        """
        states = [sum(part.size for part in own.parts) for own in self._snapshots.values()]
        last = (record for history in ledger.history for record in list(history)[-1:])
        payloads = {
            record.fragment: sum(
                payload.size for payloads in record.sources for payload in payloads
            )
            for record in last
        }
        rounds = {
            p: max(0, SNAPSHOT_EVERY - ledger.closed[p].round + ledger.kept[p] - 1)
            for p in payloads
        }
        return sum(rounds[p] * payloads[p] for p in payloads) + max(states, default=0)

    def status(self) -> Status:
        with self._lock:
            status: Status = {
                "run": self.run,
                "founded": self._ledger is not None,
                "trouble": self.trouble,
            }
            if self._ledger is None:
                return status | {
                    "missing": self._founding.missing,
                    "here": sorted(self._founding.hellos),
                }
            ledger = self._ledger
            now = self._clock()
            weights = Counter[str]()
            for own in (
                own for records in ledger.history for record in records for own in record.counted
            ):
                weights[own.site] += own.weight
            fragments = list[Status]()
            sites = dict[str, Status]()
            for fragment, closed in enumerate(ledger.closed):
                opened = ledger.open.get(fragment)
                missing = (
                    [name for name in ledger.present(now) if name not in opened.arrived]
                    if opened
                    else []
                )
                about = {
                    "round": closed.round,
                    "open": opened is not None,
                    "here": sorted(opened.here if opened else ()),
                }
                fragments.append(about | {"missing": missing, "ended": ledger.has_ended(fragment)})
            for name in sorted({*ledger.members, *self.statistics}):
                member = ledger.members.get(name)
                heard = name in self.statistics
                counted = self.statistics.get(name, SiteStatistics())
                if member is None:
                    state = "gone"
                elif member.until <= now:
                    state = "silent"
                elif not member.connected:
                    state = "expected"
                else:
                    state = (
                        "follows"
                        if member.follows and ledger.behind(name) <= RETENTION
                        else "joining"
                    )
                sites[name] = {
                    "state": state,
                    "incarnation": member.incarnation if member else None,
                    "last_heartbeat": round(now - counted.heard_at, 3) if heard else None,
                    "rounds_behind": ledger.behind(name) if member else None,
                    "share": round(weights[name] / (weights.total() or 1), 4),
                    "late": counted.late,
                    "not_finite": counted.not_finite,
                    "too_long": counted.too_long,
                    "incarnations": counted.incarnations,
                    "bytes": counted.bytes,
                    "bytes_per_second": round(counted.rate),
                }
            return status | {
                "disk": {"still_needs": self._still_needs(ledger), "free": self.store.free},
                "run_config": self.run_config.summary() | {"terms": plain(self.terms)}
                if self.run_config
                else None,
                "records": ledger.seq,
                "sites": sites,
                "fragments": fragments,
                "snapshots": [
                    [at.round for at in header.applied] for header in ledger.snapshots.headers
                ],
            }

    # What the clock does

    def tick(self) -> float:
        """Closes the rounds that are due, and looks after states, snapshots and the store."""
        seconds = self._tick()
        self._average()
        return seconds

    def _tick(self) -> float:
        with self._lock:
            now = self._clock()
            self._ask_others()
            before = self.trouble
            trouble = self._go_on(now)
            # What waits for its mean had no room for it.
            self.trouble = trouble or (before if self._ledger and self._ledger.closing else None)
            if before and not self.trouble:
                log.warning("rounds can close again; what kept them from it is over: %s", before)
            if self._ledger is None:
                return _AGAIN
            ledger = self._ledger
            if now >= self._snapshot_at and self._wants_snapshot(ledger):
                self._snapshot_at = now + _AGAIN
                donor = ledger.source("", now)
                if isinstance(donor, str) and not any(
                    request.for_snapshot for request in self._requests.values()
                ):
                    self._ask_donor(donor).for_snapshot = True
            if now >= self._call_at:
                # A site that has missed its call gets it again, for as long as the round is open.
                self._call_at = now + _AGAIN
                self._called.clear()
                self._call()
            if now >= self._tidy_at:
                self._tidy_at = now + _TIDY_EVERY
                # What nothing names goes: no record since, open contribution, snapshot, or state on
                # its way.
                self.store.retain(self._needed(ledger.kept))
            return _AGAIN if self.trouble else max(0.0, min(_AGAIN, ledger.next_due(now) - now))

    def _wants_snapshot(self, ledger: Ledger) -> bool:
        """Returns whether it is time for one: after some rounds, or sooner if there is no room for
        their payloads.
        """
        rounds = [at.round for at in ledger.closed]
        if not ledger.snapshots.is_due(rounds, RETENTION):
            return False
        free = self.store.free
        return ledger.snapshots.is_due(rounds) or (
            free is not None and free < self._still_needs(ledger)
        )

    def _go_on(self, now: float) -> str | None:
        """Hands on what is complete and closes what is due; returns what keeps it from that."""
        try:
            self._hand_on()
            for record in self._ledger.due(now) if self._ledger else ():
                if self.ledger.terms.hub_mean is None:
                    self._close(record)
                else:
                    self.ledger.closing[record.fragment] = record
            if self._ledger:
                headers = self._ledger.snapshots.headers
                kept = {name: own for name, own in self._snapshots.items() if own.header in headers}
                dropped = self._snapshots.keys() - kept
                if dropped:
                    self.journal.note(dict.fromkeys(dropped))
                    self._snapshots = kept
        except (AgreementError, NoSpace) as error:
            return self._troubled(error)
        return None

    def _troubled(self, error: Exception) -> str:
        if str(error) != self.trouble:
            log.error("%s", error)
            self._tell(event_of(Waiting(str(error))))
        return str(error)

    def _close(self, record: Record, notes: Mapping[str, bytes | None] | None = None) -> None:
        """Makes a record durable, then announces it."""
        gone = dict.fromkeys(self.journal.notes(f"open/{record.fragment:06d}/"))
        self.journal.append(record.seq, record.to_bytes(), gone | dict(notes or {}))
        self.ledger.append(self._indexed(record))
        for out in record.left_out:
            counted = self.statistics[out.site]
            counted.not_finite += out.reason == "not finite"
            counted.too_long += out.reason == "too long"
            told = record.round, record.fragment, out.site, out.reason
            log.warning("round %d of fragment %d leaves out the contribution of %s: %s", *told)
        self._tell(Event("record", {}, record.to_bytes()))
        self._call()
        if record.final and all(map(self.ledger.has_ended, range(len(self.ledger.closed)))):
            log.info("run %s has ended", self.run)

    def _average(self) -> None:
        """Means what closes, one at a time and without the lock: it takes a while, and others go
        on meanwhile.
        """
        if (
            self._ledger is None
            or not self._ledger.closing
            or not self._averaging.acquire(blocking=False)
        ):
            return
        from lightning_sdiloco.federation.mean import averaged  # only who chose it needs numpy

        try:
            with self._lock:
                closing = list(self.ledger.closing.values())
                notes = self.journal.notes("residual/")
                code = self.ledger.terms.hub_mean
                run_config = self.run_config
            assert code is not None, "only then does a record wait for its mean"
            assert run_config is not None, "the run has been founded"
            for record in closing:
                name = f"residual/{record.fragment:06d}"
                get = self.store.get
                sizes = run_config.sizes(record.fragment)
                kept = notes[name].decode() if name in notes else None
                payload, residual = averaged(
                    record, get, sizes, code, None if kept is None else get(kept)
                )
                mean = Payload(self.store.put(payload), len(payload))
                key = None if residual is None else self.store.put(residual)
                with self._lock:
                    if self.ledger.closing.get(record.fragment) is not record:
                        continue
                    note = None if key is None else key.encode()
                    self._close(replace(record, seq=self.ledger.seq, mean=mean), {name: note})
                    # It is as large as a fragment in float32, and of no use any more.
                    if kept is not None and kept != key and kept not in self._backing_up:
                        self.store.drop(kept)
        except NoSpace as error:
            with self._lock:
                self.trouble = self._troubled(error)
        finally:
            self._averaging.release()

    def _call(self, own: Contribution | None = None) -> None:
        """Announces the rounds to launch for, once, and a large payload that can be fetched before
        it counts.
        """
        if own and (
            self.ledger.terms.hub_mean or all(payload.size <= CHUNK for payload in own.payloads)
        ):
            own = None
        for call in self.ledger.calls():
            early = own if own and own.fragment == call.fragment else None
            if early or self._called.get(call.fragment) != call:
                self._called[call.fragment] = call
                self._tell(event_of(Called(call, early)))


def _require_own(peer: Peer, site: str, incarnation: str | None = None) -> None:
    if site != peer.name or incarnation not in (None, peer.incarnation):
        raise Refused(
            f"site {peer.name!r} speaks only for itself, and for its current incarnation."
        )
