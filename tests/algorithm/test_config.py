"""What is chosen for ``"auto"``, what suits ``"sparse"``, and that a checkpoint has the last word.

The schedule against the paper's rule, for many (H, P, tau).
"""

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_sdiloco import Schedule, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.config import SPARSE_GAINS, OuterStep, Settings, recommended
from lightning_sdiloco.compression import FP4, ErrorFeedback, Float32, Int2, RandomK, Threshold, TopK
from tests.engine.groups import Groups, unlike
from tests.reference import is_launched
from tests.training import mlp

CUT = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:1"}
SENDERS = ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)


def test_numbers_mean_what_they_say_and_the_rest_is_chosen() -> None:
    given = {"outer_lr": 0.4, "outer_momentum": 0.9, "mixing": 0.5}
    for compression in ("fp4", "sparse"):
        assert Settings(**given, compression=compression).chosen_for(4).numbers == given
    for engine in SimulatedGroups([mlp(), mlp()], outer_momentum=0.5).engines:
        assert engine.settings.numbers == {**recommended()._asdict(), "outer_momentum": 0.5}
        assert engine.settings.numbers.items() <= engine.report().items()
    own = Settings(outer_optimizer=partial(torch.optim.SGD, lr=0.1)).chosen_for(2)
    assert own.numbers == {"mixing": recommended().mixing}, "an outer optimizer has its own rate"
    assert not {"outer_lr", "outer_momentum"} & own.fixed_by_a_checkpoint().keys()


def test_what_waits_in_a_memory_is_a_momentum_already_and_numbers_that_do_not_suit_it_get_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds: dict[Any, bool] = {
        "sparse": True,
        ErrorFeedback(Threshold(1 / 64, Float32(), least=1.5)): True,
        "fp4": False,
        ErrorFeedback(FP4()): False,
        ErrorFeedback(TopK(0.5, Int2())): False,  # most values do not wait
        TopK(1 / 64, Int2()): False,  # without a memory, momentum is worth what it is elsewhere
        ErrorFeedback(RandomK(64, FP4())): False,  # all groups send the same values
    }
    for compression, is_sparse in kinds.items():
        chosen = Settings(compression=compression).chosen_for(2)
        assert OuterStep(**chosen.numbers) == recommended(is_sparse)
        assert (chosen.outer_momentum == 0) == is_sparse
    sparse = recommended(is_sparse=True)
    assert SPARSE_GAINS[0] < sparse.outer_lr / (1 - sparse.outer_momentum) < SPARSE_GAINS[1]
    assert Settings(compression="sparse", outer_momentum=0.0).chosen_for(2).outer_lr == sparse.outer_lr
    # A momentum that was given does not get the rate of none.
    assert Settings(compression="sparse", outer_momentum=0.9).chosen_for(2).outer_lr == recommended().outer_lr
    assert Settings(compression=SENDERS).chosen_for(4).outer_lr == 1.0 < sparse.outer_lr
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"outer_momentum": 0.9}, True),
        ({"outer_lr": 4.0}, True),
        ({}, False),
        ({"outer_lr": 1.0, "outer_momentum": 0.5}, False),
        ({"outer_lr": 0.4, "outer_momentum": 0.9, "compression": "fp4"}, False),
        ({"outer_optimizer": partial(torch.optim.SGD, lr=0.1)}, False),
        *(
            ({"outer_lr": rate, "outer_momentum": 0.0, "compression": SENDERS}, is_bad)
            for rate, is_bad in ((0.1, True), (1.0, False), (3.2, True))
        ),
    ]
    for choices, is_bad in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            SimulatedGroups([mlp() for _ in range(4)], **{"compression": "sparse", **choices})
        told = [record.getMessage() for record in caplog.records if "known not to suit" in record.getMessage()]
        assert len(told) == is_bad, choices
        suits = recommended(is_sparse=True)._replace(**({"outer_lr": 1.0} if choices.get("compression") else {}))
        for message in told:
            assert f"chooses outer_lr={suits.outer_lr:g} and outer_momentum={suits.outer_momentum:g}" in message


def test_a_checkpoint_has_the_last_word_on_what_is_left_open(tmp_path: Path) -> None:
    saved = Settings(outer_lr=1, mixing=0.3).chosen_for(2).fixed_by_a_checkpoint()
    taken = Settings(outer_momentum=0.25).taken_from(saved)
    assert taken.numbers == {"outer_lr": 1, "outer_momentum": 0.25, "mixing": 0.3}
    assert {**taken.fixed_by_a_checkpoint(), "outer_momentum": saved["outer_momentum"]} == saved
    assert Settings().taken_from(Settings().fixed_by_a_checkpoint()) == Settings(), "saved before the choice"
    assert StreamingDiLoCo(mlp(), **CUT).state_dict()["settings"]["outer_lr"] == repr(recommended().outer_lr)
    numbers = {"outer_lr": 0.625, "outer_momentum": 0.5, "mixing": 0.375}
    whole, resumed = Groups(**CUT, **numbers), Groups(**CUT)
    whole.until(9)
    resumed.load(whole.saved())
    for run in (whole, resumed):
        run.until(15)
    assert unlike(whole.seen(), resumed.seen()) == []
    assert resumed.engines[0].state_dict()["settings"]["mixing"] == "0.375"
    path = tmp_path / "a.ckpt"
    StreamingDiLoCo(mlp(), **CUT, **numbers).save(path)
    engine = StreamingDiLoCo(mlp(), **CUT)
    engine.load(path)
    assert engine.settings.numbers == numbers
    with pytest.raises(ValueError, match=r"outer_lr was 0.625, now it is 0.5\."):
        StreamingDiLoCo(mlp(), **CUT, outer_lr=0.5).load(path)


# The schedule

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
@example(Schedule(100, 5, fragments=3), 1, 100, 10**9)  # no fragment is missed by rounding
@example(Schedule(2, 1, fragments=5), 1, 100, 10**9)  # and many share a step
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
    header, first, *_ = str(Schedule(2, 1, 2)).split("\n")
    assert header.index("lands") == first.rindex("-")
