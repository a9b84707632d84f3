"""A disk in memory that fills, fails, and loses what was not synced, with a hub's journal and store.

A process that writes may die at every point of a write. Then names that were not synced are gone,
and contents that were not synced are torn: of the right length, and half of it zeros.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.store import LedgerError
from lightning_sdiloco.federation.wire import Altered, Missing, NoSpace
from tests.federation.scripted import known_key

ROOM = 1 << 40
Notes = Mapping[str, Bytes | None]


class Crash(Exception):
    """The process dies here."""


class SimulatedDisk:
    """The files that survive a process.

    Attributes:
        crash_after: How many more points of writes the process survives; None: all.
        owner: The journal that has the ledger open.
    """

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.notes: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.unsynced_names: set[str] = set()
        self.unsynced_contents: set[str] = set()
        self.is_full = False
        self.is_failing = False
        self.crash_after: int | None = None
        self.owner: SimulatedJournal | None = None

    def lock(self, owner: "SimulatedJournal") -> None:
        if self.owner is not None:
            raise LedgerError("another process has the ledger open")
        self.owner = owner

    def require_room(self) -> None:
        if self.is_full:
            raise NoSpace("there is no space left: nothing was written.")
        if self.is_failing:
            raise LedgerError("The disk reports an error: nothing was written.")

    def reach_point(self) -> None:
        """Comes to a point between two parts of a write, where the process may die."""
        if self.crash_after is None:
            return
        self.crash_after -= 1
        if self.crash_after < 0:
            self.crash_after = None
            raise Crash

    def lose_unsynced(self) -> None:
        """Does to the disk what the death of its machine does."""
        self.owner = None
        self.crash_after = None
        for key in self.unsynced_contents & self.blobs.keys():
            half = len(self.blobs[key]) // 2
            self.blobs[key] = self.blobs[key][:half] + bytes(len(self.blobs[key]) - half)
        for key in self.unsynced_names:
            self.blobs.pop(key, None)
        self.unsynced_names.clear()
        self.unsynced_contents.clear()


class SimulatedJournal:
    """Keeps the promises of `SQLiteLedger` on such a disk: one process has it, and a write is whole or
    not there.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.last = len(disk.records) - 1
        self.on_record: Callable[[bytes], None] = lambda record: None
        disk.lock(self)

    def append(self, seq: int, record: Bytes, notes: Notes | None = None) -> None:
        if seq != self.last + 1:
            raise Refused(
                f"record {seq} is not the next one in a ledger of {self.last + 1} records."
            )
        self._require_new(seq)
        self._begin()
        self.disk.records[seq] = bytes(record)
        self._change(notes or {})
        self.last = seq
        self.on_record(bytes(record))
        self.disk.reach_point()

    def _require_new(self, seq: int) -> None:
        if seq in self.disk.records:
            raise LedgerError(f"record {seq} is there already")

    def note(self, notes: Notes) -> None:
        self._begin()
        self._change(notes)
        self.disk.reach_point()

    def cut(self, count: int, notes: Notes) -> None:
        self._begin()
        for seq in [seq for seq in self.disk.records if seq >= count]:
            del self.disk.records[seq]
        self._change(notes)
        self.last = count - 1
        self.disk.reach_point()

    def _begin(self) -> None:
        self.disk.require_room()
        self.disk.reach_point()

    def _change(self, notes: Notes) -> None:
        for name, value in notes.items():
            if value is None:
                self.disk.notes.pop(name, None)
            else:
                self.disk.notes[name] = bytes(value)

    def read(self, after: int = -1) -> Iterator[tuple[int, bytes]]:
        while after + 1 in self.disk.records:
            after += 1
            yield after, self.disk.records[after]

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        notes = self.disk.notes
        return {name: notes[name] for name in sorted(notes) if name.startswith(prefix)}


class SimulatedStore:
    """Keeps the promises of `BlobStore` on such a disk: a blob is whole and durable before anybody sees
    it.
    """

    def __init__(
        self, disk: SimulatedDisk, clock: Callable[[], float], age: float | None = None
    ) -> None:
        self.disk = disk
        self._clock = clock
        self._age = age
        self._stored: dict[str, float] = {}

    @property
    def free(self) -> int:
        return 0 if self.disk.is_full else ROOM

    def put(self, blob: Bytes, announced: str | None = None) -> str:
        """Stores a blob, unless its bytes are not those that were announced."""
        key = announced or known_key(blob)
        self._stored[key] = self._clock()
        if key in self.disk.blobs:
            return key
        self.disk.require_room()
        self.disk.reach_point()
        self._require_announced(key, blob)
        self.disk.unsynced_contents.add(key)
        self._sync_content(key)
        self.disk.blobs[key] = bytes(blob)
        self.disk.unsynced_names.add(key)
        self.disk.reach_point()
        self._sync_name(key)
        self.disk.reach_point()
        return key

    def _require_announced(self, key: str, blob: Bytes) -> None:
        if known_key(blob) != key:
            raise Refused(f"the received bytes do not match the announced key {key}.")

    def _sync_content(self, key: str) -> None:
        self.disk.unsynced_contents.discard(key)

    def _sync_name(self, key: str) -> None:
        self.disk.unsynced_names.discard(key)

    def get(self, key: str) -> bytes:
        blob = self.read(key)
        if known_key(blob) != key:
            raise Altered(f"the disk holds other bytes than those of {key}.")
        return blob

    def verify(self, key: str) -> None:
        self.get(key)

    def read(self, key: str) -> bytes:
        """Returns a blob as it is on the disk."""
        if key not in self.disk.blobs:
            raise Missing(f"blob {key} does not exist.")
        return self.disk.blobs[key]

    def size(self, key: str) -> int:
        return len(self.read(key))

    def retain(self, keys: Collection[str], age: Any = None) -> int:
        """Drops all blobs but the named ones, and those that are younger than the store's age:
        without one, none is dropped.
        """
        if self._age is None:
            return 0
        oldest = self._clock() - self._age
        unused = []
        for key in self.disk.blobs:
            if key not in keys and self._stored.get(key, oldest) <= oldest:
                unused.append(key)
        for key in unused:
            self.drop(key)
        return len(unused)

    def drop(self, key: str) -> None:
        self.disk.blobs.pop(key, None)
