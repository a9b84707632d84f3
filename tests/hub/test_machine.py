"""What the hub's machine does to it: a full disk, a clock that is set, a damaged ledger, and memory that ends."""

import ast
import gc
import json
import os
import tracemalloc
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from lightning_sdiloco.federation import (
    Beat,
    Contribution,
    Coordinator,
    Event,
    Hello,
    HubService,
    LedgerError,
    Payload,
    Position,
    SQLiteLedger,
    StateHeader,
)
from lightning_sdiloco.federation.journal import History
from lightning_sdiloco.federation.memory import InMemoryStore
from lightning_sdiloco.federation.wire import CHUNK
from tests.hub.hubs import RUN, TERMS, World, charter, put, require_agreement, serving
from tests.small_disk import fill, small_disk
from tests.test_rules import nodes_of, of_rooms

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    with small_disk(tmp_path / "disk", 4) as folder:
        yield folder


def test_a_full_disk_is_told_nothing_is_lost_and_the_run_goes_on_with_room(
    disk: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(disk, keys)
    world.start(sites=2)
    world.join("a", "b")
    world.rounds(2)
    filler = fill(disk)
    said = lambda: any("no space left" in told for site in world.sites.values() for told in site.told)  # noqa: E731
    world.run(said)
    assert "no space left" in caplog.text
    # It answers, and what it told before is there.
    records = world.ask("viewer", "status")["records"]
    assert records >= 4
    filler.unlink()
    world.more(2)
    require_agreement(world.sites.values())
    world.service.close()
    status = world.start().status()
    assert status["records"] > records
    assert [own["round"] for own in status["fragments"]] >= [4, 4]
    world.close()


def test_nothing_that_decides_knows_the_clock_that_can_be_set() -> None:
    # Certificates are valid from one date to another; all else goes by clocks that nobody sets.
    walls = {"time.time", "time.time_ns", "time.localtime", "datetime.datetime.now", "datetime.now", "datetime.utcnow"}
    users = {
        module
        for module in of_rooms("comm", "federation")
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in walls
    }
    assert users == {"lightning_sdiloco.federation.keys"}


def test_a_hub_does_not_start_with_half_a_ledger(tmp_path: Path, keys: Path) -> None:
    world = World(tmp_path, keys)
    world.start(sites=1)
    world.join("a")
    world.rounds(2)
    world.close()
    path = tmp_path / "hub.sqlite"
    whole = path.read_bytes()
    for left in (0, 4096, len(whole) - 4096):
        path.write_bytes(whole[:left])
        with pytest.raises(LedgerError, match="cannot be used"):
            HubService(RUN, path, keys=keys)
    path.write_bytes(whole)
    assert HubService(RUN, path, keys=keys).status()["records"] >= 4


# Memory


def peak_of_the_process() -> int:
    """Bytes that this process has had at most since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_the_memory_of_a_hub_is_bounded_by_chunks_and_connections(tmp_path: Path, keys: Path) -> None:
    size, channels = 48 << 20, 4
    blob = bytearray(os.urandom(1 << 20)) * (size >> 20)
    with serving(tmp_path, keys) as served:
        site = served.mailbox("a", channels=channels)
        # The first one makes threads and connections.
        put(site, os.urandom(4 << 20))
        peak_of_the_process()
        before = peak_of_the_process()
        key = put(site, blob)
        after = peak_of_the_process()
    # Of each connection at most a window and some chunks are in memory, at both ends, which are in this process here.
    bound = 2 * channels * (8 * CHUNK + (1 << 20))
    assert bound < size / 1.9
    assert after - before < bound, f"{(after - before) >> 20} MiB for {size >> 20} MiB"
    assert (tmp_path / "store" / "blobs" / key).stat().st_size == size


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_payload_of_a_gigabyte_takes_little_memory_and_the_next_one_none(tmp_path: Path, keys: Path) -> None:
    size = 1 << 30
    blob = bytearray(os.urandom(1 << 20)) * (size >> 20)
    with serving(tmp_path, keys) as served:
        served.store.max_blob = size
        site = served.mailbox("a", channels=4, max_blob=size)
        put(site, os.urandom(4 << 20))
        peak_of_the_process()
        peaks = [peak_of_the_process()]
        for number in range(2):
            blob[0] = number
            put(site, blob)
            peaks.append(peak_of_the_process())
    # Of both ends, which are in this process.
    assert peaks[1] - peaks[0] < size / 12
    assert peaks[2] - peaks[1] < size / 60


class Rounds:
    """A coordinator whose two sites contribute without end, in virtual time."""

    def __init__(self, folder: Path) -> None:
        self.time, self.round = 0.0, 0
        self.journal = SQLiteLedger(folder / "hub.sqlite")
        # What is not on the disk when the power fails is of no interest here.
        self.journal._database.execute("pragma synchronous = off").fetchall()
        self.store = InMemoryStore()
        self.hub = Coordinator(RUN, History(self.journal, self.store), 1, lambda: self.time)
        self.charter = charter()
        self.wanted: list[tuple[str, str]] = []
        self.hub.start(self.tell, lambda: None)
        start = tuple(Position(0, self.charter.key) for _ in range(TERMS.fragments))
        self.hellos = [Hello(RUN, site, life * 16, self.charter.key, start) for site, life in (("a", "a"), ("b", "b"))]
        list(self.hub.hello(self.hellos[0], lambda: self.charter))
        self.give(start)
        list(self.hub.hello(self.hellos[1], lambda: self.charter))

    def tell(self, event: Event, to: Collection[str] | None = None) -> None:
        if event.kind == "wanted" and to:
            self.wanted.append((next(iter(to)), json.loads(event.body)["request"]))

    def give(self, applied: Sequence[Position]) -> None:
        """Gives the states that are wanted, for the founding and as anchors."""
        for site, request in self.wanted:
            part = Payload(self.store.put(b"state"), 5)
            self.hub.give(site, request, StateHeader(tuple(applied), (1, 1)), [part])
        self.wanted.clear()

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round, self.time = self.round + 1, self.time + 1.0
            for hello in self.hellos:
                applied = tuple(at.round for at in self.hub.ledger.closed)
                self.hub.beat(Beat(hello.site, hello.life, True, applied))
            for fragment in range(TERMS.fragments):
                before = self.hub.ledger.closed[fragment].key
                for hello in self.hellos:
                    blob = b"%s %d %d" % (hello.site.encode(), fragment, self.round)
                    payload = Payload(self.store.put(blob), len(blob))
                    own = Contribution(fragment, self.round, hello.site, hello.life, before, 4, 1, (payload,))
                    self.hub.contribute(own, hello.life)
                self.hub.tick()
            self.give(self.hub.ledger.closed)


def test_the_memory_of_a_hub_does_not_grow_with_the_run(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    rounds.play(30)
    tracemalloc.start()
    rounds.play(120)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    blobs = len(rounds.store._blobs)
    rounds.play(120)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert rounds.hub.ledger.closed[0].round == 270
    assert len(rounds.store._blobs) < blobs + 200
    # Of every record a number is kept. A contribution or a record that stayed would be a kilobyte.
    assert after - before < 120 * TERMS.fragments * 250
