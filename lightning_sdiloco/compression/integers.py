"""Whole numbers under one scale per block: even steps from the largest magnitude down to zero."""

from abc import abstractmethod
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
    pack_pairs,
)

# The least top keeps a step of top / 127 out of the subnormal numbers. The greatest is the largest finite bfloat16.
_LEAST_TOP = 0x0400
_GREATEST_TOP = 0x7F7F


class _Integers(Blockwise):
    """Encodes each value as a whole number of steps of ``top / largest``, from ``-largest`` to ``largest``.

    ``top`` is the largest magnitude of the block, rounded to bfloat16.
    """

    block: ClassVar[int] = 128
    scale: ClassVar[torch.dtype] = torch.int16
    largest: ClassVar[int]

    @override
    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks; values are rounded to nearest, and ties go to even."""
        largest = magnitude_bits(values, scratch).view(-1, self.block).amax(1)
        tops = (largest + 0x8000 >> 16).clamp_(_LEAST_TOP, _GREATEST_TOP)
        # Not largest / tops: torch would take the reciprocal of the tops, which may be a subnormal number.
        per_unit = torch.full_like(tops, self.largest, dtype=torch.float32).div_(from_bfloat16_bits(tops))
        steps = scratch.take("work", len(values), torch.int32).view(torch.float32).view(-1, self.block)
        torch.mul(values.view(-1, self.block), per_unit[:, None], out=steps)
        steps.round_().clamp_(-self.largest, self.largest)
        codes = scratch.take("codes", len(values), torch.int8).copy_(steps.view(-1))
        return tops.to(torch.int16), self.packed(codes, scratch)

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decodes whole blocks; the result is always finite."""
        # The divisor is on the device: an accelerator would multiply by the reciprocal of a divisor on the host.
        steps = from_bfloat16_bits(scales)
        steps /= steps.new_full((), self.largest)
        torch.mul(self.unpacked(codes, scratch).view(-1, self.block), steps[:, None], out=out)

    @abstractmethod
    def packed(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Packs int8 codes into bytes. The codes may be overwritten."""

    @abstractmethod
    def unpacked(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Unpacks the codes from bytes, as float32 numbers."""


@dataclass(frozen=True)
class Int8(_Integers):
    """Whole numbers from -127 to 127, and 16 bits for each block of 128 values: 8.125 bits a value.

    Examples:
        >>> import torch
        >>> payload, decoded = Int8().encode(torch.tensor([127.0, -3.0, 0.2])), torch.empty(3)
        >>> Int8().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (5, [127.0, -3.0, 0.0])
    """

    bits: ClassVar[int] = 8
    largest: ClassVar[int] = 127

    @override
    def packed(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Packs the codes one to a byte, in two's complement."""
        return codes.view(torch.uint8)

    @override
    def unpacked(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Unpacks codes that were packed one to a byte, in two's complement."""
        return scratch.take("numbers", len(codes), torch.float32).copy_(codes.view(torch.int8))


@dataclass(frozen=True)
class Int4(_Integers):
    """Whole numbers from -7 to 7, and 16 bits for each block of 128 values: 4.125 bits a value.

    Examples:
        >>> import torch
        >>> payload, decoded = Int4().encode(torch.tensor([7.0, -3.0, 0.2])), torch.empty(3)
        >>> Int4().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [7.0, -3.0, 0.0])
    """

    bits: ClassVar[int] = 4
    largest: ClassVar[int] = 7

    @override
    def packed(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Packs the codes two to a byte, in two's complement."""
        return pack_pairs(codes.bitwise_and_(15), scratch)

    @override
    def unpacked(self, codes: Tensor, scratch: Scratch) -> Tensor:
        """Unpacks codes that were packed two to a byte, in two's complement."""
        return look_up(codes, _pairs, scratch)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Returns the two codes of every byte as float32, as the halves of 256 int64."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    codes = torch.stack((byte & 15, byte >> 4), dim=1)
    return ((codes ^ 8) - 8).to(torch.float32).view(torch.int64).view(-1)
