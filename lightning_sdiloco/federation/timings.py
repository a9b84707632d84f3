"""When contributions came, by the clock of the hub: what a quorum decides by that learns from the past."""

from lightning_sdiloco.federation.records import Contribution, Record, Timing


class Timings:
    """Remembers when contributions came, until a record tells it."""

    def __init__(self) -> None:
        # By fragment: the last round that was closed, and when it was opened.
        self._closed: dict[int, tuple[int, float | None]] = {}
        # By fragment and site: when it came for a round, and in which life it was counted when.
        self._came: dict[tuple[int, str], tuple[int, float]] = {}
        self._counted: dict[tuple[int, str], tuple[str, float]] = {}
        self._untold: dict[int, dict[tuple[str, int], Timing]] = {}

    def arrives(self, own: Contribution, now: float, opened: float | None) -> None:
        """Hears of a contribution."""
        self._came[own.fragment, own.site] = own.round, now
        if opened is not None:
            late = round(now - opened, 3)
            timing = Timing(own.site, own.round, late, self._step(own, now))
            self._untold.setdefault(own.fragment, {})[own.site, own.round] = timing

    def arrives_late(self, own: Contribution, now: float) -> None:
        """Hears of a contribution to a round that is closed: once, and only if it was the last one."""
        closed, opened = self._closed.get(own.fragment, (0, None))
        came, _ = self._came.get((own.fragment, own.site), (0, 0.0))
        if own.round == closed and came < closed:
            self.arrives(own, now, opened)

    def _step(self, own: Contribution, now: float) -> float | None:
        """Returns the seconds for each of the inner steps, which are those since the site was last counted."""
        life, since = self._counted.get((own.fragment, own.site), ("", now))
        return float(f"{(now - since) / own.steps:.4g}") if life == own.life and own.steps else None

    def of(self, fragment: int) -> tuple[Timing, ...]:
        """Returns what the next record of a fragment tells, by name of the site."""
        return tuple(own for _, own in sorted(self._untold.get(fragment, {}).items()))

    def closes(self, record: Record, opened: float | None) -> None:
        """Hears that a record has told what it tells."""
        fragment = record.fragment
        self._closed[fragment] = record.round, opened
        self._untold.pop(fragment, None)
        for own in record.counted:
            came, time = self._came.get((fragment, own.site), (0, 0.0))
            if came == record.round:
                self._counted[fragment, own.site] = own.life, time
