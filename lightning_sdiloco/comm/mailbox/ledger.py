"""The ledger of a hub in one SQLite file: a record is on the disk before anybody sees it, and stays as it was."""

import contextlib
import hashlib
import secrets
import sqlite3
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_sdiloco.comm.mailbox.base import (
    EVERYTHING,
    MAX_RECORD,
    Bytes,
    MailboxError,
    NoSpace,
    checked_size,
)
from lightning_sdiloco.comm.mailbox.files import sync_folder
from lightning_sdiloco.errors import Refused

_HEAD = 100  # bytes that SQLite keeps for itself at the beginning of a file
_APPLICATION = 0x5D110C0  # says in the head of the file whose it is
_VERSION = 1
_TABLES = """
    create table records (seq integer primary key, record blob not null, chain blob not null);
    create table notes (name text primary key, value blob not null) without rowid;
"""


class LedgerError(MailboxError):
    """The file of a ledger cannot be used: it was truncated, altered, made by something else, or is in use."""


class SQLiteLedger:
    """Records with their numbers, and notes: what a hub has to know when it starts again."""

    def __init__(self, path: str | Path, must_exist: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        existed = self.path.exists()
        if must_exist and not existed:
            raise LedgerError(f"There is no ledger {self.path}. Give the path of the ledger of this run.")
        if existed:
            self._check_head()
        else:
            _make(self.path)
        try:
            self._database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=1.0)
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from error
        try:
            self._open()
            self._count, self._chain = self._verified()
        except sqlite3.Error as error:
            self._database.close()
            in_use = "locked" in str(error)
            raise self._unusable("another process has it open" if in_use else str(error)) from error
        except LedgerError:
            self._database.close()
            raise

    @property
    def last(self) -> int:
        """The number of the last record, or `EVERYTHING` if there is none."""
        return self._count + EVERYTHING

    @property
    def chain(self) -> str:
        """The digest of all records, each with its number, in their order: equal if and only if they are."""
        return self._chain.hex()

    def append(self, seq: int, record: Bytes, notes: Mapping[str, Bytes | None] | None = None) -> bool:
        """Gives a number to a record and notes what changes with it, both or neither."""
        checked_size(len(record), MAX_RECORD, "record")
        with self._lock:
            if not 0 <= seq <= self._count:
                raise Refused(f"record {seq} does not follow: the ledger has {self._count}.")
            if seq < self._count:
                (there,) = self._database.execute("select record from records where seq = ?", (seq,)).fetchone()
                return bytes(there) == bytes(record)
            chain = chained(self._chain, seq, record)
            rows = (seq, bytes(record), chain)
            self._write([("insert into records values (?, ?, ?)", rows), *_of_notes(notes or {})])
            self._count, self._chain = seq + 1, chain
            return True

    def read(self, after: int = EVERYTHING) -> Iterator[tuple[int, bytes]]:
        """Yields the records after a number, with theirs."""
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
            self._write(_of_notes(notes))

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        """Returns the notes whose names begin with a prefix."""
        with self._lock:
            rows = self._database.execute(
                "select name, value from notes where substr(name, 1, ?) = ? order by name", (len(prefix), prefix)
            ).fetchall()
        return {name: bytes(value) for name, value in rows}

    def cut(self, count: int, notes: Mapping[str, Bytes | None]) -> None:
        """Drops all but the first records for good, and notes what changes with it, both or neither."""
        with self._lock:
            self._write([("delete from records where seq >= ?", (count,)), *_of_notes(notes)])
            self._count, self._chain = self._verified()

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._database.close()

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

    def _open(self) -> None:
        for pragma in ("locking_mode = exclusive", "journal_mode = wal", "synchronous = full"):
            self._database.execute(f"pragma {pragma}").fetchall()
        found = self._database.execute("pragma integrity_check").fetchone()[0]
        if found != "ok":
            raise self._unusable(found)

    def _verified(self) -> tuple[int, bytes]:
        count, chain = 0, b""
        for seq, record, stored in self._database.execute("select seq, record, chain from records order by seq"):
            chain = chained(chain, seq, record) if isinstance(record, bytes) else b""
            if seq != count or chain != stored:
                raise self._unusable(f"record {count} has been altered, or is missing")
            count += 1
        return count, chain

    def _write(self, statements: list[tuple[str, tuple[object, ...]]]) -> None:
        try:
            self._database.execute("begin immediate")
            try:
                for statement, values in statements:
                    self._database.execute(statement, values)
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
    """Makes an empty ledger, whole or not at all."""
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


def chained(chain: bytes, seq: int, record: Bytes) -> bytes:
    """Returns the digest of a record and all before it."""
    return hashlib.sha256(chain + seq.to_bytes(8, "big") + bytes(record)).digest()


def _of_notes(notes: Mapping[str, Bytes | None]) -> list[tuple[str, tuple[object, ...]]]:
    return [
        ("delete from notes where name = ?", (name,))
        if value is None
        else ("insert or replace into notes values (?, ?)", (name, bytes(value)))
        for name, value in notes.items()
    ]
