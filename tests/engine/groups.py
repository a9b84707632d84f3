"""Worker groups that train, simulated or real ones, and stop and go on in new objects."""

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import Landing, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.engine.rounds import StepClock
from lightning_sdiloco.engine.turns import in_turns, turns_of
from tests.bits import same_bits
from tests.training import batch, inner_optimizer, mlp

Values = dict[str, Tensor]
MEAN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0}
"""With these the mean over groups is what the outer parameters become, and what every group
takes."""


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
    return [name for name in one if not same_bits(one[name], other[name])]


def grouped(fragments: int) -> list[list[str]]:
    """The layers of `mlp` distributed over some fragments."""
    return [
        [f"{2 * layer}.*" for layer in range(index, 4, fragments)] for index in range(fragments)
    ]


def outer_state(engine: StreamingDiLoCo) -> list[dict[str, Any]]:
    """What a rank holds of each fragment: ``outer``, ``state``, ``buffers``, ``memory``."""
    return list(engine.state_dict()["fragments"])


def held(engine: StreamingDiLoCo, model: nn.Module) -> Values:
    """All that a rank holds: its model, and of each fragment what the next rounds begin with."""
    values = copied(model.state_dict())
    for number, own in enumerate(outer_state(engine)):
        of_fragment = {**own["state"], **{key: own[key] for key in ("outer", "memory", "residual")}}
        values |= {
            f"{number} {key}": own.clone()
            for key, own in of_fragment.items()
            if isinstance(own, Tensor)
        }
        values |= {
            f"{number} buffer {at}": buffer.clone() for at, buffer in enumerate(own["buffers"])
        }
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
        engine.rounds.link.fixed = rate
        engine.rounds.step_clock = StepClock(1.0)


def regression(model: nn.Module, group: int, step: int, place: int, size: int) -> Tensor:
    """The loss of a rank of a group, which sees its part of the batch."""
    x, y = (part.chunk(size)[place] for part in batch(group, step))
    return nn.functional.mse_loss(model(x), y)


class Groups:
    """Groups with models and inner optimizers of their own: all of them simulated, or in a rank
    the one that joined.
    """

    def __init__(
        self,
        groups: int = 2,
        inner: str = "adamw",
        net: Callable[[int], nn.Module] = mlp,
        links: Sequence[float] = (),
        idle: Callable[[int, int], bool] = lambda group, step: False,
        micro_batches: Callable[[int, int], int] = lambda group, step: 1,
        joined: WorkerGroups | None = None,
        loss: Callable[[nn.Module, int, int, int, int], Tensor] = regression,
        **choices: Any,
    ) -> None:
        self.again = partial(
            type(self), groups, inner, net, links, idle, micro_batches, joined, loss, **choices
        )
        self.every = [joined.group_index] if joined else range(groups)
        ranks = joined.topology.ranks if joined else range(1)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.place = rank - ranks.start
        self.size = len(ranks)
        self.models: list[Any] = [net(rank if joined else group) for group in self.every]
        self.optimizers = [inner_optimizer(inner, model) for model in self.models]
        self.idle = idle
        self.micro_batches = micro_batches
        self.loss = loss
        self.choices = choices
        self.steps = 0
        self.landings = list[Landing]()
        if joined:
            choices = {"worker_groups": joined, "inner_optimizers": self.optimizers, **choices}
            self.engines = [StreamingDiLoCo(self.models[0], **choices)]
        else:
            self.groups = SimulatedGroups(
                self.models, [[optimizer] for optimizer in self.optimizers], **choices
            )
            self.engines = self.groups.engines
        self.trained = self.models
        if joined and self.size > 1:
            ddp = {"process_group": joined.process_group, "broadcast_buffers": False}
            self.trained = [DistributedDataParallel(self.models[0], **ddp)]
        with_links(self.engines, [links[group] for group in self.every if links])

    def step(
        self,
        idle: Collection[int] | None = None,
        then: Callable[[list[Any]], object] = lambda models: None,
    ) -> list[Landing]:
        """Trains an inner step of every group, does something to the models, and returns what
        landed in the first.
        """
        self.steps += 1
        rests = [
            self.idle(group, self.steps) if idle is None else group in idle for group in self.every
        ]
        for at, group in enumerate(self.every):
            if not rests[at]:
                self.optimizers[at].zero_grad()
                self.loss(self.trained[at], group, self.steps, self.place, self.size).backward()
        for optimizer, rest in zip(self.optimizers, rests, strict=True):
            if not rest:
                optimizer.step()
        with torch.no_grad():
            then(self.models)
        landed, *_ = in_turns(
            [
                turns_of(engine.step, trained=self.micro_batches(group, self.steps), idle=rest)
                for engine, group, rest in zip(self.engines, self.every, rests, strict=True)
            ]
        )
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
                values |= {
                    f"{group} inner {index} {key}": value.clone() for key, value in state.items()
                }
            counts = engine.report()
            keys = ("inner_steps", "launches", "landings", "bytes_sent")
            values[f"{group} counts"] = torch.tensor([counts[key] for key in keys])
        with self.engines[0].evaluate():
            return values | {
                f"shown {name}": own.clone() for name, own in self.models[0].state_dict().items()
            }

    def saved(self) -> Any:
        """Taken while the first group shows the outer model, which changes nothing."""
        with self.engines[0].evaluate():
            engines = [engine.state_dict() for engine in self.engines]
        return through_a_file(
            [self.steps, engines, [optimizer.state_dict() for optimizer in self.optimizers]]
        )

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
        """Goes on up to a step; returns what is not as expected after the steps for which that is
        known.
        """
        wrong = {}
        while self.steps < last:
            self.step()
            if self.steps in expected and (names := unlike(self.seen(), expected[self.steps])):
                wrong[self.steps] = names
        return wrong
