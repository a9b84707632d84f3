"""The methods that are compared, by the names under which their runs are saved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from typing_extensions import override

from benchmarks.methods.trained import Dropping, Eager, FedGLOMO, HalfSpeed, SlowUplink
from benchmarks.models import TINY
from benchmarks.quality import DILOCO, ELEMENTWISE, HELD_OUT, MUON_RATES, TUNING, Rates, pair
from benchmarks.training import CUT, NamedTraining
from lightning_sdiloco import Carry, RandomPairs, Ring, Selective, TwoShot
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import ErrorFeedback, Int2, Threshold, TopK

from delayed_nesterov import DelayedNesterov  # isort: skip  (on the path since benchmarks.models)
from edit import ByMedian, ByNorm, ZScore  # isort: skip
from saps_psgd import FastestPairs  # isort: skip
from snoo import LOOKAHEAD, SNOO  # isort: skip

DEFAULTS = "defaults"
ALONE = "AdamW alone"
LARGER = "defaults, 8 windows a step"
AVERAGED = "FedAvg, SGD inside"

SIZE = "0.1M"
SYNC_EVERY = 20
OVERLAP_STEPS = 5


@dataclass(frozen=True)
class MethodTraining(NamedTraining):
    """A training with a method that consists of arguments for the engine."""

    @override
    def method_choices(self) -> Mapping[str, Any]:
        return METHODS[self.method].sets()


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        sets: A function that returns the arguments for the engine.
        beside: The method with which it is compared, with the same number of groups. None: it is a
            reference.
        groups: The number of worker groups; a single one trains without the engine if `beside` is
            None.
        changes: The changes to its trainings.
        training: The class of its trainings.
    """

    sets: Callable[[], dict[str, Any]] = dict
    beside: str | None = DEFAULTS
    groups: Sequence[int] = (4,)
    changes: Mapping[str, Any] = field(default_factory=dict)
    training: type[NamedTraining] = MethodTraining


_GPA = {"inner": "gpa", "lr": 6e-3}
_PAIRS: dict[str, Any] = {"compression": "int8"}
_SGD = {"inner": "sgd", "lr": 0.3}

METHODS: Mapping[str, Method] = {
    DEFAULTS: Method(beside=None, groups=(2, 4)),
    "Selective(0.3, most=4)": Method(lambda: {"schedule": Selective(0.3, 4)}, groups=(2, 4)),
    "Carry": Method(lambda: {"mixing": Carry()}),
    "defaults, tau=19": Method(lambda: {"overlap_steps": 19}),
    "Carry, tau=19": Method(lambda: {"overlap_steps": 19, "mixing": Carry()}),
    "Eager, tau=19": Method(training=Eager),
    "ByNorm(1.0)": Method(lambda: {"weighing": ByNorm(1.0)}),
    "ZScore(warmup=20)": Method(lambda: {"weighing": ZScore(warmup=20)}),
    "ByMedian": Method(lambda: {"weighing": ByMedian()}),
    "DelayedNesterov(every=4)": Method(
        lambda: {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=4)}
    ),
    "top_k+memory": Method(lambda: {"compression": "top_k+memory"}),
    "random_k+memory, outer_lr=1": Method(
        lambda: {"compression": "random_k+memory", "outer_lr": 1.0, "outer_momentum": 0.0}
    ),
    "sparse, over senders": Method(
        lambda: {"compression": ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)}
    ),
    "Threshold(every=10)": Method(
        lambda: {"compression": ErrorFeedback(Threshold(1 / 64, Int2(), every=10), decay=0.95)}
    ),
    "ByLink, one slow uplink": Method(training=SlowUplink),
    "Paced, one at half speed": Method(training=HalfSpeed),
    "TwoShot([0.4, 0.2, 0.2, 0.2])": Method(lambda: {"exchange": TwoShot([0.4, 0.2, 0.2, 0.2])}),
    # With NoLoCo's own numbers, and with the plain mean.
    "RandomPairs": Method(
        lambda: {"route": RandomPairs(), **_PAIRS, "outer_lr": 0.7, "outer_momentum": 0.5}
    ),
    "FastestPairs": Method(
        lambda: {"route": FastestPairs(speeds=()), **_PAIRS, "outer_lr": 1.0, "outer_momentum": 0.0}
    ),
    "Ring": Method(lambda: {"route": Ring(), **_PAIRS}),
    "Muon": Method(changes={"inner": "muon", "lr": MUON_RATES[2].ours}),
    "GPA inside, outer momentum": Method(changes=_GPA),
    "GPA inside, none outside": Method(
        lambda: {"outer_lr": 1.0, "outer_momentum": 0.0}, changes=_GPA
    ),
    LARGER: Method(beside=None, changes={"batch": 8}),
    "DropCompute": Method(beside=LARGER, changes={"batch": 8}, training=Dropping),
    AVERAGED: Method(lambda: {**DILOCO, "outer_lr": 1.0, "outer_momentum": 0.0}, changes=_SGD),
    "FedGLOMO": Method(beside=AVERAGED, changes={**_SGD, "lr": 0.1}, training=FedGLOMO),
    ALONE: Method(beside=None, groups=(1,), changes={"lr": 1.5e-3}),
    "Lookahead": Method(lambda: dict(LOOKAHEAD), beside=ALONE, groups=(1,), changes={"lr": 3e-3}),
    "SNOO": Method(lambda: dict(SNOO), beside=ALONE, groups=(1,), changes={"lr": 1.5e-3}),
}
"""The methods by name."""

TRIED: Mapping[str, Sequence[float]] = {
    "GPA inside, outer momentum": (3e-3, 6e-3, 1.2e-2),
    "GPA inside, none outside": (3e-3, 6e-3, 1.2e-2),
    ALONE: (7.5e-4, 1.5e-3, 3e-3, 6e-3),
    "Lookahead": (1.5e-3, 3e-3, 6e-3),
    "SNOO": (7.5e-4, 1.5e-3, 3e-3, 6e-3),
    AVERAGED: (0.1, 0.3, 1.0, 3.0),
    "FedGLOMO": (0.03, 0.06, 0.1),  # at 0.3 it diverges
}
"""The inner learning rates of methods that have their own."""


def training(method: str, groups: int, seed: int) -> NamedTraining:
    """Returns a training with the rates and settings of the verdict of `benchmarks.quality`."""
    entry = METHODS[method]
    rate = entry.changes.get("lr")
    usual, _ = pair(SIZE, groups, seed, None if rate is None else Rates(rate, rate))
    method_training = entry.training(**{**vars(usual), **entry.changes, "method": method})
    if groups == 1 and entry.beside is None:
        return replace(method_training, choices=None)
    base = {
        "sync_every": SYNC_EVERY,
        "overlap_steps": OVERLAP_STEPS,
        "outer_optimizer": ELEMENTWISE,
    }
    changes = method_training.method_choices()
    settings = Settings(**{**base, **changes}).chosen_for(groups)
    chosen = {name: value for name, value in settings.numbers.items() if name not in changes}
    choices = {
        "sync_every": settings.sync_every,
        "overlap_steps": settings.overlap_steps,
        "fragments": CUT,
        **chosen,
    }
    return replace(method_training, choices=choices)


def wanted() -> Iterator[NamedTraining]:
    """Yields all trainings, seed by seed, so that finished runs are paired."""
    for groups, seed in product((2, 4, 1), HELD_OUT):
        for name, method in METHODS.items():
            if groups in method.groups:
                yield training(name, groups, seed)


def rates() -> Iterator[NamedTraining]:
    """Yields trainings at each rate of methods that have their own, with a quarter of the
    tokens.
    """
    for name, tried in TRIED.items():
        base = training(name, METHODS[name].groups[0], TUNING[0])
        for rate in tried:
            at_rate = replace(base, lr=rate)
            yield at_rate if base.inner == "gpa" else replace(at_rate, budget=4.0)


def quick() -> Iterator[NamedTraining]:
    """Yields trainings that show that the benchmark runs: all kinds of training, and their
    references.
    """
    names: list[str] = []
    for name, method in METHODS.items():
        if method.training is not MethodTraining or method.groups == (1,):
            names += (method.beside or name, name)
    for name in dict.fromkeys(names):
        groups = METHODS[name].groups[-1]
        yield replace(training(name, groups, 0), size=TINY, budget=0.05, validation_windows=32)
