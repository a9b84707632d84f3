"""The real hub over gRPC on this machine, with scripted sites: the real follower, and bytes in place of a model."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import Follower
from lightning_sdiloco.hub import Denied, HubClient, HubConnection, HubService, Lost
from tests.hub.scripted import RUN, TERMS, ScriptedSite, charter

pytestmark = pytest.mark.timeout(60)


class World:
    """A hub on disk, and sites in this thread."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder, self.keys = folder, keys
        self.sites: dict[str, ScriptedSite] = {}
        self.port = 0
        self.gaps: dict[str, float] = {}
        self.open: list[HubConnection | HubClient] = []

    def start(self, sites: int | None = None) -> HubService:
        self.service = HubService(
            RUN, self.folder / "hub.sqlite", sites, f"127.0.0.1:{self.port}", keys=self.keys, beat=0.2
        )
        self.port = self.service.port
        self.service.start()
        return self.service

    def connect(self, name: str) -> HubConnection:
        connection = HubConnection(f"127.0.0.1:{self.port}", RUN, name, keys=self.keys, beat=0.2, channels=2)
        self.open.append(connection)
        return connection

    def join(self, *names: str, seed: int = 0) -> None:
        for name in names:
            self.sites[name] = ScriptedSite(self.connect(name), charter(), seed)

    def ask(self, name: str, call: str, **about: object) -> dict[str, Any]:
        mailbox = HubClient(f"127.0.0.1:{self.port}", RUN, name, keys=self.keys)
        self.open.append(mailbox)
        header, body = mailbox.call(call, about)
        return json.loads(body) if body else header

    def hear(self, site: ScriptedSite, seconds: float = 20.0) -> None:
        """Listens to what one site is told, while the others train."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            site.hear()
            for other in self.sites.values():
                other.step()
            time.sleep(0.01)

    def run(self, true: Callable[[], object], seconds: float = 20.0) -> None:
        """Trains until something is true, and notes the longest time that a step took."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"it did not come true: {self.service.status()}"
            for name, site in self.sites.items():
                began = time.monotonic()
                site.step()
                self.gaps[name] = max(self.gaps.get(name, 0.0), time.monotonic() - began)
            time.sleep(0.005)

    def rounds(self, least: int) -> Callable[[], bool]:
        return lambda: all(min(site.rounds) >= least for site in self.sites.values())

    def more(self, rounds: int) -> Callable[[], bool]:
        return self.rounds(max(max(site.rounds) for site in self.sites.values()) + rounds)

    def kill(self, name: str) -> ScriptedSite:
        """Ends a site without a word, as the end of its process does."""
        site = self.sites.pop(name)
        site.connection.close(0)
        return site

    def agree(self) -> None:
        entries = {(p, site.rounds[p], site.digest(p)) for site in self.sites.values() for p in (0, 1)}
        assert len({entry[:2] for entry in entries}) == len(entries)

    def close(self) -> None:
        for connection in self.open:
            connection.close()
        self.service.close()


@pytest.fixture
def world(keys: Path, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, keys)
    yield world
    world.close()


def test_sites_found_a_run_one_dies_another_joins_and_the_operator_ends_it(world: World) -> None:
    world.start(sites=2)
    world.join("a")
    world.run(lambda: any("1 more sites are needed" in told for told in world.sites["a"].told))
    assert not world.service.status()["founded"]
    world.join("b")
    world.run(world.rounds(4))
    world.agree()
    assert not any(site.states for site in world.sites.values())
    # Its connection tells of its death, so nobody waits even for the grace.
    world.kill("b")
    world.gaps.clear()
    world.run(world.more(4))
    assert world.gaps["a"] < TERMS.grace
    world.join("c", seed=5)
    world.run(lambda: world.sites["c"].counted >= 2)
    assert world.sites["c"].states == ["a"]
    world.agree()
    status = world.ask("viewer", "status")
    assert status["sites"]["a"]["state"] == "follows"
    assert status["sites"]["b"]["state"] == "gone"
    assert 0 < status["sites"]["c"]["share"] < 1
    assert status["sites"]["a"]["bytes"] >= 4000
    with pytest.raises(Denied, match="a reader may not call end"):
        world.ask("viewer", "end")
    world.ask("boss", "end")
    world.run(lambda: all(site.follower.finished for site in world.sites.values()))
    world.agree()


def test_a_hub_that_dies_and_comes_back_has_lost_nothing(world: World) -> None:
    world.start(sites=2)
    world.join("a", "b")
    world.run(world.rounds(3))
    before = world.service.status()
    world.service.close()
    # Nobody waits while it is away: they train on.
    at = world.sites["a"].at
    world.gaps.clear()
    world.run(lambda: world.sites["a"].at > at + 2 * TERMS.sync_every)
    assert max(world.gaps.values()) < 0.5
    world.start()
    # What was contributed by all before it died may be closed by now.
    rounds = [[own["round"] for own in status["fragments"]] for status in (before, world.service.status())]
    assert all(own <= now <= own + 1 for own, now in zip(*rounds, strict=True))
    world.run(world.more(3))
    assert all(site.welcomes == 2 for site in world.sites.values())
    world.agree()
    # Nothing that was trained counts twice, and all of it counts: what was held meanwhile too.
    told = world.service.status()["records"]
    # More may close meanwhile.
    assert len(list(world.service.ledger.read())) >= told


def test_all_sites_are_lost_and_the_anchor_brings_the_run_back(world: World) -> None:
    world.start(sites=2)
    world.join("a", "b")
    world.run(world.rounds(3))
    rounds = [own["round"] for own in world.service.status()["fragments"]]
    world.kill("a")
    world.kill("b")
    world.service.close()
    world.start()
    # With another seed: what it has comes from the state and the records alone.
    world.join("c", seed=9)
    world.run(lambda: world.sites["c"].counted >= 2)
    assert world.sites["c"].states == ["the anchor"]
    assert all(own["round"] > before for own, before in zip(world.service.status()["fragments"], rounds, strict=True))


def test_who_is_evicted_stays_out_and_comes_again_as_a_new_life(world: World) -> None:
    world.start(sites=2)
    world.join("a", "b")
    world.run(world.rounds(1))
    evicted = world.sites.pop("b")
    with pytest.raises(Refused, match="there is no site 'd' here"):
        world.ask("boss", "evict", who="d")
    world.ask("boss", "evict", who="b")
    with pytest.raises(Refused, match="evicted"):
        world.hear(evicted)
    world.service.close()
    world.start()
    evicted.connection._listener = None  # type: ignore[attr-defined]
    evicted.connection._inbox._error = None  # type: ignore[attr-defined]
    evicted.connection.hello(evicted.follower)
    with pytest.raises(Refused, match="evicted"):
        world.hear(evicted)
    world.run(world.more(1))
    world.join("b", seed=3)
    world.run(lambda: world.sites["b"].counted >= 1)
    world.agree()


def test_a_run_is_rolled_back_and_who_knows_more_is_refused(world: World) -> None:
    world.start(sites=1)
    world.join("a")
    world.run(world.rounds(6))
    ahead = world.kill("a")
    world.run(lambda: world.service.status()["sites"]["a"]["state"] == "gone")
    assert world.ask("boss", "rollback", round=3)["records"] <= 6
    assert all(own["round"] <= 3 for own in world.service.status()["fragments"])
    world.join("b", seed=4)
    world.run(lambda: world.sites["b"].counted >= 2)
    assert min(ahead.rounds) >= 6


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"compression": "'fp4'"}, "settings.compression is 'fp4' here and 'none' there"),
        ({"seed": "3"}, "settings.seed is 3 here and missing there"),
    ],
)
def test_another_charter_is_refused_by_what_differs(world: World, what: dict[str, str], told: str) -> None:
    world.start(sites=1)
    world.join("a")
    world.run(world.rounds(1))
    connection = world.connect("b")
    with pytest.raises(ValueError, match="compression|seed"):
        connection.agree(charter(**what)).require_same(charter(**what))
    # One that says hello all the same.
    connection.hello(Follower(TERMS, charter(**what).key, "b", connection.life))
    assert connection.wait(20)
    with pytest.raises(Refused, match=told):
        connection.events()


def test_a_name_in_use_is_refused_and_the_one_who_has_it_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start(sites=1)
    world.join("a")
    world.run(world.rounds(1))
    # It waits for as long as a process that died could be in its way.
    monkeypatch.setattr("lightning_sdiloco.hub.remote._LONGEST_LEASE", 0.5)
    second = world.connect("a")
    with pytest.raises(Refused, match="in use by a living process"):
        second.agree(charter())
    second.hello(Follower(TERMS, charter().key, "a", second.life))
    assert second.wait(20)
    assert isinstance(second.events()[0], Lost)
    world.run(world.more(1))


def test_what_a_member_may_not_say(world: World) -> None:
    world.start(sites=1)
    world.join("a")
    world.run(world.rounds(1))
    stranger = HubClient(f"127.0.0.1:{world.port}", RUN, "b", keys=world.keys)
    world.open.append(stranger)
    for say, told in (
        (lambda: stranger.send(b"bytes", {"kind": "payload"}), "has not said hello"),
        (lambda: stranger.send(b"bytes", {"kind": "other"}), "a blob is a charter"),
        (lambda: stranger.send(b"{}", {"kind": "charter"}), "charter lacks"),
        (lambda: stranger.call("contribute", {}, b"{}"), "contribution lacks"),
        (lambda: stranger.call("contribute", {}, b"\xff" * 99), "no JSON"),
        (lambda: stranger.call("skip", {}, b"[]"), "not an object"),
        (lambda: stranger.call("state", {"without": 3}), "whose states were refused"),
        (lambda: stranger.call("give", {"parts": []}, b"{}"), "stateheader lacks"),
    ):
        with pytest.raises(Refused, match=told):
            say()
    world.run(world.more(1))
