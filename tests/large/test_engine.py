"""The engine on large models, in simulated groups and in real processes: groups agree, whatever the compression."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import COMPRESSIONS, ErrorFeedback, Int4, RandomK
from tests.bits import same
from tests.large.models import batch, held, made
from tests.ranks import run_ranks

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, group: int, step: int) -> None:
    x, y = batch(group, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def fitted(models: list[nn.Module], first: int, engine: Any) -> dict[str, Tensor]:
    """The outer parameters after nine steps of groups, of which these models are the first and those after it."""
    before = held(models[0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(1, 10):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True), first):
            train(model, optimizer, group, step)
        engine.step()
    engine.finish()
    outer: dict[str, Tensor] = engine.outer_state_dict()
    assert sum(values.numel() for values in outer.values()) >= 100_000
    assert all(same(held(model), outer) for model in models)
    assert all(bool(values.isfinite().all()) for values in outer.values())
    assert not any(torch.equal(values, before[name]) for name, values in outer.items() if name.endswith("weight"))
    return outer


def test_simulated_groups_end_with_the_same_bits() -> None:
    for compression in (*COMPRESSIONS.values(), ErrorFeedback(Int4()), ErrorFeedback(RandomK(8, Int4()))):
        for exchange in ("gather",) if compression.varies() else ("gather", "two_shot"):
            models, choices = [made("wide") for _ in range(3)], {"compression": compression, "exchange": exchange}
            engine = SimulatedGroups(models, sync_every=3, overlap_steps=2, fragments="strided:1", **choices)
            fitted(models, 0, engine)
            report = engine.engines[0].report()
            assert report["landings"] == report["launches"] > 6, choices


@pytest.mark.parametrize(
    ("kind", "groups", "compression", "exchange"),
    [("wide", 3, "fp4", "two_shot"), ("deep", 2, "sparse", "gather"), ("normed", 3, "int4", "auto")],
)
def test_real_processes_give_the_bits_of_the_simulation(
    kind: str, groups: int, compression: str, exchange: str
) -> None:
    choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:100"}
    choices |= {"compression": compression, "exchange": exchange}
    models = [made(kind) for _ in range(groups)]
    expected = fitted(models, 0, SimulatedGroups(models, **choices))

    def run(rank: int, world_size: int) -> None:
        model = made(kind, seed=rank)
        assert same(fitted([model], rank, StreamingDiLoCo(model, **choices)), expected)

    run_ranks(run, groups)


def test_buffers_beyond_the_sixty_fourth_travel_together() -> None:
    models = [made("normed") for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    engine = SimulatedGroups(models, sync_every=2, overlap_steps=0, fragments=[["*"]], mixing=0.0, compression="fp32")
    norms = [[part for part in model.modules() if isinstance(part, nn.BatchNorm1d)] for model in models]
    assert 2 * len(norms[0]) == 160
    for part in (part for own in norms for part in own[:-1]):
        part.eval()  # only the statistics of the last layer change
    sent = []
    for step in range(1, 7):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, group, step)
        local = torch.stack([own[-1].running_mean for own in norms])
        sent += [landing.bytes_sent for landing in engine.step()[0]]
        one, other = (own[-1].running_mean for own in norms)
        if step % 2 == 0:
            torch.testing.assert_close(one, local.mean(dim=0))
        assert torch.equal(one, other) == (step % 2 == 0)
    assert all(torch.equal(a.running_var, b.running_var) for a, b in zip(*norms, strict=True))
    # First all of them, and then those that have a bit of their own only if they changed.
    assert [sent[0] - bytes_sent for bytes_sent in sent[1:]] == [63 * 44 * 4] * 2
