"""A paced loader trains its share of the inner steps, measured or given, and goes on exactly where it was."""

import time
from collections.abc import Iterator
from math import floor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sdiloco import Paced, StreamingDiLoCo
from tests.ranks import run_ranks


def trained(batches: list[Any]) -> list[int]:
    """After every inner step: how many have been trained."""
    return [sum(batch is not None for batch in batches[: step + 1]) for step in range(len(batches))]


@pytest.mark.parametrize("speed", [0.1, 0.3, 0.5, 2 / 3, 0.75, 0.99, 1.0])
def test_in_t_steps_as_many_are_trained_as_there_is_time_for(speed: float) -> None:
    paced = Paced(range(1000), speed=speed)
    assert len(paced) == 1000
    assert trained(list(paced)) == [floor(speed * step + 1e-6) for step in range(1, 1001)]
    # What is left of the time is not lost at the end of an epoch.
    short = Paced(range(7), speed=speed)
    assert sum(batch is not None for _ in range(100) for batch in short) == floor(speed * 700 + 1e-6)


def test_an_inner_step_is_trained_with_all_its_micro_batches_or_not_at_all() -> None:
    batches = list(Paced(range(10), speed=0.5, micro_batches=4))
    assert batches == [None, None, None, None, 0, 1, 2, 3, None, None]
    without_length = list(Paced(iter(range(3)), speed=0.5))
    assert without_length == [None, 0, None, 1, None, 2, None]


class Resumable:
    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        while self.at < 9:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def heard(*times: float) -> Any:
    """What of an engine tells the speeds, for the second group."""
    return SimpleNamespace(
        site=None, topology=SimpleNamespace(group_index=1), last_landing=SimpleNamespace(step_times=times)
    )


@pytest.mark.parametrize("stop", range(1, 9))
def test_it_goes_on_where_it_was(stop: int) -> None:
    first = Paced(Resumable(), micro_batches=2).follow(heard(1.0, 1.6))
    items, seen = iter(first), []
    for _ in range(stop):
        seen.append(next(items))
    second = Paced(Resumable(), micro_batches=2).follow(heard(0.0, 0.0))
    second.load_state_dict(first.state_dict())
    assert second.speed == first.speed == 1.0 / 1.6
    assert list(second) == list(items)


def test_auto_is_the_share_of_the_fastest_among_what_is_known() -> None:
    for times, speed in (
        ((1.0, 2.0, 4.0), 0.5),
        ((1.0, 1.04), 1.0),
        ((3.0, 2.0), 1.0),
        ((0.0, 2.0, 1.5), 0.75),
        ((1.0, 0.0), 1.0),
    ):
        paced = Paced(range(4)).follow(heard(*times))
        next(iter(paced))
        assert paced.speed == speed


def test_what_cannot_be_is_refused() -> None:
    for speed in (0, 1.5, -1.0, "fast"):
        with pytest.raises(ValueError, match=r"speed=.* is out of range"):
            Paced([], speed=speed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="micro_batches=0 is no number of batches"):
        Paced([], micro_batches=0)
    with pytest.raises(ValueError, match="does not go with a federation"):
        Paced([]).follow(SimpleNamespace(site="berlin"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not know the engine"):
        list(Paced(range(3)))
    for micro_batches in (-1, 1.5):
        with pytest.raises(ValueError, match=r"trained=.* is no number of micro-batches"):
            StreamingDiLoCo(torch.nn.Linear(2, 2)).step(trained=micro_batches)  # type: ignore[arg-type]


STEP = 0.08


def test_real_processes_do_not_wait_for_a_paced_group() -> None:
    """The last of four groups is half as fast; all others go on at their own speed once it has been heard."""

    def run(rank: int, world_size: int) -> tuple[float, int, float]:
        model = torch.nn.Linear(4, 4)
        engine = StreamingDiLoCo(model, sync_every=8, overlap_steps=2, fragments=[["*"]], compression="fp32")
        paced, done, began = Paced(range(58)).follow(engine), 0, 0.0
        for step, batch in enumerate(paced, start=1):
            if batch is not None:
                time.sleep(STEP * (2 if rank == 3 else 1))
                done += step > 18
            engine.step(idle=batch is None)
            if step == 18:
                began = time.perf_counter()
        seconds = time.perf_counter() - began
        engine.finish()
        return seconds, done, paced.speed

    ranks = run_ranks(run, 4)
    assert ranks[3][2] == pytest.approx(0.5, rel=0.1)
    assert all(done >= 36 for _, done, _ in ranks[:3])
    # By the clock of planning: one slow inner step more than the fast groups need, in place of twice the time.
    assert max(seconds for seconds, *_ in ranks) == pytest.approx(41 * STEP, rel=0.05)
