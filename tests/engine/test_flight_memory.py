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

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not hasattr(memory.mmap, "MADV_HUGEPAGE"), reason="needs pages of one's own"),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux"),
]

# Parts of two shots are not equal, and a copy is longer than what the allocator keeps for itself.
NUMEL = 9_000_001

# Messages: fp4 takes an eighth of a copy for each of a few. And the scratch of a stretch.
BESIDES = 0.4

CASES: dict[str, tuple[dict[str, Any], float]] = {
    # Outer gradient, new outer parameters, new momentum.
    "fp4, two shots": ({"exchange": "two_shot"}, 3),
    # A group that carries what it has trained gathers by how much the outer parameters move.
    "fp4, carry": ({"mixing": Carry()}, 4),
    # What is remembered for the next launch: the old one waits for the landing, as outer parameters do.
    "error feedback": ({"compression": ErrorFeedback(Int4())}, 4),
    "error feedback, two shots": ({"compression": ErrorFeedback(Int2()), "exchange": "two_shot"}, 4),
    # Positions have 64 bits until they are packed.
    "error feedback, sparse": ({"compression": ErrorFeedback(TopK(1 / 32, Int4())), "outer_momentum": 0.9}, 4.3),
}


class Vector(nn.Module):
    """A model of one fragment."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(numel))


@torch.no_grad()
def train(model: Vector, steps: int, choices: dict[str, Any]) -> StreamingDiLoCo:
    """Moves the values, and launches and lands the only fragment every fourth step."""
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=2, fragments=[["*"]], **{"outer_lr": 0.7, **choices})
    for _ in range(steps):
        for part in model.values.split(1 << 16):
            part.add_(torch.linspace(-1e-3, 1e-3, len(part)))
        engine.step()
    return engine


def held(choices: dict[str, Any], rank: int, world_size: int) -> float:
    """In copies of the fragment, what a flight holds at most beside what is held where nothing is in flight."""
    # Code and threads that the first flights of a process bring with them are no copies.
    train(Vector(600_000), 12, choices).close()
    # What tests in the process from which this one was forked have left free would be used again, and not be seen.
    ctypes.CDLL(None).malloc_trim(0)
    before = forget_peak_memory()
    engine = train(Vector(NUMEL), 14, choices)
    assert engine.report()["landings"] == 3
    copies = (peak_memory() - before) / (4 * NUMEL) - 1  # the model itself
    (own,) = outer_state(engine)
    vectors = [own["outer"], *own["state"].values(), own["memory"]]
    # With two shots, what the second rounding lost of a part: it rests too, and the flight makes the new one.
    vectors += [own["residual"]] * 2
    engine.close()
    return copies - sum(one.numel() for one in vectors if isinstance(one, Tensor)) / NUMEL


@pytest.mark.parametrize("name", CASES)
def test_a_flight_holds_at_most_three_copies_and_what_is_new_of_what_is_remembered(name: str) -> None:
    choices, copies = CASES[name]
    for extra in run_ranks(partial(held, choices), 2, timeout=100):
        assert copies - 0.6 < extra < copies + BESIDES
