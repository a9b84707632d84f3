"""A model that is divided into fragments, with the fragments' records and the view of the outer
model.
"""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.fragments import FragmentState, fragments_of
from lightning_sdiloco.engine.inner_optimizers import InnerOptimizers, on_all_ranks
from lightning_sdiloco.engine.outer import OuterStorage, ShardOptimizer
from lightning_sdiloco.engine.outer_view import OuterView
from lightning_sdiloco.engine.recut import Recut, follow_in_optimizers, say_what_is_cut_again
from lightning_sdiloco.engine.shards import (
    CutModel,
    digest,
    is_sharded,
    local,
    trainable,
)
from lightning_sdiloco.engine.start import (
    broadcast,
    cut,
    named_outer,
    require_same_model,
    start_from,
)
from lightning_sdiloco.memory import SparePages

# The number of bytes per value in a flight that is waiting to land, for the outer gradient, the
# outer parameters and the momentum.
_KEPT_BYTES = 12


class FragmentedModel:
    """A model and the records of its fragments. The model can be divided into fragments again after
    it has changed.

    Attributes:
        model: The model that the inner optimizers train.
        storage: The storage of the outer state.
        inner: The inner optimizers.
        partition: The model's fragments. Set by `cut`, together with ``cut_model`` and ``view``.
        fragments: The record of each fragment.
        cut_model: The model's parameters and modules as they were when it was divided.
        view: The view of the outer model.
        recut: The new fragments that the groups are about to agree on.
    """

    partition: tuple[Fragment, ...]
    cut_model: CutModel
    view: OuterView

    def __init__(
        self,
        model: nn.Module,
        partition: Sequence[Fragment],
        settings: Settings,
        topology: Topology,
        storage: OuterStorage,
        inner: InnerOptimizers,
    ) -> None:
        self.model = model
        self.storage = storage
        self.inner = inner
        self.fragments: list[FragmentState] = []
        self.recut: Recut | None = None
        # Keeps the memory of a landed flight so that the next flight can reuse it.
        self._spare: SparePages | None = None
        self._topology = topology
        self.cut(partition, settings)

    def cut(self, partition: Sequence[Fragment], settings: Settings) -> None:
        """Divides the current model into the given fragments and makes it the outer model."""
        self.partition = tuple(partition)
        self.fragments = fragments_of(
            self.model, partition, settings, self._topology, self.storage, self.fragments
        )
        longest = max(fragment.layout.length for fragment in self.fragments)
        is_on_host = self.storage.device.type == "cpu"
        self._spare = SparePages(_KEPT_BYTES * longest) if is_on_host else None
        self.cut_model = CutModel(self.model)
        self._watch_copies()

    def free_spare_memory(self) -> None:
        """Frees the memory kept for flights, because there will be no more flights."""
        self._spare = None

    def use_optimizers(self, inner_optimizers: Sequence[Optimizer]) -> None:
        """Replaces the inner optimizers. The new ones may keep different copies of the weights."""
        if list(inner_optimizers) != list(self.inner.optimizers):
            self.inner = InnerOptimizers(inner_optimizers)
            self._watch_copies()

    def _watch_copies(self) -> None:
        copies = self.inner.copies
        copies.watch(trainable(self.model))
        copies_of = copies.of if copies.exist else None
        for fragment in self.fragments:
            fragment.layout.copies_of = copies_of
        self.view = OuterView(self.model, self.fragments, self._topology, self.storage, copies)

    @property
    def outer_optimizer(self) -> ShardOptimizer:
        """The optimizer that steps the shards of all fragments."""
        return self.fragments[0].optimizer

    @property
    def outer_steps(self) -> int:
        """The number of outer steps that the first fragment has taken. A dense beginning counts as
        one step.
        """
        return self.fragments[0].outer.rounds

    def local_digests(self) -> dict[str, int]:
        """Returns, by name, a digest of this rank's part of each parameter."""
        digests: dict[str, int] = {}
        for fragment in self.fragments:
            layout = fragment.layout
            for name, parameter in zip(layout.names, layout.parameters, strict=True):
                # A parameter that was reshaped after the division counts as a different parameter.
                if self.cut_model.former_name(parameter) is not None:
                    digests[name] = digest(local(parameter))
        return digests

    def recover(self, landed: int, *, is_ending: bool = False) -> None:
        """Replaces this group's non-finite values with outer values after a landing. In-group
        collective.
        """
        self.cut_model.reshard()
        in_group = self._topology.in_group
        is_finite = on_all_ranks([f.layout.is_finite() for f in self.fragments], in_group)
        for fragment in self.fragments:
            if fragment.index == landed:
                fragment.untrained.recover()
                self.inner.recover(fragment.layout.parameters, in_group)
            elif not is_finite[fragment.index]:
                if is_ending:
                    fragment.keep_local()
                fragment.write_outer(in_group, stays=True)
                self.inner.recover(fragment.layout.parameters, in_group)

    # Dividing the model into fragments again

    def cut_for_recut(self, settings: Settings) -> tuple[Fragment, ...]:
        """Divides the current model and detaches the previous fragments from tensors that have been
        removed. Refuses models that cannot be divided again.
        """
        if self.view.is_shown:
            raise RuntimeError(
                "recut() was called while the outer model was shown. Call recut() outside"
                " evaluate()."
            )
        if not settings.shares:
            raise ValueError(
                "Parameters have been frozen, unfrozen or replaced since training began. This is"
                f" not possible with route={settings.route!r}, because groups have different outer"
                " parameters and frozen parameters would remain different. Choose the trainable"
                " parameters before training, or train in multiple fits."
            )
        for fragment in self.fragments:
            if any(map(is_sharded, fragment.layout.parameters)):
                raise ValueError(
                    "Parameters have been frozen, unfrozen or replaced since training began. This"
                    " is not possible with FSDP2, which would not train new parameters. Choose the"
                    " trainable parameters in configure_model, or train in multiple fits."
                )
        require_same_model(self.model, self._topology.world)
        partition = cut(self.model, settings).fragments
        self.cut_model.require_devices()
        for fragment in self.fragments:
            fragment.let_go()
        return partition

    def begin_recut(self, partition: tuple[Fragment, ...], settings: Settings) -> None:
        """Assigns the outer state to this rank's new fragments while no flights are in progress.
        In-group collective.
        """
        self.cut_model.reshard()
        outer = named_outer(self.fragments, self._topology.in_group)
        self.recut = Recut.of(self.cut_model, partition, self.fragments, outer, settings)

    def end_recut(self, recut: Recut, settings: Settings) -> None:
        """Adopts the new fragments that all ranks have agreed on, and keeps the outer state of the
        remaining tensors. In-group collective.

        If the fragments are the same, for example because a submodule was replaced with a copy,
        each fragment with unchanged parameters keeps its error feedback.
        """
        frozen = {name: parameter.values for name, parameter in recut.frozen.items()}
        for fragment in self.fragments:
            fragment.layout.write_named(frozen)
        for tensor in recut.new.values():
            broadcast(tensor, self._topology)
        is_first_rank = self._topology.rank == 0
        before = self.fragments
        restarts = recut.fragments != self.partition
        if is_first_rank:
            say_what_is_cut_again(recut, self.cut_model, restarts=restarts)
        self.inner.copies.renew(recut.new)
        optimizers = self.inner.optimizers
        follow_in_optimizers(recut, self.cut_model, optimizers, says=is_first_rank)
        self.recut = None
        self.cut(recut.fragments, settings)
        for fragment in self.fragments:
            fragment.untrained.expect_unlike({*recut.known, *recut.new, *recut.frozen})
        start_from(self.fragments, recut.outer, self._topology.in_group)
        if restarts:
            return
        for fragment, former in zip(self.fragments, before, strict=True):
            fragment.weight = former.weight
            parameters = zip(fragment.layout.parameters, former.layout.parameters, strict=True)
            if all(parameter is former_parameter for parameter, former_parameter in parameters):
                fragment.memory = former.memory
                fragment.tuning = former.tuning
                fragment.residual = former.residual
