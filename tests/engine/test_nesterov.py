"""An outer step in one pass has the bits of torch's SGD, and leaves to torch what it cannot do."""

from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor
from torch.optim import SGD

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.engine.outer import nesterov
from lightning_sdiloco.engine.outer.optimizer import OuterState, ShardOptimizer, outer_optimizer_for
from lightning_sdiloco.native import NativeLibrary
from tests.compiled import INF, NAN, SPECIAL, needs_compiler, same_bits, vector, wait_for

lists = st.lists(st.floats(width=32), min_size=1, max_size=40)


def group_of(**others: Any) -> dict[str, Any]:
    return SGD([torch.zeros(1)], **{"lr": 0.7, "momentum": 0.9, "nesterov": True, **others}).param_groups[0]


def by_torch(group: dict[str, Any], values: Tensor, gradient: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    parameter = torch.nn.Parameter(values.clone())
    parameter.grad = gradient.clone()
    optimizer = SGD([parameter], **{key: value for key, value in group.items() if key != "params"})
    optimizer.state[parameter]["momentum_buffer"] = momentum.clone()
    optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["momentum_buffer"]


def assert_same(one: Tensor, other: Tensor) -> None:
    """The same bits, but that one NaN may be another one: which it is depends on the order of operands."""
    assert torch.equal(one.isnan(), other.isnan())
    assert same_bits(one.masked_fill(one.isnan(), 0), other.masked_fill(other.isnan(), 0))


@needs_compiler
@given(
    values=lists,
    gradient=lists,
    momentum=lists,
    numel=st.integers(1, 300),
    offset=st.integers(0, 3),
    lr=st.floats(0, 10),
    rate=st.floats(0.01, 0.99),
)
@example(SPECIAL, SPECIAL[::-1], [1.0, *SPECIAL], 300, 1, 0.7, 0.9)
@example([INF, 1.0], [1e-45, NAN], [-1e-39, -INF], 33, 3, 0.0, 0.5)
@settings(max_examples=200, deadline=None)
def test_a_step_has_the_bits_of_torch(
    values: list[float],
    gradient: list[float],
    momentum: list[float],
    numel: int,
    offset: int,
    lr: float,
    rate: float,
) -> None:
    wait_for(nesterov.NATIVE)
    assert nesterov.NATIVE.get() is not None
    # At addresses that are no multiple of a vector's.
    theta, g, m = (vector(one, numel + offset)[offset:] for one in (values, gradient, momentum))
    group = group_of(lr=lr, momentum=rate)
    expected, kept, before = by_torch(group, theta, g, m), m.clone(), theta.clone()
    state = nesterov.stepped(group, theta, g, {"momentum_buffer": m})
    assert state is not None
    assert_same(g, expected[0])
    assert_same(state["momentum_buffer"], expected[1])
    # What others may be reading is as it was.
    assert same_bits(m, kept)
    assert same_bits(theta, before)


@pytest.mark.parametrize(
    "others",
    [
        {"weight_decay": 0.1},
        {"nesterov": False},
        {"nesterov": False, "dampening": 0.5},
        {"maximize": True},
        {"differentiable": True},
        {"fused": True},
        {"lr": torch.tensor(0.7)},
    ],
    ids=lambda others: next(iter(others)),
)
def test_what_else_sgd_can_do_is_left_to_torch(others: dict[str, Any]) -> None:
    wait_for(nesterov.NATIVE)
    group = {**group_of(), **others}
    assert nesterov.stepped(group, *torch.randn(2, 10), {"momentum_buffer": torch.zeros(10)}) is None


@pytest.mark.parametrize(
    "vectors",
    [
        torch.zeros(3, 10, dtype=torch.float64),
        torch.zeros(3, 10, 2)[..., 0],
        torch.zeros(3, 10, device="meta"),
        torch.zeros(3, 2, 5),
    ],
    ids=["double", "strided", "elsewhere", "a matrix"],
)
def test_other_vectors_are_left_to_torch(vectors: Tensor) -> None:
    wait_for(nesterov.NATIVE)
    assert nesterov.stepped(group_of(), vectors[0], vectors[1], {"momentum_buffer": vectors[2]}) is None


def test_a_first_step_is_left_to_torch() -> None:
    wait_for(nesterov.NATIVE)
    assert nesterov.stepped(group_of(), *torch.randn(2, 10), {}) is None


def rounds(optimizer: ShardOptimizer, gradients: Tensor) -> list[OuterState]:
    states = optimizer.take_initial()
    for gradient in gradients:
        states.append(optimizer.step(0, states[-1], states[-1].values, gradient.clone()))
    return states


@needs_compiler
def test_the_outer_optimizer_gives_the_bits_of_torch_whether_it_can_compile_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for(nesterov.NATIVE)
    called = []
    call = nesterov._call
    monkeypatch.setattr(nesterov, "_call", lambda *args: (called.append(1), call(*args)))
    generator = torch.Generator().manual_seed(1)
    shard, *gradients = torch.randn(6, 140_003, generator=generator)
    make = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
    choices = Settings(sync_every=10, outer_lr=0.7, outer_momentum=0.9).chosen_for(2)
    own = rounds(outer_optimizer_for(choices, [shard.clone()]), torch.stack(gradients))
    assert len(called) == 4  # a first step has no momentum
    users = rounds(ShardOptimizer([shard.clone()], make), torch.stack(gradients))
    monkeypatch.setattr(NativeLibrary, "get", lambda self: None)
    without = rounds(outer_optimizer_for(choices, [shard.clone()]), torch.stack(gradients))
    assert len(called) == 4
    for one, *others in zip(own, users, without, strict=True):
        for other in others:
            assert same_bits(one.values, other.values)
            assert one._replace(values=shard, state={}) == other._replace(values=shard, state={})
            assert all(map(same_bits, one.state.values(), other.state.values()))
