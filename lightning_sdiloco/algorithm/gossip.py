"""What groups bring to a leg of a route that does not share, and what they take from it; see [Note: gossip]."""

from math import exp
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.policies.route import Momentum
from lightning_sdiloco.compression import Compression, resolve

# A compression that loses more than this share of what it encodes would part the groups: what is sent, how far a group
# is from where the rounds began, is many times as long as what it trained in a round.
_MOST_LOST = 0.01


class Brought(NamedTuple):
    """What a group brings to its leg, of a shard: flat and float32."""

    values: Tensor
    gradient: Tensor
    twin: Tensor | None


class Taken(NamedTuple):
    """What a group takes from its leg."""

    gradient: Tensor
    twin: Tensor | None


def bring(
    outer: Tensor, gradient: Tensor, anchor: Tensor, twin: Tensor | None = None, momentum: Momentum | None = None
) -> Brought:
    """Returns what a group brings to its leg. Writes to none of the tensors."""
    local = outer - gradient
    if momentum is None:
        return Brought(local - anchor, gradient, None)
    # The inner steps moved both alike. Then they draw near to each other for a round.
    second = local if twin is None else twin - gradient
    moved = (second - local).mul_((1 - exp(-2 * momentum.rate)) / 2)
    local, second = local + moved, second - moved
    return Brought(local - anchor, outer - local, second)


def take(
    brought: Brought, own: Tensor, mean: Tensor, outer: Tensor, anchor: Tensor, finite: bool, momentum: Momentum | None
) -> Taken:
    """Returns what a group takes from its leg."""
    if not finite:
        return Taken((outer - anchor).sub_(mean), None if momentum is None else anchor + mean)
    # What the compression lost of the own values stays here.
    pulled = own - mean
    if momentum is None or brought.twin is None:
        return Taken(brought.gradient + pulled, None)
    # Of a pair, half of the difference is where the mean is.
    return Taken(brought.gradient + pulled, brought.twin - 2 * momentum.pull * pulled)


def check_compression(compression: str | Compression) -> None:
    """Refuses a compression that does not suit a route on which groups hold outer parameters of their own."""
    codec = resolve(compression)
    advice = "Choose 'int8', 'bf16' or 'fp32', or RandomK(every, Int8()), by which all send the same values."
    if codec.remembers() or codec.chosen_share() < 1 or codec.varies():
        raise ValueError(
            f"compression={compression!r} does not go with this route: partners must send each other the same values,"
            f" whole, and this one lets each group choose, or remembers. {advice}"
        )
    dense = codec.dense()
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(values)
    dense.decode(dense.encode(values), decoded)
    lost = float((decoded - values).norm() / values.norm())
    if lost > _MOST_LOST:
        raise ValueError(
            f"compression={compression!r} loses {lost:.0%} of what it encodes, and on this route groups send how far"
            f" they are from where the rounds began, which may lose {_MOST_LOST:.0%} at most. {advice}"
        )
