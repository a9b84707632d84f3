"""Rounds that start anew from what other ranks saved: for other groups, other shards and other fragments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.control import Control
from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.engine.outer.optimizer import Outer, Stepped
from lightning_sdiloco.engine.parameters.resharding import OuterParameter, taken_apart, taken_apart_by_place
from lightning_sdiloco.engine.parameters.sharding import Place
from lightning_sdiloco.engine.pipeline import norm_squared

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


def restart_from(groups: Sequence[Sequence[State | None]], settings: Settings | None) -> Restart:
    """Joins the states of the ranks of an earlier run.

    Flights are landed if all groups' payloads are there. Otherwise they are dropped, and counted.

    Args:
        groups: The states of every rank of every worker group, None where one is missing.
        settings: How flights land; None if the outer optimizer is another one than that of the states, so that these
            are of no use to it, and flights are dropped.

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
    flights, landed = len(ranks[0]["flights"]), 0
    shards = [[_shard(fragment, settings is not None) for fragment in state["fragments"]] for state in ranks]
    buffers = [dict(zip(f["buffer_names"], f["buffers"], strict=True)) for f in ranks[0]["fragments"]]
    if settings is not None and len(whole) == len(groups):
        landing = _Landing(whole, shards, buffers, settings)
        landed = sum(landing.land(index) for index in range(flights))
        shards = landing.shards
    parameters: dict[str, OuterParameter] = {}
    for index, fragment in enumerate(ranks[0]["fragments"]):
        parameters |= _taken_apart(fragment, [shard[index] for shard in shards])
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


def _taken_apart(fragment: dict[str, Any], shards: Sequence[Stepped]) -> dict[str, OuterParameter]:
    if "places" not in fragment:
        return taken_apart(dict(zip(fragment["names"], fragment["sizes"], strict=True)), shards)
    places = [[Place(*place) for place in ranks] for ranks in fragment["places"]]
    return taken_apart_by_place(dict(zip(fragment["names"], places, strict=True)), shards)


def _shard(fragment: dict[str, Any], with_state: bool) -> Stepped:
    return Stepped(fragment["outer"], fragment["state"] if with_state else {}, fragment["rounds"])


class _Landing:
    """Lands the flights of complete groups as they would have landed them."""

    def __init__(
        self,
        groups: Sequence[Sequence[State]],
        shards: Sequence[Sequence[Stepped]],
        buffers: Sequence[dict[str, Tensor]],
        settings: Settings,
    ) -> None:
        self._groups = groups
        self._buffers = buffers
        self._settings = settings
        self._aggregation = settings.make_aggregation(len(groups), len(buffers))
        for index, fragment in enumerate(groups[0][0]["fragments"]):
            self._aggregation.load(index, fragment["norms"])
        self._outers = [
            Outer([part.values for part in shard], settings.make_outer_optimizer, settings.outer_lr_schedule)
            for shard in shards
        ]
        for outer, shard in zip(self._outers, shards, strict=True):
            for index, part in enumerate(shard):
                outer.load(index, part.values, part.state, part.rounds)

    @property
    def shards(self) -> list[list[Stepped]]:
        """The shards of every rank of a group, by fragment."""
        return [[outer.kept(fragment) for fragment in range(len(self._buffers))] for outer in self._outers]

    def land(self, index: int) -> bool:
        """Lands a flight; False where no group is finite, so that there is nothing to land."""
        cargos = [[state["flights"][index] for state in group] for group in self._groups]
        controls = [Control.merged([_control(cargo) for cargo in group]) for group in cargos]
        count = self._aggregation.count(controls)
        fragment = controls[0].fragment
        if count.factors:
            for shard, outer in enumerate(self._outers):
                saved = [group[shard]["fragments"][fragment] for group in self._groups]
                gradient = self._settings.make_all_reduce(len(cargos), controls[0].step).reduce_locally(
                    [group[shard]["gradient"] for group in cargos],
                    [fragment["memory"] for fragment in saved],
                    [fragment["residual"] for fragment in saved],
                    count,
                )
                outer.commit(fragment, outer.stepped(fragment, outer.values[fragment], gradient))
            names = list(self._buffers[fragment])
            for position in cargos[0][0]["travelling"]:
                sent = [cargos[group][0]["buffers"][position] for group in count.factors]
                self._buffers[fragment][names[position]] = torch.stack(sent).mean(dim=0)
        return any(control.finite for control in controls)


def _control(cargo: dict[str, Any]) -> Control:
    """What a rank said of a flight, as far as it decides how the flight lands."""
    gradient = cargo["gradient"]
    return Control(
        fragment=cargo["fragment"],
        step=cargo["step"],
        requests=0,
        weight=cargo["weight"],
        digest=0,
        norm_squared=norm_squared(gradient),
        changed=0,
        finite=bool(gradient.isfinite().all()),
    )
