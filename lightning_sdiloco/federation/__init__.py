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
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower, MergeAction, Progress
from lightning_sdiloco.federation.journal import LedgerError, SQLiteLedger
from lightning_sdiloco.federation.keys import ROLES, Role, add_keys, bundle_at, init_keys, revoke_keys
from lightning_sdiloco.federation.ledger import Answer, Founding, Ledger
from lightning_sdiloco.federation.memory import InProcessHub, VirtualHub, VirtualLink, VirtualTime
from lightning_sdiloco.federation.messages import (
    Beat,
    Call,
    Called,
    Contribution,
    Event,
    Hello,
    Lost,
    Payload,
    Position,
    Record,
    Recorded,
    Standing,
    StateArrived,
    StateHeader,
    StateWanted,
    Timing,
    Told,
    Waiting,
    Welcome,
    Welcomed,
)
from lightning_sdiloco.federation.quorum import All, DynamicBackup, Quorum, chosen, quorum_of
from lightning_sdiloco.federation.remote import HubConnection, HubShards, payloads_of
from lightning_sdiloco.federation.server import Hub, HubService
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.federation.wire import (
    EVERYTHING,
    Altered,
    Busy,
    Denied,
    HubError,
    HubUnreachable,
    Missing,
    NoSpace,
)

if TYPE_CHECKING:
    from lightning_sdiloco.federation.config import Federation
    from lightning_sdiloco.federation.waiting import Round, Waits, Way, waits

# What needs torch is imported when it is asked for: commands that need no tensor start without.
_WITH_TORCH = {"Federation": "config", "Round": "waiting", "Waits": "waiting", "Way": "waiting", "waits": "waiting"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _WITH_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
