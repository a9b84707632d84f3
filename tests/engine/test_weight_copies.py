"""Inner optimizers that keep their own copy of the weights: landings reach it, and nothing throws
them away.
"""

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from lightning_sdiloco import Landing, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.engine.weight_copies import WeightCopies, copies_in
from tests.engine.groups import MEAN, through_a_file
from tests.methods import GPA
from tests.optimizers import HiddenMasterSGD, Lookahead, MasterSGD, ScheduleFreeSGD, keeper
from tests.ranks import run_ranks
from tests.training import mlp

KINDS = ["z", "slow", "master"]
PLAIN = {
    **MEAN,
    "compression": "fp32",
    "fragments": 2,
    "sync_every": 4,
    "overlap_steps": 0,
}


def push(model: nn.Module, group: int) -> None:
    """Gives gradients that do not depend on the parameters: the groups move apart."""
    direction = 0.25 if group else -1.0
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, (1 + index) * direction)


class Run:
    """Two simulated groups that are pushed apart, each with an inner optimizer."""

    def __init__(self, models: list[Any], optimizers: list[Any], **choices: Any) -> None:
        self.models = models
        self.optimizers = optimizers
        inner = [[optimizer] for optimizer in optimizers]
        self.groups = SimulatedGroups(models, inner, **{**PLAIN, **choices})

    def push(self) -> None:
        """An inner step of every group, which the engines do not see yet."""
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            push(model, group)
            optimizer.step()

    def step(self) -> list[Landing]:
        self.push()
        return self.groups.step()[0]

    def train(self, steps: int) -> "Run":
        for _ in range(steps):
            self.step()
        return self

    def saved(self) -> Any:
        engines = [engine.state_dict() for engine in self.groups.engines]
        inner = [optimizer.state_dict() for optimizer in self.optimizers]
        return through_a_file([engines, inner])

    def load(self, saved: Any) -> "Run":
        engines, inner = copy.deepcopy(saved)
        for optimizer, state in zip(self.optimizers, inner, strict=True):
            optimizer.load_state_dict(state)
        for engine, state in zip(self.groups.engines, engines, strict=True):
            engine.load_state_dict(state)
        return self


def keeping(kind: str, seeds: tuple[int, int] = (0, 0), **choices: Any) -> Run:
    """Groups whose optimizers keep a copy of a kind."""
    models = [mlp(seed) for seed in seeds]
    return Run(models, [keeper(kind, model) for model in models], **choices)


def linear() -> nn.Linear:
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight)
    return model


def first_value(model: nn.Module) -> float:
    return float(next(model.parameters()).detach().flatten()[0])


def free_run(kind: str, group: int, steps: int) -> list[float]:
    """A value of a group that never exchanges, after each step."""
    model = linear()
    optimizer = keeper(kind, model)
    values = [0.0]
    for _ in range(steps):
        push(model, group)
        optimizer.step()
        values.append(first_value(model))
    return values


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_after_a_landing_groups_go_on_from_the_mean_whatever_the_optimizer_keeps(kind: str) -> None:
    free_runs = [free_run(kind, group, 14) for group in range(2)]
    models = [linear(), nn.Linear(3, 3)]
    run = Run(models, [keeper(kind, model) for model in models], fragments=1)
    landed_at = 0
    outer = 0.0
    for step in range(1, 15):
        run.push()
        for model, free in zip(models, free_runs, strict=True):
            progress = free[step] - free[landed_at]
            assert first_value(model) == pytest.approx(outer + progress, abs=1e-6)
        if run.groups.step()[0]:
            landed_at = step
            outer = (free_runs[0][step] + free_runs[1][step]) / 2
    run.groups.finish()
    final_mean = (free_runs[0][14] + free_runs[1][14]) / 2
    assert first_value(models[1]) == pytest.approx(final_mean, abs=1e-6)


def test_float32_masters_of_bfloat16_keep_what_a_landing_adds_below_its_precision() -> None:
    models = [nn.Linear(3, 3).bfloat16() for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [MasterSGD(model.parameters(), lr=2**-7) for model in models]
    run = Run(models, optimizers, fragments=1, sync_every=2, mixing=0.75)
    for _ in range(2):
        for group, model in enumerate(models):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(group))
            optimizers[group].step()
        run.groups.step()
    pairs = zip(optimizers, models, strict=True)
    states = [optimizer.state[model.weight] for optimizer, model in pairs]
    # From 1 and 1 - 2**-6 a quarter of the way to their mean: less than half of what bfloat16
    # resolves below 1.
    masters = [float(state["master"][0, 0]) for state in states]
    assert masters == [1 - 2**-9, 1 - 2**-6 + 2**-9]


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_parameters(model: nn.Module, expected: nn.Module) -> bool:
    return all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_resume_with_copies_to_the_same_bits(kind: str) -> None:
    choices = {"overlap_steps": 2, "compression": "fp4", "mixing": 0.25}
    run = keeping(kind, (0, 1), **choices).train(9)
    with run.groups.engines[0].evaluate():
        saved = run.saved()
    run.train(8)
    resumed = keeping(kind, (0, 1), **choices).load(saved).train(8)
    assert all(map(same_parameters, resumed.models, run.models))


def finished(run: Run) -> Run:
    """A run at its end, where in every mode of the optimizers all groups hold the final
    parameters.
    """
    run.groups.finish()
    for optimizer in run.optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    assert same_parameters(*run.models)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_ended_is_continued_from_before_its_end_with_its_copies(kind: str) -> None:
    uninterrupted = finished(keeping(kind).train(13))
    ended = finished(keeping(kind).train(6))
    continued = finished(keeping(kind).load(ended.saved()).train(7))
    assert same_parameters(continued.models[0], uninterrupted.models[0])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([values.flatten() for values in parameters_of(model)])


def trained_and_shown(rank: int, world_size: int, kind: str) -> list[Tensor]:
    """The parameters after each of six steps, and those of an evaluation."""
    groups = WorkerGroups(2)
    model = mlp(rank)
    ddp = DistributedDataParallel(model, process_group=groups.process_group)
    optimizer = keeper(kind, model)
    engine = StreamingDiLoCo(ddp, worker_groups=groups, inner_optimizers=[optimizer], **PLAIN)
    trajectory = []
    for _ in range(6):
        push(model, groups.group_index)
        optimizer.step()
        engine.step()
        trajectory.append(flat(model))
    with engine.evaluate():
        shown = flat(model)
        if kind == "z":
            optimizer.eval()
            optimizer.train()
        assert torch.equal(shown, flat(model))
    return [*trajectory, shown]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_whose_optimizers_copied_other_weights_start_from_rank_0(kind: str) -> None:
    ranks = run_ranks(trained_and_shown, 4, kind, timeout=60)
    for values in zip(*ranks, strict=True):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[2], values[3])
    # All groups have landed after four steps, and an evaluation shows the same everywhere.
    assert all(torch.equal(ranks[0][-1], rank[-1]) for rank in ranks)
    assert not torch.equal(ranks[0][0], ranks[2][0])
    # Two steps from the same values, of gradients that differ by at most 8 * 1.25.
    distance = float((ranks[0][5] - ranks[2][5]).abs().max())
    assert distance <= 2 * 0.05 * 10 + 1e-5


def test_shown_weights_stay_as_they_are_whichever_mode_a_hook_leaves() -> None:
    run = keeping("z").train(5)
    engine = run.groups.engines[1]
    model = run.models[1]
    optimizer = run.optimizers[1]
    local = parameters_of(model)
    outer = engine.outer_state_dict()
    with engine.evaluate():
        optimizer.eval()
        assert all(torch.equal(p, outer[name]) for name, p in model.named_parameters())
    # The hook did not switch back: training goes on from the local weights.
    assert all(map(torch.equal, model.parameters(), local))
    optimizer.train()
    assert all(map(torch.equal, model.parameters(), local))
    # The hook switches before, and back inside.
    optimizer.eval()
    assert not all(map(torch.equal, model.parameters(), local))
    with engine.evaluate():
        optimizer.train()
    for parameter, values in zip(model.parameters(), local, strict=True):
        assert torch.allclose(parameter, values, atol=1e-6)
    push(model, 1)
    optimizer.step()


class Renamed(AdamW):
    """Does what AdamW does."""


def two_param_groups(dtype: torch.dtype) -> list[Any]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)).to(dtype)
    matrices = {"params": [model[0].weight, model[1].weight]}
    vectors = {"params": [model[0].bias], "lr": 0.5}
    return [matrices, vectors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_recognised_by_the_behaviour_of_the_optimizer(dtype: torch.dtype) -> None:
    def assert_copies(optimizer: Any, *names: str) -> None:
        states = copy.deepcopy(dict(optimizer.state))
        torch_numbers = torch.get_rng_state()
        python_numbers = random.getstate()
        assert set(copies_in(optimizer)) == set(names)
        assert torch.equal(torch.get_rng_state(), torch_numbers)
        assert random.getstate() == python_numbers
        assert list(map(len, states.values())) == list(map(len, optimizer.state.values()))

    parameters = partial(two_param_groups, dtype)
    assert_copies(ScheduleFreeSGD(parameters()), "z")
    assert_copies(Lookahead(AdamW(parameters(), weight_decay=0.5)), "slow")
    assert_copies(Lookahead(Renamed(parameters())), "slow")
    assert_copies(Lookahead(ScheduleFreeSGD(parameters())), "slow", "z")
    assert_copies(MasterSGD(parameters()), "master")
    assert_copies(GPA(parameters(), lr=0.1), "z")
    assert_copies(Renamed(parameters(), weight_decay=0.5))
    assert_copies(AdamW(parameters()))


class Both(Optimizer):
    """Cannot be made again from its parameters alone."""

    def __init__(self, parameters: Any, kind: Any) -> None:
        self.inside = [kind(parameters)]
        super().__init__(parameters, {})


def test_an_optimizer_that_cannot_be_made_again_is_taken_for_its_parts() -> None:
    with_master = Both(list(mlp().parameters()), lambda parameters: MasterSGD(parameters))
    plain = Both(list(mlp().parameters()), lambda parameters: SGD(parameters))
    assert copies_in(with_master) == ("master",)
    assert copies_in(plain) == ()


def test_a_copy_outside_the_state_is_refused_with_a_remedy() -> None:
    model = mlp()
    optimizer = HiddenMasterSGD(model.parameters())
    words = "HiddenMasterSGD keeps its own copy of the weights.*bf16-mixed"
    with pytest.raises(ValueError, match=words):
        StreamingDiLoCo(model, inner_optimizers=[optimizer])
    optimizer.weight_copies = ()
    StreamingDiLoCo(model, inner_optimizers=[optimizer])


def with_named_copies(name: str) -> Run:
    models = [mlp(0) for _ in range(2)]
    optimizers = []
    for model in models:
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
        optimizer.weight_copies = (name,)
        optimizers.append(optimizer)
    return Run(models, optimizers)


def test_a_user_names_copies_and_a_name_that_is_in_no_state_is_refused() -> None:
    with_named_copies("momentum_buffer").train(4)
    run = with_named_copies("y")
    words = "contains 'y', but no parameter's state has such an entry. Available entries: .'momentum_buff"
    with pytest.raises(ValueError, match=words):
        run.train(4)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_do_not_stay_in_a_copy(kind: str) -> None:
    run = keeping(kind).train(2)
    for group, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
        push(model, group)
        if group == 1:
            next(model.parameters()).grad.fill_(float("nan"))
        optimizer.step()
    run.groups.step()
    run.train(3)
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            assert all(values.isfinite().all() for values in state.values())
    for model in run.models:
        assert flat(model).isfinite().all()


def test_an_optimizer_without_copies_costs_nothing_at_landings() -> None:
    parameters = list(mlp().parameters())
    optimizer = SGD(parameters, lr=0.1)
    assert not any(WeightCopies([optimizer]).of(parameters))
