"""Fits with a real Trainer in real processes, for several test files."""

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, IterableDataset

import lightning_sdiloco
from lightning_sdiloco import pytorch_lightning as other_distribution
from tests.ranks import run_processes
from tests.training import batch, inner_optimizer, mlp

Trained = dict[str, Any]
LIGHTNING = "lightning.pytorch"


def since(version: str) -> pytest.MarkDecorator:
    """Skips a test of what an older Lightning does not have, or does wrong with every strategy."""
    installed = importlib.import_module(LIGHTNING).__version__
    is_older = TorchVersion(installed) < TorchVersion(version)
    return pytest.mark.skipif(is_older, reason=f"Lightning {installed} is older than {version}")


def said_by(*names: str) -> list[str]:
    """What loggers will have said in this process."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    for name in names:
        logging.getLogger(name).addHandler(handler)
    return said


class Batches(IterableDataset):
    """The batches of a group; a rank of a group of several sees its part of each."""

    def __init__(self, group: int, shard: int, shards: int) -> None:
        self.place = group, shard, shards

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        group, shard, shards = self.place
        step = 0
        while True:
            step += 1
            x, y = batch(group, step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]


def batches(group: int, shard: int = 0, shards: int = 1) -> Any:
    """A loader of the batches of a group, or of the part of each that a rank of a group of several sees."""
    return DataLoader(Batches(group, shard, shards), batch_size=None)


class SomeBatches:
    """The same few batches of a group in every epoch."""

    def __init__(self, group: int, length: int) -> None:
        self.batches = [batch(group, step) for step in range(length)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def module(
    distribution: str = LIGHTNING, inner: str = "sgd", seed: int = 0, net: nn.Module | None = None, **members: Any
) -> Any:
    """A LightningModule of one distribution that trains a small model, and has some members of its own."""
    base = importlib.import_module(distribution).LightningModule

    class Regression(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(seed) if net is None else net

        def loss(self, parts: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.net(parts[0]), parts[1])

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            return self.loss(parts)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return inner_optimizer(inner, self.net)

    return type("Own", (Regression,), members)()


def strategy(distribution: str = LIGHTNING, **choices: Any) -> Any:
    """The strategy of one distribution: that for sharded models where the sizes of a group are given."""
    package = lightning_sdiloco if distribution == LIGHTNING else other_distribution
    if "data_parallel_size" in choices:
        return package.StreamingDiLoCoModelParallelStrategy(**choices)
    return package.StreamingDiLoCoStrategy(**choices)


def trainer(distribution: str = LIGHTNING, **choices: Any) -> Any:
    """A quiet Trainer of one distribution on the CPU."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return importlib.import_module(distribution).Trainer(**{"accelerator": "cpu", **quiet, **choices})


def environment_that_knows(distribution: str = LIGHTNING) -> Any:
    """An environment that says how many processes there are, whatever it is told, as that of Ray does."""
    base = importlib.import_module(f"{distribution}.plugins.environments").LightningEnvironment

    class Knows(base):
        def world_size(self) -> int:
            return int(os.environ["WORLD_SIZE"])

        def global_rank(self) -> int:
            return int(os.environ["RANK"])

        def set_world_size(self, size: int) -> None:
            pass

        def set_global_rank(self, rank: int) -> None:
            pass

        def teardown(self) -> None:
            pass

    return Knows()


def fit(
    rank: int,
    world_size: int,
    groups: int,
    steps: int,
    choices: dict[str, Any],
    distribution: str = LIGHTNING,
    inner: str = "sgd",
    inspect: Callable[[Any, Any], Any] = lambda trainer, module: None,
    trainer_choices: dict[str, Any] | None = None,
    make: Callable[..., Any] = module,
    loader: Any = None,
    validation: Any = None,
    resume: Any = None,
) -> Trained:
    """Fits in this rank, whose seed is its own, and returns what is worth comparing."""
    size = world_size // groups
    endless = batches(rank // size, rank % size, size)
    model = make(distribution, inner, seed=rank)
    chosen = strategy(distribution, **{"worker_groups": groups, **choices})
    runner = trainer(
        distribution, **{"strategy": chosen, "devices": world_size, "max_steps": steps, **(trainer_choices or {})}
    )
    runner.fit(model, endless if loader is None else loader, validation, ckpt_path=resume and str(resume))
    return {
        "outer": {name.removeprefix("net."): values for name, values in chosen.outer_state_dict().items()},
        "model": {name: whole(p) for name, p in model.net.named_parameters()},
        "report": chosen.report(),
        "inspected": inspect(runner, model),
    }


def whole(parameter: Any) -> Tensor:
    """A copy of a parameter, as torch gathers it where it is sharded."""
    values = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return values.detach().clone()


def play(world_size: int, cases: Mapping[str, Callable[..., Any]], timeout: float = 110.0) -> dict[str, list[Any]]:
    """Calls functions of rank and world size one after the other in one world: their results by name, then rank."""

    def run(rank: int, world_size: int) -> dict[str, Any]:
        return {name: case(rank, world_size) for name, case in cases.items()}

    ranks = run_processes(run, world_size, timeout=timeout)
    return {name: [rank[name] for rank in ranks] for name in cases}


def refusal(call: Callable[..., Any], *args: Any, kind: type[BaseException] = ValueError, **choices: Any) -> str:
    """The message with which a call is refused."""
    with pytest.raises(kind) as caught:
        call(*args, **choices)
    return str(caught.value)
