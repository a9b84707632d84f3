"""Worker groups that train: simulated ones, which stop and go on in new objects, and a rank of real ones."""

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import Landing, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.engine.flight import StepClock
from tests.training import backward, batch, inner_optimizer, mlp

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


def grouped(fragments: int) -> list[list[str]]:
    """The layers of `mlp` distributed over some fragments."""
    return [[f"{2 * layer}.*" for layer in range(index, 4, fragments)] for index in range(fragments)]


def outer_state(engine: StreamingDiLoCo) -> list[dict[str, Any]]:
    """What a rank holds of each fragment: ``outer``, ``state``, ``buffers``, ``memory``."""
    return list(engine.state_dict()["fragments"])


def held(engine: StreamingDiLoCo, model: nn.Module) -> Values:
    """All that a rank holds: its model, and of each fragment what the next rounds begin with."""
    values = copied(model.state_dict())
    for number, own in enumerate(outer_state(engine)):
        of_fragment = {**own["state"], **{key: own[key] for key in ("outer", "memory", "residual")}}
        values |= {f"{number} {key}": own.clone() for key, own in of_fragment.items() if isinstance(own, Tensor)}
        values |= {f"{number} buffer {at}": buffer.clone() for at, buffer in enumerate(own["buffers"])}
    return values


def message(error: str) -> str:
    """What an error says, without the traceback, which holds the words of the code that raises."""
    return re.split(r"(?m)^[\w.]+Error: ", error)[-1]


class Seldom(nn.Module):
    """Passes values on, and changes its buffer in one step of sixteen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("values", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.values += x.detach().mean() * (self.steps % 16 == 15)
        return x


def with_statistics(seed: int) -> nn.Sequential:
    return nn.Sequential(*mlp(seed), nn.BatchNorm1d(3), Seldom())


def with_links(engines: Sequence[StreamingDiLoCo], rates: Sequence[float]) -> None:
    """Tells every group how fast its link is, and that an inner step takes a second."""
    for engine, rate in zip(engines, rates, strict=False):
        engine.link.fixed, engine.rounds.step_clock = rate, StepClock(1.0)


class Groups:
    """Simulated groups with models and inner optimizers of their own, in their first inner step."""

    def __init__(
        self,
        groups: int = 2,
        inner: str = "adamw",
        net: Callable[[int], nn.Module] = mlp,
        links: Sequence[float] = (),
        idle: Callable[[int, int], bool] = lambda group, step: False,
        micro_batches: Callable[[int, int], int] = lambda group, step: 1,
        **choices: Any,
    ) -> None:
        self.again = partial(type(self), groups, inner, net, links, idle, micro_batches, **choices)
        self.models: list[Any] = [net(seed) for seed in range(groups)]
        self.optimizers = [inner_optimizer(inner, model) for model in self.models]
        self.idle, self.micro_batches = idle, micro_batches
        self.choices, self.steps, self.landings = choices, 0, list[Landing]()
        self.groups = SimulatedGroups(self.models, [[optimizer] for optimizer in self.optimizers], **choices)
        self.engines = self.groups.engines
        with_links(self.engines, links)

    def step(
        self, idle: Collection[int] | None = None, then: Callable[[list[Any]], object] = lambda models: None
    ) -> list[Landing]:
        """Trains an inner step of every group, does something to the models, and returns what landed in the first."""
        self.steps += 1
        every = range(len(self.models))
        idle = [group for group in every if self.idle(group, self.steps)] if idle is None else idle
        training = [group for group in every if group not in idle]
        for group in training:
            backward(self.models[group], self.optimizers[group], group, self.steps)
        self.groups.average_gradients(idle=idle)
        for group in training:
            self.optimizers[group].step()
        with torch.no_grad():
            then(self.models)
        trained = [self.micro_batches(group, self.steps) for group in every]
        landed = self.groups.step(trained=trained, idle=idle)[0]
        self.landings += landed
        return landed

    def until(self, step: int) -> list[Landing]:
        return [landing for _ in range(self.steps, step) for landing in self.step()]

    def seen(self) -> Values:
        """Everything that must be the same: what groups hold and show, inner state, counts."""
        values: Values = {}
        for group, (engine, model) in enumerate(zip(self.engines, self.models, strict=True)):
            values |= {f"{group} {name}": own for name, own in held(engine, model).items()}
            for index, state in enumerate(self.optimizers[group].state.values()):
                values |= {f"{group} inner {index} {key}": value.clone() for key, value in state.items()}
            counts = engine.report()
            keys = ("inner_steps", "launches", "landings", "bytes_sent")
            values[f"{group} counts"] = torch.tensor([counts[key] for key in keys])
        with self.engines[0].evaluate():
            return values | {f"shown {name}": own.clone() for name, own in self.models[0].state_dict().items()}

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
        return self.again().load(self.saved())

    def differs(self, expected: Mapping[int, Values], last: int) -> dict[int, list[str]]:
        """Goes on up to a step; returns what is not as expected after the steps for which that is known."""
        wrong = {}
        while self.steps < last:
            self.step()
            if self.steps in expected and (names := unlike(self.seen(), expected[self.steps])):
                wrong[self.steps] = names
        return wrong


class Rank:
    """The same in a process that is a rank, of a group of one or several, which may stop and go on in new objects."""

    def __init__(
        self,
        rank: int,
        joined: WorkerGroups,
        inner: str = "adamw",
        net: Callable[[int], nn.Module] = mlp,
        links: Sequence[float] = (),
        idle: Callable[[int, int], bool] = lambda group, step: False,
        micro_batches: Callable[[int, int], int] = lambda group, step: 1,
        **choices: Any,
    ) -> None:
        self.group, self.size = joined.group_index, len(joined.topology.ranks)
        self.place, self.idle, self.micro_batches = rank % self.size, idle, micro_batches
        self.model: Any = net(rank)
        self.optimizer = inner_optimizer(inner, self.model)
        self.engine = StreamingDiLoCo(self.model, worker_groups=joined, inner_optimizers=[self.optimizer], **choices)
        with_links([self.engine], links[self.group :])
        ddp = {"process_group": joined.process_group, "broadcast_buffers": False}
        self.wrapped = DistributedDataParallel(self.model, **ddp) if self.size > 1 else self.model

    def loss(self, step: int) -> Tensor:
        x, y = (part.chunk(self.size)[self.place] for part in batch(self.group, step))
        return nn.functional.mse_loss(self.wrapped(x), y)

    def step(self, step: int) -> list[Landing]:
        rests = self.idle(self.group, step)
        if not rests:
            self.optimizer.zero_grad()
            self.loss(step).backward()
        self.engine.launch_gradients(idle=rests)
        self.engine.land_gradients()
        if not rests:
            self.optimizer.step()
        return self.engine.step(trained=self.micro_batches(self.group, step), idle=rests)

    def saved(self) -> Any:
        return through_a_file([self.engine.state_dict(), self.optimizer.state_dict()])

    def load(self, saved: Any) -> "Rank":
        self.engine.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        return self
