"""Landing rules, which merge the outer parameters into a group's local parameters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.memory import new_vector


class LandingRule(ABC):
    """Decides how local parameters change, element by element, at a landing.

    Make a landing rule a frozen dataclass, because its ``repr`` is compared between ranks and with
    the checkpoint.

    Attributes:
        kept: The share of the local values, compression errors and buffers to keep, from 0 to 1.

    Examples:
        >>> @dataclass(frozen=True)
        ... class Halfway(LandingRule):
        ...     kept: float = 0.5
        ...
        ...     def gathered(self, gradient, before, after):
        ...         return (after,)
        ...
        ...     def merge(self, local, gathered, steps):
        ...         local.lerp_(gathered[0].to(local.dtype), 0.5)
        >>> local = torch.tensor([2.0])
        >>> Halfway().merge(local, [torch.tensor([4.0])], steps=5)
        >>> local
        tensor([3.])
    """

    kept: float

    @abstractmethod
    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        """Returns the vectors of a shard that the ranks of a group gather for the landing.

        This method runs in the background. Do not modify the arguments, which are float32 tensors
        of shape ``(shard_numel,)``.

        Args:
            gradient: The outer gradient: ``before`` minus the local values at the launch.
            before: The outer parameters at the launch.
            after: The outer parameters after the outer step.
        """

    @abstractmethod
    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None:
        """Overwrites local values at the landing, in the training thread.

        Args:
            local: The local values of a part of the fragment, with at least float32 precision.
            gathered: The float32 results of `gathered` for the same part, from all ranks.
            steps: The number of inner steps since the launch.
        """


@dataclass(frozen=True)
class Mix(LandingRule):
    """Keeps a share of the local values, as in the paper: ``kept * local + (1 - kept) * outer``.

    With ``kept=0``, the local values are not read, so they may be non-finite.

    Args:
        kept: The share to keep (alpha in the paper).

    Examples:
        >>> local = torch.tensor([2.0])
        >>> Mix(0.25).merge(local, [torch.tensor([4.0])], steps=5)
        >>> local
        tensor([3.5000])
    """

    kept: float

    @override
    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        return (after,)

    @override
    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None:
        mix(local, gathered[0], self.kept)


@dataclass(frozen=True)
class Carry(LandingRule):
    """Adds all progress made during the flight to the new outer parameters.

    The result is ``local + (after - sent)``, where ``sent`` contains the local values at the
    launch.

    Examples:
        >>> before, sent, after, local = (torch.tensor([value]) for value in (0.0, 1.0, 4.0, 1.5))
        >>> Carry().merge(local, Carry().gathered(before - sent, before, after), steps=5)
        >>> local
        tensor([4.5000])
    """

    @property
    def kept(self) -> float:  # type: ignore[override]
        """Always 0, because no share of the local values at the launch is kept."""
        return 0.0

    @override
    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        sent = torch.sub(before, gradient, out=new_vector(before.numel(), before.device))
        return (torch.sub(after, sent, out=sent),)

    @override
    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None:
        local.add_(gathered[0])


def mix(local: Tensor, outer: Tensor, kept: float) -> None:
    """Overwrites ``local`` with ``kept * local + (1 - kept) * outer``, computed with at least
    float32 precision.
    """
    if kept == 0:
        local.copy_(outer)
    elif kept != 1 and local.dtype == outer.dtype:
        torch.lerp(outer, local, kept, out=local)
    elif kept != 1:
        dtype = torch.promote_types(local.dtype, torch.float32)
        local.copy_(torch.lerp(outer.to(dtype), local.to(dtype), kept))
