"""Error feedback, which adds the compression error to the next outer gradient."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression, State, Traits, forwarded, is_number
from lightning_sdiloco.memory import new_vector


@dataclass(frozen=True)
class ErrorFeedback(Compression):
    """Wraps a compression and adds its error to the next outer gradient of the fragment.

    The memory changes when a flight lands, provided that the group counted in the mean. Checkpoints
    contain the memory. The memory is lost if rounds restart, for example with different groups or
    settings, or if parameters are frozen or unfrozen. With ``mixing``, the local parameters keep a
    share of the error, so only the remaining share is stored. The final exchange does not add the
    memory.

    Args:
        compression: The wrapped compression.
        decay: The share of the error to keep, above 0 and at most 1. SparseLoCo (arXiv 2508.15706)
            uses 0.95.

    Raises:
        ValueError: If ``decay`` is out of range, or if ``compression`` is not a compression or
            already has error feedback.

    Examples:
        >>> from lightning_sdiloco.compression import Int4
        >>> compression, values = ErrorFeedback(Int4(), decay=0.5), torch.tensor([7.0, 1.25])
        >>> payload, state = compression.encode_launch(values, State(), mixing=0.0)
        >>> state.memory.tolist()
        [0.0, 0.125]
    """

    compression: Compression
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.compression, Compression) or isinstance(
            self.compression, ErrorFeedback
        ):
            raise ValueError(
                f"ErrorFeedback(compression={self.compression!r}) has no compression to wrap. Pass"
                " an instance of a different compression, such as FP4()."
            )
        if not is_number(self.decay) or not 0 < self.decay <= 1:
            raise ValueError(
                f"decay={self.decay!r} is out of range: it must be above 0 and at most 1. With 1.0,"
                f" the whole error is kept. To keep no error, use {self.compression!r} directly."
            )

    wire_bytes, encode, decode, stretches = forwarded(
        "compression", "wire_bytes", "encode", "decode", "stretches"
    )
    mean, places, choice = forwarded("compression", "mean", "places", "choice")

    @property
    @override
    def traits(self) -> Traits:
        return self.compression.traits._replace(remembers=True)

    @override
    def at(self, step: int, choice: int | None = None) -> "ErrorFeedback":
        compression = self.compression.at(step, choice)
        if compression is self.compression:
            return self
        return replace(self, compression=compression)

    @override
    def encode_launch(self, gradient: Tensor, state: State, mixing: float) -> tuple[Tensor, State]:
        numel = gradient.numel()
        values = gradient
        if state.memory is not None:
            values = torch.add(gradient, state.memory, out=new_vector(numel, gradient.device))
        inner_state = State(tuning=state.tuning)
        payload, inner_state = self.compression.encode_launch(values, inner_state, mixing)
        # The sum is freed before the new memory, which has the same size, is allocated.
        del values
        decoded = new_vector(numel, gradient.device)
        self.compression.decode(payload, decoded)
        # The local parameters keep their share of the error, so the next outer gradient contains
        # this share.
        lost = torch.sub(gradient, decoded, out=decoded).mul_(1 - mixing)
        if state.memory is not None:
            lost.add_(state.memory)
        return payload, inner_state._replace(memory=lost.mul_(self.decay))
