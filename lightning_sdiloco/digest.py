"""A number that stands for the bits of a tensor, by which ranks see whether they hold the same values."""

import torch
from torch import Tensor

# Values that are weighed at once: bounds the scratch memory to a few megabytes.
_CHUNK = 1 << 18


def digest(values: Tensor, start: int = 0) -> int:
    """The digest of a tensor: the sum of its words, each weighed by its position, modulo 2**64.

    Digests of consecutive shards add up to the digest of the whole, so that a group can combine those of its ranks.

    Args:
        values: A tensor of any shape and dtype.
        start: Position of its first word in the whole.

    Returns:
        A signed 64-bit number.

    Examples:
        >>> whole = torch.arange(10.0)
        >>> digest(whole) == combined([digest(whole[:4]), digest(whole[4:], start=4)])
        True
        >>> digest(whole) == digest(whole.flip(0))
        False
    """
    total = 0
    words = _words(values.detach())
    for first in range(0, words.numel(), _CHUNK):
        chunk = words[first : first + _CHUNK].to(torch.int64)
        position = torch.arange(start + first, start + first + chunk.numel(), device=chunk.device)
        # An odd weight is invertible modulo 2**64: no change of a single word goes unseen.
        total += int((chunk * (2 * position + 1)).sum())
    return _wrapped(total)


def combined(digests: list[int]) -> int:
    """The digest of a whole from the digests of its shards."""
    return _wrapped(sum(digests))


def _words(values: Tensor) -> Tensor:
    flat = values.contiguous().view(-1)
    size = flat.element_size()
    return flat.view(torch.int32) if size % 4 == 0 else flat.view(torch.int16 if size == 2 else torch.uint8)


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63
