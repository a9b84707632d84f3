"""What sites and hub write: contributions and records, and what they say to each other besides.

[Note: the chain] The records of a fragment form a chain: each names the key of the one before it, and the first names
the charter of the run. Two sites whose last records have the same key have applied the same records in the same order,
so one key per fragment says all that there is to say about the history of a site. The sequence number of a record
counts over all fragments. It is where the record lies in the hub's journal, which creates it once and never again.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.codec import (
    MOST_FRAGMENTS,
    MOST_SITES,
    Digest,
    Index,
    Key,
    Life,
    Message,
    Name,
    Positive,
    encoded,
    key_of,
    plain,
    unsaid,
)

_MOST_SHARDS = 4096


class Payload(NamedTuple):
    """Names the bytes of one shard of an outer gradient."""

    key: Key
    size: int


class LaunchId(NamedTuple):
    """Names a contribution among those of one site to one fragment: a life launches once for a round."""

    round: Positive
    life: Life


class Position(NamedTuple):
    """Tells how far the records of a fragment go: one entry of an applied vector."""

    round: int
    key: Key


@dataclass(frozen=True)
class Contribution(Message):
    """Holds what a site launches for a round of a fragment."""

    fragment: Index
    round: Positive
    site: Name
    life: Life
    previous: Key
    weight: int
    digest: Digest
    payloads: Annotated[tuple[Payload, ...], _MOST_SHARDS]
    finite: bool = True
    norm_squared: float = 0.0
    steps: int = unsaid(0)
    exact: bool = unsaid(False)

    @property
    def launch(self) -> LaunchId:
        """Names it among those of its site and fragment."""
        return LaunchId(self.round, self.life)

    @property
    def reason(self) -> Literal["", "not finite", "no samples"]:
        """Why it cannot count whatever the others say; empty if it can."""
        # What a site holds is in the last mean, whether it has trained since or not.
        return "not finite" if not self.finite else "" if self.weight or self.exact else "no samples"


class LeftOut(NamedTuple):
    """Tells who contributed to a round and does not count, and why."""

    site: Name
    reason: Literal["not finite", "no samples", "other outer parameters"]


class Timing(NamedTuple):
    """Tells when a contribution came, by the hub's monotonic clock. It only decides whom the hub waits for."""

    site: Name
    round: Positive
    late: float
    step: float | None = None


@dataclass(frozen=True)
class Record(Message):
    """Says which contributions make a round of a fragment, and thereby who was a member of it."""

    seq: int
    fragment: Index
    round: Positive
    previous: Key
    counted: Annotated[tuple[Contribution, ...], MOST_SITES]
    left_out: Annotated[tuple[LeftOut, ...], MOST_SITES] = ()
    final: bool = False
    timings: Annotated[tuple[Timing, ...], 2 * MOST_SITES] = unsaid(())

    sealed = True

    @cached_property
    def key(self) -> str:
        """The key by which the next record names it."""
        return key_of(encoded(plain(self)))

    @property
    def digest(self) -> int:
        """The digest of the outer parameters after the round before, as agreed."""
        return self.counted[0].digest

    @property
    def position(self) -> Position:
        return Position(self.round, self.key)

    def of(self, site: str) -> Contribution | None:
        return next((own for own in self.counted if own.site == site), None)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Record":
        record = super().from_bytes(data)
        _require_one_round(record)
        return record


def _require_one_round(record: Record) -> None:
    """Refuses a record whose contributions cannot make one round: it would split those who apply it."""
    sites = [own.site for own in record.counted]
    if not sites or sites != sorted(set(sites)):
        raise Malformed("record.counted does not name its sites once each, in their order")
    for own in record.counted:
        if (own.fragment, own.round) != (record.fragment, record.round) or own.reason:
            raise Malformed(f"record.counted has what {own.site} cannot have contributed to this round")
        if own.digest != record.digest or own.previous != record.previous:
            raise Malformed("record.counted was measured against different outer parameters")


@dataclass(frozen=True)
class Hello(Message):
    """Says who a site is and what it has."""

    run: Name
    site: Name
    life: Life
    charter: Key
    applied: tuple[Position, ...]


@dataclass(frozen=True)
class Call(Message):
    """Calls a round: somebody has launched for it, or it is the last."""

    fragment: Index
    round: Positive
    final: bool = False


class Standing(NamedTuple):
    """Tells which life of a site has contributed to the round of a fragment that is open."""

    fragment: Index
    life: Life


@dataclass(frozen=True)
class Welcome(Message):
    """Says what the hub has. A site that has applied more, or something else, refuses it."""

    closed: tuple[Position, ...]
    kept: tuple[Positive, ...]
    standing: Annotated[tuple[Standing, ...], MOST_FRAGMENTS] = ()


@dataclass(frozen=True)
class Beat(Message):
    """Says that a site trains: the one sign of life that counts."""

    site: Name
    life: Life
    follows: bool
    applied: tuple[int, ...]


@dataclass(frozen=True)
class StateHeader(Message):
    """Describes an outer state: that of a donor, or the anchor."""

    applied: tuple[Position, ...]
    digests: tuple[Digest, ...]
