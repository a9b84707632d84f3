"""How long a rank computes micro-batches before it drops those that are left: the rule of DropCompute."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

# Among so many thresholds the best is looked for.
_THRESHOLDS = 200


class Drop(NamedTuple):
    """What a budget is expected to do."""

    budget: float
    dropped: float = 0.0
    gain: float = 0.0


def best_drop(times: Sequence[Sequence[Sequence[float]]], rest: float, most_dropped: float) -> Drop:
    """Finds the budget with which most is trained in a second; see [Note: the rule of DropCompute].

    [Note: the rule of DropCompute] A step ends when its slowest rank has computed, and takes a rest that nobody can
    shorten. With a budget a rank that is late before a micro-batch drops this one and those after it, but for the last,
    which synchronises; the first one is never late. If that shortens the step by the share ``s``, and drops the share
    ``d`` of the micro-batches, then ``(1 - d) / (1 - s) - 1`` is gained (arXiv 2306.10598, and its code). The optimum
    is flat and noisy where few ranks vary much, and then drops most of what there is: so ``d`` has a bound.

    Args:
        times: Seconds of every micro-batch: ``times[rank][step][micro-batch]``.
        rest: Seconds of a step in which no rank computes.
        most_dropped: The bound of the share that is dropped.

    Examples:
        >>> steady, slow = [1.0, 1.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0]
        >>> best_drop([[steady] * 10, [slow] + [steady] * 9], rest=0.0, most_dropped=0.1).dropped
        0.0125
        >>> best_drop([[steady] * 10] * 2, rest=0.0, most_dropped=0.1)
        Drop(budget=inf, dropped=0.0, gain=0.0)
    """
    table = torch.tensor(times, dtype=torch.float64)
    done = table.cumsum(dim=-1)
    step = float(done[..., -1].amax(dim=0).mean()) + rest
    best = Drop(inf)
    for budget in torch.linspace(
        float(done[..., 0].min()), float(done[..., -1].max()), _THRESHOLDS, dtype=torch.float64
    ).tolist():
        kept = _kept(done, budget)
        dropped = 1 - float(kept.mean(dtype=torch.float64))
        shorter = float((table * kept).sum(dim=-1).amax(dim=0).mean()) + rest
        gain = (1 - dropped) * step / shorter - 1
        if dropped <= most_dropped and gain > best.gain + 1e-9:
            best = Drop(budget, round(dropped, 12), gain)
    return best


def _kept(done: Tensor, budget: float) -> Tensor:
    """Returns 1 for what is computed: what begins in time, the first and the last."""
    kept = torch.ones_like(done)
    kept[..., 1:-1] = (done[..., :-2] <= budget).to(done.dtype)
    return kept
