"""The record of everything that a rank stores for a fragment, the data that a launch reads, and the
result of a flight.

[Note: fragment tensors] A rank stores the following tensors for each fragment. ``length`` is the
number of values in the rank's shard. ``part`` is the number of values that the rank's group
averages. It equals ``length`` unless there is a second hop. *storage* is the device of the model
or, for offloaded state, page-locked host memory. All tensors are flat and float32 unless noted
otherwise.

===============  ===========  =======  ============================================================
tensor           shape        where    content and writer
===============  ===========  =======  ============================================================
parameters       their own    device   Local parameters in the model, of any floating-point dtype.
                                       Written by the inner optimizer, by landings, and by
                                       `OuterView` to show the outer parameters.
untrained        their own    device   Local buffers and frozen parameters in the model, of any
                                       dtype. Written by the user's code and by landings; see
                                       [Note: kinds of untrained state].
outer.values     (length,)    storage  Outer parameters of the shard, bit-identical in all groups.
outer.state      (length,)    storage  State of the outer optimizer. Values that are not
                                       elementwise, such as a step count, keep their shape and
                                       dtype and stay where torch needs them.
untrained.outer  their own    device   Outer values of the exchanged untrained state, bit-identical
                                       in all groups. Statistics are float32, and other values keep
                                       their dtype.
memory           (length,)    storage  Error feedback, which contains the compression errors of
                                       earlier payloads. Initially None, and different in each
                                       group.
tuning           (1+blocks,)  storage  Other state of the compression, such as thresholds.
                                       Initially None, and different in each group.
residual         (part,)      storage  With two hops, the error of the second rounding of the mean.
                                       Initially None, and different in each group.
anchor           (length,)    storage  On a route that is not shared (see [Note: gossip]), the
                                       outer parameters at the start of the rounds, bit-identical
                                       in all groups. On such a route, ``outer.values`` differs
                                       between groups.
twin             (length,)    storage  The second vector of a route's momentum, or None while this
                                       vector equals ``outer.values``.
prefetched       (length,)    device   A copy of ``outer.values`` that is being transferred to the
                                       device for the next launch.
gathered         (held,)      device   Outer parameters after the outer step, for all values of the
                                       fragment that this rank has. Gathered by the background from
                                       the shards of the group, and discarded after the landing has
                                       mixed them into the parameters.
gradient         (length,)    device   Outer gradient, which is the outer parameters minus the
                                       local parameters. Created by the launch. A round's flight
                                       keeps this tensor until the landing, and any other flight
                                       only until it is encoded.
kept_local       their own    host     Local parameters from before the end of training, from which
                                       a longer run would continue. Copied before the parameters
                                       are first overwritten.
final            flat         host     Outer parameters after the end of training. Stored only if
                                       the model cannot keep them, because its parameters are
                                       coarser than float32 or because a hook may change them.
===============  ===========  =======  ============================================================

Threads: Only the training thread changes a record, and only at a landing or a load (``prefetched``
    and ``weight`` also change at a launch). The training thread replaces tensors and never writes
    to an existing tensor of ``outer``, ``memory``, ``tuning``, ``residual``, ``anchor`` or
    ``twin``. The background can therefore read records without a lock, and a checkpoint saved
    during a flight contains the values from before the outer step. The background returns new
    tensors in an `Arrival` and never changes the record.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.merge import LandingRule
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.weighting import combined
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.matrices import Matrices
from lightning_sdiloco.engine.outer import (
    OuterState,
    OuterStorage,
    ShardOptimizer,
    is_elementwise,
    outer_optimizer_for,
    stretches,
)
from lightning_sdiloco.engine.shards import FragmentLayout, digest, layouts_of, trainable
from lightning_sdiloco.engine.untrained import Arrived, UntrainedState, untrained_state_of
from lightning_sdiloco.memory import new_vector

Span = tuple[float, float]
"""The start and end of a period, as measured by ``time.perf_counter()``."""


class Purpose(Enum):
    ROUND = auto()
    """A round with an outer step."""
    MEAN = auto()
    """A plain mean of the local values, for evaluation, a checkpoint or the end of training."""
    START = auto()
    """A plain mean of the local values of groups that have different outer values."""


class Launch(NamedTuple):
    """The data that a launch reads. Afterwards, the training thread may change the model."""

    fragment: int
    step: int
    outer: Tensor
    gradient: Tensor
    buffers: list[Tensor]
    requests: int
    weight: int
    deadline: float
    purpose: Purpose = Purpose.ROUND
    step_time: float = 0.0
    choice: int = 0
    leg: tuple[int, ...] = ()
    # Whether the round is part of the dense beginning.
    is_dense: bool = False
    # The indices of the buffers that a site sends. Worker groups agree on their buffers during the
    # flight.
    travelling: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Returns the launch as plain values and host tensors, without the outer parameters and the
        values that each process sets itself.
        """
        variants = {
            "choice": self.choice,
            "leg": self.leg,
            "is_dense": self.is_dense,
            "travelling": self.travelling,
        }
        return {
            "fragment": self.fragment,
            "step": self.step,
            "gradient": self.gradient.to("cpu"),
            "buffers": [buffer.to("cpu") for buffer in self.buffers],
            "requests": self.requests,
            "weight": self.weight,
            **{name: value for name, value in variants.items() if value},
        }

    @staticmethod
    def of(state: dict[str, Any], outer: Tensor, deadline: float) -> "Launch":
        """Restores the launch of a round from a copy of its `state_dict`."""
        tensors = {
            "outer": outer,
            "gradient": state["gradient"].to(outer.device, copy=True),
            "buffers": [buffer.to(outer.device, copy=True) for buffer in state["buffers"]],
        }
        return Launch(**{**state, **tensors}, deadline=deadline)

    def without_values(self) -> "Launch":
        """Returns the launch with its gradient replaced by a tensor of equal length that needs no
        memory.
        """
        return self._replace(gradient=self.gradient.new_zeros(()).expand(len(self.gradient)))


class Diagnostics(NamedTuple):
    """Measurements of how closely the groups agree on a fragment, and of the fragment's outer step
    and compression.
    """

    cosines: tuple[float, ...]
    local_distance: float
    outer_momentum_norm: float
    compression_error: float


class Landing(NamedTuple):
    """The report of a landing.

    Attributes:
        fragment: The index of the fragment.
        launched_at: The inner step after which the fragment was launched.
        requests: The requests that groups sent at the launch, with one bit for each kind of
            request.
        left_out: The groups that were excluded from the mean because their outer gradient was not
            finite.
        outlying: The groups that ``outlier_guard`` excluded from the mean.
        outer_lr: The learning rate of the outer step, or 0 if there was no outer step because no
            group had trained.
        outer_grad_norm: The norm of the mean outer gradient of the whole fragment, before a
            direction is computed from it.
        bytes_sent: The number of bytes that this rank sent to other groups for this flight.
        exposed_wait_s: The time in seconds that the training thread waited for the flight.
        in_flight_s: The time in seconds from the launch until the result was available.
        landed_at: The inner step after which the fragment landed.
        bytes_received: The number of bytes that this rank received from other groups for this
            flight.
        counted: The groups that were included in the mean.
        group_norms: The norm of each group's outer gradient before compression.
        spans: The start and end of each stage, as measured by ``time.perf_counter()``. The stages
            in the training thread are ``launch``, ``wait`` and ``land``. The stages in the
            background are ``flight`` and its parts ``encode``, ``transfer``, ``decode``, ``relay``
            (only with a second hop) and ``outer_step``.
        diagnostics: Measurements of how closely the groups agree, or None if they were not enabled
            with `engine.rounds.diagnose`.
        on_link_s: The time in seconds that messages from other groups were on the link. The time is
            NaN if it could not be measured because the messages were too short or arrived before
            this rank waited for them.
        sites: In a federation, the names of the sites that were included in the round. This site is
            among them unless it was late.
        step_times: The duration of each group's inner step at the launch, in seconds, rounded to
            three digits. A duration is 0 if it is unknown.
        direction_norm: The norm of the direction of the mean outer gradient, or NaN if there was no
            outer step or no parameter is a matrix.
        lost_steps: In a federation, the number of this site's inner steps that were lost because
            their launch was late.
        wrong_buffers: The groups whose buffers ``outlier_guard`` excluded because their values were
            too large.

    Examples:
        >>> from lightning_sdiloco import SimulatedGroups
        >>> models = [torch.nn.Linear(4, 1) for _ in range(2)]
        >>> groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, fragments=1)
        >>> landings = [groups.step() for _ in range(2)][-1]
        >>> [(landing.fragment, landing.launched_at, landing.counted) for landing in landings[0]]
        [(0, 2, (0, 1))]
    """

    fragment: int
    launched_at: int
    requests: int
    left_out: tuple[int, ...]
    outlying: tuple[int, ...]
    outer_lr: float
    outer_grad_norm: float
    bytes_sent: int
    exposed_wait_s: float
    in_flight_s: float
    landed_at: int
    bytes_received: int
    counted: tuple[int, ...]
    group_norms: tuple[float, ...]
    spans: Mapping[str, Span]
    diagnostics: Diagnostics | None
    on_link_s: float = math.nan
    sites: tuple[str, ...] = ()
    step_times: tuple[float, ...] = ()
    direction_norm: float = math.nan
    lost_steps: int = 0
    wrong_buffers: tuple[int, ...] = ()

    def seconds(self, name: str) -> float:
        """Returns the duration of one of the `spans`, or 0 if the span is missing."""
        began, ended = self.spans.get(name, (0.0, 0.0))
        return ended - began

    @property
    def link_gbit_s(self) -> float:
        """The effective link rate in Gbit/s, which is the amount of data sent in one direction
        divided by the time that it spent on the link.

        The rate is NaN if the time is unknown, and 0 if nothing was sent.
        """
        bits = 8 * max(self.bytes_sent, self.bytes_received)
        if not bits:
            return 0.0
        return bits / self.on_link_s / 1e9 if self.on_link_s > 0 else math.nan


class Commit(NamedTuple):
    """The part of a record that a landing replaces; see [Note: fragment tensors]."""

    outer: OuterState
    memory: Tensor | None
    tuning: Tensor | None
    residual: Tensor | None
    twin: Tensor | None
    weighing: Any


class Arrival(NamedTuple):
    """The result of a flight. It contains the state to commit and a report without the landing's
    times.

    Attributes:
        commit: The state that the landing commits to the record.
        rule: The rule for merging outer values into local values.
        gathered: The vectors that the rule needs, gathered from the ranks of the group.
        untrained: The untrained state that the flight received.
        changed: A bit mask of the untrained tensors that any group has changed.
        trained: The amount of training that each group reported.
        landing: The report of the landing.
        sends_bytes_per_s: The link rate to each receiver in bytes per second, or 0 if unknown.
    """

    commit: Commit
    rule: LandingRule
    gathered: Sequence[Tensor]
    untrained: Arrived
    changed: int
    trained: Sequence[int]
    landing: Landing
    sends_bytes_per_s: float = 0.0

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.gathered, self.commit.outer.values, *self.untrained.tensors]


# The record


class FragmentState:
    """The record of all data that a rank stores for one fragment; see [Note: fragment tensors]."""

    def __init__(
        self,
        index: int,
        layout: FragmentLayout,
        untrained: UntrainedState,
        outer: OuterState,
        weighing: Any,
        optimizer: ShardOptimizer,
        storage: OuterStorage,
        matrices: Matrices,
        shares: bool = True,
    ) -> None:
        self.index = index
        self.layout = layout
        self.matrices = matrices
        self.untrained = untrained
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
        self._prefetched: Callable[[], Tensor] | None = None
        self.kept_local: list[Tensor] | None = None
        self.final: Tensor | None = None

    def prefetch(self) -> None:
        self._prefetched = self.storage.prefetch(self.outer.values)

    def let_go(self) -> None:
        """Makes flights of removed or reshaped tensors land outside the model."""
        self.layout.let_go()
        self.untrained.let_go()

    def launch(self, step: int, deadline: float, purpose: Purpose, requests: int) -> Launch:
        """Reads the data for a flight and resets the micro-batch count since the last launch."""
        launch = self.read(step, deadline, purpose, requests)
        self.untrained.launched()
        self.weight = 0
        return launch

    def read(self, step: int, deadline: float, purpose: Purpose, requests: int = 0) -> Launch:
        """Like `launch`, reads the data for a flight, but does not change the record."""
        if purpose is Purpose.ROUND:
            outer = self.load_outer()
            gradient = self.layout.outer_gradient(outer)
        else:
            gradient = self.layout.read().neg_()
            outer = gradient.new_zeros(())
        return Launch(
            fragment=self.index,
            step=step,
            outer=outer,
            gradient=gradient,
            buffers=self.untrained.snapshot(),
            requests=requests,
            weight=self.weight,
            deadline=deadline,
            purpose=purpose,
        )

    def digest(self, launch: Launch) -> int:
        """Returns a digest of this rank's part of the values that must be equal in all groups at a
        launch.
        """
        start = self.layout.start
        if launch.leg and self.anchor is not None:
            # Partners have different outer parameters but exchange them relative to the same
            # anchor.
            return digest(self.storage.load(self.anchor), start)
        if launch.purpose is Purpose.START:
            return 0
        outer = launch.outer
        if launch.purpose is Purpose.MEAN:
            outer = self.storage.load(self.outer.values)
        untrained = self.untrained.digested()
        if untrained is None:
            return digest(outer, start)
        return combined([digest(outer, start), digest(untrained, start)])

    def norm(self, purpose: Purpose, gradient: Tensor) -> Tensor:
        """Returns the norm of an outer gradient, or of the change that a plain mean makes to the
        outer parameters.
        """
        if purpose is not Purpose.MEAN or not gradient.numel():
            return torch.linalg.vector_norm(gradient)
        # For a plain mean, the gradient contains the negated local values. The difference from the
        # outer values is computed in stretches to save memory.
        norms: list[Tensor] = []
        scratch = gradient.new_empty(0)
        for stretch in stretches(len(gradient), gradient.device):
            length = stretch.stop - stretch.start
            if not norms:
                scratch = new_vector(length, gradient.device)
            moved = scratch[:length]
            outer = self.storage.load(self.outer.values[stretch])
            torch.add(outer, gradient[stretch], out=moved)
            norms.append(torch.linalg.vector_norm(moved))
        return torch.linalg.vector_norm(torch.stack(norms))

    def take_as_outer(self, names: Collection[str]) -> None:
        """Replaces the outer values of some parameters with their local values, which must be equal
        in all groups, and clears their momentum.
        """
        self._prefetched = None
        before = self.outer.moved(self.storage.load)
        is_taken = self.layout.mask(names)
        state = dict(before.state)
        for key, value in before.state.items():
            if is_elementwise(value, before.values):
                state[key] = torch.where(is_taken, 0.0, value)
        values = torch.where(is_taken, self.layout.read(), before.values)
        self.outer = before._replace(values=values, state=state).moved(self.storage.store)
        if self.memory is not None:
            memory = self.storage.load(self.memory)
            self.memory = self.storage.store(torch.where(is_taken, 0.0, memory))
        self._begin_from_outer()

    def _begin_from_outer(self) -> None:
        """Resets all state that differs between groups on a route, because all groups now have the
        same outer parameters.
        """
        self.anchor = None if self.shares else self.outer.values
        self.twin = None

    def load(self, stored: Tensor | None) -> Tensor | None:
        return None if stored is None else self.storage.load(stored)

    def load_outer(self) -> Tensor:
        """Returns the outer parameters of the shard on the device, using the prefetched copy if
        available.
        """
        prefetched = self._prefetched or self.storage.prefetch(self.outer.values)
        self._prefetched = None
        return prefetched()

    def land(self, arrival: Arrival, steps: int, *, final: bool) -> None:
        """Commits a flight's result to the record and merges it into the local values.

        ``steps`` is the number of inner steps since the launch. ``final`` is True for a plain mean.
        """
        self._commit(arrival.commit)
        if final:
            self._begin_from_outer()
        self._take(arrival, steps)

    def _take(self, arrival: Arrival, steps: int) -> None:
        self.layout.land(arrival.rule, arrival.gathered, steps)
        self.untrained.commit(arrival.untrained, arrival.changed)
        self.untrained.land(arrival.untrained, arrival.rule.kept)

    def committed(self) -> Commit:
        """Returns the state committed by the last landing."""
        return Commit(self.outer, self.memory, self.tuning, self.residual, self.twin, self.weighing)

    def stored(self, commit: Commit) -> Commit:
        """Returns a commit with its tensors moved to the storage."""
        return commit._replace(
            memory=self._store(commit.memory),
            tuning=self._store(commit.tuning),
            residual=self._store(commit.residual),
            twin=self._store(commit.twin),
            outer=commit.outer.moved(self.storage.store),
        )

    def _store(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else self.storage.store(values)

    def _commit(self, commit: Commit) -> None:
        self.outer = commit.outer
        self.memory = commit.memory
        self.tuning = commit.tuning
        self.residual = commit.residual
        self.twin = commit.twin
        self.weighing = commit.weighing

    def land_at_end(self, arrival: Arrival, steps: int, *, final: bool) -> None:
        """Merges a flight's result into the model, but leaves the record unchanged for a longer
        run.
        """
        self.keep_local()
        self._take(arrival, steps)
        if final:
            self.end(arrival.gathered[0], arrival.commit.outer.values)

    def end(self, gathered: Tensor, shard: Tensor) -> None:
        """Stores a copy of the outer parameters if the model cannot represent them exactly."""
        if not self.layout.holds_float32:
            self.final = self.layout.to_name(gathered, shard).to("cpu")

    def keep_local(self) -> None:
        """Stores the local parameters for a longer run before they are overwritten."""
        self.kept_local = self.local_values()

    def local_values(self) -> list[Tensor]:
        """Returns this rank's local parameters on the host, using the stored copy if `keep_local`
        made one.
        """
        if self.kept_local is not None:
            return self.kept_local
        return [held.to("cpu", copy=True) for held in self.layout.held]

    def named_at_end(self, group: Communicator) -> dict[str, Tensor]:
        """After the end of training, returns a host copy of the outer parameters by name."""
        values = self.layout.copied() if self.final is None else self.final
        return self.layout.named(values, values, group)

    def carry(self, arrival: Arrival, moved: Tensor) -> None:
        """Updates the outer state with a result that does not include this site's training, and
        shifts the local values by the same amount.
        """
        self.outer = arrival.commit.outer
        self.layout.shift(moved)
        self.untrained.commit(arrival.untrained, arrival.changed)

    def gathered(self, group: Communicator) -> Tensor:
        """Gathers the outer values of this rank's parts of the parameters into a flat tensor.
        In-group collective.
        """
        return self.layout.all_gather(self.storage.load(self.outer.values), group)

    def write_outer(self, group: Communicator, *, stays: bool = False) -> Tensor:
        """Writes outer parameters and buffers into the model, permanently if ``stays`` is True.
        In-group collective.
        """
        gathered = self.gathered(group)
        if stays:
            self.layout.settle(gathered)
        else:
            self.layout.write(gathered)
        self.untrained.write()
        return gathered

    def write(self, gathered: Tensor, untrained: Mapping[int, Tensor]) -> None:
        self.layout.write(self.storage.load(gathered))
        self.untrained.write_values(untrained)

    def named(self, gathered: Tensor, group: Communicator) -> dict[str, Tensor]:
        """Returns a host copy of the outer parameters by name. In-group collective if the
        parameters are sharded.
        """
        # Values that are stored on the host are copied directly, without going through the device.
        shard = self.outer.values if group.size == 1 else self.storage.load(self.outer.values)
        return self.layout.named(gathered, shard, group)

    def named_mean(self, gathered: Tensor, group: Communicator) -> dict[str, Tensor]:
        """Returns a host copy of a mean by name, as `named` does for the outer parameters."""
        if group.size == 1:
            return self.layout.named(gathered, gathered, group)
        gathered = self.storage.load(gathered)
        return self.layout.named(gathered, self.layout.shard_of(self.layout.split(gathered)), group)

    def start_from(self, outer: OuterState, untrained: Mapping[str, Tensor]) -> None:
        self._prefetched = None
        self.outer = self.optimizer.load(self.index, outer)
        self.untrained.start_from(untrained)
        self._begin_from_outer()

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values and host tensors. Do not write to the tensors, because, on a CPU,
        they may share memory with the record.
        """
        tensors = {"memory": self.memory, "residual": self.residual}
        if self.tuning is not None:
            tensors["tuning"] = self.tuning
        if not self.shares:
            tensors |= {"anchor": self.anchor, "twin": self.twin}
        return {
            **self.layout.state_dict(),
            **self.outer.state_dict(),
            **self.untrained.state_dict(),
            **self.matrices.state_dict(),
            **{
                name: None if values is None else values.to("cpu")
                for name, values in tensors.items()
            },
            # The name comes from the default weighing, which stores the last norms of all groups.
            # Other weighings were added later.
            "norms": self.weighing,
            "trained": self.weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prefetched = None
        self.outer = self.optimizer.load(self.index, OuterState.of(state))
        self.untrained.load_state_dict(state)
        for name in ("memory", "tuning", "residual", "anchor", "twin"):
            values = state.get(name)
            setattr(self, name, None if values is None else self.storage.store_copy(values))
        self.weighing = state["norms"]
        self.weight = state["trained"]


@torch.no_grad()
def fragments_of(
    model: nn.Module,
    fragments: Sequence[Fragment],
    settings: Settings,
    topology: Topology,
    storage: OuterStorage,
    before: Sequence[FragmentState] = (),
) -> list[FragmentState]:
    """Creates the record of each fragment, with the current model as the outer model.

    Args:
        model: The model.
        fragments: The fragments into which the model is divided.
        settings: The settings of the run.
        topology: The worker groups.
        storage: The storage of the outer state.
        before: The records of the previous fragments, if the model is being divided again.
    """
    layouts = layouts_of(fragments, trainable(model), topology)
    untrained = untrained_state_of(
        model, fragments, settings.untrained or {}, [record.untrained for record in before]
    )
    optimizer = outer_optimizer_for(
        settings, [storage.store(layout.read()) for layout in layouts], storage
    )
    initial = optimizer.take_initial()
    return [
        FragmentState(
            index,
            layout,
            untrained[index],
            initial[index],
            settings.aggregation.start(topology.num_groups),
            optimizer,
            storage,
            Matrices(fragments[index], layout, settings.outer.map, topology),
            settings.shares,
        )
        for index, layout in enumerate(layouts)
    ]
