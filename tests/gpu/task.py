"""A piece of work on a device, in processes of its own: one that fails or hangs spoils no other.

The process that starts them never asks CUDA for anything, not even whether there is a device: after
that no forked process could use one. It needs torch and Lightning and nothing else, since a machine
with a GPU may have nothing else.
"""

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.ranks import RankError, run_processes, run_ranks

Found = dict[str, Any]  # the results of a piece of work, as plain values
_NOT_HERE = "not here"


class NotHere(Exception):
    """This machine lacks something that a piece of work needs; the message says what."""


class Place(NamedTuple):
    """The place of a piece of work, and how it is done there."""

    device: str  # "cuda", "cpu", or "pretend" for the one of `tests.pretend`
    folder: Path  # for files, the same on all ranks
    quick: bool  # whether as little is done as shows that it runs
    seconds: float = 60.0  # that it may take

    @property
    def module(self) -> Any:
        """The module of torch for the device: streams, memory, `synchronize`."""
        return torch.get_device_module(self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Task:
    """A piece of work; `run` raises `NotHere` or an error, or returns its results."""

    about: str  # what it shows
    # called in every process with a place, rank and number of ranks
    run: Callable[[Place, int, int], Found]
    ranks: int = 1
    connected: bool = True  # over gloo; if not, each has the environment of a node with one rank
    seconds: float = 60.0


class Outcome(NamedTuple):
    """How a piece of work ended: "done", "not here", "failed" or "timed out"."""

    status: str
    seconds: float
    found: Found
    reason: str = ""  # why there is nothing, in one line
    trace: str = ""  # the errors of all ranks


def do(task: Task, place: Place, log: Path) -> Outcome:
    """Does a piece of work in processes of its own, whose output goes to a file; the shorter time
    limit holds.
    """
    began = time.monotonic()
    limit = min(place.seconds, task.seconds)
    work = partial(_in_rank, task, place._replace(seconds=limit), log)
    is_connected = task.connected and task.ranks > 1
    start = run_ranks if is_connected else partial(run_processes, ranks_per_node=1)

    def outcome(status: str, results: Found, reason: str = "", trace: str = "") -> Outcome:
        return Outcome(status, time.monotonic() - began, results, reason, trace)

    try:
        results_of_ranks = start(work, task.ranks, timeout=limit)
    except TimeoutError as error:
        return outcome("timed out", {}, f"not over within {limit:.0f} s", str(error))
    except RankError as error:
        trace = "\n".join(error.errors.values())
        last_line = trace.strip().splitlines()[-1]
        return outcome("failed", {}, last_line[:300], trace)
    for results in results_of_ranks:
        if _NOT_HERE in results:
            return outcome(_NOT_HERE, {}, results[_NOT_HERE])
    return outcome("done", results_of_ranks[0])


def _in_rank(task: Task, place: Place, log: Path, rank: int, world_size: int) -> Found:
    with log.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            with suppress(OSError, ValueError):  # what a test runner captures has no number
                os.dup2(file.fileno(), stream.fileno())
    # If it hangs, the log shows in which lines.
    faulthandler.dump_traceback_later(0.8 * place.seconds, file=sys.__stderr__)
    try:
        prepare(place.device)
        return task.run(place, rank, world_size)
    except NotHere as reason:
        return {_NOT_HERE: str(reason)}
    finally:
        faulthandler.cancel_dump_traceback_later()


def prepare(device: str) -> None:
    """Makes a device the one of this process; `NotHere` if torch does not see one."""
    if device == "pretend":
        from tests import pretend

        pretend.install()
    elif device == "cuda":
        if not torch.cuda.is_available():
            raise NotHere(f"torch {torch.__version__} sees no CUDA device")
        torch.cuda.set_device(0)
        # As exact as the CPU, with which results are compared.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def hosts_of_their_own(rank: int) -> dict[str, str]:
    """The environment of a rank with which NCCL takes several ranks on one device.

    It refuses two ranks of one host on one device, so each has a host of its own, and sockets
    between them.
    """
    return {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def described(place: Place, rank: int, world_size: int) -> Found:
    if not place.is_cuda:
        return {"device": place.device}
    properties = torch.cuda.get_device_properties(0)
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


DEVICE = Task("which device this is", described, seconds=120)
