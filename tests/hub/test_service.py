"""The hub with its rules and scripted sites, over gRPC and in this process: founding, deaths, returns, refusals."""

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.errors import ExchangeError, Refused
from lightning_sdiloco.federation import (
    Contribution,
    Denied,
    Follower,
    HubClient,
    HubConnection,
    HubShards,
    HubUnreachable,
    InProcessHub,
    Lost,
    MergeAction,
    Payload,
    Record,
    Recorded,
    key_of,
    payloads_of,
)
from tests.hub.hubs import RUN, TERMS, ScriptedSite, World, charter, require_agreement, until

pytestmark = pytest.mark.timeout(120)


def test_sites_found_a_run_one_dies_another_joins_and_the_operator_ends_it(world: World) -> None:
    world.start(sites=2)
    world.join("a")
    world.run(lambda: any("1 more sites are needed" in told for told in world.sites["a"].told))
    assert not world.service.status()["founded"]
    world.join("b")
    world.rounds(4)
    require_agreement(world.sites.values())
    assert not any(site.states for site in world.sites.values())
    # Its connection tells of its death, so nobody waits even for the grace.
    world.kill("b")
    world.gaps.clear()
    world.more(4)
    assert world.gaps["a"] < TERMS.grace
    joiner = world.join("c", seed=5)
    world.run(lambda: joiner.counted >= 2)
    assert joiner.states == ["a"]
    require_agreement(world.sites.values())
    status = world.ask("viewer", "status")
    assert [status["sites"][name]["state"] for name in "ab"] == ["follows", "gone"]
    assert 0 < status["sites"]["c"]["share"] < 1
    assert status["sites"]["a"]["bytes"] >= 4000
    with pytest.raises(Denied, match="a reader may not call end"):
        world.ask("viewer", "end")
    world.ask("boss", "end")
    world.run(lambda: all(site.follower.finished for site in world.sites.values()))
    require_agreement(world.sites.values())


def test_a_hub_and_then_all_sites_die_and_nothing_is_lost(world: World) -> None:
    world.start(sites=2)
    world.join("a", "b")
    world.rounds(3)

    def rounds() -> list[int]:
        return [own["round"] for own in world.service.status()["fragments"]]

    before = rounds()
    world.service.close()
    # Nobody waits while it is away: they train on.
    at = world.sites["a"].at
    world.gaps.clear()
    world.run(lambda: world.sites["a"].at > at + 2 * TERMS.sync_every)
    assert max(world.gaps.values()) < 0.5
    world.start()
    # What was contributed by all before it died may be closed by now.
    assert all(own <= now <= own + 1 for own, now in zip(before, rounds(), strict=True))
    world.more(2)
    assert all(site.welcomes == 2 for site in world.sites.values())
    require_agreement(world.sites.values())
    before = rounds()
    world.kill("a")
    world.kill("b")
    world.service.close()
    world.start()
    # With another seed: what it has comes from the state and the records alone.
    joiner = world.join("c", seed=9)
    world.run(lambda: joiner.counted >= 2)
    assert joiner.states == ["the anchor"]
    assert all(now > own for own, now in zip(before, rounds(), strict=True))


def test_an_operator_evicts_a_site_and_rolls_a_run_back(world: World) -> None:
    world.start(sites=2)
    world.join("a", "b")
    world.rounds(1)
    evicted = world.sites.pop("b")
    with pytest.raises(Refused, match="there is no site 'd' here"):
        world.ask("boss", "evict", who="d")
    world.ask("boss", "evict", who="b")

    def hears(connection: HubConnection) -> None:
        with pytest.raises(Refused, match="evicted"):
            world.run(lambda: connection.events() and False)

    hears(evicted.connection)
    world.service.close()
    world.start()
    # It stays out, also at a hub that was started again, and comes as a new life.
    again = world.connect("b")
    again.life = evicted.connection.life
    again._client.life = again.life
    again.hello(evicted.follower)
    hears(again)
    again.close()
    world.more(1)
    world.join("b", seed=3)
    world.run(lambda: world.sites["b"].counted >= 1)
    require_agreement(world.sites.values())
    world.rounds(6)
    for name in "ab":
        world.kill(name)
    until(lambda: {own["state"] for own in world.service.status()["sites"].values()} == {"gone"})
    world.ask("boss", "rollback", round=3)
    assert all(own["round"] <= 3 for own in world.service.status()["fragments"])
    joiner = world.join("c", seed=4)
    world.run(lambda: joiner.counted >= 2)


def test_what_a_member_may_not_say_is_refused_and_the_run_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start(sites=1)
    world.join("a")
    world.rounds(1)
    stranger = world.client("b")
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
    # Nor what another one says: its hello, its sign of life, its contribution.
    other, posing = world.sites["a"].follower, world.client("c")
    hello, beat = (json.loads(said.to_bytes()) for said in (other.hello(RUN), other.beat()))
    own = json.loads(Follower(TERMS, charter().key, "c", posing.life).hello(RUN).to_bytes())
    sent = Contribution(0, 1, "a", other.life, charter().key, 4, 1, (Payload(key_of(b"bytes"), 5),))
    for pose in (
        lambda: next(posing.events(lambda: {"hello": hello})),
        lambda: posing.call("hello", {"hello": hello}),
        lambda: list(posing.events(lambda: {"hello": own}, lambda: {"beat": beat})),
        lambda: posing.call("contribute", {}, sent.to_bytes()),
    ):
        with pytest.raises(Refused, match="site 'c' speaks for itself"):
            pose()
    for changed, told in (
        ({"compression": "'fp4'"}, "settings.compression is 'fp4' here and 'none' there"),
        ({"seed": "3"}, "settings.seed is 3 here and missing there"),
    ):
        connection = world.connect("b")
        with pytest.raises(ValueError, match="compression|seed"):
            connection.agree(charter(**changed)).require_same(charter(**changed))
        # One that says hello all the same.
        connection.hello(Follower(TERMS, charter(**changed).key, "b", connection.life))
        assert connection.wait(20)
        with pytest.raises(Refused, match=told):
            connection.events()
        connection.close()
    # A name in use: it waits for as long as a process that died could be in its way.
    monkeypatch.setattr("lightning_sdiloco.federation.remote._LONGEST_LEASE", 0.2)
    second = world.connect("a")
    with pytest.raises(Refused, match="in use by a living process"):
        second.agree(charter())
    second.hello(Follower(TERMS, charter().key, "a", second.life))
    assert second.wait(20)
    assert isinstance(second.events()[0], Lost)
    world.more(1)


# In this process


def test_a_run_in_memory_goes_the_way_of_one_over_the_network() -> None:
    time = [0.0]

    def sleep(seconds: float) -> None:
        time[0] += seconds

    hub = InProcessHub(RUN, 3, lambda: time[0], sleep)
    sites: dict[str, ScriptedSite] = {}

    def join(name: str, seed: int = 0) -> ScriptedSite:
        sites[name] = ScriptedSite(hub.connect(name), charter(), seed, lambda: time[0])
        return sites[name]

    def run(steps: int, *names: str) -> None:
        for _ in range(steps):
            time[0] += 0.1
            for name in names or sites:
                sites[name].step()

    for name in "abc":
        join(name)
    run(60)
    assert min(sites["a"].rounds) >= 5
    assert {landing for site in sites.values() for landing in site.landed} == {MergeAction.MIX}
    assert not any(site.states for site in sites.values())
    # One that dies is not waited for, and one that joins gets a state.
    sites.pop("b").connection.close()
    run(30)
    joiner = join("d", seed=7)
    run(40)
    assert joiner.states == ["a"]
    assert joiner.counted > 2
    # The first by name is asked, gives no sign of life, and another one when its lease is over.
    other = join("e", seed=9)
    other.step()
    run(30, "c", "d", "e")
    assert other.states == ["c"]
    # A hub that dies comes back with all that it had, also with who was evicted.
    hub.coordinator.evict("c")
    with pytest.raises(Refused, match="evicted"):
        run(3, "c")
    del sites["c"]
    rounds = sites["a"].rounds
    hub.restart()
    for site in sites.values():
        site.hear()
        site.connection.hello(site.follower)
    run(20)
    assert min(sites["a"].rounds) > min(rounds)
    require_agreement(sites.values())
    hub.coordinator.end()
    run(30)
    assert all(site.follower.finished for site in sites.values())


# What a site that comes or returns waits for


class Chain:
    """Lets each call of a connection take some time, and counts how many followed one another."""

    def __init__(self, *connections: HubConnection) -> None:
        self.length = 0
        self._lock = threading.Lock()
        for connection in connections:
            for name in ("send", "get", "call"):
                setattr(connection._client, name, self.slow(getattr(connection._client, name)))

    def slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*arguments: Any, **choices: Any) -> Any:
            with self._lock:
                after = self.length
            time.sleep(0.1)
            answer = call(*arguments, **choices)
            with self._lock:
                self.length = max(self.length, after + 1)
            return answer

        return slowly


@pytest.fixture
def many(world: World) -> World:
    """A hub of a run of many fragments."""
    world.terms = replace(TERMS, fragments=16, sync_every=16, overlap_steps=1, lease=30.0)
    world.start(sites=1)
    return world


def test_who_comes_or_returns_waits_for_few_round_trips_however_many_fragments_there_are(many: World) -> None:
    donor = many.join("a")
    many.rounds(5, "a")
    chain = Chain(donor.connection)
    joiner = many.join("b", seed=3)
    chain = Chain(donor.connection, joiner.connection)
    until(lambda: (donor.hear(), joiner.heard())[1])
    assert joiner.states == ["a"]
    # It asks, the donor sends all parts, says so, all are fetched, and it says hello again. Of the payloads of the 80
    # records before that none were of use. One or two more on a machine that is busy.
    assert chain.length <= 7
    before, welcomes = joiner.rounds, joiner.welcomes
    many.service.coordinator.gone("b", joiner.connection.life)
    many.rounds(7, "a")
    chain = Chain(joiner.connection)
    joiner.connection.hello(joiner.follower)
    # Before it is let in again it does not know that it has missed something.
    until(lambda: joiner.heard() and joiner.welcomes > welcomes)
    assert min(joiner.rounds) > min(before)
    assert chain.length <= 4


def test_what_did_not_come_is_fetched_again_and_a_cut_is_noticed_while_nobody_reads_what_was_told(
    many: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = many.join("a"), many.join("b")
    until(lambda: (first.heard(), second.heard())[1])
    client, failed = second.connection._client, list[str]()
    get = client.get

    def fails_first(key: str, size: int) -> Any:
        if not failed:
            failed.append(key)
            raise HubUnreachable("a connection for payloads broke.")
        return get(key, size)

    client.get = fails_first
    many.rounds(1, "a")
    until(lambda: second.heard() and second.rounds == first.rounds)
    assert failed
    assert second.welcomes == 1
    monkeypatch.setattr("lightning_sdiloco.federation.remote._UNREAD", 2)
    many.rounds(3, "a")
    unread = second.connection._told
    until(lambda: sum(isinstance(told, Recorded) and told.blobs is not None for told in unread) == 2)
    many.service.close()
    until(lambda: any(isinstance(told, Lost) for told in unread), 5.0)


def test_what_a_checkpoint_has_in_flight_waits_until_the_hub_has_let_the_site_in(
    many: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = many.join("a"), many.join("b")
    until(lambda: (first.heard(), second.heard())[1])
    launched: list[tuple[Any, Any]] = []
    second.connection.contribute = lambda *own: launched.append(own)
    until(lambda: second.step() and launched)
    many.kill("b")
    until(lambda: many.service.status()["sites"]["b"]["state"] == "gone")
    coordinator, hellos = many.service.coordinator, list[str]()
    hello = coordinator.hello
    coordinator.hello = lambda said, brought: (hellos.append(said.site), hello(said, brought))[1]
    second.connection = again = many.connect("b")
    second.follower.life = again.life
    again.agree(charter(many.terms))
    for own in launched:
        again.contribute(*own)
    time.sleep(0.2)
    again.hello(second.follower)
    opened = coordinator.ledger.open
    until(lambda: second.heard() and 0 in opened and "b" in opened[0].arrived)
    time.sleep(0.2)
    # It was not refused, and so said hello once, and has been told what it missed once.
    assert "was not taken" not in caplog.text
    assert hellos == ["b"]


def test_a_contribution_of_several_ranks_counts_when_the_payload_of_every_rank_is_there(
    world: World, keys: Path
) -> None:
    world.start(sites=1)
    hub = f"127.0.0.1:{world.port}"
    first = world.connect("a", wanted=payloads_of(0, 2))
    clients = [HubClient(hub, RUN, "a", keys, channels=2, life=first.life) for _ in range(2)]
    others = [HubShards(client, payloads_of(1, 2)) for client in clients]
    world.open += others
    site, history = ScriptedSite(first, charter()), world.service.coordinator.history
    until(lambda: site.hear() or site.follower.follows)
    first.beat(site.follower)
    for shards in others:
        shards.reach()
    for _ in range(8):
        site.follower.trained(4)
    halves = b"one half of it", b"the other half"
    payloads = tuple(Payload(key_of(half), len(half)) for half in halves)
    assert site.follower.launches(8) == [0]
    own = site.follower.launch(0, 8, site.digests()[0], payloads)
    assert own is not None
    first.contribute(own, {payloads[0].key: halves[0]})
    until(lambda: history.holds(payloads[:1]))
    time.sleep(0.2)
    assert world.service.coordinator.ledger.members["a"].connected
    assert not list(history.journal.read())
    others[0].contribute(own, {payloads[1].key: halves[1]})
    until(lambda: site.hear() or site.blobs)
    (record,) = [Record.from_bytes(text) for _, text in history.journal.read()]
    assert [one.payloads for one in record.counted] == [payloads]
    # The first rank has fetched nothing of the other one, and the other one, started anew, its own half alone.
    assert site.blobs == {record.key: {payloads[0].key: halves[0]}}
    others[1].fetch(record)
    fetched = dict[str, object]()
    until(lambda: fetched.update(others[1].fetched()) or fetched)
    assert fetched == {record.key: {payloads[1].key: halves[1]}}
    # Each rank knows what its own link carried; what was there already tells nothing.
    rates = [one.sends_bytes_per_s for one in (first, *others)]
    assert min(rates[:2]) > 0 == rates[2]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    lost = HubShards(HubClient(f"127.0.0.1:{port}", RUN, "a", keys))
    world.open.append(lost)
    with pytest.raises(ExchangeError, match="Every rank of a site speaks with the hub itself"):
        lost.reach(timeout=0.0)
