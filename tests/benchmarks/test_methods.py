"""The trainings of the comparison of methods do what their names say."""

from dataclasses import replace
from math import inf
from statistics import mean

import pytest
import torch

from benchmarks.methods.named import AVERAGED, METHODS, training
from benchmarks.methods.trained import MOST_DROPPED, Dropping
from benchmarks.models import TINY
from benchmarks.training import Loop, NamedTraining


def tiny(method: str, seed: int = 0, **changes: object) -> NamedTraining:
    """Makes a training of a method that takes no time."""
    groups = METHODS[method].groups[-1]
    return replace(training(method, groups, seed), size=TINY, validation_windows=32, **changes)  # type: ignore[arg-type]


def trained(one: NamedTraining, steps: int) -> Loop:
    """Trains so many steps."""
    loop = Loop(one, one.text())
    loop.run(steps=steps)
    return loop


def test_a_group_at_half_speed_trains_every_other_step_and_weighs_half_as_much() -> None:
    one = tiny("Paced, one at half speed")
    assert [one.trained(0, step) for step in range(4)] == [one.batch] * 4
    assert [one.trained(3, step) for step in range(4)] == [0, one.batch, 0, one.batch]
    loop = trained(one, 40)
    assert [engine.inner_steps for engine in loop._engines] == [40] * 4
    weights = [engine.rounds.fragments[0].weight for engine in loop._engines]
    assert weights[3] == pytest.approx(weights[0] / 2, abs=1)


def test_what_is_dropped_is_near_to_the_bound_and_counts_as_gradients_of_zero() -> None:
    one = tiny("DropCompute")
    assert isinstance(one, Dropping)
    kept = mean(one.trained(group, step) / one.batch for group in range(4) for step in range(250))
    assert MOST_DROPPED / 2 < 1 - kept < 1.2 * MOST_DROPPED
    assert one.trained(0, 7) == replace(one).trained(0, 7), "a training is that of its seed"
    some, whole = one.group(), one.group()
    tokens, targets = next(one.text().batches(0, 8))
    some.backward(tokens, targets, 6)
    whole.backward(tokens[:6], targets[:6])
    for ours, theirs in zip(some.model.parameters(), whole.model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad * 6 / 8)


def test_one_sender_takes_the_code_with_the_fewest_bytes() -> None:
    loop = trained(tiny("ByLink, one slow uplink"), 100)
    sent = [engine.report()["bytes_sent"] for engine in loop._engines]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] < 0.6 * sent[0]


def test_fedglomo_without_momentum_and_with_rounds_of_a_step_is_the_mean_of_gradients() -> None:
    choices = {"sync_every": 1, "overlap_steps": 0}
    ours = trained(tiny("FedGLOMO", choices=choices, beta=1.0), 6).finish()
    plain = tiny(AVERAGED, lr=0.1, choices={**choices, "outer_lr": 1.0, "outer_momentum": 0.0}, clip=inf)
    theirs = trained(plain, 6).finish()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
