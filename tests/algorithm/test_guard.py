"""The guard's rule for lengths: known answers, and honest and faulty groups in plain numbers."""

import json
from math import inf, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lengths import FAULTS, HONEST, Scenario, World, honest
from lightning_sdiloco.algorithm.guard import (
    FIRST,
    GUARD,
    NOT_FINITE,
    Length,
    Past,
    TooLong,
    _exp,
    _log,
    joined_pasts,
    outlying,
    remembered,
    remembered_sizes,
    with_large_buffers,
)

Round = dict[str, Length]


def of_steps(steps: float, rate: float = 0.0, **norms: float) -> Round:
    return {group: Length(norm, steps, steps * rate) for group, norm in norms.items()}


def after(*rounds: Round) -> dict[str, Past]:
    """What is remembered after rounds in which all have counted."""
    pasts: dict[str, Past] = {}
    for lengths in rounds:
        pasts = remembered(lengths, (), pasts)
    return pasts


def times(lengths: Round, pasts: dict[str, Past]) -> dict[str, float]:
    return {group: why.times for group, why in outlying(lengths, pasts, GUARD).items()}


TWO = after(*[of_steps(10, a=1.0, b=2.0)] * 4)
THREE = after(*[of_steps(10, a=1.0, b=2.0, c=1.0)] * 4)


@pytest.mark.parametrize(
    ("pasts", "lengths", "expected"),
    [
        (TWO, of_steps(10, a=1.0, b=9.9), {}),
        (TWO, of_steps(10, a=1.0, b=10.1), {"b": 5.05}),
        # The other one has grown as well, or has become shorter.
        (TWO, of_steps(10, a=3.0, b=29.0), {}),
        (TWO, of_steps(10, a=0.1, b=9.9), {}),
        # All have grown; nobody is at fault, unless it is by far more.
        (TWO, of_steps(10, a=40.0, b=90.0), {}),
        (TWO, of_steps(10, a=2.0 * FIRST), {"a": 2.0 * FIRST}),
        (THREE, of_steps(10, a=40.0, b=2.0, c=1.0), {"a": 20.0}),
        # Nothing is known.
        ({}, of_steps(10, a=1.0, b=0.9 * FIRST), {}),
        ({}, of_steps(10, a=1.0, b=2.0 * FIRST), {"b": 2.0 * FIRST}),
        ({}, of_steps(10, a=0.0, b=2.0 * FIRST), {}),
        ({}, of_steps(10, a=1e300), {}),
    ],
)
def test_a_length_is_compared_with_its_own_past_and_the_others_growth(
    pasts: dict[str, Past], lengths: Round, expected: dict[str, float]
) -> None:
    assert times(lengths, pasts) == pytest.approx(expected)


def test_lengths_of_unlike_distances_are_compared_by_what_the_past_shows() -> None:
    alone = {"a": Length(20.0, 300), "b": Length(1.0, 10)}
    # Nothing shows how lengths grow with the distance: they may grow with it.
    assert times(alone, after(*[of_steps(10, a=1.0, b=1.0)] * 8)) == {}
    flat = after(*[of_steps(10, a=1.0, b=1.0), of_steps(300, a=1.0, b=1.0)] * 4)
    assert list(times(alone, flat)) == ["a"]
    # The other one was away for as long.
    together = of_steps(300, a=20.0, b=1.0)
    assert list(times(together, after(*[of_steps(10, a=1.0, b=1.0)] * 8))) == ["a"]


def test_a_restart_of_the_learning_rate_is_no_fault_where_the_rate_is_known() -> None:
    pasts = after(*[of_steps(10, rate=1e-4, a=0.01, b=0.01)] * 8)
    restarted = {"a": Length(0.44, 10, 10 * 1e-2), "b": Length(0.01, 10, 10 * 1e-4)}
    assert times(restarted, pasts) == {}
    by_steps = {group: length._replace(path=0.0) for group, length in restarted.items()}
    assert times(by_steps, pasts) == pytest.approx({"a": 44.0})


def test_a_group_that_grows_slowly_is_too_long_beside_two_others_in_the_end() -> None:
    pasts = after(*[of_steps(10, a=1.0, b=1.0, c=3.0)] * 8)
    norm = 3.0
    for _ in range(60):
        norm *= 1.3
        lengths = of_steps(10, a=1.0, b=1.0, c=norm)
        outliers = outlying(lengths, pasts, GUARD)
        if outliers:
            break
        pasts = remembered(lengths, (), pasts)
    assert list(outliers) == ["c"]
    assert outliers["c"].is_beside_others
    assert GUARD**2 < outliers["c"].times < 2 * GUARD**2


def test_being_left_out_teaches_nothing_and_being_away_forgets() -> None:
    pasts = THREE
    for number in range(100):
        lengths = of_steps(10, a=1.01**number, b=2.0 * 1.01**number)
        assert list(times({**lengths, "c": Length(40.0, 10)}, pasts)) == ["c"]
        pasts = remembered(lengths, ["c"], pasts)
    # It has followed the others meanwhile.
    usual = pasts["c"].measured[-1].norm
    assert usual == pytest.approx(1.01**99, rel=0.05)
    for _ in range(8):
        assert "c" in pasts
        pasts = remembered(lengths, (), pasts)
    assert "c" not in pasts


def test_a_past_survives_a_checkpoint_and_a_cut_but_not_an_earlier_format() -> None:
    past = remembered(of_steps(10, b=1.0), (), THREE)["a"]
    assert past.lengths[-1] is None
    assert Past.read(json.loads(json.dumps(past.plain()))) == past
    assert Past.read([1.0, 1.0, 1.0, 1.0]) == Past()
    joined = joined_pasts([past, Past((Length(3.0, 10), Length(4.0, 10)))])
    assert joined.lengths == (Length((1.0 + 9.0) ** 0.5, 10), None)


@given(st.floats(5e-324, 1.7e308))
def test_logarithms_are_those_of_the_library(number: float) -> None:
    assert _log(number) == pytest.approx(log(number), rel=1e-14, abs=1e-14)
    if abs(log(number)) < 700.0:
        assert _exp(_log(number)) == pytest.approx(number, rel=1e-12)


NORMS = st.sampled_from([0.0, 1.0, 5e-324, 1e-200, 1e300, inf]) | st.floats(0, 1e6)


@settings(max_examples=100, deadline=None)
@given(
    rounds=st.lists(
        st.dictionaries(
            st.sampled_from("abcd"),
            st.builds(Length, NORMS, st.integers(0, 1000), st.floats(0, 10)),
            min_size=1,
        )
    ),
    guard=st.floats(1.01, 1e6),
)
def test_the_guard_judges_any_numbers_alike_in_any_order(rounds: list[Round], guard: float) -> None:
    pasts: dict[str, Past] = {}
    for lengths in rounds:
        outliers = outlying(lengths, pasts, guard)
        turned = dict(reversed(lengths.items()))
        pasts_turned = dict(reversed(pasts.items()))
        assert outlying(turned, pasts_turned, guard) == outliers
        assert all(why.times > guard or why.times > FIRST for why in outliers.values())
        counted = {group: length for group, length in lengths.items() if group not in outliers}
        pasts = remembered(counted, outliers, pasts)
        assert all(length.is_comparable for past in pasts.values() for length in past.measured)


FIVE = dict.fromkeys("abcde", 1.0)


def after_sizes(*rounds: dict[str, float]) -> dict[str, Past]:
    """What is remembered after rounds in which the buffers of all have counted."""
    pasts: dict[str, Past] = {}
    for sizes in rounds:
        pasts = remembered_sizes(sizes, (), pasts)
    return pasts


KNOWN = after_sizes(*[FIVE] * 4)


@pytest.mark.parametrize(
    ("pasts", "sizes", "expected"),
    [
        ({}, {"a": 1.0, "b": 1e20}, {"b": 1e20}),
        ({}, {"b": 1e20}, {}),
        ({}, {"a": 1.0, "b": 0.9 * FIRST}, {}),
        ({}, FIVE | {"d": 1e20, "e": 1e20}, {"d": 1e20, "e": 1e20}),
        (KNOWN, FIVE | {"b": 99.0}, {}),
        (KNOWN, FIVE | {"b": 101.0}, {"b": 101.0}),
        (KNOWN, FIVE | {"d": 1e20, "e": 1e20}, {"d": 1e20, "e": 1e20}),
        (KNOWN, {"a": 1.0, "b": 1e20}, {"b": 1e20}),
        # The statistics of all have grown.
        (KNOWN, dict.fromkeys(FIVE, 5e3), {}),
        (KNOWN, FIVE | {"a": 0.0, "b": NOT_FINITE}, {}),
    ],
)
def test_buffers_are_too_large_if_they_are_100_times_as_large_as_usual(
    pasts: dict[str, Past], sizes: dict[str, float], expected: dict[str, float]
) -> None:
    assert with_large_buffers(sizes, pasts) == pytest.approx(expected)


def test_buffers_that_are_always_too_large_never_become_usual() -> None:
    sizes = FIVE | {"b": 300.0}
    pasts = KNOWN
    for _ in range(30):
        assert with_large_buffers(sizes, pasts) == {"b": pytest.approx(300.0)}
        pasts = remembered_sizes(sizes, ["b"], pasts)


def too_long(world: World) -> list[tuple[int, int, TooLong]]:
    return world.run(70).alarms


@pytest.mark.parametrize("name", HONEST)
def test_honest_groups_are_never_left_out(name: str) -> None:
    assert [too_long(World(scenario, seed=7)) for scenario in HONEST[name][:3]] == [[]] * len(
        HONEST[name][:3]
    )


CAUGHT = [name for name in FAULTS if name not in ("3 times as long", "the sign flipped")]


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("name", [name for name in CAUGHT if "1.05" not in name])
def test_a_faulty_group_is_left_out_and_costs_the_others_nothing(name: str, groups: int) -> None:
    faulty = [groups - 1]
    if name.startswith("two"):
        groups = 5
        faulty = [3, 4]
    sound = World(Scenario(groups), 7, faults=dict.fromkeys(faulty, honest)).run(120)
    spoilt = World(Scenario(groups), 7, faults=dict.fromkeys(faulty, FAULTS[name])).run(120)
    assert spoilt.loss < 1.2 * sound.loss
    assert {group for _, group, _ in spoilt.alarms} == set(faulty)
