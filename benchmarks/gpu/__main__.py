"""Checks the package on a GPU in ten minutes, on a machine with torch and Lightning, and perhaps
nothing else.

    python -m benchmarks.gpu [--minutes 10] [--out DIR] [--stage tests numbers] [--only NAME ...]
                             [--device cuda] [--quick]

- ``tests``: bit-identical results to the CPU, no races, no waits inside a step, memory, precisions,
  compiled models, resuming, NCCL; at most five minutes.
- ``numbers``: passes as shares of the copy bandwidth, the direction of matrices, step time and
  memory with 125 million and a billion parameters, groups in one process, two groups on one device,
  and groups on 2, 4 and 8 devices. A machine with fewer devices says what it leaves out.

`benchmarks.curve` measures how well worker groups learn on a GPU.

Each piece of work runs in separate processes, and its results are written to DIR as soon as it
ends, together with its output. Work that is already there is skipped, unless it failed or was left
out for lack of time. So the same command continues.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.gpu import passes, simulated, steps
from benchmarks.gpu.overlap import overlapped
from tests.gpu.checks import CHECKS
from tests.gpu.fits import FITS
from tests.gpu.task import DEVICE, Outcome, Place, Task, do

TESTS_MINUTES = 5.0
LEAST = 20.0
"""The seconds that must be left to start a piece of work."""

NUMBERS: dict[str, Task] = {
    "passes": Task("share of copy bandwidth of every pass", passes.shares, seconds=120),
    "direction": Task("time of the direction of matrices", simulated.mapped, seconds=60),
    "simulated 4": Task("four groups in one process", partial(simulated.simulated, 4), seconds=150),
    "simulated 8": Task(
        "eight groups in one process", partial(simulated.simulated, 8), seconds=150
    ),
    "overhead 125M": Task(
        "step time and memory, 125M", partial(steps.overhead, "125M"), seconds=120
    ),
    "overhead 1B": Task("step time and memory, 1B", partial(steps.overhead, "1B"), seconds=240),
    "overlap": Task(
        "a round of two groups in the profiler", partial(overlapped, "125M"), ranks=2, seconds=90
    ),
    "two groups": Task(
        "two groups on one device",
        partial(steps.end_to_end, "125M"),
        ranks=2,
        connected=False,
        seconds=180,
    ),
}
NUMBERS |= {
    f"{devices} devices": Task(
        f"{groups} groups on {devices} devices",
        partial(steps.on_several, "125M", groups),
        ranks=devices,
        connected=False,
        seconds=180,
    )
    for devices, groups in ((2, 2), (4, 2), (8, 4))
}

QUICK = {
    "tests": ("codecs", "waits", "bf16-mixed"),
    "numbers": ("passes", "overhead 125M", "two groups"),
}
"""One piece of work of each kind, which is enough to show that everything runs."""

KEPT = ("done", "not here")


class Piece(NamedTuple):
    """A piece of work in its stage."""

    stage: str
    name: str
    task: Task


class Results:
    """The folder of results, with a file for every piece of work and a summary."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self._folder = folder
        self._about = about

    def path(self, piece: Piece) -> Path:
        file = piece.name.replace(", ", "-").replace(" ", "_")
        return self._folder / piece.stage / f"{file}.json"

    def read(self, piece: Piece) -> dict[str, Any] | None:
        """Returns the saved result of a piece of work, or None if there is none."""
        path = self.path(piece)
        return dict(json.loads(path.read_text())) if path.exists() else None

    def is_kept(self, piece: Piece) -> bool:
        """Returns whether a piece of work is complete on the same device and does not have to be
        repeated.
        """
        content = self.read(piece)
        if content is None or content["status"] not in KEPT:
            return False
        return all(content["measured"][key] == self._about[key] for key in ("device", "command"))

    def write(self, piece: Piece, outcome: Outcome) -> None:
        path = self.path(piece)
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = dict(outcome.found)
        headline = numbers.pop("headline", {})
        fields = ("status", "seconds", "reason", "trace")
        ended = {field: getattr(outcome, field) for field in fields}
        report.write(path, headline, self._about, shows=piece.task.about, **ended, found=numbers)

    def summarise(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Writes and returns the outcome of every piece of work, and all numbers."""
        headline: dict[str, float] = {}
        ended: dict[str, dict[str, str]] = {}
        numbers: dict[str, Any] = {}
        for piece in pieces:
            content = self.read(piece)
            name = f"{piece.stage}: {piece.name}"
            if content is None:
                ended[name] = {"status": "left", "reason": ""}
                continue
            ended[name] = {"status": content["status"], "reason": content["reason"]}
            headline |= content["headline"]
            if piece.stage == "numbers":
                numbers[piece.name] = content["found"]
        path = self._folder / "summary.json"
        report.write(path, headline, self._about, ended=ended, numbers=numbers)
        return {"headline": headline, "ended": ended}


def pieces(options: argparse.Namespace) -> Iterator[Piece]:
    tasks = {"tests": CHECKS | FITS, "numbers": NUMBERS}
    for stage in options.stage:
        names = options.only or (QUICK[stage] if options.quick else tasks[stage])
        for name in names:
            if name in tasks[stage]:
                yield Piece(stage, name, tasks[stage][name])


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="how long it may take (default: %(default)g)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="the folder (default: %(default)s)"
    )
    parser.add_argument(
        "--stage", nargs="+", choices=QUICK, default=list(QUICK), help="what to run (default: all)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="pieces of work by name (default: all)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu", "pretend"), default="cuda", help="default: %(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="as little as shows that it runs")
    return parser.parse_args(arguments)


class Clock:
    """The remaining seconds, in total and for the tests."""

    def __init__(self, minutes: float) -> None:
        self._began = time.monotonic()
        self._minutes = minutes

    @property
    def gone(self) -> float:
        return time.monotonic() - self._began

    def left(self, stage: str) -> float:
        """Returns how many seconds a piece of work of a stage may take."""
        minutes = min(self._minutes, TESTS_MINUTES) if stage == "tests" else self._minutes
        return 60 * minutes - self.gone

    def __str__(self) -> str:
        return f"{self.gone:3.0f} s of {60 * self._minutes:.0f}"


def work(wanted: Sequence[Piece], results: Results, place: Place, clock: Clock) -> None:
    """Does the requested work that is not yet saved, as far as time allows; shows progress."""
    for number, piece in enumerate(wanted, 1):
        name = f"[{number}/{len(wanted)}, {clock}] {piece.stage}: {piece.name}"
        if results.is_kept(piece):
            report.said(f"{name}: kept")
            continue
        left = clock.left(piece.stage)
        if left < (1 if place.quick else LEAST):
            report.said(f"{name}: left, for want of time")
            continue
        report.said(f"{name}: {piece.task.about} ...")
        log = results.path(piece).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        outcome = do(piece.task, place._replace(seconds=left), log)
        results.write(piece, outcome)
        results.summarise(wanted)
        report.said(f"{name}: {outcome.status} in {outcome.seconds:.0f} s {outcome.reason}")


def main(arguments: list[str] | None = None) -> int:
    """Runs as much as time allows, and returns 1 if something failed."""
    options = parsed(arguments)
    clock = Clock(options.minutes)
    wanted = list(pieces(options))
    options.out.mkdir(parents=True, exist_ok=True)
    place = Place(options.device, options.out.resolve(), options.quick)
    device = do(DEVICE, place._replace(seconds=120), options.out / "device.log")
    if device.status != "done":
        report.said(
            f"There is no device to run on: {device.reason}. --device cpu tries what a CPU can"
            " show."
        )
        return 1
    report.said(f"On {device.found['device']}, into {options.out}")
    results = Results(options.out, {**report.measured("gpu", options.quick), **device.found})
    work(wanted, results, place, clock)
    return tell(results.summarise(wanted))


def tell(summary: dict[str, Any]) -> int:
    """Prints the outcomes and numbers; returns 1 if something failed."""
    ended = summary["ended"]
    rows = [[name, end["status"], end["reason"]] for name, end in ended.items()]
    report.show("What was run", ["", "ended", "because"], rows)
    numbers = [[name, f"{value:.4g}"] for name, value in summary["headline"].items()]
    report.show("Numbers", ["", "number"], numbers)
    failed = [name for name, end in ended.items() if end["status"] in ("failed", "timed out")]
    left = sum(end["status"] == "left" for end in ended.values())
    if left:
        report.said(f"{left} of {len(rows)} are left. The same command goes on with them.")
    if failed:
        report.said(
            f"Failed: {'; '.join(failed)}. The .log and .json files beside each other say why."
        )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
