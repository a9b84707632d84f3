"""Temporarily replaces the local model with the outer model or with a mean of the groups.

[Note: a copy is put aside] While the outer model is shown, the local values are kept in a separate
copy, which is on the host if outer state is offloaded. Two approaches would avoid this copy, but
neither works:

- Swap the contents so that the local values use the memory of the outer values. This would modify
    tensors of the outer state, which other code still reads. The background reads these tensors for
    flights that launched before validation. Checkpoints also read these tensors, either in another
    thread or while the outer model is shown.
- Let the parameters refer to the outer values. Code that refers to a parameter's memory would then
    still use the local values. Examples are flattened or tied weights, compiled or captured graphs,
    and optimizers that keep views. Code that swaps weights during validation, such as weight
    averaging, would overwrite the outer state. With sharded or bfloat16 parameters, or with
    offloaded outer state, there is no tensor to refer to.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.outer import OuterStorage
from lightning_sdiloco.engine.shards import digest, reshard
from lightning_sdiloco.engine.untrained import Place, buffer_places, first_own
from lightning_sdiloco.engine.weight_copies import WeightCopies


class GroupMean(NamedTuple):
    """The plain mean of all groups' local values; see `StreamingDiLoCo.group_mean`."""

    gathered: list[Tensor]
    untrained: Sequence[Mapping[int, Tensor]]
    own: Mapping[str, Tensor]
    """The first group's own untrained state, wherever it differs from this rank's."""


class LocalValues(NamedTuple):
    """The local values of the model, with parameters in order and untrained state by name."""

    parameters: list[Tensor]
    untrained: dict[str, Tensor]


class OuterView:
    """A view that writes outer values into the model and restores the local values afterwards."""

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[FragmentState],
        topology: Topology,
        storage: OuterStorage,
        copies: WeightCopies,
    ) -> None:
        self._model = model
        self._fragments = fragments
        self._topology = topology
        self._in_group = topology.in_group
        self._storage = storage
        self._copies = copies
        # The local values while the model shows other values.
        self._stash: LocalValues | None = None
        # Digests of the values that were written into the model, by name.
        self._shown: dict[str, int] = {}
        # Parameters that keep their values when the local values are restored.
        self._kept = set[str]()
        # The untrained state from before the end of training. Set when the end begins.
        self._kept_untrained: dict[str, Tensor] | None = None
        self.has_ended = False

    @property
    def is_shown(self) -> bool:
        """Whether the model shows other values while the local values are set aside."""
        return self._stash is not None

    @property
    def own_moved(self) -> bool:
        """Whether code in any group has changed state that each group keeps, such as a frozen
        teacher.
        """
        return any(fragment.untrained.own_moved for fragment in self._fragments)

    @contextmanager
    def shown(
        self,
        mean: GroupMean | None = None,
        own: Mapping[str, Tensor] | None = None,
        *,
        watches: bool = False,
    ) -> Iterator[None]:
        """Shows a model inside a ``with`` block; see `show`. Nested blocks have no effect."""
        was_shown = self.is_shown
        self.show(mean, own, watches=watches)
        try:
            yield
        finally:
            if not was_shown:
                self.show_local()

    @torch.no_grad()
    def show(
        self,
        mean: GroupMean | None = None,
        own: Mapping[str, Tensor] | None = None,
        *,
        watches: bool = False,
    ) -> None:
        """Sets the local values aside and writes a mean or the outer values into the model.
        In-group collective unless a mean is passed.

        Args:
            mean: The mean to show. By default, the outer values are shown.
            own: The values to show for the state that each group keeps. By default, the values of
                the mean are shown.
            watches: Whether `rewritten` will be called, which requires reading all parameters
                twice.
        """
        if self._stash is not None or self.has_ended:
            return
        if not own:
            own = {} if mean is None else mean.own
        self._stash = self._put_aside(own)
        if mean is None:
            self.write_outer()
        else:
            for index, fragment in enumerate(self._fragments):
                fragment.write(mean.gathered[index], mean.untrained[index])
        self.write_untrained(own)
        self._copies.hide()
        self._shown = self._digests_of_untrained()
        if watches:
            self._shown |= self._digests_of_parameters()

    def rewritten(self) -> dict[str, int]:
        """Returns, by name, a digest of each shown parameter that code has since overwritten."""
        if self._stash is None:
            return {}
        digests = self._digests_of_parameters()
        return {name: value for name, value in digests.items() if value != self._shown[name]}

    @torch.no_grad()
    def show_local(self) -> None:
        """Restores the local values, except for untrained state that code has overwritten in the
        meantime.
        """
        if self._stash is None:
            return
        digests = self._digests_of_untrained()
        untrained = dict(self._stash.untrained)
        rewritten = {name for name in untrained if digests.get(name) != self._shown.get(name)}
        for name in rewritten:
            del untrained[name]
        self.load_local(self._stash._replace(untrained=untrained))
        for fragment in self._fragments:
            fragment.untrained.note_rewritten(rewritten)
        self._stash = None
        self._copies.show()
        self._renew_copies(self._kept)
        self._kept = set()

    @torch.no_grad()
    def keep(self, names: Collection[str]) -> None:
        """Makes the current values of some parameters the new local values, even while the outer
        model is shown.
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
        """Makes the current values of exchanged untrained state the new local values."""
        if self._stash is not None:
            for fragment in self._fragments:
                for name in fragment.untrained.names:
                    self._stash.untrained.pop(name, None)

    def _renew_copies(self, names: Collection[str]) -> None:
        """Updates the inner optimizers' copies of some parameters."""
        for fragment in self._fragments:
            fragment.layout.renew_copies(names)

    def _digests_of_parameters(self) -> dict[str, int]:
        digests = dict[str, int]()
        for fragment in self._fragments:
            for name, parameter in zip(fragment.layout.names, fragment.layout.held, strict=True):
                digests[name] = digest(parameter)
        return digests

    def _digests_of_untrained(self) -> dict[str, int]:
        """Returns digests of the current values of all untrained state that has been set aside."""
        assert self._stash is not None, "another model is shown"
        return {place.name: digest(place.values) for place in self._places(self._stash.untrained)}

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Restores the local values inside a ``with`` block and then shows the previous values
        again.
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
        """Overwrites the local values with the outer values, permanently if ``stays`` is True.
        In-group collective.
        """
        reshard(self._model)
        for fragment in self._fragments:
            fragment.write_outer(self._in_group, stays=stays)

    def begin_end(self, *, keeps_parameters: bool) -> None:
        """Stores the untrained state for a longer run and, if ``keeps_parameters`` is True, the
        local parameters.
        """
        self._kept_untrained = self._local_untrained()
        if keeps_parameters:
            for fragment in self._fragments:
                fragment.keep_local()

    @torch.no_grad()
    def end(self, *, is_written: bool) -> None:
        """Makes the outer values in the model permanent. Unless ``is_written`` is True, they are
        written first. In-group collective.
        """
        reshard(self._model)
        if not is_written:
            for fragment in self._fragments:
                fragment.end(fragment.write_outer(self._in_group), fragment.outer.values)
        self._copies.end()
        self.has_ended = True

    @torch.no_grad()
    def keep_outer(self) -> None:
        """Copies the outer parameters for `named`, because the model may change after training has
        ended.

        The copy needs 4 bytes for each value that this rank stores with at least float32 precision.
        """
        for fragment in self._fragments:
            if fragment.final is None:
                fragment.final = fragment.layout.copied().to("cpu")

    @torch.no_grad()
    def named(self, mean: GroupMean | None = None) -> dict[str, Tensor]:
        """Returns a host copy of the outer parameters by name, in the shapes of the parameters."""
        named: dict[str, Tensor] = {}
        for index, fragment in enumerate(self._fragments):
            if mean is not None:
                named |= fragment.named_mean(mean.gathered[index], self._in_group)
            elif self.has_ended:
                named |= fragment.named_at_end(self._in_group)
            elif self._in_group.size == 1:
                named |= fragment.named(fragment.outer.values, self._in_group)
            else:
                named |= fragment.named(fragment.gathered(self._in_group), self._in_group)
        return named

    def local_values(self) -> dict[str, Any]:
        """Returns `LocalValues` on the host as a plain dictionary, which must not be modified."""
        parameters = list[Tensor]()
        if self._stash is None:
            reshard(self._model)
            for fragment in self._fragments:
                parameters += fragment.local_values()
            return {"parameters": parameters, "untrained": self._local_untrained()}
        # Values that are set aside are never modified.
        parameters += [tensor.to("cpu") for tensor in self._stash.parameters]
        untrained = {place.name: place.values.to("cpu", copy=True) for place in self._changed_own()}
        untrained |= {name: tensor.to("cpu") for name, tensor in self._stash.untrained.items()}
        return {"parameters": parameters, "untrained": untrained}

    def _local_untrained(self) -> dict[str, Tensor]:
        """Copies this rank's untrained state. After training has ended, returns the state from
        before the end.
        """
        if self._kept_untrained is not None:
            return self._kept_untrained
        places = [*self._changed_own(), *self._overwritten_places()]
        return {place.name: place.values.to("cpu", copy=True) for place in places}

    def _changed_own(self) -> list[Place]:
        """Returns the places of all frozen parameters that code has changed."""
        changed = list[Place]()
        for fragment in self._fragments:
            changed += fragment.untrained.own.changed()
        return [place for place in changed if place.is_parameter]

    @torch.no_grad()
    def load_local(self, values: LocalValues) -> None:
        """Overwrites the local values with the given values."""
        for parameter, saved in zip(self._parameters(), values.parameters, strict=True):
            parameter.copy_(saved)
        self.write_untrained(values.untrained)

    def _parameters(self) -> list[Tensor]:
        reshard(self._model)
        return [parameter for fragment in self._fragments for parameter in fragment.layout.held]

    def _overwritten_places(self) -> list[Place]:
        """Returns the places of all buffers and of all exchanged frozen parameters."""
        places = buffer_places(self._model)
        for fragment in self._fragments:
            places += fragment.untrained.frozen_places
        return places

    def _places(self, names: Mapping[str, Any]) -> list[Place]:
        """Returns the places of the untrained state with the given names."""
        places = list[Place]()
        for fragment in self._fragments:
            places += fragment.untrained.own.places
        places += self._overwritten_places()
        by_name = {place.name: place for place in places}
        return [by_name[name] for name in names if name in by_name]

    def _put_aside(self, shown: Mapping[str, Tensor]) -> LocalValues:
        """Copies all values that will be overwritten, and also all buffers, because a forward pass
        may change them.
        """
        parameters = [self._storage.store_copy(parameter) for parameter in self._parameters()]
        untrained = dict[str, Tensor]()
        for place in (*self._overwritten_places(), *self._places(shown)):
            if place.name not in untrained:
                untrained[place.name] = self._storage.store_copy(place.values)
        return LocalValues(parameters, untrained)

    def first_own(self) -> dict[str, Tensor]:
        """Returns the first group's own untrained state by name, wherever it differs from this
        rank's.

        All ranks must call this method. If every group passes the result to `show`, all groups show
        the same untrained state.
        """
        states = [fragment.untrained for fragment in self._fragments]
        values = first_own(states, self._topology)
        for state in states:
            values.update(state.own.shown_of_first())
        return values

    @torch.no_grad()
    def write_untrained(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites the untrained state with the given names."""
        for place in self._places(values):
            place.write(values[place.name])
