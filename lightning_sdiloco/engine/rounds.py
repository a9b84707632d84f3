"""Rounds: launches and lands the fragments of a model that is cut in one way.

[Note: the mean of the groups] Evaluation may want the plain mean of the local values. All fragments then fly as in the
final exchange: without outer optimizer, error feedback and chance, with all buffers. Nothing lands. They go through the
background, behind what is in flight there, so the ranks send everything in the same order, and the groups notice if one
of them is somewhere else.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_sdiloco.algorithm import Fragment, Heard, LandingRule, Schedule, Settings
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.compression import Kernels
from lightning_sdiloco.engine.background import Background, Pending, Stages
from lightning_sdiloco.engine.flight import Counts, Flight, GroupMean, Landing, LaunchSnapshot, Purpose, SyncResult
from lightning_sdiloco.engine.fragments import fragments_of
from lightning_sdiloco.engine.measurements import LinkRate
from lightning_sdiloco.engine.offload import OuterStorage
from lightning_sdiloco.engine.parameters.naming import require_coverage
from lightning_sdiloco.engine.parameters.sharding import reshard_modules, sharded_modules
from lightning_sdiloco.engine.pipeline import Pipeline
from lightning_sdiloco.engine.recovery import recover
from lightning_sdiloco.engine.recut import NamedOuter, require_same_fragments, start_from
from lightning_sdiloco.engine.requests import Mailbox
from lightning_sdiloco.memory import SparePages

# For each value: outer gradient, outer parameters and momentum, as much as a flight has that waits to land.
_KEPT_BYTES = 12


class Means(NamedTuple):
    """Holds what all rounds of an engine share."""

    storage: OuterStorage
    kernels: Kernels
    background: Background
    inner_optimizers: Sequence[Optimizer]
    link: LinkRate


class Rounds:
    """Runs the rounds of a model that is cut in one way, and knows which of its fragments are in flight."""

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        settings: Settings,
        topology: Topology,
        means: Means,
        diagnoses: bool,
    ) -> None:
        self.partition = tuple(fragments)
        self._settings, self._pace = settings, settings.pace
        self._begin_at(0)
        self.fragments = fragments_of(model, fragments, settings, topology, means.storage)
        self._model = model
        self._sharded = sharded_modules(model)
        self._topology = topology
        self._means = means
        # The outer gradient of a flight and the state that it replaces serve the next one.
        on_host = means.storage.device.type == "cpu"
        longest = max(fragment.layout.length for fragment in self.fragments)
        self._spare = SparePages(_KEPT_BYTES * longest) if on_host else None
        self._parameters = {id(parameter) for own in self.fragments for parameter in own.layout.parameters}
        self.diagnose(diagnoses)

    def close(self) -> None:
        """Lets the memory go that waits for the next flight: there is none."""
        self._spare = None

    def reshard(self) -> None:
        """Makes FSDP2 drop what it has gathered, before parameters are read or written; see `sharding.reshard`."""
        reshard_modules(self._sharded)

    def require_coverage(self) -> None:
        """Refuses to go on with a parameter that is trained and in no fragment; see `naming.require_coverage`."""
        self.reshard()
        require_coverage(self._model, self._parameters)

    def diagnose(self, diagnoses: bool) -> None:
        """Measures at every landing how far the groups agree, or no longer does."""
        self._pipeline = Pipeline(self.fragments, self._topology, self._settings, self._means.kernels, diagnoses)

    @property
    def landing(self) -> LandingRule:
        """How this group takes the outer parameters in."""
        return self._settings.landing

    def begin(self, outer: NamedOuter, began_at: int) -> None:
        """Begins the rounds from other outer state, by name. In-group collective."""
        start_from(self.fragments, outer, self._topology.in_group)
        self._begin_at(began_at)

    def _begin_at(self, step: int) -> None:
        settings, self.began_at = self._settings, step
        # What the rounds before have in flight arrives, and lands nowhere.
        self.flights: list[Flight] = []
        # The warm-up is that of the run: rounds that begin anew have what is left of it.
        left = max(0, settings.warmup_steps - step)
        self.schedule = Schedule(settings.sync_every, settings.overlap_steps, len(self.partition), left)
        self._paced = self._pace.start(replace(self.schedule, warmup_steps=0))

    def described(self) -> dict[str, str]:
        """Describes the outer optimizer and its schedule; see `ShardOptimizer.described`."""
        return self.fragments[0].optimizer.described()

    @torch.no_grad()
    def launch(self, index: int, step: int, mailbox: Mailbox, purpose: Purpose = Purpose.ROUND) -> None:
        """Launches a fragment."""
        began = time.perf_counter()
        with record_function("sdiloco::launch"):
            fragment, deadline = self.fragments[index], self._deadline()
            snapshot = fragment.launch(step, deadline, purpose, mailbox.take())
            leg = self._leg(step) if purpose is Purpose.ROUND else ()
            snapshot = snapshot._replace(step_time=mailbox.step_time, leg=leg)
            self._start(self.chosen(snapshot), began)

    def chosen(self, snapshot: LaunchSnapshot) -> LaunchSnapshot:
        """Chooses in which code a launch is sent, by what this rank alone knows."""
        overlap_s = self.schedule.overlap_steps * (snapshot.step_time or math.nan)
        choice = self._settings.codec.choice(len(snapshot.gradient), self._means.link.bytes_per_s, overlap_s)
        return snapshot._replace(choice=choice)

    def _leg(self, step: int) -> tuple[int, ...]:
        """Returns with whom this group exchanges in the round of a launch, itself among them; () for all."""
        if self._settings.shares:
            return ()
        number = self._counted_in_rounds(step) // self._settings.sync_every - 1
        legs = self._settings.routing.legs(number, self._topology.num_groups)
        return next(tuple(leg) for leg in legs if self._topology.group_index in leg)

    @torch.no_grad()
    def launch_gradients(self, step: int, mailbox: Mailbox, trains: bool) -> None:
        """Launches the gradients of all fragments for their mean, which takes their place when it lands."""
        for fragment in self.fragments:
            began = time.perf_counter()
            with record_function("sdiloco::launch"):
                self._start(fragment.gradient_snapshot(step, self._deadline(), trains, mailbox.take()), began)

    @torch.no_grad()
    def take_local(self) -> None:
        """Takes the local values for the outer ones, without an exchange: all groups hold the same ones."""
        self.reshard()
        for fragment in self.fragments:
            fragment.take_local()

    def _start(self, snapshot: LaunchSnapshot, began: float) -> None:
        # Noted before the background may begin.
        launch = began, time.perf_counter()
        self.flights.append(Flight(snapshot, self._fly(snapshot), launch))

    def _fly(self, snapshot: LaunchSnapshot) -> Pending[SyncResult]:
        send, average, receive = self._pipeline.send, self._pipeline.average, self._pipeline.receive
        stages = Stages(partial(send, snapshot), partial(average, snapshot), partial(receive, snapshot))
        return self._means.background.start(stages)

    @property
    def most_at_once(self) -> int:
        """How many fragments fly together where all of them fly; as many flights as fragments take as many models."""
        return max(2, len(self.fragments) // 4)

    @torch.no_grad()
    def group_mean(self, step: int, counts: Counts) -> GroupMean:
        """Takes the mean of the local values, a few fragments at a time; see [Note: the mean of the groups]."""
        purpose, flying, landed = self.purpose_of_mean(step), deque[Pending[SyncResult]](), list[_Mean]()
        for fragment in self.fragments:
            if len(flying) == self.most_at_once:
                landed.append(self._land_mean(flying.popleft(), counts))
            flying.append(self._fly(fragment.snapshot(step, self._deadline(), purpose)))
        landed += [self._land_mean(flight, counts) for flight in flying]
        return _joined(landed)

    @torch.no_grad()
    def launch_mean(self, step: int, counts: Counts) -> Callable[[], GroupMean]:
        """Launches every fragment for what `group_mean` returns, for groups in one process that take turns."""
        purpose = self.purpose_of_mean(step)
        snapshots = [fragment.snapshot(step, self._deadline(), purpose) for fragment in self.fragments]
        flying = [self._fly(snapshot) for snapshot in snapshots]
        return lambda: _joined([self._land_mean(flight, counts) for flight in flying])

    def purpose_of_mean(self, step: int) -> Purpose:
        """Returns what a flight for the mean of the local values is for, after an inner step."""
        if not self._settings.shares:
            return Purpose.START
        return Purpose.START if 0 < step - self.began_at < self.schedule.warmup_steps else Purpose.MEAN

    def _land_mean(self, flight: Pending[SyncResult], counts: Counts) -> "_Mean":
        result = flight.result()
        _keep_until_done([*result.gathered, *result.buffers.values()])
        counts.bytes_sent += result.bytes_sent
        counts.bytes_received += result.bytes_received
        return self._means.storage.store(result.gathered[0]), result.buffers

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.timeout.total_seconds()

    @torch.no_grad()
    def land(self, step: int) -> Landing:
        """Lands the fragment that was launched first."""
        flight = self.flights.pop(0)
        with record_function("sdiloco::land"):
            began = time.perf_counter()
            result = flight.pending.result()
            arrived = time.perf_counter()
            snapshot = flight.snapshot
            self._apply(snapshot, result, step)
            wait, seconds = (began, arrived), flight.pending.seconds
            return Landing.of(snapshot.fragment, snapshot.step, flight.launch, result, step, wait, seconds)

    def _apply(self, snapshot: LaunchSnapshot, result: SyncResult, step: int) -> None:
        """Commits the result of a flight, and takes it into the model."""
        fragment, group = self.fragments[snapshot.fragment], self._topology.group_index
        if snapshot.purpose is Purpose.GRADIENT:
            _keep_until_done(result.gathered)
            if snapshot.weight:
                fragment.layout.write_gradients(result.gathered[0])
            return
        is_round = snapshot.purpose is Purpose.ROUND
        _keep_until_done([*result.gathered, result.outer.values, *result.buffers.values()])
        self.reshard()
        fragment.land(result, result.rule, step - snapshot.step, group, not is_round)
        if is_round:
            self._means.link.note(result.sends_bytes_per_s)
            self._hear(snapshot, result)
        if group in result.left_out:
            optimizers, in_group = self._means.inner_optimizers, self._topology.in_group
            recover(self._model, self.fragments, fragment.index, optimizers, in_group)

    def _hear(self, snapshot: LaunchSnapshot, result: SyncResult) -> None:
        """Tells the pace what travelled with a launch."""
        self._paced = self._pace.heard(
            self._paced,
            Heard(
                fragment=snapshot.fragment,
                launched_at=self._counted_in_rounds(snapshot.step),
                present=tuple(result.counted.factors),
                norms=tuple(control.norm for control in result.controls),
                trained=tuple(control.weight for control in result.controls),
            ),
        )

    def due(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that launch after an inner step, in order."""
        if self.schedule.is_warmup(step - self.began_at):
            return self.schedule.launches(step - self.began_at)
        return self._pace.due(self._paced, self._counted_in_rounds(step))

    def lands(self, step: int) -> int:
        """Returns how many fragments land after an inner step: the first ones in flight."""
        return sum(self._landing_of(flight.snapshot) <= step for flight in self.flights)

    def _landing_of(self, snapshot: LaunchSnapshot) -> int:
        return snapshot.step + (self.schedule.overlap_steps if snapshot.purpose is Purpose.ROUND else 0)

    def longest_wait(self, step: int) -> int:
        """Returns how many inner steps it takes at most, from now on, until a request has landed with a launch."""
        return self._pace.longest_wait(self.schedule, step - self.began_at)

    def _counted_in_rounds(self, step: int) -> int:
        """Counts an inner step as a pace does."""
        return step - self.began_at - self.schedule.warmup_steps

    def require_no_launch(self, step: int, settings: Settings) -> None:
        """Refuses to choose other settings after an inner step, unless no launch was or would have been due by then."""
        steps, own = step - self.began_at, self._settings.sync_every
        if self.flights or steps >= min(own, settings.sync_every):
            raise RuntimeError(
                f"choose() was called after {steps} inner steps with sync_every={settings.sync_every}. Settings can be"
                f" chosen before the first launch only: before inner step {own}."
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the records as plain values, and tensors on the host."""
        return {
            "rounds_began_at": self.began_at,
            "described": self.described(),
            "pace": dict(self._paced),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            **({"link": self._means.link.last} if self._means.link.last else {}),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; `start_flights` then restores what was in flight."""
        require_same_fragments(self.fragments, state["fragments"])
        for what, now in self.described().items():
            if state["described"][what] != now:
                raise ValueError(
                    f"The state is that of another {what}: it was {state['described'][what]}, now it is {now}. Resume"
                    " with the one that it was saved with."
                )
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._begin_at(state["rounds_began_at"])
        # Earlier versions had the pace that remembers nothing.
        self._paced = state.get("pace", self._paced)
        self._means.link.last = list(state.get("link", ()))

    def start_flights(self, flights: Iterable[dict[str, Any]]) -> None:
        """Launches again what was in flight: the same values give the same bytes."""
        for saved in flights:
            began, outer = time.perf_counter(), self.fragments[saved["fragment"]].load_outer()
            self._start(LaunchSnapshot.of(saved, outer, self._deadline()), began)


# The mean of one fragment: its parameters, stored, and its buffers by their index.
_Mean = tuple[Tensor, dict[int, Tensor]]


def _joined(landed: Sequence[_Mean]) -> GroupMean:
    return GroupMean([gathered for gathered, _ in landed], [buffers for _, buffers in landed])


def _keep_until_done(tensors: Iterable[Tensor]) -> None:
    """Tells the allocator of an accelerator that the training stream still reads tensors of the side stream."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
