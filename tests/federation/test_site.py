"""An engine as a site of a federation: with the right answers of the fixed world, and through
deaths and returns.
"""

import copy
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

from lightning_sdiloco import (
    Carry,
    Control,
    Count,
    DenseBeginning,
    Federation,
    OuterOptimizer,
    Weighing,
)
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import FP4, ByLink, ErrorFeedback, Int2, RandomK, Threshold
from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.codec import plain, read
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.messages import (
    Event,
    Position,
    Record,
    Recorded,
    Welcome,
    Welcomed,
    read_event,
)
from lightning_sdiloco.federation.run_config import Terms
from lightning_sdiloco.federation.site import SharedConnection, from_part, to_part
from lightning_sdiloco.federation.store import MEMORY, SQLiteLedger
from lightning_sdiloco.federation.wire import NoSpace
from tests.engine.groups import Groups
from tests.engine.test_policies import DelayCompensation
from tests.federation.sites import (
    STEP,
    Site,
    VirtualHub,
    agree,
    at_once,
    equal,
    founded,
    outer_parameters,
    ranks_of,
    restarted,
    topologies,
    train,
    train_ranked,
    untrained_of,
)
from tests.federation.test_known_answers import RECORDS, RUN_CONFIG
from tests.methods import ByNorm, DelayedNesterov
from tests.training import batch, mlp, train_step

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2}
GUARDED = {**CHOICES, "fragments": [["0.*", "2.*"], ["4.*", "6.*"]]}
ONE_FRAGMENT = {**CHOICES, "fragments": [["*"]], "grace": 1000.0}
FALLING = OuterOptimizer(lr_schedule=partial(LambdaLR, lr_lambda=lambda number: 0.5**number))
EQUALISED = OuterOptimizer(direction="equalised")
KEPT = ErrorFeedback(Threshold(1 / 16, Int2(), every=3, over="senders"))


def in_the_fixed_world(groups: int, **choices: Any) -> list[Tensor]:
    """The outer parameters, and the local ones of the first group, after 45 steps."""
    run = Groups(
        groups, net=lambda _: mlp(), fragments="strided:1", exchange="gather", **CHOICES, **choices
    )
    run.until(45)
    outer = [fragment.outer.values for fragment in run.engines[0].fragmented_model.fragments]
    local = nn.utils.parameters_to_vector(run.models[0].parameters()).detach()
    return [*outer, local]


@dataclass(frozen=True)
class WithoutLongest(Weighing):
    """Leaves out the longest outer gradient of a round."""

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        norms = [control.norm for control in controls]
        longest = norms.index(max(norms))
        counted = [group for group in range(len(controls)) if group != longest]
        return Count(dict.fromkeys(counted, 1.0), outlying=(longest,))


@dataclass(frozen=True)
class Nobody(Weighing):
    """Counts no group, as if none had trained."""

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        return Count({})


DENSE_AND_FALLING = {
    "compression": KEPT,
    "outer_optimizer": FALLING,
    "dense_beginning": DenseBeginning(4, 4, 1),
}


@pytest.mark.parametrize(
    ("choices", "absent"),
    [
        pytest.param(
            {"compression": "fp4", "outer_optimizer": OuterOptimizer(clip_norm=0.05)},
            0,
            id="fp4_and_clip",
        ),
        pytest.param(
            {"compression": "sparse", "outer_optimizer": partial(DelayedNesterov, every=2)},
            0,
            id="sparse_and_delayed_nesterov",
        ),
        pytest.param({"compression": RandomK(4, FP4())}, 1, id="random_k_and_one_absent"),
        pytest.param({"compression": KEPT}, 0, id="kept"),
        pytest.param(
            {"compression": RandomK(4, FP4()), "dense_beginning": DenseBeginning(5, 3)},
            0,
            id="dense_and_random_k",
        ),
        pytest.param(DENSE_AND_FALLING, 0, id="dense_and_a_rate_that_falls"),
        pytest.param({"outer_optimizer": EQUALISED}, 1, id="matrices"),
        pytest.param({"mixing": Carry(), "compression": KEPT}, 1, id="carry"),
        pytest.param({"mixing": DelayCompensation()}, 0, id="delay_compensation"),
        pytest.param({"weighing": ByNorm(0.05)}, 1, id="by_norm"),
        pytest.param({"weighing": WithoutLongest(), "compression": KEPT}, 0, id="without_longest"),
        pytest.param({"weighing": Nobody(), "mixing": Carry()}, 0, id="nobody"),
        pytest.param(
            {"outer_optimizer": EQUALISED, "dense_beginning": DenseBeginning(5, 3)},
            0,
            id="dense_and_matrices",
        ),
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


def applied_rounds(site: Site) -> list[int]:
    return [progress.applied.round for progress in site.fragments]


def test_a_late_joiner_launches_as_often_as_the_round_of_the_record_says() -> None:
    dense = {**CHOICES, "fragments": [["*"]], "dense_beginning": DenseBeginning(6, 3, 1)}
    sites = founded(2, **dense)
    train(sites, 10)
    assert applied_rounds(sites[0]) == [3]
    late = Site(sites[0].hub, 2, mlp(3), **dense)
    late.engine.join()
    sites.append(late)
    train(sites, 24)
    # Rounds 4 to 6 after inner steps 12, 15 and 18 of the others, round 7 after 18 + 8.
    assert sites[0].hub.counted()[3:] == [["s0", "s1", "s2"]] * 5
    assert sites[0].hub.records()[-1].timings != ()
    launch_steps = [progress.launched_at for site in sites for progress in site.fragments]
    assert launch_steps == [34, 34, 24]
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


# Of two sites: micro-batches of a step, and the samples that one of them reports.
TRAINED: list[dict[str, Any]] = [{"trained": 3}, {"trained": 2, "samples": 16}]


def test_a_site_weighs_by_the_samples_it_trained() -> None:
    sites = founded(2, **CHOICES)
    for _ in range(12):
        sites[0].hub.passes(STEP)
        for site, trained in zip(sites, TRAINED, strict=True):
            site.begin_step(**trained)
        for site in sites:
            site.land()
    first_record = sites[0].hub.records(0)[0]
    assert [counted.weight for counted in first_record.counted] == [3 * 8, 16 * 8]


def test_progress_carried_over_two_rounds_equals_that_of_one_long_round() -> None:
    choices = {**CHOICES, "overlap_steps": 0, "compression": "fp32", "outer_momentum": 0.0}
    late, still = founded(2, **choices)
    # The other site does not move, and neither do the outer parameters while it counts alone.
    still.optimizer.param_groups[0]["lr"] = 0.0
    late.die()
    train([late, still], 24)
    assert set(map(tuple, still.hub.counted())) == {("s1",)}
    late.reconnect()
    train([late, still], 8)
    carried = still.hub.contributions("s0")[0]
    alone = founded(1, **{**choices, "sync_every": carried.weight})[0]
    train([alone], 2 * carried.weight)
    long_round = alone.hub.contributions("s0")[0]
    assert carried.weight > 16
    assert (carried.weight, carried.payloads) == (long_round.weight, long_round.payloads)


# Sites that die and return


class Run:
    """Sites of which all steps are accounted for, whoever dies."""

    def __init__(self, count: int, **choices: Any) -> None:
        self.choices = {**CHOICES, **choices}
        self.sites = dict(enumerate(founded(count, **self.choices)))
        self.hub = self.sites[0].hub
        self.trained: Counter[int] = Counter()
        self.lost: Counter[tuple[int, int]] = Counter()
        self.held: dict[int, list[int]] = {}

    def train(self, steps: int, *only: int) -> None:
        """These sites make inner steps, or all; the others give heartbeats."""
        running = [site for index, site in self.sites.items() if not only or index in only]
        idle = [site for site in self.sites.values() if site not in running]
        train(running, steps, idle)
        self.trained.update({site.index: steps for site in running})

    def die(self, *indices: int) -> None:
        for index in indices:
            site = self.sites.pop(index)
            site.die()
            self.held[index] = [progress.steps for progress in site.fragments]

    def return_site(self, index: int, state: dict[str, Any] | None, joins: bool = True) -> Site:
        """Starts another incarnation, from a checkpoint or from nothing. The steps that it no
        longer holds are lost.
        """
        # A site that comes with nothing has the parameters of the founding, and waits for no donor.
        site = Site(self.hub, index, mlp(0 if state is None else 5), **self.choices)
        if state is not None:
            site.resume(state)
        if joins:
            site.engine.join()
        for progress, held in zip(site.fragments, self.held[index], strict=True):
            self.lost[index, progress.fragment] += held - progress.steps
        self.sites = dict(sorted({**self.sites, index: site}.items()))
        return site

    def pending(self, index: int, fragment: int = 0) -> int:
        """The steps that a site holds, or has in flight, and that no record counts yet."""
        progress = self.sites[index].fragments[fragment]
        counted = self.hub.contributions(f"s{index}", fragment)
        flight = progress.flight
        if flight is None or flight.own in counted:
            return progress.steps
        return progress.steps + flight.steps

    def counted(self, index: int, fragment: int = 0) -> int:
        """How many steps of a site count: it trains a sample a step."""
        contributions = self.hub.contributions(f"s{index}", fragment)
        return sum(contribution.weight for contribution in contributions)

    def check(self) -> None:
        """Asserts that all agree and count, and that every step that a site has trained counts
        once, or is pending or lost.
        """
        assert agree(list(self.sites.values()))
        for index, site in self.sites.items():
            for fragment in range(len(site.fragments)):
                steps = self.counted(index, fragment) + self.pending(index, fragment)
                steps += self.lost[index, fragment]
                assert steps == self.trained[index], (index, fragment)
        assert self.hub.counted()[-1] == [f"s{index}" for index in self.sites]


def test_sites_and_their_hub_die_and_return_and_each_step_counts_once() -> None:
    run = Run(3)
    run.train(9)
    assert run.sites[2].engine.rounds.in_flight
    early = run.sites[2].state()
    run.train(6)
    run.die(2)
    assert run.hub.counted() == [["s0", "s1", "s2"]]
    run.train(3)
    state = run.sites[1].state()
    run.die(1)
    run.train(30)
    assert run.hub.counted()[-3:] == [["s0"]] * 3, "the last site continues alone"
    run.return_site(1, state)
    # With an old checkpoint: it replays what it missed.
    run.return_site(2, early)
    run.train(2)
    assert run.sites[2].follower.lag == 0
    run.train(3)
    run.hub.restart()
    run.train(8)
    for site in run.sites.values():
        site.reconnect()
    run.train(16)
    run.check()
    # A site that leaves has all counted, and nothing twice when it comes back.
    state = run.sites[2].state()
    run.sites[2].engine.leave()
    assert run.sites[2].follower.finished
    for fragment in range(4):
        assert run.counted(2, fragment) + run.lost[2, fragment] == run.trained[2]
    run.die(2)
    run.train(10)
    assert run.hub.counted()[-1] == ["s0", "s1"]
    run.return_site(2, state)
    run.train(20)
    run.check()
    states = {}
    for index in range(2):
        run.train(3)
        states[index] = run.sites[index].state()
    run.train(5)
    records = run.hub.records()
    run.die(0, 1, 2)
    run.hub.restart()
    for index, state in states.items():
        run.return_site(index, state, joins=False)
    # The third has lost its disk too, and one joins: with other parameters, and the state of a
    # donor.
    for index in (2, 3):
        run.sites[index] = Site(run.hub, index, mlp(7), **CHOICES)
        assert not equal(run.sites[index].outer(), run.sites[0].outer())
    run.train(30)
    assert agree(list(run.sites.values()))
    assert max(site.follower.lag for site in run.sites.values()) <= 1
    assert run.hub.records()[: len(records)] == records
    assert run.hub.counted()[-1] == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize(
    "choice",
    [{}, {"dense_beginning": DenseBeginning(3, 4, 2)}, {"mixing": DelayCompensation()}],
    ids=["plain", "dense", "delay_compensation"],
)
def test_a_site_that_resumes_is_bitwise_that_which_never_stopped(choice: dict[str, Any]) -> None:
    choices = {**CHOICES, **choice}
    undisturbed = founded(2, **choices)
    stopped = founded(2, **choices)
    # In flight, between two flights, and with the steps carried while it was cut off.
    for step in (9, 12, 36):
        for sites in (undisturbed, stopped):
            if step == 36:
                sites[0].die()
                train(sites, 20)
                sites[0].reconnect()
            train(sites, step - sites[1].step)
        state = stopped[0].state()
        stopped[0].die()
        stopped[0] = Site(stopped[1].hub, 0, mlp(5), **choices)
        stopped[0].resume(state)
    train(undisturbed, 30)
    train(stopped, 30)
    for site, expected in zip(stopped, undisturbed, strict=True):
        assert equal(site.held(), expected.held())


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
    assert run.sites[0].engine.rounds.in_flight
    run.die(0)
    again = run.return_site(0, state if has_checkpoint else None)
    outer_before = again.outer()[0].clone()
    size = len(again.local())
    assert torch.equal(again.local(), outer_before[:size]), (
        "the steps of its earlier incarnation are in the round"
    )
    assert run.pending(0) == 0
    run.train(10, 0)
    assert run.hub.records() == []
    local_before = again.local()
    # The other one answers, and the round closes.
    train([run.sites[1]], 3)
    run.trained[1] += 3
    again.world.hear()
    again.land()
    assert (run.counted(0), again.fragments[0].applied.round) == (8, 1)
    moved = (again.outer()[0] - outer_before)[:size]
    assert torch.allclose(again.local(), local_before + moved, atol=1e-6)
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
            neighbor.world.hear()

    def alone(ranks: list[Site], steps: int) -> None:
        for _ in range(steps):
            hub.passes(STEP)
            neighbor.heartbeat()
            at_once(lambda rank: (rank.train(samples=1), rank.land()), ranks)

    site = started(0)
    neighbor = Site(hub, 1, **ONE_FRAGMENT)
    hear(site)
    alone(site, 6)
    states = at_once(lambda rank: rank.state(), site)
    # The hub would close the round at once where the first rank is the last to contribute.
    with patch.object(hub.coordinator, "tick"):
        alone(site, 3)
        site[0].die()
    again = started(5)
    at_once(lambda rank: rank.resume(states[rank.topology.group_rank]), again)
    at_once(lambda rank: rank.engine.join(), again)
    first_parameters = list(mlp().parameters())
    assert all(equal(list(rank.model.parameters()), first_parameters) for rank in again)
    alone(again, 5)
    assert [rank.fragments[0].samples for rank in again] == [10, 10]
    train([neighbor], 3)
    hear(again)
    at_once(lambda rank: rank.land(), again)
    (record,) = hub.records()
    assert [counted.launch for counted in record.counted] == [(1, site[0].follower.incarnation)]
    for rank in again:
        progress = rank.fragments[0]
        assert (progress.applied.round, progress.samples) == (1, 10)
    assert torch.equal(again[0].local(), again[1].local())


def test_ranks_forget_a_record_that_is_rolled_back_while_one_of_them_fetches_it() -> None:
    hubs = [Mock(now=lambda: 0.0) for _ in range(2)]

    def connected(topology: Topology) -> SharedConnection:
        return SharedConnection(topology, lambda rank, *_: hubs[rank])

    def heard(*events_of_ranks: list[Any]) -> list[Any]:
        for hub, events in zip(hubs, events_of_ranks, strict=True):
            hub.events.return_value = events
        of_first, of_second = at_once(lambda connection: connection.hear().events, connections)
        assert of_first == of_second
        return of_first

    connections = at_once(connected, topologies(2))
    first = Recorded(RECORDS[0], {})
    new_first = Recorded(replace(RECORDS[0], final=True), {})
    rollback = Welcomed(Welcome((Position.start(RUN_CONFIG),), (1,), rolled_back=True), None)
    assert heard([first], []) == []
    assert heard([rollback], []) == [rollback]
    assert heard([], [first]) == []
    assert heard([new_first], []) == []
    assert heard([], [new_first]) == [new_first]


def with_unlanded_payloads() -> list[Site]:
    """A site that has fetched records and not landed them, and the one that has made them."""
    sites = founded(2, 20, **ONE_FRAGMENT | {"grace": 1.0})
    behind, ahead = sites
    train([ahead], 30, heartbeat=[behind])
    behind.world.hear()
    assert len(behind.world._blobs) > 1
    return sites


def test_a_site_frees_the_payloads_of_records_that_are_rolled_back() -> None:
    behind, ahead = with_unlanded_payloads()
    ahead.hub.coordinator._roll_back(behind.fragments[0].applied.round + 1)
    behind.world.hear()
    assert len(behind.world._blobs) == 1


def test_a_site_frees_the_payloads_of_records_that_a_state_contains() -> None:
    behind, ahead = with_unlanded_payloads()
    behind.fragments[0].forget()
    fetch_state(behind, ahead)
    assert behind.fragments[0].applied == ahead.fragments[0].applied
    # One round has closed since.
    assert len(behind.world._blobs) == 1


def fetch_state(*sites: Site) -> None:
    """Lets sites ask for states and give them, without an inner step."""
    for _ in range(30):
        sites[0].hub.passes(STEP)
        for site in sites:
            site.world.hear()
            site.world._look_after()


def test_a_site_asks_a_donor_that_it_has_refused_again_if_there_is_no_other() -> None:
    sites = founded(2, 20, **ONE_FRAGMENT | {"grace": 1.0})
    behind, ahead = sites
    behind.fragments[0].forget()
    behind.world._refused += ["s1", "the snapshot"]
    fetch_state(behind, ahead)
    assert behind.follower.follows
    assert behind.world._refused == []


def test_a_rank_frees_the_payloads_of_a_record_that_is_rolled_back() -> None:
    hubs = [Mock(now=lambda: 0.0) for _ in range(2)]
    rollback = Welcomed(Welcome((Position.start(RUN_CONFIG),), (1,), rolled_back=True), None)
    connections = at_once(
        lambda topology: SharedConnection(topology, lambda rank, *_: hubs[rank]), topologies(2)
    )
    for event in (Recorded(RECORDS[0], {}), rollback):
        hubs[0].events.return_value = [event]
        hubs[1].events.return_value = []
        at_once(SharedConnection.hear, connections)
    assert [connection._payloads for connection in connections] == [{}, {}]


# Late and slow sites, and their log


@pytest.mark.parametrize("mixing", [0.25, Carry()])
def test_a_site_that_drops_late_contributions_still_mixes(
    mixing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(2, mixing=mixing, compression="fp32", late="drop")
    run.train(7)
    late = run.sites[0]
    late.die()
    run.train(4)
    local_before = first_parameter(late).clone()
    sent = sent_by(late)[: len(local_before)]
    late.reconnect()
    for _ in range(4):
        late.world.hear()
        late.land()
    assert late.fragments[0].applied.round == 1
    outer = late.outer()[0][: len(local_before)]
    mixed = 0.25 * local_before + 0.75 * outer
    if mixing != 0.25:
        mixed = local_before + (outer - sent)
    assert torch.allclose(first_parameter(late), mixed, atol=1e-6)
    assert "the contribution does not count" in caplog.text
    run.train(30)
    # Their first launches were too late.
    run.lost[0, 0] += 8
    run.lost[0, 1] += 10
    run.check()
    status: Any = run.hub.coordinator.status()
    fragments = len(status["fragments"])
    lost = status["sites"]["s0"]
    assert lost["lost_steps"] == round(18 / fragments, 1)
    assert lost["lost_share"] == round(18 / (41 * fragments), 4)
    assert status["sites"]["s1"]["lost_steps"] == 0


def sent_by(site: Site) -> Tensor:
    """The local values that a site launched with in the open round of the first fragment."""
    launch = site.world._launched[0].flight.launch
    return launch.outer - launch.gradient


@pytest.mark.parametrize("has_counted", [True, False])
def test_a_site_that_carries_keeps_its_progress_in_flight_when_it_takes_a_state(
    has_counted: bool,
) -> None:
    choices = {**CHOICES, "fragments": [["*"]], "compression": "fp32", "grace": 0.5}
    sites = founded(2, mixing=Carry(), **choices)
    train(sites, 7)
    behind, ahead = sites
    if not has_counted:
        behind.die()
    train(sites, 1)
    sent = sent_by(behind)
    behind.die()
    train([ahead], 90)
    behind.train()
    local_before = behind.local().clone()
    outer_before = behind.outer()[0].clone()
    behind.reconnect()
    for _ in range(8):
        behind.world.hear()
        behind.land()
        ahead.world.hear()
    assert behind.fragments[0].applied.round > 8
    reference = sent if has_counted else outer_before
    expected = local_before + (behind.outer()[0] - reference)
    assert (["s0", "s1"] in ahead.hub.counted()) == has_counted
    assert not torch.equal(sent, outer_before)
    assert torch.allclose(behind.local(), expected, atol=1e-6)
    assert agree(sites)
    train(sites, 24)
    assert ahead.hub.counted()[-1] == ["s0", "s1"]


def first_parameter(site: Site) -> Tensor:
    return next(site.model.parameters()).detach().flatten()


def test_a_site_that_joins_in_mid_schedule_hears_that_its_learning_rate_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = founded(1, **CHOICES)[0]
    rate = first.optimizer.param_groups[0]["lr"]
    first.optimizer.param_groups[0]["lr"] = rate / 10
    train([first], 20)
    equal_site = Site(first.hub, 1, **CHOICES)
    equal_site.optimizer.param_groups[0]["lr"] = rate / 9
    fresh = Site(first.hub, 2, **CHOICES)
    train([first, equal_site, fresh], 40)
    warnings = [text for text in caplog.messages if "inner learning rate" in text]
    assert len(warnings) == 1, warnings
    (warning,) = warnings
    assert f"of s2 is {rate:.3g}, but the other sites use {rate / 10:.3g}" in warning
    sites: Any = first.hub.coordinator.status()["sites"]
    rates = [sites[f"s{index}"]["inner_lr"] for index in range(3)]
    assert rates == pytest.approx([rate / 10, rate / 9, rate])


def told_at_joining(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The levels and texts of the messages about the schedule since the last call."""
    messages = []
    for record in caplog.records:
        if "inner steps" in record.getMessage():
            messages.append((record.levelname, record.getMessage()))
    caplog.clear()
    return messages


def test_a_site_that_joins_is_told_what_others_have_trained_and_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "lightning_sdiloco")
    sites = founded(3, **CHOICES)
    for site in sites:
        site.engine.join(planned_steps=1000)
    train(sites[1:], 5)
    train(sites, 20)
    assert told_at_joining(caplog) == []
    equal_site = Site(sites[0].hub, 3, **CHOICES)
    equal_site.engine.join(planned_steps=1009)
    message = (
        "Site s3 has trained 0 inner steps and plans 1,009. When it joined, the other sites had"
        " trained 25 (median) and planned 1,000."
    )
    assert told_at_joining(caplog) == [("INFO", message)]
    shorter = Site(sites[0].hub, 4, **CHOICES)
    shorter.engine.join(planned_steps=500)
    train([*sites, equal_site, shorter], 4)
    shorter.reconnect()
    train([*sites, equal_site, shorter], 4)
    (_, (level, warning)) = told_at_joining(caplog)
    assert level == "WARNING"
    assert "s4 plans 500 inner steps in total, but the other sites plan 1,000 to 1,009." in warning
    assert "the same max_steps on all sites" in warning
    status: Any = sites[0].hub.coordinator.status()["sites"]
    assert [status[name]["inner_steps"] for name in ("s0", "s1", "s4")] == [28, 33, 8]
    assert [status[name]["planned_steps"] for name in ("s0", "s3", "s4")] == [1000, 1009, 500]


@pytest.mark.parametrize(
    ("planned_of_others", "planned", "message"),
    [
        ((1000, 2000), 500, "planned 1,000 to 2,000"),
        ((1000, None), 500, "planned an unknown number"),
        ((1000, 1000), None, "s2 has trained 0 inner steps and plans an unknown number."),
    ],
)
def test_a_site_is_not_warned_of_plans_that_are_unknown_or_already_differ(
    planned_of_others: tuple[int | None, ...],
    planned: int | None,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "lightning_sdiloco")
    sites = founded(2, **CHOICES)
    for site, planned_steps in zip(sites, planned_of_others, strict=True):
        site.engine.join(planned_steps=planned_steps)
    train(sites, 10)
    Site(sites[0].hub, 2, **CHOICES).engine.join(planned_steps=planned)
    ((level, text),) = told_at_joining(caplog)
    assert level == "INFO"
    assert message in text


def test_a_resumed_site_is_told_its_steps_beside_those_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "lightning_sdiloco")
    sites = founded(2, 12, **CHOICES)
    state = sites[1].state()
    sites.pop().die()
    train(sites, 8)
    again = Site(sites[0].hub, 1, mlp(5), **CHOICES)
    again.resume(state)
    again.engine.join(planned_steps=100)
    ((_, text),) = told_at_joining(caplog)
    assert "s1 has trained 12 inner steps and plans 100." in text
    assert "the other sites had trained 20 (median)" in text


def test_a_site_and_a_hub_without_planned_steps_are_understood() -> None:
    sites = founded(2, 10, **CHOICES)
    hub = sites[0].hub
    # A site of an earlier version, which sends no steps.
    header = dict(sites[0].connection.heartbeat_header)
    del header["steps"]
    hub.coordinator.heartbeat(sites[0].connection._client._peer, header)
    status: Any = hub.coordinator.status()["sites"]
    assert status["s0"]["inner_steps"] is None
    # What such a hub reads of a heartbeat is unchanged, and such a site ignores the new event.
    assert "inner_steps" not in sites[1].connection.heartbeat_header["heartbeat"]
    assert read_event(Event("kind of a later version", {}, b"{}")) is None


@pytest.mark.parametrize("planned_steps", [-1, 2.5, math.inf, True])
def test_planned_steps_that_are_no_number_of_steps_are_refused(planned_steps: Any) -> None:
    (site,) = founded(1, **CHOICES)
    with pytest.raises(ValueError, match=f"planned_steps={planned_steps!r} is"):
        site.engine.join(planned_steps=planned_steps)


def test_a_donor_whose_outer_parameters_changed_in_memory_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    donor = founded(1, **CHOICES)[0]
    train([donor], 20)
    donor.outer()[0][0] += 1.0
    newcomer = Site(donor.hub, 1, mlp(3), **CHOICES)
    for _ in range(4):
        newcomer.train()
        newcomer.land()
        donor.world.hear()
    assert newcomer.world.follower.wants_state
    assert "The outer parameters of s0 have changed in memory" in caplog.text


class SlowPayloads:
    """Holds back the records of a connection, and their payloads, for so many waits."""

    def __init__(self, connection: Any, waits: int) -> None:
        self.waits_left = waits
        self.held: list[Any] = []
        self._wait = connection.wait
        self._events = connection.events
        connection.wait = self.wait
        connection.events = self.events

    def wait(self, timeout: float) -> bool:
        self.waits_left -= 1
        return bool(self._wait(timeout))

    def events(self) -> list[Any]:
        events = [*self.held, *self._events()]
        self.held = []
        if self.waits_left > 0:
            self.held = [event for event in events if isinstance(event, Recorded)]
        return [event for event in events if event not in self.held]


def slow(site: Site, waits: int) -> Site:
    SlowPayloads(site.connection, waits)
    return site


def test_a_site_that_returns_with_a_flight_continues_once_it_has_the_closed_rounds() -> None:
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
    assert again.engine.rounds.in_flight
    again.engine.join()
    again.die()
    train([again], 3)
    for progress in again.fragments:
        assert progress.applied.round == progress.closed > 0


@pytest.mark.parametrize("survivor", [None, 0])
def test_a_round_whose_payloads_the_hub_has_lost_lands_all_the_same(survivor: int | None) -> None:
    """Both sites send theirs again; or the one that has the other's gives its state."""
    sites = founded(2, 20, **CHOICES)
    hub = sites[0].hub
    notify = hub.notify
    lost_records = list[Record]()

    def lose_payloads(event: Event, to: Any = None) -> None:
        record = Record.from_bytes(event.body) if event.kind == "record" else None
        if record and not lost_records and len(record.counted) == 2:
            lost_records.append(record)
            for index, (payload,) in enumerate(record.sources):
                if index != survivor:
                    hub.store.drop(payload.key)
        notify(event, to)

    hub.coordinator.start(lose_payloads)
    train(sites, 15)
    assert lost_records
    train(sites, 60)
    assert min(map(min, map(applied_rounds, sites))) > lost_records[0].round + 1
    assert agree(sites)
    assert all(site.follower.follows for site in sites)
    sent_again = hub.coordinator.statistics["s1"]
    assert sent_again.late == 0


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
    (message,) = caplog.messages
    assert message.startswith("Site s0 waits: ")
    sites = [first, Site(hub, 1, **CHOICES)]
    for site in (*sites, *sites):
        site.world.hear()
    train(sites, 5)
    caplog.clear()
    for _ in range(2):
        first.die()
        train(sites, 2)
    first.reconnect()
    train(sites, 2)
    gone, back = caplog.messages
    assert "continues training without the hub" in gone
    assert back == "The hub is back, and site s0 is sending its training."
    caplog.clear()
    with patch.object(hub.journal, "append", Mock(side_effect=NoSpace("the disk is full"))):
        train(sites, 12)
    train(sites, 8)
    full, *continuing, over = caplog.messages[:4]
    assert full == "the disk is full"
    assert sorted(continuing) == [
        f"Site s{i} continues to train while no rounds close: the disk is full" for i in (0, 1)
    ]
    assert over == "rounds can close again, because this problem is resolved: the disk is full"
    assert caplog.messages[4:] == ["Rounds close again."] * 2


# A hub that knows less than its sites: they train on for their patience


def earlier(hub: VirtualHub, records: int) -> SQLiteLedger:
    """The ledger as it was after so many records."""
    ledger = SQLiteLedger(MEMORY)
    ledger.note(hub.journal.notes())
    for seq, record in list(hub.journal.read())[:records]:
        ledger.append(seq, record)
    return ledger


def samples_of(site: Site) -> int:
    """The samples of the first fragment: counted, held and in flight."""
    progress = site.fragments[0]
    counted = site.hub.contributions(f"s{site.index}")
    samples = progress.samples + sum(contribution.weight for contribution in counted)
    if progress.flight:
        samples += progress.flight.own.weight
    return samples


def test_sites_train_on_while_the_hub_lacks_its_ledger_and_count_everything_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sites = founded(2, steps=40, **CHOICES)
    hub = sites[0].hub
    full_ledger = hub.journal
    local_before = sites[0].local().clone()
    restarted(sites, earlier(hub, 6))
    train(sites, 20)
    assert not torch.equal(sites[0].local(), local_before)
    warning = "The site continues training without that hub"
    warnings = [text for text in caplog.messages if warning in text]
    assert len(warnings) == 2, warnings
    restarted(sites, full_ledger)
    train(sites, 30)
    assert agree(sites)
    for index, site in enumerate(sites):
        assert samples_of(site) == 90, index

    sites[0].follower._patience = 1.0
    restarted(sites, earlier(hub, 6))
    train(sites, 1)
    hub.passes(1.5)
    sites[0].reconnect()
    with pytest.raises(ExchangeError, match=r"patience=1 s.*The hub has 2 rounds"):
        train(sites, 1)


def test_sites_with_checkpoints_newer_than_a_backup_refound_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    killed = founded(2, steps=40, **CHOICES)
    hub = killed[0].hub
    states = [site.state() for site in killed]
    rounds_before = killed[0].fragments[0].applied.round
    for site in killed:
        site.die()
    # The other way: a hub on the backup says in words that it is no way.
    hub.journal = earlier(hub, 2)
    hub.restart()
    sites = [Site(hub, index, **CHOICES) for index in range(2)]
    for site, state in zip(sites, states, strict=True):
        site.resume(state)
    train(sites, 1)
    trouble = str(hub.coordinator.status()["trouble"])
    assert "s0 has applied 4 rounds of fragment 0, but this ledger has only 1" in trouble
    assert "sdiloco hub --refound" in trouble
    assert caplog.messages.count(trouble) == 1
    assert any("sdiloco hub --refound" in text for text in caplog.messages if "Site s0" in text)
    hub.journal = SQLiteLedger(MEMORY)
    hub.coordinator = Coordinator("run", hub.journal, hub.store, 2, hub.clock, refound=True)
    hub.coordinator.start(hub.notify)
    for site in (*sites, *sites):
        site.die()
        site.reconnect()
    train(sites, 40)
    assert agree(sites)
    assert sites[0].fragments[0].applied.round > rounds_before


def test_after_a_pause_of_the_hub_no_round_closes_with_the_first_site_alone() -> None:
    first, second = founded(2, steps=12, sync_every=4, overlap_steps=1, grace="auto")
    hub = first.hub
    hub.passes(100.0)
    hub.coordinator.resumed(100.0)
    first.die()
    second.die()
    first.reconnect()
    rounds_before = len(hub.counted())
    train([first], 12)
    second.reconnect()
    train([first, second], 12)
    counted = hub.counted()[rounds_before:]
    assert counted
    assert all(sites == ["s0", "s1"] for sites in counted)


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


def trained_loss(count: int, seed: int, is_faulty: bool) -> float:
    """The loss of the first site, after the last one became a constant halfway or did not."""
    sites = founded(count, **GUARDED)
    for site in sites:
        site.index += 10 * seed
    train(sites, 100)
    if is_faulty:
        become_a_constant(sites[-1])
    train(sites, 100)
    assert agree(sites)
    left_out = {entry.site for record in sites[0].hub.records() for entry in record.left_out}
    assert left_out == ({f"s{count - 1}"} if is_faulty else set())
    batches = [batch(9, step) for step in range(50)]
    return fmean(float(nn.functional.mse_loss(sites[0].model(x), y)) for x, y in batches)


@pytest.mark.parametrize("count", [2, 3])
def test_a_site_whose_parameters_become_one_constant_costs_the_others_nothing(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    sound = [trained_loss(count, seed, is_faulty=False) for seed in range(3)]
    assert "was left out" not in caplog.text
    faulty = trained_loss(count, 0, is_faulty=True)
    assert faulty == pytest.approx(fmean(sound), abs=3 * stdev(sound))
    round = 100 // 8 + 1
    contribution = f"This site's contribution to round {round} of fragment 0"
    assert f"{contribution} was left out: it is" in caplog.text
    hub = f"round {round} of fragment 0 leaves out the contribution of s{count - 1}: it is"
    assert hub in caplog.text


@pytest.mark.parametrize("period", [1, 2], ids=["always", "in every second round"])
def test_a_site_that_is_left_out_again_and_again_is_asked_to_leave(period: int) -> None:
    sites = founded(3, steps=48, **GUARDED)

    def train_with_a_constant() -> None:
        for step in range(160):
            if step // 8 % period == 0:
                become_a_constant(sites[2])
            train(sites, 1)

    message = (
        "8 of the last 16 contributions of s2 to fragment . were left out, most recently because"
    )
    with pytest.raises(AgreementError, match=f"{message} it is .* for s2 itself, .* of s0, s1"):
        train_with_a_constant()
    remaining = sites[:2]
    sites[2].die()
    train(remaining, 20)
    assert agree(remaining)
    assert torch.cat(remaining[0].outer()).abs().max() < 5


def test_a_federation_without_the_guard_is_bit_identical_to_one_that_omits_nobody() -> None:
    outer = list[list[Tensor]]()
    for guard in (None, "auto"):
        optimizer = OuterOptimizer(outlier_guard=guard)
        sites = founded(2, steps=40, **GUARDED, outer_optimizer=optimizer)
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


def agreed_parameters(
    sites: Sequence[Sequence[Site]], rounds: Sequence[int] = (3, 2, 2)
) -> list[Tensor]:
    """The outer parameters of the fragments that all sites hold at the same round: these rounds,
    and equal values at all sites.
    """
    first, *remaining = map(outer_parameters, sites)
    for outer in remaining:
        for record in [*first]:
            if record in outer:
                assert torch.equal(outer[record], first[record])
            else:
                del first[record]
    assert [record.split(",")[0] for record in first] == [
        f"{p} Position(round={r}" for p, r in enumerate(rounds)
    ]
    return list(first.values())


@pytest.mark.parametrize(
    ("direction", "mixing"), [("elementwise", DelayCompensation()), ("equalised", "auto")]
)
def test_the_number_of_ranks_of_a_site_changes_no_bit(direction: Any, mixing: Any) -> None:
    # Each is weighed with four samples, of which ranks may have trained unequal numbers.
    optimizer = OuterOptimizer(direction=direction)
    choices = {**CHOICES, "compression": "fp32", "outer_optimizer": optimizer, "mixing": mixing}
    alone = train_ranked((1, 1, 1), 26, normed, (4, 4, 4), **choices)
    requests = []
    gathered = list[int]()

    def after_step(rank: Site, step: int) -> None:
        if rank.index == 0 and rank.is_first_rank and step < 8:
            gathered.append(rank.topology.in_site.gathered)  # type: ignore[attr-defined]
        if step == 5 and rank.topology.group_rank == 3:
            rank.engine.rounds.requests.ask(2)
        if rank.world.requested:
            requests.append((rank.index, step, rank.world.requested))

    sites = train_ranked((4, 2, 1), 26, normed, ((2, 0, 1, 1), 2, 4), after_step, **choices)
    # All ranks of a site hear the request of one of them after the next step.
    assert requests == [(0, 6, 2)] * 4
    # The reports of the ranks after an inner step without a launch go in one collective.
    assert gathered == list(range(gathered[0], gathered[0] + 7))
    assert equal(agreed_parameters(sites), agreed_parameters(alone))
    buffers = [untrained_of(rank) for rank in ranks_of([*alone, *sites])]
    assert all(equal(of_rank, buffers[0]) for of_rank in buffers)


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(
            {
                "outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2),
                "compression": "sparse",
            },
            id="delayed_nesterov_and_sparse",
        ),
        pytest.param(
            {"compression": ErrorFeedback(Threshold(1 / 4, Int2(), every=2))}, id="threshold"
        ),
        pytest.param({"compression": "random_k+memory"}, id="random_k"),
        pytest.param(
            {"compression": ByLink(["fp4+memory", "sparse"], within=1000.0)}, id="by_link"
        ),
    ],
)
def test_sites_of_several_ranks_agree_with_every_code_and_a_delayed_momentum(
    choices: dict[str, Any],
) -> None:
    sites = train_ranked((4, 2, 1), 26, normed, (4, 4, 4), **{**CHOICES, **choices})
    agreed_parameters(sites)


def test_buffers_of_a_site_that_are_not_finite_reach_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def poison(rank: Site, step: int) -> None:
        if rank.index == 1 and step == 7:
            rank.model[1].running_var[3] = float("nan")

    choices = {**CHOICES, "compression": "fp32", "mixing": 0.5}
    sites = train_ranked((1, 2, 1), 16, normed, (4, 2, 4), poison, **choices)
    for rank in ranks_of(sites):
        assert all(bool(values.isfinite().all()) for values in untrained_of(rank))
        assert rank.model[1].running_var.isfinite().all()
    message = (
        "excluded from the mean and replaced with the outer values: '1.running_var' of site 's1'."
    )
    assert message in caplog.text


def trained_with_buffers(mean: str, value: float, steps: dict[int, Sequence[int]]) -> VirtualHub:
    """The hub of five sites with running statistics, some of which spoil a variance at some
    steps.
    """

    def poison(rank: Site, step: int) -> None:
        if step in steps.get(rank.index, ()):
            rank.model[1].running_var[3] = value

    choices = {**CHOICES, "compression": "fp32", "mixing": 0.5, "mean": mean}
    sites = train_ranked((1, 2, 1, 1, 1), 32, normed, (4, 2, 4, 4, 4), poison, **choices)
    agreed_parameters(sites, (3, 3, 3))
    for rank in ranks_of(sites):
        statistics = [*untrained_of(rank), rank.model[1].running_var]
        assert all(values.abs().max() < 100 for values in statistics)
    hub = sites[0][0].hub
    assert {len(record.counted) for record in hub.records()} == {5}
    return hub


def wrong_buffers(hub: VirtualHub) -> list[tuple[int, str, str]]:
    """The round, site and reason, wherever a record leaves out buffers."""
    wrong = []
    for record in hub.records(0):
        wrong += [(record.round, entry.site, entry.reason) for entry in record.left_out]
    return wrong


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_buffers_far_too_large_are_left_out_and_named_while_the_site_counts(
    mean: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub = trained_with_buffers(mean, 1e20, {1: [7], 3: [15, 23], 4: [15]})
    reason = "buffers too large"
    assert wrong_buffers(hub)[:3] == [(1, "s1", reason), (2, "s3", reason), (2, "s4", reason)]
    status = hub.coordinator.status()["sites"]
    assert [status[f"s{site}"]["wrong_buffers"] for site in range(5)] == [0, 1, 0, 2, 1]
    assert "round 1 of fragment 0 leaves out the buffers of s1: its buffers are 1" in caplog.text
    warning = "The buffers that this site sent for round 1 of fragment 0 were left out: its buffers"
    assert warning in caplog.text


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_buffers_that_are_not_finite_are_named_by_the_hub_and_their_site(
    mean: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub = trained_with_buffers(mean, float("nan"), {1: [15]})
    assert wrong_buffers(hub) == [(2, "s1", "buffers not finite")]
    assert hub.coordinator.status()["sites"]["s1"]["wrong_buffers"] == 1
    assert "round 2 of fragment 0 leaves out the buffers of s1: buffers not finite" in caplog.text
    warning = "The buffers that this site sent for round 2 of fragment 0 were left out: buffers not"
    assert warning in caplog.text


def set_parameters(model: nn.Module, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values, model.parameters())


def test_ranks_share_the_bytes_that_their_site_sends_and_fetches() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        set_parameters(model, torch.full((WIDE,), 1.0 + number))

    sites = train_ranked((4, 4, 1), 18, wide, (1, 1, 4), step=step, **CHOICES)
    agreed_parameters(sites, (2, 1))
    (alone,) = sites[2]
    expected = alone.engine.report()
    bytes_sent = expected["bytes_sent"]
    for site in sites[:2]:
        for rank in site:
            report = rank.engine.report()
            assert report["bytes_sent"] == pytest.approx(bytes_sent / 4, rel=0.02)
            assert report["bytes_sent"] >= first_payload_bytes(rank) > 0
            # Of the other site with four ranks each fetches a quarter; of that with one rank 0
            # fetches all.
            shares = 1 / 4 + rank.is_first_rank
            assert report["bytes_received"] == pytest.approx(shares * bytes_sent, rel=0.02)
    assert expected["bytes_received"] == pytest.approx(2 * bytes_sent, rel=0.02)


def first_payload_bytes(rank: Site) -> int:
    """The bytes of the payloads of a rank in the first round of each fragment."""
    records = [record for record in rank.hub.records() if record.round == 1]
    contributions = [record.of(f"s{rank.index}") for record in records]
    payloads = [sent.payloads[rank.topology.group_rank] for sent in contributions if sent]
    return sum(payload.size for payload in payloads)


# Ends


def outer_states(rank: Site) -> list[dict[str, Any]]:
    return [
        {**fragment.outer.state, "memory": fragment.memory, "tuning": fragment.tuning}
        for fragment in rank.engine.fragmented_model.fragments
    ]


class EndAfter:
    """Ends the run after an inner step, and copies the outer states that all ranks had then."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self.states: list[tuple[Site, Any]] = []

    def __call__(self, rank: Site, step: int) -> None:
        if step != self.last_step:
            return
        assert not rank.engine.rounds.in_flight
        self.states.append((rank, copy.deepcopy(outer_states(rank))))
        if rank.index == 0 and rank.is_first_rank:
            rank.hub.coordinator.end()


def values_at_the_end(steps: int) -> list[Tensor]:
    """The parameters of three sites: equal ones, unless nothing has been launched."""
    if steps >= CHOICES["sync_every"]:
        return [torch.full((WIDE,), 0.999)] * 3
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    return [torch.empty(WIDE).uniform_(0.5, 1.5, generator=draw) for draw in generators]


@pytest.mark.parametrize(
    ("compression", "steps", "ranks"),
    [
        # Before anything was launched, from three values: their plain mean in float32.
        pytest.param("fp4", 3, (4, 2, 1), id="fp4"),
        pytest.param("fp4+memory", 15, (4, 2, 1), id="memory"),
        pytest.param(KEPT, 15, (4, 2, 1), id="kept"),
        pytest.param(ByLink(["fp4", "sparse"], within=1000.0), 15, (1, 1, 1), id="by_link"),
    ],
)
def test_a_run_ends_with_the_mean_of_the_values_of_all_its_sites(
    compression: Any, steps: int, ranks: tuple[int, ...]
) -> None:
    """The end is no outer step: it changes no state of the outer optimizer, and leaves nothing
    out.
    """
    values = values_at_the_end(steps)
    mean = torch.stack(values).double().mean(dim=0).float()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        set_parameters(model, values[site].clone())

    end = EndAfter(steps)
    optimizer = OuterOptimizer(clip_norm=0.05)
    choices = {**CHOICES, "compression": compression, "outer_optimizer": optimizer}
    sites = train_ranked(ranks, steps + 16, wide, (1,) * len(ranks), end, step, **choices)
    for rank, states in end.states:
        assert rank.world.is_over
        torch.testing.assert_close(outer_states(rank), states, rtol=0, atol=0)
    for site in sites:
        outer = torch.cat(list(outer_parameters(site).values()))
        assert torch.allclose(outer, mean, rtol=2**-8, atol=0.0)


LAST = [True, True]
ROUNDED = [False, False]


def train_to_the_end(sites: Sequence[Site], exact: Sequence[Sequence[Sequence[bool]]]) -> None:
    """Trains until the run is over, which is soon; asserts which contributions to its records were
    exact.
    """
    for _ in range(12):
        running = [site for site in sites if not site.world.is_over]
        if running:
            train(running, 1)
    assert not running
    assert equal(sites[0].outer(), sites[1].outer())
    for fragment, exact_by_round in enumerate(exact):
        records = sites[0].hub.records(fragment)
        assert list(map(exact_contributions, records)) == exact_by_round
        final = [record.final for record in records]
        assert final == [False] * (len(exact_by_round) - 1) + [True]


def exact_contributions(record: Record) -> list[bool]:
    return [contribution.exact for contribution in record.counted]


def test_a_run_that_ends_by_its_run_config_sends_its_last_round_alone_in_float32() -> None:
    sites = founded(2, steps=15, rounds=2, **CHOICES)
    train_to_the_end(sites, [[ROUNDED, LAST]] * 4)


def with_teacher() -> nn.Module:
    model = normed()
    model[0].teacher = copy.deepcopy(model[0]).requires_grad_(False)
    return model


def teacher(rank: Site) -> Tensor:
    return rank.model[0].teacher.weight


def step_with_teacher(model: Any, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
    train_step(model, optimizer, site, number)
    with torch.no_grad():
        pairs = zip(model[0].teacher.parameters(), model[0].parameters(), strict=False)
        for followed, trained in pairs:
            followed.lerp_(trained, 0.1)


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_at_the_end_all_sites_hold_the_teacher_of_the_first_one(mean: str) -> None:
    launched = list[Tensor]()

    def after_step(rank: Site, step: int) -> None:
        flight = rank.fragments[0].flight
        if rank.index == 0 and not launched and flight and flight.own.exact:
            launched.append(teacher(rank).clone())

    choices = {**CHOICES, "rounds": 2, "mean": mean, "compression": "fp4"}
    sites = train_ranked(
        (1, 2, 1), 40, with_teacher, (4, 2, 4), after_step, step_with_teacher, **choices
    )
    ranks = ranks_of(sites)
    assert all(rank.world.is_over for rank in ranks)
    before = [teacher(rank).clone() for rank in ranks]
    assert not equal(before, [before[0]] * len(ranks))
    at_once(lambda rank: rank.engine.finish(), ranks)
    assert equal([teacher(rank) for rank in ranks], launched * len(ranks))
    first_round, last_round = map(exact_contributions, ranks[0].hub.records(0))
    assert (first_round, last_round) == ([False] * 3, [True] * 3)
    # So does a site that comes after it, and is given a state.
    donor = ranks[-1].engine.fragmented_model.fragments[0]
    state = to_part(donor, [donor.outer.state_dict()])
    taken = from_part(ranks[0].engine.fragmented_model.fragments[0], state)
    assert equal([taken.of_first["0.teacher.weight"]], launched)


def with_queue() -> nn.Module:
    model = normed()
    model[0].register_buffer("queue", torch.zeros(4, 3))
    return model


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
    def step(model: Any, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
        train_step(model, optimizer, site, number)
        model[0].queue.fill_(site + 1)
        if site == rebinder and number > 5:
            model[0].queue = bound.clone()

    choices = {**CHOICES, "rounds": 2, "untrained": {"*.queue": "own"}}
    sites = train_ranked((1, 2, 1), 40, with_queue, (4, 2, 4), step=step, **choices)
    ranks = ranks_of(sites)
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
    # One site has launched for the round that was to be the last.
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
        terms = sites[1].follower.terms
        assert (terms.rounds, terms.grace) == (5, 2.5)
    with pytest.raises(ValueError, match="terms.rounds is 4 here and 3 there"):
        Site(hub, 1, **choices, rounds=4)
    train(sites, 40)
    assert [record.final for record in hub.records()] == [False] * 4 + [True]
    assert agree(sites)
    with pytest.raises(Refused, match="the run or some of its fragments have ended"):
        hub.coordinator.amend({"rounds": 9})


def test_a_round_open_when_an_operator_ends_the_run_closes_even_if_the_hub_dies() -> None:
    sites = founded(2, steps=7, **CHOICES)
    sites[0].train()
    hub = sites[0].hub
    hub.coordinator.end()
    assert list(hub.coordinator.ledger.open) == [0]
    restarted(sites[::-1])
    sites[1].train()
    train_to_the_end(sites, [[ROUNDED, LAST], [LAST], [LAST], [LAST]])


def test_float32_payloads_are_read_as_such_beside_compressed_ones() -> None:
    outer = OuterOptimizer(direction="elementwise")
    still, other = founded(2, **CHOICES, outer_lr=1.0, outer_momentum=0.0, outer_optimizer=outer)
    still.optimizer.param_groups[0]["lr"] = 0.0
    train([still, other], 7)
    unsent = list[Any]()
    send = still.connection.contribute
    still.connection.contribute = lambda *sent: unsent.append(sent)
    still.train()
    still.connection.contribute = send
    still.hub.coordinator.end()
    other.train()
    fragment = other.engine.fragmented_model.fragments[0]
    mean = (fragment.outer.values + fragment.layout.read()) / 2
    for sent in unsent:
        send(*sent)
    still.land()
    other.land()
    train([still, other], CHOICES["overlap_steps"])
    for site in (still, other):
        assert site.fragments[0].applied.round == 1
    assert torch.allclose(other.outer()[0], mean, rtol=1e-6, atol=1e-7)
    train_to_the_end([still, other], [[[False, True], LAST], [LAST], [LAST], [LAST]])


def test_a_checkpoint_of_the_last_launch_holds_the_same_bytes() -> None:
    sites = founded(2, steps=3, **CHOICES)
    sites[0].hub.coordinator.end()
    sites[0].connection.contribute = lambda *sent: None
    sites[0].train()
    state = sites[0].state()
    flights = [progress.flight for progress in sites[0].fragments]
    launched = [flight.own for flight in flights if flight]
    sites[0].die()
    sites[0] = Site(sites[1].hub, 0, mlp(5), **CHOICES)
    sites[0].resume(state)
    train_to_the_end(sites, [[LAST]] * 4)
    counted = [sites[0].hub.contributions("s0", fragment) for fragment in range(4)]
    assert sum(counted, []) == launched


# Refusals


def test_options_that_a_federation_cannot_offer_are_refused_by_name() -> None:
    sites = founded(2, **CHOICES)
    for choice, message in (
        ({"exchange": "two_shot"}, "two_shot"),
        ({"outer_optimizer": OuterOptimizer(outlier_guard=3.0)}, "guard"),
        ({"compression": "fp32"}, r"settings\.compression is 'fp32' here and 'fp4' there"),
    ):
        with pytest.raises(ValueError, match=message):
            Site(sites[0].hub, 2, **CHOICES, **choice)
    train(sites, 8)
    assert sites[0].engine.report()["launches"] == 1
    sites[0].model.append(nn.Linear(3, 3))
    train(sites, 1)
    with pytest.raises(AgreementError, match=r"2 parameters .* such as '7.weight'"):
        train(sites, 1)


ARGUMENTS = {"hub": "a.example:1", "run": "run", "site": "a", "insecure": True}
BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"lease": 0}, "lease=0 is out of range: it must be above 0"),
    ({"lease": "10"}, "lease='10' is of type str, not a number: it must be above 0"),
    (
        {"patience": timedelta(hours=1)},
        "is of type timedelta, not a number: it must be at least 0",
    ),
    (
        {"rounds": 2.0},
        "rounds=2.0 is of type float, not a whole number: it must be a whole number of at least 1",
    ),
    ({"hub": Path("/mnt/run")}, "is of type PosixPath, not a string. Set hub to an address"),
    (
        {"hub": "a.example"},
        "hub='a.example' is not an address. Use HOST:PORT, for example a.example:29400",
    ),
    (
        {"hub": "a.example:1,b.example"},
        "hub='b.example' is not an address. Use HOST:PORT",
    ),
    (
        {"hub": "a.example:99999"},
        "hub='a.example:99999' has port 99999, but a port must be a number from 1 to 65535",
    ),
    (
        {"hub": "a.example:0"},
        "hub='a.example:0' has port 0, but a port must be a number from 1 to 65535",
    ),
    ({"hub": "a.example:port"}, "hub='a.example:port' is not an address"),
    (
        {"hub": "/mnt/run"},
        "hub='/mnt/run' is a folder or bucket, but sites connect to a hub. Start a hub",
    ),
    ({"hub": "s3://bucket/run", "sites": 2}, "hub='s3://bucket/run' is a folder or bucket"),
    ({"insecure": False}, "site 'a' needs either keys or insecure=True"),
    ({"keys": "keys.bundle"}, "needs either keys or insecure=True"),
    ({"insecure": False, "keys": "no/such.bundle"}, "There are no keys at no/such.bundle"),
]


def test_a_federation_refuses_bad_numbers_addresses_and_keys_when_it_is_made(
    tmp_path: Path,
) -> None:
    init_keys(tmp_path, "run")
    bundle = add_keys(tmp_path, "b")
    of_b = {"insecure": False, "keys": bundle, "site": "b"}
    Federation("run", "[::1]:29400", "b", keys=bundle)
    Federation("run", "a.example:29400, b.example:29400", "b", keys=tmp_path)
    for arguments, message in (
        *BAD_ARGUMENTS,
        ({"insecure": False, "keys": bundle}, "The keys belong to site 'b', not to 'a'"),
        ({**of_b, "run": "other"}, "These keys are for run 'run', not for run='other'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Federation(**{**ARGUMENTS, **arguments})
