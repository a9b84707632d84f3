"""Gradients go before the forward pass, unless somebody may see it; what is trained is the same."""

import importlib
from typing import Any

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


class Large(Net):
    """16.8 million parameters: 67 MB."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (8, 4096), (4096, 4096), (4096, 4)
        self.layer: Any = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


LATE = [False] + [True] * 5  # As in Lightning.
OF_THE_NET = 4 * (8 * 4 + 4)  # Bytes.
DEFAULT = ddp._LEAST_BYTES
CASES: list[tuple[type[Net], bool, int, int, list[bool]]] = [
    (Net, False, 1, OF_THE_NET, [False] * 6),
    (Net, False, 1, OF_THE_NET + 1, LATE),
    (Net, False, 2, 1, [False, True] * 3),
    (Zeroing, False, 1, 1, LATE),
    (Zeroing, False, 2, 1, LATE),
    (Stepping, False, 1, 1, LATE),
    (Manual, False, 1, 1, LATE),
    (Net, True, 1, 1, LATE),
    (Net, False, 1, DEFAULT, LATE),
    (Large, False, 1, DEFAULT, [False] * 6),
]


def test_gradients_of_large_models_go_before_the_forward_pass_where_nobody_can_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fitted(make: type[Net], looks: bool, accumulated: int, least: int) -> tuple[list[bool], list[torch.Tensor]]:
        """Whether gradients were there at each of six steps, and the parameters at the end."""
        monkeypatch.setattr(ddp, "_LEAST_BYTES", least)
        model, generator = make(), torch.Generator().manual_seed(1)
        batches = [(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(6)]
        fits.trainer(
            strategy=fits.strategy(worker_groups=1, **SHORT),
            devices=1,
            max_epochs=1,
            callbacks=[Looking()] if looks else [],
            accumulate_grad_batches=accumulated,
        ).fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        return model.kept, [parameter.detach().clone() for parameter in model.parameters() if make is not Large]

    (found,) = run_processes(lambda *_: [fitted(*case[:4]) for case in CASES], 1)
    for case, (kept, _) in zip(CASES, found, strict=True):
        assert kept == case[4], case
    # What is trained does not depend on it.
    for early, late in ((0, 3), (2, 4)):
        assert all(map(torch.equal, found[early][1], found[late][1]))
