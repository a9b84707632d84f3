"""What sites and hub say to each other, besides payloads and records: hello, welcome, beat, call, and what a state is.

Each message is a frozen dataclass with one text in JSON. The text is bounded and read strictly.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.parsing import (
    KEY,
    LIFE,
    MOST_FRAGMENTS,
    NAME,
    Check,
    boolean,
    decoded,
    encoded,
    listed,
    text,
    whole,
)
from lightning_sdiloco.federation.parsing import fields as fields_of
from lightning_sdiloco.federation.records import MOST_BYTES, Position, position

Said = TypeVar("Said", bound="Message")


class Message:
    """Reads and writes itself: the base of all messages."""

    _checks: ClassVar[dict[str, Check]]

    def to_bytes(self) -> bytes:
        """Returns its text."""
        return encoded({item.name: getattr(self, item.name) for item in fields(self)})  # type: ignore[arg-type]

    @classmethod
    def from_bytes(cls: type[Said], data: bytes) -> Said:
        """Reads its text."""
        return cls(**fields_of(decoded(data, MOST_BYTES), cls.__name__.lower(), **cls._checks))


@dataclass(frozen=True)
class Hello(Message):
    """Says who a site is and what it has."""

    run: str
    site: str
    life: str
    charter: str
    applied: tuple[Position, ...]

    _checks: ClassVar[dict[str, Check]] = {
        "run": text(NAME),
        "site": text(NAME),
        "life": text(LIFE),
        "charter": text(KEY),
        "applied": listed(position, MOST_FRAGMENTS),
    }


@dataclass(frozen=True)
class Call(Message):
    """Calls a round: somebody has launched for it, or it is the last."""

    fragment: int
    round: int
    final: bool = False

    _checks: ClassVar[dict[str, Check]] = {
        "fragment": whole(0, MOST_FRAGMENTS - 1),
        "round": whole(1),
        "final": boolean,
    }


class Standing(NamedTuple):
    """Tells which life of a site has contributed to the round of a fragment that is open."""

    fragment: int
    life: str


def _standing(value: Any, name: str) -> Standing:
    if not isinstance(value, list) or len(value) != len(Standing._fields):
        raise Malformed(f"{name} is no list of {', '.join(Standing._fields)}")
    return Standing(
        whole(0, MOST_FRAGMENTS - 1)(value[0], f"{name}.fragment"),
        text(LIFE)(value[1], f"{name}.life"),
    )


@dataclass(frozen=True)
class Welcome(Message):
    """Says what the hub has. A site that has applied more, or something else, refuses it."""

    closed: tuple[Position, ...]
    kept: tuple[int, ...]
    standing: tuple[Standing, ...] = ()

    _checks: ClassVar[dict[str, Check]] = {
        "closed": listed(position, MOST_FRAGMENTS),
        "kept": listed(whole(1), MOST_FRAGMENTS),
        "standing": listed(_standing, MOST_FRAGMENTS),
    }


@dataclass(frozen=True)
class Beat(Message):
    """Says that a site trains: the one sign of life that counts."""

    site: str
    life: str
    follows: bool
    applied: tuple[int, ...]

    _checks: ClassVar[dict[str, Check]] = {
        "site": text(NAME),
        "life": text(LIFE),
        "follows": boolean,
        "applied": listed(whole(), MOST_FRAGMENTS),
    }


@dataclass(frozen=True)
class StateHeader(Message):
    """Describes an outer state: that of a donor, or the anchor."""

    applied: tuple[Position, ...]
    digests: tuple[int, ...]

    _checks: ClassVar[dict[str, Check]] = {
        "applied": listed(position, MOST_FRAGMENTS),
        "digests": listed(whole(-(2**63)), MOST_FRAGMENTS),
    }
