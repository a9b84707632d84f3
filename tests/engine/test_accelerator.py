"""The engine on an accelerator: the side stream, events and threads change no bit, race with nothing, hold up nobody.

The accelerator is pretended, see `tests.pretend`: the device is as slow as can be, two operations whose order nothing
settles raise an error, and every byte that is on it is counted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.weighting import digest
from lightning_sdiloco.compression import ErrorFeedback, Int4
from lightning_sdiloco.engine.flight import ThreadBackground
from lightning_sdiloco.engine.outer import OnHost
from lightning_sdiloco.lightning.monitor import Deferred
from tests import pretend
from tests.known_training import (
    CHOICES,
    GROUPS,
    SHORT,
    STEPS,
    LateLane,
    Seen,
    Training,
    floating,
    model_on,
    move,
    noise_of,
    resumed_run,
    same,
    shown_run,
    wait_for_flights,
    whole_run,
)
from tests.pretend import IS_POSSIBLE, Synchronisation, alone, synchronisations
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python"),
]


def unlike_the_cpu(runs: dict[str, Callable[[str, int], Seen]], ranks: int) -> list[list[str]]:
    """Plays runs on the CPU and then on the pretended device; returns by rank the names of those that differ."""

    def both(rank: int, world_size: int) -> list[str]:
        expected = {name: run("cpu", rank) for name, run in runs.items()}
        pretend.install()
        return [name for name, run in runs.items() if not same(run("pretend", rank), expected[name])]

    return list(run_ranks(both, ranks, timeout=100))


def recut_run(device: str, group: int) -> Seen:
    """Freezes a layer during training, and lets it train again."""
    training = Training(device, group)
    for step in range(STEPS):
        if step in (8, 14):
            training.model[0].requires_grad_(step == 14)
            training.engine.recut()
        training.step()
    training.engine.finish()
    training.keep()
    return training.trajectory()


def test_a_run_gives_the_bits_of_the_cpu_and_so_does_one_that_goes_on_from_what_was_in_flight() -> None:
    late = ("fp4", "fp32, two shots", "random, two shots", "error feedback, offloaded")
    early = ("outer AdamW", "fp4, offloaded", "random, two shots, offloaded")
    runs: dict[str, Callable[[str, int], Seen]] = {"layers that are frozen": recut_run}
    for lane, names in ((LateLane, late), (ThreadBackground, early)):
        runs |= {name: partial(whole_run, lane=lane, choices=CHOICES[name]) for name in names}
    for name in ("error feedback", "random, two shots, offloaded"):
        runs[f"{name}, resumed"] = partial(resumed_run, choices=CHOICES[name])
    assert unlike_the_cpu(runs, GROUPS) == [[]] * GROUPS


def test_a_group_of_several_ranks_gives_the_bits_of_the_cpu() -> None:
    def run(device: str, rank: int, offload: bool) -> Seen:
        return shown_run(Training(device, rank // 2, groups=2, outer_optimizer=OuterOptimizer(offload=offload)))

    assert unlike_the_cpu({str(offload): partial(run, offload=offload) for offload in (False, True)}, 4) == [[]] * 4


@alone
def test_simulated_groups_and_what_is_prefetched_give_the_bits_of_the_cpu() -> None:
    def simulated(device: str, offload: bool) -> list[Tensor]:
        models = [model_on(device) for _ in range(GROUPS)]
        noise = [[values.to(device) for values in noise_of(group)[0]] for group in range(GROUPS)]
        groups = SimulatedGroups(models, **SHORT, outer_optimizer=OuterOptimizer(offload=offload))
        for _ in range(STEPS):
            for model, own in zip(models, noise, strict=True):
                move(model, own)
            groups.step()
        groups.finish()
        return [values.cpu() for model in models for values in floating(model)]

    def prefetched(device: str) -> Seen:
        """The last inner step before a launch is also that in which the flight of the same fragment lands."""
        training = Training(device, 0, sync_every=4, overlap_steps=3, outer_optimizer=OuterOptimizer(offload=True))
        for _ in range(STEPS):
            training.step()
        return training.trajectory()

    for offload in (False, True):
        assert same([simulated("pretend", offload)], [simulated("cpu", offload)])
    assert same(prefetched("pretend"), prefetched("cpu"))


@alone
def test_what_is_stored_on_the_host_is_page_locked_and_a_copy_that_nobody_takes_is_not_used_too_soon() -> None:
    storage = OnHost(torch.device("pretend"))
    stored = storage.store(torch.ones(1000, device="pretend"))
    prefetched = storage.prefetch(stored)
    del prefetched
    assert torch.zeros(1000, device="pretend").sum().item() == 0
    for device in ("pretend", "cpu"):
        values = torch.arange(5.0, device=device)
        copied = storage.store_copy(values)
        assert copied.device.type == "cpu"
        assert copied.is_pinned()
        assert copied is not values
        assert copied.tolist() == [0, 1, 2, 3, 4]


def test_the_training_thread_does_not_wait_for_the_device_where_flights_have_ended() -> None:
    def run(rank: int, world_size: int) -> list[tuple[list[Synchronisation], int, int]]:
        pretend.install()
        found = []
        for name in ("error feedback", "fp4, offloaded", "fp4"):
            training = Training("pretend", rank, **CHOICES[name])
            offload = name.endswith("offloaded")
            training.engine.diagnose()
            with synchronisations() as log:
                for _ in range(STEPS):
                    training.inner_step()
                    wait_for_flights(training.engine)
                    training.engine.step()
                if not offload:
                    with training.engine.evaluate():
                        training.keep()
            outer: list[Any] = [fragment.outer.values for fragment in training.engine.rounds.fragments]
            if offload:
                assert all(values.device.type == "cpu" and values.is_pinned() for values in outer)
            else:
                assert pretend.default_stream() not in [values.memory.owner for values in outer], "it is the lane's"
            report = training.engine.report()
            training.engine.close()
            in_training = [entry for entry in log if entry.thread != "sdiloco-background"]
            assert len(in_training) < len(log)
            found.append((in_training, int(report["launches"]), int(report["landings"])))
        return found

    for found in run_ranks(run, GROUPS, timeout=80):
        for waited, launches, landings in found:
            assert waited == []
            assert launches > landings > 4


@alone
def test_a_loss_is_logged_once_it_is_there_and_a_digest_waits_for_the_device_once() -> None:
    losses = Deferred()
    with synchronisations() as log:
        losses.take(1, torch.full((), 0.5, device="pretend"))
        assert losses.ready() == []
        assert losses.ready() == [(1, 0.5)]
        losses.take(2, torch.full((), 0.25, device="pretend"))
    assert log == []
    assert losses.ready(wait=True) == [(2, 0.25)]
    values = torch.randn(600_000)
    there = values.to("pretend")
    with synchronisations() as log:
        found = digest(there, start=7)
    assert found == digest(values, start=7)
    assert len(log) == 1


# What is on the device while outer state rests on the host

WIDTH = 64
COPY = 4 * WIDTH * WIDTH  # bytes of a float32 copy of a fragment
COPIES: list[tuple[dict[str, Any], int]] = [
    # Outer parameters and momentum come from the host for the flight, and the new ones go there: five copies.
    ({"exchange": "two_shot"}, 5),
    # The memory comes and goes too.
    ({"compression": ErrorFeedback(Int4())}, 6),
]


def most_of(layers: int, choices: dict[str, Any]) -> dict[str, float]:
    """How many copies of a fragment were at once on the device beside the model, by what was done."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to("pretend")
    before, most = pretend.memory_allocated(), dict[str, float]()

    def counted(name: str, work: Callable[[], Any]) -> Any:
        pretend.reset_peak_memory_stats()
        found = work()
        most[name] = max(most.get(name, 0.0), (pretend.max_memory_allocated() - before) / COPY)
        return found

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        engine.step()
        wait_for_flights(engine)

    def checkpoint() -> None:
        with engine.evaluate():
            assert all(values.device.type == "cpu" for values in engine.state_dict()["local"])
        engine.outer_state_dict()

    def without_the_device(named: Callable[[], dict[str, Tensor]]) -> None:
        """Copies an outer model, or a mean, that rests on the host: its way does not lead over the device."""
        held = pretend.memory_allocated()
        pretend.reset_peak_memory_stats()
        assert {values.device.type for values in named().values()} == {"cpu"}
        assert pretend.max_memory_allocated() == held

    def mean() -> None:
        with engine.evaluate(engine.group_mean()):
            pass

    every: dict[str, Any] = {"sync_every": 2 * layers, "overlap_steps": 1}
    every["fragments"] = [[f"{layer}.*"] for layer in range(layers)]
    start = partial(StreamingDiLoCo, model, outer_optimizer=OuterOptimizer(offload=True), **every, **choices)
    engine = counted("start", start)
    for number in range(5 * layers):
        counted("step", step)
        if number % 5 == 4:
            counted("checkpoint", checkpoint)
            without_the_device(engine.outer_state_dict)
    counted("mean", mean)
    taken = engine.group_mean()
    without_the_device(lambda: engine.view.named(taken))
    counted("end", engine.finish)
    return most


def test_beside_ddps_buckets_and_a_byte_the_device_holds_what_is_in_flight() -> None:
    """In steps, evaluations, checkpoints and the end."""

    def run(rank: int, world_size: int) -> list[list[dict[str, float]]]:
        pretend.install()
        return [[most_of(layers, choices) for layers in (8, 16)] for choices, _ in COPIES]

    for (small, large), (_, copies) in zip(run_ranks(run, 2, timeout=100)[0], COPIES, strict=True):
        # What one flight takes at most, with what is prefetched for the next one.
        for most in (small, large):
            assert most["start"] <= copies
            assert most["step"] <= copies + 2.5
            assert most["checkpoint"] <= copies + 2.5
        assert large["step"] <= small["step"] + 0.1
        for most, layers in ((small, 8), (large, 16)):
            ddp_and_a_byte, in_flight = layers + layers / 4, layers // 4
            assert most["mean"] <= ddp_and_a_byte + copies * in_flight
            assert most["end"] <= ddp_and_a_byte + copies * in_flight
        # All fragments at once would take several models.
        assert large["mean"] < 16 + 16 / 4
