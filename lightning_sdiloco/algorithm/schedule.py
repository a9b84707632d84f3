"""The schedule of launches and landings, computed from the inner step number and from landings that
are the same in all groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

ScheduleState = Mapping[str, Any]
"""The JSON state of a `LaunchSchedule`, which only the schedule itself interprets."""


@dataclass(frozen=True)
class DenseBeginning:
    """Short rounds at the beginning of a run, in which groups exchange more often.

    A dense beginning replaces an initial phase of gradient averaging. Starting with the first inner
    step, all data is sent in the background. In dense rounds, the built-in Nesterov SGD uses less
    momentum, as short rounds require. An ``lr_schedule`` counts all dense rounds as the first
    round.

    Args:
        rounds: The number of dense rounds for every fragment, at least 1.
        sync_every: The number of inner steps between two launches of the same fragment in dense
            rounds, at most half of the run's ``sync_every``.
        overlap_steps: The number of inner steps from launch to landing in dense rounds, less than
            ``sync_every``. None means half of ``sync_every`` or the run's ``overlap_steps``,
            whichever is less.

    Raises:
        ValueError: If an argument is out of range. The message names the argument.

    Examples:
        >>> dense = DenseBeginning(rounds=3, sync_every=4)
        >>> dense.steps, Schedule(sync_every=20, overlap_steps=5, fragments=2, dense=dense).launches(6)
        (12, (1,))
    """

    rounds: int
    sync_every: int = 4
    overlap_steps: int | None = None

    def __post_init__(self) -> None:
        self._require("rounds", self.rounds, 1)
        self._require("sync_every", self.sync_every, 1)
        if self.overlap_steps is None:
            return
        self._require("overlap_steps", self.overlap_steps, 0)
        if self.overlap_steps >= self.sync_every:
            raise ValueError(
                f"dense_beginning.overlap_steps={self.overlap_steps} is out of range: it must be"
                f" below its sync_every, which is {self.sync_every}. Choose a smaller value, or"
                " leave out overlap_steps."
            )

    @staticmethod
    def _require(name: str, value: object, least: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"dense_beginning.{name}={value!r} is not valid: it must be a whole number of at"
                f" least {least}. Choose a different value, or disable the dense beginning with"
                " dense_beginning=None."
            )

    @property
    def steps(self) -> int:
        """The number of inner steps before ordinary rounds start."""
        return self.rounds * self.sync_every

    def overlap(self, overlap_steps: int) -> int:
        """Returns the length of a flight in inner steps, given the run's ``overlap_steps``."""
        if self.overlap_steps is not None:
            return self.overlap_steps
        return min(self.sync_every // 2, overlap_steps)

    def after(self, step: int) -> "DenseBeginning | None":
        """Returns what remains of the dense beginning if rounds restart after an inner step.

        Examples:
            >>> DenseBeginning(rounds=3).after(5), DenseBeginning(rounds=3).after(9)
            (DenseBeginning(rounds=1, sync_every=4, overlap_steps=None), None)
        """
        rounds = max(0, self.steps - step) // self.sync_every
        if not rounds:
            return None
        return replace(self, rounds=rounds)

    @staticmethod
    def read(data: Mapping[str, Any] | None) -> "DenseBeginning | None":
        """Returns the dense beginning that a checkpoint describes."""
        if data is None:
            return None
        return DenseBeginning(**data["fields"])


@dataclass(frozen=True)
class Schedule:
    """The schedule of Streaming DiLoCo, as in Algorithm 2 of https://arxiv.org/abs/2501.18512.

    Fragment ``p`` of ``P``, counted from 0, has the offset ``floor(p * H / P)``. The fragment
    launches after inner step ``t`` if ``t >= H + offset`` and ``(t - offset) % H == 0``, and
    therefore never before step ``H``. It lands ``overlap_steps`` later.

    The rounds of a `DenseBeginning` come first. If its ``sync_every`` is ``h``, the ``r``-th launch
    of a fragment, counted from 1, follows inner step ``r * h + floor(p * h / P)``. At inner step
    ``rounds * h``, ``t`` restarts at 0.

    Args:
        sync_every: The number of inner steps between two launches of the same fragment (H in the
            paper).
        overlap_steps: The number of inner steps from launch to landing (tau in the paper).
        fragments: The number of fragments (P in the paper).
        dense: The dense beginning, or None.

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
    dense: DenseBeginning | None = None

    # Rounds, counted from 1, and inner steps

    @property
    def dense_rounds(self) -> int:
        """The number of rounds that each fragment has in the dense beginning."""
        if self.dense is None:
            return 0
        return self.dense.rounds

    @property
    def dense_steps(self) -> int:
        """The number of inner steps before ordinary rounds start."""
        if self.dense is None:
            return 0
        return self.dense.steps

    @property
    def first_launch(self) -> int:
        """The inner step after which the first fragment launches."""
        if self.dense is None:
            return self.sync_every
        return self.dense.sync_every

    @property
    def _dense_overlap(self) -> int:
        if self.dense is None:
            return 0
        return self.dense.overlap(self.overlap_steps)

    def is_dense(self, step: int) -> bool:
        """Returns whether a launch after an inner step belongs to the dense beginning."""
        # The first launch after the dense beginning comes at least two dense rounds later.
        return self.dense is not None and step < self.dense.steps + self.dense.sync_every

    def is_dense_round(self, round: int) -> bool:
        """Returns whether a round, counted from 1, belongs to the dense beginning."""
        return round <= self.dense_rounds

    def overlap_of(self, step: int) -> int:
        """Returns the length, in inner steps, of a flight that launches after an inner step."""
        if self.is_dense(step):
            return self._dense_overlap
        return self.overlap_steps

    def overlap_of_round(self, round: int) -> int:
        """Returns the length, in inner steps, of the flights in a round, counted from 1."""
        if self.is_dense_round(round):
            return self._dense_overlap
        return self.overlap_steps

    def offset(self, fragment: int) -> int:
        """Returns the offset of a fragment's launches in inner steps (t_p in the paper)."""
        return fragment * self.sync_every // self.fragments

    def launch_of(self, fragment: int, round: int) -> int:
        """Returns the inner step after which a fragment launches in a round, counted from 1. Round
        0 gives the step from which the fragment's rounds are counted.

        Examples:
            >>> schedule = Schedule(sync_every=20, overlap_steps=5, fragments=2, dense=DenseBeginning(rounds=2))
            >>> [schedule.launch_of(1, round) for round in range(5)]
            [2, 6, 10, 38, 58]
        """
        if self.dense is not None and self.is_dense_round(round):
            offset = fragment * self.dense.sync_every // self.fragments
            return round * self.dense.sync_every + offset
        later_rounds = round - self.dense_rounds
        return self.dense_steps + later_rounds * self.sync_every + self.offset(fragment)

    # Fragments that are due

    def launches(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after inner step ``step``, in order.

        Examples:
            >>> dense = DenseBeginning(rounds=2, sync_every=4, overlap_steps=1)
            >>> schedule = Schedule(sync_every=100, overlap_steps=5, fragments=2, dense=dense)
            >>> schedule.launches(8), schedule.landings(9), schedule.launches(10), schedule.launches(108)
            ((0,), (0,), (1,), (0,))
        """
        return self._due(step, step)

    def landings(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that land after inner step ``step``, in launch order."""
        return self._due(step - self._dense_overlap, step - self.overlap_steps)

    def _due(self, dense_launch: int, launch: int) -> tuple[int, ...]:
        """Returns the fragments that launched after step ``dense_launch`` if this step is in the
        dense beginning, and otherwise after step ``launch``.
        """
        dense = self.dense
        if dense is not None and self.is_dense(dense_launch) and dense_launch >= dense.sync_every:
            return self._with_offset(dense_launch % dense.sync_every, dense.sync_every)
        since = launch - self.dense_steps
        if since < self.sync_every:
            return ()
        return self._with_offset(since % self.sync_every, self.sync_every)

    def _with_offset(self, offset: int, sync_every: int) -> tuple[int, ...]:
        """Returns the fragments with this offset in rounds of ``sync_every`` inner steps."""
        # These fragments start with the first one that has at least this offset and end before the
        # first one that has a larger offset.
        first = -(-offset * self.fragments // sync_every)
        end = -(-(offset + 1) * self.fragments // sync_every)
        return tuple(range(first, end))

    # A run as a whole

    @property
    def first_round(self) -> int:
        """The inner step after which every part of the outer model has been trained.

        Examples:
            >>> Schedule(sync_every=100, overlap_steps=5, fragments=4).first_round
            180
        """
        return self.launch_of(self.fragments - 1, 1) + self.overlap_of_round(1)

    def rounds_in(self, steps: int) -> int:
        """Returns how many times each fragment lands in a run of ``steps`` inner steps, not
        counting the dense beginning.

        Examples:
            >>> Schedule(sync_every=100, overlap_steps=5, fragments=8).rounds_in(300)
            2
        """
        last_launch = steps - self.dense_steps - self.overlap_steps
        return max(0, (last_launch - self.offset(self.fragments - 1)) // self.sync_every)

    def launches_in(self, fragment: int, steps: int) -> tuple[int, int]:
        """Returns how many times a fragment launches in a run of ``steps`` inner steps, during and
        after the dense beginning.

        Examples:
            >>> schedule = Schedule(sync_every=20, overlap_steps=5, fragments=2, dense=DenseBeginning(rounds=2))
            >>> [schedule.launches_in(1, steps) for steps in (5, 6, 37, 38)]
            [(0, 0), (1, 0), (2, 0), (2, 1)]
        """
        dense_launches = 0
        if self.dense is not None:
            since_offset = steps - fragment * self.dense.sync_every // self.fragments
            dense_launches = min(self.dense.rounds, max(0, since_offset) // self.dense.sync_every)
        since_offset = steps - self.dense_steps - self.offset(fragment)
        return dense_launches, max(0, since_offset) // self.sync_every

    def longest_wait(self, since: int = 0) -> int:
        """Returns the maximum number of inner steps that a request needs to travel with the next
        launch and land.

        Args:
            since: The first inner step after which the request can be made. The request can also be
                made after any later step.

        Examples:
            >>> schedule = Schedule(sync_every=100, overlap_steps=5, fragments=4)
            >>> schedule.longest_wait(), schedule.longest_wait(since=80), schedule.longest_wait(since=100)
            (105, 30, 30)
        """
        # Includes the rounds that have launched by step ``since`` and three more rounds, the last
        # two of which are equal.
        launched_rounds = sum(self.launches_in(0, since))
        last_round = max(self.dense_rounds, launched_rounds) + 3
        launches = set[int]()
        for round in range(max(1, launched_rounds), last_round + 1):
            launches.update(self.launch_of(fragment, round) for fragment in range(self.fragments))
        # The last round may be incomplete in this set.
        end = self.launch_of(0, last_round)
        later = sorted(launch for launch in launches if since < launch <= end)
        return max(
            launch - before + self.overlap_of(launch)
            for before, launch in pairwise([since, *later])
        )

    def table(self, first: int = 1, last: int | None = None) -> str:
        """Formats the schedule as a table with one line for each inner step after which a fragment
        launches or lands.

        Args:
            first: The first inner step in the table.
            last: The last inner step in the table. The default is the end of the second round after
                the dense beginning.

        Returns:
            A table with the columns step, launches and lands.
        """
        if last is None:
            last = self.dense_steps + 3 * self.sync_every - 1 + self.overlap_steps
        lines = [f"{'step':>4}  {'launches':<8}  lands"]
        for step in range(first, last + 1):
            launches = ", ".join(map(str, self.launches(step)))
            landings = ", ".join(map(str, self.landings(step)))
            if launches or landings:
                lines.append(f"{step:>4}  {launches or '-':<8}  {landings or '-'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


class Heard(NamedTuple):
    """The data about a landing, which is the same in all groups.

    Attributes:
        fragment: The number of the fragment.
        launched_at: The inner step of the launch, as counted by `LaunchSchedule.due`.
        present: The groups that counted in the mean, in ascending order.
        norms: The norm of each group's outer gradient before compression.
        trained: The number of micro-batches that each group has trained on since it last launched
            the fragment.

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
    """Decides after which inner steps fragments launch. Fragments land ``overlap_steps`` later.

    Make a launch schedule a frozen dataclass, because its ``repr`` is compared between ranks and
    with the checkpoint. A fragment in flight must not be due. The first launch of every fragment
    follows the `Schedule`. Until all fragments have landed once, evaluation uses the mean of the
    groups.

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
    def start(self, schedule: Schedule) -> ScheduleState:
        """Returns the state before the first inner step, as JSON.

        Args:
            schedule: The run's schedule, with ``sync_every``, ``overlap_steps`` and the number of
                fragments.
        """

    @abstractmethod
    def due(self, state: ScheduleState, step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after an inner step, in order.

        Args:
            state: The state.
            step: The inner step, counted from 1 at the start of the rounds.
        """

    @abstractmethod
    def heard(self, state: ScheduleState, landing: Heard) -> ScheduleState:
        """Returns the state after a landing."""

    def longest_wait(self, schedule: Schedule, since: int = 0) -> int:
        """Returns the maximum number of inner steps that a request needs to travel with a launch
        and land.

        Args:
            schedule: The schedule of the run.
            since: The first inner step after which the request may be made.
        """
        return schedule.longest_wait(since)


@dataclass(frozen=True)
class Every(LaunchSchedule):
    """Launches every fragment once every ``sync_every`` inner steps, as in the `Schedule`."""

    def start(self, schedule: Schedule) -> ScheduleState:
        return {"sync_every": schedule.sync_every, "fragments": schedule.fragments}

    def due(self, state: ScheduleState, step: int) -> tuple[int, ...]:
        return Schedule(overlap_steps=0, **state).launches(step)

    def heard(self, state: ScheduleState, landing: Heard) -> ScheduleState:
        return state


@dataclass(frozen=True)
class Selective(LaunchSchedule):
    """Launches less often while outer gradients hardly change, as in SelSync (arXiv 2307.07950).

    A group's rate is the norm of its outer gradient divided by the number of inner steps that the
    group trained. If every group's rate has changed by less than the relative ``threshold`` since
    the previous launch, the number of inner steps until the next launch doubles, up to ``most *
    sync_every``. Otherwise, the interval returns to ``sync_every``. The next outer gradient
    contains all training since the last launch. This schedule saves bytes but does not lower the
    peak bandwidth.

    Args:
        threshold: The smallest relative change in a rate that is not ignored, at least 0. With 0,
            fragments never launch less often.
        most: The longest interval between two launches of a fragment, as a multiple of
            ``sync_every``, at least 1.

    Raises:
        ValueError: If an argument is out of range.

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
        self._require("threshold", (int, float), "number", 0)
        self._require("most", (int,), "whole number", 1)

    def _require(self, name: str, kinds: tuple[type[float], ...], kind: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{name}={value!r} is not a {kind}.")
        if not value >= least:
            raise ValueError(
                f"{name}={value!r} is out of range: it must be at least {least}. Choose a larger"
                " value."
            )

    def start(self, schedule: Schedule) -> ScheduleState:
        fragments = range(schedule.fragments)
        return {
            "sync_every": schedule.sync_every,
            "next": [schedule.sync_every + schedule.offset(fragment) for fragment in fragments],
            "stride": [1 for _ in fragments],
            "rates": [[] for _ in fragments],
        }

    def due(self, state: ScheduleState, step: int) -> tuple[int, ...]:
        return tuple(fragment for fragment, launch in enumerate(state["next"]) if launch == step)

    def heard(self, state: ScheduleState, landing: Heard) -> ScheduleState:
        rates = [
            norm / max(1, steps) for norm, steps in zip(landing.norms, landing.trained, strict=True)
        ]
        stride = 1
        if self._is_calm(state["rates"][landing.fragment], rates, landing.present):
            stride = min(self.most, 2 * state["stride"][landing.fragment])
        of_fragment = {
            "next": landing.launched_at + stride * state["sync_every"],
            "stride": stride,
            "rates": rates,
        }
        new_state = dict(state)
        for name, value in of_fragment.items():
            new_state[name] = list(state[name])
            new_state[name][landing.fragment] = value
        return new_state

    def _is_calm(self, before: list[float], rates: list[float], present: Sequence[int]) -> bool:
        """Returns whether the rates of all present groups have changed by less than the
        threshold.
        """
        if not present or not any(before) or self.threshold == 0:
            return False
        return all(
            rates[group] == before[group] == 0
            # Dividing by the previous rate would fail, because this rate may be 0.
            or abs(rates[group] - before[group]) < self.threshold * before[group]
            for group in present
        )

    def longest_wait(self, schedule: Schedule, since: int = 0) -> int:
        return max(
            schedule.longest_wait(since), self.most * schedule.sync_every + schedule.overlap_steps
        )


class Timetable:
    """The launches and landings of a run. After the dense beginning, a launch schedule determines
    the launches from previous landings.

    Args:
        schedule: The schedule of the rounds, with the remaining dense beginning.
        launches: The launch schedule.
        began_at: The inner step of the run after which the rounds started.

    Attributes:
        state: The state of the launch schedule.

    Examples:
        >>> timetable = Timetable(Schedule(20, 5, 2), Every(), began_at=100)
        >>> timetable.due(120), timetable.lands_at(120), timetable.due(130)
        ((0,), 125, (1,))
    """

    def __init__(self, schedule: Schedule, launches: LaunchSchedule, began_at: int) -> None:
        self.schedule = schedule
        self.began_at = began_at
        self._launches = launches
        self.state = launches.start(replace(schedule, dense=None))

    def due(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after an inner step, in order."""
        if self.is_dense(step):
            return self.schedule.launches(step - self.began_at)
        return self._launches.due(self.state, self.counted_in_rounds(step))

    def is_dense(self, step: int) -> bool:
        """Returns whether an inner step belongs to the dense beginning."""
        return self.schedule.is_dense(step - self.began_at)

    def counted_in_rounds(self, step: int) -> int:
        """Returns the number of inner steps since the end of the dense beginning."""
        return step - self.began_at - self.schedule.dense_steps

    def lands_at(self, launched_at: int) -> int:
        """Returns the inner step after which a flight lands. Flights land in launch order."""
        return launched_at + self.schedule.overlap_of(launched_at - self.began_at)

    def longest_wait(self, step: int) -> int:
        """Returns the maximum number of inner steps until a request lands with a launch, if the
        request is made after this inner step or later.
        """
        return self._launches.longest_wait(self.schedule, step - self.began_at)

    def note(self, landing: Heard) -> None:
        """Records a landing, whose ``launched_at`` counts all inner steps of the run."""
        launched_at = self.counted_in_rounds(landing.launched_at)
        self.state = self._launches.heard(self.state, landing._replace(launched_at=launched_at))
