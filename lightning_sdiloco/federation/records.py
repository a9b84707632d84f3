"""Contributions and records: what a site launches for, and which contributions count, in which order.

[Note: the chain] The records of a fragment form a chain: each names the key of the one before it, and the first names
the charter of the run. Two sites whose last records have the same key have applied the same records in the same order,
so one key per fragment says all that there is to say about the history of a site. The sequence number of a record
counts over all fragments. It is where the record lies in the mailbox, whose ``append`` creates it once and never again.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.parsing import (
    KEY,
    LIFE,
    MOST_FRAGMENTS,
    MOST_SITES,
    NAME,
    boolean,
    decoded,
    encoded,
    fields,
    key_of,
    listed,
    number,
    require_sealed,
    sealed,
    text,
    whole,
)

MOST_BYTES = 128 << 10
"""How long the text of a record, a contribution or a message may be: it names payloads, it does not hold them."""
_MOST_SHARDS = 4096
_IF_SO = "steps", "exact"
_REASON = ("not finite", "no samples", "other outer parameters")


class Payload(NamedTuple):
    """Names the bytes of one shard of an outer gradient."""

    key: str
    size: int


class Launch(NamedTuple):
    """Names a contribution among those of one site to one fragment: a life launches once for a round."""

    round: int
    life: str


class Position(NamedTuple):
    """Tells how far the records of a fragment go: one entry of an applied vector."""

    round: int
    key: str


@dataclass(frozen=True)
class Contribution:
    """Holds what a site launches for a round of a fragment."""

    fragment: int
    round: int
    site: str
    life: str
    previous: str
    weight: int
    digest: int
    payloads: tuple[Payload, ...]
    finite: bool = True
    norm_squared: float = 0.0
    steps: int = 0
    exact: bool = False

    @property
    def launch(self) -> Launch:
        """Names it among those of its site and fragment."""
        return Launch(self.round, self.life)

    @property
    def reason(self) -> str:
        """Why it cannot count whatever the others say; empty if it can."""
        # What a site holds is in the last mean, whether it has trained since or not.
        return "not finite" if not self.finite else "" if self.weight or self.exact else "no samples"

    def described(self) -> dict[str, Any]:
        """Returns it as an object of JSON."""
        said = {**vars(self), "payloads": [list(payload) for payload in self.payloads]}
        # What is not so is not said: so texts from before it was known have the keys that they had.
        return {name: value for name, value in said.items() if value or name not in _IF_SO}

    def to_bytes(self) -> bytes:
        """Returns its text."""
        return encoded(self.described())

    @staticmethod
    def from_bytes(data: bytes) -> "Contribution":
        """Reads its text."""
        return contribution(decoded(data, MOST_BYTES))


def contribution(value: Any, name: str = "contribution") -> Contribution:
    """Reads a contribution from an object of JSON; raises `Malformed` if it is none."""
    return Contribution(
        **fields(
            value,
            name,
            _IF_SO,
            fragment=whole(0, MOST_FRAGMENTS - 1),
            round=whole(1),
            site=text(NAME),
            life=text(LIFE),
            previous=text(KEY),
            weight=whole(),
            digest=whole(-(2**63)),
            payloads=listed(_payload, _MOST_SHARDS),
            finite=boolean,
            norm_squared=number,
            steps=whole(),
            exact=boolean,
        )
    )


def position(value: Any, name: str = "position") -> Position:
    """Reads a position from an object of JSON; raises `Malformed` if it is none."""
    return Position(*_pair(value, name, whole(), text(KEY)))


class LeftOut(NamedTuple):
    """Tells who contributed to a round and does not count, and why."""

    site: str
    reason: str


class Timing(NamedTuple):
    """Tells when a contribution came, by the hub's monotonic clock. It only decides whom the hub waits for."""

    site: str
    round: int
    late: float
    step: float | None = None


@dataclass(frozen=True)
class Record:
    """Says which contributions make a round of a fragment, and thereby who was a member of it."""

    seq: int
    fragment: int
    round: int
    previous: str
    counted: tuple[Contribution, ...]
    left_out: tuple[LeftOut, ...] = ()
    final: bool = False
    timings: tuple[Timing, ...] = ()

    @cached_property
    def key(self) -> str:
        """The key by which the next record names it."""
        return key_of(encoded(self.described()))

    @property
    def digest(self) -> int:
        """The digest of the outer parameters after the round before, as agreed."""
        return self.counted[0].digest

    @property
    def position(self) -> Position:
        """Where somebody is who has applied it."""
        return Position(self.round, self.key)

    def of(self, site: str) -> Contribution | None:
        """Returns the contribution of a site that counts, if there is one."""
        return next((own for own in self.counted if own.site == site), None)

    def described(self) -> dict[str, Any]:
        """Returns it as an object of JSON."""
        timings = {"timings": [list(entry) for entry in self.timings]} if self.timings else {}
        return {
            **timings,
            "seq": self.seq,
            "fragment": self.fragment,
            "round": self.round,
            "previous": self.previous,
            "counted": [own.described() for own in self.counted],
            "left_out": [list(entry) for entry in self.left_out],
            "final": self.final,
        }

    def to_bytes(self) -> bytes:
        """Returns its text, with its key, so that no bit of it changes unseen."""
        return sealed(self.described())

    @staticmethod
    def from_bytes(data: bytes) -> "Record":
        """Reads its text."""
        value = decoded(data, MOST_BYTES)
        if isinstance(value, dict):
            value.pop("key", None)
        record = Record(
            **fields(
                value,
                "record",
                ("timings",),
                seq=whole(),
                fragment=whole(0, MOST_FRAGMENTS - 1),
                round=whole(1),
                previous=text(KEY),
                counted=listed(contribution, MOST_SITES),
                left_out=listed(_left_out, MOST_SITES),
                final=boolean,
                timings=listed(_timing, 2 * MOST_SITES),
            )
        )
        require_sealed(data, record.described())
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


def _payload(value: Any, name: str) -> Payload:
    return Payload(*_pair(value, name, text(KEY), whole()))


def _left_out(value: Any, name: str) -> LeftOut:
    site, reason = _pair(value, name, text(NAME), lambda value, name: value)
    if reason not in _REASON:
        raise Malformed(f"{name} has a reason that is none of {', '.join(_REASON)}")
    return LeftOut(site, reason)


def _timing(value: Any, name: str) -> Timing:
    if not isinstance(value, list) or len(value) != len(Timing._fields):
        raise Malformed(f"{name} is no list of {', '.join(Timing._fields)}")
    site, round, late, step = value
    return Timing(
        text(NAME)(site, f"{name}.site"),
        whole(1)(round, f"{name}.round"),
        number(late, f"{name}.late"),
        None if step is None else number(step, f"{name}.step"),
    )


def _pair(value: Any, name: str, first: Any, second: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise Malformed(f"{name} is no pair")
    return first(value[0], f"{name}[0]"), second(value[1], f"{name}[1]")
