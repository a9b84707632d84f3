"""Reads the records that the ranks of a run left, as a `Run`, and makes a trace of them for Chrome or Perfetto.

[Note: clocks] Every rank writes times by its own clock, and those of hosts differ. But a flight ends on no rank before
all groups that count in it have launched it. So each flight bounds from both sides how far a clock can be ahead of that
of rank 0. A clock that can be right is left as it is; another one is set to the middle of what the bounds allow.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from lightning_sdiloco.engine import Span

Line = dict[str, Any]
Event = dict[str, Any]

_TRAINING = 0  # the row of the trace; those of fragments follow
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
        """Returns the name of its worker group: in a federation that of the site."""
        site = self.about.get("site")
        return f"group {self.group}" if site is None else str(site)


class Run(NamedTuple):
    """The records of all ranks of a run, in the order of their ranks."""

    ranks: list[Rank]

    @property
    def heads(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.about["shard"] == 0]

    @property
    def began(self) -> float:
        return min(rank.steps[0].span[0] for rank in self.ranks if rank.steps)


def read_run(folder: str | Path) -> Run:
    """Reads the records in a folder, or in its subfolder ``sdiloco``."""
    for place in (Path(folder), Path(folder) / "sdiloco"):
        if paths := sorted(place.glob("rank_*.jsonl")):
            starts = [parts for parts in (list(_parts(path)) for path in paths) if parts]
            ranks = [rank for rank in (_read(parts, starts[0]) for parts in starts) if rank.steps]
            if ranks:
                return Run(ranks)
            raise ValueError(f"The records in {place} hold no inner step: the run ended before its first.")
    raise ValueError(
        f"{folder} holds no records (rank_00000.jsonl and so on). Give the folder in which a StreamingDiLoCoMonitor"
        " wrote them: add one to the trainer's callbacks; by default it writes into sdiloco in the folder of the"
        " logger."
    )


def _parts(path: Path) -> Iterator[list[Line]]:
    """Yields the lines of a record, one part for each time that the run was started or resumed."""
    part: list[Line] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a process that was killed
        if told["kind"] == "start":
            if part:
                yield part
            part = []
        part.append(told)
    if part and part[0]["kind"] == "start":
        yield part


def _ahead(part: Sequence[Line], reference: Sequence[Line]) -> float:
    """Returns by how many seconds the clock of a rank is ahead of that of another; see [Note: clocks]."""
    least, most = float("-inf"), float("inf")
    flight = itemgetter("fragment", "launched_at", "final")
    flights = {flight(line): line for line in reference if line["kind"] == "landing"}
    own, other = part[0]["group"], reference[0]["group"]
    for line in part:
        together = flights.get(flight(line)) if line["kind"] == "landing" else None
        if together is not None and (own == other or own in together["counted"] and other in line["counted"]):
            least = max(least, line["spans"]["launch"][0] - together["spans"]["flight"][1])
            most = min(most, line["spans"]["flight"][1] - together["spans"]["launch"][0])
    return 0.0 if least <= 0 <= most else (least + most) / 2


def _read(parts: Sequence[list[Line]], reference: Sequence[list[Line]]) -> Rank:
    """Reads the record of a rank, with its clock set by that of another one at each start of the run."""
    rank = Rank(parts[0][0]["rank"], parts[0][0])
    for number, part in enumerate(parts):
        is_first = parts is reference or number >= len(reference)
        ahead = 0.0 if is_first else _ahead(part, reference[number])
        for line in part:
            kind = line["kind"]
            spans = {name: (began - ahead, ended - ahead) for name, (began, ended) in line.get("spans", {}).items()}
            began, ended = line.get("span", (0.0, 0.0))
            span = began - ahead, ended - ahead
            if kind == "start":
                rank.starts.append((line["time"] - ahead, line["step"]))
            elif kind == "step":
                rank.steps.append(Step(line["step"], span, line["done"] - ahead))
            elif kind == "landing":
                told = {name: line[name] for name in LandingRecord.__annotations__ if name in line}
                rank.landings.append(LandingRecord(**{**told, "spans": spans}))
            elif kind == "validation":
                rank.validations.append(Validation(line["step"], span, line["metrics"]))
            elif kind == "loss":
                rank.losses.append((line["step"], line["loss"]))
            elif kind == "fragments":
                rank.fragments, rank.parameters = line["fragments"], line["parameters"]
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
    yield {"ph": "M", "name": "process_name", "pid": rank.rank, "args": {"name": f"{rank.name}{shard}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank.rank, "args": {"sort_index": rank.rank}}
    for row, name in enumerate(["training", *(f"fragment {fragment}" for fragment in range(len(rank.fragments)))]):
        yield {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank.rank, "tid": row, "args": {"sort_index": row}}

    def event(kind: str, name: str, row: int, moment: float, **more: Any) -> Event:
        return {"ph": kind, "name": name, "pid": rank.rank, "tid": row, "ts": round(1e6 * (moment - zero), 3), **more}

    def piece(name: str, row: int, span: Span, **args: Any) -> Event:
        duration = round(1e6 * max(0.0, span[1] - span[0]), 3)
        return event("X", name, row, span[0], dur=duration, args=args)

    for step in rank.steps:
        yield piece("step", _TRAINING, step.span, step=step.step)
    for validation in rank.validations:
        yield piece("validation", _TRAINING, validation.span, step=validation.step)
    for landing in rank.landings:
        about = {name: getattr(landing, name) for name in ("fragment", "launched_at", "landed_at", "bytes_sent")}
        for name in ("launch", "wait", "land"):
            yield piece(name, _TRAINING, landing.spans[name], **about)
        row = 1 + landing.fragment
        yield piece("final flight" if landing.final else "flight", row, landing.spans["flight"], **about)
        for name in _IN_BACKGROUND:
            if name in landing.spans:
                yield piece(name.replace("relay", "second_hop"), row, landing.spans[name])
        number = next(numbers)
        yield event("s", "flight", _TRAINING, landing.spans["launch"][0], id=number, cat="flight")
        yield event("f", "flight", _TRAINING, landing.spans["land"][0], id=number, cat="flight", bp="e")
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
        # A round of one fragment may be missed by accident; who is in none of the last rounds is away.
        now = set().union(*before.values())
        for site in sorted(now ^ counts):
            yield landing.spans["land"][1], f"{site} counts" if site in now else f"{site} counts no longer"
        counts = now
