"""The coordinator: a run at its hub. It asks the rules, makes durable what they say, and then tells the sites.

[Note: one at a time] All that happens to a run happens under one lock, the times in between belong to transfers of
blobs. See [Note: durable before visible] in `federation/ledger.py` for the order, which every method here keeps.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from lightning_sdiloco.comm import Busy, Event, MailboxError, NoSpace
from lightning_sdiloco.errors import AgreementError, Refused
from lightning_sdiloco.federation import (
    Answer,
    Beat,
    Call,
    Charter,
    Contribution,
    Hello,
    Ledger,
    Payload,
    Record,
    StateHeader,
)
from lightning_sdiloco.hub.events import (
    Tell,
    call_event,
    recorded_event,
    waiting_event,
    welcome_event,
)
from lightning_sdiloco.hub.gathering import Gathering, require_same
from lightning_sdiloco.hub.history import History
from lightning_sdiloco.hub.state_transfers import StateTransfers
from lightning_sdiloco.hub.statistics import Statistics
from lightning_sdiloco.hub.status import Status, status_of

log = logging.getLogger(__name__)

_TIDY_EVERY = 60.0
_AGAIN = 1.0  # seconds after which something is tried again that did not succeed


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
        self.statistics = Statistics()
        self.trouble: str | None = None
        self._clock = clock
        self._lock = threading.RLock()
        self._tell: Tell = lambda event, to=None: None
        self._wake: Callable[[], None] = lambda: None
        self._gathering = Gathering(sites or 1, history.quorums)
        self._ledger = None if history.charter is None else history.ledger(clock())
        self._arriving: dict[tuple[int, str], tuple[Contribution, str]] = {}
        self._tidy_at = clock() + _TIDY_EVERY
        self._states = StateTransfers(history, clock, lambda event, to=None: self._tell(event, to))

    def start(self, tell: Tell, wake: Callable[[], None]) -> None:
        """Takes what it tells sites with, and what it calls when `tick` may have something to do."""
        self._tell, self._wake = tell, wake

    @property
    def charter(self) -> Charter | None:
        """The charter of the run, once it has been founded."""
        return self.history.charter

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run."""
        if self._ledger is None:
            raise Refused(f"run {self.run!r} has not been founded yet: {self._gathering.missing} more sites are needed")
        return self._ledger

    # Sites come and go

    def agree(self, site: str, charter: Charter) -> Charter:
        """Hears which charter a site brings; returns that of the run, as `Connection.agree` does."""
        with self._lock:
            return self.charter or self._gathering.propose(site, charter)

    def hello(self, hello: Hello, brought: Callable[[], Charter]) -> Iterator[Event]:
        """Takes a site in."""
        if hello.run != self.run:
            raise Refused(f"this hub serves run {self.run!r}, and not {hello.run!r}")
        with self._lock:
            if self.charter is None:
                return iter([self._gather(hello, brought())])
            if hello.charter != self.charter.key:
                require_same(brought(), self.charter)
            return self._welcome(hello)

    def _gather(self, hello: Hello, charter: Charter) -> Event:
        if any(at.round for at in hello.applied):
            raise Refused(
                f"this hub has no run yet, and {hello.site} has applied records of one: start the hub with the ledger"
                " of that run"
            )
        self._gathering.hello(hello, charter)
        log.info("%s is here for the founding; sites that are missing: %d", hello.site, self._gathering.missing)
        return waiting_event(self._ask_founder())

    def _ask_founder(self) -> str:
        """Asks somebody for the state at round 0, if there are enough; returns what is waited for."""
        if self._gathering.missing:
            return f"run {self.run!r} is being founded: {self._gathering.missing} more sites are needed"
        founder = self._gathering.founder
        self._states.ask_founder(founder)
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
        # Records are read one by one, as fast as the site takes them.
        missing = self.history.missing(hello.applied, welcome.kept)
        records = (recorded_event(Record.from_bytes(text)) for _, text in missing)
        calls = [call_event(call) for call in ledger.calls()]
        return itertools.chain([welcome_event(welcome, ledger.anchors.best)], records, calls)

    def beat(self, beat: Beat) -> None:
        """Renews the lease of a site."""
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
        """Takes a contribution, when its payloads are in the store."""
        with self._lock:
            self._arriving.pop((own.fragment, own.site), None)
            answer = self.ledger.examine(own, life)
            if answer is Answer.LATE:
                self.statistics.late(own.site)
                if self.history.holds(own.payloads):
                    self.ledger.contribute(own, life, self._clock())
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
        """Refuses a site that has not been let in."""
        with self._lock:
            member = self._ledger.members.get(site) if self._ledger else self._gathering.hellos.get(site)
            if member is None or member.life != life:
                raise Refused(f"{site} has not said hello")

    def begins(self, site: str, key: str, state: bool) -> None:
        """Hears that a site begins to send a blob."""
        with self._lock:
            self.statistics.begins(site, key, self._clock())
            if state:
                self._states.begins(site)

    def stored(self, site: str, key: str = "", size: int = 0) -> None:
        """Hears that a blob of a site is in the store: something that waited for it may be complete."""
        with self._lock:
            self.statistics.arrived(site, key, size, self._clock())
            for own, life in [own for place, own in self._arriving.items() if place[1] == site]:
                try:
                    self.contribute(own, life)
                except Refused as error:
                    log.info("%s: %s", site, error)
            self._hand_on()

    def skip(self, site: str, life: str, call: Call) -> None:
        """Hears that a site does not answer a call."""
        with self._lock:
            self.ledger.skip(site, life, call, self._clock())
        self._wake()

    # States

    def ask(self, site: str, without: Collection[str] = ()) -> None:
        """Gets a state for a site: from a donor, who is told, or from the anchor."""
        with self._lock:
            self._states.ask(self.ledger, site, frozenset(without))

    def give(self, site: str, name: str, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Takes the state that a site gives, and hands it on when its blobs are in the store."""
        with self._lock:
            self._states.give(site, name, header, parts, self.charter or self._gathering.charter)
            self._hand_on()
        self._wake()

    def _hand_on(self) -> None:
        """Hands on what was given and is complete."""
        for request in self._states.complete():
            if request.founding and request.given:
                self._found(*request.given)
            self._states.hand_on(self.ledger, request)

    def _found(self, header: StateHeader, parts: Sequence[Payload]) -> None:
        self.history.found(self._gathering.charter, header, parts)
        self._ledger = self.history.ledger(self._clock())
        log.info("run %s has been founded", self.run)
        for hello in self._gathering.hellos.values():
            for event in self._welcome(hello):
                self._tell(event, [hello.site])

    def _ask_others(self, gone: str | None = None) -> None:
        """Asks somebody else where a donor does not answer."""
        if self._states.ask_others(self._ledger, gone):
            self._ask_founder()

    # What an operator asks

    def evict(self, site: str) -> None:
        """Throws a site out. A new start of it may join again, with a state of the others."""
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
            self.history.end()
            ledger.end()
            log.warning("an operator ends the run: what is open closes, and then comes the last round")
            for call in ledger.calls():
                self._tell(call_event(call))
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
        """Returns what is to be seen of the run."""
        with self._lock:
            status: Status = {"run": self.run, "founded": self._ledger is not None, "trouble": self.trouble}
            if self._ledger is None:
                return status | {"missing": self._gathering.missing, "here": sorted(self._gathering.hellos)}
            charter = self.charter.summary() if self.charter else None
            return status | {"charter": charter} | status_of(self._ledger, self.statistics, self._clock())

    # What the clock does

    def tick(self) -> float:
        """Closes the rounds that are due, and looks after states, anchors and the store."""
        with self._lock:
            now = self._clock()
            self._ask_others()
            self.trouble = self._go_on(now)
            if self._ledger is None:
                return _AGAIN
            self._states.ask_for_anchor(self._ledger)
            if now >= self._tidy_at:
                self._tidy_at = now + _TIDY_EVERY
                self.history.tidy(self._ledger.kept, self._states.needed())
            return _AGAIN if self.trouble else max(0.0, min(_AGAIN, self._ledger.next_due(now) - now))

    def _go_on(self, now: float) -> str | None:
        """Hands on what is complete and closes what is due; returns what keeps it from that."""
        try:
            self._hand_on()
            if self._ledger:
                self._close(self._ledger, now)
        except (AgreementError, NoSpace) as error:
            if str(error) != self.trouble:
                log.error("%s", error)
                self._tell(waiting_event(str(error)))
            return str(error)
        return None

    def _close(self, ledger: Ledger, now: float) -> None:
        for record in ledger.due(now):
            self.history.append(record)
            ledger.append(record)
            self.statistics.record(record)
            self._tell(recorded_event(record))
            for call in (call for call in ledger.calls() if call.fragment == record.fragment):
                self._tell(call_event(call))
        self.history.keep_anchors(ledger.anchors.headers)
