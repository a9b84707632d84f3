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


def run(
    seed: int,
    faults: int,
    minutes: float,
    namespaces: bool,
    seconds: float,
    folder: Path,
    only: Sequence[str] = (),
) -> Found:
    """Plays a sequence of at most so many faults, of some kinds or all, and returns what was
    found; see `examined`.
    """
    links = Links(1 + len(SITES), MBIT_S, ONE_WAY_DELAY) if namespaces else nullcontext(None)
    began = time.monotonic()
    problems = []
    with links as opened, World(folder, SITES, seconds, links=opened) as world:
        try:
            Play(world).run(sequence(seed, SITES, namespaces, only), faults, 60 * minutes)
        except Halted as halted:
            problems = [str(halted)]
    found = examined(Told.of(folder, SITES), BATCH)
    found["problems"] += problems
    # The commit of this checkout, with a plus if files differ from it.
    words = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty=+",
        "--abbrev=10",
        "--exclude=*",
    ]
    commit = (
        subprocess.run(words, check=False, capture_output=True, text=True).stdout.strip()
        or "unknown"
    )
    about = {"seed": seed, "namespaces": namespaces, "kinds": list(only), "commit": commit}
    return {**about, "seconds": time.monotonic() - began, **found}


def show(runs: list[Found]) -> dict[str, float]:
    """Prints what happened to whom, how sites came back, and what went wrong; returns the sums."""
    rows = []
    for kind in sorted({kind for one in runs for kind in one["faults"]}):
        back = [own for one in runs for own in one["returns"] if own["kind"] == kind]
        times = [own["seconds"] for own in back] or [float("nan")]
        faults = sum(one["faults"].get(kind, 0) for one in runs)
        states = sum(own["state"] for own in back)
        rows.append(
            [
                kind,
                str(faults),
                str(len(back)),
                f"{median(times):.2f}",
                f"{max(times):.2f}",
                str(states),
            ]
        )
    columns = ["fault", "times", "returns", "median, s", "longest, s", "with a state"]
    report.show("Faults, and seconds from hello to all records applied", columns, rows)
    for one in runs:
        for problem in [*one["problems"], *one["slow"]]:
            print(f"seed {one['seed']}: {problem}")
    sums: dict[str, float] = {"faults": sum(sum(one["faults"].values()) for one in runs)}
    sums |= {name: sum(one[name] for one in runs) for name in ("records", "steps")}
    sums |= {name: sum(len(one[name]) for one in runs) for name in ("problems", "slow")}
    print(", ".join(f"{name}: {number}" for name, number in sums.items()))
    return sums


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
    chosen = parser.parse_args(arguments)
    if chosen.namespaces and (lacks := missing()) is not None:
        sys.exit(lacks)
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    faults = 3 if chosen.quick else chosen.faults
    found = run(
        chosen.seed, faults, chosen.minutes, chosen.namespaces, chosen.step, folder, chosen.kinds
    )
    file = chosen.json
    which = ("commit", "seed", "namespaces", "kinds")
    before = json.loads(file.read_text())["runs"] if file is not None and file.exists() else []
    # The same run counts once, and sums are of one commit.
    runs = [*(one for one in before if any(one.get(name) != found[name] for name in which)), found]
    sums = show([one for one in runs if one["commit"] == found["commit"]])
    about = {**report.measured("chaos", chosen.quick), "command": "python -m tests.chaos"}
    report.write(file, sums, about, runs=runs)
    if found["problems"]:
        sys.exit(f"What the processes wrote is in {folder}.")
    if not chosen.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
