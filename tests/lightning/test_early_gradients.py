"""Gradients go before the forward pass, unless somebody may see it; what is trained is the same."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sdiloco.lightning.host import ddp
from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.test_loops import SHORT
from tests.ranks import run_processes

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


class Fitted(NamedTuple):
    """What a fit did: whether gradients were there at each step, and the parameters at the end."""

    kept: list[bool]
    parameters: list[torch.Tensor]


def fitted(make: Callable[[], Net], callback: type[Any] | None = None, accumulated: int = 1, least: int = 1) -> Fitted:
    """Fits on six batches, in a process of its own, where so many bytes of gradients go early."""

    def fit(rank: int, world_size: int) -> Fitted:
        del rank
        ddp._LEAST_BYTES = least
        model = make()
        generator = torch.Generator().manual_seed(1)
        batches = [(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(6)]
        loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        fits.trainer(
            strategy=fits.strategy(worker_groups=1, **SHORT),
            devices=world_size,
            max_epochs=1,
            callbacks=[callback()] if callback else [],
            accumulate_grad_batches=accumulated,
        ).fit(model, loader)
        return Fitted(model.kept, [parameter.detach().clone() for parameter in model.parameters()])

    return run_processes(fit, 1)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "callback", "accumulated", "kept"),
    [
        (Net, None, 1, [False] * 6),
        (Net, None, 2, [False, True] * 3),
        (Zeroing, None, 1, [False] + [True] * 5),
        (Stepping, None, 1, [False] + [True] * 5),
        (Manual, None, 1, [False] + [True] * 5),
        (Net, Looking, 1, [False] + [True] * 5),
    ],
)
def test_gradients_go_before_the_forward_pass_where_nobody_can_see_it(
    make: type[Net], callback: type[Any] | None, accumulated: int, kept: list[bool]
) -> None:
    assert fitted(make, callback, accumulated).kept == kept


class Large(Net):
    """16.8 million parameters: 67 MB."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (8, 4096), (4096, 4096), (4096, 4)
        self.layer: Any = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def test_gradients_of_large_models_go_early_and_those_of_small_ones_when_lightning_lets_them_go() -> None:
    least = ddp._LEAST_BYTES
    assert fitted(Large, least=least).kept == [False] * 6
    assert fitted(Net, least=least).kept == [False] + [True] * 5


def test_so_many_bytes_of_gradients_go_early_and_one_less_does_not() -> None:
    of_the_net = 4 * (8 * 4 + 4)
    assert fitted(Net, least=of_the_net).kept == [False] * 6
    assert fitted(Net, least=of_the_net + 1).kept == [False] + [True] * 5


@pytest.mark.parametrize("accumulated", [1, 2])
def test_what_is_trained_does_not_depend_on_it(accumulated: int) -> None:
    ours, late = (fitted(make, accumulated=accumulated) for make in (Net, Zeroing))
    assert ours.kept != late.kept
    assert all(map(torch.equal, ours.parameters, late.parameters))
