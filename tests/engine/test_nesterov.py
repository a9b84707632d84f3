"""An outer step in one pass has the bits of torch's plain SGD, for all values and lengths."""

from functools import partial

import hypothesis.strategies as st
import torch
from hypothesis import example, given, settings
from torch import Tensor
from torch.optim import SGD

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.engine.outer import nesterov
from lightning_sdiloco.engine.outer.optimizer import OuterState, ShardOptimizer, outer_optimizer_for
from tests.bits import INF, NAN, SPECIAL, same_bits, vector

lists = st.lists(st.floats(width=32), min_size=1, max_size=40)


def assert_same(one: Tensor, other: Tensor) -> None:
    """The same bits, but that one NaN may be another one: which it is depends on the order of operands."""
    assert torch.equal(one.isnan(), other.isnan())
    assert same_bits(one.masked_fill(one.isnan(), 0), other.masked_fill(other.isnan(), 0))


@given(
    values=lists,
    gradient=lists,
    momentum=lists,
    numel=st.integers(1, 300) | st.integers(65_500, 65_700),
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
    # At addresses that are no multiple of a vector's.
    theta, g, m = (vector(one, numel + offset)[offset:] for one in (values, gradient, momentum))
    parameter = torch.nn.Parameter(theta.clone())
    parameter.grad = g.clone()
    plain = SGD([parameter], lr=lr, momentum=rate, nesterov=True, foreach=False)
    plain.state[parameter]["momentum_buffer"] = m.clone()
    plain.step()
    kept, before = m.clone(), theta.clone()
    state = nesterov.stepped(plain.param_groups[0], theta, g, {"momentum_buffer": m})
    assert state is not None
    assert_same(g, parameter.detach())
    assert_same(state["momentum_buffer"], plain.state[parameter]["momentum_buffer"])
    # What others may be reading is as it was.
    assert same_bits(m, kept)
    assert same_bits(theta, before)


def rounds(optimizer: ShardOptimizer, gradients: Tensor) -> list[OuterState]:
    states = optimizer.take_initial()
    for gradient in gradients:
        states.append(optimizer.step(0, states[-1], states[-1].values, gradient.clone()))
    return states


def test_the_default_outer_optimizer_has_the_bits_of_the_same_one_made_by_the_user() -> None:
    shard, *gradients = torch.randn(6, 140_003, generator=torch.Generator().manual_seed(1))
    choices = Settings(sync_every=10, outer_lr=0.7, outer_momentum=0.9).chosen_for(2)
    own = rounds(outer_optimizer_for(choices, [shard.clone()]), torch.stack(gradients))
    make = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
    users = rounds(ShardOptimizer([shard.clone()], make), torch.stack(gradients))
    for one, other in zip(own, users, strict=True):
        assert same_bits(one.values, other.values)
        assert one._replace(values=shard, state={}) == other._replace(values=shard, state={})
        assert all(map(same_bits, one.state.values(), other.state.values()))
