"""What a compression keeps from launch to launch: what it did not send, and the threshold of what it sends."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.compression import (
    FP4,
    BFloat16,
    Compression,
    ErrorFeedback,
    Float32,
    Int2,
    RandomBlock,
    RandomK,
    Threshold,
    TopK,
)
from tests.engine.groups import Groups, outer_state, unlike
from tests.training import LAYERS

BLOCK = 4096

# What was not sent

SPARSE = ErrorFeedback(TopK(0.1, Int2()), decay=0.9)
ONE: dict[str, Any] = {"inner": "sgd", "sync_every": 4, "overlap_steps": 2, "fragments": [["*"]], "compression": SPARSE}


def memory(run: Groups, group: int = 0) -> Tensor:
    return outer_state(run.engines[group])[0]["memory"]  # type: ignore[no-any-return]


def test_a_memory_is_what_the_last_landing_lost() -> None:
    def lost(gradient: Tensor, memory: Tensor) -> Tensor:
        decoded = torch.empty_like(gradient)
        SPARSE.decode(SPARSE.encode(gradient + memory), decoded)
        return ((gradient - decoded) * 0.75 + memory) * 0.9

    run, before = Groups(**ONE, mixing=0.25), None
    for launch in (4, 8):
        run.until(launch)
        gradient = run.engines[0].state_dict()["flights"][0]["gradient"]
        assert (memory(run) is before) if before is None else torch.equal(memory(run), before), "not at the launch"
        run.until(launch + 2)
        before = lost(gradient, torch.zeros_like(gradient) if before is None else before)
        assert torch.equal(memory(run), before)
        assert before.norm() > 0
    plain = Groups(**{**ONE, "compression": "fp4"})
    plain.until(10)
    assert memory(plain) is None


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_progress_is_sent_once_whatever_share_of_it_the_local_parameters_keep(mixing: float) -> None:
    """A group moves once. Bit by bit the outer parameters go exactly there, and not beyond; without memory, never."""
    start, progress = torch.zeros(64, 64), torch.rand(64, 64) + 0.5
    went = {}
    for compression in (ErrorFeedback(TopK(1 / 64, BFloat16())), TopK(1 / 64, BFloat16())):
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        choices: dict[str, Any] = {"sync_every": 1, "overlap_steps": 0, "fragments": [["*"]], "mixing": mixing}
        engine = StreamingDiLoCo(model, **choices, compression=compression, outer_lr=1.0, outer_momentum=0.0)
        model.weight.data.sub_(progress)
        went[compression] = shares = []
        for _ in range(200):
            engine.step()
            shares.append((start - engine.outer_state_dict()["weight"]) / progress)
    remembering, forgetting = went.values()
    assert all((share <= 1.01).all() for share in remembering)
    assert (remembering[80] > 0.9).all(), "with the first rounds every value has been sent at least once"
    assert torch.allclose(remembering[-1], torch.ones(64, 64), atol=1e-2)
    assert mixing or (forgetting[-1] != 0).sum() == 64


def test_a_group_that_is_left_out_or_without_data_keeps_its_memory() -> None:
    run = Groups(**ONE)
    run.until(6)
    before = [memory(run, group).clone() for group in range(2)]
    with torch.no_grad():
        run.models[1][0].weight[0, 0] = float("nan")
    run.until(10)
    assert not torch.equal(memory(run), before[0])
    assert torch.equal(memory(run, 1), before[1])
    run.until(14)
    assert not torch.equal(memory(run, 1), before[1])
    assert memory(run, 1).isfinite().all()
    for _ in range(4):  # two inner steps since the last launch are sent and land
        run.step(idle=[1])
    landed = memory(run, 1).clone()
    for _ in range(4):
        run.step(idle=[1])
    assert torch.equal(memory(run, 1), landed)


def test_the_final_exchange_takes_no_memory_along_and_leaves_no_values_out() -> None:
    run = Groups(**{**ONE, "compression": ErrorFeedback(FP4()), "mixing": 0.0})
    run.until(6)
    before = run.groups.outer_state_dict()
    for engine, model in zip(run.engines, run.models, strict=True):
        assert outer_state(engine)[0]["memory"].norm() > 0
        model.load_state_dict(before)  # no progress, so only a memory could move anything
    run.groups.finish()
    assert unlike(run.groups.outer_state_dict(), before) == []

    def at_the_end(compression: Any) -> dict[str, Tensor]:
        run = Groups(**{**ONE, "compression": compression, "fragments": LAYERS})
        run.until(3)
        run.groups.finish()
        return run.groups.outer_state_dict()

    expected, top = at_the_end("bf16"), TopK(0.05, BFloat16())
    few = (ErrorFeedback(top), top, Threshold(0.05, BFloat16(), least=2.0))
    for compression in (*few, RandomK(8, BFloat16()), RandomBlock(8, BFloat16())):
        assert unlike(at_the_end(compression), expected) == [], compression


# A threshold that is kept for some launches, against plain loops over lists that import nothing from it


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


@given(
    st.integers(1, 200),
    st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
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
