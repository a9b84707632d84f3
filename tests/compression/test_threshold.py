"""A threshold that is kept for some launches, against plain loops over lists that import nothing from it."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_sdiloco.compression import (
    FP4,
    Compression,
    ErrorFeedback,
    Float32,
    Int2,
    RandomBlock,
    RandomK,
    Threshold,
    TopK,
)

BLOCK = 4096

shares = st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0])


def how_many(share: float, numel: int) -> int:
    """An even number, or all."""
    kept = math.ceil(round(share * numel, 9))
    return min(kept + kept % 2, numel)


def plain_loops(launches: list[list[float]], share: float, every: int) -> list[list[float]]:
    """What is sent of each launch, with zeros elsewhere: one block, and one threshold for so many launches."""
    sent, threshold = [], 0.0
    for number, values in enumerate(launches):
        most = how_many(share, len(values))
        largest = sorted((abs(value) for value in values), reverse=True)
        if number % every == 0:
            threshold = largest[most - 1]
        least = max(threshold, largest[most - 1])
        sent.append([value if abs(value) >= least else 0.0 for value in values])
    return sent


def launched(compression: Compression, launches: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """What all groups decode of each launch, and the bytes of the payloads."""
    tuning, decoded, sizes = None, [], []
    for values in launches:
        tuning = compression.tuning(values, tuning)
        payload = compression.tuned(tuning).encode(values)
        # In a federation buffers lie behind the payload.
        compression.decode(
            torch.cat((payload, torch.full((5,), 255, dtype=torch.uint8))), out := torch.empty_like(values)
        )
        decoded.append(out)
        sizes.append(len(payload))
    return decoded, sizes


def vectors(numel: int, launches: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Different magnitudes, and no two alike, so that there are no ties.
    ranks = [torch.randperm(numel, generator=generator) + 1.0 for _ in range(launches)]
    signs = [torch.randint(0, 2, (numel,), generator=generator) * 2 - 1 for _ in range(launches)]
    scales = [2.0 ** int(torch.randint(-3, 4, (), generator=generator)) for _ in range(launches)]
    return [rank * sign * scale for rank, sign, scale in zip(ranks, signs, scales, strict=True)]


@given(st.integers(1, 200), shares, st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_what_is_sent_is_that_of_plain_loops(numel: int, share: float, every: int, rounds: int, seed: int) -> None:
    launches = vectors(numel, rounds, seed)
    decoded, sizes = launched(Threshold(share, Float32(), every=every), launches)
    expected = plain_loops([values.tolist() for values in launches], share, every)
    assert [values.tolist() for values in decoded] == expected
    counts = [sum(value != 0 for value in values) for values in expected]
    assert sizes == [2 + math.ceil(1.5 * count) + 4 * count for count in counts]
    assert max(sizes) <= Threshold(share, Float32(), every=every).wire_bytes(numel)


@pytest.mark.parametrize("values", [Float32(), Int2(), FP4()], ids=str)
def test_a_threshold_that_is_made_anew_every_time_sends_what_top_k_does(values: Compression) -> None:
    launches = [torch.randn(2 * BLOCK + 77, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    decoded, _ = launched(Threshold(1 / 32, values, every=1), launches)
    for gradient, own in zip(launches, decoded, strict=True):
        top = TopK(1 / 32, values)
        top.decode(top.encode(gradient), expected := torch.empty_like(gradient))
        assert torch.equal(own, expected)


def test_payloads_are_shorter_while_values_are_calm_and_never_longer_than_said() -> None:
    rough = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    kept = Threshold(1 / 64, Int2(), every=6)
    _, sizes = launched(kept, [rough, rough * 0.9, rough * 0.5, rough * 0.1, rough * 0, rough * 9, rough * 0.1])
    most = kept.wire_bytes(4 * BLOCK)
    assert sizes[0] == sizes[5] == sizes[6] == most, "the last one is the first with new thresholds"
    assert most / 2 > sizes[1] > sizes[2] >= sizes[3] == sizes[4] == 2 * 4


def test_who_sent_a_value_is_read_from_the_payload() -> None:
    values = torch.randn(BLOCK + 9, generator=torch.Generator().manual_seed(1))
    for one in (TopK(0.1, Float32()), Threshold(0.1, Float32(), least=2.0), Threshold(0.1, Float32(), every=3)):
        for compression in (one, ErrorFeedback(one), *([] if one.varies() else [RandomK(3, one), RandomBlock(3, one)])):
            payload, places, decoded = compression.encode(values), torch.empty_like(values), torch.empty_like(values)
            compression.places(payload, places)
            compression.decode(payload, decoded)
            assert torch.equal(places, (decoded != 0).float())


def test_arguments_of_earlier_versions_have_the_text_of_earlier_versions() -> None:
    assert repr(TopK(0.5, Float32())) == "TopK(share=0.5, values=Float32())"
    assert repr(Threshold(0.5, Float32(), 3.0)) == "Threshold(share=0.5, values=Float32(), least=3.0)"
    assert repr(Threshold(0.5, Float32(), every=3, over="senders")).endswith("over='senders', every=3)")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Threshold(0.1, FP4()), "needs one threshold"),
        (lambda: Threshold(0.1, FP4(), 3.0, 10), "needs one threshold"),
        (lambda: Threshold(0.1, FP4(), every=0), "every=0 is out of range"),
        (lambda: Threshold(0.1, FP4(), every=2.0), "every=2.0 is out of range"),  # type: ignore[arg-type]
        (lambda: TopK(0.1, FP4(), over="all"), "over='all' is not known"),
        (lambda: TopK(0.1, Threshold(0.1, FP4(), every=2)), "chooses by itself"),
        (lambda: RandomK(4, Threshold(0.1, FP4(), every=2)), "keeps a threshold for each place"),
    ],
)
def test_what_cannot_be_is_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # type: ignore[operator]
