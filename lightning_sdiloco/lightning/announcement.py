"""Tells on one line what is active, and on another, once steps have been measured, what the link has to carry.

A warning comes before them where a fit has so few rounds that the worker groups hardly exchange, and one after them
where a signal would be obeyed late.
"""

import logging
import math
import time
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_sdiloco.algorithm import CONTROL_BYTES, Schedule, all_reduce_for
from lightning_sdiloco.engine import StreamingDiLoCo, clean_name
from lightning_sdiloco.planning import readable, readable_rate, short

_log = logging.getLogger(__name__)

ENOUGH_ROUNDS = 10
"""With fewer rounds in a fit there is a warning."""

# The first inner steps are slow for reasons of their own.
_FIRST, _LAST = 3, 10

# A signal that waits for longer is told of, with so many seconds more for saving.
_LONG_SECONDS, _SAVING_SECONDS = 60.0, 60


class Announcement:
    """Says at the start what trains, and after ten inner steps how fast."""

    def __init__(self, engine: StreamingDiLoCo, module: nn.Module, environment: Any = None) -> None:
        self._engine, self._environment = engine, environment
        self._times: list[float] = []
        topology, settings = engine.topology, engine.settings
        # What a rank sends to other worker groups for each fragment, without buffers.
        others = topology.num_groups - 1
        all_reduce = all_reduce_for(settings.exchange, topology.num_groups, settings.codec, settings.landing.kept)
        numels = {clean_name(name): parameter.numel() for name, parameter in module.named_parameters()}
        shards = [-(-sum(numels[name] for name in own.names) // topology.group_size) for own in engine.fragments]
        self._bytes = [
            others * CONTROL_BYTES + all_reduce.bytes_to_others(shard, topology.group_index) for shard in shards
        ]
        least, most = readable(min(self._bytes)), readable(max(self._bytes))
        sent = least if least == most else f"{least} to {most}"
        first = next(step for step in count(engine.steps_in_rounds + 1) if engine.schedule.launches(step))
        numbers = ", ".join(
            f"{name}={value if isinstance(value, str) else format(value, 'g')}"
            for name, value in settings.numbers_and_policies.items()
        )
        rank_zero_info(
            f"Streaming DiLoCo: {_counted(topology.num_groups, 'worker group')} of"
            f" {_counted(topology.group_size, 'rank')}, {_counted(len(shards), 'fragment')},"
            f" sync_every={settings.sync_every}, overlap_steps={settings.overlap_steps}, {numbers}; each rank sends"
            f" {f'at most {most}' if settings.codec.varies() else sent} a fragment; the first launch follows inner step"
            f" {engine.inner_steps - engine.steps_in_rounds + first}."
        )

    def step(self) -> None:
        """Notes that an inner step has ended. After the first ten it does nothing."""
        if len(self._times) >= _LAST:
            return
        self._times.append(time.monotonic())
        if len(self._times) < _LAST:
            return
        times, settings = self._times[_FIRST:], self._engine.settings
        seconds = median(after - before for before, after in zip(times, times[1:], strict=False))
        window, of_link = settings.overlap_steps * seconds, ""
        if self._engine.topology.num_groups > 1 and not window:
            of_link = "; with overlap_steps=0 training waits for every fragment"
        elif self._engine.topology.num_groups > 1:
            # Where fragments follow each other faster than they land, what counts is all of them in a round.
            rate = max(max(self._bytes) / window, sum(self._bytes) / (settings.sync_every * seconds))
            of_link = (
                f"; overlap_steps={settings.overlap_steps} gives the link {short(window)} s a fragment, for which it"
                f" has to carry {readable_rate(8 * rate / 1e9)} from each rank"
            )
        rank_zero_info(f"Streaming DiLoCo: an inner step takes {short(seconds)} s{of_link}.")
        if self._environment is not None:
            self._warn_of_late_signals(seconds)

    def _warn_of_late_signals(self, step_seconds: float) -> None:
        steps = self._engine.rounds.longest_wait(self._engine.inner_steps)
        seconds = steps * step_seconds
        if seconds <= _LONG_SECONDS:
            return
        early = math.ceil((seconds + _SAVING_SECONDS) / 10) * 10
        give = f"Allow {early} s from SIGTERM to SIGKILL"
        # Only Lightning's environment for SLURM has one. Without auto_requeue it does not listen for it.
        if requeue := getattr(self._environment, "requeue_signal", None):
            name = requeue.name.removeprefix("SIG") if self._environment.auto_requeue else "TERM"
            give = f"Use sbatch --signal={name}@{early}"
        _log.warning(
            "A termination signal ends the fit when a launch that follows it has landed: after up to %d inner steps,"
            " which take about %.0f s (%.2g s each). %s, which leaves a minute for saving. More fragments or a smaller"
            " sync_every make it shorter.",
            steps,
            seconds,
            step_seconds,
            give,
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def warn_of_few_rounds(schedule: Schedule, steps: int) -> None:
    """Warns if fewer than `ENOUGH_ROUNDS` rounds fit into a run, and says which ``sync_every`` would do."""
    if (rounds := schedule.rounds_in(steps)) >= ENOUGH_ROUNDS:
        return
    advice = f"for {ENOUGH_ROUNDS} rounds it needs more inner steps"
    for sync_every in range(min(schedule.sync_every - 1, steps // ENOUGH_ROUNDS), 0, -1):
        overlap_steps = min(schedule.overlap_steps, sync_every - 1)
        if replace(schedule, sync_every=sync_every, overlap_steps=overlap_steps).rounds_in(steps) >= ENOUGH_ROUNDS:
            less = "" if overlap_steps == schedule.overlap_steps else f" and overlap_steps={overlap_steps}"
            advice = f"sync_every={sync_every}{less} would give {ENOUGH_ROUNDS}"
            break
    _log.warning(
        "With sync_every=%d only %d %s into the %d inner steps of this fit, so the worker groups hardly learn from"
        " each other: %s.",
        schedule.sync_every,
        rounds,
        "round fits" if rounds == 1 else "rounds fit",
        steps,
        advice,
    )
