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


def missing(*packages: str) -> list[str]:
    """Which of some packages are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def test_enough_projects_are_installed_to_say_anything() -> None:
    assert len(missing(*PACKAGES)) <= len(PACKAGES) - 5


@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_does_what_it_does_with_ddp(project: str, tmp_path: Path) -> None:
    package = next(name for name in PACKAGES if project.startswith(name))
    if missing(package):
        pytest.skip(f"{package} is not installed: make foreign")
    ddp, unbroken, resumed = tried(project, tmp_path)

    for with_ddp, ours, again in zip(ddp, unbroken, resumed, strict=True):
        for name in ("global_step", "keys", "predictions", "validated", "parameters"):
            assert ours.get(name) == with_ddp.get(name) == again.get(name), name
        assert ours["parameters"] >= 100_000
        assert ours["strategy"].startswith("StreamingDiLoCo")
        assert ours["losses"][-1] < ours["losses"][0]
        assert again["digest"] == ours["digest"] == unbroken[0]["digest"] != with_ddp["digest"]


def tried(project: str, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank found with DDP, with worker groups, and going on from a checkpoint of the latter."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    known |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    # Nothing is fetched, and nothing is kept outside the folder.
    known |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    with (folder / "printed").open("w") as printed:
        command = [sys.executable, "-m", "tests.foreign.trial", project, str(folder)]
        fits = subprocess.Popen(
            command, env=known, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code: Any = fits.wait(SECONDS)
    except subprocess.TimeoutExpired:
        code = f"nothing for {SECONDS} seconds"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(fits.pid, signal.SIGKILL)
    assert code == 0, f"{project} ended with {code}:\n{(folder / 'printed').read_text()[-6000:]}"
    return [json.loads((folder / f"{kind}.json").read_text()) for kind in ("ddp", "unbroken", "resumed")]
