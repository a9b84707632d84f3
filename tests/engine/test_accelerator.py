"""The engine on an accelerator: the side stream, events and threads change no bit, race with nothing, hold up nobody.

The accelerator is pretended, see `tests.pretend`: the device is as slow as can be, and two operations whose order
nothing settles raise an error.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_sdiloco import Landing, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import ErrorFeedback, Int2, RandomK, TopK
from lightning_sdiloco.engine.background import Pending, Stages, ThreadBackground, _Flight
from lightning_sdiloco.engine.offload import OnHost
from lightning_sdiloco.engine.start import default_topology
from lightning_sdiloco.lightning.monitor.deferred import Deferred
from tests import pretend
from tests.pretend import IS_POSSIBLE, Synchronisation, alone, synchronisations
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python"),
]

STEPS = 17
GROUPS = 2
SHORT: dict[str, Any] = {"sync_every": 6, "overlap_steps": 4, "layers_per_fragment": 1, "mixing": 0.5}


class LateFlight(_Flight[Any, Any, Any]):
    """Does not begin before its result is asked for."""

    begin: Callable[[Any], None]

    def result(self) -> Any:
        self.begin(self)
        return super().result()


class LateLane(ThreadBackground):
    """Begins every flight as late as it can, when the training stream has gone on for long."""

    def start(self, stages: Stages[Any, Any, Any]) -> Pending[Any]:
        flight = LateFlight(stages, self._streams and self._streams.mark())
        flight.begin = self._work.put
        return flight


def model_on(device: str) -> nn.Sequential:
    """Four layers with buffers, the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20)) for _ in range(4))).to(device)


def floating(model: nn.Module) -> list[Tensor]:
    return [values for values in model.state_dict().values() if values.is_floating_point()]


def noise_of(group: int) -> list[list[Tensor]]:
    """How the parameters and buffers of a group move in every step."""
    generator, shapes = torch.Generator().manual_seed(group + 1), [values.shape for values in floating(model_on("cpu"))]
    return [[0.1 * torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]


@torch.no_grad()
def move(model: nn.Module, noise: Iterable[Tensor]) -> None:
    for values, change in zip(floating(model), noise, strict=True):
        values.sub_(change)


class Training:
    """A model whose parameters and buffers move by known noise. The training thread never waits for the device.

    Args:
        device: Where the model is.
        group: The worker group, whose noise differs from that of others.
        groups: Number of worker groups.
        lane: What works beside the training thread.
        topology: The ranks, in place of the number of groups.
        choices: What is chosen for the engine.
    """

    def __init__(
        self,
        device: str,
        group: int,
        groups: int | str = "auto",
        lane: type[ThreadBackground] = ThreadBackground,
        topology: Topology | None = None,
        **choices: Any,
    ) -> None:
        self.model = model_on(device)
        self.noise = [[values.to(device) for values in step] for step in noise_of(group)]
        topology = replace(topology or default_topology(groups, timedelta(seconds=30)), background=lane)
        self.engine = StreamingDiLoCo(self.model, topology=topology, **{**SHORT, **choices})
        self.seen: list[list[Tensor]] = []

    def inner_step(self) -> None:
        move(self.model, self.noise[self.engine.inner_steps])

    def keep(self) -> None:
        """Keeps copies of what the model holds, on the device."""
        self.seen.append([values.clone() for values in floating(self.model)])

    def step(self) -> list[Landing]:
        self.inner_step()
        landings = self.engine.step()
        self.keep()
        return landings

    def trajectory(self) -> list[list[Tensor]]:
        """All that was kept, on the host."""
        return [[values.cpu() for values in step] for step in self.seen]


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))  # so that values that are not finite are compared too
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def on_both(train: Callable[[str, int], list[list[Tensor]]], ranks: int = GROUPS) -> None:
    """Trains on the CPU and on the pretended device, in as many processes as there are ranks."""

    def run(rank: int, world_size: int) -> bool:
        expected = train("cpu", rank)
        pretend.install()
        return same(train("pretend", rank), expected)

    assert run_ranks(run, ranks, timeout=80) == [True] * ranks


def wait_for_flights(engine: StreamingDiLoCo) -> None:
    """Waits until the lane is done with what is in flight, without asking the device for anything."""
    deadline = time.monotonic() + 30
    while not all(flight.pending._future.done() for flight in engine._rounds.flights):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.001)


CHOICES: dict[str, dict[str, Any]] = {
    "fp4": {},
    "fp32, two shots": {"compression": "fp32", "exchange": "two_shot", "mixing": 0.0},
    "error feedback": {"compression": ErrorFeedback(TopK(1 / 16, Int2()))},
    "random, two shots": {"compression": RandomK(2, Int2()), "exchange": "two_shot", "outer_clip_norm": 0.1},
    "outer AdamW": {"compression": "int8", "outer_optimizer": partial(AdamW, lr=0.1), "outlier_guard": 2.0},
}
CHOICES |= {f"{name}, offloaded": {**choices, "offload": True} for name, choices in CHOICES.items()}


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
    """Several fragments are in flight, the outer model is shown in between, and one group is once not finite."""

    def train(device: str, group: int) -> list[list[Tensor]]:
        training = Training(device, group, lane=lane, **CHOICES[name])
        training.engine.diagnose()
        if group == 1:
            training.noise[10][0].fill_(torch.inf)
        in_flight, left_out = [], set()
        for step in range(STEPS):
            left_out |= {group for landing in training.step() for group in landing.left_out}
            in_flight.append(len(training.engine.in_flight))
            if step % 3 == 1:
                with training.engine.evaluate():
                    training.keep()
        training.engine.finish()
        training.keep()
        assert max(in_flight) > 1
        assert left_out == {1}
        return training.trajectory()

    on_both(train)


@pytest.mark.parametrize("offload", [False, True])
def test_a_group_of_several_ranks_gives_the_bits_of_the_cpu(offload: bool) -> None:
    def train(device: str, rank: int) -> list[list[Tensor]]:
        training = Training(device, rank // 2, groups=2, offload=offload)
        for step in range(STEPS):
            training.step()
            if step % 3 == 1:
                with training.engine.evaluate():
                    training.keep()
        training.engine.finish()
        training.keep()
        return training.trajectory()

    on_both(train, ranks=4)


@pytest.mark.parametrize("name", ["error feedback", "outer AdamW", "random, two shots, offloaded"])
def test_a_run_goes_on_from_what_was_saved_in_flight(name: str) -> None:
    def train(device: str, group: int) -> list[list[Tensor]]:
        whole, first, second = (Training(device, group, **CHOICES[name]) for _ in range(3))
        for _ in range(STEPS):
            whole.step()
        whole.engine.finish()
        for _ in range(11):
            first.step()
        state = first.engine.state_dict()
        assert len(state["flights"]) > 1
        wait_for_flights(first.engine)
        first.engine.close()
        second.engine.load_state_dict(state)
        for _ in range(11, STEPS):
            second.step()
        second.engine.finish()
        for training in (whole, second):
            training.keep()
        assert same(whole.trajectory()[11:], second.trajectory())
        return second.trajectory()

    on_both(train)


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
        training = Training(device, 0, sync_every=4, overlap_steps=3, offload=True)
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


def extra_memory(layers: int, offload: bool, device: str = "pretend") -> int:
    """Bytes of the device that an engine takes at most, in fragments of equal size of which one is in flight."""
    module = torch.get_device_module(device)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))).to(device)
    before = module.memory_allocated()
    engine = StreamingDiLoCo(
        model,
        sync_every=4 * layers,
        overlap_steps=2,
        fragments=[[f"{layer}.*"] for layer in range(layers)],
        compression="fp32",
        offload=offload,
    )
    most = []
    for _ in range(16 * layers):
        module.reset_peak_memory_stats()
        engine.step()
        wait_for_flights(engine)
        most.append(module.max_memory_allocated() - before)
    engine.finish()
    return max(most)


@alone
def test_offloaded_the_device_holds_what_is_in_flight_whatever_the_size_of_the_model() -> None:
    of_fragment = 4 * 64 * 64
    on_device = extra_memory(4, offload=False), extra_memory(8, offload=False)
    offloaded = extra_memory(4, offload=True), extra_memory(8, offload=True)
    assert on_device[1] - on_device[0] == 2 * 4 * of_fragment, "outer parameters and momentum of four more"
    assert offloaded[1] == offloaded[0]


@alone
@pytest.mark.parametrize("offload", [False, True])
def test_simulated_groups_give_the_bits_of_the_cpu(offload: bool) -> None:
    def train(device: str) -> list[Tensor]:
        models = [model_on(device) for _ in range(GROUPS)]
        noise = [[values.to(device) for values in noise_of(group)[0]] for group in range(GROUPS)]
        simulated = SimulatedGroups(models, **SHORT, offload=offload)
        for _ in range(STEPS):
            for model, own in zip(models, noise, strict=True):
                move(model, own)
            simulated.step()
        simulated.finish()
        return [values.cpu() for model in models for values in floating(model)]

    assert same([train("pretend")], [train("cpu")])


@pytest.mark.parametrize("offload", [False, True])
def test_the_training_thread_does_not_wait_for_the_device_where_flights_have_ended(offload: bool) -> None:
    def run(rank: int, world_size: int) -> tuple[list[Synchronisation], int, int]:
        pretend.install()
        training = Training("pretend", rank, **CHOICES["error feedback"], offload=offload)
        training.engine.diagnose()
        with synchronisations() as log:
            for _ in range(STEPS):
                training.inner_step()
                wait_for_flights(training.engine)
                training.engine.step()
            if not offload:
                with training.engine.evaluate():
                    training.keep()
        outer = [fragment.outer.values for fragment in training.engine._rounds.fragments]
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
