"""What lives on an accelerator while outer state rests on the host: in steps, evaluations, checkpoints and the end.

The accelerator is pretended, see `tests.pretend`; it counts every byte that is on it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco import OuterOptimizer, StreamingDiLoCo
from lightning_sdiloco.compression import ErrorFeedback, Int4
from lightning_sdiloco.engine import GroupMean
from tests import pretend
from tests.known_training import wait_for_flights
from tests.pretend import IS_POSSIBLE
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python"),
]

WIDTH = 64
COPY = 4 * WIDTH * WIDTH
"""Bytes of a float32 copy of a fragment."""

CASES: dict[str, tuple[dict[str, Any], int]] = {
    # Outer parameters and momentum come from the host for the flight, and the new ones go there: five copies.
    "fp4": ({}, 5),
    "fp4, two shots": ({"exchange": "two_shot"}, 5),
    # The memory comes and goes too.
    "error feedback": ({"compression": ErrorFeedback(Int4())}, 6),
}


class Device:
    """A training on the device, in as many equal fragments as there are layers."""

    def __init__(self, layers: int, choices: dict[str, Any]) -> None:
        pretend.install()
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to("pretend")
        self.layers = layers
        self._before = pretend.memory_allocated()
        self.most: dict[str, float] = {}
        self.engine = self.counted("start", partial(self._engine, choices))

    def _engine(self, choices: dict[str, Any]) -> StreamingDiLoCo:
        fragments = [[f"{layer}.*"] for layer in range(self.layers)]
        every = 2 * self.layers
        return StreamingDiLoCo(
            self.model,
            sync_every=every,
            overlap_steps=1,
            fragments=fragments,
            outer_optimizer=OuterOptimizer(offload=True),
            **choices,
        )

    def counted(self, name: str, work: Callable[[], Any]) -> Any:
        """Does something and notes how many copies of a fragment there were at once on the device beside the model."""
        pretend.reset_peak_memory_stats()
        found = work()
        extra = (pretend.max_memory_allocated() - self._before) / COPY
        self.most[name] = max(self.most.get(name, 0.0), extra)
        return found

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.mul_(1.01)
        self.engine.step()
        wait_for_flights(self.engine)

    def validate_and_save(self) -> None:
        with self.engine.evaluate():
            assert all(values.device.type == "cpu" for values in self.engine.state_dict()["local"])
        self.engine.outer_state_dict()

    def names_without_the_device(self, mean: GroupMean | None = None) -> None:
        """Copies an outer model, or a mean, that rests on the host: its way does not lead over the device."""
        before = pretend.memory_allocated()
        pretend.reset_peak_memory_stats()
        named = self.engine.outer_state_dict() if mean is None else self.engine.named_mean(mean)
        assert {values.device.type for values in named.values()} == {"cpu"}
        assert pretend.max_memory_allocated() == before

    def show_mean(self) -> None:
        with self.engine.evaluate(self.engine.group_mean()):
            pass


def trained(layers: int, choices: dict[str, Any], rank: int, world_size: int) -> dict[str, float]:
    device = Device(layers, choices)
    for step in range(5 * layers):
        device.counted("step", device.step)
        if step % 5 == 4:
            device.counted("checkpoint", device.validate_and_save)
            device.names_without_the_device()
    device.counted("mean", device.show_mean)
    device.names_without_the_device(device.engine.group_mean())
    device.counted("end", device.engine.finish)
    return device.most


@pytest.mark.parametrize("name", CASES)
def test_beside_ddps_buckets_and_a_byte_the_device_holds_what_is_in_flight(name: str) -> None:
    choices, copies = CASES[name]
    small, large = (run_ranks(partial(trained, layers, choices), 2, timeout=100)[0] for layers in (8, 16))
    # What one flight takes at most, with what is prefetched for the next one.
    for most in (small, large):
        assert most["start"] <= copies
        assert most["step"] <= copies + 2.5
        assert most["checkpoint"] <= copies + 2.5
    assert large["step"] == pytest.approx(small["step"], abs=0.1)
    for most, layers in ((small, 8), (large, 16)):
        ddp_and_a_byte, in_flight = layers + layers / 4, layers // 4
        assert most["mean"] <= ddp_and_a_byte + copies * in_flight
        assert most["end"] <= ddp_and_a_byte + copies * in_flight
    # All fragments at once would take several models.
    assert large["mean"] < 16 + 16 / 4
