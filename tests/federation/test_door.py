"""Who is let in: no key keeps others out, what is announced takes no room, and nobody writes lines of the hub's log."""

import logging
import os
import random
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import keys as keys_module
from lightning_sdiloco.federation import server
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.keys import load, revoke_keys
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.wire import CHUNK, Denied, HubError, HubUnreachable, pack
from lightning_sdiloco.tools.hub import MetricsServer
from tests.federation.hubs import TERMS, Served, World, make_keys, put, require_agreement, until
from tests.federation.test_transport import channel_to

pytestmark = pytest.mark.timeout(120)


def test_a_reader_who_opens_streams_and_says_nothing_keeps_nobody_out(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SILENT", 3.0)
    own, goes_on, ended = load(keys, "viewer"), threading.Event(), list[str]()

    def silence() -> Any:
        goes_on.wait()
        yield b""

    with Served(tmp_path, keys) as served, channel_to(served.port, own.authority, own.key, own.certificate) as channel:
        for _ in range(520):
            call = channel.stream_stream("/sdiloco.Hub/watch")(silence())
            call.add_done_callback(lambda done: ended.append(done.code().name))
        until(lambda: len(ended) >= 520 - server._MOST_OF_OTHERS)
        assert set(ended) == {"UNAVAILABLE"}
        for name in ("site-a", "boss"):
            assert served.client(name).call("ping", body=b"room?") == ({}, b"room?")
        with pytest.raises(HubUnreachable, match="too many"):
            served.client("viewer").call("ping")
        until(lambda: len(ended) == 520)
        assert ended[-server._MOST_OF_OTHERS :] == ["CANCELLED"] * server._MOST_OF_OTHERS
        assert served.client("viewer").call("ping", body=b"again") == ({}, b"again")
        goes_on.set()


def test_there_is_room_for_an_operator_whoever_else_calls(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CALLS", 3)
    monkeypatch.setattr(server, "_FOR_OPERATORS", 3)
    with Served(tmp_path, keys) as served:
        watching = [served.client(name).events(dict) for name in ("site-a", "site-b", "viewer")]
        assert [next(events).kind for events in watching] == ["welcome"] * 3
        with pytest.raises(HubUnreachable, match="too many"):
            served.client("a").call("ping")
        assert served.client("boss").call("ping", body=b"in?") == ({}, b"in?")


def test_what_is_announced_takes_no_room_and_no_more_than_the_run_can_need(world: World) -> None:
    world.start(1)
    site, spool = world.client("a"), world.folder / "hub.store" / "incomplete"

    def announced(kind: str, size: int) -> None:
        header = site._header({"kind": kind}) | {"key": key_of(str(size).encode()), "size": size, "start": 0}
        site._method("stream_unary", "put")(iter([pack(header)]), timeout=5)

    for size in range(60 << 20, (60 << 20) + 18):
        announced("run_config", size)
    assert len(os.listdir(spool)) == 18
    assert sum(path.stat().st_blocks for path in spool.iterdir()) == 0
    member: Any = world.join("a")
    world.rounds(1)
    for kind in ("payload", "state"):
        with pytest.raises(Refused, match=f"a {kind} of .* bytes is too large for this run"):
            member.connection._client.send(bytes((1 << 20) + CHUNK), {"kind": kind})
    assert world.folder.joinpath("hub.store").stat().st_mode & 0o077 == 0


def test_a_name_with_a_new_line_writes_none_into_the_log(of_module: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(Refused):
        of_module.client("site-a").call("ping\n2026-01-01 ERROR the hub was robbed")
    assert put(of_module.client("site-b"), b"goes on")
    assert [text for text in caplog.messages if "\n" in text] == []
    assert any("the hub was robbed" in text for text in caplog.messages)


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_who_is_connected_is_sent_away_when_its_certificate_is_no_longer_valid(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(tmp_path / "keys")
    with Served(tmp_path, keys) as served:
        events = served.client("site-a").events(dict)
        assert next(events).kind == "welcome"
        if how == "revoked":
            revoke_keys(keys, "site-a")
        else:
            monkeypatch.setattr(keys_module, "_ends", lambda certificate: datetime(2026, 1, 1, tzinfo=timezone.utc))
        with pytest.raises(Denied, match=f"certificate of site 'site-a' .*{how}"):
            list(events)


def test_calls_that_are_replayed_or_come_in_another_order_change_nothing(world: World) -> None:
    world.start(2)
    world.join("a", "b")
    said: list[tuple[HubClient, str, Any, bytes]] = []

    def noted(client: HubClient, call: Any, name: str, about: Any = None, body: bytes = b"") -> Any:
        said.append((client, name, about, body))
        return call(name, about, body)

    for site in world.sites.values():
        client: Any = site.connection._client
        client.call = partial(noted, client, client.call)
    world.rounds(4)
    records, chance = world.status()["records"], random.Random(0)
    for client, name, about, body in chance.sample(said, len(said)):
        if name != "leave":
            with suppress(HubError, Refused):
                HubClient.call(client, name, about, body)
    world.more(2)
    require_agreement(world.sites.values())
    weights = [[own.weight for own in record.counted] for record in map(Record.from_bytes, told(world))]
    assert len(weights) > records
    assert {weight for own in weights for weight in own} <= {
        site.samples * steps for site in world.sites.values() for steps in range(1, 40)
    }


def test_a_quorum_that_is_lost_and_comes_back_closes_rounds_again(keys: Path, tmp_path: Path) -> None:
    world = World(tmp_path, keys, replace(TERMS, quorum=2))
    world.start(2)
    world.join("a", "b")
    world.rounds(2)
    world.kill("b")
    # What is open closes; then nothing does, and the one that is left trains on.
    end = time.monotonic() + 2 * TERMS.lease
    while time.monotonic() < end:
        world.sites["a"].step()
        time.sleep(0.005)
    rounds = list(world.sites["a"].rounds)
    for _ in range(100):
        world.sites["a"].step()
    assert world.sites["a"].rounds == rounds
    world.join("b")
    world.more(2)
    require_agreement(world.sites.values())
    world.close()


def told(world: World) -> list[bytes]:
    return [text for _, text in world.service.ledger.read()]


def test_a_stranger_at_the_port_of_the_metrics_reads_them_and_no_more() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    server = MetricsServer("127.0.0.1:0", lambda: {"run": "llm", "founded": False, "trouble": None, "missing": 2})
    try:
        for sent in (
            b"GET /evict?who=a HTTP/1.0\r\n\r\n",
            b"POST /metrics HTTP/1.0\r\nContent-Length: 3\r\n\r\nend",
            random.randbytes(4096),
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger, suppress(ConnectionError):
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(1 << 16)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert b'sdiloco_missing_sites{run="llm"} 2.0' in answer.read()
    finally:
        server.close()
