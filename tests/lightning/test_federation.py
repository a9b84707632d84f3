"""Sites as real processes with the Trainer, over gRPC: some fail, the others do not notice, and all come back."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_sdiloco
from benchmarks.links import Links, missing
from lightning_sdiloco import DynamicBackup, OuterOptimizer, StreamingDiLoCoStrategy
from lightning_sdiloco.federation import add_keys, init_keys
from tests.chaos.checks import Found, Span, Told, examined, returned
from tests.chaos.faults import Fault
from tests.chaos.play import Play
from tests.chaos.processes import BATCH
from tests.chaos.world import World
from tests.federation.hubs import require_extra
from tests.own_quorum import Core


def played(world: World, *faults: Fault) -> tuple[Told, Found]:
    """Lets faults happen one after the other, each when all have come back from that before, and ends the run."""
    play = Play(world)
    play.begin()
    for fault in faults:
        play.suffer(fault)
    play.finish()
    told = Told.of(world.folder, world.sites)
    return told, examined(told, BATCH)


def counted_without(told: Told, span: Span) -> set[str]:
    """The sites that count in the rounds that closed without the one that has a fault, until it is heard of again."""
    victim = span.victim
    heard = [note["at"] for note in told.hub if note.get("site") == victim and note["at"] > span.ended]
    closed = [note for note in told.hub if note["what"] == "append" and span.began < note["at"]]
    counted = [{site for site, *_ in note["counted"]} for note in closed if note["at"] < min(heard, default=span.ended)]
    return set().union(*(sites for sites in counted if victim not in sites))


@pytest.mark.timeout(400)
def test_sites_fail_the_others_go_on_at_their_pace_and_all_return(tmp_path: Path) -> None:
    require_extra()
    with World(tmp_path, "abc", seconds=0.02) as world:
        told, found = played(world, Fault("stop", "c", 3.0), Fault("kill", "b", 0.5))
    # No stall, other digest, or sample that counts twice, and one model at the end.
    assert found["problems"] == []
    stopped, killed = told.spans()
    assert counted_without(told, stopped) == {"a", "b"}
    assert counted_without(told, killed) == {"a", "c"}
    starts = {site: [note["step"] for note in told.sites[site] if note["what"] == "training"] for site in "bc"}
    assert starts["c"] == [0], "it was not started again"
    first, second = starts["b"]
    # It went on from its own checkpoint.
    made = max(note["step"] for note in told.steps("b") if note["at"] < killed.ended)
    assert first == 0 < second <= made


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(400)
def test_sites_behind_a_nat_are_cut_off_and_return_by_themselves(tmp_path: Path) -> None:
    require_extra()
    faults = [Fault("cut", "b", 15.0), Fault("cut_in", "b", 6.0), Fault("cut_out", "b", 6.0), Fault("nat", "b", 0.0)]
    with Links(3, 100e6, 0.025) as links, World(tmp_path, "ab", 0.05, links=links) as world:
        told, found = played(world, *faults)
    assert found["problems"] == []
    cut, *_ = spans = told.spans()
    assert counted_without(told, cut) == {"a"}
    alone = [note for note in told.steps("b") if cut.began < note["at"] < cut.ended and not note["reachable"]]
    # It noticed, and trained on.
    assert len(alone) > 3
    assert [returned(told, spans, span, "b").get("interrupted") for span in spans] == [None] * 4


def test_a_strategy_refuses_by_name_what_a_federation_cannot_do() -> None:
    federation = lightning_sdiloco.Federation("hub:1", "run", "a", insecure=True)
    choices: dict[str, Any] = {
        "exchange": "two_shot",
        "warmup_steps": 10,
        "evaluate": "mean",
        "resume": "restart",
        "worker_groups": 2,
        "sync_every": "auto",
        "compression": "auto",
    }
    for name, value in choices.items():
        with pytest.raises(ValueError, match=f"{name}={value!r} does not go with a federation"):
            StreamingDiLoCoStrategy(federation=federation, **{name: value})
    with pytest.raises(ValueError, match="exchange='auto:nccl' does not go with a federation"):
        StreamingDiLoCoStrategy(federation=federation, exchange="auto:nccl")
    with pytest.raises(ValueError, match="outlier_guard=3.0 of outer_optimizer does not go with a federation"):
        StreamingDiLoCoStrategy(federation=federation, outer_optimizer=OuterOptimizer(outlier_guard=3.0))


def test_a_federation_is_given_in_yaml_by_its_class_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init_keys("keys", "llm-7b")
    add_keys("keys", "site-b").rename("site-b.bundle")
    chosen: dict[str, Any] = {"hub": "a.example:29400", "run": "llm-7b", "site": "site-b", "keys": "site-b.bundle"}
    for quorum, made in (
        (3, 3),
        ({"class_path": "lightning_sdiloco.DynamicBackup", "init_args": {"least": 0.25}}, DynamicBackup(0.25)),
        ({"class_path": "tests.own_quorum.Core", "init_args": {"core": ["site-a"]}}, Core(["site-a"])),
    ):
        own = {"class_path": "lightning_sdiloco.Federation", "init_args": {**chosen, "lease": 5, "quorum": quorum}}
        strategy = {"class_path": "lightning_sdiloco.StreamingDiLoCoStrategy", "init_args": {"federation": own}}
        Path("config.yaml").write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "strategy": strategy}}))
        cli = LightningCLI(BoringModel, run=False, args=["--config", "config.yaml"], save_config_callback=None)
        federation = cli.trainer.strategy._options.federation
        assert (federation.site, federation.lease, federation.grace) == ("site-b", 5, "auto")
        assert federation.quorum == made
