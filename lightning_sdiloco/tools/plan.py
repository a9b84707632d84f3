"""Runs ``sdiloco plan``, which presents the planner's results as text, JSON and a picture."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import yaml
from torch import nn

from lightning_sdiloco.algorithm.config import Settings, overlap_for
from lightning_sdiloco.compression import COMPRESSIONS
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.federation import waiting
from lightning_sdiloco.federation.quorum import All, Quorum
from lightning_sdiloco.federation.run_config import LONGEST_GRACE
from lightning_sdiloco.federation.waiting import Round, Waits, Way
from lightning_sdiloco.planning import paper, planner
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.methods import Memory, Method, Streaming
from lightning_sdiloco.planning.units import counted, readable, readable_rate, short
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools.output import (
    DDP,
    DILOCO,
    STREAMING,
    Numbers,
    percent,
    plain,
    require_drawable,
    save_picture,
    table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """Print the bytes, peak bandwidth and compute utilisation of each method on a link, and
    recommend settings.

    Args:
        model: Class path of a LightningModule or another module. Set the class's arguments with
            --model.NAME.
        params: Number of parameters, as an alternative to --model.
        layers: Number of layers, required with --params.
        step_time: Duration of an inner step without an exchange between groups.
        groups: Number of worker groups.
        group_size: Number of ranks in a worker group.
        bandwidth: Bandwidth between a group and all other groups, in each direction.
        hub_bandwidth: Bandwidth of a federation's hub. With this option, the groups are the sites
            of the federation.
        quorum: Quorum of the federation, which determines the sites that a round waits for. Pass a
            number of sites or a class such as DynamicBackup, and set its arguments with
            --quorum.least=0.5, for example.
        grace: Time for which rounds stay open after the first contribution. This option requires
            --quorum. The default is 10s.
        delays: Delay of each site's contributions in seconds, such as 0,0,12. This option requires
            --quorum.
        links: YAML file with the rate of each group's link in Gbit/s, as a list or as a mapping
            from names to rates. This option replaces --bandwidth and --groups. The plan uses the
            slowest link and shows the gain of a two-shot exchange whose parts suit the links.
        round_trip: Round-trip time to another group.
        loss: Share of packets that are lost. For example, 0.001 means 0.1 %.
        sync_every: Number of inner steps between two launches of the same fragment.
        overlap_steps: Number of inner steps between the launch of a fragment and its landing. The
            default is 5, or fewer in short rounds.
        fragments: How the model is divided into fragments. Pass strided, sequential, balanced, or a
            number of fragments. For example, strided:3 puts three repeated blocks into each
            fragment. Without a number, about eight fragments are made, with at most three blocks
            each, or with more blocks if there would otherwise be more than 32 fragments.
        compression: How outer gradients are encoded, such as fp32, bf16 or fp4.
        steps: Number of inner steps in the whole run, for the total number of bytes.
        memory_rate: Memory bandwidth of a device in GB/s. Typical values are 1000 for a GPU and 10
            for a CPU core.
        paper_table_4: Reproduce Table 4 of the paper instead, with the paper's simplifications.
        picture: File (.svg or .png) for a plot of utilisation against bandwidth.
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
    hub = None
    if hub_bandwidth is not None:
        hub = planner.through_hub(described, settings, workers, link, hub_bandwidth)
    rule = _quorum(quorum, grace, delays, hub)
    waits = None
    if rule is not None and hub is not None:
        ways = _ways(of_links, delays, link, hub)
        grace = LONGEST_GRACE if grace is None else grace
        payload = hub.largest_payload
        waits = waiting.waits(rule, grace, ways, payload, sync_every, step_time)
    shared = None
    if of_links:
        shared = planner.shared_out(described, settings, workers, list(of_links.values()))
    methods = planner.alternatives(described, settings, workers)
    numbers = _numbers(methods, Streaming(described, settings, workers), link, steps)
    if picture is not None:
        _draw_methods(picture, methods, numbers)
    if format == "json":
        return _plan_as_json(numbers, hub=hub, waits=waits, links=shared)
    texts = [_plan_as_text(numbers)]
    if hub is not None:
        texts.append(_hub_as_text(hub, settings))
    if waits is not None:
        texts.append(_waits_as_text(waits, step_time))
    if shared is not None:
        texts.append(_links_as_text(shared, list(of_links), settings))
    return "\n\n".join(texts)


def _numbers(
    methods: Mapping[str, Method], streaming: Streaming, link: Link, steps: int
) -> Numbers:
    """Returns a plan's numbers, keyed by their JSON names."""
    model = streaming.model
    groups = streaming.groups
    compressions = {}
    for name in COMPRESSIONS:
        settings = replace(streaming.settings, compression=name)
        compressions[name] = planner.predict(Streaming(model, settings, groups), link, steps)
    recommended = planner.recommend(model, groups, link)
    return {
        "parameters": model.numel,
        "gradient_bytes": model.nbytes,
        **vars(groups),
        "link": link,
        "steps": steps,
        "settings": _settings(streaming),
        "methods": {name: planner.predict(m, link, steps) for name, m in methods.items()},
        "compressions": compressions,
        "memory": streaming.memory,
        "recommendation": {
            **_settings(recommended),
            **planner.predict(recommended, link, steps)._asdict(),
            "utilisation_with_margin": recommended.utilisation(planner.with_margin(link)),
            "memory": recommended.memory,
        },
    }


def _draw_methods(path: str, methods: Mapping[str, Method], numbers: Numbers) -> None:
    """Plots the utilisation of all methods against the bandwidth and marks the link."""
    link = numbers["link"]
    bandwidths = [link.gbit_s]
    for prediction in numbers["methods"].values():
        bandwidths += [need for need in prediction.gbit_s_for.values() if need]
    curves = {name: partial(_at, method.utilisation, link) for name, method in methods.items()}
    title = f"{numbers['parameters']:,} parameters, {numbers['step_time']:g} s per inner step"
    first = math.floor(math.log10(min(bandwidths))) - 1
    last = math.ceil(math.log10(max(bandwidths)))
    _draw(path, {title: curves}, first, last, mark=link.gbit_s)


def _plan_as_json(numbers: Numbers, **parts: object) -> str:
    """Formats a plan as JSON with the requested parts."""
    asked_for = {name: part for name, part in parts.items() if part is not None}
    return json.dumps(plain({**numbers, **asked_for}), indent=2)


def _at(utilisation: Callable[[Link], float], link: Link, gbit_s: float) -> float:
    return utilisation(replace(link, gbit_s=gbit_s))


def _links(path: str | None, bandwidth: float | None) -> dict[str, float]:
    """Reads the rates of all links in Gbit/s, keyed by name."""
    if path is None:
        return {}
    if bandwidth is not None:
        raise ValueError(
            f"--bandwidth {bandwidth:g} was given together with --links, which also sets the"
            " bandwidth. Omit one of the two options."
        )
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"--links {path} cannot be read: {error}. Pass a YAML file with the rate of each link"
            " in Gbit/s."
        ) from error
    links = dict(enumerate(content)) if isinstance(content, list) else content
    are_numbers = isinstance(links, dict) and all(
        type(link) in (int, float) for link in links.values()
    )
    if not are_numbers or len(links) < 2:
        raise ValueError(
            f"--links {path} contains {content!r}. Provide a list of at least two numbers (the"
            " rates of the groups' links in Gbit/s), or a mapping from names to such numbers."
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
    """Returns the model to plan for, and refuses missing options."""
    options = {"--step-time": step_time, "--bandwidth": bandwidth}
    if not model:
        options = {"--params": params, "--layers": layers, **options}
    missing = [name for name, option in options.items() if option is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be given. A plan requires a model (--model, or --params and"
            " --layers), the duration of an inner step, and the bandwidth between groups. An"
            " example is: --params 1e9 --layers 24 --step-time 0.1 --bandwidth 1Gbit"
        )
    if model is not None:
        if params is not None or layers is not None:
            raise ValueError(
                "--model was given together with --params or --layers. Pass either the model or its"
                " size."
            )
        return Model.of_parameters(trainable(_module(model)))
    assert params is not None
    assert layers is not None
    if params % 1 != 0:
        raise ValueError(
            f"params={params} is not a whole number. Set params to the number of parameters."
        )
    return Model.of_size(int(params), layers)


def _module(make: MakeModel) -> nn.Module:
    """Creates the module, on the meta device if possible."""

    def configured() -> nn.Module:
        module = make()
        # A LightningModule may create its layers in this hook.
        getattr(module, "configure_model", lambda: None)()
        return module

    try:
        with torch.device("meta"):
            return configured()
    except Exception:  # some models read their values, which needs real memory
        try:
            return configured()
        except Exception as error:
            raise ValueError(
                f"The model could not be created: {type(error).__name__}: {error}. Correct the"
                " model's arguments (--model.NAME), or pass --params and --layers instead."
            ) from error


def _quorum(
    quorum: int | Quorum | None,
    grace: float | None,
    delays: str | None,
    hub: planner.HubLoad | None,
) -> Quorum | None:
    """Returns the quorum that closes rounds at the hub, or None if there is none."""
    if quorum is None:
        for name, option in (("--grace", grace), ("--delays", delays)):
            if option is not None:
                raise ValueError(
                    f"{name} requires a quorum that closes rounds. Also pass --quorum, for"
                    " example --quorum 2."
                )
        return None
    if hub is None:
        raise ValueError(
            f"--quorum {quorum} applies only to the sites of a federation, because worker groups"
            " that are launched together wait for all groups. Also pass the --hub-bandwidth of the"
            " federation."
        )
    if isinstance(quorum, int):
        require(quorum >= 1, "quorum", quorum, "at least 1")
        return All(quorum)
    return quorum


def _ways(
    of_links: Mapping[str, float], delays: str | None, link: Link, hub: planner.HubLoad
) -> dict[str, Way]:
    """Returns the link between each site and the hub."""
    of_sites = of_links or {f"site {number}": link.gbit_s for number in range(hub.sites)}
    try:
        late = [float(number) for number in delays.split(",")] if delays else [0.0] * len(of_sites)
    except ValueError:
        late = []
    if len(late) != len(of_sites) or not all(delay >= 0 for delay in late):
        raise ValueError(
            f"--delays {delays} must contain {len(of_sites)} numbers of at least 0. Pass the delay"
            " of each site in seconds, as in 0,0,12."
        )
    ways = {}
    for (site, gbit_s), delay in zip(of_sites.items(), late, strict=True):
        site_link = planner.hub_link(replace(link, gbit_s=gbit_s), hub.sites, hub.gbit_s)
        ways[site] = Way(site_link, delay)
    return ways


def _settings(method: Streaming) -> Numbers:
    """Returns a method's settings, keyed by JSON name, with numbers instead of ``auto``."""
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
"""The methods' names in the tables."""


def _plan_as_text(numbers: Numbers) -> str:
    """Formats a plan's setup, both tables, and the recommendation."""
    settings = numbers["settings"]
    recommended = numbers["recommendation"]
    link = numbers["link"]
    ranks = counted(numbers["group_size"], "rank")
    fragments = counted(settings["number_of_fragments"], "fragment")
    recommended_fragments = counted(recommended["number_of_fragments"], "fragment")
    loss = f"{link.loss:.3g} of the packets lost" if link.loss else "no loss"
    overlap = f"overlap_steps={settings['overlap_steps']}"
    reached = recommended["utilisation_with_margin"]
    heading = "Recommended:"
    if reached < planner.TARGET:
        heading = (
            f"No settings reach {percent(planner.TARGET)} on this link. The closest settings are:"
        )
    automatic = ", ".join(
        f"{name}={recommended[name]:g}" for name in ("outer_lr", "outer_momentum", "mixing")
    )
    lines = [
        f"{numbers['parameters']:,} parameters in {fragments}, {numbers['groups']} groups of"
        f" {ranks}",
        f"{numbers['steps']:,} inner steps of {numbers['step_time']:g} s",
        f"{readable_rate(link.gbit_s)} in each direction, {link.round_trip * 1000:g} ms round trip,"
        f" {loss}",
        "",
        f"With sync_every={settings['sync_every']}, {overlap}, fragments={settings['fragments']!r},"
        f" compression={settings['compression']!r}:",
        "",
        _predictions(numbers["methods"], "method"),
        "",
        f"Streaming DiLoCo with {overlap}, by compression:",
        "",
        _predictions(numbers["compressions"], "compression"),
        "",
        "Memory in each rank, in addition to ordinary training:",
        f"  {_memory(numbers['memory'])}",
        "",
        heading,
        "",
        f"  sync_every={recommended['sync_every']}, overlap_steps={recommended['overlap_steps']},"
        f" fragments={recommended['fragments']!r}, compression={recommended['compression']!r}",
        f"  'auto' for language models: {automatic}",
        "",
        f"  {recommended_fragments}, compute utilisation {percent(recommended['utilisation'])}"
        f" ({percent(reached)} at {readable_rate(planner.MARGIN * link.gbit_s)})",
        f"  {readable(recommended['bytes_per_step'])} per step, {readable(recommended['bytes'])} in"
        f" all, peak {readable_rate(recommended['peak_gbit_s'])}",
        f"  {_memory(recommended['memory'])}",
    ]
    return "\n".join(lines)


def _predictions(rows: Mapping[str, planner.Prediction], kind: str) -> str:
    """Formats a table with one row for each method or compression."""
    columns = {
        kind: [NAMES.get(name, name) for name in rows],
        "compute\nutilisation": [percent(row.utilisation) for row in rows.values()],
        "bytes\nper step": [readable(row.bytes_per_step) for row in rows.values()],
        "bytes\nin all": [readable(row.bytes) for row in rows.values()],
        "peak\nGbit/s": [short(row.peak_gbit_s) for row in rows.values()],
    }
    for target in ("0.8", "0.95"):
        needs = [row.gbit_s_for[target] for row in rows.values()]
        texts = ["never" if need is None else short(need) for need in needs]
        columns[f"Gbit/s\nfor {percent(float(target))}"] = texts
    return table(columns)


def _memory(memory: Memory) -> str:
    device, host, evaluation = map(readable, memory)
    return f"{device} on the device, {host} on the host; {evaluation} more during validation"


def _hub_as_text(hub: planner.HubLoad, settings: Settings) -> str:
    """Formats the hub's load and settings for which the hub's bandwidth is sufficient."""
    busy = f"{hub.share:.3g} times what it can"
    if hub.share <= 1:
        busy = f"{percent(hub.share)} of what it can"
    late = ""
    if hub.flight_steps > settings.overlap_steps:
        late = f": later than overlap_steps={settings.overlap_steps}"
    enough = "No sync_every up to 500 is enough: give the hub more bandwidth, or compress more"
    if hub.enough:
        needed = hub.enough
        enough = f"Enough: sync_every={needed.sync_every}, overlap_steps={needed.overlap_steps}"
    lines = [
        f"Through a hub with {readable_rate(hub.gbit_s)} in each direction, as a federation of"
        f" {hub.sites} sites:",
        "",
        f"  {readable(hub.bytes_in)} in and {readable(hub.bytes_out)} out for a round of all"
        " fragments:",
        f"  for each fragment, a site sends one payload and receives {hub.sites - 1}",
        f"  with sync_every={settings.sync_every} the hub sends {busy}",
        f"  the largest fragment arrives after {hub.flight_seconds:.3g} s, {hub.flight_steps}"
        f" inner steps{late}",
        "",
        f"  {enough}",
    ]
    return "\n".join(lines)


def _waits_as_text(waits: Waits, step_time: float) -> str:
    """Describes when rounds close under the quorum and which sites count."""

    def described(round: Round) -> str:
        steps = max(1, math.ceil(round.seconds / step_time))
        arrival = f"arrives after {round.seconds:.3g} s, {steps} inner steps"
        return f"closes after {round.closes:.3g} s, {arrival}"

    sites = {
        "site": list(waits.arrives),
        "at the hub\nafter, s": [f"{seconds:.3g}" for seconds in waits.arrives.values()],
        "counts": ["yes" if site in waits.usual.counted else "late" for site in waits.arrives],
    }
    lines = ["With that quorum, a round of the largest fragment", f"  {described(waits.usual)}"]
    if waits.longest != waits.usual:
        lines.append(f"  at times it {described(waits.longest)}")
    lines += [f"  if it waited for all: {described(waits.all)}", "", table(sites)]
    return "\n".join(lines)


def _links_as_text(shared: planner.SharedOut, names: list[str], settings: Settings) -> str:
    """Formats each link's share and the gain over equal shares."""
    columns = {
        "link": names,
        "Gbit/s": map(short, shared.links),
        "share": map(percent, shared.shares),
        "bytes\nin a round": map(readable, shared.bytes),
        "seconds\nin a round": map(short, shared.seconds),
    }
    links = ", ".join(map(short, shared.links))
    lines = [
        f"Two shots with exchange=TwoShot('by_bandwidth', links=[{links}]),"
        f" compression={settings.compression!r}:",
        "",
        table(columns),
        "",
        f"  a round of all fragments keeps the busiest link busy for {short(shared.round_seconds)}"
        " s,",
        f"  with equal parts for {short(shared.equal_seconds)} s: {shared.gain:.2f} times as long",
    ]
    return "\n".join(lines)


# Table 4 of the paper, and pictures


def _paper(picture: str | None, format: str) -> str:
    """Returns Table 4 as text or JSON and draws the curves if a picture is requested."""
    entries = list(paper.table_4())
    if picture is not None:
        panels = {}
        for name, model in paper.MODELS.items():
            curves = {method: partial(curve, model) for method, curve in paper.METHODS.items()}
            panels[f"{name} parameters"] = curves
        _draw(picture, panels, -1, 3)
    if format == "json":
        return json.dumps(plain(entries), indent=2)
    rows = entries[:: len(paper.TARGETS)]
    columns = {"model": [row.model for row in rows], "method": [NAMES[row.method] for row in rows]}
    for target in paper.TARGETS:
        columns[percent(target)] = [_entry(e) for e in entries if e.target == target]
    title = "Gbit/s for a compute utilisation; in brackets where the paper differs"
    return f"{title}\n\n{table(columns, left=2, section=len(NAMES))}"


def _entry(entry: paper.Entry) -> str:
    """Formats the computed number, followed by the number in the paper if it differs."""
    if entry.gbit_s == entry.paper:
        return f"{entry.gbit_s}"
    return f"{entry.gbit_s} ({entry.paper})"


Curves = Mapping[str, Callable[[float], float]]
"""Functions that map the bandwidth in Gbit/s to the compute utilisation, by method."""

# The label, color and line style of each method.
_LINES: Mapping[str, tuple[str, str, str]] = {
    "ddp": ("DDP", DDP, "-"),
    "diloco": ("DiLoCo", DILOCO, "-"),
    "streaming": ("Streaming DiLoCo", STREAMING, ":"),
    "streaming_overlap": ("Streaming with overlap", STREAMING, "--"),
    "streaming_overlap_fp4": ("Streaming with overlap, FP4", STREAMING, "-"),
}
_POINTS_PER_DECADE = 40


def _draw(
    path: str, panels: Mapping[str, Curves], first: int, last: int, mark: float | None = None
) -> None:
    """Draws panels, each with curves between two powers of ten, and saves the picture."""
    count = (last - first) * _POINTS_PER_DECADE + 1
    points = [10 ** (first + number / _POINTS_PER_DECADE) for number in range(count)]

    def draw(figure: "Figure") -> None:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
            _draw_curves(axes, curves, points, mark)
            axes.set(title=title, xlabel="link between groups")
            axes.tick_params(labelleft=axes is all_axes[0])
        all_axes[0].set_ylabel("compute utilisation")
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=10)

    save_picture(path, draw, size=(8.4, 4.1))


def _draw_curves(axes: "Axes", curves: Curves, points: Sequence[float], mark: float | None) -> None:
    """Draws curves on a logarithmic axis and a vertical line at a marked bandwidth."""
    for name, curve in curves.items():
        label, color, line = _LINES[name]
        axes.plot(points, list(map(curve, points)), color=color, linestyle=line, label=label)
    if mark is not None:
        label = f"this link: {readable_rate(mark)}"
        axes.axvline(mark, color="C8", linestyle=":", label=label)
    axes.set(xscale="log", xlim=(points[0], points[-1]))
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0 %", "25 %", "50 %", "75 %", "95 %"])
    axes.xaxis.set_major_formatter(lambda gbit_s, _: readable_rate(gbit_s))
