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
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
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
    """A compression, and the bounds that it keeps.

    Attributes:
        compression: The compression.
        bits: The most bits of a value.
        error: The greatest error: its norm, as a share of that of the values.
        exact: Values that come back as they are.
        largest: The share of the largest magnitude that comes back at least.
    """

    compression: Compression
    bits: float
    error: float
    exact: list[float]
    largest: float = 0.99


TWO_BITS = [0.0, 1.5, 0.0, 0.0, -1.5, 0.0]
SINGLE = [1.25]
MICRO = [6.0, -6.0, 0.0, 0.5, -1.0, 1.5]
# The compressions with names, in their order; then some that a user may put together, so that every
# kind of value is sent by position.
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
    "random_k": Case(RandomK(16, FP4()), 0.27, 1.0, SINGLE, 0.0),
    "random_block": Case(RandomBlock(16, FP4()), 0.27, 1.0, SINGLE, 0.0),
    "threshold": Case(Threshold(1 / 64, Int2(), every=10), 0.25, 0.97, TWO_BITS, 1 / 128),
    "topk of fp32": Case(TopK(0.031, Float32()), 1.4, 0.94, [0.0, 0.0, math.pi, 0.0, -1e-30]),
    "topk of fp4": Case(TopK(1 / 32, FP4()), 0.52, 0.94, [0.0, 1.25, 0.0, -1.25 / 64]),
    "feedback of mxfp4": Case(ErrorFeedback(MXFP4()), 4.26, 0.16, MICRO, 0.75),
    "least": Case(Threshold(1 / 32, FP4(), least=3.0), 0.52, 0.94, [0.0, 0.0, 0.0, 0.0, 1.25], 0.0),
}

EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

# Each of these takes the mean in another way.
MIXED = [
    Threshold(1 / 8, Int4(), every=4),
    RandomK(3, TopK(1 / 16, Int2())),
    RandomK(5, Int4()),
    ByLink(("fp4", TopK(1 / 16, Int2()))).at(0, choice=1),
]

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


def decode(compression: Compression, payload: Tensor, numel: int) -> Tensor:
    decoded = torch.full((numel,), torch.nan)
    compression.decode(payload, decoded)
    return decoded


def round_trip(compression: Compression, values: Tensor) -> Tensor:
    return decode(compression, compression.encode(values), values.numel())


def at_offset(values: Tensor, offset: int) -> Tensor:
    """Copies a vector to an address that is no multiple of a vector register's, as in messages."""
    return torch.cat((values.new_zeros(offset), values))[offset:]


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
    for case in CASES.values():
        compression = case.compression
        check_payload(compression, values)
        check_payload(compression, wild)
        check_inputs_stay_as_they_are(compression, values)
        check_decoded_values(compression, values)
        # Huge values stay huge.
        for signed in (huge, -huge):
            decoded = round_trip(compression, signed)
            assert decoded.isfinite().all(), compression
            assert decoded.abs().max() >= case.largest * huge.max(), compression
        check_memory(compression, small)


def check_payload(compression: Compression, values: Tensor) -> None:
    payload = compression.encode(values)
    size_limit = compression.wire_bytes(values.numel())
    assert payload.numel() <= size_limit, compression
    assert compression.traits.varies or payload.numel() == size_limit, compression
    assert payload.dtype == torch.uint8, compression
    assert payload.dim() == 1, compression
    assert payload.is_contiguous(), compression


def check_inputs_stay_as_they_are(compression: Compression, values: Tensor) -> None:
    # Encoding leaves its input alone, and keeps nothing of it: training goes on while the payload
    # is on its way.
    original = values.clone()
    payload = compression.encode(values)
    assert same_bits(values, original), compression
    encoded_values = original.clone()
    payload = compression.encode(encoded_values)
    encoded_values.fill_(0.5)
    payload_of_original = compression.encode(original)
    assert torch.equal(payload, payload_of_original), compression
    # Decoding leaves the payload alone, and ignores the values that it overwrites.
    decoded = torch.full_like(values, 7.0)
    compression.decode(payload, decoded)
    assert torch.equal(payload, payload_of_original), compression
    assert same_bits(decoded, round_trip(compression, original)), compression


def check_decoded_values(compression: Compression, values: Tensor) -> None:
    decoded = round_trip(compression, values)
    assert decoded.isfinite().all(), compression
    assert torch.equal(round_trip(compression, -values), -decoded), compression
    assert torch.equal(round_trip(compression, decoded), decoded), compression


def check_memory(compression: Compression, values: Tensor) -> None:
    """The loss of a launch is remembered, and nothing without error feedback."""
    inner = compression.compression if isinstance(compression, ErrorFeedback) else compression
    feedback = ErrorFeedback(inner, decay=0.5)
    payload, state = feedback.encode_launch(values, State(), mixing=0.0)
    assert torch.equal(payload, feedback.encode(values)), compression
    loss = values - round_trip(feedback, values)
    assert torch.equal(state.memory, loss * 0.5), compression
    memory = torch.ones_like(values)
    payload, state = feedback.encode_launch(values, State(memory), mixing=0.25)
    assert torch.equal(payload, feedback.encode(values + memory)), compression
    loss = values - round_trip(feedback, values + memory)
    assert torch.equal(state.memory, (loss * 0.75 + 1) * 0.5), compression
    _, state = inner.encode_launch(values, State(memory), mixing=0.0)
    assert state.memory is None, compression


def test_the_mean_is_that_of_the_decoded_values_even_in_stretches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (blockwise, casts, sparse):
        monkeypatch.setattr(module, "chunk_length", lambda device: 8192)
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(3, 5 * PLACES + 77, generator=generator)
    compressions = [case.compression for case in CASES.values()]
    for compression in [*compressions, *MIXED]:
        check_mean_and_stretches(compression.at(7), gradients)


def check_mean_and_stretches(compression: Compression, gradients: Tensor) -> None:
    numel = gradients.shape[1]
    factors = (1.0, 0.7, 1.0)
    payloads = [compression.encode(gradient) for gradient in gradients]
    decoded = [decode(compression, payload, numel) for payload in payloads]
    joined = torch.full((numel,), torch.nan)
    for place, stretch in compression.stretches(payloads[0], numel):
        joined[place] = stretch
    assert same_bits(joined, decoded[0]), compression
    mean = torch.empty(numel)
    compression.mean(list(zip(payloads, factors, strict=True)), mean)
    expected = weighted_mean(list(zip(decoded, factors, strict=True)), like=mean)
    assert same_bits(mean, expected), compression


@EACH_CASE
def test_zeros_and_values_that_can_be_represented_come_back(case: Case) -> None:
    for numel in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK + 1):
        for zero in (0.0, -0.0):
            zeros = torch.full((numel,), zero)
            assert torch.equal(round_trip(case.compression, zeros), zeros)
    values = heavy_tailed(1000) * (torch.arange(1000) % 3 > 0)
    decoded = round_trip(case.compression, values)
    assert torch.equal(decoded[::3], torch.zeros(334)), "zeros among other values"
    exact = torch.tensor(case.exact)
    assert same_bits(round_trip(case.compression, exact), exact)


@EACH_CASE
def test_bits_and_error_are_within_bounds_at_every_scale(case: Case) -> None:
    for numel in (PLACES, 4097, 100_003):
        assert case.compression.wire_bytes(numel) * 8 / numel <= case.bits
    for values in (heavy_tailed(50_000), noise(50_000, 1)):
        for scale in (1e-30, 1.0, 1e30):
            scaled = values * scale
            error = round_trip(case.compression, scaled).double() - scaled
            assert error.norm() / (values.double() * scale).norm() <= case.error


@EACH_CASE
def test_payloads_and_values_may_lie_anywhere_in_a_flat_vector(case: Case) -> None:
    compression = case.compression
    flat = heavy_tailed(BLOCK + 4)
    for offset in range(1, 4):
        values = flat[offset:]
        payload = compression.encode(values)
        assert torch.equal(payload, compression.encode(values.clone()))
        target = torch.empty(len(values) + offset)[offset:]
        compression.decode(at_offset(payload, offset), target)
        assert same_bits(target, round_trip(compression, values))


@EACH_CASE
def test_a_value_that_is_not_finite_neither_raises_nor_spreads(case: Case) -> None:
    """Payloads that vary encode values of several blocks together. The mean leaves out a group that
    is not finite.
    """
    compression = case.compression
    unit = UNIT if compression.wire_bytes(UNIT) < UNIT // 4 else BLOCK
    values = heavy_tailed(4 * unit)
    expected = round_trip(compression, values)
    for bad in (math.nan, math.inf, -math.inf):
        values[unit + 3] = bad
        decoded = round_trip(compression, values)
        if not compression.traits.varies:
            assert same_bits(decoded[:unit], expected[:unit])
            assert same_bits(decoded[2 * unit :], expected[2 * unit :])


# Chance picks values of the whole.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("random")])
def test_a_long_vector_decodes_like_its_pieces(name: str) -> None:
    compression = CASES[name].compression
    for numel in (CHUNK - 1, CHUNK, 2 * CHUNK + BLOCK + 3):
        values = heavy_tailed(numel)
        pieces = [round_trip(compression, piece) for piece in values.split(11 * UNIT)]
        assert same_bits(round_trip(compression, values), torch.cat(pieces))


@EACH_CASE
def test_compressions_compare_by_value_and_cannot_change(case: Case) -> None:
    compression = case.compression
    assert compression == copy.copy(compression)
    assert hash(compression) == hash(copy.copy(compression))
    assert not any(isinstance(choice, Tensor) for choice in vars(compression).values())
    with pytest.raises((AttributeError, TypeError)):
        compression.level = 3


def test_names() -> None:
    named_cases = list(CASES.items())[: len(COMPRESSIONS)]
    assert {name: case.compression for name, case in named_cases} == COMPRESSIONS
    for name, compression in COMPRESSIONS.items():
        assert resolve(name) == compression
        assert resolve(compression) is compression
        assert name == "sparse" or resolve(f"{name}+memory") == ErrorFeedback(compression)


def refused(make: Callable[[Any], object], message: str, *arguments: Any) -> None:
    """Checks that each of the arguments is refused with a message."""
    for argument in arguments:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            make(argument)


def test_unknown_compressions_and_numbers_out_of_range_are_refused() -> None:
    names = ", ".join(map(repr, COMPRESSIONS))
    unknown = rf"compression=.*{names}.*lightning_sdiloco\.compression\.Compression"
    refused(resolve, unknown, "fp5", "FP4", "", "+memory", "sparse+", None, 4, FP4, ["fp4"])

    def simulate(name: str) -> SimulatedGroups:
        return SimulatedGroups([torch.nn.Linear(2, 2)], compression=name)

    unmeasured = "compression='auto' works only with a Trainer, which measures the link"
    refused(resolve, unmeasured, "auto")
    refused(simulate, unmeasured, "auto")

    of_share = r"share=.* 0\.02 sends 2 %"
    refused(partial(TopK, values=Int2()), of_share, 0, 0.0, -0.1, 1.01, math.nan, True, "0.1")
    of_decay = r"decay=.* is out of range: .* use FP4\(\) directly"
    refused(partial(ErrorFeedback, FP4()), of_decay, 0, -0.1, 1.01, math.nan, True, "0.9")
    of_least = r"least=.* is out of range"
    refused(partial(Threshold, 0.1, FP4()), of_least, -0.1, math.nan, True, "3")
    of_every = r"every=.* is out of range"
    refused(partial(RandomK, values=FP4()), of_every, 0, -1, 1.5, True, "8")
    refused(partial(RandomBlock, values=FP4()), of_every, 0, -1, 1.5, True, "8")
    refused(lambda rounds: Threshold(0.1, FP4(), every=rounds), of_every, 0, 2.0)

    refused(partial(TopK, 0.1), "is not a compression", "fp4", None, FP4)
    refused(partial(RandomK, 8), "is not a compression", "fp4")
    refused(ErrorFeedback, "no compression to wrap", "fp4", None, FP4, ErrorFeedback(FP4()))
    refused(lambda limits: Threshold(0.1, FP4(), *limits), "needs exactly one", (), (3.0, 10))
    refused(lambda over: TopK(0.1, FP4(), over=over), "over='all' is unknown", "all")
    lasting = Threshold(0.1, FP4(), every=2)
    refused(partial(TopK, 0.1), "chooses which values it sends", lasting)
    refused(partial(RandomK, 4), "keeps a threshold for each block", lasting)


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
    distances = [abs(value - level) for level in levels]
    codes = [code for code, distance in enumerate(distances) if distance == min(distances)]
    # A tie goes to the even code.
    even_codes = [code for code in codes if code % 2 == 0]
    return levels[(even_codes or codes)[0]]


def with_neighbours(values: Tensor) -> Tensor:
    """Positive values, and the next float32 below and above each."""
    bits = values.view(torch.int32)
    return torch.cat([(bits + ulp).view(torch.float32) for ulp in (-1, 0, 1)])


@pytest.mark.parametrize("name", LEVELS)
def test_a_value_goes_to_the_nearest_level_and_a_tie_to_the_even_code(name: str) -> None:
    levels = LEVELS[name]
    between = [(low + high) / 2 for low, high in zip(levels, levels[1:], strict=False)]
    points = with_neighbours(torch.tensor([*levels, *between]))
    points = points[points.isfinite() & (points >= 0)].clamp_max(levels[-1])
    largest = torch.tensor([levels[-1]])  # fixes the scale of a block
    for block in points.split(31):
        values = torch.cat((largest, block))
        expected = torch.tensor([nearest(value, levels) for value in values.tolist()])
        for power in (1.0, 2.0**-100, 2.0**100):
            assert torch.equal(round_trip(resolve(name), values * power), expected * power)


def check_rounding(compression: Compression, values: list[float], expected: list[float]) -> None:
    for power in (1.0, 2.0**-100, -(2.0**100)):
        decoded = round_trip(compression, torch.tensor(values) * power)
        assert (decoded / power).tolist() == expected


def test_known_roundings() -> None:
    # Ties go to even.
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]
    check_rounding(BFloat16(), ties, [1.0, 1 + 2**-6, 1 + 2**-7])
    # The largest magnitude is rounded before the power of two is chosen.
    check_rounding(FP8(), [249.0, -1.0], [256.0, -1.0])
    check_rounding(FP8(), [247.0, -1.0], [240.0, -1.0])
    # The mean is 1.75, those of the two sets are 1 and 3, and 2 is between them: it takes the upper
    # one.
    between = [0.5, 1.5, 0.5, 1.5, 1.0, 2.0, 3.0, 4.0]
    check_rounding(Int2(), between, [1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    # A value that is the mean of all belongs to the upper set, whose mean is 3 for it.
    check_rounding(Int2(), [1.0, -1.0, -2.0, 4.0], [1.0, -1.0, -3.0, 3.0])
    # Int2 gives up the lower magnitude only in blocks with zeros.
    values = heavy_tailed(1000)
    assert (round_trip(Int2(), values).abs() > 0).all()
    values[500] = 0.0
    decoded = round_trip(Int2(), values)
    assert decoded[500] == 0.0
    assert (decoded[: 3 * BLOCK] != 0).all(), "other blocks are not touched"


def encoded_bytes(compression: Compression, values: list[float]) -> list[int]:
    return compression.encode(torch.tensor(values)).tolist()


def test_payloads_byte_by_byte() -> None:
    # The power of two, biased by 127 | 6 and -0.5 | 0 and the value that is cut off at 6 | -3 and
    # padding
    payload = encoded_bytes(MXFP4(), [48.0, -4.0, 0.0, 64.0 - 2**-17, -24.0])
    assert payload == [130, 0x97, 0x70, 0x0D]
    # The top of 127 as bfloat16, low byte first | two's complement, ties to even
    payload = encoded_bytes(Int8(), [127.0, 0.5, 1.5, -2.5, -3.5])
    assert payload == [0xFE, 0x42, 127, 0, 2, 254, 252]
    # The top of 7 likewise | the same, two to a byte
    payload = encoded_bytes(Int4(), [7.0, 0.5, 1.5, -2.5, -3.5])
    assert payload == [0xE0, 0x40, 0x07, 0xE2, 0x0C]
    # Positions of 12 bits | the values
    values = torch.zeros(PLACES)
    values[0x123] = 1.0
    values[0xABC] = -2.0
    payload = encoded_bytes(TopK(1e-6, Float32()), values.tolist())
    assert payload == [0x23, 0xC1, 0xAB, 0, 0, 0x80, 0x3F, 0, 0, 0x00, 0xC0]
    # Low and high magnitude as bfloat16, low byte first | codes 3, 0, 1, 2 from the lowest bits on
    # | 0 and the rest
    payload = encoded_bytes(Int2(), [-2.0, 1.0, 2.0, -1.0, 1.0])
    assert payload[:5] == [0x80, 0x3F, 0x00, 0x40, 0b10_01_00_11]
    assert payload[5] & 3 == 0
    assert len(payload) == 6


@pytest.mark.parametrize("compression", [Int8(), Int4()])
def test_a_top_between_two_of_bfloat16_goes_up(compression: Compression) -> None:
    assert encoded_bytes(compression, [-(1 + 2**-8)])[:2] == [0x81, 0x3F]
    assert encoded_bytes(compression, [-(1 + 3 * 2**-8)])[:2] == [0x82, 0x3F]
    assert encoded_bytes(compression, [-(1 + 2**-8 - 2**-23)])[:2] == [0x80, 0x3F]


def test_a_threshold_sends_values_far_above_the_mean_and_at_most_its_ceiling() -> None:
    values = torch.ones(2 * PLACES)
    values[5] = 9.0
    values[7] = 4.0
    values[PLACES:] = 2000.0  # the mean is that of the block
    threshold = Threshold(1 / 64, Float32(), least=3.5)
    assert round_trip(threshold, values).nonzero().flatten().tolist() == [5, 7]
    values[:100] = 1e6
    assert round_trip(threshold, values).count_nonzero() == 64


def reference_hash(number: int, step: int) -> int:
    hashed = (number + 1) * 0x9E3779B1 + step * 0x85EBCA77
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed %= 1 << 32
        hashed = (hashed ^ hashed >> shift) * factor
    return hashed % (1 << 32)


@pytest.mark.parametrize("chance", [RandomK(7, Float32()), RandomBlock(7, Float32())])
def test_random_picks_of_one_in_n_values_agree_within_a_step(chance: Compression) -> None:
    for numel in (1, 6, 7, 8, PLACES, CHUNK + 9):
        values = heavy_tailed(numel)
        decoded = round_trip(chance.at(3), values)
        picked = decoded.nonzero().flatten()
        assert torch.equal(decoded[picked], values[picked])
        cells = picked // 7 if isinstance(chance, RandomK) else picked - picked[0]
        assert cells.tolist() == list(range(math.ceil(numel / 7)))
    # Payloads of what chance picks may be added up.
    chosen = chance.at(5)
    gradients = [heavy_tailed(1000, seed) for seed in (1, 2)]
    first, second = (chosen.encode(gradient).view(torch.float32) for gradient in gradients)
    decoded = decode(chosen, (first + second).view(torch.uint8), 1000)
    assert same_bits(decoded, round_trip(chosen, gradients[0] + gradients[1]))
    # It is the same compression, whichever step's values it picks.
    assert repr(chosen) == repr(chance)
    assert chosen.wire_bytes(100) == chance.wire_bytes(100)


@pytest.mark.parametrize("step", [0, 1, 100, 10**9])
def test_random_picks_are_those_of_the_reference_on_every_machine(step: int) -> None:
    decoded = round_trip(RandomK(1000, Float32()).at(step), torch.ones(3700))
    cell_sizes = [1000, 1000, 1000, 700]
    offsets = [reference_hash(cell, step) % size for cell, size in enumerate(cell_sizes)]
    expected = [1000 * cell + offset for cell, offset in enumerate(offsets)]
    assert decoded.nonzero().flatten().tolist() == expected
    decoded = round_trip(RandomBlock(7, Float32()).at(step), torch.ones(700))
    assert int(decoded.nonzero()[0]) == 100 * (reference_hash(0, step) % 7)


def float32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def reference_encode(values: list[float]) -> bytes:
    """The format in plain Python: every number here is a double, in which all comparisons below
    are exact.
    """
    tops = b""
    codes: list[int] = []
    for start in range(0, len(values), 128):
        block = values[start : start + 128]
        largest = float32_bits(max(map(abs, block)))
        top = min(max(largest >> 16, 0x0400), 0x7F7F)
        tops += struct.pack("<H", top)
        levels = [float32(top << 16) / 2**k for k in range(6, -1, -1)]
        codes += [reference_code(value, levels) for value in block]
    codes += [0] * (len(codes) % 2)
    pairs = zip(codes[0::2], codes[1::2], strict=True)
    return tops + bytes(low | high << 4 for low, high in pairs)


def reference_code(value: float, levels: list[float]) -> int:
    sign = 8 if math.copysign(1.0, value) < 0 else 0
    if abs(value) < 0.75 * levels[0]:
        return sign
    distances = [abs(abs(value) - level) for level in levels]
    nearest_codes = [i for i, distance in enumerate(distances, 1) if distance == min(distances)]
    return sign | max(nearest_codes)


def reference_decode(payload: bytes, numel: int) -> Tensor:
    decoded = []
    for i in range(numel):
        (top,) = struct.unpack("<H", payload[2 * (i // 128) :][:2])
        code = payload[2 * -(-numel // 128) + i // 2] >> (4 * (i % 2)) & 15
        level = 0.0 if code & 7 == 0 else float32(top << 16) * 2.0 ** ((code & 7) - 7)
        decoded.append(-level if code & 8 else level)
    return torch.tensor(decoded)


@given(values=st.one_of(vectors(), vectors(near)))
@settings(max_examples=100, deadline=None)
def test_fp4_is_the_reference_bit_for_bit(values: Tensor) -> None:
    payload = bytes(encoded_bytes(FP4(), values.tolist()))
    assert payload == reference_encode(values.tolist())
    assert same_bits(round_trip(FP4(), values), reference_decode(payload, values.numel()))


TOPS = [1.0, 1.0078125, 1.9921875, 2.0**-100, 2.0**-119, 1.5 * 2.0**-119, 2.0**-121, 2.0**120]


def test_fp4_matches_the_reference_at_every_threshold_and_byte_with_little_bias() -> None:
    powers = [2.0**-k for k in range(9)]
    thresholds = [1.5 * power for power in powers]
    around = with_neighbours(torch.tensor([*thresholds, *powers]))
    for top in TOPS:
        values = (torch.cat((torch.tensor([2.0]), around, -around)) * top).tolist()
        assert bytes(encoded_bytes(FP4(), values)) == reference_encode(values)
    payload = torch.cat((torch.tensor([0x40, 0x40] * 4), torch.arange(256))).to(torch.uint8)
    expected = reference_decode(bytes(payload.tolist()), 512)
    assert same_bits(decode(FP4(), payload, 512), expected)
    with pytest.raises(AssertionError, match="another size"):
        FP4().decode(payload, torch.empty(200))
    values = heavy_tailed(100_000)
    product = values.double() * round_trip(FP4(), values)
    assert 0.96 < product.sum() / values.double().square().sum() < 1.01


# --- what is kept from launch to launch: values that were not sent, and the threshold for sending
# ---------------------------

SETTINGS: dict[str, Any] = {
    "inner": "sgd",
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": [["*"]],
    "mixing": 0.0,
}


def spoil_group_1(models: list[Any]) -> None:
    models[1][0].weight[0, 0].fill_(math.nan)


def leave(models: list[Any]) -> None:
    """Changes nothing."""


def steps_of_changes(values_by_step: list[Tensor | None]) -> list[int]:
    """The steps, from 1, after which other values are held than before."""
    steps = []
    previous = None
    for step, values in enumerate(values_by_step, start=1):
        if values is not None and (previous is None or not torch.equal(values, previous)):
            assert values.isfinite().all()
            steps.append(step)
            previous = values
    return steps


def test_unsent_values_are_kept_at_landings_only_and_only_if_the_group_counts() -> None:
    """Those of a group's own gradient, and in two shots of its part of the mean."""
    compression = ErrorFeedback(TopK(0.1, Int2()), decay=0.9)
    run = Groups(**SETTINGS, compression=compression, exchange="two_shot")
    values_by_step = defaultdict[tuple[str, int], list[Any]](list)
    # Group 1 is not finite at the launch of step 8, and has no data from step 15 on; nobody has
    # after step 20.
    idle_groups = [[]] * 14 + [[1]] * 6 + [[0, 1]] * 8
    for step, idle in enumerate(idle_groups, start=1):
        run.step(idle=idle, then=spoil_group_1 if step == 7 else leave)
        for group, engine in enumerate(run.engines):
            state = outer_state(engine)[0]
            for kind in ("memory", "residual"):
                values_by_step[kind, group].append(copy.deepcopy(state[kind]))
    changes = {key: steps_of_changes(values) for key, values in values_by_step.items()}
    assert changes.pop(("memory", 1)) == [6, 14, 18]
    assert changes == dict.fromkeys(changes, [6, 10, 14, 18, 22])
    assert len(changes) == 3


def test_the_final_exchange_takes_no_memory_along_and_leaves_no_values_out() -> None:
    run = Groups(**SETTINGS, compression=ErrorFeedback(FP4()))
    run.until(6)
    before = run.groups.outer_state_dict()
    for engine, model in zip(run.engines, run.models, strict=True):
        assert outer_state(engine)[0]["memory"].norm() > 0
        model.load_state_dict(before)  # no progress, so only a memory could move anything
    run.groups.finish()
    assert unlike(run.groups.outer_state_dict(), before) == []

    expected = final_outer_parameters("bf16")
    top = TopK(0.05, BFloat16())
    threshold = Threshold(0.05, BFloat16(), least=2.0)
    randoms = [RandomK(8, BFloat16()), RandomBlock(8, BFloat16())]
    for compression in [ErrorFeedback(top), top, threshold, *randoms]:
        assert unlike(final_outer_parameters(compression), expected) == [], compression


def final_outer_parameters(compression: Any) -> dict[str, Tensor]:
    run = Groups(**{**SETTINGS, "fragments": LAYERS}, compression=compression)
    run.until(3)
    run.groups.finish()
    return run.groups.outer_state_dict()


def plain_loops(launches: list[list[float]], share: float, interval: int) -> list[list[float]]:
    """The values sent of each launch, with zeros elsewhere: each block has one threshold, for so
    many launches.
    """
    sent = []
    thresholds = dict[int, float]()
    for number, values in enumerate(launches):
        sent.append(list[float]())
        for start in range(0, len(values), PLACES):
            block = values[start : start + PLACES]
            count = math.ceil(round(share * len(block), 9))
            count = min(count + count % 2, len(block))  # an even number, or all
            smallest_sent = sorted(map(abs, block), reverse=True)[count - 1]
            if number % interval == 0:
                thresholds[start] = smallest_sent
            threshold = max(thresholds[start], smallest_sent)
            sent[-1] += [value if abs(value) >= threshold else 0.0 for value in block]
    return sent


def launched(compression: Compression, launches: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The values that all groups decode of each launch, and the bytes of the payloads."""
    state = State()
    decoded = []
    sizes = []
    for values in launches:
        payload, state = compression.encode_launch(values, state, mixing=0.0)
        # In a federation buffers lie behind the payload.
        message = torch.cat((payload, torch.full((5,), 255, dtype=torch.uint8)))
        decoded.append(decode(compression, message, values.numel()))
        sizes.append(len(payload))
    return decoded, sizes


def without_ties(numel: int, powers: list[int], seed: int) -> list[Tensor]:
    """Vectors of different magnitudes, in each of which no two values are alike."""
    generator = torch.Generator().manual_seed(seed)
    signs = [torch.randint(0, 2, (numel,), generator=generator) * 2 - 1 for _ in powers]
    ranks = [torch.randperm(numel, generator=generator) + 1.0 for _ in powers]
    rows = zip(ranks, signs, powers, strict=True)
    return [rank * sign * 2.0**power for rank, sign, power in rows]


@given(
    numel=st.integers(1, 200) | st.sampled_from([PLACES - 1, PLACES, 2 * PLACES + 77]),
    share=st.sampled_from([1e-6, 1 / 64, 0.03, 0.1, 0.5, 1.0]),
    interval=st.integers(1, 4),
    powers=st.lists(st.integers(-3, 3), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_sent_values_match_those_of_plain_loops(
    numel: int, share: float, interval: int, powers: list[int], seed: int
) -> None:
    launches = without_ties(numel, powers, seed)
    threshold = Threshold(share, Float32(), every=interval)
    decoded, sizes = launched(threshold, launches)
    expected = plain_loops([values.tolist() for values in launches], share, interval)
    assert [values.tolist() for values in decoded] == expected
    assert round_trip(TopK(share, Float32()), launches[0]).tolist() == expected[0]
    counts = [int(values.count_nonzero()) for values in map(torch.tensor, expected)]
    block_bytes = 2 * math.ceil(numel / PLACES)
    assert sizes == [block_bytes + math.ceil(1.5 * count) + 4 * count for count in counts]
    assert max(sizes) <= threshold.wire_bytes(numel)


def test_a_payload_tells_which_places_were_sent() -> None:
    fixed_sizes = [TopK(0.1, Float32()), Threshold(0.1, Float32(), least=2.0)]
    lasting = Threshold(0.1, Float32(), every=3)
    for compression in [*fixed_sizes, lasting]:
        check_places(compression)
        check_places(ErrorFeedback(compression))
    for compression in fixed_sizes:
        check_places(RandomK(3, compression))
        check_places(RandomBlock(3, compression))


def check_places(compression: Compression) -> None:
    values = noise(PLACES + 9, 1)
    payload = compression.encode(values)
    places = torch.empty_like(values)
    compression.places(payload, places)
    assert torch.equal(places, (decode(compression, payload, len(values)) != 0).float())


def test_the_text_of_a_sparse_compression_names_what_is_not_the_default() -> None:
    threshold = Threshold(0.5, Float32(), every=3, over="senders")
    assert repr(threshold).endswith("over='senders', every=3)")
    assert repr(TopK(0.5, Float32())) == "TopK(share=0.5, values=Float32())", (
        "that of checkpoints without `over`"
    )


def test_a_threshold_sends_little_of_calm_values_and_its_maximum_otherwise() -> None:
    rough = noise(4 * PLACES)
    lasting = Threshold(1 / 64, Int2(), every=6)
    _, sizes = launched(lasting, [rough * factor for factor in (1, 0.9, 0.5, 0.1, 0, 9, 0.1)])
    most = lasting.wire_bytes(4 * PLACES)
    assert sizes[0] == sizes[5] == sizes[6] == most, "the last one is the first with new thresholds"
    assert most / 2 > sizes[1] > sizes[2] >= sizes[3] == sizes[4] == 2 * 4


# --- fp4.c gives the bits of the operations of torch, which do without it
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
    """Loads the library from another place than beside the source."""
    monkeypatch.setattr(fp4, "LIBRARY", library)
    monkeypatch.setattr(fp4, "passes_on", cache(fp4.passes_on.__wrapped__))


def check_decoding(payload: Tensor, numel: int) -> None:
    by_torch = torch.empty(numel)
    Blockwise.decode(FP4(), payload, by_torch)
    assert same_bits(decode(FP4(), payload, numel), by_torch)


def check_mean(payloads: list[Tensor], factors: list[float], numel: int) -> None:
    sent = list(zip(payloads, factors, strict=True))
    mean = torch.empty(numel + 1)[1:]
    by_torch = torch.empty(numel)
    FP4().mean(sent, mean)
    Compression.mean(FP4(), sent, by_torch)
    assert torch.equal(mean.isnan(), by_torch.isnan())
    assert same_bits(mean.nan_to_num(), by_torch.nan_to_num())


CLOSE = [1.5, 0.75, -0.0117187500, 0.0117187490]


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    numel=st.integers(1, 700),
    offset=st.integers(0, 3),
    factors=st.lists(st.sampled_from([1.0, 0.0, 1 / 3, 0.3, 2.0, 1e-38, 1e38]), max_size=5),
    noise_bytes=st.binary(min_size=1, max_size=80),
)
@example(values=SPECIAL, numel=129, offset=1, factors=[1.0, 1.0], noise_bytes=b"0")
@example(values=SPECIAL[:6], numel=129, offset=1, factors=[1.0, 1.0], noise_bytes=b"0")
@example(values=CLOSE, numel=256, offset=0, factors=[], noise_bytes=b"0")
@example(values=[-0.0], numel=128, offset=0, factors=[0.3], noise_bytes=b"0")
@settings(max_examples=150, deadline=None)
def check_both_ways(
    values: list[float], numel: int, offset: int, factors: list[float], noise_bytes: bytes
) -> None:
    def shifted(shift: int) -> Tensor:
        return vector(values, numel + shift)[shift:]

    payload = FP4().encode(shifted(offset))
    assert torch.equal(payload, Blockwise.encode(FP4(), shifted(offset)))
    check_decoding(at_offset(payload, offset), numel)
    repeated_noise = list((noise_bytes * len(payload))[: len(payload)])
    check_decoding(torch.tensor(repeated_noise, dtype=torch.uint8), numel)
    payloads = [Blockwise.encode(FP4(), shifted(shift)) for shift in range(len(factors))]
    check_mean([at_offset(payload, offset) for payload in payloads], factors, numel)


def test_both_ways_give_the_same_bits(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(library, monkeypatch)
    assert fp4.passes_on("cpu") is not None
    check_both_ways()


def test_without_it_torch_does_the_same_and_says_why(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cut_library = tmp_path / "cut.so"
    cut_library.write_bytes(library.read_bytes()[:100])
    build(tmp_path, SOURCE.read_text().replace("* 0.75f", "* 0.8f"))
    wrong_library = tmp_path / BESIDE / "libfp4.so"
    values = torch.ones(200)
    for unusable, reason in (
        (cut_library, "was built without it"),
        (wrong_library, "results are not bit-identical"),
    ):
        use(unusable, monkeypatch)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert fp4.passes_on("cpu") is None
        assert "fp4.c is not used: " in caplog.text
        assert reason in caplog.text
        assert torch.equal(FP4().encode(values), Blockwise.encode(FP4(), values))


def test_nothing_is_left_where_it_cannot_be_built(tmp_path: Path) -> None:
    (tmp_path / BESIDE).mkdir(parents=True)
    (tmp_path / BESIDE / "libfp4.so").write_bytes(b"of another source")
    for path in (None, tmp_path):  # a compiler that fails, and none
        build_process = build(tmp_path, "not C", path)
        assert build_process.returncode == 1
        assert "operations of torch take" in build_process.stdout
        assert [file.name for file in (tmp_path / BESIDE).iterdir()] == ["fp4.c"]
