"""The digest in C is that of the operations of torch, for words of all kinds, anywhere."""

import importlib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from lightning_sdiloco.algorithm import digest
from lightning_sdiloco.native import NativeLibrary
from tests.compiled import SPECIAL, needs_compiler, vector, wait_for

module = importlib.import_module("lightning_sdiloco.algorithm.digest")


def plain(words: list[int], start: int) -> int:
    """The definition, in whole numbers."""
    total = sum(word * (2 * (start + place) + 1) for place, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@needs_compiler
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    numel=st.integers(1, 300),
    offset=st.integers(0, 3),
    start=st.integers(0, 2**40),
)
@example(values=SPECIAL, numel=300, offset=1, start=2**40)
@settings(max_examples=150, deadline=None)
def test_it_is_its_definition(values: list[float], numel: int, offset: int, start: int) -> None:
    wait_for(module.NATIVE)
    assert module.NATIVE.get() is not None
    given = vector(values, numel + offset)[offset:]  # an address that is no multiple of a vector's
    assert digest(given, start) == plain(given.view(torch.int32).tolist(), start)


@needs_compiler
@pytest.mark.parametrize("numel", [0, 1, 511, 65_535, 65_536, 65_537, 262_145, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8])
def test_both_ways_give_the_same(numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(module.NATIVE)
    values = torch.randn(numel).mul(100).to(dtype)
    strided = values.expand(3, -1).t()
    found = digest(values, 7), digest(strided, 7)
    monkeypatch.setattr(NativeLibrary, "get", lambda self: None)
    assert found == (digest(values, 7), digest(strided, 7))


@needs_compiler
def test_the_most_that_a_stretch_can_hold() -> None:
    wait_for(module.NATIVE)
    for word in (-(2**31), 2**31 - 1):
        words = torch.full((200_001,), word, dtype=torch.int32)
        assert digest(words, 2**62) == plain(words.tolist(), 2**62)
