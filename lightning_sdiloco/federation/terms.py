"""The terms of a federation: the numbers by which all its sites and its hub go, fixed when the run is founded."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

RETENTION = 8
"""For how many rounds payloads are kept. Who is further behind needs a state."""
ANCHOR_EVERY = 50
"""Rounds between two states that are left at the hub, so that the run survives the loss of all sites."""
LONGEST_GRACE = 10.0


def automatic_grace(step_seconds: float, sync_every: int, overlap_steps: int) -> float:
    """Returns the grace that costs nobody a wait: half of the time in which a flight may be late, ten seconds at most.

    Args:
        step_seconds: How long an inner step takes, in seconds.
        sync_every: Inner steps between two launches of the same fragment.
        overlap_steps: Inner steps between the launch of a fragment and its landing.

    Examples:
        >>> automatic_grace(0.1, sync_every=100, overlap_steps=20)
        4.0
        >>> automatic_grace(1.0, sync_every=100, overlap_steps=5)
        10.0
    """
    return min(0.5 * (sync_every - overlap_steps) * step_seconds, LONGEST_GRACE)


@dataclass(frozen=True)
class ChosenQuorum:
    """Names a `Quorum`, as it stands in the charter: every hub of the run makes the same one of it.

    Args:
        class_path: Its class.
        init_args: The arguments of that, as values of JSON.

    Examples:
        >>> print(ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": 0.5}))
        lightning_sdiloco.DynamicBackup(least=0.5)
    """

    class_path: str
    init_args: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.class_path}({', '.join(f'{name}={value!r}' for name, value in self.init_args.items())})"


@dataclass(frozen=True)
class Terms:
    """Holds what hub and sites must agree on to follow the same rules. Times are in seconds."""

    fragments: int
    sync_every: int
    overlap_steps: int
    grace: float
    lease: float = 10.0
    quorum: int | ChosenQuorum = 1
    rounds: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = {"overlap_steps": 0, "grace": 0}.get(item.name, 1 if item.name != "lease" else 0)
            is_chosen = isinstance(value, ChosenQuorum) or (item.name == "rounds" and value is None)
            if not is_chosen and not value >= least:
                raise ValueError(f"{item.name}={value!r} is out of range: it must be at least {least}.")
        if self.overlap_steps >= self.sync_every:
            raise ValueError(
                f"overlap_steps={self.overlap_steps} is out of range: it must be below sync_every, which is"
                f" {self.sync_every}. Choose a smaller one."
            )

    @property
    def least_steps(self) -> int:
        """With fewer inner steps since it was last counted a site does not launch."""
        return max(1, -(-self.sync_every // 4))

    @property
    def longest_wait(self) -> float:
        """How long a site stops training, at most, because a flight has not landed."""
        return self.grace + 1.0

    def is_last(self, round: int) -> bool:
        """Tells whether a round is the last by the charter."""
        return self.rounds is not None and round >= self.rounds
