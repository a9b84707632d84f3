"""Tests of the harness that runs functions on several ranks: results, errors, timeouts, and nothing left running."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_processes, run_ranks


def until_gone(folder: Path, count: int) -> bool:
    """Whether the processes end whose ids are names of files in a folder, as soon as there are so many."""
    deadline = time.monotonic() + 20
    while len(list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.02)

    def is_running(path: Path) -> bool:
        try:
            return Path(f"/proc/{path.stem}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    deadline = time.monotonic() + 5
    while (are_running := any(map(is_running, folder.glob("*.pid")))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not are_running


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

    assert run_ranks(function, 3) == [("gloo", 3, 6.0, 1)] * 3


def test_the_first_exception_comes_back_with_its_traceback_and_a_death_before_all_others() -> None:
    def broken_on_purpose(rank: int, world_size: int) -> None:
        time.sleep(0.2 * rank)
        raise ValueError(f"from rank {rank}")

    def waits_for_a_failed_one(rank: int, world_size: int, how: str) -> None:
        if rank == 1:
            {"raise": lambda: [].pop(), "exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), 9)}[how]()
        dist.barrier()

    for runner in (run_ranks, run_processes):
        with pytest.raises(RankError, match="rank 0 failed first") as caught:
            runner(broken_on_purpose, 2)
        assert "broken_on_purpose" in str(caught.value)
        assert list(caught.value.errors) == [0, 1]
        assert caught.value.errors[1].strip().endswith("ValueError: from rank 1")
    for how, told in (("raise", "IndexError: pop from"), ("exit", "exit code 3"), ("kill", "exit code -9")):
        errors = run_ranks(waits_for_a_failed_one, 2, how, expect_failure=True)
        assert next(iter(errors)) == 1
        assert told in errors[1].splitlines()[-1]
    with pytest.raises(AssertionError, match="every rank succeeded"):
        run_processes(lambda rank, world_size: rank, 2, expect_failure=True)
    with pytest.raises(RankError, match="pickle"):
        run_processes(lambda rank, world_size: lambda: rank, 1)
    with pytest.raises(ValueError, match="3 ranks do not fill nodes of 2"):
        run_processes(broken_on_purpose, 3, ranks_per_node=2)


@pytest.mark.parametrize("ends", ["all", "after a failure", "by a timeout"])
def test_nothing_is_left_running(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(rank: int, world_size: int) -> None:
        for number in (os.getpid(), subprocess.Popen(["sleep", "100"]).pid):
            (tmp_path / f"{number}.pid").touch()
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
    assert until_gone(tmp_path, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells children of a parent's death on Linux only")
def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    def function(rank: int, world_size: int) -> None:
        (tmp_path / f"{os.getpid()}.pid").touch()
        time.sleep(100)

    parent = os.fork()
    if not parent:
        tempfile.tempdir = str(tmp_path)  # it cannot remove its temporary folder: that lies where pytest cleans up
        try:
            run_processes(function, 2)
        finally:
            os._exit(0)
    try:
        while len(list(tmp_path.glob("*.pid"))) < 2:
            time.sleep(0.02)
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert until_gone(tmp_path, 2)


@pytest.mark.parametrize(("torchelastic", "distribution"), [(False, "lightning.pytorch"), (True, "pytorch_lightning")])
def test_a_lightning_trainer_takes_the_ranks_as_launched(
    torchelastic: bool, distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip(distribution)
    demos = pytest.importorskip(f"{distribution}.demos.boring_classes")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_NTASKS")

    def function(rank: int, world_size: int) -> Any:
        values = {name: os.environ[name] for name in names if name in os.environ}
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        places: Any = {"devices": 2, "num_nodes": 2, "default_root_dir": tmp_path, "limit_val_batches": 0}
        trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", max_steps=2, **places, **quiet)
        torch.manual_seed(rank)
        model = demos.BoringModel()
        trainer.fit(model)
        environment, weight = type(trainer.strategy.cluster_environment).__name__, model.layer.weight.detach()
        return values, (trainer.global_rank, trainer.node_rank, trainer.world_size, environment), weight

    monkeypatch.setenv("SLURM_NTASKS", "7")
    results = run_processes(function, 4, ranks_per_node=2, torchelastic=torchelastic)
    of_elastic = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"} if torchelastic else {}
    assert results[3][0] == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", **of_elastic}
    name = "TorchElasticEnvironment" if torchelastic else "LightningEnvironment"
    assert [place for _, place, _ in results] == [(rank, rank // 2, 4, name) for rank in range(4)]
    assert all(torch.equal(weight, results[0][2]) for *_, weight in results)
