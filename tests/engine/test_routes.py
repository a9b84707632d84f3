"""Routes on which groups hold outer parameters of their own: against plain loops and closed forms, and in processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
    WorkerGroups,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import Int8, RandomK
from lightning_sdiloco.engine.checkpoint import Restart, restart_from
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups as Hosts
from lightning_sdiloco.planning.workload import Model
from tests.engine.groups import Rank, outer_state
from tests.methods import ByNorm
from tests.ranks import run_ranks

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


def begin(models: Sequence[Vector], seed: int) -> Tensor:
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


def test_pure_mixing_keeps_the_mean() -> None:
    for route in (RandomPairs(), FastestPairs(), Ring()):
        choices = PURE if not isinstance(route, Ring) else {"mixing": 0.0}
        for compression in ("fp32", "bf16", "int8", RandomK(4, Int8())):
            models, groups = vectors(5, 256, route=route, **{**choices, "compression": compression})
            start = begin(models, 1)
            for _ in range(40):
                groups.step(idle=range(5))
                assert torch.allclose(stacked(models).mean(0), start.mean(0), atol=1e-6), (route, compression)
            assert stacked(models).var(0).mean() < 0.5 * start.var(0).mean()


def test_the_rounds_of_a_route_are_counted_from_the_end_of_the_warm_up_and_partners_alone_are_sent_to() -> None:
    models, groups = vectors(6, route=Neighbours(), warmup_steps=1, **{**PURE, "sync_every": 1})
    groups.average_gradients()
    groups.step()
    start, product = begin(models, 2).numpy(), np.eye(6)
    for number in range(9):
        groups.step()
        for leg in Neighbours().legs(number, 6):
            product[list(leg)] = product[list(leg)].mean(0)
        assert torch.allclose(stacked(models), torch.from_numpy(product @ start), atol=1e-5)
    choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 0, "mixing": 0.0, "compression": "fp32", **OUTER}
    choices["route"] = FastestPairs(speeds=SPEEDS[:6])
    _, groups = vectors(6, **choices)
    for _ in range(12):
        groups.step()
    method = Streaming(Model.of_size(64, layers=1), Settings(**choices), Hosts(groups=6, step_time=1.0))
    assert method.bytes_per_step * 12 == groups.engines[0].report()["bytes_sent"]


def test_a_file_of_processes_holds_the_mean_of_their_groups(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> bool:
        here = Rank(rank, WorkerGroups(4), "sgd", **CHOICES, route=RandomPairs(), **OUTER)
        for step in range(1, 10):
            here.step(step)
        here.engine.save(str(tmp_path / "state.pt"))
        saved = torch.load(tmp_path / "state.pt", weights_only=True)["state_dict"]
        here.engine.finish()
        return all(torch.allclose(saved[name], values, atol=1e-6) for name, values in here.model.named_parameters())

    assert run_ranks(run, 4) == [True] * 4


def test_digests_are_checked_between_partners() -> None:
    _, groups = vectors(4, overlap_steps=0, route=RandomPairs(), **OUTER)
    state = groups.engines[1].state_dict()
    state["fragments"][0] = {**state["fragments"][0], "anchor": torch.ones(64)}
    groups.engines[1].load_state_dict(state)
    for _ in range(3):
        groups.step()
    with pytest.raises(AgreementError, match="did not begin from the same outer parameters"):
        groups.step()


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


def test_four_groups_get_the_fastest_pairs_that_any_could_make() -> None:
    """By trying them all; what is slowest counts first."""
    for seed in range(6):
        drawn = np.random.default_rng(seed).permutation(16).reshape(4, 4) + 1.0
        speeds = tuple(tuple(float(value) for value in row) for row in np.minimum(drawn, drawn.T))
        ways = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)), FastestPairs(speeds=speeds).legs(0, 4)]
        *possible, chosen = (sorted(speeds[one][other] for one, other in pairs) for pairs in ways)
        assert chosen == max(possible)


class Halves(Route):
    def legs(self, number: int, groups: int) -> Sequence[tuple[int, ...]]:
        return ((0,),)


def test_what_does_not_go_together_is_refused() -> None:
    for choices, told in (
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
    ):
        with pytest.raises(ValueError, match=told):
            vectors(5, **{"route": RandomPairs(), **choices})
    for wrong in ({"window": 1}, {"speeds": (1.0, 0.0)}, {"speeds": ((1.0, 2.0), (1.0,))}):
        with pytest.raises(ValueError, match="window|speeds"):
            FastestPairs(**wrong)  # type: ignore[arg-type]


def test_others_refuse_a_route_by_name() -> None:
    federation = Federation(hub="localhost:1", run="r", site="a", insecure=True)
    with pytest.raises(ValueError, match=r"route=.* does not go with a federation"):
        StreamingDiLoCo(nn.Linear(2, 2), federation=federation, route=RandomPairs(), compression="fp32")
    with pytest.raises(ValueError, match=r"route=.* does not go with sync_every='auto'"):
        StreamingDiLoCoStrategy(route=RandomPairs(), sync_every="auto", compression="fp32")
    with pytest.raises(ValueError, match="fewer than 4"):
        vectors(3, route=Ring())


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 16])
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
        groups = Hosts(groups=4, step_time=1.0, memory_rate=1e15)
        method = Streaming(Model.of_size(numel, layers=1), settings, groups)
        return play(method, links[0], steps, [1.0] * 4, links=links)[0].steps[-1]

    assert ends(FastestPairs(speeds=(10, 10, 1, 1)), 10) == pytest.approx(10 + bits / 1e9, rel=0.01)
    # The slow ones launch later then, and a landing needs the word of all.
    assert ends(FastestPairs(speeds=(10, 10, 1, 1)), 20) == pytest.approx(20 + 2 * bits / 1e8, rel=0.01)
    assert ends(None, 20) == pytest.approx(20 + 2 * 1.5 * bits / 1e8, rel=0.01)
