"""Sites as real processes with the Trainer, over gRPC: of one rank and of several, and some of
them fail.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_sdiloco
from lightning_sdiloco import DynamicBackup, StreamingDiLoCoStrategy
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.tools.run_files import changes, read_run
from tests.chaos.faults import Fault
from tests.chaos.play import played
from tests.chaos.processes import BATCH, RUN
from tests.chaos.world import World, children
from tests.federation.hubs import require_extra
from tests.fits import refusal
from tests.lightning.federated_site import Rank, train, train_under_torchrun
from tests.own_quorum import Core


def test_a_strategy_refuses_by_name_options_that_a_federation_cannot_offer() -> None:
    federation = lightning_sdiloco.Federation("hub:1", "run", "a", insecure=True)
    choices: list[tuple[str, Any]] = [(name, "auto") for name in ("sync_every", "compression")]
    choices += [("exchange", "two_shot"), ("exchange", "auto:nccl"), ("evaluate", "mean")]
    for name, value in (*choices, ("resume", "restart"), ("worker_groups", 2)):
        told = refusal(StreamingDiLoCoStrategy, federation=federation, **{name: value})
        assert f"{name}={value!r} does not work with a federation" in told


def test_a_federation_is_given_in_yaml_by_its_class_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init_keys("keys", "llm-7b")
    add_keys("keys", "site-b").rename("site-b.bundle")
    chosen: dict[str, Any] = {
        "hub": "a.example:29400",
        "run": "llm-7b",
        "site": "site-b",
        "keys": "site-b.bundle",
    }
    for quorum, made in (
        (3, 3),
        (
            {"class_path": "lightning_sdiloco.DynamicBackup", "init_args": {"least": 0.25}},
            DynamicBackup(0.25),
        ),
        (
            {"class_path": "tests.own_quorum.Core", "init_args": {"core": ["site-a"]}},
            Core(["site-a"]),
        ),
    ):
        own = {
            "class_path": "lightning_sdiloco.Federation",
            "init_args": {**chosen, "lease": 5, "quorum": quorum},
        }
        strategy = {
            "class_path": "lightning_sdiloco.StreamingDiLoCoStrategy",
            "init_args": {"federation": own},
        }
        Path("config.yaml").write_text(
            yaml.safe_dump({"trainer": {"accelerator": "cpu", "strategy": strategy}})
        )
        cli = LightningCLI(
            BoringModel, run=False, args=["--config", "config.yaml"], save_config_callback=None
        )
        federation = cli.trainer.strategy._options.federation
        assert (federation.site, federation.lease, federation.grace) == ("site-b", 5, "auto")
        assert federation.quorum == made


# Some fail, the others do not notice, and all come back


@pytest.mark.timeout(400)
def test_sites_fail_the_others_go_on_at_their_pace_and_all_return(tmp_path: Path) -> None:
    require_extra()
    with World(tmp_path, "abc", seconds=0.02) as world:
        told, found = played(world, Fault("stop", "c", 3.0), Fault("kill", "b", 0.5))
    # No stall, other digest, or sample that counts twice, and one model at the end.
    assert found["problems"] == []
    for span, others in zip(told.spans(), ({"a", "b"}, {"a", "c"}), strict=True):
        # The rounds that closed without it until it was heard of again count both others.
        heard = [
            note["at"]
            for note in told.hub
            if note.get("site") == span.victim and note["at"] > span.ended
        ]
        until = min(heard, default=span.ended)
        closed = [
            note
            for note in told.hub
            if note["what"] == "append" and span.began < note["at"] < until
        ]
        counted = [{site for site, *_ in note["counted"]} for note in closed]
        assert set().union(*(sites for sites in counted if span.victim not in sites)) == others
    starts = {
        site: [note["step"] for note in told.sites[site] if note["what"] == "training"]
        for site in "bc"
    }
    assert starts["c"] == [0], "it was not started again"
    first, second = starts["b"]
    # It went on from its own checkpoint.
    killed = told.spans()[1].ended
    assert (
        first == 0 < second <= max(note["step"] for note in told.steps("b") if note["at"] < killed)
    )


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
        process = self.processes[place.name] = self.context.Process(target=target, args=(place,))
        process.start()
        return process

    def round(self, name: str) -> int:
        stepped = [note for note in self.notes(name) if "rounds" in note]
        return min(stepped[-1]["rounds"]) if stepped else 0

    def records(self) -> list[Record]:
        return [Record.from_bytes(text) for _, text in self.hub.coordinator.journal.read()]

    def incarnations(self, site: str) -> int:
        """How many starts of a site count."""
        return len({own.incarnation for record in self.records() if (own := record.of(site))})

    def counted(self, site: str, fragment: int) -> int:
        """How many samples of a site count."""
        of_site = [
            own
            for record in self.records()
            if record.fragment == fragment and (own := record.of(site))
        ]
        return sum(own.weight for own in of_site)

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400.0
        while not holds():
            assert not self.dead(), f"{what}: { {name: self.said(name) for name in self.dead()} }"
            assert time.monotonic() < deadline, (
                f"{what} did not happen: {self.hub.coordinator.status()}"
            )
            time.sleep(0.05)

    def ends(self, *names: str) -> list[dict[str, Any]]:
        """What ranks write when they have ended, for which it waits."""
        self.until(
            f"{names} end",
            lambda: all((self.notes(name) or [{}])[-1].get("what") == "ended" for name in names),
        )
        return [self.notes(name)[-1] for name in names]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    require_extra()
    with Federation(tmp_path) as made:
        yield made
    made.hub.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_site_of_two_ranks_validates_alone_and_a_signal_to_one_of_them_ends_it(
    federation: Federation,
) -> None:
    federation.train("a", ranks=2, validates=6)
    federation.train("b")
    federation.until("both have landed a round", lambda: min(map(federation.round, "ab")) >= 1)
    os.kill(federation.processes["a1"].pid, signal.SIGTERM)
    first, second = federation.ends("a", "a1")
    steps = federation.notes("a")[-2]["step"]
    assert (federation.notes("a1")[-2]["step"], second["terminated"], first["terminated"]) == (
        steps,
        True,
        True,
    )
    # What both had trained when they left counts.
    assert {federation.counted("a", fragment) for fragment in range(2)} == {steps * 8 * 2}
    assert first["report"]["bytes_sent"] == pytest.approx(second["report"]["bytes_sent"], rel=0.02)
    assert first["metrics"]["seen"] == second["metrics"]["seen"]
    assert min(first["metrics"]["trained"], second["metrics"]["trained"]) > 0
    assert any(
        path.name.startswith("terminated") for path in (federation.folder / "a").glob("*.ckpt")
    )
    there = federation.round("b")
    federation.until("the other one goes on", lambda: federation.round("b") > there + 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_a_site_leave_out_micro_batches_and_it_counts_those_of_all(
    federation: Federation,
) -> None:
    federation.train("a", 2, steps=60, seconds=0.05, budget="auto")
    federation.train("b", steps=60, seconds=0.05, budget=60.0)
    first, second, other = federation.ends("a", "a1", "b")
    # Ranks that have trained unequal numbers agree on budget and model, and the site counts as much
    # as both trained.
    assert (first["budget"], first["same"]) == (second["budget"], second["same"])
    assert first["budget"] < 0.2
    assert second["dropped"] > first["dropped"]
    assert other["dropped"] == 0
    for fragment in range(2):
        assert federation.counted("a", fragment) == first["samples"] + second["samples"]
        assert federation.counted("b", fragment) == other["samples"]
    assert any(len(record.counted) == 2 for record in federation.records())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_torchrun_of_four_ranks_sends_as_much_as_one_and_goes_on_after_a_kill(
    federation: Federation,
) -> None:
    names = ["a", "a1", "a2", "a3", "b"]
    federation.train("b")
    agent = federation.run(train_under_torchrun, "a", ranks=4)
    federation.until("both have landed some rounds", lambda: min(map(federation.round, "ab")) >= 2)
    # It has a checkpoint of step 25, and has trained on.
    federation.until("a trains on", lambda: federation.notes("a")[-1]["step"] > 45)
    there = federation.round("b")
    os.kill(max(children(agent.pid)), signal.SIGKILL)
    federation.until("the other one goes on", lambda: federation.round("b") >= there + 3)
    federation.until("it counts again", lambda: federation.incarnations("a") == 2)
    federation.hub.coordinator.end()
    ends = federation.ends(*names)
    # All have applied the same records, and hold the same bits.
    assert len({str(end["applied"]) for end in ends}) == len({end["digest"] for end in ends}) == 1
    for record in federation.records():
        assert not record.left_out
        sent = []
        for own, ranks in ((record.of("a"), 4), (record.of("b"), 1)):
            if own is not None:
                assert (own.weight, len(own.payloads)) == (own.steps * BATCH * ranks, ranks)
                sent.append((own.exact, sum(payload.size for payload in own.payloads)))
        # Four ranks send the bytes of one, a quarter each; for the last round both send float32.
        if len(sent) == 2 and sent[0][0] == sent[1][0]:
            assert sent[0][1] == pytest.approx(sent[1][1], rel=0.02)
    shares = [end["report"]["bytes_sent"] for end in ends[:4]]
    assert shares == pytest.approx([shares[0]] * 4, rel=0.02)
    for name in names[:4]:
        steps = [note["step"] for note in federation.notes(name) if "took" in note]
        # It went on from its checkpoint.
        (began,) = [
            after for before, after in zip(steps, steps[1:], strict=False) if after <= before
        ]
        assert began % 25 == 1
        assert began > 1
    # What the other one noted: its absence, and its return.
    seen = [what for _, what in changes(read_run(federation.folder / "b.records").ranks[0])]
    assert "a counts no longer" in seen
    assert seen.count("a counts") >= 2


@pytest.mark.large
@pytest.mark.timeout(900)
def test_of_sites_with_sharded_models_one_returns(federation: Federation) -> None:
    for site in "ab":
        federation.train(site, 2, is_sharded=True)
    last = federation.folder / "b" / "last.ckpt"
    both = lambda: any(len(record.counted) == 2 for record in federation.records())  # noqa: E731
    federation.until("a checkpoint is there", lambda: both() and last.exists())
    run_config = federation.hub.coordinator.run_config
    for name in ("b", "b1"):
        federation.kill(name)
    federation.train("b", 2, is_sharded=True)
    federation.until("it counts again", lambda: federation.incarnations("b") == 2)
    federation.hub.coordinator.end()
    ends = federation.ends("a", "a1", "b", "b1")
    assert federation.hub.coordinator.run_config == run_config
    assert all(len(shards) == 2 for shards in run_config.shards)
    assert len({(end["digest"], str(end["applied"])) for end in ends}) == 1
    assert federation.incarnations("b") == 2
    assert ends[0]["report"]["bytes_sent"] == pytest.approx(
        ends[1]["report"]["bytes_sent"], rel=0.02
    )
