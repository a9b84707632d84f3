"""The direction of matrices, against singular value decompositions, and bit for bit in every way
to compute it.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdiloco.algorithm.direction import SMALLEST_SHARE, equalised
from tests.bits import same_bits

RESIDUAL = 2e-3
"""The error that the polynomials leave: 1e-3 for each singular value, and as much for their
mean."""


def with_values(values: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    """Returns a matrix of float32 with these singular values, in random directions."""
    generator = torch.Generator().manual_seed(seed)

    def directions(length: int) -> Tensor:
        noise = torch.randn(length, len(values), generator=generator, dtype=torch.float64)
        return torch.linalg.qr(noise)[0]

    left = directions(rows)
    right = directions(columns)
    return ((left * values) @ right.mT).to(torch.float32)


def by_decomposition(matrix: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(matrix.to(torch.float64), full_matrices=False)
    return (left @ right) * values.mean()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = torch.linalg.norm(actual.to(torch.float64) - expected)
    assert error / torch.linalg.norm(expected) < RESIDUAL


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    least=st.floats(0.02, 1.0),
    exponent=st.integers(-40, 40),
    seed=st.integers(0, 1000),
)
def test_singular_values_become_their_mean_at_every_scale(
    rows: int, columns: int, least: float, exponent: int, seed: int
) -> None:
    """Tall or wide alike; a power of two changes no bit."""
    values = torch.linspace(least, 1.0, min(rows, columns), dtype=torch.float64)
    matrix = with_values(values, rows, columns, seed)
    directed = equalised(matrix)
    assert directed.dtype == torch.float32
    assert_close(directed, by_decomposition(matrix))
    if rows != columns:
        assert same_bits(equalised(matrix.mT), directed.mT.contiguous())
    assert same_bits(equalised(matrix * 2.0**exponent), directed * 2.0**exponent)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scales_that_are_no_powers_of_two(scale: float) -> None:
    matrix = with_values(torch.linspace(0.1, 1.0, 8, dtype=torch.float64), 8, 30, seed=0)
    assert_close(equalised(matrix * scale) / scale, by_decomposition(matrix))


def test_directions_in_which_a_matrix_is_zero_or_almost_so_stay_small() -> None:
    column = torch.arange(1.0, 11.0).unsqueeze(1)
    rank_one = column @ torch.arange(-3.0, 9.0).unsqueeze(0)
    assert_close(equalised(rank_one), rank_one.to(torch.float64))
    dead = with_values(torch.linspace(0.5, 1.0, 12, dtype=torch.float64), 12, 20, seed=1)
    dead[3] = 0.0
    dead[:, 5] = 0.0
    directed = equalised(dead)
    assert not directed[3].any()
    assert not directed[:, 5].any()
    values = torch.linalg.svdvals(directed.to(torch.float64))
    assert values[-1] < 1e-4 * values[0] < values[-2]
    # A value far below the share grows in proportion; the sum of the values does not change.
    uneven_values = torch.tensor([1.0, 1.0, 1.0, 1e-5], dtype=torch.float64)
    directed = equalised(with_values(uneven_values, 4, 9, seed=2))
    values = torch.linalg.svdvals(directed.to(torch.float64))
    assert 1e-5 / SMALLEST_SHARE / 3 < values[-1] < 2 * 1e-5 / SMALLEST_SHARE
    assert float(values.sum()) == pytest.approx(3.0, rel=0.02)


def test_zero_and_non_finite_matrices_pass_unchanged_beside_directed_ones() -> None:
    matrices = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(3))
    matrices[1] = 0.0
    matrices[2, 0, 0] = torch.nan
    matrices[3, 5, 8] = -torch.inf
    directed = equalised(matrices)
    for index in (1, 2, 3):
        assert same_bits(directed[index], matrices[index])
    assert same_bits(directed[0], equalised(matrices[0]))
    assert directed[0].isfinite().all()
    for dtype in (torch.bfloat16, torch.float64):
        assert equalised(matrices[:1].to(dtype)).dtype == dtype


PROGRAM = """
import hashlib, sys, torch
from lightning_sdiloco.algorithm.direction import equalised
def digest(values): return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:8]
def matrix(rows, columns):
    numbers = torch.arange(rows * columns) * 7919 % 10007 - 5003
    return numbers.view(rows, columns).float() * torch.linspace(1, 3, columns).mul(64).round() / 4096
shapes = (700, 900), (48, 144), (3, 2000), (2048, 8), (333, 77)
for threads in map(int, sys.argv[1:]):
    torch.set_num_threads(threads)
    print(*(digest(equalised(matrix(*shape))) for shape in shapes))
    print(*(digest(matrix(*shape) @ matrix(*shape).T) for shape in shapes))
"""


# Numbers of threads, each with an environment that only a new process reads.
THREADS: list[tuple[list[str], dict[str, str]]] = [
    (["1", "3"], {}),
    (["2"], {"ATEN_CPU_CAPABILITY": "default"}),
    (["1"], {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
]


def test_the_bits_do_not_depend_on_threads_and_instructions() -> None:
    """Those of an ordinary product of matrices do, if there are kernels that differ."""
    directions = set[str]()
    products = set[str]()
    for threads, environment in THREADS:
        command = [sys.executable, "-c", PROGRAM, *threads]
        printed = subprocess.check_output(
            command, env=os.environ | environment, text=True, timeout=120
        )
        lines = printed.splitlines()
        assert len(lines) == 2 * len(threads)
        directions.update(lines[::2])
        products.update(lines[1::2])
    assert len(directions) == 1, directions
    if len(products) == 1:
        pytest.skip(
            "All ways to multiply have the same bits on this processor, so this shows nothing."
        )
