"""The same faults for a federation of this package and for replica groups of torchft, and the same numbers of both.

    python -m benchmarks.chaos.peers [--who federation torchft-readme torchft-careful] [--seed N] [--faults N]
        [--spare-hub] [--json FILE]

The first faults of a seed, all of them: each waits until its victim is back from the last one, or for 30 s. A fault of
the hub is one of the lighthouse, which is started again where it was. With --spare-hub those of the hub and of all are
left out, and later ones take their places. benchmarks/peers/install.sh installs torchft.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.chaos.__main__ import SITES, commit, rounded
from benchmarks.chaos.beside import compared, federated, replicated
from benchmarks.chaos.checks import LONGEST_HANG, Found, Told
from benchmarks.chaos.enduring import Enduring
from benchmarks.chaos.faults import sequence
from benchmarks.chaos.replicas import BIN, SETTINGS, Replicas
from benchmarks.chaos.running import Halted, Play
from benchmarks.chaos.world import World

FEDERATION = "federation"
WHO = (FEDERATION, *(f"torchft-{name}" for name in SETTINGS))


def run(
    who: str, seed: int, faults: int, minutes: float, seconds: float, folder: Path, spare_hub: bool = False
) -> Found:
    """Plays the first faults of a sequence.

    Args:
        who: Suffers them.
        seed: Says which.
        faults: How many.
        minutes: For how long, at most.
        seconds: That an inner step takes at least.
        folder: Where processes write.
        spare_hub: Whether faults of the hub and of all are left out.

    Returns:
        What `compared` returns, what was run, and ``halted``: why it ended early, if it did.
    """
    about: Found = {"who": who, "seed": seed, "spare_hub": spare_hub, "commit": commit(), "load": os.getloadavg()[0]}
    began, settings = time.monotonic(), SETTINGS.get(who.partition("-")[2])
    every = sequence(seed, SITES, links=False)
    planned = (one for one in every if not spare_hub or one[1].victim in SITES)
    halted = None
    with ExitStack() as stack:
        if settings is None:
            world, read, kind = World.federated(folder, SITES, seconds), federated, Play
        else:
            groups = stack.enter_context(closing(Replicas(folder, seconds, settings)))
            world, read, kind = World(folder, SITES, groups), replicated, Enduring
            about |= {"torchft": version(), "settings": asdict(settings)}
        stack.enter_context(world)
        try:
            kind(world, planned, patience=LONGEST_HANG).run(faults, 60 * minutes)
        except Halted as stopped:
            halted = str(stopped)
    about |= {"seconds": time.monotonic() - began, "halted": halted, "load at the end": os.getloadavg()[0]}
    return rounded({**about, **compared(Told.of(folder, SITES), read)})


def version() -> str:
    """Returns that of torchft."""
    code = "import importlib.metadata as m; print(m.version('torchft-nightly'))"
    return subprocess.run([BIN / "python", "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def numbers(found: Found) -> dict[str, float]:
    """Returns the few numbers that matter, of a run."""
    back = [own["seconds"] for own in found["returns"]]
    minutes = max(found["trained"], 1e-9) / 60
    return {
        "faults": sum(found["faults"].values()),
        **after("of a site", [own for own in found["after faults"] if own["kind"].endswith("(site)")]),
        **after("of the hub or of all", [own for own in found["after faults"] if not own["kind"].endswith("(site)")]),
        "time that survivors stood still, %": 100 * found["still"],
        "returns that nothing came into": len(back),
        "seconds from up to the next outer step that counts it, median": median(back) if back else 0.0,
        "seconds from up to the next outer step that counts it, longest": max(back, default=0.0),
        "inner steps": found["steps"],
        "inner steps in no outer step, %": 100 * (1 - found["counted"] / max(found["steps"], 1)),
        "outer steps a minute": found["outer steps"] / minutes,
        "outer steps with different parameters": len(found["disagreements"]),
        "stalls above 30 s": found["hangs"],
        "processes that ended by themselves": found["died"] + (found["halted"] is not None),
    }


def after(whose: str, faults: list[Found]) -> dict[str, float]:
    """Returns the longest stall of a survivor after faults of somebody: the median over them, and the longest."""
    seconds = [own["seconds"] for own in faults]
    name = f"longest stall of a survivor after a fault {whose}"
    return {f"{name}, median, s": median(seconds) if seconds else 0.0, f"{name}, s": max(seconds, default=0.0)}


def add(path: Path | None, runs: list[Found]) -> list[Found]:
    """Adds runs to those in a file, in place of the same ones, and returns all of them."""
    if path is None:
        return runs
    before = json.loads(path.read_text())["runs"] if path.exists() else []
    same = {named(one) for one in runs}
    every = [*(one for one in before if named(one) not in same), *runs]
    headline = {f"{named(one)}: {name}": n for one in every for name, n in numbers(one).items()}
    report.write(path, headline, report.measured("chaos.peers", quick=False), runs=every)
    return every


def named(run: Found) -> str:
    """Says which run it is."""
    return f"{run['who']}, seed {run['seed']}" + (", hub spared" if run["spare_hub"] else "")


def show(runs: list[Found]) -> None:
    """Prints a column for each run."""
    told = [numbers(one) for one in runs]
    rows = [[name, *(f"{own[name]:.4g}" for own in told)] for name in told[0]]
    report.show("What the same faults did", ["", *map(named, runs)], rows)
    for one in runs:
        for problem in [*one["disagreements"], *([one["halted"]] if one["halted"] else [])]:
            print(f"{named(one)}: {problem}")


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = report.parser(__doc__)
    parser.add_argument("--who", nargs="+", choices=WHO, default=list(WHO), help="who suffers them; all by default")
    parser.add_argument("--seed", type=int, default=305, help="which sequence of faults")
    parser.add_argument("--faults", type=int, default=50, help="how many")
    parser.add_argument("--spare-hub", action="store_true", help="no faults of the hub, and none of all at once")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long a run may take, at most")
    parser.add_argument("--step", type=float, default=0.05, help="seconds that an inner step takes at least")
    parser.add_argument("--keep", type=Path, help="a folder for what the processes write")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs the comparison."""
    chosen = options(arguments)
    runs: list[dict[str, Any]] = []
    for who in chosen.who:
        if who != FEDERATION and not BIN.exists():
            report.said(f"{who} is left out: it is not installed: benchmarks/peers/install.sh")
            continue
        folder = (chosen.keep or Path(tempfile.mkdtemp(prefix="chaos-"))) / who
        folder.mkdir(parents=True)
        faults = 3 if chosen.quick else chosen.faults
        runs.append(run(who, chosen.seed, faults, chosen.minutes, chosen.step, folder, chosen.spare_hub))
        report.said(f"{who}: {runs[-1]['seconds']:.0f} s")
        if not chosen.keep:
            shutil.rmtree(folder.parent)
    if runs:
        show(add(chosen.json, runs))


if __name__ == "__main__":
    main()
