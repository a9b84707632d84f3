"""Sites as real processes with the Trainer, over gRPC: of one rank and of several, and some of them fail."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_sdiloco
from lightning_sdiloco import DynamicBackup, OuterOptimizer, StreamingDiLoCoStrategy
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.lightning.monitor import changes, read_run
from tests.chaos.checks import Found, Span, Told, examined
from tests.chaos.faults import Fault
from tests.chaos.notes import Note, read
from tests.chaos.play import Play
from tests.chaos.processes import BATCH
from tests.chaos.world import World, free_ports
from tests.federation.hubs import require_extra
from tests.lightning.federated_site import Rank, train, train_under_torchrun
from tests.own_quorum import Core
from tests.small_disk import fill, small_disk

FILE_OF_RANK = "rank_00000.pt"


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


# Some fail, the others do not notice, and all come back


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


def counted(record: Note) -> str:
    """The names of the sites that count."""
    return "".join(sorted(site for site, *_ in record["counted"]))


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
@pytest.mark.timeout(400)
def test_a_site_on_a_full_disk_says_so_and_goes_on_from_its_last_checkpoint_when_there_is_room(tmp_path: Path) -> None:
    require_extra()
    last = tmp_path / "b" / "last.ckpt"
    # A machine that is busy with other things breaks no lease of these.
    with small_disk(last.parent, 40) as disk, World(tmp_path, "ab", 0.03, lease=20.0) as world:
        play = Play(world)
        play.begin()
        play.until("a checkpoint", partial(stops_with_one_save, world, "b", disk), 60)
        rank, checkpoint = largest(disk, "rank_*.pt"), largest(disk, "last.ckpt")
        # The file of the rank finds room, and the checkpoint after it does not.
        filler = fill(disk, rank + checkpoint // 2)
        world.signal("b", signal.SIGCONT)
        failed = world.processes["b"]
        failed.join(60)
        assert failed.exitcode == 1
        assert "No space left on device" in world.said("b")
        assert f"Nothing is left of it. Resume from {last}" in world.said("b")
        # One whole checkpoint is there, and no part of another.
        (save,) = (disk / "last.ckpt.sdiloco").iterdir()
        assert sorted(path.name for path in save.iterdir()) == ["manifest.json", FILE_OF_RANK]
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "last.ckpt", "last.ckpt.sdiloco"]
        held = torch.load(last, weights_only=True)
        assert held["streaming_diloco"]["save"] == save.name
        filler.unlink()
        # Its process is gone already; it is started again as one that was killed.
        play.suffer(Fault("kill", "b", 3.0))
        play.finish()
    told = Told.of(tmp_path, "ab")
    # All end with one model, nothing counts twice, and no more is lost than may be.
    assert [problem for problem in examined(told, BATCH)["problems"] if "stood still" not in problem] == []
    before, after = (note for note in told.sites["b"] if note["what"] == "training")
    assert (before["step"], after["step"]) == (0, held["global_step"])
    # Meanwhile the other one closed rounds alone, and was not held up. A thread of it may wait for another one that the
    # machine does not let run, for some moments.
    gone = max(note["at"] for note in told.sites["b"] if note["at"] < told.spans()[0].began)
    assert "a" in [counted(note) for note in told.records() if gone < note["at"] < after["at"]]
    alone = [note for note in told.steps("a") if gone < note["at"] < after["at"]]
    stalled = sum(note["stalled"] - note["delayed"] - note["stolen"] for note in alone)
    assert stalled < 0.25 * (after["at"] - gone)
    assert counted(told.records()[-1]) == "ab"


def stops_with_one_save(world: World, site: str, disk: Path) -> bool:
    """Stops a site if all on its disk is one whole checkpoint; tells whether it has."""
    world.signal(site, signal.SIGSTOP)
    time.sleep(0.01)
    if sorted(path.name for path in disk.rglob("*") if path.is_file()) == ["last.ckpt", "manifest.json", FILE_OF_RANK]:
        return True
    world.signal(site, signal.SIGCONT)
    return False


def largest(disk: Path, name: str) -> int:
    """The bytes of the largest file with a name."""
    return max(path.stat().st_size for path in disk.rglob(name))


# Sites of several ranks


class Federation:
    """A hub in this process, and the ranks of sites in others."""

    def __init__(self, folder: Path, sites: str = "ab") -> None:
        self.folder = folder
        init_keys(folder / "keys", "run")
        for site in sites:
            add_keys(folder / "keys", site)
        ledger, keys = folder / "hub.sqlite", folder / "keys"
        self.hub = HubService("run", ledger, sites=len(sites), listen="127.0.0.1:0", keys=keys)
        self.hub.start()
        self.processes: dict[str, Any] = {}
        self.ports = dict(zip(sites, free_ports(len(sites)), strict=True))
        # Sites begin with what they import, and with no thread of gRPC.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.lightning.federated_site"])

    def start(self, site: str, ranks: int = 1, steps: int = -1, seconds: float = 0.02, **choices: Any) -> None:
        """Starts the ranks of a site, each as a process."""
        for rank in range(ranks):
            place = self.place(site, steps, seconds, rank=rank, ranks=ranks, **choices)
            self.processes[place.name] = self.context.Process(target=train, args=(place,))
            self.processes[place.name].start()

    def place(self, site: str, steps: int = -1, seconds: float = 0.02, **choices: Any) -> Rank:
        # However slow this machine is, every sample counts.
        terms = {"lease": 2.0, "late": "carry"}
        hub = f"127.0.0.1:{self.hub.port}"
        return Rank(self.folder, hub, self.ports[site], seconds, steps, choices=terms, site=site, **choices)

    def notes(self, name: str) -> list[Note]:
        return read(self.folder / f"{name}.jsonl")

    def last(self, name: str) -> str:
        """What a rank has written down last."""
        return (self.notes(name) or [{"what": ""}])[-1]["what"]

    def round(self, name: str) -> int:
        stepped = [note for note in self.notes(name) if "rounds" in note]
        return min(stepped[-1]["rounds"]) if stepped else 0

    def records(self) -> list[Record]:
        return [Record.from_bytes(text) for _, text in self.hub.coordinator.history.journal.read()]

    def lives(self, site: str) -> int:
        """How many starts of a site count."""
        return len({own.life for record in self.records() if (own := record.of(site))})

    def counted(self, site: str, fragment: int) -> int:
        """How many samples of a site count."""
        of_site = [own for record in self.records() if record.fragment == fragment and (own := record.of(site))]
        return sum(own.weight for own in of_site)

    def until(self, what: str, holds: Callable[[], bool], timeout: float = 400.0) -> None:
        deadline = time.monotonic() + timeout
        while not holds():
            dead = [name for name, process in self.processes.items() if process.exitcode]
            assert not dead, f"{what}: { {name: (self.folder / f'{name}.log').read_text()[-3000:] for name in dead} }"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.hub.status()}"
            time.sleep(0.05)

    def ends(self, *names: str) -> list[dict[str, Any]]:
        """What ranks write when they have ended, for which it waits."""
        self.until(f"{names} end", lambda: all(self.last(name) == "ended" for name in names))
        return [self.notes(name)[-1] for name in names]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.hub.close()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    require_extra()
    made = Federation(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_site_of_two_ranks_validates_alone_and_a_signal_to_one_of_them_ends_it(federation: Federation) -> None:
    federation.start("a", ranks=2, validates=6)
    federation.start("b")
    federation.until("both have landed a round", lambda: min(map(federation.round, "ab")) >= 1)
    os.kill(federation.processes["a1"].pid, signal.SIGTERM)
    first, second = federation.ends("a", "a1")
    steps = federation.notes("a")[-2]["step"]
    assert (federation.notes("a1")[-2]["step"], second["terminated"], first["terminated"]) == (steps, True, True)
    # What both had trained when they left counts.
    assert {federation.counted("a", fragment) for fragment in range(2)} == {steps * 8 * 2}
    assert first["report"]["bytes_sent"] == pytest.approx(second["report"]["bytes_sent"], rel=0.02)
    assert first["metrics"]["seen"] == second["metrics"]["seen"]
    assert min(first["metrics"]["trained"], second["metrics"]["trained"]) > 0
    assert any(path.name.startswith("terminated") for path in (federation.folder / "a").glob("*.ckpt"))
    there = federation.round("b")
    federation.until("the other one goes on", lambda: federation.round("b") > there + 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_a_site_leave_out_micro_batches_and_it_counts_what_all_have_trained(federation: Federation) -> None:
    federation.start("a", 2, 60, 0.05, budget="auto")
    federation.start("b", 1, 60, 0.05, budget=60.0)
    first, second, other = federation.ends("a", "a1", "b")
    # Ranks that have trained unequal numbers agree on budget and model, and the site counts as much as both trained.
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
def test_a_torchrun_of_four_ranks_sends_as_much_as_a_site_of_one_and_starts_them_again_when_one_is_killed(
    federation: Federation,
) -> None:
    names = ["a", "a1", "a2", "a3", "b"]
    federation.start("b")
    with under_torchrun(federation, "a", 4) as agent:
        federation.until("both have landed some rounds", lambda: min(map(federation.round, "ab")) >= 2)
        # It has a checkpoint of step 25, and has trained on.
        federation.until("a trains on", lambda: federation.notes("a")[-1]["step"] > 45)
        there = federation.round("b")
        os.kill(max(map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())), signal.SIGKILL)
        federation.until("the other one goes on", lambda: federation.round("b") >= there + 3)
        federation.until("it counts again", lambda: federation.lives("a") == 2)
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
        steps = [note["step"] for note in federation.notes(name) if "step" in note]
        # It went on from its checkpoint.
        (began,) = [after for before, after in zip(steps, steps[1:], strict=False) if after <= before]
        assert began % 25 == 1
        assert began > 1
    # What the other one noted: its absence, and its return.
    seen = [what for _, what in changes(read_run(federation.folder / "b.records").ranks[0])]
    assert "a counts no longer" in seen
    assert seen.count("a counts") >= 2


@contextmanager
def under_torchrun(federation: Federation, site: str, ranks: int) -> Iterator[int]:
    """Starts a site of several ranks by torchrun, whose process this is; it ends them."""
    process = federation.context.Process(target=train_under_torchrun, args=(federation.place(site, ranks=ranks),))
    process.start()
    federation.processes[site] = process
    try:
        yield process.pid
    finally:
        process.terminate()
        process.join(60)


@pytest.mark.large
@pytest.mark.timeout(900)
def test_of_sites_with_sharded_models_one_returns(federation: Federation) -> None:
    for site in "ab":
        federation.start(site, 2, is_sharded=True)
    last = federation.folder / "b" / "last.ckpt"
    both = lambda: any(len(record.counted) == 2 for record in federation.records())  # noqa: E731
    federation.until("a checkpoint is there", lambda: both() and last.exists())
    charter = federation.hub.coordinator.history.charter
    for name in ("b", "b1"):
        killed = federation.processes.pop(name)
        killed.kill()
        killed.join()
    federation.start("b", 2, is_sharded=True)
    federation.until("it counts again", lambda: federation.lives("b") == 2)
    federation.hub.coordinator.end()
    ends = federation.ends("a", "a1", "b", "b1")
    assert federation.hub.coordinator.history.charter == charter
    assert all(len(shards) == 2 for shards in charter.shards)
    assert len({(end["digest"], str(end["applied"])) for end in ends}) == 1
    assert federation.lives("b") == 2
    assert ends[0]["report"]["bytes_sent"] == pytest.approx(ends[1]["report"]["bytes_sent"], rel=0.02)
