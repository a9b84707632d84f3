"""What is chosen for ``"auto"``: the rows of the table, the nearest of them elsewhere, and what suits ``"sparse"``."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.recommended import EARLIER, SPARSE_GAINS, OuterStep, _Row, recommended
from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.compression import FP4, ErrorFeedback, Float32, Int2, RandomK, Threshold, TopK
from tests.training import mlp

MODULE: Any = sys.modules[recommended.__module__]  # the function has its name
TABLE = (
    _Row(num_groups=2, sync_every=10, outer_lr=0.125, mixing=0.25),
    _Row(num_groups=2, sync_every=1000, outer_lr=0.25, mixing=0.375),
    _Row(num_groups=8, sync_every=100, outer_lr=0.5, mixing=0.75),
)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another table, so that a test of the rule does not depend on what was measured."""
    monkeypatch.setattr(MODULE, "_TABLE", TABLE)


def test_every_row_of_the_table_is_what_it_says() -> None:
    rows = MODULE._TABLE
    assert len({row[:2] for row in rows}) == len(rows), "one row for each"
    for row in rows:
        chosen = Settings(sync_every=row.sync_every, overlap_steps=0).chosen_for(row.num_groups)
        assert (chosen.outer_lr, chosen.mixing) == (row.outer_lr, row.mixing)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("num_groups", "sync_every", "row"),
    [
        (1, 1, 0),
        (3, 99, 0),  # 3 / 2 is less than 8 / 3, and 99 / 10 less than 1000 / 99
        (3, 101, 1),
        (4, 100, 0),  # as near to 2 as to 8, and to 10 as to 1000: the smaller ones
        (5, 1000, 2),  # the groups count first
        (64, 1, 2),
    ],
)
def test_elsewhere_the_nearest_row_counts(num_groups: int, sync_every: int, row: int) -> None:
    chosen = recommended(num_groups, sync_every)
    assert (chosen.outer_lr, chosen.mixing) == (TABLE[row].outer_lr, TABLE[row].mixing)


@pytest.mark.usefixtures("table")
def test_engines_take_what_suits_their_groups_and_their_settings() -> None:
    for groups, row in ((2, TABLE[0]), (8, TABLE[2])):
        models = [mlp() for _ in range(groups)]
        engines = SimulatedGroups(models, sync_every=20, outer_momentum=0.5).engines
        for engine in engines:
            assert engine.settings.numbers == {"outer_lr": row.outer_lr, "outer_momentum": 0.5, "mixing": row.mixing}
            assert engine.settings.numbers.items() <= engine.report().items()


def test_numbers_mean_what_they_say() -> None:
    given = {"outer_lr": 0.4, "outer_momentum": 0.9, "mixing": 0.5}
    for compression in ("fp4", "sparse"):
        assert Settings(**given, compression=compression).chosen_for(4).numbers == given


def test_an_outer_optimizer_has_its_own_rate() -> None:
    settings = Settings(outer_optimizer=partial(torch.optim.SGD, lr=0.1)).chosen_for(2)
    assert settings.numbers == {"mixing": recommended(2, 100).mixing}
    assert not {"outer_lr", "outer_momentum"} & settings.fixed_by_a_checkpoint().keys()
    assert settings.taken_from(EARLIER) == settings


def test_a_checkpoint_has_the_last_word_on_what_is_left_open() -> None:
    saved = Settings(outer_lr=1, mixing=0.3).chosen_for(2).fixed_by_a_checkpoint()
    taken = Settings(outer_momentum=0.25).taken_from(saved)
    assert taken.numbers == {"outer_lr": 1, "outer_momentum": 0.25, "mixing": 0.3}
    assert {**taken.fixed_by_a_checkpoint(), "outer_momentum": saved["outer_momentum"]} == saved
    assert Settings().taken_from(Settings().fixed_by_a_checkpoint()) == Settings(), "saved before the choice"
    assert Settings().taken_from(None).numbers == {"outer_lr": 0.4, "outer_momentum": 0.9, "mixing": 0.5}


# Few values at a time


@pytest.mark.parametrize(
    ("compression", "is_sparse"),
    [
        ("sparse", True),
        (ErrorFeedback(Threshold(1 / 64, Float32(), least=1.5)), True),
        ("fp4", False),
        (ErrorFeedback(FP4()), False),
        (ErrorFeedback(TopK(0.5, Int2())), False),  # most values do not wait
        (TopK(1 / 64, Int2()), False),  # without a memory, momentum is worth what it is elsewhere
        (ErrorFeedback(RandomK(64, FP4())), False),  # all groups send the same values
    ],
)
def test_what_waits_in_a_memory_is_a_momentum_already(compression: Any, is_sparse: bool) -> None:
    chosen = Settings(compression=compression).chosen_for(2)
    assert OuterStep(**chosen.numbers) == recommended(2, 100, is_sparse)
    assert (chosen.outer_momentum == 0) == is_sparse


def test_a_mean_over_senders_has_a_rate_of_its_own() -> None:
    senders = ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)
    assert (
        Settings(compression=senders).chosen_for(4).outer_lr
        == 1.0
        < Settings(compression="sparse").chosen_for(4).outer_lr
    )
    for outer_lr, is_bad in {0.1: True, 1.0: False, 3.2: True}.items():
        given = Settings(compression=senders, outer_lr=outer_lr, outer_momentum=0.0)
        assert bool(given.better_for_sparse(4)) == is_bad


def test_a_momentum_that_was_given_does_not_get_the_rate_of_none() -> None:
    sparse = recommended(2, 100, is_sparse=True)
    assert SPARSE_GAINS[0] < sparse.outer_lr / (1 - sparse.outer_momentum) < SPARSE_GAINS[1]
    assert Settings(compression="sparse", outer_momentum=0.0).chosen_for(2).outer_lr == sparse.outer_lr
    assert Settings(compression="sparse", outer_momentum=0.9).chosen_for(2).outer_lr == recommended(2, 100).outer_lr


@pytest.mark.parametrize(
    ("choices", "is_bad"),
    [
        ({"outer_lr": 0.4, "outer_momentum": 0.9}, True),  # the defaults of earlier versions
        ({"outer_momentum": 0.9}, True),
        ({"outer_lr": 0.4}, True),
        ({"outer_lr": 4.0}, True),
        ({}, False),
        ({"outer_lr": 1.0}, False),
        ({"outer_lr": 1.0, "outer_momentum": 0.5}, False),
        ({"outer_lr": 0.4, "outer_momentum": 0.9, "compression": "fp4"}, False),
        ({"outer_optimizer": partial(torch.optim.SGD, lr=0.1)}, False),
    ],
)
def test_numbers_that_do_not_suit_sparse_get_one_warning_that_names_those_that_do(
    choices: dict[str, Any], is_bad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        SimulatedGroups([mlp(), mlp()], **{"compression": "sparse", **choices})
    told = [record.getMessage() for record in caplog.records if "known not to suit" in record.getMessage()]
    suits = recommended(2, 100, is_sparse=True)
    assert len(told) == is_bad
    for message in told:
        assert f"chooses outer_lr={suits.outer_lr:g} and outer_momentum={suits.outer_momentum:g}" in message


# Bits and states


class Earlier(StreamingDiLoCo):
    """An engine that does not say with which numbers it trains, as those of earlier versions."""

    def _state(self) -> dict[str, Any]:
        return {key: value for key, value in super()._state().items() if key != "settings"}


CUT = {"sync_every": 4, "overlap_steps": 2, "layers_per_fragment": 1}


def trained(steps: int, start: Any = None, **choices: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The outer parameters of one group after some steps, and the state of the engine before the end."""
    torch.manual_seed(0)
    model = mlp()
    engine = StreamingDiLoCo(model, **CUT, **choices)
    if start is not None:
        engine.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.inner_steps)
        optimizer.zero_grad()
        model(torch.randn(8, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        engine.step()
    state = engine.state_dict()
    engine.finish()
    return engine.outer_state_dict(), state


def test_what_is_chosen_trains_bit_for_bit_as_its_numbers_do() -> None:
    chosen, state = trained(15)
    given, _ = trained(15, **recommended(1, 4)._asdict())
    assert all(torch.equal(values, given[name]) for name, values in chosen.items())
    assert state["settings"]["outer_lr"] == repr(recommended(1, 4).outer_lr)


@pytest.mark.parametrize("knows_settings", [True, False])
def test_a_state_is_taken_up_with_its_numbers(knows_settings: bool) -> None:
    """Also one of an earlier version, whose defaults were numbers and which did not say so."""
    numbers = {"outer_lr": 0.4, "outer_momentum": 0.9, "mixing": 0.5}
    expected, _ = trained(15, **numbers)
    _, state = trained(9, **numbers)
    if not knows_settings:
        del state["settings"]
    resumed, after = trained(6, state)
    assert all(torch.equal(values, resumed[name]) for name, values in expected.items())
    assert after["settings"]["mixing"] == "0.5"


def test_a_file_is_taken_up_with_the_numbers_in_its_header(tmp_path: Path) -> None:
    path = tmp_path / "earlier.ckpt"
    Earlier(mlp(), **CUT, outer_lr=0.625, mixing=0.375).save(path)
    resumed = StreamingDiLoCo(mlp(), **CUT)
    resumed.load(path)
    assert resumed.settings.numbers == {**recommended(1, 4)._asdict(), "outer_lr": 0.625, "mixing": 0.375}
    with pytest.raises(ValueError, match=r"outer_lr was 0.625, now it is 0.5\."):
        StreamingDiLoCo(mlp(), **CUT, outer_lr=0.5).load(path)
