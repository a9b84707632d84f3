"""Finds the copies of the weights that inner optimizers keep, and updates them together with the
weights.

[Note: copies of the weights] Some optimizers step a copy of the weights and then derive the
parameters from that copy. Examples are the float32 master weights of bfloat16 parameters, z in
schedule-free optimizers, and the slow weights in Lookahead. If a landing changed only the
parameters, the optimizer's next step would undo the landing. A landing therefore moves the copies
and the parameters by the same amount, in float32. For a schedule-free optimizer, which trains on y
= (1 - beta) z + beta x, the landing thus moves x by the same amount. When outer values permanently
overwrite parameters, they also overwrite the copies.

Copies are detected from the optimizer's behaviour. Comparing values is not sufficient, because z
differs from the parameter after one step. A new optimizer of the same class and with the same
settings trains a few small tensors twice with the same gradients. In the second run, the tensors
are shifted after two steps. If the shift shrinks, the optimizer keeps a copy. If shifting a state
entry with similar values affects the tensors, that entry is a copy. If the shift is not fully
preserved even when all copies are shifted, the optimizer is refused, because moving these entries
would not be sufficient. The learning rate is tiny and weight decay is disabled, so nothing else
changes a shift.

While the outer model is shown, a schedule-free optimizer's ``eval()`` and ``train()`` would mix
each group's z into the model. For this reason, the state entries temporarily refer to the shown
parameters so that each value is interpolated with itself and remains unchanged. After training, the
entries are new tensors with the final parameters, from which further training can start.
"""

import inspect
import logging
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.shards import digest, is_sharded, local

_log = logging.getLogger(__name__)

_ATTRIBUTE = "weight_copies"
_MODE = "train_mode"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

# This is long enough for slow weights that are updated every 30 steps.
_STEPS_BEFORE = 2
_STEPS_AFTER = 32
_TINY_RATE = 1e-6
# Beyond this distance, the small tensors have been trained despite the tiny learning rate, and
# differences are meaningless.
_FARTHEST = 0.02
# State entries that are further from the parameters, such as moments, are not copies.
_NEAR = 0.05
# The rounding tolerances for a shift by 1 in float32 and in shorter types.
_TOLERANCE = 2e-3
_TOLERANCE_OF_SHORT = 3e-2


class WeightCopies:
    """The copies of parameters that inner optimizers keep; see [Note: copies of the weights].

    Raises:
        ValueError: If an optimizer keeps a copy outside its state.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        # The optimizers that keep copies, and the names of their copies by optimizer id.
        self._keepers = list[Any]()
        self._names = dict[int, tuple[str, ...]]()
        for optimizer in optimizers:
            names = copies_in(optimizer)
            if names:
                self._keepers.append(optimizer)
                self._names[id(optimizer)] = names
        # The parameters of the fragments by name.
        self._parameters: Mapping[str, Tensor] = {}
        # The copies whose state entries are replaced while another model is shown.
        self._hidden: list[_Copy] = []
        # The modes of the optimizers before another model was shown, or None while no other model
        # is shown.
        self._modes_before: list[bool] | None = None
        # Whether training has ended. Copies are then kept unchanged for a longer run.
        self._has_ended = False
        # Whether the state is known to have an entry for each name that a user specified.
        self._is_checked = False

    @property
    def exist(self) -> bool:
        """Whether any optimizer keeps copies."""
        return bool(self._keepers)

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the fragments' parameters by name."""
        self._parameters = parameters

    def of(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns this rank's part of each copy of each parameter."""
        copies = [list[Tensor]() for _ in parameters]
        if self._keepers and not self._has_ended:
            self._check_names()
            for of_parameter, parameter in zip(copies, parameters, strict=True):
                of_parameter += [local(c.tensor) for c in self._copies_of("", parameter)]
        return copies

    # While another model is shown, and after the end

    def hide(self) -> None:
        """Replaces copies with the parameters in all optimizers that switch between two sets of
        weights.
        """
        self._modes_before = self._modes()
        self._hidden = [copy for copy in self._all() if copy.is_switched]
        for copy in self._hidden:
            copy.state[copy.key] = copy.like(copy.parameter.detach())

    def show(self) -> None:
        """Restores the optimizers' copies and modes. If any optimizer was switched to training in
        the meantime, all optimizers are switched to training.
        """
        for copy in self._hidden:
            copy.state[copy.key] = copy.tensor
        self._hidden = []
        modes_after = self._modes()
        modes_before = self._modes_before or []
        self._modes_before = None
        self._set_modes(modes_before)
        modes = zip(modes_before, modes_after, strict=True)
        if any(after and not before for before, after in modes):
            for part in self._parts():
                if callable(getattr(part, "train", None)):
                    part.train()

    def freeze(self) -> None:
        """Keeps the copies unchanged during the last landings so that a longer run can use them."""
        self._has_ended = True

    def end(self) -> None:
        """Replaces the copies with the final parameters."""
        self._hidden = list(self._all())
        for copy in self._hidden:
            copy.state[copy.key] = copy.like(copy.parameter.detach()).clone()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the modes and all copies that an optimizer's own state does not restore exactly.

        While another model is shown, the optimizer's state contains replacements for copies. In
        addition, torch casts restored state to the parameter's dtype.
        """
        if not self._keepers:
            return {}
        copies = list[_Copy]()
        for copy in self._all():
            if self._has_ended or copy.tensor.dtype != copy.parameter.dtype:
                copies.append(copy)
        # The hidden copies come last so that they overwrite their replacements.
        copies += self._hidden
        values: dict[str, dict[str, Tensor]] = {}
        for copy in copies:
            values.setdefault(copy.name, {})[copy.key] = local(copy.tensor).to("cpu")
        modes = self._modes() if self._modes_before is None else self._modes_before
        return {"weight_copies": {"modes": list(modes), "values": values}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict` after the optimizers have been restored."""
        saved = state.get("weight_copies")
        if saved is None or not self._keepers:
            return
        for copy in self._all():
            values = saved["values"].get(copy.name, {}).get(copy.key)
            if values is None:
                continue
            if values.dtype != copy.tensor.dtype:
                copy.state[copy.key] = copy.tensor.to(values.dtype)
            local(copy.state[copy.key]).copy_(values)
        if len(saved["modes"]) == len(self._modes()):
            self._set_modes(saved["modes"])

    def align(self, topology: Topology) -> None:
        """Broadcasts rank 0's copies to all ranks after the parameters have been broadcast. All
        ranks must call this method.

        Optimizers that copied the weights when they were created have outdated copies.
        """
        if not self._keepers:
            return
        copies = {f"{copy.name} {copy.key}": copy.tensor for copy in self._all()}
        digests = {name: digest(local(tensor)) for name, tensor in copies.items()}
        ranks = topology.world.all_gather_object(digests)
        for name in ranks[0]:
            held = [rank.get(name) for rank in ranks]
            if None not in held and len(set(held)) > 1:
                group = topology.peers if is_sharded(copies[name]) else topology.world
                group.broadcast(local(copies[name]))

    def renew(self, parameters: Mapping[str, Tensor]) -> None:
        """Updates the copies of parameters that have been overwritten."""
        for name, parameter in parameters.items():
            for copy in self._copies_of(name, parameter):
                if copy.tensor.shape == parameter.shape:
                    local(copy.tensor).copy_(local(parameter))

    def take(self, source: "WeightCopies") -> None:
        """Loads the copies that the same optimizers keep in another worker group."""
        values = {(copy.name, copy.key): copy.tensor for copy in source._all()}
        for copy in self._all():
            if (copy.name, copy.key) in values:
                local(copy.tensor).copy_(local(values[copy.name, copy.key]))

    # The places of copies and modes

    def _all(self) -> "Iterator[_Copy]":
        if self._keepers:
            for name, parameter in self._parameters.items():
                yield from self._copies_of(name, parameter)

    def _copies_of(self, name: str, parameter: Tensor) -> "Iterator[_Copy]":
        for optimizer in self._keepers:
            is_switched = any(callable(getattr(part, "eval", None)) for part in parts_of(optimizer))
            for state in _states_of(optimizer, parameter):
                for key in self._names[id(optimizer)]:
                    if isinstance(state.get(key), Tensor):
                        yield _Copy(name, parameter, state, key, state[key], is_switched)

    def _check_names(self) -> None:
        """Once a state exists, refuses a user-specified name that no parameter's state contains."""
        if self._is_checked:
            return
        self._is_checked = True
        for optimizer in self._keepers:
            if getattr(optimizer, _ATTRIBUTE, None) is None:
                continue
            keys = set[str]()
            for parameter in self._parameters.values():
                for state in _states_of(optimizer, parameter):
                    keys.update(map(str, state))
            if not keys:
                self._is_checked = False
                continue
            missing = [name for name in self._names[id(optimizer)] if name not in keys]
            if missing:
                raise ValueError(
                    f"{type(optimizer).__name__}.{_ATTRIBUTE} contains {missing[0]!r}, but no"
                    f" parameter's state has such an entry. Available entries: {sorted(keys)}."
                    " Specify the names of all entries that are copies of the weights."
                )

    def _with_modes(self) -> Iterator[dict[str, Any]]:
        """Yields the parameter groups or attribute dictionaries in which optimizers store their
        training mode.
        """
        for part in self._parts():
            for holder in (*part.param_groups, vars(part)):
                if isinstance(holder.get(_MODE), bool):
                    yield holder

    def _parts(self) -> list[Any]:
        return [part for optimizer in self._keepers for part in parts_of(optimizer)]

    def _modes(self) -> list[bool]:
        return [holder[_MODE] for holder in self._with_modes()]

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for holder, mode in zip(self._with_modes(), modes, strict=True):
            holder[_MODE] = mode


class _Copy(NamedTuple):
    name: str
    parameter: Tensor
    state: dict[str, Any]
    key: str
    tensor: Tensor
    is_switched: bool
    """Whether the optimizer has ``eval()`` and ``train()`` methods, which change the parameters."""

    def like(self, values: Tensor) -> Tensor:
        """Converts values of the parameter to the dtype and sharding of this copy."""
        held = values if is_sharded(self.tensor) else local(values)
        return held.to(self.tensor.dtype)


def parts_of(optimizer: Any) -> list[Any]:
    """Returns an optimizer and all optimizers inside it, such as a wrapped optimizer."""
    parts = [optimizer]
    for part in parts:
        for value in vars(part).values():
            for member in value if isinstance(value, (list, tuple)) else [value]:
                if is_optimizer(member) and all(member is not part for part in parts):
                    parts.append(member)
    return parts


def is_optimizer(value: Any) -> bool:
    """Returns whether a value is an optimizer or has the attributes that Lightning requires."""
    names = ("param_groups", "state", "step", "zero_grad")
    return isinstance(value, Optimizer) or all(hasattr(value, name) for name in names)


def _states_of(optimizer: Any, parameter: Tensor) -> list[dict[str, Any]]:
    """Returns all states that an optimizer and its parts keep for a parameter, once each."""
    states: dict[int, dict[str, Any]] = {}
    for part in parts_of(optimizer):
        state = part.state.get(parameter)
        if state:
            states[id(state)] = state
    return list(states.values())


# Which optimizers keep copies


def copies_in(optimizer: Any) -> tuple[str, ...]:
    """Returns the names of all state entries that are copies of the weights; see [Note: copies of
    the weights].

    Raises:
        ValueError: If the optimizer keeps a copy outside its state.
    """
    named = getattr(optimizer, _ATTRIBUTE, None)
    if named is not None:
        return (named,) if isinstance(named, str) else tuple(named)
    # None of torch's optimizers keeps such a copy.
    if type(optimizer).__module__.startswith("torch.optim.") or not is_optimizer(optimizer):
        return ()
    finding = _finding(optimizer)
    if finding is None:
        names: list[str] = []
        for part in parts_of(optimizer)[1:]:
            names += copies_in(part)
        return tuple(dict.fromkeys(names))
    if finding.is_elsewhere:
        raise ValueError(
            f"{type(optimizer).__name__} keeps its own copy of the weights, which would undo every"
            " landing, and the copy was not found in optimizer.state[parameter]. If the copy"
            " contains float32 weights for parameters of lower precision, train float32 parameters"
            " with precision='bf16-mixed' and the plain optimizer. Otherwise, keep the copy in"
            " optimizer.state[parameter], or specify which entries are copies, as in"
            f" optimizer.{_ATTRIBUTE} = ('z',). If there are no copies, set this attribute to ()."
        )
    return finding.names


class _Finding(NamedTuple):
    names: tuple[str, ...] = ()
    """The names of the state entries that are copies."""
    is_elsewhere: bool = False
    """Whether the optimizer keeps a copy outside these entries."""


class _Small(NamedTuple):
    """The description of a small tensor that represents a group's parameters."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def initial(self) -> Tensor:
        count = torch.Size(self.shape).numel()
        values = torch.linspace(-0.5, 0.4, count, device=self.device)
        return values.view(self.shape).to(self.dtype)

    def gradient(self) -> Tensor:
        count = torch.Size(self.shape).numel()
        values = torch.cos(2 * torch.arange(count, device=self.device) + 0.5)
        return values.view(self.shape).to(self.dtype)


@dataclass
class _Recipe:
    """A description from which an optimizer of the same class and settings is built for small
    tensors.
    """

    kind: type
    arguments: dict[str, Any]
    groups: list[dict[str, Any]]

    @property
    def is_exact(self) -> bool:
        """Whether all parameters have at least float32 precision."""
        return all(small.dtype.itemsize >= 4 for group in self.groups for small in group["params"])

    def in_float32(self) -> "_Recipe":
        groups = []
        for group in self.groups:
            smalls = [small._replace(dtype=torch.float32) for small in group["params"]]
            groups.append({**group, "params": smalls})
        return _Recipe(self.kind, self.arguments, groups)

    def build(self) -> "_Twin":
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        groups = []
        for group in self.groups:
            smalls = group["params"]
            members = [torch.nn.Parameter(small.initial()) for small in smalls]
            groups.append({**group, "params": members})
            parameters += members
            gradients += [small.gradient() for small in smalls]
        optimizer = self._make(groups)
        for group in optimizer.param_groups:
            _overwrite_number(group, "lr", _TINY_RATE)
            _overwrite_number(group, "weight_decay", 0.0)
        for part in parts_of(optimizer):
            if callable(getattr(part, "train", None)):
                part.train()
        takes_closure = "closure" in inspect.signature(optimizer.step).parameters
        return _Twin(optimizer, parameters, gradients, takes_closure)

    def _make(self, groups: list[dict[str, Any]]) -> Any:
        arguments = {}
        for name, value in self.arguments.items():
            if value is _GROUPS:
                value = groups
            elif isinstance(value, _Recipe):
                value = value._make(groups)
            arguments[name] = value
        return self.kind(**arguments)


def _overwrite_number(group: dict[str, Any], key: str, number: float) -> None:
    if isinstance(group.get(key), Tensor):
        group[key] = torch.full_like(group[key], number)
    elif isinstance(group.get(key), (int, float)):
        group[key] = number


_PARAMETERS = {"params", "parameters", "param_groups"}
"""The argument names under which constructors accept parameters."""

_GROUPS = object()
"""A placeholder for the parameter groups in a constructor's arguments."""


class _Twin(NamedTuple):
    """An optimizer for small tensors."""

    optimizer: Any
    parameters: list[Tensor]
    gradients: list[Tensor]
    takes_closure: bool

    def step(self) -> None:
        def closure() -> Tensor:
            losses = []
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient.clone()
                losses.append((parameter.detach().double() * gradient.double()).sum())
            return torch.stack(losses).sum()

        closure()
        if self.takes_closure:
            self.optimizer.step(closure)
        else:
            self.optimizer.step()

    def entries(self) -> dict[str, list[Tensor]]:
        """Collects all state entries whose shapes match those of the parameters."""
        entries: dict[str, list[Tensor]] = {}
        for parameter in self.parameters:
            for state in _states_of(self.optimizer, parameter):
                for key, entry in state.items():
                    if not isinstance(entry, Tensor) or not entry.is_floating_point():
                        continue
                    if entry.shape == parameter.shape:
                        entries.setdefault(key, []).append(entry)
        return entries

    def similar_entries(self) -> list[str]:
        """Returns the names of all state entries whose values are close to the parameters."""
        similar = []
        for name, entries in self.entries().items():
            pairs = zip(self.parameters, entries, strict=False)
            if all(_is_near(parameter, entry, _NEAR) for parameter, entry in pairs):
                similar.append(name)
        return similar

    def values(self) -> Tensor:
        return torch.cat([parameter.detach().double().flatten() for parameter in self.parameters])


_by_recipe: dict[tuple[type, str], _Finding | None] = {}
"""Cached results, keyed by the optimizer's class and settings."""


def _finding(optimizer: Any) -> _Finding | None:
    """Finds the copies that an optimizer keeps, or returns None if no small twin can be built or
    trained.
    """
    try:
        recipe = _recipe_for(optimizer)
    except _UnknownArgumentError as error:
        _log.debug(
            "Whether %s keeps a copy of the weights is not known: %s",
            type(optimizer).__name__,
            error,
        )
        return None
    key = recipe.kind, repr(recipe)
    if key not in _by_recipe:
        _by_recipe[key] = _try_out(recipe)
    return _by_recipe[key]


def _try_out(recipe: _Recipe) -> _Finding | None:
    accelerators = set[torch.device]()
    for group in recipe.groups:
        accelerators |= {small.device for small in group["params"] if small.device.type != "cpu"}
    kind = next(iter(accelerators)).type if accelerators else "cuda"
    python_state = random.getstate()
    try:
        with (
            torch.random.fork_rng(list(accelerators), device_type=kind),
            warnings.catch_warnings(),
            torch.inference_mode(False),
        ):
            warnings.simplefilter("ignore")
            return _play(recipe)
    # Optimizers from other libraries may raise any error when they train unusual tensors.
    except Exception as error:
        _log.debug(
            "Whether %s keeps a copy of the weights is not known: %r", recipe.kind.__name__, error
        )
        return None
    finally:
        random.setstate(python_state)


def _play(recipe: _Recipe) -> _Finding | None:
    """Compares the training of small tensors with and without a shift; see [Note: copies of the
    weights].
    """
    tolerance = _TOLERANCE if recipe.is_exact else _TOLERANCE_OF_SHORT
    twin = recipe.build()
    initial = twin.values()
    for _ in range(_STEPS_BEFORE):
        twin.step()
    if not _is_near(twin.values(), initial, _FARTHEST):
        return None
    unshifted = _trained(recipe, None)
    if not _is_near(unshifted, initial, _FARTHEST):
        return None if recipe.is_exact else _play(recipe.in_float32())
    # The share of a shift by 1 that is preserved in each value.
    share = _trained(recipe, "") - unshifted
    if bool(((share - 1).abs() <= tolerance).all()):
        return _Finding()
    if bool((share > 1 + tolerance).any()):
        # The optimizer's steps depend on the values of the parameters.
        return None
    copies = dict[str, Tensor]()
    for name in twin.similar_entries():
        entry_share = _trained(recipe, name) - unshifted
        if bool((entry_share.abs() > tolerance).any()):
            copies[name] = entry_share
    total_share = share + sum(copies.values())
    is_whole = bool(((total_share - 1).abs() <= tolerance * (1 + len(copies))).all())
    if copies and is_whole:
        return _Finding(tuple(copies))
    if not recipe.is_exact:
        # Repeated interpolation in a short type causes repeated rounding, so the search is repeated
        # with float32 parameters.
        finding = _play(recipe.in_float32())
        if finding is not None and finding.names:
            return finding
    return _Finding(is_elsewhere=True)


def _is_near(values: Tensor, expected: Tensor, distance: float) -> bool:
    return bool(((values - expected).abs() < distance).all())


def _trained(recipe: _Recipe, shifted: str | None) -> Tensor:
    """Trains small tensors and shifts an entry of their state by 1 after two steps.

    Args:
        recipe: The description of the optimizer.
        shifted: The name of the state entry to shift, "" for the parameters themselves, or None for
            no shift.
    """
    torch.manual_seed(0)
    twin = recipe.build()
    for _ in range(_STEPS_BEFORE):
        twin.step()
    if shifted is not None:
        for tensor in twin.entries()[shifted] if shifted else twin.parameters:
            tensor.detach().add_(1)
    for _ in range(_STEPS_AFTER):
        twin.step()
    return twin.values()


# Recipes


class _UnknownArgumentError(Exception):
    """An error for a constructor argument whose value is unknown."""


def _recipe_for(optimizer: Any) -> _Recipe:
    """Looks up an optimizer's constructor arguments in its defaults and attributes."""
    arguments: dict[str, Any] = {}
    accepted = _accepted(type(optimizer))
    takes_groups = False
    for name, argument in accepted.items():
        if name in _PARAMETERS:
            arguments[name] = _GROUPS
            takes_groups = True
            continue
        value = _value_of(name, optimizer)
        if is_optimizer(value):
            # Constructors that also take parameters expect the class of the inner optimizer, as SAM
            # does.
            arguments[name] = type(value) if takes_groups else _recipe_for(value)
        elif _is_plain(value):
            arguments[name] = _number(value)
        elif argument.default is argument.empty:
            raise _UnknownArgumentError(f"its argument {name!r}")
    if not takes_groups and not any(isinstance(value, _Recipe) for value in arguments.values()):
        raise _UnknownArgumentError("its parameters")
    return _Recipe(type(optimizer), arguments, _small_groups(optimizer, set(accepted)))


def _value_of(name: str, optimizer: Any) -> Any:
    for values in (getattr(optimizer, "defaults", {}), vars(optimizer)):
        for key in (name, f"_{name}"):
            if key in values:
                return values[key]
    return inspect.Parameter.empty


def _accepted(kind: type) -> dict[str, inspect.Parameter]:
    """Returns the named arguments of a constructor and of all base constructors that receive its
    other arguments.
    """
    accepted: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        hands_on = False
        for argument in [*inspect.signature(base.__init__).parameters.values()][1:]:  # type: ignore[misc]
            if argument.kind is argument.VAR_KEYWORD:
                hands_on = True
            elif argument.kind is not argument.VAR_POSITIONAL:
                accepted.setdefault(argument.name, argument)
        if not hands_on:
            break
    return accepted


def _small_groups(optimizer: Any, accepted: set[str]) -> list[dict[str, Any]]:
    # Entries that a constructor does not accept, such as a step count, are reset. Some constructors
    # accept whole groups.
    takes_whole_groups = accepted <= _PARAMETERS
    groups = []
    for group in optimizer.param_groups:
        small_group = dict[str, Any]()
        for key, value in group.items():
            if (takes_whole_groups or key in accepted) and _is_plain(value):
                small_group[key] = _number(value)
        small_group.pop("initial_lr", None)
        held = [local(parameter) for parameter in group["params"]]
        smalls = [_Small((3,) * t.ndim, t.dtype, t.device) for t in held if t.numel()]
        if smalls:
            groups.append({**small_group, "params": list(dict.fromkeys(smalls))})
    return groups


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _is_plain(value: Any) -> bool:
    """Returns whether a value is plain data that two optimizers may share."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, _PLAIN)
