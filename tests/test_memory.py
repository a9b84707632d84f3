"""Pages that are no longer used serve the next vectors, no more of them than asked for, and never
while in use.

What a rank holds of a fragment while it is in flight, by the resident memory of real processes.
"""

import ctypes
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from benchmarks.stamps import forget_peak_memory, peak_memory
from lightning_sdiloco import Carry, StreamingDiLoCo, memory
from lightning_sdiloco.compression import FP4, ErrorFeedback, Int2, Int4, TopK
from lightning_sdiloco.memory import SparePages, new_vector
from tests.engine.groups import outer_state
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(memory.mmap, "MADV_HUGEPAGE"), reason="needs pages of one's own"
)

LONG = 300_000


def vector(numel: int = LONG, dtype: torch.dtype = torch.float32) -> Tensor:
    return new_vector(numel, torch.device("cpu"), dtype)


@pytest.fixture(autouse=True)
def spares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    monkeypatch.setattr(memory, "_SPARES", memory._Spares())
    yield
    gc.collect()


def spare_bytes(spares: memory._Spares) -> int:
    return sum(map(len, spares._pages))


def test_freed_memory_serves_the_next_vector_but_not_while_a_view_of_it_lives() -> None:
    asking = SparePages(8 * LONG)
    first = vector()
    address = first.data_ptr()
    del first
    assert vector().data_ptr() == address
    # Of another type, or a little shorter.
    assert vector(2 * LONG, torch.int16).data_ptr() == address
    assert vector(LONG - 1000).data_ptr() == address
    view = vector().fill_(1.0)[5:].view(-1, 5).detach()
    gc.collect()
    second = vector().fill_(2.0)
    assert bool((view == 1).all())
    assert second.data_ptr() != view.data_ptr() - 20
    del asking


def test_no_more_memory_is_kept_than_requested_and_other_sizes_drop_none() -> None:
    """While less is in use than before."""
    spares = memory._SPARES
    vector()
    assert spare_bytes(spares) == 0, "nobody asks"
    asking = [SparePages(8 * LONG), SparePages(4 * LONG)]
    several = [vector() for _ in range(5)]
    several.clear()
    for kept in (12 * LONG, 8 * LONG, 0):
        assert spare_bytes(spares) == kept
        del asking[-1:]
    memory._SPARES = spares = memory._Spares()
    asking = [SparePages(12 * LONG)]
    several = [vector() for _ in range(4)]
    addresses = {each.data_ptr() for each in several}
    del several[1:]
    messages = [vector(LONG // 3)]
    assert spare_bytes(spares) == 12 * LONG
    messages.append(vector(LONG // 3))
    assert spare_bytes(spares) == 8 * LONG  # one went for the second message
    several += [vector() for _ in range(2)]
    assert {each.data_ptr() for each in several} <= addresses
    del messages, asking
    # The pages of a long vector that are not kept go back to the system.
    own = vector(20_000_000).fill_(1.0)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    del own
    assert before - int(Path("/proc/self/statm").read_text().split()[1]) > 70_000_000 / 4096


@given(st.lists(st.tuples(st.integers(70_000, 120_000), st.integers(0, 6)), max_size=40))
@settings(max_examples=15, deadline=None)
def test_all_pages_are_hardly_more_than_were_in_use_at_once(taken: list[tuple[int, int]]) -> None:
    spares = memory._Spares()
    memory._SPARES = spares
    asking = SparePages(asked := 1_000_000)
    live: list[Tensor] = []
    most = 0
    for numel, freed in taken:
        del live[:freed]
        live.append(vector(numel))
        # What a vector has in place of what it asked for is a sixteenth larger at most.
        assert spares._in_use <= sum(4 * each.numel() for each in live) * 17 / 16
        most = max(most, spares._in_use)
        assert spares._in_use + spare_bytes(spares) <= most + asked / 5
    del asking


def test_threads_that_take_and_free_at_once_never_share_pages() -> None:
    asking = SparePages(40 * LONG)

    def work(number: int) -> bool:
        taken = (vector(LONG // (1 + turn % 2)).fill_(float(number)) for turn in range(60))
        return all(bool((own == number).all()) for own in taken)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [True] * 4
    del asking


def test_flights_reuse_memory_of_earlier_ones_but_none_that_is_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    new_pages = memory._new_pages
    monkeypatch.setattr(memory, "_new_pages", lambda size: made.append(size) or new_pages(size))
    model = nn.Sequential(nn.Linear(550, 550), nn.Linear(550, 550))
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=1, fragments=[["0.*"], ["1.*"]])

    def train(steps: int) -> None:
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)
            engine.step()

    train(17)
    read = [
        (one.outer.values, one.outer.state["momentum_buffer"]) for one in engine.rounds.fragments
    ]
    copies = [[values.clone() for values in one] for one in read]
    train(12)
    assert all(map(torch.equal, chain(*read), chain(*copies)))
    del read
    train(8)
    made.clear()
    train(40)
    assert made == []
    assert spare_bytes(memory._SPARES) > 0
    engine.close()
    assert spare_bytes(memory._SPARES) == 0


# Parts of two shots are not equal, and a copy is longer than what the allocator keeps for itself.
NUMEL = 9_000_001
# Messages: fp4 takes an eighth of a copy for each of a few. And the scratch of a stretch.
BESIDES = 0.75
CASES: list[tuple[float, dict[str, Any]]] = [
    # Outer gradient, new outer parameters, new momentum.
    (3, {"exchange": "two_shot"}),
    # A group that carries what it has trained gathers by how much the outer parameters move.
    (4, {"mixing": Carry()}),
    # What is remembered for the next launch: the old one waits for the landing, as outer parameters
    # do.
    (4, {"compression": ErrorFeedback(Int4())}),
    (4, {"compression": ErrorFeedback(Int2()), "exchange": "two_shot"}),
    # Positions have 64 bits until they are packed.
    (4.3, {"compression": ErrorFeedback(TopK(1 / 32, Int4())), "outer_momentum": 0.9}),
]


@torch.no_grad()
def train(numel: int, steps: int, choices: dict[str, Any]) -> StreamingDiLoCo:
    """Moves the values, and launches and lands the only fragment every fourth step."""
    model = nn.ParameterList([torch.ones(numel)])
    engine = StreamingDiLoCo(
        model, sync_every=4, overlap_steps=2, fragments=[["*"]], **{"outer_lr": 0.7, **choices}
    )
    for _ in range(steps):
        for part in model[0].split(1 << 16):
            part.add_(torch.linspace(-1e-3, 1e-3, len(part)))
        engine.step()
    return engine


def new_in_flights(rank: int, world_size: int) -> list[int]:
    """The sizes of the pages that came from the system in the last of several flights."""
    engine = train(NUMEL // 9, 13, {})
    with patch.object(memory, "_new_pages", side_effect=memory._new_pages) as new:
        for _ in range(16):
            engine.step()
    engine.close()
    return [size for (size,), _ in new.call_args_list]


def test_no_vector_is_new_because_a_message_is_long() -> None:
    for made in run_ranks(new_in_flights, 2):
        # Four flights. Pages that come back at the moment at which others are taken are left alone.
        assert sum(size > FP4().wire_bytes(NUMEL // 9) for size in made) <= 1, made


def held(choices: dict[str, Any], rank: int, world_size: int) -> float:
    """In copies of the fragment, what a flight holds at most beside what is held where nothing is
    in flight.
    """
    # Code and threads that the first flights of a process bring with them are no copies.
    train(600_000, 12, choices).close()
    # What tests in the process from which this one was forked have left free would be used again,
    # and not be seen.
    ctypes.CDLL(None).malloc_trim(0)
    before = forget_peak_memory()
    engine = train(NUMEL, 14, choices)
    assert engine.report()["landings"] == 3
    copies = (peak_memory() - before) / (4 * NUMEL) - 1  # the model itself
    (own,) = outer_state(engine)
    # With two shots, what the second rounding lost of a part: it rests too, and the flight makes
    # the new one.
    vectors = [
        own["outer"],
        *own["state"].values(),
        own["memory"],
        own["residual"],
        own["residual"],
    ]
    engine.close()
    return copies - sum(one.numel() for one in vectors if isinstance(one, Tensor)) / NUMEL


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(("copies", "choices"), CASES)
def test_a_flight_holds_at_most_three_copies_and_its_new_memories(
    copies: float, choices: dict[str, Any]
) -> None:
    # A rank that waits for a processor keeps its messages longer, now and then. A copy too many is
    # there in each run.
    extra = []
    for _ in range(3):
        extra.append([own - copies for own in run_ranks(partial(held, choices), 2)])
        if all(-0.6 < own < BESIDES for own in extra[-1]):
            return
    raise AssertionError(
        f"copies beside those that the flight needs, in three runs by rank: {extra}"
    )


MMAP_THRESHOLD = (
    -3
)  # <malloc.h>: allocations of this size and more go back to the system when they are freed


@torch.no_grad()
def most_copies(
    choices: dict[str, Any], steps: int, rank: int, world_size: int
) -> tuple[float, float]:
    """Returns how many copies of the model, itself included, a rank holds at most in rounds, and
    with the end.
    """
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
    train(600_000, 13, choices).finish()
    ctypes.CDLL(None).malloc_trim(0)
    before = forget_peak_memory()
    model = nn.ParameterList([torch.ones(NUMEL // 6) for _ in range(4)])
    fragments = [[str(index)] for index in range(4)]
    engine = StreamingDiLoCo(
        model, **{"sync_every": 8, "overlap_steps": 1, "fragments": fragments, **choices}
    )
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 1e-3)
    for _ in range(steps):
        for parameter in model:
            parameter.sub_(parameter.grad)
        engine.step()
    assert len(engine.in_flight) == (steps % 2 == 0)
    copy = 4 * sum(parameter.numel() for parameter in model)
    in_rounds = peak_memory() - before
    engine.finish()
    return in_rounds / copy, (peak_memory() - before) / copy


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("ranks", "steps", "choices"),
    [(2, 18, {}), (2, 19, {}), (2, 18, {"compression": ErrorFeedback(Int4())}), (3, 19, {})],
)
def test_the_end_of_training_takes_no_more_memory_than_a_round(
    ranks: int, steps: int, choices: dict[str, Any]
) -> None:
    """With a fragment in flight before the end, and without."""
    seen = []
    for _ in range(3):
        peaks = run_ranks(partial(most_copies, choices, steps), ranks)
        # What the allocator keeps of short vectors, in each thread.
        if all(with_end < in_rounds + 0.15 for in_rounds, with_end in peaks):
            return
        seen.append(peaks)
    raise AssertionError(f"copies in rounds and with the end, in three runs by rank: {seen}")
