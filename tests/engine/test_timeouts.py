"""Waits that have an end: for ranks of the same group, and for all ranks. Other files show the other timeouts."""

import multiprocessing
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_sdiloco import StreamingDiLoCoStrategy
from lightning_sdiloco.comm.layout import GroupLayout
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.lightning_pytorch import _Launcher
from tests import fits
from tests.fits import fit
from tests.ranks import run_processes, run_ranks

# Ranks that start later than this would fail before.
TIMEOUT = 5.0
CHOICES: dict[str, Any] = {"sync_every": 6, "fragments": [["*"]], "timeout": timedelta(seconds=TIMEOUT)}


def stalling(rank: int, where: str) -> Any:
    """Makes a module with which the last rank stops at a place for longer than any timeout."""

    def make(distribution: str, inner: str, seed: int) -> Any:
        base = type(fits.module(distribution, inner, seed))

        class Stalling(base):  # type: ignore[misc, valid-type]
            def training_step(self, parts: Any, index: int) -> Any:
                if where == "training_step" and index == 2 and rank == 1:
                    time.sleep(2 * TIMEOUT)
                return super().training_step(parts, index)

            def on_train_epoch_start(self) -> None:
                if where == "barrier":
                    if rank == 1:
                        time.sleep(2 * TIMEOUT)
                    self.trainer.strategy.barrier("here")

        return Stalling()

    return make


def errors_of(groups: int, where: str) -> tuple[str, float]:
    """The error of the rank that waits, and after how many seconds all had ended."""

    def run(rank: int, world_size: int) -> None:
        fit(rank, world_size, groups, 5, CHOICES, make=stalling(rank, where))

    start = time.monotonic()
    errors = run_processes(run, 2, expect_failure=True)
    return errors[0], time.monotonic() - start


def test_a_rank_that_waits_for_one_of_its_group_does_so_for_the_timeout() -> None:
    error, seconds = errors_of(groups=1, where="training_step")
    assert "Timed out waiting 5000ms" in error
    assert seconds < 40


def test_a_rank_that_waits_for_all_others_does_so_for_the_timeout() -> None:
    error, seconds = errors_of(groups=2, where="barrier")
    assert "ExchangeError: This rank, of worker group 0, waited for all others at ('here',)" in error
    assert "Timed out waiting 5000ms" in error
    assert seconds < 40


def gather_in_vain(rank: int, world_size: int) -> float:
    topology = Topology.of_world(GroupLayout(world_size, 1), timedelta(seconds=TIMEOUT / 2))
    start = time.monotonic()
    if rank == 1:
        time.sleep(1.5 * TIMEOUT)
        return 0.0
    with pytest.raises(RuntimeError, match="Timed out waiting 5000ms"):
        topology.stages[-1].all_gather(torch.zeros(1))
    return time.monotonic() - start


def test_at_a_landing_a_rank_waits_for_the_others_of_its_group_twice_as_long_as_for_a_flight() -> None:
    assert TIMEOUT <= run_ranks(gather_in_vain, 2)[0] < 3 * TIMEOUT


def test_a_process_that_does_not_end_after_ctrl_c_is_killed_soon() -> None:
    started = multiprocessing.Event()

    def stubborn() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        started.set()
        time.sleep(100)

    process = multiprocessing.get_context("fork").Process(target=stubborn)
    process.start()
    assert started.wait(30)
    launcher = _Launcher(StreamingDiLoCoStrategy(), start_method="fork")
    launcher.procs = [process]
    start = time.monotonic()
    launcher._interrupt()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert 3 <= time.monotonic() - start < 20
