"""A model cut into fragments, with the outer state of this rank's shards: the training thread's side of the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.fragments import BufferLayout, FragmentLayout, buffers_of, reset_non_finite_state, trainable
from lightning_sdiloco.outer import Outer, Stepped
from lightning_sdiloco.partition import Fragment
from lightning_sdiloco.portable import OuterParameter, put_together, taken_apart
from lightning_sdiloco.settings import Settings
from lightning_sdiloco.topology import Topology


class CutModel:
    """Takes the model as it is for the outer one, cut into fragments.

    Args:
        model: The model.
        fragments: Its fragments.
        settings: What makes the outer optimizer.
        topology: The ranks of this group.
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Fragment], settings: Settings, topology: Topology) -> None:
        self.model = model
        self.fragments = tuple(fragments)
        self._topology = topology
        parameters = trainable(model)
        self._layouts = [FragmentLayout(f.names, [parameters[name] for name in f.names]) for f in fragments]
        self.buffers = [BufferLayout(buffers) for buffers in buffers_of(model, fragments)]
        shards = [layout.read(*self._shard(layout)) for layout in self._layouts]
        self.outer = Outer(shards, settings.make_outer_optimizer, settings.outer_lr_schedule)
        # What the compression remembers of this rank's shards. Tensors are replaced, never written to.
        self.memories: list[Tensor | None] = [None] * len(shards)
        # What the second rounding of the mean has lost of the parts of them that this group adds up.
        self.residuals: list[Tensor | None] = [None] * len(shards)

    # What is trainable

    def has_other_parameters(self) -> bool:
        """Whether parameters were frozen or became trainable since the model was cut."""
        return set(trainable(self.model)) != {name for layout in self._layouts for name in layout.names}

    def require_coverage(self) -> None:
        """Raises an `AgreementError` if a trainable parameter is in no fragment."""
        known = {id(parameter) for layout in self._layouts for parameter in layout.keys}
        new = [name for name, parameter in trainable(self.model).items() if id(parameter) not in known]
        if new:
            raise AgreementError(
                f"{len(new)} parameters have become trainable, such as {new[0]!r}: they are in no fragment, and every"
                " group would train its own. With Lightning, change what is trainable between epochs, at the latest in"
                " on_train_epoch_start; in a loop of your own call recut() after it, in all ranks."
            )

    # Launch and landing

    def outer_gradient(self, fragment: int) -> Tensor:
        """The outer gradient of this rank's shard: outer parameters minus local ones."""
        layout = self._layouts[fragment]
        local = layout.read(*self._shard(layout))
        return torch.sub(self.outer.values[fragment], local, out=local)

    def write(self, fragment: int, whole: Tensor, mixing: float) -> None:
        """Mixes the outer parameters of a whole fragment into the local ones."""
        self._layouts[fragment].write(whole, mixing)

    def recover(self, landed: int, inner_optimizers: Sequence[Optimizer]) -> None:
        """Takes the outer values wherever local ones are not finite. In-group collective.

        Values that are not finite spread over the whole model within one inner step, so the fragment that landed would
        not stay finite if the others were left as they are.

        Args:
            landed: The fragment that has just landed and holds outer values.
            inner_optimizers: Their state is reset where it is not finite.
        """
        for fragment, layout in enumerate(self._layouts):
            if fragment == landed or not layout.is_finite():
                if fragment != landed:
                    layout.write(self._whole(fragment))
                self.buffers[fragment].mix(0.0, self.buffers[fragment].all())
                reset_non_finite_state(inner_optimizers, layout.keys)

    # The outer model

    def wholes(self) -> list[Tensor]:
        """The outer parameters of every fragment, whole, flat. In-group collective."""
        return [self._whole(fragment) for fragment in range(len(self.fragments))]

    @torch.no_grad()
    def write_outer(self, wholes: Sequence[Tensor]) -> None:
        """Leaves the outer parameters and buffers in the model."""
        for layout, buffers, whole in zip(self._layouts, self.buffers, wholes, strict=True):
            layout.write(whole)
            buffers.mix(0.0, buffers.all())

    def named(self, wholes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Outer parameters by name, copied to the host, in the parameters' shapes."""
        return {
            name: values.to("cpu", copy=True)
            for layout, whole in zip(self._layouts, wholes, strict=True)
            for name, values in zip(layout.names, layout.split(whole), strict=True)
        }

    def local_tensors(self) -> list[Tensor]:
        """All that differs between groups in the model itself; buffers that do not travel are among it."""
        return [*(p for layout in self._layouts for p in layout.parameters), *self.model.buffers()]

    # By name, for other fragments and shards

    def outer_parameters(self) -> dict[str, OuterParameter]:
        """Outer parameters and outer optimizer state by name, whole. In-group collective."""
        parameters: dict[str, OuterParameter] = {}
        for fragment, layout in enumerate(self._layouts):
            saved = self._topology.in_group.gather_objects(self.outer.saved(fragment))
            shards = [Stepped(shard["outer"], shard["state"], shard["rounds"]) for shard in saved]
            parameters |= taken_apart(layout.sizes, shards)
        return parameters

    def outer_buffers(self) -> dict[str, Tensor]:
        """Outer buffers by name."""
        return {name: values for layout in self.buffers for name, values in layout.by_name().items()}

    @torch.no_grad()
    def write_some(self, parameters: Mapping[str, OuterParameter]) -> None:
        """Overwrites some local parameters by name with outer values."""
        for layout in self._layouts:
            layout.write_some({name: parameter.values for name, parameter in parameters.items()})

    @torch.no_grad()
    def start_from(self, parameters: Mapping[str, OuterParameter], buffers: Mapping[str, Tensor]) -> None:
        """Takes outer state by name. What is not named keeps its value, and starts without momentum."""
        # All fragments of a round see the same learning rate, also those that are new.
        rounds = max((parameter.rounds for parameter in parameters.values()), default=0)
        for fragment, layout in enumerate(self._layouts):
            known = [
                parameters.get(name) or OuterParameter(own.flatten().to("cpu", torch.float32, copy=True), {}, rounds)
                for name, own in zip(layout.names, layout.parameters, strict=True)
            ]
            shard = put_together(known, *self._shard(layout))
            self.outer.load(fragment, shard.values, shard.state, shard.rounds)
            self.buffers[fragment].start_from(buffers)

    # State

    def saved(self, fragment: int) -> dict[str, Any]:
        """The outer state of a fragment as plain values and tensors on the host."""
        layout = self._layouts[fragment]
        return {
            "memory": _on_host(self.memories[fragment]),
            "residual": _on_host(self.residuals[fragment]),
            "names": list(layout.names),
            "sizes": list(layout.sizes.values()),
            **self.outer.saved(fragment),
            **self.buffers[fragment].saved(),
        }

    def load(self, fragment: int, saved: Mapping[str, Any]) -> None:
        """Takes back what `saved` returned."""
        self.outer.load(fragment, saved["outer"], saved["state"], saved["rounds"])
        self.buffers[fragment].load(saved["buffers"], saved["travelling"])
        device = self.outer.values[fragment].device
        for kept, values in ((self.memories, saved["memory"]), (self.residuals, saved["residual"])):
            kept[fragment] = None if values is None else values.to(device, copy=True)

    def _shard(self, layout: FragmentLayout) -> tuple[int, int]:
        """Start and length of this rank's shard. All shards have the same length; zeros fill up the last."""
        length = -(-layout.numel // self._topology.shards)
        return self._topology.shard * length, length

    def _whole(self, fragment: int) -> Tensor:
        shards = self._topology.in_group.gather(self.outer.values[fragment])
        return shards[0] if len(shards) == 1 else torch.cat(shards)


def _on_host(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to("cpu")
