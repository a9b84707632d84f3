"""Predicts what a federation sends through its hub, and how often its fragments may travel."""

import math
from typing import NamedTuple

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.reduce import all_reduce_for
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.planner import MARGIN, SYNC_EVERY
from lightning_sdiloco.planning.workload import Groups, Model

# A site has so many connections to its hub.
_CHANNELS = 8

# One until a payload is at the hub and others hear of it, one until they have asked for it.
_ROUND_TRIPS = 2


class Enough(NamedTuple):
    sync_every: int
    overlap_steps: int


class HubLoad(NamedTuple):
    gbit_s: float
    sites: int
    bytes_in: int
    bytes_out: int
    share: float
    flight_seconds: float
    flight_steps: int
    enough: Enough | None


def through_hub(model: Model, settings: Settings, groups: Groups, link: Link, gbit_s: float) -> HubLoad:
    """Predicts what a federation, whose sites are the groups, sends through a hub of so many Gbit/s each way.

    Examples:
        >>> model, sites = Model.of_size(10**9, layers=24), Groups(step_time=1.0, groups=4)
        >>> load = through_hub(model, Settings(compression="bf16"), sites, Link(gbit_s=1.0), gbit_s=1.0)
        >>> load.bytes_in, load.bytes_out, load.share, load.enough
        (8000000000, 24000000000, 1.92, Enough(sync_every=300, overlap_steps=32))
    """
    require(0 < gbit_s < math.inf, "hub_bandwidth", gbit_s, "a positive number of Gbit/s")
    sites, payloads = groups.groups, _payloads(model, settings, groups)
    bytes_in = sites * sum(payloads)
    bytes_out = groups.others * bytes_in
    # What a round keeps the hub busy for, however often there is one.
    busy = _seconds(bytes_out, gbit_s)
    flight = _flight(max(payloads), groups, link, gbit_s)
    steps = max(1, math.ceil(flight / groups.step_time))
    fitting = [h for h in SYNC_EVERY if busy <= MARGIN * h * groups.step_time and steps < h]
    return HubLoad(
        gbit_s=gbit_s,
        sites=sites,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        share=busy / (settings.sync_every * groups.step_time),
        flight_seconds=flight,
        flight_steps=steps,
        enough=Enough(fitting[0], steps) if fitting else None,
    )


def hub_link(link: Link, sites: int, gbit_s: float) -> Link:
    """Returns the way between a site and its hub while all sites use the hub at the same time; without loss."""
    return Link(min(link.gbit_s_of(_CHANNELS), gbit_s / sites), link.round_trip)


def largest_payload(model: Model, settings: Settings, groups: Groups) -> int:
    return max(_payloads(model, settings, groups))


def _payloads(model: Model, settings: Settings, groups: Groups) -> list[int]:
    mixing = settings.chosen_for(groups.groups).landing.kept
    all_reduce = all_reduce_for("gather", groups.groups, settings.codec, mixing).at(0)
    return [all_reduce.payload_bytes(numel) for numel in model.fragments(settings)]


def _flight(payload: int, groups: Groups, link: Link, gbit_s: float) -> float:
    """Returns the seconds from when all sites launch until each has the payloads of all."""
    rate = hub_link(link, groups.groups, gbit_s).gbit_s
    return _seconds(payload, rate) + _seconds(groups.others * payload, rate) + _ROUND_TRIPS * link.round_trip


def _seconds(nbytes: float, gbit_s: float) -> float:
    return nbytes * 8e-9 / gbit_s
