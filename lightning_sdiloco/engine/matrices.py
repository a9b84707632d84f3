"""Maps whole matrices of a fragment, for outer steps that are not elementwise.

Each rank has a shard of the mean outer gradient. A fragment's matrices are distributed among the
ranks to balance the computation, and no rank needs the whole fragment. Each rank sends the parts of
its shard to the owners of the matrices, maps the matrices that it owns, and returns the mapped
parts. The results do not depend on which ranks map the matrices.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.direction import Direction, directed_by
from lightning_sdiloco.algorithm.partition import Fragment, Stack, stack_of
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.outer import OuterState
from lightning_sdiloco.engine.shards import (
    FragmentLayout,
    SavedFragment,
    ShardSpec,
    clean_name,
    digest,
    modules_of,
    to_parameters,
    to_shards,
)

_log = logging.getLogger(__name__)

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

MOST_VALUES = 10_000_000
"""The largest number of trainable values for which the outer step applies a map to matrices by
default on devices with slow float64 arithmetic.
"""

FEWEST_ROUNDS = 5
"""The minimum number of rounds for which the outer step applies a map to matrices by default. In
shorter runs, the plain mean performed better.
"""

# The share of its time that an accelerator may spend applying a map to matrices without a warning.
_LARGEST_SHARE = 0.1

# The compute capabilities of P100, V100, A100, H100 and H200, and B200. Other GPUs multiply float64
# numbers at 1/32 or 1/64 of the float32 rate.
_FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))


def stacks_of(model: nn.Module, patterns: Mapping[str, int]) -> dict[str, Stack]:
    """Returns the matrices of all trainable parameters by name, as determined by `stack_of` or by a
    pattern.

    Raises:
        ValueError: If a pattern matches no trainable parameter, or matches a parameter that cannot
            be divided as requested.
    """
    stacks = dict[str, Stack]()
    unused = set(patterns)
    groups = _groups_of_convolutions(model)
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = clean_name(full_name)
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        parts = patterns[matching[-1]] if matching else None
        try:
            stack = stack_of(parameter.shape, groups.get(_module_of(name)), parts)
        except ValueError as error:
            raise ValueError(
                f"matrices={{{matching[-1]!r}: {parts}}} does not fit the parameter {name!r}:"
                f" {error}. Pass a different number, or 0 to treat all values separately."
            ) from None
        if stack is not None:
            stacks[name] = stack
    if unused:
        raise ValueError(
            f"matrices has the pattern {sorted(unused)[0]!r}, which matches no trainable"
            " parameter. Use shell-style patterns, such as '*.qkv.weight', that match names in"
            " named_parameters()."
        )
    return stacks


def with_direction(
    settings: Settings,
    model: nn.Module,
    topology: Topology,
    rounds: float = math.inf,
    *,
    says: bool = True,
) -> Settings:
    """Chooses a direction based on the settings, the model and the number of rounds. All ranks must
    call this function.
    """
    facts = topology.world.all_gather_object((suits(model), takes_long(model)))
    suits_all = all(is_suited for is_suited, _ in facts)
    is_slow = any(is_long for _, is_long in facts)
    may_direct = suits_all and not is_slow and rounds >= FEWEST_ROUNDS
    chosen = settings.directed(may_direct=may_direct)
    if says and suits_all and is_slow and chosen != settings.directed() and topology.rank == 0:
        _log.warning(
            "The outer step is elementwise. Applying a map to matrices with more than %s values"
            " would slow down training on devices with slow float64 arithmetic, such as CPUs and"
            " consumer GPUs. To apply the map anyway, pass"
            " outer_optimizer=OuterOptimizer(direction='equalised').",
            f"{MOST_VALUES:,}",
        )
    return chosen


def suits(model: nn.Module) -> bool:
    """Returns whether a model is a language model that trains most of its parameters.

    Mapping matrices is known to help such models. In experiments, LoRA fine-tuning made less
    progress with mapped matrices, and regression networks made far less progress.
    """
    trained = sum(parameter.numel() for parameter in _sized(model) if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in _sized(model) if not parameter.requires_grad)
    return trained >= frozen and predicts_tokens(model)


def predicts_tokens(model: nn.Module) -> bool:
    """Returns whether a model has a token embedding and another layer with one output per token.

    Examples:
        >>> predicts_tokens(nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50)))
        True
        >>> predicts_tokens(nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 1)))
        False
    """
    modules = list(model.modules())
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, nn.Embedding)}
    for module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or not isinstance(weight, Tensor) or is_lazy(weight):
            continue
        if weight.ndim == 2 and len(weight) in vocabularies:
            return True
    return False


def takes_long(model: nn.Module) -> bool:
    """Returns whether a model has too many values to map its matrices during training."""
    trained = [parameter for parameter in _sized(model) if parameter.requires_grad]
    if sum(parameter.numel() for parameter in trained) <= MOST_VALUES:
        return False
    return not all(has_fast_float64(parameter.device) for parameter in trained)


def _sized(model: nn.Module) -> list[nn.Parameter]:
    # A model with lazy parameters is refused when it is divided.
    return [parameter for parameter in model.parameters() if not is_lazy(parameter)]


def has_fast_float64(device: torch.device) -> bool:
    """Returns whether a device is known to reach at least half of its float32 rate in float64
    arithmetic.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in _FAST_FLOAT64


def _groups_of_convolutions(model: nn.Module) -> dict[str, int]:
    """Returns the number of groups of each convolution by module name."""
    modules = modules_of(model)
    return {name: m.groups for name, m in modules.items() if isinstance(m, _CONVOLUTIONS)}


def _module_of(name: str) -> str:
    """Returns the name of a parameter's module, which may be parametrized."""
    module_name, _, parametrized_name = name.partition(".parametrizations.")
    return module_name if parametrized_name else name.rpartition(".")[0]


def proofs(
    fragments: Sequence[Fragment], direction: Direction | None, device: torch.device
) -> dict[str, str]:
    """For each shape in the fragments, returns a digest of a direction's result on a fixed test
    matrix.

    Raises:
        ValueError: If the direction changes the shape or dtype of a matrix.
    """
    shapes = set[tuple[int, int]]()
    for fragment in fragments:
        for stack in fragment.stacks:
            if stack is not None:
                shapes.add((stack.rows, stack.columns))
    digests = dict[str, str]()
    for rows, columns in sorted(shapes):
        assert direction is not None, "without a direction no parameter is a matrix"
        name = f"the direction of {rows} x {columns} matrices"
        # The numbers are not random, because torch's random numbers differ between processors.
        numbers = torch.arange(rows * columns, dtype=torch.int32, device=device).remainder_(10007)
        numbers.mul_(7919).remainder_(10007).sub_(5003)
        matrix = numbers.to(torch.float32).view(1, rows, columns).div_(4096)
        directed = directed_by(direction, {name: matrix})[name]
        if directed.shape != matrix.shape or directed.dtype != torch.float32:
            raise ValueError(
                f"direction={direction!r} returned values of shape {tuple(directed.shape)} and"
                f" dtype {directed.dtype} for float32 matrices of shape {tuple(matrix.shape)}. A"
                " direction must not change the shape or dtype of matrices. Correct the"
                " function, or choose 'equalised' or 'elementwise'."
            )
        digests[name] = f"{digest(directed) & 0xFFFFFFFFFFFFFFFF:016x}"
    return digests


class DirectionCost:
    """A monitor that warns once if an accelerator spends too long applying a map to matrices."""

    def __init__(self) -> None:
        self._is_said = False
        # The time of the first fragment's last landing, and the time in seconds that outer steps
        # have taken since then.
        self._since = 0.0
        self._mapping_s = 0.0

    def note(self, fragment: int, landed: float, mapping_s: float) -> None:
        """Records the fragment and time of a landing, and the duration of its outer step in
        seconds.
        """
        if self._is_said:
            return
        self._mapping_s += mapping_s
        if fragment != 0:
            return
        share = self._mapping_s / (landed - self._since)
        if self._since and share > _LARGEST_SHARE:
            self._is_said = True
            _log.warning(
                "The outer step spends %.0f %% of the time (%.3g s in each round of %.3g s)"
                " applying its map to matrices, which slows down training on this device. To reduce"
                " this share, use larger batches, a larger sync_every or more ranks per group. To"
                " disable the map, pass outer_optimizer=OuterOptimizer(direction='elementwise').",
                100 * share,
                self._mapping_s,
                landed - self._since,
            )
        self._since = landed
        self._mapping_s = 0.0


class DealtMatrix(NamedTuple):
    """A matrix parameter that one rank of the group maps.

    Attributes:
        name: The name of the parameter.
        stack: The shape of the parameter's matrices.
        owner: The rank that maps the matrices.
        specs: The parameter's values in the shard of each rank of the group.
        starts: The positions of these values in the shard of each rank.
    """

    name: str
    stack: Stack
    owner: int
    specs: Sequence[ShardSpec]
    starts: Sequence[int]

    def part(self, shard: Tensor, rank: int) -> Tensor:
        """Returns a view of the parameter's values in a rank's shard."""
        return shard.narrow(0, self.starts[rank], self.specs[rank].length)


def deal(layout: FragmentLayout, stacks: Mapping[str, Stack], ranks: int) -> list[DealtMatrix]:
    """Assigns a fragment's matrix parameters to ranks, giving the most expensive remaining
    parameter to the rank with the lowest load.
    """
    costs = [0.0] * ranks
    owners = dict[str, int]()
    names = [name for name in layout.names if name in stacks]
    for name in sorted(names, key=lambda name: -stacks[name].multiplications):
        owners[name] = costs.index(min(costs))
        costs[owners[name]] += stacks[name].multiplications
    dealt = list[DealtMatrix]()
    starts = [0] * ranks
    for name, specs in zip(layout.names, layout.specs(ranks), strict=True):
        if name in stacks:
            dealt.append(DealtMatrix(name, stacks[name], owners[name], specs, starts))
        starts = [start + spec.length for start, spec in zip(starts, specs, strict=True)]
    return dealt


class MappedOnce:
    """A mean outer gradient and its direction, computed by one group and shared by all groups in a
    process.
    """

    def __init__(self, groups: int) -> None:
        self._later_groups = groups - 1
        self._waiting = 0
        self._gradient = torch.empty(0)
        self._directed = torch.empty(0)

    def keep(self, gradient: Tensor, directed: Tensor) -> None:
        self._gradient = gradient
        self._directed = directed.clone()
        self._waiting = self._later_groups

    def replace(self, gradient: Tensor) -> bool:
        """Replaces a gradient with the stored direction if it equals the stored gradient, and
        returns whether it does.
        """
        if not self._waiting or not torch.equal(gradient, self._gradient):
            return False
        gradient.copy_(self._directed)
        self._waiting -= 1
        if not self._waiting:
            self._gradient = torch.empty(0)
            self._directed = torch.empty(0)
        return True


class Matrices:
    """A fragment's matrices, and the method that maps them across the ranks of a group.

    Attributes:
        stacks: The matrix parameters by name.
        once: The result that all groups in this process share, or None if there is only one group.
    """

    def __init__(
        self,
        fragment: Fragment,
        layout: FragmentLayout,
        direction: Direction | None,
        topology: Topology,
    ) -> None:
        self.stacks = dict[str, Stack]()
        for name, stack in zip(fragment.names, fragment.stacks, strict=False):
            if stack is not None:
                self.stacks[name] = stack
        self.once: MappedOnce | None = None
        self._direction = direction
        self._ranks = range(topology.group_size)
        self._rank = topology.group_rank
        self._dealt = deal(layout, self.stacks, topology.group_size)
        self._owned = [matrix for matrix in self._dealt if matrix.owner == self._rank]

    def state_dict(self) -> dict[str, Any]:
        """Returns the plain values that a later run needs to map the matrices of saved flights."""
        if not self.stacks:
            return {}
        return {"stacks": {name: tuple(stack) for name, stack in self.stacks.items()}}

    def direct(self, gradient: Tensor, group: Communicator) -> None:
        """Replaces a shard of a mean outer gradient with its direction in place. In-group
        collective.
        """
        if self.once is None:
            self._map(gradient, group)
        elif not self.once.replace(gradient):
            mean = gradient.clone()
            self._map(gradient, group)
            self.once.keep(mean, gradient)

    def _map(self, gradient: Tensor, group: Communicator) -> None:
        assert self._direction is not None, "without a direction no parameter is a matrix"
        parts: list[list[Tensor]] = [[] for _ in self._ranks]
        for matrix in self._dealt:
            parts[matrix.owner].append(matrix.part(gradient, self._rank))
        lengths = [self._owned_lengths(rank) for rank in self._ranks]
        received = _exchanged(parts, lengths, gradient, group)
        directed = directed_by(self._direction, self._assembled(received, gradient))
        answers = [self._owned_parts(directed, rank) for rank in self._ranks]
        lengths = [list(map(len, owner_parts)) for owner_parts in parts]
        returned = _exchanged(answers, lengths, gradient, group)
        for part, values in zip(chain(*parts), chain(*returned), strict=True):
            part.copy_(values)

    def _owned_lengths(self, rank: int) -> list[int]:
        """Returns how many values of each of this rank's matrices are in the shard of ``rank``."""
        return [matrix.specs[rank].length for matrix in self._owned]

    def _owned_parts(self, directed: Mapping[str, Tensor], rank: int) -> list[Tensor]:
        """Extracts the values that belong to the shard of ``rank`` from this rank's matrices."""
        parts = list[Tensor]()
        for matrix in self._owned:
            parts.append(matrix.specs[rank].extract(directed[matrix.name].reshape(-1)))
        return parts

    def _assembled(self, parts: Sequence[Sequence[Tensor]], like: Tensor) -> dict[str, Tensor]:
        """Assembles this rank's matrices from the parts of all ranks."""
        matrices = dict[str, Tensor]()
        for index, matrix in enumerate(self._owned):
            full = like.new_empty(math.prod(matrix.stack))
            for rank in self._ranks:
                matrix.specs[rank].insert(full, parts[rank][index])
            matrices[matrix.name] = full.view(matrix.stack)
        return matrices


def direct_shards(
    fragment: SavedFragment, shards: Sequence[OuterState], direction: Direction | None
) -> list[Tensor]:
    """Computes the direction of a mean outer gradient from all shards of a saved fragment."""
    gradients = [shard.values for shard in shards]
    stacks = fragment.get("stacks", {})
    if direction is None or not stacks:
        return gradients
    full = {name: parameter.values for name, parameter in to_parameters(fragment, shards).items()}
    matrices = {name: full[name].view(stack) for name, stack in stacks.items()}
    for name, directed in directed_by(direction, matrices).items():
        full[name] = directed.reshape(-1)
    return to_shards(fragment, full, list(map(len, gradients)))


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    lengths: Sequence[Sequence[int]],
    like: Tensor,
    group: Communicator,
) -> list[list[Tensor]]:
    """Sends each rank its vectors and returns the vectors received from each rank. In-group
    collective.
    """
    if group.size == 1:
        return list(map(list, sent))
    messages = [torch.cat([like.new_empty(0), *vectors]) for vectors in sent]
    received = group.all_to_all_vectors(messages, list(map(sum, lengths)))
    return [
        list(message.split(list(sizes))) for message, sizes in zip(received, lengths, strict=True)
    ]
