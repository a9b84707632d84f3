"""Holds the user's settings for a strategy and chooses values for ``"auto"`` settings.

[Note: choice of settings] The first inner steps are ordinary steps, because no launch is due before
inner step `sync_every`. During these steps, the engine uses placeholder values for the settings
that are still open. Then all ranks exchange their step times, measure the link together, and adopt
rank 0's choice. The engine continues as if it had used the chosen settings from the start, so the
run is bit-identical to one that was started with these settings. Every later checkpoint contains
the chosen settings, and a resumed fit restores them. A dense beginning is chosen in the same way
before its first launch is due. Dense rounds are made as short as possible without making training
wait for the link. If the user omits `sync_every`, its value depends on the length of the fit. The
value is increased if training would otherwise wait for the link.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from lightning_sdiloco.algorithm.as_data import Fields, as_text
from lightning_sdiloco.algorithm.config import (
    AUTO,
    DEFAULT_SYNC_EVERY,
    Settings,
    dense_for,
    is_whole,
    overlap_for,
    overlap_in_round,
    read_settings,
    round_lengths,
)
from lightning_sdiloco.algorithm.reduce import TwoShot, kind_and_backend
from lightning_sdiloco.algorithm.schedule import DenseBeginning
from lightning_sdiloco.comm.topology import Topology, checked_worker_groups
from lightning_sdiloco.engine.matrices import MOST_VALUES, with_direction
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.federation.config import Federation
from lightning_sdiloco.lightning.host import State
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming
from lightning_sdiloco.planning.planner import (
    SYNC_EVERY,
    TARGET,
    candidates,
    recommend,
    with_margin,
)
from lightning_sdiloco.planning.units import readable, readable_rate
from lightning_sdiloco.planning.workload import FLOAT32, Groups, Model

_log = logging.getLogger(__name__)

# The ``sync_every`` of dense beginnings, in the order in which they are tried.
DENSE_EVERY = (4, 8, 16, 32, 64, 128)

# Seconds per inner step that training may always spend waiting.
_NEXT_TO_NOTHING = 0.002

# The first few inner steps are slower than the others and are not counted. The median of a few more
# steps is enough.
FIRST = 3
STEPS = 8

# Placeholders until the choice is made. No launch is due before then.
_PLACEHOLDERS: Mapping[str, object] = {
    "sync_every": 1_000_000,
    "overlap_steps": 0,
    "fragments": "strided:3",
    "compression": "fp4",
    "exchange": "two_shot",
}

# Messages grow until an exchange takes this long or they are this large. The time is long enough to
# measure any link, and the size is large enough for most. A small model never sends that much, so
# no message is larger than its parameters.
_ENOUGH_SECONDS = 0.5
_LEAST_BYTES = 2**16
_MOST_BYTES = 2**24

# The shortest round, in inner steps, that is chosen for a long enough fit. Large models lose less
# in longer rounds, and their matrices take more of the time in short rounds.
_SHORT_ROUND = 10
_SHORT_ROUND_OF_LARGE = 20

# The memory bandwidth of a device, in bytes per second.
_MEMORY_RATES = {"cpu": 1e10}
_MEMORY_RATE = 1e12


class Measured(NamedTuple):
    step_time: float
    link: Link

    @override
    def __str__(self) -> str:
        return (
            f"the measured inner step takes {self.step_time:.3g} s and the link carries"
            f" {readable_rate(self.link.gbit_s)} with a round trip of"
            f" {1000 * self.link.round_trip:.3g} ms"
        )


def _is_auto(setting: object) -> bool:
    return isinstance(setting, str) and setting == AUTO


@dataclass
class Options:
    """The settings that all strategies have in common, with their current values.

    The planner or a checkpoint may replace ``"auto"`` settings.
    """

    settings: Settings
    worker_groups: int | Literal["auto"]
    evaluate: str
    resume: str
    federation: Federation | None = None
    auto: tuple[str, ...] = ()
    """The settings that the planner has yet to choose."""
    chooses_dense: bool = False
    """Whether ``dense_beginning`` is left open until the link has been measured."""
    follows_length: bool = False
    """Whether ``sync_every`` was omitted and depends on the length of the fit."""
    chooses_rounds: bool = False
    """Whether ``sync_every`` is left open until the link has been measured."""
    why_rounds: str = ""
    """The reason for the chosen ``sync_every``, if the user omitted it."""
    overlap_gives_way: bool = False
    """Whether ``overlap_steps`` was omitted and depends on ``sync_every``."""
    steps: float = math.inf
    """The number of inner steps in the fit, or infinity if unknown."""
    measured: Measured | None = None
    """The planner's measurements, or None if nothing has been measured."""
    # The times at which inner steps ended, less the seconds spent waiting for other groups.
    _times: list[float] = field(default_factory=list)

    @staticmethod
    def from_arguments(arguments: State) -> "Options":
        """Creates the options from a strategy's arguments and ignores unrelated ones."""
        chosen = {setting.name: arguments[setting.name] for setting in fields(Settings)}
        chooses_dense = _is_auto(chosen["dense_beginning"])
        if chooses_dense:
            chosen["dense_beginning"] = None
        follows_length = chosen["sync_every"] is None
        if follows_length:
            chosen["sync_every"] = DEFAULT_SYNC_EVERY
        # An unsuitable exchange is refused here, before a placeholder replaces it.
        auto = [name for name in _PLACEHOLDERS if _is_auto(chosen[name]) and name != "exchange"]
        settings = Settings.among({**chosen, **{name: _PLACEHOLDERS[name] for name in auto}})
        if isinstance(settings.exchange, TwoShot) and settings.exchange.lacks_links:
            backend = settings.exchange.backend
            settings = replace(settings, exchange=f"{_PLACEHOLDERS['exchange']}:{backend}")
            auto.append("exchange")
        return Options(
            settings,
            worker_groups=arguments["worker_groups"],
            evaluate=arguments["evaluate"],
            resume=arguments["resume"],
            federation=arguments["federation"],
            auto=tuple(auto),
            chooses_dense=chooses_dense,
            follows_length=follows_length,
            chooses_rounds=follows_length,
            overlap_gives_way=chosen["overlap_steps"] is None,
        )

    def __post_init__(self) -> None:
        if self.auto:
            self._check_auto(self.auto[0])
        self._check_choices()
        if self.federation is not None:
            self._check_federation()
        self.worker_groups = checked_worker_groups(self.worker_groups)
        if self.federation is not None:
            self.federation.check(self.settings)
            # A site's ranks form one group.
            self.worker_groups = 1

    def _check_auto(self, first: str) -> None:
        """Refuses settings that prevent the planner from choosing the open settings."""
        settings = self.settings
        auto_text = f"{first}='auto'"
        if first == "exchange":
            auto_text = f"exchange={TwoShot()!r}"
        if settings.sync_every <= STEPS:
            raise ValueError(
                f"sync_every={settings.sync_every} is too small for {auto_text}, because the first"
                f" {STEPS} inner steps are measured before the first launch. Choose {first}"
                " yourself, or increase sync_every."
            )
        if first != "exchange" and settings.schedule is not None:
            raise ValueError(
                f"schedule={settings.schedule!r} does not work with {first}='auto', because the"
                f" planner assumes a launch every sync_every inner steps. Choose {first} yourself,"
                " or omit schedule."
            )
        if not settings.shares:
            raise ValueError(
                f"route={settings.route!r} does not work with {first}='auto', because the planner"
                f" assumes that all groups exchange with each other in every round. Choose {first}"
                " yourself, or omit route."
            )
        if first != "exchange" and settings.dense_beginning is not None:
            raise ValueError(
                f"dense_beginning={settings.dense_beginning!r} does not work with {first}='auto',"
                f" because its first launches are due before the first {STEPS} inner steps have"
                f" been measured. Choose {first} yourself, or omit dense_beginning."
            )
        if "sync_every" in self.auto and settings.overlap_steps >= max(SYNC_EVERY):
            raise ValueError(
                f"overlap_steps={settings.overlap_steps} is too large for sync_every='auto', which"
                f" chooses at most {max(SYNC_EVERY)}. Choose sync_every yourself, or reduce"
                " overlap_steps."
            )

    def _check_choices(self) -> None:
        """Refuses invalid values of ``evaluate``, ``resume`` and ``federation``."""
        if self.evaluate not in ("outer", "mean", "local"):
            raise ValueError(
                f"evaluate={self.evaluate!r} is unknown. Choose 'outer' (the default) to validate"
                " the outer model during a fit, 'mean' to validate the mean of the worker groups,"
                " or 'local' to validate each group's own model."
            )
        if self.resume not in ("exact", "restart", "exact:newest", "restart:newest"):
            raise ValueError(
                f"resume={self.resume!r} is unknown. Choose 'exact' to refuse a checkpoint with"
                " different settings, or 'restart' to restart the rounds from the checkpoint's"
                " outer parameters. Add the suffix ':newest' if only the newest checkpoint should"
                " keep the folder that a fit resumes from."
            )
        if self.federation is not None and not isinstance(self.federation, Federation):
            raise ValueError(
                f"federation={self.federation!r} is not a Federation. Pass"
                " lightning_sdiloco.Federation(hub=..., run=..., site=..., keys=...), or omit the"
                " argument."
            )

    def _check_federation(self) -> None:
        """Refuses options that do not work in a federation."""
        if self.worker_groups not in (1, "auto"):
            raise ValueError(
                f"worker_groups={self.worker_groups} does not work with a federation, because the"
                " ranks of each site form one worker group. Omit worker_groups, and start each"
                " group as a separate site."
            )
        if self.auto:
            first = self.auto[0]
            raise ValueError(
                f"{first}='auto' does not work with a federation, because its sites are launched"
                " separately and all need the same settings. Run sdiloco plan --hub-bandwidth to"
                " get a recommended value, or sdiloco doctor --hub to see the value that an"
                " existing run uses."
            )
        if self.restarts:
            raise ValueError(
                f"resume={self.resume!r} does not work with a federation, because a site resumes"
                " from its own checkpoint or fetches a state from the hub. Omit resume."
            )
        if self.evaluate == "mean":
            raise ValueError(
                f"evaluate={self.evaluate!r} does not work with a federation, because validation"
                " does not wait for other sites. Choose 'outer' or 'local'."
            )

    @property
    def restarts(self) -> bool:
        """Returns whether a resumed fit restarts its rounds and ignores the saved settings."""
        return self.resume.startswith("restart")

    def described(self) -> dict[str, str]:
        """Returns every setting as text, which allows ranks to compare their settings."""
        return {
            **self.settings.described(),
            **dict.fromkeys(self.open, repr(AUTO)),
            "worker_groups": str(self.worker_groups),
            "evaluate": self.evaluate,
            "resume": self.resume,
        }

    @property
    def is_planned(self) -> bool:
        """Returns whether the planner still needs the step time to choose settings."""
        return any(name != "exchange" for name in self.auto)

    @property
    def open(self) -> tuple[str, ...]:
        """The settings that will be chosen after the first inner steps."""
        names = [*self.auto]
        if self.chooses_rounds:
            names.append("sync_every")
        if self.chooses_dense:
            names.append("dense_beginning")
        return tuple(names)

    def choose_for_length(self, model: nn.Module, topology: Topology, steps: float) -> None:
        """Chooses the settings that depend on the length of the fit, unless a checkpoint sets them.

        All ranks must call this method. In a federation, no setting depends on the length of the
        fit. Until the link is measured, the dense beginning consists of placeholder rounds of four
        inner steps, unless the planner needs more inner steps to make its own choice.
        """
        if self.settings.shares and topology.num_groups > 1:
            # Groups may have unequal numbers of batches.
            self.steps = min(topology.world.all_gather_object(steps))
        if self.follows_length:
            self._follow_length(model, topology)
        if self.chooses_dense and not self.is_planned:
            dense = dense_for(topology.num_groups, self.steps, self.settings)
            self.settings = replace(self.settings, dense_beginning=dense)
            self.chooses_dense = dense is not None
        self._choose_outer_step(model, topology)

    def _follow_length(self, model: nn.Module, topology: Topology) -> None:
        """Chooses the best ``sync_every`` for the length of the fit, unless the link must be
        measured first.
        """
        lengths = self._round_lengths(model)
        self.settings = self._with_rounds(lengths[0])
        self.why_rounds = "the default"
        if self.steps < math.inf:
            self.why_rounds = f"for the {self.steps:,} inner steps of this fit"
        self.chooses_rounds = False
        # Simulated flights do not run in the background.
        if len(lengths) > 1 and topology.background is None:
            workload = Model.of_parameters(trainable(model))
            method = Streaming(workload, self.settings, _groups_of(model, topology, 1.0))
            # Every link hides a message that is smaller than the smallest one that is measured.
            self.chooses_rounds = method.bytes_per_step * lengths[0] > _LEAST_BYTES

    def _round_lengths(self, model: nn.Module) -> list[int]:
        """Returns all suitable values of ``sync_every``, best first."""
        dense = self.settings.dense_beginning
        least = 1
        if dense is not None and not self.chooses_dense:
            least = 2 * dense.sync_every
        overlap_steps = None if self.overlap_gives_way else self.settings.overlap_steps
        values = sum(parameter.numel() for parameter in trainable(model).values())
        short_round = _SHORT_ROUND
        if values > MOST_VALUES:
            short_round = _SHORT_ROUND_OF_LARGE
        return round_lengths(self.steps, short_round, overlap_steps, least)

    def _with_rounds(self, sync_every: int) -> Settings:
        """Returns the settings with this ``sync_every`` and, by default, a matching overlap."""
        overlap_steps = self.settings.overlap_steps
        if self.overlap_gives_way:
            overlap_steps = overlap_in_round(sync_every)
        return replace(self.settings, sync_every=sync_every, overlap_steps=overlap_steps)

    def _choose_rounds(self, model: nn.Module, topology: Topology, step_time: float) -> None:
        """Chooses the shortest rounds that hide their transfers, or the longest if none do.

        All ranks must call this method.
        """
        self.chooses_rounds = False
        best = self.settings.sync_every
        lengths = self._round_lengths(model)
        candidates = [self._with_rounds(length) for length in lengths]
        number = self._first_hidden(candidates, model, topology, step_time)
        self.settings = candidates[-1 if number is None else number]
        if self.settings.sync_every > best:
            self.why_rounds += " and its link"
            if topology.rank == 0:
                self._announce_rounds(best, is_hidden=number is not None)

    def _announce_rounds(self, best: int, is_hidden: bool) -> None:
        """Logs why rounds are longer than the length of the fit requires."""
        waits = "training would wait for the link in shorter rounds"
        if not is_hidden:
            waits = (
                "training waits for the link in these rounds and would wait longer in shorter"
                " rounds"
            )
        _log.warning(
            "Chosen: sync_every=%d, although %d suits the %d inner steps of this fit better. The"
            " reason is that %s, because %s. To accept the longer wait, set sync_every=%d.",
            self.settings.sync_every,
            best,
            self.steps,
            waits,
            self.measured,
            best,
        )

    def _choose_outer_step(self, model: nn.Module, topology: Topology) -> None:
        """Chooses the open settings of the outer step, unless they depend on a later choice."""
        if {"sync_every", "dense_beginning"} & {*self.open}:
            return
        rounds = self._rounds()
        self.settings = with_direction(self.settings, model, topology, rounds)
        if rounds < math.inf:
            self.settings = self.settings.chosen_for(topology.num_groups, rounds)

    def _rounds(self) -> float:
        """Returns the number of rounds in the fit, or infinity if its length is unknown."""
        if self.steps == math.inf:
            return math.inf
        dense = self.settings.dense_beginning
        dense_steps = 0 if dense is None else dense.steps
        return (self.steps - dense_steps) // self.settings.sync_every

    def _choose_dense(self, model: nn.Module, topology: Topology, step_time: float) -> None:
        """Chooses the shortest dense rounds that hide their transfers, or None if none do.

        All ranks must call this method.
        """
        self.chooses_dense = False
        self.settings = replace(self.settings, dense_beginning=None)
        candidates = self._dense_candidates(topology.num_groups)
        if not candidates:
            return
        in_dense_rounds = [dense_rounds_alone(self.settings, dense) for dense in candidates]
        number = self._first_hidden(in_dense_rounds, model, topology, step_time)
        chosen = None
        if number is not None:
            chosen = candidates[number]
        self.settings = replace(self.settings, dense_beginning=chosen)
        if topology.rank == 0:
            workload = Model.of_parameters(trainable(model))
            groups = _groups_of(model, topology, step_time)
            dense_bytes = Streaming(workload, self.settings, groups).dense_bytes
            self._announce_dense(chosen, topology.num_groups, dense_bytes)

    def _first_hidden(
        self,
        candidates: Sequence[Settings],
        model: nn.Module,
        topology: Topology,
        step_time: float,
    ) -> int | None:
        """Returns the index of the first settings that hide their transfers, or None if none do.

        All ranks must call this method, and all ranks get the same result. The link is measured
        first if it has not been measured yet.
        """
        # If flights do not run in the background, as in a simulation, the clock says nothing about
        # a link.
        if topology.background is None and self.measured is None:
            self.measured = Measured(step_time, self._measured_link(model, topology))
        workload = Model.of_parameters(trainable(model))
        groups = _groups_of(model, topology, step_time)
        first = None
        for number, settings in enumerate(candidates):
            method = Streaming(workload, settings, groups)
            if self.measured is None or is_hidden(method, self.measured.link):
                first = number
                break
        # Ranks' clocks differ, so all ranks take rank 0's choice.
        return topology.world.all_gather_object(first)[0]

    def _dense_candidates(self, num_groups: int) -> list[DenseBeginning]:
        """Returns the dense beginnings whose first launch is not overdue, shortest rounds first."""
        candidates = []
        for sync_every in DENSE_EVERY:
            dense = dense_for(num_groups, self.steps, self.settings, sync_every)
            if dense is not None and sync_every >= len(self._times):
                candidates.append(dense)
        return candidates

    def _announce_dense(
        self, dense: DenseBeginning | None, num_groups: int, dense_bytes: float
    ) -> None:
        """Logs the chosen dense beginning, the reason for it, and the number of bytes sent."""
        reason = f"{self.measured}" if self.measured else "the groups are simulated in one process"
        if dense is None:
            _log.warning(
                "Chosen: dense_beginning=None, because training would wait for the link in every"
                " dense round that sync_every=%d and the length of this fit allow: %s.",
                self.settings.sync_every,
                reason,
            )
            return
        _log.warning(
            "Chosen: dense_beginning=%r. In the first %d of the %d inner steps of this fit (%.0f"
            " %%), the %d groups exchange every %d inner steps, and each group sends %s. These are"
            " the shortest rounds for which training does not wait: %s. Set dense_beginning=None to"
            " turn this off.",
            dense,
            dense.steps,
            self.steps,
            100 * dense.steps / self.steps,
            num_groups,
            dense.sync_every,
            readable(dense_bytes),
            reason,
        )

    # The choice of the planner

    def _restore_rounds(self, saved: Fields) -> None:
        """Restores the rounds from a checkpoint if they were chosen before it was saved."""
        names = ["sync_every"]
        if self.overlap_gives_way:
            names.append("overlap_steps")
        chosen: State = {name: saved[name] for name in names if is_whole(saved.get(name))}
        self.settings = replace(self.settings, **chosen)
        if "sync_every" in chosen:
            self.follows_length = False
            self.chooses_rounds = False
            self.why_rounds = "from the checkpoint"

    def restore(self, saved: Fields) -> None:
        """Restores the applicable settings, and any choice of the planner, from a checkpoint."""
        saved = read_settings(saved)
        self.settings = self.settings.taken_from(saved)
        if self.follows_length:
            self._restore_rounds(saved)
        if self.chooses_dense:
            dense = saved.get("dense_beginning")
            self.chooses_dense = dense == AUTO
            if not self.chooses_dense:
                self.settings = replace(self.settings, dense_beginning=DenseBeginning.read(dense))
        # Older runs recorded the default number of blocks.
        fragments = self.settings.fragments
        saved_fragments = saved.get("fragments")
        is_name = isinstance(fragments, str) and isinstance(saved_fragments, str)
        if is_name and str(saved_fragments).startswith(f"{fragments}:"):
            self.settings = replace(self.settings, fragments=str(saved_fragments))
        is_saved = all(saved.get(name) not in (None, AUTO) for name in self.auto)
        if self.auto and is_saved:
            self._restore_choice(saved)

    def _restore_choice(self, saved: Fields) -> None:
        """Restores the planner's choice from a checkpoint that was saved after the choice."""
        chosen: State = {}
        for name in self.auto:
            chosen[name] = saved[name]
            if name == "exchange":
                backend = kind_and_backend(self.settings.exchange)[1]
                chosen[name] = TwoShot.read(saved[name], backend)
            elif isinstance(saved[name], dict):
                raise ValueError(
                    f"{name}='auto' was given, but the checkpoint has"
                    f" {name}={as_text(saved[name])}, which cannot be restored from text. Pass the"
                    f" same {name} as in that run."
                )
        if self.overlap_gives_way and "sync_every" in chosen:
            chosen["overlap_steps"] = overlap_for(chosen["sync_every"], None)
        self.auto = ()
        self.settings = replace(self.settings, **chosen)

    def start(self) -> None:
        self._times = [time.monotonic()]

    def step(self, launch_in: int, waited: float) -> bool:
        """Counts an inner step and returns whether it is time to choose the open settings.

        Args:
            launch_in: The number of inner steps until the next launch is due.
            waited: The seconds that training has spent waiting for other groups so far. Waiting
                time does not count as part of a step.
        """
        if self.open:
            self._times.append(time.monotonic() - waited)
        return bool(self.open) and (len(self._times) > STEPS or launch_in <= 1)

    def step_time(self) -> float:
        """Returns the median duration of an inner step, or the shortest if only a few are known."""
        if len(self._times) > STEPS:
            seconds = median(after - before for before, after in pairwise(self._times[FIRST:]))
        else:
            steps = (after - before for before, after in pairwise(self._times))
            seconds = min(steps, default=0.0)
        return max(1e-6, seconds)

    def _measured_link(self, model: nn.Module, topology: Topology, to: int | None = None) -> Link:
        """Measures the link with messages no larger than this rank's share of the parameters in
        float32, because no exchange sends more.
        """
        values = Model.of_parameters(trainable(model)).numel
        share = FLOAT32 * values // topology.group_size
        timeout = self.settings.timeout.total_seconds()
        return measure_link(topology, timeout, min(share, _MOST_BYTES), to)

    def choose(self, model: nn.Module, topology: Topology) -> None:
        """Measures the link and adopts the planner's recommendation for the open settings.

        All ranks must call this method.
        """
        settings = self.settings
        step_time = max(topology.world.all_gather_object(self.step_time()))
        names = tuple(name for name in self.auto if name != "exchange")
        if "exchange" in self.auto:
            links = [
                self._measured_link(model, topology, to=group).gbit_s
                for group in range(topology.num_groups)
            ]
            backend: Any = kind_and_backend(settings.exchange)[1]
            settings = replace(settings, exchange=TwoShot(backend=backend).over(links))
            if topology.rank == 0:
                _log.warning(
                    "Choosing exchange=%r based on the measured links (in Gbit/s).",
                    settings.exchange,
                )
        if names and topology.num_groups > 1:
            self.measured = Measured(step_time, self._measured_link(model, topology))
        chosen = topology.world.all_gather_object(
            choice(names, settings, model, topology, self.measured)
        )[0]
        self.auto = ()
        self.settings = replace(settings, **chosen)
        if self.chooses_rounds:
            self._choose_rounds(model, topology, step_time)
        if self.chooses_dense:
            self._choose_dense(model, topology, step_time)
        self._choose_outer_step(model, topology)


def dense_rounds_alone(settings: Settings, dense: DenseBeginning) -> Settings:
    """Returns the settings of a run in which all rounds are dense."""
    overlap_steps = dense.overlap(settings.overlap_steps)
    return replace(settings, sync_every=dense.sync_every, overlap_steps=overlap_steps)


def is_hidden(method: Streaming, link: Link) -> bool:
    """Returns whether training almost never waits for transfers over a link."""
    utilisation = method.utilisation(with_margin(link))
    waits = method.groups.step_time * (1 / utilisation - 1)
    return utilisation >= TARGET or waits <= _NEXT_TO_NOTHING


def choice(
    names: tuple[str, ...],
    settings: Settings,
    model: nn.Module,
    topology: Topology,
    measured: Measured | None,
) -> State:
    """Returns the planner's recommendation for the named settings on a measured link."""
    if not names:
        return {}
    workload = Model.of_parameters(trainable(model))
    suitable = candidates_among(names, settings, workload)
    if measured is None:
        recommended = next(suitable)
    else:
        groups = _groups_of(model, topology, measured.step_time)
        recommended = recommend(workload, groups, measured.link, suitable).settings
    return {name: getattr(recommended, name) for name in names}


def _groups_of(model: nn.Module, topology: Topology, step_time: float) -> Groups:
    """Describes the groups for the planner."""
    memory_rate = _MEMORY_RATES.get(next(model.parameters()).device.type, _MEMORY_RATE)
    return Groups(step_time, topology.num_groups, topology.group_size, memory_rate)


def candidates_among(
    names: tuple[str, ...], settings: Settings, model: Model
) -> Iterator[Settings]:
    """Yields the settings with each distinct choice from the planner's candidates, in order."""
    seen = set()
    for candidate in candidates(model):
        chosen = tuple(getattr(candidate, name) for name in names)
        sync_every = candidate.sync_every if "sync_every" in names else settings.sync_every
        overlap_steps = (
            candidate.overlap_steps if "overlap_steps" in names else settings.overlap_steps
        )
        if chosen not in seen and overlap_steps < sync_every:
            seen.add(chosen)
            yield replace(settings, **dict(zip(names, chosen, strict=True)))


def measure_link(topology: Topology, timeout: float, largest: int, to: int | None = None) -> Link:
    """Measures the link between groups with increasingly large messages.

    All ranks must call this function.

    Args:
        topology: The worker groups.
        timeout: The time limit for an exchange, in seconds.
        largest: The size of the largest message, in bytes.
        to: The group whose link is measured while all other groups send to it at once. If None, all
            groups send to all others.
    """
    exchange = topology.exchange

    def seconds(nbytes: int) -> float:
        """Sends messages of this size and returns the transfer time in seconds."""
        message = torch.zeros(nbytes, dtype=torch.uint8, device=exchange.device)
        messages = [
            message if to in (None, group) else message[:1] for group in range(exchange.num_groups)
        ]
        started = time.monotonic()
        exchange.collect(exchange.post(messages), started + timeout)
        times = topology.world.all_gather_object(time.monotonic() - started)
        if to is not None:
            times = times[topology.group_size * to :][: topology.group_size]
        return float(max(times))

    round_trip = min(seconds(1) for _ in range(3))
    nbytes = _LEAST_BYTES
    transfer = seconds(nbytes)
    while transfer < _ENOUGH_SECONDS and nbytes < largest:
        nbytes = min(4 * nbytes, largest)
        transfer = seconds(nbytes)
    if transfer < _ENOUGH_SECONDS:
        # By now, the connections have reached full speed.
        transfer = min(transfer, seconds(nbytes))
    # All ranks of a group send at once, each to all other groups.
    sent = nbytes * (topology.num_groups - 1) * topology.group_size
    return Link(
        gbit_s=sent * 8 / max(transfer - round_trip, 1e-6) / 1e9, round_trip=min(round_trip, 9.9)
    )


def announce_choice(
    settings: Settings, fragments: int, measured: Measured | None
) -> dict[str, float]:
    """Logs the chosen settings and returns their values for a trainer's loggers."""
    numbers: dict[str, float] = {
        "sdiloco/sync_every": settings.sync_every,
        "sdiloco/overlap_steps": settings.overlap_steps,
        "sdiloco/fragments": fragments,
    }
    if measured is not None:
        numbers |= {
            "sdiloco/step_time": measured.step_time,
            "sdiloco/measured_gbit_s": measured.link.gbit_s,
            "sdiloco/link_round_trip": measured.link.round_trip,
        }
    _log.warning(
        "Chosen: sync_every=%d, overlap_steps=%d, fragments=%r (number of fragments: %d),"
        " compression=%r, because %s. A resumed fit restores these settings from its checkpoint.",
        settings.sync_every,
        settings.overlap_steps,
        settings.fragments,
        fragments,
        settings.compression,
        measured or "there is one worker group, for which all settings cost the same",
    )
    return numbers
