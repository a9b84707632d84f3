"""A run without a hub: scripted sites that meet in a folder or bucket, with real followers, keepers and connections."""

import json
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_sdiloco.comm import Malformed, key_of, shared_files
from lightning_sdiloco.errors import ExchangeError, Refused
from lightning_sdiloco.federation import Follower, Payload
from lightning_sdiloco.hub import FolderConnection, Lost, folder_shards, payloads_of
from lightning_sdiloco.tools.hub.asking import HubOptions
from lightning_sdiloco.tools.hub.status import status as ask_for_status
from tests.hub.folders import LEASE, Folder
from tests.hub.scripted import RUN, TERMS, ScriptedSite, charter

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=["folder", "bucket", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    if request.param == "s3":
        # Every look is a request, and takes its time.
        yield from in_world(Folder(request.getfixturevalue("s3").bucket(), monkeypatch, lease=3 * LEASE))
    else:
        yield from opened(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    yield from opened(tmp_path.as_uri(), monkeypatch)


def opened(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    # A bucket in memory costs nothing to look at.
    monkeypatch.setattr("lightning_sdiloco.hub.kept.is_bucket", lambda url: False)
    yield from in_world(Folder(url, monkeypatch))


def in_world(world: Folder) -> Iterator[Folder]:
    yield world
    world.close()


def test_sites_found_a_run_one_leaves_another_joins_and_the_operator_ends_it(anywhere: Folder) -> None:
    world = anywhere
    world.join("a")
    world.run(lambda: any("1 more sites are needed" in told for told in world.sites["a"].told))
    world.join("b")
    world.run(world.rounds(4))
    world.agree()
    assert not any(site.states for site in world.sites.values())
    world.sites.pop("b").connection.close()
    world.gaps.clear()
    world.run(world.more(4))
    assert world.gaps["a"] < TERMS.grace
    world.join("c", seed=5)
    world.run(lambda: world.sites["c"].counted >= 2)
    assert world.sites["c"].states == ["a"]
    world.agree()
    asker, states = world.asker("reader"), dict[str, str]()
    while not states.get("a") == states.get("c") == "follows":  # as the next signs of life say
        status = json.loads(asker.call("status")[1])
        states = {name: own["state"] for name, own in status["sites"].items()}
    assert status["sites"]["b"]["state"] == "gone"
    assert 0 < status["sites"]["c"]["share"] < 1
    assert "follows" in ask_for_status(HubOptions(hub=world.url, run=RUN))
    with pytest.raises(Refused, match="a reader may not call end"):
        world.asker("reader").call("end")
    world.asker("operator").call("end")
    world.run(lambda: all(site.follower.finished for site in world.sites.values()))
    world.agree()
    world.records()


def test_the_keeper_is_killed_the_others_go_on_with_all_that_was_told_and_it_returns(anywhere: Folder) -> None:
    world = anywhere
    world.join("a", "b", "c")
    world.run(world.rounds(3))
    name = world.keeper()
    known, at = world.records(), {name: site.at for name, site in world.sites.items()}
    seats = [world.connections[other].keeper._seat for other in world.sites if other != name]
    for seat in seats:
        seat.ttl = 1e9
    world.kill(name)
    world.gaps.clear()
    # While there is no keeper they train on.
    world.run(lambda: all(site.at > at[name] + 4 * TERMS.sync_every for name, site in world.sites.items()))
    assert not any(world.connections[other].keeper.coordinator for other in world.sites)
    for seat in seats:
        seat.ttl = world.lease
    assert world.keeper() != name
    world.run(world.more(3))
    assert max(world.gaps.values()) < 1.0  # no call of a site waits for files
    world.agree()
    records = world.records()
    assert records[: len(known)] == known
    world.join(name, seed=5)
    world.run(lambda: world.sites[name].counted >= 2)
    world.agree()
    # Nothing is counted twice.
    for site in world.sites:
        own = [one for record in world.records() if (one := record.of(site))]
        assert len({(one.life, one.fragment, one.round) for one in own}) == len(own)


def test_a_keeper_that_was_stopped_has_written_its_last(folder: Folder) -> None:
    folder.join("a", "b")
    folder.run(folder.rounds(2))
    name = folder.keeper()
    stopped = folder.connections[name]
    folder.files[name].runs.clear()
    site = folder.sites.pop(name)
    other = folder.keeper()
    assert other != name
    folder.run(folder.more(3))
    known = folder.records()
    # It goes on where it stood, thinks that it still keeps the run, and finds that it does not.
    folder.files[name].runs.set()
    folder.sites[name] = site
    folder.run(lambda: stopped.keeper.coordinator is None)
    folder.run(folder.more(3))
    folder.agree()
    assert folder.records()[: len(known)] == known
    assert folder.keeper() == other
    assert site.welcomes >= 2


def test_the_keeper_dies_again_and_again_between_any_two_of_its_operations(folder: Folder) -> None:
    folder.join("a", "b", "c")
    folder.run(folder.rounds(1))
    known = folder.records()
    for turn, operations in enumerate((1, 4, 9, 23)):
        name = folder.keeper()
        folder.files[name].left = operations
        folder.run(lambda name=name: folder.files[name].left == 0)
        folder.sites.pop(name)
        folder.keeper()
        folder.run(folder.more(2))
        folder.agree()
        assert folder.records()[: len(known)] == known
        known = folder.records()
        folder.join(name, seed=turn)
    folder.run(lambda: all(site.counted >= 1 for site in folder.sites.values()))
    folder.agree()


def test_all_sites_are_lost_and_the_anchor_brings_the_run_back(folder: Folder) -> None:
    folder.join("a", "b")
    folder.run(folder.rounds(3))
    known = folder.records()
    for name in "ab":
        folder.kill(name)
    folder.join("c", seed=9)
    folder.run(lambda: folder.sites["c"].counted >= 2)
    assert folder.sites["c"].states == ["the anchor"]
    assert folder.records()[: len(known)] == known


def test_what_operators_do_is_kept_by_the_next_keeper(folder: Folder) -> None:
    folder.join("a", "b", sites=2)
    folder.run(folder.rounds(2))
    evicted = folder.sites.pop("b")
    folder.asker("operator").call("evict", {"who": "b"})
    with pytest.raises(Refused, match="evicted"):
        folder.run(lambda: evicted.hear())
    evicted.connection.close()
    folder.run(folder.rounds(6))
    ahead = folder.sites.pop("a")
    ahead.connection.close()
    folder.join("c", seed=4)
    folder.run(lambda: folder.sites["c"].follower.follows)
    assert folder.asker("operator").call("rollback", {"round": 3})[0]["records"] <= 6
    assert len(folder.records()) <= 6
    folder.sites.pop("c").connection.close()
    folder.join("d", seed=4)
    folder.run(lambda: folder.sites["d"].counted >= 2)
    assert min(ahead.rounds) >= 6
    folder.records()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_name_in_use_is_refused_and_the_one_who_has_it_goes_on(folder: Folder, name: str) -> None:
    folder.join("a", "b")
    folder.run(folder.rounds(1))
    second = folder.connect(name)
    second._longest_lease = 0.5
    with pytest.raises(Refused, match="in use by a living process"):
        second.agree(charter())
    second.hello(Follower(TERMS, charter().key, name, second.life))
    assert second.wait(20)
    assert isinstance(second.events()[0], Lost)
    second.close()
    folder.run(folder.more(1))


def test_another_charter_and_another_run_are_refused(folder: Folder) -> None:
    folder.join("a", sites=1)
    folder.run(folder.rounds(1))
    other = charter(compression="'fp4'")
    connection = folder.connect("b")
    with pytest.raises(ValueError, match="compression"):
        other.require_same(connection.agree(other))
    connection.hello(Follower(TERMS, other.key, "b", connection.life))
    assert connection.wait(20)
    with pytest.raises(Refused, match=r"settings\.compression is 'fp4' here and 'none' there"):
        connection.events()
    with pytest.raises(ValueError, match="run='run-2' is not in .* but 'run-1'"):
        folder.connect("b", run="run-2")


def test_another_run_is_refused_before_it_is_founded(folder: Folder) -> None:
    folder.join("a")
    folder.keeper()
    second = folder.connect("b", run="run-2")
    with pytest.raises(Refused, match="is the place of run 'run-1', and not of 'run-2'"):
        second.agree(charter())


def test_what_is_in_the_folder_does_not_grow_with_messages(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.comm.mailbox.folder_ledger.PAGE", 32)
    folder.join("a", "b")
    folder.run(folder.rounds(20), 90.0)
    files = shared_files(folder.url)
    there = {name: len(files.names(name)) for name in ("in", "out", "pulse", "log", "notes", "probe", "incomplete")}
    assert there["log"] <= 32 + 64
    assert there["in"] + there["out"] + there["pulse"] <= 12, there
    assert there["notes"] <= 2
    assert there["probe"] == 0
    assert len(files.names("page")) >= 2
    # And nothing of it is lost.
    records = folder.records()
    name = folder.keeper()
    folder.kill(name)
    folder.keeper()
    folder.run(folder.more(1))
    assert folder.records()[: len(records)] == records


def test_garbage_in_the_folder_is_dropped_and_the_run_goes_on(folder: Folder) -> None:
    folder.join("a", "b")
    folder.run(folder.rounds(1))
    files = shared_files(folder.url)
    stranger = "site~b~0123~4567"
    for number, text in enumerate((b"", b"\xff" * 99, b"{}" * 20, b"0" * (1 << 20))):
        files.create(f"in/{stranger}~{number:012d}", text)
        files.create(f"in/garbage{number}", text)
        files.create(f"pulse/{number}", text)
        files.create(f"pulse/{'9' * 12}-{number:012d}", text)
    folder.run(folder.more(2))
    assert not [name for name in files.names("in") if "garbage" in name or "0123" in name]
    mailbox = folder.asker("operator")
    for say, told in (
        (lambda: mailbox.call("contribute", {}, b"{}"), "operator may not call"),
        (lambda: mailbox.call("stored", {"key": "x", "size": 3}), "operator may not call"),
        (lambda: mailbox.call("no-such-call"), "may not call no-such-call"),
    ):
        with pytest.raises(Refused, match=told):
            say()
    with pytest.raises(Malformed):
        mailbox.call("status", {"too": "x" * (1 << 20)})


def test_what_a_member_may_not_say(folder: Folder) -> None:
    folder.join("a", sites=1)
    folder.run(folder.rounds(1))
    stranger = folder.connect("b")._mailbox
    for say, told in (
        (lambda: stranger.send(b"bytes", {"kind": "payload"}), "has not said hello"),
        (lambda: stranger.send(b"bytes", {"kind": "other"}), "a blob is a charter"),
        (lambda: stranger.send(b"{}", {"kind": "charter"}), "charter lacks"),
        (lambda: stranger.call("contribute", {}, b"{}"), "contribution lacks"),
        (lambda: stranger.call("skip", {}, b"[]"), "not an object"),
        (lambda: stranger.call("state", {"without": 3}), "whose states were refused"),
    ):
        with pytest.raises(Refused, match=told):
            say()
    folder.run(folder.more(1))


def test_a_contribution_counts_when_the_payload_of_every_rank_is_there(folder: Folder) -> None:
    first = folder.connect("a", 1, wanted=payloads_of(0, 2))
    site = ScriptedSite(first, charter())
    folder.sites["a"] = site
    folder.run(lambda: site.follower.follows)
    del folder.sites["a"]
    shards = folder_shards(folder.url, RUN, "a", first.life, LEASE, payloads_of(1, 2), 60.0)
    folder.open.append(shards)
    shards.reach()
    for _ in range(8):
        site.follower.trained(4)
    halves = b"one half of it", b"the other half"
    payloads = tuple(Payload(key_of(half), len(half)) for half in halves)
    assert site.follower.launches(8) == [0]
    own = site.follower.launch(0, 8, site.digest(0), payloads)
    assert own is not None
    first.contribute(own, {payloads[0].key: halves[0]})
    time.sleep(2 * LEASE)
    assert not folder.records()
    shards.contribute(own, {payloads[1].key: halves[1]})
    folder.run(lambda: site.hear() or site.blobs)
    (record,) = folder.records()
    assert [one.payloads for one in record.counted] == [payloads]
    assert site.blobs == {record.key: {payloads[0].key: halves[0]}}
    shards.fetch(record)
    fetched = dict[str, object]()
    folder.run(lambda: fetched.update(shards.fetched()) or fetched)
    assert fetched == {record.key: {payloads[1].key: halves[1]}}


def test_who_waits_for_a_keeper_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.hub.keeper.Keeper.start", lambda self: None)
    connection = FolderConnection(str(tmp_path), RUN, "a", 1, lease=0.2, patience=0.2)
    connection._mailbox._timeout = 0.2
    with pytest.raises(ExchangeError, match="no site keeps run 'run-1'"):
        connection.agree(charter())
    connection.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_faults_by_chance_part_nobody_and_lose_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("lightning_sdiloco.comm.mailbox.folder_ledger.PAGE", 24)
    chance = random.Random(seed)
    folder.join("a", "b", "c", "d")
    folder.run(folder.rounds(2), 90.0)
    known = folder.records()
    for _ in range(25):
        keepers = [name for name in folder.sites if folder.connections[name].keeper.coordinator]
        name = chance.choice(keepers if keepers and chance.random() < 0.5 else sorted(folder.sites))
        suffer(folder, name, chance)
        folder.run(folder.more(1), 90.0)
        if name not in folder.sites:
            folder.join(name, seed=chance.randrange(99))
        folder.run(folder.more(2), 90.0)
        folder.agree()
        records = folder.records()
        assert records[: len(known)] == known
        known = records
        for site in folder.sites:
            own = [one for record in records if (one := record.of(site))]
            assert len({(one.life, one.fragment, one.round) for one in own}) == len(own)


def suffer(folder: Folder, name: str, chance: random.Random) -> None:
    """Kills a site at once or some operations later, stops it for some seconds, or lets it leave."""
    kind = chance.choice(["kill", "kill later", "stop", "leave"])
    if kind == "leave":
        folder.sites.pop(name).connection.close(1.0)
    elif kind == "stop":
        site, until = folder.sites.pop(name), time.monotonic() + chance.uniform(0.3, 5.0)
        folder.files[name].runs.clear()
        folder.run(lambda: time.monotonic() > until)
        folder.files[name].runs.set()
        folder.sites[name] = site
    else:
        until = time.monotonic() + 3.0
        folder.files[name].left = chance.randrange(1, 60) if kind == "kill later" else 0
        folder.run(lambda: folder.files[name].left <= 0 or time.monotonic() > until)
        folder.kill(name)
