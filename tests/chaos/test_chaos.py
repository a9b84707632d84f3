"""The failure tests that take minutes and hours: each fault of a federation as often as chance would not bring it.

``make chaos`` plays all faults there are, on a machine with little else to do: who stands still is timed. ``make soak``
plays a thousand, by chance.
"""

from pathlib import Path

import pytest

from benchmarks.links import Links, missing
from tests.chaos.__main__ import run
from tests.chaos.checks import Found
from tests.chaos.faults import ALL, HUB, STAGES, Fault
from tests.chaos.play import played
from tests.chaos.world import MBIT_S, ONE_WAY_DELAY, World
from tests.federation.hubs import require_extra

HEALED = 10.0  # seconds within which a site whose link is whole again has all records, unless it fetches a state


def require_good(found: Found) -> None:
    """Nobody stood still, hung, disagreed or counted twice, and who came back was quick."""
    assert found["problems"] == []
    assert found["slow"] == []


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", STAGES)
def test_sites_are_killed_twenty_times_at_a_stage_of_a_flight(tmp_path: Path, stage: str) -> None:
    require_extra()
    found = run(1, faults=20, minutes=15.0, namespaces=False, seconds=0.05, folder=tmp_path, only=[stage])
    assert sum(found["faults"].values()) == 20
    require_good(found)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_processes_stop_for_long_the_hub_dies_and_moves_and_everything_dies(tmp_path: Path) -> None:
    require_extra()
    stops = [Fault("stop", "b", seconds) for seconds in (1.0, 5.0, 20.0)]
    of_the_hub = [Fault("kill", HUB, 2.0), Fault("stop", HUB, 7.0), Fault("move", HUB, 2.0)]
    with World(tmp_path, "abc", 0.05) as world:
        _, found = played(world, *stops, *of_the_hub, Fault("lose", "c", 1.0), Fault("blackout", ALL, 2.0))
    require_good(found)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_site_whose_parameters_become_wrong_is_left_out_and_all_end_with_one_sound_model(tmp_path: Path) -> None:
    require_extra()
    with World(tmp_path, "abc", 0.05) as world:
        told, found = played(world, Fault("wrong", "b", 0.0), Fault("wrong", "c", 0.0))
    require_good(found)
    ends = [note for notes in told.sites.values() for note in notes if note["what"] == "ended"]
    assert max(note["most"] for note in ends) < 2
    assert {note["how"] for notes in told.sites.values() for note in notes if note["what"] == "land"} >= {
        "mix",
        "too long",
    }


@pytest.mark.chaos
@pytest.mark.network
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(1200)
def test_links_are_cut_for_up_to_a_minute_lose_packets_and_become_slow(tmp_path: Path) -> None:
    require_extra()
    cuts = [Fault("cut", "b", seconds) for seconds in (5.0, 15.0, 60.0)]
    one_way = [Fault("cut_in", "b", 10.0), Fault("cut_out", "b", 10.0), Fault("nat", "b", 0.0)]
    worse = [Fault("loss", "b", 20.0, strength) for strength in (0.0, 1.0)]
    with Links(4, MBIT_S, ONE_WAY_DELAY) as links, World(tmp_path, "abc", 0.05, links=links) as world:
        _, found = played(world, *cuts, *one_way, *worse, Fault("slow", "c", 20.0), Fault("move", HUB, 2.0))
    assert found["problems"] == []
    assert [one for one in found["returns"] if one["seconds"] > HEALED and not one["state"]] == []


@pytest.mark.soak
@pytest.mark.timeout(8 * 3600)
def test_a_federation_bears_a_thousand_faults(tmp_path: Path) -> None:
    require_extra()
    found = run(1, faults=1000, minutes=7.5 * 60, namespaces=False, seconds=0.05, folder=tmp_path)
    assert sum(found["faults"].values()) == 1000
    require_good(found)
