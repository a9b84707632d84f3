"""The engine of Streaming DiLoCo for any training loop: the public class, which counts steps and what landed."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.algorithm import (
    DEFAULT_TIMEOUT,
    Absences,
    Fragment,
    LandingRule,
    OuterLRSchedule,
    OuterOptimizer,
    Pace,
    Route,
    Schedule,
    Settings,
    TwoShot,
    Weighing,
)
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.checkpoint.ranks import load, require_processes, save
from lightning_sdiloco.engine.cut_model import CutModel
from lightning_sdiloco.engine.flight import Counts, GroupMean, Landing
from lightning_sdiloco.engine.measurements import LinkRate, Span, StepClock
from lightning_sdiloco.engine.requests import Mailbox
from lightning_sdiloco.engine.restart import Restart
from lightning_sdiloco.engine.site.federation import Federation
from lightning_sdiloco.engine.start import WorkerGroups, checked_micro_batches, default_topology

_log = logging.getLogger(__name__)


class StreamingDiLoCo:
    """Streaming DiLoCo for any PyTorch training loop (https://arxiv.org/abs/2501.18512).

    Call `step` after every ``optimizer.step()`` and `finish` at the end, in every process. The worker groups exchange
    their outer gradients fragment by fragment, in the background, while training goes on. Where ``torch.distributed``
    is initialised, all ranks must construct it, and start from the parameters and buffers of rank 0. Where it is not,
    there is one worker group.

    Args:
        model: The model that is trained; inside ``DistributedDataParallel`` if a worker group has several ranks.
        worker_groups: Number of worker groups (M in the paper), of consecutive ranks. ``"auto"``: one per process. Or
            `WorkerGroups`, whose process group the model is wrapped with.
        sync_every: Inner steps between two launches of the same fragment (H in the paper).
        overlap_steps: Inner steps from the launch of a fragment to its landing (tau in the paper); < ``sync_every``.
        mixing: Share of the local parameters that is kept on landing (alpha in the paper), or ``"auto"``; or a
            `LandingRule`, such as `Carry`.
        fragments: ``"strided"``, ``"sequential"``, ``"balanced"``, or a list of lists of shell-style patterns of names.
        layers_per_fragment: Repeated blocks in a fragment, for strided and sequential fragments.
        compression: How outer gradients are encoded: a name from ``compression.COMPRESSIONS``, or a `Compression`.
        exchange: How they become their mean in every group: ``"gather"``, ``"two_shot"``, ``"auto"``, or a ``TwoShot``.
        outer_lr: Learning rate of the outer Nesterov SGD. Like the other three, ``"auto"`` chooses what suits the
            number of groups, ``sync_every`` and the compression.
        outer_momentum: Momentum of the outer Nesterov SGD, or ``"auto"``.
        outer_optimizer: From the flat float32 shards, one per fragment, to an elementwise optimizer; replaces the SGD.
        outer_lr_schedule: From the outer optimizer to a torch scheduler that counts each fragment's rounds; None: none.
        outer_clip_norm: The outer gradient of a group that is longer is scaled down to this norm; None clips nothing.
        outlier_guard: A group whose outer gradient is so many times as long as the median of its last is left out.
        warmup_steps: In so many inner steps, the first of the run, all groups take the mean of their gradients, as data
            parallelism does. Then call `average_gradients` after every ``backward()``.
        final_sync: Whether `finish` ends with a plain mean of the groups' local parameters.
        offload: Whether outer parameters and momentum rest in page-locked memory of the host; ``"auto"``: with CUDA.
        timeout: How long a fragment may be in flight.
        schedule: When fragments launch, such as `Selective`; None: every ``sync_every`` inner steps.
        weighing: How much each group counts in a mean, as a `Weighing`; None: by the inner steps that it trained.
        route: With whom each group exchanges in a round, such as `RandomPairs`; None: with all. Then groups hold outer
            parameters of their own, and what shows the outer model needs `group_mean`.
        inner_optimizers: Those of the training loop. `save` keeps their state; what is not finite of it is dropped.
        topology: Worker groups and process groups made by the caller, in place of ``worker_groups``.
        federation: What these ranks, launched on their own, are a site of; None: all groups are launched together.

    Raises:
        ValueError: If an argument is out of range, the model cannot be cut as asked, or ranks differ in either.

    Examples:
        >>> import torch
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
        worker_groups: int | str | WorkerGroups = "auto",
        sync_every: int = 100,
        overlap_steps: int = 5,
        mixing: float | Literal["auto"] | LandingRule = "auto",
        fragments: str | Sequence[Sequence[str]] = "strided",
        layers_per_fragment: int = 3,
        compression: str | Compression = "fp4",
        exchange: str | TwoShot = "auto",
        outer_lr: float | Literal["auto"] = "auto",
        outer_momentum: float | Literal["auto"] = "auto",
        outer_optimizer: OuterOptimizer | None = None,
        outer_lr_schedule: OuterLRSchedule | None = None,
        outer_clip_norm: float | None = None,
        outlier_guard: float | None = None,
        warmup_steps: int = 0,
        final_sync: bool = True,
        offload: bool | str = "auto",
        timeout: timedelta = DEFAULT_TIMEOUT,
        schedule: Pace | None = None,
        weighing: Weighing | None = None,
        route: Route | None = None,
        inner_optimizers: Sequence[Optimizer] = (),
        topology: Topology | None = None,
        federation: Federation | None = None,
    ) -> None:
        given = Settings.among(locals())
        self.topology = topology or default_topology(1 if federation else worker_groups, timeout)
        self.site = federation.site if federation else None
        self.mailbox = Mailbox()
        self.step_span: Span = (0.0, 0.0)
        self.step_clock, self.link = StepClock(), LinkRate()
        self.last_landing: Landing | None = None
        self.final_landings, self._early = list[Landing](), list[Landing]()
        self._absences, self._counts = Absences(self.topology.num_groups), Counts()
        self._unfinished: dict[str, Any] = {}
        self._cut = CutModel(model, given, self.topology, inner_optimizers, self.link, federation)

    def diagnose(self, diagnoses: bool = True) -> None:
        """Sets whether landings tell how far the groups agree. All ranks must call it alike, before the first step."""
        self._cut.diagnose(diagnoses)

    def join(self) -> None:
        """Waits until a site has what the others have; without it, its first inner steps may be in vain."""
        self._cut.world.join(self._counts.inner_steps)

    @property
    def is_warming_up(self) -> bool:
        """Whether the inner step that comes next is one of the warm-up, in which `average_gradients` does something."""
        return not self._cut.is_closed and self._cut.warmup.is_due(self._counts.inner_steps + 1)

    def average_gradients(self) -> None:
        """Takes the mean over the groups of the gradients, in the warm-up; later it does nothing.

        Call it in every process after ``backward()``, before gradients are clipped and the optimizer steps. What of the
        parameters has no gradient counts as zero where another group has one.

        Raises:
            ExchangeError: If a worker group went away, or did not answer within ``timeout``.
            AgreementError: If the groups are not in the same inner step.
        """
        self.launch_gradients()
        self.land_gradients()

    def launch_gradients(self, *, idle: bool = False) -> None:
        """Does the first half of `average_gradients`, for a group that may be idle in this inner step."""
        self._cut.require_open("average_gradients()")
        self._counts.launches += self._cut.warmup.launch(self._counts.inner_steps + 1, self.mailbox, not idle)

    def land_gradients(self) -> None:
        """Does the second half of `average_gradients`. The next `step` returns what landed."""
        self._early += self._counted(self._cut.warmup.land(self._counts.inner_steps + 1))

    def step(self, *, trained: int = 1, idle: bool = False, samples: int | None = None) -> list[Landing]:
        """Counts an inner step, launches what is due and lands what is due, which it returns.

        Args:
            trained: How many micro-batches this rank trained in this inner step: by these groups weigh in the next mean
                of every fragment, so all count in the same unit.
            idle: Whether this group did not train in this inner step, because it has no data left, for instance: the
                word for ``trained=0``. All ranks of a group say the same.
            samples: On how many samples this rank trained: by these a federation weighs its sites. None: ``trained``.

        Raises:
            ValueError: If ``trained`` is no whole number from 0.
            ExchangeError: If a worker group went away, or did not answer within ``timeout``.
            AgreementError: If the groups hold different outer parameters, or one stays not finite.
        """
        self.launch_due(trained=trained, idle=idle, samples=samples)
        return self.land_due()

    def launch_due(self, *, trained: int = 1, idle: bool = False, samples: int | None = None) -> None:
        """Does the first half of `step`: counts an inner step and launches what is due."""
        self._cut.require_open("step()")
        trained = 0 if idle else checked_micro_batches(trained)
        for _ in range(self._cut.warmup.missing(self._counts.inner_steps + 1, not trained)):
            self.launch_gradients(idle=True)
            self.land_gradients()
        self._counts.inner_steps += 1
        ended, began = self.step_span[1], time.perf_counter()
        self.step_span = began, began
        if trained:
            self._cut.world.trained(trained, trained if samples is None else samples)
            self.step_clock.note(ended, began)
        self.mailbox.step_time = self.step_clock.seconds
        self._counts.launches += self._cut.world.launch_due(self._counts.inner_steps, self.mailbox)

    def land_due(self) -> list[Landing]:
        """Does the second half of `step`: lands what is due, and prefetches what the next inner step launches."""
        landed, self._early = [*self._early, *self._counted(self._cut.world.land_due(self._counts.inner_steps))], []
        self.step_span = self.step_span[0], time.perf_counter()
        return landed

    def _counted(self, landings: Iterable[Landing]) -> list[Landing]:
        landed = [self._noted(landing) for landing in landings]
        self._counts.landings += len(landed)
        return landed

    def _noted(self, landing: Landing) -> Landing:
        self._counts.add(landing)
        self._absences.count(landing.launched_at, landing.landed_at, landing.left_out)
        self.last_landing = landing
        return landing

    def finish(self) -> list[Landing]:
        """Ends training: lands what is in flight, takes the mean of all local progress, and leaves the outer model.

        With ``final_sync`` every fragment then takes the plain mean over the groups of their local parameters, through
        the same compression, without outer learning rate and momentum. The model is left with the outer parameters,
        the same bits in every group. Within the warm-up that mean is taken in any case, in float32. Gradients are let
        go. Returns what landed, without the final exchange. A second call does nothing.
        """
        if self.is_finished:
            return []
        landed = self.land_all()
        for _ in self.final_exchange():
            pass
        return landed

    def land_all(self) -> list[Landing]:
        """Does the first part of `finish`: lands every fragment in flight."""
        self._cut.rounds.require_coverage()
        # What a longer run would go on from takes the place of the gradients, which nobody needs any more.
        self._cut.model.zero_grad()
        self._unfinished = self.state_dict()
        return self._counted(self._cut.world.land_all(self._counts.inner_steps))

    def final_exchange(self) -> Iterator[None]:
        """Does the second part of `finish`. Yields again and again, so that groups in one process can take turns."""
        if self.settings.final_sync or self.is_warming_up:
            for landing in self._cut.world.final_exchange(self.inner_steps, self.mailbox):
                self.final_landings += [] if landing is None else [self._noted(landing)]
                yield
        elif not self.has_landed and not self.topology.rank:
            _log.warning(
                "Training ends after inner step %d, before every fragment has landed once, and final_sync=False leaves"
                " out the mean of the groups: the model is left with values that nobody has trained.",
                self.inner_steps,
            )
        self._cut.view.end()
        self.close()

    def leave(self) -> list[Landing]:
        """Ends training before its end: what a site holds is sent, and counts. Returns what landed; see `close`."""
        landed = self._counted(self._cut.world.leave(self._counts.inner_steps))
        self.close()
        return landed

    def close(self) -> None:
        """Ends the background. What is in flight is lost; `finish` calls it when nothing is."""
        self._cut.close()

    def request(self, bits: int) -> None:
        """Asks something of all groups, by up to 16 bits: the `Landing` of the next launch shows them to all."""
        self.mailbox.request(bits)

    def withdraw(self, bits: int) -> None:
        """Takes back what was requested and has not been launched yet."""
        self.mailbox.withdraw(bits)

    @property
    def requested(self) -> int:
        """What ranks of a site asked of each other with the last inner step; between groups, landings show it."""
        return self._cut.world.requested

    @property
    def settings(self) -> Settings:
        """The settings, with numbers in place of ``"auto"``."""
        return self._cut.settings

    def is_training(self, model: nn.Module) -> bool:
        """Tells whether this engine trains that model and has not finished, so that groups hold different values."""
        return self._cut.model is model and not self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called: the model holds the outer parameters."""
        return self._cut.view.final is not None

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land, by `steps_in_rounds`, where no pace says otherwise."""
        return self._cut.rounds.schedule

    @property
    def launches_next(self) -> tuple[int, ...]:
        """The fragments that are launched after the next inner step, in order; not of a site."""
        return self._cut.rounds.due(self.inner_steps + 1)

    @property
    def round(self) -> int:
        """How many outer steps the first fragment has made."""
        return self._cut.rounds.fragments[0].outer.rounds

    def longest_wait(self) -> int:
        """Returns how many inner steps it takes at most, from now on, until a request has travelled and landed."""
        return self._cut.rounds.longest_wait(self.inner_steps)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended for all its sites, so that there is nothing left to train for."""
        return self._cut.world.is_over

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments: names and sizes in bytes of their parameters."""
        return self._cut.rounds.partition

    @property
    def inner_steps(self) -> int:
        """Inner steps so far."""
        return self._counts.inner_steps

    @property
    def steps_in_rounds(self) -> int:
        """Inner steps since the rounds began: what the schedule counts. Rounds begin anew with other fragments."""
        return self._counts.inner_steps - self._cut.rounds.began_at

    @property
    def has_landed(self) -> bool:
        """Whether every fragment has landed once: until then the outer model holds values that nobody has trained.

        Then `group_mean` is what to evaluate and to save. During and after a warm-up the outer model is a trained one.
        """
        schedule, landed = self.schedule, all(own.outer.rounds for own in self._cut.rounds.fragments)
        if self.site is not None:
            return landed
        return self.steps_in_rounds >= schedule.first_round and (landed or schedule.warmup_steps > 0)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The fragments in flight, in the order of their launch."""
        return tuple(flight.snapshot.fragment for flight in self._cut.rounds.flights)

    def evaluate(self, mean: GroupMean | None = None) -> AbstractContextManager[None]:
        """Shows the outer model inside a ``with`` block, which may be nested, then the local one again, bit for bit.

        In-group collective. With a mean, of `group_mean`, it shows that, and waits for nobody. Without one, on a route
        that does not share, it shows the outer parameters of this group.
        """
        return self._cut.view.shown(mean)

    def show_outer(self, mean: GroupMean | None = None) -> None:
        """Puts the outer model, or a mean, in the place of the local one, as `evaluate` does."""
        self._cut.view.show(mean)

    def show_local(self) -> None:
        """Puts the local parameters and buffers back."""
        self._cut.view.show_local()

    def group_mean(self) -> GroupMean:
        """Returns the mean over the groups of what they hold now, as `finish` would take it. Changes no training.

        All ranks must call it. Until `has_landed` it is what to evaluate.
        """
        self._cut.require_open("group_mean()")
        with self._cut.view.hidden():
            return self._cut.rounds.group_mean(self.inner_steps, self._counts)

    def launch_mean(self) -> Callable[[], GroupMean]:
        """Does the first half of `group_mean`, with all fragments in flight; what it returns waits for the others."""
        self._cut.require_open("group_mean()")
        with self._cut.view.hidden():
            return self._cut.rounds.launch_mean(self.inner_steps, self._counts)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters by name, in float32 and on the host, the same on every rank.

        Collective within a worker group until `finish`; where ranks hold parts of the parameters, also after it. On a
        route that does not share, it is the mean of the groups, and until `finish` all ranks must call it.
        """
        return self._cut.view.named(None if self.settings.shares or self._cut.is_closed else self.group_mean())

    def named_mean(self, mean: GroupMean) -> dict[str, Tensor]:
        """Returns a mean of `group_mean` by name, as `outer_state_dict` returns the outer parameters."""
        return self._cut.view.named(mean)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that this rank needs to go on bit for bit: plain dicts, lists, numbers, and tensors on the host.

        What is in flight is part of it. After `finish` it is the state before, from which a longer run goes on. Taking
        it changes nothing. On the CPU its tensors may be the engine's own: do not write to them.
        """
        return self._unfinished or {
            "counts": asdict(self._counts),
            "requests": self.mailbox.pending,
            **self._absences.state_dict(),
            **self._cut.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another engine with the same settings, model and rank was. All ranks must call it.

        For ``"auto"`` it has the numbers of then. The state of another rank, other fragments, or another outer
        optimizer is refused.
        """
        self._cut.load_state_dict(state)
        self._absences.load_state_dict(state)
        self._counts = Counts(**state["counts"])
        self.mailbox.pending = state["requests"]

    def save(self, path: str | PathLike[str]) -> None:
        """Saves all that a run needs to go on bit for bit, what is in flight included. All ranks must call it.

        Beside the file ``path``, an ordinary one whose ``state_dict`` holds the outer parameters, or until `has_landed`
        the mean of the groups, a folder has a file for every rank: state of engine and ``inner_optimizers``, local
        parameters, and random numbers.
        """
        require_processes(self.topology)
        is_trained = self.has_landed or self.is_finished
        outer = self.outer_state_dict() if is_trained else self.named_mean(self.group_mean())
        save(str(path), self.topology, self.settings, self.state_dict(), outer, self._cut.means.inner_optimizers)

    def load(self, path: str | PathLike[str]) -> None:
        """Goes on where `save` was called; refused on all ranks if settings, ranks or files are not those of then."""
        self.load_state_dict(load(str(path), self.topology, self._cut.given, self._cut.means.inner_optimizers))

    def restart(self, restart: Restart) -> None:
        """Starts the rounds anew where an earlier run was, whatever its groups and fragments. All ranks call it."""
        self._counts = Counts(**restart.counts)
        self._cut.restart(restart, self.inner_steps)

    def choose(self, settings: Settings) -> None:
        """Goes on as if these had been the settings from the start. All ranks must call it, before a launch was due."""
        self._cut.choose(settings, self.inner_steps)

    def has_other_parameters(self) -> bool:
        """Tells whether parameters were frozen or became trainable since the model was cut."""
        return self._cut.has_other_parameters()

    def recut(self) -> list[Landing]:
        """Cuts the model anew after parameters were frozen or became trainable. All ranks must call it.

        What is in flight lands first, and is returned. A parameter that was frozen takes its outer value, or the mean
        of the groups if it never landed; one that became trainable starts from its value without momentum, and rounds
        begin anew.
        """
        return self._counted(self._cut.recut(self.inner_steps, self._counts))

    def report(self) -> dict[str, float]:
        """Tells what happened so far, and the numbers of outer step and landing.

        ``flights_dropped`` were lost when a run went on with other groups or settings. ``bytes_sent`` and
        ``bytes_received`` are those of this rank, to and from other groups. ``exposed_wait_s`` is how long training
        waited for fragments, and ``in_flight_s`` how long these were in flight, added up.
        """
        return {**asdict(self._counts), **self.settings.numbers}
