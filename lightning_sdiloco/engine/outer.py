"""The outer optimizer of flat float32 shards, and outer state storage on the device or host."""

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from lightning_sdiloco.algorithm.config import AN_OUTER_OPTIMIZER, Settings
from lightning_sdiloco.comm.communicator import page_locked, to_device, to_host
from lightning_sdiloco.memory import new_vector

Make = Callable[[Sequence[Tensor]], Optimizer]
MakeSchedule = Callable[[Optimizer], LRScheduler]

Hyperparameters = dict[str, Any]
"""A parameter group of a torch optimizer, without its parameters."""

OptimizerState = dict[str, Any]
"""The state that a torch optimizer stores for one parameter."""

# The number of values stepped at once. A stretch is short enough to fit in the cache and to keep
# temporary memory small, but long enough that the overhead of calls is negligible. Stretches are
# aligned for vector units.
_STRETCH = 1 << 16
_STRETCH_ON_DEVICE = 1 << 23
_ALIGNED = 1 << 10

MOMENTUM = "momentum_buffer"
"""The key under which torch's SGD stores the momentum."""

# The hyperparameters for which `nesterov_step` is used. A schedule may change any of them.
_NESTEROV = {"dampening": 0, "weight_decay": 0, "nesterov": True, "maximize": False}


# The storage of outer state between a landing and the next launch


class OuterStorage:
    """Storage that keeps tensors on their device. Stored tensors are never modified.

    Attributes:
        prefetches: Whether loading is so slow that it should start before the launch.
    """

    prefetches = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def store(self, values: Tensor) -> Tensor:
        """Stores a tensor that will not be modified again. This method may wait for the device."""
        return values

    def store_copy(self, values: Tensor) -> Tensor:
        """Stores a copy of a tensor. This method may wait for the device."""
        return values.detach().to(self.device, copy=True)

    def load(self, stored: Tensor) -> Tensor:
        """Returns a stored tensor on the device. Do not modify it; it is not always a copy."""
        return stored

    def prefetch(self, stored: Tensor) -> Callable[[], Tensor]:
        """Starts loading a tensor asynchronously. The returned function waits for the tensor and
        returns it.
        """
        return lambda: stored


class OnHost(OuterStorage):
    """Storage in page-locked host memory, so that the device holds only fragments that are in
    flight or about to launch.
    """

    prefetches = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies = torch.get_device_module(device).Stream(device=device)

    @override
    def store(self, values: Tensor) -> Tensor:
        return to_host(values)

    @override
    def store_copy(self, values: Tensor) -> Tensor:
        values = values.detach()
        if values.device.type != "cpu":
            return to_host(values)
        return page_locked(values.shape, values.dtype, self.device).copy_(values)

    @override
    def load(self, stored: Tensor) -> Tensor:
        return to_device(stored, self.device)

    @override
    def prefetch(self, stored: Tensor) -> Callable[[], Tensor]:
        """Copies a tensor on a separate stream into memory of the caller's stream."""
        module = torch.get_device_module(self.device)
        copies = self._copies
        values = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        # The caller's stream may still be using the tensor that previously occupied this memory.
        copies.wait_stream(module.current_stream(self.device))
        with module.stream(copies):
            values.copy_(stored, non_blocking=True)
            done = module.Event()
            done.record(copies)
        # If the copy is never used, its memory must not be reused before the copy is complete.
        values.record_stream(copies)

        def take() -> Tensor:
            module.current_stream(values.device).wait_event(done)
            return values

        return take


def storage_for(device: torch.device, offload: bool | str) -> OuterStorage:
    """Chooses the storage of outer state. State on a CPU is never offloaded."""
    if offload == "auto":
        offload = device.type == "cuda"
    if offload and device.type != "cpu":
        return OnHost(device)
    return OuterStorage(device)


# The outer step


class OuterState(NamedTuple):
    """A shard's outer parameters, their optimizer state, and the number of completed rounds."""

    values: Tensor
    state: OptimizerState
    rounds: int
    lr: float = 0.0
    direction_norm: float = nan

    def moved(self, move: Callable[[Tensor], Tensor]) -> "OuterState":
        """Moves the values and the elementwise entries of the optimizer's state."""
        state = dict(self.state)
        for key, entry in self.state.items():
            if is_elementwise(entry, self.values):
                state[key] = move(entry)
        return self._replace(values=move(self.values), state=state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state on the host. Do not modify the tensors, because, on a CPU, they are not
        copies.
        """
        state = dict(self.state)
        for key, entry in self.state.items():
            if isinstance(entry, Tensor):
                state[key] = entry.to("cpu")
        return {"outer": self.values.to("cpu"), "state": state, "rounds": self.rounds}

    @staticmethod
    def of(state: Mapping[str, Any]) -> "OuterState":
        """Restores a state from its `state_dict` without copying tensors."""
        return OuterState(state["outer"], state["state"], state["rounds"])


class ShardOptimizer:
    """The outer optimizer of all fragments, which steps their shards with a single torch optimizer.

    Attributes:
        described: Descriptions of the optimizer and the schedule, which are equal on all ranks if
            and only if their settings are equal.
        summary: A description of the optimizer for users, with the learning rate and momentum
            before any schedule is applied.
        highest_rate: The highest learning rate across all parameter groups and rounds, or infinity
            if the optimizer has no learning rate.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],
        make: Make,
        make_schedule: MakeSchedule | None = None,
        storage: OuterStorage | None = None,
        is_nesterov: bool = False,
        dense_momentum: float | None = None,
    ) -> None:
        _check_elementwise(make, len(shards))
        self._storage = storage or OuterStorage(shards[0].device)
        self._is_nesterov = is_nesterov
        # The upper limit of the momentum during the dense beginning, or None for no limit.
        self._dense_momentum = dense_momentum
        parameters = [Parameter(shard) for shard in shards]
        self._optimizer = make(parameters)
        self._group_of = _groups_of(self._optimizer, parameters)
        self._initial = list[OuterState]()
        for parameter, shard in zip(parameters, shards, strict=True):
            self._initial.append(
                OuterState(shard, dict(self._optimizer.state.get(parameter, {})), 0)
            )
        # The optimizer receives its parameters and their state separately for each step.
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["params"] = []
        self._rates = Rates(self._optimizer, make_schedule)
        # The optimizer is described now, because later, only the thread that takes outer steps may
        # read it.
        groups = _copied(self._optimizer)
        name = type(self._optimizer).__name__
        self.summary = _summary(name, groups)
        self.highest_rate = self._rates.highest
        self.described = {
            "outer_optimizer": f"{name}({groups})",
            "outer_optimizer.lr_schedule": self._rates.described,
        }
        self._counts_on_device = [
            bool(group.get("capturable") or group.get("fused")) for group in groups
        ]

    def take_initial(self) -> list[OuterState]:
        """Returns the initial outer state of each fragment and releases it from the optimizer."""
        initial = self._initial
        self._initial = []
        return initial

    def step(
        self,
        fragment: int,
        before: OuterState,
        values: Tensor,
        gradient: Tensor,
        *,
        is_dense: bool = False,
    ) -> OuterState:
        """Returns the outer state of a fragment on the device after an outer step, and overwrites
        the gradient.

        The rounds of the dense beginning together count as the first round of the schedule.
        """
        group = self._rates.of(0 if is_dense else before.rounds)[self._group_of[fragment]]
        if is_dense and self._dense_momentum is not None:
            group = {**group, "momentum": min(group["momentum"], self._dense_momentum)}
        is_nesterov = self._is_nesterov and _NESTEROV.items() <= group.items()
        is_on_host = values.device.type == "cpu"
        if is_nesterov and is_on_host and group["momentum"]:
            momentum = before.state.get(MOMENTUM)
            momentum = nesterov_step(values, gradient, momentum, group["lr"], group["momentum"])
            state = {MOMENTUM: momentum}
        else:
            state = self._step_in_stretches(group, values, gradient, before.state)
        rounds = max(1, before.rounds) if is_dense else before.rounds + 1
        return OuterState(gradient, state, rounds, float(group.get("lr", nan)))

    def _step_in_stretches(
        self, group: Hyperparameters, values: Tensor, gradient: Tensor, before: OptimizerState
    ) -> OptimizerState:
        """Steps one stretch at a time, overwrites the gradient and returns the new state."""
        state = _StateInStretches(before, values, self._storage)
        pieces = stretches(values.numel(), values.device)
        # All stretches share one buffer, because the host's allocator would retain many short-lived
        # copies. The first stretch is the longest.
        scratch = new_vector(pieces[0].stop if pieces else 0, values.device)
        for piece in pieces:
            copied = scratch[: piece.stop - piece.start].copy_(values[piece])
            loaded = state.load(piece)
            parameter, stepped = self._stepped(group, copied, gradient[piece], dict(loaded))
            state.store(piece, loaded, stepped)
            # This comes last, because the state may be the gradient itself.
            gradient[piece] = parameter
        return state.full

    def _stepped(
        self, group: Hyperparameters, values: Tensor, gradient: Tensor, state: OptimizerState
    ) -> tuple[Tensor, OptimizerState]:
        """Steps values and their state in place with a parameter group's hyperparameters."""
        parameter = Parameter(values)
        parameter.grad = gradient
        # The step uses the user's optimizer rather than a copy, because torch copies neither its
        # hooks nor the attributes of a subclass. During a step, the optimizer has one parameter.
        # Afterwards, all of its attributes are restored. This also undoes changes to attributes of
        # a subclass. Such attributes belong to no fragment, so they would carry over from one
        # fragment to another and would be missing from checkpoints. The test of hooks and
        # attributes in tests/engine/test_reference.py fails if either measure is missing.
        optimizer = self._optimizer
        attributes = dict(vars(optimizer))
        optimizer.param_groups = [{**group, "params": [parameter]}]
        optimizer.state = defaultdict(dict, {parameter: state})
        try:
            with torch.enable_grad():
                optimizer.step()
            return parameter.detach(), dict(optimizer.state[parameter])
        finally:
            optimizer.__dict__ = attributes

    def load(self, fragment: int, state: OuterState) -> OuterState:
        # As in torch, step counts are on the host unless the optimizer counts on the device.
        on_device = self._counts_on_device[self._group_of[fragment]]
        count_device = self._storage.device if on_device else torch.device("cpu")
        moved = state.moved(self._storage.store_copy)
        for key, entry in state.state.items():
            if isinstance(entry, Tensor) and not is_elementwise(entry, state.values):
                moved.state[key] = entry.detach().to(count_device, copy=True)
        return moved


class _StateInStretches:
    """The optimizer state of a shard that is stepped one stretch at a time.

    Attributes:
        full: The new state, which is complete once all stretches are stored.
    """

    def __init__(self, before: OptimizerState, values: Tensor, storage: OuterStorage) -> None:
        self._before = before
        self._values = values
        self._storage = storage
        self._vectors: dict[str, Tensor] = {}
        self.full: OptimizerState = {}

    def load(self, piece: slice) -> OptimizerState:
        """Copies the state of a stretch. Elementwise entries are copied to their final location."""
        state: OptimizerState = {}
        for key, entry in self._before.items():
            if is_elementwise(entry, self._values):
                place = self._place(key, entry.dtype, piece)
                state[key] = place.copy_(self._storage.load(entry[piece]))
            else:
                state[key] = copy.deepcopy(entry)
        return state

    def store(self, piece: slice, loaded: OptimizerState, stepped: OptimizerState) -> None:
        """Stores the state of a stretch after its step. Entries that are not elementwise are taken
        from the last stretch.
        """
        self.full = dict(stepped)
        for key, entry in stepped.items():
            if is_elementwise(entry, self._values[piece]):
                # Most optimizers update the loaded tensors, which are already in their final
                # location.
                if entry is not loaded.get(key):
                    self._place(key, entry.dtype, piece).copy_(entry)
                self.full[key] = self._vectors[key]

    def _place(self, key: str, dtype: torch.dtype, piece: slice) -> Tensor:
        if key not in self._vectors:
            self._vectors[key] = new_vector(len(self._values), self._values.device, dtype)
        return self._vectors[key][piece]


def outer_optimizer_for(
    settings: Settings, shards: Sequence[Tensor], storage: OuterStorage | None = None
) -> ShardOptimizer:
    """Creates the outer optimizer that the settings specify."""
    outer = settings.outer
    if outer.make is not None:
        return ShardOptimizer(shards, outer.make, outer.lr_schedule, storage)
    momentum = settings.numbers["outer_momentum"]
    nesterov = partial(
        SGD, lr=settings.numbers["outer_lr"], momentum=momentum, nesterov=momentum > 0
    )
    return ShardOptimizer(
        shards,
        nesterov,
        outer.lr_schedule,
        storage,
        is_nesterov=True,
        dense_momentum=settings.dense_momentum,
    )


@torch.no_grad()
def nesterov_step(
    values: Tensor, gradient: Tensor, momentum: Tensor | None, lr: float, factor: float
) -> Tensor:
    """Takes a step that is bit-identical to a step of torch's SGD, but copies nothing. Overwrites
    the gradient and returns the new momentum. ``momentum`` is None before the first step.
    """
    pieces = stretches(values.numel(), values.device)
    new_momentum = new_vector(values.numel(), values.device)
    for piece in pieces:
        direction = gradient[piece]
        momentum_part = new_momentum[piece]
        if momentum is None:
            momentum_part.copy_(direction)
        else:
            torch.mul(momentum[piece], factor, out=momentum_part).add_(direction)
        direction.add_(momentum_part, alpha=factor)
        torch.add(values[piece], direction, alpha=-lr, out=direction)
    return new_momentum


def _groups_of(optimizer: Optimizer, parameters: list[Parameter]) -> list[int]:
    """Returns the index of each parameter's group."""
    groups = dict[int, int]()
    for index, group in enumerate(optimizer.param_groups):
        groups |= {id(parameter): index for parameter in group["params"]}
    missing = [index for index, parameter in enumerate(parameters) if id(parameter) not in groups]
    if missing or len(groups) != len(parameters):
        raise ValueError(
            f"outer_optimizer returned an optimizer for {len(groups)} tensors that does not include"
            f" the shards {missing} of {len(parameters)}. The optimizer must include exactly the"
            " shards that outer_optimizer receives. Pass the shards to the optimizer unchanged."
        )
    return [groups[id(parameter)] for parameter in parameters]


def _check_elementwise(make: Make, count: int) -> None:
    """Checks that stepping small vectors as a whole and in two halves produces the same values."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator) for _ in range(count)]
    gradients = list[list[Tensor]]()
    # The gradients have different scales, because a clipping optimizer changes only large
    # gradients.
    for scale in (1.0, 1e3, 1e-3):
        gradients.append([scale * torch.randn(64, generator=generator) for _ in range(count)])
    try:
        unsplit = _tried(make, values, gradients, slice(None))
        left = _tried(make, values, gradients, slice(0, 32))
        right = _tried(make, values, gradients, slice(32, 64))
    except Exception as error:
        raise ValueError(
            f"outer_optimizer could not take a step with flat float32 shards: {error}. The"
            " callable receives a list of one-dimensional tensors, one per fragment, and must"
            " return a torch.optim.Optimizer whose step() needs no closure. Choose an optimizer"
            f" such as {AN_OUTER_OPTIMIZER}."
        ) from error
    for stepped, *halves in zip(unsplit, left, right, strict=True):
        if not torch.allclose(stepped, torch.cat(halves), rtol=1e-5, atol=1e-7):
            raise ValueError(
                "outer_optimizer does not work elementwise, because stepping a vector as a whole"
                " and in two halves gave different values. An outer optimizer receives flat"
                " shards of fragments, whose shapes and norms are meaningless. Choose an"
                f" optimizer that treats each value separately, such as {AN_OUTER_OPTIMIZER}."
            )


def _tried(
    make: Make, values: list[Tensor], gradients: list[list[Tensor]], part: slice
) -> list[Tensor]:
    """Steps a part of each vector with a new optimizer, once for each row of gradients."""
    parameters = [Parameter(vector[part].clone()) for vector in values]
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"it returned {optimizer!r}, which is not a torch.optim.Optimizer")
    for row in gradients:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient[part].clone()
        with torch.enable_grad():
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def is_elementwise(entry: object, values: Tensor) -> bool:
    """Returns whether an entry of an optimizer's state has one value per value of the shard."""
    return isinstance(entry, Tensor) and entry.shape == values.shape


def stretches(numel: int, device: torch.device) -> list[slice]:
    """Divides a shard into stretches that are stepped one after the other."""
    # On a CPU, stretches fit in the cache. On an accelerator, they are long enough to hide kernel
    # launches. All stretches have about the same length, so that none is so short that its state
    # could be mistaken for the state of the whole shard.
    longest = _STRETCH if device.type == "cpu" else _STRETCH_ON_DEVICE
    count = -(-numel // longest)
    length = max(1, -(-numel // max(1, count) // _ALIGNED)) * _ALIGNED
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


# The hyperparameters of each round

Groups = list[Hyperparameters]

# The number of rounds over which schedules are compared.
_COMPARED = 1000
_SHOWN = 4

# The hyperparameters that matter most, in the order in which they are shown.
_SHOWN_CHOICES = ("lr", "momentum", "nesterov", "betas")


def _summary(name: str, groups: Groups) -> str:
    """Formats an optimizer's name with the learning rates and momenta of its parameter groups."""
    shown = []
    for key in _SHOWN_CHOICES:
        texts = list[str]()
        for group in groups:
            value = _number(group.get(key))
            text = format(value, "g") if isinstance(value, float) else str(value)
            if text not in ("None", "False", *texts):
                texts.append(text)
        if texts:
            shown.append(f"{key}={' and '.join(texts)}")
    return f"{name}({', '.join(shown)})"


class Rates:
    """The hyperparameters of the outer optimizer in each round.

    The hyperparameters are looked up by round, because the fragments of a round take their outer
    steps at different times.

    Attributes:
        described: A description that is equal on all ranks if and only if the first rounds of their
            schedules are equal.
        highest: The highest learning rate of these rounds, or infinity if the optimizer has no
            learning rate.

    Examples:
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> sgd = torch.optim.SGD([torch.zeros(3)], lr=0.4)
        >>> warm_up = Rates(sgd, lambda optimizer: LinearLR(optimizer, start_factor=0.25, total_iters=3))
        >>> [warm_up.of(number)[0]["lr"] for number in (0, 1, 2, 3, 1)]
        [0.1, 0.2, 0.30000000000000004, 0.4, 0.2]
    """

    def __init__(self, optimizer: Optimizer, make: MakeSchedule | None) -> None:
        self._carrier = _Carrier(optimizer)
        self._scheduler = None if make is None else _scheduler_from(make, self._carrier)
        self._rounds = [_copied(self._carrier)]
        self.described = "None"
        if self._scheduler is not None:
            try:
                self._scheduler.step()
            except Exception as error:
                reason = f"cannot be stepped by counting rounds: {error}"
                raise _unusable(self._scheduler, reason) from error
            self._rounds.append(_copied(self._carrier))
            # For schedules that end earlier, such as OneCycleLR, only the existing rounds are
            # compared. The comparison happens once at the start, because later, only the background
            # looks up rounds.
            with suppress(ValueError):
                self.of(_COMPARED - 1)
            self.described = _described(self._scheduler, self._rounds[:_COMPARED])
        groups = chain.from_iterable(self._rounds)
        rates = [_number(group["lr"]) for group in groups if "lr" in group]
        self.highest = max(rates, default=inf)

    def of(self, number: int) -> Groups:
        """Returns the hyperparameters of each parameter group in a round, counting from 0."""
        if self._scheduler is None:
            return self._rounds[0]
        while len(self._rounds) <= number:
            try:
                self._scheduler.step()
            except Exception as error:
                raise ValueError(
                    "outer_optimizer.lr_schedule has no learning rate for round"
                    f" {len(self._rounds)}, counting from 0: {error}. Configure the"
                    f" {type(self._scheduler).__name__} for the full number of rounds, or choose"
                    " a scheduler that never ends."
                ) from error
            self._rounds.append(_copied(self._carrier))
        return self._rounds[number]


class _Carrier(Optimizer):
    """A stand-in for the outer optimizer. Schedulers change its hyperparameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{**group, "params": [Parameter(torch.empty(0))]} for group in _copied(optimizer)]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        ...


def _copied(optimizer: Optimizer) -> Groups:
    """Copies all parameter groups' hyperparameters, because schedulers may change them in place."""
    groups = Groups()
    for group in optimizer.param_groups:
        copied = dict(group)
        del copied["params"]
        for key, value in copied.items():
            if isinstance(value, Tensor):
                copied[key] = value.clone()
        groups.append(copied)
    return groups


def _described(scheduler: LRScheduler, rounds: Sequence[Groups]) -> str:
    """Describes a schedule by its first learning rates and a digest of the hyperparameters that it
    changes.
    """
    numbers = [list(map(_scheduled_numbers, groups)) for groups in rounds]
    seal = hashlib.sha256(repr(numbers).encode()).hexdigest()[:8]
    shown = ", ".join(str(groups[0][0]) for groups in numbers[:_SHOWN])
    return f"{type(scheduler).__name__} ({shown}, ...; {len(numbers)} rounds: {seal})"


def _scheduled_numbers(group: Hyperparameters) -> list[object]:
    return [_number(group.get(key)) for key in ("lr", "momentum", "betas")]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _scheduler_from(make: MakeSchedule, carrier: _Carrier) -> LRScheduler:
    try:
        scheduler = make(carrier)
    except Exception as error:
        raise ValueError(
            "outer_optimizer.lr_schedule could not create a scheduler for the outer optimizer:"
            f" {error}. The callable receives only the optimizer and must return a torch"
            " scheduler. Bind other arguments with functools.partial."
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise _unusable(scheduler, "is not a torch.optim.lr_scheduler.LRScheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise _unusable(scheduler, "needs a metric, which an outer step does not have")
    if scheduler.optimizer is not carrier:
        raise _unusable(scheduler, "schedules a different optimizer from the one that it received")
    # Schedulers warn if their optimizer has not stepped before them.
    carrier.step()
    return scheduler


def _unusable(scheduler: object, reason: str) -> ValueError:
    return ValueError(
        f"outer_optimizer.lr_schedule returned a {type(scheduler).__name__}, which {reason}."
        " Pass a callable that takes an optimizer and returns a scheduler that counts rounds,"
        " such as functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50)."
    )
