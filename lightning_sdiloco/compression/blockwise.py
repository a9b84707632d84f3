"""Compressions with one scale per block of values and a few bits per value.

A payload of ``numel`` values is the scales of ``ceil(numel / block)`` blocks, then the codes, ``bits`` for each value.
Payloads are not padded to whole blocks, and blocks are independent of each other. Eagerly, a long vector is encoded and
decoded one chunk of blocks at a time; on CUDA `compression.kernels` compiles each direction into one pass.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import BlockCodec, Compression
from lightning_sdiloco.memory import new_vector


class Scratch:
    """Working memory that is reused for each chunk in turn: allocating it anew would cost more than the arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised vector in the memory of that name. No later chunk is longer than the first."""
        if name not in self._kept:
            self._kept[name] = new_vector(numel, self._device, dtype)
        return self._kept[name][:numel]


class Blockwise(Compression):
    """Writes one scale per block, and codes that do not straddle bytes.

    A subclass names its format, and encodes and decodes whole blocks with operations that torch.compile can trace. If
    torch.compile cannot trace them, or if the compiled form gives other bits than the eager one, the compression runs
    eagerly and a warning says why.

    Attributes:
        block: Values under one scale, a multiple of 32.
        bits: Bits of a code: 2, 4 or 8.
        scale: The dtype of a scale.

    Examples:
        >>> class Signs(Blockwise):
        ...     # The signs of 32 values, a byte each, and their largest magnitude.
        ...     block, bits, scale = 32, 8, torch.float32
        ...     def encode_blocks(self, values, scratch):
        ...         return values.abs().view(-1, 32).amax(1), (values > 0).to(torch.uint8)
        ...     def decode_blocks(self, scales, codes, out, scratch):
        ...         torch.mul(codes.view(-1, 32) * 2.0 - 1, scales[:, None], out=out)
        >>> values, decoded = torch.tensor([1.0, -3.0]).repeat(16), torch.empty(32)
        >>> Signs().decode(Signs().encode(values), decoded)
        >>> Signs().wire_bytes(32), decoded[:2].tolist()
        (36, [3.0, -3.0])
    """

    block: ClassVar[int]
    bits: ClassVar[int]
    scale: ClassVar[torch.dtype]

    @abstractmethod
    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks.

        Args:
            values: Contiguous float32 tensor of shape ``(blocks * block,)``, which must not be written to.
            scratch: Working memory. The results may be views of it.

        Returns:
            The scales, of dtype ``scale`` and shape ``(blocks,)``, and the codes as bytes, the first value of a byte in
            its lowest bits.
        """

    @abstractmethod
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decodes whole blocks.

        Args:
            scales: As `encode_blocks` returns them.
            codes: As `encode_blocks` returns them. They must not be written to.
            out: float32 tensor of shape ``(blocks, block)``, which is overwritten.
            scratch: Working memory.
        """

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the exact size in bytes of the payload of ``numel`` values.

        Args:
            numel: Number of values, at least 1.

        Returns:
            The bytes of a scale for each block, also for a partial one, and a byte for each ``8 / bits`` values.
        """
        return self._scale_bytes(numel) + -(-numel * self.bits // 8)

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Encodes values as one scale per block and one code per value.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``. A block with a non-finite value may be encoded as
                anything; the other blocks are not affected.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """
        numel = values.numel()
        payload = new_vector(self.wire_bytes(numel), values.device, torch.uint8)
        scales, codes = payload[: self._scale_bytes(numel)].view(self.scale), payload[self._scale_bytes(numel) :]
        length, scratch = chunk_length(values.device), Scratch(values.device)
        for start in range(0, numel, length):
            piece = values[start : start + length]
            piece_scales, piece_codes = self.encode_blocks(self.pad(piece), scratch)
            scales[start // self.block :][: len(piece_scales)] = piece_scales
            target = codes[start * self.bits // 8 :][: len(piece_codes)]
            target.copy_(piece_codes[: len(target)])
        return payload

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes a payload.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)``, which is overwritten.
        """
        numel = out.numel()
        scales, codes = self._split(payload, numel)
        length, scratch = chunk_length(out.device), Scratch(out.device)
        for start in range(0, numel, length):
            piece = out[start : start + length]
            piece_scales = scales[start // self.block :][: -(-len(piece) // self.block)]
            piece_codes = codes[start * self.bits // 8 :][: -(-len(piece) * self.bits // 8)]
            whole = piece if len(piece) % self.block == 0 else piece.new_empty(len(piece_scales) * self.block)
            padded_codes = _pad(piece_codes, self.block * self.bits // 8)
            self.decode_blocks(piece_scales, padded_codes, whole.view(-1, self.block), scratch)
            if whole is not piece:
                piece.copy_(whole[: len(piece)])

    @override
    def parts(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields payloads of as many whole blocks as are handled at a time; see `Compression.parts`."""
        scales, codes = payload[: self._scale_bytes(numel)], payload[self._scale_bytes(numel) :]
        length = chunk_length(payload.device)
        # One for all: the allocator of the host would hold many of those that come and go.
        part = new_vector(self.wire_bytes(min(length, numel)), payload.device, torch.uint8)
        for start in range(0, numel, length):
            stop = min(start + length, numel)
            of_scales = slice(self._scale_bytes(start), self._scale_bytes(stop))
            of_codes = slice(start * self.bits // 8, -(-stop * self.bits // 8))
            joined = (scales[of_scales], codes[of_codes])
            yield slice(start, stop), torch.cat(joined, out=part[: sum(map(len, joined))])

    @override
    def blocks(self) -> BlockCodec:
        """Returns itself: all blockwise compressions are compiled on CUDA."""
        return self

    def pad(self, values: Tensor) -> Tensor:
        """Pads values to whole blocks, with zeros."""
        return _pad(values, self.block)

    def encode_padded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks and returns their scales and codes, in memory of their own."""
        return self.encode_blocks(values, Scratch(values.device))

    def split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Splits a payload into the scales and the codes of whole blocks, as `encode_blocks` returned them.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(numel),)``.
            numel: Number of values.
        """
        scales, codes = self._split(payload, numel)
        return scales, _pad(codes, self.block * self.bits // 8)

    def decode_padded(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Decodes whole blocks and returns their values, float32 of shape ``(blocks, block)``."""
        out = torch.empty(len(scales), self.block, device=scales.device)
        self.decode_blocks(scales, codes, out, Scratch(scales.device))
        return out

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        assert payload.numel() == self.wire_bytes(numel), "the payload belongs to a vector of another size"
        # A payload may start at an odd address of a gathered buffer, where wider types cannot be viewed.
        return payload[: self._scale_bytes(numel)].clone().view(self.scale), payload[self._scale_bytes(numel) :]

    def _scale_bytes(self, numel: int) -> int:
        return self.scale.itemsize * -(-numel // self.block)


def chunk_length(device: torch.device) -> int:
    """Returns how many values to handle at a time."""
    return 1 << 20 if device.type == "cpu" else 1 << 23


def from_bfloat16_bits(bits: Tensor) -> Tensor:
    """Returns the float32 values of bfloat16 bits that are held as integers."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def pack_pairs(codes: Tensor, scratch: Scratch) -> Tensor:
    """Packs four-bit codes, given one to a byte, two to a byte. The input is overwritten."""
    if torch.compiler.is_compiling():
        # A view as wider words would break the fusion.
        low, high = codes.view(torch.uint8).view(-1, 2).unbind(1)
        return low | high << 4
    # Whole words are much faster than every other byte.
    words = codes.view(torch.int16)
    shifted = torch.bitwise_right_shift(words, 4, out=scratch.take("shifted", len(words), torch.int16))
    return scratch.take("packed", len(words), torch.uint8).copy_(words.bitwise_or_(shifted))


def pack_quads(codes: Tensor, scratch: Scratch) -> Tensor:
    """Packs two-bit codes, given one to a byte, four to a byte."""
    if torch.compiler.is_compiling():
        first, second, third, fourth = codes.view(torch.uint8).view(-1, 4).unbind(1)
        return first | second << 2 | third << 4 | fourth << 6
    words = codes.view(torch.int32)
    packed, shifted = (scratch.take(name, len(words), torch.int32) for name in ("packed", "shifted"))
    packed.copy_(words)
    for bits in (6, 12, 18):
        packed.bitwise_or_(torch.bitwise_right_shift(words, bits, out=shifted))
    return scratch.take("bytes", len(words), torch.uint8).copy_(packed)


def sign_bits(values: Tensor, bit: int, scratch: Scratch) -> Tensor:
    """Returns a byte for each value, with the sign of the value at a given bit and zeros elsewhere."""
    work = scratch.take("work", len(values), torch.int32)
    torch.bitwise_right_shift(values.view(torch.int32), 31 - bit, out=work)
    return scratch.take("signs", len(values), torch.uint8).copy_(work).bitwise_and_(1 << bit)


def magnitude_bits(values: Tensor, scratch: Scratch) -> Tensor:
    """Returns the bits of the magnitudes as int32, in the scratch memory named ``work``."""
    work = scratch.take("work", len(values), torch.int32)
    return torch.bitwise_and(values.view(torch.int32), 0x7FFFFFFF, out=work)


def look_up(codes: Tensor, make_table: Callable[[torch.device], Tensor], scratch: Scratch) -> Tensor:
    """Looks up the float32 values that each byte stands for."""
    if torch.compiler.is_compiling():
        table = make_table.__wrapped__(codes.device)  # type: ignore[attr-defined]
        return table.view(torch.float32).view(256, -1)[codes.to(torch.int32)].view(-1)
    table = make_table(codes.device)
    numbers = scratch.take("numbers", len(codes), torch.int32).copy_(codes)
    found = scratch.take(f"found {make_table.__name__}", len(codes), table.dtype)
    return torch.index_select(table, 0, numbers, out=found).view(torch.float32)


def _pad(values: Tensor, block: int) -> Tensor:
    return values if len(values) % block == 0 else F.pad(values, (0, -len(values) % block))
