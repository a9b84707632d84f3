"""Runs ``sdiloco plan``: hands the options to the planner, and its answer to text, JSON and a picture."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.federation.charter import LONGEST_GRACE
from lightning_sdiloco.federation.quorum import All, Quorum
from lightning_sdiloco.federation.waiting import Round, Waits, Way, waits
from lightning_sdiloco.planning import paper, planner
from lightning_sdiloco.planning.hub import HubLoad, hub_link, largest_payload, through_hub
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.links import SharedOut, shared_out
from lightning_sdiloco.planning.methods import Memory, Method
from lightning_sdiloco.planning.paper import TARGETS, Entry
from lightning_sdiloco.planning.planner import MARGIN, TARGET, Plan, Prediction
from lightning_sdiloco.planning.units import readable, readable_rate, short
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools.output import LIGHT, percent, plain, require_drawable, save_picture, table

MakeModel = Callable[[], nn.Module]


def plan(
    model: MakeModel | None = None,
    params: float | None = None,
    layers: int | None = None,
    step_time: float | None = None,
    groups: int = 2,
    group_size: int = 1,
    bandwidth: float | None = None,
    hub_bandwidth: float | None = None,
    quorum: int | Quorum | None = None,
    grace: float | None = None,
    delays: str | None = None,
    links: str | None = None,
    round_trip: float = 0.0,
    loss: float = 0.0,
    sync_every: int = 100,
    overlap_steps: int = 5,
    fragments: int | str = "strided:3",
    compression: str = "fp4",
    steps: int = 10_000,
    memory_rate: float = 1000.0,
    paper_table_4: bool = False,
    picture: str | None = None,
    format: Literal["text", "json"] = "text",
) -> str:
    """Print what a link allows: bytes, peak bandwidth and compute utilisation for each method, and what to set.

    Args:
        model: LightningModule (or other module) by its class path, with --model.NAME for its arguments.
        params: Number of parameters, in place of a model.
        layers: Number of layers, with --params.
        step_time: Seconds of an inner step, without anything between groups.
        groups: Number of worker groups.
        group_size: Ranks in a worker group.
        bandwidth: Gbit/s between a group and all others, in each direction.
        hub_bandwidth: Gbit/s of the hub of a federation, in each direction: the groups are its sites then.
        quorum: The quorum of that federation: a number of sites, or a class such as DynamicBackup, with
            --quorum.least=0.5 for its arguments. Says whom a round waits for.
        grace: Seconds for which its rounds stay open after the first contribution; by default 10, with --quorum.
        delays: Seconds by which what each site sends comes later, as 0,0,12; with --quorum.
        links: YAML file with the Gbit/s of each group's link, a list or a mapping from names, in place of --bandwidth
            and --groups: plans with the slowest one, and says what two shots with parts that suit the links bring.
        round_trip: Seconds to another group and back: 50 ms is 0.05.
        loss: Share of the packets that get lost: 0.1 % is 0.001.
        sync_every: Inner steps between two launches of the same fragment.
        overlap_steps: Inner steps between the launch of a fragment and its landing.
        fragments: How the model is cut: strided:3 or sequential:3, with the repeated blocks in a fragment, balanced, or
            a number of fragments.
        compression: How outer gradients are encoded: fp32, bf16 or fp4.
        steps: Inner steps of the whole run, for the bytes in all.
        memory_rate: GB/s at which a device reads and writes its memory: about 1000 for a GPU, 10 for a CPU core.
        paper_table_4: Reproduce Table 4 of the paper instead, in its idealisation.
        picture: File (.svg or .png) for a picture of the utilisation over the bandwidth.
        format: How to print.

    Raises:
        ValueError: If an option is missing or out of its range, the model cannot be made, or the picture cannot be
            drawn.

    Examples:
        >>> print(plan(params=1e9, layers=24, step_time=0.1, bandwidth=1).splitlines()[0])
        1,000,000,000 parameters in 8 fragments, 2 groups of 1 rank
    """
    if paper_table_4:
        return _paper(picture, format)
    if picture is not None:
        require_drawable(picture)
    of_links, bandwidth, groups = _links(links, bandwidth, groups)
    step_time, bandwidth = _required(model, params, layers, step_time, bandwidth, steps)
    described = _described(model, params, layers)
    settings = Settings(sync_every, overlap_steps, fragments=fragments, compression=compression)
    workers, link = Groups(step_time, groups, group_size, memory_rate * 1e9), Link(bandwidth, round_trip, loss)
    of_sites = of_links or {f"site {number}": bandwidth for number in range(groups)}
    waits = _asked_waits(described, settings, workers, link, hub_bandwidth, quorum, grace, delays, of_sites)
    hub = None if hub_bandwidth is None else through_hub(described, settings, workers, link, hub_bandwidth)
    shared = shared_out(described, settings, workers, list(of_links.values())) if of_links else None
    planned = planner.plan(described, settings, workers, link, steps)
    if picture is not None:
        _draw_plan(picture, planned)
    if format == "json":
        more = {"hub": hub, "waits": waits, "links": shared}
        told = _plan_as_json(planned) | {name: own for name, own in more.items() if own is not None}
        return json.dumps(plain(told), indent=2)
    parts = [_plan_as_text(planned)]
    parts += [] if hub is None else [_hub_as_text(hub, settings)]
    parts += [] if waits is None else [_waits_as_text(waits, step_time)]
    parts += [] if shared is None else [_links_as_text(shared, list(of_links), settings)]
    return "\n\n".join(parts)


def _links(path: str | None, bandwidth: float | None, groups: int) -> tuple[dict[str, float], float | None, int]:
    """Reads the links of all groups, Gbit/s by name in their order; returns them with the slowest and their number."""
    if path is None:
        return {}, bandwidth, groups
    if bandwidth is not None:
        raise ValueError(
            f"--bandwidth {bandwidth:g} was given together with --links, which says it. Leave one of them out."
        )
    try:
        told = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"--links {path} cannot be read: {error}. Give a YAML file with the Gbit/s of each link."
        ) from error
    links = dict(enumerate(told)) if isinstance(told, list) else told
    are_numbers = isinstance(links, dict) and all(type(link) in (int, float) for link in links.values())
    if not are_numbers or len(links) < 2:
        raise ValueError(
            f"--links {path} holds {told!r}. Give a list of at least two numbers, the Gbit/s of each group's link, or a"
            " mapping from names to them."
        )
    named = {f"group {name}" if isinstance(name, int) else str(name): link for name, link in links.items()}
    return named, min(named.values()), len(named)


def _required(
    model: MakeModel | None,
    params: float | None,
    layers: int | None,
    step_time: float | None,
    bandwidth: float | None,
    steps: int,
) -> tuple[float, float]:
    if steps < 1:
        raise ValueError(f"steps={steps} is out of range: it must be at least 1. Give the inner steps of the run.")
    size = {} if model else {"--params": params, "--layers": layers}
    missing = [name for name, value in size.items() if value is None]
    if missing or step_time is None or bandwidth is None:
        missing += [name for name, value in (("--step-time", step_time), ("--bandwidth", bandwidth)) if value is None]
        raise ValueError(
            f"{', '.join(missing)} must be given. A plan needs a model (--model, or --params and --layers), the time"
            " of an inner step and the bandwidth between groups, such as: --params 1e9 --layers 24 --step-time 0.1"
            " --bandwidth 1"
        )
    return step_time, bandwidth


def _described(model: MakeModel | None, params: float | None, layers: int | None) -> Model:
    if model is not None:
        if params is not None or layers is not None:
            raise ValueError("--model was given together with --params or --layers. Give either the model or its size.")
        return Model.of_parameters(trainable(_made(model)))
    assert params is not None
    assert layers is not None
    if params % 1 != 0:
        raise ValueError(f"params={params} is not a whole number. Give the number of parameters.")
    return Model.of_size(int(params), layers)


def _made(make: MakeModel) -> nn.Module:
    try:
        with torch.device("meta"):
            return _configured(make())
    except Exception:  # some models look at their values: these need the memory
        try:
            return _configured(make())
        except Exception as error:
            raise ValueError(
                f"The model could not be made: {type(error).__name__}: {error}. Correct its arguments (--model.NAME),"
                " or give --params and --layers in its place."
            ) from error


def _configured(module: nn.Module) -> nn.Module:
    """Calls the hook in which a LightningModule may make its layers."""
    configure = getattr(module, "configure_model", None)
    if configure is not None:
        configure()
    return module


def _draw_plan(path: str, planned: Plan) -> None:
    def curve(method: Method) -> Callable[[float], float]:
        return lambda gbit_s: method.utilisation(replace(planned.link, gbit_s=gbit_s))

    methods = planner.alternatives(planned.model, planned.settings, planned.groups)
    curves = {name: curve(method) for name, method in methods.items()}
    title = f"{planned.model.numel:,} parameters, {planned.groups.step_time:g} s per inner step"
    # From where nothing works to where DDP does, with the link that was asked about in between.
    busy = [need for prediction in planned.methods.values() for need in prediction.gbit_s_for.values() if need]
    seen = [planned.link.gbit_s, *busy]
    first, last = math.floor(math.log10(min(seen))) - 1, math.ceil(math.log10(max(seen)))
    _draw(path, {title: curves}, first, last, mark=planned.link.gbit_s)


def _paper(picture: str | None, format: str) -> str:
    entries = list(paper.table_4())
    if picture is not None:
        panels = {
            f"{name} parameters": {method: partial(curve, model) for method, curve in paper.METHODS.items()}
            for name, model in paper.MODELS.items()
        }
        _draw(picture, panels, -1, 3)
    if format == "json":
        return json.dumps(plain(entries), indent=2)
    return _table_4_as_text(entries)


# A federation


def _asked_waits(
    model: Model,
    settings: Settings,
    groups: Groups,
    link: Link,
    hub_bandwidth: float | None,
    quorum: int | Quorum | None,
    grace: float | None,
    delays: str | None,
    of_sites: Mapping[str, float],
) -> Waits | None:
    if quorum is None:
        for name, value in (("--grace", grace), ("--delays", delays)):
            if value is not None:
                raise ValueError(
                    f"{name} is about rounds that close by a quorum. Give --quorum too, such as --quorum 2."
                )
        return None
    if hub_bandwidth is None:
        raise ValueError(
            f"--quorum {quorum} is about the sites of a federation: worker groups that are launched together wait for"
            " all. Give the --hub-bandwidth of the federation too."
        )
    if isinstance(quorum, int) and quorum < 1:
        raise ValueError(f"quorum={quorum} is out of range: it must be at least 1. Give a number of sites.")
    late = _seconds(delays, len(of_sites))
    ways = {
        site: Way(hub_link(replace(link, gbit_s=gbit_s), groups.groups, hub_bandwidth), delay)
        for (site, gbit_s), delay in zip(of_sites.items(), late, strict=True)
    }
    return waits(
        All(quorum) if isinstance(quorum, int) else quorum,
        LONGEST_GRACE if grace is None else grace,
        ways,
        largest_payload(model, settings, groups),
        settings.sync_every,
        groups.step_time,
    )


def _seconds(delays: str | None, sites: int) -> list[float]:
    try:
        each = [float(number) for number in delays.split(",")] if delays else [0.0] * sites
    except ValueError:
        each = []
    if len(each) != sites or not all(number >= 0 for number in each):
        raise ValueError(
            f"--delays {delays} are no {sites} numbers of seconds, from 0. Give one for each site, as 0,0,12."
        )
    return each


# The answer


def _plan_as_json(planned: Plan) -> dict[str, Any]:
    chosen = planned.recommendation
    return {
        "parameters": planned.model.numel,
        "gradient_bytes": planned.model.nbytes,
        **vars(planned.groups),
        "link": planned.link,
        "steps": planned.steps,
        "settings": _settings(planned.settings, planned.fragments, planned.groups),
        "methods": planned.methods,
        "compressions": planned.compressions,
        "memory": planned.memory,
        "recommendation": {
            **_settings(chosen.settings, chosen.fragments, planned.groups),
            **chosen.prediction._asdict(),
            "utilisation_with_margin": chosen.utilisation_with_margin,
            "memory": chosen.memory,
        },
    }


def _settings(settings: Settings, fragments: tuple[int, ...], groups: Groups) -> dict[str, Any]:
    names = ("sync_every", "overlap_steps", "fragments", "compression")
    told = {name: getattr(settings, name) for name in names}
    return {**told, **settings.chosen_for(groups.groups).numbers, "number_of_fragments": len(fragments)}


# As text


NAMES: Mapping[str, str] = {
    "ddp": "DDP",
    "diloco": "DiLoCo",
    "streaming": "Streaming DiLoCo",
    "streaming_overlap": "... with overlap",
    "streaming_overlap_fp4": "... and FP4",
}
"""The methods, as the tables call them."""

_SHOWN = ("0.8", "0.95")


def _plan_as_text(plan: Plan) -> str:
    settings = plan.settings
    overlap = f"overlap_steps={settings.overlap_steps}"
    asked = f"sync_every={settings.sync_every}, {overlap}, fragments={settings.fragments!r}"
    return "\n".join(
        [
            *_circumstances(plan),
            "",
            f"With {asked}, compression={settings.compression!r}:",
            "",
            _predictions(plan.methods, "method"),
            "",
            f"Streaming DiLoCo with {overlap}, by compression:",
            "",
            _predictions(plan.compressions, "compression"),
            "",
            "Memory in each rank, beside ordinary training:",
            f"  {_memory(plan.memory)}",
            "",
            *_recommendation(plan),
        ]
    )


def _hub_as_text(hub: HubLoad, settings: Settings) -> str:
    busy = f"{percent(hub.share)} of what it can" if hub.share <= 1 else f"{hub.share:.3g} times what it can"
    late = hub.flight_steps > settings.overlap_steps
    lines = [
        f"Through a hub with {readable_rate(hub.gbit_s)} in each direction, as a federation of {hub.sites} sites:",
        "",
        f"  {readable(hub.bytes_in)} in and {readable(hub.bytes_out)} out for a round of all fragments:",
        f"  of each fragment a site sends one payload and gets {hub.sites - 1}",
        f"  with sync_every={settings.sync_every} the hub sends {busy}",
        f"  the largest fragment is there after {hub.flight_seconds:.3g} s, {hub.flight_steps} inner steps"
        + (f": later than overlap_steps={settings.overlap_steps}" if late else ""),
        "",
        f"  Enough: sync_every={hub.enough.sync_every}, overlap_steps={hub.enough.overlap_steps}"
        if hub.enough
        else "  No sync_every up to 500 is enough: give the hub more bandwidth, or compress more",
    ]
    return "\n".join(lines)


def _waits_as_text(waits: Waits, step_time: float) -> str:
    def told(round: Round) -> str:
        steps = max(1, math.ceil(round.seconds / step_time))
        return f"closes after {round.closes:.3g} s, is there after {round.seconds:.3g} s, {steps} inner steps"

    sites = {
        "site": list(waits.arrives),
        "at the hub\nafter, s": [f"{seconds:.3g}" for seconds in waits.arrives.values()],
        "counts": ["yes" if site in waits.usual.counted else "late" for site in waits.arrives],
    }
    more = [f"  at times it {told(waits.longest)}"] if waits.longest != waits.usual else []
    return "\n".join(
        [
            "With that quorum a round of the largest fragment",
            f"  {told(waits.usual)}",
            *more,
            f"  if it waited for all: {told(waits.all)}",
            "",
            table(sites),
        ]
    )


def _links_as_text(shared: SharedOut, names: list[str], settings: Settings) -> str:
    columns = {
        "link": names,
        "Gbit/s": map(short, shared.links),
        "share": map(percent, shared.shares),
        "bytes\nin a round": map(readable, shared.bytes),
        "seconds\nin a round": map(short, shared.seconds),
    }
    given = ", ".join(short(link) for link in shared.links)
    lines = [
        f"Two shots with exchange=TwoShot('by_bandwidth', links=[{given}]), compression={settings.compression!r}:",
        "",
        table(columns),
        "",
        f"  a round of all fragments keeps the busiest link busy for {short(shared.round_seconds)} s,",
        f"  with equal parts for {short(shared.equal_seconds)} s: {shared.gain:.2f} times as long",
    ]
    return "\n".join(lines)


def _table_4_as_text(entries: Sequence[Entry]) -> str:
    """Formats Table 4: what the closed form gives, followed by the paper's own number where it differs."""
    told = [f"{one.gbit_s}" if one.gbit_s == one.paper else f"{one.gbit_s} ({one.paper})" for one in entries]
    rows = entries[:: len(TARGETS)]
    columns = {"model": [row.model for row in rows], "method": [NAMES[row.method] for row in rows]} | {
        percent(target): told[number :: len(TARGETS)] for number, target in enumerate(TARGETS)
    }
    title = "Gbit/s for a compute utilisation; in brackets what the paper has instead"
    return f"{title}\n\n{table(columns, left=2, section=len(NAMES))}"


def _circumstances(plan: Plan) -> list[str]:
    groups, link = plan.groups, plan.link
    ranks = "1 rank" if groups.group_size == 1 else f"{groups.group_size} ranks"
    loss = f"{link.loss:.3g} of the packets lost" if link.loss else "no loss"
    return [
        f"{plan.model.numel:,} parameters in {_fragments(plan.fragments)}, {groups.groups} groups of {ranks}",
        f"{plan.steps:,} inner steps of {groups.step_time:g} s",
        f"{readable_rate(link.gbit_s)} in each direction, {link.round_trip * 1000:g} ms round trip, {loss}",
    ]


def _predictions(rows: Mapping[str, Prediction], kind: str) -> str:
    def needed(target: str) -> list[str]:
        return ["never" if (need := row.gbit_s_for[target]) is None else short(need) for row in rows.values()]

    columns = {
        kind: [NAMES.get(name, name) for name in rows],
        "compute\nutilisation": [percent(row.utilisation) for row in rows.values()],
        "bytes\nper step": [readable(row.bytes_per_step) for row in rows.values()],
        "bytes\nin all": [readable(row.bytes) for row in rows.values()],
        "peak\nGbit/s": [short(row.peak_gbit_s) for row in rows.values()],
    }
    return table({**columns, **{f"Gbit/s\nfor {percent(float(target))}": needed(target) for target in _SHOWN}})


def _recommendation(plan: Plan) -> list[str]:
    chosen = plan.recommendation
    settings, prediction = chosen.settings, chosen.prediction
    numbers = settings.chosen_for(plan.groups.groups).numbers
    reached = chosen.utilisation_with_margin >= TARGET
    verdict = "Recommended" if reached else f"No settings reach {percent(TARGET)} on this link; closest"
    return [
        f"{verdict}:",
        "",
        f"  sync_every={settings.sync_every}, overlap_steps={settings.overlap_steps},"
        f" fragments={settings.fragments!r}, compression={settings.compression!r}",
        f"  for which 'auto' means {', '.join(f'{name}={value:g}' for name, value in numbers.items())}",
        "",
        f"  {_fragments(chosen.fragments)}, compute utilisation {percent(prediction.utilisation)}"
        f" ({percent(chosen.utilisation_with_margin)} at {readable_rate(MARGIN * plan.link.gbit_s)})",
        f"  {readable(prediction.bytes_per_step)} per step, {readable(prediction.bytes)} in all,"
        f" peak {readable_rate(prediction.peak_gbit_s)}",
        f"  {_memory(chosen.memory)}",
    ]


def _fragments(numels: tuple[int, ...]) -> str:
    return "1 fragment" if len(numels) == 1 else f"{len(numels)} fragments"


def _memory(memory: Memory) -> str:
    device, host, evaluation = map(readable, memory)
    return f"{device} on the device, {host} on the host; {evaluation} more during validation"


# As a picture


Curves = Mapping[str, Callable[[float], float]]
"""From a bandwidth in Gbit/s to the compute utilisation, by method."""

# Label, color and line of each method.
_LINES: Mapping[str, tuple[str, str, str]] = {
    "ddp": ("DDP", LIGHT.line(9), "-"),
    "diloco": ("DiLoCo", LIGHT.line(3), "-"),
    "streaming": ("Streaming DiLoCo", LIGHT.line(0), "--"),
    "streaming_overlap": ("Streaming with overlap", LIGHT.line(2), "-"),
    "streaming_overlap_fp4": ("Streaming with overlap, FP4", LIGHT.line(1), "-"),
}
_POINTS_PER_DECADE = 40


def _draw(path: str, panels: Mapping[str, Curves], first: int, last: int, mark: float | None = None) -> None:
    """Writes panels by title, each with its curves between two powers of ten, to a file."""
    points = [10 ** (first + i / _POINTS_PER_DECADE) for i in range((last - first) * _POINTS_PER_DECADE + 1)]

    def draw(figure: Any) -> None:
        each = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, curves) in zip(each, panels.items(), strict=True):
            for name, curve in curves.items():
                label, color, line = _LINES[name]
                axes.plot(points, [curve(point) for point in points], color=color, linestyle=line, label=label)
            if mark is not None:
                axes.axvline(mark, color=LIGHT.quiet, linestyle=":", label=f"this link: {mark:g} Gbit/s")
            axes.set(title=title, xlabel="Gbit/s between groups", xscale="log", xlim=(points[0], points[-1]))
            axes.set_ylim(0, 1.02)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0 %", "25 %", "50 %", "75 %", "95 %"])
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.tick_params(labelleft=axes is each[0])
        each[0].set_ylabel("compute utilisation")
        figure.legend(*each[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10)

    save_picture(path, draw, size=(8.4, 4.1))
