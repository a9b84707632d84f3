"""One codec for all that sites and hub write: a message is a frozen dataclass, and its text is read
strictly.

[Note: read strictly] Text from the network or a disk is checked before it means anything: its size
first, then every field by its type hint, and what that has in its `Annotated`. ``int`` takes whole
numbers from 0 that fit into 64 bits, or a `range`'s; ``float`` finite ones of at least 0; ``str``
up to 4,096 characters, or another number, or all of a pattern; ``tuple[X, ...]`` as many items as a
number or a `range` says; a named tuple is a list of its fields, and a dataclass an object of them,
which checks itself with ``__post_init__``. What is unknown, missing or said twice is refused by its
name. Bytes are no JSON: they stand only in what ranks of one site pass on to each other.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from lightning_sdiloco.errors import Malformed

NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
)  # of sites and runs: it stands in certificates and paths
CLASS_PATH = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*\.)+[A-Za-z_][A-Za-z0-9_]*")
INCARNATION = re.compile(r"[0-9a-f]{16}")
KEY = re.compile(r"[0-9a-f]{64}")
MOST_SITES = 1024
MOST_FRAGMENTS = 65_536
LONGEST_TEXT = 1 << 12

Bytes = bytes | bytearray | memoryview
Name = Annotated[str, NAME]
Incarnation = Annotated[str, INCARNATION]
Key = Annotated[str, KEY]
Index = Annotated[int, range(MOST_FRAGMENTS)]
Positive = Annotated[int, range(1, 2**63)]
Digest = Annotated[int, range(-(2**63), 2**63)]

Said = TypeVar("Said", bound="Message")


class Message:
    """Writes and reads itself: the base of all dataclasses with their own text."""

    most_bytes: ClassVar[int] = (
        128 << 10
    )  # of its text: a message names payloads, it does not hold them
    sealed: ClassVar[bool] = (
        False  # whether the text holds its own key, so that no bit of it changes unseen
    )

    def to_bytes(self) -> bytes:
        said = plain(self)
        return encoded({**said, "key": key_of(encoded(said))} if self.sealed else said)

    @classmethod
    def from_bytes(cls: type[Said], data: bytes) -> Said:
        value = decoded(data, cls.most_bytes)
        if cls.sealed and isinstance(value, dict):
            value.pop("key", None)
        found: Said = read(cls, value, cls.__name__.lower())
        if cls.sealed and found.to_bytes() != data:
            raise Malformed(
                "the text does not match its key: it was damaged on the way or on a disk"
            )
        return found


def unsaid(default: Any) -> Any:
    """A field that a text lacks where it is empty: it came later than some ledgers."""
    return field(default=default, metadata={"unsaid": True})


def key_of(data: Bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Writing


def encoded(value: Any) -> bytes:
    """Returns the one text of a value of JSON: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [plain(own) for own in value]
    if isinstance(value, Mapping):
        return {name: plain(own) for name, own in value.items()}
    if hasattr(kind := value.__class__, "__dataclass_fields__"):
        said = {name: getattr(value, name) for name in _hints(kind)}
        return {
            name: plain(own) for name, own in said.items() if own or name not in _may_lack(kind)
        }
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return (
        {item.name: hints[item.name] for item in fields(kind) if item.init}
        if is_dataclass(kind)
        else hints
    )


@cache
def _may_lack(kind: Any) -> frozenset[str]:
    return frozenset(item.name for item in fields(kind) if item.metadata.get("unsaid"))


# Reading


def decoded(data: bytes, most: int) -> Any:
    if len(data) > most:
        raise Malformed(f"{len(data):,} bytes are more than the {most:,} that are read")
    try:
        return json.loads(data, object_pairs_hook=_without_twins, parse_constant=_no_number)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is not JSON: {error}") from None


def _without_twins(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Malformed(f"{key[:64]!r} is given twice")
        found[key] = value
    return found


def _no_number(constant: str) -> Any:
    raise Malformed(f"{constant} is not a number")


def read(hint: Any, value: Any, name: str) -> Any:
    """Returns what a value of JSON says, given the type that it must have; see [Note: read
    strictly].
    """
    limit: Any = None
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)
    kind = get_origin(hint) or hint
    arguments = get_args(hint)
    if kind in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        # One of two types is written as an object.
        others = [own for own in arguments if own is not NoneType]
        return read(
            next(
                (own for own in others if is_dataclass(own) == isinstance(value, dict)), others[0]
            ),
            value,
            name,
        )
    if kind is Any:
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise Malformed(f"{name} is neither true nor false")
        return value
    if kind is int:
        bounds = limit or range(2**63)
        # A bool is an int to Python.
        if type(value) is not int or value not in bounds:
            raise Malformed(
                f"{name} is not a whole number from {bounds.start} to {bounds.stop - 1}"
            )
        return value
    if kind is float:
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise Malformed(f"{name} is not a finite number of at least 0")
        return float(value)
    if kind is str:
        if isinstance(limit, re.Pattern):
            if not isinstance(value, str) or not limit.fullmatch(value):
                raise Malformed(f"{name} is not a text like {limit.pattern}")
        elif not isinstance(value, str) or len(value) > (limit or LONGEST_TEXT):
            raise Malformed(f"{name} is not a text of at most {limit or LONGEST_TEXT} characters")
        return value
    if kind is bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise Malformed(f"{name} is of type {type(value).__name__}, not bytes")
        return value
    if kind is Literal:
        if value not in arguments:
            raise Malformed(f"{name} is not one of {', '.join(arguments)}")
        return value
    if kind is Mapping:
        if not isinstance(value, dict):
            raise Malformed(f"{name} is not an object")
        key, own = arguments
        return {
            read(key, item, name): read(own, value[item], f"{name}.{item[:64]}") for item in value
        }
    if issubclass(kind, tuple):
        return _read_tuple(kind, arguments, limit, value, name)
    return _read_dataclass(kind, value, name)


def _read_tuple(kind: Any, arguments: Any, limit: int | range | None, value: Any, name: str) -> Any:
    if arguments and arguments[-1] is ...:
        sizes = (
            limit
            if isinstance(limit, range)
            else range((MOST_FRAGMENTS if limit is None else limit) + 1)
        )
        if not isinstance(value, list) or len(value) not in sizes:
            raise Malformed(f"{name} is not a list of {sizes.start} to {sizes.stop - 1}")
        return tuple(read(arguments[0], own, f"{name}[{index}]") for index, own in enumerate(value))
    hints = dict(zip(map(str, range(len(arguments))), arguments, strict=True)) or _hints(kind)
    if not isinstance(value, list) or len(value) != len(hints):
        raise Malformed(f"{name} is not a list of {', '.join(hints)}")
    parts = [
        read(hint, own, f"{name}.{item}")
        for (item, hint), own in zip(hints.items(), value, strict=True)
    ]
    return tuple(parts) if arguments else kind(*parts)


def _read_dataclass(kind: Any, value: Any, name: str) -> Any:
    hints = _hints(kind)
    may_lack = _may_lack(kind)
    if not isinstance(value, dict):
        raise Malformed(f"{name} is of type {type(value).__name__}, not an object")
    for key in value:
        if key not in hints:
            raise Malformed(f"{name} has no field {key[:64]!r}")
    for key in hints:
        if key not in value and key not in may_lack:
            raise Malformed(f"{name} lacks {key!r}")
    found = {
        key: read(hint, value[key], f"{name}.{key}") for key, hint in hints.items() if key in value
    }
    try:
        return kind(**found)
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(str(error)) from None
