"""The hub of a federation, and a site's connection to it: the rules joined with the network, clocks and disks.

In come what sites say and send, and what an operator asks; out come records, payloads and states, told to those who
follow. The rules are those of `federation`, bytes travel through `comm`. This room knows no tensor, no model and no
step: what a site trains is the business of the engine, which talks to a `Connection`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.hub.connection import (
    Called,
    Connection,
    Lost,
    Recorded,
    StateArrived,
    StateWanted,
    Told,
    Waiting,
    Welcomed,
)

if TYPE_CHECKING:
    from lightning_sdiloco.hub.coordinator import Coordinator
    from lightning_sdiloco.hub.in_process import InProcessConnection, InProcessHub, InProcessShards
    from lightning_sdiloco.hub.plain import from_plain, to_plain
    from lightning_sdiloco.hub.remote import HubConnection
    from lightning_sdiloco.hub.service import HubService
    from lightning_sdiloco.hub.shards import HubShards, Shards, Wanted, payloads_of, places_of
    from lightning_sdiloco.hub.virtual import VirtualHub, VirtualLink, VirtualTime

__all__ = [
    "Called",
    "Connection",
    "Coordinator",
    "HubConnection",
    "HubService",
    "HubShards",
    "InProcessConnection",
    "InProcessHub",
    "InProcessShards",
    "Lost",
    "Recorded",
    "Shards",
    "StateArrived",
    "StateWanted",
    "Told",
    "VirtualHub",
    "VirtualLink",
    "VirtualTime",
    "Waiting",
    "Wanted",
    "Welcomed",
    "from_plain",
    "payloads_of",
    "places_of",
    "to_plain",
]

_FILES = {
    "Coordinator": "coordinator",
    "HubConnection": "remote",
    "HubService": "service",
    "HubShards": "shards",
    "InProcessConnection": "in_process",
    "InProcessHub": "in_process",
    "InProcessShards": "in_process",
    "Shards": "shards",
    "Wanted": "shards",
    "from_plain": "plain",
    "payloads_of": "shards",
    "places_of": "shards",
    "to_plain": "plain",
    "VirtualHub": "virtual",
    "VirtualLink": "virtual",
    "VirtualTime": "virtual",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports what moves bytes when it is asked for: a training in one world has no use for it."""
        if name not in _FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
