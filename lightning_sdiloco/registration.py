"""Registers the strategy names in both distributions of Lightning without importing them.

[Note: registered when imported] `Trainer(strategy="streaming_diloco")` requires only `import
lightning_sdiloco`, before or after the import of either distribution. If a distribution is already
imported, the names are registered immediately. Otherwise, a finder that precedes Python's finders
calls them, and registers the names once the registry of the distribution has been imported. The
registered object is a function that imports the strategy when a Trainer requests it. A LightningCLI
also finds imported classes by their bare names, so importing the CLI module of a distribution also
imports our module for it.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TRAINER = {
    "streaming_diloco": "StreamingDiLoCoStrategy",
    "streaming_diloco_model_parallel": "StreamingDiLoCoModelParallelStrategy",
}
_FABRIC = {"streaming_diloco": "StreamingDiLoCoFabricStrategy"}

# Each module that has a registry: the registry's name, our module for its distribution, and the
# classes by name.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_pytorch", _TRAINER),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_pytorch", _FABRIC),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning", _TRAINER),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "pytorch_lightning", _FABRIC),
    # A LightningCLI has no registry.
    "lightning.pytorch.cli": ("", "lightning_pytorch", {}),
    "pytorch_lightning.cli": ("", "pytorch_lightning", {}),
}

_START_METHODS: dict[str, dict[str, Any]] = {
    "": {},
    "spawn": {"start_method": "spawn"},
    "fork": {"start_method": "fork"},
    "notebook": {"start_method": "fork"},
}
_UNUSED_PARAMETERS: dict[str, dict[str, Any]] = {
    "": {},
    "find_unused_parameters_false": {"ddp_kwargs": {"find_unused_parameters": False}},
    "find_unused_parameters_true": {"ddp_kwargs": {"find_unused_parameters": True}},
}


def variants(name: str) -> dict[str, dict[str, Any]]:
    """Returns the registered names of a strategy, each with the arguments that the name implies."""
    if name != "streaming_diloco":
        return {name: {}}
    # The suffixes that Lightning has for DDP. Some packages look for "ddp" in the name.
    return {
        "_".join(filter(None, (start, method, unused))): {
            **_START_METHODS[method],
            **_UNUSED_PARAMETERS[unused],
        }
        for start in (name, "_".join((name, "ddp")))
        for method in _START_METHODS
        for unused in _UNUSED_PARAMETERS
    }


def register_when_imported() -> None:
    """Registers the strategies in modules that are already imported or will be imported later."""
    for module in sys.modules.keys() & _REGISTRIES.keys():
        _register(sys.modules[module])
    sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    attribute, ours, classes = _REGISTRIES[module.__name__]
    if not attribute:
        import_module(f"lightning_sdiloco.{ours}")
        return
    registry = getattr(module, attribute)
    for start, strategy in classes.items():
        for name, arguments in variants(start).items():
            if name not in registry:
                make = partial(_make, f"lightning_sdiloco.{ours}", strategy)
                registry.register(
                    name, make, description="Streaming DiLoCo over worker groups", **arguments
                )


def _make(module: str, strategy: str, **arguments: Any) -> Any:
    return getattr(import_module(module), strategy)(**arguments)


class _Finder(MetaPathFinder):
    """A finder that delegates to the later finders; see [Note: registered when imported]."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        spec = None
        for finder in sys.meta_path:
            if spec is None and not isinstance(finder, _Finder):
                spec = finder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
