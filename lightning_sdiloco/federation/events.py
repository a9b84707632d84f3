"""What a hub tells its sites of its own accord, written by the codec of messages: see [Note: read strictly].

To a site it goes as an event; from the rank that speaks with the hub to the others as plain values.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, get_args

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.codec import decoded, encoded, plain, read
from lightning_sdiloco.federation.connection import Called, Lost, Recorded, StateWanted, Told, Waiting, Welcomed
from lightning_sdiloco.federation.messages import Payload, Record, StateHeader
from lightning_sdiloco.federation.wire import Event

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


class Tell(Protocol):
    """Tells an event to sites without waiting for them."""

    def __call__(self, event: Event, to: Collection[str] | None = None) -> None:
        """Tells all, or those named."""


def event_of(said: Waiting | Welcomed | Called | StateWanted | StateOffered) -> Event:
    """Returns what is said as an event."""
    return Event(next(kind for kind, own in _KINDS.items() if own is type(said)), {}, encoded(plain(said)))


def record_event(text: bytes) -> Event:
    """Returns the event of a record, given its text."""
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
    """Reads what `to_plain` returned."""
    name, said = value
    if name not in _TOLD:
        raise Malformed("what another rank passed on is nothing that a hub tells")
    told: Told = read(_TOLD[name], said, name.lower())
    return told


def anchor_text(header: StateHeader, parts: Sequence[Payload]) -> bytes:
    """Returns an anchor as it is noted."""
    return encoded(plain((header, parts)))


def anchor_of(text: bytes) -> tuple[StateHeader, tuple[Payload, ...]]:
    """Reads what `anchor_text` returned."""
    header, parts = read(tuple[StateHeader, Parts], decoded(text, _MOST_BYTES), "anchor")
    return header, parts
