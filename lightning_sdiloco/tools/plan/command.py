"""Runs ``sdiloco plan``: hands the options to the planner, and its answer to text, JSON and a picture."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import yaml
from torch import nn

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.engine import trainable
from lightning_sdiloco.federation import Quorum
from lightning_sdiloco.planning import (
    Groups,
    Link,
    Method,
    Model,
    PaperModel,
    Plan,
    Waits,
    paper,
    planner,
    shared_out,
    through_hub,
)
from lightning_sdiloco.tools.plan.answer import Answer
from lightning_sdiloco.tools.plan.picture import draw
from lightning_sdiloco.tools.plan.text import table_4_as_text
from lightning_sdiloco.tools.plan.waiting import asked_waits

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
    layers_per_fragment: int = 3,
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
        layers_per_fragment: Repeated blocks in a fragment.
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
    of_links, bandwidth, groups = _links(links, bandwidth, groups)
    step_time, bandwidth = _required(model, params, layers, step_time, bandwidth, steps)
    described = _described(model, params, layers)
    settings = Settings(sync_every, overlap_steps, layers_per_fragment=layers_per_fragment, compression=compression)
    workers, link = Groups(step_time, groups, group_size, memory_rate * 1e9), Link(bandwidth, round_trip, loss)
    planned = planner.plan(described, settings, workers, link, steps)
    _draw_plan(picture, planned)
    waits = asked_waits(planned, hub_bandwidth, quorum, grace, delays, of_links)
    answer = _answered(planned, hub_bandwidth, waits, of_links)
    return answer.as_json() if format == "json" else answer.as_text()


def _answered(planned: Plan, hub_bandwidth: float | None, waits: Waits | None, of_links: dict[str, float]) -> Answer:
    asked = planned.model, planned.settings, planned.groups
    hub = None if hub_bandwidth is None else through_hub(*asked, planned.link, hub_bandwidth)
    shared = shared_out(*asked, list(of_links.values())) if of_links else None
    return Answer(planned, hub, waits, shared, of_links)


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
    """Makes a model, without memory for its parameters where it allows that."""
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


def _draw_plan(path: str | None, planned: Plan) -> None:
    if path is None:
        return

    def curve(method: Method) -> Callable[[float], float]:
        return lambda gbit_s: method.utilisation(replace(planned.link, gbit_s=gbit_s))

    methods = planner.alternatives(planned.model, planned.settings, planned.groups)
    curves = {name: curve(method) for name, method in methods.items()}
    title = f"{planned.model.numel:,} parameters, {planned.groups.step_time:g} s per inner step"
    # From where nothing works to where DDP does, with the link that was asked about in between.
    busy = [need for prediction in planned.methods.values() for need in prediction.gbit_s_for.values() if need]
    seen = [planned.link.gbit_s, *busy]
    first, last = math.floor(math.log10(min(seen))) - 1, math.ceil(math.log10(max(seen)))
    draw(path, {title: curves}, first, last, mark=planned.link.gbit_s)


def _paper(picture: str | None, format: str) -> str:
    entries = list(paper.table_4())
    if picture is not None:
        draw(picture, {f"{name} parameters": _paper_curves(model) for name, model in paper.MODELS.items()}, -1, 3)
    if format == "json":
        return json.dumps([entry._asdict() for entry in entries], indent=2)
    return table_4_as_text(entries)


def _paper_curves(model: PaperModel) -> dict[str, Callable[[float], float]]:
    return {name: partial(method, model) for name, method in paper.METHODS.items()}
