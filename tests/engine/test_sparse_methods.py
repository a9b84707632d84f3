"""Few values at a time: the mean over their senders against plain loops, and payloads whose length varies."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm import CONTROL_BYTES, Count, all_reduce_for
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.compression import ErrorFeedback, Float32, Int2, RandomK, Threshold, TopK
from tests.engine.groups import Groups, after_landings, unlike
from tests.ranks import run_ranks
from tests.training import LAYERS, mlp

SENDERS = ErrorFeedback(TopK(1 / 16, Int2(), over="senders"), decay=0.95)
KEPT = ErrorFeedback(Threshold(1 / 16, Int2(), every=3))


def mean_of(gradients: list[torch.Tensor], factors: dict[int, float], compression: Any) -> torch.Tensor:
    all_reduce = all_reduce_for("gather", len(gradients), compression, 0.0)
    payloads = [all_reduce.encode(gradient, None).payloads[0] for gradient in gradients]
    return all_reduce.mean(payloads, Count(factors), like=gradients[0])


@given(
    st.integers(1, 5),
    st.integers(1, 60),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=5, max_size=5),
    st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_the_mean_over_senders_is_that_of_plain_loops(
    groups: int, numel: int, share: float, weights: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers, of which every sum is exact, and of a group no two of one magnitude.
    rows = [torch.randperm(numel, generator=generator) + 1.0 for _ in range(groups)]
    rows = [row * (torch.randint(0, 2, (numel,), generator=generator) * 2 - 1) for row in rows]
    factors = {group: weights[group] for group in range(groups) if weights[group]}
    kept = math.ceil(Fraction(str(share)) * numel)
    kept = min(kept + kept % 2, numel)
    expected = []
    for place in range(numel):
        total, count = 0.0, 0
        for group, factor in factors.items():
            if abs(rows[group][place]) > numel - kept:
                total, count = total + factor * float(rows[group][place]), count + 1
        expected.append(total / max(count, 1))
    actual = mean_of(rows, factors, TopK(share, Float32(), over="senders"))
    assert torch.equal(actual, torch.tensor(expected))


def test_where_all_send_all_both_means_have_the_same_bits() -> None:
    rows = [torch.randn(5001, generator=torch.Generator().manual_seed(group)) for group in range(3)]
    factors = {0: 0.7, 1: 1.1, 2: 1.2}
    for make in (
        lambda over: TopK(1.0, Float32(), over=over),
        lambda over: RandomK(4, TopK(1.0, Float32(), over=over)),
    ):
        assert torch.equal(mean_of(rows, factors, make("groups")), mean_of(rows, factors, make("senders")))


@pytest.mark.parametrize("compression", [SENDERS, KEPT], ids=["senders", "kept"])
def test_processes_get_the_bits_of_the_simulator_and_of_each_other(compression: Any) -> None:
    choices = {"sync_every": 8, "overlap_steps": 3, "fragments": LAYERS, "compression": compression}

    def run(rank: int, world_size: int) -> tuple[Any, float]:
        model = mlp()
        engine = StreamingDiLoCo(model, **choices)
        return after_landings(engine, model, rank, 24, "adamw"), engine.report()["bytes_sent"]

    here = Groups(3, **choices)
    expected = here.after_landings(24)
    for (seen, sent), engine in zip(run_ranks(run, 3), here.engines, strict=True):
        assert [unlike(*both) for both in zip(seen, expected, strict=True)] == [[]] * len(expected)
        assert sent == engine.report()["bytes_sent"]


def test_bytes_fall_while_groups_move_little_and_those_told_are_those_sent() -> None:
    kept = Threshold(1 / 8, Float32(), every=4)
    models = [nn.Linear(100, 90, bias=False) for _ in range(2)]
    run = SimulatedGroups(models, sync_every=1, overlap_steps=0, fragments=[["*"]], compression=kept, outer_lr=0.0)
    moves = torch.randn(90, 100, generator=torch.Generator().manual_seed(0))
    told: list[int] = []
    for scale in (1.0, 1.0, 0.5, 0.1, 0.1):
        for model in models:
            model.weight.data += scale * moves
        told += [landing.bytes_sent for landing in run.step()[0]]
        for model in models:
            model.load_state_dict(run.outer_state_dict())
    tuning, expected = None, []
    for scale in (1.0, 1.0, 0.5, 0.1, 0.1):
        gradient = (models[0].weight.data - (models[0].weight.data + scale * moves)).flatten()
        tuning = kept.tuning(gradient, tuning)
        # Of each message, eight bytes that tell how long it is.
        expected.append(CONTROL_BYTES + 8 + len(kept.tuned(tuning).encode(gradient)))
    assert told == expected
    assert told[0] == told[1] == told[4] == CONTROL_BYTES + 8 + kept.wire_bytes(9000)
    assert told[3] == CONTROL_BYTES + 8 + 2 * 3 < told[2] < told[1] / 4
    run.finish()


def test_an_exchange_that_must_know_sizes_refuses_payloads_that_vary() -> None:
    topology = Topology()
    topology.exchange.learns_sizes = False
    with pytest.raises(ValueError, match=r"exchange='\.\.\.:nccl'"):
        StreamingDiLoCo(mlp(), topology=replace(topology), compression="threshold+memory")


def test_two_shots_are_refused_by_name() -> None:
    for compression in (SENDERS, KEPT):
        with pytest.raises(ValueError, match=r"exchange='two_shot' was given with compression=ErrorFeedback"):
            SimulatedGroups([mlp()] * 4, compression=compression, exchange="two_shot")
