"""What tests of passes in C share."""

import shutil
import time

import pytest
import torch
from torch import Tensor

from lightning_sdiloco.native import NativeLibrary

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler")

INF, NAN = float("inf"), float("nan")
BIG = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 1e-45, -1e-39, BIG, -BIG, NAN, INF, -INF]


def wait_for(library: NativeLibrary) -> None:
    """Waits until a library is there, or is known to be missing."""
    until = time.monotonic() + 60
    while library.get() is None and not library._is_missing:
        assert time.monotonic() < until, "the compiler takes long"
        time.sleep(0.02)


def vector(values: list[float], numel: int) -> Tensor:
    """Repeats values."""
    return torch.tensor(values).repeat(-(-numel // len(values)))[:numel].contiguous()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tells whether float32 tensors have the same bits."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
