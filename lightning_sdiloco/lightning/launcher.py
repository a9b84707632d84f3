"""Launches a fit in processes, ends them all with the main one, and brings back what users read of a strategy."""

import io
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.lightning.results import Summary

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _Base
else:
    _Base = object

_KEY = "streaming_diloco"

# How a shell tells that a process was terminated.
_TERMINATED = 128 + signal.SIGTERM

# What processes have to end by themselves after Ctrl-C.
_SECONDS = 3.0


class LauncherMixin(_Base):
    """A launcher that starts processes by spawn or fork.

    It passes a termination signal of the main process on to them, ends them after Ctrl-C, and returns the summary of
    rank 0 to the main process. Lightning itself would leave them running, or wait for a result that does not come.
    """

    _strategy: Any

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        forwarding = _Forwarding(self.kill)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        except Exception as error:
            if getattr(error, "exit_code", None) == _TERMINATED:
                raise self._strategy.distribution.termination from error
            raise
        finally:
            forwarding.stop()

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: Any, function: Any, args: Any, kwargs: Any, *rest: Any
    ) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, _Forwarding):
            # A fork inherits it.
            handler.stop()
        if self._start_method == "forkserver":
            _take_own_memory((*args, *kwargs.values()))
        try:
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, *rest)
        except self._strategy.distribution.termination:
            # Without a code the main process would take it for success, and wait for the result.
            sys.exit(_TERMINATED)

    def _interrupt(self) -> None:
        """Ends the processes: Ctrl-C has reached them or not, and the interpreter would wait for them at its end."""
        self.kill(signal.SIGINT)
        deadline = time.monotonic() + _SECONDS
        try:
            for process in self.procs:
                process.join(max(deadline - time.monotonic(), 0))
        finally:
            self.kill(signal.SIGKILL)

    @override
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        summary = trainer.strategy.results.summary()
        return extra if summary is None else {**extra, _KEY: summary_to_bytes(summary)}

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        if _KEY in extra:
            trainer.strategy.results.read_summary(summary_from_bytes(extra[_KEY]))


def _take_own_memory(sent: Iterable[Any]) -> None:
    """Ends sharing: tensors that are sent to a process share their memory, and ranks would train the same parameters.

    Lightning itself does this for spawn only.
    """
    for module in (part for part in sent if isinstance(part, nn.Module)):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


class _Forwarding:
    """The handler of SIGTERM in the main process, which is no rank itself."""

    def __init__(self, kill: Any) -> None:
        self._kill = kill
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self)

    def __call__(self, signum: int, frame: Any) -> None:
        self._kill(signum)

    def stop(self) -> None:
        """Puts the handler back that was there before."""
        current: Any = signal.getsignal(signal.SIGTERM)
        if current is self:
            signal.signal(signal.SIGTERM, self._before)


def summary_to_bytes(summary: Summary) -> bytes:
    """Writes a summary as bytes: tensors must not travel as handles to shared memory."""
    plain = {
        "fragments": [asdict(fragment) for fragment in summary.fragments],
        "schedule": asdict(summary.schedule),
        "outer": summary.outer,
        "counts": summary.counts,
    }
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def summary_from_bytes(data: bytes) -> Summary:
    """Reads a summary back."""
    plain = torch.load(io.BytesIO(data), weights_only=True)
    return Summary(
        fragments=tuple(Fragment(tuple(f["names"]), tuple(f["sizes"])) for f in plain["fragments"]),
        schedule=Schedule(**plain["schedule"]),
        outer=plain["outer"],
        counts=plain["counts"],
    )
