"""How long the threads of this process sleep; Linux only."""

import ctypes
import time
from pathlib import Path


def slack() -> int:
    """By how many nanoseconds sleeps of this thread may be longer than it asks for."""
    return int(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))


def woken_per_s(name: str) -> float:
    """How often a second the one thread of that name wakes up while nothing travels."""
    (task,) = (one for one in Path("/proc/self/task").iterdir() if (one / "comm").read_text().strip() == name)

    def count() -> int:
        words = (task / "status").read_text().split()
        return int(words[words.index("voluntary_ctxt_switches:") + 1])

    before, began = count(), time.perf_counter()
    time.sleep(0.5)
    return (count() - before) / (time.perf_counter() - began)
