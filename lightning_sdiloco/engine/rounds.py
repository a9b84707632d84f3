"""Launches and lands fragments after inner steps, as in Algorithm 2 of Streaming DiLoCo (arXiv
2501.18512).

`Rounds` is the loop for worker groups that are launched together. A federation has its own loop
with the same methods (see `Loop`), in which records determine which fragments are due.

[Note: the mean of the groups] The plain mean of the groups' local values is needed at the end of
training and for some evaluations. To compute this mean, all fragments are launched in float32
together with all buffers, but without the outer optimizer, error feedback or randomness. The
background processes these flights after all earlier flights. All ranks therefore send messages in
the same order, and a group that is at a different point is detected.

[Note: memory at the end] The end of training needs no more memory than a round, plus one fragment
if a flight is in progress. The end changes only the model and not the records, from which a longer
run would continue. Gradients are freed first. The freed memory is then used for copies of the local
parameters, which are made one fragment at a time before the parameters are overwritten. The mean
uses no more simultaneous flights than a round does, and values in the model are not stored a second
time.

[Note: the dense beginning] If many groups train separately from the start, the loss suffers,
because each group takes large steps on the gradients of a small batch. In the first rounds, groups
can therefore exchange every few inner steps. These exchanges also run in the background. The inner
step of a launch determines whether the launch is part of the dense beginning. In a federation, the
round of the record determines this. When rounds restart, they complete the remaining part of the
dense beginning. The outer state counts the whole dense beginning as one round, the first round of
an ``lr_schedule``, so records need no additional state.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd import profiler
from torch.profiler import record_function

from lightning_sdiloco.algorithm.config import Settings, read_settings
from lightning_sdiloco.algorithm.gossip import Leg, Route
from lightning_sdiloco.algorithm.schedule import Every, Heard, Schedule, Timetable
from lightning_sdiloco.algorithm.weighting import Weighed
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.background import Background, Pending
from lightning_sdiloco.engine.flight import Synchronizer
from lightning_sdiloco.engine.fragmented_model import FragmentedModel
from lightning_sdiloco.engine.fragments import Arrival, Landing, Launch, Purpose, Span
from lightning_sdiloco.engine.matrices import with_direction
from lightning_sdiloco.engine.recut import Recut
from lightning_sdiloco.engine.start import (
    NamedOuter,
    cut,
    named_outer,
    require_same_fragments,
    require_same_settings,
    start_from,
)

Received = TypeVar("Received")

# The numbers of inner steps and flights from which the step time and the link rate are computed.
_REMEMBERED_STEPS = 16
_REMEMBERED_FLIGHTS = 3


class Loop(Protocol):
    """A loop that launches and lands fragments after inner steps; see `Rounds` for an
    implementation.

    Attributes:
        requested: The requests that all ranks receive at the current inner step without a launch.
        is_over: Whether training has ended on all ranks.
    """

    @property
    def requested(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    def join(self, step: int, planned_steps: int | None = None) -> None: ...

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
    """This rank's requests to all groups, as up to 16 bits. The next launch sends the requests, and
    all groups receive them in its `Landing`. Signal handlers may add requests at any time.
    """

    def __init__(self) -> None:
        self.bits = 0

    def ask(self, bits: int) -> None:
        self.bits |= bits

    def withdraw(self, bits: int) -> None:
        """Withdraws requests that no launch has sent yet."""
        self.bits &= ~bits

    def take(self) -> int:
        """Returns and withdraws all requests that no launch has sent yet."""
        taken = self.bits
        # Requests that a signal handler adds in the meantime are kept.
        self.withdraw(taken)
        return taken


@dataclass(frozen=True)
class PendingFlight:
    """A flight as the training thread sees it.

    Attributes:
        launch: The data that the launch read.
        pending: The pending result.
        launch_span: The start and end of the launch.
        lands_at: The inner step after which the flight lands. Infinite at a site, where records
            determine when flights land.
    """

    launch: Launch
    pending: Pending[Arrival]
    launch_span: Span
    lands_at: float = math.inf


class Federated(Protocol):
    """The interface that a federation provides to a site's engine."""

    @property
    def site(self) -> str | None: ...

    def located(self) -> "Federated":
        """Returns the federation with the name of this host's site."""
        ...

    def join(self, rounds: "Rounds", topology: Topology) -> Loop:
        """Joins the federation with a divided model and returns the site's loop."""
        ...


class Rounds:
    """The loop for worker groups that are launched together. All groups launch and land fragments
    at the same inner steps without communicating about the schedule.

    Attributes:
        fragmented_model: The model and the records of its fragments.
        requested_settings: The settings as requested, some of which may be ``"auto"``.
        background: The background that runs the flights.
        link: The rate of this rank's link.
        step_clock: The clock that measures the duration of inner steps.
        requests: The requests that this rank sends to all groups with its next launch.
        flights: The flights that have not landed yet, in the order of their launches.
        is_ending: Whether landings change only the model and not the records; see [Note: memory at
            the end]. The engine sets this attribute.
        settings: The settings in effect. ``settings`` and ``timetable`` are set when the model is
            divided.
        timetable: The timetable, which determines when fragments launch and land.
    """

    settings: Settings
    timetable: Timetable
    _route: Route | None
    _codec: Compression
    _synchronizer: Synchronizer

    requested = 0
    is_over = False

    def __init__(
        self,
        fragmented_model: FragmentedModel,
        requested: Settings,
        settings: Settings,
        topology: Topology,
        background: Background,
    ) -> None:
        self.fragmented_model = fragmented_model
        self.requested_settings = requested
        self.background = background
        self.link = LinkRate()
        self.step_clock = StepClock()
        self.requests = RequestBits()
        self.flights: list[PendingFlight] = []
        self.is_ending = False
        self._topology = topology
        self._diagnoses = False
        self._take_cut(settings)
        self._begin_at(0)

    def _take_cut(self, settings: Settings) -> None:
        """Prepares flights for the current fragments of the model."""
        self.settings = settings
        self._route = None if settings.shares else settings.routing
        self._codec = settings.codec
        self._synchronizer = Synchronizer(
            self.fragmented_model.fragments, self._topology, settings, self._diagnoses
        )

    def _cut(self, settings: Settings) -> None:
        """Divides the current model according to the given settings."""
        self.fragmented_model.cut(cut(self.fragmented_model.model, settings).fragments, settings)
        self._take_cut(settings)

    def _begin_at(self, step: int) -> None:
        # Flights of the previous rounds complete but never land.
        self.flights = []
        dense = self.settings.dense_beginning
        dense_left = None if dense is None else dense.after(step)
        schedule = self.settings.schedule_of(len(self.fragmented_model.partition))
        self.timetable = Timetable(
            replace(schedule, dense=dense_left), self.settings.schedule or Every(), step
        )

    def diagnose(self, diagnoses: bool = True) -> None:
        """Sets whether landings report how closely the groups agree. All ranks must call this
        method with the same value before the first step.
        """
        require_same_settings({"diagnostics": str(diagnoses)}, self._topology.world)
        self._diagnoses = diagnoses
        self._synchronizer.diagnoses = diagnoses

    def begin(self, outer: NamedOuter, weighed: Weighed, began_at: int) -> None:
        """Restarts the rounds from the given outer state, which is matched to the fragments by
        name. In-group collective.
        """
        start_from(self.fragmented_model.fragments, outer, self._topology.in_group)
        self._weigh_as(weighed)
        self._begin_at(began_at)

    def _weigh_as(self, weighed: Weighed) -> None:
        weighing = self.settings.aggregation
        text = self.settings.weighing_text
        groups = self._topology.num_groups
        for fragment in self.fragmented_model.fragments:
            fragment.weighing = weighed.state_for(fragment.layout.names, weighing, text, groups)

    def _weighed(self) -> Weighed:
        """Returns the state of the weighing, from which rounds can restart."""
        fragments = self.fragmented_model.fragments
        states = {tuple(fragment.layout.names): fragment.weighing for fragment in fragments}
        return Weighed(self.settings.weighing_text, self._topology.num_groups, states)

    @torch.no_grad()
    def choose(self, requested: Settings, step: int) -> None:
        """Continues as if the given settings had been used from the start. All ranks must call this
        method before the first launch.
        """
        self._require_no_launch(step, requested)
        before = self.fragmented_model.fragments
        weighed = self._weighed()
        outer = named_outer(before, self._topology.in_group)
        self.requested_settings = requested
        self._cut(chosen_settings(requested, self.fragmented_model.model, self._topology))
        self.begin(outer, weighed, self.timetable.began_at)
        for fragment in self.fragmented_model.fragments:
            fragment.weight = before[0].weight

    def _require_no_launch(self, step: int, settings: Settings) -> None:
        """Refuses to change settings if the first launch was already due with either the old or the
        new settings.
        """
        steps = step - self.timetable.began_at
        first = self.timetable.schedule.first_launch
        if self.flights or steps >= min(first, settings.schedule_of(1).first_launch):
            raise RuntimeError(
                f"choose() was called after {steps} inner steps with"
                f" sync_every={settings.sync_every}. Settings can be chosen only before the first"
                f" launch, that is, before inner step {first}."
            )

    @torch.no_grad()
    def end_recut(self, recut: Recut, step: int) -> None:
        """Adopts the new fragments that all ranks have agreed on; see `FragmentedModel.end_recut`.
        Unless the fragments are unchanged, rounds restart after this inner step.
        """
        weighed = self._weighed()
        partition = self.fragmented_model.partition
        self.fragmented_model.end_recut(recut, self.settings)
        self._take_cut(self.settings)
        self._weigh_as(weighed)
        if self.fragmented_model.partition != partition:
            self._begin_at(step)

    def drop_flights(self) -> int:
        """Waits for all flights, discards them and returns how many there were."""
        dropped = len(self.flights)
        for flight in self.flights:
            flight.pending.result()
        self.flights.clear()
        return dropped

    # Algorithm 2

    def join(self, step: int, planned_steps: int | None = None) -> None:
        """Does nothing, because all groups start together."""

    def trained(self, micro_batches: int, samples: int) -> None:
        """Adds the micro-batches of an inner step to the weight of each fragment (line 4)."""
        for fragment in self.fragmented_model.fragments:
            fragment.weight += micro_batches

    @torch.no_grad()
    def launch_due(self, step: int) -> int:
        """Launches all fragments that are due (lines 5 to 7) and returns how many there were."""
        due = self.timetable.due(step)
        if not due:
            return 0
        is_dense = self.timetable.is_dense(step)
        self.fragmented_model.cut_model.require_coverage()
        for index in due:
            began = time.perf_counter()
            with _recorded("sdiloco::launch"):
                launch = self._launched(index, step, is_dense)
                self.flights.append(self._flight_of(launch, began))
        return len(due)

    def _launched(self, index: int, step: int, is_dense: bool) -> Launch:
        """Reads the data for a fragment's flight in a round."""
        launch = self.fragmented_model.fragments[index].launch(
            step, self._deadline(), Purpose.ROUND, self.requests.take()
        )
        launch = launch._replace(
            leg=self._leg(step),
            is_dense=is_dense,
            step_time=self.step_clock.seconds,
        )
        return self.coded(launch)

    def coded(self, launch: Launch) -> Launch:
        """Chooses the encoding of a launch based on this rank's own measurements."""
        schedule = self.timetable.schedule
        overlap_steps = schedule.overlap_of_round(1) if launch.is_dense else schedule.overlap_steps
        overlap_s = overlap_steps * (launch.step_time or math.nan)
        choice = self._codec.choice(len(launch.gradient), self.link.bytes_per_s, overlap_s)
        return launch._replace(choice=choice)

    def _leg(self, step: int) -> Leg:
        """Returns the groups, including this one, that exchange with each other, or () for all
        groups.
        """
        if self._route is None:
            return ()
        topology = self._topology
        number = self.timetable.counted_in_rounds(step) // self.settings.sync_every - 1
        for leg in self._route.legs(number, topology.num_groups):
            if topology.group_index in leg:
                return tuple(leg)
        return ()

    def land_due(self, step: int) -> Iterator[Landing]:
        """Lands all flights that are due (lines 8 to 12) and prefetches outer parameters for the
        next launches.
        """
        while self.flights and self.flights[0].lands_at <= step:
            yield self._landed(self.flights.pop(0), step)
        if self.fragmented_model.storage.prefetches:
            for index in self.timetable.due(step + 1):
                self.fragmented_model.fragments[index].prefetch()

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The fragments in flight, in the order of their launches."""
        return tuple(flight.launch.fragment for flight in self.flights)

    def _flight_of(self, launch: Launch, began: float) -> PendingFlight:
        lands_at = self.timetable.lands_at(launch.step)
        # The span ends before the background can start.
        launch_span = began, time.perf_counter()
        pending = self.background.start(self._synchronizer.fly(launch))
        return PendingFlight(launch, pending, launch_span, lands_at)

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.timeout.total_seconds()

    def arrival_of(self, flight: PendingFlight) -> Arrival:
        """Waits for a flight and returns its result."""
        arrival = flight.pending.result()
        device = self.fragmented_model.storage.device
        if device.type != "cpu":
            # The allocator must know that the training stream still reads tensors of the side
            # stream.
            training_stream = torch.get_device_module(device).current_stream(device)
            for tensor in arrival.tensors:
                if tensor.device.type != "cpu":
                    tensor.record_stream(training_stream)
        return arrival

    @torch.no_grad()
    def _landed(self, flight: PendingFlight, step: int) -> Landing:
        """Waits for a flight, commits its result (lines 9 to 11) and merges it into the model (line
        12).
        """
        with _recorded("sdiloco::land"):
            began = time.perf_counter()
            arrival = self.arrival_of(flight)
            wait = began, time.perf_counter()
            launch = flight.launch
            fragment = self.fragmented_model.fragments[launch.fragment]
            self.fragmented_model.cut_model.reshard()
            is_round = launch.purpose is Purpose.ROUND
            land = fragment.land_at_end if self.is_ending else fragment.land
            land(arrival, step - launch.step, final=not is_round)
            if is_round:
                self.link.note(arrival.sends_bytes_per_s)
                self.timetable.note(
                    Heard(
                        launch.fragment,
                        launch.step,
                        arrival.landing.counted,
                        arrival.landing.group_norms,
                        tuple(arrival.trained),
                    )
                )
            if self._topology.group_index in arrival.landing.wrong_buffers:
                fragment.untrained.write()
            if self._topology.group_index in arrival.landing.left_out:
                self.fragmented_model.recover(fragment.index, is_ending=self.is_ending)
            return completed(
                arrival.landing, flight.launch_span, wait, flight.pending.seconds, step
            )

    # The mean of the groups, and the end

    @torch.no_grad()
    def average_now(
        self, step: int, receive: Callable[[PendingFlight], Received], *, ends: bool = False
    ) -> Iterator[Received | None]:
        """Launches all fragments, a few at a time, to compute the plain mean of the local values.

        ``receive`` waits for a flight, handles its result and returns a value. After each launch,
        either this value or None is yielded so that groups in one process can take turns. At the
        end of training, flights also send requests.
        """
        purpose = Purpose.MEAN if self._route is None else Purpose.START
        flights: list[PendingFlight] = self.flights if ends else []
        fragments = self.fragmented_model.fragments
        # In float32, a flight needs four times as much memory as its fragment. Therefore, only a
        # quarter of the model is in flight at once or, at the end of training, no more than in a
        # round.
        at_once = _most_in_flight(self.timetable.schedule) if ends else max(1, len(fragments) // 4)
        # At the end of training, fragments that have just landed come first, because their local
        # parameters have already been copied.
        for fragment in sorted(fragments, key=lambda fragment: fragment.kept_local is None):
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

    def final_exchange(self, step: int) -> Iterator[Landing | None]:
        return self.average_now(step, lambda flight: self._landed(flight, step), ends=True)

    def land_all(self, step: int) -> Iterator[Landing]:
        while self.flights:
            yield self._landed(self.flights.pop(0), step)

    def leave(self, step: int) -> Iterator[Landing]:
        """Lands nothing, because all groups stop together and later resume the same flights."""
        return iter(())

    def close(self) -> None:
        """Stops the background work and discards flights that have not landed."""
        self.background.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        fragmented_model = self.fragmented_model
        return {
            "flights": [flight.launch.state_dict() for flight in self.flights],
            "rounds_began_at": self.timetable.began_at,
            "described": fragmented_model.outer_optimizer.described,
            "schedule": dict(self.timetable.state),
            "fragments": [fragment.state_dict() for fragment in fragmented_model.fragments],
            **({"link": self.link.last} if self.link.last else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Relaunches the fragments that were in flight. The same values produce the same bytes."""
        for saved in state["flights"]:
            began = time.perf_counter()
            outer = self.fragmented_model.fragments[saved["fragment"]].load_outer()
            launch = Launch.of(saved, outer, self._deadline())
            self.flights.append(self._flight_of(launch, began))

    def _require_same_outer_step(self, saved: Mapping[str, str]) -> None:
        """Refuses a state with a different outer optimizer or outer learning rate schedule."""
        for part, description in self.fragmented_model.outer_optimizer.described.items():
            if saved[part] != description:
                raise ValueError(
                    f"The state was saved with a different {part}. It was {saved[part]} and is"
                    f" now {description}. Resume with the saved setting."
                )

    @torch.no_grad()
    def load_records(self, state: Mapping[str, Any], settings: Settings) -> None:
        """Loads the settings and records of a state, but not its flights; see `load_state_dict`."""
        if settings != self.settings:
            self._cut(settings)
        fragments = self.fragmented_model.fragments
        require_same_fragments(fragments, state["fragments"])
        # A state may have been saved before any launch, when the length of rounds had not been
        # chosen.
        saved_every = read_settings(state["settings"])["sync_every"]
        rounds_are_the_same = saved_every == self.settings.sync_every
        if rounds_are_the_same:
            self._require_same_outer_step(state["described"])
        elif state["counts"]["launches"]:
            raise ValueError(
                f"The state was saved with sync_every={saved_every}, but this run uses"
                f" {self.settings.sync_every}. Resume with the saved value."
            )
        for fragment, saved in zip(fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        # In earlier versions, rounds began after a warm-up.
        self._begin_at(max(state["rounds_began_at"], state.get("warmup_steps", 0)))
        if rounds_are_the_same:
            self.timetable.state = state["schedule"]
        self.link.last = list(state.get("link", ()))


def chosen_settings(requested: Settings, model: nn.Module, topology: Topology) -> Settings:
    """Chooses a direction and numeric settings based on the model and the groups. All ranks must
    call this function.
    """
    return with_direction(requested, model, topology).chosen_for(topology.num_groups)


def _most_in_flight(schedule: Schedule) -> int:
    """Returns the largest number of simultaneous flights, given that launches precede landings in
    each step.
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


def completed(report: Landing, launch: Span, wait: Span, seconds: float, step: int) -> Landing:
    """Completes the report of a flight that took ``seconds`` and is landing now."""
    launched_at = launch[1]
    arrived_at = wait[1]
    ends = [end for _, end in report.spans.values()]
    ended_at = max(launched_at + seconds, *ends)
    spans = {
        "launch": launch,
        "flight": (launched_at, min(ended_at, arrived_at)),
        **report.spans,
        "wait": wait,
        "land": (arrived_at, time.perf_counter()),
    }
    return report._replace(
        exposed_wait_s=arrived_at - wait[0], in_flight_s=seconds, landed_at=step, spans=spans
    )


def _recorded(name: str) -> AbstractContextManager[Any]:
    """Labels a region in a profile if one is being recorded."""
    return record_function(name) if profiler._is_profiler_enabled else nullcontext()


# Measurements that a rank reports to the others or uses to choose how it encodes a launch


class StepClock:
    """A clock that measures how long this rank trains per inner step.

    The clock measures the time between two engine calls, which excludes the time that the engine
    spends waiting. Using the median excludes pauses such as validation.

    Args:
        seconds: The step time to report instead of the measured one.

    Examples:
        >>> clock = StepClock()
        >>> for ended, began in ((0.0, 4.0), (1.0, 1.5), (2.0, 2.25), (3.0, 9.0)):
        ...     clock.note(ended, began)
        >>> clock.seconds
        0.5
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._fixed_seconds = seconds
        self._last_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)

    def note(self, ended: float, began: float) -> None:
        """Records an inner step.

        Args:
            ended: The time when the last engine call ended, or 0 if there was none.
            began: The time when this engine call began.
        """
        if ended:
            self._last_seconds.append(began - ended)

    @property
    def seconds(self) -> float:
        if self._fixed_seconds:
            return self._fixed_seconds
        return median(self._last_seconds) if self._last_seconds else 0.0


class LinkRate:
    """The rate of this rank's link. Because a flight may stall, this is the highest rate of the
    last flights.

    Attributes:
        last: The rates of the last flights, in bytes per second.
        fixed: The rate that simulations report instead of a measured rate, in bytes per second.

    Examples:
        >>> link = LinkRate()
        >>> for rate in (1e6, 2e6, 1e3, 0.0, 5e5, 4e5):
        ...     link.note(rate)
        >>> link.bytes_per_s
        500000.0
    """

    def __init__(self) -> None:
        self.last: list[float] = []
        self.fixed = 0.0

    def note(self, bytes_per_s: float) -> None:
        """Records a flight's rate to each receiver, or 0 if it is unknown."""
        if bytes_per_s > 0:
            self.last = [*self.last, bytes_per_s][-_REMEMBERED_FLIGHTS:]

    @property
    def bytes_per_s(self) -> float:
        return self.fixed or max(self.last, default=0.0)
