"""Weights and buffers that hooks overwrite on purpose: on all ranks alike they are the new outer
model.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups
from tests import fits
from tests.fits import SomeBatches, assert_same
from tests.ranks import run_processes

CHOICES = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": 1,
    "compression": "fp32",
}


class Fitted(NamedTuple):
    """A fit of this rank: the end of its model, and the warnings that hooks overwrote it."""

    weights: dict[str, Tensor]
    threshold: Tensor
    flights_dropped: int
    warnings: list[str]


def fitted(rank: int, world_size: int, **hooks: Any) -> Fitted:
    """Fits 24 steps in 3 epochs, and validates after steps 4 and 8 of each."""
    messages = fits.said_by("lightning_sdiloco")
    hooks = {"validation_step": lambda self, parts, index: None, **hooks}
    module = fits.module(**hooks)
    module.register_buffer("threshold", torch.zeros(4))
    trainer = fits.trainer(
        strategy=fits.strategy(worker_groups=2, **CHOICES),
        devices=world_size,
        max_epochs=3,
        val_check_interval=4,
    )
    group = rank // (world_size // 2)
    trainer.fit(module, SomeBatches(group, 8), SomeBatches(0, 1))
    return Fitted(
        weights=weights_of(module),
        threshold=module.threshold.clone(),
        flights_dropped=trainer.strategy.report()["flights_dropped"],
        warnings=[line for line in messages if "overwrote" in line],
    )


def fit_ranks(ranks: int = 2, **hooks: Any) -> list[Fitted]:
    return list(run_processes(partial(fitted, **hooks), ranks, timeout=120))


def weights_of(module: Any) -> dict[str, Tensor]:
    return {name: values.detach().clone() for name, values in module.net.named_parameters()}


def fill(module: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in module.net.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("world_size", [2, 4])
def test_weights_that_a_validation_hook_loads_on_all_ranks_are_the_outer_model(
    world_size: int,
) -> None:
    def load(self: Any) -> None:
        if self.global_step == 12:
            fill(self, 0.01)

    ranks = fit_ranks(world_size, on_validation_end=load)
    first = ranks[0]
    for rank in ranks:
        assert_same(rank.weights, first.weights)
        assert rank.flights_dropped >= 1
        largest = max(float(values.abs().max()) for values in rank.weights.values())
        assert largest < 0.3, "training continues from the weights that the hook wrote"
    (warning,) = first.warnings
    overwritten = "'net.0.bias', 'net.0.weight', 'net.2.bias' and 5 more"
    assert f"Own.on_validation_end overwrote {overwritten}" in warning


def test_weights_that_are_swapped_for_a_validation_change_nothing() -> None:
    def swap_in(self: Any) -> None:
        self.aside = weights_of(self)
        fill(self, 1.0)

    def swap_out(self: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(self.aside[name])

    swapped = fit_ranks(on_validation_start=swap_in, on_validation_end=swap_out)
    for rank, expected in zip(swapped, fit_ranks(), strict=True):
        assert rank.warnings == []
        assert_same(rank.weights, expected.weights)


def test_a_buffer_that_a_validation_hook_sets_stays_set() -> None:
    def set_threshold(self: Any) -> None:
        if self.global_step == 12:
            self.threshold.fill_(7.0)

    for rank in fit_ranks(on_validation_epoch_end=set_threshold):
        assert rank.threshold.tolist() == [7.0] * 4


def test_weights_that_hooks_of_epochs_fill_on_all_ranks_are_the_outer_model() -> None:
    def fill_first_layer(self: Any) -> None:
        if self.current_epoch == 1:
            with torch.no_grad():
                self.net[0].weight.fill_(0.5)

    ranks = fit_ranks(on_train_epoch_start=fill_first_layer)
    for rank in ranks:
        assert float((rank.weights["0.weight"] - 0.5).abs().max()) < 0.4
        assert float(rank.weights["2.weight"].abs().max()) > 0.1
    words = "Own.on_train_epoch_start overwrote 'net.0.weight' with the same values on all ranks"
    assert words in ranks[0].warnings[0]


def test_weights_that_hooks_overwrite_unequally_are_reported_once_with_a_remedy() -> None:
    def clamp(self: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.05, 0.05)

    first, second = fit_ranks(on_train_epoch_end=clamp)
    assert len(first.warnings) == len(second.warnings) == 1
    words = "Own.on_train_epoch_end overwrote 'net.0.weight' with different values"
    assert words in first.warnings[0]
    assert "strategy.set_outer()" in first.warnings[0]


def test_set_outer_takes_the_model_of_the_first_group_and_drops_flights() -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    groups = SimulatedGroups(models, **CHOICES)
    for _ in range(5):
        for model in models:
            with torch.no_grad():
                model.weight.add_(0.1)
        groups.step()
    engine = groups.engines[0]
    assert engine.rounds.in_flight == (0,)
    with pytest.raises(ValueError, match="'head', which is not a trainable parameter"):
        engine.set_outer(["head"])
    with torch.no_grad():
        models[0].weight.fill_(4.0)
    with engine.evaluate():
        bias = models[0].bias.clone()
    engine.set_outer(["weight"])
    assert engine.rounds.in_flight == ()
    assert engine.report()["flights_dropped"] == 1
    with engine.evaluate():
        assert models[0].weight.tolist() == [[4.0] * 3] * 2
        assert torch.equal(models[0].bias, bias)
