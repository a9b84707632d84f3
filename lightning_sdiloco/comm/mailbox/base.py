"""What goes between sites: blobs under their digests, of sizes that are checked, and what may go wrong with them."""

import hashlib
import importlib
import re
from types import ModuleType
from typing import Any

from lightning_sdiloco.errors import Malformed, Refused

Bytes = bytes | bytearray | memoryview

MAX_BLOB = 16 << 30
"""Bytes of the largest blob, if nothing smaller is chosen."""

MAX_RECORD = 128 << 10
"""Bytes of the largest record: it names blobs, it does not hold them."""

EVERYTHING = -1
"""After which number to read, to see all records: they are numbered from 0."""

_KEY = re.compile(r"[0-9a-f]{64}")


class MailboxError(RuntimeError):
    """A mailbox could not do what was asked. Asking again may help; what is `Refused` it does not."""


class HubUnreachable(MailboxError):
    """The hub does not answer, but may later. What was sent may or may not have arrived, and may be sent again."""


class Denied(Refused):
    """The certificate does not speak for who asked, or not for what was asked."""


class Busy(MailboxError):
    """What was asked cannot be had now, since somebody else has it. To ask again may help."""


class NoSpace(MailboxError):
    """The store is full, or may hold no more. What it has is not touched."""


class Missing(MailboxError):
    """There is no blob under this key: it was never there, or has been dropped."""


class Altered(MailboxError):
    """Bytes are not those that their digest announced."""


Failure = MailboxError | Refused
"""What a call of a mailbox may raise."""


def key_of(blob: Bytes) -> str:
    """Returns the key of a blob: its SHA-256 digest.

    Examples:
        >>> key_of(b"")[:8]
        'e3b0c442'
    """
    return hashlib.sha256(blob).hexdigest()


def checked_key(key: Any) -> str:
    """Returns a key that has the form of one, so that it can be the name of a file."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise Malformed(f"{str(key)[:80]!r} is no key: a key has 64 hexadecimal digits.")
    return key


def checked_size(size: Any, limit: int, what: str) -> int:
    """Returns a size that has been announced, before any memory is taken for it."""
    if type(size) is not int or size < 0:
        raise Malformed(f"the size of a {what} is a whole number, and not {str(size)[:80]!r}.")
    if size > limit:
        raise Refused(f"a {what} of {size:,} bytes is too large: at most {limit:,} are taken.")
    return size


def checked_blob(key: str, blob: bytes, where: str) -> bytes:
    """Returns a blob whose digest is its key."""
    if key_of(blob) != key:
        raise Altered(f"{where} holds other bytes than those whose digest is {key}: they have been altered.")
    return blob


def extra(module: str) -> ModuleType:
    """Imports what the extra ``federated`` brings."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = {"grpc": "grpcio"}.get(module.split(".")[0], module.split(".")[0])
        raise ValueError(
            f"A federation needs {package}, which is not installed. Install it with all else that a federation needs: "
            "pip install 'lightning-sdiloco[federated]'"
        ) from error
