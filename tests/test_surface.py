"""The surface that users rely on: names, arguments, class paths, options of the command line, and
keys of checkpoints.

``surface.json`` was written by ``python -m tests.test_surface`` before the package was divided into
rooms. If you add something on purpose, write it again, and look at the changes.
"""

import contextlib
import importlib
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_sdiloco
from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.tools.cli import main
from tests.engine.groups import Groups, with_statistics

FILE = Path(__file__).with_name("surface.json")
FACES = ("lightning_sdiloco.lightning_pytorch", "lightning_sdiloco.pytorch_lightning")
STRATEGIES = ("StreamingDiLoCoStrategy", "StreamingDiLoCoModelParallelStrategy")
ACTIONS = {
    "hub": ("amend", "backup", "end", "evict", "rollback"),
    "keys": ("add", "init", "revoke"),
}
COMMANDS = ["demo", "doctor", "hub", "keys"]
COMMANDS += [f"{command} {action}" for command in ACTIONS for action in ACTIONS[command]]
COMMANDS += ["completion", "plan", "report", "schedule", "simulate", "status"]


def arguments_of(function: Any) -> list[str]:
    """The arguments in their order, each with its default."""
    texts = []
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        texts.append(parameter.name + (f"={parameter.default!r}" if has_default else ""))
    return texts


def public_members(kind: type) -> list[str]:
    return sorted(name for name in vars(kind) if not name.startswith("_"))


def options_of(command: str) -> list[str]:
    """The options of a subcommand, as its help spells them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    usage, _, _ = printed.getvalue().partition("\nexamples:")
    # An option of torch's classes, which jsonargparse lists, is none of ours.
    return sorted(set(re.findall(r"(?<![\w.-])--[a-z][\w-]*(?![\w.])", usage)))


def keys_of_checkpoint() -> dict[str, list[str]]:
    """The keys of the saved state of a rank's engine, with a fragment in flight."""
    run = Groups(3, "sgd", with_statistics, sync_every=4, overlap_steps=2, fragments="strided:1")
    run.until(9)
    state = run.engines[0].state_dict()
    return {
        "state": sorted(state),
        "fragment": sorted(state["fragments"][0]),
        "flight": sorted(state["flights"][0]),
        "counts": sorted(state["counts"]),
        "described": sorted(state["described"]),
    }


def surface() -> dict[str, Any]:
    """All of it, as plain values."""
    faces = {name: importlib.import_module(name) for name in FACES}
    strategies = {}
    monitors = {}
    for face, module in faces.items():
        monitors[face] = arguments_of(module.StreamingDiLoCoMonitor)
        for name in STRATEGIES:
            # Named, all but the number of groups: in any order.
            strategies[f"{face}.{name}"] = sorted(arguments_of(getattr(module, name)))
    registered = []
    for distribution in ("lightning.pytorch", "pytorch_lightning"):
        registry = importlib.import_module(f"{distribution}.strategies").StrategyRegistry
        registered += [name for name in registry if "diloco" in name]
    return {
        "names": sorted(lightning_sdiloco.__all__),
        "compressions": sorted(lightning_sdiloco.compression.__all__),
        "names of compressions": sorted(lightning_sdiloco.compression.COMPRESSIONS),
        "strategies": strategies,
        "monitors": monitors,
        "registered": sorted(registered),
        "engine": {
            "arguments": arguments_of(StreamingDiLoCo),
            "members": public_members(StreamingDiLoCo),
        },
        "simulated": arguments_of(SimulatedGroups),
        "landing": list(lightning_sdiloco.Landing._fields),
        "fragment": public_members(lightning_sdiloco.Fragment),
        "schedule": public_members(lightning_sdiloco.Schedule),
        "commands": {command: options_of(command) for command in COMMANDS},
        "checkpoint": keys_of_checkpoint(),
    }


def test_the_public_surface_is_the_recorded_one() -> None:
    before = json.loads(FILE.read_text())
    now = surface()
    assert all(now["commands"].values())
    # The rooms above need more names, next to those that users have always found there.
    assert set(before["compressions"]) <= set(now["compressions"])
    now["compressions"] = before["compressions"]
    assert now == before


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Fp4", "Did you mean lightning_sdiloco.FP4?"),
        ("TopK", "Import it from lightning_sdiloco.compression"),
        ("TopKs", "Did you mean lightning_sdiloco.compression.TopK?"),
        ("Nonsense", "lightning_sdiloco.__all__ lists its public names"),
    ],
)
def test_names_of_other_modules_and_typos_are_corrected(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. {re.escape(advice)}"):
        getattr(lightning_sdiloco, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
        lightning_sdiloco.nonsense  # noqa: B018


def test_a_name_of_another_module_is_no_attribute_so_that_yaml_finds_it_there() -> None:
    assert not hasattr(lightning_sdiloco, "TopK")


def test_the_compressions_that_are_pointed_to_exist() -> None:
    assert set(lightning_sdiloco._COMPRESSIONS) < set(lightning_sdiloco.compression.__all__)


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")
