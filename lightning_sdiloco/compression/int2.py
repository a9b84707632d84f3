"""Two bits a value: a sign, and one of two magnitudes that fit the block."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.blockwise import (
    Blockwise,
    Scratch,
    from_bfloat16_bits,
    look_up,
    magnitude_bits,
    pack_quads,
    sign_bits,
)

_GREATEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class Int2(Blockwise):
    """A sign and one of two magnitudes, and 32 bits for each block of 128 values: 2.25 bits a value.

    The magnitudes in a block fall into those below their mean and the others; the means of these two sets are the two
    magnitudes of the block. A value takes the nearer one, and a tie goes up. In a block that holds a zero, the lower
    magnitude is zero, so that zeros stay zeros.

    Examples:
        >>> import torch
        >>> payload, decoded = Int2().encode(torch.tensor([4.0, -1.0, -3.9, 1.0])), torch.empty(4)
        >>> Int2().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (5, [3.953125, -1.0, -3.953125, 1.0])
    """

    block: ClassVar[int] = 128
    bits: ClassVar[int] = 2
    scale: ClassVar[torch.dtype] = torch.int32

    @override
    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks. A scale holds the lower and the upper magnitude as bfloat16, in that order."""
        codes = sign_bits(values, 1, scratch)
        blocks = magnitude_bits(values, scratch).view(-1, self.block)
        pairs = torch.stack(_two_means(blocks, scratch), dim=1).to(torch.bfloat16).clamp_(0, _GREATEST)
        low, high = pairs.to(torch.float32).unbind(1)
        is_low = _below(blocks, low * 0.5 + high * 0.5, scratch).view(-1)
        is_high = scratch.take("high", len(values), torch.uint8).copy_(is_low).add_(1)
        return pairs.view(torch.int32).view(-1), pack_quads(codes.bitwise_or_(is_high), scratch)

    @override
    def pad(self, values: Tensor) -> Tensor:
        """Pads the last block with a repetition of its own values: zeros would pull the magnitudes down."""
        missing = -len(values) % self.block
        last = values[len(values) // self.block * self.block :]
        return torch.cat((values, last.repeat(self.block)[:missing])) if missing else values

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decodes whole blocks, which is exact, since one of the two terms is zero."""
        low, high = from_bfloat16_bits(scales & 0xFFFF), from_bfloat16_bits(scales >> 16)
        torch.mul(look_up(codes, _low_signs, scratch).view_as(out), low[:, None], out=out)
        out += look_up(codes, _high_signs, scratch).view_as(out).mul_(high[:, None])


def _two_means(magnitudes: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Returns, computed in float64, the mean of the magnitudes below their mean, and the mean of the others."""
    doubles = scratch.take("doubles", magnitudes.numel(), torch.float64).view_as(magnitudes)
    mean = doubles.copy_(magnitudes.view(torch.float32)).mean(1)
    least = mean.to(torch.float32)
    least = torch.where(least < mean, (least.view(torch.int32) + 1).view(torch.float32), least)
    below = _below(magnitudes, least, scratch)
    count = below.sum(1, dtype=torch.int32).neg_()
    # Not as the difference from the sum of all, in which small values beside great ones would be lost.
    lower = below.bitwise_and_(magnitudes)
    low = doubles.copy_(lower.view(torch.float32)).sum(1) / count.clamp(min=1)
    above = doubles.copy_(lower.bitwise_xor_(magnitudes).view(torch.float32)).sum(1)
    low[magnitudes.amin(1) == 0] = 0
    return low.to(torch.float32), (above / (magnitudes.size(1) - count).clamp_(min=1)).to(torch.float32)


def _below(magnitudes: Tensor, bounds: Tensor, scratch: Scratch) -> Tensor:
    """Returns -1 for each magnitude below the bound of its block and 0 for the others; both inputs are float32 bits."""
    below = scratch.take("below", magnitudes.numel(), torch.int32).view_as(magnitudes)
    return torch.sub(magnitudes, bounds.view(torch.int32)[:, None], out=below).bitwise_right_shift_(31)


@cache
def _low_signs(device: torch.device) -> Tensor:
    """Returns, for the four codes of every byte, the sign if the magnitude is the lower one, otherwise a signed 0."""
    return _signs(device, 0)


@cache
def _high_signs(device: torch.device) -> Tensor:
    """Returns, for the four codes of every byte, the sign if the magnitude is the upper one, otherwise a signed 0."""
    return _signs(device, 1)


def _signs(device: torch.device, code: int) -> Tensor:
    """Returns four float32 for each byte, as the parts of a word of 16 bytes."""
    codes = torch.arange(256, device=device)[:, None] >> torch.arange(0, 8, 2, device=device)
    magnitude = (codes & 1 == code).to(torch.float32)
    signs = torch.where(codes & 2 > 0, -magnitude, magnitude)
    # torch.compile generates no code for complex numbers.
    return signs if torch.compiler.is_compiling() else signs.view(torch.complex128).view(-1)
