"""Policies in an engine: against plain loops, over a stop and a resume, in processes, and where they are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from pathlib import Path
from statistics import median
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_sdiloco import (
    Carry,
    Control,
    Count,
    Federation,
    Heard,
    LandingRule,
    LaunchSchedule,
    OuterOptimizer,
    Schedule,
    Selective,
    StreamingDiLoCo,
    StreamingDiLoCoStrategy,
    TwoShot,
    Weighing,
)
from lightning_sdiloco.algorithm import Settings
from tests.engine.groups import Groups, outer_state
from tests.engine.test_reference import assert_follows, by_engine, by_loops, grouped
from tests.methods import ByMedian, ByNorm, ZScore
from tests.ranks import run_ranks
from tests.training import inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "mixing": 0.25,
    "fragments": grouped(2),
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}


def fewer(group: int, step: int) -> bool:
    """Group 1 trains in half of the steps."""
    return group == 1 and step % 2 == 0


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
    """EDiT's guard in plain loops, with a list of what was seen in place of a state."""

    def __init__(self, threshold: float, alpha: float, warmup: int) -> None:
        self.threshold, self.alpha, self.warmup = threshold, alpha, warmup
        self.seen: dict[tuple[int, int], tuple[int, float, float]] = {}
        self.left_out = 0

    def __call__(self, p: int, norms: Sequence[float], trained: Sequence[int]) -> list[float]:
        told = enumerate(zip(norms, trained, strict=True))
        counts = [self.counted(p, m, norm, steps) for m, (norm, steps) in told]
        return [count / sum(counts) for count in counts]

    def counted(self, p: int, m: int, norm: float, steps: int) -> int:
        if not steps:
            return 0
        n, average, variance = self.seen.get((p, m), (0, 0.0, 0.0))
        longest = average + self.threshold * variance**0.5 if n >= self.warmup else inf
        alpha, off = max(self.alpha, 1 / (n + 1)), min(norm, longest) - average
        self.seen[p, m] = n + 1, average + alpha * off, (1 - alpha) * (variance + alpha * off * off)
        self.left_out += norm > longest
        return steps if norm <= longest else 0


def test_policies_follow_plain_loops() -> None:
    guard, times = ZScoreLoop(threshold=1.2, alpha=0.1, warmup=2), {0: SelectiveLoop(2, 4), 3: SelectiveLoop(2, 4)}

    def selective(warmup_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
        loop = times[warmup_steps]
        told = {
            "due": lambda step: loop.due(step - warmup_steps),
            "landed": lambda p, at, *seen: loop.landed(p, at - warmup_steps, *seen),
        }
        number = {"warmup_steps": warmup_steps}
        return {**number, **told}, {**number, "schedule": Selective(threshold=0.4)}

    for groups, inner, steps, loops, own in (
        (3, "adamw", 60, *selective(0)),
        (3, "adamw", 60, *selective(3)),
        (3, "sgd", 30, {"shares": shares_by_norm}, {"weighing": ByNorm(temperature=0.05)}),
        (3, "sgd", 30, {"shares": shares_by_median}, {"weighing": ByMedian()}),
        (3, "sgd", 40, {"shares": guard}, {"weighing": ZScore(threshold=1.2, alpha=0.1, warmup=2)}),
        (2, "adamw", 30, {"carries": True, "overlap_steps": 3}, {"mixing": Carry(), "overlap_steps": 3}),
    ):
        expected = by_loops(inner, groups, steps, idle=fewer, **{**CHOICES, **loops})
        outers, _, models = by_engine(inner, groups, steps, fewer, **{**CHOICES, **own})
        assert_follows(outers, models, expected, 20)
        plain = by_loops(inner, groups, steps, idle=fewer, **CHOICES)
        assert any(not torch.allclose(values, plain.outer[name]) for name, values in expected.outer.items()), own
        assert "schedule" not in own or 8 < len(expected.launches) < 25, "strides differ"
    assert guard.left_out >= 2


# Policies of a user


@dataclass(frozen=True)
class Rarer(LaunchSchedule):
    """Launches less and less often."""

    by: int = 2

    def start(self, schedule: Schedule) -> dict[str, Any]:
        return {"next": [schedule.sync_every + schedule.offset(p) for p in range(schedule.fragments)], "gap": 4}

    def due(self, state: Any, step: int) -> tuple[int, ...]:
        return tuple(p for p, at in enumerate(state["next"]) if at == step)

    def heard(self, state: Any, landing: Heard) -> dict[str, Any]:
        at = [*state["next"]]
        at[landing.fragment] = landing.launched_at + state["gap"]
        return {"next": at, "gap": state["gap"] + self.by}


@dataclass(frozen=True)
class Loudest(Weighing):
    """Listens to the longest outer gradient alone."""

    def start(self, groups: int) -> list[int]:
        return [0] * groups

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        able = [group for group, control in enumerate(controls) if control.finite and control.weight]
        return Count({max(able, key=lambda group: (controls[group].norm, -state[group])): 1.0} if able else {})

    def heard(self, controls: Sequence[Control], state: Any) -> list[int]:
        return [seen + (group in self.count(controls, state).factors) for group, seen in enumerate(state)]


@dataclass(frozen=True)
class DelayCompensation(LandingRule):
    """Corrects what was trained in flight for where it should have been trained, by a rule of a user's own."""

    strength: float = 0.5
    kept: float = 0.0

    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        return before - gradient, after

    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None:
        sent, after = gathered
        step = (local - sent) / max(1, steps)
        local.copy_(after + steps * (step + self.strength * step * step * (after - sent)))


OWN: dict[str, Any] = {"schedule": Rarer(), "weighing": Loudest(), "mixing": DelayCompensation()}
BUILT_IN: dict[str, Any] = {"schedule": Selective(0.4), "weighing": ZScore(warmup=2), "mixing": Carry()}


MANY: list[dict[str, Any]] = [
    {"schedule": Selective(0.4), "weighing": ZScore(threshold=1.5, alpha=0.2, warmup=2), "mixing": Carry()},
    {"schedule": Rarer(), "weighing": ByMedian()},
    {"weighing": ByNorm(0.5), "mixing": Carry()},
    {"weighing": Loudest(), "mixing": DelayCompensation()},
]


@settings(max_examples=20, deadline=None)
@given(
    choices=st.sampled_from(MANY),
    idle=st.lists(st.sets(st.integers(0, 2), max_size=3), min_size=20, max_size=30),
    overlap_steps=st.integers(0, 3),
)
def test_whoever_is_idle_groups_agree_after_every_landing_and_are_silent_between_launches(
    choices: dict[str, Any], idle: list[set[int]], overlap_steps: int
) -> None:
    run = Groups(3, "sgd", **{**CHOICES, "overlap_steps": overlap_steps, **choices})
    for away in idle:
        sent = run.engines[0].report()["bytes_sent"]
        landed = run.step(idle=away)
        first, *others = [[own["outer"] for own in outer_state(engine)] for engine in run.engines]
        assert all(torch.equal(own, of) for other in others for own, of in zip(other, first, strict=True))
        # Bytes count when they have landed, and nothing else sends any.
        assert landed or run.engines[0].report()["bytes_sent"] == sent
    assert len(run.landings) <= run.engines[0].report()["launches"] <= len(run.landings) + 2


def trained(groups: int, steps: int, at: int | None = None, **choices: Any) -> list[list[Tensor]]:
    """What groups hold in the end, stopped once and gone on with in new engines, which have heard nothing."""
    run = Groups(groups, "sgd", **choices)
    if at is not None:
        run.until(at)
        run = run.resumed()
    run.until(steps)
    run.groups.finish()
    return [[parameter.detach().clone() for parameter in model.parameters()] for model in run.models]


def test_a_run_with_policies_resumes_bit_for_bit() -> None:
    for policies in (OWN, BUILT_IN):
        choices = {**CHOICES, "compression": "fp4", **policies}
        whole = trained(2, 40, **choices)
        for at in (5, 14, 23):
            for one, other in zip(whole, trained(2, 40, at, **choices), strict=True):
                assert all(map(torch.equal, one, other)), (policies, at)


def in_process(rank: int, world_size: int, compression: str, folder: str) -> list[Tensor]:
    """Two groups, of one rank each or of two that own a shard."""
    model = mlp()
    engine = StreamingDiLoCo(model, worker_groups=2, compression=compression, **CHOICES | BUILT_IN)
    optimizer = inner_optimizer("sgd", model)
    for step in range(1, 31):
        train_step(model, optimizer, rank // (world_size // 2), step)
        engine.step()
        if step == 20:
            engine.save(str(Path(folder) / "state.pt"))
    engine.finish()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("ranks", "compression"), [(2, "fp4"), (4, "fp32")])
def test_processes_do_what_the_simulation_does(ranks: int, compression: str, tmp_path: Path) -> None:
    alone = trained(2, 30, compression=compression, **CHOICES | BUILT_IN)
    # Ranks that share a group sum norms in another order.
    same = torch.equal if ranks == 2 else torch.allclose
    for held in run_ranks(in_process, ranks, compression, str(tmp_path)):
        assert all(map(same, held, alone[0]))


# Refusals


class NoDataclass(LaunchSchedule):
    start = due = heard = lambda self, *told: ()  # type: ignore[assignment]


def test_what_does_not_go_together_is_refused() -> None:
    for choices, told in (
        ({"schedule": 3}, "schedule=3 is no LaunchSchedule"),
        ({"weighing": "by_norm"}, "weighing='by_norm' is no Weighing"),
        ({"schedule": NoDataclass()}, "frozen dataclass"),
        ({"weighing": ByNorm(), "outer_optimizer": OuterOptimizer(clip_norm=1.0)}, "together with clip_norm"),
        ({"weighing": ZScore(), "outer_optimizer": OuterOptimizer(outlier_guard=5.0)}, "together with outlier_guard"),
    ):
        with pytest.raises(ValueError, match=told):
            StreamingDiLoCo(nn.Linear(2, 2), **choices)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"schedule=Selective.* does not go with overlap_steps='auto'"):
        StreamingDiLoCoStrategy(schedule=Selective(), overlap_steps="auto")


def test_a_federation_refuses_them_by_name() -> None:
    federation = Federation(hub="localhost:1", run="r", site="a", insecure=True)
    policies: list[tuple[str, Any]] = [
        *(("schedule", one) for one in (Selective(), Rarer())),
        *(("weighing", one) for one in (ByNorm(), ZScore(), ByMedian(), Loudest())),
        *(("mixing", one) for one in (Carry(), DelayCompensation())),
        ("exchange", TwoShot([1.0])),
    ]
    for name, policy in policies:
        with pytest.raises(ValueError, match=rf"{name}=.* does not go with a federation"):
            StreamingDiLoCo(nn.Linear(2, 2), federation=federation, **{name: policy})


def test_a_checkpoint_with_a_policy_is_refused_without_it_and_the_other_way_round() -> None:
    plain, selective = Settings().chosen_for(2), Settings(schedule=Selective(), mixing=Carry()).chosen_for(2)
    saved, now = selective.fixed_by_a_checkpoint(), plain.fixed_by_a_checkpoint()
    assert "schedule was Selective" in " ".join(Settings.differences(saved, now))
    assert "schedule was None" in " ".join(Settings.differences(now, saved))
    assert not Settings.differences(saved, saved)
    assert "mixing was Carry()" in " ".join(Settings.differences(saved, Settings().taken_from(saved).described()))
