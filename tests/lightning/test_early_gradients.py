"""Gradients go before the forward pass, unless somebody may see it; what is trained is the same."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdiloco.lightning.host import ddp
from tests import fits
from tests.fits import LIGHTNING, play

pl = importlib.import_module(LIGHTNING)
SHORT: dict[str, Any] = {"sync_every": 3, "overlap_steps": 2, "fragments": [["*"]], "compression": "fp32"}


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Notes in every step whether gradients of the batch before are there."""

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = ((8, width), (width, width), (width, 4)) if width else ((8, 4),)
        self.layer = nn.Sequential(*(nn.Linear(*size) for size in sizes))
        self.rate = 1e-6 if width else 0.1
        self.kept: list[bool] = []

    def training_step(self, batch: Any) -> Any:
        self.kept.append(any(parameter.grad is not None for parameter in self.parameters()))
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Zeroing(Net):
    def optimizer_zero_grad(self, *args: Any) -> None:
        super().optimizer_zero_grad(*args)


class Stepping(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer, loss = self.optimizers(), super().training_step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Looking(pl.Callback):  # type: ignore[misc, name-defined]
    def on_before_zero_grad(self, *_: Any) -> None: ...


def test_gradients_of_large_models_go_before_the_forward_pass_where_nobody_can_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, of_the_net, default = [False] + [True] * 5, 4 * (8 * 4 + 4), ddp._LEAST_BYTES  # late as in Lightning
    cases: dict[str, tuple[Any, int, dict[str, Any], list[bool]]] = {
        "large enough": (Net, of_the_net, {}, [False] * 6),
        "too small": (Net, of_the_net + 1, {}, late),
        "accumulated": (Net, 1, {"accumulate_grad_batches": 2}, [False, True] * 3),
        "zeroing": (Zeroing, 1, {}, late),
        "zeroing, accumulated": (Zeroing, 1, {"accumulate_grad_batches": 2}, late),
        "stepping": (Stepping, 1, {}, late),
        "manual": (Manual, 1, {}, late),
        "looking": (Net, 1, {"callbacks": [Looking()]}, late),
        "small": (Net, default, {}, late),
        "67 MB": (partial(Net, 4096), default, {}, [False] * 6),
    }

    def fit(rank: int, world_size: int, case: str) -> tuple[list[bool], list[Tensor]]:
        make, least, choices, _ = cases[case]
        monkeypatch.setattr(ddp, "_LEAST_BYTES", least)
        model, generator = make(), torch.Generator().manual_seed(1)
        batches = [(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(6)]
        trainer = fits.trainer(strategy=fits.strategy(worker_groups=1, **SHORT), devices=1, max_epochs=1, **choices)
        trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        return model.kept, [] if case == "67 MB" else [parameter.detach() for parameter in model.parameters()]

    found = {case: ranks[0] for case, ranks in play(1, {case: partial(fit, case=case) for case in cases}).items()}
    assert {case: kept for case, (kept, _) in found.items()} == {case: of[-1] for case, of in cases.items()}
    # What is trained does not depend on it.
    for early, other in (("large enough", "zeroing"), ("accumulated", "zeroing, accumulated")):
        assert all(map(torch.equal, found[early][1], found[other][1]))
