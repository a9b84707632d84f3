"""The run config on which a run is founded. A site with a different run config is refused and
receives a list of the differences.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Literal

from lightning_sdiloco.algorithm.guard import GUARD
from lightning_sdiloco.algorithm.schedule import DenseBeginning, Schedule
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.codec import (
    CLASS_PATH,
    LONGEST_TEXT,
    MOST_FRAGMENTS,
    Json,
    Message,
    Name,
    RoundNumber,
    absent_if_empty,
    encoded,
    key_of,
    plain,
)
from lightning_sdiloco.federation.untrained import Sizes

RETENTION = 8  # rounds for which payloads are kept; a site further behind needs a state
# Rounds between two states that sites send to the hub, which survive the loss of all sites.
SNAPSHOT_EVERY = 50
LONGEST_GRACE = 10.0
_SHOWN = 5
_SIZES = re.compile(r"\d+")
_UNTRAINED = re.compile(r" torch\.(?P<dtype>\w+) (?P<kind>mean|first|own) of (?P<bytes>\d+) bytes$")
_DTYPES = {"float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True)
class ChosenQuorum:
    """The `Quorum` as stored in the run config, from which every hub of the run creates the same
    quorum.
    """

    class_path: Annotated[str, CLASS_PATH]
    init_args: Mapping[str, Json]

    def __post_init__(self) -> None:
        if len(encoded(plain(self))) > LONGEST_TEXT:
            raise ValueError(f"the quorum is longer than {LONGEST_TEXT} characters")

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.init_args.items())
        return f"{self.class_path}({arguments})"


@dataclass(frozen=True)
class Terms:
    """The values on which the hub and all sites must agree in order to follow the same rules. Times
    are in seconds.
    """

    fragments: Annotated[int, range(MOST_FRAGMENTS + 1)]
    sync_every: int
    overlap_steps: int
    grace: float
    lease: float = 10.0
    quorum: int | ChosenQuorum = 1
    rounds: int | None = None
    guard: float | None = GUARD
    hub_mean: Literal["fp4", "fp32"] | None = None  # the code of the hub's mean, if it averages
    dense_beginning: DenseBeginning | None = absent_if_empty(None)

    def __post_init__(self) -> None:
        least_values = {"overlap_steps": 0, "grace": 0, "lease": 0}
        may_be_none = {"rounds", "guard", "hub_mean", "dense_beginning"}
        for term in fields(self):
            value = getattr(self, term.name)
            if isinstance(value, ChosenQuorum | DenseBeginning | str):
                continue
            if value is None and term.name in may_be_none:
                continue
            least = least_values.get(term.name, 1)
            if not value >= least:
                raise ValueError(
                    f"{term.name}={value!r} is out of range: it must be at least {least}."
                )
        if self.overlap_steps >= self.sync_every:
            raise ValueError(
                f"overlap_steps={self.overlap_steps} is out of range: it must be below sync_every,"
                f" which is {self.sync_every}. Choose a smaller value."
            )
        if (
            self.dense_beginning is not None
            and 2 * self.dense_beginning.sync_every > self.sync_every
        ):
            raise ValueError(
                f"dense_beginning={self.dense_beginning!r} is out of range: its sync_every must be"
                f" at most half of sync_every, which is {self.sync_every}. Choose a smaller value."
            )

    @cached_property
    def schedule(self) -> Schedule:
        """The launches and landings of a site that is never late."""
        return Schedule(self.sync_every, self.overlap_steps, self.fragments, self.dense_beginning)

    def steps_before(self, fragment: int, round: RoundNumber) -> int:
        """Returns the number of inner steps between the launch for a round and the previous
        launch.
        """
        if self.dense_beginning is None:
            return self.sync_every
        launch_of = self.schedule.launch_of
        return launch_of(fragment, round) - launch_of(fragment, round - 1)

    def least_steps(self, round: RoundNumber) -> int:
        """Returns the minimum number of inner steps that a launch for a round must contain."""
        sync_every = self.sync_every
        if self.dense_beginning is not None and self.schedule.is_dense_round(round):
            sync_every = self.dense_beginning.sync_every
        return max(1, -(-sync_every // 4))

    @property
    def longest_wait(self) -> float:
        """The maximum time that a site pauses training because a flight has not landed."""
        return self.grace + 1.0

    def is_last(self, round: RoundNumber) -> bool:
        return self.rounds is not None and round >= self.rounds


# Terms that an operator may amend during a run. They must not affect the arithmetic of a mean,
# because they reach the sites separately from the records. A term that does would have to be part
# of each record.
AMENDABLE = ("rounds", "grace", "lease", "quorum", "guard")

# A fragment's parameters in the order of their values: names, and descriptions of shape and dtype.
Parameters = Annotated[tuple[tuple[str, str], ...], 1 << 20]


@dataclass(frozen=True)
class RunConfig(Message):
    """The values that must be identical at all sites and never change during a run."""

    run: Name
    terms: Terms
    settings: Mapping[str, str]  # all settings as text, with every "auto" resolved
    fragments: tuple[Parameters, ...]
    # The sizes of each fragment's shards, if all sites must have the same number of ranks.
    shards: tuple[tuple[int, ...], ...]
    versions: Mapping[str, str]  # of everything that affects the arithmetic
    self_test: str  # the digest of a site's arithmetic on known values

    most_bytes = 1 << 26  # it names every parameter
    sealed = True

    def __post_init__(self) -> None:
        for index, parameters in enumerate(self.fragments):
            if len(dict(parameters)) < len(parameters):
                raise ValueError(
                    f"run_config.fragments[{index}] must name each parameter only once"
                )

    @cached_property
    def key(self) -> str:
        """The key that identifies a run config. The first record of every fragment contains this
        key.
        """
        return key_of(self.to_bytes())

    @cached_property
    def numel(self) -> int:
        """The number of values in all parameters."""
        return sum(self.sizes(fragment).numel for fragment in range(len(self.fragments)))

    def sizes(self, fragment: int) -> Sizes:
        """Returns the number of parameter values in a fragment and the sizes of its untrained
        tensors.
        """
        numel = 0
        untrained = list[int]()
        dtypes = list[str]()
        numbers = list[str]()
        sizes_of_own = list[int]()
        numbers_of_own = list[str]()
        for _, described in self.fragments[fragment]:
            match = _UNTRAINED.search(described)
            if match is None:
                shape = described.split(")")[0]
                numel += math.prod(map(int, _SIZES.findall(shape)))
            elif match["kind"] == "own":
                sizes_of_own.append(int(match["bytes"]))
                numbers_of_own.append(match["dtype"])
            else:
                untrained.append(int(match["bytes"]))
                numbers.append(match["dtype"])
                dtypes.append(_DTYPES[match["dtype"]] if match["kind"] == "mean" else "")
        return Sizes(
            numel,
            tuple(untrained),
            tuple(dtypes),
            tuple(sizes_of_own),
            tuple(numbers + numbers_of_own),
        )

    def most_bytes_of(self, kind: str) -> int:
        """Returns the maximum size of a payload or a part of a state. The limit is larger than
        anything that this package sends.
        """
        return (1 << 20) + {"payload": 16, "state": 64}[kind] * self.numel + self._most_untrained

    @cached_property
    def _most_untrained(self) -> int:
        fragments = range(len(self.fragments))
        return 16 * sum(self.sizes(fragment).sent(is_exact=True).most for fragment in fragments)

    def summary(self) -> dict[str, Json]:
        """Returns the run config as a JSON object, without the parameter names."""
        summary: dict[str, Json] = plain(self)
        del summary["shards"]
        summary["key"] = self.key
        summary["fragments"] = len(self.fragments)
        summary["parameters"] = sum(map(len, self.fragments))
        return summary

    def differences(self, reference: "RunConfig") -> list[str]:
        """Lists the differences from another run config. In the list, "here" means this run config
        and "there" means the other one.
        """
        ours = dict(_leaves(plain(self)))
        theirs = dict(_leaves(plain(reference)))
        return [
            f"{name} is {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
            for name in dict.fromkeys([*ours, *theirs])
            if ours.get(name) != theirs.get(name)
        ]

    def require_same(self, founded: "RunConfig") -> list[str]:
        """Raises Refused unless this site's run config matches the founding run config.

        A site with a different patch version may join if its arithmetic gives the same results on
        known values. The method returns the differences in patch versions.
        """
        patches = list[str]()
        refused = list[str]()
        for difference in self.differences(founded):
            name = difference.split(" is ")[0]
            is_patch = name.startswith("versions.") and self._is_patch(
                founded, name.removeprefix("versions.")
            )
            (patches if is_patch else refused).append(difference)
        if refused:
            more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            raise Refused(
                f"This site cannot join the run {founded.run!r}, because the run was founded with a"
                f" different run config: {'; '.join(refused[:_SHOWN])}{more}. All sites must train"
                " the same model with the same settings and versions. Start this site with the"
                " run's values."
            )
        return patches

    def _is_patch(self, founded: "RunConfig", package: str) -> bool:
        """Returns whether two versions differ only in the patch number and compute the same
        results.
        """
        ours = self.versions.get(package, "").split(".")
        theirs = founded.versions.get(package, "").split(".")
        has_patch = len(ours) > 2 < len(theirs)
        return self.self_test == founded.self_test and has_patch and ours[:2] == theirs[:2]


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and text of each value in a JSON object."""
    if isinstance(value, dict):
        for key, element in value.items():
            yield from _leaves(element, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, element in enumerate(value):
            yield from _leaves(element, f"{name}[{index}]")
    else:
        yield name, str(value)
