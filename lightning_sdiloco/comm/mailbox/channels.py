"""What both ends of a gRPC connection have in common: options, the names of calls, and errors as status codes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_sdiloco.comm.mailbox.base import (
    Altered,
    Busy,
    Denied,
    Failure,
    HubUnreachable,
    MailboxError,
    Missing,
    NoSpace,
    checked_blob,
    extra,
    key_of,
)
from lightning_sdiloco.comm.mailbox.frames import MAX_MESSAGE, Header
from lightning_sdiloco.errors import Malformed, Refused

SERVICE = "sdiloco.Hub"


class Event(NamedTuple):
    """What a hub tells a site of its own accord."""

    kind: str
    header: Header
    body: bytes = b""


def record_event(seq: int, record: bytes) -> Event:
    """Returns the event of a record, with a digest: not every connection protects what it carries."""
    return Event("record", {"seq": seq, "digest": key_of(record)}, record)


def record_of(event: Event) -> tuple[int, bytes]:
    """Returns the record of an event."""
    seq = event.header.get("seq")
    if type(seq) is not int:
        raise Malformed("an event of a record says its number.")
    return seq, checked_blob(str(event.header.get("digest")), event.body, f"record {seq}")


_WINDOW = 2 << 20

_SIZES: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # On a long link a connection carries a window per round trip; gRPC's own begins with 64 KiB.
    ("grpc.http2.lookahead_bytes", _WINDOW),
    # It would make the window as large as the link can fill, and whoever writes more slowly would hold that much.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.write_buffer_size", 256 << 10),
]
_PING_MS = 10_000

CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    *_SIZES,
    # Connections of their own; otherwise gRPC joins channels to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Also the time that a connection may take to be made: with less, a site far away never connects.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_SIZES,
    # Two hubs on one port would share the sites among them.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_metadata_size", 8 << 10),
]

CODES: Mapping[type[Exception], str] = {
    Denied: "PERMISSION_DENIED",
    Malformed: "INVALID_ARGUMENT",
    Refused: "FAILED_PRECONDITION",
    Busy: "ABORTED",
    NoSpace: "RESOURCE_EXHAUSTED",
    Missing: "NOT_FOUND",
    Altered: "DATA_LOSS",
}
"""The status code of each error, and with it the error on the other side."""

ERRORS: Mapping[str, Any] = {code: error for error, code in CODES.items()}
"""The error of each status code."""

_AWAY = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}


def status_of(error: Failure) -> Any:
    """Returns gRPC's status code of an error."""
    return getattr(extra("grpc").StatusCode, CODES.get(type(error), "INTERNAL"))


def error_of(error: Any, hub: str) -> Failure:
    """Returns the error that gRPC's stands for."""
    code, details = error.code().name, error.details() or ""
    if code in _AWAY or details.startswith("Concurrent RPC limit"):
        if "andshake" in details or "erification" in details or "SSL" in details:
            details += " (does the hub have keys of the same authority and run, and is TLS on at both ends?)"
        return HubUnreachable(f"hub {hub} does not answer: {code.lower()}, {details[:400]}")
    return ERRORS.get(code, MailboxError)(f"hub {hub}: {details[:1000]}")
