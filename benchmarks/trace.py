"""A profiler trace of an inner step with a launch and of one with a landing, as a picture.

    python -m benchmarks.trace [--quick] [--json FILE] [--picture FILE]

torch.profiler on the CPU, one of two worker groups over the loopback, 10.9 million parameters. The profiler
itself slows a step down.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import report
from benchmarks.fits import Timed, fit
from benchmarks.models import TEN_MILLION, TINY, Size, random_batches
from benchmarks.picture import BLUE, GREEN, INK, QUIET, RED, figure, save
from benchmarks.stamps import Stamps
from lightning_sdiloco import StreamingDiLoCoStrategy
from tests.ranks import run_processes

SYNC_EVERY, OVERLAP_STEPS, LAYERS_PER_FRAGMENT = 20, 5, 2
WARM = 2 * SYNC_EVERY

Span = tuple[str, float, float]
"""What ran, from when to when, in ms of the step."""

Steps = dict[str, dict[str, list[Span]]]
"""For each picture: what ran in the training thread and in the background."""


class Recorder:
    """Profiles from a launch to its landing; both are inner steps of their own."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self.profile: Any = None

    def meet(self, step: int) -> None:
        """An inner step begins."""
        number = step + 1
        self._open.close()
        if number == WARM:
            config = _ExperimentalConfig(profile_all_threads=True)
            self.profile = profile(activities=[ProfilerActivity.CPU], experimental_config=config)
            self.profile.start()
        if number == WARM + OVERLAP_STEPS + 1:
            self.profile.stop()
        if WARM <= number <= WARM + OVERLAP_STEPS:
            self._open.enter_context(record_function(f"inner step {number}"))


def traced(size: Size, rank: int, world_size: int) -> Steps:
    """Trains in one rank, and returns what the profiler saw."""
    recorder = Recorder()
    module = Timed(size.make(), Stamps(), partial(torch.optim.AdamW, lr=1e-3), recorder.meet)
    # One fragment less than what makes a launch coincide with a landing: each has a step of its own.
    strategy = StreamingDiLoCoStrategy(
        sync_every=SYNC_EVERY,
        overlap_steps=OVERLAP_STEPS,
        layers_per_fragment=LAYERS_PER_FRAGMENT,
        fragments=[["net.blocks.[012].*", "net.*embedding*"], ["net.blocks.[345].*", "net.norm.*", "net.head.*"]]
        if size is TEN_MILLION
        else [["*"]],
        final_sync=False,
    )
    fit(module, random_batches(size, 1, seed=rank), WARM + 2 * OVERLAP_STEPS, strategy=strategy, devices=world_size)
    return spans(recorder.profile.events())


def spans(events: Any) -> Steps:
    """The outermost ranges of both threads: a step with a launch and the one after it, and a step with a landing."""
    found: Steps = {}
    for what, first, last in (("launch", WARM, WARM + 1), ("landing", *[WARM + OVERLAP_STEPS] * 2)):
        steps = [event for event in events if event.name in (f"inner step {first}", f"inner step {last}")]
        begin, end = min(step.time_range.start for step in steps), max(step.time_range.end for step in steps)
        threads: dict[str, list[Span]] = {"training": [], "background": []}
        for event in events:
            start, stop = event.time_range.start, event.time_range.end
            if stop <= begin or start >= end:
                continue
            parent = event.cpu_parent
            outermost = parent is None or parent.name.startswith("inner step")
            if event.name.startswith(("sdiloco::", "inner step")) or outermost:
                thread = "training" if event.thread == steps[0].thread else "background"
                name = "inner step" if event.name.startswith("inner step") else event.name
                threads[thread].append((name, *((at - begin) / 1000 for at in (max(start, begin), min(stop, end)))))
        found[what] = threads
    return found


def length(spans: list[Span], name: str) -> float:
    """Milliseconds of all ranges of a name."""
    return sum(end - start for what, start, end in spans if what == name)


def covered(spans: list[Span]) -> float:
    """Milliseconds in which anything ran."""
    total, until = 0.0, 0.0
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def merged(spans: list[Span], gap: float) -> list[Span]:
    """Ranges of one name as one where no more than a gap lies between them: nobody sees it, and a file is small."""
    joined: list[Span] = []
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        if joined and joined[-1][0] == name and start - joined[-1][2] <= gap:
            joined[-1] = (name, joined[-1][1], max(end, joined[-1][2]))
        else:
            joined.append((name, start, end))
    return joined


def headline(found: Steps) -> dict[str, float]:
    """Milliseconds in the training thread, and in the background."""
    numbers = {}
    for what, name in (("launch", "sdiloco::launch"), ("landing", "sdiloco::land")):
        training = found[what]["training"]
        steps = sum(1 for span in training if span[0] == "inner step")
        numbers[f"{what}: ms of a step"] = length(training, "inner step") / steps
        numbers[f"{what}: ms in the training thread"] = length(training, name)
        numbers[f"{what}: ms of work in the background"] = covered(found[what]["background"])
    return numbers


def color_of(name: str) -> str:
    """Launch and landing stand out."""
    return {"sdiloco::launch": RED, "sdiloco::land": GREEN}.get(name, "#b0bec5")


def draw(found: Steps, path: Path | None) -> None:
    """Draws both steps, one above the other."""
    if path is None:
        return
    from matplotlib.patches import Patch

    picture, panels = figure(columns=2, height=2.4, widths=(2, 1))
    for axes, (what, threads) in zip(panels, found.items(), strict=True):
        whole = length(threads["training"], "inner step")
        for row, (thread, ranges) in enumerate(threads.items()):
            ours = [span for span in ranges if span[0].startswith("sdiloco::")]
            others = [
                ("", start, end) for name, start, end in ranges if not name.startswith(("sdiloco::", "inner step"))
            ]
            for name, start, end in [*merged(others, whole / 1000), *ours]:
                color = color_of(name) if thread == "training" else BLUE
                shown = max(end - start, whole / 400 if name else 0)
                axes.barh(-row, shown, 0.6, start, color=color, zorder=3 if name else 2)
        axes.set_xlim(0, whole)
        for name, start, _ in threads["training"]:
            if name == "inner step" and start:
                axes.axvline(start, color=INK, linewidth=1, linestyle=":", zorder=5)
        axes.set_yticks([0, -1], list(threads) if axes is panels[0] else [])
        axes.set_xlabel("ms")
        axes.set_title(_TITLES[what])
        axes.grid(visible=False, axis="y")
    labels = {
        "model and inner optimizer": "#b0bec5",
        "launch": RED,
        "landing": GREEN,
        "encode, exchange, outer step": BLUE,
    }
    handles = [Patch(color=color, label=label) for label, color in labels.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    panels[0].spines["left"].set_color(QUIET)
    save(picture, path)


_TITLES = {"launch": "a step with a launch, and the one after it", "landing": "a step with a landing"}


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    options = report.options(__doc__, arguments)
    found = run_processes(partial(traced, TINY if options.quick else TEN_MILLION), 2, timeout=300)[0]
    numbers = headline(found)
    report.write(options.json, numbers, report.measured("trace", options.quick))
    report.show("What the profiler saw, ms", ["", "ms"], [[name, f"{value:.2f}"] for name, value in numbers.items()])
    draw(found, options.picture)


if __name__ == "__main__":
    main()
