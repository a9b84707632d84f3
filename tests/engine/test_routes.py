"""Routes on which groups hold outer parameters of their own: against plain loops and closed forms, and in processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import (
    AgreementError,
    FastestPairs,
    Federation,
    OuterOptimizer,
    RandomPairs,
    Ring,
    Route,
    Selective,
    SimulatedGroups,
    StreamingDiLoCo,
    StreamingDiLoCoStrategy,
)
from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm.exchange import InProcessExchange
from lightning_sdiloco.compression import Int8, RandomK
from lightning_sdiloco.engine import Restart, restart_from
from lightning_sdiloco.planning import Groups, Link, Model, Streaming, play
from tests.methods import ByNorm
from tests.ranks import run_ranks
from tests.training import inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 1,
    "mixing": 0.25,
    "fragments": [["0.*", "2.*"], ["4.*", "6.*"]],
    "compression": "fp32",
}
OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}
PURE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0, "overlap_steps": 0}
SPEEDS = (5.0, 1.0, 3.0, 3.0, 1.0, 2.0, 5.0)


class Vector(nn.Module):
    """A model that is one vector, drawn to a target of its group."""

    def __init__(self, numel: int = 64) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))

    @torch.no_grad()
    def train_to(self, target: Tensor) -> None:
        self.values += 0.1 * (target - self.values)


def vectors(groups: int, numel: int = 64, **choices: Any) -> tuple[list[Vector], SimulatedGroups]:
    models = [Vector(numel) for _ in range(groups)]
    return models, SimulatedGroups(models, **{"sync_every": 4, "overlap_steps": 0, "compression": "fp32", **choices})


def stacked(models: Sequence[Vector]) -> Tensor:
    return torch.stack([model.values.detach().double() for model in models])


def own_outer(groups: SimulatedGroups) -> Tensor:
    states = [engine.state_dict()["fragments"] for engine in groups.engines]
    return torch.stack([torch.cat([fragment["outer"] for fragment in state]).double() for state in states])


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


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize(
    "route", [RandomPairs(seed=3), FastestPairs(speeds=SPEEDS), Ring(), Neighbours()], ids=lambda r: type(r).__name__
)
def test_routes_follow_plain_loops(route: Route, overlap: int) -> None:
    m, h, mixing, lr, mu = 7, 4, 0.25, 0.7, 0.5
    accelerated = isinstance(route, Ring)
    outer_step = {} if accelerated else {"outer_optimizer": partial(torch.optim.SGD, lr=lr, momentum=mu)}
    models, groups = vectors(m, overlap_steps=overlap, mixing=mixing, route=route, sync_every=h, **outer_step)
    targets = torch.randn(m, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local, outer, twin = (torch.zeros(m, 64, dtype=torch.float64) for _ in range(3))
    velocity, rate, pull = torch.zeros_like(local), *ring_numbers(m)
    sent = local
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
                s = np.exp(-2 * rate)
                values, second = (
                    (1 + s) / 2 * values + (1 - s) / 2 * second,
                    (1 - s) / 2 * values + (1 + s) / 2 * second,
                )
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


def test_the_mean_follows_heavy_ball_diloco() -> None:
    """NoLoCo: the mean over the groups moves as it does where all exchange with all."""
    m, lr, mu = 6, 0.7, 0.5
    heavy_ball = partial(torch.optim.SGD, lr=lr, momentum=mu)
    choices = {"outer_optimizer": heavy_ball, "mixing": 0.0, "overlap_steps": 0}
    models, groups = vectors(m, route=RandomPairs(), **choices)
    everyone, together = vectors(m, **choices)
    targets = torch.randn(m, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(60):
        for members in (models, everyone):
            for model, target in zip(members, targets, strict=True):
                model.train_to(target)
        groups.step()
        together.step()
        # Training is linear here, so that also the inner steps keep the mean.
        assert torch.allclose(own_outer(groups).mean(0), own_outer(together)[0], atol=1e-6)
    assert own_outer(groups).std(0).mean() > 1e-2, "groups hold outer parameters of their own"


@pytest.mark.parametrize("compression", ["fp32", "bf16", "int8", RandomK(4, Int8())], ids=str)
@pytest.mark.parametrize("route", [RandomPairs(), FastestPairs(), Ring()], ids=lambda route: type(route).__name__)
def test_pure_mixing_keeps_the_mean(route: Route, compression: Any) -> None:
    choices = PURE if not isinstance(route, Ring) else {"mixing": 0.0, "overlap_steps": 0}
    models, groups = vectors(5, 256, route=route, **{**choices, "compression": compression})
    start = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    for model, values in zip(models, start, strict=True):
        model.values.data.copy_(values)
    for _ in range(40):
        groups.step(idle=range(5))
        assert torch.allclose(stacked(models).mean(0), start.double().mean(0), atol=1e-6)
    assert stacked(models).var(0).mean() < 0.5 * start.var(0).mean()


@pytest.mark.parametrize("m", [4, 8, 16])
def test_random_pairs_spread_by_the_closed_form(m: int) -> None:
    choices = {**PURE, "sync_every": 1}
    models, groups = vectors(m, 4000, route=RandomPairs(), **choices)
    for model, values in zip(models, torch.randn(m, 4000, generator=torch.Generator().manual_seed(m)), strict=True):
        model.values.data.copy_(values)
    before = stacked(models).var(0).mean()
    groups.step()
    assert stacked(models).var(0).mean() / before == pytest.approx((m - 2) / (2 * (m - 1)), rel=0.05)


@pytest.mark.parametrize(("m", "factor"), [(8, 0.6439), (16, 0.8380), (32, 0.9239)])
def test_a_ring_with_momentum_spreads_faster(m: int, factor: float) -> None:
    """By the eigenvalues of two rounds: without a momentum it is cos(2 pi / m)."""
    rate, pull = ring_numbers(m)
    own = Ring().momentum(m)
    assert own is not None
    assert (own.rate, own.pull) == pytest.approx((rate, pull))
    s, eye = np.exp(-2 * rate), np.eye(m)
    mix = np.block([[(1 + s) / 2 * eye, (1 - s) / 2 * eye], [(1 - s) / 2 * eye, (1 + s) / 2 * eye]])
    plain, both = eye, np.eye(2 * m)
    for number in (0, 1):
        mean = np.zeros((m, m))
        for leg in Ring().legs(number, m):
            mean[np.ix_(leg, leg)] = 1 / len(leg)
        plain = mean @ plain
        both = np.block([[mean, 0 * eye], [2 * pull * (mean - eye), eye]]) @ mix @ both
    slowest = [np.sort(np.abs(np.linalg.eigvals(a - np.ones(a.shape) / len(a))))[-1] ** 0.5 for a in (plain, both)]
    assert slowest == pytest.approx([cos(2 * pi / m), factor], abs=1e-3)
    if m == 16:
        models, groups = vectors(m, 8, route=Ring(), sync_every=1, mixing=0.0, overlap_steps=0)
        start = torch.randn(m, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for model, values in zip(models, start, strict=True):
            model.values.data.copy_(values)
        for _ in range(20):
            groups.step()
        expected = (np.linalg.matrix_power(both, 10) @ np.vstack([start, start]))[:m]
        assert torch.allclose(stacked(models), torch.from_numpy(expected), atol=1e-5)


def test_groups_exchange_with_partners_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, ...]] = []
    post = InProcessExchange.post

    def noted(self: InProcessExchange, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> Any:
        if messages[0].numel() != 16:
            sent.append(tuple(group for group, message in enumerate(messages) if message.numel()))
        return post(self, messages, sizes)

    monkeypatch.setattr(InProcessExchange, "post", noted)
    route = FastestPairs(speeds=SPEEDS[:6])
    models, groups = vectors(6, overlap_steps=0, mixing=0.0, route=route, **OUTER)
    for _ in range(12):
        groups.step()
    legs = [next(leg for leg in route.legs(number, 6) if group in leg) for number in range(3) for group in range(6)]
    assert sent == legs
    settings = Settings(sync_every=4, overlap_steps=0, compression="fp32", route=route, **OUTER)
    method = Streaming(Model.of_size(64, layers=1), settings, Groups(groups=6, step_time=1.0))
    assert method.bytes_per_step * 12 == groups.engines[0].report()["bytes_sent"]


def test_digests_are_checked_between_partners() -> None:
    models, groups = vectors(4, overlap_steps=0, route=RandomPairs(), **OUTER)
    groups.engines[1].rounds.fragments[0].anchor = torch.ones(64)
    for _ in range(3):
        groups.step()
    with pytest.raises(AgreementError, match="did not begin from the same outer parameters"):
        groups.step()


@pytest.mark.parametrize("at", [2, 5, 9, 10])
@pytest.mark.parametrize("route", [RandomPairs(), Ring()], ids=["random", "ring"])
def test_a_run_resumes_bit_for_bit(route: Route, at: int) -> None:
    outer = {} if isinstance(route, Ring) else OUTER

    def run(stop: int | None) -> list[Tensor]:
        models = [mlp() for _ in range(4)]
        optimizers = [inner_optimizer("sgd", model) for model in models]
        groups = SimulatedGroups(models, **CHOICES, **outer, route=route)
        for step in range(1, 15):
            for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                train_step(model, optimizer, group, step)
            groups.step()
            if step == stop:
                states = [engine.state_dict() for engine in groups.engines]
                groups = SimulatedGroups(models, **CHOICES, **outer, route=route)
                for engine, state in zip(groups.engines, states, strict=True):
                    engine.load_state_dict(state)
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]

    assert all(map(torch.equal, run(None), run(at)))


def test_rounds_start_anew_from_the_mean() -> None:
    models = [Vector() for _ in range(4)]
    for model in models:
        model.register_buffer("seen", torch.zeros(2))
    groups = SimulatedGroups(models, **{**CHOICES, "fragments": [["*"]], "mixing": 0.0}, route=RandomPairs(), **OUTER)
    for _ in range(9):
        for group, model in enumerate(models):
            model.train_to(torch.full((64,), float(group)))
            model.seen += group
        groups.step()
    states = [engine.state_dict() for engine in groups.engines]
    restart: Restart = restart_from([[state] for state in states], Settings())
    assert torch.allclose(restart.parameters["values"].values.double(), own_outer(groups).mean(0))
    own = [state["fragments"][0] for state in states]
    for joined, parts in (
        (restart.parameters["values"].state["momentum_buffer"], [of["state"]["momentum_buffer"] for of in own]),
        (restart.buffers["seen"], [of["buffers"][0] for of in own]),
    ):
        assert torch.allclose(joined, torch.stack(parts).mean(0))
        assert not torch.allclose(joined, parts[0])


def test_a_group_without_finite_values_takes_those_of_its_partner() -> None:
    models, groups = vectors(4, route=RandomPairs(), **PURE)
    for group, model in enumerate(models):
        model.values.data.fill_(float(group) if group else float("nan"))
    for _ in range(4):
        groups.step()
    own = next(leg for leg in RandomPairs().legs(0, 4) if 0 in leg)
    partner = sum(own)
    assert stacked(models)[:, 0].tolist()[0] == stacked(models)[partner, 0] == partner


ROUTES = (RandomPairs(), Ring())


def in_process(rank: int, world_size: int, folder: str) -> list[Tensor]:
    held = []
    for route in ROUTES:
        model = mlp()
        engine = StreamingDiLoCo(
            model, worker_groups=4, **CHOICES, **({} if route == ROUTES[1] else OUTER), route=route
        )
        optimizer = inner_optimizer("sgd", model)
        for step in range(1, 14):
            train_step(model, optimizer, rank // (world_size // 4), step)
            engine.step()
        engine.save(str(Path(folder) / "state.pt"))
        saved = torch.load(Path(folder) / "state.pt", weights_only=True)["state_dict"]
        held += [parameter.detach().clone() for parameter in model.parameters()]
        engine.finish()
        held += [parameter.detach().clone() for parameter in model.parameters()]
        assert all(torch.allclose(saved[name], values, atol=1e-6) for name, values in model.named_parameters())
    return held


@pytest.mark.timeout(120)
def test_processes_do_what_the_simulation_does(tmp_path: Path) -> None:
    expected: list[list[Tensor]] = [[] for _ in range(4)]
    for route in ROUTES:
        models = [mlp() for _ in range(4)]
        optimizers = [inner_optimizer("sgd", model) for model in models]
        groups = SimulatedGroups(models, **CHOICES, **({} if route == ROUTES[1] else OUTER), route=route)
        for step in range(1, 14):
            for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                train_step(model, optimizer, group, step)
            groups.step()
        for of_group, model in zip(expected, models, strict=True):
            of_group += [parameter.detach().clone() for parameter in model.parameters()]
        groups.finish()
        for of_group, model in zip(expected, models, strict=True):
            of_group += [parameter.detach().clone() for parameter in model.parameters()]
    for held, of_group in zip(run_ranks(in_process, 4, str(tmp_path)), expected, strict=True):
        assert all(map(torch.equal, held, of_group))


@pytest.mark.parametrize("seed", range(6))
def test_four_groups_get_the_fastest_pairs_that_any_could_make(seed: int) -> None:
    """By trying them all; what is slowest counts first."""
    drawn = np.random.default_rng(seed).permutation(16).reshape(4, 4) + 1.0
    speeds = tuple(tuple(float(value) for value in row) for row in np.minimum(drawn, drawn.T))

    def from_the_slowest(pairs: Sequence[Sequence[int]]) -> list[float]:
        return sorted(speeds[one][other] for one, other in pairs)

    ways = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    assert from_the_slowest(FastestPairs(speeds=speeds).legs(0, 4)) == max(map(from_the_slowest, ways))


@pytest.mark.parametrize("warmup_steps", [0, 1])
@pytest.mark.parametrize("route", [FastestPairs(speeds=SPEEDS[:6]), Neighbours()], ids=["fastest", "own"])
def test_pairs_spread_as_the_product_of_their_means(route: Route, warmup_steps: int) -> None:
    """The rounds of a route are counted from the end of the warm-up."""
    models, groups = vectors(6, route=route, warmup_steps=warmup_steps, **{**PURE, "sync_every": 1})
    for _ in range(warmup_steps):
        groups.average_gradients()
        groups.step()
    start = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    for model, values in zip(models, start, strict=True):
        model.values.data.copy_(values)
    product = np.eye(6)
    for number in range(9):
        groups.step()
        for leg in route.legs(number, 6):
            product[list(leg)] = product[list(leg)].mean(0)
        assert torch.allclose(stacked(models), torch.from_numpy(product @ start.double().numpy()), atol=1e-5)
    assert np.abs(product - 1 / 6).max() < 0.2


class Halves(Route):
    def legs(self, number: int, groups: int) -> Sequence[tuple[int, ...]]:
        return ((0,),)


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"route": 3}, "route=3 is no Route"),
        ({"route": Halves()}, "frozen dataclass"),
        ({"exchange": "two_shot"}, "exchange='two_shot' does not go with route"),
        ({"schedule": Selective()}, "schedule=.* does not go with route"),
        ({"weighing": ByNorm()}, "weighing=.* does not go with route"),
        ({"outer_optimizer": OuterOptimizer(outlier_guard=5.0)}, "outlier_guard=5.0 does not go with route"),
        ({"outer_optimizer": OuterOptimizer(clip_norm=1.0)}, "clip_norm=1.0 does not go with route"),
        ({"compression": "fp4"}, "loses"),
        ({"compression": "sparse"}, "must send each other the same values"),
        ({"route": Ring(), "outer_lr": 0.4}, "momentum takes the place of an outer step"),
        ({"route": FastestPairs(speeds=(1, 2, 3))}, "speeds of 3 groups, and there are 5"),
    ],
)
def test_what_does_not_go_together_is_refused(choices: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        vectors(5, **{"route": RandomPairs(), **choices})


@pytest.mark.parametrize("choices", [{"window": 1}, {"speeds": (1.0, 0.0)}, {"speeds": ((1.0, 2.0), (1.0,))}])
def test_pairs_refuse_what_is_out_of_range(choices: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="window|speeds"):
        FastestPairs(**choices)


def test_others_refuse_a_route_by_name() -> None:
    federation = Federation(hub="localhost:1", run="r", site="a", insecure=True)
    with pytest.raises(ValueError, match=r"route=.* does not go with a federation"):
        StreamingDiLoCo(nn.Linear(2, 2), federation=federation, route=RandomPairs(), compression="fp32")
    with pytest.raises(ValueError, match=r"route=.* does not go with sync_every='auto'"):
        StreamingDiLoCoStrategy(route=RandomPairs(), sync_every="auto", compression="fp32")
    with pytest.raises(ValueError, match="fewer than 4"):
        vectors(3, route=Ring())


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 16, 33])
def test_the_pairs_of_a_window_connect_all(groups: int) -> None:
    speeds = tuple(float(1 + (7 * group) % 5) for group in range(groups))
    rows = tuple(tuple(float(1 + (3 * a * a + 3 * b * b + a * b) % 11) for b in range(groups)) for a in range(groups))
    for route in (FastestPairs(window=2), FastestPairs(speeds=speeds), FastestPairs(speeds=rows, window=4)):
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
    numel, bits = 10**7, 32 * 10**7

    def ends(route: Route | None, steps: int) -> float:
        settings = Settings(sync_every=10, overlap_steps=0, compression="fp32", route=route, mixing=0.0)
        groups = Groups(groups=4, step_time=1.0, memory_rate=1e15)
        method = Streaming(Model.of_size(numel, layers=1), settings, groups)
        return play(method, links[0], steps, [1.0] * 4, links=links)[0].steps[-1]

    assert ends(FastestPairs(speeds=(10, 10, 1, 1)), 10) == pytest.approx(10 + bits / 1e9, rel=0.01)
    # The slow ones launch later then, and a landing needs the word of all.
    assert ends(FastestPairs(speeds=(10, 10, 1, 1)), 20) == pytest.approx(20 + 2 * bits / 1e8, rel=0.01)
    assert ends(None, 20) == pytest.approx(20 + 2 * 1.5 * bits / 1e8, rel=0.01)
