"""Checks of a Trainer on a device: every precision, a compiled model, resuming, and no wait inside
a step.

Two worker groups are two processes on one device, each a node with one rank; Lightning and the
exchange use gloo, since NCCL refuses two ranks of one host on one device. If models are sharded,
NCCL takes each rank for a host.
"""

import gzip
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_sdiloco import StreamingDiLoCoModelParallelStrategy, StreamingDiLoCoStrategy
from tests.bits import same
from tests.gpu.task import Found, NotHere, Place, Task, hosts_of_their_own
from tests.ranks import agreed

STEPS = 23
SAVED_AT = 13

# The calls in which a thread waits for a device, as the profiler names them.
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")

STEP = "inner step"


class Batches:
    """Endless batches of a rank, which can be resumed in the middle."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.weights = torch.randn(64, 8, generator=torch.Generator().manual_seed(7)) / 8

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x = torch.randn(32, 64, generator=self.generator)
            yield x, x @ self.weights

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Regression(LightningModule):
    """A few layers with norms, of which matrices run in low precision and norms do not."""

    def __init__(self, compiler: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = []
        for _ in range(3):
            layers = (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.02))
            blocks.append(nn.Sequential(*layers))
        self.net = nn.Sequential(*blocks, nn.Linear(64, 8))
        if compiler:
            self.net.compile(backend=compiler)
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def strategy_of(kind: Any = StreamingDiLoCoStrategy, **choices: Any) -> Any:
    fragments = [["net.0.*", "net.1.*"], ["net.2.*", "net.3.*"]]
    rounds: dict[str, Any] = {"sync_every": 6, "overlap_steps": 4, "fragments": fragments}
    return kind(**{"process_group_backend": "gloo", **rounds, **choices})


def fitted(
    place: Place,
    rank: int,
    module: Regression,
    strategy: Any,
    checkpoint: Path | None = None,
    **trainer_choices: Any,
) -> Trainer:
    """Fits in one of two groups on one device."""
    logging.disable(logging.WARNING)
    arguments: dict[str, Any] = {
        "accelerator": "gpu" if place.is_cuda else "cpu",
        "devices": 1,
        "num_nodes": 2,
        "strategy": strategy,
        "max_steps": STEPS,
        "plugins": [LightningEnvironment()],  # so that Lightning looks for no other, such as MPI
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(**{**arguments, **trainer_choices})
        trainer.fit(module, Batches(rank), ckpt_path=checkpoint)
    assert agreed(strategy.outer_state_dict()), "the outer models of the groups differ"
    return trainer


def losses_of(module: Regression) -> list[float]:
    """The first and the last loss of a fit, which has learnt."""
    losses = [float(loss) for loss in module.losses]
    assert all(map(math.isfinite, losses)), losses
    assert losses[-1] < 0.8 * losses[0], losses
    return [losses[0], losses[-1]]


def trained(
    precision: str, compiler: str | None, place: Place, rank: int, world_size: int
) -> Found:
    if precision.startswith("16") and not place.is_cuda:
        raise NotHere(f"Lightning has precision={precision!r} on accelerators only")
    if compiler is not None and not place.is_cuda:
        compiler = "aot_eager"
    module = Regression(compiler)
    strategy = strategy_of()
    trainer = fitted(place, rank, module, strategy, precision=precision)
    findings = {"losses": losses_of(module), "report": strategy.report()}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        findings["scale"] = scaler.get_scale()
    return findings


def resumed(place: Place, rank: int, world_size: int) -> Found:
    folder = place.folder / "fit"
    saving = ModelCheckpoint(folder, "kept", every_n_train_steps=SAVED_AT, save_top_k=-1)
    through = strategy_of()
    fitted(place, rank, Regression(), through, callbacks=[saving], enable_checkpointing=True)
    restarted = strategy_of()
    fitted(place, rank, Regression(), restarted, checkpoint=folder / "kept.ckpt")
    is_same = same(restarted.outer_state_dict(), through.outer_state_dict())
    assert is_same, "the outer model differs after resuming"
    return {"steps": STEPS}


class Sharded(Regression):
    def configure_model(self) -> None:
        if any(hasattr(parameter, "placements") for parameter in self.parameters()):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.net:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def sharded(choices: dict[str, Any], place: Place, rank: int, world_size: int) -> Found:
    if place.device == "pretend":
        raise NotHere("nothing gathers shards of the pretended device")
    sizes = {"worker_groups": 2, "data_parallel_size": world_size // 2, "tensor_parallel_size": 1}
    backend = "gloo"
    if place.is_cuda and world_size > 2:
        os.environ |= hosts_of_their_own(rank)
        backend = "nccl"
    strategy = strategy_of(
        StreamingDiLoCoModelParallelStrategy,
        process_group_backend=backend,
        **sizes,
        **(choices if place.is_cuda else {}),
    )
    module = Sharded()
    fitted(place, rank, module, strategy, num_nodes=world_size)
    losses = losses_of(module)
    parameters: Any = module.parameters()
    held = sum(parameter.to_local().numel() for parameter in parameters)
    return {"losses": losses, "held": held, "report": strategy.report()}


# The trace of a profiler


class Traced(Callback):
    """Marks every inner step for the profiler, and records two rounds of them."""

    def __init__(self, first: int, last: int, path: Path, with_device: bool) -> None:
        activities = [ProfilerActivity.CPU]
        if with_device:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._steps = range(first, last)
        self._path = path
        self._open: Any = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._steps.start:
            self._profile.start()
        if batch_idx in self._steps:
            self._open = record_function(STEP)
            self._open.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if batch_idx == self._steps.stop - 1:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))


def waits_in(events: Sequence[dict[str, Any]], ranges: Sequence[str]) -> list[Found]:
    """The calls of a trace in which the thread of some ranges waits for a device inside one of
    them.
    """
    spans = []
    calls = []
    for event in events:
        name = event.get("name")
        category = event.get("cat")
        if category == "user_annotation" and name in ranges:
            spans.append(event)
        elif category == "cuda_runtime" and name in WAITING:
            calls.append(event)
    return [
        {"call": call["name"], "range": span["name"], "microseconds": call["dur"]}
        for call in calls
        for span in spans
        if _is_inside(call, span)
    ]


def _is_inside(call: dict[str, Any], span: dict[str, Any]) -> bool:
    is_same_thread = (call["pid"], call["tid"]) == (span["pid"], span["tid"])
    return is_same_thread and span["ts"] <= call["ts"] < span["ts"] + span["dur"]


def traced(place: Place, rank: int, world_size: int) -> Found:
    path = place.folder / f"trace-{rank}.json.gz"
    callback = Traced(first=20, last=32, path=path, with_device=place.is_cuda)
    fitted(place, rank, Regression(), strategy_of(), callbacks=[callback], max_steps=36)
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events]
    launches = names.count("sdiloco::launch")
    landings = names.count("sdiloco::land")
    assert launches, "the trace holds no launch"
    assert landings, "the trace holds no landing"
    waits_of_flights = waits_in(events, ["sdiloco::launch", "sdiloco::land"])
    assert not waits_of_flights, waits_of_flights
    calls = sum(event.get("cat") == "cuda_runtime" for event in events)
    assert calls or not place.is_cuda, "the trace holds no call of CUDA: the profiler saw no device"
    waits_of_steps = waits_in(events, [STEP])
    assert not waits_of_steps, waits_of_steps
    return {
        "launches": launches,
        "landings": landings,
        "calls of CUDA": calls,
        "waits": len(waits_of_steps),
    }


def _fit(about: str, run: Any) -> Task:
    return Task(about, run, 2, connected=False, seconds=90)


_LEARNS = "a fit learns, and both groups end with the same outer model"

# Those that tell most come first.
FITS: dict[str, Task] = {
    "trace": _fit("a profiler sees no wait inside a step", traced),
    "bf16-mixed": _fit(_LEARNS, partial(trained, "bf16-mixed", None)),
    "16-mixed": _fit(_LEARNS, partial(trained, "16-mixed", None)),
    "compile": _fit(_LEARNS, partial(trained, "32-true", "inductor")),
    "bf16-true": _fit(_LEARNS, partial(trained, "bf16-true", None)),
    "resume, fit": _fit(
        "a fit resumes from a checkpoint, bit for bit, random numbers included", resumed
    ),
    "FSDP2, one rank a group": _fit(_LEARNS, partial(sharded, {})),
    "FSDP2, two ranks a group": replace(_fit(_LEARNS, partial(sharded, {})), ranks=4),
    "FSDP2, from device to device": replace(
        _fit(_LEARNS, partial(sharded, {"exchange": "auto:nccl"})), ranks=4
    ),
}
