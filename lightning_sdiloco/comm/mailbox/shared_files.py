"""The files of a folder or bucket in which sites meet: opened, tried, and told from a hub that does not answer."""

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_sdiloco.comm.mailbox.base import MAX_BLOB, Bytes, HubUnreachable, MailboxError, NoSpace
from lightning_sdiloco.comm.mailbox.blobs import BlobStore
from lightning_sdiloco.comm.mailbox.files import Files, files_at
from lightning_sdiloco.errors import Refused

log = logging.getLogger(__name__)

_EXACT = {"s3", "s3a", "gs", "gcs", "memory"}
"""Kinds of URL of which the service itself refuses to create an object that is there; `files_at` says why."""


def is_folder(hub: str) -> bool:
    """Tells whether sites meet in a folder or bucket, and not at the address of a hub.

    Examples:
        >>> is_folder("s3://bucket/run"), is_folder("/mnt/shared/run"), is_folder("a.example:29400")
        (True, True, False)
    """
    return "://" in hub or hub.startswith("/")


def is_bucket(url: str) -> bool:
    """Tells whether each look at what is there is a request to a service, which takes its time and its price."""
    return not isinstance(_opened(url), LocalFileSystem)


def shared_files(url: str) -> "SharedFiles":
    """Opens the files in which sites meet."""
    filesystem = _opened(url)
    kinds = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    if not (isinstance(filesystem, LocalFileSystem) or kinds & _EXACT):
        raise ValueError(
            f"hub={url!r} cannot be where sites meet: {'/'.join(sorted(kinds))} does not create a file only once"
            " for sure. Give a folder that all sites mount, s3:// or gs://; or start a hub (sdiloco hub)."
        )
    try:
        files = SharedFiles(files_at(url), url)
    except OSError as error:
        raise ValueError(
            f"hub={url!r} cannot be opened: {error}. Give a folder that this site can write to."
        ) from error
    name = f"probe/{secrets.token_hex(16)}"
    try:
        once, twice = files.create(name, b"first"), files.create(name, b"second")
        files.delete(name)
    except NoSpace as error:
        raise ValueError(f"hub={url!r} cannot be used: {error} Make room there.") from error
    except MailboxError as error:
        raise ValueError(
            f"hub={url!r} cannot be where sites meet: a file cannot be created only once there. {error} A folder needs"
            " hard links, and this site's permission to write; a bucket needs conditional writes (If-None-Match)."
        ) from error
    if not once or twice:
        raise ValueError(
            f"hub={url!r} cannot be where sites meet: the service wrote a file over one that was there, which it"
            " was asked to refuse (If-None-Match). Take one with conditional writes, or start a hub (sdiloco hub)."
        )
    return files


def _opened(url: str) -> Any:
    try:
        return fsspec.core.url_to_fs(url)[0]
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"hub={url!r} cannot be opened: {error}. Give a folder, or a URL of fsspec.") from error


class SharedFiles:
    """Files whose errors are those of a mailbox: a folder that is away is a hub that does not answer; see `Files`."""

    def __init__(self, files: Files, url: str) -> None:
        self._files, self.url = files, url

    @property
    def spool(self) -> Path:
        return self._files.spool

    def size(self, name: str) -> int:
        with self._reached():
            return self._files.size(name)

    def read(self, name: str, start: int, end: int) -> bytes:
        with self._reached():
            return self._files.read(name, start, end)

    def names(self, folder: str) -> list[str]:
        with self._reached():
            return self._files.names(folder)

    def move_in(self, spooled: Path, name: str) -> None:
        with self._reached():
            self._files.move_in(spooled, name)

    def create(self, name: str, data: Bytes) -> bool:
        with self._reached():
            return self._files.create(name, data)

    def delete(self, name: str) -> None:
        with self._reached():
            self._files.delete(name)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (MailboxError, Refused):
            raise
        except Exception as error:  # each kind of service has errors of its own
            raise HubUnreachable(f"{self.url} cannot be used: {error}.") from error


class Sweeper:
    """Deletes files in a thread of its own: in a bucket each takes as long as a file that is written."""

    def __init__(self, files: Files, may: Callable[[], bool] = lambda: True) -> None:
        self._files, self._may = files, may
        self._changed = threading.Condition()
        self._deleting = threading.Lock()
        self._names: dict[str, None] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def delete(self, names: Collection[str]) -> None:
        """Deletes files, some time."""
        with self._changed:
            self._names.update(dict.fromkeys(names))
            self._changed.notify_all()
            if self._names and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="folder-sweeper", daemon=True)
                self._thread.start()

    def keep(self, name: str) -> None:
        """Leaves a file that was to be deleted, if it is still there; afterwards it is not being deleted."""
        with self._deleting, self._changed:
            self._names.pop(name, None)

    def close(self, timeout: float = 5.0) -> None:
        """Ends it, when all is deleted, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or not self._names, timeout)
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._names or self._closed)
                if self._closed:
                    return
            with self._deleting:
                with self._changed:
                    name = next(iter(self._names), None)
                try:
                    if name is not None and self._may():
                        self._files.delete(name)
                except MailboxError as error:
                    log.debug("%s was not deleted: %s", name, error)
                with self._changed:
                    self._names.pop(name or "", None)
                    self._changed.notify_all()


class SharedBlobs:
    """The blobs of a folder to which every site writes, as the one that keeps the run sees them; see `Store`."""

    def __init__(
        self, files: SharedFiles, sweeper: Sweeper, clock: Callable[[], float], max_blob: int = MAX_BLOB
    ) -> None:
        self._blobs, self._files = BlobStore(files.url, max_blob, files), files
        self._sweeper, self._clock = sweeper, clock
        self._seen: dict[str, float] = {}
        self.max_blob = max_blob

    def put(self, blob: Bytes) -> str:
        return self._blobs.put(blob)

    def get(self, key: str) -> bytes:
        return self._blobs.get(key)

    def size(self, key: str) -> int:
        """See `Store`. What is asked for is needed again."""
        self._seen.pop(key, None)
        self._sweeper.keep(f"blobs/{key}")
        return self._blobs.size(key)

    def retain(self, keys: Collection[str], age: float = 600.0, may: Callable[[], bool] = lambda: True) -> int:
        """Drops all blobs but those named, and those that were not there to be dropped for so many seconds."""
        now, there = self._clock(), self._files.names("blobs")
        self._seen = {key: self._seen.get(key, now) for key in there if key not in keys}
        gone = [f"blobs/{key}" for key, since in self._seen.items() if now >= since + age]
        if not may():
            return 0
        self._sweeper.delete(gone)
        return len(gone)
