"""Measures the cost of worker groups in loss for a mixture of experts, with the default fragments
and with experts in fragments of their own.

    python -m benchmarks.experts [--stage STAGE] [--workers N] [--minutes M] [--quick] [--json FILE]
                                 [--picture FILE]

The model is that of ``examples/moe.py``, except that each expert has tensors of its own, so that a
fragment can contain a single expert. It is trained on the sources of Python's standard library, in
four groups with what the strategy chooses by itself. There are two stages:

- ``rates``: the inner learning rate, for DDP and for the default fragments, with one seed.
- ``verdict``: three other seeds, with the rates of the previous stage.

With --json, every run is saved as soon as it ends, and runs that are already in the file are
skipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import comparison
from benchmarks.models import Size, next_byte_loss
from benchmarks.quality import Pair, chosen, of_strategy
from benchmarks.training import Group, Training

# The folder of the examples is on the path since the import of benchmarks.models.
from gpt import GPT  # isort: skip
from moe import BALANCE, EXPERTS, HEADS, LAYERS, WIDTH, MoEBlock  # isort: skip

SIZE = Size(LAYERS, WIDTH, HEADS, context=128)
GROUPS = 4
BUDGET = 1.5
"""Tokens per parameter, a tenth of those of the other benchmarks, because experts take long."""

TUNING_SEED = 0
SEEDS = (10, 11, 12)

TRIED = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
DDP_LR = 3e-3
LR = 3e-3
"""The best inner learning rates, of those that stage ``rates`` tries."""

OTHERS = [
    *([f"blocks.{layer}.[!e]*"] for layer in range(LAYERS)),
    ["byte_embedding.*", "position_embedding.*", "norm.*", "head.*"],
]
"""The fragments of the parameters that belong to no expert."""

LAYERS_APART = [[f"blocks.{layer}.experts.*"] for layer in range(LAYERS)]
EXPERTS_APART = [
    [f"blocks.{layer}.experts.{expert}.*"] for layer in range(LAYERS) for expert in range(EXPERTS)
]

FRAGMENTS: Mapping[str, str | Sequence[Sequence[str]]] = {
    "default fragments": "strided",
    "a fragment for the experts of each layer": [*LAYERS_APART, *OTHERS],
    "a fragment for each expert": [*EXPERTS_APART, *OTHERS],
}
"""The fragments by the name of the setting."""


class Expert(nn.Module):
    """The perceptron of an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Parameter(torch.empty(2 * WIDTH, WIDTH))
        self.outside = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH))


class ApartBlock(MoEBlock):
    """A block whose experts have tensors of their own."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts_in, self.experts_out
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    @override
    def mixture(self, tokens: Tensor) -> Tensor:
        """Returns the chosen experts' output for each token."""
        experts: Any = self.experts
        # Plain tensors take the places of the parameters that the example has.
        block: Any = self
        block.experts_in = torch.stack([expert.inside for expert in experts])
        block.experts_out = torch.stack([expert.outside for expert in experts])
        return super().mixture(tokens)


def mixture_of_experts(size: Size, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = GPT(size.layers, size.width, size.heads, size.context)
    model.blocks = nn.ModuleList(ApartBlock() for _ in range(size.layers))
    model.initialize(size.layers)
    return model


@cache
def parameters(size: Size) -> int:
    return sum(parameter.numel() for parameter in mixture_of_experts(size, 0).parameters())


class BalancedGroup(Group):
    """A group whose loss asks for an even use of the experts, as in ``examples/moe.py``."""

    @override
    def backward(self, tokens: Tensor, targets: Tensor, trained: int | None = None) -> None:
        self.optimizer.zero_grad()
        loss = next_byte_loss(self.model, tokens[:trained], targets[:trained])
        blocks: Any = self.model.blocks
        loads = [block.load_loss for block in blocks]
        (loss + BALANCE * torch.stack(loads).sum()).backward()


@dataclass(frozen=True)
class ExpertTraining(Training):
    """A training of a mixture of experts."""

    experts: int = field(default=EXPERTS, kw_only=True)

    @property
    @override
    def numel(self) -> int:
        return parameters(self.size)

    @override
    def model(self) -> nn.Module:
        return mixture_of_experts(self.size, self.seed)

    @override
    def group(self) -> Group:
        return BalancedGroup(self)


def ddp(seed: int = TUNING_SEED, lr: float = DDP_LR) -> ExpertTraining:
    return ExpertTraining(SIZE, None, GROUPS, BUDGET, batch=1, lr=lr, seed=seed)


def ours(setting: str, seed: int = TUNING_SEED, lr: float = LR) -> ExpertTraining:
    """Four groups by the bare name, except for the fragments."""
    plain = ddp(seed, lr)
    choices: dict[str, Any] = of_strategy(GROUPS, plain.steps)
    return replace(plain, choices=chosen({**choices, "fragments": FRAGMENTS[setting]}, GROUPS))


def rates() -> Iterator[tuple[str, Pair]]:
    """Yields the default fragments and DDP at each rate."""
    for lr in TRIED:
        yield f"default fragments, lr={lr:g}", (ours("default fragments", lr=lr), ddp(lr=lr))


def verdict() -> Iterator[tuple[str, Pair]]:
    """Yields all fragments beside DDP, over seeds that the other stage did not use."""
    for seed in SEEDS:
        for setting in FRAGMENTS:
            yield setting, (ours(setting, seed), ddp(seed))


def quick() -> Iterator[tuple[str, Pair]]:
    for setting in FRAGMENTS:
        yield setting, (shortened(ours(setting)), shortened(ddp()))


def shortened(training: ExpertTraining) -> ExpertTraining:
    size = Size(LAYERS, WIDTH, HEADS, context=16)
    return replace(training, size=size, budget=0.01, validation_windows=32)


STAGES: Mapping[str, comparison.Settings] = {"rates": rates, "verdict": verdict}


def main(arguments: list[str] | None = None) -> None:
    subject = f"{GROUPS} groups, {parameters(SIZE):,} parameters"
    comparison.run_stages("experts", __doc__, STAGES, quick, subject, arguments)


if __name__ == "__main__":
    main()
