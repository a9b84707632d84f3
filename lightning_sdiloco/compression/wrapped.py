"""Compressions around others: one that remembers what is lost, and one that chooses by the link of
the sender.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression, documented, forwarded, is_number

# Bytes before a payload of `ByLink` that name its code. The payload behind them stays aligned.
_HEAD_BYTES = 8


def _rewrapped(name: str) -> Any:
    """Makes a method that calls the method of this name of the wrapped compression, and wraps the
    compression that it returns.
    """

    def method(self: Any, *args: Any) -> Any:
        compression = getattr(self.compression, name)(*args)
        if compression is self.compression:
            return self
        return replace(self, compression=compression)

    return documented(name, method)


@dataclass(frozen=True)
class ErrorFeedback(Compression):
    """Encodes like another compression and adds what it loses to the next outer gradient of the
    fragment.

    The memory changes when a flight lands, if the group counted in its mean. It is part of a
    checkpoint. It is lost when rounds restart: with other groups or settings, or when parameters
    are frozen or unfrozen. With ``mixing`` the local parameters keep a share of what was lost, so
    only the rest is remembered. The final exchange adds no memory.

    Args:
        compression: The compression.
        decay: Share of the loss to remember, above 0 and at most 1. SparseLoCo (arXiv 2508.15706)
            uses 0.95.

    Raises:
        ValueError: If ``decay`` is out of range, or ``compression`` is not a compression or already
            has error feedback.

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
        if not isinstance(self.compression, Compression) or isinstance(
            self.compression, ErrorFeedback
        ):
            raise ValueError(
                f"ErrorFeedback(compression={self.compression!r}) has nothing to wrap: it needs an"
                " instance of another compression. Pass one, such as FP4()."
            )
        if not is_number(self.decay) or not 0 < self.decay <= 1:
            raise ValueError(
                f"decay={self.decay!r} is out of range: it must be above 0 and at most 1. 1.0"
                f" forgets nothing; to remember nothing, use {self.compression!r} itself."
            )

    wire_bytes, encode, decode, stretches, mean = forwarded(
        "compression", "wire_bytes", "encode", "decode", "stretches", "mean"
    )
    choice, choice_bytes, tuning, places = forwarded(
        "compression", "choice", "choice_bytes", "tuning", "places"
    )
    suits_sums, chosen_share = forwarded("compression", "suits_sums", "chosen_share")
    counts_senders, varies = forwarded("compression", "counts_senders", "varies")
    at, with_names, chosen, tuned = map(_rewrapped, ("at", "with_names", "chosen", "tuned"))

    @override
    def remembers(self) -> bool:
        return True

    @override
    def residual(
        self, values: Tensor, memory: Tensor | None, payload: Tensor, mixing: float
    ) -> Tensor:
        return super().residual(values, memory, payload, mixing).mul_(self.decay)

    @override
    def remembered(
        self, gradient: Tensor, memory: Tensor | None, payload: Tensor, mixing: float
    ) -> Tensor:
        return self.residual(gradient, memory, payload, mixing)


@dataclass(frozen=True)
class ByLink(Compression):
    """Each sender chooses, from a menu, the first code that its own link carries in time
    (FusionLLM).

    The sender chooses alone at each launch, and each payload names its code, so all groups decode
    the same bits. The loss of a code with error feedback is added to the next launch, whatever its
    code. As long as there is such a memory, it also takes in the losses of the other codes.

    Args:
        menu: The codes, by name or as compressions, the preferred one first.
        within: Seconds within which a payload must be sent, or ``"overlap"``, the time that
            ``overlap_steps`` take. If no code is small enough, the smallest is used. Until the link
            is known, the first is.

    Raises:
        ValueError: If the menu is empty, or has a code whose payloads vary in length, or ``within``
            is out of range.

    Examples:
        >>> from lightning_sdiloco.compression import resolve
        >>> code = resolve(ByLink(menu=("fp4", "int2", "sparse")))
        >>> [code.choice(10**6, bytes_per_s=rate, overlap_s=1.0) for rate in (0.0, 1e6, 4e5, 1e5, 1e3)]
        [0, 0, 1, 2, 2]
    """

    menu: Sequence[str | Compression] = ("fp4", "int2", "sparse")
    within: str | float = "overlap"
    code: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_list = isinstance(self.menu, Sequence) and not isinstance(self.menu, str)
        if not is_list or not 1 <= len(self.menu) <= 256:
            raise ValueError(
                f"menu={self.menu!r} is not a menu: give a list of codes, such as ['fp4',"
                " 'int2', 'sparse']."
            )
        object.__setattr__(self, "menu", tuple(self.menu))
        for code in self.menu:
            if isinstance(code, Compression) and code.varies():
                raise ValueError(
                    f"{code!r} in menu={self.menu!r} has payloads of varying length, so it is"
                    " unknown whether a link"
                    " carries them in time. Give codes of fixed lengths, such as 'fp4' or 'sparse'."
                )
        if self.within == "overlap":
            return
        if not is_number(self.within) or not 0 < float(self.within) < math.inf:
            raise ValueError(
                f"within={self.within!r} is out of range: it must be a number of seconds above 0, or"
                " 'overlap', the time that overlap_steps take. 'overlap' is the default."
            )

    @property
    def codes(self) -> list[Compression]:
        """The codes, once they have been found by their names."""
        codes = [code for code in self.menu if isinstance(code, Compression)]
        assert len(codes) == len(self.menu), "`resolve` has replaced the names"
        return codes

    @override
    def with_names(self, resolve: Callable[[str | Compression], Compression]) -> "ByLink":
        return replace(self, menu=tuple(map(resolve, self.menu)))

    @override
    def choice(self, numel: int, bytes_per_s: float, overlap_s: float) -> int:
        seconds = overlap_s
        if self.within != "overlap":
            seconds = float(self.within)
        if not bytes_per_s > 0 or math.isnan(seconds):
            return 0
        sizes = [self.choice_bytes(numel, number) for number in range(len(self.menu))]
        for number, size in enumerate(sizes):
            if size <= bytes_per_s * seconds:
                return number
        return sizes.index(min(sizes))

    @override
    def choice_bytes(self, numel: int, choice: int) -> int:
        return _HEAD_BYTES + self.codes[choice].wire_bytes(numel)

    @override
    def chosen(self, choice: int) -> "ByLink":
        chosen = copy.copy(self)
        object.__setattr__(chosen, "code", choice)
        return chosen

    @override
    def at(self, step: int) -> Compression:
        codes = [code.at(step) for code in self.codes]
        if all(code is before for code, before in zip(codes, self.codes, strict=True)):
            return self
        return replace(self, menu=tuple(codes))

    @override
    def suits_sums(self) -> bool:
        return False

    @override
    def chosen_share(self) -> float:
        return max(code.chosen_share() for code in self.codes)

    @override
    def counts_senders(self) -> bool:
        return any(code.counts_senders() for code in self.codes)

    @override
    def remembers(self) -> bool:
        return any(code.remembers() for code in self.codes)

    @override
    def varies(self) -> bool:
        return True

    @override
    def wire_bytes(self, numel: int) -> int:
        return max(self.choice_bytes(numel, number) for number in range(len(self.menu)))

    @override
    def encode(self, values: Tensor) -> Tensor:
        payload = F.pad(self.codes[self.code].encode(values), (_HEAD_BYTES, 0))
        payload[0] = self.code
        return payload

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        code, encoded = self._opened(payload, out.numel())
        code.decode(encoded, out)

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        code, encoded = self._opened(payload, numel)
        return code.stretches(encoded, numel)

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        code, encoded = self._opened(payload, out.numel())
        code.places(encoded, out)

    @override
    def remembered(
        self, gradient: Tensor, memory: Tensor | None, payload: Tensor, mixing: float
    ) -> Tensor | None:
        code, encoded = self._opened(payload, gradient.numel())
        new_memory = code.remembered(gradient, memory, encoded, mixing)
        if new_memory is None and memory is not None:
            return code.residual(gradient, memory, encoded, mixing)
        return new_memory

    def _opened(self, payload: Tensor, numel: int) -> tuple[Compression, Tensor]:
        code = self.codes[int(payload[0])]
        return code, payload[_HEAD_BYTES:][: code.wire_bytes(numel)]
