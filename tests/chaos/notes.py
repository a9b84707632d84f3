"""What processes write down as it happens, a line of JSON each; it is there when they are killed."""

import json
import os
import time
from pathlib import Path
from typing import Any

Note = dict[str, Any]


class Notebook:
    """Writes notes to a file. Times are of the machine's monotonic clock, which all processes share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, what: str, **about: object) -> None:
        """Writes a note, at once and whole."""
        os.write(self._file, (json.dumps({"what": what, "at": time.monotonic(), **about}) + "\n").encode())


class Reader:
    """Reads the notes in a file, which may not be there yet, as they come."""

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


def read(path: Path) -> list[Note]:
    """Reads the notes in a file."""
    return Reader(path).new()
