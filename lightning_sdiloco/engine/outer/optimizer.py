"""The outer optimizer over flat float32 shards, one per fragment."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sdiloco.engine.offload import Home, OnDevice
from lightning_sdiloco.engine.outer.rates import Make as MakeSchedule
from lightning_sdiloco.engine.outer.rates import Rates

Make = Callable[[Sequence[Tensor]], Optimizer]


class Stepped(NamedTuple):
    """The outer state of a fragment.

    Attributes:
        values: Outer parameters of the shard, shape ``(numel,)``, float32.
        state: The optimizer's state of the shard, such as its momentum.
        rounds: Outer steps of the fragment so far.
        lr: Learning rate of the outer step; 0 if there was none.
    """

    values: Tensor
    state: dict[str, Any]
    rounds: int
    lr: float = 0.0


class Outer:
    """Outer parameters and outer optimizer state of one rank's shards.

    They change only when a step is committed. A step works on copies, so that whoever reads in the meantime, from
    another thread or for a checkpoint, sees the values before it.

    Args:
        values: The shards, one per fragment, each a float32 tensor of shape ``(numel,)``, kept at home. They are never
            written to.
        make: From the shards to a torch optimizer that works elementwise.
        make_schedule: From that optimizer to a torch scheduler that counts the rounds of a fragment, if there is one.
        home: Where outer parameters and optimizer state rest; by default on their device.

    Raises:
        ValueError: If ``make`` gives something that is not an optimizer over all shards, or one that does not work
            elementwise; if ``make_schedule`` gives something that is no scheduler, or one that needs a metric.
    """

    def __init__(
        self, values: Sequence[Tensor], make: Make, make_schedule: MakeSchedule | None = None, home: Home | None = None
    ) -> None:
        _check_elementwise(make, len(values))
        self._home = home or OnDevice(values[0].device)
        self.values = list(values)
        parameters = [Parameter(value) for value in values]
        self._optimizer = make(parameters)
        self._group_of = _groups_of(self._optimizer, parameters)
        self.states: list[dict[str, Any]] = [dict(self._optimizer.state.get(p, {})) for p in parameters]
        self.rounds = [0] * len(values)
        self._release_parameters()
        self._rates = Rates(self._optimizer, make_schedule)

    def stepped(self, fragment: int, values: Tensor, gradient: Tensor) -> Stepped:
        """What an outer step makes of a fragment, on the device. Changes nothing.

        Args:
            fragment: The fragment.
            values: Its outer parameters, on the device.
            gradient: Mean outer gradient of the shard, shape ``(numel,)``, float32.
        """
        parameter = Parameter(values.clone())
        parameter.grad = gradient
        state = {key: self._copied(value, values) for key, value in self.states[fragment].items()}
        group = self._rates.of(self.rounds[fragment])[self._group_of[fragment]]
        twin = self._twin(group, parameter, state)
        with torch.enable_grad():
            twin.step()
        lr = float(group.get("lr", nan))
        return Stepped(parameter.detach(), dict(twin.state[parameter]), self.rounds[fragment] + 1, lr)

    def kept(self, fragment: int) -> Stepped:
        """A fragment as it is, without an outer step."""
        return Stepped(self.values[fragment], self.states[fragment], self.rounds[fragment])

    def at_home(self, step: Stepped) -> Stepped:
        """What is kept of a step, for `commit`. May wait for the device."""
        state = {k: self._home.kept(v) if is_of_values(v, step.values) else v for k, v in step.state.items()}
        return step._replace(values=self._home.kept(step.values), state=state)

    def commit(self, fragment: int, step: Stepped) -> None:
        """Makes a step that is at home the one that everybody sees."""
        self.values[fragment] = step.values
        self.states[fragment] = step.state
        self.rounds[fragment] = step.rounds

    def saved(self, fragment: int) -> dict[str, Any]:
        """Outer values, optimizer state and rounds of a fragment, on the host. Never written to, so not copied."""
        state = {k: v.to("cpu") if isinstance(v, Tensor) else v for k, v in self.states[fragment].items()}
        return {"outer": self.values[fragment].to("cpu"), "state": state, "rounds": self.rounds[fragment]}

    def load(self, fragment: int, values: Tensor, state: dict[str, Any], rounds: int) -> None:
        """Takes back what `saved` returned."""
        group = self._optimizer.param_groups[self._group_of[fragment]]
        # A count of steps is on the host, as torch has it, unless the optimizer counts on the device.
        counts_on = self._home.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        loaded = {
            key: self._home.copied(value) if is_of_values(value, values) else _moved(value, counts_on)
            for key, value in state.items()
        }
        self.commit(fragment, Stepped(self._home.copied(values), loaded, rounds))

    def described(self) -> dict[str, str]:
        """Optimizer and schedule, each as text that is the same on all ranks if and only if its choices are."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        return {
            "outer_optimizer": f"{type(self._optimizer).__name__}({groups})",
            "outer_lr_schedule": self._rates.described(),
        }

    def _copied(self, value: Any, values: Tensor) -> Any:
        """A part of the optimizer's state of a shard as a step may write to it."""
        if is_of_values(value, values):
            return self._home.working_copy(value)
        return value.clone() if isinstance(value, Tensor) else value

    def _twin(self, group: dict[str, Any], parameter: Parameter, state: dict[str, Any]) -> Optimizer:
        """The same optimizer over one parameter and its state; made without calling the user's code again."""
        twin = object.__new__(type(self._optimizer))
        own = {"param_groups": [{**group, "params": [parameter]}], "state": defaultdict(dict, {parameter: state})}
        twin.__dict__.update({**self._optimizer.__dict__, **own})
        return twin

    def _release_parameters(self) -> None:
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["params"] = []


def _groups_of(optimizer: Optimizer, parameters: list[Parameter]) -> list[int]:
    index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [fragment for fragment, parameter in enumerate(parameters) if id(parameter) not in index]
    if missing or len(index) != len(parameters):
        raise ValueError(
            f"outer_optimizer made an optimizer over {len(index)} tensors that leaves out the shards {missing} of"
            f" {len(parameters)}. It must hold every shard it is given, and nothing else. Pass the shards on as they"
            " are."
        )
    return [index[id(parameter)] for parameter in parameters]


def _check_elementwise(make: Make, count: int) -> None:
    """Steps small vectors whole and in two halves: an optimizer that works elementwise gives the same."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator) for _ in range(count)]
    # At several scales: an optimizer that clips does so for large gradients only.
    scales = (1.0, 1e3, 1e-3)
    gradients = [[scale * torch.randn(64, generator=generator) for _ in range(count)] for scale in scales]
    try:
        whole = _tried(make, values, gradients, slice(None))
        halves = [_tried(make, values, gradients, half) for half in (slice(0, 32), slice(32, 64))]
    except Exception as error:
        raise ValueError(
            f"outer_optimizer could not step flat float32 shards: {error}. It is called with a list of one-dimensional"
            " tensors, one per fragment, and must return a torch.optim.Optimizer whose step() needs no closure. Choose"
            " one, such as torch.optim.SGD."
        ) from error
    joined = [torch.cat(parts) for parts in zip(*halves, strict=True)]
    if not all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(whole, joined, strict=True)):
        raise ValueError(
            "outer_optimizer does not work elementwise: stepping a vector whole and in two halves gave different"
            " values. It sees flat shards of fragments, whose shapes and norms mean nothing. Choose an optimizer that"
            " treats every value on its own, such as torch.optim.SGD or torch.optim.AdamW."
        )


def _tried(make: Make, values: list[Tensor], gradients: list[list[Tensor]], part: slice) -> list[Tensor]:
    parameters = [Parameter(value[part].clone()) for value in values]
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"it returned {optimizer!r}, which is not a torch.optim.Optimizer")
    for gradient in gradients:
        for parameter, grad in zip(parameters, gradient, strict=True):
            parameter.grad = grad[part].clone()
        with torch.enable_grad():
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _moved(value: Any, device: torch.device) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def is_of_values(value: Any, values: Tensor) -> bool:
    """Whether a part of the optimizer's state belongs to single values of a shard, as a momentum does.

    Args:
        value: The part.
        values: The shard.
    """
    return isinstance(value, Tensor) and value.shape == values.shape
