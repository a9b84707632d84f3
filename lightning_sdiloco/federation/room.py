"""Manages a hub's storage space by deciding which blobs the store keeps and when to request a
snapshot that frees space.

The coordinator owns the `Room` of its run and holds its lock during every call except `back_up`.
"""

import logging
import math
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.codec import RoundNumber
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import Contribution, Record
from lightning_sdiloco.federation.run_config import RETENTION, SNAPSHOT_EVERY
from lightning_sdiloco.federation.state_requests import States
from lightning_sdiloco.federation.store import (
    BlobStore,
    InMemoryStore,
    SQLiteLedger,
    sync_folder,
)
from lightning_sdiloco.federation.unnamed import UnnamedBlobs
from lightning_sdiloco.federation.wire import Missing, NoSpace

log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds after which a snapshot is requested again
_TIDY_EVERY = 60.0
_LACKING = 60.0  # seconds for which the status reports a full disk after it has refused a blob
# The minimum number of rounds that close while a snapshot is sent and then verified by the next
# record.
_VERIFYING = 2


class RecordIndex:
    """An index of the records in the journal by fragment and round, with the payloads that they
    name.

    Args:
        base: For each fragment, the round before the first record.
    """

    def __init__(self, base: Sequence[int]) -> None:
        self._base = base
        # By fragment: the positions of its records in the journal, in order.
        self._numbers = [array("q") for _ in base]
        # By fragment: the last rounds, and the keys of their payloads.
        self._payloads: list[deque[tuple[int, tuple[str, ...]]]] = [deque() for _ in base]

    def add(self, record: Record) -> Record:
        self._numbers[record.fragment].append(record.seq)
        keys = tuple(payload.key for payloads in record.sources for payload in payloads)
        self._payloads[record.fragment].append((record.round, keys))
        return record

    @property
    def records(self) -> int:
        return sum(map(len, self._numbers))

    def next_number(self, fragment: int, round: RoundNumber) -> int | None:
        """Returns the number of the first record after a round, or None if there is no such
        record.
        """
        position = max(0, round - self._base[fragment])
        numbers = self._numbers[fragment]
        return numbers[position] if position < len(numbers) else None

    def rounds_before(self, number: int) -> list[int]:
        """Returns the last round of each fragment among the records before the given number."""
        rounds = []
        for base, numbers in zip(self._base, self._numbers, strict=True):
            rounds.append(base + sum(earlier < number for earlier in numbers))
        return rounds

    def keys_from(self, rounds: Sequence[int]) -> set[str]:
        """Returns the keys of all payloads since the given rounds and discards the keys of earlier
        rounds.
        """
        kept_keys = set[str]()
        for payloads, first in zip(self._payloads, rounds, strict=True):
            while payloads and payloads[0][0] < first:
                payloads.popleft()
            for _, keys in payloads:
                kept_keys.update(keys)
        return kept_keys


class Room:
    """The rules that determine which blobs a run's store keeps.

    Args:
        lock: The coordinator's lock. `back_up` holds the lock only while it lists what to copy.
        is_new: True if the run has not been founded yet. A restarted hub does not know the senders
            of existing blobs, so it waits for one interval before tidying the store.

    Attributes:
        unnamed: The blobs that no message has named yet.
    """

    def __init__(
        self,
        journal: SQLiteLedger,
        store: BlobStore | InMemoryStore,
        states: States,
        clock: Callable[[], float],
        lock: "threading.RLock",
        is_new: bool,
    ) -> None:
        self._journal = journal
        self._store = store
        self._states = states
        self._clock = clock
        self._lock = lock
        self.unnamed = UnnamedBlobs()
        # The ledger and the records of the run; None until the run is founded.
        self._ledger: Ledger | None = None
        self._index = RecordIndex([])
        # The time at which the store is tidied next, or the number of records, if that is reached
        # first.
        self._tidy_at = clock() + _TIDY_EVERY
        self._tidy_after = 0 if is_new else math.inf
        # The earliest time to request the next snapshot, the last round at the previous request,
        # and how many rounds closed until the previous snapshot was verified.
        self._snapshot_at = clock()
        self._snapshot_asked_at: int | None = None
        self._rounds_until_verified = _VERIFYING
        # The reason why the store refused a blob, and the time until which the status reports it.
        self._refusal = ""
        self._refused_until = -math.inf
        self._backing_up = set[str]()
        self._copying = threading.Lock()

    def follow(self, ledger: Ledger, index: RecordIndex) -> None:
        """Uses a new ledger after the run has been founded, restarted or rolled back."""
        self._ledger = ledger
        self._index = index

    @property
    def _founded(self) -> Ledger:
        if self._ledger is None:
            raise Refused("the run has not been founded yet")
        return self._ledger

    # Blobs to keep

    def keep_unnamed(self, key: str, sender: Peer) -> None:
        """Keeps a blob that may still be named by a message."""
        lease = self._ledger.terms.lease if self._ledger else _TIDY_EVERY
        self.unnamed.add(key, sender, self._clock(), lease)

    def needed(self) -> set[str]:
        """Returns the keys of all blobs that are still needed."""
        ledger = self._founded
        needed = self._index.keys_from(ledger.fetched_from(self._clock()))
        needed |= self._states.keys(ledger)
        for text in self._journal.notes("open/").values():
            needed.update(payload.key for payload in Contribution.from_bytes(text).payloads)
        needed.update(text.decode() for text in self._journal.notes("residual/").values())
        return needed

    def tidy(self) -> None:
        """Drops unneeded blobs at regular intervals, which are shorter if rounds close quickly."""
        ledger = self._founded
        now = self._clock()
        if now < self._tidy_at and ledger.seq < self._tidy_after:
            return
        self._tidy_at = now + _TIDY_EVERY
        # A hub that averages needs no payload after its round.
        rounds = RETENTION if ledger.terms.hub_mean is None else 1
        self._tidy_after = ledger.seq + rounds * ledger.terms.fragments
        self._store.retain(self.needed() | self.unnamed.keys(now) | self._backing_up)

    def drop(self, key: str) -> None:
        """Immediately drops a large blob that is no longer needed."""
        if key not in self._backing_up:
            self._store.drop(key)

    def back_up(self, folder: Path) -> int:
        """Copies the ledger and blobs into a folder from which a hub can be started. Returns the
        number of records in the copy.

        The copy reflects the run at a single point in time, and the run continues during copying.
        An incomplete copy never replaces an earlier one.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy = BlobStore(folder / "hub.store")
        ledger = folder / "hub.sqlite"
        assert isinstance(self._store, BlobStore), "an in-memory store has no backup"
        with self._copying:
            with self._lock:
                records = self._founded.seq
                keys = self.needed()
                self._backing_up = keys
                self._journal.back_up(folder / "next.sqlite")
            try:
                for key in keys:
                    try:
                        copy.size(key)
                    except Missing:
                        copy.copy(self._store, key)
            finally:
                self._backing_up = set()
            (folder / "next.sqlite").replace(ledger)
            sync_folder(folder)
            copy.retain(keys)
        log.info("a copy of the run is in %s, with %d records", folder, records)
        return records

    # A full disk

    def refuse(self, error: NoSpace) -> None:
        """Stores the error for a blob that was rejected because of a lack of space."""
        self._refused_until = self._clock() + _LACKING
        self._refusal = str(error)

    def note_stored(self) -> None:
        """Clears the error from an earlier lack of space after a blob has been stored."""
        self._refused_until = self._clock()

    @property
    def trouble(self) -> str | None:
        """The error from a recent lack of space, or None once the store is known to have space
        again.
        """
        return self._refusal if self._clock() < self._refused_until else None

    # Snapshots make space

    def ask_for_snapshot(self) -> None:
        """Requests a site's state if a snapshot is due."""
        ledger = self._founded
        now = self._clock()
        if now < self._snapshot_at or not self._wants_snapshot(ledger):
            return
        self._snapshot_at = now + _AGAIN
        donor = ledger.source("", now)
        if isinstance(donor, str) and not self._states.awaits_snapshot:
            if self._snapshot_asked_at is None:
                self._snapshot_asked_at = _newest_round(ledger)
            self._states.ask_donor(donor, for_snapshot=True)

    def _wants_snapshot(self, ledger: Ledger) -> bool:
        """Returns whether a snapshot is due. A snapshot is due after a set number of rounds, or
        earlier if the space for payloads is running out.
        """
        rounds = [position.round for position in ledger.closed]
        if not ledger.snapshots.is_due(rounds, RETENTION):
            return False
        if ledger.snapshots.is_due(rounds):
            return True
        free = self._store.free
        return free is not None and free < self.still_needs

    def drop_snapshots(self) -> None:
        """Drops the snapshots that a verified snapshot replaces. The payloads from before the
        verified snapshot are freed soon afterwards.
        """
        ledger = self._founded
        if not self._states.drop_all_but(ledger.snapshots.headers):
            return
        self._tidy_at = self._clock()
        if self._snapshot_asked_at is not None:
            rounds = _newest_round(ledger) - self._snapshot_asked_at
            self._rounds_until_verified = max(_VERIFYING, rounds)
            self._snapshot_asked_at = None

    @property
    def still_needs(self) -> int:
        """The number of additional bytes that the store needs for payloads and a state before a
        snapshot frees space.
        """
        ledger = self._founded
        nbytes = self._states.snapshot_bytes
        most_rounds = SNAPSHOT_EVERY + self._rounds_until_verified
        for fragment, history in enumerate(ledger.history):
            if history:
                held = ledger.closed[fragment].round - ledger.kept_from[fragment] + 1
                nbytes += max(0, most_rounds - held) * _payload_bytes(history[-1])
        return nbytes


def _newest_round(ledger: Ledger) -> int:
    return max(position.round for position in ledger.closed)


def _payload_bytes(record: Record) -> int:
    return sum(payload.size for payloads in record.sources for payload in payloads)
