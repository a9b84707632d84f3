"""What a run needs to go on: a folder beside an ordinary checkpoint, with one file per rank and a
manifest.

[Note: the order of a save] The checkpoint file names the folder of its own save. All ranks write
their files, then rank 0 writes the manifest, and last the checkpoint file takes its place in one
step. So whenever a process is killed, the checkpoint file that exists belongs to a complete folder.
Folders of earlier saves are removed after that. All ranks wait for each of these: to write the
checkpoint file may be a collective, in which they would wait for one that failed.

A run goes on exactly with the same groups, ranks and settings. With others it restarts: what the
ranks saved is joined, so that other groups, shards and fragments can take it up.
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

from lightning_sdiloco.algorithm.as_data import as_text, describes
from lightning_sdiloco.algorithm.config import Settings, read_settings
from lightning_sdiloco.algorithm.reduce import TwoShot, all_reduce_for
from lightning_sdiloco.algorithm.weighting import Control, Weighed
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.flight import norm_squared
from lightning_sdiloco.engine.matrices import direct_shards
from lightning_sdiloco.engine.outer import OuterState, outer_optimizer_for
from lightning_sdiloco.engine.per_rank import (
    Entries,
    Read,
    differing_from_first,
    entries_of,
    put,
    read_safely,
)
from lightning_sdiloco.engine.shards import (
    OuterParameter,
    is_sharded,
    like,
    local,
    to_parameters,
)
from lightning_sdiloco.engine.start import require_same_start
from lightning_sdiloco.engine.untrained import Kind, new_outer
from lightning_sdiloco.version import VERSION

_log = logging.getLogger(__name__)

FORMAT = 3
"""Version of the folder's format; any other is refused."""

KEY = "streaming_diloco"
"""The checkpoint file's key that names its folder."""

State = dict[str, Any]
"""What `StreamingDiLoCo.state_dict` returned on one rank, and what a file of a rank holds."""

Written = TypeVar("Written")

_SUFFIX = ".sdiloco"
_MANIFEST = "manifest.json"
_ADVICE = "Older checkpoints stand. Make room on the disk."
_SAME = "Resume with those it was saved with, or restart from the outer parameters that it holds."


class Entry(NamedTuple):
    """A rank's file as the manifest knows it."""

    name: str
    size: int
    sha256: str


class Saved(NamedTuple):
    path: str
    header: dict[str, Any]
    older: list[str]
    entries: list[Entry]


class Restart(NamedTuple):
    parameters: dict[str, OuterParameter]
    untrained: dict[str, Tensor]
    counts: dict[str, int]
    weighed: Weighed

    @staticmethod
    def of(arrived: Sequence[Any]) -> "Restart":
        """Returns one that came from another rank, as a plain tuple."""
        parameters, untrained, counts, weighed = arrived
        parameters = {name: OuterParameter(*own) for name, own in parameters.items()}
        return Restart(parameters, untrained, counts, Weighed(*weighed))


# Files


def write_rank(path: str, save: str, rank: int, state: Mapping[str, Any]) -> Entry:
    """Writes the file of a rank, either all of it or nothing."""
    data = _saved(state)
    name = f"rank_{rank:05d}.pt"
    _write(path, save, name, data)
    return Entry(name, len(data), hashlib.sha256(data).hexdigest())


def read_rank(path: str, header: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Reads the file of a rank and checks it against the manifest."""
    if header["format"] != FORMAT:
        raise ValueError(
            f"The checkpoint {path} was written in format {header['format']} by"
            f" lightning_sdiloco {header['version']},"
            f" but this version reads only format {FORMAT}. Install the version that wrote it,"
            " or start a new fit from"
            " the weights of the file."
        )
    manifest = json.loads(_read(path, header["save"], _MANIFEST))
    entry = Entry(**manifest["files"][rank])
    data = _read(path, header["save"], entry.name)
    if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ValueError(
            f"The file {entry.name} in {_folder(path, follow=True)[1]} is not what was saved: it"
            f" has {len(data)} bytes"
            f" where {entry.size} were written, or other contents. Restore it, or resume from"
            " another checkpoint."
        )
    return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def read_groups(path: str, header: Mapping[str, Any]) -> list[list[State | None]]:
    """Reads what `restart_from` needs from the files of all ranks, by group; None where a file is
    missing.
    """
    groups = header["layout"]["worker_groups"]
    size = header["layout"]["group_size"]

    def read(rank: int) -> State | None:
        if not has_rank(path, header, rank):
            return None
        engine = read_rank(path, header, rank)["engine"]
        return {key: engine[key] for key in ("settings", "counts", "fragments", "flights")}

    return [[read(group * size + rank) for rank in range(size)] for group in range(groups)]


def has_rank(path: str, header: Mapping[str, Any], rank: int) -> bool:
    filesystem, folder = _folder(path, follow=True)
    return bool(filesystem.exists(f"{folder}/{header['save']}/rank_{rank:05d}.pt"))


def remove_folder(path: str) -> None:
    """Removes the folder that belongs to a checkpoint file, if there is one."""
    filesystem, folder = _folder(path)
    if filesystem.exists(folder):
        filesystem.rm(folder, recursive=True)


def discard(path: str, save: str) -> None:
    """Removes what this rank can see of a save that has failed. Other ranks may be doing the
    same.
    """
    filesystem, folder = _folder(path)
    if _is_local(filesystem):
        shutil.rmtree(f"{folder}/{save}", ignore_errors=True)
        with suppress(OSError):
            os.rmdir(folder)  # if there is no other save in it
    else:
        with suppress(Exception):
            filesystem.rm(f"{folder}/{save}", recursive=True)


def remove_saves(path: str, names: Sequence[str]) -> None:
    filesystem, folder = _folder(path)
    for name in names:
        if filesystem.exists(f"{folder}/{name}"):
            filesystem.rm(f"{folder}/{name}", recursive=True)


def is_whole(path: str, save: str) -> bool:
    filesystem, folder = _folder(path)
    return bool(filesystem.exists(f"{folder}/{save}/{_MANIFEST}"))


def fingerprint(path: str) -> str:
    """Returns a text that changes when a file is replaced; empty if there is no file."""
    filesystem, target = _filesystem(path)
    return repr(filesystem.info(target)) if filesystem.exists(target) else ""


def beside(path: str, save: str) -> str | None:
    """Returns where a checkpoint file can be written before it takes its place; None where files
    cannot be moved.
    """
    filesystem, folder = _folder(path)
    return f"{folder}/{save}/checkpoint" if _is_local(filesystem) else None


def take_place(part: str, path: str) -> None:
    """Moves a local file to the place of a checkpoint file, in one step."""
    os.replace(part, _filesystem(path)[1])


def random_state() -> dict[str, Any]:
    """Returns the state of this process's random number generators, as plain values and tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    # Asking an unused device would begin to use it, which a forked process cannot.
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _saved(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def _filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    # An instance of our own. A thread that writes a checkpoint through the shared one may be in a
    # transaction, which would include what others write meanwhile; and its listings may be older
    # than the files of other ranks.
    filesystem, target = fsspec.core.url_to_fs(path, skip_instance_cache=True)
    return filesystem, target


def _folder(path: str, follow: bool = False) -> tuple[fsspec.AbstractFileSystem, str]:
    filesystem, target = _filesystem(path)
    # ModelCheckpoint(save_last="link") makes a link. It has no folder; that is beside the file to
    # which it points.
    head, name = os.path.split(
        os.path.realpath(target) if follow and _is_local(filesystem) else target.rstrip("/")
    )
    if name.startswith("hpc_ckpt_"):
        # Lightning resumes a requeued job from the last of these names. If a crash left the file
        # unwritten, it must not take the folder for it.
        name = name.replace("_", "-")
    return filesystem, os.path.join(head, name + _SUFFIX)


def _is_local(filesystem: fsspec.AbstractFileSystem) -> bool:
    return type(filesystem) is LocalFileSystem


def _write(path: str, save: str, name: str, data: bytes) -> None:
    filesystem, folder = _folder(path)
    filesystem.makedirs(f"{folder}/{save}", exist_ok=True)
    _write_file(filesystem, f"{folder}/{save}/{name}", data)


def _write_file(filesystem: fsspec.AbstractFileSystem, target: str, data: bytes) -> None:
    if _is_local(filesystem):
        # Not in a transaction, which would write to the system's temporary folder first.
        part = f"{target}.part"
        try:
            filesystem.pipe_file(part, data)
            os.replace(part, target)
        except OSError:
            with suppress(OSError):
                os.remove(part)
            raise
    else:
        with filesystem.transaction, filesystem.open(target, "wb") as file:
            file.write(data)


def _read(path: str, save: str, name: str) -> bytes:
    filesystem, folder = _folder(path, follow=True)
    try:
        return bytes(filesystem.cat_file(f"{folder}/{save}/{name}"))
    except FileNotFoundError as error:
        raise ValueError(
            f"The checkpoint {path} needs {folder}/{save}/{name}, which is missing. The folder"
            f" {folder} belongs to the"
            " checkpoint file: move or copy both. With resume='exact:newest' only the newest"
            " checkpoint of a run has"
            " one. Without it, start a new fit from the weights of the file."
        ) from error


# What a rank's file holds beside the engine: see [Note: entries of a rank]


def with_entries(state: State, tree: Mapping[str, Any], topology: Topology) -> State:
    """Adds to what a rank saves all in which it differs from rank 0, and extra state. All ranks
    must call it.
    """
    engine = dict(state["engine"])
    differing = differing_from_first(tree, topology.world)
    extra = entries_of(engine.pop("extra_state", {}))
    failures = [*differing.failures, *(f"extra state of {failure}" for failure in extra.failures)]
    if failures:
        _log.warning(
            "Rank %d could not save what it holds for itself: %s. A run that resumes takes what"
            " rank 0 saved there, or"
            " what the script sets up. Let the object save plain values or tensors.",
            topology.rank,
            "; ".join(failures),
        )
    return {**state, "engine": engine, "entries": _stored(differing), "extra_state": _stored(extra)}


def _stored(entries: Entries) -> State:
    return {"plain": entries.plain, "packed": entries.packed, "missing": entries.missing}


def take_up_entries(
    own: State, tree: dict[str, Any], read: Read | None = None, without: Collection[str] = ()
) -> State:
    """Puts what a rank saved in place of what rank 0 did, and returns the state of the engine with
    extra state.

    Without a way to read any object, it reads what is safe, and a warning names the rest.
    """
    extra = dict[str, Any]()
    unread = put(own["entries"], tree, read or read_safely, without)
    unread += put(own["extra_state"], extra, read or read_safely)
    named = "; ".join(unread)
    if unread and read is None:
        _log.warning(
            "Extra state of modules cannot be read with weights_only=True: %s. These modules"
            " keep what they hold."
            " Return plain values or tensors from get_extra_state, or restore it yourself.",
            named,
        )
    elif unread:
        raise ValueError(
            f"What this rank saved in a file of its own cannot be read: {named}. If you trust"
            " the checkpoint, read it"
            " with weights_only=False; or save plain values or tensors instead."
        )
    return {**own["engine"], "extra_state": extra}


# The ranks of a run


def write_ranks(
    path: str,
    topology: Topology,
    state: Mapping[str, Any],
    layout: Mapping[str, int],
    settings: Mapping[str, str],
    advice: str = _ADVICE,
) -> Saved:
    """Writes the files of all ranks; see [Note: the order of a save]. All ranks must call it."""
    world = topology.world
    rank = topology.rank
    # Ranks may have chosen different paths: requeued SLURM jobs number theirs by the files that
    # they see.
    path, save = world.all_gather_object((path, uuid.uuid4().hex))[0]
    older = list[str]()
    if rank == 0:
        # Complete or not.
        filesystem, folder = _folder(path)
        found = filesystem.ls(folder, detail=False) if filesystem.exists(folder) else []
        older = [os.path.basename(one.rstrip("/")) for one in found]
    # Gathering waits until all files are there.
    written = _by_all(path, save, topology, lambda: write_rank(path, save, rank, state), advice)
    entries = [Entry(*one) for one in written]
    header = {
        "format": FORMAT,
        "save": save,
        "version": VERSION,
        "layout": dict(layout),
        "settings": dict(settings),
    }
    return Saved(path, header, [name for name in older if name != save], entries)


def write_common_file(
    saved: Saved, topology: Topology, write: Callable[[], None], advice: str = _ADVICE
) -> None:
    """Writes the manifest, and then what all groups have in common. All ranks must call it."""

    def complete() -> None:
        if topology.rank == 0:
            # The manifest, which makes a folder complete.
            manifest = {**saved.header, "files": [entry._asdict() for entry in saved.entries]}
            _write(
                saved.path, saved.header["save"], _MANIFEST, json.dumps(manifest, indent=2).encode()
            )

    for act in (complete, write):
        _by_all(saved.path, saved.header["save"], topology, act, advice)


def _by_all(
    path: str, save: str, topology: Topology, write: Callable[[], Written], advice: str
) -> list[Written]:
    """Writes on all ranks, and returns what they return; raises on all of them if one cannot, as
    on a full disk.
    """
    every = topology.world.attempt(write)
    failed = [
        f"rank {rank}: {one.failure[0]}: {one.text}"
        for rank, one in enumerate(every)
        if one.failure
    ]
    if failed:
        discard(path, save)
        own = every[topology.rank].raised
        if own is not None and not isinstance(own, (OSError, RuntimeError)):
            raise own
        raise OSError(
            f"The checkpoint {path} could not be saved: {'; '.join(failed)}. Nothing is left of"
            f" it. {advice}"
        ) from own
    return [outcome.value for outcome in every]


def require_processes(topology: Topology) -> None:
    if topology.world.size != topology.num_groups * topology.group_size:
        raise ValueError(
            "save() writes one file per process, but these worker groups are simulated in one."
            " Save state_dict() of"
            " each engine instead."
        )


def write_own(
    path: str,
    topology: Topology,
    settings: Settings,
    state: State,
    inner_optimizers: Sequence[Optimizer],
    tree: Mapping[str, Any],
    **others: Any,
) -> Saved:
    """Writes what each rank needs to go on, given what else it saves. All ranks must call it."""
    optimizer_states = [own_state(optimizer) for optimizer in inner_optimizers]
    own = {
        "engine": state,
        "optimizer_states": optimizer_states,
        "random": random_state(),
        **others,
    }
    own = with_entries(own, tree, topology)
    return write_ranks(path, topology, own, _layout(topology), settings.saved())


def save(
    path: str,
    topology: Topology,
    settings: Settings,
    state: State,
    outer: Mapping[str, Tensor],
    inner_optimizers: Sequence[Optimizer],
) -> None:
    saved = write_own(path, topology, settings, state, inner_optimizers, {})

    def write() -> None:
        if topology.rank == 0:
            _write_file(
                *_filesystem(saved.path), _saved({"state_dict": dict(outer), KEY: saved.header})
            )

    # No rank returns before the checkpoint is there.
    write_common_file(saved, topology, write)
    if topology.rank == 0:
        remove_saves(saved.path, saved.older)


def load(
    path: str, topology: Topology, settings: Settings, inner_optimizers: Sequence[Optimizer]
) -> State:
    """Restores inner optimizers and random numbers, and returns the state of the engine. All ranks
    must call it.
    """

    def read() -> dict[str, Any]:
        filesystem, target = _filesystem(path)
        try:
            data = filesystem.cat_file(target)
        except FileNotFoundError as error:
            raise ValueError(f"There is no checkpoint {path}. Give the path of one.") from error
        return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))

    own = read_own(path, read, topology, settings, len(inner_optimizers))
    take_up_training(own, inner_optimizers)
    return dict(own["engine"])


def read_own(
    path: str,
    read_file: Callable[[], dict[str, Any]],
    topology: Topology,
    settings: Settings,
    optimizers: int,
    read: Read | None = None,
) -> State:
    """Reads the file of this rank, and puts its entries into what the checkpoint file holds. All
    ranks must call it.
    """
    own: State = {}
    header = None
    refusal = None
    try:
        checkpoint = read_file()
        header = checkpoint.get(KEY)
        own = _read_own(path, header, topology, settings, optimizers)
        own["engine"] = take_up_entries(own, checkpoint, read)
    except Exception as error:
        # Any error, because the other ranks would wait for this one.
        refusal = (
            str(error) if isinstance(error, ValueError) else f"{path} cannot be read: {error!r}"
        )
    refusals = [text for text in topology.world.all_gather_object(refusal) if text is not None]
    if refusals:
        raise ValueError(refusals[0])
    require_same_start(start_of(header or {}, own), topology.world)
    return own


def take_up_training(own: State, inner_optimizers: Sequence[Optimizer]) -> None:
    """Restores inner optimizers and random numbers from what a rank saved."""
    for optimizer, state in zip(inner_optimizers, own["optimizer_states"], strict=True):
        take_up_state(optimizer, state)
    set_random_state(own["random"])


def start_of(header: Mapping[str, Any], own: State) -> str:
    """Says where a rank goes on, given the header of a checkpoint and what the rank saved there."""
    return f"inner step {own['engine']['counts']['inner_steps']} (save {header['save'][:8]})"


def _read_own(
    path: str,
    header: Mapping[str, Any] | None,
    topology: Topology,
    settings: Settings,
    optimizers: int,
) -> State:
    if header is None:
        raise ValueError(
            f"{path} was not saved by lightning_sdiloco: it names no files of ranks. Give"
            " another file."
        )
    if header["layout"] != _layout(topology):
        raise ValueError(
            f"{path} was saved with {header['layout']}, now there are {_layout(topology)}. {_SAME}"
        )
    other = settings.taken_from(header["settings"]).differences(header["settings"])
    if other:
        raise ValueError(
            f"{path} cannot be resumed exactly with other settings: {'; '.join(other)}. {_SAME}"
        )
    own: State = read_rank(path, header, topology.rank)
    if len(own["optimizer_states"]) != optimizers:
        raise ValueError(
            f"{path} holds the state of {len(own['optimizer_states'])} inner optimizers, but"
            f" there are {optimizers}."
            " Give the engine the same inner_optimizers as when it was saved."
        )
    return own


def _layout(topology: Topology) -> dict[str, int]:
    return {"worker_groups": topology.num_groups, "group_size": topology.group_size}


def place_of(topology: Topology) -> dict[str, int]:
    """Returns which rank of which worker group this is, for the state of an engine."""
    return {
        "num_groups": topology.num_groups,
        "group_index": topology.group_index,
        "group_size": topology.group_size,
        "group_rank": topology.group_rank,
    }


def require_own_state(state: Mapping[str, Any], topology: Topology) -> None:
    """Refuses the state of another rank: every worker group would go on from the values of one."""

    def told(place: Mapping[str, int]) -> str:
        return (
            f"rank {place['group_rank']} of worker group {place['group_index']}"
            f" ({place['num_groups']} groups of"
            f" {place['group_size']})"
        )

    own = place_of(topology)
    saved = state.get("rank")
    if saved is None or not state.keys() >= {"settings", "schedule"}:
        raise ValueError(
            "This state comes from an engine of an earlier version, which this one cannot read."
            " Load it with the"
            " version that made it, or restart from the outer parameters."
        )
    if saved != own:
        raise ValueError(
            f"This is the state of {told(saved)}, but this process is {told(own)}. Each rank"
            " needs its own state,"
            " because worker groups hold different values. A checkpoint that only rank 0 writes,"
            " as torch.save in one"
            f" process, fabric.save({{'engine': engine}}) and"
            " accelerator.register_for_checkpointing(engine) do, keeps"
            " only rank 0's. Save with engine.save(path) and load with engine.load(path) in all"
            " processes: they keep a"
            " file per rank."
        )


# The state of an inner optimizer as one rank holds it, sharded or not


def own_state(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer, with what this rank holds in place of sharded tensors."""
    state = optimizer.state_dict()
    own = dict[Any, Any]()
    divided = dict[Any, list[str]]()
    for index, entry in state["state"].items():
        own[index] = {
            key: local(value) if isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
        divided[index] = [
            key for key, value in entry.items() if isinstance(value, Tensor) and is_sharded(value)
        ]
    return {**state, "state": own, "divided": divided}


def take_up_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restores what `own_state` returned, for the same parameters, sharded in the same way."""
    divided = saved.get("divided", {})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            key: like(parameters[index], value) if key in divided.get(index, ()) else value
            for key, value in entry.items()
        }
        for index, entry in saved["state"].items()
    }
    # A fresh optimizer keeps the state with which it was made.
    state = state or optimizer.state_dict()["state"]
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


# Restart


def restart_from(groups: Sequence[Sequence[State | None]], settings: Settings | None) -> Restart:
    whole = [
        [state for state in group if state is not None] for group in groups if None not in group
    ]
    if not whole:
        raise ValueError(
            "No worker group has the files of all its ranks, so the outer parameters cannot be"
            " restored. Restore the"
            " missing files, or start a new fit from the weights of the checkpoint."
        )
    ranks = whole[0]
    flights = len(ranks[0]["flights"])
    landed = 0
    shares = "anchor" not in ranks[0]["fragments"][0]
    joined = ranks if shares else [_mean_of(of) for of in zip(*whole, strict=True)]
    shards = [[OuterState.of(fragment) for fragment in state["fragments"]] for state in joined]
    if settings is None:
        shards = [[outer._replace(state={}) for outer in shard] for shard in shards]
    buffers = [
        dict(zip(f["buffer_names"], f["buffers"], strict=True)) for f in joined[0]["fragments"]
    ]
    weighed = _weighed(ranks[0], len(groups), settings)
    if settings is not None and shares and len(whole) == len(groups):
        landed = _land(whole, shards, buffers, weighed, settings.taken_from(ranks[0]["settings"]))
    parameters: dict[str, OuterParameter] = {}
    for index, fragment in enumerate(ranks[0]["fragments"]):
        parameters |= to_parameters(fragment, [shard[index] for shard in shards])
    counts = ranks[0]["counts"]
    return Restart(
        parameters=parameters,
        untrained={
            name: values
            for part, shard in zip(buffers, shards[0], strict=True)
            for name, values in part.items()
            if shard.rounds
        },
        counts={
            "inner_steps": counts["inner_steps"],
            "launches": counts["launches"],
            "landings": counts["landings"] + landed,
            "flights_dropped": counts["flights_dropped"] + flights - landed,
        },
        weighed=weighed,
    )


def _weighed(state: State, groups: int, settings: Settings | None) -> Weighed:
    """Returns what the weighing of a run knew, or what another one begins with, which cannot read
    that.
    """
    weighing = read_settings(state["settings"]).get("weighing")
    text = as_text(weighing) if settings is None else settings.weighing_text
    states = {tuple(fragment["names"]): fragment["norms"] for fragment in state["fragments"]}
    if settings is not None and not describes(weighing, settings.weighing):
        states = {names: settings.aggregation.start(groups) for names in states}
    return Weighed(text, groups, states)


def _mean_of(groups: Sequence[State]) -> State:
    def mean(values: Sequence[Any]) -> Any:
        is_mean = isinstance(values[0], Tensor) and values[0].is_floating_point()
        return torch.stack(list(values)).mean(dim=0) if is_mean else values[0]

    fragments = []
    for one in zip(*(group["fragments"] for group in groups), strict=True):
        state = {key: mean([fragment["state"][key] for fragment in one]) for key in one[0]["state"]}
        rows = zip(*(fragment["buffers"] for fragment in one), strict=True)
        kinds = [Kind(kind) for kind in one[0]["buffer_kinds"]]
        buffers = [
            _new_outer(kind, values, values[0], False)
            for kind, values in zip(kinds, rows, strict=True)
        ]
        outer = mean([fragment["outer"] for fragment in one])
        fragments.append({**one[0], "outer": outer, "state": state, "buffers": buffers})
    return {**groups[0], "fragments": fragments}


def _land(
    groups: Sequence[Sequence[State]],
    shards: list[list[OuterState]],
    buffers: Sequence[dict[str, Tensor]],
    weighed: Weighed,
    settings: Settings,
) -> int:
    """Lands the flights of complete groups as these would have landed them; returns how many
    could.
    """
    # The parts of two shots stay as they were then, and so does what the second rounding lost.
    exchange = TwoShot.read(read_settings(groups[0][0]["settings"])["exchange"], "gloo")
    reduction = all_reduce_for(exchange, len(groups), settings.codec, settings.landing.kept)
    optimizers = [
        outer_optimizer_for(settings, [outer.values for outer in shard]) for shard in shards
    ]
    landed = 0
    for index in range(len(groups[0][0]["flights"])):
        flights = [[state["flights"][index] for state in group] for group in groups]
        controls = [Control.merged([_control(flight) for flight in group]) for group in flights]
        fragment = controls[0].fragment
        landed += any(control.finite for control in controls)
        names = tuple(groups[0][0]["fragments"][fragment]["names"])
        count = settings.aggregation.count(controls, weighed.states[names])
        weighed.states[names] = settings.aggregation.heard(controls, weighed.states[names])
        if not count.factors:
            continue
        means = list[OuterState]()
        for shard in range(len(shards)):
            saved = [group[shard]["fragments"][fragment] for group in groups]
            mean = reduction.at(controls[0].step).reduce_locally(
                [group[shard]["gradient"] for group in flights],
                [one["memory"] for one in saved],
                [one["residual"] for one in saved],
                count,
                [one.get("tuning") for one in saved],
                [group[shard].get("choice", 0) for group in flights],
            )
            means.append(OuterState(mean, {}, rounds=0))
        gradients = direct_shards(groups[0][0]["fragments"][fragment], means, settings.outer.map)
        is_dense = flights[0][0].get("is_dense", False)
        for shard, gradient in enumerate(gradients):
            before = shards[shard][fragment]
            optimizer = optimizers[shard]
            shards[shard][fragment] = optimizer.step(
                fragment, before, before.values, gradient, is_dense=is_dense
            )
        outer = buffers[fragment]
        kinds = groups[0][0]["fragments"][fragment]["buffer_kinds"]
        for position, name in enumerate(outer):
            sent = [flights[group][0]["buffers"][position] for group in count.factors]
            outer[name] = _new_outer(Kind(kinds[position]), sent, outer[name], True)
    return landed


def _new_outer(kind: Kind, sent: Sequence[Tensor], outer: Tensor, keeps_outer: bool) -> Tensor:
    by_group = {str(group): values for group, values in enumerate(sent)}
    return new_outer(kind, by_group, outer, keeps_outer=keeps_outer)[0]


def _control(flight: State) -> Control:
    """Returns what a rank said of a flight, as far as it decides how the flight lands."""
    gradient = flight["gradient"]
    return Control(
        fragment=flight["fragment"],
        step=flight["step"],
        requests=0,
        weight=flight["weight"],
        digest=0,
        norm_squared=norm_squared(gradient),
        changed=0,
        finite=bool(gradient.isfinite().all()),
    )
