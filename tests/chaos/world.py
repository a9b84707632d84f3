"""A hub and sites as processes on this machine, some of which are stopped, killed, started again or cut off."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.links import Links
from tests.chaos.cast import Federated, Process
from tests.chaos.faults import ALL, HUB, KILLS, STAGE, Fault
from tests.chaos.notes import Note, Notebook, Reader, read

MBIT_S, ONE_WAY_DELAY = 100e6, 0.025
_FLIGHT = 25.0  # seconds within which a site comes to every stage of a flight


class World:
    """Processes, for the time of a ``with`` block.

    Args:
        folder: Where they write.
        sites: The names of the sites.
        cast: Starts them.
        links: The slow links, open, with the hub as number 0 and the sites behind a NAT each; None: the loopback.

    Attributes:
        sites: The names of the sites.
        processes: Those that are up, by name.
        faults: Writes down what is done to them.
    """

    def __init__(self, folder: Path, sites: Sequence[str], cast: Federated, links: Links | None = None) -> None:
        self.folder, self.sites, self._cast, self._links = folder, tuple(sites), cast, links
        names = (HUB, *sites)
        self._number = {name: number for number, name in enumerate(names)}
        self.processes: dict[str, Process] = {}
        self.faults = Notebook(folder / "faults.jsonl")
        self._readers = {name: Reader(folder / f"{name}.jsonl") for name in names}

    @staticmethod
    def federated(
        folder: Path, sites: Sequence[str], seconds: float, steps: int = -1, links: Links | None = None
    ) -> "World":
        """Makes one of a federation; the arguments are those of `Federated`."""
        return World(folder, sites, Federated(folder, sites, seconds, steps, links), links)

    def __enter__(self) -> "World":
        if self._links is not None:
            for site in self.sites:
                self._links.change(self._number[site], nat=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def start(self, *names: str) -> None:
        """Starts the hub or sites."""
        for name in names:
            self.processes[name] = self._cast.start(name)

    def begin(self, fault: Fault) -> None:
        """Lets a fault happen. One at a stage of a flight does when the site comes to it."""
        if fault.kind.startswith(STAGE):
            self._kill_at_stage(fault)
            return
        self.faults.write("begin", kind=fault.kind, victim=fault.victim)
        match fault.kind:
            case "kill" | "lose" | "blackout" | "move":
                for name in self._victims(fault):
                    process = self.processes.pop(name)
                    process.kill()
                    process.join()
                if fault.kind == "lose":
                    checkpoints = self.folder / fault.victim
                    if checkpoints.exists():
                        checkpoints.rename(self.folder / f"{fault.victim}.lost.{time.monotonic_ns()}")
            case "stop":
                self.signal(fault.victim, signal.SIGSTOP)
            case "cut" | "cut_5" | "cut_15" | "cut_60":
                self._change(fault.victim, cut_out=True, cut_in=True)
            case "cut_out" | "cut_in":
                self._change(fault.victim, **{fault.kind: True})
            case "loss":
                self._change(fault.victim, loss=0.001 + 0.019 * fault.strength)
            case "slow":
                self._change(fault.victim, rate=1e6 / 8)
            case "nat":
                self._change(fault.victim, nat=True)

    def end(self, fault: Fault) -> None:
        """Mends what a fault has done."""
        self.faults.write("end", kind=fault.kind, victim=fault.victim)
        if fault.kind == "move":
            self._cast.move()
        match fault.kind:
            case kind if kind in KILLS or kind.startswith(STAGE):
                self.start(*self._victims(fault))
            case "stop":
                self.signal(fault.victim, signal.SIGCONT)
            case "nat":
                pass
            case _:
                self._change(fault.victim, cut_out=False, cut_in=False, loss=0.0, rate=MBIT_S / 8)

    def _kill_at_stage(self, fault: Fault) -> None:
        armed = self.folder / f"{fault.victim}.{fault.kind}"
        armed.touch()
        process = self.processes.pop(fault.victim)
        process.join(_FLIGHT)
        # Where there is no flight, as after the end of a run.
        reached = process.exitcode is not None
        process.kill()
        process.join()
        armed.unlink(missing_ok=True)
        self.faults.write("begin", kind=fault.kind, victim=fault.victim, reached=reached)

    def _victims(self, fault: Fault) -> tuple[str, ...]:
        return (HUB, *self.sites) if fault.victim == ALL else (fault.victim,)

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process."""
        pid = self.processes[name].pid
        assert pid is not None, "it has been started"
        os.kill(pid, number)

    def _change(self, site: str, **link: Any) -> None:
        assert self._links is not None, "only links can be cut"
        self._links.change(self._number[site], **link)

    def dead(self) -> list[str]:
        """Returns who has ended by itself, with an error."""
        return [name for name, process in self.processes.items() if process.exitcode]

    def said(self, name: str) -> str:
        """Returns the last that a process has said."""
        path = self.folder / f"{name}.log"
        return path.read_text()[-4000:] if path.exists() else ""

    def notes(self, name: str) -> list[Note]:
        """Returns all that a process has written down."""
        return read(self.folder / f"{name}.jsonl")

    def news(self, name: str) -> list[Note]:
        """Returns what it has written down since the last time."""
        return self._readers[name].new()
