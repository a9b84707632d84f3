"""All groups hold the same outer parameters, bit for bit, or the run ends with an error that says who does not."""

import copy
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco import AgreementError, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.engine import start
from tests.engine.groups import Rank, copied, unlike
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step


def test_outer_parameters_that_differ_are_an_error_that_names_fragment_and_groups() -> None:
    """At a launch, where the groups take their mean, and where they end."""

    def differing() -> SimulatedGroups:
        groups = SimulatedGroups([mlp(), mlp()], sync_every=4, overlap_steps=0, fragments=LAYERS)
        state = copy.deepcopy(groups.engines[1].state_dict())
        state["fragments"][2]["outer"][5] += 1e-7
        groups.engines[1].load_state_dict(state)
        return groups

    def train(groups: SimulatedGroups) -> None:
        for _ in range(8):
            groups.step()

    for act in (train, SimulatedGroups.finish, SimulatedGroups.group_mean):
        with pytest.raises(AgreementError, match=r"parameters at the launch of fragment 2 .*\(group 0: .*, group 1: "):
            act(differing())
    groups = SimulatedGroups([mlp(), mlp()], sync_every=4, overlap_steps=0, fragments=[["*"]])
    state = groups.engines[0].state_dict()
    groups.engines[0].load_state_dict({**state, "counts": {**state["counts"], "inner_steps": 4}})
    with pytest.raises(AgreementError, match=r"not at the same point .* \(group 0: \(0, 8\), group 1: \(0, 4\)\)"):
        train(groups)


def test_outer_parameters_in_the_shards_of_other_ranks_are_an_error() -> None:
    def run(rank: int, world_size: int) -> None:
        engine = StreamingDiLoCo(mlp(), worker_groups=2, sync_every=2, overlap_steps=0, fragments=[["*"]])
        state = engine.state_dict()
        if rank >= 2:
            whole = torch.cat([values.flatten() for values in engine.outer_state_dict().values()])
            state["fragments"][0]["outer"] = whole.chunk(2)[rank == 2]
        engine.load_state_dict(state)
        engine.step()
        engine.step()

    errors = run_ranks(run, 4, expect_failure=True)
    assert sorted(errors) == list(range(4))
    assert all("do not hold the same outer parameters at the launch of fragment 0" in text for text in errors.values())


@pytest.mark.parametrize(
    ("key", "choices", "told"),
    [
        ("buffers", {}, r"outer parameters and buffers at the launch of fragment 0 after inner step 8 \(group 0: "),
        ("state", {"warmup_steps": 8}, "outer optimizer state at the launch of fragment 0 after inner step 8 "),
    ],
)
def test_whatever_else_of_the_outer_state_differs_is_an_error_before_it_is_landed(
    key: str, choices: dict[str, Any], told: str
) -> None:
    """Of what groups take up where they go on: outer buffers, and the momentum with which rounds start."""

    def net(seed: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 500), nn.BatchNorm1d(500), nn.Linear(500, 200), nn.Linear(200, 3))

    def run(rank: int, world_size: int) -> None:
        settings: dict[str, Any] = {"sync_every": 4, "overlap_steps": 1, "fragments": [["*"]], "mixing": 0.0}
        here = Rank(rank, WorkerGroups(2), "sgd", net, **settings, **choices)
        for step in range(1, 10):
            if step == 7:
                state = here.engine.state_dict()
                fragment = state["fragments"][0]
                if key == "state":
                    fragment["state"] = {"momentum_buffer": torch.zeros(fragment["outer"].numel())}
                values = fragment["state"]["momentum_buffer"] if key == "state" else fragment["buffers"][0]
                values[77] += 1e-6 * rank
                here.engine.load_state_dict(state)
            here.step(step)

    errors = run_ranks(run, 2, expect_failure=True)
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert re.search(f"AgreementError: The worker groups do not hold the same {told}", error)


def test_a_rank_whose_processor_rounds_otherwise_is_named() -> None:
    def begin(rank: int, world_size: int) -> None:
        if rank == 1:
            # What torch takes where the processor multiplies and adds in two roundings; only a new process can choose.
            program = "from lightning_sdiloco.engine import start; print(start.rounding())"
            other = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
            made = subprocess.run(
                [sys.executable, "-c", program], env=other, capture_output=True, text=True, check=True
            )
            start.rounding = lambda: made.stdout.strip()
        StreamingDiLoCo(mlp(), fragments=LAYERS)

    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no instructions for that")
    report = str(run_ranks(begin, 2, expect_failure=True))
    assert re.search("round differently: what known values give is [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1. ", report)
    assert "set ATEN_CPU_CAPABILITY=default on all ranks" in report


def test_what_is_saved_while_the_outer_model_is_shown_is_local_training() -> None:
    model = mlp()
    engine = StreamingDiLoCo(model, sync_every=50)
    train_step(model, inner_optimizer("adamw", model), 0, 1)
    engine.step()
    local = copied(model.named_parameters())
    with engine.evaluate(), engine.evaluate():
        assert unlike(copied(model.named_parameters()), engine.outer_state_dict()) == []
        state = copy.deepcopy(engine.state_dict())
    resumed = mlp()
    StreamingDiLoCo(resumed, sync_every=50).load_state_dict(state)
    for one in (model, resumed):
        assert unlike(copied(one.named_parameters()), local) == []
    assert unlike(engine.outer_state_dict(), local) != []
