"""Samples the byte counter of a network interface continuously, in a separate process, to find the
busiest 100 ms.
"""

import os
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

Sample = tuple[float, int]
"""A time of ``time.perf_counter()``, which is the same clock in all processes, and the bytes sent
by then."""

WINDOW = 0.1
_EVERY = 0.004


def peak(samples: Sequence[Sample], since: float = 0.0) -> float:
    """Returns the maximum bytes per second within any window; 0 without samples.

    Examples:
        >>> peak([(0.0, 0), (0.05, 10), (0.12, 110), (0.3, 120)])
        1000.0
    """
    late = [sample for sample in samples if sample[0] >= since]
    times = [moment for moment, _ in late]
    most = 0.0
    for first, (moment, sent) in enumerate(late):
        last = max(first, bisect_left(times, moment + WINDOW) - 1)
        most = max(most, late[last][1] - sent)
    return most / WINDOW


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """Samples the interface that gloo uses inside a ``with`` block; the list is filled when it
    ends.
    """
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "samples")
        with (
            file.open("w") as out,
            Popen([sys.executable, "-S", "-E", __file__], stdout=out) as process,
        ):
            try:
                yield samples
            finally:
                process.terminate()
        for line in file.read_text().splitlines():
            moment, _, sent = line.partition(" ")
            samples.append((float(moment), int(sent)))


def _sample() -> None:
    prefix = f"{os.environ.get('GLOO_SOCKET_IFNAME', 'lo')}:"
    before = -1
    while True:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        sent = next(
            int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(prefix)
        )
        if sent != before:
            print(time.perf_counter(), sent, flush=True)
            before = sent
        time.sleep(_EVERY)


if __name__ == "__main__":
    _sample()
