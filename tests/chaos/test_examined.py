"""What the chaos benchmark says of notes whose answer is known, and that a seed is a sequence."""

from itertools import islice
from typing import Any

from tests.chaos.checks import Told, examined
from tests.chaos.faults import HUB, sequence

Note = dict[str, Any]


def step(at: float, stalled: float = 0.0, lag: int = 0, reachable: bool = True) -> Note:
    numbers = {"step": int(10 * at), "took": 0.1, "stalled": stalled, "delayed": 0.0}
    return {"what": "step", "at": at, **numbers, "lag": lag, "reachable": reachable}


def land(at: float, digest: int) -> Note:
    return {
        "what": "land",
        "at": at,
        "fragment": 0,
        "round": 1,
        "key": "k",
        "digest": digest,
        "how": "mix",
    }


def record(at: float, weight: int) -> Note:
    counted = [["a", "incarnation", weight], ["b", "incarnation", weight]]
    return {"what": "append", "at": at, "fragment": 0, "round": 1, "key": "k", "counted": counted}


def told(a: list[Note], b: list[Note], weight: int = 8, faults: tuple[Note, ...] = ()) -> Told:
    hub = [
        record(5.0, weight),
        {"what": "hello", "at": 7.5, "site": "b", "incarnation": "incarnation"},
    ]
    return Told(
        {"a": [{"what": "up", "at": 0.0}, *a], "b": [{"what": "up", "at": 0.0}, *b]}, hub, faults
    )


def steps(first: int = 0, last: int = 100) -> list[Note]:
    return [step(number / 10) for number in range(first, last)]


def problems(of: Told) -> list[str]:
    found: list[str] = examined(of, batch=8)["problems"]
    return found


def test_broken_promises_of_a_trial_are_found() -> None:
    assert problems(told(steps(), steps())) == []
    assert problems(told([*steps(), land(5, 1)], [*steps(), land(5, 2)])) == [
        "fragment 0, round 1 has 2 digests"
    ]
    stood_still = problems(told([*steps(), step(10.4, stalled=0.3)], steps()))
    assert len(stood_still) == 1
    assert stood_still[0].startswith("a stood still for 0.300 s")
    elsewhere = {**step(10.4, stalled=0.3), "delayed": 0.05, "stolen": 0.2}
    assert problems(told([*steps(), elsewhere], steps())) == [], "another machine had its processor"
    assert problems(told(steps(0, 3), steps(), weight=40)) == [
        "a counts 40 samples of fragment 0, and has trained 32"
    ]


def test_a_stopped_site_may_stand_still_and_is_back_once_it_has_applied_all_records() -> None:
    faults = ({"what": "begin", "at": 1.0}, {"what": "end", "at": 7.0})
    stop = tuple({**note, "kind": "stop", "victim": "b"} for note in faults)
    back = [
        step(7.2, stalled=6.1, reachable=False),
        {"what": "lose", "at": 7.3},
        step(7.7, stalled=0.5, lag=2),
    ]
    stopped = told(steps(), [*steps(0, 10), *back, *steps(80, 100)], faults=stop)
    assert problems(stopped) == []
    [found] = examined(stopped, batch=8)["returns"]
    assert (found["site"], found["hello"], found["seconds"], found["state"]) == (
        "b",
        0.5,
        0.5,
        False,
    )


def trained(first: int, last: int, at: float, lands: tuple[tuple[int, int], ...]) -> list[Note]:
    """The inner steps of an incarnation, of 0.1 s each, and after which of them rounds land."""
    notes: list[Note] = [{"what": "up", "at": at}, {"what": "training", "at": at, "step": first}]
    for number in range(first + 1, last + 1):
        at += 0.1
        notes += [
            {**land(at, 1), "round": round, "key": f"k{round}"}
            for round, after in lands
            if after == number
        ]
        notes.append({**step(at), "step": number})
    return notes


def with_a_kill(*weighs: int) -> Told:
    """A site that is killed after step 50 and goes on from its checkpoint of step 45; its launches
    weigh so much.
    """
    notes = [*trained(0, 50, 0.0, ((1, 22), (2, 42))), *trained(45, 90, 10.0, ((3, 62), (4, 82)))]
    said = {"what": "hello", "site": "a"}
    hub = [{**said, "at": 0.05, "incarnation": "one"}, {**said, "at": 10.05, "incarnation": "two"}]
    made = ((2.1, "one"), (4.1, "one"), (11.6, "two"), (13.6, "two"))
    for round, ((at, incarnation), steps) in enumerate(zip(made, weighs, strict=True), 1):
        counted = [["a", incarnation, 8 * steps]] if steps else []
        hub.append({**record(at, 0), "round": round, "key": f"k{round}", "counted": counted})
    return Told({"a": notes}, hub, ())


def test_steps_lost_to_a_kill_beyond_the_limit_are_found() -> None:
    # What was trained after the checkpoint of step 45 is lost.
    assert problems(with_a_kill(20, 20, 20, 20)) == []
    assert examined(with_a_kill(20, 20, 20, 20), batch=8)["lost"]["a"]["most"] == 5
    # What the checkpoint held does not count, and some of what was trained since.
    assert problems(with_a_kill(20, 20, 5, 5)) == [
        "a has lost 16 steps of fragment 0 by round 4, and may lose 5"
    ]
    # A launch that landed does not count.
    assert problems(with_a_kill(20, 0, 20, 3)) == [
        "a has lost 10 steps of fragment 0 by round 3, and may lose 5"
    ]


def test_a_seed_is_a_sequence_of_faults() -> None:
    first, again, other = (
        list(islice(sequence(seed, "abc", links=True), 300)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert {fault.victim for _, fault in first} == {"a", "b", "c", HUB, "all"}
    assert not {fault.kind for _, fault in islice(sequence(1, "abc", links=False), 300)} & {
        "cut",
        "loss",
        "nat",
    }
    moved = islice(sequence(1, "abc", links=False, only=("move", "kill_in_upload")), 30)
    assert {(fault.kind, fault.victim == HUB) for _, fault in moved} == {
        ("move", True),
        ("kill_in_upload", False),
    }
