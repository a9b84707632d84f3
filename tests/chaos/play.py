"""Plays faults in a world, and watches that those who are up go on."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos.checks import LONGEST_HANG, Found, Told, examined
from tests.chaos.faults import ALL, FORMS, HUB, Fault
from tests.chaos.processes import BATCH
from tests.chaos.world import World

_MOST = 3  # faults at the same time
_KNOWN = 4  # rounds from which on the guard judges a site
_START = 150.0  # seconds that a process may take to start: on a busy machine it does


class Halted(Exception):
    """Something did not go on."""


@dataclass
class Seen:
    """What a site was last seen to do."""

    at: float  # when it made a step, or was started
    training: bool = False  # it has made a step since it was started
    back: bool = False  # it has applied all records since its last fault
    round: int = 0  # rounds that have landed
    ended: bool = False


@dataclass
class Play:
    """Plays faults in a world: one after the other, or of a sequence by chance, some at the same
    time.
    """

    world: World
    seen: dict[str, Seen] = field(default_factory=dict)
    records: int = 0
    record_at: float = field(default_factory=time.monotonic)
    going_on: list[tuple[float, Fault]] = field(default_factory=list)

    def run(self, faults: Iterator[tuple[float, Fault]], count: int, seconds: float) -> None:
        """Starts all, lets so many faults happen within so many seconds, and ends the run; raises
        `Halted`.
        """
        self.begin()
        deadline = time.monotonic() + seconds
        done = 0
        while done < count and time.monotonic() < deadline:
            pause, fault = next(faults)
            self.wait(pause)
            if self.may(fault):
                self.let(fault)
                done += 1
        self.until_back()
        self.finish()

    def begin(self) -> None:
        """Starts all, and waits until the guard knows how long the outer gradients of each site
        are.
        """
        self.seen = {site: Seen(time.monotonic()) for site in self.world.sites}
        self.world.start(HUB, *self.world.sites)
        self.until(
            "some rounds", lambda: min(own.round for own in self.seen.values()) >= _KNOWN, _START
        )

    def let(self, fault: Fault) -> None:
        """Lets a fault happen, from which who it hits has to come back."""
        for site in self.world.sites:
            if fault.hits(site) or fault.victim == HUB:
                self.seen[site].back = False
        self.world.begin(fault)
        self.going_on.append((time.monotonic() + fault.seconds, fault))

    def suffer(self, fault: Fault) -> None:
        """Lets a fault happen, and waits until all are back."""
        self.let(fault)
        self.until_back()

    def until_back(self) -> None:
        """Waits until nothing is wrong any more, all have applied all records, and rounds close."""
        while self.going_on:
            self.look()
        self.until("all to be back", lambda: all(own.back for own in self.seen.values()), _START)
        goal = self.records + len(self.world.sites)
        self.until("some more rounds", lambda: self.records >= goal, 2 * LONGEST_HANG)

    def finish(self) -> None:
        self.world.signal(HUB, signal.SIGUSR1)
        self.until(
            "the end", lambda: all(own.ended for own in self.seen.values()), 2 * LONGEST_HANG
        )

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()

    def until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            self.look()
            if time.monotonic() > deadline:
                raise Halted(
                    f"{what}: not within {seconds:.0f} s: {self.seen}, {self.records} records"
                )

    def may(self, fault: Fault) -> bool:
        """Whether a fault may happen beside those that there are."""
        victims = [one.victim for _, one in self.going_on]
        if ALL in (fault.victim, *victims):
            return not victims
        # Who is coming back is hit as well, but not always.
        is_back = fault.victim == HUB or self.seen[fault.victim].back or fault.strength < 0.25
        return len(victims) < _MOST and fault.victim not in victims and is_back

    def look(self) -> None:
        """Mends what is due, sees what has been written down, and requires that all who are up go
        on.
        """
        time.sleep(0.05)
        now = time.monotonic()
        for at, fault in [one for one in self.going_on if one[0] <= now]:
            self.going_on.remove((at, fault))
            self.world.end(fault)
            for site in filter(fault.hits, self.world.sites):
                own = self.seen[site]
                own.at = now
                own.training = own.training and not FORMS[fault.kind].kills
            if fault.hits(HUB):
                self.record_at = now + (_START if fault.kind == "blackout" else LONGEST_HANG)
        hit = {one.victim for _, one in self.going_on}
        for site, own in self.seen.items():
            for note in self.world.news(site):
                own.at = max(own.at, note["at"])
                if note["what"] == "step":
                    own.training = True
                    own.round = min(note["rounds"])
                    own.back = own.back or (
                        not hit & {site, HUB, ALL} and note["reachable"] and note["lag"] == 0
                    )
                own.ended = own.ended or note["what"] == "ended"
        for note in self.world.news(HUB):
            if note["what"] == "append":
                self.records = self.records + 1
                self.record_at = note["at"]
        for name in self.world.dead():
            raise Halted(f"{name} died by itself: {self.world.said(name)}")
        for site, own in self.seen.items():
            patience = LONGEST_HANG if own.training else _START
            if not own.ended and not hit & {site, ALL} and now > own.at + patience:
                raise Halted(f"{site} has hung for {patience:.0f} s: {self.world.said(site)}")
        up = [
            site for site, own in self.seen.items() if own.training and own.back and site not in hit
        ]
        ended = any(own.ended for own in self.seen.values())
        if (
            self.records
            and up
            and not ended
            and HUB not in hit
            and now > self.record_at + LONGEST_HANG
        ):
            raise Halted(
                f"no record for {LONGEST_HANG:.0f} s, with {up} up: {self.world.said(HUB)}"
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
    told = Told.of(world.folder, world.sites)
    return told, examined(told, BATCH)
