"""Compiles a file of C on the machine where it runs, while others go on without it.

[Note: compiled in the background] What is written in C is also written with operations of torch, which are the
reference, and gives the same bits. So nothing waits for it: the first call starts the C compiler if this machine has
one, later calls find the library or do without, and ranks need not agree on it. The library stays in the user's cache,
so that a machine compiles once. It shows on a sample that it gives the bits of the reference before it is used.
"""

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_COMPILERS = ("cc", "gcc", "clang")

# Products and sums round one after the other, as operations of torch do.
_FLAGS = ("-O3", "-std=c99", "-ffp-contract=off", "-fPIC", "-shared")

# The library appears under its name when it is complete: other processes look for it there.
_COMPILE = 'library=$1; part=$2; shift 2; "$@" -o "$part" && mv -f "$part" "$library"'


class NativeLibrary:
    """A file of C as a library. See [Note: compiled in the background].

    Args:
        source: The file of C.
        functions: The types of the arguments of each function; none returns anything.
        is_proven: Tells whether the library does what it should.
        folder: Where libraries are kept, by default in the user's cache.
    """

    def __init__(
        self,
        source: Path,
        functions: Mapping[str, Sequence[Any]],
        is_proven: Callable[[ctypes.CDLL], bool],
        folder: Path | None = None,
    ) -> None:
        self._source, self._functions, self._is_proven, self._folder = source, functions, is_proven, folder
        self._path: Path | None = None
        self._compiler: subprocess.Popen[bytes] | None = None
        self._library: ctypes.CDLL | None = None
        self._is_missing = False

    def get(self) -> ctypes.CDLL | None:
        """Returns the library, or None if it is not there, or not yet. It does not wait."""
        if self._library is None and not self._is_missing:
            try:
                self._look()
            except (OSError, RuntimeError, AttributeError) as error:  # no home, a cache that cannot be written, ...
                self._do_without(str(error))
        return self._library

    def _look(self) -> None:
        # Threads may do this at the same time: then one thing is done twice, and the last one stays.
        if self._path is None:
            self._path = self._place()
        if self._path.exists():
            self._load(self._path)
        elif self._compiler is None:
            self._compile(self._path)
        elif self._compiler.poll():
            self._do_without(f"the C compiler ended with {self._compiler.returncode}")

    def _place(self) -> Path:
        """Returns the path of the library: another source, compiler option or kind of machine has another one."""
        described = "\0".join((self._source.read_text(), *_FLAGS, platform.system(), platform.machine()))
        name = f"{self._source.stem}-{hashlib.sha256(described.encode()).hexdigest()[:16]}.so"
        return (self._folder or Path.home() / ".cache" / "lightning_sdiloco") / name

    def _compile(self, path: Path) -> None:
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None or shutil.which("sh") is None:
            self._do_without(f"there is no C compiler ({', '.join(_COMPILERS)})")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        command = ["sh", "-c", _COMPILE, "sh", str(path), str(part), compiler, *_FLAGS, str(self._source)]
        quiet = subprocess.DEVNULL
        self._compiler = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)

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
