"""The schedule against an independent statement of the paper's rule, for many (H, P, tau)."""

import dataclasses
import re
from collections import defaultdict
from fractions import Fraction
from math import floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdiloco import Schedule
from tests.reference import is_launched

MANY = settings(max_examples=60, deadline=None)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid (H, P, tau); more fragments than steps included."""
    sync_every = draw(st.integers(1, 40))
    return Schedule(sync_every, draw(st.integers(0, sync_every - 1)), draw(st.integers(1, 60)))


def offset(schedule: Schedule, fragment: int) -> int:
    """t_p in exact arithmetic."""
    return floor(Fraction(fragment, schedule.fragments) * schedule.sync_every)


def launches_until(schedule: Schedule, last: int) -> dict[int, list[int]]:
    """Every launch up to a step, enumerated by fragment and round: p launches at k * H + t_p for k = 1, 2, ..."""
    launches = defaultdict(list)
    for fragment in range(schedule.fragments):
        for step in range(schedule.sync_every + offset(schedule, fragment), last + 1, schedule.sync_every):
            launches[step].append(fragment)
    return launches


def happens(schedule: Schedule, first: int, last: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    every = [(step, schedule.launches(step), schedule.landings(step)) for step in range(first, last + 1)]
    return [one for one in every if one[1] or one[2]]


@MANY
@given(schedules())
def test_launches_and_landings_are_those_of_the_paper(schedule: Schedule) -> None:
    last = 5 * schedule.sync_every
    expected, in_flight = launches_until(schedule, last), list[int]()
    assert [schedule.offset(p) for p in range(schedule.fragments)] == [
        offset(schedule, p) for p in range(schedule.fragments)
    ]
    for step in range(-schedule.sync_every, last + 1):
        assert schedule.launches(step) == tuple(expected.get(step, ()))
        assert schedule.landings(step) == tuple(expected.get(step - schedule.overlap_steps, ()))
        # Line 6 of the algorithm, for all fragments.
        due = [is_launched(step, p, schedule.fragments, schedule.sync_every) for p in range(schedule.fragments)]
        assert step < 1 or [p in schedule.launches(step) for p in range(schedule.fragments)] == due
        # Flights land in the order of their launch, and never are there two of one fragment.
        in_flight += schedule.launches(step)
        assert len(in_flight) == len(set(in_flight))
        for fragment in schedule.landings(step):
            assert in_flight.pop(0) == fragment
    for first in (schedule.sync_every, 3 * schedule.sync_every):
        launched = [p for step in range(first, first + schedule.sync_every) for p in schedule.launches(step)]
        assert launched == list(range(schedule.fragments)), "every round has every fragment once"


@MANY
@given(schedules(), st.integers(10**9, 10**12))
def test_launches_repeat_for_ever(schedule: Schedule, step: int) -> None:
    assert schedule.launches(step) == schedule.launches(2 * schedule.sync_every + step % schedule.sync_every)


def test_no_fragment_is_missed_by_rounding_and_many_share_a_step() -> None:
    # floor(p * 100 / 3) = 0, 33, 66.
    launches = {step: own for step, own, _ in happens(Schedule(100, 5, fragments=3), 1, 266) if own}
    assert launches == {100: (0,), 133: (1,), 166: (2,), 200: (0,), 233: (1,), 266: (2,)}
    # floor(p * 2 / 5) = 0, 0, 0, 1, 1.
    assert happens(Schedule(2, 1, fragments=5), 0, 4) == [
        (2, (0, 1, 2), ()),
        (3, (3, 4), (0, 1, 2)),
        (4, (0, 1, 2), (3, 4)),
    ]
    assert happens(Schedule(1, 0, fragments=3), 0, 2) == [(step, (0, 1, 2), (0, 1, 2)) for step in (1, 2)]


def parsed(table: str) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The lines of a table below its header, read back."""
    header, *lines = [re.split(" {2,}", line.strip()) for line in table.split("\n")]
    assert header == ["step", "launches", "lands"]
    cells = [[() if cell == "-" else tuple(map(int, cell.split(","))) for cell in line[1:]] for line in lines]
    return [(int(line[0]), own[0], own[1]) for line, own in zip(lines, cells, strict=True)]


@MANY
@given(schedules(), st.integers(1, 200), st.integers(0, 100))
def test_the_table_of_any_range_shows_what_happens_in_it(schedule: Schedule, first: int, length: int) -> None:
    assert parsed(schedule.table(first, first + length)) == happens(schedule, first, first + length)
    # By default it ends when every fragment has landed twice.
    landed = [fragment for _, _, landings in parsed(schedule.table()) for fragment in landings]
    assert all(landed.count(fragment) >= 2 for fragment in range(schedule.fragments))
    assert str(schedule) == schedule.table()
    lines = schedule.table().split("\n")
    if schedule.fragments <= 2:
        column = lines[0].index("lands")
        assert all(line[column - 1] == " " != line[column] for line in lines), "columns line up"


def test_a_schedule_cannot_change() -> None:
    schedule = Schedule(100, 5, 2)
    assert dataclasses.replace(schedule) == schedule != dataclasses.replace(schedule, sync_every=90)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.sync_every = 90  # type: ignore[misc]


@MANY
@given(schedules(), st.integers(0, 200))
def test_the_longest_wait_is_that_of_the_worst_step_to_ask_at(schedule: Schedule, since: int) -> None:
    last = since + 3 * schedule.sync_every
    launches = sorted(launches_until(schedule, last + 2 * schedule.sync_every))
    waits = [min(t for t in launches if t > asked) + schedule.overlap_steps - asked for asked in range(since, last)]
    assert schedule.longest_wait(since) == max(waits)
