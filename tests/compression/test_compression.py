"""One suite that every compression passes, then some code by code against references that import
nothing from them.

Then what they keep from launch to launch, and that what is compiled in C gives the same bits.
"""

import copy
import logging
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from lightning_sdiloco import SimulatedGroups
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    FP4,
    Compression,
    blockwise,
    casts,
    fp4,
    resolve,
    sparse,
)
from lightning_sdiloco.compression.base import State, weighted_mean
from lightning_sdiloco.compression.blockwise import FP8, MXFP4, Blockwise, Int2, Int4, Int8
from lightning_sdiloco.compression.by_link import ByLink
from lightning_sdiloco.compression.casts import BFloat16, Float32
from lightning_sdiloco.compression.feedback import ErrorFeedback
from lightning_sdiloco.compression.fp4 import BLOCK
from lightning_sdiloco.compression.sparse import RandomBlock, RandomK, Threshold, TopK
from tests.bits import SPECIAL, same_bits, vector
from tests.engine.groups import Groups, outer_state, unlike
from tests.training import LAYERS

FLOAT32_MAX = torch.finfo(torch.float32).max
CHUNK = 1 << 20
# A vector cut at multiples of this decodes like its pieces: where blocks of values start anew with
# those of positions.
PLACES = 4096
UNIT = 2 * 4096


class Case(NamedTuple):
    """A compression and what holds for it.

    At most: bits of a value, and norm of what is lost as a share of that of the values. Then values
    that come back as they are, and how much of the largest of all comes back at least.
    """

    compression: Compression
    bits: float
    error: float
    exact: list[float]
    largest: float = 0.99


TWO_BITS = [0.0, 1.5, 0.0, 0.0, -1.5, 0.0]
ONE = [1.25]
MICRO = [6.0, -6.0, 0.0, 0.5, -1.0, 1.5]
# What has a name, and what a user may put together besides, so that every kind of value is sent by
# position.
CASES: dict[str, Case] = {
    "fp32": Case(Float32(), 32, 0.0, [0.1, -math.pi, 1e-45, FLOAT32_MAX, 0.0, -1e-30]),
    "bf16": Case(
        BFloat16(), 16, 0.0025, [1.0, -1.0078125, 0.0, 3.0, -0.15625, 2.0**-126, 1.5 * 2.0**127]
    ),
    "fp8": Case(
        FP8(), 8.07, 0.03, [240.0, -128.0, 0.0, 15.0, 2.0**-9, -3 * 2.0**-9, 2.0**-6, -1.125], 0.93
    ),
    "int8": Case(Int8(), 8.13, 0.02, [127.0, -127.0, 0.0, 1.0, -1.0, 64.0, -33.0]),
    "int4": Case(Int4(), 4.13, 0.3, [7.0, -7.0, 0.0, 1.0, -1.0, 2.0, 6.0, -5.0]),
    "fp4": Case(FP4(), 4.13, 0.2, [1.25, -0.625, 0.0, 1.25 / 64, -1.25 / 32, 1.25 / 4, -1.25]),
    "mxfp4": Case(MXFP4(), 4.26, 0.16, [*MICRO, -2.0, 3.0, -4.0], 0.75),
    "int2": Case(Int2(), 2.26, 0.66, [1.5, -0.75, 0.75, -1.5, -1.5], 1 / 128),
    "sparse": Case(ErrorFeedback(TopK(1 / 64, Int2()), decay=0.95), 0.24, 0.97, TWO_BITS, 1 / 128),
    "top_k": Case(TopK(1 / 64, Int2()), 0.24, 0.97, TWO_BITS, 1 / 128),
    "random_k": Case(RandomK(16, FP4()), 0.27, 1.0, ONE, 0.0),
    "random_block": Case(RandomBlock(16, FP4()), 0.27, 1.0, ONE, 0.0),
    "threshold": Case(Threshold(1 / 64, Int2(), every=10), 0.25, 0.97, TWO_BITS, 1 / 128),
    "topk of fp32": Case(TopK(0.031, Float32()), 1.4, 0.94, [0.0, 0.0, math.pi, 0.0, -1e-30]),
    "topk of fp4": Case(TopK(1 / 32, FP4()), 0.52, 0.94, [0.0, 1.25, 0.0, -1.25 / 64]),
    "feedback of mxfp4": Case(ErrorFeedback(MXFP4()), 4.26, 0.16, MICRO, 0.75),
    "least": Case(Threshold(1 / 32, FP4(), least=3.0), 0.52, 0.94, [0.0, 0.0, 0.0, 0.0, 1.25], 0.0),
}

# For the mean, which each of these takes in another way.
MIXED = {
    "kept threshold": Threshold(1 / 8, Int4(), every=4),
    "random top-k": RandomK(3, TopK(1 / 16, Int2())),
    "random integers": RandomK(5, Int4()),
    "by link": ByLink(("fp4", TopK(1 / 16, Int2()))).at(0, choice=1),
}

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Magnitudes that share a block with one another, so that codes other than 0 and 7 are common.
near = st.floats(min_value=-1.0, max_value=1.0, width=32)


def vectors(elements: st.SearchStrategy[float] = finite) -> st.SearchStrategy[Tensor]:
    """Short lists of values repeated to any length, so that blocks and their ends fall anywhere."""
    lists = st.lists(elements, min_size=1, max_size=40)
    return st.builds(vector, lists, st.integers(1, 3 * BLOCK))


def noise(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()


def round_trip(compression: Compression, values: Tensor) -> Tensor:
    out = torch.full_like(values, torch.nan)
    compression.decode(compression.encode(values), out)
    return out


@given(
    values=vectors(),
    wild=vectors(st.floats(width=32)),
    huge=vectors(st.floats(min_value=2.0**120, max_value=FLOAT32_MAX, width=32)),
    small=vectors(near),
)
@example(
    values=torch.tensor([1.7979e16, 3.0]),
    wild=torch.tensor([math.nan, 1.0, -math.inf]),
    huge=torch.tensor([FLOAT32_MAX]),
    small=torch.tensor([1.0, 0.5, 0.0]),
)
@settings(max_examples=40, deadline=None)
def test_every_compression_keeps_its_contract_on_payloads_values_and_memory(
    values: Tensor, wild: Tensor, huge: Tensor, small: Tensor
) -> None:
    for name, (one, _, _, _, largest) in CASES.items():
        for given_values in (values, wild):
            payload = one.encode(given_values)
            most = one.wire_bytes(given_values.numel())
            assert payload.numel() <= most if one.traits.varies else payload.numel() == most, name
            assert (payload.dtype, payload.dim(), payload.is_contiguous()) == (
                torch.uint8,
                1,
                True,
            ), name
        # Encoding leaves its input alone, and keeps nothing of it: training goes on while the
        # payload is on its way.
        before = values.clone()
        encoded = values.clone()
        payload = one.encode(encoded)
        again = one.encode(before)
        assert same_bits(encoded, before), name
        encoded.fill_(0.5)
        assert torch.equal(payload, again), name
        # Decoding leaves the payload alone, and ignores what is overwritten.
        once = torch.full_like(values, 7.0)
        one.decode(payload, once)
        assert torch.equal(payload, again), name
        assert same_bits(once, round_trip(one, before)), name
        assert once.isfinite().all(), name
        assert torch.equal(round_trip(one, -before), -once), name
        assert torch.equal(round_trip(one, once), once), name
        # Huge values stay huge.
        for signed in (huge, -huge):
            decoded = round_trip(one, signed)
            assert decoded.isfinite().all(), name
            assert decoded.abs().max() >= largest * huge.max(), name
        # What is remembered is what was lost.
        inner = one.compression if isinstance(one, ErrorFeedback) else one
        remembering = ErrorFeedback(inner, decay=0.5)
        payload, state = remembering.encode_launch(small, State(), mixing=0.0)
        assert torch.equal(payload, remembering.encode(small)), name
        lost = small - round_trip(remembering, small)
        assert torch.equal(state.memory, lost * 0.5), name
        memory = torch.ones_like(small)
        payload, state = remembering.encode_launch(small, State(memory), mixing=0.25)
        assert torch.equal(payload, remembering.encode(small + memory)), name
        lost = small - round_trip(remembering, small + memory)
        assert torch.equal(state.memory, (lost * 0.75 + 1) * 0.5), name
        _, state = inner.encode_launch(small, State(memory), mixing=0.0)
        assert state.memory is None, name


def test_the_mean_is_that_of_the_decoded_values_even_in_stretches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numel = 5 * PLACES + 77
    values = torch.randn(3, numel, generator=torch.Generator().manual_seed(0))
    for module in (blockwise, casts, sparse):
        monkeypatch.setattr(module, "chunk_length", lambda device: 8192)
    for name, any_one in {
        **{name: case.compression for name, case in CASES.items()},
        **MIXED,
    }.items():
        compression = any_one.at(7)
        sent = [
            (compression.encode(one), factor)
            for one, factor in zip(values, (1.0, 0.7, 1.0), strict=True)
        ]
        wholes = [(torch.empty(numel), factor) for _, factor in sent]
        for (payload, _), (whole, _) in zip(sent, wholes, strict=True):
            compression.decode(payload, whole)
        mean = torch.empty(numel)
        found = torch.full((numel,), torch.nan)
        compression.mean(sent, mean)
        for where, stretch in compression.stretches(sent[0][0], numel):
            found[where] = stretch
        assert same_bits(found, wholes[0][0]), name
        assert same_bits(
            mean, weighted_mean([(whole, factor) for whole, factor in wholes], like=mean)
        ), name


@pytest.mark.parametrize("name", CASES)
def test_laws(name: str) -> None:
    one, bits, most, exact, _ = CASES[name]
    # Zeros stay zero, alone and among others, and what can be represented comes back.
    for numel in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK + 1):
        for zero in (0.0, -0.0):
            zeros = torch.full((numel,), zero)
            assert torch.equal(round_trip(one, zeros), zeros)
    values = heavy_tailed(1000) * (torch.arange(1000) % 3 > 0)
    assert torch.equal(round_trip(one, values)[::3], torch.zeros(334))
    assert same_bits(round_trip(one, torch.tensor(exact)), torch.tensor(exact))
    # Bits and error are within bounds, whatever the scale.
    assert all(one.wire_bytes(numel) * 8 / numel <= bits for numel in (PLACES, 4097, 100_003))
    for values in (heavy_tailed(50_000), noise(50_000, 1)):
        for scale in (1e-30, 1.0, 1e30):
            error = (round_trip(one, values * scale).double() - values * scale).norm() / (
                values.double() * scale
            ).norm()
            assert error <= most
    # Payloads and values may lie anywhere in a flat vector.
    flat = heavy_tailed(BLOCK + 4)
    for offset in range(1, 4):
        values = flat[offset:]
        payload = one.encode(values)
        assert torch.equal(payload, one.encode(values.clone()))
        target = torch.empty(len(values) + offset)
        one.decode(torch.cat((payload.new_zeros(offset), payload))[offset:], target[offset:])
        assert same_bits(target[offset:], round_trip(one, values))
    # What is not finite does not raise, nor spread. Where payloads vary, values of several blocks
    # are encoded together; a group that is not finite counts nowhere.
    unit = UNIT if one.wire_bytes(UNIT) < UNIT // 4 else BLOCK
    values = heavy_tailed(4 * unit)
    expected = round_trip(one, values)
    for bad in (math.nan, math.inf, -math.inf):
        values[unit + 3] = bad
        decoded = round_trip(one, values)
        assert one.traits.varies or same_bits(decoded[:unit], expected[:unit])
        assert one.traits.varies or same_bits(decoded[2 * unit :], expected[2 * unit :])
    # A long vector decodes like its pieces, unless chance picks values of the whole.
    for numel in () if name.startswith("random") else (CHUNK - 1, CHUNK, 2 * CHUNK + BLOCK + 3):
        values = heavy_tailed(numel)
        pieces = torch.cat([round_trip(one, piece) for piece in values.split(11 * UNIT)])
        assert same_bits(round_trip(one, values), pieces)
    # Choices compare by value and cannot change.
    assert one == copy.copy(one)
    assert hash(one) == hash(copy.copy(one))
    assert not any(isinstance(value, Tensor) for value in vars(one).values())
    with pytest.raises((AttributeError, TypeError)):
        one.level = 3


def test_names() -> None:
    assert {
        name: case.compression for name, case in list(CASES.items())[: len(COMPRESSIONS)]
    } == COMPRESSIONS
    for name, one in COMPRESSIONS.items():
        assert resolve(name) == one
        assert resolve(one) is one
        assert name == "sparse" or resolve(f"{name}+memory") == ErrorFeedback(one)


def test_unknown_compressions_and_numbers_out_of_range_are_refused() -> None:
    kept = Threshold(0.1, FP4(), every=2)
    names = rf"compression=.*{', '.join(map(repr, COMPRESSIONS))}.*lightning_sdiloco\.compression\.Compression"
    of_decay = r"decay=.* is out of range: .* use FP4\(\) itself"
    measured = "compression='auto' is for a Trainer, whose planner measures the link"
    refused: list[tuple[Callable[[Any], Any], tuple[Any, ...], str]] = [
        (resolve, ("fp5", "FP4", "", "+memory", "sparse+", None, 4, FP4, ["fp4"]), names),
        (resolve, ("auto",), measured),
        (
            lambda name: SimulatedGroups([torch.nn.Linear(2, 2)], compression=name),
            ("auto",),
            measured,
        ),
        (
            lambda share: TopK(share, Int2()),
            (0, 0.0, -0.1, 1.01, math.nan, True, "0.1"),
            r"share=.* 0\.02 sends 2 %",
        ),
        (
            lambda decay: ErrorFeedback(FP4(), decay),
            (0, -0.1, 1.01, math.nan, True, "0.9"),
            of_decay,
        ),
        (
            lambda least: Threshold(0.1, FP4(), least),
            (-0.1, math.nan, True, "3"),
            r"least=.* is out of range",
        ),
        (lambda every: RandomK(every, FP4()), (0, -1, 1.5, True, "8"), r"every=.* is out of range"),
        (
            lambda every: RandomBlock(every, FP4()),
            (0, -1, 1.5, True, "8"),
            r"every=.* is out of range",
        ),
        (lambda every: Threshold(0.1, FP4(), every=every), (0, 2.0), r"every=.* is out of range"),
        (lambda wrong: TopK(0.1, wrong), ("fp4", None, FP4), "is not a compression"),
        (lambda wrong: RandomK(8, wrong), ("fp4",), "is not a compression"),
        (
            lambda wrong: ErrorFeedback(wrong),
            ("fp4", None, FP4, ErrorFeedback(FP4())),
            "nothing to wrap",
        ),
        (lambda given: Threshold(0.1, FP4(), *given), ((), (3.0, 10)), "needs exactly one"),
        (lambda over: TopK(0.1, FP4(), over=over), ("all",), "over='all' is unknown"),
        (lambda wrong: TopK(0.1, wrong), (kept,), "chooses itself"),
        (lambda wrong: RandomK(4, wrong), (kept,), "keeps a threshold for each place"),
    ]
    for make, wrong, told in refused:
        for value in wrong:
            with pytest.raises(ValueError, match=f"(?s){told}"):
                make(value)


LEVELS: dict[str, list[float]] = {
    "fp8": [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 15) for m in range(8)],
    "int8": [float(code) for code in range(128)],
    "int4": [float(code) for code in range(8)],
    "mxfp4": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
"""All magnitudes that a block can hold whose scale is 1, written down from the definition of the
format."""


def nearest(value: float, levels: list[float]) -> float:
    least = min(abs(value - level) for level in levels)
    codes = [code for code, level in enumerate(levels) if abs(value - level) == least]
    return levels[next((code for code in codes if code % 2 == 0), codes[0])]


def test_a_value_goes_to_the_nearest_level_and_a_tie_to_the_even_code() -> None:
    for name, levels in LEVELS.items():
        between = [(low + high) / 2 for low, high in zip(levels, levels[1:], strict=False)]
        points = torch.tensor([*levels, *between])
        around = torch.cat(
            [(points.view(torch.int32) + ulp).view(torch.float32) for ulp in (-1, 0, 1)]
        )
        around = around[around.isfinite() & (around >= 0)].clamp_max(levels[-1])
        for block in around.split(31):
            values = torch.cat(
                (torch.tensor([levels[-1]]), block)
            )  # the largest level fixes the scale
            for power in (1.0, 2.0**-100, 2.0**100):
                expected = torch.tensor([nearest(value, levels) for value in values.tolist()])
                assert torch.equal(round_trip(resolve(name), values * power), expected * power), (
                    name
                )


def test_known_roundings() -> None:
    for compression, values, expected in (
        # Ties go to even.
        (BFloat16(), [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], [1.0, 1 + 2**-6, 1 + 2**-7]),
        # The largest magnitude is rounded before the power of two is chosen.
        (FP8(), [249.0, -1.0], [256.0, -1.0]),
        (FP8(), [247.0, -1.0], [240.0, -1.0]),
        # The mean is 1.75, those of the two sets are 1 and 3, and 2 is between them: it takes the
        # upper one.
        (
            Int2(),
            [0.5, 1.5, 0.5, 1.5, 1.0, 2.0, 3.0, 4.0],
            [1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0],
        ),
        # A value that is the mean of all belongs to the upper set, whose mean is 3 for it.
        (Int2(), [1.0, -1.0, -2.0, 4.0], [1.0, -1.0, -3.0, 3.0]),
    ):
        for power in (1.0, 2.0**-100, -(2.0**100)):
            assert (
                round_trip(compression, torch.tensor(values) * power) / power
            ).tolist() == expected
    # Where there are zeros, and only there, Int2 gives up the lower magnitude.
    values = heavy_tailed(1000)
    assert (round_trip(Int2(), values).abs() > 0).all()
    values[500] = 0.0
    decoded = round_trip(Int2(), values)
    assert decoded[500] == 0.0
    assert (decoded[: 3 * BLOCK] != 0).all(), "other blocks are not touched"


def test_payloads_byte_by_byte() -> None:
    values = torch.zeros(PLACES)
    values[0x123], values[0xABC] = 1.0, -2.0
    sparse = [0x23, 0xC1, 0xAB, 0, 0, 0x80, 0x3F, 0, 0, 0x00, 0xC0]
    for compression, given_values, expected in (
        # The power of two, biased by 127 | 6 and -0.5 | 0 and what is cut off at 6 | -3 and padding
        (MXFP4(), [48.0, -4.0, 0.0, 64.0 - 2**-17, -24.0], [130, 0x97, 0x70, 0x0D]),
        # The top of 127 or 7 as bfloat16, low byte first | two's complement, ties to even | two to
        # a byte
        (Int8(), [127.0, 0.5, 1.5, -2.5, -3.5], [0xFE, 0x42, 127, 0, 2, 254, 252]),
        (Int4(), [7.0, 0.5, 1.5, -2.5, -3.5], [0xE0, 0x40, 0x07, 0xE2, 0x0C]),
        # Positions of 12 bits | the values
        (TopK(1e-6, Float32()), values.tolist(), sparse),
    ):
        assert compression.encode(torch.tensor(given_values)).tolist() == expected, compression
    # Low and high magnitude as bfloat16, low byte first | codes 3, 0, 1, 2 from the lowest bits on
    # | 0 and the rest
    payload = Int2().encode(torch.tensor([-2.0, 1.0, 2.0, -1.0, 1.0])).tolist()
    assert (payload[:5], payload[5] & 3, len(payload)) == (
        [0x80, 0x3F, 0x00, 0x40, 0b10_01_00_11],
        0,
        6,
    )
    # A top between two of bfloat16 goes up.
    for compression in (Int8(), Int4()):
        for largest, top in (
            (1 + 2**-8, 0x3F81),
            (1 + 3 * 2**-8, 0x3F82),
            (1 + 2**-8 - 2**-23, 0x3F80),
        ):
            assert compression.encode(torch.tensor([-largest])).tolist()[:2] == [
                top & 0xFF,
                top >> 8,
            ]


def test_a_threshold_sends_values_far_above_the_mean_and_at_most_its_ceiling() -> None:
    values = torch.ones(2 * PLACES)
    values[5], values[7], values[PLACES + 9], values[PLACES:] = 9.0, 4.0, 9.0, values[PLACES:] * 2
    values[PLACES:] *= 1000  # the mean is that of the block
    decoded = round_trip(Threshold(1 / 64, Float32(), least=3.5), values)
    assert decoded.nonzero().flatten().tolist() == [5, 7]
    values[:100] = 1e6
    assert round_trip(Threshold(1 / 64, Float32(), least=3.5), values).count_nonzero() == 64


def reference_hash(number: int, step: int) -> int:
    hashed = (number + 1) * 0x9E3779B1 + step * 0x85EBCA77
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed %= 1 << 32
        hashed = (hashed ^ hashed >> shift) * factor
    return hashed % (1 << 32)


def test_random_picks_of_one_in_n_values_agree_within_a_step_and_across_machines() -> None:
    for chance in (RandomK(7, Float32()), RandomBlock(7, Float32())):
        for numel in (1, 6, 7, 8, PLACES, CHUNK + 9):
            values = heavy_tailed(numel)
            decoded = round_trip(chance.at(3), values)
            picked = decoded.nonzero().flatten()
            assert torch.equal(decoded[picked], values[picked])
            of_each = picked // 7 if isinstance(chance, RandomK) else picked - picked[0]
            assert of_each.tolist() == list(range(math.ceil(numel / 7)))
        # Payloads of what chance picks may be added up.
        one = heavy_tailed(1000, seed=1)
        other = heavy_tailed(1000, seed=2)
        added = chance.at(5).encode(one).view(torch.float32) + chance.at(5).encode(other).view(
            torch.float32
        )
        decoded = torch.empty(1000)
        chance.at(5).decode(added.view(torch.uint8), decoded)
        assert same_bits(decoded, round_trip(chance.at(5), one + other))
        # It is the same compression whatever was picked.
        assert (repr(chance.at(5)), chance.at(5).wire_bytes(100)) == (
            repr(chance),
            chance.wire_bytes(100),
        )
    for step in (0, 1, 100, 10**9):
        decoded = round_trip(RandomK(1000, Float32()).at(step), torch.ones(3700))
        expected = [
            1000 * cell + reference_hash(cell, step) % (1000 if cell < 3 else 700)
            for cell in range(4)
        ]
        assert decoded.nonzero().flatten().tolist() == expected
        decoded = round_trip(RandomBlock(7, Float32()).at(step), torch.ones(700))
        assert decoded.nonzero().flatten().tolist()[0] == 100 * (reference_hash(0, step) % 7)


def float32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def reference_encode(values: list[float]) -> bytes:
    """The format in plain Python: every number here is a double, in which all comparisons below
    are exact.
    """
    tops = b""
    codes = []
    for start in range(0, len(values), 128):
        block = values[start : start + 128]
        largest = struct.unpack("<I", struct.pack("<f", max(abs(value) for value in block)))[0]
        stored = min(max(largest >> 16, 0x0400), 0x7F7F)
        tops += struct.pack("<H", stored)
        levels = [float32(stored << 16) / 2**k for k in range(6, -1, -1)]
        for value in block:
            nearest = min(abs(abs(value) - level) for level in levels)
            code = max(
                code
                for code, level in enumerate(levels, start=1)
                if abs(abs(value) - level) == nearest
            )
            sign = 8 if math.copysign(1.0, value) < 0 else 0
            codes.append(sign | (code if abs(value) >= 0.75 * levels[0] else 0))
    codes += [0] * (len(codes) % 2)
    return tops + bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True))


def reference_decode(payload: bytes, numel: int) -> list[float]:
    decoded = []
    for i in range(numel):
        (stored,) = struct.unpack("<H", payload[2 * (i // 128) :][:2])
        code = payload[2 * -(-numel // 128) + i // 2] >> (4 * (i % 2)) & 15
        level = 0.0 if code & 7 == 0 else float32(stored << 16) * 2.0 ** ((code & 7) - 7)
        decoded.append(-level if code & 8 else level)
    return decoded


@given(values=st.one_of(vectors(), vectors(near)))
@settings(max_examples=100, deadline=None)
def test_fp4_is_the_reference_bit_for_bit(values: Tensor) -> None:
    payload = FP4().encode(values)
    expected = reference_encode(values.tolist())
    assert bytes(payload.tolist()) == expected
    assert same_bits(
        round_trip(FP4(), values), torch.tensor(reference_decode(expected, values.numel()))
    )


def test_fp4_matches_the_reference_at_every_threshold_and_byte_with_little_bias() -> None:
    thresholds = torch.tensor([1.5 * 2.0**-k for k in range(9)] + [2.0**-k for k in range(9)])
    around = torch.cat(
        [(thresholds.view(torch.int32) + ulp).view(torch.float32) for ulp in (-1, 0, 1)]
    )
    for top in (
        1.0,
        1.0078125,
        1.9921875,
        2.0**-100,
        2.0**-119,
        1.5 * 2.0**-119,
        2.0**-121,
        2.0**120,
    ):
        values = torch.cat((torch.tensor([2.0]), around, -around)) * top
        assert bytes(FP4().encode(values).tolist()) == reference_encode(values.tolist())
    payload = torch.cat((torch.tensor([0x40, 0x40] * 4), torch.arange(256))).to(torch.uint8)
    out = torch.empty(512)
    FP4().decode(payload, out)
    assert same_bits(out, torch.tensor(reference_decode(bytes(payload.tolist()), 512)))
    with pytest.raises(AssertionError, match="another size"):
        FP4().decode(payload, torch.empty(200))
    values = heavy_tailed(100_000)
    bias = (values.double() * round_trip(FP4(), values)).sum() / values.double().square().sum()
    assert 0.96 < bias < 1.01


# --- what is kept from launch to launch: what was not sent, and the threshold of what is
# ---------------------------

ONE: dict[str, Any] = {
    "inner": "sgd",
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": [["*"]],
    "mixing": 0.0,
}


def test_unsent_values_are_kept_at_landings_only_and_only_if_the_group_counts() -> None:
    """Of a group's own gradient, and in two shots of its part of the mean."""
    run = Groups(
        **ONE, compression=ErrorFeedback(TopK(0.1, Int2()), decay=0.9), exchange="two_shot"
    )
    last: dict[tuple[str, int], Any] = {
        (kind, group): None for kind in ("memory", "residual") for group in range(2)
    }
    kept: dict[tuple[str, int], list[int]] = {key: [] for key in last}
    for step in range(1, 29):
        run.step(
            idle=() if step < 15 else [1] if step < 21 else [0, 1],
            then=lambda models, step=step: (
                models[1][0].weight[0, 0].fill_(math.nan) if step == 7 else None
            ),
        )
        for kind, group in last:
            values = outer_state(run.engines[group])[0][kind]
            if values is not None and (
                last[kind, group] is None or not torch.equal(values, last[kind, group])
            ):
                last[kind, group] = values.clone()
                kept[kind, group].append(step)
                assert values.isfinite().all()
    # Group 1 is not finite at the launch of step 8, and has no data from step 15 on; nobody has
    # after step 20.
    assert kept.pop(("memory", 1)) == [6, 14, 18]
    assert kept == dict.fromkeys(kept, [6, 10, 14, 18, 22])


def test_the_final_exchange_takes_no_memory_along_and_leaves_no_values_out() -> None:
    run = Groups(**ONE, compression=ErrorFeedback(FP4()))
    run.until(6)
    before = run.groups.outer_state_dict()
    for engine, model in zip(run.engines, run.models, strict=True):
        assert outer_state(engine)[0]["memory"].norm() > 0
        model.load_state_dict(before)  # no progress, so only a memory could move anything
    run.groups.finish()
    assert unlike(run.groups.outer_state_dict(), before) == []

    def at_the_end(compression: Any) -> dict[str, Tensor]:
        run = Groups(**{**ONE, "fragments": LAYERS}, compression=compression)
        run.until(3)
        run.groups.finish()
        return run.groups.outer_state_dict()

    expected = at_the_end("bf16")
    top = TopK(0.05, BFloat16())
    few = (ErrorFeedback(top), top, Threshold(0.05, BFloat16(), least=2.0))
    for compression in (*few, RandomK(8, BFloat16()), RandomBlock(8, BFloat16())):
        assert unlike(at_the_end(compression), expected) == [], compression


def plain_loops(launches: list[list[float]], share: float, every: int) -> list[list[float]]:
    """What is sent of each launch, with zeros elsewhere: for each block one threshold, for so many
    launches.
    """
    sent = []
    thresholds = dict[int, float]()
    for number, values in enumerate(launches):
        sent.append(list[float]())
        for start in range(0, len(values), PLACES):
            block = values[start : start + PLACES]
            most = math.ceil(round(share * len(block), 9))
            most = min(most + most % 2, len(block))  # an even number, or all
            largest = sorted(map(abs, block), reverse=True)[most - 1]
            if number % every == 0:
                thresholds[start] = largest
            least = max(thresholds[start], largest)
            sent[-1] += [value if abs(value) >= least else 0.0 for value in block]
    return sent


def launched(compression: Compression, launches: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """What all groups decode of each launch, and the bytes of the payloads."""
    state = State()
    decoded = []
    sizes = []
    for values in launches:
        payload, state = compression.encode_launch(values, state, mixing=0.0)
        out = torch.empty_like(values)
        # In a federation buffers lie behind the payload.
        compression.decode(torch.cat((payload, torch.full((5,), 255, dtype=torch.uint8))), out)
        decoded.append(out)
        sizes.append(len(payload))
    return decoded, sizes


@given(
    st.integers(1, 200) | st.sampled_from([PLACES - 1, PLACES, 2 * PLACES + 77]),
    st.sampled_from([1e-6, 1 / 64, 0.03, 0.1, 0.5, 1.0]),
    st.integers(1, 4),
    st.lists(st.integers(-3, 3), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_sent_values_match_those_of_plain_loops(
    numel: int, share: float, every: int, powers: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Different magnitudes, and no two alike, so that there are no ties.
    signs = [torch.randint(0, 2, (numel,), generator=generator) * 2 - 1 for _ in powers]
    ranks = [torch.randperm(numel, generator=generator) + 1.0 for _ in powers]
    launches = [
        rank * sign * 2.0**power for rank, sign, power in zip(ranks, signs, powers, strict=True)
    ]
    decoded, sizes = launched(Threshold(share, Float32(), every=every), launches)
    expected = plain_loops([values.tolist() for values in launches], share, every)
    assert [values.tolist() for values in decoded] == expected
    assert round_trip(TopK(share, Float32()), launches[0]).tolist() == expected[0]
    counts = [sum(value != 0 for value in values) for values in expected]
    assert sizes == [
        2 * -(-numel // PLACES) + math.ceil(1.5 * count) + 4 * count for count in counts
    ]
    assert max(sizes) <= Threshold(share, Float32(), every=every).wire_bytes(numel)


def test_a_payload_tells_which_places_were_sent() -> None:
    values = noise(PLACES + 9, 1)
    for one in (
        TopK(0.1, Float32()),
        Threshold(0.1, Float32(), least=2.0),
        Threshold(0.1, Float32(), every=3),
    ):
        for compression in (
            one,
            ErrorFeedback(one),
            *([] if one.traits.varies else [RandomK(3, one), RandomBlock(3, one)]),
        ):
            payload = compression.encode(values)
            places = torch.empty_like(values)
            decoded = torch.empty_like(values)
            compression.places(payload, places)
            compression.decode(payload, decoded)
            assert torch.equal(places, (decoded != 0).float())
    assert repr(Threshold(0.5, Float32(), every=3, over="senders")).endswith(
        "over='senders', every=3)"
    )
    assert repr(TopK(0.5, Float32())) == "TopK(share=0.5, values=Float32())", (
        "that of checkpoints without `over`"
    )


def test_a_threshold_sends_little_of_calm_values_and_its_maximum_otherwise() -> None:
    rough = noise(4 * PLACES)
    kept = Threshold(1 / 64, Int2(), every=6)
    _, sizes = launched(kept, [rough * factor for factor in (1, 0.9, 0.5, 0.1, 0, 9, 0.1)])
    most = kept.wire_bytes(4 * PLACES)
    assert sizes[0] == sizes[5] == sizes[6] == most, "the last one is the first with new thresholds"
    assert most / 2 > sizes[1] > sizes[2] >= sizes[3] == sizes[4] == 2 * 4


# --- what is compiled in C gives the bits of the operations of torch, which do without it
# ----------------------------

ROOT = Path(__file__).parents[2]
BESIDE = "lightning_sdiloco/compression"
SOURCE = ROOT / BESIDE / "fp4.c"


def build(
    folder: Path, source: str, path: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Builds a library as the package does, in a checkout of its own."""
    shutil.copy(ROOT / "hatch_build.py", folder)
    (folder / BESIDE).mkdir(parents=True, exist_ok=True)
    (folder / BESIDE / "fp4.c").write_text(source)
    words = [sys.executable, folder / "hatch_build.py"]
    environment = path and {"PATH": str(path)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("checkout")
    assert build(folder, SOURCE.read_text()).returncode == 0
    return folder / BESIDE / "libfp4.so"


def use(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the library at another place than beside the source."""
    monkeypatch.setattr(fp4, "LIBRARY", library)
    monkeypatch.setattr(fp4, "passes_on", cache(fp4.passes_on.__wrapped__))


def check_payload(payload: torch.Tensor, numel: int) -> None:
    one = torch.empty(numel)
    other = torch.empty(numel)
    FP4().decode(payload, one)
    Blockwise.decode(FP4(), payload, other)
    assert same_bits(one, other)


def test_both_ways_give_the_same_bits(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(library, monkeypatch)
    assert fp4.passes_on("cpu") is not None

    @given(
        values=st.lists(st.floats(width=32), min_size=1, max_size=40),
        numel=st.integers(1, 700),
        offset=st.integers(0, 3),
        factors=st.lists(st.sampled_from([1.0, 0.0, 1 / 3, 0.3, 2.0, 1e-38, 1e38]), max_size=5),
        data=st.binary(min_size=1, max_size=80),
    )
    @example(values=SPECIAL, numel=129, offset=1, factors=[1.0, 1.0], data=b"0")
    @example(values=SPECIAL[:6], numel=129, offset=1, factors=[1.0, 1.0], data=b"0")
    @example(
        values=[1.5, 0.75, -0.0117187500, 0.0117187490], numel=256, offset=0, factors=[], data=b"0"
    )
    @example(values=[-0.0], numel=128, offset=0, factors=[0.3], data=b"0")
    @settings(max_examples=150, deadline=None)
    def check(
        values: list[float], numel: int, offset: int, factors: list[float], data: bytes
    ) -> None:
        # At addresses that are no multiple of a vector's, as in messages.
        given = vector(values, numel + offset)[offset:]
        payload = FP4().encode(given)
        assert torch.equal(payload, Blockwise.encode(FP4(), given))
        check_payload(torch.cat((payload[:offset], payload))[offset:], numel)
        check_payload(
            torch.tensor(list((data * len(payload))[: len(payload)]), dtype=torch.uint8), numel
        )
        payloads = [
            Blockwise.encode(FP4(), vector(values, numel + shift)[shift:])
            for shift in range(len(factors))
        ]
        sent = [
            (torch.cat((own[:offset], own))[offset:], by)
            for own, by in zip(payloads, factors, strict=True)
        ]
        one = torch.empty(numel + 1)[1:]
        other = torch.empty(numel)
        FP4().mean(sent, one)
        Compression.mean(FP4(), sent, other)
        assert torch.equal(one.isnan(), other.isnan())
        assert same_bits(one.nan_to_num(), other.nan_to_num())

    check()


def test_without_it_torch_does_the_same_and_says_why(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = tmp_path / "own.so"
    short.write_bytes(library.read_bytes()[:100])
    build(tmp_path, SOURCE.read_text().replace("* 0.75f", "* 0.8f"))
    other = tmp_path / BESIDE / "libfp4.so"
    for own, told in ((short, "was not compiled"), (other, "gives other bits")):
        use(own, monkeypatch)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert fp4.passes_on("cpu") is None
        assert "fp4.c is not used: " in caplog.text
        assert told in caplog.text
        assert torch.equal(FP4().encode(torch.ones(200)), Blockwise.encode(FP4(), torch.ones(200)))


def test_nothing_is_left_where_it_cannot_be_built(tmp_path: Path) -> None:
    (tmp_path / BESIDE).mkdir(parents=True)
    (tmp_path / BESIDE / "libfp4.so").write_bytes(b"of another source")
    for path in (None, tmp_path):  # a compiler that fails, and none
        done = build(tmp_path, "not C", path)
        assert done.returncode == 1
        assert "operations of torch take" in done.stdout
        assert [each.name for each in (tmp_path / BESIDE).iterdir()] == ["fp4.c"]
