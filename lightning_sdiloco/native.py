"""Compiles a file of C on the machine where it runs, while others go on without it.

[Note: compiled in the background] What is written in C is also written with operations of torch, which are the
reference, and gives the same bits. So nothing waits for it: the first call starts the C compiler if this machine has
one, later calls find the library or do without, and ranks need not agree on it. The library stays in the user's cache,
so that a machine compiles once. It shows on a sample that it gives the bits of the reference before it is used.

[Note: what is loaded] A library runs as whoever loads it, so nobody else may have written it: its folder and its file
belong to this user, and no other one can write there. Its name ends with the hash of its bytes, since loading one that
was cut short ends the process: such a one is deleted, and built again.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_COMPILERS = ("cc", "gcc", "clang")

# Products and sums round one after the other, as operations of torch do.
_FLAGS = ("-O3", "-std=c99", "-ffp-contract=off", "-fPIC", "-shared")


class NativeLibrary:
    """A file of C as a library. See [Note: compiled in the background]."""

    def __init__(
        self,
        source: Path,
        functions: Mapping[str, Sequence[Any]],
        is_proven: Callable[[ctypes.CDLL], bool],
        folder: Path | None = None,
    ) -> None:
        self._source, self._functions, self._is_proven, self._folder = source, functions, is_proven, folder
        self._compiler: subprocess.Popen[bytes] | None = None
        self._library: ctypes.CDLL | None = None
        self._is_missing = False

    def get(self) -> ctypes.CDLL | None:
        """Returns the library, or None if it is not there, or not yet. It does not wait."""
        if self._library is None and not self._is_missing:
            try:
                self._look()
            except OSError as error:  # a folder of somebody else, a cache that cannot be written, ...
                self._is_missing = True
                _warn_of_cache(str(error))
            except (RuntimeError, AttributeError) as error:  # no home, ...
                self._do_without(str(error))
        return self._library

    def _look(self) -> None:
        # Threads may do this at the same time: then one thing is done twice, and the last one stays.
        name = self._name()
        with _own(self._folder or Path.home() / ".cache" / "lightning_sdiloco") as folder:
            if (path := _whole(folder, name)) is not None:
                self._load(path)
            elif self._compiler is None:
                self._compile(folder, name)
            elif self._compiler.poll():
                self._do_without(f"the C compiler ended with {self._compiler.returncode}")

    def _name(self) -> str:
        """Returns the name of the library: another source, compiler option or kind of machine has another one."""
        described = "\0".join((self._source.read_text(), *_FLAGS, platform.system(), platform.machine()))
        return f"{self._source.stem}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"

    def _compile(self, folder: Path, name: str) -> None:
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None or not sys.executable:
            self._do_without(f"there is no C compiler ({', '.join(_COMPILERS)})")
            return
        # A process of its own: it also ends what it began when this one ends before.
        command = [sys.executable, "-I", __file__, name, compiler, *_FLAGS, str(self._source.absolute())]
        quiet = subprocess.DEVNULL
        self._compiler = subprocess.Popen(command, cwd=folder, stdin=quiet, stdout=quiet, stderr=quiet)

    def _load(self, path: Path) -> None:
        if self._compiler is not None:
            self._compiler.poll()  # or it would stay in the table of processes
        library = ctypes.CDLL(str(path))
        for name, types in self._functions.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(types), None
        if self._is_proven(library):
            self._library = library
        else:
            self._do_without("it gives other bits")

    def _do_without(self, reason: str) -> None:
        self._is_missing = True
        _log.info("%s is not used: %s. Operations of torch do the same, and take longer.", self._source.name, reason)


@contextmanager
def _own(folder: Path) -> Iterator[Path]:
    """Opens a folder that is this user's alone, and makes it so if it is not there: see [Note: what is loaded]."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(handle)
        if about.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to user {about.st_uid}, and this is user {os.geteuid()}")
        os.fchmod(handle, 0o700)
        held = Path(f"/proc/self/fd/{handle}")
        yield held if held.exists() else folder
    finally:
        os.close(handle)


def _whole(folder: Path, name: str) -> Path | None:
    """Returns the library of that name if it is there. One that was cut short, or is not this user's, is deleted."""
    for path in folder.glob(f"{name}-*.so"):
        if path.stem == f"{name}-{_hash_of_own(path)}":
            return path
        path.unlink(missing_ok=True)
    return None


def _hash_of_own(path: Path) -> str | None:
    """Returns the hash of a file that only this user can write; None of any other."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        is_private = about.st_uid == os.geteuid() and about.st_nlink == 1 and not about.st_mode & 0o022
        return hashlib.sha256(file.read()).hexdigest() if stat.S_ISREG(about.st_mode) and is_private else None


@functools.cache
def _warn_of_cache(reason: str) -> None:
    _log.warning(
        "What is compiled in C is not used: %s. Operations of torch do the same, and take longer. Its folder,"
        " ~/.cache/lightning_sdiloco, must be yours, and writable: delete it, or set HOME to a folder that is.",
        reason,
    )


def _build(name: str, *command: str) -> int:
    """Compiles into the current folder. The library appears under its name when all of it is on the disk."""
    part = Path(f"{name}.{uuid.uuid4().hex}")
    try:
        if code := subprocess.call([*command, "-o", str(part)]):
            return code
        with part.open("rb") as file:
            os.fchmod(file.fileno(), 0o700)
            os.fsync(file.fileno())
            part.rename(f"{name}-{hashlib.sha256(file.read()).hexdigest()}.so")
        return 0
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(_build(*sys.argv[1:]))
