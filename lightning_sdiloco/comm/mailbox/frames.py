"""How a message between hub and site is written: a strict JSON header, then raw bytes. Nothing is ever unpickled."""

import json
import struct
from typing import Any, NoReturn

from lightning_sdiloco.comm.mailbox.base import Bytes
from lightning_sdiloco.errors import Malformed

Header = dict[str, Any]

PROTOCOL = 1
"""Version of the messages; both sides must speak the same."""

CHUNK = 256 << 10
"""Bytes in which blobs travel. The last chunk of a blob may be shorter, all others have exactly these."""

MAX_HEADER = 64 << 10
MAX_MESSAGE = 8 + MAX_HEADER + CHUNK
"""Bytes of the largest message: gRPC refuses a larger one by its length, before it takes memory."""

_LENGTH = struct.Struct(">I")
_INDEX = struct.Struct(">Q")


def pack(header: Header, body: Bytes = b"") -> bytes:
    """Returns a message of a header and bytes."""
    try:
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"the header of a message cannot be written as JSON: {error}") from error
    if len(text) > MAX_HEADER or len(body) > CHUNK:
        raise Malformed(f"a message has at most {MAX_HEADER:,} bytes of header and {CHUNK:,} of body.")
    return b"".join((_LENGTH.pack(len(text)), text, body))


def unpack(message: bytes) -> tuple[Header, bytes]:
    """Returns header and bytes of a message."""
    if len(message) < _LENGTH.size:
        raise Malformed("a message is shorter than the length of its header.")
    (length,) = _LENGTH.unpack_from(message)
    end = _LENGTH.size + length
    if length > MAX_HEADER or end > len(message):
        raise Malformed(f"a header of {length:,} bytes does not fit.")
    header = strict_json(message[_LENGTH.size : end])
    return header, message[end:]


def strict_json(text: bytes) -> Header:
    """Reads a JSON object in which no name comes twice, and every number is one."""
    try:
        header = json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise Malformed("the header of a message is no strict JSON.") from error
    if not isinstance(header, dict):
        raise Malformed("the header of a message is no JSON object.")
    return header


def pack_chunk(index: int, data: Bytes) -> bytes:
    """Returns the message of a chunk of a blob."""
    return b"".join((_INDEX.pack(index), data))


def unpack_chunk(message: bytes) -> tuple[int, memoryview]:
    """Returns number and bytes of a chunk."""
    if len(message) < _INDEX.size:
        raise Malformed("a chunk is shorter than its number.")
    return _INDEX.unpack_from(message)[0], memoryview(message)[_INDEX.size :]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Header:
    header = dict(pairs)
    if len(header) != len(pairs):
        raise ValueError("a field occurs twice")
    return header
