"""How a federation bears faults: real processes with the Trainer, and faults by chance.

    python -m tests.chaos [--seed N] [--faults N] [--minutes M] [--namespaces] [--kinds KIND ...] [--json FILE]

A hub and four sites, 220,000 parameters, H=20; a site that is killed is started again with its newest checkpoint. With
--namespaces every site is a network namespace behind a NAT, on a link of 100 Mbit/s and 50 ms, which needs root. With
--json runs are added to those of other seeds. It exits with 1 if there is a problem.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.links import Links, missing
from tests.chaos.checks import Found, Told, examined
from tests.chaos.faults import FORMS, sequence
from tests.chaos.play import Halted, Play
from tests.chaos.processes import BATCH
from tests.chaos.world import MBIT_S, ONE_WAY_DELAY, World

SITES = ("a", "b", "c", "d")


def run(
    seed: int,
    faults: int,
    minutes: float,
    namespaces: bool,
    seconds: float,
    folder: Path,
    only: Sequence[str] = (),
) -> Found:
    """Plays a sequence of at most so many faults, of some kinds or all, and returns what was found; see `examined`."""
    links = Links(1 + len(SITES), MBIT_S, ONE_WAY_DELAY) if namespaces else nullcontext(None)
    began, problems = time.monotonic(), []
    with links as opened, World(folder, SITES, seconds, links=opened) as world:
        try:
            Play(world).run(sequence(seed, SITES, namespaces, only), faults, 60 * minutes)
        except Halted as halted:
            problems = [str(halted)]
    found = examined(Told.of(folder, SITES), BATCH)
    found["problems"] += problems
    # The commit of this checkout, with a plus if files differ from it.
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    commit = subprocess.run(words, check=False, capture_output=True, text=True).stdout.strip() or "unknown"
    about = {"seed": seed, "namespaces": namespaces, "kinds": list(only), "commit": commit}
    return rounded({**about, "seconds": time.monotonic() - began, **found})


def rounded(value: Any) -> Any:
    """Returns the same with milliseconds as the last digit."""
    if isinstance(value, dict):
        return {name: rounded(own) for name, own in value.items()}
    if isinstance(value, list):
        return [rounded(own) for own in value]
    return round(value, 3) if isinstance(value, float) else value


def summed(runs: list[Found]) -> dict[str, float]:
    """Returns the few numbers that matter, over runs."""
    headline: dict[str, float] = {
        "faults": sum(sum(one["faults"].values()) for one in runs),
        "records": sum(one["records"] for one in runs),
        "inner steps": sum(one["steps"] for one in runs),
        "problems": sum(len(one["problems"]) for one in runs),
        "late returns": sum(len(one["slow"]) for one in runs),
    }
    told = [one["lost"].values() for one in runs if "lost" in one]
    if told:
        # Of runs from before it was told nothing is known.
        headline["inner steps that do not count"] = sum(own["steps"] for lost in told for own in lost)
    for name, key in (("longest stall, s", "stalls"), ("longest stall of a site that returns, s", "returning")):
        stalls = [stall for one in runs for own in one["stalls"].values() for stall in own[key]]
        headline[name] = max(stalls, default=0.0)
    for kind in kinds_of(runs):
        times = [own["seconds"] for one in runs for own in one["returns"] if own["kind"] == kind]
        if times:
            headline[f"{kind}: median return, s"] = median(times)
            headline[f"{kind}: longest return, s"] = max(times)
    return headline


def kinds_of(runs: list[Found]) -> list[str]:
    """Returns the faults that there were, by their names."""
    return sorted({kind for one in runs for kind in one["faults"]})


def add(path: Path | None, runs: list[Found], quick: bool) -> list[Found]:
    """Adds runs to those in a file, in place of the same ones; sums and returns all of this commit."""
    if path is None:
        return runs

    def which(run: Found) -> tuple[Any, ...]:
        return run["commit"], run["seed"], run["namespaces"], tuple(run.get("kinds", ()))

    before = json.loads(path.read_text())["runs"] if path.exists() else []
    new = [which(one) for one in runs]
    every = [*(one for one in before if which(one) not in new), *runs]
    of_commit = [one for one in every if one["commit"] == runs[-1]["commit"]]
    about = {**report.measured("chaos", quick), "command": "python -m tests.chaos"}
    report.write(path, summed(of_commit), about, runs=every)
    return of_commit


def show(runs: list[Found]) -> None:
    """Prints how many faults there were, how sites came back, and what went wrong."""
    rows = []
    for kind in kinds_of(runs):
        back = [own for one in runs for own in one["returns"] if own["kind"] == kind]
        times = [own["seconds"] for own in back]
        cells = [f"{median(times):.2f}", f"{max(times):.2f}"] if back else ["-"] * 2
        states = sum(own["state"] for own in back)
        rows.append([kind, str(sum(one["faults"].get(kind, 0) for one in runs)), str(len(back)), *cells, str(states)])
    columns = ["fault", "times", "returns", "median, s", "longest, s", "with a state"]
    report.show("Faults, and seconds from hello to all records applied", columns, rows)
    for name, value in summed(runs).items():
        if "return," not in name:
            print(f"{name}: {value:g}")
    for one in runs:
        for problem in [*one["problems"], *one["slow"]]:
            print(f"seed {one['seed']}: {problem}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which sequence of faults")
    parser.add_argument("--faults", type=int, default=50, help="how many, at most")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, at most")
    parser.add_argument("--namespaces", action="store_true", help="sites behind NATs, on slow links that fail too")
    parser.add_argument("--step", type=float, default=0.05, help="seconds that an inner step takes at least")
    parser.add_argument("--kinds", nargs="+", choices=FORMS, default=[], help="which faults; all by default")
    parser.add_argument("--keep", type=Path, help="an empty folder for what the processes write")
    chosen = parser.parse_args(arguments)
    if chosen.namespaces and (lacks := missing()) is not None:
        sys.exit(lacks)
    faults = 3 if chosen.quick else chosen.faults
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = run(chosen.seed, faults, chosen.minutes, chosen.namespaces, chosen.step, folder, chosen.kinds)
    # With a file, those of other seeds at this commit are among them.
    show(add(chosen.json, [found], chosen.quick))
    if found["problems"]:
        sys.exit(f"What the processes wrote is in {folder}.")
    if not chosen.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
