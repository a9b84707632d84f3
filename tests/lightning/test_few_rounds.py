"""The warning at the start of a fit into which few rounds fit."""

import logging
from typing import Any

import pytest

from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.lightning.announcement import warn_of_few_rounds
from tests import fits
from tests.fits import LIGHTNING, SomeBatches
from tests.ranks import run_processes

FOUND = "rounds fit"
NO_SPLIT: dict[str, Any] = {"fragments": [["*"]], "overlap_steps": 1}


def warnings_of(rank: int, world_size: int, distribution: str, choices: dict[str, Any], trained: dict[str, Any]) -> Any:
    """What a rank was warned of."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_sdiloco").addHandler(handler)
    strategy = fits.strategy(distribution, **NO_SPLIT, **choices)
    trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, **trained)
    trainer.fit(fits.module(distribution), SomeBatches(rank, 8))
    return [message for message in messages if FOUND in message]


def test_one_rank_says_once_how_many_rounds_fit_and_what_would_do(distribution: str) -> None:
    own, other = run_processes(warnings_of, 2, distribution, {"sync_every": 5}, {"max_steps": 16})
    assert other == []
    assert own == [
        "With sync_every=5 only 3 rounds fit into the 16 inner steps of this fit, so the worker groups hardly learn"
        " from each other: sync_every=1 and overlap_steps=0 would give 10."
    ]


@pytest.mark.parametrize(
    ("choices", "trained", "warns"),
    [
        ({"sync_every": 2}, {"max_steps": 21}, False),  # ten rounds
        ({"sync_every": 2}, {"max_epochs": 2}, True),
        ({"sync_every": 2}, {"max_epochs": 4, "accumulate_grad_batches": 4}, True),
        ({"sync_every": 100}, {"fast_dev_run": True}, False),
        ({"sync_every": 100}, {"max_steps": -1, "max_epochs": -1, "max_time": "00:00:00:00"}, False),
    ],
)
def test_nothing_is_said_where_ten_rounds_fit_or_nobody_knows(
    choices: dict[str, Any], trained: dict[str, Any], warns: bool
) -> None:
    (messages,) = run_processes(warnings_of, 1, LIGHTNING, choices, trained)
    assert len(messages) == warns


@pytest.mark.parametrize("fragments", [1, 8])
@pytest.mark.parametrize("overlap_steps", [0, 5, 90])
@pytest.mark.parametrize("steps", [3, 40, 300, 999])
def test_what_is_named_gives_ten_rounds_and_no_larger_one_does(
    steps: int, overlap_steps: int, fragments: int, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = Schedule(100, overlap_steps, fragments)
    with caplog.at_level(logging.WARNING):
        warn_of_few_rounds(schedule, steps)
    (told,) = [record.getMessage() for record in caplog.records]
    enough = [
        every
        for every in range(1, 100)
        if Schedule(every, min(overlap_steps, every - 1), fragments).rounds_in(steps) >= 10
    ]
    advice = told.partition("each other: ")[2]
    assert advice.startswith(f"sync_every={max(enough)} " if enough else "for 10 rounds it needs more inner steps")


def test_rounds_are_counted_by_what_lands() -> None:
    for schedule in (Schedule(7, 2, 3), Schedule(3, 0, 8), Schedule(10, 9, 1)):
        for steps in range(60):
            landed = [schedule.landings(step) for step in range(1, steps + 1)]
            counts = [sum(p in fragments for fragments in landed) for p in range(schedule.fragments)]
            assert schedule.rounds_in(steps) == min(counts)
