"""How the long passes over a shard run, encoding and the mean: operation by operation, or each compiled into one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression import FP4, Compression
from lightning_sdiloco.compression.blockwise import Scratch

# Every operation rounds for itself, as it does alone: a fused product and sum would give other bits.
_OPTIONS: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "emulate_precision_casts": True,  # with it Triton is told not to fuse products and sums
    "eager_numerics.disable_ftz": True,
}


class Kernels(ABC):
    """Encodes, and takes means. All kinds give the same bits."""

    @property
    def name(self) -> str:
        """The kind. Ranks compare it: a kind that differed by a bit would let the groups drift apart."""
        return type(self).__name__.lower()

    @abstractmethod
    def encode(self, values: Tensor, compression: Compression) -> Tensor:
        """Encodes as `Compression.encode` does.

        Args:
            values: The outer gradient of a shard, with what was remembered.
            compression: How to encode it.
        """

    @abstractmethod
    def mean(
        self, payloads: Sequence[Tensor], factors: Mapping[int, float], compression: Compression, like: Tensor
    ) -> Tensor:
        """The float32 mean of the groups that count, added up in their order so that all get the same bits.

        Args:
            payloads: What every group sent.
            factors: The groups that count, each with the factor of what it sent.
            compression: How the payloads are encoded.
            like: A tensor of the shape and on the device of the outer gradient.
        """


class Eager(Kernels):
    """Operation by operation, a stretch at a time: the reference."""

    @override
    def encode(self, values: Tensor, compression: Compression) -> Tensor:
        """Encodes as `Compression.encode` does."""
        return compression.encode(values)

    @override
    def mean(
        self, payloads: Sequence[Tensor], factors: Mapping[int, float], compression: Compression, like: Tensor
    ) -> Tensor:
        """The float32 mean of the groups that count."""
        total, decoded = torch.zeros_like(like), torch.empty_like(like)
        for group, factor in factors.items():
            compression.decode(payloads[group], decoded)
            # Two roundings, one after the other: whether a fused product and sum is there depends on the processor.
            total += decoded if factor == 1 else decoded.mul_(factor)
        return _divided(total, len(factors))


EAGER = Eager()
"""The reference."""


class Compiled(Kernels):
    """One pass each where the compression is `FP4`; all else runs operation by operation."""

    @override
    def encode(self, values: Tensor, compression: Compression) -> Tensor:
        """Encodes as `Compression.encode` does."""
        if not isinstance(compression, FP4):
            return EAGER.encode(values, compression)
        scales, codes = _compiled(_encoded)(compression.filled_up(values))
        # The codes of what filled up the last block do not travel.
        return torch.cat((scales.view(torch.uint8), codes))[: compression.wire_bytes(values.numel())]

    @override
    def mean(
        self, payloads: Sequence[Tensor], factors: Mapping[int, float], compression: Compression, like: Tensor
    ) -> Tensor:
        """The float32 mean of the groups that count."""
        if not isinstance(compression, FP4) or not factors:
            return EAGER.mean(payloads, factors, compression, like)
        # A group that does not count adds zeros, which change no bit: so one program does for every mean.
        # Zero comes first, to start from: the compiler would leave out a zero that it knows, and with it a sign.
        weights = like.new_tensor([0.0, *(factors.get(group, 0.0) for group in range(len(payloads)))])
        parts = [compression.parts(payload, like.numel()) for payload in payloads]
        return _divided(_compiled(_sum)(parts, weights)[: like.numel()], len(factors))


def kernels_for(device: torch.device) -> Kernels:
    """Chooses the kind for a device. On a CPU single operations are faster than what torch.compile makes of them.

    Args:
        device: Where the shards are.
    """
    return Compiled() if device.type == "cuda" and not missing_for(device) else EAGER


def missing_for(device: torch.device) -> str:
    """What this installation lacks to compile the passes on a device, as a sentence; empty where nothing is.

    Args:
        device: Where the shards are.
    """
    if device.type != "cuda":
        return ""
    if find_spec("triton") is None:
        return "Triton is not installed"
    unknown = set(_OPTIONS) - set(torch._inductor.list_options())
    return f"this torch has no {', '.join(sorted(unknown))} in its compiler" if unknown else ""


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True, options=_OPTIONS)


def _encoded(values: Tensor) -> tuple[Tensor, Tensor]:
    return FP4().encode_blocks(values, Scratch(values.device))


def _sum(parts: Sequence[tuple[Tensor, Tensor]], factors: Tensor) -> Tensor:
    total, *factors_of = factors.unbind()
    for (scales, codes), factor in zip(parts, factors_of, strict=True):
        decoded = factors.new_empty(len(scales), FP4.block)
        FP4().decode_blocks(scales, codes, decoded, Scratch(factors.device))
        total = total + decoded * factor
    return total.view(-1)


def _divided(total: Tensor, groups: int) -> Tensor:
    # By a number on the device: torch multiplies by the reciprocal of one on the host, if the device is an accelerator.
    return total.div_(total.new_full((), groups)) if groups else total
