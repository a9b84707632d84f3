"""A site that was killed, while what it had contributed stands in a round that is open: what its next life trains."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.ranked_sites import Rank, joined, topologies
from tests.engine.sites import STEP, Site, VirtualHub, agree, equal, founded, train
from tests.training import inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "fragments": [["*"]], "grace": 1000.0}


def saved(site: Site) -> dict[str, Any]:
    return copy.deepcopy(
        {"engine": site.engine.state_dict(), "optimizer": site.optimizer.state_dict(), "step": site.step}
    )


def started_again(site: Site, state: dict[str, Any] | None, **choices: Any) -> Site:
    """Another life of a site, from a checkpoint or from nothing, which has joined."""
    # Who comes with nothing has the parameters of the founding, and waits for no donor.
    again = Site(site.hub, site.index, seed=0 if state is None else 5, **{**CHOICES, **choices})
    if state is not None:
        again.engine.load_state_dict(state["engine"])
        again.optimizer.load_state_dict(state["optimizer"])
        again.step = state["step"]
    again.engine.join()
    return again


def alone(site: Site, steps: int, *others: Site) -> None:
    """Only this site trains. The others give signs of life, and are waited for."""
    for _ in range(steps):
        site.hub.passes(STEP)
        for other in others:
            other.connection.beat(other.world.follower)
        site.train()
        site.engine.land_due()


def local(site: Site) -> torch.Tensor:
    return torch.cat([own.detach().flatten() for own in site.model.parameters()])


def outer(site: Site) -> torch.Tensor:
    return site.outer()[0][: len(local(site))].clone()


def counted(site: Site) -> list[tuple[int, int]]:
    """The rounds in which a site counts, with its weight; it trains a sample a step."""
    return [(r.round, own.weight) for r in site.hub.records() if (own := r.of(f"s{site.index}"))]


def held(site: Site) -> int:
    """The samples that are held or in flight and will count."""
    (own,) = site.world.follower.fragments
    flying = own.flight.own.weight if own.flight and own.flight.own.round > own.closed else 0
    return own.samples + flying


def with_a_round_open(**choices: Any) -> tuple[Site, Site, dict[str, Any]]:
    """Two sites, of which the first has contributed to round 1 after 8 steps, and its checkpoint of step 6."""
    first, second = founded(2, **{**CHOICES, **choices})
    train([first, second], 6)
    state = saved(first)
    alone(first, 3, second)
    assert first.engine.in_flight
    assert first.hub.records() == []
    return first, second, state


@pytest.mark.parametrize("late", ["carry", "drop"])
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_what_a_new_life_trains_while_the_round_is_open_counts_with_its_next_launch(
    has_checkpoint: bool, late: str
) -> None:
    first, second, state = with_a_round_open(late=late)
    first.die()
    again = started_again(first, state if has_checkpoint else None, late=late)
    assert torch.equal(local(again), outer(again)), "what its earlier life has trained is in the round"
    assert held(again) == 0
    alone(again, 10, second)
    assert first.hub.records() == []
    assert held(again) == 10
    before, was = local(again), outer(again)
    for _ in range(3):
        # The other one answers, and the round closes.
        train([second], 1)
    again.world.hear()
    again.engine.land_due()
    assert counted(again) == [(1, 8)]
    assert again.world.follower.fragments[0].applied.round == 1
    assert torch.allclose(local(again), before + outer(again) - was, atol=1e-6)
    assert held(again) == 10
    train([again, second], 20)
    assert agree([again, second])
    assert sum(weight for _, weight in counted(again)) + held(again) == 8 + 10 + 20


def test_a_flight_that_the_checkpoint_holds_goes_on() -> None:
    first, second, _ = with_a_round_open()
    state, values = saved(first), local(first)
    alone(first, 2, second)
    first.die()
    again = started_again(first, state)
    assert again.engine.in_flight
    assert torch.equal(local(again), values)
    alone(again, 2, second)
    train([again, second], 6)
    assert agree([again, second])
    assert sum(weight for _, weight in counted(again)) + held(again) == 9 + 2 + 6


@pytest.mark.parametrize("hub_dies", [False, True])
def test_who_is_killed_again_while_the_round_is_open_keeps_what_its_checkpoint_holds(hub_dies: bool) -> None:
    first, second, state = with_a_round_open()
    first.die()
    again = started_again(first, state)
    alone(again, 4, second)
    state, values = saved(again), local(again)
    alone(again, 3, second)
    again.die()
    if hub_dies:
        first.hub.restart()
        second.mended()
    third = started_again(first, state)
    assert torch.equal(local(third), values)
    assert held(third) == 4
    alone(third, 5, second)
    train([third, second], 20)
    assert agree([third, second])
    assert counted(third)[0] == (1, 8)
    assert sum(weight for _, weight in counted(third)) + held(third) == 8 + 4 + 5 + 20


def test_a_checkpoint_of_before_that_round_closes_does_not_count_what_came_after_it_twice() -> None:
    first, second, state = with_a_round_open()
    first.die()
    again = started_again(first, state)
    alone(again, 4, second)
    state = saved(again)
    train([again, second], 6)
    assert [round for round, _ in counted(again)] == [1, 2]
    again.die()
    alone(second, 1)
    third = started_again(first, state)
    # The first life counts in round 1, and the second one, with all that its checkpoint holds, in round 2.
    assert held(third) == 0
    assert torch.equal(local(third), outer(third))
    train([third, second], 20)
    assert agree([third, second])
    own = dict(counted(third))
    assert own[1] == 8
    assert sum(own.values()) + held(third) == 8 + own[2] + 20


def test_where_the_round_closes_without_it_nothing_counts_twice_and_what_was_trained_since_is_kept() -> None:
    first, second, state = with_a_round_open()
    first.die()
    again = started_again(first, state)
    alone(again, 4, second)
    state = saved(again)
    again.die()
    first.hub.coordinator.evict("s0")
    third = started_again(first, state)
    assert held(third) == 4
    train([third, second], 20)
    assert agree([third, second])
    assert sum(weight for _, weight in counted(third)) + held(third) == 4 + 20


def test_a_flight_lands_before_the_first_step_where_a_later_round_counts_an_earlier_life() -> None:
    first, second, _ = with_a_round_open()
    state = saved(first)
    train([first, second], 9)
    assert [round for round, _ in counted(first)] == [1, 2]
    first.die()
    again = started_again(first, state)
    assert again.lag == 0
    assert torch.equal(local(again), outer(again))
    train([again, second], 20)
    own = dict(counted(again))
    assert sum(own.values()) + held(again) == own[1] + own[2] + 20


def test_nothing_is_asked_of_a_site_that_only_lost_its_connection() -> None:
    first, second, _ = with_a_round_open()
    values = local(first)
    first.cut_off()
    first.mended()
    first.world.hear()
    assert first.engine.in_flight
    assert torch.equal(local(first), values)
    train([first, second], 10)
    assert equal(first.outer(), second.outer())
    assert sum(weight for _, weight in counted(first)) + held(first) == 9 + 10


def on_both(act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(act, range(2)))


def two_ranks(hub: VirtualHub, models: list[nn.Sequential]) -> list[Rank]:
    places = topologies(2)
    return on_both(lambda rank: joined(hub, "s0", models[rank], places[rank], **CHOICES))


def hears(site: list[Rank]) -> None:
    on_both(lambda rank: site[rank].world.hear())


def train_ranks(site: list[Rank], models: list[nn.Sequential], steps: range, other: Site) -> None:
    optimizers = [inner_optimizer("sgd", model) for model in models]

    def step_of(rank: int, step: int) -> None:
        train_step(models[rank], optimizers[rank], 0, step)
        site[rank].engine.launch_due(samples=1)
        site[rank].engine.land_due()

    for step in steps:
        other.hub.passes(STEP)
        other.connection.beat(other.world.follower)
        on_both(lambda rank, step=step: step_of(rank, step))  # type: ignore[misc]


def test_all_ranks_of_a_site_begin_again_train() -> None:
    hub = VirtualHub(2)
    models: list[nn.Sequential] = [mlp(), mlp()]
    site, other = two_ranks(hub, models), Site(hub, 1, **CHOICES)
    for _ in range(3):
        hears(site)
        other.world.hear()
    train_ranks(site, models, range(1, 7), other)
    states = copy.deepcopy(on_both(lambda rank: site[rank].engine.state_dict()))
    train_ranks(site, models, range(7, 10), other)
    assert len(hub.coordinator.ledger.calls()) == 1
    site[0].connection.lose("killed")
    models = [mlp(5), mlp(5)]
    again = two_ranks(hub, models)

    def resume(rank: int) -> None:
        again[rank].engine.load_state_dict(states[rank])
        again[rank].engine.join()

    on_both(resume)
    began = mlp()
    for own in models:
        assert equal(list(own.parameters()), list(began.parameters()))
    train_ranks(again, models, range(7, 12), other)
    assert [rank.world.follower.fragments[0].samples for rank in again] == [10, 10]
    for _ in range(3):
        train([other], 1)
    for _ in range(3):
        # A record is heard when all ranks have what it names.
        hears(again)
    on_both(lambda rank: list(again[rank].engine.land_due()))
    (first,) = hub.records()
    assert [own.launch for own in first.counted] == [(1, site[0].world.follower.life)]
    for rank in again:
        assert rank.world.follower.fragments[0].applied.round == 1
        assert rank.world.follower.fragments[0].samples == 10
    assert equal(list(models[0].parameters()), list(models[1].parameters()))
