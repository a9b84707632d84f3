"""Plays faults in a world, and watches that running sites make progress."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos.checks import LONGEST_HANG, Found, Told, examined
from tests.chaos.faults import ALL, FORMS, HUB, Fault
from tests.chaos.notes import Note
from tests.chaos.processes import BATCH
from tests.chaos.world import World

_MOST = 3  # faults at the same time
_KNOWN = 4  # rounds from which on the guard judges a site
_START = 150.0  # seconds that a process may take to start on a busy machine


class Halted(Exception):
    """A process hung or died by itself."""


@dataclass
class Seen:
    """The last known state of a site."""

    active_at: float  # when it made a step, or was started
    is_training: bool = False  # it has made a step since it was started
    is_back: bool = False  # it has applied all records since its last fault
    round: int = 0  # rounds that have landed
    has_ended: bool = False

    def follow(self, note: Note, is_hit: bool) -> None:
        self.active_at = max(self.active_at, note["at"])
        if note["what"] == "step":
            self.is_training = True
            self.round = min(note["rounds"])
            if not is_hit and note["reachable"] and note["lag"] == 0:
                self.is_back = True
        elif note["what"] == "ended":
            self.has_ended = True


@dataclass
class Play:
    """Plays faults in a world: one after the other, or of a sequence by chance, some at the same
    time.
    """

    world: World
    seen: dict[str, Seen] = field(default_factory=dict)
    records: int = 0
    record_at: float = field(default_factory=time.monotonic)
    # the faults that have not ended, and when they end
    going_on: list[tuple[float, Fault]] = field(default_factory=list)

    def run(self, faults: Iterator[tuple[float, Fault]], count: int, seconds: float) -> None:
        """Starts all, lets so many faults happen within so many seconds, and ends the run; raises
        `Halted`.
        """
        self.begin()
        deadline = time.monotonic() + seconds
        faults_begun = 0
        while faults_begun < count and time.monotonic() < deadline:
            pause, fault = next(faults)
            self.wait(pause)
            if self.may(fault):
                self.let(fault)
                faults_begun += 1
        self.until_back()
        self.finish()

    def begin(self) -> None:
        """Starts all, and waits until the guard knows how long the outer gradients of each site
        are.
        """
        self.seen = {site: Seen(time.monotonic()) for site in self.world.sites}
        self.world.start(HUB, *self.world.sites)
        sites = self.seen.values()
        self.until("some rounds", lambda: min(site.round for site in sites) >= _KNOWN, _START)

    def let(self, fault: Fault) -> None:
        """Lets a fault happen, from which its victims have to come back."""
        for site, seen in self.seen.items():
            if fault.hits(site) or fault.victim == HUB:
                seen.is_back = False
        self.world.begin(fault)
        self.going_on.append((time.monotonic() + fault.seconds, fault))

    def suffer(self, fault: Fault) -> None:
        """Lets a fault happen, and waits until all are back."""
        self.let(fault)
        self.until_back()

    def until_back(self) -> None:
        """Waits until all faults have ended, all have applied all records, and rounds close."""
        while self.going_on:
            self.look()
        sites = self.seen.values()
        self.until("all to be back", lambda: all(site.is_back for site in sites), _START)
        goal = self.records + len(self.world.sites)
        self.until("some more rounds", lambda: self.records >= goal, 2 * LONGEST_HANG)

    def finish(self) -> None:
        self.world.signal(HUB, signal.SIGUSR1)
        sites = self.seen.values()
        self.until("the end", lambda: all(site.has_ended for site in sites), 2 * LONGEST_HANG)

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()

    def until(self, goal: str, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            self.look()
            if time.monotonic() > deadline:
                raise Halted(
                    f"{goal}: not within {seconds:.0f} s: {self.seen}, {self.records} records"
                )

    def may(self, fault: Fault) -> bool:
        """Tells whether a fault may happen together with those that have not ended."""
        victims = [current.victim for _, current in self.going_on]
        if ALL in (fault.victim, *victims):
            return not victims
        if len(victims) >= _MOST or fault.victim in victims:
            return False
        # A site that is coming back is hit again, but not always.
        return fault.victim == HUB or self.seen[fault.victim].is_back or fault.strength < 0.25

    def look(self) -> None:
        """Ends the faults that are due, reads what was written down, and requires that running
        processes make progress.
        """
        time.sleep(0.05)
        now = time.monotonic()
        self._end_due_faults(now)
        victims = {fault.victim for _, fault in self.going_on}
        for site, seen in self.seen.items():
            is_hit = not victims.isdisjoint({site, HUB, ALL})
            for note in self.world.news(site):
                seen.follow(note, is_hit)
        for note in self.world.news(HUB):
            if note["what"] == "append":
                self.records += 1
                self.record_at = note["at"]
        for name in self.world.dead():
            raise Halted(f"{name} died by itself: {self.world.said(name)}")
        self._require_steps(now, victims)
        self._require_records(now, victims)

    def _end_due_faults(self, now: float) -> None:
        due = [(end, fault) for end, fault in self.going_on if end <= now]
        for end, fault in due:
            self.going_on.remove((end, fault))
            self.world.end(fault)
            for site in filter(fault.hits, self.world.sites):
                seen = self.seen[site]
                seen.active_at = now
                if FORMS[fault.kind].kills:
                    seen.is_training = False
            if fault.hits(HUB):
                patience = _START if fault.kind == "blackout" else LONGEST_HANG
                self.record_at = now + patience

    def _require_steps(self, now: float, victims: set[str]) -> None:
        for site, seen in self.seen.items():
            patience = LONGEST_HANG if seen.is_training else _START
            may_wait = seen.has_ended or not victims.isdisjoint({site, ALL})
            if not may_wait and now > seen.active_at + patience:
                raise Halted(f"{site} has hung for {patience:.0f} s: {self.world.said(site)}")

    def _require_records(self, now: float, victims: set[str]) -> None:
        """Requires records once there were some, until a site ends."""
        if not self.records or HUB in victims or any(seen.has_ended for seen in self.seen.values()):
            return
        running_sites = [
            site
            for site, seen in self.seen.items()
            if seen.is_training and seen.is_back and site not in victims
        ]
        if running_sites and now > self.record_at + LONGEST_HANG:
            raise Halted(
                f"no record for {LONGEST_HANG:.0f} s, with {running_sites} up:"
                f" {self.world.said(HUB)}"
            )


def played(world: World, *faults: Fault) -> tuple[Told, Found]:
    """Lets faults happen one after the other, each when all have come back from that before, and
    ends the run.
    """
    play = Play(world)
    play.begin()
    for fault in faults:
        play.suffer(fault)
    play.finish()
    run_notes = Told.of(world.folder, world.sites)
    return run_notes, examined(run_notes, BATCH)
