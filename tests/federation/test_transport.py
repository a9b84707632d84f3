"""The way to a hub: strict messages, who is let in and who is refused, and lines that break and
are found again.
"""

import contextlib
import datetime
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation import client, server
from lightning_sdiloco.federation import keys as keys_module
from lightning_sdiloco.federation.client import HubClient, _checked_parts
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.keys import (
    MAY,
    ROLES,
    add_keys,
    host_of,
    init_keys,
    load,
    revoke_keys,
)
from lightning_sdiloco.federation.messages import Event, Payload
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.server import MAX_EVENTS
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.federation.wire import (
    CHUNK,
    MAX_HEADER,
    MAX_MESSAGE,
    PROTOCOL,
    Altered,
    Busy,
    Denied,
    HubError,
    HubUnreachable,
    Missing,
    NoSpace,
    backoff,
    pack,
    unpack,
)
from tests.federation.hubs import Line, Served, make_keys, put, until
from tests.federation.scripted import RUN
from tests.federation.test_known_answers import own


@given(st.binary(max_size=200))
def test_a_message_survives_a_round_trip_and_anything_else_is_refused(garbage: bytes) -> None:
    header = {"number": 7, "of": {"nested": [1.5, None, True, "Zürich"]}}
    assert unpack(pack(header, b"bytes")) == (header, b"bytes")
    with contextlib.suppress(Malformed):
        unpack(garbage)
    texts = (b"[]", b"7", b"{'a': 1}", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1, "a": 2}')
    texts += (
        b'{"a": {"b": 1, "b": 2}}',
        b"\xff\xfe",
        b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    )
    texts += (b'{"a": ' + b"9" * 20_000 + b"}", json.dumps({"a": "x" * MAX_HEADER}).encode())
    cut = (b"", b"\0\0\0", struct.pack(">I", 3) + b"{}", struct.pack(">I", 0xFFFFFFFF) + b"{}")
    for data in (*cut, *(struct.pack(">I", len(text)) + text for text in texts)):
        with pytest.raises(Malformed):
            unpack(data)
    no_headers = [{"a": value} for value in (float("nan"), object(), "x" * MAX_HEADER)]
    for header, body in (*((one, b"") for one in no_headers), ({}, bytes(CHUNK + 1))):
        with pytest.raises(Malformed):
            pack(header, body)
    assert _checked_parts([[0, 1], [2, 3]], 3)
    for parts in (
        None,
        {},
        [1],
        [[0]],
        [[0, 0]],
        [[1, 0]],
        [[0, 4]],
        [[1, 2], [0, 1]],
        [[0, True]],
        [["0", 1]],
    ):
        with pytest.raises(Malformed):
            _checked_parts(parts, 3)


# Strangers and members. After each the hub serves on


@pytest.fixture
def served(of_module: Served) -> Iterator[Served]:
    yield of_module
    site = of_module.client("site-b")
    assert site.call("ping", body=b"still there?") == ({}, b"still there?")
    assert site.get(put(site, b"still there")) == b"still there"


def refusal(call: Callable[[], Any]) -> str:
    """The status with which gRPC ends a call."""
    import grpc

    with pytest.raises(grpc.RpcError) as raised:
        call()
    return str(raised.value.code().name)


def channel_to(port: int, authority: bytes, *own: bytes) -> Any:
    """A channel of a stranger that does not mind whom it speaks to."""
    import grpc

    credentials = grpc.ssl_channel_credentials(authority, *own)
    return grpc.secure_channel(
        f"127.0.0.1:{port}", credentials, [("grpc.ssl_target_name_override", host_of(RUN))]
    )


def ping(channel: Any, message: bytes | None = None) -> Any:
    who = {"run": RUN, "role": "site", "name": "site-a", "incarnation": "1", "protocol": PROTOCOL}
    message = pack({"from": who, "call": "ping"}) if message is None else message
    return channel.unary_unary("/sdiloco.Hub/call")(message, timeout=5)


def claiming(served: Served, **other: str) -> HubClient:
    """A member that claims what its certificate does not say."""
    site = served.client("site-a")
    site.identity = site.identity._replace(**other)
    return site


def test_members_and_hubs_without_a_certificate_of_the_authority_are_refused(
    served: Served, tmp_path: Path
) -> None:
    import grpc

    with pytest.warns(UserWarning, match="insecure=True"):
        without_tls = served.client("site-a", keys=None, insecure=True)
    init_keys(tmp_path / "keys", RUN)
    other = add_keys(tmp_path / "keys", "site-a")
    expired = add_keys(served.keys, "forgotten", days=-1)

    earlier = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=2)
    # Its own look at the date would refuse it before it comes to the hub.
    with patch.object(keys_module.datetime, "datetime", Mock(now=lambda zone: earlier)):
        late = served.client("forgotten", keys=expired)
    strangers = (
        (without_tls, None),
        (late, None),
        (served.client("site-a", keys=tmp_path / "keys"), "same authority"),
    )
    for stranger, told in strangers:
        with pytest.raises(HubUnreachable, match=told):
            stranger.call("ping")
    authority = load(served.keys, "site-a").authority
    own = load(other)
    for certificate in ((), (own.key, own.certificate)):
        with channel_to(served.port, authority, *certificate) as channel:
            assert refusal(lambda channel=channel: ping(channel)) == "UNAVAILABLE"
    # A site refuses who passes for the hub: one of another authority, and a site of its own.
    with (
        Served(tmp_path, tmp_path / "keys") as false,
        pytest.raises(HubUnreachable, match="same authority"),
    ):
        served.client("site-a", port=false.port).send(b"secret")
    site = load(served.keys, "site-b")
    server = grpc.server(None)
    credentials = grpc.ssl_server_credentials([(site.key, site.certificate)], site.authority, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    with pytest.raises(HubUnreachable):
        served.client("site-a", port=port).call("ping")
    server.stop(None).wait()


def test_garbage_is_refused_before_it_takes_memory(served: Served, keys: Path) -> None:
    words = [
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01",
        b"",
    ]
    for number in range(200):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as stranger:
            stranger.sendall(words[number % len(words)] + os.urandom(number * 20))
    # Behind a certificate.
    own = load(keys, "site-a")
    headers = (
        {},
        {"from": 1},
        {"from": {"run": RUN}},
        {"from": {"run": 1, "role": 2, "name": 3, "incarnation": 4}},
    )
    with channel_to(served.port, own.authority, own.key, own.certificate) as channel:
        for message in (*map(os.urandom, range(50)), *map(pack, headers)):
            assert refusal(lambda message=message: ping(channel, message)) == "INVALID_ARGUMENT"
        assert refusal(lambda: ping(channel, bytes(MAX_MESSAGE + 1))) == "RESOURCE_EXHAUSTED"
        empty = channel.stream_unary("/sdiloco.Hub/put")
        assert refusal(lambda: empty(iter([]), timeout=5)) == "INVALID_ARGUMENT"


def test_a_member_speaks_for_itself_for_its_run_with_its_key_and_this_version(
    served: Served, tmp_path: Path
) -> None:
    for claim in ({"name": "site-b"}, {"role": "operator"}, {"name": "boss", "role": "operator"}):
        with pytest.raises(Denied, match="certificate of site 'site-a' is not valid for"):
            claiming(served, **claim).call("ping")
    # Nor in what it says, nor in its heartbeats.
    site = served.client("site-a")
    about = {"site": "site-b"}
    for say in (
        lambda: site.send(b"payload", about),
        lambda: site.call("contribute", about),
        lambda: next(site.events(lambda: about)),
        lambda: list(served.client("site-a").events(dict, lambda: about)),
    ):
        with pytest.raises(Denied, match="site 'site-a' cannot speak for 'site-b'"):
            say()
    with pytest.raises(Denied, match="serves run 'run-1', not 'run-2'"):
        claiming(served, run="run-2").call("ping")
    # The same authority, and a certificate for another run.
    other = tmp_path / "keys"
    other.mkdir()
    for name in ("ca.key", "ca.pem"):
        (other / name).write_bytes((served.keys / name).read_bytes())
    (other / "run").write_text("run-2\n")
    add_keys(other, "site-a")
    # It would look for the hub of its own run, and not find it.
    with patch.object(client, "host_of", lambda run: host_of(RUN)):
        stranger = served.client("site-a", run="run-2", keys=other)
    stranger.identity = stranger.identity._replace(run=RUN)
    with pytest.raises(Denied, match="certificate is for run 'run-2'"):
        stranger.call("ping")
    add_keys(served.keys, "leaver")
    leaver = served.client("leaver")
    leaver.call("ping")
    revoke_keys(served.keys, "leaver")
    with pytest.raises(Denied, match="has been revoked"):
        leaver.call("ping")
    with patch.object(client, "PROTOCOL", 0), pytest.raises(Refused, match="update the older side"):
        served.client("site-a").call("ping")
    # The hub is updated first.
    with patch.object(keys_module, "PROTOCOL", PROTOCOL + 1):
        assert served.client("site-a").call("ping", body=b"older") == ({}, b"older")
        with (
            patch.object(client, "PROTOCOL", PROTOCOL + 2),
            pytest.raises(Refused, match="a hub before its sites"),
        ):
            served.client("site-a").call("ping")


def test_a_name_with_a_new_line_writes_none_into_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(Refused):
        served.client("site-a").call("ping\n2026-01-01 ERROR the hub was robbed")
    assert put(served.client("site-b"), b"goes on")
    assert [text for text in caplog.messages if "\n" in text] == []
    assert any("the hub was robbed" in text for text in caplog.messages)


def test_each_role_may_make_the_calls_of_the_table_and_no_others(served: Served) -> None:
    members = dict(
        zip(ROLES, map(served.client, ("second", "site-a", "boss", "viewer")), strict=True)
    )
    assert {member.identity.role for member in members.values()} == set(ROLES)
    acts: dict[str, Callable[[HubClient], Any]] = {
        "put": lambda member: member.send(b"blob"),
        "get": lambda member: member.get(served.store.put(b"blob")),
        "watch": lambda member: next(member.events(dict)),
    }
    for member in members.values():
        role = member.identity.role
        for call in (*MAY, "shutdown"):
            act = acts.get(call, lambda member, call=call: member.call(call))
            if role in MAY.get(call, ()):
                act(member)
            else:
                with pytest.raises(Denied, match=f"may not call {call}"):
                    act(member)


def test_a_blob_is_refused_by_its_announcement_or_for_bytes_that_differ_from_it(
    served: Served,
) -> None:
    site = served.client("site-a")

    def announced(blob: bytes, **wrong: Any) -> dict[str, Any]:
        return site._header({}) | {"key": key_of(blob), "size": len(blob)} | wrong

    for wrong, told in (
        ({"size": 1 << 60}, "too large"),
        ({"size": -1}, "whole number"),
        ({"size": "7"}, "whole number"),
        ({"key": "../../../etc/passwd"}, "not a key"),
        ({"about": [1]}, "JSON object"),
    ):
        with pytest.raises(Refused, match=told):
            site._sent(announced(b"payload", **wrong), memoryview(b"payload"))
        assert not os.listdir(Path(served.store.url) / "incomplete")
    put_call = site._method("stream_unary", "put")
    for pieces in ([b""], [bytes(CHUNK)] * 3, [bytes(CHUNK + 9)]):
        sent = iter([pack(announced(b"", key=key_of(os.urandom(8)), size=CHUNK + 8)), *pieces])
        assert refusal(lambda sent=sent: put_call(sent, timeout=5)) == "INVALID_ARGUMENT"
    blob = bytes(3 * CHUNK)
    flipped = bytearray(blob)
    flipped[CHUNK] ^= 1
    with pytest.raises(HubError, match="not those announced"):
        site._sent(announced(blob), memoryview(flipped))
    with pytest.raises(HubError):
        site.get(key_of(blob))
    # A size that a record says is checked before memory is taken.
    small = served.client("site-a")
    small.max_blob = 4 * CHUNK
    key = put(small, bytes(CHUNK))
    with pytest.raises(Refused, match="too large"):
        small.get(key, 1 << 60)
    with pytest.raises(Malformed, match=r"has 262,143 bytes, but the hub says 262,144"):
        small.get(key, CHUNK - 1)
    assert small.get(key, CHUNK) == bytes(CHUNK)
    # Several small ones in one stream, however much of it a message takes.
    named = [
        Payload(put(small, blob), len(blob))
        for blob in (os.urandom(CHUNK), b"", os.urandom(CHUNK - 1), b"blob")
    ]
    came = small.get_small([*named, Payload(key, CHUNK)])
    assert [key_of(came[one.key]) for one in named] == [one.key for one in named]
    for size, error in ((3, "more than was asked for"), (5, "ended a stream too early")):
        with pytest.raises((Refused, HubError), match=error):
            small.get_small([Payload(named[-1].key, size)])
    with pytest.raises(Missing):
        small.get_small([*named, Payload(key_of(b"nowhere"), 7)])
    with pytest.raises(Refused, match="on its own"):
        small.get_small([Payload(put(small, bytes(CHUNK + 1)), CHUNK + 1)])


def test_disk_errors_of_the_hub_are_reported_to_its_members(served: Served) -> None:
    site = served.client("site-a")
    key = put(site, b"old")
    other = put(site, bytes(3 * CHUNK))
    served.store.retain([other], age=0)
    with pytest.raises(Missing, match=key):
        site.get(key)
    with (Path(served.store.url) / "blobs" / other).open("rb+") as file:
        file.write(b"\x01")
    with pytest.raises(Altered, match=other):
        site.get(other)
    full = patch.object(
        BlobStore, "begin", Mock(side_effect=NoSpace("there is no space left: nothing was stored."))
    )
    with full, pytest.raises(NoSpace, match="no space left"):
        site.send(b"blob")


# A hub of its own


@patch.object(server, "_SILENT", 3.0)
def test_a_silent_reader_with_open_streams_keeps_nobody_out(hub: Served, keys: Path) -> None:
    own = load(keys, "viewer")
    goes_on = threading.Event()
    ended = list[str]()

    def silence() -> Any:
        goes_on.wait()
        yield b""

    with channel_to(hub.port, own.authority, own.key, own.certificate) as channel:
        for _ in range(520):
            call = channel.stream_stream("/sdiloco.Hub/watch")(silence())
            call.add_done_callback(lambda done: ended.append(done.code().name))
        until(lambda: len(ended) >= 520 - server._MOST_OF_OTHERS)
        assert set(ended) == {"UNAVAILABLE"}
        for name in ("site-a", "boss"):
            assert hub.client(name).call("ping", body=b"room?") == ({}, b"room?")
        with pytest.raises(HubUnreachable, match="too many"):
            hub.client("viewer").call("ping")
        until(lambda: len(ended) == 520)
        assert ended[-server._MOST_OF_OTHERS :] == ["CANCELLED"] * server._MOST_OF_OTHERS
        assert hub.client("viewer").call("ping", body=b"again") == ({}, b"again")
        goes_on.set()


@patch.object(server, "MAX_CALLS", 3)
@patch.object(server, "_FOR_OPERATORS", 3)
def test_an_operator_always_finds_room_beside_other_callers(tmp_path: Path, keys: Path) -> None:
    with Served(tmp_path, keys) as served:
        watching = [served.client(name).events(dict) for name in ("site-a", "site-b", "viewer")]
        assert [next(events).kind for events in watching] == ["welcome"] * 3
        with pytest.raises(HubUnreachable, match="too many"):
            served.client("a").call("ping")
        assert served.client("boss").call("ping", body=b"in?") == ({}, b"in?")


def test_a_connected_member_is_cut_off_once_its_certificate_is_no_longer_valid(
    tmp_path: Path,
) -> None:
    keys = make_keys(tmp_path / "keys")
    past = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    with Served(tmp_path, keys) as served:
        first, second = (served.client(name).events(dict) for name in ("site-a", "site-b"))
        assert next(first).kind == next(second).kind == "welcome"
        revoke_keys(keys, "site-a")
        with pytest.raises(Denied, match="certificate of site 'site-a' .*revoked"):
            list(first)
        expired = patch.object(keys_module, "_ends", lambda certificate: past)
        with expired, pytest.raises(Denied, match="certificate of site 'site-b' .*expired"):
            list(second)


def test_a_refusal_is_not_answered_by_calls_without_end(
    hub: Served, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = Mock(side_effect=Refused("round 3 builds on another history than this hub's"))
    hub.handler.call = refuse  # type: ignore[method-assign]

    def tries() -> int:
        return [call.args[1] for call in refuse.call_args_list].count("contribute")

    connection = HubConnection(hub.client("site-a"))
    began = time.monotonic()
    connection._let_in = True
    connection.contribute(own("site-a"), {})
    until(lambda: tries() >= 3)
    assert time.monotonic() - began > 1.4, "a second and two, or half of that"
    connection.close(1.0)
    assert tries() <= 4
    assert len([text for text in caplog.messages if "was not taken" in text]) == 1, "one line"
    pauses = [[backoff(tries) for _ in range(200)] for tries in (0, 1, 5, 500)]
    assert all(
        most / 2 <= min(own) < max(own) <= most
        for own, most in zip(pauses, (1, 2, 30, 30), strict=True)
    )


# To which the line breaks


@pytest.fixture
def line(hub: Served) -> Iterator[Line]:
    line = Line(hub.port)
    yield line
    line.close()


def quickly(call: Callable[[], object], seconds: float = 1.0) -> None:
    began = time.monotonic()
    with pytest.raises(HubUnreachable):
        call()
    assert time.monotonic() - began < seconds


def test_a_later_incarnation_replaces_an_earlier_one_and_events_reach_their_address(
    hub: Served,
) -> None:
    with pytest.raises(Refused, match="another run config"):
        next(hub.client("site-a").events(lambda: {"refused": True}))
    with pytest.raises(Malformed):
        next(hub.client("site-a").events(lambda: [1]))  # type: ignore[arg-type,return-value]
    assert hub.handler.seen == [], "who is not let in was not there"
    earlier = hub.client("site-a")
    later = hub.client("site-a")
    # What is sent again is known.
    for site, said in ((earlier, "open"), (later, "known")):
        assert site.send(b"payload", {"site": "site-a", "round": 1}) == {"said": said}
    assert hub.handler.taken == [("site-a", key_of(b"payload"))]
    with pytest.raises(Refused, match="another size"):
        later.send(b"payload", {"size": 8})
    first = earlier.events(dict)
    second = later.events(dict)
    assert next(first) == next(second) == Event("welcome", {"to": "site-a"})
    with pytest.raises(Refused, match="watches from elsewhere"):
        list(first)
    with pytest.raises(Busy, match="in use by a running process"):
        earlier.send(b"from the grave")
    assert later.send(b"alive") == {"said": "open"}
    watching = {"site-a": second} | {
        name: hub.client(name).events(dict) for name in ("site-b", "viewer")
    }
    for name in ("site-b", "viewer"):
        assert next(watching[name]) == Event("welcome", {"to": name})
    hub.handler.push(Event("call", {"round": 3}), to=["site-b"])
    hub.handler.push(Event("payload", {"round": 3}, b"bytes"))
    assert next(watching["site-b"]) == Event("call", {"round": 3})
    for events in watching.values():
        assert next(events) == Event("payload", {"round": 3}, b"bytes")
    until(lambda: "heartbeat site-a" in hub.handler.seen)
    # Nobody took the place of the later one.
    assert f"gone site-a {earlier.incarnation[:2]}" not in hub.handler.seen
    later.close()
    until(lambda: f"gone site-a {later.incarnation[:2]}" in hub.handler.seen)
    quickly(lambda: later.call("ping"))


def test_a_member_that_does_not_listen_is_cut_off_and_the_hub_keeps_nothing_for_it(
    hub: Served,
) -> None:
    slow, quick = (hub.client(name).events(dict) for name in ("site-a", "viewer"))
    hub.handler.record(b"record")
    assert next(slow).kind == next(quick).kind == "record"
    for session in list(hub.hub._sessions):
        if session.peer.name == "site-a":
            for _ in range(2 * MAX_EVENTS):
                session._waiting.put(Event("filling", {}))
    hub.hub.push(Event("more", {}))
    assert next(quick).kind == "more"
    until(lambda: [session.peer.name for session in hub.hub._sessions] == ["viewer"])


def test_a_silent_hub_is_gone_after_some_beats_and_lines_to_nowhere_are_made_again(
    hub: Served, line: Line
) -> None:
    site = hub.client("site-a", port=line.port, timeout=30.0, channels=2)
    hears = hub.handler.hello

    def cut_off(*said: Any) -> Any:
        # What the hub answers goes nowhere; it hears the next one.
        hub.handler.hello = hears
        line.forget()
        return hears(*said)

    hub.handler.hello = cut_off
    hub.handler.record(b"record")
    events = site.events(dict)
    with ThreadPoolExecutor() as pool:

        def heard(seconds: float = 10.0) -> Event:
            return pool.submit(next, events).result(seconds)

        assert "silent for 0.8 s" in heard().header["why"]
        assert heard().kind == "record"
        # Nothing flows: all that waits ends, and what is called meanwhile does at once.
        line.flows.clear()
        waiting = pool.submit(site.send, os.urandom(20 * CHUNK))
        assert heard().kind == "lost"
        with pytest.raises(HubUnreachable):
            waiting.result(3)
        quickly(lambda: site.get(key_of(b"")))
        line.flows.set()
        # It is the next event that connects again.
        while heard(20).kind != "record":
            pass
        key = put(site, os.urandom(4 * CHUNK))
        line.forget()
        assert heard().kind == "lost"
        # TCP and gRPC would find out in some ten seconds.
        began = time.monotonic()
        assert heard(30).kind == "record"
        assert len(site.get(key)) == 4 * CHUNK
        assert time.monotonic() - began < 5
        # Where there is no hub every call ends at once.
        hub.hub.close(0.1)
        assert heard().kind == "lost"
        for call in (lambda: site.send(b"other"), lambda: site.get(key), lambda: site.call("ping")):
            quickly(call)
        site.close()


def test_blobs_travel_in_parallel_and_delivered_ones_are_not_sent_again(
    hub: Served, line: Line
) -> None:
    site = hub.client("site-a", port=line.port, channels=4)
    site.call("ping")
    blob = os.urandom(40 * CHUNK)
    other = os.urandom(40 * CHUNK)
    line.passed["up"], line.cut_after["up"] = 0, 20 * CHUNK
    assert hub.store.get(put(site, blob)) == blob
    # What was on its way in buffers is lost: some chunks for each connection.
    assert len(blob) <= line.passed["up"] < 1.6 * len(blob)
    key = hub.store.put(other)
    line.passed["down"], line.cut_after["down"] = 0, 20 * CHUNK
    assert site.get(key) == other
    assert len(blob) <= line.passed["down"] < 2 * len(blob)
    sites = [hub.client(name) for name in ("site-a", "site-b")]
    blobs = [os.urandom(5 * CHUNK + number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        keys = list(pool.map(lambda number: put(sites[number % 2], blobs[number]), range(6)))
        assert (
            list(pool.map(lambda number: sites[1 - number % 2].get(keys[number]), range(6)))
            == blobs
        )
        # Both send the same.
        same = os.urandom(9 * CHUNK)
        assert list(pool.map(lambda site: put(site, same), sites)) == [key_of(same)] * 2
    assert not os.listdir(Path(hub.store.url) / "incomplete")
