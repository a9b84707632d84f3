"""In a warm-up groups take the mean of their gradients, whatever a group is made of and whoever runs dry."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from tests import fits, sharded
from tests.large import models
from tests.lightning import uneven_fits
from tests.lightning.test_checkpoint import assert_same, run_fit, saving
from tests.lightning.test_fabric import fabric_of
from tests.ranks import run_processes
from tests.training import backward, batch, inner_optimizer, mlp

CHOICES: dict[str, Any] = {"sync_every": 5, "overlap_steps": 2, "fragments": "strided:1", "compression": "fp32"}


@pytest.mark.parametrize(("world_size", "groups"), [(4, 2), (3, 3)])
def test_groups_of_several_ranks_and_three_groups_train_as_ddp_does(world_size: int, groups: int) -> None:
    """They add gradients up in another order, so the last bits may differ."""

    def run(rank: int, world_size: int) -> Any:
        ends = []
        for strategy in ("ddp", fits.strategy(worker_groups=groups, warmup_steps=4, **CHOICES)):
            module = models.Large("wide")
            trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=4, gradient_clip_val=0.1)
            torch.manual_seed(0)
            trainer.fit(module, models.Data())
            ends.append({name: values.clone() for name, values in module.state_dict().items()})
        return ends

    for expected, actual in run_processes(run, world_size):
        for name, values in expected.items():
            torch.testing.assert_close(actual[name], values, rtol=1e-3, atol=1e-3)


def test_a_fit_resumed_with_another_warmup_keeps_the_one_that_it_had(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        saves = saving(fits.LIGHTNING, tmp_path, every_n_train_steps=13)
        whole = run_fit(rank, world_size, fits.LIGHTNING, 26, saves, warmup_steps=3)
        saved = str(tmp_path / "step=13.ckpt")
        again = run_fit(rank, world_size, fits.LIGHTNING, 26, [], saved, warmup_steps=4)
        return whole, again

    for whole, again in run_processes(run, 2, timeout=120.0):
        assert_same(again["outer"], whole["outer"])
        assert_same(again["model"], whole["model"])
        assert again["report"]["landings"] == whole["report"]["landings"]


def test_a_loop_of_fabric_resumed_in_a_warmup_without_it_ends_it_with_the_next_step(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        ends = []
        for first, warmup_steps, ends_after in ((1, 4, 3), (4, 0, 11), (1, 4, 11)):
            fabric = fabric_of(world_size, warmup_steps=warmup_steps)
            model, optimizer = fabric.setup(net := mlp(rank), inner_optimizer("adamw", net))
            state = {"model": model, "optimizer": optimizer}
            if first > 1:
                fabric.load(tmp_path / "a.ckpt", state)
            for step in range(first, ends_after + 1):
                fabric.backward(nn.functional.mse_loss(model(batch(rank, step)[0]), batch(rank, step)[1]))
                optimizer.step()
                optimizer.zero_grad()
            if ends_after == 3:
                fabric.save(tmp_path / "a.ckpt", state)
            fabric.strategy.finish()
            ends.append({name: values.clone() for name, values in net.state_dict().items()})
        return ends

    for _, resumed, whole in run_processes(run, 2, timeout=120.0):
        assert_same(resumed, whole)


@pytest.mark.parametrize("sizes", [(2, 1)])
def test_sharded_groups_train_as_whole_ones_do(sizes: tuple[int, int]) -> None:
    choices = {**CHOICES, "warmup_steps": 6}
    whole = run_processes(partial(fits.fit, make=sharded.plain), 2, 2, 8, choices)[0]["outer"]
    fit = partial(sharded.fit, **choices)
    for rank in run_processes(fit, 2 * sizes[0] * sizes[1], 2, sizes, 8, timeout=180.0):
        for name, values in whole.items():
            torch.testing.assert_close(rank["outer"][name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [uneven_fits.noting, uneven_fits.gan])
def test_a_group_that_has_run_dry_takes_part_in_the_gradients_of_the_others(make: Any) -> None:
    """As with any launch, the epoch ends with the batch in which they hear of it."""
    choices = {**uneven_fits.CHOICES, "warmup_steps": 20}

    def loader(place: uneven_fits.Place) -> Any:
        # Only when it is asked for a fifth batch, the first turns out to have none.
        return uneven_fits.Announced(place, 4 + 3 * place[0], announced=9)

    ranks = uneven_fits.fit(2, loader, make=make, choices=choices)
    assert uneven_fits.epochs(uneven_fits.assert_together(ranks)) == [5, 5]
    assert ranks[0]["idle"]
    assert not ranks[1]["idle"]


def test_what_has_no_gradient_gets_that_of_the_other_group_if_there_is_one() -> None:
    nets = [nn.ModuleList([nn.Linear(3, 1) for _ in range(3)]) for _ in range(2)]
    groups = SimulatedGroups(nets, warmup_steps=2)
    nets[0][0](torch.ones(3)).sum().backward()
    nets[1][1](torch.ones(3)).sum().backward()
    groups.average_gradients()
    for net in nets:
        assert [getattr(net[layer].weight.grad, "tolist", lambda: None)() for layer in range(3)] == [
            [[0.5] * 3],
            [[0.5] * 3],
            None,
        ]


def test_gradients_that_are_not_finite_are_so_in_all_groups() -> None:
    nets = [nn.Linear(3, 1) for _ in range(2)]
    groups = SimulatedGroups(nets, warmup_steps=2)
    for net, factor in zip(nets, (1.0, float("inf")), strict=True):
        (factor * net(torch.ones(3))).sum().backward()
    groups.average_gradients()
    assert not any(bool(parameter.grad.isfinite().any()) for net in nets for parameter in net.parameters())


def test_a_loop_that_forgets_the_gradients_is_told_before_groups_drift_apart() -> None:
    model = mlp()
    optimizer = inner_optimizer("sgd", model)
    engine = StreamingDiLoCo(model, warmup_steps=1)
    backward(model, optimizer, 0, 1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="Inner step 1 belongs to the warm-up.*average_gradients"):
        engine.step()
    engine.close()
