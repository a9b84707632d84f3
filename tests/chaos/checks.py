"""Examines the notes of a run with faults: who stood still, came back, agrees, and lost steps.

[Note: steps that may be lost] A site's steps are numbered in the order in which it made them, over
all its incarnations; steps that it trained again from a checkpoint have two numbers. When a launch
counts, all steps that the site had trained until then count, except for spans of steps that may be
lost: those between the last launch that counted, or the checkpoint from which the next incarnation
resumed, and a kill; and those that were dropped because a contribution came too late or its values
were wrong, which the site notes. The step of a launch is not written down: the launch was made
after the landing of the round before, and as many steps after the launch before it as it weighs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# landings with which a contribution of the site was not dropped
_KEPT = ("mix", "carry", "take")

Found = dict[str, Any]


@dataclass(frozen=True)
class Span(Fault):
    """A fault, with the times at which it began and ended."""

    began: float = 0.0
    ended: float = 0.0

    def concerns(self, site: str) -> bool:
        return self.victim in (site, HUB, ALL)

    @property
    def label(self) -> str:
        victim = {HUB: "hub", ALL: "all"}.get(self.victim, "site")
        return f"{FORMS[self.kind].label} ({victim})"


class Told(NamedTuple):
    """All notes of a run: by the sites, by the hub, and by the one who caused the faults."""

    sites: Mapping[str, Sequence[Note]]
    hub: Sequence[Note]
    faults: Sequence[Note]

    @staticmethod
    def of(folder: Path, sites: Sequence[str]) -> "Told":
        by_site = {site: read(folder / f"{site}.jsonl") for site in sites}
        return Told(by_site, read(folder / "hub.jsonl"), read(folder / "faults.jsonl"))

    def spans(self) -> list[Span]:
        """The faults, in the order in which they ended."""
        begin_times = {}
        spans = []
        for note in self.faults:
            key = note["kind"], note["victim"]
            if note["what"] == "begin":
                begin_times[key] = note["at"]
            else:
                began = begin_times.pop(key)
                ended = note["at"]
                spans.append(Span(*key, ended - began, began=began, ended=ended))
        return spans

    def of_site(self, site: str, event: str) -> list[Note]:
        return [note for note in self.sites[site] if note["what"] == event]

    def steps(self, site: str) -> list[Note]:
        return self.of_site(site, "step")

    def ends(self) -> list[Note]:
        return [note for site in self.sites for note in self.of_site(site, "ended")]

    def hellos(self, site: str) -> list[Note]:
        return [note for note in self.hub if note["what"] == "hello" and note["site"] == site]

    def records(self) -> list[Note]:
        """The records, as they closed; one of a hub that died may be there twice."""
        return [note for note in self.hub if note["what"] == "append"]

    def fragments(self) -> list[int]:
        return sorted({record["fragment"] for record in self.records()})

    def contributions(self, site: str, fragment: int) -> list[tuple[int, str, int]]:
        """The contributions of a site that count: round, incarnation and weight, by round."""
        counted_by_round = {
            record["round"]: record["counted"]
            for record in self.records()
            if record["fragment"] == fragment
        }
        return [
            (round, incarnation, weight)
            for round, counted in sorted(counted_by_round.items())
            for name, incarnation, weight in counted
            if name == site
        ]


def _is_up_to_date(step: Note) -> bool:
    return bool(step["reachable"] and step["lag"] == 0)


def returned(run_notes: Told, spans: Sequence[Span], span: Span, site: str) -> Found | None:
    """Tells how a site came back from a fault; None if something else came in between.

    Returns:
        The seconds from the end of the fault to hello, those from there (or from the end if no
        hello was needed) to all records applied, and whether a state was fetched.
    """
    hello = _hello_after(run_notes, span, site)
    if hello is None:
        return None
    steps = run_notes.steps(site)
    up_to_date_times = [step["at"] for step in steps if step["at"] > hello and _is_up_to_date(step)]
    if not up_to_date_times:
        return None
    returned_at = min(up_to_date_times)
    if _is_interrupted(spans, span, site, returned_at):
        return None
    adoptions = run_notes.of_site(site, "adopt")
    state_is_fetched = any(hello <= note["at"] <= returned_at for note in adoptions)
    return {
        "seconds": returned_at - hello,
        "hello": hello - span.ended,
        "state": state_is_fetched,
    }


def _is_interrupted(spans: Sequence[Span], span: Span, site: str, returned_at: float) -> bool:
    # A site that has another fault while the hub has one comes back from that.
    earliest = span.began - 10 if span.victim == HUB else span.ended
    for later_span in spans:
        since = earliest if later_span.victim == site else span.ended
        overlaps = later_span.ended > since and later_span.began < returned_at
        if overlaps and later_span != span and later_span.concerns(site):
            return True
    return False


def _hello_after(run_notes: Told, span: Span, site: str) -> float | None:
    """When a site said hello after a fault; the end of the fault if it needed not to; None if it
    never did.
    """
    losses_of_hub = run_notes.of_site(site, "lose")
    lost_hub = any(span.began < note["at"] < span.ended + 10 for note in losses_of_hub)
    if not (FORMS[span.kind].kills or lost_hub):
        return span.ended
    times = (note["at"] for note in run_notes.hellos(site))
    return min((time for time in times if time > span.ended), default=None)


def stalls(run_notes: Told, spans: Sequence[Span], site: str) -> Found:
    """The median of a site's steps in seconds, and the longest stalls of training by the engine:
    while the site was up to date, and while it made up for missed rounds; and the notes of the
    first above the limit.
    """
    steps = run_notes.steps(site)
    if not steps:
        return {"step": None, "stalls": [], "returning": [], "above": []}
    stops = [span for span in spans if span.kind == "stop" and span.hits(site)]
    running = [step for step in steps if not any(_overlaps(stop, step) for stop in stops)]
    catch_ups = _catch_ups(spans, site, steps)
    up_to_date = [step for step in running if not _is_in(catch_ups, step)]
    returning = [step for step in running if _is_in(catch_ups, step)]
    step_seconds = median(step["took"] for step in steps)
    return {
        "step": step_seconds,
        "stalls": sorted(map(_stall, up_to_date))[-5:],
        "returning": sorted(map(_stall, returning))[-5:],
        "above": [step for step in up_to_date if _stall(step) > LONGEST_STALL + step_seconds],
    }


def _overlaps(fault: Span, step: Note) -> bool:
    return bool(fault.began < step["at"] and step["at"] - step["took"] < fault.ended)


def _is_in(times: Sequence[tuple[float, float]], step: Note) -> bool:
    return any(first < step["at"] <= last for first, last in times)


def _catch_ups(
    spans: Sequence[Span], site: str, steps: Sequence[Note]
) -> list[tuple[float, float]]:
    """The times in which a site made up for the rounds that it missed by a fault, until it had
    applied all records again. It notices a short fault only later.
    """
    catch_ups = []
    up_to_date_times = [step["at"] for step in steps if _is_up_to_date(step)]
    for span in spans:
        if span.hits(site) or span.hits(HUB):
            later_times = [time for time in up_to_date_times if time > span.ended]
            caught_up = min(later_times, default=steps[-1]["at"])
            catch_ups.append((span.ended, max(caught_up, span.ended + 1.0)))
    return catch_ups


def _stall(step: Note) -> float:
    """Less the time for which the thread was ready and the machine did not let it run, or its host
    the machine.
    """
    return float(step["stalled"] - step["delayed"] - step.get("stolen", 0.0))


def disagreements(run_notes: Told) -> list[str]:
    """The records after which two sites hold different outer parameters, or that have two
    histories.
    """
    keys: dict[tuple[int, int], set[str]] = defaultdict(set)
    digests: dict[tuple[int, int], set[int]] = defaultdict(set)
    for notes in run_notes.sites.values():
        for fragment, round, key, digest in _states_applied(notes):
            keys[fragment, round].add(key)
            digests[fragment, round].add(digest)
    for record in run_notes.records():
        keys[record["fragment"], record["round"]].add(record["key"])
    problems = []
    for name, values_by_round in (("records", keys), ("digests", digests)):
        for (fragment, round), values in values_by_round.items():
            if len(values) > 1:
                problems.append(f"fragment {fragment}, round {round} has {len(values)} {name}")
    models = {note["outer"] for note in run_notes.ends()}
    if len(models) > 1:
        problems.append(f"{len(models)} different models at the end")
    return problems


def _states_applied(notes: Sequence[Note]) -> Iterator[tuple[int, int, str, int]]:
    """Yields fragment, round, key and digest of each record and each state that a site applied."""
    landings = [note for note in notes if note["what"] == "land"]
    refused = {
        (landing["fragment"], landing["round"])
        for landing in landings
        if landing["how"] == "refuse"
    }
    for landing in landings:
        fragment = landing["fragment"]
        round = landing["round"]
        if (fragment, round) not in refused:
            yield fragment, round, landing["key"], landing["digest"]
    for note in notes:
        for fragment, round, key, digest in note.get("states", ()):
            yield fragment, round, key, digest


def counted_twice(run_notes: Told, batch: int) -> list[str]:
    """The sites that were counted for more than they have trained."""
    problems = []
    for site in run_notes.sites:
        # The last step of each incarnation may not have been written down.
        steps = len(run_notes.steps(site)) + len(run_notes.of_site(site, "up"))
        trained = batch * steps
        for fragment in run_notes.fragments():
            counted = sum(weight for *_, weight in run_notes.contributions(site, fragment))
            if counted > trained:
                problems.append(
                    f"{site} counts {counted} samples of fragment {fragment}, and has trained"
                    f" {trained}"
                )
    return problems


def pauses(run_notes: Told, spans: Sequence[Span]) -> list[float]:
    """The longest pauses in seconds between two records while the hub and at least one site were
    up.
    """

    def is_up(name: str, first: float, last: float, after: float = 0.0) -> bool:
        return not any(
            span.hits(name) and span.began < last and first < span.ended + after for span in spans
        )

    times = [record["at"] for record in run_notes.records()]
    lengths = []
    for first, last in zip(times, times[1:], strict=False):
        a_site_is_up = any(is_up(site, first, last) for site in run_notes.sites)
        if a_site_is_up and is_up(HUB, first, last, after=15):
            lengths.append(last - first)
    return sorted(lengths)[-5:]


# Lost steps


class Launch(NamedTuple):
    """A launch of a site that counts."""

    round: int
    incarnation: int  # the number of the incarnation that made it
    steps: int  # for which it counts
    earliest: int  # the number of the first step after which it can have been made


class Drop(NamedTuple):
    fragment: int
    round: int
    step: int  # after which it was dropped


@dataclass
class Incarnation:
    """A start of a site that came to train; steps are numbered over all incarnations."""

    began: int  # how many steps the site had made before
    ended: int  # how many it had made at the end of this incarnation
    resumed: int = 0  # the step of the checkpoint from which it resumed
    # how many steps were made, by fragment and round
    landed: dict[tuple[int, int], int] = field(default_factory=dict)
    drops: list[Drop] = field(default_factory=list)


def incarnations_of(notes: Sequence[Note]) -> list[Incarnation]:
    """The incarnations of a site, by its notes."""
    incarnations: list[Incarnation] = []
    for note in notes:
        if note["what"] == "up":
            steps = incarnations[-1].ended if incarnations else 0
            incarnations.append(Incarnation(began=steps, ended=steps))
        else:
            _follow(incarnations[-1], note)
    return incarnations


def _follow(incarnation: Incarnation, note: Note) -> None:
    match note["what"]:
        case "training":
            incarnation.resumed = note["step"]
        case "step":
            incarnation.ended += 1
        case "land":
            incarnation.landed[note["fragment"], note["round"]] = incarnation.ended
            # A landing takes first what an earlier incarnation has had counted; after the last
            # one nothing follows.
            if note["how"] not in _KEPT:
                drop = Drop(note["fragment"], note["round"], incarnation.ended)
                incarnation.drops.append(drop)
        case "adopt":
            for fragment, round, *_ in note["states"]:
                incarnation.drops.append(Drop(fragment, round, incarnation.ended))


class Loss(NamedTuple):
    """Steps of a site that do not count; see [Note: steps that may be lost]."""

    steps: int  # made by the last launch that counts, and not counted, at least
    most: int  # that may be lost
    problem: str  # empty where no more was lost than may be


def losses(site: str, run_notes: Told, batch: int) -> list[Loss]:
    """The steps that a site has lost of each fragment until the last launch that counts."""
    incarnations = incarnations_of(run_notes.sites[site])
    numbers = _numbers_of_incarnations(site, run_notes)
    lost = []
    for fragment in run_notes.fragments():
        launches: list[Launch] = []
        for round, name, weight in run_notes.contributions(site, fragment):
            number = numbers.get(name, 0)
            launch = Launch(round, number, weight // batch, earliest=0)
            earliest = _earliest(launch, fragment, incarnations[number], launches)
            launches.append(launch._replace(earliest=earliest))
        spans = _before_kills(incarnations, launches)
        spans += _dropped(fragment, incarnations, launches)
        lost.append(_loss(site, fragment, launches, spans))
    return lost


def _earliest(
    launch: Launch, fragment: int, incarnation: Incarnation, earlier: Sequence[Launch]
) -> int:
    earliest = incarnation.landed.get((fragment, launch.round - 1), incarnation.began)
    of_incarnation = [before for before in earlier if before.incarnation == launch.incarnation]
    if of_incarnation:
        earliest = max(earliest, of_incarnation[-1].earliest + launch.steps)
    return earliest


def _numbers_of_incarnations(site: str, run_notes: Told) -> dict[str, int]:
    """The number of each incarnation of a site that said hello, by its name."""
    starts = [note["at"] for note in run_notes.of_site(site, "up")]
    numbers: dict[str, int] = {}
    for hello in run_notes.hellos(site):
        starts_before = sum(start < hello["at"] for start in starts)
        numbers.setdefault(hello["incarnation"], max(0, starts_before - 1))
    return numbers


def _loss(
    site: str, fragment: int, launches: Sequence[Launch], spans: Sequence[tuple[int, int]]
) -> Loss:
    loss = Loss(0, 0, "")
    counted = 0
    problem = ""
    for launch in launches:
        counted += launch.steps
        may_be_lost: set[int] = set()
        for first, end in spans:
            may_be_lost.update(range(first, min(end, launch.earliest)))
        most = len(may_be_lost)
        missing = max(0, launch.earliest - counted)
        if missing > most and not problem:
            problem = (
                f"{site} has lost {missing} steps of fragment {fragment} by round {launch.round},"
                f" and may lose {most}"
            )
        loss = Loss(missing, most, problem)
    return loss


def _before_kills(
    incarnations: Sequence[Incarnation], launches: Sequence[Launch]
) -> list[tuple[int, int]]:
    """The spans before kills: since the last launch that counts, or the checkpoint, whichever was
    later.
    """
    spans = []
    trained = [
        (number, incarnation)
        for number, incarnation in enumerate(incarnations)
        if incarnation.ended > incarnation.began
    ]
    for (number, killed), (_, successor) in zip(trained, trained[1:], strict=False):
        saved = 0
        # A successor that began with an earlier checkpoint, or none, lacks all that the killed
        # incarnation has trained.
        if successor.resumed >= killed.resumed:
            saved = killed.began + successor.resumed - killed.resumed
        launched = _last_launch(launch for launch in launches if launch.incarnation <= number)
        spans.append((min(max(saved, launched), killed.ended), killed.ended))
    return spans


def _last_launch(launches: Iterable[Launch]) -> int:
    return max((launch.earliest for launch in launches), default=0)


def _dropped(
    fragment: int, incarnations: Sequence[Incarnation], launches: Sequence[Launch]
) -> list[tuple[int, int]]:
    """The spans that a landing or a state dropped."""
    spans = []
    for number, incarnation in enumerate(incarnations):
        for drop in incarnation.drops:
            if drop.fragment != fragment:
                continue
            first = _last_launch(launch for launch in launches if launch.round < drop.round)
            end = drop.step
            # Steps for which a later launch of this incarnation counts were not dropped.
            for launch in launches:
                if launch.round > drop.round and launch.incarnation == number:
                    fallback = drop.step + launch.steps
                    landed = incarnation.landed.get((fragment, launch.round), fallback)
                    end = min(end, landed - launch.steps)
            spans.append((first, end))
    return spans


def examined(run_notes: Told, batch: int) -> Found:
    """Counts, times, late returns, and the problems: what must not be."""
    spans = run_notes.spans()
    sites = {site: stalls(run_notes, spans, site) for site in run_notes.sites}
    lost = {site: losses(site, run_notes, batch) for site in run_notes.sites}
    longest_pauses = pauses(run_notes, spans)
    hits = [(span, site) for span in spans for site in filter(span.concerns, run_notes.sites)]
    returns = []
    for span, site in hits:
        findings = returned(run_notes, spans, span, site)
        if findings is not None:
            returns.append({"kind": span.label, "site": site, **findings})
    records = {(record["fragment"], record["round"]) for record in run_notes.records()}
    return {
        "faults": dict(Counter(sorted(span.label for span in spans))),
        "records": len(records),
        "steps": sum(len(run_notes.steps(site)) for site in run_notes.sites),
        "lost": {site: _worst(lost_of_site) for site, lost_of_site in lost.items()},
        "stalls": sites,
        "returns": returns,
        "interrupted": len(hits) - len(returns),
        "pauses": longest_pauses,
        "slow": _slow_returns(returns),
        "problems": [
            *disagreements(run_notes),
            *counted_twice(run_notes, batch),
            *_losses_beyond_limit(lost),
            *_long_stalls(sites),
            *_long_pauses(longest_pauses),
        ],
    }


def _losses_beyond_limit(lost: Mapping[str, Sequence[Loss]]) -> list[str]:
    return [loss.problem for of_site in lost.values() for loss in of_site if loss.problem]


def _worst(lost: Sequence[Loss]) -> Found:
    if not lost:
        return {}
    worst = max(lost)
    return {"steps": worst.steps, "most": worst.most}


def _slow_returns(returns: Sequence[Found]) -> list[str]:
    return [
        f"{findings['site']} needed {findings['seconds']:.1f} s from hello to all records applied:"
        f" {findings['kind']}"
        for findings in returns
        if findings["seconds"] > LONGEST_RETURN and not findings["state"]
    ]


def _long_stalls(sites: Mapping[str, Found]) -> list[str]:
    problems = []
    for site, stalls_of_site in sites.items():
        for step in stalls_of_site["above"]:
            without_processor = step["stalled"] - _stall(step)
            problems.append(
                f"{site} stood still for {step['stalled']:.3f} s ({without_processor:.3f} s of it"
                f" without a processor) at step {step['step']}, and a step takes"
                f" {stalls_of_site['step']:.3f} s"
            )
    return problems


def _long_pauses(seconds: Sequence[float]) -> list[str]:
    if not seconds or seconds[-1] <= LONGEST_HANG:
        return []
    return [f"no record for {seconds[-1]:.1f} s, with the hub and a site up"]
