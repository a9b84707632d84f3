"""Runs a configuration as several worker groups in this process."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.engine import trainable
from lightning_sdiloco.planning import Model
from lightning_sdiloco.tools.simulate.configuration import Configuration
from lightning_sdiloco.tools.simulate.processes import SimulatedRank
from lightning_sdiloco.tools.simulate.recording import LAST, Validation
from lightning_sdiloco.tools.simulate.turns import Turns
from lightning_sdiloco.tools.simulate.world import simulated_topologies

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@dataclass(frozen=True)
class Group:
    """What happened in one simulated group."""

    losses: list[float]
    outer_loss: float | None
    bytes_sent: int
    inner_steps: int
    step_seconds: float | None
    idle: tuple[int, ...] = ()
    launches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def first_loss(self) -> float | None:
        """Returns the mean loss of the first batches."""
        return _mean(self.losses[:LAST])

    @property
    def last_loss(self) -> float | None:
        """Returns the mean loss of the last batches."""
        return _mean(self.losses[-LAST:])


@dataclass(frozen=True)
class Run:
    """What happened in a simulated run."""

    groups: list[Group]
    validations: list[Validation]
    outer: dict[str, Tensor]
    model: Model
    settings: Settings

    @property
    def outer_loss(self) -> float | None:
        """Returns the mean loss of the outer model on the last batches of all groups."""
        losses = [group.outer_loss for group in self.groups if group.outer_loss is not None]
        return _mean(losses)

    @property
    def step_seconds(self) -> float | None:
        """Returns the seconds of an inner step here, in the median group."""
        known = sorted(group.step_seconds for group in self.groups if group.step_seconds is not None)
        return known[len(known) // 2] if known else None


def run(
    configuration: Configuration,
    groups: int,
    choices: Mapping[str, Any] | None = None,
    stepped: Callable[[], None] = lambda: None,
    speeds: Sequence[float] | None = None,
) -> Run:
    """Runs a configuration as several worker groups of one rank each, in threads that take turns."""
    _require_groups(groups)
    turns: Turns[tuple[Group, Run | None]] = Turns(groups)
    topologies = simulated_topologies(groups, turns.until)
    ranks = [
        SimulatedRank(topology, turns.seconds, step_time=1 / speeds[group] if speeds else 0.0)
        for group, topology in enumerate(topologies)
    ]
    with quiet():
        lived = turns.run([partial(live, configuration, rank, choices or {}, stepped) for rank in ranks])
    first = lived[0][1]
    assert first is not None
    return Run([group for group, _ in lived], first.validations, first.outer, first.model, first.settings)


def check(
    configuration: Configuration, groups: int, choices: Mapping[str, Any], site: int | None = None
) -> dict[str, Any]:
    """Refuses what the strategy would refuse, without making a model or data."""
    _require_groups(groups)
    turns: Turns[dict[str, Any]] = Turns(1)
    rank = SimulatedRank(simulated_topologies(1, turns.until)[0], turns.seconds, site, groups)
    with quiet():
        (arguments,) = turns.run([partial(configuration.arguments_of_strategy, rank, choices)])
    names = {item.name for item in fields(Settings)}
    plain = {name: value for name, value in arguments.items() if name in names and _is_plain(value)}
    Settings(**plain)
    return arguments


def _is_plain(value: Any) -> bool:
    """Tells whether a value of a configuration is what the strategy gets, and not the path of a class."""
    return isinstance(value, (str, int, float, list)) or value is None


def _require_groups(groups: int) -> None:
    if groups < 1:
        raise ValueError(f"groups={groups} is out of range: it must be at least 1. Give the number of worker groups.")


def live(
    configuration: Configuration, rank: SimulatedRank, choices: Mapping[str, Any], stepped: Callable[[], None]
) -> tuple[Group, Run | None]:
    """Runs one group to its end, in its thread. Only the first returns what is the same in all."""
    recorder = configuration.classes.recorder(rank.clock, stepped, rank.begins, rank.step_time)
    trainer = configuration.fit(rank, choices, recorder)
    strategy = trainer.strategy
    if strategy.engine is None:
        raise ValueError("The configuration trains nothing. See that its max_steps and max_epochs are not 0.")
    report = strategy.report()
    group = Group(
        losses=recorder.losses,
        outer_loss=recorder.outer_loss,
        bytes_sent=int(report["bytes_sent"]),
        inner_steps=int(report["inner_steps"]),
        step_seconds=recorder.step_seconds,
        idle=tuple(recorder.idle),
        launches=recorder.launches,
    )
    if rank.rank:
        return group, None
    model = Model.of_parameters(trainable(trainer.lightning_module))
    return group, Run([], recorder.validations, strategy.outer_state_dict(), model, strategy.engine.settings)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what every Trainer says about itself, and restores the environment."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    seeds = {name: os.environ.get(name) for name in _SEEDS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name, seed in seeds.items():
            if seed is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = seed


def _mean(numbers: list[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
