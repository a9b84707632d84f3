"""The trial in virtual time: 10,000 faults, and not one silent divergence."""

from collections import Counter

import pytest

from tests.federation.world import World

SEEDS, PARTS, FAULTS = 200, 4, 50


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_diverges_in_silence_and_nothing_counts_twice(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        judge = World(seed, FAULTS).run()
        assert judge.violations == [], f"seed {seed}"
        counts += judge.counts + judge.halts
    happened = sum(count for name, count in counts.items() if name.startswith("fault"))
    assert happened == SEEDS // PARTS * FAULTS
    # Nearly all runs come to their end; the others stop with an error that says what an operator can do.
    assert counts["the run waits for an operator"] <= SEEDS // PARTS // 20
