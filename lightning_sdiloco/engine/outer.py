"""The outer optimizer over flat float32 shards, one per fragment, and where its state rests:
device or host.
"""

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
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

# Values that are stepped at once: few, so that they stay in the cache and the allocator holds
# little of what an optimizer makes meanwhile; enough that the calls cost nothing. Stretches begin
# where a vector unit would begin too.
_STRETCH = 1 << 16
_STRETCH_ON_DEVICE = 1 << 23
_ALIGNED = 1 << 10

MOMENTUM = "momentum_buffer"
"""The key under which torch's SGD keeps the momentum."""

# What hyperparameters are where `nesterov_step` is the step; a schedule may change any.
_NESTEROV = {"dampening": 0, "weight_decay": 0, "nesterov": True, "maximize": False}


# Where outer state rests between a landing and the next launch


class OuterStorage:
    """Stores tensors of a device, where they are. A stored tensor is never written to.

    Attributes:
        prefetches: Whether loading takes so long that it begins before the launch.
    """

    prefetches = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def store(self, values: Tensor) -> Tensor:
        """Stores a tensor that is not written to from here on. May wait for the device."""
        return values

    def store_copy(self, values: Tensor) -> Tensor:
        """Stores a copy of a tensor. May wait for the device."""
        return values.detach().to(self.device, copy=True)

    def load(self, stored: Tensor) -> Tensor:
        """Returns a stored tensor on the device, perhaps the same tensor. It must not be written
        to.
        """
        return stored

    def prefetch(self, stored: Tensor) -> Callable[[], Tensor]:
        """Starts to load a tensor beside what this thread gave the device; returns what waits for
        it and returns it.
        """
        return lambda: stored


class OnHost(OuterStorage):
    """Stores in page-locked memory of the host: the device holds what is in flight or about to be
    launched.
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
        """Copies on its own stream, into memory of the stream that asked for it."""
        module = torch.get_device_module(self.device)
        copies = self._copies
        values = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        # What had this memory before may still be at work in the stream that asks.
        copies.wait_stream(module.current_stream(self.device))
        with module.stream(copies):
            values.copy_(stored, non_blocking=True)
            done = module.Event()
            done.record(copies)
        # If it is not taken, its memory must not go to another tensor before the copy is done.
        values.record_stream(copies)

        def taken() -> Tensor:
            module.current_stream(values.device).wait_event(done)
            return values

        return taken


def storage_for(device: torch.device, offload: bool | str) -> OuterStorage:
    """Chooses where outer state rests. On a CPU, device and host are the same memory."""
    on_host = device.type == "cuda" if offload == "auto" else offload
    return OnHost(device) if on_host and device.type != "cpu" else OuterStorage(device)


# The outer step


class OuterState(NamedTuple):
    """The outer parameters of a shard, the state of their optimizer, and the next round of its
    schedule, from 0.
    """

    values: Tensor
    state: dict[str, Any]
    rounds: int
    lr: float = 0.0
    direction_norm: float = nan

    def moved(self, move: Callable[[Tensor], Tensor]) -> "OuterState":
        """Returns the state with its values, and everything that the optimizer keeps for each of
        them, moved.
        """
        state = {
            key: move(kept) if is_elementwise(kept, self.values) else kept
            for key, kept in self.state.items()
        }
        return self._replace(values=move(self.values), state=state)

    def state_dict(self) -> dict[str, Any]:
        """Returns it on the host. On a CPU the tensors are its own: do not write to them."""
        state = {
            key: kept.to("cpu") if isinstance(kept, Tensor) else kept
            for key, kept in self.state.items()
        }
        return {"outer": self.values.to("cpu"), "state": state, "rounds": self.rounds}

    @staticmethod
    def of(state: Mapping[str, Any]) -> "OuterState":
        """Reads what `state_dict` returned, without copying it."""
        return OuterState(state["outer"], state["state"], state["rounds"])


class ShardOptimizer:
    """Steps the shards of all fragments with the one torch optimizer that the user's factory makes.

    Attributes:
        described: Optimizer and schedule, each as text that is the same on all ranks if and only if
            its choices are.
        summary: The optimizer for people, with rate and momentum before a schedule changes them.
        highest_rate: The highest rate of all parameter groups and rounds; infinite if there is
            none.
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
        # The most momentum in rounds of the dense beginning; None: as in all others.
        self._dense_momentum = dense_momentum
        parameters = [Parameter(shard) for shard in shards]
        self._optimizer = make(parameters)
        self._group_of = _groups_of(self._optimizer, parameters)
        kept = [dict(self._optimizer.state.get(parameter, {})) for parameter in parameters]
        self._initial = [
            OuterState(shard, state, 0) for shard, state in zip(shards, kept, strict=True)
        ]
        # It forgets its parameters, which are given back to it for one step at a time.
        self._optimizer.state.clear()
        groups = self._optimizer.param_groups
        for group in groups:
            group["params"] = []
        self._rates = Rates(self._optimizer, make_schedule)
        # Noted once: from then on only the thread that steps may look at the optimizer.
        choices = [
            {key: value for key, value in group.items() if key != "params"} for group in groups
        ]
        self.summary = _summary(type(self._optimizer).__name__, choices)
        self.highest_rate = self._rates.highest
        self.described = {
            "outer_optimizer": f"{type(self._optimizer).__name__}({choices})",
            "outer_optimizer.lr_schedule": self._rates.described,
        }
        self._counts_on_device = [
            bool(group.get("capturable") or group.get("fused")) for group in groups
        ]

    def take_initial(self) -> list[OuterState]:
        """Returns the outer state of every fragment before its first step. The optimizer does not
        keep it.
        """
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
        """Returns what an outer step makes of a fragment, on the device. Of what is given it takes
        the gradient.

        All rounds of the dense beginning together are the first round of the schedule.
        """
        group = self._rates.of(0 if is_dense else before.rounds)[self._group_of[fragment]]
        if is_dense and self._dense_momentum is not None:
            group = {**group, "momentum": min(group["momentum"], self._dense_momentum)}
        momentum = before.state.get(MOMENTUM)
        is_nesterov = self._is_nesterov and _NESTEROV.items() <= group.items()
        if (
            is_nesterov
            and momentum is not None
            and group["momentum"]
            and values.device.type == "cpu"
        ):
            state = {
                MOMENTUM: nesterov_step(values, gradient, momentum, group["lr"], group["momentum"])
            }
        else:
            state = self._step_in_stretches(group, values, gradient, before.state)
        rounds = max(1, before.rounds) if is_dense else before.rounds + 1
        return OuterState(gradient, state, rounds, float(group.get("lr", nan)))

    def _step_in_stretches(
        self, group: dict[str, Any], values: Tensor, gradient: Tensor, before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Steps one stretch after the other, overwrites the gradient, and returns the new state."""
        whole = dict[str, Any]()
        vectors = dict[str, Tensor]()
        scratch = values.new_empty(0)

        def place(key: str, like: Tensor, where: slice) -> Tensor:
            """Returns where what is kept of a stretch stays: it is copied there, and stepped
            there.
            """
            if key not in vectors:
                vectors[key] = new_vector(len(values), values.device, like.dtype)
            return vectors[key][where]

        for where in stretches(values.numel(), values.device):
            given = {
                key: place(key, kept, where).copy_(self._storage.load(kept[where]))
                if is_elementwise(kept, values)
                else copy.deepcopy(kept)
                for key, kept in before.items()
            }
            # One copy serves all stretches: the host's allocator would hold many short-lived ones.
            if scratch.numel() < where.stop - where.start:
                scratch = new_vector(where.stop - where.start, values.device)
            copied = scratch[: where.stop - where.start].copy_(values[where])
            parameter, kept = self._stepped(group, copied, gradient[where], dict(given))
            whole = dict(kept)
            for key, value in kept.items():
                if is_elementwise(value, copied):
                    # Most optimizers write to what they are given.
                    if value is not given.get(key):
                        place(key, value, where).copy_(value)
                    whole[key] = vectors[key]
            # Only now: the state may be the gradient itself.
            gradient[where] = parameter
        return whole

    def _stepped(
        self, group: dict[str, Any], values: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Steps some values and their state, to which it writes, with the hyperparameters of a
        group.
        """
        parameter = Parameter(values)
        parameter.grad = gradient
        # The optimizer is the user's own and no copy: torch copies neither its hooks nor further
        # attributes. What a step leaves in these is forgotten: it is no state of a fragment, and
        # would be missing in a checkpoint.
        optimizer = self._optimizer
        attributes = dict(vars(self._optimizer))
        optimizer.param_groups = [{**group, "params": [parameter]}]
        optimizer.state = defaultdict(dict, {parameter: state})
        try:
            with torch.enable_grad():
                optimizer.step()
            return parameter.detach(), dict(optimizer.state[parameter])
        finally:
            optimizer.__dict__ = attributes

    def load(self, fragment: int, state: OuterState) -> OuterState:
        # A count of steps is on the host, as torch has it, unless the optimizer counts on the
        # device.
        on_device = self._counts_on_device[self._group_of[fragment]]
        counts_on = self._storage.device if on_device else torch.device("cpu")
        moved = state.moved(self._storage.store_copy)
        counts = {
            key: kept.detach().to(counts_on, copy=True)
            for key, kept in state.state.items()
            if isinstance(kept, Tensor) and not is_elementwise(kept, state.values)
        }
        return moved._replace(state={**moved.state, **counts})


def outer_optimizer_for(
    settings: Settings, shards: Sequence[Tensor], storage: OuterStorage | None = None
) -> ShardOptimizer:
    """Makes the outer optimizer that the settings ask for; see `ShardOptimizer` for arguments and
    errors.
    """
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
    values: Tensor, gradient: Tensor, momentum: Tensor, lr: float, factor: float
) -> Tensor:
    """Makes a step with the bits of torch's SGD, but copies nothing; overwrites the gradient,
    returns the momentum.
    """
    after = new_vector(values.numel(), values.device)
    for where in stretches(values.numel(), values.device):
        moved = gradient[where]
        kept = after[where]
        torch.mul(momentum[where], factor, out=kept).add_(moved)
        moved.add_(kept, alpha=factor)
        torch.add(values[where], moved, alpha=-lr, out=moved)
    return after


def _groups_of(optimizer: Optimizer, parameters: list[Parameter]) -> list[int]:
    index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [
        fragment for fragment, parameter in enumerate(parameters) if id(parameter) not in index
    ]
    if missing or len(index) != len(parameters):
        raise ValueError(
            f"outer_optimizer made an optimizer over {len(index)} tensors that leaves out the"
            f" shards {missing} of {len(parameters)}. It must hold exactly the shards that it is"
            " given. Pass them on unchanged."
        )
    return [index[id(parameter)] for parameter in parameters]


def _check_elementwise(make: Make, count: int) -> None:
    """Steps small vectors whole and in two halves: an optimizer that works elementwise returns the
    same values.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator) for _ in range(count)]
    # At several scales: an optimizer that clips does so for large gradients only.
    scales = (1.0, 1e3, 1e-3)
    gradients = [
        [scale * torch.randn(64, generator=generator) for _ in range(count)] for scale in scales
    ]
    try:
        whole = _tried(make, values, gradients, slice(None))
        halves = [_tried(make, values, gradients, half) for half in (slice(0, 32), slice(32, 64))]
    except Exception as error:
        raise ValueError(
            f"outer_optimizer could not step flat float32 shards: {error}. It is called with a"
            " list of one-dimensional tensors, one per fragment, and must return a"
            " torch.optim.Optimizer whose step() needs no closure. Choose one, such as"
            f" {AN_OUTER_OPTIMIZER}."
        ) from error
    joined = [torch.cat(parts) for parts in zip(*halves, strict=True)]
    if not all(
        torch.allclose(one, other, rtol=1e-5, atol=1e-7)
        for one, other in zip(whole, joined, strict=True)
    ):
        raise ValueError(
            "outer_optimizer does not work elementwise: stepping a vector whole and in two halves"
            " gave different values. It sees flat shards of fragments, whose shapes and norms mean"
            " nothing. Choose an optimizer that treats each value separately, such as"
            f" {AN_OUTER_OPTIMIZER}."
        )


def _tried(
    make: Make, values: list[Tensor], gradients: list[list[Tensor]], part: slice
) -> list[Tensor]:
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
    """Returns whether something that an optimizer keeps of a shard has an entry for every value,
    as a momentum does.
    """
    return isinstance(kept, Tensor) and kept.shape == values.shape


def stretches(numel: int, device: torch.device) -> list[slice]:
    """Cuts a shard into stretches that are stepped one after the other: one, unless it is long."""
    # On a CPU they stay in the cache; elsewhere they are long enough to hide the launch of kernels.
    # They are of about the same length, so that none is so short that a state of it could be taken
    # for one of the whole.
    longest = _STRETCH if device.type == "cpu" else _STRETCH_ON_DEVICE
    count = -(-numel // longest)
    length = max(1, -(-numel // max(1, count) // _ALIGNED)) * _ALIGNED
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


# The hyperparameters of each round

Groups = list[dict[str, Any]]

# Schedules are compared by what they do in this many rounds.
_COMPARED = 1000
_SHOWN = 4


# What an outer step depends on most, in the order in which it is shown.
_SHOWN_CHOICES = ("lr", "momentum", "nesterov", "betas")


def _summary(name: str, groups: Groups) -> str:
    """Returns the name of an optimizer with the rates and momenta of its parameter groups, each
    value once.
    """
    shown = []
    for key in _SHOWN_CHOICES:
        values = [_number(group.get(key)) for group in groups]
        texts = [format(value, "g") if isinstance(value, float) else str(value) for value in values]
        chosen = [text for text in dict.fromkeys(texts) if text not in ("None", "False")]
        if chosen:
            shown.append(f"{key}={' and '.join(chosen)}")
    return f"{name}({', '.join(shown)})"


class Rates:
    """Looks up the hyperparameters of the outer optimizer, round by round.

    They are looked up rather than stepped through, because the fragments of a round step one after
    the other.

    Attributes:
        described: A text that is the same on all ranks if and only if the first rounds of the
            schedule are.
        highest: The highest rate of these rounds; infinite if there is none.

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
        self._rounds = [_copied(self._carrier)]
        self.described = "None"
        if self._scheduler is not None:
            try:
                self._scheduler.step()
            except Exception as error:
                reason = f"cannot be stepped by counting rounds: {error}"
                raise _unusable(self._scheduler, reason) from error
            self._rounds.append(_copied(self._carrier))
            # Some end before, such as OneCycleLR: then the rounds that they have are compared.
            # Once, at the start: from then on rounds are looked up in the background only.
            with suppress(ValueError):
                self.of(_COMPARED - 1)
            # What torch's schedulers change in each group, as plain numbers.
            values = [
                [
                    [_number(group.get(key)) for key in ("lr", "momentum", "betas")]
                    for group in groups
                ]
                for groups in self._rounds[:_COMPARED]
            ]
            seal = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
            shown = ", ".join(str(groups[0][0]) for groups in values[:_SHOWN])
            self.described = (
                f"{type(self._scheduler).__name__} ({shown}, ...; {len(values)} rounds: {seal})"
            )
        rates = [
            _number(group["lr"]) for groups in self._rounds for group in groups if "lr" in group
        ]
        self.highest = max(rates, default=inf)

    def of(self, number: int) -> Groups:
        """Returns the hyperparameters of every parameter group in a round, counted from 0."""
        if self._scheduler is None:
            return self._rounds[0]
        while len(self._rounds) <= number:
            try:
                self._scheduler.step()
            except Exception as error:
                raise ValueError(
                    f"outer_optimizer.lr_schedule has no rate for round {len(self._rounds)},"
                    f" counted from 0: {error}. Give the {type(self._scheduler).__name__} as many"
                    " rounds as you train, or choose one without an end."
                ) from error
            self._rounds.append(_copied(self._carrier))
        return self._rounds[number]


class _Carrier(Optimizer):
    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{**group, "params": [Parameter(torch.empty(0))]} for group in _copied(optimizer)]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        ...


def _copied(optimizer: Optimizer) -> Groups:
    """Copies the hyperparameters of all parameter groups. A scheduler changes tensors in place."""
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _made(make: MakeSchedule, carrier: _Carrier) -> LRScheduler:
    try:
        scheduler = make(carrier)
    except Exception as error:
        raise ValueError(
            "outer_optimizer.lr_schedule could not make a scheduler of the outer optimizer:"
            f" {error}. It is called with the optimizer alone and must return a torch scheduler;"
            " bind its other arguments with functools.partial."
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise _unusable(scheduler, "is not a torch.optim.lr_scheduler.LRScheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise _unusable(scheduler, "needs a metric, which an outer step does not have")
    if scheduler.optimizer is not carrier:
        raise _unusable(scheduler, "schedules another optimizer than the one it was given")
    # Schedulers warn if their optimizer has not stepped before them.
    carrier.step()
    return scheduler


def _unusable(scheduler: Any, reason: str) -> ValueError:
    return ValueError(
        f"outer_optimizer.lr_schedule made a {type(scheduler).__name__}, which {reason}. Give a"
        " callable from an optimizer to a scheduler that counts rounds:"
        " functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50) is one."
    )
