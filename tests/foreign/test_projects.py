"""Foreign projects beside DDP: what the one-line change leaves as it was, and what a resumed run ends with."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import LAUNCHERS

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(path.stem for path in (Path(__file__).parent / "projects").glob("[a-z]*.py"))
PACKAGES = ("chemprop", "darts", "gluonts", "neuralforecast", "peft", "pytorch_forecasting", "scvi", "transformers")
SECONDS = 400.0

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(SECONDS + 20)]


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def test_enough_projects_are_installed_to_say_anything() -> None:
    assert sum(map(is_missing, PACKAGES)) <= len(PACKAGES) - 5


@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_does_what_it_does_with_ddp(project: str, tmp_path: Path) -> None:
    package = next(name for name in PACKAGES if project.startswith(name))
    if is_missing(package):
        pytest.skip(f"{package} is not installed: make foreign")
    known = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    known |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    # Nothing is fetched, and nothing is kept outside the folder.
    known |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, "-m", "tests.foreign.trial", project, str(tmp_path)]
    with (tmp_path / "printed").open("w") as printed:
        about: Any = {"stdout": printed, "stderr": subprocess.STDOUT, "start_new_session": True}
        fits = subprocess.Popen(command, env=known, cwd=ROOT, **about)
    try:
        code = fits.wait(SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(fits.pid, signal.SIGKILL)
    assert code == 0, f"{project} ended with {code}:\n{(tmp_path / 'printed').read_text()[-6000:]}"
    # What each rank found with DDP, with worker groups, and going on from a checkpoint of the latter.
    ranks = [json.loads((tmp_path / f"{kind}.json").read_text()) for kind in ("ddp", "unbroken", "resumed")]
    for with_ddp, ours, again in zip(*ranks, strict=True):
        for name in ("global_step", "keys", "predictions", "validated", "parameters"):
            assert ours.get(name) == with_ddp.get(name) == again.get(name), name
        assert ours["parameters"] >= 100_000
        assert ours["strategy"].startswith("StreamingDiLoCo")
        assert ours["losses"][-1] < ours["losses"][0]
        assert again["digest"] == ours["digest"] == ranks[1][0]["digest"] != with_ddp["digest"]
