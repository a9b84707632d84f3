"""Run a function on several ranks: forked processes with or without a process group, results and errors in the parent.

Fork, because a test then starts in a tenth of a second and may be a local function. The price: a parent that ran
backward on an accelerator cannot have usable children, so hide accelerators from tests that fork.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=30)
GRACE = 5.0  # seconds that the other ranks have left once one of them failed
LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "LSB_", "LSF_", "OMPI_", "PMI_", "GROUP_", "ROLE_")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class RankError(RuntimeError):
    """A rank failed. `errors` maps rank to traceback text, the first failure first."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        rank, text = next(iter(errors.items()))
        super().__init__(f"rank {rank} failed first of {sorted(errors)}:\n{text}")


@dataclass(frozen=True)
class Report:
    """What a rank leaves behind; `error` is None on success."""

    seconds: float
    value: Any = None
    error: str | None = None


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, expect_failure: bool = False
) -> Any:
    """Calls `function(rank, world_size, *args)` on every rank of a gloo world.

    Args:
        function: may be a local function; what it returns must pickle.
        world_size: how many processes.
        *args: inherited by the fork, never pickled.
        timeout: seconds until everything is killed.
        expect_failure: waits for every rank and returns the errors, rank to text, the first failure first.

    Returns:
        The results in the order of ranks.

    Raises:
        RankError: a rank failed; the others had a grace of some seconds to end by themselves.
        TimeoutError: ranks, which it names, did not finish in time.
        AssertionError: `expect_failure`, and no rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:

        def target(rank: int) -> Any:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
            )
            value = function(rank, world_size, *args)
            if dist.is_initialized():  # after a failure the end of the process closes the connections
                dist.destroy_process_group()
            return value

        return _run(target, [{}] * world_size, Path(folder), timeout, expect_failure)


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    expect_failure: bool = False,
    ranks_per_node: int | None = None,
    torchelastic: bool = False,
) -> Any:
    """Like `run_ranks`, but without a process group and with the environment that a launcher would set.

    Lightning then takes the processes for externally launched: `Trainer(devices=ranks_per_node,
    num_nodes=world_size // ranks_per_node)` works in each of them. They look as if started by hand
    (LightningEnvironment), or by `torchrun` (TorchElasticEnvironment). By default all ranks share a node.
    """
    per_node = ranks_per_node or world_size
    if world_size % per_node:
        raise ValueError(f"{world_size} ranks do not fill nodes of {per_node}: let ranks_per_node divide world_size")
    port = _free_port()
    environments = [_environment(rank, world_size, per_node, port, torchelastic) for rank in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return _run(lambda rank: function(rank, world_size, *args), environments, Path(folder), timeout, expect_failure)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment(rank: int, world_size: int, per_node: int, port: int, torchelastic: bool) -> dict[str, str]:
    values: dict[str, Any] = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": world_size,
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "NODE_RANK": rank // per_node,
    }
    if torchelastic:
        values |= {
            "TORCHELASTIC_RUN_ID": "tests",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "GROUP_RANK": rank // per_node,
            "GROUP_WORLD_SIZE": world_size // per_node,
            "LOCAL_WORLD_SIZE": per_node,
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world_size,
        }
    return {name: str(value) for name, value in values.items()}


# In the parent.


def _run(
    target: Callable[[int], Any],
    environments: list[dict[str, str]],
    folder: Path,
    timeout: float,
    expect_failure: bool,
) -> Any:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_child, args=(target, rank, environment, folder, os.getpid()), name=f"rank {rank}")
        for rank, environment in enumerate(environments)
    ]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            for process in processes:
                process.start()
        reports = _wait(processes, folder, timeout, grace=timeout if expect_failure else GRACE)
    finally:
        for process in processes:
            _kill(process)
    return _judge(reports, len(processes), timeout, expect_failure)


def _wait(processes: list[ForkProcess], folder: Path, timeout: float, grace: float) -> dict[int, Report]:
    """The reports of the ranks that finished before the timeout, and before `grace` seconds after a failure."""
    deadline = time.monotonic() + timeout
    running = dict(enumerate(processes))
    reports: dict[int, Report] = {}
    failed = False
    while running and time.monotonic() < deadline:
        # Short waits: a grandchild that outlives its rank keeps the sentinel from ever becoming ready.
        wait([process.sentinel for process in running.values()], timeout=0.05)
        for rank in [rank for rank, process in running.items() if not process.is_alive()]:
            reports[rank] = _report(running.pop(rank), folder, rank)
            if reports[rank].error and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + grace)
    return reports


def _judge(reports: dict[int, Report], world_size: int, timeout: float, expect_failure: bool) -> Any:
    failed = sorted((rank for rank in reports if reports[rank].error), key=lambda rank: reports[rank].seconds)
    errors = {rank: str(reports[rank].error) for rank in failed}
    unfinished = [rank for rank in range(world_size) if rank not in reports]
    if errors and not expect_failure:
        raise RankError(errors)
    if unfinished:
        texts = "".join(f"\nrank {rank} failed:\n{text}" for rank, text in errors.items())
        raise TimeoutError(f"ranks {unfinished} did not finish within {timeout} s{texts}")
    if expect_failure and not errors:
        raise AssertionError("a failure was expected, and every rank succeeded")
    return errors if expect_failure else [reports[rank].value for rank in range(world_size)]


def _kill(process: ForkProcess) -> None:
    """Ends a rank and whatever it started; nothing where it has ended."""
    if process.pid is not None and process.is_alive():
        # The rank leads a process group, unless it was so fast to be killed that it does not yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    if process.pid is not None:
        process.join()


def _report(process: ForkProcess, folder: Path, rank: int) -> Report:
    path = folder / f"{rank}.pt"
    if path.exists():
        report = torch.load(path, weights_only=False)
        assert isinstance(report, Report)
        return report
    # Such a death is the cause of what the other ranks report, so it comes first.
    return Report(0.0, error=f"rank {rank} ended without a result, exit code {process.exitcode}")


# In the child.


def _child(
    target: Callable[[int], Any], rank: int, environment: Mapping[str, str], folder: Path, parent: int
) -> NoReturn:
    try:
        os.setsid()
        _die_with(parent)
        restore_signals()
        _prepare(rank, environment)
        _leave(_outcome(target, rank), folder, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        # No exit handlers: those inherited belong to the parent.
        _end()


def _outcome(target: Callable[[int], Any], rank: int) -> Report:
    try:
        value = target(rank)
        return Report(time.monotonic(), value=value)
    except BaseException:
        return Report(time.monotonic(), error=traceback.format_exc())


def _leave(report: Report, folder: Path, rank: int) -> None:
    """Writes the report; tensors go as bytes, since shared memory would die with this process."""
    scratch = folder / f"{rank}.tmp"
    try:
        torch.save(report, scratch)
    except Exception:
        torch.save(Report(time.monotonic(), error=traceback.format_exc()), scratch)
    scratch.rename(folder / f"{rank}.pt")


def _end() -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpgrp() == os.getpid():  # never the group of the test runner
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)  # what this rank started and left behind
    finally:
        os._exit(0)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the parent dies, by whatever means."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def restore_signals() -> None:
    """The handlers of a fresh interpreter instead of those of the test runner."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _prepare(rank: int, environment: Mapping[str, str]) -> None:
    # What was inherited is never collected: to look at it would copy all its pages.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if environment:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            del os.environ[name]
        os.environ.update(environment)
        _forget_rank(rank)


def _forget_rank(rank: int) -> None:
    """Lightning reads the rank from the environment on import, which the parent may have done."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank
