"""Averaging at the hub, which combines the payloads of all sites into one payload for all sites to
fetch.

This module needs only numpy, which Lightning installs, so a hub can run without torch. The hub
stores the rounding error of each mean and adds it to the fragment's next mean.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_sdiloco.algorithm.weighting import by_training
from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.messages import Contribution, Record
from lightning_sdiloco.federation.untrained import Sizes, packed, unpacked

Vector = npt.NDArray[np.float32]
Numbers = TypeVar("Numbers", bound=npt.NDArray[Any])

# The number types that may be NaN, except those that numpy does not support.
_NUMBERS = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}

# The format of fp4; see `compression/fp4.py` for the reasons behind it.
_BLOCK = 128
_EXPONENT = 23
_LEAST_TOP = 0x0400
_GREATEST_TOP = 0x7F7F
_MAGNITUDES = (0.0, 2.0**-6, 2.0**-5, 2.0**-4, 2.0**-3, 2.0**-2, 2.0**-1, 2.0**0)
_LEVELS = np.array([sign * level for sign in (1.0, -1.0) for level in _MAGNITUDES], "f4")


def has_sizes(contribution: Contribution, sizes: Sizes, code: str) -> bool:
    """Returns whether a site's payload sizes match the shards of its ranks.

    The first rank also sends all changed tensors of the untrained state.
    """
    first_size, *other_sizes = [payload.size for payload in contribution.payloads]
    shard_size = _shard_bytes(contribution, sizes.numel, code)
    sizes = sizes.sent(contribution.exact)
    if not sizes.least <= first_size - shard_size <= sizes.most:
        return False
    return all(size == shard_size for size in other_sizes)


def _shard_bytes(contribution: Contribution, numel: int, code: str) -> int:
    length = _shard_length(contribution, numel)
    if contribution.exact or code == "fp32":
        return 4 * length
    return 2 * _blocks(length) + -(-length // 2)


def _shard_length(contribution: Contribution, numel: int) -> int:
    return -(-numel // len(contribution.payloads))


def _blocks(numel: int) -> int:
    return -(-numel // _BLOCK)


def decoded(payload: Bytes, numel: int, code: str) -> Vector:
    if code == "fp32":
        return np.frombuffer(payload, "<f4", numel)
    blocks = _blocks(numel)
    tops = (np.frombuffer(payload, "<u2", blocks).astype(np.uint32) << 16).view(np.float32)
    packed = np.frombuffer(payload, np.uint8, -(-numel // 2), offset=2 * blocks)
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:numel]
    values: Vector = _LEVELS[codes] * np.repeat(tops, _BLOCK)[:numel]
    return values


def encoded(values: Vector, code: str) -> bytes:
    if code == "fp32":
        return values.astype("<f4").tobytes()
    padded = np.zeros(_blocks(len(values)) * _BLOCK, np.float32)
    padded[: len(values)] = values
    bits = padded.view(np.int32).reshape(-1, _BLOCK)
    magnitude = bits & 0x7FFFFFFF
    tops = np.clip(magnitude.max(axis=1) >> 16, _LEAST_TOP, _GREATEST_TOP)
    top_values = (tops << 16).view(np.float32)
    thresholds = (top_values * np.float32(0.75)).view(np.int32) - (7 << _EXPONENT)
    levels = np.maximum((magnitude - thresholds[:, None]) >> _EXPONENT, 0)
    signs = (bits >> 28) & 8
    codes = (levels | signs).astype(np.uint8).reshape(-1)
    # One byte stores two codes.
    codes = codes[: len(values) + len(values) % 2]
    return tops.astype("<u2").tobytes() + (codes[0::2] | codes[1::2] << 4).tobytes()


def averaged(
    record: Record,
    get: Callable[[str], Bytes],
    sizes: Sizes,
    code: str,
    residual: Bytes | None,
) -> tuple[bytes, bytes | None]:
    """Returns the payload with the mean of a record and, if the code rounds, the new residual.

    Args:
        record: The record, whose counted contributions are added in order.
        get: A function that returns the payload for a key.
        sizes: The sizes of the fragment. In the first payload of each site, the untrained state
            follows the values.
        code: The code of the outer gradients and their mean, ``"fp4"`` or ``"fp32"``.
        residual: The residual of the previous mean as float32 bytes.
    """
    weights = [1 if record.final else contribution.weight for contribution in record.counted]
    factors = by_training(dict(enumerate(weights)))
    mean = np.zeros(sizes.numel, np.float32)
    changed_by_site = list[dict[int, bytes]]()
    for index, contribution in enumerate(record.counted):
        values, changed = _sent(contribution, get, sizes, code)
        mean += np.float32(factors[index]) * values
        if contribution.site not in record.without_buffers:
            changed_by_site.append(changed)
    mean /= np.float32(len(weights))
    if record.final:
        # The last mean is exact, and no other mean follows it.
        code = "fp32"
    elif residual is not None:
        mean += np.frombuffer(residual, np.float32)
    payload = encoded(mean, code)
    new_residual = None
    if code != "fp32":
        new_residual = (mean - decoded(payload, sizes.numel, code)).tobytes()
    sizes = sizes.sent(record.final)
    return payload + packed(means_of(changed_by_site, sizes), sizes), new_residual


def means_of(changed_by_site: Sequence[Mapping[int, bytes]], sizes: Sizes) -> dict[int, bytes]:
    """Averages each tensor of the untrained state that at least one site has changed."""
    means = dict[int, bytes]()
    for number, dtype in enumerate(sizes.dtypes):
        sent = [changed[number] for changed in changed_by_site if number in changed]
        if sent and dtype:
            rows = [np.frombuffer(values, dtype) for values in sent]
            means[number] = elementwise_mean(rows).astype(dtype).tobytes()
            continue
        finite = [values for values in sent if not has_nan(values, sizes.numbers[number])]
        # If every site has a NaN, all sites keep their values.
        if finite:
            means[number] = finite[0]
    return means


def has_nan(values: bytes, number: str) -> bool:
    """Returns whether the bytes of a tensor contain a NaN. The dtype is given by its torch name.

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


def elementwise_mean(rows: Sequence[Numbers]) -> Numbers:
    """Returns the plain mean over the sites. A value that is identical at all sites is returned
    unchanged. A site is left out if any of its non-finite values differs between sites.

    Examples:
        >>> rows = [np.array([np.inf, value], "f4") for value in (1.0, 3.0)]
        >>> elementwise_mean(rows).tolist()
        [inf, 2.0]
    """
    stacked = np.stack(rows)
    is_alike = (stacked == stacked[0]).all(axis=0)
    is_left_out = (~np.isfinite(stacked) & ~is_alike).any(axis=1)
    if is_left_out.all():
        # If no value is finite, the sites keep their own.
        return stacked[0]
    mean = stacked[~is_left_out].mean(axis=0, dtype=stacked.dtype)
    return np.where(is_alike, stacked[0], mean)


def _sent(
    contribution: Contribution, get: Callable[[str], Bytes], sizes: Sizes, code: str
) -> tuple[Vector, dict[int, bytes]]:
    """Returns the concatenated values from a site's ranks and the site's changed untrained
    state.
    """
    if contribution.exact:
        code = "fp32"
    payloads = [get(payload.key) for payload in contribution.payloads]
    length = _shard_length(contribution, sizes.numel)
    shards = [decoded(payload, length, code) for payload in payloads]
    end = _shard_bytes(contribution, sizes.numel, code)
    untrained = bytes(memoryview(payloads[0])[end:])
    changed = unpacked(untrained, sizes.sent(contribution.exact))
    return np.concatenate(shards)[: sizes.numel], changed
