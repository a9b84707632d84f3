"""Measures the cost of the direction of matrices in a flight, compared with inner steps and with
other ways to compute it.

    python -m benchmarks.directions [--quick] [--json FILE]

Everything runs in one thread. For the models of the other benchmarks, it times `equalised` for all
matrices of a round, and inner steps with the usual batch. The share is the time that a round adds
to H=100 inner steps, all of it in the background. For single matrices, as wide as in models of 100
million and a billion parameters, it times `equalised`, torch's singular value decomposition, and
Muon's five steps in float32, whose results differ between processors and do not have equal singular
values. Each is timed three times, and the median counts.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.models import SMALL, TEN_MILLION, TINY, Size, adamw, next_byte_loss, random_batches
from lightning_sdiloco import OuterOptimizer, StreamingDiLoCo
from lightning_sdiloco.algorithm.direction import equalised
from lightning_sdiloco.comm.communicator import Communicator

SYNC_EVERY = 100
TIMES = 3


class Trained(NamedTuple):
    name: str
    size: Size
    batch: int


MODELS = (
    Trained("0.1M", SMALL, 1),
    Trained("0.5M", Size(4, 96, 3, 128), 2),
    Trained("2M", Size(6, 160, 5, 128), 8),
    Trained("10M", TEN_MILLION, 32),
)
SHAPES = ((48, 192), (768, 768), (768, 3072), (2048, 2048))
MUON = (3.4445, -4.7750, 2.0315)


def seconds(work: Callable[[], object]) -> float:
    """Returns the duration of a function once it is warm."""
    work()
    taken = list[float]()
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken)


def of_round(trained: Trained) -> tuple[float, float]:
    """Returns the durations of the direction of all matrices and of an inner step."""
    model = trained.size.make()
    outer = OuterOptimizer(direction="equalised")
    engine = StreamingDiLoCo(model, sync_every=SYNC_EVERY, outer_optimizer=outer)
    fragments = engine.fragmented_model.fragments
    gradients = [torch.randn(fragment.layout.length) for fragment in fragments]
    alone = Communicator()
    optimizer = adamw(model.parameters(), lr=1e-3, weight_decay=0.1)
    tokens, targets = next(random_batches(trained.size, trained.batch))

    def direct() -> None:
        for fragment, gradient in zip(fragments, gradients, strict=True):
            fragment.matrices.direct(gradient, alone)

    def step() -> None:
        optimizer.zero_grad()
        next_byte_loss(model, tokens, targets).backward()
        optimizer.step()

    with torch.no_grad():
        directing = seconds(direct)
    training = seconds(step)
    engine.close()
    return directing, training


def decomposed(matrix: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left @ right) * values.mean()


def by_muon(matrix: Tensor) -> Tensor:
    factor = matrix / matrix.norm()
    linear, cubic, quintic = MUON
    for _ in range(5):
        gram = factor @ factor.mT
        factor = linear * factor + (cubic * gram + quintic * gram @ gram) @ factor
    return factor


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    headline = dict[str, float]()
    rows = list[list[str]]()
    for trained in (Trained("tiny", TINY, 1),) if options.quick else MODELS:
        directing, training = of_round(trained)
        share = directing / (SYNC_EVERY * training)
        headline[f"{trained.name}, share of a round"] = share
        rows.append(
            [
                trained.name,
                f"{1000 * directing:.1f}",
                f"{1000 * training:.1f}",
                f"{100 * share:.1f}",
            ]
        )
        report.said(" ".join(rows[-1]))
    columns = [
        "parameters",
        "direction of a round, ms",
        "inner step, ms",
        f"share at H={SYNC_EVERY}, %",
    ]
    report.show("The direction of all matrices", columns, rows)
    rows = []
    for height, width in SHAPES[:1] if options.quick else SHAPES:
        matrix = torch.randn(height, width)
        ours = seconds(partial(equalised, matrix))
        svd = seconds(partial(decomposed, matrix))
        muon = seconds(partial(by_muon, matrix))
        name = f"{height} x {width}"
        headline[f"{name}, decomposition over ours"] = svd / ours
        headline[f"{name}, ours over Muon's"] = ours / muon
        rows.append(
            [
                name,
                *(f"{1000 * taken:.1f}" for taken in (ours, svd, muon)),
                f"{svd / ours:.1f}",
                f"{ours / muon:.1f}",
            ]
        )
        report.said(" ".join(rows[-1]))
    columns = [
        "matrix",
        "ours, ms",
        "decomposition, ms",
        "Muon's, ms",
        "decomposition / ours",
        "ours / Muon's",
    ]
    report.show("One matrix", columns, rows)
    report.write(options.json, headline, report.measured("directions", options.quick))


if __name__ == "__main__":
    main()
