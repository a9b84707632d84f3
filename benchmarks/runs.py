"""Runs many trainings, several at a time. Each is trained once and saved in a file, in pieces that
fit into the available minutes.
"""

import argparse
import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks import report
from benchmarks.training import Run, Training, made

# The values in runs from before these options existed.
_BEFORE = {
    "device": "cpu",
    "split": "shuffled",
    "precision": "32-true",
    "corpus": "python",
}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Makes the command line of a benchmark of many trainings: that of `report.parser`, plus
    options for running them.
    """
    command_line = report.parser(description)
    command_line.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="trainings at a time (default: all cores)",
    )
    command_line.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="end in time; the next call goes on (with --json)",
    )
    return command_line


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.json is None and options.minutes < math.inf:
        parser.error(
            "--minutes needs --json FILE: the next call goes on with what lies in the file and"
            " beside it."
        )
    if options.quick:
        options.workers = 1
    return options


def of_pairs(settings: Mapping[str, Iterable[tuple[Training, Training]]]) -> list[Training]:
    """Returns both trainings of every pair, setting by setting."""
    return list(chain.from_iterable(chain.from_iterable(settings.values())))


def by_setting(
    pairs: Iterable[tuple[str, tuple[Training, Training]]],
) -> dict[str, list[tuple[Training, Training]]]:
    """Returns the pairs of each setting, in their order."""
    settings: dict[str, list[tuple[Training, Training]]] = {}
    for setting, pair in pairs:
        settings.setdefault(setting, []).append(pair)
    return settings


class Runs:
    """The runs in a file. Each is saved as soon as it ends, and none is repeated."""

    def __init__(self, command: str, path: Path | None) -> None:
        self._command = command
        self._path = path
        content: dict[str, Any] = {"runs": []}
        if path is not None and path.exists():
            content = json.loads(path.read_text())
        self._headline: dict[str, float] = content.get("headline", {})
        self._done: list[Run] = [{**_BEFORE, **run} for run in content["runs"]]

    def __getitem__(self, training: Training) -> Run:
        run = self.get(training)
        if run is None:
            raise KeyError(training)
        return run

    def get(self, training: Training) -> Run | None:
        key = training.key()
        return next((run for run in self._done if run.items() >= key.items()), None)

    def all(self) -> Sequence[Run]:
        """Returns all runs, including those that can no longer be repeated."""
        return self._done

    def make(self, trainings: Iterable[Training], workers: int, minutes: float = math.inf) -> None:
        """Runs the trainings that are not finished, beginning with those that were already
        started.
        """
        wanted = {_name(training): training for training in trainings if self.get(training) is None}
        waiting = deque(sorted(wanted.values(), key=self._is_begun, reverse=True))
        deadline = time.time() + 60 * minutes
        under_way: dict[Future[Run | None], Training] = {}
        with _executor(workers) as pool:
            while True:
                while waiting and len(under_way) < workers and time.time() < deadline:
                    training = waiting.popleft()
                    future = pool.submit(made, training, deadline, self._state(training))
                    under_way[future] = training
                if not under_way:
                    break
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    self._keep(under_way.pop(future), future.result())
        missing = sum(self.get(training) is None for training in wanted.values())
        if missing:
            report.said(
                f"{missing} of {len(wanted)} trainings are left. The same command goes on with"
                " them."
            )

    def _keep(self, training: Training, run: Run | None) -> None:
        if run is None:
            report.said(f"under way: {_name(training)}")
            return
        self._done.append(run)
        self.write({})
        report.said(f"{run['loss']:.4f} after {run['seconds']:.0f} s: {_name(training)}")
        state = self._state(training)
        if state is not None:
            state.unlink(missing_ok=True)
            with suppress(OSError):  # if the folder is not empty, or does not exist
                state.parent.rmdir()

    def _state(self, training: Training) -> Path | None:
        if self._path is None:
            return None
        digest = hashlib.sha256(_name(training).encode()).hexdigest()
        return self._path.with_suffix(".states") / f"{digest[:16]}.pt"

    def _is_begun(self, training: Training) -> bool:
        state = self._state(training)
        return state is not None and state.exists()

    def write(self, headline: Mapping[str, float], quick: bool = False) -> None:
        """Writes all runs, and merges the headline with that of earlier calls."""
        self._headline.update(headline)
        about = report.measured(self._command, quick)
        report.write(self._path, self._headline, about, runs=self._done)


def _name(training: Training) -> str:
    return json.dumps(training.key(), sort_keys=True)


def _executor(workers: int) -> Executor:
    if workers == 1:
        return _InThisProcess()
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


class _InThisProcess(Executor):
    """Calls each function immediately, in this process."""

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
