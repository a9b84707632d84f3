"""Makes a trace of a run for Chrome (chrome://tracing) or Perfetto (ui.perfetto.dev): all ranks on one time axis."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from lightning_sdiloco.engine import Span
from lightning_sdiloco.lightning.monitor.records import LandingRecord, Rank, Run

Event = dict[str, Any]

_TRAINING = 0
# What happens in the background: the name of each part, and of its span in a record.
_PARTS = {
    "encode": "encode",
    "transfer": "transfer",
    "decode": "decode",
    "second_hop": "relay",
    "outer_step": "outer_step",
}


def write_timeline(path: str | Path, run: Run) -> None:
    """Writes the trace of a run to a file, and makes its folder if there is none."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(trace(run)), encoding="utf-8")


def trace(run: Run) -> dict[str, Any]:
    """Returns the trace of a run, in the JSON object format of Chrome's trace viewer."""
    numbers = count(1)
    events = [event for rank in run.ranks for event in _events(rank, run.began, numbers)]
    uncertainty = max(rank.uncertainty for rank in run.ranks)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock_uncertainty_s": uncertainty}}


def _events(rank: Rank, zero: float, numbers: Iterator[int]) -> Iterator[Event]:
    yield from _names(rank)

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
        about = _about(landing)
        for name in ("launch", "wait", "land"):
            yield piece(name, _TRAINING, landing.spans[name], **about)
        row = 1 + landing.fragment
        yield piece("final flight" if landing.final else "flight", row, landing.spans["flight"], **about)
        for name, key in _PARTS.items():
            if key in landing.spans:
                yield piece(name, row, landing.spans[key])
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


def _names(rank: Rank) -> Iterator[Event]:
    shard = f", rank {rank.rank}" if rank.about["shards"] > 1 else ""
    fragments = [f"fragment {fragment}" for fragment in range(len(rank.fragments))]
    yield {"ph": "M", "name": "process_name", "pid": rank.rank, "args": {"name": f"{rank.name}{shard}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank.rank, "args": {"sort_index": rank.rank}}
    for row, name in enumerate(["training", *fragments]):
        yield {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank.rank, "tid": row, "args": {"sort_index": row}}


def _about(landing: LandingRecord) -> dict[str, Any]:
    return {
        "fragment": landing.fragment,
        "launched_at": landing.launched_at,
        "landed_at": landing.landed_at,
        "bytes_sent": landing.bytes_sent,
    }
