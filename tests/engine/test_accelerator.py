"""The engine on an accelerator: the side stream, events and threads change no bit, race with
nothing, hold up nobody.

The accelerator is pretended, see `tests.pretend`: the device is as slow as can be, two operations
whose order nothing settles raise an error, and every byte that is on it is counted. The tests that
train on it show that it computes what the CPU does, and sees no race where there is none.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import ErrorFeedback, Int4
from lightning_sdiloco.engine.outer import OnHost
from lightning_sdiloco.engine.shards import digest
from lightning_sdiloco.lightning.monitor import Deferred
from tests import known_training as known
from tests import pretend
from tests.gpu.checks import CHECKS
from tests.gpu.task import Place, do
from tests.known_training import (
    GROUPS,
    SHORT,
    STEPS,
    Seen,
    Training,
    floating,
    model_on,
    move,
    noise_of,
    same,
)
from tests.pretend import (
    IS_POSSIBLE,
    Event,
    Race,
    Stream,
    alone,
    current_stream,
    stream,
    synchronisations,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not IS_POSSIBLE, reason="this torch has no device types in pure Python"
)


def ones(length: int = 4) -> Tensor:
    return torch.ones(length, device="pretend")


def add_before_the_event_that_follows() -> None:
    event = Event()
    side = Stream()
    event.record()
    values = ones().add_(1)
    side.wait_event(event)  # it was recorded before the addition
    with stream(side):
        values + 1


def free_before_the_sum_has_read() -> None:
    side = Stream()
    with stream(side):
        values = ones()
    current_stream().wait_stream(side)
    values.sum()
    del values
    with stream(side):
        ones()


def write_over_a_copy_that_is_coming() -> None:
    host = torch.empty(4, pin_memory=True).copy_(ones(), non_blocking=True)
    host.zero_()
    current_stream().synchronize()


def change_a_copy_that_is_leaving() -> None:
    host = torch.ones(4).pin_memory()
    host.to("pretend", non_blocking=True)
    host.add_(1)
    current_stream().synchronize()


RACES = {
    add_before_the_event_that_follows: (
        "aten::add on stream .* reads what aten::add_ on the default stream .* writes"
    ),
    free_before_the_sum_has_read: (
        "may get freed memory that aten::sum on the default stream .* reads"
    ),
    write_over_a_copy_that_is_coming: "the host wrote to pinned memory",
    change_a_copy_that_is_leaving: "the host changed pinned memory",
}


@alone
def test_the_pretended_device_detects_unordered_accesses() -> None:
    for race, words in RACES.items():
        with pytest.raises(Race, match=words):
            race()
        pretend.synchronize()  # the operations that it left are over before the next race
    host = torch.empty(4, pin_memory=True).copy_(ones(), non_blocking=True)
    event = current_stream().record_event()
    assert host.isnan().all()
    assert [event.query(), event.query()] == [False, True], "a query is not at once true"
    assert host.tolist() == [1.0] * 4


WAITS = {
    "stream.synchronize": lambda values: current_stream().synchronize(),
    "event.synchronize": lambda values: current_stream().record_event().synchronize(),
    "aten::_local_scalar_dense": lambda values: bool(values.sum() > 1),
    "aten::nonzero": Tensor.nonzero,
    "copy to the host": lambda values: torch.empty(4).copy_(values, non_blocking=True),
    "copy to the device": lambda values: torch.tensor([1.0], device="pretend"),
}


@alone
def test_the_pretended_device_detects_waiting_threads() -> None:
    for kind, wait in WAITS.items():
        values = ones()
        with synchronisations() as log:
            thread = threading.Thread(target=wait, args=(values,), name="other")
            thread.start()
            thread.join()
        assert log == [("other", kind, True)]


CHECKED = (
    "bits, fp4",
    "bits, fp32, two shots",
    "bits, random, two shots",
    "bits, error feedback, offloaded",
    "bits, outer AdamW",
    "resume, error feedback",
    "resume, random, two shots, offloaded",
    "memory",
    "waits",
)


@pytest.mark.slow
def test_the_pretended_device_shows_everything_that_a_gpu_must_show(tmp_path: Path) -> None:
    """A run gives the bits of the CPU, and so does one that goes on from flights of a checkpoint; and
    nothing waits.
    """
    place = Place("pretend", tmp_path, quick=True)
    for name in CHECKED:
        outcome = do(CHECKS[name], place, tmp_path / "log")
        assert outcome.status == "done", (name, outcome.trace or outcome.reason)


def recut_run(device: str, rank: int) -> Seen:
    """Freezes a layer during training, and lets it train again."""
    training = Training(device, rank % 2, groups=2)
    for step in range(STEPS):
        if step in (8, 14):
            training.model[0].requires_grad_(step == 14)
            training.engine.recut()
        training.step()
    training.engine.finish()
    training.keep()
    return training.trajectory()


def grouped_run(device: str, rank: int, offload: bool) -> Seen:
    """Trains in groups of two ranks."""
    outer_optimizer = OuterOptimizer(offload=offload)
    training = Training(device, rank // 2, groups=2, outer_optimizer=outer_optimizer)
    return known.shown_run(training)


def test_a_recut_and_a_group_of_several_ranks_give_the_bits_of_the_cpu() -> None:
    runs = [partial(grouped_run, offload=True), partial(grouped_run, offload=False), recut_run]

    def check(rank: int, world_size: int) -> None:
        expected = [run("cpu", rank) for run in runs]
        pretend.install()
        for run, trajectory in zip(runs, expected, strict=True):
            assert same(run("pretend", rank), trajectory)

    run_ranks(check, 4)


def simulated_run(device: str, offload: bool) -> list[Tensor]:
    models = [model_on(device) for _ in range(GROUPS)]
    noise = [[values.to(device) for values in noise_of(group)[0]] for group in range(GROUPS)]
    groups = SimulatedGroups(models, **SHORT, outer_optimizer=OuterOptimizer(offload=offload))
    for _ in range(STEPS):
        for model, changes in zip(models, noise, strict=True):
            move(model, changes)
        groups.step()
    groups.finish()
    return [values.cpu() for model in models for values in floating(model)]


def prefetched_run(device: str) -> Seen:
    """The last inner step before a launch is also that in which the flight of the same fragment
    lands.
    """
    outer_optimizer = OuterOptimizer(offload=True)
    training = Training(device, 0, sync_every=4, overlap_steps=3, outer_optimizer=outer_optimizer)
    for _ in range(STEPS):
        training.step()
    return training.trajectory()


@alone
def test_one_process_matches_the_cpu_and_copies_wait_for_the_device_but_logs_do_not() -> None:
    for offload in (False, True):
        assert same([simulated_run("pretend", offload)], [simulated_run("cpu", offload)])
    assert same(prefetched_run("pretend"), prefetched_run("cpu"))
    assert_stored_on_host()
    assert_logged_without_waiting()
    assert_digest_waits_once()


def assert_stored_on_host() -> None:
    """The memory is page-locked, and the memory of a copy that nobody takes is not used too soon."""
    storage = OnHost(torch.device("pretend"))
    unused_copy = storage.prefetch(storage.store(torch.ones(1000, device="pretend")))
    del unused_copy
    assert torch.zeros(1000, device="pretend").sum().item() == 0
    for device in ("pretend", "cpu"):
        values = torch.arange(5.0, device=device)
        stored = storage.store_copy(values)
        assert stored.device.type == "cpu"
        assert stored.is_pinned()
        assert stored is not values
        assert stored.tolist() == [0, 1, 2, 3, 4]


def assert_logged_without_waiting() -> None:
    """A loss is logged once the host has it."""
    losses = Deferred()
    with synchronisations() as log:
        losses.take(1, torch.full((), 0.5, device="pretend"))
        assert [losses.ready(), losses.ready()] == [[], [(1, 0.5)]]
        losses.take(2, torch.full((), 0.25, device="pretend"))
    assert log == []
    assert losses.ready(wait=True) == [(2, 0.25)]


def assert_digest_waits_once() -> None:
    values = torch.randn(600_000)
    on_device = values.to("pretend")
    with synchronisations() as log:
        device_digest = digest(on_device, start=7)
    assert device_digest == digest(values, start=7)
    assert len(log) == 1


def slowly(name: str, matrices: Tensor) -> Tensor:
    time.sleep(0.02)
    return matrices


@pytest.mark.parametrize("device", ["pretend", "cpu"])
@alone
def test_an_accelerator_that_maps_most_of_the_time_says_so_once(device: str) -> None:
    model = nn.Linear(4, 4, bias=False).to(device)
    outer = OuterOptimizer(direction=slowly)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lightning_sdiloco.engine.matrices").addHandler(handler)
    engine = StreamingDiLoCo(model, sync_every=2, overlap_steps=1, outer_optimizer=outer)
    for _ in range(9):
        engine.step()
        known.wait_for_flights(engine)
    maps = [message for message in messages if "applying its map to matrices" in message]
    assert len(maps) == (device == "pretend")
    assert all("direction='elementwise'" in message for message in maps)


WIDTH = 64
COPY = 4 * WIDTH * WIDTH  # bytes of a float32 copy of a fragment
Direction = Literal["equalised", "elementwise"]


def device_types(values: Iterable[Tensor]) -> set[str]:
    return {tensor.device.type for tensor in values}


class Peaks:
    """The most copies of a fragment at once on the device beside the model, by activity."""

    def __init__(self, layers: int, choices: dict[str, Any], direction: Direction) -> None:
        linear = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
        self.model = nn.Sequential(*linear).to("pretend")
        self.model_bytes = pretend.memory_allocated()
        self.copies = {}
        outer_optimizer = OuterOptimizer(offload=True, direction=direction)
        choices = {"fragments": "strided:1", "outer_optimizer": outer_optimizer, **choices}
        start = partial(
            StreamingDiLoCo, self.model, sync_every=2 * layers, overlap_steps=1, **choices
        )
        self.engine = self.measure("start", start)

    def measure(self, activity: str, act: Callable[[], Any]) -> Any:
        pretend.reset_peak_memory_stats()
        outcome = act()
        peak = (pretend.max_memory_allocated() - self.model_bytes) / COPY
        self.copies[activity] = max(self.copies.get(activity, 0.0), peak)
        return outcome

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.mul_(1.01)
        self.engine.step()
        known.wait_for_flights(self.engine)

    def checkpoint(self) -> list[Tensor]:
        with self.engine.evaluate():
            local = self.engine.state_dict()["local"]["parameters"]
            return [*local, *self.engine.outer_state_dict().values()]

    def mean(self) -> Any:
        group_mean = self.engine.group_mean()
        with self.engine.evaluate(group_mean):
            return group_mean


def peaks_of(layers: int, choices: dict[str, Any], direction: Direction) -> dict[str, float]:
    peaks = Peaks(layers, choices, direction)
    for number in range(5 * layers):
        peaks.measure("step", peaks.step)
        if number % 5 == 4:
            checkpoint = peaks.measure("checkpoint", peaks.checkpoint)
            assert device_types(checkpoint) == {"cpu"}
    group_mean = peaks.measure("mean", peaks.mean)
    allocated = pretend.memory_allocated()
    pretend.reset_peak_memory_stats()
    assert device_types(peaks.engine.fragmented_model.view.named(group_mean).values()) == {"cpu"}
    # A mean that lies on the host is named there, without a copy on the device.
    assert pretend.max_memory_allocated() == allocated
    peaks.measure("end", peaks.engine.finish)
    return peaks.copies


def assert_bounded(peaks: dict[str, float], layers: int, copies: int) -> None:
    # One flight, and the values that are prefetched for the next one.
    assert peaks["start"] <= copies
    assert max(peaks["step"], peaks["checkpoint"]) <= copies + 2.5
    ddp_and_a_byte = layers + layers / 4
    in_flight = layers // 4
    assert max(peaks["mean"], peaks["end"]) <= ddp_and_a_byte + copies * in_flight


# Outer parameters and momentum come from the host for the flight, and the new ones go there: five
# copies. A memory comes and goes too. A fragment here is one matrix; while it is mapped, there are
# five more of it in float64.
@pytest.mark.parametrize(
    ("choices", "direction", "copies"),
    [
        ({"exchange": "two_shot"}, "elementwise", 5),
        ({"compression": ErrorFeedback(Int4())}, "elementwise", 6),
        ({}, "equalised", 5 + 10),
    ],
    ids=["two shots", "memory", "matrices"],
)
def test_besides_ddps_buckets_the_device_holds_only_fragments_in_flight(
    choices: dict[str, Any], direction: Direction, copies: int
) -> None:
    """In steps, evaluations, checkpoints and the end."""

    def run(rank: int, world_size: int) -> list[dict[str, float]]:
        pretend.install()
        return [peaks_of(layers, choices, direction) for layers in (8, 16)]

    small, large = run_ranks(run, 2)[0]
    assert_bounded(small, 8, copies)
    assert_bounded(large, 16, copies)
    assert large["step"] <= small["step"] + 0.1
    # All fragments at once would take several models.
    assert large["mean"] < 16 + 16 / 4
