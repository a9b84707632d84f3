"""Exchanges state that no optimizer trains, such as buffers and frozen parameters.

[Note: kinds of untrained state] Each untrained tensor has one kind. Users can set kinds with name
patterns in the engine's ``untrained`` argument. `default_kinds` chooses all other kinds.

=========  ==============================  ====================================================
kind       default for                     treatment during training
=========  ==============================  ====================================================
``mean``   floating-point buffers, such    At each landing of the fragment, groups take the
           as statistics and moving        plain mean, computed with at least float32
           averages                        precision. Means are mixed with local values in the
                                           same way as parameters.
``first``  single values, integers, and    At each landing, groups take the values of the first
           vectors of length one           group that was included in the mean, in the buffer's
                                           dtype.
``own``    frozen parameters, and modules  During training, each group keeps its own values. In
           whose buffers are `large`       validation, in checkpoints and after training, all
                                           groups use the first group's values.
=========  ==============================  ====================================================

A tensor that any group has changed is exchanged as soon as the other groups have been notified.
Constants are not exchanged and remain bit-identical. If all groups have changed integers in the
same way, as with a counter, each group keeps and shows its current values. Non-persistent buffers
belong to a single rank unless a pattern matches their name.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import reduce
from itertools import compress
from math import isfinite
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm.guard import NOT_FINITE
from lightning_sdiloco.algorithm.merge import mix
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.shards import clean_name, digest, is_sharded, local

_log = logging.getLogger(__name__)

# If a module's buffers are larger than this, they are exchanged only if they are smaller than half
# of the trained parameters.
_SMALL_BYTES = 256 * 1024
_LARGEST_SHARE = 0.5

# The tolerance for recognising vectors of length one, as in spectral norms and feature queues.
_TOLERANCE = 1e-3

# Each exchanged tensor has a bit that is set if the tensor has changed. If there are too many
# tensors, they share the last of these bits. The highest bit is set if a tensor of the kind `own`
# has changed.
_BITS = 63
_OWN_MOVED = 1 << _BITS

# The approximate number of values per tensor that are compared at a launch.
_SAMPLED = 64


class Kind(str, Enum):
    """The kind of a tensor that no optimizer trains; see [Note: kinds of untrained state]."""

    MEAN = "mean"
    FIRST = "first"
    OWN = "own"


class Place(NamedTuple):
    """The location of a tensor in a model. The tensor is looked up on each access, because code may
    replace it.
    """

    name: str
    model: nn.Module
    path: tuple[str, ...]
    key: str
    is_parameter: bool

    @property
    def _held(self) -> dict[str, Any]:
        module = self.model
        for step in self.path:
            child = module._modules.get(step)
            if child is None:
                return {}
            module = child
        return module._parameters if self.is_parameter else module._buffers

    @property
    def is_there(self) -> bool:
        """Whether the model currently has the tensor."""
        return self._held.get(self.key) is not None

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor | None = self._held.get(self.key)
        if tensor is None:
            raise ValueError(
                f"{self.name!r} was part of the model when it was divided into fragments, but no"
                " longer exists. Replace or remove modules before training or between epochs. In"
                " your own training loop, call recut() afterwards on all ranks."
            )
        return tensor

    def write(self, values: Tensor) -> None:
        """Overwrites the tensor, or replaces a buffer if its shape has changed."""
        held = self.values
        if held.shape == values.shape:
            held.copy_(values)
        else:
            self._held[self.key] = values.to(held.device, copy=True)

    @property
    def values(self) -> Tensor:
        """A detached view of this rank's part of the tensor."""
        return local(self.tensor)


def untrained_places(model: nn.Module) -> Iterator[Place]:
    """Yields the places of all buffers and frozen parameters without duplicates."""
    seen = set[int]()
    for prefix, module in model.named_modules():
        path = tuple(prefix.split(".")) if prefix else ()
        tensors = list[tuple[str, Tensor | None, bool]]()
        for key, buffer in module._buffers.items():
            tensors.append((key, buffer, False))
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                tensors.append((key, parameter, True))
        for key, tensor, is_parameter in tensors:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield Place(clean_name(".".join((*path, key))), model, path, key, is_parameter)


def kinds_of(
    model: nn.Module, named: Mapping[str, str], before: Mapping[str, Kind]
) -> dict[Place, Kind]:
    """Returns the kind of each untrained tensor, except for buffers that belong to a single rank.

    Args:
        model: The model to be divided.
        named: The user's kinds by name pattern.
        before: The kinds by name from an earlier division
            of the model.
    """
    places = list(untrained_places(model))
    _require_matches(model, places, named)
    kinds = default_kinds(model, places)
    for place in kinds:
        kinds[place] = before.get(place.name, kinds[place])
    for place in places:
        for pattern, kind in named.items():
            if fnmatchcase(place.name, pattern):
                kinds[place] = Kind(kind)
    for place, kind in kinds.items():
        if kind is not Kind.OWN:
            _require_whole(place)
        if kind is Kind.MEAN and not place.tensor.is_floating_point():
            raise ValueError(
                f"untrained={{{place.name!r}: 'mean'}} is not possible, because"
                f" {place.tensor.dtype} values cannot be averaged. Choose 'first' or 'own'."
            )
    return kinds


def default_kinds(model: nn.Module, places: Iterable[Place]) -> dict[Place, Kind]:
    """Chooses the default kind of each tensor; see [Note: kinds of untrained state]."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained_bytes = 4 * sum(parameter.numel() for parameter in trained)
    most_bytes = max(_SMALL_BYTES, _LARGEST_SHARE * trained_bytes)
    kinds = dict[Place, Kind]()
    module_bytes = dict[tuple[str, ...], int]()
    for place in places:
        if place.is_parameter:
            kinds[place] = Kind.OWN
        elif _is_persistent(place):
            kinds[place] = Kind.MEAN if has_mean(place.values) else Kind.FIRST
            nbytes = place.values.numel() * place.values.element_size()
            module_bytes[place.path] = module_bytes.get(place.path, 0) + nbytes
    for place in kinds:
        if is_sharded(place.tensor) or module_bytes.get(place.path, 0) > most_bytes:
            kinds[place] = Kind.OWN
    return kinds


def has_mean(values: Tensor) -> bool:
    """Returns whether a mean of such values is meaningful.

    Examples:
        >>> [has_mean(values) for values in (torch.zeros(3), torch.zeros(()), torch.arange(3), torch.eye(3))]
        [True, False, False, False]
    """
    if not values.is_floating_point() or values.numel() < 2:
        return False
    for dim in {0, values.ndim - 1}:
        lengths = torch.linalg.vector_norm(values.to(torch.float32), dim=dim)
        if bool(((lengths - 1).abs() < _TOLERANCE).all()):
            return False
    return True


def _is_persistent(place: Place) -> bool:
    module = place.model.get_submodule(".".join(place.path))
    return place.key not in module._non_persistent_buffers_set


def _require_matches(model: nn.Module, places: Sequence[Place], named: Mapping[str, str]) -> None:
    for pattern in named:
        if any(fnmatchcase(place.name, pattern) for place in places):
            continue
        for full_name, parameter in model.named_parameters():
            name = clean_name(full_name)
            if parameter.requires_grad and fnmatchcase(name, pattern):
                raise ValueError(
                    f"untrained={{{pattern!r}: ...}} matches the trainable parameter {name!r},"
                    " but applies only to buffers and frozen parameters. Trainable parameters"
                    " are always averaged. Correct or remove the pattern."
                )
        shown = ", ".join(repr(place.name) for place in places[:5]) or "none"
        more = ", ..." if len(places) > 5 else ""
        raise ValueError(
            f"untrained={{{pattern!r}: ...}} matches no buffer or frozen parameter of the model."
            f" Available names: {shown}{more}. Correct or remove the pattern."
        )


def _require_whole(place: Place) -> None:
    if is_sharded(place.tensor):
        raise ValueError(
            f"The {'parameter' if place.is_parameter else 'buffer'} {place.name!r} is sharded."
            " One rank of each group sends untrained state, so the tensor must not be sharded."
            " Use a plain tensor, register the buffer with persistent=False, or pass"
            f" untrained={{{place.name!r}: 'own'}}."
        )


# Bytes and bits


def to_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of a tensor as a flat tensor, without copying contiguous tensors."""
    return values.detach().reshape(-1).contiguous().view(torch.uint8)


def _is_whole(values: Tensor) -> Tensor:
    """Returns whether all values are integers."""
    if not values.is_floating_point():
        return torch.tensor(not values.is_complex(), device=values.device)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return (values == values.trunc()).all()


def from_bytes(flat: Tensor, like: Tensor) -> Tensor:
    """Creates a tensor with the shape and dtype of ``like`` from a copy of its bytes."""
    # A view with a different dtype must start at an aligned address.
    return flat.clone().view(like.dtype).view(like.shape)


def all_alike(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a mask of the values that are bit-identical in all tensors."""
    first = tensors[0]
    first_bytes = to_bytes(first)
    is_alike = torch.ones(first.numel(), dtype=torch.bool, device=first.device)
    for tensor in tensors[1:]:
        same_bytes = to_bytes(tensor) == first_bytes
        is_alike &= same_bytes.view(first.numel(), first.element_size()).all(dim=1)
    return is_alike.view(first.shape)


def are_alike(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits, even for NaNs."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(to_bytes(tensor), to_bytes(other))


def elementwise_mean(rows: Tensor, outer: Tensor | None) -> tuple[Tensor, list[bool]]:
    """Returns the plain mean over the groups, and for each group whether it is excluded.

    A value that is equal in all groups, such as an infinity, remains bit-identical. A group is
    excluded if it has a non-finite value that differs from another group's value.

    Args:
        rows: The values of each group.
        outer: The values to return if all groups are excluded. If None, the first group's values
            are returned.

    Examples:
        >>> inf = float("inf")
        >>> rows = torch.tensor([[0.1, -inf, 1.0], [0.1, -inf, 3.0], [0.1, -inf, 5.0]])
        >>> elementwise_mean(rows, None)
        (tensor([0.1000,   -inf, 3.0000]), [False, False, False])
        >>> elementwise_mean(torch.tensor([[inf], [3.0]]), None)
        (tensor([3.]), [True, False])
    """
    is_alike = all_alike(rows.unbind()) & ~rows[0].isnan()
    left_out = ((~rows.isfinite()) & ~is_alike).any(dim=1).tolist()
    counted = rows[[not is_out for is_out in left_out]]
    mean = rows[0] if outer is None else outer
    if len(counted):
        mean = counted.mean(dim=0)
    return torch.where(is_alike, rows[0], mean), left_out


def mix_in(values: Tensor, outer: Tensor, kept_share: float, is_kept: Tensor) -> None:
    """Mixes outer values into local values elementwise.

    Args:
        values: The local values. Values that equal the outer values are unchanged, and other
            non-finite values are replaced.
        outer: The outer values.
        kept_share: The share of the local values in the result.
        is_kept: A mask of local values that remain unchanged, or a single boolean for all values.
    """
    # Code may have replaced the tensor with a tensor on another device.
    outer = outer.to(values.device, values.dtype)
    is_kept = is_kept.to(values.device)
    mixed = outer
    if kept_share:
        mixed = values.clone()
        mix(mixed, outer, kept_share)
        mixed = torch.where(values.isfinite(), mixed, outer)
    values.copy_(torch.where(is_kept | (values == outer), values, mixed))


def new_outer(
    kind: Kind, sent: Mapping[str, Tensor], outer: Tensor, *, keeps_outer: bool = True
) -> tuple[Tensor, list[str]]:
    """Returns a tensor's new outer values and the senders that are excluded because of non-finite
    values.

    Args:
        kind: `Kind.MEAN` or `Kind.FIRST`.
        sent: The values of all included senders by name, in order.
        outer: The previous outer values.
        keeps_outer: Whether to keep the previous outer values if
            all senders are excluded. Otherwise, the first sender's values are used.
    """
    if kind is Kind.MEAN:
        rows = torch.stack([values.flatten() for values in sent.values()])
        mean, is_left_out = elementwise_mean(rows, outer.flatten() if keeps_outer else None)
        return mean.view(outer.shape), list(compress(sent, is_left_out))
    spoilt = [sender for sender, values in sent.items() if values.isnan().any()]
    for sender, values in sent.items():
        if sender not in spoilt:
            return values, spoilt
    return outer if keeps_outer else next(iter(sent.values())), spoilt


def say_left_out(left_out: Mapping[str, Sequence[str]]) -> None:
    """Logs a warning about senders that were excluded from a tensor's mean."""
    sources = list[str]()
    for name, senders in left_out.items():
        sources += [f"{name!r} of {sender}" for sender in senders]
    if sources:
        _log.warning(
            "Non-finite buffers are excluded from the mean and replaced with the outer values: %s.",
            ", ".join(sources),
        )


# The untrained state of a fragment


class Arrived(NamedTuple):
    """The untrained state of a fragment that a flight received, indexed by tensor.

    Attributes:
        outer: The new outer values.
        is_alike: Whether all groups have changed the tensor to the same integers, as with a
            counter.
        is_kept: A mask of values that this group keeps, because the new outer values equal the
            values that it sent.
        own: The first site's own untrained state by name, from the last record of a federation.
    """

    outer: Mapping[int, Tensor]
    is_alike: Mapping[int, Tensor]
    is_kept: Mapping[int, Tensor]
    own: Mapping[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensors in self for tensor in tensors.values()]


NOTHING = Arrived({}, {}, {}, {})


class Changes(NamedTuple):
    """How the untrained state of a fragment differs from its outer values at a launch.

    Attributes:
        bits: One bit for each exchanged tensor that differs, and one that indicates whether a
            tensor of the kind `own` has changed.
        size: The size of the tensors that differ; see `UntrainedState.size`.
    """

    bits: int
    size: float


class OwnState:
    """The untrained state that each group keeps for itself, and the detection of changes since the
    start.

    Attributes:
        places: The places of the tensors in the model.
        known: The names of tensors from earlier fragments of the model.
        digests: The digests at the start of training by name, with None for tensors that differed
            between groups.
        of_first: The first site's own values in the last round of a federation, by name.
    """

    def __init__(self, places: Sequence[Place], digests: Mapping[str, int | None]) -> None:
        self.places = list(places)
        self.known = set(digests)
        self.digests = dict[str, int | None]()
        for place in self.places:
            self.digests[place.name] = digests.get(place.name, digest(place.values))
        self.of_first = dict[str, Tensor]()
        self._forms = {place.name: _form(place.tensor) for place in self.places}
        self._mark = self._marked()
        self._has_changed = False

    def has_changed(self) -> bool:
        """Returns whether any tensor has changed. The full values are compared only if a sample or
        a version differs.
        """
        mark = self._marked()
        if mark != self._mark:
            # Code may have written the same values again, as a broadcast of buffers does.
            self._has_changed = self._has_changed or bool(self.changed())
            self._mark = mark
        return self._has_changed

    def changed(self) -> list[Place]:
        """Compares all values and returns the places that have changed since the start."""
        return [place for place in self.places if digest(place.values) != self.digests[place.name]]

    def nbytes(self) -> list[int]:
        """Returns each tensor's size in bytes at the division, including parts on other ranks."""
        forms = [self._forms[place.name] for place in self.places]
        return [shape.numel() * dtype.itemsize for shape, dtype in forms]

    def new_empty(self, place: Place) -> Tensor:
        """Returns an uninitialised tensor with the shape and dtype that the tensor had at the
        division.
        """
        shape, dtype = self._forms[place.name]
        return torch.empty(shape, dtype=dtype, device=place.tensor.device)

    def shown_of_first(self) -> dict[str, Tensor]:
        """Returns `of_first` without tensors whose shapes have changed on this rank."""
        fitting = self.fitting(self.of_first)
        for name in self.of_first.keys() - fitting.keys():
            _log.warning(
                "%r has a different shape or dtype on the first site, so this site keeps its own"
                " values.",
                name,
            )
        return fitting

    def fitting(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all values that match the shape and dtype of an unsharded tensor of the model."""
        fitting = dict[str, Tensor]()
        for place in self.places:
            candidate = values.get(place.name)
            if candidate is None or is_sharded(place.tensor):
                continue
            if _form(candidate) == _form(place.tensor):
                fitting[place.name] = candidate
        return fitting

    def copies(self) -> list[Tensor]:
        """Copies each unsharded tensor that has changed since the start. Other tensors are
        represented by empty tensors.
        """
        changed = list[str]()
        if self.has_changed():
            changed = [place.name for place in self.changed()]
        copies = list[Tensor]()
        for place in self.places:
            tensor = place.tensor
            is_whole = not is_sharded(tensor) and _form(tensor) == self._forms[place.name]
            if is_whole and place.name in changed:
                copies.append(place.values.clone())
            else:
                copies.append(place.values.new_empty(0))
        return copies

    def _marked(self) -> tuple[list[tuple[int, int]], int]:
        versions = list[tuple[int, int]]()
        samples = list[Tensor]()
        for place in self.places:
            values = place.values
            versions.append((values.data_ptr(), place.tensor._version))
            # Some code, such as ``p.data.mul_()``, bypasses autograd and does not change the
            # version.
            if values.is_contiguous():
                stride = max(1, values.numel() // _SAMPLED)
                samples.append(to_bytes(values.view(-1)[::stride]))
        return versions, digest(torch.cat(samples)) if samples else 0


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


class UntrainedState:
    """A fragment's untrained state. It consists of exchanged tensors with outer values and of
    tensors that each group keeps.

    Attributes:
        kinds: The kind of each exchanged tensor.
        outer: The outer values of each exchanged tensor. Means have at least float32 precision, and
            other values keep their dtype.
        own: The tensors that are not exchanged.
        own_moved: Whether any group has changed a tensor of the kind `own`. All groups agree on
            this value.
    """

    def __init__(
        self,
        kinds: Mapping[Place, Kind],
        before: "Sequence[UntrainedState]" = (),
        named: Collection[str] = (),
    ) -> None:
        own_places = [place for place in kinds if kinds[place] is Kind.OWN]
        digests = dict[str, int | None]()
        for state in before:
            digests |= state.own.digests
        self.own: OwnState = OwnState(own_places, digests)
        self.own_moved: bool = any(state.own_moved for state in before)
        self._places = [place for place in kinds if kinds[place] is not Kind.OWN]
        self.kinds = [kinds[place] for place in self._places]
        # The name patterns for which a user has set kinds. All other kinds depend on the initial
        # values.
        self._named = tuple(named)
        self._shapes = [place.values.shape for place in self._places]
        self._has_warned = False
        self.outer = [self._copied(index) for index in range(len(self._places))]
        # Whether the integers of a tensor have changed in the same way in all groups. Each group
        # shows its current values of such tensors, which are newer than the outer values.
        self._is_alike = [torch.tensor(False, device=outer.device) for outer in self.outer]
        # The tensors that code has overwritten during validation. Earlier flights must not land on
        # them.
        self._rewritten = set[int]()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the exchanged tensors."""
        return tuple(place.name for place in self._places)

    @property
    def frozen_places(self) -> list[Place]:
        """The places of exchanged frozen parameters."""
        return [place for place in self._places if place.is_parameter]

    def tensors(self) -> list[Tensor]:
        """Returns the exchanged tensors of the model."""
        return [place.tensor for place in self._places]

    def kinds_by_name(self) -> dict[str, Kind]:
        """Returns the kinds of all tensors by name."""
        kinds = dict(zip(self.names, self.kinds, strict=True))
        return kinds | {place.name: Kind.OWN for place in self.own.places}

    def _copied(self, index: int) -> Tensor:
        values = self._places[index].values
        dtype = values.dtype
        if self.kinds[index] is Kind.MEAN:
            dtype = torch.promote_types(dtype, torch.float32)
        return values.to(dtype, copy=True)

    def note_rewritten(self, names: Collection[str]) -> None:
        """Records overwritten tensors. Flights with older values must not land on them."""
        self._rewritten |= {index for index, name in enumerate(self.names) if name in names}

    def launched(self) -> None:
        """Records that a flight has read the current values of the model."""
        self._rewritten.clear()

    def let_go(self) -> None:
        """Replaces removed or reshaped tensors with copies until the model is divided again."""
        self.own.places = [place for place in self.own.places if place.is_there]
        for index, place in enumerate(self._places):
            if not place.is_there or not self._fits(index):
                outside = nn.Module()
                outside.register_buffer(place.key, self.outer[index].clone())
                self._places[index] = Place(place.name, outside, (), place.key, is_parameter=False)

    def expect_unlike(self, alike: Collection[str]) -> None:
        """Records frozen parameters that may differ between groups, such as those of a newly copied
        module.

        Args:
            alike: The names of tensors that are equal in all groups.
        """
        for place in self.own.places:
            if place.name not in alike and place.name not in self.own.known:
                self.own.digests[place.name] = None
                self.own_moved = True

    def snapshot(self) -> list[Tensor]:
        """Copies the current values of all exchanged tensors, or the outer values of tensors that
        can no longer be exchanged.
        """
        copies = list[Tensor]()
        for index, outer in enumerate(self.outer):
            values = self._places[index].values if self._is_exchanged(index) else outer
            # Groups expect a fixed length for each tensor, even if code has replaced the tensor.
            copies.append(values.to(outer.device, outer.dtype, copy=True))
        return copies

    def _fits(self, index: int) -> bool:
        """Returns whether the outer values can represent the shape and every value of the model's
        tensor.
        """
        values = self._places[index].values
        if values.shape != self._shapes[index]:
            return False
        dtype = self.outer[index].dtype
        return torch.promote_types(values.dtype, dtype) == dtype

    def _is_exchanged(self, index: int) -> bool:
        if self._fits(index):
            return True
        if not self._has_warned:
            place = self._places[index]
            _log.warning(
                "%r had the shape %s and outer values of %s when the model was divided, but now has"
                " the shape %s and values of %s. The worker groups cannot exchange the new values,"
                " so each group keeps its own values. Pass untrained={%r: 'own'} to confirm this.",
                place.name,
                tuple(self._shapes[index]),
                self.outer[index].dtype,
                tuple(place.values.shape),
                place.values.dtype,
                place.name,
            )
        self._has_warned = True
        return False

    def changes(self, snapshot: Sequence[Tensor], *, is_unlike: bool) -> "Changes":
        """Compares a snapshot with the outer values.

        If ``is_unlike`` is True, the outer values differ between groups. The groups then cannot
        agree on what has changed, so all tensors are exchanged.
        """
        size = 0.0
        changed: Iterable[int] = range(len(snapshot))
        if not is_unlike:
            changed = self.changed_since(snapshot)
            size = self.size(snapshot, changed)
        bits = reduce(or_, map(_bit, changed), 0)
        if self.own_moved or self.own.has_changed():
            bits |= _OWN_MOVED
        return Changes(bits, size)

    def travelling(self, changed: int) -> list[int]:
        """Returns the indices of the tensors to exchange, given the combined bits of all groups."""
        return [index for index in range(len(self.outer)) if changed & _bit(index)]

    def changed_since(self, snapshot: Sequence[Tensor]) -> list[int]:
        """Returns the indices of all tensors that a site sends. Exchanged tensors that have changed
        come first, followed by non-empty tensors of the kind `own`.
        """
        changed = list[int]()
        for index, outer in enumerate(self.outer):
            if not are_alike(snapshot[index], outer):
                changed.append(index)
        for index in range(len(self.outer), len(snapshot)):
            if snapshot[index].numel():
                changed.append(index)
        return changed

    def size(self, snapshot: Sequence[Tensor], indices: Iterable[int]) -> float:
        """Returns the maximum size of the tensors at the given indices of a snapshot. The size of a
        tensor is its largest value divided by its largest outer value, or by 1 if all outer values
        are 0.

        Integers and tensors of the kind `own` are ignored. The size is `NOT_FINITE` if a value is
        not finite but its outer value is finite.
        """
        extents = list[Tensor]()
        for index in indices:
            is_outer = index < len(self.outer) and self.outer[index].numel() > 0
            if is_outer and self.outer[index].is_floating_point():
                extents.append(_extents(snapshot[index], self.outer[index]))
        if not extents:
            return 0.0
        size = 0.0
        for largest, largest_outer in torch.stack(extents).tolist():
            if not isfinite(largest):
                return NOT_FINITE
            size = max(size, largest / (largest_outer or 1.0))
        return min(size, NOT_FINITE / 2.0)

    def nbytes(self, index: int) -> int:
        """Returns the size in bytes of a tensor's values in a message."""
        return self.outer[index].numel() * self.outer[index].element_size()

    def commit(self, arrived: Arrived, changed: int) -> None:
        """Commits new outer values and records whether any group has changed a tensor of the kind
        `own`.
        """
        for index, values in arrived.outer.items():
            self.outer[index] = values
            self._is_alike[index] = arrived.is_alike[index]
        self.own.of_first.update(arrived.own)
        self.own_moved = self.own_moved or bool(changed & _OWN_MOVED)

    def land(self, arrived: Arrived, kept_share: float) -> None:
        """Writes new outer values into the model. Means are mixed with local values, and a share of
        1 keeps all local values.
        """
        for index in arrived.outer:
            is_mean = self.kinds[index] is Kind.MEAN
            if index in self._rewritten or not self._is_exchanged(index):
                continue
            if is_mean or kept_share < 1.0:
                share = kept_share if is_mean else 0.0
                mix_in(self._places[index].values, self.outer[index], share, arrived.is_kept[index])

    def write(self) -> None:
        """Writes the outer values into the model, except for counters that all groups have changed
        in the same way.
        """
        for index, is_alike in enumerate(self._is_alike):
            if self._is_exchanged(index):
                mix_in(self._places[index].values, self.outer[index], 0.0, is_alike)

    def recover(self) -> None:
        """Replaces all means and all non-finite values with outer values."""
        for index, kind in enumerate(self.kinds):
            if self._is_exchanged(index):
                values = self._places[index].values
                is_kept = torch.tensor(kind is not Kind.MEAN, device=values.device)
                mix_in(values, self.outer[index], 0.0, is_kept & values.isfinite())

    def write_values(self, outer: Mapping[int, Tensor]) -> None:
        """Writes values received by a flight into the model."""
        for index, values in outer.items():
            if self._is_exchanged(index):
                self._places[index].values.copy_(values)

    def take_local(self) -> None:
        """Replaces the outer values with the local values, which must be equal in all groups."""
        self.outer = self.snapshot()

    def named(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.outer, strict=True))

    def digested(self) -> Tensor | None:
        """Returns the outer values as a vector of 32-bit words for a digest, or None if there are
        no outer values.
        """
        if not self.outer:
            return None
        flat = torch.cat([to_bytes(values) for values in self.outer])
        return nn.functional.pad(flat, (0, -flat.numel() % 4)).view(torch.int32)

    def state_dict(self) -> dict[str, Any]:
        """Returns the outer values on the host and the state of tensors that each group keeps."""
        return {
            "buffer_names": list(self.names),
            "buffer_kinds": [kind.value for kind in self.kinds],
            "buffers": [values.to("cpu") for values in self.outer],
            "buffers_alike": [is_alike.to("cpu") for is_alike in self._is_alike],
            "own_moved": self.own_moved,
            "own_of_first": {name: values.to("cpu") for name, values in self.own.of_first.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved_kinds = zip(state["buffer_names"], state["buffer_kinds"], self.kinds, strict=True)
        for index, (name, saved, kind) in enumerate(list(saved_kinds)):
            if saved == kind.value:
                continue
            if any(fnmatchcase(name, pattern) for pattern in self._named):
                raise ValueError(
                    f"{name!r} was saved as untrained state of the kind {saved!r}, but its kind"
                    f" is now {kind.value!r}. Pass untrained={{{name!r}: {saved!r}}} to resume."
                )
            # The kind depends on the initial values, which have changed.
            self.kinds[index] = Kind(saved)
            self.outer[index] = self._copied(index)
        self._load_outer(state["buffers"])
        pairs = zip(state["buffers_alike"], self.outer, strict=True)
        self._is_alike = [is_alike.to(outer.device, copy=True) for is_alike, outer in pairs]
        self.own_moved = state["own_moved"]
        self.own.of_first = dict(state["own_of_first"])

    def start_from(self, named: Mapping[str, Tensor]) -> None:
        """Loads outer values by name. Tensors that are not named keep their values."""
        self._load_outer([named.get(name, values) for name, values in self.named().items()])
        self._is_alike = [torch.tensor(False, device=outer.device) for outer in self.outer]

    def _load_outer(self, outer: Sequence[Tensor]) -> None:
        pairs = zip(outer, self.outer, strict=True)
        self.outer = [values.to(before.device, before.dtype, copy=True) for values, before in pairs]


def _extents(values: Tensor, outer: Tensor) -> Tensor:
    """Returns the largest magnitudes of values and outer values where outer values are finite."""
    rows = torch.stack([values.to(torch.float32), outer.to(torch.float32)])
    finite = torch.where(outer.isfinite(), rows.abs(), 0.0)
    return finite.reshape(2, -1).amax(dim=1)


def _bit(index: int) -> int:
    return 1 << min(index, _BITS - 1)


def untrained_state_of(
    model: nn.Module,
    fragments: Sequence[Fragment],
    named: Mapping[str, str],
    before: Sequence[UntrainedState] = (),
) -> list[UntrainedState]:
    """Assigns each untrained tensor to the fragment that contains parameters of the nearest module.

    Args:
        model: The model.
        fragments: The fragments of the model.
        named: The user's kinds by name pattern.
        before: The untrained state of the previous fragments.
    """
    fragment_of = _fragments_of_modules(fragments)
    kinds: list[dict[Place, Kind]] = [{} for _ in fragments]
    former_kinds = dict[str, Kind]()
    for state in before:
        former_kinds |= state.kinds_by_name()
    for place, kind in kinds_of(model, named, former_kinds).items():
        *path, _ = place.name.split(".")
        while tuple(path) not in fragment_of:
            path.pop()
        kinds[fragment_of[tuple(path)]][place] = kind
    return [UntrainedState(fragment_kinds, before, named) for fragment_kinds in kinds]


def _fragments_of_modules(fragments: Sequence[Fragment]) -> dict[tuple[str, ...], int]:
    """Maps each module's path to the first fragment that contains any of its parameters."""
    fragment_of = dict[tuple[str, ...], int]()
    for index, fragment in enumerate(fragments):
        for name in fragment.names:
            path = tuple(name.split("."))
            for depth in range(len(path)):
                fragment_of.setdefault(path[:depth], index)
    return fragment_of


# The untrained state that groups send and agree on


def agreed(
    state: UntrainedState,
    sent: Mapping[int, Mapping[str, Tensor]],
    *,
    keeps_outer: bool = True,
    speaks: bool = True,
) -> Tensor:
    """Returns the new outer values as bytes, followed by one byte per tensor. This byte is set if
    all groups have changed the tensor to the same integers.

    Values that are not integers may be equal in all groups by chance, but differ when they are
    shown.

    Args:
        state: The untrained state of the fragment.
        sent: The bytes of each exchanged tensor by index and sender. All included senders are
            listed in order.
        keeps_outer: See `new_outer`.
        speaks: Whether to log excluded senders.
    """
    values = list[Tensor]()
    is_alike = list[Tensor]()
    left_out = dict[str, list[str]]()
    for index, senders in sent.items():
        before = state.outer[index]
        tensors = {sender: from_bytes(piece, like=before) for sender, piece in senders.items()}
        new, spoilt = new_outer(state.kinds[index], tensors, before, keeps_outer=keeps_outer)
        if spoilt and all_alike([before, *tensors.values()]).all():
            # A non-finite constant is kept, because no group has changed it.
            new = before
            spoilt = []
        values.append(to_bytes(new))
        is_alike.append(to_bytes(_have_changed_alike(list(tensors.values()), new, before)))
        left_out[state.names[index]] = spoilt
    if speaks:
        say_left_out(left_out)
    return torch.cat([*values, *is_alike])


def _have_changed_alike(tensors: Sequence[Tensor], new: Tensor, before: Tensor) -> Tensor:
    has_changed = ~all_alike([new, before]).all()
    return all_alike(tensors).all() & has_changed & _is_whole(new)


def arrived(
    state: UntrainedState, travelling: Sequence[int], flat: Tensor, snapshot: Sequence[Tensor]
) -> Arrived:
    """Reads the bytes that `agreed` returned.

    Args:
        state: The untrained state of the fragment.
        travelling: The indices of the tensors that were sent.
        flat: The bytes to read.
        snapshot: This rank's values at the launch.
    """
    sizes = [state.nbytes(index) for index in travelling]
    pieces = flat.split([*sizes, *[1] * len(sizes)])
    outer = dict[int, Tensor]()
    is_alike = dict[int, Tensor]()
    is_kept = dict[int, Tensor]()
    for position, index in enumerate(travelling):
        before = state.outer[index]
        outer[index] = from_bytes(pieces[position], like=before)
        is_alike[index] = pieces[len(sizes) + position].view(()).bool()
        is_same = all_alike([snapshot[index], outer[index]])
        # Unless a tensor is a mean, a group keeps either all or none of its values.
        is_kept[index] = is_same if state.kinds[index] is Kind.MEAN else is_same.all()
    return Arrived(outer, is_alike, is_kept, {})


def arrived_bytes(state: UntrainedState, travelling: Sequence[int]) -> int:
    """Returns the number of bytes that `agreed` returns."""
    return sum(state.nbytes(index) + 1 for index in travelling)


# The first group's values of the state that each group keeps


def buffer_places(model: nn.Module) -> list[Place]:
    """Returns the places of all buffers of a model, including those that belong to one rank."""
    return [place for place in untrained_places(model) if not place.is_parameter]


def first_own(states: Sequence[UntrainedState], topology: Topology) -> dict[str, Tensor]:
    """Returns the first group's own untrained state by name, wherever it differs from this rank's.
    All ranks must call this function.

    If possible, a group without NaNs in the differing tensors is used as the first group.
    """
    places = [place for state in states for place in state.own.places]
    if not places or topology.world.size == 1:
        return {}
    differing = _differing(places, topology)
    is_spoilt = any(bool(place.values.isnan().any()) for place in differing)
    source = _first_whole_group(topology.world.all_gather_object(is_spoilt), topology)
    received = dict[str, Tensor]()
    for place in differing:
        flat = to_bytes(place.values.contiguous()).clone()
        if is_sharded(place.tensor):
            topology.peers.broadcast(flat, source)
        else:
            topology.world.broadcast(flat, source * topology.group_size)
        values = from_bytes(flat, like=place.values)
        if not are_alike(values, place.values):
            received[place.name] = values
    return received


def _differing(places: Sequence[Place], topology: Topology) -> list[Place]:
    """Returns all places whose values differ between ranks but have the same shape and dtype. All
    ranks must call this function.
    """
    digests = list[tuple[int, list[int | str]]]()
    for place in places:
        form = [*place.values.shape, str(place.values.dtype)]
        digests.append((digest(place.values), form))
    ranks = topology.world.all_gather_object(digests)
    differing = list[Place]()
    for index, place in enumerate(places):
        holders = ranks
        if is_sharded(place.tensor):
            # Only ranks with the same part of a sharded tensor are compared with each other.
            holders = ranks[topology.group_rank :: topology.group_size]
        held = [rank[index] for rank in holders]
        _, first_form = held[0]
        if any(form != first_form for _, form in held):
            _log.warning(
                "%r has a different shape or dtype on other ranks, so each rank keeps its own"
                " values.",
                place.name,
            )
        elif held.count(held[0]) < len(held):
            differing.append(place)
    return differing


def _first_whole_group(spoilt: Sequence[bool], topology: Topology) -> int:
    size = topology.group_size
    for group in range(topology.num_groups):
        if not any(spoilt[group * size : (group + 1) * size]):
            return group
    return 0
