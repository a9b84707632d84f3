"""Sites and their hub in one process, in virtual time: what the engine's side relies on."""

import pytest

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import MergeAction
from lightning_sdiloco.hub import InProcessHub
from tests.hub.scripted import RUN, ScriptedSite, charter


class World:
    """A hub and its sites, which step in turn; each step takes a tenth of a second."""

    def __init__(self, *names: str, sites: int | None = None) -> None:
        self.time = 0.0
        self.hub = InProcessHub(RUN, sites or len(names), lambda: self.time, self.sleep)
        self.sites: dict[str, ScriptedSite] = {}
        for name in names:
            self.join(name)

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def join(self, name: str, seed: int = 0) -> ScriptedSite:
        site = self.sites[name] = ScriptedSite(self.hub.connect(name), charter(), seed)
        site.now = lambda: self.time  # type: ignore[method-assign]
        return site

    def run(self, steps: int, *names: str) -> None:
        for _ in range(steps):
            self.time += 0.1
            for name in names or self.sites:
                self.sites[name].step()

    def agree(self) -> None:
        """All sites with the same records have the same outer parameters."""
        digests = {(p, site.rounds[p], site.digest(p)) for site in self.sites.values() for p in (0, 1)}
        assert len({entry[:2] for entry in digests}) == len(digests)


def test_sites_found_a_run_and_train() -> None:
    world = World("a", "b", "c")
    world.run(60)
    assert min(world.sites["a"].rounds) >= 5
    assert all(landing is MergeAction.MIX for site in world.sites.values() for *_, landing in site.landed)
    assert not any(site.states for site in world.sites.values())
    world.agree()


def test_one_that_dies_is_not_waited_for_and_one_that_joins_gets_a_state() -> None:
    world = World("a", "b", sites=2)
    world.run(30)
    world.sites.pop("b").connection.close()
    world.run(30)
    alone = world.sites["a"].rounds
    assert min(alone) >= 5
    joiner = world.join("c", seed=7)
    world.run(40)
    assert joiner.states == ["a"]
    assert joiner.counted > 2
    world.agree()


def test_where_a_donor_stands_still_another_is_asked_when_its_lease_is_over() -> None:
    world = World("a", "b")
    world.run(30)
    joiner = world.join("c", seed=7)
    joiner.step()
    # The first by name is asked, and gives no sign of life.
    world.run(30, "b", "c")
    assert joiner.states == ["b"]


def test_a_hub_that_dies_comes_back_with_all_that_it_had() -> None:
    world = World("a", "b")
    world.run(23)
    before = world.hub.coordinator.status()
    world.hub.restart()
    assert world.hub.coordinator.status()["fragments"][0]["round"] == before["fragments"][0]["round"]
    for site in world.sites.values():
        site.hear()
        site.connection.hello(site.follower)
    world.run(40)
    assert min(world.sites["a"].rounds) >= 5
    world.agree()


def test_all_sites_are_lost_and_the_anchor_brings_the_run_back() -> None:
    world = World("a", "b")
    world.run(40)
    for site in world.sites.values():
        site.connection.close()
    rounds = world.sites["a"].rounds
    world.sites.clear()
    world.join("c", seed=3)
    world.run(2)
    assert world.sites["c"].states == ["the anchor"]
    world.run(30)
    assert min(world.sites["c"].rounds) > min(rounds)


def test_another_charter_is_refused_by_what_differs() -> None:
    world = World("a")
    world.run(3)
    own = charter()
    connection = world.hub.connect("b")
    founded = connection.agree(charter(compression="'fp4'"))
    with pytest.raises(ValueError, match=r"settings.compression is 'none' here and 'fp4' there"):
        founded.require_same(charter(compression="'fp4'"))
    assert founded == own


def test_an_operator_evicts_and_ends() -> None:
    world = World("a", "b")
    world.run(20)
    world.hub.coordinator.evict("b")
    with pytest.raises(Refused, match="evicted"):
        world.run(3, "b")
    del world.sites["b"]
    world.hub.restart()
    world.sites["a"].connection.hello(world.sites["a"].follower)
    world.run(20)
    world.hub.coordinator.end()
    world.run(30)
    assert world.sites["a"].follower.finished
