"""Collects a rank's state outside the engine, including the modules' extra state.

[Note: entries of a rank] The checkpoint file contains rank 0's state, including schedulers,
callbacks, loops and anything else that a user saves. To avoid storing anything twice, every other
rank's file contains only the entries that differ from rank 0's. Rank 0 sends the digests of its
entries, and every other rank compares them with its own. An entry is a leaf of nested dictionaries.

Tensors, numbers and strings are stored unchanged, as are lists, tuples and dictionaries of them.
Such entries can always be read with ``weights_only=True``. Any other object is packed into bytes,
which only a reader chosen by the caller can unpack.
"""

import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.engine.shards import clean_name

Place = tuple[str | int, ...]
"""The path of keys to an entry, starting at the outermost dictionary."""

Leaf = Any
"""Any object from a user or from torch."""

Tree = dict[Any, Leaf]
"""Nested dictionaries whose leaves are entries."""

Read = Callable[[io.BytesIO], object]
"""A function that unpacks an object or raises an error."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)

_DEEPEST = 8
"""The maximum depth of entries in nested dictionaries. A dictionary at this depth is treated as an
entry."""


class Entries(NamedTuple):
    """The entries of a rank; see [Note: entries of a rank]."""

    plain: list[tuple[Place, object]]
    packed: list[tuple[Place, Tensor]]
    missing: list[Place]
    """The entries that rank 0 has but this rank does not."""
    failures: list[str]
    """The entries that could not be pickled, each with the reason."""


def differing_from_first(tree: Tree, world: Communicator) -> Entries:
    """Returns this rank's entries that differ from rank 0's. All ranks must call this function."""
    # All ranks compute digests at the same time.
    digests = _digests(tree, _DEEPEST)
    first_digests = world.all_gather_object(digests if world.rank == 0 else None)[0]
    entries = Entries([], [], [], [])
    if world.rank:
        assert first_digests is not None, "rank 0 sends its digests"
        _collect(tree, digests, first_digests, (), entries)
    return entries


def entries_of(tree: Tree) -> Entries:
    """Returns all entries of a dictionary."""
    entries = Entries([], [], [], [])
    for key, value in tree.items():
        _store((key,), value, entries)
    return entries


def put(
    entries: Mapping[str, Leaf], tree: Tree, read: Read, without: Collection[str] = ()
) -> list[str]:
    """Inserts the entries of a rank into rank 0's state, except for entries under the keys in
    ``without``.

    Returns the entries that cannot be read, each with a reason.
    """
    failures = list[str]()
    for place in entries["missing"]:
        if place[0] not in without:
            _dictionary_of(place, tree).pop(place[-1], None)
    for place, value in entries["plain"]:
        if place[0] not in without:
            _dictionary_of(place, tree)[place[-1]] = value
    for place, packed in entries["packed"]:
        if place[0] in without:
            continue
        try:
            value = read(io.BytesIO(packed.numpy().tobytes()))
        except Exception as error:
            failures.append(_failure(place, error))
        else:
            _dictionary_of(place, tree)[place[-1]] = value
    return failures


def read_safely(packed: io.BytesIO) -> object:
    return torch.load(packed, map_location="cpu", weights_only=True)


# Extra state of modules


def extra_state(model: nn.Module) -> Tree:
    """Returns the entries of a model's ``state_dict`` that are neither parameters nor buffers."""
    state: Tree = nn.Module.state_dict(model, keep_vars=True)
    names = set[str]()
    tensors = set[int]()
    for name, tensor in _tensors(model):
        names.add(name)
        tensors.add(id(tensor))
    extra = Tree()
    for name, value in state.items():
        if name not in names and id(value) not in tensors:
            extra[clean_name(name)] = _copied(value)
    return extra


def load_extra_state(model: nn.Module, extra: Mapping[str, object]) -> None:
    """Restores only the entries that `extra_state` returned."""
    if not extra:
        return
    current: Tree = nn.Module.state_dict(model, keep_vars=True)
    names: dict[str, str] = {clean_name(name): name for name in current}
    state = OrderedDict[str, object]()
    for clean, value in extra.items():
        name = names.get(clean, clean)
        present = current.get(name)
        if isinstance(value, Tensor) and isinstance(present, Tensor):
            value = value.to(present.device)
        state[name] = value
    # Modules read their version from the metadata.
    state._metadata = getattr(current, "_metadata", {})  # type: ignore[attr-defined]
    nn.Module.load_state_dict(model, state, strict=False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return deepcopy(value)
    except Exception:
        # Some objects cannot be copied but may still be saved.
        return value


# Entries


def _is_tree(value: object) -> TypeGuard[Tree]:
    return isinstance(value, dict) and all(type(key) in (str, int) for key in value)


def _digests(value: object, depth: int) -> Leaf:
    """Returns nested dictionaries that contain the digest of each entry."""
    if depth and _is_tree(value):
        return {key: _digests(entry, depth - 1) for key, entry in value.items()}
    return _digest(value)


def _collect(
    tree: Tree,
    digests: Tree,
    first_digests: Tree,
    root: Place,
    entries: Entries,
) -> None:
    """Collects the entries of a tree whose digests differ from rank 0's digests.

    Args:
        tree: The tree, which may be part of a larger tree.
        digests: The digests of the tree.
        first_digests: The digests of rank 0's tree.
        root: The path of keys to the tree.
        entries: The collection to which entries are added.
    """
    entries.missing.extend((*root, key) for key in first_digests.keys() - digests.keys())
    for key, digest in digests.items():
        place = (*root, key)
        first_digest = first_digests.get(key)
        if isinstance(digest, dict) and isinstance(first_digest, dict):
            _collect(tree[key], digest, first_digest, place, entries)
        elif digest is None or digest != first_digest:
            _store(place, tree[key], entries)


def _store(place: Place, value: object, entries: Entries) -> None:
    try:
        if _is_plain(value):
            entries.plain.append((place, value))
        else:
            entries.packed.append((place, _packed(value)))
    except Exception as error:
        entries.failures.append(_failure(place, error))


def _is_plain(value: Leaf) -> bool:
    """Returns whether an object can always be read with ``weights_only=True``."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    return kind in _PLAIN or _is_ordinary(value)


def _is_ordinary(value: Leaf) -> bool:
    """Returns whether an object is an ordinary dense tensor."""
    is_tensor = type(value) in (Tensor, nn.Parameter)
    return (
        is_tensor
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
    )


def _digest(value: object) -> bytes | None:
    """Returns a digest of an object, or None if the object cannot be pickled."""
    seal = hashlib.sha256()
    try:
        _add_to(seal, value)
    except Exception:
        return None
    return seal.digest()


def _add_to(seal: Leaf, value: Leaf) -> None:
    kind = type(value)
    seal.update(kind.__qualname__.encode())
    if _is_ordinary(value):
        seal.update(f"{value.dtype}{tuple(value.shape)}".encode())
        seal.update(
            value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
        )
    elif kind in _PLAIN:
        seal.update(repr(value).encode())
    elif kind in (dict, OrderedDict):
        seal.update(f"{len(value)}".encode())
        for pair in value.items():
            _add_to(seal, pair)
    elif kind in (list, tuple):
        seal.update(f"{len(value)}".encode())
        for part in value:
            _add_to(seal, part)
    else:
        seal.update(_packed(value).numpy())


def _packed(value: object) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _dictionary_of(place: Place, tree: Tree) -> Tree:
    """Returns the dictionary that contains an entry of a tree."""
    for key in place[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    return tree


def _failure(place: Place, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{'.'.join(map(str, place))} ({type(error).__name__}: {reason})"
