"""What a hub must not forget: charter, records, open contributions, anchors, and the words of its operator.

[Note: what lies where] Records and notes lie in a journal, which takes several of them at once or none. Payloads and
states are blobs in a store. A blob is durable before a record or a note names it, and is dropped when none does.
"""

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lightning_sdiloco.comm import EVERYTHING, Missing
from lightning_sdiloco.errors import AgreementError, Refused
from lightning_sdiloco.federation import (
    Charter,
    Contribution,
    Ledger,
    Payload,
    Position,
    Record,
    StateHeader,
    quorum_of,
)
from lightning_sdiloco.hub.events import anchor_of, anchor_text
from lightning_sdiloco.hub.quorums import Quorums

Bytes = bytes | bytearray | memoryview


class Journal(Protocol):
    """Where records and notes are kept, such as `SQLiteLedger`."""

    def append(self, seq: int, record: Bytes, notes: Mapping[str, Bytes | None] | None = None) -> bool:
        """Gives a number to a record, and notes what changes with it; tells whether the number was free."""

    def read(self, after: int = EVERYTHING) -> Iterator[tuple[int, bytes]]:
        """Yields the records after a number, with theirs."""

    def note(self, notes: Mapping[str, Bytes | None]) -> None:
        """Notes values under names, all of them or none; None deletes."""

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        """Returns the notes whose names begin with a prefix, in the order of their names."""

    def cut(self, count: int, notes: Mapping[str, Bytes | None]) -> None:
        """Drops all but the first records, and notes what changes with it."""


class Store(Protocol):
    """Where blobs are kept, such as `BlobStore`."""

    def get(self, key: str) -> bytes:
        """Returns a blob, verified."""

    def size(self, key: str) -> int:
        """Returns the size of a blob; raises `Missing` if it is not there."""

    def retain(self, keys: Collection[str], age: float = ...) -> int:
        """Drops all blobs but those named, and those that came lately."""


class History:
    """Reads and writes what is durable; see [Note: what lies where]."""

    def __init__(self, journal: Journal, store: Store, quorums: Callable[[str], type[Any]] | None = None) -> None:
        self.journal, self.store, self.quorums = journal, store, quorums or Quorums()
        text = journal.notes("charter").get("charter")
        self.charter = Charter.from_bytes(text) if text else None
        self.anchors = [anchor_of(text) for text in journal.notes("anchor/").values()]
        self._numbers: list[array[int]] = []
        self._named: list[deque[tuple[int, tuple[str, ...]]]] = []

    def ledger(self, now: float) -> Ledger:
        """Returns the ledger as it is durable, of a run that has been founded."""
        assert self.charter is not None, "the run has been founded"
        terms = self.charter.terms
        self._numbers = [array("q") for _ in range(terms.fragments)]
        self._named = [deque() for _ in range(terms.fragments)]
        ledger = Ledger(
            terms,
            self.charter.key,
            now,
            self._records(),
            (Contribution.from_bytes(text) for text in self.journal.notes("open/").values()),
            [header for header, _ in self.anchors],
            quorum=quorum_of(terms.quorum, self.quorums),
            evicted=[(name.split("/")[1], name.split("/")[2]) for name in self.journal.notes("evicted/")],
        )
        if self.journal.notes("ending"):
            ledger.end()
        return ledger

    def _records(self) -> Iterator[Record]:
        for _, text in self.journal.read():
            record = Record.from_bytes(text)
            self._index(record)
            yield record

    def _index(self, record: Record) -> None:
        self._numbers[record.fragment].append(record.seq)
        keys = tuple(payload.key for own in record.counted for payload in own.payloads)
        self._named[record.fragment].append((record.round, keys))

    def holds(self, parts: Sequence[Payload]) -> bool:
        """Tells whether blobs are in the store, each with the size that is said."""
        try:
            return all(self.store.size(part.key) == part.size for part in parts)
        except Missing:
            return False

    # What happens

    def found(self, charter: Charter, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Writes the charter and the state at round 0: from then on there is a run."""
        self.journal.note({"charter": charter.to_bytes(), "anchor/000000": anchor_text(header, parts)})
        self.charter, self.anchors = charter, [(header, tuple(parts))]

    def take(self, own: Contribution) -> None:
        """Writes a contribution whose payloads are in the store."""
        self.journal.note({f"open/{own.fragment:06d}/{own.site}": own.to_bytes()})

    def append(self, record: Record) -> None:
        """Writes a record; what was contributed to its round is no longer open."""
        gone = dict.fromkeys(self.journal.notes(f"open/{record.fragment:06d}/"))
        if not self.journal.append(record.seq, record.to_bytes(), gone):
            raise AgreementError(
                f"Record {record.seq} was written by somebody else: two hubs serve this run from one ledger. End one."
            )
        self._index(record)

    def evict(self, site: str, life: str | None) -> None:
        """Writes that a life was thrown out, and forgets what it contributed to open rounds."""
        gone = dict.fromkeys(name for name in self.journal.notes("open/") if name.endswith(f"/{site}"))
        self.journal.note({**gone, **({f"evicted/{site}/{life}": b""} if life else {})})

    def end(self) -> None:
        """Writes that an operator has ended the run."""
        self.journal.note({"ending": b"1"})

    def anchor(self, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Writes a state that is in the store."""
        last = max(self.journal.notes("anchor/"), default="anchor/000000")
        self.journal.note({f"anchor/{int(last[7:]) + 1:06d}": anchor_text(header, parts)})
        self.anchors.append((header, tuple(parts)))

    def keep_anchors(self, headers: Sequence[StateHeader]) -> None:
        """Drops the states that are not needed any more."""
        if len(headers) != len(self.anchors):
            names = self.journal.notes("anchor/")
            self.journal.note({name: None for name, text in names.items() if anchor_of(text)[0] not in headers})
            self.anchors = [anchor for anchor in self.anchors if anchor[0] in headers]

    def roll_back(self, round: int) -> int:
        """Drops the first record of a later round and all that were written after it."""
        last = sum(map(len, self._numbers))
        count = min((own[round] for own in self._numbers if len(own) > round), default=last)
        rounds = [sum(number < count for number in own) for own in self._numbers]
        kept = {
            name
            for name, text in self.journal.notes("anchor/").items()
            if all(at.round <= rounds[p] for p, at in enumerate(anchor_of(text)[0].applied))
        }
        if not kept:
            oldest = max(position.round for position in self.anchors[0][0].applied) if self.anchors else 0
            raise Refused(
                f"round={round} is too far back: the oldest state that the hub keeps is of round {oldest}. Give that"
                " round, or a later one."
            )
        gone = [name for name in self.journal.notes() if name.startswith(("anchor/", "open/")) and name not in kept]
        self.journal.cut(count, {**dict.fromkeys(gone), "ending": None})
        self.anchors = [anchor_of(text) for text in self.journal.notes("anchor/").values()]
        return count

    # What is needed

    def missing(self, applied: Sequence[Position], kept: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yields the records that a site lacks, with their numbers."""
        first = [max(at.round, 0 if at.round else kept[p] - 1) for p, at in enumerate(applied)]
        # The number of the first record of each fragment that is lacking.
        numbers = {p: own[first[p]] for p, own in enumerate(self._numbers) if first[p] < len(own)}
        if not numbers:
            return
        for seq, text in self.journal.read(min(numbers.values()) - 1):
            fragment = Record.from_bytes(text).fragment
            if seq >= numbers.get(fragment, seq + 1):
                yield seq, text

    def tidy(self, kept: Sequence[int], also: Collection[str]) -> int:
        """Drops blobs that nothing needs any more."""
        needed = set(also)
        for named, first in zip(self._named, kept, strict=True):
            while named and named[0][0] < first:
                named.popleft()
            needed.update(key for _, keys in named for key in keys)
        for text in self.journal.notes("open/").values():
            needed.update(payload.key for payload in Contribution.from_bytes(text).payloads)
        for _, parts in self.anchors:
            needed.update(part.key for part in parts)
        return self.store.retain(needed)
