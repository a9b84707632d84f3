"""What is chosen for ``"auto"``, what suits ``"sparse"``, and that a checkpoint has the last word."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.config import SPARSE_GAINS, OuterStep, Settings, recommended
from lightning_sdiloco.compression import FP4, ErrorFeedback, Float32, Int2, RandomK, Threshold, TopK
from tests.engine.groups import Groups, unlike
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
