"""Faulty sites among five cost the others nothing: the loss at the end is within the spread of runs
without the fault. A site whose sign is flipped is named.
"""

from collections.abc import Callable, Collection
from math import nan
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm.guard import AGAINST
from lightning_sdiloco.engine.fragments import Launch
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation.messages import Contribution
from tests.federation.sites import STEP, Site, VirtualHub, agree
from tests.training import batch

SITES = 5
STEPS = 200
SYNC_EVERY = 8
BEGINS = 10
"""The round in which most faults begin."""

Spoil = Callable[[Launch], Launch]


class Fault(NamedTuple):
    """What becomes of the launches of some sites, in some rounds."""

    spoil: Spoil
    sites: Collection[int] = (4,)
    first: int = BEGINS
    last: int = STEPS
    period: int = 1

    def concerns(self, site: Site, round: int) -> bool:
        is_in_time = self.first <= round <= self.last and round % self.period == 0
        return site.index % 10 in self.sites and is_in_time


def constant(value: float) -> Spoil:
    return lambda launch: launch._replace(gradient=torch.full_like(launch.gradient, value))


def times(factor: float) -> Spoil:
    return lambda launch: launch._replace(gradient=launch.gradient * factor)


def buffers(value: float) -> Spoil:
    def spoil(launch: Launch) -> Launch:
        spoilt = list[Tensor]()
        for values in launch.buffers:
            spoilt.append(torch.full_like(values, value) if values.is_floating_point() else values)
        return launch._replace(buffers=spoilt)

    return spoil


FAULTS = {
    "a constant": Fault(constant(30.0)),
    "a constant at two": Fault(constant(30.0), sites=(3, 4)),
    "a constant in every second round": Fault(constant(30.0), period=2),
    "10 times as long": Fault(times(10.0)),
    "10 times as long in every second round": Fault(times(-10.0), period=2),
    "1e20 in the first round": Fault(constant(1e20), first=1, last=1),
    "buffers of 1e20": Fault(buffers(1e20)),
    "buffers of 1e20 in the first round": Fault(buffers(1e20), first=1, last=1),
    "buffers of 1e20 at two": Fault(buffers(1e20), sites=(3, 4)),
    "buffers of NaN": Fault(buffers(nan)),
}


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module, stream: int, number: int) -> Tensor:
    """The loss of a batch, whose targets follow from the inputs and some noise."""
    inputs, noise = batch(stream, number)
    weights = torch.arange(15.0).reshape(5, 3).sin()
    return nn.functional.mse_loss(model(inputs), (inputs @ weights).tanh() + 0.3 * noise)


def spoilt_by(fault: Fault, site: Site) -> None:
    """Makes a site send what a fault makes of its launches."""
    arithmetic = site.world._arithmetic
    encode = arithmetic.encode

    def encode_spoilt(launch: Launch, begun: Contribution) -> Any:
        return encode(fault.spoil(launch) if fault.concerns(site, begun.round) else launch, begun)

    arithmetic.encode = encode_spoilt


def step(sites: list[Site]) -> None:
    """Trains all sites for an inner step; one that is asked to leave is gone."""
    sites[0].hub.passes(STEP)
    for site in sites:
        site.step += 1
        site.optimizer.zero_grad()
        loss_of(site.model, site.index, site.step).backward()
        site.optimizer.step()
        site.begin_step()
    for site in list(sites):
        try:
            site.land()
        except AgreementError:
            site.die()
            sites.remove(site)


def trained_loss(mean: str, seed: int, fault: Fault | None = None) -> float:
    """The loss of the model at the end, on data that no site has seen."""
    hub = VirtualHub(SITES)
    choices: dict[str, Any] = {"sync_every": SYNC_EVERY, "overlap_steps": 2, "mean": mean}
    sites = [Site(hub, 10 * seed + index, normed(), **choices) for index in range(SITES)]
    for site in (*sites, *sites):
        site.world.hear()
    if fault is not None:
        for site in sites:
            spoilt_by(fault, site)
    for _ in range(STEPS):
        step(sites)
    assert agree(sites)
    faulty = {f"s{index}" for index in fault.sites} if fault else set[str]()
    assert {entry.site for record in hub.records() for entry in record.left_out} == faulty
    model = sites[0].model.eval()
    with torch.no_grad():
        return fmean(float(loss_of(model, 99, number)) for number in range(50))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_faulty_sites_among_five_cost_the_others_nothing(mean: str) -> None:
    sound = [trained_loss(mean, seed) for seed in range(5)]
    excess = dict[str, float]()
    for name, fault in FAULTS.items():
        excess[name] = (trained_loss(mean, 0, fault) - fmean(sound)) / stdev(sound)
    assert {name: times for name, times in excess.items() if not times < 3.0} == {}


# Directions


def trained_on(count: int, mean: str, fault: Fault | None, unlike: float = 0.0) -> list[Site]:
    """Trains sites for 20 rounds, on targets of their own as far as ``unlike`` says."""
    hub = VirtualHub(count)
    choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 1, "mean": mean}
    sites = [Site(hub, index, normed(), **choices) for index in range(count)]
    for site in (*sites, *sites):
        site.world.hear()
    for site in sites:
        if fault is not None:
            spoilt_by(fault, site)
    for _ in range(40):
        hub.passes(STEP)
        for site in sites:
            site.step += 1
            site.optimizer.zero_grad()
            inputs, _ = batch(site.index, site.step)
            weights = torch.arange(15.0).reshape(5, 3)
            targets = (weights.sin() + unlike * (weights + 50.0 * site.index).cos()).tanh()
            nn.functional.mse_loss(site.model(inputs), inputs @ targets).backward()
            site.optimizer.step()
            site.begin_step()
        for site in sites:
            site.land()
    assert all(not record.left_out for record in hub.records())
    return sites


def directions(sites: list[Site]) -> list[tuple[float, int]]:
    """The cosine of each site in the status of the hub, and how often it was against the others."""
    status: dict[str, Any] = sites[0].hub.coordinator.status()["sites"]
    return [(status[name]["cosine"], status[name]["against"]) for name in sorted(status)]


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    words = "'s contributions point against the other sites"
    return [text.split(words)[0] for text in texts if words in text]


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_a_flipped_site_of_four_is_named_by_itself_and_the_hub_and_still_counts(
    mean: str, caplog: pytest.LogCaptureFixture
) -> None:
    sites = trained_on(4, mean, Fault(times(-1.0), sites=(3,), first=1))
    assert sorted(named(caplog)) == ["This site", "s3"]
    *sound, (cosine, against) = directions(sites)
    assert cosine < -0.1
    assert against >= AGAINST
    assert all(against == 0 for _, against in sound)


def test_with_three_sites_a_flipped_one_shows_its_cosine_and_nobody_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sites = trained_on(3, "sites", Fault(times(-1.0), sites=(2,), first=1))
    assert named(caplog) == []
    *_, (cosine, against) = directions(sites)
    assert cosine < -0.1
    assert against == 0


def test_honest_sites_with_unlike_data_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    sites = trained_on(4, "sites", None, unlike=2.0)
    assert named(caplog) == []
    assert all(against < AGAINST / 2 for _, against in directions(sites))
