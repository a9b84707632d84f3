"""What `sdiloco doctor` measures of emulated links: the bandwidth and round trip that a user would give the planner."""

import os
from datetime import timedelta
from statistics import median
from typing import NamedTuple

from benchmarks.links import Links
from lightning_sdiloco.launch.rendezvous import rendezvous_at
from lightning_sdiloco.tools import doctor
from tests.ranks import run_processes


class Examined(NamedTuple):
    """What the doctor finds.

    Attributes:
        bits_per_second: What a connection carries on the slowest link, while all sites send.
        round_trip: Seconds to another site and back.
    """

    bits_per_second: float
    round_trip: float


def examine(sites: int, mbit_s: float, one_way_delay: float) -> Examined:
    """Measures between all sites, as the doctor does.

    Args:
        sites: Number of sites.
        mbit_s: Bandwidth of every link.
        one_way_delay: Seconds between two sites.
    """
    with Links(sites, mbit_s * 1e6, one_way_delay) as links:
        found = run_processes(_rank, sites, links)[0]
    return Examined(min(link.bits_per_second for link in found), median(link.round_trip for link in found))


def _rank(rank: int, world_size: int, links: Links) -> list[doctor.MeasuredLink]:
    links.enter(rank)
    os.environ.update(links.environment(rank))
    rendezvous = rendezvous_at(links.address(0), 29500, rank, world_size, timedelta(seconds=30))
    return doctor.measure(rendezvous, world_size, rank, True, links.address(rank))
