"""Outer steps of torch's SGD with Nesterov momentum on a CPU, in one pass over the values: torch's own fused step.

It gives the bits of the plain one, which takes three passes, but in what is left over behind the last whole vector of
the processor: that little is stepped by the plain one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from lightning_sdiloco.memory import new_vector

MOMENTUM = "momentum_buffer"
"""Under which key torch's SGD keeps the momentum."""

_CHOICES = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
_STRETCH = 1 << 17  # values that are stepped at once, so that their copies stay in the cache
_VECTOR = 64  # values: a multiple of those in a vector of any processor


@torch.no_grad()
def stepped(
    group: Mapping[str, Any], values: Tensor, gradient: Tensor, state: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Makes a step, which overwrites the gradient with the new values and returns the new state.

    None, and nothing is written, if that is left to torch: a first step, which has no momentum yet, or one elsewhere.
    """
    before = state.get(MOMENTUM)
    if before is None or {values.device.type, before.device.type} != {"cpu"}:
        return None
    numel, choices = values.numel(), {key: group[key] for key in _CHOICES}
    after, scratch = new_vector(numel, values.device), values.new_empty(min(_STRETCH, numel))
    whole = numel // _VECTOR * _VECTOR
    starts = [*range(0, whole, _STRETCH), whole, numel]
    for start, stop in zip(starts, starts[1:], strict=False):
        # What others may be reading stays as it is: copies are stepped.
        moved, kept = scratch[: stop - start].copy_(values[start:stop]), after[start:stop].copy_(before[start:stop])
        sgd([moved], [gradient[start:stop]], [kept], fused=start < whole, foreach=False, **choices)
        gradient[start:stop] = moved
    return {**state, MOMENTUM: after}
