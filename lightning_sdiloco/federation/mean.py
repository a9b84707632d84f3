"""The mean at the hub: what sites have sent becomes one payload, which all of them fetch.

Numpy does it alone, which comes with Lightning: a hub does without torch. What rounding leaves out of a mean is
remembered, and added to the next one of the fragment.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.messages import Contribution, Record

Vector = npt.NDArray[np.float32]

# The format of fp4; `compression/fp4.py` says why it is as it is.
_BLOCK, _EXPONENT = 128, 23
_LEAST_TOP, _GREATEST_TOP = 0x0400, 0x7F7F
_LEVELS = np.array(
    [sign * level for sign in (1.0, -1.0) for level in (0.0, *(2.0**-k for k in range(6, -1, -1)))], "f4"
)


def sizes_of(own: Contribution, numel: int, buffers: int, code: str) -> list[int]:
    """Returns how many bytes each rank of a site sends: of its shard, and the first one of the buffers too."""
    ranks = len(own.payloads)
    length = -(-numel // ranks)
    size = 4 * length if own.exact or code == "fp32" else 2 * -(-length // _BLOCK) + -(-length // 2)
    return [size + 4 * buffers, *[size] * (ranks - 1)]


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
    thresholds = ((tops << 16).view(np.float32) * np.float32(0.75)).view(np.int32) - (7 << _EXPONENT)
    passed = np.maximum((magnitude - thresholds[:, None]) >> _EXPONENT, 0)
    codes = (passed | (bits >> 28) & 8).astype(np.uint8).reshape(-1)[: len(values) + len(values) % 2]
    return tops.astype("<u2").tobytes() + (codes[0::2] | codes[1::2] << 4).tobytes()


def averaged(
    record: Record,
    get: Callable[[str], Bytes],
    numel: int,
    buffers: int,
    code: str,
    residual: Bytes | None,
) -> tuple[bytes, bytes | None]:
    """Returns the payload with the mean of what a record counts, and what rounding has left out of it, if it rounds.

    Args:
        record: Whose contributions count, and in which order they are added up.
        get: Returns a payload.
        numel: Values of the fragment; its buffers follow the values of each site's first payload.
        buffers: Values of its buffers.
        code: How outer gradients are encoded, and their mean: ``"fp4"`` or ``"fp32"``.
        residual: What was left out of the mean before.
    """
    weights = [1 if record.final else own.weight for own in record.counted]
    mean, tails = np.zeros(numel, np.float32), list[Vector]()
    for own, weight in zip(record.counted, weights, strict=True):
        values, tail = _sent(own, get, numel, buffers, code)
        mean += np.float32(len(weights) * weight / sum(weights)) * values
        tails.append(tail)
    mean /= np.float32(len(weights))
    # A last mean is exact, and nothing comes after it.
    code = "fp32" if record.final else code
    if residual is not None and not record.final:
        mean += np.frombuffer(residual, np.float32)
    payload = encoded(mean, code)
    # Where none is finite, the sites keep their own.
    finite = [tail for tail in tails if np.isfinite(tail).all()] or tails[:1]
    is_same = all(np.array_equal(tail, finite[0]) for tail in finite)
    tail = finite[0] if is_same else np.mean(finite, axis=0, dtype=np.float32)
    rest = None if code == "fp32" else (mean - decoded(payload, numel, code)).tobytes()
    return payload + tail.astype("<f4").tobytes(), rest


def _sent(own: Contribution, get: Callable[[str], Bytes], numel: int, buffers: int, code: str) -> tuple[Vector, Vector]:
    """Returns what a site has sent, from a shard of each of its ranks, and its buffers."""
    code, length = "fp32" if own.exact else code, -(-numel // len(own.payloads))
    payloads = [get(payload.key) for payload in own.payloads]
    first = memoryview(payloads[0])
    tail = np.frombuffer(first[len(first) - 4 * buffers :], "<f4")
    return np.concatenate([decoded(payload, length, code) for payload in payloads])[:numel], tail
