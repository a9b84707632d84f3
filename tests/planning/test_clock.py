"""Virtual time: the same as the planner where groups are alike, and waiting where they are not."""

from typing import Any

import pytest

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import ByLink
from lightning_sdiloco.planning.link import Line, Link
from lightning_sdiloco.planning.methods import Absence, Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model
from tests.methods import Paced

FAST, SLOW = Link(gbit_s=10.0), Link(gbit_s=0.02, round_trip=0.1)


def method(groups: int = 2, step_time: float = 0.5, size: int = 1, numel: int = 24_000_000, **own: Any) -> Streaming:
    settings = Settings(**{"sync_every": 10, "overlap_steps": 2, "compression": "fp4", **own})
    return Streaming(Model.of_size(numel, layers=12), settings, Groups(step_time, groups, size))


def test_groups_that_are_alike_take_as_long_as_the_planner_says() -> None:
    for link in (SLOW, FAST, Link(gbit_s=0.05, round_trip=0.2, loss=0.001)):
        for groups, overlap_steps in ((2, 2), (3, 0), (4, 5)):
            own = method(groups, overlap_steps=overlap_steps)
            first, *others = play(own, link, steps=100, speeds=[1.0] * groups)
            assert all(other == first for other in others)
            # The planner measures the second half of eight rounds, from landing to landing of fragment 0.
            landings = [first.steps[10 * number + overlap_steps - 1] for number in range(1, 9)]
            assert own.utilisation(link) == pytest.approx(40 * 0.5 / (landings[-1] - landings[3]), rel=1e-2)


def test_all_wait_for_the_slowest_and_the_absent_but_for_what_overlaps() -> None:
    fast, slow, fastest = play(method(3), FAST, steps=100, speeds=[1.0, 0.5, 4.0])
    assert fast.end == pytest.approx(slow.end, rel=1e-3)
    assert slow.end == pytest.approx(100, rel=1e-2)
    assert slow.waited < 1 < fast.waited < fastest.waited

    def first(*away: Absence) -> Any:
        return play(method(), FAST, steps=40, speeds=[1.0, 1.0], absences=away)[0]

    undisturbed, long, short = first(), first(Absence(1, 7.2, 17.2)), first(Absence(1, 5.1, 5.6))
    assert long.end == pytest.approx(undisturbed.end + 10, rel=1e-3)
    assert long.waited == pytest.approx(10, rel=0.05)
    assert long.longest_flight > 10 > undisturbed.longest_flight
    assert short.waited < undisturbed.waited + 0.6, "it ends before the next landing"


def test_a_slow_uplink_delays_nobody_where_each_sends_in_the_code_that_its_link_carries() -> None:
    fast, slow = Line(Link(1.0), Link(1.0)), Line(Link(0.01), Link(0.1))
    large = {"step_time": 2.0, "numel": 300_000_000, "sync_every": 100, "overlap_steps": 5, "exchange": "gather"}

    def step_time(compression: object, lines: list[Line]) -> float:
        own = method(len(lines), compression=compression, **large)  # type: ignore[arg-type]
        return play(own, Link(1.0), 20_000, [1.0] * len(lines), links=lines)[0].steps[-1] / 20_000

    without = step_time("fp4", [fast] * 3)
    assert without < step_time(ByLink(), [fast] * 3 + [slow]) < 1.02 * without
    assert step_time("fp4", [fast] * 3 + [slow]) > 2 * without
    # All but the head that names the code is what is sent without a menu.
    menu, none = (method(4, compression=one, **large) for one in (ByLink(), "fp4"))  # type: ignore[arg-type]
    assert menu.message_bytes(0, 0.125e9 / 3) - 8 == none.message_bytes(0, 0.125e9 / 3)


def test_a_line_of_one_speed_is_its_link_however_many_ranks_share_it() -> None:
    links = [Link(1.0, round_trip=0.01), Link(0.05), Link(1.0)]

    def ends(compression: object, links: list[Any], size: int) -> list[float]:
        own = method(3, size=size, numel=2**24, compression=compression, exchange="gather")
        return [times.end for times in play(own, links[0], 100, [1.0] * 3, links=links)]

    # A rank carries its shard, so that all together carry what one carries; but for the heads of their messages.
    slow_down = [Line(links[0], Link(0.01)), *links[1:]]
    for code in ("fp4", ByLink()):
        assert ends(code, links, 1) == ends(code, [Line.of(link) for link in links], 1)
        assert ends(code, slow_down, 4) == pytest.approx(ends(code, slow_down, 1), rel=1e-3)
        assert ends(code, slow_down, 1)[0] > 1.5 * ends(code, links, 1)[0]


def test_what_is_launched_more_seldom_is_waited_for_more_seldom() -> None:
    own = method()
    whole = {step: own.schedule.launches(step) for step in range(1, 101)}
    half = {step: fragments for step, fragments in whole.items() if step // 10 % 2}
    by_schedule, same, seldom = (play(own, SLOW, 100, [1.0, 1.0], launches=due) for due in (None, whole, half))
    assert same == by_schedule
    # Both wait for the same last exchange.
    last = by_schedule[0].end - by_schedule[0].steps[-1]
    assert 0.4 < (seldom[0].waited - last) / (by_schedule[0].waited - last) < 0.6


def test_nobody_waits_for_a_group_that_is_idle_as_often_as_it_is_slow() -> None:
    four, speeds, link = method(4, step_time=1.0), [1.0, 1.0, 1.0, 0.5], Link(gbit_s=100.0)
    idle = [step for step, batch in enumerate(Paced([0] * 300, speed=0.5), start=1) if batch is None]
    assert len(idle) == 150
    paced, waiting = (play(four, link, 300, speeds, idle=idles) for idles in ([(), (), (), idle], ()))
    assert max(times.end for times in paced) == pytest.approx(301, abs=1)
    assert max(times.end for times in waiting) == pytest.approx(601, abs=2)


def test_numbers_out_of_their_range_are_refused() -> None:
    for given, words in (
        ({"speeds": [1.0]}, "1 speeds for 2 worker groups"),
        ({"speeds": [1.0, 0.0]}, "speed=0.0 is out of range"),
        ({"absences": [Absence(2, 0, 1)]}, "group=2 is out of range"),
        ({"absences": [Absence(1, 5, 1)]}, "absence=5 is out of range"),
        ({"idle": [()]}, "There are 1 lists of idle steps for 2"),
    ):
        with pytest.raises(ValueError, match=words):
            play(method(), SLOW, 10, **{"speeds": [1.0, 1.0], **given})  # type: ignore[arg-type]
