"""Fits with a real Trainer in real processes, for several test files."""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
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
OTHER = "pytorch_lightning"
# The arguments of a Trainer that are off unless a test turns them on.
NOISY = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
SHORT = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:1"}


def _look_for_callbacks_once() -> None:
    """Every Trainer looks through all installed distributions for callbacks, which takes a tenth of
    a short fit. Processes that are forked from this one inherit the result.
    """
    for distribution, fabric in ((LIGHTNING, "lightning.fabric"), (OTHER, "lightning_fabric")):
        registry: Any = importlib.import_module(f"{fabric}.utilities.registry")
        registry.entry_points = cache(registry.entry_points)
        registry.entry_points(group=f"{distribution}.callbacks_factory")


_look_for_callbacks_once()


def since(version: str) -> pytest.MarkDecorator:
    """Skips a test of what an older Lightning does not have, or does wrong with every strategy."""
    installed = importlib.import_module(LIGHTNING).__version__
    is_older = TorchVersion(installed) < TorchVersion(version)
    return pytest.mark.skipif(is_older, reason=f"Lightning {installed} is older than {version}")


def said_by(*names: str) -> list[str]:
    """The messages that these loggers will log; the list grows as they do."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    for name in names:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        # An earlier test of this process may have raised it.
        logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    return messages


# A rank: its group, its number in the group, and the number of ranks of the group.
Place = tuple[int, int, int]


class Stream(IterableDataset):
    """A number of batches of a group, perhaps another number in later epochs. A rank sees its part
    of each batch. The stream can be resumed.
    """

    draw = staticmethod(batch)

    def __init__(self, place: Place, batches: int = 10**9, later: int | None = None) -> None:
        self.place = place
        self.batches = batches
        self.later = batches if later is None else later
        self.step = 0
        self.resumed = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = self.step if self.resumed else 0
        self.resumed = False
        return self.after(start)

    def after(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.batches
        self.batches = self.later
        group, shard, shards = self.place
        for self.step in range(start + 1, batches + 1):
            x, y = self.draw(group, self.step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
        self.resumed = True


class Announced(Stream):
    """Announces a length, which may be wrong."""

    def __init__(
        self, place: Place, batches: int, announced: int | None = None, later: int | None = None
    ) -> None:
        super().__init__(place, batches, later)
        self.announced = batches if announced is None else announced

    def __len__(self) -> int:
        return self.announced


def batches(group: int, shard: int = 0, shards: int = 1, *numbers: int) -> Any:
    """A loader of a stream of unknown length, which no checkpoint resumes."""
    return DataLoader(Stream((group, shard, shards), *numbers), batch_size=None)


class SomeBatches:
    """The same few batches of a group in every epoch."""

    def __init__(self, group: int, length: int) -> None:
        self.batches = [batch(group, step) for step in range(length)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def module(
    distribution: str = LIGHTNING,
    inner: str = "sgd",
    seed: int = 0,
    net: nn.Module | None = None,
    **members: Any,
) -> Any:
    """A LightningModule of one distribution that trains a small model and has extra members."""
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
    """The strategy of one distribution; if it is given the sizes of a group, that for sharded
    models.
    """
    package = lightning_sdiloco if distribution == LIGHTNING else other_distribution
    if "data_parallel_size" in choices:
        return package.StreamingDiLoCoModelParallelStrategy(**choices)
    return package.StreamingDiLoCoStrategy(**choices)


def trainer(distribution: str = LIGHTNING, **choices: Any) -> Any:
    defaults = dict.fromkeys(NOISY, False)
    return importlib.import_module(distribution).Trainer(
        **{"accelerator": "cpu", **defaults, **choices}
    )


def callbacks_of(distribution: str) -> Any:
    """The module of a distribution's callbacks."""
    return importlib.import_module(distribution).callbacks


def environment_that_knows(distribution: str = LIGHTNING) -> Any:
    """An environment that knows the number of processes and ignores that of the Trainer, as Ray's
    does.
    """
    base = importlib.import_module(f"{distribution}.plugins.environments").TorchElasticEnvironment

    class Knows(base):
        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            pass

    return Knows()


def _inspect_nothing(trainer: Any, module: Any) -> None:
    pass


def _attributes_of_loops(trainer: Any) -> list[set[str]]:
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._signal_connector)
    return [set(vars(loop)) for loop in loops]


def fit(
    rank: int,
    world_size: int,
    groups: int,
    steps: int,
    choices: dict[str, Any],
    distribution: str = LIGHTNING,
    inner: str = "sgd",
    inspect: Callable[[Any, Any], Any] = _inspect_nothing,
    trainer_choices: dict[str, Any] | None = None,
    make: Callable[..., Any] = module,
    loader: Any = None,
    validation: Any = None,
    resume: Any = None,
) -> Trained:
    """Fits in this rank, with the rank as seed, and returns what is worth comparing."""
    size = world_size // groups
    model = make(distribution, inner, seed=rank)
    if loader is None and "train_dataloader" not in vars(type(model)):
        loader = batches(rank // size, rank % size, size)
    chosen = strategy(distribution, **{"worker_groups": groups, **choices})
    arguments = {"strategy": chosen, "devices": world_size, "max_steps": steps}
    runner = trainer(distribution, **{**arguments, **(trainer_choices or {})})
    attributes = _attributes_of_loops(runner)
    runner.fit(model, loader, validation, ckpt_path=resume and str(resume))
    assert _attributes_of_loops(runner) == attributes, "nothing is left behind"
    return {
        "outer": outer_of_net(chosen),
        "model": {name: whole(p) for name, p in model.net.named_parameters()},
        "report": chosen.report(),
        "inspected": inspect(runner, model),
    }


def outer_of_net(strategy: Any) -> dict[str, Tensor]:
    """The outer parameters by their names in the module's `net`."""
    outer = strategy.outer_state_dict()
    return {name.removeprefix("net."): values for name, values in outer.items()}


def whole(parameter: Any) -> Tensor:
    """A copy of a parameter, as torch gathers it where it is sharded."""
    values = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return values.detach().clone()


def play(
    world_size: int, cases: Mapping[str, Callable[..., Any]], timeout: float = 110.0
) -> dict[str, list[Any]]:
    """Calls functions of rank and world size one after the other in one world; returns their
    results by name, then rank.
    """

    def run(rank: int, world_size: int) -> dict[str, Any]:
        return {name: case(rank, world_size) for name, case in cases.items()}

    ranks = run_processes(run, world_size, timeout=timeout)
    results: dict[str, list[Any]] = {}
    for name in cases:
        results[name] = [results_by_name[name] for results_by_name in ranks]
    return results


def saving(distribution: str, folder: Any, **choices: Any) -> list[Any]:
    choices = {"filename": "{step}", "save_top_k": -1, **choices}
    return [callbacks_of(distribution).ModelCheckpoint(folder, **choices)]


def on(distribution: str = LIGHTNING, **hooks: Callable[..., Any]) -> Any:
    """A callback of such hooks."""
    return callbacks_of(distribution).LambdaCallback(**hooks)


Act = Callable[[Any], None]


def at(acts: dict[int, Act], distribution: str = LIGHTNING) -> Any:
    """A callback that acts at the end of the batches that complete these steps."""

    def act(trainer: Any, *args: Any) -> None:
        if trainer.global_step in acts:
            acts[trainer.global_step](trainer)

    return on(distribution, on_train_batch_end=act)


def save(path: Any) -> Act:
    return lambda trainer: trainer.save_checkpoint(path)


def unequal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of tensors that differ in a bit, or that only one of the two has."""
    names = []
    for name in {**actual, **expected}:
        is_in_both = name in actual and name in expected
        if not is_in_both or not torch.equal(actual[name], expected[name]):
            names.append(name)
    return names


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert unequal(actual, expected) == []


def refusal(
    call: Callable[..., Any], *args: Any, kind: type[BaseException] = ValueError, **choices: Any
) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **choices)
    return str(caught.value)
