"""Starts a hub and sites whose clocks show a wrong time, which can be set while they run."""

import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.faults import HUB
from tests.chaos.notes import Notebook, read
from tests.chaos.processes import serve, train
from tests.chaos.world import Process, World

_SHIM = Path(__file__).with_name("wrong_clock.c")


def library(folder: Path) -> Path:
    """Compiles what stands in front of the clock; skips the test where that cannot be done."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a clock that is wrong in one process needs Linux and a C compiler")
    made = folder / "wrong_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, _SHIM, "-ldl", "-lpthread"], check=True)
    return made


class Started:
    """A process of a command, with the names that `multiprocessing` has."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        self._process.wait(timeout)


class Clocked(World):
    """A hub and sites, some of which have a clock that can be set. What others measure by stays."""

    def __init__(self, folder: Path, sites: Sequence[str], seconds: float, wrong: Sequence[str]) -> None:
        super().__init__(folder, sites, seconds)
        self._wrong, self._library = wrong, library(folder)

    def set_clocks(self, seconds: int) -> None:
        """Makes the wrong clocks show so many seconds more than it is."""
        for name in self._wrong:
            path = self.folder / f"{name}.clock"
            # In place: the process has it in its memory.
            with path.open("r+b" if path.exists() else "wb") as file:
                file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def off(self, name: str) -> float:
        """By how many seconds the clock of a process was off when it last told."""
        note = read(self.folder / f"{name}.clocks")[-1]
        return float(note["shows"] - (time.time() - (time.monotonic() - note["at"])))

    def started(self, name: str) -> Process:
        own = dict(os.environ)
        if name in self._wrong:
            own |= {"LD_PRELOAD": str(self._library), "WRONG_CLOCK": str(self.folder / f"{name}.clock")}
        file = self.folder / f"{name}.arguments"
        file.write_bytes(pickle.dumps(self.told(name)))
        return Started(subprocess.Popen([sys.executable, "-m", __name__, name, str(file)], env=own))


def tell_time(file: Path) -> None:
    """Writes down what the clock of this process shows, beside the monotonic one."""
    notebook = Notebook(file)
    while True:
        notebook.write("clock", shows=time.time())
        time.sleep(0.2)


if __name__ == "__main__":
    threading.Thread(target=tell_time, args=(Path(sys.argv[2]).with_suffix(".clocks"),), daemon=True).start()
    (serve if sys.argv[1] == HUB else train)(*pickle.loads(Path(sys.argv[2]).read_bytes()))
