"""The trial in virtual time: 10,000 faults, and not one silent divergence."""

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.federation.world import World

SEEDS, FAULTS = range(200), 50


def play(seeds: Sequence[int]) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        judge = World(seed, FAULTS).run()
        assert judge.violations == [], f"seed {seed}"
        counts += judge.counts + judge.halts
    happened = sum(count for name, count in counts.items() if name.startswith("fault"))
    assert happened == len(seeds) * FAULTS
    # Nearly all runs come to their end; the others stop with an error that says what an operator can do.
    assert counts["the run waits for an operator"] <= len(seeds) // 20


def test_nothing_diverges_in_silence_and_nothing_counts_twice() -> None:
    # Every kind of world: its quorum, what becomes of late contributions, and who may train early.
    play(SEEDS[1:193:12])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_nothing_diverges_in_any_of_the_worlds(part: int) -> None:
    play(SEEDS[part::8])
