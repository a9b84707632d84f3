"""The digest is its definition, for words of all kinds, anywhere, and however the whole is cut."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from lightning_sdiloco.algorithm.weighting import combined, digest
from tests.bits import SPECIAL, vector


def plain(words: list[int], start: int) -> int:
    """The definition, in whole numbers: an odd position is the upper half of a number of 64 bits."""
    total = 0
    for place, word in enumerate(words, start):
        total += word % 2**32 * 2 ** (place % 2 * 32) * (place // 2 * 2 + 1)
    return (total + 2**63) % 2**64 - 2**63


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    numel=st.integers(1, 300),
    offset=st.integers(0, 3),
    start=st.integers(0, 2**40),
)
@example(values=SPECIAL, numel=300, offset=1, start=2**40 + 1)
@settings(max_examples=150, deadline=None)
def test_it_is_its_definition(values: list[float], numel: int, offset: int, start: int) -> None:
    given = vector(values, numel + offset)[offset:]  # an address that is no multiple of a vector's
    assert digest(given, start) == plain(given.view(torch.int32).tolist(), start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8])
def test_shards_of_any_kind_and_cut_add_up_to_the_whole(dtype: torch.dtype) -> None:
    for numel in (0, 1, 131_071, 131_072, 131_073, 400_003):
        values = torch.randn(numel).mul(100).to(dtype)
        words = dtype.itemsize // 4 or 1
        whole = digest(values, 7)
        assert whole == digest(values.expand(3, -1).t()[:, 1], 7)
        for cut in (0, numel // 3, numel // 2 + 1):
            parts = digest(values[:cut], 7), digest(values[cut:], 7 + words * min(cut, numel))
            assert combined(list(parts)) == whole


def test_no_single_change_goes_unseen_and_the_largest_words_wrap() -> None:
    words = torch.full((200_001,), -(2**31), dtype=torch.int32)
    before = digest(words, 2**62 + 1)
    assert before == plain(words.tolist(), 2**62 + 1)
    for place in (0, 1, 131_071, 200_000):
        for bit in (0, 15, 31):
            changed = words.clone()
            changed[place] ^= torch.tensor(1 << bit).to(torch.int32)
            assert digest(changed, 2**62 + 1) != before
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        values = torch.arange(1000).to(dtype)
        assert digest(values) != digest(values.roll(1))
