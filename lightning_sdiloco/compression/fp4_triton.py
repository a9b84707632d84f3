"""FP4 on a GPU in one pass over the values, bit-identical to the torch operations of `fp4`.

Only `fp4` imports this module, when it first uses a GPU. GPU builds of torch install Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, index, unused-ignore"

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The number of blocks of 128 values per program, and the number of warps. This was the best of
# fifteen pairs on an H200, by a small margin.
_ROWS = 8
_WARPS = 2

# The largest number of payloads that are summed in one pass. A kernel is compiled for each number.
_AT_ONCE = 8


@triton.jit
def _encode(values, payload, numel, blocks, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    bits = tl.load(values + place, mask=place < numel, other=0)
    magnitude = bits & 0x7FFFFFFF
    top = tl.minimum(tl.maximum(tl.max(magnitude, axis=1) >> 16, 0x0400), 0x7F7F)
    # A single subtraction compares with all seven thresholds, because they share a mantissa.
    threshold = ((top << 16).to(tl.float32, bitcast=True) * 0.75).to(tl.int32, bitcast=True) - (
        7 << 23
    )
    code = tl.maximum((magnitude - threshold[:, None]) >> 23, 0) | ((bits >> 31) & 8)
    low, high = tl.split(tl.reshape(code, (rows, 64, 2)))
    pair = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(payload + 2 * blocks + pair, (low | (high << 4)).to(tl.uint8), mask=2 * pair < numel)
    tl.store(payload.to(tl.pointer_type(tl.int16)) + row, top.to(tl.int16), mask=row < blocks)


@triton.jit
def _level(code, top):
    # A code is an exponent, where 7 means the top and 0 means zero. The products are exact.
    magnitude = tl.where((code & 7) == 0, 0, ((code & 7) + 120) << 23) | ((code & 8) << 28)
    return magnitude.to(tl.float32, bitcast=True) * top


@triton.jit
def _decoded(payload, row, numel, blocks):
    pair = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    packed = tl.load(payload + 2 * blocks + pair, mask=2 * pair < numel, other=0).to(tl.int32)
    top = tl.load(payload.to(tl.pointer_type(tl.int16)) + row, mask=row < blocks, other=0).to(
        tl.int32
    )
    top = (top << 16).to(tl.float32, bitcast=True)[:, None]
    return tl.reshape(
        tl.join(_level(packed & 15, top), _level(packed >> 4, top)), (row.shape[0], 128)
    )


@triton.jit
def _decode(payload, out, numel, blocks, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + place, _decoded(payload, row, numel, blocks), mask=place < numel)


@triton.jit
def _mean(
    payloads,
    factors,
    out,
    numel,
    blocks,
    begins: tl.constexpr,
    count: tl.constexpr,
    rows: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    total = (
        tl.zeros((rows, 128), tl.float32)
        if begins
        else tl.load(out + place, mask=place < numel, other=0)
    )
    for group in tl.static_range(len(payloads)):
        total += _decoded(payloads[group], row, numel, blocks) * factors[group]
    if count & (count - 1):
        total = tl.div_rn(total, tl.zeros((rows, 128), tl.float32) + count)
    elif count > 1:  # the same for a power of two, whose reciprocal is exact
        total *= 1 / count
    tl.store(out + place, total, mask=place < numel)


def encode(values: Tensor, payload: Tensor) -> None:
    _run(_encode, values, values.view(torch.int32), payload)


def decode(payload: Tensor, out: Tensor) -> None:
    _run(_decode, out, _even(payload), out)


def mean(sent: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
    for first in range(0, len(sent), _AT_ONCE):
        some = sent[first : first + _AT_ONCE]
        last = first + _AT_ONCE >= len(sent)
        payloads = tuple([_even(payload) for payload, _ in some])
        factors = tuple([float(factor) for _, factor in some])
        _run(_mean, out, payloads, factors, out, begins=not first, count=len(sent) if last else 0)


def _even(payload: Tensor) -> Tensor:
    """Copies a payload if it starts at an odd address, where tops cannot be read."""
    return payload.clone() if payload.data_ptr() % 2 else payload


def _run(kernel: Callable[..., Any], values: Tensor, *arguments: Any, **constants: int) -> None:
    numel = values.numel()
    blocks = -(-numel // 128)
    if not blocks:
        return
    grid = (-(-blocks // _ROWS),)
    with torch.get_device_module(values.device).device(values.device):
        # Products and sums are rounded separately.
        kernel[grid](
            *arguments,
            numel,
            blocks,
            **constants,
            rows=_ROWS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
