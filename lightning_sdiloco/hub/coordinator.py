"""The coordinator: a run at its hub. It asks the rules, makes durable what they say, and then tells the sites.

[Note: one at a time] All that happens to a run happens under one lock, the times in between belong to transfers of
blobs. See [Note: durable before visible] in `federation/ledger.py` for the order, which every method here keeps.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from lightning_sdiloco.comm import Busy, Event, MailboxError, NoSpace
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation import (
    Answer,
    Beat,
    Call,
    Charter,
    Contribution,
    Hello,
    Ledger,
    Payload,
    Position,
    Record,
    Refused,
    StateHeader,
)
from lightning_sdiloco.hub.events import (
    call_event,
    recorded_event,
    state_event,
    waiting_event,
    wanted_event,
    welcome_event,
)
from lightning_sdiloco.hub.gathering import Gathering
from lightning_sdiloco.hub.history import History
from lightning_sdiloco.hub.states import StateRequest, States
from lightning_sdiloco.hub.statistics import Statistics
from lightning_sdiloco.hub.status import Status, status_of

log = logging.getLogger(__name__)

_TIDY_EVERY = 60.0
_AGAIN = 1.0  # seconds after which something is tried again that did not succeed
ANCHOR = "the anchor"
"""The source of a state that the hub itself has kept."""


class Tell(Protocol):
    """Tells an event to sites without waiting for them."""

    def __call__(self, event: Event, to: Collection[str] | None = None) -> None:
        """Tells all, or those named."""


class Coordinator:
    """Serves one run. All methods may be called from several threads.

    Args:
        run: The name of the run.
        history: What is durable of it.
        sites: How many sites it takes to found it; None if it must have been founded before.
        clock: Returns the time in seconds; it never goes back.

    Raises:
        ValueError: If there is no run in the history and ``sites`` is None, or it is another run.
    """

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
        self.states = States()
        self.statistics = Statistics()
        self.trouble: str | None = None
        self._clock = clock
        self._lock = threading.RLock()
        self._tell: Tell = lambda event, to=None: None
        self._wake: Callable[[], None] = lambda: None
        self._gathering = Gathering(sites or 1)
        self._ledger = None if history.charter is None else history.ledger(clock())
        self._arriving: dict[tuple[int, str], tuple[Contribution, str]] = {}
        self._tidy_at = clock() + _TIDY_EVERY
        self._anchor_at = clock()

    def start(self, tell: Tell, wake: Callable[[], None]) -> None:
        """Takes what it tells sites with, and what it calls when `tick` may have something to do."""
        self._tell, self._wake = tell, wake

    @property
    def charter(self) -> Charter | None:
        """The charter of the run, once it has been founded."""
        return self.history.charter

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run.

        Raises:
            Refused: If the run has not been founded.
        """
        if self._ledger is None:
            raise Refused(f"run {self.run!r} has not been founded yet: {self._gathering.missing} more sites are needed")
        return self._ledger

    # Sites come and go

    def agree(self, site: str, charter: Charter) -> Charter:
        """Hears which charter a site brings; returns that of the run, as `Connection.agree` does."""
        with self._lock:
            return self.charter or self._gathering.propose(site, charter)

    def hello(self, hello: Hello, brought: Callable[[], Charter]) -> Iterator[Event]:
        """Takes a site in.

        Args:
            hello: What it says.
            brought: Returns the charter whose key it says.

        Returns:
            What it is told first.

        Raises:
            Refused: If it is for another run, brings another charter, was evicted, or has more than this hub.
            Busy: If a living process uses its name.
        """
        if hello.run != self.run:
            raise Refused(f"this hub serves run {self.run!r}, and not {hello.run!r}")
        with self._lock:
            if self.charter is None:
                return iter([self._gather(hello, brought())])
            if hello.charter != self.charter.key:
                _require_same(brought(), self.charter)
            return self._welcome(hello)

    def _gather(self, hello: Hello, charter: Charter) -> Event:
        if any(at.round for at in hello.applied):
            raise Refused(
                f"this hub has no run yet, and {hello.site} has applied records of one: start the hub with the ledger"
                " of that run"
            )
        self._gathering.hello(hello, charter)
        log.info("%s is here for the founding; %d more are needed", hello.site, self._gathering.missing)
        return waiting_event(self._ask_founder())

    def _ask_founder(self) -> str:
        """Asks somebody for the state at round 0, if there are enough; returns what is waited for."""
        if self._gathering.missing:
            return f"run {self.run!r} is being founded: {self._gathering.missing} more sites are needed"
        founder = self._gathering.founder
        if not any(request.founding for request in self.states.requests.values()):
            request = self.states.begin(founder, self._clock(), founding=True)
            self._tell(wanted_event(request.name, founding=True), [founder])
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
        self.statistics.joined(hello.site, now, hello.life)
        log.info("%s has joined", hello.site)
        first = [welcome_event(welcome, ledger.anchors.best)]
        calls = [call_event(call) for call in ledger.calls()]
        return self._told_first(first, hello, welcome.kept, calls)

    def _told_first(self, first: list[Event], hello: Hello, kept: Sequence[int], calls: list[Event]) -> Iterator[Event]:
        # Records are read one by one, as fast as the site takes them.
        yield from first
        for _, text in self.history.missing(hello.applied, kept):
            yield recorded_event(Record.from_bytes(text))
        yield from calls

    def beat(self, beat: Beat) -> None:
        """Renews the lease of a site.

        Raises:
            Refused: If it was evicted.
            MailboxError: If it has to say hello again.
        """
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
                raise MailboxError(str(error)) from None
            self.statistics.beat(beat.site, self._clock())
        if beat.follows and not followed:
            self._wake()

    def gone(self, site: str, life: str) -> None:
        """Hears that a site has left, or that its connection has ended."""
        with self._lock:
            if self._ledger is None:
                self._gathering.gone(site)
            else:
                self._ledger.leave(site, life)
            log.info("%s has gone", site)
            self._arriving = {place: own for place, own in self._arriving.items() if place[1] != site}
            self._ask_others(gone=site)
        self._wake()

    # What they send

    def contribute(self, own: Contribution, life: str) -> str:
        """Takes a contribution, when its payloads are in the store.

        Returns:
            ``open``, ``known`` or ``late``, as `Answer` says; ``waiting`` if payloads are missing.

        Raises:
            Refused: As `Ledger.examine` does.
            NoSpace: If the disk is full.
        """
        with self._lock:
            self._arriving.pop((own.fragment, own.site), None)
            answer = self.ledger.examine(own, life)
            if answer is Answer.LATE:
                self.statistics.late(own.site)
            if answer is not Answer.OPEN:
                return answer.value
            if not own.payloads:
                raise Refused(f"{own.site} contributes nothing to round {own.round} of fragment {own.fragment}")
            if not self.history.holds(own.payloads):
                self._arriving[own.fragment, own.site] = own, life
                return "waiting"
            self.history.take(own)
            self.ledger.contribute(own, life, self._clock())
            call = next(call for call in self.ledger.calls() if call.fragment == own.fragment)
            self._tell(call_event(call, own))
        self._wake()
        return Answer.OPEN.value

    def require_here(self, site: str, life: str) -> None:
        """Refuses a site that has not been let in.

        Raises:
            Refused: If it has not said hello.
        """
        with self._lock:
            member = self._ledger.members.get(site) if self._ledger else self._gathering.hellos.get(site)
            if member is None or member.life != life:
                raise Refused(f"{site} has not said hello")

    def begins(self, site: str, key: str, state: bool) -> None:
        """Hears that a site begins to send a blob."""
        with self._lock:
            self.statistics.begins(site, key, self._clock())
            if state:
                self.states.sends(site, self._clock())

    def stored(self, site: str, key: str = "", size: int = 0) -> None:
        """Hears that a blob of a site is in the store: something that waited for it may be complete."""
        with self._lock:
            self.statistics.arrived(site, key, size, self._clock())
            for own, life in [own for place, own in self._arriving.items() if place[1] == site]:
                try:
                    self.contribute(own, life)
                except Refused as error:
                    log.info("%s: %s", site, error)
            for request in [one for one in self.states.requests.values() if one.donor == site and one.given]:
                self._hand_on(request.name, site)

    def skip(self, site: str, life: str, call: Call) -> None:
        """Hears that a site does not answer a call."""
        with self._lock:
            self.ledger.skip(site, life, call, self._clock())
        self._wake()

    # States

    def ask(self, site: str, without: Collection[str] = ()) -> None:
        """Gets a state for a site: from a donor, who is told, or from the anchor."""
        with self._lock:
            self._find_state(site, frozenset(without))

    def _find_state(self, site: str, without: frozenset[str]) -> None:
        now, source = self._clock(), None
        if self.states.of(site):
            return
        request = self.states.to(site, without)
        if request is None:
            source = self.ledger.source(site, now, without)
            if isinstance(source, str):
                request = self._ask_donor(source)
        if request:
            request.askers[site] = without
        elif isinstance(source, StateHeader) and ANCHOR not in without:
            parts = next(parts for header, parts in self.history.anchors if header == source)
            self._tell(state_event(ANCHOR, source, parts), [site])
        else:
            log.warning("%s needs a state, and nobody has one: waiting for a site that comes back with one", site)
            self._tell(waiting_event("nobody has a state: a site that comes back with one is waited for"), [site])

    def _ask_donor(self, donor: str) -> StateRequest:
        request = self.states.begin(donor, self._clock())
        self._tell(wanted_event(request.name), [donor])
        return request

    def give(self, site: str, name: str, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Takes the state that a site gives, and hands it on when its blobs are in the store.

        Raises:
            Refused: If nobody asked this site for it, or it has other fragments.
        """
        with self._lock:
            request = self.states.take(name, site)
            if request is None:
                raise Refused(f"nobody waits for this state of {site} any more")
            fragments = (self.charter or self._gathering.charter).terms.fragments
            if not len(header.applied) == len(header.digests) == fragments:
                raise Refused(f"a state of this run has {fragments} fragments")
            request.given = header, tuple(parts)
            self._hand_on(name, site)
        self._wake()

    def _hand_on(self, name: str, site: str) -> None:
        request = self.states.take(name, site)
        if not request or not request.given or not self.history.holds(request.given[1]):
            return
        header, parts = request.given
        if request.founding:
            self._found(header, parts)
        if request.for_anchor:
            self.history.anchor(header, parts)
            self.ledger.anchors.add(header)
            log.info("%s has left a state as an anchor", site)
        del self.states.requests[name]
        if request.askers:
            self.states.handed(parts, self._clock())
            self._tell(state_event(site, header, parts), list(request.askers))

    def _found(self, header: StateHeader, parts: Sequence[Payload]) -> None:
        charter = self._gathering.charter
        if any(at != Position(0, charter.key) for at in header.applied):
            raise Refused("a run is founded on a state at round 0")
        self.history.found(charter, header, parts)
        self._ledger = self.history.ledger(self._clock())
        log.info("run %s has been founded", self.run)
        for hello in self._gathering.hellos.values():
            for event in self._welcome(hello):
                self._tell(event, [hello.site])

    def _ask_others(self, gone: str | None = None) -> None:
        """Asks somebody else where a donor does not answer."""
        for request in self.states.overdue(self._clock(), gone):
            if request.founding:
                self._ask_founder()
            for site, without in request.askers.items():
                if site != gone:
                    self._find_state(site, without | {request.donor})

    # What an operator asks

    def evict(self, site: str) -> None:
        """Throws a site out. A new start of it may join again, with a state of the others.

        Raises:
            Refused: If there is no such site.
        """
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
        """Makes the next round of every fragment the last."""
        with self._lock:
            ledger = self.ledger
            self.history.end()
            ledger.end()
            log.warning("an operator ends the run with the next round of every fragment")
            for call in ledger.calls():
                self._tell(call_event(call))
        self._wake()

    def roll_back(self, round: int) -> int:
        """Drops all rounds after one, with what was written later. Who has applied more is refused from then on.

        Returns:
            How many records are left.

        Raises:
            Refused: If the hub has no state from which the run could go on there.
        """
        with self._lock:
            now, _ = self._clock(), self.ledger
            try:
                count = self.history.roll_back(round)
            except ValueError as error:
                raise Refused(str(error)) from None
            self._ledger, self.trouble = self.history.ledger(now), None
            log.warning("an operator has rolled the run back to round %d: %d records are left", round, count)
        self._wake()
        return count

    def status(self) -> Status:
        """Returns what is to be seen of the run."""
        with self._lock:
            status: Status = {"run": self.run, "founded": self._ledger is not None, "trouble": self.trouble}
            if self._ledger is None:
                return status | {"missing": self._gathering.missing, "here": sorted(self._gathering.hellos)}
            charter = self.charter.summary() if self.charter else None
            return status | {"charter": charter} | status_of(self._ledger, self.statistics, self._clock())

    # What the clock does

    def tick(self) -> float:
        """Closes the rounds that are due, and looks after states, anchors and the store.

        Returns:
            In how many seconds to call it again, if it is not woken before.
        """
        with self._lock:
            now = self._clock()
            self._ask_others()
            if self._ledger is None:
                return _AGAIN
            self.trouble = self._close(now)
            self._anchor(now)
            if now >= self._tidy_at:
                self._tidy_at = now + _TIDY_EVERY
                self.history.tidy(self._ledger.kept, self.states.needed(now))
            return _AGAIN if self.trouble else max(0.0, min(_AGAIN, self._ledger.next_due(now) - now))

    def _close(self, now: float) -> str | None:
        """Closes what is due; returns what keeps it from that."""
        try:
            for record in self.ledger.due(now):
                self.history.append(record)
                self.ledger.append(record)
                self.statistics.record(record)
                self._tell(recorded_event(record))
            self.history.keep_anchors(self.ledger.anchors.headers)
        except (AgreementError, NoSpace) as error:
            if str(error) != self.trouble:
                log.error("%s", error)
                self._tell(waiting_event(str(error)))
            return str(error)
        return None

    def _anchor(self, now: float) -> None:
        if now < self._anchor_at or not self.ledger.anchors.is_due(at.round for at in self.ledger.closed):
            return
        self._anchor_at = now + _AGAIN
        if any(request.for_anchor for request in self.states.requests.values()):
            return
        donor = self.ledger.source("", now)
        if isinstance(donor, str):
            self._ask_donor(donor).for_anchor = True


def _require_same(brought: Charter, founded: Charter) -> None:
    try:
        brought.require_same(founded)
    except ValueError as error:
        raise Refused(str(error)) from None
