"""The coordinator: a run at its hub. It asks the rules, makes durable what they say, and then tells the sites.

[Note: one at a time] All that happens to a run happens under one lock, the times in between belong to transfers of
blobs. See [Note: durable before visible] in `federation/ledger.py` for the order, which every method here keeps.
"""

import itertools
import json
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_sdiloco.errors import AgreementError, Malformed, Refused
from lightning_sdiloco.federation.charter import RETENTION, Charter
from lightning_sdiloco.federation.codec import read
from lightning_sdiloco.federation.journal import History
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.ledger import Answer, Founding, Ledger
from lightning_sdiloco.federation.messages import (
    Beat,
    Call,
    Called,
    Contribution,
    Event,
    Hello,
    Parts,
    Payload,
    Position,
    Record,
    StateHeader,
    StateOffered,
    StateWanted,
    Tell,
    Waiting,
    Welcomed,
    event_of,
)
from lightning_sdiloco.federation.store import BlobStore, InMemoryStore
from lightning_sdiloco.federation.wire import Busy, Header, HubError, Missing, NoSpace

log = logging.getLogger(__name__)


_AGAIN = 1.0  # seconds after which something is tried again that did not succeed
_TIDY_EVERY = 60.0
_RECENT = 8  # rounds over which shares are told
_MOST_BEGUN = 128  # blobs of a site whose beginning is remembered

MAX_CHARTER = 64 << 20
"""Bytes of the largest charter."""

Status = dict[str, Any]


ANCHOR = "the anchor"
"""The source of a state that the hub itself has kept."""

PATIENCE = 60.0
"""Seconds after which somebody else is asked for a state, if the first one has not begun to send it."""

SENDING = 3600.0
"""Seconds that it may take to send a state."""

_HANDED = 3600.0  # for how long a state that was handed on can be fetched


@dataclass
class StateRequest:
    """A state that was asked for. One answer serves all who asked the same donor meanwhile."""

    name: str
    donor: str
    until: float
    askers: dict[str, frozenset[str]] = field(default_factory=dict)
    for_anchor: bool = False
    founding: bool = False
    given: tuple[StateHeader, tuple[Payload, ...]] | None = None


@dataclass
class SiteStatistics:
    heard_at: float = 0.0
    life: str = ""
    lives: int = 0
    late: int = 0
    bytes: int = 0
    rate: float = 0.0
    began: dict[str, float] = field(default_factory=dict)


# The run


class Coordinator:
    """Serves one run. All methods may be called from several threads."""

    def __init__(
        self, run: str, history: History, sites: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if history.charter is None and sites is None:
            raise ValueError(
                f"The ledger has no run {run!r} yet. Say how many sites found it (sites), or give the ledger of it."
            )
        if history.charter is not None and history.charter.run != run:
            raise ValueError(f"run={run!r} is not in this ledger, but {history.charter.run!r}. Give one that fits.")
        self.run = run
        self.history = history
        self.statistics: defaultdict[str, SiteStatistics] = defaultdict(SiteStatistics)
        self._recent: dict[int, deque[Record]] = {}
        self.trouble: str | None = None
        self._clock = clock
        self._lock = threading.RLock()
        self._tell: Tell = lambda event, to=None: None
        self._wake: Callable[[], None] = lambda: None
        self._founding = Founding(sites or 1, history.quorums)
        self._ledger = None if history.charter is None else history.ledger(clock())
        self._arriving: dict[tuple[int, str], tuple[Contribution, str]] = {}
        self._tidy_at = clock() + _TIDY_EVERY
        self._requests: dict[str, StateRequest] = {}
        self._handed: list[tuple[float, tuple[Payload, ...]]] = []
        self._anchor_at = clock()

    def start(self, tell: Tell, wake: Callable[[], None]) -> None:
        self._tell, self._wake = tell, wake

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            raise Refused(f"run {self.run!r} has not been founded yet: {self._founding.missing} more sites are needed")
        return self._ledger

    # Sites come and go

    def agree(self, site: str, charter: Charter) -> Charter:
        """Hears which charter a site brings; returns that of the run, as `Connection.agree` does."""
        with self._lock:
            return self.history.charter or self._founding.propose(site, charter)

    def hello(self, hello: Hello, brought: Callable[[], Charter]) -> Iterator[Event]:
        if hello.run != self.run:
            raise Refused(f"this hub serves run {self.run!r}, and not {hello.run!r}")
        with self._lock:
            if self.history.charter is None:
                if any(at.round for at in hello.applied):
                    raise Refused(
                        f"this hub has no run yet, and {hello.site} has applied records of one: start the hub with the"
                        " ledger of that run"
                    )
                self._founding.hello(hello, brought())
                log.info("%s is here for the founding; sites that are missing: %d", hello.site, self._founding.missing)
                return iter([event_of(Waiting(self._ask_founder()))])
            if hello.charter != self.history.charter.key:
                brought().require_same(self.history.charter)
            return self._welcome(hello)

    def _ask_founder(self) -> str:
        """Asks somebody for the state at round 0, if there are enough; returns what is waited for."""
        if self._founding.missing:
            return f"run {self.run!r} is being founded: {self._founding.missing} more sites are needed"
        founder = self._founding.founder
        if not any(request.founding for request in self._requests.values()):
            self._ask_donor(founder, founding=True)
        return f"run {self.run!r} is being founded on the parameters of {founder}"

    def _welcome(self, hello: Hello) -> Iterator[Event]:
        now, ledger = self._clock(), self.ledger
        member = ledger.members.get(hello.site)
        if member and member.connected and member.life != hello.life and member.until > now:
            raise Busy(
                f"the name {hello.site} is in use by a living process: end it first, or wait for"
                f" {member.until - now:.1f} s if it is dead"
            )
        welcome = ledger.hello(hello, now)
        counted = self.statistics[hello.site]
        counted.heard_at, counted.lives = now, counted.lives + (hello.life != counted.life)
        counted.life = hello.life
        log.info("%s has joined", hello.site)
        # Records are read one by one, as fast as the site takes them.
        missing = self.history.missing(hello.applied, welcome.kept)
        records = (Event("record", {}, text) for _, text in missing)
        calls = [event_of(Called(call)) for call in ledger.calls()]
        return itertools.chain([event_of(Welcomed(welcome, ledger.anchors.best))], records, calls)

    def beat(self, beat: Beat) -> None:
        with self._lock:
            if self._ledger is None:
                return
            if (beat.site, beat.life) in self._ledger.evicted:
                raise Refused(f"{beat.site} was evicted from the run: ask its operator")
            member = self._ledger.members.get(beat.site)
            followed = member is not None and member.follows
            try:
                self._ledger.beat(beat, self._clock())
            except Refused as error:
                raise HubError(str(error)) from None
            self.statistics[beat.site].heard_at = self._clock()
        if beat.follows and not followed:
            self._wake()

    def gone(self, site: str, life: str) -> None:
        with self._lock:
            if self._ledger is None:
                self._founding.gone(site)
            else:
                self._ledger.leave(site, life)
            log.info("%s has gone", site)
            self._arriving = {place: own for place, own in self._arriving.items() if place[1] != site}
            self._ask_others(gone=site)
        self._wake()

    # What they send

    def contribute(self, own: Contribution, life: str) -> str:
        """Takes a contribution, when its payloads are in the store."""
        with self._lock:
            self._arriving.pop((own.fragment, own.site), None)
            answer = self.ledger.examine(own, life)
            if answer is Answer.LATE:
                self.statistics[own.site].late += 1
                if self.history.holds(own.payloads):
                    self.ledger.contribute(own, life, self._clock())
            if answer is not Answer.OPEN:
                return answer.value
            if not own.payloads:
                raise Refused(f"{own.site} contributes nothing to round {own.round} of fragment {own.fragment}")
            if not self.history.holds(own.payloads):
                self._arriving[own.fragment, own.site] = own, life
                return "waiting"
            self.history.journal.note({f"open/{own.fragment:06d}/{own.site}": own.to_bytes()})
            self.ledger.contribute(own, life, self._clock())
            self._call(own.fragment, own)
        self._wake()
        return Answer.OPEN.value

    def require_here(self, site: str, life: str) -> None:
        with self._lock:
            member = self._ledger.members.get(site) if self._ledger else self._founding.hellos.get(site)
            if member is None or member.life != life:
                raise Refused(f"{site} has not said hello")

    def begins(self, site: str, key: str, state: bool) -> None:
        with self._lock:
            began = self.statistics[site].began
            if len(began) < _MOST_BEGUN:
                began.setdefault(key, self._clock())
            for request in self._requests.values() if state else ():
                if request.donor == site:
                    request.until = max(request.until, self._clock() + SENDING)

    def stored(self, site: str, key: str = "", size: int = 0) -> None:
        with self._lock:
            counted, now = self.statistics[site], self._clock()
            seconds = now - counted.began.pop(key, now)
            counted.bytes += size
            counted.rate = size / seconds if seconds > 0 else counted.rate
            for own, life in [own for place, own in self._arriving.items() if place[1] == site]:
                try:
                    self.contribute(own, life)
                except Refused as error:
                    log.info("%s: %s", site, error)
            self._hand_on()

    def skip(self, site: str, life: str, call: Call) -> None:
        with self._lock:
            self.ledger.skip(site, life, call, self._clock())
        self._wake()

    # States

    def ask(self, site: str, without: Collection[str] = ()) -> None:
        """Gets a state for a site: from a donor, who is told, or from the anchor."""
        with self._lock:
            ledger, source = self.ledger, None
            if any(site in request.askers for request in self._requests.values()):
                return
            open_to_all = (one for one in self._requests.values() if not one.founding and not one.given)
            request = next((one for one in open_to_all if one.donor not in {site, *without}), None)
            if request is None:
                source = ledger.source(site, self._clock(), without)
                if isinstance(source, str):
                    request = self._ask_donor(source)
            if request:
                request.askers[site] = frozenset(without)
            elif isinstance(source, StateHeader) and ANCHOR not in without:
                parts = next(own.parts for own in self.history.anchors.values() if own.header == source)
                self._tell(event_of(StateOffered(ANCHOR, source, parts)), [site])
            else:
                log.warning("%s needs a state, and nobody has one: waiting for a site that comes back with one", site)
                why = "nobody has a state: a site that comes back with one is waited for"
                self._tell(event_of(Waiting(why)), [site])

    def _ask_donor(self, donor: str, founding: bool = False) -> StateRequest:
        request = StateRequest(secrets.token_hex(8), donor, self._clock() + PATIENCE, founding=founding)
        self._requests[request.name] = request
        self._tell(event_of(StateWanted(request.name, founding)), [donor])
        return request

    def give(self, site: str, name: str, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Takes the state that a site gives, and hands it on when its blobs are in the store."""
        with self._lock:
            request, charter = self._requests.get(name), self.history.charter or self._founding.charter
            if request is None or request.donor != site:
                raise Refused(f"nobody waits for this state of {site} any more")
            fragments = charter.terms.fragments
            if not len(header.applied) == len(header.digests) == fragments:
                raise Refused(f"a state of this run has {fragments} fragments")
            if request.founding and any(at != Position(0, charter.key) for at in header.applied):
                raise Refused("a run is founded on a state at round 0")
            request.given = header, tuple(parts)
            self._hand_on()
        self._wake()

    def _hand_on(self) -> None:
        """Hands states that were given, with all blobs in the store, to those who wanted them."""
        for request in [one for one in self._requests.values() if one.given and self.history.holds(one.given[1])]:
            assert request.given is not None, "the request is complete"
            header, parts = request.given
            if request.founding:
                self.history.found(self._founding.charter, header, parts)
                self._ledger = self.history.ledger(self._clock())
                log.info("run %s has been founded", self.run)
                for hello in self._founding.hellos.values():
                    for event in self._welcome(hello):
                        self._tell(event, [hello.site])
            if request.for_anchor:
                self.history.anchor(header, parts)
                self.ledger.anchors.add(header)
                log.info("%s has left a state as an anchor", request.donor)
            del self._requests[request.name]
            if request.askers:
                self._handed.append((self._clock() + _HANDED, parts))
                self._tell(event_of(StateOffered(request.donor, header, parts)), list(request.askers))

    def _ask_others(self, gone: str | None = None) -> None:
        """Asks somebody else where a donor does not answer, or has gone, or gives no sign of life."""
        ledger, now, founds = self._ledger, self._clock(), False
        silent = {site for site, own in ledger.members.items() if own.until <= now} if ledger else ()
        for request in [own for own in self._requests.values() if own.until <= now or own.donor in {gone, *silent}]:
            del self._requests[request.name]
            founds = founds or request.founding
            for site, without in request.askers.items():
                if site != gone and ledger:
                    self.ask(site, without | {request.donor})
        if founds:
            self._ask_founder()

    # What an operator asks

    def evict(self, site: str) -> None:
        with self._lock:
            ledger = self.ledger
            member = ledger.members.get(site)
            if member is None and not any(site in opened.here for opened in ledger.open.values()):
                raise Refused(f"there is no site {site!r} here, only: {', '.join(sorted(ledger.members)) or 'none'}")
            self.history.evict(site, member.life if member else None)
            ledger.evict(site)
            log.warning("%s was evicted by an operator", site)
        self._wake()

    def end(self) -> None:
        """Ends the run, and tells all for which rounds to launch; see [Note: the last round]."""
        with self._lock:
            ledger = self.ledger
            self.history.journal.note({"ending": b"1"})
            ledger.end()
            log.warning("an operator ends the run: what is open closes, and then comes the last round")
            self._call()
        self._wake()

    def roll_back(self, round: int) -> int:
        """Drops all rounds after one, with what was written later. Who has applied more is refused from then on."""
        with self._lock:
            now, _ = self._clock(), self.ledger
            count = self.history.roll_back(round)
            self._ledger, self.trouble = self.history.ledger(now), None
            log.warning("an operator has rolled the run back to round %d: %d records are left", round, count)
        self._wake()
        return count

    def status(self) -> Status:
        with self._lock:
            status: Status = {"run": self.run, "founded": self._ledger is not None, "trouble": self.trouble}
            if self._ledger is None:
                return status | {"missing": self._founding.missing, "here": sorted(self._founding.hellos)}
            ledger, now, weights = self._ledger, self._clock(), Counter[str]()
            for own in (own for records in self._recent.values() for record in records for own in record.counted):
                weights[own.site] += own.weight
            fragments = []
            for fragment, closed in enumerate(ledger.closed):
                opened, here, missing = ledger.open.get(fragment), list[str](), list[str]()
                if opened:
                    here = sorted(opened.here)
                    missing = [name for name in ledger.present(now) if name not in opened.arrived]
                about = {"round": closed.round, "open": opened is not None, "here": here, "missing": missing}
                fragments.append(about | {"ended": ledger.has_ended(fragment)})
            return status | {
                "charter": self.history.charter.summary() if self.history.charter else None,
                "records": ledger.seq,
                "sites": {
                    name: self._status_of(name, ledger, now, weights[name] / (weights.total() or 1))
                    for name in sorted({*ledger.members, *self.statistics})
                },
                "fragments": fragments,
                "anchors": [[at.round for at in header.applied] for header in ledger.anchors.headers],
            }

    def _status_of(self, name: str, ledger: Ledger, now: float, share: float) -> Status:
        member, own = ledger.members.get(name), self.statistics.get(name)
        if member is None:
            state = "gone"
        elif member.until <= now:
            state = "silent"
        elif not member.connected:
            state = "expected"
        else:
            state = "follows" if member.follows and ledger.behind(name) <= RETENTION else "joining"
        counted = own or SiteStatistics()
        return {
            "state": state,
            "life": member.life if member else None,
            "last_beat": round(now - own.heard_at, 3) if own else None,
            "rounds_behind": ledger.behind(name) if member else None,
            "share": round(share, 4),
            "late": counted.late,
            "lives": counted.lives,
            "bytes": counted.bytes,
            "bytes_per_second": round(counted.rate),
        }

    # What the clock does

    def tick(self) -> float:
        """Closes the rounds that are due, and looks after states, anchors and the store."""
        with self._lock:
            now = self._clock()
            self._ask_others()
            self.trouble = self._go_on(now)
            if self._ledger is None:
                return _AGAIN
            ledger = self._ledger
            if now >= self._anchor_at and ledger.anchors.is_due(at.round for at in ledger.closed):
                self._anchor_at = now + _AGAIN
                donor = ledger.source("", now)
                if isinstance(donor, str) and not any(request.for_anchor for request in self._requests.values()):
                    self._ask_donor(donor).for_anchor = True
            if now >= self._tidy_at:
                self._tidy_at = now + _TIDY_EVERY
                self._handed = [own for own in self._handed if own[0] > now]
                given = [request.given[1] for request in self._requests.values() if request.given]
                fetched = {part.key for parts in (*given, *(own[1] for own in self._handed)) for part in parts}
                self.history.tidy(ledger.kept, fetched)
            return _AGAIN if self.trouble else max(0.0, min(_AGAIN, ledger.next_due(now) - now))

    def _go_on(self, now: float) -> str | None:
        """Hands on what is complete and closes what is due; returns what keeps it from that."""
        try:
            self._hand_on()
            for record in self._ledger.due(now) if self._ledger else ():
                self.history.append(record)
                self.ledger.append(record)
                self._recent.setdefault(record.fragment, deque(maxlen=_RECENT)).append(record)
                self._tell(Event("record", {}, record.to_bytes()))
                self._call(record.fragment)
            if self._ledger:
                self.history.keep_anchors(self._ledger.anchors.headers)
        except (AgreementError, NoSpace) as error:
            if str(error) != self.trouble:
                log.error("%s", error)
                self._tell(event_of(Waiting(str(error))))
            return str(error)
        return None

    def _call(self, fragment: int | None = None, own: Contribution | None = None) -> None:
        """Tells all for which rounds to launch, of one fragment or all."""
        for call in self.ledger.calls():
            if fragment in (None, call.fragment):
                self._tell(event_of(Called(call, own)))


class Calls:
    """What arrives from sites and operators, for a coordinator. Who may call what has been looked at before."""

    def __init__(self, coordinator: Coordinator, store: BlobStore | InMemoryStore) -> None:
        self._coordinator, self._store = coordinator, store

    def start(self, push: Tell) -> None:
        self._push = push

    def hello(self, peer: Peer, about: Header) -> Iterable[Event]:
        if peer.role != "site":
            return ()
        hello = read(Hello, about.get("hello"), "hello")
        _require_own(peer, hello.site, hello.life)
        return self._coordinator.hello(hello, lambda: self._charter(hello.charter))

    def _charter(self, key: str) -> Charter:
        try:
            if self._store.size(key) > MAX_CHARTER:
                raise Malformed("a charter is not as large as that.")
            return Charter.from_bytes(self._store.get(key))
        except Missing:
            raise Refused("a site brings its charter before it says hello.") from None

    def beat(self, peer: Peer, about: Header) -> None:
        if peer.role == "site":
            beat = read(Beat, about.get("beat"), "beat")
            _require_own(peer, beat.site, beat.life)
            self._coordinator.beat(beat)

    def gone(self, peer: Peer) -> None:
        if peer.role == "site":
            self._coordinator.gone(peer.name, peer.life)

    def admit(self, peer: Peer, about: Header, key: str, size: int) -> None:
        """Takes charters of some size, and of a site that is there payloads and states."""
        kind = about.get("kind")
        if kind == "charter":
            if size > MAX_CHARTER:
                raise Refused(f"a charter of {size:,} bytes is too large: at most {MAX_CHARTER:,} are taken.")
        elif kind not in ("payload", "state"):
            raise Malformed("a blob is a charter, a payload or a part of a state.")
        else:
            self._coordinator.require_here(peer.name, peer.life)
            self._coordinator.begins(peer.name, key, kind == "state")

    def stored(self, peer: Peer, about: Header, key: str, size: int) -> Header:
        if about.get("kind") != "charter":
            self._coordinator.stored(peer.name, key, size)
            return {}
        charter = self._coordinator.agree(peer.name, self._charter(key))
        try:
            self._store.size(charter.key)
        except Missing:
            self._store.put(charter.to_bytes())
        return {"charter": charter.key}

    def call(self, peer: Peer, name: str, about: Header, body: bytes) -> tuple[Header, bytes]:
        coordinator, site = self._coordinator, peer.name
        match name:
            case "hello":
                for event in self.hello(peer, about):
                    self._push(event, [site])
            case "contribute":
                own = Contribution.from_bytes(body)
                _require_own(peer, own.site)
                return {"answer": coordinator.contribute(own, peer.life)}, b""
            case "skip":
                coordinator.skip(site, peer.life, Call.from_bytes(body))
            case "state":
                without = about.get("without")
                if not isinstance(without, list) or not all(isinstance(one, str) for one in without):
                    raise Malformed("who asks for a state says whose states were refused.")
                coordinator.require_here(site, peer.life)
                coordinator.ask(site, without)
            case "give":
                header, parts = StateHeader.from_bytes(body), read(Parts, about.get("parts"), "parts")
                coordinator.give(site, str(about.get("request")), header, parts)
            case "leave":
                coordinator.gone(site, peer.life)
            case "status":
                return {}, json.dumps(coordinator.status()).encode()
            case "evict":
                coordinator.evict(str(about.get("who")))
            case "end":
                coordinator.end()
            case "rollback":
                round = about.get("round")
                if type(round) is not int or round < 0:
                    raise Malformed("a run is rolled back to a round.")
                return {"records": coordinator.roll_back(round)}, b""
            case _:
                raise Refused(f"this hub does not answer {name}.")
        return {}, b""


def _require_own(peer: Peer, site: str, life: str | None = None) -> None:
    if site != peer.name or life not in (None, peer.life):
        raise Refused(f"site {peer.name!r} speaks for itself, and for this start of it.")
