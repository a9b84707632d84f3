"""Runs ``sdiloco report``: turns the records of a run into a page with pictures, a verdict and a
timeline.
"""

import base64
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Console

from lightning_sdiloco.algorithm.config import OVERLAP_STEPS, Settings
from lightning_sdiloco.algorithm.partition import Parameter
from lightning_sdiloco.algorithm.reduce import is_two_shot
from lightning_sdiloco.compression import COMPRESSIONS
from lightning_sdiloco.engine.fragments import Span
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming
from lightning_sdiloco.planning.planner import MARGIN, TARGET, recommend, with_margin
from lightning_sdiloco.planning.units import readable, readable_rate
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools.output import DARK, LIGHT, Theme, drawn, require_matplotlib
from lightning_sdiloco.tools.run_files import (
    LandingRecord,
    Rank,
    Run,
    read_run,
    records_in,
    write_timeline,
)


def report(
    run: str,
    output: str | None = None,
) -> str:
    """Write what a run did: a page (report.html), its pictures (.png), and a trace of all ranks
    (timeline.json).

    Args:
        run: Folder with the records of a StreamingDiLoCoMonitor, or the logger's folder above it:
            the run's own, or one that holds version_N folders, of which the newest is taken.
        output: Folder for the report; by default a folder named report in the run's.

    Examples:
        $ sdiloco report lightning_logs
    """
    require_matplotlib("A report")
    with Console(stderr=True).status("Reading the records") as progress:
        place = records_in(run)
        read = read_run(run)
        verdict = judge(read)
        folder = (
            Path(output)
            if output is not None
            else (place if place == Path(run) else place.parent) / "report"
        )
        # The page scales its pictures, in SVG: glyphs and lines stay sharp.
        embedded: dict[str, dict[str, bytes]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in pictures_of(read):
                progress.update(f"Drawing {name}")
                for theme, colors in THEMES.items():
                    suffix = "" if theme == "light" else f"-{theme}"
                    made = partial(PICTURES[name].draw, read, colors)
                    (folder / f"{name}{suffix}.png").write_bytes(
                        drawn(made, "png", colors, _SIZE, dpi=160)
                    )
                    embedded.setdefault(name, {})[theme] = drawn(made, "svg", colors, _SIZE)
            progress.update("Writing the timeline")
            write_timeline(folder / "timeline.json", read)
            (folder / "report.html").write_text(
                page(run, read, verdict, embedded), encoding="utf-8"
            )
        except OSError as error:
            raise ValueError(
                f"output={str(folder)!r} cannot be written ({error}). Give another folder."
            ) from error
        return "\n".join([*verdict.sentences, "", f"{folder / 'report.html'}"])


# The verdict: what limited a run, and which setting to change


class Causes(NamedTuple):
    """Seconds for which training waited, by what it waited for."""

    link: float
    groups: float
    background: float


class Advice(NamedTuple):
    changes: dict[str, object]
    now: float
    then: float


class Verdict(NamedTuple):
    limit: str
    utilisation: float
    causes: Causes
    link: Link | None
    advice: Advice | None
    sentences: list[str]


def judge(run: Run) -> Verdict:
    share = mean(map(utilisation, run.ranks))
    causes, link = waited_for(run)
    if run.ranks[0].about["groups"] == 1:
        limit = "alone"
    elif share >= TARGET:
        limit = "nothing"
    else:
        limit = max(causes._asdict().items(), key=lambda cause: cause[1])[0]
    advice = advise(run, link) if link is not None and limit in ("link", "background") else None
    sentences = [
        *_what_limited(run, limit, share, causes, link),
        *(_what_to_change(advice, link) if limit in ("link", "background") else ()),
        *_agreement(run),
    ]
    return Verdict(limit, share, causes, link, advice, sentences)


def waited_for(run: Run) -> tuple[Causes, Link | None]:
    """Returns what training waited for, and the link, if its speed is known.

    The time until the last group launched counts for that group, and the rest for the link or the
    own background.
    """
    flights: dict[tuple[int, int, int], list[tuple[Rank, LandingRecord]]] = {}
    for rank in run.ranks:
        for landed in waits(rank):
            key = rank.about["shard"], landed.launched_at, landed.fragment
            flights.setdefault(key, []).append((rank, landed))
    on_link = for_groups = in_all = bits = seconds = 0.0
    for together in flights.values():
        for rank, landed in together:
            others = [other for of, other in together if of is not rank]
            began, ended = landed.spans["wait"]
            all_launched = max((other.spans["launch"][1] for other in others), default=began)
            in_all += ended - began
            for_groups += overlap((began, ended), (began, all_launched))
            rest = max(began, all_launched), ended
            on_link += (
                sum(overlap(rest, hop) for hop in on_the_link(landed)) if rest[1] > rest[0] else 0.0
            )
            # From when all groups were in a hop.
            hops = zip(on_the_link(landed), *map(on_the_link, others), strict=False)
            took = sum(
                max(0.0, own[1] - max(hop[0] for hop in (own, *theirs))) for own, *theirs in hops
            )
            if landed.link_gbit_s is not None and landed.bytes_sent and took > 0:
                bits = bits + 8 * landed.bytes_sent
                seconds = seconds + took
    link = Link(gbit_s=bits / seconds / 1e9 * run.ranks[0].about["shards"]) if seconds else None
    return Causes(on_link, for_groups, in_all - for_groups - on_link), link


# What to change


def advise(run: Run, link: Link) -> Advice | None:
    """Finds the smallest change with which the planner expects the utilisation that it recommends,
    or the best one.
    """
    settings = _settings(run)
    if settings is None:
        return None
    sizes = run.ranks[0].parameters
    parameters = tuple(Parameter(name, nbytes) for name, (_, nbytes) in sizes.items())
    model = Model(parameters, tuple(numel for numel, _ in sizes.values()))
    groups = _groups(run, model, settings)

    # One of them changed, starting with those that change training least.
    every = settings.sync_every
    overlap_steps = settings.overlap_steps
    changed = [
        replace(settings, overlap_steps=more)
        for more in OVERLAP_STEPS
        if overlap_steps < more < every
    ]
    if settings.exchange != "auto":
        changed.append(replace(settings, exchange="auto"))
    if settings.codec.wire_bytes(1 << 20) > COMPRESSIONS["fp4"].wire_bytes(1 << 20):
        changed.append(replace(settings, compression="fp4"))
    changed += [replace(settings, sync_every=factor * every) for factor in (2, 3, 5)]
    best = recommend(
        model, groups, link, [settings, *changed, recommend(model, groups, link).settings]
    )
    now, then = (
        method.utilisation(with_margin(link))
        for method in (Streaming(model, settings, groups), best)
    )
    names = ("overlap_steps", "exchange", "compression", "sync_every", "fragments")
    both = ((name, getattr(best.settings, name), getattr(settings, name)) for name in names)
    return Advice({name: chosen for name, chosen, own in both if chosen != own}, now, then)


def _settings(run: Run) -> Settings | None:
    """Returns the settings of a run, with ``exchange="auto"`` where that means the exchange that
    ran.
    """
    about = run.ranks[0].about
    told = about["settings"]
    if told["compression"] is None:
        return None
    names = ("sync_every", "overlap_steps", "fragments", "compression")
    automatic = Settings(**{name: told[name] for name in names})
    exchange = exchange_of(run)
    ran = automatic if exchange is None else replace(automatic, exchange=exchange)
    both = (is_two_shot(one.exchange, about["groups"], one.codec) for one in (automatic, ran))
    return automatic if len(set(both)) == 1 else ran


def _groups(run: Run, model: Model, settings: Settings) -> Groups:
    """Returns the groups of a run, with the memory rate at which its work in the background took
    as long as it did.
    """
    about = run.ranks[0].about
    groups = Groups(
        max(map(step_seconds, run.ranks)), about["groups"], about["shards"], memory_rate=1.0
    )
    # At one byte a second the seconds are bytes.
    method = Streaming(model, settings, groups)
    any_link = Link(gbit_s=1.0)
    landings = [landed for rank in run.ranks for landed in waits(rank)]
    nbytes = sum(method.costs(landed.fragment, any_link).background for landed in landings)
    seconds = sum(ended - began for landed in landings for began, ended in in_background(landed))
    return replace(groups, memory_rate=nbytes / seconds if seconds else Groups.memory_rate)


# In words


def _what_limited(
    run: Run, limit: str, share: float, causes: Causes, link: Link | None
) -> list[str]:
    kept = f"Training kept computing for {share:.1%} of the time."
    head = run.heads[0]
    words = {
        "link": "for the link",
        "groups": "for a slower group",
        "background": "for work in the background",
    }
    parts = sorted(causes._asdict().items(), key=lambda cause: -cause[1])
    shares = ", ".join(
        f"{seconds / (sum(causes) or 1.0):.0%} was {words[name]}" for name, seconds in parts
    )
    waited = f"Of the time it waited, {shares}."
    rate = (
        f" The link carried {readable_rate(link.gbit_s)} while fragments were on it."
        if link is not None
        else ""
    )
    if limit == "alone" and head.about.get("site") is not None:
        landed = waits(head)
        again = len(head.starts) - 1
        sites = sorted({site for one in landed for site in one.sites})
        counted = (
            ", ".join(f"{site} in {sum(site in one.sites for one in landed)}" for site in sites)
            or "none"
        )
        started = (
            ""
            if not again
            else f" It was started again {'once' if again == 1 else f'{again} times'}."
        )
        return [
            f"{kept} This is {head.name}, one site of a federation, which waits for no"
            f" other.{started} Of the"
            f" {len(landed)} rounds of fragments that landed here, sites counted: {counted}."
        ]
    if limit == "alone":
        return ["There is one worker group, so nothing travelled and training waited for nothing."]
    if limit == "nothing":
        return [f"{kept} No setting would change that much.{rate}"]
    if limit == "groups":
        steps = {rank.group: step_seconds(rank) for rank in run.heads}
        slow = max(steps, key=lambda g: steps[g])
        fast = min(steps, key=lambda g: steps[g])
        return [
            f"{kept} A slower group limited this run: an inner step of group {slow} took"
            f" {seconds_as_text(steps[slow])}, of group {fast} {seconds_as_text(steps[fast])}."
            f" {waited}",
            "No setting of the exchange changes that: at every landing the faster groups wait"
            " for the slowest. Give the"
            " slower group smaller batches or faster devices. With equal speed training would"
            " be up to"
            f" {steps[slow] / steps[fast]:.2f} times as fast.",
        ]
    what = (
        "The link"
        if limit == "link"
        else "Encoding, decoding and the outer step, in the background,"
    )
    return [f"{kept} {what} limited this run. {waited}{rate}"]


def _what_to_change(advice: Advice | None, link: Link | None) -> list[str]:
    if link is None:
        return [
            "The link's speed is unknown: all messages were there before a rank began to wait"
            " for them, so the planner"
            " cannot say what to change."
        ]
    if advice is None:
        return ["The planner cannot say what to change: it knows compressions only by name."]
    if not advice.changes and advice.now >= TARGET:
        return [
            "On a steady link of that rate the planner expects a compute utilisation of"
            f" {advice.now:.1%} with these"
            " settings: the link or the inner steps were uneven. A larger overlap_steps hides"
            " more of that."
        ]
    if not advice.changes:
        return ["The planner knows no settings that would gain much: you need a faster link."]
    changes = " and ".join(f"{name}={value!r}" for name, value in advice.changes.items())
    return [
        f"Set {changes}. The planner expects a compute utilisation of {advice.then:.1%} with it,"
        f" and {advice.now:.1%}"
        f" with the current settings, counting on {MARGIN:.0%} of the measured bandwidth."
    ]


def _agreement(run: Run) -> list[str]:
    first = run.heads[0]
    landings = waits(first)
    sentences = []
    out = (
        sum(len(landed.left_out) for landed in landings),
        sum(len(landed.outlying) for landed in landings),
    )
    if any(out):
        sentences.append(
            f"Of all outer gradients, {out[0]} were left out of a mean because they were not"
            f" finite, and {out[1]}"
            " because outlier_guard found them too long."
        )
    last = [curve[-1][1] for curve in cosines_of(run).values()]
    if len(last) > 1:
        cosine = sum(last) / len(last)
        alone = (1 / len(last)) ** 0.5
        sentences.append(
            f"In the last round the groups' outer gradients had a cosine of {cosine:.2f} with"
            " their mean, on average;"
            f" unrelated directions have {alone:.2f}, equal ones 1."
        )
    return sentences


def seconds_as_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# Numbers over time


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
    """Returns the landings in the course of training, each of which training may have waited
    for.
    """
    until = trained(rank)[1]
    return [
        landed for landed in rank.landings if not landed.final and landed.spans["wait"][0] <= until
    ]


def step_seconds(rank: Rank) -> float:
    return median(step.span[1] - step.span[0] for step in rank.steps)


def utilisation(rank: Rank) -> float:
    """Returns the share of the time in which training did not wait for a fragment."""
    began, ended = trained(rank)
    waited = sum(landed.seconds("wait") for landed in waits(rank))
    return 1 - waited / (ended - began) if ended > began else 1.0


def utilisation_over_time(rank: Rank, zero: float) -> Curve:
    """Returns the utilisation of each round, at the end of the round; times are in seconds since
    ``zero``.
    """
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
    """Returns when a fragment was on the link, as far as this rank knows: in the transfer and the
    second hop.
    """
    hops = [landed.spans[name] for name in ("transfer", "relay") if name in landed.spans]
    return hops or [landed.spans["flight"]]


def exchange_of(run: Run) -> str | None:
    return next((landed.exchange for rank in run.ranks for landed in waits(rank)), None)


def in_background(landed: LandingRecord) -> list[Span]:
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
    width = max(
        (trained_until - began) * every / len(ranks[0].steps) / 4, (trained_until - began) / _BARS
    )
    ended = max(trained_until, *(span[1] for span, _ in sent))
    edges = [began + number * width for number in range(math.ceil((ended - began) / width) + 1)]
    # Evenly from a launch to the arrival, which takes some time.
    spans = [((start, max(end, start + 1e-9)), 8 * nbytes) for (start, end), nbytes in sent]
    return [
        (
            one - zero,
            sum(bits * overlap(span, (one, other)) / (span[1] - span[0]) for span, bits in spans)
            / width
            / 1e9,
        )
        for one, other in pairwise(edges)
    ]


def ddp_bytes_per_step(run: Run) -> float:
    groups = run.ranks[0].about["groups"]
    return 2 * (groups - 1) / groups * sum(nbytes for _, nbytes in run.ranks[0].parameters.values())


def bytes_sent(run: Run) -> dict[int, int]:
    sent = dict.fromkeys((rank.group for rank in run.ranks), 0)
    for rank in run.ranks:
        sent[rank.group] += sum(landed.bytes_sent for landed in rank.landings)
    return sent


def cosines_of(run: Run) -> dict[int, Curve]:
    """Returns each group's cosine with the mean over the inner steps, averaged over the fragments
    of a round.
    """
    first = run.heads[0]
    curves: dict[int, Curve] = {}
    told = [landed for landed in waits(first) if landed.diagnostics is not None]
    for group in range(first.about["groups"]):
        values = [
            (landed.landed_at, landed.diagnostics["cosines"][group])
            for landed in told
            if landed.diagnostics
        ]
        curves[group] = rounds(
            [value for value in values if not math.isnan(value[1])], len(first.fragments)
        )
    return {group: curve for group, curve in curves.items() if curve}


def norms_of(run: Run) -> dict[int | None, Curve]:
    """Returns the norm of the outer gradient of each group, and of the mean (None), by whole
    rounds.
    """
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


# Pictures, each for light and for dark pages


THEMES: Mapping[str, Theme] = {"light": LIGHT, "dark": DARK}
"""The themes, by name."""

_SIZE = 9.2, 3.1
_ROUNDS = 2
"""How many rounds of flights are drawn."""

_GROUPS = 4
"""The most groups whose flights are drawn, from the first on."""

_POINTS = 1000
"""The most points of a line; where there are more, means of neighbours are drawn."""


def color_of(group: int, theme: Theme) -> str:
    return theme.line((0, 4, 2, 3, 5, 6, 7, 8)[group % 8])


def _axes(figure: Any, x: str, y: str, place: int = 111) -> Any:
    return figure.add_subplot(place, xlabel=x, ylabel=y)


def _line(
    axes: Any, points: Curve, color: str, alpha: float, width: float, label: str | None = None
) -> None:
    if points:
        x, y = zip(*rounds(points, -(-len(points) // _POINTS)), strict=True)
        marker = "o" if len(points) == 1 else None
        axes.plot(
            x,
            y,
            color=color,
            alpha=alpha,
            linewidth=width,
            label=label,
            marker=marker,
            markersize=4,
        )


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", ncols=2)


def _smoothed(points: Curve) -> Curve:
    """Averages up to each point the last twentieth of all points, at most fifty."""
    width = max(1, min(50, len(points) // 20))
    values = [value for _, value in points]
    return [
        (
            step,
            sum(values[max(0, place - width + 1) : place + 1])
            / len(values[max(0, place - width + 1) : place + 1]),
        )
        for place, (step, _) in enumerate(points)
    ]


def draw_losses(run: Run, theme: Theme, figure: Any) -> None:
    axes = _axes(figure, "inner step", "loss")
    for rank in run.heads:
        _line(axes, rank.losses, color_of(rank.group, theme), 0.35, 1)
        _line(axes, _smoothed(rank.losses), color_of(rank.group, theme), 1, 2, rank.name)
    told = run.heads[0].validations
    for name in sorted(
        {name for validation in told for name in validation.metrics if "loss" in name}
    ):
        points = [(v.step, v.metrics[name]) for v in told if name in v.metrics]
        axes.plot(
            *zip(*points, strict=True),
            "o",
            color=theme.ink,
            markersize=5,
            label=f"{name} (outer parameters)",
        )
    _legend(axes)


def draw_utilisation(run: Run, theme: Theme, figure: Any) -> None:
    axes = _axes(figure, "seconds since the first inner step", "compute utilisation")
    for rank in run.heads:
        _line(
            axes,
            utilisation_over_time(rank, run.began),
            color_of(rank.group, theme),
            1,
            2,
            rank.name,
        )
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(axes)


def draw_bandwidth(run: Run, theme: Theme, figure: Any) -> None:
    """Draws what every group sent over time, and what data-parallel training would have needed."""
    needed = 8 * ddp_bytes_per_step(run) / max(map(step_seconds, run.heads)) / 1e9
    unit, name = (1.0, "Gbit/s") if needed >= 1 else (1000.0, "Mbit/s")
    axes = _axes(figure, "seconds since the first inner step", name)
    rates = []
    for head in run.heads:
        ranks = [rank for rank in run.ranks if rank.group == head.group]
        points = [(at, unit * rate) for at, rate in gbit_s_over_time(ranks, run.began)]
        rates += [rate for _, rate in points]
        if points:
            x, y = zip(*points, strict=True)
            axes.step(
                x,
                y,
                where="post",
                color=color_of(head.group, theme),
                linewidth=1.5,
                label=head.name,
            )
    if any(rates):
        label = f"DDP at this speed: {unit * needed:.3g} {name}"
        if needed:
            axes.axhline(unit * needed, color=theme.ink, linewidth=1.6, linestyle="--", label=label)
        # Where nothing was sent there is no logarithm: the axis ends at a thousandth of the most.
        axes.set_yscale("log")
        axes.set_ylim(
            max(max(rates) / 1000, min(rate for rate in rates if rate)) / 2,
            3 * max([unit * needed, *rates]),
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
    _legend(axes)


def draw_flights(run: Run, theme: Theme, figure: Any) -> None:
    """Draws the last rounds: inner steps and waits of every group, and the flights of its
    fragments below.
    """
    axes = _axes(figure, "seconds since the first inner step", "")
    heads = run.heads[:_GROUPS]
    steps = run.heads[0].steps
    figure.set_size_inches(_SIZE[0], 1.2 + 0.2 * sum(1 + len(head.fragments) for head in heads))
    every = int(run.ranks[0].about["settings"]["sync_every"])
    ended = max(
        (landed.spans["land"][1] for rank in run.ranks for landed in rank.landings),
        default=steps[-1].done,
    )
    first = steps[max(0, len(steps) - _ROUNDS * every)].span[0]
    last = max(ended, steps[-1].done)
    # A hair apart, so that single steps can be told.
    gap = (last - first) / 1500
    row = 0
    ticks = list[str]()

    def bars(spans: Sequence[Span], color: str, alpha: float, height: float = 0.7) -> None:
        seen = [
            (began - run.began, ended - began)
            for began, ended in spans
            if ended > first and began < last
        ]
        axes.broken_barh(seen, (row - height / 2, height), color=color, alpha=alpha, linewidth=0)

    for head in heads:
        color = color_of(head.group, theme)
        bars(
            [(s.span[0], max(s.span[1] - gap, s.span[0])) for s in head.steps],
            theme.quiet,
            0.45,
            0.8,
        )
        bars([landed.spans["wait"] for landed in head.landings], theme.line(1), 1, 0.8)
        ticks.append(head.name)
        for fragment in range(len(head.fragments)):
            row = len(ticks)
            flights = [landed for landed in head.landings if landed.fragment == fragment]
            for alpha, spans_of in _SHADES.values():
                bars([span for landed in flights for span in spans_of(landed)], color, alpha)
            ticks.append(f"fragment {fragment}")
        row = len(ticks)
    axes.set_xlim(first - run.began, last - run.began)
    axes.set_ylim(row - 0.5, -0.8)
    axes.set_yticks(range(row), ticks)
    axes.grid(visible=False, axis="y")
    shades = {name: (theme.quiet, alpha) for name, (alpha, _) in _SHADES.items()}
    for name, (color, alpha) in {
        "inner step": (theme.quiet, 1.0),
        "waits": (theme.line(1), 1.0),
        **shades,
    }.items():
        axes.barh([0], [0], color=color, alpha=alpha, label=name)
    figure.legend(loc="outside lower center", ncols=6)


_SHADES: Mapping[str, tuple[float, Callable[[LandingRecord], Sequence[Span]]]] = {
    "in flight": (0.25, lambda landed: [landed.spans["flight"]]),
    "in the background": (0.55, in_background),
    "on the link": (1.0, on_the_link),
}


def draw_agreement(run: Run, theme: Theme, figure: Any) -> None:
    """Draws how far the outer gradients of the groups agree in direction and in length."""
    cosines = cosines_of(run)
    norms = norms_of(run)
    axes = _axes(figure, "inner step", "cosine with the mean", 121 if cosines else 122)
    for group, curve in cosines.items():
        _line(axes, curve, color_of(group, theme), 1, 2, f"group {group}")
    if cosines:
        axes.set_ylim(min(0.0, *(value for curve in cosines.values() for _, value in curve)), 1.04)
        axes = _axes(figure, "inner step", "norm of the outer gradient", 122)
    else:
        axes.set_ylabel("norm of the outer gradient")
    for of, curve in norms.items():
        color, label = (theme.ink, "mean") if of is None else (color_of(of, theme), f"group {of}")
        _line(axes, curve, color, 1, 2, label)
    axes.set_ylim(bottom=0)
    _legend(axes)


def draw_sites(run: Run, theme: Theme, figure: Any) -> None:
    """Draws in which rounds each site counted, as one of them saw it, and when that one was
    started.
    """
    head = run.heads[0]
    sites = sorted({site for landed in head.landings for site in landed.sites})
    axes = _axes(figure, "seconds since the first inner step", "")
    figure.set_size_inches(_SIZE[0], 1.2 + 0.3 * max(len(sites), 2))
    for row, site in enumerate(sites):
        moments = [
            landed.spans["land"][1] - run.began for landed in head.landings if site in landed.sites
        ]
        axes.plot(
            moments,
            [row] * len(moments),
            "|",
            color=color_of(row, theme),
            markersize=12,
            markeredgewidth=1.6,
        )
    for number, (moment, _) in enumerate(head.starts):
        label = None if number else f"{head.name} starts"
        axes.axvline(
            moment - run.began, color=theme.ink, linewidth=1.4, linestyle="--", label=label
        )
    axes.set_yticks(range(len(sites)), sites)
    axes.set_ylim(len(sites) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    _legend(axes)


class Picture(NamedTuple):
    draw: Callable[[Run, Theme, Any], None]
    title: str
    caption: str


PICTURES: Mapping[str, Picture] = {
    "losses": Picture(
        draw_losses,
        "Losses",
        "Training loss of each group, on its own batches and its local parameters: pale as it"
        " was, strong smoothed."
        " Dots are validations.",
    ),
    "utilisation": Picture(
        draw_utilisation,
        "Compute utilisation",
        "Share of each round (sync_every inner steps) in which training did not wait for a"
        " fragment.",
    ),
    "bandwidth": Picture(
        draw_bandwidth,
        "Bandwidth between groups",
        "What each group sent, in every quarter of a round, spread evenly from a launch to the"
        " arrival of all messages."
        " The dashed line is what a ring all-reduce of all gradients at every step would have"
        " needed, at the same"
        " speed.",
    ),
    "flights": Picture(
        draw_flights,
        "Fragments in flight, at the end of the run",
        "The first groups, at most four. First row of a group: its inner steps, and where it"
        " waited. Below, each flight"
        " of its fragments from launch to result: strong while on the link, the second hop"
        " included; weaker while it is"
        " encoded, decoded or stepped; pale while it waits for its turn. Each rank goes by its"
        " own clock.",
    ),
    "agreement": Picture(
        draw_agreement,
        "Agreement of the groups",
        "Cosine of each group's outer gradient with the mean, averaged over the fragments of a"
        " round; and the norm of"
        " the outer gradient of all fragments. A curve far from the others is a group that"
        " trains on something else.",
    ),
    "sites": Picture(
        draw_sites,
        "Sites that come and go",
        "As this site saw it: a mark for each round of a fragment in which a site counted, when"
        " it landed here. A site"
        " without marks has died, left, or been late.",
    ),
}
"""The pictures, by the names of their files."""


def pictures_of(run: Run) -> list[str]:
    """Returns the pictures that show something of a run; one site knows nothing of how well all of
    them agree.
    """
    without = "sites" if run.heads[0].about.get("site") is None else "agreement"
    return [name for name in PICTURES if name != without]


# The page, which needs no other file and no network


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --quiet: #5f6c7b; --line: #d9dfe6; --paper: #ffffff;
  --tile: #f3f6f9; --accent: #1f6fd6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --quiet: #9fb0c0; --line: #34404c; --paper: #171c22;
  --tile: #1f262e; --accent: #6fb1ff; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif;
  max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
p { margin: .4rem 0; } .quiet { color: var(--quiet); font-size: .9rem; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.tile { background: var(--tile); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.2rem; font-weight: 600; white-space: nowrap; }
.tile span { color: var(--quiet); font-size: .85rem; }
.verdict { border-left: .25rem solid var(--accent); padding: .1rem 0 .1rem 1rem; margin: 1.5rem 0; }
img { width: 100%; min-width: 40rem; height: auto; display: block; }
.scroll { overflow-x: auto; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--quiet); font-weight: 500; }
"""


def page(
    title: str, run: Run, verdict: Verdict, pictures: Mapping[str, Mapping[str, bytes]]
) -> str:
    about = run.ranks[0].about
    settings = run.ranks[0].about["settings"]
    first = run.ranks[0]
    is_site = about.get("site") is not None
    ranks = (
        f"{first.name}: {about['shards']} ranks"
        if is_site
        else f"{about['groups']} groups of {about['shards']}"
    )
    described = (
        f"{sum(numel for numel, _ in first.parameters.values()):,} parameters in"
        f" {len(first.fragments)} fragments ·"
        f" {ranks} · sync_every={settings['sync_every']},"
        f" overlap_steps={settings['overlap_steps']},"
        f" mixing={settings['mixing']}, compression={settings['compression'] or 'custom'},"
        f" exchange={exchange_of(run) or '-'}"
    )
    steps = max(len(rank.steps) for rank in run.ranks)
    sent = max(bytes_sent(run).values())
    tiles = [
        (f"{verdict.utilisation:.1%}", "compute utilisation"),
        (f"{steps:,}", "inner steps"),
        (seconds_as_text(max(map(step_seconds, run.heads))), "slowest inner step"),
        (readable(sent), "sent by each group"),
    ]
    if sent and about["groups"] > 1:
        tiles.append((f"1/{ddp_bytes_per_step(run) * steps / sent:,.0f}", "of the bytes of DDP"))
    if verdict.link is not None:
        tiles.append((readable_rate(verdict.link.gbit_s), "link rate while in use"))
    rows = [
        (
            str(rank.rank),
            rank.name.removeprefix("group "),
            str(rank.about["host"]),
            seconds_as_text(step_seconds(rank)),
            seconds_as_text(sum(landed.seconds("wait") for landed in waits(rank))),
            f"{utilisation(rank):.1%}",
            readable(sum(landed.bytes_sent for landed in rank.landings)),
        )
        for rank in run.ranks
    ]
    told = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
    ]
    head = [
        f"<th>{name}</th>"
        for name in ("rank", "group", "host", "inner step", "waited", "utilisation", "sent")
    ]
    body = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    figures = []
    for name, themes in pictures.items():
        light, dark = (
            f"data:image/svg+xml;base64,{base64.b64encode(themes[t]).decode()}"
            for t in ("light", "dark")
        )
        figures.append(
            f'<h2>{PICTURES[name].title}</h2><p class="quiet">{escape(PICTURES[name].caption)}</p>'
            '<picture class="scroll">'
            f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="{escape(PICTURES[name].title)}"></picture>'
        )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}: Streaming DiLoCo</title><style>{_STYLE}</style></head><body>",
            f'<h1>Streaming DiLoCo run</h1><p class="quiet">{escape(title)}</p>',
            f'<p class="quiet">{escape(described)}</p>',
            f'<div class="tiles">{"".join(told)}</div>',
            f'<h2>Verdict</h2><div class="verdict">{"".join(f"<p>{escape(s)}</p>" for s in verdict.sentences)}</div>',
            *figures,
            "<h2>Ranks</h2>",
            f'<div class="scroll"><table><tr>{"".join(head)}</tr>{"".join(body)}</table></div>',
            "</body></html>",
        ]
    )
