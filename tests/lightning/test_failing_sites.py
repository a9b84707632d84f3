"""What happens to sites that fail and to those that are left, as processes with the Trainer."""

import math
import signal
import time
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.chaos.checks import Told, examined
from tests.chaos.faults import HUB, Fault
from tests.chaos.notes import Note
from tests.chaos.play import Play
from tests.chaos.processes import BATCH, OVERLAP_STEPS, SYNC_EVERY
from tests.chaos.world import World
from tests.federation.hubs import require_extra
from tests.lightning.clocked_sites import Clocked
from tests.small_disk import fill, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FILE_OF_RANK = "rank_00000.pt"


def counted(record: Note) -> str:
    """The names of the sites that count."""
    return "".join(sorted(site for site, *_ in record["counted"]))


def test_two_of_three_sites_are_killed_for_good_and_the_last_one_goes_on_alone_to_its_end(tmp_path: Path) -> None:
    require_extra()
    steps = 500

    def count_alone(left: str) -> bool:
        return [counted(note) for note in Told.of(tmp_path, "abc").records()[-2:]] == [left, left]

    with World(tmp_path, "abc", 0.03, steps) as world:
        play = Play(world)
        play.begin()
        for victim, left in (("c", "ab"), ("b", "a")):
            fault = Fault("kill", victim, math.inf)
            world.begin(fault)
            play.going_on.append((math.inf, fault))
            play.until(f"{left} count alone", partial(count_alone, left), 60)
        play.until("its end", lambda: play.seen["a"].ended, 120)
    told = Told.of(tmp_path, world.sites)
    # It has not stood still, no sample counts twice, and there is one history.
    assert examined(told, BATCH)["problems"] == []
    killed = [note["at"] for note in told.faults if note["what"] == "begin"]
    there = max(note["step"] for note in told.steps("a") if note["at"] < killed[-1])
    assert told.steps("a")[-1]["step"] == steps
    for fragment in {note["fragment"] for note in told.records()}:
        own = [note for note in told.records() if note["fragment"] == fragment]
        assert [note["round"] for note in own] == list(range(1, len(own) + 1))
        alone = list(takewhile(lambda note: counted(note) == "a", reversed(own)))
        # All that it has trained counts, but for the rounds that were open when it was left alone.
        assert sum(weight for note in alone for *_, weight in note["counted"]) >= BATCH * (steps - there - SYNC_EVERY)


@pytest.mark.parametrize("victim", ["b", HUB])
def test_a_grace_of_ones_own_may_hold_training_up_for_as_long_and_a_second(tmp_path: Path, victim: str) -> None:
    require_extra()
    grace = 2.0
    # An inner step is longer than the slice in which a site that waits listens.
    with World(tmp_path, "ab", 0.07, lease=10.0, grace=grace) as world:
        play = Play(world)
        play.begin()
        play.suffer(Fault("stop", victim, 7.0))
        play.finish()
    told = Told.of(tmp_path, "ab")
    (stopped,) = told.spans()
    steps = told.steps("a")
    one = median(note["took"] for note in steps)
    # The grace is longer than a flight may take until training waits for it.
    assert one * (SYNC_EVERY - 1) < grace
    # Without the time for which the machine did not let it run.
    stalls = [note["stalled"] - note["delayed"] - note["stolen"] for note in steps if note["at"] > stopped.began]
    assert max(stalls) <= grace + 1.0 + one
    # It has waited, and then trained on, though the other one did not come.
    assert max(note["stalled"] for note in steps if note["at"] < stopped.ended) > 0.25
    assert sum(stopped.began < note["at"] < stopped.ended for note in steps) > SYNC_EVERY
    if victim == HUB:
        # Four beats of a second without an answer.
        assert not any(note["reachable"] for note in steps if stopped.began + 6 < note["at"] < stopped.ended)
    found = examined(told, BATCH)
    assert [problem for problem in found["problems"] if "stood still" not in problem] == []


def test_what_a_site_trains_while_a_launch_of_its_earlier_start_stands_in_an_open_round_counts(tmp_path: Path) -> None:
    require_extra()
    # The round waits for the site that is stopped.
    with World(tmp_path, "ab", 0.05, lease=60.0, grace=60.0) as world:
        play = Play(world)
        play.begin()
        stopped, killed = Fault("stop", "a", math.inf), Fault("kill_before_record", "b", math.inf)
        for fault in (stopped, killed):
            play.going_on.append((math.inf, fault))
            world.begin(fault)
        play.going_on.pop()
        world.end(killed)

        def trained() -> int:
            notes = [note["what"] for note in world.notes("b")]
            return notes[notes.index("up", 1) :].count("step") if notes.count("up") == 2 else 0

        play.until("some steps of the next start", lambda: trained() >= OVERLAP_STEPS + 5, 60)
        play.going_on.clear()
        world.end(stopped)
        play.until_back()
        play.finish()
    told = Told.of(tmp_path, "ab")
    starts = [note["at"] for note in told.sites["b"] if note["what"] == "up"]
    lives = [note["life"] for note in told.hub if note["what"] == "hello" and note["site"] == "b"]
    assert len(starts) == 2
    steps = [note["at"] for note in told.steps("b") if note["at"] > starts[1]]
    landed = {
        (n["fragment"], n["round"]): n["how"] for n in told.sites["b"] if n["what"] == "land" and n["at"] > steps[4]
    }
    # What its first start has launched, and its next one had no flight of.
    earlier = [
        landed.get((n["fragment"], n["round"]))
        for n in told.records()
        if ["b", lives[0]] in [c[:2] for c in n["counted"]]
    ]
    assert "carry" in earlier
    assert "take" not in earlier
    assert [problem for problem in examined(told, BATCH)["problems"] if "stood still" not in problem] == []


@pytest.mark.parametrize("of", ["rank", "checkpoint"])
def test_a_site_on_a_full_disk_says_so_and_goes_on_from_its_last_checkpoint_when_there_is_room(
    tmp_path: Path, of: str
) -> None:
    require_extra()
    last = tmp_path / "b" / "last.ckpt"
    # A machine that is busy with other things breaks no lease of these.
    with small_disk(last.parent, 40) as disk, World(tmp_path, "ab", 0.03, lease=20.0) as world:
        play = Play(world)
        play.begin()
        play.until("a checkpoint", partial(stops_with_one_save, world, "b", disk), 60)
        rank, checkpoint = largest(disk, "rank_*.pt"), largest(disk, "last.ckpt")
        # The file of the rank does not find room, or the checkpoint after it.
        filler = fill(disk, rank // 2 if of == "rank" else rank + checkpoint // 2)
        world.signal("b", signal.SIGCONT)
        failed = world.processes["b"]
        failed.join(60)
        assert failed.exitcode == 1
        assert "No space left on device" in world.said("b")
        assert f"Nothing is left of it. Resume from {last}" in world.said("b")
        # One whole checkpoint is there, and no part of another.
        (save,) = (disk / "last.ckpt.sdiloco").iterdir()
        assert sorted(path.name for path in save.iterdir()) == ["manifest.json", FILE_OF_RANK]
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "last.ckpt", "last.ckpt.sdiloco"]
        held = torch.load(last, weights_only=True)
        assert held["streaming_diloco"]["save"] == save.name
        filler.unlink()
        # Its process is gone already; it is started again as one that was killed.
        play.suffer(Fault("kill", "b", 3.0))
        play.finish()
    told = Told.of(tmp_path, "ab")
    # All end with one model, nothing counts twice, and no more is lost than may be.
    assert [problem for problem in examined(told, BATCH)["problems"] if "stood still" not in problem] == []
    before, after = (note for note in told.sites["b"] if note["what"] == "training")
    assert (before["step"], after["step"]) == (0, held["global_step"])
    # Meanwhile the other one closed rounds alone, and was not held up. A thread of it may wait for another one that the
    # machine does not let run, for some moments.
    gone = max(note["at"] for note in told.sites["b"] if note["at"] < told.spans()[0].began)
    assert "a" in [counted(note) for note in told.records() if gone < note["at"] < after["at"]]
    alone = [note for note in told.steps("a") if gone < note["at"] < after["at"]]
    stalled = sum(note["stalled"] - note["delayed"] - note["stolen"] for note in alone)
    assert stalled < 0.25 * (after["at"] - gone)
    assert counted(told.records()[-1]) == "ab"


def test_clocks_of_hub_and_site_that_are_off_by_an_hour_and_jump_back_are_no_fault(tmp_path: Path) -> None:
    require_extra()
    wrong = (HUB, "a")
    with Clocked(tmp_path, "ab", 0.03, wrong) as world:
        world.set_clocks(3600)
        play = Play(world)
        play.begin()
        assert [world.off(name) for name in wrong] == pytest.approx([3600] * 2, abs=60)
        # To the right time, and then to an hour too early.
        for seconds in (0, -3600):
            world.set_clocks(seconds)
            # For longer than a lease.
            play.wait(3.0)
            play.until_back()
            assert [world.off(name) for name in (*wrong, "b")] == pytest.approx([seconds, seconds, 0], abs=60)
        # Its certificate was made an hour later than its clock shows.
        play.suffer(Fault("kill", "a", 1.0))
        play.finish()
    told = Told.of(tmp_path, "ab")
    assert examined(told, BATCH)["problems"] == []
    # Nobody lost its connection, and both counted all the time.
    assert [note for site in "ab" for note in told.sites[site] if note["what"] == "lose"] == []
    (killed,) = told.spans()
    both = [counted(note) == "ab" for note in told.records() if note["at"] < killed.began]
    assert sum(both) >= 0.8 * len(both)


def stops_with_one_save(world: World, site: str, disk: Path) -> bool:
    """Stops a site if all on its disk is one whole checkpoint; tells whether it has."""
    world.signal(site, signal.SIGSTOP)
    time.sleep(0.01)
    if sorted(path.name for path in disk.rglob("*") if path.is_file()) == ["last.ckpt", "manifest.json", FILE_OF_RANK]:
        return True
    world.signal(site, signal.SIGCONT)
    return False


def largest(disk: Path, name: str) -> int:
    """The bytes of the largest file with a name."""
    return max(path.stat().st_size for path in disk.rglob(name))
