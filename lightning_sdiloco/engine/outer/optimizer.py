"""The outer optimizer over flat float32 shards, one per fragment."""

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.engine.offload import OnDevice, OuterStorage
from lightning_sdiloco.engine.outer import nesterov
from lightning_sdiloco.memory import new_vector

Make = Callable[[Sequence[Tensor]], Optimizer]
MakeSchedule = Callable[[Optimizer], LRScheduler]
OnePass = Callable[[Mapping[str, Any], Tensor, Tensor, Mapping[str, Any]], dict[str, Any] | None]

# Values that are stepped at once: few, so that they stay in the cache and the allocator holds little of what an
# optimizer makes meanwhile; so many that the calls cost nothing. Stretches begin where a vector unit would begin too.
_STRETCH = 1 << 16
_STRETCH_ON_DEVICE = 1 << 23
_ALIGNED = 1 << 10


class OuterState(NamedTuple):
    """Holds the outer state of a fragment: that of this rank's shard."""

    values: Tensor
    state: dict[str, Any]
    rounds: int
    lr: float = 0.0

    def moved(self, move: Callable[[Tensor], Tensor]) -> "OuterState":
        """Returns the state with its values, and everything that the optimizer keeps for each of them, moved."""
        state = {key: move(kept) if is_elementwise(kept, self.values) else kept for key, kept in self.state.items()}
        return self._replace(values=move(self.values), state=state)

    def state_dict(self) -> dict[str, Any]:
        """Returns it on the host. On a CPU the tensors are its own: do not write to them."""
        state = {key: kept.to("cpu") if isinstance(kept, Tensor) else kept for key, kept in self.state.items()}
        return {"outer": self.values.to("cpu"), "state": state, "rounds": self.rounds}

    @staticmethod
    def of(state: Mapping[str, Any]) -> "OuterState":
        """Reads what `state_dict` returned, without copying it."""
        return OuterState(state["outer"], state["state"], state["rounds"])


class ShardOptimizer:
    """Steps the shards of all fragments with the one torch optimizer that the user's factory makes."""

    def __init__(
        self,
        shards: Sequence[Tensor],
        make: Make,
        make_schedule: MakeSchedule | None = None,
        storage: OuterStorage | None = None,
        one_pass: OnePass | None = None,
    ) -> None:
        _check_elementwise(make, len(shards))
        self._storage = storage or OnDevice(shards[0].device)
        self._one_pass = one_pass
        parameters = [Parameter(shard) for shard in shards]
        self._optimizer = make(parameters)
        self._group_of = _groups_of(self._optimizer, parameters)
        kept = [dict(self._optimizer.state.get(parameter, {})) for parameter in parameters]
        self._initial = [OuterState(shard, state, 0) for shard, state in zip(shards, kept, strict=True)]
        self._release(self._optimizer)
        self._rates = Rates(self._optimizer, make_schedule)
        # Noted once: from then on only the thread that steps may look at the optimizer.
        self._described = self._describe()
        groups = self._optimizer.param_groups
        self._counts_on_device = [bool(group.get("capturable") or group.get("fused")) for group in groups]

    def take_initial(self) -> list[OuterState]:
        """Returns the outer state of every fragment before its first step. The optimizer does not keep it."""
        initial, self._initial = self._initial, []
        return initial

    def step(self, fragment: int, before: OuterState, values: Tensor, gradient: Tensor) -> OuterState:
        """Returns what an outer step makes of a fragment, on the device. Of what is given it takes the gradient."""
        group = self._rates.of(before.rounds)[self._group_of[fragment]]
        state = self._one_pass(group, values, gradient, before.state) if self._one_pass is not None else None
        if state is None:
            state = self._step_in_stretches(group, values, gradient, before.state)
        return OuterState(gradient, state, before.rounds + 1, float(group.get("lr", nan)))

    def _step_in_stretches(
        self, group: dict[str, Any], values: Tensor, gradient: Tensor, before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Steps one stretch after the other, overwrites the gradient, and returns the new state."""
        state, scratch = _NextState(before, values, self._storage), values.new_empty(0)
        for where in stretches(values.numel(), values.device):
            given = state.copied(where)
            # One copy serves all stretches: the allocator of the host would hold many of those that come and go.
            if scratch.numel() < where.stop - where.start:
                scratch = new_vector(where.stop - where.start, values.device)
            copied = scratch[: where.stop - where.start].copy_(values[where])
            parameter, kept = self._stepped(group, copied, gradient[where], dict(given))
            state.take(where, given, kept)
            # Only now: the state may be the gradient itself.
            gradient[where] = parameter
        return state.whole

    def _stepped(
        self, group: dict[str, Any], values: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Steps some values and their state, to which it writes, with the hyperparameters of a group."""
        parameter = Parameter(values)
        parameter.grad = gradient
        # The optimizer is the user's own and no copy: torch copies neither its hooks nor further attributes. What a
        # step leaves in these is forgotten: it is no state of a fragment, and would be missing in a checkpoint.
        optimizer, attributes = self._optimizer, dict(vars(self._optimizer))
        optimizer.param_groups = [{**group, "params": [parameter]}]
        optimizer.state = defaultdict(dict, {parameter: state})
        try:
            with torch.enable_grad():
                optimizer.step()
            return parameter.detach(), dict(optimizer.state[parameter])
        finally:
            optimizer.__dict__ = attributes

    def load(self, fragment: int, state: OuterState) -> OuterState:
        """Stores a copy of an outer state that was saved."""
        # A count of steps is on the host, as torch has it, unless the optimizer counts on the device.
        on_device = self._counts_on_device[self._group_of[fragment]]
        counts_on = self._storage.device if on_device else torch.device("cpu")
        moved = state.moved(self._storage.store_copy)
        counts = {
            key: kept.detach().to(counts_on, copy=True)
            for key, kept in state.state.items()
            if isinstance(kept, Tensor) and not is_elementwise(kept, state.values)
        }
        return moved._replace(state={**moved.state, **counts})

    def described(self) -> dict[str, str]:
        """Returns optimizer and schedule, each as text that is the same on all ranks if and only if its choices are."""
        return self._described

    def _describe(self) -> dict[str, str]:
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self._optimizer.param_groups]
        return {
            "outer_optimizer": f"{type(self._optimizer).__name__}({groups})",
            "outer_optimizer.lr_schedule": self._rates.described(),
        }

    @staticmethod
    def _release(optimizer: Optimizer) -> None:
        """Makes an optimizer forget its parameters, which are given back to it for one step at a time."""
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = []


def outer_optimizer_for(
    settings: Settings, shards: Sequence[Tensor], storage: OuterStorage | None = None
) -> ShardOptimizer:
    """Makes the outer optimizer that the settings ask for; see `ShardOptimizer` for arguments and errors."""
    outer = settings.outer
    if outer.make is not None:
        return ShardOptimizer(shards, outer.make, outer.lr_schedule, storage)
    return ShardOptimizer(shards, _nesterov(settings), outer.lr_schedule, storage, nesterov.stepped)


def _nesterov(settings: Settings) -> Make:
    momentum = settings.numbers["outer_momentum"]
    return partial(SGD, lr=settings.numbers["outer_lr"], momentum=momentum, nesterov=momentum > 0)


def _groups_of(optimizer: Optimizer, parameters: list[Parameter]) -> list[int]:
    """Returns the parameter group of every shard."""
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
    """Steps small vectors whole and in two halves: an optimizer that works elementwise returns the same values."""
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
    """Returns what an optimizer makes of a part of some vectors, step by step."""
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


def is_elementwise(kept: Any, values: Tensor) -> bool:
    """Tells whether something that an optimizer keeps of a shard has an entry for every value, as a momentum does."""
    return isinstance(kept, Tensor) and kept.shape == values.shape


class _NextState:
    """What an optimizer keeps of a shard after a step. Each stretch is copied to where it stays, and stepped there."""

    def __init__(self, before: Mapping[str, Any], values: Tensor, storage: OuterStorage) -> None:
        self._before, self._values, self._storage = before, values, storage
        self._vectors: dict[str, Tensor] = {}
        self.whole: dict[str, Any] = {}

    def copied(self, where: slice) -> dict[str, Any]:
        """Returns what was kept of a stretch, to be stepped."""
        return {
            key: self._place(key, kept.dtype, where).copy_(self._storage.load(kept[where]))
            if is_elementwise(kept, self._values)
            else copy.deepcopy(kept)
            for key, kept in self._before.items()
        }

    def take(self, where: slice, given: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Takes what is kept of a stretch after its step, of what was ``given``."""
        self.whole = dict(kept)
        for key in [key for key, value in kept.items() if is_elementwise(value, self._values[where])]:
            place = self._place(key, kept[key].dtype, where)
            # Most optimizers write to what they are given.
            if kept[key] is not given.get(key):
                place.copy_(kept[key])
            self.whole[key] = self._vectors[key]

    def _place(self, key: str, dtype: torch.dtype, where: slice) -> Tensor:
        if key not in self._vectors:
            self._vectors[key] = new_vector(len(self._values), self._values.device, dtype)
        return self._vectors[key][where]


def stretches(numel: int, device: torch.device) -> list[slice]:
    """Cuts a shard into stretches that are stepped one after the other: one, unless it is long."""
    # On a CPU they stay in the cache; elsewhere they are long enough to hide the launch of kernels. They are of about
    # the same length, so that none is so short that a state of it could be taken for one of the whole.
    longest = _STRETCH if device.type == "cpu" else _STRETCH_ON_DEVICE
    count = -(-numel // longest)
    length = max(1, -(-numel // max(1, count) // _ALIGNED)) * _ALIGNED
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


Groups = list[dict[str, Any]]

# Schedules are compared by what they do in so many rounds.
_COMPARED = 1000
_SHOWN = 4


class Rates:
    """Looks up the hyperparameters of the outer optimizer, round by round.

    They are looked up rather than stepped through, because the fragments of a round step one after the other.

    Args:
        optimizer: The outer optimizer. It is only read.
        make: From an optimizer to a torch scheduler, which is stepped once a round; None: nothing changes.

    Raises:
        ValueError: If ``make`` returns something that is no scheduler, or one that needs more than the count of rounds.

    Examples:
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> sgd = torch.optim.SGD([torch.zeros(3)], lr=0.4)
        >>> warm_up = Rates(sgd, lambda optimizer: LinearLR(optimizer, start_factor=0.25, total_iters=3))
        >>> [warm_up.of(number)[0]["lr"] for number in (0, 1, 2, 3, 1)]
        [0.1, 0.2, 0.30000000000000004, 0.4, 0.2]
    """

    def __init__(self, optimizer: Optimizer, make: MakeSchedule | None) -> None:
        self._carrier = _Carrier(optimizer)
        self._scheduler = None if make is None else _made(make, self._carrier)
        self._rounds = [self._carrier.hyperparameters()]
        if self._scheduler is not None:
            self._try_one_round(self._scheduler)
        # Once, at the start: from then on rounds are looked up in the background only.
        self._text = self._describe()

    def of(self, number: int) -> Groups:
        """Returns the hyperparameters of every parameter group in a round, counted from 0."""
        if self._scheduler is None:
            return self._rounds[0]
        while len(self._rounds) <= number:
            self._advance(self._scheduler)
        return self._rounds[number]

    def described(self) -> str:
        """Describes the schedule by a text that is the same on all ranks if and only if its first rounds are."""
        return self._text

    def _describe(self) -> str:
        if self._scheduler is None:
            return "None"
        values = [_values(groups) for groups in self._first_rounds()]
        seal = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
        shown = ", ".join(str(groups[0][0]) for groups in values[:_SHOWN])
        return f"{type(self._scheduler).__name__} ({shown}, ...; {len(values)} rounds: {seal})"

    def _first_rounds(self) -> list[Groups]:
        # Some end before, such as OneCycleLR: then the rounds that they have are compared.
        with suppress(ValueError):
            self.of(_COMPARED - 1)
        return self._rounds[:_COMPARED]

    def _try_one_round(self, scheduler: LRScheduler) -> None:
        try:
            scheduler.step()
        except Exception as error:
            raise _unusable(scheduler, f"cannot be stepped by the count of rounds alone: {error}") from error
        self._rounds.append(self._carrier.hyperparameters())

    def _advance(self, scheduler: LRScheduler) -> None:
        try:
            scheduler.step()
        except Exception as error:
            raise ValueError(
                f"outer_optimizer.lr_schedule has no rate for round {len(self._rounds)}, counted from 0: {error}. Give"
                f" the {type(scheduler).__name__} as many rounds as the training has, or choose one that does not end."
            ) from error
        self._rounds.append(self._carrier.hyperparameters())


class _Carrier(Optimizer):
    """Carries hyperparameters, for a scheduler to change them."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{**_copied(group), "params": [Parameter(torch.empty(0))]} for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: there is nothing to step."""

    def hyperparameters(self) -> Groups:
        return [_copied(group) for group in self.param_groups]


def _made(make: MakeSchedule, carrier: _Carrier) -> LRScheduler:
    try:
        scheduler = make(carrier)
    except Exception as error:
        raise ValueError(
            f"outer_optimizer.lr_schedule could not make a scheduler of the outer optimizer: {error}. It is called with"
            " the optimizer alone and must return a torch scheduler; bind its other arguments with functools.partial."
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise _unusable(scheduler, "is no torch.optim.lr_scheduler.LRScheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise _unusable(scheduler, "needs a metric, which an outer step does not have")
    if scheduler.optimizer is not carrier:
        raise _unusable(scheduler, "schedules another optimizer than the one that it was given")
    # Schedulers warn if their optimizer has not stepped before them.
    carrier.step()
    return scheduler


def _unusable(scheduler: Any, reason: str) -> ValueError:
    return ValueError(
        f"outer_optimizer.lr_schedule made a {type(scheduler).__name__}, which {reason}. Give a callable from an"
        " optimizer to a scheduler that counts rounds:"
        " functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50) is one."
    )


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """Copies the hyperparameters of a parameter group. A scheduler changes tensors in place."""
    values = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def _values(groups: Groups) -> list[Sequence[Any]]:
    """Returns what torch's schedulers change in each group, as plain numbers."""
    return [[_number(group.get(key)) for key in ("lr", "momentum", "betas")] for group in groups]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value
