"""Loops of users, stopped with fragments in flight and resumed from files, in groups of one and two
ranks.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import WorkerGroups
from tests.bits import same
from tests.engine.groups import Groups
from tests.large.models import FEATURES, TARGETS, model_of
from tests.lightning.test_fabric import fabric_of, train
from tests.ranks import agreed, in_ranks, run_ranks
from tests.scripts import ROOT, run_python

pytestmark = pytest.mark.large

STEPS = 16
SAVED = 9
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:3"}


def drawn(model: nn.Module, *_: int) -> Tensor:
    """The loss of a batch that this rank draws, so that its random numbers matter."""
    x = torch.randn(8, FEATURES)
    return nn.functional.mse_loss(model(x), x[:, :TARGETS] * 2)


def values_at_end(engine: Any, model: nn.Module) -> dict[str, Tensor]:
    """The local values of the last step, and the outer ones of the end."""
    values = {f"local {name}": local.clone() for name, local in model.state_dict().items()}
    assert sum(local.numel() for local in values.values()) > 100_000
    engine.finish()
    return values | engine.outer_state_dict()


def loop(rank: int, groups: int, folder: Path, resume: bool) -> dict[str, Tensor]:
    net = partial(model_of, "wide")
    run = Groups(joined=WorkerGroups(groups), net=net, loss=drawn, **CHOICES)
    (engine,) = run.engines
    (model,) = run.models
    torch.manual_seed(100 + rank)
    if resume:
        engine.load(folder / "loop.ckpt")
        run.steps = engine.inner_steps
    else:
        run.until(SAVED)
        assert not agreed(dict(model.state_dict()))
        engine.save(folder / "loop.ckpt")
    assert run.steps == SAVED
    assert engine.rounds.in_flight
    run.until(STEPS)
    values = values_at_end(engine, model)
    return {**values, "bytes": torch.tensor(engine.report()["bytes_sent"])}


def fabric_loop(rank: int, groups: int, folder: Path, resume: bool) -> dict[str, Tensor]:
    """The same with Fabric, and with a validation on the way."""
    fabric = fabric_of(4, worker_groups=groups, **CHOICES)
    net = model_of("normed", seed=rank)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    torch.manual_seed(100 + rank)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        assert fabric.load(folder / "fabric.ckpt", state) == {}
        assert fabric.strategy.engine.rounds.in_flight
    for step in range(state["step"] + 1, STEPS + 1):
        train(fabric, optimizer, drawn(model))
        if step == SAVED:
            assert not agreed(dict(model.state_dict()))
            with fabric.strategy.evaluate(), torch.no_grad():
                model.eval()(torch.ones(8, FEATURES))
            model.train()
            fabric.save(folder / "fabric.ckpt", {**state, "step": step})
    return values_at_end(fabric.strategy, model)


def require_resumed(rank: int, train: Any, folder: Path) -> None:
    for groups in (2, 4):
        folder_of_run = folder / str(groups)
        through = train(rank, groups, folder_of_run, resume=False)
        resumed = train(rank, groups, folder_of_run, resume=True)
        assert same(resumed, through)


def test_a_loop_goes_on_bit_for_bit_with_fragments_in_flight(tmp_path: Path) -> None:
    run_ranks(lambda rank, world_size: require_resumed(rank, loop, tmp_path), 4)
    files = {path.name for path in (tmp_path / "2" / "loop.ckpt.sdiloco").rglob("*.*")}
    assert files == {"manifest.json", *(f"rank_{rank:05d}.pt" for rank in range(4))}
    checkpoint = torch.load(tmp_path / "2" / "loop.ckpt", weights_only=True)
    model_of("wide").load_state_dict(checkpoint["state_dict"])


@in_ranks(4)
def test_a_loop_of_fabric_goes_on_bit_for_bit_with_fragments_in_flight(
    rank: int, tmp_path: Path
) -> None:
    require_resumed(rank, fabric_loop, tmp_path)


def test_the_example_of_fabric_resumes_to_the_same_loss(tmp_path: Path) -> None:
    script = ROOT / "examples" / "fabric" / "pretrain.py"

    def losses(steps: int, *arguments: str) -> list[str]:
        options = ["--save-every=22", "--accumulate=2", f"--steps={steps}", *arguments]
        printed = run_python(script, *options, folder=tmp_path, seconds=110)
        return [line for line in printed.splitlines() if "validation loss" in line]

    checkpoint = "--checkpoint=runs/stopped.ckpt"
    first, last = losses(30)
    assert float(last.split("loss ")[1].split(",")[0]) < 4.0
    assert losses(22, checkpoint)[0] == first
    assert losses(30, "--resume", checkpoint) == [last]
