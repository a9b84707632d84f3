"""The engine on large models, in simulated groups and in real processes: groups agree, whatever the compression."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import COMPRESSIONS, ErrorFeedback, Int4, RandomK
from tests.large.models import batch, made, same
from tests.ranks import run_ranks

pytestmark = [pytest.mark.large, pytest.mark.timeout(120)]

SHORT: dict[str, Any] = {"sync_every": 3, "overlap_steps": 2, "fragments": "strided:1"}
SIX: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:100"}
TENSORS = {"wide": 8, "deep": 1002, "normed": 324}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, group: int, step: int) -> None:
    x, y = batch(group, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def simulated(kind: str, groups: int, steps: int, **choices: Any) -> tuple[dict[str, Tensor], SimulatedGroups]:
    """The outer parameters after a fit of simulated groups, which all end with them."""
    models = [made(kind) for _ in range(groups)]
    before = values(models[0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    engine = SimulatedGroups(models, **choices)
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, group, step)
        engine.step()
    engine.finish()
    outer = engine.outer_state_dict()
    assert len(outer) == TENSORS[kind]
    assert sum(tensor.numel() for tensor in outer.values()) >= 100_000
    for model in models:
        assert same(values(model), outer)
    assert all(bool(tensor.isfinite().all()) for tensor in outer.values())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in outer.items() if name.endswith("weight"))
    return outer, engine


@pytest.mark.parametrize(
    "compression", [*COMPRESSIONS.values(), ErrorFeedback(Int4()), ErrorFeedback(RandomK(8, Int4()))], ids=str
)
def test_groups_end_with_the_same_bits(compression: Any) -> None:
    for exchange in ("gather",) if compression.varies() else ("gather", "two_shot"):
        _, engine = simulated("wide", 3, 9, **SHORT, compression=compression, exchange=exchange)
        assert engine.engines[0].report()["landings"] == engine.engines[0].report()["launches"] > 6


def test_as_many_fragments_as_there_are_for_three_layers_each() -> None:
    _, engine = simulated("deep", 2, 9, sync_every=4, overlap_steps=2)
    names = [name for fragment in engine.engines[0].fragments for name in fragment.names]
    assert len(set(names)) == 1002
    assert max(map(len, names)) > 64
    assert len(engine.engines[0].fragments) == 168
    # Each once and half of them twice, not counting the end.
    assert engine.engines[0].report()["landings"] == 168 + 84


def plain_loop(rank: int, world_size: int, kind: str, steps: int, choices: dict[str, Any]) -> dict[str, Tensor]:
    model = made(kind, seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = StreamingDiLoCo(model, **choices)
    for step in range(1, steps + 1):
        train(model, optimizer, rank, step)
        engine.step()
    engine.finish()
    assert same(values(model), engine.outer_state_dict())
    return engine.outer_state_dict()


@pytest.mark.parametrize(
    ("kind", "groups", "compression", "exchange"),
    [("wide", 3, "fp4", "two_shot"), ("deep", 2, "sparse", "gather"), ("normed", 3, "int4", "auto")],
)
def test_real_processes_give_the_bits_of_the_simulation(
    kind: str, groups: int, compression: str, exchange: str
) -> None:
    choices = {**SIX, "compression": compression, "exchange": exchange}
    expected, _ = simulated(kind, groups, 9, **choices)
    for outer in run_ranks(plain_loop, groups, kind, 9, choices):
        assert same(outer, expected)


def test_buffers_beyond_the_sixty_fourth_travel_together() -> None:
    models = [made("normed") for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    engine = SimulatedGroups(models, sync_every=2, overlap_steps=0, fragments=[["*"]], mixing=0.0, compression="fp32")
    norms = [[part for part in model.modules() if isinstance(part, nn.BatchNorm1d)] for model in models]
    assert 2 * len(norms[0]) == 160
    for part in (part for own in norms for part in own[:-1]):
        part.eval()  # only the statistics of the last layer change
    landings = []
    for step in range(1, 7):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, group, step)
        local = torch.stack([own[-1].running_mean for own in norms])
        landings += engine.step()[0]
        one, other = (own[-1].running_mean for own in norms)
        if step % 2 == 0:
            torch.testing.assert_close(one, local.mean(dim=0))
        assert torch.equal(one, other) == (step % 2 == 0)
    assert all(torch.equal(a.running_var, b.running_var) for a, b in zip(*norms, strict=True))
    sent = [landing.bytes_sent for landing in landings]
    # First all of them, and then those that have a bit of their own only if they changed.
    assert [sent[0] - bytes_sent for bytes_sent in sent[1:]] == [63 * 44 * 4] * 2
