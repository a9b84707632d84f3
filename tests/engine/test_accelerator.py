"""The engine on an accelerator: the side stream, events and threads change no bit, race with
nothing, hold up nobody.

The accelerator is pretended, see `tests.pretend`: the device is as slow as can be, two operations
whose order nothing settles raise an error, and every byte that is on it is counted. That it
computes what the CPU does, and sees no race where there is none, the tests show that train on it.
"""

import threading
from collections.abc import Callable
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


@alone
def test_the_pretended_device_detects_unordered_accesses_and_waiting_threads() -> None:
    def unordered() -> None:
        event = Event()
        side = Stream()
        event.record()
        values = ones().add_(1)
        side.wait_event(event)  # of before
        with stream(side):
            values + 1

    def freed() -> None:
        side = Stream()
        with stream(side):
            values = ones()
        current_stream().wait_stream(side)
        values.sum()
        del values
        with stream(side):
            ones()

    def seen_early() -> None:
        host = torch.empty(4, pin_memory=True).copy_(ones(), non_blocking=True)
        host.zero_()
        current_stream().synchronize()

    def changed_early() -> None:
        host = torch.ones(4).pin_memory()
        host.to("pretend", non_blocking=True)
        host.add_(1)
        current_stream().synchronize()

    for act, told in (
        (unordered, "aten::add on stream .* reads what aten::add_ on the default stream .* writes"),
        (freed, "may get freed memory that aten::sum on the default stream .* reads"),
        (seen_early, "the host wrote to pinned memory"),
        (changed_early, "the host changed pinned memory"),
    ):
        with pytest.raises(Race, match=told):
            act()
        pretend.synchronize()  # all that it left is over for what comes next
    host = torch.empty(4, pin_memory=True).copy_(ones(), non_blocking=True)
    event = current_stream().record_event()
    assert host.isnan().all()
    assert [event.query(), event.query()] == [False, True], "a query is not at once true"
    assert host.tolist() == [1.0] * 4
    values = ones()
    waits: dict[str, Callable[[], object]] = {
        "stream.synchronize": lambda: current_stream().synchronize(),
        "event.synchronize": lambda: current_stream().record_event().synchronize(),
        "aten::_local_scalar_dense": lambda: bool(values.sum() > 1),
        "aten::nonzero": lambda: values.nonzero(),
        "copy to the host": lambda: torch.empty(4).copy_(values, non_blocking=True),
        "copy to the device": lambda: torch.tensor([1.0], device="pretend"),
    }
    for kind, act in waits.items():
        values = ones()
        with synchronisations() as log:
            thread = threading.Thread(target=act, name="other")
            thread.start()
            thread.join()
        assert log == [("other", kind, True)]


def test_the_pretended_device_shows_everything_that_a_gpu_must_show(tmp_path: Path) -> None:
    """A run gives the bits of the CPU, and so does one that goes on from what was in flight; and
    nothing waits.
    """
    late = (
        "fp4",
        "fp32, two shots",
        "random, two shots",
        "error feedback, offloaded",
        "outer AdamW",
    )
    resumed = ("error feedback", "random, two shots, offloaded")
    place = Place("pretend", tmp_path, quick=True)
    wrong = dict[str, str]()
    for name in (
        *(f"bits, {name}" for name in late),
        *(f"resume, {name}" for name in resumed),
        "memory",
        "waits",
    ):
        outcome = do(CHECKS[name], place, tmp_path / "log")
        if outcome.status != "done":
            wrong[name] = outcome.trace or outcome.reason
    assert wrong == {}


def test_a_recut_and_a_group_of_several_ranks_give_the_bits_of_the_cpu() -> None:
    def recut(device: str, group: int) -> Seen:
        """Freezes a layer during training, and lets it train again."""
        training = Training(device, group % 2, groups=2)
        for step in range(STEPS):
            if step in (8, 14):
                training.model[0].requires_grad_(step == 14)
                training.engine.recut()
            training.step()
        training.engine.finish()
        training.keep()
        return training.trajectory()

    def whole(device: str, rank: int, offload: bool) -> Seen:
        return known.shown_run(
            Training(device, rank // 2, groups=2, outer_optimizer=OuterOptimizer(offload=offload))
        )

    def both(rank: int, world_size: int) -> list[bool]:
        runs = [partial(whole, offload=True), partial(whole, offload=False), recut]
        expected = [run("cpu", rank) for run in runs]
        pretend.install()
        return [
            same(run("pretend", rank), values) for run, values in zip(runs, expected, strict=True)
        ]

    assert run_ranks(both, 4) == [[True] * 3] * 4


@alone
def test_one_process_matches_the_cpu_and_copies_wait_for_the_device_but_logs_do_not() -> None:
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
        """The last inner step before a launch is also that in which the flight of the same
        fragment lands.
        """
        training = Training(
            device, 0, sync_every=4, overlap_steps=3, outer_optimizer=OuterOptimizer(offload=True)
        )
        for _ in range(STEPS):
            training.step()
        return training.trajectory()

    for offload in (False, True):
        assert same([simulated("pretend", offload)], [simulated("cpu", offload)])
    assert same(prefetched("pretend"), prefetched("cpu"))
    # What is stored on the host is page-locked, and a copy that nobody takes is not used too soon.
    storage = OnHost(torch.device("pretend"))
    nobodys = storage.prefetch(storage.store(torch.ones(1000, device="pretend")))
    del nobodys
    assert torch.zeros(1000, device="pretend").sum().item() == 0
    for device in ("pretend", "cpu"):
        values = torch.arange(5.0, device=device)
        copied = storage.store_copy(values)
        assert (copied.device.type, copied.is_pinned(), copied is not values) == ("cpu", True, True)
        assert copied.tolist() == [0, 1, 2, 3, 4]
    # A loss is logged once it is there, and a digest waits for the device once.
    losses = Deferred()
    values = torch.randn(600_000)
    with synchronisations() as log:
        losses.take(1, torch.full((), 0.5, device="pretend"))
        assert [losses.ready(), losses.ready()] == [[], [(1, 0.5)]]
        losses.take(2, torch.full((), 0.25, device="pretend"))
    assert log == []
    assert losses.ready(wait=True) == [(2, 0.25)]
    there = values.to("pretend")
    with synchronisations() as log:
        found = digest(there, start=7)
    assert found == digest(values, start=7)
    assert len(log) == 1


WIDTH = 64
COPY = 4 * WIDTH * WIDTH  # bytes of a float32 copy of a fragment


def most_of(
    layers: int, choices: dict[str, Any], direction: Literal["equalised", "elementwise"]
) -> dict[str, float]:
    """How many copies of a fragment were at once on the device beside the model, by what was
    done.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(
        "pretend"
    )
    before = pretend.memory_allocated()
    most = dict[str, float]()

    def counted(name: str, work: Callable[[], Any]) -> Any:
        pretend.reset_peak_memory_stats()
        found = work()
        most[name] = max(most.get(name, 0.0), (pretend.max_memory_allocated() - before) / COPY)
        return found

    def step() -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
        engine.step()
        known.wait_for_flights(engine)

    def checkpoint() -> Any:
        with engine.evaluate():
            return [
                *engine.state_dict()["local"]["parameters"],
                *engine.outer_state_dict().values(),
            ]

    def mean() -> Any:
        with engine.evaluate(taken := engine.group_mean()):
            return taken

    every: dict[str, Any] = {"sync_every": 2 * layers, "overlap_steps": 1, **choices}
    every |= {
        "fragments": "strided:1",
        "outer_optimizer": OuterOptimizer(offload=True, direction=direction),
    }
    engine = counted("start", partial(StreamingDiLoCo, model, **every))
    for number in range(5 * layers):
        counted("step", step)
        if number % 5 == 4:
            assert {values.device.type for values in counted("checkpoint", checkpoint)} == {"cpu"}
    taken = counted("mean", mean)
    held = pretend.memory_allocated()
    pretend.reset_peak_memory_stats()
    assert {values.device.type for values in engine.view.named(taken).values()} == {"cpu"}
    assert pretend.max_memory_allocated() == held, (
        "the way of a mean that rests there does not lead over the device"
    )
    counted("end", engine.finish)
    return most


def test_besides_ddps_buckets_the_device_holds_only_fragments_in_flight() -> None:
    """In steps, evaluations, checkpoints and the end."""
    # Outer parameters and momentum come from the host for the flight, and the new ones go there:
    # five copies. A memory comes and goes too.
    # A fragment here is one matrix. While that is mapped, there are five more of it in float64.
    cases: list[tuple[dict[str, Any], Literal["equalised", "elementwise"], int]] = [
        ({"exchange": "two_shot"}, "elementwise", 5),
        ({"compression": ErrorFeedback(Int4())}, "elementwise", 6),
        ({}, "equalised", 5 + 10),
    ]

    def run(rank: int, world_size: int) -> list[list[dict[str, float]]]:
        pretend.install()
        return [
            [most_of(layers, choices, direction) for layers in (8, 16)]
            for choices, direction, _ in cases
        ]

    for (small, large), (_, _, copies) in zip(run_ranks(run, 2)[0], cases, strict=True):
        for most, layers in ((small, 8), (large, 16)):
            # What one flight takes at most, with what is prefetched for the next one.
            assert most["start"] <= copies
            assert max(most["step"], most["checkpoint"]) <= copies + 2.5
            ddp_and_a_byte = layers + layers / 4
            in_flight = layers // 4
            assert max(most["mean"], most["end"]) <= ddp_and_a_byte + copies * in_flight
        assert large["step"] <= small["step"] + 0.1
        # All fragments at once would take several models.
        assert large["mean"] < 16 + 16 / 4
