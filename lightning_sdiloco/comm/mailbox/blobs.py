"""Where a hub keeps payloads and anchors: files named by their digest, whole and synced before anyone sees them."""

import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_sdiloco.comm.mailbox.base import (
    MAX_BLOB,
    Altered,
    Bytes,
    Missing,
    checked_blob,
    checked_key,
    checked_size,
    key_of,
)
from lightning_sdiloco.comm.mailbox.chunks import Arrivals, bounds, count
from lightning_sdiloco.comm.mailbox.files import Files, files_at, telling_full_disks

_FOLDER = "blobs"
# Bytes after which what has arrived is sent on to the disk, so that the end of a blob does not wait for all of it.
_SYNC_EVERY = 32 << 20


class BlobStore:
    """Blobs under their digests, in a folder or under a URL of fsspec."""

    def __init__(self, url: str | Path, max_blob: int = MAX_BLOB) -> None:
        self.url, self.max_blob = str(url), max_blob
        self._files = files_at(self.url)
        self._stored: dict[str, float] = {}  # when this process stored a blob, on the clock of time.monotonic()

    def put(self, blob: Bytes) -> str:
        """Stores a blob and returns its key."""
        view = memoryview(blob).cast("B")
        upload = self.begin(key_of(view), len(view))
        with upload.discarded_on_error():
            for index in range(count(len(view))):
                start, end = bounds(index, len(view))
                upload.take(index, view[start:end])
            upload.commit()
        return upload.key

    def begin(self, key: str, size: int) -> "Upload":
        """Makes room for a blob that arrives in chunks."""
        return Upload(self, checked_key(key), checked_size(size, self.max_blob, "blob"), self._files)

    def get(self, key: str) -> bytes:
        """Returns a blob, verified."""
        size = checked_size(self.size(key), self.max_blob, "blob")
        return checked_blob(key, self.read(key, 0, size), f"the store {self.url}")

    def size(self, key: str) -> int:
        """Returns the size of a blob."""
        return self._files.size(_name(key))

    def read(self, key: str, start: int, end: int) -> bytes:
        """Returns a part of a blob. It cannot be verified by itself: whoever puts the parts together does that."""
        return self._files.read(_name(key), start, end)

    def read_chunk(self, key: str, index: int, size: int) -> bytes:
        """Returns a chunk of a blob whose size is known."""
        return self.read(key, *bounds(index, size))

    def retain(self, keys: Collection[str], age: float = 600.0) -> int:
        """Drops all blobs but those named, and those that came lately: no record may name them yet."""
        now = time.monotonic()
        dropped = 0
        for key in self._files.names(_FOLDER):
            if key in keys or now - self._stored.get(key, -age) < age:
                continue
            self._files.delete(_name(key))
            self._stored.pop(key, None)
            dropped += 1
        return dropped

    def stored(self, key: str) -> None:
        """Notes that a blob has been stored now."""
        self._stored[key] = time.monotonic()


class Upload:
    """A blob on its way into a store, whose chunks come in any order and from several threads."""

    def __init__(self, store: BlobStore, key: str, size: int, files: Files) -> None:
        self.key, self.size = key, size
        self._store, self._files = store, files
        self._path = files.spool / f"{key}.{secrets.token_hex(8)}"
        self._unsynced = 0
        self._given_up = self._committed = False
        self._committing = threading.Lock()
        with telling_full_disks(self._files.spool):
            # Closed with this object and not before: a thread may still be writing while another gives up.
            self._file = open(self._path, "xb+", buffering=0, opener=_for_its_owner)  # noqa: SIM115
            with self.discarded_on_error():
                if size and hasattr(os, "posix_fallocate"):
                    # A disk that is too small says so now.
                    os.posix_fallocate(self._file.fileno(), 0, size)
        self.arrivals = Arrivals(size, self._write, self._read)

    def take(self, index: int, data: Bytes) -> bool:
        """Takes a chunk, as `Arrivals.take` does."""
        with telling_full_disks(self._files.spool):
            return self.arrivals.take(index, data)

    def commit(self) -> None:
        """Gives the blob its name, once all chunks are there and on the disk. Nobody could see it before."""
        with self._committing, self.discarded_on_error(), telling_full_disks(self._files.spool):
            if self._committed:
                return
            if self.arrivals.digest() != self.key:
                raise Altered(f"the bytes that arrived are not those that were announced as {self.key}.")
            os.fsync(self._handle())
            self._files.move_in(self._path, _name(self.key))
            self._committed = True
            self._store.stored(self.key)

    def discard(self) -> None:
        """Drops what has arrived."""
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

    def _write(self, offset: int, data: Bytes) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._handle(), view, offset)
            view, offset = view[written:], offset + written
        self._unsynced += len(data)
        if self._unsynced >= _SYNC_EVERY:
            self._unsynced = 0
            os.fsync(self._handle())

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._handle(), end - start, start)


def _name(key: str) -> str:
    return f"{_FOLDER}/{checked_key(key)}"


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
