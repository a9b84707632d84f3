"""A file system with little room, which a test can fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mounts one on a folder, for the time of a ``with`` block; skips the test where that is not
    allowed.
    """
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "sdiloco", folder]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("to mount a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, room: int = 0) -> Path:
    """Writes a file that leaves so many bytes of room, and returns it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while (state := os.statvfs(disk)).f_bavail * state.f_frsize > room:
            file.write(bytes(4096))
    return filler
