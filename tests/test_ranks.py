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


def test_results_come_back_in_the_order_of_ranks_of_fresh_processes(tmp_path: Path) -> None:
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def function(rank: int, world_size: int, base: torch.Tensor) -> dict[str, Any] | None:
        time.sleep(0.1 * (world_size - rank))
        if rank == 2:
            return None
        handlers = [signal.getsignal(number) for number in signals]
        assert handlers == [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler]
        return {"rank": rank, "tensor": base + rank, "view": torch.arange(6).view(2, 3)[:, rank]}

    before, handler = {number: signal.getsignal(number) for number in signals}, (tmp_path / "ran").touch
    atexit.register(handler)
    try:
        for number in signals:
            signal.signal(number, lambda *_: None)
        for runner in (run_ranks, run_processes):
            *results, nothing = runner(function, 3, torch.ones(2))
            assert nothing is None
            for rank, result in enumerate(results):
                assert result["rank"] == rank
                assert torch.equal(result["tensor"], torch.full((2,), 1.0 + rank))
                assert result["view"].tolist() == [rank, 3 + rank]
                assert not result["tensor"].is_shared()
            assert not (tmp_path / "ran").exists(), "an exit handler of the parent"
    finally:
        atexit.unregister(handler)
        for number, earlier in before.items():
            signal.signal(number, earlier)


def test_the_world_is_a_gloo_group_with_one_thread_per_rank() -> None:
    def function(rank: int, world_size: int) -> tuple[str, int, float, int]:
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value, group=dist.new_group(range(world_size)))
        return dist.get_backend(), dist.get_world_size(), value.item(), torch.get_num_threads()

    for world_size in (1, 2, 4):
        expected = ("gloo", world_size, float(sum(range(world_size + 1))), 1)
        assert run_ranks(function, world_size) == [expected] * world_size


def test_the_first_exception_comes_back_with_its_traceback_and_nobody_holds_up_the_test() -> None:
    def broken_on_purpose(rank: int, world_size: int) -> None:
        time.sleep(0.2 * rank)
        raise ValueError(f"from rank {rank}")

    def waits_for_a_failed_one(rank: int, world_size: int) -> int:
        if rank == 1:
            raise KeyError("gone")
        dist.barrier()
        return rank

    for runner in (run_ranks, run_processes):
        with pytest.raises(RankError, match="rank 0 failed first") as caught:
            runner(broken_on_purpose, 2)
        assert "broken_on_purpose" in str(caught.value)
        assert list(caught.value.errors) == [0, 1]
        assert "ValueError: from rank 1" in caught.value.errors[1]
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed first"):
        run_ranks(waits_for_a_failed_one, 3)
    assert time.monotonic() - started < 15
    errors = run_ranks(waits_for_a_failed_one, 2, expect_failure=True)
    assert "KeyError: 'gone'" in errors[1]
    with pytest.raises(AssertionError, match="every rank succeeded"):
        run_processes(lambda rank, world_size: rank, 2, expect_failure=True)
    with pytest.raises(RankError, match="pickle"):
        run_processes(lambda rank, world_size: lambda: rank, 1)


def test_a_rank_that_dies_comes_first() -> None:
    def function(rank: int, world_size: int, die: Callable[[], None]) -> None:
        if rank == 1:
            die()
        dist.barrier()

    for die in (lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)):
        errors = run_ranks(function, 2, die, expect_failure=True)
        assert list(errors)[0] == 1
        assert "without a result, exit code" in errors[1]


@pytest.mark.parametrize("ends", ["all", "after a failure", "by a timeout"])
def test_nothing_is_left_running(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(rank: int, world_size: int) -> None:
        note_pid(tmp_path)
        note_pid(tmp_path, subprocess.Popen(["sleep", "100"]).pid)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ends == "after a failure" and rank == 0:
            raise ValueError("gone")
        if ends != "all" and rank:
            time.sleep(100)

    if ends == "all":
        run_processes(function, 2)
    elif ends == "after a failure":
        monkeypatch.setattr("tests.ranks.GRACE", 0.2)
        with pytest.raises(RankError) as caught:
            run_processes(function, 2)
        assert list(caught.value.errors) == [0]
    else:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not finish within 1.0 s"):
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


@pytest.mark.parametrize(("torchelastic", "distribution"), [(False, "lightning.pytorch"), (True, "pytorch_lightning")])
def test_a_lightning_trainer_takes_the_ranks_as_launched(
    torchelastic: bool, distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip(distribution)
    demos = pytest.importorskip(f"{distribution}.demos.boring_classes")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_NTASKS")

    def function(rank: int, world_size: int) -> tuple[dict[str, str], int, int, int, str, torch.Tensor]:
        values = {name: os.environ[name] for name in names if name in os.environ}
        torch.manual_seed(rank)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            num_nodes=2,
            max_steps=2,
            limit_val_batches=0,
            default_root_dir=tmp_path,
            **quiet,
        )
        model = demos.BoringModel()
        trainer.fit(model)
        environment, weight = type(trainer.strategy.cluster_environment).__name__, model.layer.weight.detach()
        return values, trainer.global_rank, trainer.node_rank, trainer.world_size, environment, weight

    monkeypatch.setenv("SLURM_NTASKS", "7")
    results = run_processes(function, 4, ranks_per_node=2, torchelastic=torchelastic)
    of_elastic = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"} if torchelastic else {}
    assert results[3][0] == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", **of_elastic}
    name = "TorchElasticEnvironment" if torchelastic else "LightningEnvironment"
    assert [result[1:5] for result in results] == [(rank, rank // 2, 4, name) for rank in range(4)]
    assert all(torch.equal(result[5], results[0][5]) for result in results)
    with pytest.raises(ValueError, match="3 ranks do not fill nodes of 2"):
        run_processes(function, 3, ranks_per_node=2)
