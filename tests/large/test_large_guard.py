"""The guard in the training of a language model with 110,000 parameters in four groups."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.models import SMALL
from benchmarks.training import Loop, Training
from lightning_sdiloco.engine.fragments import Landing, Launch, Purpose

pytestmark = pytest.mark.large

SYNC_EVERY = 10
FAULTY = range(81, 121)
"""The inner steps after which the last group sends what is spoilt.

Until the end, when the learning rate falls to 0 within few rounds, 10 times as long is not always
too long.
"""
Spoil = Callable[[Launch], Launch]
FAULTS: dict[str, Spoil] = {
    "10 times as long": lambda launch: launch._replace(gradient=10.0 * launch.gradient),
    "a constant": lambda launch: launch._replace(gradient=torch.full_like(launch.gradient, 3.0)),
}


class Trained(NamedTuple):
    landings: list[Landing]
    loss: float


def trained(spoil: Spoil | None = None) -> Trained:
    """Trains four groups on files of their own; the last one sends what is spoilt."""
    choices = {
        "sync_every": SYNC_EVERY,
        "overlap_steps": 2,
        "fragments": "strided:2",
        "compression": "fp4",
    }
    training = Training(SMALL, choices, groups=4, budget=3.5, split="by_file")
    text = training.text()
    loop = Loop(training, text)
    landings = list[Landing]()
    first, *_, last = loop.engines
    synchronizer: Any = last.rounds._synchronizer
    fly = synchronizer.fly

    def fly_spoilt(launch: Launch) -> object:
        is_faulty = launch.purpose is Purpose.ROUND and launch.step in FAULTY
        return fly(spoil(launch) if spoil and is_faulty else launch)

    synchronizer.fly = fly_spoilt
    while loop.step < training.steps:
        loop.run(steps=loop.step + 1)
        if first.history.last_landing is not None and first.history.last_landing not in landings:
            landings.append(first.history.last_landing)
    return Trained(landings, text.loss(loop.finish()))


@pytest.mark.timeout(1800)
def test_only_faulty_groups_of_a_gpt_are_left_out_and_they_cost_nothing() -> None:
    sound = trained()
    assert len(sound.landings) > 30
    assert {landing.outlying for landing in sound.landings} == {()}
    for name, spoil in FAULTS.items():
        spoilt = trained(spoil)
        for landing in spoilt.landings:
            expected = (3,) if landing.launched_at in FAULTY else ()
            assert landing.outlying == expected, name
        assert spoilt.loss == pytest.approx(sound.loss, rel=0.05), name
