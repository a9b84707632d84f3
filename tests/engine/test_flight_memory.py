"""What a rank holds of a fragment while it is in flight, by the resident memory of real processes."""

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.stamps import forget_peak_memory, peak_memory
from lightning_sdiloco import Carry, StreamingDiLoCo, memory
from lightning_sdiloco.compression import ErrorFeedback, Int2, Int4, TopK
from tests.engine.groups import outer_state
from tests.ranks import run_ranks

# Parts of two shots are not equal, and a copy is longer than what the allocator keeps for itself.
NUMEL = 9_000_001
# Messages: fp4 takes an eighth of a copy for each of a few. And the scratch of a stretch.
BESIDES = 0.4
CASES: list[tuple[float, dict[str, Any]]] = [
    # Outer gradient, new outer parameters, new momentum.
    (3, {"exchange": "two_shot"}),
    # A group that carries what it has trained gathers by how much the outer parameters move.
    (4, {"mixing": Carry()}),
    # What is remembered for the next launch: the old one waits for the landing, as outer parameters do.
    (4, {"compression": ErrorFeedback(Int4())}),
    (4, {"compression": ErrorFeedback(Int2()), "exchange": "two_shot"}),
    # Positions have 64 bits until they are packed.
    (4.3, {"compression": ErrorFeedback(TopK(1 / 32, Int4())), "outer_momentum": 0.9}),
]


@torch.no_grad()
def train(numel: int, steps: int, choices: dict[str, Any]) -> StreamingDiLoCo:
    """Moves the values, and launches and lands the only fragment every fourth step."""
    model = nn.ParameterList([torch.ones(numel)])
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=2, fragments=[["*"]], **{"outer_lr": 0.7, **choices})
    for _ in range(steps):
        for part in model[0].split(1 << 16):
            part.add_(torch.linspace(-1e-3, 1e-3, len(part)))
        engine.step()
    return engine


def held(choices: dict[str, Any], rank: int, world_size: int) -> float:
    """In copies of the fragment, what a flight holds at most beside what is held where nothing is in flight."""
    # Code and threads that the first flights of a process bring with them are no copies.
    train(600_000, 12, choices).close()
    # What tests in the process from which this one was forked have left free would be used again, and not be seen.
    ctypes.CDLL(None).malloc_trim(0)
    before = forget_peak_memory()
    engine = train(NUMEL, 14, choices)
    assert engine.report()["landings"] == 3
    copies = (peak_memory() - before) / (4 * NUMEL) - 1  # the model itself
    (own,) = outer_state(engine)
    # With two shots, what the second rounding lost of a part: it rests too, and the flight makes the new one.
    vectors = [own["outer"], *own["state"].values(), own["memory"], own["residual"], own["residual"]]
    engine.close()
    return copies - sum(one.numel() for one in vectors if isinstance(one, Tensor)) / NUMEL


@pytest.mark.skipif(not hasattr(memory.mmap, "MADV_HUGEPAGE"), reason="needs pages of one's own")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_flight_holds_at_most_three_copies_and_what_is_new_of_what_is_remembered() -> None:
    extra = [[own - copies for own in run_ranks(partial(held, choices), 2, timeout=100)] for copies, choices in CASES]
    assert all(-0.6 < own < BESIDES for ranks in extra for own in ranks), extra
