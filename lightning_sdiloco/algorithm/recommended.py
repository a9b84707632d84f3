"""Chooses ``outer_lr``, ``outer_momentum`` and ``mixing`` where they are ``"auto"``: one table, and one rule.

The choice is a pure function of what is known before training starts. Nothing is measured for it.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

AUTO: Literal["auto"] = "auto"
"""Stands for what is chosen: here, or by the planner."""


OVERLAP_STEPS = (1, 2, 3, 4, 5, 10)
"""Those worth a try. The paper saw next to no loss from up to the last one, and little gain from more than five."""


class OuterStep(NamedTuple):
    """What the outer step and the landing after it do."""

    outer_lr: float
    outer_momentum: float
    mixing: float


class _Row(NamedTuple):
    num_groups: int
    sync_every: int
    outer_lr: float
    mixing: float


# With four and eight groups nothing that was tried was clearly better than what two need; see docs/choosing.md.
_TABLE = (
    _Row(num_groups=2, sync_every=50, outer_lr=0.7, mixing=0.2),
    _Row(num_groups=4, sync_every=50, outer_lr=0.7, mixing=0.2),
    _Row(num_groups=8, sync_every=50, outer_lr=0.7, mixing=0.2),
)

_MOMENTUM = 0.9

# For compressions that are sparse; see `recommended`.
_SPARSE_LR = 2.0

# That of SparseLoCo (arXiv 2508.15706), whose code takes this mean.
_SENDERS_LR = 1.0

SPARSE = 1 / 16
"""The largest share of the values that a group sends at a time if the compression counts as sparse."""

SPARSE_GAINS = (1.0, 3.2)
"""Between these a sparse compression needs ``outer_lr / (1 - outer_momentum)``: measured with 1/64 of the values."""

SENDERS_GAINS = (0.4, 2.0)
"""The same with a mean over the senders of a value: from the rates of SparseLoCo's code to twice the larger one."""

EARLIER: Mapping[str, str] = {"outer_lr": "0.4", "outer_momentum": "0.9", "mixing": "0.5"}
"""The defaults of versions that had numbers in place of ``"auto"``, as a checkpoint of theirs tells them."""


def recommended(num_groups: int, sync_every: int, is_sparse: bool = False, over_senders: bool = False) -> OuterStep:
    """Returns what suits a number of groups, the inner steps between launches, and the compression.

    It is the row of the table with the nearest number of groups, and among these with the nearest ``sync_every``. Of
    numbers, the nearest is that with the smallest ratio; of two as near, the smaller.

    Where each group sends few values of its own choice and the others wait in its memory, that memory is a momentum
    already, so there is no other one. The mean divides by all groups what one of them has sent, and the progress that
    they have in common arrives once from each, a little at a time: one rate suits all numbers of groups. Where the mean
    is that of the senders, a value arrives whole, and needs a smaller rate.

    Args:
        num_groups: Number of worker groups.
        sync_every: Inner steps between two launches of the same fragment.
        is_sparse: Whether each group sends few values of its own choice, and remembers the others.
        over_senders: Whether the mean of a value is that of the groups that sent it.

    Examples:
        >>> recommended(2, 100).outer_momentum, recommended(2, 100, is_sparse=True).outer_momentum
        (0.9, 0.0)
    """
    groups = _nearest([row.num_groups for row in _TABLE], num_groups)
    rows = {row.sync_every: row for row in _TABLE if row.num_groups == groups}
    row = rows[_nearest(rows, sync_every)]
    if is_sparse:
        return OuterStep(_SENDERS_LR if over_senders else _SPARSE_LR, 0.0, row.mixing)
    return OuterStep(row.outer_lr, _MOMENTUM, row.mixing)


def _nearest(numbers: Iterable[int], to: int) -> int:
    return min(numbers, key=lambda number: (max(number, to) / min(number, to), number))
