"""A hub and its sites are updated one after the other, while training goes on."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.chaos.checks import Told, examined
from tests.chaos.faults import HUB, Fault
from tests.chaos.play import Play
from tests.chaos.processes import BATCH
from tests.chaos.world import World
from tests.federation.hubs import require_extra

ROOT = Path(__file__).parents[2]
NEWER = {
    "federation/wire.py": ("\nPROTOCOL = 3", "\nPROTOCOL = 4"),
    "federation/config.py": ('str(torch.__version__).split("+")[0]', '"2.13.99"'),
}
OTHER_ARITHMETIC = {**NEWER, "federation/arithmetic.py": ("return seal.hexdigest()", "return seal.hexdigest()[::-1]")}


class Command(subprocess.Popen[bytes]):
    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self, timeout: float | None = None) -> None:
        self.wait(timeout)


class Upgraded(World):
    """A world in which processes begin with a package of their own."""

    package: Path

    @override
    def started(self, name: str) -> Any:
        told = self.folder / f"{name}.pickle"
        told.write_bytes(pickle.dumps(self.told(name)))
        return Command([sys.executable, "-m", "tests.chaos.processes", str(told)], cwd=self.package)


def copied(folder: Path, changes: dict[str, tuple[str, str]], version: str) -> Path:
    """Returns a folder with a copy of the package, some lines of which are others."""
    shutil.copytree(ROOT / "lightning_sdiloco", folder / "lightning_sdiloco")
    for name in ("tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    metadata = folder / f"lightning_sdiloco-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: lightning-sdiloco\nVersion: {version}\n")
    for name, (before, after) in changes.items():
        path = folder / "lightning_sdiloco" / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name} has no {before!r}"
        path.write_text(text.replace(before, after))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hub_and_sites_are_updated_one_after_the_other_and_other_arithmetic_stays_out(tmp_path: Path) -> None:
    require_extra()
    newer = copied(tmp_path / "newer", NEWER, "0.1.99")
    other = copied(tmp_path / "other", OTHER_ARITHMETIC, "0.1.99")
    # With the mean of the hub, which goes on from what rounding has left out.
    with Upgraded(tmp_path, "abc", 0.05, mean="hub") as world:
        world.package, world.sites = ROOT, ("a", "b")
        play = Play(world)
        play.begin()
        world.package = newer
        for name in (HUB, "b", "a"):
            play.suffer(Fault("kill", name, 0.0))
        world.package = other
        stranger = world.started("c")
        play.until("the stranger to be refused", lambda: stranger.exitcode is not None, 60.0)
        play.finish()
    assert examined(Told.of(tmp_path, "ab"), BATCH)["problems"] == []
    for name, is_newer in (("torch", "2.13.99"), ("lightning-sdiloco", "0.1.99")):
        for site in "ab":
            assert f"versions.{name} is {is_newer} here" in world.said(site)
    assert stranger.exitcode
    assert "self_test is" in world.said("c")
    assert "cannot join the run 'run'" in world.said("c")
