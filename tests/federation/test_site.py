"""An engine as a site of a federation: with the right answers of the fixed world, and through
deaths and returns.
"""

import copy
import re
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_sdiloco import DenseBeginning, Federation, OuterOptimizer
from lightning_sdiloco.compression import FP4, ByLink, ErrorFeedback, Int2, RandomK, Threshold
from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.codec import plain, read
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.messages import Recorded
from lightning_sdiloco.federation.run_config import Terms
from lightning_sdiloco.federation.site import from_part, to_part
from lightning_sdiloco.federation.store import MEMORY, SQLiteLedger
from lightning_sdiloco.federation.wire import NoSpace
from tests.engine.groups import Groups
from tests.federation.sites import (
    STEP,
    Site,
    VirtualHub,
    agree,
    at_once,
    equal,
    founded,
    restarted,
    topologies,
    train,
    train_ranked,
    whole,
)
from tests.methods import DelayedNesterov
from tests.training import batch, mlp, train_step

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2}
GUARDED = {**CHOICES, "fragments": [["0.*", "2.*"], ["4.*", "6.*"]]}
ONE_FRAGMENT = {**CHOICES, "fragments": [["*"]], "grace": 1000.0}
FALLING = OuterOptimizer(lr_schedule=partial(LambdaLR, lr_lambda=lambda number: 0.5**number))
KEPT = ErrorFeedback(Threshold(1 / 16, Int2(), every=3, over="senders"))


def in_the_fixed_world(groups: int, **choices: Any) -> list[Tensor]:
    """The outer parameters, and the local ones of the first group, after 45 steps."""
    own = Groups(
        groups, net=lambda _: mlp(), fragments="strided:1", exchange="gather", **CHOICES, **choices
    )
    own.until(45)
    local = nn.utils.parameters_to_vector(own.models[0].parameters()).detach()
    return [*(fragment.outer.values for fragment in own.engines[0].rounds.fragments), local]


@pytest.mark.parametrize(
    ("choices", "absent"),
    [
        ({"compression": "fp4", "outer_optimizer": OuterOptimizer(clip_norm=0.05)}, 0),
        ({"compression": "sparse", "outer_optimizer": partial(DelayedNesterov, every=2)}, 0),
        ({"compression": RandomK(4, FP4())}, 1),
        ({"compression": KEPT}, 0),
        ({"compression": RandomK(4, FP4()), "dense_beginning": DenseBeginning(5, 3)}, 0),
        (
            {
                "compression": KEPT,
                "outer_optimizer": FALLING,
                "dense_beginning": DenseBeginning(4, 4, 1),
            },
            0,
        ),
        ({"outer_optimizer": OuterOptimizer(direction="equalised")}, 1),
        (
            {
                "outer_optimizer": OuterOptimizer(direction="equalised"),
                "dense_beginning": DenseBeginning(5, 3),
            },
            0,
        ),
    ],
    ids=[
        "fp4_and_clip",
        "sparse_and_delayed_nesterov",
        "random_k_and_one_absent",
        "kept",
        "dense_and_random_k",
        "dense_and_a_rate_that_falls",
        "matrices",
        "dense_and_matrices",
    ],
)
def test_a_federation_without_delays_matches_the_fixed_world_bit_for_bit(
    choices: dict[str, Any], absent: int
) -> None:
    sites = founded(3, **choices, **CHOICES)
    for _ in range(absent):
        sites.pop().die()
    train(sites, 45)
    assert equal(sites[0].held(), in_the_fixed_world(len(sites), **choices))
    assert agree(sites)


def test_a_late_joiner_launches_as_often_as_the_round_of_the_record_says() -> None:
    dense = {**CHOICES, "fragments": [["*"]], "dense_beginning": DenseBeginning(6, 3, 1)}
    sites = founded(2, **dense)
    train(sites, 10)
    assert [own.applied.round for own in sites[0].fragments] == [3]
    late = Site(sites[0].hub, 2, mlp(3), **dense)
    late.engine.join()
    sites.append(late)
    train(sites, 24)
    # Rounds 4 to 6 after inner steps 12, 15 and 18 of the others, round 7 after 18 + 8.
    assert sites[0].hub.counted()[3:] == [["s0", "s1", "s2"]] * 5
    assert [record.timings for record in sites[0].hub.records()][-1:] != []
    launched = [own.launched_at for site in sites for own in site.fragments]
    assert launched == [34, 34, 24]
    assert agree(sites)


def test_another_dense_beginning_is_refused_by_name_and_sites_without_read_old_terms() -> None:
    sites = founded(2, **CHOICES, dense_beginning=DenseBeginning(6, 3, 1))
    with pytest.raises(Refused, match=r"terms.dense_beginning.rounds is 5 here and 6 there"):
        Site(sites[0].hub, 2, **CHOICES, dense_beginning=DenseBeginning(5, 3, 1))
    with pytest.raises(Refused, match=r"terms.dense_beginning.* is missing here and"):
        Site(sites[0].hub, 2, **CHOICES)
    without = founded(2, **CHOICES)[0].hub.coordinator.run_config
    assert without is not None
    assert "dense_beginning" not in without.settings
    plain_terms = Terms(2, 8, 2, 1.0)
    assert "dense_beginning" not in plain(plain_terms)
    assert read(Terms, plain(plain_terms), "terms") == plain_terms
    with_dense = Terms(2, 8, 2, 1.0, dense_beginning=DenseBeginning(6, 3))
    assert read(Terms, plain(with_dense), "terms") == with_dense


def test_a_site_weighs_by_the_samples_it_trained() -> None:
    sites = founded(2, **CHOICES)
    for _ in range(12):
        sites[0].hub.passes(STEP)
        for site, trained in zip(
            sites, ({"trained": 3}, {"trained": 2, "samples": 16}), strict=True
        ):
            site.begin_step(**trained)
        for site in sites:
            site.land()
    assert [own.weight for own in sites[0].hub.records(0)[0].counted] == [3 * 8, 16 * 8]


def test_progress_carried_over_two_rounds_equals_that_of_one_long_round() -> None:
    choices = {**CHOICES, "overlap_steps": 0, "compression": "fp32", "outer_momentum": 0.0}
    late, other = founded(2, **choices)
    # The other one does not move, and neither do the outer parameters while it counts alone.
    other.optimizer.param_groups[0]["lr"] = 0.0
    late.die()
    train([late, other], 24)
    assert set(map(tuple, other.hub.counted())) == {("s1",)}
    late.mended()
    train([late, other], 8)
    own = next(own for record in other.hub.records(0) if (own := record.of("s0")))
    alone = founded(1, **{**choices, "sync_every": own.weight})[0]
    train([alone], 2 * own.weight)
    first = alone.hub.records(0)[0].counted[0]
    assert own.weight > 16
    assert (own.weight, own.payloads) == (first.weight, first.payloads)


# Sites that die and return


class Run:
    """Sites of which all steps are accounted for, whoever dies."""

    def __init__(self, count: int, **choices: Any) -> None:
        self.choices = {**CHOICES, **choices}
        self.sites = dict(enumerate(founded(count, **self.choices)))
        self.hub = self.sites[0].hub
        self.made: Counter[int] = Counter()
        self.lost: Counter[tuple[int, int]] = Counter()
        self.held: dict[int, list[int]] = {}

    def train(self, steps: int, *only: int) -> None:
        """These sites make inner steps, or all; the others give heartbeats."""
        running = [own for index, own in self.sites.items() if not only or index in only]
        train(running, steps, [own for own in self.sites.values() if own not in running])
        self.made.update(dict.fromkeys([own.index for own in running], steps))

    def die(self, *indices: int) -> None:
        for index in indices:
            site = self.sites.pop(index)
            site.die()
            self.held[index] = [own.steps for own in site.fragments]

    def again(self, index: int, state: dict[str, Any] | None, joins: bool = True) -> Site:
        """Starts another incarnation, from a checkpoint or from nothing. What it no longer holds
        is lost.
        """
        # Who comes with nothing has the parameters of the founding, and waits for no donor.
        again = Site(self.hub, index, mlp(0 if state is None else 5), **self.choices)
        if state is not None:
            again.resume(state)
        if joins:
            again.engine.join()
        for own, held in zip(again.fragments, self.held[index], strict=True):
            self.lost[index, own.fragment] += held - own.steps
        self.sites = dict(sorted({**self.sites, index: again}.items()))
        return again

    def pending(self, index: int, fragment: int = 0) -> int:
        """The steps that a site holds, or has in flight, and that no record counts yet."""
        own = self.sites[index].fragments[fragment]
        counted = [r.of(f"s{index}") for r in self.hub.records(fragment)]
        return own.steps + (own.flight.steps if own.flight and own.flight.own not in counted else 0)

    def counted(self, index: int, fragment: int = 0) -> int:
        """How many steps of a site count: it trains a sample a step."""
        return sum(
            own.weight for record in self.hub.records(fragment) if (own := record.of(f"s{index}"))
        )

    def check(self) -> None:
        """Asserts that all agree and count, and that what a site has trained counts once, or is
        pending or lost.
        """
        assert agree(list(self.sites.values()))
        for index, site in self.sites.items():
            for fragment in range(len(site.fragments)):
                known = (
                    self.counted(index, fragment)
                    + self.pending(index, fragment)
                    + self.lost[index, fragment]
                )
                assert known == self.made[index], (index, fragment)
        assert self.hub.counted()[-1] == [f"s{index}" for index in self.sites]


def test_sites_and_their_hub_die_and_return_and_each_step_counts_once() -> None:
    run = Run(3)
    run.train(9)
    assert run.sites[2].engine.in_flight
    early = run.sites[2].state()
    run.train(6)
    run.die(2)
    assert run.hub.counted() == [["s0", "s1", "s2"]]
    run.train(3)
    state = run.sites[1].state()
    run.die(1)
    run.train(30)
    assert run.hub.counted()[-3:] == [["s0"]] * 3, "the last one goes on alone"
    run.again(1, state)
    # With an old checkpoint: it replays what it missed.
    run.again(2, early)
    run.train(2)
    assert run.sites[2].world.follower.lag == 0
    run.train(3)
    run.hub.restart()
    run.train(8)
    for site in run.sites.values():
        site.mended()
    run.train(16)
    run.check()
    # One that is told to end has all counted, and nothing twice when it comes back.
    state = run.sites[2].state()
    run.sites[2].engine.leave()
    assert run.sites[2].world.follower.finished
    for fragment in range(4):
        assert run.counted(2, fragment) + run.lost[2, fragment] == run.made[2]
    run.die(2)
    run.train(10)
    assert run.hub.counted()[-1] == ["s0", "s1"]
    run.again(2, state)
    run.train(20)
    run.check()
    states = {}
    for index in range(2):
        run.train(3)
        states[index] = run.sites[index].state()
    run.train(5)
    known = run.hub.records()
    run.die(0, 1, 2)
    run.hub.restart()
    for index, state in states.items():
        run.again(index, state, joins=False)
    # The third has lost its disk too, and one joins: with other parameters, and the state of a
    # donor.
    for index in (2, 3):
        run.sites[index] = Site(run.hub, index, mlp(7), **CHOICES)
        assert not equal(run.sites[index].outer(), run.sites[0].outer())
    run.train(30)
    assert agree(list(run.sites.values()))
    assert max(site.world.follower.lag for site in run.sites.values()) <= 1
    assert run.hub.records()[: len(known)] == known
    assert run.hub.counted()[-1] == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize("dense_beginning", [None, DenseBeginning(3, 4, 2)])
def test_a_site_that_resumes_is_bitwise_that_which_never_stopped(
    dense_beginning: DenseBeginning | None,
) -> None:
    choices = {**CHOICES, "dense_beginning": dense_beginning}
    runs = whole_run, stopped = [founded(2, **choices) for _ in range(2)]
    # In flight, between two flights, and with what was carried while it was cut off.
    for step in (9, 12, 36):
        for sites in runs:
            if step == 36:
                sites[0].die()
                train(sites, 20)
                sites[0].mended()
            train(sites, step - sites[1].step)
        state = stopped[0].state()
        stopped[0].die()
        stopped[0] = Site(stopped[1].hub, 0, mlp(5), **choices)
        stopped[0].resume(state)
    for sites in runs:
        train(sites, 30)
    assert all(
        equal(one.held(), other.held()) for one, other in zip(whole_run, stopped, strict=True)
    )


@pytest.mark.parametrize(
    ("late", "has_checkpoint"), [("carry", True), ("drop", True), ("carry", False)]
)
def test_a_new_incarnations_progress_in_an_open_round_counts_with_its_next_launch(
    late: str, has_checkpoint: bool
) -> None:
    run = Run(2, **ONE_FRAGMENT, late=late)
    run.train(6)
    state = run.sites[0].state()
    run.train(3, 0)
    assert run.sites[0].engine.in_flight
    run.die(0)
    again = run.again(0, state if has_checkpoint else None)
    before = again.local()
    was = again.outer()[0].clone()
    assert torch.equal(before, was[: len(before)]), (
        "what its earlier incarnation has trained is in the round"
    )
    assert run.pending(0) == 0
    run.train(10, 0)
    assert run.hub.records() == []
    before = again.local()
    # The other one answers, and the round closes.
    train([run.sites[1]], 3)
    run.made[1] += 3
    again.world.hear()
    again.land()
    assert (run.counted(0), again.fragments[0].applied.round) == (8, 1)
    assert torch.allclose(
        again.local(), before + (again.outer()[0] - was)[: len(before)], atol=1e-6
    )
    assert run.pending(0) == 10
    run.train(20)
    run.check()
    assert run.lost[0, 0] == 1


def test_all_ranks_of_a_site_begin_again_together() -> None:
    hub = VirtualHub(2)

    def started(seed: int) -> list[Site]:
        # The models one after the other: threads have one generator of random numbers.
        ranks = [(mlp(seed), place) for place in topologies(2)]
        return at_once(lambda rank: Site(hub, 0, *rank, **ONE_FRAGMENT), ranks)

    def hear(ranks: list[Site]) -> None:
        for _ in range(3):
            # A record is heard when all ranks have what it names.
            at_once(lambda rank: rank.world.hear(), ranks)
            other.world.hear()

    def alone(ranks: list[Site], steps: int) -> None:
        for _ in range(steps):
            hub.passes(STEP)
            other.connection.heartbeat(other.world.follower)
            at_once(lambda rank: (rank.train(samples=1), rank.land()), ranks)

    site = started(0)
    other = Site(hub, 1, **ONE_FRAGMENT)
    hear(site)
    alone(site, 6)
    states = at_once(lambda rank: rank.state(), site)
    # It would close the round at once where the first rank is the last to speak.
    with patch.object(hub.coordinator, "tick"):
        alone(site, 3)
        site[0].die()
    again = started(5)
    at_once(
        lambda pair: pair[0].resume(pair[1]) or pair[0].engine.join(),
        list(zip(again, states, strict=True)),
    )
    assert all(equal(list(rank.model.parameters()), list(mlp().parameters())) for rank in again)
    alone(again, 5)
    assert [rank.fragments[0].samples for rank in again] == [10, 10]
    train([other], 3)
    hear(again)
    at_once(lambda rank: rank.land(), again)
    (first,) = hub.records()
    assert [own.launch for own in first.counted] == [(1, site[0].world.follower.incarnation)]
    assert [(rank.fragments[0].applied.round, rank.fragments[0].samples) for rank in again] == [
        (1, 10)
    ] * 2
    assert torch.equal(again[0].local(), again[1].local())


# Late, slow, and told


def test_a_site_that_drops_late_contributions_still_mixes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(2, mixing=0.25, compression="fp32", late="drop")
    run.train(7)
    late = run.sites[0]
    late.die()
    run.train(4)
    values = next(late.model.parameters()).detach().clone().flatten()
    late.mended()
    for _ in range(4):
        late.world.hear()
        late.land()
    assert late.fragments[0].applied.round == 1
    now = next(late.model.parameters()).detach().flatten()
    assert torch.allclose(now, 0.25 * values + 0.75 * late.outer()[0][: len(values)], atol=1e-6)
    assert "counts nowhere" in caplog.text
    run.train(30)
    for fragment in range(2):
        # Whose first launch was too late.
        run.lost[0, fragment] += 8 + 2 * fragment
    run.check()


def slow(site: Site, waits: int) -> Site:
    """A site to which payloads take so many waits."""
    left = [waits]
    held = list[Any]()
    events = site.connection.events
    wait = site.connection.wait

    def waited(timeout: float) -> bool:
        left[0] -= 1
        return bool(wait(timeout))

    def heard() -> list[Any]:
        held.extend(events())
        now = [event for event in held if left[0] <= 0 or not isinstance(event, Recorded)]
        held[:] = [event for event in held if event not in now]
        return now

    site.connection.wait = waited
    site.connection.events = heard
    return site


def test_a_site_that_returns_with_a_flight_trains_once_it_has_the_closed_rounds() -> None:
    """Cut off before, it would train on alone, and drop all that where its earlier incarnation
    counts.
    """
    choices = {**ONE_FRAGMENT, "grace": 1.0}
    sites = founded(2, steps=9, **choices)
    state = sites[0].state()
    train(sites, 9)
    sites[0].die()
    train(sites[1:], 3)
    again = slow(Site(sites[0].hub, 0, mlp(5), **choices), waits=3)
    again.resume(state)
    assert again.engine.in_flight
    again.engine.join()
    again.die()
    train([again], 3)
    assert all(own.applied.round == own.closed > 0 for own in again.fragments)


def test_training_waits_for_the_grace_and_a_second_and_not_a_moment_longer() -> None:
    hub = VirtualHub(1)
    # It hears of no record, and so every launch is waited for.
    site = slow(Site(hub, 0, **CHOICES, grace=1.03), waits=10**6)
    site.world.hear()
    site.world.hear()
    waited = list[float]()
    for _ in range(16):
        began = hub.now
        train([site], 1)
        waited.append(hub.now - began - STEP)
    assert max(waited) == pytest.approx(1.03 + 1.0)


def test_a_site_logs_the_reason_of_a_wait_and_the_loss_and_return_of_its_hub(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = VirtualHub(2)
    first = Site(hub, 0, **CHOICES)
    for _ in range(3):
        first.world.hear()
    (waits,) = caplog.messages
    assert waits.startswith("Site s0 waits: ")
    other = Site(hub, 1, **CHOICES)
    for site in (first, other, first, other):
        site.world.hear()
    train([first, other], 5)
    caplog.clear()
    for _ in range(2):
        first.die()
        train([first, other], 2)
    first.mended()
    train([first, other], 2)
    gone, back = caplog.messages
    assert "trains on without it" in gone
    assert back == "The hub is back: site s0 sends what it has trained."
    caplog.clear()
    with patch.object(hub.journal, "append", Mock(side_effect=NoSpace("the disk is full"))):
        train([first, other], 12)
    train([first, other], 8)
    assert caplog.messages[0] == "the disk is full"
    trains_on = [f"Site s{i} trains on while no rounds close: the disk is full" for i in (0, 1)]
    assert sorted(caplog.messages[1:3]) == trains_on
    assert (
        caplog.messages[3]
        == "rounds can close again; what kept them from it is over: the disk is full"
    )
    assert caplog.messages[4:] == ["Rounds close again."] * 2


# A hub that knows less than its sites: they train on for their patience


def earlier(hub: VirtualHub, records: int) -> SQLiteLedger:
    """The ledger as it was after so many records."""
    ledger = SQLiteLedger(MEMORY)
    ledger.note(hub.journal.notes())
    for seq, record in list(hub.journal.read())[:records]:
        ledger.append(seq, record)
    return ledger


def test_sites_train_on_while_the_hub_lacks_its_ledger_and_count_everything_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sites = founded(2, steps=40, **CHOICES)
    hub = sites[0].hub
    whole = hub.journal
    before = sites[0].local().clone()
    restarted(sites, earlier(hub, 6))
    train(sites, 20)
    assert not torch.equal(sites[0].local(), before)
    said = [text for text in caplog.messages if "The site trains on without that hub" in text]
    assert len(said) == 2, said
    restarted(sites, whole)
    train(sites, 30)
    assert agree(sites)
    weights = [
        sum(one.weight for record in hub.records(0) if (one := record.of(f"s{i}"))) for i in (0, 1)
    ]
    first = [site.fragments[0] for site in sites]
    held = [own.samples + (own.flight.own.weight if own.flight else 0) for own in first]
    assert [a + b for a, b in zip(weights, held, strict=True)] == [90, 90]

    sites[0].world.follower._patience = 1.0
    restarted(sites, earlier(hub, 6))
    train(sites, 1)
    hub.passes(1.5)
    sites[0].mended()
    with pytest.raises(ExchangeError, match=r"patience=1 s.*The hub knows 2 rounds"):
        train(sites, 1)


def test_sites_that_have_more_than_a_run_that_was_rolled_back_end_at_once() -> None:
    sites = founded(2, steps=40, **CHOICES)
    sites[0].hub.coordinator._roll_back(0)
    restarted(sites)
    with pytest.raises(AgreementError, match="After `sdiloco hub rollback`"):
        train(sites, 1)


# The guard: a site whose values are finite and wrong does not ruin the others, and is told so


@torch.no_grad()
def become_a_constant(site: Site) -> None:
    for parameter in site.model.parameters():
        parameter.fill_(30.0)


@pytest.mark.parametrize("count", [2, 3])
def test_a_site_whose_parameters_become_one_constant_costs_the_others_nothing(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(seed: int, faulty: bool) -> float:
        sites = founded(count, **GUARDED)
        for site in sites:
            site.index += 10 * seed
        train(sites, 100)
        if faulty:
            become_a_constant(sites[-1])
        train(sites, 100)
        assert agree(sites)
        out = [own for record in sites[0].hub.records() for own in record.left_out]
        assert {own.site for own in out} == ({f"s{count - 1}"} if faulty else set())
        return fmean(
            float(nn.functional.mse_loss(sites[0].model(x), y))
            for x, y in map(partial(batch, 9), range(50))
        )

    sound = [loss(seed, faulty=False) for seed in range(5)]
    assert "was left out" not in caplog.text
    assert loss(0, faulty=True) == pytest.approx(fmean(sound), abs=3 * stdev(sound))
    assert (
        f"This site's contribution to round {100 // 8 + 1} of fragment 0 was left out"
        in caplog.text
    )


def test_a_site_that_is_left_out_again_and_again_is_asked_to_leave() -> None:
    sites = founded(3, steps=48, **GUARDED)

    def goes_on() -> None:
        for _ in range(40):
            become_a_constant(sites[2])
            train(sites, 1)

    with pytest.raises(AgreementError, match="were left out 3 times in a row"):
        goes_on()
    others = sites[:2]
    sites[2].die()
    train(others, 20)
    assert agree(others)
    assert torch.cat(others[0].outer()).abs().max() < 5


def test_a_federation_without_the_guard_is_bit_identical_to_one_that_omits_nobody() -> None:
    outer = list[list[Tensor]]()
    for guard in (None, "auto"):
        sites = founded(2, steps=40, **GUARDED, outer_optimizer=OuterOptimizer(outlier_guard=guard))
        outer.append(sites[0].outer())
    assert equal(*outer)


# Sites of several ranks


WIDE = 300 * 301 + 301 * 40


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 40))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 11),
        nn.BatchNorm1d(11),
        nn.Tanh(),
        nn.Linear(11, 7),
        nn.Tanh(),
        nn.Linear(7, 3),
    )


def in_common(sites: list[list[Site]], rounds: Sequence[int] = (3, 2, 2)) -> dict[str, Tensor]:
    """The outer parameters of fragments that all have at the same round, which are these, and
    equal at all sites.
    """
    held = list(map(whole, sites))
    common = [{key: one[key] for key in one if all(key in other for other in held)} for one in held]
    for own in common:
        assert [key.split(",")[0] for key in own] == [
            f"{p} Position(round={r}" for p, r in enumerate(rounds)
        ]
        assert equal(list(own.values()), list(common[0].values()))
    return common[0]


@pytest.mark.parametrize("direction", ["elementwise", "equalised"])
def test_the_number_of_ranks_of_a_site_changes_no_bit(direction: Any) -> None:
    # Each is weighed with four samples, of which ranks may have trained unequal numbers.
    choices = {
        **CHOICES,
        "compression": "fp32",
        "outer_optimizer": OuterOptimizer(direction=direction),
    }
    alone = train_ranked((1, 1, 1), 26, normed, (4, 4, 4), **choices)
    heard = []
    gathered = list[int]()

    def at(rank: Site, step: int) -> None:
        if rank.index == 0 and not rank.topology.group_rank and step < 8:
            gathered.append(rank.topology.in_site.gathered)  # type: ignore[attr-defined]
        if step == 5 and rank.topology.group_rank == 3:
            rank.engine.requests.ask(2)
        if rank.world.requested:
            heard.append((rank.index, step, rank.world.requested))

    sites = train_ranked((4, 2, 1), 26, normed, ((2, 0, 1, 1), 2, 4), at, **choices)
    # What one rank asks, all of its site hear after the next step.
    assert heard == [(0, 6, 2)] * 4
    # What ranks of a site say after an inner step without a launch goes in one collective.
    assert [after - before for before, after in zip(gathered, gathered[1:], strict=False)] == [
        1
    ] * 6
    assert equal(list(in_common(sites).values()), list(in_common(alone).values()))
    buffers = [
        rank.engine.rounds.fragments[0].untrained.outer
        for site in (*alone, *sites)
        for rank in site
    ]
    assert all(equal(own, buffers[0]) for own in buffers)


@pytest.mark.parametrize(
    "choices",
    [
        {
            "outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2),
            "compression": "sparse",
        },
        {"compression": ErrorFeedback(Threshold(1 / 4, Int2(), every=2))},
        {"compression": "random_k+memory"},
        {"compression": ByLink(["fp4+memory", "sparse"], within=1000.0)},
    ],
    ids=["delayed_nesterov_and_sparse", "threshold", "random_k", "by_link"],
)
def test_sites_of_several_ranks_agree_with_every_code_and_a_delayed_momentum(
    choices: dict[str, Any],
) -> None:
    in_common(train_ranked((4, 2, 1), 26, normed, (4, 4, 4), **{**CHOICES, **choices}))


def test_buffers_of_a_site_that_are_not_finite_reach_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def poison(rank: Site, step: int) -> None:
        if rank.index == 1 and step == 7:
            rank.model[1].running_var[3] = float("nan")

    sites = train_ranked(
        (1, 2, 1), 16, normed, (4, 2, 4), poison, compression="fp32", mixing=0.5, **CHOICES
    )
    for rank in (rank for site in sites for rank in site):
        assert all(
            bool(values.isfinite().all())
            for values in rank.engine.rounds.fragments[0].untrained.outer
        )
        assert rank.model[1].running_var.isfinite().all()
    assert (
        "left out of the mean and get the outer values: '1.running_var' of site 's1'."
        in caplog.text
    )


def test_ranks_share_the_bytes_that_their_site_sends_and_fetches() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        nn.utils.vector_to_parameters(torch.full((WIDE,), 1.0 + number), model.parameters())

    sites = train_ranked((4, 4, 1), 18, wide, (1, 1, 4), step=step, **CHOICES)
    in_common(sites, (2, 1))
    (alone,) = sites[2]
    expected = alone.engine.report()
    for site in sites[:2]:
        for rank in site:
            report = rank.engine.report()
            number = rank.topology.group_rank
            assert report["bytes_sent"] == pytest.approx(expected["bytes_sent"] / 4, rel=0.02)
            of_site = [
                record.of(f"s{rank.index}") for record in rank.hub.records() if record.round == 1
            ]
            assert (
                report["bytes_sent"] >= sum(own.payloads[number].size for own in of_site if own) > 0
            )
            # Of the other site with four ranks each fetches a quarter; of that with one rank 0
            # fetches all.
            shares = 1 / 4 + (rank is site[0])
            assert report["bytes_received"] == pytest.approx(
                shares * expected["bytes_sent"], rel=0.02
            )
    assert expected["bytes_received"] == pytest.approx(2 * expected["bytes_sent"], rel=0.02)


# Ends


@pytest.mark.parametrize(
    ("compression", "steps", "ranks"),
    [
        (
            "fp4",
            3,
            (4, 2, 1),
        ),  # before anything was launched, from three values: their plain mean in float32
        ("fp4+memory", 15, (4, 2, 1)),
        (KEPT, 15, (4, 2, 1)),
        (ByLink(["fp4", "sparse"], within=1000.0), 15, (1, 1, 1)),
    ],
    ids=["fp4", "memory", "kept", "by_link"],
)
def test_a_run_ends_with_the_mean_of_the_values_of_all_its_sites(
    compression: Any, steps: int, ranks: tuple[int, ...]
) -> None:
    """The end is no outer step: it changes no state of the outer optimizer, and leaves nothing
    out.
    """
    values = [torch.full((WIDE,), 0.999)] * 3
    if steps < CHOICES["sync_every"]:
        draws = [torch.Generator().manual_seed(seed) for seed in range(3)]
        values = [torch.empty(WIDE).uniform_(0.5, 1.5, generator=draw) for draw in draws]
    mean = torch.stack(values).double().mean(dim=0).float()
    before = list[tuple[Site, Any]]()

    def kept(rank: Site) -> Any:
        fragments = rank.engine.rounds.fragments
        return [
            {**own.outer.state, "memory": own.memory, "tuning": own.tuning} for own in fragments
        ]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        nn.utils.vector_to_parameters(values[site].clone(), model.parameters())

    def at(rank: Site, number: int) -> None:
        if number == steps:
            assert not rank.engine.in_flight
            before.append((rank, copy.deepcopy(kept(rank))))
            if rank.index == 0 and not rank.topology.group_rank:
                rank.hub.coordinator.end()

    choices = {
        **CHOICES,
        "compression": compression,
        "outer_optimizer": OuterOptimizer(clip_norm=0.05),
    }
    sites = train_ranked(ranks, steps + 16, wide, (1,) * len(ranks), at, step, **choices)
    for rank, held in before:
        assert rank.world.is_over
        torch.testing.assert_close(kept(rank), held, rtol=0, atol=0)
    for site in sites:
        assert torch.allclose(torch.cat(list(whole(site).values())), mean, rtol=2**-8, atol=0.0)


LAST = [True, True]
ROUNDED = [False, False]


def over(sites: Sequence[Site], exact: Sequence[Sequence[Sequence[bool]]]) -> None:
    """Trains until the run is over, which is soon; asserts which contributions to its records were
    exact.
    """
    for _ in range(12):
        left = [site for site in sites if not site.world.is_over]
        if left:
            train(left, 1)
    assert not left
    assert equal(sites[0].outer(), sites[1].outer())
    for fragment, own in enumerate(exact):
        records = sites[0].hub.records(fragment)
        assert [[one.exact for one in record.counted] for record in records] == own
        assert [record.final for record in records] == [False] * (len(own) - 1) + [True]


def test_a_run_that_ends_by_its_run_config_sends_its_last_round_alone_in_float32() -> None:
    sites = founded(2, steps=15, rounds=2, **CHOICES)
    over(sites, [[ROUNDED, LAST]] * 4)


def with_teacher() -> nn.Module:
    model = normed()
    model[0].teacher = copy.deepcopy(model[0]).requires_grad_(False)
    return model


def step_with_teacher(model: Any, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
    train_step(model, optimizer, site, number)
    with torch.no_grad():
        for followed, trained in zip(
            model[0].teacher.parameters(), model[0].parameters(), strict=False
        ):
            followed.lerp_(trained, 0.1)


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_at_the_end_all_sites_hold_the_teacher_of_the_first_one(mean: str) -> None:
    launched = dict[int, Tensor]()

    def at(rank: Site, step: int) -> None:
        own = rank.fragments[0]
        if rank.index == 0 and own.flight and own.flight.own.exact:
            launched.setdefault(0, rank.model[0].teacher.weight.clone())

    choices = {**CHOICES, "rounds": 2, "mean": mean, "compression": "fp4"}
    sites = train_ranked((1, 2, 1), 40, with_teacher, (4, 2, 4), at, step_with_teacher, **choices)
    ranks = [rank for site in sites for rank in site]
    assert all(rank.world.is_over for rank in ranks)
    apart = [rank.model[0].teacher.weight.clone() for rank in ranks]
    assert not equal(apart, [apart[0]] * len(ranks))
    at_once(lambda rank: rank.engine.finish(), ranks)
    assert equal([rank.model[0].teacher.weight for rank in ranks], [launched[0]] * len(ranks))
    exact = [one.exact for record in ranks[0].hub.records(0) for one in record.counted]
    assert exact == [False] * 3 + [True] * 3
    # So does one that comes after it, and is given a state.
    given, taken = (site[0].engine.rounds.fragments[0] for site in (sites[2], sites[0]))
    assert equal(
        [from_part(taken, to_part(given, [given.outer.state_dict()])).of_first["0.teacher.weight"]],
        [launched[0]],
    )


@pytest.mark.parametrize(
    ("rebinder", "bound"),
    [
        (2, torch.full((5, 3), 9.0)),
        (2, torch.full((6, 2), 9.0)),
        (0, torch.full((3, 4), 9.0)),
        (0, torch.full((3, 4), 9.0, dtype=torch.float64)),
        (0, torch.full((4, 3), 9, dtype=torch.int32)),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_a_site_keeps_a_buffer_that_it_rebinds_in_another_shape_or_dtype_to_the_end(
    rebinder: int, bound: Tensor
) -> None:
    def queued() -> nn.Module:
        model = normed()
        model[0].register_buffer("queue", torch.zeros(4, 3))
        return model

    def step(model: Any, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        train_step(model, optimizer, site, number)
        model[0].queue.fill_(site + 1)
        if site == rebinder and number > 5:
            model[0].queue = bound.clone()

    choices = {**CHOICES, "rounds": 2, "untrained": {"*.queue": "own"}}
    sites = train_ranked(
        (1, 2, 1), 40, queued, (4, 2, 4), lambda rank, number: None, step, **choices
    )
    ranks = [rank for site in sites for rank in site]
    assert all(rank.world.is_over for rank in ranks)
    at_once(lambda rank: rank.engine.finish(), ranks)
    first = float(min(site + 1 for site in range(3) if site != rebinder))
    for rank in ranks:
        expected = bound if rank.index == rebinder else torch.full((4, 3), first)
        assert rank.model[0].queue.dtype == expected.dtype
        assert torch.equal(rank.model[0].queue, expected)


def test_a_run_of_three_rounds_becomes_one_of_five_and_every_step_counts() -> None:
    choices = {**CHOICES, "fragments": [["*"]]}
    sites = founded(2, steps=23, **choices, rounds=3)
    hub = sites[0].hub
    # One has launched for what was to be the last round.
    sites[0].train()
    assert sites[0].fragments[0].flight.own.exact
    hub.coordinator.amend({"rounds": 5, "grace": 2.5})
    sites[1].train()
    assert not sites[1].fragments[0].flight.own.exact
    train(sites, 2)
    assert [record.final for record in hub.records()] == [False] * 3
    restarted(sites)
    # With the terms that the run was founded on, or those of now.
    for rounds in (3, 5):
        sites[1].die()
        sites[1] = Site(hub, 1, **choices, rounds=rounds)
        sites[1].engine.join()
        assert (sites[1].world.follower.terms.rounds, sites[1].world.follower.terms.grace) == (
            5,
            2.5,
        )
    with pytest.raises(ValueError, match="terms.rounds is 4 here and 3 there"):
        Site(hub, 1, **choices, rounds=4)
    train(sites, 40)
    assert [record.final for record in hub.records()] == [False] * 4 + [True]
    assert agree(sites)
    with pytest.raises(Refused, match="the run has ended"):
        hub.coordinator.amend({"rounds": 9})


def test_a_round_open_when_an_operator_ends_the_run_closes_even_if_the_hub_dies() -> None:
    sites = founded(2, steps=7, **CHOICES)
    sites[0].train()
    hub = sites[0].hub
    hub.coordinator.end()
    assert list(hub.coordinator.ledger.open) == [0]
    restarted(sites[::-1])
    sites[1].train()
    over(sites, [[ROUNDED, LAST], [LAST], [LAST], [LAST]])


def test_float32_payloads_are_read_as_such_beside_compressed_ones() -> None:
    outer = OuterOptimizer(direction="elementwise")
    still, other = founded(2, **CHOICES, outer_lr=1.0, outer_momentum=0.0, outer_optimizer=outer)
    still.optimizer.param_groups[0]["lr"] = 0.0
    train([still, other], 7)
    held = list[Any]()
    send = still.connection.contribute
    still.connection.contribute = lambda *sent: held.append(sent)
    still.train()
    still.connection.contribute = send
    still.hub.coordinator.end()
    other.train()
    fragment = other.engine.rounds.fragments[0]
    mean = (fragment.outer.values + fragment.layout.read()) / 2
    for sent in held:
        send(*sent)
    still.land()
    other.land()
    train([still, other], CHOICES["overlap_steps"])
    assert [site.fragments[0].applied.round for site in (still, other)] == [1, 1]
    assert torch.allclose(other.outer()[0], mean, rtol=1e-6, atol=1e-7)
    over([still, other], [[[False, True], LAST], [LAST], [LAST], [LAST]])


def test_a_checkpoint_of_the_last_launch_holds_the_same_bytes() -> None:
    sites = founded(2, steps=3, **CHOICES)
    sites[0].hub.coordinator.end()
    sites[0].connection.contribute = lambda *sent: None
    sites[0].train()
    state = sites[0].state()
    launched = [own.flight.own for own in sites[0].fragments if own.flight]
    sites[0].die()
    sites[0] = Site(sites[1].hub, 0, mlp(5), **CHOICES)
    sites[0].resume(state)
    over(sites, [[LAST]] * 4)
    assert [
        record.of("s0") for fragment in range(4) for record in sites[0].hub.records(fragment)
    ] == launched


# Refusals


def test_options_that_a_federation_cannot_offer_are_refused_by_name() -> None:
    sites = founded(2, **CHOICES)
    for choice, told in (
        ({"exchange": "two_shot"}, "two_shot"),
        ({"outer_optimizer": OuterOptimizer(outlier_guard=3.0)}, "guard"),
        ({"compression": "fp32"}, r"settings\.compression is 'fp32' here and 'fp4' there"),
    ):
        with pytest.raises(ValueError, match=told):
            Site(sites[0].hub, 2, **CHOICES, **choice)
    train(sites, 8)
    assert sites[0].engine.report()["launches"] == 1
    sites[0].model.append(nn.Linear(3, 3))
    train(sites, 1)
    with pytest.raises(AgreementError, match=r"2 parameters .* such as '7.weight'"):
        train(sites, 1)


def test_a_federation_refuses_bad_numbers_addresses_and_keys_when_it_is_made(
    tmp_path: Path,
) -> None:
    init_keys(tmp_path, "run")
    bundle = add_keys(tmp_path, "b")
    of_b = {"insecure": False, "keys": bundle, "site": "b"}
    Federation("[::1]:29400", "run", "b", keys=bundle)
    Federation("a.example:29400, b.example:29400", "run", "b", keys=tmp_path)
    for given, told in (
        ({"lease": 0}, "lease=0 is out of range: it must be above 0"),
        ({"lease": "10"}, "lease='10' is of type str, not a number: it must be above 0"),
        (
            {"patience": timedelta(hours=1)},
            "is of type timedelta, not a number: it must be at least 0",
        ),
        (
            {"rounds": 2.0},
            "rounds=2.0 is of type float, not a whole number: it must be a whole number of at least"
            " 1",
        ),
        ({"hub": Path("/mnt/run")}, "is of type PosixPath, not a string: give one"),
        (
            {"hub": "a.example"},
            "hub='a.example' is not an address: give one with a port, such as a.example:29400",
        ),
        (
            {"hub": "a.example:1,b.example"},
            "hub='b.example' is not an address: give one with a port",
        ),
        (
            {"hub": "a.example:99999"},
            "hub='a.example:99999' has port 99999: a port is a number from 1 to 65535",
        ),
        (
            {"hub": "a.example:0"},
            "hub='a.example:0' has port 0: a port is a number from 1 to 65535",
        ),
        ({"hub": "a.example:port"}, "hub='a.example:port' is not an address"),
        (
            {"hub": "/mnt/run"},
            "hub='/mnt/run' is a folder or bucket, but sites meet at a hub: start one",
        ),
        ({"hub": "s3://bucket/run", "sites": 2}, "hub='s3://bucket/run' is a folder or bucket"),
        ({"sites": 2}, "sites=2 cannot be set by a site, only by the hub (sdiloco hub --sites)"),
        ({"insecure": False}, "site 'a' needs either keys or insecure=True"),
        ({"keys": "keys.bundle"}, "needs either keys or insecure=True"),
        ({"insecure": False, "keys": "no/such.bundle"}, "There are no keys at no/such.bundle"),
        ({"insecure": False, "keys": bundle}, "The keys belong to site 'b', not to 'a'"),
        ({**of_b, "run": "other"}, "These keys are for run 'run', not for run='other'"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            Federation(
                **{"hub": "a.example:1", "run": "run", "site": "a", "insecure": True, **given}
            )
