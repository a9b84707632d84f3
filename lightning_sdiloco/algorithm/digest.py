"""A number that stands for the bits of a tensor, by which ranks see whether they hold the same values.

On a CPU, ``digest.c`` adds up words of 32 bits in one pass where it could be compiled; see [Note: compiled in the
background].
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lightning_sdiloco.memory import new_vector
from lightning_sdiloco.native import NativeLibrary

# How many words are weighed at once: limits the scratch memory to a few megabytes, which stay in the cache of a CPU. An
# accelerator takes more, or it would spend its time with the launches of kernels.
_CHUNK = 1 << 18
_CHUNK_ON_DEVICE = 1 << 23
_ROW = 1 << 9


def digest(values: Tensor, start: int = 0) -> int:
    """Returns the digest of a tensor: the sum of its words, each weighed by its position, modulo 2**64.

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
    words = _words(values.detach())
    is_plain = type(words) is Tensor and words.device.type == "cpu" and words.dtype == torch.int32
    native = NATIVE.get() if is_plain else None
    return _added_up(words, start) if native is None else _in_one_pass(native, words, start)


def _added_up(words: Tensor, start: int) -> int:
    """Returns the digest of words by operations of torch."""
    length = _CHUNK if words.device.type == "cpu" else _CHUNK_ON_DEVICE
    scratch = new_vector(min(length, words.numel()), words.device, torch.int64)
    # Added up on the device, modulo 2**64, so that the host waits for it once.
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, words.numel(), length):
        chunk = words[first : first + length]
        _weigh(scratch[: chunk.numel()].copy_(chunk), start + first, total)
    return int(total)


def _in_one_pass(native: ctypes.CDLL, words: Tensor, start: int) -> int:
    total = ctypes.c_int64()
    native.digest_words(words.data_ptr(), words.numel(), start, ctypes.byref(total))
    return total.value


def _weigh(words: Tensor, start: int, total: Tensor) -> None:
    """Adds to a total the sum of all words, each times its weight: twice its position plus 1."""
    whole = words.numel() // _ROW * _ROW
    for part, at in ((words[:whole].view(-1, _ROW), start), (words[whole:].view(1, -1), start + whole)):
        rows = torch.arange(len(part), device=part.device) * _ROW + at
        columns = torch.arange(part.size(1), device=part.device)
        total += (part.sum(1) * (2 * rows + 1)).sum()
        total += (part.sum(0) * (2 * columns)).sum()


def combined(digests: list[int]) -> int:
    """Returns the digest of a whole, given the digests of its shards."""
    return _wrapped(sum(digests))


def _words(values: Tensor) -> Tensor:
    flat = values.contiguous().view(-1)
    size = flat.element_size()
    return flat.view(torch.int32) if size % 4 == 0 else flat.view(torch.int16 if size == 2 else torch.uint8)


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def _is_proven(native: ctypes.CDLL) -> bool:
    """Tells whether a library gives the digests of the operations of torch, for words of all kinds."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (70_001,), generator=generator, device="cpu", dtype=torch.int32)
    words[::7] = -1
    return all(_in_one_pass(native, words, start) == _added_up(words, start) for start in (0, 2**40 + 3))


NATIVE = NativeLibrary(
    Path(__file__).with_suffix(".c"),
    {"digest_words": (ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p)},
    _is_proven,
)
"""The same in C, for tensors on a CPU."""
