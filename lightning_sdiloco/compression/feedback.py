"""Remembers what a compression loses, and adds it to what is sent next."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression


@dataclass(frozen=True)
class ErrorFeedback(Compression):
    """Encodes like another compression; what that loses is added to the next outer gradient of the fragment.

    The memory changes when a flight lands in whose mean the group counted, and is part of a checkpoint. It is lost when
    rounds start anew: on a restart with other groups or settings, and when parameters are frozen or unfrozen. With
    ``mixing`` the local parameters keep a share of what was lost themselves, so only the rest is remembered. The final
    exchange takes no memory along.

    Args:
        compression: The compression.
        decay: Share of what is lost that is remembered, above 0 and at most 1. SparseLoCo (arXiv 2508.15706) uses 0.95.

    Raises:
        ValueError: If ``decay`` is out of range, or ``compression`` is not a compression, or remembers already.

    Examples:
        >>> from lightning_sdiloco.compression import Int4
        >>> compression, values = ErrorFeedback(Int4(), decay=0.5), torch.tensor([7.0, 1.25])
        >>> compression.remembered(values, None, compression.encode(values), mixing=0.0).tolist()
        [0.0, 0.125]
    """

    compression: Compression
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.compression, Compression) or isinstance(self.compression, ErrorFeedback):
            raise ValueError(
                f"ErrorFeedback(compression={self.compression!r}) has nothing to wrap: it must be an instance of"
                " another compression. Pass one, such as FP4()."
            )
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise ValueError(
                f"decay={self.decay!r} is out of range: it must be above 0 and at most 1. 1.0 forgets nothing; to"
                f" remember nothing, use {self.compression!r} itself."
            )

    @override
    def at(self, step: int) -> "ErrorFeedback":
        """The same around the compression for an inner step."""
        return replace(self, compression=self.compression.at(step))

    @override
    def dense(self) -> Compression:
        """That of the compression inside: there is no next outer gradient."""
        return self.compression.dense()

    @override
    def suits_sums(self) -> bool:
        """As for the compression inside."""
        return self.compression.suits_sums()

    @override
    def wire_bytes(self, numel: int) -> int:
        """The size of the payload of the compression inside."""
        return self.compression.wire_bytes(numel)

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Encodes as the compression inside does; what is remembered has been added by the caller."""
        return self.compression.encode(values)

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes as the compression inside does."""
        self.compression.decode(payload, out)

    @override
    def remembered(self, gradient: Tensor, memory: Tensor | None, payload: Tensor, mixing: float) -> Tensor:
        """What was lost, less what comes again by itself, times ``decay``.

        The local parameters keep the share ``mixing`` of what was not sent of the gradient: the next one holds it.
        """
        decoded = torch.empty_like(gradient)
        self.compression.decode(payload, decoded)
        lost = torch.sub(gradient, decoded, out=decoded).mul_(1 - mixing)
        if memory is not None:
            lost += memory
        return lost.mul_(self.decay)
