"""Messages are strict: whatever is none is refused by one error, before anything is done with it."""

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.client import _checked_parts
from lightning_sdiloco.federation.wire import CHUNK, MAX_HEADER, checked_size, pack, unpack


def message(text: bytes, length: int | None = None) -> bytes:
    return struct.pack(">I", len(text) if length is None else length) + text


def test_a_message_comes_back() -> None:
    header = {"number": 7, "of": {"nested": [1.5, None, True, "Zürich"]}}
    assert unpack(pack(header, b"bytes")) == (header, b"bytes")


def test_what_is_no_message_is_refused_and_not_sent() -> None:
    for data in (
        b"",
        b"\0\0\0",
        message(b"{}", 3),
        message(b"{}", 0xFFFFFFFF),
        message(b"[]"),
        message(b"7"),
        message(b"{'a': 1}"),
        message(b'{"a": NaN}'),
        message(b'{"a": -Infinity}'),
        message(b'{"a": 1, "a": 2}'),
        message(b'{"a": {"b": 1, "b": 2}}'),
        message(b"\xff\xfe"),
        message(b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
        message(b'{"a": ' + b"9" * 20_000 + b"}"),
        message(json.dumps({"a": "x" * MAX_HEADER}).encode()),
    ):
        with pytest.raises(Malformed):
            unpack(data)
    for header, body in (({"a": float("nan")}, b""), ({"a": object()}, b""), ({"a": "x" * MAX_HEADER}, b"")):
        with pytest.raises(Malformed):
            pack(header, body)
    with pytest.raises(Malformed):
        pack({}, bytes(CHUNK + 1))


@given(st.binary(max_size=200))
def test_garbage_is_a_message_or_refused(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        unpack(data)


def test_sizes_and_what_is_missing_of_a_blob_are_checked() -> None:
    for size in (-1, 1.0, True, "1", None, [1]):
        with pytest.raises(Malformed):
            checked_size(size, 10, "blob")
    with pytest.raises(Refused, match="too large"):
        checked_size(11, 10, "blob")
    assert _checked_parts([[0, 1], [2, 3]], 3)
    for parts in (None, {}, [1], [[0]], [[0, 0]], [[1, 0]], [[0, 4]], [[1, 2], [0, 1]], [[0, True]], [["0", 1]]):
        with pytest.raises(Malformed):
            _checked_parts(parts, 3)
