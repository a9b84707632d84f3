"""Tells what a run does: logged scalars, the progress bar, and a callback that keeps a record of every rank.

Nothing here changes training, waits for another rank, or sends anything between groups. `records` reads what the
callback wrote.
"""

import json
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import Fragment
from lightning_sdiloco.comm import page_locked
from lightning_sdiloco.engine import Landing, Span, StreamingDiLoCo
from lightning_sdiloco.lightning.records import read_run, write_timeline
from lightning_sdiloco.planning import readable_rate

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

_log = logging.getLogger(__name__)

# What is logged and shown

_PREFIX = "sdiloco/"

LAYOUT = {
    "Streaming DiLoCo": {
        "Utilisation": ("compute_utilisation",),
        "Waiting (ms)": ("exposed_wait_ms",),
        "Link (Gbit/s)": ("link_gbit_s", "peak_gbit_s"),
        "Bytes": ("bytes_sent", "bytes_received"),
        "Time in flight (ms)": tuple(
            f"{part}_ms" for part in ("in_flight", "encode", "transfer", "decode", "second_hop", "outer_step")
        ),
        "Outer gradient": ("outer_grad_norm", "outer_grad_norm_group_.*"),
        "Cosine with the mean": ("cosine_group_.*",),
        "Outer step": ("outer_lr", "outer_momentum_norm"),
        "Local from outer parameters": ("local_distance",),
        "Compression error": ("compression_error",),
        "Groups": ("groups_counted", "groups_left_out", "groups_outlying"),
    }
}
"""The charts of TensorBoard, each with the scalars that it shows, without their prefix."""


def scalars_of(landing: Landing) -> dict[str, float]:
    """Returns what is logged of a landing. What cannot be told is left out."""
    numbers: dict[str, float] = {
        "fragment": landing.fragment,
        "bytes_sent": landing.bytes_sent,
        "bytes_received": landing.bytes_received,
        "exposed_wait_ms": 1000 * landing.exposed_wait_s,
        "in_flight_ms": 1000 * landing.in_flight_s,
        **{f"{part}_ms": 1000 * landing.seconds(part) for part in ("encode", "transfer", "decode", "outer_step")},
        "link_gbit_s": landing.link_gbit_s,
        "outer_grad_norm": landing.outer_grad_norm,
        **{f"outer_grad_norm_group_{group}": norm for group, norm in enumerate(landing.group_norms)},
        "outer_lr": landing.outer_lr,
        "groups_counted": len(landing.counted),
        "groups_left_out": len(landing.left_out),
        "groups_outlying": len(landing.outlying),
    }
    if "relay" in landing.spans:
        numbers["second_hop_ms"] = 1000 * landing.seconds("relay")
    if landing.diagnostics is not None:
        told = landing.diagnostics._asdict()
        numbers |= {f"cosine_group_{group}": cosine for group, cosine in enumerate(told.pop("cosines"))} | told
    return {_PREFIX + name: number for name, number in numbers.items() if not math.isnan(number)}


class Interval:
    """Sums up what is logged once a round, over ``sync_every`` inner steps or a few more, until a landing ends it."""

    def __init__(self, sync_every: int, first_step: int) -> None:
        self._sync_every = sync_every
        self._began = time.perf_counter()
        self._first_step = first_step
        self._waited = 0.0
        self._peak = math.nan

    def scalars_with(self, landing: Landing) -> dict[str, float]:
        """Counts a landing, and returns the scalars of the round if the landing ends it, otherwise none."""
        self._waited += landing.exposed_wait_s
        rates = [rate for rate in (self._peak, landing.link_gbit_s) if not math.isnan(rate)]
        self._peak = max(rates, default=math.nan)
        if landing.landed_at - self._first_step < self._sync_every:
            return {}
        now = landing.spans["land"][1]
        utilisation = 1 - min(1.0, self._waited / (now - self._began))
        scalars = {"compute_utilisation": utilisation, "peak_gbit_s": self._peak}
        self._began, self._first_step, self._waited, self._peak = now, landing.landed_at, 0.0, math.nan
        return {_PREFIX + name: number for name, number in scalars.items() if not math.isnan(number)}


def progress(engine: StreamingDiLoCo, columns: float = math.inf) -> dict[str, str]:
    """Returns what the progress bar shows: as many entries as fit into its line, and at least the first."""
    flights, landing = list(map(str, engine.in_flight)), engine.last_landing
    rate = math.nan if landing is None else landing.link_gbit_s
    entries = {
        "outer_step": str(engine.round),
        "in_flight": ", ".join(flights[:3] if len(flights) <= 3 else [*flights[:2], f"+{len(flights) - 2}"]) or "-",
        "exposed_wait": "-" if landing is None else f"{1000 * landing.exposed_wait_s:.3g} ms",
        "link": readable_rate(rate) if rate > 0 else "-",
    }
    while len(entries) > 1 and len(" ".join(f"{name}: {value}" for name, value in entries.items())) > columns:
        entries.popitem()
    return entries


def lay_out(trainer: Any) -> None:
    layout = {
        section: {title: ["Multiline", [_PREFIX + name for name in names]] for title, names in charts.items()}
        for section, charts in LAYOUT.items()
    }
    for logger in trainer.loggers:
        # By name: there is one class in each distribution, and neither need be there.
        if any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__):
            logger.experiment.add_custom_scalars(layout)


# The record of a rank


class Deferred:
    """Scalars on their way from the device to the host, in the order in which they were taken.

    Examples:
        >>> losses = Deferred()
        >>> losses.take(1, torch.tensor(0.5))
        >>> losses.ready()
        [(1, 0.5)]
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Tensor, Any]] = deque()

    def take(self, step: int, value: Tensor) -> None:
        scalar = value.detach().reshape(())
        copied = page_locked(scalar.shape, scalar.dtype, value.device).copy_(scalar, non_blocking=True)
        event = None
        if value.device.type != "cpu":
            event = torch.get_device_module(value.device).Event()
            event.record()
        self._waiting.append((step, copied, event))

    def ready(self, wait: bool = False) -> list[tuple[int, float]]:
        arrived = []
        while self._waiting:
            step, copied, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._waiting.popleft()
            arrived.append((step, float(copied)))
        return arrived


class StreamingDiLoCoMonitorMixin(_Base):
    """Keeps what a run did, for `sdiloco report` and for a trace viewer.

    Every rank writes a record of its own, a file of JSON lines: inner steps, launches, flights, landings, waits and
    losses. None of it travels between groups, and training never waits for it.

    Args:
        folder: Where the records go. By default ``sdiloco`` in the folder of the trainer's first logger, or in its
            ``default_root_dir``.
        timeline: A file for a trace of all ranks on one time axis, in the JSON format of Chrome and Perfetto. Rank 0
            writes it at the end of the fit, from the records that it finds in the folder.
        diagnostics: Whether every landing measures how far the groups agree. That costs some passes over the fragment,
            in the background.

    Raises:
        ValueError: If the strategy is not Streaming DiLoCo.
    """

    def __init__(self, folder: str | None = None, timeline: str | None = None, diagnostics: bool = True) -> None:
        self.diagnostics = diagnostics
        self._folder = folder
        self._timeline = timeline
        self._file: Any = None
        self._ahead = 0.0  # of time.perf_counter(), which runs more steadily than the clock
        self._fragments: tuple[Fragment, ...] = ()
        self._step = 0
        self._done: float | None = None
        self._paused: float | None = None
        self._losses = Deferred()
        self._names_before: set[str] = set()
        self._validated: set[str] = set()

    # Hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not hasattr(trainer.strategy, "outer_state_dict"):
            raise ValueError(
                "StreamingDiLoCoMonitor watches Streaming DiLoCo, and the strategy is"
                f" {type(trainer.strategy).__name__}. Take the monitor out, or choose strategy='streaming_diloco'."
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        folder = Path(self._folder or Path(trainer.log_dir or trainer.default_root_dir) / "sdiloco")
        folder.mkdir(parents=True, exist_ok=True)
        # A line at a time, so that a run that is killed leaves what it did.
        path = folder / f"rank_{trainer.global_rank:05d}.jsonl"
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._folder = str(folder)
        self._ahead = time.time() - time.perf_counter()
        self._fragments, self._done = (), None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._begin(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._begin(trainer, pl_module)
        engine = trainer.strategy.engine
        if engine.inner_steps == self._step:
            return
        self._step = engine.inner_steps
        began, self._done = self._done, engine.step_span[1]
        self._write("step", step=self._step, span=(began, engine.step_span[0]), done=self._done)
        if engine.fragments is not self._fragments:
            self._note_fragments(pl_module, engine)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and self._step % max(1, trainer.log_every_n_steps) == 0:
            self._losses.take(self._step, loss)
        self._note_losses()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused = time.perf_counter()
        self._names_before = set(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        # The names that came with a validation: the metrics hold what training logs as well.
        self._validated |= set(trainer.callback_metrics) - self._names_before
        if self._file is None or self._done is None or self._paused is None:
            return
        # Reading them costs nothing: Lightning has read them for the loggers already.
        told = trainer.callback_metrics.items()
        metrics = {name: float(value) for name, value in told if name in self._validated and value.numel() == 1}
        span = self._paused, time.perf_counter()
        self._write("validation", step=self._step, span=span, metrics=metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.engine
        if engine is not None and self._done is not None:
            self.note(engine.final_landings, final=True)
            self._note_losses(wait=True)
        self._close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Merges the records into the timeline, on rank 0: by now all ranks have closed theirs."""
        if self._timeline is not None and trainer.is_global_zero and self._folder is not None:
            run = read_run(self._folder)
            if len(run.ranks) < trainer.world_size:
                _log.warning(
                    "%s has the records of %d of %d ranks: the others wrote to disks of their own. Copy theirs there,"
                    " and `sdiloco report` makes the timeline of all.",
                    self._folder,
                    len(run.ranks),
                    trainer.world_size,
                )
            write_timeline(self._timeline, run)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    # What is recorded

    def note(self, landings: Iterable[Landing], final: bool = False) -> None:
        """Records landings, which the strategy's callback hands over.

        Args:
            landings: The landings.
            final: Whether they belong to the exchange at the end of the fit.
        """
        for landing in landings if self._file is not None else ():
            rates = {"link_gbit_s": landing.link_gbit_s, "on_link_s": landing.on_link_s}
            told = landing._asdict() | {name: None if math.isnan(rate) else rate for name, rate in rates.items()}
            told["final"] = final
            spans = {name: self._on_clock(span) for name, span in told.pop("spans").items()}
            diagnostics = told.pop("diagnostics")
            self._write("landing", **told, spans=spans, diagnostics=diagnostics and diagnostics._asdict())

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.engine
        if self._done is not None or engine is None:
            return
        self._done, self._step = time.perf_counter(), engine.inner_steps
        topology, settings = engine.topology, engine.settings
        if self._file is not None and self._file.tell():
            self._append("")  # what was here before may end within a line
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
            settings={
                "sync_every": settings.sync_every,
                "overlap_steps": settings.overlap_steps,
                **settings.numbers_and_policies,
                "fragments": settings.fragments,
                "compression": settings.compression if isinstance(settings.compression, str) else None,
            },
        )
        self._note_fragments(pl_module, engine)

    def _note_fragments(self, pl_module: Any, engine: StreamingDiLoCo) -> None:
        self._fragments = engine.fragments
        parameters = dict(pl_module.named_parameters())
        sizes = {name: (p.numel(), p.numel() * p.element_size()) for name, p in parameters.items() if p.requires_grad}
        cut = [fragment.names for fragment in engine.fragments]
        self._write("fragments", step=self._step, fragments=cut, parameters=sizes)

    def _note_losses(self, wait: bool = False) -> None:
        for step, loss in self._losses.ready(wait):
            self._write("loss", step=step, loss=loss)

    def _write(self, kind: str, **told: Any) -> None:
        for name in ("time", "done"):
            if name in told:
                told[name] = round(self._ahead + told[name], 6)
        if "span" in told:
            told["span"] = self._on_clock(told["span"])
        if self._file is not None:
            self._append(json.dumps({"kind": kind, **told}))

    def _append(self, line: str) -> None:
        """Writes a line; a disk without room ends the record, and not the training that it is about."""
        try:
            self._file.write(line + "\n")
        except OSError as error:
            path = self._file.name
            self._close()
            _log.warning(
                "%s cannot be written: %s. Training goes on, and no more of it is recorded by this rank, until it is"
                " started again. Make room on the disk.",
                path,
                error,
            )

    def _on_clock(self, span: Span) -> Span:
        """Converts moments of ``time.perf_counter()`` to seconds since 1970 on this rank's clock, to a microsecond."""
        return round(self._ahead + span[0], 6), round(self._ahead + span[1], 6)

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of a line for which there is no room
                self._file.close()
            self._file = None


def monitors_of(trainer: Any) -> list[StreamingDiLoCoMonitorMixin]:
    return [callback for callback in trainer.callbacks if isinstance(callback, StreamingDiLoCoMonitorMixin)]
