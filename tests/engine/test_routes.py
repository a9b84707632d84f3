"""Groups that average with partners hold outer parameters of their own: against plain loops and closed forms."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import AgreementError, FastestPairs, RandomPairs, Ring, Route, SimulatedGroups
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import Int8, RandomK
from lightning_sdiloco.engine.checkpoint import restart_from
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups as Hosts
from lightning_sdiloco.planning.workload import Model
from tests.engine.groups import outer_state

OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}
PURE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0}
SPEEDS = (5.0, 1.0, 3.0, 3.0, 1.0, 2.0, 5.0)


class Vector(nn.Module):
    """A model that is one vector, drawn to a target of its group."""

    def __init__(self, numel: int = 64) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))

    @torch.no_grad()
    def train_to(self, target: Tensor) -> None:
        self.values += 0.1 * (target - self.values)


def vectors(groups: int, numel: int = 64, **choices: Any) -> tuple[list[Any], SimulatedGroups]:
    models = [Vector(numel) for _ in range(groups)]
    return models, SimulatedGroups(models, **{"sync_every": 4, "overlap_steps": 0, "compression": "fp32", **choices})


def stacked(models: Sequence[Any]) -> Tensor:
    return torch.stack([model.values.detach().double() for model in models])


def begin(models: Sequence[Any], seed: int) -> Tensor:
    """Gives every group values of its own."""
    start = torch.randn(len(models), models[0].values.numel(), generator=torch.Generator().manual_seed(seed))
    for model, values in zip(models, start, strict=True):
        model.values.data.copy_(values)
    return start.double()


def own_outer(groups: SimulatedGroups) -> Tensor:
    return torch.stack([torch.cat([own["outer"] for own in outer_state(engine)]).double() for engine in groups.engines])


def ring_numbers(groups: int) -> tuple[float, float]:
    """Rate and pull of A2CiD2 by numpy: from the Laplacian of the ring."""
    laplacian = np.eye(groups) - (np.roll(np.eye(groups), 1, 0) + np.roll(np.eye(groups), -1, 0)) / 2
    slow = 1 / np.sort(np.linalg.eigvalsh(laplacian))[1]
    edge = np.eye(groups)[0] - np.eye(groups)[1]
    resistance = edge @ np.linalg.pinv(laplacian) @ edge / 2
    return 0.5 / np.sqrt(slow * resistance), 0.5 * np.sqrt(slow / resistance)


@dataclass(frozen=True)
class Neighbours(Route):
    """A user's own: neighbours in a row, from the left and from the right in turn; who is left over joins the last."""

    def legs(self, number: int, groups: int) -> Sequence[tuple[int, ...]]:
        row = list(range(groups)) if number % 2 == 0 else [*range(1, groups), 0]
        pairs = [tuple(sorted(row[at : at + 2])) for at in range(0, groups - 1, 2)]
        return [*pairs[:-1], tuple(sorted((*pairs[-1], row[-1])))] if groups % 2 else pairs


@pytest.mark.parametrize(
    "route", [RandomPairs(seed=3), FastestPairs(speeds=SPEEDS), Ring(), Neighbours()], ids=lambda r: type(r).__name__
)
def test_routes_follow_plain_loops(route: Route) -> None:
    m, h, overlap, mixing, lr, mu = 7, 4, 2, 0.25, 0.7, 0.5
    accelerated = isinstance(route, Ring)
    outer_step = {} if accelerated else {"outer_optimizer": partial(torch.optim.SGD, lr=lr, momentum=mu)}
    models, groups = vectors(m, overlap_steps=overlap, mixing=mixing, route=route, sync_every=h, **outer_step)
    targets = torch.randn(m, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local, outer, twin = (torch.zeros(m, 64, dtype=torch.float64) for _ in range(3))
    velocity, rate, pull = torch.zeros_like(local), *ring_numbers(m)
    sent, s = local, np.exp(-2 * rate)
    for step in range(1, 43):
        for model, target in zip(models, targets, strict=True):
            model.train_to(target.float())
        groups.step()
        local = local + 0.1 * (targets - local)
        if step % h == 0:
            sent = local
        if step > h - 1 and step % h == overlap:
            number, values, second = step // h - 1, sent, twin + sent - outer
            if accelerated:
                more, less = (1 + s) / 2, (1 - s) / 2
                values, second = more * values + less * second, less * values + more * second
            mean = torch.empty_like(values)
            for leg in route.legs(number, m):
                mean[list(leg)] = values[list(leg)].mean(0)
            twin = second + 2 * pull * (mean - values)
            velocity = mu * velocity + outer - mean
            outer = mean if accelerated else outer - lr * velocity
            local = mixing * local + (1 - mixing) * outer
        assert torch.allclose(own_outer(groups), outer, atol=2e-6)
        assert torch.allclose(stacked(models), local, atol=2e-6)
    shown = groups.outer_state_dict()["values"]
    assert torch.allclose(shown.double(), local.mean(0), atol=2e-6)
    groups.finish()
    assert all(torch.equal(model.values, models[0].values) for model in models)
    assert torch.allclose(models[0].values.double(), local.mean(0), atol=2e-6)


def test_pure_mixing_keeps_the_mean_counts_rounds_from_the_end_of_the_warm_up_and_sends_to_partners_alone() -> None:
    for route in (RandomPairs(), FastestPairs(), Ring()):
        choices = PURE if not isinstance(route, Ring) else {"mixing": 0.0}
        for compression in ("fp32", "bf16", "int8", RandomK(4, Int8())):
            models, groups = vectors(5, 256, route=route, **{**choices, "compression": compression})
            mean, variance = (start := begin(models, 1)).mean(0), start.var(0).mean()
            for _ in range(40):
                groups.step(idle=range(5))
                assert torch.allclose(stacked(models).mean(0), mean, atol=1e-6), (route, compression)
            assert stacked(models).var(0).mean() < 0.5 * variance
    models, groups = vectors(6, route=Neighbours(), warmup_steps=1, **{**PURE, "sync_every": 1})
    groups.average_gradients()
    groups.step()
    expected = begin(models, 2)
    for number in range(9):
        groups.step()
        for leg in Neighbours().legs(number, 6):
            expected[list(leg)] = expected[list(leg)].mean(0)
        assert torch.allclose(stacked(models), expected, atol=1e-5)
    choices = {"sync_every": 4, "overlap_steps": 0, "mixing": 0.0, "compression": "fp32", **OUTER}
    choices["route"] = FastestPairs(speeds=SPEEDS[:6])
    _, groups = vectors(6, **choices)
    for _ in range(12):
        groups.step()
    method = Streaming(Model.of_size(64, layers=1), Settings(**choices), Hosts(groups=6, step_time=1.0))
    assert method.bytes_per_step * 12 == groups.engines[0].report()["bytes_sent"]


def test_digests_are_checked_between_partners_and_who_is_not_finite_takes_the_values_of_its_partner() -> None:
    _, groups = vectors(4, route=RandomPairs(), **OUTER)
    state = groups.engines[1].state_dict()
    state["fragments"][0] = {**state["fragments"][0], "anchor": torch.ones(64)}
    groups.engines[1].load_state_dict(state)
    for _ in range(3):
        groups.step()
    with pytest.raises(AgreementError, match="did not begin from the same outer parameters"):
        groups.step()
    models, groups = vectors(4, route=RandomPairs(), **PURE)
    for group, model in enumerate(models):
        model.values.data.fill_(float(group) if group else float("nan"))
    for _ in range(4):
        groups.step()
    partner = sum(next(leg for leg in RandomPairs().legs(0, 4) if 0 in leg))
    assert stacked(models)[:, 0].tolist()[0] == stacked(models)[partner, 0] == partner


def test_rounds_start_anew_from_the_mean() -> None:
    models: list[Any] = [Vector() for _ in range(4)]
    for model in models:
        model.register_buffer("seen", torch.zeros(2))
    choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 1, "mixing": 0.0, "compression": "fp32", **OUTER}
    groups = SimulatedGroups(models, **choices, route=RandomPairs())
    for _ in range(9):
        for group, model in enumerate(models):
            model.train_to(torch.full((64,), float(group)))
            model.seen += group
        groups.step()
    states = [engine.state_dict() for engine in groups.engines]
    restart: Any = restart_from([[state] for state in states], Settings())
    found = restart.parameters["values"]
    assert torch.allclose(found.values.double(), own_outer(groups).mean(0))
    own = [state["fragments"][0] for state in states]
    for joined, parts in (
        (found.state["momentum_buffer"], [of["state"]["momentum_buffer"] for of in own]),
        (restart.buffers["seen"], [of["buffers"][0] for of in own]),
    ):
        assert torch.allclose(joined, torch.stack(parts).mean(0))
        assert not torch.allclose(joined, parts[0])


def test_the_fastest_pairs_are_those_that_any_could_make_and_the_pairs_of_a_window_connect_all() -> None:
    # By trying them all; what is slowest counts first.
    for seed in range(6):
        drawn = np.random.default_rng(seed).permutation(16).reshape(4, 4) + 1.0
        speeds = tuple(tuple(float(value) for value in row) for row in np.minimum(drawn, drawn.T))
        ways = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)), FastestPairs(speeds=speeds).legs(0, 4)]
        *possible, chosen = (sorted(speeds[one][other] for one, other in pairs) for pairs in ways)
        assert chosen == max(possible)
    for groups in (1, 2, 3, 7, 16):
        line = tuple(float(1 + (7 * group) % 5) for group in range(groups))
        table = tuple(tuple(1.0 + (3 * a * a + 3 * b * b + a * b) % 11 for b in range(groups)) for a in range(groups))
        for route in (FastestPairs(window=2), FastestPairs(speeds=line), FastestPairs(speeds=table, window=4)):
            for block in (0, 3):
                parts = {group: {group} for group in range(groups)}
                for number in range(block * route.window, (block + 1) * route.window):
                    legs = route.legs(number, groups)
                    assert sorted(group for leg in legs for group in leg) == list(range(groups))
                    assert all(2 <= len(leg) <= 3 for leg in legs) or groups == 1
                    for leg in legs:
                        joined = set().union(*(parts[group] for group in leg))
                        parts.update(dict.fromkeys(joined, joined))
                assert len(parts[0]) == groups


def test_the_clock_knows_unequal_links_and_pairs() -> None:
    """Two fast groups and two slow ones: who pairs by speed lets the fast ones wait for one round less."""
    links = [Link(gbit_s=speed) for speed in (1.0, 1.0, 0.1, 0.1)]
    hosts = Hosts(groups=4, step_time=1.0, memory_rate=1e15)
    pairs = FastestPairs(speeds=(10, 10, 1, 1))
    # In multiples of what a payload takes on a slow link, whose later launch the second landing awaits.
    for route, steps, rounds in ((pairs, 10, 0.1), (pairs, 20, 2.0), (None, 20, 3.0)):
        settings = Settings(sync_every=10, overlap_steps=0, compression="fp32", route=route, mixing=0.0)
        method = Streaming(Model.of_size(10**7, layers=1), settings, hosts)
        end = play(method, links[0], steps, [1.0] * 4, links=links)[0].steps[-1]
        assert end == pytest.approx(steps + rounds * 3.2, rel=0.01)
