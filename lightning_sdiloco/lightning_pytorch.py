"""Defines the strategies, the monitor and the callback for ``lightning.pytorch``."""

from importlib import import_module

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_sdiloco.lightning.fabric import FabricWorkerGroupStrategy
from lightning_sdiloco.lightning.fit import Distribution, Fit
from lightning_sdiloco.lightning.model_format import ShardedModel, WholeModel
from lightning_sdiloco.lightning.monitor import StreamingDiLoCoMonitorMixin
from lightning_sdiloco.lightning.results import LauncherMixin
from lightning_sdiloco.lightning.strategy import WorkerGroupStrategy


class StreamingDiLoCoCallback(Fit, Callback):
    """See `Fit`."""


class StreamingDiLoCoMonitor(StreamingDiLoCoMonitorMixin, Callback):
    __doc__ = StreamingDiLoCoMonitorMixin.__doc__
    # Imported when a fit has ended, because the commands need more packages than training does.
    _tool = staticmethod(lambda name: import_module(f"lightning_sdiloco.tools.{name}"))


class _Launcher(LauncherMixin, _MultiProcessingLauncher):
    pass


_DISTRIBUTION = Distribution(StreamingDiLoCoCallback, _Launcher, SIGTERMException)


class StreamingDiLoCoStrategy(WorkerGroupStrategy, DDPStrategy):
    """See `WorkerGroupStrategy` and `WholeModel`."""

    strategy_name = "streaming_diloco"
    distribution = _DISTRIBUTION
    model_format = WholeModel


class StreamingDiLoCoModelParallelStrategy(WorkerGroupStrategy, ModelParallelStrategy):
    """See `WorkerGroupStrategy` and `ShardedModel`."""

    strategy_name = "streaming_diloco_model_parallel"
    distribution = _DISTRIBUTION
    model_format = ShardedModel


class StreamingDiLoCoFabricStrategy(FabricWorkerGroupStrategy, FabricDDPStrategy):
    """See `FabricWorkerGroupStrategy`."""

    strategy_name = "streaming_diloco"
