"""Simulates multiple worker groups in one process for research and tests."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.background import InlineBackground
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.fragmented_model import FragmentedModel
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.engine.matrices import MappedOnce
from lightning_sdiloco.engine.outer_view import GroupMean
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.engine.start import require_same_signatures, signature
from lightning_sdiloco.engine.turns import in_turns, turns_of
from lightning_sdiloco.engine.weight_copies import WeightCopies


def simulated_topologies(groups: int) -> list[Topology]:
    """Creates the topologies of simulated worker groups, which have one rank each and use no
    threads.
    """
    topologies = Topology.simulated(groups)
    backgrounds = InlineBackground.connect(groups)
    return [
        replace(topology, background=background)
        for topology, background in zip(topologies, backgrounds, strict=True)
    ]


class SimulatedGroups:
    """Simulated worker groups of one rank each, which run the real engine in this process.

    The outer parameters are the same as with one process per group and the same data.

    Args:
        models: One model per worker group. All models must have the same architecture, and all
            start from the values of the first model.
        inner_optimizers: The inner optimizers of each group; see `StreamingDiLoCo`.
        settings: The arguments of `StreamingDiLoCo`, except for ``worker_groups``.

    Raises:
        ValueError: In the same cases as `StreamingDiLoCo`, and also if there are no models, if
            models differ in names, shapes or dtypes, or if two groups share a model, a trainable
            parameter or optimizer state.

    Examples:
        >>> import torch
        >>> models = [nn.Linear(4, 1) for _ in range(2)]
        >>> optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        >>> groups = SimulatedGroups(models, sync_every=2, overlap_steps=1, compression="fp32")
        >>> for step in range(6):
        ...     for model, optimizer in zip(models, optimizers):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(8, 4)).square().mean().backward()
        ...         optimizer.step()
        ...     landings = groups.step()
        >>> groups.finish()
        >>> torch.equal(models[0].weight, models[1].weight)
        True
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        inner_optimizers: Sequence[Sequence[Optimizer]] = (),
        **settings: Any,
    ) -> None:
        if not models:
            raise ValueError("models is empty. Pass one model for each simulated worker group.")
        _require_own_parameters(models)
        require_same_signatures([signature(model) for model in models])
        optimizers = inner_optimizers or [()] * len(models)
        _require_own_state(optimizers)
        _start_from_first(models, optimizers)
        topologies = simulated_topologies(len(models))
        self.engines = [
            StreamingDiLoCo(model, topology=topology, inner_optimizers=of_group, **settings)
            for model, of_group, topology in zip(models, optimizers, topologies, strict=True)
        ]
        self._map_once()

    def step(
        self, *, trained: Sequence[int] = (), idle: Collection[int] = ()
    ) -> list[list[Landing]]:
        """Counts an inner step in each group, and then launches and lands all fragments that are
        due.

        Args:
            trained: The number of micro-batches that each group trained. The default is 1 for each
                group.
            idle: The groups that skipped training in this inner step.

        Returns:
            The landings of each group, in the order of the groups.
        """
        steps = []
        for group, engine in enumerate(self.engines):
            micro_batches = trained[group] if trained else 1
            steps.append(turns_of(engine.step, trained=micro_batches, idle=group in idle))
        return in_turns(steps)

    def finish(self) -> None:
        """Ends training in all groups; see `StreamingDiLoCo.finish`."""
        in_turns([turns_of(engine.finish) for engine in self.engines])
        first_values = self._first_own()
        for engine in self.engines:
            engine.fragmented_model.view.write_untrained(first_values)

    def recut(self, inner_optimizers: Sequence[Sequence[Optimizer]] = ()) -> list[list[Landing]]:
        """Divides all groups' models into fragments again and returns each group's landings; see
        `StreamingDiLoCo.recut`.

        Args:
            inner_optimizers: The new inner optimizers of each group, if there are any.
        """
        models = [engine.model for engine in self.engines]
        require_same_signatures([signature(model) for model in models])
        _require_own_parameters(models)
        _require_own_state(inner_optimizers)
        optimizers: Sequence[Sequence[Optimizer] | None] = inner_optimizers or [
            None for _ in self.engines
        ]
        recutting = [
            turns_of(engine.recut, of_group)
            for engine, of_group in zip(self.engines, optimizers, strict=True)
        ]
        for turns in recutting:
            next(turns)
        _agree_on_recut([engine.fragmented_model for engine in self.engines])
        landed = in_turns(recutting)
        self._map_once()
        return landed

    def group_mean(self) -> GroupMean:
        """Returns the mean of the groups, which every engine can show; see
        `StreamingDiLoCo.group_mean`.
        """
        means = in_turns([turns_of(engine.group_mean) for engine in self.engines])
        return means[0]._replace(own=self._first_own())

    def _map_once(self) -> None:
        """Shares mapped matrices between groups, because their mean outer gradients are equal."""
        fragments_of_groups = [engine.fragmented_model.fragments for engine in self.engines]
        for of_groups in zip(*fragments_of_groups, strict=True):
            once = MappedOnce(len(self.engines))
            for fragment in of_groups:
                fragment.matrices.once = once

    def _first_own(self) -> dict[str, Tensor]:
        """Returns a copy of the first group's own untrained state by name."""
        states = [fragment.untrained for fragment in self.engines[0].fragmented_model.fragments]
        return {place.name: place.values.clone() for state in states for place in state.own.places}

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters of all groups; see `StreamingDiLoCo.outer_state_dict`.

        If groups have different outer parameters because of a route, the mean of the groups is
        returned.
        """
        first = self.engines[0]
        if first.rounds.settings.shares or first.is_finished:
            return first.outer_state_dict()
        return first.fragmented_model.view.named(self.group_mean())


@torch.no_grad()
def _agree_on_recut(groups: Sequence[FragmentedModel]) -> None:
    """Makes all groups' recuts equal and copies new tensors from the first group."""
    recuts = [group.recut for group in groups if group.recut is not None]
    names = [recut.names for recut in recuts]
    agreed = [recut.agreed(names) for recut in recuts]
    for group, recut in zip(groups, agreed, strict=True):
        group.recut = recut
        for name, values in agreed[0].new.items():
            recut.new[name].copy_(values)


def _require_own_parameters(models: Sequence[nn.Module]) -> None:
    """Refuses models that share trainable parameters."""
    owners: dict[int, int] = {}
    for group, model in enumerate(models):
        for name, parameter in model.named_parameters():
            owner = owners.setdefault(id(parameter), group)
            if owner != group and parameter.requires_grad:
                raise ValueError(
                    f"The models of groups {owner} and {group} share the parameter {name!r}, so"
                    " each group would train the other group's model. Pass a separate model for"
                    " each group, for example copy.deepcopy(model)."
                )


@torch.no_grad()
def _start_from_first(
    models: Sequence[nn.Module], optimizers: Sequence[Sequence[Optimizer]]
) -> None:
    """Copies the first group's model to all groups, including its optimizers' copies of the weights
    if the models differ.
    """
    state = models[0].state_dict()
    first = WeightCopies(optimizers[0])
    first.watch(trainable(models[0]))
    for model, of_group in zip(models[1:], optimizers[1:], strict=True):
        tensors = {
            name: values
            for name, values in model.state_dict().items()
            if isinstance(values, Tensor)
        }
        differs = any(not torch.equal(values, state[name]) for name, values in tensors.items())
        model.load_state_dict(state)
        if differs:
            copies = WeightCopies(of_group)
            copies.watch(trainable(model))
            copies.take(first)


def _require_own_state(groups: Sequence[Sequence[Optimizer]]) -> None:
    """Refuses optimizers that share state tensors between groups."""
    owners: dict[int, int] = {}
    for group, optimizers in enumerate(groups):
        for address in _addresses(optimizers):
            owner = owners.setdefault(address, group)
            if owner != group:
                raise ValueError(
                    f"The inner optimizers of groups {owner} and {group} share tensors of their"
                    " state, so each optimizer would overwrite the other's state."
                    " load_state_dict does not copy tensors, so load copy.deepcopy(state) in"
                    " each group."
                )


def _addresses(optimizers: Sequence[Optimizer]) -> set[int]:
    """Returns the memory addresses of all tensors in the optimizers' state."""
    addresses: set[int] = set()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.numel():
                    addresses.add(value.data_ptr())
    return addresses
