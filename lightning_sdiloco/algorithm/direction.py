"""The direction in which an outer step moves a matrix, obtained by making the singular values of
the matrix's mean outer gradient equal.

The direction is a stateless map that is applied to each matrix before the elementwise outer
optimizer. Groups agree only if the result is bit-identical everywhere. However, the result of an
ordinary matrix product differs between processors, thread counts and accelerators. Therefore, all
products are exact: float64 represents every sum exactly, in any order, if the factors are multiples
of 2^-24 whose rows and columns have norms of at most a few units.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

Direction = Callable[[str, Tensor], Tensor]
"""A map that is applied to a parameter's mean outer gradient. It is called with the parameter's
name and the gradient's float32 matrices, which have the shape ``(number, rows, columns)``.

The map returns matrices of the same shape, keeps no state between calls, and gives bit-identical
results in every group.
"""

EQUALISED: Literal["equalised"] = "equalised"
ELEMENTWISE: Literal["elementwise"] = "elementwise"

SMALLEST_SHARE = 1e-3
"""The share of the Frobenius norm above which singular values become equal. Smaller singular values
keep their proportions."""

# Odd polynomials a x + b x^3 + c x^5. Starting from [SMALLEST_SHARE, 1], each polynomial maps the
# range of the previous polynomial as close to 1 as possible (Polar Express, arXiv 2505.16932,
# without its margin for bfloat16). After the last polynomial, all values are within 1e-3 of 1.
# Values below SMALLEST_SHARE have grown by a factor of at most 2000.
_POLYNOMIALS = (
    (8.470328804, -25.108074707, 18.629275599),
    (4.182834183, -3.108701110, 0.580606681),
    (3.961857279, -2.954063746, 0.562976118),
    (3.286586217, -2.464720135, 0.507357694),
    (2.273749994, -1.644660368, 0.416190927),
    (1.888716197, -1.265157225, 0.376518926),
)

# Matrices of the same shape are mapped together, up to this number of values, so mapping many small
# matrices takes no longer than mapping a single large matrix.
_TOGETHER = 1 << 22

_FIXED_POINT = 2.0**24

# A float64 represents whole numbers up to 2^53 and stores its exponent in these bits.
_WHOLE_BITS = 53
_EXPONENT = 0x7FF << 52
_SMALLEST = torch.finfo(torch.float64).tiny


def equalised(matrices: Tensor) -> Tensor:
    """Returns the multiple of each matrix's polar factor that is closest to the matrix.

    The result is ``U @ Vh`` from the singular value decomposition, multiplied by the mean of the
    singular values, so the sum of the singular values does not change. Directions in which a matrix
    is almost zero, such as the directions of dead units and unseen tokens, remain almost zero; see
    `SMALLEST_SHARE`. A matrix that is zero or not finite is returned unchanged.

    The result is bit-identical on every device and with any number of threads. Passing matrices
    separately or together does not change the result.

    Args:
        matrices: Matrices of shape ``(..., rows, columns)``, with any floating-point dtype.

    Returns:
        Matrices of the same shape and dtype, on the same device.

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
    """Returns matrices whose singular values have been replaced by 1. Overwrites the input."""
    # Division by a power of two is exact. Without it, values far from 1 would overflow.
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
    """Rounds values to fixed point, in place."""
    return values.mul_(_FIXED_POINT).round_().div_(_FIXED_POINT)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Returns the exact inner product of each pair of rounded matrices, as 1 x 1 matrices."""
    bits = (_WHOLE_BITS - left.shape[-2:].numel().bit_length()) // 2
    left_unit = _power_of_two(left) * 2.0 ** (1 - bits)
    row = (left / left_unit).round_().flatten(-2).unsqueeze(-2)
    if left is right:
        return (row @ row.mT) * left_unit.square()
    right_unit = _power_of_two(right) * 2.0 ** (1 - bits)
    column = (right / right_unit).round_().flatten(-2).unsqueeze(-1)
    return (row @ column) * (left_unit * right_unit)


def _power_of_two(matrices: Tensor) -> Tensor:
    """Returns the power of two at or below each matrix's largest magnitude, as 1 x 1 matrices."""
    largest = matrices.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST)
    return (largest.view(torch.int64) & _EXPONENT).view(torch.float64)


def directed_by(direction: Direction, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Applies a direction to parameters and returns the results, keyed by name."""
    if direction is not _equalised:
        return {name: direction(name, matrices) for name, matrices in parameters.items()}
    directed = dict[str, Tensor]()
    for names in _batches(parameters):
        counts = [len(parameters[name]) for name in names]
        together = equalised(torch.cat([parameters[name] for name in names]))
        directed.update(zip(names, together.split(counts), strict=True))
    return directed


def _batches(parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yields batches of names whose matrices have the same shape and can be mapped together."""
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
    """Returns the map for a choice, which is a name or a callable, or None if values are treated
    separately.
    """
    if callable(choice):
        return choice
    if choice == EQUALISED:
        return _equalised
    return None
