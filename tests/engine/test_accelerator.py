"""The engine on an accelerator: the side stream, events and threads change no bit, race with nothing, hold up nobody.

The accelerator is pretended, see `tests.pretend`: the device is as slow as can be, and two operations whose order
nothing settles raise an error.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_sdiloco import OuterOptimizer, SimulatedGroups
from lightning_sdiloco.algorithm.digest import digest
from lightning_sdiloco.engine.background import ThreadBackground
from lightning_sdiloco.engine.offload import OnHost
from lightning_sdiloco.lightning.monitor import Deferred
from tests import pretend
from tests.known_training import (
    CHOICES,
    GROUPS,
    SHORT,
    STEPS,
    LateLane,
    Training,
    extra_memory,
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
    pytest.mark.timeout(90),
    pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python"),
]


def on_both(train: Callable[[str, int], list[list[Tensor]]], ranks: int = GROUPS) -> None:
    """Trains on the CPU and on the pretended device, in as many processes as there are ranks."""

    def run(rank: int, world_size: int) -> bool:
        expected = train("cpu", rank)
        pretend.install()
        return same(train("pretend", rank), expected)

    assert run_ranks(run, ranks, timeout=80) == [True] * ranks


@pytest.mark.parametrize(
    ("name", "lane"),
    [
        ("fp4", LateLane),
        ("fp32, two shots", LateLane),
        ("error feedback", ThreadBackground),
        ("random, two shots", LateLane),
        ("outer AdamW", ThreadBackground),
        ("fp4, offloaded", ThreadBackground),
        ("error feedback, offloaded", LateLane),
        ("random, two shots, offloaded", ThreadBackground),
    ],
)
def test_a_run_gives_the_bits_of_the_cpu(name: str, lane: type[ThreadBackground]) -> None:
    on_both(lambda device, group: whole_run(device, group, lane, CHOICES[name]))


@pytest.mark.parametrize("offload", [False, True])
def test_a_group_of_several_ranks_gives_the_bits_of_the_cpu(offload: bool) -> None:
    on_both(
        lambda device, rank: shown_run(
            Training(device, rank // 2, groups=2, outer_optimizer=OuterOptimizer(offload=offload))
        ),
        ranks=4,
    )


@pytest.mark.parametrize("name", ["error feedback", "outer AdamW", "random, two shots, offloaded"])
def test_a_run_goes_on_from_what_was_saved_in_flight(name: str) -> None:
    on_both(lambda device, group: resumed_run(device, group, CHOICES[name]))


def test_freezing_parameters_gives_the_bits_of_the_cpu() -> None:
    def train(device: str, group: int) -> list[list[Tensor]]:
        training = Training(device, group)
        for step in range(STEPS):
            if step in (8, 14):
                training.model[0].requires_grad_(step == 14)
                training.engine.recut()
            training.step()
        training.engine.finish()
        training.keep()
        return training.trajectory()

    on_both(train)


@alone
def test_what_is_prefetched_has_landed_before() -> None:
    """The last inner step before a launch is also that in which the flight of the same fragment lands."""

    def train(device: str) -> list[list[Tensor]]:
        training = Training(device, 0, sync_every=4, overlap_steps=3, outer_optimizer=OuterOptimizer(offload=True))
        for _ in range(STEPS):
            training.step()
        return training.trajectory()

    assert same(train("pretend"), train("cpu"))


@alone
def test_memory_of_a_copy_that_nobody_takes_is_not_used_before_it_is_done() -> None:
    storage = OnHost(torch.device("pretend"))
    stored = storage.store(torch.ones(1000, device="pretend"))
    prefetched = storage.prefetch(stored)
    del prefetched
    assert torch.zeros(1000, device="pretend").sum().item() == 0


@alone
def test_what_is_stored_on_the_host_is_page_locked_wherever_it_came_from() -> None:
    storage = OnHost(torch.device("pretend"))
    for device in ("pretend", "cpu"):
        values = torch.arange(5.0, device=device)
        copied = storage.store_copy(values)
        assert copied.device.type == "cpu"
        assert copied.is_pinned()
        assert copied is not values
        assert copied.tolist() == [0, 1, 2, 3, 4]


@alone
def test_offloaded_the_device_holds_what_is_in_flight_whatever_the_size_of_the_model() -> None:
    of_fragment = 4 * 64 * 64
    on_device = extra_memory(4, False, "pretend"), extra_memory(8, False, "pretend")
    offloaded = extra_memory(4, True, "pretend"), extra_memory(8, True, "pretend")
    assert on_device[1] - on_device[0] == 2 * 4 * of_fragment, "outer parameters and momentum of four more"
    assert offloaded[1] == offloaded[0]


@alone
@pytest.mark.parametrize("offload", [False, True])
def test_simulated_groups_give_the_bits_of_the_cpu(offload: bool) -> None:
    def train(device: str) -> list[Tensor]:
        models = [model_on(device) for _ in range(GROUPS)]
        noise = [[values.to(device) for values in noise_of(group)[0]] for group in range(GROUPS)]
        simulated = SimulatedGroups(models, **SHORT, outer_optimizer=OuterOptimizer(offload=offload))
        for _ in range(STEPS):
            for model, own in zip(models, noise, strict=True):
                move(model, own)
            simulated.step()
        simulated.finish()
        return [values.cpu() for model in models for values in floating(model)]

    assert same([train("pretend")], [train("cpu")])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["error feedback", "fp4"])
def test_the_training_thread_does_not_wait_for_the_device_where_flights_have_ended(name: str, offload: bool) -> None:
    def run(rank: int, world_size: int) -> tuple[list[Synchronisation], int, int]:
        pretend.install()
        training = Training("pretend", rank, **CHOICES[name], outer_optimizer=OuterOptimizer(offload=offload))
        training.engine.diagnose()
        with synchronisations() as log:
            for _ in range(STEPS):
                training.inner_step()
                wait_for_flights(training.engine)
                training.engine.step()
            if not offload:
                with training.engine.evaluate():
                    training.keep()
        outer = [fragment.outer.values for fragment in training.engine.rounds.fragments]
        if offload:
            assert all(values.device.type == "cpu" and values.is_pinned() for values in outer)
        else:
            of_lane = [values.memory.owner for values in outer]  # type: ignore[attr-defined]
            assert pretend.default_stream() not in of_lane
        report = training.engine.report()
        assert any(entry.thread == "sdiloco-background" for entry in log)
        return (
            [entry for entry in log if entry.thread != "sdiloco-background"],
            int(report["launches"]),
            int(report["landings"]),
        )

    for waited, launches, landings in run_ranks(run, GROUPS, timeout=80):
        assert waited == []
        assert launches > landings > 4


@alone
def test_a_loss_is_logged_once_it_is_there_and_nobody_waits_for_it() -> None:
    losses = Deferred()
    with synchronisations() as log:
        losses.take(1, torch.full((), 0.5, device="pretend"))
        assert losses.ready() == []
        assert losses.ready() == [(1, 0.5)]
        losses.take(2, torch.full((), 0.25, device="pretend"))
    assert log == []
    assert losses.ready(wait=True) == [(2, 0.25)]


@alone
def test_a_digest_is_that_of_the_cpu_and_waits_for_the_device_once() -> None:
    values = torch.randn(600_000)
    there = values.to("pretend")
    with synchronisations() as log:
        found = digest(there, start=7)
    assert found == digest(values, start=7)
    assert len(log) == 1
