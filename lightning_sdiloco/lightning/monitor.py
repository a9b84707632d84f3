"""Shows what a run does: lines at its start, logged scalars, the progress bar, and a record of
every rank.

Nothing here changes training, waits for another rank, or sends anything between groups. What the
callback wrote is read as a `Run`, the source of a trace for Chrome or Perfetto.

[Note: clocks] Every rank writes times by its own clock, and hosts' clocks differ. But a flight ends
on no rank before all groups that count in it have launched it. So each flight bounds from both
sides how far a clock can be ahead of that of rank 0. A clock that can be right is left as it is;
another one is set to the middle of what the bounds allow.
"""

import json
import logging
import math
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.reduce import all_reduce_for
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.comm.communicator import page_locked
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.fragments import Landing, Span
from lightning_sdiloco.engine.shards import clean_name
from lightning_sdiloco.planning.units import readable, readable_rate, short

_log = logging.getLogger(__name__)

# What is logged and shown

_PREFIX = "sdiloco/"

# The charts of TensorBoard, each with the scalars that it shows.
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
    "Groups": ("groups_counted", "groups_left_out", "groups_outlying"),
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
    )
)
"""What a row of the loggers holds the sum of, over what landed since the one before."""


def scalars_of(landing: Landing) -> dict[str, float]:
    """Returns what is logged of a landing. What is unknown is left out."""
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
    }
    if "relay" in landing.spans:
        numbers["second_hop_ms"] = 1000 * landing.seconds("relay")
    if landing.diagnostics is not None:
        told = landing.diagnostics._asdict()
        numbers |= {
            f"cosine_group_{group}": cosine for group, cosine in enumerate(told.pop("cosines"))
        } | told
    return {_PREFIX + name: number for name, number in numbers.items() if not math.isnan(number)}


def add_to_row(row: dict[str, float], scalars: Mapping[str, float]) -> None:
    """Adds a landing to what the next row of the loggers holds: sums of what adds up, and the last
    of all else.
    """
    row |= {**scalars, **{name: row.get(name, 0) + scalars[name] for name in SUMMED}}


class Interval:
    """Sums up what is logged once a round, over ``sync_every`` inner steps or a few more, until a
    landing ends it.
    """

    def __init__(self, sync_every: int, first_step: int) -> None:
        self._sync_every = sync_every
        self._first_step = first_step
        self._began = time.perf_counter()
        self._waited = 0.0
        self._peak = math.nan

    def scalars_with(self, landing: Landing) -> dict[str, float]:
        """Counts a landing, and returns the scalars of the round if the landing ends it, otherwise
        none.
        """
        self._waited += landing.exposed_wait_s
        rates = [rate for rate in (self._peak, landing.link_gbit_s) if not math.isnan(rate)]
        self._peak = max(rates, default=math.nan)
        if landing.landed_at - self._first_step < self._sync_every:
            return {}
        now = landing.spans["land"][1]
        utilisation = 1 - min(1.0, self._waited / (now - self._began))
        scalars = {"compute_utilisation": utilisation, "peak_gbit_s": self._peak}
        self._began = now
        self._first_step = landing.landed_at
        self._waited = 0.0
        self._peak = math.nan
        return {
            _PREFIX + name: number for name, number in scalars.items() if not math.isnan(number)
        }


def progress(engine: StreamingDiLoCo, columns: float = math.inf) -> dict[str, str]:
    """Returns what the progress bar shows: as many entries as fit into its line, and at least the
    first.
    """
    flights = list(map(str, engine.in_flight))
    landing = engine.last_landing
    rate = math.nan if landing is None else landing.link_gbit_s
    schedule = engine.schedule
    steps = engine.steps_in_rounds
    outer_step = str(engine.round)
    if schedule.is_dense(steps):
        outer_step = f"dense {schedule.launches_in(0, steps)[0]}"
    entries = {
        "outer_step": outer_step,
        "in_flight": ", ".join(
            flights[:3] if len(flights) <= 3 else [*flights[:2], f"+{len(flights) - 2}"]
        )
        or "-",
        "exposed_wait": "-" if landing is None else f"{1000 * landing.exposed_wait_s:.3g} ms",
        "link": readable_rate(rate) if rate > 0 else "-",
    }
    while (
        len(entries) > 1
        and len(" ".join(f"{name}: {value}" for name, value in entries.items())) > columns
    ):
        entries.popitem()
    return entries


def lay_out(trainer: Any) -> None:
    charts = {
        title: ["Multiline", [_PREFIX + name for name in names]] for title, names in _CHARTS.items()
    }
    for logger in trainer.loggers:
        # By name: there is one class in each distribution, and neither need be there.
        if any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__):
            logger.experiment.add_custom_scalars({"Streaming DiLoCo": charts})


# The record of a rank


class Deferred:
    """Scalars on their way from the device to the host, in the order in which they were taken."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Tensor, Any]] = deque()

    def take(self, step: int, value: Tensor) -> None:
        scalar = value.detach().reshape(())
        copied = page_locked(scalar.shape, scalar.dtype, value.device).copy_(
            scalar, non_blocking=True
        )
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


class StreamingDiLoCoMonitorMixin:
    """Records what a run did, for `sdiloco report` and for a trace viewer.

    Every rank writes its own record, a file of JSON lines: inner steps, launches, flights,
    landings, waits and losses. None of it travels between groups, and training never waits for it.
    With a logger of MLflow or W&B the report becomes an artifact of the run when the fit ends.

    Args:
        folder: Where the records go. By default ``sdiloco`` in the run's folder of the trainer's
            first logger, or in its ``default_root_dir``.
        timeline: A file for a trace of all ranks on one time axis, in the JSON format of Chrome and
            Perfetto. Rank 0 writes it at the end of the fit, from the records it finds in the
            folder.
        diagnostics: Whether every landing measures how far the groups agree. This costs some passes
            over the fragment, in the background.

    Raises:
        ValueError: If an argument is of another type, or the strategy is not Streaming DiLoCo.

    Examples:
        >>> from lightning_sdiloco import StreamingDiLoCoMonitor, StreamingDiLoCoStrategy
        >>> callbacks = [StreamingDiLoCoMonitor(timeline="trace.json")]
        # doctest: +SKIP
        >>> Trainer(strategy=StreamingDiLoCoStrategy(), callbacks=callbacks).fit(model, data)
    """

    _report: Callable[[str], str]  # a command, which stands above this room

    def __init__(
        self, folder: str | None = None, timeline: str | None = None, diagnostics: bool = True
    ) -> None:
        for name, path, example in (
            ("folder", folder, "runs/sdiloco"),
            ("timeline", timeline, "trace.json"),
        ):
            if path is not None and not isinstance(path, str | os.PathLike):
                raise ValueError(
                    f"{name}={path!r} is of type {type(path).__name__}, not a path. Give one, such"
                    f" as {name}={example!r}, or leave it out."
                )
        if not isinstance(diagnostics, bool):
            raise ValueError(
                f"diagnostics={diagnostics!r} is neither True nor False. Give one of them."
            )
        self.diagnostics = diagnostics
        self._folder = folder
        self._timeline = timeline
        self._file: Any = None
        self._ahead = 0.0  # of time.perf_counter(), which runs more steadily than the clock
        self._fragments: tuple[Fragment, ...] = ()
        self._step = 0
        self._losses = Deferred()
        self._done: float | None = None
        self._paused: float | None = None
        self._names_before = set[str]()
        self._validated = set[str]()

    # Hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not hasattr(trainer.strategy, "outer_state_dict"):
            raise ValueError(
                "StreamingDiLoCoMonitor watches Streaming DiLoCo, but the strategy is"
                f" {type(trainer.strategy).__name__}. Take the monitor out, or choose"
                " strategy='streaming_diloco'."
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        folder = Path(self._folder or _folder_of(trainer) / "sdiloco")
        folder.mkdir(parents=True, exist_ok=True)
        # A line at a time, so that a run that is killed leaves what it did.
        path = folder / f"rank_{trainer.global_rank:05d}.jsonl"
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._folder = str(folder)
        self._ahead = time.time() - time.perf_counter()
        self._fragments = ()
        self._done = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning calls no hook at the start of an idle batch.
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        engine = trainer.strategy.engine
        if engine.inner_steps == self._step:
            return
        self._step = engine.inner_steps
        began = self._done
        self._done = engine.step_span[1]
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
        metrics = {
            name: float(value)
            for name, value in told
            if name in self._validated and value.numel() == 1
        }
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
                    "%s has the records of %d of %d ranks: the others wrote to their own disks."
                    " Copy theirs there, and `sdiloco report` shows the timeline of all.",
                    self._folder,
                    len(run.ranks),
                    trainer.world_size,
                )
            write_timeline(self._timeline, run)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                self._attach(logger)

    def _attach(self, logger: Any) -> None:
        """Makes the report an artifact of a run of MLflow or W&B: training is over, and nothing of
        this may end it.
        """
        kinds = {base.__name__ for base in type(logger).__mro__} & {"MLFlowLogger", "WandbLogger"}
        if not kinds or self._folder is None:
            return
        try:
            self._report(self._folder)
            page = str(Path(self._folder) / "report" / "report.html")
            if "MLFlowLogger" in kinds:
                logger.experiment.log_artifact(logger.run_id, page, "sdiloco")
            else:
                logger.experiment.log_artifact(
                    page, name=f"sdiloco-report-{logger.version}", type="report"
                )
        except Exception as error:
            _log.warning(
                "The report is not an artifact of the run of %s: %s `sdiloco report %s` makes it.",
                type(logger).__name__,
                error,
                self._folder,
            )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    # What is recorded

    def note(self, landings: Iterable[Landing], final: bool = False) -> None:
        """Records landings, which a fit hands over; ``final``: they belong to the exchange at its
        end.
        """
        for landing in landings if self._file is not None else ():
            rates = {"link_gbit_s": landing.link_gbit_s, "on_link_s": landing.on_link_s}
            told = landing._asdict() | {
                name: None if math.isnan(rate) else rate for name, rate in rates.items()
            }
            diagnostics = told.pop("diagnostics")
            self._write(
                "landing", **told, final=final, diagnostics=diagnostics and diagnostics._asdict()
            )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        engine = trainer.strategy.engine
        if self._done is not None or engine is None:
            return
        self._done = time.perf_counter()
        self._step = engine.inner_steps
        topology = engine.topology
        settings = engine.settings
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
                "compression": settings.compression
                if isinstance(settings.compression, str)
                else None,
            },
        )
        self._note_fragments(pl_module, engine)

    def _note_fragments(self, pl_module: Any, engine: StreamingDiLoCo) -> None:
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

    def _write(self, kind: str, **told: Any) -> None:
        """Writes a line; a disk without room ends the record, and not the training that it is
        about.
        """
        if self._file is None:
            return

        def on_clock(moments: Any) -> Any:
            """Makes moments of ``time.perf_counter()`` seconds since 1970 on this rank's clock, to
            a microsecond.
            """
            if isinstance(moments, Mapping):
                return {name: on_clock(each) for name, each in moments.items()}
            return (
                round(self._ahead + moments, 6)
                if isinstance(moments, float)
                else list(map(on_clock, moments))
            )

        told |= {
            name: on_clock(told[name]) for name in ("time", "done", "span", "spans") if name in told
        }
        # An older file may end within a line.
        begins = "\n" if kind == "start" and self._file.tell() else ""
        try:
            self._file.write(f"{begins}{json.dumps({'kind': kind, **told})}\n")
        except OSError as error:
            path = self._file.name
            self._close()
            _log.warning(
                "%s cannot be written: %s. Training continues, but this rank records nothing more"
                " until it is restarted. Make room on the disk.",
                path,
                error,
            )

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of a line for which there is no room
                self._file.close()
            self._file = None


def _folder_of(trainer: Any) -> Path:
    """Returns where a run keeps its files: beside checkpoints, where the first logger has no folder
    for each run.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    first = next(iter(trainer.loggers), None)
    if first is None or getattr(first, "log_dir", None) is not None:
        return folder
    # Only rank 0 knows the name of a run that a server has given.
    run: tuple[Any, Any] = trainer.strategy.broadcast((first.name, first.version))
    return folder.joinpath(*(str(part) for part in run if part is not None))


def monitors_of(trainer: Any) -> list[StreamingDiLoCoMonitorMixin]:
    return [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, StreamingDiLoCoMonitorMixin)
    ]


Line = dict[str, Any]
Event = dict[str, Any]

_TRAINING = 0  # the row of the trace; the fragments' rows follow
_IN_BACKGROUND = ("encode", "transfer", "decode", "relay", "outer_step")


class Step(NamedTuple):
    step: int
    span: Span
    done: float


class LandingRecord(NamedTuple):
    """A landing as it was written down; `lightning_sdiloco.Landing` describes most of the fields."""

    fragment: int
    launched_at: int
    landed_at: int
    final: bool
    bytes_sent: int
    bytes_received: int
    outer_grad_norm: float
    group_norms: list[float]
    counted: list[int]
    left_out: list[int]
    outlying: list[int]
    spans: dict[str, Span]
    diagnostics: dict[str, Any] | None
    link_gbit_s: float | None = None
    sites: Sequence[str] = ()

    @property
    def exchange(self) -> str:
        """The exchange that ran: only two shots have a second hop."""
        return "two_shot" if "relay" in self.spans else "gather"

    def seconds(self, name: str) -> float:
        began, ended = self.spans.get(name, (0.0, 0.0))
        return ended - began


class Validation(NamedTuple):
    step: int
    span: Span
    metrics: dict[str, float]


@dataclass
class Rank:
    """What one rank did; times are in seconds since 1970, by its own clock; see [Note: clocks]."""

    rank: int
    about: dict[str, Any]
    fragments: list[list[str]] = field(default_factory=list)
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    landings: list[LandingRecord] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    starts: list[tuple[float, int]] = field(default_factory=list)

    @property
    def group(self) -> int:
        return int(self.about["group"])

    @property
    def name(self) -> str:
        site = self.about.get("site")
        return f"group {self.group}" if site is None else str(site)


class Run(NamedTuple):
    ranks: list[Rank]

    @property
    def heads(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.about["shard"] == 0]

    @property
    def began(self) -> float:
        return min(rank.steps[0].span[0] for rank in self.ranks if rank.steps)


def records_in(folder: str | Path) -> Path:
    """Returns where the records are: in a folder, its subfolder ``sdiloco``, or its newest
    ``version_N``'s.
    """
    versions = [
        path
        for at in ("version_*", "lightning_logs/version_*")
        for path in Path(folder).glob(f"{at}/sdiloco")
    ]
    by_number = sorted(
        versions, key=lambda path: int(re.sub(r"\D", "", path.parent.name) or -1), reverse=True
    )
    for place in (Path(folder), Path(folder) / "sdiloco", *by_number):
        if any(place.glob("rank_*.jsonl")):
            return place
    raise ValueError(
        f"{folder} holds no records (rank_00000.jsonl and so on). Give the folder that a"
        " StreamingDiLoCoMonitor wrote: add one to the trainer's callbacks; by default it writes"
        " into sdiloco in the logger's folder."
    )


def read_run(folder: str | Path) -> Run:
    """Reads the records in a folder, or where `records_in` finds them."""
    place = records_in(folder)
    starts = [parts for parts in map(_parts, sorted(place.glob("rank_*.jsonl"))) if parts]
    ranks = [rank for rank in (_read(parts, starts[0]) for parts in starts) if rank.steps]
    if ranks:
        return Run(ranks)
    raise ValueError(f"The records in {place} hold no inner step: the run ended before its first.")


def _parts(path: Path) -> list[list[Line]]:
    """Returns the lines of a record, one part for each time that the run was started or resumed."""
    lines: list[Line] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # of the last line of a process that was killed
            lines.append(json.loads(line))
    starts = [number for number, line in enumerate(lines) if line["kind"] == "start"]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _ahead(part: Sequence[Line], reference: Sequence[Line]) -> float:
    """Returns by how many seconds a rank's clock is ahead of another's; see [Note: clocks]."""
    least = float("-inf")
    most = float("inf")
    flight = itemgetter("fragment", "launched_at", "final")
    flights = {flight(line): line for line in reference if line["kind"] == "landing"}
    own = part[0]["group"]
    other = reference[0]["group"]
    for line in part:
        together = flights.get(flight(line)) if line["kind"] == "landing" else None
        if together is not None and (
            own == other or own in together["counted"] and other in line["counted"]
        ):
            least = max(least, line["spans"]["launch"][0] - together["spans"]["flight"][1])
            most = min(most, line["spans"]["flight"][1] - together["spans"]["launch"][0])
    return 0.0 if least <= 0 <= most else (least + most) / 2


def _read(parts: Sequence[list[Line]], reference: Sequence[list[Line]]) -> Rank:
    """Reads the record of a rank, with its clock set by another's at each start of the run."""
    rank = Rank(parts[0][0]["rank"], parts[0][0])
    for number, part in enumerate(parts):
        is_first = parts is reference or number >= len(reference)
        ahead = 0.0 if is_first else _ahead(part, reference[number])
        for line in part:
            kind = line["kind"]
            step = line.get("step", 0)
            began, ended = line.get("span", (0.0, 0.0))
            span = began - ahead, ended - ahead
            if kind == "start":
                rank.starts.append((line["time"] - ahead, step))
            elif kind == "step":
                rank.steps.append(Step(step, span, line["done"] - ahead))
            elif kind == "landing":
                told = {name: line[name] for name in LandingRecord.__annotations__ if name in line}
                told["spans"] = {
                    name: (one - ahead, other - ahead)
                    for name, (one, other) in line["spans"].items()
                }
                rank.landings.append(LandingRecord(**told))
            elif kind == "validation":
                rank.validations.append(Validation(step, span, line["metrics"]))
            elif kind == "loss":
                rank.losses.append((step, line["loss"]))
            elif kind == "fragments":
                rank.fragments = line["fragments"]
                rank.parameters = line["parameters"]
    return rank


# The trace


def write_timeline(path: str | Path, run: Run) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(trace(run)), encoding="utf-8")


def trace(run: Run) -> dict[str, Any]:
    numbers = count(1)
    events = [event for rank in run.ranks for event in _events(rank, run.began, numbers)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(rank: Rank, zero: float, numbers: Iterator[int]) -> Iterator[Event]:
    shard = f", rank {rank.rank}" if rank.about["shards"] > 1 else ""
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": rank.rank,
        "args": {"name": f"{rank.name}{shard}"},
    }
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": rank.rank,
        "args": {"sort_index": rank.rank},
    }
    for row, name in enumerate(
        ["training", *(f"fragment {fragment}" for fragment in range(len(rank.fragments)))]
    ):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": rank.rank,
            "tid": row,
            "args": {"name": name},
        }
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": rank.rank,
            "tid": row,
            "args": {"sort_index": row},
        }

    def event(kind: str, name: str, row: int, moment: float, **more: Any) -> Event:
        return {
            "ph": kind,
            "name": name,
            "pid": rank.rank,
            "tid": row,
            "ts": round(1e6 * (moment - zero), 3),
            **more,
        }

    def piece(name: str, row: int, span: Span, **args: Any) -> Event:
        duration = round(1e6 * max(0.0, span[1] - span[0]), 3)
        return event("X", name, row, span[0], dur=duration, args=args)

    for step in rank.steps:
        yield piece("step", _TRAINING, step.span, step=step.step)
    for validation in rank.validations:
        yield piece("validation", _TRAINING, validation.span, step=validation.step)
    for landing in rank.landings:
        about = {
            name: getattr(landing, name)
            for name in ("fragment", "launched_at", "landed_at", "bytes_sent")
        }
        for name in ("launch", "wait", "land"):
            yield piece(name, _TRAINING, landing.spans[name], **about)
        row = 1 + landing.fragment
        yield piece(
            "final flight" if landing.final else "flight", row, landing.spans["flight"], **about
        )
        for name in _IN_BACKGROUND:
            if name in landing.spans:
                yield piece(name.replace("relay", "second_hop"), row, landing.spans[name])
        number = next(numbers)
        yield event("s", "flight", _TRAINING, landing.spans["launch"][0], id=number, cat="flight")
        yield event(
            "f", "flight", _TRAINING, landing.spans["land"][0], id=number, cat="flight", bp="e"
        )
    for moment, what in changes(rank):
        yield event("i", what, _TRAINING, moment, s="p")


def changes(rank: Rank) -> Iterator[tuple[float, str]]:
    """Yields what a rank of a site saw of sites that come and go: when, and what in words."""
    if rank.about.get("site") is None:
        return
    for moment, step in rank.starts:
        yield moment, f"{rank.name} starts" + (f" after inner step {step}" if step else "")
    before: dict[int, set[str]] = {}
    counts: set[str] = set()
    for landing in rank.landings:
        before[landing.fragment] = set(landing.sites)
        # A round of one fragment may be missed by accident; a site in none of the last rounds is
        # away.
        now = set().union(*before.values())
        for site in sorted(now ^ counts):
            yield (
                landing.spans["land"][1],
                f"{site} counts" if site in now else f"{site} counts no longer",
            )
        counts = now


ENOUGH_ROUNDS = 10
"""A fit with fewer rounds gets a warning."""

# The first inner steps are slow for other reasons.
_FIRST = 3
_LAST = 10

# A signal that waits for longer gets a warning, with this many seconds more for saving.
_LONG_SECONDS = 60.0
_SAVING_SECONDS = 60


class Announcement:
    """Announces at the start what trains, and after ten inner steps how fast."""

    def __init__(self, engine: StreamingDiLoCo, environment: Any = None) -> None:
        self._engine = engine
        self._environment = environment
        self._times: list[float] = []
        topology = engine.topology
        settings = engine.settings
        # What a rank sends to other worker groups for each fragment, without buffers.
        others = topology.num_groups - 1
        all_reduce = all_reduce_for(
            settings.exchange, topology.num_groups, settings.codec, settings.landing.kept
        )
        numels = {
            clean_name(name): parameter.numel()
            for name, parameter in engine.model.named_parameters()
        }
        shards = [
            -(-sum(numels[name] for name in own.names) // topology.group_size)
            for own in engine.fragments
        ]
        self._bytes = [
            others * CONTROL_BYTES + all_reduce.bytes_to_others(shard, topology.group_index)
            for shard in shards
        ]
        least = readable(min(self._bytes))
        most = readable(max(self._bytes))
        sent = least if least == most else f"{least} to {most}"
        first = next(
            step for step in count(engine.steps_in_rounds + 1) if engine.schedule.launches(step)
        )
        numbers = ", ".join(
            f"{name}={value if isinstance(value, str) else format(value, 'g')}"
            for name, value in settings.numbers_and_policies.items()
        )
        if any(fragment.matrices.stacks for fragment in engine.rounds.fragments):
            numbers += f", direction={settings.outer.described()['outer_optimizer.direction']}"
        if settings.outer.make is not None:
            numbers += f", outer_optimizer={engine.rounds.outer_optimizer.summary}"
        counts = (
            (topology.num_groups, "worker group"),
            (topology.group_size, "rank"),
            (len(shards), "fragment"),
        )
        groups, ranks, fragments = (
            f"{number} {what}{'s' * (number != 1)}" for number, what in counts
        )
        rank_zero_info(
            f"Streaming DiLoCo: {groups} of {ranks}, {fragments}, sync_every={settings.sync_every},"
            f" overlap_steps={settings.overlap_steps}, {numbers}; each rank sends"
            f" {f'at most {most}' if settings.codec.varies() else sent} a fragment; the first"
            f" launch follows inner step {engine.inner_steps - engine.steps_in_rounds + first}."
        )

    def step(self) -> None:
        """Notes that an inner step has ended. After the first ten it does nothing."""
        if len(self._times) >= _LAST:
            return
        self._times.append(time.monotonic())
        if len(self._times) < _LAST:
            return
        times = self._times[_FIRST:]
        settings = self._engine.settings
        seconds = median(after - before for before, after in zip(times, times[1:], strict=False))
        window = settings.overlap_steps * seconds
        of_link = ""
        if self._engine.topology.num_groups > 1 and not window:
            of_link = "; with overlap_steps=0 training waits for every fragment"
        elif self._engine.topology.num_groups > 1:
            # Where fragments follow each other faster than they land, what counts is all of them in
            # a round.
            rate = max(
                max(self._bytes) / window, sum(self._bytes) / (settings.sync_every * seconds)
            )
            of_link = (
                f"; overlap_steps={settings.overlap_steps} gives the link {short(window)} s a"
                f" fragment, so it has to carry {readable_rate(8 * rate / 1e9)} from each rank"
            )
        rank_zero_info(f"Streaming DiLoCo: an inner step takes {short(seconds)} s{of_link}.")
        steps = self._engine.rounds.longest_wait(self._engine.inner_steps)
        if self._environment is None or steps * seconds <= _LONG_SECONDS:
            return
        early = math.ceil((steps * seconds + _SAVING_SECONDS) / 10) * 10
        give = f"Allow {early} s from SIGTERM to SIGKILL"
        # Only Lightning's environment for SLURM has one. Without auto_requeue it does not listen
        # for it.
        requeue = getattr(self._environment, "requeue_signal", None)
        if requeue:
            name = requeue.name.removeprefix("SIG") if self._environment.auto_requeue else "TERM"
            give = f"Use sbatch --signal={name}@{early}"
        _log.warning(
            "After a termination signal the fit goes on until a launch that follows it has landed:"
            " up to %d inner steps, about %.0f s (%.2g s each). %s, which leaves a minute for"
            " saving. More fragments or a smaller sync_every shorten this.",
            steps,
            steps * seconds,
            seconds,
            give,
        )


def warn_of_few_rounds(schedule: Schedule, steps: int) -> None:
    """Warns if fewer than `ENOUGH_ROUNDS` rounds fit into a run, and says which ``sync_every``
    would do.
    """
    rounds = schedule.rounds_in(steps)
    if rounds >= ENOUGH_ROUNDS:
        return
    advice = f"For {ENOUGH_ROUNDS} rounds train for more inner steps"
    for sync_every in range(min(schedule.sync_every - 1, steps // ENOUGH_ROUNDS), 0, -1):
        # What waits for a large part of a round comes too late to be of use.
        overlap_steps = min(schedule.overlap_steps, sync_every // 4)
        if (
            replace(schedule, sync_every=sync_every, overlap_steps=overlap_steps).rounds_in(steps)
            >= ENOUGH_ROUNDS
        ):
            less = (
                ""
                if overlap_steps == schedule.overlap_steps
                else f" and overlap_steps={overlap_steps}"
            )
            advice = f"Choose sync_every={sync_every}{less} for {ENOUGH_ROUNDS} rounds"
            break
    _log.warning(
        "With sync_every=%d only %d %s into the %d inner steps of this fit: the worker groups learn"
        " little from each other, and the loss ends some percent above DDP's. %s.",
        schedule.sync_every,
        rounds,
        "round fits" if rounds == 1 else "rounds fit",
        steps,
        advice,
    )
