"""The world of an engine: those that train together, and what they launch and land after an inner step."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from lightning_sdiloco.engine.flight import Landing, Purpose
from lightning_sdiloco.engine.requests import Mailbox
from lightning_sdiloco.engine.rounds import Rounds


class World(Protocol):
    """Launches and lands what is due after an inner step, with all who train together."""

    @property
    def requested(self) -> int:
        """What is asked of all ranks after this inner step, where that needs no launch; see `Mailbox`."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nobody trains any more."""
        ...

    def join(self, step: int) -> None:
        """Waits until there is all that training begins with, after an inner step."""
        ...

    def trained(self, micro_batches: int, samples: int) -> None:
        """Counts an inner step in which this rank trained so many micro-batches, and in them so many samples."""
        ...

    def launch_due(self, step: int, mailbox: Mailbox) -> int:
        """Launches what is due."""
        ...

    def land_due(self, step: int) -> Iterator[Landing]:
        """Lands what is due after an inner step, one after the other, and prepares for the next inner step."""
        ...

    def land_all(self, step: int) -> Iterator[Landing]:
        """Lands everything that is still to land: training is over."""
        ...

    def leave(self, step: int) -> Iterator[Landing]:
        """Ends before training is over, and lands what others need for that."""
        ...

    def final_exchange(self, step: int, mailbox: Mailbox) -> Iterator[Landing | None]:
        """Launches every fragment for the mean of the local parameters, a few at a time, and lands it."""
        ...

    def close(self) -> None:
        """Tells those who might wait that training has ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, and launches again what was in flight."""
        ...


class FixedWorld:
    """The world of all groups that were launched together: each knows what is due, and nobody asks anybody."""

    requested = 0
    is_over = False

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def join(self, step: int) -> None:
        """Does nothing: all groups begin together."""

    def trained(self, micro_batches: int, samples: int) -> None:
        """Counts an inner step: all micro-batches weigh the same."""
        for fragment in self._rounds.fragments:
            fragment.weight += micro_batches

    def launch_due(self, step: int, mailbox: Mailbox) -> int:
        """Launches what the pace says; see `World.launch_due`."""
        due = self._rounds.due(step)
        if due:
            self._rounds.require_coverage()
        is_warmup = self._rounds.schedule.is_warmup(step - self._rounds.began_at)
        purpose = Purpose.START if is_warmup else Purpose.ROUND
        for index in due:
            self._rounds.launch(index, step, mailbox, purpose)
        return len(due)

    def land_due(self, step: int) -> Iterator[Landing]:
        """Lands what is due, and prefetches what is launched after the next inner step."""
        schedule, steps, landings = self._rounds.schedule, step - self._rounds.began_at, self._rounds.lands(step)
        for _ in range(landings):
            yield self._rounds.land(step)
        if schedule.is_warmup(steps) and not landings:
            self._rounds.take_local()
        if not schedule.is_warmup(steps + 1):
            for index in self._rounds.due(step + 1):
                self._rounds.fragments[index].prefetch()

    def land_all(self, step: int) -> Iterator[Landing]:
        """Lands what is in flight, in the order of the launches."""
        while self._rounds.flights:
            yield self._rounds.land(step)

    def leave(self, step: int) -> Iterator[Landing]:
        """Lands nothing: all groups end together, and go on together with what is in flight."""
        return iter(())

    def final_exchange(self, step: int, mailbox: Mailbox) -> Iterator[Landing | None]:
        """Launches every fragment, and lands it; see `World.final_exchange`."""
        purpose, at_once = self._rounds.purpose_of_mean(step), self._rounds.most_at_once
        for index in range(len(self._rounds.fragments)):
            landing = self._rounds.land(step) if len(self._rounds.flights) == at_once else None
            self._rounds.launch(index, step, mailbox, purpose)
            yield landing
        yield from self.land_all(step)

    def close(self) -> None:
        """Does nothing: all groups end together."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what is in flight."""
        return {"flights": [flight.snapshot.state_dict() for flight in self._rounds.flights]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Launches again what was in flight."""
        self._rounds.start_flights(state["flights"])
