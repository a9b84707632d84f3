"""Chooses the code of each launch by the link of its sender; the payload says which one it is."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression

# So many bytes in front of the payload say which code it is in. What follows stays aligned.
_HEAD_BYTES = 8


@dataclass(frozen=True)
class ByLink(Compression):
    """Lets each sender choose, from a menu, the first code that its own link carries in time (FusionLLM).

    The sender alone chooses, launch by launch, and each payload names its code, so that all groups decode the same
    bits. What a code with error feedback has left out goes with the next launch, whatever its code; while something
    waits, what that code loses waits too.

    Args:
        menu: The codes, by name or as compressions, the most wanted one first.
        within: In how many seconds a payload must have been sent, or ``"overlap"`` for those that ``overlap_steps``
            take. Where no code is small enough it is the smallest. Until the link is known it is the first one.

    Raises:
        ValueError: If the menu is empty, or has a code whose payloads vary in length, or ``within`` is out of range.

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
        if isinstance(self.menu, str) or not isinstance(self.menu, Sequence) or not 1 <= len(self.menu) <= 256:
            raise ValueError(f"menu={self.menu!r} is no menu: give a list of codes, such as ['fp4', 'int2', 'sparse'].")
        object.__setattr__(self, "menu", tuple(self.menu))
        for code in self.menu:
            if isinstance(code, Compression) and code.varies():
                raise ValueError(
                    f"{code!r} in menu={self.menu!r} has payloads of lengths that are not known beforehand, so nobody"
                    " can tell if a link carries them in time. Give codes of fixed lengths, such as 'fp4' or 'sparse'."
                )
        seconds = self.within
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds != "overlap" and not (is_number and 0 < float(seconds) < math.inf):
            raise ValueError(
                f"within={seconds!r} is out of range: it must be a number of seconds above 0, or 'overlap', for those"
                " that overlap_steps take. 'overlap' is the default."
            )

    @property
    def _codes(self) -> list[Compression]:
        codes = [code for code in self.menu if isinstance(code, Compression)]
        assert len(codes) == len(self.menu), "`resolve` has replaced the names"
        return codes

    @override
    def with_names(self, resolve: Callable[[str | Compression], Compression]) -> "ByLink":
        """Returns the compression with codes in place of names."""
        return replace(self, menu=tuple(map(resolve, self.menu)))

    @override
    def choice(self, numel: int, bytes_per_s: float, overlap_s: float) -> int:
        """Returns the number of the code for a launch; see `Compression.choice`."""
        seconds = overlap_s if self.within == "overlap" else float(self.within)
        if not bytes_per_s > 0 or math.isnan(seconds):
            return 0
        sizes = [self.choice_bytes(numel, number) for number in range(len(self.menu))]
        in_time = [number for number, size in enumerate(sizes) if size <= bytes_per_s * seconds]
        return in_time[0] if in_time else sizes.index(min(sizes))

    @override
    def choice_bytes(self, numel: int, choice: int) -> int:
        """Returns the bytes of a payload in the code of a number."""
        return _HEAD_BYTES + self._codes[choice].wire_bytes(numel)

    @override
    def chosen(self, choice: int) -> "ByLink":
        """Returns the compression that encodes in the code of a number, and decodes all."""
        one = copy.copy(self)
        object.__setattr__(one, "code", choice)
        return one

    @override
    def at(self, step: int) -> Compression:
        """Returns the compression with all codes as they are at an inner step."""
        codes = [code.at(step) for code in self._codes]
        same = all(code is before for code, before in zip(codes, self._codes, strict=True))
        return self if same else replace(self, menu=tuple(codes))

    @override
    def suits_sums(self) -> bool:
        """Returns False: whose code would the mean be in?"""
        return False

    @override
    def chosen_share(self) -> float:
        """Returns the largest share of any code."""
        return max(code.chosen_share() for code in self._codes)

    @override
    def counts_senders(self) -> bool:
        """Returns whether any code does: the others send every value."""
        return any(code.counts_senders() for code in self._codes)

    @override
    def varies(self) -> bool:
        return True

    @override
    def remembers(self) -> bool:
        """Returns whether any code does."""
        return any(code.remembers() for code in self._codes)

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the most bytes that a payload of ``numel`` values takes."""
        return max(self.choice_bytes(numel, number) for number in range(len(self.menu)))

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Encodes in the chosen code."""
        payload = F.pad(self._codes[self.code].encode(values), (_HEAD_BYTES, 0))
        payload[0] = self.code
        return payload

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes what the payload says it is; there may be more behind it."""
        code, rest = self._read(payload, out.numel())
        code.decode(rest, out)

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        code, rest = self._read(payload, numel)
        return code.stretches(rest, numel)

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        code, rest = self._read(payload, out.numel())
        code.places(rest, out)

    @override
    def remembered(self, gradient: Tensor, memory: Tensor | None, payload: Tensor, mixing: float) -> Tensor | None:
        """Returns what the code of the payload remembers, or all that was not sent if something has waited."""
        code, rest = self._read(payload, gradient.numel())
        own = code.remembered(gradient, memory, rest, mixing)
        return own if own is not None or memory is None else code.residual(gradient, memory, rest, mixing)

    def _read(self, payload: Tensor, numel: int) -> tuple[Compression, Tensor]:
        """Returns the code of a payload, and what is encoded in it."""
        code = self._codes[int(payload[0])]
        return code, payload[_HEAD_BYTES:][: code.wire_bytes(numel)]
