"""Tells on one line what is active, and on another, once steps have been measured, what the link has to carry."""

import time
from itertools import count
from statistics import median

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_sdiloco.algorithm import CONTROL_BYTES, all_reduce_for
from lightning_sdiloco.engine import StreamingDiLoCo, clean_name
from lightning_sdiloco.planning import readable, short

# The first inner steps are slow for reasons of their own.
_FIRST, _LAST = 3, 10


class Announcement:
    """Says at the start what trains, and after ten inner steps how fast.

    Args:
        engine: The engine, before its next inner step.
        module: The model.
    """

    def __init__(self, engine: StreamingDiLoCo, module: nn.Module) -> None:
        self._engine = engine
        self._bytes = wire_bytes(engine, module)
        self._times: list[float] = []
        rank_zero_info(at_start(engine, self._bytes))

    def step(self) -> None:
        """Notes that an inner step has ended. After the first ten it does nothing."""
        if len(self._times) >= _LAST:
            return
        self._times.append(time.monotonic())
        if len(self._times) == _LAST:
            times = self._times[_FIRST:]
            seconds = median(after - before for before, after in zip(times, times[1:], strict=False))
            rank_zero_info(when_measured(self._engine, self._bytes, seconds))


def wire_bytes(engine: StreamingDiLoCo, module: nn.Module) -> list[int]:
    """Returns what a rank sends to other worker groups for each fragment, without buffers.

    Args:
        engine: The engine.
        module: Its model.
    """
    topology, settings = engine.topology, engine.settings
    others = topology.num_groups - 1
    all_reduce = all_reduce_for(settings.exchange, topology.num_groups, settings.codec, settings.mixing)
    numels = {clean_name(name): parameter.numel() for name, parameter in module.named_parameters()}
    shards = [-(-sum(numels[name] for name in own.names) // topology.group_size) for own in engine.fragments]
    return [
        others * (CONTROL_BYTES + all_reduce.payload_bytes(shard) + all_reduce.second_hop_bytes(shard))
        for shard in shards
    ]


def at_start(engine: StreamingDiLoCo, nbytes: list[int]) -> str:
    """Returns the line for the start.

    Args:
        engine: The engine.
        nbytes: What `wire_bytes` returned.
    """
    topology, settings = engine.topology, engine.settings
    began_at = engine.inner_steps - engine.steps_in_rounds
    first = next(step for step in count(engine.steps_in_rounds + 1) if engine.schedule.launches(step))
    least, most = readable(min(nbytes)), readable(max(nbytes))
    return (
        f"Streaming DiLoCo: {_counted(topology.num_groups, 'worker group')} of {_counted(topology.group_size, 'rank')},"
        f" {_counted(len(nbytes), 'fragment')}, sync_every={settings.sync_every},"
        f" overlap_steps={settings.overlap_steps}; each rank sends {least if least == most else f'{least} to {most}'}"
        f" a fragment; the first launch follows inner step {began_at + first}."
    )


def when_measured(engine: StreamingDiLoCo, nbytes: list[int], seconds: float) -> str:
    """Returns the line for a measured step.

    Args:
        engine: The engine.
        nbytes: What `wire_bytes` returned.
        seconds: How long an inner step takes.
    """
    settings = engine.settings
    line = f"Streaming DiLoCo: an inner step takes {short(seconds)} s"
    if engine.topology.num_groups == 1:
        return f"{line}."
    window = settings.overlap_steps * seconds
    if not window:
        return f"{line}; with overlap_steps=0 training waits for every fragment."
    # Where fragments follow each other faster than they land, what counts is all of them in a round.
    rate = max(max(nbytes) / window, sum(nbytes) / (settings.sync_every * seconds))
    return (
        f"{line}; overlap_steps={settings.overlap_steps} gives the link {short(window)} s a fragment, for which it has"
        f" to carry {short(8 * rate / 1e9)} Gbit/s from each rank."
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
