"""Groups whose values are not finite, that do not answer, or that go away."""

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco import AgreementError, Landing, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.topology import GroupLayout, Topology
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step


def poison(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[3, 4] = float("nan")


class Run:
    """Simulated groups of which one can be poisoned."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [mlp() for _ in range(groups)]
        self.optimizers = [inner_optimizer("adamw", model) for model in self.models]
        self.engine = SimulatedGroups(self.models, [[optimizer] for optimizer in self.optimizers], **choices)
        self.steps = 0

    def step(self, poisoned: tuple[int, ...] = ()) -> list[Landing]:
        self.steps += 1
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_step(model, optimizer, group, self.steps)
            if group in poisoned:
                poison(model)
        landings = self.engine.step()
        return landings[0]

    def until(self, step: int) -> list[Landing]:
        return [landing for _ in range(self.steps, step) for landing in self.step()]

    def finite(self) -> bool:
        state = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        return all(bool(values.isfinite().all()) for values in state + parameters)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("compression", ["fp32", "bf16", "fp4"])
def test_a_group_that_is_not_finite_is_left_out_by_all_and_recovers(mixing: float, compression: str) -> None:
    run = Run(3, sync_every=6, overlap_steps=2, fragments=LAYERS, mixing=mixing, compression=compression)
    run.until(5)
    landings = run.step(poisoned=(1,)) + run.until(8)
    assert [landing.left_out for landing in landings] == [(1,)]
    assert run.finite(), "the group took the outer values wherever its own were not finite"
    assert all(landing.left_out == () for landing in run.until(40)[1:])
    run.engine.finish()
    assert run.finite()


def test_the_mean_is_that_of_the_groups_that_count() -> None:
    plain = {"sync_every": 2, "overlap_steps": 0, "fragments": [["*"]], "compression": "fp32", "mixing": 0.0}
    three, two = Run(3, **plain), Run(2, **plain)
    for run, poisoned in ((three, (2,)), (two, ())):
        run.step()
        run.step(poisoned)
    for name, values in two.engine.outer_state_dict().items():
        assert torch.equal(three.engine.outer_state_dict()[name], values)


def test_a_group_that_stays_not_finite_ends_the_run_at_the_third_time_in_a_row() -> None:
    run = Run(2, sync_every=4, overlap_steps=0, fragments=[["*"]])
    for _ in range(11):
        run.step(poisoned=(1,))
    with pytest.raises(AgreementError, match=r"worker group 1 was not finite 3 times in a row"):
        run.step(poisoned=(1,))


def test_being_left_out_twice_and_then_recovering_is_no_error() -> None:
    run = Run(2, sync_every=4, overlap_steps=0, fragments=[["*"]])
    for step in range(1, 41):
        run.step(poisoned=(1,) if step % 12 in (4, 8) else ())
    assert run.finite()


def test_all_groups_not_finite_is_an_error_that_names_them() -> None:
    run = Run(2, sync_every=4, overlap_steps=0, fragments=[["*"]])
    run.until(3)
    with pytest.raises(AgreementError, match=r"fragment 0, .* not finite in any worker group \(group 0, group 1\)"):
        run.step(poisoned=(0, 1))


def test_momentum_and_outer_parameters_stay_finite_when_a_group_is_left_out() -> None:
    run = Run(2, sync_every=4, overlap_steps=0, fragments=[["*"]])
    run.until(3)
    run.step(poisoned=(0,))
    outer = run.engine.engines[0]._outer
    assert all(bool(values.isfinite().all()) for values in [*outer.values, outer.states[0]["momentum_buffer"]])


@pytest.mark.parametrize(("sync_every", "overlap_steps"), [(8, 7), (4, 3), (3, 2)])
def test_one_event_that_several_fragments_in_flight_tell_of_counts_once(sync_every: int, overlap_steps: int) -> None:
    run = Run(2, sync_every=sync_every, overlap_steps=overlap_steps, fragments=LAYERS)
    run.until(2 * sync_every - 1)
    landings = run.step(poisoned=(1,)) + run.until(12 * sync_every)
    assert sum(landing.left_out == (1,) for landing in landings) >= 2
    assert run.finite()


def test_a_parameter_that_becomes_trainable_during_training_is_an_error_that_names_it() -> None:
    models = [mlp(), mlp()]
    for model in models:
        model[4].weight.requires_grad_(False)
    groups = SimulatedGroups(models, sync_every=3, overlap_steps=0, fragments=[["0.*", "2.*"], ["4.bias", "6.*"]])
    groups.step()
    for model in models:
        model[4].weight.requires_grad_(True)
    groups.step()
    with pytest.raises(AgreementError, match=r"1 parameters have become trainable .* such as '4.weight'"):
        groups.step()


def train_with_timeout(rank: int, world_size: int, groups: int, at_step_9: str) -> None:
    size = world_size // groups
    topology = Topology.of_world(GroupLayout(world_size, groups), timedelta(seconds=2))
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=topology.in_group.process_group)
    engine = StreamingDiLoCo(
        model,
        topology=topology,
        sync_every=8,
        overlap_steps=3,
        fragments=[["0.*"], ["[246].*"]],
        timeout=timedelta(seconds=2),
    )
    optimizer = inner_optimizer("sgd", model)
    for step in range(1, 40):
        if step == 9 and rank // size == groups - 1:
            if at_step_9 == "stall":
                time.sleep(6)
            else:
                os._exit(3)
        train_step(wrapped, optimizer, rank // size, step)
        engine.step()


@pytest.mark.parametrize(("groups", "world_size"), [(2, 2), (3, 3), (2, 4)])
def test_a_group_that_does_not_answer_ends_the_run_everywhere_and_is_named(groups: int, world_size: int) -> None:
    started = time.monotonic()
    errors = run_ranks(train_with_timeout, world_size, groups, "stall", expect_failure=True, timeout=40)
    assert time.monotonic() - started < 30
    assert sorted(errors) == list(range(world_size))
    size = world_size // groups
    for rank in range(world_size - size):
        assert f"worker group {groups - 1} did not answer" in errors[rank]
        assert "fragment 1, launched after inner step 12" in errors[rank]
        assert "raise timeout" in errors[rank]


@pytest.mark.parametrize(("groups", "world_size"), [(2, 2), (3, 3)])
def test_a_group_that_dies_ends_the_run_everywhere_and_is_named(groups: int, world_size: int) -> None:
    errors = run_ranks(train_with_timeout, world_size, groups, "die", expect_failure=True, timeout=40)
    for rank in range(world_size - 1):
        told = rf"worker group {groups - 1} went away .* while fragment [01], launched after inner step (8|12), was in"
        assert re.search(told, errors[rank])
