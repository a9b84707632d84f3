"""A loop of one's own, stopped with fragments in flight and resumed from files, in groups of one and two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import StreamingDiLoCo, WorkerGroups
from tests.large.models import FEATURES, TARGETS, made
from tests.ranks import run_ranks

pytestmark = [pytest.mark.large, pytest.mark.timeout(120)]

STEPS, STOPPED_AT = 16, 9
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "layers_per_fragment": 3}


def loop(rank: int, world_size: int, folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """Trains from one step to another; whoever does not begin at the first one goes on from a file."""
    groups = WorkerGroups(2)
    model = made("wide", seed=rank)
    wrapped: nn.Module = model
    if groups.group_size > 1:
        wrapped = DistributedDataParallel(model, process_group=groups.process_group)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    engine = StreamingDiLoCo(wrapped, worker_groups=groups, inner_optimizers=[optimizer], **CHOICES)
    torch.manual_seed(100 + rank)
    if first > 1:
        engine.load(folder / "engine.ckpt")
        assert engine.inner_steps == first - 1
        assert engine.in_flight
    for step in range(first, last + 1):
        optimizer.zero_grad()
        x = torch.randn(8, FEATURES)  # the random numbers of this rank go on too
        nn.functional.mse_loss(wrapped(x), x[:, :TARGETS] * 2).backward()
        optimizer.step()
        engine.step()
        if step == STOPPED_AT:
            engine.save(folder / "engine.ckpt")
    seen = {f"local {name}": values.clone() for name, values in model.state_dict().items()}
    if last == STEPS:
        engine.finish()
        seen |= engine.outer_state_dict()
        seen["bytes"] = torch.tensor(engine.report()["bytes_sent"])
    return seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_goes_on_bit_for_bit_with_fragments_in_flight(ranks: int, tmp_path: Path) -> None:
    never_stopped = run_ranks(loop, ranks, tmp_path / "never", 1, STEPS)
    assert sum(values.numel() for name, values in never_stopped[0].items() if "local" in name) > 100_000
    stopped = run_ranks(loop, ranks, tmp_path, 1, STOPPED_AT)
    assert not torch.equal(stopped[0]["local 0.0.weight"], stopped[-1]["local 0.0.weight"])
    for actual, expected in zip(run_ranks(loop, ranks, tmp_path, STOPPED_AT + 1, STEPS), never_stopped, strict=True):
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    files = {path.name for path in (tmp_path / "engine.ckpt.sdiloco").rglob("*.*")}
    assert files == {"manifest.json", *(f"rank_{rank:05d}.pt" for rank in range(ranks))}
    outer = torch.load(tmp_path / "engine.ckpt", weights_only=True)["state_dict"]
    made("wide").load_state_dict(outer)
