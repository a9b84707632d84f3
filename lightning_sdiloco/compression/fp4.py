"""FP4: four bits a value, E3M0 codes (sign and three exponent bits) under one scale per block.

A payload of ``numel`` values is ``ceil(numel / 128)`` tops of 16 bits, then ``ceil(numel / 2)`` bytes of codes.
``docs/compression.md`` has the format byte by byte and the measurements behind the choices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression

BLOCK = 128
"""Values under one scale."""

_EXPONENT = 23  # the position of the exponent in a float32
_MAGNITUDE = 0x7FFFFFFF

# The least top keeps the lowest level and the threshold below it out of the subnormal numbers, which a device may
# flush to zero; the greatest is the largest finite bfloat16, which also catches blocks that are not finite.
_LEAST_TOP = 0x0400
_GREATEST_TOP = 0x7F7F


@dataclass(frozen=True)
class FP4(Compression):
    """Four bits a value, and 16 bits for each block of 128 values: 4.125 bits a value.

    The levels of a block are 0 and ``top * 2**(code - 7)`` for codes 1 to 7, with a sign. ``top`` is the largest
    magnitude of the block cut to bfloat16. A value goes to the nearest level; one below three quarters of the lowest
    level goes to zero. So a value is off by at most a third of itself, and below ``top * 3/256`` by at most itself.

    Streaming DiLoCo (arXiv 2501.18512, section 2.4) sends outer gradients as E3M0 and adds them up in float32. It
    gives no rule for the scale: this one was chosen by measuring, see ``benchmarks/compression.py``.

    Examples:
        >>> import torch
        >>> fp4, values = FP4(), torch.tensor([1.0, -0.5, 0.3, 0.0])
        >>> payload, decoded = fp4.encode(values), torch.empty(4)
        >>> fp4.decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [1.0, -0.5, 0.25, 0.0])
    """

    @override
    def wire_bytes(self, numel: int) -> int:
        """The exact size in bytes of the payload of ``numel`` values.

        Args:
            numel: Number of values, at least 1.

        Returns:
            Two bytes for each block of 128 values, begun ones included, and one byte for each two values.
        """
        return _scale_bytes(numel) + (numel + 1) // 2

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Encodes values as one top per block and one code per value.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``. A block with a value that is not finite is encoded
                with a finite top; what its codes say is of no use.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """
        numel = values.numel()
        payload = values.new_empty(self.wire_bytes(numel), dtype=torch.uint8)
        tops, codes = payload[: _scale_bytes(numel)].view(torch.int16), payload[_scale_bytes(numel) :]
        chunk = _chunk(values.device)
        for start in range(0, numel, chunk):
            piece = values[start : start + chunk]
            piece_tops, piece_codes = _encode_blocks(_whole_blocks(piece, BLOCK))
            tops[start // BLOCK :][: len(piece_tops)] = piece_tops
            codes[start // 2 :][: len(piece_codes)] = piece_codes[: (len(piece) + 1) // 2]
        return payload

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes a payload; the result is always finite.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        numel = out.numel()
        assert payload.numel() == self.wire_bytes(numel), "the payload belongs to a vector of another size"
        # A payload may start at an odd address inside a gathered buffer, where 16 bits cannot be viewed.
        tops = payload[: _scale_bytes(numel)].clone().view(torch.int16)
        codes, pairs, chunk = payload[_scale_bytes(numel) :], _pairs(out.device), _chunk(out.device)
        for start in range(0, numel, chunk):
            piece = out[start : start + chunk]
            piece_tops = tops[start // BLOCK :][: -(-len(piece) // BLOCK)]
            piece_codes = _whole_blocks(codes[start // 2 :][: (len(piece) + 1) // 2], BLOCK // 2)
            piece.copy_(_decode_blocks(piece_tops, piece_codes, pairs)[: len(piece)])


def _scale_bytes(numel: int) -> int:
    return 2 * -(-numel // BLOCK)


def _chunk(device: torch.device) -> int:
    """Values at a time: on a CPU what stays in the cache (512 KiB), elsewhere enough to hide the launch of a kernel."""
    return 1 << 17 if device.type == "cpu" else 1 << 23


def _whole_blocks(values: Tensor, block: int) -> Tensor:
    return values if len(values) % block == 0 else F.pad(values, (0, -len(values) % block))


def _encode_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes whole blocks; returns the tops (int16, one per block) and the packed codes (uint8, two values each)."""
    bits = values.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).view(-1, BLOCK)
    tops = (magnitude.amax(1) >> 16).clamp_(_LEAST_TOP, _GREATEST_TOP)
    # The threshold between two neighbouring levels is 1.5 times the lower one, so all seven have the mantissa of
    # 0.75 * top and one subtraction of float32 bits compares with all of them. Both products are exact.
    thresholds = (_as_float(tops) * 0.75).view(torch.int32) - (7 << _EXPONENT)
    codes = magnitude.sub_(thresholds[:, None]).bitwise_right_shift_(_EXPONENT).clamp_(0, 7).view(-1)
    codes |= (bits >> 28) & 8
    return tops.to(torch.int16), (codes[0::2] | codes[1::2] << 4).to(torch.uint8)


def _decode_blocks(tops: Tensor, codes: Tensor, pairs: Tensor) -> Tensor:
    """Decodes whole blocks into a new float32 tensor."""
    levels = pairs.index_select(0, codes.to(torch.int32)).view(torch.float32)
    return levels.view(-1, BLOCK).mul_(_as_float(tops.to(torch.int32))[:, None]).view(-1)


def _as_float(tops: Tensor) -> Tensor:
    return (tops << 16).view(torch.float32)


def _pairs(device: torch.device) -> Tensor:
    """The two float32 levels of every byte for a top of 1, as the halves of 256 int64."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    codes = torch.stack((byte & 15, byte >> 4), dim=1)
    exponent = codes & 7
    magnitude = ((exponent + 120) << _EXPONENT) * (exponent > 0)
    return (magnitude | (codes & 8) << 28).view(torch.int64).view(-1)
