"""An engine as a site of a federation: with the right answers of the fixed world, and through deaths and returns."""

import copy
import re
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import Federation, SimulatedGroups
from lightning_sdiloco.compression import FP4, ByLink, ErrorFeedback, Int2, RandomK, Threshold
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation import Charter, Record, Welcome
from lightning_sdiloco.hub import Called, Recorded, Told, Welcomed, add_keys, init_keys
from tests.engine.ranked_sites import Rank, whole
from tests.engine.ranked_sites import train as train_ranked
from tests.engine.sites import STEP, Site, VirtualHub, agree, equal, founded, train
from tests.large.models import FEATURES, TARGETS, wide
from tests.methods import DelayedNesterov
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
    outer = [own.outer.values for own in engine.engines[0].rounds.fragments]
    return outer, list(models[0].parameters())


KEPT = ErrorFeedback(Threshold(1 / 16, Int2(), every=3, over="senders"))


@pytest.mark.parametrize(
    "choices",
    [
        {"compression": "fp4", "outer_clip_norm": 0.05},
        {"compression": "sparse", "outer_optimizer": partial(DelayedNesterov, every=2)},
        {"compression": RandomK(4, FP4())},
        {"compression": KEPT},
    ],
    ids=["fp4_and_clip", "sparse_and_delayed_nesterov", "random_k", "kept"],
)
def test_where_nobody_is_late_the_bits_are_those_of_the_fixed_world(choices: dict[str, Any]) -> None:
    sites = founded(3, **choices, **CHOICES)
    train(sites, 45)
    outer, local = in_the_fixed_world(3, 45, **choices)
    assert equal(sites[0].outer(), outer)
    assert agree(sites)
    assert equal(list(sites[0].model.parameters()), local)


def test_a_site_weighs_by_what_it_trained() -> None:
    sites = founded(2, **CHOICES)
    for _ in range(12):
        sites[0].hub.passes(STEP)
        for site, trained in zip(sites, ({"trained": 3}, {"trained": 2, "samples": 16}), strict=True):
            site.engine.launch_due(**trained)
        for site in sites:
            site.engine.land_due()
    first = next(record for record in sites[0].hub.records() if record.fragment == 0)
    steps = CHOICES["sync_every"]
    assert [own.weight for own in first.counted] == [3 * steps, 16 * steps]


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


def test_a_site_that_drops_what_comes_too_late_mixes_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    late, other = founded(2, **CHOICES, mixing=0.25, compression="fp32", late="drop")
    train([late, other], 7)
    late.cut_off()
    train([late, other], 4)
    local = late.held()[len(late.outer())].flatten()
    late.mended()
    for _ in range(4):
        late.world.hear()
        late.engine.land_due()
    assert late.world.follower.fragments[0].applied.round == 1
    outer, now = late.outer()[0][: len(local)], late.held()[len(late.outer())].flatten()
    assert torch.allclose(now, 0.25 * local + 0.75 * outer, atol=1e-6)
    assert "counts nowhere" in caplog.text
    train([late, other], 30)
    assert agree([late, other])
    counted = [own.weight for r in other.hub.records() if r.fragment == 0 and (own := r.of("s0"))]
    held = late.world.follower.fragments[0]
    in_flight = held.flight.steps if held.flight and held.flight.own.round > held.closed else 0
    assert sum(counted) + held.steps + in_flight == late.step - CHOICES["sync_every"], "the first launch is lost"


def test_a_site_that_dies_in_flight_leaves_the_others_in_agreement_and_its_last_launch_counts() -> None:
    sites = founded(3, **CHOICES)
    train(sites, 9)
    assert sites[2].engine.in_flight
    sites.pop().die()
    train(sites, 40)
    assert agree(sites)
    assert sites[0].hub.counted()[:2] == [["s0", "s1", "s2"], ["s0", "s1"]]


def test_the_last_site_goes_on_alone_and_who_comes_back_counts_with_it() -> None:
    sites = founded(3, **CHOICES)
    train(sites, 12)
    state = saved(sites[1])
    for dies in sites[1:]:
        dies.die()
    train(sites[:1], 30)
    assert sites[0].hub.counted()[-3:] == [["s0"]] * 3
    sites = [sites[0], started_again(sites[1], state, 12)]
    train(sites, 20)
    assert agree(sites)
    assert sites[0].hub.counted()[-1] == ["s0", "s1"]


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


def test_a_site_that_resumes_is_bitwise_that_which_never_stopped() -> None:
    runs = whole_run, stopped = [founded(2, **CHOICES) for _ in range(2)]
    # In flight, and between two flights.
    for step in (9, 12):
        for sites in runs:
            train(sites, step - sites[1].step)
        state = saved(stopped[0])
        stopped[0].die()
        stopped[0] = started_again(stopped[0], state, step)
    for sites in runs:
        train(sites, 30)
    assert all(equal(one.held(), other.held()) for one, other in zip(whole_run, stopped, strict=True))


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


class Slow:
    """A connection over which payloads take so many waits."""

    def __init__(self, connection: Any, waits: int) -> None:
        self._connection, self._left, self._held = connection, waits, list[Told]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def wait(self, timeout: float) -> bool:
        self._left -= 1
        return bool(self._connection.wait(timeout))

    def events(self) -> list[Told]:
        told = self._connection.events()
        self._held += [event for event in told if isinstance(event, Recorded)]
        told = [event for event in told if not isinstance(event, Recorded)]
        if self._left <= 0:
            told, self._held = [*told, *self._held], []
        return told


def test_who_returns_with_a_flight_trains_once_what_closed_meanwhile_is_here() -> None:
    """Cut off before, it would train on alone, and drop all that where its earlier life counts."""
    choices = {**CHOICES, "fragments": [["*"]]}
    sites = founded(2, **choices)
    train(sites, 9)
    state = saved(sites[0])
    train(sites, 9)
    sites[0].die()
    train(sites[1:], 3)
    again = Site(sites[0].hub, 0, seed=5, connection=Slow(sites[0].hub.connect("s0"), waits=3), **choices)
    again.engine.load_state_dict(state["engine"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.step = 9
    assert again.engine.in_flight
    again.engine.join()
    again.cut_off()
    train([again], 3)
    assert all(own.applied.round == own.closed > 0 for own in again.world.follower.fragments)


def test_training_waits_for_the_grace_and_a_second_and_not_a_moment_longer() -> None:
    hub, choices = VirtualHub(1), {**CHOICES, "grace": 1.03}
    # It hears of no record, and so every launch is waited for.
    site = Site(hub, 0, connection=Slow(hub.connect("s0"), waits=10**6), **choices)
    site.world.hear()
    site.world.hear()
    waited = list[float]()
    for _ in range(2 * CHOICES["sync_every"]):
        began = hub.now
        train([site], 1)
        waited.append(hub.now - began - STEP)
    assert max(waited) == pytest.approx(1.03 + 1.0)


def test_a_site_that_is_told_to_end_has_all_counted_and_nothing_twice() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 21)
    state, stays = saved(sites[0]), sites[1]
    sites[0].engine.leave()
    assert [counted_of(sites[0], fragment) for fragment in range(4)] == [21] * 4
    train([stays], 10)
    again = started_again(sites[0], state, 21)
    train([again, stays], 30)
    assert agree([again, stays])
    for fragment, own in enumerate(again.world.follower.fragments):
        total = counted_of(again, fragment) + own.samples
        # Where the earlier life has counted, its steps and those until it has landed cannot be told apart.
        assert total <= 51
        assert total + (own.flight.own.weight if own.flight else 0) >= 51 - CHOICES["overlap_steps"]


def counted_of(site: Site, fragment: int) -> int:
    """How many samples of a site count in a fragment."""
    of_site = [own for r in site.hub.records() if r.fragment == fragment and (own := r.of(f"s{site.index}"))]
    return sum(own.weight for own in of_site)


class Noting:
    """A connection that notes what its site hears, call by call."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.heard: list[list[Told]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def events(self) -> list[Told]:
        self.heard.append(self._inner.events())
        return self.heard[-1]


class Playing:
    """A connection without a hub, from which another life of a site hears again what the first one heard."""

    sends_bytes_per_s = 0.0

    def __init__(self, noted: Noting, calls: int, welcome: Welcome | None) -> None:
        self.site, self.life = noted.site, noted.life
        before = [told for heard in noted.heard[:calls] for told in heard]
        # What the hub tells after a hello.
        first = [told for told in before if isinstance(told, (Recorded, Called))]
        self.told = [[*([Welcomed(welcome)] if welcome else ()), *first], *noted.heard[calls:]]
        self.is_listening = False

    def agree(self, charter: Charter) -> Charter:
        return charter

    def events(self) -> list[Told]:
        return self.told.pop(0) if self.is_listening else []

    def now(self) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def welcome_of(site: Site) -> Welcome | None:
    """What the hub would tell this site now, if it can."""
    own = site.world.follower.fragments
    closed = [one.records[one.closed].position if one.closed in one.records else one.applied for one in own]
    kept = tuple(one.kept for one in own)
    return Welcome(tuple(closed), kept) if site.world.follower.reachable else None


def test_a_site_is_a_function_of_its_checkpoint_and_of_what_it_heard_at_which_step() -> None:
    hub = VirtualHub(2)
    noted = Noting(hub.connect("s0"))
    sites = [Site(hub, 0, connection=noted, **CHOICES), Site(hub, 1, **CHOICES)]
    for _ in range(2):
        for site in sites:
            site.world.hear()
    states = {}
    for step in range(1, 56):
        # It misses more than a round, and carries what it trained meanwhile.
        if step in (20, 34):
            (sites[0].cut_off if step == 20 else sites[0].mended)()
        train(sites, 1)
        if step in (9, 17, 28, 33, 35, 42):
            states[step] = saved(sites[0]), welcome_of(sites[0]), len(noted.heard)
    counted = [record for record in hub.records() if record.of("s0")]
    assert len(counted) < len(hub.records())
    for step, (state, welcome, calls) in states.items():
        playing = Playing(noted, calls, welcome)
        again = Site(hub, 0, seed=5, connection=playing, **CHOICES)
        playing.is_listening = True
        again.engine.load_state_dict(state["engine"])
        again.optimizer.load_state_dict(state["optimizer"])
        again.step = step
        train([again], 55 - step)
        assert not playing.told
        assert equal(again.held(), sites[0].held())


def test_a_federation_whose_sites_were_all_killed_goes_on_from_their_checkpoints() -> None:
    sites = founded(3, **CHOICES)
    states = []
    for steps in (12, 13, 16):
        train(sites, steps)
        states.append(saved(sites[len(states)]))
    known = sites[0].hub.records()
    for site in sites:
        site.die()
    sites[0].hub.restart()
    again = [started_again(sites[0], states[0], 12), started_again(sites[1], states[1], 25)]
    # The third has lost its disk too.
    again.append(Site(sites[2].hub, 2, seed=7, **CHOICES))
    train(again, 30)
    assert agree(again)
    assert max(site.lag for site in again) <= 1
    records = sites[0].hub.records()
    assert records[: len(known)] == known
    assert sites[0].hub.counted()[-1] == ["s0", "s1", "s2"]


def test_a_federation_that_has_lost_all_its_checkpoints_goes_on_from_the_anchor() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 41)
    held = {
        own.applied: values for own, values in zip(sites[0].world.follower.fragments, sites[0].outer(), strict=True)
    }
    for site in sites:
        site.die()
    sites[0].hub.restart()
    again = [Site(sites[0].hub, index, seed=7 + index, **CHOICES) for index in range(2)]
    for _ in range(8):
        for site in again:
            site.hub.passes(1.0)
            site.engine.land_due()
            site.world.hear()
    # One fragment was in flight, and has landed here.
    found = dict(zip((own.applied for own in again[1].world.follower.fragments), again[1].outer(), strict=True))
    assert len(found.keys() & held.keys()) >= len(held) - 1
    assert all(torch.equal(found[at], held[at]) for at in found.keys() & held.keys())
    train(again, 30)
    assert agree(again)
    assert sites[0].hub.counted()[-1] == ["s0", "s1"]


def test_the_hub_dies_and_comes_back_and_nothing_is_lost() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 17)
    sites[0].hub.restart()
    train(sites, 8)
    for site in sites:
        site.mended()
    train(sites, 16)
    assert agree(sites)
    own = sites[0].world.follower.fragments[0]
    recorded = [one for r in sites[0].hub.records() if r.fragment == 0 for one in r.counted if one.site == "s0"]
    flying = own.flight.own.weight if own.flight and own.flight.own not in recorded else 0
    assert sum(one.weight for one in recorded) + own.samples + flying == 41


def test_a_site_says_what_it_waits_for_and_that_its_hub_has_gone_and_is_back(caplog: pytest.LogCaptureFixture) -> None:
    hub = VirtualHub(2)
    first = Site(hub, 0)
    for _ in range(3):
        first.world.hear()
    (waits,) = caplog.messages
    assert waits.startswith("Site s0 waits: ")
    caplog.clear()
    other = Site(hub, 1)
    for site in (first, other, first, other):
        site.world.hear()
    train([first, other], 5)
    caplog.clear()
    for _ in range(2):
        first.cut_off()
        train([first, other], 2)
    first.mended()
    train([first, other], 2)
    gone, back = caplog.messages
    assert "trains on without it" in gone
    assert back == "The hub is back: site s0 sends what it has trained."


def test_a_site_that_ends_has_all_counted_and_the_others_go_on() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 21)
    ends, stays = sites
    landed = False
    for _ in ends.world.land_all(21):
        landed = True
    assert landed
    assert ends.world.follower.finished
    assert not any(own.steps for own in ends.world.follower.fragments)
    train([stays], 30)
    assert stays.hub.counted()[-1] == ["s1"]


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 3))


def in_common(sites: list[list[Rank]]) -> list[dict[str, torch.Tensor]]:
    """The outer parameters of each site, of the fragments that all have at the same round."""
    held = list(map(whole, sites))
    return [{key: one[key] for key in one if all(key in other for other in held)} for one in held]


def test_how_many_ranks_a_site_has_changes_no_bit() -> None:
    # Each is weighed with four samples, of which ranks may have trained unequal numbers.
    alone = train_ranked((1, 1, 1), 26, normed, train_step, (4, 4, 4), compression="fp32", **CHOICES)
    heard, gathered = [], list[int]()

    def at(rank: Rank, step: int) -> None:
        if rank.site == "s0" and not rank.engine.topology.group_rank and step < 8:
            gathered.append(rank.engine.topology.in_site.gathered)  # type: ignore[attr-defined]
        if step == 5 and rank.engine.topology.group_rank == 3:
            rank.engine.request(2)
        if rank.engine.requested:
            heard.append((rank.site, step, rank.engine.requested))

    sites = train_ranked((4, 2, 1), 26, normed, train_step, ((2, 0, 1, 1), 2, 4), at, compression="fp32", **CHOICES)
    # What one rank asks, all of its site hear after the next step.
    assert heard == [("s0", 6, 2)] * 4
    # What ranks of a site say after an inner step without a launch goes in one collective.
    assert [after - before for before, after in zip(gathered, gathered[1:], strict=False)] == [1] * 6
    expected, *held = *in_common(alone)[:1], *in_common(sites)
    assert [key.split(",")[0] for key in expected] == [f"{p} Position(round={r}" for p, r in enumerate((3, 2, 2))]
    for own in held:
        assert [key.split(",")[0] for key in own] == [key.split(",")[0] for key in expected]
        assert equal(list(own.values()), list(expected.values()))
    buffers = [rank.engine.rounds.fragments[0].buffers.outer for site in (*alone, *sites) for rank in site]
    assert all(equal(own, buffers[0]) for own in buffers)


def test_buffers_of_a_site_that_are_not_finite_reach_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def poison(rank: Rank, step: int) -> None:
        if rank.site == "s1" and step == 7:
            rank.engine.model[1].running_var[3] = float("nan")

    sites = train_ranked(
        (1, 2, 1), 16, normed, train_step, (4, 2, 4), poison, compression="fp32", mixing=0.5, **CHOICES
    )
    for rank in (rank for site in sites for rank in site):
        assert all(bool(values.isfinite().all()) for values in rank.engine.rounds.fragments[0].buffers.outer)
        assert rank.engine.model[1].running_var.isfinite().all()
    assert "left out of the mean, and the outer ones take their place: '1.running_var' of site 's1'." in caplog.text


def test_what_becomes_trainable_is_an_error_at_the_next_launch_of_any_fragment() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 8)
    assert sites[0].engine.report()["launches"] == 1
    sites[0].model.append(nn.Linear(3, 3))
    train(sites, 1)
    with pytest.raises(AgreementError, match=r"2 parameters .* such as '7.weight'"):
        train(sites, 1)


@pytest.mark.parametrize(
    "choices",
    [
        {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2), "compression": "sparse"},
        {"compression": ErrorFeedback(Threshold(1 / 4, Int2(), every=2))},
        {"compression": "random_k+memory"},
        {"compression": ByLink(["fp4+memory", "sparse"], within=1000.0)},
    ],
    ids=["delayed_nesterov_and_sparse", "threshold", "random_k", "by_link"],
)
def test_sites_of_several_ranks_agree_with_every_code_and_a_delayed_momentum(choices: dict[str, Any]) -> None:
    sites = train_ranked((4, 2, 1), 26, normed, train_step, (4, 4, 4), **{**CHOICES, **choices})
    first, *others = in_common(sites)
    assert len(first) == 3
    for own in others:
        assert list(own) == list(first)
        assert equal(list(own.values()), list(first.values()))
    rounds = [key.split(",")[0] for key in first]
    assert rounds == [f"{p} Position(round={r}" for p, r in enumerate((3, 2, 2))]


def test_ranks_share_what_their_site_sends_and_fetches() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        generator = torch.Generator().manual_seed(1_000 * site + number)
        x, y = torch.randn(8, FEATURES, generator=generator), torch.randn(8, TARGETS, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    torch.manual_seed(0)
    made = wide()
    sites = train_ranked((4, 4, 1), 18, lambda: copy.deepcopy(made), step, (1, 1, 4), **CHOICES)
    held = in_common(sites)
    assert len(held[0]) == 4
    for own in held:
        assert equal(list(own.values()), list(held[0].values()))
    (alone,) = sites[2]
    for site in sites[:2]:
        for rank in site:
            assert rank.connection.sent == pytest.approx(alone.connection.sent / 4, rel=0.02)
            # Of the other site with four ranks each fetches a quarter; of that with one rank 0 fetches all.
            shares = 1 / 4 + (rank is site[0])
            received = rank.engine.report()["bytes_received"]
            assert received == pytest.approx(shares * alone.engine.report()["bytes_sent"], rel=0.02)
    for rank in (*sites[0], *sites[1], alone):
        report = rank.engine.report()
        # The rest is in flight.
        assert 0.5 * rank.connection.sent < report["bytes_sent"] < rank.connection.sent
        assert report["bytes_received"] == rank.connection.fetched_bytes


WIDE = 300 * 301 + 301 * 40
Kept = list[dict[str, Tensor | None]]


def kept(rank: Rank) -> Kept:
    """The outer optimizer state and error feedback of a rank, by fragment."""
    fragments = rank.engine.rounds.fragments
    return [{**own.outer.state, "memory": own.memory, "tuning": own.tuning} for own in fragments]


def ended(
    ranks: Sequence[int], steps: int, values: Sequence[Tensor], **choices: Any
) -> tuple[list[list[Rank]], list[tuple[Rank, Kept]]]:
    """Ends a run of 100,000 parameters after so many steps, and trains on until it is over.

    Args:
        ranks: The ranks of each site.
        steps: The steps.
        values: What every inner step of a site makes of its parameters.
        **choices: Of the engine.

    Returns:
        The ranks of each site, and of all of them what was `kept` before the end.
    """
    before = list[tuple[Rank, Kept]]()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        nn.utils.vector_to_parameters(values[site].clone(), model.parameters())

    def at(rank: Rank, number: int) -> None:
        if number == steps:
            assert not rank.engine.in_flight
            before.append((rank, copy.deepcopy(kept(rank))))
            if rank.site == "s0" and not rank.engine.topology.group_rank:
                rank.hub.coordinator.end()

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 40))
    longest = steps + 2 * CHOICES["sync_every"]
    sites = train_ranked(ranks, longest, lambda: copy.deepcopy(made), step, (1,) * len(ranks), at, **choices)
    assert all(rank.world.is_over for site in sites for rank in site)
    return sites, before


@pytest.mark.parametrize(
    ("compression", "steps", "ranks"),
    [
        ("fp4", 3, (4, 2, 1)),  # before anything was launched
        ("fp4", 15, (1, 1, 1)),
        ("fp4+memory", 15, (4, 2, 1)),
        ("sparse", 3, (1, 1, 1)),
        (KEPT, 15, (4, 2, 1)),
        (ByLink(["fp4", "sparse"], within=1000.0), 15, (4, 2, 1)),
    ],
    ids=["fp4", "fp4_later", "memory", "sparse", "kept", "by_link"],
)
def test_a_run_ends_with_what_all_its_sites_hold(compression: Any, steps: int, ranks: tuple[int, ...]) -> None:
    sites, before = ended(ranks, steps, [torch.full((WIDE,), 0.999)] * 3, compression=compression, **CHOICES)
    for site in sites:
        outer = torch.cat(list(whole(site).values()))
        assert torch.allclose(outer, torch.full((WIDE,), 0.999), rtol=2**-8, atol=0.0)
    for rank, held in before:
        # The end is no outer step, and leaves nothing out that could be made up for.
        torch.testing.assert_close(kept(rank), held, rtol=0, atol=0)


def test_a_run_ends_with_the_plain_mean_in_float32() -> None:
    draws = [torch.Generator().manual_seed(seed) for seed in range(3)]
    values = [torch.empty(WIDE).uniform_(0.5, 1.5, generator=draw) for draw in draws]
    sites, _ = ended((2, 1, 1), 3, values, outer_clip_norm=0.05, **CHOICES)
    mean = torch.stack(values).double().mean(dim=0).float()
    for site in sites:
        assert torch.allclose(torch.cat(list(whole(site).values())), mean, rtol=2**-8, atol=0.0)


def over(sites: Sequence[Site]) -> dict[int, list[Record]]:
    """Trains until the run is over, which is soon; returns its records, by fragment."""
    for _ in range(12):
        train([site for site in sites if not site.world.is_over], 1)
        if all(site.world.is_over for site in sites):
            break
    assert all(site.world.is_over for site in sites)
    assert equal(sites[0].outer(), sites[1].outer())
    records = {fragment: [r for r in sites[0].hub.records() if r.fragment == fragment] for fragment in range(4)}
    for of_fragment in records.values():
        assert [record.final for record in of_fragment] == [False] * (len(of_fragment) - 1) + [True]
        assert all(own.exact for own in of_fragment[-1].counted)
    return records


def test_a_run_that_ends_by_its_charter_sends_its_last_round_alone_in_float32() -> None:
    sites = founded(2, rounds=2, **CHOICES)
    train(sites, 15)
    for of_fragment in over(sites).values():
        assert [[own.exact for own in record.counted] for record in of_fragment] == [[False, False], [True, True]]


@pytest.mark.parametrize("hub_dies", [False, True])
def test_a_round_that_is_open_when_an_operator_ends_the_run_closes_as_any_other_and_the_last_follows(
    hub_dies: bool,
) -> None:
    sites = founded(2, **CHOICES)
    train(sites, 7)
    sites[0].train()
    hub = sites[0].hub
    hub.coordinator.end()
    assert list(hub.coordinator.ledger.open) == [0]
    if hub_dies:
        hub.restart()
        for site in reversed(sites):
            site.mended()
    sites[1].train()
    records = over(sites)
    assert [len(of_fragment) for of_fragment in records.values()] == [2, 1, 1, 1]
    assert [[own.exact for own in record.counted] for record in records[0]] == [[False, False], [True, True]]


def test_what_is_sent_in_float32_is_read_so_beside_what_is_not() -> None:
    still, other = founded(2, **CHOICES, outer_lr=1.0, outer_momentum=0.0)
    still.optimizer.param_groups[0]["lr"] = 0.0
    train([still, other], 7)
    held, send = list[Any](), still.connection.contribute
    still.connection.contribute = lambda *sent: held.append(sent)
    still.train()
    still.connection.contribute = send
    still.hub.coordinator.end()
    other.train()
    fragment = other.engine.rounds.fragments[0]
    mean = (fragment.outer.values + fragment.layout.read()) / 2
    for sent in held:
        send(*sent)
    (first,) = still.hub.records()
    assert [own.exact for own in first.counted] == [False, True]
    still.engine.land_due()
    other.engine.land_due()
    train([still, other], CHOICES["overlap_steps"])
    assert [site.world.follower.fragments[0].applied.round for site in (still, other)] == [1, 1]
    assert torch.allclose(other.outer()[0], mean, rtol=1e-6, atol=1e-7)
    assert [len(of_fragment) for of_fragment in over([still, other]).values()] == [2, 1, 1, 1]


def test_a_checkpoint_of_the_last_launch_holds_the_same_bytes() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 3)
    sites[0].hub.coordinator.end()
    sites[0].connection.contribute = lambda *sent: None
    sites[0].train()
    state = saved(sites[0])
    launched = [own.flight.own for own in sites[0].world.follower.fragments if own.flight]
    assert [own.exact for own in launched] == [True] * 4
    sites[0].die()
    sites[0] = started_again(sites[0], state, 4)
    records = over(sites)
    assert [[own for own in record.counted if own.site == "s0"] for (record,) in records.values()] == [
        [own] for own in launched
    ]


def test_a_site_with_other_settings_is_refused_and_told_which() -> None:
    sites = founded(1, **CHOICES)
    with pytest.raises(ValueError, match=r"settings\.compression is 'fp32' here and 'fp4' there"):
        Site(sites[0].hub, 1, compression="fp32", **CHOICES)


def test_what_a_federation_cannot_do_is_refused_by_name() -> None:
    for choice, told in (({"exchange": "two_shot"}, "two_shot"), ({"outlier_guard": 3.0}, "guard")):
        with pytest.raises(ValueError, match=told):
            founded(1, **CHOICES, **choice)


def test_a_federation_refuses_when_it_is_made_what_is_out_of_range_or_cannot_lead_to_a_hub() -> None:
    for given, told in (
        ({"lease": 0}, "lease=0 is out of range: it must be above 0"),
        ({"lease": "10"}, "lease='10' is of type str, not a number: it must be above 0"),
        ({"patience": timedelta(hours=1)}, "is of type timedelta, not a number: it must be at least 0"),
        ({"rounds": 2.0}, "rounds=2.0 is of type float, not a whole number: it must be a whole number of at least 1"),
        ({"hub": Path("/mnt/run")}, "is of type PosixPath, not a string: give one"),
        ({"hub": "a.example"}, "hub='a.example' is no address: give one with a port, such as a.example:29400"),
        ({"hub": "a.example:1,b.example"}, "hub='b.example' is no address: give one with a port"),
        ({"hub": "a.example:99999"}, "hub='a.example:99999' has port 99999: a port is a number from 1 to 65535"),
        ({"hub": "a.example:0"}, "hub='a.example:0' has port 0: a port is a number from 1 to 65535"),
        ({"hub": "a.example:port"}, "hub='a.example:port' is no address"),
        ({"hub": "/mnt/run"}, "hub='/mnt/run' is a folder or bucket, and sites meet at a hub: start one"),
        ({"hub": "s3://bucket/run", "sites": 2}, "hub='s3://bucket/run' is a folder or bucket"),
        ({"sites": 2}, "sites=2 is nothing that a site says: the hub does (sdiloco hub --sites)"),
        ({"insecure": False}, "site 'a' needs either keys or insecure=True"),
        ({"keys": "keys.bundle"}, "needs either keys or insecure=True"),
        ({"insecure": False, "keys": "no/such.bundle"}, "There are no keys at no/such.bundle"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            Federation(**{"hub": "a.example:1", "run": "run", "site": "a", "insecure": True, **given})


def test_keys_of_another_site_or_run_are_refused_when_a_federation_is_made(tmp_path: Path) -> None:
    init_keys(tmp_path, "run")
    bundle = add_keys(tmp_path, "b")
    Federation("[::1]:29400", "run", "b", keys=bundle)
    Federation("a.example:29400, b.example:29400", "run", "b", keys=tmp_path)
    with pytest.raises(ValueError, match="The keys are those of site 'b', and not of 'a'"):
        Federation("a.example:29400", "run", "a", keys=bundle)
    with pytest.raises(ValueError, match="These keys are for run 'run', and not for run='other'"):
        Federation("a.example:29400", "other", "b", keys=bundle)
