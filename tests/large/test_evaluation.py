"""Validation of large models inside a fit: weights that users swap, and the mean of the groups in the first round."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.fits import LIGHTNING
from tests.large.models import Large, batch, made, same
from tests.large.test_fits import Batches, Sharded
from tests.ranks import run_processes

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]

OTHER = "pytorch_lightning"
SETTINGS: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "layers_per_fragment": 1}
STEPS = 11


def held(module: nn.Module) -> dict[str, Tensor]:
    return {name: values.detach().clone() for name, values in module.named_parameters()}


def put(module: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])


class Average:
    """A moving average as people write it: it takes the place of the weights for a validation."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.values, self.before = decay, dict[str, Tensor](), dict[str, Tensor]()

    def update(self, module: nn.Module) -> None:
        for name, values in held(module).items():
            self.values[name] = torch.lerp(values, self.values.get(name, values), self.decay)

    def swap_in(self, module: nn.Module) -> None:
        if self.values:
            self.before = held(module)
            put(module, self.values)

    def swap_out(self, module: nn.Module) -> None:
        if self.before:
            put(module, self.before)
            self.before = {}


def callback(distribution: str, average: Average, begin: str, end: str) -> Any:
    """The average as a callback that swaps in two of its hooks."""

    class Swapping(importlib.import_module(distribution).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            average.update(module)

    setattr(Swapping, begin, lambda self, trainer, module: average.swap_in(module))
    setattr(Swapping, end, lambda self, trainer, module: average.swap_out(module))
    return Swapping()


def module(distribution: str, average: Average | None = None, begin: str = "", end: str = "", seed: int = 0) -> Any:
    """A module of 220,000 parameters that keeps what it trains from and what it validates."""

    class Seen(importlib.import_module(distribution).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = made("wide", seed)
            self.trained, self.seen, self.expected = [], [], []

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.trained.append(held(self))
            return nn.functional.mse_loss(self.net(parts[0]), parts[1])

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            self.seen.append(held(self))
            self.expected.append({} if average is None else {n: v.clone() for n, v in average.values.items()})
            self.log("val_loss", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    if begin and average is not None:

        def update(self: Any, *args: Any) -> None:
            average.update(self)

        Seen.on_train_batch_end = update
        setattr(Seen, begin, lambda self: average.swap_in(self))
        setattr(Seen, end, lambda self: average.swap_out(self))
    return Seen()


class Loader(Batches):
    """The same few batches for every validation."""

    def __init__(self, group: int, length: int = 2) -> None:
        super().__init__(group, 0, 1)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter([batch(self.place[0], 1_000 + step) for step in range(self.length)])


def fit(distribution: str, rank: int, model: Any, loader: Any = None, **choices: Any) -> Any:
    """Fits in two groups of one rank, and validates every second step."""
    strategy = fits.strategy(distribution, **{**SETTINGS, **choices.pop("settings", {})})
    validating = {"val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = fits.trainer(distribution, strategy=strategy, devices=2, **{"max_steps": STEPS, **validating, **choices})
    trainer.fit(model, Batches(rank, 0, 1), Loader(9) if loader is None else loader)
    return trainer


SWAPS = [
    ("on_validation_start", "on_validation_end"),
    ("on_validation_epoch_start", "on_validation_epoch_end"),
    ("on_validation_model_eval", "on_validation_model_train"),
]


@pytest.mark.parametrize("distribution", [LIGHTNING, OTHER])
@pytest.mark.parametrize(
    ("owner", "hooks"),
    [("callback", SWAPS[0]), ("callback", SWAPS[1]), ("callbacks", SWAPS[0])] + [("module", hooks) for hooks in SWAPS],
)
def test_validation_sees_weights_that_are_swapped_in_and_training_goes_on_from_the_local_ones(
    owner: str, hooks: tuple[str, str], distribution: str
) -> None:
    def run(rank: int, world_size: int, averages: bool) -> Any:
        average, callbacks = Average(), []
        if averages and owner != "module":
            callbacks = [callback(distribution, average, *hooks)]
        if averages and owner == "callbacks":
            # They put back in the order in which they swapped in, so the second puts back what the first had put in.
            callbacks = [callback(distribution, Average(0.5), *hooks), *callbacks]
        of_module = hooks if averages and owner == "module" else ("", "")
        model = module(distribution, average, *of_module)
        choices = {} if averages else {"limit_val_batches": 0}
        fit(distribution, rank, model, callbacks=callbacks, **choices)
        return model.trained, model.seen, model.expected, held(model)

    averaged, plain = run_processes(run, 2, True), run_processes(run, 2, False)
    for (trained, seen, expected, left), (without, _, _, left_without) in zip(averaged, plain, strict=True):
        assert len(trained) == STEPS
        assert all(same(one, other) for one, other in zip(trained, without, strict=True))
        assert same(left, left_without)
        # The sanity check comes before there is an average.
        assert len(seen) == 11
        assert all(same(one, other) for one, other in zip(seen[1:], expected[1:], strict=True))
