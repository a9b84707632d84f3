"""The strategy for ``pytorch_lightning``."""

from typing import Any

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_sdiloco.callback import StreamingDiLoCoCallbackMixin
from lightning_sdiloco.launcher import LauncherMixin
from lightning_sdiloco.monitor import StreamingDiLoCoMonitorMixin
from lightning_sdiloco.strategy import StreamingDiLoCoMixin


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


StreamingDiLoCoStrategy.register_strategies(StrategyRegistry)
