"""What became of a run with faults, by what its processes wrote down: who stood still, who came back, who agrees."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.chaos.faults import ALL, FORMS, HUB, KILLS, STAGE, Kind
from tests.chaos.lost import losses
from tests.chaos.notes import Note, read

LONGEST_STALL = 0.1
"""Seconds, with one step more, for which training may stand still because others have faults."""
LONGEST_RETURN = 3.0
"""Seconds from hello to all records applied, without the transfer of a state."""
LONGEST_HANG = 30.0

Found = dict[str, Any]


class Span(NamedTuple):
    """A fault, with its times.

    Attributes:
        kind: What happened.
        victim: To whom.
        began: When.
        ended: When it was mended.
    """

    kind: Kind
    victim: str
    began: float
    ended: float

    @property
    def label(self) -> str:
        """What happened, for people."""
        return f"{FORMS[self.kind].told} ({'hub' if self.victim == HUB else 'all' if self.victim == ALL else 'site'})"


class Told(NamedTuple):
    """All that was written down in a run.

    Attributes:
        sites: By the sites.
        hub: By the hub.
        faults: By who caused them.
    """

    sites: Mapping[str, Sequence[Note]]
    hub: Sequence[Note]
    faults: Sequence[Note]

    @staticmethod
    def of(folder: Path, sites: Sequence[str]) -> "Told":
        """Reads it."""
        by_site = {site: read(folder / f"{site}.jsonl") for site in sites}
        return Told(by_site, read(folder / "hub.jsonl"), read(folder / "faults.jsonl"))

    def spans(self) -> list[Span]:
        """Returns the faults, in the order in which they ended."""
        began: dict[tuple[Kind, str], float] = {}
        spans = []
        for note in (note for note in self.faults if note["what"] in ("begin", "end")):
            key = note["kind"], note["victim"]
            if note["what"] == "begin":
                began[key] = note["at"]
            else:
                spans.append(Span(*key, began.pop(key), note["at"]))
        return spans

    def steps(self, site: str) -> list[Note]:
        """Returns the inner steps of a site."""
        return [note for note in self.sites[site] if note["what"] == "step"]


def of(spans: Iterable[Span], name: str) -> list[Span]:
    """Returns the faults of a site or the hub."""
    return [span for span in spans if span.victim in (name, ALL)]


def returned(told: Told, spans: Sequence[Span], span: Span, site: str) -> Found:
    """Says how a site came back from a fault.

    Returns:
        ``seconds`` from hello, or from the end of the fault if none was needed, to all records applied; ``hello``:
        seconds from the end of the fault to it; ``state``: whether a state had to be fetched; ``rounds``: those that
        closed between then and the first in which it counts, the least over the fragments. Or ``interrupted``: what
        came in between.
    """
    after = [note for note in told.sites[site] if note["at"] > span.ended]
    hellos = [note["at"] for note in told.hub if note["what"] == "hello" and note["site"] == site]
    lost = any(span.began < note["at"] < span.ended + 10 for note in told.sites[site] if note["what"] == "lose")
    needs_hello = span.kind in KILLS or span.kind.startswith(STAGE) or lost
    first = min((at for at in hellos if at > span.ended), default=None) if needs_hello else span.ended
    if first is None:
        return {"interrupted": "the end"}
    up = [note["at"] for note in after if note.get("lag") == 0 and note.get("reachable", True) and note["at"] > first]
    back = min(up, default=None)
    end = back if back is not None else max((note["at"] for note in after), default=span.ended)
    others = [one for one in spans if one != span and one.victim in (site, HUB, ALL)]
    # Who has another fault while the hub has one comes back from that.
    since = {one: span.began - 10 if span.victim == HUB and one.victim == site else span.ended for one in others}
    between = [one for one in others if one.ended > since[one] and one.began < end]
    if between:
        return {"interrupted": between[0].kind, "seconds": None if back is None else back - first}
    if back is None:
        return {"interrupted": "the end"}
    state = any(note["what"] == "adopt" and first <= note["at"] <= back for note in after)
    return {"seconds": back - first, "hello": first - span.ended, "state": state, "rounds": _missed(told, site, back)}


def _missed(told: Told, site: str, since: float) -> int | None:
    """Returns how many rounds closed until one counted a site, in the fragment where that went best."""
    rounds: dict[int, int] = defaultdict(int)
    for note in told.hub:
        if note["what"] == "append" and note["at"] > since:
            if site in [own for own, *_ in note["counted"]]:
                return rounds[note["fragment"]]
            rounds[note["fragment"]] += 1
    return None


def stalls(told: Told, spans: Sequence[Span], site: str) -> Found:
    """Says how long training stood still at a site.

    Returns:
        ``step``: the median of its steps in seconds; ``stalls``: the longest times in which the engine kept training
        from going on while the site was up to date, less those for which the thread was ready and the machine did not
        let it run, or its host did not let the machine; ``raw``: with these; ``returning``: without them, while the
        site made up for what it had missed; ``above``: those of the first above the limit.
    """
    steps = told.steps(site)
    if not steps:
        return {"step": None, "stalls": [], "raw": [], "returning": [], "above": []}
    stopped = [span for span in of(spans, site) if span.kind == "stop"]
    going = [n for n in steps if not any(s.began < n["at"] and n["at"] - n["took"] < s.ended for s in stopped)]
    away = [_away(steps, span) for span in (*of(spans, site), *of(spans, HUB))]
    up = [note for note in going if not any(first < note["at"] <= last for first, last in away)]
    step = median(note["took"] for note in steps)
    return {
        "step": step,
        "stalls": sorted(map(_stall, up))[-5:],
        "raw": sorted(note["stalled"] for note in up)[-5:],
        "returning": sorted(_stall(note) for note in going if note not in up)[-5:],
        "above": [note for note in up if _stall(note) > LONGEST_STALL + step],
    }


def _stall(note: Note) -> float:
    return float(note["stalled"] - note["delayed"] - note.get("stolen", 0.0))


def _away(steps: Sequence[Note], span: Span) -> tuple[float, float]:
    """Returns from when to when a site makes up for what it missed in a fault: until it has applied all again."""
    after = (note["at"] for note in steps if note["at"] > span.ended and note["reachable"] and note["lag"] == 0)
    # A short fault it notices only later.
    return span.ended, max(next(after, steps[-1]["at"]), span.ended + 1.0)


def disagreements(told: Told) -> list[str]:
    """Returns where two sites hold different outer parameters after the same record, or the hub has two histories."""
    keys: dict[tuple[int, int], set[str]] = defaultdict(set)
    digests: dict[tuple[int, int], set[int]] = defaultdict(set)
    for notes in told.sites.values():
        landed = [(n["fragment"], n["round"], n["key"], n["digest"]) for n in notes if n["what"] == "land"]
        # What was refused was not applied.
        refused = {(n["fragment"], n["round"]) for n in notes if n["what"] == "land" and n["how"] == "refuse"}
        landed = [one for one in landed if one[:2] not in refused]
        for fragment, round, key, digest in landed + [tuple(s) for n in notes for s in n.get("states", ())]:
            keys[fragment, round].add(key)
            digests[fragment, round].add(digest)
    for note in told.hub:
        if note["what"] == "append":
            keys[note["fragment"], note["round"]].add(note["key"])
    wrong = [f"fragment {f}, round {r} has {len(own)} records" for (f, r), own in keys.items() if len(own) > 1]
    wrong += [f"fragment {f}, round {r} has {len(own)} digests" for (f, r), own in digests.items() if len(own) > 1]
    return wrong


def counted_twice(told: Told, batch: int) -> list[str]:
    """Returns the sites that were counted for more than they have trained."""
    wrong = []
    for site in told.sites:
        # The last step of each life may not have been written down.
        lives = sum(note["what"] == "up" for note in told.sites[site])
        trained = batch * (len(told.steps(site)) + lives)
        for fragment in {note["fragment"] for note in told.hub if note["what"] == "append"}:
            rounds = {n["round"]: n["counted"] for n in told.hub if n["what"] == "append" and n["fragment"] == fragment}
            counted = sum(weight for own in rounds.values() for name, _, weight in own if name == site)
            if counted > trained:
                wrong.append(f"{site} counts {counted} samples of fragment {fragment}, and has trained {trained}")
    return wrong


def pauses(told: Told, spans: Sequence[Span]) -> list[float]:
    """Returns the seconds between two records while the hub and at least one site were up, the longest ones."""
    times = [note["at"] for note in told.hub if note["what"] == "append"]
    hub = of(spans, HUB)
    sites = {site: of(spans, site) for site in told.sites}

    def quiet(first: float, last: float) -> bool:
        touched = any(span.began < last and first < span.ended + 15 for span in hub)
        return not touched and any(not any(s.began < last and first < s.ended for s in own) for own in sites.values())

    gaps = [b - a for a, b in zip(times, times[1:], strict=False) if quiet(a, b)]
    return sorted(gaps)[-5:]


def differing_ends(told: Told) -> list[str]:
    """Returns whether the run ended with more than one model."""
    outer = {note["outer"] for notes in told.sites.values() for note in notes if note["what"] == "ended"}
    return [f"{len(outer)} different models at the end"] if len(outer) > 1 else []


def examined(told: Told, batch: int) -> Found:
    """Looks at all of it.

    Returns:
        Counts, times, ``slow``: who came back late, and ``problems``: what must not be.
    """
    spans = told.spans()
    sites = {site: stalls(told, spans, site) for site in told.sites}
    returns = [
        {"kind": span.label, "site": site, **returned(told, spans, span, site)}
        for span in spans
        for site in ((span.victim,) if span.victim in told.sites else told.sites)
    ]
    lost = {site: losses(site, notes, told.hub, batch) for site, notes in told.sites.items()}
    problems = disagreements(told) + differing_ends(told) + counted_twice(told, batch)
    problems += [one.problem for own in lost.values() for one in own if one.problem]
    problems += [
        f"{site} stood still for {one['stalled']:.3f} s ({one['stalled'] - _stall(one):.3f} s of it without"
        f" a processor) at step {one['step']}, and a step takes {own['step']:.3f} s"
        for site, own in sites.items()
        for one in own["above"]
    ]
    slow = [
        f"{one['site']} needed {one['seconds']:.1f} s from hello to all records applied: {one['kind']}"
        for one in returns
        if "interrupted" not in one and not one["state"] and one["seconds"] > LONGEST_RETURN
    ]
    longest = pauses(told, spans)
    if longest and longest[-1] > LONGEST_HANG:
        problems.append(f"no record for {longest[-1]:.1f} s, with the hub and a site up")
    kinds = [span.label for span in spans]
    return {
        "faults": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "records": len({(n["fragment"], n["round"]) for n in told.hub if n["what"] == "append"}),
        "steps": sum(len(told.steps(site)) for site in told.sites),
        "lost": {site: own and max(own)._asdict() for site, own in lost.items()},
        "stalls": sites,
        "returns": [one for one in returns if "interrupted" not in one],
        "interrupted": sum("interrupted" in one for one in returns),
        "pauses": longest,
        "slow": slow,
        "problems": problems,
    }
