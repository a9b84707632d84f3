"""What faults did to those who train: the same numbers from the notes of a federation and from those of torchft."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from benchmarks.chaos.checks import LONGEST_HANG, Found, Span, Told, differing_ends, disagreements, of
from benchmarks.chaos.faults import ALL, HUB, KILLS, STAGE
from benchmarks.chaos.net import BATCH
from benchmarks.chaos.notes import Note

STILL = 0.1
"""Seconds from which on a stall is counted among the time for which training stood still."""


class Side(NamedTuple):
    """What the notes of one who is compared say.

    Attributes:
        backs: By site, when it trained with all that it had missed.
        counts: By site, when it counted in an outer step, with its present life.
        counted: By site, the inner steps that reached an outer step, the mean over the fragments.
        outer_steps: How many there were.
        disagreements: Where two sites hold different outer parameters after the same outer step.
    """

    backs: Mapping[str, Sequence[float]]
    counts: Mapping[str, Sequence[float]]
    counted: Mapping[str, float]
    outer_steps: int
    disagreements: Sequence[str]


class Stall(NamedTuple):
    """A time in which training did not go on.

    Attributes:
        site: Where.
        began: When.
        seconds: How long, less the time for which the machine did not let the thread run.
        survivor: Whether the site had no fault then, and was back from the last one.
        died: Whether its process ended by itself in it, and was started again.
    """

    site: str
    began: float
    seconds: float
    survivor: bool
    died: bool = False


def federated(told: Told) -> Side:
    """Reads the notes of a federation of this package."""
    closed = [note for note in told.hub if note["what"] == "append"]
    fragments = len({note["fragment"] for note in closed})
    samples: dict[str, int] = defaultdict(int)
    counts: dict[str, list[float]] = {site: [] for site in told.sites}
    lives: dict[str, str] = {}
    for note in told.hub:
        if note["what"] == "hello":
            lives[note["site"]] = note["life"]
        for site, life, weight in note.get("counted", ()):
            samples[site] += weight
            if life == lives.get(site):
                counts[site].append(note["at"])
    steps = {site: told.steps(site) for site in told.sites}
    return Side(
        {site: [n["at"] for n in own if n["reachable"] and n["lag"] == 0] for site, own in steps.items()},
        counts,
        {site: samples[site] / BATCH / max(fragments, 1) for site in told.sites},
        len({(note["fragment"], note["round"]) for note in closed}),
        disagreements(told) + differing_ends(told),
    )


def replicated(told: Told) -> Side:
    """Reads the notes of replica groups of torchft."""
    commits = {site: [note for note in own if note["what"] == "commit"] for site, own in told.sites.items()}
    fragments = len({note["fragment"] for own in commits.values() for note in own})
    digests: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for own in commits.values():
        for note in own:
            digests[note["step"]].add((note["fragment"], note["digest"]))
    wrong = [f"outer step {step} has {len(own)} digests" for step, own in sorted(digests.items()) if len(own) > 1]
    times = {site: [note["at"] for note in own] for site, own in commits.items()}
    return Side(
        times,
        times,
        {site: sum(note["counted"] for note in own) / max(fragments, 1) for site, own in commits.items()},
        len(digests),
        wrong,
    )


def stalls(told: Told, side: Side, spans: Sequence[Span], site: str) -> list[Stall]:
    """Returns all times in which training did not go on at a site, but for those of its own faults."""
    steps, own, found = told.steps(site), of(spans, site), []
    step = median(note["took"] for note in steps) if steps else 0.0
    for before, note in pairwise(steps):
        seconds, began = note["stalled"] - note["delayed"] - note.get("stolen", 0.0), note["at"] - note["stalled"]
        if died := _started(told.sites[site], before, note):
            seconds, began = note["at"] - before["at"] - step, before["at"]
        hit = [span for span in own if span.began < note["at"] and began < span.ended]
        if died and hit:
            continue  # it was killed
        seconds -= sum(min(span.ended, note["at"]) - max(span.began, began) for span in hit if span.kind == "stop")
        if seconds > 0:
            found.append(Stall(site, began, seconds, not _is_away(side, own, site, began, note["at"]), died))
    return found


def _is_away(side: Side, own: Sequence[Span], site: str, first: float, last: float) -> bool:
    """From each of its faults on until it takes part again."""
    return any(span.began < last and first < _first(side.backs[site], span.ended) for span in own)


def seconds_up(told: Told, side: Side, spans: Sequence[Span], site: str) -> float:
    """Returns for how long a site had no fault, and was back from the last one."""
    between = [(before["at"], note["at"]) for before, note in pairwise(told.steps(site))]
    own = of(spans, site)
    return float(sum(last - first for first, last in between if not _is_away(side, own, site, first, last)))


def _started(notes: Sequence[Note], before: Note, after: Note) -> bool:
    return any(note["what"] == "up" and before["at"] < note["at"] < after["at"] for note in notes)


def _first(times: Sequence[float], since: float) -> float:
    return min((at for at in times if at > since), default=float("inf"))


def after_faults(found: Sequence[Stall], spans: Sequence[Span]) -> list[Found]:
    """Returns the longest stall of a survivor that began between each fault and the next one."""
    in_order = sorted(spans, key=lambda span: span.began)
    until = [*(span.began for span in in_order[1:]), float("inf")]
    return [
        {
            "kind": span.label,
            "seconds": max((o.seconds for o in found if o.survivor and span.began <= o.began < last), default=0.0),
        }
        for span, last in zip(in_order, until[: len(in_order)], strict=True)
    ]


def returns(told: Told, side: Side, spans: Sequence[Span]) -> list[Found]:
    """Returns how long each site took from being up again until it counted, where nothing came in between."""
    found = []
    for span in spans:
        for site in (span.victim,) if span.victim in told.sites else tuple(told.sites) if span.victim == ALL else ():
            killed = span.kind in KILLS or span.kind.startswith(STAGE)
            ups = [note["at"] for note in told.sites[site] if note["what"] == "up"]
            up = _first(ups, span.ended) if killed else span.ended
            back = _first(side.counts[site], up)
            others = [one for one in spans if one != span and one.victim in (site, HUB, ALL)]
            between = any(one.ended > span.ended and one.began < back for one in others)
            if back < float("inf") and not between:
                found.append({"kind": span.label, "site": site, "seconds": back - up})
    return found


def compared(told: Told, read: Callable[[Told], Side]) -> Found:
    """Says what faults did.

    Args:
        told: All notes of a run.
        read: `federated` or `replicated`.

    Returns:
        ``faults``: how many of each kind; ``stalls``: the longest ones of survivors; ``after faults``: the longest one
        after each fault; ``still``: the share of the time of the survivors in which they stood still; ``returns``:
        seconds until a site counted again; ``trained``: from the first inner step to the last one; ``steps``,
        ``counted``: inner steps made, and of these those in an outer step; ``outer steps``; ``disagreements``;
        ``hangs``: stalls of more than 30 s of anybody;
        ``died``: processes that ended by themselves.
    """
    spans, side = told.spans(), read(told)
    every = [one for site in told.sites for one in stalls(told, side, spans, site)]
    survived = [one for one in every if one.survivor]
    kinds = [span.label for span in spans]
    times = [note["at"] for site in told.sites for note in told.steps(site)]
    up = sum(seconds_up(told, side, spans, site) for site in told.sites)
    return {
        "faults": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "stalls": sorted(one.seconds for one in survived)[-10:],
        "after faults": after_faults(every, spans),
        "still": sum(one.seconds for one in survived if one.seconds > STILL) / max(up, 1e-9),
        "returns": returns(told, side, spans),
        "trained": max(times) - min(times) if times else 0.0,
        "steps": sum(len(told.steps(site)) for site in told.sites),
        "counted": sum(side.counted.values()),
        "outer steps": side.outer_steps,
        "disagreements": list(side.disagreements),
        "hangs": sum(one.seconds > LONGEST_HANG for one in every),
        "died": sum(note["what"] == "died" for note in told.faults),
    }
