"""A loop of one's own, stopped with fragments in flight and resumed from files, in groups of one and two ranks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sdiloco
from lightning_sdiloco import StreamingDiLoCo, StreamingDiLoCoFabricStrategy, WorkerGroups
from tests.large.models import FEATURES, TARGETS, made
from tests.ranks import run_processes, run_ranks

pytestmark = [pytest.mark.large, pytest.mark.timeout(120)]

STEPS, STOPPED_AT = 16, 9
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:3"}


def loop(rank: int, world_size: int, folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """Trains from one step to another; whoever does not begin at the first one goes on from a file."""
    groups = WorkerGroups(2)
    wrapped: nn.Module = made("wide", seed=rank)
    model = wrapped
    if groups.group_size > 1:
        wrapped = DistributedDataParallel(model, process_group=groups.process_group)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    engine = StreamingDiLoCo(wrapped, worker_groups=groups, inner_optimizers=[optimizer], **CHOICES)
    torch.manual_seed(100 + rank)
    if first > 1:
        engine.load(folder / "loop.ckpt")
        assert engine.inner_steps == first - 1
        assert engine.in_flight
    for step in range(first, last + 1):
        optimizer.zero_grad()
        x = torch.randn(8, FEATURES)  # the random numbers of this rank go on too
        nn.functional.mse_loss(wrapped(x), x[:, :TARGETS] * 2).backward()
        optimizer.step()
        engine.step()
        if step == STOPPED_AT:
            engine.save(folder / "loop.ckpt")
    seen = {f"local {name}": values.clone() for name, values in model.state_dict().items()}
    if last == STEPS:
        engine.finish()
        seen |= engine.outer_state_dict()
        seen["bytes"] = torch.tensor(engine.report()["bytes_sent"])
    return seen


def fabric_loop(rank: int, world_size: int, folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """The same with Fabric, and with a validation on the way."""
    strategy = StreamingDiLoCoFabricStrategy(2, **CHOICES)
    fabric: Any = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(net := made("normed", seed=rank), torch.optim.AdamW(net.parameters(), lr=0.01))
    torch.manual_seed(100 + rank)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if first > 1:
        assert fabric.load(folder / "fabric.ckpt", state) == {}
        assert state["step"] == first - 1
        assert strategy.engine is not None
        assert strategy.engine.in_flight
    for state["step"] in range(first, last + 1):
        optimizer.zero_grad()
        x = torch.randn(8, FEATURES)
        fabric.backward(nn.functional.mse_loss(model(x), x[:, :TARGETS] * 2))
        optimizer.step()
        if state["step"] == STOPPED_AT:
            with strategy.evaluate(), torch.no_grad():
                model.eval()(torch.ones(8, FEATURES))
            model.train()
            fabric.save(folder / "fabric.ckpt", state)
    seen = {f"local {name}": values.clone() for name, values in model.state_dict().items()}
    if last == STEPS:
        strategy.finish()
        seen |= strategy.outer_state_dict()
    return seen


def require_resumed(run: Any, train: Any, ranks: int, folder: Path) -> None:
    never_stopped = run(train, ranks, folder / "never", 1, STEPS)
    assert sum(values.numel() for name, values in never_stopped[0].items() if "local" in name) > 100_000
    stopped = run(train, ranks, folder, 1, STOPPED_AT)
    assert any(not torch.equal(values, stopped[-1][name]) for name, values in stopped[0].items())
    for actual, expected in zip(run(train, ranks, folder, STOPPED_AT + 1, STEPS), never_stopped, strict=True):
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_goes_on_bit_for_bit_with_fragments_in_flight(ranks: int, tmp_path: Path) -> None:
    require_resumed(run_ranks, loop, ranks, tmp_path)
    files = {path.name for path in (tmp_path / "loop.ckpt.sdiloco").rglob("*.*")}
    assert files == {"manifest.json", *(f"rank_{rank:05d}.pt" for rank in range(ranks))}
    made("wide").load_state_dict(torch.load(tmp_path / "loop.ckpt", weights_only=True)["state_dict"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_of_fabric_goes_on_bit_for_bit_with_fragments_in_flight(ranks: int, tmp_path: Path) -> None:
    require_resumed(run_processes, fabric_loop, ranks, tmp_path)


ROOT = Path(lightning_sdiloco.__file__).parents[1]


def example(folder: Path, *arguments: str) -> list[str]:
    """What the example prints, the corpus of the first call being that of the next."""
    command = [sys.executable, str(ROOT / "examples" / "fabric" / "pretrain.py"), "--save-every", "22", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "validation loss" in line]


@pytest.mark.timeout(300)
def test_the_example_of_fabric_resumes_to_the_same_loss(tmp_path: Path) -> None:
    whole = example(tmp_path, "--steps", "30", "--accumulate", "2")
    assert len(whole) == 2
    assert float(whole[-1].split("loss ")[1].split(",")[0]) < 4.0
    stopped = example(tmp_path, "--steps", "22", "--accumulate", "2", "--checkpoint", "runs/stopped.ckpt")
    assert stopped[0] == whole[0]
    again = ["--resume", "--checkpoint", "runs/stopped.ckpt"]
    assert example(tmp_path, "--steps", "30", "--accumulate", "2", *again) == whole[1:]
