"""The rules by which sites come and go: what a round is, who counts in it, and what becomes of what does not.

In come messages, digests and the time, as arguments; out come records, answers and decisions. The ledger is the hub's
side, the follower a site's, and the charter is what a run was founded on. What is made durable, sent, trained and
averaged is the business of those who call. This room knows no network, no clock, no file and no tensor.
"""

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.anchors import Anchors
from lightning_sdiloco.federation.charter import Charter
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.founding import Founding
from lightning_sdiloco.federation.ledger import Answer, Ledger, Member, OpenRound
from lightning_sdiloco.federation.messages import Beat, Call, Hello, Standing, StateHeader, Welcome
from lightning_sdiloco.federation.parsing import CLASS_PATH, KEY, LIFE, NAME, words
from lightning_sdiloco.federation.progress import Flight, Landing, Progress
from lightning_sdiloco.federation.quorum import All, DynamicBackup, Quorum, built_in, chosen, quorum_of
from lightning_sdiloco.federation.records import Contribution, Launch, LeftOut, Payload, Position, Record, Timing
from lightning_sdiloco.federation.settling import Known, Measurement, Settling
from lightning_sdiloco.federation.terms import (
    ANCHOR_EVERY,
    LONGEST_GRACE,
    RETENTION,
    ChosenQuorum,
    Terms,
    automatic_grace,
)

__all__ = [
    "ANCHOR_EVERY",
    "All",
    "Anchors",
    "Answer",
    "Beat",
    "CLASS_PATH",
    "Call",
    "Charter",
    "ChosenQuorum",
    "Contribution",
    "DynamicBackup",
    "Flight",
    "Follower",
    "Founding",
    "Hello",
    "KEY",
    "Known",
    "LIFE",
    "LONGEST_GRACE",
    "Landing",
    "Launch",
    "LeftOut",
    "Ledger",
    "Malformed",
    "Measurement",
    "Member",
    "NAME",
    "OpenRound",
    "Payload",
    "Position",
    "Progress",
    "Quorum",
    "RETENTION",
    "Record",
    "Refused",
    "Settling",
    "Standing",
    "StateHeader",
    "Terms",
    "Timing",
    "Welcome",
    "automatic_grace",
    "built_in",
    "chosen",
    "quorum_of",
    "words",
]
