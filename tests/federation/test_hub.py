"""A hub with its rules and scripted sites over gRPC: founding, deaths, returns, refusals, a full
disk, and memory.
"""

import gc
import json
import os
import random
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lightning_sdiloco.errors import ExchangeError, Refused
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.ledger import OpenRound
from lightning_sdiloco.federation.memory import InProcessHub
from lightning_sdiloco.federation.messages import (
    Contribution,
    Event,
    Lost,
    Payload,
    Position,
    Record,
    Recorded,
    StateOffered,
    Welcome,
    Welcomed,
    event_of,
    read_event,
)
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.run_config import RETENTION, SNAPSHOT_EVERY
from lightning_sdiloco.federation.state_requests import holds
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.federation.wire import CHUNK, HubError, HubUnreachable, NoSpace, pack
from tests.federation.hubs import TERMS, Served, World, joined, put, until
from tests.federation.scripted import RUN, ScriptedSite, run_config
from tests.small_disk import fill, small_disk
from tests.test_rules import of_rooms, words_of
from tests.tools.command import told


def rounds_of(world: World) -> list[int]:
    fragments = world.service.coordinator.status()["fragments"]
    return [fragment["round"] for fragment in fragments]


def restart(world: World) -> None:
    world.service.close()
    world.start()


def require_eviction(world: World, connection: HubConnection) -> None:
    """Asserts that a connection hears that its site was evicted."""
    with pytest.raises(Refused, match="evicted"):
        world.run(lambda: connection.events() and False)


def reconnected(world: World, site: ScriptedSite) -> HubConnection:
    """Another connection of the same incarnation of a site."""
    connection = world.connect(site.follower.site)
    connection.incarnation = site.connection.incarnation
    connection._client.incarnation = site.connection.incarnation
    connection.hello(site.follower)
    return connection


def test_a_founded_run_outlives_deaths_evictions_and_a_rollback(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning_sdiloco")
    world.start(sites=2)
    first = world.join("a")
    world.run(lambda: "Sites still missing: 1" in "".join(first.messages))
    assert not world.status()["founded"]
    world.join("b")
    world.rounds(4)
    assert not any(site.donors for site in world.sites.values())
    # Its connection tells of its death, so nobody waits even for the grace.
    world.kill("b")
    world.more(4, longest_step=TERMS.grace)
    joiner = world.join("c", seed=5)
    world.run(lambda: joiner.counted >= 2)
    assert joiner.donors == ["a"]
    for message in ("b has joined", "b has left", "c has joined"):
        assert caplog.messages.count(message) == 1
    world.require_agreement()
    sites = world.status()["sites"]
    assert [sites[name]["state"] for name in "ab"] == ["follows", "gone"]
    assert 0 < sites["c"]["share"] < 1
    assert sites["a"]["bytes"] >= 8 * 16
    # The hub dies. Nobody waits while it is away: they train on.
    rounds_before = rounds_of(world)
    world.service.close()
    two_intervals_later = first.inner_steps + 2 * TERMS.sync_every
    world.run(lambda: first.inner_steps > two_intervals_later, longest_step=0.5)
    world.start()
    # A round to which all contributed before it died may be closed by now.
    for before, now in zip(rounds_before, rounds_of(world), strict=True):
        assert before <= now <= before + 1
    world.more(2)
    assert [site.welcomes for site in world.sites.values()] == [2, 3]
    # An operator evicts a site. It stays out, also at a hub that was started again, and comes as a
    # new incarnation.
    evicted = world.sites.pop("c")
    with pytest.raises(Refused, match="site 'd' is not connected"):
        world.ask("boss", "evict", who="d")
    world.ask("boss", "evict", who="c")
    require_eviction(world, evicted.connection)
    restart(world)
    with closing(reconnected(world, evicted)) as again:
        require_eviction(world, again)
    world.join("c", seed=3)
    world.more(1)
    # All die with the hub, and a run that is rolled back is there for those who come.
    last_round = max(rounds_of(world))
    world.kill("a", "c")
    restart(world)
    joiner = world.join("b", seed=9)
    world.rounds(last_round + 1)
    assert set(joiner.donors) == {"the snapshot"}
    world.kill("b")
    until(lambda: world.state_of("b") == "gone")
    world.ask("boss", "rollback", round=2)
    assert max(rounds_of(world)) <= 2
    world.join("c", seed=4)
    world.rounds(4)


def follower_of(connection: HubConnection, **settings: str) -> Follower:
    """The follower of a site that would train with these settings."""
    key = run_config(TERMS, **settings).key
    return Follower(TERMS, key, connection.site, connection.incarnation)


def as_json(message: Any) -> Any:
    return json.loads(message.to_bytes())


def test_forbidden_messages_of_a_member_are_refused_and_the_run_continues(world: World) -> None:
    follower = world.found_run("a", rounds=1).follower
    stranger = world.client("b")
    for send, message in (
        (lambda: stranger.send(b"bytes", {"kind": "payload"}), "has not said hello"),
        (lambda: stranger.send(b"bytes", {"kind": "other"}), "a blob must be a run config"),
        (lambda: stranger.send(b"{}", {"kind": "run_config"}), "runconfig lacks"),
        (lambda: stranger.call("contribute", {}, b"{}"), "contribution lacks"),
        (lambda: stranger.call("contribute", {}, b"\xff" * 99), "not JSON"),
        (lambda: stranger.call("skip", {}, b"[]"), "not an object"),
        (lambda: stranger.call("state", {"without": 3}), "without is not a list"),
        (lambda: world.ask("boss", "amend", terms="grace"), "the terms are not a JSON object"),
        (
            lambda: world.ask("boss", "amend", terms={"H": 3}),
            "'H' cannot be amended. Amendable terms are rounds",
        ),
        (lambda: stranger.call("give", {"parts": []}, b"{}"), "stateheader lacks"),
    ):
        with pytest.raises(Refused, match=message):
            send()
    # Nor messages of another site: its hello, its heartbeat, its contribution.
    posing = world.client("c")
    key = run_config(TERMS).key
    hello = {"hello": as_json(follower.hello(RUN))}
    heartbeat = {"heartbeat": as_json(follower.heartbeat())}
    own_hello = {"hello": as_json(Follower(TERMS, key, "c", posing.incarnation).hello(RUN))}
    payload = Payload(key_of(b"bytes"), 5)
    contribution = Contribution(0, 1, "a", follower.incarnation, key, 4, 1, (payload,))
    for send in (
        lambda: next(posing.events(lambda: hello)),
        lambda: posing.call("hello", hello),
        lambda: list(posing.events(lambda: own_hello, lambda: heartbeat)),
        lambda: posing.call("contribute", {}, contribution.to_bytes()),
    ):
        with pytest.raises(Refused, match="site 'c' may act only for itself"):
            send()
    world.more(1)


@patch("lightning_sdiloco.federation.remote._MARGIN", 0.2)
def test_other_settings_and_a_name_in_use_are_refused_and_the_run_continues(world: World) -> None:
    world.found_run("a", rounds=1)
    for settings, message in (
        ({"compression": "'fp4'"}, "settings.compression is 'fp4' here and 'none' there"),
        ({"seed": "3"}, "settings.seed is 3 here and missing there"),
    ):
        connection = world.connect("b")
        changed = run_config(TERMS, **settings)
        with pytest.raises(ValueError, match="compression|seed"):
            connection.agree(changed).require_same(changed)
        # A site that says hello all the same.
        connection.hello(follower_of(connection, **settings))
        assert connection.wait(20)
        with pytest.raises(Refused, match=message):
            connection.events()
        connection.close()
    # A name in use: it waits for as long as a process that died could be in its way.
    second = world.connect("a", lease=0.2)
    with pytest.raises(Refused, match="in use by a running process"):
        second.agree(run_config(TERMS))
    second.hello(follower_of(second))
    assert second.wait(20)
    assert isinstance(second.events()[0], Lost)
    world.more(1)


def test_a_full_disk_is_reported_loses_nothing_and_the_run_continues_with_room(
    tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        world = World(disk, keys)
        world.found_run("a", "b", rounds=2)
        filler = fill(disk)
        messages = [site.messages for site in world.sites.values()]
        world.run(lambda: "no space left" in str(messages))
        assert "no space left" in caplog.text
        # It answers, and its earlier records are there.
        records = world.status()["records"]
        assert records >= 4
        filler.unlink()
        world.more(2)
        world.service.close()
        status = world.start().coordinator.status()
        assert status["records"] > records
        assert rounds_of(world) >= [4, 4]
        world.close()


def test_announced_payloads_take_no_room_and_cannot_exceed_the_needs_of_the_run(
    world: World,
) -> None:
    world.start(1)
    site = world.client("a")
    spool = world.folder / "hub.store" / "incomplete"

    def announce(kind: str, size: int) -> None:
        key = key_of(str(size).encode())
        header = site._header({"kind": kind}) | {"key": key, "size": size, "start": 0}
        site._method("stream_unary", "put")(iter([pack(header)]), timeout=5)

    for size in range(60 << 20, (60 << 20) + 18):
        announce("run_config", size)
    assert len(os.listdir(spool)) == 18
    assert sum(path.stat().st_blocks for path in spool.iterdir()) == 0
    world.service.close()
    world.start(1)
    assert os.listdir(spool) == [], "nobody continues these"
    member: Any = world.join("a")
    world.rounds(1)
    for kind in ("payload", "state"):
        with pytest.raises(Refused, match=f"a {kind} of .* bytes exceeds this run's limit"):
            member.connection._client.send(bytes((1 << 20) + CHUNK), {"kind": kind})
    assert world.folder.joinpath("hub.store").stat().st_mode & 0o077 == 0


def note_calls(world: World) -> list[Any]:
    """The calls that sites make from now on: client, name, header and body."""
    calls = list[Any]()

    def note(client: HubClient, call: Any, name: str, about: Any = None, body: bytes = b"") -> Any:
        calls.append((client, name, about, body))
        return call(name, about, body)

    for site in world.sites.values():
        client: Any = site.connection._client
        client.call = partial(note, client, client.call)
    return calls


def test_replayed_calls_change_nothing(world: World) -> None:
    world.found_run("a", "b")
    calls = note_calls(world)
    world.rounds(4)
    records = world.status()["records"]
    for client, name, *message in random.Random(0).sample(calls, len(calls)):
        if name != "leave":
            with suppress(HubError, Refused):
                HubClient.call(client, name, *message)
    world.more(2)
    closed = [Record.from_bytes(text) for _, text in world.service.ledger.read()]
    assert len(closed) > records
    weights = {counted.weight for record in closed for counted in record.counted}
    assert weights <= {ScriptedSite.samples * steps for steps in range(1, 40)}


def test_a_lost_quorum_is_named_everywhere_and_a_returning_one_closes_rounds_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.terms = replace(TERMS, quorum=2)
    world.found_run("a", "b", rounds=2)
    world.kill("b")
    # Open rounds close; then no more do, and the remaining site trains on.
    site = world.sites["a"]
    train_for(site, 2 * TERMS.lease)
    rounds = list(site.rounds)
    train_for(site, TERMS.lease)
    assert site.rounds == rounds
    # All hear of it who can do something: operators, the log, and the sites that are there.
    lost = "rounds need 2 sites (quorum), but only these are present: a. Missing: b (gone)"
    status = world.status()
    assert status["lost_quorum"]
    assert status["trouble"].startswith(lost)
    assert lost in told("status", *world.options_of("viewer")).replace("\n", " ")
    assert lost in caplog.text
    assert any(message.startswith(lost) for message in site.messages)
    world.join("b")
    world.more(2)
    assert world.status()["trouble"] is None
    assert "rounds can close again" in caplog.text


def train_for(site: ScriptedSite, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        site.step()
        time.sleep(0.005)


# A hub whose disk is lost: a copy was made during the run, and the run continues from it


def blobs_in(folder: Path) -> set[str]:
    return set(os.listdir(folder / "hub.store/blobs"))


def test_a_run_goes_on_from_a_copy_of_its_hub(world: World, tmp_path: Path) -> None:
    first = tmp_path / "first"
    copy = tmp_path / "copy"
    first.mkdir()
    world.found_run("a", "b", "c", rounds=3, ledger=first / "hub.sqlite", backups=copy)
    answer = told("hub", "backup", *world.options_of("boss"))
    assert f"records were copied to {copy} on the hub's machine" in answer
    world.more(1)
    # Later ones take the place of earlier ones, and hold nothing that is of no use.
    told("hub", "backup", *world.options_of("boss"))
    assert blobs_in(copy) <= blobs_in(first)
    assert sorted(path.name for path in copy.iterdir()) == ["hub.sqlite", "hub.store"]
    assert copy.stat().st_mode & 0o077 == 0
    # All is lost but the copy.
    world.kill("a", "b", "c")
    world.service.close()
    shutil.rmtree(first)
    for folder in (copy, copy / ".." / "copy"):
        with pytest.raises(ValueError, match="is the folder of the run itself"):
            world.start(ledger=copy / "hub.sqlite", backups=folder)
    world.start(ledger=copy / "hub.sqlite", backups=first)
    records = world.status()["records"]
    assert records >= 6
    world.join("a", "b", seed=7)
    world.run(lambda: world.status()["records"] > records + 4)
    world.require_agreement()


def test_a_hub_copies_by_itself_and_says_when_it_cannot(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = world.folder / "copy" / "hub.sqlite"
    world.found_run("a", rounds=2, backups=ledger.parent, backups_every=0.3)
    until(ledger.exists)
    before = ledger.read_bytes()
    no_space = Mock(side_effect=NoSpace("there is no space left on the disk for copies"))
    with patch.object(world.service.ledger, "back_up", no_space):
        until(lambda: "could not be copied: there is no space left" in caplog.text)
    world.more(1)
    assert ledger.read_bytes()[:16] == before[:16] == b"SQLite format 3\0"


def test_a_run_whose_ledger_is_lost_is_founded_again_from_the_state_of_its_sites(
    world: World, tmp_path: Path
) -> None:
    again = tmp_path / "again.sqlite"
    world.found_run("a", "b", "c", rounds=4)
    # One has landed a round of which the others know nothing any more.
    world.sites["c"].step()
    rounds_before = {name: list(site.rounds) for name, site in world.sites.items()}
    world.service.close()
    (tmp_path / "hub.sqlite").unlink()
    shutil.rmtree(tmp_path / "hub.store")
    world.start(3, again, refound=True)
    world.run(lambda: world.status()["founded"])
    world.more(3)
    for name, site in world.sites.items():
        for now, before in zip(site.rounds, rounds_before[name], strict=True):
            assert now > before
    # It continues after a restart, gives a joiner a state, and is not founded once more.
    world.service.close()
    with pytest.raises(ValueError, match="Start the hub without --refound"):
        world.start(3, again, refound=True)
    world.start(ledger=again)
    world.join("site-a", seed=5)
    world.more(2)


# Waits of a site that comes or returns


class Chain:
    """Lets each call of connections take some time, and counts how many followed one another."""

    def __init__(self, *connections: HubConnection) -> None:
        self.length = 0
        for connection in connections:
            client = connection._client
            for name in ("send", "get", "call"):
                setattr(client, name, partial(self.call_slowly, getattr(client, name)))

    def call_slowly(self, call: Callable[..., Any], *arguments: Any, **choices: Any) -> Any:
        length_before = self.length
        time.sleep(0.1)
        answer = call(*arguments, **choices)
        self.length = max(self.length, length_before + 1)
        return answer


def test_joining_or_returning_takes_few_round_trips_for_any_number_of_fragments(
    world: World,
) -> None:
    world.terms = replace(TERMS, fragments=16, sync_every=16, overlap_steps=1, lease=30.0)
    donor = world.found_run("a", rounds=3)
    joiner = world.join("b", seed=3)
    chain = Chain(donor.connection, joiner.connection)
    until(lambda: (donor.hear(), joiner.is_up_to_date())[1])
    assert joiner.donors == ["a"]
    # It asks, the donor sends all parts, says so, all are fetched, and it says hello again. Of the
    # payloads of the 48 records before that none were of use. One or two more on a machine that is
    # busy.
    assert chain.length <= 7
    rounds_before = joiner.rounds
    welcomes = joiner.welcomes
    world.service.coordinator.gone(Peer("site", "b", joiner.connection.incarnation))
    del world.sites["b"]
    world.more(1)
    chain = Chain(joiner.connection)
    joiner.connection.hello(joiner.follower)
    # Before it is let in again it does not know that it has missed something.
    until(
        lambda: (
            joiner.is_up_to_date()
            and joiner.welcomes > welcomes
            and min(joiner.rounds) > min(rounds_before)
        )
    )
    assert chain.length <= 4


@patch("lightning_sdiloco.federation.remote._UNREAD", 2)
def test_missing_payloads_are_fetched_again_and_a_cut_is_noticed_without_a_reader(
    world: World,
) -> None:
    world.terms = replace(TERMS, grace=0.3)
    world.found_run("a", "b", rounds=1)
    quiet = world.sites["b"]
    failed = list[str]()
    get_small = quiet.connection._client.get_small

    def fail_first(payloads: Sequence[Payload]) -> Any:
        if not failed:
            failed.append(payloads[0].key)
            raise HubUnreachable("a connection for payloads broke.")
        return get_small(payloads)

    quiet.connection._client.get_small = fail_first
    world.run(lambda: failed)
    world.more(1)
    assert quiet.welcomes == 1
    del world.sites["b"]
    world.more(2)
    unread = quiet.connection._events
    until(lambda: len(fetched_records(unread)) == 2)
    world.service.close()
    until(lambda: any(isinstance(event, Lost) for event in unread), 5.0)


def fetched_records(events: Sequence[Any]) -> list[Record]:
    """The records whose payloads have been fetched."""
    recorded = [event for event in events if isinstance(event, Recorded)]
    return [event.record for event in recorded if event.blobs is not None]


START_AGAIN = (Position.start(run_config(TERMS).key),) * TERMS.fragments


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(Event("lost", {"why": "a cut", "kind": "HubUnreachable"}), id="lost"),
        pytest.param(
            event_of(Welcomed(Welcome(START_AGAIN, (1, 1), rolled_back=True), None)),
            id="rolled_back",
        ),
    ],
)
def test_a_fetch_begun_before_a_cut_or_a_rollback_is_reported_only_if_begun_again(
    world: World, event: Event
) -> None:
    connection: Any = world.found_run("a", rounds=2).connection
    until(lambda: not connection.records.fetching and not connection.events())
    record = world.service.coordinator.ledger.history[0][0]
    get_small = connection._client.get_small
    fetching = threading.Event()
    released = threading.Event()

    def get_slowly(payloads: Any) -> Any:
        fetching.set()
        assert released.wait(10)
        return get_small(payloads)

    def begin_fetch() -> None:
        fetching.clear()
        released.clear()
        connection.hear(Event("record", {}, record.to_bytes()))
        assert fetching.wait(10)

    with patch.object(connection._client, "get_small", get_slowly):
        connection.records.applied = [0, 0]
        begin_fetch()
        connection.hear(event)
        released.set()
        time.sleep(0.5)
        assert record not in fetched_records(connection.events())
        begin_fetch()
        released.set()
        until(lambda: record in fetched_records(connection.events()))


def test_a_round_costs_each_site_one_stream_however_many_sites_there_are(world: World) -> None:
    world.terms = replace(TERMS, grace=60.0, lease=60.0)
    service = world.start(sites=4)
    with patch.object(service, "_together", wraps=service._together) as together:
        world.join("a", "b", "c", "site-a")
        world.rounds(4)
    streams = [call.args[0] for call in together.call_args_list]
    records = service.coordinator.ledger.seq
    assert sum(map(len, streams)) > len(streams)
    assert len(streams) <= 4 * records


@patch("lightning_sdiloco.federation.ledger.SNAPSHOT_EVERY", 4)
def test_a_snapshot_that_arrives_some_rounds_later_takes_the_place_of_the_one_before(
    world: World,
) -> None:
    site = world.found_run("a", rounds=2)
    states = list[Any]()
    give = site.connection.give
    site.connection.give = lambda *state: states.append(state)
    world.run(lambda: states)
    world.more(12)
    give(*states[0])
    _, header, _ = states[0]
    rounds = [position.round for position in header.applied]
    until(lambda: rounds in world.status()["snapshots"])
    assert world.status()["snapshots"] == [rounds]
    kept_from = world.service.coordinator.ledger.kept_from
    assert kept_from == tuple(round + 1 for round in rounds)


def test_a_snapshot_comes_sooner_when_the_disk_cannot_hold_all_payloads_until_then(
    world: World,
) -> None:
    site = world.found_run("a", rounds=RETENTION + 4)
    coordinator = world.service.coordinator
    ledger = coordinator.ledger

    def snapshot_rounds() -> list[int]:
        return [position.round for position in ledger.snapshots.headers[-1].applied]

    assert len(ledger.snapshots.headers) == 1
    assert snapshot_rounds() == [0, 0]
    # A little less than it still needs.
    # Always a little less than it still needs.
    free = property(lambda store: coordinator.room.still_needs - 1)
    with patch.object(BlobStore, "free", free):
        world.run(lambda: min(snapshot_rounds()) > RETENTION)
        assert max(snapshot_rounds()) < SNAPSHOT_EVERY - RETENTION, "it came sooner"
        world.more(1)
    assert len(ledger.snapshots.headers) == 1, "it is verified, and the one before is gone"
    assert min(ledger.kept_from) > min(site.rounds) - RETENTION - 2
    assert min(ledger.kept_from) > 1


def test_flights_of_a_checkpoint_wait_until_the_hub_has_admitted_the_site(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start(sites=2)
    first = world.join("a")
    second = world.join("b")
    until(lambda: (first.is_up_to_date(), second.is_up_to_date())[1])
    launches: list[tuple[Any, Any]] = []
    second.connection.contribute = lambda *launch: launches.append(launch)
    until(lambda: second.step() or launches)
    world.kill("b")
    until(lambda: world.state_of("b") == "gone")
    coordinator = world.service.coordinator
    ledger = coordinator.ledger
    with patch.object(coordinator, "hello", wraps=coordinator.hello) as hello:
        again = world.connect("b")
        second.connection = again
        second.follower.incarnation = again.incarnation
        again.agree(run_config(TERMS))
        for launch in launches:
            again.contribute(*launch)
        time.sleep(0.2)
        again.hello(second.follower)
        until(
            lambda: (
                second.is_up_to_date()
                and (ledger.closed[0].round or "b" in ledger.open.get(0, OpenRound()).arrived)
            )
        )
        time.sleep(0.2)
    # It was not refused, and so said hello once, and has been told what it missed once.
    assert "was not accepted" not in caplog.text
    assert [call.args[0].name for call in hello.call_args_list] == ["b"]


def lose_payloads(world: World) -> Record:
    """Trains until a round of the first fragment has closed whose payloads have rotted or vanished
    before a site could fetch them.
    """
    journal = world.service.coordinator.journal
    append = journal.append
    damaged_records = list[Record]()

    def append_and_damage(seq: int, text: bytes, notes: Any = None) -> None:
        append(seq, text, notes)
        record = Record.from_bytes(text)
        if not damaged_records and record.fragment == 0 and len(record.counted) == 2:
            damaged_records.append(record)
            altered, gone = [payload for (payload,) in record.sources]
            blobs = world.folder / "hub.store" / "blobs"
            (blobs / altered.key).write_bytes(bytes(altered.size))
            (blobs / gone.key).unlink()

    with patch.object(journal, "append", append_and_damage):
        world.run(lambda: damaged_records)
    return damaged_records[0]


def test_payloads_that_rot_or_vanish_in_the_store_are_named_and_sent_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.found_run("a", "b", rounds=2)
    record = lose_payloads(world)
    world.more(2)
    where = f"payloads of round {record.round} of fragment 0"
    assert sum(f"{where} are missing from the store" in text for text in caplog.messages) == 1
    for site in world.sites.values():
        assert site.donors == []
    world.run(lambda: world.status()["trouble"] is None)


def damage_next_state(world: World, source: str) -> Any:
    """Alters a part of the next state that the hub offers from a source, and lets another part of it
    vanish.
    """
    states = world.service.coordinator._states
    notify = states._notify
    damaged = list[str]()

    def damage_and_notify(event: Event, to: Any) -> None:
        offered = read_event(event)
        if isinstance(offered, StateOffered) and offered.source == source and not damaged:
            damaged.extend(part.key for part in offered.parts)
            blobs = world.folder / "hub.store" / "blobs"
            (blobs / damaged[0]).write_bytes(bytes(offered.parts[0].size))
            (blobs / damaged[1]).unlink()
        notify(event, to)

    return patch.object(states, "_notify", damage_and_notify)


@pytest.mark.parametrize("source", ["a", "the snapshot"])
def test_a_state_that_rots_in_the_store_is_named_everywhere_and_sent_again(
    source: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first = world.found_run("a", rounds=3)
    if source == "the snapshot":
        world.kill("a")
        until(lambda: world.state_of("a") == "gone")
    with damage_next_state(world, source):
        joiner = world.join("b", seed=5)
        world.run(lambda: "refuses the state" in caplog.text)
        if source == "the snapshot":
            world.run(lambda: "no site has a state" in "".join(joiner.messages))
            first.connection = reconnected(world, first)
            world.sites["a"] = first
        world.run(lambda: joiner.counted >= 2)
    (text,) = [text for text in caplog.messages if "refuses the state" in text]
    assert text.startswith(f"b refuses the state of {source}: blobs of it are gone from the store")
    assert world.status()["sites"]["b"]["refused_states"] == 1
    assert world.status()["sites"]["a"]["refused_states"] == 0


def test_a_rollback_frees_a_run_of_which_nobody_has_the_payloads(world: World) -> None:
    world.terms = replace(TERMS, fragments=1)
    world.found_run("a", "b", rounds=2)
    with patch.object(ScriptedSite, "give_again"):
        record = lose_payloads(world)
        rollback = f"sdiloco hub rollback {record.round - 1}"
        world.run(lambda: rollback in str(world.status()["trouble"]))
        world.ask("boss", "rollback", round=record.round - 1)
        world.more(2)
    assert world.status()["trouble"] is None


def test_a_contribution_of_several_ranks_counts_once_every_ranks_payload_is_there(
    world: World,
) -> None:
    coordinator = world.start(sites=1).coordinator
    first = world.connect("a", ranks=2)
    second, restarted = (second_rank(world, first) for _ in range(2))
    site = joined(first)
    until(lambda: site.hear() or site.follower.follows)
    first.heartbeat(site.follower)
    second.reach()
    restarted.reach()
    payloads = tuple(Payload(key_of(half), len(half)) for half in HALVES)
    halves = [{key_of(half): half} for half in HALVES]
    contribution = launched(site, payloads)
    first.contribute(contribution, halves[0])
    until(lambda: holds(coordinator.store, payloads[:1]))
    time.sleep(0.2)
    assert coordinator.ledger.members["a"].connected
    assert not list(coordinator.journal.read())
    second.contribute(contribution, halves[1])
    until(lambda: site.hear() or site.blobs)
    ((_, text),) = coordinator.journal.read()
    record = Record.from_bytes(text)
    assert [counted.payloads for counted in record.counted] == [payloads]
    # The first rank has fetched nothing of the other one, and the other one, started anew, only its
    # half.
    assert site.blobs == {record.key: halves[0]}
    restarted.fetch(record)
    fetched = list[Any]()
    until(lambda: fetched.extend(restarted.events()) or fetched)
    assert fetched == [Recorded(record, halves[1])]
    # Each rank knows what its own link carried; a payload that was there already tells nothing.
    assert first.sends_bytes_per_s > 0
    assert second.sends_bytes_per_s > 0
    assert restarted.sends_bytes_per_s == 0
    world.service.close()
    with pytest.raises(ExchangeError, match="Each rank of a site calls the hub directly"):
        world.connect("a", patience=0.0).reach()


def test_a_new_start_waits_for_the_lease_of_a_machine_that_died_without_a_word(
    world: World,
) -> None:
    world.found_run("a", "b", rounds=1)
    silent = world.sites.pop("b").connection
    heartbeat = world.service.coordinator.heartbeat

    def is_lost(peer: Peer, about: Any) -> None:
        """The connection stays open, as that of a machine without power does for a while."""
        if peer.incarnation != silent.incarnation:
            heartbeat(peer, about)

    with (
        patch.object(world.service.coordinator, "heartbeat", is_lost),
        patch("lightning_sdiloco.federation.remote._MARGIN", 1.0),
    ):
        world.sites["b"] = joined(world.connect("b", lease=TERMS.lease), world.terms)
        world.more(1)


def test_a_site_that_starts_before_its_hub_waits_for_its_patience(world: World) -> None:
    world.start(sites=1)
    world.service.close()
    with pytest.raises(ExchangeError, match="has not reached the hub for patience=1 s"):
        world.connect("a", patience=1.0).agree(run_config(TERMS))
    waiting: Any = world.connect("a", patience=100.0)
    times = chain([0.0], repeat(90.0))
    waiting.now = lambda: next(times)
    with ThreadPoolExecutor(1) as pool:
        agreed = pool.submit(waiting.agree, run_config(TERMS))
        time.sleep(0.5)
        world.start(sites=1)
        assert agreed.result(20).key == run_config(TERMS).key


HALVES = (b"one half of it", b"the other half")


def second_rank(world: World, first: HubConnection) -> HubConnection:
    """A connection of the second rank of two."""
    incarnation = first.incarnation
    client = HubClient(world.address, RUN, "a", world.keys, channels=2, incarnation=incarnation)
    connection = HubConnection(client, 1, 2)
    world.connections.append(connection)
    return connection


def launched(site: ScriptedSite, payloads: tuple[Payload, ...]) -> Contribution:
    """The first launch of a site, with a payload of each rank."""
    for _ in range(8):
        site.follower.trained(4)
    assert site.follower.launches(8) == [0]
    begun = site.follower.begin(0, 8)
    launch = site.follower.complete(replace(begun, digest=site.digests()[0], payloads=payloads))
    assert launch is not None
    return launch


# Needs of a hub


def test_nothing_that_decides_knows_the_clock_that_can_be_set() -> None:
    # Certificates are valid from one date to another; all else goes by clocks that nobody sets.
    wall_clocks = {
        "time.time",
        "time.time_ns",
        "time.localtime",
        "datetime.datetime.now",
        "datetime.now",
        "datetime.utcnow",
    }
    users = [module for module in of_rooms("comm", "federation") if words_of(module) & wall_clocks]
    assert users == ["lightning_sdiloco.federation.keys"]


def test_the_memory_of_a_hub_is_bounded_by_chunks_and_connections(
    tmp_path: Path, keys: Path
) -> None:
    size = 48 << 20
    channels = 4
    blob = bytearray(os.urandom(1 << 20)) * (size >> 20)
    with Served(tmp_path, keys) as served:
        site = served.client("a", channels=channels)
        # The first one makes threads and connections.
        put(site, os.urandom(4 << 20))
        peak_memory()
        peaks = [peak_memory()]
        for number in range(2):
            blob[0] = number
            key = put(site, blob)
            peaks.append(peak_memory())
    # Of each connection at most a window and some chunks are in memory, at both ends, which are in
    # this process here.
    bound = 2 * channels * (8 * CHUNK + (1 << 20))
    assert bound < size / 1.9
    assert peaks[1] - peaks[0] < bound
    assert peaks[2] - peaks[1] < bound
    assert (tmp_path / "store" / "blobs" / key).stat().st_size == size


def peak_memory() -> int:
    """Bytes that this process has had at most since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_the_memory_of_a_hub_does_not_grow_with_the_run() -> None:
    now = [0.0]
    terms = replace(TERMS, sync_every=2, overlap_steps=1)
    hub = InProcessHub(RUN, 1, lambda: now[0])
    site = joined(hub.connect("a"), terms)

    def blobs_and_bytes_after(round: int) -> tuple[int, int]:
        while min(site.rounds) < round:
            now[0] += 0.3
            site.step()
        gc.collect()
        return len(hub.store._blobs), tracemalloc.get_traced_memory()[0]

    blobs_and_bytes_after(30)
    tracemalloc.start()
    blobs_before, bytes_before = blobs_and_bytes_after(80)
    blobs_after, bytes_after = blobs_and_bytes_after(130)
    tracemalloc.stop()
    assert blobs_after < blobs_before + 200
    # Of every record a number is kept. A contribution or a record that stayed would be a kilobyte.
    assert bytes_after - bytes_before < 50 * terms.fragments * 500
