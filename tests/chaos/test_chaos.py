"""The failure tests that take minutes and hours: each fault of a federation as often as chance
would not bring it.

``make chaos`` plays all faults there are, on a machine with little else to do: who stands still is
timed. ``make soak`` plays a thousand, by chance.
"""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from benchmarks.links import Links, missing
from tests.chaos.__main__ import run
from tests.chaos.checks import Found, Told, counted_twice, examined
from tests.chaos.faults import ALL, HUB, STAGES, Fault
from tests.chaos.play import Play, played
from tests.chaos.processes import BATCH
from tests.chaos.world import MBIT_S, ONE_WAY_DELAY, World
from tests.federation.hubs import require_extra

require_extra()
ROOT = Path(__file__).parents[2]
# seconds within which a site whose link is whole again has all records, unless it fetches a state
HEALED = 10.0


def require_good(found: Found) -> None:
    """Nobody stood still, hung, disagreed or counted twice, and who came back was quick."""
    assert found["problems"] == []
    assert found["slow"] == []


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", STAGES)
def test_sites_are_killed_twenty_times_at_a_stage_of_a_flight(tmp_path: Path, stage: str) -> None:
    found = run(
        1, faults=20, minutes=15.0, namespaces=False, seconds=0.05, folder=tmp_path, only=[stage]
    )
    assert sum(found["faults"].values()) == 20
    require_good(found)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_processes_stop_for_long_the_hub_dies_and_moves_and_everything_dies(tmp_path: Path) -> None:
    stops = [Fault("stop", "b", seconds) for seconds in (1.0, 5.0, 20.0)]
    of_the_hub = [Fault("kill", HUB, 2.0), Fault("stop", HUB, 7.0), Fault("move", HUB, 2.0)]
    with World(tmp_path, "abc", 0.05) as world:
        _, found = played(
            world, *stops, *of_the_hub, Fault("lose", "c", 1.0), Fault("blackout", ALL, 2.0)
        )
    require_good(found)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_site_with_wrong_parameters_is_left_out_and_all_end_with_one_sound_model(
    tmp_path: Path,
) -> None:
    with World(tmp_path, "abc", 0.05) as world:
        told, found = played(world, Fault("wrong", "b", 0.0), Fault("wrong", "c", 0.0))
    require_good(found)
    notes = [note for of_site in told.sites.values() for note in of_site]
    assert max(note["most"] for note in notes if note["what"] == "ended") < 2
    assert {note["how"] for note in notes if note["what"] == "land"} >= {"mix", "too long"}


@pytest.mark.chaos
@pytest.mark.network
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(1200)
def test_links_are_cut_for_up_to_a_minute_lose_packets_and_become_slow(tmp_path: Path) -> None:
    cuts = [Fault("cut", "b", seconds) for seconds in (5.0, 15.0, 60.0)]
    one_way = [Fault("cut_in", "b", 10.0), Fault("cut_out", "b", 10.0), Fault("nat", "b", 0.0)]
    worse = [Fault("loss", "b", 20.0, strength) for strength in (0.0, 1.0)]
    with (
        Links(4, MBIT_S, ONE_WAY_DELAY) as links,
        World(tmp_path, "abc", 0.05, links=links) as world,
    ):
        _, found = played(
            world, *cuts, *one_way, *worse, Fault("slow", "c", 20.0), Fault("move", HUB, 2.0)
        )
    assert found["problems"] == []
    assert [one for one in found["returns"] if one["seconds"] > HEALED and not one["state"]] == []


@pytest.mark.soak
@pytest.mark.timeout(8 * 3600)
def test_a_federation_bears_a_thousand_faults(tmp_path: Path) -> None:
    found = run(1, faults=1000, minutes=7.5 * 60, namespaces=False, seconds=0.05, folder=tmp_path)
    assert sum(found["faults"].values()) == 1000
    require_good(found)


class OnLostDisks(World):
    """A world whose hub finds nothing of its run when it is started again, and founds it from what
    the sites hold.
    """

    @override
    def told(self, name: str) -> tuple[Any, ...]:
        told = super().told(name)
        store = self.folder / "hub.store"
        if name == HUB and store.exists():
            shutil.rmtree(store)
            for file in self.folder.glob("hub.sqlite*"):
                file.unlink()
            return *told, True
        return told


@pytest.mark.slow
def test_a_run_whose_ledger_is_lost_goes_on_from_living_sites_and_from_checkpoints(
    tmp_path: Path,
) -> None:
    with OnLostDisks(tmp_path, "abc", 0.05) as world:
        told, _ = played(world, Fault("kill", HUB, 2.0), Fault("blackout", ALL, 2.0))
        assert world.said(HUB).count("has been founded again") == 2
    ends = [
        note["outer"] for notes in told.sites.values() for note in notes if note["what"] == "ended"
    ]
    assert ends == ends[:1] * 3
    assert counted_twice(told, BATCH) == []
    for notes in told.sites.values():
        # Who lives on goes on with what it holds, and who was killed with what its checkpoint
        # holds.
        first, again = (index for index, note in enumerate(notes) if note["what"] == "up")
        for own in (notes[first:again], notes[again:]):
            rounds = [min(note["rounds"]) for note in own if note["what"] == "step"]
            assert rounds == sorted(rounds)
            assert rounds[-1] > rounds[0] + 1
        assert rounds[0] > 0


# A hub and its sites are updated one after the other, while training goes on

NEWER = {
    "federation/wire.py": ("\nPROTOCOL = 3", "\nPROTOCOL = 4"),
    "federation/config.py": ('str(torch.__version__).split("+")[0]', '"2.13.99"'),
    "version.py": ('VERSION = "0.1.0"', 'VERSION = "0.1.99"'),
}
OTHER_ARITHMETIC = {
    **NEWER,
    "federation/arithmetic.py": ("return seal.hexdigest()", "return seal.hexdigest()[::-1]"),
}


class Command(subprocess.Popen[bytes]):
    exitcode = property(subprocess.Popen.poll)
    join = subprocess.Popen.wait


class Upgraded(World):
    """A world in which processes begin with a package of their own."""

    package: Path

    @override
    def started(self, name: str) -> Any:
        told = self.folder / f"{name}.pickle"
        told.write_bytes(pickle.dumps(self.told(name)))
        return Command([sys.executable, "-m", "tests.chaos.processes", str(told)], cwd=self.package)


def copied(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Returns a folder with a copy of the package, some lines of which are others."""
    shutil.copytree(ROOT / "lightning_sdiloco", folder / "lightning_sdiloco")
    for name in ("tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    for name, (before, after) in changes.items():
        path = folder / "lightning_sdiloco" / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name} has no {before!r}"
        path.write_text(text.replace(before, after))
    return folder


@pytest.mark.slow
def test_hub_and_sites_are_updated_in_turn_and_sites_with_other_arithmetic_stay_out(
    tmp_path: Path,
) -> None:
    newer = copied(tmp_path / "newer", NEWER)
    other = copied(tmp_path / "other", OTHER_ARITHMETIC)
    # With the mean of the hub, which goes on from what rounding has left out.
    with Upgraded(tmp_path, "abc", 0.05, mean="hub") as world:
        world.package = ROOT
        world.sites = ("a", "b")
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
