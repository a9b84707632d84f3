"""Signs of life of the site that keeps a run in a folder: who reads them goes by its own clock alone."""

import contextlib
from collections.abc import Callable, Collection
from typing import NamedTuple

from lightning_sdiloco.comm.mailbox.base import Altered, Missing
from lightning_sdiloco.comm.mailbox.files import Files
from lightning_sdiloco.comm.mailbox.sealed import seal, unseal
from lightning_sdiloco.comm.mailbox.shared_files import Sweeper
from lightning_sdiloco.errors import Malformed

_FOLDER = "pulse"
_LARGEST = 1 << 20
_TRIED = 8  # files that may be no signs of life, before others are looked at


class Pulse(NamedTuple):
    """A sign of life."""

    turn: int
    number: int
    name: str
    run: str
    over: bool
    here: Collection[str]


class Pulses:
    """Gives signs of life."""

    def __init__(self, files: Files, sweeper: Sweeper, turn: int, name: str, run: str) -> None:
        self._files, self._sweeper, self._turn = files, sweeper, turn
        self._says = {"name": name, "run": run}
        self._count = 0

    def begin(self) -> None:
        """Deletes those of earlier turns."""
        self._sweeper.delete(
            [f"{_FOLDER}/{name}" for name in self._files.names(_FOLDER) if _turn_of(name) < self._turn]
        )

    def beat(self, here: Collection[str], over: bool = False) -> None:
        """Gives one."""
        data = seal({**self._says, "over": over, "here": list(here)})
        self._files.create(self._name(self._count), data)
        if self._count:
            self._sweeper.delete([self._name(self._count - 1)])
        self._count += 1

    def _name(self, count: int) -> str:
        return f"{_FOLDER}/{self._turn:012d}-{count:012d}"


class PulseWatch:
    """Looks for signs of life."""

    def __init__(self, files: Files, clock: Callable[[], float]) -> None:
        self._files, self._clock = files, clock
        self._name = ""
        self._since = clock()
        self.last: Pulse | None = None

    def begin(self) -> None:
        """Begins to count anew for how long there was none."""
        self._since = self._clock()

    @property
    def silent_for(self) -> float:
        """For how many seconds there was no new one."""
        return self._clock() - self._since

    def look(self) -> Pulse | None:
        """Returns the last one."""
        newer = sorted(name for name in self._files.names(_FOLDER) if name > self._name and _turn_of(name) >= 0)
        for name in newer[: -_TRIED - 1 : -1]:
            # Of one that is gone already, the next one is there, or will be.
            with contextlib.suppress(Missing, Altered, Malformed):
                self.last = _read(name, self._files.read(f"{_FOLDER}/{name}", 0, _LARGEST))
                self._name, self._since = name, self._clock()
                break
        return self.last


def _read(name: str, data: bytes) -> Pulse:
    header, _ = unseal(data, name)
    turn, _, number = name.partition("-")
    here = [str(one) for one in header.get("here", [])]
    return Pulse(
        int(turn), int(number), str(header.get("name")), str(header.get("run")), header.get("over") is True, here
    )


def _turn_of(name: str) -> int:
    turn, _, count = name.partition("-")
    return int(turn) if turn.isdecimal() and count.isdecimal() else -1
