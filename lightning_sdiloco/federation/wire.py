"""The errors, size limits, message format and gRPC options shared by a site and its hub.

A message is a strict JSON header followed by raw bytes. Nothing is ever unpickled.
"""

import importlib
import json
import random
import struct
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.codec import KEY, Bytes, Json, decoded

MAX_BLOB = 16 << 30  # bytes of the largest blob, unless a smaller limit is chosen
MAX_RECORD = 128 << 10  # bytes of the largest record, which names blobs but does not contain them


class HubError(RuntimeError):
    """The hub could not perform a request. Retrying may help."""


class HubUnreachable(HubError):
    """The hub does not answer now but may answer later. The request may or may not have arrived and
    can be resent.
    """


class Denied(Refused):
    """The certificate does not belong to the caller or does not permit the call."""


class Busy(HubError):
    """The site's name is in use elsewhere. Retrying may help."""


class NoSpace(HubError):
    """The store is full or has reached its limit. Stored blobs are unchanged."""


class Missing(HubError):
    """The store has no blob with this key, because the blob never existed or was dropped."""


class Altered(HubError):
    """Bytes do not match their digest."""


Failure = HubError | Refused  # the errors that a call to a hub may raise


def checked_key(key: object) -> str:
    """Validates and returns a key, which is then safe as a file name."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise Malformed(f"{str(key)[:80]!r} is not a key. A key consists of 64 hexadecimal digits.")
    return key


def checked_size(size: object, limit: int, kind: str) -> int:
    if type(size) is not int or size < 0:
        raise Malformed(f"the size of a {kind} must be a whole number, not {str(size)[:80]!r}.")
    if size > limit:
        raise Refused(f"a {kind} of {size:,} bytes is too large. The limit is {limit:,} bytes.")
    return size


Extra = Any
"""An object from a package that `extra` imports. Annotations use this alias so that the package is
not required."""

Channel = Extra
Context = Extra
"""`Channel` is a site's gRPC connection, and `Context` is a gRPC call at the hub."""


def extra(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.split(".")[0]
        package = {"grpc": "grpcio", "grpc_health": "grpcio-health-checking"}.get(name, name)
        raise ValueError(
            f"A federation needs {package}, which is not installed. Install all packages for a"
            " federation: pip install 'lightning-sdiloco[federated]'"
        ) from error


def backoff(tries: int, first: float = 1.0, longest: float = 30.0) -> float:
    """Returns a randomized delay in seconds that grows with the number of failed attempts."""
    return random.uniform(0.5, 1.0) * min(longest, first * 2.0 ** min(tries, 16))


# Messages

Header = dict[str, Json]

PROTOCOL = 4  # version of the messages
# The oldest version of a site that a hub supports. The hub of a run is updated before its sites.
OLDEST = 3
# Bytes of the largest piece of a blob in a stream, after the header.
CHUNK = 256 << 10
MAX_HEADER = 64 << 10
# gRPC refuses larger messages by their length, before they take memory.
MAX_MESSAGE = 8 + MAX_HEADER + CHUNK

_LENGTH = struct.Struct(">I")


def pack(header: Header, body: Bytes = b"") -> bytes:
    try:
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"the header of a message cannot be written as JSON: {error}") from error
    if len(text) > MAX_HEADER or len(body) > CHUNK:
        raise Malformed(
            f"a message is limited to {MAX_HEADER:,} bytes of header and {CHUNK:,} of body."
        )
    return b"".join((_LENGTH.pack(len(text)), text, body))


def unpack(message: bytes) -> tuple[Header, bytes]:
    if len(message) < _LENGTH.size:
        raise Malformed("a message is too short to contain the length of its header.")
    (length,) = _LENGTH.unpack_from(message)
    end = _LENGTH.size + length
    if length > MAX_HEADER or end > len(message):
        raise Malformed(f"a header of {length:,} bytes is too long for the message.")
    header = decoded(message[_LENGTH.size : end], MAX_HEADER)
    if not isinstance(header, dict):
        raise Malformed("the header of a message is not a JSON object.")
    return header, message[end:]


# gRPC

SERVICE = "sdiloco.Hub"

_WINDOW = 2 << 20

_SIZES: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # On a long link, a connection carries one window per round trip; gRPC's default starts at 64
    # KiB.
    ("grpc.http2.lookahead_bytes", _WINDOW),
    # The probe would make the window as large as the link can fill, and a slow writer would buffer
    # that many bytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.write_buffer_size", 256 << 10),
]
_PING_MS = 10_000
# Connecting takes up to six trips to the hub or back, for TCP, TLS and HTTP/2.
LONGEST_CONNECTING_MS = 20_000

CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    *_SIZES,
    # Each channel uses a separate connection. By default, gRPC shares one connection between
    # channels to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # This option also limits the time for connecting. A site 2 s away needs 12 s.
    ("grpc.min_reconnect_backoff_ms", LONGEST_CONNECTING_MS),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_SIZES,
    # Otherwise, two hubs could listen on one port, each with some of the sites.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_metadata_size", 8 << 10),
    # A client that connects and sends nothing is disconnected. A site 2 s away needs 12 s.
    ("grpc.server_handshake_timeout_ms", LONGEST_CONNECTING_MS),
]

CODES: Mapping[type[HubError | Refused], str] = {
    Denied: "PERMISSION_DENIED",
    Malformed: "INVALID_ARGUMENT",
    Refused: "FAILED_PRECONDITION",
    Busy: "ABORTED",
    HubUnreachable: "UNAVAILABLE",
    NoSpace: "RESOURCE_EXHAUSTED",
    Missing: "NOT_FOUND",
    Altered: "DATA_LOSS",
}
"""The status code for each error. The receiver recreates the error from the code."""

ERRORS: Mapping[str, type[HubError | Refused]] = {code: error for error, code in CODES.items()}

AWAY = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}
