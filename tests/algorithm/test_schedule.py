"""The schedule against an independent statement of the paper's rule, for many (H, P, tau)."""

import dataclasses
import re
from collections import defaultdict
from fractions import Fraction
from math import floor

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_sdiloco import Schedule
from lightning_sdiloco.algorithm.schedule import Event
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


def shifted(launches: dict[int, list[int]], steps: int) -> dict[int, list[int]]:
    return {step + steps: fragments for step, fragments in launches.items()}


@MANY
@given(schedules())
def test_a_fragment_launches_at_every_multiple_of_h_after_its_offset(schedule: Schedule) -> None:
    last = 4 * schedule.sync_every
    expected = launches_until(schedule, last)
    for step in range(-schedule.sync_every, last + 1):
        assert schedule.launches(step) == tuple(expected.get(step, ()))


@MANY
@given(schedules())
def test_launches_are_those_of_line_6_of_the_algorithm(schedule: Schedule) -> None:
    for step in range(1, 3 * schedule.sync_every + 1):
        for fragment in range(schedule.fragments):
            due = is_launched(step, fragment, schedule.fragments, schedule.sync_every)
            assert (fragment in schedule.launches(step)) == due


@MANY
@given(schedules())
def test_a_fragment_first_launches_after_h_steps_and_its_offset(schedule: Schedule) -> None:
    first: dict[int, int] = {}
    for step in range(1, 2 * schedule.sync_every):
        for fragment in schedule.launches(step):
            first.setdefault(fragment, step)
    expected = {p: schedule.sync_every + offset(schedule, p) for p in range(schedule.fragments)}
    assert first == expected
    assert {p: schedule.offset(p) + schedule.sync_every for p in range(schedule.fragments)} == expected


@MANY
@given(schedules())
def test_a_fragment_lands_overlap_steps_after_its_launch(schedule: Schedule) -> None:
    last = 4 * schedule.sync_every
    expected = shifted(launches_until(schedule, last), schedule.overlap_steps)
    for step in range(last + 1):
        assert schedule.landings(step) == tuple(expected.get(step, ()))


@MANY
@given(schedules())
def test_flights_land_in_the_order_of_their_launch_and_never_two_of_one_fragment(schedule: Schedule) -> None:
    in_flight: list[int] = []
    for step in range(1, 5 * schedule.sync_every):
        in_flight += schedule.launches(step)
        assert len(in_flight) == len(set(in_flight))
        for fragment in schedule.landings(step):
            assert in_flight.pop(0) == fragment


@MANY
@given(schedules())
def test_every_round_launches_every_fragment_once(schedule: Schedule) -> None:
    for first in (schedule.sync_every, 3 * schedule.sync_every):
        launched = [p for step in range(first, first + schedule.sync_every) for p in schedule.launches(step)]
        assert launched == list(range(schedule.fragments))


@MANY
@given(schedules(), st.integers(0, 200))
def test_the_round_counts_the_landings_of_the_first_fragment(schedule: Schedule, step: int) -> None:
    assert schedule.round(step) == sum(0 in schedule.landings(t) for t in range(step + 1))


@MANY
@given(schedules(), st.integers(10**9, 10**12))
def test_launches_repeat_for_ever(schedule: Schedule, step: int) -> None:
    early = 2 * schedule.sync_every + step % schedule.sync_every
    assert schedule.launches(step) == schedule.launches(early)


def test_no_fragment_may_be_missed_by_rounding() -> None:
    # floor(p * 100 / 3) = 0, 33, 66.
    schedule = Schedule(sync_every=100, overlap_steps=5, fragments=3)
    assert [event for event in schedule.events(1, 266) if event.launches] == [
        Event(100, (0,), ()),
        Event(133, (1,), ()),
        Event(166, (2,), ()),
        Event(200, (0,), ()),
        Event(233, (1,), ()),
        Event(266, (2,), ()),
    ]


def test_more_fragments_than_steps_share_their_launches() -> None:
    # floor(p * 2 / 5) = 0, 0, 0, 1, 1.
    schedule = Schedule(sync_every=2, overlap_steps=1, fragments=5)
    assert list(schedule.events(0, 4)) == [
        Event(2, (0, 1, 2), ()),
        Event(3, (3, 4), (0, 1, 2)),
        Event(4, (0, 1, 2), (3, 4)),
    ]


def test_a_round_of_one_step_launches_and_lands_everything_at_once() -> None:
    schedule = Schedule(sync_every=1, overlap_steps=0, fragments=3)
    assert list(schedule.events(0, 2)) == [Event(1, (0, 1, 2), (0, 1, 2)), Event(2, (0, 1, 2), (0, 1, 2))]


def parsed(table: str) -> list[Event]:
    """The lines of a table below its header, read back."""
    header, *lines = [re.split(" {2,}", line.strip()) for line in table.split("\n")]
    assert header == ["step", "launches", "lands"]
    return [Event(int(step), _parsed_cell(launches), _parsed_cell(lands)) for step, launches, lands in lines]


def _parsed_cell(cell: str) -> tuple[int, ...]:
    return () if cell == "-" else tuple(map(int, cell.split(",")))


@MANY
@given(schedules(), st.integers(1, 200), st.integers(0, 100))
def test_the_table_of_any_range_shows_what_happens_in_it(schedule: Schedule, first: int, length: int) -> None:
    last = first + length
    launches = launches_until(schedule, last)
    landings = shifted(launches, schedule.overlap_steps)
    expected = [
        Event(step, tuple(launches.get(step, ())), tuple(landings.get(step, ())))
        for step in range(first, last + 1)
        if step in launches or step in landings
    ]
    assert parsed(schedule.table(first, last)) == expected
    assert list(schedule.events(first, last)) == expected


@MANY
@given(schedules())
def test_the_table_by_default_ends_when_every_fragment_landed_twice(schedule: Schedule) -> None:
    landed = [fragment for event in parsed(schedule.table()) for fragment in event.landings]
    assert all(landed.count(fragment) >= 2 for fragment in range(schedule.fragments))
    assert str(schedule) == schedule.table()


def test_a_range_in_which_nothing_happens_is_an_empty_table() -> None:
    schedule = Schedule(sync_every=100, overlap_steps=5, fragments=2)
    assert parsed(schedule.table(106, 149)) == []
    assert parsed(schedule.table(105, 150)) == [Event(105, (), (0,)), Event(150, (1,), ())]
    assert parsed(schedule.table(1, 99)) == []


def test_columns_line_up() -> None:
    lines = Schedule(sync_every=100, overlap_steps=5, fragments=2).table(100, 1205).split("\n")
    column = lines[0].index("lands")
    assert {line[column - 1] for line in lines} == {" "}
    assert all(line[column] != " " for line in lines)


@MANY
@given(schedules(), schedules())
def test_schedules_compare_by_value_and_cannot_change(one: Schedule, other: Schedule) -> None:
    assume(one != other)
    assert dataclasses.replace(one) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.sync_every = other.sync_every  # type: ignore[misc]


@MANY
@given(schedules(), st.integers(0, 200))
def test_the_longest_wait_is_that_of_the_worst_step_to_ask_at(schedule: Schedule, since: int) -> None:
    last = since + 3 * schedule.sync_every
    launches = sorted(launches_until(schedule, last + 2 * schedule.sync_every))
    waits = [min(t for t in launches if t > asked) + schedule.overlap_steps - asked for asked in range(since, last)]
    assert schedule.longest_wait(since) == max(waits)
