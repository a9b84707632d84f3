"""A compression that lets each sender choose a code from a menu, based on the bandwidth of its
link.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression, State, Traits, is_number
from lightning_sdiloco.compression.feedback import ErrorFeedback
from lightning_sdiloco.compression.names import resolve

# The number of bytes before a payload that identify its code. The payload remains aligned.
_HEAD_BYTES = 8


@dataclass(frozen=True)
class ByLink(Compression):
    """Lets each sender use the first code in a menu that its link can carry in time, as in
    FusionLLM.

    Each sender chooses independently at each launch. Each payload identifies its code, so all
    groups decode it to bit-identical values. The error of a code with error feedback is added to
    the next launch, regardless of which code is used next. While such a memory exists, the errors
    of other codes are also added to this memory.

    Args:
        menu: The codes as names or compressions, starting with the preferred code.
        within: The number of seconds within which a payload must be sent, or ``"overlap"`` for the
            duration of ``overlap_steps``. If no code is small enough, the smallest code is used.
            Until the bandwidth is known, the first code is used.

    Raises:
        ValueError: If the menu is empty or contains a code whose payloads vary in length, or if
            ``within`` is out of range.

    Examples:
        >>> code = ByLink(menu=("fp4", "int2", "sparse"))
        >>> [code.choice(10**6, bytes_per_s=rate, overlap_s=1.0) for rate in (0.0, 1e6, 4e5, 1e5, 1e3)]
        [0, 0, 1, 2, 2]
    """

    menu: Sequence[str | Compression] = ("fp4", "int2", "sparse")
    within: str | float = "overlap"
    codes: tuple[Compression, ...] = field(default=(), init=False, repr=False, compare=False)
    code: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_list = isinstance(self.menu, Sequence) and not isinstance(self.menu, str)
        if not is_list or not 1 <= len(self.menu) <= 256:
            raise ValueError(
                f"menu={self.menu!r} is not a menu. Pass a list of codes, such as ['fp4', 'int2',"
                " 'sparse']."
            )
        object.__setattr__(self, "menu", tuple(self.menu))
        object.__setattr__(self, "codes", tuple(map(resolve, self.menu)))
        for code in self.codes:
            if code.traits.varies:
                raise ValueError(
                    f"{code!r} in menu={self.menu!r} has payloads of varying length, so it"
                    " cannot be known in advance whether a link can carry them in time. Choose"
                    " codes of fixed length, such as 'fp4' or 'sparse'."
                )
        if self.within == "overlap":
            return
        if not is_number(self.within) or not 0 < float(self.within) < math.inf:
            raise ValueError(
                f"within={self.within!r} is out of range: it must be a number of seconds above 0,"
                " or 'overlap' (the default), which means the duration of overlap_steps."
            )

    @property
    @override
    def traits(self) -> Traits:
        traits = [code.traits for code in self.codes]
        return Traits(
            share=max(trait.share for trait in traits),
            suits_sums=False,
            counts_senders=any(trait.counts_senders for trait in traits),
            varies=True,
            remembers=any(trait.remembers for trait in traits),
        )

    @override
    def choice(self, numel: int, bytes_per_s: float, overlap_s: float) -> int:
        seconds = overlap_s
        if self.within != "overlap":
            seconds = float(self.within)
        if not bytes_per_s > 0 or math.isnan(seconds):
            return 0
        sizes = [_HEAD_BYTES + code.wire_bytes(numel) for code in self.codes]
        for number, size in enumerate(sizes):
            if size <= bytes_per_s * seconds:
                return number
        return sizes.index(min(sizes))

    @override
    def at(self, step: int, choice: int | None = None) -> "ByLink":
        codes = tuple(code.at(step) for code in self.codes)
        is_same = all(code is before for code, before in zip(codes, self.codes, strict=True))
        if is_same and choice is None:
            return self
        bound = copy.copy(self)
        object.__setattr__(bound, "codes", codes)
        object.__setattr__(bound, "code", choice)
        return bound

    @override
    def wire_bytes(self, numel: int) -> int:
        if self.code is not None:
            return _HEAD_BYTES + self.codes[self.code].wire_bytes(numel)
        return _HEAD_BYTES + max(code.wire_bytes(numel) for code in self.codes)

    @override
    def encode(self, values: Tensor) -> Tensor:
        number = self.code or 0
        return _with_head(number, self.codes[number].encode(values))

    @override
    def encode_launch(self, gradient: Tensor, state: State, mixing: float) -> tuple[Tensor, State]:
        number = self.code or 0
        code = self.codes[number]
        if state.memory is not None and not code.traits.remembers:
            code = ErrorFeedback(code)
        payload, new_state = code.encode_launch(gradient, state, mixing)
        return _with_head(number, payload), new_state

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

    def _opened(self, payload: Tensor, numel: int) -> tuple[Compression, Tensor]:
        code = self.codes[int(payload[0])]
        return code, payload[_HEAD_BYTES:][: code.wire_bytes(numel)]


def _with_head(number: int, payload: Tensor) -> Tensor:
    headed = F.pad(payload, (_HEAD_BYTES, 0))
    headed[0] = number
    return headed
