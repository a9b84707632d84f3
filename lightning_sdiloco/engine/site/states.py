"""Outer states on their way between sites: outer parameters, outer optimizer and buffers, a part for each fragment."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.outer.optimizer import OuterState
from lightning_sdiloco.engine.parameters.resharding import OuterParameter

Bytes = bytes | bytearray | memoryview


class Arrived(NamedTuple):
    """Holds what came of one fragment: what of it this rank holds.

    Attributes:
        outer: Outer parameters and outer optimizer state of the shard.
        buffers: Outer buffers by name.
    """

    outer: OuterState
    buffers: Mapping[str, Tensor]


def to_part(fragment: FragmentState, shards: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the outer state of a fragment as bytes, whole, by the names of its parameters.

    Args:
        fragment: The fragment.
        shards: What `OuterState.state_dict` returned on the ranks of this site.
    """
    parameters = fragment.layout.to_parameters([OuterState.of(shard) for shard in shards])
    buffers = {name: buffer.to("cpu") for name, buffer in fragment.buffers.named().items()}
    file = io.BytesIO()
    torch.save({"parameters": {name: tuple(own) for name, own in parameters.items()}, "buffers": buffers}, file)
    return file.getvalue()


def from_part(fragment: FragmentState, part: Bytes) -> Arrived:
    """Reads what `to_part` returned, perhaps at a site with another number of ranks. Nothing in it is executed.

    Raises:
        ValueError: If it is none, or that of another fragment.
    """
    try:
        state = torch.load(io.BytesIO(part), map_location="cpu", weights_only=True)
        parameters = {name: OuterParameter(*own) for name, own in state["parameters"].items()}
        outer = fragment.layout.to_shard([parameters[name] for name in fragment.layout.names])
        buffers = {name: state["buffers"][name] for name in fragment.buffers.names}
    except Exception as error:  # whatever is wrong with what a stranger may have made
        raise ValueError(f"what came is no state of fragment {fragment.index}: {error}") from error
    if outer.values.shape != fragment.outer.values.shape or outer.values.dtype != torch.float32:
        raise ValueError(f"the state of fragment {fragment.index} that came has {tuple(outer.values.shape)} values")
    return Arrived(outer, buffers)
