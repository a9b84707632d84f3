"""In a warm-up groups take the mean of their gradients, whatever a group is made of and whoever runs dry."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from tests import fits, sharded
from tests.fits import play
from tests.large import models
from tests.lightning import uneven_fits
from tests.lightning.test_checkpoint import assert_resumed, assert_same, at, run_fit, save
from tests.lightning.test_fabric import fabric_of
from tests.training import backward, batch, inner_optimizer, mlp

CHOICES: dict[str, Any] = {"sync_every": 5, "overlap_steps": 2, "fragments": "strided:1", "compression": "fp32"}


def test_groups_of_any_kind_train_as_ddp_and_as_one_rank_per_group_do() -> None:
    """They add gradients up in another order, so the last bits may differ."""

    def large(rank: int, world_size: int, groups: int) -> dict[str, Tensor]:
        strategy = fits.strategy(worker_groups=groups, warmup_steps=4, **CHOICES) if groups else "ddp"
        module = models.Large("wide")
        trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=4, gradient_clip_val=0.1)
        torch.manual_seed(0)
        trainer.fit(module, models.Data())
        return {name: values.clone() for name, values in module.state_dict().items()}

    of_shards = partial(sharded.fit, groups=2, sizes=(2, 1), steps=8, warmup_steps=6, **CHOICES)
    whole = partial(fits.fit, groups=2, steps=8, choices={**CHOICES, "warmup_steps": 6}, make=sharded.plain)
    four = play(4, {"ddp": partial(large, groups=0), "groups": partial(large, groups=2), "sharded": of_shards})
    three = play(3, {"ddp": partial(large, groups=0), "groups": partial(large, groups=3)})
    for ranks in (four, three):
        for actual, expected in zip(ranks["groups"], ranks["ddp"], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    expected = play(2, {"whole": whole})["whole"][0]["outer"]
    for rank in four["sharded"]:
        torch.testing.assert_close(rank["outer"], expected, rtol=1e-4, atol=1e-5)


def test_a_fit_resumed_with_another_warmup_keeps_the_one_that_it_had(tmp_path: Path) -> None:
    fit = partial(run_fit, steps=20)
    cases = {
        "plain": partial(fit, callbacks=[at({10: save(tmp_path / "10")})], warmup_steps=3),
        "resumed": partial(fit, path=tmp_path / "10", warmup_steps=4),
    }
    for plain, resumed in zip(*play(2, cases).values(), strict=True):
        assert_resumed(resumed, plain, 10)
        assert_same(resumed["model"], plain["model"])


def test_a_loop_of_fabric_resumed_in_a_warmup_without_it_ends_it_with_the_next_step(tmp_path: Path) -> None:
    def run(rank: int, world_size: int, first: int, warmup_steps: int, last: int) -> dict[str, Tensor]:
        fabric = fabric_of(world_size, warmup_steps=warmup_steps)
        model, optimizer = fabric.setup(net := mlp(rank), inner_optimizer("adamw", net))
        state = {"model": model, "optimizer": optimizer}
        if first > 1:
            fabric.load(tmp_path / "a.ckpt", state)
        for step in range(first, last + 1):
            x, y = batch(rank, step)
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if last == 3:
            fabric.save(tmp_path / "a.ckpt", state)
        fabric.strategy.finish()
        return {name: values.clone() for name, values in net.state_dict().items()}

    of = {"saved": (1, 4, 3), "resumed": (4, 0, 11), "whole": (1, 4, 11)}
    names = ("first", "warmup_steps", "last")
    ranks = play(2, {case: partial(run, **dict(zip(names, chosen, strict=True))) for case, chosen in of.items()})
    for resumed, whole in zip(ranks["resumed"], ranks["whole"], strict=True):
        assert_same(resumed, whole)


@pytest.mark.parametrize("make", [uneven_fits.noting, uneven_fits.gan])
def test_a_group_that_has_run_dry_takes_part_in_the_gradients_of_the_others(make: Any) -> None:
    """As with any launch, the epoch ends with the batch in which they hear of it."""

    def loader(place: uneven_fits.Place) -> Any:
        # Only when it is asked for a fifth batch, the first turns out to have none.
        return uneven_fits.Announced(place, 4 + 3 * place[0], announced=9)

    ranks = uneven_fits.fit(2, loader, make=make, choices={**uneven_fits.CHOICES, "warmup_steps": 20})
    assert uneven_fits.epochs(uneven_fits.assert_together(ranks)) == [5, 5]
    assert [bool(rank["idle"]) for rank in ranks] == [True, False]


def test_gradients_that_one_group_lacks_are_those_of_the_other_and_not_finite_ones_are_so_in_all() -> None:
    nets = [nn.ModuleList([nn.Linear(3, 1) for _ in range(4)]) for _ in range(2)]
    groups = SimulatedGroups(nets, warmup_steps=2)
    for net, own, factor in zip(nets, (0, 1), (1.0, float("inf")), strict=True):
        net[own](torch.ones(3)).sum().backward()
        (factor * net[2](torch.ones(3))).sum().backward()
    groups.average_gradients()
    for net in nets:
        first, second, third = (net[layer].weight.grad for layer in range(3))
        assert first.tolist() == second.tolist() == [[0.5] * 3]
        assert not third.isfinite().any()
        assert net[3].weight.grad is None


def test_a_loop_that_forgets_the_gradients_is_told_before_groups_drift_apart() -> None:
    model = mlp()
    optimizer = inner_optimizer("sgd", model)
    engine = StreamingDiLoCo(model, warmup_steps=1)
    backward(model, optimizer, 0, 1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="Inner step 1 belongs to the warm-up.*average_gradients"):
        engine.step()
    engine.close()
