"""What a device must show, without Lightning: the bits of the CPU, no race, no wait of the training
thread, no leak.

Each check runs on a CUDA device, and as far as that tells anything on the pretended one and on a
CPU too.
"""

import os
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import quality
from benchmarks import training as benchmark
from lightning_sdiloco import DenseBeginning, OuterOptimizer, StreamingDiLoCo
from lightning_sdiloco.algorithm.direction import equalised
from lightning_sdiloco.comm.exchange import DeviceBackend, nccl_on
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    Compression,
    ErrorFeedback,
    RandomBlock,
    RandomK,
    TopK,
)
from lightning_sdiloco.compression.fp4 import FP4, passes_on
from lightning_sdiloco.engine.background import ThreadBackground
from lightning_sdiloco.engine.shards import digest
from tests.gpu.task import Found, NotHere, Place, Task, hosts_of_their_own
from tests.known_training import (
    CHOICES,
    STEPS,
    LateLane,
    Seen,
    Training,
    offloaded,
    resumed_run,
    same,
    shown_run,
    wait_for_flights,
    whole_run,
)

# A norm is added up in another order on every device, and some fused optimizers round otherwise.
ROUNDED_OTHERWISE = {"outer AdamW"}

# Cycles of a device for which a stream is held up: about a millisecond.
_WHILE = 2_000_000


def bits(name: str, place: Place, rank: int, world_size: int) -> Found:
    """A run of two groups has the bits of the CPU, with every flight begun as late as it can be."""
    choices = dict(CHOICES[name])
    if place.is_cuda and "outer_optimizer" in choices:
        choices["outer_optimizer"] = replace(choices["outer_optimizer"], clip_norm=None)
    expected = whole_run("cpu", rank, ThreadBackground, choices)
    seen = whole_run(place.device, rank, LateLane, choices)
    found = difference(seen, expected)
    exact = not place.is_cuda or name.partition(",")[0] not in ROUNDED_OTHERWISE
    assert found["different"] == 0 or (not exact and found["largest"] < 1e-2), found
    return found


def difference(one: Seen, other: Seen) -> Found:
    """How many values of two trajectories differ in a bit, and by how much at most, where both are
    finite.
    """
    pairs = [
        (a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    apart = [(a - b).abs().nan_to_num(0.0, 0.0, 0.0) for a, b in pairs]
    return {
        "values": sum(a.numel() for a, _ in pairs),
        "different": sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs),
        "largest": max(float(values.max()) for values in apart),
    }


# Encoding, the mean and the digest

CODECS: dict[str, Compression] = {
    **COMPRESSIONS,
    "topk of fp4": TopK(1 / 32, FP4()),
    "feedback of fp4": ErrorFeedback(FP4()),
    "random values": RandomK(32, FP4()).at(100),
    "random block": RandomBlock(32, FP4()).at(100),
}


def hard_values(numel: int) -> Tensor:
    """Values of many magnitudes, subnormal and huge ones, and zeros of both signs."""
    generator = torch.Generator().manual_seed(0)
    values = (
        torch.randn(numel, generator=generator)
        * (4 * torch.randn(numel, generator=generator)).exp()
    )
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-39, torch.finfo(torch.float32).max])
    return torch.cat((values, special))


def codecs(place: Place, rank: int, world_size: int) -> Found:
    values = hard_values(20_000 if place.quick else 20_000_000 + 5)
    there = values.to(place.device)
    assert not place.is_cuda or passes_on("cuda") is not None, "fp4 is not encoded in one pass"
    assert digest(there, start=3) == digest(values, start=3), (
        "the digest differs from that of the CPU"
    )
    for name, codec in CODECS.items():
        payload = codec.encode(values)
        assert_same(codec.encode(there), payload, f"{name}: the payload of the device differs")
        out = torch.empty_like(there)
        expected = torch.empty_like(values)
        codec.decode(payload.to(place.device), out)
        codec.decode(payload, expected)
        assert_same(out, expected, f"{name}: what the device decodes differs")
        payloads = [payload, codec.encode(values.flip(0)), codec.encode(-3 * values)]
        for factors in ((1.0, 1.0, 1.0), (0.7, 1.3, 1.0)):
            codec.mean(list(zip(payloads, factors, strict=True)), expected)
            codec.mean(
                [
                    (each.to(place.device), factor)
                    for each, factor in zip(payloads, factors, strict=True)
                ],
                out,
            )
            assert_same(out, expected, f"{name}: the mean of the device differs")
    return {"values": values.numel()}


def directions(place: Place, rank: int, world_size: int) -> Found:
    shapes = (
        [(1, 48, 192), (3, 17, 5)]
        if place.quick
        else [(1, 48, 192), (3, 17, 5), (2, 1024, 4096), (1, 32768, 512)]
    )
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        matrices = torch.randn(shape, generator=generator)
        matrices[0, 0] = 0.0
        directed = equalised(matrices.to(place.device))
        assert_same(
            directed, equalised(matrices), f"matrices of shape {shape}: those of the device differ"
        )
    return {"shapes": len(shapes)}


def assert_same(one: Tensor, other: Tensor, message: str) -> None:
    assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8)), message


# Streams, memory and waits


class AroundLane(ThreadBackground):
    """Runs every stage inside a context, in the thread of the stage."""

    around: Any = staticmethod(nullcontext)

    def start(self, work: Any) -> Any:
        return super().start(self._inside(work))

    def _inside(self, work: Any) -> Any:
        while True:
            with self.around():
                try:
                    next(work)
                except StopIteration as ended:
                    return ended.value
            yield


def slow_streams(place: Place, rank: int, world_size: int) -> Found:
    sleep = getattr(place.module, "_sleep", lambda cycles: None)

    @contextmanager
    def late() -> Iterator[None]:
        # The host and the training stream are far ahead of the side stream.
        sleep(_WHILE)
        yield

    expected = shown_run(Training(place.device, 0))
    slow = type("Slow", (AroundLane,), {"around": staticmethod(late)})
    runs = {"side stream": shown_run(Training(place.device, 0, lane=slow))}
    for is_offloaded in (False, True):
        training = Training(place.device, 0, lane=LateLane, **offloaded({}, is_offloaded))
        move = training.inner_step
        training.inner_step = lambda move=move: (sleep(_WHILE), move())[1]  # type: ignore[method-assign, misc]
        runs[f"training stream, offload={is_offloaded}"] = shown_run(training)
    for name, seen in runs.items():
        assert same(seen, expected), f"{name}: {difference(seen, expected)}"
    return {"held up": list(runs)}


def sanitized(place: Place, rank: int, world_size: int) -> Found:
    """torch's own sanitizer sees every operation of all threads, and no two that no event
    orders.
    """
    if not place.is_cuda:
        raise NotHere(
            "torch's sanitizer of streams is for CUDA; the pretended device finds races by itself"
        )
    from torch.cuda import _sanitizer

    lock = threading.RLock()

    def locked(method: Any) -> Any:
        def call(*args: Any) -> Any:
            with lock:
                return method(*args)

        return call

    for name in [name for name in vars(_sanitizer.EventHandler) if name.startswith("_handle_")]:
        setattr(_sanitizer.EventHandler, name, locked(getattr(_sanitizer.EventHandler, name)))
    mode = _sanitizer.CUDASanitizerDispatchMode()

    def watched() -> Any:
        own = object.__new__(type(mode))  # modes belong to a thread; what they have seen is common
        own.event_handler = mode.event_handler
        return own

    lane = type("Watched", (AroundLane,), {"around": staticmethod(watched)})
    with mode:
        for is_offloaded in (False, True):
            shown_run(Training(place.device, 0, lane=lane, **offloaded({}, is_offloaded)))
    return {"sanitizer": "torch.cuda._sanitizer"}


def extra_memory(layers: int, offload: bool, device: str) -> int:
    """Bytes of the device that an engine takes at most, in fragments of equal size of which one is
    in flight.
    """
    module = torch.get_device_module(device)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))).to(device)
    before = module.memory_allocated()
    engine = StreamingDiLoCo(
        model,
        sync_every=4 * layers,
        overlap_steps=2,
        fragments=[[f"{layer}.*"] for layer in range(layers)],
        compression="fp32",
        outer_optimizer=OuterOptimizer(offload=offload),
    )
    most = []
    for _ in range(16 * layers):
        module.reset_peak_memory_stats()
        engine.step()
        wait_for_flights(engine)
        most.append(module.max_memory_allocated() - before)
    engine.finish()
    return max(most)


def memory(place: Place, rank: int, world_size: int) -> Found:
    if place.device == "cpu":
        raise NotHere("memory of the host is not counted by torch")
    cases = [(layers, offload) for layers in (4, 8) for offload in (False, True)]
    found = {
        f"{layers} layers, offload={own}": extra_memory(layers, own, place.device)
        for layers, own in cases
    }
    assert found["8 layers, offload=False"] > found["4 layers, offload=False"], found
    assert found["8 layers, offload=True"] == found["4 layers, offload=True"], found
    statistics = place.module.memory_stats() if place.is_cuda else {}
    kept = {key: statistics[key] for key in ("num_alloc_retries", "num_ooms") if key in statistics}
    assert not any(kept.values()), kept
    return {**found, **kept}


@contextmanager
def waits_on(place: Place) -> Iterator[list[str]]:
    """The names of the threads that wait for a device inside a ``with`` block."""
    waits: list[str] = []
    if place.device == "pretend":
        from tests.pretend import synchronisations

        with synchronisations() as log:
            yield waits
        waits += [entry.thread for entry in log]
        return
    if not place.is_cuda:
        raise NotHere("a CPU has no streams to wait for")

    def noted(message: object = "called a synchronizing", *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing" not in str(message):
            return
        thread = threading.current_thread()
        waits.append(thread.name)
        if thread is threading.main_thread():
            traceback.print_stack()

    def waiting(synchronize: Any) -> Any:
        return lambda self: (noted(), synchronize(self))[1]  # type: ignore[func-returns-value]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        owners = [torch.cuda.Stream, torch.cuda.Event]
        patches = [
            patch.object(owner, "synchronize", waiting(owner.synchronize)) for owner in owners
        ]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with patches[0], patches[1]:
                yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waits(place: Place, rank: int, world_size: int) -> Found:
    counts = {}
    for is_offloaded in (False, True):
        training = Training(place.device, 0, **offloaded({}, is_offloaded))
        training.inner_step()
        training.engine.step()
        with waits_on(place) as threads:
            for _ in range(STEPS - 1):
                training.inner_step()
                wait_for_flights(training.engine)
                training.engine.step()
            wait_for_flights(training.engine)
        assert set(threads) == {"sdiloco-background"}, sorted(set(threads))
        counts[f"waits of the background, offload={is_offloaded}"] = len(threads)
    return counts


# Going on, and NCCL


def resumed(name: str, place: Place, rank: int, world_size: int) -> Found:
    return {"steps": len(resumed_run(place.device, rank, CHOICES[name]))}


def between_devices(name: str, place: Place, rank: int, world_size: int) -> Found:
    topology = Topology.of_world(
        GroupLayout(2, 2), timedelta(seconds=40), on_device=backend_on(place, rank)
    )
    runs = []
    counts = []
    for one in (topology, Topology.of_world(GroupLayout(2, 2), timedelta(seconds=40))):
        training = Training(place.device, rank, topology=one, **CHOICES[name])
        runs.append(shown_run(training))
        counts.append(training.engine.report()["bytes_sent"])
    assert same(*runs), difference(*runs)
    assert counts[0] == counts[1], counts
    return {"bytes": counts[0], "exchange": type(topology.exchange).__name__}


def backend_on(place: Place, rank: int) -> DeviceBackend:
    """What joins two processes on one device; `NotHere` if nothing does."""
    if place.device == "cpu":
        raise NotHere("a CPU has gloo")
    if place.device == "pretend":
        from tests.pretend import ccl

        ccl.register()
        return DeviceBackend(ccl.NAME, torch.device("pretend"))
    os.environ |= hosts_of_their_own(rank)
    try:
        own = nccl_on(torch.device("cuda", 0))
        trial = torch.distributed.new_group([0, 1], backend="nccl", timeout=timedelta(seconds=30))
        values = torch.full((1000,), float(rank), device="cuda")
        torch.distributed.all_reduce(values, group=trial)
        assert values.sum().item() == 1000
    except (RuntimeError, ValueError) as error:
        raise NotHere(
            f"NCCL does not join two processes on one device here: {str(error).splitlines()[0]}"
        ) from None
    return own


def recorded(place: Place, rank: int, world_size: int) -> Found:
    """Steps of the benchmarks that are recorded once and replayed have the bits of others."""
    if not place.is_cuda:
        raise NotHere("steps are recorded on CUDA")
    ours, ddp = quality.alone("0.5M", 4, seed=0)
    dense = {**(ours.choices or {}), "dense_beginning": DenseBeginning(3)}
    found: Found = {}
    for name, one in {"ours": replace(ours, choices=dense), "DDP": ddp}.items():
        models = []
        for records in (True, False):
            with patch.object(benchmark.Training, "is_recorded", records):
                training = replace(one, device=place.device)
                loop = benchmark.Loop(training, training.text())
                loop.run(steps=45)
            models.append([[parameter.detach() for parameter in loop.model.parameters()]])
        found[name] = difference(*models)
        assert same(*models), found
    return found


# What tells most first.
CHECKS: dict[str, Task] = {
    "codecs": Task(
        "encoding, the mean and the digest have the bits of the CPU", codecs, seconds=150
    ),
    "directions": Task(
        "the direction of matrices has the bits of the CPU", directions, seconds=100
    ),
    **{
        f"bits, {name}": Task(
            "a run of two groups has the bits of the CPU", partial(bits, name), 2, seconds=100
        )
        for name in CHOICES
    },
    "slow streams": Task("no bit depends on which stream is behind", slow_streams, seconds=60),
    "sanitizer": Task("torch's sanitizer of streams finds no race", sanitized, seconds=60),
    "memory": Task(
        "the device holds what is in flight, whatever the size of the model", memory, seconds=60
    ),
    "waits": Task("the training thread does not wait for the device", waits, seconds=60),
    **{
        f"resume, {name}": Task(
            "a run goes on in flight, bit for bit", partial(resumed, name), 2, seconds=60
        )
        for name in ("error feedback", "random, two shots, offloaded")
    },
    **{
        f"NCCL, {name}": Task(
            "over NCCL a run has the bits of gloo", partial(between_devices, name), 2, seconds=60
        )
        for name in ("fp4", "fp32, two shots", "random, two shots, offloaded")
    },
    "recorded": Task("steps that are replayed have the bits of others", recorded, seconds=60),
}
