"""The values on which what is compiled is compared with what is not, before it is used."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lightning_sdiloco.compression.blockwise import chunk_length

# The sample repeats a vector of this many values.
_UNIT = 1 << 14


def sample(like: Tensor) -> Tensor:
    """Returns values of many magnitudes and zeros of both signs, as many as kernels are tuned for."""
    unit = _unit().to(like.device)
    length = min(like.numel(), chunk_length(like.device))
    return unit.repeat(-(-length // len(unit)))[:length].contiguous()


@cache
def _unit() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, _UNIT, generator=generator, device="cpu", dtype=torch.float32).unbind()
    values = (one * other.mul(8).exp()).nan_to_num(0.0)
    values[::17], values[5::19] = 0.0, -0.0
    # Whole blocks of zeros, and of values at both ends of the range.
    values[1024:1536] = 0.0
    values[2048:2560] *= 1e-38
    values[3072:3584] = one[3072:3584].clamp(-3, 3) * 1e38
    return values


def same_bits(one: Tensor | Sequence[Tensor], other: Tensor | Sequence[Tensor]) -> bool:
    """Tells whether tensors, or all of several, have the same bits."""
    pairs = zip(*((each,) if isinstance(each, Tensor) else each for each in (one, other)), strict=True)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)
