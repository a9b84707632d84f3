"""Outer state by name: how it outlives the fragments, when a model is cut anew or an earlier run is taken up."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm import Fragment, Settings
from lightning_sdiloco.comm import Communicator, Topology
from lightning_sdiloco.engine.agreement import broadcast, require_same_model
from lightning_sdiloco.engine.fragments import FragmentState, travelling_buffers
from lightning_sdiloco.engine.outer import OuterState
from lightning_sdiloco.engine.shards import OuterParameter, is_sharded, to_parameters, trainable
from lightning_sdiloco.engine.start import cut


class NamedOuter(NamedTuple):
    """Holds the outer state of all fragments, whole, by name."""

    parameters: Mapping[str, OuterParameter]
    buffers: Mapping[str, Tensor]


def named_outer(fragments: Sequence[FragmentState], in_group: Communicator) -> NamedOuter:
    """Puts the outer state of all fragments together by name. In-group collective."""
    parameters: dict[str, OuterParameter] = {}
    buffers: dict[str, Tensor] = {}
    for fragment in fragments:
        shards = in_group.all_gather_object(fragment.outer.state_dict())
        parameters |= to_parameters(fragment.layout.state_dict(), [OuterState.of(shard) for shard in shards])
        buffers |= fragment.buffers.named()
    return NamedOuter(parameters, buffers)


@torch.no_grad()
def start_from(fragments: Sequence[FragmentState], outer: NamedOuter, in_group: Communicator) -> None:
    """Takes outer state by name. What is not named keeps its local value, and starts without momentum."""
    # All fragments of a round see the same learning rate, also those that are new.
    rounds = max((parameter.rounds for parameter in outer.parameters.values()), default=0)
    for fragment in fragments:
        layout, known = fragment.layout, dict(outer.parameters)
        if any(name not in known for name in layout.names):
            shard = layout.read()
            values = layout.named(layout.all_gather(shard, in_group), shard, in_group)
            known = {name: OuterParameter(whole.flatten(), {}, rounds) for name, whole in values.items()} | known
        fragment.start_from(layout.to_shard([known[name] for name in layout.names]), outer.buffers)


@torch.no_grad()
def take_over(model: nn.Module, fragments: Sequence[FragmentState], outer: NamedOuter, topology: Topology) -> None:
    """Prepares a model for being cut anew: what was frozen takes its outer value, new that of group 0."""
    now = trainable(model)
    frozen = {name: parameter.values for name, parameter in outer.parameters.items() if name not in now}
    for fragment in fragments:
        fragment.layout.write_named(frozen)
    tensors, known = now | dict(travelling_buffers(model)), outer.parameters.keys() | outer.buffers.keys()
    for name, tensor in tensors.items():
        if name not in known:
            broadcast(tensor, topology)


def has_other_parameters(model: nn.Module, fragments: Sequence[FragmentState]) -> bool:
    """Tells whether parameters were frozen or became trainable since the model was cut."""
    return set(trainable(model)) != {name for fragment in fragments for name in fragment.layout.names}


def cut_again(
    model: nn.Module, fragments: Sequence[FragmentState], settings: Settings, topology: Topology
) -> tuple[Fragment, ...]:
    """Cuts a model anew after parameters were frozen or became trainable. All ranks must call it."""
    if any(is_sharded(parameter) for fragment in fragments for parameter in fragment.layout.parameters):
        raise ValueError(
            "Parameters were frozen or became trainable since training began. FSDP2 does not follow: what became"
            " trainable would not be trained. Choose what is trainable in configure_model, and train in several fits."
        )
    require_same_model(model, topology.world)
    return cut(model, settings).fragments


def require_same_fragments(fragments: Sequence[FragmentState], saved: Sequence[Mapping[str, object]]) -> None:
    """Refuses a state that was saved with other fragments."""
    names = [list(fragment.layout.names) for fragment in fragments]
    if [fragment["names"] for fragment in saved] != names:
        raise ValueError(
            f"The state is that of other fragments: it has {len(saved)}, this engine has {len(names)}, or they hold"
            " other parameters. Resume with the same model and the same fragments."
        )
