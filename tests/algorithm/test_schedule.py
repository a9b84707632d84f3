"""The schedule against the paper's rule, for many (H, P, tau)."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdiloco import Schedule
from tests.reference import is_launched

Event = tuple[int, tuple[int, ...], tuple[int, ...]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid (H, P, tau); more fragments than steps included."""
    sync_every = draw(st.integers(1, 40))
    return Schedule(sync_every, draw(st.integers(0, sync_every - 1)), draw(st.integers(1, 60)))


def happens(schedule: Schedule, first: int, last: int) -> list[Event]:
    """The steps of a range in which fragments launch or land, by line 6 of the algorithm."""

    def due(step: int) -> tuple[int, ...]:
        every = range(schedule.fragments)
        return tuple(p for p in every if is_launched(step, p, schedule.fragments, schedule.sync_every))

    events = [(step, due(step), due(step - schedule.overlap_steps)) for step in range(first, last + 1)]
    return [event for event in events if event[1] or event[2]]


def parsed(table: str) -> list[Event]:
    """The lines of a table below its header, read back."""
    header, *lines = [re.split(" {2,}", line.strip()) for line in table.split("\n")]
    assert header == ["step", "launches", "lands"]
    cells = [[() if cell == "-" else tuple(map(int, cell.split(","))) for cell in line[1:]] for line in lines]
    return [(int(line[0]), own[0], own[1]) for line, own in zip(lines, cells, strict=True)]


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 200), st.integers(0, 100), st.integers(10**9, 10**12))
def test_launches_and_landings_are_those_of_the_paper(schedule: Schedule, since: int, length: int, far: int) -> None:
    h, fragments = schedule.sync_every, range(schedule.fragments)
    expected = happens(schedule, -h, 5 * h)
    every = [(step, schedule.launches(step), schedule.landings(step)) for step in range(-h, 5 * h + 1)]
    assert [one for one in every if one[1] or one[2]] == expected
    in_flight = list[int]()
    for _, launched, landed in expected:
        # Flights land in the order of their launch, and never are there two of one fragment.
        in_flight += launched
        assert len(in_flight) == len(set(in_flight))
        assert [in_flight.pop(0) for _ in landed] == list(landed)
    assert [p for step, launched, _ in expected for p in launched if 3 * h <= step < 4 * h] == list(fragments)
    assert [min(step for step, own, _ in expected if p in own) - h for p in fragments] == [
        schedule.offset(p) for p in fragments
    ]
    assert schedule.launches(far) == schedule.launches(2 * h + far % h)
    # The longest wait is that of the worst step to ask at.
    launches = [step for step, own, _ in happens(schedule, since, since + 5 * h) if own]
    waits = [min(t for t in launches if t > at) + schedule.overlap_steps - at for at in range(since, since + 3 * h)]
    assert schedule.longest_wait(since) == max(waits)
    # The table shows what happens; by default it ends when every fragment has landed twice.
    assert parsed(schedule.table(since, since + length)) == happens(schedule, since, since + length)
    by_default = parsed(schedule.table())
    assert by_default == happens(schedule, 1, by_default[-1][0])
    assert min([p for *_, landed in by_default for p in landed].count(p) for p in fragments) >= 2
    assert str(schedule) == schedule.table()


def test_no_fragment_is_missed_by_rounding_and_many_share_a_step() -> None:
    for schedule, launches in (
        (Schedule(100, 5, fragments=3), {100: (0,), 133: (1,), 166: (2,), 200: (0,), 233: (1,), 266: (2,)}),
        (Schedule(2, 1, fragments=5), {2: (0, 1, 2), 3: (3, 4), 4: (0, 1, 2), 5: (3, 4)}),
        (Schedule(1, 0, fragments=3), {1: (0, 1, 2), 2: (0, 1, 2)}),
    ):
        assert {step: schedule.launches(step) for step in range(max(launches) + 1)} == {
            step: launches.get(step, ()) for step in range(max(launches) + 1)
        }
        assert schedule.landings(max(launches) + schedule.overlap_steps) == launches[max(launches)]
    assert str(Schedule(2, 1, 2)).split("\n")[0].index("lands") == str(Schedule(2, 1, 2)).split("\n")[1].rindex("-")
