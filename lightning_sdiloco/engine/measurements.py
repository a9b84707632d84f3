"""What is measured of a flight: when its parts began and ended, and, if asked for, how far the groups agree."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.comm import Communicator
from lightning_sdiloco.compression import Compression

Span = tuple[float, float]
"""From when to when, on the clock of ``time.perf_counter()``."""

_REMEMBERED = 16
_FLIGHTS = 3


class StepClock:
    """Measures how long this rank trains for an inner step, from the end of one call of the engine to the next.

    What the engine itself waits for is left out. Pauses, as for a validation, are too, by a median.

    Args:
        seconds: What it says in place of what it measures.

    Examples:
        >>> clock = StepClock()
        >>> for ended, began in ((0.0, 4.0), (1.0, 1.5), (2.0, 2.25), (3.0, 9.0)):
        ...     clock.note(ended, began)
        >>> clock.seconds
        0.5
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._last: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, ended: float, began: float) -> None:
        """Notes an inner step: when the last call of the engine ended, or 0 if there was none, and this one began."""
        if ended:
            self._last.append(began - ended)

    @property
    def seconds(self) -> float:
        """Seconds of an inner step; 0 if none is known."""
        return self._seconds or (median(self._last) if self._last else 0.0)


class LinkRate:
    """Remembers what the link of this rank carried: the most in its last flights, of which one may have stalled.

    Attributes:
        last: What it was told, the last few.
        fixed: What it says in place of that, in bytes per second, for simulations.

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
        """Notes what it carried to each receiver in a flight; 0 if that is not known."""
        if bytes_per_s > 0:
            self.last = [*self.last, bytes_per_s][-_FLIGHTS:]

    @property
    def bytes_per_s(self) -> float:
        """Bytes that it carries to each receiver in a second; 0 if that is not known."""
        return self.fixed or max(self.last, default=0.0)


class Diagnostics(NamedTuple):
    """Tells how far the groups agree on a fragment, and what became of its outer gradient."""

    cosines: tuple[float, ...]
    local_distance: float
    outer_momentum_norm: float
    compression_error: float


def on_link(posted: float, began: float, launched: float, ended: float, encoding: float) -> float:
    """Returns for how many seconds the messages of the other groups were on the link, from when all could travel.

    A message travels once its receiver has posted its own. Who waits for it learns when it came, but not if it was
    there already when the wait began, or with the word that its group has launched: an encoding lies between the two.

    Args:
        posted: When this rank posted its own messages.
        began: When it began to wait for those of the others.
        launched: When it learned that all groups have launched.
        ended: When their messages were there.
        encoding: How long this rank encoded its own.

    Returns:
        The seconds; NaN where they cannot be told.

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


def lost(gradient: Tensor, decoded: Tensor) -> Tensor:
    """Returns the squared norms of what a compression lost of a shard, and of the shard."""
    return _sums([decoded - gradient, gradient])


def agreement(payloads: Sequence[Tensor], compression: Compression, mean: Tensor) -> Tensor:
    """Returns the squared norm of a mean; then, by group, that of what it sent and its inner product with the mean."""
    sums, decoded = [_sums([mean])], torch.empty_like(mean)
    for payload in payloads:
        if not payload.numel():  # Nothing came from this group.
            sums.append(torch.full((2,), math.nan, dtype=torch.float64, device=mean.device))
            continue
        compression.decode(payload, decoded)
        sums += [_sums([decoded]), torch.dot(decoded, mean).double().reshape(1)]
    return torch.cat(sums)


def distance(gradient: Tensor, outer: Tensor, state: dict[str, Any]) -> Tensor:
    """Returns the squared norms of the outer gradient, the outer parameters and the outer momentum of a shard."""
    momentum = next((state[name] for name in _MOMENTA if isinstance(state.get(name), Tensor)), None)
    unknown = torch.full((1,), math.nan, dtype=torch.float64, device=gradient.device)
    return torch.cat([_sums([gradient, outer]), unknown if momentum is None else _sums([momentum.to(outer.device)])])


def diagnosed(lost: Tensor, agreement: Tensor, distance: Tensor, in_group: Communicator) -> Diagnostics:
    """Adds up what `lost`, `agreement` and `distance` returned on the ranks of a group. In-group collective."""
    ranks = in_group.all_gather(torch.cat([lost, agreement, distance]).cpu())
    sums = iter(torch.stack(ranks).sum(dim=0).tolist())
    error, gradient = next(sums), next(sums)
    mean = next(sums)
    groups = [(next(sums), next(sums)) for _ in range((len(agreement) - 1) // 2)]
    local, outer, momentum = sums
    return Diagnostics(
        cosines=tuple(_ratio(product, math.sqrt(mean * own)) for own, product in groups),
        local_distance=math.sqrt(_ratio(local, outer)),
        outer_momentum_norm=math.sqrt(momentum),
        compression_error=math.sqrt(_ratio(error, gradient)),
    )


# What torch's optimizers call the running mean of their gradients.
_MOMENTA = ("momentum_buffer", "exp_avg")


def _sums(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(vector, dtype=torch.float64).square() for vector in vectors])


def _ratio(value: float, of: float) -> float:
    return value / of if of > 0 else math.nan
