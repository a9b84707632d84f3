"""Worker groups that train: simulated ones, which stop and go on in new objects, and one rank of real ones."""

import io
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco import Landing, SimulatedGroups, StreamingDiLoCo
from tests.training import backward, inner_optimizer, mlp, train_step

Values = dict[str, Tensor]


def copied(values: Any) -> Values:
    """Copies of named tensors, such as ``named_parameters()``."""
    return {name: tensor.detach().clone() for name, tensor in dict(values).items()}


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def unlike(one: Values, other: Values) -> list[str]:
    """The names whose values do not have the same bits."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [name for name in one if not torch.equal(one[name], other[name])]


def outer_state(engine: StreamingDiLoCo) -> list[dict[str, Any]]:
    """What a rank holds of each fragment: ``outer``, ``state``, ``buffers``, ``memory``."""
    return list(engine.state_dict()["fragments"])


class Groups:
    """Simulated groups with models and inner optimizers of their own, in their first inner step.

    Args:
        groups: Number of worker groups.
        inner: The inner optimizer.
        net: From a seed to a model.
        choices: What is chosen for the engines.
    """

    def __init__(
        self, groups: int = 2, inner: str = "adamw", net: Callable[[int], nn.Module] = mlp, **choices: Any
    ) -> None:
        self.models: list[Any] = [net(seed) for seed in range(groups)]
        self.made = (groups, inner, net)
        self.optimizers = [inner_optimizer(inner, model) for model in self.models]
        self.choices, self.steps, self.landings = choices, 0, list[Landing]()
        self.groups = SimulatedGroups(self.models, [[optimizer] for optimizer in self.optimizers], **choices)
        self.engines = self.groups.engines

    def step(
        self,
        idle: Collection[int] = (),
        trained: Sequence[int] = (),
        then: Callable[[list[Any]], object] = lambda models: None,
    ) -> list[Landing]:
        """Trains an inner step of every group, does something to the models, and returns what landed in the first."""
        self.steps += 1
        training = [group for group in range(len(self.models)) if group not in idle]
        for group in training:
            backward(self.models[group], self.optimizers[group], group, self.steps)
        self.groups.average_gradients(idle=idle)
        for group in training:
            self.optimizers[group].step()
        with torch.no_grad():
            then(self.models)
        landed = self.groups.step(trained=trained, idle=idle)[0]
        self.landings += landed
        return landed

    def until(self, step: int) -> list[Landing]:
        return [landing for _ in range(self.steps, step) for landing in self.step()]

    def seen(self) -> Values:
        """Everything that must be the same: local and outer values, buffers too, inner state, counts."""
        values = {f"outer {name}": tensor for name, tensor in self.groups.outer_state_dict().items()}
        with self.engines[0].evaluate():
            values |= {f"shown {name}": tensor.clone() for name, tensor in self.models[0].state_dict().items()}
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            values |= {f"{group} {name}": tensor.clone() for name, tensor in model.state_dict().items()}
            for index, state in enumerate(optimizer.state.values()):
                values |= {f"{group} {index} {key}": value.clone() for key, value in state.items()}
            counts = self.engines[group].report()
            keys = ("inner_steps", "launches", "landings", "bytes_sent")
            values[f"{group} counts"] = torch.tensor([counts[key] for key in keys])
        return values

    def saved(self) -> Any:
        engines = [engine.state_dict() for engine in self.engines]
        return through_a_file([self.steps, engines, [optimizer.state_dict() for optimizer in self.optimizers]])

    def load(self, saved: Any) -> "Groups":
        self.steps = saved[0]
        for engine, state in zip(self.engines, saved[1], strict=True):
            engine.load_state_dict(state)
        for optimizer, state in zip(self.optimizers, saved[2], strict=True):
            optimizer.load_state_dict(state)
        return self

    def resumed(self) -> "Groups":
        """Others that go on from here, from what a checkpoint holds."""
        groups, inner, net = self.made
        return type(self)(groups, inner, net, **self.choices).load(self.saved())

    def after_landings(self, steps: int) -> list[Values]:
        """Trains to the end; returns the outer parameters after every landing and at the end."""
        seen = [self.groups.outer_state_dict() for _ in range(self.steps, steps) if self.step()]
        self.groups.finish()
        return [*seen, self.groups.outer_state_dict()]


def after_landings(engine: StreamingDiLoCo, model: nn.Module, group: int, steps: int, inner: str) -> list[Values]:
    """The same in a process that is a rank."""
    optimizer, seen = inner_optimizer(inner, model), []
    for step in range(1, steps + 1):
        train_step(model, optimizer, group, step)
        if engine.step():
            seen.append(engine.outer_state_dict())
    engine.finish()
    return [*seen, engine.outer_state_dict()]
