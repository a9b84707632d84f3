"""The hub of a federation, and a site's connection to it: the rules joined with the network, clocks and disks.

In come what sites say and send, and what an operator asks; out come records, payloads and states, told to those who
follow. The rules are those of `federation`. gRPC and cryptography are the extra ``federated``; without them all can be
imported, and a hub or a connection says what to install. This room knows no tensor, no model and no
step: what a site trains is the business of the engine, which talks to a `Connection`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.hub.connection import (
    Called,
    Connection,
    Lost,
    Recorded,
    Shards,
    StateArrived,
    StateWanted,
    Told,
    Waiting,
    Wanted,
    Welcomed,
)

if TYPE_CHECKING:
    from lightning_sdiloco.hub.client import HubClient, hub_addresses
    from lightning_sdiloco.hub.coordinator import Coordinator
    from lightning_sdiloco.hub.events import from_plain, to_plain
    from lightning_sdiloco.hub.keys import (
        MAY,
        ROLES,
        Peer,
        Role,
        add_keys,
        bundle_of,
        identity_of,
        init_keys,
        revoke_keys,
        valid_until,
    )
    from lightning_sdiloco.hub.ledger import History, LedgerError, SQLiteLedger
    from lightning_sdiloco.hub.memory import (
        InProcessConnection,
        InProcessHub,
        InProcessShards,
        VirtualHub,
        VirtualLink,
        VirtualTime,
    )
    from lightning_sdiloco.hub.remote import HubConnection, HubShards, payloads_of, places_of
    from lightning_sdiloco.hub.server import Hub, HubService
    from lightning_sdiloco.hub.store import BlobStore
    from lightning_sdiloco.hub.wire import (
        EVERYTHING,
        MAX_BLOB,
        MAX_RECORD,
        Altered,
        Busy,
        Denied,
        Event,
        Header,
        HubUnreachable,
        MailboxError,
        Missing,
        NoSpace,
        key_of,
    )

__all__ = [
    "Altered",
    "BlobStore",
    "Busy",
    "Called",
    "Connection",
    "Coordinator",
    "Denied",
    "EVERYTHING",
    "Event",
    "Header",
    "History",
    "Hub",
    "HubClient",
    "HubConnection",
    "HubService",
    "HubShards",
    "HubUnreachable",
    "InProcessConnection",
    "InProcessHub",
    "InProcessShards",
    "LedgerError",
    "Lost",
    "MAX_BLOB",
    "MAX_RECORD",
    "MAY",
    "MailboxError",
    "Missing",
    "NoSpace",
    "Peer",
    "ROLES",
    "Recorded",
    "Role",
    "SQLiteLedger",
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
    "add_keys",
    "bundle_of",
    "from_plain",
    "hub_addresses",
    "identity_of",
    "init_keys",
    "key_of",
    "payloads_of",
    "places_of",
    "revoke_keys",
    "to_plain",
    "valid_until",
]

_FILES = {
    "client": "HubClient hub_addresses",
    "coordinator": "Coordinator",
    "events": "from_plain to_plain",
    "keys": "MAY ROLES Peer Role add_keys bundle_of identity_of init_keys revoke_keys valid_until",
    "ledger": "History LedgerError SQLiteLedger",
    "memory": "InProcessConnection InProcessHub InProcessShards VirtualHub VirtualLink VirtualTime",
    "remote": "HubConnection HubShards payloads_of places_of",
    "server": "Hub HubService",
    "store": "BlobStore",
    "wire": "EVERYTHING MAX_BLOB MAX_RECORD Altered Busy Denied Event Header HubUnreachable MailboxError Missing"
    " NoSpace key_of",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports what moves bytes when it is asked for: a training in one world has no use for it."""
        for file, names in _FILES.items():
            if name in names.split():
                return getattr(importlib.import_module(f"{__name__}.{file}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
