"""Sends values that chance picks. All groups pick the same, so no positions are sent; the others come back as zero."""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression, chunk_length
from lightning_sdiloco.memory import new_vector

Self = TypeVar("Self", bound="_Chance")


@dataclass(frozen=True)
class _Chance(Compression):
    every: int
    values: Compression
    step: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(
                f"every={self.every!r} is out of range: it must be a whole number of at least 1. 32 sends 3 %."
            )
        if not isinstance(self.values, Compression):
            raise ValueError(
                f"values={self.values!r} is not a compression. Pass an instance of one, such as FP4(): it encodes the"
                " values that are sent."
            )
        if self.values.varies():
            raise ValueError(
                f"values={self.values!r} keeps a threshold for each place, and chance picks other places every time."
                " Pass another compression, such as FP4()."
            )

    @override
    def at(self: Self, step: int) -> Self:
        """Returns the compression with what chance picks at an inner step."""
        picked = copy.copy(self)
        object.__setattr__(picked, "step", step)
        return picked

    @override
    def dense(self) -> Compression:
        """Returns the compression that sends all values, encoded like those that are picked otherwise."""
        return self.values.dense()

    @override
    def suits_sums(self) -> bool:
        """Returns what the compression of the values returns, since all groups pick the same ones."""
        return self.values.suits_sums()

    @override
    def chosen_share(self) -> float:
        """Returns what the compression of the values returns, since all groups pick the same ones."""
        return self.values.chosen_share()

    @override
    def counts_senders(self) -> bool:
        """Returns what the compression of the values returns: those that chance picks are sent by all groups."""
        return self.values.counts_senders()

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        """Tells which values were picked, and sent."""
        sent = out.new_empty(-(-out.numel() // self.every))
        self.values.places(payload, sent)
        self.put(sent, out.zero_())

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the exact size in bytes of the payload of ``numel`` values.

        Args:
            numel: Number of values, at least 1.

        Returns:
            The size of the payload of the values that are sent: one of each ``every``, also of the last ones if fewer.
        """
        return self.values.wire_bytes(-(-numel // self.every))

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Picks values and encodes them.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """
        return self.values.encode(self.picked(values))

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Puts the values that were sent into their places, and zeros elsewhere.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        sent = out.new_empty(-(-out.numel() // self.every))
        self.values.decode(payload, sent)
        self.put(sent, out.zero_())

    @override
    def mean(self, sent: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
        """Takes the mean of the values that were picked, and puts it into their places; the others have none but 0."""
        mean = new_vector(-(-out.numel() // self.every), out.device)
        self.values.mean(sent, mean)
        self.put(mean, out.zero_())

    @abstractmethod
    def picked(self, values: Tensor) -> Tensor:
        """Returns the values that chance picks, in their order, as a contiguous tensor."""

    @abstractmethod
    def put(self, sent: Tensor, out: Tensor) -> None:
        """Writes the values that were picked back into their places."""


@dataclass(frozen=True)
class RandomK(_Chance):
    """One value of every ``every`` consecutive ones, at random, encoded by another compression.

    The choice follows from the inner step of the launch: all groups send the same values, each launch sends others.

    Args:
        every: One of this many values is sent.
        values: How the values that are sent are encoded.

    Raises:
        ValueError: If ``every`` is out of range, or ``values`` is not a compression.

    Examples:
        >>> from lightning_sdiloco.compression import Float32
        >>> chance, decoded = RandomK(4, Float32()).at(100), torch.empty(8)
        >>> chance.decode(chance.encode(torch.arange(8.0)), decoded)
        >>> decoded.tolist()
        [0.0, 0.0, 2.0, 0.0, 0.0, 5.0, 0.0, 0.0]
    """

    @override
    def picked(self, values: Tensor) -> Tensor:
        """Returns one value of each cell."""
        return torch.cat([cells.gather(1, offsets).view(-1) for cells, offsets in self._cells(values)])

    @override
    def put(self, sent: Tensor, out: Tensor) -> None:
        """Writes one value into each cell."""
        done = 0
        for cells, offsets in self._cells(out):
            cells.scatter_(1, offsets, sent[done:][: len(cells)].view(-1, 1))
            done += len(cells)

    def _cells(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of the values, a cell to a row, and the position picked in each; the last cell may be short."""
        whole, length = len(values) // self.every, max(chunk_length(values.device) // self.every, 1)
        for start in range(0, whole, length):
            end = min(start + length, whole)
            cells = values[start * self.every : end * self.every].view(-1, self.every)
            numbers = torch.arange(start, end, device=values.device)
            yield cells, _hashed(numbers, self.step).remainder_(self.every)[:, None]
        rest = values[whole * self.every :]
        if len(rest) > 0:
            numbers = torch.tensor([whole], device=values.device)
            yield rest.view(1, -1), _hashed(numbers, self.step).remainder_(len(rest))[:, None]


@dataclass(frozen=True)
class RandomBlock(_Chance):
    """One of ``every`` equal stretches of the vector, at random, encoded by another compression.

    The choice follows from the inner step of the launch, so that all groups send the same stretch.

    Args:
        every: The vector is cut into this many stretches.
        values: How a stretch is encoded.

    Raises:
        ValueError: If ``every`` is out of range, or ``values`` is not a compression.

    Examples:
        >>> from lightning_sdiloco.compression import Float32
        >>> chance, decoded = RandomBlock(3, Float32()).at(100), torch.empty(8)
        >>> chance.decode(chance.encode(torch.arange(8.0)), decoded)
        >>> decoded.tolist()
        [0.0, 0.0, 0.0, 3.0, 4.0, 5.0, 0.0, 0.0]
    """

    @override
    def picked(self, values: Tensor) -> Tensor:
        """Returns the stretch."""
        return self._stretch(values)

    @override
    def put(self, sent: Tensor, out: Tensor) -> None:
        """Writes the stretch."""
        self._stretch(out).copy_(sent)

    def _stretch(self, values: Tensor) -> Tensor:
        length = -(-len(values) // self.every)
        number = int(_hashed(torch.zeros(1, dtype=torch.int64), self.step)) % self.every
        # The last stretch may reach back into the one before, so that all have the same length.
        start = min(number * length, len(values) - length)
        return values[start : start + length]


def _hashed(numbers: Tensor, step: int) -> Tensor:
    """Turns whole numbers and the inner step into 32 bits that look like chance, the same on every device."""
    # Products may overflow 64 bits; their low 32 bits, which are kept, are right nevertheless.
    hashed = (numbers + 1) * 0x9E3779B1 + step * 0x85EBCA77
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed &= 0xFFFFFFFF
        hashed ^= hashed >> shift
        hashed *= factor
    return hashed & 0xFFFFFFFF
