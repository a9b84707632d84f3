"""Streaming DiLoCo for PyTorch Lightning: train one model on worker groups joined by slow links."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.registration import register_when_imported

if TYPE_CHECKING:
    from lightning_sdiloco.algorithm import (
        Carry,
        Control,
        Count,
        FastestPairs,
        Fragment,
        Heard,
        LandingRule,
        LaunchSchedule,
        Mix,
        OuterOptimizer,
        RandomPairs,
        Ring,
        Route,
        Schedule,
        Selective,
        TwoShot,
        Weighing,
    )
    from lightning_sdiloco.compression import FP4, BFloat16, Compression, Float32
    from lightning_sdiloco.engine import (
        DropCompute,
        Landing,
        SimulatedGroups,
        StreamingDiLoCo,
        WorkerGroups,
    )
    from lightning_sdiloco.errors import AgreementError, ExchangeError
    from lightning_sdiloco.federation import DynamicBackup, Federation, Quorum
    from lightning_sdiloco.lightning_pytorch import (
        StreamingDiLoCoFabricStrategy,
        StreamingDiLoCoModelParallelStrategy,
        StreamingDiLoCoMonitor,
        StreamingDiLoCoStrategy,
    )

__version__ = "0.1.0"

_ROOMS = ("engine", "algorithm", "compression", "federation", "errors", "lightning_pytorch")
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

# Without any distribution of Lightning, there is the engine alone.
if TYPE_CHECKING or find_spec("lightning") is not None:
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


register_when_imported()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports what is used when it is used: torch takes a second, and each distribution of Lightning two more."""
        if name in __all__:
            rooms = (import_module(f"{__name__}.{room}") for room in _ROOMS)
            return next(getattr(room, name) for room in rooms if hasattr(room, name))
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        if name in _EXAMPLES:
            raise _IsAnExample(
                f"lightning_sdiloco has no {name}: it is an example, not a part of the package. Copy"
                f" examples/methods/{_EXAMPLES[name]} of the repository beside your script, and import it from there."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
