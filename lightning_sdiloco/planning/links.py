"""Predicts how long links of different bandwidth are busy with two shots, in equal parts and in those that suit."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.reduce import TwoShot, all_reduce_for
from lightning_sdiloco.planning.link import require
from lightning_sdiloco.planning.workload import Groups, Model


class SharedOut(NamedTuple):
    """What two shots take over the link of each group; all lists are in the order of the groups."""

    links: tuple[float, ...]
    shares: tuple[float, ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    round_seconds: float
    equal_seconds: float

    @property
    def gain(self) -> float:
        """How many times shorter a round is than with equal parts, if the links hold it up."""
        return self.equal_seconds / self.round_seconds


def shared_out(model: Model, settings: Settings, groups: Groups, links: Sequence[float]) -> SharedOut:
    """Predicts what parts by bandwidth bring on links that differ, given as Gbit/s for each group.

    Examples:
        >>> groups = Groups(step_time=1.0, groups=4)
        >>> told = shared_out(Model.of_size(10**9, layers=24), Settings(), groups, [1, 1, 1, 0.5])
        >>> round(told.gain, 3), told.shares[3]
        (1.5, 0.0)
    """
    for link in links:
        require(link > 0, "links", link, "positive numbers of Gbit/s")
    exchange = TwoShot("by_bandwidth", links=links)
    shares = exchange.shares(groups.groups) or (1 / groups.groups,) * groups.groups
    suited, equal = (_bytes(model, settings, groups, one) for one in (exchange, "two_shot"))
    seconds = tuple(_seconds(nbytes, link) for nbytes, link in zip(suited, links, strict=True))
    return SharedOut(
        links=tuple(links),
        shares=shares,
        bytes=suited,
        seconds=seconds,
        round_seconds=max(seconds),
        equal_seconds=max(_seconds(nbytes, link) for nbytes, link in zip(equal, links, strict=True)),
    )


def _bytes(model: Model, settings: Settings, groups: Groups, exchange: str | TwoShot) -> tuple[int, ...]:
    all_reduce = all_reduce_for(exchange, groups.groups, settings.codec, 0.0).at(0)
    shards = [-(-numel // groups.group_size) for numel in model.fragments(settings)]
    return tuple(
        groups.group_size * sum(all_reduce.bytes_to_others(shard, group) for shard in shards)
        for group in range(groups.groups)
    )


def _seconds(nbytes: int, gbit_s: float) -> float:
    return nbytes * 8e-9 / gbit_s
