"""Predicts what a federation sends through its hub, how often its fragments may travel, and whom a round waits for."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_sdiloco.algorithm import Settings, all_reduce_for
from lightning_sdiloco.federation import RETENTION, Contribution, Quorum, Record, Timing
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.planner import MARGIN, SYNC_EVERY
from lightning_sdiloco.planning.workload import Groups, Model

# A site has so many connections to its hub.
_CHANNELS = 8

# One until a payload is at the hub and others hear of it, one until they have asked for it.
_ROUND_TRIPS = 2


class Enough(NamedTuple):
    """Settings with which a hub suffices."""

    sync_every: int
    overlap_steps: int


class HubLoad(NamedTuple):
    """What goes through a hub."""

    gbit_s: float
    sites: int
    bytes_in: int
    bytes_out: int
    share: float
    flight_seconds: float
    flight_steps: int
    enough: Enough | None


def through_hub(model: Model, settings: Settings, groups: Groups, link: Link, gbit_s: float) -> HubLoad:
    """Predicts what a federation sends through its hub.

    Args:
        model: The model.
        settings: The settings of the engine.
        groups: The sites, a worker group each.
        link: The way from a site to the hub.
        gbit_s: Gbit/s of the hub, in each direction.

    Raises:
        ValueError: If the bandwidth is out of its range.

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
    """Returns the bytes that a site sends of the largest fragment."""
    return max(_payloads(model, settings, groups))


def _payloads(model: Model, settings: Settings, groups: Groups) -> list[int]:
    mixing = settings.chosen_for(groups.groups).landing.kept
    all_reduce = all_reduce_for("gather", groups.groups, settings.codec, mixing).at(0)
    return [all_reduce.payload_bytes(numel) for numel in model.fragments(settings)]


def way_through_hub(sites: int, to_hub: float, from_hub: float, round_trip: float) -> Link:
    """Returns the way from a site to the others through their hub, as a link between worker groups.

    On the way a payload goes up and those of all others come down, and two round trips pass.

    Args:
        sites: How many sites there are.
        to_hub: Gbit/s to the hub while all sites send.
        from_hub: Gbit/s from the hub while it sends to all.
        round_trip: Seconds from the site to the hub and back.

    Examples:
        >>> way_through_hub(3, to_hub=0.1, from_hub=0.2, round_trip=0.01)
        Link(gbit_s=0.1, round_trip=0.02, loss=0.0)
    """
    others = max(1, sites - 1)
    return Link(others / (1 / to_hub + others / from_hub), round_trip=min(_ROUND_TRIPS * round_trip, 9.9))


def _flight(payload: int, groups: Groups, link: Link, gbit_s: float) -> float:
    """Returns the seconds from when all sites launch until each has the payloads of all."""
    rate = hub_link(link, groups.groups, gbit_s).gbit_s
    return _seconds(payload, rate) + _seconds(groups.others * payload, rate) + _ROUND_TRIPS * link.round_trip


def _seconds(nbytes: float, gbit_s: float) -> float:
    return nbytes * 8e-9 / gbit_s


# Whom a round waits for, by the rules that the hub follows


# A quorum that learns from the past has learned after so many rounds.
_ROUNDS = 3 * RETENTION


class Round(NamedTuple):
    """A round of a federation."""

    counted: tuple[str, ...]
    closes: float
    seconds: float


class Waits(NamedTuple):
    """What a quorum costs and saves, for the largest fragment."""

    arrives: dict[str, float]
    usual: Round
    longest: Round
    all: Round


class Way(NamedTuple):
    """The way between a site and its hub."""

    link: Link
    delay: float = 0.0

    def up(self, nbytes: int) -> float:
        """Returns when so many bytes are at the hub, in seconds from the launch."""
        return self.delay + self.down(nbytes)

    def down(self, nbytes: int) -> float:
        """Returns the seconds until so many bytes are at the site."""
        return nbytes * 8e-9 / self.link.gbit_s + self.link.round_trip


def waits(quorum: Quorum, grace: float, ways: Mapping[str, Way], payload: int, steps: int, step_time: float) -> Waits:
    """Plays rounds in which every site sends as it always does, until a quorum that learns has learned.

    Args:
        quorum: When a round closes.
        grace: Seconds after the first contribution after which it closes all the same.
        ways: The way between each site and the hub.
        payload: Bytes that a site sends.
        steps: Inner steps of a round.
        step_time: Seconds of an inner step.

    Raises:
        ValueError: If a number is out of its range, or no round would ever close.

    Examples:
        >>> from lightning_sdiloco.federation import All
        >>> ways = {name: Way(Link(gbit_s=1.0), delay) for name, delay in (("a", 0.0), ("b", 0.0), ("c", 8.0))}
        >>> told = waits(All(2), 3.0, ways, payload=125_000_000, steps=100, step_time=1.0)
        >>> told.usual.counted, told.usual.closes, told.all.closes
        (('a', 'b'), 4.0, 9.0)
    """
    require(0 <= grace < math.inf, "grace", grace, "at least 0 seconds")
    if quorum.fewest(len(ways)) > len(ways):
        raise ValueError(
            f"quorum={quorum!r} needs {quorum.fewest(len(ways))} sites for a round, and there are {len(ways)}: none"
            " would ever close. Give a smaller quorum."
        )
    arrives = {site: way.up(payload) for site, way in ways.items()}
    history: list[Record] = []
    rounds = []
    for _ in range(_ROUNDS):
        closes = _closes(quorum, history[-RETENTION:], arrives, grace)
        rounds.append(_round(closes, arrives, ways, payload))
        history.append(_record(len(history) + 1, rounds[-1].counted, arrives, steps, step_time))
    known = rounds[-RETENTION:]
    return Waits(
        arrives=arrives,
        usual=max(known, key=known.count),
        longest=max(known, key=lambda round: round.seconds),
        all=_round(max(arrives.values()), arrives, ways, payload),
    )


def _closes(quorum: Quorum, history: Sequence[Record], arrives: Mapping[str, float], grace: float) -> float:
    """Returns when the hub closes a round: it is asked whenever a contribution comes, and when the grace is over."""
    awaited, over = quorum.awaited(history, list(arrives)), min(arrives.values()) + grace
    for now in sorted({*arrives.values(), over}):
        here = {site: at for site, at in arrives.items() if at <= now}
        if len(here) >= quorum.fewest(len(arrives)) and (quorum.closes(here, awaited, now) or now >= over):
            return now
    return max(arrives.values())


def _round(closes: float, arrives: Mapping[str, float], ways: Mapping[str, Way], payload: int) -> Round:
    counted = tuple(site for site, at in arrives.items() if at <= closes)
    # A site has its own payload.
    takes = max(ways[site].down((len(counted) - 1) * payload) for site in counted)
    return Round(counted, closes, closes + takes)


def _record(number: int, counted: Sequence[str], arrives: Mapping[str, float], steps: int, step_time: float) -> Record:
    """Returns what a quorum is told of a round: who counted, and when each came; who was late is told a round later."""
    first = min(arrives.values())
    came = {site: number if site in counted else number - 1 for site in arrives}
    return Record(
        seq=number,
        fragment=0,
        round=number,
        previous="",
        counted=tuple(Contribution(0, number, site, "", "", 1, 0, (), steps=steps) for site in sorted(counted)),
        timings=tuple(Timing(site, round, arrives[site] - first, step_time) for site, round in came.items() if round),
    )
