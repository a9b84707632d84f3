"""Searches for faults that break a promise of a federation: every seed is a history of its own.

    python -m tests.federation.simulate --seeds 10000 --from 0

Hub, ledger, disk and sites are in this process, on a virtual clock; see `tests/federation/trial.py`.
Of a seed that fails it prints the shortest history: the faults without which nothing is broken, and
what happens.
"""

import argparse
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.federation.trial import Fault, Judge, World


class Failure(NamedTuple):
    """The shortest history of a seed that breaks a promise."""

    seed: int
    faults: Sequence[Fault]
    history: Sequence[str]
    violation: str

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.violation}", "", "faults:"]
        lines += [f"  {fault}" for fault in self.faults] or ["  none"]
        return "\n".join([*lines, "", "history:", *self.history])


def played(seed: int, faults: Sequence[Fault] | None = None) -> Judge:
    return World(seed, faults).run()


def failing(seeds: Iterable[int]) -> Iterator[int]:
    return (seed for seed in seeds if played(seed).violations)


def shortest(seed: int) -> Failure:
    """Drops the faults of a failing seed, one after the other, until none can be dropped."""
    world = World(seed)
    faults = list(world.faults.faults)
    index = len(faults)
    while index:
        index -= 1
        fewer = faults[:index] + faults[index + 1 :]
        if played(seed, fewer).violations:
            faults = fewer
            # Faults that could not be dropped before may be dropped now.
            index = len(faults)
    world = World(seed, faults)
    world.history = []
    violations = world.run().violations
    return Failure(seed, faults, world.history, violations[0])


def search(seeds: Sequence[int]) -> list[int]:
    """Plays seeds, prints what fails, and returns those seeds."""
    counts: Counter[str] = Counter()
    failures = []
    began = time.perf_counter()
    for seed in seeds:
        judge = played(seed)
        counts += judge.counts
        if judge.violations:
            failures.append(seed)
            print(f"{shortest(seed)}\n", flush=True)
    seconds = time.perf_counter() - began
    faults = sum(number for name, number in counts.items() if name.startswith("fault"))
    print(
        f"{len(seeds)} seeds, {faults} faults, {1000 * seconds / max(1, len(seeds)):.0f} ms a seed:"
        f" {len(failures)} fail; {counts['the run waits for an operator']} wait for an operator"
    )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.federation.simulate")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to play")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    arguments = parser.parse_args()
    # The worlds hold themselves in circles, which are not worth a search after every few messages.
    gc.freeze()
    gc.set_threshold(100_000)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return 1 if search(seeds) else 0


if __name__ == "__main__":
    raise SystemExit(main())
