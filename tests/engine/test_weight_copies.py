"""Inner optimizers that keep their own copy of the weights: landings reach it, and nothing throws
them away.
"""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.engine.weight_copies import WeightCopies, copies_in
from tests.engine.groups import MEAN, through_a_file
from tests.methods import GPA
from tests.optimizers import HiddenMasterSGD, Lookahead, MasterSGD, ScheduleFreeSGD, keeper
from tests.ranks import run_ranks
from tests.training import mlp

KINDS = ["z", "slow", "master"]
PLAIN: dict[str, Any] = {
    **MEAN,
    "compression": "fp32",
    "fragments": 2,
    "sync_every": 4,
    "overlap_steps": 0,
}


def push(model: nn.Module, group: int) -> None:
    """Gives gradients that do not depend on the parameters: a group goes its own way."""
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, (1 + index) * (0.25 if group else -1.0))


def first_value(model: nn.Module) -> float:
    return float(next(model.parameters()).detach().flatten()[0])


def free_runs(kind: str, steps: int, dtype: torch.dtype) -> list[list[float]]:
    """A value of two groups that never exchange, after each step."""
    runs = []
    for group in range(2):
        model = nn.Linear(3, 3).to(dtype)
        nn.init.zeros_(model.weight)
        optimizer = keeper(kind, model)
        values = [0.0]
        for _ in range(steps):
            push(model, group)
            optimizer.step()
            values.append(first_value(model))
        runs.append(values)
    return runs


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_after_a_landing_groups_go_on_from_the_mean_whatever_the_optimizer_keeps(kind: str) -> None:
    free = free_runs(kind, 14, torch.float32)
    models = [nn.Linear(3, 3) for _ in range(2)]
    nn.init.zeros_(models[0].weight)
    optimizers = [keeper(kind, model) for model in models]
    groups = SimulatedGroups(
        models, [[optimizer] for optimizer in optimizers], **{**PLAIN, "fragments": 1}
    )
    landed_at = 0
    outer = 0.0
    for step in range(1, 15):
        for group, model in enumerate(models):
            push(model, group)
            optimizers[group].step()
            expected = outer + free[group][step] - free[group][landed_at]
            assert first_value(model) == pytest.approx(expected, abs=1e-6)
        if groups.step()[0]:
            landed_at = step
            outer = (free[0][step] + free[1][step]) / 2
    groups.finish()
    assert first_value(models[1]) == pytest.approx((free[0][14] + free[1][14]) / 2, abs=1e-6)


def test_float32_masters_of_bfloat16_keep_what_a_landing_adds_below_its_precision() -> None:
    models = [nn.Linear(3, 3).bfloat16() for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [MasterSGD(model.parameters(), lr=2**-7) for model in models]
    choices = {**PLAIN, "fragments": 1, "sync_every": 2, "mixing": 0.75}
    groups = SimulatedGroups(models, [[optimizer] for optimizer in optimizers], **choices)
    for _ in range(2):
        for group, model in enumerate(models):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(group))
            optimizers[group].step()
        groups.step()
    masters = [
        float(optimizer.state[models[0].weight if at == 0 else models[1].weight]["master"][0, 0])
        for at, optimizer in enumerate(optimizers)
    ]
    # From 1 and 1 - 2**-6 a quarter of the way to their mean: less than half of what bfloat16
    # resolves below 1.
    assert masters == [1 - 2**-9, 1 - 2**-6 + 2**-9]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_resume_with_copies_to_the_same_bits(kind: str) -> None:
    def made() -> tuple[SimulatedGroups, list[nn.Module], list[Any]]:
        models: list[nn.Module] = [mlp(group) for group in range(2)]
        optimizers = [keeper(kind, model) for model in models]
        choices = {**PLAIN, "overlap_steps": 2, "compression": "fp4", "mixing": 0.25}
        return (
            SimulatedGroups(models, [[optimizer] for optimizer in optimizers], **choices),
            models,
            optimizers,
        )

    def train(
        groups: SimulatedGroups, models: list[nn.Module], optimizers: list[Any], steps: int
    ) -> None:
        for _ in range(steps):
            for group, model in enumerate(models):
                push(model, group)
                optimizers[group].step()
            groups.step()

    whole = made()
    train(*whole, 9)
    with whole[0].engines[0].evaluate():
        saved = through_a_file(
            [
                [engine.state_dict() for engine in whole[0].engines],
                [one.state_dict() for one in whole[2]],
            ]
        )
    train(*whole, 8)
    resumed = made()
    for engine, optimizer, state, inner in zip(resumed[0].engines, resumed[2], *saved, strict=True):
        optimizer.load_state_dict(copy.deepcopy(inner))
        engine.load_state_dict(state)
    train(*resumed, 8)
    for one, other in zip(whole[1], resumed[1], strict=True):
        assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_ended_is_continued_from_before_its_end_with_its_copies(kind: str) -> None:
    def run(steps: int, state: Any = None) -> tuple[Any, list[Tensor]]:
        models = [mlp(0) for _ in range(2)]
        optimizers = [keeper(kind, model) for model in models]
        groups = SimulatedGroups(models, [[optimizer] for optimizer in optimizers], **PLAIN)
        if state is not None:
            for engine, optimizer, saved, inner in zip(
                groups.engines, optimizers, *state, strict=True
            ):
                optimizer.load_state_dict(inner)
                engine.load_state_dict(saved)
        for _ in range(steps):
            for group, model in enumerate(models):
                push(model, group)
                optimizers[group].step()
            groups.step()
        groups.finish()
        # Whatever the mode, all groups hold the final parameters.
        for optimizer in optimizers:
            if hasattr(optimizer, "eval"):
                optimizer.eval()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        state = (
            [engine.state_dict() for engine in groups.engines],
            [one.state_dict() for one in optimizers],
        )
        return through_a_file(list(state)), [p.detach().clone() for p in models[0].parameters()]

    expected = run(13)[1]
    assert all(map(torch.equal, run(7, run(6)[0])[1], expected))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_whose_optimizers_copied_other_weights_start_from_rank_0(kind: str) -> None:
    def train(rank: int, world_size: int) -> list[Tensor]:
        groups = WorkerGroups(2)
        model = mlp(rank)
        ddp = DistributedDataParallel(model, process_group=groups.process_group)
        optimizer = keeper(kind, model)
        engine = StreamingDiLoCo(ddp, worker_groups=groups, inner_optimizers=[optimizer], **PLAIN)
        held = []
        for _ in range(6):
            push(model, groups.group_index)
            optimizer.step()
            engine.step()
            held.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        with engine.evaluate():
            shown = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
            if kind == "z":
                optimizer.eval()
                optimizer.train()
            assert torch.equal(shown, torch.cat([p.detach().flatten() for p in model.parameters()]))
        return [*held, shown]

    ranks = run_ranks(train, 4, timeout=60)
    for values in zip(*ranks, strict=True):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[2], values[3])
    # All groups have landed after four steps, and what is shown is the same everywhere.
    assert all(torch.equal(ranks[0][-1], rank[-1]) for rank in ranks)
    assert not torch.equal(ranks[0][0], ranks[2][0])
    # Two steps from the same values, of gradients that differ by at most 8 * 1.25.
    assert float((ranks[0][5] - ranks[2][5]).abs().max()) <= 2 * 0.05 * 10 + 1e-5


def test_shown_weights_stay_as_they_are_whichever_mode_a_hook_leaves() -> None:
    models = [mlp(0) for _ in range(2)]
    optimizers = [keeper("z", model) for model in models]
    groups = SimulatedGroups(models, [[optimizer] for optimizer in optimizers], **PLAIN)
    for _ in range(5):
        for group, model in enumerate(models):
            push(model, group)
            optimizers[group].step()
        groups.step()
    engine = groups.engines[1]
    model = models[1]
    optimizer = optimizers[1]
    before = [p.detach().clone() for p in model.parameters()]
    outer = engine.outer_state_dict()
    with engine.evaluate():
        optimizer.eval()
        assert all(torch.equal(p, outer[name]) for name, p in model.named_parameters())
    # The hook did not switch back: training goes on from the local weights.
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.train()
    assert all(map(torch.equal, model.parameters(), before))
    # Switched before, and back inside.
    optimizer.eval()
    assert not all(map(torch.equal, model.parameters(), before))
    with engine.evaluate():
        optimizer.train()
    assert all(
        torch.allclose(p, old, atol=1e-6) for p, old in zip(model.parameters(), before, strict=True)
    )
    push(model, 1)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_recognised_by_the_behaviour_of_the_optimizer(dtype: torch.dtype) -> None:
    def parameters() -> list[Any]:
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)).to(dtype)
        return [
            {"params": [model[0].weight, model[1].weight]},
            {"params": [model[0].bias], "lr": 0.5},
        ]

    class Own(torch.optim.AdamW):
        """Does what AdamW does."""

    expected: list[tuple[Any, tuple[str, ...]]] = [
        (ScheduleFreeSGD(parameters()), ("z",)),
        (Lookahead(torch.optim.AdamW(parameters(), weight_decay=0.5)), ("slow",)),
        (Lookahead(Own(parameters())), ("slow",)),
        (Lookahead(ScheduleFreeSGD(parameters())), ("slow", "z")),
        (MasterSGD(parameters()), ("master",)),
        (GPA(parameters(), lr=0.1), ("z",)),
        (Own(parameters(), weight_decay=0.5), ()),
        (torch.optim.AdamW(parameters()), ()),
    ]
    before = torch.get_rng_state(), random.getstate()
    for optimizer, names in expected:
        states = copy.deepcopy(dict(optimizer.state))
        assert set(copies_in(optimizer)) == set(names), type(optimizer).__name__
        assert list(map(len, states.values())) == list(map(len, optimizer.state.values()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_an_optimizer_that_cannot_be_made_again_is_taken_for_its_parts() -> None:
    class Both(torch.optim.Optimizer):
        def __init__(self, parameters: Any, kind: Any) -> None:
            self.inside = [kind(parameters)]
            super().__init__(parameters, {})

    assert copies_in(Both(list(mlp().parameters()), lambda parameters: MasterSGD(parameters))) == (
        "master",
    )
    assert (
        copies_in(Both(list(mlp().parameters()), lambda parameters: torch.optim.SGD(parameters)))
        == ()
    )


def test_a_copy_outside_the_state_is_refused_with_a_remedy() -> None:
    model = mlp()
    optimizer: Any = HiddenMasterSGD(model.parameters())
    with pytest.raises(
        ValueError, match="HiddenMasterSGD keeps its own copy of the weights.*bf16-mixed"
    ):
        StreamingDiLoCo(model, inner_optimizers=[optimizer])
    optimizer.weight_copies = ()
    StreamingDiLoCo(model, inner_optimizers=[optimizer])


def test_a_user_names_copies_and_a_name_that_is_in_no_state_is_refused() -> None:
    def landed(name: str) -> None:
        models = [mlp(0) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
        for optimizer in optimizers:
            optimizer.weight_copies = (name,)  # type: ignore[attr-defined]
        groups = SimulatedGroups(models, [[optimizer] for optimizer in optimizers], **PLAIN)
        for _ in range(4):
            for group, model in enumerate(models):
                push(model, group)
                optimizers[group].step()
            groups.step()

    landed("momentum_buffer")
    with pytest.raises(
        ValueError,
        match="names 'y', which is in the state of no parameter: there are .'momentum_buff",
    ):
        landed("y")


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_do_not_stay_in_a_copy(kind: str) -> None:
    models = [mlp(0) for _ in range(2)]
    optimizers = [keeper(kind, model) for model in models]
    groups = SimulatedGroups(models, [[optimizer] for optimizer in optimizers], **PLAIN)
    for step in range(6):
        for group, model in enumerate(models):
            push(model, group)
            if step == 2 and group == 1:
                next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
            optimizers[group].step()
        groups.step()
    for optimizer in optimizers:
        assert all(
            value.isfinite().all() for state in optimizer.state.values() for value in state.values()
        )
    assert all(bool(p.isfinite().all()) for model in models for p in model.parameters())


def test_an_optimizer_without_copies_costs_nothing_at_landings() -> None:
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    assert WeightCopies([optimizer]).of(next(mlp().parameters())) == []
