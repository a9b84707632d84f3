"""The model in the checkpoints of sharded groups: a folder of torch.distributed.checkpoint, or a single file.

[Note: sharded folders] Only the first worker group writes: all groups hold the same outer model, and its inner
optimizers are those of rank 0. The folder is written beside its final place, and moved there when it is complete.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_sdiloco.comm import Communicator
from lightning_sdiloco.engine import local, part_of

# Where Lightning keeps what is not a tensor.
_METADATA = "meta.pt"


def is_folder(path: Path) -> bool:
    """Returns whether a checkpoint is a sharded folder."""
    return path.is_dir() and (path / _METADATA).is_file()


def write_folder(checkpoint: Mapping[str, Any], path: Path, group: Communicator) -> None:
    """Writes a sharded folder; see [Note: sharded folders]. All ranks of one group must call it."""
    metadata = dict(checkpoint)
    tensors = {"state_dict": metadata.pop("state_dict")}
    for index, state in enumerate(metadata.pop("optimizer_states", [])):
        tensors[f"optimizer_{index}"] = state
    part = path.with_name(f"{path.name}.part")
    _make_room(part, group)
    try:
        save(tensors, checkpoint_id=part, process_group=group.process_group)
        if group.rank == 0:
            torch.save(metadata, part / _METADATA)
            take_place(part, path)
    except Exception:
        if group.rank == 0:
            _remove(part)
        raise


def _make_room(part: Path, group: Communicator) -> None:
    """Removes what an earlier save has left, at rank 0, before any rank writes; raises on all ranks if it cannot."""
    first = group.attempt(lambda: _remove(part) if group.rank == 0 else None)[0]
    if first.failure:
        raise first.raised or OSError(f"rank 0: {first.failure[0]}: {first.text}")


def make_room_for_file(path: Path) -> None:
    """Removes a sharded folder where a single file is to be written."""
    if is_folder(path):
        _remove(path)
    elif path.is_dir():
        raise IsADirectoryError(f"The checkpoint path exists and is a directory: {path}")


def take_place(part: Path, path: Path) -> None:
    """Moves a folder to the place of a checkpoint. What was there stays beside it until then."""
    before = path.with_name(f"{path.name}.before")
    _remove(before)
    if path.exists():
        os.replace(path, before)
    os.replace(part, path)
    _remove(before)


def read_metadata(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Returns what is not a tensor in a sharded folder, or all of a single file, whose tensors stay on disk."""
    if is_folder(path):
        return dict(torch.load(path / _METADATA, map_location="cpu", weights_only=weights_only))
    return dict(torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True))


def read_model(model: nn.Module, path: Path, checkpoint: dict[str, Any], strict: bool) -> None:
    """Reads the model of a checkpoint into a sharded model. All ranks must call it."""
    state = get_model_state_dict(model)
    if is_folder(path):
        loaded = {"state_dict": state}
        load(loaded, checkpoint_id=path)
        set_model_state_dict(model, loaded["state_dict"], options=StateDictOptions(strict=strict))
    else:
        _read_whole(state, checkpoint.pop("state_dict"), strict)


@torch.no_grad()
def _read_whole(state: Mapping[str, Any], whole: Mapping[str, Any], strict: bool) -> None:
    if strict and state.keys() != whole.keys():
        missing, unexpected = sorted(state.keys() - whole.keys()), sorted(whole.keys() - state.keys())
        raise RuntimeError(f"The checkpoint is not of this model. Missing: {missing}. Unexpected: {unexpected}.")
    for name in state.keys() & whole.keys():
        if isinstance(state[name], torch.Tensor):
            local(state[name]).copy_(part_of(state[name], whole[name]))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
