"""What a hub must not forget: one SQLite file, and what lies in it: charter, records, open contributions, anchors.

[Note: what lies where] Records and notes lie in a journal, which takes several of them at once or none. Payloads and
states are blobs in a store. A blob is durable before a record or a note names it, and is dropped when none does.
"""

import contextlib
import hashlib
import importlib
import secrets
import sqlite3
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sdiloco.errors import AgreementError, Refused
from lightning_sdiloco.federation.charter import Charter
from lightning_sdiloco.federation.codec import CLASS_PATH, Bytes, decoded, encoded, plain, read
from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import (
    MOST_BYTES,
    Anchor,
    Contribution,
    Payload,
    Position,
    Record,
    StateHeader,
)
from lightning_sdiloco.federation.quorum import Quorum, built_in, quorum_of
from lightning_sdiloco.federation.store import BlobStore, InMemoryStore, sync_folder
from lightning_sdiloco.federation.wire import EVERYTHING, MAX_RECORD, HubError, Missing, NoSpace, checked_size

_HEAD = 100  # bytes that SQLite keeps for itself at the beginning of a file
_APPLICATION = 0x5D110C0  # says in the head of the file whose it is
_VERSION = 1
_TABLES = """
    create table records (seq integer primary key, record blob not null, chain blob not null);
    create table notes (name text primary key, value blob not null) without rowid;
"""


MEMORY = ":memory:"
"""In place of a path: a ledger that nobody needs later."""


class LedgerError(HubError):
    """The file of a ledger cannot be used: it was truncated, altered, made by something else, or is in use."""


class SQLiteLedger:
    """Records with their numbers, and notes: what a hub has to know when it starts again."""

    def __init__(self, path: str | Path, must_exist: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        if path != MEMORY:
            if self.path.exists():
                self._check_head()
            elif must_exist:
                raise LedgerError(f"There is no ledger {self.path}. Give the path of the ledger of this run.")
            else:
                _make(self.path)
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from error
        try:
            if path == MEMORY:
                self._database.executescript(_TABLES)
            for pragma in ("locking_mode = exclusive", "journal_mode = wal", "synchronous = full"):
                self._database.execute(f"pragma {pragma}").fetchall()
            found = self._database.execute("pragma integrity_check").fetchone()[0]
            if found != "ok":
                raise self._unusable(found)
            self._verify()
        except sqlite3.Error as error:
            self._database.close()
            in_use = "locked" in str(error)
            raise self._unusable("another process has it open" if in_use else str(error)) from error
        except LedgerError:
            self._database.close()
            raise

    def _check_head(self) -> None:
        # SQLite itself would take a file that is too short for an empty one, and write to what is somebody else's.
        with self.path.open("rb") as file:
            head = file.read(_HEAD)
        if len(head) < _HEAD:
            raise self._unusable("it is empty, or was truncated")
        if not head.startswith(b"SQLite format 3\0"):
            raise self._unusable("it is no database")
        (version,), (application,) = (struct.unpack_from(">I", head, offset) for offset in (60, 68))
        if (application, version) != (_APPLICATION, _VERSION):
            raise self._unusable("it is a database of something else, or of another version")

    def _verify(self) -> None:
        """Finds the last record, and the digest of all, each with its number, in their order."""
        self.last, self.chain = EVERYTHING, b""
        for seq, record, stored in self._database.execute("select seq, record, chain from records order by seq"):
            chain = _chained(self.chain, seq, record) if isinstance(record, bytes) else b""
            if seq != self.last + 1 or chain != stored:
                raise self._unusable(f"record {self.last + 1} has been altered, or is missing")
            self.last, self.chain = seq, chain

    def append(self, seq: int, record: Bytes, notes: Mapping[str, Bytes | None] | None = None) -> bool:
        """Writes a record and notes; tells whether it, and no other one, has this number."""
        checked_size(len(record), MAX_RECORD, "record")
        with self._lock:
            if not 0 <= seq <= self.last + 1:
                raise Refused(f"record {seq} does not follow: the ledger has {self.last + 1}.")
            if seq <= self.last:
                (there,) = self._database.execute("select record from records where seq = ?", (seq,)).fetchone()
                return bytes(there) == bytes(record)
            chain = _chained(self.chain, seq, record)
            self._write(("insert into records values (?, ?, ?)", (seq, bytes(record), chain)), notes or {})
            self.last, self.chain = seq, chain
            return True

    def read(self, after: int = EVERYTHING) -> Iterator[tuple[int, bytes]]:
        while True:
            after += 1
            with self._lock:
                row = self._database.execute("select record from records where seq = ?", (after,)).fetchone()
            if row is None:
                return
            yield after, bytes(row[0])

    def note(self, notes: Mapping[str, Bytes | None]) -> None:
        """Notes values under names, durably: all of them or none. A value of None deletes the note."""
        with self._lock:
            self._write(None, notes)

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        with self._lock:
            rows = self._database.execute(
                "select name, value from notes where substr(name, 1, ?) = ? order by name", (len(prefix), prefix)
            ).fetchall()
        return {name: bytes(value) for name, value in rows}

    def cut(self, count: int, notes: Mapping[str, Bytes | None]) -> None:
        """Drops all but the first records for good, and notes what changes with it, both or neither."""
        with self._lock:
            self._write(("delete from records where seq >= ?", (count,)), notes)
            self._verify()

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _write(self, change: tuple[str, tuple[object, ...]] | None, notes: Mapping[str, Bytes | None]) -> None:
        try:
            self._database.execute("begin immediate")
            try:
                if change:
                    self._database.execute(*change)
                for name, value in notes.items():
                    if value is None:
                        self._database.execute("delete from notes where name = ?", (name,))
                    else:
                        self._database.execute("insert or replace into notes values (?, ?)", (name, bytes(value)))
                self._database.execute("commit")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("rollback")
                raise
        except sqlite3.Error as error:
            if "full" in str(error):
                raise NoSpace(f"there is no space left for the ledger {self.path}: nothing was written.") from error
            raise self._unusable(str(error)) from error

    def _unusable(self, reason: str) -> LedgerError:
        return LedgerError(
            f"The ledger {self.path} cannot be used: {reason}. Nothing of it was changed. Give the path of the ledger "
            "of this run, or a copy of it that is whole; a new one is made where there is no file."
        )


def _make(path: Path) -> None:
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as database:
            database.executescript(
                f"begin; {_TABLES} pragma application_id = {_APPLICATION}; pragma user_version = {_VERSION}; commit;"
            )
        new.chmod(0o600)
        new.rename(path)
        sync_folder(path.parent)
    except (OSError, sqlite3.Error) as error:
        new.unlink(missing_ok=True)
        raise LedgerError(f"The ledger {path} cannot be made ({error}): its folder has to be there.") from error


def _chained(chain: bytes, seq: int, record: Bytes) -> bytes:
    return hashlib.sha256(chain + seq.to_bytes(8, "big") + bytes(record)).digest()


class Quorums:
    """Finds the class of a quorum by its class path; see `quorum_of`."""

    def __init__(self, named: str | None = None) -> None:
        self._named = {} if named is None else {named: imported(named)}

    def __call__(self, path: str) -> type[Any]:
        try:
            return self._named.get(path) or built_in(path)
        except Refused as error:
            raise Refused(f"{error}. The operator of the hub has to allow it: sdiloco hub --quorum {path}") from None


def imported(path: str) -> type[Quorum]:
    """Imports a quorum; only for class paths that this machine's own user has given."""
    module, _, name = path.rpartition(".")
    try:
        if not CLASS_PATH.fullmatch(path):
            raise ImportError("it is no dotted name of a class")
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"quorum={path!r} cannot be imported: {error}. Give module.Class, of a module that is installed here, or is"
            " in a folder of PYTHONPATH."
        ) from None
    if not (isinstance(found, type) and issubclass(found, Quorum)):
        raise ValueError(f"quorum={path!r} is no Quorum: it must extend lightning_sdiloco.Quorum.")
    return found


class History:
    """Reads and writes what is durable; see [Note: what lies where]."""

    def __init__(
        self, journal: SQLiteLedger, store: BlobStore | InMemoryStore, quorums: Callable[[str], type[Any]] | None = None
    ) -> None:
        self.journal, self.store, self.quorums = journal, store, quorums or Quorums()
        text = journal.notes("charter").get("charter")
        self.charter = Charter.from_bytes(text) if text else None
        self.anchors = {name: _anchor(text) for name, text in journal.notes("anchor/").items()}
        self._numbers: list[array[int]] = []
        self._named: list[deque[tuple[int, tuple[str, ...]]]] = []

    def ledger(self, now: float) -> Ledger:
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
            [own.header for own in self.anchors.values()],
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
        try:
            return all(self.store.size(part.key) == part.size for part in parts)
        except Missing:
            return False

    # What happens

    def found(self, charter: Charter, header: StateHeader, parts: Sequence[Payload]) -> None:
        """Writes the charter and the state at round 0: from then on there is a run."""
        self.anchor(header, parts, {"charter": charter.to_bytes()})
        self.charter = charter

    def anchor(self, header: StateHeader, parts: Sequence[Payload], notes: Mapping[str, bytes] | None = None) -> None:
        number = 1 + max((int(name.partition("/")[2]) for name in self.anchors), default=-1)
        name, anchor = f"anchor/{number:06d}", Anchor(header, tuple(parts))
        self.journal.note({**(notes or {}), name: encoded(plain(anchor))})
        self.anchors[name] = anchor

    def append(self, record: Record) -> None:
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

    def keep_anchors(self, headers: Sequence[StateHeader]) -> None:
        if gone := [name for name, own in self.anchors.items() if own.header not in headers]:
            self.journal.note(dict.fromkeys(gone))
            self.anchors = {name: own for name, own in self.anchors.items() if name not in gone}

    def roll_back(self, round: int) -> int:
        """Drops the first record of a later round and all that were written after it."""
        last = sum(map(len, self._numbers))
        count = min((own[round] for own in self._numbers if len(own) > round), default=last)
        rounds = [sum(number < count for number in own) for own in self._numbers]
        kept = {
            name: own
            for name, own in self.anchors.items()
            if all(at.round <= rounds[p] for p, at in enumerate(own.header.applied))
        }
        if not kept:
            oldest = max((at.round for own in list(self.anchors.values())[:1] for at in own.header.applied), default=0)
            raise Refused(
                f"round={round} is too far back: the oldest state that the hub keeps is of round {oldest}. Give that"
                " round, or a later one."
            )
        gone = [name for name in self.journal.notes() if name.startswith(("anchor/", "open/")) and name not in kept]
        self.journal.cut(count, {**dict.fromkeys(gone), "ending": None})
        self.anchors = kept
        return count

    # What is needed

    def missing(self, applied: Sequence[Position], kept: Sequence[int]) -> Iterator[tuple[int, bytes]]:
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
        needed = set(also)
        for named, first in zip(self._named, kept, strict=True):
            while named and named[0][0] < first:
                named.popleft()
            needed.update(key for _, keys in named for key in keys)
        for text in self.journal.notes("open/").values():
            needed.update(payload.key for payload in Contribution.from_bytes(text).payloads)
        for own in self.anchors.values():
            needed.update(part.key for part in own.parts)
        return self.store.retain(needed)


def _anchor(text: bytes) -> Anchor:
    anchor: Anchor = read(Anchor, decoded(text, MOST_BYTES), "anchor")
    return anchor
