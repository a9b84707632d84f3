"""What limited a run, in words, and which setting to change, with the gain that the planner expects."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_sdiloco.algorithm import OVERLAP_STEPS, Parameter, Settings, kind_of_all_reduce
from lightning_sdiloco.compression import COMPRESSIONS
from lightning_sdiloco.lightning import LandingRecord, Rank, Run
from lightning_sdiloco.planning import Groups, Link, Model, Streaming, planner, readable_rate
from lightning_sdiloco.tools.report import series


class Causes(NamedTuple):
    """Seconds for which training waited, by what it waited for."""

    link: float
    groups: float
    background: float


@dataclass(frozen=True)
class Advice:
    """A setting to change."""

    changes: dict[str, object]
    now: float
    then: float


@dataclass(frozen=True)
class Verdict:
    """What there is to say about a run."""

    limit: str
    utilisation: float
    causes: Causes
    link: Link | None
    advice: Advice | None
    sentences: list[str]


def judge(run: Run) -> Verdict:
    """Finds what limited a run, and which setting would help."""
    shares = [series.utilisation(rank) for rank in run.ranks]
    share = sum(shares) / len(shares)
    causes, link = causes_of(run), measured_link(run)
    limit = _limit(run, share, causes)
    advice = advise(run, link) if link is not None and limit in ("link", "background") else None
    sentences = [
        *_what_limited(run, limit, share, causes, link),
        *_what_to_change(limit, advice, link),
        *_agreement(run),
    ]
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


def _with_others(run: Run) -> Iterator[tuple[Rank, LandingRecord, list[LandingRecord]]]:
    """Yields every landing of every rank, with those of the same flight in the other groups."""
    flights: dict[tuple[int, int, int], list[tuple[Rank, LandingRecord]]] = {}
    for rank in run.ranks:
        for landed in series.waits(rank):
            key = rank.about["shard"], landed.launched_at, landed.fragment
            flights.setdefault(key, []).append((rank, landed))
    for together in flights.values():
        for rank, landed in together:
            yield rank, landed, [other for of, other in together if of is not rank]


def _cause(landed: LandingRecord, others: list[LandingRecord]) -> Causes:
    """Counts the time until the last group launched for that group, and the rest for the link or the own background."""
    began, ended = landed.spans["wait"]
    all_launched = max((other.spans["launch"][1] for other in others), default=began)
    slower = series.overlap((began, ended), (began, all_launched))
    rest = max(began, all_launched), ended
    link = sum(series.overlap(rest, hop) for hop in series.on_the_link(landed)) if rest[1] > rest[0] else 0.0
    return Causes(link, slower, ended - began - slower - link)


def measured_link(run: Run) -> Link | None:
    """Measures the rate at which the flights of the run went, on each hop from when all groups had sent."""
    bits = seconds = 0.0
    for _, landed, others in _with_others(run):
        on_link = _seconds_on_link(landed, others)
        if landed.link_gbit_s is not None and landed.bytes_sent and on_link > 0:
            bits, seconds = bits + 8 * landed.bytes_sent, seconds + on_link
    if seconds == 0:
        return None
    return Link(gbit_s=bits / seconds / 1e9 * run.ranks[0].about["shards"])


def _seconds_on_link(landed: LandingRecord, others: list[LandingRecord]) -> float:
    hops = zip(series.on_the_link(landed), *map(series.on_the_link, others), strict=False)
    return sum(max(0.0, own[1] - max(hop[0] for hop in (own, *theirs))) for own, *theirs in hops)


# What to change


def advise(run: Run, link: Link) -> Advice | None:
    """Finds the smallest change with which the planner expects the utilisation that it recommends, or the best one."""
    settings, model = _settings(run), _model(run)
    if settings is None:
        return None
    groups = _groups(run, model, settings)

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
    names = ("overlap_steps", "exchange", "compression", "sync_every", "layers_per_fragment")
    changes = {name: getattr(best, name) for name in names if getattr(best, name) != getattr(settings, name)}
    return Advice(changes, now, reached)


def _small_changes(settings: Settings) -> Iterator[Settings]:
    """Yields the settings with one of them changed, those that change training least first."""
    for overlap_steps in OVERLAP_STEPS:
        if settings.overlap_steps < overlap_steps < settings.sync_every:
            yield replace(settings, overlap_steps=overlap_steps)
    if settings.exchange != "auto":
        yield replace(settings, exchange="auto")
    if settings.codec.wire_bytes(1 << 20) > COMPRESSIONS["fp4"].wire_bytes(1 << 20):
        yield replace(settings, compression="fp4")
    for factor in (2, 3, 5):
        yield replace(settings, sync_every=factor * settings.sync_every)


def _settings(run: Run) -> Settings | None:
    """Returns the settings of a run, with ``exchange="auto"`` where that means the exchange that ran."""
    about = run.ranks[0].about
    told = about["settings"]
    if told["compression"] is None:
        return None
    names = ("sync_every", "overlap_steps", "layers_per_fragment", "fragments", "compression")
    automatic = Settings(**{name: told[name] for name in names})
    exchange = series.exchange(run)
    ran = automatic if exchange is None else replace(automatic, exchange=exchange)
    by_itself = kind_of_all_reduce("auto", about["groups"], automatic.codec)
    return automatic if kind_of_all_reduce(ran.exchange, about["groups"], ran.codec) is by_itself else ran


def _model(run: Run) -> Model:
    sizes = run.ranks[0].parameters
    parameters = tuple(Parameter(name, nbytes) for name, (_, nbytes) in sizes.items())
    return Model(parameters, tuple(numel for numel, _ in sizes.values()))


def _groups(run: Run, model: Model, settings: Settings) -> Groups:
    """Returns the groups of a run, with the memory rate at which its work in the background took as long as it did."""
    about = run.ranks[0].about
    step_time = max(series.step_seconds(rank) for rank in run.ranks)
    groups = Groups(step_time, about["groups"], about["shards"], memory_rate=1.0)
    method = Streaming(model, settings, groups)
    nbytes = seconds = 0.0
    for rank in run.ranks:
        for landed in series.waits(rank):
            # At one byte a second the seconds are bytes.
            nbytes += method.background_seconds(landed.fragment)
            seconds += sum(ended - began for began, ended in series.in_background(landed))
    return replace(groups, memory_rate=nbytes / seconds if seconds else Groups.memory_rate)


# In words


def _what_limited(run: Run, limit: str, share: float, causes: Causes, link: Link | None) -> list[str]:
    steps = {rank.group: series.step_seconds(rank) for rank in run.heads}
    kept = f"Training kept computing for {share:.1%} of the time."
    waited = f"Of the time that it waited, {_shares(causes)}."
    rate = f" The link carried {readable_rate(link.gbit_s)} while fragments were on it." if link is not None else ""
    if limit == "alone" and run.heads[0].about.get("site") is not None:
        return [f"{kept} {_who_counted(run.heads[0])}"]
    if limit == "alone":
        return ["There is one worker group, so nothing travelled and nothing was waited for."]
    if limit == "nothing":
        return [f"{kept} Nothing held it back that a setting would change much.{rate}"]
    if limit == "groups":
        slow, fast = max(steps, key=lambda g: steps[g]), min(steps, key=lambda g: steps[g])
        return [
            f"{kept} A slower group limited this run: an inner step of group {slow} took"
            f" {seconds_as_text(steps[slow])}, of group {fast} {seconds_as_text(steps[fast])}. {waited}",
            "No setting of the exchange changes that: at every landing the faster groups wait for the slowest. Give the"
            f" slower group smaller batches or faster devices. With equal speed training would be up to"
            f" {steps[slow] / steps[fast]:.2f} times as fast.",
        ]
    what = "The link" if limit == "link" else "Encoding, decoding and the outer step, in the background,"
    return [f"{kept} {what} limited this run. {waited}{rate}"]


def _who_counted(rank: Rank) -> str:
    landed = series.waits(rank)
    sites = sorted({site for one in landed for site in one.sites})
    counted = ", ".join(f"{site} in {sum(site in one.sites for one in landed)}" for site in sites) or "nobody"
    again = len(rank.starts) - 1
    started = "" if not again else f" It was started again {'once' if again == 1 else f'{again} times'}."
    return (
        f"This is {rank.name}, one site of a federation, which waits for no other.{started} Of the {len(landed)} rounds"
        f" of fragments that landed here, there counted: {counted}."
    )


def _shares(causes: Causes) -> str:
    total = sum(causes) or 1.0
    words = {"link": "for the link", "groups": "for a slower group", "background": "for work in the background"}
    parts = sorted(causes._asdict().items(), key=lambda cause: -cause[1])
    return ", ".join(f"{seconds / total:.0%} was {words[name]}" for name, seconds in parts)


def _what_to_change(limit: str, advice: Advice | None, link: Link | None) -> list[str]:
    if limit not in ("link", "background"):
        return []
    if link is None:
        return [
            "How fast the link is cannot be told: all messages were there before a rank began to wait for them, so the"
            " planner cannot say what to change."
        ]
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


def seconds_as_text(seconds: float) -> str:
    """Formats a time with three digits, in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
