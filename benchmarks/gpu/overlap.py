"""Shows the work of a GPU's side stream during training: a profile of two groups on one device, and
its picture.

    python -m benchmarks.gpu.overlap docs/benchmarks/gpu.json docs/images/benchmark-gpu.svg 408 462

The first argument is the ``summary.json`` of ``make gpu``. The last two are the first and last
millisecond to draw.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.steps import OVERLAP_STEPS, SIZES, SYNC_EVERY, Loop, cut
from benchmarks.models import TINY
from lightning_sdiloco import StreamingDiLoCo
from tests.gpu.task import Found, NotHere, Place

KINDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "kernels"}
"""The kinds of work on a device: the profiler's name, and the name in the picture."""

TOGETHER = 0.03
"""The milliseconds between two spans of a stream up to which they count as one."""


class Span(NamedTuple):
    """A span in which a stream works without a pause; times are in milliseconds."""

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
    """Returns the work of all streams, in order for each stream; times begin at the first work."""
    on_device = [event for event in events if event.get("cat") in KINDS]
    on_device.sort(key=lambda event: float(event["ts"]))
    first = on_device[0]["ts"]
    spans = dict[tuple[int, str], list[Span]]()
    for event in on_device:
        stream = event["args"]["stream"]
        kind = KINDS[event["cat"]]
        began = (event["ts"] - first) / 1e3
        ended = began + event["dur"] / 1e3
        span = Span(stream, kind, round(began, 3), round(ended, 3))
        alike = spans.setdefault((stream, kind), [])
        if alike and span.began < alike[-1].ended + TOGETHER:
            alike[-1] = alike[-1]._replace(ended=max(span.ended, alike[-1].ended))
        else:
            alike.append(span)
    return sum(spans.values(), [])


def busy_ms(spans: list[Span]) -> dict[int, float]:
    return {
        stream: sum(span.ended - span.began for span in spans if span.stream == stream)
        for stream, *_ in spans
    }


def shares(spans: list[Span]) -> Found:
    """Returns the milliseconds for which each stream is busy, and for which training, the busiest
    stream, is also busy.
    """
    busy = busy_ms(spans)
    most = max(busy, key=lambda stream: busy[stream])
    training = [span for span in spans if span.stream == most]
    milliseconds: Found = {"training": {"busy_ms": busy[most]}}
    for stream in busy:
        if stream != most:
            side = [span for span in spans if span.stream == stream]
            beside = sum(common_ms(*pair) for pair in product(side, training))
            milliseconds[str(stream)] = {"busy_ms": busy[stream], "beside_training_ms": beside}
    return milliseconds


def common_ms(first: Span, second: Span) -> float:
    """Returns how long two spans overlap."""
    return max(0.0, min(first.ended, second.ended) - max(first.began, second.began))


def draw(spans: list[Span], path: Path, first: float, last: float) -> None:
    """Draws the work of streams in a time span, with training at the bottom and all others
    above.
    """
    from benchmarks.picture import QUIET, SERIES, figure, save

    busy = busy_ms(spans)
    most = max(busy, key=lambda stream: busy[stream])
    spans = [span for span in spans if span.ended > first]
    side = [span for span in spans if span.stream != most]
    rows = {
        "training": (QUIET, [span for span in spans if span.stream == most]),
        "side stream: kernels": (SERIES[0], [span for span in side if span.kind == "kernels"]),
        "copies": (SERIES[1], [span for span in side if span.kind == "copies"]),
    }
    picture, (axes,) = figure(height=1.9)
    for row, (color, shown) in enumerate(rows.values()):
        bars = [(span.began - first, span.ended - span.began) for span in shown]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=color)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlim=(0, last - first), xlabel="milliseconds")
    save(picture, path)


if __name__ == "__main__":
    source = sys.argv[1]
    target = Path(sys.argv[2])
    first = float(sys.argv[3])
    last = float(sys.argv[4])
    spans = json.loads(Path(source).read_text())["numbers"]["overlap"]["spans"]
    draw([Span(*span) for span in spans], target, first, last)
