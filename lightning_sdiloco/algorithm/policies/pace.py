"""The pace: after which inner steps fragments launch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_sdiloco.algorithm.schedule import Schedule


class Heard(NamedTuple):
    """What all groups know of a launch once it has landed. It travelled, so it is the same in all of them.

    Attributes:
        fragment: The fragment.
        launched_at: The inner step of the launch, as `Pace.due` counts them.
        present: The groups that counted in the mean, rising.
        norms: Norm of the outer gradient of each group, before any compression, by group.
        trained: Micro-batches that each group trained since its own last launch of the fragment, by group.
    """

    fragment: int
    launched_at: int
    present: tuple[int, ...]
    norms: tuple[float, ...]
    trained: tuple[float, ...]


class Pace(ABC):
    """Decides after which inner steps fragments launch. They land ``overlap_steps`` later.

    Make it a frozen dataclass: its ``repr`` is compared between ranks, and with that of a checkpoint. A fragment in
    flight must not be due. The first launch of every fragment is that of the `Schedule`: until all have landed once,
    evaluation shows the mean of the groups.
    """

    @abstractmethod
    def start(self, schedule: Schedule) -> Mapping[str, Any]:
        """Returns the state before the first inner step, as JSON.

        Args:
            schedule: What the run has without a pace: ``sync_every``, ``overlap_steps``, and the number of fragments.
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
        """Returns how many inner steps it takes at most until a request has travelled with a launch and landed.

        Args:
            schedule: As for `start`.
            since: The first inner step after which the request may be made.
        """
        return schedule.longest_wait(since)


@dataclass(frozen=True)
class Every(Pace):
    """Launches every fragment every ``sync_every`` inner steps: the schedule itself, whatever is heard.

    Examples:
        >>> pace = Every()
        >>> pace.due(pace.start(Schedule(sync_every=100, overlap_steps=5, fragments=2)), 150)
        (1,)
    """

    @override
    def start(self, schedule: Schedule) -> Mapping[str, Any]:
        return {"sync_every": schedule.sync_every, "fragments": schedule.fragments}

    @override
    def due(self, state: Mapping[str, Any], step: int) -> tuple[int, ...]:
        return Schedule(overlap_steps=0, **state).launches(step)

    @override
    def heard(self, state: Mapping[str, Any], landing: Heard) -> Mapping[str, Any]:
        return state


@dataclass(frozen=True)
class Selective(Pace):
    """Launches less often while outer gradients hardly change: SelSync (arXiv 2307.07950) for worker groups.

    The rate of a group is the norm of its outer gradient over the inner steps that it trained. As long as no group's
    rate differs from that of the launch before by ``threshold`` of it or more, the inner steps to the next launch
    double, up to ``most * sync_every``; else they are ``sync_every`` again. What was trained meanwhile is all in the
    next outer gradient. It saves bytes, not peak bandwidth.

    Args:
        threshold: Least relative change of a rate that counts as one, from 0 on; 0 never launches less often.
        most: How many times ``sync_every`` may lie between two launches of a fragment, from 1 on.

    Raises:
        ValueError: If one is out of its range.

    Examples:
        >>> pace = Selective(threshold=0.3, most=4)
        >>> state = pace.start(Schedule(sync_every=10, overlap_steps=0, fragments=1))
        >>> launches = []
        >>> for step in range(1, 101):
        ...     if pace.due(state, step):
        ...         launches.append(step)
        ...         rate = 3.0 if step >= 70 else 1.0  # training changes
        ...         trained = step - (launches[-2] if launches[1:] else 0)
        ...         state = pace.heard(state, Heard(0, step, (0, 1), (rate * trained,) * 2, (trained,) * 2))
        >>> launches
        [10, 20, 40, 80, 90]
    """

    threshold: float = 0.3
    most: int = 4

    def __post_init__(self) -> None:
        for name, least in {"threshold": 0, "most": 1}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float) if name == "threshold" else int):
                raise ValueError(f"{name}={value!r} is no {'number' if name == 'threshold' else 'whole number'}.")
            if not value >= least:
                raise ValueError(f"{name}={value!r} is out of range: it must be at least {least}. Choose another one.")

    @override
    def start(self, schedule: Schedule) -> Mapping[str, Any]:
        first = [schedule.sync_every + schedule.offset(fragment) for fragment in range(schedule.fragments)]
        return {
            "sync_every": schedule.sync_every,
            "next": first,
            "stride": [1] * schedule.fragments,
            "rates": [[] for _ in first],
        }

    @override
    def due(self, state: Mapping[str, Any], step: int) -> tuple[int, ...]:
        return tuple(fragment for fragment, at in enumerate(state["next"]) if at == step)

    @override
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

    @override
    def longest_wait(self, schedule: Schedule, since: int = 0) -> int:
        return max(schedule.longest_wait(since), self.most * schedule.sync_every + schedule.overlap_steps)
