"""Training loops with a Lightning Trainer for the comparison with peers: ours, and Lightning's
DDP.
"""

import os
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from benchmarks.fits import Timed, fit
from benchmarks.peers.loops import Loop, Rank
from lightning_sdiloco import StreamingDiLoCoStrategy

TIMEOUT = timedelta(minutes=10)


def streaming(rank: Rank) -> dict[str, Any]:
    """Ours, with one additional step, because the final exchange comes after the measured steps."""
    case = rank.case
    strategy = StreamingDiLoCoStrategy(
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        mixing=case.mixing,
        fragments=case.patterns("net."),
        compression=case.compression,
        timeout=TIMEOUT,
    )
    _fit(rank, rank.steps + 1, strategy)
    numels = [fragment.nbytes // 4 for fragment in strategy.fragments]
    return {**strategy.report(), "fragments": numels}


def streaming_defaults(rank: Rank) -> dict[str, Any]:
    """Ours with H and otherwise default settings; the end includes the final exchange."""
    return _whole_fit(
        rank, StreamingDiLoCoStrategy(sync_every=rank.case.sync_every, timeout=TIMEOUT)
    )


def bare_name(rank: Rank) -> dict[str, Any]:
    """Ours with nothing but its name."""
    return _whole_fit(rank, StreamingDiLoCoStrategy(timeout=TIMEOUT))


def one_group(rank: Rank) -> dict[str, Any]:
    """DDP over all ranks, with the outer step of ours every H steps: one group."""
    return _whole_fit(
        rank,
        StreamingDiLoCoStrategy(worker_groups=1, sync_every=rank.case.sync_every, timeout=TIMEOUT),
    )


def _whole_fit(rank: Rank, strategy: StreamingDiLoCoStrategy) -> dict[str, Any]:
    """Fits to the end, final exchange included; a validation would look at the outer model."""

    def outer_model() -> dict[str, Any]:
        outer = strategy.outer_state_dict()
        return {name.removeprefix("net."): values for name, values in outer.items()}

    rank.stamps.model = outer_model
    _fit(rank, rank.steps, strategy)
    rank.stamps.model = rank.net.state_dict
    rank.stamps.begin()
    return {**strategy.report(), "sync_every": strategy.schedule.sync_every}


def lightning_alone(rank: Rank) -> dict[str, Any]:
    """An independent Trainer on each rank."""
    module = Timed(rank.net, rank.stamps, rank.case.inner)
    fit(module, rank.batches, rank.steps + 1, devices=1)
    return {}


def lightning_ddp(rank: Rank) -> dict[str, Any]:
    """Lightning's DDP. Ranks start with equal weights, so it does not have to broadcast them."""
    _fit(rank, rank.steps + 1, DDPStrategy(init_sync=False, timeout=TIMEOUT))
    return {}


def _fit(rank: Rank, steps: int, strategy: Any) -> None:
    module = Timed(rank.net, rank.stamps, rank.case.inner)
    nodes = int(os.environ["WORLD_SIZE"])
    fit(module, rank.batches, steps, strategy=strategy, devices=1, num_nodes=nodes)


LOOPS: dict[str, Loop] = {
    "streaming": streaming,
    "streaming_defaults": streaming_defaults,
    "bare_name": bare_name,
    "one_group": one_group,
    "lightning_alone": lightning_alone,
    "lightning_ddp": lightning_ddp,
}
