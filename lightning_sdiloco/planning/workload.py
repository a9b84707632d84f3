"""Describes the subject of a plan: a model, and the worker groups that train it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.partition import Parameter, partition
from lightning_sdiloco.planning.link import require

FLOAT32 = 4
"""The size of a float32 value in bytes."""


@dataclass(frozen=True)
class Model:
    """The trainable parameters of a model, in the form that a plan needs."""

    parameters: tuple[Parameter, ...]
    numels: tuple[int, ...]

    @staticmethod
    def of_parameters(parameters: Mapping[str, Any]) -> "Model":
        """Describes the trainable parameters of a module, which may be on the meta device."""
        described = (
            Parameter(name, p.numel() * p.element_size(), p.ndim) for name, p in parameters.items()
        )
        return Model(tuple(described), tuple(p.numel() for p in parameters.values()))

    @staticmethod
    def of_size(values: int, layers: int) -> "Model":
        """Describes a model that consists of equal layers of float32 values."""
        require(layers >= 1, "layers", layers, "at least 1")
        require(values >= layers, "params", values, "at least as many as layers")
        numel, remainder = divmod(values, layers)
        numels = tuple(numel + (layer < remainder) for layer in range(layers))
        parameters = (
            Parameter(f"layers.{layer}.weight", FLOAT32 * numel)
            for layer, numel in enumerate(numels)
        )
        return Model(tuple(parameters), numels)

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def nbytes(self) -> int:
        """Returns the size of the parameters in their own dtype in bytes, which is also the size of
        the gradients.
        """
        return sum(parameter.nbytes for parameter in self.parameters)

    def fragments(self, settings: Settings) -> tuple[int, ...]:
        """Returns the number of values in each fragment, as the engine would divide the model."""
        chosen = settings.fragments
        if isinstance(chosen, int | str):
            return _cut(self, chosen)
        return _cut(self, tuple(map(tuple, chosen)))


@lru_cache
def _cut(model: Model, fragments: int | str | tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    """Divides the model as the engine would, and caches the result."""
    numels = {
        parameter.name: numel
        for parameter, numel in zip(model.parameters, model.numels, strict=True)
    }
    cut = partition(model.parameters, fragments)
    return tuple(sum(numels[name] for name in fragment.names) for fragment in cut.fragments)


@dataclass(frozen=True)
class Groups:
    """The worker groups of a plan: their step time, number, size and memory bandwidth."""

    step_time: float
    groups: int = 2
    group_size: int = 1
    memory_rate: float = 1e12

    def __post_init__(self) -> None:
        require(
            0 < self.step_time < math.inf,
            "step_time",
            self.step_time,
            "a positive number of seconds",
        )
        require(self.groups >= 2, "groups", self.groups, "at least 2, or nothing is sent")
        require(self.group_size >= 1, "group_size", self.group_size, "at least 1")
        require(self.memory_rate > 0, "memory_rate", self.memory_rate, "positive")

    @property
    def others(self) -> int:
        return self.groups - 1

    @property
    def connections(self) -> int:
        """Returns the number of connections on a group's link: one from each rank to every other
        group.
        """
        return self.others * self.group_size
