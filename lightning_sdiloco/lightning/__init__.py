"""Streaming DiLoCo as a strategy of Lightning, whichever distribution of it.

What for: a Trainer that trains several worker groups, with nothing else changed. In: Lightning's calls, and what users
choose. Out: launches and landings of an engine, checkpoints, logged numbers, records. This room knows Lightning and
all rooms below; it imports no distribution, because there are two. It must not know the tools above it, issue
collectives past ``comm``, or touch a private name of Lightning that ``host/patching.py`` does not list.

``strategy.py`` has every override and no state; [Note: parts of a strategy] there says who owns what.
"""

from lightning_sdiloco.lightning.fabric import FabricWorkerGroupStrategy
from lightning_sdiloco.lightning.fit import Distribution, Fit
from lightning_sdiloco.lightning.groups import ConnectedGroups, in_batch
from lightning_sdiloco.lightning.host.patching import check_without_trainer, replace
from lightning_sdiloco.lightning.model_format import ShardedModel, WholeModel
from lightning_sdiloco.lightning.monitor import (
    LandingRecord,
    Rank,
    Run,
    StreamingDiLoCoMonitorMixin,
    read_run,
    write_timeline,
)
from lightning_sdiloco.lightning.results import LauncherMixin
from lightning_sdiloco.lightning.strategy import WorkerGroupStrategy
