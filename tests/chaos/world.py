"""A hub and sites as processes on this machine, some of which are stopped, killed, started again
or cut off.
"""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.links import Links
from lightning_sdiloco.federation.keys import add_keys, init_keys
from tests.chaos.faults import ALL, FORMS, HUB, STAGES, Fault
from tests.chaos.notes import Note, Notebook, news, read
from tests.chaos.processes import RUN, Place, serve, train

MBIT_S = 100e6
ONE_WAY_DELAY = 0.025
_FLIGHT = 25.0  # seconds within which a site comes to every stage of a flight

Process = Any  # one of `multiprocessing`, or an object with pid, exitcode, kill and join


class World:
    """The processes of a federation, for the time of a ``with`` block.

    Sites end after so many steps, or with the run. With links open, the hub is number 0 and each
    site behind a NAT.
    """

    def __init__(
        self,
        folder: Path,
        sites: Sequence[str],
        seconds: float,
        steps: int = -1,
        links: Links | None = None,
        **choices: Any,
    ) -> None:
        self.folder = folder
        self.sites = tuple(sites)
        self._links = links
        names = (HUB, *sites)
        self._number = {name: number for number, name in enumerate(names)}
        self.processes: dict[str, Process] = {}
        self.faults = Notebook(folder / "faults.jsonl")
        self._positions = dict.fromkeys(names, 0)  # in the files of notes, of what was not read yet
        init_keys(folder / "keys", RUN)
        for site in sites:
            add_keys(folder / "keys", site)
        *ports, spare_port = free_ports(1 + len(names))
        # The address of the hub, and another for a move, with the same ledger and store.
        if links is None:
            self.hubs = [f"127.0.0.1:{port}" for port in (ports[0], spare_port)]
        else:
            self.hubs = [f"{links.address(0)}:{port}" for port in (29400, 29401)]
        choices = {"lease": 2.0, **choices}
        common = Place(folder, ",".join(self.hubs), 0, seconds, steps, choices=choices)
        namespaces: Sequence[str | None] = [None] * len(names) if links is None else links.names
        self.places = {
            name: replace(common, port=port, namespace=namespace)
            for name, port, namespace in zip(names, ports, namespaces, strict=True)
        }
        # They begin with the modules that they import, and without a thread of gRPC.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.chaos.processes"])

    def __enter__(self) -> "World":
        if self._links is not None:
            for site in self.sites:
                self._change(site, nat=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def told(self, name: str) -> tuple[Any, ...]:
        """The arguments of `train`, or of `serve` for the hub."""
        place = self.places[name]
        if name == HUB:
            return len(self.sites), replace(place, hub=self.hubs[0])
        return name, place

    def started(self, name: str) -> Process:
        target = serve if name == HUB else train
        process = self.context.Process(target=target, args=self.told(name))
        process.start()
        return process

    def start(self, *names: str) -> None:
        for name in names:
            self.processes[name] = self.started(name)

    def begin(self, fault: Fault) -> None:
        """Lets a fault happen. One at a stage of a flight does when the site comes to it."""
        if fault.kind in STAGES:
            self._kill_at_stage(fault)
        self.faults.write("begin", kind=fault.kind, victim=fault.victim)
        match fault.kind:
            case "kill" | "lose" | "blackout" | "move":
                for name in self._victims(fault):
                    self.kill(name)
                checkpoints = self.folder / fault.victim
                if fault.kind == "lose" and checkpoints.exists():
                    checkpoints.rename(self.folder / f"{fault.victim}.lost.{time.monotonic_ns()}")
            case "stop":
                self.signal(fault.victim, signal.SIGSTOP)
            case "wrong":
                self.signal(fault.victim, signal.SIGUSR2)
            case "cut" | "cut_5" | "cut_15" | "cut_60":
                self._change(fault.victim, cut_out=True, cut_in=True)
            case "cut_out" | "cut_in" | "nat":
                self._change(fault.victim, **{fault.kind: True})
            case "loss":
                self._change(fault.victim, loss=0.001 + 0.019 * fault.strength)
            case "slow":
                self._change(fault.victim, rate=1e6 / 8)

    def _kill_at_stage(self, fault: Fault) -> None:
        trap = self.folder / f"{fault.victim}.{fault.kind}"
        trap.touch()
        # Without a flight, as after the end of a run, it is killed all the same.
        self.processes[fault.victim].join(_FLIGHT)
        self.kill(fault.victim)
        trap.unlink(missing_ok=True)

    def end(self, fault: Fault) -> None:
        """Repairs what a fault has done."""
        self.faults.write("end", kind=fault.kind, victim=fault.victim)
        if fault.kind == "move":
            self.hubs.reverse()
        if FORMS[fault.kind].kills:
            self.start(*self._victims(fault))
        elif fault.kind == "stop":
            self.signal(fault.victim, signal.SIGCONT)
        elif FORMS[fault.kind].needs_links and fault.kind != "nat":
            self._change(fault.victim, cut_out=False, cut_in=False, loss=0.0, rate=MBIT_S / 8)

    def _victims(self, fault: Fault) -> tuple[str, ...]:
        return (HUB, *self.sites) if fault.victim == ALL else (fault.victim,)

    def kill(self, name: str) -> None:
        """Kills a process, and those that it has started."""
        process = self.processes.pop(name)
        pids = children(process.pid)
        process.kill()
        process.join()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)

    def _change(self, site: str, **link: Any) -> None:
        assert self._links is not None, "only links can be cut"
        self._links.change(self._number[site], **link)

    def dead(self) -> list[str]:
        """The processes that have ended by themselves, with an error."""
        return [name for name, process in self.processes.items() if process.exitcode]

    def said(self, name: str) -> str:
        """The last output of a process."""
        path = self.folder / f"{name}.log"
        return path.read_text()[-4000:] if path.exists() else ""

    def notes(self, name: str) -> list[Note]:
        return read(self.folder / f"{name}.jsonl")

    def news(self, name: str) -> list[Note]:
        """The notes of a process since the last call."""
        path = self.folder / f"{name}.jsonl"
        notes, position = news(path, self._positions[name])
        self._positions[name] = position
        return notes


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return list(map(int, path.read_text().split())) if path.exists() else []


def free_ports(number: int) -> list[int]:
    """Ports that nobody uses, all taken at the same time: one looked for after another may be
    found twice.
    """
    ports = []
    with ExitStack() as listeners:
        for _ in range(number):
            listener = listeners.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(int(listener.getsockname()[1]))
    return ports
