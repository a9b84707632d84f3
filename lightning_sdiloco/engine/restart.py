"""Restarts rounds from the checkpoint of a run with different groups, ranks or settings.

The outer state from all ranks' files is combined by name so that a run with any groups, shards and
fragments can start from it. If the files of all groups are available, the checkpoint's flights land
first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.as_data import as_text, describes
from lightning_sdiloco.algorithm.config import Settings, read_settings
from lightning_sdiloco.algorithm.reduce import TwoShot, all_reduce_for
from lightning_sdiloco.algorithm.weighting import Control, Count, Weighed
from lightning_sdiloco.engine.flight import norm_squared
from lightning_sdiloco.engine.history import Counts, History
from lightning_sdiloco.engine.matrices import direct_shards
from lightning_sdiloco.engine.outer import OuterState, ShardOptimizer, outer_optimizer_for
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.engine.shards import OuterParameter, to_parameters
from lightning_sdiloco.engine.start import NamedOuter
from lightning_sdiloco.engine.untrained import Kind, new_outer

State = dict[str, Any]
"""Saved plain values and tensors, such as a rank's file or a `StreamingDiLoCo.state_dict`."""


class Restart(NamedTuple):
    """The state from which rounds restart.

    Attributes:
        parameters: Outer parameters and their optimizer state by name.
        untrained: The outer values of untrained state by name.
        counts: The counters from which the new run continues.
        weighed: The state of the weighing.
    """

    parameters: dict[str, OuterParameter]
    untrained: dict[str, Tensor]
    counts: dict[str, int]
    weighed: Weighed

    @staticmethod
    def of(arrived: Sequence[Any]) -> "Restart":
        """Rebuilds a restart that another rank sent as plain tuples."""
        parameters, untrained, counts, weighed = arrived
        parameters = {name: OuterParameter(*fields) for name, fields in parameters.items()}
        return Restart(parameters, untrained, counts, Weighed(*weighed))

    @torch.no_grad()
    def begin(self, rounds: Rounds, history: History) -> None:
        """Starts the rounds of an engine from this state. All ranks must call this method."""
        history.counts = Counts(**self.counts)
        landed = {
            name: parameter for name, parameter in self.parameters.items() if parameter.rounds
        }
        outer = NamedOuter(landed, self.untrained)
        rounds.begin(outer, self.weighed, history.counts.inner_steps)
        rounds.fragmented_model.view.write_outer(stays=True)


def restart_from(groups: Sequence[Sequence[State | None]], settings: Settings | None) -> Restart:
    """Combines the states of all ranks and lands their flights if possible.

    Args:
        groups: The state of each rank by group, with None for each missing file.
        settings: The settings of the new run. Pass None if the new run has a different outer
            optimizer, which can neither read the saved state nor land the flights.

    Raises:
        ValueError: If no group has the states of all of its ranks.
    """
    complete_groups = _complete(groups)
    ranks = complete_groups[0]
    first_rank = ranks[0]
    shares = "anchor" not in first_rank["fragments"][0]
    if not shares:
        # Each group has its own outer parameters.
        ranks = [_mean_of(states) for states in zip(*complete_groups, strict=True)]
    outer = _OuterModel(ranks, reads_optimizer_state=settings is not None)
    weighed = _weighed(first_rank, len(groups), settings)
    in_flight = len(first_rank["flights"])
    landed = 0
    if settings is not None and shares and len(complete_groups) == len(groups):
        launched_with = settings.taken_from(first_rank["settings"])
        flights = _SavedFlights(complete_groups, outer, weighed, launched_with)
        landed = sum(flights.land(index) for index in range(in_flight))
    counts = first_rank["counts"]
    return Restart(
        parameters=outer.parameters(),
        untrained=outer.untrained(),
        counts={
            "inner_steps": counts["inner_steps"],
            "launches": counts["launches"],
            "landings": counts["landings"] + landed,
            "flights_dropped": counts["flights_dropped"] + in_flight - landed,
        },
        weighed=weighed,
    )


def _complete(groups: Sequence[Sequence[State | None]]) -> list[list[State]]:
    """Returns all groups that have the states of all of their ranks."""
    complete_groups = list[list[State]]()
    for group in groups:
        states = [state for state in group if state is not None]
        if len(states) == len(group):
            complete_groups.append(states)
    if not complete_groups:
        raise ValueError(
            "The outer parameters cannot be restored, because no worker group has the files of"
            " all of its ranks. Restore the missing files, or start a new fit from the"
            " checkpoint's weights."
        )
    return complete_groups


def _weighed(state: State, groups: int, settings: Settings | None) -> Weighed:
    """Returns the saved state of the weighing, or the initial state if the weighing has changed."""
    weighing = read_settings(state["settings"]).get("weighing")
    states = {tuple(fragment["names"]): fragment["norms"] for fragment in state["fragments"]}
    if settings is None:
        return Weighed(as_text(weighing), groups, states)
    if not describes(weighing, settings.weighing):
        states = {names: settings.aggregation.start(groups) for names in states}
    return Weighed(settings.weighing_text, groups, states)


def _mean_of(states: Sequence[State]) -> State:
    """Averages the outer values of the same rank in all groups and returns the resulting state."""
    fragments = []
    for index, first in enumerate(states[0]["fragments"]):
        saved = [state["fragments"][index] for state in states]
        optimizer_state = {}
        for key in first["state"]:
            optimizer_state[key] = _mean([fragment["state"][key] for fragment in saved])
        buffers = []
        for position, kind in enumerate(first["buffer_kinds"]):
            values = [fragment["buffers"][position] for fragment in saved]
            buffers.append(_new_outer(Kind(kind), values, values[0], keeps_outer=False))
        outer = _mean([fragment["outer"] for fragment in saved])
        fragments.append({**first, "outer": outer, "state": optimizer_state, "buffers": buffers})
    return {**states[0], "fragments": fragments}


def _mean(values: Sequence[Any]) -> Any:
    """Returns the mean of floating-point tensors, or the first of any other values."""
    first = values[0]
    if isinstance(first, Tensor) and first.is_floating_point():
        return torch.stack(list(values)).mean(dim=0)
    return first


class _OuterModel:
    """The outer state of a saved run with its original fragments and shards.

    Attributes:
        shards: The outer state of each shard, indexed by rank in the group and by fragment.
        buffers: The outer values of untrained state by fragment and name.
    """

    def __init__(self, ranks: Sequence[State], *, reads_optimizer_state: bool) -> None:
        self._fragments = ranks[0]["fragments"]
        self.shards = [_outer_states(rank, reads_optimizer_state) for rank in ranks]
        self.buffers = [
            dict(zip(fragment["buffer_names"], fragment["buffers"], strict=True))
            for fragment in self._fragments
        ]

    def parameters(self) -> dict[str, OuterParameter]:
        parameters = dict[str, OuterParameter]()
        for index, fragment in enumerate(self._fragments):
            parameters |= to_parameters(fragment, [states[index] for states in self.shards])
        return parameters

    def untrained(self) -> dict[str, Tensor]:
        """Returns the outer buffers of all fragments that have landed."""
        untrained = dict[str, Tensor]()
        for buffers, outer_state in zip(self.buffers, self.shards[0], strict=True):
            if outer_state.rounds:
                untrained |= buffers
        return untrained


def _outer_states(rank: State, reads_optimizer_state: bool) -> list[OuterState]:
    outer_states = [OuterState.of(fragment) for fragment in rank["fragments"]]
    if reads_optimizer_state:
        return outer_states
    return [outer_state._replace(state={}) for outer_state in outer_states]


class _SavedFlights:
    """The flights of a saved run, which land as they would have landed in that run.

    Args:
        groups: The states of all ranks by group.
        outer: The outer state, which landings change.
        weighed: The state of the weighing, which landings change.
        settings: The settings with which the flights were launched.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[State]],
        outer: _OuterModel,
        weighed: Weighed,
        settings: Settings,
    ) -> None:
        self._groups = groups
        self._outer = outer
        self._weighed = weighed
        self._weighing = settings.aggregation
        self._direction = settings.outer.map
        # Two shots use the same parts as when the flights were launched, because the errors of the
        # second rounding are saved part by part.
        exchange = TwoShot.read(read_settings(groups[0][0]["settings"])["exchange"], "gloo")
        self._all_reduce = all_reduce_for(
            exchange, len(groups), settings.codec, settings.landing.kept
        )
        self._optimizers = list[ShardOptimizer]()
        for outer_states in outer.shards:
            values = [outer_state.values for outer_state in outer_states]
            self._optimizers.append(outer_optimizer_for(settings, values))

    def land(self, index: int) -> bool:
        """Lands a flight and returns whether any group sent a finite outer gradient."""
        first_rank = self._groups[0][0]
        flight = first_rank["flights"][index]
        fragment = first_rank["fragments"][flight["fragment"]]
        names = tuple(fragment["names"])
        controls = list[Control]()
        for group in self._groups:
            controls.append(Control.merged([_control(rank["flights"][index]) for rank in group]))
        weighing_state = self._weighed.states[names]
        count = self._weighing.count(controls, weighing_state)
        self._weighed.states[names] = self._weighing.heard(controls, weighing_state, count)
        if count.factors:
            means = list[OuterState]()
            for rank in range(len(self._groups[0])):
                means.append(OuterState(self._mean_gradient(index, rank, count), {}, rounds=0))
            gradients = direct_shards(fragment, means, self._direction)
            self._step(flight, gradients)
            self._land_buffers(index, fragment["buffer_kinds"], count)
        return any(control.finite for control in controls)

    def _mean_gradient(self, index: int, rank: int, count: Count) -> Tensor:
        """Returns the mean outer gradient of a shard (line 8 of Algorithm 2)."""
        flights = [group[rank]["flights"][index] for group in self._groups]
        saved = [group[rank]["fragments"][flights[0]["fragment"]] for group in self._groups]
        step = flights[0]["step"]
        return self._all_reduce.at(step).reduce_locally(
            [flight["gradient"] for flight in flights],
            [fragment["memory"] for fragment in saved],
            [fragment["residual"] for fragment in saved],
            count,
            [fragment.get("tuning") for fragment in saved],
            [self._all_reduce.at(step, flight.get("choice", 0)) for flight in flights],
        )

    def _step(self, flight: State, gradients: Sequence[Tensor]) -> None:
        """Applies the outer step to all shards of a fragment (line 11 of Algorithm 2)."""
        fragment = flight["fragment"]
        is_dense = flight.get("is_dense", False)
        for rank, gradient in enumerate(gradients):
            outer_states = self._outer.shards[rank]
            before = outer_states[fragment]
            outer_states[fragment] = self._optimizers[rank].step(
                fragment, before, before.values, gradient, is_dense=is_dense
            )

    def _land_buffers(self, index: int, kinds: Sequence[str], count: Count) -> None:
        """Updates the outer values of untrained state with the values of all groups included in the
        mean.
        """
        flights = [self._groups[group][0]["flights"][index] for group in count.factors]
        buffers = self._outer.buffers[flights[0]["fragment"]]
        for position, name in enumerate(buffers):
            sent = [flight["buffers"][position] for flight in flights]
            kind = Kind(kinds[position])
            buffers[name] = _new_outer(kind, sent, buffers[name], keeps_outer=True)


def _new_outer(kind: Kind, sent: Sequence[Tensor], outer: Tensor, *, keeps_outer: bool) -> Tensor:
    by_group = {str(group): values for group, values in enumerate(sent)}
    return new_outer(kind, by_group, outer, keeps_outer=keeps_outer)[0]


def _control(flight: State) -> Control:
    """Returns a rank's control vector with the fields that are needed for the landing."""
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
