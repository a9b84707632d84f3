"""The codec for all text that sites and the hub write. Messages are frozen dataclasses, and their
text is parsed strictly.

[Note: read strictly] Text from the network or a disk is validated before use. The size is checked
first. Every field is then checked against its type hint, including the metadata of an `Annotated`
hint. ``int`` accepts non-negative integers that fit in 64 bits, or the numbers in a `range`.
``float`` accepts finite numbers of at least 0. ``str`` accepts up to 4,096 characters, unless the
hint gives a different maximum or a pattern that the text must match. ``tuple[X, ...]`` accepts up
to a given number of items, or any number of items in a `range`. A named tuple is written as a list
of its fields, and a dataclass as an object with its fields. Dataclasses run further checks in
``__post_init__``. The error for an unknown, missing or duplicate field names that field. Bytes are
not valid JSON, so only messages between the ranks of one site contain them.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache, cached_property, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NewType,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from lightning_sdiloco.errors import Malformed

# The names of sites and runs, which are part of certificates and paths.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
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

RoundNumber = NewType("RoundNumber", int)
"""The number of a fragment's round. Numbering starts at 1, and 0 denotes the state before the first
round. Do not confuse a round number with a fragment index or a step."""

Round = Annotated[RoundNumber, range(1, 2**63)]
Digest = Annotated[int, range(-(2**63), 2**63)]

AnyMessage = TypeVar("AnyMessage", bound="Message")
Default = TypeVar("Default")

Json = Any
"""Any JSON value."""

Hint: TypeAlias = Any
"""A type hint. The `typing` module provides no type for type hints."""


class Message:
    """The base class of all dataclasses that are written as text.

    Attributes:
        most_bytes: The maximum size of the text in bytes. Messages refer to payloads but do not
            contain them.
        sealed: True if the text contains its own key, so that any changed bit is detected.
    """

    most_bytes: ClassVar[int] = 128 << 10
    sealed: ClassVar[bool] = False

    @cached_property
    def seal(self) -> str:
        """The key contained in the text of a sealed message."""
        return key_of(encoded(plain(self)))

    def to_bytes(self) -> bytes:
        fields_by_name = plain(self)
        if self.sealed:
            fields_by_name["key"] = self.seal
        return encoded(fields_by_name)

    @classmethod
    def from_bytes(cls: type[AnyMessage], text: bytes) -> AnyMessage:
        value = decoded(text, cls.most_bytes)
        if cls.sealed and isinstance(value, dict):
            value.pop("key", None)
        message: AnyMessage = read(cls, value, cls.__name__.lower())
        if cls.sealed and message.to_bytes() != text:
            raise Malformed(
                "the text does not match its key because it was damaged in transit or on a disk"
            )
        return message


def absent_if_empty(default: Default) -> Default:
    """Declares a field that is omitted from the text if it is empty, because older ledgers lack the
    field.
    """
    return field(default=default, metadata={"absent_if_empty": True})


def key_of(blob: Bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


# Writing


def encoded(value: object) -> bytes:
    """Returns the canonical text of a JSON value. Equal values have identical bytes."""
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_SCALARS = frozenset({str, int, float, bool, NoneType})


def plain(value: object) -> Json:
    kind: Hint = value.__class__
    if kind in _SCALARS:
        return value
    if isinstance(value, tuple | list):
        return [plain(element) for element in value]
    if hasattr(kind, "__dataclass_fields__"):
        may_lack = _may_lack(kind)
        fields_by_name = {}
        for name in _hints(kind):
            field_value = getattr(value, name)
            if field_value or name not in may_lack:
                fields_by_name[name] = plain(field_value)
        return fields_by_name
    if isinstance(value, Mapping):
        return {name: plain(element) for name, element in value.items()}
    return value


@cache
def _hints(kind: Hint) -> dict[str, Hint]:
    """Returns the type hint of each argument of a dataclass or named tuple."""
    hints = get_type_hints(kind, include_extras=True)
    if not is_dataclass(kind):
        return hints
    return {argument.name: hints[argument.name] for argument in fields(kind) if argument.init}


@cache
def _may_lack(kind: Hint) -> frozenset[str]:
    return frozenset(
        argument.name for argument in fields(kind) if argument.metadata.get("absent_if_empty")
    )


# Reading

_Hints = tuple[Hint, ...]
_Reader = Callable[[object, str], Json]


def decoded(text: bytes, most: int) -> Json:
    if len(text) > most:
        raise Malformed(f"the text has {len(text):,} bytes, but the limit is {most:,}")
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_constant=_no_number)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is not JSON: {error}") from None


def _without_twins(pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    values: dict[str, Json] = {}
    for key, value in pairs:
        if key in values:
            raise Malformed(f"{key[:64]!r} occurs twice")
        values[key] = value
    return values


def _no_number(constant: str) -> NoReturn:
    raise Malformed(f"{constant} is not a number")


def read(hint: Hint, value: object, name: str) -> Any:
    """Converts a JSON value to the type given by a hint, as described in [Note: read strictly]."""
    return _reader(hint)(value, name)


@cache
def _reader(hint: Hint) -> _Reader:
    """Returns the function that reads values of a type hint. Functions are cached, because a text
    contains many values of only a few types.
    """
    limit = None
    form: Hint = get_origin(hint)
    if form is Annotated:
        hint, limit = get_args(hint)
    kind: Hint = get_origin(hint) or hint
    arguments = get_args(hint)
    if kind in (Union, UnionType):
        return partial(_read_union, arguments)
    if kind in _READERS:
        return partial(_READERS[kind], arguments, limit)
    if issubclass(kind, tuple):
        return partial(_read_tuple, kind, arguments, limit)
    return partial(_read_dataclass, kind)


@cache
def _readers_of(kind: Hint) -> dict[str, _Reader]:
    return {name: _reader(hint) for name, hint in _hints(kind).items()}


def _read_any(arguments: _Hints, limit: object, value: object, name: str) -> object:
    return value


def _read_bool(arguments: _Hints, limit: object, value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise Malformed(f"{name} is neither true nor false")
    return value


def _read_int(arguments: _Hints, limit: range | None, value: object, name: str) -> int:
    bounds = limit or range(2**63)
    # A bool is an int to Python.
    if type(value) is not int or value not in bounds:
        raise Malformed(f"{name} is not a whole number from {bounds.start} to {bounds.stop - 1}")
    return value


def _read_float(arguments: _Hints, limit: object, value: Json, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise Malformed(f"{name} is not a finite number of at least 0")
    return float(value)


def _read_str(
    arguments: _Hints, limit: "re.Pattern[str] | int | None", value: object, name: str
) -> str:
    if isinstance(limit, re.Pattern):
        if not isinstance(value, str) or not limit.fullmatch(value):
            raise Malformed(f"{name} is not a text like {limit.pattern}")
        return value
    longest = limit or LONGEST_TEXT
    if not isinstance(value, str) or len(value) > longest:
        raise Malformed(f"{name} is not a text of at most {longest} characters")
    return value


def _read_bytes(arguments: _Hints, limit: object, value: object, name: str) -> Bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise Malformed(f"{name} is of type {type(value).__name__}, not bytes")
    return value


def _read_literal(arguments: _Hints, limit: object, value: object, name: str) -> object:
    if value not in arguments:
        raise Malformed(f"{name} is not one of {', '.join(arguments)}")
    return value


def _read_mapping(
    arguments: _Hints, limit: object, value: object, name: str
) -> dict[object, object]:
    if not isinstance(value, dict):
        raise Malformed(f"{name} is not an object")
    key_hint, value_hint = arguments
    return {
        read(key_hint, key, name): read(value_hint, element, f"{name}.{key[:64]}")
        for key, element in value.items()
    }


_READERS: dict[Hint, Callable[..., object]] = {
    Any: _read_any,
    bool: _read_bool,
    int: _read_int,
    RoundNumber: _read_int,
    float: _read_float,
    str: _read_str,
    bytes: _read_bytes,
    Literal: _read_literal,
    Mapping: _read_mapping,
}


def _read_union(arguments: _Hints, value: object, name: str) -> object:
    if value is None and NoneType in arguments:
        return None
    kinds = [kind for kind in arguments if kind is not NoneType]
    # Only one of the two types is written as an object.
    for kind in kinds:
        if is_dataclass(kind) == isinstance(value, dict):
            return read(kind, value, name)
    return read(kinds[0], value, name)


def _read_tuple(
    kind: Hint, arguments: _Hints, limit: int | range | None, value: object, name: str
) -> object:
    if arguments and arguments[-1] is ...:
        sizes = limit if isinstance(limit, range) else range((limit or MOST_FRAGMENTS) + 1)
        if not isinstance(value, list) or len(value) not in sizes:
            raise Malformed(f"{name} is not a list of {sizes.start} to {sizes.stop - 1}")
        reader = _reader(arguments[0])
        return tuple([reader(element, f"{name}[{index}]") for index, element in enumerate(value)])
    readers = {str(index): _reader(hint) for index, hint in enumerate(arguments)}
    if not arguments:
        readers = _readers_of(kind)
    if not isinstance(value, list) or len(value) != len(readers):
        raise Malformed(f"{name} is not a list of {', '.join(readers)}")
    parts = [
        reader(element, f"{name}.{place}")
        for (place, reader), element in zip(readers.items(), value, strict=True)
    ]
    return tuple(parts) if arguments else kind(*parts)


def _read_dataclass(kind: Hint, value: object, name: str) -> object:
    readers = _readers_of(kind)
    may_lack = _may_lack(kind)
    if not isinstance(value, dict):
        raise Malformed(f"{name} is of type {type(value).__name__}, not an object")
    for key in value:
        if key not in readers:
            raise Malformed(f"{name} has no field {key[:64]!r}")
    arguments = {}
    for key in readers:
        if key not in value and key not in may_lack:
            raise Malformed(f"{name} lacks {key!r}")
    for key, reader in readers.items():
        if key in value:
            arguments[key] = reader(value[key], f"{name}.{key}")
    try:
        return kind(**arguments)
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(str(error)) from None
