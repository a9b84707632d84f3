"""A month in an hour: three sites and a hub over 5,000 rounds with faults, which leave memory, disk
and latency as they were. ``make soak`` prints the numbers.
"""

import itertools
import json
import stat
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.keys import add_keys
from lightning_sdiloco.federation.wire import HubError
from tests.chaos.checks import Told, examined
from tests.chaos.faults import HUB, Fault
from tests.chaos.play import Play
from tests.chaos.processes import BATCH, RUN
from tests.chaos.world import World
from tests.federation.hubs import require_extra

require_extra()

ROUNDS = 5000
SYNC_EVERY = 6
STEP_SECONDS = 0.02
# Rounds between two measurements, and between two faults of a site; the hub is killed every
# `ROUNDS_OF_HUB` rounds. Site a has no fault, so that its memory is of one process.
ROUNDS_OF_SAMPLE = 25
ROUNDS_OF_FAULT = 50
ROUNDS_OF_HUB = 1000
SITE_FAULTS = [
    Fault("kill", "b", 2.0),
    Fault("stop", "c", 3.0),
    Fault("kill", "c", 1.0),
    Fault("stop", "b", 1.0),
    Fault("lose", "b", 1.0),
    Fault("lose", "c", 2.0),
]
MIB = 1 << 20


@dataclass
class Sample:
    """What is measured after some rounds: bytes, and seconds.

    Attributes:
        hub_memory: Anonymous memory of the hub's process.
        site_memory: That of site a.
        store: Bytes of the blobs at the hub.
        ledger: Bytes of its ledger.
        status_seconds: The median time of a call for the status; None while the hub is away.
        round_seconds: The median time between records of a fragment since the sample before.
    """

    round: int
    hub_memory: int
    site_memory: int
    store: int
    ledger: int
    status_seconds: float | None
    round_seconds: float


class Soak:
    """Lets rounds close, with faults among them, and measures."""

    def __init__(self, world: World) -> None:
        self.play = Play(world)
        self.samples: list[Sample] = []
        self._world = world
        self._measured_at = time.monotonic()
        add_keys(world.folder / "keys", "screen", "reader")
        self._screen = HubClient(
            world.hubs[0], RUN, "screen", world.folder / "keys", role="reader", timeout=2.0
        )

    def run(self, rounds: int) -> None:
        self.play.begin()
        site_faults = itertools.cycle(SITE_FAULTS)
        for round in range(ROUNDS_OF_SAMPLE, rounds + 1, ROUNDS_OF_SAMPLE):
            self._look_until(round)
            self._sample(round)
            if round % ROUNDS_OF_HUB == 0 and round < rounds:
                self._let(Fault("kill", HUB, 1.0))
            elif round % ROUNDS_OF_FAULT == 0 and round < rounds - ROUNDS_OF_FAULT:
                self._let(next(site_faults))
        self.play.until_back()
        self.play.finish()
        self._screen.close()

    def _look_until(self, round: int) -> None:
        """Lets rounds close; `Play` ends it if none does for long."""
        while self.play.seen["a"].round < round:
            self.play.look()

    def _let(self, fault: Fault) -> None:
        if self.play.may(fault):
            self.play.let(fault)

    def _sample(self, round: int) -> None:
        now = time.monotonic()
        folder = self._world.folder
        sample = Sample(
            round,
            self._memory(HUB),
            self._memory("a"),
            sum(_sizes(folder / "hub.store", "**/*")),
            sum(_sizes(folder, "hub.sqlite*")),
            self._status_seconds(),
            (now - self._measured_at) / ROUNDS_OF_SAMPLE,
        )
        self._measured_at = now
        self.samples.append(sample)
        print(json.dumps(asdict(sample)), flush=True)

    def _memory(self, name: str) -> int:
        process = self._world.processes.get(name)
        if process is None:
            return 0
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
        raise AssertionError("Linux names the anonymous memory of every process")

    def _status_seconds(self) -> float | None:
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            try:
                self._screen.call("status")
            except HubError:
                return None
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


def _sizes(folder: Path, pattern: str) -> Iterator[int]:
    """Yields the sizes of files, of which the hub may drop some meanwhile."""
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):
            status = file.stat()
            if stat.S_ISREG(status.st_mode):
                yield status.st_size


def fifths(
    samples: Sequence[Sample], value: Callable[[Sample], float | None]
) -> tuple[float, float]:
    """Returns the medians of the second fifth, when all has begun, and of the last one."""
    size = len(samples) // 5
    medians = []
    for part in (samples[size : 2 * size], samples[-size:]):
        values = [number for number in map(value, part) if number]
        medians.append(statistics.median(values))
    return medians[0], medians[1]


def require_flat(samples: Sequence[Sample]) -> None:
    """Memory, disk and latency are at the end what they were after the first fifth."""
    hub_memory = fifths(samples, lambda sample: sample.hub_memory)
    site_memory = fifths(samples, lambda sample: sample.site_memory)
    store = fifths(samples, lambda sample: sample.store)
    ledger = fifths(samples, lambda sample: sample.ledger / sample.round)
    status = fifths(samples, lambda sample: sample.status_seconds)
    rounds = fifths(samples, lambda sample: sample.round_seconds)
    print(f"{hub_memory=}, {site_memory=}, {store=}, {ledger=}, {status=}, {rounds=}")
    assert hub_memory[1] < 1.1 * hub_memory[0] + 8 * MIB
    assert site_memory[1] < 1.1 * site_memory[0] + 8 * MIB
    assert store[1] < 1.2 * store[0]
    # The ledger keeps every record: it grows by the same number of bytes for each.
    assert ledger[1] < 1.1 * ledger[0]
    assert status[1] < 2 * status[0] + 0.01
    assert rounds[1] < 1.5 * rounds[0]


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_five_thousand_rounds_with_faults_leave_memory_disk_and_latency_flat(
    tmp_path: Path,
) -> None:
    with World(tmp_path, "abc", STEP_SECONDS) as world:
        for name, place in world.places.items():
            world.places[name] = replace(place, sync_every=SYNC_EVERY)
        soak = Soak(world)
        soak.run(ROUNDS)
    run_notes = Told.of(tmp_path, "abc")
    (tmp_path / "samples.json").write_text(json.dumps(list(map(asdict, soak.samples))))
    assert examined(run_notes, BATCH)["problems"] == []
    models = {end["outer"] for end in run_notes.ends()}
    assert len(models) == 1
    require_flat(soak.samples)
