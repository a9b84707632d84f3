"""Where a hub keeps payloads and states: files named by their digest, whole and synced before anyone sees them."""

import contextlib
import errno
import hashlib
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.codec import Bytes, key_of
from lightning_sdiloco.federation.wire import (
    CHUNK,
    MAX_BLOB,
    Altered,
    Missing,
    NoSpace,
    checked_blob,
    checked_key,
    checked_size,
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Bytes after which what has arrived is sent on to the disk, so that the end of a blob does not wait for all of it.
_SYNC_EVERY = 32 << 20
_MOST_RANGES = 256  # into which what has arrived of a blob may be torn

Ranges = list[list[int]]
"""Bytes of a blob, as pairs of the first and the one after the last, in order and apart."""


def united(ranges: Ranges, start: int, end: int) -> Ranges:
    """Returns ranges with one more.

    Examples:
        >>> united([[0, 2], [5, 6]], 2, 4), united([[0, 2], [5, 6]], 1, 5)
        ([[0, 4], [5, 6]], [[0, 6]])
    """
    whole: Ranges = []
    for first, last in sorted([*ranges, [start, end]]):
        if whole and first <= whole[-1][1]:
            whole[-1][1] = max(whole[-1][1], last)
        else:
            whole.append([first, last])
    return whole


def lacking(ranges: Ranges, size: int) -> Ranges:
    """Returns what ranges leave of a blob.

    Examples:
        >>> lacking([[0, 2], [5, 6]], 9), lacking([], 0)
        ([[2, 5], [6, 9]], [])
    """
    ends = [0, *(last for _, last in ranges)]
    return [[a, b] for a, b in zip(ends, [*(first for first, _ in ranges), size], strict=True) if a < b]


class BlobStore:
    """Blobs under their digests, in a folder or under a URL of fsspec."""

    def __init__(self, url: str | Path, max_blob: int = MAX_BLOB) -> None:
        self.url, self.max_blob = str(url), max_blob
        self._files = _files_at(self.url)
        self._stored: dict[str, float] = {}  # when this process stored a blob, on the clock of time.monotonic()

    def put(self, blob: Bytes) -> str:
        view = memoryview(blob).cast("B")
        upload = self.begin(key_of(view), len(view))
        with upload.discarded_on_error():
            for start in range(0, len(view), CHUNK):
                upload.take(start, view[start : start + CHUNK])
            upload.commit()
        return upload.key

    def begin(self, key: str, size: int) -> "Upload":
        return Upload(self, checked_key(key), checked_size(size, self.max_blob, "blob"), self._files)

    def get(self, key: str) -> bytes:
        size = checked_size(self.size(key), self.max_blob, "blob")
        return checked_blob(key, self.read(key, 0, size), f"the store {self.url}")

    def size(self, key: str) -> int:
        return self._files.size(checked_key(key))

    def read(self, key: str, start: int, end: int) -> bytes:
        return self._files.read(checked_key(key), start, end)

    def retain(self, keys: Collection[str], age: float = 600.0) -> int:
        """Drops all blobs but those named, and those that came lately: no record may name them yet."""
        now = time.monotonic()
        dropped = 0
        for key in self._files.keys():  # noqa: SIM118
            if key not in keys and now - self._stored.get(key, -age) >= age:
                self._files.delete(key)
                self._stored.pop(key, None)
                dropped += 1
        return dropped

    def stored(self, key: str) -> None:
        self._stored[key] = time.monotonic()


class InMemoryStore:
    """Blobs in memory, in place of a `BlobStore`."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, blob: Bytes) -> str:
        self._blobs[key := key_of(blob)] = bytes(blob)
        return key

    def get(self, key: str) -> bytes:
        if key not in self._blobs:
            raise Missing(f"there is no blob {key}.")
        return self._blobs[key]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def retain(self, keys: Collection[str], age: float = 0.0) -> int:
        before = len(self._blobs)
        self._blobs = {key: blob for key, blob in self._blobs.items() if key in keys}
        return before - len(self._blobs)


class Upload:
    """A blob on its way into a store, whose pieces come in any order and from several threads."""

    def __init__(self, store: BlobStore, key: str, size: int, files: "_LocalFiles | _RemoteFiles") -> None:
        self.key, self.size, self.used = key, size, time.monotonic()
        self._store, self._files = store, files
        self._path = files.spool / f"{key}.{secrets.token_hex(8)}"
        self._there: Ranges = []
        self._unsynced = 0
        self._given_up = self._committed = False
        self._lock, self._committing = threading.Lock(), threading.Lock()
        with _telling_full_disks(files.spool):
            # Closed with this object and not before: a thread may still be writing while another gives up.
            self._file = open(self._path, "xb+", buffering=0, opener=_for_its_owner)  # noqa: SIM115
            with self.discarded_on_error():
                if size and hasattr(os, "posix_fallocate"):
                    # A disk that is too small says so now.
                    os.posix_fallocate(self._file.fileno(), 0, size)

    def take(self, start: int, data: Bytes) -> bool:
        """Writes a piece that has arrived; tells whether all of the blob is there."""
        end = start + len(data)
        if not data or end > self.size:
            raise Malformed(f"bytes {start:,} to {end:,} are none of a blob of {self.size:,} bytes.")
        with _telling_full_disks(self._files.spool):
            with self._lock:
                there = united(self._there, start, end)
                if len(there) > _MOST_RANGES:
                    raise Malformed("a blob comes in parts, each without a gap.")
                if there != self._there:  # what comes again changes nothing
                    view, at = memoryview(data), start
                    while len(view):
                        written = os.pwrite(self._handle(), view, at)
                        view, at = view[written:], at + written
                    self._there = there
                    self._unsynced += len(data)
                complete, syncs = self.complete, self._unsynced >= _SYNC_EVERY
                self._unsynced = 0 if syncs else self._unsynced
            if syncs:
                os.fsync(self._handle())
        return complete

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> Ranges:
        return lacking(self._there, self.size)

    def commit(self) -> None:
        """Gives the blob its name, once all of it is there and on the disk. Nobody could see it before."""
        with self._committing, self.discarded_on_error(), _telling_full_disks(self._files.spool):
            if self._committed:
                return
            digest = hashlib.sha256()
            for start in range(0, self.size, 4 * CHUNK):
                digest.update(os.pread(self._handle(), 4 * CHUNK, start))
            if digest.hexdigest() != self.key:
                raise Altered(f"the bytes that arrived are not those that were announced as {self.key}.")
            os.fsync(self._handle())
            self._files.move_in(self._path, self.key)
            self._committed = True
            self._store.stored(self.key)

    def discard(self) -> None:
        self._given_up = True
        self._path.unlink(missing_ok=True)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Leaves nothing behind if what is done within fails."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def _handle(self) -> int:
        if self._given_up:
            raise Missing(f"the upload of {self.key} has been given up: send it again.")
        return self._file.fileno()


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# Files


def _files_at(url: str) -> "_LocalFiles | _RemoteFiles":
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"The store {url!r} cannot be opened: {error}. Give a folder, or a URL of fsspec.") from error
    return _LocalFiles(Path(root)) if isinstance(filesystem, LocalFileSystem) else _RemoteFiles(filesystem, root)


class _LocalFiles:
    """A folder of this machine, or one that it has mounted. A file is written whole under its key, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._blobs, self.spool = folder / "blobs", folder / "incomplete"
        self.spool.mkdir(parents=True, exist_ok=True)

    def size(self, key: str) -> int:
        with _telling_what_is_missing(self._blobs / key):
            return (self._blobs / key).stat().st_size

    def read(self, key: str, start: int, end: int) -> bytes:
        with _telling_what_is_missing(self._blobs / key), (self._blobs / key).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def keys(self) -> list[str]:
        return sorted(os.listdir(self._blobs)) if self._blobs.exists() else []

    def move_in(self, spooled: Path, key: str) -> None:
        self._blobs.mkdir(exist_ok=True)
        spooled.replace(self._blobs / key)
        sync_folder(self._blobs)

    def delete(self, key: str) -> None:
        (self._blobs / key).unlink(missing_ok=True)


class _RemoteFiles:
    """Objects behind fsspec, of a kind that appear whole, such as those of S3."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem, self._blobs = filesystem, f"{root.rstrip('/')}/blobs"
        self.spool = Path(tempfile.mkdtemp(prefix="sdiloco-"))

    def size(self, key: str) -> int:
        self._filesystem.invalidate_cache()
        with _telling_what_is_missing(f"{self._blobs}/{key}"):
            return int(self._filesystem.info(f"{self._blobs}/{key}")["size"])

    def read(self, key: str, start: int, end: int) -> bytes:
        self._filesystem.invalidate_cache()
        with _telling_what_is_missing(f"{self._blobs}/{key}"):
            return bytes(self._filesystem.cat_file(f"{self._blobs}/{key}", start=start, end=end))

    def keys(self) -> list[str]:
        self._filesystem.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            listed = self._filesystem.ls(self._blobs, detail=False)
            return sorted(str(path).rpartition("/")[2] for path in listed)
        return []

    def move_in(self, spooled: Path, key: str) -> None:
        self._filesystem.put_file(str(spooled), f"{self._blobs}/{key}")
        spooled.unlink()

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._blobs}/{key}")


@contextmanager
def _telling_what_is_missing(what: object) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Missing(f"{what} is not there.") from None


@contextmanager
def _telling_full_disks(where: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise NoSpace(f"there is no space left in {where} ({error.strerror}): nothing was stored.") from error


def write_synced(path: Path, data: Bytes) -> None:
    """Writes a new file of its owner alone, through to the disk; a file that could not be written is gone."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
