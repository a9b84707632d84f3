"""What a Trainer must show on a device: every precision, a compiled model, resuming, and no wait
inside a step.

Two worker groups are two processes on one device, each a node with one rank; Lightning and the
exchange use gloo, since NCCL refuses two ranks of one host on one device. Where models are sharded
each rank has a host of its own for NCCL.
"""

import gzip
import json
import logging
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
from tests.gpu.task import Found, NotHere, Place, Task, hosts_of_their_own
from tests.ranks import agreed

STEPS = 23
SAVED_AT = 13

# The calls in which a thread waits for a device, as the profiler names them.
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")

STEP = "inner step"


class Batches:
    """Batches of a rank that never end, and can be taken up again in the middle."""

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
        blocks = [
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.02))
            for _ in range(3)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(64, 8))
        if compiler:
            self.net.compile(backend=compiler)
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(
    place: Place,
    rank: int,
    module: Regression,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | None = None,
    steps: int = STEPS,
    precision: Any = "32-true",
    kind: Any = StreamingDiLoCoStrategy,
    nodes: int = 2,
    **choices: Any,
) -> tuple[Any, Trainer]:
    """Fits in one of two groups on one device."""
    logging.disable(logging.WARNING)
    cut = [["net.0.*", "net.1.*"], ["net.2.*", "net.3.*"]]
    numbers: dict[str, Any] = {"sync_every": 6, "overlap_steps": 4, "fragments": cut, **choices}
    strategy = kind(**{"process_group_backend": "gloo", **numbers})
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="gpu" if place.is_cuda else "cpu",
            devices=1,
            num_nodes=nodes,
            strategy=strategy,
            max_steps=steps,
            precision=precision,
            callbacks=list(callbacks),
            plugins=[LightningEnvironment()],  # so that nobody looks for others, such as MPI
            enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
            **quiet,
        )
        trainer.fit(module, Batches(rank), ckpt_path=checkpoint)
    assert agreed(strategy.outer_state_dict()), "the outer models of the groups differ"
    return strategy, trainer


def trained(
    precision: str, compiler: str | None, place: Place, rank: int, world_size: int
) -> Found:
    if precision.startswith("16") and not place.is_cuda:
        raise NotHere(f"Lightning has precision={precision!r} on accelerators only")
    module = Regression(compiler if place.is_cuda or compiler is None else "aot_eager")
    strategy, trainer = fitted(place, rank, module, precision=precision)
    losses = [float(loss) for loss in module.losses]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    assert all(map(torch.isfinite, torch.tensor(losses))), losses
    assert losses[-1] < 0.8 * losses[0], losses
    return {
        "losses": [losses[0], losses[-1]],
        "report": strategy.report(),
        **({"scale": scaler.get_scale()} if scaler is not None else {}),
    }


def resumed(place: Place, rank: int, world_size: int) -> Found:
    kept = ModelCheckpoint(
        place.folder / "fit", "kept", every_n_train_steps=SAVED_AT, save_top_k=-1
    )
    through, _ = fitted(place, rank, Regression(), [kept])
    again, _ = fitted(place, rank, Regression(), checkpoint=place.folder / "fit" / "kept.ckpt")
    expected = through.outer_state_dict()
    different = [
        name
        for name, values in again.outer_state_dict().items()
        if not torch.equal(values, expected[name])
    ]
    assert different == [], "the outer model differs after resuming"
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
    own = {
        "process_group_backend": "gloo",
        "kind": StreamingDiLoCoModelParallelStrategy,
        "nodes": world_size,
    }
    own |= {"worker_groups": 2, "data_parallel_size": world_size // 2, "tensor_parallel_size": 1}
    if place.is_cuda and world_size > 2:
        os.environ |= hosts_of_their_own(rank)
        own["process_group_backend"] = "nccl"
    module = Sharded()
    strategy, _ = fitted(place, rank, module, **{**own, **(choices if place.is_cuda else {})})
    losses = [float(loss) for loss in module.losses]
    assert losses[-1] < 0.8 * losses[0], losses
    held = sum(parameter.to_local().numel() for parameter in module.parameters())  # type: ignore[attr-defined]
    return {"losses": [losses[0], losses[-1]], "held": held, "report": strategy.report()}


# The trace of a profiler


class Traced(Callback):
    """Marks every inner step for the profiler, and records two rounds of them."""

    def __init__(self, first: int, last: int, path: Path, with_device: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if with_device else [])]
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
    spans = [
        event
        for event in events
        if event.get("name") in ranges and event.get("cat") == "user_annotation"
    ]
    calls = [
        event
        for event in events
        if event.get("cat") == "cuda_runtime" and event.get("name") in WAITING
    ]
    return [
        {"call": call["name"], "range": span["name"], "microseconds": call["dur"]}
        for call in calls
        for span in spans
        if (call["pid"], call["tid"]) == (span["pid"], span["tid"])
        and span["ts"] <= call["ts"] < span["ts"] + span["dur"]
    ]


def traced(place: Place, rank: int, world_size: int) -> Found:
    path = place.folder / f"trace-{rank}.json.gz"
    callback = Traced(first=20, last=32, path=path, with_device=place.is_cuda)
    fitted(place, rank, Regression(), [callback], steps=36)
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events]
    launches = names.count("sdiloco::launch")
    landings = names.count("sdiloco::land")
    assert launches, "the trace holds no launch"
    assert landings, "the trace holds no landing"
    ours = waits_in(events, ["sdiloco::launch", "sdiloco::land"])
    steps = waits_in(events, [STEP])
    assert not ours, ours
    runtime = sum(event.get("cat") == "cuda_runtime" for event in events)
    assert runtime or not place.is_cuda, (
        "the trace holds no call of CUDA: the profiler saw no device"
    )
    assert not steps, steps
    return {
        "launches": launches,
        "landings": landings,
        "calls of CUDA": runtime,
        "waits": len(steps),
    }


def _fit(about: str, run: Any) -> Task:
    return Task(about, run, 2, connected=False, seconds=90)


_LEARNS = "a fit learns, and both groups end with the same outer model"

# What tells most first.
FITS: dict[str, Task] = {
    "trace": _fit("a profiler sees no wait inside a step", traced),
    "bf16-mixed": _fit(_LEARNS, partial(trained, "bf16-mixed", None)),
    "16-mixed": _fit(_LEARNS, partial(trained, "16-mixed", None)),
    "compile": _fit(_LEARNS, partial(trained, "32-true", "inductor")),
    "bf16-true": _fit(_LEARNS, partial(trained, "bf16-true", None)),
    "resume, fit": _fit(
        "a fit goes on from a checkpoint, bit for bit, random numbers included", resumed
    ),
    "FSDP2, one rank a group": _fit(_LEARNS, partial(sharded, {})),
    "FSDP2, two ranks a group": replace(_fit(_LEARNS, partial(sharded, {})), ranks=4),
    "FSDP2, from device to device": replace(
        _fit(_LEARNS, partial(sharded, {"exchange": "auto:nccl"})), ranks=4
    ),
}
