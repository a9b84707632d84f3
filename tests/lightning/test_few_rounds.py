"""The warning at the start of a fit into which few rounds fit."""

import logging
from itertools import product
from typing import Any

import pytest

from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.lightning.monitor import warn_of_few_rounds
from tests import fits
from tests.fits import SomeBatches
from tests.ranks import run_processes


def test_rank_0_says_how_many_rounds_fit_and_what_would_do_unless_ten_fit_or_nobody_knows(distribution: str) -> None:
    cases: list[tuple[int, dict[str, Any], bool]] = [
        (5, {"max_steps": 16}, True),
        (2, {"max_steps": 21}, False),  # ten rounds
        (2, {"max_epochs": 2}, True),
        (2, {"max_epochs": 4, "accumulate_grad_batches": 4}, True),
        (100, {"fast_dev_run": True}, False),
        (100, {"max_steps": -1, "max_epochs": -1, "max_time": "00:00:00:00"}, False),
    ]

    def run(rank: int, world_size: int) -> list[list[str]]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightning_sdiloco").addHandler(handler)
        found = []
        for sync_every, trained, _ in cases:
            strategy = fits.strategy(distribution, fragments=[["*"]], overlap_steps=1, sync_every=sync_every)
            trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, **trained)
            trainer.fit(fits.module(distribution), SomeBatches(rank, 8))
            found.append([text for text in said if "rounds fit" in text])
            said.clear()
        return found

    own, other = run_processes(run, 2)
    assert other == [[]] * len(cases)
    assert [len(texts) for texts in own] == [warns for *_, warns in cases]
    assert own[0] == [
        "With sync_every=5 only 3 rounds fit into the 16 inner steps of this fit, so the worker groups hardly learn"
        " from each other: sync_every=1 and overlap_steps=0 would give 10."
    ]


def test_what_is_named_gives_ten_rounds_and_no_larger_one_does(caplog: pytest.LogCaptureFixture) -> None:
    for steps, overlap, fragments in product((3, 40, 300, 999), (0, 5, 90), (1, 8)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_few_rounds(Schedule(100, overlap, fragments), steps)
        (told,) = [record.getMessage() for record in caplog.records]
        enough = [
            every
            for every in range(1, 100)
            if Schedule(every, min(overlap, every - 1), fragments).rounds_in(steps) >= 10
        ]
        advice = told.partition("each other: ")[2]
        assert advice.startswith(f"sync_every={max(enough)} " if enough else "for 10 rounds it needs more inner steps")


def test_rounds_are_counted_by_what_lands() -> None:
    for schedule in (Schedule(7, 2, 3), Schedule(3, 0, 8), Schedule(10, 9, 1)):
        for steps in range(60):
            landed = [schedule.landings(step) for step in range(1, steps + 1)]
            counts = [sum(p in fragments for fragments in landed) for p in range(schedule.fragments)]
            assert schedule.rounds_in(steps) == min(counts)
