"""Compressions that write one scale per block of values and a few bits per value, a stretch of blocks at a time.

A payload of ``numel`` values is the scales of ``ceil(numel / block)`` blocks, then the codes, ``bits`` for each value.
Nothing is padded to whole blocks, and a block has no knowledge of another.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression


class Scratch:
    """Memory that one stretch of values after another works in: fresh memory costs more than the arithmetic in it.

    Args:
        device: Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A vector of any content, in the memory of that name. No later stretch is longer than the first."""
        if name not in self._kept:
            self._kept[name] = torch.empty(numel, dtype=dtype, device=self._device)
        return self._kept[name][:numel]


class Blockwise(Compression):
    """One scale per block, and codes that do not straddle bytes.

    Attributes:
        block: Values under one scale, a multiple of 32.
        bits: Bits of a code: 2, 4 or 8.
        scale: The type of a scale.
    """

    block: ClassVar[int]
    bits: ClassVar[int]
    scale: ClassVar[torch.dtype]

    @abstractmethod
    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks.

        Args:
            values: Contiguous float32 tensor of shape ``(blocks * block,)``. It must not be written to.
            scratch: Memory to work in; what is returned may lie there.

        Returns:
            The scales, of type ``scale`` and shape ``(blocks,)``, and the codes as bytes, the first value of a byte in
            its lowest bits.
        """

    @abstractmethod
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decodes whole blocks.

        Args:
            scales: As `encode_blocks` returns them.
            codes: As `encode_blocks` returns them. They must not be written to.
            out: float32 tensor of shape ``(blocks, block)`` that is overwritten.
            scratch: Memory to work in.
        """

    @override
    def wire_bytes(self, numel: int) -> int:
        """The exact size in bytes of the payload of ``numel`` values.

        Args:
            numel: Number of values, at least 1.

        Returns:
            A scale for each block, begun ones included, and a byte for each ``8 / bits`` values.
        """
        return self._scale_bytes(numel) + -(-numel * self.bits // 8)

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Encodes values as one scale per block and one code per value.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``. A block with a value that is not finite is encoded
                as anything; others are not touched by it.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """
        numel = values.numel()
        payload = values.new_empty(self.wire_bytes(numel), dtype=torch.uint8)
        scales, codes = payload[: self._scale_bytes(numel)].view(self.scale), payload[self._scale_bytes(numel) :]
        length, scratch = stretch(values.device), Scratch(values.device)
        for start in range(0, numel, length):
            piece = values[start : start + length]
            piece_scales, piece_codes = self.encode_blocks(self.filled_up(piece), scratch)
            scales[start // self.block :][: len(piece_scales)] = piece_scales
            target = codes[start * self.bits // 8 :][: len(piece_codes)]
            target.copy_(piece_codes[: len(target)])
        return payload

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes a payload.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        numel = out.numel()
        scales, codes = self._split(payload, numel)
        length, scratch = stretch(out.device), Scratch(out.device)
        for start in range(0, numel, length):
            piece = out[start : start + length]
            piece_scales = scales[start // self.block :][: -(-len(piece) // self.block)]
            piece_codes = codes[start * self.bits // 8 :][: -(-len(piece) * self.bits // 8)]
            whole = piece if len(piece) % self.block == 0 else piece.new_empty(len(piece_scales) * self.block)
            filled_codes = _filled_up(piece_codes, self.block * self.bits // 8)
            self.decode_blocks(piece_scales, filled_codes, whole.view(-1, self.block), scratch)
            if whole is not piece:
                piece.copy_(whole[: len(piece)])

    def parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales and codes of whole blocks, as `encode_blocks` returned them.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(numel),)``.
            numel: Number of values.
        """
        scales, codes = self._split(payload, numel)
        return scales, _filled_up(codes, self.block * self.bits // 8)

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        assert payload.numel() == self.wire_bytes(numel), "the payload belongs to a vector of another size"
        # A payload may start at an odd address inside a gathered buffer, where longer types cannot be viewed.
        return payload[: self._scale_bytes(numel)].clone().view(self.scale), payload[self._scale_bytes(numel) :]

    def filled_up(self, values: Tensor) -> Tensor:
        """Fills up the last block, with zeros."""
        return _filled_up(values, self.block)

    def _scale_bytes(self, numel: int) -> int:
        return self.scale.itemsize * -(-numel // self.block)


def stretch(device: torch.device) -> int:
    """Values at a time: on a CPU what stays in the cache (4 MiB), elsewhere enough to hide the launch of a kernel."""
    return 1 << 20 if device.type == "cpu" else 1 << 23


def as_bfloat16(tops: Tensor) -> Tensor:
    """The float32 values of bfloat16 bits that are held as integers."""
    return (tops.to(torch.int32) << 16).view(torch.float32)


def packed_pairs(codes: Tensor, scratch: Scratch) -> Tensor:
    """Two codes of four bits, which are bytes of their own and are overwritten, to a byte."""
    if torch.compiler.is_compiling():
        # A view as words of another length would end what the compiler fuses.
        low, high = codes.view(-1, 2).unbind(1)
        return low | high << 4
    # Whole words are much faster than every other byte.
    words = codes.view(torch.int16)
    shifted = torch.bitwise_right_shift(words, 4, out=scratch.take("shifted", len(words), torch.int16))
    return scratch.take("packed", len(words), torch.uint8).copy_(words.bitwise_or_(shifted))


def signs(values: Tensor, bit: int, scratch: Scratch) -> Tensor:
    """Bytes that hold the sign of each value at a bit and else nothing."""
    work = scratch.take("work", len(values), torch.int32)
    torch.bitwise_right_shift(values.view(torch.int32), 31 - bit, out=work)
    return scratch.take("signs", len(values), torch.uint8).copy_(work).bitwise_and_(1 << bit)


def magnitudes(values: Tensor, scratch: Scratch) -> Tensor:
    """The bits of the magnitudes as int32, in the memory named ``work``."""
    work = scratch.take("work", len(values), torch.int32)
    return torch.bitwise_and(values.view(torch.int32), 0x7FFFFFFF, out=work)


def looked_up(codes: Tensor, made: Callable[[torch.device], Tensor], scratch: Scratch) -> Tensor:
    """What a table of 256 words holds for each byte, as float32: as many for a byte as fit into a word of the table.

    Args:
        codes: The bytes.
        made: Makes the table on a device. It is a cached function, which torch.compile cannot look into.
        scratch: Memory to work in.
    """
    if torch.compiler.is_compiling():
        table = made.__wrapped__(codes.device)  # type: ignore[attr-defined]
        return table.view(torch.float32).view(256, -1)[codes.to(torch.int32)].view(-1)
    table = made(codes.device)
    numbers = scratch.take("numbers", len(codes), torch.int32).copy_(codes)
    found = scratch.take("found", len(codes), table.dtype)
    return torch.index_select(table, 0, numbers, out=found).view(torch.float32)


def _filled_up(values: Tensor, block: int) -> Tensor:
    return values if len(values) % block == 0 else F.pad(values, (0, -len(values) % block))
