"""Warns at the start if a signal would be obeyed late."""

import logging
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

_log = logging.getLogger(__name__)

# The first inner steps are slow for reasons of their own. The median of a few more is enough.
_FIRST, _LAST = 3, 8

_LONG_SECONDS = 60.0
_SAVING_SECONDS = 60


class SignalLatency:
    """Measures the first inner steps of a fit, and warns if a signal may wait for long."""

    def __init__(self, longest_wait: Callable[[], int], environment: Any) -> None:
        self._longest_wait = longest_wait
        self._environment = environment
        self._times: list[float] = []

    def step(self) -> None:
        """Notes the time of an inner step. After the first few it does nothing."""
        if len(self._times) > _LAST:
            return
        self._times.append(time.monotonic())
        if len(self._times) > _LAST:
            times = self._times[_FIRST:]
            step_seconds = median(b - a for a, b in zip(times, times[1:], strict=False))
            told = warning(self._longest_wait(), step_seconds, _early_signal(self._environment))
            if told:
                _log.warning(told)


def _early_signal(environment: Any) -> str | None:
    """Returns the signal that SLURM should send early; None where it does not run the job."""
    # Only Lightning's environment for SLURM has one. Without auto_requeue it does not listen for it.
    requeue = getattr(environment, "requeue_signal", None)
    if requeue is None:
        return None
    return requeue.name.removeprefix("SIG") if environment.auto_requeue else "TERM"


def warning(steps: int, step_seconds: float, slurm_signal: str | None) -> str:
    """Returns a warning of how long a signal may wait; an empty text if that is not long.

    Args:
        steps: How many inner steps it takes at most.
        step_seconds: How long one takes.
        slurm_signal: The signal that SLURM should send early; None where it does not run the job.

    Examples:
        >>> warning(205, step_seconds=0.1, slurm_signal=None)
        ''
        >>> text = warning(105, step_seconds=1.0, slurm_signal=None)
        >>> "up to 105 inner steps, which take about 105 s (1 s each)" in text, "170 s from SIGTERM to SIGKILL" in text
        (True, True)
        >>> "sbatch --signal=USR1@170" in warning(105, step_seconds=1.0, slurm_signal="USR1")
        True
    """
    seconds = steps * step_seconds
    if seconds <= _LONG_SECONDS:
        return ""
    early = math.ceil((seconds + _SAVING_SECONDS) / 10) * 10
    give = f"Use sbatch --signal={slurm_signal}@{early}" if slurm_signal else f"Allow {early} s from SIGTERM to SIGKILL"
    return (
        "A termination signal ends the fit when a launch that follows it has landed: after up to"
        f" {steps} inner steps, which take about {seconds:.0f} s ({step_seconds:.2g} s each). {give}, which leaves a"
        " minute for saving. More fragments or a smaller sync_every make it shorter."
    )
