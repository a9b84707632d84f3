"""When fragments launch and land, against a loop over all inner steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdiloco import DenseBeginning, Schedule
from lightning_sdiloco.algorithm.as_data import as_data


class Event(NamedTuple):
    """A launch or a landing, in the order of launches."""

    step: int
    fragment: int
    round: int


@st.composite
def schedules(draw: Any) -> Schedule:
    fragments = draw(st.integers(1, 7))
    sync_every = draw(st.integers(2, 13))
    overlap_steps = draw(st.integers(0, sync_every - 1))
    if draw(st.booleans()):
        return Schedule(sync_every, overlap_steps, fragments)
    dense_every = draw(st.integers(1, sync_every // 2))
    dense_overlap = draw(st.none() | st.integers(0, dense_every - 1))
    dense = DenseBeginning(draw(st.integers(1, 5)), dense_every, dense_overlap)
    return Schedule(sync_every, overlap_steps, fragments, dense)


class Intervals(NamedTuple):
    """The settings that hold for the next launch of a fragment."""

    sync_every: int
    overlap_steps: int
    start: int


def intervals(schedule: Schedule, rounds: int) -> Intervals:
    """Those of a fragment that has launched in so many rounds."""
    dense = schedule.dense
    if dense is None:
        return Intervals(schedule.sync_every, schedule.overlap_steps, start=0)
    if rounds >= dense.rounds:
        start = dense.rounds * dense.sync_every
        return Intervals(schedule.sync_every, schedule.overlap_steps, start)
    overlap_steps = dense.overlap_steps
    if overlap_steps is None:
        overlap_steps = min(dense.sync_every // 2, schedule.overlap_steps)
    return Intervals(dense.sync_every, overlap_steps, start=0)


def looped(schedule: Schedule, steps: int) -> tuple[list[Event], list[Event]]:
    """Launches and landings of a run, found by checking after every inner step whether a fragment
    is due.
    """
    launches = list[Event]()
    landings = list[Event]()
    rounds = [0] * schedule.fragments
    for step in range(1, steps + 1):
        for fragment in range(schedule.fragments):
            sync_every, overlap_steps, start = intervals(schedule, rounds[fragment])
            offset = fragment * sync_every // schedule.fragments
            since = step - start - offset
            if since >= sync_every and since % sync_every == 0:
                rounds[fragment] += 1
                launches.append(Event(step, fragment, rounds[fragment]))
                landings.append(Event(step + overlap_steps, fragment, rounds[fragment]))
    return launches, [landing for landing in landings if landing.step <= steps]


def due(events_of_step: Callable[[int], Sequence[int]], steps: int) -> list[tuple[int, int]]:
    """The steps and fragments of a run's launches, or of its landings."""
    pairs = []
    for step in range(1, steps + 1):
        pairs += [(step, fragment) for fragment in events_of_step(step)]
    return pairs


@settings(deadline=None)
@given(schedule=schedules(), steps=st.integers(0, 90))
def test_launches_and_landings_are_those_of_a_loop(schedule: Schedule, steps: int) -> None:
    launches, landings = looped(schedule, steps)
    _, later_landings = looped(schedule, steps + 30)
    assert due(schedule.launches, steps) == [launch[:2] for launch in launches]
    assert due(schedule.landings, steps) == [landing[:2] for landing in landings]
    for step, fragment, number in launches:
        assert schedule.launch_of(fragment, number) == step
        assert schedule.is_dense(step) == schedule.is_dense_round(number)
        assert Event(step + schedule.overlap_of(step), fragment, number) in later_landings
        assert schedule.overlap_of(step) == schedule.overlap_of_round(number)


@settings(deadline=None)
@given(schedule=schedules(), steps=st.integers(0, 90))
def test_no_fragment_launches_in_flight_and_flights_land_in_launch_order(
    schedule: Schedule, steps: int
) -> None:
    launches, landings = looped(schedule, steps)
    assert sorted(landings, key=lambda landing: landing.step) == landings
    for landing in landings:
        of_fragment = [launch for launch in launches if launch.fragment == landing.fragment]
        earlier = [launch.round for launch in of_fragment if launch.step < landing.step]
        assert max(earlier, default=0) <= landing.round


def rounds_of(events: list[Event], fragment: int) -> list[int]:
    return [event.round for event in events if event.fragment == fragment]


@settings(deadline=None)
@given(schedule=schedules(), steps=st.integers(0, 90))
def test_totals_for_a_whole_run_equal_those_counted_step_by_step(
    schedule: Schedule, steps: int
) -> None:
    launches, landings = looped(schedule, steps)
    landings_after_dense = []
    for fragment in range(schedule.fragments):
        landed = rounds_of(landings, fragment)
        launched = rounds_of(launches, fragment)
        landings_after_dense.append(sum(number > schedule.dense_rounds for number in landed))
        dense = sum(number <= schedule.dense_rounds for number in launched)
        assert schedule.launches_in(fragment, steps) == (dense, len(launched) - dense)
        assert len(landed) <= len(launched)
    assert schedule.rounds_in(steps) == min(landings_after_dense)
    landed_fragments = {landing.fragment for landing in landings}
    assert (steps >= schedule.first_round) == (len(landed_fragments) == schedule.fragments)
    first_launches, _ = looped(schedule, 30)
    assert schedule.first_launch == min(launch.step for launch in first_launches)


@settings(deadline=None)
@given(schedule=schedules(), since=st.integers(0, 60))
def test_no_request_waits_longer_than_the_bound_and_one_waits_that_long(
    schedule: Schedule, since: int
) -> None:
    launches, _ = looped(schedule, since + 150)
    waits = []
    for request in range(since, since + 60):
        launch_step = next(launch.step for launch in launches if launch.step > request)
        waits.append(launch_step + schedule.overlap_of(launch_step) - request)
    assert schedule.longest_wait(since) == max(waits)


def cell(events: list[Event], step: int) -> str:
    """The fragments of a step's events, as the table shows them."""
    return ", ".join(str(event.fragment) for event in events if event.step == step) or "-"


@settings(deadline=None)
@given(schedule=schedules())
def test_the_table_shows_launches_and_landings(schedule: Schedule) -> None:
    launches, landings = looped(schedule, 200)
    for line in schedule.table().splitlines()[1:]:
        step = int(line.split()[0])
        assert line == f"{step:>4}  {cell(launches, step):<8}  {cell(landings, step)}"


@settings(deadline=None)
@given(
    dense=st.builds(DenseBeginning, st.integers(1, 5), st.integers(1, 5)), step=st.integers(0, 40)
)
def test_restarted_rounds_have_the_rest_of_a_dense_beginning(
    dense: DenseBeginning, step: int
) -> None:
    rest_of_dense = dense.after(step)
    if rest_of_dense is not None:
        assert 0 <= dense.steps - step - rest_of_dense.steps < dense.sync_every
    else:
        assert step > dense.steps - dense.sync_every
    assert DenseBeginning.read(as_data(rest_of_dense)) == rest_of_dense


LEAST = "it must be a whole number of at least 1"
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"rounds": 0}, f"dense_beginning.rounds=0 is not valid: {LEAST}"),
    ({"rounds": 2.0}, "dense_beginning.rounds=2.0 is not valid"),
    ({"rounds": True}, "dense_beginning.rounds=True is not valid"),
    ({"rounds": 3, "sync_every": 0}, "dense_beginning.sync_every=0 is not valid"),
    ({"rounds": 3, "overlap_steps": -1}, "dense_beginning.overlap_steps=-1 is not valid"),
    (
        {"rounds": 3, "overlap_steps": 4},
        "dense_beginning.overlap_steps=4 is out of range: .* which is 4",
    ),
]


@pytest.mark.parametrize(("choices", "message"), REFUSALS)
def test_a_dense_beginning_out_of_range_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DenseBeginning(**choices)
