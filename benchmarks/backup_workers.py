"""Measures how much of the possible work counts if sites stall now and then: with a quorum, and
when waiting for all.

    python -m benchmarks.backup_workers [--quick] [--json FILE]

Eight sites train in rounds of 30 s (30 inner steps of a second). A launch lands 5 s later. In 2 %
of its rounds, a site stalls for 60 s but continues to send heartbeats. Time is virtual; the rules
are the real ones, `Ledger` and `Follower`, without tensors. In the last two rows, no site stalls,
but one site sends its launches 8 s late.

- **goodput**: inner steps that counted in a record, divided by those that all sites could take in
  that time if none stalled or waited. Each site stalls for 1.2 s in 30 s of training, so the
  maximum is 30 / 31.2 = 96.2 %.
- **counted**: inner steps that counted, divided by those that were trained. The rest is pending at
  the end or was dropped.
- **on time**: launches that counted in the round for which they were made, divided by all launches.
- **landing**: mean seconds from a launch that counted to its landing.

A late site carries its training and continues to train. With *idle catch-up*, it does not train
until others begin the next round. For groups that are launched together, waiting for all is
simulated with their own rule: no group continues past a landing before all launches have arrived.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from statistics import mean
from typing import Any

from benchmarks import report
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.ledger import Answer, Ledger
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Hello,
    Payload,
    Position,
    Record,
)
from lightning_sdiloco.federation.run_config import ChosenQuorum, Terms

RUN_CONFIG = "00" * 32
BEAT = 2.5
BACKUP = ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": 0.5})
FOR_EVER = 1e9


@dataclass(frozen=True)
class Case:
    """The sites, their stalls, and the terms of their federation.

    Attributes:
        sites: The number of sites.
        sync_every: The inner steps of a round, each of which takes a second.
        overlap_steps: The number of inner steps after which a launch lands.
        stall: The seconds for which a site stalls.
        share: The share of its rounds in which a site stalls.
        rounds: The number of rounds that a site could complete in the simulated time.
        quorum: As in `Terms`.
        grace: As in `Terms`.
        delays: The seconds by which the messages of each site are delayed; empty for none.
        latency: The seconds that every message takes.
        idles: Whether a late site idles until the next round.
        seed: The seed that decides when each site stalls.
    """

    sites: int = 8
    sync_every: int = 30
    overlap_steps: int = 5
    stall: float = 60.0
    share: float = 0.02
    rounds: int = 2000
    quorum: int | ChosenQuorum = 1
    grace: float = 2.0
    delays: tuple[float, ...] = ()
    latency: float = 0.05
    idles: bool = False
    seed: int = 0

    @property
    def seconds(self) -> float:
        return float(self.rounds * self.sync_every)

    def steps_of(self, site: int) -> Iterator[float]:
        """Yields the duration of each inner step of a site; in some rounds, one step takes
        longer.
        """
        random = Random(f"{self.seed} {site}")
        while True:
            stalls_at = random.randrange(self.sync_every) if random.random() < self.share else -1
            for step in range(self.sync_every):
                yield 1.0 + (self.stall if step == stalls_at else 0.0)


@dataclass
class Site:
    """A site: the real follower, a number instead of parameters, and statistics."""

    name: str
    follower: Follower
    steps: Iterator[float]
    delay: float
    outer: int = 1
    step: int = 0
    trained: int = 0
    launched: int = 0
    idles: bool = False
    inbox: list[Call | Record] = field(default_factory=list)
    launches: dict[int, float] = field(default_factory=dict)
    flights: list[float] = field(default_factory=list)


class Play:
    """Simulates sites and their hub, with each message and each inner step at its time."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now = 0.0
        self.terms = Terms(1, case.sync_every, case.overlap_steps, case.grace, quorum=case.quorum)
        self.ledger = Ledger(self.terms, RUN_CONFIG, 0.0)
        self.records: list[Record] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._incarnations = [f"{site:016x}" for site in range(case.sites)]
        self.sites = [self._site(number) for number in range(case.sites)]
        self._heartbeat()

    def _site(self, number: int) -> Site:
        follower = Follower(self.terms, RUN_CONFIG, f"site-{number}", self._incarnations[number])
        follower.found([1])
        delay = self.case.delays[number] if self.case.delays else 0.0
        site = Site(follower.site, follower, self.case.steps_of(number), delay)
        self.ledger.hello(
            Hello(
                "play", site.name, follower.incarnation, RUN_CONFIG, (Position.start(RUN_CONFIG),)
            ),
            0.0,
        )
        follower.reachable = True
        self._at(next(site.steps), lambda: self._turn(site, True))
        return site

    def _at(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), do))

    def run(self) -> "Play":
        while self._queue[0][0] <= self.case.seconds:
            self.now, _, do = heapq.heappop(self._queue)
            do()
        return self

    # A site

    def _turn(self, site: Site, trains: bool) -> None:
        """Ends an inner step or a moment of waiting: receives events, launches and lands, like
        `SitePace`.
        """
        follower = site.follower
        site.step += 1
        if trains:
            site.trained += 1
            follower.trained(1)
        inbox = site.inbox
        site.inbox = []
        for message in inbox:
            if isinstance(message, Record):
                follower.learn(message)
            else:
                follower.hear(message)
                site.idles = False
        for call in follower.skips():
            self._sends(site, lambda call=call: self._skips(site, call))  # type: ignore[misc]
        if follower.launches(site.step):
            self._launch(site)
        for record in follower.due(site.step):
            self._land(site, record)
        waits = follower.waits(site.step, self.now) > 0.0 or site.idles
        site.step -= waits
        self._at(0.1 if waits else next(site.steps), lambda: self._turn(site, not waits))

    def _launch(self, site: Site) -> None:
        number = next(self._numbers)
        payload = Payload(f"{number:064x}", 8)
        begun = replace(site.follower.begin(0, site.step), digest=site.outer, payloads=(payload,))
        sent = site.follower.complete(replace(begun, norm_squared=float(number)))
        assert sent is not None, "the outer values are those of the last landing"
        site.launched += 1
        site.launches[sent.round] = self.now
        self._sends(site, lambda: self._contributes(sent))

    def _sends(self, site: Site, arrives: Callable[[], None]) -> None:
        self._at(self.case.latency + site.delay, arrives)

    def _land(self, site: Site, record: Record) -> None:
        # The payloads are whole numbers, so that any other order of the same records gives other
        # values.
        after = (
            31 * site.outer
            + sum(
                contribution.weight * int(contribution.payloads[0].key, 16)
                for contribution in record.counted
            )
        ) % (1 << 61)
        landing = site.follower.land(record, site.outer, after)
        assert landing in (MergeAction.MIX, MergeAction.CARRY), landing
        site.outer = after
        launched = site.launches.pop(record.round, self.now)
        if landing is MergeAction.MIX:
            site.flights.append(self.now - launched)
        elif self.case.idles:
            site.idles = True

    # The hub

    def _contributes(self, contribution: Contribution) -> None:
        if self.ledger.contribute(contribution, contribution.incarnation, self.now) is Answer.OPEN:
            (call,) = self.ledger.calls()
            self._tell(call)
        self._close()

    def _skips(self, site: Site, call: Call) -> None:
        self.ledger.skip(site.name, site.follower.incarnation, call, self.now)
        self._close()

    def _heartbeat(self) -> None:
        for site in self.sites:
            self.ledger.heartbeat(site.follower.heartbeat(), self.now)
        self._close()
        self._at(BEAT, self._heartbeat)

    def _close(self) -> None:
        for record in self.ledger.due(self.now):
            self.ledger.append(record)
            self.records.append(record)
            self._tell(record)
        if self.ledger.open:
            self._at(self.ledger.next_due(self.now) - self.now, self._close_again)

    def _close_again(self) -> None:
        if self.ledger.due(self.now):
            self._close()

    def _tell(self, message: Call | Record) -> None:
        for site in self.sites:
            self._at(self.case.latency, lambda site=site: site.inbox.append(message))  # type: ignore[misc]

    # The outcome

    def found(self) -> dict[str, float]:
        counted = sum(own.weight for record in self.records for own in record.counted)
        on_time = sum(len(record.counted) for record in self.records)
        return {
            "goodput": counted / (self.case.sites * self.case.seconds),
            "counted": counted / sum(site.trained for site in self.sites),
            "on_time": on_time / sum(site.launched for site in self.sites),
            "landing_seconds": mean(seconds for site in self.sites for seconds in site.flights),
            "rounds": len(self.records),
        }


def wait_for_all(case: Case) -> dict[str, float]:
    """Simulates worker groups that are launched together: a landing waits for the launches of all
    groups.
    """
    steps = [case.steps_of(site) for site in range(case.sites)]
    clocks = [0.0] * case.sites
    steps_made = 0
    landing = []
    while max(clocks) < case.seconds:
        clocks = [
            clock + next(steps_of_site) for clock, steps_of_site in zip(clocks, steps, strict=True)
        ]
        steps_made += 1
        if steps_made % case.sync_every == 0:
            launched = clocks
        if steps_made > case.sync_every and steps_made % case.sync_every == case.overlap_steps:
            landing += [
                max(*launched, clock) - began for clock, began in zip(clocks, launched, strict=True)
            ]
            clocks = [max(*launched, clock) for clock in clocks]
    return {
        "goodput": steps_made / max(clocks),
        "counted": 1.0,
        "on_time": 1.0,
        "landing_seconds": mean(landing),
    }


def goodput_of_all(case: Case) -> float:
    """Returns the goodput of waiting for all: every round with a stall costs the part of the stall
    that overlap does not hide.
    """
    anybody = 1 - (1 - case.share) ** case.sites
    return case.sync_every / (case.sync_every + anybody * (case.stall - case.overlap_steps))


def goodput_at_most(case: Case) -> float:
    """Returns the goodput if no site waits for another: the share of time in which a site does not
    stall.
    """
    return case.sync_every / (case.sync_every + case.share * case.stall)


def cases(rounds: int) -> dict[str, Case]:
    stalls = Case(rounds=rounds)
    late = replace(stalls, share=0.0, delays=(0.0,) * 7 + (8.0,), grace=10.0)
    return {
        "federation, waits for all": replace(stalls, grace=FOR_EVER),
        "quorum=3, grace=2": replace(stalls, quorum=3),
        "quorum=DynamicBackup(least=0.5), grace=2": replace(stalls, quorum=BACKUP),
        "the same, idle catch-up": replace(stalls, quorum=BACKUP, idles=True),
        "one site 8 s late: quorum=1, grace=10": late,
        "one site 8 s late: DynamicBackup, grace=10": replace(late, quorum=BACKUP),
    }


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    rounds = 8 if options.quick else Case.rounds
    stalls = Case(rounds=rounds)
    outcomes: dict[str, dict[str, float]] = {"fixed world, waits for all": wait_for_all(stalls)}
    outcomes |= {name: Play(case).run().found() for name, case in cases(rounds).items()}
    rows = []
    for name, outcome in outcomes.items():
        shares = [f"{outcome[key]:.1%}" for key in ("goodput", "counted", "on_time")]
        rows.append([name, *shares, f"{outcome['landing_seconds']:.1f} s"])
    caption = (
        f"{rounds} rounds. Closed forms: {100 * goodput_of_all(stalls):.1f} % where a fixed world"
        f" waits for all, {100 * goodput_at_most(stalls):.1f} % where nobody waits."
    )
    report.show(
        "backup_workers", ["eight sites", "goodput", "counted", "on time", "landing"], rows, caption
    )
    headline = {
        f"{name}, {key}": outcome[key]
        for name, outcome in outcomes.items()
        for key in ("goodput", "counted")
    }
    about = report.measured("backup_workers", options.quick)
    closed: dict[str, Any] = {
        "waits for all": goodput_of_all(stalls),
        "nobody waits": goodput_at_most(stalls),
    }
    report.write(options.json, headline, about, rounds=rounds, closed_forms=closed, rows=outcomes)


if __name__ == "__main__":
    main()
