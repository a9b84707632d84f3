"""What worker groups learn on a device against DDP: the trainings of `benchmarks.quality`, in pieces that fit."""

import json
from typing import Any

from benchmarks import quality as trainings
from benchmarks.runs import Runs
from tests.gpu.task import Found, Place

WORKERS = 3
"""Trainings at a time: one alone does not fill a large device."""

_TO_END = 20.0
"""Seconds before the end after which no step begins, so that what is under way is written down."""


def quality(place: Place, rank: int, world_size: int) -> Found:
    """Makes the trainings that are left, as far as there is time."""
    path = place.folder / "quality" / "trainings.json"
    stage, name = (trainings.QUICK, ["--quick"]) if place.quick else (trainings.STAGES["large"], ["--stage", "large"])
    device = "cuda" if place.is_cuda else "cpu"
    minutes = max(0.0, place.seconds - _TO_END) / 60
    given = ["--json", str(path), "--device", device, "--minutes", str(minutes), "--workers", str(WORKERS)]
    trainings.main([*name, *given])
    planned = trainings.planned(stage, stage.sizes, None, device)
    kept = Runs("", path)
    every = [one for pairs in planned.values() for pair in pairs for one in pair]
    # Before the first training has ended there is no file.
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": [], "headline": {}}
    return {
        "left": sum(kept.get(one) is None for one in every),
        "trainings": [told(run) for run in content["runs"]],
        "headline": {f"{name}: nats per byte above DDP": nats for name, nats in content["headline"].items()},
    }


def told(run: dict[str, Any]) -> Found:
    """Returns what to know of a training, the size of its text and how often it was read included."""
    return {
        "method": "DDP" if run["choices"] is None else "worker groups",
        "size": run["size"],
        "lr": run["lr"],
        "tokens_per_parameter": run["budget"],
        "loss": run["loss"],
        "steps": run["steps"],
        "seconds": run["seconds"],
        "text_bytes": round(run["tokens"] / run["passes"]) if run["passes"] else None,
        "passes_over_the_text": run["passes"],
    }
