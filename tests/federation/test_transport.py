"""The way to a hub: strict messages, members and strangers, and lines that break and are made
again.
"""

import contextlib
import datetime
import json
import logging
import os
import resource
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import methodcaller
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
    Bundle,
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
from tests.federation.hubs import Line, Served, SlowLine, World, make_keys, put, until
from tests.federation.scripted import RUN
from tests.federation.test_known_answers import contribution

NO_HEADERS = (
    b"[]",
    b"7",
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1, "a": 2}',
    b'{"a": {"b": 1, "b": 2}}',
    b"\xff\xfe",
    b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"a": ' + b"9" * 20_000 + b"}",
    json.dumps({"a": "x" * MAX_HEADER}).encode(),
)
CUT_MESSAGES = (
    b"",
    b"\0\0\0",
    struct.pack(">I", 3) + b"{}",
    struct.pack(">I", 0xFFFFFFFF) + b"{}",
)
NO_PARTS = (
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
)


@given(st.binary(max_size=200))
def test_a_message_survives_a_round_trip_and_anything_else_is_refused(garbage: bytes) -> None:
    header = {"number": 7, "of": {"nested": [1.5, None, True, "Zürich"]}}
    assert unpack(pack(header, b"bytes")) == (header, b"bytes")
    with contextlib.suppress(Malformed):
        unpack(garbage)
    framed = [struct.pack(">I", len(text)) + text for text in NO_HEADERS]
    for message in (*CUT_MESSAGES, *framed):
        with pytest.raises(Malformed):
            unpack(message)
    for unfit in (float("nan"), object(), "x" * MAX_HEADER):
        with pytest.raises(Malformed):
            pack({"a": unfit}, b"")
    with pytest.raises(Malformed):
        pack({}, bytes(CHUNK + 1))
    assert _checked_parts([[0, 1], [2, 3]], 3)
    for parts in NO_PARTS:
        with pytest.raises(Malformed):
            _checked_parts(parts, 3)


# Strangers and members. After each the hub serves on


def answers(member: HubClient) -> bool:
    return member.call("ping", body=b"still there?") == ({}, b"still there?")


@pytest.fixture
def served(shared_hub: Served) -> Iterator[Served]:
    yield shared_hub
    site = shared_hub.client("site-b")
    assert answers(site)
    assert site.get(put(site, b"still there")) == b"still there"


def refusal(call: Callable[[], Any]) -> str:
    """The status with which gRPC ends a call."""
    import grpc

    with pytest.raises(grpc.RpcError) as raised:
        call()
    return str(raised.value.code().name)


def channel_to(port: int, bundle: Bundle, has_certificate: bool = True) -> Any:
    """A channel of a stranger that accepts any hub."""
    import grpc

    certificate = (bundle.key, bundle.certificate) if has_certificate else ()
    credentials = grpc.ssl_channel_credentials(bundle.authority, *certificate)
    options = [("grpc.ssl_target_name_override", host_of(RUN))]
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)


SITE_A = {"run": RUN, "role": "site", "name": "site-a", "incarnation": "1", "protocol": PROTOCOL}
PING = pack({"from": SITE_A, "call": "ping"})


def ping(channel: Any, message: bytes = PING) -> Any:
    return channel.unary_unary("/sdiloco.Hub/call")(message, timeout=5)


def claiming(served: Served, **claim: str) -> HubClient:
    """A member that claims something else than its certificate says."""
    site = served.client("site-a")
    site.identity = site.identity._replace(**claim)
    return site


def test_strangers_without_a_certificate_of_the_authority_are_refused(
    served: Served, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="insecure=True"):
        without_tls = served.client("site-a", keys=None, insecure=True)
    init_keys(tmp_path / "keys", RUN)
    foreign = load(add_keys(tmp_path / "keys", "site-a"))
    expired = add_keys(served.keys, "forgotten", days=-1)
    earlier = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=2)
    # The site itself would look at the date, and never call the hub.
    with patch.object(keys_module.datetime, "datetime", Mock(now=lambda zone: earlier)):
        late = served.client("forgotten", keys=expired)
    for stranger, message in (
        (without_tls, None),
        (late, None),
        (served.client("site-a", keys=tmp_path / "keys"), "same authority"),
    ):
        with pytest.raises(HubUnreachable, match=message):
            stranger.call("ping")
    authority = load(served.keys, "site-a").authority
    bundle = foreign._replace(authority=authority)
    for has_certificate in (False, True):
        with channel_to(served.port, bundle, has_certificate) as channel:
            assert refusal(partial(ping, channel)) == "UNAVAILABLE"


def test_false_hubs_without_a_certificate_of_a_hub_are_refused(
    served: Served, tmp_path: Path
) -> None:
    """One of another authority, and a site of the same one."""
    import grpc

    init_keys(tmp_path / "keys", RUN)
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


def test_keys_of_another_role_do_not_replace_those_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    bundle = init_keys(folder, RUN)
    issued = bundle.read_bytes()
    with pytest.raises(ValueError, match="keys of hub hub, and keys for a site of that name"):
        add_keys(folder, "hub")
    assert bundle.read_bytes() == issued
    assert add_keys(folder, "hub", role="hub").read_bytes() != issued


def test_garbage_is_refused_before_it_takes_memory(served: Served, keys: Path) -> None:
    greetings = [
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01",
        b"",
    ]
    for number in range(200):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as stranger:
            stranger.sendall(greetings[number % len(greetings)] + os.urandom(number * 20))
    # Behind a certificate.
    headers = (
        {},
        {"from": 1},
        {"from": {"run": RUN}},
        {"from": {"run": 1, "role": 2, "name": 3, "incarnation": 4}},
    )
    with channel_to(served.port, load(keys, "site-a")) as channel:
        for message in (*map(os.urandom, range(50)), *map(pack, headers)):
            assert refusal(partial(ping, channel, message)) == "INVALID_ARGUMENT"
        too_long = bytes(MAX_MESSAGE + 1)
        assert refusal(partial(ping, channel, too_long)) == "RESOURCE_EXHAUSTED"
        empty = channel.stream_unary("/sdiloco.Hub/put")
        assert refusal(lambda: empty(iter([]), timeout=5)) == "INVALID_ARGUMENT"


def test_a_member_speaks_for_itself_for_its_run_with_its_key_and_this_version(
    served: Served, tmp_path: Path
) -> None:
    for claim in ({"name": "site-b"}, {"role": "operator"}, {"name": "boss", "role": "operator"}):
        with pytest.raises(Denied, match="certificate of site 'site-a' is not valid for"):
            claiming(served, **claim).call("ping")
    # Nor in its calls, nor in its heartbeats.
    site = served.client("site-a")
    watcher = served.client("site-a")
    header = {"site": "site-b"}
    for call in (
        lambda: site.send(b"payload", header),
        lambda: site.call("contribute", header),
        lambda: next(site.events(lambda: header)),
        lambda: list(watcher.events(dict, lambda: header)),
    ):
        with pytest.raises(Denied, match="site 'site-a' cannot act on behalf of 'site-b'"):
            call()
    with pytest.raises(Denied, match="serves run 'run-1', not 'run-2'"):
        claiming(served, run="run-2").call("ping")
    # The same authority, and a certificate for another run.
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in ("ca.key", "ca.pem"):
        shutil.copy(served.keys / name, folder)
    (folder / "run").write_text("run-2\n")
    add_keys(folder, "site-a")
    # It would look for the hub of its run, and not find it.
    with patch.object(client, "host_of", lambda run: host_of(RUN)):
        stranger = served.client("site-a", run="run-2", keys=folder)
    stranger.identity = stranger.identity._replace(run=RUN)
    with pytest.raises(Denied, match="certificate is for run 'run-2'"):
        stranger.call("ping")
    add_keys(served.keys, "leaver")
    leaver = served.client("leaver")
    leaver.call("ping")
    revoke_keys(served.keys, "leaver")
    with pytest.raises(Denied, match="has been revoked"):
        leaver.call("ping")
    with patch.object(client, "PROTOCOL", 0), pytest.raises(Refused, match="Update the older side"):
        served.client("site-a").call("ping")
    # The hub is updated first.
    with patch.object(keys_module, "PROTOCOL", PROTOCOL + 1):
        assert answers(served.client("site-a"))
        newer = patch.object(client, "PROTOCOL", PROTOCOL + 2)
        with newer, pytest.raises(Refused, match="a hub before its sites"):
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
    names = ("second", "site-a", "boss", "viewer")
    members = {role: served.client(name) for role, name in zip(ROLES, names, strict=True)}
    actions: dict[str, Callable[[HubClient], Any]] = {
        "put": lambda member: member.send(b"blob"),
        "get": lambda member: member.get(served.store.put(b"blob")),
        "watch": lambda member: next(member.events(dict)),
    }
    for role, member in members.items():
        assert member.identity.role == role
        for call in (*MAY, "shutdown"):
            act = actions.get(call, methodcaller("call", call))
            if role in MAY.get(call, ()):
                act(member)
            else:
                with pytest.raises(Denied, match=f"may not call {call}"):
                    act(member)


def announced(site: HubClient, blob: bytes, **fields: Any) -> dict[str, Any]:
    return site._header({}) | {"key": key_of(blob), "size": len(blob)} | fields


def test_a_blob_is_refused_by_its_announcement_or_for_bytes_that_differ_from_it(
    served: Served,
) -> None:
    site = served.client("site-a")
    for wrong, message in (
        ({"size": 1 << 60}, "too large"),
        ({"size": -1}, "whole number"),
        ({"size": "7"}, "whole number"),
        ({"key": "../../../etc/passwd"}, "not a key"),
        ({"about": [1]}, "JSON object"),
    ):
        header = announced(site, b"payload", **wrong)
        with pytest.raises(Refused, match=message):
            site._sent(header, memoryview(b"payload"))
        assert not os.listdir(Path(served.store.url) / "incomplete")
    put_call = site._method("stream_unary", "put")
    for pieces in ([b""], [bytes(CHUNK)] * 3, [bytes(CHUNK + 9)]):
        header = announced(site, os.urandom(8), size=CHUNK + 8)
        stream = iter([pack(header), *pieces])
        assert refusal(partial(put_call, stream, timeout=5)) == "INVALID_ARGUMENT"
    blob = bytes(3 * CHUNK)
    flipped = bytearray(blob)
    flipped[CHUNK] ^= 1
    with pytest.raises(HubError, match="do not match the announced key"):
        site._sent(announced(site, blob), memoryview(flipped))
    with pytest.raises(HubError):
        site.get(key_of(blob))


def test_the_size_of_a_blob_is_checked_before_memory_is_taken(served: Served) -> None:
    site = served.client("site-a")
    site.max_blob = 4 * CHUNK
    key = put(site, bytes(CHUNK))
    with pytest.raises(Refused, match="too large"):
        site.get(key, 1 << 60)
    with pytest.raises(Malformed, match=r"has 262,143 bytes, but the hub announced 262,144"):
        site.get(key, CHUNK - 1)
    assert site.get(key, CHUNK) == bytes(CHUNK)


def test_small_blobs_come_in_one_stream_however_much_of_it_a_message_takes(served: Served) -> None:
    site = served.client("site-a")
    site.max_blob = 4 * CHUNK
    blobs = [os.urandom(CHUNK), b"", os.urandom(CHUNK - 1), b"blob", bytes(CHUNK)]
    payloads = [Payload(put(site, blob), len(blob)) for blob in blobs]
    fetched = site.get_small(payloads)
    assert [fetched[payload.key] for payload in payloads] == blobs
    (*_, last, _) = payloads
    for size, error in ((3, "more than was requested"), (5, "ended a stream prematurely")):
        with pytest.raises((Refused, HubError), match=error):
            site.get_small([Payload(last.key, size)])
    with pytest.raises(Missing):
        site.get_small([*payloads, Payload(key_of(b"nowhere"), 7)])
    too_large = Payload(put(site, bytes(CHUNK + 1)), CHUNK + 1)
    with pytest.raises(Refused, match="separately"):
        site.get_small([too_large])


def test_disk_errors_of_the_hub_are_reported_to_its_members(served: Served) -> None:
    site = served.client("site-a")
    dropped = put(site, b"old")
    damaged = put(site, bytes(3 * CHUNK))
    served.store.retain([damaged])
    with pytest.raises(Missing, match=dropped):
        site.get(dropped)
    with (Path(served.store.url) / "blobs" / damaged).open("rb+") as file:
        file.write(b"\x01")
    with pytest.raises(Altered, match=damaged):
        site.get(damaged)
    no_space = Mock(side_effect=NoSpace("there is no space left: nothing was stored."))
    with patch.object(BlobStore, "begin", no_space), pytest.raises(NoSpace, match="no space left"):
        site.send(b"blob")


# A hub for each test


def test_a_connection_without_a_hello_ends_and_the_others_stay(tmp_path: Path, keys: Path) -> None:
    options = [*server.SERVER_OPTIONS, ("grpc.server_handshake_timeout_ms", 1_000)]
    assert dict(server.SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == 20_000
    with patch.object(server, "SERVER_OPTIONS", options), Served(tmp_path, keys) as served:
        site = served.client("site-a")
        assert answers(site)
        strangers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
        for stranger in strangers:
            stranger.settimeout(20.0)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "the hub ends it"
            stranger.close()
        assert answers(site)


def test_a_hub_raises_its_limit_of_descriptors_and_says_when_few_are_left(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        world.start(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        with patch.object(server, "_FEW_DESCRIPTORS", hard):
            until(lambda: "strangers" in caplog.text)
        line = next(text for text in caplog.messages if "strangers" in text)
        assert f"of {hard:,} descriptors are in use" in line
        assert "firewall" in line
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@patch.object(server, "_SILENT", 3.0)
def test_a_silent_reader_with_open_streams_keeps_nobody_out(hub: Served, keys: Path) -> None:
    released = threading.Event()
    ended = list[str]()

    def silence() -> Any:
        released.wait()
        yield b""

    with channel_to(hub.port, load(keys, "viewer")) as channel:
        for _ in range(520):
            call = channel.stream_stream("/sdiloco.Hub/watch")(silence())
            call.add_done_callback(lambda done: ended.append(done.code().name))
        until(lambda: len(ended) >= 520 - server._MOST_OF_OTHERS)
        assert set(ended) == {"UNAVAILABLE"}
        assert answers(hub.client("site-a"))
        assert answers(hub.client("boss"))
        with pytest.raises(HubUnreachable, match="too many"):
            hub.client("viewer").call("ping")
        until(lambda: len(ended) == 520)
        assert ended[-server._MOST_OF_OTHERS :] == ["CANCELLED"] * server._MOST_OF_OTHERS
        assert answers(hub.client("viewer"))
        released.set()


@patch.object(server, "MAX_CALLS", 3)
@patch.object(server, "_FOR_OPERATORS", 3)
def test_an_operator_always_finds_room_beside_other_callers(tmp_path: Path, keys: Path) -> None:
    with Served(tmp_path, keys) as served:
        watching = [served.client(name).events(dict) for name in ("site-a", "site-b", "viewer")]
        assert [next(events).kind for events in watching] == ["welcome"] * 3
        with pytest.raises(HubUnreachable, match="too many"):
            served.client("a").call("ping")
        assert answers(served.client("boss"))


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
    refuse = Mock(side_effect=Refused("round 3 builds on a different history than the hub's"))
    hub.handler.call = refuse  # type: ignore[method-assign]

    def tries() -> int:
        calls = [call.args[1] for call in refuse.call_args_list]
        return calls.count("contribute")

    connection = HubConnection(hub.client("site-a"))
    began = time.monotonic()
    connection._let_in = True
    connection.contribute(contribution("site-a"), {})
    until(lambda: tries() >= 3)
    assert time.monotonic() - began > 1.4, "a second and two, or half of that"
    connection.close(1.0)
    assert tries() <= 4
    refusals = [text for text in caplog.messages if "was not accepted" in text]
    assert len(refusals) == 1, "one line"


@pytest.mark.parametrize(("tries", "longest"), [(0, 1), (1, 2), (5, 30), (500, 30)])
def test_pauses_between_tries_grow_to_a_limit_and_differ(tries: int, longest: float) -> None:
    pauses = [backoff(tries) for _ in range(200)]
    assert longest / 2 <= min(pauses) < max(pauses) <= longest


# Lines that break


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
    assert hub.handler.seen == [], "a site that is not let in was not there"
    earlier = hub.client("site-a")
    later = hub.client("site-a")
    # A blob that is sent again is known.
    for site, answer in ((earlier, "open"), (later, "known")):
        assert site.send(b"payload", {"site": "site-a", "round": 1}) == {"said": answer}
    assert hub.handler.taken == [("site-a", key_of(b"payload"))]
    with pytest.raises(Refused, match="another size"):
        later.send(b"payload", {"size": 8})
    first = earlier.events(dict)
    second = later.events(dict)
    assert next(first) == next(second) == Event("welcome", {"to": "site-a"})
    with pytest.raises(Refused, match="has opened a watch from elsewhere"):
        list(first)
    with pytest.raises(Busy, match="in use by a running process"):
        earlier.send(b"from the grave")
    assert later.send(b"alive") == {"said": "open"}
    watching = {"site-a": second}
    for name in ("site-b", "viewer"):
        watching[name] = hub.client(name).events(dict)
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
    (session,) = [session for session in hub.hub._sessions if session.peer.name == "site-a"]
    for _ in range(2 * MAX_EVENTS):
        session._waiting.put(Event("filling", {}))
    hub.hub.push(Event("more", {}))
    assert next(quick).kind == "more"
    until(lambda: [session.peer.name for session in hub.hub._sessions] == ["viewer"])


def test_a_site_two_seconds_away_connects_and_gets_its_events(hub: Served) -> None:
    line = SlowLine(hub.port)
    site = hub.client("site-a", port=line.port, timeout=10.0, heartbeat=1.0, channels=1)

    def is_connected() -> bool:
        with contextlib.suppress(HubUnreachable):
            return answers(site)
        return False

    until(is_connected, 60.0)
    events = site.events(dict)
    with ThreadPoolExecutor(1) as pool:
        welcome = pool.submit(lambda: next(event for event in events if event.kind == "welcome"))
        assert welcome.result(60.0).header == {"to": "site-a"}
    line.close()


def test_a_site_too_far_away_hears_the_limit(hub: Served) -> None:
    line = SlowLine(hub.port)
    options = {**dict(client.CLIENT_OPTIONS), "grpc.min_reconnect_backoff_ms": 5_000}
    with patch.object(client, "CLIENT_OPTIONS", list(options.items())):
        site = hub.client("site-a", port=line.port, channels=1)
    with pytest.raises(HubUnreachable, match="longer than the limit of 6 s"):
        site.round_trip()
    line.close()


def test_a_silent_hub_is_gone_after_some_beats_and_lines_to_nowhere_are_made_again(
    hub: Served, line: Line
) -> None:
    site = hub.client("site-a", port=line.port, timeout=30.0, channels=2)
    hello = hub.handler.hello

    def cut_off(*arguments: Any) -> Any:
        # The answer of the hub goes nowhere; it hears the next hello.
        hub.handler.hello = hello
        line.forget()
        return hello(*arguments)

    hub.handler.hello = cut_off
    hub.handler.record(b"record")
    events = site.events(dict)
    with ThreadPoolExecutor() as pool:

        def next_event(seconds: float = 10.0) -> Event:
            return pool.submit(next, events).result(seconds)

        assert "silent for 0.8 s" in next_event().header["why"]
        assert next_event().kind == "record"
        # Nothing flows: all that waits ends, and new calls end at once.
        line.flows.clear()
        waiting = pool.submit(site.send, os.urandom(20 * CHUNK))
        assert next_event().kind == "lost"
        with pytest.raises(HubUnreachable):
            waiting.result(3)
        quickly(lambda: site.get(key_of(b"")))
        line.flows.set()
        # It is the next event that connects again.
        while next_event(20).kind != "record":
            pass
        key = put(site, os.urandom(4 * CHUNK))
        line.forget()
        assert next_event().kind == "lost"
        # TCP and gRPC would find out in some ten seconds.
        began = time.monotonic()
        assert next_event(30).kind == "record"
        assert len(site.get(key)) == 4 * CHUNK
        assert time.monotonic() - began < 5
        # Without a hub every call ends at once.
        hub.hub.close(0.1)
        assert next_event().kind == "lost"
        quickly(lambda: site.send(b"other"))
        quickly(lambda: site.get(key))
        quickly(lambda: site.call("ping"))
        site.close()


def test_blobs_travel_in_parallel_and_delivered_ones_are_not_sent_again(
    hub: Served, line: Line
) -> None:
    site = hub.client("site-a", port=line.port, channels=4)
    site.call("ping")
    sent = os.urandom(40 * CHUNK)
    fetched = os.urandom(40 * CHUNK)
    line.passed["up"] = 0
    line.cut_after["up"] = 20 * CHUNK
    assert hub.store.get(put(site, sent)) == sent
    # The bytes that were in buffers are lost: some chunks for each connection.
    assert len(sent) <= line.passed["up"] < 1.6 * len(sent)
    key = hub.store.put(fetched)
    line.passed["down"] = 0
    line.cut_after["down"] = 20 * CHUNK
    assert site.get(key) == fetched
    assert len(sent) <= line.passed["down"] < 2 * len(sent)
    sites = [hub.client(name) for name in ("site-a", "site-b")]
    blobs = [os.urandom(5 * CHUNK + number) for number in range(6)]
    senders = sites * 3
    getters = sites[::-1] * 3
    with ThreadPoolExecutor(6) as pool:
        keys = list(pool.map(put, senders, blobs))
        assert list(pool.map(HubClient.get, getters, keys)) == blobs
        # Both send the same.
        same = os.urandom(9 * CHUNK)
        assert list(pool.map(lambda site: put(site, same), sites)) == [key_of(same)] * 2
    assert not os.listdir(Path(hub.store.url) / "incomplete")
