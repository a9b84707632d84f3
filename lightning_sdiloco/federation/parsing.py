"""Reading JSON that somebody else wrote: bounded, without surprises, and nothing that was not asked for.

Text from the network or a disk is checked before it means anything: its size first, then every field by its type and
range. What is unknown, missing or said twice is refused.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lightning_sdiloco.errors import Malformed

Check = Callable[[Any, str], Any]
"""Returns a value if it is one of its kind, given the name of its field; raises `Malformed` otherwise."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What sites and runs may be called: letters, digits, dots, dashes; it stands in certificates and paths."""
CLASS_PATH = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*\.)+[A-Za-z_][A-Za-z0-9_]*")
LIFE = re.compile(r"[0-9a-f]{16}")
KEY = re.compile(r"[0-9a-f]{64}")
MOST_SITES = 1024
MOST_FRAGMENTS = 65_536
LONGEST_WORD = 1 << 12


def encoded(value: Any) -> bytes:
    """Returns the one text of a value: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def key_of(data: bytes) -> str:
    """Returns the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def decoded(data: bytes, most: int) -> Any:
    """Reads JSON."""
    if len(data) > most:
        raise Malformed(f"{len(data):,} bytes are more than the {most:,} that are read")
    try:
        return json.loads(data, object_pairs_hook=_without_twins, parse_constant=_no_number)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is no JSON: {error}") from None


def sealed(value: Mapping[str, Any]) -> bytes:
    """Returns the text of an object together with the key of that text, so that no bit of it changes unseen."""
    return encoded({**value, "key": key_of(encoded(value))})


def require_sealed(data: bytes, value: Mapping[str, Any]) -> None:
    """Refuses a text that is not, byte for byte, the `sealed` one of what was read from it."""
    if data != sealed(value):
        raise Malformed("the text does not have the key that stands in it: it was damaged on the way or on a disk")


def fields(value: Any, name: str, optional: Collection[str] = (), /, **checks: Check) -> dict[str, Any]:
    """Checks an object: it must have exactly the fields that are named, each of its kind.

    Args:
        value: The object.
        name: What it is called in errors.
        optional: The fields that it may lack: they came later than some ledgers.
        checks: The fields.

    Examples:
        >>> fields({"round": 3}, "call", round=whole(1))
        {'round': 3}
        >>> fields({"round": 3, "site": "a"}, "call", round=whole(1))
        Traceback (most recent call last):
        ...
        lightning_sdiloco.errors.Malformed: call has no use for 'site'
    """
    if not isinstance(value, dict):
        raise Malformed(f"{name} is of type {type(value).__name__}, not an object")
    for key in value:
        if key not in checks:
            raise Malformed(f"{name} has no use for {key[:64]!r}")
    for key in checks:
        if key not in value and key not in optional:
            raise Malformed(f"{name} lacks {key!r}")
    return {key: check(value[key], f"{name}.{key}") for key, check in checks.items() if key in value}


def whole(least: int = 0, most: int = 2**63 - 1) -> Check:
    """Checks a whole number within bounds."""

    def check(value: Any, name: str) -> Any:
        # A bool is an int to Python.
        if type(value) is not int or not least <= value <= most:
            raise Malformed(f"{name} is no whole number from {least} to {most}")
        return value

    return check


def text(pattern: re.Pattern[str]) -> Check:
    """Checks a text that is nothing but what a pattern describes."""

    def check(value: Any, name: str) -> Any:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise Malformed(f"{name} is no text like {pattern.pattern}")
        return value

    return check


def word(value: Any, name: str) -> Any:
    """Checks a text that is not long."""
    if not isinstance(value, str) or len(value) > LONGEST_WORD:
        raise Malformed(f"{name} is no text of at most {LONGEST_WORD} characters")
    return value


def words(value: Any, name: str) -> Any:
    """Checks an object of such texts."""
    if not isinstance(value, dict):
        raise Malformed(f"{name} is no object")
    return {word(key, name): word(own, f"{name}.{key[:64]}") for key, own in value.items()}


def listed(check: Check, most: int) -> Check:
    """Checks a list, each of its items, and how many there are; returns a tuple."""

    def check_all(value: Any, name: str) -> Any:
        if not isinstance(value, list) or len(value) > most:
            raise Malformed(f"{name} is no list of at most {most}")
        return tuple(check(item, f"{name}[{index}]") for index, item in enumerate(value))

    return check_all


def boolean(value: Any, name: str) -> Any:
    """Checks a truth value."""
    if not isinstance(value, bool):
        raise Malformed(f"{name} is neither true nor false")
    return value


def number(value: Any, name: str) -> Any:
    """Checks a finite number that is not negative; returns a float."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise Malformed(f"{name} is no finite number of at least 0")
    return float(value)


def _without_twins(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Malformed(f"{key[:64]!r} is said twice")
        found[key] = value
    return found


def _no_number(constant: str) -> Any:
    raise Malformed(f"{constant} is no number")
