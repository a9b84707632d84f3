"""Encoding and the mean, the two long passes over a shard: run eagerly, or compiled into one kernel each."""

import logging
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import BlockCodec, Compression, divide
from lightning_sdiloco.compression.sample import same_bits, sample
from lightning_sdiloco.memory import new_vector

_log = logging.getLogger(__name__)

# Every operation rounds by itself, as it does when run eagerly: a fused multiply-add would give other bits.
_OPTIONS: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "emulate_precision_casts": True,  # this also tells Triton not to fuse products and sums
    "eager_numerics.disable_ftz": True,
    "eager_numerics.division_rounding": True,
}


class Kernels(ABC):
    """Encodes shards and takes their means. All kinds give the same bits.

    Attributes:
        name: The kind. Ranks compare it: kinds that differed by a bit would let the groups drift apart.
    """

    name: str

    @abstractmethod
    def encode(self, values: Tensor, compression: Compression) -> Tensor:
        """Encodes as `Compression.encode` does.

        Args:
            values: The outer gradient of a shard with the memory of the compression, float32 of shape ``(numel,)``.
            compression: How to encode it.

        Returns:
            The payload, a uint8 tensor of shape ``(compression.wire_bytes(numel),)``.
        """

    @abstractmethod
    def mean(
        self, payloads: Sequence[Tensor], factors: Mapping[int, float], compression: Compression, like: Tensor
    ) -> Tensor:
        """Returns the float32 mean of the groups that count, summed in their order, so that all get the same bits.

        It is taken over the senders of a value where the compression says so.

        Args:
            payloads: The payload of each group.
            factors: The groups that count, with the factor by which each is multiplied.
            compression: How the payloads are encoded.
            like: A tensor of the shape and on the device of the outer gradient.
        """


def weighted_mean(parts: Iterable[tuple[Tensor, float]], like: Tensor) -> Tensor:
    """Returns the mean of decoded outer gradients, each with its factor; with it, they may be written to.

    Args:
        parts: The outer gradients, in the order in which they are added up.
        like: A tensor of their shape and on their device.
    """
    total, count = torch.zeros_like(like), 0
    for values, factor in parts:
        # Two roundings, one after the other: whether there is a fused multiply-add depends on the processor.
        total += values if factor == 1 else values.mul_(factor)
        count += 1
    return divide(total, count)


def mean_over_senders(parts: Iterable[tuple[Tensor, Tensor, float]], like: Tensor) -> Tensor:
    """Returns the mean of decoded outer gradients, that of each value over those that have it; 0 where none has.

    Args:
        parts: The outer gradients, in the order in which they are added up, which may be written to; 1 where one has a
            value and 0 elsewhere; and its factor.
        like: A tensor of their shape and on their device.
    """
    total, senders = torch.zeros_like(like), torch.zeros_like(like)
    for values, places, factor in parts:
        total += values if factor == 1 else values.mul_(factor)
        senders += places
    return total.div_(senders.clamp_(min=1))


class EagerKernels(Kernels):
    """Runs one operation after another, a chunk at a time: the reference."""

    name = "eager"

    @override
    def encode(self, values: Tensor, compression: Compression) -> Tensor:
        return compression.encode(values)

    @override
    def mean(
        self, payloads: Sequence[Tensor], factors: Mapping[int, float], compression: Compression, like: Tensor
    ) -> Tensor:
        if not compression.counts_senders():
            mean = new_vector(like.numel(), like.device)
            compression.mean([(payloads[group], factor) for group, factor in factors.items()], mean)
            return mean
        values, places = torch.empty_like(like), torch.empty_like(like)

        def placed() -> Iterator[tuple[Tensor, Tensor, float]]:
            for group, factor in factors.items():
                compression.decode(payloads[group], values)
                compression.places(payloads[group], places)
                yield values, places, factor

        return mean_over_senders(placed(), like)


EAGER = EagerKernels()
"""The reference, with which compiled kernels must agree bit by bit."""


class CompiledKernels(Kernels):
    """Runs one compiled kernel for each pass, for every compression that has `Compression.blocks`."""

    name = "compiled"

    @override
    def encode(self, values: Tensor, compression: Compression) -> Tensor:
        blocks = compression.blocks()
        program = None if blocks is None else _PROGRAMS.encoder(blocks, values)
        if blocks is None or program is None:
            return EAGER.encode(values, compression)
        scales, codes = program(blocks.pad(values))
        # The codes of the padding are not sent.
        payload = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)))
        return payload[: compression.wire_bytes(values.numel())]

    @override
    def mean(
        self, payloads: Sequence[Tensor], factors: Mapping[int, float], compression: Compression, like: Tensor
    ) -> Tensor:
        blocks = compression.blocks() if factors else None
        program = None if blocks is None else _PROGRAMS.weighted_sum(blocks, len(payloads), like)
        if blocks is None or program is None:
            return EAGER.mean(payloads, factors, compression, like)
        # A group that does not count adds zeros, which change no bit, so that one program serves every mean.
        # The zero to start from comes first, as data: the compiler would leave out a zero that it knows, and thereby
        # change the sign of a zero.
        weights = like.new_tensor([0.0, *(factors.get(group, 0.0) for group in range(len(payloads)))])
        parts = [blocks.split(payload, like.numel()) for payload in payloads]
        return divide(program(parts, weights)[: like.numel()], len(factors))


class _Programs:
    """The compiled programs of this process.

    [Note: compiled programs prove themselves] torch.compile may fail on the operations of a compression, or give other
    bits than the eager operations, for instance where sums are taken in another order. So each program, before its
    first use, runs once on a sample vector, and so do the eager operations. If the program fails or one bit differs, a
    warning says why, and the compression runs eagerly.
    """

    def __init__(self) -> None:
        self.made: dict[Any, Callable[..., Any] | None] = {}

    def encoder(self, blocks: BlockCodec, like: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """Returns the program that encodes whole blocks, or None if they are encoded eagerly."""
        key = type(blocks), repr(blocks), like.device
        if key not in self.made:
            self.made[key] = _proven(blocks, "encode", blocks.encode_padded, blocks.pad(sample(like)))
        return self.made[key]

    def weighted_sum(self, blocks: BlockCodec, groups: int, like: Tensor) -> Callable[..., Tensor] | None:
        """Returns the program that decodes and sums the parts of all groups, or None if that runs eagerly."""
        key = type(blocks), repr(blocks), like.device, groups
        if key not in self.made:

            def weighted_sum(parts: Sequence[tuple[Tensor, Tensor]], weights: Tensor) -> Tensor:
                return _weighted_sum(blocks, parts, weights)

            parts = [blocks.encode_padded(blocks.pad(sample(like))) for _ in range(groups)]
            weights = torch.linspace(0, 1.3, groups + 1, device=like.device)
            self.made[key] = _proven(blocks, "decode", weighted_sum, parts, weights)
        return self.made[key]


_PROGRAMS = _Programs()


def kernels_for(device: torch.device) -> Kernels:
    """Chooses the kernels for a device. On a CPU, eager operations are faster than what torch.compile makes of them.

    Args:
        device: The device of the shards.
    """
    return CompiledKernels() if device.type == "cuda" and not missing_for(device) else EAGER


def missing_for(device: torch.device) -> str:
    """Returns, as a sentence, what this installation lacks to compile kernels for a device; empty if nothing.

    Args:
        device: The device of the shards.
    """
    if device.type != "cuda":
        return ""
    if find_spec("triton") is None:
        return "Triton is not installed"
    unknown = set(_OPTIONS) - set(torch._inductor.list_options())
    return f"this torch has no {', '.join(sorted(unknown))} in its compiler" if unknown else ""


def _proven(blocks: BlockCodec, what: str, function: Callable[..., Any], *sample: Any) -> Callable[..., Any] | None:
    """Compiles a function and returns it if it gives the same bits as before; otherwise warns and returns None."""
    program = torch.compile(_with_own_code(function), fullgraph=True, dynamic=True, options=_OPTIONS)
    try:
        reason = "" if same_bits(program(*sample), function(*sample)) else "its compiled form gives other bits"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"torch.compile cannot translate it ({type(error).__name__}: {lines[0]})"
    if not reason:
        return program
    _log.warning(
        "%r runs eagerly where it %ss, which gives the same values and takes longer: %s. To have it compiled, write its"
        " %s_blocks with torch operations that can be traced and that round one after the other.",
        blocks,
        what,
        reason,
        what,
    )
    return None


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a code object of its own: torch.compile keeps at most eight programs for each."""

    def call(*args: Any) -> Any:
        return function(*args)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def _weighted_sum(blocks: BlockCodec, parts: Sequence[tuple[Tensor, Tensor]], weights: Tensor) -> Tensor:
    total, *factors = weights.unbind()
    for (scales, codes), factor in zip(parts, factors, strict=True):
        total = total + blocks.decode_padded(scales, codes) * factor
    return total.view(-1)
