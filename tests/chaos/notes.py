"""What processes write down as it happens, a line of JSON each; it is there when they are
killed.
"""

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

    def write(self, what: str, **about: object) -> None:
        os.write(
            self._file,
            (json.dumps({"what": what, "at": time.monotonic(), **about}) + "\n").encode(),
        )


def news(path: Path, position: int = 0) -> tuple[list[Note], int]:
    """The whole notes in a file from a position on, and where the next begins; none where there is
    no file yet.
    """
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], position + len(whole)


def read(path: Path) -> list[Note]:
    return news(path)[0]
