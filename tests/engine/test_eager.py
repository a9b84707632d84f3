"""Eager updates: against the paper's algorithm in plain loops, their agreement, and what they are at the edges."""

from functools import partial
from math import nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdiloco import DelayedNesterov, Eager, Mix, RandomPairs, Selective, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm import Settings
from tests.engine.test_engine_reference import grouped
from tests.engine.test_policies import trained
from tests.ranks import run_ranks
from tests.training import inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {
    "sync_every": 5,
    "overlap_steps": 4,
    "mixing": Eager(),
    "fragments": grouped(2),
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "compression": "fp32",
}


def eager_loops(groups: int, steps: int, lr: float, momentum: float, every: int, fragments: int) -> list[list[Tensor]]:
    """Algorithm 3 of arXiv 2502.12996: every group has outer parameters and a Nesterov momentum of its own.

    Returns:
        The local parameters of every group after every inner step.
    """
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer("sgd", model) for model in models]
    outer = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
    buffers, before = ([[torch.zeros_like(own) for own in outer[0]] for _ in models] for _ in range(2))
    mean = [torch.zeros_like(own) for own in outer[0]]
    trajectory = []
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        for fragment in range(fragments):
            offset = fragment * every // fragments
            if step <= offset or (step - offset) % every:
                continue
            # Weight and bias of every second layer.
            for p in [p for p in range(len(mean)) if p // 2 % fragments == fragment]:
                local = [list(model.parameters())[p] for model in models]
                gradients = [own[p] - values.detach() for own, values in zip(outer, local, strict=True)]
                for m, values in enumerate(local):
                    eager = mean[p] + (gradients[m] - before[m][p]) / groups
                    buffers[m][p] = momentum * buffers[m][p] + eager
                    outer[m][p] = outer[m][p] - lr * (eager + momentum * buffers[m][p])
                    values.data.copy_(outer[m][p])
                    before[m][p] = gradients[m]
                mean[p] = sum(gradients) / groups
        trajectory.append([parameter.detach().clone() for model in models for parameter in model.parameters()])
    return trajectory


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 4),
    every=st.integers(1, 7),
    overlap=st.integers(0, 6),
    momentum=st.sampled_from([0.0, 0.9]),
    fragments=st.integers(1, 2),
)
def test_groups_do_what_the_paper_says(groups: int, every: int, overlap: int, momentum: float, fragments: int) -> None:
    """Whenever the mean comes: nothing of it is taken in before the next launch."""
    choices = {**CHOICES, "sync_every": every, "overlap_steps": min(overlap, every - 1), "outer_momentum": momentum}
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer("sgd", model) for model in models]
    simulated = SimulatedGroups(models, **{**choices, "fragments": grouped(fragments)})
    for step, expected in enumerate(eager_loops(groups, 22, 0.7, momentum, every, fragments), 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        simulated.step()
        for actual, values in zip([p for model in models for p in model.parameters()], expected, strict=True):
            torch.testing.assert_close(actual.detach(), values, rtol=1e-4, atol=2e-5)


def test_one_group_is_diloco_without_overlap_bit_for_bit() -> None:
    waits = {**CHOICES, "overlap_steps": 0, "mixing": Mix(0.0)}
    for own, other in zip(trained(1, 33, **CHOICES), trained(1, 33, **waits), strict=True):
        assert all(map(torch.equal, own, other))


@pytest.mark.parametrize("compression", ["fp32", "fp4"])
@pytest.mark.parametrize("at", [5, 7, 12, 23])
def test_a_run_resumes_bit_for_bit(compression: str, at: int) -> None:
    choices = {**CHOICES, "compression": compression}
    for whole, resumed in zip(trained(3, 31, **choices), trained(3, 31, at, **choices), strict=True):
        assert all(map(torch.equal, whole, resumed))


def test_delayed_nesterov_has_own_parts_too() -> None:
    """With one group the own part is the whole step, whatever momentum does in which round."""
    outer = {"outer_lr": "auto", "outer_momentum": "auto", "outer_optimizer": partial(DelayedNesterov, every=3)}
    waits = {**CHOICES, **outer, "overlap_steps": 0, "mixing": Mix(0.0)}
    for own, other in zip(trained(1, 40, **CHOICES | outer), trained(1, 40, **waits), strict=True):
        assert all(map(torch.equal, own, other))


def test_beside_a_schedule_the_next_launch_takes_the_mean_in() -> None:
    ends = trained(2, 40, **CHOICES, schedule=Selective(0.4))
    assert all(map(torch.equal, *ends))
    assert all(bool(values.isfinite().all()) for values in ends[0])


def in_process(rank: int, world_size: int, groups: int, compression: str) -> tuple[list[Tensor], float]:
    model = mlp()
    engine = StreamingDiLoCo(model, worker_groups=groups, **{**CHOICES, "compression": compression})
    optimizer = inner_optimizer("sgd", model)
    for step in range(1, 32):
        train_step(model, optimizer, rank // (world_size // groups), step)
        engine.step()
    apart = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
    engine.finish()
    return [parameter.detach() for parameter in model.parameters()], apart


@pytest.mark.parametrize(("ranks", "groups", "compression"), [(2, 2, "fp4"), (4, 2, "fp32")])
def test_processes_do_what_the_simulation_does(ranks: int, groups: int, compression: str) -> None:
    alone = trained(groups, 31, **{**CHOICES, "compression": compression})
    same = torch.equal if ranks == groups else torch.allclose
    told = run_ranks(in_process, ranks, groups, compression)
    for held, _ in told:
        assert all(map(same, held, alone[0]))
    assert len({apart for _, apart in told}) == groups, "groups train from parameters of their own"


def test_the_last_mean_is_that_of_all_progress() -> None:
    """What was trained since the last launch counts once, and so does what a landing has brought meanwhile."""
    models = [mlp() for _ in range(2)]
    choices = {**CHOICES, "fragments": grouped(1), "sync_every": 6, "overlap_steps": 2}
    optimizers = [inner_optimizer("sgd", model) for model in models]
    simulated = SimulatedGroups(models, **choices)
    for step in range(1, 10):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        simulated.step()
        if step == 6:
            began = [[p.detach().clone() for p in model.parameters()] for model in models]
    outer = simulated.outer_state_dict()
    progress = [
        sum(p.detach() - b for p, b in zip(both, start, strict=True)) / 2
        for both, start in zip(
            zip(*(model.parameters() for model in models), strict=True), zip(*began, strict=True), strict=True
        )
    ]
    simulated.finish()
    for (name, values), moved in zip(simulated.outer_state_dict().items(), progress, strict=True):
        torch.testing.assert_close(values, outer[name] + moved, rtol=1e-5, atol=1e-6)


def test_a_group_that_is_not_finite_is_left_out_and_comes_back() -> None:
    models = [mlp() for _ in range(3)]
    optimizers = [inner_optimizer("sgd", model) for model in models]
    simulated = SimulatedGroups(models, **CHOICES)
    left_out = []
    for step in range(1, 31):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        if step == 9:
            models[1][0].weight.data.fill_(nan)
        left_out += [landing.left_out for landing in simulated.step()[0] if landing.left_out]
    assert left_out
    assert set(left_out) == {(1,)}
    assert all(bool(p.isfinite().all()) for model in models for p in model.parameters())
    simulated.finish()
    for model in models[1:]:
        assert all(map(torch.equal, model.parameters(), models[0].parameters()))


def test_after_it_was_left_out_a_group_begins_from_the_outer_parameters() -> None:
    models = [mlp() for _ in range(2)]
    simulated = SimulatedGroups(models, **{**CHOICES, "fragments": grouped(1), "overlap_steps": 2})
    norms = []
    for step in range(1, 21):
        models[0][0].weight.data.add_(0.01)
        if step < 10:
            models[1][0].weight.data.add_(nan if step == 9 else 0.02)
        norms += [landing.group_norms[1] for landing in simulated.step()[1]]
    assert norms[0] > 0
    assert norms[1] != norms[1], "not a number"
    assert norms[2] == 0, "it landed on the outer parameters, and did not move since"


def freezes(rank: int, world_size: int) -> float:
    model = mlp()
    engine = StreamingDiLoCo(model, **{**CHOICES, "fragments": "sequential", "layers_per_fragment": 4})
    optimizer = inner_optimizer("sgd", model)
    for step in range(1, 14):
        train_step(model, optimizer, rank, step)
        engine.step()
        if step == 10:
            began = [p.detach().clone() for p in model.parameters()]
    progress = [p.detach() - b for p, b in zip(model.parameters(), began, strict=True)]
    model[0].requires_grad_(False)
    engine.recut()
    outer = engine.outer_state_dict()
    told = zip(model.named_parameters(), progress, strict=True)
    off = [float((p - outer[name] - moved).detach().abs().max()) for (name, p), moved in told if name in outer]
    for step in range(14, 30):
        train_step(model, optimizer, rank, step)
        engine.step()
    engine.finish()
    return max(off)


def test_parameters_that_freeze_go_on_from_the_shared_outer_ones() -> None:
    """What was trained since the last launch stays, and what the others did comes with the outer parameters."""
    assert max(run_ranks(freezes, 2)) < 1e-6


def test_an_outer_optimizer_of_which_nobody_has_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mixing=Eager\(\) does not go with this outer_optimizer"):
        StreamingDiLoCo(mlp(), mixing=Eager(), outer_optimizer=partial(torch.optim.AdamW, lr=0.1))


def test_a_route_that_does_not_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mixing=Eager\(\) does not go with route=RandomPairs"):
        Settings(mixing=Eager(), route=RandomPairs(), compression="int8")
