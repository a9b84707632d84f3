"""What became of a run with faults, by what its processes wrote down: who stood still, came back,
agrees, lost what.

[Note: what may be lost] A site's steps are numbered as it made them, over all its incarnations,
those twice that it trained again from a checkpoint. When a launch counts, all counts that the site
had trained until then, but for spans of steps that may be lost: those between the last launch that
counted, or the checkpoint from which the next incarnation went on, and a kill; and those that were
dropped because a contribution came too late, or values were wrong, which the site has told. When a
launch was made is not written down: it was after the landing of the round before, and it was as
many steps after the launch before it as it weighs.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.chaos.faults import ALL, FORMS, HUB, Fault
from tests.chaos.notes import Note, read

# seconds, with one step more, for which training may stand still because others have faults
LONGEST_STALL = 0.1
LONGEST_RETURN = 3.0  # seconds from hello to all records applied, without the transfer of a state
LONGEST_HANG = 30.0

Found = dict[str, Any]


@dataclass(frozen=True)
class Span(Fault):
    """A fault, with the times at which it began and was mended."""

    began: float = 0.0
    ended: float = 0.0

    @property
    def label(self) -> str:
        return f"{FORMS[self.kind].told} ({'hub' if self.victim == HUB else 'all' if self.victim == ALL else 'site'})"


class Told(NamedTuple):
    """All that was written down in a run: by the sites, by the hub, and by who caused the
    faults.
    """

    sites: Mapping[str, Sequence[Note]]
    hub: Sequence[Note]
    faults: Sequence[Note]

    @staticmethod
    def of(folder: Path, sites: Sequence[str]) -> "Told":
        by_site = {site: read(folder / f"{site}.jsonl") for site in sites}
        return Told(by_site, read(folder / "hub.jsonl"), read(folder / "faults.jsonl"))

    def spans(self) -> list[Span]:
        """The faults, in the order in which they ended."""
        began = {}
        spans = []
        for note in self.faults:
            key = note["kind"], note["victim"]
            if note["what"] == "begin":
                began[key] = note["at"]
            else:
                first = began.pop(key)
                spans.append(Span(*key, note["at"] - first, began=first, ended=note["at"]))
        return spans

    def steps(self, site: str) -> list[Note]:
        return [note for note in self.sites[site] if note["what"] == "step"]

    def records(self) -> list[Note]:
        """The records, as they closed; one of a hub that died may be there twice."""
        return [note for note in self.hub if note["what"] == "append"]


def returned(told: Told, spans: Sequence[Span], span: Span, site: str) -> Found:
    """How a site came back from a fault: seconds from the end of it to hello, and from there, or
    from the end if none was needed, to all records applied; whether a state had to be fetched. Or
    what came in between."""
    after = [note for note in told.sites[site] if note["at"] > span.ended]
    hellos = [note["at"] for note in told.hub if note["what"] == "hello" and note["site"] == site]
    lost = any(
        span.began < note["at"] < span.ended + 10
        for note in told.sites[site]
        if note["what"] == "lose"
    )
    needs_hello = FORMS[span.kind].kills or lost
    first = (
        min((at for at in hellos if at > span.ended), default=None) if needs_hello else span.ended
    )
    if first is None:
        return {"interrupted": "the end"}
    up = [
        note["at"]
        for note in after
        if note.get("lag") == 0 and note.get("reachable", True) and note["at"] > first
    ]
    back = min(up, default=None)
    end = back if back is not None else max((note["at"] for note in after), default=span.ended)
    for one in spans:
        # Who has another fault while the hub has one comes back from that.
        since = span.began - 10 if span.victim == HUB and one.victim == site else span.ended
        if one != span and one.victim in (site, HUB, ALL) and one.ended > since and one.began < end:
            return {"interrupted": one.kind, "seconds": None if back is None else back - first}
    if back is None:
        return {"interrupted": "the end"}
    state = any(note["what"] == "adopt" and first <= note["at"] <= back for note in after)
    return {"seconds": back - first, "hello": first - span.ended, "state": state}


def stalls(told: Told, spans: Sequence[Span], site: str) -> Found:
    """The median of a site's steps in seconds, and the longest for which the engine kept training
    from going on: while the site was up to date, and while it made up for what it had missed; and
    the notes of the first above the limit."""
    steps = told.steps(site)
    if not steps:
        return {"step": None, "stalls": [], "returning": [], "above": []}
    stopped = [span for span in spans if span.kind == "stop" and span.hits(site)]
    going = [
        n
        for n in steps
        if not any(s.began < n["at"] and n["at"] - n["took"] < s.ended for s in stopped)
    ]
    away = []
    for span in spans:
        if span.hits(site) or span.hits(HUB):
            # Until it has applied all again it makes up for what it missed. A short fault it
            # notices only later.
            back = (
                note["at"]
                for note in steps
                if note["at"] > span.ended and note["reachable"] and note["lag"] == 0
            )
            away.append((span.ended, max(next(back, steps[-1]["at"]), span.ended + 1.0)))
    up = [note for note in going if not any(first < note["at"] <= last for first, last in away)]
    step = median(note["took"] for note in steps)
    return {
        "step": step,
        "stalls": sorted(map(_stall, up))[-5:],
        "returning": sorted(_stall(note) for note in going if note not in up)[-5:],
        "above": [note for note in up if _stall(note) > LONGEST_STALL + step],
    }


def _stall(note: Note) -> float:
    """Less the time for which the thread was ready and the machine did not let it run, or its host
    the machine.
    """
    return float(note["stalled"] - note["delayed"] - note.get("stolen", 0.0))


def disagreements(told: Told) -> list[str]:
    """Where two sites hold different outer parameters after the same record, or there are two
    histories.
    """
    keys: dict[tuple[int, int], set[str]] = defaultdict(set)
    digests: dict[tuple[int, int], set[int]] = defaultdict(set)
    for notes in told.sites.values():
        lands = [note for note in notes if note["what"] == "land"]
        # What was refused was not applied.
        refused = {(n["fragment"], n["round"]) for n in lands if n["how"] == "refuse"}
        held = [(n["fragment"], n["round"], n["key"], n["digest"]) for n in lands]
        held = [one for one in held if one[:2] not in refused]
        for fragment, round, key, digest in held + [
            tuple(s) for n in notes for s in n.get("states", ())
        ]:
            keys[fragment, round].add(key)
            digests[fragment, round].add(digest)
    for note in told.records():
        keys[note["fragment"], note["round"]].add(note["key"])
    wrong = [
        f"fragment {f}, round {r} has {len(own)} records"
        for (f, r), own in keys.items()
        if len(own) > 1
    ]
    wrong += [
        f"fragment {f}, round {r} has {len(own)} digests"
        for (f, r), own in digests.items()
        if len(own) > 1
    ]
    ends = {
        note["outer"] for notes in told.sites.values() for note in notes if note["what"] == "ended"
    }
    return wrong + ([f"{len(ends)} different models at the end"] if len(ends) > 1 else [])


def counted_twice(told: Told, batch: int) -> list[str]:
    """The sites that were counted for more than they have trained."""
    wrong = []
    for site in told.sites:
        # The last step of each incarnation may not have been written down.
        incarnations = sum(note["what"] == "up" for note in told.sites[site])
        trained = batch * (len(told.steps(site)) + incarnations)
        for fragment in {note["fragment"] for note in told.records()}:
            rounds = {
                note["round"]: note["counted"]
                for note in told.records()
                if note["fragment"] == fragment
            }
            counted = sum(
                weight for own in rounds.values() for name, _, weight in own if name == site
            )
            if counted > trained:
                wrong.append(
                    f"{site} counts {counted} samples of fragment {fragment}, and has trained"
                    f" {trained}"
                )
    return wrong


def pauses(told: Told, spans: Sequence[Span]) -> list[float]:
    """The seconds between two records while the hub and at least one site were up, the longest
    ones.
    """

    def up(name: str, first: float, last: float, after: float = 0.0) -> bool:
        return not any(
            span.hits(name) and span.began < last and first < span.ended + after for span in spans
        )

    times = [note["at"] for note in told.records()]
    pairs = zip(times, times[1:], strict=False)
    return sorted(
        b - a for a, b in pairs if up(HUB, a, b, 15) and any(up(site, a, b) for site in told.sites)
    )[-5:]


# What is lost


class Counted(NamedTuple):
    """A launch of a site that counts."""

    round: int
    incarnation: int  # the number of the incarnation that made it
    steps: int  # for how many it counts
    made: int  # a step before which it was not made


@dataclass
class Incarnation:
    """A start of a site that came to train; steps are numbered over all incarnations."""

    began: int  # how many steps the site had made before
    ended: int  # and with it
    resumed: int = 0  # the number of the step from which it went on
    landed: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # by fragment and round: how many were made
    dropped: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # fragment, round and steps made, at a drop


def incarnations_of(notes: Sequence[Note]) -> list[Incarnation]:
    """The incarnations of a site, by what it has written down."""
    incarnations: list[Incarnation] = []
    for note in notes:
        match note["what"]:
            case "up":
                before = incarnations[-1].ended if incarnations else 0
                incarnations.append(Incarnation(before, before))
            case "training":
                incarnations[-1].resumed = note["step"]
            case "step":
                incarnations[-1].ended += 1
            case "land":
                incarnations[-1].landed[note["fragment"], note["round"]] = incarnations[-1].ended
                # What an earlier incarnation has had counted is taken first of all; nothing comes
                # after the last.
                if note["how"] not in ("mix", "carry", "take"):
                    incarnations[-1].dropped.append(
                        (note["fragment"], note["round"], incarnations[-1].ended)
                    )
            case "adopt":
                ended = incarnations[-1].ended
                incarnations[-1].dropped += [
                    (fragment, round, ended) for fragment, round, *_ in note["states"]
                ]
    return incarnations


def losses(site: str, told: Told, batch: int) -> list[tuple[int, int, str]]:
    """What a site has lost of each fragment until the last launch that counts; see [Note: what may
    be lost].

    Steps that it has made by then and that do not count, at least; those that may be lost; what was
    lost besides.
    """
    incarnations = incarnations_of(told.sites[site])
    starts = [note["at"] for note in told.sites[site] if note["what"] == "up"]
    hellos = [note for note in told.hub if note["what"] == "hello" and note["site"] == site]
    numbers = {
        own["incarnation"]: max(0, sum(at < own["at"] for at in starts) - 1)
        for own in reversed(hellos)
    }
    lost = []
    for fragment in sorted({note["fragment"] for note in told.records()}):
        rounds = {
            note["round"]: note["counted"]
            for note in told.records()
            if note["fragment"] == fragment
        }
        counts = [
            (round, own) for round in sorted(rounds) for own in rounds[round] if own[0] == site
        ]
        launches: list[Counted] = []
        last: dict[int, int] = {}
        for round, (_, incarnation, weight) in counts:
            number = numbers.get(incarnation, 0)
            steps = weight // batch
            made = incarnations[number].landed.get(
                (fragment, round - 1), incarnations[number].began
            )
            last[number] = made = max(made, last[number] + steps) if number in last else made
            launches.append(Counted(round, number, steps, made))
        spans = [
            *_before_kills(incarnations, launches),
            *_dropped(fragment, incarnations, launches),
        ]
        counted = 0
        missing = 0
        most = 0
        problem = ""
        for own in launches:
            counted += own.steps
            inside = {step for first, end in spans for step in range(first, min(end, own.made))}
            missing = max(0, own.made - counted)
            most = len(inside)
            if missing > most and not problem:
                problem = (
                    f"{site} has lost {missing} steps of fragment {fragment} by round {own.round}"
                )
                problem += f", and may lose {most}"
        lost.append((missing, most, problem))
    return lost


def _before_kills(
    incarnations: Sequence[Incarnation], launches: Sequence[Counted]
) -> list[tuple[int, int]]:
    """The spans before kills: since the last launch that counts, or the checkpoint, whichever was
    later.
    """
    spans = []
    trained = [own for own in incarnations if own.ended > own.began]
    for own, after in zip(trained, trained[1:], strict=False):
        # An incarnation that began with an earlier checkpoint, or none, lacks all that this one has
        # trained.
        saved = own.began + after.resumed - own.resumed if after.resumed >= own.resumed else 0
        launched = max(
            (one.made for one in launches if one.incarnation <= incarnations.index(own)), default=0
        )
        spans.append((min(max(saved, launched), own.ended), own.ended))
    return spans


def _dropped(
    fragment: int, incarnations: Sequence[Incarnation], launches: Sequence[Counted]
) -> list[tuple[int, int]]:
    """The spans that a landing or a state dropped."""
    spans = []
    for number, own in enumerate(incarnations):
        for round, at in [(round, at) for of, round, at in own.dropped if of == fragment]:
            made = max((one.made for one in launches if one.round < round), default=0)
            after = [one for one in launches if one.round > round and one.incarnation == number]
            # What the next launch of this incarnation counts for was not dropped.
            last = min(
                (
                    own.landed.get((fragment, one.round), at + one.steps) - one.steps
                    for one in after
                ),
                default=at,
            )
            spans.append((made, min(at, last)))
    return spans


def examined(told: Told, batch: int) -> Found:
    """Counts, times, who came back late, and the problems: what must not be."""
    spans = told.spans()
    sites = {site: stalls(told, spans, site) for site in told.sites}
    hit = [(span, site) for span in spans for site in told.sites if span.victim in (site, HUB, ALL)]
    returns = [
        {"kind": span.label, "site": site, **returned(told, spans, span, site)}
        for span, site in hit
    ]
    lost = {site: losses(site, told, batch) for site in told.sites}
    problems = disagreements(told) + counted_twice(told, batch)
    problems += [problem for own in lost.values() for *_, problem in own if problem]
    problems += [
        f"{site} stood still for {one['stalled']:.3f} s ({one['stalled'] - _stall(one):.3f} s of it"
        f" without a processor) at step {one['step']}, and a step takes {own['step']:.3f} s"
        for site, own in sites.items()
        for one in own["above"]
    ]
    longest = pauses(told, spans)
    if longest and longest[-1] > LONGEST_HANG:
        problems.append(f"no record for {longest[-1]:.1f} s, with the hub and a site up")
    back = [one for one in returns if "interrupted" not in one]
    late = [one for one in back if not one["state"] and one["seconds"] > LONGEST_RETURN]
    return {
        "faults": dict(Counter(sorted(span.label for span in spans))),
        "records": len({(note["fragment"], note["round"]) for note in told.records()}),
        "steps": sum(len(told.steps(site)) for site in told.sites),
        "lost": {
            site: own and dict(zip(("steps", "most"), max(own), strict=False))
            for site, own in lost.items()
        },
        "stalls": sites,
        "returns": back,
        "interrupted": len(returns) - len(back),
        "pauses": longest,
        "slow": [
            f"{one['site']} needed {one['seconds']:.1f} s from hello to all records applied:"
            f" {one['kind']}"
            for one in late
        ],
        "problems": problems,
    }
