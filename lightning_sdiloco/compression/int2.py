"""Two bits a value: a sign, and one of two magnitudes that fit the block."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.blockwise import Blockwise, Scratch, as_bfloat16, magnitudes, signs

_GREATEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class Int2(Blockwise):
    """A sign and one of two magnitudes, and 32 bits for each block of 128 values: 2.25 bits a value.

    The two magnitudes of a block are the mean of those of its magnitudes that are below their mean, and of the others.
    A value takes the nearer one, and a tie goes up. In a block that holds a zero the lower magnitude is zero, so that
    zeros stay zeros.

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
        """Encodes whole blocks. A scale is the lower and the upper magnitude as bfloat16, in that order."""
        codes = signs(values, 1, scratch)
        blocks = magnitudes(values, scratch).view(-1, self.block)
        pairs = torch.stack(_two_means(blocks, scratch), dim=1).to(torch.bfloat16).clamp_(0, _GREATEST)
        low, high = pairs.to(torch.float32).unbind(1)
        is_low = _below(blocks, low * 0.5 + high * 0.5, scratch).view(-1)
        is_high = scratch.take("high", len(values), torch.uint8).copy_(is_low).add_(1)
        words = codes.bitwise_or_(is_high).view(torch.int32)
        packed, shifted = (scratch.take(name, len(words), torch.int32) for name in ("packed", "shifted"))
        packed.copy_(words)
        for bits in (6, 12, 18):
            packed.bitwise_or_(torch.bitwise_right_shift(words, bits, out=shifted))
        return pairs.view(torch.int32).view(-1), scratch.take("bytes", len(words), torch.uint8).copy_(packed)

    @override
    def filled_up(self, values: Tensor) -> Tensor:
        """Fills up the last block with its own values once more: zeros would pull the magnitudes down."""
        missing = -len(values) % self.block
        last = values[len(values) // self.block * self.block :]
        return torch.cat((values, last.repeat(self.block)[:missing])) if missing else values

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decodes whole blocks; exact, since one of the two terms is zero."""
        numbers = scratch.take("numbers", len(codes), torch.int32).copy_(codes)
        low, high = as_bfloat16(scales & 0xFFFF), as_bfloat16(scales >> 16)
        torch.mul(_looked_up(numbers, 0, scratch).view_as(out), low[:, None], out=out)
        out += _looked_up(numbers, 1, scratch).view_as(out).mul_(high[:, None])


def _two_means(magnitudes: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """The means of the magnitudes below the mean and of the others, in float64, whose roundings get lost.

    Magnitudes are float32 bits, which are in order as whole numbers are. Not compared as float64: that is slow.
    """
    doubles = scratch.take("doubles", magnitudes.numel(), torch.float64).view_as(magnitudes)
    mean = doubles.copy_(magnitudes.view(torch.float32)).mean(1)
    least = mean.to(torch.float32)
    least = torch.where(least < mean, (least.view(torch.int32) + 1).view(torch.float32), least)
    below = _below(magnitudes, least, scratch)
    count = below.sum(1, dtype=torch.int32).neg_()
    # Not the difference to the sum of all: beside great values it would lose small ones.
    lower = below.bitwise_and_(magnitudes)
    low = doubles.copy_(lower.view(torch.float32)).sum(1) / count.clamp(min=1)
    above = doubles.copy_(lower.bitwise_xor_(magnitudes).view(torch.float32)).sum(1)
    low[magnitudes.amin(1) == 0] = 0
    return low.to(torch.float32), (above / (magnitudes.size(1) - count).clamp_(min=1)).to(torch.float32)


def _below(magnitudes: Tensor, bounds: Tensor, scratch: Scratch) -> Tensor:
    """-1 for each magnitude below the bound of its block, and 0 for the others; both are bits of float32."""
    below = scratch.take("below", magnitudes.numel(), torch.int32).view_as(magnitudes)
    return torch.sub(magnitudes, bounds.view(torch.int32)[:, None], out=below).bitwise_right_shift_(31)


def _looked_up(numbers: Tensor, code: int, scratch: Scratch) -> Tensor:
    """For the four codes of every byte: the sign where a code has that magnitude, else a zero of that sign."""
    found = scratch.take(f"found {code}", len(numbers), torch.complex128)
    return torch.index_select(_signs(numbers.device, code), 0, numbers, out=found).view(torch.float32)


@cache
def _signs(device: torch.device, code: int) -> Tensor:
    """What each byte says, as four float32 that make up one word of 16 bytes."""
    codes = torch.arange(256, device=device)[:, None] >> torch.arange(0, 8, 2, device=device)
    magnitude = (codes & 1 == code).to(torch.float32)
    return torch.where(codes & 2 > 0, -magnitude, magnitude).view(torch.complex128).view(-1)
