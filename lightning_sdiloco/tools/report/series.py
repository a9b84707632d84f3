"""Turns the records of a run into numbers over time: arithmetic on spans, no pictures."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from lightning_sdiloco.engine import Span
from lightning_sdiloco.lightning import LandingRecord, Rank, Run

Curve = list[tuple[float, float]]
"""The points of a line."""

_BARS = 240
"""The most intervals that are drawn."""


def overlap(one: Span, other: Span) -> float:
    """Returns how many seconds two spans have in common.

    >>> overlap((0, 3), (2, 5)), overlap((0, 1), (2, 3))
    (1, 0.0)
    """
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def trained(rank: Rank) -> Span:
    """Returns the span from the first inner step to the last, without the final exchange."""
    return rank.steps[0].span[0], rank.steps[-1].done


def waits(rank: Rank) -> list[LandingRecord]:
    """Returns the landings in the course of training, each of which training may have waited for."""
    until = trained(rank)[1]
    return [landed for landed in rank.landings if not landed.final and landed.spans["wait"][0] <= until]


def step_seconds(rank: Rank) -> float:
    """Returns the median time of an inner step, without launches, landings and waits."""
    return median(step.span[1] - step.span[0] for step in rank.steps)


def utilisation(rank: Rank) -> float:
    """Returns the share of the time in which training did not wait for a fragment."""
    began, ended = trained(rank)
    waited = sum(landed.seconds("wait") for landed in waits(rank))
    return 1 - waited / (ended - began) if ended > began else 1.0


def utilisation_over_time(rank: Rank, zero: float) -> Curve:
    """Returns the utilisation of each round, at the end of the round; times are in seconds since ``zero``."""
    every = int(rank.about["settings"]["sync_every"])
    done = {step.step: step.done for step in rank.steps}
    ends = [rank.steps[0].span[0], *(done[step] for step in sorted(done) if step % every == 0)]
    waited = [0.0] * (len(ends) + 1)
    for landed in waits(rank):
        waited[bisect_left(ends, landed.spans["wait"][1])] += landed.seconds("wait")
    return [
        (ended - zero, 1 - waited[number] / (ended - began))
        for number, (began, ended) in enumerate(pairwise(ends), start=1)
        if ended > began
    ]


def on_the_link(landed: LandingRecord) -> list[Span]:
    """Returns when a fragment was on the link, as far as this rank can tell: in the transfer and the second hop."""
    hops = [landed.spans[name] for name in ("transfer", "relay") if name in landed.spans]
    return hops or [landed.spans["flight"]]


def exchange(run: Run) -> str | None:
    """Returns the exchange that ran during training, ``"gather"`` or ``"two_shot"``; None if nothing landed."""
    return next((landed.exchange for rank in run.ranks for landed in waits(rank)), None)


def in_background(landed: LandingRecord) -> list[Span]:
    """Returns when a fragment was encoded, decoded and stepped."""
    spans = landed.spans
    parts = [spans[name] for name in ("encode", "decode", "outer_step") if name in spans]
    # What the second hop brought is decoded until the outer step begins.
    return parts + ([(spans["relay"][1], spans["outer_step"][0])] if "relay" in spans else [])


def gbit_s_over_time(ranks: Sequence[Rank], zero: float) -> Curve:
    """Returns what the ranks of a group sent together, in Gbit/s, in every quarter of a round."""
    sent = [
        ((landed.spans["flight"][0], on_the_link(landed)[-1][1]), landed.bytes_sent)
        for rank in ranks
        for landed in rank.landings
        if landed.bytes_sent
    ]
    if not sent:
        return []
    (began, trained_until), every = trained(ranks[0]), ranks[0].about["settings"]["sync_every"]
    width = max((trained_until - began) * every / len(ranks[0].steps) / 4, (trained_until - began) / _BARS)
    ended = max(trained_until, *(span[1] for span, _ in sent))
    edges = [began + number * width for number in range(math.ceil((ended - began) / width) + 1)]
    return [
        (one - zero, sum(_bits(span, nbytes, (one, other)) for span, nbytes in sent) / width / 1e9)
        for one, other in pairwise(edges)
    ]


def _bits(span: Span, nbytes: int, within: Span) -> float:
    length = max(span[1] - span[0], 1e-9)
    return 8 * nbytes * overlap((span[0], span[0] + length), within) / length


def gradient_bytes(run: Run) -> int:
    """Returns the bytes of the gradients of the whole model."""
    return sum(nbytes for _, nbytes in run.ranks[0].parameters.values())


def ddp_bytes_per_step(run: Run) -> float:
    """Returns the bytes that a group would send per step in a ring all-reduce of the gradients over all groups."""
    groups = run.ranks[0].about["groups"]
    return 2 * (groups - 1) / groups * gradient_bytes(run)


def ddp_gbit_s(run: Run) -> float:
    """Returns the bandwidth that data-parallel training at the same speed would have needed, in Gbit/s."""
    return 8 * ddp_bytes_per_step(run) / max(step_seconds(rank) for rank in run.heads) / 1e9


def bytes_sent(run: Run) -> dict[int, int]:
    """Returns the bytes that each group sent in all, by group."""
    sent: dict[int, int] = {}
    for rank in run.ranks:
        sent[rank.group] = sent.get(rank.group, 0) + sum(landed.bytes_sent for landed in rank.landings)
    return sent


def cosines(run: Run) -> dict[int, Curve]:
    """Returns each group's cosine with the mean over the inner steps, averaged over the fragments of a round."""
    first = run.heads[0]
    curves: dict[int, Curve] = {}
    told = [landed for landed in waits(first) if landed.diagnostics is not None]
    for group in range(first.about["groups"]):
        values = [(landed.landed_at, landed.diagnostics["cosines"][group]) for landed in told if landed.diagnostics]
        curves[group] = rounds([value for value in values if not math.isnan(value[1])], len(first.fragments))
    return {group: curve for group, curve in curves.items() if curve}


def norms(run: Run) -> dict[int | None, Curve]:
    """Returns the norm of the outer gradient of each group, and of the mean (None), by whole rounds."""
    first = run.heads[0]
    told = waits(first)
    groups = {
        group: [(float(landed.landed_at), landed.group_norms[group] ** 2) for landed in told]
        for group in range(first.about["groups"])
    }
    mean = [(float(landed.landed_at), landed.outer_grad_norm**2) for landed in told]
    count = len(first.fragments)
    # Squares add up over the fragments of a round.
    return {
        group: [(step, math.sqrt(count * square)) for step, square in rounds(points, count)]
        for group, points in [*groups.items(), (None, mean)]
    }


def rounds(points: list[tuple[float, float]], count: int) -> Curve:
    """Averages a number of points at a time, and puts each mean at the place of the last of them.

    >>> rounds([(1, 2.0), (2, 4.0), (3, 8.0)], 2)
    [(2, 3.0)]
    """
    parts = [points[start : start + count] for start in range(0, len(points) - count + 1, count)]
    return [(part[-1][0], sum(value for _, value in part) / count) for part in parts]
