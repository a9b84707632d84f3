"""Plays faults in a world, and watches that those who are up go on."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos.checks import LONGEST_HANG
from tests.chaos.faults import ALL, FORMS, HUB, Fault
from tests.chaos.notes import Note
from tests.chaos.world import World

_MOST = 3  # faults at the same time
_START = 150.0  # seconds that a process may take to start: on a busy machine it does


class Halted(Exception):
    """Something did not go on."""


@dataclass
class Seen:
    """What a site was last seen to do.

    Attributes:
        at: When it made a step, or was started.
        training: Whether it has made one since it was started.
        back: Whether it has applied all records, since its last fault.
        round: Rounds that have landed.
        ended: Whether its training has.
    """

    at: float
    training: bool = False
    back: bool = False
    round: int = 0
    ended: bool = False


@dataclass
class Play:
    """Plays faults in a world: one after the other, or of a sequence by chance, some at the same time."""

    world: World
    seen: dict[str, Seen] = field(default_factory=dict)
    records: int = 0
    record_at: float = field(default_factory=time.monotonic)
    going_on: list[tuple[float, Fault]] = field(default_factory=list)

    def run(self, faults: Iterator[tuple[float, Fault]], count: int, seconds: float) -> None:
        """Starts all, lets so many faults happen within so many seconds, and ends the run.

        Raises:
            Halted: If a process died by itself, or did not go on.
        """
        self.begin()
        deadline, done = time.monotonic() + seconds, 0
        while done < count and time.monotonic() < deadline:
            pause, fault = next(faults)
            self.wait(pause)
            if self.may(fault):
                self.let(fault)
                done += 1
        self.until_back()
        self.finish()

    def begin(self) -> None:
        """Starts all, and waits until they have landed two rounds."""
        self.seen = {site: Seen(time.monotonic()) for site in self.world.sites}
        self.world.start(HUB, *self.world.sites)
        self.until("two rounds", lambda: min(own.round for own in self.seen.values()) >= 2, _START)

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
        """Ends the run."""
        self.world.signal(HUB, signal.SIGUSR1)
        self.until("the end", lambda: all(own.ended for own in self.seen.values()), 2 * LONGEST_HANG)

    def wait(self, seconds: float) -> None:
        """Looks at the run for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()

    def until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        """Waits for something, for so many seconds."""
        deadline = time.monotonic() + seconds
        while not holds():
            self.look()
            if time.monotonic() > deadline:
                raise Halted(f"{what}: not within {seconds:.0f} s: {self.seen}, {self.records} records")

    def may(self, fault: Fault) -> bool:
        """Returns whether a fault may happen beside those that there are."""
        victims = [one.victim for _, one in self.going_on]
        if ALL in (fault.victim, *victims):
            return not victims
        # Who is coming back is hit as well, but not always.
        is_back = fault.victim == HUB or self.seen[fault.victim].back or fault.strength < 0.25
        return len(victims) < _MOST and fault.victim not in victims and is_back

    def look(self) -> None:
        """Mends what is due, and sees what has been written down."""
        time.sleep(0.05)
        now = time.monotonic()
        for at, fault in [one for one in self.going_on if one[0] <= now]:
            self.going_on.remove((at, fault))
            self.world.end(fault)
            for site in filter(fault.hits, self.world.sites):
                own = self.seen[site]
                own.at, own.training = now, own.training and not FORMS[fault.kind].kills
            if fault.hits(HUB):
                self.record_at = now + (_START if fault.kind == "blackout" else LONGEST_HANG)
        for site in self.world.sites:
            for note in self.world.news(site):
                self._see(self.seen[site], site, note)
        for note in self.world.news(HUB):
            if note["what"] == "append":
                self.records, self.record_at = self.records + 1, note["at"]
        self._require_going_on(now)

    def _see(self, own: Seen, site: str, note: Note) -> None:
        own.at = max(own.at, note["at"])
        if note["what"] == "step":
            own.training, own.round = True, min(note["rounds"])
            is_hit = any(one.victim in (site, HUB, ALL) for _, one in self.going_on)
            own.back = own.back or (not is_hit and note["reachable"] and note["lag"] == 0)
        own.ended = own.ended or note["what"] == "ended"

    def _require_going_on(self, now: float) -> None:
        if dead := self.world.dead():
            raise Halted(f"{dead[0]} died by itself: {self.world.said(dead[0])}")
        hit = {one.victim for _, one in self.going_on}
        for site, own in self.seen.items():
            patience = LONGEST_HANG if own.training else _START
            if not own.ended and site not in hit and ALL not in hit and now > own.at + patience:
                raise Halted(f"{site} has hung for {patience:.0f} s: {self.world.said(site)}")
        up = [site for site, own in self.seen.items() if own.training and own.back and site not in hit]
        ended = any(own.ended for own in self.seen.values())
        if self.records and up and not ended and HUB not in hit and now > self.record_at + LONGEST_HANG:
            raise Halted(f"no record for {LONGEST_HANG:.0f} s, with {up} up: {self.world.said(HUB)}")
