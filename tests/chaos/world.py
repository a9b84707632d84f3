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

Process = Any  # one of `multiprocessing`, or what has pid, exitcode, kill and join


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
        self._heard = dict.fromkeys(names, 0)
        init_keys(folder / "keys", RUN)
        for site in sites:
            add_keys(folder / "keys", site)
        *ports, other = free_ports(1 + len(names))
        # Where the hub is, and where it may be moved to, with the same ledger and store.
        address, own = (
            ("127.0.0.1", (ports[0], other))
            if links is None
            else (links.address(0), (29400, 29401))
        )
        self.hubs = [f"{address}:{port}" for port in own]
        of_all = Place(
            folder, ",".join(self.hubs), 0, seconds, steps, choices={"lease": 2.0, **choices}
        )
        self.places = {
            name: replace(of_all, port=port, namespace=links and links.names[number])
            for number, (name, port) in enumerate(zip(names, ports, strict=True))
        }
        # They begin with what they import, and with no thread of gRPC.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.chaos.processes"])

    def __enter__(self) -> "World":
        for site in self.sites if self._links is not None else ():
            self._change(site, nat=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def told(self, name: str) -> tuple[Any, ...]:
        """The arguments of `train`, or of `serve` for the hub."""
        place = self.places[name]
        return (len(self.sites), replace(place, hub=self.hubs[0])) if name == HUB else (name, place)

    def started(self, name: str) -> Process:
        process = self.context.Process(target=serve if name == HUB else train, args=self.told(name))
        process.start()
        return process

    def start(self, *names: str) -> None:
        self.processes |= {name: self.started(name) for name in names}

    def begin(self, fault: Fault) -> None:
        """Lets a fault happen. One at a stage of a flight does when the site comes to it."""
        victims = (HUB, *self.sites) if fault.victim == ALL else (fault.victim,)
        change = None
        if fault.kind in STAGES:
            armed = self.folder / f"{fault.victim}.{fault.kind}"
            armed.touch()
            # Where there is no flight, as after the end of a run, it is killed all the same.
            self.processes[fault.victim].join(_FLIGHT)
            self.kill(fault.victim)
            armed.unlink(missing_ok=True)
        self.faults.write("begin", kind=fault.kind, victim=fault.victim)
        match fault.kind:
            case "kill" | "lose" | "blackout" | "move":
                for name in victims:
                    self.kill(name)
                if fault.kind == "lose" and (checkpoints := self.folder / fault.victim).exists():
                    checkpoints.rename(self.folder / f"{fault.victim}.lost.{time.monotonic_ns()}")
            case "stop":
                self.signal(fault.victim, signal.SIGSTOP)
            case "wrong":
                self.signal(fault.victim, signal.SIGUSR2)
            case "cut" | "cut_5" | "cut_15" | "cut_60":
                change = {"cut_out": True, "cut_in": True}
            case "cut_out" | "cut_in" | "nat":
                change = {fault.kind: True}
            case "loss":
                change = {"loss": 0.001 + 0.019 * fault.strength}
            case "slow":
                change = {"rate": 1e6 / 8}
        if change is not None:
            self._change(fault.victim, **change)

    def end(self, fault: Fault) -> None:
        """Mends what a fault has done."""
        self.faults.write("end", kind=fault.kind, victim=fault.victim)
        if fault.kind == "move":
            self.hubs.reverse()
        if FORMS[fault.kind].kills:
            self.start(*((HUB, *self.sites) if fault.victim == ALL else (fault.victim,)))
        elif fault.kind == "stop":
            self.signal(fault.victim, signal.SIGCONT)
        elif FORMS[fault.kind].needs_links and fault.kind != "nat":
            self._change(fault.victim, cut_out=False, cut_in=False, loss=0.0, rate=MBIT_S / 8)

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
        """Who has ended by itself, with an error."""
        return [name for name, process in self.processes.items() if process.exitcode]

    def said(self, name: str) -> str:
        """The last that a process has printed."""
        path = self.folder / f"{name}.log"
        return path.read_text()[-4000:] if path.exists() else ""

    def notes(self, name: str) -> list[Note]:
        return read(self.folder / f"{name}.jsonl")

    def news(self, name: str) -> list[Note]:
        """What it has written down since the last time."""
        notes, self._heard[name] = news(self.folder / f"{name}.jsonl", self._heard[name])
        return notes


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return list(map(int, path.read_text().split())) if path.exists() else []


def free_ports(number: int) -> list[int]:
    """Ports that nobody uses, all taken at the same time: one looked for after another may be
    found twice.
    """
    with ExitStack() as stack:
        listening = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [int(one.getsockname()[1]) for one in listening]
