"""Sites as real processes with the Trainer, over gRPC: of one rank and of several, and some of
them fail.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_sdiloco
from lightning_sdiloco import DynamicBackup, StreamingDiLoCoStrategy
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.messages import Contribution, Record
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.tools.run_files import changes, read_run
from tests.chaos.checks import Span, Told
from tests.chaos.faults import Fault
from tests.chaos.play import played
from tests.chaos.processes import BATCH, RUN
from tests.chaos.world import World, children
from tests.federation.hubs import require_extra
from tests.fits import refusal
from tests.lightning.federated_site import Rank, train, train_under_torchrun
from tests.own_quorum import Core

NOT_FOR_SITES: list[tuple[str, Any]] = [
    ("sync_every", "auto"),
    ("compression", "auto"),
    ("exchange", "two_shot"),
    ("exchange", "auto:nccl"),
    ("evaluate", "mean"),
    ("resume", "restart"),
    ("worker_groups", 2),
]


def test_a_strategy_refuses_by_name_options_that_a_federation_cannot_offer() -> None:
    federation = lightning_sdiloco.Federation("run", "hub:1", "a", insecure=True)
    for name, value in NOT_FOR_SITES:
        message = refusal(StreamingDiLoCoStrategy, federation=federation, **{name: value})
        assert f"{name}={value!r} does not work with a federation" in message


def by_class_path(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


# As YAML gives them, and the objects.
QUORUMS: list[tuple[Any, Any]] = [
    (3, 3),
    (by_class_path("lightning_sdiloco.DynamicBackup", least=0.25), DynamicBackup(0.25)),
    (by_class_path("tests.own_quorum.Core", core=["site-a"]), Core(["site-a"])),
]


def test_a_federation_is_given_in_yaml_by_its_class_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init_keys("keys", "llm-7b")
    add_keys("keys", "site-b").rename("site-b.bundle")
    for quorum_in_yaml, quorum in QUORUMS:
        in_yaml = by_class_path(
            "lightning_sdiloco.Federation",
            hub="a.example:29400",
            run="llm-7b",
            site="site-b",
            keys="site-b.bundle",
            lease=5,
            quorum=quorum_in_yaml,
        )
        strategy = by_class_path("lightning_sdiloco.StreamingDiLoCoStrategy", federation=in_yaml)
        config = {"trainer": {"accelerator": "cpu", "strategy": strategy}}
        Path("config.yaml").write_text(yaml.safe_dump(config))
        cli = LightningCLI(
            BoringModel, run=False, args=["--config", "config.yaml"], save_config_callback=None
        )
        federation = cli.trainer.strategy._options.federation
        assert federation.site == "site-b"
        assert federation.lease == 5
        assert federation.grace == "auto"
        assert federation.quorum == quorum


# Some fail, the others do not notice, and all come back


@pytest.mark.timeout(400)
def test_sites_fail_the_others_go_on_at_their_pace_and_all_return(tmp_path: Path) -> None:
    require_extra()
    with World(tmp_path, "abc", seconds=0.02) as world:
        notes, findings = played(world, Fault("stop", "c", 3.0), Fault("kill", "b", 0.5))
    # No stall, other digest, or sample that counts twice, and one model at the end.
    assert findings["problems"] == []
    stopped, killed = notes.spans()
    assert counted_without(stopped, notes) == {"a", "b"}
    assert counted_without(killed, notes) == {"a", "c"}
    assert steps_of_starts("c", notes) == [0], "it was not started again"
    first, second = steps_of_starts("b", notes)
    # It went on from its own checkpoint.
    steps = [note["step"] for note in notes.steps("b") if note["at"] < killed.ended]
    assert first == 0 < second <= max(steps)


def counted_without(span: Span, notes: Told) -> set[str]:
    """The sites that count in the rounds that closed without the victim of a fault, until it was
    heard of again.
    """
    of_victim = [note["at"] for note in notes.hub if note.get("site") == span.victim]
    end = min((time for time in of_victim if time > span.ended), default=span.ended)
    counted: set[str] = set()
    for record in notes.records():
        sites = {site for site, *_ in record["counted"]}
        if span.began < record["at"] < end and span.victim not in sites:
            counted |= sites
    return counted


def steps_of_starts(site: str, notes: Told) -> list[int]:
    return [note["step"] for note in notes.sites[site] if note["what"] == "training"]


# Sites of several ranks


class Federation(World):
    """A hub in this process, and the ranks of sites in others."""

    def __init__(self, folder: Path) -> None:
        # However slow this machine is, every sample counts.
        super().__init__(folder, "ab", seconds=0.02, late="carry")
        self.hub = HubService(
            RUN, folder / "hub.sqlite", sites=2, listen=self.hubs[0], keys=folder / "keys"
        )
        self.hub.start()

    def train(self, site: str, ranks: int = 1, **choices: Any) -> None:
        """Starts the ranks of a site, each as a process."""
        for rank in range(ranks):
            self.run(train, site, rank=rank, ranks=ranks, **choices)

    def run(self, target: Callable[[Rank], None], site: str, **choices: Any) -> Any:
        place = Rank(**{**vars(self.places[site]), "hub": self.hubs[0], "site": site, **choices})
        process = self.context.Process(target=target, args=(place,))
        self.processes[place.name] = process
        process.start()
        return process

    def round(self, name: str) -> int:
        stepped = [note for note in self.notes(name) if "rounds" in note]
        return min(stepped[-1]["rounds"]) if stepped else 0

    def records(self) -> list[Record]:
        return [Record.from_bytes(text) for _, text in self.hub.coordinator.journal.read()]

    def contributions(self, site: str) -> list[Contribution]:
        counted = [record.of(site) for record in self.records()]
        return [contribution for contribution in counted if contribution]

    def incarnations(self, site: str) -> int:
        """How many starts of a site count."""
        return len({contribution.incarnation for contribution in self.contributions(site)})

    def counted(self, site: str, fragment: int) -> int:
        """How many samples of a site count."""
        of_fragment = [record.of(site) for record in self.records() if record.fragment == fragment]
        return sum(contribution.weight for contribution in of_fragment if contribution)

    def wait(self, event: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400.0
        while not holds():
            errors = {name: self.said(name) for name in self.dead()}
            assert not errors, f"{event}: {errors}"
            assert time.monotonic() < deadline, (
                f"{event} did not happen: {self.hub.coordinator.status()}"
            )
            time.sleep(0.05)

    def wait_for_rounds(self, rounds: int) -> None:
        event = f"both have landed {rounds} rounds"
        self.wait(event, lambda: min(self.round("a"), self.round("b")) >= rounds)

    def ends(self, *names: str) -> list[dict[str, Any]]:
        """Waits until ranks have ended, and returns their last notes."""

        def has_ended(name: str) -> bool:
            notes = self.notes(name)
            return bool(notes) and notes[-1].get("what") == "ended"

        self.wait(f"{names} end", lambda: all(map(has_ended, names)))
        return [self.notes(name)[-1] for name in names]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    require_extra()
    with Federation(tmp_path) as world:
        yield world
    world.hub.close()


def same_bytes_sent(*ends: dict[str, Any]) -> bool:
    shares = [end["report"]["bytes_sent"] for end in ends]
    return shares == pytest.approx([shares[0]] * len(shares), rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_site_of_two_ranks_validates_alone_and_a_signal_to_one_of_them_ends_it(
    federation: Federation,
) -> None:
    federation.train("a", ranks=2, validates=6)
    federation.train("b")
    federation.wait_for_rounds(1)
    os.kill(federation.processes["a1"].pid, signal.SIGTERM)
    first, second = federation.ends("a", "a1")
    steps = federation.notes("a")[-2]["step"]
    assert federation.notes("a1")[-2]["step"] == steps
    assert first["terminated"] is True
    assert second["terminated"] is True
    # The samples that both had trained when they left count.
    for fragment in range(2):
        assert federation.counted("a", fragment) == steps * 8 * 2
    assert same_bytes_sent(second, first)
    assert first["metrics"]["seen"] == second["metrics"]["seen"]
    assert min(first["metrics"]["trained"], second["metrics"]["trained"]) > 0
    assert list((federation.folder / "a").glob("terminated*.ckpt"))
    landed_rounds = federation.round("b")
    federation.wait("the other one goes on", lambda: federation.round("b") > landed_rounds + 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_a_site_leave_out_micro_batches_and_it_counts_those_of_all(
    federation: Federation,
) -> None:
    federation.train("a", 2, steps=60, seconds=0.05, budget="auto")
    federation.train("b", steps=60, seconds=0.05, budget=60.0)
    first, second, other_site = federation.ends("a", "a1", "b")
    # Ranks that have trained unequal numbers agree on budget and model, and the site counts as much
    # as both trained.
    assert first["budget"] == second["budget"]
    assert first["same"] == second["same"]
    assert first["budget"] < 0.2
    assert second["dropped"] > first["dropped"]
    assert other_site["dropped"] == 0
    for fragment in range(2):
        assert federation.counted("a", fragment) == first["samples"] + second["samples"]
        assert federation.counted("b", fragment) == other_site["samples"]
    assert any(len(record.counted) == 2 for record in federation.records())
    for status in federation.hub.coordinator.status()["sites"].values():
        assert status["planned_steps"] == 60
        assert 0 < status["inner_steps"] <= 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_torchrun_of_four_ranks_sends_as_much_as_one_and_goes_on_after_a_kill(
    federation: Federation,
) -> None:
    names = ["a", "a1", "a2", "a3", "b"]
    federation.train("b")
    agent = federation.run(train_under_torchrun, "a", ranks=4)
    federation.wait_for_rounds(2)
    # It has a checkpoint of step 25, and has trained on.
    federation.wait("a trains on", lambda: federation.notes("a")[-1]["step"] > 45)
    landed_rounds = federation.round("b")
    os.kill(max(children(agent.pid)), signal.SIGKILL)
    federation.wait("the other one goes on", lambda: federation.round("b") >= landed_rounds + 3)
    federation.wait("it counts again", lambda: federation.incarnations("a") == 2)
    federation.hub.coordinator.end()
    ends = federation.ends(*names)
    # All have applied the same records, and hold the same bits.
    assert len({str(end["applied"]) for end in ends}) == 1
    assert len({end["digest"] for end in ends}) == 1
    for record in federation.records():
        assert_four_ranks_send_as_much_as_one(record)
    assert same_bytes_sent(*ends[:4])
    for name in names[:4]:
        # It went on from its checkpoint.
        (restarted_at,) = steps_after_a_restart(federation.notes(name))
        assert restarted_at % 25 == 1
        assert restarted_at > 1
    # The notes of the other site: the absence of this one, and its return.
    events = [event for _, event in changes(read_run(federation.folder / "b.records").ranks[0])]
    assert "a no longer counts" in events
    assert events.count("a counts") >= 2


def assert_four_ranks_send_as_much_as_one(record: Record) -> None:
    """Four ranks send the bytes of one, a quarter each."""
    assert not record.left_out
    contributions = {1: record.of("b"), 4: record.of("a")}
    for ranks, contribution in contributions.items():
        if contribution is not None:
            assert contribution.weight == contribution.steps * BATCH * ranks
            assert len(contribution.payloads) == ranks
    alone = contributions[1]
    four = contributions[4]
    # For the last round both send float32.
    if alone is not None and four is not None and alone.exact == four.exact:
        assert bytes_of(four) == pytest.approx(bytes_of(alone), rel=0.02)


def bytes_of(contribution: Contribution) -> int:
    return sum(payload.size for payload in contribution.payloads)


def steps_after_a_restart(notes: list[dict[str, Any]]) -> list[int]:
    """The steps that are not later than the step noted before."""
    steps = [note["step"] for note in notes if "took" in note]
    return [after for before, after in pairwise(steps) if after <= before]


@pytest.mark.large
@pytest.mark.timeout(900)
def test_of_sites_with_sharded_models_one_returns(federation: Federation) -> None:
    for site in "ab":
        federation.train(site, 2, is_sharded=True)
    last = federation.folder / "b" / "last.ckpt"

    def both_count_and_b_has_saved() -> bool:
        return last.exists() and any(len(record.counted) == 2 for record in federation.records())

    federation.wait("a checkpoint is there", both_count_and_b_has_saved)
    run_config = federation.hub.coordinator.run_config
    for name in ("b", "b1"):
        federation.kill(name)
    federation.train("b", 2, is_sharded=True)
    federation.wait("it counts again", lambda: federation.incarnations("b") == 2)
    federation.hub.coordinator.end()
    ends = federation.ends("a", "a1", "b", "b1")
    assert federation.hub.coordinator.run_config == run_config
    assert all(len(shards) == 2 for shards in run_config.shards)
    assert len({(end["digest"], str(end["applied"])) for end in ends}) == 1
    assert federation.incarnations("b") == 2
    assert same_bytes_sent(ends[1], ends[0])
