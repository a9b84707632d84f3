"""Compressions that write one scale per block of values and a few bits per value, a stretch of blocks at a time.

A payload of ``numel`` values is the scales of ``ceil(numel / block)`` blocks, then the codes, ``bits`` for each value.
Nothing is padded to whole blocks, and a block has no knowledge of another.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression


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
    def encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks.

        Args:
            values: Contiguous float32 tensor of shape ``(blocks * block,)``. It must not be written to.

        Returns:
            The scales, of type ``scale`` and shape ``(blocks,)``, and the codes as bytes, the first value of a byte in
            its lowest bits.
        """

    @abstractmethod
    def decode_blocks(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Decodes whole blocks.

        Args:
            scales: As `encode_blocks` returns them.
            codes: As `encode_blocks` returns them. They must not be written to.

        Returns:
            float32 tensor of shape ``(blocks * block,)``.
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
        length = stretch(values.device)
        for start in range(0, numel, length):
            piece = values[start : start + length]
            piece_scales, piece_codes = self.encode_blocks(self.filled_up(piece))
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
        assert payload.numel() == self.wire_bytes(numel), "the payload belongs to a vector of another size"
        # A payload may start at an odd address inside a gathered buffer, where longer types cannot be viewed.
        scales = payload[: self._scale_bytes(numel)].clone().view(self.scale)
        codes, length = payload[self._scale_bytes(numel) :], stretch(out.device)
        for start in range(0, numel, length):
            piece = out[start : start + length]
            piece_scales = scales[start // self.block :][: -(-len(piece) // self.block)]
            piece_codes = codes[start * self.bits // 8 :][: -(-len(piece) * self.bits // 8)]
            decoded = self.decode_blocks(piece_scales, _filled_up(piece_codes, self.block * self.bits // 8))
            piece.copy_(decoded[: len(piece)])

    def filled_up(self, values: Tensor) -> Tensor:
        """Fills up the last block, with zeros."""
        return _filled_up(values, self.block)

    def _scale_bytes(self, numel: int) -> int:
        return self.scale.itemsize * -(-numel // self.block)


def stretch(device: torch.device) -> int:
    """Values at a time: on a CPU what stays in the cache (2 MiB), elsewhere enough to hide the launch of a kernel."""
    return 1 << 19 if device.type == "cpu" else 1 << 23


def as_bfloat16(tops: Tensor) -> Tensor:
    """The float32 values of bfloat16 bits that are held as integers."""
    return (tops.to(torch.int32) << 16).view(torch.float32)


def packed_pairs(codes: Tensor) -> Tensor:
    """Two codes of four bits, which are bytes of their own, to a byte."""
    # Whole words are much faster than every other byte.
    words = codes.view(torch.int16)
    return (words | words >> 4).to(torch.uint8)


def _filled_up(values: Tensor, block: int) -> Tensor:
    return values if len(values) % block == 0 else F.pad(values, (0, -len(values) % block))
