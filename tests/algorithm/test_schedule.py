"""When fragments launch and land, against a loop over all inner steps."""

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


def looped(schedule: Schedule, steps: int) -> tuple[list[Event], list[Event]]:
    """Launches and landings of a run, by asking after every inner step whether a fragment is
    due.
    """
    dense = schedule.dense
    launches = list[Event]()
    landings = list[Event]()
    rounds = [0] * schedule.fragments
    for step in range(1, steps + 1):
        for fragment in range(schedule.fragments):
            every = schedule.sync_every
            since = step
            overlap = schedule.overlap_steps
            if dense is not None and rounds[fragment] < dense.rounds:
                every = dense.sync_every
                overlap = dense.overlap_steps
                if overlap is None:
                    overlap = min(every // 2, schedule.overlap_steps)
            elif dense is not None:
                since = step - dense.rounds * dense.sync_every
            offset = fragment * every // schedule.fragments
            if since >= every + offset and (since - offset) % every == 0:
                rounds[fragment] += 1
                launches.append(Event(step, fragment, rounds[fragment]))
                landings.append(Event(step + overlap, fragment, rounds[fragment]))
    return launches, [landing for landing in landings if landing.step <= steps]


@settings(deadline=None)
@given(schedule=schedules(), steps=st.integers(0, 90))
def test_launches_and_landings_are_those_of_a_loop(schedule: Schedule, steps: int) -> None:
    launches, landings = looped(schedule, steps)
    later = set(looped(schedule, steps + 30)[1])
    every_step = range(1, steps + 1)
    assert [(step, p) for step in every_step for p in schedule.launches(step)] == [
        own[:2] for own in launches
    ]
    assert [(step, p) for step in every_step for p in schedule.landings(step)] == [
        own[:2] for own in landings
    ]
    for step, fragment, number in launches:
        assert schedule.launch_of(fragment, number) == step
        assert schedule.is_dense(step) == schedule.is_dense_round(number)
        assert Event(step + schedule.overlap_of(step), fragment, number) in later
        assert schedule.overlap_of(step) == schedule.overlap_of_round(number)
    # No fragment launches while it flies, and flights land in the order of their launches.
    assert [own[1:] for own in sorted(landings, key=lambda own: own.step)] == [
        own[1:] for own in landings
    ]
    for landing in landings:
        assert not any(
            own.fragment == landing.fragment
            and own.step < landing.step
            and own.round > landing.round
            for own in launches
        )


@settings(deadline=None)
@given(schedule=schedules(), steps=st.integers(0, 90))
def test_totals_for_a_whole_run_equal_those_counted_step_by_step(
    schedule: Schedule, steps: int
) -> None:
    launches, landings = looped(schedule, steps)
    rounds = [
        [own.round for own in landings if own.fragment == p] for p in range(schedule.fragments)
    ]
    after = [len([number for number in own if number > schedule.dense_rounds]) for own in rounds]
    assert schedule.rounds_in(steps) == min(after)
    assert (steps >= schedule.first_round) == all(rounds)
    for fragment, of_fragment in enumerate(rounds):
        launched = [own.round for own in launches if own.fragment == fragment]
        dense = [number for number in launched if number <= schedule.dense_rounds]
        assert schedule.launches_in(fragment, steps) == (len(dense), len(launched) - len(dense))
        assert len(of_fragment) <= len(launched)
    first = min(own.step for own in looped(schedule, 30)[0])
    assert schedule.first_launch == first


@settings(deadline=None)
@given(schedule=schedules(), since=st.integers(0, 60))
def test_no_request_waits_longer_than_the_bound_and_one_waits_that_long(
    schedule: Schedule, since: int
) -> None:
    launches, _ = looped(schedule, since + 150)
    waits = []
    for made in range(since, since + 60):
        launch = next(own for own in launches if own.step > made)
        waits.append(launch.step + schedule.overlap_of(launch.step) - made)
    assert schedule.longest_wait(since) == max(waits)


@settings(deadline=None)
@given(schedule=schedules())
def test_the_table_shows_launches_and_landings(schedule: Schedule) -> None:
    launches, landings = looped(schedule, 200)
    for line in schedule.table().splitlines()[1:]:
        step = int(line.split()[0])
        shown = [
            [own.fragment for own in events if own.step == step] for events in (launches, landings)
        ]
        texts = [", ".join(map(str, own)) or "-" for own in shown]
        assert line == f"{step:>4}  {texts[0]:<8}  {texts[1]}"


@settings(deadline=None)
@given(
    dense=st.builds(DenseBeginning, st.integers(1, 5), st.integers(1, 5)), step=st.integers(0, 40)
)
def test_restarted_rounds_have_the_rest_of_a_dense_beginning(
    dense: DenseBeginning, step: int
) -> None:
    left = dense.after(step)
    steps = 0 if left is None else left.steps
    assert 0 <= dense.steps - step - steps < dense.sync_every or (
        step >= dense.steps and steps == 0
    )
    assert DenseBeginning.read(as_data(left)) == left


@pytest.mark.parametrize(
    ("given_values", "says"),
    [
        (
            {"rounds": 0},
            r"dense_beginning.rounds=0 is not possible: it must be a whole number of at least 1",
        ),
        ({"rounds": 2.0}, r"dense_beginning.rounds=2.0 is not possible"),
        ({"rounds": True}, r"dense_beginning.rounds=True is not possible"),
        ({"rounds": 3, "sync_every": 0}, r"dense_beginning.sync_every=0 is not possible"),
        ({"rounds": 3, "overlap_steps": -1}, r"dense_beginning.overlap_steps=-1 is not possible"),
        (
            {"rounds": 3, "overlap_steps": 4},
            r"dense_beginning.overlap_steps=4 is out of range: .* which is 4",
        ),
    ],
)
def test_a_dense_beginning_out_of_range_is_refused(given_values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DenseBeginning(**given_values)
