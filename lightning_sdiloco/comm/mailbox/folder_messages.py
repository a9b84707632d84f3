"""How messages lie in a folder: those to the site that keeps the run, and those from it, in files that are read once.

Every file is one of one writer, which numbers them, and has one reader, which deletes it. What is said to one who kept
the run before, or by it, is dropped: a turn is what a connection to a hub is elsewhere.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_sdiloco.comm.mailbox.base import Bytes
from lightning_sdiloco.comm.mailbox.frames import CHUNK, MAX_HEADER, Header
from lightning_sdiloco.comm.mailbox.sealed import seal, unseal
from lightning_sdiloco.errors import Malformed

IN = "in"
"""The folder of messages to the site that keeps the run."""

OUT = "out"
"""The folder of messages from it."""

MAX_IN = 128 + MAX_HEADER + CHUNK
"""Bytes of the largest message to the site that keeps the run."""

MAX_OUT = 4 << 20
"""Bytes of the largest file from it."""

MAX_ITEMS = 256
"""How much is told in one file."""

_FULL = 1 << 20  # bytes after which a file is not filled any more


class Address(NamedTuple):
    """Who speaks with the site that keeps the run: one connection of one start of a site."""

    role: str
    name: str
    life: str
    nonce: str

    @property
    def text(self) -> str:
        """The address as it stands in names of files."""
        return "~".join(self)

    @staticmethod
    def of(text: str) -> "Address":
        """Reads what `text` says."""
        parts = text.split("~")
        if len(parts) != 4:
            raise Malformed("a message in a folder says in its name who sends it.")
        return Address(*parts)


def in_name(address: str, number: int) -> str:
    """Returns the name of a message to the site that keeps the run."""
    return f"{address}~{number:012d}"


def out_name(turn: int, address: str, number: int) -> str:
    """Returns the name of a file from the site that keeps the run."""
    return f"{turn:012d}~{address}~{number:012d}"


def split(name: str) -> tuple[str, int]:
    """Returns what stands before the number in the name of a file, and the number."""
    rest, _, number = name.rpartition("~")
    if not rest or not number.isdecimal():
        raise Malformed("a message in a folder has a number.")
    return rest, int(number)


class Item(NamedTuple):
    """Something that is told, or an answer."""

    header: Header
    body: bytes = b""


def packed(items: Sequence[Item]) -> bytes:
    """Returns a file with several items."""
    return seal({"items": [item.header for item in items]}, [item.body for item in items])


def unpacked(data: bytes, what: str) -> list[Item]:
    """Reads what `packed` returned."""
    header, bodies = unseal(data, what)
    headers = header.get("items")
    if not isinstance(headers, list) or len(headers) != len(bodies) or not all(isinstance(h, dict) for h in headers):
        raise Malformed(f"{what} does not say what is told.")
    return [Item(*pair) for pair in zip(headers, bodies, strict=True)]


def filled(items: Iterator[Item]) -> list[Item]:
    """Takes as many items as go into one file."""
    taken: list[Item] = []
    size = 0
    for item in items:
        taken.append(item)
        size += len(item.body)
        if size >= _FULL or len(taken) >= MAX_ITEMS:
            break
    return taken


def message(header: Header, body: Bytes = b"") -> bytes:
    """Returns a message to the site that keeps the run."""
    data = seal(header, [bytes(body)])
    if len(data) > MAX_IN:
        raise Malformed(f"a message has at most {MAX_HEADER:,} bytes of header and {CHUNK:,} of body.")
    return data
