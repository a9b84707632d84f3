"""What the side stream of a GPU does beside training: a profile of two groups on one device, and
its picture.

    python -m benchmarks.gpu.overlap docs/benchmarks/gpu.json docs/images/benchmark-gpu.svg 408 462

The first is the ``summary.json`` of ``make gpu``; the last two say which milliseconds to draw.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.steps import OVERLAP_STEPS, SIZES, SYNC_EVERY, Loop, cut
from benchmarks.models import TINY
from lightning_sdiloco import StreamingDiLoCo
from tests.gpu.task import Found, NotHere, Place

KINDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "kernels"}
"""What a profiler calls what runs on a device, and what it is in the picture."""

TOGETHER = 0.03
"""Milliseconds between two spans of a stream that count as one."""


class Span(NamedTuple):
    """Something that a stream does without a pause; times in milliseconds."""

    stream: int
    kind: str
    began: float
    ended: float


def overlapped(name: str, place: Place, rank: int, world_size: int) -> Found:
    """Profiles half a round of two groups on one device."""
    if not place.is_cuda:
        raise NotHere("a profiler sees streams of CUDA")
    size, batch = (TINY, 2) if place.quick else SIZES[name]
    loop = Loop(place, size, batch)
    loop.engine = StreamingDiLoCo(
        loop.model,
        sync_every=SYNC_EVERY,
        overlap_steps=OVERLAP_STEPS,
        fragments=cut(size),
        worker_groups=2,
    )
    loop.seconds(2 * SYNC_EVERY)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        loop.seconds(SYNC_EVERY // 2)
    path = place.folder / f"profile-{rank}.json"
    seen.export_chrome_trace(str(path))
    loop.engine.close()
    spans = spans_of(json.loads(path.read_text())["traceEvents"])
    path.unlink()
    return {"streams": shares(spans), "spans": spans}


def spans_of(events: list[dict[str, Any]]) -> list[Span]:
    """Returns what streams did, from the first of it on, in order for each stream."""
    there = sorted(
        [event for event in events if event.get("cat") in KINDS],
        key=lambda event: float(event["ts"]),
    )
    first = there[0]["ts"]
    spans = dict[tuple[int, str], list[Span]]()
    for event in there:
        began = (event["ts"] - first) / 1e3
        span = Span(
            event["args"]["stream"],
            KINDS[event["cat"]],
            round(began, 3),
            round(began + event["dur"] / 1e3, 3),
        )
        own = spans.setdefault(span[:2], [])
        if own and span.began < own[-1].ended + TOGETHER:
            own[-1] = own[-1]._replace(ended=max(span.ended, own[-1].ended))
        else:
            own.append(span)
    return sum(spans.values(), [])


def busy_ms(spans: list[Span]) -> dict[int, float]:
    return {
        stream: sum(span.ended - span.began for span in spans if span.stream == stream)
        for stream, *_ in spans
    }


def shares(spans: list[Span]) -> Found:
    """Returns the milliseconds that each stream is busy, and for how many of them training, the
    busiest, is too.
    """
    busy = busy_ms(spans)
    most = max(busy, key=lambda stream: busy[stream])
    training = [span for span in spans if span.stream == most]
    beside = {
        stream: sum(
            max(0.0, min(own.ended, other.ended) - max(own.began, other.began))
            for own in spans
            if own.stream == stream
            for other in training
        )
        for stream in busy
        if stream != most
    }
    return {
        "training": {"busy_ms": busy[most]},
        **{
            str(stream): {"busy_ms": busy[stream], "beside_training_ms": beside[stream]}
            for stream in beside
        },
    }


def draw(spans: list[Span], path: Path, first: float, last: float) -> None:
    """Draws what streams did from one time to another: training below, and all others above."""
    from benchmarks.picture import BLUE, GREY, ORANGE, figure, save

    busy = busy_ms(spans)
    training = max(busy, key=lambda stream: busy[stream])
    picture, (axes,) = figure(height=1.9)
    rows = (
        (0, GREY, None, "training"),
        (1, BLUE, "kernels", "side stream: kernels"),
        (2, ORANGE, "copies", "copies"),
    )
    for row, color, kind, _ in rows:
        shown = [
            (span.began - first, span.ended - span.began)
            for span in spans
            if (span.stream == training) == (kind is None)
            and kind in (None, span.kind)
            and span.ended > first
        ]
        axes.broken_barh(shown, (row - 0.35, 0.7), color=color)
    axes.set_yticks([row for row, *_ in rows], [label for *_, label in rows])
    axes.set(xlim=(0, last - first), xlabel="milliseconds")
    save(picture, path)


if __name__ == "__main__":
    source = sys.argv[1]
    target = Path(sys.argv[2])
    first = float(sys.argv[3])
    last = float(sys.argv[4])
    spans = json.loads(Path(source).read_text())["numbers"]["overlap"]["spans"]
    draw([Span(*span) for span in spans], target, first, last)
