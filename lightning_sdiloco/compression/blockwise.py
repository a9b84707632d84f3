"""Compressions with one scale per block of values and a few bits per value.

A payload of ``numel`` values consists of the scales of ``ceil(numel / block)`` blocks, followed by
the codes, with ``bits`` bits per value. Payloads are not padded to whole blocks, and blocks are
independent of each other. Long vectors are encoded and decoded in chunks of blocks so that
intermediate values fit into the processor's cache.

Bits are compared as whole numbers, and products and quotients are correctly rounded, so every
processor produces the same codes. `fp4` is in a separate file, because it is also implemented in C.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression, chunk_length
from lightning_sdiloco.memory import new_vector

_EXPONENT = 23  # the position of the exponent in a float32


class Blockwise(Compression):
    """A compression with a scale for each block and codes that do not cross byte boundaries.
    Subclasses encode and decode whole blocks.

    Attributes:
        block: The number of values that share a scale. Must be a multiple of 32.
        bits: The number of bits in a code: 2, 4 or 8.
        scale: The dtype of a scale.

    Examples:
        >>> class Signs(Blockwise):
        ...     # The signs of 32 values, in one byte each, and the largest magnitude.
        ...     block, bits, scale = 32, 8, torch.float32
        ...     def encode_blocks(self, values):
        ...         return values.abs().amax(1), values > 0
        ...     def decode_blocks(self, scales, codes):
        ...         return (codes * 2.0 - 1) * scales[:, None]
        >>> values, decoded = torch.tensor([1.0, -3.0]).repeat(16), torch.empty(32)
        >>> Signs().decode(Signs().encode(values), decoded)
        >>> Signs().wire_bytes(32), decoded[:2].tolist()
        (36, [3.0, -3.0])
    """

    block: ClassVar[int]
    bits: ClassVar[int]
    scale: ClassVar[torch.dtype]

    @abstractmethod
    def encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks.

        Args:
            values: A float32 tensor of shape ``(blocks, block)``, which must not be modified.

        Returns:
            The scales, with dtype ``scale`` and shape ``(blocks,)``, and a code below ``2 ** bits``
            for each value.
        """

    @abstractmethod
    def decode_blocks(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Decodes whole blocks.

        Args:
            scales: The scales, as returned by `encode_blocks`.
            codes: Bytes of shape ``(blocks, block * bits / 8)``. The lowest bits of a byte contain
                its first code.

        Returns:
            A new float32 tensor of shape ``(blocks, block)``.
        """

    def pad(self, values: Tensor) -> Tensor:
        """Pads values with zeros to whole blocks."""
        return _padded(values, self.block)

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the payload size: a scale for each whole or partial block, and one byte for every
        ``8 / bits`` values.
        """
        return self._scale_bytes(numel) + -(-numel * self.bits // 8)

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Encodes values. The result for a block with a non-finite value is undefined, but other
        blocks are not affected.
        """
        numel = values.numel()
        payload = new_vector(self.wire_bytes(numel), values.device, torch.uint8)
        scales, codes = payload.tensor_split([self._scale_bytes(numel)])
        scales = scales.view(self.scale)
        for chunk in chunks(numel, values.device):
            blocks = self.pad(values[chunk]).view(-1, self.block)
            new_scales, new_codes = self.encode_blocks(blocks)
            scales[self._blocks(chunk)] = new_scales
            packed = codes[self._code_bytes(chunk)]
            packed.copy_(_packed(new_codes.to(torch.uint8).view(-1), self.bits)[: len(packed)])
        return payload

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        for chunk, values in self.stretches(payload, out.numel()):
            out[chunk] = values

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        assert payload.numel() == self.wire_bytes(numel), (
            "the payload belongs to a vector of another size"
        )
        scales, codes = payload.tensor_split([self._scale_bytes(numel)])
        # A payload may start at an odd address of a gathered buffer, which wider types cannot view.
        scales = scales.clone().view(self.scale)
        for chunk in chunks(numel, payload.device):
            chunk_scales = scales[self._blocks(chunk)]
            packed = _padded(codes[self._code_bytes(chunk)], self.block * self.bits // 8)
            blocks = self.decode_blocks(chunk_scales, packed.view(len(chunk_scales), -1))
            yield chunk, blocks.view(-1)[: chunk.stop - chunk.start]

    def _scale_bytes(self, numel: int) -> int:
        return self.scale.itemsize * -(-numel // self.block)

    def _blocks(self, chunk: slice) -> slice:
        """Returns the blocks of a chunk of values. The chunk must start at a block boundary."""
        return slice(chunk.start // self.block, -(-chunk.stop // self.block))

    def _code_bytes(self, chunk: slice) -> slice:
        """Returns the bytes with the codes of a chunk. The chunk must start at a byte boundary."""
        return slice(chunk.start * self.bits // 8, -(-chunk.stop * self.bits // 8))


class Leveled(Blockwise):
    """A compression with the same levels in all blocks, multiplied by a step that the block's scale
    encodes.

    Attributes:
        levels: The values of the ``2 ** bits`` codes for a step of 1.
    """

    levels: ClassVar[tuple[float, ...]]

    @abstractmethod
    def steps(self, scales: Tensor) -> Tensor:
        """Returns the step of each block as float32."""

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor) -> Tensor:
        return look_up(codes, self.levels).mul_(self.steps(scales)[:, None])


class _Integers(Leveled):
    """Encodes values as whole multiples of ``top / largest``, from ``-largest`` to ``largest``.

    ``top`` is the largest magnitude of the block, rounded to bfloat16. The lower limit on ``top``
    ensures that ``top / 127`` is not subnormal, and the upper limit is the largest finite bfloat16.
    Values are rounded to the nearest multiple, with ties to even.
    """

    block: ClassVar[int] = 128
    scale: ClassVar[torch.dtype] = torch.int16
    largest: ClassVar[int]

    @override
    def encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks in two's complement."""
        tops = (magnitude_bits(values).amax(1) + 0x8000 >> 16).clamp_(0x0400, 0x7F7F)
        # This is not written as largest / tops, because torch would compute the reciprocal of tops,
        # which may be subnormal.
        per_unit = torch.full_like(tops, self.largest, dtype=torch.float32)
        per_unit.div_(from_bfloat16_bits(tops))
        numbers = (values * per_unit[:, None]).round_().clamp_(-self.largest, self.largest)
        codes = numbers.to(torch.int8)
        if self.bits < 8:
            codes.bitwise_and_(2**self.bits - 1)
        return tops.to(torch.int16), codes

    @override
    def steps(self, scales: Tensor) -> Tensor:
        """Returns the steps. The divisor is a tensor on the device, because an accelerator would
        otherwise multiply by its reciprocal.
        """
        tops = from_bfloat16_bits(scales)
        return tops.div_(tops.new_full((), self.largest))


@dataclass(frozen=True)
class Int8(_Integers):
    """Whole numbers from -127 to 127, with 16 bits for each block of 128 values (8.125 bits per
    value).

    Examples:
        >>> import torch
        >>> payload, decoded = Int8().encode(torch.tensor([127.0, -3.0, 0.2])), torch.empty(3)
        >>> Int8().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (5, [127.0, -3.0, 0.0])
    """

    bits: ClassVar[int] = 8
    largest: ClassVar[int] = 127
    levels: ClassVar[tuple[float, ...]] = tuple(map(float, [*range(128), *range(-128, 0)]))


@dataclass(frozen=True)
class Int4(_Integers):
    """Whole numbers from -7 to 7, with 16 bits for each block of 128 values (4.125 bits per value).

    Examples:
        >>> import torch
        >>> payload, decoded = Int4().encode(torch.tensor([7.0, -3.0, 0.2])), torch.empty(3)
        >>> Int4().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [7.0, -3.0, 0.0])
    """

    bits: ClassVar[int] = 4
    largest: ClassVar[int] = 7
    levels: ClassVar[tuple[float, ...]] = tuple(map(float, [*range(8), *range(-8, 0)]))


class _Microscaling(Leveled):
    """Small floating-point codes with a power of two for each block, as in the OCP Microscaling
    formats.

    Products with a power of two are exact. Powers are stored as E8M0, which is a float32 exponent
    with a bias of 127.
    """

    scale: ClassVar[torch.dtype] = torch.uint8

    @override
    def steps(self, scales: Tensor) -> Tensor:
        return _power_of_two(scales.to(torch.int32))


@dataclass(frozen=True)
class FP8(_Microscaling):
    """E4M3 codes, with 8 bits for each block of 128 values (8.0625 bits per value).

    The power of two scales the largest magnitude of the block, rounded to four significant bits,
    into ``[128, 256)``. Therefore, no value is clipped, and values down to ``2**-13`` of the
    largest magnitude keep four significant bits. Ties are rounded to even.

    Examples:
        >>> import torch
        >>> payload, decoded = FP8().encode(torch.tensor([1.0, -0.3, 0.0])), torch.empty(3)
        >>> FP8().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [1.0, -0.3125, 0.0])
    """

    block: ClassVar[int] = 128
    bits: ClassVar[int] = 8
    levels: ClassVar[tuple[float, ...]] = tuple(
        torch.arange(256, device="cpu")
        .to(torch.uint8)
        .view(torch.float8_e4m3fn)
        .to(torch.float32)
        .tolist()
    )

    @override
    def encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks. Products are exact unless they are so small that they become
        zero.
        """
        scales = _exponent_of(magnitude_bits(values).amax(1) + (1 << 19), below=7, lowest=9)
        # At the largest scale, the largest magnitude could be rounded up to 256, which would
        # overflow when decoded.
        scaled = (values * _power_of_two(254 - scales)[:, None]).clamp_(-240, 240)
        return scales.to(torch.uint8), scaled.to(torch.float8_e4m3fn).view(torch.uint8)


@dataclass(frozen=True)
class MXFP4(_Microscaling):
    """The OCP MXFP4 format: E2M1 codes, with 8 bits for each block of 32 values (4.25 bits per
    value).

    The levels of a block are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times a power of two, with a sign. The
    power of two scales the largest magnitude into ``[4, 8)``, as required by the OCP specification,
    so values above 6 are clipped. Values are rounded to the nearest level, with ties to the even
    code.

    Examples:
        >>> import torch
        >>> payload, decoded = MXFP4().encode(torch.tensor([6.0, -0.9, 0.2, 5.0])), torch.empty(4)
        >>> MXFP4().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (3, [6.0, -1.0, 0.0, 4.0])
    """

    block: ClassVar[int] = 32
    bits: ClassVar[int] = 4
    levels: ClassVar[tuple[float, ...]] = tuple(
        s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)
    )

    @override
    def encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks. A code consists of a sign and a level number."""
        magnitude = magnitude_bits(values)
        scales = _exponent_of(magnitude.amax(1), below=2, lowest=1)
        share = magnitude.view(torch.float32).mul_(_power_of_two(254 - scales)[:, None])
        # The distance between levels is 1/2 up to 2, 1 up to 4, and 2 above 4. The smallest of the
        # three roundings is correct.
        numbers = torch.minimum((share * 2).round_(), share.round().add_(2))
        numbers = torch.minimum(numbers, (share * 0.5).round_().add_(4)).clamp_(0, 7)
        return scales.to(torch.uint8), numbers.to(torch.int32).bitwise_or_(sign_bits(values, 3))


@dataclass(frozen=True)
class Int2(Blockwise):
    """A sign and one of two magnitudes, with 32 bits for each block of 128 values (2.25 bits per
    value).

    The magnitudes in a block are split into two sets at their mean. The means of the two sets are
    the two magnitudes of the block. A value is rounded to the nearer magnitude, with ties to the
    larger one. In a block that contains a zero, the lower magnitude is zero, so zeros remain zeros.

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
        """Encodes whole blocks. A scale consists of the lower magnitude and then the upper
        magnitude, both as bfloat16.
        """
        magnitude = magnitude_bits(values)
        means = torch.stack(_two_means(magnitude), dim=1)
        pairs = means.to(torch.bfloat16).clamp_(0, torch.finfo(torch.bfloat16).max)
        low, high = pairs.to(torch.float32).unbind(1)
        is_high = magnitude >= (low * 0.5 + high * 0.5).view(torch.int32)[:, None]
        return pairs.view(torch.int32).view(-1), sign_bits(values, 1).bitwise_or_(is_high)

    @override
    def pad(self, values: Tensor) -> Tensor:
        """Pads the last block by repeating its values, because zeros would lower the magnitudes."""
        missing = -len(values) % self.block
        if not missing:
            return values
        last = values[len(values) // self.block * self.block :]
        return torch.cat((values, last.repeat(self.block)[:missing]))

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Decodes whole blocks. The sum is exact, because one of the two terms is zero."""
        low = from_bfloat16_bits(scales & 0xFFFF)
        high = from_bfloat16_bits(scales >> 16)
        lower = look_up(codes, (1.0, 0.0, -1.0, -0.0)).mul_(low[:, None])
        return lower.add_(look_up(codes, (0.0, 1.0, -0.0, -1.0)).mul_(high[:, None]))


def _two_means(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean of the magnitudes that are below the overall mean and the mean of the other
    magnitudes, computed in float64.
    """
    doubles = magnitudes.view(torch.float32).to(torch.float64)
    mean = doubles.mean(1)
    # The smallest float32 value that is not below the mean.
    least = mean.to(torch.float32)
    least = torch.where(least < mean, (least.view(torch.int32) + 1).view(torch.float32), least)
    # The value is -1 for each magnitude below the mean, and 0 for the other magnitudes.
    is_below = (magnitudes - least.view(torch.int32)[:, None]).bitwise_right_shift_(31)
    number_below = is_below.sum(1, dtype=torch.int32).neg_()
    number_above = (magnitudes.size(1) - number_below).clamp_(min=1)
    # Both sets are summed, because the difference from the total would lose small values next to
    # large values.
    below = is_below.bitwise_and_(magnitudes)
    low = doubles.copy_(below.view(torch.float32)).sum(1) / number_below.clamp(min=1)
    above = below.bitwise_xor_(magnitudes)
    high = doubles.copy_(above.view(torch.float32)).sum(1) / number_above
    low[magnitudes.amin(1) == 0] = 0
    return low.to(torch.float32), high.to(torch.float32)


def chunks(numel: int, device: torch.device) -> Iterator[slice]:
    """Yields the chunks of a vector. All chunks except the last consist of whole blocks."""
    length = chunk_length(device)
    for start in range(0, numel, length):
        yield slice(start, min(start + length, numel))


def from_bfloat16_bits(bits: Tensor) -> Tensor:
    """Converts bfloat16 bits, stored as integers, to float32 values."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def sign_bits(values: Tensor, bit: int) -> Tensor:
    """Returns int32 numbers with the sign of each value at a given bit and zeros at all other
    bits.
    """
    return (values.view(torch.int32) >> 31).bitwise_and_(1 << bit)


def magnitude_bits(values: Tensor) -> Tensor:
    """Returns the bits of the magnitudes as int32 numbers."""
    return values.view(torch.int32) & 0x7FFFFFFF


def look_up(codes: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Converts rows of bytes that contain codes to rows of float32 values."""
    words = table(levels, codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
    return words.view(torch.float32).view(len(codes), -1)


@cache
def table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns a table of the values encoded by each possible byte. Look-ups are faster than
    arithmetic.
    """
    bits = len(levels).bit_length() - 1
    byte = torch.arange(256, device=device)[:, None] >> torch.arange(0, 8, bits, device=device)
    values = torch.tensor(levels, device=device, dtype=torch.float32)[byte & len(levels) - 1]
    return values.view({8: torch.float32, 4: torch.int64, 2: torch.complex128}[bits]).view(-1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Packs codes that are stored one per byte. Operations on words are much faster than operations
    on every other byte.
    """
    if bits == 8:
        return codes
    # A 2-bit code in the next byte is 8 - 2 bits too high. Bits above the lowest byte are dropped.
    if bits == 4:
        words = codes.view(torch.int16)
        return (words | words >> 4).to(torch.uint8)
    words = codes.view(torch.int32)
    words = words | words >> 6
    return (words | words >> 12).to(torch.uint8)


def _padded(values: Tensor, block: int) -> Tensor:
    missing = -len(values) % block
    if not missing:
        return values
    return F.pad(values, (0, missing))


def _exponent_of(largest: Tensor, below: int, lowest: int) -> Tensor:
    """Returns the biased exponent of the largest magnitude, minus ``below``."""
    return (largest >> _EXPONENT).sub_(below).clamp_(lowest + 1, 254 - below)


def _power_of_two(biased: Tensor) -> Tensor:
    return (biased << _EXPONENT).view(torch.float32)
