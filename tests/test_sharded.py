"""Worker groups that share one sharded model: the same training as without, and each value is sent once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

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
