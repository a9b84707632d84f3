"""Settings for which the right answer is known without Streaming DiLoCo."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import ByLink
from tests.training import batch, inner_optimizer, mlp, train_step

STEPS = 12
PARAMETERS = ("weight", "bias")


def simulated(groups: int, inner: str, **choices: object) -> list[nn.Sequential]:
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer(inner, model) for model in models]
    engine = SimulatedGroups(models, compression="fp32", layers_per_fragment=1, **choices)
    for step in range(1, STEPS + 1):
        for group in range(groups):
            train_step(models[group], optimizers[group], group, step)
        engine.step()
    return models


def alone(group: int, inner: str) -> nn.Sequential:
    model = mlp()
    optimizer = inner_optimizer(inner, model)
    for step in range(1, STEPS + 1):
        train_step(model, optimizer, group, step)
    return model


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    for actual, values in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, values, rtol=1e-5, atol=1e-6)


def test_plain_averaging_at_every_step_is_data_parallel_sgd() -> None:
    expected = mlp()
    optimizer = inner_optimizer("sgd", expected)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        batches = [batch(group, step) for group in range(3)]
        losses: list[Tensor] = [nn.functional.mse_loss(expected(x), y) for x, y in batches]
        torch.stack(losses).mean().backward()
        optimizer.step()
    plain = {"sync_every": 1, "overlap_steps": 0, "mixing": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0}
    for model in simulated(3, "sgd", **plain):
        assert_close(model, expected)


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_one_group_with_an_outer_step_that_returns_the_local_parameters_is_plain_training(inner: str) -> None:
    plain = {"sync_every": 3, "overlap_steps": 0, "mixing": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0}
    (model,) = simulated(1, inner, **plain)
    assert_close(model, alone(0, inner))


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_keeping_all_of_the_local_parameters_is_independent_training(inner: str, overlap_steps: int) -> None:
    models = simulated(2, inner, sync_every=3, overlap_steps=overlap_steps, mixing=1.0)
    for group, model in enumerate(models):
        for actual, values in zip(model.parameters(), alone(group, inner).parameters(), strict=True):
            assert torch.equal(actual, values)


def test_without_mixing_all_groups_hold_the_outer_parameters_after_a_landing() -> None:
    models = simulated(3, "adamw", sync_every=STEPS, overlap_steps=0, mixing=0.0, fragments=[["*"]])
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), models[0].parameters(), strict=True))


def test_the_final_sync_is_the_plain_mean_of_the_local_parameters() -> None:
    models = [mlp() for _ in range(3)]
    engine = SimulatedGroups(models, compression="fp32", sync_every=100, layers_per_fragment=1, outer_lr=0.1)
    for group, model in enumerate(models):
        train_step(model, inner_optimizer("sgd", model), group, 1)
    local = copy.deepcopy(models)
    engine.finish()
    for name, values in engine.outer_state_dict().items():
        mean = torch.stack([model.get_parameter(name).detach() for model in local]).mean(dim=0)
        torch.testing.assert_close(values, mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(
    "choices",
    [{}, {"compression": "sparse"}, {"compression": "int2", "exchange": "two_shot"}, {"compression": ByLink()}],
    ids=str,
)
def test_means_are_exact_whatever_rounds_send(choices: dict[str, Any], groups: int) -> None:
    """In four bits of the whole training's change, weights that all groups have at 0.999 came out as 0.74 to 1.28."""
    models = [nn.Linear(320, 320) for _ in range(groups)]
    engine = SimulatedGroups(models, sync_every=50, **choices)
    engine.step()
    with torch.no_grad():
        for group, model in enumerate(models):
            model.weight.normal_(generator=torch.Generator().manual_seed(group))
            model.bias.fill_(0.999)
    local = copy.deepcopy(models)
    mean = {name: sum(model.get_parameter(name).detach().double() for model in local) / groups for name in PARAMETERS}

    def is_exact(model: nn.Module) -> None:
        for name, values in model.named_parameters():
            torch.testing.assert_close(values.detach().double(), mean[name], rtol=2**-8, atol=1e-7)

    with engine.engines[0].evaluate(engine.group_mean()):
        is_exact(models[0])
    engine.finish()
    for model in models:
        is_exact(model)


def test_the_final_exchange_has_a_quarter_of_the_fragments_in_flight_and_gradients_are_gone() -> None:
    models = [nn.Sequential(*(nn.Linear(5, 5) for _ in range(12))) for _ in range(2)]
    engine = SimulatedGroups(models, compression="fp32", sync_every=100, layers_per_fragment=1)
    for model in models:
        model(torch.ones(5)).sum().backward()
    for one in engine.engines:
        one.land_all()
    turns = zip(*(one.final_exchange() for one in engine.engines), strict=True)
    assert [len(engine.engines[0].in_flight) for _ in turns] == [1, 2, *[3] * 10, 2, 1, 0]
    assert all(one.is_finished for one in engine.engines)
    assert all(parameter.grad is None for model in models for parameter in model.parameters())


def test_without_final_sync_the_outer_parameters_are_those_of_the_last_landing() -> None:
    models = [mlp() for _ in range(2)]
    engine = SimulatedGroups(models, compression="fp32", sync_every=100, layers_per_fragment=1, final_sync=False)
    for group, model in enumerate(models):
        train_step(model, inner_optimizer("sgd", model), group, 1)
    engine.finish()
    for model in models:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), mlp().parameters(), strict=True))


def test_a_finished_engine_refuses_another_step() -> None:
    engine = StreamingDiLoCo(mlp(), sync_every=4, overlap_steps=0)
    engine.step()
    assert engine.finish() == []
    assert engine.finish() == []
    with pytest.raises(RuntimeError, match=r"after finish\(\)"):
        engine.step()


class Remembering(nn.Sequential):
    """A model with a persistent buffer that is written to now and then, not at every step."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.register_buffer("memory", torch.zeros(3))


@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("written_at", [7, 11, 22])
def test_a_buffer_that_changes_once_late_becomes_the_mean_of_all_groups(written_at: int, mixing: float) -> None:
    models = [Remembering(), Remembering()]
    groups = SimulatedGroups(models, sync_every=4, overlap_steps=2, fragments=[["*"]], mixing=mixing)
    for step in range(1, 23):
        if step == written_at:
            for group, model in enumerate(models):
                model.memory += 1.0 + 2 * group
        groups.step()
    groups.finish()
    for model in models:
        assert model.memory.tolist() == [2.0, 2.0, 2.0]


def test_within_the_warmup_the_outer_model_is_the_local_one_with_its_buffers() -> None:
    model = Remembering()
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=1, warmup_steps=3)
    optimizer = inner_optimizer("sgd", model)
    for step in (1, 2):
        train_step(model, optimizer, 0, step)
        model.memory += 1.0
        engine.average_gradients()
        engine.step()
    local = {name: values.clone() for name, values in model.state_dict().items()}
    with engine.evaluate():
        assert all(torch.equal(values, local[name]) for name, values in model.state_dict().items())


def test_in_the_warmup_a_gradient_that_a_group_lacks_counts_as_zero() -> None:
    models = [nn.Linear(3, 2, bias=False) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=4, overlap_steps=1, warmup_steps=3)
    models[0].weight.grad = torch.full((2, 3), 2.0)
    groups.average_gradients()
    for model in models:
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[1.0] * 3] * 2


class Counted(nn.Module):
    """A model of one parameter and some buffers of one value, which a group sets by hand."""

    def __init__(self, buffers: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))
        for index in range(buffers):
            self.register_buffer(f"buffer_{index}", torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_landing_keeps_the_share_of_the_local_values_whatever_their_dtype(dtype: torch.dtype) -> None:
    models = [Counted(1, dtype) for _ in range(2)]
    choices = {"compression": "fp32", "mixing": 0.25, "outer_lr": 1.0, "outer_momentum": 0.0}
    groups = SimulatedGroups(models, sync_every=1, overlap_steps=0, **choices)
    for model, value in zip(models, (4.0, 8.0), strict=True):
        model.weight.data.fill_(value)
        model.buffer_0.fill_(value)
    groups.step()
    # A quarter of the own value, and three quarters of the mean, which is 6.
    for model, expected in zip(models, (5.5, 6.5), strict=True):
        assert model.weight.tolist() == [expected] * 3
        assert model.buffer_0.item() == expected


@pytest.mark.parametrize("written", [0, 62, 63, 64, 69])
def test_of_many_buffers_each_one_that_changes_travels(written: int) -> None:
    models = [Counted(70) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, mixing=0.0)
    for step in range(1, 9):
        if step == 3:
            for group, model in enumerate(models):
                model.get_buffer(f"buffer_{written}").fill_(1.0 + 2 * group)
        groups.step()
    for model in models:
        assert [values.item() for values in model.buffers()] == [2.0 * (index == written) for index in range(70)]


def test_who_recovers_takes_the_outer_value_of_a_buffer_that_did_not_travel() -> None:
    models = [Counted(1) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, mixing=0.5)
    for step in range(1, 7):
        if step == 3:
            models[1].weight.data.fill_(float("nan"))
            models[1].buffer_0.fill_(float("nan"))
        groups.step()
    assert [model.buffer_0.item() for model in models] == [0.0, 0.0], "it would spread with the next launch"


def test_who_finishes_within_the_warmup_leaves_the_mean_in_float32_in_any_case() -> None:
    models = [Counted(1) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, warmup_steps=5, final_sync=False)
    groups.average_gradients()
    for group, model in enumerate(models):
        model.weight.data.copy_(torch.tensor([1.0, 1.25, 100.25]) * (1 + 2 * group))
    groups.step()
    groups.finish()
    assert [model.weight.tolist() for model in models] == [[2.0, 2.5, 200.5]] * 2
