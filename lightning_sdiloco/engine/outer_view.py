"""The outer view: the outer model, or a mean of the groups, instead of the local one.

[Note: a copy is put aside] While the outer model is shown, the local values rest in a separate copy, on the host if
outer state does. Two ways would need no copy, and neither can be had:

- Exchange the contents: the local values rest in the memory of the outer ones meanwhile. But a tensor of the outer
  state is never written to. The background reads it for a flight that launched before the validation, a checkpoint
  that another thread still writes has it, and so has one that is saved while the outer model is shown.
- Let the parameters refer to the outer values. But whoever holds the memory of a parameter would go on with the local
  one: flattened and tied weights, a compiled or captured graph, an optimizer that keeps views. And what swaps weights
  for the time of a validation, such as an average, writes into the model that it finds, and so into the outer state.
  With sharded or bfloat16 parameters, or with outer state on the host, there is nothing to refer to.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.outer import OuterStorage
from lightning_sdiloco.engine.shards import local, reshard


class GroupMean(NamedTuple):
    """Holds the plain mean, over the groups, of what each group holds; see `StreamingDiLoCo.group_mean`."""

    gathered: list[Tensor]
    buffers: Sequence[Mapping[int, Tensor]]


class OuterView:
    """Shows outer parameters and buffers in the model, and puts the local ones back."""

    def __init__(
        self, model: nn.Module, fragments: Sequence[FragmentState], in_group: Communicator, storage: OuterStorage
    ) -> None:
        self._model = model
        self._fragments = fragments
        self._in_group = in_group
        self._storage = storage
        self._stash: list[Tensor] | None = None
        self.final: list[Tensor] | None = None

    @contextmanager
    def shown(self, mean: GroupMean | None = None) -> Iterator[None]:
        """Shows a model in a ``with`` block; the outermost of nested blocks chooses, and restores the local one."""
        shown_before = self._stash is not None
        self.show(mean)
        try:
            yield
        finally:
            if not shown_before:
                self.show_local()

    @torch.no_grad()
    def show(self, mean: GroupMean | None = None) -> None:
        """Puts the local values aside, and a mean into the model or, in-group collective, the outer values."""
        if self._stash is None and self.final is None:
            self._stash = [self._storage.store_copy(tensor) for tensor in self._tensors()]
            if mean is None:
                self.write_outer()
            else:
                for fragment, gathered, buffers in zip(self._fragments, *mean, strict=True):
                    fragment.write(gathered, buffers)

    @torch.no_grad()
    def show_local(self) -> None:
        if self._stash is not None:
            self.load_local(self._stash)
            self._stash = None

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Puts the local values back inside a ``with`` block, if something else is shown, and then that again."""
        if self._stash is None:
            yield
            return
        shown = [tensor.detach().clone() for tensor in self._tensors()]
        self.load_local(self._stash)
        try:
            yield
        finally:
            self.load_local(shown)

    @torch.no_grad()
    def write_outer(self) -> None:
        """Overwrites the local values with the outer ones, one fragment after the other. In-group collective."""
        reshard(self._model)
        for fragment in self._fragments:
            fragment.write_outer(self._in_group)

    @torch.no_grad()
    def end(self) -> None:
        reshard(self._model)
        self.final = []
        for fragment in self._fragments:
            gathered = fragment.write_outer(self._in_group)
            # A gathered copy is kept on the host; what this rank holds anyway costs nothing.
            self.final.append(fragment.outer.values if self._in_group.size == 1 else gathered.cpu())

    @torch.no_grad()
    def named(self, mean: GroupMean | None = None) -> dict[str, Tensor]:
        """Copies the outer parameters to the host, by name, in the parameters' shapes."""
        named: dict[str, Tensor] = {}
        for index, fragment in enumerate(self._fragments):
            if mean is not None:
                named |= fragment.named_mean(mean.gathered[index], self._in_group)
                continue
            if self.final is not None:
                gathered = self.final[index]
            elif self._in_group.size == 1:
                gathered = fragment.outer.values
            else:
                gathered = fragment.gathered(self._in_group)
            named |= fragment.named(gathered, self._in_group)
        return named

    def local_values(self) -> list[Tensor]:
        """Returns all that differs between groups in the model itself, on the host. Write to none of it."""
        if self._stash is not None:
            # What has been put aside is not written to.
            return [tensor.cpu() for tensor in self._stash]
        return [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]

    @torch.no_grad()
    def load_local(self, values: Sequence[Tensor]) -> None:
        """Overwrites the local values with others, in the order of `local_values`."""
        for tensor, own in zip(self._tensors(), values, strict=True):
            tensor.copy_(own)

    def _tensors(self) -> list[Tensor]:
        """Returns the local parameters and buffers; buffers that do not travel are among them."""
        reshard(self._model)
        parameters = [parameter for fragment in self._fragments for parameter in fragment.layout.held]
        return [*parameters, *map(local, self._model.buffers())]
