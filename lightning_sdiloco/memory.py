"""Memory of long vectors that lives as long as a flight, and then goes back to the system at once."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# Shorter ones stay in memory that the allocator keeps for what comes next.
_LONG = 1 << 18
# Huge pages halve the time of the first write. They have 2 MiB.
_HUGE = 1 << 22


def new_vector(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns an uninitialised vector.

    The host's allocator keeps vectors of up to 32 MiB when they are freed, in every thread for itself: the threads of
    the background would hold several times what is in flight. A long vector on the host therefore has pages of its own.

    Args:
        numel: Number of values.
        device: Where.
        dtype: Of what type.
    """
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < _LONG or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype, device=device)
    # Private: a process that is forked gets a copy, as it does of all other memory.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        # Some kernels have pages of one size only.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)
