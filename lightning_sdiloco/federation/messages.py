"""The messages between sites and the hub: contributions, records, and everything else that they
exchange.

[Note: the chain] The records of a fragment form a chain: each contains the key of the previous one,
and the first contains the key of the run config. Two sites whose last records have the same key
have applied the same records in the same order, so one key per fragment identifies the whole
history of a site. Sequence numbers run over the records of all fragments. They are positions in the
hub's journal, each of which is written only once.

[Note: how a site uses its connection] The training thread owns the follower and makes all calls:
`FederatedWorld` is that loop. The network has its own threads. They access only the copies of the
follower's values that `HubConnection.hello` and `heartbeat` have made, so the follower needs no
lock. If a connection breaks, the network threads reconnect, say hello again, and resend all
outstanding contributions; the caller does nothing. So any event may arrive twice, and the follower
must handle that.
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
    """Identifies a contribution of a site to a fragment: an incarnation launches once per round."""

    round: Round
    incarnation: Incarnation


class RoundId(NamedTuple):
    """Identifies a record."""

    fragment: Index
    round: Round


class Position(NamedTuple):
    """The position of the last record of a fragment."""

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
        """Identifies the contribution within its site and fragment."""
        return LaunchId(self.round, self.incarnation)

    def builds_on(self, closed: Position) -> bool:
        """Returns whether the contribution is for the round after a position."""
        return (closed.next_round, closed.key) == (self.round, self.previous)

    @property
    def reason(self) -> Literal["", "not finite", "no samples"]:
        """The reason why it cannot count, regardless of the other contributions; empty if it
        can.
        """
        if not self.finite:
            return "not finite"
        # The last mean includes every site, even if it has not trained since its last contribution.
        return "" if self.weight or self.exact else "no samples"


class LeftOut(NamedTuple):
    """The reason why a contribution or its buffers do not count. If it is too long, or its buffers
    are too large, ``times`` is the ratio to the usual length or size.
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
        """True if the guard of the run left the contribution out."""
        return self.reason.startswith("too long")

    @property
    def is_of_buffers(self) -> bool:
        """True if only the buffers do not count."""
        return self.reason.startswith("buffers")


class Timing(NamedTuple):
    """The time at which a contribution arrived, on the hub's monotonic clock. It only affects which
    sites the hub waits for.
    """

    site: Name
    round: Round
    late: float
    step: float | None = None


@dataclass(frozen=True)
class Record(Message):
    """The contributions that form a round of a fragment."""

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
        """The payloads to fetch: the hub's mean, or the payloads of each site that counts."""
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
        """Returns the index of a site's contribution among those that count; -1 if it does not
        count.
        """
        for index, contribution in enumerate(self.counted):
            if contribution.site == site:
                return index
        return -1

    def without(self, site: str) -> LeftOut | None:
        """Returns why a site's contribution does not count."""
        for left_out in self.left_out:
            if left_out.site == site:
                return left_out
        return None

    @property
    def without_buffers(self) -> set[str]:
        """The sites that count without their buffers because these are too large."""
        sites = set[str]()
        for left_out in self.left_out:
            if left_out.reason == "buffers too large":
                sites.add(left_out.site)
        return sites

    def why(self, site: str) -> str:
        """Returns a text that says why a site's contribution does not count and what it was
        compared with.
        """
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
        """Refuses a record whose contributions cannot form one round, because sites that apply it
        would diverge.
        """
        record = super().from_bytes(text)
        sites = [contribution.site for contribution in record.counted]
        if not sites or sites != sorted(set(sites)):
            raise Malformed("record.counted must name its sites once each, in their order")
        for counted in record.counted:
            is_of_round = (counted.fragment, counted.round) == (record.fragment, record.round)
            if not is_of_round or counted.reason:
                raise Malformed(
                    f"record.counted has what {counted.site} cannot have contributed to this round"
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
    """Calls a round because a site has launched for it, or because it is the last."""

    fragment: Index
    round: Round
    final: bool = False


class Standing(NamedTuple):
    """The incarnation of a site that has contributed to a fragment's open round."""

    fragment: Index
    incarnation: Incarnation


@dataclass(frozen=True)
class Welcome(Message):
    """The hub's position. A site that has applied more records, or different ones, refuses it."""

    closed: tuple[Position, ...]
    kept: tuple[Positive, ...]
    standing: Annotated[tuple[Standing, ...], MOST_FRAGMENTS] = ()
    rolled_back: bool = absent_if_empty(False)
    terms: Terms | None = absent_if_empty(None)  # if they were amended
    founded_again: bool = absent_if_empty(False)


@dataclass(frozen=True)
class Heartbeat(Message):
    """The heartbeat of a training site, the only kind of heartbeat that counts.

    Attributes:
        trained_steps: The inner steps of this incarnation, counted once for each fragment.
        lost_steps: The part of these steps that was launched late and dropped.
        inner_lr: The largest inner learning rate at the last launch.
        cosine: The cosine between the last contribution that counted and the mean of the others, in
            percent.
        against: How many of the last 16 contributions pointed against the others.
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
class StateHeader(Message):
    applied: tuple[Position, ...]
    digests: tuple[Digest, ...]


# Events of a site, from its connection


@dataclass(frozen=True)
class Waiting:
    """Nothing is wrong at this site, but the hub waits for something, such as other sites at the
    founding, or disk space.
    """

    why: Annotated[str, 1 << 17]


@dataclass(frozen=True)
class Welcomed:
    """The hub has accepted this site. This follows every hello and is the first event of every
    connection.
    """

    welcome: Welcome
    snapshot: StateHeader | None = None


@dataclass(frozen=True)
class Called:
    """A site has launched for a round, or it is the last."""

    call: Call
    own: Contribution | None = None


@dataclass(frozen=True)
class Recorded:
    """A round is closed. Records arrive in any order, once or several times."""

    record: Record
    blobs: Mapping[str, Bytes] | None


@dataclass(frozen=True)
class Amended:
    """An operator has amended the terms of the run."""

    terms: Terms


@dataclass(frozen=True)
class InnerRate:
    """The median inner learning rate of the connected sites, for one that joins them."""

    rate: float


@dataclass(frozen=True)
class StateWanted:
    """The hub needs the state of this site: for a site that joins, as a snapshot, or to found the
    run.
    """

    request: str
    founding: bool = False


@dataclass(frozen=True)
class StateArrived:
    header: StateHeader
    parts: tuple[Bytes, ...]
    source: str


@dataclass(frozen=True)
class Lost:
    """The hub cannot be reached. This event repeats after each failed attempt."""

    why: Annotated[str, 1 << 17]
    is_busy: bool = False


NO_STATE = "no site has a state: waiting for one that comes back with it"
"""The reason why a site waits that needs a state."""

SiteEvent = (
    Waiting | Welcomed | Called | Recorded | Amended | InnerRate | StateWanted | StateArrived | Lost
)


# On the wire

Parts = Annotated[tuple[Payload, ...], range(1, 513)]  # the names of the blobs of a state
# Enough for two messages: a welcome and a snapshot, or a call and a contribution.
MOST_BYTES = 1 << 18


@dataclass(frozen=True)
class StateOffered:
    """The site whose state is stored, and its blobs."""

    source: str
    header: StateHeader
    parts: Parts


HubEvent = (
    Waiting | Welcomed | Called | Recorded | Amended | InnerRate | StateWanted | StateOffered | Lost
)

_KINDS: dict[str, type[HubEvent]] = {
    "waiting": Waiting,
    "welcome": Welcomed,
    "call": Called,
    "amended": Amended,
    "inner_rate": InnerRate,
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


def event_of(
    event: Waiting | Welcomed | Called | Amended | InnerRate | StateWanted | StateOffered,
) -> Event:
    name = next(name for name, kind in _KINDS.items() if kind is type(event))
    return Event(name, {}, encoded(plain(event)))


def read_event(event: Event) -> HubEvent | None:
    """Reads an event; a record is read without its payloads. None if its kind is unknown, because
    the hub is newer.
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
