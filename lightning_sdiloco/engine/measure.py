"""Measurements of inner steps, links and flights, and of how closely the groups agree."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.fragments import Diagnostics, Launch

# The numbers of inner steps and flights from which the step time and the link rate are computed.
_REMEMBERED_STEPS = 16
_REMEMBERED_FLIGHTS = 3

# The keys under which torch's optimizers store the running mean of their gradients.
_MOMENTUM_NAMES = ("momentum_buffer", "exp_avg")


class StepClock:
    """A clock that measures how long this rank trains per inner step.

    The clock measures the time between two engine calls, which excludes the time that the engine
    spends waiting. Taking the median excludes pauses such as validation.

    Args:
        seconds: The step time to report instead of the measured step time.

    Examples:
        >>> clock = StepClock()
        >>> for ended, began in ((0.0, 4.0), (1.0, 1.5), (2.0, 2.25), (3.0, 9.0)):
        ...     clock.note(ended, began)
        >>> clock.seconds
        0.5
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._fixed_seconds = seconds
        self._last_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)

    def note(self, ended: float, began: float) -> None:
        """Records an inner step.

        Args:
            ended: The time when the last engine call ended, or 0 if there was none.
            began: The time when this engine call began.
        """
        if ended:
            self._last_seconds.append(began - ended)

    @property
    def seconds(self) -> float:
        if self._fixed_seconds:
            return self._fixed_seconds
        return median(self._last_seconds) if self._last_seconds else 0.0


class LinkRate:
    """The rate of this rank's link, which is the highest rate of the last flights because a flight
    may stall.

    Attributes:
        last: The rates of the last flights, in bytes per second.
        fixed: The rate that simulations report instead of a measured rate, in bytes per second.

    Examples:
        >>> link = LinkRate()
        >>> for rate in (1e6, 2e6, 1e3, 0.0, 5e5, 4e5):
        ...     link.note(rate)
        >>> link.bytes_per_s
        500000.0
    """

    def __init__(self) -> None:
        self.last: list[float] = []
        self.fixed = 0.0

    def note(self, bytes_per_s: float) -> None:
        """Records the rate to each receiver in a flight, where 0 means unknown."""
        if bytes_per_s > 0:
            self.last = [*self.last, bytes_per_s][-_REMEMBERED_FLIGHTS:]

    @property
    def bytes_per_s(self) -> float:
        return self.fixed or max(self.last, default=0.0)

    def coded(self, launch: Launch, codec: Compression, schedule: Schedule) -> Launch:
        """Chooses the encoding of a launch based on this rank's own measurements."""
        overlap_steps = schedule.overlap_of_round(1) if launch.is_dense else schedule.overlap_steps
        overlap_s = overlap_steps * (launch.step_time or math.nan)
        choice = codec.choice(len(launch.gradient), self.bytes_per_s, overlap_s)
        return launch._replace(choice=choice) if choice else launch


def on_link(posted: float, began: float, launched: float, ended: float, encoding: float) -> float:
    """Returns how many seconds the messages of the other groups were on the link.

    A message is sent once its receiver has posted its own messages, so the time starts when every
    message could be sent. The receiver can measure the arrival of a message only while waiting for
    it. The result is NaN if the messages arrived before the wait began. The result is also NaN if
    they arrived together with the notice that their group had launched, because that notice is sent
    before encoding.

    Args:
        posted: The time when this rank posted its messages.
        began: The time when this rank began to wait for the messages of the other groups.
        launched: The time when this rank was notified that all groups had launched.
        ended: The time when all messages had arrived.
        encoding: The time in seconds that this rank spent encoding its messages.

    Examples:
        >>> on_link(posted=1.0, began=1.0, launched=0.0, ended=3.0, encoding=0.5)
        2.0
        >>> on_link(posted=1.0, began=2.9, launched=0.0, ended=3.0, encoding=0.5)
        nan
        >>> on_link(posted=1.0, began=1.0, launched=2.9, ended=3.0, encoding=0.5)
        nan
    """
    since = max(posted, launched)
    was_there = ended - max(began, launched) < (ended - since) / 2
    came_together = launched > posted and ended - launched < encoding
    return math.nan if was_there or came_together else ended - since


class Diagnosis:
    """Measurements during a flight of how closely the groups agree on its fragment."""

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
