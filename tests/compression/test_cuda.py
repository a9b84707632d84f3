"""What a GPU has to show, where there is one; `test_accelerator.py` shows it on a pretended accelerator."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.engine.test_accelerator import CHOICES, STEPS, Training, extra_memory, same, wait_for_flights

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["fp4", "error feedback", "outer AdamW"])
def test_offloading_changes_no_bit(name: str) -> None:
    def trajectory(offload: bool) -> list[list[torch.Tensor]]:
        training = Training("cuda", 0, **{**CHOICES[name], "offload": offload})
        for step in range(STEPS):
            training.step()
            if step % 3 == 1:
                with training.engine.evaluate():
                    training.keep()
        training.engine.finish()
        training.keep()
        return training.trajectory()

    assert same(trajectory(offload=True), trajectory(offload=False))


def test_offloaded_the_device_holds_what_is_in_flight_whatever_the_size_of_the_model() -> None:
    assert extra_memory(8, offload=False, device="cuda") > extra_memory(4, offload=False, device="cuda")
    assert extra_memory(8, offload=True, device="cuda") == extra_memory(4, offload=True, device="cuda")


@contextmanager
def waits_of_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the threads that wait for the device inside a ``with`` block."""
    waits: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> None:
        waits.append(threading.current_thread().name)

    for owner in (torch.cuda.Stream, torch.cuda.Event):
        synchronize = owner.synchronize

        def waiting(self: Any, synchronize: Any = synchronize) -> None:
            noted()
            synchronize(self)

        monkeypatch.setattr(owner, "synchronize", waiting)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", noted)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("offload", [False, True])
def test_the_training_thread_does_not_wait_for_the_device(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("cuda", 0, offload=offload)
    with waits_of_threads(monkeypatch) as waits:
        for _ in range(STEPS):
            training.inner_step()
            wait_for_flights(training.engine)
            training.engine.step()
        wait_for_flights(training.engine)
    assert set(waits) == {"sdiloco-background"}
