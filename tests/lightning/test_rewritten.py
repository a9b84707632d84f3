"""Weights and buffers that hooks overwrite on purpose: on all ranks alike they are the new outer
model.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups
from tests import fits
from tests.fits import LIGHTNING, SomeBatches
from tests.ranks import run_processes

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": 1,
    "compression": "fp32",
}


def values_of(module: Any) -> dict[str, Tensor]:
    return {name: values.detach().clone() for name, values in module.net.named_parameters()}


def fitted(rank: int, groups: int, world_size: int, **members: Any) -> dict[str, Any]:
    """A fit of 24 steps in 3 epochs that validates after steps 4 and 8 of each; returns what it
    held and said.
    """
    said = fits.said_by("lightning_sdiloco")

    def validation_step(self: Any, parts: Any, index: int) -> None:
        self.seen.append(values_of(self))

    module = fits.module(
        LIGHTNING, seed=0, seen=[], validation_step=validation_step, rank=rank, **members
    )
    module.register_buffer("threshold", torch.zeros(4))
    trainer = fits.trainer(
        LIGHTNING,
        strategy=fits.strategy(LIGHTNING, worker_groups=groups, **CHOICES),
        devices=world_size,
        max_epochs=3,
        val_check_interval=4,
    )
    group = rank // (world_size // groups)
    trainer.fit(module, SomeBatches(group, 8), SomeBatches(0, 1))
    return {
        "seen": module.seen,
        "end": values_of(module),
        "threshold": module.threshold.clone(),
        "outer": trainer.strategy.outer_state_dict(),
        "dropped": trainer.strategy.report()["flights_dropped"],
        "said": [line for line in said if "overwrote" in line],
    }


def fill(self: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in self.net.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize(("world_size", "groups"), [(2, 2), (4, 2)])
def test_weights_that_a_validation_hook_loads_on_all_ranks_are_the_outer_model(
    world_size: int, groups: int
) -> None:
    def on_validation_end(self: Any) -> None:
        if self.global_step == 12:
            fill(self, 0.01)

    members = {"on_validation_end": on_validation_end}
    ranks = run_processes(
        lambda rank, size: fitted(rank, groups, world_size, **members), world_size, timeout=120
    )
    for found in ranks:
        assert all(torch.equal(found["end"][name], ranks[0]["end"][name]) for name in found["end"])
        assert found["dropped"] >= 1
        largest = max(float(values.abs().max()) for values in found["end"].values())
        assert largest < 0.3, "training has gone on from what the hook wrote"
    assert len(ranks[0]["said"]) == 1
    assert (
        "Own.on_validation_end overwrote 'net.0.bias', 'net.0.weight', 'net.2.bias' and 5 more"
        in ranks[0]["said"][0]
    )


def test_weights_that_are_swapped_for_a_validation_change_nothing() -> None:
    def on_validation_start(self: Any) -> None:
        self.aside = values_of(self)
        fill(self, 1.0)

    def on_validation_end(self: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(self.aside[name])

    members = {"on_validation_start": on_validation_start, "on_validation_end": on_validation_end}
    swapped = run_processes(lambda rank, size: fitted(rank, 2, 2, **members), 2, timeout=120)
    plain = run_processes(lambda rank, size: fitted(rank, 2, 2), 2, timeout=120)
    for found, expected in zip(swapped, plain, strict=True):
        assert found["said"] == []
        assert all(
            torch.equal(found["end"][name], expected["end"][name]) for name in expected["end"]
        )


def test_a_buffer_that_a_validation_hook_sets_stays_set() -> None:
    def on_validation_epoch_end(self: Any) -> None:
        if self.global_step == 12:
            self.threshold.fill_(7.0)

    members = {"on_validation_epoch_end": on_validation_epoch_end}
    for found in run_processes(lambda rank, size: fitted(rank, 2, 2, **members), 2, timeout=120):
        assert found["threshold"].tolist() == [7.0] * 4


def test_weights_that_hooks_of_epochs_fill_on_all_ranks_are_the_outer_model() -> None:
    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            with torch.no_grad():
                self.net[0].weight.fill_(0.5)

    members = {"on_train_epoch_start": on_train_epoch_start}
    ranks = run_processes(lambda rank, size: fitted(rank, 2, 2, **members), 2, timeout=120)
    for found in ranks:
        assert float((found["end"]["0.weight"] - 0.5).abs().max()) < 0.4
        assert float(found["end"]["2.weight"].abs().max()) > 0.1
    assert (
        "Own.on_train_epoch_start overwrote 'net.0.weight' on all ranks alike"
        in ranks[0]["said"][0]
    )


def test_weights_that_hooks_overwrite_unequally_are_reported_once_with_a_remedy() -> None:
    def on_train_epoch_end(self: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.05, 0.05)

    members = {"on_train_epoch_end": on_train_epoch_end}
    ranks = run_processes(lambda rank, size: fitted(rank, 2, 2, **members), 2, timeout=120)
    assert [len(found["said"]) for found in ranks] == [1, 1]
    assert (
        "Own.on_train_epoch_end overwrote 'net.0.weight', and not on all ranks alike"
        in ranks[0]["said"][0]
    )
    assert "strategy.set_outer()" in ranks[0]["said"][0]


def test_set_outer_takes_the_model_of_the_first_group_and_drops_flights() -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    groups = SimulatedGroups(models, **CHOICES)
    for _ in range(5):
        for model in models:
            with torch.no_grad():
                model.weight.add_(0.1)
        groups.step()
    engine = groups.engines[0]
    assert engine.in_flight == (0,)
    with pytest.raises(ValueError, match="'head', which is no trainable parameter"):
        engine.set_outer(["head"])
    with torch.no_grad():
        models[0].weight.fill_(4.0)
    with engine.evaluate():
        before = models[0].bias.clone()
    engine.set_outer(["weight"])
    assert engine.in_flight == ()
    assert engine.report()["flights_dropped"] == 1
    with engine.evaluate():
        assert models[0].weight.tolist() == [[4.0] * 3] * 2
        assert torch.equal(models[0].bias, before)
