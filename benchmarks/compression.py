"""Measures every compression on real outer gradients.

The outline: errors, speeds, report. The outer gradients are from `benchmarks.outer_gradients`.
Run it with ``python -m benchmarks.compression [--quick] [--speed VALUES] [--two-shots] [--json FILE]``. --two-shots
measures what the second rounding of two shots costs, beside a gather and its bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from benchmarks.outer_gradients import QUICK, Replicas, Training, data_sets, outer_gradients
from lightning_sdiloco.algorithm import digest
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
    Threshold,
    TopK,
)
from lightning_sdiloco.compression.blockwise import Blockwise
from lightning_sdiloco.engine.flight import norm_squared

# ---------------------------------------------------------------------------------------------------------------------
# What the package has, its errors and speeds
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """What a compression does to a vector ``x`` that comes back as ``q``."""

    relative: float
    """|q - x| / |x|, of one replica."""
    cosine: float
    bias: float
    """<x, q> / <x, x>; 1 is right, below is shrinking."""
    mean: float
    """|mean q - mean x| / |mean x| over the replicas: what training sees."""


def errors(replicas: Replicas, quantise: Callable[[Tensor], Tensor]) -> Errors:
    """Measures in float64, so that the measurement adds no error of its own."""
    x = torch.stack(replicas).double()
    q = torch.stack([quantise(replica) for replica in replicas]).double()
    inner = float((x * q).sum() / x.norm())
    mean = (q.mean(0) - x.mean(0)).norm() / x.mean(0).norm()
    return Errors(float((q - x).norm() / x.norm()), inner / float(q.norm()), inner / float(x.norm()), float(mean))


def round_trip(compression: Compression) -> Callable[[Tensor], Tensor]:
    """Encodes and decodes with a compression of the package."""

    def quantise(values: Tensor) -> Tensor:
        decoded = torch.empty_like(values)
        compression.decode(compression.encode(values), decoded)
        return decoded

    return quantise


FAMILY: dict[str, Compression] = {
    # Without a threshold from earlier launches, the one that varies is top_k.
    **{name: codec for name, codec in COMPRESSIONS.items() if not codec.varies()},
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
"""What the package has, by name or as it is written in Python."""


@dataclass(frozen=True)
class FP4ByTorch(FP4):
    """`FP4` as it runs where there is no C compiler."""

    encode = Blockwise.encode
    decode = Blockwise.decode


def error_of_the_sum(rounds: list[Replicas], compression: Compression) -> float:
    """Relative error of all rounds of a replica added up, with the memory that the compression asks for."""
    sent, true, memory = torch.zeros_like(rounds[0][0]).double(), torch.zeros_like(rounds[0][0]).double(), None
    for step, (gradient, *_) in enumerate(rounds):
        now, decoded = compression.at(step), torch.empty_like(gradient)
        payload = now.encode(gradient if memory is None else gradient + memory)
        now.decode(payload, decoded)
        memory = now.remembered(gradient, memory, payload, mixing=0.0)
        sent, true = sent + decoded, true + gradient
    return float((sent - true).norm() / true.norm())


@dataclass(frozen=True)
class Speed:
    """Speed of some work relative to a plain copy of the same values; 0.25 takes four times as long."""

    median: float
    low: float
    high: float
    """The quartiles: what a machine with other work on it makes of the same work."""


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def speeds(family: Mapping[str, Compression], numel: int, repeats: int) -> dict[str, Speed]:
    """Speeds on one thread by name; each time is compared with that of a copy right before it, or a load would tell."""
    values, out = torch.randn(numel), torch.empty(numel)
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
    return {name: Speed(median(found), *quartiles(found)) for name, found in ratios.items()}


def quartiles(values: list[float]) -> tuple[float, float]:
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


# ---------------------------------------------------------------------------------------------------------------------
# Two shots
# ---------------------------------------------------------------------------------------------------------------------

TWO_SHOTS = Training(width=64, layers=2, context=64, rounds=16)
GROUPS = (2, 3, 4, 8)


def means(
    shots: AllReduce, gradients: Replicas, memories: list[Tensor | None], residuals: list[Tensor | None]
) -> Tensor:
    """The mean of a round in one place. What is remembered is replaced."""
    count = Count(dict.fromkeys(range(shots.groups), 1.0))
    mean = shots.reduce_locally(gradients, memories, residuals, count)
    encoded = [shots.encode(*own) for own in zip(gradients, memories, strict=True)]
    for group, residual in enumerate(residuals):
        part = shots.mean([one.payloads[group] for one in encoded], count, like=gradients[0])
        hop = shots.second_hop(part, residual)
        residuals[group] = None if hop is None else hop.residual
    memories[:] = [one.memory for one in encoded]
    return mean


def error_of_the_means(
    kind: type[AllReduce], codec: Compression, rounds: list[Replicas], groups: int, forgets: bool
) -> float:
    """Relative error of the means of all rounds added up: what the outer parameters are off by."""
    memories: list[Tensor | None] = [None] * groups
    residuals: list[Tensor | None] = [None] * groups
    sent, true = torch.zeros_like(rounds[0][0]).double(), torch.zeros_like(rounds[0][0]).double()
    for step, gradients in enumerate(rounds):
        sent += means(kind(groups, codec.at(step), 0.0), gradients[:groups], memories, residuals)
        true += torch.stack(gradients[:groups]).double().mean(0)
        if forgets:
            residuals = [None] * groups
    return float((sent - true).norm() / true.norm())


def two_shots(training: Training) -> dict[str, float]:
    """Prints the errors and bytes of a gather and of two shots, and returns the errors."""
    rounds, headline = outer_gradients(training, max(GROUPS)), dict[str, float]()
    numel = rounds[0][0].numel()
    ways = {"gather": (AllReduce, False), "two shots": (TwoShotAllReduce, False)}
    ways["two shots that forget"] = (TwoShotAllReduce, True)
    print(f"{numel:,} parameters, {training.rounds} rounds of {training.sync_every} inner steps\n")
    print(f"| compression | M | bytes of two shots, of a gather's | {' | '.join(ways)} |\n|---|---|---|---|---|---|")
    for name, codec in FAMILY.items():
        for groups in GROUPS:
            gather, two = AllReduce(groups, codec, 0.0), TwoShotAllReduce(groups, codec, 0.0)
            share = (two.payload_bytes(numel) + two.second_hop_bytes(numel)) / gather.payload_bytes(numel)
            found = {what: error_of_the_means(kind, codec, rounds, groups, own) for what, (kind, own) in ways.items()}
            print(
                f"| `{name}` | {groups} | {share:.2f} | {' | '.join(f'{e:.4f}' for e in found.values())} |", flush=True
            )
            headline |= {f"{name}, {groups} groups: {what}": error for what, error in found.items()}
    return headline


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------

Row = tuple[float, dict[str, Errors]]
"""Bits a value, and the errors by data set."""


def measure(data: dict[str, Replicas]) -> dict[str, Row]:
    numel = 1 << 20
    rows: dict[str, Row] = {}
    for name, compression in FAMILY.items():
        bits = compression.wire_bytes(numel) * 8 / numel
        rows[name] = bits, {k: errors(v, round_trip(compression)) for k, v in data.items()}
    return rows


def print_errors(rows: dict[str, Row]) -> None:
    """Prints one Markdown table; a cell holds error, cosine, bias, error of the mean."""
    names = list(next(iter(rows.values()))[1])
    print("Cells: relative L2 error, cosine, bias <x, q>/<x, x>, relative L2 error of the mean of the replicas.\n")
    print("| compression | bits | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    for label, (bits, found) in rows.items():
        cells = (f"{e.relative:.3f} {e.cosine:.3f} {e.bias:.3f} {e.mean:.3f}" for e in found.values())
        print(f"| {label} | {bits:.3f} | " + " | ".join(cells) + " |")


def print_family(rows: dict[str, Row], sums: dict[str, float], found: dict[str, Speed]) -> None:
    print("\n| compression | bits | error | cosine | error of the mean | error of the sum | encode | decode |")
    print("|---|---|---|---|---|---|---|---|")
    for name in FAMILY:
        bits, by_data = rows[name]
        e = [e for data, e in by_data.items() if data.startswith("outer")][-1]
        speed = " | ".join(f"{found[f'{name}_{what}'].median:.2f}" for what in ("encode", "decode"))
        print(
            f"| `{name}` | {bits:.3f} | {e.relative:.3f} | {e.cosine:.3f} | {e.mean:.3f} | {sums[name]:.3f} | {speed} |"
        )


def print_speeds(found: dict[str, Speed]) -> None:
    """Prints all speeds with their spread as a Markdown table."""
    print("\n| work | relative to a copy | quartiles |\n|---|---|---|")
    for name, speed in found.items():
        print(f"| `{name}` | {speed.median:.2f} | {speed.low:.2f} to {speed.high:.2f} |")


def speed_headline(found: dict[str, Speed]) -> dict[str, float]:
    return {f"{name}_of_copy": speed.median for name, speed in found.items()}


def error_headline(rows: dict[str, Row]) -> dict[str, float]:
    bits, by_data = rows["fp4"]
    last = [e for name, e in by_data.items() if name.startswith("outer")][-1]
    return {"fp4_bits_per_value": bits, **{f"fp4_outer_{k}": v for k, v in asdict(last).items()}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and short vectors: does it run at all")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--speed", type=int, metavar="VALUES", help="measure only speeds, of what has a name")
    parser.add_argument("--two-shots", action="store_true", help="measure only what two shots cost")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.two_shots:
        headline = two_shots(QUICK if options.quick else TWO_SHOTS)
        if options.json:
            options.json.write_text(json.dumps({"headline": headline, "torch": torch.__version__}, indent=1) + "\n")
        return

    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread\n")
    numel = options.speed or 1 << (18 if options.quick else 24)
    found = speeds(
        {**(COMPRESSIONS if options.speed else FAMILY), "fp4 by torch": FP4ByTorch()},
        numel,
        repeats=3 if options.quick else 7,
    )
    written: dict[str, Any] = {
        "headline": speed_headline(found),
        "speeds": {name: asdict(speed) for name, speed in found.items()},
        "speed_values": numel,
    }
    if not options.speed:
        rounds = outer_gradients(QUICK if options.quick else Training())
        rows = measure(data_sets(rounds))
        sums = {name: error_of_the_sum(rounds, compression) for name, compression in FAMILY.items()}
        print_errors(rows)
        print_family(rows, sums, found)
        table = {label: {"bits": bits, **{k: asdict(e) for k, e in v.items()}} for label, (bits, v) in rows.items()}
        written["headline"] |= error_headline(rows)
        written |= {"errors": table, "sums": sums}
    print(f"\nSpeeds of {numel} values; medians of several repeats:")
    print_speeds(found)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
