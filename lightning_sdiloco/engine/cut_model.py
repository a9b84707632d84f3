"""A model cut into fragments, with the outer state of this rank's shards: the training thread's side of the engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.offload import Coming, Home
from lightning_sdiloco.engine.outer.optimizer import Outer, Stepped
from lightning_sdiloco.engine.parameters.layouts import (
    BufferLayout,
    ShardedLayout,
    buffers_of,
    drop_state,
    layouts_of,
    trainable,
    with_finite_state,
)
from lightning_sdiloco.engine.parameters.resharding import OuterParameter
from lightning_sdiloco.engine.parameters.sharding import is_sharded, local, reshard
from lightning_sdiloco.errors import AgreementError


class CutModel:
    """Takes the model as it is for the outer one, cut into fragments.

    Args:
        model: The model.
        fragments: Its fragments.
        settings: What makes the outer optimizer.
        topology: The ranks of this group.
        home: Where outer state rests.
    """

    def __init__(
        self, model: nn.Module, fragments: Sequence[Fragment], settings: Settings, topology: Topology, home: Home
    ) -> None:
        self.model = model
        self.fragments = tuple(fragments)
        self._topology = topology
        parameters = trainable(model)
        self.layouts = layouts_of(fragments, parameters, topology)
        self.buffers = [BufferLayout(buffers) for buffers in buffers_of(model, fragments)]
        self._home = home
        shards = [home.kept(layout.read()) for layout in self.layouts]
        self.outer = Outer(shards, settings.make_outer_optimizer, settings.outer_lr_schedule, home)
        self._coming: dict[int, Coming] = {}
        # What the compression remembers of this rank's shards. Tensors are replaced, never written to.
        self.memories: list[Tensor | None] = [None] * len(shards)
        # What the second rounding of the mean has lost of the parts of them that this group adds up.
        self.residuals: list[Tensor | None] = [None] * len(shards)

    def align_ranks(self) -> None:
        """Lets ranks of the group that hold the same values of sharded parameters start from the same."""
        reshard(self.model)
        for fragment, layout in enumerate(self.layouts):
            if isinstance(layout, ShardedLayout):
                layout.write(self._gathered(fragment))

    # What is trainable

    def has_other_parameters(self) -> bool:
        """Whether parameters were frozen or became trainable since the model was cut."""
        return set(trainable(self.model)) != {name for layout in self.layouts for name in layout.names}

    def require_whole_parameters(self) -> None:
        """Raises a `ValueError` if parameters are sharded."""
        if any(is_sharded(parameter) for layout in self.layouts for parameter in layout.keys):
            raise ValueError(
                "Parameters were frozen or became trainable since training began. FSDP2 does not follow: what became"
                " trainable would not be trained. Choose what is trainable in configure_model, and train in several"
                " fits."
            )

    def require_coverage(self) -> None:
        """Raises an `AgreementError` if a trainable parameter is in no fragment."""
        known = {id(parameter) for layout in self.layouts for parameter in layout.keys}
        new = [name for name, parameter in trainable(self.model).items() if id(parameter) not in known]
        if new:
            raise AgreementError(
                f"{len(new)} parameters have become trainable, such as {new[0]!r}: they are in no fragment, and every"
                " group would train its own. With Lightning, change what is trainable between epochs, at the latest in"
                " on_train_epoch_start; in a loop of your own call recut() after it, in all ranks."
            )

    # Launch and landing

    def prefetch(self, fragment: int) -> None:
        """Starts to bring the outer parameters of a fragment to the device, which is about to be launched."""
        self._coming[fragment] = self._home.coming(self.outer.values[fragment])

    def outer_shard(self, fragment: int) -> Tensor:
        """The outer parameters of this rank's shard, on the device."""
        if fragment not in self._coming:
            self.prefetch(fragment)
        return self._coming.pop(fragment).arrived()

    def outer_gradient(self, fragment: int, outer: Tensor) -> Tensor:
        """The outer gradient of this rank's shard: outer parameters minus local ones.

        Args:
            fragment: The fragment.
            outer: Its `outer_shard`.
        """
        return self.layouts[fragment].subtracted_from(outer)

    def write(self, fragment: int, gathered: Tensor, mixing: float) -> None:
        """Mixes the outer parameters of a fragment into the local ones."""
        reshard(self.model)
        self.layouts[fragment].write(gathered, mixing)

    def recover(self, landed: int, inner_optimizers: Sequence[Optimizer]) -> None:
        """Takes the outer values wherever local ones are not finite. In-group collective.

        Values that are not finite spread over the whole model within one inner step, so the fragment that landed would
        not stay finite if the others were left as they are.

        Args:
            landed: The fragment that has just landed and holds outer values.
            inner_optimizers: Their state is reset where it is not finite.
        """
        reshard(self.model)
        # All ranks of the group do the same, also where they hold different parts.
        finite = self._on_all_ranks([layout.is_finite() for layout in self.layouts])
        for fragment, layout in enumerate(self.layouts):
            if fragment == landed or not finite[fragment]:
                if fragment != landed:
                    layout.write(self._gathered(fragment))
                self.buffers[fragment].mix(0.0, self.buffers[fragment].all())
                kept = self._on_all_ranks(with_finite_state(inner_optimizers, layout.keys))
                drop_state(inner_optimizers, [key for key, keep in zip(layout.keys, kept, strict=True) if not keep])

    def _on_all_ranks(self, facts: list[bool]) -> list[bool]:
        """What holds on all ranks of the group."""
        return [all(ranks) for ranks in zip(*self._topology.in_group.all_gather_object(facts), strict=True)]

    # The outer model

    def gathered(self) -> Iterator[Tensor]:
        """The outer parameters of every fragment, flat, as far as this rank holds them. In-group collective."""
        return (self._gathered(fragment) for fragment in range(len(self.fragments)))

    @torch.no_grad()
    def write_outer(self) -> None:
        """Leaves the outer parameters and buffers in the model, one fragment after the other. In-group collective."""
        reshard(self.model)
        for fragment in range(len(self.fragments)):
            self._write_outer(fragment)

    @torch.no_grad()
    def end(self) -> list[Tensor]:
        """Leaves them in the model for good. In-group collective.

        Returns:
            What `gathered` gives. A gathered copy is kept on the host; what this rank holds anyway costs nothing.
        """
        reshard(self.model)
        alone = self._topology.group_size == 1
        written = (self._write_outer(fragment) for fragment in range(len(self.fragments)))
        return [kept if alone else values.cpu() for kept, values in zip(self.outer.values, written, strict=True)]

    def _write_outer(self, fragment: int) -> Tensor:
        values, buffers = self._gathered(fragment), self.buffers[fragment]
        self.layouts[fragment].write(values)
        buffers.mix(0.0, buffers.all())
        return values

    @torch.no_grad()
    def named(self, gathered: Iterable[Tensor]) -> dict[str, Tensor]:
        """Outer parameters by name, copied to the host, in the parameters' shapes.

        In-group collective where ranks hold parts of them.
        """
        named: dict[str, Tensor] = {}
        for fragment, (layout, values) in enumerate(zip(self.layouts, gathered, strict=True)):
            shard = self._home.fetched(self.outer.values[fragment])
            named |= layout.whole(values, shard, self._topology.in_group)
        return named

    def local_tensors(self) -> list[Tensor]:
        """All that differs between groups in the model itself; buffers that do not travel are among it."""
        reshard(self.model)
        return [*(p for layout in self.layouts for p in layout.parameters), *map(local, self.model.buffers())]

    # By name, for other fragments and shards

    def outer_parameters(self) -> dict[str, OuterParameter]:
        """Outer parameters and outer optimizer state by name, whole. In-group collective."""
        parameters: dict[str, OuterParameter] = {}
        for fragment, layout in enumerate(self.layouts):
            saved = self._topology.in_group.all_gather_object(self.outer.saved(fragment))
            shards = [Stepped(shard["outer"], shard["state"], shard["rounds"]) for shard in saved]
            parameters |= layout.taken_apart(shards)
        return parameters

    def outer_buffers(self) -> dict[str, Tensor]:
        """Outer buffers by name."""
        return {name: values for layout in self.buffers for name, values in layout.by_name().items()}

    @torch.no_grad()
    def write_some(self, parameters: Mapping[str, OuterParameter]) -> None:
        """Overwrites some local parameters by name with outer values."""
        for layout in self.layouts:
            layout.write_some({name: parameter.values for name, parameter in parameters.items()})

    @torch.no_grad()
    def start_from(self, parameters: Mapping[str, OuterParameter], buffers: Mapping[str, Tensor]) -> None:
        """Takes outer state by name. What is not named keeps its value, and starts without momentum."""
        # All fragments of a round see the same learning rate, also those that are new.
        rounds = max((parameter.rounds for parameter in parameters.values()), default=0)
        for fragment, layout in enumerate(self.layouts):
            whole = self._unless_known(fragment, parameters)
            known = [parameters.get(name) or OuterParameter(whole[name].flatten(), {}, rounds) for name in layout.names]
            shard = layout.put_together(known)
            self.outer.load(fragment, shard.values, shard.state, shard.rounds)
            self.buffers[fragment].start_from(buffers)

    # State

    def saved(self, fragment: int) -> dict[str, Any]:
        """The outer state of a fragment as plain values and tensors on the host."""
        layout = self.layouts[fragment]
        return {
            "memory": _on_host(self.memories[fragment]),
            "residual": _on_host(self.residuals[fragment]),
            **layout.described(),
            **self.outer.saved(fragment),
            **self.buffers[fragment].saved(),
        }

    def load(self, fragment: int, saved: Mapping[str, Any]) -> None:
        """Takes back what `saved` returned."""
        self._coming.clear()
        self.outer.load(fragment, saved["outer"], saved["state"], saved["rounds"])
        self.buffers[fragment].load(saved["buffers"], saved["travelling"])
        for kept, values in ((self.memories, saved["memory"]), (self.residuals, saved["residual"])):
            kept[fragment] = None if values is None else self._home.copied(values)

    def _unless_known(self, fragment: int, parameters: Mapping[str, OuterParameter]) -> dict[str, Tensor]:
        """The local parameters of a fragment by name, whole, if not all of them are known. In-group collective."""
        layout = self.layouts[fragment]
        if all(name in parameters for name in layout.names):
            return {}
        shard, group = layout.read(), self._topology.in_group
        return layout.whole(layout.gathered(shard, group), shard, group)

    def _gathered(self, fragment: int) -> Tensor:
        outer = self._home.fetched(self.outer.values[fragment])
        return self.layouts[fragment].gathered(outer, self._topology.in_group)


def _on_host(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to("cpu")
