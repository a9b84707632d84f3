"""Sparse compressions, which send only a few values, in encoded form. All other values are decoded
as zero.

`TopK` and `Threshold` send the largest values of each block and their positions. `RandomK` and
`RandomBlock` send random values. All groups pick the same random values, so no positions are sent.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.compression.base import (
    Compression,
    State,
    Traits,
    chunk_length,
    is_number,
    is_positive_int,
)
from lightning_sdiloco.memory import new_vector

Self = TypeVar("Self", bound="_Chance")

BLOCK = 4096
"""The number of values in a block, from which the largest are chosen. A position takes 12 bits."""

_GROUP = 8  # values of a block in a group; the search starts with the largest value of each group


@dataclass(frozen=True, repr=False)
class TopK(Compression):
    """Sends the largest ``share`` of every block of 4096 values, with 12 bits per position. Another
    compression encodes the values.

    For each block, either an even number of values or the whole block is sent. A payload starts
    with the positions, in ascending order within a block, with two positions packed into three
    bytes. The encoded values follow in the same order.

    Args:
        share: The share of values to send, above 0 and at most 1.
        values: The compression of the values that are sent.
        over: The divisor for the sum of each value. ``"groups"`` divides by the number of groups
            that count. ``"senders"`` divides by the number of these groups that sent the value, as
            in SparseLoCo's code (arXiv 2508.15706). ``"senders"`` needs a smaller outer learning
            rate and does not work with two-shot exchanges.

    Raises:
        ValueError: If ``share`` or ``over`` is out of range, or if ``values`` is not a compression.

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
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ValueError(
                f"share={self.share!r} is out of range: it must be above 0 and at most 1. For"
                " example, 0.02 sends 2 % of the values."
            )
        _check_values(self.values, "chooses which values it sends")
        if self.over not in ("groups", "senders"):
            raise ValueError(
                f"over={self.over!r} is unknown. Choose 'groups' (the default) to divide each"
                " value's sum by the number of all groups that count, or 'senders' to divide it by"
                " the number of groups that sent the value."
            )

    @override
    def __repr__(self) -> str:
        arguments = list[str]()
        for argument in fields(self):
            value = getattr(self, argument.name)
            if argument.repr and value != argument.default:
                arguments.append(f"{argument.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    @property
    @override
    def traits(self) -> Traits:
        return Traits(
            share=float(self.share), suits_sums=False, counts_senders=self.over == "senders"
        )

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        self._put(payload, out.new_ones(self._count(out.numel())), out)

    @override
    def wire_bytes(self, numel: int) -> int:
        count = self._count(numel)
        return _packed_bytes(count) + self.values.wire_bytes(count)

    @override
    def encode(self, values: Tensor) -> Tensor:
        count = self._count(values.numel())
        chosen = values.new_empty(count)
        packed = values.new_empty(_packed_bytes(count), dtype=torch.uint8)
        start = 0
        for blocks in _blocks(values):
            positions = _largest(blocks.abs(), self._number_sent(blocks.size(1)))
            positions = positions.sort(dim=1).values
            end = start + positions.numel()
            chosen[start:end] = self.sent(blocks.gather(1, positions), blocks).view(-1)
            packed[_packed_bytes(start) : _packed_bytes(end)] = _packed(positions.view(-1))
            start = end
        return torch.cat((packed, self.values.encode(chosen)))

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._put(payload, self._chosen(payload, out.numel()), out)

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        chosen = self._chosen(payload, numel)
        start = 0
        scratch = new_vector(min(numel, chunk_length(payload.device)), payload.device)
        for stretch in _stretches(numel, payload.device):
            values = scratch[: stretch.stop - stretch.start]
            end = start + self._count(len(values))
            self._put(payload[_packed_bytes(start) :], chosen[start:end], values)
            start = end
            yield stretch, values

    def _chosen(self, payload: Tensor, numel: int) -> Tensor:
        """Decodes the sent values."""
        count = self._count(numel)
        assert payload.numel() == self.wire_bytes(numel), (
            "the payload belongs to a vector of another size"
        )
        chosen = torch.empty(count, device=payload.device)
        self.values.decode(payload[_packed_bytes(count) :], chosen)
        return chosen

    def sent(self, chosen: Tensor, blocks: Tensor) -> Tensor:
        """Returns the values to send, given the values that were chosen in each block."""
        return chosen

    def _put(self, payload: Tensor, chosen: Tensor, out: Tensor) -> None:
        """Writes the chosen values to their positions and zeros to all other positions."""
        out.zero_()
        start = 0
        for blocks in _blocks(out):
            shape = (len(blocks), self._number_sent(blocks.size(1)))
            count = shape[0] * shape[1]
            end = start + count
            packed = payload[_packed_bytes(start) : _packed_bytes(end)]
            positions = _unpacked(packed, count).view(shape)
            blocks.scatter_(1, positions, chosen[start:end].view(shape))
            start = end

    def _number_sent(self, size: int) -> int:
        """Returns the number of values to send from a block. The number is even so that the
        positions of the next block start at a byte boundary.
        """
        # The share is parsed from its decimal form, because 0.03 as a float is not exactly 3 %.
        number = -(-Fraction(str(self.share)) * size // 1)
        return min(int(number + number % 2), size)

    def _count(self, numel: int) -> int:
        """Returns how many values of a vector are sent."""
        count = numel // BLOCK * self._number_sent(BLOCK)
        if numel % BLOCK:
            count += self._number_sent(numel % BLOCK)
        return count


@dataclass(frozen=True, repr=False)
class Threshold(TopK):
    """Sends the values that reach a threshold, but no more per block of 4096 values than `TopK`.

    With ``least``, the threshold is a multiple of the block's mean magnitude. Smaller values are
    sent as zeros, so ``share`` determines the size of every payload.

    With ``every``, each block keeps its threshold for that many launches. The threshold is the
    smallest value that an exact top-k of ``share`` chooses in the first of these launches (DCT,
    arXiv 2010.08899). Smaller values are not sent, so payloads shrink together with outer
    gradients, and ``share`` is an upper bound. New thresholds take effect at a landing if the group
    counts in the mean. Checkpoints contain the thresholds. A launch without thresholds chooses new
    ones.

    With `ErrorFeedback`, small values accumulate until they reach the threshold.

    Args:
        share: The largest share of values to send, above 0 and at most 1.
        values: The compression of the values that are sent.
        least: The smallest magnitude to send, as a multiple of the block's mean magnitude. Must be
            at least 0.
        every: The number of launches for which a threshold is kept, at least 1. Pass either
            ``every`` or ``least``.
        over: The divisor, as in `TopK`. With ``least``, a group that sends a zero does not count as
            a sender.

    Raises:
        ValueError: If an argument is out of range, if ``values`` is not a compression, or if
            ``least`` and ``every`` are both given or both missing.

    Examples:
        >>> from lightning_sdiloco.compression import Float32
        >>> sparse, decoded = Threshold(0.5, Float32(), least=1.5), torch.empty(4)
        >>> sparse.decode(sparse.encode(torch.tensor([1.0, -2.0, 0.5, 1.0])), decoded)
        >>> decoded.tolist()
        [0.0, -2.0, 0.0, 0.0]
        >>> first, later = torch.tensor([1.0, -2.0, 0.5, 1.5]), torch.tensor([1.0, -1.75, 0.5, 0.25])
        >>> kept = Threshold(0.5, Float32(), every=10)
        >>> payload, state = kept.encode_launch(first, State(), mixing=0.0)
        >>> len(payload), len(kept.encode_launch(later, state, mixing=0.0)[0])
        (13, 8)
    """

    least: float | None = None
    every: int | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.least is None) == (self.every is None):
            raise ValueError(
                f"Threshold(least={self.least!r}, every={self.every!r}) needs exactly one of these"
                " arguments. Pass least=3.0 to send values above three times the mean of their"
                " block, or every=10 to keep the threshold of a top-k for ten launches."
            )
        if self.least is not None and not (is_number(self.least) and self.least >= 0):
            raise ValueError(
                f"least={self.least!r} is out of range: it must not be negative. For example, 3.0"
                " means three times the mean."
            )
        if self.every is not None and not is_positive_int(self.every):
            raise ValueError(
                f"every={self.every!r} is out of range: it must be a whole number of at least 1."
                " For example, 10 keeps a threshold for ten launches."
            )

    @property
    @override
    def traits(self) -> Traits:
        return super().traits._replace(varies=self.every is not None)

    @override
    def wire_bytes(self, numel: int) -> int:
        size = super().wire_bytes(numel)
        if self.every is not None:
            size += _count_bytes(numel)
        return size

    @override
    def encode_launch(self, gradient: Tensor, state: State, mixing: float) -> tuple[Tensor, State]:
        if self.every is None:
            return self.encode(gradient), State()
        tuning = state.tuning
        if tuning is None or tuning[0] >= self.every:
            tuning = self._first_tuning(gradient)
        else:
            tuning = tuning.clone()
            tuning[0] += 1
        return self._encode_above(gradient, tuning[1:]), State(tuning=tuning)

    def _first_tuning(self, values: Tensor) -> Tensor:
        """Returns the number of launches so far (1), followed by the threshold of each block."""
        parts = [values.new_ones(1)]
        for blocks in _blocks(values):
            magnitudes = blocks.abs()
            positions = _largest(magnitudes, self._number_sent(blocks.size(1)))
            parts.append(magnitudes.gather(1, positions).amin(1))
        return torch.cat(parts)

    @override
    def encode(self, values: Tensor) -> Tensor:
        if self.every is None:
            return super().encode(values)
        return self._encode_above(values, self._first_tuning(values)[1:])

    def _encode_above(self, values: Tensor, thresholds: Tensor) -> Tensor:
        """Encodes the values that reach the threshold of their block."""
        counts = list[Tensor]()
        positions = list[Tensor]()
        chosen = list[Tensor]()
        start = 0
        for blocks in _blocks(values):
            end = start + len(blocks)
            is_sent = self._reach(blocks.abs(), thresholds[start:end, None])
            counts.append(is_sent.sum(1))
            positions.append(is_sent.nonzero()[:, 1])
            chosen.append(blocks[is_sent])
            start = end
        numbers = torch.cat(counts)
        head = torch.stack((numbers & 255, numbers >> 8), dim=1).to(torch.uint8).view(-1)
        parts = [head, _packed(torch.cat(positions))]
        sent = torch.cat(chosen)
        # Compressions cannot encode an empty vector.
        if len(sent):
            parts.append(self.values.encode(sent))
        return torch.cat(parts)

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        if self.every is None:
            super().decode(payload, out)
            return
        places, encoded = _places(payload, out)
        sent = out.new_empty(len(places))
        if len(places):
            self.values.decode(encoded[: self.values.wire_bytes(len(places))], sent)
        out.zero_()[places] = sent

    @override
    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        if self.every is not None:
            return Compression.stretches(self, payload, numel)
        return super().stretches(payload, numel)

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        if self.every is not None:
            places, _ = _places(payload, out)
            out.zero_()[places] = 1.0
        else:
            self.decode(payload, out)
            out.copy_(out != 0)

    @override
    def sent(self, chosen: Tensor, blocks: Tensor) -> Tensor:
        assert self.least is not None, "a kept threshold has its own payload"
        means = blocks.abs().mean(1, keepdim=True, dtype=torch.float64)
        return chosen.where(chosen.abs() >= means * self.least, 0)

    def _reach(self, magnitudes: Tensor, thresholds: Tensor) -> Tensor:
        """Returns a mask of the values to send: in each block, the largest values that reach the
        threshold.
        """
        is_sent = (magnitudes >= thresholds) & (magnitudes > 0)
        most = self._number_sent(magnitudes.size(1))
        if bool((is_sent.sum(1) > most).any()):
            is_sent &= torch.zeros_like(is_sent).scatter_(1, _largest(magnitudes, most), True)
        return is_sent


def _blocks(values: Tensor) -> Iterator[Tensor]:
    """Yields views of the values with one block per row: stretches of whole blocks, followed by the
    remainder as a short block.
    """
    for stretch in _stretches(values.numel(), values.device):
        size = min(BLOCK, stretch.stop - stretch.start)
        yield values[stretch].view(-1, size)


def _stretches(numel: int, device: torch.device) -> Iterator[slice]:
    """Yields stretches of whole blocks, followed by the remainder, which is a short block."""
    end_of_blocks = numel // BLOCK * BLOCK
    for start in range(0, end_of_blocks, chunk_length(device)):
        yield slice(start, min(start + chunk_length(device), end_of_blocks))
    if end_of_blocks < numel:
        yield slice(end_of_blocks, numel)


def _largest(magnitudes: Tensor, number: int) -> Tensor:
    """Returns the positions of the largest magnitudes in every row."""
    size = magnitudes.size(1)
    groups = size // _GROUP
    if size % _GROUP or number * 2 > groups:
        return magnitudes.topk(number, dim=1, sorted=False).indices
    # The largest magnitudes are all in the groups with the largest maxima, and there are far fewer
    # maxima than magnitudes.
    maxima = magnitudes.view(-1, _GROUP, groups).amax(1)
    chosen_groups = maxima.topk(number, dim=1, sorted=False).indices
    members = torch.arange(0, size, groups, device=magnitudes.device)
    candidates = (chosen_groups[:, None] + members[:, None]).view(len(magnitudes), -1)
    best = magnitudes.gather(1, candidates).topk(number, dim=1, sorted=False).indices
    return candidates.gather(1, best)


def _packed_bytes(count: int) -> int:
    """Returns the number of bytes that ``count`` packed positions take."""
    return -(-count * 3 // 2)


def _packed(positions: Tensor) -> Tensor:
    """Packs positions within blocks, storing two positions in three bytes."""
    pairs = F.pad(positions, (0, len(positions) % 2)).to(torch.int32).view(-1, 2)
    pairs = pairs[:, 0] | pairs[:, 1] << 12
    triples = torch.stack((pairs & 255, pairs >> 8 & 255, pairs >> 16), dim=1)
    return triples.to(torch.uint8).view(-1)[: _packed_bytes(len(positions))]


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """Unpacks ``count`` positions."""
    triples = F.pad(packed, (0, -len(packed) % 3)).to(torch.int64).view(-1, 3)
    low, middle, high = triples.unbind(1)
    pairs = low | middle << 8 | high << 16
    return torch.stack((pairs & 4095, pairs >> 12), dim=1).view(-1)[:count]


def _count_bytes(numel: int) -> int:
    return 2 * -(-numel // BLOCK)


def _places(payload: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the positions of a payload's values, and the encoded values."""
    head, tail = payload.tensor_split([_count_bytes(out.numel())])
    low, high = head.view(-1, 2).to(torch.int64).unbind(1)
    blocks = torch.arange(len(low), device=out.device).repeat_interleave(low | high << 8)
    packed, encoded = tail.tensor_split([_packed_bytes(len(blocks))])
    return blocks * BLOCK + _unpacked(packed, len(blocks)), encoded


def _check_values(values: object, why_not: str) -> None:
    if not isinstance(values, Compression):
        raise ValueError(
            f"values={values!r} is not a compression. Pass an instance of a compression, such as"
            " Int2(), to encode the values that are sent."
        )
    if values.traits.varies:
        raise ValueError(
            f"values={values!r} {why_not}. Pass a compression that sends all values, such as"
            " Int2()."
        )


# Random places


@dataclass(frozen=True)
class _Chance(Compression):
    every: int
    values: Compression
    step: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_positive_int(self.every):
            raise ValueError(
                f"every={self.every!r} is out of range: it must be a whole number of at least 1."
                " For example, 32 sends 3 % of the values."
            )
        _check_values(
            self.values,
            "keeps a threshold for each block, but random values have no thresholds",
        )

    @override
    def at(self: Self, step: int, choice: int | None = None) -> Self:
        picked = copy.copy(self)
        object.__setattr__(picked, "step", step)
        return picked

    @property
    @override
    def traits(self) -> Traits:
        # All groups pick the same values, so the other traits are inherited from the compression of
        # the values.
        traits = self.values.traits
        values = traits.values or self.values
        return traits._replace(varies=False, remembers=False, values=values, hub_code=None)

    def _count(self, numel: int) -> int:
        """Returns how many values of a vector are sent."""
        return -(-numel // self.every)

    @override
    def places(self, payload: Tensor, out: Tensor) -> None:
        sent = out.new_empty(self._count(out.numel()))
        self.values.places(payload, sent)
        self.put(sent, out.zero_())

    @override
    def wire_bytes(self, numel: int) -> int:
        return self.values.wire_bytes(self._count(numel))

    @override
    def encode(self, values: Tensor) -> Tensor:
        return self.values.encode(self.picked(values))

    @override
    def decode(self, payload: Tensor, out: Tensor) -> None:
        sent = out.new_empty(self._count(out.numel()))
        self.values.decode(payload, sent)
        self.put(sent, out.zero_())

    @override
    def mean(self, sent: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
        mean = new_vector(self._count(out.numel()), out.device)
        self.values.mean(sent, mean)
        self.put(mean, out.zero_())

    @abstractmethod
    def picked(self, values: Tensor) -> Tensor:
        """Returns the randomly picked values in order, as a contiguous tensor."""

    @abstractmethod
    def put(self, sent: Tensor, out: Tensor) -> None:
        """Writes the picked values to their positions."""


@dataclass(frozen=True)
class RandomK(_Chance):
    """Sends one random value out of every ``every`` consecutive values, encoded by another
    compression.

    The choice depends on the inner step of the launch, so all groups send the same values, and
    every launch sends different values.

    Args:
        every: The number of values out of which one is sent.
        values: The compression of the values that are sent.

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
        picked = [cells.gather(1, offsets).view(-1) for cells, offsets in self._cells(values)]
        return torch.cat(picked)

    @override
    def put(self, sent: Tensor, out: Tensor) -> None:
        start = 0
        for cells, offsets in self._cells(out):
            end = start + len(cells)
            cells.scatter_(1, offsets, sent[start:end].view(-1, 1))
            start = end

    def _cells(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of the values with one cell per row, and the picked position in each cell.
        The last cell may be short.
        """
        full_cells = len(values) // self.every
        length = max(chunk_length(values.device) // self.every, 1)
        for start in range(0, full_cells, length):
            end = min(start + length, full_cells)
            cells = values[start * self.every : end * self.every].view(-1, self.every)
            numbers = torch.arange(start, end, device=values.device)
            yield cells, _hashed(numbers, self.step).remainder_(self.every)[:, None]
        short = values[full_cells * self.every :]
        if len(short):
            numbers = torch.tensor([full_cells], device=values.device)
            yield short.view(1, -1), _hashed(numbers, self.step).remainder_(len(short))[:, None]


@dataclass(frozen=True)
class RandomBlock(_Chance):
    """Sends one of ``every`` equal stretches of the vector, chosen at random and encoded by another
    compression.

    The choice depends on the inner step of the launch, so all groups send the same stretch.

    Args:
        every: The number of stretches into which the vector is divided.
        values: The compression of the stretch.

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
        return self._stretch(values)

    @override
    def put(self, sent: Tensor, out: Tensor) -> None:
        self._stretch(out).copy_(sent)

    def _stretch(self, values: Tensor) -> Tensor:
        length = -(-len(values) // self.every)
        number = int(_hashed(torch.zeros(1, dtype=torch.int64), self.step)) % self.every
        # The last stretch may overlap the previous stretch, so all stretches have the same length.
        start = min(number * length, len(values) - length)
        return values[start : start + length]


def _hashed(numbers: Tensor, step: int) -> Tensor:
    """Hashes whole numbers and the inner step to 32 pseudorandom bits that are the same on every
    device.
    """
    # Products may overflow 64 bits, but only their low 32 bits are kept, and these are correct.
    hashed = (numbers + 1) * 0x9E3779B1 + step * 0x85EBCA77
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed &= 0xFFFFFFFF
        hashed ^= hashed >> shift
        hashed *= factor
    return hashed & 0xFFFFFFFF
