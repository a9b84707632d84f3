"""Sends the largest values of each block and where they are; the others come back as zero."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression
from lightning_sdiloco.compression.blockwise import chunk_length

BLOCK = 4096
"""Values among which the largest are chosen: a position in a block takes 12 bits."""

_GROUP = 8  # values of a block in a group; the search starts with the largest value of each group


@dataclass(frozen=True, repr=False)
class TopK(Compression):
    """The largest ``share`` of every block of 4096 values, encoded by another compression, with 12 bits of position.

    An even number of values is sent of each block, or all of them. A payload holds the positions, in rising order
    within a block and two in three bytes, and then the payload of the chosen values, in the order of the positions.

    Args:
        share: The share of the values that is sent, above 0 and at most 1.
        values: How the values that are sent are encoded.
        over: What the sum of a value is divided by: the number of ``"groups"`` that count, or of those among them that
            are ``"senders"`` of this value, as in SparseLoCo's code (arXiv 2508.15706). The latter needs a smaller rate
            outside, and cannot be had with two shots.

    Raises:
        ValueError: If ``share`` or ``over`` is out of range, or ``values`` is not a compression.

    Examples:
        >>> from lightning_sdiloco.compression import Int2
        >>> sparse = TopK(1 / 64, Int2())
        >>> sparse.wire_bytes(1 << 20) * 8 / (1 << 20)
        0.22265625
        >>> decoded = torch.empty(5)
        >>> sparse.decode(sparse.encode(torch.tensor([0.5, -1.0, 3.0, 0.0, -2.0])), decoded)
        >>> decoded.tolist()
        [0.0, 0.0, 3.0, 0.0, -2.0]
    """

    share: float
    values: Compression
    over: str = field(default="groups", kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ValueError(f"share={self.share!r} is out of range: it must be above 0 and at most 1. 0.02 sends 2 %.")
        if not isinstance(self.values, Compression):
            raise ValueError(
                f"values={self.values!r} is not a compression. Pass an instance of one, such as Int2(): it encodes the"
                " values that are sent."
            )
        if self.values.varies():
            raise ValueError(
                f"values={self.values!r} chooses by itself which values it sends. Pass a compression that sends all"
                " values, such as Int2()."
            )
        if self.over not in ("groups", "senders"):
            raise ValueError(
                f"over={self.over!r} is not known. It is 'groups', the default, or 'senders': the sum of a value is"
                " divided by the number of all groups that count, or of those that sent it."
            )

    @override
    def __repr__(self) -> str:
        """Returns the class and its arguments, without those of later versions that have their defaults.

        So the text in a checkpoint of an earlier version is that of the same compression.
        """
        given = {own.name: getattr(self, own.name) for own in fields(self) if own.repr}
        texts = [
            f"{own.name}={given[own.name]!r}" for own in fields(self) if own.repr and given[own.name] != own.default
        ]
        return f"{type(self).__name__}({', '.join(texts)})"

    @override
    def dense(self) -> Compression:
        """Returns the compression that sends all values, encoded like those that are chosen otherwise."""
        return self.values.dense()

    @override
    def suits_sums(self) -> bool:
        """Returns False, since every group chooses for itself."""
        return False

    @override
    def chosen_share(self) -> float:
        """Returns the share that is sent."""
        return float(self.share)

    @override
    def counts_senders(self) -> bool:
        """Returns whether ``over`` is ``"senders"``."""
        return self.over == "senders"

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        """Tells which values were chosen."""
        self._put(payload, out.new_ones(self._count(out.numel())), out)

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the exact size in bytes of the payload of ``numel`` values.

        Args:
            numel: Number of values, at least 1.

        Returns:
            Three bytes for every two values that are sent, and the size of the payload of these values.
        """
        return packed_bytes(self._count(numel)) + self.values.wire_bytes(self._count(numel))

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Chooses the largest values of each block and encodes them.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """
        count, done = self._count(values.numel()), 0
        chosen, positions = values.new_empty(count), values.new_empty(packed_bytes(count), dtype=torch.uint8)
        for blocks in blocks_in(values):
            found = largest(blocks.abs(), self.kept(blocks.size(1))).sort(dim=1).values
            chosen[done:][: found.numel()] = self.sent(blocks.gather(1, found), blocks).view(-1)
            positions[packed_bytes(done) :][: packed_bytes(found.numel())] = pack(found.view(-1))
            done += found.numel()
        return torch.cat((positions, self.values.encode(chosen)))

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Puts the values that were sent into their places, and zeros elsewhere.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        count = self._count(out.numel())
        assert payload.numel() == self.wire_bytes(out.numel()), "the payload belongs to a vector of another size"
        chosen = out.new_empty(count)
        self.values.decode(payload[packed_bytes(count) :], chosen)
        self._put(payload, chosen, out)

    def sent(self, chosen: Tensor, blocks: Tensor) -> Tensor:
        """Returns what is sent of the values that were chosen in each block."""
        return chosen

    def _put(self, payload: Tensor, chosen: Tensor, out: Tensor) -> None:
        done = 0
        out.zero_()
        for blocks in blocks_in(out):
            shape = len(blocks), self.kept(blocks.size(1))
            sent = shape[0] * shape[1]
            positions = unpack(payload[packed_bytes(done) :][: packed_bytes(sent)], sent)
            blocks.scatter_(1, positions.view(shape), chosen[done:][:sent].view(shape))
            done += sent

    def kept(self, size: int) -> int:
        """Returns how many values of a block are sent: an even number, so that the next block starts at a byte."""
        # The share is taken as it is written: 0.03 as a float is not exactly 3 %.
        kept = -(-Fraction(str(self.share)) * size // 1)
        return min(int(kept + kept % 2), size)

    def _count(self, numel: int) -> int:
        last = numel % BLOCK
        return numel // BLOCK * self.kept(BLOCK) + (self.kept(last) if last else 0)


def blocks_in(values: Tensor) -> Iterator[Tensor]:
    """Yields views of the values, a block to a row: stretches of whole blocks, then the rest as one short block."""
    whole = values.numel() // BLOCK * BLOCK
    for start in range(0, whole, chunk_length(values.device)):
        yield values[start : min(start + chunk_length(values.device), whole)].view(-1, BLOCK)
    if whole < values.numel():
        yield values[whole:].view(1, -1)


def largest(magnitudes: Tensor, kept: int) -> Tensor:
    """Returns the positions of the largest magnitudes of every row."""
    size, groups = magnitudes.size(1), magnitudes.size(1) // _GROUP
    if size % _GROUP or kept * 2 > groups:
        return magnitudes.topk(kept, dim=1, sorted=False).indices
    # They all lie in the groups with the largest maxima, and these groups are found among far fewer numbers.
    chosen = magnitudes.view(-1, _GROUP, groups).amax(1).topk(kept, dim=1, sorted=False).indices
    members = torch.arange(0, size, groups, device=magnitudes.device)
    positions = (chosen[:, None] + members[:, None]).view(len(magnitudes), -1)
    among = magnitudes.gather(1, positions).topk(kept, dim=1, sorted=False).indices
    return positions.gather(1, among)


def packed_bytes(count: int) -> int:
    """Returns the bytes of so many positions."""
    return -(-count * 3 // 2)


def pack(positions: Tensor) -> Tensor:
    """Writes positions in a block, two in three bytes."""
    pairs = F.pad(positions, (0, len(positions) % 2)).to(torch.int32).view(-1, 2)
    pairs = pairs[:, 0] | pairs[:, 1] << 12
    packed = torch.stack((pairs & 255, pairs >> 8 & 255, pairs >> 16), dim=1).to(torch.uint8).view(-1)
    return packed[: packed_bytes(len(positions))]


def unpack(packed: Tensor, count: int) -> Tensor:
    """Reads back so many positions."""
    low, middle, high = F.pad(packed, (0, -len(packed) % 3)).to(torch.int64).view(-1, 3).unbind(1)
    pairs = low | middle << 8 | high << 16
    return torch.stack((pairs & 4095, pairs >> 12), dim=1).view(-1)[:count]
