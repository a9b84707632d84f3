"""Algorithm 2 of Streaming DiLoCo (arXiv 2501.18512): which fragments launch and land after an
inner step.

`Rounds` is the loop for worker groups that are launched together. A federation, from above, has its
own behind the same methods, `Loop`: what is due there, records say.

[Note: the mean of the groups] Evaluation may want the plain mean of the local values, and so does
the end of training. All fragments then fly without outer optimizer, error feedback and chance, in
float32, with all buffers. They go through the background, behind what is in flight there, so the
ranks send everything in the same order, and the groups notice if one of them is somewhere else.

[Note: memory at the end] The end of training takes no more memory than its rounds, because it
changes the model and no record: a longer run would continue from the records. The gradients go
first. Local parameters are copied in their place, fragment by fragment, when the end first writes
to them. Of the mean, as many fragments fly at once as in a round, and what is in the model is kept
nowhere else.

[Note: the dense beginning] Groups that train alone from the start lose much of what they do, the
more of them there are: each takes large steps on the gradients of a small batch. In the first
rounds they exchange every few inner steps, in the background as always. Whether a launch is one of
these follows from its inner step alone, and in a federation from the round of the record. Rounds
that restart have what is left of it. The outer state counts all these rounds together as one, the
first of an ``lr_schedule``, so a record needs nothing more to resume, or to be passed on.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_sdiloco.algorithm.config import Settings, read_settings
from lightning_sdiloco.algorithm.gossip import Leg, Route
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.schedule import Every, Heard, LaunchSchedule, Schedule
from lightning_sdiloco.algorithm.weighting import Weighed
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.background import Background
from lightning_sdiloco.engine.flight import PendingFlight, Synchronizer, completed
from lightning_sdiloco.engine.fragments import (
    Arrival,
    FragmentState,
    Landing,
    Launch,
    Purpose,
    fragments_of,
)
from lightning_sdiloco.engine.inner_optimizers import InnerOptimizers, on_all_ranks
from lightning_sdiloco.engine.matrices import with_direction
from lightning_sdiloco.engine.measure import LinkRate, StepClock
from lightning_sdiloco.engine.outer import OuterStorage, ShardOptimizer
from lightning_sdiloco.engine.outer_view import OuterView
from lightning_sdiloco.engine.recut import (
    Recut,
    cut_again,
    follow_in_optimizers,
    say_what_is_cut_again,
    take_over,
)
from lightning_sdiloco.engine.shards import CutModel, digest, local, sharded_modules, trainable
from lightning_sdiloco.engine.start import (
    NamedOuter,
    cut,
    named_outer,
    require_same_fragments,
    require_same_settings,
    start_from,
)
from lightning_sdiloco.memory import SparePages

Received = TypeVar("Received")

# For each value: outer gradient, outer parameters and momentum, as much as a flight has that waits
# to land.
_KEPT_BYTES = 12


class Loop(Protocol):
    """What happens after an inner step, with all that train together; it has the methods of
    `Rounds`.

    Attributes:
        requested: What ranks ask of each other with this inner step, where that needs no launch.
        is_over: Whether training has ended everywhere.
    """

    @property
    def requested(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    def join(self, step: int) -> None: ...

    def trained(self, micro_batches: int, samples: int) -> None: ...

    def launch_due(self, step: int) -> int: ...

    def land_due(self, step: int) -> Iterator[Landing]: ...

    def land_all(self, step: int) -> Iterator[Landing]: ...

    def leave(self, step: int) -> Iterator[Landing]: ...

    def final_exchange(self, step: int) -> Iterator[Landing | None]: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RequestBits:
    """What this rank asks of all groups, as up to 16 bits: the `Landing` of the next launch shows
    them to all. Signal handlers may ask at any moment.
    """

    def __init__(self) -> None:
        self.bits = 0

    def ask(self, bits: int) -> None:
        self.bits |= bits

    def withdraw(self, bits: int) -> None:
        """Withdraws requests that have not been launched yet."""
        self.bits &= ~bits

    def take(self) -> int:
        """Returns what was asked since the last launch took it along."""
        taken = self.bits
        # Requests that a signal handler adds in the meantime stay.
        self.withdraw(taken)
        return taken


class Federated(Protocol):
    """A federation as the engine sees it: these ranks are a site of it, whose loop follows its
    rules.
    """

    @property
    def site(self) -> str | None: ...

    def located(self) -> "Federated":
        """Returns it as seen from this host, with the name of its site."""
        ...

    def join(self, rounds: "Rounds", topology: Topology) -> Loop:
        """Joins with a model that is cut, and returns the loop."""
        ...


class Rounds:
    """Launches and lands the fragments of a model in all worker groups alike, without asking each
    other what is due.

    Attributes:
        requests: What this rank sends to all groups with the next launch.
        flights: What is in flight, in the order of the launches.
        began_at: The inner step after which the rounds began.
        is_ending: Whether landings change the model alone; see [Note: memory at the end].
        requested_settings: The settings as they were given, some of them ``"auto"``.
        partition: How the model is cut. `cut` sets it, as it does ``settings``, ``cut_model``,
            ``schedule`` and ``view``.
        recut: The new cut on which the groups are about to agree.
    """

    partition: tuple[Fragment, ...]
    settings: Settings
    cut_model: CutModel
    schedule: Schedule
    view: OuterView
    _launches: LaunchSchedule
    _route: Route | None
    _codec: Compression
    _synchronizer: Synchronizer

    requested = 0
    is_over = False

    def __init__(
        self,
        model: nn.Module,
        partition: Sequence[Fragment],
        requested: Settings,
        settings: Settings,
        topology: Topology,
        storage: OuterStorage,
        background: Background,
        inner: InnerOptimizers,
    ) -> None:
        self.model = model
        self.requested_settings = requested
        self.storage = storage
        self.background = background
        self.inner = inner
        self.link = LinkRate()
        self.step_clock = StepClock()
        self.requests = RequestBits()
        self.is_ending = False
        self.began_at = 0
        self.flights: list[PendingFlight] = []
        self.fragments: list[FragmentState] = []
        self.recut: Recut | None = None
        self._topology = topology
        self._diagnoses = False
        self._sharded = sharded_modules(model)
        # The schedule's memory of the landings since the rounds began.
        self._schedule_state: Mapping[str, Any] = {}
        # The outer gradient of a flight and the state that it replaces serve the next flight.
        self._spare: SparePages | None = None
        self.cut(partition, settings)

    def cut(self, partition: Sequence[Fragment], settings: Settings) -> None:
        """Takes the model as it is for the outer one, cut into these fragments."""
        self.partition = tuple(partition)
        self.settings = settings
        self._launches = settings.schedule or Every()
        self._route = None if settings.shares else settings.routing
        self._codec = settings.codec
        self._begin_at(0)
        self.fragments = fragments_of(
            self.model, partition, settings, self._topology, self.storage, self.fragments
        )
        longest = max(fragment.layout.length for fragment in self.fragments)
        is_on_host = self.storage.device.type == "cpu"
        self._spare = SparePages(_KEPT_BYTES * longest) if is_on_host else None
        self.cut_model = CutModel(self.model)
        self._watch_copies()
        self.view = self._new_view()
        self._synchronizer = Synchronizer(self.fragments, self._topology, settings, self._diagnoses)

    def use_optimizers(self, inner_optimizers: Sequence[Optimizer]) -> None:
        """Takes other inner optimizers, which may keep other copies of the weights."""
        if list(inner_optimizers) != list(self.inner.optimizers):
            self.inner = InnerOptimizers(inner_optimizers)
            self._watch_copies()
            self.view = self._new_view()

    def _watch_copies(self) -> None:
        copies = self.inner.copies
        copies.watch(trainable(self.model))
        for fragment in self.fragments:
            fragment.layout.copies_of = copies.of

    def _new_view(self) -> OuterView:
        copies = self.inner.copies
        return OuterView(self.model, self.fragments, self._topology, self.storage, copies)

    def diagnose(self, diagnoses: bool = True) -> None:
        """Sets whether landings say how far the groups agree. All ranks must call it alike, before
        the first step.
        """
        require_same_settings({"diagnostics": str(diagnoses)}, self._topology.world)
        self._diagnoses = diagnoses
        self._synchronizer.diagnoses = diagnoses

    def begin(self, outer: NamedOuter, weighed: Weighed, began_at: int) -> None:
        """Begins the rounds from other outer state, by name. In-group collective."""
        start_from(self.fragments, outer, self._topology.in_group)
        weighing = self.settings.aggregation
        text = self.settings.weighing_text
        groups = self._topology.num_groups
        for fragment in self.fragments:
            fragment.weighing = weighed.state_for(fragment.layout.names, weighing, text, groups)
        self._begin_at(began_at)

    def weighed(self) -> Weighed:
        """Returns what is known of all groups, for rounds that begin again."""
        states = {tuple(fragment.layout.names): fragment.weighing for fragment in self.fragments}
        return Weighed(self.settings.weighing_text, self._topology.num_groups, states)

    @torch.no_grad()
    def choose(self, requested: Settings, step: int) -> None:
        """Continues after an inner step as if these settings had held from the start. All ranks
        must call it, before any launch is due.
        """
        self._require_no_launch(step, requested)
        before = self.fragments
        weighed = self.weighed()
        began_at = self.began_at
        outer = named_outer(before, self._topology.in_group)
        self.requested_settings = requested
        chosen = chosen_settings(requested, self.model, self._topology)
        self.cut(cut(self.model, chosen).fragments, chosen)
        self.begin(outer, weighed, began_at)
        for fragment in self.fragments:
            fragment.weight = before[0].weight

    def _require_no_launch(self, step: int, settings: Settings) -> None:
        """Refuses to choose other settings after an inner step, unless no launch was or would have
        been due by then.
        """
        steps = step - self.began_at
        first = self.schedule.first_launch
        if self.flights or steps >= min(first, settings.schedule_of(1).first_launch):
            raise RuntimeError(
                f"choose() was called after {steps} inner steps with"
                f" sync_every={settings.sync_every}. Settings can be chosen only before the first"
                f" launch: before inner step {first}."
            )

    def cut_for_recut(self) -> tuple[Fragment, ...]:
        """Cuts the model as it is now, and lets go of what the fragments no longer hold. Refuses
        what cannot be cut again.
        """
        if self.view.is_shown:
            raise RuntimeError(
                "recut() was called while the outer model is shown. Call recut() outside"
                " evaluate()."
            )
        if not self.settings.shares:
            raise ValueError(
                "Parameters were frozen, became trainable or were replaced since training began."
                f" route={self.settings.route!r} cannot follow: groups hold their own outer"
                " parameters, and a frozen one would stay different. Choose what is trainable"
                " before training, and train in several fits."
            )
        partition = cut_again(self.cut_model, self.fragments, self.settings, self._topology)
        for fragment in self.fragments:
            fragment.let_go()
        return partition

    def begin_recut(self, partition: tuple[Fragment, ...]) -> None:
        """Divides the outer state for a new cut, as far as this rank knows; nothing is in flight.
        In-group collective.
        """
        self.reshard()
        outer = named_outer(self.fragments, self._topology.in_group)
        self.recut = Recut.of(self.cut_model, partition, self.fragments, outer, self.settings)

    @torch.no_grad()
    def end_recut(self, recut: Recut, step: int) -> None:
        """Takes the new cut on which all ranks have agreed, with the outer state that remains.
        In-group collective.

        Rounds restart after this inner step. If the fragments are the same, for instance because a
        submodule was replaced by a copy, they continue, and error feedback remains where a fragment
        has its parameters still.
        """
        take_over(self.fragments, recut, self._topology)
        is_first_rank = self._topology.rank == 0
        if is_first_rank:
            restarts = recut.fragments != self.partition
            say_what_is_cut_again(recut, self.cut_model, restarts=restarts)
        self.inner.copies.renew(recut.new)
        optimizers = self.inner.optimizers
        follow_in_optimizers(recut, self.cut_model, optimizers, says=is_first_rank)
        self.recut = None
        before = self.fragments
        partition = self.partition
        weighed = self.weighed()
        began_at = self.began_at
        schedule_state = self._schedule_state
        self.cut(recut.fragments, self.settings)
        for fragment in self.fragments:
            fragment.untrained.expect_unlike({*recut.known, *recut.new, *recut.frozen})
        if self.partition != partition:
            self.begin(recut.outer, weighed, step)
            return
        self.begin(recut.outer, weighed, began_at)
        self._schedule_state = schedule_state
        for fragment, former in zip(self.fragments, before, strict=True):
            fragment.weight = former.weight
            parameters = zip(fragment.layout.parameters, former.layout.parameters, strict=True)
            if all(parameter is former_parameter for parameter, former_parameter in parameters):
                fragment.memory = former.memory
                fragment.tuning = former.tuning
                fragment.residual = former.residual

    def _begin_at(self, step: int) -> None:
        self.began_at = step
        # What the rounds before have in flight arrives, and lands nowhere.
        self.flights = []
        dense = self.settings.dense_beginning
        left = None if dense is None else dense.after(step)
        self.schedule = replace(self.settings.schedule_of(len(self.partition)), dense=left)
        self._schedule_state = self._launches.start(replace(self.schedule, dense=None))

    def drop_flights(self) -> int:
        """Waits for what is in flight and lands none of it. Returns how many flights there were."""
        dropped = len(self.flights)
        for flight in self.flights:
            flight.pending.result()
        self.flights.clear()
        return dropped

    def reshard(self) -> None:
        """Makes FSDP2 drop what it has gathered, before parameters are read or written; see
        `shards.reshard`.
        """
        for module in self._sharded:
            module.reshard()

    def require_coverage(self) -> None:
        """Refuses to go on with a parameter that is trained and in no fragment; see
        `CutModel.require_coverage`.
        """
        self.reshard()
        self.cut_model.require_coverage()

    def local_digests(self) -> dict[str, int]:
        """Returns a digest of what this rank holds of each parameter, by name."""
        digests: dict[str, int] = {}
        for fragment in self.fragments:
            layout = fragment.layout
            for name, parameter in zip(layout.names, layout.parameters, strict=True):
                # One that was reshaped since the cut is another parameter.
                if self.cut_model.former_name(parameter) is not None:
                    digests[name] = digest(local(parameter))
        return digests

    # Algorithm 2

    def join(self, step: int) -> None:
        """All groups begin together."""

    def trained(self, micro_batches: int, samples: int) -> None:
        """Counts an inner step (line 4): all micro-batches weigh the same."""
        for fragment in self.fragments:
            fragment.weight += micro_batches

    @torch.no_grad()
    def launch_due(self, step: int) -> int:
        """Launches the fragments whose turn it is (lines 5 to 7). Returns their number."""
        due = self.due(step)
        if due:
            self.require_coverage()
        for index in due:
            began = time.perf_counter()
            with _recorded("sdiloco::launch"):
                self.start(self._launched(index, step), began)
        return len(due)

    def _launched(self, index: int, step: int) -> Launch:
        """Reads everything that a fragment's flight carries in a round."""
        launch = self.fragments[index].launch(
            step, self._deadline(), Purpose.ROUND, self.requests.take()
        )
        launch = launch._replace(
            step_time=self.step_clock.seconds,
            leg=self._leg(step),
            is_dense=self.schedule.is_dense(step - self.began_at),
        )
        return self.chosen(launch)

    def _leg(self, step: int) -> Leg:
        """Returns the groups with which this one exchanges in a round, itself among them; () for
        all.
        """
        if self._route is None:
            return ()
        topology = self._topology
        number = self._counted_in_rounds(step) // self.settings.sync_every - 1
        for leg in self._route.legs(number, topology.num_groups):
            if topology.group_index in leg:
                return tuple(leg)
        return ()

    def land_due(self, step: int) -> Iterator[Landing]:
        """Lands the flights that were launched ``overlap_steps`` ago (lines 8 to 12), and
        prefetches for the next.
        """
        while self.flights and self._lands_at(self.flights[0].launch) <= step:
            yield self._landed(self.flights.pop(0), step)
        if self.storage.prefetches:
            for index in self.due(step + 1):
                self.fragments[index].prefetch()

    def due(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after an inner step, in order."""
        since = step - self.began_at
        if self.schedule.is_dense(since):
            return self.schedule.launches(since)
        return self._launches.due(self._schedule_state, self._counted_in_rounds(step))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The fragments in flight, in the order of their launch."""
        return tuple(flight.launch.fragment for flight in self.flights)

    @property
    def outer_steps(self) -> int:
        """How many outer steps the first fragment has made; those of a dense beginning count as
        one.
        """
        return self.fragments[0].outer.rounds

    def longest_wait(self, step: int) -> int:
        """Returns how many inner steps it takes at most, from now on, until a request has landed
        with a launch.
        """
        return self._launches.longest_wait(self.schedule, step - self.began_at)

    def _counted_in_rounds(self, step: int) -> int:
        """Returns the inner steps since the first of them that is not counted in the dense
        beginning.
        """
        return step - self.began_at - self.schedule.dense_steps

    def _lands_at(self, launch: Launch) -> int:
        """Returns the inner step after which a flight lands. Flights land in the order of their
        launches.
        """
        return launch.step + self.schedule.overlap_of(launch.step - self.began_at)

    def start(self, launch: Launch, began: float) -> None:
        """Starts the flight of a launch that began at a time."""
        self.flights.append(self._flight_of(launch, began))

    def _flight_of(self, launch: Launch, began: float) -> PendingFlight:
        # Noted before the background may begin.
        launch_span = began, time.perf_counter()
        return PendingFlight(
            launch, self.background.start(self._synchronizer.fly(launch)), launch_span
        )

    def chosen(self, launch: Launch) -> Launch:
        """Chooses in which code a launch is sent, by what this rank alone knows."""
        schedule = self.schedule
        overlap_steps = schedule.overlap_of_round(1) if launch.is_dense else schedule.overlap_steps
        overlap_s = overlap_steps * (launch.step_time or math.nan)
        choice = self._codec.choice(len(launch.gradient), self.link.bytes_per_s, overlap_s)
        return launch._replace(choice=choice) if choice else launch

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.timeout.total_seconds()

    @torch.no_grad()
    def _landed(self, flight: PendingFlight, step: int) -> Landing:
        """Waits for a flight, commits its result (lines 9 to 11), and takes that into the model
        (line 12).
        """
        with _recorded("sdiloco::land"):
            began = time.perf_counter()
            arrival = flight.pending.result()
            wait = began, time.perf_counter()
            launch = flight.launch
            fragment = self.fragments[launch.fragment]
            keep_until_done([*arrival.gathered, arrival.commit.outer.values])
            keep_until_done(arrival.untrained.tensors)
            self.reshard()
            is_round = launch.purpose is Purpose.ROUND
            land = fragment.land_at_end if self.is_ending else fragment.land
            land(arrival, arrival.rule, step - launch.step, final=not is_round)
            if is_round:
                self._note_round(launch, arrival)
            if self._topology.group_index in arrival.landing.wrong_buffers:
                fragment.untrained.write()
            if self._topology.group_index in arrival.landing.left_out:
                self.recover(fragment.index)
            seconds = flight.pending.seconds
            return completed(arrival.landing, flight.launch_span, wait, seconds, step)

    def _note_round(self, launch: Launch, arrival: Arrival) -> None:
        """Tells the link's rate and the schedule what landed."""
        self.link.note(arrival.sends_bytes_per_s)
        landing = arrival.landing
        landed = Heard(
            launch.fragment,
            self._counted_in_rounds(launch.step),
            landing.counted,
            landing.group_norms,
            tuple(arrival.trained),
        )
        self._schedule_state = self._launches.heard(self._schedule_state, landed)

    def recover(self, landed: int) -> None:
        """Takes the outer values wherever this group's are not finite, after a landing. In-group
        collective.
        """
        self.reshard()
        in_group = self._topology.in_group
        is_finite = on_all_ranks([f.layout.is_finite() for f in self.fragments], in_group)
        for fragment in self.fragments:
            if fragment.index == landed:
                fragment.untrained.recover()
                self.inner.recover(fragment.layout.parameters, in_group)
            elif not is_finite[fragment.index]:
                if self.is_ending:
                    fragment.keep_local()
                fragment.write_outer(in_group, stays=True)
                self.inner.recover(fragment.layout.parameters, in_group)

    # The mean of the groups, and the end

    @torch.no_grad()
    def average_now(
        self, step: int, receive: Callable[[PendingFlight], Received], *, ends: bool = False
    ) -> Iterator[Received | None]:
        """Flies every fragment, a few at a time, for the plain mean of the local values.

        ``receive`` waits for a flight and takes what it brings; that, or None, is yielded after
        every launch, so that groups in one process can take turns. Where training ends, flights
        take along what was requested.
        """
        purpose = Purpose.MEAN if self._route is None else Purpose.START
        flights: list[PendingFlight] = self.flights if ends else []
        # In float32 a flight takes four times its fragment's size: a quarter of the model at once,
        # and at the end no more than in a round.
        at_once = _most_in_flight(self.schedule) if ends else max(1, len(self.fragments) // 4)
        # At the end first those whose local parameters are copied already, because they have just
        # landed.
        for fragment in sorted(self.fragments, key=lambda fragment: fragment.kept_local is None):
            received = receive(flights.pop(0)) if len(flights) >= at_once else None
            began = time.perf_counter()
            if ends:
                launch = fragment.launch(step, self._deadline(), purpose, self.requests.take())
            else:
                launch = fragment.read(step, self._deadline(), purpose)
            flight = self._flight_of(launch, began)
            launch = launch.without_values()
            flights.append(replace(flight, launch=launch))
            yield received
        while flights:
            yield receive(flights.pop(0))

    def begin_end(self) -> None:
        """From here on landings change the model and no record; see [Note: memory at the end]."""
        self.is_ending = True
        self._spare = None

    def final_exchange(self, step: int) -> Iterator[Landing | None]:
        return self.average_now(step, lambda flight: self._landed(flight, step), ends=True)

    def land_all(self, step: int) -> Iterator[Landing]:
        while self.flights:
            yield self._landed(self.flights.pop(0), step)

    def leave(self, step: int) -> Iterator[Landing]:
        """Lands nothing: all groups end together, and go on together with what is in flight."""
        return iter(())

    def close(self) -> None:
        """No flight comes for which to keep memory."""
        self._spare = None

    # Checkpoints

    @property
    def outer_optimizer(self) -> ShardOptimizer:
        """The optimizer that steps the shards of all fragments."""
        return self.fragments[0].optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"flights": [flight.launch.state_dict() for flight in self.flights]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Launches again what was in flight: the same values give the same bytes."""
        for saved in state["flights"]:
            began = time.perf_counter()
            outer = self.fragments[saved["fragment"]].load_outer()
            self.start(Launch.of(saved, outer, self._deadline()), began)

    def records(self) -> dict[str, Any]:
        return {
            "rounds_began_at": self.began_at,
            "described": self.outer_optimizer.described,
            "schedule": dict(self._schedule_state),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            **({"link": self.link.last} if self.link.last else {}),
        }

    def _require_same_outer_step(self, saved: Mapping[str, str]) -> None:
        """Refuses a state with another outer optimizer, or another schedule of it."""
        for part, description in self.outer_optimizer.described.items():
            if saved[part] != description:
                raise ValueError(
                    f"The state was saved with another {part}: it was {saved[part]}, now it is"
                    f" {description}. Resume with the one it was saved with."
                )

    @torch.no_grad()
    def load_records(self, state: dict[str, Any]) -> None:
        require_same_fragments(self.fragments, state["fragments"])
        # A state may have been saved before its rounds were chosen, and so before any launch.
        saved_every = read_settings(state["settings"])["sync_every"]
        rounds_are_the_same = saved_every == self.settings.sync_every
        if rounds_are_the_same:
            self._require_same_outer_step(state["described"])
        elif state["counts"]["launches"]:
            raise ValueError(
                f"The state was saved with sync_every={saved_every}, now it is"
                f" {self.settings.sync_every}. Resume with the one it was saved with."
            )
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        # Of a run of an earlier version the rounds began after its warm-up.
        self._begin_at(max(state["rounds_began_at"], state.get("warmup_steps", 0)))
        if rounds_are_the_same:
            self._schedule_state = state["schedule"]
        self.link.last = list(state.get("link", ()))


def chosen_settings(requested: Settings, model: nn.Module, topology: Topology) -> Settings:
    """Returns settings with a direction and numbers that suit model and groups. All ranks must
    call it.
    """
    return with_direction(requested, model, topology).chosen_for(topology.num_groups)


def _most_in_flight(schedule: Schedule) -> int:
    """Returns how many flights there are at once in rounds. A flight lands after the launches of
    the same step.
    """
    most = 0
    for first in {1, schedule.dense_rounds + 1}:
        launches = [
            schedule.launch_of(p, number)
            for number in (first, first + 1)
            for p in range(schedule.fragments)
        ]
        launches.sort()
        for step in launches[: schedule.fragments]:
            until = step + schedule.overlap_of_round(first)
            most = max(most, bisect_right(launches, until) - bisect_left(launches, step))
    return most


def keep_until_done(tensors: Iterable[Tensor]) -> None:
    """Informs an accelerator's allocator that the training stream still reads tensors of the side
    stream.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(
                torch.get_device_module(tensor.device).current_stream(tensor.device)
            )


def _recorded(name: str) -> AbstractContextManager[Any]:
    """Names a part of a profile, where one is taken."""
    return record_function(name) if profiler._is_profiler_enabled else nullcontext()
