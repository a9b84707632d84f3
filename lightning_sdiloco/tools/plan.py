"""Runs ``sdiloco plan``: hands the options to the planner, and its answer to text, JSON and a
picture.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn

from lightning_sdiloco.algorithm.config import Settings, overlap_for
from lightning_sdiloco.compression import COMPRESSIONS
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.federation.quorum import All, Quorum
from lightning_sdiloco.federation.run_config import LONGEST_GRACE
from lightning_sdiloco.federation.waiting import Round, Waits, Way, waits
from lightning_sdiloco.planning import paper, planner
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.methods import Memory, Streaming
from lightning_sdiloco.planning.units import readable, readable_rate, short
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools.output import percent, plain, require_drawable, save_picture, table

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
    overlap_steps: int | None = None,
    fragments: int | str = "strided",
    compression: str = "fp4",
    steps: int = 10_000,
    memory_rate: float = 1000.0,
    paper_table_4: bool = False,
    picture: str | None = None,
    format: Literal["text", "json"] = "text",
) -> str:
    """Print what a link allows: bytes, peak bandwidth and compute utilisation of each method, and
    what to set.

    Args:
        model: LightningModule (or other module) by its class path, with --model.NAME for its
            arguments.
        params: Number of parameters, such as 1e9 or 1B, instead of a model.
        layers: Number of layers, with --params.
        step_time: Seconds of an inner step, without any exchange between groups.
        groups: Number of worker groups.
        group_size: Ranks in a worker group.
        bandwidth: Bandwidth between a group and all others, in each direction, such as 100Mbit or
            1Gbit.
        hub_bandwidth: That of a federation's hub, such as 1Gbit: the groups are then its sites.
        quorum: The federation's quorum, which decides whom a round waits for: a number of sites, or
            a class such as DynamicBackup, with --quorum.least=0.5 for its arguments.
        grace: Seconds for which rounds stay open after the first contribution; 10 by default; with
            --quorum.
        delays: Seconds by which each site's contributions are late, as 0,0,12; with --quorum.
        links: YAML file with the Gbit/s of each group's link, a list or a mapping from names,
            instead of --bandwidth and --groups. The plan takes the slowest link, and shows what two
            shots gain with parts that suit the links.
        round_trip: Seconds to another group and back: 50 ms is 0.05.
        loss: Share of packets lost: 0.1 % is 0.001.
        sync_every: Inner steps between two launches of the same fragment.
        overlap_steps: Inner steps from the launch of a fragment to its landing. By default 5, or as
            many as fit into shorter rounds.
        fragments: How the model is cut: strided or sequential, optionally with the repeated blocks
            per fragment, as in strided:3 (by default as many as make some eight fragments, at most
            three, or more to make at most 32 fragments); balanced; or a number of fragments.
        compression: How outer gradients are encoded, such as fp32, bf16 or fp4.
        steps: Inner steps of the whole run, for its total bytes.
        memory_rate: GB/s at which a device reads and writes its memory: about 1000 for a GPU, 10
            for a CPU core.
        paper_table_4: Reproduce Table 4 of the paper instead, with its idealisations.
        picture: File (.svg or .png) for a plot of utilisation over bandwidth.
        format: Output format.

    Examples:
        $ sdiloco plan --params 1B --layers 24 --step-time 0.5s --bandwidth 1Gbit
        $ sdiloco plan --params 1B --layers 24 --step-time 500ms --bandwidth 100Mbit --picture
        plan.svg

        >>> print(plan(params=1e9, layers=24, step_time=0.1, bandwidth=1).splitlines()[0])
        1,000,000,000 parameters in 8 fragments, 2 groups of 1 rank
    """
    if paper_table_4:
        return _paper(picture, format)
    if picture is not None:
        require_drawable(picture)
    of_links = _links(links, bandwidth)
    if of_links:
        bandwidth = min(of_links.values())
        groups = len(of_links)
    described = _described(model, params, layers, step_time, bandwidth)
    assert step_time is not None
    assert bandwidth is not None
    require(steps >= 1, "steps", steps, "at least 1")
    overlap_steps = overlap_for(sync_every, overlap_steps)
    settings = Settings(sync_every, overlap_steps, fragments=fragments, compression=compression)
    workers = Groups(step_time, groups, group_size, memory_rate * 1e9)
    link = Link(bandwidth, round_trip, loss)
    hub = (
        None
        if hub_bandwidth is None
        else planner.through_hub(described, settings, workers, link, hub_bandwidth)
    )
    of_sites = of_links or {f"site {number}": bandwidth for number in range(groups)}
    waits = _asked_waits(settings, workers, link, hub, quorum, grace, delays, of_sites)
    shared = (
        planner.shared_out(described, settings, workers, list(of_links.values()))
        if of_links
        else None
    )
    own = Streaming(described, settings, workers)
    chosen = planner.recommend(described, workers, link)
    methods = planner.alternatives(described, settings, workers)
    compressed = {
        name: Streaming(described, replace(settings, compression=name), workers)
        for name in COMPRESSIONS
    }
    predicted = {name: planner.predict(method, link, steps) for name, method in methods.items()}
    told: dict[str, Any] = {
        "parameters": described.numel,
        "gradient_bytes": described.nbytes,
        **vars(workers),
        "link": link,
        "steps": steps,
        "settings": _settings(own),
        "methods": predicted,
        "compressions": {
            name: planner.predict(method, link, steps) for name, method in compressed.items()
        },
        "memory": own.memory,
        "recommendation": {
            **_settings(chosen),
            **planner.predict(chosen, link, steps)._asdict(),
            "utilisation_with_margin": chosen.utilisation(planner.with_margin(link)),
            "memory": chosen.memory,
        },
    }
    if picture is not None:
        curves = {name: partial(_at, method.utilisation, link) for name, method in methods.items()}
        # From where nothing works to where DDP does, with the link that was asked about in between.
        busy = [
            need
            for prediction in predicted.values()
            for need in prediction.gbit_s_for.values()
            if need
        ]
        first, last = (math.log10(bound(bandwidth, *busy)) for bound in (min, max))
        title = f"{described.numel:,} parameters, {step_time:g} s per inner step"
        _draw(picture, {title: curves}, math.floor(first) - 1, math.ceil(last), mark=bandwidth)
    if format == "json":
        more = {"hub": hub, "waits": waits, "links": shared}
        return json.dumps(
            plain(told | {name: one for name, one in more.items() if one is not None}), indent=2
        )
    parts = [_plan_as_text(told)]
    parts += [] if hub is None else [_hub_as_text(hub, settings)]
    parts += [] if waits is None else [_waits_as_text(waits, step_time)]
    parts += [] if shared is None else [_links_as_text(shared, list(of_links), settings)]
    return "\n\n".join(parts)


def _at(utilisation: Callable[[Link], float], link: Link, gbit_s: float) -> float:
    return utilisation(replace(link, gbit_s=gbit_s))


def _links(path: str | None, bandwidth: float | None) -> dict[str, float]:
    """Reads the links of all groups: Gbit/s by name, in their order."""
    if path is None:
        return {}
    if bandwidth is not None:
        raise ValueError(
            f"--bandwidth {bandwidth:g} was given together with --links, which also sets it."
            " Leave one of them out."
        )
    try:
        told = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"--links {path} cannot be read: {error}. Give a YAML file with the Gbit/s of each"
            " link."
        ) from error
    links = dict(enumerate(told)) if isinstance(told, list) else told
    are_numbers = isinstance(links, dict) and all(
        type(link) in (int, float) for link in links.values()
    )
    if not are_numbers or len(links) < 2:
        raise ValueError(
            f"--links {path} holds {told!r}. Give a list of at least two numbers, the Gbit/s of"
            " each group's link, or a"
            " mapping from names to them."
        )
    return {
        f"group {name}" if isinstance(name, int) else str(name): link
        for name, link in links.items()
    }


def _described(
    model: MakeModel | None,
    params: float | None,
    layers: int | None,
    step_time: float | None,
    bandwidth: float | None,
) -> Model:
    size = {} if model else {"--params": params, "--layers": layers}
    asked = {**size, "--step-time": step_time, "--bandwidth": bandwidth}
    missing = [name for name, value in asked.items() if value is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be given. A plan needs a model (--model, or --params and"
            " --layers), the time of"
            " an inner step and the bandwidth between groups, such as: --params 1e9 --layers 24"
            " --step-time 0.1"
            " --bandwidth 1Gbit"
        )
    if model is not None:
        if params is not None or layers is not None:
            raise ValueError(
                "--model was given together with --params or --layers. Give either the model or"
                " its size."
            )
        return Model.of_parameters(trainable(_made(model)))
    assert params is not None
    assert layers is not None
    if params % 1 != 0:
        raise ValueError(f"params={params} is not a whole number. Give the number of parameters.")
    return Model.of_size(int(params), layers)


def _made(make: MakeModel) -> nn.Module:
    def configured() -> nn.Module:
        module = make()
        # The hook in which a LightningModule may make its layers.
        getattr(module, "configure_model", lambda: None)()
        return module

    try:
        with torch.device("meta"):
            return configured()
    except Exception:  # some models look at their values: these need the memory
        try:
            return configured()
        except Exception as error:
            raise ValueError(
                f"The model could not be made: {type(error).__name__}: {error}. Correct its"
                " arguments (--model.NAME),"
                " or give --params and --layers instead."
            ) from error


def _asked_waits(
    settings: Settings,
    groups: Groups,
    link: Link,
    hub: planner.HubLoad | None,
    quorum: int | Quorum | None,
    grace: float | None,
    delays: str | None,
    of_sites: Mapping[str, float],
) -> Waits | None:
    if quorum is None:
        for name, value in (("--grace", grace), ("--delays", delays)):
            if value is not None:
                raise ValueError(
                    f"{name} needs a quorum by which rounds close. Give --quorum too, such as"
                    " --quorum 2."
                )
        return None
    if hub is None:
        raise ValueError(
            f"--quorum {quorum} is about the sites of a federation: worker groups that are"
            " launched together wait for"
            " all. Give the federation's --hub-bandwidth too."
        )
    if isinstance(quorum, int):
        require(quorum >= 1, "quorum", quorum, "at least 1")
    try:
        late = [float(number) for number in delays.split(",")] if delays else [0.0] * len(of_sites)
    except ValueError:
        late = []
    if len(late) != len(of_sites) or not all(number >= 0 for number in late):
        raise ValueError(
            f"--delays {delays} must be {len(of_sites)} numbers of seconds, at least 0. Give one"
            " for each site, as"
            " 0,0,12."
        )
    ways = {
        site: Way(planner.hub_link(replace(link, gbit_s=gbit_s), groups.groups, hub.gbit_s), delay)
        for (site, gbit_s), delay in zip(of_sites.items(), late, strict=True)
    }
    asked = All(quorum) if isinstance(quorum, int) else quorum
    grace = LONGEST_GRACE if grace is None else grace
    return waits(asked, grace, ways, hub.largest_payload, settings.sync_every, groups.step_time)


def _settings(method: Streaming) -> dict[str, Any]:
    names = ("sync_every", "overlap_steps", "fragments", "compression")
    settings = method.settings
    numbers = settings.chosen_for(method.groups.groups).numbers
    return {
        **{name: getattr(settings, name) for name in names},
        **numbers,
        "number_of_fragments": len(method.numels),
    }


# As text


NAMES: Mapping[str, str] = {
    "ddp": "DDP",
    "diloco": "DiLoCo",
    "streaming": "Streaming DiLoCo",
    "streaming_overlap": "... with overlap",
    "streaming_overlap_fp4": "... and FP4",
}
"""The methods, as the tables call them."""


def _plan_as_text(told: Mapping[str, Any]) -> str:
    settings = told["settings"]
    chosen = told["recommendation"]
    link = told["link"]
    ranks = "1 rank" if told["group_size"] == 1 else f"{told['group_size']} ranks"
    loss = f"{link.loss:.3g} of the packets lost" if link.loss else "no loss"
    overlap = f"overlap_steps={settings['overlap_steps']}"
    reached = chosen["utilisation_with_margin"]
    cut, cut_again = (
        f"{count} fragment{'s' if count > 1 else ''}"
        for count in (settings["number_of_fragments"], chosen["number_of_fragments"])
    )
    enough = reached >= planner.TARGET
    numbers = ", ".join(
        f"{name}={chosen[name]:g}" for name in ("outer_lr", "outer_momentum", "mixing")
    )
    lines = [
        f"{told['parameters']:,} parameters in {cut}, {told['groups']} groups of {ranks}",
        f"{told['steps']:,} inner steps of {told['step_time']:g} s",
        f"{readable_rate(link.gbit_s)} in each direction, {link.round_trip * 1000:g} ms round"
        f" trip, {loss}",
        "",
        f"With sync_every={settings['sync_every']}, {overlap}, fragments={settings['fragments']!r},"
        f" compression={settings['compression']!r}:",
        "",
        _predictions(told["methods"], "method"),
        "",
        f"Streaming DiLoCo with {overlap}, by compression:",
        "",
        _predictions(told["compressions"], "compression"),
        "",
        "Memory in each rank, beside ordinary training:",
        f"  {_memory(told['memory'])}",
        "",
        "Recommended:"
        if enough
        else f"No settings reach {percent(planner.TARGET)} on this link; closest:",
        "",
        f"  sync_every={chosen['sync_every']}, overlap_steps={chosen['overlap_steps']},"
        f" fragments={chosen['fragments']!r}, compression={chosen['compression']!r}",
        f"  for which 'auto' means {numbers}",
        "",
        f"  {cut_again}, compute utilisation {percent(chosen['utilisation'])}"
        f" ({percent(reached)} at {readable_rate(planner.MARGIN * link.gbit_s)})",
        f"  {readable(chosen['bytes_per_step'])} per step, {readable(chosen['bytes'])} in all,"
        f" peak {readable_rate(chosen['peak_gbit_s'])}",
        f"  {_memory(chosen['memory'])}",
    ]
    return "\n".join(lines)


def _predictions(rows: Mapping[str, planner.Prediction], kind: str) -> str:
    columns = {
        kind: [NAMES.get(name, name) for name in rows],
        "compute\nutilisation": [percent(row.utilisation) for row in rows.values()],
        "bytes\nper step": [readable(row.bytes_per_step) for row in rows.values()],
        "bytes\nin all": [readable(row.bytes) for row in rows.values()],
        "peak\nGbit/s": [short(row.peak_gbit_s) for row in rows.values()],
    }
    for target in ("0.8", "0.95"):
        needs = [row.gbit_s_for[target] for row in rows.values()]
        columns[f"Gbit/s\nfor {percent(float(target))}"] = [
            "never" if one is None else short(one) for one in needs
        ]
    return table(columns)


def _memory(memory: Memory) -> str:
    device, host, evaluation = map(readable, memory)
    return f"{device} on the device, {host} on the host; {evaluation} more during validation"


def _hub_as_text(hub: planner.HubLoad, settings: Settings) -> str:
    busy = (
        f"{percent(hub.share)} of what it can"
        if hub.share <= 1
        else f"{hub.share:.3g} times what it can"
    )
    late = hub.flight_steps > settings.overlap_steps
    lines = [
        f"Through a hub with {readable_rate(hub.gbit_s)} in each direction, as a federation of"
        f" {hub.sites} sites:",
        "",
        f"  {readable(hub.bytes_in)} in and {readable(hub.bytes_out)} out for a round of all"
        " fragments:",
        f"  of each fragment a site sends one payload and gets {hub.sites - 1}",
        f"  with sync_every={settings.sync_every} the hub sends {busy}",
        f"  the largest fragment is there after {hub.flight_seconds:.3g} s, {hub.flight_steps}"
        " inner steps" + (f": later than overlap_steps={settings.overlap_steps}" if late else ""),
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


def _links_as_text(shared: planner.SharedOut, names: list[str], settings: Settings) -> str:
    columns = {
        "link": names,
        "Gbit/s": map(short, shared.links),
        "share": map(percent, shared.shares),
        "bytes\nin a round": map(readable, shared.bytes),
        "seconds\nin a round": map(short, shared.seconds),
    }
    given = ", ".join(short(link) for link in shared.links)
    lines = [
        f"Two shots with exchange=TwoShot('by_bandwidth', links=[{given}]),"
        f" compression={settings.compression!r}:",
        "",
        table(columns),
        "",
        "  a round of all fragments keeps the busiest link busy for"
        f" {short(shared.round_seconds)} s,",
        f"  with equal parts for {short(shared.equal_seconds)} s: {shared.gain:.2f} times as long",
    ]
    return "\n".join(lines)


# Table 4 of the paper, and pictures


def _paper(picture: str | None, format: str) -> str:
    entries = list(paper.table_4())
    if picture is not None:
        panels = {
            f"{name} parameters": {
                method: partial(curve, model) for method, curve in paper.METHODS.items()
            }
            for name, model in paper.MODELS.items()
        }
        _draw(picture, panels, -1, 3)
    if format == "json":
        return json.dumps(plain(entries), indent=2)
    # What the closed form gives, followed by the paper's own number where it differs.
    told = [
        f"{one.gbit_s}" if one.gbit_s == one.paper else f"{one.gbit_s} ({one.paper})"
        for one in entries
    ]
    count = len(paper.TARGETS)
    rows = entries[::count]
    columns = {
        "model": [row.model for row in rows],
        "method": [NAMES[row.method] for row in rows],
    } | {percent(target): told[number::count] for number, target in enumerate(paper.TARGETS)}
    title = "Gbit/s for a compute utilisation; in brackets what the paper has instead"
    return f"{title}\n\n{table(columns, left=2, section=len(NAMES))}"


Curves = Mapping[str, Callable[[float], float]]
"""From a bandwidth in Gbit/s to the compute utilisation, by method."""

# Label, color and line of each method.
_LINES: Mapping[str, tuple[str, str, str]] = {
    "ddp": ("DDP", "C9", "-"),
    "diloco": ("DiLoCo", "C3", "-"),
    "streaming": ("Streaming DiLoCo", "C0", "--"),
    "streaming_overlap": ("Streaming with overlap", "C2", "-"),
    "streaming_overlap_fp4": ("Streaming with overlap, FP4", "C1", "-"),
}
_POINTS_PER_DECADE = 40


def _draw(
    path: str, panels: Mapping[str, Curves], first: int, last: int, mark: float | None = None
) -> None:
    """Writes panels by title, each with its curves between two powers of ten, to a file."""
    points = [
        10 ** (first + i / _POINTS_PER_DECADE)
        for i in range((last - first) * _POINTS_PER_DECADE + 1)
    ]

    def draw(figure: Any) -> None:
        each = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, curves) in zip(each, panels.items(), strict=True):
            for name, curve in curves.items():
                label, color, line = _LINES[name]
                axes.plot(
                    points,
                    [curve(point) for point in points],
                    color=color,
                    linestyle=line,
                    label=label,
                )
            if mark is not None:
                axes.axvline(mark, color="C9", linestyle=":", label=f"this link: {mark:g} Gbit/s")
            axes.set(
                title=title,
                xlabel="Gbit/s between groups",
                xscale="log",
                xlim=(points[0], points[-1]),
            )
            axes.set_ylim(0, 1.02)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0 %", "25 %", "50 %", "75 %", "95 %"])
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.tick_params(labelleft=axes is each[0])
        each[0].set_ylabel("compute utilisation")
        figure.legend(
            *each[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10
        )

    save_picture(path, draw, size=(8.4, 4.1))
