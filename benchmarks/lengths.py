"""Groups that train on noisy quadratic bowls, for the guard: plain numbers, thousands of rounds per
second.

Every group descends its own bowl with Adam or SGD, and sends its outer gradient. Outages, restarts
of the learning rate, and differences in speed and data are considered honest; faults are not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sdiloco.algorithm.guard import (
    AGAINST,
    GUARD,
    JUDGED,
    Length,
    Past,
    TooLong,
    direction_in_mean,
    outlying,
    remembered,
)

Vector = npt.NDArray[np.float64]
Fault = Callable[[Vector, int], Vector]
"""A function that changes an outer gradient, given the number of its round."""

VALUES = 48
_OUTER_RATE = 0.7
_OUTER_MOMENTUM = 0.9


def honest(gradient: Vector, round: int) -> Vector:
    return gradient


def constant(rate: float) -> Callable[[int], float]:
    return lambda step: rate


def warm_restarts(rate: float, period: int) -> Callable[[int], float]:
    """Returns the learning rates of ``CosineAnnealingWarmRestarts``, which go down to 0."""
    return lambda step: rate * (1.0 + cos(pi * (step % period) / period)) / 2.0


def warm_up(rate: float, steps: int) -> Callable[[int], float]:
    return lambda step: rate * min(1.0, (step + 1) / steps)


@dataclass(frozen=True)
class Scenario:
    """Honest groups.

    Attributes:
        groups: The number of groups.
        unlike: The distance between their bowls, relative to the distance from the start.
        speeds: The inner steps of each group in a round.
        rates: The learning rate by inner step.
        adam: Adam, or plain SGD.
        outages: For each round, the groups that send nothing but continue to train.
        away: For each round, the groups that do not run.
        apart: Whether each group changes different values, while weight decay changes the others.
    """

    groups: int
    unlike: float = 0.3
    speeds: Sequence[int] = (10,)
    rates: Callable[[int], float] = constant(0.02)
    adam: bool = True
    outages: Callable[[int], Sequence[int]] = lambda round: ()
    away: Callable[[int], Sequence[int]] = lambda round: ()
    apart: bool = False


@dataclass
class World:
    """Groups in rounds, with a guard.

    Attributes:
        contributions: The number of contributions that the guard has judged.
        alarms: The contributions that it has left out: round, group and reason.
        named: The groups that pointed against the others for a long time, and the first round of
            each.
    """

    scenario: Scenario
    seed: int
    guard: float | None = GUARD
    knows_rates: bool = True
    faults: Mapping[int, Fault] = field(default_factory=dict)
    contributions: int = 0
    alarms: list[tuple[int, int, TooLong]] = field(default_factory=list)
    pasts: dict[int, Past] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)
    # By group: one bit for each of its last contributions, 1 if it pointed against the others.
    _against: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = self.scenario.groups
        self._chance = np.random.default_rng(self.seed)
        self.bowl = np.exp(self._chance.uniform(-3.0, 1.0, VALUES))
        middle = self._chance.normal(size=VALUES)
        self.outer = np.zeros(VALUES)
        self._momentum = np.zeros(VALUES)
        apart = self._chance.normal(size=(groups, VALUES))
        self.goals = middle + self.scenario.unlike * apart
        # A row for each group: its values and the state of its optimizer.
        self._values = np.zeros((groups, VALUES))
        self._first = np.zeros((groups, VALUES))
        self._second = np.zeros((groups, VALUES))
        # The inner steps of each group, since the start and since its last launch, and its path.
        self._seen = np.zeros(groups, int)
        self._steps = np.zeros(groups, int)
        self._path = np.zeros(groups)

    def _train(self, numbers: Sequence[int]) -> None:
        speeds = self.scenario.speeds
        steps = np.array([speeds[number % len(speeds)] for number in numbers])
        for step in range(max(steps, default=0)):
            self._step(np.array(numbers)[steps > step])

    def _step(self, rows: npt.NDArray[np.int64]) -> None:
        """Takes an inner step in some groups."""
        scenario = self.scenario
        rates = np.array([[scenario.rates(int(seen))] for seen in self._seen[rows]])
        noise = self._chance.normal(scale=0.3, size=(len(rows), VALUES))
        gradients = self.bowl * (self._values[rows] - self.goals[rows]) + noise
        if scenario.apart:
            gradients *= np.arange(VALUES) % scenario.groups == rows[:, None]
            self._values[rows] *= 1.0 - 0.01 * rates
        self._seen[rows] += 1
        self._values[rows] -= rates * self._directions(rows, gradients)
        self._steps[rows] += 1
        self._path[rows] += rates[:, 0]

    def _directions(self, rows: npt.NDArray[np.int64], gradients: Vector) -> Vector:
        if not self.scenario.adam:
            return gradients
        self._first[rows] = 0.9 * self._first[rows] + 0.1 * gradients
        self._second[rows] = 0.99 * self._second[rows] + 0.01 * gradients**2
        seen = self._seen[rows, None]
        first = self._first[rows] / (1.0 - 0.9**seen)
        second = self._second[rows] / (1.0 - 0.99**seen)
        directions: Vector = first / (np.sqrt(second) + 1e-8)
        return directions

    def _begin_again(self, numbers: Sequence[int]) -> None:
        """Sets the values of groups to the outer values."""
        self._values[numbers] = self.outer
        self._steps[numbers] = 0
        self._path[numbers] = 0.0

    @property
    def loss(self) -> float:
        """Returns the mean loss of the honest groups at the outer values."""
        honest = [goal for group, goal in enumerate(self.goals) if group not in self.faults]
        return float(np.mean([np.sum(self.bowl * (self.outer - goal) ** 2) / 2 for goal in honest]))

    def run(self, rounds: int) -> "World":
        for round in range(rounds):
            self.round(round)
        return self

    def round(self, round: int) -> None:
        groups = range(self.scenario.groups)
        away = list(self.scenario.away(round))
        self._begin_again(away)
        training = [number for number in groups if number not in away]
        self._train(training)
        silent = self.scenario.outages(round)
        gradients = dict[int, Vector]()
        for number in training:
            if number not in silent:
                gradient = self.outer - self._values[number]
                gradients[number] = self.faults.get(number, honest)(gradient, round)
        if gradients:
            counted = self._judged(gradients, round)
            self._judge_directions({number: gradients[number] for number in counted}, round)
            self._land(gradients, counted)

    def _judged(self, gradients: Mapping[int, Vector], round: int) -> list[int]:
        lengths = dict[int, Length]()
        for number, gradient in gradients.items():
            norm = float(np.linalg.norm(np.clip(gradient, -1e150, 1e150)))
            path = float(self._path[number]) if self.knows_rates else 0.0
            lengths[number] = Length(norm, int(self._steps[number]), path)
        outliers = dict[int, TooLong]()
        if self.guard is not None:
            outliers = outlying(lengths, self.pasts, self.guard)
        self.contributions += len(lengths)
        self.alarms += [(round, number, why) for number, why in outliers.items()]
        counted = {number: length for number, length in lengths.items() if number not in outliers}
        self.pasts = remembered(counted, outliers, self.pasts)
        return [*counted]

    def _judge_directions(self, counted: Mapping[int, Vector], round: int) -> None:
        weights = {number: self._steps[number] for number in counted}
        total = sum(weights.values())
        parts = {number: counted[number] * weights[number] / total for number in counted}
        norms = {number: float(np.linalg.norm(part)) for number, part in parts.items()}
        mean = sum(parts.values(), start=np.zeros(VALUES))
        for number, part in parts.items():
            norms_of_others = [norm for peer, norm in norms.items() if peer != number]
            direction = direction_in_mean(
                float(part @ part),
                float(part @ mean),
                float(mean @ mean),
                norms[number],
                norms_of_others,
            )
            bits = self._against.get(number, 0) << 1 | direction.is_against
            self._against[number] = bits % (1 << JUDGED)
            if self._against[number].bit_count() >= AGAINST:
                self.named.setdefault(number, round)

    def _land(self, gradients: Mapping[int, Vector], counted: Sequence[int]) -> None:
        if counted:
            weights = self._steps[[*counted]]
            mean: Any = np.average(
                [gradients[number] for number in counted], axis=0, weights=weights
            )
            self._momentum = _OUTER_MOMENTUM * self._momentum + mean
            step = mean + _OUTER_MOMENTUM * self._momentum
            self.outer = self.outer - _OUTER_RATE * step
        self._begin_again([*gradients])


# Events of honest groups, and faults


def for_rounds(count: int, period: int, groups: Sequence[int]) -> Callable[[int], Sequence[int]]:
    """Returns the groups in the last rounds of each ``period``, and none in the others."""
    return lambda round: groups if round % period >= period - count else ()


def _scenarios(groups: int) -> dict[str, list[Scenario]]:
    sgd: dict[str, Any] = {"adam": False, "rates": constant(0.05)}
    speeds = (5, 10, 25, 12)
    restarts = warm_restarts(0.02, 200)
    hub = for_rounds(29, 60, range(groups))
    return {
        "like and unlike data": [
            Scenario(groups),
            Scenario(groups, unlike=3.0),
            Scenario(groups, **sgd),
        ],
        "each trains values of its own": [Scenario(groups, apart=True)],
        "the hub away for 29 rounds": [
            Scenario(groups, outages=hub),
            Scenario(groups, outages=hub, **sgd),
        ],
        "one without the hub for 5 and 29 rounds": [
            Scenario(groups, outages=for_rounds(29, 60, (0,))),
            Scenario(groups, outages=for_rounds(5, 20, (0,)), unlike=3.0),
        ],
        "unequal speed": [
            Scenario(groups, speeds=speeds),
            Scenario(groups, speeds=speeds, rates=warm_up(0.02, 2000)),
        ],
        "warm restarts": [
            Scenario(groups, rates=restarts),
            Scenario(groups, rates=restarts, speeds=speeds),
            Scenario(groups, rates=warm_restarts(0.02, 1000), speeds=speeds),
            Scenario(groups, adam=False, rates=warm_restarts(0.1, 200), speeds=speeds),
        ],
        "one that comes back": [
            Scenario(groups, unlike=3.0, away=for_rounds(20, 50, (1,))),
            Scenario(
                groups,
                unlike=3.0,
                away=for_rounds(6, 25, (1,)),
                rates=warm_restarts(0.02, 300),
            ),
        ],
    }


def _all_scenarios() -> dict[str, list[Scenario]]:
    scenarios = dict[str, list[Scenario]]()
    for groups in (2, 3, 5, 8):
        for name, of_name in _scenarios(groups).items():
            scenarios.setdefault(name, []).extend(of_name)
    return scenarios


HONEST = _all_scenarios()
BEGINS = 40
"""The round in which faults begin."""


def _times(factor: float, first: int = 0, period: int = 1) -> Fault:
    def spoil(gradient: Vector, round: int) -> Vector:
        is_faulty = round >= BEGINS and round % period == first
        return gradient * factor if is_faulty else gradient

    return spoil


def _constant(value: float, rounds: range, period: int = 1) -> Fault:
    def spoil(gradient: Vector, round: int) -> Vector:
        is_faulty = round in rounds and round % period == 0
        return np.full_like(gradient, value) if is_faulty else gradient

    return spoil


def _grown(factor: float) -> Fault:
    def spoil(gradient: Vector, round: int) -> Vector:
        grown: Vector = gradient * factor ** min(max(0, round - BEGINS), 300)
        return grown

    return spoil


_ON = range(BEGINS, 1 << 30)
FAULTS: dict[str, Fault] = {
    "a constant": _constant(30.0, _ON),
    "two with a constant": _constant(30.0, _ON),
    "a constant in every second round": _constant(30.0, _ON, period=2),
    "1e20 in the first round": _constant(1e20, range(1)),
    "10 times as long": _times(10.0),
    "10 times as long in every second round": _times(10.0, period=2),
    "-10 times as long": _times(-10.0),
    "3 times as long": _times(3.0),
    "longer by 1.5 in each round": _grown(1.5),
    "longer by 1.05 in each round": _grown(1.05),
    "the sign flipped": _times(-1.0),
}
