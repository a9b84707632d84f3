"""Tests of the harness that runs functions on several ranks: results, errors, timeouts, and nothing left running."""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_processes, run_ranks

RUNNERS = pytest.mark.parametrize("runner", [run_ranks, run_processes])
Runner = Callable[..., Any]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read_pids(folder: Path, count: int, timeout: float = 20.0) -> list[int]:
    """The process ids that `note_pid` left, as soon as there are `count` of them."""
    deadline = time.monotonic() + timeout
    while len(list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.02)
    return [int(path.stem) for path in folder.glob("*.pid")]


def note_pid(folder: Path, pid: int | None = None) -> None:
    (folder / f"{pid or os.getpid()}.pid").touch()


def until_gone(pids: list[int], timeout: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@RUNNERS
def test_results_come_back_in_the_order_of_ranks(runner: Runner) -> None:
    def function(rank: int, world_size: int, base: torch.Tensor) -> dict[str, Any]:
        time.sleep(0.1 * (world_size - rank))
        return {"rank": rank, "tensor": base + rank, "view": torch.arange(6).view(2, 3)[:, rank]}

    results = runner(function, 3, torch.ones(2))
    assert [result["rank"] for result in results] == [0, 1, 2]
    for rank, result in enumerate(results):
        assert torch.equal(result["tensor"], torch.full((2,), 1.0 + rank))
        assert result["view"].tolist() == [rank, 3 + rank]
        assert not result["tensor"].is_shared()


@RUNNERS
def test_none_is_a_result(runner: Runner) -> None:
    assert runner(lambda rank, world_size: None, 2) == [None, None]


def test_the_world_is_a_gloo_group_with_one_thread_per_rank() -> None:
    def function(rank: int, world_size: int) -> tuple[str, int, float, int]:
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value, group=dist.new_group(range(world_size)))
        return dist.get_backend(), dist.get_world_size(), value.item(), torch.get_num_threads()

    assert run_ranks(function, 4) == [("gloo", 4, 10.0, 1)] * 4


def test_worlds_follow_one_another() -> None:
    for world_size in (1, 2, 3):
        assert run_ranks(lambda rank, size: dist.get_world_size(), world_size) == [world_size] * world_size


@RUNNERS
def test_the_first_exception_comes_back_with_its_traceback(runner: Runner) -> None:
    def broken_on_purpose(rank: int, world_size: int) -> None:
        time.sleep(0.3 * rank)
        raise ValueError(f"from rank {rank}")

    with pytest.raises(RankError, match="rank 0 failed first") as caught:
        runner(broken_on_purpose, 2)
    assert "broken_on_purpose" in str(caught.value)
    assert list(caught.value.errors) == [0, 1]
    assert "ValueError: from rank 1" in caught.value.errors[1]


def test_ranks_that_wait_for_a_failed_one_do_not_hold_up_the_test() -> None:
    def function(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("gone")
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed first"):
        run_ranks(function, 3)
    assert time.monotonic() - started < 15


def test_sleepers_are_stopped_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(rank: int, world_size: int) -> None:
        note_pid(tmp_path)
        if rank == 0:
            raise ValueError("gone")
        time.sleep(100)

    monkeypatch.setattr("tests.ranks.GRACE", 0.2)
    with pytest.raises(RankError) as caught:
        run_processes(function, 2)
    assert list(caught.value.errors) == [0]
    assert until_gone(read_pids(tmp_path, 2))


@RUNNERS
def test_expected_failures_are_returned(runner: Runner) -> None:
    def function(rank: int, world_size: int) -> int:
        if rank != 1:
            raise KeyError(f"from rank {rank}")
        return rank

    errors = runner(function, 3, expect_failure=True)
    assert sorted(errors) == [0, 2]
    assert "KeyError: 'from rank 2'" in errors[2]


def test_an_expected_failure_that_does_not_come_is_an_error() -> None:
    with pytest.raises(AssertionError, match="every rank succeeded"):
        run_processes(lambda rank, world_size: rank, 2, expect_failure=True)


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_processes(lambda rank, world_size: lambda: rank, 1)


@pytest.mark.parametrize("die", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_rank_that_dies_comes_first(die: Callable[[], None]) -> None:
    def function(rank: int, world_size: int) -> None:
        if rank == 1:
            die()
        dist.barrier()

    errors = run_ranks(function, 2, expect_failure=True)
    assert list(errors)[0] == 1
    assert "without a result, exit code" in errors[1]


def test_a_timeout_names_the_ranks_and_kills_them(tmp_path: Path) -> None:
    def function(rank: int, world_size: int) -> None:
        note_pid(tmp_path)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank > 0:
            time.sleep(100)

    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not finish within 1.0 s"):
        run_processes(function, 3, timeout=1.0)
    assert time.monotonic() - started < 10
    assert until_gone(read_pids(tmp_path, 3))


@pytest.mark.parametrize("rank_finishes", [True, False])
def test_what_a_rank_started_ends_with_it(tmp_path: Path, rank_finishes: bool) -> None:
    def function(rank: int, world_size: int) -> None:
        note_pid(tmp_path)
        note_pid(tmp_path, subprocess.Popen(["sleep", "100"]).pid)
        time.sleep(0 if rank_finishes else 100)

    if rank_finishes:
        run_processes(function, 2)
    else:
        with pytest.raises(TimeoutError):
            run_processes(function, 2, timeout=1.0)
    assert until_gone(read_pids(tmp_path, 4))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells children of a parent's death on Linux only")
def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import pathlib, os, time, tests.ranks\n"
        "def function(rank, world_size):\n"
        f"    (pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid').touch()\n"
        "    time.sleep(100)\n"
        "tests.ranks.run_processes(function, 2)\n"
    )
    # The killed parent cannot remove its temporary folder: let it lie where pytest cleans up.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[1], env=environment)
    try:
        pids = read_pids(tmp_path, 2)
    finally:
        parent.kill()
        parent.wait()
    assert until_gone(pids)


def test_ranks_have_the_signal_handlers_of_a_fresh_interpreter() -> None:
    def function(rank: int, world_size: int) -> list[bool]:
        return [
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
            signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        ]

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        for number in before:
            signal.signal(number, lambda *_: None)
        assert run_processes(function, 1) == [[True] * 3]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@RUNNERS
def test_ranks_run_no_exit_handler_of_the_parent(runner: Runner, tmp_path: Path) -> None:
    handler = (tmp_path / "ran").touch
    atexit.register(handler)
    try:
        runner(lambda rank, world_size: rank, 2)
        assert not (tmp_path / "ran").exists()
    finally:
        atexit.unregister(handler)


@pytest.mark.parametrize("torchelastic", [False, True])
def test_processes_have_the_environment_of_a_launcher(torchelastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_NTASKS")

    def function(rank: int, world_size: int) -> tuple[dict[str, str], str, str]:
        values = {name: os.environ[name] for name in names if name in os.environ}
        return values, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    monkeypatch.setenv("SLURM_NTASKS", "7")
    results = run_processes(function, 4, ranks_per_node=2, torchelastic=torchelastic)
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"}
    if torchelastic:
        expected |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert results[3][0] == expected
    assert len({result[1:] for result in results}) == 1


def test_nodes_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks do not fill nodes of 2"):
        run_processes(lambda rank, world_size: rank, 3, ranks_per_node=2)


@pytest.mark.parametrize("torchelastic", [False, True])
@pytest.mark.parametrize("distribution", ["lightning.pytorch", "pytorch_lightning"])
def test_a_lightning_trainer_takes_the_ranks_as_launched(distribution: str, torchelastic: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip(distribution)
    demos = pytest.importorskip(f"{distribution}.demos.boring_classes")

    def function(rank: int, world_size: int) -> tuple[int, int, int, str, torch.Tensor]:
        torch.manual_seed(rank)
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            num_nodes=2,
            max_steps=2,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        model = demos.BoringModel()
        trainer.fit(model)
        environment = type(trainer.strategy.cluster_environment).__name__
        return trainer.global_rank, trainer.node_rank, trainer.world_size, environment, model.layer.weight.detach()

    results = run_processes(function, 4, ranks_per_node=2, torchelastic=torchelastic)
    name = "TorchElasticEnvironment" if torchelastic else "LightningEnvironment"
    assert [result[:4] for result in results] == [(rank, rank // 2, 4, name) for rank in range(4)]
    assert all(torch.equal(result[4], results[0][4]) for result in results)
