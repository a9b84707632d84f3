"""What the comparison under faults says of notes whose answer is known; and torchft in it, where it is installed."""

from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.chaos.beside import compared, federated, replicated
from benchmarks.chaos.checks import Told
from benchmarks.chaos.faults import ALL, HUB, Fault, sequence
from benchmarks.chaos.peers import add, named, numbers, run
from benchmarks.chaos.replica import Work
from benchmarks.chaos.replicas import BIN
from benchmarks.chaos.running import Play, Seen

Note = dict[str, Any]


def steps(first: int, last: int, **about: Any) -> list[Note]:
    """A step every tenth of a second."""
    timed = {"what": "step", "took": 0.1, "stalled": 0.01, "delayed": 0.0, "stolen": 0.0, "lag": 0, "reachable": True}
    return [{**timed, "at": number / 10, "step": number, **about} for number in range(first, last)]


def commit(at: float, step: int, digest: str = "x", counted: int = 20) -> Note:
    return {"what": "commit", "at": at, "step": step, "fragment": step % 2, "digest": digest, "counted": counted}


def fault(kind: str, victim: str, began: float, ended: float) -> tuple[Note, ...]:
    about = {"kind": kind, "victim": victim}
    return {"what": "begin", "at": began, **about}, {"what": "end", "at": ended, **about}


def told(a: list[Note], b: list[Note], faults: tuple[Note, ...] = ()) -> Told:
    notes = {name: [{"what": "up", "at": 0.0}, *own] for name, own in (("a", a), ("b", b))}
    return Told({name: sorted(own, key=lambda note: note["at"]) for name, own in notes.items()}, [], faults)


def test_groups_with_other_parameters_after_the_same_outer_step_are_found() -> None:
    one, same, other = [*steps(1, 90), commit(5, 1)], [*steps(1, 90), commit(5.1, 1)], [commit(5.1, 1, "y")]
    assert compared(told(one, same), replicated)["disagreements"] == []
    assert compared(told(one, [*steps(1, 90), *other]), replicated)["disagreements"] == ["outer step 1 has 2 digests"]


def test_a_survivor_that_stood_still_is_found_and_who_had_the_fault_is_none() -> None:
    kill = fault("kill", "b", 2.0, 3.0)
    stood = {**steps(90, 91)[0], "at": 8.0, "took": 5.0, "stalled": 5.0, "delayed": 0.5}
    a = [*steps(1, 30), stood, *steps(91, 120), commit(8.0, 1)]
    b = [*steps(1, 20), {"what": "up", "at": 3.2}, *steps(35, 120), commit(8.0, 1)]
    found = compared(told(a, b, kill), replicated)
    assert found["stalls"][-1] == pytest.approx(4.5), "less the time without a processor"
    assert [own["seconds"] for own in found["after faults"]] == [pytest.approx(4.5)]
    assert found["hangs"] == 0
    [back] = found["returns"]
    assert (back["site"], back["seconds"]) == ("b", pytest.approx(4.8)), "from up to the first commit"
    assert compared(told(b, a, fault("kill", "a", 2.0, 3.0)), replicated)["stalls"][-1] == pytest.approx(4.5)


def test_who_was_stopped_is_charged_with_what_comes_after_it_alone() -> None:
    stop = fault("stop", "b", 3.0, 13.0)
    stood = {**steps(1, 2)[0], "step": 30, "at": 50.0, "took": 47.0, "stalled": 47.0}
    found = compared(told([*steps(1, 600), commit(5, 1)], [*steps(1, 30), stood, *steps(501, 600)], stop), replicated)
    assert found["hangs"] == 1, "37 s after it went on"
    assert found["stalls"][-1] < 0.1, "it is no survivor"


def test_who_ends_by_itself_stands_still_until_it_trains_again() -> None:
    died = {"what": "died", "at": 4.0, "victim": "b", "code": 1}
    again = [{"what": "up", "at": 35.0}, *steps(400, 420)]
    found = compared(told(steps(1, 420), [*steps(1, 30), *again], (*fault("stop", HUB, 1.0, 2.0), died)), replicated)
    assert found["died"] == 1
    assert found["hangs"] == 1
    assert [own["seconds"] for own in found["after faults"]] == [pytest.approx(37.0)]


def test_inner_steps_count_that_reach_an_outer_step_of_every_fragment() -> None:
    work = Work([0, 0])
    work.made = 8
    work.launch(0)
    work.made = 10
    assert work.land(0, committed=True) == 8
    work.made = 18
    work.launch(1)
    work.made = 20
    assert work.land(1, committed=False) == 0
    work.made = 28
    work.launch(0)
    assert work.land(0, committed=True) == 20
    work.made = 38
    work.launch(1)
    assert work.land(1, committed=True) == 18, "those before it was discarded are gone"
    work.replace()
    work.made = 48
    work.launch(0)
    assert work.land(0, committed=True) == 10, "those before its parameters were replaced are gone"


def record(at: float, fragment: int, life: str) -> Note:
    counted = [["a", "a1", 160], ["b", life, 80]]
    return {"what": "append", "at": at, "fragment": fragment, "round": 1, "key": "k", "counted": counted}


def test_a_federation_is_read_by_the_same_measure() -> None:
    hellos = [
        {"what": "hello", "at": at, "site": site, "life": life}
        for at, site, life in ((0.1, "a", "a1"), (0.1, "b", "b1"), (2.4, "b", "b2"))
    ]
    records = [record(1.0, 0, "b1"), record(2.5, 1, "b1"), record(3.0, 0, "b2")]
    b = [*steps(1, 11), {"what": "up", "at": 2.2}, *steps(23, 41)]
    notes = told(steps(1, 41), b, fault("kill", "b", 1.05, 2.0))
    hub = sorted([*hellos, *records], key=lambda note: note["at"])
    found = compared(notes._replace(hub=hub), federated)
    assert (found["steps"], found["counted"], found["outer steps"]) == (40 + 28, 45.0, 2)
    assert [own["seconds"] for own in found["returns"]] == [pytest.approx(0.8)], "what its last life sent is not it"
    assert found["disagreements"] == []


def test_with_patience_no_fault_is_left_out() -> None:
    play = Play(Mock(sites=("a",)), patience=0.02)
    play.seen = {"a": Seen(0.0, back=False)}
    play.look = Mock()  # type: ignore[method-assign]
    stop = Fault("stop", "a", 1.0, strength=1.0)
    assert not play._may(stop)
    assert play._comes(stop), "it has waited"
    play.patience = 0.0
    assert not play._comes(stop)
    first = [one for _, one in islice(sequence(305, "abcd", links=False), 50)]
    assert {HUB, ALL} < {one.victim for one in first}


def test_a_run_counts_once_and_one_that_spares_the_hub_is_another_one(tmp_path: Path) -> None:
    found = {**compared(told(steps(1, 90), steps(1, 90)), replicated), "seconds": 60.0, "halted": None, "seed": 1}
    for who, spare_hub in (
        ("federation", False),
        ("torchft-readme", False),
        ("federation", True),
        ("federation", False),
    ):
        every = add(tmp_path / "peers.json", [{**found, "who": who, "spare_hub": spare_hub}])
    assert [named(one) for one in every] == [
        "torchft-readme, seed 1",
        "federation, seed 1, hub spared",
        "federation, seed 1",
    ]
    assert numbers(every[0])["inner steps in no outer step, %"] == 100


@pytest.mark.slow
@pytest.mark.skipif(not BIN.exists(), reason="torchft is not installed: benchmarks/peers/install.sh")
@pytest.mark.timeout(300)
def test_groups_of_torchft_train_and_one_that_is_killed_returns(tmp_path: Path) -> None:
    found = run("torchft-careful", seed=305, faults=1, minutes=2, seconds=0.02, folder=tmp_path)
    assert found["halted"] is None
    assert sum(found["faults"].values()) == 1
    assert len(found["returns"]) == 1
    assert found["disagreements"] == []
    assert 0 < found["counted"] < found["steps"]
