"""Algorithm 2 in plain loops against answers that are known without it, and the engine against those loops."""

from collections.abc import Sequence
from functools import partial
from math import exp, inf
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_sdiloco import Carry, OuterOptimizer, Selective, WorkerGroups
from tests import reference
from tests.engine.groups import Groups, Rank, Values, copied, grouped, unlike
from tests.methods import ByMedian, ByNorm, ZScore
from tests.ranks import run_ranks
from tests.reference import Result, outer_step, run
from tests.training import batch, inner_optimizer, mlp, train_step


def by_loops(inner: str, groups: int, steps: int, fragments: list[list[str]], **choices: Any) -> Result:
    """Trains the small model by the plain loops."""
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer(inner, model) for model in models]
    names = [[f"{pattern[0]}.{kind}" for pattern in group for kind in ("weight", "bias")] for group in fragments]
    return run(models, optimizers, batch, nn.functional.mse_loss, fragments=names, steps=steps, **choices)


def assert_same(actual: Values, expected: Values, outer_steps: int) -> None:
    """Compares outer parameters up to what rounding explains after so many outer steps of a fragment.

    Engine and reference write the same arithmetic in other ways: the engine multiplies by a weight where the reference
    divides by a sum, mixes by ``lerp``, and steps in place. In each outer step they round the outer gradient, the mean,
    the step and the mix, each to within half a unit in the last place of the largest value: two units together. Local
    parameters start from what landed, so these errors stay, and at worst add up.
    """
    assert sorted(actual) == sorted(expected)
    for name, values in expected.items():
        atol = (1e-6 + 2 * torch.finfo(torch.float32).eps * outer_steps) * float(values.detach().abs().max())
        torch.testing.assert_close(actual[name], values, rtol=1e-6, atol=atol)


def followed(inner: str, groups: int, steps: int, loops: dict[str, Any], own: dict[str, Any], most: int) -> Result:
    """Trains by the loops and by the engine, and compares outer parameters after every step and all of the end."""
    expected, trained = by_loops(inner, groups, steps, **loops), Groups(groups, inner, compression="fp32", **own)
    for outer in expected.outers:
        trained.step()
        assert_same(trained.groups.outer_state_dict(), outer, most)
    trained.groups.finish()
    for values in (trained.groups.outer_state_dict(), *(dict(model.named_parameters()) for model in trained.models)):
        assert_same(values, expected.outer, most)
    return expected


# Answers that are known, for the loops

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0, "overlap_steps": 0}


def alone(inner: str, group: int, steps: int) -> list[Values]:
    """The parameters after every step of training without any exchange."""
    model, seen = mlp(), []
    optimizer = inner_optimizer(inner, model)
    for step in range(1, steps + 1):
        train_step(model, optimizer, group, step)
        seen.append(copied(model.named_parameters()))
    return seen


def test_an_exchange_in_every_step_is_data_parallel_sgd_and_none_is_independent_training() -> None:
    for groups in (1, 3):
        loops, model = by_loops("sgd", groups, 6, grouped(2), sync_every=1, **PLAIN), mlp()
        optimizer = inner_optimizer("sgd", model)
        for step in range(1, 7):
            losses = [nn.functional.mse_loss(model(x), y) for x, y in (batch(m, step) for m in range(groups))]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            for seen in (loops.outers[step - 1], *loops.locals[step - 1]):
                torch.testing.assert_close(seen, copied(model.named_parameters()), rtol=0, atol=1e-6)
    keeping = {"sync_every": 4, "overlap_steps": 1, "mixing": 1.0, "outer_lr": 0.7, "outer_momentum": 0.9}
    for inner in ("sgd", "adamw"):
        loops = by_loops(inner, 2, 12, grouped(2), **keeping)
        for group in range(2):
            pairs = zip(loops.locals, alone(inner, group, 12), strict=True)
            assert [unlike(one[group], own) for one, own in pairs] == [[]] * 12
        loops = by_loops(inner, 1, 11, grouped(4), sync_every=4, **PLAIN)
        torch.testing.assert_close([own for (own,) in loops.locals], alone(inner, 0, 11), rtol=1e-5, atol=1e-6)


def test_the_outer_step_is_sgd_with_nesterov_momentum_on_a_mean_in_group_order() -> None:
    generator = torch.Generator().manual_seed(0)
    for momentum in (0.0, 0.9):
        outer, buffer = torch.randn(7, generator=generator), None
        parameter = nn.Parameter(outer.clone())
        optimizer = torch.optim.SGD([parameter], lr=0.4, momentum=momentum, nesterov=momentum > 0)
        for _ in range(5):
            parameter.grad = gradient = torch.randn(7, generator=generator)
            outer, buffer = outer_step(outer, buffer, gradient, 0.4, momentum)
            optimizer.step()
            torch.testing.assert_close(outer, parameter.detach(), rtol=0, atol=1e-6)
    # 2**24 + 1 rounds to 2**24 in float32, 2**24 + 2 does not: the order shows.
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert reference.mean([big, one, one]).item() == 2.0**24 / torch.tensor(3.0)
    assert reference.mean([one, one, big]).item() == (2.0**24 + 2) / torch.tensor(3.0)


class Slope(nn.Module):
    """One weight w, and w * x, so that x is the gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(10.0, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return self.w * x


def slopes(steps: int, dtype: torch.dtype = torch.float32, **choices: Any) -> Result:
    """M = 2, P = 1, H = 2, tau = 1, alpha = 0.5, outer lr 0.5, momentum 0.5; the groups walk by -1 and -3 per step."""
    models = [Slope(dtype), Slope(dtype)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    numbers = {"sync_every": 2, "overlap_steps": 1, "mixing": 0.5, "outer_lr": 0.5, "outer_momentum": 0.5, **choices}
    walk = lambda group, step: (1.0 + 2.0 * group, None)  # noqa: E731
    result = run(models, optimizers, walk, lambda y, _: y, fragments=[["w"]], steps=steps, **numbers)
    assert all(model.w.item() == result.outer["w"].to(dtype).item() for model in models)
    return result


# Worked out by hand; every number is a dyadic fraction, hence exact in float32.
#
# t  inner step         what else                                                              outer     local
# 1  9, 7               nothing                                                                10        9, 7
# 2  8, 4               launch 10 - (8, 4) = (2, 6)                                            10        8, 4
# 3  7, 1               land: mean 4; buf 4; d = 4 + 0.5 * 4 = 6; outer 10 - 0.5 * 6 = 7;      7         7, 4
#                       local (7 + 7) / 2, (1 + 7) / 2
# 4  6, 1               launch 7 - (6, 1) = (1, 6)                                             7         6, 1
# 5  5, -2              land: mean 3.5; buf 0.5 * 4 + 3.5 = 5.5; d = 3.5 + 0.5 * 5.5 = 6.25;   3.875     4.4375, 0.9375
#                       outer 7 - 3.125 = 3.875; local (5 + 3.875) / 2, (-2 + 3.875) / 2
# 6  3.4375, -2.0625    launch 3.875 - (3.4375, -2.0625) = (0.4375, 5.9375)                    3.875     as left
# end                   land: mean 3.1875; buf 0.5 * 5.5 + 3.1875 = 5.9375;
#                       d = 3.1875 + 0.5 * 5.9375 = 6.15625; outer 3.875 - 3.078125            0.796875
#                       local (3.4375 + 0.796875) / 2, (-2.0625 + 0.796875) / 2                2.1171875, -0.6328125
# then                  mean of the local parameters                                           0.7421875
OUTER_BY_HAND = [10.0, 10.0, 7.0, 7.0, 3.875, 3.875]
LOCAL_BY_HAND = [[9.0, 7.0], [8.0, 4.0], [7.0, 4.0], [6.0, 1.0], [4.4375, 0.9375], [3.4375, -2.0625]]


def test_an_example_worked_out_by_hand() -> None:
    result = slopes(6)
    assert [outer["w"].item() for outer in result.outers] == OUTER_BY_HAND
    assert [[group["w"].item() for group in groups] for groups in result.locals] == LOCAL_BY_HAND
    assert result.launches == [(2, 0), (4, 0), (6, 0)]
    assert result.landings == [(3, 0), (5, 0), (6, 0)]
    assert result.outer["w"].item() == 0.7421875
    # The last mean ignores learning rate and momentum: after step 5 nothing is in flight, after 1 nothing was.
    assert slopes(5).outer["w"].item() == 2.6875
    assert slopes(1).outer["w"].item() == 8.0
    # Outer parameters are float32 whatever the model: deltas are 1 and 3, and bfloat16 has no 10 - 0.3 * 2.
    result = slopes(1, torch.bfloat16, **{**PLAIN, "sync_every": 1, "outer_lr": 0.3})
    assert result.outers[0]["w"].item() == pytest.approx(9.4, abs=1e-6)
    assert [own["w"].item() for own in result.locals[0]] == [9.375] * 2
    for names in (["0.weight"], ["0.*", "0.*"]):
        with pytest.raises(AssertionError, match="each name in one fragment"):
            by_loops("sgd", 2, 1, [names], sync_every=1, **PLAIN)
    # Of more fragments than steps the last two land at the end, one step early.
    result = by_loops("sgd", 2, 5, grouped(4), sync_every=2, **{**PLAIN, "overlap_steps": 1})
    assert result.launches == [(2, 0), (2, 1), (3, 2), (3, 3), (4, 0), (4, 1), (5, 2), (5, 3)]
    assert result.landings == [(3, 0), (3, 1), (4, 2), (4, 3), (5, 0), (5, 1), (5, 2), (5, 3)]


# The engine, bit for bit where all sums are exact


class Walk(nn.Module):
    """Walks by small whole numbers: x is the gradient. With dyadic settings no operation rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.arange(float(size)) for size in (5, 3, 7)])

    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.stack([(part * own).sum() for part, own in zip(self.parts, x, strict=True)]).sum()

    @staticmethod
    def batch(group: int, step: int) -> tuple[list[Tensor], None]:
        generator = torch.Generator().manual_seed(100 * group + step)
        return [torch.randint(-1, 2, (size,), generator=generator).float() for size in (5, 3, 7)], None


def cut(fragments: int) -> list[list[str]]:
    return [[f"parts.{part}" for part in range(3)][index::fragments] for index in range(fragments)]


MICRO_BATCHES = {1: [1], 2: [1, 3], 4: [1, 1, 2, 4]}  # their sums are powers of two, without the last one too
STREAMING: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "mixing": 0.5, "outer_lr": 0.5, "outer_momentum": 0.5}
HALVES = OuterOptimizer(lr_schedule=partial(LambdaLR, lr_lambda=lambda number: 0.5**number))
# Fragments, what both are told, and what the loops and the engine are told for themselves.
EXACT: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "in every step": (1, {**PLAIN, "sync_every": 1}, {}, {}),
    "diloco": (1, {**STREAMING, "mixing": 0.0, "overlap_steps": 0}, {}, {}),
    "streaming": (3, STREAMING, {}, {}),
    "two in flight": (2, {**STREAMING, "sync_every": 5, "overlap_steps": 4, "mixing": 0.25}, {}, {}),
    "independent": (2, {**STREAMING, "mixing": 1.0}, {}, {}),
    "carry": (3, STREAMING, {"carries": True}, {"mixing": Carry()}),
    "warm-up": (2, {**STREAMING, "warmup_steps": 3}, {}, {}),
    "a rate that halves": (3, STREAMING, {"outer_lr": lambda number: 0.5 ** (1 + number)}, {"outer_optimizer": HALVES}),
    "idle": (1, STREAMING, {}, {}),
}


class Walking(Rank):
    def loss(self, step: int) -> Tensor:
        return self.wrapped(Walk.batch(self.group, step)[0])  # type: ignore[no-any-return]


def differences(rank: int, world_size: int) -> dict[str, Any]:
    """Plays all cases with each number of groups, and returns where this rank is not at the bits of the loops."""
    wrong: dict[str, Any] = {}
    for groups in (4, 2, 1):
        joined = WorkerGroups(groups)

        def idle(group: int, step: int, groups: int = groups) -> bool:
            """In the second round the last group does not train, in the third one nobody."""
            return 4 < step <= 8 and group == groups - 1 > 0 or 8 < step <= 12

        counts = {"idle": idle, "micro_batches": lambda group, step, groups=groups: MICRO_BATCHES[groups][group]}
        for case, (fragments, both, loops, own) in EXACT.items():
            choices = {**both, **(counts if case == "idle" else {}), "fragments": cut(fragments)}
            models: list[nn.Module] = [Walk() for _ in range(groups)]
            optimizers = [inner_optimizer("whole", model) for model in models]
            expected = run(models, optimizers, Walk.batch, lambda y, _: y, **{"steps": 14, **choices, **loops})
            here = Walking(rank, joined, "whole", lambda _: Walk(), **{**choices, "compression": "fp32", **own})
            for step in range(1, 15):
                here.step(step)
                off = unlike(copied(here.model.named_parameters()), expected.locals[step - 1][here.group])
                if off or unlike(here.engine.outer_state_dict(), expected.outers[step - 1]):
                    wrong.setdefault(f"{groups} groups, {case}", (step, off))
            here.engine.finish()
            if off := unlike(copied(here.model.named_parameters()), expected.outer):
                wrong[f"{groups} groups, {case}: at the end"] = off
            # Of a warm-up, means of gradients land too.
            if case != "warm-up" and here.engine.report()["landings"] != len(expected.landings):
                wrong[f"{groups} groups, {case}: landings"] = here.engine.report()["landings"]
    return wrong


def test_real_ranks_have_the_bits_of_the_loops() -> None:
    """Ranks of a group of several own a shard each, of fragments whose sizes are odd."""
    assert run_ranks(differences, 4) == [{}] * 4


# The engine, up to rounding in numbers as they come


@settings(max_examples=25, deadline=None)
@given(data=st.data(), batches=st.lists(st.integers(0, 12), min_size=1, max_size=4), warm_up=st.integers(0, 5))
def test_groups_that_run_dry_and_a_schedule_follow_the_loops(data: Any, batches: list[int], warm_up: int) -> None:
    """Epochs of as many inner steps as the group with the most batches; groups train unequal micro-batches."""
    sync_every, base = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([0.4, 0.7, 1.0]))
    choices = {
        "sync_every": sync_every,
        "overlap_steps": data.draw(st.integers(0, sync_every - 1)),
        "mixing": data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        "fragments": grouped(data.draw(st.integers(1, 4))),
        "outer_momentum": data.draw(st.sampled_from([0.0, 0.9])),
        "warmup_steps": data.draw(st.sampled_from([0, 0, 1, 6])),
        "idle": lambda group, step: (step - 1) % max(1, *batches) >= batches[group],
        "micro_batches": lambda group, step: 1 + (group + step * warm_up) % 3,
    }
    rate = lambda number: min(1.0, (number + 1) / (warm_up + 1))  # noqa: E731
    schedule = OuterOptimizer(lr_schedule=partial(LambdaLR, lr_lambda=rate))
    loops = {**choices, "outer_lr": lambda number: base * rate(number)}
    own = {**choices, "outer_lr": base, "outer_optimizer": schedule}
    inner = data.draw(st.sampled_from(["sgd", "adamw"]))
    followed(inner, len(batches), 25, loops, own, 1 + choices["warmup_steps"] + 25 // sync_every)


# Policies


class SelectiveLoop:
    """SelSync for worker groups in plain loops, with lists in place of a state."""

    def __init__(self, fragments: int, every: int, threshold: float = 0.4, most: int = 4) -> None:
        self.every, self.threshold, self.most = every, threshold, most
        self.at = [every + p * every // fragments for p in range(fragments)]
        self.times, self.before = [1] * fragments, [[0.0]] * fragments

    def due(self, step: int) -> list[int]:
        return [p for p, at in enumerate(self.at) if at == step]

    def landed(self, p: int, launched_at: int, norms: Sequence[float], trained: Sequence[int]) -> None:
        now = [norm / max(1, steps) for norm, steps in zip(norms, trained, strict=True)]
        calm = len(self.before[p]) == len(now)
        for m, steps in enumerate(trained if calm else ()):
            calm = calm and (not steps or abs(now[m] - self.before[p][m]) < self.threshold * self.before[p][m])
        self.times[p] = min(self.most, self.times[p] * 2) if calm else 1
        self.at[p], self.before[p] = launched_at + self.every * self.times[p], now


def shares_by_norm(p: int, norms: Sequence[float], trained: Sequence[int]) -> list[float]:
    raw = [steps * exp(-norm / 0.05) for norm, steps in zip(norms, trained, strict=True)]
    return [share / sum(raw) for share in raw]


def shares_by_median(p: int, norms: Sequence[float], trained: Sequence[int]) -> list[float]:
    middle = median(norms)
    return [
        steps / sum(trained) * min(1, middle / norm if norm else 1) for norm, steps in zip(norms, trained, strict=True)
    ]


class ZScoreLoop:
    """EDiT's guard in plain loops, with what was seen of every group in place of a state."""

    def __init__(self, threshold: float, alpha: float, warmup: int) -> None:
        self.threshold, self.alpha, self.warmup, self.left_out = threshold, alpha, warmup, 0
        self.seen: dict[tuple[int, int], tuple[int, float, float]] = {}

    def __call__(self, p: int, norms: Sequence[float], trained: Sequence[int]) -> list[float]:
        counts = [*trained]
        for m, norm in enumerate(norms):
            if trained[m]:
                n, average, variance = self.seen.get((p, m), (0, 0.0, 0.0))
                longest = average + self.threshold * variance**0.5 if n >= self.warmup else inf
                alpha, off = max(self.alpha, 1 / (n + 1)), min(norm, longest) - average
                self.seen[p, m] = n + 1, average + alpha * off, (1 - alpha) * (variance + alpha * off * off)
                if norm > longest:
                    self.left_out, counts[m] = self.left_out + 1, 0
        return [count / sum(counts) for count in counts]


def test_policies_follow_plain_loops() -> None:
    choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "mixing": 0.25, "fragments": grouped(2)}
    choices |= {"outer_lr": 0.7, "outer_momentum": 0.9}
    guard = ZScoreLoop(threshold=1.2, alpha=0.1, warmup=2)

    loop = SelectiveLoop(2, 4)
    selective = {
        "warmup_steps": 3,
        "due": lambda step: loop.due(step - 3),
        "landed": lambda p, at, *seen: loop.landed(p, at - 3, *seen),
    }
    for inner, steps, loops, own in (
        ("adamw", 60, selective, {"warmup_steps": 3, "schedule": Selective(threshold=0.4)}),
        ("sgd", 30, {"shares": shares_by_norm}, {"weighing": ByNorm(temperature=0.05)}),
        ("sgd", 30, {"shares": shares_by_median}, {"weighing": ByMedian()}),
        ("sgd", 40, {"shares": guard}, {"weighing": ZScore(threshold=1.2, alpha=0.1, warmup=2)}),
        ("adamw", 30, {"carries": True, "overlap_steps": 3}, {"mixing": Carry(), "overlap_steps": 3}),
    ):
        base = {**choices, "idle": lambda group, step: group == 1 and step % 2 == 0}
        expected = followed(inner, 3, steps, {**base, **loops}, {**base, **own}, 20)
        plain = by_loops(inner, 3, steps, **base)
        assert any(not torch.allclose(values, plain.outer[name]) for name, values in expected.outer.items()), own
        assert "schedule" not in own or 8 < len(expected.launches) < 25, "strides differ"
    assert guard.left_out >= 2
