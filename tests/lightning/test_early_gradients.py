"""Gradients go before the forward pass, unless somebody may see it; what is trained is the same."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.test_loops import SHORT

pl = importlib.import_module(LIGHTNING)


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Notes in every step whether gradients of the batch before are there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)
        self.kept: list[bool] = []

    def training_step(self, batch: Any) -> Any:
        self.kept.append(any(parameter.grad is not None for parameter in self.parameters()))
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


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
        optimizer = self.optimizers()
        loss = super().training_step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Looking(pl.Callback):  # type: ignore[misc, name-defined]
    def on_before_zero_grad(self, *_: Any) -> None: ...


def fitted(make: Callable[[], Net], strategy: Any, **choices: Any) -> Net:
    """Fits on six batches."""
    model = make()
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(6)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    fits.trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **choices).fit(model, loader)
    return model


def alone() -> Any:
    return fits.strategy(worker_groups=1, **{**SHORT, "outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 1.0})


@pytest.mark.parametrize(
    ("make", "choices", "kept"),
    [
        (Net, {}, [False] * 6),
        (Net, {"accumulate_grad_batches": 2}, [False, True] * 3),
        (Zeroing, {}, [False] + [True] * 5),
        (Stepping, {}, [False] + [True] * 5),
        (Manual, {}, [False] + [True] * 5),
        (Net, {"callbacks": [Looking()]}, [False] + [True] * 5),
    ],
)
def test_gradients_go_before_the_forward_pass_where_nobody_can_see_it(
    make: type[Net], choices: dict[str, Any], kept: list[bool]
) -> None:
    assert fitted(make, alone(), **choices).kept == kept


@pytest.mark.parametrize("accumulated", [1, 2])
def test_what_is_trained_does_not_depend_on_it(accumulated: int) -> None:
    ours, late = (fitted(make, alone(), accumulate_grad_batches=accumulated) for make in (Net, Zeroing))
    assert ours.kept != late.kept
    for one, other in zip(ours.parameters(), late.parameters(), strict=True):
        assert torch.equal(one, other)
