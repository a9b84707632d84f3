"""Converts the parameters of a fragment to and from the flat float32 shard that a rank exchanges.

Only this module depends on how a model stores its parameters, for example as DTensors with FSDP2 or
tensor parallelism. DTensors are recognised by their attributes so that models without DTensors need
no additional imports.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.algorithm.merge import LandingRule
from lightning_sdiloco.algorithm.partition import Fragment, Parameter
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.outer import OptimizerState, OuterState, is_elementwise
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.memory import new_vector

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def unwrapped(model: nn.Module) -> nn.Module:
    """Removes DistributedDataParallel, torch.compile and Fabric's wrapper from a model."""
    while True:
        # A wrapper from another library may provide the module as a property. A child named
        # "module" is part of the user's model.
        has_property = isinstance(getattr(type(model), "module", None), property)
        wraps = has_property or isinstance(model, DistributedDataParallel)
        inner = getattr(model, "module" if wraps else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """Returns the name of a parameter without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trainable parameters by name in the order of ``named_parameters()``, without
    duplicates.
    """
    reshard(model)
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def described(parameters: dict[str, Tensor]) -> list[Parameter]:
    """Returns the name, size in bytes and number of dimensions of each parameter."""
    return [Parameter(name, p.numel() * p.element_size(), p.ndim) for name, p in parameters.items()]


def aliases(model: nn.Module) -> dict[str, str]:
    """Maps each additional name of a tied trainable parameter to its first name."""
    first_names: dict[int, str] = {}
    further_names = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_name(full_name)
        first_name = first_names.setdefault(id(parameter), name)
        if parameter.requires_grad and first_name != name:
            further_names[name] = first_name
    return further_names


_HOW_TO_CHANGE = (
    "With Lightning, freeze, unfreeze or replace parameters between epochs, in"
    " on_train_epoch_start at the latest. With Fabric, set up the model and its optimizers again."
    " In your own training loop, call recut() afterwards on all ranks."
)


class CutModel:
    """A model's trainable parameters and modules as they were when it was divided into fragments.

    The methods detect later changes. A parameter counts as unchanged if the object and its shape
    are the same. The ``data`` of a parameter may be replaced, and its name may change, for example
    if a layer is inserted into an ``nn.Sequential``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = trainable(model)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._identities = _identities(self._parameters)
        self._modules = {id(module): (name, module) for name, module in modules_of(model).items()}
        self._sharded = sharded_modules(model)

    def is_same(self) -> bool:
        """Returns whether the same parameters are trainable with the same names and dtypes."""
        return self._identities == _identities(trainable(self.model))

    def new(self) -> dict[str, Tensor]:
        """Returns the trainable parameters that are in no fragment or have been reshaped."""
        parameters = trainable(self.model)
        return {name: p for name, p in parameters.items() if self.former_name(p) is None}

    def frozen(self) -> set[str]:
        """Returns the names of parameters that are no longer trainable, including removed ones."""
        frozen = {name for name, p in self._parameters.items() if not p.requires_grad}
        return {name for name in frozen if self.former_name(self._parameters[name]) is not None}

    def former_name(self, parameter: Tensor) -> str | None:
        """Returns the name that a parameter had when the model was divided, or None if the
        parameter is new or reshaped.
        """
        name = self._names.get(id(parameter))
        if name is None or parameter.shape != self._identities[name].shape:
            return None
        return name

    def has_parameters_of(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer steps any parameter of the fragments."""
        for group in optimizer.param_groups:
            if any(self.former_name(parameter) is not None for parameter in group["params"]):
                return True
        return False

    def former_parameter(self, name: str) -> Tensor | None:
        """Returns the parameter that had this name when the model was divided, or None if there was
        none.
        """
        return self._parameters.get(name)

    def former_place(self, name: str) -> str:
        """Returns the name that a buffer had when the model was divided, or "" if its module is
        new.

        Args:
            name: The current name.
        """
        module_name, _, key = name.rpartition(".")
        module = modules_of(self.model)[module_name]
        if id(module) not in self._modules:
            return ""
        former_name, _ = self._modules[id(module)]
        return f"{former_name}.{key}" if former_name else key

    def described(self) -> str:
        """Describes which parameters have changed, ignoring changes to names and dtypes."""
        parameters = {clean_name(name): p for name, p in self.model.named_parameters()}
        present = set(map(id, parameters.values()))
        changed = defaultdict[str, list[str]](list)
        for name in self.new():
            former = self._parameters.get(name)
            # The former parameter with this name may have a different name now.
            was_moved = former is not parameters[name] and id(former) in present
            if former is None or was_moved:
                changed["become trainable"].append(name)
            else:
                changed["been replaced or reshaped"].append(name)
        for name, former in self._parameters.items():
            if name in parameters and not parameters[name].requires_grad:
                changed["been frozen"].append(name)
            elif name not in parameters and id(former) not in present:
                changed["been removed"].append(name)
        return ", ".join([_counted(names, verb) for verb, names in changed.items()])

    def reshard(self) -> None:
        """Makes FSDP2 free gathered parameters before parameters are read or written; see
        `reshard`.
        """
        for module in self._sharded:
            module.reshard()

    def require_coverage(self) -> None:
        """Refuses a model with a trainable parameter that is in no fragment."""
        self.reshard()
        parameters = list[Tensor | None]()
        visited = set[int]()
        unvisited = list[nn.Module | None]([self.model])
        while unvisited:
            module = unvisited.pop()
            if module is None:
                continue
            parameters += module._parameters.values()
            if module._modules and id(module) not in visited:
                visited.add(id(module))
                unvisited += module._modules.values()
        uncovered = [p for p in parameters if p is not None and id(p) not in self._names]
        if any(parameter.requires_grad for parameter in uncovered):
            raise AgreementError(
                f"Since the model was divided into fragments, {self.described()}. New parameters"
                f" are in no fragment, so the groups would not synchronise them. {_HOW_TO_CHANGE}"
            )

    def require_devices(self) -> None:
        """Refuses parameters on a device that the model did not use when it was divided."""
        devices = {identity.device for identity in self._identities.values()}
        for name, parameter in trainable(self.model).items():
            if parameter.device not in devices:
                raise ValueError(
                    f"The parameter {name!r} is on {str(parameter.device)!r}, but the engine"
                    f" trains the model on {str(next(iter(devices)))!r}. Create new layers on"
                    " that device with .to(device), and move the model only before training."
                )


class _Identity(NamedTuple):
    """The properties that identify a parameter."""

    object_id: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _identities(parameters: Mapping[str, Tensor]) -> dict[str, _Identity]:
    return {n: _Identity(id(p), p.shape, p.dtype, p.device) for n, p in parameters.items()}


def _counted(names: Sequence[str], verb: str) -> str:
    if len(names) == 1:
        return f"the parameter {names[0]!r} has {verb}"
    return f"{len(names)} parameters have {verb}, such as {names[0]!r}"


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules by name without the prefix that torch.compile adds."""
    return {clean_name(f"{name}.")[:-1]: module for name, module in model.named_modules()}


Runs = list[tuple[int, int]]
"""Positions along one dimension, as half-open ranges ``(start, end)``."""


class ShardSpec(NamedTuple):
    """The part of a parameter that a rank has, and the values in it that the rank exchanges.

    Attributes:
        shape: The shape of the whole parameter.
        runs: For each dimension, the positions of the rank's values in the order in which they are
            stored.
        first: The position of the first exchanged value among the rank's values.
        length: The number of exchanged values. Ranks that have the same values each exchange a part
            of them.
        holders: The ranks of the group that have the same values, in ascending order.

    Examples:
        >>> spec = ShardSpec((4, 2), [[(2, 4)], [(0, 2)]], first=0, length=4, holders=[1])
        >>> spec.extract(torch.arange(8.0)).tolist()
        [4.0, 5.0, 6.0, 7.0]
    """

    shape: tuple[int, ...]
    runs: list[Runs]
    first: int
    length: int
    holders: list[int]

    @property
    def _holds_all(self) -> bool:
        return self.runs == [[(0, size)] for size in self.shape]

    def extract(self, full: Tensor) -> Tensor:
        """Extracts the exchanged values from a flat vector of the whole parameter."""
        held = full
        if not self._holds_all:
            held = full.view(self.shape)[self._indices()].reshape(-1)
        return held[self.first : self.first + self.length]

    def insert(self, full: Tensor, values: Tensor) -> None:
        """Writes the exchanged values into a flat vector of the whole parameter."""
        exchanged = slice(self.first, self.first + self.length)
        if self._holds_all:
            full[exchanged] = values
        elif self.length:
            # Indexing creates a copy.
            held = full.view(self.shape)[self._indices()]
            held.view(-1)[exchanged] = values
            full.view(self.shape)[self._indices()] = held

    def _indices(self) -> tuple[Tensor, ...]:
        """Returns the positions along each dimension in shapes that torch can broadcast."""
        indices = []
        for dimension, runs in enumerate(self.runs):
            positions = [torch.arange(0), *(torch.arange(start, end) for start, end in runs)]
            shape = [1] * len(self.runs)
            shape[dimension] = -1
            indices.append(torch.cat(positions).view(shape))
        return tuple(indices)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Returns whether a tensor is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Returns a detached view of this rank's part of a tensor."""
    detached = tensor.detach()
    return detached.to_local() if is_sharded(detached) else detached


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Creates a tensor that is sharded like ``tensor`` and has the given values on this rank."""
    sharded = torch.empty_like(tensor.detach(), dtype=values.dtype)
    local(sharded).copy_(values)
    return sharded


def described_sharding(tensor: Tensor) -> str:
    if not is_sharded(tensor):
        return ""
    return f" as {tensor.placements} on {tuple(tensor.device_mesh.shape)} ranks"


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns all modules that FSDP2 has sharded. The search is slow, because a model may have
    thousands of modules.
    """
    modules = []
    for module in model.modules():
        # Modules may have attributes with any name, so this check uses the names of their classes.
        if "FSDPModule" in [kind.__name__ for kind in type(module).__mro__]:
            modules.append(module)
    return modules


def reshard(model: nn.Module) -> None:
    """Makes FSDP2 free the unsharded parameters that it keeps after a forward pass."""
    for module in sharded_modules(model):
        module.reshard()


def part_of(tensor: Tensor, full: Tensor) -> Tensor:
    """Extracts this rank's part of a sharded tensor from the whole tensor."""
    runs = held_runs(tensor)
    spec = ShardSpec(tuple(tensor.shape), runs, first=0, length=_numel(runs), holders=[])
    return spec.extract(full.reshape(-1)).view(local(tensor).shape)


def held_runs(tensor: Tensor) -> list[Runs]:
    """Returns the positions of this rank's part of a tensor along each dimension."""
    positions = [list(range(size)) for size in tensor.shape]
    if is_sharded(tensor):
        positions = _held_positions(tensor, positions)
    return [_joined(along) for along in positions]


def _held_positions(sharded: "DTensor", positions: list[list[int]]) -> list[list[int]]:
    """Returns the positions of this rank's part of a DTensor along each dimension."""
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a mesh of other ranks shards nothing here"
    held = list(positions)
    for placement, ranks, rank in zip(sharded.placements, mesh.shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise ValueError(f"with the placement {placement}, no rank has complete values")
        pieces = _chunks(held[placement.dim], getattr(placement, "split_factor", 1))
        held[placement.dim] = []
        for piece in pieces:
            chunks = _chunks(piece, ranks)
            if rank < len(chunks):
                held[placement.dim] += chunks[rank]
    expected_shape = tuple(map(len, held))
    shape = tuple(local(sharded).shape)
    if expected_shape != shape:
        raise ValueError(
            f"according to torch, it is sharded{described_sharding(sharded)}, but this rank has"
            f" the shape {shape} of {tuple(sharded.shape)} instead of {expected_shape}"
        )
    return held


def _joined(positions: list[int]) -> Runs:
    """Combines consecutive positions into runs."""
    runs = Runs()
    for position in positions:
        start = position
        if runs and runs[-1][1] == position:
            start, _ = runs.pop()
        runs.append((start, position + 1))
    return runs


def divided(shape: Iterable[int], ranks: Sequence[list[Runs]]) -> list[ShardSpec]:
    """Divides a parameter so that each value is exchanged by exactly one of the ranks that have it.
    Returns a spec for each rank.

    Examples:
        >>> [spec.length for spec in divided([5], [[[(0, 3)]], [[(3, 5)]]])]
        [3, 2]
        >>> [(spec.first, spec.length) for spec in divided([5], [[[(0, 5)]], [[(0, 5)]]])]
        [(0, 3), (3, 2)]
    """
    shape = tuple(shape)
    specs = []
    for rank, runs in enumerate(ranks):
        holders = [holder for holder, held in enumerate(ranks) if held == runs]
        numel = _numel(runs)
        length = -(-numel // len(holders))
        first = min(holders.index(rank) * length, numel)
        specs.append(ShardSpec(shape, runs, first, min(length, numel - first), holders))
    exchanged = sum(spec.length for spec in specs)
    if exchanged != prod(shape):
        raise ValueError(
            f"its ranks have {exchanged} of its {prod(shape)} values, because some values are"
            " missing or belong to overlapping parts"
        )
    return specs


def shard_specs(
    parameters: Mapping[str, Tensor], group: Communicator, members: range
) -> dict[str, list[ShardSpec]]:
    """Determines which values of a parameter each rank has and exchanges. In-group collective."""
    held = {name: _runs_or_refusal(parameter, members) for name, parameter in parameters.items()}
    ranks = group.all_gather_object(held)
    specs = {}
    for name, parameter in parameters.items():
        try:
            runs = list[list[Runs]]()
            for rank in ranks:
                runs_or_refusal = rank[name]
                if isinstance(runs_or_refusal, str):
                    raise ValueError(runs_or_refusal)
                runs.append(runs_or_refusal)
            specs[name] = divided(parameter.shape, runs)
        except ValueError as error:
            raise ValueError(
                f"The parameter {name!r} cannot be exchanged: {error}. Shard the parameter with"
                " fully_shard or parallelize_module, using self.device_mesh in configure_model."
            ) from error
    return specs


def _runs_or_refusal(parameter: Tensor, members: range) -> list[Runs] | str:
    """Returns the positions of this rank's values, or the reason why the parameter cannot be
    exchanged.
    """
    outside = sorted(set(ranks_of(parameter)) - set(members))
    if outside:
        return (
            f"it is sharded over multiple worker groups, because ranks {outside} belong to other"
            " groups"
        )
    device_type = local(parameter).device.type
    if is_sharded(parameter) and device_type != parameter.device_mesh.device_type:
        return f"it is on {device_type!r}, but its mesh is on {parameter.device_mesh.device_type!r}"
    try:
        return held_runs(parameter)
    except ValueError as error:
        return str(error)


def ranks_of(tensor: Tensor) -> list[int]:
    """Returns the global ranks over which a tensor is sharded, or an empty list."""
    if not is_sharded(tensor):
        return []
    return list(map(int, tensor.device_mesh.mesh.flatten()))


def _numel(runs: list[Runs]) -> int:
    numel = 1
    for along in runs:
        numel *= sum(end - start for start, end in along)
    return numel


def _chunks(positions: list[int], count: int) -> list[list[int]]:
    """Divides positions into chunks as ``torch.chunk`` does. The last chunks may be smaller or
    missing.
    """
    length = max(1, -(-len(positions) // count))
    return [positions[start : start + length] for start in range(0, len(positions), length)]


SavedFragment = Mapping[str, Any]
"""The saved layout of a fragment; see `FragmentLayout.state_dict`."""


class OuterParameter(NamedTuple):
    """The complete outer values and outer optimizer state of one parameter, independent of
    fragments and shards.
    """

    values: Tensor
    state: OptimizerState
    rounds: int


def to_parameters(
    fragment: SavedFragment, shards: Sequence[OuterState]
) -> dict[str, OuterParameter]:
    """Splits a fragment's shards into its parameters. The shards must be in rank order.

    Examples:
        >>> shards = [OuterState(torch.tensor(part), {}, rounds=3) for part in ([1.0, 2.0], [4.0, 0.0])]
        >>> fragment = {"names": ["weight", "bias"], "sizes": [2, 1]}
        >>> {name: p.values.tolist() for name, p in to_parameters(fragment, shards).items()}
        {'weight': [1.0, 2.0], 'bias': [4.0]}
    """
    first = shards[0]
    values = _split(fragment, [shard.values for shard in shards])
    states: dict[str, OptimizerState] = {name: {} for name in values}
    for key, entry in first.state.items():
        vectors: OptimizerState = dict.fromkeys(values, entry)
        if is_elementwise(entry, first.values):
            vectors = _split(fragment, [shard.state[key] for shard in shards])
        for name, state in states.items():
            state[key] = vectors[name]
    return {name: OuterParameter(values[name], states[name], first.rounds) for name in values}


def _split(fragment: SavedFragment, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Splits one vector per rank into the parameters of a fragment."""
    names = fragment["names"]
    if "places" not in fragment:
        sizes = fragment["sizes"]
        parts = torch.cat(list(vectors))[: sum(sizes)].split(sizes)
        return {name: part.clone() for name, part in zip(names, parts, strict=True)}
    starts = [0] * len(vectors)
    full = {}
    for name, places in zip(names, fragment["places"], strict=True):
        specs = [ShardSpec(*place) for place in places]
        full[name] = vectors[0].new_zeros(prod(specs[0].shape))
        for rank, spec in enumerate(specs):
            end = starts[rank] + spec.length
            spec.insert(full[name], vectors[rank][starts[rank] : end])
            starts[rank] = end
    return full


def to_shards(
    fragment: SavedFragment, parameters: Mapping[str, Tensor], lengths: Sequence[int]
) -> list[Tensor]:
    """Divides flat parameters into shards of the given lengths; the inverse of `to_parameters`.

    Examples:
        >>> fragment = {"names": ["weight", "bias"], "sizes": [2, 1]}
        >>> parameters = {"weight": torch.tensor([1.0, 2.0]), "bias": torch.tensor([4.0])}
        >>> [shard.tolist() for shard in to_shards(fragment, parameters, [2, 2])]
        [[1.0, 2.0], [4.0, 0.0]]
    """
    if "places" not in fragment:
        full = torch.cat([parameters[name] for name in fragment["names"]])
        return list(_padded(full, sum(lengths)).split(list(lengths)))
    shards = list[Tensor]()
    for rank, length in enumerate(lengths):
        parts = list[Tensor]()
        for name, places in zip(fragment["names"], fragment["places"], strict=True):
            parts.append(ShardSpec(*places[rank]).extract(parameters[name]))
        shards.append(_padded(torch.cat(parts), length))
    return shards


class FragmentLayout(ABC):
    """The layout of a fragment's parameters in flat vectors, including the shard that this rank
    exchanges.

    Attributes:
        length: The number of values in this rank's shard.
        start: The position of this rank's shard in the whole fragment.
    """

    length: int
    start: int

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], pieces: Sequence[slice]
    ) -> None:
        self.names = tuple(names)
        self.parameters = list(parameters)
        # Finds the copies of each parameter that optimizers keep. These must change together with
        # the parameter. Set by `FragmentedModel`, and None if there are no copies.
        self.copies_of: Callable[[Sequence[Tensor]], Sequence[Sequence[Tensor]]] | None = None
        self._held: Callable[[Tensor], Tensor] = (
            local if any(map(is_sharded, parameters)) else Tensor.detach
        )
        self._shapes = [self._held(parameter).shape for parameter in parameters]
        self._numels = [shape.numel() for shape in self._shapes]
        # The slices of the parameters that are in the shard, in order, and their lengths.
        self._pieces = [(i, piece) for i, piece in enumerate(pieces) if piece.start < piece.stop]
        self._lengths = [piece.stop - piece.start for _, piece in self._pieces]
        self._end = sum(self._lengths)

    @property
    def held(self) -> list[Tensor]:
        """This rank's part of each parameter. The parts are looked up each time, because other code
        may rebind ``.data``.

        Raises:
            AgreementError: If the shape of a parameter has changed since the model was divided.
        """
        held = [self._held(parameter) for parameter in self.parameters]
        for name, tensor, shape in zip(self.names, held, self._shapes, strict=True):
            if tensor.shape != shape:
                raise AgreementError(
                    "Since the model was divided into fragments, the shape of the parameter"
                    f" {name!r} has changed from {tuple(shape)} to {tuple(tensor.shape)}."
                    f" {_HOW_TO_CHANGE}"
                )
        return held

    @property
    def _copies(self) -> Sequence[Sequence[Tensor]]:
        if self.copies_of is None:
            return [()] * len(self.parameters)
        return self.copies_of(self.parameters)

    def let_go(self) -> None:
        """Replaces reshaped parameters with tensors outside the model that flights can land on."""
        for index, shape in enumerate(self._shapes):
            parameter = self.parameters[index]
            if self._held(parameter).shape != shape:
                self.parameters[index] = torch.zeros(
                    shape, dtype=parameter.dtype, device=parameter.device
                )

    @abstractmethod
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        """Gathers all values of this rank's parts from its group's shards. In-group collective."""

    @abstractmethod
    def specs(self, ranks: int) -> Sequence[Sequence[ShardSpec]]:
        """Returns the specs of all ranks for each parameter, in the order of the parameters in
        shards.
        """

    @abstractmethod
    def shard_lengths(self, ranks: int) -> list[int]:
        """Returns the number of values in each shard of a group of ``ranks`` ranks."""

    @abstractmethod
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        """Returns the whole parameters on the host by name. In-group collective if parameters are
        sharded.
        """

    @abstractmethod
    def to_name(self, gathered: Tensor, shard: Tensor) -> Tensor:
        """Returns whichever argument `named` uses."""

    @abstractmethod
    def copied(self) -> Tensor:
        """Returns the vector that `named` reads, filled with the current values of the model."""

    @abstractmethod
    def _shard_of_whole(self, values: Sequence[Tensor]) -> Tensor:
        """Returns this rank's shard of whole parameters, padded with zeros."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the plain values that a later run needs to read the fragment's saved shards."""

    def to_shard(self, parameters: Sequence[OuterParameter]) -> OuterState:
        """Computes the outer state of this rank's shard from the outer state of all parameters in
        order.

        Elementwise entries of the optimizer's state are zero for parameters that lack them. If step
        counts differ, the largest count is used.
        """
        state: OptimizerState = {}
        keys = chain.from_iterable(parameter.state for parameter in parameters)
        for key in dict.fromkeys(keys):
            holders = [parameter for parameter in parameters if key in parameter.state]
            entries = [holder.state[key] for holder in holders]
            if any(is_elementwise(holder.state[key], holder.values) for holder in holders):
                vectors = [p.state.get(key, torch.zeros_like(p.values)) for p in parameters]
                state[key] = self._shard_of_whole(vectors)
            else:
                state[key] = entries[0] if None in entries else max(entries, key=float)
        values = self._shard_of_whole([parameter.values for parameter in parameters])
        return OuterState(values, state, max(parameter.rounds for parameter in parameters))

    @property
    def holds_float32(self) -> bool:
        """Whether the parameters can represent every float32 value."""
        return all(
            torch.promote_types(held.dtype, torch.float32) == held.dtype for held in self.held
        )

    def read(self) -> Tensor:
        return self.shard_of(self.held)

    def outer_gradient(self, outer: Tensor) -> Tensor:
        """Returns the outer parameters minus the local parameters, computed in a single pass."""
        difference = new_vector(outer.numel(), outer.device)
        held = self.held
        for (index, piece), before, part in zip(
            self._pieces, self._cut(outer), self._cut(difference), strict=True
        ):
            values = held[index].reshape(-1)[piece]
            # Values of wider types are first rounded, as in `read`.
            if torch.promote_types(values.dtype, torch.float32) != torch.float32:
                values = values.to(torch.float32)
            torch.sub(before, values, out=part)
        difference[self._end :].zero_()
        return difference

    def shard_of(self, held: Sequence[Tensor]) -> Tensor:
        """Copies this rank's shard from parameters or from the views that `split` returns."""
        shard = new_vector(self.length, held[0].device).zero_()
        for (index, piece), part in zip(self._pieces, self._cut(shard), strict=True):
            part.copy_(held[index].reshape(-1)[piece])
        return shard

    def _cut(self, shard: Tensor) -> Sequence[Tensor]:
        """Returns a view of a shard for each piece."""
        return shard[: self._end].split_with_sizes(self._lengths)

    def mask(self, names: Collection[str]) -> Tensor:
        """Returns a mask of the shard's values that belong to the named parameters."""
        masks = list[Tensor]()
        for name, held in zip(self.names, self.held, strict=True):
            masks.append(torch.full_like(held, name in names))
        return self.shard_of(masks).bool()

    def split(self, gathered: Tensor) -> list[Tensor]:
        """Splits the result of `all_gather` into one view per parameter, with the shape of this
        rank's part.
        """
        parts = gathered[: sum(self._numels)].split_with_sizes(self._numels)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def write(self, gathered: Tensor) -> None:
        for parameter, values in zip(self.held, self.split(gathered), strict=True):
            parameter.copy_(values)

    def settle(self, gathered: Tensor) -> None:
        """Writes permanent values to the parameters and to the copies that optimizers keep."""
        self.write(gathered)
        for copies, values in zip(self._copies, self.split(gathered), strict=True):
            for copy in copies:
                copy.view(values.shape).copy_(values)

    def renew_copies(self, names: Collection[str]) -> None:
        """Updates the optimizers' copies of some parameters."""
        for name, copies, held in zip(self.names, self._copies, self.held, strict=True):
            if name in names:
                for copy in copies:
                    copy.view(held.shape).copy_(held)

    def land(self, rule: LandingRule, gathered: Sequence[Tensor], steps: int) -> None:
        parts = [self.split(vector) for vector in gathered]
        for index, (held, copies) in enumerate(zip(self.held, self._copies, strict=True)):
            with _changed(held, copies) as merged:
                rule.merge(merged, [part[index] for part in parts], steps)

    def shift(self, moved: Tensor) -> None:
        for held, copies, move in zip(self.held, self._copies, self.split(moved), strict=True):
            with _changed(held, copies) as shifted:
                shifted.add_(move)

    def write_named(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites the named unsharded parameters with flat vectors."""
        for name, copies, held in zip(self.names, self._copies, self.held, strict=True):
            if name in values:
                with _changed(held, copies) as changed:
                    changed.copy_(values[name].view(held.shape))

    def is_finite(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.held)


@contextmanager
def _changed(held: Tensor, copies: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields a parameter's values with at least float32 precision, and applies all changes to the
    parameter and its copies.
    """
    dtype = torch.promote_types(held.dtype, torch.float32)
    if held.dtype == dtype and not copies:
        yield held
        return
    changed = held.to(dtype, copy=True)
    yield changed
    for copy in copies:
        moved = copy.view(held.shape) + (changed - held)
        # Non-finite values of a copy are replaced with the parameter's values.
        copy.view(held.shape).copy_(torch.where(moved.isfinite(), moved, changed))
    held.copy_(changed)


class WholeLayout(FragmentLayout):
    """The layout of a fragment that each rank of the group has in full, divided into one shard per
    rank.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], shard: int = 0, shards: int = 1
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.length = -(-sum(sizes) // shards)
        self.start = shard * self.length
        end = (shard + 1) * self.length
        pieces = list[slice]()
        position = 0
        for size in sizes:
            pieces.append(slice(max(self.start - position, 0), min(end - position, size)))
            position += size
        super().__init__(names, parameters, pieces)

    @override
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        if group.size == 1:
            return shard
        return torch.cat(group.all_gather(shard))

    @override
    def specs(self, ranks: int) -> list[list[ShardSpec]]:
        length = self.shard_lengths(ranks)[0]
        specs = list[list[ShardSpec]]()
        position = 0
        for parameter in self.parameters:
            shape = tuple(parameter.shape)
            runs = [[(0, size)] for size in shape]
            parameter_specs = list[ShardSpec]()
            for rank in range(ranks):
                first = min(max(rank * length - position, 0), parameter.numel())
                end = min(max((rank + 1) * length - position, 0), parameter.numel())
                parameter_specs.append(ShardSpec(shape, runs, first, end - first, [*range(ranks)]))
            specs.append(parameter_specs)
            position += parameter.numel()
        return specs

    @override
    def shard_lengths(self, ranks: int) -> list[int]:
        return [-(-sum(parameter.numel() for parameter in self.parameters) // ranks)] * ranks

    @override
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        values = zip(self.names, self.split(gathered), strict=True)
        return {name: value.to("cpu", copy=True) for name, value in values}

    @override
    def to_name(self, gathered: Tensor, shard: Tensor) -> Tensor:
        return gathered

    @override
    def copied(self) -> Tensor:
        return torch.cat([held.reshape(-1).to(torch.float32) for held in self.held])

    @override
    def _shard_of_whole(self, values: Sequence[Tensor]) -> Tensor:
        return _padded(torch.cat(list(values))[self.start : self.start + self.length], self.length)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "sizes": [parameter.numel() for parameter in self.parameters],
        }


class ShardedLayout(FragmentLayout):
    """The layout of a fragment that is already sharded over the ranks of the group."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        specs: Sequence[Sequence[ShardSpec]],
        shard: int,
    ) -> None:
        self._specs = specs
        self._shard_specs = [ranks[shard] for ranks in specs]
        pieces = [slice(spec.first, spec.first + spec.length) for spec in self._shard_specs]
        super().__init__(names, parameters, pieces)
        # A shard must contain at least one value to encode.
        self.lengths = [max(1, length) for length in _lengths(specs)]
        self.length = self.lengths[shard]
        self.start = sum(self.lengths[:shard])
        # The parameters whose values multiple ranks share, with each rank exchanging a part.
        self._in_common = list[int]()
        for index, ranks in enumerate(specs):
            if any(len(spec.holders) > 1 for spec in ranks):
                self._in_common.append(index)

    @override
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        if not self._in_common:
            return shard
        numels = [spec.length for spec in self._shard_specs]
        parts = list(shard[: sum(numels)].split(numels))
        sent = torch.cat([parts[index] for index in self._in_common])
        longest = max(_lengths([self._specs[index] for index in self._in_common]))
        received = group.all_gather(_padded(sent, longest))
        starts = [0] * len(received)
        for index in self._in_common:
            pieces = list[Tensor]()
            for rank, spec in enumerate(self._specs[index]):
                if rank in self._shard_specs[index].holders:
                    pieces.append(received[rank].narrow(0, starts[rank], spec.length))
                starts[rank] += spec.length
            parts[index] = torch.cat(pieces)
        return torch.cat(parts)

    @override
    def specs(self, ranks: int) -> Sequence[Sequence[ShardSpec]]:
        return self._specs

    @override
    def shard_lengths(self, ranks: int) -> list[int]:
        if ranks != len(self.lengths):
            raise ValueError(
                f"a fragment that is sharded over {len(self.lengths)} ranks was received from"
                f" {ranks} ranks"
            )
        return self.lengths

    @override
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        shards = group.all_gather(_padded(shard, max(self.lengths)))
        full = _split(self.state_dict(), [values.to("cpu") for values in shards])
        shapes = [ranks[0].shape for ranks in self._specs]
        return {
            name: full[name].view(shape) for name, shape in zip(self.names, shapes, strict=True)
        }

    @override
    def to_name(self, gathered: Tensor, shard: Tensor) -> Tensor:
        return shard

    @override
    def copied(self) -> Tensor:
        return self.read()

    @override
    def _shard_of_whole(self, values: Sequence[Tensor]) -> Tensor:
        parts = list[Tensor]()
        for spec, full in zip(self._shard_specs, values, strict=True):
            parts.append(spec.extract(full))
        return _padded(torch.cat(parts), self.length)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "sizes": [prod(ranks[0].shape) for ranks in self._specs],
            "places": [list(map(list, ranks)) for ranks in self._specs],
        }


def _lengths(specs: Sequence[Sequence[ShardSpec]]) -> list[int]:
    """Returns the number of values that each rank exchanges."""
    lengths = [0] * len(specs[0])
    for ranks in specs:
        for rank, spec in enumerate(ranks):
            lengths[rank] += spec.length
    return lengths


def layouts_of(
    fragments: Sequence[Fragment], parameters: Mapping[str, Tensor], topology: Topology
) -> list[FragmentLayout]:
    """Returns the layouts of all fragments. In-group collective if parameters are sharded."""
    shard = topology.group_rank
    is_divided = any(map(is_sharded, parameters.values()))
    specs = shard_specs(parameters, topology.in_group, topology.ranks) if is_divided else {}
    layouts = list[FragmentLayout]()
    for fragment in fragments:
        names = fragment.names
        tensors = [parameters[name] for name in names]
        if is_divided:
            layouts.append(ShardedLayout(names, tensors, [specs[name] for name in names], shard))
        else:
            layouts.append(WholeLayout(names, tensors, shard, topology.group_size))
    return layouts


def _padded(values: Tensor, length: int) -> Tensor:
    padded = values.new_zeros(length)
    padded[: values.numel()] = values
    return padded


# Digests, which identify the bits of values that must be equal in all groups

# The number of words processed at once. On a CPU, they fit in the cache. An accelerator needs more
# words at once to hide kernel launches.
_CHUNK = 1 << 17
_CHUNK_ON_DEVICE = 1 << 23


def digest(values: Tensor, start: int = 0) -> int:
    """Returns the sum of a tensor's words weighted by position, as a signed number modulo 2**64.

    Each word at an even position forms a 64-bit number together with the next word, and the number
    is multiplied by its position plus 1. If ``start`` is the position of each shard in a tensor,
    the digests of all shards add up to the digest of the tensor.

    Examples:
        >>> from lightning_sdiloco.algorithm.weighting import combined
        >>> whole = torch.arange(10.0)
        >>> digest(whole) == combined([digest(whole[:3]), digest(whole[3:], start=3)])
        True
        >>> digest(whole) == digest(whole.flip(0))
        False
    """
    words = _words(values)
    on_cpu = words.device.type == "cpu"
    if on_cpu:
        length = _CHUNK
        weights = _odd_numbers()
    else:
        length = _CHUNK_ON_DEVICE
        weights = torch.arange(1, min(length, words.numel() + 2), 2, device=words.device)
    # The sums modulo 2**64 are computed on the device so that the host waits only once.
    sums = list[Tensor]()
    for first in range(-(start % 2), words.numel(), length):
        chunk = words[max(first, 0) : first + length].to(torch.int32)
        before = max(-first, 0)
        after = (before + chunk.numel()) % 2
        if before or after or chunk.storage_offset() % 2:
            chunk = pad(chunk, (before, after))
        pairs = chunk.view(torch.int64)
        positions = weights[: len(pairs)]
        sums.append(torch.dot(pairs, positions) if on_cpu else (pairs * positions).sum())
        if start + first:
            sums.append(pairs.sum() * (start + first))
    return int(sum(sums))


def _words(values: Tensor) -> Tensor:
    """Returns the bits of a tensor as integers of up to 32 bits."""
    flat = values.detach().contiguous().view(-1)
    if flat.element_size() % 4 == 0:
        return flat.view(torch.int32)
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.uint8)


@cache
def _odd_numbers() -> Tensor:
    """Returns the weights of a chunk on a CPU."""
    return torch.arange(1, _CHUNK, 2, device="cpu")
