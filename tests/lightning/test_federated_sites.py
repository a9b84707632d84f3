"""Sites of one rank and of several as real processes, with the Trainer and with Fabric, over gRPC."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from lightning_sdiloco.federation import HubService, Record, add_keys, init_keys
from lightning_sdiloco.lightning import read_run
from lightning_sdiloco.lightning.monitor import changes
from tests.federation.hubs import require_extra
from tests.lightning.federated_site import (
    BATCH,
    Place,
    train,
    train_dropping,
    train_under_torchrun,
)

SITES = ("a", "b")
STEP = 0.02
STEPS = 300


class Federation:
    """A hub in this process, and sites in others."""

    def __init__(self, folder: Path, sites: Sequence[str]) -> None:
        self.folder, self.sites = folder, sites
        self.late: Literal["carry", "drop"] = "drop"
        init_keys(folder / "keys", "run")
        for site in sites:
            add_keys(folder / "keys", site)
        self.open_hub()
        self.processes: dict[str, Any] = {}
        # For the ranks of a site: those that look for a port at the same time may find the same one.
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in sites]
        self.ports = {site: one.getsockname()[1] for site, one in zip(sites, listening, strict=True)}
        for one in listening:
            one.close()
        # Sites begin with what they import, and with no thread of gRPC.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.lightning.federated_site"])

    def open_hub(self, listen: str = "127.0.0.1:0") -> None:
        keys, count = self.folder / "keys", len(self.sites)
        self.hub = HubService("run", self.folder / "hub.sqlite", sites=count, listen=listen, keys=keys)
        self.hub.start()

    def start(self, site: str, *arguments: Any, ranks: int = 1, does: Any = train, **choices: Any) -> None:
        for rank in range(ranks):
            hub = f"127.0.0.1:{self.hub.port}"
            where = site, hub, self.folder / "keys", self.folder, self.ports[site], rank, ranks
            place = Place(*where, self.late)
            self.processes[place.name] = self.context.Process(target=does, args=(place, *arguments), kwargs=choices)
            self.processes[place.name].start()

    def notes(self, site: str) -> list[dict[str, Any]]:
        path = self.folder / f"{site}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def round(self, site: str) -> int:
        stepped = [note for note in self.notes(site) if "rounds" in note]
        return min(stepped[-1]["rounds"]) if stepped else 0

    def records(self) -> list[Record]:
        return [Record.from_bytes(text) for _, text in self.hub.coordinator.history.journal.read()]

    def together(self) -> list[Record]:
        """The records of the rounds in which two sites count."""
        return [record for record in self.records() if len(record.counted) == 2]

    def lives(self, site: str) -> int:
        """How many starts of a site count."""
        return len({own.life for record in self.records() if (own := record.of(site))})

    def trained(self, site: str, fragment: int = 0) -> int:
        """How many samples of a site count."""
        of_site = [own for record in self.records() if record.fragment == fragment and (own := record.of(site))]
        return sum(own.weight for own in of_site)

    def until(self, what: str, holds: Callable[[], bool], timeout: float = 240.0) -> None:
        deadline = time.monotonic() + timeout
        while not holds():
            dead = [site for site, process in self.processes.items() if process.exitcode]
            told = {site: (self.folder / f"{site}.log").read_text()[-3000:] for site in dead}
            assert not dead, f"{what}: {told}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.hub.status()}"
            time.sleep(0.05)

    def until_ended(self, *sites: str) -> None:
        def ended() -> bool:
            return all((notes := self.notes(site)) and "ended" in notes[-1] for site in sites)

        self.until(f"{sites} have ended", ended)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.hub.close()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    require_extra()
    made = Federation(tmp_path, SITES)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_site_of_two_ranks_validates_alone_and_a_signal_to_one_of_them_ends_it(federation: Federation) -> None:
    federation.late = "carry"  # however slow this machine is, every sample counts
    federation.start("a", 10_000, STEP, ranks=2, validates=6)
    federation.start("b", 10_000, STEP)
    federation.until("both have landed a round", lambda: min(map(federation.round, "ab")) >= 1)
    os.kill(federation.processes["a1"].pid, signal.SIGTERM)
    federation.until_ended("a", "a1")
    first, second = federation.notes("a"), federation.notes("a1")
    steps = first[-2]["step"]
    assert (second[-2]["step"], second[-1]["terminated"], first[-1]["terminated"]) == (steps, True, True)
    # What both had trained when they left counts.
    assert {federation.trained("a", fragment) for fragment in range(2)} == {steps * 8 * 2}
    reports = [note["report"] for note in (first[-1], second[-1])]
    assert reports[0]["bytes_sent"] == pytest.approx(reports[1]["bytes_sent"], rel=0.02)
    for metrics in (first[-1]["metrics"], second[-1]["metrics"]):
        assert metrics["seen"] == first[-1]["metrics"]["seen"]
        assert metrics["trained"] > 0
    assert any(path.name.startswith("terminated") for path in (federation.folder / "a").glob("*.ckpt"))
    there = federation.round("b")
    federation.until("the other one goes on", lambda: federation.round("b") > there + 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_a_site_leave_out_micro_batches_and_it_counts_what_all_have_trained(
    federation: Federation,
) -> None:
    federation.late = "carry"
    federation.start("a", 80, 0.05, "auto", ranks=2, does=train_dropping)
    federation.start("b", 80, 0.05, 60.0, does=train_dropping)
    federation.until_ended("a", "a1", "b")
    first, second, other = (federation.notes(name)[-1] for name in ("a", "a1", "b"))
    # Ranks that have trained unequal numbers agree on budget and model, and the site counts as much as both trained.
    assert (first["budget"], first["same"]) == (second["budget"], second["same"])
    assert first["budget"] < 0.2
    assert second["dropped"] > first["dropped"]
    assert other["dropped"] == 0
    for fragment in range(2):
        assert federation.trained("a", fragment) == first["trained"] + second["trained"]
        assert federation.trained("b", fragment) == other["trained"]
    assert any(len(record.counted) == 2 for record in federation.records())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_torchrun_of_eight_ranks_sends_as_much_as_a_site_of_one_and_counts_by_its_samples(
    federation: Federation,
) -> None:
    federation.late = "carry"
    federation.start("b", 100_000, STEP)
    with under_torchrun(federation, "a", 8):
        federation.until("both count in five rounds", lambda: len(federation.together()) >= 5, timeout=600.0)
        federation.hub.coordinator.end()
        names = ["a", *(f"a{rank}" for rank in range(1, 8)), "b"]
        federation.until_ended(*names)
    ends = [federation.notes(name)[-1] for name in names]
    # All have applied the same records, and hold the same bits.
    assert len({str(end["applied"]) for end in ends}) == 1
    assert len({end["digest"] for end in ends}) == 1
    for record in federation.records():
        assert not record.left_out
        for own, ranks in ((record.of("a"), 8), (record.of("b"), 1)):
            if own is not None:
                assert (own.weight, len(own.payloads)) == (own.steps * BATCH * ranks, ranks)
    # Eight ranks send the bytes of one, an eighth each; for the last round both send float32.
    for record in federation.together():
        if len({own.exact for own in record.counted}) > 1:
            continue
        first, second = (sum(payload.size for payload in own.payloads) for own in record.counted)
        assert first == pytest.approx(second, rel=0.02)
    *sent, _ = (end["report"]["bytes_sent"] for end in ends)
    assert sent == pytest.approx([sent[0]] * 8, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_site_of_which_a_rank_is_killed_is_started_again_by_torchrun_and_returns(federation: Federation) -> None:
    federation.start("b", 100_000, STEP)
    with under_torchrun(federation, "a", 2) as agent:
        federation.until("both have landed some rounds", lambda: min(map(federation.round, "ab")) >= 2, timeout=400.0)
        # It has a checkpoint of step 25, and has trained on.
        federation.until("a trains on", lambda: federation.notes("a")[-1]["step"] > 45)
        there = federation.round("b")
        os.kill(max(children(agent)), signal.SIGKILL)
        federation.until("the other one goes on", lambda: federation.round("b") >= there + 3)
        federation.until("it counts again", lambda: federation.lives("a") == 2, timeout=400.0)
        federation.hub.coordinator.end()
        federation.until_ended("a", "a1", "b")
    for site in ("a", "a1"):
        steps = [note["step"] for note in federation.notes(site) if "step" in note]
        # It went on from its checkpoint.
        (began,) = [after for before, after in zip(steps, steps[1:], strict=False) if after <= before]
        assert began % 25 == 1
        assert began > 1
    assert len({federation.notes(site)[-1]["digest"] for site in ("a", "a1", "b")}) == 1
    # What the other one noted: its absence, and its return.
    seen = [what for _, what in changes(read_run(federation.folder / "b.records").ranks[0])]
    assert "a counts no longer" in seen
    assert seen.count("a counts") >= 2


def children(process: int) -> list[int]:
    """The processes that one has started."""
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


@contextmanager
def under_torchrun(federation: Federation, site: str, ranks: int) -> Iterator[int]:
    """Starts a site of several ranks by torchrun, whose process this is; it ends them."""
    federation.start(site, ranks, 100_000, STEP, does=train_under_torchrun)
    process = federation.processes[site]
    try:
        yield process.pid
    finally:
        process.terminate()
        process.join(60)


@pytest.mark.large
@pytest.mark.timeout(900)
def test_of_sites_with_sharded_models_one_returns(federation: Federation) -> None:
    ranks = ("a", "a1", "b", "b1")
    for site in "ab":
        federation.start(site, 100_000, STEP, ranks=2, sharded=True)
    last = federation.folder / "b" / "last.ckpt"
    federation.until("a checkpoint is there", lambda: bool(federation.together()) and last.exists(), timeout=400.0)
    charter = federation.hub.coordinator.charter
    for name in ("b", "b1"):
        killed = federation.processes.pop(name)
        killed.kill()
        killed.join()
    federation.start("b", 100_000, STEP, ranks=2, sharded=True)
    federation.until("it counts again", lambda: federation.lives("b") == 2, timeout=400.0)
    federation.hub.coordinator.end()
    federation.until_ended(*ranks)
    assert federation.hub.coordinator.charter == charter
    assert all(len(shards) == 2 for shards in charter.shards)
    ends = [federation.notes(name)[-1] for name in ranks]
    assert len({(end["digest"], str(end["applied"])) for end in ends}) == 1
    assert federation.lives("b") == 2
    sent = [end["report"]["bytes_sent"] for end in ends[:2]]
    assert sent[0] == pytest.approx(sent[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_federation_of_which_everything_was_killed_goes_on(federation: Federation) -> None:
    for site in "ab":
        federation.start(site, STEPS, STEP)
    federation.until("both have landed three rounds", lambda: min(map(federation.round, "ab")) >= 3)
    for site in "ab":
        federation.processes.pop(site).kill()
    known = federation.records()
    federation.hub.close()
    federation.open_hub(f"127.0.0.1:{federation.hub.port}")
    # One of them has lost its disk.
    shutil.rmtree(federation.folder / "b")
    for site in "ab":
        federation.start(site, STEPS, STEP)
    federation.until_ended("a", "b")
    records = federation.records()
    assert records[: len(known)] == known
    assert any(len(record.counted) == 2 for record in records[len(known) :])
