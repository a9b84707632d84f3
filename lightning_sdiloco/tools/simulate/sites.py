"""Simulates a federation's sites in virtual time with the real engine, hub and Trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_sdiloco.federation.memory import InProcessHub, VirtualLink, VirtualTime
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.methods import Absence, step_end
from lightning_sdiloco.planning.planner import HUB_CONNECTIONS
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


@dataclass(frozen=True)
class Places:
    """The links, speeds, delays and absences of worker groups or sites, in order."""

    link: Link | None = None
    step_time: float | None = None
    speeds: tuple[float, ...] | None = None
    delays: tuple[float, ...] | None = None
    absences: tuple[Absence, ...] = ()
    memory_rate: float = 1e12

    def check(self, count: int, kind: str) -> None:
        """Refuses values that do not match the number of worker groups or sites."""
        require(count >= 1, kind, count, "at least 1")
        step_time = self.step_time
        require(step_time is None or step_time > 0, "step_time", step_time or 0.0, "positive")
        for name, numbers in (("speeds", self.speeds), ("delays", self.delays)):
            if numbers is not None and len(numbers) != count:
                raise ValueError(
                    f"There are {len(numbers)} {name} for {count} {kind}, but their numbers must be"
                    " equal."
                )
        for speed in self.speeds or ():
            require(
                speed > 0,
                "speeds",
                speed,
                "positive, where 0.5 means half the speed of the other groups",
            )
        for delay in self.delays or ():
            require(delay >= 0, "delays", delay, "at least 0")
        for absence in self.absences:
            group = absence.group
            rule = f"of one of the {kind}, which count from 0"
            require(0 <= group < count, "absence", group, rule)
        if kind == "sites":
            rule = "above 0 for at least one site, or no site founds the run"
            require(self.founders(count) >= 1, "absence", 0.0, rule)

    def absences_of(self, site: int) -> list[Absence]:
        return sorted(absence for absence in self.absences if absence.group == site)

    def joins_at(self, site: int) -> float:
        from_the_start = [absence.end for absence in self.absences_of(site) if absence.start == 0]
        return max(from_the_start, default=0.0)

    def founders(self, sites: int) -> int:
        return sum(self.joins_at(site) == 0 for site in range(sites))


@dataclass(frozen=True)
class Site:
    """A site's history, with its rounds and, for rounds that counted, its weights."""

    group: Group
    times: list[float]
    ended: float
    counted: int
    late: int
    missed: int
    weights: dict[int, list[int]]


@dataclass(frozen=True)
class FederatedRun:
    """A federation's outcome, with its sites, the first site's run, and the records."""

    sites: Sequence[Site]
    first: Run
    records: Sequence[Record]
    terms: str


def play_sites(
    configuration: Configuration,
    count: int,
    places: Places,
    choices: Mapping[str, object],
    stepped: Callable[[], None] = lambda: None,
) -> FederatedRun:
    """Runs a configuration as a federation's sites, in alternating threads."""
    turns: Turns[tuple[Group, Run | None]] = Turns(count)
    time = VirtualTime(count, turns.until)
    hub = InProcessHub("simulated", places.founders(count), clock=lambda: time.now)
    incarnations = [_Incarnation(places, count, hub, time, turns, site) for site in range(count)]
    with quiet():
        outcomes = turns.run(
            [
                partial(incarnation.live, configuration, choices, stepped)
                for incarnation in incarnations
            ]
        )
    first = outcomes[0][1]
    assert first is not None
    records = [Record.from_bytes(encoded) for _, encoded in hub.journal.read()]
    courses = [
        incarnation.course(outcome[0], records)
        for incarnation, outcome in zip(incarnations, outcomes, strict=True)
    ]
    return FederatedRun(courses, first, records, _terms_of(hub))


def _terms_of(hub: InProcessHub) -> str:
    terms = hub.coordinator.ledger.terms
    return f"grace={terms.grace:g} s, lease={terms.lease:g} s, quorum={terms.quorum}"


class _Incarnation:
    """A site's thread, with its clock and its connection to the hub in memory."""

    def __init__(
        self,
        places: Places,
        sites: int,
        hub: InProcessHub,
        time: VirtualTime,
        turns: Turns[tuple[Group, Run | None]],
        number: int,
    ) -> None:
        self._name = site_name(number)
        self._hub = hub
        self._time = time
        self._number = number
        self._times: list[float] = []  # when each inner step was completed
        self._ended = 0.0
        self._joined: list[int] = []  # by fragment, the rounds that had landed when the site joined
        assert places.step_time is not None
        self._step_time = places.step_time / (places.speeds[number] if places.speeds else 1.0)
        self._absences = places.absences_of(number)
        self._joins_at = places.joins_at(number)
        latency = 0.0
        seconds_per_byte = 0.0
        if places.link is not None:
            latency = places.link.round_trip / 2
            seconds_per_byte = 8e-9 / places.link.gbit_s_of(HUB_CONNECTIONS)
        line = VirtualLink(
            time,
            number,
            moment=places.step_time / 10,
            latency=latency,
            seconds_per_byte=seconds_per_byte,
            delay=places.delays[number] if places.delays else 0.0,
            is_away=self._is_away,
        )
        self._connection = hub.connect(self._name, link=line)
        topology = simulated_topologies(1, turns.until)[0]
        self._rank = SimulatedRank(
            topology, turns.seconds, number, sites, begins=self._begins, connection=self._connection
        )

    def _is_away(self, now: float) -> bool:
        return any(absence.start <= now < absence.end for absence in self._absences)

    def live(
        self,
        configuration: Configuration,
        choices: Mapping[str, object],
        stepped: Callable[[], None],
    ) -> tuple[Group, Run | None]:
        """Runs the site in its thread until the site ends."""
        time = self._time

        def done() -> None:
            self._times.append(time.now)
            stepped()

        time.passes(self._number, self._joins_at)
        try:
            return live(configuration, self._rank, choices, done)
        finally:
            self._ended = time.now
            time.ends(self._number)

    def _begins(self) -> None:
        """Advances the clock by an inner step, including absences, and then launches and lands."""
        self._joined = self._joined or self._applied()
        now = self._time.now
        self._time.passes(self._number, step_end(now, self._step_time, self._absences) - now)

    def _applied(self) -> list[int]:
        """Returns the rounds that have landed for each fragment."""
        return [round or 0 for round in self._connection.records.applied]

    def course(self, group: Group, records: Sequence[Record]) -> Site:
        """Creates the site's history from the records in the ledger."""
        applied = self._applied()
        missed = 0
        weights: dict[int, list[int]] = {}
        for record in records:
            contribution = record.of(self._name)
            if contribution is not None:
                weights.setdefault(record.fragment, []).append(contribution.weight)
            elif self._joined[record.fragment] < record.round <= applied[record.fragment]:
                missed += 1
        late = self._hub.coordinator.statistics[self._name].late
        counted = sum(map(len, weights.values()))
        return Site(group, self._times, self._ended, counted, late, missed, weights)
