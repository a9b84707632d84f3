"""The state of a fragment: all that a rank holds of it, in one record.

[Note: fragment tensors] A rank holds these tensors of every fragment. ``length`` is the number of values in its shard,
``part`` that of the stretch of the shard which its group averages (with one hop the whole shard), and *storage* is the
device of the model or, offloaded, page-locked memory of the host. All are flat and float32 unless it says so.

=================  ===========  ==========  ============================================================================
tensor             shape        where       what it holds, and who writes it
=================  ===========  ==========  ============================================================================
parameters         their own    device      Local parameters, in the model, of any floating dtype. The inner optimizer
                                            and landings write to them; so does `OuterView`, which shows the outer ones.
buffers            their own    device      Local buffers, in the model, of any floating dtype. Written by the forward
                                            pass and by landings.
outer.values       (length,)    storage     Outer parameters of the shard: bitwise equal in all groups.
outer.state        (length,)    storage     State of the outer optimizer. What is not elementwise, such as a count of
                                            steps, has a shape and dtype of its own, and is where torch wants it.
buffers.outer      their own    device      Outer buffers, float32; bitwise equal in all groups.
memory             (length,)    storage     Error feedback: what the compression left out of earlier payloads; None
                                            until there is some. Each group has its own.
tuning             (1+blocks,)  storage     What the compression takes over from earlier launches besides, such as
                                            thresholds; None until there is some. Each group has its own.
residual           (part,)      storage     What the second rounding of the mean lost, with two hops; None until there
                                            is some. Each group has its own.
anchor             (length,)    storage     On a route that does not share (see [Note: gossip]), the outer parameters
                                            with which the rounds began, bitwise equal in all groups. There
                                            ``outer.values`` are each group's own.
twin               (length,)    storage     The second vector of a route's momentum; None while it is ``outer.values``.
prefetched         (length,)    device      ``outer.values`` on their way to the device, for the next launch.
gathered           (held,)      device      Outer parameters after the outer step, as far as this rank holds the
                                            fragment: the shards of its group. Made by the background, mixed into the
                                            parameters by the landing, then dropped.
gradient           (length,)    device      Outer gradient: outer parameters minus local ones. Made by the launch; the
                                            flight keeps it until it lands.
=================  ===========  ==========  ============================================================================

Threads: only the training thread writes to a record, and only at a landing or a load (``prefetched`` and ``weight``: at
a launch too). It puts new tensors in the place of old ones and never writes to a tensor of ``outer``,
``memory``, ``tuning``, ``residual``, ``anchor`` or ``twin``. So the background reads records without a lock, and a
checkpoint that is written during a flight holds the values before the outer step. The background returns new tensors,
in an `Arrival`, and writes to none of the record.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm import Fragment, LandingRule, Settings, combined, digest
from lightning_sdiloco.comm import Communicator, Topology
from lightning_sdiloco.engine.buffers import FragmentBuffers, buffers_of
from lightning_sdiloco.engine.flight import Arrival, Launch, Purpose
from lightning_sdiloco.engine.offload import OuterStorage, Prefetched
from lightning_sdiloco.engine.outer.optimizer import OuterState, ShardOptimizer, outer_optimizer_for
from lightning_sdiloco.engine.shards import FragmentLayout, layouts_of, trainable


class FragmentState:
    """Holds all that a rank remembers of one fragment; see [Note: fragment tensors]."""

    def __init__(
        self,
        index: int,
        layout: FragmentLayout,
        buffers: FragmentBuffers,
        outer: OuterState,
        weighing: Any,
        optimizer: ShardOptimizer,
        storage: OuterStorage,
        shares: bool = True,
    ) -> None:
        self.index = index
        self.layout = layout
        self.buffers = buffers
        self.outer = outer
        self.memory: Tensor | None = None
        self.tuning: Tensor | None = None
        self.residual: Tensor | None = None
        self.shares = shares
        self.anchor: Tensor | None = None
        self.twin: Tensor | None = None
        self._begin_from_outer()
        self.weighing = weighing
        self.weight = 0
        self.optimizer = optimizer
        self.storage = storage
        self._prefetched: Prefetched | None = None

    def prefetch(self) -> None:
        """Starts to load the outer parameters of the shard, for the launch that comes next."""
        self._prefetched = self.storage.prefetch(self.outer.values)

    def launch(self, step: int, deadline: float, purpose: Purpose, requests: int) -> Launch:
        """Reads all that a flight takes along. From here on the group counts its inner steps anew."""
        launch = self.read(step, deadline, purpose, requests)
        self.weight = 0
        return launch

    def read(self, step: int, deadline: float, purpose: Purpose, requests: int = 0) -> Launch:
        """Reads all that a flight takes along, and changes nothing; the arguments are those of `launch`."""
        is_round = purpose is Purpose.ROUND
        outer = self.load_outer() if is_round else self._zero()
        return Launch(
            fragment=self.index,
            step=step,
            outer=outer,
            gradient=self.layout.outer_gradient(outer) if is_round else self.layout.read().neg_(),
            buffers=self.buffers.snapshot(),
            # What changed elsewhere, groups that hold outer buffers of their own do not know.
            travelling=self.buffers.travelling(not is_round or not self.shares),
            requests=requests,
            weight=self.weight,
            deadline=deadline,
            purpose=purpose,
        )

    def gradient_launch(self, step: int, deadline: float, trains: bool, requests: int) -> Launch:
        """Reads what a flight takes along for the mean of the gradients, and changes nothing."""
        zeros = self._zero().new_zeros(self.layout.length)
        gradient = self.layout.negated_gradients(zeros) if trains else zeros
        weight, purpose = int(trains), Purpose.GRADIENT
        return Launch(self.index, step, self._zero(), gradient, [], [], requests, weight, deadline, purpose)

    def digest(self, launch: Launch) -> int:
        """Returns the digest of what all groups hold alike at a launch, as far as this rank has it."""
        alike, rounds = list[Tensor](), 0
        if launch.leg and self.anchor is not None:
            # Partners hold outer parameters of their own, and take them apart by what they share.
            alike = [self.storage.load(self.anchor)]
        elif launch.purpose in (Purpose.ROUND, Purpose.MEAN):
            buffers = [buffer.reshape(-1) for buffer in self.buffers.outer]
            outer = self.storage.load(self.outer.values) if launch.purpose is Purpose.MEAN else launch.outer
            alike = [outer, torch.cat(buffers)] if buffers else [outer]
        elif launch.purpose is Purpose.START and self.shares:
            # In a warm-up outer values are local ones: unlike hardware may round them in unlike ways, or a group is
            # idle. Their mean is the same in all groups, and what the outer optimizer makes of it only if its state is.
            alike = [one for one in self.outer.state.values() if isinstance(one, Tensor)]
            rounds = self.outer.rounds
        return combined([rounds, *(digest(values, start=self.layout.start) for values in alike)])

    def change(self, purpose: Purpose, gradient: Tensor) -> Tensor:
        """Returns an outer gradient, or a mean of some, as what it is for the outer parameters of now."""
        return gradient if purpose is not Purpose.MEAN else self.storage.load(self.outer.values) + gradient

    def _zero(self) -> Tensor:
        return self.layout.held[0].new_zeros((), dtype=torch.float32)

    def take_local(self) -> None:
        """Takes the local values for the outer ones."""
        self._prefetched = None
        self.outer = self.outer._replace(values=self.storage.store(self.layout.read()))
        self.buffers.take_local()
        self._begin_from_outer()

    def _begin_from_outer(self) -> None:
        """Forgets all that made this group differ from the outer parameters, which all groups share now."""
        self.anchor, self.twin = None if self.shares else self.outer.values, None

    def load(self, stored: Tensor | None) -> Tensor | None:
        """Returns a stored tensor on the device, if there is one."""
        return None if stored is None else self.storage.load(stored)

    def store(self, values: Tensor | None) -> Tensor | None:
        """Stores a tensor of the device, if there is one."""
        return None if values is None else self.storage.store(values)

    def load_outer(self) -> Tensor:
        """Returns the outer parameters of the shard on the device, by way of what was prefetched."""
        prefetched, self._prefetched = self._prefetched or self.storage.prefetch(self.outer.values), None
        return prefetched.result()

    def land(self, arrival: Arrival, rule: LandingRule, steps: int, *, final: bool) -> None:
        """Makes what a flight brought the state that everybody sees, and takes it into the local values."""
        vars(self).update(arrival.changes)
        if final:
            self._begin_from_outer()
        self.layout.land(rule, arrival.gathered, steps)
        self.buffers.commit(arrival.buffers, arrival.changed)
        self.buffers.mix(rule.kept, arrival.buffers)

    def carry(self, arrival: Arrival, moved: Tensor) -> None:
        """Makes a result that nothing of the own counts in the outer state, and moves the local values along."""
        self.outer = arrival.changes["outer"]
        self.layout.shift(moved)
        self.buffers.commit(arrival.buffers, arrival.changed)

    def gathered(self, group: Communicator) -> Tensor:
        """Gathers the outer parameters, flat, as far as this rank holds the fragment. In-group collective."""
        return self.layout.all_gather(self.storage.load(self.outer.values), group)

    def write_outer(self, group: Communicator) -> Tensor:
        """Writes outer parameters and buffers into the model. In-group collective."""
        gathered = self.gathered(group)
        self.layout.write(gathered)
        self.buffers.write()
        return gathered

    def write(self, gathered: Tensor, buffers: Mapping[int, Tensor]) -> None:
        """Writes other values into the model."""
        self.layout.write(self.storage.load(gathered))
        self.buffers.write_values(buffers)

    def named(self, gathered: Tensor, group: Communicator) -> dict[str, Tensor]:
        """Copies the outer parameters to the host, by name. In-group collective where ranks hold parts of them."""
        # What rests on the host is copied there once, and not by way of the device.
        shard = self.outer.values if group.size == 1 else self.storage.load(self.outer.values)
        return self.layout.named(gathered, shard, group)

    def named_mean(self, gathered: Tensor, group: Communicator) -> dict[str, Tensor]:
        """Copies other values to the host, by name, as `named` does the outer ones."""
        if group.size == 1:
            return self.layout.named(gathered, gathered, group)
        gathered = self.storage.load(gathered)
        return self.layout.named(gathered, self.layout.shard_of(gathered), group)

    def start_from(self, outer: OuterState, buffers: Mapping[str, Tensor]) -> None:
        """Takes other outer values, and outer buffers by name."""
        self._prefetched = None
        self.outer = self.optimizer.load(self.index, outer)
        self.buffers.start_from(buffers)
        self._begin_from_outer()

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, and tensors on the host. On a CPU these are the record's own: do not write to them."""
        return {
            **self.layout.state_dict(),
            **self.outer.state_dict(),
            **self.buffers.state_dict(),
            "memory": _on_host(self.memory),
            **({} if self.tuning is None else {"tuning": _on_host(self.tuning)}),
            "residual": _on_host(self.residual),
            **({} if self.shares else {"anchor": _on_host(self.anchor), "twin": _on_host(self.twin)}),
            # That of the default is the last norms of all groups; other weighings came later.
            "norms": self.weighing,
            "trained": self.weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; copies the tensors."""
        self._prefetched = None
        self.outer = self.optimizer.load(self.index, OuterState.of(state))
        self.buffers.load_state_dict(state)
        self.memory, self.residual = self._stored(state["memory"]), self._stored(state["residual"])
        self.tuning = self._stored(state.get("tuning"))
        self.anchor, self.twin = self._stored(state.get("anchor")), self._stored(state.get("twin"))
        self.weighing = state["norms"]
        self.weight = state["trained"]

    def _stored(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else self.storage.store_copy(values)


def _on_host(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to("cpu")


@torch.no_grad()
def fragments_of(
    model: nn.Module, fragments: Sequence[Fragment], settings: Settings, topology: Topology, storage: OuterStorage
) -> list[FragmentState]:
    """Takes the model as it is for the outer one, and returns the record of each of its fragments."""
    layouts, buffers = layouts_of(fragments, trainable(model), topology), buffers_of(model, fragments)
    optimizer = outer_optimizer_for(settings, [storage.store(layout.read()) for layout in layouts], storage)
    parts = zip(layouts, buffers, optimizer.take_initial(), strict=True)
    started = [settings.aggregation.start(topology.num_groups) for _ in layouts]
    return [
        FragmentState(index, *own, started[index], optimizer, storage, settings.shares)
        for index, own in enumerate(parts)
    ]
