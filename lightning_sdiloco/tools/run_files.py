"""Reads the records of a `StreamingDiLoCoMonitor` and converts them to a trace.

[Note: clocks] Every rank records times on its own clock, and the clocks of hosts differ. However, a
flight never ends on a rank before all groups that count in it have launched the fragment. Each
flight therefore gives a lower and an upper bound for the difference between that rank's clock and
rank 0's clock. If the bounds allow a difference of zero, the clock is not changed. Otherwise, the
clock is corrected by the mean of the bounds.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from lightning_sdiloco.engine.fragments import Span
from lightning_sdiloco.tools.output import Numbers

Line = Numbers
Event = Numbers


class Step(NamedTuple):
    step: int
    span: Span
    done: float


class LandingRecord(NamedTuple):
    """A recorded landing, with most of the fields of `lightning_sdiloco.Landing`."""

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
    diagnostics: Numbers | None
    link_gbit_s: float | None = None
    sites: Sequence[str] = ()
    lost_steps: int = 0
    wrong_buffers: Sequence[int] = ()

    @staticmethod
    def of(line: Line, ahead: float) -> "LandingRecord":
        """Reads a line whose times come from a clock that is ``ahead`` seconds fast."""
        fields = {name: line[name] for name in LandingRecord._fields if name in line}
        spans = {name: _set_back(span, ahead) for name, span in line["spans"].items()}
        return LandingRecord(**{**fields, "spans": spans})

    @property
    def exchange(self) -> str:
        """The exchange that was used. Only a two-shot exchange has a second hop."""
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
    """A rank's record, with times in seconds since 1970; see [Note: clocks]."""

    rank: int
    about: Numbers
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

    def add(self, line: Line, ahead: float) -> None:
        """Adds a line whose times come from a clock that is ``ahead`` seconds fast."""
        kind = line["kind"]
        step = line.get("step", 0)
        if kind == "start":
            self.starts.append((line["time"] - ahead, step))
        elif kind == "step":
            self.steps.append(Step(step, _set_back(line["span"], ahead), line["done"] - ahead))
        elif kind == "landing":
            self.landings.append(LandingRecord.of(line, ahead))
        elif kind == "validation":
            span = _set_back(line["span"], ahead)
            self.validations.append(Validation(step, span, line["metrics"]))
        elif kind == "loss":
            self.losses.append((step, line["loss"]))
        elif kind == "settings":
            self.about = {**self.about, "settings": line["settings"]}
        elif kind == "fragments":
            self.fragments = line["fragments"]
            self.parameters = line["parameters"]


class Run(NamedTuple):
    ranks: list[Rank]

    @property
    def heads(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.about["shard"] == 0]

    @property
    def began(self) -> float:
        return min(rank.steps[0].span[0] for rank in self.ranks if rank.steps)


# Reading


def records_in(folder: str | Path) -> Path:
    """Finds the records in a folder, its subfolder ``sdiloco``, or its newest ``version_N``."""
    places = [Path(folder), Path(folder) / "sdiloco"]
    versions: list[Path] = []
    for pattern in ("version_*", "lightning_logs/version_*"):
        versions += Path(folder).glob(f"{pattern}/sdiloco")
    places += sorted(
        versions, key=lambda path: int(re.sub(r"\D", "", path.parent.name) or -1), reverse=True
    )
    for place in places:
        if any(place.glob("rank_*.jsonl")):
            return place
    raise ValueError(
        f"{folder} contains no records (rank_00000.jsonl and so on). Pass a folder that a"
        " StreamingDiLoCoMonitor has written. To record a run, add this monitor to the trainer's"
        " callbacks. By default, the monitor writes to the folder sdiloco in the logger's folder."
    )


def read_run(folder: str | Path) -> Run:
    """Reads the records in a folder or in a subfolder that `records_in` finds."""
    place = records_in(folder)
    records = [_parts_of(path) for path in sorted(place.glob("rank_*.jsonl"))]
    records = [parts for parts in records if parts]
    ranks = [_read_rank(parts, reference=records[0]) for parts in records]
    ranks = [rank for rank in ranks if rank.steps]
    if not ranks:
        raise ValueError(
            f"The records in {place} contain no inner steps, because the run ended before the first"
            " inner step."
        )
    return Run(ranks)


def _parts_of(path: Path) -> list[list[Line]]:
    """Returns a record's lines, divided at each start or resume of the run."""
    lines: list[Line] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # from the last line of a killed process
            lines.append(json.loads(line))
    starts = [number for number, line in enumerate(lines) if line["kind"] == "start"]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _read_rank(parts: Sequence[list[Line]], reference: Sequence[list[Line]]) -> Rank:
    """Reads a rank's record and corrects its clock at each start of the run."""
    rank = Rank(parts[0][0]["rank"], parts[0][0])
    for number, part in enumerate(parts):
        ahead = 0.0
        if parts is not reference and number < len(reference):
            ahead = _seconds_ahead(part, reference[number])
        for line in part:
            rank.add(line, ahead)
    return rank


def _seconds_ahead(part: Sequence[Line], reference: Sequence[Line]) -> float:
    """Returns the seconds by which a rank's clock is ahead of the reference; see [Note: clocks]."""
    least = float("-inf")
    most = float("inf")
    flight = itemgetter("fragment", "launched_at", "final")
    reference_landings = {flight(line): line for line in reference if line["kind"] == "landing"}
    group = part[0]["group"]
    reference_group = reference[0]["group"]
    for landing in part:
        if landing["kind"] != "landing" or flight(landing) not in reference_landings:
            continue
        reference_landing = reference_landings[flight(landing)]
        both_count = group in reference_landing["counted"] and reference_group in landing["counted"]
        if group == reference_group or both_count:
            spans = landing["spans"]
            reference_spans = reference_landing["spans"]
            least = max(least, spans["launch"][0] - reference_spans["flight"][1])
            most = min(most, spans["flight"][1] - reference_spans["launch"][0])
    return 0.0 if least <= 0 <= most else (least + most) / 2


def _set_back(span: Sequence[float], ahead: float) -> Span:
    began, ended = span
    return began - ahead, ended - ahead


# The trace, for Chrome and Perfetto

_TRAINING = 0  # the row of the trace; the fragments' rows follow
_IN_BACKGROUND = ("encode", "transfer", "decode", "relay", "outer_step")


def write_timeline(path: str | Path, run: Run) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(trace(run)), encoding="utf-8")


def merge(folder: str, path: str) -> int:
    """Writes a timeline of the records in a folder and returns the number of ranks."""
    run = read_run(folder)
    write_timeline(path, run)
    return len(run.ranks)


def trace(run: Run) -> Numbers:
    numbers = count(1)
    events: list[Event] = []
    for rank in run.ranks:
        events += _names_of_rows(rank)
        events += _RankTrace(rank, run.began).events(numbers)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names_of_rows(rank: Rank) -> Iterator[Event]:
    shard = f", rank {rank.rank}" if rank.about["shards"] > 1 else ""
    of_process = {"ph": "M", "pid": rank.rank}
    name = f"{rank.name}{shard}"
    yield {**of_process, "name": "process_name", "args": {"name": name}}
    yield {**of_process, "name": "process_sort_index", "args": {"sort_index": rank.rank}}
    fragments = [f"fragment {fragment}" for fragment in range(len(rank.fragments))]
    for row, name in enumerate(["training", *fragments]):
        of_row = {**of_process, "tid": row}
        yield {**of_row, "name": "thread_name", "args": {"name": name}}
        yield {**of_row, "name": "thread_sort_index", "args": {"sort_index": row}}


class _RankTrace:
    """A rank's trace events, with times in microseconds since the start of the run."""

    def __init__(self, rank: Rank, began: float) -> None:
        self._rank = rank
        self._began = began

    def events(self, numbers: Iterator[int]) -> Iterator[Event]:
        """Yields all events. Each flight gets a number that is unique across ranks."""
        for step in self._rank.steps:
            yield self._piece("step", _TRAINING, step.span, step=step.step)
        for validation in self._rank.validations:
            yield self._piece("validation", _TRAINING, validation.span, step=validation.step)
        for landing in self._rank.landings:
            yield from self._events_of_flight(landing, next(numbers))
        for moment, text in changes(self._rank):
            yield self._event("i", text, _TRAINING, moment, s="p")

    def _events_of_flight(self, landing: LandingRecord, number: int) -> Iterator[Event]:
        spans = landing.spans
        row = 1 + landing.fragment
        about = {
            name: getattr(landing, name)
            for name in ("fragment", "launched_at", "landed_at", "bytes_sent")
        }
        for name in ("launch", "wait", "land"):
            yield self._piece(name, _TRAINING, spans[name], **about)
        flight = "final flight" if landing.final else "flight"
        yield self._piece(flight, row, spans["flight"], **about)
        for name in _IN_BACKGROUND:
            if name in spans:
                yield self._piece(name.replace("relay", "second_hop"), row, spans[name])
        arrow = {"id": number, "cat": "flight"}
        yield self._event("s", "flight", _TRAINING, spans["launch"][0], **arrow)
        yield self._event("f", "flight", _TRAINING, spans["land"][0], **arrow, bp="e")

    def _piece(self, name: str, row: int, span: Span, **args: object) -> Event:
        began, ended = span
        duration = round(1e6 * max(0.0, ended - began), 3)
        return self._event("X", name, row, began, dur=duration, args=args)

    def _event(self, kind: str, name: str, row: int, moment: float, **more: object) -> Event:
        return {
            "ph": kind,
            "name": name,
            "pid": self._rank.rank,
            "tid": row,
            "ts": round(1e6 * (moment - self._began), 3),
            **more,
        }


def changes(rank: Rank) -> Iterator[tuple[float, str]]:
    """Yields the times at which sites join or leave, as seen by one site, with descriptions."""
    if rank.about.get("site") is None:
        return
    for moment, step in rank.starts:
        resumed = f" after inner step {step}" if step else ""
        yield moment, f"{rank.name} starts{resumed}"
    sites_of_fragment: dict[int, set[str]] = {}
    counted: set[str] = set()
    for landing in rank.landings:
        sites_of_fragment[landing.fragment] = set(landing.sites)
        # A site may miss a round of one fragment by chance, but a site that is in none of the last
        # rounds has left.
        present = set().union(*sites_of_fragment.values())
        for site in sorted(present ^ counted):
            change = "counts" if site in present else "no longer counts"
            yield landing.spans["land"][1], f"{site} {change}"
        counted = present
