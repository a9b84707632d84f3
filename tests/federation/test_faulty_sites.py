"""Faulty sites among five cost the others nothing: the loss at the end is within the spread of runs
without the fault.
"""

from collections.abc import Callable, Collection
from math import nan
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

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
