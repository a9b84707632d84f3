"""What differs between ranks: a folder beside an ordinary checkpoint, with one file per rank and a manifest.

[Note: the order of a save] The checkpoint file names the folder of its own save. All ranks write their files, then rank
0 writes the manifest, and last the checkpoint file takes its place in one step. So whenever a process is killed, the
checkpoint file that exists belongs to a complete folder. Folders of earlier saves are removed after that. All ranks
wait for each of these: to write the checkpoint file may be a collective, in which they would wait for one that failed.
"""

import hashlib
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

FORMAT = 1
"""Version of the folder's format; a newer one is refused."""

KEY = "streaming_diloco"
"""The key under which the checkpoint file says which folder belongs to it."""

_SUFFIX = ".sdiloco"
_MANIFEST = "manifest.json"


class Entry(NamedTuple):
    """A rank's file as the manifest knows it."""

    name: str
    size: int
    sha256: str


def write_rank(path: str, save: str, rank: int, state: Mapping[str, Any]) -> Entry:
    """Writes the file of a rank, either all of it or nothing."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    name = _rank_file(rank)
    _write(path, save, name, buffer.getvalue())
    return Entry(name, buffer.getbuffer().nbytes, hashlib.sha256(buffer.getbuffer()).hexdigest())


def write_manifest(path: str, header: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    """Writes the manifest, which makes a folder complete."""
    manifest = {**header, "files": [entry._asdict() for entry in entries]}
    _write(path, header["save"], _MANIFEST, json.dumps(manifest, indent=2).encode())


def read_rank(path: str, header: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Reads the file of a rank and checks it against the manifest."""
    if header["format"] > FORMAT:
        raise ValueError(
            f"The checkpoint {path} was written in format {header['format']} by lightning_sdiloco {header['version']};"
            f" this version reads up to format {FORMAT}. Install that version or a newer one."
        )
    manifest = json.loads(_read(path, header["save"], _MANIFEST))
    entry = Entry(**manifest["files"][rank])
    data = _read(path, header["save"], entry.name)
    if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ValueError(
            f"The file {entry.name} in {_folder(path, follow=True)[1]} is not what was saved: it has {len(data)} bytes"
            f" where {entry.size} were written, or other contents. Restore it, or resume from another checkpoint."
        )
    return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def read_groups(path: str, header: Mapping[str, Any], keys: Sequence[str]) -> list[list[dict[str, Any] | None]]:
    """Reads the engine's state from the files of all ranks, by group; None where a file is missing."""
    layout = header["layout"]
    states = []
    for rank in range(layout["worker_groups"] * layout["group_size"]):
        engine = read_rank(path, header, rank)["engine"] if has_rank(path, header, rank) else None
        states.append(engine and {key: engine[key] for key in keys})
    return [states[first : first + layout["group_size"]] for first in range(0, len(states), layout["group_size"])]


def has_rank(path: str, header: Mapping[str, Any], rank: int) -> bool:
    """Returns whether the file of a rank exists."""
    filesystem, folder = _folder(path, follow=True)
    return bool(filesystem.exists(f"{folder}/{header['save']}/{_rank_file(rank)}"))


def write_checkpoint(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Writes a checkpoint file, which takes its place in one step."""
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    _write_file(*_filesystem(path), buffer.getvalue())


def read_checkpoint(path: str) -> dict[str, Any]:
    """Reads a checkpoint file."""
    filesystem, target = _filesystem(path)
    try:
        data = filesystem.cat_file(target)
    except FileNotFoundError as error:
        raise ValueError(f"There is no checkpoint {path}. Give a path that was saved.") from error
    return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def remove_folder(path: str) -> None:
    """Removes the folder that belongs to a checkpoint file, if there is one."""
    filesystem, folder = _folder(path)
    if filesystem.exists(folder):
        filesystem.rm(folder, recursive=True)


def saves(path: str) -> list[str]:
    """Returns the names of the saves in the folder of a checkpoint file, complete or not."""
    filesystem, folder = _folder(path)
    found = filesystem.ls(folder, detail=False) if filesystem.exists(folder) else []
    return [os.path.basename(save.rstrip("/")) for save in found]


def discard(path: str, save: str) -> None:
    """Removes what this rank can see of a save that has failed. Other ranks may be doing the same."""
    filesystem, folder = _folder(path)
    if _is_local(filesystem):
        shutil.rmtree(f"{folder}/{save}", ignore_errors=True)
        with suppress(OSError):
            os.rmdir(folder)  # if there is no other save in it
    else:
        with suppress(Exception):
            filesystem.rm(f"{folder}/{save}", recursive=True)


def remove_saves(path: str, names: Sequence[str]) -> None:
    """Removes some of the saves in the folder of a checkpoint file."""
    filesystem, folder = _folder(path)
    for name in names:
        if filesystem.exists(f"{folder}/{name}"):
            filesystem.rm(f"{folder}/{name}", recursive=True)


def is_whole(path: str, save: str) -> bool:
    """Returns whether the folder of a save has its manifest."""
    filesystem, folder = _folder(path)
    return bool(filesystem.exists(f"{folder}/{save}/{_MANIFEST}"))


def fingerprint(path: str) -> str:
    """Returns a text that changes when a file is replaced; empty if there is no file."""
    filesystem, target = _filesystem(path)
    return repr(filesystem.info(target)) if filesystem.exists(target) else ""


def beside(path: str, save: str) -> str | None:
    """Returns where a checkpoint file can be written before it takes its place; None where files cannot be moved."""
    filesystem, folder = _folder(path)
    return f"{folder}/{save}/checkpoint" if _is_local(filesystem) else None


def take_place(part: str, path: str) -> None:
    """Moves a local file to the place of a checkpoint file, in one step."""
    os.replace(part, _filesystem(path)[1])


def random_state() -> dict[str, Any]:
    """Returns the state of this process's random number generators, as plain values and tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    # Asking a device that nobody uses would begin to use it, which a forked process cannot.
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    # An instance of our own. A thread that writes a checkpoint through the shared one may be in a transaction, which
    # would include what others write meanwhile; and its listings may be older than the files of other ranks.
    filesystem, target = fsspec.core.url_to_fs(path, skip_instance_cache=True)
    return filesystem, target


def _folder(path: str, follow: bool = False) -> tuple[fsspec.AbstractFileSystem, str]:
    filesystem, target = _filesystem(path)
    # ModelCheckpoint(save_last="link") makes a link. It has no folder; that is beside the file to which it points.
    head, name = os.path.split(os.path.realpath(target) if follow and _is_local(filesystem) else target.rstrip("/"))
    if name.startswith("hpc_ckpt_"):
        # Lightning resumes a requeued job from the last of these names. If a crash left the file unwritten, it must
        # not take the folder for it.
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
            f"The checkpoint {path} needs {folder}/{save}/{name}, which is not there. The folder {folder} belongs to"
            " the checkpoint file: move or copy both. With resumable_checkpoints='newest' only the newest checkpoint of"
            " a run has one. Without it, start a new fit from the weights of the file."
        ) from error
