"""An engine as a site of a federation: with the right answers of the fixed world, and through deaths and returns."""

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_sdiloco import Federation, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.comm import GroupLayout, Topology
from lightning_sdiloco.compression import FP4, RandomK
from lightning_sdiloco.engine.site.pace import SitePace
from tests.engine.sites import Site, VirtualHub, agree, equal, founded, here, train
from tests.ranks import run_ranks
from tests.training import inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2}


def in_the_fixed_world(groups: int, steps: int, **choices: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outer parameters, and the local ones of the first group."""
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    engine = SimulatedGroups(
        models, [[own] for own in optimizers], layers_per_fragment=1, exchange="gather", **CHOICES, **choices
    )
    for step in range(1, steps + 1):
        for group, model in enumerate(models):
            train_step(model, optimizers[group], group, step)
        engine.step()
    outer = [own.outer.values for own in engine.engines[0]._rounds.fragments]
    return outer, list(models[0].parameters())


@pytest.mark.parametrize("compression", ["fp4", "sparse", RandomK(4, FP4())])
def test_where_nobody_is_late_the_bits_are_those_of_the_fixed_world(compression: Any) -> None:
    sites = founded(3, compression=compression, **CHOICES)
    train(sites, 45)
    outer, local = in_the_fixed_world(3, 45, compression=compression)
    assert equal(sites[0].outer(), outer)
    assert agree(sites)
    assert equal(list(sites[0].model.parameters()), local)


def test_a_site_that_is_absent_leaves_the_bits_of_one_group_less() -> None:
    sites = founded(3, **CHOICES)
    sites.pop().die()
    train(sites, 45)
    assert equal(sites[0].outer(), in_the_fixed_world(2, 45)[0])
    assert agree(sites)


def test_what_is_carried_over_two_rounds_is_that_of_one_long_round() -> None:
    choices = {**CHOICES, "overlap_steps": 0, "compression": "fp32", "outer_momentum": 0.0}
    late, other = founded(2, **choices)
    # The other one does not move, and neither do the outer parameters while it counts alone.
    other.optimizer.param_groups[0]["lr"] = 0.0
    late.cut_off()
    train([late, other], 24)
    assert set(map(tuple, other.hub.counted())) == {("s1",)}
    late.mended()
    train([late, other], 8)
    own, *_ = [own for r in other.hub.records() if r.fragment == 0 for own in r.counted if own.site == "s0"]
    alone = founded(1, **{**choices, "sync_every": own.weight})[0]
    train([alone], 2 * own.weight)
    first = next(r for r in alone.hub.records() if r.fragment == 0).counted[0]
    assert own.weight > 16
    assert (own.weight, own.payloads) == (first.weight, first.payloads)


def test_a_site_that_dies_in_flight_leaves_the_others_in_agreement_and_its_last_launch_counts() -> None:
    sites = founded(3, **CHOICES)
    train(sites, 9)
    assert sites[2].engine.in_flight
    sites.pop().die()
    train(sites, 40)
    assert agree(sites)
    assert sites[0].hub.counted()[:2] == [["s0", "s1", "s2"], ["s0", "s1"]]


def test_who_joins_from_nothing_has_the_state_of_a_donor_and_counts_in_the_next_round() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 20)
    joined = Site(sites[0].hub, 2, seed=7, **CHOICES)
    assert not equal(joined.outer(), sites[0].outer())
    sites.append(joined)
    train(sites, 2)
    assert agree(sites)
    train(sites, 20)
    assert agree(sites)
    assert sites[0].hub.counted()[-1] == ["s0", "s1", "s2"]


def saved(site: Site) -> dict[str, Any]:
    return copy.deepcopy({"engine": site.engine.state_dict(), "optimizer": site.optimizer.state_dict()})


def started_again(site: Site, state: dict[str, Any], step: int) -> Site:
    """Another life of a site, from its checkpoint."""
    again = Site(site.hub, site.index, seed=5, **CHOICES)
    again.engine.load_state_dict(state["engine"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.step = step
    return again


@pytest.mark.parametrize("step", [9, 12])
def test_a_site_that_resumes_is_bitwise_that_which_never_stopped(step: int) -> None:
    runs = [founded(2, **CHOICES) for _ in range(2)]
    for sites in runs:
        train(sites, step)
    stopped = runs[1]
    state = saved(stopped[0])
    stopped[0].die()
    stopped[0] = started_again(stopped[0], state, step)
    for sites in runs:
        train(sites, 30)
    assert equal(runs[0][0].held(), runs[1][0].held())
    assert equal(runs[0][1].held(), runs[1][1].held())


def test_a_site_that_returns_with_an_old_checkpoint_replays_what_it_missed() -> None:
    sites = founded(3, **CHOICES)
    train(sites, 9)
    state = saved(sites[2])
    train(sites, 6)
    gone = sites.pop()
    gone.die()
    train(sites, 30)
    sites.append(started_again(gone, state, 9))
    train(sites, 2)
    assert sites[2].lag == 0
    assert agree(sites)
    train(sites, 10)
    assert agree(sites)
    assert sites[0].hub.counted()[-1] == ["s0", "s1", "s2"]


def test_the_hub_dies_and_comes_back_and_nothing_is_lost() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 17)
    sites[0].hub.restart()
    train(sites, 8)
    for site in sites:
        site.mended()
    train(sites, 16)
    assert agree(sites)
    own = sites[0].pace.follower.fragments[0]
    recorded = [one for r in sites[0].hub.records() if r.fragment == 0 for one in r.counted if one.site == "s0"]
    flying = own.flight.own.weight if own.flight and own.flight.own not in recorded else 0
    assert sum(one.weight for one in recorded) + own.samples + flying == 41


def test_a_site_that_ends_has_all_counted_and_the_others_go_on() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 21)
    ends, stays = sites
    landed = False
    for _ in ends.pace.land_all(21):
        landed = True
    assert landed
    assert ends.pace.follower.finished
    assert not any(own.steps for own in ends.pace.follower.fragments)
    train([stays], 30)
    assert stays.hub.counted()[-1] == ["s1"]


def _trains_beside_another(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
    """Trains a site of several ranks, and on rank 0 another one; returns the outer parameters by their records."""
    topology = Topology.of_world(GroupLayout(world, 1), timedelta(seconds=30))
    hub, model = VirtualHub(2), mlp()
    optimizer = inner_optimizer("adamw", model)
    federation = here(hub.connect("s0"))
    engine = StreamingDiLoCo(
        model, topology=topology, inner_optimizers=[optimizer], layers_per_fragment=1, federation=federation, **CHOICES
    )
    other = Site(hub, 1, **CHOICES) if rank == 0 else None
    for step in range(1, 25):
        hub.passes(0.1)
        train_step(model, optimizer, 0, step)
        engine.launch_due()
        if other:
            other.train()
        engine.land_due()
        if other:
            other.engine.land_due()
    engine.close()
    assert isinstance(engine._pace, SitePace)
    return [by_record(engine._pace, engine), *([by_record(other.pace, other.engine)] if other else [])]


def by_record(pace: SitePace, engine: StreamingDiLoCo) -> dict[str, torch.Tensor]:
    followed = zip(pace.follower.fragments, engine._rounds.fragments, strict=True)
    return {f"{own.fragment} {own.applied}": fragment.outer.values for own, fragment in followed if own.applied.round}


def test_a_site_of_two_ranks_and_one_of_one_hold_the_same_outer_parameters() -> None:
    (first, other), (second,) = run_ranks(_trains_beside_another, 2)
    in_common = first.keys() & other.keys()
    assert len(in_common) >= 2
    for key in in_common:
        whole = torch.cat([first[key], second[key]])
        assert torch.equal(whole[: len(other[key])], other[key])
    assert all(" Position(round=" in key for key in in_common)


def test_a_site_with_other_settings_is_refused_and_told_which() -> None:
    sites = founded(1, **CHOICES)
    with pytest.raises(ValueError, match=r"settings\.compression is 'fp32' here and 'fp4' there"):
        Site(sites[0].hub, 1, compression="fp32", **CHOICES)


@pytest.mark.parametrize(
    ("choice", "told"), [({"exchange": "two_shot"}, "two_shot"), ({"outlier_guard": 3.0}, "guard")]
)
def test_what_a_federation_cannot_do_is_refused_by_name(choice: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        founded(1, **CHOICES, **choice)


def test_a_federation_refuses_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"lease=0 is out of range: it must be above 0"):
        Federation("hub:1", "run", "a", lease=0)
