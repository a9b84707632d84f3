"""What kills cost: a site that is killed may lose what it trained since its last launch or checkpoint, and no more.

[Note: what may be lost] A site's steps are numbered as it made them, over all its lives, those twice that it trained
again from a checkpoint. When a launch counts, all counts that the site had trained until then, but for spans of steps
that may be lost: those between the last launch that counted, or the checkpoint from which the next life went on, and a
kill; and those that were dropped because a contribution came too late, or values were wrong, which the site has told.
When a launch was made is not written down: it was after the landing of the round before, and it was as many steps after
the launch before it as it weighs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.notes import Note

Lengths = Sequence[tuple[int, int]]
"""Spans of steps: after which one each begins, and with which it ends."""


class Counted(NamedTuple):
    """A launch of a site that counts.

    Attributes:
        round: The round.
        life: The number of the life that made it.
        steps: How many steps it counts for.
        made: A step before which it was not made.
    """

    round: int
    life: int
    steps: int
    made: int


@dataclass
class _Life:
    """A start of a site that came to train.

    Attributes:
        began: How many steps the site had made before.
        resumed: The number of the step from which it went on.
        ended: How many steps the site has made with it.
        landed: How many when a round of a fragment landed.
        dropped: What may have dropped something: how, the fragment, the round, and how many steps the site had made.
    """

    began: int
    resumed: int = 0
    ended: int = 0
    landed: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: list[tuple[str, int, int, int]] = field(default_factory=list)


class Loss(NamedTuple):
    """What a site has lost of a fragment, until the last launch that counts.

    Attributes:
        steps: Steps that it has made by then and that do not count, at least.
        most: Steps that may be lost.
        problem: What was lost besides; empty if nothing was.
    """

    steps: int
    most: int
    problem: str


def losses(site: str, notes: Sequence[Note], hub: Sequence[Note], batch: int) -> list[Loss]:
    """Says what a site has lost, for each fragment; see [Note: what may be lost].

    Args:
        site: The site.
        notes: What it has written down.
        hub: What the hub has.
        batch: The samples of a step.
    """
    lives = _lives(notes)
    numbers = _numbers(site, notes, hub)
    fragments = sorted({note["fragment"] for note in hub if note["what"] == "append"})
    return [_loss(site, p, lives, _counted(site, p, lives, numbers, hub, batch)) for p in fragments]


def _lives(notes: Sequence[Note]) -> list[_Life]:
    lives: list[_Life] = []
    for note in notes:
        if note["what"] == "up":
            lives.append(_Life(lives[-1].ended if lives else 0, ended=lives[-1].ended if lives else 0))
            continue
        own = lives[-1]
        match note["what"]:
            case "training":
                own.resumed = note["step"]
            case "step":
                own.ended += 1
            case "land":
                own.landed[note["fragment"], note["round"]] = own.ended
                if note["how"] not in ("mix", "carry"):
                    own.dropped.append((note["how"], note["fragment"], note["round"], own.ended))
            case "adopt":
                own.dropped += [("adopt", fragment, round, own.ended) for fragment, round, *_ in note["states"]]
    return lives


def _numbers(site: str, notes: Sequence[Note], hub: Sequence[Note]) -> dict[str, int]:
    """Returns the number of each life that the hub has heard of."""
    starts = [note["at"] for note in notes if note["what"] == "up"]
    hellos = [note for note in hub if note["what"] == "hello" and note["site"] == site]
    return {note["life"]: max(0, sum(start < note["at"] for start in starts) - 1) for note in reversed(hellos)}


def _counted(
    site: str, fragment: int, lives: Sequence[_Life], numbers: Mapping[str, int], hub: Sequence[Note], batch: int
) -> list[Counted]:
    """Returns the launches of a fragment that count, in the order of their rounds."""
    rounds = {n["round"]: n["counted"] for n in hub if n["what"] == "append" and n["fragment"] == fragment}
    launches: list[Counted] = []
    last: dict[int, Counted] = {}
    for round in sorted(rounds):
        for name, life, weight in rounds[round]:
            if name != site:
                continue
            number, steps = numbers.get(life, 0), weight // batch
            made = lives[number].landed.get((fragment, round - 1), lives[number].began)
            if number in last:
                made = max(made, last[number].made + steps)
            launches.append(Counted(round, number, steps, made))
            last[number] = launches[-1]
    return launches


def _loss(site: str, fragment: int, lives: Sequence[_Life], launches: Sequence[Counted]) -> Loss:
    spans = [*_lost_in_kills(lives, launches), *_dropped(fragment, lives, launches)]
    counted, lost, most, problem = 0, 0, 0, ""
    for own in launches:
        counted += own.steps
        lost, most = max(0, own.made - counted), _length(spans, own.made)
        if lost > most and not problem:
            problem = f"{site} has lost {lost} steps of fragment {fragment} by round {own.round}, and may lose {most}"
    return Loss(lost, most, problem)


def _lost_in_kills(lives: Sequence[_Life], launches: Sequence[Counted]) -> Lengths:
    """Returns the spans before kills: since the last launch that counts, or the checkpoint, whichever was later."""
    spans = []
    trained = [own for own in lives if own.ended > own.began]
    made: dict[int, int] = defaultdict(int)
    for own in launches:
        made[own.life] = max(made[own.life], own.made)
    for own, after in zip(trained, trained[1:], strict=False):
        # A life that began with an earlier checkpoint, or none, lacks all that this one has trained.
        saved = own.began + after.resumed - own.resumed if after.resumed >= own.resumed else 0
        launched = max((at for life, at in made.items() if life <= lives.index(own)), default=0)
        spans.append((min(max(saved, launched), own.ended), own.ended))
    return spans


def _dropped(fragment: int, lives: Sequence[_Life], launches: Sequence[Counted]) -> Lengths:
    """Returns the spans that a landing or a state dropped."""
    spans = []
    for number, own in enumerate(lives):
        for how, of, round, at in own.dropped:
            # What an earlier life has had counted is taken before the first step; nothing comes after the last round.
            if of != fragment or how == "take":
                continue
            made = max((one.made for one in launches if one.round < round), default=0)
            after = [one for one in launches if one.round > round and one.life == number]
            # What the next launch of this life counts for was not dropped.
            last = min((own.landed.get((fragment, one.round), at + one.steps) - one.steps for one in after), default=at)
            spans.append((made, min(at, last)))
    return spans


def _length(spans: Iterable[tuple[int, int]], until: int) -> int:
    """Returns how many steps are in some span, up to one of them."""
    inside: set[int] = set()
    for first, last in spans:
        inside.update(range(first, min(last, until)))
    return len(inside)
