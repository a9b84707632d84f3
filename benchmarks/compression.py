"""Measures every compression on real outer gradients.

    python -m benchmarks.compression [--speed VALUES] [--two-shots] [--quick] [--json FILE]

--speed measures only the speeds of named compressions. --two-shots measures the cost of the second
rounding in two shots, compared with a gather, and the bytes. The outer gradients come from DiLoCo
on small models; harder ones are synthetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, product
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import report
from benchmarks.models import DEMO, SMALL, TINY, Size
from benchmarks.training import Training
from lightning_sdiloco.algorithm.reduce import AllReduce, TwoShotAllReduce
from lightning_sdiloco.algorithm.weighting import Count
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    FP4,
    Compression,
    ErrorFeedback,
    Int2,
    RandomBlock,
    RandomK,
    State,
    Threshold,
    TopK,
)
from lightning_sdiloco.compression.blockwise import Blockwise
from lightning_sdiloco.engine.flight import norm_squared
from lightning_sdiloco.engine.shards import digest

Replicas = list[Tensor]
"""One flat float32 vector per replica."""


def outer_gradients(
    size: Size, rounds: int, groups: int = 2, sync_every: int = 20
) -> list[Replicas]:
    """Trains replicas with Nesterov SGD as the outer optimizer, and returns their outer gradients
    of every round.
    """
    training = Training(size, groups=groups, lr=1e-3, warmup=0.0)
    replicas = [training.group() for _ in range(groups)]
    batches = training.text().batches(training.seed, groups * training.batch)
    outer = nn.Parameter(flat(replicas[0].model))
    optimizer = torch.optim.SGD([outer], lr=0.4, momentum=0.9, nesterov=True)
    gradients = []
    for _ in range(rounds):
        for replica in replicas:
            vector_to_parameters(outer.detach().clone(), replica.model.parameters())
        for tokens, targets in islice(batches, sync_every):
            shares = zip(tokens.chunk(groups), targets.chunk(groups), strict=True)
            for replica, (own_tokens, own_targets) in zip(replicas, shares, strict=True):
                replica.backward(own_tokens, own_targets)
                replica.step()
        gradients.append([outer.detach() - flat(replica.model) for replica in replicas])
        outer.grad = torch.stack(gradients[-1]).mean(0)
        optimizer.step()
    return gradients


def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def heavy_tails(numel: int) -> dict[str, Replicas]:
    """Vectors with heavy tails, each as a pair of replicas."""
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(2, numel, generator=generator) for _ in range(5)]
    student = normal[0] / (torch.stack(normal[1:4]).square().mean(0)).sqrt()
    return {
        "student-t, 3 d.o.f.": list(student),
        "normal * exp(normal)": list(normal[0] * normal[4].exp()),
    }


# -------------------------------------------------------------------------------------------------
# The compressions of the package, their errors and speeds
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """The errors of a compression that decodes a vector ``x`` as ``q``."""

    relative: float
    """|q - x| / |x|, of one replica."""
    cosine: float
    mean: float
    """|mean q - mean x| / |mean x| over the replicas, the error that matters in training."""


def errors(replicas: Replicas, quantise: Callable[[Tensor], Tensor]) -> Errors:
    """Measures in float64, so that the measurement adds no error of its own."""
    x = torch.stack(replicas).double()
    q = torch.stack([quantise(replica) for replica in replicas]).double()
    cosine = float((x * q).sum() / (x.norm() * q.norm()))
    mean = (q.mean(0) - x.mean(0)).norm() / x.mean(0).norm()
    return Errors(float((q - x).norm() / x.norm()), cosine, float(mean))


def round_trip(compression: Compression) -> Callable[[Tensor], Tensor]:
    """Encodes and decodes with a compression of the package."""

    def quantise(values: Tensor) -> Tensor:
        decoded = torch.empty_like(values)
        compression.decode(compression.encode(values), decoded)
        return decoded

    return quantise


FAMILY: dict[str, Compression] = {
    # Without a threshold from earlier launches, the varying one is top_k.
    **{name: codec for name, codec in COMPRESSIONS.items() if not codec.traits.varies},
    "ErrorFeedback(Int2())": ErrorFeedback(Int2()),
    "ErrorFeedback(FP4())": ErrorFeedback(FP4()),
    "TopK(0.03, Int2())": TopK(0.03, Int2()),
    "ErrorFeedback(TopK(0.03, Int2()), 0.95)": ErrorFeedback(TopK(0.03, Int2()), 0.95),
    "TopK(0.03, FP4())": TopK(0.03, FP4()),
    "Threshold(0.03, FP4(), 2.0)": Threshold(0.03, FP4(), 2.0),
    "RandomK(32, FP4())": RandomK(32, FP4()),
    "ErrorFeedback(RandomK(32, FP4()))": ErrorFeedback(RandomK(32, FP4())),
    "RandomBlock(32, FP4())": RandomBlock(32, FP4()),
    "ErrorFeedback(RandomBlock(32, FP4()))": ErrorFeedback(RandomBlock(32, FP4())),
}
"""The compressions of the package, by name or as Python code."""


@dataclass(frozen=True)
class FP4ByTorch(FP4):
    """`FP4` as it runs without a C compiler."""

    encode = Blockwise.encode
    decode = Blockwise.decode


def error_of_the_sum(rounds: list[Replicas], compression: Compression) -> float:
    """Returns the relative error of the sum over all rounds of a replica, with the memory that the
    compression needs.
    """
    sent = torch.zeros_like(rounds[0][0]).double()
    true = torch.zeros_like(rounds[0][0]).double()
    state = State()
    for step, (gradient, *_) in enumerate(rounds):
        now = compression.at(step)
        decoded = torch.empty_like(gradient)
        payload, state = now.encode_launch(gradient, state, mixing=0.0)
        now.decode(payload, decoded)
        sent += decoded
        true += gradient
    return relative_error(sent, true)


def relative_error(sent: Tensor, true: Tensor) -> float:
    return float((sent - true).norm() / true.norm())


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def speeds(family: Mapping[str, Compression], numel: int, repeats: int) -> dict[str, list[float]]:
    """Speeds on one thread by name: first quartile, median and third, relative to a copy.

    0.25 takes four times as long. Each time is compared with that of a copy right before it, so
    that other load does not matter.
    """
    values = torch.randn(numel)
    out = torch.empty(numel)
    ratios: dict[str, list[float]] = {}

    def run(name: str, work: Callable[[], object]) -> None:
        copy = seconds(lambda: out.copy_(values))
        ratios.setdefault(name, []).append(copy / seconds(work))

    for repeat in range(repeats + 1):
        for name, compression in family.items():
            payload = compression.encode(values)
            run(f"{name}_encode", partial(compression.encode, values))
            run(f"{name}_decode", partial(compression.decode, payload, out))
            del payload
        run("copy_into_new_memory", values.clone)
        run("outer_gradient", lambda: torch.sub(values, out, out=out))
        run("norm", lambda: norm_squared(values))
        run("digest", lambda: digest(values))
        if repeat == 0:
            ratios.clear()  # to warm up
    return {name: quantiles(series, n=4, method="inclusive") for name, series in ratios.items()}


# -------------------------------------------------------------------------------------------------
# Two shots
# -------------------------------------------------------------------------------------------------

GROUPS = (2, 3, 4, 8)


def means(
    shots: AllReduce,
    gradients: Replicas,
    memories: list[Tensor | None],
    residuals: list[Tensor | None],
) -> Tensor:
    """Computes the mean of a round, and replaces memories and residuals."""
    count = Count(dict.fromkeys(range(shots.groups), 1.0))
    mean = shots.reduce_locally(gradients, memories, residuals, count)
    encoded = list(map(shots.encode, gradients, memories))
    for group, residual in enumerate(residuals):
        payloads = [launch.payloads[group] for launch in encoded]
        part = shots.mean(payloads, count, like=gradients[0])
        hop = shots.second_hop(part, residual)
        residuals[group] = None if hop is None else hop.residual
    memories[:] = [launch.memory for launch in encoded]
    return mean


def error_of_the_means(
    kind: type[AllReduce], codec: Compression, rounds: list[Replicas], groups: int, forgets: bool
) -> float:
    """Returns the relative error of the sum of all rounds' means, which is the error of the outer
    parameters.
    """
    memories: list[Tensor | None] = [None] * groups
    residuals: list[Tensor | None] = [None] * groups
    sent = torch.zeros_like(rounds[0][0]).double()
    true = torch.zeros_like(rounds[0][0]).double()
    for step, gradients in enumerate(rounds):
        sent += means(kind(groups, codec.at(step), 0.0), gradients[:groups], memories, residuals)
        true += torch.stack(gradients[:groups]).double().mean(0)
        if forgets:
            residuals = [None] * groups
    return relative_error(sent, true)


WAYS: dict[str, tuple[type[AllReduce], bool]] = {
    "gather": (AllReduce, False),
    "two shots": (TwoShotAllReduce, False),
    "two shots that forget": (TwoShotAllReduce, True),
}


def two_shots(rounds: list[Replicas]) -> dict[str, float]:
    """Shows the errors and bytes of a gather and of two shots, and returns the errors."""
    headline = dict[str, float]()
    rows = []
    numel = rounds[0][0].numel()
    for (name, codec), groups in product(FAMILY.items(), GROUPS):
        gather = AllReduce(groups, codec, 0.0)
        two = TwoShotAllReduce(groups, codec, 0.0)
        two_shot_bytes = two.payload_bytes(numel) + two.second_hop_bytes(numel)
        share = two_shot_bytes / gather.payload_bytes(numel)
        row = [f"`{name}`", f"{groups}", f"{share:.2f}"]
        for way, (kind, forgets) in WAYS.items():
            error = error_of_the_means(kind, codec, rounds, groups, forgets)
            row.append(f"{error:.4f}")
            headline[f"{name}, {groups} groups: {way}"] = error
        rows.append(row)
    title = f"{numel:,} parameters, {len(rounds)} rounds"
    report.show(title, ["compression", "M", "bytes of two shots, of a gather's", *WAYS], rows)
    return headline


def every(rounds: list[Replicas], quartiles: Mapping[str, list[float]]) -> dict[str, Any]:
    """Shows the errors and speeds of all compressions, and returns the errors by compression and
    data set.
    """
    outer = f"outer, round {len(rounds)}"
    numel = 1 << 20
    tails = heavy_tails(rounds[0][0].numel())
    vectors = {outer: rounds[-1], **tails}
    table = {}
    sums = {}
    rows = []
    for name, codec in FAMILY.items():
        bits = codec.wire_bytes(numel) * 8 / numel
        measured = {kind: errors(replicas, round_trip(codec)) for kind, replicas in vectors.items()}
        sums[name] = error_of_the_sum(rounds, codec)
        table[name] = {
            "bits": bits,
            **{kind: asdict(numbers) for kind, numbers in measured.items()},
        }
        real = measured[outer]
        cells = [bits, real.relative, real.cosine, real.mean, sums[name]]
        cells += [measured[tail].relative for tail in tails]
        speed = [f"{quartiles[f'{name}_{work}'][1]:.2f}" for work in ("encode", "decode")]
        rows.append([f"`{name}`", *(f"{cell:.3f}" for cell in cells), *speed])
    columns = ["compression", "bits", "error", "cosine", "error of the mean", "error of the sum"]
    columns += [*(f"error of {tail}" for tail in tails), "encode", "decode"]
    report.show(outer, columns, rows)
    return {"errors": table, "sums": sums}


def show_speeds(quartiles: Mapping[str, list[float]], numel: int) -> dict[str, Any]:
    """Shows the speeds, and returns their quartiles by name."""
    rows = []
    table = {}
    for name, (low, median, high) in quartiles.items():
        rows.append([f"`{name}`", f"{median:.2f}", f"{low:.2f} to {high:.2f}"])
        table[name] = {"low": low, "median": median, "high": high}
    title = f"Speeds of {numel} values; medians of several repeats"
    report.show(title, ["work", "relative to a copy", "quartiles"], rows)
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--speed", type=int, metavar="VALUES", help="measure only speeds, of what has a name"
    )
    parser.add_argument("--two-shots", action="store_true", help="measure only what two shots cost")
    options = parser.parse_args(arguments)
    about = report.measured("compression", options.quick)
    if options.two_shots:
        size, rounds = (TINY, 3) if options.quick else (SMALL, 16)
        headline = two_shots(outer_gradients(size, rounds, groups=max(GROUPS)))
        report.write(options.json, headline, about)
        return
    family = COMPRESSIONS if options.speed else FAMILY
    numel = options.speed or 1 << (18 if options.quick else 24)
    repeats = 3 if options.quick else 7
    quartiles = speeds({**family, "fp4 by torch": FP4ByTorch()}, numel, repeats)
    headline = {f"{name}_of_copy": median for name, (_, median, _) in quartiles.items()}
    details = dict[str, Any]()
    if not options.speed:
        size, rounds = (TINY, 3) if options.quick else (DEMO, 24)
        details = every(outer_gradients(size, rounds), quartiles)
        fp4 = details["errors"]["fp4"]
        headline["fp4_bits_per_value"] = fp4["bits"]
        for name, error in fp4[f"outer, round {rounds}"].items():
            headline[f"fp4_outer_{name}"] = error
    speed_table = show_speeds(quartiles, numel)
    report.write(options.json, headline, about, speeds=speed_table, speed_values=numel, **details)


if __name__ == "__main__":
    main()
