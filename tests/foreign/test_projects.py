"""Foreign projects with DDP and with the one-line change, which leaves their results as they were;
a resumed run ends with the same bits.
"""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch

from lightning_sdiloco import lightning_pytorch, pytorch_lightning
from tests.foreign.projects import HALF, PROJECTS, Trial
from tests.ranks import agreed, run_processes

PACKAGES = {project: project.partition(":")[0] for project in PROJECTS}
# By name, for projects that give one strategy to several Trainers, which Lightning takes only by
# name.
NAME = "streaming_diloco_ddp_of_short_rounds"
# Several rounds in the fit, and a fragment in flight where the checkpoint is saved.
ROUNDS = {"sync_every": 10, "overlap_steps": 3}
SECONDS = 400.0

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(SECONDS + 20)]


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def test_enough_projects_are_installed_to_say_anything() -> None:
    packages = set(PACKAGES.values())
    assert sum(map(is_missing, packages)) <= len(packages) - 5


def register_short_rounds() -> None:
    """Registers a name for the strategy, as users do."""
    for edition, distribution in ((lightning_pytorch, lightning.pytorch), (pytorch_lightning, pl)):
        registry = distribution.strategies.StrategyRegistry
        registry.register(NAME, edition.StreamingDiLoCoStrategy, **ROUNDS)


def compare_with_ddp(rank: int, world_size: int, project: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Nothing is fetched, and nothing is kept outside the folder.
    os.chdir(folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    register_short_rounds()

    def fitted(kind: str, strategy: str, resume: Path | None = None) -> dict[str, Any]:
        trial = Trial(strategy, folder / kind, resume)
        PROJECTS[project](trial)
        return trial.results

    with_ddp = fitted("ddp", "ddp")
    unbroken = fitted("unbroken", NAME)
    assert agreed(unbroken["digest"])
    resumed = fitted("resumed", NAME, resume=folder / "unbroken" / HALF)
    for name in ("global_step", "keys", "predictions", "validated", "parameters"):
        assert unbroken.get(name) == with_ddp.get(name) == resumed.get(name), name
    assert unbroken["parameters"] >= 100_000
    assert unbroken["strategy"].startswith("StreamingDiLoCo")
    assert unbroken["losses"][-1] < unbroken["losses"][0]
    assert resumed["digest"] == unbroken["digest"] != with_ddp["digest"]


@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_does_what_it_does_with_ddp(project: str, tmp_path: Path) -> None:
    if is_missing(PACKAGES[project]):
        pytest.skip(f"{PACKAGES[project]} is not installed: make foreign")
    run_processes(compare_with_ddp, 2, project, tmp_path, timeout=SECONDS, torchelastic=True)
