"""How a federation bears faults: real processes with the Trainer, and faults by chance.

    python -m tests.chaos [--seed N] [--faults N] [--minutes M] [--namespaces] [--kinds KIND ...]
    [--json FILE]

A hub and four sites, 220,000 parameters, H=20; a site that is killed is started again with its
newest checkpoint. With --namespaces every site is a network namespace behind a NAT, on a link of
100 Mbit/s and 50 ms, which needs root. With --json runs are added to those of other seeds. It exits
with 1 if there is a problem.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.links import Links, missing
from tests.chaos.checks import Found, Told, examined
from tests.chaos.faults import FORMS, sequence
from tests.chaos.play import Halted, Play
from tests.chaos.processes import BATCH
from tests.chaos.world import MBIT_S, ONE_WAY_DELAY, World

SITES = ("a", "b", "c", "d")
# the fields by which two runs are the same
_IDENTITY = ("commit", "seed", "namespaces", "kinds")


@dataclass(frozen=True)
class Trial:
    """A sequence of at most so many faults within so many minutes, of some kinds or all."""

    seed: int
    faults: int
    minutes: float
    step_seconds: float = 0.05  # that an inner step takes at least
    namespaces: bool = False
    kinds: Sequence[str] = ()


def run(trial: Trial, folder: Path) -> Found:
    """Plays a trial, and returns its description with the results of `examined`."""
    links: Links | nullcontext[None] = nullcontext(None)
    if trial.namespaces:
        links = Links(1 + len(SITES), MBIT_S, ONE_WAY_DELAY)
    faults = sequence(trial.seed, SITES, trial.namespaces, trial.kinds)
    began = time.monotonic()
    problems = []
    with links as opened, World(folder, SITES, trial.step_seconds, links=opened) as world:
        try:
            Play(world).run(faults, trial.faults, 60 * trial.minutes)
        except Halted as halted:
            problems = [str(halted)]
    findings = examined(Told.of(folder, SITES), BATCH)
    findings["problems"] += problems
    return {
        "seed": trial.seed,
        "namespaces": trial.namespaces,
        "kinds": list(trial.kinds),
        "commit": _commit(),
        "seconds": time.monotonic() - began,
        **findings,
    }


def _commit() -> str:
    """The commit of this checkout, with a plus if files differ from it."""
    folder = str(Path(__file__).parent)
    options = ["--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    command = ["git", "-C", folder, "describe", *options]
    described = subprocess.run(command, check=False, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def show(runs: list[Found]) -> dict[str, float]:
    """Prints how often each fault happened, how sites came back, and the problems; returns the
    sums.
    """
    columns = ["fault", "times", "returns", "median, s", "longest, s", "with a state"]
    kinds = set[str]().union(*(run["faults"] for run in runs))
    rows = [_row(kind, runs) for kind in sorted(kinds)]
    report.show("Faults, and seconds from hello to all records applied", columns, rows)
    for run in runs:
        for problem in [*run["problems"], *run["slow"]]:
            print(f"seed {run['seed']}: {problem}")
    sums: dict[str, float] = {"faults": sum(sum(run["faults"].values()) for run in runs)}
    for name in ("records", "steps"):
        sums[name] = sum(run[name] for run in runs)
    for name in ("problems", "slow"):
        sums[name] = sum(len(run[name]) for run in runs)
    print(", ".join(f"{name}: {number}" for name, number in sums.items()))
    return sums


def _row(kind: str, runs: list[Found]) -> list[str]:
    returns = [back for run in runs for back in run["returns"] if back["kind"] == kind]
    seconds = [back["seconds"] for back in returns] or [float("nan")]
    times = sum(run["faults"].get(kind, 0) for run in runs)
    states = sum(back["state"] for back in returns)
    medians = f"{median(seconds):.2f}"
    return [kind, str(times), str(len(returns)), medians, f"{max(seconds):.2f}", str(states)]


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which sequence of faults")
    parser.add_argument("--faults", type=int, default=50, help="how many, at most")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, at most")
    parser.add_argument(
        "--namespaces", action="store_true", help="sites behind NATs, on slow links that fail too"
    )
    parser.add_argument(
        "--step", type=float, default=0.05, help="seconds that an inner step takes at least"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=FORMS, default=[], help="which faults; all by default"
    )
    parser.add_argument("--keep", type=Path, help="an empty folder for what the processes write")
    options = parser.parse_args(arguments)
    lacking = missing() if options.namespaces else None
    if lacking is not None:
        sys.exit(lacking)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    trial = Trial(
        options.seed,
        faults=3 if options.quick else options.faults,
        minutes=options.minutes,
        step_seconds=options.step,
        namespaces=options.namespaces,
        kinds=options.kinds,
    )
    findings = run(trial, folder)
    runs = [*_different_runs(options.json, findings), findings]
    # Sums are of one commit.
    sums = show([run for run in runs if run["commit"] == findings["commit"]])
    about = {**report.measured("chaos", options.quick), "command": "python -m tests.chaos"}
    report.write(options.json, sums, about, runs=runs)
    if findings["problems"]:
        sys.exit(f"The notes and logs of the processes are in {folder}.")
    if not options.keep:
        shutil.rmtree(folder)


def _different_runs(file: Path | None, findings: Found) -> list[Found]:
    """The runs in a file, except one that was repeated."""
    if file is None or not file.exists():
        return []
    runs: list[Found] = json.loads(file.read_text())["runs"]
    return [run for run in runs if any(run.get(name) != findings[name] for name in _IDENTITY)]


if __name__ == "__main__":
    main()
