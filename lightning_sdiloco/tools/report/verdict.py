"""What limited a run, in words, and which setting to change, with the gain that the planner expects."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_sdiloco.algorithm.partition import Parameter
from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.compression import COMPRESSIONS
from lightning_sdiloco.lightning.monitor.records import Landed, Rank, Run
from lightning_sdiloco.planning import planner
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, lane_bytes
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools.report import series


class Causes(NamedTuple):
    """Seconds for which training waited, by what it waited for.

    Attributes:
        link: For messages on their way.
        groups: For a group that had not launched yet: a slower one.
        lane: For encoding, decoding and the outer step.
    """

    link: float
    groups: float
    lane: float


@dataclass(frozen=True)
class Advice:
    """A setting to change.

    Attributes:
        changes: The settings and their new values; none where the planner knows none that would gain much.
        now: The utilisation that the planner expects of the settings of the run.
        then: That with the changes.
    """

    changes: dict[str, object]
    now: float
    then: float


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a run.

    Attributes:
        limit: What limited it most: ``nothing``, ``link``, ``groups``, ``lane`` or, for one group, ``alone``.
        utilisation: Mean over the ranks of the share of the time in which training did not wait.
        causes: What training waited for, added up over the ranks.
        link: The link as it was measured; None if nothing travelled.
        advice: Which setting to change; None if no setting would help, or the planner cannot tell.
        sentences: All of it in words.
    """

    limit: str
    utilisation: float
    causes: Causes
    link: Link | None
    advice: Advice | None
    sentences: list[str]


def judge(run: Run) -> Verdict:
    """Judges a run."""
    shares = [series.utilisation(rank) for rank in run.ranks]
    share = sum(shares) / len(shares)
    causes, link = causes_of(run), measured_link(run)
    limit = _limit(run, share, causes)
    advice = advise(run, link) if link is not None and limit in ("link", "lane") else None
    sentences = [*_what_limited(run, limit, share, causes, link), *_what_to_change(limit, advice), *_agreement(run)]
    return Verdict(limit, share, causes, link, advice, sentences)


def _limit(run: Run, share: float, causes: Causes) -> str:
    if run.ranks[0].about["groups"] == 1:
        return "alone"
    if share >= planner.TARGET:
        return "nothing"
    return max(causes._asdict().items(), key=lambda cause: cause[1])[0]


# What training waited for


def causes_of(run: Run) -> Causes:
    """Divides the waits of all ranks by what they waited for."""
    parts = [_cause(landed, others) for _, landed, others in _with_others(run)]
    return Causes(*(sum(column) for column in zip(*parts, strict=True))) if parts else Causes(0, 0, 0)


def _with_others(run: Run) -> Iterator[tuple[Rank, Landed, list[Landed]]]:
    """Every landing of every rank, with those of the same flight in the other groups."""
    flights: dict[tuple[int, int, int], list[tuple[Rank, Landed]]] = {}
    for rank in run.ranks:
        for landed in series.waits(rank):
            key = rank.about["shard"], landed.launched_at, landed.fragment
            flights.setdefault(key, []).append((rank, landed))
    for together in flights.values():
        for rank, landed in together:
            yield rank, landed, [other for of, other in together if of is not rank]


def _cause(landed: Landed, others: list[Landed]) -> Causes:
    """Time before the last group launched was spent on that group; the rest on the link, or in the own lane."""
    began, ended = landed.spans["wait"]
    all_launched = max((other.spans["launch"][1] for other in others), default=began)
    slower = series.overlap((began, ended), (began, all_launched))
    rest = max(began, all_launched), ended
    link = series.overlap(rest, series.on_the_link(landed)) if rest[1] > rest[0] else 0.0
    return Causes(link, slower, ended - began - slower - link)


def measured_link(run: Run) -> Link | None:
    """The rate at which the flights of the run went, counted from when all groups had sent."""
    bits = seconds = 0.0
    for _, landed, others in _with_others(run):
        began, ended = series.on_the_link(landed)
        sent = max((series.on_the_link(other)[0] for other in others), default=began)
        if landed.bytes_sent and ended > max(began, sent):
            bits, seconds = bits + 8 * landed.bytes_sent, seconds + ended - max(began, sent)
    if seconds == 0:
        return None
    return Link(gbit_s=bits / seconds / 1e9 * run.ranks[0].about["shards"])


# What to change


def advise(run: Run, link: Link) -> Advice | None:
    """The smallest change with which the planner expects the utilisation that it recommends; otherwise the best one."""
    settings, model, groups = _settings(run), _model(run), _groups(run)
    if settings is None:
        return None

    def expected(chosen: Settings) -> float:
        return Streaming(model, chosen, groups).utilisation(planner.with_margin(link))

    now = expected(settings)
    best, reached = settings, now
    for candidate in [*_small_changes(settings), planner.recommend(model, groups, link).settings]:
        utilisation = expected(candidate)
        if utilisation > 1.01 * reached:
            best, reached = candidate, utilisation
        if reached >= planner.TARGET:
            break
    names = ("overlap_steps", "compression", "sync_every", "layers_per_fragment")
    changes = {name: getattr(best, name) for name in names if getattr(best, name) != getattr(settings, name)}
    return Advice(changes, now, reached)


def _small_changes(settings: Settings) -> Iterator[Settings]:
    """One setting changed at a time, those that change training least first."""
    for overlap_steps in (2, 3, 4, 5, 10):
        if settings.overlap_steps < overlap_steps < settings.sync_every:
            yield replace(settings, overlap_steps=overlap_steps)
    if settings.codec.wire_bytes(1 << 20) > COMPRESSIONS["fp4"].wire_bytes(1 << 20):
        yield replace(settings, compression="fp4")
    for factor in (2, 3, 5):
        yield replace(settings, sync_every=factor * settings.sync_every)


def _settings(run: Run) -> Settings | None:
    told = run.ranks[0].about["settings"]
    if told["compression"] is None:
        return None
    names = ("sync_every", "overlap_steps", "layers_per_fragment", "fragments", "compression")
    return Settings(**{name: told[name] for name in names})


def _model(run: Run) -> Model:
    sizes = run.ranks[0].parameters
    parameters = tuple(Parameter(name, nbytes) for name, (_, nbytes) in sizes.items())
    return Model(parameters, tuple(numel for numel, _ in sizes.values()))


def _groups(run: Run) -> Groups:
    about, sizes = run.ranks[0].about, run.ranks[0].parameters
    numels = [sum(sizes[name][0] for name in names) / about["shards"] for names in run.ranks[0].fragments]
    # The memory rate with which the planner comes to the time that the lane took.
    values = seconds = 0.0
    for rank in run.ranks:
        for landed in series.waits(rank):
            values += numels[landed.fragment]
            seconds += sum(landed.seconds(part) for part in ("encode", "decode", "outer_step"))
    return Groups(
        step_time=max(series.step_seconds(rank) for rank in run.ranks),
        groups=about["groups"],
        group_size=about["shards"],
        memory_rate=lane_bytes(about["groups"]) * values / seconds if seconds else 1e12,
    )


# In words


def _what_limited(run: Run, limit: str, share: float, causes: Causes, link: Link | None) -> list[str]:
    steps = {rank.group: series.step_seconds(rank) for rank in run.heads}
    kept = f"Training kept computing for {share:.1%} of the time."
    waited = f"Of the time that it waited, {_shares(causes)}."
    rate = f" The link carried {_gbit_s(link.gbit_s)} while fragments were on it." if link is not None else ""
    if limit == "alone":
        return ["There is one worker group, so nothing travelled and nothing was waited for."]
    if limit == "nothing":
        return [f"{kept} Nothing held it back that a setting would change much.{rate}"]
    if limit == "groups":
        slow, fast = max(steps, key=lambda g: steps[g]), min(steps, key=lambda g: steps[g])
        return [
            f"{kept} A slower group limited this run: an inner step of group {slow} took {_seconds(steps[slow])}, of"
            f" group {fast} {_seconds(steps[fast])}. {waited}",
            "No setting of the exchange changes that: at every landing the faster groups wait for the slowest. Give the"
            f" slower group smaller batches or faster devices. With equal speed training would be up to"
            f" {steps[slow] / steps[fast]:.2f} times as fast.",
        ]
    what = "The link" if limit == "link" else "Encoding, decoding and the outer step, in the background lane,"
    return [f"{kept} {what} limited this run. {waited}{rate}"]


def _shares(causes: Causes) -> str:
    total = sum(causes) or 1.0
    words = {"link": "for the link", "groups": "for a slower group", "lane": "for the background lane"}
    parts = sorted(causes._asdict().items(), key=lambda cause: -cause[1])
    return ", ".join(f"{seconds / total:.0%} was {words[name]}" for name, seconds in parts)


def _what_to_change(limit: str, advice: Advice | None) -> list[str]:
    if limit not in ("link", "lane"):
        return []
    if advice is None:
        return ["The planner cannot tell what to change: it knows compressions by their names only."]
    if not advice.changes and advice.now >= planner.TARGET:
        return [
            f"On a steady link of that rate the planner expects a compute utilisation of {advice.now:.1%} of these"
            " settings: the link or the inner steps were uneven. A larger overlap_steps hides more of that."
        ]
    if not advice.changes:
        return ["The planner knows no change of the settings that would gain much: it takes a faster link."]
    changes = " and ".join(f"{name}={value!r}" for name, value in advice.changes.items())
    return [
        f"Set {changes}. The planner expects a compute utilisation of {advice.then:.1%} of it, and {advice.now:.1%} of"
        f" the settings as they are, counting on {planner.MARGIN:.0%} of the bandwidth that was measured."
    ]


def _agreement(run: Run) -> list[str]:
    first = run.heads[0]
    landings = series.waits(first)
    sentences = []
    out = sum(len(landed.left_out) for landed in landings), sum(len(landed.outlying) for landed in landings)
    if any(out):
        sentences.append(
            f"Of all outer gradients {out[0]} were left out of a mean because they were not finite, and {out[1]}"
            " because outlier_guard found them too long."
        )
    last = [curve[-1][1] for curve in series.cosines(run).values()]
    if len(last) > 1:
        cosine, alone = sum(last) / len(last), (1 / len(last)) ** 0.5
        sentences.append(
            f"In the last round the outer gradients of the groups had a cosine of {cosine:.2f} with their mean, on"
            f" average; directions that have nothing in common have {alone:.2f}, equal ones 1."
        )
    return sentences


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _gbit_s(gbit_s: float) -> str:
    return f"{gbit_s:.3g} Gbit/s" if gbit_s >= 0.1 else f"{1000 * gbit_s:.3g} Mbit/s"
