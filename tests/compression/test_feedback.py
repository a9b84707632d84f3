"""What a compression remembers: added at the launch, changed at the landing, and lost when rounds start anew."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import (
    FP4,
    BFloat16,
    Compression,
    ErrorFeedback,
    Int2,
    RandomBlock,
    RandomK,
    Threshold,
    TopK,
)
from lightning_sdiloco.engine.checkpoint import restart_from
from tests.training import LAYERS, inner_optimizer, mlp, train_step

SPARSE = ErrorFeedback(TopK(0.1, Int2()), decay=0.9)
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": LAYERS, "compression": SPARSE}


class Groups:
    """Simulated groups and their inner optimizers."""

    def __init__(self, count: int = 2, **choices: Any) -> None:
        self.models = [mlp() for _ in range(count)]
        self.optimizers = [inner_optimizer("sgd", model) for model in self.models]
        self.engines = SimulatedGroups(self.models, **{**CHOICES, **choices})
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                train_step(model, optimizer, group, self.step)
            self.engines.step()

    def memories(self, group: int = 0) -> list[Tensor | None]:
        return [part["memory"] for part in self.engines.engines[group].state_dict()["fragments"]]


def test_a_memory_is_what_the_last_landing_lost() -> None:
    groups = Groups(overlap_steps=2, fragments=[["*"]], mixing=0.25)
    groups.run(4)
    engine = groups.engines.engines[0]
    assert engine.in_flight == (0,)
    assert groups.memories() == [None], "it changes at the landing, not at the launch"
    gradient = engine.state_dict()["flights"][0]["gradient"]
    groups.run(2)
    first = lost(gradient, torch.zeros_like(gradient))
    assert torch.equal(groups.memories()[0], first)
    assert first.norm() > 0

    groups.run(2)
    assert engine.in_flight == (0,)
    assert torch.equal(groups.memories()[0], first)
    gradient = engine.state_dict()["flights"][0]["gradient"]
    groups.run(2)
    assert torch.equal(groups.memories()[0], lost(gradient, first))


def lost(gradient: Tensor, memory: Tensor) -> Tensor:
    decoded = torch.empty_like(gradient)
    SPARSE.decode(SPARSE.encode(gradient + memory), decoded)
    return ((gradient - decoded) * 0.75 + memory) * 0.9


@pytest.mark.parametrize("mixing", [0.0, 0.25, 0.5])
def test_progress_is_sent_once_whatever_share_of_it_the_local_parameters_keep(mixing: float) -> None:
    """A group moves once. Bit by bit the outer parameters go exactly there, and not beyond."""
    model = nn.Linear(64, 64, bias=False)
    engine = StreamingDiLoCo(
        model,
        sync_every=1,
        overlap_steps=0,
        fragments=[["*"]],
        mixing=mixing,
        compression=ErrorFeedback(TopK(1 / 64, BFloat16())),
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    start, progress = model.weight.detach().clone(), torch.rand(64, 64) + 0.5
    with torch.no_grad():
        model.weight.sub_(progress)
    went = []
    for _ in range(200):
        engine.step()
        went.append((start - engine.outer_state_dict()["weight"]) / progress)
    assert all((share <= 1.01).all() for share in went)
    # With the first rounds every value has been sent at least once.
    assert (went[80] > 0.9).all()
    assert torch.allclose(went[-1], torch.ones(64, 64), atol=1e-2)


def test_without_a_memory_what_is_small_never_arrives() -> None:
    model = nn.Linear(64, 64, bias=False)
    choices: dict[str, Any] = {"sync_every": 1, "overlap_steps": 0, "mixing": 0.0, "fragments": [["*"]]}
    engine = StreamingDiLoCo(model, **choices, compression=TopK(1 / 64, BFloat16()), outer_lr=1.0, outer_momentum=0.0)
    start, progress = model.weight.detach().clone(), torch.rand(64, 64) + 0.5
    with torch.no_grad():
        model.weight.sub_(progress)
    for _ in range(100):
        engine.step()
    arrived = (start - engine.outer_state_dict()["weight"]) != 0
    assert arrived.sum() == 64


def test_a_group_that_is_left_out_keeps_its_memory() -> None:
    groups = Groups(fragments=[["*"]])
    groups.run(6)
    before = [groups.memories(group)[0] for group in range(2)]
    with torch.no_grad():
        groups.models[1][0].weight[0, 0] = float("nan")
    groups.run(4)
    after = [groups.memories(group)[0] for group in range(2)]
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    groups.run(4)
    assert not torch.equal(groups.memories(1)[0], before[1])
    assert groups.memories(1)[0].isfinite().all()  # type: ignore[union-attr]


def test_a_group_without_data_keeps_its_memory() -> None:
    groups = Groups(fragments=[["*"]])
    groups.run(6)
    before = groups.memories(1)[0]
    for _ in range(4):  # two inner steps since the last launch are sent and land
        groups.engines.step(idle=[1])
    landed = groups.memories(1)[0]
    assert not torch.equal(landed, before)
    for _ in range(4):
        groups.engines.step(idle=[1])
    assert torch.equal(groups.memories(1)[0], landed)


def test_the_final_exchange_takes_no_memory_along() -> None:
    groups = Groups(fragments=[["*"]], compression=ErrorFeedback(FP4()), mixing=0.0)
    groups.run(6)
    for engine, model in zip(groups.engines.engines, groups.models, strict=True):
        assert engine.rounds.fragments[0].memory.norm() > 0  # type: ignore[union-attr]
        with torch.no_grad():  # no progress, so only a memory could move anything
            for name, parameter in model.named_parameters():
                parameter.copy_(engine.outer_state_dict()[name])
    before = groups.engines.outer_state_dict()
    groups.engines.finish()
    assert all(torch.equal(values, before[name]) for name, values in groups.engines.outer_state_dict().items())


@pytest.mark.parametrize("chance", [RandomK(8, FP4()), RandomBlock(8, FP4())])
@pytest.mark.parametrize("stopped_at", [4, 5, 9])
def test_groups_that_send_by_chance_agree_and_go_on_from_a_checkpoint(chance: Compression, stopped_at: int) -> None:
    never_stopped, first, second = (Groups(compression=ErrorFeedback(chance)) for _ in range(3))
    never_stopped.run(20)
    first.run(stopped_at)
    for engine, other in zip(second.engines.engines, first.engines.engines, strict=True):
        engine.load_state_dict(other.state_dict())
    second.step = stopped_at
    second.run(20 - stopped_at)
    for engine, expected in zip(second.engines.engines, never_stopped.engines.engines, strict=True):
        first_group = never_stopped.engines.engines[0]
        for own, other, of_first in zip(
            engine.rounds.fragments, expected.rounds.fragments, first_group.rounds.fragments, strict=True
        ):
            assert torch.equal(own.outer.values, of_first.outer.values)
            assert torch.equal(own.memory, other.memory)  # type: ignore[arg-type]


def test_a_restart_knows_what_chance_picked() -> None:
    choices = {**CHOICES, "compression": RandomK(8, FP4())}
    groups = Groups(**choices)
    groups.run(9)
    assert len(groups.engines.engines[0].in_flight) > 1
    restart = restart_from([[engine.state_dict()] for engine in groups.engines.engines], Settings(**choices))
    for engine in groups.engines.engines:
        engine.land_all()
    for name, values in groups.engines.outer_state_dict().items():
        assert torch.equal(restart.parameters[name].values, values.flatten())


@pytest.mark.parametrize(
    "compression",
    [
        ErrorFeedback(TopK(0.05, BFloat16())),
        TopK(0.05, BFloat16()),
        Threshold(0.05, BFloat16(), least=2.0),
        RandomK(8, BFloat16()),
        RandomBlock(8, BFloat16()),
    ],
)
def test_the_final_exchange_leaves_no_values_out(compression: Compression) -> None:
    groups, expected = Groups(compression=compression), Groups(compression="bf16")
    groups.run(3)
    expected.run(3)
    groups.engines.finish()
    expected.engines.finish()
    for name, values in expected.engines.outer_state_dict().items():
        assert torch.equal(groups.engines.outer_state_dict()[name], values)


def test_a_compression_that_remembers_nothing_keeps_no_memory() -> None:
    groups = Groups(compression="fp4")
    groups.run(12)
    assert groups.memories() == [None] * len(LAYERS)


def test_a_restart_with_other_groups_lands_what_was_remembered_and_forgets_the_rest() -> None:
    groups = Groups(fragments=[["*"]])
    groups.run(8)
    assert groups.engines.engines[0].in_flight == (0,)
    choices = {**CHOICES, "fragments": [["*"]]}
    states = [[engine.state_dict()] for engine in groups.engines.engines]
    restart = restart_from(states, Settings(**choices))
    for engine in groups.engines.engines:
        engine.land_all()
    for name, values in groups.engines.outer_state_dict().items():
        assert torch.equal(restart.parameters[name].values, values.flatten())
    after = Groups(3)
    for engine in after.engines.engines:
        engine.restart(restart)
    assert after.memories() == [None] * len(LAYERS)
    after.run(12)
    assert all(memory is not None for memory in after.memories())


def test_a_recut_forgets() -> None:
    model = mlp()
    engine = StreamingDiLoCo(model, **{**CHOICES, "fragments": "strided:1"})
    optimizer = inner_optimizer("sgd", model)
    for step in range(1, 12):
        train_step(model, optimizer, 0, step)
        engine.step()
    assert any(part["memory"] is not None for part in engine.state_dict()["fragments"])
    next(model.parameters()).requires_grad_(False)
    engine.recut()
    assert all(part["memory"] is None for part in engine.state_dict()["fragments"])
