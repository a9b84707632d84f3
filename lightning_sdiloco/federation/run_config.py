"""The run config: what a run was founded on. A site with another one is refused, with the list of
differences.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal

from lightning_sdiloco.algorithm.schedule import DenseBeginning, Schedule
from lightning_sdiloco.algorithm.weighting import GUARD
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.codec import (
    CLASS_PATH,
    LONGEST_TEXT,
    MOST_FRAGMENTS,
    Message,
    Name,
    encoded,
    key_of,
    plain,
    unsaid,
)
from lightning_sdiloco.federation.untrained import Sizes

RETENTION = 8  # rounds for which payloads are kept; a site further behind needs a state
SNAPSHOT_EVERY = (
    50  # rounds between two states that are left at the hub, which survive the loss of all sites
)
LONGEST_GRACE = 10.0
_SHOWN = 5
_SIZES = re.compile(r"\d+")
_UNTRAINED = re.compile(r" torch\.(?P<dtype>\w+) (?P<kind>mean|first|own) of (?P<bytes>\d+) bytes$")
_DTYPES = {"float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True)
class ChosenQuorum:
    """Names a `Quorum` in the run config: every hub of the run makes the same one from it."""

    class_path: Annotated[str, CLASS_PATH]
    init_args: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(encoded(plain(self))) > LONGEST_TEXT:
            raise ValueError(f"the quorum is longer than {LONGEST_TEXT} characters")

    def __str__(self) -> str:
        return f"{self.class_path}({', '.join(f'{name}={value!r}' for name, value in self.init_args.items())})"


@dataclass(frozen=True)
class Terms:
    """Holds what hub and sites must agree on to follow the same rules. Times are in seconds."""

    fragments: Annotated[int, range(MOST_FRAGMENTS + 1)]
    sync_every: int
    overlap_steps: int
    grace: float
    lease: float = 10.0
    quorum: int | ChosenQuorum = 1
    rounds: int | None = None
    guard: float | None = GUARD
    hub_mean: Literal["fp4", "fp32"] | None = None  # the code of what the hub means, where it does
    dense_beginning: DenseBeginning | None = unsaid(None)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = {"overlap_steps": 0, "grace": 0}.get(
                item.name, 1 if item.name != "lease" else 0
            )
            is_chosen = (
                isinstance(value, ChosenQuorum | DenseBeginning | str)
                or (item.default is None or item.name == "guard")
                and value is None
            )
            if not is_chosen and not value >= least:
                raise ValueError(
                    f"{item.name}={value!r} is out of range: it must be at least {least}."
                )
        if self.overlap_steps >= self.sync_every:
            raise ValueError(
                f"overlap_steps={self.overlap_steps} is out of range: it must be below"
                " sync_every, which is"
                f" {self.sync_every}. Choose a smaller one."
            )
        if (
            self.dense_beginning is not None
            and 2 * self.dense_beginning.sync_every > self.sync_every
        ):
            raise ValueError(
                f"dense_beginning={self.dense_beginning!r} is out of range: its sync_every must"
                " be at most half of"
                f" sync_every, which is {self.sync_every}. Choose a smaller one."
            )

    @cached_property
    def schedule(self) -> Schedule:
        """When fragments launch and land at a site that is never late."""
        return Schedule(self.sync_every, self.overlap_steps, self.fragments, self.dense_beginning)

    def steps_before(self, fragment: int, round: int) -> int:
        """Returns the inner steps between the launch of a round and that of the one before."""
        return self.schedule.launch_of(fragment, round) - self.schedule.launch_of(
            fragment, round - 1
        )

    def least_steps(self, round: int) -> int:
        """Returns the fewest inner steps since a site last counted with which it launches for a
        round.
        """
        sync_every = self.sync_every
        if self.dense_beginning is not None and self.schedule.is_dense_round(round):
            sync_every = self.dense_beginning.sync_every
        return max(1, -(-sync_every // 4))

    @property
    def longest_wait(self) -> float:
        """How long a site stops training, at most, because a flight has not landed."""
        return self.grace + 1.0

    def is_last(self, round: int) -> bool:
        return self.rounds is not None and round >= self.rounds


AMENDABLE = (
    "rounds",
    "grace",
    "lease",
    "quorum",
    "guard",
)  # terms that an operator may amend while a run goes on

# A fragment's parameters in the order of their values: names, and what describes shape and dtype.
Parameters = Annotated[tuple[tuple[str, str], ...], 1 << 20]


@dataclass(frozen=True)
class RunConfig(Message):
    """Holds what must be the same at all sites, and stays the same as long as the run lasts."""

    run: Name
    terms: Terms
    settings: Mapping[str, str]  # every one as text, with no "auto" left in it
    fragments: tuple[Parameters, ...]
    shards: tuple[
        tuple[int, ...], ...
    ]  # of each fragment their sizes, where ranks must be the same everywhere
    versions: Mapping[str, str]  # of what takes part in the arithmetic
    self_test: str  # what the arithmetic of a site makes of known values

    most_bytes = 1 << 26  # it names every parameter
    sealed = True

    def __post_init__(self) -> None:
        for index, parameters in enumerate(self.fragments):
            if len(dict(parameters)) < len(parameters):
                raise ValueError(
                    f"run_config.fragments[{index}] must name its parameters once each"
                )

    @cached_property
    def key(self) -> str:
        """The key that identifies a run config; the first record of every fragment names it."""
        return key_of(self.to_bytes())

    @cached_property
    def numel(self) -> int:
        """How many values all parameters have."""
        return sum(self.sizes(fragment).numel for fragment in range(len(self.fragments)))

    def sizes(self, fragment: int) -> Sizes:
        """Returns how many values the parameters of a fragment have, and how many bytes its
        untrained state.
        """
        numel = 0
        untrained = list[int]()
        dtypes = list[str]()
        kept = list[int]()
        numbers = list[str]()
        numbers_of_kept = list[str]()
        for _, described in self.fragments[fragment]:
            found = _UNTRAINED.search(described)
            if found is None:
                shape = described.split(")")[0]
                numel += math.prod(map(int, _SIZES.findall(shape)))
            elif found["kind"] == "own":
                kept.append(int(found["bytes"]))
                numbers_of_kept.append(found["dtype"])
            else:
                numbers.append(found["dtype"])
                untrained.append(int(found["bytes"]))
                dtypes.append(_DTYPES[found["dtype"]] if found["kind"] == "mean" else "")
        return Sizes(
            numel, tuple(untrained), tuple(dtypes), tuple(kept), (*numbers, *numbers_of_kept)
        )

    def most_bytes_of(self, kind: str) -> int:
        """Returns how large a payload, or a part of a state, may be: more than any that this
        package makes.
        """
        untrained = sum(
            self.sizes(fragment).sent(is_exact=True).most for fragment in range(len(self.fragments))
        )
        return (1 << 20) + {"payload": 16, "state": 64}[kind] * self.numel + 16 * untrained

    def summary(self) -> dict[str, Any]:
        """Returns what is to be said of it in short, as an object of JSON: without the names of
        parameters.
        """
        own = plain(self) | {"key": self.key, "fragments": len(self.fragments)}
        del own["shards"]
        return {**own, "parameters": sum(map(len, self.fragments))}

    def differences(self, other: "RunConfig") -> list[str]:
        """Names what differs from another run config, this one being "here": empty if nothing
        does.
        """
        ours = dict(_leaves(plain(self)))
        theirs = dict(_leaves(plain(other)))
        return [
            f"{name} is {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
            for name in dict.fromkeys([*ours, *theirs])
            if ours.get(name) != theirs.get(name)
        ]

    def require_same(self, other: "RunConfig") -> list[str]:
        """Refuses this run config, which a site has brought, where the run was founded on another
        one.

        Another patch of a version may join where its arithmetic makes the same of known values.
        That is returned.
        """
        different = self.differences(other)
        patches = [
            one
            for one in different
            if one.startswith("versions.") and self.self_test == other.self_test
        ]
        patches = [
            one
            for one in patches
            if self._is_patch(other, one.split(" is ")[0].removeprefix("versions."))
        ]
        different = [one for one in different if one not in patches]
        if different:
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise Refused(
                f"This site cannot join the run {other.run!r}, which was founded on another run"
                " config:"
                f" {'; '.join(different[:_SHOWN])}{more}. All sites must train the same model"
                " with the same settings"
                " and versions. Start this one with the run's."
            )
        return patches

    def _is_patch(self, other: "RunConfig", name: str) -> bool:
        ours, theirs = (own.versions.get(name, "").split(".") for own in (self, other))
        return len(ours) > 2 < len(theirs) and ours[:2] == theirs[:2]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted names of all that an object of JSON holds, each with its text."""
    if isinstance(value, dict):
        for key, own in value.items():
            yield from _leaves(own, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, own in enumerate(value):
            yield from _leaves(own, f"{name}[{index}]")
    else:
        yield name, str(value)
