"""Which rank belongs to which worker group: pure arithmetic."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal


@dataclass(frozen=True)
class GroupLayout:
    """Assigns the ranks of a world to worker groups: consecutive ranks form a group.

    Args:
        world_size: Number of ranks.
        worker_groups: Number of worker groups (M in the paper).

    Raises:
        ValueError: If the world cannot be split into that many groups of equal size.

    Examples:
        >>> layout = GroupLayout(world_size=4, worker_groups=2)
        >>> layout.group_size, layout.group_of(3), layout.group_rank_of(3)
        (2, 1, 1)
        >>> layout.worker_group_ranks(), layout.shard_groups()
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """

    world_size: int
    worker_groups: int

    def __post_init__(self) -> None:
        if self.world_size % self.worker_groups:
            fitting = [m for m in range(1, self.world_size + 1) if self.world_size % m == 0]
            raise ValueError(
                f"worker_groups={self.worker_groups} cannot split {self.world_size} processes into groups of equal"
                f" size. With {self.world_size} processes it can be one of {fitting}. Change worker_groups, or the"
                " number of devices or nodes."
            )

    @property
    def group_size(self) -> int:
        """Number of ranks in a group (G), which is also the number of shards of a fragment."""
        return self.world_size // self.worker_groups

    def group_of(self, rank: int) -> int:
        """Returns the worker group of a rank."""
        return rank // self.group_size

    def group_rank_of(self, rank: int) -> int:
        """Returns the number of a rank in its group, which is also the number of the shard that it exchanges."""
        return rank % self.group_size

    def worker_group_ranks(self) -> list[list[int]]:
        """Returns the ranks of every group."""
        return [list(range(g * self.group_size, (g + 1) * self.group_size)) for g in range(self.worker_groups)]

    def shard_groups(self) -> list[list[int]]:
        """Returns, for every shard, the ranks that exchange it, in the order of their groups."""
        return [list(range(shard, self.world_size, self.group_size)) for shard in range(self.group_size)]


def checked_worker_groups(worker_groups: Any) -> int | Literal["auto"]:
    """Returns its argument, if it is a possible number of worker groups or ``"auto"``."""
    if isinstance(worker_groups, str) and worker_groups == "auto":
        return "auto"
    is_whole = isinstance(worker_groups, Integral) and not isinstance(worker_groups, bool)
    if not is_whole or worker_groups < 1:
        kind = "a whole number" if isinstance(worker_groups, float) else "a number"
        fault = "out of range" if is_whole else f"of type {type(worker_groups).__name__}, not {kind}"
        raise ValueError(
            f"worker_groups={worker_groups!r} is {fault}: it must be a whole number of at least 1, or 'auto' for"
            " one group per node (per device on a single node). Choose one of them."
        )
    return int(worker_groups)
