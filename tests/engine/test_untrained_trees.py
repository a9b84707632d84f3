"""Random models that mix untrained state of every kind: equal groups, exact resume, and no altered
constant.
"""

from copy import deepcopy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups
from tests.engine.groups import copied, through_a_file, unlike
from tests.training import batch
from tests.untrained_parts import PARTS, altered_constants, broken, tree

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 1,
    "compression": "fp32",
    "fragments": 2,
}
END = 14


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, group: int, step: int) -> None:
    x, y = batch(group, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


class Simulated:
    """Groups of a random model in this process."""

    def __init__(self, seed: int, numbers: list[int], groups: int, choices: dict[str, Any]) -> None:
        self.models = [tree(seed, numbers) for _ in range(groups)]
        self.groups = SimulatedGroups(self.models, **choices)
        self.optimizers = [optimizer_of(model) for model in self.models]

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for group, model in enumerate(self.models):
                train(model, self.optimizers[group], group, step)
            self.groups.step()

    def held(self) -> list[dict[str, Tensor]]:
        return [copied(model.state_dict()) for model in self.models]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    numbers=st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=6),
    groups=st.sampled_from([2, 4]),
    saved_at=st.integers(1, END - 1),
    mixing=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_groups_of_random_models_agree_resume_exactly_and_keep_constants(
    seed: int, numbers: list[int], groups: int, saved_at: int, mixing: float
) -> None:
    choices = {**CHOICES, "mixing": mixing}
    run = Simulated(seed, numbers, groups, choices)
    initial = copied(run.models[0].state_dict())
    run.train(1, saved_at)
    again = Simulated(seed, numbers, groups, choices)
    for engine, saved in zip(again.groups.engines, run.groups.engines, strict=True):
        engine.load_state_dict(through_a_file(saved.state_dict()))
    for optimizer, saved in zip(again.optimizers, run.optimizers, strict=True):
        optimizer.load_state_dict(deepcopy(saved.state_dict()))
    for one in (run, again):
        one.train(saved_at + 1, END)
    mean = run.groups.group_mean()
    shown = []
    for engine, model in zip(run.groups.engines, run.models, strict=True):
        with engine.evaluate(mean):
            shown.append(copied(model.state_dict()))
    for one in (run, again):
        one.groups.finish()
    for values in shown:
        assert unlike(values, shown[0]) == []
    for values, resumed in zip(run.held(), again.held(), strict=True):
        assert unlike(values, resumed) == []
        assert unlike(values, run.held()[0]) == []
        assert altered_constants(values, initial) == []
        assert broken(values, END) == []
