"""Who is let in: no key keeps others out, what is announced takes no room, and nobody writes lines of the hub's log."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import server
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.keys import load
from lightning_sdiloco.federation.wire import CHUNK, Busy, pack
from tests.federation.hubs import Served, World, put, until
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
        assert set(ended) == {"ABORTED"}
        for name in ("site-a", "boss"):
            assert served.client(name).call("ping", body=b"room?") == ({}, b"room?")
        with pytest.raises(Busy, match="too many"):
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
        with pytest.raises(Busy, match="too many"):
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
