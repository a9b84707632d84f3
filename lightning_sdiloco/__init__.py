"""Streaming DiLoCo for PyTorch Lightning: train one model on worker groups joined by slow links."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_sdiloco.algorithm.aggregation import Count, Weighing
from lightning_sdiloco.algorithm.control import Control
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.parts import TwoShot
from lightning_sdiloco.algorithm.policies.landing import Carry, Eager, LandingRule, Mix
from lightning_sdiloco.algorithm.policies.pace import Heard, Pace, Selective
from lightning_sdiloco.algorithm.policies.route import FastestPairs, RandomPairs, Ring, Route
from lightning_sdiloco.algorithm.policies.weighing import ByMedian, ByNorm, ZScore
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.compression import FP4, BFloat16, Compression, Float32
from lightning_sdiloco.engine.drop_compute import DropCompute
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.flight import Landing
from lightning_sdiloco.engine.outer.delayed_nesterov import DelayedNesterov
from lightning_sdiloco.engine.paced import Paced
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
    "ByMedian",
    "ByNorm",
    "Carry",
    "Compression",
    "DropCompute",
    "Control",
    "Count",
    "DelayedNesterov",
    "DynamicBackup",
    "Eager",
    "ExchangeError",
    "FastestPairs",
    "Federation",
    "Float32",
    "Fragment",
    "Heard",
    "Landing",
    "Paced",
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
    "ZScore",
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
