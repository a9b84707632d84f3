"""How sites of a federation leave blobs and records for each other, without a process group that joins them.

A `Mailbox` has four methods. Behind it is memory, a folder or bucket, or a `Hub`, which speaks gRPC with certificates
at both ends. It knows bytes: neither what a record says, nor when one is due. gRPC and cryptography are the extra
``federated``; without them all but `Hub`, `HubMailbox` and keys can be used.
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
    Mailbox,
    MailboxError,
    Missing,
    NoSpace,
    NotActive,
    key_of,
)
from lightning_sdiloco.comm.mailbox.blobs import BlobStore
from lightning_sdiloco.comm.mailbox.channels import Event, record_event, record_of
from lightning_sdiloco.comm.mailbox.etcd_ledger import EtcdLedger, EtcdSeat
from lightning_sdiloco.comm.mailbox.folder import FolderMailbox
from lightning_sdiloco.comm.mailbox.folder_client import FolderHubMailbox
from lightning_sdiloco.comm.mailbox.folder_hub import FolderHub
from lightning_sdiloco.comm.mailbox.folder_ledger import FolderLedger, FolderSeat
from lightning_sdiloco.comm.mailbox.folder_log import read_log
from lightning_sdiloco.comm.mailbox.frames import Header
from lightning_sdiloco.comm.mailbox.hub_client import HubMailbox, bundle_of
from lightning_sdiloco.comm.mailbox.hub_server import Handler, Hub, Push
from lightning_sdiloco.comm.mailbox.in_process import InProcessMailbox
from lightning_sdiloco.comm.mailbox.keys import ROLES, Role, add_keys, identity_of, init_keys, revoke_keys, valid_until
from lightning_sdiloco.comm.mailbox.ledger import LedgerError, SQLiteLedger
from lightning_sdiloco.comm.mailbox.ledger_handler import LedgerHandler
from lightning_sdiloco.comm.mailbox.link import hub_addresses
from lightning_sdiloco.comm.mailbox.pulse import Pulses
from lightning_sdiloco.comm.mailbox.shared_files import (
    SharedBlobs,
    SharedFiles,
    Sweeper,
    is_bucket,
    is_folder,
    shared_files,
)
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
    "EtcdLedger",
    "EtcdSeat",
    "Event",
    "FolderHub",
    "FolderHubMailbox",
    "FolderLedger",
    "FolderMailbox",
    "FolderSeat",
    "Handler",
    "Header",
    "Hub",
    "HubMailbox",
    "HubUnreachable",
    "InProcessMailbox",
    "LedgerError",
    "LedgerHandler",
    "Mailbox",
    "MailboxError",
    "Malformed",
    "Missing",
    "NoSpace",
    "NotActive",
    "Peer",
    "Pulses",
    "Push",
    "Refused",
    "Role",
    "SQLiteLedger",
    "SharedBlobs",
    "SharedFiles",
    "Sweeper",
    "add_keys",
    "bundle_of",
    "hub_addresses",
    "identity_of",
    "init_keys",
    "is_bucket",
    "is_folder",
    "key_of",
    "read_log",
    "record_event",
    "record_of",
    "revoke_keys",
    "shared_files",
    "valid_until",
]
