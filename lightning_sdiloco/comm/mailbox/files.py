"""Files of a store, in a folder of this machine or behind fsspec: written whole under their name, or not at all."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_sdiloco.comm.mailbox.base import Bytes, Missing, NoSpace

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Files(Protocol):
    """Files by their names. A name once given to bytes is not given to others."""

    @property
    def spool(self) -> Path:
        """The folder for what is being written, from which `move_in` takes it."""

    def size(self, name: str) -> int:
        """Returns the size of a file."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes of a file between two offsets."""

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files in a folder."""

    def move_in(self, spooled: Path, name: str) -> None:
        """Gives a name to a file that is complete and synced; if another has the name, it has the same bytes."""

    def delete(self, name: str) -> None:
        """Deletes a file, if it is there."""


def files_at(url: str) -> Files:
    """Returns the files in a folder, or under a URL that fsspec knows, such as ``s3://bucket/run``."""
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"The store {url!r} cannot be opened: {error}. Give a folder, or a URL of fsspec.") from error
    return LocalFiles(Path(root)) if isinstance(filesystem, LocalFileSystem) else RemoteFiles(filesystem, root, url)


@contextmanager
def telling_full_disks(where: object) -> Iterator[None]:
    """Turns the error of a full disk into one of the mailbox."""
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


class LocalFiles:
    """A folder of this machine, or one that it has mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spool = folder / "incomplete"
        self.spool.mkdir(parents=True, exist_ok=True)

    def size(self, name: str) -> int:
        with self._of(name):
            return (self._folder / name).stat().st_size

    def read(self, name: str, start: int, end: int) -> bytes:
        with self._of(name), (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def names(self, folder: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(self._folder / folder) if entry.is_file())
        return []

    def move_in(self, spooled: Path, name: str) -> None:
        target = self._folder / name
        target.parent.mkdir(exist_ok=True)
        spooled.replace(target)
        sync_folder(target.parent)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def _of(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise Missing(f"{self._folder / name} is not there.") from None


class RemoteFiles:
    """Objects behind fsspec, of a kind that appear whole, such as those of S3."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._filesystem, self._root = filesystem, root.rstrip("/")
        self.spool = Path(tempfile.mkdtemp(prefix="sdiloco-"))

    def size(self, name: str) -> int:
        with self._of(name):
            return int(self._filesystem.info(self._path(name))["size"])

    def read(self, name: str, start: int, end: int) -> bytes:
        with self._of(name):
            return bytes(self._filesystem.cat_file(self._path(name), start=start, end=end))

    def names(self, folder: str) -> list[str]:
        self._filesystem.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            listed = self._filesystem.ls(self._path(folder), detail=False)
            return sorted(str(path).rpartition("/")[2] for path in listed)
        return []

    def move_in(self, spooled: Path, name: str) -> None:
        self._filesystem.put_file(str(spooled), self._path(name))
        spooled.unlink()

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _of(self, name: str) -> Iterator[None]:
        self._filesystem.invalidate_cache()
        try:
            yield
        except FileNotFoundError:
            raise Missing(f"{self._path(name)} is not there.") from None
