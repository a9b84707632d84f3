"""The way between sites of a federation, without a process group that joins them: bytes, keys, and what a hub keeps.

A `Hub` speaks gRPC with certificates at both ends, a `HubMailbox` is a site's end of it, and `SQLiteLedger` and
`BlobStore` are what it keeps. It knows bytes: neither what a record says, nor when one is due. gRPC and cryptography
are the extra ``federated``.
"""

from lightning_sdiloco.comm.mailbox.access import MAY, Peer
from lightning_sdiloco.comm.mailbox.base import (
    EVERYTHING,
    MAX_BLOB,
    MAX_RECORD,
    Altered,
    Busy,
    Denied,
    HubUnreachable,
    MailboxError,
    Missing,
    NoSpace,
    key_of,
)
from lightning_sdiloco.comm.mailbox.blobs import BlobStore
from lightning_sdiloco.comm.mailbox.channels import Event, record_event, record_of
from lightning_sdiloco.comm.mailbox.frames import Header
from lightning_sdiloco.comm.mailbox.hub_client import HubMailbox, bundle_of
from lightning_sdiloco.comm.mailbox.hub_server import Handler, Hub, Push
from lightning_sdiloco.comm.mailbox.keys import ROLES, Role, add_keys, identity_of, init_keys, revoke_keys, valid_until
from lightning_sdiloco.comm.mailbox.ledger import LedgerError, SQLiteLedger
from lightning_sdiloco.comm.mailbox.link import hub_addresses
from lightning_sdiloco.errors import Malformed, Refused

__all__ = [
    "EVERYTHING",
    "MAX_BLOB",
    "MAX_RECORD",
    "MAY",
    "ROLES",
    "Altered",
    "BlobStore",
    "Busy",
    "Denied",
    "Event",
    "Handler",
    "Header",
    "Hub",
    "HubMailbox",
    "HubUnreachable",
    "LedgerError",
    "MailboxError",
    "Malformed",
    "Missing",
    "NoSpace",
    "Peer",
    "Push",
    "Refused",
    "Role",
    "SQLiteLedger",
    "add_keys",
    "bundle_of",
    "hub_addresses",
    "identity_of",
    "init_keys",
    "key_of",
    "record_event",
    "record_of",
    "revoke_keys",
    "valid_until",
]
