"""The public class of the Streaming DiLoCo engine, which works with any training loop."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.algorithm.config import (
    DEFAULT_TIMEOUT,
    OuterOptimizer,
    Settings,
    fault_of,
    is_whole,
    names_checked,
)
from lightning_sdiloco.algorithm.gossip import Route
from lightning_sdiloco.algorithm.merge import LandingRule
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.reduce import TwoShot
from lightning_sdiloco.algorithm.schedule import DenseBeginning, LaunchSchedule
from lightning_sdiloco.algorithm.weighting import Weighing
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.comm.watch import WorldWatch, is_watched
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.background import ThreadBackground
from lightning_sdiloco.engine.checkpoint import (
    load,
    place_of,
    require_own_state,
    require_processes,
    save,
)
from lightning_sdiloco.engine.fragmented_model import FragmentedModel
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.engine.history import Counts, History
from lightning_sdiloco.engine.inner_optimizers import InnerOptimizers
from lightning_sdiloco.engine.matrices import proofs
from lightning_sdiloco.engine.outer import storage_for
from lightning_sdiloco.engine.outer_view import GroupMean, LocalValues
from lightning_sdiloco.engine.per_rank import extra_state, load_extra_state
from lightning_sdiloco.engine.rounds import (
    Federated,
    Loop,
    PendingFlight,
    Rounds,
    chosen_settings,
)
from lightning_sdiloco.engine.shards import unwrapped
from lightning_sdiloco.engine.start import (
    WorkerGroups,
    agreed_fragments,
    align_ranks,
    broadcast,
    require_own_group,
    require_same_settings,
    say_what_averages_twice,
    say_what_trains_little,
    topology_for,
)
from lightning_sdiloco.engine.turns import Turns, takes_turns, turns_of
from lightning_sdiloco.memory import give_back_free_memory
from lightning_sdiloco.version import VERSION

_ADVICE = (
    "Pass group=WorkerGroups(...).process_group to collectives inside a step. Gather logged"
    " values, evaluate and save only every few steps."
)


class StreamingDiLoCo:
    """Streaming DiLoCo for any PyTorch training loop (https://arxiv.org/abs/2501.18512).

    In every process, call `step` after each ``optimizer.step()``, and call `finish` at the end of
    training. The worker groups exchange their outer gradients fragment by fragment in the
    background while training continues. If ``torch.distributed`` is initialised, all ranks must
    construct the engine, and training starts from rank 0's parameters and buffers. Otherwise, there
    is one worker group.

    Args:
        model: The model to train, wrapped in ``DistributedDataParallel`` if a worker group has more
            than one rank.
        worker_groups: The number of worker groups (M in the paper). Consecutive ranks form a group.
            With ``"auto"``, each process is a group. Pass a `WorkerGroups` if you wrapped the model
            using its process group.
        sync_every: The number of inner steps between two launches of the same fragment (H in the
            paper).
        overlap_steps: The number of inner steps from the launch of a fragment to its landing (tau
            in the paper). Must be less than ``sync_every``. The default is five, or fewer if the
            rounds are shorter.
        mixing: The share of the local parameters that is kept on landing (alpha in the paper), from
            0 to 1, or a `LandingRule` such as `Carry`. If ``mixing``, ``outer_lr`` or
            ``outer_momentum`` is ``"auto"``, its value depends on the number of groups,
            ``sync_every`` and the compression.
        fragments: How the model is divided. Pass ``"strided:3"`` or ``"sequential:3"`` to set the
            number of repeated blocks per fragment. By default, a fragment contains an eighth of the
            blocks, from one to three, or more if there would be over 32 fragments. ``"balanced"``
            creates as many fragments of equal size, and an integer creates that many. You can also
            pass a list of shell-style patterns for parameter names for each fragment.
        compression: How outer gradients are encoded. Pass a `Compression` or a name from
            ``compression.COMPRESSIONS``, such as ``"fp4"``.
        outer_lr: The learning rate of the outer Nesterov SGD, or ``"auto"``.
        outer_momentum: The momentum of the outer Nesterov SGD as defined by torch, or ``"auto"``.
        outer_optimizer: A callable that takes the flat float32 shards, one per fragment, and
            returns an elementwise torch optimizer to replace the Nesterov SGD. Alternatively, pass
            an `OuterOptimizer` to configure schedule, clipping, guard and location.
        exchange: How the groups average their encoded outer gradients. Pass ``"gather"``,
            ``"two_shot"`` or ``"auto"``, each optionally with the suffix ``":nccl"``, or pass a
            `TwoShot`.
        dense_beginning: A `DenseBeginning`, which makes groups exchange more often in the first
            rounds. By default, there is no dense beginning.
        schedule: A `LaunchSchedule`, such as `Selective`, that determines when fragments launch. By
            default, each fragment launches every ``sync_every`` inner steps.
        weighing: A `Weighing`, which determines each group's weight in a mean. The default is the
            number of inner steps that the group has trained.
        route: A `Route`, such as `RandomPairs`, that determines which groups exchange with each
            other in a round. By default, all groups do. With a route, groups have different outer
            parameters, and you need `group_mean` to evaluate the outer model.
        untrained: How to handle buffers and frozen parameters. Map name patterns to ``"mean"``,
            ``"first"`` or ``"own"``. By default, statistics of normalization layers are averaged,
            other small buffers are taken from the first group, and each group keeps its own large
            buffers and frozen parameters.
        timeout: The maximum time that a fragment may be in flight.
        federation: The `Federation` that these ranks join as a separately launched site. By
            default, all worker groups are launched together.
        inner_optimizers: The optimizers of your training loop. `save` stores their state, the
            engine resets non-finite values in it, and landings update copies of the weights.
        topology: Existing worker groups and process groups to use instead of ``worker_groups``.

    Raises:
        ValueError: If an argument is out of range, the model cannot be divided as requested, ranks
            differ, or an inner optimizer keeps a copy of the weights outside its state.
        TypeError: If an argument is unknown.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=1, fragments="strided:1")
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(2, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     landings = engine.step()
        >>> landings = engine.finish()
        >>> engine.report()["launches"], len(engine.fragments)
        (4, 2)
    """

    @names_checked
    def __init__(
        self,
        model: nn.Module,
        *,
        worker_groups: int | str | WorkerGroups = "auto",
        sync_every: int = 100,
        overlap_steps: int | None = None,
        mixing: float | Literal["auto"] | LandingRule = "auto",
        fragments: int | str | Sequence[Sequence[str]] = "strided",
        compression: str | Compression = "fp4",
        outer_lr: float | Literal["auto"] = "auto",
        outer_momentum: float | Literal["auto"] = "auto",
        federation: Federated | None = None,
        outer_optimizer: OuterOptimizer | Callable[[Iterable[Any]], Optimizer] | None = None,
        exchange: str | TwoShot = "auto",
        dense_beginning: DenseBeginning | None = None,
        schedule: LaunchSchedule | None = None,
        weighing: Weighing | None = None,
        route: Route | None = None,
        untrained: Mapping[str, str] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        inner_optimizers: Sequence[Optimizer] = (),
        topology: Topology | None = None,
    ) -> None:
        requested = Settings.among(locals())
        self.topology = topology_for(
            model, requested, 1 if federation else worker_groups, topology
        ).for_engine()
        require_own_group(model, self.topology)
        self.model = unwrapped(model)
        settings = chosen_settings(requested, self.model, self.topology)
        is_site = federation is not None
        inner = InnerOptimizers(inner_optimizers)
        parts, device = agreed_fragments(
            self.model, settings, self.topology, inner.copies, is_site=is_site
        )
        say_what_averages_twice(inner_optimizers, settings, self.topology)
        background = (self.topology.background or ThreadBackground)(device)
        storage = storage_for(device, requested.outer.offload)
        self.fragmented_model = FragmentedModel(
            self.model, parts, settings, self.topology, storage, inner
        )
        self.rounds = Rounds(self.fragmented_model, requested, settings, self.topology, background)
        say_what_trains_little(self.fragmented_model.outer_optimizer, self.topology)
        align_ranks(self.model, self.fragmented_model.fragments, self.topology)
        self._require_same_on_all_ranks(parts, device)
        self.site: str | None = None
        self.loop: Loop = self.rounds
        if federation is not None:
            located = federation.located()
            self.site = located.site
            self.loop = located.join(self.rounds, self.topology)
        is_simulated = self.topology.background is not None
        maps_on_device = bool(settings.outer.map) and device.type != "cpu" and not is_simulated
        self.history = History(
            self.rounds, self.topology, is_site=is_site, maps_on_device=maps_on_device
        )
        self._unfinished: dict[str, Any] = {}
        self._is_closed = False
        self.watch = WorldWatch(_ADVICE, "inner steps") if is_watched(self.topology) else None
        """Watches the time between inner steps. It is stopped if Lightning runs the loop, and is
        None if this rank has nothing to watch.
        """

    def _require_same_on_all_ranks(
        self, partition: Sequence[Fragment], device: torch.device
    ) -> None:
        described = {"the version of lightning_sdiloco": VERSION}
        described |= self.fragmented_model.outer_optimizer.described
        for fragment in self.fragmented_model.fragments:
            for name, kind in fragment.untrained.kinds_by_name().items():
                described[f"the kind of {name!r}"] = kind.value
        described |= proofs(partition, self.rounds.settings.outer.map, device)
        require_same_settings(described, self.topology.world)

    def join(self, planned_steps: int | None = None) -> None:
        """Waits until a site has the current state of its federation so that no inner steps are
        wasted.

        Args:
            planned_steps: The total number of inner steps that you plan, if known. The site warns
                if all other sites plan a different number.

        Raises:
            ValueError: If ``planned_steps`` is not a non-negative integer.
        """
        if planned_steps is not None and not (is_whole(planned_steps) and planned_steps >= 0):
            raise ValueError(
                f"planned_steps={planned_steps!r} is {fault_of(planned_steps, True)}: it must be a"
                " whole number of at least 0, or None. Pass the number of inner steps of the whole"
                " training, or omit the argument."
            )
        self.loop.join(self.inner_steps, planned_steps)

    @takes_turns
    def step(
        self, *, trained: int = 1, idle: bool = False, samples: int | None = None
    ) -> Turns[list[Landing]]:
        """Counts an inner step, launches and lands all fragments that are due, and returns the
        landings.

        Args:
            trained: The number of micro-batches that this rank trained in this inner step. The next
                means are weighted by this number, so all groups must use the same unit.
            idle: Whether this group skipped training in this inner step, for example because its
                data was exhausted. Equivalent to ``trained=0``. All ranks of a group must pass the
                same value.
            samples: The number of samples that this rank trained on. A federation uses this number
                to weight its sites. The default is ``trained``.

        Raises:
            ValueError: If ``trained`` is not a non-negative integer.
            ExchangeError: If a worker group stopped or did not respond within ``timeout``.
            AgreementError: If the groups have different outer parameters, or if a group's values
                remain non-finite.
        """
        self._require_open("step()")
        if self.watch is not None:
            self.watch.end()
        trained = 0 if idle else trained
        if not isinstance(trained, int) or trained < 0:
            raise ValueError(
                f"trained={trained!r} is not a number of micro-batches. It must be a"
                " non-negative integer, and 0 if the group was idle. For an inner step without"
                " gradient accumulation, pass 1 or omit the argument."
            )
        counts = self.history.counts
        counts.inner_steps += 1
        step = counts.inner_steps
        ended = self.history.step_span[1]
        began = time.perf_counter()
        self.history.step_span = began, began
        if trained:
            self.rounds.step_clock.note(ended, began)
            self.loop.trained(trained, trained if samples is None else samples)
        counts.launches += self.loop.launch_due(step)
        yield
        landed = self.history.land(self.loop.land_due(step))
        self.history.step_span = began, time.perf_counter()
        if self.watch is not None:
            self.watch.begin(self.topology)
        return landed

    @takes_turns
    def finish(self) -> Turns[list[Landing]]:
        """Ends training by landing all fragments in flight and averaging the groups' models.

        After the landings, each fragment is set to the plain float32 mean of the groups' local
        parameters, without applying the outer learning rate or momentum. The model then contains
        the outer parameters, which are bit-identical in every group. Gradients are cleared. Returns
        all landings except those of the final exchange. A second call has no effect.
        """
        if self.is_finished:
            return []
        landed = self._land_at_end()
        yield
        for landing in self.loop.final_exchange(self.inner_steps):
            if landing is not None:
                self.history.note(landing)
                self.history.final_landings.append(landing)
            yield
        view = self.fragmented_model.view
        view.end(is_written=self.rounds.is_ending)
        view.write_untrained(view.first_own())
        self.close()
        return landed

    def _land_at_end(self) -> list[Landing]:
        self.fragmented_model.cut_model.require_coverage()
        # See [Note: memory at the end].
        self.model.zero_grad()
        self.fragmented_model.inner.copies.freeze()
        give_back_free_memory()
        self._unfinished = self._state()
        if self.site is None:
            self.rounds.is_ending = True
            self.fragmented_model.free_spare_memory()
        # Until a site finishes, its landings also change its records.
        self.fragmented_model.view.begin_end(keeps_parameters=not self.rounds.is_ending)
        return self.history.land(self.loop.land_all(self.inner_steps))

    def leave(self) -> list[Landing]:
        """Ends training early and returns the landings. A site first sends its unsent training
        progress.
        """
        landed = self.history.land(self.loop.leave(self.inner_steps))
        self.close()
        return landed

    def close(self) -> None:
        """Stops the background work and discards fragments in flight. Called by `finish`."""
        self._is_closed = True
        self.loop.close()
        self.fragmented_model.free_spare_memory()
        self.topology.close()

    def _require_open(self, called: str) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"{called} was called after finish() or close(). Create a new StreamingDiLoCo to"
                " continue."
            )

    @property
    def is_finished(self) -> bool:
        """Whether `finish` has run. If so, the model contains the outer parameters."""
        return self.fragmented_model.view.has_ended

    @property
    def is_over(self) -> bool:
        """Whether the run has ended for all of its sites."""
        return self.loop.is_over

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments, including their parameter names and sizes in bytes."""
        return self.fragmented_model.partition

    @property
    def inner_steps(self) -> int:
        """The number of inner steps so far."""
        return self.history.counts.inner_steps

    @property
    def has_landed(self) -> bool:
        """Whether every fragment has landed at least once. While this is False, the outer model is
        partly untrained, so evaluate and save `group_mean` instead.
        """
        if not all(fragment.outer.rounds for fragment in self.fragmented_model.fragments):
            return False
        timetable = self.rounds.timetable
        steps = self.inner_steps - timetable.began_at
        return self.site is not None or steps >= timetable.schedule.first_round

    def evaluate(self, mean: GroupMean | None = None) -> AbstractContextManager[None]:
        """Loads the outer model for the duration of a ``with`` block, and then restores the local
        model bit for bit.

        In-group collective. Blocks may be nested. If you pass a mean from `group_mean`, the model
        is set to that mean, without waiting for other groups. Otherwise, it is set to the outer
        parameters, which differ between groups if a route is used. Each group keeps its own
        untrained state, but a mean includes the untrained state of the first group.
        """
        return self.fragmented_model.view.shown(mean)

    @torch.no_grad()
    def set_outer(self, names: Collection[str] | None = None) -> None:
        """Makes rank 0's current model the outer model of all groups. All ranks must call this
        method together.

        Call this method after you overwrite weights, for example with the weights from a better
        epoch. All groups discard fragments in flight and the outer momentum. The inner optimizers
        keep their state.

        Args:
            names: The names of the parameters that you have overwritten. By default, all parameters
                and all exchanged buffers are used.

        Raises:
            ValueError: If a name is not a trainable parameter, or if these ranks form a site of a
                federation.
        """
        self._require_open("set_outer()")
        if self.site is not None:
            raise ValueError(
                "A site cannot overwrite weights while it is training, because only a federation's"
                " records change its outer model. Start a new run from the weights that you want."
            )
        fragmented_model = self.fragmented_model
        fragments = fragmented_model.fragments
        trainable_names = {name for fragment in fragments for name in fragment.layout.names}
        chosen = trainable_names if names is None else set(names)
        unknown = sorted(chosen - trainable_names)
        if unknown:
            raise ValueError(
                f"set_outer received {unknown[0]!r}, which is not a trainable parameter."
            )
        self.history.counts.flights_dropped += self.rounds.drop_flights()
        fragmented_model.cut_model.reshard()
        for fragment in fragments:
            for name, parameter in zip(
                fragment.layout.names, fragment.layout.parameters, strict=True
            ):
                if name in chosen:
                    broadcast(parameter, self.topology)
            if names is None:
                for tensor in fragment.untrained.tensors():
                    broadcast(tensor, self.topology)
                fragment.untrained.take_local()
            fragment.take_as_outer(chosen)
        fragmented_model.view.keep(chosen)
        if names is None:
            fragmented_model.view.keep_untrained()

    @takes_turns
    def group_mean(self) -> Turns[GroupMean]:
        """Returns the mean of the groups' current models, as `finish` would compute it, without
        affecting training. All ranks must call this method.

        While `has_landed` is False, evaluate this mean instead of the outer model.
        """
        self._require_open("group_mean()")
        storage = self.fragmented_model.storage
        view = self.fragmented_model.view
        gathered: list[Tensor] = []
        untrained: list[Mapping[int, Tensor]] = []

        def receive(flight: PendingFlight) -> None:
            arrival = self.rounds.arrival_of(flight)
            self.history.count_bytes(arrival.landing)
            gathered.append(storage.store(arrival.gathered[0]))
            untrained.append(arrival.untrained.outer)

        with view.hidden():
            yield from self.rounds.average_now(self.inner_steps, receive)
            first_values = view.first_own()
        return GroupMean(gathered, untrained, first_values)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters by name as float32 tensors on the host.

        The values are identical on all ranks. All ranks of a worker group must call this method.
        After `finish`, this is required only if the parameters are sharded. If a route is used, the
        result is the mean of the groups, and all ranks of all groups must call this method until
        `finish`.
        """
        mean = None
        if not (self.rounds.settings.shares or self._is_closed):
            mean = self.group_mean()
        return self.fragmented_model.view.named(mean)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that this rank needs to resume bit for bit, as plain Python values and
        host tensors.

        The state includes fragments in flight and the modules' extra state. After `finish`, the
        method returns the state from before the final landings, from which a longer run can
        continue. Calling this method does not affect training. On a CPU, do not write to the
        returned tensors, because they may share memory with the engine.
        """
        return {
            **(self._unfinished or self._state()),
            "local": self.fragmented_model.view.local_values(),
        }

    def _state(self) -> dict[str, Any]:
        """Returns the result of `state_dict` without the local values."""
        return {
            "counts": asdict(self.history.counts),
            "requests": self.rounds.requests.bits,
            **self.history.absences.state_dict(),
            "rank": place_of(self.topology),
            "settings": self.rounds.settings.saved(),
            "extra_state": extra_state(self.model),
            **self.fragmented_model.inner.copies.state_dict(),
            **self.loop.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the state of an engine with the same settings, model and rank. All ranks
        must call this method.

        Settings that are ``"auto"`` take their values from the state. A state is refused if it
        comes from another rank or has different fragments or a different outer optimizer.
        """
        require_own_state(state, self.topology)
        _require_no_warmup(state)
        rounds = self.rounds
        settings = rounds.requested_settings.taken_from(state["settings"])
        if settings != rounds.settings:
            self._require_no_site()
        rounds.load_records(state, settings)
        # This comes first, because a module's hooks may restore parameters along with its extra
        # state.
        load_extra_state(self.model, state["extra_state"])
        self.fragmented_model.view.load_local(LocalValues(**state["local"]))
        self.fragmented_model.inner.copies.load_state_dict(state)
        self.loop.load_state_dict(state)
        self.history.absences.load_state_dict(state)
        self.history.counts = Counts(**state["counts"])
        rounds.requests.bits = state["requests"]

    def save(self, path: str | PathLike[str]) -> None:
        """Saves everything that a run needs to resume bit for bit. All ranks must call this method.

        ``path`` is an ordinary checkpoint file. Its ``state_dict`` contains the outer parameters
        or, while `has_landed` is False, the mean of the groups' parameters. A folder next to the
        checkpoint file contains one file per rank. Each file stores the state of the engine and of
        ``inner_optimizers``, fragments in flight, local parameters, the modules' extra state, and
        the state of random number generators.
        """
        require_processes(self.topology)
        is_trained = self.has_landed or self.is_finished
        view = self.fragmented_model.view
        outer = self.outer_state_dict() if is_trained else view.named(self.group_mean())
        save(
            str(path),
            self.topology,
            self.rounds.settings,
            self.state_dict(),
            outer,
            self.fragmented_model.inner.optimizers,
        )

    def load(self, path: str | PathLike[str]) -> None:
        """Resumes from the point at which `save` was called. Raises an error on all ranks if
        settings, ranks or files differ.
        """
        requested = self.rounds.requested_settings
        optimizers = self.fragmented_model.inner.optimizers
        self.load_state_dict(load(str(path), self.topology, requested, optimizers))

    @takes_turns
    def recut(self, inner_optimizers: Sequence[Optimizer] | None = None) -> Turns[list[Landing]]:
        """Divides the model into fragments again after you freeze, unfreeze or replace parameters.
        All ranks must call this method.

        Lands the fragments in flight and returns the landings. A newly frozen parameter is set to
        its outer value, or to the mean of the groups if it has never landed. A parameter that is
        newly trainable, replaced or reshaped starts from group 0's value without momentum. Rounds
        restart unless all names and sizes are unchanged. The gradients and inner optimizer state of
        reshaped parameters are discarded.

        Args:
            inner_optimizers: The optimizers of your training loop, if you have created new ones.
                Create them before you call this method.
        """
        self._require_open("recut()")
        self._require_no_site()
        fragmented_model = self.fragmented_model
        settings = self.rounds.settings
        if inner_optimizers is not None:
            fragmented_model.use_optimizers(inner_optimizers)
        partition = fragmented_model.cut_for_recut(settings)
        landed = self.history.land(self.loop.land_all(self.inner_steps))
        fragmented_model.begin_recut(partition, settings)
        yield
        recut = fragmented_model.recut
        assert recut is not None, "it has just begun"
        recut = recut.agreed(self.topology.world.all_gather_object(recut.names))
        if recut.needs_mean:
            mean = yield from turns_of(self.group_mean)
            recut = recut.with_mean(fragmented_model.view.named(mean))
        self.rounds.end_recut(recut, self.inner_steps)
        return landed

    def _require_no_site(self) -> None:
        if self.site is not None:
            raise ValueError(
                "The run config fixes a site's fragments and settings. While the site is"
                " training, you cannot change settings or freeze, unfreeze or replace parameters."
                " Start a new run from this run's outer model."
            )

    def report(self) -> dict[str, float]:
        """Returns the current counters and the numeric settings of outer steps and landings.

        ``flights_dropped`` is the number of flights that were discarded when a run continued with
        different groups or settings. ``bytes_sent`` and ``bytes_received`` are the numbers of bytes
        that this rank sent to other groups and received from them. ``exposed_wait_s`` is the time
        that training spent waiting for fragments, and ``in_flight_s`` is the total time that
        fragments were in flight.
        """
        return {**asdict(self.history.counts), **self.rounds.settings.numbers}


def _require_no_warmup(state: Mapping[str, Any]) -> None:
    """Refuses a state that an earlier version saved during its warm-up."""
    steps = state["counts"]["inner_steps"]
    warmup_steps = state.get("warmup_steps", 0)
    if steps < warmup_steps:
        raise ValueError(
            f"This state was saved after {steps} inner steps, during a warm-up of {warmup_steps}"
            " steps. This version does not support a warm-up. Complete the warm-up with the"
            " version that saved the state, or restart from the outer parameters (in Lightning"
            " with resume='restart')."
        )
