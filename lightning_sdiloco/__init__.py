"""Streaming DiLoCo for PyTorch Lightning, for training one model across slow links."""

from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.registration import register_when_imported
from lightning_sdiloco.version import VERSION, require_one_distribution

if TYPE_CHECKING:
    from lightning_sdiloco.algorithm.config import OuterOptimizer
    from lightning_sdiloco.algorithm.gossip import RandomPairs, Ring, Route
    from lightning_sdiloco.algorithm.merge import Carry, LandingRule, Mix
    from lightning_sdiloco.algorithm.partition import Fragment
    from lightning_sdiloco.algorithm.reduce import TwoShot
    from lightning_sdiloco.algorithm.schedule import (
        DenseBeginning,
        Heard,
        LaunchSchedule,
        Schedule,
        Selective,
    )
    from lightning_sdiloco.algorithm.weighting import Control, Count, Weighing
    from lightning_sdiloco.compression import FP4, BFloat16, Compression, Float32
    from lightning_sdiloco.engine.drop_compute import DropCompute
    from lightning_sdiloco.engine.engine import StreamingDiLoCo
    from lightning_sdiloco.engine.fragments import Landing
    from lightning_sdiloco.engine.simulation import SimulatedGroups
    from lightning_sdiloco.engine.start import WorkerGroups
    from lightning_sdiloco.errors import AgreementError, ExchangeError
    from lightning_sdiloco.federation.config import Federation
    from lightning_sdiloco.federation.quorum import DynamicBackup, Quorum
    from lightning_sdiloco.lightning_pytorch import (
        StreamingDiLoCoFabricStrategy,
        StreamingDiLoCoModelParallelStrategy,
        StreamingDiLoCoMonitor,
        StreamingDiLoCoStrategy,
    )

__version__ = VERSION

# The module of each public name, which is imported when the name is first used.
_MODULES = {
    "AgreementError": "errors",
    "BFloat16": "compression",
    "Carry": "algorithm.merge",
    "Compression": "compression",
    "Control": "algorithm.weighting",
    "Count": "algorithm.weighting",
    "DenseBeginning": "algorithm.schedule",
    "DropCompute": "engine.drop_compute",
    "DynamicBackup": "federation.quorum",
    "ExchangeError": "errors",
    "FP4": "compression",
    "FastestPairs": "algorithm.gossip",
    "Federation": "federation.config",
    "Float32": "compression",
    "Fragment": "algorithm.partition",
    "Heard": "algorithm.schedule",
    "Landing": "engine.fragments",
    "LandingRule": "algorithm.merge",
    "LaunchSchedule": "algorithm.schedule",
    "Mix": "algorithm.merge",
    "OuterOptimizer": "algorithm.config",
    "Quorum": "federation.quorum",
    "RandomPairs": "algorithm.gossip",
    "Ring": "algorithm.gossip",
    "Route": "algorithm.gossip",
    "Schedule": "algorithm.schedule",
    "Selective": "algorithm.schedule",
    "SimulatedGroups": "engine.simulation",
    "StreamingDiLoCo": "engine.engine",
    "StreamingDiLoCoFabricStrategy": "lightning_pytorch",
    "StreamingDiLoCoModelParallelStrategy": "lightning_pytorch",
    "StreamingDiLoCoMonitor": "lightning_pytorch",
    "StreamingDiLoCoStrategy": "lightning_pytorch",
    "TwoShot": "algorithm.reduce",
    "Weighing": "algorithm.weighting",
    "WorkerGroups": "engine.start",
}

__all__ = [
    "FP4",
    "AgreementError",
    "BFloat16",
    "Carry",
    "Compression",
    "DropCompute",
    "Control",
    "Count",
    "DenseBeginning",
    "DynamicBackup",
    "ExchangeError",
    "Federation",
    "Float32",
    "Fragment",
    "Heard",
    "Landing",
    "LandingRule",
    "LaunchSchedule",
    "Mix",
    "OuterOptimizer",
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

# Without any distribution of Lightning, only the engine is available.
if TYPE_CHECKING or find_spec("lightning") is not None:
    __all__ += [
        "StreamingDiLoCoFabricStrategy",
        "StreamingDiLoCoModelParallelStrategy",
        "StreamingDiLoCoMonitor",
        "StreamingDiLoCoStrategy",
    ]

# Public names that only the compression package contains. They are listed here because this
# package imports torch, and checking whether a name exists must not wait for that import.
_COMPRESSIONS = (
    "ByLink",
    "ErrorFeedback",
    "FP8",
    "Int2",
    "Int4",
    "Int8",
    "MXFP4",
    "RandomBlock",
    "RandomK",
    "Threshold",
    "TopK",
)

_EXAMPLES = {
    "ByMedian": "edit.py",
    "ByNorm": "edit.py",
    "DelayedNesterov": "delayed_nesterov.py",
    "Eager": "eager_updates.py",
    "FastestPairs": "saps_psgd.py",
    "Paced": "dylu.py",
    "ZScore": "edit.py",
}


class _IsAnExample(ImportError, ValueError):
    """Raised by imports and configurations that name a class from the examples."""


def _advice(name: str) -> str:
    """Returns advice for a name that the package does not contain."""
    if not name[0].isupper():
        return ""
    if name in _COMPRESSIONS:
        # No ImportError, which a from-import would show: jsonargparse checks names with hasattr.
        return f". Import it from {__name__}.compression"
    close = get_close_matches(name, [*__all__, *_COMPRESSIONS], 1)
    if not close:
        return f". {__name__}.__all__ lists its public names"
    home = __name__ if close[0] in __all__ else f"{__name__}.compression"
    return f". Did you mean {home}.{close[0]}?"


require_one_distribution(Path(__file__).parents[1])
register_when_imported()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a name on first use, because torch and a distribution take three seconds to
        import.
        """
        if name in __all__:
            return getattr(_module_of(name), name)
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        if name in _EXAMPLES:
            raise _IsAnExample(
                f"lightning_sdiloco does not contain {name}, which is an example. Copy"
                f" examples/methods/{_EXAMPLES[name]} from the repository to your script's folder,"
                f" and import {name} from that file."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_advice(name)}")

    def _module_of(name: str) -> ModuleType:
        try:
            return import_module(f"{__name__}.{_MODULES[name]}")
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(f"{__name__}."):
                raise
            raise ImportError(
                f"lightning_sdiloco.{name} is not part of lightning-sdiloco-hub, which contains"
                " only the hub. Install lightning-sdiloco instead."
            ) from error

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
