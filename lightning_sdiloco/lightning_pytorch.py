"""The strategies, the monitor and the callback for ``lightning.pytorch``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_sdiloco.lightning import (
    Distribution,
    FabricWorkerGroupStrategy,
    InnerStepHooks,
    LauncherMixin,
    ShardedModel,
    StreamingDiLoCoMonitorMixin,
    WholeModel,
    WorkerGroupStrategy,
)
from lightning_sdiloco.tools.simulate.processes import SimulatedProcessesMixin
from lightning_sdiloco.tools.simulate.recording import RecorderMixin


class StreamingDiLoCoCallback(InnerStepHooks, Callback):
    """See `InnerStepHooks`."""


class StreamingDiLoCoMonitor(StreamingDiLoCoMonitorMixin, Callback):
    __doc__ = StreamingDiLoCoMonitorMixin.__doc__


class _Launcher(LauncherMixin, _MultiProcessingLauncher):
    pass


_DISTRIBUTION = Distribution(StreamingDiLoCoCallback, _Launcher, SIGTERMException)


class StreamingDiLoCoStrategy(WorkerGroupStrategy, DDPStrategy):
    """See `WorkerGroupStrategy` and `WholeModel`, of which this documentation is made."""

    strategy_name = "streaming_diloco"
    description = "Streaming DiLoCo over worker groups"
    distribution = _DISTRIBUTION
    model_format = WholeModel


class StreamingDiLoCoModelParallelStrategy(WorkerGroupStrategy, ModelParallelStrategy):
    """See `WorkerGroupStrategy` and `ShardedModel`, of which this documentation is made."""

    strategy_name = "streaming_diloco_model_parallel"
    description = "Streaming DiLoCo over worker groups that share one sharded model"
    distribution = _DISTRIBUTION
    model_format = ShardedModel


class StreamingDiLoCoFabricStrategy(FabricWorkerGroupStrategy, FabricDDPStrategy):
    """See `FabricWorkerGroupStrategy`, of which this documentation is made."""

    strategy_name = "streaming_diloco"
    description = "Streaming DiLoCo over worker groups"


class SimulatedStrategy(StreamingDiLoCoStrategy, SimulatedProcessesMixin, DDPStrategy):
    """The strategy of a worker group that ``sdiloco simulate`` runs as a thread."""

    reset_seed = staticmethod(reset_seed)


class Recorder(RecorderMixin, Callback):
    """See `RecorderMixin`."""


StreamingDiLoCoStrategy.register_strategies(StrategyRegistry)
StreamingDiLoCoModelParallelStrategy.register_strategies(StrategyRegistry)
StreamingDiLoCoFabricStrategy.register_strategies(STRATEGY_REGISTRY)
