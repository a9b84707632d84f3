"""Compressions that store each value by itself in a standard floating-point format."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression
from lightning_sdiloco.memory import new_vector

# Values of a stretch, as in `blockwise`.
_STRETCH = 1 << 20


def _parts(payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
    size = payload.numel() // max(1, numel)
    for start in range(0, numel, _STRETCH):
        stop = min(start + _STRETCH, numel)
        yield slice(start, stop), payload[size * start : size * stop]


@dataclass(frozen=True)
class Float32(Compression):
    """No compression: the bytes of the float32 values, 32 bits a value.

    Examples:
        >>> import torch
        >>> payload, decoded = Float32().encode(torch.tensor([0.1, -2.0])), torch.empty(2)
        >>> Float32().decode(payload, decoded)
        >>> payload.numel(), torch.equal(decoded, torch.tensor([0.1, -2.0]))
        (8, True)
    """

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the exact size in bytes of the payload of ``numel`` values: four bytes each."""
        return 4 * numel

    @override
    def parts(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields the bytes of one stretch after the other."""
        return _parts(payload, numel)

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Copies the bytes.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``.

        Returns:
            The payload, a uint8 tensor of shape ``(4 * numel,)`` with memory of its own.
        """
        return new_vector(self.wire_bytes(values.numel()), values.device, torch.uint8).copy_(values.view(torch.uint8))

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Copies the bytes back.

        Args:
            payload: uint8 tensor of shape ``(4 * numel,)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        out.view(torch.uint8).copy_(payload)


@dataclass(frozen=True)
class BFloat16(Compression):
    """Rounds to bfloat16, to nearest and ties to even: 16 bits a value.

    A finite value beyond the largest bfloat16 (3.39e38) becomes that largest value, not infinity.

    Examples:
        >>> import torch
        >>> payload, decoded = BFloat16().encode(torch.tensor([1.0, 1.001])), torch.empty(2)
        >>> BFloat16().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [1.0, 1.0])
    """

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the exact size in bytes of the payload of ``numel`` values: two bytes each."""
        return 2 * numel

    @override
    def parts(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields the bytes of one stretch after the other."""
        return _parts(payload, numel)

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Rounds each value.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``.

        Returns:
            The payload, a uint8 tensor of shape ``(2 * numel,)`` on the same device.
        """
        largest = torch.finfo(torch.bfloat16).max
        return values.to(torch.bfloat16).clamp_(-largest, largest).view(torch.uint8)

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Widens each value, which is exact.

        Args:
            payload: Contiguous uint8 tensor of shape ``(2 * numel,)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        # A payload may start at an odd address inside a gathered buffer, where 16 bits cannot be viewed.
        aligned = payload if payload.storage_offset() % 2 == 0 else payload.clone()
        out.copy_(aligned.view(torch.bfloat16))
