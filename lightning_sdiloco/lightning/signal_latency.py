"""Warns at the start if a signal would be obeyed late."""

import logging
import math
import time
from statistics import median

from lightning_sdiloco.algorithm import Schedule

_log = logging.getLogger(__name__)

# The first inner steps are slow for reasons of their own. The median of a few more is enough.
_FIRST, _LAST = 3, 8

_LONG_SECONDS = 60.0
_SAVING_SECONDS = 60


class SignalLatency:
    """Measures the first inner steps of a fit, and warns if a signal may wait for long.

    Args:
        schedule: When fragments launch and land.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._times: list[float] = []

    def step(self, inner_steps: int) -> None:
        """Notes the time of an inner step. After the first few it does nothing.

        Args:
            inner_steps: Inner steps so far.
        """
        if len(self._times) > _LAST:
            return
        self._times.append(time.monotonic())
        if len(self._times) > _LAST:
            times = self._times[_FIRST:]
            told = warning(self._schedule, inner_steps, median(b - a for a, b in zip(times, times[1:], strict=False)))
            if told:
                _log.warning(told)


def warning(schedule: Schedule, inner_steps: int, step_seconds: float) -> str:
    """Returns a warning of how long a signal may wait; an empty text if that is not long.

    Args:
        schedule: When fragments launch and land.
        inner_steps: Inner steps so far.
        step_seconds: How long one takes.

    Examples:
        >>> warning(Schedule(100, 5, 1), 8, step_seconds=0.1)
        ''
        >>> text = warning(Schedule(100, 5, 1), 108, step_seconds=1.0)
        >>> "up to 105 inner steps, which take about 105 s (1 s each)" in text, "--signal=USR1@170" in text
        (True, True)
    """
    # The first round is the longest; it counts only while it is still going on.
    steps = schedule.longest_wait(inner_steps)
    seconds = steps * step_seconds
    if seconds <= _LONG_SECONDS:
        return ""
    early = math.ceil((seconds + _SAVING_SECONDS) / 10) * 10
    return (
        "A termination signal ends the fit when a launch that follows it has landed: after up to"
        f" {steps} inner steps, which take about {seconds:.0f} s ({step_seconds:.2g} s each). Let it come early enough,"
        f" under SLURM with --signal=USR1@{early}, which leaves a minute for saving. More fragments or a smaller"
        " sync_every make it shorter."
    )
