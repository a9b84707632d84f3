"""Restart: what the ranks of an earlier run saved, joined so that other groups, shards and fragments can take it up."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import Control, Settings, TwoShot, all_reduce_for
from lightning_sdiloco.engine.outer.optimizer import OuterState, outer_optimizer_for
from lightning_sdiloco.engine.parameters.resharding import OuterParameter, to_parameters, to_parameters_by_spec
from lightning_sdiloco.engine.parameters.sharding import ShardSpec
from lightning_sdiloco.engine.synchronizer import finite_mean, norm_squared

State = dict[str, Any]
"""What `StreamingDiLoCo.state_dict` returned on one rank."""


class Restart(NamedTuple):
    """Holds what rounds start anew from."""

    parameters: dict[str, OuterParameter]
    buffers: dict[str, Tensor]
    counts: dict[str, int]

    @staticmethod
    def of(arrived: Sequence[Any]) -> "Restart":
        """Returns one that came from another rank, as a plain tuple."""
        parameters, buffers, counts = arrived
        return Restart({name: OuterParameter(*own) for name, own in parameters.items()}, buffers, counts)


def restart_from(groups: Sequence[Sequence[State | None]], settings: Settings | None) -> Restart:
    """Joins the states of the ranks of an earlier run."""
    whole = [[state for state in group if state is not None] for group in groups if None not in group]
    if not whole:
        raise ValueError(
            "No worker group has the files of all its ranks, so the outer parameters cannot be put together. Restore"
            " the missing files, or start a new fit from the weights of the checkpoint."
        )
    ranks = whole[0]
    flights, landed = len(ranks[0]["flights"]), 0
    shares = "anchor" not in ranks[0]["fragments"][0]
    joined = ranks if shares else [_mean_of(of) for of in zip(*whole, strict=True)]
    shards = [[_shard(fragment, settings is not None) for fragment in state["fragments"]] for state in joined]
    buffers = [dict(zip(f["buffer_names"], f["buffers"], strict=True)) for f in joined[0]["fragments"]]
    if settings is not None and shares and len(whole) == len(groups):
        earlier = _EarlierFlights(whole, shards, buffers, settings.taken_from(ranks[0].get("settings")))
        landed = sum(earlier.land(index) for index in range(flights))
    parameters: dict[str, OuterParameter] = {}
    for index, fragment in enumerate(ranks[0]["fragments"]):
        parameters |= _to_parameters(fragment, [shard[index] for shard in shards])
    counts = ranks[0]["counts"]
    return Restart(
        parameters=parameters,
        buffers={
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
    )


def _mean_of(groups: Sequence[State]) -> State:
    """Returns the state of a rank with the mean, over the groups, of its outer parameters, momentum and buffers."""

    def mean(values: Sequence[Any]) -> Any:
        is_mean = isinstance(values[0], Tensor) and values[0].is_floating_point()
        return torch.stack(list(values)).mean(dim=0) if is_mean else values[0]

    fragments = []
    for one in zip(*(group["fragments"] for group in groups), strict=True):
        state = {key: mean([fragment["state"][key] for fragment in one]) for key in one[0]["state"]}
        rows = zip(*(fragment["buffers"] for fragment in one), strict=True)
        buffers = [finite_mean(torch.stack(values), None) for values in rows]
        outer = mean([fragment["outer"] for fragment in one])
        fragments.append({**one[0], "outer": outer, "state": state, "buffers": buffers})
    return {**groups[0], "fragments": fragments}


def _to_parameters(fragment: State, shards: Sequence[OuterState]) -> dict[str, OuterParameter]:
    if "places" not in fragment:
        return to_parameters(dict(zip(fragment["names"], fragment["sizes"], strict=True)), shards)
    specs = [[ShardSpec(*spec) for spec in ranks] for ranks in fragment["places"]]
    return to_parameters_by_spec(dict(zip(fragment["names"], specs, strict=True)), shards)


def _shard(fragment: State, with_state: bool) -> OuterState:
    outer = OuterState.of(fragment)
    return outer if with_state else outer._replace(state={})


class _EarlierFlights:
    """Lands the flights of complete groups as these would have landed them."""

    def __init__(
        self,
        groups: Sequence[Sequence[State]],
        shards: list[list[OuterState]],
        buffers: Sequence[dict[str, Tensor]],
        settings: Settings,
    ) -> None:
        self._groups = groups
        self._shards = shards
        self._buffers = buffers
        self._aggregation = settings.aggregation
        mixing = settings.landing.kept
        # Its parts are those of then, and so is what the second rounding lost.
        saved = (groups[0][0].get("settings") or {}).get("exchange")
        exchange = settings.exchange if saved is None else TwoShot.read(saved)
        self._all_reduce = all_reduce_for(exchange, len(groups), settings.codec, mixing)
        self._optimizers = [outer_optimizer_for(settings, [outer.values for outer in shard]) for shard in shards]

    def land(self, index: int) -> bool:
        """Lands a flight; returns False where no group is finite, so that there is nothing to land."""
        flights = [[state["flights"][index] for state in group] for group in self._groups]
        controls = [Control.merged([_control(flight) for flight in group]) for group in flights]
        fragment = controls[0].fragment
        count = self._aggregation.count(controls, self._groups[0][0]["fragments"][fragment]["norms"])
        if count.factors:
            for shard, optimizer in enumerate(self._optimizers):
                saved = [group[shard]["fragments"][fragment] for group in self._groups]
                gradient = self._all_reduce.at(controls[0].step).reduce_locally(
                    [group[shard]["gradient"] for group in flights],
                    [fragment["memory"] for fragment in saved],
                    [fragment["residual"] for fragment in saved],
                    count,
                    [fragment.get("tuning") for fragment in saved],
                    [group[shard].get("choice", 0) for group in flights],
                )
                before = self._shards[shard][fragment]
                self._shards[shard][fragment] = optimizer.step(fragment, before, before.values, gradient)
            names = list(self._buffers[fragment])
            for position in flights[0][0]["travelling"]:
                sent = torch.stack([flights[group][0]["buffers"][position] for group in count.factors])
                outer = self._buffers[fragment]
                outer[names[position]] = finite_mean(sent, outer[names[position]])
        return any(control.finite for control in controls)


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
