"""Worker groups that share one sharded model: the same training as without, and each value is sent once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sdiloco.control import CONTROL_BYTES
from tests import fits, sharded
from tests.fits import LIGHTNING
from tests.ranks import run_processes

# One layer each, so that a fragment may lie on a part of the ranks only.
CHOICES: dict[str, Any] = {"sync_every": 5, "overlap_steps": 2, "layers_per_fragment": 1, "compression": "fp32"}
INSIDE = [(2, 1), (1, 2), (2, 2), (4, 1), (3, 1)]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def fit_plain(rank: int, world_size: int, groups: int, steps: int, inner: str = "sgd", **choices: Any) -> fits.Trained:
    return fits.fit(rank, world_size, groups, steps, {**CHOICES, **choices}, inner=inner, make=sharded.plain)


def fit_sharded(*args: Any, **choices: Any) -> list[dict[str, Any]]:
    (groups, sizes, steps), chosen = args, {**CHOICES, **choices}
    fit = partial(sharded.fit, **chosen)
    return list(run_processes(fit, groups * sizes[0] * sizes[1], groups, sizes, steps))


@pytest.mark.parametrize("distribution", [LIGHTNING, "pytorch_lightning"])
def test_with_one_rank_per_group_the_outer_parameters_are_those_of_the_first_strategy_to_the_bit(
    distribution: str,
) -> None:
    for inner, compression in (("sgd", "fp32"), ("adamw", "fp4")):
        expected = run_processes(partial(fit_plain, inner=inner, compression=compression), 2, 2, 50)
        actual = fit_sharded(2, (1, 1), 50, distribution=distribution, inner=inner, compression=compression)
        for one, other in zip(actual, expected, strict=True):
            assert all(torch.equal(one["outer"][name], other["outer"][name]) for name in other["outer"])
            assert one["report"]["bytes_sent"] == other["report"]["bytes_sent"]


@pytest.mark.parametrize("sizes", INSIDE)
def test_what_happens_inside_a_group_does_not_change_the_outer_parameters(sizes: tuple[int, int]) -> None:
    # Three data-parallel ranks do not divide a batch of eight, and so weigh its examples unequally.
    steps = 50
    alone = run_processes(fit_plain, 2, 2, steps)[0]
    ranks = fit_sharded(2, sizes, steps)
    expected = alone if sizes[0] != 3 else run_processes(fit_plain, 6, 2, steps)[0]
    for rank in ranks:
        assert distance(rank["outer"], expected["outer"]) < 1e-5
        # The model is left with the outer parameters, the same bits on all ranks of all groups.
        assert all(torch.equal(rank["model"][name], values) for name, values in rank["outer"].items())
        assert all(torch.equal(values, ranks[0]["outer"][name]) for name, values in rank["outer"].items())
    assert distance(expected["outer"], sharded.plain(seed=0).net.state_dict()) > 0.1


def test_ddp_inside_gives_the_outer_parameters_of_one_rank_per_group() -> None:
    alone, ddp = (run_processes(fit_plain, world_size, 2, 50)[0] for world_size in (2, 4))
    assert distance(ddp["outer"], alone["outer"]) < 1e-5


@pytest.mark.parametrize("sizes", INSIDE)
def test_every_value_is_sent_once(sizes: tuple[int, int]) -> None:
    size, steps = sizes[0] * sizes[1], 17
    alone = run_processes(fit_plain, 2, 2, steps)[0]["report"]
    ranks = [rank["report"] for rank in fit_sharded(2, sizes, steps)]
    flights = len(sharded.even(0)) // 2 + 1 + alone["launches"]
    # A rank without a value of a fragment sends a zero, and each has a control vector of its own.
    padding = 4 * flights * (size - 1)
    expected = alone["bytes_sent"] + CONTROL_BYTES * flights * (size - 1)
    for group in (ranks[:size], ranks[size:]):
        assert expected <= sum(rank["bytes_sent"] for rank in group) <= expected + padding
        assert all(rank[key] == alone[key] for rank in group for key in ("inner_steps", "launches", "landings"))


def losses(rank: int, world_size: int, inner: str, sizes: tuple[int, int] | None, seed: int) -> list[float]:
    """The losses of a group on its own data, over the last steps."""
    seen: list[float] = []
    base = sharded.plain if sizes is None else sharded.sharded
    model = base(LIGHTNING, inner, seed)
    step = type(model).training_step

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss: Tensor = step(self, parts, index)
        seen.append(float(loss))
        return loss

    type(model).training_step = training_step
    choices = {**CHOICES, "worker_groups": 2, "compression": "fp4"}
    if sizes is None:
        chosen, data, place = fits.strategy(**choices), 1, (rank, 0)
    else:
        chosen = sharded.strategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1], **choices)
        size, data = sizes[0] * sizes[1], sizes[0]
        place = (rank // size, rank % size // sizes[1])
    loader = DataLoader(fits.Batches(*place, data), batch_size=None)
    fits.trainer(strategy=chosen, devices=world_size, max_steps=60).fit(model, loader)
    return seen[-20:]


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_with_fp4_the_losses_agree_within_the_spread_of_seeds(inner: str) -> None:
    def mean(sizes: tuple[int, int] | None, seed: int) -> float:
        world_size = 2 if sizes is None else 2 * sizes[0] * sizes[1]
        ranks = run_processes(losses, world_size, inner, sizes, seed)
        return float(torch.tensor(ranks).mean())

    seeds = torch.tensor([mean(None, seed) for seed in range(4)])
    for sizes in ((2, 1), (1, 2)):
        assert abs(mean(sizes, 0) - float(seeds[0])) < float(seeds.std())
