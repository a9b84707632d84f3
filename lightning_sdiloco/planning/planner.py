"""Predicts the cost and speed of each method on a link, recommends settings, and plans federations
and groups with unequal links.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from lightning_sdiloco.algorithm.config import OVERLAP_STEPS, Settings
from lightning_sdiloco.algorithm.partition import fewest_blocks, find_blocks
from lightning_sdiloco.algorithm.reduce import TwoShot, all_reduce_for
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.methods import DataParallel, Method, Streaming
from lightning_sdiloco.planning.paper import TARGETS
from lightning_sdiloco.planning.workload import Groups, Model

TARGET = 0.95
"""The compute utilisation that a recommendation should reach."""

MARGIN = 0.8
"""The share of the bandwidth that a recommendation may use."""

SYNC_EVERY = (30, 50, 100, 200, 300, 500)
"""The values of ``sync_every`` that the planner tries."""

HUB_CONNECTIONS = 8
"""The number of connections between a site and its hub."""

# One round trip until a payload is at the hub and the others learn of it, and one until they have
# fetched it.
_HUB_ROUND_TRIPS = 2


class Prediction(NamedTuple):
    """A method's utilisation and bytes on a link, and the bandwidth for each target utilisation."""

    utilisation: float
    bytes_per_step: float
    bytes: float
    peak_gbit_s: float
    gbit_s_for: dict[str, float | None]


def predict(method: Method, link: Link, steps: int) -> Prediction:
    """Predicts the utilisation, bytes and bandwidth for a number of inner steps."""

    @cache  # the searches for all targets begin with the same bandwidths
    def utilisation(exponent: float) -> float:
        return method.utilisation(replace(link, gbit_s=10**exponent))

    return Prediction(
        utilisation=method.utilisation(link),
        bytes_per_step=method.bytes_per_step,
        bytes=method.bytes_in(steps),
        peak_gbit_s=method.peak_gbit_s,
        gbit_s_for={str(target): _least(utilisation, target) for target in TARGETS},
    )


def _least(utilisation: Callable[[float], float], target: float) -> float | None:
    """Finds the lowest bandwidth between 1 kbit/s and 10 Tbit/s that reaches the target, or returns
    None if none does. ``utilisation`` is a function of the logarithm of the bandwidth. The result
    is accurate to 0.1 %.
    """
    low = -6.0
    high = 4.0
    if utilisation(high) < target:
        return None
    while high - low > 4e-4:
        middle = (low + high) / 2
        if utilisation(middle) >= target:
            high = middle
        else:
            low = middle
    return 10**high


def alternatives(model: Model, settings: Settings, groups: Groups) -> dict[str, Method]:
    """Returns DDP and three variants of the engine: one exchange of all fragments, separate
    fragments, and separate fragments with overlap.

    Examples:
        >>> model, link = Model.of_size(10**9, layers=24), Link(gbit_s=1.0)
        >>> methods = alternatives(model, Settings(), Groups(step_time=0.1))
        >>> {name: round(method.utilisation(link), 3) for name, method in methods.items()}
        {'ddp': 0.003, 'diloco': 0.701, 'streaming': 0.701, 'streaming_overlap': 0.974}
    """
    at_once = replace(settings, overlap_steps=0)
    return {
        "ddp": DataParallel(model, groups),
        "diloco": Streaming(model, replace(at_once, fragments=[["*"]]), groups),
        "streaming": Streaming(model, at_once, groups),
        "streaming_overlap": Streaming(model, settings, groups),
    }


def candidates(model: Model) -> Iterator[Settings]:
    """Yields candidate settings for a model, starting with those that change training the least."""
    fewest = fewest_blocks(len(find_blocks(model.parameters)))
    blocks_per_fragment = dict.fromkeys(max(layers, fewest) for layers in (3, 6, 12, 1))
    for sync_every, layers, overlap_steps, compression in product(
        SYNC_EVERY, blocks_per_fragment, OVERLAP_STEPS, ("fp32", "bf16", "fp4")
    ):
        yield Settings(
            sync_every, overlap_steps, fragments=f"strided:{layers}", compression=compression
        )


def recommend(
    model: Model, groups: Groups, link: Link, among: Iterable[Settings] | None = None
) -> Streaming:
    """Recommends the first candidate that reaches a utilisation of `TARGET`, or the best candidate
    if none does.
    """
    best: Streaming | None = None
    reached = 0.0
    for settings in candidates(model) if among is None else among:
        method = Streaming(model, settings, groups)
        busy = method.utilisation(with_margin(link))
        if busy > 1.01 * reached or busy >= TARGET:
            best = method
            reached = busy
        if reached >= TARGET:
            break
    assert best is not None, "there are candidates, and each trains for some of the time"
    return best


def with_margin(link: Link) -> Link:
    return replace(link, gbit_s=MARGIN * link.gbit_s)


# Federations, whose sites are the groups


class Enough(NamedTuple):
    sync_every: int
    overlap_steps: int


class HubLoad(NamedTuple):
    """The load that a federation puts on its hub, and settings that the hub can support."""

    gbit_s: float
    sites: int
    bytes_in: int
    bytes_out: int
    largest_payload: int
    share: float
    flight_seconds: float
    flight_steps: int
    enough: Enough | None


def through_hub(
    model: Model, settings: Settings, groups: Groups, link: Link, gbit_s: float
) -> HubLoad:
    """Predicts the load that a federation puts on its hub, and how often fragments can be
    exchanged.

    Examples:
        >>> model, sites = Model.of_size(10**9, layers=24), Groups(step_time=1.0, groups=4)
        >>> settings, link = Settings(compression="bf16"), Link(gbit_s=1.0)
        >>> load = through_hub(model, settings, sites, link, gbit_s=1.0)
        >>> load.bytes_in, load.bytes_out, load.share, load.enough
        (8000000000, 24000000000, 1.92, Enough(sync_every=300, overlap_steps=32))
    """
    require(0 < gbit_s < math.inf, "hub_bandwidth", gbit_s, "a positive number of Gbit/s")
    mixing = settings.chosen_for(groups.groups).landing.kept
    all_reduce = all_reduce_for("gather", groups.groups, settings.codec, mixing).at(0)
    payloads = [all_reduce.payload_bytes(numel) for numel in model.fragments(settings)]
    bytes_in = groups.groups * sum(payloads)
    bytes_out = groups.others * bytes_in
    # The seconds for which a round keeps the hub busy, regardless of how often rounds take place.
    busy = bytes_out * 8e-9 / gbit_s
    way = hub_link(link, groups.groups, gbit_s)
    # The time from the launch in all sites until each site has all payloads.
    flight = groups.groups * max(payloads) * 8e-9 / way.gbit_s + _HUB_ROUND_TRIPS * way.round_trip
    steps = max(1, math.ceil(flight / groups.step_time))
    return HubLoad(
        gbit_s=gbit_s,
        sites=groups.groups,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        largest_payload=max(payloads),
        share=busy / (settings.sync_every * groups.step_time),
        flight_seconds=flight,
        flight_steps=steps,
        enough=_enough(busy, steps, groups.step_time),
    )


def _enough(busy: float, steps: int, step_time: float) -> Enough | None:
    """Finds the lowest ``sync_every`` that leaves the hub some margin and every flight enough
    time.
    """
    for sync_every in SYNC_EVERY:
        if busy <= MARGIN * sync_every * step_time and steps < sync_every:
            return Enough(sync_every, steps)
    return None


def hub_link(link: Link, sites: int, gbit_s: float) -> Link:
    """Returns the lossless link from a site to its hub while all sites use the hub at once."""
    return Link(min(link.gbit_s_of(HUB_CONNECTIONS), gbit_s / sites), link.round_trip)


# Groups with unequal links


class SharedOut(NamedTuple):
    """The shares, bytes and seconds of two shots on each group's link, in group order."""

    links: tuple[float, ...]
    shares: tuple[float, ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    round_seconds: float
    equal_seconds: float

    @property
    def gain(self) -> float:
        """The speedup of a round compared with equal parts, if the links are the bottleneck."""
        return self.equal_seconds / self.round_seconds


def shared_out(
    model: Model, settings: Settings, groups: Groups, links: Sequence[float]
) -> SharedOut:
    """Predicts the gain from parts that match each group's bandwidth, given in Gbit/s.

    Examples:
        >>> groups = Groups(step_time=1.0, groups=4)
        >>> parts = shared_out(Model.of_size(10**9, layers=24), Settings(), groups, [1, 1, 1, 0.5])
        >>> round(parts.gain, 3), parts.shares[3]
        (1.5, 0.0)
    """
    for link in links:
        require(link > 0, "links", link, "positive numbers of Gbit/s")
    exchange = TwoShot("by_bandwidth", links=links)
    sent = _sent_by_group(exchange, model, settings, groups)
    sent_equally = _sent_by_group("two_shot", model, settings, groups)
    seconds = _seconds_on(links, sent)
    shares = exchange.shares(groups.groups) or (1 / groups.groups,) * groups.groups
    equal_seconds = max(_seconds_on(links, sent_equally))
    return SharedOut(tuple(links), shares, sent, seconds, max(seconds), equal_seconds)


def _sent_by_group(
    exchange: str | TwoShot, model: Model, settings: Settings, groups: Groups
) -> tuple[int, ...]:
    """Returns the bytes that each group sends in a round of all fragments."""
    all_reduce = all_reduce_for(exchange, groups.groups, settings.codec, 0.0).at(0)
    sent = [0] * groups.groups
    for numel in model.fragments(settings):
        shard = -(-numel // groups.group_size)
        for group in range(groups.groups):
            sent[group] += groups.group_size * all_reduce.bytes_to_others(shard, group)
    return tuple(sent)


def _seconds_on(links: Sequence[float], sent: Sequence[int]) -> tuple[float, ...]:
    return tuple(nbytes * 8e-9 / gbit_s for nbytes, gbit_s in zip(sent, links, strict=True))
