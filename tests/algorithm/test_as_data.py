"""Settings in checkpoints: data, which later versions and older files agree on."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sdiloco.algorithm.as_data import as_data, describes
from lightning_sdiloco.algorithm.config import OuterOptimizer, Settings
from lightning_sdiloco.algorithm.gossip import RandomPairs
from lightning_sdiloco.algorithm.merge import Carry
from lightning_sdiloco.algorithm.reduce import TwoShot
from lightning_sdiloco.algorithm.schedule import DenseBeginning, Selective
from lightning_sdiloco.compression import FP4, ByLink, ErrorFeedback, Int2, Int8, RandomK, TopK
from tests.engine.groups import Groups

POLICIES: list[dict[str, Any]] = [
    {},
    {"sync_every": 40, "overlap_steps": 3, "outer_lr": 0.5, "mixing": 0.25},
    {"schedule": Selective(threshold=0.4), "mixing": Carry()},
    {"compression": ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)},
    {"compression": ByLink(menu=("fp4", ErrorFeedback(FP4())), within=2.0)},
    {"exchange": TwoShot((0.5, 0.25, 0.25), backend="nccl")},
    {"exchange": "gather:nccl", "fragments": [["0.*"], ["1.*"]]},
    {"route": RandomPairs(seed=3), "compression": RandomK(4, Int8())},
    {"dense_beginning": DenseBeginning(rounds=3), "untrained": {"*.queue": "own"}},
    {"outer_optimizer": OuterOptimizer(clip_norm=float("inf"), matrices={"*.qkv.*": 3})},
    {"outer_optimizer": partial(torch.optim.SGD, lr=0.7)},
]


@pytest.mark.parametrize("choices", POLICIES, ids=lambda choices: ", ".join(choices) or "defaults")
def test_settings_of_new_and_old_checkpoints_are_those_of_their_run(
    choices: dict[str, Any],
) -> None:
    settings = Settings(**choices)
    saved = json.loads(json.dumps(settings.saved()))
    # Older checkpoints held the text of each setting.
    old = settings.fixed_by_a_checkpoint()
    difference = f"sync_every was {settings.sync_every}, now it is 90"
    for checkpoint in (saved, old):
        assert settings.differences(checkpoint) == []
        assert settings.taken_from(checkpoint) == settings.taken_from(saved)
        assert difference in Settings(sync_every=90).differences(checkpoint)


def test_scalars_of_numpy_are_saved_as_numbers() -> None:
    saved = as_data(Selective(threshold=np.float64(0.4)))
    assert type(saved["fields"]["threshold"]) is float
    assert describes(saved, Selective(threshold=0.4))


def test_a_setting_that_differs_is_named_with_both_values() -> None:
    saved = Settings(schedule=Selective(threshold=0.4), compression="int8").saved()
    now = Settings(schedule=Selective(), outer_optimizer=OuterOptimizer(clip_norm=2.0))
    assert now.differences(saved) == [
        "compression was 'int8', now it is 'fp4'",
        "schedule was Selective(threshold=0.4), now it is Selective()",
        "outer_optimizer.clip_norm was None, now it is 2.0",
    ]


def test_a_field_with_a_default_that_came_later_refuses_no_older_checkpoint() -> None:
    @dataclass(frozen=True)
    class Later(Selective):
        patience: int = 1

    Later.__qualname__ = "Selective"
    old = {"kind": "Selective", "fields": {"threshold": 0.4, "most": 4}}
    for saved in (old, as_data(Selective(threshold=0.4))):
        assert describes(saved, Later(threshold=0.4))
        assert not describes(saved, Later(threshold=0.4, patience=2))
        assert not describes(saved, Later())
    assert not describes(as_data(Later(threshold=0.4, patience=2)), Selective(threshold=0.4))


def test_an_engine_resumes_from_a_state_with_settings_as_texts() -> None:
    new_groups = partial(Groups, sync_every=4, overlap_steps=1, compression="fp4+memory")
    stopped = new_groups(mixing=0.375)
    stopped.until(9)
    resumed = new_groups(mixing="auto")
    for engine, before in zip(resumed.engines, stopped.engines, strict=True):
        state = before.state_dict()
        state["settings"] = before.rounds.settings.fixed_by_a_checkpoint()
        assert state["settings"]["mixing"] == "0.375"
        engine.load_state_dict(state)
        assert engine.rounds.settings.mixing == 0.375
