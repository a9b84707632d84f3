"""Provides a fit's results, even if the fit ran in other processes."""

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_sdiloco.algorithm.partition import Fragment, Stack
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.lightning.host import Forwarded, Function, Host, State, Trainer
from lightning_sdiloco.lightning.options import Options

_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _Base
else:
    _Base = object


class Summary(NamedTuple):
    """The results of a finished fit that ran in other processes."""

    fragments: tuple[Fragment, ...]
    schedule: Schedule
    outer_state_dict: Callable[[], dict[str, Tensor]]
    report: Callable[[], dict[str, float]]


@dataclass
class Results:
    options: Options
    engine: StreamingDiLoCo | None = None
    fragments: tuple[Fragment, ...] = ()
    summary: Summary | None = None
    """The summary of a fit that ran in other processes."""

    @property
    def source(self) -> StreamingDiLoCo | Summary:
        source = self.engine or self.summary
        if source is None:
            raise RuntimeError(
                "There are no results yet. The fragments and the schedule are available from"
                " on_fit_start on, the outer parameters and the report from on_train_batch_start"
                " on, and all other results after a fit that took at least one inner step."
            )
        return source


# Files in a launch's folder.
_SUMMARY = "summary.pt"
_BYTES = ".bytes"

# The exit code with which a shell reports that a process was terminated.
_TERMINATED = 128 + signal.SIGTERM

# How long processes may take to exit on their own after Ctrl-C.
_SECONDS_TO_END = 3.0


class LauncherMixin(_Base):
    """Starts processes with spawn, fork or forkserver, and returns rank 0's results.

    The launcher forwards a termination signal from the main process to the started processes, and
    ends them after Ctrl-C. Lightning's own launcher would leave the processes running or wait for a
    result that never arrives.

    Large values are passed in files, in a folder that is removed after the launch. Lightning
    instead uses a queue on a pipe of about 64 kB, which the main process reads only after the other
    processes have ended. If the data exceeded the pipe's size, both sides would wait for each other
    forever.
    """

    _strategy: Host
    # This is a string, because it is pickled with the launcher if processes do not inherit it.
    _folder: str
    # The signal handler of a forked process, which replaces the inherited one.
    _inherited: _Handler = None

    @override
    def launch(
        self, function: Function, *args: Forwarded, trainer: Trainer = None, **kwargs: Forwarded
    ) -> Forwarded:
        # The processes run on this machine, so they share its temporary folder.
        with tempfile.TemporaryDirectory(prefix="lightning_sdiloco-") as self._folder:
            # The main process is not a rank.
            def forward(signum: int, frame: FrameType | None) -> None:
                self.kill(signum)

            listens = threading.current_thread() is threading.main_thread()
            before = signal.signal(signal.SIGTERM, forward) if listens else None
            if self._start_method == "fork":
                self._inherited = before
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except KeyboardInterrupt:
                # The processes are ended even if the signal did not reach them, because the
                # interpreter would wait for them.
                self.kill(signal.SIGINT)
                deadline = time.monotonic() + _SECONDS_TO_END
                try:
                    for process in self.procs:
                        process.join(max(deadline - time.monotonic(), 0))
                finally:
                    self.kill(signal.SIGKILL)
                raise
            except Exception as error:
                if getattr(error, "exit_code", None) == _TERMINATED:
                    raise self._strategy.distribution.termination from error
                raise
            finally:
                if listens and signal.getsignal(signal.SIGTERM) is forward:
                    signal.signal(signal.SIGTERM, before)

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer,
        function: Function,
        args: Forwarded,
        kwargs: Forwarded,
        *more: Forwarded,
    ) -> None:
        if self._inherited is not None:
            signal.signal(signal.SIGTERM, self._inherited)
        if self._start_method == "forkserver":
            # In shared memory, all ranks would train the same parameters.
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, nn.Module):
                    for tensor in (*argument.parameters(), *argument.buffers()):
                        tensor.data = tensor.data.clone()
        try:
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, *more)
        except self._strategy.distribution.termination:
            # Without this exit code, the main process would mistake this for success and wait for
            # the result.
            sys.exit(_TERMINATED)

    @override
    def get_extra_results(self, trainer: Trainer) -> State:
        """Writes results and metrics to files, and returns all other values for the queue."""
        folder = Path(self._folder)
        extra = super().get_extra_results(trainer)
        engine = trainer.strategy.engine
        if engine is not None and engine.is_finished:
            summary = (
                engine.fragments,
                engine.rounds.timetable.schedule,
                engine.outer_state_dict(),
                engine.report(),
            )
            torch.save(summary, folder / _SUMMARY)
        for name, metrics in list(extra.items()):
            if isinstance(metrics, bytes):
                (folder / f"{name}{_BYTES}").write_bytes(extra.pop(name))
        return extra

    @override
    def update_main_process_results(self, trainer: Trainer, extra: State) -> None:
        """In the main process, reads the files that rank 0 wrote in `get_extra_results`."""
        folder = Path(self._folder)
        written = {
            path.name.removesuffix(_BYTES): path.read_bytes() for path in folder.glob(f"*{_BYTES}")
        }
        super().update_main_process_results(trainer, {**extra, **written})
        if (folder / _SUMMARY).exists():
            with torch.serialization.safe_globals([Fragment, Stack, Schedule]):
                fragments, schedule, outer, counts = torch.load(
                    folder / _SUMMARY, weights_only=True
                )
            trainer.strategy.results.summary = Summary(
                fragments, schedule, partial(deepcopy, outer), partial(dict, counts)
            )
