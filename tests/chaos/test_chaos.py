"""The failure tests that take minutes and hours: each fault of a federation more often than chance
would bring it.

``make chaos`` plays all faults, on a machine with little else to do, because stalls are timed.
``make soak`` plays a thousand, by chance.
"""

import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from benchmarks.links import Links, missing
from lightning_sdiloco.federation.wire import PROTOCOL
from tests.chaos.__main__ import Trial, run
from tests.chaos.checks import Found, Told, counted_twice, examined
from tests.chaos.faults import ALL, HUB, STAGES, Fault
from tests.chaos.notes import Note
from tests.chaos.play import Play, played
from tests.chaos.processes import BATCH
from tests.chaos.world import MBIT_S, ONE_WAY_DELAY, World
from tests.federation.hubs import require_extra

require_extra()
ROOT = Path(__file__).parents[2]
STEP_SECONDS = 0.05
# seconds within which a site whose link works again has all records, unless it fetches a state
HEALED = 10.0


def require_good(findings: Found) -> None:
    """No site stood still, hung, disagreed or counted twice, and all came back quickly."""
    assert findings["problems"] == []
    assert findings["slow"] == []


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", STAGES)
def test_sites_are_killed_twenty_times_at_a_stage_of_a_flight(tmp_path: Path, stage: str) -> None:
    trial = Trial(seed=1, faults=20, minutes=15.0, step_seconds=STEP_SECONDS, kinds=[stage])
    findings = run(trial, tmp_path)
    assert sum(findings["faults"].values()) == 20
    require_good(findings)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_processes_stop_for_long_the_hub_dies_and_moves_and_everything_dies(tmp_path: Path) -> None:
    faults = [
        Fault("stop", "b", 1.0),
        Fault("stop", "b", 5.0),
        Fault("stop", "b", 20.0),
        Fault("kill", HUB, 2.0),
        Fault("stop", HUB, 7.0),
        Fault("move", HUB, 2.0),
        Fault("lose", "c", 1.0),
        Fault("blackout", ALL, 2.0),
    ]
    with World(tmp_path, "abc", STEP_SECONDS) as world:
        _, findings = played(world, *faults)
    require_good(findings)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_site_with_wrong_parameters_is_left_out_and_all_end_with_one_sound_model(
    tmp_path: Path,
) -> None:
    with World(tmp_path, "abc", STEP_SECONDS) as world:
        run_notes, findings = played(world, Fault("wrong", "b", 0.0), Fault("wrong", "c", 0.0))
    require_good(findings)
    assert max(end["most"] for end in run_notes.ends()) < 2
    landings = [landing for site in "abc" for landing in run_notes.of_site(site, "land")]
    assert {landing["how"] for landing in landings} >= {"mix", "too long"}


@pytest.mark.chaos
@pytest.mark.network
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(1200)
def test_links_are_cut_for_up_to_a_minute_lose_packets_and_become_slow(tmp_path: Path) -> None:
    faults = [
        Fault("cut", "b", 5.0),
        Fault("cut", "b", 15.0),
        Fault("cut", "b", 60.0),
        Fault("cut_in", "b", 10.0),
        Fault("cut_out", "b", 10.0),
        Fault("nat", "b", 0.0),
        Fault("loss", "b", 20.0, strength=0.0),
        Fault("loss", "b", 20.0, strength=1.0),
        Fault("slow", "c", 20.0),
        Fault("move", HUB, 2.0),
    ]
    with (
        Links(4, MBIT_S, ONE_WAY_DELAY) as links,
        World(tmp_path, "abc", STEP_SECONDS, links=links) as world,
    ):
        _, findings = played(world, *faults)
    assert findings["problems"] == []
    without_state = [back for back in findings["returns"] if not back["state"]]
    assert [back for back in without_state if back["seconds"] > HEALED] == []


@pytest.mark.soak
@pytest.mark.timeout(8 * 3600)
def test_a_federation_bears_a_thousand_faults(tmp_path: Path) -> None:
    trial = Trial(seed=1, faults=1000, minutes=7.5 * 60, step_seconds=STEP_SECONDS)
    findings = run(trial, tmp_path)
    assert sum(findings["faults"].values()) == 1000
    require_good(findings)


class OnLostDisks(World):
    """A world whose hub finds nothing of its run when it is started again, and founds it from what
    the sites hold.
    """

    @override
    def told(self, name: str) -> tuple[Any, ...]:
        arguments = super().told(name)
        store = self.folder / "hub.store"
        if name == HUB and store.exists():
            shutil.rmtree(store)
            for file in self.folder.glob("hub.sqlite*"):
                file.unlink()
            return *arguments, True
        return arguments


@pytest.mark.slow
def test_a_run_whose_ledger_is_lost_goes_on_from_living_sites_and_from_checkpoints(
    tmp_path: Path,
) -> None:
    with OnLostDisks(tmp_path, "abc", STEP_SECONDS) as world:
        run_notes, _ = played(world, Fault("kill", HUB, 2.0), Fault("blackout", ALL, 2.0))
        assert world.said(HUB).count("has been founded again") == 2
    models = [end["outer"] for end in run_notes.ends()]
    assert models == models[:1] * 3
    assert counted_twice(run_notes, BATCH) == []
    for notes in run_notes.sites.values():
        # A site that lives resumes with what it holds, and a killed one with its checkpoint.
        first, second = (index for index, note in enumerate(notes) if note["what"] == "up")
        require_rising(rounds_in(notes[first:second]))
        resumed_rounds = rounds_in(notes[second:])
        require_rising(resumed_rounds)
        assert resumed_rounds[0] > 0


def rounds_in(notes: Sequence[Note]) -> list[int]:
    """The rounds that have landed at each step."""
    return [min(note["rounds"]) for note in notes if note["what"] == "step"]


def require_rising(rounds: list[int]) -> None:
    assert rounds == sorted(rounds)
    assert rounds[-1] > rounds[0] + 1


# A hub and its sites are updated one after the other, while training goes on

NEWER = {
    "federation/wire.py": (f"\nPROTOCOL = {PROTOCOL}", f"\nPROTOCOL = {PROTOCOL + 1}"),
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
    """A world in which processes start with the package of a folder that can be replaced."""

    package: Path

    @override
    def started(self, name: str) -> Any:
        arguments = self.folder / f"{name}.pickle"
        arguments.write_bytes(pickle.dumps(self.told(name)))
        command = [sys.executable, "-m", "tests.chaos.processes", str(arguments)]
        return Command(command, cwd=self.package)


def copied(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Returns a folder with a copy of the package in which some lines are replaced."""
    shutil.copytree(ROOT / "lightning_sdiloco", folder / "lightning_sdiloco")
    for name in ("tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    for name, (old_line, new_line) in changes.items():
        path = folder / "lightning_sdiloco" / name
        text = path.read_text()
        assert text.count(old_line) == 1, f"{name} has no {old_line!r}"
        path.write_text(text.replace(old_line, new_line))
    return folder


@pytest.mark.slow
def test_hub_and_sites_are_updated_in_turn_and_sites_with_other_arithmetic_stay_out(
    tmp_path: Path,
) -> None:
    newer = copied(tmp_path / "newer", NEWER)
    with_other_arithmetic = copied(tmp_path / "other", OTHER_ARITHMETIC)
    # The mean of the hub has error feedback, which survives the update.
    with Upgraded(tmp_path, "abc", STEP_SECONDS, mean="hub") as world:
        world.package = ROOT
        world.sites = ("a", "b")
        play = Play(world)
        play.begin()
        world.package = newer
        for name in (HUB, "b", "a"):
            play.suffer(Fault("kill", name, 0.0))
        world.package = with_other_arithmetic
        stranger = world.started("c")
        play.until("the stranger to be refused", lambda: stranger.exitcode is not None, 60.0)
        play.finish()
    assert examined(Told.of(tmp_path, "ab"), BATCH)["problems"] == []
    for site in "ab":
        printed = world.said(site)
        assert "versions.torch is 2.13.99 here" in printed
        assert "versions.lightning-sdiloco is 0.1.99 here" in printed
    assert stranger.exitcode
    refusal = world.said("c")
    assert "self_test is" in refusal
    assert "cannot join the run 'run'" in refusal
