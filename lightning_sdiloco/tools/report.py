"""Runs ``sdiloco report``, which creates a page, pictures and a timeline from records."""

import base64
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.status import Status

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
from lightning_sdiloco.tools.output import DARK, LIGHT, StyleValue, Theme, drawn, require_matplotlib
from lightning_sdiloco.tools.run_files import (
    LandingRecord,
    Rank,
    Run,
    read_run,
    records_in,
    write_timeline,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def report(run: str, output: str | None = None) -> str:
    """Create a report on a run with a page (report.html), pictures (.png), and a trace of all ranks
    (timeline.json).

    Args:
        run: Folder with the records of a StreamingDiLoCoMonitor, or the logger's folder for the
            run. If a folder contains version_N folders, the newest of them is used.
        output: Folder for the report. The default is the folder report in the run's folder.

    Examples:
        $ sdiloco report lightning_logs
    """
    require_matplotlib("A report")
    with Console(stderr=True).status("Reading the records") as progress:
        records = records_in(run)
        recorded_run = read_run(run)
        verdict = judge(recorded_run)
        folder = records / "report"
        if records != Path(run):
            folder = records.parent / "report"
        if output is not None:
            folder = Path(output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            pictures = _write_pictures(recorded_run, folder, progress)
            progress.update("Writing the timeline")
            write_timeline(folder / "timeline.json", recorded_run)
            html = page(run, recorded_run, verdict, pictures)
            (folder / "report.html").write_text(html, encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"output={str(folder)!r} cannot be written ({error}). Choose a different folder."
            ) from error
        lines = [*verdict.sentences, f"Verdict: {verdict.conclusion}."]
        return "\n".join([*lines, "", f"{folder / 'report.html'}"])


def _write_pictures(run: Run, folder: Path, progress: Status) -> dict[str, dict[str, bytes]]:
    """Writes the pictures as PNG files and returns them as SVG, by name and theme."""
    pictures: dict[str, dict[str, bytes]] = defaultdict(dict)
    for name in pictures_of(run):
        progress.update(f"Drawing {name}")
        for theme, colors in THEMES.items():
            suffix = "" if theme == "light" else f"-{theme}"
            draw = partial(PICTURES[name].draw, run, colors)
            png = drawn(draw, "png", colors, _SIZE, dpi=160)
            (folder / f"{name}{suffix}.png").write_bytes(png)
            pictures[name][theme] = drawn(draw, "svg", colors, _SIZE)
    return pictures


# The verdict: the bottleneck of a run, and the setting to change


class Causes(NamedTuple):
    """The number of seconds that training spent waiting, by cause."""

    link: float
    groups: float
    background: float


class Advice(NamedTuple):
    """The settings to change, with the expected utilisation before and after the change."""

    changes: dict[str, object]
    now: float
    then: float


class Verdict(NamedTuple):
    """The bottleneck of a run, the numbers that show it, a description, and a conclusion."""

    limit: str
    utilisation: float
    causes: Causes
    link: Link | None
    advice: Advice | None
    sentences: list[str]
    conclusion: str


def judge(run: Run) -> Verdict:
    """Finds a run's bottleneck and recommends settings if they could help."""
    share = mean(map(utilisation, run.ranks))
    causes = waited_for(run)
    link = measured_link(run)
    seconds = causes._asdict()
    if run.ranks[0].about["groups"] == 1:
        limit = "alone"
    elif share >= TARGET:
        limit = "nothing"
    else:
        limit = max(seconds, key=lambda cause: seconds[cause])
    advice = None
    sentences = _limit_as_text(run, limit, share, causes, link)
    if limit in ("link", "background"):
        if link is not None:
            advice = advise(run, link)
        sentences.append(_advice_as_text(advice, link))
    sentences += _agreement_as_text(run)
    conclusion = _conclusion(run, limit, share, advice)
    return Verdict(limit, share, causes, link, advice, sentences, conclusion)


def waited_for(run: Run) -> Causes:
    """Returns the time that training spent waiting, by cause.

    The time until the last group has launched is attributed to the slower groups. The remaining
    time is attributed to the link or to background work.
    """
    on_link = 0.0
    for_groups = 0.0
    waited = 0.0
    for landing, partners in _landings_with_partners(run):
        began, ended = landing.spans["wait"]
        all_launched = max((partner.spans["launch"][1] for partner in partners), default=began)
        after_launches = max(began, all_launched), ended
        waited += ended - began
        for_groups += overlap((began, ended), (began, all_launched))
        on_link += sum(overlap(after_launches, hop) for hop in on_the_link(landing))
    return Causes(on_link, for_groups, waited - for_groups - on_link)


def measured_link(run: Run) -> Link | None:
    """Returns the measured link, or None if no rank ever waited for a message.

    The bandwidth is the rate of all messages that ranks waited for.
    """
    bits = 0.0
    seconds = 0.0
    for landing, partners in _landings_with_partners(run):
        in_hops = _seconds_in_hops(landing, partners)
        if landing.link_gbit_s is not None and landing.bytes_sent and in_hops > 0:
            bits += 8 * landing.bytes_sent
            seconds += in_hops
    if not seconds:
        return None
    return Link(gbit_s=bits / seconds / 1e9 * run.ranks[0].about["shards"])


def _landings_with_partners(run: Run) -> Iterator[tuple[LandingRecord, list[LandingRecord]]]:
    """Yields each landing in training with the landings of the same flight in other groups."""
    flights: dict[tuple[int, int, int], list[tuple[Rank, LandingRecord]]] = defaultdict(list)
    for rank in run.ranks:
        for landing in landings_in_training(rank):
            key = rank.about["shard"], landing.launched_at, landing.fragment
            flights[key].append((rank, landing))
    for flight in flights.values():
        for rank, landing in flight:
            yield landing, [partner for its_rank, partner in flight if its_rank is not rank]


def _seconds_in_hops(landing: LandingRecord, partners: Sequence[LandingRecord]) -> float:
    """Returns the seconds that a fragment spent on the link.

    Each hop is timed from the moment at which all groups have started it.
    """
    hops = zip(on_the_link(landing), *map(on_the_link, partners), strict=False)
    return sum(max(0.0, spans[0][1] - max(began for began, _ in spans)) for spans in hops)


# Settings to change


def advise(run: Run, link: Link) -> Advice | None:
    """Finds the smallest change that reaches the target utilisation, or else the best change."""
    settings = _settings(run)
    if settings is None:
        return None
    model = _model(run)
    groups = _groups(run, model, settings)
    recommended = recommend(model, groups, link).settings
    candidates = [settings, *_with_one_change(settings), recommended]
    best = recommend(model, groups, link, candidates)
    changes = {
        name: getattr(best.settings, name)
        for name in ("overlap_steps", "exchange", "compression", "sync_every", "fragments")
        if getattr(best.settings, name) != getattr(settings, name)
    }
    now = Streaming(model, settings, groups).utilisation(with_margin(link))
    return Advice(changes, now, best.utilisation(with_margin(link)))


def _model(run: Run) -> Model:
    """Creates the planner's model from the parameters that the first rank recorded."""
    sizes = run.ranks[0].parameters
    parameters = tuple(Parameter(name, nbytes) for name, (_, nbytes) in sizes.items())
    return Model(parameters, tuple(numel for numel, _ in sizes.values()))


def _with_one_change(settings: Settings) -> list[Settings]:
    """Returns settings with one change each, starting with the least intrusive changes."""
    candidates = [
        replace(settings, overlap_steps=more)
        for more in OVERLAP_STEPS
        if settings.overlap_steps < more < settings.sync_every
    ]
    if settings.exchange != "auto":
        candidates.append(replace(settings, exchange="auto"))
    if settings.codec.wire_bytes(1 << 20) > COMPRESSIONS["fp4"].wire_bytes(1 << 20):
        candidates.append(replace(settings, compression="fp4"))
    for factor in (2, 3, 5):
        candidates.append(replace(settings, sync_every=factor * settings.sync_every))
    return candidates


def _settings(run: Run) -> Settings | None:
    """Returns a run's settings, with ``exchange="auto"`` if it selects the same exchange."""
    about = run.ranks[0].about
    recorded = about["settings"]
    if recorded["compression"] is None:
        return None
    names = ("sync_every", "overlap_steps", "fragments", "compression")
    automatic = Settings(**{name: recorded[name] for name in names})
    exchange = exchange_of(run)
    if exchange is None:
        return automatic
    as_ran = replace(automatic, exchange=exchange)
    groups = about["groups"]
    auto_is_two_shot = is_two_shot(automatic.exchange, groups, automatic.codec)
    if auto_is_two_shot == is_two_shot(exchange, groups, as_ran.codec):
        return automatic
    return as_ran


def _groups(run: Run, model: Model, settings: Settings) -> Groups:
    """Describes the groups, with a memory rate that matches the measured background work."""
    about = run.ranks[0].about
    step_time = max(map(step_seconds, run.ranks))
    groups = Groups(step_time, about["groups"], about["shards"], memory_rate=1.0)
    # At one byte per second, seconds and bytes are the same number.
    method = Streaming(model, settings, groups)
    any_link = Link(gbit_s=1.0)
    landings = list(chain.from_iterable(map(landings_in_training, run.ranks)))
    nbytes = sum(method.costs(landing.fragment, any_link).background for landing in landings)
    spans = chain.from_iterable(map(in_background, landings))
    seconds = sum(ended - began for began, ended in spans)
    return replace(groups, memory_rate=nbytes / seconds if seconds else Groups.memory_rate)


# The verdict as text


def _limit_as_text(
    run: Run, limit: str, share: float, causes: Causes, link: Link | None
) -> list[str]:
    """Describes a run's bottleneck and the rate of its link."""
    head = run.heads[0]
    computed = f"Training spent {share:.1%} of the time computing."
    if limit == "alone" and head.about.get("site") is not None:
        return [f"{computed} {_site_as_text(head)}"]
    if limit == "alone":
        return ["There is only one worker group, so no data was sent and training never waited."]
    rate = ""
    if link is not None:
        rate = f" While in use, the link carried {readable_rate(link.gbit_s)}."
    if limit == "nothing":
        return [f"{computed} No setting would improve this much.{rate}"]
    waited = _waits_as_text(causes)
    if limit == "groups":
        return _slow_group_as_text(run, computed, waited)
    part = "Encoding, decoding and the outer step, in the background,"
    if limit == "link":
        part = "The link"
    return [f"{computed} {part} limited this run. {waited}{rate}"]


def _site_as_text(head: Rank) -> str:
    """Describes a site's restarts and the rounds in which each site counted."""
    landings = landings_in_training(head)
    rounds = Counter(chain.from_iterable(landing.sites for landing in landings))
    counted = ", ".join(f"{site} in {rounds[site]}" for site in sorted(rounds)) or "none"
    restarts = len(head.starts) - 1
    restarted = ""
    if restarts:
        times = "once" if restarts == 1 else f"{restarts} times"
        restarted = f" It was restarted {times}."
    return (
        f"This is {head.name}, one site of a federation, which does not wait for other"
        f" sites.{restarted} In the {len(landings)} rounds of fragments that landed here, the"
        f" following sites counted: {counted}.{_losses_as_text(head)}"
    )


def _losses_as_text(head: Rank) -> str:
    """Describes a site's lost inner steps, averaged over the fragments."""
    dropped = sum(landing.lost_steps for landing in head.landings)
    trained = len(head.steps) * len(head.fragments)
    if not dropped or not trained:
        return ""
    return (
        f" Because launches were late, {dropped / len(head.fragments):.1f} of this site's"
        f" {len(head.steps)} inner steps were lost ({dropped / trained:.1%})."
    )


def _waits_as_text(causes: Causes) -> str:
    """Formats the waiting time by cause, longest first."""
    words = {
        "link": "for the link",
        "groups": "for a slower group",
        "background": "for work in the background",
    }
    total = sum(causes) or 1.0
    longest_first = sorted(causes._asdict().items(), key=lambda cause: -cause[1])
    shares = [f"{seconds / total:.0%} was {words[name]}" for name, seconds in longest_first]
    return f"Of the waiting time, {', '.join(shares)}."


def _slow_group_as_text(run: Run, computed: str, waited: str) -> list[str]:
    """Describes a run that waited for its slowest group."""
    steps = {rank.group: step_seconds(rank) for rank in run.heads}
    slow = max(steps, key=lambda group: steps[group])
    fast = min(steps, key=lambda group: steps[group])
    return [
        f"{computed} A slower group limited this run. An inner step took"
        f" {seconds_as_text(steps[slow])} in group {slow} and {seconds_as_text(steps[fast])} in"
        f" group {fast}. {waited}",
        "No setting of the exchange can change this, because at every landing the faster groups"
        " wait for the slowest group. Give the slower group smaller batches or faster devices. If"
        f" all groups were equally fast, training would be up to {steps[slow] / steps[fast]:.2f}"
        " times as fast.",
    ]


def _advice_as_text(advice: Advice | None, link: Link | None) -> str:
    """Formats the advice, or the reason why there is none."""
    if link is None:
        return (
            "The speed of the link is unknown, because all messages arrived before a rank started"
            " to wait for them. Therefore, the planner cannot recommend a change."
        )
    if advice is None:
        return "The planner cannot recommend a change, because the run used a custom compression."
    if not advice.changes and advice.now >= TARGET:
        return (
            "On a steady link of this rate, the planner expects a compute utilisation of"
            f" {advice.now:.1%} with these settings, so the link or the inner steps must have been"
            " uneven. A larger overlap_steps hides more of these variations."
        )
    if not advice.changes:
        return "The planner found no settings that would help much. A faster link is needed."
    return (
        f"Set {_changes_as_text(advice)}. With this change, the planner expects a compute"
        f" utilisation of {advice.then:.1%}, compared with {advice.now:.1%} for the current"
        f" settings, if {MARGIN:.0%} of the measured bandwidth is available."
    )


def _changes_as_text(advice: Advice) -> str:
    return " and ".join(f"{name}={value!r}" for name, value in advice.changes.items())


def _conclusion(run: Run, limit: str, share: float, advice: Advice | None) -> str:
    """Formats a short conclusion with the bottleneck and the recommended change."""
    if limit == "alone" and run.heads[0].about.get("site") is None:
        return "nothing to judge, because there is one worker group"
    if share >= TARGET:
        return "good"
    if limit == "alone":
        return f"this site waited for {1 - share:.1%} of the time"
    if limit == "groups":
        return "one group is too slow and needs smaller batches or faster devices"
    slow = "the link is too slow" if limit == "link" else "the background is too slow"
    if advice is None:
        return f"{slow}, and the planner cannot recommend a change"
    if advice.changes:
        return f"{slow}: set {_changes_as_text(advice)}"
    if advice.now >= TARGET:
        return "the link or the inner steps are uneven: set a larger overlap_steps"
    return f"{slow}, and no setting would help much"


def _agreement_as_text(run: Run) -> list[str]:
    """Describes excluded outer gradients and how closely the groups agreed in the last round."""
    landings = landings_in_training(run.heads[0])
    sentences = []
    left_out = sum(len(landing.left_out) for landing in landings)
    outlying = sum(len(landing.outlying) for landing in landings)
    if left_out or outlying:
        sentences.append(
            f"Of all outer gradients, {left_out} were excluded from a mean because they were not"
            f" finite, and {outlying} because their norm exceeded the limit of outlier_guard."
        )
    wrong_buffers = sum(len(landing.wrong_buffers) for landing in landings)
    if wrong_buffers:
        sentences.append(
            f"Buffers were excluded {wrong_buffers} times because they exceeded the limit of"
            " outlier_guard."
        )
    last = [curve[-1][1] for curve in cosines_of(run).values()]
    if len(last) > 1:
        cosine = sum(last) / len(last)
        unrelated = (1 / len(last)) ** 0.5
        sentences.append(
            "In the last round, the cosine between the groups' outer gradients and their mean was"
            f" {cosine:.2f} on average. The cosine would be {unrelated:.2f} for unrelated"
            " directions and 1 for identical directions."
        )
    return sentences


def seconds_as_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# Numbers over time


Curve = list[tuple[float, float]]
"""The points of a line in a picture."""

_BARS = 240
"""The maximum number of time intervals for which rates are drawn."""


def overlap(first: Span, second: Span) -> float:
    """Returns the number of seconds for which two spans overlap.

    >>> overlap((0, 3), (2, 5)), overlap((0, 1), (2, 3))
    (1, 0.0)
    """
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))


def trained(rank: Rank) -> Span:
    """Returns the span from the first inner step to the last, without the final exchange."""
    return rank.steps[0].span[0], rank.steps[-1].done


def landings_in_training(rank: Rank) -> list[LandingRecord]:
    """Returns all landings that training may have waited for, up to the last inner step."""
    until = trained(rank)[1]
    return [
        landing
        for landing in rank.landings
        if not landing.final and landing.spans["wait"][0] <= until
    ]


def step_seconds(rank: Rank) -> float:
    return median(step.span[1] - step.span[0] for step in rank.steps)


def utilisation(rank: Rank) -> float:
    """Returns the share of time during which training did not wait for a fragment."""
    began, ended = trained(rank)
    waited = sum(landing.seconds("wait") for landing in landings_in_training(rank))
    if ended <= began:
        return 1.0
    return 1 - waited / (ended - began)


def utilisation_over_time(rank: Rank, zero: float) -> Curve:
    """Returns each round's utilisation at the time when it ended, in seconds since ``zero``."""
    sync_every = int(rank.about["settings"]["sync_every"])
    done = {step.step: step.done for step in rank.steps}
    ends = [rank.steps[0].span[0]]
    ends += [done[step] for step in sorted(done) if step % sync_every == 0]
    waited = [0.0] * (len(ends) + 1)
    for landing in landings_in_training(rank):
        waited[bisect_left(ends, landing.spans["wait"][1])] += landing.seconds("wait")
    return [
        (ended - zero, 1 - waited[number] / (ended - began))
        for number, (began, ended) in enumerate(pairwise(ends), start=1)
        if ended > began
    ]


def on_the_link(landing: LandingRecord) -> list[Span]:
    """Returns the spans for which this rank recorded that a fragment was on the link."""
    hops = [landing.spans[name] for name in ("transfer", "relay") if name in landing.spans]
    return hops or [landing.spans["flight"]]


def exchange_of(run: Run) -> str | None:
    landings = chain.from_iterable(map(landings_in_training, run.ranks))
    return next((landing.exchange for landing in landings), None)


def in_background(landing: LandingRecord) -> list[Span]:
    """Returns the spans of background work on a fragment, such as encoding and decoding."""
    spans = landing.spans
    parts = [spans[name] for name in ("encode", "decode", "outer_step") if name in spans]
    if "relay" in spans:
        # The payloads of the second hop are decoded until the outer step begins.
        parts.append((spans["relay"][1], spans["outer_step"][0]))
    return parts


def gbit_s_over_time(ranks: Sequence[Rank], zero: float) -> Curve:
    """Returns a group's total sending rate in Gbit/s for every quarter of a round."""
    landings = [landing for rank in ranks for landing in rank.landings if landing.bytes_sent]
    if not landings:
        return []
    began, until = trained(ranks[0])
    sync_every = ranks[0].about["settings"]["sync_every"]
    quarter = (until - began) * sync_every / len(ranks[0].steps) / 4
    width = max(quarter, (until - began) / _BARS)
    ended = max(until, *(on_the_link(landing)[-1][1] for landing in landings))
    bars = math.ceil((ended - began) / width)
    curve = []
    for bar in pairwise(began + number * width for number in range(bars + 1)):
        curve.append((bar[0] - zero, _bits_within(bar, landings) / width / 1e9))
    return curve


def _bits_within(bar: Span, landings: Sequence[LandingRecord]) -> float:
    """Returns the bits sent in a span, assuming a constant rate from launch to arrival."""
    bits = []
    for landing in landings:
        launch = landing.spans["flight"][0]
        # An arrival takes some time, even if the clock shows zero.
        arrival = max(on_the_link(landing)[-1][1], launch + 1e-9)
        share = 8 * landing.bytes_sent * overlap((launch, arrival), bar) / (arrival - launch)
        bits.append(share)
    return sum(bits)


def ddp_bytes_per_step(run: Run) -> float:
    groups = run.ranks[0].about["groups"]
    return 2 * (groups - 1) / groups * sum(nbytes for _, nbytes in run.ranks[0].parameters.values())


def bytes_sent(run: Run) -> dict[int, int]:
    sent = dict.fromkeys((rank.group for rank in run.ranks), 0)
    for rank in run.ranks:
        sent[rank.group] += sum(landed.bytes_sent for landed in rank.landings)
    return sent


def cosines_of(run: Run) -> dict[int, Curve]:
    """Returns the cosine between each group and the mean, averaged over each round."""
    head = run.heads[0]
    landings = landings_in_training(head)
    curves: dict[int, Curve] = {}
    for group in range(head.about["groups"]):
        points: Curve = [
            (landing.landed_at, landing.diagnostics["cosines"][group])
            for landing in landings
            if landing.diagnostics
        ]
        numbers = [point for point in points if not math.isnan(point[1])]
        curve = averaged(numbers, len(head.fragments))
        if curve:
            curves[group] = curve
    return curves


def norms_of(run: Run) -> dict[int | None, Curve]:
    """Returns the norms of each group's outer gradients and of the mean (None), by round."""
    head = run.heads[0]
    landings = landings_in_training(head)
    steps = [float(landing.landed_at) for landing in landings]
    norms: dict[int | None, list[float]] = {
        group: [landing.group_norms[group] for landing in landings]
        for group in range(head.about["groups"])
    }
    norms[None] = [landing.outer_grad_norm for landing in landings]
    count = len(head.fragments)
    curves = {}
    for group, lengths in norms.items():
        # Squares are summed over the fragments of a round.
        squares = [(step, length**2) for step, length in zip(steps, lengths, strict=True)]
        curves[group] = [
            (step, math.sqrt(count * square)) for step, square in averaged(squares, count)
        ]
    return curves


def averaged(points: list[tuple[float, float]], count: int) -> Curve:
    """Averages every ``count`` points and puts each mean at the last point's position.

    >>> averaged([(1, 2.0), (2, 4.0), (3, 8.0)], 2)
    [(2, 3.0)]
    """
    parts = [points[start : start + count] for start in range(0, len(points) - count + 1, count)]
    return [(part[-1][0], sum(value for _, value in part) / count) for part in parts]


# Pictures, each for light and for dark pages


THEMES: Mapping[str, Theme] = {"light": LIGHT, "dark": DARK}
"""The themes, by name."""

_SIZE = 9.2, 3.1
_ROUNDS = 2
"""The number of rounds whose flights are drawn."""

_GROUPS = 4
"""The maximum number of groups whose flights are drawn."""

_POINTS = 1000
"""The maximum number of points on a line before neighbouring points are averaged."""


def color_of(group: int, theme: Theme) -> str:
    return theme.line((0, 4, 2, 3, 5, 6, 7, 8)[group % 8])


def _axes(figure: "Figure", x: str, y: str, place: int = 111) -> "Axes":
    return figure.add_subplot(place, xlabel=x, ylabel=y)


def _line(axes: "Axes", points: Curve, **style: StyleValue) -> None:
    """Draws a curve. If there are many points, neighbouring ones are averaged first."""
    if not points:
        return
    x, y = zip(*averaged(points, -(-len(points) // _POINTS)), strict=True)
    marker = "o" if len(points) == 1 else None
    axes.plot(x, y, marker=marker, markersize=4, **style)


def _strong_line(axes: "Axes", points: Curve, color: str, label: str) -> None:
    _line(axes, points, color=color, alpha=1, linewidth=2, label=label)


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", ncols=2)


def _smoothed(points: Curve) -> Curve:
    """Smooths a curve with a moving average over a twentieth of all points, at most 50."""
    width = max(1, min(50, len(points) // 20))
    values = [value for _, value in points]
    curve = []
    for place, (step, _) in enumerate(points):
        window = values[max(0, place - width + 1) : place + 1]
        curve.append((step, sum(window) / len(window)))
    return curve


def draw_losses(run: Run, theme: Theme, figure: "Figure") -> None:
    """Draws each group's training losses, and validation losses as dots."""
    axes = _axes(figure, "inner step", "loss")
    for head in run.heads:
        color = color_of(head.group, theme)
        _line(axes, head.losses, color=color, alpha=0.35, linewidth=1)
        _strong_line(axes, _smoothed(head.losses), color, head.name)
    points: dict[str, Curve] = defaultdict(list)
    for validation in run.heads[0].validations:
        for name, metric in validation.metrics.items():
            if "loss" in name:
                points[name].append((validation.step, metric))
    for name in sorted(points):
        steps, losses = zip(*points[name], strict=True)
        label = f"{name} (outer parameters)"
        axes.plot(steps, losses, "o", color=theme.ink, markersize=5, label=label)
    _legend(axes)


def draw_utilisation(run: Run, theme: Theme, figure: "Figure") -> None:
    """Draws each group's compute utilisation in every round."""
    axes = _axes(figure, "seconds since the first inner step", "compute utilisation")
    for head in run.heads:
        curve = utilisation_over_time(head, run.began)
        _strong_line(axes, curve, color_of(head.group, theme), head.name)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _legend(axes)


def draw_bandwidth(run: Run, theme: Theme, figure: "Figure") -> None:
    """Draws each group's sending rate and the rate that data-parallel training needs."""
    needed = 8 * ddp_bytes_per_step(run) / max(map(step_seconds, run.heads)) / 1e9
    axes = _axes(figure, "seconds since the first inner step", "sent by a group")
    rates = _draw_rates(axes, run, theme)
    if any(rates):
        if needed:
            label = f"DDP at this speed: {readable_rate(needed)}"
            axes.axhline(needed, color=theme.ink, linewidth=1.6, linestyle="--", label=label)
        # Zero has no logarithm, so the axis starts at about a thousandth of the highest rate.
        axes.set_yscale("log")
        lowest = max(max(rates) / 1000, min(filter(None, rates)))
        axes.set_ylim(lowest / 2, 3 * max([needed, *rates]))
        axes.yaxis.set_major_formatter(lambda gbit_s, _: readable_rate(gbit_s))
        axes.minorticks_off()
    _legend(axes)


def _draw_rates(axes: "Axes", run: Run, theme: Theme) -> list[float]:
    """Draws every group's sending rate over time and returns all rates in Gbit/s."""
    rates: list[float] = []
    for head in run.heads:
        ranks = [rank for rank in run.ranks if rank.group == head.group]
        curve = gbit_s_over_time(ranks, run.began)
        if curve:
            seconds = [moment for moment, _ in curve]
            group_rates = [gbit_s for _, gbit_s in curve]
            axes.step(
                seconds,
                group_rates,
                where="post",
                color=color_of(head.group, theme),
                linewidth=1.5,
                label=head.name,
            )
            rates += group_rates
    return rates


_SHADES: Mapping[str, tuple[float, Callable[[LandingRecord], Sequence[Span]]]] = {
    "in flight": (0.25, lambda landing: [landing.spans["flight"]]),
    "in the background": (0.55, in_background),
    "on the link": (1.0, on_the_link),
}
"""The opacity of each part of a flight, and the function that returns its spans."""


class _Bars(NamedTuple):
    """Spans in one row that are drawn in the same style."""

    spans: Sequence[Span]
    color: str
    alpha: float
    height: float = 0.7


def draw_flights(run: Run, theme: Theme, figure: "Figure") -> None:
    """Draws every group's inner steps, waits and flights in the last rounds."""
    axes = _axes(figure, "seconds since the first inner step", "")
    first, last = _last_rounds(run)
    # Steps are drawn slightly apart so that each one can be seen.
    gap = (last - first) / 1500
    rows = [row for head in run.heads[:_GROUPS] for row in _rows_of(head, theme, gap)]
    figure.set_size_inches(_SIZE[0], 1.2 + 0.2 * len(rows))
    for row, (_, layers) in enumerate(rows):
        for bars in layers:
            _draw_bars(axes, row, bars, (first, last), run.began)
    axes.set_xlim(first - run.began, last - run.began)
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.grid(visible=False, axis="y")
    _draw_legend_of_flights(axes, theme)
    figure.legend(loc="outside lower center", ncols=6)


def _draw_bars(axes: "Axes", row: int, bars: _Bars, shown: Span, zero: float) -> None:
    """Draws the spans that are visible, in seconds since ``zero``."""
    visible = [span for span in bars.spans if span[1] > shown[0] and span[0] < shown[1]]
    widths = [(began - zero, ended - began) for began, ended in visible]
    place = row - bars.height / 2, bars.height
    axes.broken_barh(widths, place, color=bars.color, alpha=bars.alpha, linewidth=0)


def _draw_legend_of_flights(axes: "Axes", theme: Theme) -> None:
    """Draws a bar of zero width for each legend entry."""
    axes.barh([0], [0], color=theme.quiet, alpha=1.0, label="inner step")
    axes.barh([0], [0], color=theme.line(1), alpha=1.0, label="waits")
    for name, (alpha, _) in _SHADES.items():
        axes.barh([0], [0], color=theme.quiet, alpha=alpha, label=name)


def _last_rounds(run: Run) -> Span:
    """Returns the start of the last rounds and the time of the last landing."""
    steps = run.heads[0].steps
    sync_every = int(run.ranks[0].about["settings"]["sync_every"])
    landed = [landing.spans["land"][1] for rank in run.ranks for landing in rank.landings]
    first = steps[max(0, len(steps) - _ROUNDS * sync_every)].span[0]
    return first, max([*landed, steps[-1].done])


def _rows_of(head: Rank, theme: Theme, gap: float) -> Iterator[tuple[str, list[_Bars]]]:
    """Yields labelled rows: one for a group's inner steps and waits, and one per fragment."""
    steps = [(step.span[0], max(step.span[1] - gap, step.span[0])) for step in head.steps]
    waits = [landing.spans["wait"] for landing in head.landings]
    yield head.name, [_Bars(steps, theme.quiet, 0.45, 0.8), _Bars(waits, theme.line(1), 1, 0.8)]
    color = color_of(head.group, theme)
    for fragment in range(len(head.fragments)):
        landings = [landing for landing in head.landings if landing.fragment == fragment]
        layers = []
        for alpha, spans_of in _SHADES.values():
            spans = list(chain.from_iterable(map(spans_of, landings)))
            layers.append(_Bars(spans, color, alpha))
        yield f"fragment {fragment}", layers


def draw_agreement(run: Run, theme: Theme, figure: "Figure") -> None:
    """Draws how closely the groups' outer gradients agree in direction and norm."""
    cosines = cosines_of(run)
    axes = _axes(figure, "inner step", "cosine with the mean", 121 if cosines else 122)
    if cosines:
        for group, curve in cosines.items():
            _strong_line(axes, curve, color_of(group, theme), f"group {group}")
        lowest = min(cosine for curve in cosines.values() for _, cosine in curve)
        axes.set_ylim(min(0.0, lowest), 1.04)
        axes = _axes(figure, "inner step", "norm of the outer gradient", 122)
    axes.set_ylabel("norm of the outer gradient")
    for norm_group, curve in norms_of(run).items():
        if norm_group is None:
            _strong_line(axes, curve, theme.ink, "mean")
        else:
            _strong_line(axes, curve, color_of(norm_group, theme), f"group {norm_group}")
    axes.set_ylim(bottom=0)
    _legend(axes)


def draw_sites(run: Run, theme: Theme, figure: "Figure") -> None:
    """Draws the rounds in which each site counted and the recording site's starts."""
    head = run.heads[0]
    sites = sorted({site for landing in head.landings for site in landing.sites})
    axes = _axes(figure, "seconds since the first inner step", "")
    figure.set_size_inches(_SIZE[0], 1.2 + 0.3 * max(len(sites), 2))
    for row, site in enumerate(sites):
        landings = [landing for landing in head.landings if site in landing.sites]
        moments = [landing.spans["land"][1] - run.began for landing in landings]
        color = color_of(row, theme)
        axes.plot(
            moments, [row] * len(moments), "|", color=color, markersize=12, markeredgewidth=1.6
        )
    label: str | None = f"{head.name} starts"
    for moment, _ in head.starts:
        axes.axvline(
            moment - run.began, color=theme.ink, linewidth=1.4, linestyle="--", label=label
        )
        label = None
    axes.set_yticks(range(len(sites)), sites)
    axes.set_ylim(len(sites) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    _legend(axes)


class Picture(NamedTuple):
    draw: Callable[[Run, Theme, "Figure"], None]
    title: str
    caption: str


PICTURES: Mapping[str, Picture] = {
    "losses": Picture(
        draw_losses,
        "Losses",
        "The training loss of each group, measured on its own batches with its local parameters."
        " Pale lines are measured values, strong lines are smoothed, and dots are validations.",
    ),
    "utilisation": Picture(
        draw_utilisation,
        "Compute utilisation",
        "The share of each round (sync_every inner steps) during which training did not wait for a"
        " fragment.",
    ),
    "bandwidth": Picture(
        draw_bandwidth,
        "Bandwidth between groups",
        "The rate at which each group sent data in every quarter of a round, assuming a constant"
        " rate from a launch to the arrival of all messages. The dashed line is the rate that a"
        " ring all-reduce of all gradients in every step would have required at the same training"
        " speed.",
    ),
    "flights": Picture(
        draw_flights,
        "Fragments in flight, at the end of the run",
        "At most four groups are shown. The first row of a group shows its inner steps and its"
        " waiting times. The rows below show each flight of its fragments from launch to result."
        " Strong colors mean that the fragment is on the link, weaker colors mean encoding,"
        " decoding or the outer step, and pale colors mean that the fragment is queued. Each rank"
        " uses its own clock.",
    ),
    "agreement": Picture(
        draw_agreement,
        "Agreement of the groups",
        "The cosine between the outer gradient of each group and the mean, averaged over the"
        " fragments of a round, and the norm of the outer gradient of all fragments. If one curve"
        " is far from the other curves, that group trains on different data.",
    ),
    "sites": Picture(
        draw_sites,
        "Sites that come and go",
        "Each mark shows that a site was included in a round of a fragment, at the time at which"
        " the round landed on this site. A site without marks has failed, left, or been late.",
    ),
}
"""The pictures, by file name."""


def pictures_of(run: Run) -> list[str]:
    """Returns the names of the pictures that apply to a run."""
    without = "sites" if run.heads[0].about.get("site") is None else "agreement"
    return [name for name in PICTURES if name != without]


# The page, which is self-contained


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
@media (max-width: 42rem) { .scroll::before { content: "Scroll sideways \\2192"; color: var(--quiet); display: block;
  font-size: .8rem; left: 0; position: sticky; width: fit-content; } }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--quiet); font-weight: 500; }
"""


def page(
    title: str, run: Run, verdict: Verdict, pictures: Mapping[str, Mapping[str, bytes]]
) -> str:
    """Creates the report as a self-contained HTML page."""
    tiles = [
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(label)}</span></div>'
        for number, label in _tiles(run, verdict)
    ]
    paragraphs = [f"<p>{escape(sentence)}</p>" for sentence in verdict.sentences]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}: Streaming DiLoCo</title><style>{_STYLE}</style></head><body>",
            f'<h1>Streaming DiLoCo run</h1><p class="quiet">{escape(title)}</p>',
            f'<p class="quiet">{escape(_described(run))}</p>',
            f'<div class="tiles">{"".join(tiles)}</div>',
            f"<h2>Verdict: {escape(verdict.conclusion)}</h2>",
            f'<div class="verdict">{"".join(paragraphs)}</div>',
            *(_figure(PICTURES[name], themes) for name, themes in pictures.items()),
            "<h2>Ranks</h2>",
            f'<div class="scroll"><table>{_table_of_ranks(run)}</table></div>',
            "</body></html>",
        ]
    )


def _described(run: Run) -> str:
    """Describes the model, the groups and the settings on one line."""
    first = run.ranks[0]
    about = first.about
    settings = about["settings"]
    ranks = f"{about['groups']} groups of {about['shards']}"
    if about.get("site") is not None:
        ranks = f"{first.name}: {about['shards']} ranks"
    return (
        f"{sum(numel for numel, _ in first.parameters.values()):,} parameters in"
        f" {len(first.fragments)} fragments · {ranks} · sync_every={settings['sync_every']},"
        f" overlap_steps={settings['overlap_steps']}, mixing={settings['mixing']},"
        f" compression={settings['compression'] or 'custom'}, exchange={exchange_of(run) or '-'}"
    )


def _tiles(run: Run, verdict: Verdict) -> list[tuple[str, str]]:
    """Returns the numbers for the top of the page with their labels."""
    steps = max(len(rank.steps) for rank in run.ranks)
    sent = max(bytes_sent(run).values())
    tiles = [
        (f"{verdict.utilisation:.1%}", "compute utilisation"),
        (f"{steps:,}", "inner steps"),
        (seconds_as_text(max(map(step_seconds, run.heads))), "slowest inner step"),
        (readable(sent), "sent by each group"),
    ]
    if sent and run.ranks[0].about["groups"] > 1:
        tiles.append((f"1/{ddp_bytes_per_step(run) * steps / sent:,.0f}", "of the bytes of DDP"))
    if verdict.link is not None:
        tiles.append((readable_rate(verdict.link.gbit_s), "link rate while in use"))
    return tiles


def _table_of_ranks(run: Run) -> str:
    """Formats a table with a header row and one row per rank."""
    names = ("rank", "group", "host", "inner step", "waited", "utilisation", "sent")
    rows = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"]
    for rank in run.ranks:
        waited = sum(landing.seconds("wait") for landing in landings_in_training(rank))
        cells = (
            str(rank.rank),
            rank.name.removeprefix("group "),
            str(rank.about["host"]),
            seconds_as_text(step_seconds(rank)),
            seconds_as_text(waited),
            f"{utilisation(rank):.1%}",
            readable(sum(landing.bytes_sent for landing in rank.landings)),
        )
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return "".join(rows)


def _figure(picture: Picture, themes: Mapping[str, bytes]) -> str:
    """Embeds a picture for light and dark pages with its title and caption."""
    urls = {
        theme: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
        for theme, svg in themes.items()
    }
    return (
        f'<h2>{picture.title}</h2><p class="quiet">{escape(picture.caption)}</p>'
        '<picture class="scroll">'
        f'<source media="(prefers-color-scheme: dark)" srcset="{urls["dark"]}">'
        f'<img src="{urls["light"]}" alt="{escape(picture.title)}"></picture>'
    )
