"""What a site that comes or returns waits for, over gRPC: round trips that follow one another, and nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.federation import Terms
from lightning_sdiloco.hub import HubConnection, HubService, HubUnreachable, Lost
from tests.hub.scripted import RUN, ScriptedSite, charter

pytestmark = pytest.mark.timeout(60)

TERMS = Terms(fragments=16, sync_every=16, overlap_steps=1, grace=1.0, lease=30.0)


class Chain:
    """Lets each call to the hub take some time, and counts how many followed one another."""

    def __init__(self) -> None:
        self.length = 0
        self._lock = threading.Lock()

    def slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*arguments: Any, **choices: Any) -> Any:
            with self._lock:
                after = self.length
            time.sleep(0.2)
            answer = call(*arguments, **choices)
            with self._lock:
                self.length = max(self.length, after + 1)
            return answer

        return slowly

    def counts(self, connection: HubConnection) -> None:
        mailbox = connection._client
        for name in ("send", "get", "call"):
            setattr(mailbox, name, self.slow(getattr(mailbox, name)))


class World:
    def __init__(self, folder: Path, keys: Path) -> None:
        self.service = HubService(RUN, folder / "hub.sqlite", 1, keys=keys, beat=0.2)
        self.service.start()
        self.keys = keys
        self.open: list[HubConnection] = []

    def join(self, name: str, seed: int = 0) -> ScriptedSite:
        hub = f"127.0.0.1:{self.service.port}"
        connection = HubConnection(hub, RUN, name, keys=self.keys, beat=0.2, channels=2)
        self.open.append(connection)
        return ScriptedSite(connection, charter(TERMS), seed)

    def close(self) -> None:
        for connection in self.open:
            connection.close(1.0)
        self.service.close()


@pytest.fixture
def world(keys: Path, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, keys)
    yield world
    world.close()


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def trained(site: ScriptedSite, rounds: int) -> None:
    until(lambda: site.step() and min(site.rounds) >= rounds)


def heard(site: ScriptedSite) -> bool:
    """Whether a site is up to date, when it has heard all that there is, and made no step."""
    site.hear()
    site.turn()
    return site.follower.reachable and site.follower.follows and site.follower.lag == 0


def test_who_comes_with_nothing_waits_for_few_round_trips_however_many_fragments_there_are(world: World) -> None:
    donor = world.join("a")
    trained(donor, 5)
    chain = Chain()
    chain.counts(world.open[0])
    joiner = world.join("b", seed=3)
    chain.counts(world.open[1])
    until(lambda: (donor.hear(), heard(joiner))[1])
    assert joiner.states == ["a"]
    # It asks, the donor sends all parts, says so, all are fetched, and it says hello again. Of the payloads of the 80
    # records before that none were of use. One or two more on a machine that is busy.
    assert chain.length <= 7


def test_who_returns_waits_for_two_round_trips_and_what_it_sent_goes_again_at_once(world: World) -> None:
    first, second = world.join("a"), world.join("b")
    trained(first, 2)
    until(lambda: heard(second))
    before = second.rounds
    connection = second.connection
    world.service.coordinator.gone("b", connection.life)  # type: ignore[attr-defined]
    trained(first, 3)
    chain = Chain()
    chain.counts(world.open[1])
    welcomes = second.welcomes
    connection.hello(second.follower)
    # Before it is let in again it does not know that it has missed something.
    until(lambda: heard(second) and second.welcomes > welcomes)
    assert min(second.rounds) > min(before)
    assert chain.length <= 4


def test_a_cut_is_noticed_while_nobody_reads_what_was_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.hub.remote._UNREAD", 2)
    first, second = world.join("a"), world.join("b")
    until(lambda: (heard(first), heard(second))[1])
    trained(first, 2)
    inbox = world.open[1]._inbox
    until(lambda: inbox.payloads == 2)
    world.service.close()
    until(lambda: any(isinstance(told, Lost) for told in inbox._told), 5.0)


def test_a_payload_that_did_not_come_is_fetched_again_while_the_hub_is_there(world: World) -> None:
    first, second = world.join("a"), world.join("b")
    until(lambda: (heard(first), heard(second))[1])
    mailbox, failed = world.open[1]._client, list[str]()
    get = mailbox.get

    def fails_first(key: str, size: int) -> Any:
        if not failed:
            failed.append(key)
            raise HubUnreachable("a connection for payloads broke.")
        return get(key, size)

    mailbox.get = fails_first  # type: ignore[method-assign, assignment]
    trained(first, 1)
    until(lambda: heard(second))
    assert failed
    assert second.rounds == first.rounds
    assert second.welcomes == 1


def test_what_a_checkpoint_has_in_flight_waits_until_the_hub_has_let_the_site_in(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = world.join("a"), world.join("b")
    until(lambda: (heard(first), heard(second))[1])
    launched: list[tuple[Any, Any]] = []
    before = world.open[1]
    before.contribute = lambda *own: launched.append(own)  # type: ignore[method-assign, assignment]
    until(lambda: second.step() and launched)
    before.close(1.0)
    until(lambda: world.service.status()["sites"]["b"]["state"] == "gone")
    coordinator, hellos = world.service.coordinator, list[str]()
    hello = coordinator.hello
    coordinator.hello = lambda said, brought: (hellos.append(said.site), hello(said, brought))[1]  # type: ignore[method-assign]
    again = HubConnection(f"127.0.0.1:{world.service.port}", RUN, "b", keys=world.keys, beat=0.2, channels=2)
    world.open.append(again)
    second.connection, second.follower.life = again, again.life
    again.agree(charter(TERMS))
    for own in launched:
        again.contribute(*own)
    time.sleep(0.3)
    again.hello(second.follower)
    opened = coordinator.ledger.open
    until(lambda: heard(second) and 0 in opened and "b" in opened[0].arrived)
    time.sleep(0.3)
    # It was not refused, and so said hello once, and has been told what it missed once.
    assert "was not taken" not in caplog.text
    assert hellos == ["b"]
