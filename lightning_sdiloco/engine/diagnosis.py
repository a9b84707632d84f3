"""Measurements of how closely the groups agree on a fragment in flight."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.fragments import Diagnostics, Launch

# The keys under which torch's optimizers store a running mean of the gradients.
_MOMENTUM_NAMES = ("momentum_buffer", "exp_avg")


class Diagnosis:
    """Measures, during a flight, how closely the groups agree on its fragment."""

    def __init__(self) -> None:
        self._encoding_squares = torch.empty(0)
        self._mean_sums = torch.empty(0)

    def measure_encoding(self, decoded: Tensor, values: Tensor) -> None:
        """Measures the error that encoding adds to the values that this group sends."""
        self._encoding_squares = _squares([decoded - values, values])

    def measure_mean(
        self, payloads: Sequence[Tensor], compression: Compression, mean: Tensor
    ) -> None:
        """Measures the alignment of each group's payload with the mean."""
        sums = [_squares([mean])]
        decoded = torch.empty_like(mean)
        for payload in payloads:
            if not payload.numel():  # This group sent nothing.
                unknown = torch.full((2,), math.nan, dtype=torch.float64, device=mean.device)
                sums.append(unknown)
                continue
            compression.decode(payload, decoded)
            inner_product = torch.dot(decoded, mean).double().reshape(1)
            sums += [_squares([decoded]), inner_product]
        self._mean_sums = torch.cat(sums)

    def result(
        self, launch: Launch, outer_state: Mapping[str, Any], in_group: Communicator
    ) -> Diagnostics:
        """Returns all measurements after the outer step. In-group collective."""
        outer_squares = torch.full((3,), math.nan, dtype=torch.float64, device=launch.outer.device)
        outer_squares[:2] = _squares([launch.gradient, launch.outer])
        momentum = _momentum_of(outer_state)
        if momentum is not None:
            outer_squares[2:] = _squares([momentum.to(launch.outer.device)])
        sums = torch.cat([self._encoding_squares, self._mean_sums, outer_squares]).cpu()
        of_ranks = in_group.all_gather(sums)
        totals = torch.stack(of_ranks).sum(dim=0).tolist()
        error, gradient, mean, *of_groups, local, outer, outer_momentum = totals
        cosines = [
            _ratio(inner_product, math.sqrt(mean * squared_norm))
            for squared_norm, inner_product in zip(of_groups[::2], of_groups[1::2], strict=True)
        ]
        return Diagnostics(
            cosines=tuple(cosines),
            local_distance=math.sqrt(_ratio(local, outer)),
            outer_momentum_norm=math.sqrt(outer_momentum),
            compression_error=math.sqrt(_ratio(error, gradient)),
        )


def _momentum_of(outer_state: Mapping[str, Any]) -> Tensor | None:
    for name in _MOMENTUM_NAMES:
        momentum = outer_state.get(name)
        if isinstance(momentum, Tensor):
            return momentum
    return None


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference > 0 else math.nan


def _squares(vectors: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(vector, dtype=torch.float64) for vector in vectors]
    return torch.stack([norm.square() for norm in norms])
