"""A loop of one's own, stopped with fragments in flight and resumed from files, in groups of one
and two ranks.
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
from tests.large.models import FEATURES, TARGETS, made
from tests.lightning.test_fabric import fabric_of, train
from tests.ranks import agreed, in_ranks, run_ranks
from tests.scripts import ROOT, run_python

pytestmark = pytest.mark.large

STEPS = 16
SAVED = 9
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:3"}


def drawn(model: nn.Module, *_: int) -> Tensor:
    """The loss of a batch that this rank draws: its random numbers go on too."""
    x = torch.randn(8, FEATURES)
    return nn.functional.mse_loss(model(x), x[:, :TARGETS] * 2)


def ended(engine: Any, model: nn.Module) -> dict[str, Tensor]:
    """What is worth comparing: local values of the last step, the outer ones of the end."""
    seen = {f"local {name}": values.clone() for name, values in model.state_dict().items()}
    assert sum(values.numel() for values in seen.values()) > 100_000
    engine.finish()
    return seen | engine.outer_state_dict()


def loop(rank: int, groups: int, folder: Path, resume: bool) -> dict[str, Tensor]:
    run = Groups(joined=WorkerGroups(groups), net=partial(made, "wide"), loss=drawn, **CHOICES)
    (engine,), (model,) = run.engines, run.models
    torch.manual_seed(100 + rank)
    if resume:
        engine.load(folder / "loop.ckpt")
        run.steps = engine.inner_steps
    else:
        run.until(SAVED)
        assert not agreed(dict(model.state_dict()))
        engine.save(folder / "loop.ckpt")
    assert (run.steps, bool(engine.in_flight)) == (SAVED, True)
    run.until(STEPS)
    return {**ended(engine, model), "bytes": torch.tensor(engine.report()["bytes_sent"])}


def fabric_loop(rank: int, groups: int, folder: Path, resume: bool) -> dict[str, Tensor]:
    """The same with Fabric, and with a validation on the way."""
    fabric = fabric_of(4, worker_groups=groups, **CHOICES)
    model, optimizer = fabric.setup(
        net := made("normed", seed=rank), torch.optim.AdamW(net.parameters(), lr=0.01)
    )
    torch.manual_seed(100 + rank)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        assert fabric.load(folder / "fabric.ckpt", state) == {}
        assert fabric.strategy.engine.in_flight
    for step in range(state["step"] + 1, STEPS + 1):  # type: ignore[operator]
        train(fabric, optimizer, drawn(model))
        if step == SAVED:
            assert not agreed(dict(model.state_dict()))
            with fabric.strategy.evaluate(), torch.no_grad():
                model.eval()(torch.ones(8, FEATURES))
            model.train()
            fabric.save(folder / "fabric.ckpt", {**state, "step": step})
    return ended(fabric.strategy, model)


def require_resumed(rank: int, train: Any, folder: Path) -> None:
    for groups in (2, 4):
        at = folder / str(groups)
        through, resumed = (train(rank, groups, at, again) for again in (False, True))
        assert same(resumed, through)


def test_a_loop_goes_on_bit_for_bit_with_fragments_in_flight(tmp_path: Path) -> None:
    run_ranks(lambda rank, world_size: require_resumed(rank, loop, tmp_path), 4)
    files = {path.name for path in (tmp_path / "2" / "loop.ckpt.sdiloco").rglob("*.*")}
    assert files == {"manifest.json", *(f"rank_{rank:05d}.pt" for rank in range(4))}
    made("wide").load_state_dict(
        torch.load(tmp_path / "2" / "loop.ckpt", weights_only=True)["state_dict"]
    )


@in_ranks(4)
def test_a_loop_of_fabric_goes_on_bit_for_bit_with_fragments_in_flight(
    rank: int, tmp_path: Path
) -> None:
    require_resumed(rank, fabric_loop, tmp_path)


def test_the_example_of_fabric_resumes_to_the_same_loss(tmp_path: Path) -> None:
    def losses(steps: int, *arguments: str) -> list[str]:
        told = ["--save-every=22", "--accumulate=2", f"--steps={steps}", *arguments]
        printed = run_python(
            ROOT / "examples" / "fabric" / "pretrain.py", *told, folder=tmp_path, seconds=110
        )
        return [line for line in printed.splitlines() if "validation loss" in line]

    whole = losses(30)
    assert len(whole) == 2
    assert float(whole[-1].split("loss ")[1].split(",")[0]) < 4.0
    checkpoint = "--checkpoint=runs/stopped.ckpt"
    assert losses(22, checkpoint)[0] == whole[0]
    assert losses(30, "--resume", checkpoint) == whole[1:]
