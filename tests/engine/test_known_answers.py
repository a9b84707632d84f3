"""What is no part of Algorithm 2 and has an answer that is known: means, buffers, warm-up, dtypes and the end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from tests.engine.groups import copied, unlike
from tests.training import inner_optimizer, mlp, train_step


def test_the_final_exchange_has_a_quarter_of_the_fragments_in_flight_and_gradients_are_gone() -> None:
    models = [nn.Sequential(*(nn.Linear(5, 5) for _ in range(12))) for _ in range(2)]
    engine = SimulatedGroups(models, compression="fp32", sync_every=100, fragments="strided:1")
    for model in models:
        model(torch.ones(5)).sum().backward()
    for one in engine.engines:
        one.land_all()
    turns = zip(*(one.final_exchange() for one in engine.engines), strict=True)
    assert [len(engine.engines[0].in_flight) for _ in turns] == [1, 2, *[3] * 10, 2, 1, 0]
    assert all(one.is_finished for one in engine.engines)
    assert all(parameter.grad is None for model in models for parameter in model.parameters())


def test_a_finished_engine_refuses_another_step() -> None:
    engine = StreamingDiLoCo(mlp(), sync_every=4, overlap_steps=0)
    engine.step()
    assert engine.finish() == []
    assert engine.finish() == []
    with pytest.raises(RuntimeError, match=r"after finish\(\)"):
        engine.step()


class Counted(nn.Module):
    """A model of one parameter and some buffers of one value, which a group sets by hand."""

    def __init__(self, buffers: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))
        for index in range(buffers):
            self.register_buffer(f"buffer_{index}", torch.zeros((), dtype=dtype))


def played(
    steps: int, at: int, do: Callable[[Any, int], object], make: Callable[[], nn.Module] = Counted, **choices: Any
) -> tuple[list[Any], SimulatedGroups]:
    """Plays two groups, to whose models something is done before one of the inner steps."""
    models = [make() for _ in range(2)]
    groups = SimulatedGroups(models, **{"sync_every": 2, "overlap_steps": 0, "mixing": 0.0, **choices})
    for step in range(1, steps + 1):
        for group, model in enumerate(models if step == at else ()):
            do(model, group)
        groups.step()
    return models, groups


def test_a_buffer_that_changes_once_becomes_the_mean_of_all_groups_and_others_stay() -> None:
    def write(model: Any, group: int) -> None:
        model.get_buffer(f"buffer_{written}").fill_(1.0 + 2 * group)

    for written in (0, 62, 63, 64, 69):  # more than a control vector has bits
        for model in played(8, 3, write, lambda: Counted(70))[0]:
            assert [values.item() for values in model.buffers()] == [2.0 * (index == written) for index in range(70)]
    written = 0
    for at, mixing in ((7, 0.0), (11, 0.5), (22, 0.5)):  # in rounds, in flight, and after the last launch
        models, groups = played(22, at, write, sync_every=4, overlap_steps=2, mixing=mixing)
        groups.finish()
        assert [model.buffer_0.item() for model in models] == [2.0, 2.0]


def test_who_recovers_takes_the_outer_value_of_a_buffer_that_did_not_travel() -> None:
    def spoil(model: Any, group: int) -> None:
        for values in model.state_dict().values() if group else ():
            values.fill_(float("nan"))

    models, _ = played(6, 3, spoil, mixing=0.5)
    assert [model.buffer_0.item() for model in models] == [0.0, 0.0], "it would spread with the next launch"


def test_a_landing_keeps_the_share_of_the_local_values_whatever_their_dtype() -> None:
    def write(model: Any, group: int) -> None:
        for values in model.state_dict().values():
            values.fill_((4.0, 8.0)[group])

    choices = {"sync_every": 1, "compression": "fp32", "mixing": 0.25, "outer_lr": 1.0, "outer_momentum": 0.0}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        models, _ = played(1, 1, write, lambda dtype=dtype: Counted(1, dtype), **choices)  # type: ignore[misc]
        # A quarter of the own value, and three quarters of the mean, which is 6.
        assert [model.weight.tolist() for model in models] == [[5.5] * 3, [6.5] * 3]
        assert [model.buffer_0.item() for model in models] == [5.5, 6.5]

    def write_exactly(model: Any, group: int) -> None:
        model.weight.fill_((4.0, 8.0)[group] + 2**-40)

    models, _ = played(1, 1, torch.no_grad()(write_exactly), lambda: Counted(1, torch.float64), **choices)
    assert models[0].weight.tolist() == [5.5 + 2**-42] * 3, "the own share is not rounded to float32"


def test_within_the_warmup_the_outer_model_is_the_local_one_and_who_finishes_leaves_the_mean_in_float32() -> None:
    model = nn.Sequential(*mlp(), nn.BatchNorm1d(3))
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=1, warmup_steps=3)
    optimizer = inner_optimizer("sgd", model)
    for step in (1, 2):
        train_step(model, optimizer, 0, step)
        engine.average_gradients()
        engine.step()
    local = copied(model.state_dict())
    with engine.evaluate():
        assert unlike(copied(model.state_dict()), local) == []

    models = [Counted() for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, warmup_steps=5)
    # A gradient that a group lacks counts as zero.
    models[0].weight.grad = torch.full((3,), 2.0)
    groups.average_gradients()
    assert [own.weight.grad.tolist() for own in models] == [[1.0] * 3] * 2  # type: ignore[union-attr]
    for group, own in enumerate(models):
        own.weight.data.copy_(torch.tensor([1.0, 1.25, 100.25]) * (1 + 2 * group))
    groups.step()
    groups.finish()
    assert [own.weight.tolist() for own in models] == [[2.0, 2.5, 200.5]] * 2
