"""Checkpoints of sharded groups: exact resume, plain torch, and other shards."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import sharded
from tests.fits import LIGHTNING
from tests.ranks import run_processes

STEPS = 14
CHOICES: dict[str, Any] = {"sync_every": 5, "overlap_steps": 3, "layers_per_fragment": 1}


def run(
    groups: int,
    sizes: tuple[int, int],
    callbacks: list[Any],
    steps: int = STEPS,
    resume: Path | None = None,
    **choices: Any,
) -> list[dict[str, Any]]:
    fit = partial(sharded.fit, **{**CHOICES, **choices})
    world_size, path = groups * sizes[0] * sizes[1], resume and str(resume)
    distribution, inner = choices.pop("distribution", LIGHTNING), "adamw"
    return list(run_processes(fit, world_size, groups, sizes, steps, distribution, inner, callbacks, path))


def saving(folder: Path, **choices: Any) -> list[Any]:
    return [sharded.callbacks_of().ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **choices)]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize(("sizes", "as_folder"), [((2, 1), True), ((2, 2), True), ((1, 2), False)])
def test_a_sharded_fit_resumed_from_any_step_gives_the_same_bits(
    sizes: tuple[int, int], as_folder: bool, tmp_path: Path
) -> None:
    plain = run(2, sizes, [])
    saved = run(2, sizes, saving(tmp_path, every_n_train_steps=1), save_distributed_checkpoint=as_folder)
    for one, other in zip(saved, plain, strict=True):
        assert_same(one["outer"], other["outer"])
    # 4: before any flight; 6, 7: one and two fragments in flight; 11: launched again.
    for step in (4, 6, 7, 11):
        resumed = run(2, sizes, [], resume=tmp_path / f"step={step}.ckpt", save_distributed_checkpoint=as_folder)
        for one, other in zip(resumed, plain, strict=True):
            assert sorted(one["trace"]) == list(range(step, STEPS))
            for at, values in one["trace"].items():
                assert_same(values, other["trace"][at])
            assert_same(one["outer"], other["outer"])
            counted = ("inner_steps", "launches", "landings", "bytes_sent")
            assert all(one["report"][key] == other["report"][key] for key in counted)
