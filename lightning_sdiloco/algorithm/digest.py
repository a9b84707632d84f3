"""A number that stands for the bits of a tensor, by which ranks see whether they hold the same values."""

import torch
from torch import Tensor
from torch.nn.functional import pad

# How many words are weighed at once: on a CPU they stay in its cache. An accelerator takes more, or it would spend its
# time with the launches of kernels.
_CHUNK = 1 << 17
_CHUNK_ON_DEVICE = 1 << 23


def digest(values: Tensor, start: int = 0) -> int:
    """Returns the digest of a tensor: the sum of its words, each weighed by its position, modulo 2**64.

    A word at an even position and the next one are a number of 64 bits, which is multiplied by its position plus 1.
    Digests of consecutive shards add up to the digest of the whole, so that a group can combine those of its ranks.

    Args:
        values: A tensor of any shape and dtype.
        start: Position of its first word in the whole.

    Returns:
        A signed 64-bit number.

    Examples:
        >>> whole = torch.arange(10.0)
        >>> digest(whole) == combined([digest(whole[:3]), digest(whole[3:], start=3)])
        True
        >>> digest(whole) == digest(whole.flip(0))
        False
    """
    flat = values.detach().contiguous().view(-1)
    size = flat.element_size()
    words = flat.view(torch.int32) if size % 4 == 0 else flat.view(torch.int16 if size == 2 else torch.uint8)
    on_cpu = words.device.type == "cpu"
    length = _CHUNK if on_cpu else _CHUNK_ON_DEVICE
    weights = torch.arange(1, min(length, words.numel() + 2), 2, device=words.device)
    # Added up on the device, modulo 2**64, so that the host waits for it once.
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(-(start % 2), words.numel(), length):
        chunk, before = words[max(first, 0) : first + length].to(torch.int32), max(-first, 0)
        after = (before + chunk.numel()) % 2
        if before or after or chunk.storage_offset() % 2:
            chunk = pad(chunk, (before, after))
        pairs = chunk.view(torch.int64)
        own = weights[: len(pairs)]
        total += torch.dot(pairs, own) if on_cpu else (pairs * own).sum()
        total += pairs.sum() * (start + first)
    return int(total)


def combined(digests: list[int]) -> int:
    """Returns the digest of a whole, given the digests of its shards."""
    return (sum(digests) + 2**63) % 2**64 - 2**63
