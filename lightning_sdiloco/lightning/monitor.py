"""Reports a run's activity through logged scalars, the progress bar, records, and log lines.

The functions in this module never affect training, wait for another rank, or send data between
groups. The records are read by ``tools/run_files.py``.
"""

import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import TextIO

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sdiloco.algorithm.config import ENOUGH_ROUNDS, Settings
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.reduce import all_reduce_for
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.comm.communicator import page_locked
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.engine.shards import clean_name
from lightning_sdiloco.lightning.host import (
    Batch,
    Forwarded,
    Function,
    Internal,
    LightningModule,
    Trainer,
)
from lightning_sdiloco.planning.units import readable, readable_rate, short

_log = logging.getLogger(__name__)

# Logged scalars and the progress bar

_PREFIX = "sdiloco/"

# TensorBoard charts and the scalars that each shows.
_CHARTS = {
    "Utilisation": ("compute_utilisation",),
    "Waiting (ms)": ("exposed_wait_ms",),
    "Link (Gbit/s)": ("link_gbit_s", "peak_gbit_s"),
    "Bytes": ("bytes_sent", "bytes_received"),
    "Time in flight (ms)": tuple(
        f"{part}_ms"
        for part in ("in_flight", "encode", "transfer", "decode", "second_hop", "outer_step")
    ),
    "Outer gradient": ("outer_grad_norm", "direction_norm", "outer_grad_norm_group_.*"),
    "Cosine with the mean": ("cosine_group_.*",),
    "Outer step": ("outer_lr", "outer_momentum_norm"),
    "Local from outer parameters": ("local_distance",),
    "Compression error": ("compression_error",),
    "Groups": (
        "groups_counted",
        "groups_left_out",
        "groups_outlying",
        "groups_wrong_buffers",
    ),
}

SUMMED = tuple(
    _PREFIX + name
    for name in (
        "landings",
        "bytes_sent",
        "bytes_received",
        "exposed_wait_ms",
        "groups_left_out",
        "groups_outlying",
        "groups_wrong_buffers",
    )
)
"""The scalars that are summed over all landings since a logger's last row."""


def scalars_of(landing: Landing) -> dict[str, float]:
    """Returns a landing's logged values, except for unknown numbers."""
    numbers: dict[str, float] = {
        "landings": 1,
        "fragment": landing.fragment,
        "bytes_sent": landing.bytes_sent,
        "bytes_received": landing.bytes_received,
        "exposed_wait_ms": 1000 * landing.exposed_wait_s,
        "in_flight_ms": 1000 * landing.in_flight_s,
        **{
            f"{part}_ms": 1000 * landing.seconds(part)
            for part in ("encode", "transfer", "decode", "outer_step")
        },
        "link_gbit_s": landing.link_gbit_s,
        "outer_grad_norm": landing.outer_grad_norm,
        **{
            f"outer_grad_norm_group_{group}": norm for group, norm in enumerate(landing.group_norms)
        },
        "direction_norm": landing.direction_norm,
        "outer_lr": landing.outer_lr,
        "groups_counted": len(landing.counted),
        "groups_left_out": len(landing.left_out),
        "groups_outlying": len(landing.outlying),
        "groups_wrong_buffers": len(landing.wrong_buffers),
    }
    if "relay" in landing.spans:
        numbers["second_hop_ms"] = 1000 * landing.seconds("relay")
    if landing.diagnostics is not None:
        diagnostics = landing.diagnostics._asdict()
        for group, cosine in enumerate(diagnostics.pop("cosines")):
            numbers[f"cosine_group_{group}"] = cosine
        numbers |= diagnostics
    return _logged(numbers)


def _logged(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns the known numbers as scalars for the loggers."""
    return {_PREFIX + name: number for name, number in numbers.items() if not math.isnan(number)}


def add_to_row(row: dict[str, float], scalars: Mapping[str, float]) -> None:
    """Adds a landing's scalars to the loggers' next row.

    Additive values are summed. For all other values, the last value is kept.
    """
    row |= {**scalars, **{name: row.get(name, 0) + scalars[name] for name in SUMMED}}


class Interval:
    """Accumulates the values that are logged once per round.

    A round ends with the first landing after ``sync_every`` inner steps.
    """

    def __init__(self, sync_every: int, first_step: int) -> None:
        self._sync_every = sync_every
        self._first_step = first_step
        self._began = time.perf_counter()
        self._waited = 0.0
        self._peak = math.nan

    def scalars_with(self, landing: Landing) -> dict[str, float]:
        """Adds a landing. Returns the round's scalars if the landing ends the round."""
        self._waited += landing.exposed_wait_s
        rates = [rate for rate in (self._peak, landing.link_gbit_s) if not math.isnan(rate)]
        self._peak = max(rates, default=math.nan)
        if landing.landed_at - self._first_step < self._sync_every:
            return {}
        _, landed = landing.spans["land"]
        utilisation = 1 - min(1.0, self._waited / (landed - self._began))
        scalars = {"compute_utilisation": utilisation, "peak_gbit_s": self._peak}
        self._began = landed
        self._first_step = landing.landed_at
        self._waited = 0.0
        self._peak = math.nan
        return _logged(scalars)


def progress(engine: StreamingDiLoCo, columns: float = math.inf) -> dict[str, str]:
    """Returns at least one entry for the progress bar, and more if they fit on the line."""
    flights = [str(fragment) for fragment in engine.rounds.in_flight]
    if len(flights) > 3:
        flights = [*flights[:2], f"+{len(flights) - 2}"]
    schedule = engine.rounds.timetable.schedule
    steps = engine.inner_steps - engine.rounds.timetable.began_at
    outer_step = str(engine.fragmented_model.outer_steps)
    if schedule.is_dense(steps):
        outer_step = f"dense {schedule.launches_in(0, steps)[0]}"
    landing = engine.history.last_landing
    exposed_wait = "-"
    link = "-"
    if landing is not None:
        exposed_wait = f"{1000 * landing.exposed_wait_s:.3g} ms"
        if landing.link_gbit_s > 0:
            link = readable_rate(landing.link_gbit_s)
    entries = {
        "outer_step": outer_step,
        "in_flight": ", ".join(flights) or "-",
        "exposed_wait": exposed_wait,
        "link": link,
    }
    while len(entries) > 1 and _width(entries) > columns:
        entries.popitem()
    return entries


def _width(entries: Mapping[str, str]) -> int:
    return len(" ".join(f"{name}: {value}" for name, value in entries.items()))


def lay_out(trainer: Trainer) -> None:
    """Adds a page of charts to TensorBoard loggers, in which each chart shows related scalars."""
    charts = {
        title: ["Multiline", [_PREFIX + name for name in names]] for title, names in _CHARTS.items()
    }
    for logger in trainer.loggers:
        # Loggers are recognised by name, because each distribution has its own class and neither
        # needs to be installed.
        if any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__):
            logger.experiment.add_custom_scalars({"Streaming DiLoCo": charts})


# The record of a rank

Moments = float | Sequence["Moments"] | Mapping[str, "Moments"]
"""The values of ``time.perf_counter()`` in one field of a record."""


class Deferred:
    """A queue of scalars that are being copied from the device to the host."""

    def __init__(self) -> None:
        # Each scalar with its inner step and the event that marks the end of its copy.
        self._scalars: deque[tuple[int, Tensor, torch.Event | None]] = deque()

    def take(self, step: int, tensor: Tensor) -> None:
        scalar = tensor.detach().reshape(())
        copied = page_locked(scalar.shape, scalar.dtype, scalar.device)
        copied.copy_(scalar, non_blocking=True)
        event = None
        if scalar.device.type != "cpu":
            event = torch.get_device_module(scalar.device).Event()
            event.record()
        self._scalars.append((step, copied, event))

    def ready(self, wait: bool = False) -> list[tuple[int, float]]:
        arrived = []
        while self._scalars:
            step, copied, event = self._scalars[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._scalars.popleft()
            arrived.append((step, float(copied)))
        return arrived


class StreamingDiLoCoMonitorMixin:
    """Records a run's activity for `sdiloco report` and for trace viewers.

    Every rank writes a separate record of inner steps, launches, flights, landings, waits and
    losses as a JSON Lines file. No data is sent to other groups, and training never waits for the
    monitor. With an MLflow or W&B logger, the report is uploaded as an artifact of the run when the
    fit ends.

    Args:
        folder: The folder for the records. The default is the subfolder ``sdiloco`` of the folder
            in which the trainer's first logger stores the run, or of ``default_root_dir``.
        timeline: A file for a trace of all ranks on a common time axis, in the JSON format that
            Chrome and Perfetto read. At the end of the fit, rank 0 creates the trace from the
            records in the folder.
        diagnostics: Whether to measure at every landing how closely the groups agree. The
            measurement takes a few passes over the fragment in the background.

    Raises:
        ValueError: If an argument is of the wrong type, or the strategy is not Streaming DiLoCo.

    Examples:
        >>> from lightning_sdiloco import StreamingDiLoCoMonitor, StreamingDiLoCoStrategy
        >>> monitor = StreamingDiLoCoMonitor(timeline="trace.json")
        >>> trainer = Trainer(
        ...     strategy=StreamingDiLoCoStrategy(), callbacks=[monitor]
        ... )  # doctest: +SKIP
    """

    # Returns a module of the tools. Each distribution's monitor defines this function, because the
    # tools are above this package.
    _tool: Function

    def __init__(
        self, folder: str | None = None, timeline: str | None = None, diagnostics: bool = True
    ) -> None:
        for name, path, example in (
            ("folder", folder, "runs/sdiloco"),
            ("timeline", timeline, "trace.json"),
        ):
            if path is not None and not isinstance(path, str | os.PathLike):
                raise ValueError(
                    f"{name}={path!r} is of type {type(path).__name__}, not a path. Pass a path,"
                    f" for example {name}={example!r}, or omit the argument."
                )
        if not isinstance(diagnostics, bool):
            raise ValueError(
                f"diagnostics={diagnostics!r} is not a Boolean. Set diagnostics to True or False."
            )
        self.diagnostics = diagnostics
        self._folder = folder
        self._timeline = timeline
        self._file: TextIO | None = None
        # Seconds by which the clock is ahead of time.perf_counter(), which runs more steadily.
        self._clock_offset = 0.0
        self._fragments: tuple[Fragment, ...] = ()
        self._step = 0
        self._losses = Deferred()
        # When the last inner step ended, and when the last validation began.
        self._done: float | None = None
        self._paused: float | None = None
        # The names of the metrics before the last validation, and of those that came with it.
        self._names_before = set[str]()
        self._validated = set[str]()

    # Hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "outer_state_dict"):
            raise ValueError(
                "StreamingDiLoCoMonitor requires a Streaming DiLoCo strategy, but the strategy is"
                f" {type(trainer.strategy).__name__}. Remove the monitor, or set"
                " strategy='streaming_diloco'."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self._folder or _folder_of(trainer) / "sdiloco")
        folder.mkdir(parents=True, exist_ok=True)
        # Written line by line so that a killed run leaves its record up to that point.
        path = folder / f"rank_{trainer.global_rank:05d}.jsonl"
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._folder = str(folder)
        self._clock_offset = time.time() - time.perf_counter()
        self._fragments = ()
        self._done = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Forwarded,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        # Lightning calls no hook at the start of an idle batch.
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        engine = trainer.strategy.engine
        if engine.inner_steps == self._step:
            return
        self._step = engine.inner_steps
        began = self._done
        step_began, self._done = engine.history.step_span
        self._write("step", step=self._step, span=(began, step_began), done=self._done)
        if engine.fragments is not self._fragments:
            # This also happens once settings have been chosen.
            self._write("settings", settings=_recorded(engine.rounds.settings))
            self._note_fragments(pl_module, engine)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and self._step % max(1, trainer.log_every_n_steps) == 0:
            self._losses.take(self._step, loss)
        self._note_losses()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.perf_counter()
        self._names_before = set(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Only names that came with the validation, because the metrics also contain training
        # values.
        self._validated |= set(trainer.callback_metrics) - self._names_before
        if self._file is None or self._done is None or self._paused is None:
            return
        # Reading them costs nothing: Lightning has already read them for the loggers.
        metrics = {
            name: float(metric)
            for name, metric in trainer.callback_metrics.items()
            if name in self._validated and metric.numel() == 1
        }
        span = (self._paused, time.perf_counter())
        self._write("validation", step=self._step, span=span, metrics=metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = trainer.strategy.engine
        if engine is not None and self._done is not None:
            self.note(engine.history.final_landings, final=True)
            self._note_losses(wait=True)
        self._close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merges all records into the timeline on rank 0 after the ranks have closed them."""
        if self._timeline is not None and trainer.is_global_zero and self._folder is not None:
            ranks = self._tool("run_files").merge(self._folder, self._timeline)
            if ranks < trainer.world_size:
                _log.warning(
                    "%s contains the records of %d of %d ranks. The other ranks wrote to their own"
                    " disks. To see the timeline of all ranks in `sdiloco report`, copy their"
                    " records to this folder.",
                    self._folder,
                    ranks,
                    trainer.world_size,
                )
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                self._attach(logger)

    def _attach(self, logger: Internal) -> None:
        """Uploads the report as an artifact of an MLflow or W&B run.

        Errors are only logged, because training has already finished.
        """
        kinds = {base.__name__ for base in type(logger).__mro__} & {"MLFlowLogger", "WandbLogger"}
        if not kinds or self._folder is None:
            return
        try:
            self._tool("report").report(self._folder)
            page = str(Path(self._folder) / "report" / "report.html")
            if "MLFlowLogger" in kinds:
                logger.experiment.log_artifact(logger.run_id, page, "sdiloco")
            else:
                logger.experiment.log_artifact(
                    page, name=f"sdiloco-report-{logger.version}", type="report"
                )
        except Exception as error:
            _log.warning(
                "The report was not uploaded as an artifact to %s: %s To create the report, run"
                " `sdiloco report %s`.",
                type(logger).__name__,
                error,
                self._folder,
            )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    # The lines of a record

    def note(self, landings: Iterable[Landing], final: bool = False) -> None:
        """Records landings.

        Args:
            landings: The landings of this rank.
            final: Whether the landings belong to the exchange at the end of the fit.
        """
        if self._file is None:
            return
        for landing in landings:
            fields = landing._asdict()
            fields["link_gbit_s"] = _known(landing.link_gbit_s)
            fields["on_link_s"] = _known(landing.on_link_s)
            diagnostics = fields.pop("diagnostics")
            if diagnostics is not None:
                diagnostics = diagnostics._asdict()
            self._write("landing", **fields, final=final, diagnostics=diagnostics)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        engine = trainer.strategy.engine
        if self._done is not None or engine is None:
            return
        self._done = time.perf_counter()
        self._step = engine.inner_steps
        topology = engine.topology
        self._write(
            "start",
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            groups=topology.num_groups,
            group=topology.group_index,
            shards=topology.group_size,
            shard=topology.group_rank,
            host=socket.gethostname(),
            site=engine.site,
            time=self._done,
            step=self._step,
            settings=_recorded(engine.rounds.settings),
        )
        self._note_fragments(pl_module, engine)

    def _note_fragments(self, pl_module: LightningModule, engine: StreamingDiLoCo) -> None:
        self._fragments = engine.fragments
        parameters = dict(pl_module.named_parameters())
        sizes = {
            name: (p.numel(), p.numel() * p.element_size())
            for name, p in parameters.items()
            if p.requires_grad
        }
        cut = [fragment.names for fragment in engine.fragments]
        self._write("fragments", step=self._step, fragments=cut, parameters=sizes)

    def _note_losses(self, wait: bool = False) -> None:
        for step, loss in self._losses.ready(wait):
            self._write("loss", step=step, loss=loss)

    def _write(self, kind: str, **fields: Forwarded) -> None:
        """Writes a line. If the disk is full, recording stops, but training continues."""
        if self._file is None:
            return
        for name in ("time", "done", "span", "spans"):
            if name in fields:
                fields[name] = self._on_clock(fields[name])
        # An older file may end in the middle of a line.
        begins = "\n" if kind == "start" and self._file.tell() else ""
        try:
            self._file.write(f"{begins}{json.dumps({'kind': kind, **fields})}\n")
        except OSError as error:
            path = self._file.name
            self._close()
            _log.warning(
                "%s cannot be written: %s. Training continues, but this rank stops recording until"
                " it is restarted. Free up disk space.",
                path,
                error,
            )

    def _on_clock(self, moments: "Moments") -> object:
        """Converts values of ``time.perf_counter()`` to seconds since 1970."""
        if isinstance(moments, Mapping):
            return {name: self._on_clock(moment) for name, moment in moments.items()}
        if isinstance(moments, float):
            return round(self._clock_offset + moments, 6)
        return [self._on_clock(moment) for moment in moments]

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # from a line that does not fit on the disk
                self._file.close()
            self._file = None


def _recorded(settings: Settings) -> dict[str, object]:
    """Converts the settings to a form that can be recorded."""
    compression = settings.compression
    return {
        "sync_every": settings.sync_every,
        "overlap_steps": settings.overlap_steps,
        **settings.numbers_and_policies,
        "fragments": settings.fragments,
        "compression": compression if isinstance(compression, str) else None,
    }


def _known(number: float) -> float | None:
    """Converts NaN to None, because JSON does not support NaN."""
    return None if math.isnan(number) else number


def _folder_of(trainer: Trainer) -> Path:
    """Returns the first logger's folder for the run, or the folder of its checkpoints."""
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    first = next(iter(trainer.loggers), None)
    if first is None or getattr(first, "log_dir", None) is not None:
        return folder
    # Only rank 0 knows a run name that a server has assigned.
    run: tuple[object, object] = trainer.strategy.broadcast((first.name, first.version))
    return folder.joinpath(*(str(part) for part in run if part is not None))


def monitors_of(trainer: Trainer) -> list[StreamingDiLoCoMonitorMixin]:
    """Returns the monitors among a trainer's callbacks."""
    return [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, StreamingDiLoCoMonitorMixin)
    ]


# Lines at the start

# The first few inner steps are slower than the others and are not counted.
_FIRST = 3
_LAST = 10

# If a signal may have to wait longer than this, a warning is logged. Its advice adds this many
# seconds for saving.
_LONG_SECONDS = 60.0
_SAVING_SECONDS = 60


class Announcement:
    """Logs the settings at the start of a run and the speed after ten inner steps."""

    def __init__(
        self, engine: StreamingDiLoCo, environment: Internal = None, why_rounds: str = ""
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._times: list[float] = []
        self._launch_bytes = _launch_bytes(engine)
        rank_zero_info(_start_line(engine, self._launch_bytes, why_rounds))

    def step(self) -> None:
        """Records the end of each of the first ten inner steps."""
        if len(self._times) >= _LAST:
            return
        self._times.append(time.monotonic())
        if len(self._times) == _LAST:
            seconds = median(after - before for before, after in pairwise(self._times[_FIRST:]))
            link = self._link_needed(seconds)
            rank_zero_info(f"Streaming DiLoCo: an inner step takes {short(seconds)} s{link}.")
            self._advise_on_signals(seconds)

    def _link_needed(self, seconds: float) -> str:
        """Formats the required link rate for the end of a sentence.

        Args:
            seconds: The duration of an inner step.
        """
        settings = self._engine.rounds.settings
        window = settings.overlap_steps * seconds
        if self._engine.topology.num_groups == 1:
            return ""
        if not window:
            return "; with overlap_steps=0, training waits for every fragment"
        # If fragments launch faster than they land, the link must carry all fragments of a round.
        rate_in_round = sum(self._launch_bytes) / (settings.sync_every * seconds)
        rate = max(max(self._launch_bytes) / window, rate_in_round)
        return (
            f"; overlap_steps={settings.overlap_steps} leaves {short(window)} s for each fragment,"
            f" so the link must carry {readable_rate(8 * rate / 1e9)} from each rank"
        )

    def _advise_on_signals(self, seconds: float) -> None:
        """Warns if a scheduler might kill the fit before the fit ends in response to a signal."""
        steps = self._engine.rounds.timetable.longest_wait(self._engine.inner_steps)
        if self._environment is None or steps * seconds <= _LONG_SECONDS:
            return
        early = math.ceil((steps * seconds + _SAVING_SECONDS) / 10) * 10
        advice = f"Allow {early} s from SIGTERM to SIGKILL"
        # Only Lightning's SLURM environment has a requeue signal. Without auto_requeue, it does not
        # listen for this signal.
        requeue = getattr(self._environment, "requeue_signal", None)
        if requeue:
            name = requeue.name.removeprefix("SIG") if self._environment.auto_requeue else "TERM"
            advice = f"Use sbatch --signal={name}@{early}"
        _log.warning(
            "After a termination signal, the fit continues until the next launch has landed, which"
            " takes up to %d inner steps or about %.0f s (%.2g s each). %s, which leaves a minute"
            " for saving. To shorten this time, use more fragments or a smaller sync_every.",
            steps,
            steps * seconds,
            seconds,
            advice,
        )


def _launch_bytes(engine: StreamingDiLoCo) -> list[int]:
    """Returns the number of bytes that this rank sends for each fragment, excluding buffers."""
    topology = engine.topology
    settings = engine.rounds.settings
    all_reduce = all_reduce_for(
        settings.exchange, topology.num_groups, settings.codec, settings.landing.kept
    )
    numels = {
        clean_name(name): parameter.numel() for name, parameter in engine.model.named_parameters()
    }
    control_bytes = (topology.num_groups - 1) * CONTROL_BYTES
    launch_bytes = []
    for fragment in engine.fragments:
        numel = sum(numels[name] for name in fragment.names)
        shard = -(-numel // topology.group_size)
        payload_bytes = all_reduce.bytes_to_others(shard, topology.group_index)
        launch_bytes.append(control_bytes + payload_bytes)
    return launch_bytes


def _start_line(engine: StreamingDiLoCo, launch_bytes: list[int], why_rounds: str) -> str:
    """Formats the log line about the settings and the number of bytes that each rank will send."""
    topology = engine.topology
    settings = engine.rounds.settings
    reason = f" ({why_rounds})" if why_rounds else ""
    least = readable(min(launch_bytes))
    most = readable(max(launch_bytes))
    sent = most if least == most else f"{least} to {most}"
    if settings.codec.traits.varies:
        sent = f"at most {most}"
    timetable = engine.rounds.timetable
    steps = engine.inner_steps - timetable.began_at
    first_launch = next(step for step in count(steps + 1) if timetable.schedule.launches(step))
    return (
        f"Streaming DiLoCo: {_counted(topology.num_groups, 'worker group')} of"
        f" {_counted(topology.group_size, 'rank')}, {_counted(len(engine.fragments), 'fragment')},"
        f" sync_every={settings.sync_every}{reason}, overlap_steps={settings.overlap_steps},"
        f" {_outer_settings(engine)}. Each rank sends {sent} per fragment. The first launch follows"
        f" inner step {timetable.began_at + first_launch}."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _outer_settings(engine: StreamingDiLoCo) -> str:
    """Formats the outer step's settings as a user would write them."""
    outer = engine.rounds.settings.outer
    parts = []
    for name, setting in engine.rounds.settings.numbers_and_policies.items():
        text = setting if isinstance(setting, str) else format(setting, "g")
        parts.append(f"{name}={text}")
    if any(fragment.matrices.stacks for fragment in engine.fragmented_model.fragments):
        parts.append(f"direction={outer.described()['outer_optimizer.direction']}")
    if outer.make is not None:
        parts.append(f"outer_optimizer={engine.fragmented_model.outer_optimizer.summary}")
    return ", ".join(parts)


def warn_of_few_rounds(schedule: Schedule, steps: int) -> None:
    """Warns if a run has fewer than `ENOUGH_ROUNDS` rounds and recommends a ``sync_every``."""
    rounds = schedule.rounds_in(steps)
    if rounds >= ENOUGH_ROUNDS:
        return
    advice = f"To get {ENOUGH_ROUNDS} rounds, train for more inner steps"
    for sync_every in range(min(schedule.sync_every - 1, steps // ENOUGH_ROUNDS), 0, -1):
        # A fragment that is in flight for most of a round lands too late to be useful.
        overlap_steps = min(schedule.overlap_steps, sync_every // 4)
        shorter = replace(schedule, sync_every=sync_every, overlap_steps=overlap_steps)
        if shorter.rounds_in(steps) >= ENOUGH_ROUNDS:
            advice = f"Choose sync_every={sync_every}"
            if overlap_steps != schedule.overlap_steps:
                advice += f" and overlap_steps={overlap_steps}"
            advice += f" to get {ENOUGH_ROUNDS} rounds"
            break
    _log.warning(
        "With sync_every=%d, only %d %s into the %d inner steps of this fit. The worker groups"
        " benefit little from each other, and the final loss will be a few percent higher than with"
        " DDP. %s.",
        schedule.sync_every,
        rounds,
        "round fits" if rounds == 1 else "rounds fit",
        steps,
        advice,
    )
