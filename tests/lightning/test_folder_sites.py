"""Sites as real processes with the Trainer that meet in a folder: the one that keeps the run is killed."""

import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.comm import shared_files
from lightning_sdiloco.comm.mailbox.pulse import Pulse, PulseWatch
from lightning_sdiloco.federation import Record
from tests.hub.folders import all_records
from tests.lightning.federated_site import Place, train
from tests.s3 import s3_at
from tests.small_disk import fill, small_disk

SITES = ("a", "b", "c")
STEP = 0.02
STEPS = 400


class Sites:
    """Processes of sites, and what they have written down."""

    def __init__(
        self, folder: Path, meeting: str, lease: float = 2.0, steps: int = STEPS, method: str = "forkserver"
    ) -> None:
        self.folder, self.meeting, self.lease, self.steps = folder, meeting, lease, steps
        self.processes: dict[str, Any] = {}
        self.context: Any = multiprocessing.get_context(method)
        self.context.set_forkserver_preload(["tests.lightning.federated_site"])

    def start(self, site: str, ranks: int = 1, of: int = len(SITES)) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        for rank in range(ranks):
            about = {"rank": rank, "ranks": ranks, "sites": of, "lease": self.lease}
            place = Place(site, self.meeting, self.folder, self.folder, port, **about)
            self.processes[place.name] = self.context.Process(target=train, args=(place, self.steps, STEP))
            self.processes[place.name].start()

    def notes(self, site: str) -> list[dict[str, Any]]:
        path = self.folder / f"{site}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def round(self, site: str) -> int:
        stepped = [note for note in self.notes(site) if "rounds" in note]
        return min(stepped[-1]["rounds"]) if stepped else 0

    def keeper(self) -> Pulse:
        pulse = PulseWatch(shared_files(self.meeting), time.monotonic).look()
        assert pulse is not None
        return pulse

    def records(self) -> list[Record]:
        return [Record.from_bytes(text) for text in all_records(shared_files(self.meeting))]

    def until(self, what: str, holds: Callable[[], bool], timeout: float = 240.0) -> None:
        deadline = time.monotonic() + timeout
        while not holds():
            dead = [site for site, process in self.processes.items() if process.exitcode]
            told = {site: (self.folder / f"{site}.log").read_text()[-3000:] for site in dead}
            assert not dead, f"{what}: {told}"
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def has_ended(self, site: str) -> bool:
        return bool(notes := self.notes(site)) and "ended" in notes[-1]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@pytest.fixture
def sites(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sites]:
    if getattr(request, "param", "folder") == "s3":
        with s3_at(tmp_path) as server:
            # Processes that are spawned know where the server is. Every look is a request to it.
            made = Sites(tmp_path, server.bucket(), 6.0, 5 * STEPS, "spawn")
            yield made
            made.close()
        return
    (tmp_path / "meeting").mkdir()
    made = Sites(tmp_path, (tmp_path / "meeting").as_uri())
    yield made
    made.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sites", ["folder", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])], indirect=True
)
def test_the_keeper_is_killed_the_others_go_on_at_their_pace_and_it_returns(sites: Sites) -> None:
    for site in SITES:
        sites.start(site)
    sites.until("all have landed two rounds", lambda: min(map(sites.round, SITES)) >= 2)
    first = sites.keeper()
    known = sites.records()
    sites.processes.pop(first.name).kill()
    killed = time.monotonic()
    others = [site for site in SITES if site != first.name]
    there = sites.round(others[0])
    sites.until("the others have landed three more", lambda: min(map(sites.round, others)) >= there + 3)
    second = sites.keeper()
    assert second.turn > first.turn
    assert second.name in others
    sites.start(first.name)
    sites.until("all have ended", lambda: all(map(sites.has_ended, SITES)))
    for site in others:
        stepped = [note for note in sites.notes(site) if "took" in note]
        after = [note["stalled"] for note in stepped if killed < note["at"] < killed + 10]
        one_step = statistics.median(note["took"] for note in stepped)
        assert max(after) < 0.25 + one_step, (sorted(after)[-5:], one_step)
    records = sites.records()
    assert records[: len(known)] == known
    # It counts again after its return, and nothing of it twice.
    own = [one for record in records if (one := record.of(first.name))]
    assert len({one.life for one in own}) == 2
    assert len({(one.life, one.fragment, one.round) for one in own}) == len(own)
    # All have ended with the same outer parameters, as far as they have the same rounds.
    for one, other in combinations([sites.notes(site)[-1] for site in SITES], 2):
        assert one["applied"] != other["applied"] or one["outer"] == other["outer"]
        assert one["outer"].keys() == other["outer"].keys() != set()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_site_of_two_ranks_meets_one_of_one_rank_in_a_folder(sites: Sites) -> None:
    sites.steps = 120
    sites.start("a", ranks=2, of=2)
    sites.start("b", of=2)
    sites.until("all have ended", lambda: all(map(sites.has_ended, ("a", "a1", "b"))))
    assert any(len(record.counted) == 2 for record in sites.records())
    reports = [sites.notes(site)[-1]["report"] for site in ("a", "a1")]
    assert reports[0]["bytes_sent"] == pytest.approx(reports[1]["bytes_sent"], rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_folder_without_room_closes_no_round_all_train_on_and_the_run_goes_on_with_room(tmp_path: Path) -> None:
    pair = SITES[:2]
    with small_disk(tmp_path / "meeting", 16) as disk:
        sites = Sites(tmp_path, disk.as_uri())
        try:
            for site in pair:
                sites.start(site, of=2)
            sites.until("both have landed two rounds", lambda: min(map(sites.round, pair)) >= 2)
            known = sites.records()
            filler = fill(disk)
            full = time.monotonic()
            steps = {site: sites.notes(site)[-1]["step"] for site in pair}
            # For longer than a lease.
            sites.until("both train on", lambda: all(sites.notes(s)[-1]["step"] > steps[s] + 200 for s in pair))
            said = f"no space left in {disk}"
            assert any(said in (tmp_path / f"{site}.log").read_text() for site in pair)
            with pytest.raises(ValueError, match=f"{said}.*Make room there"):
                shared_files(disk.as_uri())
            stalls = [note["stalled"] for site in pair for note in sites.notes(site) if note.get("at", 0) > full]
            filler.unlink()
            there = min(map(sites.round, pair))
            sites.until("rounds land again", lambda: min(map(sites.round, pair)) >= there + 3)
            sites.until("both have ended", lambda: all(map(sites.has_ended, pair)))
            records = sites.records()
        finally:
            sites.close()
    assert records[: len(known)] == known
    assert max(stalls) < 0.25 + STEP
    assert any(len(record.counted) == 2 for record in records[len(known) :])
    one, other = (sites.notes(site)[-1] for site in pair)
    assert one["applied"] != other["applied"] or one["digest"] == other["digest"]
