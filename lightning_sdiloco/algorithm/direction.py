"""The direction in which an outer step moves a matrix: all singular values of its mean outer
gradient become equal.

A map of one matrix, without state of its own, before the outer optimizer, which stays elementwise.
Groups agree on the result only if its bits are the same everywhere, and the bits of an ordinary
product of matrices differ between kinds of processors, numbers of threads and accelerators. So
products are exact here: float64 holds every sum, in whatever order it is made, if factors are
multiples of 2^-24 and no row or column of them is longer than a few units.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

Direction = Callable[[str, Tensor], Tensor]
"""A map of the mean outer gradient of a parameter: its name, and its matrices
``(number, rows, columns)``, float32.

It returns matrices of that shape, keeps nothing from one call to the next, and has the same bits in
every group.
"""

EQUALISED: Literal["equalised"] = "equalised"
ELEMENTWISE: Literal["elementwise"] = "elementwise"

SMALLEST_SHARE = 1e-3
"""Singular values above this share of the Frobenius norm become equal; smaller ones stay in
proportion."""

# Odd polynomials a x + b x^3 + c x^5. Each takes the range that the one before made of
# [SMALLEST_SHARE, 1] as close to 1 as it can (Polar Express, arXiv 2505.16932, without its margin
# for bfloat16). After the last one all are within 1e-3 of 1; values below that share have grown
# 2000 times at most.
_POLYNOMIALS = (
    (8.470328804, -25.108074707, 18.629275599),
    (4.182834183, -3.108701110, 0.580606681),
    (3.961857279, -2.954063746, 0.562976118),
    (3.286586217, -2.464720135, 0.507357694),
    (2.273749994, -1.644660368, 0.416190927),
    (1.888716197, -1.265157225, 0.376518926),
)

# Matrices of one shape are mapped together, up to so many values: many small ones take as long as
# one.
_TOGETHER = 1 << 22

_FIXED_POINT = 2.0**24

# A float64 holds whole numbers up to 2^53; its exponent is in these bits.
_WHOLE_BITS = 53
_EXPONENT = 0x7FF << 52
_SMALLEST = torch.finfo(torch.float64).tiny


def equalised(matrices: Tensor) -> Tensor:
    """Returns the multiple of the polar factor of each matrix that lies closest to it.

    That is ``U @ Vh`` of its singular value decomposition, times the mean of the singular values:
    their sum stays what it was. Directions in which a matrix is all but zero, as for dead units and
    for tokens that were not seen, stay so; see `SMALLEST_SHARE`. A matrix that is zero, or not
    finite, stays as it is.

    The bits are the same on every device, for every number of threads, and whether matrices come
    alone or together.

    Args:
        matrices: Matrices of one shape, ``(..., rows, columns)``, of any floating dtype.

    Returns:
        Matrices of that shape and dtype, on the same device.

    Examples:
        >>> equalised(torch.tensor([[6.0, 0.0, 0.0], [0.0, 0.0, 2.0]])).round(decimals=2)
        tensor([[4., 0., 0.],
                [0., 0., 4.]])
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return equalised(matrices.mT).mT
    is_plain = (
        matrices.isfinite().all(dim=(-2, -1), keepdim=True)
        & matrices.any(dim=-1).any(dim=-1)[..., None, None]
    )
    factor = _polar_factor(matrices.detach().to(torch.float64, copy=True))
    exact = matrices.detach().to(torch.float64)
    factor *= _inner(factor, exact) / _inner(factor, factor)
    return torch.where(is_plain, factor.to(matrices.dtype), matrices)


def _polar_factor(matrices: Tensor) -> Tensor:
    """Returns matrices whose singular values are 1; overwrites those that it is given."""
    # A power of two changes no bit; values far from 1 would overflow.
    factor = matrices.div_(_power_of_two(matrices))
    _rounded(factor.div_(_inner(factor, factor).sqrt()))
    for linear, cubic, quintic in _POLYNOMIALS:
        gram = _rounded(factor @ factor.mT)
        polynomial = (gram @ gram).mul_(quintic).add_(gram.mul_(cubic))
        del gram
        polynomial.diagonal(dim1=-2, dim2=-1).add_(linear)
        factor = _rounded(_rounded(polynomial) @ factor)
    return factor


def _rounded(values: Tensor) -> Tensor:
    """Rounds to fixed point, in place."""
    return values.mul_(_FIXED_POINT).round_().div_(_FIXED_POINT)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Returns the inner product of each pair of matrices, as a matrix of one value: exact, of
    rounded values.
    """
    bits = (_WHOLE_BITS - left.shape[-2:].numel().bit_length()) // 2
    left_unit = _power_of_two(left) * 2.0 ** (1 - bits)
    row = (left / left_unit).round_().flatten(-2).unsqueeze(-2)
    if left is right:
        return (row @ row.mT) * left_unit.square()
    right_unit = _power_of_two(right) * 2.0 ** (1 - bits)
    column = (right / right_unit).round_().flatten(-2).unsqueeze(-1)
    return (row @ column) * (left_unit * right_unit)


def _power_of_two(matrices: Tensor) -> Tensor:
    """Returns the power of two at or below the largest magnitude of each matrix, as a matrix of
    one value.
    """
    largest = matrices.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST)
    return (largest.view(torch.int64) & _EXPONENT).view(torch.float64)


def directed_by(direction: Direction, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters as a direction maps them, by name."""
    if direction is not _equalised:
        return {name: direction(name, matrices) for name, matrices in parameters.items()}
    directed = dict[str, Tensor]()
    for names in _batches(parameters):
        counts = [len(parameters[name]) for name in names]
        together = equalised(torch.cat([parameters[name] for name in names]))
        directed.update(zip(names, together.split(counts), strict=True))
    return directed


def _batches(parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yields the names of parameters whose matrices have one shape, few enough to be mapped
    together.
    """
    by_shape = defaultdict[torch.Size, list[str]](list)
    for name, matrices in parameters.items():
        by_shape[matrices.shape[1:]].append(name)
    for names in by_shape.values():
        batch = list[str]()
        values = 0
        for name in names:
            if batch and values + parameters[name].numel() > _TOGETHER:
                yield batch
                batch = []
                values = 0
            batch.append(name)
            values += parameters[name].numel()
        yield batch


def _equalised(name: str, matrices: Tensor) -> Tensor:
    return equalised(matrices)


def direction_for(choice: str | Direction) -> Direction | None:
    """Returns the map that was chosen, by name or itself; None if every value is by itself."""
    if callable(choice):
        return choice
    if choice == EQUALISED:
        return _equalised
    return None
