"""The engine of Streaming DiLoCo: launches and lands the fragments of a model, in any training loop."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_sdiloco.algorithm.absences import Absences
from lightning_sdiloco.algorithm.aggregation import Count
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.settings import DEFAULT_TIMEOUT, OuterLRSchedule, OuterOptimizer, Settings
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.compression.kernels import kernels_for
from lightning_sdiloco.engine.agreement import align_model, broadcast, require_same_model, require_same_settings
from lightning_sdiloco.engine.background import Background, ThreadBackground
from lightning_sdiloco.engine.cut_model import CutModel
from lightning_sdiloco.engine.flight import Counts, Flight, Landing, LaunchSnapshot, SyncResult
from lightning_sdiloco.engine.measurements import Span
from lightning_sdiloco.engine.offload import home_on
from lightning_sdiloco.engine.parameters.layouts import (
    on_host,
    trainable,
    unwrapped,
)
from lightning_sdiloco.engine.parameters.resharding import OuterParameter
from lightning_sdiloco.engine.pipeline import Transfer
from lightning_sdiloco.engine.restart import Restart
from lightning_sdiloco.engine.start import cut, default_topology, say_what_is_unusual


class StreamingDiLoCo:
    """Streaming DiLoCo for any PyTorch training loop (https://arxiv.org/abs/2501.18512).

    Call `step` after every ``optimizer.step()`` and `finish` at the end, in every process. The worker groups exchange
    their outer gradients fragment by fragment, in the background, while training goes on.

    Where ``torch.distributed`` is initialised, constructing it is collective over the default process group, and all
    ranks start from the parameters and buffers of rank 0. Where it is not, there is one worker group.

    Args:
        model: The model that is trained; inside ``DistributedDataParallel`` if a worker group has several ranks.
        worker_groups: Number of worker groups (M in the paper), of consecutive ranks. ``"auto"``: one per process.
        sync_every: Inner steps between two launches of the same fragment (H in the paper).
        overlap_steps: Inner steps between the launch of a fragment and its landing (tau in the paper), below
            ``sync_every``.
        mixing: Share of the local parameters that is kept on landing (alpha in the paper), from 0 to 1.
        fragments: ``"strided"``, ``"sequential"``, ``"balanced"``, or a list of lists of shell-style patterns matched
            against parameter names.
        layers_per_fragment: Repeated blocks in a fragment, for strided and sequential fragments.
        compression: How outer gradients are encoded: a name from ``compression.COMPRESSIONS``, or a `Compression`.
        exchange: How they become their mean in every group: ``"gather"``, ``"two_shot"``, or ``"auto"`` for what suits
            the number of groups and the compression.
        outer_lr: Learning rate of the outer Nesterov SGD; the paper's value by default.
        outer_momentum: Momentum of the outer Nesterov SGD.
        outer_optimizer: From the flat float32 shards, one per fragment, to a torch optimizer that works elementwise;
            replaces the Nesterov SGD.
        outer_lr_schedule: From the outer optimizer to a torch scheduler, which counts the rounds of each fragment; None
            keeps the rate.
        outer_clip_norm: The outer gradient of a group that is longer is scaled down to this norm; None clips nothing.
        outlier_guard: A group whose outer gradient is more than so many times as long as the median of its last ones
            is left out of the mean; None leaves out none.
        final_sync: Whether `finish` ends with a plain mean of the groups' local parameters.
        offload: Whether outer parameters and outer momentum rest in page-locked memory of the host, so that the device
            holds those in flight only; ``"auto"``: where the device is CUDA. It changes no bit.
        timeout: How long a fragment may be in flight.
        inner_optimizers: The optimizers of the training loop; their state is reset where it is not finite after the
            group was left out of a mean.
        topology: Worker groups and process groups made by the caller, in place of ``worker_groups``.

    Raises:
        ValueError: If an argument is out of range, the model cannot be cut as asked, or models or settings differ
            between ranks.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=1, layers_per_fragment=1)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(2, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     landings = engine.step()
        >>> landings = engine.finish()
        >>> engine.report()["launches"], len(engine.fragments)
        (4, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        worker_groups: int | str = "auto",
        sync_every: int = 100,
        overlap_steps: int = 5,
        mixing: float = 0.5,
        fragments: str | Sequence[Sequence[str]] = "strided",
        layers_per_fragment: int = 3,
        compression: str | Compression = "fp4",
        exchange: str = "auto",
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        outer_optimizer: OuterOptimizer | None = None,
        outer_lr_schedule: OuterLRSchedule | None = None,
        outer_clip_norm: float | None = None,
        outlier_guard: float | None = None,
        final_sync: bool = True,
        offload: bool | str = "auto",
        timeout: timedelta = DEFAULT_TIMEOUT,
        inner_optimizers: Sequence[Optimizer] = (),
        topology: Topology | None = None,
    ) -> None:
        self.settings = Settings(
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            mixing=mixing,
            fragments=fragments,
            layers_per_fragment=layers_per_fragment,
            compression=compression,
            exchange=exchange,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_optimizer=outer_optimizer,
            outer_lr_schedule=outer_lr_schedule,
            outer_clip_norm=outer_clip_norm,
            outlier_guard=outlier_guard,
            final_sync=final_sync,
            offload=offload,
            timeout=timeout,
        )
        self.topology = topology or default_topology(worker_groups, timeout)
        self._inner_optimizers = inner_optimizers
        self._diagnoses = False
        self._build(unwrapped(model))
        self._flights: list[Flight] = []
        self._rounds_began_at = 0
        self._requests = 0
        self._absences = Absences(self.topology.num_groups)
        self._stash: list[Tensor] | None = None
        self._finished: list[Tensor] | None = None
        self._unfinished: dict[str, Any] | None = None
        self._closed = False
        self._counts = Counts()
        self.step_span: Span = (0.0, 0.0)
        self.last_landing: Landing | None = None
        self.final_landings: list[Landing] = []

    @torch.no_grad()
    def _build(self, model: nn.Module) -> None:
        require_same_settings(self.settings.described(), self.topology.world)
        require_same_model(model, self.topology.world)
        chosen = cut(model, self.settings)
        device = next(iter(trainable(model).values())).device
        say_what_is_unusual(chosen, self.settings, self.topology, device)
        align_model(model, self.topology)
        self._passes = kernels_for(device)
        self._home = home_on(device, self.settings.offload)
        self._divide(model, chosen.fragments)
        self._cut.align_ranks()
        require_same_settings({**self._cut.outer.described(), "passes": self._passes.name}, self.topology.world)
        self._background: Background = (self.topology.background or ThreadBackground)(device)

    def _divide(self, model: nn.Module, fragments: tuple[Fragment, ...]) -> None:
        """Takes the model as it is for the outer one, cut into these fragments."""
        self._cut = CutModel(model, fragments, self.settings, self.topology, self._home)
        self.schedule = Schedule(self.settings.sync_every, self.settings.overlap_steps, len(fragments))
        self._aggregation = self.settings.make_aggregation(self.topology.num_groups, len(fragments))
        self._trained = [0] * len(fragments)
        self._transfer = self._make_transfer()

    def _make_transfer(self) -> Transfer:
        return Transfer(
            self.topology,
            self.settings,
            self._cut.outer,
            self._cut.memories,
            self._cut.residuals,
            self._cut.layouts,
            self._cut.buffers,
            self._aggregation,
            self._passes,
            self._home,
            self._diagnoses,
        )

    def diagnose(self, diagnoses: bool = True) -> None:
        """Measures at every landing how far the groups agree: `Landing.diagnostics`. All ranks must call it.

        It costs passes over the fragment in the background lane, no traffic between groups, and changes no bit of
        training. Call it before the first step.

        Args:
            diagnoses: Whether to measure it, the same on all ranks.

        Raises:
            ValueError: If it is not the same on all ranks.
        """
        require_same_settings({"diagnostics": str(diagnoses)}, self.topology.world)
        self._diagnoses = diagnoses
        self._transfer = self._make_transfer()

    def step(self, *, idle: bool = False) -> list[Landing]:
        """Counts an inner step, launches what is due and lands what is due.

        Args:
            idle: Whether this group did not train in this inner step, because it has no data left: it then counts less
                in the next mean of every fragment. All ranks of a group say the same.

        Returns:
            What landed, in order.

        Raises:
            ExchangeError: If a worker group did not answer within ``timeout``, or went away.
            AgreementError: If the groups no longer hold the same outer parameters, or do not recover from values that
                are not finite.
        """
        self.launch_due(idle=idle)
        return self.land_due()

    def launch_due(self, *, idle: bool = False) -> None:
        """The first half of `step`: counts an inner step and launches what is due."""
        if self._closed:
            raise RuntimeError("step() was called after finish() or close(). Make a new StreamingDiLoCo to train on.")
        self._counts.inner_steps += 1
        began = time.perf_counter()
        self.step_span = began, began
        if not idle:
            self._trained = [steps + 1 for steps in self._trained]
        due = self.schedule.launches(self.steps_in_rounds)
        if due:
            self._cut.require_coverage()
        for fragment in due:
            self._launch(fragment)
            self._counts.launches += 1

    def land_due(self) -> list[Landing]:
        """The second half of `step`: lands what is due, and brings near what the next inner step launches."""
        landed = [self._land(self._flights.pop(0)) for _ in self.schedule.landings(self.steps_in_rounds)]
        for fragment in self.schedule.launches(self.steps_in_rounds + 1):
            self._cut.prefetch(fragment)
        self._counts.landings += len(landed)
        self.step_span = self.step_span[0], time.perf_counter()
        return landed

    def finish(self) -> list[Landing]:
        """Ends training: lands what is in flight, takes the mean of all local progress, and leaves the outer model.

        With ``final_sync`` every fragment then takes the plain mean over the groups of their local parameters, through
        the same compression, without outer learning rate and momentum. The model is left with the outer parameters,
        the same bits in every group. A second call does nothing.

        Returns:
            What landed, in order, the final exchange not included.

        Raises:
            ExchangeError: If a worker group did not answer within ``timeout``, or went away.
            AgreementError: As for `step`.
        """
        if self._finished is not None:
            return []
        landed = self.land_all()
        self.launch_final()
        self.land_final()
        return landed

    def land_all(self) -> list[Landing]:
        """The first part of `finish`: lands every fragment in flight, in the order of the launches."""
        self._cut.require_coverage()
        self._unfinished = self._state()
        return self._land_in_flight()

    def _land_in_flight(self) -> list[Landing]:
        landed = [self._land(self._flights.pop(0)) for _ in list(self._flights)]
        self._counts.landings += len(landed)
        return landed

    def launch_final(self) -> None:
        """The second part of `finish`: launches every fragment for the mean of the local parameters."""
        if self.settings.final_sync:
            for fragment in range(len(self.fragments)):
                self._launch(fragment, final=True)

    def land_final(self) -> None:
        """The last part of `finish`: lands the means, and leaves the outer parameters in the model."""
        while self._flights:
            self.final_landings.append(self._land(self._flights.pop(0)))
        self._finished = self._cut.end()
        self.close()

    def close(self) -> None:
        """Ends the background lane. What is in flight is lost; `finish` calls it when nothing is."""
        self._closed = True
        self._background.close()

    def request(self, bits: int) -> None:
        """Asks something of all groups: every `Landing` of the next launch shows the bits, in all of them.

        Args:
            bits: Up to 16 bits whose meaning is the caller's.
        """
        # A plain number, whatever flags are given: it is saved in checkpoints.
        self._requests |= int(bits)

    def withdraw(self, bits: int) -> None:
        """Takes back what was requested and has not been launched yet."""
        self._requests &= ~int(bits)

    def is_training(self, model: nn.Module) -> bool:
        """Whether this engine trains that model and has not finished, so that groups hold different local values."""
        return self._cut.model is model and self._finished is None

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called: the model holds the outer parameters."""
        return self._finished is not None

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments: names and sizes in bytes of their parameters."""
        return self._cut.fragments

    @property
    def inner_steps(self) -> int:
        """Inner steps so far."""
        return self._counts.inner_steps

    @property
    def steps_in_rounds(self) -> int:
        """Inner steps since the rounds began: what the schedule counts. Rounds begin anew with other fragments."""
        return self.inner_steps - self._rounds_began_at

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The fragments in flight, in the order of their launch."""
        return tuple(flight.cargo.fragment for flight in self._flights)

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Shows the outer model inside a ``with`` block, and puts the local one back, bit for bit.

        Collective within a worker group. Blocks may be nested: the outermost one puts the local model back.
        """
        shown_before = self._stash is not None
        self.show_outer()
        try:
            yield
        finally:
            if not shown_before:
                self.show_local()

    def show_outer(self) -> None:
        """Puts the outer parameters and buffers into the model, and the local ones aside. In-group collective."""
        if self._stash is None and self._finished is None:
            self._stash = [self._home.copied(tensor) for tensor in self._cut.local_tensors()]
            self._cut.write_outer()

    @torch.no_grad()
    def show_local(self) -> None:
        """Puts the local parameters and buffers back."""
        if self._stash is not None:
            for tensor, local in zip(self._cut.local_tensors(), self._stash, strict=True):
                tensor.copy_(local)
            self._stash = None

    def outer_state_dict(self) -> dict[str, Tensor]:
        """The outer parameters: name -> float32 tensor on the host, in the parameter's shape, the same on every rank.

        Collective within a worker group until `finish`; where the ranks of a group hold parts of the parameters, also
        after it.
        """
        return self._cut.named(self._cut.gathered() if self._finished is None else self._finished)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on bit for bit: plain dicts, lists, numbers and tensors on the host.

        It holds what is in flight too. After `finish` it is the state before it, so that a longer run goes on as if
        the shorter one had not ended. Taking it changes nothing. On the CPU its tensors may be the engine's own: do not
        write to them.
        """
        return self._unfinished if self._unfinished is not None else self._state()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another engine with the same settings, model and rank was. All ranks must call it.

        What was in flight is launched again: the same values give the same bytes.

        Args:
            state: What `state_dict` returned there.

        Raises:
            ValueError: If the state is that of other fragments, or of another outer optimizer or schedule of its rate.
        """
        names = [list(fragment.names) for fragment in self.fragments]
        if [fragment["names"] for fragment in state["fragments"]] != names:
            raise ValueError(
                f"The state is that of other fragments: it has {len(state['fragments'])}, this engine has"
                f" {len(names)}, or they hold other parameters. Resume with the same model and the same fragments."
            )
        for what, now in self._cut.outer.described().items():
            if state["described"][what] != now:
                raise ValueError(
                    f"The state is that of another {what}: it was {state['described'][what]}, now it is {now}. Resume"
                    " with the one that it was saved with."
                )
        for fragment, saved in enumerate(state["fragments"]):
            self._cut.load(fragment, saved)
            self._aggregation.load(fragment, saved["norms"])
            self._trained[fragment] = saved["trained"]
        for tensor, local in zip(self._cut.local_tensors(), state["local"], strict=True):
            tensor.copy_(local)
        self._counts = Counts(**state["counts"])
        self._rounds_began_at = state["rounds_began_at"]
        self._absences.load(state)
        self._requests = state["requests"]
        for saved in state["flights"]:
            self._fly(
                LaunchSnapshot.loaded(saved, self._cut.outer_shard(saved["fragment"]), self._deadline()),
                time.perf_counter(),
            )

    @torch.no_grad()
    def restart(self, restart: Restart) -> None:
        """Starts the rounds anew where an earlier run was, whatever its groups and fragments. All ranks must call it.

        Every group takes the outer parameters. Those that the earlier run did not train keep their values, and start
        without momentum.

        Args:
            restart: What the earlier run left, the same on all ranks.
        """
        self._counts = Counts(**restart.counts)
        self._start_rounds(restart.parameters, restart.buffers)
        self._cut.write_outer()

    @torch.no_grad()
    def choose(self, settings: Settings) -> None:
        """Goes on as if the settings had been these from the start of the rounds. All ranks must call it.

        Args:
            settings: The settings, the same on all ranks.

        Raises:
            RuntimeError: If there has been a launch, or with these settings there would have been.
            ValueError: If the model cannot be cut as they ask.
        """
        if self._flights or self.steps_in_rounds >= min(self.settings.sync_every, settings.sync_every):
            raise RuntimeError(
                f"choose() was called after {self.steps_in_rounds} inner steps with sync_every={settings.sync_every}."
                f" Settings can be chosen before the first launch only: before inner step {self.settings.sync_every}."
            )
        model, trained = self._cut.model, self._trained[0]
        parameters, buffers = self._cut.outer_parameters(), self._cut.outer_buffers()
        self.settings = settings
        self._divide(model, cut(model, settings).fragments)
        self._cut.start_from(parameters, buffers)
        self._trained = [trained] * len(self.fragments)

    def has_other_parameters(self) -> bool:
        """Whether parameters were frozen or became trainable since the model was cut."""
        return self._cut.has_other_parameters()

    @torch.no_grad()
    def recut(self) -> list[Landing]:
        """Cuts the model anew after parameters were frozen or became trainable. All ranks must call it.

        What is in flight lands first. A parameter that was frozen takes its outer value, one that became trainable
        starts from its value without momentum, and rounds begin anew.

        Returns:
            What landed, in order.

        Raises:
            ValueError: If other parameters are trainable in other ranks, the fragments that were asked for do not fit
                the model any more, or parameters are sharded.
        """
        self._cut.require_whole_parameters()
        model = self._cut.model
        require_same_model(model, self.topology.world)
        chosen = cut(model, self.settings)
        landed = self._land_in_flight()
        parameters, buffers, now = self._cut.outer_parameters(), self._cut.outer_buffers(), trainable(model)
        self._cut.write_some({name: parameter for name, parameter in parameters.items() if name not in now})
        for name, parameter in now.items():
            if name not in parameters:
                broadcast(parameter, self.topology)
        self._divide(model, chosen.fragments)
        self._start_rounds(parameters, buffers)
        return landed

    def _start_rounds(self, parameters: Mapping[str, OuterParameter], buffers: Mapping[str, Tensor]) -> None:
        self._cut.start_from(parameters, buffers)
        self._rounds_began_at = self.inner_steps

    def report(self) -> dict[str, float]:
        """What happened so far.

        Returns:
            ``inner_steps``, ``launches``, ``landings``: counts; ``flights_dropped``: flights that were lost when a run
            went on with other groups or settings; ``bytes_sent``, ``bytes_received``: between groups, by this rank;
            ``exposed_wait_s``: seconds for which training waited for fragments; ``in_flight_s``: seconds that fragments
            were in flight, added up.
        """
        return asdict(self._counts)

    @torch.no_grad()
    def _launch(self, fragment: int, final: bool = False) -> None:
        began = time.perf_counter()
        with record_function("sdiloco::launch"):
            buffers, outer = self._cut.buffers[fragment], self._cut.outer_shard(fragment)
            # A signal handler may request something at any moment: only what is taken along is taken away.
            requests = self._requests
            cargo = LaunchSnapshot(
                fragment=fragment,
                step=self.inner_steps,
                outer=outer,
                gradient=self._cut.outer_gradient(fragment, outer),
                buffers=buffers.snapshot(),
                travelling=buffers.all() if final else buffers.travelling(),
                requests=requests,
                weight=self._trained[fragment],
                deadline=self._deadline(),
                final=final,
            )
            self._requests &= ~requests
            self._trained[fragment] = 0
            self._fly(cargo, began)

    def _fly(self, cargo: LaunchSnapshot, began: float) -> None:
        # Noted before the lane may begin.
        launch = began, time.perf_counter()
        pending = self._background.start(self._transfer.stages(cargo))
        self._flights.append(Flight(cargo, pending, launch))

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.timeout.total_seconds()

    @torch.no_grad()
    def _land(self, flight: Flight) -> Landing:
        with record_function("sdiloco::land"):
            began = time.perf_counter()
            arrival = flight.pending.result()
            arrived = time.perf_counter()
            self._counts.exposed_wait_s += arrived - began
            self._counts.in_flight_s += flight.pending.seconds
            self._counts.bytes_sent += arrival.bytes_sent
            self._counts.bytes_received += arrival.bytes_received
            self._apply(flight.cargo, arrival)
            launched = flight.launch[1]
            ended = max([launched + flight.pending.seconds, *(ended for _, ended in arrival.spans.values())])
            landing = Landing(
                fragment=flight.cargo.fragment,
                launched_at=flight.cargo.step,
                requests=arrival.requests,
                left_out=arrival.left_out,
                outlying=arrival.counted.outlying,
                outer_lr=arrival.outer.lr,
                outer_grad_norm=arrival.gradient_norm,
                bytes_sent=arrival.bytes_sent,
                exposed_wait_s=arrived - began,
                in_flight_s=flight.pending.seconds,
                landed_at=self.inner_steps,
                bytes_received=arrival.bytes_received,
                counted=tuple(arrival.counted.factors),
                group_norms=arrival.group_norms,
                spans={
                    "launch": flight.launch,
                    "flight": (launched, min(ended, arrived)),
                    **arrival.spans,
                    "wait": (began, arrived),
                    "land": (arrived, time.perf_counter()),
                },
                diagnostics=arrival.diagnostics,
            )
            self.last_landing = landing
            return landing

    def _apply(self, cargo: LaunchSnapshot, arrival: SyncResult) -> None:
        fragment, buffers = cargo.fragment, self._cut.buffers[cargo.fragment]
        self._cut.outer.commit(fragment, arrival.outer)
        buffers.commit(arrival.buffers, arrival.changed)
        if not cargo.final:
            self._aggregation.commit(arrival.controls)
            if self.topology.group_index in arrival.counted.factors:
                self._cut.memories[fragment] = arrival.memory
            if arrival.counted.factors:
                self._cut.residuals[fragment] = arrival.residual
        left_out = self.topology.group_index in arrival.left_out
        mixing = 0.0 if cargo.final or left_out else self._mixing(arrival.counted)
        _keep_until_done([arrival.gathered, arrival.outer.values, *arrival.buffers.values()])
        self._cut.write(fragment, arrival.gathered, mixing)
        buffers.mix(mixing, arrival.buffers)
        if left_out:
            self._cut.recover(fragment, self._inner_optimizers)
        self._absences.count(cargo.step, self.inner_steps, arrival.left_out)

    def _mixing(self, counted: Count) -> float:
        """Share of the local parameters that this group keeps, if its values are finite."""
        if self.topology.group_index in counted.outlying:
            return 0.0
        # Where no group has trained, nothing moves.
        return self.settings.mixing if counted.factors else 1.0

    @torch.no_grad()
    def _state(self) -> dict[str, Any]:
        fragments = [
            {**self._cut.saved(index), "norms": self._aggregation.saved(index), "trained": self._trained[index]}
            for index in range(len(self.fragments))
        ]
        local = self._cut.local_tensors() if self._stash is None else self._stash
        return {
            "counts": asdict(self._counts),
            "rounds_began_at": self._rounds_began_at,
            **self._absences.saved(),
            "requests": self._requests,
            "described": self._cut.outer.described(),
            "fragments": fragments,
            "flights": [flight.cargo.saved() for flight in self._flights],
            "local": on_host(local),
        }


def _keep_until_done(tensors: Iterable[Tensor]) -> None:
    """Tells the allocator of an accelerator that the training stream still reads tensors of the side stream."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
