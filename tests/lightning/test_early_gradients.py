"""Gradients go before the forward pass, unless somebody may see it; what is trained is the same."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco.lightning import model_format as ddp
from tests import fits
from tests.fits import LIGHTNING, SomeBatches
from tests.ranks import in_ranks

pl = importlib.import_module(LIGHTNING)
SHORT: dict[str, Any] = {"sync_every": 3, "overlap_steps": 2, "fragments": [["*"]], "compression": "fp32"}


def made(automatic: bool = True, width: int = 0, **members: Any) -> Any:
    """A module that notes in every step whether gradients of the batch before are there."""

    def training_step(self: Any, parts: Any, index: int) -> Any:
        self.kept.append(any(parameter.grad is not None for parameter in self.parameters()))
        loss = self.loss(parts)
        if automatic:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        return optimizer.step()

    torch.manual_seed(0)
    sizes = ((5, width), (width, width), (width, 3)) if width else ((5, 3),)
    net = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    module = fits.module(net=net, training_step=training_step, **members)
    module.automatic_optimization, module.kept = automatic, []
    return module


def zeroing(self: Any, *args: Any) -> None:
    args[-1].zero_grad()


def stepping(self: Any, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure)


def slowly(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=1e-6)


class Looking(pl.Callback):  # type: ignore[misc, name-defined]
    def on_before_zero_grad(self, *_: Any) -> None: ...


@in_ranks(1)
def test_gradients_of_large_models_go_before_the_forward_pass_where_nobody_can_see_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, of_the_net, default = [False] + [True] * 5, 4 * (5 * 3 + 3), ddp._LEAST_BYTES  # late as in Lightning
    zeroed = partial(made, optimizer_zero_grad=zeroing)
    cases: dict[str, tuple[Any, int, dict[str, Any], list[bool]]] = {
        "large enough": (made, of_the_net, {}, [False] * 6),
        "too small": (made, of_the_net + 1, {}, late),
        "accumulated": (made, 1, {"accumulate_grad_batches": 2}, [False, True] * 3),
        "zeroing": (zeroed, 1, {}, late),
        "zeroing, accumulated": (zeroed, 1, {"accumulate_grad_batches": 2}, late),
        "stepping": (partial(made, optimizer_step=stepping), 1, {}, late),
        "manual": (partial(made, automatic=False), 1, {}, late),
        "looking": (made, 1, {"callbacks": [Looking()]}, late),
        "67 MB": (partial(made, width=4096, configure_optimizers=slowly), default, {}, [False] * 6),
    }
    trained = {}
    for case, (make, least, choices, kept) in cases.items():
        monkeypatch.setattr(ddp, "_LEAST_BYTES", least)
        trainer = fits.trainer(strategy=fits.strategy(worker_groups=1, **SHORT), devices=1, max_epochs=1, **choices)
        trainer.fit(model := make(), SomeBatches(0, 6))
        assert model.kept == kept, case
        trained[case] = list(model.parameters())
    # What is trained does not depend on it.
    for early, other in (("large enough", "zeroing"), ("accumulated", "zeroing, accumulated")):
        assert all(map(torch.equal, trained[early], trained[other]))
