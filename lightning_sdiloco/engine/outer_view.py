"""The outer view: the outer model, or a mean of the groups, instead of the local one.

[Note: a copy is put aside] While the outer model is shown, the local values rest in a separate
copy, on the host if outer state does. Two ways would need no copy, and neither can be had:

- Exchange the contents: the local values rest in the memory of the outer ones meanwhile. But a
  tensor of the outer state is never written to. The background reads it for a flight that launched
  before the validation, a checkpoint that another thread still writes has it, and so has one that
  is saved while the outer model is shown.
- Let the parameters refer to the outer values. But whoever holds the memory of a parameter would go
  on with the local one: flattened and tied weights, a compiled or captured graph, an optimizer that
  keeps views. And what swaps weights for the time of a validation, such as an average, writes into
  the model that it finds, and so into the outer state. With sharded or bfloat16 parameters, or with
  outer state on the host, there is nothing to refer to.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.outer import OuterStorage
from lightning_sdiloco.engine.shards import digest, reshard
from lightning_sdiloco.engine.untrained import Place, buffer_places
from lightning_sdiloco.engine.weight_copies import WeightCopies


class GroupMean(NamedTuple):
    """Holds the plain mean, over the groups, of what each group holds; see
    `StreamingDiLoCo.group_mean`.
    """

    gathered: list[Tensor]
    untrained: Sequence[Mapping[int, Tensor]]
    own: Mapping[str, Tensor]
    """What the first group keeps of untrained state, where this rank holds something else."""


class LocalValues(NamedTuple):
    """Holds what differs between groups in the model itself: parameters in their order, and
    untrained state by name.
    """

    parameters: list[Tensor]
    untrained: dict[str, Tensor]


class OuterView:
    """Shows outer parameters and untrained state in the model, and puts the local ones back."""

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[FragmentState],
        in_group: Communicator,
        storage: OuterStorage,
        copies: WeightCopies,
    ) -> None:
        self._model = model
        self._fragments = fragments
        self._in_group = in_group
        self._storage = storage
        self._copies = copies
        self._stash: LocalValues | None = None
        # Digests of what was put into the model: of the parameters by name, and of untrained state.
        self._shown: dict[str, int] = {}
        # Parameters that stay as they are when the local values come back.
        self._kept = set[str]()
        # Untrained state from before the end of training.
        self._kept_untrained: dict[str, Tensor] | None = None
        self.has_ended = False

    @property
    def is_shown(self) -> bool:
        """Whether the model shows other values than the local ones, which are put aside."""
        return self._stash is not None

    @contextmanager
    def shown(
        self,
        mean: GroupMean | None = None,
        own: Mapping[str, Tensor] | None = None,
        *,
        watches: bool = False,
    ) -> Iterator[None]:
        """Shows a model in a ``with`` block; the outermost of nested blocks chooses, and restores
        the local one.
        """
        shown_before = self._stash is not None
        self.show(mean, own, watches=watches)
        try:
            yield
        finally:
            if not shown_before:
                self.show_local()

    @torch.no_grad()
    def show(
        self,
        mean: GroupMean | None = None,
        own: Mapping[str, Tensor] | None = None,
        *,
        watches: bool = False,
    ) -> None:
        """Puts the local values aside, and a mean into the model or, in-group collective, the outer
        values.

        Args:
            mean: The mean to show; None: the outer values.
            own: What to show of the state that groups keep; by default what came with the mean.
            watches: Whether `rewritten` will be asked: all parameters are read twice.
        """
        if self._stash is not None or self.has_ended:
            return
        own = own or (mean.own if mean is not None else {})
        self._stash = self._put_aside(own)
        if mean is None:
            self.write_outer()
        else:
            for fragment, gathered, untrained in zip(
                self._fragments, mean.gathered, mean.untrained, strict=True
            ):
                fragment.write(gathered, untrained)
        self.write_untrained(own)
        self._copies.hide()
        self._shown = self._digests_of_untrained()
        if watches:
            self._shown |= self._digests_of_parameters()

    def rewritten(self) -> dict[str, int]:
        """Returns the parameters that code has overwritten since they were shown, by name, each
        with its digest.
        """
        if self._stash is None:
            return {}
        now = self._digests_of_parameters()
        return {name: value for name, value in now.items() if value != self._shown[name]}

    @torch.no_grad()
    def show_local(self) -> None:
        """Puts the local values back. Untrained state that code has overwritten since stays as it
        is now.
        """
        if self._stash is None:
            return
        now = self._digests_of_untrained()
        untrained = self._stash.untrained
        rewritten = {name for name in untrained if now.get(name) != self._shown.get(name)}
        kept = {name: values for name, values in untrained.items() if name not in rewritten}
        self.load_local(self._stash._replace(untrained=kept))
        for fragment in self._fragments:
            fragment.untrained.note_rewritten(rewritten)
        self._stash = None
        self._copies.show()
        self._renew_copies(self._kept)
        self._kept = set()

    @torch.no_grad()
    def keep(self, names: Collection[str]) -> None:
        """Makes what the model holds of some parameters the local values for good, also if the
        outer model is shown.
        """
        if self._stash is None:
            self._renew_copies(names)
            return
        order = [name for fragment in self._fragments for name in fragment.layout.names]
        for index, (name, parameter) in enumerate(zip(order, self._parameters(), strict=True)):
            if name in names:
                self._stash.parameters[index] = self._storage.store_copy(parameter)
        self._kept |= set(names)

    def keep_untrained(self) -> None:
        """Makes the untrained state that travels, as the model holds it, the local one for good."""
        if self._stash is not None:
            for fragment in self._fragments:
                for name in fragment.untrained.names:
                    self._stash.untrained.pop(name, None)

    def _renew_copies(self, names: Collection[str]) -> None:
        """Makes the copies that inner optimizers keep of some parameters what these are now."""
        for fragment in self._fragments:
            fragment.layout.renew_copies(names)

    def _digests_of_parameters(self) -> dict[str, int]:
        digests = dict[str, int]()
        for fragment in self._fragments:
            for name, parameter in zip(fragment.layout.names, fragment.layout.held, strict=True):
                digests[name] = digest(parameter)
        return digests

    def _digests_of_untrained(self) -> dict[str, int]:
        """Returns digests of the untrained state that has been put aside, as the model holds it
        now.
        """
        assert self._stash is not None, "another model is shown"
        return {place.name: digest(place.values) for place in self._places(self._stash.untrained)}

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Puts the local values back inside a ``with`` block, if something else is shown, and then
        that again.
        """
        if self._stash is None:
            yield
            return
        shown = LocalValues(
            [parameter.clone() for parameter in self._parameters()],
            {place.name: place.values.clone() for place in self._places(self._stash.untrained)},
        )
        self.load_local(self._stash)
        try:
            yield
        finally:
            self.load_local(shown)

    @torch.no_grad()
    def write_outer(self, *, stays: bool = False) -> None:
        """Overwrites the local values with the outer ones, for good if that ``stays``. In-group
        collective.
        """
        reshard(self._model)
        for fragment in self._fragments:
            fragment.write_outer(self._in_group, stays=stays)

    def begin_end(self, *, keeps_parameters: bool) -> None:
        """Keeps untrained state for a longer run, and parameters, unless fragments do before they
        are overwritten.
        """
        self._kept_untrained = self._local_untrained()
        if keeps_parameters:
            for fragment in self._fragments:
                fragment.keep_local()

    @torch.no_grad()
    def end(self, *, is_written: bool) -> None:
        """Leaves the outer model in the model: flights have written it, or this does. In-group
        collective.
        """
        reshard(self._model)
        if not is_written:
            for fragment in self._fragments:
                fragment.end(fragment.write_outer(self._in_group), fragment.outer.values)
        self._copies.end()
        self.has_ended = True

    @torch.no_grad()
    def keep_outer(self) -> None:
        """Copies the outer parameters out of the model, which may change after the end of
        training.
        """
        for fragment in self._fragments:
            if fragment.final is None:
                fragment.final = fragment.layout.copied().to("cpu")

    @torch.no_grad()
    def named(self, mean: GroupMean | None = None) -> dict[str, Tensor]:
        """Copies the outer parameters to the host, by name, in the parameters' shapes."""
        named: dict[str, Tensor] = {}
        for index, fragment in enumerate(self._fragments):
            if mean is not None:
                named |= fragment.named_mean(mean.gathered[index], self._in_group)
                continue
            if self.has_ended:
                named |= fragment.named_at_end(self._in_group)
                continue
            gathered = (
                fragment.outer.values
                if self._in_group.size == 1
                else fragment.gathered(self._in_group)
            )
            named |= fragment.named(gathered, self._in_group)
        return named

    def local_values(self) -> dict[str, Any]:
        """Returns `LocalValues` on the host, as a plain dictionary. Write to none of it."""
        if self._stash is None:
            reshard(self._model)
            parameters = [
                values for fragment in self._fragments for values in fragment.local_values()
            ]
            return {"parameters": parameters, "untrained": self._local_untrained()}
        # What has been put aside is not written to.
        parameters = [tensor.to("cpu") for tensor in self._stash.parameters]
        untrained = {place.name: place.values.to("cpu", copy=True) for place in self._changed_own()}
        untrained |= {name: tensor.to("cpu") for name, tensor in self._stash.untrained.items()}
        return {"parameters": parameters, "untrained": untrained}

    def _local_untrained(self) -> dict[str, Tensor]:
        """Copies the untrained state of this rank; later, what it was before the end of
        training.
        """
        if self._kept_untrained is not None:
            return self._kept_untrained
        places = [*self._changed_own(), *self._overwritten_places()]
        return {place.name: place.values.to("cpu", copy=True) for place in places}

    def _changed_own(self) -> list[Place]:
        """Returns where the frozen parameters are that code has moved."""
        changed = [
            place for fragment in self._fragments for place in fragment.untrained.own.changed()
        ]
        return [place for place in changed if place.is_parameter]

    @torch.no_grad()
    def load_local(self, values: LocalValues) -> None:
        """Overwrites the local values with others."""
        for parameter, saved in zip(self._parameters(), values.parameters, strict=True):
            parameter.copy_(saved)
        self.write_untrained(values.untrained)

    def _parameters(self) -> list[Tensor]:
        reshard(self._model)
        return [parameter for fragment in self._fragments for parameter in fragment.layout.held]

    def _overwritten_places(self) -> list[Place]:
        """Returns where all buffers are, and the frozen parameters that travel: outer values are
        written to both.
        """
        frozen = [
            place for fragment in self._fragments for place in fragment.untrained.frozen_places
        ]
        return [*buffer_places(self._model), *frozen]

    def _places(self, names: Mapping[str, Any]) -> list[Place]:
        """Returns where the model holds untrained state of these names."""
        own = [place for fragment in self._fragments for place in fragment.untrained.own.places]
        places = {place.name: place for place in (*own, *self._overwritten_places())}
        return [places[name] for name in names if name in places]

    def _put_aside(self, own: Mapping[str, Tensor]) -> LocalValues:
        """Copies all that is overwritten, and all buffers, because a forward pass may write to
        them.
        """
        parameters = [self._storage.store_copy(parameter) for parameter in self._parameters()]
        places = {place.name: place for place in (*self._overwritten_places(), *self._places(own))}
        return LocalValues(
            parameters,
            {name: self._storage.store_copy(place.values) for name, place in places.items()},
        )

    @torch.no_grad()
    def write_untrained(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites untrained state, by name."""
        for place in self._places(values):
            place.write(values[place.name])
