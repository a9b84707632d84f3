"""The rules by which sites come and go: what a round is, who counts in it, and what becomes of what does not.

In come messages, digests and the time, as arguments; out come records, answers and decisions. The ledger is the hub's
side, the follower a site's, and the charter is what a run was founded on. What is made durable, sent, trained and
averaged is the business of those who call. This room knows no network, no clock, no file and no tensor.
"""

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.charter import (
    ANCHOR_EVERY,
    LONGEST_GRACE,
    RETENTION,
    Charter,
    ChosenQuorum,
    Terms,
)
from lightning_sdiloco.federation.codec import CLASS_PATH, NAME, decoded, encoded, plain, read
from lightning_sdiloco.federation.follower import Follower, MergeAction, Progress
from lightning_sdiloco.federation.ledger import Answer, Founding, Ledger
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

__all__ = [
    "ANCHOR_EVERY",
    "All",
    "Answer",
    "Beat",
    "CLASS_PATH",
    "Call",
    "Charter",
    "ChosenQuorum",
    "Contribution",
    "DynamicBackup",
    "Follower",
    "Founding",
    "Hello",
    "LONGEST_GRACE",
    "MergeAction",
    "Ledger",
    "Malformed",
    "NAME",
    "Payload",
    "Position",
    "Progress",
    "Quorum",
    "RETENTION",
    "Record",
    "Refused",
    "Standing",
    "StateHeader",
    "Terms",
    "Timing",
    "Welcome",
    "built_in",
    "chosen",
    "decoded",
    "encoded",
    "plain",
    "quorum_of",
    "read",
]
