"""Values and comparisons for tests of what has to give the same bits."""

import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")
BIG = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 1e-45, -1e-39, BIG, -BIG, NAN, INF, -INF]


def vector(values: list[float], numel: int) -> Tensor:
    """Repeats values."""
    return torch.tensor(values).repeat(-(-numel // len(values)))[:numel].contiguous()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tells whether float32 tensors have the same bits."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Tells whether tensors by name are the same."""
    return one.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in one.items())
