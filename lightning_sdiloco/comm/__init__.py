"""The door to the network: which ranks form worker groups, and how tensors travel within and between them.

In come a layout of ranks and, later, tensors; out come communicators among the ranks of a group and exchanges between
groups. Only this room makes process groups and issues collectives. It knows bytes: neither what a payload means, nor
fragments, nor the environment in which it was launched. `mailbox` is for sites that are launched on their own, and
share no process group, and need no torch: each half is imported when a name of it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sdiloco.comm.communicator import Communicator
    from lightning_sdiloco.comm.exchange import DeviceBackend, Exchange, Unanswered, VaryingExchange
    from lightning_sdiloco.comm.exchange.on_device import nccl_on
    from lightning_sdiloco.comm.gloo import seldom_woken
    from lightning_sdiloco.comm.layout import GroupLayout, checked_worker_groups
    from lightning_sdiloco.comm.mailbox import (
        EVERYTHING,
        MAX_BLOB,
        MAX_RECORD,
        ROLES,
        Altered,
        BlobStore,
        Busy,
        Denied,
        Event,
        Handler,
        Header,
        Hub,
        HubMailbox,
        HubUnreachable,
        LedgerError,
        MailboxError,
        Malformed,
        Missing,
        NoSpace,
        Peer,
        Push,
        Refused,
        Role,
        SQLiteLedger,
        add_keys,
        bundle_of,
        hub_addresses,
        identity_of,
        init_keys,
        key_of,
        record_event,
        record_of,
        revoke_keys,
        valid_until,
    )
    from lightning_sdiloco.comm.staging import page_locked, to_device, to_host
    from lightning_sdiloco.comm.topology import STAGES, Topology, is_connected, mesh_of, ranks_in, store, world

__all__ = [
    "Altered",
    "BlobStore",
    "Busy",
    "Communicator",
    "Denied",
    "DeviceBackend",
    "EVERYTHING",
    "Event",
    "Exchange",
    "GroupLayout",
    "Handler",
    "Header",
    "Hub",
    "HubMailbox",
    "HubUnreachable",
    "LedgerError",
    "MAX_BLOB",
    "MAX_RECORD",
    "MailboxError",
    "Malformed",
    "Missing",
    "NoSpace",
    "Peer",
    "Push",
    "ROLES",
    "Refused",
    "Role",
    "SQLiteLedger",
    "STAGES",
    "Topology",
    "Unanswered",
    "VaryingExchange",
    "add_keys",
    "bundle_of",
    "checked_worker_groups",
    "hub_addresses",
    "identity_of",
    "init_keys",
    "is_connected",
    "key_of",
    "mesh_of",
    "nccl_on",
    "page_locked",
    "ranks_in",
    "record_event",
    "record_of",
    "revoke_keys",
    "seldom_woken",
    "store",
    "to_device",
    "to_host",
    "valid_until",
    "world",
]

_WITH_TORCH = {
    "Communicator": "communicator",
    "DeviceBackend": "exchange",
    "Exchange": "exchange",
    "GroupLayout": "layout",
    "STAGES": "topology",
    "Topology": "topology",
    "Unanswered": "exchange",
    "VaryingExchange": "exchange",
    "checked_worker_groups": "layout",
    "is_connected": "topology",
    "mesh_of": "topology",
    "nccl_on": "exchange.on_device",
    "page_locked": "staging",
    "ranks_in": "topology",
    "seldom_woken": "gloo",
    "store": "topology",
    "to_device": "staging",
    "to_host": "staging",
    "world": "topology",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports what is asked for: a hub needs no torch, and a training in one world no mailboxes."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH.get(name, 'mailbox')}"), name)
