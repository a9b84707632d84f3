"""How a file that sites share is written: a digest, a strict JSON header, and bytes. Nothing is ever unpickled."""

import hashlib
import json
import struct
from collections.abc import Sequence

from lightning_sdiloco.comm.mailbox.base import Altered, Bytes
from lightning_sdiloco.comm.mailbox.frames import Header, strict_json
from lightning_sdiloco.errors import Malformed

_LENGTH = struct.Struct(">I")
_DIGEST = hashlib.sha256().digest_size


def seal(header: Header, blobs: Sequence[Bytes] = ()) -> bytes:
    """Returns the bytes of a file."""
    sized = {**header, "sizes": [len(blob) for blob in blobs]}
    text = json.dumps(sized, allow_nan=False, separators=(",", ":")).encode()
    whole = b"".join((_LENGTH.pack(len(text)), text, *blobs))
    return hashlib.sha256(whole).digest() + whole


def unseal(data: bytes, what: str) -> tuple[Header, list[bytes]]:
    """Returns header and bytes of a file."""
    whole = memoryview(data)[_DIGEST:]
    if len(whole) < _LENGTH.size or hashlib.sha256(whole).digest() != data[:_DIGEST]:
        raise Altered(f"{what} was truncated or altered.")
    end = _LENGTH.size + _LENGTH.unpack_from(whole)[0]
    header = strict_json(bytes(whole[_LENGTH.size : end]))
    sizes = header.pop("sizes", None)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise Malformed(f"{what} does not say how long its parts are.")
    if end + sum(sizes) != len(whole):
        raise Malformed(f"{what} has parts of other sizes than it says.")
    blobs = []
    for size in sizes:
        blobs.append(bytes(whole[end : end + size]))
        end += size
    return header, blobs


def digest_of(data: bytes) -> str:
    """Returns the digest with which a file begins."""
    return data[:_DIGEST].hex()
