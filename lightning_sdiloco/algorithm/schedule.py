"""When fragments launch and land: pure arithmetic on the number of the inner step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Event(NamedTuple):
    """What happens after one inner step.

    Attributes:
        step: Number of the inner step, from 1.
        launches: Fragments that launch, in order.
        landings: Fragments that land, in order.
    """

    step: int
    launches: tuple[int, ...]
    landings: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The schedule of Streaming DiLoCo, Algorithm 2 of https://arxiv.org/abs/2501.18512.

    Fragment ``p`` of ``P``, counted from 0, has the offset ``floor(p * H / P)``. It launches after inner step ``t``
    when ``t >= H + offset`` and ``(t - offset) % H == 0``, so never before it has done ``H`` steps of its own. It lands
    ``overlap_steps`` later.

    Before that come ``warmup_steps``, after the last of which all fragments launch and land. ``t`` counts from there.

    Args:
        sync_every: Inner steps between two launches of the same fragment (H in the paper).
        overlap_steps: Inner steps between the launch of a fragment and its landing (tau in the paper).
        fragments: Number of fragments (P in the paper).
        warmup_steps: Inner steps of the warm-up.

    Examples:
        >>> schedule = Schedule(sync_every=100, overlap_steps=5, fragments=2)
        >>> schedule.launches(100), schedule.landings(105), schedule.launches(150)
        ((0,), (0,), (1,))
        >>> print(schedule.table(100, 205))
        step  launches  lands
         100  0         -
         105  -         0
         150  1         -
         155  -         1
         200  0         -
         205  -         0
    """

    sync_every: int
    overlap_steps: int
    fragments: int
    warmup_steps: int = 0

    def is_warmup(self, step: int) -> bool:
        """Tells whether an inner step belongs to the warm-up."""
        return 1 <= step <= self.warmup_steps

    def offset(self, fragment: int) -> int:
        """Returns the number of inner steps by which the launches of a fragment are shifted (t_p in the paper)."""
        return fragment * self.sync_every // self.fragments

    def launches(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after inner step ``step``, in order.

        Examples:
            >>> schedule = Schedule(sync_every=100, overlap_steps=5, fragments=2, warmup_steps=10)
            >>> schedule.launches(10), schedule.landings(10), schedule.launches(11), schedule.launches(110)
            ((0, 1), (0, 1), (), (0,))
        """
        return self._all if self._ends_warmup(step) else self._launched(step - self.warmup_steps)

    def landings(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that land after inner step ``step``, in the order of their launch."""
        if self._ends_warmup(step):
            return self._all
        return self._launched(step - self.warmup_steps - self.overlap_steps)

    @property
    def first_round(self) -> int:
        """The inner step after which the outer model holds what was trained: in a warm-up it always does.

        Examples:
            >>> Schedule(sync_every=100, overlap_steps=5, fragments=4).first_round
            180
        """
        return 1 if self.warmup_steps else self.sync_every + self.offset(self.fragments - 1) + self.overlap_steps

    def round(self, step: int) -> int:
        """Returns how many launches of fragment 0 after the warm-up have landed: the outer step that users see."""
        return max(0, (step - self.warmup_steps - self.overlap_steps) // self.sync_every)

    def rounds_in(self, steps: int) -> int:
        """Returns how often every fragment has landed after the warm-up by the end of a run of so many inner steps.

        Examples:
            >>> Schedule(sync_every=100, overlap_steps=5, fragments=8).rounds_in(300)
            2
        """
        after = steps - self.warmup_steps - self.overlap_steps
        return max(0, (after - self.offset(self.fragments - 1)) // self.sync_every)

    def longest_wait(self, since: int = 0) -> int:
        """Returns how many inner steps it takes at most until a request has travelled with the next launch and landed.

        Args:
            since: The first inner step after which the request may be made; it may also be made after any later one.

        Examples:
            >>> schedule = Schedule(sync_every=100, overlap_steps=5, fragments=4)
            >>> schedule.longest_wait(), schedule.longest_wait(since=80), schedule.longest_wait(since=100)
            (105, 30, 30)
        """
        since = max(0, since - self.warmup_steps)
        rounds = range(max(1, since // self.sync_every), max(1, since // self.sync_every) + 3)
        launches = {self.sync_every * r + self.offset(p) for r in rounds for p in range(self.fragments)}
        return max(b - a for a, b in pairwise([since, *sorted(t for t in launches if t > since)])) + self.overlap_steps

    def events(self, first: int, last: int) -> Iterator[Event]:
        """Yields the inner steps from ``first`` to ``last``, both included, after which something launches or lands."""
        for step in range(first, last + 1):
            event = Event(step, self.launches(step), self.landings(step))
            if event.launches or event.landings:
                yield event

    def table(self, first: int = 1, last: int | None = None) -> str:
        """Returns the schedule as text, one line for each inner step after which something launches or lands.

        Args:
            first: First inner step of the table.
            last: Last inner step of the table; by default the end of the second round.

        Returns:
            The table, with the columns step, launches, lands.
        """
        last = self.warmup_steps + 3 * self.sync_every - 1 + self.overlap_steps if last is None else last
        lines = [f"{'step':>4}  {'launches':<8}  lands"]
        for event in self.events(first, last):
            lines.append(f"{event.step:>4}  {_names(event.launches):<8}  {_names(event.landings)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _ends_warmup(self, step: int) -> bool:
        return 0 < step == self.warmup_steps

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.fragments))

    def _launched(self, step: int) -> tuple[int, ...]:
        if step < self.sync_every:
            return ()
        offset = step % self.sync_every
        return tuple(range(self._first_from(offset), self._first_from(offset + 1)))

    def _first_from(self, offset: int) -> int:
        """Returns the first fragment whose offset is at least this one."""
        return -(-offset * self.fragments // self.sync_every)


def _names(fragments: tuple[int, ...]) -> str:
    return ", ".join(map(str, fragments)) or "-"
