"""Two bits a value: a sign, and one of two magnitudes that fit the block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.blockwise import Blockwise, as_bfloat16

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
    def encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks. A scale is the lower and the upper magnitude as bfloat16, in that order."""
        blocks = values.abs().view(-1, self.block)
        low, high = _two_means(blocks)
        magnitudes = torch.stack((low, high), dim=1).to(torch.bfloat16).clamp_(0, _GREATEST)
        low, high = magnitudes.to(torch.float32).unbind(1)
        codes = blocks.ge((low * 0.5 + high * 0.5)[:, None]).view(-1).view(torch.uint8)
        codes |= ((values.view(torch.int32) >> 30) & 2).to(torch.uint8)
        words = codes.view(torch.int32)
        packed = (words | words >> 6 | words >> 12 | words >> 18) & 255
        return magnitudes.view(torch.int32).view(-1), packed.to(torch.uint8)

    @override
    def filled_up(self, values: Tensor) -> Tensor:
        """Fills up the last block with its own values once more: zeros would pull the magnitudes down."""
        missing = -len(values) % self.block
        last = values[len(values) // self.block * self.block :]
        return torch.cat((values, last.repeat(self.block)[:missing])) if missing else values

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Decodes whole blocks; exact."""
        low, high = as_bfloat16(scales & 0xFFFF), as_bfloat16(scales >> 16)
        levels = torch.stack((low, high, -low, -high), dim=1)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
        chosen = (codes[:, None] >> shifts & 3).view(-1, self.block)
        return levels.gather(1, chosen.to(torch.int64)).view(-1)


def _two_means(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the magnitudes below the mean and of the others, in float64, whose roundings get lost."""
    magnitudes = magnitudes.to(torch.float64)
    upper = magnitudes.ge(magnitudes.mean(1, keepdim=True))
    count, above = upper.sum(1), magnitudes.where(upper, 0).sum(1)
    # Not the difference to the sum of all: beside great values it would lose small ones.
    low = magnitudes.where(~upper, 0).sum(1) / (magnitudes.size(1) - count).clamp_(min=1)
    low[magnitudes.amin(1) == 0] = 0
    return low.to(torch.float32), (above / count.clamp_(min=1)).to(torch.float32)
