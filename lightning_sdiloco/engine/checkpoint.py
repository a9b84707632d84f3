"""Saves and loads the folder next to a checkpoint file. It contains a manifest and one file per
rank.

[Note: the order of a save] The checkpoint file contains the name of its save folder. First, all
ranks write their files. Then rank 0 writes the manifest, and finally the checkpoint file is moved
into place atomically. The checkpoint file therefore always refers to a complete folder, even if a
process is killed during a save. Folders of earlier saves are removed last. All ranks wait for each
other after each step. Otherwise, they could wait for a failed rank forever, because writing the
checkpoint file may be a collective operation.

With the same groups, ranks and settings, a run resumes exactly. Otherwise, it restarts from the
outer parameters; see `restart`.
"""

import hashlib
import io
import json
import logging
import os
import random
import shutil
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.per_rank import (
    Entries,
    Read,
    differing_from_first,
    entries_of,
    put,
    read_safely,
)
from lightning_sdiloco.engine.restart import State
from lightning_sdiloco.engine.shards import is_sharded, like, local
from lightning_sdiloco.engine.start import require_same_start
from lightning_sdiloco.version import VERSION

_log = logging.getLogger(__name__)

FORMAT = 3
"""The version of the folder format. Folders of any other version cannot be read."""

KEY = "streaming_diloco"
"""The key in the checkpoint file under which the header is stored, including the folder's name."""

Header = Mapping[str, Any]
"""The format, folder, layout and settings, stored under `KEY` in the checkpoint file."""

Outcome = TypeVar("Outcome")

_SUFFIX = ".sdiloco"
_MANIFEST = "manifest.json"
_ADVICE = "Older checkpoints remain valid. Free up disk space and try again."
_SAME = "Use the same values as in the checkpoint, or restart from its outer parameters."


class Entry(NamedTuple):
    """A rank's file, as listed in the manifest."""

    name: str
    size: int
    sha256: str


class Saved(NamedTuple):
    """A save that every rank has written but that no checkpoint file refers to yet.

    Attributes:
        path: The checkpoint file.
        header: The value stored under `KEY` in the checkpoint file.
        older: On rank 0, the folders of earlier saves of the same checkpoint file.
        entries: The files of all ranks.
    """

    path: str
    header: Header
    older: list[str]
    entries: list[Entry]


# Files


class _Folder:
    """The folder that belongs to a checkpoint file.

    Args:
        path: The checkpoint file.
        follow: Whether to follow a symbolic link, such as the one that
            ModelCheckpoint(save_last="link") creates. The folder is next to the link's target.

    Attributes:
        filesystem: The file system of the checkpoint file and its folder.
        file: The path of the checkpoint file in ``filesystem``.
        path: The path of the folder in ``filesystem``.
        is_local: Whether the folder is on a local file system, where files can be moved.
    """

    def __init__(self, path: str, follow: bool = False) -> None:
        # fsspec shares its instances by default. If another thread had a transaction open on a
        # shared instance, the transaction would include the files written here. A shared instance's
        # cached listings may also be older than other ranks' files.
        self.filesystem, self.file = fsspec.core.url_to_fs(path, skip_instance_cache=True)
        self.is_local = type(self.filesystem) is LocalFileSystem
        is_followed = follow and self.is_local
        target = os.path.realpath(self.file) if is_followed else self.file.rstrip("/")
        parent, name = os.path.split(target)
        if name.startswith("hpc_ckpt_"):
            # Lightning resumes a requeued job from the last file with such a name. If a crash
            # prevented the file from being written, Lightning must not mistake the folder for it.
            name = name.replace("_", "-")
        self.path = os.path.join(parent, name + _SUFFIX)

    def has(self, name: str) -> bool:
        return bool(self.filesystem.exists(f"{self.path}/{name}"))

    def remove(self, target: str) -> None:
        """Removes the folder, or a path within it, if it exists."""
        if self.filesystem.exists(target):
            self.filesystem.rm(target, recursive=True)

    def write(self, target: str, content: bytes) -> None:
        """Writes a file atomically."""
        if not self.is_local:
            with self.filesystem.transaction, self.filesystem.open(target, "wb") as file:
                file.write(content)
            return
        # A transaction would write to the system's temporary folder first.
        part = f"{target}.part"
        try:
            self.filesystem.pipe_file(part, content)
            os.replace(part, target)
        except OSError:
            with suppress(OSError):
                os.remove(part)
            raise


def write_rank(path: str, save: str, rank: int, state: Mapping[str, object]) -> Entry:
    """Writes a rank's file atomically."""
    content = _serialised(state)
    name = f"rank_{rank:05d}.pt"
    _write(path, save, name, content)
    return Entry(name, len(content), hashlib.sha256(content).hexdigest())


def read_rank(path: str, header: Header, rank: int) -> State:
    """Reads a rank's file and checks it against the manifest."""
    if header["format"] != FORMAT:
        raise ValueError(
            f"The checkpoint {path} was written in format {header['format']} by lightning_sdiloco"
            f" {header['version']}, but this version reads only format {FORMAT}. Install the"
            " version that wrote the checkpoint, or start a new fit from its weights."
        )
    manifest = json.loads(_read(path, header["save"], _MANIFEST))
    entry = Entry(**manifest["files"][rank])
    content = _read(path, header["save"], entry.name)
    if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ValueError(
            f"The file {entry.name} in {_Folder(path, follow=True).path} differs from the file"
            f" that was saved ({len(content)} bytes now, {entry.size} bytes when saved). Restore"
            " the file, or resume from another checkpoint."
        )
    return _deserialised(content)


def read_groups(path: str, header: Header) -> list[list[State | None]]:
    """Reads all ranks' states by group for `restart_from`, with None for each missing file."""
    size = header["layout"]["group_size"]
    groups = list[list[State | None]]()
    for group in range(header["layout"]["worker_groups"]):
        ranks = range(group * size, (group + 1) * size)
        groups.append([_read_for_restart(path, header, rank) for rank in ranks])
    return groups


def _read_for_restart(path: str, header: Header, rank: int) -> State | None:
    if not has_rank(path, header, rank):
        return None
    engine = read_rank(path, header, rank)["engine"]
    return {key: engine[key] for key in ("settings", "counts", "fragments", "flights")}


def has_rank(path: str, header: Header, rank: int) -> bool:
    return _Folder(path, follow=True).has(f"{header['save']}/rank_{rank:05d}.pt")


def remove_folder(path: str) -> None:
    """Removes the folder that belongs to a checkpoint file, if the folder exists."""
    folder = _Folder(path)
    folder.remove(folder.path)


def discard(path: str, save: str) -> None:
    """Removes all files of a failed save that this rank can see. Other ranks may do so at the same
    time.
    """
    folder = _Folder(path)
    if folder.is_local:
        shutil.rmtree(f"{folder.path}/{save}", ignore_errors=True)
        with suppress(OSError):
            os.rmdir(folder.path)  # This fails if the folder contains another save.
    else:
        with suppress(Exception):
            folder.filesystem.rm(f"{folder.path}/{save}", recursive=True)


def remove_saves(path: str, names: Sequence[str]) -> None:
    folder = _Folder(path)
    for name in names:
        folder.remove(f"{folder.path}/{name}")


def is_whole(path: str, save: str) -> bool:
    return _Folder(path).has(f"{save}/{_MANIFEST}")


def fingerprint(path: str) -> str:
    """Returns a string that changes when a file is replaced, or "" if the file is missing."""
    folder = _Folder(path)
    if not folder.filesystem.exists(folder.file):
        return ""
    return repr(folder.filesystem.info(folder.file))


def beside(path: str, save: str) -> str | None:
    """Returns a temporary path for writing a checkpoint file, or None if files cannot be moved."""
    folder = _Folder(path)
    return f"{folder.path}/{save}/checkpoint" if folder.is_local else None


def take_place(part: str, path: str) -> None:
    """Moves a local file atomically to the path of a checkpoint file."""
    os.replace(part, _Folder(path).file)


def random_state() -> State:
    """Returns the state of this process's random number generators, as plain values and tensors."""
    state: State = {"torch": torch.get_rng_state(), "python": random.getstate()}
    # Querying an unused device would initialise it, which fails in a forked process.
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        algorithm, keys, *position = sys.modules["numpy"].random.get_state()
        state["numpy"] = [algorithm, keys.tolist(), *position]
    return state


def set_random_state(state: State) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _serialised(state: Mapping[str, object]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def _deserialised(content: bytes) -> State:
    return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def _write(path: str, save: str, name: str, content: bytes) -> None:
    folder = _Folder(path)
    folder.filesystem.makedirs(f"{folder.path}/{save}", exist_ok=True)
    folder.write(f"{folder.path}/{save}/{name}", content)


def _read(path: str, save: str, name: str) -> bytes:
    folder = _Folder(path, follow=True)
    try:
        return bytes(folder.filesystem.cat_file(f"{folder.path}/{save}/{name}"))
    except FileNotFoundError as error:
        raise ValueError(
            f"The checkpoint {path} needs {folder.path}/{save}/{name}, which is missing. The"
            f" folder {folder.path} belongs to the checkpoint file, so move or copy both. With"
            " resume='exact:newest', only the newest checkpoint of a run has such a folder."
            " Without the folder, start a new fit from the checkpoint's weights."
        ) from error


# The part of a rank's file that does not belong to the engine: see [Note: entries of a rank]


def with_entries(state: State, tree: State, topology: Topology) -> State:
    """Adds the modules' extra state and the entries that differ from rank 0's to the state that a
    rank saves. All ranks must call this function.
    """
    engine = dict(state["engine"])
    differing = differing_from_first(tree, topology.world)
    extra = entries_of(engine.pop("extra_state", {}))
    failures = [*differing.failures, *(f"extra state of {failure}" for failure in extra.failures)]
    if failures:
        _log.warning(
            "Rank %d could not save its own state: %s. A resumed run uses the state saved by"
            " rank 0, or the state that the script sets up. Change the object so that it saves"
            " plain values or tensors.",
            topology.rank,
            "; ".join(failures),
        )
    return {**state, "engine": engine, "entries": _stored(differing), "extra_state": _stored(extra)}


def _stored(entries: Entries) -> State:
    return {"plain": entries.plain, "packed": entries.packed, "missing": entries.missing}


def take_up_entries(
    saved: State, tree: State, read: Read | None = None, without: Collection[str] = ()
) -> State:
    """Replaces rank 0's entries with the entries that this rank saved, and returns the engine's
    state.

    The returned state includes the modules' extra state. If ``read`` is None, entries that are
    unsafe to read are skipped with a warning.
    """
    extra: State = {}
    unread = put(saved["entries"], tree, read or read_safely, without)
    unread += put(saved["extra_state"], extra, read or read_safely)
    named = "; ".join(unread)
    if unread and read is None:
        _log.warning(
            "Extra state of modules cannot be read with weights_only=True: %s. These modules"
            " keep their current state. Return plain values or tensors from get_extra_state, or"
            " restore the extra state yourself.",
            named,
        )
    elif unread:
        raise ValueError(
            f"This rank's own file cannot be read: {named}. If you trust the checkpoint, load it"
            " with weights_only=False. Otherwise, save plain values or tensors."
        )
    return {**saved["engine"], "extra_state": extra}


# The ranks of a run


def write_ranks(
    path: str,
    topology: Topology,
    state: Mapping[str, object],
    layout: Mapping[str, int],
    settings: Mapping[str, object],
    advice: str = _ADVICE,
) -> Saved:
    """All ranks must call this function to write their files; see [Note: the order of a save]."""
    # Ranks may have chosen different paths, because a requeued SLURM job numbers its checkpoint
    # based on the files that it sees.
    path, save = topology.world.all_gather_object((path, uuid.uuid4().hex))[0]
    older = _saves_of(path) if topology.rank == 0 else []
    # Gathering the entries waits until all ranks have written their files.
    entries = _by_all(
        path, save, topology, lambda: write_rank(path, save, topology.rank, state), advice
    )
    header = {
        "format": FORMAT,
        "save": save,
        "version": VERSION,
        "layout": dict(layout),
        "settings": dict(settings),
    }
    older = [name for name in older if name != save]
    return Saved(path, header, older, [Entry(*fields) for fields in entries])


def _saves_of(path: str) -> list[str]:
    """Returns the names of all saves in a checkpoint file's folder, including incomplete ones."""
    folder = _Folder(path)
    if not folder.filesystem.exists(folder.path):
        return []
    saves = folder.filesystem.ls(folder.path, detail=False)
    return [os.path.basename(save.rstrip("/")) for save in saves]


def write_common_file(
    saved: Saved, topology: Topology, write: Callable[[], None], advice: str = _ADVICE
) -> None:
    """Writes the manifest and then the checkpoint file. All ranks must call this function."""
    save = saved.header["save"]

    def write_manifest() -> None:
        """Completes the save's folder."""
        if topology.rank == 0:
            manifest = {**saved.header, "files": [entry._asdict() for entry in saved.entries]}
            _write(saved.path, save, _MANIFEST, json.dumps(manifest, indent=2).encode())

    _by_all(saved.path, save, topology, write_manifest, advice)
    _by_all(saved.path, save, topology, write, advice)


def _by_all(
    path: str, save: str, topology: Topology, write: Callable[[], Outcome], advice: str
) -> list[Outcome]:
    """Calls ``write`` on all ranks and returns the results. If any rank fails, all ranks raise an
    error.
    """
    outcomes = topology.world.attempt(write)
    failures = list[str]()
    for rank, outcome in enumerate(outcomes):
        if outcome.failure:
            failures.append(f"rank {rank}: {outcome.failure[0]}: {outcome.text}")
    if failures:
        discard(path, save)
        error = outcomes[topology.rank].raised
        if error is not None and not isinstance(error, (OSError, RuntimeError)):
            raise error
        raise OSError(
            f"The checkpoint {path} could not be saved: {'; '.join(failures)}. Its partial files"
            f" were removed. {advice}"
        ) from error
    return [outcome.value for outcome in outcomes]


def require_processes(topology: Topology) -> None:
    if topology.world.size != topology.num_groups * topology.group_size:
        raise ValueError(
            "save() writes one file per process, but these worker groups are simulated in one"
            " process. Save the state_dict() of each engine instead."
        )


def write_own(
    path: str,
    topology: Topology,
    settings: Settings,
    state: State,
    inner_optimizers: Sequence[Optimizer],
    tree: State,
    **others: object,
) -> Saved:
    """Writes each rank's file, including the state of its inner optimizers. All ranks must call
    this function.
    """
    rank_state = {
        "engine": state,
        "optimizer_states": [own_state(optimizer) for optimizer in inner_optimizers],
        "random": random_state(),
        **others,
    }
    rank_state = with_entries(rank_state, tree, topology)
    return write_ranks(path, topology, rank_state, _layout(topology), settings.saved())


def save(
    path: str,
    topology: Topology,
    settings: Settings,
    state: State,
    outer: Mapping[str, Tensor],
    inner_optimizers: Sequence[Optimizer],
) -> None:
    """Writes each rank's file and a checkpoint file with the outer parameters. All ranks must call
    this function.
    """
    saved = write_own(path, topology, settings, state, inner_optimizers, {})

    def write() -> None:
        if topology.rank == 0:
            folder = _Folder(saved.path)
            folder.write(folder.file, _serialised({"state_dict": dict(outer), KEY: saved.header}))

    # No rank returns before the checkpoint is in place.
    write_common_file(saved, topology, write)
    if topology.rank == 0:
        remove_saves(saved.path, saved.older)


def load(
    path: str, topology: Topology, settings: Settings, inner_optimizers: Sequence[Optimizer]
) -> State:
    """Restores inner optimizers and random state, and returns the engine's state. All ranks must
    call this function.
    """

    def read_file() -> State:
        folder = _Folder(path)
        try:
            return _deserialised(folder.filesystem.cat_file(folder.file))
        except FileNotFoundError as error:
            raise ValueError(
                f"There is no checkpoint at {path}. Pass the path of an existing checkpoint."
            ) from error

    saved = read_own(path, read_file, topology, settings, len(inner_optimizers))
    take_up_training(saved, inner_optimizers)
    return dict(saved["engine"])


def read_own(
    path: str,
    read_file: Callable[[], State],
    topology: Topology,
    settings: Settings,
    optimizers: int,
    read: Read | None = None,
) -> State:
    """Reads this rank's file and inserts its entries into the checkpoint. All ranks must call this
    function.
    """
    saved: State = {}
    header = None
    refusal = None
    try:
        checkpoint = read_file()
        header = checkpoint.get(KEY)
        saved = _read_matching(path, header, topology, settings, optimizers)
        saved["engine"] = take_up_entries(saved, checkpoint, read)
    except ValueError as error:
        refusal = str(error)
    except Exception as error:
        # All errors are caught, because the other ranks would otherwise wait for this rank.
        refusal = f"{path} cannot be read: {error!r}"
    refusals = [text for text in topology.world.all_gather_object(refusal) if text is not None]
    if refusals:
        raise ValueError(refusals[0])
    require_same_start(start_of(header or {}, saved), topology.world)
    return saved


def take_up_training(saved: State, inner_optimizers: Sequence[Optimizer]) -> None:
    """Restores inner optimizers and random state from a rank's file."""
    for optimizer, state in zip(inner_optimizers, saved["optimizer_states"], strict=True):
        take_up_state(optimizer, state)
    set_random_state(saved["random"])


def start_of(header: Header, saved: State) -> str:
    """Describes the inner step from which a rank resumes."""
    return f"inner step {saved['engine']['counts']['inner_steps']} (save {header['save'][:8]})"


def _read_matching(
    path: str,
    header: Header | None,
    topology: Topology,
    settings: Settings,
    optimizers: int,
) -> State:
    """Reads this rank's file after checking that the layout, settings and optimizers match."""
    if header is None:
        raise ValueError(
            f"{path} was not saved by lightning_sdiloco: it does not refer to a folder of rank"
            " files. Pass another checkpoint."
        )
    if header["layout"] != _layout(topology):
        raise ValueError(
            f"{path} was saved with {header['layout']}, but this run has {_layout(topology)}."
            f" {_SAME}"
        )
    differences = settings.taken_from(header["settings"]).differences(header["settings"])
    if differences:
        raise ValueError(
            f"{path} cannot be resumed exactly with different settings: {'; '.join(differences)}."
            f" {_SAME}"
        )
    saved = read_rank(path, header, topology.rank)
    if len(saved["optimizer_states"]) != optimizers:
        raise ValueError(
            f"{path} contains the state of {len(saved['optimizer_states'])} inner optimizers,"
            f" but this run has {optimizers}. Pass the same inner_optimizers to the engine as"
            " when the checkpoint was saved."
        )
    return saved


def _layout(topology: Topology) -> dict[str, int]:
    return {"worker_groups": topology.num_groups, "group_size": topology.group_size}


def place_of(topology: Topology) -> dict[str, int]:
    """Returns this process's worker group and rank, which are stored in an engine's state."""
    return {
        "num_groups": topology.num_groups,
        "group_index": topology.group_index,
        "group_size": topology.group_size,
        "group_rank": topology.group_rank,
    }


def require_own_state(state: State, topology: Topology) -> None:
    """Refuses another rank's state, because each worker group has different values."""
    place = place_of(topology)
    saved_place = state.get("rank")
    if saved_place is None or not state.keys() >= {"settings", "schedule"}:
        raise ValueError(
            "This state was saved by an earlier version in a format that this version cannot"
            " read. Load it with the version that saved it, or restart from the outer parameters."
        )
    if saved_place != place:
        raise ValueError(
            f"This is the state of {_in_words(saved_place)}, but this process is"
            f" {_in_words(place)}. Each rank needs its own state, because worker groups have"
            " different values. A checkpoint written only by rank 0 contains only the state of rank"
            f" 0. This is the case for torch.save in one process, fabric.save({{'engine': engine}})"
            " and accelerator.register_for_checkpointing(engine). Call engine.save(path) and"
            " engine.load(path) in all processes to store one file per rank."
        )


def _in_words(place: Mapping[str, int]) -> str:
    return (
        f"rank {place['group_rank']} of worker group {place['group_index']} ({place['num_groups']}"
        f" groups of {place['group_size']})"
    )


# An inner optimizer's state on one rank, sharded or not


def own_state(optimizer: Optimizer) -> State:
    """Returns an optimizer's state, with only this rank's parts of sharded tensors."""
    state = optimizer.state_dict()
    held = dict[int, State]()
    divided = dict[int, list[str]]()
    for index, entry in state["state"].items():
        held[index] = dict(entry)
        divided[index] = []
        for key, value in entry.items():
            if isinstance(value, Tensor):
                held[index][key] = local(value)
                if is_sharded(value):
                    divided[index].append(key)
    return {**state, "state": held, "divided": divided}


def take_up_state(optimizer: Optimizer, saved: State) -> None:
    """Restores a state that `own_state` returned for the same parameters and sharding."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: dict(entry) for index, entry in saved["state"].items()}
    for index, keys in saved.get("divided", {}).items():
        for key in keys:
            state[index][key] = like(parameters[index], state[index][key])
    # If the saved state is empty, the optimizer keeps the state that its constructor created.
    state = state or optimizer.state_dict()["state"]
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
