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


def test_a_run_in_memory_goes_the_way_of_one_over_the_network() -> None:
    world = World("a", "b", "c")
    world.run(60)
    assert min(world.sites["a"].rounds) >= 5
    assert all(landing is MergeAction.MIX for site in world.sites.values() for *_, landing in site.landed)
    assert not any(site.states for site in world.sites.values())
    # One that dies is not waited for, and one that joins gets a state.
    world.sites.pop("b").connection.close()
    world.run(30)
    joiner = world.join("d", seed=7)
    world.run(40)
    assert joiner.states == ["a"]
    assert joiner.counted > 2
    # A hub that dies comes back with all that it had, also with who was evicted.
    world.hub.coordinator.evict("c")
    with pytest.raises(Refused, match="evicted"):
        world.run(3, "c")
    del world.sites["c"]
    rounds = world.sites["a"].rounds
    world.hub.restart()
    for site in world.sites.values():
        site.hear()
        site.connection.hello(site.follower)
    world.run(20)
    assert min(world.sites["a"].rounds) > min(rounds)
    world.agree()
    world.hub.coordinator.end()
    world.run(30)
    assert all(site.follower.finished for site in world.sites.values())


def test_where_a_donor_stands_still_another_is_asked_when_its_lease_is_over() -> None:
    world = World("a", "b")
    world.run(30)
    joiner = world.join("c", seed=7)
    joiner.step()
    # The first by name is asked, and gives no sign of life.
    world.run(30, "b", "c")
    assert joiner.states == ["b"]
