"""Handles states at the hub. A site that needs a state receives one from another site or from a
snapshot.

The coordinator owns the `States` of its run and holds its lock during every call.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_sdiloco.federation.codec import decoded, encoded, plain, read
from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import (
    MOST_BYTES,
    NO_STATE,
    Event,
    Payload,
    RoundId,
    Snapshot,
    StateHeader,
    StateOffered,
    StateWanted,
    Waiting,
    event_of,
)
from lightning_sdiloco.federation.store import BlobStore, InMemoryStore, SQLiteLedger
from lightning_sdiloco.federation.wire import Missing

log = logging.getLogger(__name__)

# The request goes to another site if the first has not started sending its state after this many
# seconds.
_PATIENCE = 60.0
# The time limit in seconds for sending a state and for fetching it.
_SENDING = 3600.0
# A state for which the store had no space is requested again after this many seconds.
_NO_ROOM = 30.0
_SNAPSHOT = "the snapshot"  # the source of a state that the hub itself keeps

Store = BlobStore | InMemoryStore


class Need(NamedTuple):
    """A site's requirements for a state, which are the excluded sources and the rounds that the
    state must include.
    """

    without: frozenset[str] = frozenset()
    beyond: tuple[RoundId, ...] = ()


@dataclass
class StateRequest:
    """A request for a state. The state is sent to every site that requests one before the state
    arrives.

    Attributes:
        name: The identifier of the request.
        donor: The site that must send the state.
        until: The time at which the request goes to another site instead.
        founding: True if the run is founded on the state.
        for_snapshot: True if the hub keeps the state as a snapshot.
        askers: The sites that need the state, with their requirements.
        state: The state, available once the donor has named the blobs of the state.
        sent: The keys of the blobs that the donor has sent or is sending.
        lacks_room: True if the store had no space for a blob, which makes the state incomplete.
    """

    name: str
    donor: str
    until: float
    founding: bool
    for_snapshot: bool
    askers: dict[str, Need] = field(default_factory=dict)
    state: Snapshot | None = None
    sent: set[str] = field(default_factory=set)
    lacks_room: bool = False


class Handed(NamedTuple):
    """A state that sites are fetching. All fetches start before ``begun`` and may last until
    ``until``.
    """

    parts: tuple[Payload, ...]
    askers: tuple[str, ...]
    begun: float
    until: float


class States:
    """The open requests for states and the snapshots at the hub.

    Args:
        notify: A function that sends an event to sites.

    Attributes:
        snapshots: The snapshots at the hub by note name, oldest first.
    """

    def __init__(
        self,
        journal: SQLiteLedger,
        store: Store,
        clock: Callable[[], float],
        notify: Callable[[Event, Collection[str]], None],
    ) -> None:
        self._journal = journal
        self._store = store
        self._clock = clock
        self._notify = notify
        self.snapshots: dict[str, Snapshot] = {}
        for name, text in journal.notes("snapshot/").items():
            self.snapshots[name] = read(Snapshot, decoded(text, MOST_BYTES), "snapshot")
        self._requests: dict[str, StateRequest] = {}
        self._handed: list[Handed] = []

    def keys(self, ledger: Ledger) -> set[str]:
        """Returns the keys of all blobs that requests, fetches and snapshots still need."""
        self._forget_fetched(ledger)
        states = [handed.parts for handed in self._handed]
        states += [snapshot.parts for snapshot in self.snapshots.values()]
        states += [request.state.parts for request in self._requests.values() if request.state]
        keys = {part.key for parts in states for part in parts}
        return keys.union(*(request.sent for request in self._requests.values()))

    def _forget_fetched(self, ledger: Ledger) -> None:
        """Removes the states that no site is fetching anymore."""
        now = self._clock()
        sites = set(ledger.present(now))
        fetching = {site for site in sites if not ledger.members[site].follows}
        handed = []
        for state in self._handed:
            is_fetched = now < state.until and bool(fetching.intersection(state.askers))
            if is_fetched or now < state.begun:
                handed.append(state)
        self._handed = handed

    # Requests

    def ask(self, ledger: Ledger, site: str, need: Need) -> None:
        """Obtains a state for a site from a donor or from the snapshot."""
        if any(site in request.askers for request in self._requests.values()):
            return
        request = self._open_request(ledger, site, need)
        source = None
        if request is None:
            source = ledger.source(site, self._clock(), need.without, need.beyond)
            if isinstance(source, str):
                request = self.ask_donor(source)
        if request:
            request.askers[site] = need
        elif isinstance(source, StateHeader) and _SNAPSHOT not in need.without:
            snapshots = self.snapshots.values()
            parts = next(snapshot.parts for snapshot in snapshots if snapshot.header == source)
            self._hand(parts, (site,), ledger.terms.lease)
            self._notify(event_of(StateOffered(_SNAPSHOT, source, parts)), [site])
        else:
            log.warning(
                "%s needs a state, but no site has one. Waiting for a site that returns with a"
                " state",
                site,
            )
            why = f"{NO_STATE}, so the hub is waiting for a site that returns with one"
            self._notify(event_of(Waiting(why)), [site])

    def _open_request(self, ledger: Ledger, site: str, need: Need) -> StateRequest | None:
        """Returns an open request whose state can also serve a site."""
        for request in self._requests.values():
            is_open = not request.founding and request.state is None
            is_other = request.donor not in {site, *need.without}
            if is_open and is_other and ledger.has_applied(request.donor, need.beyond):
                return request
        return None

    def ask_donor(
        self, donor: str, founding: bool = False, for_snapshot: bool = False
    ) -> StateRequest:
        name = secrets.token_hex(8)
        until = self._clock() + _PATIENCE
        request = StateRequest(name, donor, until, founding, for_snapshot)
        self._requests[name] = request
        self._notify(event_of(StateWanted(name, founding)), [donor])
        return request

    @property
    def founds(self) -> bool:
        """True if the founder's state has been requested."""
        return any(request.founding for request in self._requests.values())

    @property
    def awaits_snapshot(self) -> bool:
        return any(request.for_snapshot for request in self._requests.values())

    def note_sending(self, donor: str, key: str) -> None:
        """Registers a blob that a donor is sending and extends the time for the remaining blobs."""
        for request in self._requests.values():
            if request.donor == donor and not request.lacks_room:
                request.sent.add(key)
                request.until = max(request.until, self._clock() + _SENDING)

    def note_no_room(self, donor: str) -> None:
        """Reschedules a request because the store has no space for a donor's blob. The request is
        repeated later and may go to a different site.
        """
        for request in self._requests.values():
            if request.donor == donor and not (request.lacks_room or request.state):
                request.lacks_room = True
                request.sent.clear()
                request.until = self._clock() + _NO_ROOM

    def request(self, name: str, donor: str) -> StateRequest | None:
        """Returns a request if it is still assigned to this donor."""
        request = self._requests.get(name)
        return request if request and request.donor == donor else None

    def complete(self) -> list[tuple[StateRequest, Snapshot]]:
        """Returns the requests whose states have fully arrived in the store."""
        return [
            (request, request.state)
            for request in self._requests.values()
            if request.state and holds(self._store, request.state.parts)
        ]

    def hand_on(self, request: StateRequest, state: Snapshot, lease: float) -> None:
        """Ends a request by offering the state to the sites that need it."""
        del self._requests[request.name]
        if request.askers:
            self._hand(state.parts, list(request.askers), lease)
            offered = StateOffered(request.donor, state.header, state.parts)
            self._notify(event_of(offered), list(request.askers))

    def _hand(self, parts: Sequence[Payload], askers: Sequence[str], lease: float) -> None:
        now = self._clock()
        self._handed.append(Handed(tuple(parts), tuple(askers), now + lease, now + _SENDING))

    def fetched_by(self, site: str) -> list[Payload]:
        """Returns the blobs of the states that a site is fetching."""
        return [part for handed in self._handed if site in handed.askers for part in handed.parts]

    def damaged_snapshots(self, blobs: Collection[Payload]) -> list[StateHeader]:
        """Returns the snapshots that contain any of the given damaged blobs."""
        snapshots = self.snapshots.values()
        return [
            snapshot.header for snapshot in snapshots if set(blobs).intersection(snapshot.parts)
        ]

    def give_up(self, ledger: Ledger | None, gone: str | None) -> bool:
        """Reassigns requests to other sites if the donor does not answer, has left, or no longer
        sends heartbeats. Returns whether one of these donors was the founder.
        """
        if not self._requests:
            return False
        now = self._clock()
        lost_donors = {gone}
        if ledger:
            members = ledger.members.items()
            lost_donors.update(site for site, member in members if member.until <= now)
        failed_requests = [
            request
            for request in self._requests.values()
            if request.until <= now or request.donor in lost_donors
        ]
        for request in failed_requests:
            del self._requests[request.name]
            for site, need in request.askers.items():
                if site != gone and ledger:
                    without = need.without | {request.donor}
                    self.ask(ledger, site, need._replace(without=without))
        return any(request.founding for request in failed_requests)

    # Snapshots

    def keep(self, state: Snapshot, notes: Mapping[str, bytes]) -> None:
        """Stores a state as a snapshot, along with additional notes."""
        numbers = [int(name.partition("/")[2]) for name in self.snapshots]
        name = f"snapshot/{1 + max(numbers, default=-1):06d}"
        self._journal.note({**notes, name: encoded(plain(state))})
        self.snapshots[name] = state

    def drop_all_but(self, headers: Collection[StateHeader]) -> bool:
        """Drops all snapshots except the given ones and returns whether any were dropped."""
        dropped = []
        for name, snapshot in self.snapshots.items():
            if snapshot.header not in headers:
                dropped.append(name)
        if dropped:
            self._journal.note(dict.fromkeys(dropped))
            for name in dropped:
                del self.snapshots[name]
        return bool(dropped)

    def snapshots_until(self, rounds: Sequence[int]) -> dict[str, Snapshot]:
        """Returns the snapshots that were taken at or before the given rounds."""
        snapshots = {}
        for name, snapshot in self.snapshots.items():
            positions = zip(snapshot.header.applied, rounds, strict=True)
            if all(position.round <= round for position, round in positions):
                snapshots[name] = snapshot
        return snapshots

    @property
    def oldest_round(self) -> int:
        """The last round in the oldest snapshot."""
        for snapshot in self.snapshots.values():
            return max((position.round for position in snapshot.header.applied), default=0)
        return 0

    @property
    def snapshot_bytes(self) -> int:
        """The size of the largest snapshot."""
        sizes = [_nbytes(snapshot) for snapshot in self.snapshots.values()]
        return max(sizes, default=0)


def holds(store: Store, parts: Sequence[Payload]) -> bool:
    """Returns whether all given blobs are in a store."""
    try:
        return all(store.size(part.key) == part.size for part in parts)
    except Missing:
        return False


def _nbytes(snapshot: Snapshot) -> int:
    return sum(part.size for part in snapshot.parts)
