"""The distribution for hubs: its wheel in an environment with its requirements alone, and a
federation against it.
"""

import json
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.federation.hubs import require_extra
from tests.ranks import PATIENCE
from tests.scripts import ROOT, run_python, unlaunched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SITE = """
import sys
import torch
from torch import nn
from lightning_sdiloco import Federation, StreamingDiLoCo
from lightning_sdiloco.federation.codec import key_of

hub, keys, name, mean = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
federation = Federation(hub=hub, run="llm", site=name, keys=keys, rounds=4, mean=mean)
engine = StreamingDiLoCo(
    model, federation=federation, sync_every=10, overlap_steps=2, compression="fp4"
)
engine.join()
torch.manual_seed(ord(name[-1]))
while not engine.is_over:
    x = torch.randn(8, 16)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.step(samples=len(x))
engine.finish()
values = torch.cat([value.flatten() for value in engine.outer_state_dict().values()])
print("digest", key_of(values.numpy().tobytes()))
"""


def add_requirements(distribution: metadata.Distribution, packages: dict[str, Path]) -> None:
    """Adds the files and folders of all that a distribution requires, by their names."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        required = metadata.distribution(requirement.name)
        names = {Path(file).parts[0] for file in required.files or ()}
        new_names = names - packages.keys() - {"..", "__pycache__"}
        for name in new_names:
            packages[name] = Path(str(required.locate_file(name)))
        if new_names:
            add_requirements(required, packages)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and of the packages of this one only those that it requires."""
    require_extra()
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("hub")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*build, "--directory", folder], cwd=ROOT / "hub", check=True)
    (wheel,) = folder.glob("*.whl")
    folders = zipfile.Path(wheel).iterdir()
    (about,) = [path for path in folders if path.name.endswith(".dist-info")]
    packages = dict[str, Path]()
    add_requirements(metadata.PathDistribution(about), packages)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site_packages,) = environment.glob("lib/*/site-packages")
    for name, path in packages.items():
        (site_packages / name).symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    # It refuses if a requirement is missing.
    subprocess.run([*pip, "install", "--quiet", "--no-index", wheel], check=True)
    return environment


def started(environment: Path, command: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a command of the environment, which knows nothing of this checkout."""
    variables = unlaunched()
    del variables["PYTHONPATH"]
    words = [str(environment / "bin" / command), *map(str, arguments)]
    return subprocess.Popen(
        words,
        cwd=environment,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str], code: int = 0) -> str:
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == code, output
    return output


@pytest.fixture
def hub(environment: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A hub of the environment, which waits for two sites; its keys are in ``keys``."""
    keys = tmp_path / "keys"
    output_of(started(environment, "sdiloco", "keys", "init", keys, "--run", "llm"))
    names = ("site-a", "site-b")
    output_of(started(environment, "sdiloco", "keys", "add", keys, *names))
    output_of(started(environment, "sdiloco", "keys", "add", keys, "screen", "--role", "reader"))
    options = {"--run": "llm", "--sites": 2, "--listen": "127.0.0.1:0", "--keys": keys}
    options["--ledger"] = tmp_path / "hub.sqlite"
    words = [word for option in options.items() for word in option]
    hub = started(environment, "sdiloco", "hub", *words)
    yield hub
    hub.kill()
    hub.communicate()


def port_of(hub: subprocess.Popen[str]) -> int:
    """Reads the log of a hub up to its greeting."""
    assert hub.stdout is not None
    for line in hub.stdout:
        match = re.search(r"is listening on port (\d+)\. The hub is waiting for 2 sites", line)
        if match is not None:
            return int(match[1])
    raise AssertionError("the hub has ended")


def site(address: str, keys: Path, name: str, mean: str) -> str:
    """Runs a site of this environment to the end of the run, and returns its last line."""
    bundle = keys / f"{name}.bundle"
    output = run_python("-c", SITE, address, bundle, name, mean, folder=keys, seconds=PATIENCE)
    return output.splitlines()[-1]


def last_lines_of_sites(address: str, keys: Path, mean: str) -> set[str]:
    """Runs two sites at once, and returns the last line of each."""
    with ThreadPoolExecutor() as threads:
        sites = [threads.submit(site, address, keys, name, mean) for name in ("site-a", "site-b")]
        return {site.result() for site in sites}


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_two_sites_train_against_a_hub_without_torch_to_equal_digests(
    environment: Path, hub: subprocess.Popen[str], tmp_path: Path, mean: str
) -> None:
    for package in ("torch", "lightning", "lightning_sdiloco.engine"):
        assert "ModuleNotFoundError" in output_of(
            started(environment, "python", "-c", f"import {package}"), code=1
        )
    address = f"127.0.0.1:{port_of(hub)}"
    keys = tmp_path / "keys"
    (last_line,) = last_lines_of_sites(address, keys, mean)
    assert re.fullmatch(r"digest \w+", last_line)
    options = ("--json", "--hub", address, "--keys", keys / "screen.bundle")
    status = json.loads(output_of(started(environment, "sdiloco", "status", *options)))
    assert {fragment["round"] for fragment in status["fragments"]} == {4}
    assert all(fragment["ended"] for fragment in status["fragments"])
    hub.send_signal(signal.SIGTERM)
    assert "The hub has ended" in output_of(hub)
