"""``"auto"`` in a federation: chosen once, from what all founders measured, and the same for who comes later."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sdiloco import Federation, StreamingDiLoCoStrategy
from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.compression import FP4, RandomK
from lightning_sdiloco.engine import trainable
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import Charter, Known, Measurement, Record, Terms
from lightning_sdiloco.hub import HubService, InProcessConnection, InProcessHub
from lightning_sdiloco.lightning.auto_in_federation import RunSettings
from lightning_sdiloco.lightning.auto_settings import AutoSettings, candidates_among
from lightning_sdiloco.planning import Groups, Model, recommend, way_through_hub
from tests.comm.mailbox.hubs import require_extra
from tests.fits import SomeBatches, module, trainer
from tests.ranks import run_processes
from tests.training import batch, mlp

AUTO = {"sync_every": "auto", "overlap_steps": "auto", "fragments": "auto", "compression": "auto"}
FAST, SLOW = 1e9, 5e3  # bits per second


class Far(InProcessConnection):
    """A connection over a link of a given bandwidth."""

    bits_per_s = FAST
    measured: list[str]

    def round_trip(self) -> float:
        return 0.05

    def bandwidth(self, up: bool) -> float:
        self.measured.append(self.site)
        return self.bits_per_s


class Sites:
    """Sites that have not joined yet, in threads, and a hub in this process that is to be founded by some of them."""

    def __init__(self, founders: int) -> None:
        self.hub = InProcessHub("run", founders)
        self.measured: list[str] = []

    def run_settings(self, site: str, bits_per_s: float, step_time: float, given: dict[str, Any]) -> Any:
        sites = self

        class Here(Federation):
            def connect(self, ranks: int = 1) -> Any:
                connection = Far(sites.hub, site)
                connection.bits_per_s, connection.measured = bits_per_s, sites.measured
                return connection

        auto, settings = AutoSettings.of(**given)
        auto.step_time = lambda: step_time  # type: ignore[method-assign]
        return RunSettings(auto, Here("hub:1", "run", site, insecure=True), Topology(), mlp()), settings

    def settle(self, site: str, bits_per_s: float = FAST, step_time: float = 0.05, **given: Any) -> Any:
        """Trains alone and settles; returns the settings of the run, and why they are those."""
        run, settings = self.run_settings(site, bits_per_s, step_time, {**AUTO, **given})
        return run.settle(settings), run._auto

    def known(self, site: str, **given: Any) -> Settings | None:
        """Asks before training."""
        run, settings = self.run_settings(site, FAST, 0.05, {**AUTO, **given})
        found: Settings | None = run.known(settings)
        return found

    def at_once(self, *acts: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            return [each.result(60) for each in [pool.submit(act) for act in acts]]


def charter(settings: Settings) -> Charter:
    terms = Terms(fragments=1, sync_every=settings.sync_every, overlap_steps=settings.overlap_steps, grace=1.0)
    return Charter("run", terms, settings.fixed_by_a_checkpoint(), ((("weight", "(2,)"),),), ((),), {}, "5f")


def recommended(bits_per_s: float, step_time: float, sites: int) -> Settings:
    """What the planner recommends where all sites are like that one."""
    link = way_through_hub(sites, bits_per_s / 1e9, bits_per_s / 1e9, 0.05)
    groups = Groups(step_time, groups=sites, memory_rate=1e10)
    among = candidates_among(tuple(AUTO), Settings(exchange="gather"))
    return recommend(Model.of_parameters(trainable(mlp())), groups, link, among).settings


def chosen(settings: Settings) -> tuple[Any, ...]:
    return tuple(getattr(settings, name) for name in (*AUTO, "layers_per_fragment"))


def test_the_founder_with_the_hardest_way_decides_for_all() -> None:
    sites = Sites(2)
    (fast, its_auto), (slow, _) = sites.at_once(lambda: sites.settle("a"), lambda: sites.settle("b", SLOW))
    assert chosen(fast) == chosen(slow) == chosen(recommended(SLOW, 0.05, 2))
    assert chosen(fast) != chosen(recommended(FAST, 0.05, 2))
    assert "b, of 2 founders that with the hardest way" in its_auto.why
    assert its_auto.measured.link == way_through_hub(2, SLOW / 1e9, SLOW / 1e9, 0.05)
    # Both ways of both, and nothing is left open.
    assert sorted(sites.measured) == ["a", "a", "b", "b"]
    assert its_auto.names == ()


def test_a_link_is_measured_when_all_founders_are_there() -> None:
    sites = Sites(3)
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(sites.settle, site) for site in "ab"]
        time.sleep(1.0)
        assert sites.measured == []
        assert not any(one.done() for one in early)
        pool.submit(sites.settle, "c").result(60)
        assert len({chosen(one.result(60)[0]) for one in early}) == 1
    assert set(sites.measured) == {"a", "b", "c"}


def test_who_steps_faster_has_the_harder_way() -> None:
    sites = Sites(2)
    (one, auto), _ = sites.at_once(
        lambda: sites.settle("a", 1e6, step_time=0.001), lambda: sites.settle("b", 1e6, step_time=10.0)
    )
    assert chosen(one) == chosen(recommended(1e6, 0.001, 2))
    assert auto.why.startswith("for a, of 2 founders")


def test_a_site_that_comes_later_takes_what_the_run_has_and_measures_nothing() -> None:
    sites = Sites(1)
    own = Settings(sync_every=70, overlap_steps=9, fragments=[["0.*"], ["*"]], compression="bf16")
    assert sites.known("b") is None
    sites.hub.coordinator._gathering.propose("a", charter(own))
    for name in AUTO:
        found = sites.known("b", **{**vars(Settings()), **AUTO, name: getattr(own, name)})
        assert found is not None
        assert chosen(found) == chosen(own)
    found = sites.known("b")
    assert found is not None
    assert chosen(found) == chosen(own)
    assert sites.measured == []


def test_a_site_with_numbers_of_its_own_decides_for_who_leaves_them_open() -> None:
    sites = Sites(2)
    own = Settings(sync_every=70, overlap_steps=9, compression="bf16")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(sites.settle, "a")
        time.sleep(0.5)
        assert not waits.done()
        sites.hub.coordinator.agree("b", charter(own))
        settings, auto = waits.result(60)
    assert chosen(settings) == chosen(own)
    assert (auto.measured, auto.why) == (None, "they are those of the run 'run'")


def test_numbers_that_differ_from_those_of_the_run_are_refused_with_what_differs() -> None:
    sites = Sites(1)
    settings, _ = sites.settle("a")
    founded = charter(settings)
    sites.hub.coordinator.agree("a", founded)
    given = sites.known("b", sync_every=settings.sync_every + 1)
    assert given is not None
    told = f"settings.sync_every is {settings.sync_every + 1} here and {settings.sync_every} there"
    with pytest.raises(ValueError, match=told):
        charter(given).require_same(sites.hub.coordinator.agree("b", charter(given)))


def test_what_cannot_be_made_of_its_text_is_refused_by_name() -> None:
    sites = Sites(1)
    sites.hub.coordinator.agree("a", charter(Settings(compression=RandomK(4, FP4()))))
    with pytest.raises(ValueError, match=r"compression='auto' was given, and the run has compression=RandomK.*Give"):
        sites.known("b")


def test_a_hub_that_is_started_again_hears_of_all_once_more() -> None:
    sites = Sites(2)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(sites.settle, "a")
        time.sleep(0.5)
        sites.hub.restart()
        other, _ = sites.settle("b")
        assert chosen(waits.result(60)[0]) == chosen(other)


def test_one_founder_plans_for_the_second_that_may_come() -> None:
    settings, _ = Sites(1).settle("a", SLOW)
    assert chosen(settings) == chosen(recommended(SLOW, 0.05, 2))


# In a fit


def fit_beside_its_hub(rank: int, world_size: int, steps: int, folder: str, ckpt_path: str | None) -> dict[str, Any]:
    """A fit that founds a run alone; tells the settings, and what of its samples counts."""
    hub = InProcessHub("run", 1)

    class Here(Federation):
        def connect(self, ranks: int = 1) -> Any:
            return hub.connect(self.site)

    strategy = StreamingDiLoCoStrategy(federation=Here("hub:1", "run", "a", insecure=True, late="carry"), **AUTO)
    saves = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    fitted = trainer(strategy=strategy, devices=1, max_steps=steps, callbacks=[saves], enable_checkpointing=True)
    fitted.fit(module(), SomeBatches(0, 100), ckpt_path=ckpt_path)
    records = [Record.from_bytes(text) for _, text in hub.journal.read()]
    assert hub.coordinator.charter is not None
    return {
        "charter": dict(hub.coordinator.charter.settings),
        "chosen": chosen(strategy.engine.settings),
        "steps": sum(own.steps for record in records if not record.fragment for own in record.counted),
        "samples": sum(own.weight for record in records if not record.fragment for own in record.counted),
    }


@pytest.mark.parametrize("steps", [5, 70])
def test_what_a_site_trained_before_the_choice_counts(steps: int, tmp_path: Path) -> None:
    """Also in a fit that ends before it could measure as long as it should, and one that is resumed from before."""
    (told,) = run_processes(fit_beside_its_hub, 1, steps, str(tmp_path), None)
    size = len(batch(0, 0)[0])
    assert (told["steps"], told["samples"]) == (steps, steps * size)
    assert told["charter"]["sync_every"] == str(told["chosen"][0])
    if steps == 70:
        (again,) = run_processes(fit_beside_its_hub, 1, steps, str(tmp_path), str(tmp_path / "step=5.ckpt"))
        assert (again["steps"], again["samples"]) == (steps, steps * size)


# Over gRPC


@pytest.fixture
def service(tmp_path: Path) -> Iterator[HubService]:
    require_extra()
    service = HubService("run", tmp_path / "hub.sqlite", sites=2, insecure=True)
    service.start()
    yield service
    service.close()


@pytest.mark.filterwarnings("ignore:What goes to hub")
def test_two_sites_measure_their_links_to_a_real_hub_and_take_one_choice(service: HubService) -> None:
    def settle(site: str) -> tuple[Settings, AutoSettings]:
        auto, settings = AutoSettings.of(**AUTO)
        auto.step_time = lambda: 0.05  # type: ignore[method-assign]
        federation = Federation(f"127.0.0.1:{service.port}", "run", site, insecure=True)
        return RunSettings(auto, federation, Topology(), mlp()).settle(settings), auto

    with ThreadPoolExecutor() as pool:
        (one, auto), (other, _) = [each.result(60) for each in [pool.submit(settle, site) for site in "ab"]]
    assert chosen(one) == chosen(other)
    assert 0.001 < auto.measured.link.gbit_s < 1000
    assert 0 < auto.measured.link.round_trip < 1


@pytest.mark.filterwarnings("ignore:What goes to hub")
def test_what_a_site_tells_of_its_link_is_read_field_by_field(service: HubService) -> None:
    connection = Federation(f"127.0.0.1:{service.port}", "run", "a", insecure=True).connect()
    try:
        assert connection.settle() == Known(None, {}, 2)
        own = Measurement(0.1, 0.01)
        assert connection.settle(own, {"sync_every": "30"}) == Known(None, {"a": own}, 1)
        with pytest.raises(Refused, match="step_time"):
            connection.settle(Measurement(-1.0, 0.0))
    finally:
        connection.close()
