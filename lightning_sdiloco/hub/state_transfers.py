"""Who gives a state to whom: donors are asked, what they give is handed on, and some of it stays as an anchor."""

import logging
from collections.abc import Callable, Collection, Sequence

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import Charter, Ledger, Payload, Position, StateHeader
from lightning_sdiloco.hub.events import Tell, state_event, waiting_event, wanted_event
from lightning_sdiloco.hub.history import History
from lightning_sdiloco.hub.states import StateRequest, States

log = logging.getLogger(__name__)

ANCHOR = "the anchor"
"""The source of a state that the hub itself has kept."""

_AGAIN = 1.0  # seconds after which a donor is looked for again


class StateTransfers:
    """Finds states for those who need one. The coordinator calls it under its lock, with the ledger as it stands."""

    def __init__(self, history: History, clock: Callable[[], float], tell: Tell) -> None:
        self._history, self._clock, self._tell = history, clock, tell
        self._states = States()
        self._anchor_at = clock()

    def ask_founder(self, founder: str) -> None:
        """Asks a site for the state on which the run is founded, unless somebody was asked."""
        if not any(request.founding for request in self._states.requests.values()):
            request = self._states.begin(founder, self._clock(), founding=True)
            self._tell(wanted_event(request.name, founding=True), [founder])

    def ask(self, ledger: Ledger, site: str, without: frozenset[str]) -> None:
        """Gets a state for a site: from a donor, who is told, or from the anchor."""
        now, source = self._clock(), None
        if self._states.of(site):
            return
        request = self._states.to(site, without)
        if request is None:
            source = ledger.source(site, now, without)
            if isinstance(source, str):
                request = self._ask_donor(source)
        if request:
            request.askers[site] = without
        elif isinstance(source, StateHeader) and ANCHOR not in without:
            parts = next(parts for header, parts in self._history.anchors if header == source)
            self._tell(state_event(ANCHOR, source, parts), [site])
        else:
            log.warning("%s needs a state, and nobody has one: waiting for a site that comes back with one", site)
            self._tell(waiting_event("nobody has a state: a site that comes back with one is waited for"), [site])

    def begins(self, site: str) -> None:
        """Hears that a donor begins to send."""
        self._states.sends(site, self._clock())

    def give(self, site: str, name: str, header: StateHeader, parts: Sequence[Payload], charter: Charter) -> None:
        """Takes the state that a site gives; its blobs may still be on their way."""
        request = self._states.take(name, site)
        if request is None:
            raise Refused(f"nobody waits for this state of {site} any more")
        fragments = charter.terms.fragments
        if not len(header.applied) == len(header.digests) == fragments:
            raise Refused(f"a state of this run has {fragments} fragments")
        if request.founding and any(at != Position(0, charter.key) for at in header.applied):
            raise Refused("a run is founded on a state at round 0")
        request.given = header, tuple(parts)

    def complete(self) -> list[StateRequest]:
        """Returns the requests that were answered, with all blobs in the store, and not handed on."""
        given = (request for request in self._states.requests.values() if request.given)
        return [request for request in given if request.given and self._history.holds(request.given[1])]

    def hand_on(self, ledger: Ledger, request: StateRequest) -> None:
        """Hands a state that is complete to those who wanted it."""
        assert request.given is not None, "the request is complete"
        header, parts = request.given
        if request.for_anchor:
            self._history.anchor(header, parts)
            ledger.anchors.add(header)
            log.info("%s has left a state as an anchor", request.donor)
        del self._states.requests[request.name]
        if request.askers:
            self._states.handed(parts, self._clock())
            self._tell(state_event(request.donor, header, parts), list(request.askers))

    def ask_others(self, ledger: Ledger | None, gone: str | None = None) -> bool:
        """Asks somebody else where a donor does not answer, or has gone, or gives no sign of life."""
        founder, now = False, self._clock()
        silent = {site for site, own in ledger.members.items() if own.until <= now} if ledger else ()
        for request in self._states.overdue(now, lambda donor: donor == gone or donor in silent):
            founder = founder or request.founding
            for site, without in request.askers.items():
                if site != gone and ledger:
                    self.ask(ledger, site, without | {request.donor})
        return founder

    def ask_for_anchor(self, ledger: Ledger) -> None:
        """Asks somebody for a state that stays here, if one is due."""
        now = self._clock()
        if now < self._anchor_at or not ledger.anchors.is_due(at.round for at in ledger.closed):
            return
        self._anchor_at = now + _AGAIN
        if any(request.for_anchor for request in self._states.requests.values()):
            return
        donor = ledger.source("", now)
        if isinstance(donor, str):
            self._ask_donor(donor).for_anchor = True

    def needed(self) -> Collection[str]:
        """Returns the keys of blobs that are still to be fetched."""
        return self._states.needed(self._clock())

    def _ask_donor(self, donor: str) -> StateRequest:
        request = self._states.begin(donor, self._clock())
        self._tell(wanted_event(request.name), [donor])
        return request
