"""A hub's durable storage, which consists of a ledger in one SQLite file and a blob store. Blobs
become visible only when they are complete and synced.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import sqlite3
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.codec import Bytes, key_of
from lightning_sdiloco.federation.wire import (
    CHUNK,
    MAX_BLOB,
    MAX_RECORD,
    Altered,
    HubError,
    Missing,
    NoSpace,
    checked_key,
    checked_size,
)

_HEAD = 100  # bytes that SQLite reserves at the beginning of a file
_APPLICATION = 0x5D110C0  # identifies our files in that header
_VERSION = 1
_TABLES = """
    create table records (seq integer primary key, record blob not null, chain blob not null);
    create table notes (name text primary key, value blob not null) without rowid;
"""


MEMORY = ":memory:"  # used in place of a path: a ledger that is lost with the process


class LedgerError(HubError):
    """The ledger file cannot be used, because it was truncated or altered, was created by another
    program, or is in use.
    """


class SQLiteLedger:
    """The numbered records and notes that a hub needs when it restarts.

    Attributes:
        path: The path of the ledger file.
        last: The number of the last record, or -1 if there are no records.
        chain: The digest of all records and their numbers, in order.
        before_write: A function that the hub sets and that is called before each write. If the
            function raises an error, nothing is written.
    """

    def __init__(self, path: str | Path, must_exist: bool = False) -> None:
        self.path = Path(path)
        self.last = -1
        self.chain = b""
        self.before_write: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        if path != MEMORY:
            if self.path.exists():
                self._check_head()
            elif must_exist:
                raise LedgerError(
                    f"The ledger {self.path} does not exist. Use the path of this run's ledger."
                )
            else:
                _make(self.path)
        self._database = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=1.0
        )
        try:
            if path == MEMORY:
                self._database.executescript(_TABLES)
            for pragma in ("locking_mode = exclusive", "journal_mode = wal", "synchronous = full"):
                self._database.execute(f"pragma {pragma}").fetchall()
            verdict = self._database.execute("pragma integrity_check").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            self._verify()
        except (sqlite3.Error, LedgerError) as error:
            self._database.close()
            if isinstance(error, LedgerError):
                raise
            reason = str(error)
            if "locked" in reason:
                reason = "another process has the ledger open"
            raise self._unusable(reason) from error

    def _check_head(self) -> None:
        # SQLite itself would treat a file that is too short as empty, and would write to another
        # program's file.
        with self.path.open("rb") as file:
            head = file.read(_HEAD)
        if len(head) < _HEAD:
            raise self._unusable("the file is empty or was truncated")
        if not head.startswith(b"SQLite format 3\0"):
            raise self._unusable("the file is not a database")
        (version,) = struct.unpack_from(">I", head, 60)
        (application,) = struct.unpack_from(">I", head, 68)
        if (application, version) != (_APPLICATION, _VERSION):
            raise self._unusable(
                "the file is a different kind of database or has a different version"
            )

    def _verify(self) -> None:
        """Verifies all records and determines `last` and `chain`."""
        self.last = -1
        self.chain = b""
        for seq, record, stored in self._database.execute(
            "select seq, record, chain from records order by seq"
        ):
            chain = _chained(self.chain, seq, record) if isinstance(record, bytes) else b""
            if seq != self.last + 1 or chain != stored:
                raise self._unusable(f"record {self.last + 1} was altered or is missing")
            self.last = seq
            self.chain = chain

    def append(
        self, seq: int, record: Bytes, notes: Mapping[str, Bytes | None] | None = None
    ) -> None:
        """Appends the record with the next number and writes notes in the same transaction."""
        checked_size(len(record), MAX_RECORD, "record")
        with self._lock:
            if seq != self.last + 1:
                raise Refused(
                    f"record {seq} is not the next one in a ledger of {self.last + 1} records."
                )
            chain = _chained(self.chain, seq, record)
            row = (seq, bytes(record), chain)
            self._write(("insert into records values (?, ?, ?)", row), notes or {})
            self.last = seq
            self.chain = chain

    def read(self, after: int = -1) -> Iterator[tuple[int, bytes]]:
        while True:
            after += 1
            with self._lock:
                row = self._database.execute(
                    "select record from records where seq = ?", (after,)
                ).fetchone()
            if row is None:
                return
            yield after, bytes(row[0])

    def note(self, notes: Mapping[str, Bytes | None]) -> None:
        """Writes named notes durably and atomically. A value of None deletes the note."""
        with self._lock:
            self._write(None, notes)

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        with self._lock:
            rows = self._database.execute(
                "select name, value from notes where substr(name, 1, ?) = ? order by name",
                (len(prefix), prefix),
            ).fetchall()
        return {name: bytes(value) for name, value in rows}

    def cut(self, count: int, notes: Mapping[str, Bytes | None]) -> None:
        """Permanently drops all records after the first ``count`` and updates notes in the same
        transaction.
        """
        with self._lock:
            self._write(("delete from records where seq >= ?", (count,)), notes)
            self._verify()

    def back_up(self, path: Path) -> None:
        """Copies the whole ledger to another file, even while the ledger is in use. The copy
        becomes visible only when it is complete.
        """
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            with (
                _reporting_full_disks(path.parent),
                contextlib.closing(sqlite3.connect(new)) as copy,
            ):
                with self._lock:
                    self._database.backup(copy)
                # A standalone copy, without a journal file next to it.
                copy.execute("pragma journal_mode = delete").fetchall()
            new.chmod(0o600)
            with new.open("rb+") as file:
                os.fsync(file.fileno())
            new.replace(path)
            sync_folder(path.parent)
        except sqlite3.Error as error:
            raise NoSpace(f"the ledger could not be copied to {path}: {error}") from error
        finally:
            new.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _write(
        self, change: tuple[str, tuple[object, ...]] | None, notes: Mapping[str, Bytes | None]
    ) -> None:
        self.before_write()
        try:
            with self._database:  # commits or rolls back
                self._database.execute("begin immediate")
                if change:
                    self._database.execute(*change)
                for name, value in notes.items():
                    if value is None:
                        self._database.execute("delete from notes where name = ?", (name,))
                    else:
                        self._database.execute(
                            "insert or replace into notes values (?, ?)", (name, bytes(value))
                        )
        except sqlite3.Error as error:
            if "full" in str(error):
                raise NoSpace(
                    f"there is no space left for the ledger {self.path}, so nothing was written."
                ) from error
            raise self._unusable(str(error)) from error

    def _unusable(self, reason: str) -> LedgerError:
        return LedgerError(
            f"The ledger {self.path} cannot be used: {reason}. It was not changed. Use the path of"
            " this run's ledger or of an intact copy. If the path does not exist, a new ledger is"
            " created."
        )


def _make(path: Path) -> None:
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as database:
            database.executescript(
                f"begin; {_TABLES} pragma application_id = {_APPLICATION}; pragma user_version ="
                f" {_VERSION}; commit;"
            )
        new.chmod(0o600)
        new.rename(path)
        sync_folder(path.parent)
    except (OSError, sqlite3.Error) as error:
        new.unlink(missing_ok=True)
        raise LedgerError(
            f"The ledger {path} could not be created ({error}). Its folder must exist."
        ) from error


def _chained(chain: bytes, seq: int, record: Bytes) -> bytes:
    return hashlib.sha256(chain + seq.to_bytes(8, "big") + bytes(record)).digest()


# Blobs

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Bytes after which the arrived part of a blob is synced, to shorten the sync at its end.
_SYNC_EVERY = 32 << 20
_MOST_RANGES = 256  # separate ranges of a blob that may have arrived

# The ranges of a blob as pairs of the first byte and the one after the last, in order and disjoint.
Ranges = list[list[int]]


def united(ranges: Ranges, start: int, end: int) -> Ranges:
    """Adds a range to a list of ranges and merges overlaps. For example, adding 1 to 5 to the
    ranges 0 to 2 and 5 to 6 gives 0 to 6.
    """
    union: Ranges = []
    for first, last in sorted([*ranges, [start, end]]):
        if union and first <= union[-1][1]:
            union[-1][1] = max(union[-1][1], last)
        else:
            union.append([first, last])
    return union


def lacking(ranges: Ranges, size: int) -> Ranges:
    """Returns the gaps between the given ranges of a blob."""
    gaps: Ranges = []
    position = 0
    for first, last in [*ranges, [size, size]]:
        if position < first:
            gaps.append([position, first])
        position = last
    return gaps


class BlobStore:
    """A store of blobs by digest, in a local folder or at an fsspec URL where objects appear
    atomically.
    """

    def __init__(self, url: str | Path, max_blob: int = MAX_BLOB) -> None:
        self.url = str(url)
        self.max_blob = max_blob
        try:
            self._files, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"The store {self.url!r} cannot be opened: {error}. Use a folder or an fsspec URL."
            ) from error
        self._blobs = f"{root.rstrip('/')}/blobs"
        self._folder = Path(self._blobs) if isinstance(self._files, LocalFileSystem) else None
        if self._folder is None:
            self.spool = Path(tempfile.mkdtemp(prefix="sdiloco-"))
        else:
            Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.spool = Path(root) / "incomplete"
            self.spool.mkdir(exist_ok=True)

    def drop_incomplete(self) -> None:
        """Drops incomplete blobs that were left behind by an earlier process."""
        for path in self.spool.iterdir():
            path.unlink()

    @property
    def free(self) -> int | None:
        """The number of free bytes, or None if it is unknown."""
        return None if self._folder is None else shutil.disk_usage(self._folder.parent).free

    def put(self, blob: Bytes) -> str:
        view = memoryview(blob).cast("B")
        upload = self.begin(key_of(view), len(view))
        with upload.discarded_on_error():
            for start in range(0, len(view), CHUNK):
                upload.take(start, view[start : start + CHUNK])
            upload.commit()
        return upload.key

    def begin(self, key: str, size: int) -> "Upload":
        return Upload(self, checked_key(key), checked_size(size, self.max_blob, "blob"))

    def get(self, key: str) -> bytes:
        blob = self.read(key, 0, checked_size(self.size(key), self.max_blob, "blob"))
        if key_of(blob) != key:
            raise Altered(
                f"the store {self.url} contains altered bytes that do not match digest {key}."
            )
        return blob

    def verify(self, key: str) -> None:
        """Raises an error unless a blob is in the store and unaltered."""
        if _digest(partial(self.read, key), self.size(key)) != key:
            raise Altered(f"blob {key} was altered in the store {self.url}.")

    def size(self, key: str) -> int:
        with self._existing(key) as path:
            return int(self._files.info(path)["size"])

    def read(self, key: str, start: int, end: int) -> bytes:
        with self._existing(key) as path:
            return bytes(self._files.cat_file(path, start=start, end=end))

    @contextmanager
    def _existing(self, key: str) -> Iterator[str]:
        self._files.invalidate_cache()
        try:
            yield f"{self._blobs}/{checked_key(key)}"
        except FileNotFoundError:
            raise Missing(f"{self._blobs}/{key} does not exist.") from None

    def copy(self, source: "BlobStore", key: str) -> None:
        """Copies a blob piece by piece from another store."""
        size = source.size(key)
        upload = self.begin(key, size)
        with upload.discarded_on_error():
            for start in range(0, size, 4 * CHUNK):
                upload.take(start, source.read(key, start, min(start + 4 * CHUNK, size)))
            upload.commit()

    def store(self, spooled: Path, key: str) -> None:
        """Moves a complete, synced file into the store."""
        if self._folder is None:
            self._files.put_file(str(spooled), f"{self._blobs}/{key}")
            spooled.unlink()
        else:
            self._folder.mkdir(exist_ok=True)
            spooled.replace(self._folder / key)
            sync_folder(self._folder)

    def retain(self, keys: Collection[str]) -> int:
        """Drops all blobs except the given ones and returns the number of dropped blobs."""
        dropped = 0
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            for path in self._files.ls(self._blobs, detail=False):
                key = str(path).rpartition("/")[2]
                if key not in keys:
                    self.drop(key)
                    dropped += 1
        return dropped

    def drop(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._blobs}/{key}")


class InMemoryStore:
    free = None

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, blob: Bytes) -> str:
        key = key_of(blob)
        self._blobs[key] = bytes(blob)
        return key

    def get(self, key: str) -> bytes:
        if key not in self._blobs:
            raise Missing(f"blob {key} does not exist.")
        return self._blobs[key]

    verify = get

    def size(self, key: str) -> int:
        return len(self.get(key))

    def retain(self, keys: Collection[str]) -> int:
        before = len(self._blobs)
        self._blobs = {key: blob for key, blob in self._blobs.items() if key in keys}
        return before - len(self._blobs)

    def drop(self, key: str) -> None:
        self._blobs.pop(key, None)


class Upload:
    """An upload of a blob, whose pieces may arrive in any order and from multiple threads."""

    def __init__(self, store: BlobStore, key: str, size: int) -> None:
        self.key = key
        self.size = size
        self.used = time.monotonic()
        self._store = store
        self._path = store.spool / f"{key}.{secrets.token_hex(8)}"
        self._arrived: Ranges = []
        self._unsynced = 0
        self._given_up = False
        self._committed = False
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        with _reporting_full_disks(store.spool):
            # Closed only with this object, because a thread may still be writing while another
            # gives up.
            self._file = open(  # noqa: SIM115
                self._path,
                "xb+",
                buffering=0,
                opener=lambda path, flags: os.open(path, flags, 0o600),
            )
        # A disk that is too small is detected now, because bytes that have not been sent take no
        # space.
        if size > shutil.disk_usage(store.spool).free:
            self.discard()
            raise NoSpace(
                f"there is no space left in {store.spool} for {size:,} bytes, so nothing was"
                " stored."
            )

    def take(self, start: int, piece: Bytes) -> bool:
        """Writes a received piece and returns whether the blob is complete."""
        end = start + len(piece)
        if not piece or end > self.size:
            raise Malformed(
                f"bytes {start:,} to {end:,} are outside the blob of {self.size:,} bytes."
            )
        with _reporting_full_disks(self._store.spool):
            with self._lock:
                arrived = united(self._arrived, start, end)
                if len(arrived) > _MOST_RANGES:
                    raise Malformed("a blob has arrived with too many gaps between its parts.")
                if arrived != self._arrived:  # a repeated piece changes nothing
                    self._write(start, piece)
                    self._arrived = arrived
                    self._unsynced += len(piece)
                is_complete = not self.missing
                syncs = self._unsynced >= _SYNC_EVERY
                if syncs:
                    self._unsynced = 0
            if syncs:
                os.fsync(self._handle())
        return is_complete

    def _write(self, position: int, piece: Bytes) -> None:
        view = memoryview(piece)
        while len(view):
            written = os.pwrite(self._handle(), view, position)
            view = view[written:]
            position += written

    @property
    def missing(self) -> Ranges:
        return lacking(self._arrived, self.size)

    def commit(self) -> None:
        """Verifies and syncs the complete blob and makes it visible under its name."""
        with self._committing, self.discarded_on_error(), _reporting_full_disks(self._store.spool):
            if self._committed:
                return
            handle = self._handle()
            if (
                _digest(lambda start, end: os.pread(handle, end - start, start), self.size)
                != self.key
            ):
                raise Altered(f"the received bytes do not match the announced key {self.key}.")
            os.fsync(self._handle())
            self._store.store(self._path, self.key)
            self._committed = True

    def discard(self) -> None:
        self._given_up = True
        self._path.unlink(missing_ok=True)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Discards the upload if the body of the ``with`` fails."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def _handle(self) -> int:
        if self._given_up:
            raise Missing(f"the upload of {self.key} was abandoned. Send the blob again.")
        return self._file.fileno()


def _digest(read: Callable[[int, int], bytes], size: int) -> str:
    """Computes the digest of a blob, reading the blob in pieces."""
    digest = hashlib.sha256()
    for start in range(0, size, 4 * CHUNK):
        digest.update(read(start, min(start + 4 * CHUNK, size)))
    return digest.hexdigest()


@contextmanager
def _reporting_full_disks(place: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise NoSpace(
            f"there is no space left in {place} ({error.strerror}), so nothing was stored."
        ) from error


def write_synced(path: Path, content: Bytes) -> None:
    """Writes and syncs a new file that only the owner may read. On failure, no file remains."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
