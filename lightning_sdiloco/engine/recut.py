"""Divides a model into fragments again (a *recut*) after parameters have been frozen, unfrozen or
replaced.

Outer state is transferred from the previous fragments by tensor name. All ranks treat tensors
alike, so a parameter that was replaced on any rank counts as new on all ranks.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.shards import CutModel, OuterParameter, trainable
from lightning_sdiloco.engine.start import NamedOuter
from lightning_sdiloco.engine.untrained import Kind, kinds_of

_log = logging.getLogger(__name__)


class Recut(NamedTuple):
    """The tensors of a model that is about to be divided again. No flights are in progress.

    Attributes:
        fragments: The new fragments.
        outer: The outer state of the remaining tensors, keyed by their new names.
        frozen: The outer parameters that are no longer trainable, keyed by their previous names.
        known: The remaining parameters and untrained state.
        new: The new or reshaped tensors, which all groups take from the first group.
    """

    fragments: tuple[Fragment, ...]
    outer: NamedOuter
    frozen: Mapping[str, OuterParameter]
    known: dict[str, Tensor]
    new: dict[str, Tensor]

    @property
    def needs_mean(self) -> bool:
        """Whether the mean of the groups is needed for frozen parameters that have never landed."""
        return not all(parameter.rounds for parameter in self.frozen.values())

    def with_mean(self, trained: Mapping[str, Tensor]) -> "Recut":
        """Replaces the untrained outer values of frozen parameters that have never landed with the
        mean of the groups.
        """
        frozen = dict(self.frozen)
        for name, parameter in self.frozen.items():
            if not parameter.rounds:
                frozen[name] = parameter._replace(values=trained[name].flatten())
        return self._replace(frozen=frozen)

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of all new tensors and of all newly frozen tensors on this rank."""
        return list(self.new), list(self.frozen)

    def agreed(self, names: Sequence[tuple[list[str], list[str]]]) -> "Recut":
        """Combines the `names` of all ranks into a recut that is the same on all ranks."""
        new = set[str]().union(*(new_names for new_names, _ in names))
        frozen_everywhere = set.intersection(*(set(frozen_names) for _, frozen_names in names))
        tensors = self.known | self.new
        return self._replace(
            outer=self.outer._replace(
                parameters=_without(new, self.outer.parameters),
                untrained=_without(new, self.outer.untrained),
            ),
            frozen={name: p for name, p in self.frozen.items() if name in frozen_everywhere},
            # The names are sorted, because ranks may have replaced different parameters.
            new={name: tensors[name] for name in sorted(new)},
        )

    @staticmethod
    def of(
        cut_model: CutModel,
        fragments: tuple[Fragment, ...],
        before: Sequence[FragmentState],
        outer: NamedOuter,
        settings: Settings,
    ) -> "Recut":
        """Sorts a model's tensors and their outer state into remaining, new and frozen ones."""
        rounds = max(parameter.rounds for parameter in outer.parameters.values())
        trained = _divide_parameters(cut_model, outer)
        untrained = _divide_untrained(cut_model, before, outer, settings)
        return Recut(
            fragments=fragments,
            outer=NamedOuter(trained.outer, untrained.outer, rounds),
            frozen={name: outer.parameters[name] for name in sorted(cut_model.frozen())},
            known=trained.known | untrained.known,
            new=trained.new | untrained.new,
        )


class _Division(NamedTuple):
    """The tensors of a model that is being divided again, keyed by their new names. Frozen
    parameters are excluded.

    Attributes:
        outer: The outer state of the remaining tensors.
        known: The remaining tensors.
        new: The new or reshaped tensors.
    """

    outer: dict[str, Any]
    known: dict[str, Tensor]
    new: dict[str, Tensor]


def _divide_parameters(cut_model: CutModel, outer: NamedOuter) -> _Division:
    division = _Division({}, {}, {})
    for name, parameter in trainable(cut_model.model).items():
        former_name = cut_model.former_name(parameter)
        if former_name is None:
            division.new[name] = parameter
        else:
            division.known[name] = parameter
            division.outer[name] = outer.parameters[former_name]
    return division


def _divide_untrained(
    cut_model: CutModel, before: Sequence[FragmentState], outer: NamedOuter, settings: Settings
) -> _Division:
    division = _Division({}, {}, {})
    former_kinds = dict[str, Kind]()
    for fragment in before:
        former_kinds |= fragment.untrained.kinds_by_name()
    kinds = kinds_of(cut_model.model, settings.untrained or {}, former_kinds)
    for place, kind in kinds.items():
        # Code may replace the tensors of buffers, so buffers are identified by their modules.
        former_name = cut_model.former_place(place.name)
        values = outer.untrained.get(former_name)
        if values is not None and values.shape == place.tensor.shape:
            division.known[place.name] = place.tensor
            division.outer[place.name] = values
        elif former_kinds.get(former_name) is Kind.OWN:
            division.known[place.name] = place.tensor
        elif kind is not Kind.OWN or not place.is_parameter:
            division.new[place.name] = place.tensor
    return division


Value = TypeVar("Value")


def _without(names: Collection[str], values: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if name not in names}


def say_what_is_cut_again(recut: Recut, cut_model: CutModel, *, restarts: bool) -> None:
    changes = cut_model.described()
    start = ""
    if any(isinstance(tensor, nn.Parameter) for tensor in recut.new.values()):
        changes = changes or "parameters have been replaced on other ranks"
        start = " New tensors start from the first worker group's values, without outer momentum."
    _log.warning(
        "The model is divided again, now into %d fragments, and rounds %s. Since the last"
        " division, %s.%s",
        len(recut.fragments),
        "restart" if restarts else "continue",
        changes or "names or dtypes have changed",
        start,
    )


def follow_in_optimizers(
    recut: Recut, cut_model: CutModel, optimizers: Sequence[Optimizer], *, says: bool
) -> None:
    """Discards the gradients and optimizer state of reshaped parameters, and warns about new
    parameters without an optimizer.
    """
    stepped, trained = _parameters_of(optimizers)
    unstepped = list[str]()
    for name, tensor in recut.new.items():
        if not isinstance(tensor, nn.Parameter):
            continue
        former = cut_model.former_parameter(name)
        if former is not tensor:
            # If no optimizer trained the previous parameter, the new parameter needs no optimizer
            # either.
            should_train = former is None or id(former) in trained
            if should_train and id(tensor) not in stepped:
                unstepped.append(name)
        elif cut_model.former_name(tensor) is None:
            tensor.grad = None
            for optimizer in optimizers:
                optimizer.state.pop(tensor, None)
    if optimizers and unstepped and says:
        _log.warning(
            "No inner optimizer trains %d of the new parameters, such as %r. Add them to an"
            " optimizer with add_param_group, or create a new optimizer, before the model is"
            " divided again.",
            len(unstepped),
            unstepped[0],
        )


def _parameters_of(optimizers: Sequence[Optimizer]) -> tuple[set[int], set[int]]:
    """Returns the ids of all parameters that the optimizers contain, and of those that they have
    trained.
    """
    stepped = set[int]()
    trained = set[int]()
    for optimizer in optimizers:
        held = set[int]()
        # Lightning accepts any object that has the methods of an optimizer.
        for group in getattr(optimizer, "param_groups", ()):
            held |= set(map(id, group["params"]))
        stepped |= held
        # Unlike other parameters, a parameter that never has a gradient has no state.
        with_state = set(map(id, getattr(optimizer, "state", ())))
        trained |= held & with_state if with_state else held
    return stepped, trained
