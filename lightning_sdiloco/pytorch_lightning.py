"""The strategy for ``pytorch_lightning``."""

from typing import Any

from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_sdiloco.lightning.callback import StreamingDiLoCoCallbackMixin
from lightning_sdiloco.lightning.launcher import LauncherMixin
from lightning_sdiloco.lightning.model_parallel import StreamingDiLoCoModelParallelMixin
from lightning_sdiloco.lightning.monitor.monitor import StreamingDiLoCoMonitorMixin
from lightning_sdiloco.lightning.strategy import StreamingDiLoCoMixin
from lightning_sdiloco.tools.simulate.processes import SimulatedProcessesMixin
from lightning_sdiloco.tools.simulate.recording import RecorderMixin


class StreamingDiLoCoCallback(StreamingDiLoCoCallbackMixin, Callback):
    """See `StreamingDiLoCoCallbackMixin`."""


class StreamingDiLoCoMonitor(StreamingDiLoCoMonitorMixin, Callback):  # noqa: D101
    __doc__ = StreamingDiLoCoMonitorMixin.__doc__


class _Launcher(LauncherMixin, _MultiProcessingLauncher):
    pass


class StreamingDiLoCoStrategy(StreamingDiLoCoMixin, DDPStrategy):  # noqa: D101
    __doc__ = StreamingDiLoCoMixin.__doc__

    callback_type = StreamingDiLoCoCallback
    termination = SIGTERMException

    @override
    def _make_launcher(self, start_method: Any) -> Any:
        return _Launcher(self, start_method=start_method)


class StreamingDiLoCoModelParallelStrategy(StreamingDiLoCoModelParallelMixin, ModelParallelStrategy):  # noqa: D101
    __doc__ = StreamingDiLoCoModelParallelMixin.__doc__

    callback_type = StreamingDiLoCoCallback
    termination = SIGTERMException


class SimulatedStrategy(StreamingDiLoCoStrategy, SimulatedProcessesMixin, DDPStrategy):
    """The strategy of a worker group that ``sdiloco simulate`` runs as a thread."""

    reset_seed = staticmethod(reset_seed)


class Recorder(RecorderMixin, Callback):
    """See `RecorderMixin`."""


StreamingDiLoCoStrategy.register_strategies(StrategyRegistry)
StreamingDiLoCoModelParallelStrategy.register_strategies(StrategyRegistry)
