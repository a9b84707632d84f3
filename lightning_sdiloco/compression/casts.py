"""Compressions that store each value separately in a standard floating-point format."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression, Traits, chunk_length
from lightning_sdiloco.memory import new_vector


class _Cast(Compression):
    dtype: ClassVar[torch.dtype]

    @override
    def wire_bytes(self, numel: int) -> int:
        return self.dtype.itemsize * numel

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        # A payload may start at an odd address of a gathered buffer, which wider types cannot view.
        if payload.storage_offset() % self.dtype.itemsize:
            payload = payload.clone()
        out.copy_(payload.view(self.dtype))

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        size = self.dtype.itemsize
        length = chunk_length(payload.device)
        scratch = new_vector(min(length, numel), payload.device)
        for start in range(0, numel, length):
            stop = min(start + length, numel)
            values = scratch[: stop - start]
            self.decode(payload[size * start : size * stop], values)
            yield slice(start, stop), values


@dataclass(frozen=True)
class Float32(_Cast):
    """The unchanged bytes of the float32 values (32 bits per value).

    Examples:
        >>> import torch
        >>> payload, decoded = Float32().encode(torch.tensor([0.1, -2.0])), torch.empty(2)
        >>> Float32().decode(payload, decoded)
        >>> payload.numel(), torch.equal(decoded, torch.tensor([0.1, -2.0]))
        (8, True)
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    @override
    def traits(self) -> Traits:
        return Traits(hub_code="fp32")

    @override
    def encode(self, values: Tensor) -> Tensor:
        payload = new_vector(self.wire_bytes(values.numel()), values.device, torch.uint8)
        return payload.copy_(values.view(torch.uint8))


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Values rounded to the nearest bfloat16, with ties to even (16 bits per value).

    A finite value above the largest bfloat16 (3.39e38) is rounded to the largest bfloat16 instead
    of to infinity.

    Examples:
        >>> import torch
        >>> payload, decoded = BFloat16().encode(torch.tensor([1.0, 1.001])), torch.empty(2)
        >>> BFloat16().decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [1.0, 1.0])
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    @override
    def encode(self, values: Tensor) -> Tensor:
        largest = torch.finfo(torch.bfloat16).max
        return values.to(torch.bfloat16).clamp_(-largest, largest).view(torch.uint8)
