"""Run a function on several ranks: forked processes with or without a process group, results and
errors in the parent.

Fork, because a test then starts in a tenth of a second and may be a local function. The price: a
parent that ran backward on an accelerator cannot have usable children, so hide accelerators from
tests that fork.
"""

import contextlib
import ctypes
import functools
import gc
import inspect
import multiprocessing
import operator
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from tests.bits import same

GROUP_TIMEOUT = timedelta(seconds=30)
PATIENCE = 240.0  # seconds for what takes ten alone: three tests share two cores, of whatever speed
GRACE = 5.0  # seconds that the other ranks have left once one of them failed
# The first letters of the variables that launchers set, and of those by which ranks meet.
LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "LSB_", "LSF_", "OMPI_", "PMI_", "GROUP_", "ROLE_")
LAUNCHERS += ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_")
LAUNCHERS += ("LOCAL_WORLD_SIZE", "SDILOCO_LAUNCH", "SLURMD_")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class RankError(RuntimeError):
    """A rank failed. `errors` maps rank to traceback text, the first failure first."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        rank, text = next(iter(errors.items()))
        super().__init__(f"rank {rank} failed first of {sorted(errors)}:\n{text}")


class Report(NamedTuple):
    """The outcome of a rank; `error` is empty on success."""

    seconds: float
    value: Any = None
    error: str = ""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = PATIENCE,
    expect_failure: bool = False,
) -> Any:
    """Calls `function(rank, world_size, *args)` on every rank of a gloo world; returns the results
    in their order.

    The function may be a local one, arguments are inherited by the fork, and only what it returns
    is pickled. A rank that fails raises `RankError`, and the others have a grace of some seconds;
    those that are not there after the timeout, a `TimeoutError` that names them. With
    `expect_failure` every rank is waited for, and the errors come back, rank to text, the first one
    first.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:

        def target(rank: int) -> Any:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=GROUP_TIMEOUT,
            )
            value = function(rank, world_size, *args)
            # After a failure the end of the process closes the connections.
            if dist.is_initialized():
                dist.destroy_process_group()
            return value

        return _run(target, [{}] * world_size, Path(folder), timeout, expect_failure)


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = PATIENCE,
    expect_failure: bool = False,
    ranks_per_node: int | None = None,
    torchelastic: bool = False,
) -> Any:
    """Like `run_ranks`, but without a process group and with the environment that a launcher would
    set.

    Lightning then takes the processes for externally launched: `Trainer(devices=ranks_per_node,
    num_nodes=world_size // ranks_per_node)` works in each of them. They look as if started by hand
    (LightningEnvironment), or by `torchrun` (TorchElasticEnvironment). By default all ranks share a
    node.
    """
    per_node = ranks_per_node or world_size
    assert world_size % per_node == 0, f"{world_size} ranks do not fill nodes of {per_node}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environments = []
    for rank in range(world_size):
        environment = _environment(rank, world_size, per_node, torchelastic)
        environments.append({**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return _run(
            lambda rank: function(rank, world_size, *args),
            environments,
            Path(folder),
            timeout,
            expect_failure,
        )


def _environment(rank: int, world_size: int, per_node: int, torchelastic: bool) -> dict[str, str]:
    """The place of a rank, as a launcher sets it."""
    node, local = divmod(rank, per_node)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local, "NODE_RANK": node}
    if torchelastic:
        place |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": world_size // per_node}
        place |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_node}
        place |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    environment = {name: str(number) for name, number in place.items()}
    if torchelastic:
        environment |= {"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "tests"}
    return environment


def in_ranks(
    world_size: int, timeout: float = PATIENCE
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Plays a test in every rank of a world, which is its first argument, as `run_processes`
    does.
    """

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        def play(**fixtures: Any) -> None:
            run_processes(lambda rank, _: test(rank, **fixtures), world_size, timeout=timeout)

        functools.update_wrapper(play, test)
        signature = inspect.signature(test)
        play.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        return play

    return decorated


def agreed(value: Any) -> bool:
    """Tells whether all ranks give the same: tensors by name, or what can be compared."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    is_same = same if isinstance(value, dict) else operator.eq
    return all(is_same(value_of_rank, value) for value_of_rank in values)


# In the parent.


def _run(
    target: Callable[[int], Any],
    environments: list[dict[str, str]],
    folder: Path,
    timeout: float,
    expect_failure: bool,
) -> Any:
    context = multiprocessing.get_context("fork")
    processes: list[Any] = []
    for rank, environment in enumerate(environments):
        arguments = (target, rank, environment, folder, os.getpid())
        processes.append(context.Process(target=_child, args=arguments, name=f"rank {rank}"))
    try:
        _start(processes)
        reports = _reports(processes, folder, timeout, timeout if expect_failure else GRACE)
    finally:
        for process in processes:
            _end(process)
    return _outcome(reports, len(processes), timeout, expect_failure)


def _outcome(
    reports: dict[int, Report], world_size: int, timeout: float, expect_failure: bool
) -> Any:
    failures = [rank for rank in reports if reports[rank].error]
    failures.sort(key=lambda rank: reports[rank].seconds)
    errors = {rank: reports[rank].error for rank in failures}
    unfinished = [rank for rank in range(world_size) if rank not in reports]
    if errors and not expect_failure:
        raise RankError(errors)
    if unfinished:
        texts = "".join(f"\nrank {rank} failed:\n{text}" for rank, text in errors.items())
        raise TimeoutError(f"ranks {unfinished} did not finish within {timeout} s{texts}")
    assert errors or not expect_failure, "a failure was expected, and every rank succeeded"
    return errors if expect_failure else [reports[rank].value for rank in range(world_size)]


def _start(processes: list[Any]) -> None:
    with warnings.catch_warnings():
        message = ".*multi-threaded.*fork"
        warnings.filterwarnings("ignore", message, category=DeprecationWarning)
        for process in processes:
            process.start()


def _reports(processes: list[Any], folder: Path, timeout: float, grace: float) -> dict[int, Report]:
    """Waits for all ranks: after the first failure as long as the grace, at most."""
    reports = dict[int, Report]()
    running = dict(enumerate(processes))
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        # Short waits: a grandchild that outlives its rank keeps the sentinel from ever becoming
        # ready.
        wait([process.sentinel for process in running.values()], timeout=0.05)
        for rank in [rank for rank, process in running.items() if not process.is_alive()]:
            is_first_failure = not any(report.error for report in reports.values())
            reports[rank] = _report(folder, rank, running.pop(rank).exitcode)
            if reports[rank].error and is_first_failure:
                deadline = min(deadline, time.monotonic() + grace)
    return reports


def _report(folder: Path, rank: int, exit_code: int) -> Report:
    path = folder / f"{rank}.pt"
    if path.exists():
        report: Report = torch.load(path, weights_only=False)
        return report
    # A death without a result is the cause of the reports of the other ranks, so it comes first.
    return Report(0.0, error=f"rank {rank} ended without a result, exit code {exit_code}")


def _end(process: Any) -> None:
    """Ends a rank and all that it started: it leads a process group, unless it does not yet."""
    if process.pid is None:
        return
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


# In the child.


def _child(
    target: Callable[[int], Any],
    rank: int,
    environment: Mapping[str, str],
    folder: Path,
    parent: int,
) -> NoReturn:
    try:
        _leave_the_test_runner(parent)
        if environment:
            replace_environment(environment)
            # Lightning reads the rank from the environment on import, which the parent may have
            # done.
            module = sys.modules.get("lightning_utilities.core.rank_zero")
            if module:
                module.rank_zero_only.rank = rank
        scratch = folder / f"{rank}.tmp"
        try:
            # Tensors go as bytes, since shared memory would die with this process.
            torch.save(Report(0.0, value=target(rank)), scratch)
        except BaseException:
            torch.save(Report(time.monotonic(), error=traceback.format_exc()), scratch)
        scratch.rename(folder / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            if os.getpgrp() == os.getpid():  # never the group of the test runner
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.killpg(0, signal.SIGTERM)  # processes that this rank started and left behind
        finally:
            os._exit(0)  # no exit handlers: those inherited belong to the parent


def _leave_the_test_runner(parent: int) -> None:
    os.setsid()
    if sys.platform == "linux":
        # This process ends when the parent dies, by whatever means.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if os.getppid() != parent:
        os._exit(1)
    restore_signals()
    # Inherited objects are never collected: to look at them would copy all their pages.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def restore_signals() -> None:
    """The handlers of a fresh interpreter instead of those of the test runner."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def replace_environment(environment: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(environment)
