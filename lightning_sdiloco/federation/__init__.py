"""Sites that come and go: jobs that are launched on their own, and joined through a hub.

The rules (`charter`, `messages`, `quorum`, `ledger` of the hub, `follower` of a site) know no network, clock, file or
tensor: in come messages, digests and the time, out come records, answers and decisions. The hub makes them durable
(`journal`, `store`), decides (`coordinator`) and serves (`server`, `keys`). A site, which is launched by its
`Federation`, is a loop of the engine (`site`) over a connection (`remote`, or in memory). gRPC and cryptography are the
extra ``federated``: without them all can be imported, and a hub or a connection says what to install.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.charter import ANCHOR_EVERY, LONGEST_GRACE, RETENTION, Charter, ChosenQuorum, Terms
from lightning_sdiloco.federation.client import HubClient, hub_addresses
from lightning_sdiloco.federation.codec import CLASS_PATH, NAME, decoded, encoded, key_of, plain, read
from lightning_sdiloco.federation.connection import (
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
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.events import from_plain, to_plain
from lightning_sdiloco.federation.follower import Follower, MergeAction, Progress
from lightning_sdiloco.federation.journal import History, LedgerError, SQLiteLedger
from lightning_sdiloco.federation.keys import (
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
from lightning_sdiloco.federation.ledger import Answer, Founding, Ledger
from lightning_sdiloco.federation.memory import (
    InProcessConnection,
    InProcessHub,
    InProcessShards,
    VirtualHub,
    VirtualLink,
    VirtualTime,
)
from lightning_sdiloco.federation.messages import (
    Beat,
    Call,
    Contribution,
    Hello,
    Payload,
    Position,
    Record,
    Standing,
    StateHeader,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.quorum import All, DynamicBackup, Quorum, built_in, chosen, quorum_of
from lightning_sdiloco.federation.remote import HubConnection, HubShards, payloads_of, places_of
from lightning_sdiloco.federation.server import Hub, HubService
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.federation.wire import (
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
)

if TYPE_CHECKING:
    from lightning_sdiloco.federation.config import Federation
    from lightning_sdiloco.federation.waiting import Round, Waits, Way, waits

__all__ = [
    "ANCHOR_EVERY",
    "All",
    "Altered",
    "Answer",
    "Beat",
    "BlobStore",
    "Busy",
    "CLASS_PATH",
    "Call",
    "Called",
    "Charter",
    "ChosenQuorum",
    "Connection",
    "Contribution",
    "Coordinator",
    "Denied",
    "DynamicBackup",
    "EVERYTHING",
    "Event",
    "Federation",
    "Follower",
    "Founding",
    "Header",
    "Hello",
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
    "LONGEST_GRACE",
    "Ledger",
    "LedgerError",
    "Lost",
    "MAX_BLOB",
    "MAX_RECORD",
    "MAY",
    "MailboxError",
    "Malformed",
    "MergeAction",
    "Missing",
    "NAME",
    "NoSpace",
    "Payload",
    "Peer",
    "Position",
    "Progress",
    "Quorum",
    "RETENTION",
    "ROLES",
    "Record",
    "Recorded",
    "Refused",
    "Role",
    "Round",
    "SQLiteLedger",
    "Shards",
    "Standing",
    "StateArrived",
    "StateHeader",
    "StateWanted",
    "Terms",
    "Timing",
    "Told",
    "VirtualHub",
    "VirtualLink",
    "VirtualTime",
    "Waiting",
    "Waits",
    "Wanted",
    "Way",
    "Welcome",
    "Welcomed",
    "add_keys",
    "built_in",
    "bundle_of",
    "chosen",
    "decoded",
    "encoded",
    "from_plain",
    "hub_addresses",
    "identity_of",
    "init_keys",
    "key_of",
    "payloads_of",
    "places_of",
    "plain",
    "quorum_of",
    "read",
    "revoke_keys",
    "to_plain",
    "valid_until",
    "waits",
]

# What needs torch is imported when it is asked for: commands that need no tensor start without.
_WITH_TORCH = {"Federation": "config", "Round": "waiting", "Waits": "waiting", "Way": "waiting", "waits": "waiting"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _WITH_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
