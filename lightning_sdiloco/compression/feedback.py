"""Error feedback: remembers what a compression loses and adds it to the next outer gradient."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression


@dataclass(frozen=True)
class ErrorFeedback(Compression):
    """Encodes like another compression and adds what it loses to the next outer gradient of the fragment.

    The memory changes when a flight lands, if the group counted in its mean. It is part of a checkpoint. It is lost
    when rounds start anew: on a restart with other groups or settings, and when parameters are frozen or unfrozen. With
    ``mixing`` the local parameters themselves keep a share of what was lost, so only the rest is remembered. The final
    exchange adds no memory.

    Args:
        compression: The compression.
        decay: Share of the loss that is remembered, above 0 and at most 1. SparseLoCo (arXiv 2508.15706) uses 0.95.

    Raises:
        ValueError: If ``decay`` is out of range, or if ``compression`` is not a compression or has error feedback.

    Examples:
        >>> import torch
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
        return replace(self, compression=self.compression.at(step))

    @override
    def with_names(self, resolve: Callable[[str | Compression], Compression]) -> "ErrorFeedback":
        return replace(self, compression=self.compression.with_names(resolve))

    @override
    def choice(self, numel: int, bytes_per_s: float, overlap_s: float) -> int:
        return self.compression.choice(numel, bytes_per_s, overlap_s)

    @override
    def choice_bytes(self, numel: int, choice: int) -> int:
        return self.compression.choice_bytes(numel, choice)

    @override
    def chosen(self, choice: int) -> "ErrorFeedback":
        one = self.compression.chosen(choice)
        return self if one is self.compression else replace(self, compression=one)

    @override
    def suits_sums(self) -> bool:
        return self.compression.suits_sums()

    @override
    def chosen_share(self) -> float:
        return self.compression.chosen_share()

    @override
    def counts_senders(self) -> bool:
        return self.compression.counts_senders()

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        """Tells what the wrapped compression tells."""
        self.compression.places(payload, out)

    @override
    def varies(self) -> bool:
        return self.compression.varies()

    @override
    def tuning(self, values: Tensor, before: Tensor | None) -> Tensor | None:
        return self.compression.tuning(values, before)

    @override
    def tuned(self, tuning: Tensor | None) -> "ErrorFeedback":
        return self if tuning is None else replace(self, compression=self.compression.tuned(tuning))

    @override
    def remembers(self) -> bool:
        return True

    @override
    def wire_bytes(self, numel: int) -> int:
        return self.compression.wire_bytes(numel)

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Encodes as the wrapped compression does. The caller has added the memory to the values."""
        return self.compression.encode(values)

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        self.compression.decode(payload, out)

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        return self.compression.stretches(payload, numel)

    @override
    def mean(self, sent: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
        self.compression.mean(sent, out)

    @override
    def residual(self, values: Tensor, memory: Tensor | None, payload: Tensor, mixing: float) -> Tensor:
        """Returns what encoding lost, times ``decay``; see `Compression.residual`."""
        return super().residual(values, memory, payload, mixing).mul_(self.decay)

    @override
    def remembered(self, gradient: Tensor, memory: Tensor | None, payload: Tensor, mixing: float) -> Tensor:
        """Returns the residual, which is added to the next outer gradient."""
        return self.residual(gradient, memory, payload, mixing)
