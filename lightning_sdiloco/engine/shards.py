"""From the parameters of a fragment to one flat float32 vector and back: the shard that a rank
exchanges.

The only file that knows how a model holds its parameters, DTensors included. FSDP2 and tensor
parallelism make these. They are recognised by their attributes, so that nothing is imported where
there are none.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_sdiloco.algorithm.merge import LandingRule
from lightning_sdiloco.algorithm.partition import Fragment, Parameter
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.outer import OuterState, is_elementwise
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.memory import new_vector


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module that the user wrote, inside DistributedDataParallel, torch.compile and
    Fabric's wrapper.
    """
    while True:
        # A wrapper of another library may offer the module as a property. A child of that name is
        # the user's own.
        offers = isinstance(getattr(type(model), "module", None), property)
        wraps = offers or isinstance(model, DistributedDataParallel)
        inner = model.module if wraps else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """Returns the name of a parameter without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trainable parameters by name, in the order of ``named_parameters()``; tied ones
    appear once.
    """
    reshard(model)
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def described(parameters: dict[str, Tensor]) -> list[Parameter]:
    """Describes parameters as the partition needs to know them: name, size in bytes, number of
    dimensions.
    """
    return [Parameter(name, p.numel() * p.element_size(), p.ndim) for name, p in parameters.items()]


def aliases(model: nn.Module) -> dict[str, str]:
    """Maps the further names of tied trainable parameters to the first name of the same
    parameter.
    """
    first: dict[int, str] = {}
    further = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), clean_name(name))
        if parameter.requires_grad and known != clean_name(name):
            further[clean_name(name)] = known
    return further


_HOW_TO_CHANGE = (
    "With Lightning, change what is trainable between epochs, in on_train_epoch_start at the"
    " latest, and replace parameters there, too. With Fabric, set up the model and its optimizers"
    " again; in your own loop call recut() afterwards, on all ranks."
)


class CutModel:
    """Remembers the trainable parameters and the modules of a model that is cut, and finds what has
    changed since.

    A parameter is the same as long as the object and its shape are, under whatever name: ``p.data``
    may be replaced, and a layer that is inserted into an ``nn.Sequential`` renames those behind it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = trainable(model)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._kinds = {
            name: (parameter.dtype, parameter.device)
            for name, parameter in self._parameters.items()
        }
        self._modules = {id(module): (name, module) for name, module in modules_of(model).items()}

    def is_same(self) -> bool:
        """Returns whether the same parameters are trainable, under the same names, of the same
        dtypes.
        """
        parameters = trainable(self.model)
        if any(self.former_name(parameter) != name for name, parameter in parameters.items()):
            return False
        return self._kinds == {
            name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()
        }

    def new(self) -> dict[str, Tensor]:
        """Returns the trainable parameters that the cut does not have, or has in another shape."""
        parameters = trainable(self.model)
        return {
            name: parameter
            for name, parameter in parameters.items()
            if self.former_name(parameter) is None
        }

    def frozen(self) -> set[str]:
        """Returns the names of the parameters that are no longer trainable, whether or not the
        model still has them.
        """
        unchanged = {
            name: own for name, own in self._parameters.items() if self.former_name(own) is not None
        }
        return {name for name, parameter in unchanged.items() if not parameter.requires_grad}

    def former_name(self, parameter: Tensor) -> str | None:
        """Returns the name that a parameter had when the model was cut; None if it is another one,
        or was reshaped.
        """
        name = self._names.get(id(parameter))
        return name if name is not None and parameter.shape == self._shapes[name] else None

    def former_parameter(self, name: str) -> Tensor | None:
        """Returns the parameter that had a name when the model was cut; None if there was none."""
        return self._parameters.get(name)

    def former_place(self, name: str) -> str:
        """Returns the name that a buffer had when the model was cut, by that of its module; "" if
        that is another one.

        Args:
            name: Its name of now.
        """
        module_name, _, key = name.rpartition(".")
        module = modules_of(self.model)[module_name]
        if id(module) not in self._modules:
            return ""
        former_name, _ = self._modules[id(module)]
        return f"{former_name}.{key}" if former_name else key

    def described(self) -> str:
        """Describes which parameters have changed; empty if only their names or dtypes have."""
        parameters = {
            clean_name(name): parameter for name, parameter in self.model.named_parameters()
        }
        present = {id(parameter) for parameter in parameters.values()}
        changed: dict[str, list[str]] = {}
        for name in self.new():
            former = self._parameters.get(name)
            # What had this name may be elsewhere now.
            is_replaced = former is not None and (
                former is parameters[name] or id(former) not in present
            )
            changed.setdefault(
                "been replaced or reshaped" if is_replaced else "become trainable", []
            ).append(name)
        for name, former in self._parameters.items():
            if name in parameters and not parameters[name].requires_grad:
                changed.setdefault("been frozen", []).append(name)
            elif name not in parameters and id(former) not in present:
                changed.setdefault("been removed", []).append(name)
        return ", ".join([_counted(names, verb) for verb, names in changed.items()])

    def require_coverage(self) -> None:
        """Refuses a model in which a parameter is trainable that is in no fragment."""
        found = list[Tensor | None]()
        left = list[nn.Module | None]([self.model])
        seen = set[int]()
        while left:
            module = left.pop()
            if module is None:
                continue
            if module._parameters:
                found += module._parameters.values()
            if module._modules and id(module) not in seen:
                seen.add(id(module))
                left += module._modules.values()
        if any(
            one is not None and id(one) not in self._names and one.requires_grad for one in found
        ):
            raise AgreementError(
                f"Since the model was cut into fragments, {self.described()}. What is new is in no"
                f" fragment, and every group would train its own. {_HOW_TO_CHANGE}"
            )

    def require_devices(self) -> None:
        """Refuses parameters on a device on which the model had none when it was cut."""
        devices = {device for _, device in self._kinds.values()}
        for name, parameter in trainable(self.model).items():
            if parameter.device not in devices:
                raise ValueError(
                    f"The parameter {name!r} is on {str(parameter.device)!r}, but the engine"
                    f" trains the model on {str(next(iter(devices)))!r}. Make new layers there,"
                    " with .to(device), and move the model before training only."
                )


def _counted(names: Sequence[str], verb: str) -> str:
    if len(names) == 1:
        return f"the parameter {names[0]!r} has {verb}"
    return f"{len(names)} parameters have {verb}, such as {names[0]!r}"


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules by name, without what torch.compile adds to it."""
    return {clean_name(f"{name}.")[:-1]: module for name, module in model.named_modules()}


Runs = list[tuple[int, int]]
"""Positions along one dimension, as half-open ranges ``(start, end)``."""


class ShardSpec(NamedTuple):
    """Describes which values of a parameter a rank holds, and which of these it exchanges.

    Attributes:
        shape: Shape of the whole parameter.
        runs: What the rank holds: for each dimension the positions, in the order in which it holds
            them.
        first: Position of the first value that it exchanges, among those that it holds.
        length: Number of values that it exchanges. Ranks that hold the same values share them out.
        holders: The ranks of the group that hold the same values, in their order.

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
        return all(runs == [(0, size)] for runs, size in zip(self.runs, self.shape, strict=True))

    def extract(self, whole: Tensor) -> Tensor:
        """Returns the values that the rank exchanges, out of the flat whole parameter."""
        if self._holds_all:
            return whole[self.first : self.first + self.length]
        return whole.view(self.shape)[self._indices()].reshape(-1)[
            self.first : self.first + self.length
        ]

    def insert(self, whole: Tensor, values: Tensor) -> None:
        """Writes the values that the rank exchanges into the flat whole parameter."""
        if self._holds_all:
            whole[self.first : self.first + self.length] = values
        elif self.length:
            box = whole.view(self.shape)[self._indices()]
            # Picking by indices makes a copy.
            box.view(-1)[self.first : self.first + self.length] = values
            whole.view(self.shape)[self._indices()] = box

    def _indices(self) -> tuple[Tensor, ...]:
        """Returns the positions along every dimension, in shapes that torch broadcasts."""
        indices = []
        for dimension, runs in enumerate(self.runs):
            along = torch.cat(
                [torch.arange(start, end) for start, end in runs] or [torch.arange(0)]
            )
            indices.append(
                along.view([-1 if other == dimension else 1 for other in range(len(self.runs))])
            )
        return tuple(indices)


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor, so that this rank holds only a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, without autograd. Writing to it writes to the
    tensor.
    """
    sharded: Any = tensor.detach()
    return sharded.to_local() if is_sharded(sharded) else sharded


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Makes a tensor that is sharded like another one, with the given values on this rank."""
    made = torch.empty_like(tensor.detach(), dtype=values.dtype)
    local(made).copy_(values)
    return made


def described_sharding(tensor: Tensor) -> str:
    sharded: Any = tensor
    return (
        f" as {sharded.placements} on {tuple(sharded.device_mesh.shape)} ranks"
        if is_sharded(sharded)
        else ""
    )


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules of a model that FSDP2 has sharded. It takes long: a model may have
    thousands.
    """
    # By name, because a module may have attributes of any name.
    return [
        one
        for one in model.modules()
        if any(kind.__name__ == "FSDPModule" for kind in type(one).__mro__)
    ]


def reshard(model: nn.Module) -> None:
    """Makes FSDP2 drop the unsharded parameters that it keeps after a forward."""
    for module in sharded_modules(model):
        module.reshard()


def part_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """Returns what this rank holds of a sharded tensor, cut out of the whole one."""
    runs = held_runs(tensor)
    spec = ShardSpec(tuple(tensor.shape), runs, first=0, length=_numel(runs), holders=[])
    return spec.extract(whole.reshape(-1)).view(local(tensor).shape)


def held_runs(tensor: Tensor) -> list[Runs]:
    """Returns the positions that this rank holds of a tensor, for each dimension."""
    sharded: Any = tensor
    positions = [list(range(size)) for size in tensor.shape]
    if is_sharded(sharded):
        ways = zip(
            sharded.placements,
            sharded.device_mesh.shape,
            sharded.device_mesh.get_coordinate(),
            strict=True,
        )
        for placement, ranks, rank in ways:
            if placement.is_replicate():
                continue
            if not hasattr(placement, "dim"):
                raise ValueError(f"its placement {placement} has no whole values on any rank")
            pieces = _chunks(positions[placement.dim], getattr(placement, "split_factor", 1))
            parts = [_chunks(piece, ranks) for piece in pieces]
            positions[placement.dim] = [
                one for chunks in parts if rank < len(chunks) for one in chunks[rank]
            ]
        expected = tuple(map(len, positions))
        held = tuple(local(tensor).shape)
        if expected != held:
            raise ValueError(
                f"torch says that it is divided{described_sharding(tensor)}, but this rank holds"
                f" {held} of {tuple(tensor.shape)} instead of {expected}"
            )
    runs = list[Runs]()
    for along in positions:
        # Where the next position is another one than the one behind it.
        ends = [at for at, (one, other) in enumerate(pairwise(along), 1) if other != one + 1]
        borders = [0, *ends, len(along)] if along else []
        runs.append([(along[start], along[end - 1] + 1) for start, end in pairwise(borders)])
    return runs


def divided(shape: Iterable[int], ranks: Sequence[list[Runs]]) -> list[ShardSpec]:
    """Divides a parameter so that one rank exchanges each value, also where several hold it; a spec
    per rank.

    Examples:
        >>> [spec.length for spec in divided([5], [[[(0, 3)]], [[(3, 5)]]])]
        [3, 2]
        >>> [(spec.first, spec.length) for spec in divided([5], [[[(0, 5)]], [[(0, 5)]]])]
        [(0, 3), (3, 2)]
    """
    shape = tuple(shape)
    specs = []
    for rank, runs in enumerate(ranks):
        holders = [other for other, others in enumerate(ranks) if others == runs]
        numel = _numel(runs)
        length = -(-numel // len(holders))
        first = min(holders.index(rank) * length, numel)
        specs.append(ShardSpec(shape, runs, first, min(length, numel - first), holders))
    exchanged = sum(spec.length for spec in specs)
    if exchanged != prod(shape):
        raise ValueError(
            f"its ranks hold {exchanged} of its {prod(shape)} values: some are missing or held in"
            " several ways"
        )
    return specs


def shard_specs(
    parameters: Mapping[str, Tensor], group: Communicator, members: range
) -> dict[str, list[ShardSpec]]:
    """Finds out what every rank of a group holds and exchanges of each parameter. In-group
    collective.
    """
    own: dict[str, list[Runs] | str] = {}
    for name, parameter in parameters.items():
        sharded: Any = parameter
        others = sorted(set(ranks_of(parameter)) - set(members))
        if others:
            own[name] = (
                f"it is divided among ranks of several worker groups: ranks {others} belong to"
                " others"
            )
        elif (
            is_sharded(parameter)
            and local(parameter).device.type != sharded.device_mesh.device_type
        ):
            own[name] = (
                f"it lies on {local(parameter).device.type!r}, its mesh on"
                f" {sharded.device_mesh.device_type!r}"
            )
        else:
            try:
                own[name] = held_runs(parameter)
            except ValueError as error:
                own[name] = str(error)
    ranks = group.all_gather_object(own)
    specs = {}
    for name, parameter in parameters.items():
        refusal = next((rank[name] for rank in ranks if isinstance(rank[name], str)), None)
        try:
            if refusal is not None:
                raise ValueError(refusal)
            specs[name] = divided(parameter.shape, [rank[name] for rank in ranks])
        except ValueError as error:
            raise ValueError(
                f"The parameter {name!r} cannot be exchanged: {error}. Shard it with fully_shard"
                " or parallelize_module over the mesh that configure_model gets as"
                " self.device_mesh."
            ) from error
    return specs


def ranks_of(tensor: Tensor) -> list[int]:
    """Returns the ranks, as the world counts them, over which a tensor is sharded; none if it is
    not.
    """
    sharded: Any = tensor
    return [int(rank) for rank in sharded.device_mesh.mesh.flatten()] if is_sharded(tensor) else []


def _numel(runs: list[Runs]) -> int:
    return prod(sum(end - start for start, end in along) for along in runs)


def _chunks(positions: list[int], count: int) -> list[list[int]]:
    """Cuts positions as ``torch.chunk`` cuts a tensor: the last chunks are smaller, or missing."""
    length = max(1, -(-len(positions) // count))
    return [positions[start : start + length] for start in range(0, len(positions), length)]


class OuterParameter(NamedTuple):
    """Holds outer values and outer optimizer state of one parameter, whole, however fragments and
    shards are cut.
    """

    values: Tensor
    state: dict[str, Any]
    rounds: int


def to_parameters(
    fragment: Mapping[str, Any], shards: Sequence[OuterState]
) -> dict[str, OuterParameter]:
    """Splits the shards of a fragment, in the order of the ranks, into its parameters.

    Examples:
        >>> shards = [OuterState(torch.tensor(part), {}, rounds=3) for part in ([1.0, 2.0], [4.0, 0.0])]
        >>> fragment = {"names": ["weight", "bias"], "sizes": [2, 1]}
        >>> {name: p.values.tolist() for name, p in to_parameters(fragment, shards).items()}
        {'weight': [1.0, 2.0], 'bias': [4.0]}
    """
    first = shards[0]
    names = fragment["names"]
    sizes = fragment["sizes"]

    def split(vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        if "places" not in fragment:
            parts = torch.cat(list(vectors))[: sum(sizes)].split(sizes)
            return {name: part.clone() for name, part in zip(names, parts, strict=True)}
        starts = [0] * len(vectors)
        whole = {}
        for name, places in zip(names, fragment["places"], strict=True):
            specs = [ShardSpec(*place) for place in places]
            whole[name] = vectors[0].new_zeros(prod(specs[0].shape))
            for rank, spec in enumerate(specs):
                spec.insert(whole[name], vectors[rank][starts[rank] : starts[rank] + spec.length])
                starts[rank] += spec.length
        return whole

    values = split([shard.values for shard in shards])
    kept = {
        key: split([shard.state[key] for shard in shards])
        for key, value in first.state.items()
        if is_elementwise(value, first.values)
    }
    return {
        name: OuterParameter(
            vector,
            {key: kept[key][name] if key in kept else value for key, value in first.state.items()},
            first.rounds,
        )
        for name, vector in values.items()
    }


def to_shards(
    fragment: Mapping[str, Any], parameters: Mapping[str, Tensor], lengths: Sequence[int]
) -> list[Tensor]:
    """Cuts flat whole parameters into shards of these lengths: what `to_parameters` joins.

    Examples:
        >>> fragment = {"names": ["weight", "bias"], "sizes": [2, 1]}
        >>> parameters = {"weight": torch.tensor([1.0, 2.0]), "bias": torch.tensor([4.0])}
        >>> [shard.tolist() for shard in to_shards(fragment, parameters, [2, 2])]
        [[1.0, 2.0], [4.0, 0.0]]
    """
    if "places" not in fragment:
        whole = torch.cat([parameters[name] for name in fragment["names"]])
        return list(_padded(whole, sum(lengths)).split(list(lengths)))
    shards = list[Tensor]()
    for rank, length in enumerate(lengths):
        specs = [ShardSpec(*places[rank]) for places in fragment["places"]]
        parts = [
            spec.extract(parameters[name])
            for name, spec in zip(fragment["names"], specs, strict=True)
        ]
        shards.append(_padded(torch.cat(parts), length))
    return shards


class FragmentLayout(ABC):
    """Lays out the parameters of a fragment as flat vectors: the shard of this rank is what it
    exchanges of them.
    """

    length: int
    start: int

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], pieces: Sequence[slice]
    ) -> None:
        self.names = tuple(names)
        self.parameters = list(parameters)
        # Finds what optimizers keep as copies of a parameter, which has to change with it; set by
        # `Rounds.cut`.
        self.copies_of: Callable[[Tensor], Sequence[Tensor]] = _no_copies
        self._held: Callable[[Tensor], Tensor] = (
            local if any(map(is_sharded, parameters)) else Tensor.detach
        )
        self._shapes = [self._held(parameter).shape for parameter in parameters]
        self._numels = [shape.numel() for shape in self._shapes]
        # Which values of which parameters the shard has, and how many, one parameter behind the
        # other.
        self._pieces = [(index, own) for index, own in enumerate(pieces) if own.start < own.stop]
        self._lengths = [own.stop - own.start for _, own in self._pieces]
        self._end = sum(self._lengths)

    @property
    def held(self) -> list[Tensor]:
        """What this rank holds of each parameter. Looked up every time, because others may rebind
        ``.data``.

        Raises:
            AgreementError: If a parameter has another shape than when the model was cut.
        """
        held = [self._held(parameter) for parameter in self.parameters]
        for name, tensor, shape in zip(self.names, held, self._shapes, strict=True):
            if tensor.shape != shape:
                raise AgreementError(
                    f"Since the model was cut into fragments, the shape of the parameter {name!r}"
                    f" has changed from {tuple(shape)} to {tuple(tensor.shape)}. {_HOW_TO_CHANGE}"
                )
        return held

    def let_go(self) -> None:
        """Puts zeros in the place of reshaped parameters: what is in flight for them lands there,
        outside the model.
        """
        for index, shape in enumerate(self._shapes):
            parameter = self.parameters[index]
            if self._held(parameter).shape != shape:
                self.parameters[index] = torch.zeros(
                    shape, dtype=parameter.dtype, device=parameter.device
                )

    @abstractmethod
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        """Gathers all that this rank holds of the fragment from the shards of its group. In-group
        collective.
        """

    @abstractmethod
    def specs(self, ranks: int) -> Sequence[Sequence[ShardSpec]]:
        """Returns what each rank of the group exchanges, parameter by parameter: shards hold one
        behind the other.
        """

    @abstractmethod
    def shard_lengths(self, ranks: int) -> list[int]:
        """Returns the numbers of values in the shards of a group of ``ranks`` ranks."""

    @abstractmethod
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        """Returns the whole parameters by name, on the host. In-group collective where ranks hold
        parts of them.
        """

    @abstractmethod
    def to_name(self, gathered: Tensor, shard: Tensor) -> Tensor:
        """Returns which of its arguments `named` reads."""

    @abstractmethod
    def copied(self) -> Tensor:
        """Returns what `named` reads, for the values that are in the model now."""

    @abstractmethod
    def _shard_of_whole(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the shard, given all parameters, flat and whole; zeros stand for what lies
        beyond their end.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what must be known to read shards of the fragment in a later run, as plain
        values.
        """

    def to_shard(self, parameters: Sequence[OuterParameter]) -> OuterState:
        """Returns the outer state of this rank's shard, from all parameters' in their order.

        What an optimizer keeps of each value is zero where a parameter has none, and a count is the
        largest.
        """
        state: dict[str, Any] = {}
        for key in dict.fromkeys(key for parameter in parameters for key in parameter.state):
            known = [(p.state[key], p.values) for p in parameters if key in p.state]
            if any(is_elementwise(*pair) for pair in known):
                state[key] = self._shard_of_whole(
                    [p.state.get(key, torch.zeros_like(p.values)) for p in parameters]
                )
            else:
                counts = [count for count, _ in known]
                state[key] = max(counts, key=float) if None not in counts else counts[0]
        values = self._shard_of_whole([parameter.values for parameter in parameters])
        return OuterState(values, state, max(parameter.rounds for parameter in parameters))

    @property
    def holds_float32(self) -> bool:
        """Whether the parameters hold every float32 value."""
        return all(
            torch.promote_types(held.dtype, torch.float32) == held.dtype for held in self.held
        )

    def read(self) -> Tensor:
        return self.shard_of(self.held)

    def outer_gradient(self, outer: Tensor) -> Tensor:
        """Returns the outer gradient, outer parameters minus local ones, in one pass over both."""
        difference = new_vector(outer.numel(), outer.device)
        held = self.held
        parts = [
            whole[: self._end].split_with_sizes(self._lengths) for whole in (outer, difference)
        ]
        for (index, own), before, part in zip(self._pieces, *parts, strict=True):
            values = held[index].reshape(-1)[own]
            # Longer types are rounded first, as they are where the shard is read.
            exact = torch.promote_types(values.dtype, torch.float32) == torch.float32
            torch.sub(before, values if exact else values.to(torch.float32), out=part)
        difference[self._end :].zero_()
        return difference

    def shard_of(self, held: Sequence[Tensor]) -> Tensor:
        """Copies the shard of this rank out of parameters, or what `split` returned."""
        shard = new_vector(self.length, held[0].device).zero_()
        for (index, own), part in zip(
            self._pieces, shard[: self._end].split_with_sizes(self._lengths), strict=True
        ):
            part.copy_(held[index].reshape(-1)[own])
        return shard

    def mask(self, names: Collection[str]) -> Tensor:
        """Returns which values of the shard belong to some parameters."""
        held = [
            torch.full_like(own, name in names)
            for name, own in zip(self.names, self.held, strict=True)
        ]
        return self.shard_of(held).bool()

    def split(self, gathered: Tensor) -> list[Tensor]:
        """Returns views of what `all_gather` returned, one per parameter, in the shape of what
        this rank holds.
        """
        parts = gathered[: sum(self._numels)].split_with_sizes(self._numels)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def write(self, gathered: Tensor) -> None:
        for parameter, values in zip(self.held, self.split(gathered), strict=True):
            parameter.copy_(values)

    def settle(self, gathered: Tensor) -> None:
        """Writes values that stay: what optimizers keep as copies of the parameters becomes them,
        too.
        """
        self.write(gathered)
        for parameter, values in zip(self.parameters, self.split(gathered), strict=True):
            for copy in self.copies_of(parameter):
                copy.view(values.shape).copy_(values)

    def renew_copies(self, names: Collection[str]) -> None:
        """Makes what optimizers keep as copies of some parameters what these are now."""
        for name, parameter, held in zip(self.names, self.parameters, self.held, strict=True):
            if name in names:
                for copy in self.copies_of(parameter):
                    copy.view(held.shape).copy_(held)

    def land(self, rule: LandingRule, gathered: Sequence[Tensor], steps: int) -> None:
        for parameter, held, *values in zip(
            self.parameters, self.held, *map(self.split, gathered), strict=True
        ):
            with self._changed(parameter, held) as merged:
                rule.merge(merged, values, steps)

    @contextmanager
    def _changed(self, parameter: Tensor, held: Tensor) -> Iterator[Tensor]:
        """Yields what is held of a parameter, in at least float32, to be changed; copies of it
        change by as much.
        """
        dtype = torch.promote_types(held.dtype, torch.float32)
        copies = self.copies_of(parameter)
        if held.dtype == dtype and not copies:
            yield held
            return
        changed = held.to(dtype, copy=True)
        yield changed
        for copy in copies:
            moved = copy.view(held.shape) + (changed - held)
            # What is not finite takes what the parameter becomes.
            copy.view(held.shape).copy_(torch.where(moved.isfinite(), moved, changed))
        held.copy_(changed)

    def shift(self, moved: Tensor) -> None:
        for parameter, held, by in zip(self.parameters, self.held, self.split(moved), strict=True):
            with self._changed(parameter, held) as shifted:
                shifted.add_(by)

    def write_named(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites some parameters with flat vectors, by name. Not for sharded parameters."""
        for name, parameter, held in zip(self.names, self.parameters, self.held, strict=True):
            if name in values:
                with self._changed(parameter, held) as changed:
                    changed.copy_(values[name].view(held.shape))

    def is_finite(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.held)


def _no_copies(parameter: Tensor) -> Sequence[Tensor]:
    return ()


class WholeLayout(FragmentLayout):
    """Lays out a fragment that every rank of the group holds whole: one vector, cut into one shard
    per rank.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], shard: int = 0, shards: int = 1
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.length = -(-sum(sizes) // shards)
        self.start = shard * self.length
        end = (shard + 1) * self.length
        firsts = accumulate(sizes, initial=0)
        pieces = [
            slice(max(self.start - at, 0), min(end - at, n))
            for at, n in zip(firsts, sizes, strict=False)
        ]
        super().__init__(names, parameters, pieces)

    @override
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        return shard if group.size == 1 else torch.cat(group.all_gather(shard))

    @override
    def specs(self, ranks: int) -> list[list[ShardSpec]]:
        length = self.shard_lengths(ranks)[0]
        specs = list[list[ShardSpec]]()
        position = 0
        for parameter in self.parameters:
            shape = tuple(parameter.shape)
            of_ranks = list[ShardSpec]()
            for rank in range(ranks):
                first = min(max(rank * length - position, 0), parameter.numel())
                end = min(max((rank + 1) * length - position, 0), parameter.numel())
                of_ranks.append(
                    ShardSpec(
                        shape, [[(0, size)] for size in shape], first, end - first, [*range(ranks)]
                    )
                )
            specs.append(of_ranks)
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
    """Lays out a fragment that is sharded over the ranks of the group: the shard is what a rank
    holds.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        specs: Sequence[Sequence[ShardSpec]],
        shard: int,
    ) -> None:
        self._specs = specs
        self._own = [ranks[shard] for ranks in specs]
        super().__init__(
            names, parameters, [slice(spec.first, spec.first + spec.length) for spec in self._own]
        )
        # Without a single value there would be nothing to encode.
        lengths = [
            max(1, sum(of))
            for of in zip(*([s.length for s in ranks] for ranks in specs), strict=True)
        ]
        self.lengths = lengths
        self.length = lengths[shard]
        self._longest = max(lengths)
        self.start = sum(lengths[:shard])
        self._in_common = [any(len(spec.holders) > 1 for spec in ranks) for ranks in specs]

    @override
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        if not any(self._in_common):
            return shard
        own = list(
            shard[: sum(spec.length for spec in self._own)].split(
                [spec.length for spec in self._own]
            )
        )
        common = torch.cat(
            [part for part, is_common in zip(own, self._in_common, strict=True) if is_common]
        )
        in_common = [
            ranks
            for ranks, is_common in zip(self._specs, self._in_common, strict=True)
            if is_common
        ]
        longest = max(
            sum(spec.length for spec in of_rank) for of_rank in zip(*in_common, strict=True)
        )
        parts = group.all_gather(_padded(common, longest))
        starts = [0] * len(parts)
        for index, ranks in enumerate(self._specs):
            if self._in_common[index]:
                of_holders = [
                    (parts[h], starts[h], ranks[h].length) for h in self._own[index].holders
                ]
                own[index] = torch.cat(
                    [part[start : start + length] for part, start, length in of_holders]
                )
                starts = [start + spec.length for start, spec in zip(starts, ranks, strict=True)]
        return torch.cat(own)

    @override
    def specs(self, ranks: int) -> Sequence[Sequence[ShardSpec]]:
        return self._specs

    @override
    def shard_lengths(self, ranks: int) -> list[int]:
        if ranks != len(self.lengths):
            raise ValueError(
                f"a fragment that is sharded over {len(self.lengths)} ranks came from {ranks}"
            )
        return self.lengths

    @override
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        shards = group.all_gather(_padded(shard, self._longest))
        whole = to_parameters(
            self.state_dict(), [OuterState(values.to("cpu"), {}, 0) for values in shards]
        )
        shapes = [ranks[0].shape for ranks in self._specs]
        return {
            name: whole[name].values.view(shape)
            for name, shape in zip(self.names, shapes, strict=True)
        }

    @override
    def to_name(self, gathered: Tensor, shard: Tensor) -> Tensor:
        return shard

    @override
    def copied(self) -> Tensor:
        return self.read()

    @override
    def _shard_of_whole(self, values: Sequence[Tensor]) -> Tensor:
        return _padded(
            torch.cat([s.extract(v) for s, v in zip(self._own, values, strict=True)]), self.length
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        sizes = [prod(ranks[0].shape) for ranks in self._specs]
        return {
            "names": list(self.names),
            "sizes": sizes,
            "places": [[list(spec) for spec in ranks] for ranks in self._specs],
        }


def layouts_of(
    fragments: Sequence[Fragment], parameters: Mapping[str, Tensor], topology: Topology
) -> list[FragmentLayout]:
    """Lays out all fragments. In-group collective where parameters are sharded."""
    shard = topology.group_rank
    shards = topology.group_size
    if not any(map(is_sharded, parameters.values())):
        return [
            WholeLayout(f.names, [parameters[name] for name in f.names], shard, shards)
            for f in fragments
        ]
    specs = shard_specs(parameters, topology.in_group, topology.ranks)
    return [
        ShardedLayout(f.names, [parameters[n] for n in f.names], [specs[n] for n in f.names], shard)
        for f in fragments
    ]


def _padded(values: Tensor, length: int) -> Tensor:
    padded = values.new_zeros(length)
    padded[: values.numel()] = values
    return padded


# The digest: a number that stands for the bits of what groups hold alike

# How many words are weighed at once: on a CPU they stay in its cache. An accelerator takes more, or
# it would spend its time with the launches of kernels.
_CHUNK = 1 << 17
_CHUNK_ON_DEVICE = 1 << 23


def digest(values: Tensor, start: int = 0) -> int:
    """Returns the digest of a tensor: the sum of its words, each weighed by its position, modulo
    2**64, signed.

    A word at an even position and the next one are a number of 64 bits, which is multiplied by its
    position plus 1. Digests of consecutive shards, which begin at ``start`` in the whole, add up to
    the digest of the whole.

    Examples:
        >>> from lightning_sdiloco.algorithm.weighting import combined
        >>> whole = torch.arange(10.0)
        >>> digest(whole) == combined([digest(whole[:3]), digest(whole[3:], start=3)])
        True
        >>> digest(whole) == digest(whole.flip(0))
        False
    """
    flat = values.detach().contiguous().view(-1)
    size = flat.element_size()
    words = (
        flat.view(torch.int32)
        if size % 4 == 0
        else flat.view(torch.int16 if size == 2 else torch.uint8)
    )
    on_cpu = words.device.type == "cpu"
    length = _CHUNK if on_cpu else _CHUNK_ON_DEVICE
    weights = (
        _odd_numbers()
        if on_cpu
        else torch.arange(1, min(length, words.numel() + 2), 2, device=words.device)
    )
    # Added up on the device, modulo 2**64, so that the host waits for it once.
    parts = list[Tensor]()
    for first in range(-(start % 2), words.numel(), length):
        chunk = words[max(first, 0) : first + length].to(torch.int32)
        before = max(-first, 0)
        after = (before + chunk.numel()) % 2
        if before or after or chunk.storage_offset() % 2:
            chunk = pad(chunk, (before, after))
        pairs = chunk.view(torch.int64)
        own = weights[: len(pairs)]
        parts.append(torch.dot(pairs, own) if on_cpu else (pairs * own).sum())
        if start + first:
            parts.append(pairs.sum() * (start + first))
    return int(parts[0] if len(parts) == 1 else torch.stack(parts).sum()) if parts else 0


@cache
def _odd_numbers() -> Tensor:
    """Returns the weights of a chunk on a CPU, the same for every chunk."""
    return torch.arange(1, _CHUNK, 2, device="cpu")
