"""Anchors: states that are left at the hub, so that the run survives the loss of all sites."""

from collections.abc import Iterable

from lightning_sdiloco.federation.messages import StateHeader
from lightning_sdiloco.federation.records import Record
from lightning_sdiloco.federation.terms import ANCHOR_EVERY


class Anchors:
    """Knows which states at the hub can be trusted, and when it is time for a new one."""

    def __init__(self, headers: Iterable[StateHeader] = ()) -> None:
        self._states: list[tuple[StateHeader, set[int]]] = [(header, set()) for header in headers]

    @property
    def headers(self) -> list[StateHeader]:
        """The states that are kept, the oldest first. What is not among them can be deleted."""
        return [header for header, _ in self._states]

    @property
    def best(self) -> StateHeader | None:
        """The state to begin from if no site has one."""
        return self._states[0][0] if self._states else None

    def add(self, header: StateHeader) -> None:
        """Takes a state that is durable at the hub."""
        self._states.append((header, set()))

    def check(self, record: Record) -> None:
        """Compares the states with a record, and drops those that are wrong or no longer needed."""
        sound = []
        for header, verified in self._states:
            position = header.applied[record.fragment]
            if position.round == record.round - 1:
                if (position.key, header.digests[record.fragment]) != (record.previous, record.digest):
                    continue
                verified.add(record.fragment)
            sound.append((header, verified))
        last = max((i for i, (header, ok) in enumerate(sound) if len(ok) == len(header.applied)), default=0)
        self._states = sound[last:]

    def is_due(self, rounds: Iterable[int]) -> bool:
        """Tells whether it is time for a new state."""
        if not self._states:
            return True
        newest = self._states[-1][0].applied
        return any(closed - own.round >= ANCHOR_EVERY for closed, own in zip(rounds, newest, strict=True))
