"""The hub of a federation, and a site's connection to it: the rules joined with the network, clocks and disks.

In come what sites say and send, and what an operator asks; out come records, payloads and states, told to those who
follow. The rules are those of `federation`, bytes travel through `comm`. This room knows no tensor, no model and no
step: what a site trains is the business of the engine, which talks to a `Connection`.
"""

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
from lightning_sdiloco.hub.coordinator import Coordinator
from lightning_sdiloco.hub.history import History
from lightning_sdiloco.hub.in_process import InMemoryJournal, InMemoryStore, InProcessConnection, InProcessHub
from lightning_sdiloco.hub.remote import HubConnection
from lightning_sdiloco.hub.service import HubService
from lightning_sdiloco.hub.status import Status

__all__ = [
    "Coordinator",
    "History",
    "HubConnection",
    "HubService",
    "Status",
    "InMemoryJournal",
    "InMemoryStore",
    "InProcessConnection",
    "InProcessHub",
    "Called",
    "Connection",
    "Lost",
    "Recorded",
    "StateArrived",
    "StateWanted",
    "Told",
    "Waiting",
    "Welcomed",
]
