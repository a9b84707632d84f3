"""What a compression keeps from launch to launch: what it did not send, and the threshold of what it sends."""

import math
from typing import Any

import hypothesis.strategies as st
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

ONE: dict[str, Any] = {"inner": "sgd", "sync_every": 4, "overlap_steps": 2, "fragments": [["*"]], "mixing": 0.0}


def test_what_was_not_sent_is_kept_at_landings_only_and_where_the_group_counts() -> None:
    """Of a group's own gradient, and in two shots of its part of the mean."""
    run = Groups(**ONE, compression=ErrorFeedback(TopK(0.1, Int2()), decay=0.9), exchange="two_shot")
    last: dict[tuple[str, int], Any] = {(kind, group): None for kind in ("memory", "residual") for group in range(2)}
    kept: dict[tuple[str, int], list[int]] = {key: [] for key in last}
    for step in range(1, 29):
        run.step(
            idle=() if step < 15 else [1] if step < 21 else [0, 1],
            then=lambda models, step=step: models[1][0].weight[0, 0].fill_(math.nan) if step == 7 else None,
        )
        for kind, group in last:
            values = outer_state(run.engines[group])[0][kind]
            if values is not None and (last[kind, group] is None or not torch.equal(values, last[kind, group])):
                last[kind, group] = values.clone()
                kept[kind, group].append(step)
                assert values.isfinite().all()
    # Group 1 is not finite at the launch of step 8, and has no data from step 15 on; nobody has after step 20.
    assert kept.pop(("memory", 1)) == [6, 14, 18]
    assert kept == dict.fromkeys(kept, [6, 10, 14, 18, 22])


def test_progress_is_sent_once_whatever_share_of_it_the_local_parameters_keep() -> None:
    """A group moves once. Bit by bit the outer parameters go exactly there, and not beyond; without memory, never."""
    progress, top = torch.rand(64, 64) + 0.5, TopK(1 / 64, BFloat16())
    for compression, mixing in ((ErrorFeedback(top), 0.0), (ErrorFeedback(top), 0.5), (top, 0.0)):
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        choices: dict[str, Any] = {"sync_every": 1, "overlap_steps": 0, "fragments": [["*"]], "mixing": mixing}
        engine = StreamingDiLoCo(model, **choices, compression=compression, outer_lr=1.0, outer_momentum=0.0)
        model.weight.data.sub_(progress)
        shares = []
        for _ in range(150):
            engine.step()
            shares.append(-engine.outer_state_dict()["weight"] / progress)
        if compression == top:
            assert (shares[-1] != 0).sum() == 64
        else:
            assert all((share <= 1.01).all() for share in shares)
            assert (shares[80] > 0.9).all(), "with the first rounds every value has been sent at least once"
            assert torch.allclose(shares[-1], torch.ones(64, 64), atol=1e-2)


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

    expected, top = at_the_end("bf16"), TopK(0.05, BFloat16())
    few = (ErrorFeedback(top), top, Threshold(0.05, BFloat16(), least=2.0))
    for compression in (*few, RandomK(8, BFloat16()), RandomBlock(8, BFloat16())):
        assert unlike(at_the_end(compression), expected) == [], compression


# A threshold that is kept for some launches


def plain_loops(launches: list[list[float]], share: float, every: int) -> list[list[float]]:
    """What is sent of each launch, with zeros elsewhere: one block, and one threshold for so many launches."""
    sent, threshold = [], 0.0
    for number, values in enumerate(launches):
        most = math.ceil(round(share * len(values), 9))
        most = min(most + most % 2, len(values))  # an even number, or all
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
        out = torch.empty_like(values)
        # In a federation buffers lie behind the payload.
        compression.decode(torch.cat((payload, torch.full((5,), 255, dtype=torch.uint8))), out)
        decoded.append(out)
        sizes.append(len(payload))
    return decoded, sizes


@given(
    st.integers(1, 200),
    st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0]),
    st.integers(1, 4),
    st.lists(st.integers(-3, 3), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_what_is_sent_is_that_of_plain_loops(
    numel: int, share: float, every: int, powers: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Different magnitudes, and no two alike, so that there are no ties.
    signs = [torch.randint(0, 2, (numel,), generator=generator) * 2 - 1 for _ in powers]
    ranks = [torch.randperm(numel, generator=generator) + 1.0 for _ in powers]
    launches = [rank * sign * 2.0**power for rank, sign, power in zip(ranks, signs, powers, strict=True)]
    decoded, sizes = launched(Threshold(share, Float32(), every=every), launches)
    expected = plain_loops([values.tolist() for values in launches], share, every)
    assert [values.tolist() for values in decoded] == expected
    counts = [sum(value != 0 for value in values) for values in expected]
    assert sizes == [2 + math.ceil(1.5 * count) + 4 * count for count in counts]
    assert max(sizes) <= Threshold(share, Float32(), every=every).wire_bytes(numel)


def test_a_threshold_sends_what_top_k_does_where_it_is_new_and_less_while_values_are_calm() -> None:
    launches = [torch.randn(2 * BLOCK + 77, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for values in (Float32(), Int2(), FP4()):
        decoded, _ = launched(Threshold(1 / 32, values, every=1), launches)
        top = TopK(1 / 32, values)
        for gradient, own in zip(launches, decoded, strict=True):
            top.decode(top.encode(gradient), expected := torch.empty_like(gradient))
            assert torch.equal(own, expected)
    rough = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    kept = Threshold(1 / 64, Int2(), every=6)
    _, sizes = launched(kept, [rough * factor for factor in (1, 0.9, 0.5, 0.1, 0, 9, 0.1)])
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
    assert repr(Threshold(0.5, Float32(), every=3, over="senders")).endswith("over='senders', every=3)")
    assert repr(TopK(0.5, Float32())) == "TopK(share=0.5, values=Float32())", "that of checkpoints without `over`"
