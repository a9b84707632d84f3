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


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tells whether tensors have the same dtype, shape and bits, those of zeros and NaN among
    them.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def fingerprints(values: dict[str, Tensor]) -> dict[str, str]:
    """A few letters for each named tensor, which depend on all of its bits."""
    return {name: f"{t.dtype} {tuple(t.shape)} {_hash(t)}" for name, t in values.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy().tobytes()).hexdigest()[:16]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Tells whether tensors by name are the same."""
    if left.keys() != right.keys():
        return False
    return all(torch.equal(values, right[name]) for name, values in left.items())
