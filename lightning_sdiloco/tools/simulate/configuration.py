"""Runs the configuration of a LightningCLI with a simulated strategy on one device."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_sdiloco.lightning import WorkerGroupStrategy, check_class
from lightning_sdiloco.registration import variants
from lightning_sdiloco.tools.simulate.processes import SimulatedProcessesMixin, SimulatedRank
from lightning_sdiloco.tools.simulate.recording import RecorderMixin
from lightning_sdiloco.tools.simulate.site import site_name

# For each distribution our module with its strategy, and the packages of its Trainer and its Fabric.
_OURS = {
    "lightning": ("lightning_pytorch", "lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
}


class SimulatedClasses(NamedTuple):
    """What `sdiloco simulate` takes from a distribution of Lightning."""

    strategy: Any
    recorder: Any
    cli: Any


@cache
def simulated_classes(distribution: str) -> SimulatedClasses:
    """Makes the strategy and the callback of a simulated worker group, for a distribution of Lightning."""
    ours, trainer, fabric = _OURS[distribution]
    strategy = import_module(f"lightning_sdiloco.{ours}").StreamingDiLoCoStrategy
    host = import_module(f"{trainer}.strategies").DDPStrategy
    reset_seed = staticmethod(import_module(f"{fabric}.utilities.seed").reset_seed)
    name = f"SimulatedStrategyOf_{distribution}"
    own = {"__module__": __name__, "reset_seed": reset_seed}
    # LightningCLI imports it by its path.
    globals()[name] = type(name, (strategy, SimulatedProcessesMixin, host), own)
    recorder = type("Recorder", (RecorderMixin, import_module(f"{trainer}.callbacks").Callback), {})
    return SimulatedClasses(globals()[name], recorder, import_module(f"{trainer}.cli").LightningCLI)


@dataclass(frozen=True)
class Configuration:
    """A training as a LightningCLI would run it."""

    files: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    cli: type | None = None
    model: type | None = None
    data: type | None = None

    def __post_init__(self) -> None:
        missing = [file for file in self.files if not Path(file).is_file()]
        if missing:
            raise ValueError(f"config={missing[0]!r} is not a file. Give the configuration file of a LightningCLI.")

    @property
    def classes(self) -> SimulatedClasses:
        """Returns what is made for the distribution of Lightning that the classes belong to."""
        tops = (base.__module__.partition(".")[0] for cls in self._classes() for base in cls.__mro__)
        return simulated_classes(next((top for top in tops if top in _OURS), "lightning"))

    def _classes(self) -> Iterator[type]:
        yield from (cls for cls in (self.cli, self.model, self.data) if cls is not None)
        for file in self.files:
            model = (yaml.safe_load(Path(file).read_text()) or {}).get("model")
            cls = _class_named(model.get("class_path")) if isinstance(model, Mapping) else None
            if cls is not None:
                yield cls

    def with_seed(self, seed: int) -> "Configuration":
        """Returns the configuration with another ``seed_everything``."""
        return replace(self, arguments=(*self.arguments, f"seed_everything={seed}"))

    def fit(self, rank: SimulatedRank, choices: Mapping[str, Any], callback: Any) -> Any:
        """Parses the files and fits, as one group."""
        return self._parsed(rank, choices, lambda trainer: _on_one_device(trainer, rank, callback)).trainer

    def arguments_of_strategy(self, rank: SimulatedRank, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Parses the files only, and returns the arguments that the strategy would get."""
        cli = self._parsed(rank, choices, None)
        return dict(cli.config[cli.subcommand].trainer.strategy["init_args"])

    def _parsed(self, rank: SimulatedRank, choices: Mapping[str, Any], replacing: Callable[[Any], Any] | None) -> Any:
        """Makes a LightningCLI that fits, or that only parses, where nothing is to be replaced in the Trainer."""
        ours = self.classes.strategy
        name = f"{ours.__module__}.{ours.__qualname__}"
        base = self.cli or self.classes.cli
        check_class(base)

        class SimulatedCLI(base):  # type: ignore[misc, valid-type]
            def before_instantiate_classes(self) -> None:
                super().before_instantiate_classes()
                trainer = self.config[self.subcommand].trainer
                arguments = _arguments_of(trainer)
                arguments |= choices
                _refuse_what_is_measured(arguments)
                arguments["federation"] = _federation(arguments.get("federation"), rank)
                arguments |= {"worker_groups": rank.topology.num_groups, "start_method": "popen"}
                trainer.strategy = {"class_path": name, "init_args": arguments}

            def instantiate_classes(self) -> None:
                if replacing is not None:
                    super().instantiate_classes()

            def instantiate_trainer(self, **kwargs: Any) -> Any:
                assert replacing is not None
                return super().instantiate_trainer(**kwargs, **replacing(self._get(self.config_init, "trainer")))

            def _run_subcommand(self, subcommand: str) -> None:
                if replacing is not None:
                    super()._run_subcommand(subcommand)

        classes = {"model_class": self.model, "datamodule_class": self.data}
        given = {name: cls for name, cls in classes.items() if cls is not None}
        args = ["fit", *(f"--config={file}" for file in self.files), *(f"--{each}" for each in self.arguments)]
        return SimulatedCLI(**given, args=args, save_config_callback=None)


def _arguments_of(trainer: Any) -> dict[str, Any]:
    """Returns the arguments of the chosen strategy."""
    strategy = trainer.strategy
    if isinstance(strategy, str) and strategy in ("auto", *variants("streaming_diloco")):
        return {}
    path = getattr(strategy, "class_path", None)
    cls = _class_named(path)
    if cls is None or not issubclass(cls, WorkerGroupStrategy):
        raise ValueError(
            f"trainer.strategy={path or strategy!r} cannot be simulated: only StreamingDiLoCoStrategy can. Choose it in"
            " the configuration, or with --set trainer.strategy=streaming_diloco."
        )
    # Not dict(): that of a Namespace takes apart what is nested in it, such as a federation.
    arguments = strategy.init_args.as_dict()
    _refuse_groups_of_several(trainer, arguments["worker_groups"])
    return arguments


def _federation(given: Any, rank: SimulatedRank) -> dict[str, Any] | None:
    """Returns the federation of a simulated site: the terms of the one that the files name, and a hub in memory."""
    if rank.site is None:
        if given is not None:
            raise ValueError(
                "The configuration is that of a site of a federation. Give --sites in place of --groups: how many such"
                " sites there shall be."
            )
        return None
    named = (given or {}).get("init_args", given or {})
    terms = {name: named[name] for name in ("lease", "grace", "quorum", "late", "rounds") if name in named}
    return {**terms, "hub": "memory:1", "run": "simulated", "site": site_name(rank.site), "insecure": True}


def _refuse_what_is_measured(arguments: Mapping[str, Any]) -> None:
    names = [
        name for name in ("sync_every", "overlap_steps", "fragments", "compression") if arguments.get(name) == "auto"
    ]
    if names:
        raise ValueError(
            f"{names[0]}='auto' cannot be simulated: it is chosen from a real link. Vary {names[0]} with --sweep, or"
            " take what sdiloco plan recommends."
        )


def _refuse_groups_of_several(trainer: Any, groups: Any) -> None:
    numbers = [str(number) for number in (trainer.devices, trainer.num_nodes, groups)]
    if all(number.isdecimal() for number in numbers):
        devices, nodes, groups = map(int, numbers)
        if devices * nodes > groups:
            raise ValueError(
                f"The configuration has {groups} worker groups for {devices * nodes} processes. A simulated group is"
                " one rank. Give it the batch size of a whole group, and as many trainer.devices as groups, with --set."
            )


def _on_one_device(trainer: Any, rank: SimulatedRank, callback: Any) -> dict[str, Any]:
    """Returns what replaces arguments of the Trainer. Otherwise every group would show a progress bar."""
    trainer["strategy"].play(rank)
    chosen = trainer["callbacks"] or []
    callbacks = chosen if isinstance(chosen, list) else [chosen]
    kept = [one for one in callbacks if not any(kind.__name__ == "ProgressBar" for kind in type(one).__mro__)]
    return {
        "devices": 1,
        "num_nodes": 1,
        "callbacks": [*kept, callback],
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _class_named(path: Any) -> type | None:
    module, _, name = str(path or "").rpartition(".")
    try:
        found = getattr(import_module(module), name, None) if module else None
    except ImportError:
        return None
    return found if isinstance(found, type) else None
