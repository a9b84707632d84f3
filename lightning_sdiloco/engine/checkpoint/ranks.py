"""Saves what every rank holds, and reads it back on the same rank of the same worker group."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine.checkpoint import files
from lightning_sdiloco.engine.checkpoint.optimizer_state import own_state, take_up_state

State = dict[str, Any]
Written = TypeVar("Written")

_ADVICE = "Older checkpoints stand. Make room on the disk."


class Saved(NamedTuple):
    """What all ranks know after they have written their files."""

    path: str
    header: dict[str, Any]
    older: list[str]
    entries: list[files.Entry]


def write_ranks(
    path: str,
    topology: Topology,
    state: Mapping[str, Any],
    layout: Mapping[str, int],
    settings: Mapping[str, str],
    advice: str = _ADVICE,
) -> Saved:
    """Writes the files of all ranks; see [Note: the order of a save]. All ranks must call it."""
    world, rank = topology.world, topology.rank
    # Ranks may have chosen different paths: requeued SLURM jobs number theirs by the files that they see.
    path, save = world.all_gather_object((path, uuid.uuid4().hex))[0]
    older = files.saves(path) if rank == 0 else []
    # Gathering waits until all files are there.
    written = _by_all(path, save, topology, lambda: files.write_rank(path, save, rank, state), advice)
    entries = [files.Entry(*one) for one in written]
    header = {
        "format": files.FORMAT,
        "save": save,
        "version": version("lightning-sdiloco"),
        "layout": dict(layout),
        "settings": dict(settings),
    }
    return Saved(path, header, [name for name in older if name != save], entries)


def write_common_file(saved: Saved, topology: Topology, write: Callable[[], None], advice: str = _ADVICE) -> None:
    """Writes the manifest, and then what all groups have in common. All ranks must call it."""

    def write_manifest() -> None:
        if topology.rank == 0:
            files.write_manifest(saved.path, saved.header, saved.entries)

    for act in (write_manifest, write):
        _by_all(saved.path, saved.header["save"], topology, act, advice)


def _by_all(path: str, save: str, topology: Topology, write: Callable[[], Written], advice: str) -> list[Written]:
    """Writes on all ranks, and returns what they return; raises on all of them if one cannot, as on a full disk."""
    every = topology.world.attempt(write)
    failed = [f"rank {rank}: {one.failure[0]}: {one.text}" for rank, one in enumerate(every) if one.failure]
    if failed:
        files.discard(path, save)
        own = every[topology.rank].raised
        if own is not None and not isinstance(own, (OSError, RuntimeError)):
            raise own
        raise OSError(
            f"The checkpoint {path} could not be saved: {'; '.join(failed)}. Nothing is left of it. {advice}"
        ) from own
    return [outcome.value for outcome in every]


def require_processes(topology: Topology) -> None:
    """Refuses to save worker groups that are simulated in one process."""
    if topology.world.size != topology.num_groups * topology.group_size:
        raise ValueError(
            "save() writes one file per process, and these worker groups are simulated in one. Save state_dict() of"
            " each engine instead."
        )


def write_own(
    path: str,
    topology: Topology,
    settings: Settings,
    state: State,
    inner_optimizers: Sequence[Optimizer],
    **others: Any,
) -> Saved:
    """Writes what `read_own` reads. All ranks must call it."""
    optimizer_states = [own_state(optimizer) for optimizer in inner_optimizers]
    own = {"engine": state, "optimizer_states": optimizer_states, "random": files.random_state(), **others}
    return write_ranks(path, topology, own, _layout(topology), settings.fixed_by_a_checkpoint())


def save(
    path: str,
    topology: Topology,
    settings: Settings,
    state: State,
    outer: Mapping[str, Tensor],
    inner_optimizers: Sequence[Optimizer],
) -> None:
    """Saves an engine; see `StreamingDiLoCo.save`. All ranks must call it."""
    saved = write_own(path, topology, settings, state, inner_optimizers)

    def write() -> None:
        if topology.rank == 0:
            files.write_checkpoint(saved.path, {"state_dict": dict(outer), files.KEY: saved.header})

    # No rank returns before the checkpoint is there.
    write_common_file(saved, topology, write)
    if topology.rank == 0:
        files.remove_saves(saved.path, saved.older)


def load(path: str, topology: Topology, settings: Settings, inner_optimizers: Sequence[Optimizer]) -> State:
    """Restores inner optimizers and random numbers, and returns the state of the engine. All ranks must call it."""
    own = read_own(path, lambda: files.read_checkpoint(path), topology, settings, inner_optimizers)
    return dict(own["engine"])


def read_own(
    path: str,
    read: Callable[[], Mapping[str, Any]],
    topology: Topology,
    settings: Settings,
    inner_optimizers: Sequence[Optimizer],
) -> State:
    """Reads the file of this rank, and restores inner optimizers and random numbers. All ranks must call it."""
    own: State = {}
    refusal = None
    try:
        own = _read(path, read().get(files.KEY), topology, settings, len(inner_optimizers))
    except Exception as error:
        # Of any error, because the other ranks would wait for this one.
        refusal = str(error) if isinstance(error, ValueError) else f"{path} cannot be read: {error!r}"
    refusals = [text for text in topology.world.all_gather_object(refusal) if text is not None]
    if refusals:
        raise ValueError(refusals[0])
    for optimizer, state in zip(inner_optimizers, own["optimizer_states"], strict=True):
        take_up_state(optimizer, state)
    files.set_random_state(own["random"])
    return own


def _read(
    path: str, header: Mapping[str, Any] | None, topology: Topology, settings: Settings, optimizers: int
) -> State:
    if header is None:
        raise ValueError(f"{path} was not saved by lightning_sdiloco: it names no files of ranks. Give another file.")
    if header["layout"] != _layout(topology):
        raise ValueError(f"{path} was saved with {header['layout']}, now there are {_layout(topology)}. {_SAME}")
    now = settings.taken_from(header["settings"]).fixed_by_a_checkpoint()
    if other := settings.differences(header["settings"], now):
        raise ValueError(f"{path} cannot be resumed exactly with other settings: {'; '.join(other)}. {_SAME}")
    own = files.read_rank(path, header, topology.rank)
    if len(own["optimizer_states"]) != optimizers:
        raise ValueError(
            f"{path} holds the state of {len(own['optimizer_states'])} inner optimizers, and there are {optimizers}."
            " Give the engine the same inner_optimizers as when it was saved."
        )
    # Earlier versions told the settings in the header alone.
    own["engine"].setdefault("settings", header["settings"])
    return own


_SAME = "Resume with those that it was saved with, or start anew from the outer parameters that it holds."


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
    own = place_of(topology)
    saved = state.get("rank", own)
    if saved != own:
        raise ValueError(
            f"This is the state of {_told(saved)}, and this process is {_told(own)}. Each rank needs its own state,"
            " because worker groups hold different values. A checkpoint that rank 0 writes alone, as torch.save in one"
            " process, fabric.save({'engine': engine}) and accelerator.register_for_checkpointing(engine) do, keeps"
            " only that of rank 0. Save with engine.save(path) and load with engine.load(path) in all processes: they"
            " keep a file per rank."
        )


def _told(place: Mapping[str, int]) -> str:
    return (
        f"rank {place['group_rank']} of worker group {place['group_index']} ({place['num_groups']} groups of"
        f" {place['group_size']})"
    )
