"""The hub goes and comes back: calls end soon with an error that says so, and are answered again by themselves."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation import Altered, BlobStore, Event, HubUnreachable, Missing, NoSpace, key_of
from lightning_sdiloco.federation.server import MAX_EVENTS
from lightning_sdiloco.federation.wire import CHUNK, CLIENT_OPTIONS
from tests.hub.hubs import Line, Served, put, serving, until


@pytest.fixture
def hub(keys: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, keys) as served:
        yield served


@pytest.fixture
def line(hub: Served) -> Iterator[Line]:
    line = Line(hub.port)
    yield line
    line.close()


def quickly(call: object, seconds: float = 5.0) -> None:
    began = time.monotonic()
    with pytest.raises(HubUnreachable):
        call()  # type: ignore[operator]
    assert time.monotonic() - began < seconds


def test_where_no_hub_is_every_call_ends_soon(hub: Served) -> None:
    free = Line(1)
    free.close()
    site = hub.mailbox("site-a", port=free.port)
    quickly(lambda: site.send(b"blob"))
    quickly(lambda: site.get(key_of(b"blob")))
    quickly(lambda: site.call("ping"))
    assert next(site.events(dict)).kind == "lost"
    # Where one is, a site far away has time to connect.
    assert dict(CLIENT_OPTIONS)["grpc.min_reconnect_backoff_ms"] >= 5000


def test_a_hub_that_dies_and_comes_back_is_found_again(keys: Path, tmp_path: Path) -> None:
    seen: list[Event] = []
    first = Served(tmp_path, keys)
    site = first.mailbox("site-a")
    first.mailboxes.clear()
    key = put(site, b"blob")
    watcher = threading.Thread(target=lambda: seen.extend(site.events(dict)))
    watcher.start()
    until(lambda: any(session.admitted for session in first.hub._sessions))
    first.close()
    # What waits in events hears of it; what is called meanwhile ends at once.
    until(lambda: not site.reachable)
    quickly(lambda: site.send(b"other"), 1.0)
    quickly(lambda: site.call("ping"), 1.0)
    with serving(tmp_path, keys, listen=f"127.0.0.1:{first.port}") as second:
        second.handler.record(b"after")
        until(lambda: site.reachable)
        assert site.get(key) == b"blob"
        site.send(b"other")
        site.close()
        watcher.join(20)
    assert not watcher.is_alive()
    assert seen[0].kind == "welcome"
    assert "lost" in [event.kind for event in seen]


def test_a_silent_hub_is_gone_after_some_beats_and_all_that_waits_ends(hub: Served, line: Line) -> None:
    site = hub.mailbox("site-a", port=line.port)
    events = site.events(dict)
    assert next(events).kind == "welcome"
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(next, events)
        time.sleep(0.5)
        assert not heard.done()
        line.flows.clear()
        waiting = pool.submit(site.send, os.urandom(20 * CHUNK))
        event = heard.result(10)
        assert event.kind == "lost"
        assert "silent" in event.header["why"]
        with pytest.raises(HubUnreachable):
            waiting.result(3)
        quickly(lambda: site.get(key_of(b"")), 1.0)
        line.flows.set()
        # It is the next event that connects again.
        hub.handler.record(b"record")
        again = pool.submit(next, events)
        assert again.result(20).kind in ("record", "lost")
        site.close()


def test_a_cut_just_as_a_site_says_hello_is_noticed_after_some_beats_too(hub: Served, line: Line) -> None:
    site = hub.mailbox("site-a", port=line.port, timeout=30.0)
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
        event = pool.submit(next, events).result(10)
        assert "silent for 0.8 s" in event.header["why"]
        assert pool.submit(next, events).result(10).kind == "record"
        site.close()


def test_connections_that_lead_nowhere_are_made_again_at_once(hub: Served, line: Line) -> None:
    site = hub.mailbox("site-a", port=line.port, channels=2)
    events = site.events(dict)
    key = put(site, os.urandom(4 * CHUNK))
    with ThreadPoolExecutor() as pool:
        hub.handler.record(b"record")
        assert pool.submit(next, events).result(10).kind == "record"
        heard = pool.submit(next, events)
        line.forget()
        assert heard.result(10).kind == "lost"
        # TCP and gRPC would find out in some ten seconds.
        began = time.monotonic()
        assert pool.submit(next, events).result(30).kind == "record"
        assert len(site.get(key)) == 4 * CHUNK
        assert time.monotonic() - began < 5
        site.close()


def test_what_has_arrived_is_not_sent_again_and_a_download_goes_on_where_it_was_cut(hub: Served, line: Line) -> None:
    site = hub.mailbox("site-a", port=line.port, channels=4)
    site.call("ping")
    blob, other = os.urandom(40 * CHUNK), os.urandom(40 * CHUNK)
    line.passed["up"], line.cut_after["up"] = 0, 20 * CHUNK
    assert hub.store.get(put(site, blob)) == blob
    # What was on its way in buffers is lost: some chunks for each connection.
    assert len(blob) <= line.passed["up"] < 1.6 * len(blob)
    key = hub.store.put(other)
    line.passed["down"], line.cut_after["down"] = 0, 20 * CHUNK
    assert site.get(key) == other
    assert len(blob) <= line.passed["down"] < 2 * len(blob)


def test_a_size_that_a_record_says_is_checked_before_memory_is_taken(hub: Served) -> None:
    site = hub.mailbox("site-a", max_blob=4 * CHUNK)
    key = put(site, bytes(CHUNK))
    with pytest.raises(Refused, match="too large"):
        site.get(key, 1 << 60)
    with pytest.raises(Malformed, match=r"has 262,143 bytes, and the hub says 262,144"):
        site.get(key, CHUNK - 1)
    assert site.get(key, CHUNK) == bytes(CHUNK)


def test_several_blobs_travel_at_the_same_time(hub: Served) -> None:
    sites = [hub.mailbox(name) for name in ("site-a", "site-b")]
    blobs = [os.urandom(5 * CHUNK + number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        keys = list(pool.map(lambda number: put(sites[number % 2], blobs[number]), range(6)))
        assert list(pool.map(lambda number: sites[1 - number % 2].get(keys[number]), range(6))) == blobs
        # Both send the same.
        same = os.urandom(9 * CHUNK)
        assert list(pool.map(lambda site: put(site, same), sites)) == [key_of(same)] * 2
    assert not os.listdir(Path(hub.store.url) / "incomplete")


def test_what_is_wrong_with_the_disk_of_the_hub_is_told_and_the_hub_serves_on(
    hub: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = hub.mailbox("site-a")
    key, other = put(site, b"old"), put(site, bytes(3 * CHUNK))
    hub.store.retain([other], age=0)
    with pytest.raises(Missing, match=key):
        site.get(key)
    with (Path(hub.store.url) / "blobs" / other).open("rb+") as file:
        file.write(b"\x01")
    with pytest.raises(Altered, match=other):
        site.get(other)

    def full(store: BlobStore, key: str, size: int) -> None:
        raise NoSpace("there is no space left: nothing was stored.")

    with monkeypatch.context() as patch:
        patch.setattr(BlobStore, "begin", full)
        with pytest.raises(NoSpace, match="no space left"):
            site.send(b"blob")
    assert site.get(put(site, b"blob")) == b"blob"


def test_who_does_not_listen_is_sent_away_and_the_hub_keeps_nothing_for_it(hub: Served) -> None:
    site, other = hub.mailbox("site-a"), hub.mailbox("viewer")
    slow, quick = (mailbox.events(dict) for mailbox in (site, other))
    hub.handler.record(b"record")
    assert next(slow).kind == next(quick).kind == "record"
    for session in list(hub.hub._sessions):
        if session.peer.name == "site-a":
            for _ in range(MAX_EVENTS + 2):
                session._waiting.append(Event("filling", {}))
    hub.hub.push(Event("more", {}))
    assert next(quick).kind == "more"
    until(lambda: [session.peer.name for session in hub.hub._sessions] == ["viewer"])


def test_closing_ends_everything(hub: Served) -> None:
    site = hub.mailbox("site-a")
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(list, site.events(dict))
        until(lambda: "hello" in "".join(hub.handler.seen))
        site.close()
        assert [event.kind for event in watching.result(10)] in ([], ["welcome"])
    quickly(lambda: site.call("ping"), 1.0)
