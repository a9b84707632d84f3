"""Dynamic backup workers in virtual time, beside closed forms."""

from dataclasses import replace

import pytest

from benchmarks.backup_workers import BACKUP, Case, Play, goodput_at_most, goodput_of_all, wait_for_all

STALLS = Case(rounds=120, seed=3)


def test_with_a_quorum_stalls_cost_what_they_take_of_their_own_site() -> None:
    found = Play(replace(STALLS, quorum=BACKUP)).run().found()
    stalled = sum(60.0 * count for count in stalls(STALLS)) / (8 * STALLS.seconds)
    # What is trained last is not counted yet.
    assert found["goodput"] == pytest.approx(1 - stalled, abs=0.012)
    assert found["goodput"] >= 0.93
    assert found["counted"] >= 0.96
    assert found["landing_seconds"] == pytest.approx(5.2, abs=0.3)


def stalls(case: Case) -> list[int]:
    """How often each site stalls, counted with the same random numbers."""
    counts = []
    for site in range(case.sites):
        steps, time, count = case.steps_of(site), 0.0, 0
        while time < case.seconds:
            took = steps.next()
            time, count = time + took, count + (took > 1)
        counts.append(count)
    return counts


def test_waiting_for_all_follows_its_closed_form() -> None:
    case = Case(rounds=2500)
    assert goodput_of_all(case) == pytest.approx(0.7852, abs=1e-4)
    assert goodput_at_most(case) == pytest.approx(0.9615, abs=1e-4)
    assert wait_for_all(case)["goodput"] == pytest.approx(goodput_of_all(case), abs=0.015)
    assert wait_for_all(replace(case, share=0.0, rounds=50))["goodput"] == 1.0


def test_a_site_that_is_always_late_delays_the_others_only_every_eighth_round() -> None:
    late = Case(sites=4, rounds=40, share=0.0, delays=(0.0, 0.0, 0.0, 15.0), grace=20.0)
    waiting, backup = Play(late).run(), Play(replace(late, quorum=BACKUP)).run()
    assert waiting.found()["landing_seconds"] > 15
    assert backup.found()["landing_seconds"] < 9
    rounds = [one.round for one in backup.records if one.of("site-3") and one.round > 8]
    assert rounds == [16, 24, 32]
    # All that it has trained counts there.
    assert [own.weight for one in backup.records if (own := one.of("site-3"))][-1] == 8 * 30
