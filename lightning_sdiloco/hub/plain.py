"""What a site has heard, as plain values: so the rank that speaks with the hub passes it on to the others."""

from typing import Any

from lightning_sdiloco.federation import Call, Contribution, Malformed, Record, StateHeader, Welcome
from lightning_sdiloco.hub.connection import (
    Called,
    Lost,
    Recorded,
    StateArrived,
    StateWanted,
    Told,
    Waiting,
    Welcomed,
)


def to_plain(told: Told) -> tuple[Any, ...]:
    """Returns it as texts and bytes; of a record without its payloads, of which each rank has its own."""
    match told:
        case Waiting() | Lost():
            return type(told).__name__, told.why
        case Welcomed():
            return "Welcomed", told.welcome.to_bytes(), told.anchor and told.anchor.to_bytes()
        case Called():
            return "Called", told.call.to_bytes(), told.own and told.own.to_bytes()
        case Recorded():
            return "Recorded", told.record.to_bytes()
        case StateWanted():
            return "StateWanted", told.request, told.founding
        case StateArrived():
            return "StateArrived", told.header.to_bytes(), tuple(map(bytes, told.parts)), told.source


def from_plain(value: tuple[Any, ...]) -> Told:
    """Reads what `to_plain` returned."""
    match value:
        case "Waiting", why:
            return Waiting(why)
        case "Lost", why:
            return Lost(why)
        case "Welcomed", welcome, anchor:
            return Welcomed(Welcome.from_bytes(welcome), anchor and StateHeader.from_bytes(anchor))
        case "Called", call, own:
            return Called(Call.from_bytes(call), own and Contribution.from_bytes(own))
        case "Recorded", record:
            return Recorded(Record.from_bytes(record), None)
        case "StateWanted", request, founding:
            return StateWanted(request, founding)
        case "StateArrived", header, parts, source:
            return StateArrived(StateHeader.from_bytes(header), parts, source)
    raise Malformed("what another rank passed on is nothing that a hub tells")
