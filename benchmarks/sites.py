"""Runs a method in several sites, one rank in each, and tells what it took: in this process or in a
peer's Python.

As a command it reads jobs as JSON and prints what was found, a line for each. A peer's Python need
not have Lightning.
"""

import ctypes
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from benchmarks.case import Case
from benchmarks.learning import LearningCase
from benchmarks.links import Links
from benchmarks.models import Size
from benchmarks.peers.loops import LOOPS, Loop, Rank
from benchmarks.sampler import Sample, peak, sampled
from benchmarks.stamps import forget_peak_memory, peak_memory, sent_so_far
from tests.ranks import RankError, run_processes

_CLONE_NEWUTS = 0x04000000

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(os.environ.get("PEERS_DIR", ROOT / ".peers")).resolve()
"""The folder in which benchmarks/peers/install.sh put the virtual environments of the peers."""

ENVIRONMENTS = {"accelerate": "accelerate", "torchft": "torchft"}
"""The methods that need a Python of their own."""

Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A method, and the links it runs over.

    Attributes:
        method: Its name.
        case: What is trained.
        sites: Number of sites, with one rank in each.
        mbit_s: Bandwidth of every link; None: this machine's loopback, without namespaces.
        first: Steps that do not count.
        counted: Steps that do.
        one_way_delay: Seconds between two sites.
        seconds: When to give up.
        sampled: Whether the interface is looked at all the time.
    """

    method: str
    case: Case
    sites: int
    mbit_s: float | None
    first: int
    counted: int
    one_way_delay: float = 0.025
    seconds: float = 900.0
    sampled: bool = False

    @staticmethod
    def read(text: str) -> "Job":
        fields = json.loads(text)
        case = fields.pop("case")
        kind = LearningCase if "folder" in case else Case
        return Job(case=kind(**{**case, "size": Size(**case["size"])}), **fields)


def run(job: Job) -> Found:
    loop = _loop(job.method)
    is_slow = job.mbit_s is not None
    rate = job.mbit_s * 1e6 if job.mbit_s else None
    links = Links(job.sites, rate, job.one_way_delay) if is_slow else nullcontext()
    try:
        with links as entered:
            ranks = run_processes(
                partial(_rank, job, loop, entered), job.sites, ranks_per_node=1, timeout=job.seconds
            )
    except (RankError, TimeoutError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"reason": lines[-1].strip()[:200]}
    # On the loopback all ranks share one interface.
    sharing = 1 if is_slow else job.sites
    last = job.first + job.counted

    def per_step(name: str) -> float:
        spans = [rank[name][last] - rank[name][job.first] for rank in ranks]
        return float(sum(spans) / len(spans) / job.counted)

    def to_the_end(name: str) -> float:
        spans = [rank[f"{name}_in_all"] - rank[name][job.first] for rank in ranks]
        return float(sum(spans) / len(spans) / sharing)

    bytes_per_second = peak(ranks[0]["samples"], since=ranks[0]["wall"][job.first])
    return {
        "seconds": per_step("wall"),
        "cpu_seconds": per_step("cpu"),
        "bytes": per_step("sent") / sharing,
        "bytes_to_the_end": to_the_end("sent"),
        "packets_to_the_end": to_the_end("packets"),
        "peak_mbit_s": bytes_per_second * 8 / 1e6 / sharing,
        "memory": sum(rank["memory"] for rank in ranks) / len(ranks),
        "memory_to_the_end": sum(rank["memory_to_the_end"] for rank in ranks) / len(ranks),
        "told": ranks[0]["told"],
    }


def _rank(job: Job, loop: Loop, links: Links | None, rank: int, world_size: int) -> dict[str, Any]:
    address = "127.0.0.1"
    if links is not None:
        address = links.address(rank)
        links.enter(rank)
        os.environ.update(links.environment(rank))
        _call_this_host(address)
    os.environ["OWN_ADDR"] = address
    # The model itself counts too.
    memory_before = forget_peak_memory()
    net = job.case.net()
    stamps = job.case.stamps(net, rank)
    training = Rank(job.case, net, job.case.batches(rank), stamps, job.first + job.counted)
    samples: list[Sample] = []
    with sampled() if rank == 0 and job.sampled else nullcontext(samples) as samples:
        numbers = loop(training)
    in_all = sent_so_far()
    return {
        "wall": stamps.wall,
        "cpu": stamps.cpu,
        "sent": stamps.sent,
        "packets": stamps.packets,
        "samples": samples,
        "sent_in_all": in_all.bytes,
        "packets_in_all": in_all.packets,
        "memory": stamps.memory - memory_before,
        "memory_to_the_end": peak_memory() - memory_before,
        "told": numbers,
    }


def _call_this_host(address: str) -> None:
    """Some peers tell others the name of their host: an address is a name that everybody can
    resolve.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "cannot have a host name of its own")
    socket.sethostname(address)


def _loop(method: str) -> Loop:
    """The loop of a method. Called before ranks are forked, so that they need not import what it
    does.
    """
    if method in LOOPS:
        return LOOPS[method]
    from benchmarks import lightning_loops

    return lightning_loops.LOOPS[method]


def results(jobs: list[Job]) -> Iterator[tuple[Job, Found]]:
    """Runs jobs one after the other, each in the Python that its method needs."""
    for job in jobs:
        yield job, run_apart(job) if job.method in ENVIRONMENTS else run(job)


def run_apart(job: Job) -> Found:
    """Runs a job in a process of its own, in the Python that its method needs; several may run at
    the same time.
    """
    environment = ENVIRONMENTS.get(job.method)
    python = PEERS / environment / "bin" / "python" if environment else Path(sys.executable)
    if not python.exists():
        return {"reason": "not installed: benchmarks/peers/install.sh"}
    return _elsewhere(python, job)


def _elsewhere(python: Path, job: Job) -> Found:
    words = [str(python), "-m", "benchmarks.sites", json.dumps(asdict(job))]
    changes = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    environment = {**os.environ, **changes}
    with Popen(words, stdout=PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        lines = [line for line in process.stdout if line.startswith('{"')]
    if not lines:
        return {"reason": f"ended with exit code {process.returncode}"}
    numbers: Found = json.loads(lines[-1])
    return numbers


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(json.dumps(run(Job.read(sys.argv[1]))), flush=True)
