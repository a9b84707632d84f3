"""Notes of processes on what happens, a line of JSON each, which survive a kill."""

import json
import os
import time
from pathlib import Path
from typing import Any

Note = dict[str, Any]


class Notebook:
    """Writes notes to a file. Times are of the machine's monotonic clock, which all processes
    share.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, event: str, **about: object) -> None:
        note = {"what": event, "at": time.monotonic(), **about}
        line = json.dumps(note) + "\n"
        os.write(self._file, line.encode())


def news(path: Path, position: int = 0) -> tuple[list[Note], int]:
    """The complete notes in a file from a position on, and the position of the next; none if there
    is no file yet.
    """
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        content = file.read()
    complete_lines = content[: content.rfind(b"\n") + 1]
    notes = [json.loads(line) for line in complete_lines.splitlines()]
    return notes, position + len(complete_lines)


def read(path: Path) -> list[Note]:
    return news(path)[0]
