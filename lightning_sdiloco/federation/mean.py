"""The mean at the hub: what sites have sent becomes one payload, which all of them fetch.

Numpy does it alone, which comes with Lightning: a hub does without torch. What rounding leaves out
of a mean is remembered, and added to the next one of the fragment.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.messages import Contribution, Record
from lightning_sdiloco.federation.untrained import Sizes, packed, unpacked

Vector = npt.NDArray[np.float32]

# The numbers that may be NaN, but for those that numpy does not know.
_NUMBERS = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}

# The format of fp4; `compression/fp4.py` says why it is as it is.
_BLOCK = 128
_EXPONENT = 23
_LEAST_TOP = 0x0400
_GREATEST_TOP = 0x7F7F
_LEVELS = np.array(
    [sign * level for sign in (1.0, -1.0) for level in (0.0, *(2.0**-k for k in range(6, -1, -1)))],
    "f4",
)


def has_sizes(own: Contribution, sizes: Sizes, code: str) -> bool:
    """Returns whether the payloads of a site have the sizes that the shards of its ranks have.

    The first rank also sends the untrained state, of which it leaves out what it has not changed.
    """
    first, *others = [payload.size for payload in own.payloads]
    size = _shard_bytes(own, sizes.numel, code)
    sizes = sizes.sent(own.exact)
    return sizes.least <= first - size <= sizes.most and all(other == size for other in others)


def _shard_bytes(own: Contribution, numel: int, code: str) -> int:
    length = -(-numel // len(own.payloads))
    if own.exact or code == "fp32":
        return 4 * length
    return 2 * -(-length // _BLOCK) + -(-length // 2)


def decoded(payload: Bytes, numel: int, code: str) -> Vector:
    if code == "fp32":
        return np.frombuffer(payload, "<f4", numel)
    blocks = -(-numel // _BLOCK)
    tops = (np.frombuffer(payload, "<u2", blocks).astype(np.uint32) << 16).view(np.float32)
    packed = np.frombuffer(payload, np.uint8, -(-numel // 2), offset=2 * blocks)
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:numel]
    values: Vector = _LEVELS[codes] * np.repeat(tops, _BLOCK)[:numel]
    return values


def encoded(values: Vector, code: str) -> bytes:
    if code == "fp32":
        return values.astype("<f4").tobytes()
    padded = np.zeros(-(-len(values) // _BLOCK) * _BLOCK, np.float32)
    padded[: len(values)] = values
    bits = padded.view(np.int32).reshape(-1, _BLOCK)
    magnitude = bits & 0x7FFFFFFF
    tops = np.clip(magnitude.max(axis=1) >> 16, _LEAST_TOP, _GREATEST_TOP)
    thresholds = ((tops << 16).view(np.float32) * np.float32(0.75)).view(np.int32) - (
        7 << _EXPONENT
    )
    passed = np.maximum((magnitude - thresholds[:, None]) >> _EXPONENT, 0)
    codes = (
        (passed | (bits >> 28) & 8).astype(np.uint8).reshape(-1)[: len(values) + len(values) % 2]
    )
    return tops.astype("<u2").tobytes() + (codes[0::2] | codes[1::2] << 4).tobytes()


def averaged(
    record: Record,
    get: Callable[[str], Bytes],
    sizes: Sizes,
    code: str,
    residual: Bytes | None,
) -> tuple[bytes, bytes | None]:
    """Returns the payload with the mean of what a record counts, and what rounding has left out of
    it, if it rounds.

    Args:
        record: Whose contributions count, and in which order they are added up.
        get: Returns a payload.
        sizes: Those of the fragment; its untrained state follows the values of each site's first
            payload.
        code: How outer gradients are encoded, and their mean: ``"fp4"`` or ``"fp32"``.
        residual: What was left out of the mean before.
    """
    weights = [1 if record.final else own.weight for own in record.counted]
    mean = np.zeros(sizes.numel, np.float32)
    untrained = list[dict[int, bytes]]()
    for own, weight in zip(record.counted, weights, strict=True):
        values, changed = _sent(own, get, sizes, code)
        mean += np.float32(len(weights) * weight / sum(weights)) * values
        untrained.append(changed)
    mean /= np.float32(len(weights))
    # A last mean is exact, and nothing comes after it.
    code = "fp32" if record.final else code
    if residual is not None and not record.final:
        mean += np.frombuffer(residual, np.float32)
    payload = encoded(mean, code)
    remainder = None if code == "fp32" else (mean - decoded(payload, sizes.numel, code)).tobytes()
    sizes = sizes.sent(record.final)
    return payload + packed(means_of(untrained, sizes), sizes), remainder


def means_of(sites: Sequence[Mapping[int, bytes]], sizes: Sizes) -> dict[int, bytes]:
    """Returns what becomes of each tensor of the untrained state that some site has changed."""
    means = dict[int, bytes]()
    for number, dtype in enumerate(sizes.dtypes):
        sent = [changed[number] for changed in sites if number in changed]
        if sent and dtype:
            rows = [np.frombuffer(values, dtype) for values in sent]
            means[number] = elementwise_mean(rows).astype(dtype).tobytes()
        elif whole := [values for values in sent if not has_nan(values, sizes.numbers[number])]:
            # Where no site is whole, all keep what they have.
            means[number] = whole[0]
    return means


def has_nan(values: bytes, number: str) -> bool:
    """Returns whether the bytes of a tensor hold a NaN, given how torch calls its dtype.

    Examples:
        >>> bfloat16 = bytes.fromhex("803f c07f")  # 1 and NaN
        >>> has_nan(bfloat16, "bfloat16"), has_nan(bfloat16[:2], "bfloat16"), has_nan(bfloat16, "int16")
        (True, False, False)
    """
    if number == "bfloat16":
        words = np.frombuffer(values, "<u2").astype(np.uint32) << 16
        return bool(np.isnan(words.view(np.float32)).any())
    dtype = _NUMBERS.get(number)
    return dtype is not None and bool(np.isnan(np.frombuffer(values, dtype)).any())


def elementwise_mean(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Returns the plain mean over the sites. What all hold alike keeps its bits; a site that is not
    finite is left out.

    Examples:
        >>> rows = [np.array([np.inf, value], "f4") for value in (1.0, 3.0)]
        >>> elementwise_mean(rows).tolist()
        [inf, 2.0]
    """
    stacked = np.stack(rows)
    is_alike = (stacked == stacked[0]).all(axis=0)
    left_out = (~np.isfinite(stacked) & ~is_alike).any(axis=1)
    if left_out.all():
        # Where none is finite, the sites keep their own.
        return stacked[0]
    mean = stacked[~left_out].mean(axis=0, dtype=stacked.dtype)
    return np.where(is_alike, stacked[0], mean)


def _sent(
    own: Contribution, get: Callable[[str], Bytes], sizes: Sizes, code: str
) -> tuple[Vector, dict[int, bytes]]:
    """Returns what a site has sent, from a shard of each of its ranks, and what it has changed of
    untrained state.
    """
    code = "fp32" if own.exact else code
    length = -(-sizes.numel // len(own.payloads))
    payloads = [get(payload.key) for payload in own.payloads]
    untrained = bytes(memoryview(payloads[0])[_shard_bytes(own, sizes.numel, code) :])
    values = np.concatenate([decoded(payload, length, code) for payload in payloads])[: sizes.numel]
    return values, unpacked(untrained, sizes.sent(own.exact))
