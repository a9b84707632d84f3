"""Plays a configuration as the sites of a federation, in virtual time: the real rules, engine, hub and Trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.memory import VirtualHub, VirtualLink, VirtualTime
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.methods import Absence, step_end
from lightning_sdiloco.tools.simulate.groups import (
    Configuration,
    Group,
    Run,
    SimulatedRank,
    live,
    quiet,
    site_name,
)
from lightning_sdiloco.tools.simulate.threads import Turns, simulated_topologies

# A site has so many connections to its hub.
_CHANNELS = 8


@dataclass(frozen=True)
class Places:
    sites: int
    step_time: float
    link: Link | None = None
    speeds: tuple[float, ...] | None = None
    delays: tuple[float, ...] | None = None
    absences: tuple[Absence, ...] = ()

    def __post_init__(self) -> None:
        require(self.sites >= 1, "sites", self.sites, "at least 1")
        require(self.step_time > 0, "step_time", self.step_time, "a positive number of seconds")
        for name, each in (("speeds", self.speeds), ("delays", self.delays)):
            if each is not None and len(each) != self.sites:
                raise ValueError(f"There are {len(each)} {name} for {self.sites} sites. Give one for each site.")
        for speed in self.speeds or ():
            require(speed > 0, "speeds", speed, "positive")
        for delay in self.delays or ():
            require(delay >= 0, "delays", delay, "at least 0")
        for absence in self.absences:
            require(0 <= absence.group < self.sites, "site", absence.group, "the number of a site, from 0")
            require(0 <= absence.start <= absence.end, "absence", absence.start, "a start before the end")
        require(self.founders >= 1, "absence", 0.0, "above 0 for one site at least, or nobody founds the run")

    def absences_of(self, site: int) -> list[Absence]:
        return sorted((absence for absence in self.absences if absence.group == site), key=lambda one: one.start)

    def joins_at(self, site: int) -> float:
        return max((absence.end for absence in self.absences_of(site) if absence.start == 0), default=0.0)

    @property
    def founders(self) -> int:
        return sum(self.joins_at(site) == 0 for site in range(self.sites))

    def seconds(self, site: int, begins: float) -> float:
        """Returns how long an inner step of a site takes, absences included."""
        step_time = self.step_time / (self.speeds[site] if self.speeds else 1.0)
        return step_end(begins, step_time, self.absences_of(site)) - begins

    def link_of(self, site: int) -> VirtualLink:
        link, delay, away = self.link, self.delays[site] if self.delays else 0.0, self.absences_of(site)
        return VirtualLink(
            latency=link.round_trip / 2 if link else 0.0,
            seconds_per_byte=8e-9 / link.gbit_s_of(_CHANNELS) if link else 0.0,
            delay=delay,
            is_away=lambda time: any(absence.start <= time < absence.end for absence in away),
        )


@dataclass(frozen=True)
class Site:
    """What became of a site, and in which rounds it counted, with which weights by fragment."""

    group: Group
    times: list[float]
    ended: float
    counted: int
    late: int
    missed: int
    weights: dict[int, list[int]]


@dataclass(frozen=True)
class FederatedRun:
    sites: Sequence[Site]
    first: Run
    records: Sequence[Record]
    terms: str


def play_sites(
    configuration: Configuration, places: Places, choices: Mapping[str, Any], stepped: Callable[[], None]
) -> FederatedRun:
    """Runs a configuration as the sites of a federation, in threads that take turns."""
    turns: Turns[tuple[Group, Run | None]] = Turns(places.sites)
    hub = VirtualHub("simulated", places.founders, VirtualTime(places.sites, turns.until))
    lives = [_Life(places, hub, turns, site) for site in range(places.sites)]
    with quiet():
        lived = turns.run([partial(life.live, configuration, choices, stepped) for life in lives])
    first = lived[0][1]
    assert first is not None
    records = [Record.from_bytes(data) for _, data in hub.journal.read()]
    terms = hub.coordinator.ledger.terms
    told = f"grace={terms.grace:g} s, lease={terms.lease:g} s, quorum={terms.quorum}"
    sites = [life.told(group, records) for life, (group, _) in zip(lives, lived, strict=True)]
    return FederatedRun(sites, first, records, told)


class _Life:
    def __init__(self, places: Places, hub: VirtualHub, turns: Turns[Any], number: int) -> None:
        self._name, self._places, self._hub, self._number = site_name(number), places, hub, number
        self._times, self._ended, self._joined = list[float](), 0.0, list[int]()
        topology = simulated_topologies(1, turns.until)[0]
        connection = hub.connect_over(self._name, number, places.link_of(number), places.step_time / 10)
        self._rank = SimulatedRank(
            topology, turns.seconds, number, places.sites, begins=self._begins, connection=connection
        )

    def live(
        self, configuration: Configuration, choices: Mapping[str, Any], stepped: Callable[[], None]
    ) -> tuple[Group, Run | None]:
        time = self._hub.time

        def done() -> None:
            self._times.append(time.now)
            stepped()

        time.passes(self._number, self._places.joins_at(self._number))
        try:
            return live(configuration, self._rank, choices, done)
        finally:
            self._ended = time.now
            time.ends(self._number)

    def _begins(self) -> None:
        """Lets the time of an inner step pass, after which it launches and lands."""
        self._joined = self._joined or self._applied()
        time = self._hub.time
        time.passes(self._number, self._places.seconds(self._number, time.now))

    def _applied(self) -> list[int]:
        """Returns the rounds that have landed, by fragment."""
        follower = self._rank.connection.follower
        assert isinstance(follower, Follower), "who trains has said hello"
        return [own.applied.round for own in follower.fragments]

    def told(self, group: Group, records: Sequence[Record]) -> Site:
        applied, counted, missed, weights = self._applied(), 0, 0, dict[int, list[int]]()
        for record in records:
            own = record.of(self._name)
            if own is not None:
                counted += 1
                weights.setdefault(record.fragment, []).append(own.weight)
            elif self._joined[record.fragment] < record.round <= applied[record.fragment]:
                missed += 1
        late = self._hub.coordinator.statistics[self._name].late
        return Site(group, self._times, self._ended, counted, late, missed, weights)
