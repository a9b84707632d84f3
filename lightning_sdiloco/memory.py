"""Memory for a flight's long vectors, reused for the next flight or returned to the system.

[Note: spare pages] The system fills a new page with zeros, which takes longer than most passes over
the data. Therefore, the pages of a finished flight are kept for the next flight, up to the size
that callers request with `SparePages`. If the next flight needs different sizes, spare pages are
released while new pages are allocated. The total, including spare pages, therefore hardly exceeds
the largest amount that was ever in use. The small margin above this amount is enough for a few
messages. Without it, these messages would cause the pages of a long vector to be released and
allocated again. Without spare pages, a launch and its landing take 1.4, 1.1 and 1.3 times as long
with 0.5, 2.1 and 8.4 million parameters, measured with two processes on one machine.
"""

import ctypes
import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

# Shorter vectors use the allocator, which keeps freed memory for later.
_LONG = 1 << 18
# Huge pages, of 2 MiB each, halve the time of the first write.
_HUGE = 1 << 22


def new_vector(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns an uninitialised vector."""
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < _LONG or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.frombuffer(_SPARES.lend(size), dtype=dtype, count=numel)


def give_back_free_memory() -> None:
    """Returns the unused memory of the host's allocator to the system, if possible."""
    # glibc keeps free memory between blocks in use. Other C libraries may lack this function, or
    # there is no such library.
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class SparePages:
    """Keeps unused pages for later vectors as long as this object exists."""

    def __init__(self, size: int) -> None:
        _SPARES.request(id(self), size)
        weakref.finalize(self, _SPARES.request, id(self), 0).atexit = False


class _Spares:
    """A pool that keeps returned pages as long as a caller requests this.

    A finalizer can run wherever memory is allocated, even inside this class. If the lock is already
    held, the finalizer does not keep the pages.
    """

    def __init__(self) -> None:
        # The bytes that each caller requests to keep, and the bytes of each view in use.
        self._requested: dict[int, int] = {}
        self._lent: dict[int, int] = {}
        # The most bytes that were ever in use.
        self._most = 0
        self._pages: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def request(self, caller: int, size: int) -> None:
        """Records the number of bytes that a caller wants to keep."""
        self._requested[caller] = size
        if not size:
            del self._requested[caller]
        self._change([])

    def lend(self, size: int) -> memoryview:
        """Returns pages of at least ``size`` bytes, which return to the pool when they are no
        longer used.
        """
        pages = self._change([], size) or _new_pages(size)
        lent = memoryview(pages)
        self._lent[id(lent)] = len(pages)
        weakref.finalize(lent, self._take_back, id(lent), pages).atexit = False
        self._most = max(self._most, self._in_use)
        self._change([])
        return lent

    @property
    def _in_use(self) -> int:
        return sum(list(self._lent.values()))

    def _take_back(self, lent: int, pages: mmap.mmap) -> None:
        del self._lent[lent]
        self._change([pages])

    def _change(self, back: list[mmap.mmap], size: int = 0) -> mmap.mmap | None:
        """Keeps returned pages, or takes the smallest spare pages that fit a given size."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._pages += back
            if size:
                fitting = [
                    pages for pages in self._pages if size <= len(pages) <= size + size // 16
                ]
                best = min(fitting, key=len, default=None)
                self._pages = [pages for pages in self._pages if pages is not best]
                return best
            # Release pages that no caller requests, and pages far beyond the most ever in use, the
            # oldest first.
            requested = sum(list(self._requested.values()))
            limit = min(requested, self._most + requested // 5 - self._in_use)
            excess = sum(map(len, self._pages)) - limit
            while excess > 0 and self._pages:
                excess -= len(self._pages.pop(0))
            return None
        finally:
            self._lock.release()


_SPARES = _Spares()


def _new_pages(size: int) -> mmap.mmap:
    # Private: a forked process gets a copy, as of all other memory.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        # Some kernels support only one page size.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
