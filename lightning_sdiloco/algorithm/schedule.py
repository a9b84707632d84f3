"""When fragments launch and land: arithmetic on the number of the inner step, and on what all groups heard."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Schedule:
    """The schedule of Streaming DiLoCo, Algorithm 2 of https://arxiv.org/abs/2501.18512.

    Fragment ``p`` of ``P``, counted from 0, has the offset ``floor(p * H / P)``. It launches after inner step ``t``
    when ``t >= H + offset`` and ``(t - offset) % H == 0``, so never before it has done ``H`` steps. It lands
    ``overlap_steps`` later.

    ``warmup_steps`` come first; after the last of them all fragments launch and land, and ``t`` counts from there.

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
        """Returns whether an inner step belongs to the warm-up."""
        return 1 <= step <= self.warmup_steps

    def offset(self, fragment: int) -> int:
        """Returns by how many inner steps the launches of a fragment are shifted (t_p in the paper)."""
        return fragment * self.sync_every // self.fragments

    def launches(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after inner step ``step``, in order.

        Examples:
            >>> schedule = Schedule(sync_every=100, overlap_steps=5, fragments=2, warmup_steps=10)
            >>> schedule.launches(10), schedule.landings(10), schedule.launches(11), schedule.launches(110)
            ((0, 1), (0, 1), (), (0,))
        """
        return self._due(step, 0)

    def landings(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that land after inner step ``step``, in the order of their launch."""
        return self._due(step, self.overlap_steps)

    @property
    def first_round(self) -> int:
        """The inner step after which all of the outer model is trained: after a warm-up, it always is.

        Examples:
            >>> Schedule(sync_every=100, overlap_steps=5, fragments=4).first_round
            180
        """
        return 1 if self.warmup_steps else self.sync_every + self.offset(self.fragments - 1) + self.overlap_steps

    def rounds_in(self, steps: int) -> int:
        """Returns how often every fragment has landed after the warm-up in a run of ``steps`` inner steps.

        Examples:
            >>> Schedule(sync_every=100, overlap_steps=5, fragments=8).rounds_in(300)
            2
        """
        after = steps - self.warmup_steps - self.overlap_steps
        return max(0, (after - self.offset(self.fragments - 1)) // self.sync_every)

    def longest_wait(self, since: int = 0) -> int:
        """Returns the most inner steps until a request has travelled with the next launch and landed.

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
        for step in range(first, last + 1):
            launches, landings = (", ".join(map(str, due)) for due in (self.launches(step), self.landings(step)))
            if launches or landings:
                lines.append(f"{step:>4}  {launches or '-':<8}  {landings or '-'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _due(self, step: int, later: int) -> tuple[int, ...]:
        """Returns the fragments that launched that many inner steps before."""
        if 0 < step == self.warmup_steps:
            return tuple(range(self.fragments))
        since = step - self.warmup_steps - later
        if since < self.sync_every:
            return ()
        # From the first fragment whose offset is at least this one to the first with a larger one.
        offset = since % self.sync_every
        first, end = (-(-at * self.fragments // self.sync_every) for at in (offset, offset + 1))
        return tuple(range(first, end))


class Heard(NamedTuple):
    """What all groups know of a launch once it has landed, the same in all of them.

    Attributes:
        fragment: The fragment.
        launched_at: The inner step of the launch, as `LaunchSchedule.due` counts them.
        present: The groups that counted in the mean, in rising order.
        norms: Norm of the outer gradient of each group, before any compression, by group.
        trained: Micro-batches that each group trained since its own last launch of the fragment, by group.

    Examples:
        >>> landing = Heard(0, 100, present=(0, 1), norms=(3.0, 2.0), trained=(50, 40))
        >>> [landing.norms[group] / landing.trained[group] for group in landing.present]
        [0.06, 0.05]
    """

    fragment: int
    launched_at: int
    present: tuple[int, ...]
    norms: tuple[float, ...]
    trained: tuple[float, ...]


class LaunchSchedule(ABC):
    """Decides after which inner steps fragments launch. They land ``overlap_steps`` later.

    Make it a frozen dataclass: its ``repr`` is compared between ranks, and with the checkpoint's. A fragment in flight
    must not be due. The first launch of every fragment follows the `Schedule`: until all have landed once, evaluation
    shows the mean of the groups.

    Examples:
        >>> @dataclass(frozen=True)
        ... class AllAtOnce(LaunchSchedule):
        ...     def start(self, schedule):
        ...         return {"every": schedule.sync_every, "all": list(range(schedule.fragments))}
        ...
        ...     def due(self, state, step):
        ...         return tuple(state["all"]) if step % state["every"] == 0 else ()
        ...
        ...     def heard(self, state, landing):
        ...         return state
        >>> AllAtOnce().due({"every": 20, "all": [0, 1, 2]}, step=40)
        (0, 1, 2)
    """

    @abstractmethod
    def start(self, schedule: Schedule) -> Mapping[str, Any]:
        """Returns the state before the first inner step, as JSON.

        Args:
            schedule: The arithmetic of the run: ``sync_every``, ``overlap_steps``, and the number of fragments.
        """

    @abstractmethod
    def due(self, state: Mapping[str, Any], step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after an inner step, in order.

        Args:
            state: The state.
            step: The inner step, counted from 1 since the rounds began, a warm-up left out.
        """

    @abstractmethod
    def heard(self, state: Mapping[str, Any], landing: Heard) -> Mapping[str, Any]:
        """Returns the state after a landing."""

    def longest_wait(self, schedule: Schedule, since: int = 0) -> int:
        """Returns the most inner steps until a request has travelled with a launch and landed.

        Args:
            schedule: As for `start`.
            since: The first inner step after which the request may be made.
        """
        return schedule.longest_wait(since)


@dataclass(frozen=True)
class Every(LaunchSchedule):
    """Launches every fragment every ``sync_every`` inner steps: the schedule itself, whatever is heard."""

    def start(self, schedule: Schedule) -> Mapping[str, Any]:
        return {"sync_every": schedule.sync_every, "fragments": schedule.fragments}

    def due(self, state: Mapping[str, Any], step: int) -> tuple[int, ...]:
        return Schedule(overlap_steps=0, **state).launches(step)

    def heard(self, state: Mapping[str, Any], landing: Heard) -> Mapping[str, Any]:
        return state


@dataclass(frozen=True)
class Selective(LaunchSchedule):
    """Launches less often while outer gradients hardly change: SelSync (arXiv 2307.07950) for worker groups.

    A group's rate is the norm of its outer gradient over the inner steps it trained. As long as every group's rate
    stays within ``threshold``, relatively, of the rate at the launch before, the inner steps to the next launch double,
    up to ``most * sync_every``; otherwise they return to ``sync_every``. The next outer gradient holds all that was
    trained meanwhile. This saves bytes, not peak bandwidth.

    Args:
        threshold: Least relative change of a rate that counts, at least 0; 0 never launches less often.
        most: How many times ``sync_every`` may lie between two launches of a fragment, at least 1.

    Raises:
        ValueError: If either is out of range.

    Examples:
        >>> schedule = Selective(threshold=0.3, most=4)
        >>> state = schedule.start(Schedule(sync_every=10, overlap_steps=0, fragments=1))
        >>> launches = []
        >>> for step in range(1, 101):
        ...     if schedule.due(state, step):
        ...         launches.append(step)
        ...         rate = 3.0 if step >= 70 else 1.0  # training changes
        ...         trained = step - (launches[-2] if launches[1:] else 0)
        ...         state = schedule.heard(state, Heard(0, step, (0, 1), (rate * trained,) * 2, (trained,) * 2))
        >>> launches
        [10, 20, 40, 80, 90]
    """

    threshold: float = 0.3
    most: int = 4

    def __post_init__(self) -> None:
        for name, least in {"threshold": 0, "most": 1}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float) if name == "threshold" else int):
                raise ValueError(f"{name}={value!r} is not a {'number' if name == 'threshold' else 'whole number'}.")
            if not value >= least:
                raise ValueError(f"{name}={value!r} is out of range: it must be at least {least}. Choose another one.")

    def start(self, schedule: Schedule) -> Mapping[str, Any]:
        first = [schedule.sync_every + schedule.offset(fragment) for fragment in range(schedule.fragments)]
        return {
            "sync_every": schedule.sync_every,
            "next": first,
            "stride": [1] * schedule.fragments,
            "rates": [[] for _ in first],
        }

    def due(self, state: Mapping[str, Any], step: int) -> tuple[int, ...]:
        return tuple(fragment for fragment, at in enumerate(state["next"]) if at == step)

    def heard(self, state: Mapping[str, Any], landing: Heard) -> Mapping[str, Any]:
        own, before = landing.fragment, state["rates"][landing.fragment]
        rates = [norm / max(1, steps) for norm, steps in zip(landing.norms, landing.trained, strict=True)]
        # Multiplied, not divided: a group may not have moved before.
        is_calm = bool(landing.present) and any(before) and self.threshold > 0
        is_calm = is_calm and all(
            rates[group] == before[group] == 0 or abs(rates[group] - before[group]) < self.threshold * before[group]
            for group in landing.present
        )
        stride = min(self.most, 2 * state["stride"][own]) if is_calm else 1
        new = {"next": landing.launched_at + stride * state["sync_every"], "stride": stride, "rates": rates}
        changed = {name: [*state[name][:own], value, *state[name][own + 1 :]] for name, value in new.items()}
        return {**state, **changed}

    def longest_wait(self, schedule: Schedule, since: int = 0) -> int:
        return max(schedule.longest_wait(since), self.most * schedule.sync_every + schedule.overlap_steps)
