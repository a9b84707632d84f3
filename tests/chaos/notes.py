"""What processes write down as it happens, a line of JSON each; it is there when they are killed."""

import json
import os
import time
from pathlib import Path
from typing import Any

Note = dict[str, Any]


class Notebook:
    """Writes notes to a file. Times are of the machine's monotonic clock, which all processes share.

    Args:
        path: The file; what it holds stays.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, what: str, **about: object) -> None:
        """Writes a note, at once and whole."""
        os.write(self._file, (json.dumps({"what": what, "at": time.monotonic(), **about}) + "\n").encode())


def read(path: Path) -> list[Note]:
    """Reads the notes in a file; one that a process was killed over is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


class Reader:
    """Reads the notes in a file as they come.

    Args:
        path: The file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def new(self) -> list[Note]:
        """Returns the notes that have come since the last time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def waited_for_processor() -> float:
    """Returns the seconds that the calling thread has been ready to run, and was not let to."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def stolen() -> list[float]:
    """Returns the seconds that the host has given each processor of this virtual machine to others, as they wanted."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    return [int(fields[8]) / os.sysconf("SC_CLK_TCK") for fields in lines[1:]]
