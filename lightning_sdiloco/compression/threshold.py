"""Sends what exceeds a threshold: that of the block as it is now, or one that is kept for some launches."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression.topk import BLOCK, TopK, blocks_in, largest, pack, packed_bytes, unpack


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
        for blocks in blocks_in(values):
            magnitudes = blocks.abs()
            made.append(magnitudes.gather(1, largest(magnitudes, self.kept(blocks.size(1)))).amin(1))
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
        for blocks in blocks_in(values):
            above = self._above(blocks.abs(), thresholds[done : done + len(blocks), None])
            counts.append(above.sum(1))
            positions.append(above.nonzero()[:, 1])
            chosen.append(blocks[above])
            done += len(blocks)
        lengths, sent = torch.cat(counts), torch.cat(chosen)
        head = torch.stack((lengths & 255, lengths >> 8), dim=1).to(torch.uint8).view(-1)
        # A compression has no payload of no values.
        tail = [self.values.encode(sent)] if len(sent) else []
        return torch.cat((head, pack(torch.cat(positions)), *tail))

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
        above, most = (magnitudes >= thresholds) & (magnitudes > 0), self.kept(magnitudes.size(1))
        if bool((above.sum(1) > most).any()):
            above &= torch.zeros_like(above).scatter_(1, largest(magnitudes, most), True)
        return above


def _count_bytes(numel: int) -> int:
    return 2 * -(-numel // BLOCK)


def _places(payload: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where the values of a payload belong, and what follows their positions."""
    head, rest = payload.tensor_split([_count_bytes(out.numel())])
    low, high = head.view(-1, 2).to(torch.int64).unbind(1)
    blocks = torch.arange(len(low), device=out.device).repeat_interleave(low | high << 8)
    positions, rest = rest.tensor_split([packed_bytes(len(blocks))])
    return blocks * BLOCK + unpack(positions, len(blocks)), rest
