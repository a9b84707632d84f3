"""Parts of models with untrained state of every kind, and random trees of them."""

import random
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from tests.bits import same_bits

WIDTH = 4
INFINITE = float("inf")


class Part(nn.Module):
    """A linear layer, with state beside it that a training step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        if self.training:
            with torch.no_grad():
                self.move(y.detach())
        return y

    def move(self, y: Tensor) -> None:
        """Moves the state by the output of the layer."""


class Mask(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant_mask", torch.full((WIDTH, WIDTH), -INFINITE).triu(1))
        self.register_buffer(
            "constant_exact", torch.tensor([0.1, 16777217.0, 3e38], dtype=torch.float64)
        )


class Constants(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant_time", torch.tensor(1732847520.123456, dtype=torch.float64))
        self.register_buffer("constant_times", torch.tensor([1732847520123456789, -1]))
        self.register_buffer("constant_tiny", torch.tensor([-0.0, 0.0, 1e-45]))
        self.register_buffer(
            "constant_half", torch.tensor([0.1, 3.0, 65504.0], dtype=torch.float16)
        )
        self.register_buffer("constant_unset", torch.full((2,), float("nan")))


class Statistics(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(super().forward(x)))


class Counter(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter_steps", torch.zeros(()))
        self.register_buffer("best", torch.tensor(INFINITE))

    def move(self, y: Tensor) -> None:
        self.counter_steps += 1
        self.best = torch.minimum(self.best, y.square().mean())


class Average(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def move(self, y: Tensor) -> None:
        # Bound to a new tensor, as much code does it.
        self.average = 0.9 * self.average + 0.1 * y.mean(dim=0)


class Queue(Part):
    length = 5

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "unit_features", nn.functional.normalize(torch.randn(self.length, WIDTH), dim=1)
        )
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def move(self, y: Tensor) -> None:
        places = (int(self.place) + torch.arange(2)) % self.length
        self.unit_features[places] = nn.functional.normalize(y[:2] + 1e-3, dim=1)
        self.place += 2


class LargeQueue(Queue):
    length = 17_000  # 272 kB: more than the engine takes for small


class Teacher(Part):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.layer).requires_grad_(False)

    def move(self, y: Tensor) -> None:
        for teacher, student in zip(
            self.teacher.parameters(), self.layer.parameters(), strict=True
        ):
            teacher.data = 0.9 * teacher.data + 0.1 * student.data


class Frozen(Part):
    def __init__(self) -> None:
        super().__init__()
        self.constant_table = nn.Parameter(torch.rand(3, WIDTH), requires_grad=False)


class Tied(Part):
    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Linear(WIDTH, WIDTH)
        self.further.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.further(super().forward(x))


class Spectral(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


PARTS: list[Callable[[], nn.Module]] = [
    Mask, Constants, Statistics, Counter, Average, Queue, LargeQueue, Teacher, Frozen, Tied, Spectral,
]  # fmt: skip


def tree(seed: int, numbers: list[int], rank: int = 0) -> nn.Module:
    """A model of parts by their numbers, some of them nested in others, by a seed; each rank draws
    other values.
    """
    torch.manual_seed(1_000 * rank + seed)
    chance = random.Random(seed)
    layers: list[nn.Module] = [nn.Linear(5, WIDTH)]
    for number in numbers:
        part = PARTS[number]()
        if chance.random() < 0.4 and len(layers) > 1:
            layers[-1] = nn.Sequential(layers[-1], part)
        else:
            layers.append(part)
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def altered_constants(values: dict[str, Tensor], initial: dict[str, Tensor]) -> list[str]:
    """The names of constants whose bits are not the initial ones."""
    constants = [name for name in initial if "constant" in name]
    return [name for name in constants if not same_bits(values[name], initial[name])]


def broken(values: dict[str, Tensor], steps: int) -> list[str]:
    """The names of tensors that are not valid after so many steps: unit vectors, counters, finite
    parameters.
    """
    return [name for name, tensor in values.items() if not _is_valid(name, tensor, steps)]


def _is_valid(name: str, tensor: Tensor, steps: int) -> bool:
    if "unit" in name or name.endswith(("._u", "._v")):
        lengths = tensor.norm(dim=-1)
        return torch.allclose(lengths, torch.ones_like(lengths), atol=1e-4)
    if name.endswith(("counter_steps", "num_batches_tracked")):
        return int(tensor) == steps
    if name.endswith(("weight", "bias")):
        return bool(tensor.isfinite().all())
    return True
