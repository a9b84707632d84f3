"""The messages between sites and the hub, such as contributions and records.

[Note: the chain] The records of a fragment form a chain. Each record contains the key of the
previous record, and the first record contains the key of the run config. Two sites whose last
records have the same key have applied the same records in the same order, so one key per fragment
identifies the whole history of a site. Sequence numbers count the records of all fragments
together. Each number is a position in the hub's journal and is written only once.

[Note: how a site uses its connection] The training thread owns the follower and makes all calls in
the loop of `FederatedWorld`. The network threads access only the copies of the follower's values
made by `HubConnection.hello` and `heartbeat`, so the follower needs no lock. If a connection
breaks, the network threads reconnect, send another hello, and resend all outstanding contributions
without any action by the caller. Events may therefore arrive twice, and the follower must handle
duplicates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.codec import (
    MOST_FRAGMENTS,
    MOST_SITES,
    Bytes,
    Digest,
    Incarnation,
    Index,
    Json,
    Key,
    Message,
    Name,
    Positive,
    Round,
    RoundNumber,
    absent_if_empty,
    decoded,
    encoded,
    plain,
    read,
)
from lightning_sdiloco.federation.run_config import Terms

_MOST_SHARDS = 4096
_SHOWN = 5


class Payload(NamedTuple):
    key: Key
    size: int


class LaunchId(NamedTuple):
    """Identifies a site's contribution to a fragment. Each incarnation launches once per round."""

    round: Round
    incarnation: Incarnation


class RoundId(NamedTuple):
    """Identifies a record."""

    fragment: Index
    round: Round


class Position(NamedTuple):
    """The round and key of a fragment's last record."""

    round: RoundNumber
    key: Key

    @staticmethod
    def start(run_config: str) -> "Position":
        """Returns the position before the first round of a run."""
        return Position(RoundNumber(0), run_config)

    @property
    def next_round(self) -> RoundNumber:
        return RoundNumber(self.round + 1)


@dataclass(frozen=True)
class Contribution(Message):
    fragment: Index
    round: Round
    site: Name
    incarnation: Incarnation
    previous: Key
    weight: int
    digest: Digest
    payloads: Annotated[tuple[Payload, ...], _MOST_SHARDS]
    finite: bool = True
    norm_squared: float = 0.0
    steps: int = absent_if_empty(0)
    exact: bool = absent_if_empty(False)
    # The sum of the learning rates of these inner steps; 0 if unknown.
    path: float = absent_if_empty(0.0)
    # The size of the buffers, from `UntrainedState.size`; 0 if none has changed.
    buffers: float = absent_if_empty(0.0)

    @property
    def launch(self) -> LaunchId:
        """The identifier of the contribution within its site and fragment."""
        return LaunchId(self.round, self.incarnation)

    def builds_on(self, closed: Position) -> bool:
        """Returns whether the contribution belongs to the round after a position."""
        return (closed.next_round, closed.key) == (self.round, self.previous)

    @property
    def reason(self) -> Literal["", "not finite", "no samples"]:
        """The reason why the contribution can never count, or an empty string if it can count."""
        if not self.finite:
            return "not finite"
        # The last mean includes every site, even if it has not trained since its last contribution.
        return "" if self.weight or self.exact else "no samples"


class LeftOut(NamedTuple):
    """The reason why a contribution or its buffers do not count. If the contribution is too long or
    its buffers are too large, ``times`` is the ratio to the usual length or size.
    """

    site: Name
    reason: Literal[
        "not finite",
        "no samples",
        "other outer parameters",
        "too long",
        "too long beside the others",
        "buffers not finite",
        "buffers too large",
    ]
    times: float = 0.0

    @property
    def is_by_guard(self) -> bool:
        """True if the run's guard left the contribution out."""
        return self.reason.startswith("too long")

    @property
    def is_of_buffers(self) -> bool:
        """True if only the buffers do not count."""
        return self.reason.startswith("buffers")


class Timing(NamedTuple):
    """The arrival time of a contribution on the hub's monotonic clock. Timings affect only which
    sites the hub waits for.
    """

    site: Name
    round: Round
    late: float
    step: float | None = None


@dataclass(frozen=True)
class Record(Message):
    """The contributions that make up one round of a fragment."""

    seq: int
    fragment: Index
    round: Round
    previous: Key
    counted: Annotated[tuple[Contribution, ...], MOST_SITES]
    left_out: Annotated[tuple[LeftOut, ...], MOST_SITES] = ()
    final: bool = False
    timings: Annotated[tuple[Timing, ...], 2 * MOST_SITES] = absent_if_empty(())
    mean: Payload | None = absent_if_empty(None)

    sealed = True

    @property
    def key(self) -> str:
        return self.seal

    @property
    def sources(self) -> list[tuple[Payload, ...]]:
        """The payloads to fetch, which are either the hub's mean or the payloads of each counted
        site.
        """
        if self.mean:
            return [(self.mean,)]
        return [contribution.payloads for contribution in self.counted]

    @property
    def digest(self) -> int:
        """The agreed digest of the outer parameters after the previous round."""
        return self.counted[0].digest

    @property
    def position(self) -> Position:
        return Position(self.round, self.key)

    def of(self, site: str) -> Contribution | None:
        index = self.index_of(site)
        return None if index < 0 else self.counted[index]

    def index_of(self, site: str) -> int:
        """Returns the index of a site's contribution among the counted contributions, or -1 if it
        does not count.
        """
        for index, contribution in enumerate(self.counted):
            if contribution.site == site:
                return index
        return -1

    def without(self, site: str) -> LeftOut | None:
        """Returns the reason why a site's contribution does not count."""
        for left_out in self.left_out:
            if left_out.site == site:
                return left_out
        return None

    @property
    def without_buffers(self) -> set[str]:
        """The sites that count without their buffers because the buffers are too large."""
        sites = set[str]()
        for left_out in self.left_out:
            if left_out.reason == "buffers too large":
                sites.add(left_out.site)
        return sites

    def why(self, site: str) -> str:
        """Explains why a site's contribution does not count and what it was compared with."""
        left_out = self.without(site)
        if left_out is None:
            return "it is not in this record"
        if left_out.reason == "buffers too large":
            return f"its buffers are {left_out.times:.4g} times as large as usual"
        if not left_out.is_by_guard:
            return left_out.reason
        sites = [contribution.site for contribution in self.counted]
        names = ", ".join(sites[:_SHOWN])
        if len(sites) > _SHOWN:
            names += f" and {len(sites) - _SHOWN} more"
        length = f"it is {left_out.times:.4g} times as long as usual"
        if left_out.reason == "too long":
            return f"{length} for {site} itself, in its last rounds and by the growth of {names}"
        return f"{length} beside {names}"

    @classmethod
    def from_bytes(cls, text: bytes) -> "Record":
        """Reads a record. A record whose contributions cannot form one round is rejected, because
        sites that applied such a record would diverge.
        """
        record = super().from_bytes(text)
        sites = [contribution.site for contribution in record.counted]
        if not sites or sites != sorted(set(sites)):
            raise Malformed("record.counted must contain each site at most once, sorted by name")
        for counted in record.counted:
            is_of_round = (counted.fragment, counted.round) == (record.fragment, record.round)
            if not is_of_round or counted.reason:
                raise Malformed(
                    f"record.counted has an impossible contribution of {counted.site} to this round"
                )
            if counted.digest != record.digest or counted.previous != record.previous:
                raise Malformed("record.counted was measured against different outer parameters")
        return record


@dataclass(frozen=True)
class Hello(Message):
    run: Name
    site: Name
    incarnation: Incarnation
    run_config: Key
    applied: tuple[Position, ...]


@dataclass(frozen=True)
class Call(Message):
    """A request to launch for a round. The hub sends calls for the last round and for rounds for
    which a site has already launched.
    """

    fragment: Index
    round: Round
    final: bool = False


class Standing(NamedTuple):
    """The incarnation of the receiving site that has contributed to a fragment's open round."""

    fragment: Index
    incarnation: Incarnation


@dataclass(frozen=True)
class Welcome(Message):
    """The hub's position. A site that has applied more records than the hub, or different ones,
    refuses this message.
    """

    closed: tuple[Position, ...]
    kept: tuple[Positive, ...]
    standing: Annotated[tuple[Standing, ...], MOST_FRAGMENTS] = ()
    rolled_back: bool = absent_if_empty(False)
    terms: Terms | None = absent_if_empty(None)  # if they were amended
    founded_again: bool = absent_if_empty(False)


@dataclass(frozen=True)
class Heartbeat(Message):
    """The heartbeat of a training site. No other heartbeat renews a lease.

    Attributes:
        trained_steps: The number of inner steps that this incarnation has trained, multiplied by
            the number of fragments.
        lost_steps: The number of inner steps whose contributions were dropped because they were
            late.
        inner_lr: The largest inner learning rate at the last launch.
        cosine: The cosine between the last counted contribution and the mean of the other
            contributions, in percent.
        against: How many of the last 16 contributions pointed against the mean of the other sites.
    """

    site: Name
    incarnation: Incarnation
    follows: bool
    applied: tuple[int, ...]
    trained_steps: int = absent_if_empty(0)
    lost_steps: int = absent_if_empty(0)
    inner_lr: float | None = absent_if_empty(None)
    cosine: Annotated[int, range(-100, 101)] = absent_if_empty(0)
    against: int = absent_if_empty(0)


@dataclass(frozen=True)
class StepCounts(Message):
    """The inner steps that a site has trained in total, including those before its checkpoint, and
    the inner steps that it plans in total, if known. Each heartbeat contains them next to the
    `Heartbeat`, because earlier hubs ignore unknown entries there.
    """

    trained: int = 0
    planned: int | None = None


@dataclass(frozen=True)
class StateHeader(Message):
    applied: tuple[Position, ...]
    digests: tuple[Digest, ...]


# Events of a site, from its connection


@dataclass(frozen=True)
class Waiting:
    """The hub is waiting, for example for disk space or for enough sites to found the run. Nothing
    is wrong with this site.
    """

    why: Annotated[str, 1 << 17]


@dataclass(frozen=True)
class Welcomed:
    """The hub has accepted this site. This event answers every hello and is the first event on
    every connection.
    """

    welcome: Welcome
    snapshot: StateHeader | None = None


@dataclass(frozen=True)
class Called:
    """A site has launched for a round, or the round is the last round of the run."""

    call: Call
    own: Contribution | None = None


@dataclass(frozen=True)
class Recorded:
    """A round has closed. Records may arrive in any order and more than once."""

    record: Record
    blobs: Mapping[str, Bytes] | None


@dataclass(frozen=True)
class Amended:
    """An operator has amended the terms of the run."""

    terms: Terms


@dataclass(frozen=True)
class InnerRate:
    """The median inner learning rate of the connected sites, sent to a joining site."""

    rate: float


@dataclass(frozen=True)
class StepsOfOthers:
    """The inner steps of the other connected sites, sent to a joining site.

    Attributes:
        trained: The median of the inner steps that they have trained.
        planned: The smallest and largest number of inner steps that they plan in total, or None if
            one of these numbers is unknown.
    """

    trained: int
    planned: tuple[int, int] | None


@dataclass(frozen=True)
class StateWanted:
    """The hub needs this site's state for a joining site, as a snapshot, or to found the run."""

    request: str
    founding: bool = False


@dataclass(frozen=True)
class StateArrived:
    header: StateHeader
    parts: tuple[Bytes, ...]
    source: str


@dataclass(frozen=True)
class Lost:
    """The hub cannot be reached. This event is repeated after each failed attempt."""

    why: Annotated[str, 1 << 17]
    is_busy: bool = False


NO_STATE = "no site has a state"
"""The reason given to a site that is waiting for a state."""

_PlainEvent = Waiting | Welcomed | Called | Amended | InnerRate | StepsOfOthers | StateWanted
SiteEvent = _PlainEvent | Recorded | StateArrived | Lost


# On the wire

Parts = Annotated[tuple[Payload, ...], range(1, 513)]  # the names of the blobs of a state
# Enough for two messages: a welcome and a snapshot, or a call and a contribution.
MOST_BYTES = 1 << 18


@dataclass(frozen=True)
class StateOffered:
    """A stored state, with its source site and its blobs."""

    source: str
    header: StateHeader
    parts: Parts


HubEvent = _PlainEvent | Recorded | StateOffered | Lost

_KINDS: dict[str, type[HubEvent]] = {
    "waiting": Waiting,
    "welcome": Welcomed,
    "call": Called,
    "amended": Amended,
    "inner_rate": InnerRate,
    "steps": StepsOfOthers,
    "wanted": StateWanted,
    "state": StateOffered,
}

# The events of a site, by name, for its other ranks.
SITE_EVENTS: dict[str, type[SiteEvent]] = {kind.__name__: kind for kind in get_args(SiteEvent)}


class Snapshot(NamedTuple):
    header: StateHeader
    parts: Parts


class Event(NamedTuple):
    kind: str
    header: dict[str, Json]
    body: bytes = b""


def event_of(event: _PlainEvent | StateOffered) -> Event:
    name = next(name for name, kind in _KINDS.items() if kind is type(event))
    return Event(name, {}, encoded(plain(event)))


def read_event(event: Event) -> HubEvent | None:
    """Reads an event. A record is read without its payloads. Returns None for an unknown kind of
    event, which a newer hub may send.
    """
    if event.kind == "record":
        return Recorded(Record.from_bytes(event.body), None)
    if event.kind == "lost":
        # This event comes from the connection, not from a hub.
        return Lost(str(event.header.get("why")), event.header.get("kind") == "Busy")
    if event.kind not in _KINDS:
        return None
    hub_event: HubEvent = read(_KINDS[event.kind], decoded(event.body, MOST_BYTES), event.kind)
    return hub_event
