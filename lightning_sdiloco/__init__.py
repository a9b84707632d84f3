"""Streaming DiLoCo for PyTorch Lightning: train one model on worker groups joined by slow links."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.algorithm.aggregation import Count, Weighing
from lightning_sdiloco.algorithm.control import Control
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.parts import TwoShot
from lightning_sdiloco.algorithm.policies.landing import Carry, LandingRule, Mix
from lightning_sdiloco.algorithm.policies.pace import Heard, Pace, Selective
from lightning_sdiloco.algorithm.policies.route import FastestPairs, RandomPairs, Ring, Route
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.compression import FP4, BFloat16, Compression, Float32
from lightning_sdiloco.engine.drop_compute import DropCompute
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.flight import Landing
from lightning_sdiloco.engine.simulation import SimulatedGroups
from lightning_sdiloco.engine.site.federation import Federation
from lightning_sdiloco.engine.start import WorkerGroups
from lightning_sdiloco.errors import AgreementError, ExchangeError
from lightning_sdiloco.federation import DynamicBackup, Quorum

__version__ = "0.1.0"

__all__ = [
    "FP4",
    "AgreementError",
    "BFloat16",
    "Carry",
    "Compression",
    "DropCompute",
    "Control",
    "Count",
    "DynamicBackup",
    "ExchangeError",
    "FastestPairs",
    "Federation",
    "Float32",
    "Fragment",
    "Heard",
    "Landing",
    "LandingRule",
    "Mix",
    "Pace",
    "Quorum",
    "RandomPairs",
    "Ring",
    "Route",
    "Schedule",
    "Selective",
    "SimulatedGroups",
    "StreamingDiLoCo",
    "TwoShot",
    "Weighing",
    "WorkerGroups",
]

# Importing a module of a distribution registers the strategy there. Both may be installed; without any, there is the
# engine alone.
if find_spec("pytorch_lightning") is not None:
    from lightning_sdiloco import pytorch_lightning as pytorch_lightning
if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning_sdiloco.lightning_pytorch import (
        StreamingDiLoCoFabricStrategy,
        StreamingDiLoCoModelParallelStrategy,
        StreamingDiLoCoMonitor,
        StreamingDiLoCoStrategy,
    )

    __all__ += [
        "StreamingDiLoCoFabricStrategy",
        "StreamingDiLoCoModelParallelStrategy",
        "StreamingDiLoCoMonitor",
        "StreamingDiLoCoStrategy",
    ]

_EXAMPLES = {
    "ByMedian": "edit.py",
    "ByNorm": "edit.py",
    "DelayedNesterov": "delayed_nesterov.py",
    "Eager": "eager_updates.py",
    "Paced": "dylu.py",
    "ZScore": "edit.py",
}


class _IsAnExample(ImportError, ValueError):
    """What was asked for is no part of the package: an import error, and a wrong value of a configuration."""


def __getattr__(name: str) -> Any:
    if name in _EXAMPLES:
        raise _IsAnExample(
            f"lightning_sdiloco has no {name}: it is an example, not a part of the package. Copy"
            f" examples/methods/{_EXAMPLES[name]} of the repository beside your script, and import it from there."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
