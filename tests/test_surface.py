"""What users hold on to: names, arguments, class paths, options of the command line, and keys of
checkpoints.

``surface.json`` was written by ``python -m tests.test_surface`` before the package was divided into
rooms. Where something is added on purpose, write it again, and look at what changed.
"""

import contextlib
import importlib
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import lightning_sdiloco
from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.tools.cli import main
from tests.engine.groups import Groups, with_statistics

FILE = Path(__file__).with_name("surface.json")
FACES = ("lightning_sdiloco.lightning_pytorch", "lightning_sdiloco.pytorch_lightning")
STRATEGIES = ("StreamingDiLoCoStrategy", "StreamingDiLoCoModelParallelStrategy")
COMMANDS = [
    "demo",
    "doctor",
    "hub",
    *(f"hub {act}" for act in ("amend", "backup", "end", "evict", "rollback")),
]
COMMANDS += ["keys", *(f"keys {act}" for act in ("add", "init", "revoke"))]
COMMANDS += ["completion", "plan", "report", "schedule", "simulate", "status"]


def arguments_of(function: Any) -> list[str]:
    """The arguments in their order, each with its default."""
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name
        if parameter.default is inspect.Parameter.empty
        else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
    ]


def public_members(thing: Any) -> list[str]:
    return sorted(name for name in vars(thing) if not name.startswith("_"))


def options_of(command: str) -> list[str]:
    """The options of a subcommand, as its help spells them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    # An option of torch's classes, which jsonargparse lists, is none of ours.
    return sorted(
        set(
            re.findall(
                r"(?<![\w.-])--[a-z][\w-]*(?![\w.])", printed.getvalue().partition("\nexamples:")[0]
            )
        )
    )


def keys_of_checkpoint() -> dict[str, list[str]]:
    """The keys of what a rank saves of its engine, with a fragment in flight."""
    run = Groups(3, "sgd", with_statistics, sync_every=4, overlap_steps=2, fragments="strided:1")
    run.until(9)
    state = run.engines[0].state_dict()
    parts = {"state": state, "fragment": state["fragments"][0], "flight": state["flights"][0]}
    return {
        name: sorted(part)
        for name, part in (parts | {n: state[n] for n in ("counts", "described")}).items()
    }


def surface() -> dict[str, Any]:
    """All of it, as plain values."""
    faces = {name: importlib.import_module(name) for name in FACES}
    registries = [
        importlib.import_module(f"{name}.strategies")
        for name in ("lightning.pytorch", "pytorch_lightning")
    ]
    return {
        "names": sorted(lightning_sdiloco.__all__),
        "compressions": sorted(lightning_sdiloco.compression.__all__),
        "names of compressions": sorted(lightning_sdiloco.compression.COMPRESSIONS),
        "strategies": {
            # Named, all but the number of groups: in any order.
            f"{face}.{name}": sorted(arguments_of(getattr(module, name)))
            for face, module in faces.items()
            for name in STRATEGIES
        },
        "monitors": {
            face: arguments_of(module.StreamingDiLoCoMonitor) for face, module in faces.items()
        },
        "registered": sorted(
            name for own in registries for name in own.StrategyRegistry if "diloco" in name
        ),
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
    # What the rooms above need stands beside what users have always found there.
    assert set(before["compressions"]) <= set(now["compressions"])
    now["compressions"] = before["compressions"]
    assert now == before


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")
