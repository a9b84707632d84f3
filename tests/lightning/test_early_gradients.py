"""Gradients go before the forward pass, unless somebody may see it; what is trained is the same."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco.lightning import model_format as ddp
from tests import fits
from tests.fits import LIGHTNING, SomeBatches
from tests.ranks import in_ranks

SHORT: dict[str, Any] = {"sync_every": 3, "overlap_steps": 2, "fragments": [["*"]], "compression": "fp32"}


class Looking(importlib.import_module(LIGHTNING).Callback):
    def on_before_zero_grad(self, *_: Any) -> None: ...


def training_step(self: Any, parts: Any, index: int) -> Any:
    """Notes whether gradients of the batch before are there."""
    self.kept.append(any(parameter.grad is not None for parameter in self.parameters()))
    loss = self.loss(parts)
    if not self.automatic_optimization:
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
    return loss


@in_ranks(1)
def test_gradients_of_large_models_go_before_the_forward_pass_where_nobody_can_see_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, of_the_net, default = [False] + [True] * 5, 4 * (5 * 3 + 3), ddp._LEAST_BYTES  # late as in Lightning
    zeroing: dict[str, Any] = {"optimizer_zero_grad": lambda self, *args: args[-1].zero_grad()}
    stepping = {"optimizer_step": lambda self, epoch, index, optimizer, closure=None: optimizer.step(closure=closure)}
    large = nn.Sequential(nn.Linear(5, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 3))
    accumulated = {"accumulate_grad_batches": 2}
    cases: dict[str, tuple[dict[str, Any], int, dict[str, Any], list[bool]]] = {
        "large enough": ({}, of_the_net, {}, [False] * 6),
        "too small": ({}, of_the_net + 1, {}, late),
        "accumulated": ({}, 1, accumulated, [False, True] * 3),
        "zeroing": (zeroing, 1, {}, late),
        "zeroing, accumulated": (zeroing, 1, accumulated, late),
        "stepping": (stepping, 1, {}, late),
        "manual": ({"automatic_optimization": False}, 1, {}, late),
        "looking": ({}, 1, {"callbacks": [Looking()]}, late),
        "67 MB": ({"net": large}, default, {}, [False] * 6),
    }
    trained, wrong = {}, {}
    for case, (members, least, choices, kept) in cases.items():
        monkeypatch.setattr(ddp, "_LEAST_BYTES", least)
        torch.manual_seed(0)
        model = fits.module(**{"net": nn.Linear(5, 3), "training_step": training_step, "kept": [], **members})
        trainer = fits.trainer(strategy=fits.strategy(worker_groups=1, **SHORT), devices=1, max_epochs=1, **choices)
        trainer.fit(model, SomeBatches(0, 6))
        wrong |= {case: model.kept} if model.kept != kept else {}
        trained[case] = list(model.parameters())
    assert wrong == {}
    # What is trained does not depend on it.
    for early, other in (("large enough", "zeroing"), ("accumulated", "zeroing, accumulated")):
        assert all(map(torch.equal, trained[early], trained[other]))
