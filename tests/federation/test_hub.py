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
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
    Record,
    Recorded,
)
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.run_config import RETENTION
from lightning_sdiloco.federation.state_requests import holds
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.federation.wire import CHUNK, HubError, HubUnreachable, NoSpace, pack
from tests.federation.hubs import TERMS, Served, World, joined, put, require_agreement, until
from tests.federation.scripted import RUN, run_config
from tests.small_disk import fill, small_disk
from tests.test_rules import of_rooms, words_of
from tests.tools.command import told


def test_a_founded_run_outlives_deaths_evictions_and_a_rollback(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning_sdiloco")

    def rounds() -> list[int]:
        return [own["round"] for own in world.service.coordinator.status()["fragments"]]

    def hears_that_it_was_evicted(connection: HubConnection) -> None:
        with pytest.raises(Refused, match="evicted"):
            world.run(lambda: connection.events() and False)

    world.start(sites=2)
    world.join("a")
    world.run(lambda: any("1 more sites are needed" in told for told in world.sites["a"].told))
    assert not world.status()["founded"]
    world.join("b")
    world.rounds(4)
    assert not any(site.states for site in world.sites.values())
    # Its connection tells of its death, so nobody waits even for the grace.
    world.kill("b")
    world.more(4, longest_step=TERMS.grace)
    joiner = world.join("c", seed=5)
    world.run(lambda: joiner.counted >= 2)
    assert joiner.states == ["a"]
    assert [
        caplog.messages.count(word) for word in ("b has joined", "b has left", "c has joined")
    ] == [1, 1, 1]
    require_agreement(world.sites.values())
    status = world.status()
    assert [status["sites"][name]["state"] for name in "ab"] == ["follows", "gone"]
    assert 0 < status["sites"]["c"]["share"] < 1
    assert status["sites"]["a"]["bytes"] >= 8 * 16
    # The hub dies. Nobody waits while it is away: they train on.
    before = rounds()
    world.service.close()
    at = world.sites["a"].at
    world.run(lambda: world.sites["a"].at > at + 2 * TERMS.sync_every, longest_step=0.5)
    world.start()
    # What was contributed by all before it died may be closed by now.
    assert all(own <= now <= own + 1 for own, now in zip(before, rounds(), strict=True))
    world.more(2)
    assert [site.welcomes for site in world.sites.values()] == [2, 3]
    # An operator throws one out. It stays out, also at a hub that was started again, and comes as a
    # new incarnation.
    evicted = world.sites.pop("c")
    with pytest.raises(Refused, match="there is no site 'd' here"):
        world.ask("boss", "evict", who="d")
    world.ask("boss", "evict", who="c")
    hears_that_it_was_evicted(evicted.connection)
    world.service.close()
    world.start()
    again = world.connect("c")
    again.incarnation = again._client.incarnation = evicted.connection.incarnation
    again.hello(evicted.follower)
    hears_that_it_was_evicted(again)
    again.close()
    world.join("c", seed=3)
    world.more(1)
    # All die with the hub, and a run that is rolled back is there for who comes.
    before = rounds()
    for name in "ac":
        world.kill(name)
    world.service.close()
    world.start()
    joiner = world.join("b", seed=9)
    world.rounds(max(before) + 1)
    assert set(joiner.states) == {"the snapshot"}
    world.kill("b")
    until(lambda: world.service.coordinator.status()["sites"]["b"]["state"] == "gone")
    world.ask("boss", "rollback", round=2)
    assert max(rounds()) <= 2
    world.join("c", seed=4)
    world.rounds(4)


@patch("lightning_sdiloco.federation.remote._LONGEST_LEASE", 0.2)
def test_forbidden_messages_of_a_member_are_refused_and_the_run_continues(world: World) -> None:
    world.found("a", rounds=1)
    stranger = world.client("b")
    other = world.sites["a"].follower
    posing = world.client("c")
    hello = json.loads(other.hello(RUN).to_bytes())
    beats = {"heartbeat": json.loads(other.heartbeat().to_bytes())}
    own = json.loads(
        Follower(TERMS, run_config(TERMS).key, "c", posing.incarnation).hello(RUN).to_bytes()
    )
    sent = Contribution(
        0, 1, "a", other.incarnation, run_config(TERMS).key, 4, 1, (Payload(key_of(b"bytes"), 5),)
    )
    for say, words in (
        (lambda: stranger.send(b"bytes", {"kind": "payload"}), "has not said hello"),
        (lambda: stranger.send(b"bytes", {"kind": "other"}), "a blob is a run config"),
        (lambda: stranger.send(b"{}", {"kind": "run_config"}), "runconfig lacks"),
        (lambda: stranger.call("contribute", {}, b"{}"), "contribution lacks"),
        (lambda: stranger.call("contribute", {}, b"\xff" * 99), "not JSON"),
        (lambda: stranger.call("skip", {}, b"[]"), "not an object"),
        (lambda: stranger.call("state", {"without": 3}), "without is not a list"),
        (lambda: stranger.call("give", {"parts": []}, b"{}"), "stateheader lacks"),
        # Nor what another one says: its hello, its heartbeat, its contribution.
        (lambda: next(posing.events(lambda: {"hello": hello})), "site 'c' speaks only for itself"),
        (lambda: posing.call("hello", {"hello": hello}), "site 'c' speaks only for itself"),
        (
            lambda: list(posing.events(lambda: {"hello": own}, lambda: beats)),
            "site 'c' speaks only for itself",
        ),
        (lambda: posing.call("contribute", {}, sent.to_bytes()), "site 'c' speaks only for itself"),
    ):
        with pytest.raises(Refused, match=words):
            say()
    for changed, words in (
        ({"compression": "'fp4'"}, "settings.compression is 'fp4' here and 'none' there"),
        ({"seed": "3"}, "settings.seed is 3 here and missing there"),
    ):
        connection = world.connect("b")
        with pytest.raises(ValueError, match="compression|seed"):
            connection.agree(run_config(TERMS, **changed)).require_same(
                run_config(TERMS, **changed)
            )
        # One that says hello all the same.
        connection.hello(
            Follower(TERMS, run_config(TERMS, **changed).key, "b", connection.incarnation)
        )
        assert connection.wait(20)
        with pytest.raises(Refused, match=words):
            connection.events()
        connection.close()
    # A name in use: it waits for as long as a process that died could be in its way.
    second = world.connect("a")
    with pytest.raises(Refused, match="in use by a running process"):
        second.agree(run_config(TERMS))
    second.hello(Follower(TERMS, run_config(TERMS).key, "a", second.incarnation))
    assert second.wait(20)
    assert isinstance(second.events()[0], Lost)
    world.more(1)


def test_a_full_disk_is_reported_loses_nothing_and_the_run_continues_with_room(
    tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        world = World(disk, keys)
        world.found("a", "b", rounds=2)
        filler = fill(disk)
        world.run(
            lambda: any(
                "no space left" in told for site in world.sites.values() for told in site.told
            )
        )
        assert "no space left" in caplog.text
        # It answers, and what it told before is there.
        records = world.status()["records"]
        assert records >= 4
        filler.unlink()
        world.more(2)
        world.service.close()
        status = world.start().coordinator.status()
        assert status["records"] > records
        assert [own["round"] for own in status["fragments"]] >= [4, 4]
        world.close()


def test_announced_payloads_take_no_room_and_cannot_exceed_the_needs_of_the_run(
    world: World,
) -> None:
    world.start(1)
    site = world.client("a")
    spool = world.folder / "hub.store" / "incomplete"

    def announced(kind: str, size: int) -> None:
        header = site._header({"kind": kind}) | {
            "key": key_of(str(size).encode()),
            "size": size,
            "start": 0,
        }
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


def test_replayed_calls_change_nothing_and_a_returning_quorum_closes_rounds_again(
    world: World,
) -> None:
    world.terms = replace(TERMS, quorum=2)
    world.found("a", "b")
    said: list[tuple[HubClient, str, Any, bytes]] = []

    def noted(client: HubClient, call: Any, name: str, about: Any = None, body: bytes = b"") -> Any:
        said.append((client, name, about, body))
        return call(name, about, body)

    for site in world.sites.values():
        client: Any = site.connection._client
        client.call = partial(noted, client, client.call)
    world.rounds(4)
    records = world.status()["records"]
    chance = random.Random(0)
    for client, name, about, body in chance.sample(said, len(said)):
        if name != "leave":
            with suppress(HubError, Refused):
                HubClient.call(client, name, about, body)
    world.more(2)
    closed = [Record.from_bytes(text) for _, text in world.service.ledger.read()]
    assert len(closed) > records
    possible = {site.samples * steps for site in world.sites.values() for steps in range(1, 40)}
    assert {own.weight for record in closed for own in record.counted} <= possible
    world.kill("b")
    # What is open closes; then nothing does, and the one that is left trains on.
    rounds = list[list[int]]()
    for seconds in (2 * TERMS.lease, TERMS.lease):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            world.sites["a"].step()
            time.sleep(0.005)
        rounds.append(list(world.sites["a"].rounds))
    assert rounds[0] == rounds[1]
    world.join("b")
    world.more(2)


# A hub whose disk is lost: a copy was made while the run went on, and the run goes on from it


def test_a_run_goes_on_from_a_copy_of_its_hub(world: World, tmp_path: Path) -> None:
    first = tmp_path / "first"
    copy = tmp_path / "copy"
    first.mkdir()
    world.found("a", "b", "c", rounds=3, ledger=first / "hub.sqlite", backups=copy)
    assert f"records are in {copy}, at the hub" in told("hub", "backup", *world.asked("boss"))
    world.more(1)
    # Later ones take the place of earlier ones, and hold nothing that is of no use.
    told("hub", "backup", *world.asked("boss"))
    stored = [
        {path.name for path in (folder / "hub.store/blobs").iterdir()} for folder in (first, copy)
    ]
    assert stored[1] <= stored[0]
    assert sorted(path.name for path in copy.iterdir()) == ["hub.sqlite", "hub.store"]
    assert copy.stat().st_mode & 0o077 == 0
    # All is lost but the copy.
    for name in ("a", "b", "c"):
        world.kill(name)
    world.service.close()
    shutil.rmtree(first)
    for folder in (copy, copy / ".." / "copy"):
        with pytest.raises(ValueError, match="the run itself is in that folder"):
            world.start(ledger=copy / "hub.sqlite", backups=folder)
    world.start(ledger=copy / "hub.sqlite", backups=first)
    records = world.status()["records"]
    assert records >= 6
    world.join("a", "b", seed=7)
    world.run(lambda: world.status()["records"] > records + 4)
    require_agreement(world.sites.values())


def test_a_hub_copies_by_itself_and_says_when_it_cannot(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = world.folder / "copy" / "hub.sqlite"
    world.found("a", rounds=2, backups=ledger.parent, backups_every=0.3)
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
    world.found("a", "b", "c", rounds=4)
    # One has landed a round of which the others know nothing any more.
    world.sites["c"].step()
    before = {name: list(site.rounds) for name, site in world.sites.items()}
    world.service.close()
    (tmp_path / "hub.sqlite").unlink()
    shutil.rmtree(tmp_path / "hub.store")
    world.start(3, again, refound=True)
    world.run(lambda: world.status()["founded"])
    world.more(3)
    for name, site in world.sites.items():
        assert all(now > then for now, then in zip(site.rounds, before[name], strict=True))
    # It goes on after a restart too, gives a joiner a state, and is not founded once more.
    world.service.close()
    with pytest.raises(ValueError, match="start the hub without --refound"):
        world.start(3, again, refound=True)
    world.start(ledger=again)
    world.join("site-a", seed=5)
    world.more(2)


# What a site that comes or returns waits for


class Chain:
    """Lets each call of connections take some time, and counts how many followed one another."""

    def __init__(self, *connections: HubConnection) -> None:
        self.length = 0
        for connection in connections:
            for name in ("send", "get", "call"):
                setattr(
                    connection._client,
                    name,
                    partial(self.slowly, getattr(connection._client, name)),
                )

    def slowly(self, call: Callable[..., Any], *arguments: Any, **choices: Any) -> Any:
        after = self.length
        time.sleep(0.1)
        answer = call(*arguments, **choices)
        self.length = max(self.length, after + 1)
        return answer


def test_joining_or_returning_takes_few_round_trips_for_any_number_of_fragments(
    world: World,
) -> None:
    world.terms = replace(TERMS, fragments=16, sync_every=16, overlap_steps=1, lease=30.0)
    donor = world.found("a", rounds=3)
    joiner = world.join("b", seed=3)
    chain = Chain(donor.connection, joiner.connection)
    until(lambda: (donor.hear(), joiner.is_up_to_date())[1])
    assert joiner.states == ["a"]
    # It asks, the donor sends all parts, says so, all are fetched, and it says hello again. Of the
    # payloads of the 48 records before that none were of use. One or two more on a machine that is
    # busy.
    assert chain.length <= 7
    before = joiner.rounds
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
            and min(joiner.rounds) > min(before)
        )
    )
    assert chain.length <= 4


@patch("lightning_sdiloco.federation.remote._UNREAD", 2)
def test_missing_payloads_are_fetched_again_and_a_cut_is_noticed_without_a_reader(
    world: World,
) -> None:
    world.terms = replace(TERMS, grace=0.3)
    world.found("a", "b", rounds=1)
    quiet = world.sites["b"]
    failed = list[str]()
    get = quiet.connection._client.get_small

    def fails_first(wanted: Sequence[Payload]) -> Any:
        if not failed:
            failed.append(wanted[0].key)
            raise HubUnreachable("a connection for payloads broke.")
        return get(wanted)

    quiet.connection._client.get_small = fails_first
    world.run(lambda: failed)
    world.more(1)
    assert quiet.welcomes == 1
    del world.sites["b"]
    world.more(2)
    unread = quiet.connection._events
    until(
        lambda: sum(isinstance(told, Recorded) and told.blobs is not None for told in unread) == 2
    )
    world.service.close()
    until(lambda: any(isinstance(told, Lost) for told in unread), 5.0)


def test_a_fetch_begun_by_an_earlier_connection_is_reported_by_the_next_one_only(
    world: World,
) -> None:
    connection: Any = world.found("a", rounds=2).connection
    until(lambda: not connection.records.fetching and not connection.events())
    record = world.service.coordinator.ledger.history[0][0]
    get = connection._client.get_small
    asked = threading.Event()
    goes_on = threading.Event()

    def told() -> list[Any]:
        heard = [one for one in connection.events() if isinstance(one, Recorded) and one.blobs]
        return [one for one in heard if one.record == record]

    def slow(wanted: Any) -> Any:
        asked.set()
        assert goes_on.wait(10)
        return get(wanted)

    with patch.object(connection._client, "get_small", slow):
        connection.records.applied = [0, 0]
        for lost in (True, False):
            asked.clear()
            goes_on.clear()
            connection.hear(Event("record", {}, record.to_bytes()))
            assert asked.wait(10)
            if lost:
                connection.hear(Event("lost", {"why": "the link is cut", "kind": "HubUnreachable"}))
            goes_on.set()
            if lost:
                time.sleep(0.5)
                assert told() == []
            else:
                until(told)


def test_a_round_costs_each_site_one_stream_however_many_sites_there_are(world: World) -> None:
    world.terms = replace(TERMS, grace=60.0, lease=60.0)
    service = world.start(sites=4)
    streams = list[Sequence[str]]()
    together = service._together
    service._together = lambda keys: (streams.append(keys), together(keys))[1]
    world.join("a", "b", "c", "site-a")
    world.rounds(4)
    records = service.coordinator.ledger.seq
    assert sum(map(len, streams)) > len(streams)
    assert len(streams) <= 4 * records


@patch("lightning_sdiloco.federation.ledger.SNAPSHOT_EVERY", 4)
def test_a_snapshot_that_arrives_some_rounds_later_takes_the_place_of_the_one_before(
    world: World,
) -> None:
    site = world.found("a", rounds=2)
    given = list[Any]()
    give = site.connection.give
    site.connection.give = lambda *state: given.append(state)
    world.run(lambda: given)
    world.more(12)
    give(*given[0])
    rounds = [at.round for at in given[0][1].applied]
    until(lambda: rounds in world.status()["snapshots"])
    assert world.status()["snapshots"] == [rounds]
    assert world.service.coordinator.ledger.kept_from == tuple(round + 1 for round in rounds)


def test_a_snapshot_comes_sooner_when_the_disk_cannot_hold_all_payloads_until_then(
    world: World,
) -> None:
    site = world.found("a", rounds=RETENTION + 4)
    ledger = world.service.coordinator.ledger
    assert [[at.round for at in own.applied] for own in ledger.snapshots.headers] == [[0, 0]]
    # A little less than it still needs.
    with patch.object(BlobStore, "free", world.status()["disk"]["still_needs"] - 1):
        world.run(lambda: min(at.round for at in ledger.snapshots.headers[-1].applied) > RETENTION)
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
    launched: list[tuple[Any, Any]] = []
    second.connection.contribute = lambda *own: launched.append(own)
    until(lambda: second.step() or launched)
    world.kill("b")
    until(lambda: world.service.coordinator.status()["sites"]["b"]["state"] == "gone")
    coordinator = world.service.coordinator
    hellos = list[str]()
    hello = coordinator.hello
    coordinator.hello = lambda peer, about: (hellos.append(peer.name), hello(peer, about))[1]
    second.connection = again = world.connect("b")
    second.follower.incarnation = again.incarnation
    again.agree(run_config(TERMS))
    for own in launched:
        again.contribute(*own)
    time.sleep(0.2)
    again.hello(second.follower)
    ledger = coordinator.ledger
    until(
        lambda: (
            second.is_up_to_date()
            and (ledger.closed[0].round or "b" in ledger.open.get(0, OpenRound()).arrived)
        )
    )
    time.sleep(0.2)
    # It was not refused, and so said hello once, and has been told what it missed once.
    assert "was not taken" not in caplog.text
    assert hellos == ["b"]


def test_a_contribution_of_several_ranks_counts_once_every_ranks_payload_is_there(
    world: World,
) -> None:
    world.start(sites=1)
    hub = f"127.0.0.1:{world.port}"
    first = world.connect("a", ranks=2)
    clients = [
        HubClient(hub, RUN, "a", world.keys, channels=2, incarnation=first.incarnation)
        for _ in range(2)
    ]
    others = [HubConnection(client, 1, 2) for client in clients]
    world.open += others
    site = joined(first)
    coordinator = world.service.coordinator
    until(lambda: site.hear() or site.follower.follows)
    first.heartbeat(site.follower)
    for shards in others:
        shards.reach()
    for _ in range(8):
        site.follower.trained(4)
    halves = b"one half of it", b"the other half"
    payloads = tuple(Payload(key_of(half), len(half)) for half in halves)
    assert site.follower.launches(8) == [0]
    own = site.follower.complete(
        replace(site.follower.begin(0, 8), digest=site.digests()[0], payloads=payloads)
    )
    assert own is not None
    first.contribute(own, {payloads[0].key: halves[0]})
    until(lambda: holds(coordinator.store, payloads[:1]))
    time.sleep(0.2)
    assert coordinator.ledger.members["a"].connected
    assert not list(coordinator.journal.read())
    others[0].contribute(own, {payloads[1].key: halves[1]})
    until(lambda: site.hear() or site.blobs)
    (record,) = [Record.from_bytes(text) for _, text in coordinator.journal.read()]
    assert [one.payloads for one in record.counted] == [payloads]
    # The first rank has fetched nothing of the other one, and the other one, started anew, its own
    # half alone.
    assert site.blobs == {record.key: {payloads[0].key: halves[0]}}
    others[1].fetch(record)
    fetched = list[Any]()
    until(lambda: fetched.extend(others[1].events()) or fetched)
    assert fetched == [Recorded(record, {payloads[1].key: halves[1]})]
    # Each rank knows what its own link carried; what was there already tells nothing.
    rates = [one.sends_bytes_per_s for one in (first, *others)]
    assert min(rates[:2]) > 0 == rates[2]
    world.service.close()
    with pytest.raises(ExchangeError, match="Each rank of a site calls the hub itself"):
        world.connect("a").reach(seconds=0.0)


# What a hub needs


def test_nothing_that_decides_knows_the_clock_that_can_be_set() -> None:
    # Certificates are valid from one date to another; all else goes by clocks that nobody sets.
    walls = {
        "time.time",
        "time.time_ns",
        "time.localtime",
        "datetime.datetime.now",
        "datetime.now",
        "datetime.utcnow",
    }
    users = [module for module in of_rooms("comm", "federation") if words_of(module) & walls]
    assert users == ["lightning_sdiloco.federation.keys"]


def test_the_memory_of_a_hub_is_bounded_by_chunks_and_connections(
    tmp_path: Path, keys: Path
) -> None:
    def peak() -> int:
        """Bytes that this process has had at most since the last call."""
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    size = 48 << 20
    channels = 4
    blob = bytearray(os.urandom(1 << 20)) * (size >> 20)
    with Served(tmp_path, keys) as served:
        site = served.client("a", channels=channels)
        # The first one makes threads and connections.
        put(site, os.urandom(4 << 20))
        peak()
        peaks = [peak()]
        for number in range(2):
            blob[0] = number
            key = put(site, blob)
            peaks.append(peak())
    # Of each connection at most a window and some chunks are in memory, at both ends, which are in
    # this process here.
    bound = 2 * channels * (8 * CHUNK + (1 << 20))
    assert bound < size / 1.9
    assert max(peaks[1] - peaks[0], peaks[2] - peaks[1]) < bound
    assert (tmp_path / "store" / "blobs" / key).stat().st_size == size


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
    (blobs, before), (more, after) = blobs_and_bytes_after(80), blobs_and_bytes_after(130)
    tracemalloc.stop()
    assert more < blobs + 200
    # Of every record a number is kept. A contribution or a record that stayed would be a kilobyte.
    assert after - before < 50 * terms.fragments * 500
