"""Small floating-point codes under one power of two per block, as in the OCP Microscaling formats.

A power of two leaves every product exact. It is stored as E8M0: the exponent of a float32, biased by 127.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.blockwise import Blockwise, Scratch, look_up, magnitude_bits, pack_pairs, sign_bits

_EXPONENT = 23  # the position of the exponent in a float32


@dataclass(frozen=True)
class FP8(Blockwise):
    """E4M3 codes, and 8 bits for each block of 128 values: 8.0625 bits a value.

    The power of two brings the largest magnitude of the block, rounded to four significant bits, into ``[128, 256)``.
    So nothing is cut off, and a value down to ``2**-13`` of the largest keeps four significant bits. Ties go to even.

    Examples:
        >>> import torch
        >>> payload, decoded = FP8().encode(torch.tensor([1.0, -0.3, 0.0])), torch.empty(3)
        >>> FP8().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [1.0, -0.3125, 0.0])
    """

    block: ClassVar[int] = 128
    bits: ClassVar[int] = 8
    scale: ClassVar[torch.dtype] = torch.uint8

    @override
    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks. Products are exact, except for those so small that they become zero."""
        largest = magnitude_bits(values, scratch).view(-1, self.block).amax(1)
        scales = _exponent_of(largest + (1 << 19), below=7, lowest=9)
        scaled = scratch.take("work", len(values), torch.int32).view(torch.float32).view(-1, self.block)
        torch.mul(values.view(-1, self.block), _power_of_two(254 - scales)[:, None], out=scaled)
        # Beyond the largest scale, the largest magnitude could be rounded up to 256, which overflows when decoded.
        scaled.clamp_(-240, 240)
        codes = scratch.take("codes", len(values), torch.float8_e4m3fn).copy_(scaled.view(-1))
        return scales.to(torch.uint8), codes.view(torch.uint8)

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decodes whole blocks; exact."""
        levels = look_up(codes, _bytes, scratch).view(-1, self.block)
        torch.mul(levels, _power_of_two(scales.to(torch.int32))[:, None], out=out)


@dataclass(frozen=True)
class MXFP4(Blockwise):
    """E2M1 codes, and 8 bits for each block of 32 values: 4.25 bits a value; the OCP MXFP4 format.

    The levels of a block are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times a power of two, with a sign. The power of two brings
    the largest magnitude into ``[4, 8)``, as the OCP specification says, so that whatever is above 6 is cut off. A
    value goes to the nearest level, and ties go to the even code.

    Examples:
        >>> import torch
        >>> payload, decoded = MXFP4().encode(torch.tensor([6.0, -0.9, 0.2, 5.0])), torch.empty(4)
        >>> MXFP4().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (3, [6.0, -1.0, 0.0, 4.0])
    """

    block: ClassVar[int] = 32
    bits: ClassVar[int] = 4
    scale: ClassVar[torch.dtype] = torch.uint8

    @override
    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks. A code is a sign and the number of a level; two codes go into a byte."""
        codes = sign_bits(values, 3, scratch)
        magnitude = magnitude_bits(values, scratch).view(-1, self.block)
        scales = _exponent_of(magnitude.amax(1), below=2, lowest=1)
        share = magnitude.view(torch.float32).mul_(_power_of_two(254 - scales)[:, None]).view(-1)
        # The levels have steps of 1/2 up to 2, of 1 up to 4 and of 2 beyond. The least of the three roundings is right.
        levels, other = (scratch.take(name, len(values), torch.float32) for name in ("levels", "other"))
        torch.mul(share, 2, out=levels).round_()
        torch.minimum(levels, torch.round(share, out=other).add_(2), out=levels)
        torch.minimum(levels, share.mul_(0.5).round_().add_(4), out=levels)
        # Not straight to uint8, at which torch is several times slower.
        numbers = scratch.take("codes", len(values), torch.int8).copy_(levels.clamp_(0, 7))
        return scales.to(torch.uint8), pack_pairs(codes.bitwise_or_(numbers.view(torch.uint8)), scratch)

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decodes whole blocks; exact."""
        levels = look_up(codes, _pairs, scratch).view(-1, self.block)
        torch.mul(levels, _power_of_two(scales.to(torch.int32))[:, None], out=out)


def _exponent_of(largest: Tensor, below: int, lowest: int) -> Tensor:
    """Returns the biased exponent of the largest magnitude, less ``below``."""
    return (largest >> _EXPONENT).sub_(below).clamp_(lowest + 1, 254 - below)


def _power_of_two(biased: Tensor) -> Tensor:
    return (biased << _EXPONENT).view(torch.float32)


@cache
def _bytes(device: torch.device) -> Tensor:
    """Returns the E4M3 value of every byte as float32: on a CPU, a table is several times faster than conversion."""
    return torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Returns the two E2M1 levels of every byte as float32, as the halves of 256 int64."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    byte = torch.arange(256, device=device)
    return torch.cat((levels, -levels))[torch.stack((byte & 15, byte >> 4), dim=1)].view(torch.int64).view(-1)
