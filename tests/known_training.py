"""A training whose bits are known on every device: parameters and buffers move by known noise, and
nothing else.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_sdiloco import Landing, OuterOptimizer, StreamingDiLoCo
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import ErrorFeedback, Int2, RandomK, TopK
from lightning_sdiloco.engine.background import Pending, ThreadBackground, Work
from lightning_sdiloco.engine.start import default_topology
from tests.bits import same_bits

Seen = list[list[Tensor]]  # the values of a model, time after time
STEPS = 17
GROUPS = 2
SHORT: dict[str, Any] = {
    "sync_every": 6,
    "overlap_steps": 4,
    "fragments": "strided:1",
    "mixing": 0.5,
}


class LateFlight(Pending[Any]):
    """Does not begin before its result is asked for."""

    begin: Callable[[Any], None]

    def result(self) -> Any:
        self.begin(self)
        return super().result()


class LateLane(ThreadBackground):
    """Begins every flight as late as it can, when the training stream has gone on for long."""

    def start(self, work: Work[Any]) -> Pending[Any]:
        flight = LateFlight(work, self._streams and self._streams.mark())
        flight.begin = self._first.put
        return flight


def model_on(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20)) for _ in range(4))
    ).to(device)


def floating(model: nn.Module) -> list[Tensor]:
    return [values for values in model.state_dict().values() if values.is_floating_point()]


def noise_of(group: int) -> list[list[Tensor]]:
    """How the parameters and buffers of a group move in every step."""
    generator = torch.Generator().manual_seed(group + 1)
    shapes = [values.shape for values in floating(model_on("cpu"))]
    return [
        [0.1 * torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)
    ]


@torch.no_grad()
def move(model: nn.Module, noise: Iterable[Tensor]) -> None:
    for values, change in zip(floating(model), noise, strict=True):
        values.sub_(change)


class Training:
    """A model whose parameters and buffers move by known noise. The training thread never waits
    for the device.
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
        topology = topology or default_topology(groups, timedelta(seconds=30))
        topology = replace(topology, background=lane)
        self.engine = StreamingDiLoCo(self.model, topology=topology, **{**SHORT, **choices})
        self.seen: Seen = []
        self.most_in_flight = 0
        self.left_out = set[int]()

    def inner_step(self) -> None:
        move(self.model, self.noise[self.engine.inner_steps])

    def keep(self) -> None:
        self.seen.append([values.clone() for values in floating(self.model)])

    def step(self) -> list[Landing]:
        self.inner_step()
        landings = self.engine.step()
        self.most_in_flight = max(self.most_in_flight, len(self.engine.rounds.in_flight))
        self.left_out.update(group for landing in landings for group in landing.left_out)
        self.keep()
        return landings

    def trajectory(self) -> Seen:
        return [[values.cpu() for values in step] for step in self.seen]


def same(left: Seen, right: Seen) -> bool:
    """Compares the bits, so that values that are not finite are compared too."""
    if list(map(len, left)) != list(map(len, right)):
        return False
    return all(map(same_bits, chain.from_iterable(left), chain.from_iterable(right)))


def wait_for_flights(engine: StreamingDiLoCo) -> None:
    """Waits until the lane has done all flights, without a call to the device."""
    deadline = time.monotonic() + 30
    while not all(flight.pending.is_ready for flight in engine.rounds.flights):
        assert time.monotonic() < deadline
        time.sleep(0.001)


CLIPPED = OuterOptimizer(clip_norm=0.1)
GUARDED = OuterOptimizer(partial(AdamW, lr=0.1), outlier_guard=2.0)
CHOICES: dict[str, dict[str, Any]] = {
    "fp4": {},
    "fp32, two shots": {"compression": "fp32", "exchange": "two_shot", "mixing": 0.0},
    "error feedback": {"compression": ErrorFeedback(TopK(1 / 16, Int2()))},
    "random, two shots": {
        "compression": RandomK(2, Int2()),
        "exchange": "two_shot",
        "outer_optimizer": CLIPPED,
    },
    "outer AdamW": {"compression": "int8", "outer_optimizer": GUARDED},
}


def offloaded(choices: dict[str, Any], offload: bool = True) -> dict[str, Any]:
    outer_optimizer = choices.get("outer_optimizer", OuterOptimizer())
    return {**choices, "outer_optimizer": replace(outer_optimizer, offload=offload)}


CHOICES |= {f"{name}, offloaded": offloaded(choices) for name, choices in CHOICES.items()}


def shown_run(training: Training) -> Seen:
    """Trains to the end; every third step the outer model is shown in between. Returns the
    trajectory.
    """
    for step in range(STEPS):
        training.step()
        if step % 3 == 1:
            with training.engine.evaluate():
                training.keep()
    training.engine.finish()
    training.keep()
    return training.trajectory()


def whole_run(
    device: str, group: int, lane: type[ThreadBackground], choices: dict[str, Any]
) -> Seen:
    """Trains with several fragments in flight and one group that is once not finite, and returns
    the trajectory.
    """
    training = Training(device, group, lane=lane, **choices)
    training.engine.rounds.diagnose()
    if group == 1:
        training.noise[10][0].fill_(torch.inf)
    seen = shown_run(training)
    assert training.most_in_flight > 1
    assert training.left_out == {1}
    return seen


def resumed_run(device: str, group: int, choices: dict[str, Any]) -> Seen:
    """Trains from a state saved in flight, with the bits of a run that was not stopped, and returns
    the trajectory.
    """
    unbroken, stopped, resumed = (Training(device, group, **choices) for _ in range(3))
    for _ in range(STEPS):
        unbroken.step()
    unbroken.engine.finish()
    for _ in range(11):
        stopped.step()
    state = stopped.engine.state_dict()
    assert len(state["flights"]) > 1
    wait_for_flights(stopped.engine)
    stopped.engine.close()
    resumed.engine.load_state_dict(state)
    for _ in range(11, STEPS):
        resumed.step()
    resumed.engine.finish()
    for training in (unbroken, resumed):
        training.keep()
    assert same(unbroken.trajectory()[11:], resumed.trajectory())
    return resumed.trajectory()
