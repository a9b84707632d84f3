"""FP4, with four bits per value: E3M0 codes (a sign and three exponent bits) and a scale per block.

A payload of ``numel`` values consists of ``ceil(numel / 128)`` 16-bit tops, followed by
``ceil(numel / 2)`` bytes of codes. ``docs/decisions/fp4.md`` describes the format byte by byte and
explains the choices.

[Note: in one pass] On a CPU, ``fp4.c`` does the same work in one pass and computes the mean in an
eighth of the time. ``hatch_build.py`` compiles this file at build time if a C compiler is
available. On a GPU, ``fp4_triton.py`` is used if Triton is installed. The torch operations are the
reference and need neither C nor Triton. Ranks may use different implementations, because a pass is
used only if its results on a sample are bit-identical to the reference.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import Traits
from lightning_sdiloco.compression.blockwise import (
    Blockwise,
    Leveled,
    from_bfloat16_bits,
    magnitude_bits,
    sign_bits,
    table,
)
from lightning_sdiloco.memory import new_vector

_log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libfp4.so")

BLOCK = 128
"""The number of values that share a scale."""

_EXPONENT = 23  # the position of the exponent in a float32

# With the smallest top, the lowest level and the threshold below it are not subnormal. A device may
# flush subnormal numbers to zero. The greatest top is the largest finite bfloat16, which is also
# used for blocks that are not finite.
_LEAST_TOP = 0x0400
_GREATEST_TOP = 0x7F7F


@dataclass(frozen=True)
class FP4(Leveled):
    """Four bits per value, with 16 bits for each block of 128 values (4.125 bits per value).

    The levels of a block are 0 and ``top * 2**(code - 7)`` for codes 1 to 7, with a sign. ``top``
    is the largest magnitude of the block, truncated to bfloat16. A value is rounded to the nearest
    level, or to zero if it is below three quarters of the lowest level. Therefore, the error is at
    most a third of the value, but below ``top * 3/256``, the error is the value itself.

    Streaming DiLoCo (arXiv 2501.18512, section 2.4) sends outer gradients as E3M0 and sums them in
    float32, but does not specify the scale. The scale used here was chosen by measurement; see
    ``benchmarks/compression.py``.

    Examples:
        >>> import torch
        >>> fp4, values = FP4(), torch.tensor([1.0, -0.5, 0.3, 0.0])
        >>> payload, decoded = fp4.encode(values), torch.empty(4)
        >>> fp4.decode(payload, decoded)
        >>> payload.numel(), decoded.tolist()
        (4, [1.0, -0.5, 0.25, 0.0])
    """

    block: ClassVar[int] = BLOCK
    bits: ClassVar[int] = 4
    scale: ClassVar[torch.dtype] = torch.int16
    levels: ClassVar[tuple[float, ...]] = (
        *(0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0),
        *(-0.0, -1 / 64, -1 / 32, -1 / 16, -1 / 8, -1 / 4, -1 / 2, -1.0),
    )

    @property
    @override
    def traits(self) -> Traits:
        return Traits(hub_code="fp4")

    @override
    def encode(self, values: Tensor) -> Tensor:
        passes = _passes_for(values)
        if passes is None:
            return super().encode(values)
        assert values.dtype == torch.float32, "an outer gradient is float32"
        payload = new_vector(_size(values.numel()), values.device, torch.uint8)
        passes.encode(values, payload)
        return payload

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        passes = _passes_for(payload, out)
        if passes is None:
            super().decode(payload, out)
        else:
            _check([payload], out)
            passes.decode(payload, out)

    @override
    def mean(self, sent: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
        payloads = [payload for payload, _ in sent]
        passes = _passes_for(out, *payloads)
        if passes is None or not sent:
            super().mean(sent, out)
        else:
            _check(payloads, out)
            passes.mean(sent, out)

    @override
    def encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole blocks. The tops are the bits of finite bfloat16 numbers."""
        magnitude = magnitude_bits(values)
        tops = (magnitude.amax(1) >> 16).clamp_(_LEAST_TOP, _GREATEST_TOP)
        # The threshold between two neighbouring levels is 1.5 times the lower level. Therefore, all
        # seven thresholds have the mantissa of 0.75 * top, and a single subtraction of float32 bits
        # compares a value with all thresholds. Both products are exact.
        thresholds = (from_bfloat16_bits(tops) * 0.75).view(torch.int32) - (7 << _EXPONENT)
        levels = magnitude.sub_(thresholds[:, None]).bitwise_right_shift_(_EXPONENT).clamp_min_(0)
        return tops.to(torch.int16), levels.bitwise_or_(sign_bits(values, 3))

    @override
    def steps(self, scales: Tensor) -> Tensor:
        """Returns the tops, which are the steps."""
        return from_bfloat16_bits(scales)


def _size(numel: int) -> int:
    return 2 * -(-numel // BLOCK) + -(-numel // 2)


def _check(payloads: Sequence[Tensor], out: Tensor) -> None:
    assert out.dtype == torch.float32, "bytes are decoded to float32"
    size = _size(out.numel())
    for payload in payloads:
        assert payload.numel() == size, "the payload belongs to a vector of another size"
        assert payload.dtype == torch.uint8, "a payload is bytes"


class Passes(NamedTuple):
    """Single-pass functions for encoding, decoding and averaging on one type of device. Each
    function writes to its last argument.
    """

    encode: Callable[[Tensor, Tensor], None]
    decode: Callable[[Tensor, Tensor], None]
    mean: Callable[[Sequence[tuple[Tensor, float]], Tensor], None]


def _passes_for(*tensors: Tensor) -> Passes | None:
    device = tensors[0].device
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.device != device or not tensor.is_contiguous():
            return None
    return passes_on(device.type)


@cache
def passes_on(device: str) -> Passes | None:
    """Returns the passes for a type of device, or None; see [Note: in one pass]."""
    makers = {"cpu": ("fp4.c", _in_c), "cuda": ("fp4_triton.py", _in_triton)}
    if device not in makers:
        return None
    name, make = makers[device]
    try:
        passes = make()
        if _is_proven(passes, torch.device(device)):
            return passes
        reason = "its results are not bit-identical"
    except Exception as error:
        # Triton and the compilers that it calls raise many kinds of errors.
        reason = f"{type(error).__name__}: {error}"
    _log.info("%s is not used: %s. torch does the same work, but more slowly.", name, reason)
    return None


def _in_triton() -> Passes:
    from lightning_sdiloco.compression.fp4_triton import decode, encode, mean

    return Passes(encode, decode, mean)


def _in_c() -> Passes:
    pointer = ctypes.c_void_p
    size = ctypes.c_int64
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise OSError(
            f"the package was built without it or for a different machine ({error})"
        ) from None
    library.fp4_encode.argtypes = (pointer, size, pointer)
    library.fp4_decode.argtypes = (pointer, size, pointer, pointer)
    library.fp4_mean.argtypes = (pointer, pointer, size, size, pointer, pointer)
    # The passes keep a reference to this table, because the C code has only a pointer.
    levels = table(FP4.levels, torch.device("cpu"))
    return Passes(
        partial(_encode, library),
        partial(_decode, library, levels),
        partial(_mean, library, levels),
    )


def _encode(library: ctypes.CDLL, values: Tensor, payload: Tensor) -> None:
    library.fp4_encode(values.data_ptr(), values.numel(), payload.data_ptr())


def _decode(library: ctypes.CDLL, levels: Tensor, payload: Tensor, out: Tensor) -> None:
    library.fp4_decode(payload.data_ptr(), out.numel(), levels.data_ptr(), out.data_ptr())


def _mean(
    library: ctypes.CDLL, levels: Tensor, sent: Sequence[tuple[Tensor, float]], out: Tensor
) -> None:
    payloads = (ctypes.c_void_p * len(sent))(*[payload.data_ptr() for payload, _ in sent])
    factors = (ctypes.c_float * len(sent))(*[factor for _, factor in sent])
    library.fp4_mean(payloads, factors, len(sent), out.numel(), levels.data_ptr(), out.data_ptr())


class _Eager(FP4):
    """The reference implementation of FP4, which uses only torch operations."""

    encode = Blockwise.encode
    decode = Blockwise.decode
    mean = Blockwise.mean


def _is_proven(passes: Passes, device: torch.device) -> bool:
    """Returns whether the passes match the torch operations bit for bit on a sample."""
    values = _sample().to(device)
    eager = _Eager()
    payload = torch.empty(_size(len(values)), device=device, dtype=torch.uint8)
    passes.encode(values, payload)
    sent = [(payload, 1.0), (eager.encode(values.flip(0)), 0.3), (payload, 1.7)]
    # Both tensors contain a decoded payload and a mean.
    results = torch.empty(2, len(values), device=device, dtype=torch.float32)
    expected = torch.empty_like(results)
    passes.decode(payload, results[0])
    eager.decode(payload, expected[0])
    passes.mean(sent, results[1])
    eager.mean(sent, expected[1])
    if not torch.equal(payload, eager.encode(values)):
        return False
    return torch.equal(results.view(torch.int32), expected.view(torch.int32))


def _sample() -> Tensor:
    """Returns a sample of values of many magnitudes. The sample contains zeros of both signs, whole
    blocks of zeros, blocks of values at both ends of the range, and a partial last block.
    """
    generator = torch.Generator().manual_seed(0)
    normal, exponents = torch.randn(
        2, 20_001, generator=generator, device="cpu", dtype=torch.float32
    )
    values = (normal * exponents.mul(8).exp()).nan_to_num(0.0)
    values[::17] = 0.0
    values[5::19] = -0.0
    values[1024:1536] = 0.0
    values[2048:2560] *= 1e-38
    values[3072:3584] = normal[3072:3584].clamp(-3, 3) * 1e38
    return values
