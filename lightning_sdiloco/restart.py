"""Rounds that start anew from what other ranks saved: for other groups, other shards and other fragments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.compression import Compression
from lightning_sdiloco.outer import Make, Outer, Stepped
from lightning_sdiloco.portable import OuterParameter, taken_apart

State = dict[str, Any]
"""What `StreamingDiLoCo.state_dict` returned on one rank."""


class Restart(NamedTuple):
    """Where rounds start anew.

    Attributes:
        parameters: Outer parameters and momentum by name.
        buffers: Outer buffers by name.
        counts: What happened before, of what all ranks have in common.
    """

    parameters: dict[str, OuterParameter]
    buffers: dict[str, Tensor]
    counts: dict[str, int]


def restart_from(
    groups: Sequence[Sequence[State | None]], compression: Compression, make_outer: Make | None
) -> Restart:
    """Joins the states of the ranks of an earlier run.

    Flights are landed if all groups' payloads are there. Otherwise they are dropped, and counted.

    Args:
        groups: The states of every rank of every worker group, None where one is missing.
        compression: How outer gradients are encoded.
        make_outer: Makes the outer optimizer; None if it is another one than that of the states, which are then of no
            use to it, so that it starts without a state and flights are dropped.

    Raises:
        ValueError: If no worker group is complete.
    """
    whole = [[state for state in group if state is not None] for group in groups if None not in group]
    if not whole:
        raise ValueError(
            "No worker group has the files of all its ranks, so the outer parameters cannot be put together. Restore"
            " the missing files, or start a new fit from the weights of the checkpoint."
        )
    ranks = whole[0]
    outers = [_outer(state, make_outer) for state in ranks]
    buffers = [dict(zip(f["buffer_names"], f["buffers"], strict=True)) for f in ranks[0]["fragments"]]
    flights, landed = len(ranks[0]["flights"]), 0
    if make_outer is not None and len(whole) == len(groups):
        landed = sum(_land(index, whole, outers, buffers, compression) for index in range(flights))
    parameters: dict[str, OuterParameter] = {}
    for index, fragment in enumerate(ranks[0]["fragments"]):
        sizes = dict(zip(fragment["names"], fragment["sizes"], strict=True))
        shards = [Stepped(outer.values[index], outer.states[index]) for outer in outers]
        parameters |= taken_apart(sizes, shards)
    counts = ranks[0]["counts"]
    return Restart(
        parameters=parameters,
        buffers={name: values for part in buffers for name, values in part.items()},
        counts={
            "inner_steps": counts["inner_steps"],
            "launches": counts["launches"],
            "landings": counts["landings"] + landed,
            "flights_dropped": counts["flights_dropped"] + flights - landed,
        },
    )


def _outer(state: State, make: Make | None) -> Outer:
    """The outer state of one rank's shards."""
    outer = Outer([fragment["outer"] for fragment in state["fragments"]], make or torch.optim.SGD)
    for index, fragment in enumerate(state["fragments"]):
        outer.load(index, fragment["outer"], fragment["state"] if make is not None else {})
    return outer


def _land(
    index: int,
    groups: Sequence[Sequence[State]],
    outers: Sequence[Outer],
    buffers: Sequence[dict[str, Tensor]],
    compression: Compression,
) -> bool:
    """Lands a flight as its groups would have; False where no group is finite."""
    cargos = [[state["flights"][index] for state in group] for group in groups]
    counted = [group for group in cargos if all(bool(cargo["gradient"].isfinite().all()) for cargo in group)]
    if not counted:
        return False
    fragment = counted[0][0]["fragment"]
    for shard, outer in enumerate(outers):
        gradients = [_received(group[shard]["gradient"], compression) for group in counted]
        outer.commit(fragment, outer.stepped(fragment, _mean(gradients)))
    for position in counted[0][0]["travelling"]:
        name = list(buffers[fragment])[position]
        buffers[fragment][name] = torch.stack([group[0]["buffers"][position] for group in counted]).mean(dim=0)
    return True


def _received(gradient: Tensor, compression: Compression) -> Tensor:
    """What the groups get of an outer gradient."""
    received = torch.empty_like(gradient)
    compression.decode(compression.encode(gradient), received)
    return received


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total += gradient
    return total.div_(len(gradients))
