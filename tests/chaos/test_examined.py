"""The verdict of the chaos benchmark on notes whose answer is known, and that a seed is a
sequence.
"""

from itertools import islice

from tests.chaos.checks import Told, examined
from tests.chaos.faults import HUB, Fault, sequence
from tests.chaos.notes import Note


def step(
    time: float, stalled: float = 0.0, lag: int = 0, reachable: bool = True, stolen: float = 0.0
) -> Note:
    return {
        "what": "step",
        "at": time,
        "step": int(10 * time),
        "took": 0.1,
        "stalled": stalled,
        "delayed": 0.0,
        "stolen": stolen,
        "lag": lag,
        "reachable": reachable,
    }


def land(time: float, digest: int, round: int = 1) -> Note:
    return {
        "what": "land",
        "at": time,
        "fragment": 0,
        "round": round,
        "key": f"k{round}",
        "digest": digest,
        "how": "mix",
    }


def record(time: float, counted: list[list[object]], round: int = 1) -> Note:
    key = f"k{round}"
    return {
        "what": "append",
        "at": time,
        "fragment": 0,
        "round": round,
        "key": key,
        "counted": counted,
    }


def hello(time: float, site: str, incarnation: str) -> Note:
    return {"what": "hello", "at": time, "site": site, "incarnation": incarnation}


def run_of(a: list[Note], b: list[Note], weight: int = 8, faults: tuple[Note, ...] = ()) -> Told:
    """A run with one record, which counts both sites with a weight."""
    start = {"what": "up", "at": 0.0}
    counted: list[list[object]] = [[site, "incarnation", weight] for site in "ab"]
    hub = [record(5.0, counted), hello(7.5, "b", "incarnation")]
    return Told({"a": [start, *a], "b": [start, *b]}, hub, faults)


def steps(first: int = 0, last: int = 100) -> list[Note]:
    return [step(number / 10) for number in range(first, last)]


def problems(run_notes: Told) -> list[str]:
    findings: list[str] = examined(run_notes, batch=8)["problems"]
    return findings


def test_broken_promises_of_a_trial_are_found() -> None:
    assert problems(run_of(steps(), steps())) == []
    disagreeing = run_of([*steps(), land(5, digest=1)], [*steps(), land(5, digest=2)])
    assert problems(disagreeing) == ["fragment 0, round 1 has 2 digests"]
    (stall,) = problems(run_of([*steps(), step(10.4, stalled=0.3)], steps()))
    assert stall.startswith("a stood still for 0.300 s")
    without_processor = {**step(10.4, stalled=0.3, stolen=0.2), "delayed": 0.05}
    assert problems(run_of([*steps(), without_processor], steps())) == []
    overcounted = run_of(steps(0, 3), steps(), weight=40)
    assert problems(overcounted) == ["a counts 40 samples of fragment 0, and has trained 32"]


def test_a_stopped_site_may_stand_still_and_is_back_once_it_has_applied_all_records() -> None:
    stop = {"kind": "stop", "victim": "b"}
    faults = ({"what": "begin", "at": 1.0, **stop}, {"what": "end", "at": 7.0, **stop})
    coming_back = [
        step(7.2, stalled=6.1, reachable=False),
        {"what": "lose", "at": 7.3},
        step(7.7, stalled=0.5, lag=2),
    ]
    stopped = run_of(steps(), [*steps(0, 10), *coming_back, *steps(80, 100)], faults=faults)
    assert problems(stopped) == []
    (findings,) = examined(stopped, batch=8)["returns"]
    assert findings["site"] == "b"
    assert findings["hello"] == 0.5
    assert findings["seconds"] == 0.5
    assert findings["state"] is False


def trained(first: int, last: int, time: float, lands: dict[int, int]) -> list[Note]:
    """The inner steps of an incarnation, of 0.1 s each, and the rounds that land by step."""
    notes: list[Note] = [
        {"what": "up", "at": time},
        {"what": "training", "at": time, "step": first},
    ]
    for number in range(first + 1, last + 1):
        time += 0.1
        if number in lands:
            notes.append(land(time, digest=1, round=lands[number]))
        notes.append({**step(time), "step": number})
    return notes


def with_a_kill(*steps_counted: int) -> Told:
    """A site that is killed after step 50 and resumes from its checkpoint of step 45; its launches
    count for so many steps.
    """
    first = trained(0, 50, time=0.0, lands={22: 1, 42: 2})
    second = trained(45, 90, time=10.0, lands={62: 3, 82: 4})
    hub = [hello(0.05, "a", "one"), hello(10.05, "a", "two")]
    launches = ((2.1, "one"), (4.1, "one"), (11.6, "two"), (13.6, "two"))
    for round, (launch, steps) in enumerate(zip(launches, steps_counted, strict=True), start=1):
        time, incarnation = launch
        counted: list[list[object]] = [["a", incarnation, 8 * steps]] if steps else []
        hub.append(record(time, counted, round))
    return Told({"a": [*first, *second]}, hub, ())


def test_steps_lost_to_a_kill_beyond_the_limit_are_found() -> None:
    # The steps after the checkpoint of step 45 are lost.
    assert problems(with_a_kill(20, 20, 20, 20)) == []
    assert examined(with_a_kill(20, 20, 20, 20), batch=8)["lost"]["a"]["most"] == 5
    # The steps that the checkpoint held do not count, nor some of those trained since.
    assert problems(with_a_kill(20, 20, 5, 5)) == [
        "a has lost 16 steps of fragment 0 by round 4, and may lose 5"
    ]
    # A launch that landed does not count.
    assert problems(with_a_kill(20, 0, 20, 3)) == [
        "a has lost 10 steps of fragment 0 by round 3, and may lose 5"
    ]


def faults_of(seed: int, links: bool = True) -> list[tuple[float, Fault]]:
    return list(islice(sequence(seed, "abc", links), 300))


def test_a_seed_is_a_sequence_of_faults() -> None:
    faults = faults_of(seed=1)
    assert faults_of(seed=1) == faults
    assert faults_of(seed=2) != faults
    assert {fault.victim for _, fault in faults} == {"a", "b", "c", HUB, "all"}
    kinds_without_links = {fault.kind for _, fault in faults_of(seed=1, links=False)}
    assert kinds_without_links.isdisjoint({"cut", "loss", "nat"})
    chosen = islice(sequence(1, "abc", links=False, only=("move", "kill_in_upload")), 30)
    hits_hub = {(fault.kind, fault.victim == HUB) for _, fault in chosen}
    assert hits_hub == {("move", True), ("kill_in_upload", False)}
