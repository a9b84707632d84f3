"""How the hub writes what it tells, and how a site reads it: one function for each kind, and one that reads all."""

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from lightning_sdiloco.comm import Event, Header, record_event, record_of
from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation import Call, Contribution, Payload, Record, StateHeader, Welcome

MOST_PARTS = 512
"""In how many parts a state may be given."""


class Tell(Protocol):
    """Tells an event to sites without waiting for them."""

    def __call__(self, event: Event, to: Collection[str] | None = None) -> None:
        """Tells all, or those named."""


class Heard(NamedTuple):
    """What an event of the hub says; which fields are there depends on its kind."""

    kind: str
    text: str = ""
    welcome: Welcome | None = None
    call: Call | None = None
    own: Contribution | None = None
    record: Record | None = None
    header: StateHeader | None = None
    parts: tuple[Payload, ...] = ()
    flag: bool = False


def waiting_event(why: str) -> Event:
    """Says what is waited for."""
    return Event("waiting", {"why": why})


def welcome_event(welcome: Welcome, anchor: StateHeader | None) -> Event:
    """Lets a site in."""
    text = welcome.to_bytes()
    return Event("welcome", {"length": len(text)}, text + (anchor.to_bytes() if anchor else b""))


def call_event(call: Call, own: Contribution | None = None) -> Event:
    """Calls a round; with the contribution that did so, its payloads can be fetched before the round closes."""
    text = call.to_bytes()
    return Event("call", {"length": len(text)}, text + (own.to_bytes() if own else b""))


def recorded_event(record: Record) -> Event:
    """Tells a record."""
    return record_event(record.seq, record.to_bytes())


def wanted_event(request: str, founding: bool = False) -> Event:
    """Asks for a state."""
    return Event("wanted", {"request": request, "founding": founding})


def state_event(source: str, header: StateHeader, parts: Sequence[Payload]) -> Event:
    """Says where a state lies."""
    return Event("state", {"source": source, "parts": [list(part) for part in parts]}, header.to_bytes())


def parts_of(value: object) -> tuple[Payload, ...]:
    """Reads the names of blobs."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_PARTS:
        raise Malformed(f"a state has from 1 to {MOST_PARTS} parts.")
    for part in value:
        if not isinstance(part, list) or len(part) != 2 or not isinstance(part[0], str) or type(part[1]) is not int:
            raise Malformed("a part of a state is named by its key and its size.")
    return tuple(Payload(*part) for part in value)


def text_of(header: Header, name: str) -> bytes:
    """Returns a message that stands in a header as text."""
    text = header.get(name)
    if not isinstance(text, str):
        raise Malformed(f"{name} is missing.")
    return text.encode()


def heard(event: Event) -> Heard:
    """Reads an event."""
    about = event.header
    if event.kind == "record":
        return Heard("record", record=Record.from_bytes(record_of(event)[1]))
    if event.kind in ("waiting", "lost"):
        return Heard(event.kind, str(about.get("why")), flag=about.get("kind") == "Busy")
    if event.kind == "wanted":
        return Heard("wanted", str(about.get("request")), flag=about.get("founding") is True)
    if event.kind == "state":
        header = StateHeader.from_bytes(event.body)
        return Heard("state", str(about.get("source")), header=header, parts=parts_of(about.get("parts")))
    first, second = _halves(event)
    if event.kind == "welcome":
        anchor = StateHeader.from_bytes(second) if second else None
        return Heard("welcome", welcome=Welcome.from_bytes(first), header=anchor)
    if event.kind == "call":
        own = Contribution.from_bytes(second) if second else None
        return Heard("call", call=Call.from_bytes(first), own=own)
    # What a newer hub tells beside that.
    return Heard("unknown")


def _halves(event: Event) -> tuple[bytes, bytes]:
    length = event.header.get("length", 0)
    if type(length) is not int or not 0 <= length <= len(event.body):
        raise Malformed(f"the event {event.kind} does not say where its second half begins.")
    return event.body[:length], event.body[length:]


def anchor_text(header: StateHeader, parts: Sequence[Payload]) -> bytes:
    """Returns an anchor as it is noted."""
    return json.dumps([header.to_bytes().decode(), [list(part) for part in parts]]).encode()


def anchor_of(text: bytes) -> tuple[StateHeader, tuple[Payload, ...]]:
    """Reads what `anchor_text` returned."""
    header, parts = json.loads(text)
    return StateHeader.from_bytes(header.encode()), parts_of(parts)
