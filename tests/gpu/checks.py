"""Checks of a device, without Lightning: results that are bit-identical to those of the CPU, no
race, no wait of the training thread, no leak.

Each check runs on a CUDA device, and on the pretended one and a CPU if that tells anything.
"""

import os
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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

# Every device sums a norm in an order of its own, and some fused optimizers round differently.
ROUNDED_OTHERWISE = {"outer AdamW"}

# Cycles of a device for which a stream is held up: about a millisecond.
_WHILE = 2_000_000


def bits(name: str, place: Place, rank: int, world_size: int) -> Found:
    """A run of two groups is bit-identical to that of the CPU, with every flight begun as late as
    possible.
    """
    choices = dict(CHOICES[name])
    if place.is_cuda and "outer_optimizer" in choices:
        choices["outer_optimizer"] = replace(choices["outer_optimizer"], clip_norm=None)
    expected = whole_run("cpu", rank, ThreadBackground, choices)
    seen = whole_run(place.device, rank, LateLane, choices)
    findings = difference(seen, expected)
    must_be_identical = not place.is_cuda or name.partition(",")[0] not in ROUNDED_OTHERWISE
    largest_allowed = 0.0 if must_be_identical else 1e-2
    assert findings["different"] == 0 or findings["largest"] < largest_allowed, findings
    return findings


def difference(first: Seen, second: Seen) -> Found:
    """How many values of two trajectories differ in a bit, and by how much at most, where both are
    finite.
    """
    numel = 0
    different = 0
    largest = 0.0
    for left, right in zip(first, second, strict=True):
        for a, b in zip(left, right, strict=True):
            numel += a.numel()
            different += int((a.view(torch.int32) != b.view(torch.int32)).sum())
            distances = (a - b).abs().nan_to_num(0.0, 0.0, 0.0)
            largest = max(largest, float(distances.max()))
    return {"values": numel, "different": different, "largest": largest}


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
    normal = torch.randn(numel, generator=generator)
    magnitudes = (4 * torch.randn(numel, generator=generator)).exp()
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-39, torch.finfo(torch.float32).max])
    return torch.cat((normal * magnitudes, special))


def codecs(place: Place, rank: int, world_size: int) -> Found:
    values = hard_values(20_000 if place.quick else 20_000_000 + 5)
    on_device = values.to(place.device)
    assert not place.is_cuda or passes_on("cuda") is not None, "fp4 is not encoded in one pass"
    digest_of_cpu = digest(values, start=3)
    assert digest(on_device, start=3) == digest_of_cpu, "the digest differs from that of the CPU"
    for name, codec in CODECS.items():
        payload = codec.encode(values)
        assert_same(codec.encode(on_device), payload, f"{name}: the payload of the device differs")
        decoded = torch.empty_like(on_device)
        expected = torch.empty_like(values)
        codec.decode(payload.to(place.device), decoded)
        codec.decode(payload, expected)
        assert_same(decoded, expected, f"{name}: the decoded values of the device differ")
        payloads = [payload, codec.encode(values.flip(0)), codec.encode(-3 * values)]
        payloads_on_device = [payload.to(place.device) for payload in payloads]
        for factors in ((1.0, 1.0, 1.0), (0.7, 1.3, 1.0)):
            codec.mean(list(zip(payloads, factors, strict=True)), expected)
            codec.mean(list(zip(payloads_on_device, factors, strict=True)), decoded)
            assert_same(decoded, expected, f"{name}: the mean of the device differs")
    return {"values": values.numel()}


def directions(place: Place, rank: int, world_size: int) -> Found:
    shapes = [(1, 48, 192), (3, 17, 5)]
    if not place.quick:
        shapes += [(2, 1024, 4096), (1, 32768, 512)]
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        matrices = torch.randn(shape, generator=generator)
        matrices[0, 0] = 0.0
        directed = equalised(matrices.to(place.device))
        message = f"matrices of shape {shape}: those of the device differ"
        assert_same(directed, equalised(matrices), message)
    return {"shapes": len(shapes)}


def assert_same(on_device: Tensor, expected: Tensor, message: str) -> None:
    bits = on_device.cpu().contiguous().view(torch.uint8)
    is_same = torch.equal(bits, expected.contiguous().view(torch.uint8))
    assert is_same, message


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

    class SlowTraining(Training):
        def inner_step(self) -> None:
            sleep(_WHILE)
            super().inner_step()

    expected = shown_run(Training(place.device, 0))
    slow = type("Slow", (AroundLane,), {"around": staticmethod(late)})
    runs = {"side stream": shown_run(Training(place.device, 0, lane=slow))}
    for is_offloaded in (False, True):
        training = SlowTraining(place.device, 0, lane=LateLane, **offloaded({}, is_offloaded))
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

    handler_class = _sanitizer.EventHandler
    for name in list(vars(handler_class)):
        if name.startswith("_handle_"):
            setattr(handler_class, name, locked(getattr(handler_class, name)))
    mode = _sanitizer.CUDASanitizerDispatchMode()

    def watched() -> Any:
        mode_of_thread = object.__new__(type(mode))
        mode_of_thread.event_handler = mode.event_handler  # all threads share what it has seen
        return mode_of_thread

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
    bytes_before = module.memory_allocated()
    engine = StreamingDiLoCo(
        model,
        sync_every=4 * layers,
        overlap_steps=2,
        fragments=[[f"{layer}.*"] for layer in range(layers)],
        compression="fp32",
        outer_optimizer=OuterOptimizer(offload=offload),
    )
    extra_bytes = []
    for _ in range(16 * layers):
        module.reset_peak_memory_stats()
        engine.step()
        wait_for_flights(engine)
        extra_bytes.append(module.max_memory_allocated() - bytes_before)
    engine.finish()
    return max(extra_bytes)


def memory(place: Place, rank: int, world_size: int) -> Found:
    if place.device == "cpu":
        raise NotHere("memory of the host is not counted by torch")
    findings = {}
    for layers in (4, 8):
        for offload in (False, True):
            name = f"{layers} layers, offload={offload}"
            findings[name] = extra_memory(layers, offload, place.device)
    assert findings["8 layers, offload=False"] > findings["4 layers, offload=False"], findings
    assert findings["8 layers, offload=True"] == findings["4 layers, offload=True"], findings
    statistics = place.module.memory_stats() if place.is_cuda else {}
    problems = {
        name: statistics[name] for name in ("num_alloc_retries", "num_ooms") if name in statistics
    }
    assert not any(problems.values()), problems
    return {**findings, **problems}


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

    def note(message: object = "called a synchronizing", *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing" not in str(message):
            return
        thread = threading.current_thread()
        waits.append(thread.name)
        if thread is threading.main_thread():
            traceback.print_stack()

    def noting(synchronize: Any) -> Any:
        def call(self: Any) -> Any:
            note()
            return synchronize(self)

        return call

    with ExitStack() as patches:
        patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = note
        for owner in (torch.cuda.Stream, torch.cuda.Event):
            patches.enter_context(patch.object(owner, "synchronize", noting(owner.synchronize)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
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


# Resuming, and NCCL


def resumed(name: str, place: Place, rank: int, world_size: int) -> Found:
    return {"steps": len(resumed_run(place.device, rank, CHOICES[name]))}


def between_devices(name: str, place: Place, rank: int, world_size: int) -> Found:
    layout = GroupLayout(2, 2)
    limit = timedelta(seconds=40)
    on_device = Topology.of_world(layout, limit, on_device=backend_on(place, rank))
    trajectories = []
    sent = []
    for topology in (on_device, Topology.of_world(layout, limit)):
        training = Training(place.device, rank, topology=topology, **CHOICES[name])
        trajectories.append(shown_run(training))
        sent.append(training.engine.report()["bytes_sent"])
    assert same(*trajectories), difference(*trajectories)
    assert sent[0] == sent[1], sent
    return {"bytes": sent[0], "exchange": type(on_device.exchange).__name__}


def backend_on(place: Place, rank: int) -> DeviceBackend:
    """The backend that joins two processes on one device; `NotHere` if none does."""
    if place.device == "cpu":
        raise NotHere("a CPU has gloo")
    if place.device == "pretend":
        from tests.pretend import ccl

        ccl.register()
        return DeviceBackend(ccl.NAME, torch.device("pretend"))
    os.environ |= hosts_of_their_own(rank)
    try:
        backend = nccl_on(torch.device("cuda", 0))
        trial = torch.distributed.new_group([0, 1], backend="nccl", timeout=timedelta(seconds=30))
        values = torch.full((1000,), float(rank), device="cuda")
        torch.distributed.all_reduce(values, group=trial)
        assert values.sum().item() == 1000
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise NotHere(f"NCCL does not join two processes on one device here: {reason}") from None
    return backend


def at_once(place: Place, rank: int, world_size: int) -> Found:
    """Groups of the benchmarks that train at once, on CUDA from a recording, learn what they learn
    one after the other.
    """
    size = "tiny" if place.quick else "0.5M"
    rates = quality.Rates(3e-3, 3e-3)
    outer = quality.EQUALISED
    ours, ddp = quality.pair(size, 4, rates=rates, outer_optimizer=outer, sync_every=10)
    choices = {**(ours.choices or {}), "dense_beginning": DenseBeginning(3)}
    return {
        "ours": apart(replace(ours, choices=choices, device=place.device, budget=1.0)),
        "DDP": apart(replace(ddp, device=place.device, budget=1.0)),
    }


def apart(training: benchmark.Training) -> float:
    """Returns how far groups that train at once come from those that take turns, as a share of
    their way, which must be little.
    """
    together = parameters_after(training, 25, is_stacked=True)
    by_turns = parameters_after(training, 25, is_stacked=False)
    way = by_turns - parameters_after(training, 0, is_stacked=False)
    # AdamW makes whole steps of gradients that are all but zero.
    share = float((together - by_turns).norm() / way.norm())
    assert share < 0.05, share
    return share


def parameters_after(training: benchmark.Training, steps: int, is_stacked: bool) -> Tensor:
    with patch.object(benchmark.Training, "is_stacked", is_stacked):
        loop = benchmark.Loop(training, training.text())
        loop.run(steps=steps)
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


BITS = "a run of two groups is bit-identical to that of the CPU"
RESUMED = "a run resumed in flight is bit-identical to one that was not stopped"
OVER_NCCL = "a run over NCCL is bit-identical to one over gloo"

# Those that tell most come first.
CHECKS: dict[str, Task] = {
    "codecs": Task(
        "encoding, the mean and the digest are bit-identical to those of the CPU",
        codecs,
        seconds=150,
    ),
    "directions": Task(
        "the direction of matrices is bit-identical to that of the CPU", directions, seconds=100
    ),
    **{f"bits, {name}": Task(BITS, partial(bits, name), 2, seconds=100) for name in CHOICES},
    "slow streams": Task("no bit depends on which stream is behind", slow_streams, seconds=60),
    "sanitizer": Task("torch's sanitizer of streams finds no race", sanitized, seconds=60),
    "memory": Task(
        "the device holds what is in flight, whatever the size of the model", memory, seconds=60
    ),
    "waits": Task("the training thread does not wait for the device", waits, seconds=60),
    **{
        f"resume, {name}": Task(RESUMED, partial(resumed, name), 2, seconds=60)
        for name in ("error feedback", "random, two shots, offloaded")
    },
    **{
        f"NCCL, {name}": Task(OVER_NCCL, partial(between_devices, name), 2, seconds=60)
        for name in ("fp4", "fp32, two shots", "random, two shots, offloaded")
    },
    "at once": Task("groups that train at once learn as they do one by one", at_once, seconds=60),
}
