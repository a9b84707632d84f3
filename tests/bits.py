"""Values and comparisons for tests of what has to give the same bits."""

import hashlib

import torch
from torch import Tensor

INF = float("inf")
NAN = float("nan")
BIG = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 1e-45, -1e-39, BIG, -BIG, NAN, INF, -INF]


def vector(values: list[float], numel: int) -> Tensor:
    """Repeats values."""
    return torch.tensor(values).repeat(-(-numel // len(values)))[:numel].contiguous()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tells whether tensors have the same dtype, shape and bits, those of zeros and NaN among
    them.
    """
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        _bytes(one), _bytes(other)
    )


def fingerprints(values: dict[str, Tensor]) -> dict[str, str]:
    """What tells the bits of named tensors, in a few letters each."""
    return {name: f"{own.dtype} {tuple(own.shape)} {_hash(own)}" for name, own in values.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy().tobytes()).hexdigest()[:16]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Tells whether tensors by name are the same."""
    return one.keys() == other.keys() and all(
        torch.equal(values, other[name]) for name, values in one.items()
    )
