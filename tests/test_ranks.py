"""Tests of the harness that runs functions on several ranks: results, errors, timeouts, and
nothing left running.
"""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_processes, run_ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def results_of_rank(rank: int, world_size: int, base: torch.Tensor) -> Any:
    time.sleep(0.1 * (world_size - rank))
    handlers = [signal.getsignal(number) for number in SIGNALS]
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler]
    return rank, torch.get_num_threads(), base + rank, torch.arange(6).view(2, 3)[:, rank]


def results_in_world(rank: int, world_size: int, base: torch.Tensor) -> Any:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value, group=dist.new_group(range(world_size)))
    assert dist.get_backend() == "gloo"
    assert dist.get_world_size() == 3
    assert value.item() == 6.0
    return results_of_rank(rank, world_size, base)


def test_results_come_back_in_the_order_of_ranks_of_fresh_processes(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handler = (tmp_path / "ran").touch
    atexit.register(handler)
    try:
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        by_ranks = run_ranks(results_in_world, 3, torch.ones(2))
        by_processes = run_processes(results_of_rank, 3, torch.ones(2))
        for returned in (by_ranks, by_processes):
            for rank, (own_rank, threads, tensor, view) in enumerate(returned):
                assert own_rank == rank
                assert threads == 1
                assert tensor.tolist() == [1.0 + rank] * 2
                assert view.tolist() == [rank, 3 + rank]
                assert not tensor.is_shared()
            assert not (tmp_path / "ran").exists(), "an exit handler of the parent"
    finally:
        atexit.unregister(handler)
        for number, earlier in before.items():
            signal.signal(number, earlier)


def test_the_first_exception_returns_with_its_traceback_and_a_death_before_others() -> None:
    def broken_on_purpose(rank: int, world_size: int) -> None:
        time.sleep(0.2 * rank)
        raise ValueError(f"from rank {rank}")

    def waits_for_a_failed_one(rank: int, world_size: int, fail: Callable[[], object]) -> None:
        if rank == 1:
            fail()
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 0 failed first.*broken_on_purpose") as caught:
        run_processes(broken_on_purpose, 2)
    assert list(caught.value.errors) == [0, 1]
    assert caught.value.errors[1].strip().endswith("ValueError: from rank 1")
    for fail, message in (
        ([].pop, "IndexError: pop from"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), 9), "exit code -9"),
    ):
        errors = run_ranks(waits_for_a_failed_one, 2, fail, expect_failure=True)
        assert next(iter(errors)) == 1
        assert message in errors[1].splitlines()[-1]
    with pytest.raises(AssertionError, match="every rank succeeded"):
        run_processes(lambda rank, world_size: rank, 2, expect_failure=True)
    with pytest.raises(RankError, match="pickle"):
        run_processes(lambda rank, world_size: lambda: rank, 1)


def test_nothing_is_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(rank: int, world_size: int, ends: str) -> None:
        (tmp_path / f"{os.getpid()}.pid").touch()
        if ends != "with a killed parent":
            (tmp_path / f"{subprocess.Popen(['sleep', '100']).pid}.pid").touch()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ends == "after a failure" and rank == 0:
            raise ValueError("gone")
        if ends != "all" and rank:
            time.sleep(100)

    monkeypatch.setattr("tests.ranks.GRACE", 0.2)
    run_processes(function, 2, "all")
    with pytest.raises(RankError) as caught:
        run_processes(function, 2, "after a failure")
    assert list(caught.value.errors) == [0]
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not finish within 1.0 s"):
        run_processes(function, 2, "by a timeout", timeout=1.0)
    if sys.platform == "linux":  # the kernel tells children there of a parent's death
        kill_a_parent(partial(run_processes, function, 2, "with a killed parent"), tmp_path)
    processes = [int(path.stem) for path in tmp_path.glob("*.pid")]
    deadline = time.monotonic() + 5
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline, "a process that a rank has started still runs"
        time.sleep(0.02)


def kill_a_parent(run: Callable[[], object], folder: Path) -> None:
    parent = os.fork()
    if not parent:
        # It cannot remove its temporary folder: that lies where pytest cleans up.
        tempfile.tempdir = str(folder)
        try:
            run()
        finally:
            os._exit(0)
    while len(list(folder.glob("*.pid"))) < 14:
        time.sleep(0.02)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)


def is_running(process: int) -> bool:
    """Tells whether a process is there, and is no zombie."""
    path = Path(f"/proc/{process}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"
