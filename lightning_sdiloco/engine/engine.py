"""The engine of Streaming DiLoCo for any training loop: the public class, which counts steps and
what landed.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
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
    names_checked,
)
from lightning_sdiloco.algorithm.gossip import Route
from lightning_sdiloco.algorithm.guard import REMEMBERED
from lightning_sdiloco.algorithm.merge import LandingRule
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.reduce import TwoShot
from lightning_sdiloco.algorithm.schedule import DenseBeginning, LaunchSchedule, Schedule
from lightning_sdiloco.algorithm.weighting import Absences, Exclusions, Weighing
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.comm.watch import WorldWatch
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.background import ThreadBackground
from lightning_sdiloco.engine.checkpoint import (
    load,
    place_of,
    require_own_state,
    require_processes,
    save,
)
from lightning_sdiloco.engine.flight import PendingFlight
from lightning_sdiloco.engine.fragments import Landing, Span
from lightning_sdiloco.engine.matrices import DirectionCost, proofs, with_direction
from lightning_sdiloco.engine.outer import storage_for
from lightning_sdiloco.engine.outer_view import GroupMean, LocalValues, OuterView
from lightning_sdiloco.engine.per_rank import extra_state, load_extra_state
from lightning_sdiloco.engine.recut import (
    Recut,
    cut_again,
    follow_in_optimizers,
    say_what_is_cut_again,
    take_over,
)
from lightning_sdiloco.engine.restart import Restart
from lightning_sdiloco.engine.rounds import Federated, Loop, Rounds, keep_until_done
from lightning_sdiloco.engine.shards import unwrapped
from lightning_sdiloco.engine.start import (
    NamedOuter,
    WorkerGroups,
    agreed_fragments,
    align_ranks,
    broadcast,
    cut,
    named_outer,
    require_own_group,
    require_same_settings,
    say_what_averages_twice,
    say_what_trains_little,
    topology_for,
)
from lightning_sdiloco.engine.turns import Turns, alone
from lightning_sdiloco.engine.untrained import first_own
from lightning_sdiloco.engine.weight_copies import WeightCopies
from lightning_sdiloco.memory import give_back_free_memory
from lightning_sdiloco.version import VERSION

_log = logging.getLogger(__name__)

_ADVICE = (
    "Pass group=WorkerGroups(...).process_group to the collectives of a step; gather what you log,"
    " evaluate and save every so many steps only."
)


@dataclass
class Counts:
    inner_steps: int = 0
    launches: int = 0
    landings: int = 0
    flights_dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    exposed_wait_s: float = 0.0
    in_flight_s: float = 0.0


class StreamingDiLoCo:
    """Streaming DiLoCo for any PyTorch training loop (https://arxiv.org/abs/2501.18512).

    Call `step` after every ``optimizer.step()`` and `finish` at the end, in every process. The
    worker groups exchange their outer gradients fragment by fragment, in the background, while
    training goes on. If ``torch.distributed`` is initialised, all ranks must construct it, and
    start from the parameters and buffers of rank 0. Otherwise there is one worker group.

    Args:
        model: The model to train; inside ``DistributedDataParallel`` if a worker group has several
            ranks.
        worker_groups: Number of worker groups (M in the paper); consecutive ranks form a group.
            ``"auto"``: one per process. Or `WorkerGroups`, if you wrapped the model with its
            process group.
        sync_every: Inner steps between two launches of the same fragment (H in the paper).
        overlap_steps: Inner steps from the launch of a fragment to its landing (tau in the paper);
            < ``sync_every``. None: five, or as many as fit into shorter rounds.
        mixing: Share of the local parameters kept on landing (alpha in the paper), or ``"auto"``;
            or a `LandingRule`, such as `Carry`.
        fragments: ``"strided"`` or ``"sequential"``, optionally with the repeated blocks per
            fragment, as in ``"strided:3"`` (by default an eighth of them, from 1 to 3, or more to
            make at most 32 fragments); ``"balanced"``; a number of fragments of equal size; or a
            list of lists of shell-style patterns of names.
        compression: How outer gradients are encoded: a name from ``compression.COMPRESSIONS``, or a
            `Compression`.
        outer_lr: Learning rate of the outer Nesterov SGD. Like ``mixing`` and ``outer_momentum``,
            ``"auto"`` chooses by the number of groups, ``sync_every`` and the compression.
        outer_momentum: Momentum of the outer Nesterov SGD, or ``"auto"``.
        outer_optimizer: A callable from the flat float32 shards, one per fragment, to an
            elementwise optimizer, which replaces the SGD; or an `OuterOptimizer`, with schedule,
            clipping, guard and offload.
        exchange: How outer gradients become their mean in every group: ``"gather"``,
            ``"two_shot"``, ``"auto"``, each optionally with the suffix ``":nccl"``, or a `TwoShot`.
        dense_beginning: A `DenseBeginning`: in the first rounds groups exchange more often. None:
            none.
        schedule: When fragments launch, such as `Selective`; None: every ``sync_every`` inner
            steps.
        weighing: How much each group counts in a mean, as a `Weighing`; None: by the inner steps it
            trained.
        route: Whom each group exchanges with in a round, such as `RandomPairs`; None: all. With it
            groups hold their own outer parameters, and showing the outer model needs `group_mean`.
        untrained: What becomes of buffers and frozen parameters, by patterns of their names:
            ``"mean"``, ``"first"`` or ``"own"``. By default statistics of norms are averaged, other
            buffers are those of the first group, and large ones and frozen parameters are each
            group's own.
        timeout: How long a fragment may be in flight.
        federation: The `Federation` that these ranks, launched on their own, join as a site; None:
            all groups are launched together.
        inner_optimizers: The optimizers of your loop. `save` keeps their state; values in it that
            are not finite are reset, and copies of the weights that they keep follow landings.
        topology: Existing worker groups and process groups to use instead of ``worker_groups``.

    Raises:
        ValueError: If an argument is out of range, the model cannot be cut as asked, or ranks
            differ in either; or if an inner optimizer keeps a copy of the weights that is not in
            its state.
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
        self.requested_settings = requested
        self.settings = self._chosen(requested)
        is_site = federation is not None
        copies = WeightCopies(inner_optimizers)
        parts, device = agreed_fragments(
            self.model, self.settings, self.topology, copies, is_site=is_site
        )
        say_what_averages_twice(inner_optimizers, self.settings, self.topology)
        background = (self.topology.background or ThreadBackground)(device)
        storage = storage_for(device, requested.outer.offload)
        self.rounds = Rounds(
            self.model,
            parts,
            self.settings,
            self.topology,
            storage,
            background,
            inner_optimizers,
            copies,
        )
        self.link = self.rounds.link
        self.requests = self.rounds.requests
        self.view = self._new_view()
        say_what_trains_little(self.rounds.outer_optimizer, self.topology)
        align_ranks(self.model, self.rounds.fragments, self.topology)
        self._require_same_on_all_ranks(parts, device)
        self.site: str | None = None
        self.loop: Loop = self.rounds
        if federation is not None:
            located = federation.located()
            self.site = located.site
            self.loop = located.join(self.rounds, self.topology)
        self.step_span: Span = (0.0, 0.0)
        self.last_landing: Landing | None = None
        self.final_landings = list[Landing]()
        self._absences = Absences(self.topology.num_groups)
        self._direction_cost: DirectionCost | None = None
        is_simulated = self.topology.background is not None
        if self.settings.outer.map and device.type != "cpu" and not is_simulated:
            self._direction_cost = DirectionCost()
        self._counts = Counts()
        self._exclusions = Exclusions()
        self._buffer_exclusions = Exclusions()
        self._unfinished: dict[str, Any] = {}
        self._is_closed = False
        self.watch = WorldWatch(_ADVICE, "inner steps")
        """Watches from one inner step to the next; stopped where Lightning runs the loop."""

    def _require_same_on_all_ranks(
        self, partition: Sequence[Fragment], device: torch.device
    ) -> None:
        described = {"the version of lightning_sdiloco": VERSION, **self.rounds.described()}
        for fragment in self.rounds.fragments:
            for name, kind in fragment.untrained.kinds_by_name().items():
                described[f"the kind of {name!r}"] = kind.value
        described |= proofs(partition, self.settings.outer.map, device)
        require_same_settings(described, self.topology.world)

    def _chosen(self, requested: Settings) -> Settings:
        directed = with_direction(requested, self.model, self.topology)
        return directed.chosen_for(self.topology.num_groups)

    def _cut(self, fragments: Sequence[Fragment]) -> None:
        """Takes the model as it is for the outer one, cut into these fragments."""
        self.rounds.cut(fragments, self.settings)
        self.view = self._new_view()

    def _new_view(self) -> OuterView:
        rounds = self.rounds
        return OuterView(
            self.model, rounds.fragments, self.topology.in_group, rounds.storage, rounds.copies
        )

    def diagnose(self, diagnoses: bool = True) -> None:
        """Sets whether landings say how far the groups agree. All ranks must call it alike, before
        the first step.
        """
        require_same_settings({"diagnostics": str(diagnoses)}, self.topology.world)
        self.rounds.diagnose(diagnoses)

    def join(self) -> None:
        """Waits until a site has the others' state; without it, its first inner steps may be
        wasted.
        """
        self.loop.join(self.inner_steps)

    def step(
        self, *, trained: int = 1, idle: bool = False, samples: int | None = None
    ) -> list[Landing]:
        """Counts an inner step, launches what is due, and lands and returns what is due.

        Args:
            trained: How many micro-batches this rank trained in this inner step. Groups weigh by
                them in the next mean of every fragment, so all must count in the same unit.
            idle: Whether this group did not train in this inner step, for instance because its data
                has ended: the same as ``trained=0``. All ranks of a group must give the same.
            samples: On how many samples this rank trained: a federation weighs its sites by them.
                None: ``trained``.

        Raises:
            ValueError: If ``trained`` is not a whole number of at least 0.
            ExchangeError: If a worker group went away, or did not answer within ``timeout``.
            AgreementError: If the groups hold different outer parameters, or one stays not finite.
        """
        return alone(self.stepping(trained=trained, idle=idle, samples=samples))

    def stepping(
        self, *, trained: int = 1, idle: bool = False, samples: int | None = None
    ) -> Turns[list[Landing]]:
        """Does what `step` does, and pauses between launches and landings."""
        self._require_open("step()")
        self.watch.end()
        trained = 0 if idle else trained
        if not isinstance(trained, int) or trained < 0:
            raise ValueError(
                f"trained={trained!r} is not a number of micro-batches: it must be a whole number,"
                " 0 if the group was idle. Give 1 for an inner step without micro-batches, or leave"
                " it out."
            )
        self._counts.inner_steps += 1
        ended = self.step_span[1]
        began = time.perf_counter()
        self.step_span = began, began
        if trained:
            self.loop.trained(trained, trained if samples is None else samples)
            self.rounds.step_clock.note(ended, began)
        self._counts.launches += self.loop.launch_due(self.inner_steps)
        yield
        landed = self._counted(self.loop.land_due(self.inner_steps))
        self.step_span = began, time.perf_counter()
        self.watch.begin(self.topology)
        return landed

    def _counted(self, landings: Iterable[Landing]) -> list[Landing]:
        landed = [self._noted(landing) for landing in landings]
        self._counts.landings += len(landed)
        return landed

    def _noted(self, landing: Landing) -> Landing:
        counts = self._counts
        counts.exposed_wait_s += landing.exposed_wait_s
        counts.in_flight_s += landing.in_flight_s
        counts.bytes_sent += landing.bytes_sent
        counts.bytes_received += landing.bytes_received
        if self.site is None and self.topology.rank == 0:
            self._say_who_is_left_out(landing)
            self._say_whose_buffers_are_wrong(landing)
        if self._direction_cost is not None and self.topology.rank == 0:
            mapping_s = landing.seconds("outer_step")
            self._direction_cost.note(landing.fragment, time.perf_counter(), mapping_s)
        self._absences.count(landing.launched_at, landing.landed_at, landing.left_out)
        self.last_landing = landing
        return landing

    def _say_who_is_left_out(self, landing: Landing) -> None:
        guard = (
            "outlier_guard"
            if self.settings.weighing is None
            else f"weighing={self.settings.weighing!r}"
        )
        norms = ", ".join(f"{norm:.3g}" for norm in landing.group_norms)
        too_long = f"is too long for {guard} (norms by group: {norms})"
        left_out = dict.fromkeys(landing.left_out, "is not finite") | dict.fromkeys(
            landing.outlying, too_long
        )
        for group, reason in left_out.items():
            if self._exclusions.begins(group, landing.launched_at, self.settings.sync_every):
                _log.warning(
                    "The outer gradient of worker group %d %s: the mean of fragment %d, launched"
                    " after inner step %d, leaves that group out, and the group takes the outer"
                    " parameters. Look at its data, loss and learning rate. Until it has counted"
                    " for %d rounds, only Landing and the metrics sdiloco/groups_left_out and"
                    " sdiloco/groups_outlying tell of more.",
                    group,
                    reason,
                    landing.fragment,
                    landing.launched_at,
                    REMEMBERED,
                )

    def _say_whose_buffers_are_wrong(self, landing: Landing) -> None:
        exclusions = self._buffer_exclusions
        for group in landing.wrong_buffers:
            if exclusions.begins(group, landing.launched_at, self.settings.sync_every):
                _log.warning(
                    "The buffers of worker group %d are too large for outlier_guard: those of"
                    " fragment %d, launched after inner step %d, are left out of the mean, and the"
                    " group takes the outer ones. Look at its data. Until they have counted for %d"
                    " rounds, only Landing and the metric sdiloco/groups_wrong_buffers tell of"
                    " more.",
                    group,
                    landing.fragment,
                    landing.launched_at,
                    REMEMBERED,
                )

    def finish(self) -> list[Landing]:
        """Ends training: lands what is in flight, takes the mean of all local progress, and leaves
        the outer model.

        Every fragment then takes the plain mean of the groups' local parameters, in float32,
        without outer learning rate and momentum. The model ends with the outer parameters, the same
        bits in every group, and without gradients. Returns what landed, without the final exchange.
        A second call does nothing.
        """
        return alone(self.finishing())

    def finishing(self) -> Turns[list[Landing]]:
        """Does what `finish` does, and pauses when all flights have landed, and after every launch
        of the final exchange.
        """
        if self.is_finished:
            return []
        landed = self._land_at_end()
        yield
        for landing in self.loop.final_exchange(self.inner_steps):
            if landing is not None:
                self.final_landings.append(self._noted(landing))
            yield
        self.view.end(is_written=self.rounds.is_ending)
        self.view.write_untrained(self.first_own())
        self.close()
        return landed

    def _land_at_end(self) -> list[Landing]:
        self.rounds.require_coverage()
        # See [Note: memory at the end].
        self.model.zero_grad()
        self.rounds.copies.freeze()
        give_back_free_memory()
        self._unfinished = self._state()
        if self.site is None:
            self.rounds.begin_end()
        # What a site lands until its end goes into its records, too.
        self.view.begin_end(keeps_parameters=not self.rounds.is_ending)
        return self._counted(self.loop.land_all(self.inner_steps))

    def leave(self) -> list[Landing]:
        """Ends training before its end: what a site holds is sent, and counts. Returns what
        landed; see `close`.
        """
        landed = self._counted(self.loop.leave(self.inner_steps))
        self.close()
        return landed

    def close(self) -> None:
        """Ends the background. What is in flight is lost; `finish` calls it when nothing is."""
        self._is_closed = True
        self.loop.close()
        self.rounds.background.close()
        self.rounds.close()
        self.topology.close()

    def _require_open(self, called: str) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"{called} was called after finish() or close(). Make a new StreamingDiLoCo to"
                " train."
            )

    def is_training(self, model: nn.Module) -> bool:
        """Returns whether this engine trains that model and has not finished, so that groups hold
        different values.
        """
        return self.model is model and not self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called: the model holds the outer parameters."""
        return self.view.has_ended

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land, by `steps_in_rounds`, if no other schedule was given."""
        return self.rounds.schedule

    @property
    def launches_next(self) -> tuple[int, ...]:
        """The fragments that launch after the next inner step, in order; not for a site."""
        return self.rounds.due(self.inner_steps + 1)

    @property
    def round(self) -> int:
        """How many outer steps the first fragment has made; those of a dense beginning count as
        one.
        """
        return self.rounds.fragments[0].outer.rounds

    @property
    def is_over(self) -> bool:
        """Whether the run has ended for all its sites."""
        return self.loop.is_over

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments: names and sizes in bytes of their parameters."""
        return self.rounds.partition

    @property
    def inner_steps(self) -> int:
        """Inner steps so far."""
        return self._counts.inner_steps

    @property
    def steps_in_rounds(self) -> int:
        """Inner steps since the rounds began: what the schedule counts. Rounds restart with other
        fragments.
        """
        return self.inner_steps - self.rounds.began_at

    @property
    def has_landed(self) -> bool:
        """Whether every fragment has landed once: until then the outer model holds untrained
        values.

        Until then evaluate and save `group_mean`.
        """
        if not all(fragment.outer.rounds for fragment in self.rounds.fragments):
            return False
        return self.site is not None or self.steps_in_rounds >= self.schedule.first_round

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The fragments in flight, in the order of their launch."""
        return tuple(flight.launch.fragment for flight in self.rounds.flights)

    def evaluate(
        self,
        mean: GroupMean | None = None,
        own: Mapping[str, Tensor] | None = None,
        *,
        watches: bool = False,
    ) -> AbstractContextManager[None]:
        """Shows the outer model inside a ``with`` block, which may be nested, then the local one
        again, bit for bit.

        In-group collective. Given a mean from `group_mean`, it shows that and waits for no other
        group. Without one, on a route that does not share, it shows this group's outer parameters.

        Args:
            mean: What `group_mean` returned; None: the outer model.
            own: What `first_own` returned; None: each group shows what it keeps of untrained state
                itself.
            watches: Whether `OuterView.rewritten` will be called inside the block.
        """
        return self.view.shown(mean, own, watches=watches)

    def first_own(self) -> dict[str, Tensor]:
        """Returns what the first group keeps of untrained state, by name, where this rank holds
        something else.

        All ranks must call it. Give it to `evaluate`, so that all groups show one consistent state.
        """
        states = [fragment.untrained for fragment in self.rounds.fragments]
        values = first_own(states, self.topology)
        for state in states:
            values.update(state.own.shown_of_first())
        return values

    def show_outer(self, mean: GroupMean | None = None) -> None:
        """Replaces the local model with the outer model, or a mean, as `evaluate` does."""
        self.view.show(mean)

    def show_local(self) -> None:
        """Puts the local parameters and buffers back."""
        self.view.show_local()

    @torch.no_grad()
    def set_outer(self, names: Collection[str] | None = None) -> None:
        """Makes the model that rank 0 holds now the outer model of all groups. All ranks must call
        it together.

        Call it after you have overwritten weights, for example with those of a better epoch. What
        is in flight is dropped in all groups, and so is the outer momentum; the inner optimizers
        keep their state.

        Args:
            names: The parameters that you have overwritten; None: all, and the buffers that travel.

        Raises:
            ValueError: If the model has no such trainable parameter, or these ranks are a site of a
                federation.
        """
        self._require_open("set_outer()")
        if self.site is not None:
            raise ValueError(
                "The outer model of a federation changes by its records alone: a site cannot"
                " overwrite weights while it trains. Found another run, from the weights that you"
                " want."
            )
        fragments = self.rounds.fragments
        trainable_names = {name for fragment in fragments for name in fragment.layout.names}
        chosen = trainable_names if names is None else set(names)
        unknown = sorted(chosen - trainable_names)
        if unknown:
            raise ValueError(
                f"set_outer was given {unknown[0]!r}, which is no trainable parameter of the model."
            )
        self._counts.flights_dropped += self.rounds.drop_flights()
        self.rounds.reshard()
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
        self.view.keep(chosen)
        if names is None:
            self.view.keep_untrained()

    def group_mean(self) -> GroupMean:
        """Returns the mean of what the groups hold now, as `finish` would take it. Does not change
        training.

        All ranks must call it. Until `has_landed`, evaluate this.
        """
        return alone(self.averaging())

    def averaging(self) -> Turns[GroupMean]:
        """Does what `group_mean` does, and pauses after every launch."""
        self._require_open("group_mean()")
        gathered: list[Tensor] = []
        untrained: list[Mapping[int, Tensor]] = []

        def receive(flight: PendingFlight) -> None:
            arrival = flight.pending.result()
            keep_until_done([*arrival.gathered, *arrival.untrained.tensors])
            self._counts.bytes_sent += arrival.landing.bytes_sent
            self._counts.bytes_received += arrival.landing.bytes_received
            gathered.append(self.rounds.storage.store(arrival.gathered[0]))
            untrained.append(arrival.untrained.outer)

        with self.view.hidden():
            yield from self.rounds.average_now(self.inner_steps, receive)
            first_values = self.first_own()
        return GroupMean(gathered, untrained, first_values)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters by name, in float32 and on the host, the same on every rank.

        After `finish` it reads them from the model; see `OuterView.keep_outer`.

        Collective within a worker group until `finish`; afterwards too, if ranks hold parts of the
        parameters. On a route that does not share, it returns the mean of the groups, and until
        `finish` all ranks must call it.
        """
        return self.view.named(
            None if self.settings.shares or self._is_closed else self.group_mean()
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns all that this rank needs to resume bit for bit: plain dicts, lists, numbers, and
        tensors on the host.

        It includes what is in flight, and extra state of modules as these return it. After `finish`
        it is the state from before, from which a longer run continues. Taking it changes nothing.
        On the CPU its tensors may be the engine's own: do not write to them.
        """
        return {**(self._unfinished or self._state()), "local": self.view.local_values()}

    def _state(self) -> dict[str, Any]:
        """Returns what `state_dict` does, without the local values."""
        return {
            "counts": asdict(self._counts),
            "requests": self.requests.bits,
            **self._absences.state_dict(),
            "rank": place_of(self.topology),
            "settings": self.settings.saved(),
            "extra_state": extra_state(self.model),
            **self.rounds.copies.state_dict(),
            **self.loop.state_dict(),
            **self.rounds.records(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the state of an engine with the same settings, model and rank. All ranks
        must call it.

        Settings that are ``"auto"`` take their numbers from the state. The state of another rank,
        other fragments, or another outer optimizer is refused.
        """
        require_own_state(state, self.topology)
        _require_no_warmup(state)
        settings = self.requested_settings.taken_from(state["settings"])
        if settings != self.settings:
            self._require_no_site()
            self.settings = settings
            self._cut(cut(self.model, settings).fragments)
        self.rounds.load_records(state)
        # First, because hooks of a module may restore parameters with its extra state.
        load_extra_state(self.model, state["extra_state"])
        self.view.load_local(LocalValues(**state["local"]))
        self.rounds.copies.load_state_dict(state)
        self.loop.load_state_dict(state)
        self._absences.load_state_dict(state)
        self._counts = Counts(**state["counts"])
        self.requests.bits = state["requests"]

    def save(self, path: str | PathLike[str]) -> None:
        """Saves all that a run needs to resume bit for bit, including what is in flight. All ranks
        must call it.

        ``path`` is an ordinary file whose ``state_dict`` holds the outer parameters, or until
        `has_landed` the mean of the groups. A folder beside it has a file for every rank: state of
        engine and ``inner_optimizers``, local parameters, extra state of modules, and random
        numbers.
        """
        require_processes(self.topology)
        is_trained = self.has_landed or self.is_finished
        outer = self.outer_state_dict() if is_trained else self.view.named(self.group_mean())
        save(
            str(path),
            self.topology,
            self.settings,
            self.state_dict(),
            outer,
            self.rounds.inner_optimizers,
        )

    def load(self, path: str | PathLike[str]) -> None:
        """Resumes where `save` was called; refused on all ranks if settings, ranks or files
        differ.
        """
        self.load_state_dict(
            load(str(path), self.topology, self.requested_settings, self.rounds.inner_optimizers)
        )

    @torch.no_grad()
    def restart(self, restart: Restart) -> None:
        """Restarts the rounds from an earlier run's outer state, with any groups and fragments.
        All ranks call it.
        """
        self._counts = Counts(**restart.counts)
        landed = {
            name: parameter for name, parameter in restart.parameters.items() if parameter.rounds
        }
        self.rounds.begin(NamedOuter(landed, restart.untrained), restart.weighed, self.inner_steps)
        self.view.write_outer(stays=True)

    @torch.no_grad()
    def choose(self, settings: Settings) -> None:
        """Continues as if these settings had held from the start. All ranks must call it, before
        any launch is due.
        """
        self._require_no_site()
        self.rounds.require_no_launch(self.inner_steps, settings)
        before = self.rounds.fragments
        weighed = self.rounds.weighed()
        began_at = self.rounds.began_at
        outer = named_outer(before, self.topology.in_group)
        self.requested_settings = settings
        self.settings = self._chosen(settings)
        self._cut(cut(self.model, settings).fragments)
        self.rounds.begin(outer, weighed, began_at)
        for fragment in self.rounds.fragments:
            fragment.weight = before[0].weight

    def has_other_parameters(self) -> bool:
        """Returns whether parameters were frozen, became trainable or were replaced since the
        model was cut.
        """
        return not self.rounds.cut_model.is_same()

    def has_new_parameters(self) -> bool:
        """Returns whether parameters are trainable that are in no fragment, or are there in
        another shape.
        """
        return bool(self.rounds.cut_model.new())

    def recut(self, inner_optimizers: Sequence[Optimizer] | None = None) -> list[Landing]:
        """Cuts the model again after parameters were frozen, became trainable or were replaced. All
        ranks must call it.

        Lands what is in flight, and returns it. A newly frozen parameter takes its outer value, or
        the mean of the groups if it never landed. A newly trainable one, another object under the
        same name, or one of another shape starts from group 0's value without momentum. Rounds
        restart, unless names and sizes are the same. Of reshaped parameters, gradients and the
        state of inner optimizers are dropped.

        Args:
            inner_optimizers: The optimizers of your loop, if you made others. Make them before.
        """
        landed, recut = self.begin_recut(inner_optimizers)
        recut = recut.agreed(self.topology.world.all_gather_object(recut.names))
        self.end_recut(recut, self.group_mean() if recut.needs_mean else None)
        return landed

    @torch.no_grad()
    def begin_recut(
        self, inner_optimizers: Sequence[Optimizer] | None = None
    ) -> tuple[list[Landing], Recut]:
        """Does the first half of `recut`: refuses what cannot be cut again, and lands every
        fragment in flight. Returns the landings, and what becomes of the outer state, as far as
        this rank knows.
        """
        self._require_open("recut()")
        if self.view.is_shown:
            raise RuntimeError(
                "recut() was called while the outer model is shown. Call recut() outside"
                " evaluate()."
            )
        self._require_no_site()
        if not self.settings.shares:
            raise ValueError(
                "Parameters were frozen, became trainable or were replaced since training began."
                f" route={self.settings.route!r} cannot follow: groups hold their own outer"
                " parameters, and a frozen one would stay different. Choose what is trainable"
                " before training, and train in several fits."
            )
        rounds = self.rounds
        if inner_optimizers is not None:
            self.use_optimizers(inner_optimizers)
        partition = cut_again(rounds.cut_model, rounds.fragments, self.settings, self.topology)
        for fragment in rounds.fragments:
            fragment.let_go()
        landed = self._counted(self.loop.land_all(self.inner_steps))
        rounds.reshard()
        outer = named_outer(rounds.fragments, self.topology.in_group)
        recut = Recut.of(rounds.cut_model, partition, rounds.fragments, outer, self.settings)
        return landed, recut

    def use_optimizers(self, inner_optimizers: Sequence[Optimizer]) -> None:
        """Takes other inner optimizers than those that the engine was made with; see `recut`."""
        self.rounds.use_optimizers(inner_optimizers)
        self.view = self._new_view()

    @torch.no_grad()
    def end_recut(self, recut: Recut, mean: GroupMean | None) -> None:
        """Does the second half of `recut`, after all ranks have agreed. ``mean`` is that of the
        groups, if the recut needs one.
        """
        if mean is not None:
            recut = recut.with_mean(self.view.named(mean))
        take_over(self.rounds.fragments, recut, self.topology)
        rounds = self.rounds
        is_first_rank = self.topology.rank == 0
        if is_first_rank:
            say_what_is_cut_again(
                recut, rounds.cut_model, restarts=recut.fragments != rounds.partition
            )
        rounds.copies.renew(recut.new)
        follow_in_optimizers(recut, rounds.cut_model, rounds.inner_optimizers, says=is_first_rank)
        rounds.cut_again(recut, self.settings, self.inner_steps)
        self.view = self._new_view()

    def _require_no_site(self) -> None:
        if self.site is not None:
            raise ValueError(
                "A site's fragments and settings are fixed by the run config: while it trains,"
                " parameters cannot be frozen, become trainable or be replaced, and settings cannot"
                " change. Found another run, from the outer model of this one."
            )

    def report(self) -> dict[str, float]:
        """Returns what happened so far, and the numbers of outer step and landing.

        ``flights_dropped`` counts flights lost when a run continued with other groups or settings.
        ``bytes_sent`` and ``bytes_received`` count this rank's bytes to and from other groups.
        ``exposed_wait_s`` is the time training waited for fragments, and ``in_flight_s`` the time
        these were in flight, added up.
        """
        return {**asdict(self._counts), **self.settings.numbers}


def _require_no_warmup(state: Mapping[str, Any]) -> None:
    """Refuses the state of an earlier version that was saved while groups averaged their
    gradients.
    """
    steps = state["counts"]["inner_steps"]
    warmup_steps = state.get("warmup_steps", 0)
    if steps < warmup_steps:
        raise ValueError(
            f"This state was saved after {steps} inner steps, inside a warm-up of {warmup_steps},"
            " which this version no longer has. Train to its end with the version that saved it, or"
            " restart from the outer parameters (in Lightning with resume='restart')."
        )
