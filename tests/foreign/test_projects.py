"""Foreign projects beside DDP: what the one-line change leaves as it was, and what a resumed run
ends with.
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


@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_does_what_it_does_with_ddp(project: str, tmp_path: Path) -> None:
    if is_missing(PACKAGES[project]):
        pytest.skip(f"{PACKAGES[project]} is not installed: make foreign")

    def run(rank: int, world_size: int) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        # Nothing is fetched, and nothing is kept outside the folder.
        os.chdir(tmp_path)
        os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
        # As users register names of their own.
        for edition, distribution in (
            (lightning_pytorch, lightning.pytorch),
            (pytorch_lightning, pl),
        ):
            distribution.strategies.StrategyRegistry.register(
                NAME, edition.StreamingDiLoCoStrategy, **ROUNDS
            )

        def fitted(kind: str, strategy: str, resume: Path | None = None) -> dict[str, Any]:
            trial = Trial(strategy, tmp_path / kind, resume)
            PROJECTS[project](trial)
            return trial.found

        with_ddp = fitted("ddp", "ddp")
        ours = fitted("unbroken", NAME)
        assert agreed(ours["digest"])
        again = fitted("resumed", NAME, resume=tmp_path / "unbroken" / HALF)
        for name in ("global_step", "keys", "predictions", "validated", "parameters"):
            assert ours.get(name) == with_ddp.get(name) == again.get(name), name
        assert ours["parameters"] >= 100_000
        assert ours["strategy"].startswith("StreamingDiLoCo")
        assert ours["losses"][-1] < ours["losses"][0]
        assert again["digest"] == ours["digest"] != with_ddp["digest"]

    run_processes(run, 2, timeout=SECONDS, torchelastic=True)
