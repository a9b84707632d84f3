"""Loops of accelerate, and the Trainer of transformers: the examples train, and go on where they were stopped."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_sdiloco

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(300)]

ROOT = Path(lightning_sdiloco.__file__).parents[1]
HERE = Path(__file__).parent


def torchrun(ranks: int, script: Path, *arguments: Any, folder: Path) -> str:
    """What a script prints on all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example_of_accelerate_goes_on_where_it_was_stopped(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    example = ROOT / "examples" / "accelerate" / "pretrain.py"

    def loss(*arguments: Any) -> str:
        printed = torchrun(ranks, example, *arguments, folder=tmp_path)
        # Without the bytes: what is saved before all fragments have landed takes an exchange.
        return next(line for line in printed.splitlines() if line.startswith("loss")).split(",")[0]

    whole = loss("--steps", 44, "--folder", "whole")
    assert float(whole.split()[1]) < 4.0
    loss("--steps", 22, "--folder", "half")  # a fragment is in flight then
    assert loss("--steps", 44, "--folder", "half", "--resume") == whole


def test_what_accelerate_would_quietly_do_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    lines = torchrun(2, HERE / "accelerate_loop.py", tmp_path / "state", folder=tmp_path).splitlines()
    wrapped = [line for line in lines if line.startswith("wrapped")]
    (refused,) = (line for line in lines if line.startswith("refused"))
    assert len(wrapped) == 2
    assert all("DistributedDataParallel over ranks 0 and 1" in line for line in wrapped)
    assert refused.startswith("refused on rank 1: This is the state of rank 0 of worker group 0")


def test_the_trainer_of_transformers_trains_worker_groups_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def train(name: str, *resume: Path) -> list[dict[str, Any]]:
        (tmp_path / name).mkdir()
        torchrun(2, HERE / "transformers_loop.py", tmp_path / name, *resume, folder=tmp_path)
        return [torch.load(tmp_path / name / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]

    ranks = train("whole")
    resumed = train("resumed", tmp_path / "whole" / "checkpoint-16")
    assert ranks[0]["parameters"] > 100_000
    for rank, again in zip(ranks, resumed, strict=True):
        assert (rank["groups"], rank["steps"]) == (2, 24)
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["losses"][-1] < rank["losses"][0]
        assert again["losses"] == rank["losses"]
        for name, values in rank["model"].items():
            assert torch.equal(values, ranks[0]["model"][name])
            assert torch.equal(values, again["model"][name])
