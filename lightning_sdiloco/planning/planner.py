"""Predicts what each method needs and gets on a link, and recommends settings that suit model and link."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from lightning_sdiloco.algorithm.config import OVERLAP_STEPS, Settings
from lightning_sdiloco.compression import COMPRESSIONS
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import DataParallel, Memory, Method, Streaming
from lightning_sdiloco.planning.workload import Groups, Model

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The compute utilisations for which a prediction names the bandwidth: those of the paper's Table 4."""

TARGET = 0.95
"""The compute utilisation that a recommendation aims at."""

MARGIN = 0.8
"""The share of the bandwidth that a recommendation counts on."""

SYNC_EVERY = (30, 50, 100, 200, 300, 500)
"""The ``sync_every`` that are tried."""

LARGEST_SYNC_EVERY = max(SYNC_EVERY)
"""The largest ``sync_every`` among the `candidates`."""


class Prediction(NamedTuple):
    utilisation: float
    bytes_per_step: float
    bytes: float
    peak_gbit_s: float
    gbit_s_for: dict[str, float | None]


def predict(method: Method, link: Link, steps: int) -> Prediction:
    return Prediction(
        utilisation=method.utilisation(link),
        bytes_per_step=method.bytes_per_step,
        bytes=method.bytes_in(steps),
        peak_gbit_s=method.peak_gbit_s,
        gbit_s_for={str(target): _least(method, link, target) for target in TARGETS},
    )


def _least(method: Method, link: Link, target: float) -> float | None:
    """Finds the least bandwidth from 1 kbit/s to 10 Tbit/s that reaches the target, to a thousandth; None if none."""

    def reaches(exponent: float) -> bool:
        return method.utilisation(replace(link, gbit_s=10**exponent)) >= target

    low, high = -6.0, 4.0
    if not reaches(high):
        return None
    while high - low > 4e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return 10**high


def alternatives(model: Model, settings: Settings, groups: Groups) -> dict[str, Method]:
    """Returns DDP, and the engine in three ways: everything at once, fragment by fragment, overlapped with training."""
    at_once = replace(settings, overlap_steps=0)
    streaming = {
        "diloco": replace(at_once, fragments=[["*"]]),
        "streaming": at_once,
        "streaming_overlap": settings,
    }
    return {"ddp": DataParallel(model, groups)} | {
        name: Streaming(model, own, groups) for name, own in streaming.items()
    }


def candidates() -> Iterator[Settings]:
    """Yields settings worth a try, those that change training least first."""
    for sync_every, layers, overlap_steps, compression in product(
        SYNC_EVERY, (3, 6, 12, 1), OVERLAP_STEPS, ("fp32", "bf16", "fp4")
    ):
        yield Settings(sync_every, overlap_steps, fragments=f"strided:{layers}", compression=compression)


def recommend(model: Model, groups: Groups, link: Link, among: Iterable[Settings] | None = None) -> Streaming:
    """Recommends the first of the candidates that keeps training busy for `TARGET` of the time, or the best one."""
    best: Streaming | None = None
    reached = 0.0
    for settings in candidates() if among is None else among:
        method = Streaming(model, settings, groups)
        busy = method.utilisation(with_margin(link))
        if busy > 1.01 * reached or busy >= TARGET:
            best, reached = method, busy
        if reached >= TARGET:
            break
    assert best is not None, "there are candidates, and each trains for some of the time"
    return best


def with_margin(link: Link) -> Link:
    return replace(link, gbit_s=MARGIN * link.gbit_s)


class Recommendation(NamedTuple):
    settings: Settings
    prediction: Prediction
    utilisation_with_margin: float
    fragments: tuple[int, ...]
    memory: Memory


class Plan(NamedTuple):
    model: Model
    groups: Groups
    link: Link
    settings: Settings
    steps: int
    fragments: tuple[int, ...]
    methods: dict[str, Prediction]
    compressions: dict[str, Prediction]
    memory: Memory
    recommendation: Recommendation


def plan(model: Model, settings: Settings, groups: Groups, link: Link, steps: int) -> Plan:
    """Predicts all methods, and recommends settings that suit model and link.

    Args:
        model: The model.
        settings: The settings of the engine.
        groups: The groups.
        link: The way from a group to the others.
        steps: Inner steps of the whole run.

    Examples:
        >>> model, groups, link = Model.of_size(10**9, layers=24), Groups(step_time=0.1), Link(gbit_s=1.0)
        >>> planned = plan(model, Settings(), groups, link, steps=10_000)
        >>> {name: round(method.utilisation, 3) for name, method in planned.methods.items()}
        {'ddp': 0.003, 'diloco': 0.701, 'streaming': 0.701, 'streaming_overlap': 0.974}
    """
    own = Streaming(model, settings, groups)
    compressed = {name: replace(settings, compression=name) for name in COMPRESSIONS}
    return Plan(
        model=model,
        groups=groups,
        link=link,
        settings=settings,
        steps=steps,
        fragments=own.numels,
        methods={name: predict(one, link, steps) for name, one in alternatives(model, settings, groups).items()},
        compressions={name: predict(Streaming(model, one, groups), link, steps) for name, one in compressed.items()},
        memory=own.memory,
        recommendation=_recommendation(recommend(model, groups, link), link, steps),
    )


def _recommendation(method: Streaming, link: Link, steps: int) -> Recommendation:
    return Recommendation(
        settings=method.settings,
        prediction=predict(method, link, steps),
        utilisation_with_margin=method.utilisation(with_margin(link)),
        fragments=method.numels,
        memory=method.memory,
    )
