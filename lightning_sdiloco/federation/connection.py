"""What hub and sites tell each other: what training hears from its connection, and its texts on the wire.

[Note: how a site uses its connection] One thread, that of training, owns the follower and makes all calls:

    charter = connection.agree(charter)              # before training: the charter of the run, or this one
    follower = Follower(charter.terms, charter.key, connection.site, connection.life)
    connection.hello(follower)                       # from here on nothing waits

    after every inner step:
        for event in connection.events():            # what was heard since
            Welcomed       follower.welcome(event.welcome), and take the outer values of the fragments that it returns;
                           at round 0 perhaps follower.adopt, see `Welcomed`
            Called         follower.hear(event.call)
            Recorded       follower.learn(event.record), and keep event.blobs until it has landed
            StateWanted    connection.give(event.request, follower.header(), parts), between landings
            StateArrived   follower.adopt(event.header, digests); then connection.hello(follower) again
            Waiting, Lost  tell the user; for Lost follower.lose(now), which raises when patience is over
        for call in follower.skips():   connection.skip(call)
        for fragment in follower.launches(step):   connection.contribute(follower.launch(...), blobs)
        for record in follower.due(step):   land it if its blobs are there, and follower.land(...)
        if follower.wants_state:   connection.ask()  # as often as one likes: one question is on its way at a time
        connection.beat(follower)                    # after whatever has changed the follower

    connection.leave(); connection.close()

The network has threads of its own. They see of the follower only what `Connection.hello` and `Connection.beat` have
copied, so it needs no lock. A connection that breaks is made again, hello is said again, and what is outstanding is
sent again: the caller does nothing for it. Everything may therefore be heard twice; the follower knows what to do then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.codec import Bytes, decoded, encoded, plain, read
from lightning_sdiloco.federation.messages import Call, Contribution, Payload, Record, StateHeader, Welcome
from lightning_sdiloco.federation.wire import Event

Wanted = Callable[[Contribution], Sequence[Payload]]
"""Which payloads of a contribution a rank fetches."""

Fetched = Mapping[str, Mapping[str, Bytes] | None]


@dataclass(frozen=True)
class Waiting:
    """Nothing is wrong here, but something is waited for, such as other sites at the founding, or room on a disk."""

    why: Annotated[str, 1 << 17]


@dataclass(frozen=True)
class Welcomed:
    """The hub has let this site in: after every hello, and as the first that is heard on every connection."""

    welcome: Welcome
    anchor: StateHeader | None = None


@dataclass(frozen=True)
class Called:
    """Somebody has launched for a round, or it is the last."""

    call: Call
    own: Contribution | None = None


@dataclass(frozen=True)
class Recorded:
    """A round is closed. Records come in any order, once or more often."""

    record: Record
    blobs: Mapping[str, Bytes] | None


@dataclass(frozen=True)
class StateWanted:
    """The hub wants the state of this site: for a site that joins, as an anchor, or to found the run."""

    request: str
    founding: bool = False


@dataclass(frozen=True)
class StateArrived:
    """The state that was asked for."""

    header: StateHeader
    parts: tuple[Bytes, ...]
    source: str


@dataclass(frozen=True)
class Lost:
    """The hub cannot be reached: at the beginning, and again whenever another try has failed."""

    why: Annotated[str, 1 << 17]
    is_busy: bool = False


Told = Waiting | Welcomed | Called | Recorded | StateWanted | StateArrived | Lost
"""What a site hears from its connection."""


# On the wire

Parts = Annotated[tuple[Payload, ...], range(1, 513)]
"""The names of the blobs of a state, of which there may be so many."""
_MOST_BYTES = 1 << 18  # as much as two messages: a welcome and an anchor, or a call and a contribution


@dataclass(frozen=True)
class StateOffered:
    """Says where a state lies, and whose it is."""

    source: str
    header: StateHeader
    parts: Parts


Said = Waiting | Welcomed | Called | Recorded | StateWanted | StateOffered | Lost

_KINDS: dict[str, type[Said]] = {
    "waiting": Waiting,
    "welcome": Welcomed,
    "call": Called,
    "wanted": StateWanted,
    "state": StateOffered,
}
_TOLD: dict[str, type[Told]] = {kind.__name__: kind for kind in get_args(Told)}


Tell = Callable[..., None]
"""Tells an event to all sites, or to those named (``to=``), without waiting for them."""


def event_of(said: Waiting | Welcomed | Called | StateWanted | StateOffered) -> Event:
    return Event(next(kind for kind, own in _KINDS.items() if own is type(said)), {}, encoded(plain(said)))


def record_event(text: bytes) -> Event:
    return Event("record", {}, text)


def said_in(event: Event) -> Said | None:
    """Reads an event; a record without its payloads. None if it is of a kind that only a newer hub knows."""
    if event.kind == "record":
        return Recorded(Record.from_bytes(event.body), None)
    if event.kind == "lost":
        # The connection says it, no hub.
        return Lost(str(event.header.get("why")), event.header.get("kind") == "Busy")
    if event.kind not in _KINDS:
        return None
    said: Said = read(_KINDS[event.kind], decoded(event.body, _MOST_BYTES), event.kind)
    return said


def to_plain(told: Told) -> tuple[str, Any]:
    """Returns what a site has heard as lists, texts and bytes, for its other ranks."""
    return type(told).__name__, plain(told)


def from_plain(value: tuple[str, Any]) -> Told:
    name, said = value
    if name not in _TOLD:
        raise Malformed("what another rank passed on is nothing that a hub tells")
    told: Told = read(_TOLD[name], said, name.lower())
    return told


def anchor_text(header: StateHeader, parts: Sequence[Payload]) -> bytes:
    return encoded(plain((header, parts)))


def anchor_of(text: bytes) -> tuple[StateHeader, tuple[Payload, ...]]:
    header, parts = read(tuple[StateHeader, Parts], decoded(text, _MOST_BYTES), "anchor")
    return header, parts
