"""Sends the largest values of each block and where they are; the others come back as zero."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import Compression, chunk_length
from lightning_sdiloco.memory import new_vector

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
        """Returns the class and its arguments, without those of later versions that have their defaults."""
        given = {own.name: getattr(self, own.name) for own in fields(self) if own.repr}
        texts = [
            f"{own.name}={given[own.name]!r}" for own in fields(self) if own.repr and given[own.name] != own.default
        ]
        return f"{type(self).__name__}({', '.join(texts)})"

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
        return _packed_bytes(self._count(numel)) + self.values.wire_bytes(self._count(numel))

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Chooses the largest values of each block and encodes them.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """
        count, done = self._count(values.numel()), 0
        chosen, positions = values.new_empty(count), values.new_empty(_packed_bytes(count), dtype=torch.uint8)
        for blocks in _blocks(values):
            found = _largest(blocks.abs(), self._kept(blocks.size(1))).sort(dim=1).values
            chosen[done:][: found.numel()] = self.sent(blocks.gather(1, found), blocks).view(-1)
            positions[_packed_bytes(done) :][: _packed_bytes(found.numel())] = _packed(found.view(-1))
            done += found.numel()
        return torch.cat((positions, self.values.encode(chosen)))

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Puts the values that were sent into their places, and zeros elsewhere.

        Args:
            payload: Contiguous uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        self._put(payload, self._chosen(payload, out.numel()), out)

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Decodes what was sent at once, and puts it into its places one stretch after the other."""
        chosen, done = self._chosen(payload, numel), 0
        scratch = new_vector(min(numel, chunk_length(payload.device)), payload.device)
        for where in _stretches(numel, payload.device):
            values = scratch[: where.stop - where.start]
            count = self._count(len(values))
            self._put(payload[_packed_bytes(done) :], chosen[done:][:count], values)
            done += count
            yield where, values

    def _chosen(self, payload: Tensor, numel: int) -> Tensor:
        """Decodes the values that were sent."""
        count = self._count(numel)
        assert payload.numel() == self.wire_bytes(numel), "the payload belongs to a vector of another size"
        chosen = torch.empty(count, device=payload.device)
        self.values.decode(payload[_packed_bytes(count) :], chosen)
        return chosen

    def sent(self, chosen: Tensor, blocks: Tensor) -> Tensor:
        """Returns what is sent of the values that were chosen in each block."""
        return chosen

    def _put(self, payload: Tensor, chosen: Tensor, out: Tensor) -> None:
        done = 0
        out.zero_()
        for blocks in _blocks(out):
            shape = len(blocks), self._kept(blocks.size(1))
            sent = shape[0] * shape[1]
            positions = _unpacked(payload[_packed_bytes(done) :][: _packed_bytes(sent)], sent)
            blocks.scatter_(1, positions.view(shape), chosen[done:][:sent].view(shape))
            done += sent

    def _kept(self, size: int) -> int:
        """Returns how many values of a block are sent: an even number, so that the next block starts at a byte."""
        # The share is taken as it is written: 0.03 as a float is not exactly 3 %.
        kept = -(-Fraction(str(self.share)) * size // 1)
        return min(int(kept + kept % 2), size)

    def _count(self, numel: int) -> int:
        last = numel % BLOCK
        return numel // BLOCK * self._kept(BLOCK) + (self._kept(last) if last else 0)


@dataclass(frozen=True, repr=False)
class Threshold(TopK):
    """Sends what exceeds a threshold, and no more of each block of 4096 values than `TopK` would.

    With ``least``, the threshold follows from the mean magnitude of the block as it is. What is smaller is sent as
    zero, so that every payload has the size that ``share`` gives.

    With ``every``, each block has a threshold that is kept for so many launches: that of the smallest value which an
    exact top-k of ``share`` chooses in the first of them (DCT, arXiv 2010.08899). What is smaller is not sent, so that
    payloads become shorter where outer gradients do; ``share`` is the most. The thresholds change at a landing, if the
    group counts in the mean, and are part of a checkpoint. A launch that begins without them chooses them anew.

    With `ErrorFeedback`, what is small waits until it has grown.

    Args:
        share: The share of the values that is sent at most, above 0 and at most 1.
        values: How the values that are sent are encoded.
        least: The least magnitude that is sent, as a multiple of the mean magnitude of the block; at least 0.
        every: For how many launches a threshold is kept, at least 1. Give this or ``least``.
        over: As for `TopK`. With ``least``, who sends a zero is no sender.

    Raises:
        ValueError: If an argument is out of range, ``values`` is not a compression, or not one threshold was given.

    Examples:
        >>> from lightning_sdiloco.compression import Float32
        >>> sparse, decoded = Threshold(0.5, Float32(), least=1.5), torch.empty(4)
        >>> sparse.decode(sparse.encode(torch.tensor([1.0, -2.0, 0.5, 1.0])), decoded)
        >>> decoded.tolist()
        [0.0, -2.0, 0.0, 0.0]
        >>> first, later = torch.tensor([1.0, -2.0, 0.5, 1.5]), torch.tensor([1.0, -1.75, 0.5, 0.25])
        >>> kept = Threshold(0.5, Float32(), every=10)
        >>> tuned = kept.tuned(kept.tuning(first, None))
        >>> len(tuned.encode(first)), len(tuned.encode(later))
        (13, 8)
    """

    least: float | None = None
    every: int | None = None
    thresholds: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.least is None) == (self.every is None):
            raise ValueError(
                f"Threshold(least={self.least!r}, every={self.every!r}) needs one threshold. Give least=3.0 to send"
                " what exceeds three times the mean of its block, or every=10 to keep the threshold of a top-k for ten"
                " launches."
            )
        least, every = self.least, self.every
        if least is not None and (isinstance(least, bool) or not isinstance(least, (int, float)) or not least >= 0):
            raise ValueError(f"least={least!r} is out of range: it must not be negative. 3.0 is three times the mean.")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(
                f"every={every!r} is out of range: it must be a whole number of at least 1. 10 keeps a threshold for"
                " ten launches."
            )

    @override
    def varies(self) -> bool:
        """Returns whether a threshold is kept."""
        return self.every is not None

    @override
    def wire_bytes(self, numel: int) -> int:
        """Returns the size in bytes of the payload of ``numel`` values: the most, if a threshold is kept.

        Args:
            numel: Number of values, at least 1.
        """
        return super().wire_bytes(numel) + (_count_bytes(numel) if self.varies() else 0)

    @override
    def tuning(self, values: Tensor, before: Tensor | None) -> Tensor | None:
        """Returns for how many launches the thresholds have been used, this one included, and those of all blocks."""
        if self.every is None:
            return None
        if before is not None and before[0] < self.every:
            kept = before.clone()
            kept[0] += 1
            return kept
        made = [values.new_ones(1)]
        for blocks in _blocks(values):
            magnitudes = blocks.abs()
            made.append(magnitudes.gather(1, _largest(magnitudes, self._kept(blocks.size(1)))).amin(1))
        return torch.cat(made)

    @override
    def tuned(self, tuning: Tensor | None) -> "Threshold":
        """Returns the compression with thresholds."""
        if tuning is None:
            return self
        tuned = copy.copy(self)
        object.__setattr__(tuned, "thresholds", tuning[1:])
        return tuned

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Chooses what exceeds the thresholds and encodes it.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``.

        Returns:
            The payload, a uint8 tensor on the same device.
        """
        if not self.varies():
            return super().encode(values)
        thresholds, done = self.thresholds, 0
        if thresholds is None:
            return self.tuned(self.tuning(values, None)).encode(values)
        counts, positions, chosen = [], [], []
        for blocks in _blocks(values):
            above = self._above(blocks.abs(), thresholds[done : done + len(blocks), None])
            counts.append(above.sum(1))
            positions.append(above.nonzero()[:, 1])
            chosen.append(blocks[above])
            done += len(blocks)
        lengths, sent = torch.cat(counts), torch.cat(chosen)
        head = torch.stack((lengths & 255, lengths >> 8), dim=1).to(torch.uint8).view(-1)
        # A compression has no payload of no values.
        tail = [self.values.encode(sent)] if len(sent) else []
        return torch.cat((head, _packed(torch.cat(positions)), *tail))

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Puts the values that were sent into their places, and zeros elsewhere.

        Args:
            payload: Contiguous uint8 tensor: what `encode` returned, and perhaps more behind it.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """
        if not self.varies():
            super().decode(payload, out)
            return
        places, rest = _places(payload, out)
        chosen = out.new_empty(len(places))
        if len(places):
            self.values.decode(rest[: self.values.wire_bytes(len(places))], chosen)
        out.zero_()[places] = chosen

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Decodes one stretch after the other; all at once, if a threshold is kept."""
        return Compression.stretches(self, payload, numel) if self.varies() else super().stretches(payload, numel)

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        """Tells which values were sent, and not as zero."""
        if self.varies():
            places, _ = _places(payload, out)
            out.zero_()[places] = 1.0
        else:
            self.decode(payload, out)
            out.copy_(out != 0)

    @override
    def sent(self, chosen: Tensor, blocks: Tensor) -> Tensor:
        """Returns the chosen values, with zeros in place of the small ones.

        The mean is taken in float64, whose rounding errors are too small to matter.
        """
        assert self.least is not None, "what is kept encodes by itself"
        means = blocks.abs().mean(1, keepdim=True, dtype=torch.float64)
        return chosen.where(chosen.abs() >= means * self.least, 0)

    def _above(self, magnitudes: Tensor, thresholds: Tensor) -> Tensor:
        """Tells which values of each block are sent: what reaches its threshold, but no more than the largest."""
        above, most = (magnitudes >= thresholds) & (magnitudes > 0), self._kept(magnitudes.size(1))
        if bool((above.sum(1) > most).any()):
            above &= torch.zeros_like(above).scatter_(1, _largest(magnitudes, most), True)
        return above


def _blocks(values: Tensor) -> Iterator[Tensor]:
    """Yields views of the values, a block to a row: stretches of whole blocks, then the rest as one short block."""
    for where in _stretches(values.numel(), values.device):
        is_whole = (where.stop - where.start) % BLOCK == 0
        yield values[where].view(-1, BLOCK) if is_whole else values[where].view(1, -1)


def _stretches(numel: int, device: torch.device) -> Iterator[slice]:
    """Yields stretches of whole blocks, then the rest, which is one short block."""
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, chunk_length(device)):
        yield slice(start, min(start + chunk_length(device), whole))
    if whole < numel:
        yield slice(whole, numel)


def _largest(magnitudes: Tensor, kept: int) -> Tensor:
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


def _packed_bytes(count: int) -> int:
    """Returns the bytes of so many positions."""
    return -(-count * 3 // 2)


def _packed(positions: Tensor) -> Tensor:
    """Writes positions in a block, two in three bytes."""
    pairs = F.pad(positions, (0, len(positions) % 2)).to(torch.int32).view(-1, 2)
    pairs = pairs[:, 0] | pairs[:, 1] << 12
    packed = torch.stack((pairs & 255, pairs >> 8 & 255, pairs >> 16), dim=1).to(torch.uint8).view(-1)
    return packed[: _packed_bytes(len(positions))]


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """Reads back so many positions."""
    low, middle, high = F.pad(packed, (0, -len(packed) % 3)).to(torch.int64).view(-1, 3).unbind(1)
    pairs = low | middle << 8 | high << 16
    return torch.stack((pairs & 4095, pairs >> 12), dim=1).view(-1)[:count]


def _count_bytes(numel: int) -> int:
    return 2 * -(-numel // BLOCK)


def _places(payload: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where the values of a payload belong, and what follows their positions."""
    head, rest = payload.tensor_split([_count_bytes(out.numel())])
    low, high = head.view(-1, 2).to(torch.int64).unbind(1)
    blocks = torch.arange(len(low), device=out.device).repeat_interleave(low | high << 8)
    positions, rest = rest.tensor_split([_packed_bytes(len(blocks))])
    return blocks * BLOCK + _unpacked(positions, len(blocks)), rest
