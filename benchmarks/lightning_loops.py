"""Training loops with a Lightning Trainer, beside those of the peers: ours, and Lightning's DDP."""

import os
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from benchmarks.case import Case
from benchmarks.fits import Timed, fit
from benchmarks.peers.loops import Batches, Loop
from benchmarks.stamps import Stamps
from lightning_sdiloco import StreamingDiLoCoStrategy

TIMEOUT = timedelta(minutes=10)


def streaming(
    case: Case, net: nn.Module, batches: Batches, stamps: Stamps, steps: int
) -> dict[str, Any]:
    """Ours. One step more: the final exchange comes after what is counted."""
    strategy = StreamingDiLoCoStrategy(
        sync_every=case.sync_every,
        overlap_steps=case.overlap_steps,
        mixing=case.mixing,
        fragments=case.patterns("net."),
        compression=case.compression,
        timeout=TIMEOUT,
    )
    _fit(case, net, batches, stamps, steps + 1, strategy)
    return {
        **strategy.report(),
        "fragments": [fragment.nbytes // 4 for fragment in strategy.fragments],
    }


def streaming_defaults(
    case: Case, net: nn.Module, batches: Batches, stamps: Stamps, steps: int
) -> dict[str, Any]:
    """Ours with H, and its defaults for the rest; the end is that of the final exchange."""
    strategy = StreamingDiLoCoStrategy(sync_every=case.sync_every, timeout=TIMEOUT)
    stamps.model = lambda: {
        name.removeprefix("net."): it for name, it in strategy.outer_state_dict().items()
    }
    _fit(case, net, batches, stamps, steps, strategy)
    stamps.model = net.state_dict
    stamps.begin()
    return strategy.report()


def lightning_alone(
    case: Case, net: nn.Module, batches: Batches, stamps: Stamps, steps: int
) -> dict[str, Any]:
    """A Trainer in each rank that knows nothing of the others."""
    fit(Timed(net, stamps, case.inner), batches, steps + 1, devices=1)
    return {}


def lightning_ddp(
    case: Case, net: nn.Module, batches: Batches, stamps: Stamps, steps: int
) -> dict[str, Any]:
    """Lightning's DDP. Ranks start alike, so it need not send the weights around first."""
    _fit(case, net, batches, stamps, steps + 1, DDPStrategy(init_sync=False, timeout=TIMEOUT))
    return {}


def _fit(
    case: Case, net: nn.Module, batches: Batches, stamps: Stamps, steps: int, strategy: Any
) -> None:
    nodes = int(os.environ["WORLD_SIZE"])
    fit(
        Timed(net, stamps, case.inner),
        batches,
        steps,
        strategy=strategy,
        devices=1,
        num_nodes=nodes,
    )


LOOPS: dict[str, Loop] = {
    "streaming": streaming,
    "streaming_defaults": streaming_defaults,
    "lightning_alone": lightning_alone,
    "lightning_ddp": lightning_ddp,
}
