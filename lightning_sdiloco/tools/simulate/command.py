"""Runs ``sdiloco simulate``: turns options into simulated runs, and these into text, JSON and a picture."""

import json as json_format
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_sdiloco.planning import Absence, Link
from lightning_sdiloco.tools.output import plain, require_drawable
from lightning_sdiloco.tools.simulate.groups import Configuration, check, class_at, run
from lightning_sdiloco.tools.simulate.output import (
    compared_as_text,
    draw,
    draw_compared,
    draw_sites,
    run_as_text,
    sites_as_text,
    sweep_as_text,
)
from lightning_sdiloco.tools.simulate.sites import Places, Site, play_sites
from lightning_sdiloco.tools.simulate.sweeps import (
    METHOD,
    Circumstances,
    Outcome,
    Planned,
    combinations,
    compared,
    each_with,
    names_of,
    parsed,
    predict,
)
from lightning_sdiloco.tools.simulate.sweeps import methods as named_runs


def simulate(
    config: list[str] = [],  # noqa: B006
    set: list[str] = [],  # noqa: B006
    cli: str | None = None,
    model: str | None = None,
    data: str | None = None,
    groups: int = 2,
    sites: int | None = None,
    sweep: list[str] = [],  # noqa: B006
    methods: str | None = None,
    seeds: str | None = None,
    bandwidth: float | None = None,
    round_trip: float = 0.0,
    loss: float = 0.0,
    step_time: float | None = None,
    speeds: str | None = None,
    delays: str | None = None,
    absence: list[str] = [],  # noqa: B006
    memory_rate: float = 1000.0,
    picture: str | None = None,
    json: str | None = None,
) -> str:
    """Run a LightningCLI configuration as several worker groups in this process, and predict its time on a link.

    Args:
        config: Configuration file of a LightningCLI. Again for several; later ones override.
        set: Another argument of the LightningCLI, such as trainer.max_steps=100. Again for more.
        cli: Class path of the LightningCLI, if the training script has its own.
        model: Class path of the model, if the script gives it to its LightningCLI.
        data: Class path of the data module, if the script gives it to its LightningCLI.
        groups: Number of worker groups, of one rank each.
        sites: Number of sites of a federation, of one rank each, in place of groups.
        sweep: What to vary: an argument of the strategy, or groups, as sync_every=10,20. Again for more.
        methods: YAML file of runs to compare: from a name to arguments of the strategy, in place of sweep.
        seeds: Make each run of sweep or methods with each of these seeds, as 0,1,2, and compare it with the first.
        bandwidth: Gbit/s between a group and all others, or a site and its hub, to predict the time.
        round_trip: Seconds to another group and back: 50 ms is 0.05.
        loss: Share of the packets that get lost: 0.1 % is 0.001.
        step_time: Seconds of an inner step there. By default what it takes here; with --sites it must be given.
        speeds: How fast each group is, with 1 for the step time, as 1,1,0.5.
        delays: Seconds by which what each site sends comes later, as 0,0,12; with --sites.
        absence: When a group is away, in predicted seconds, as 1:30-90 for group 1. Again for more.
        memory_rate: GB/s at which a device reads and writes its memory: about 1000 for a GPU, 10 for a CPU core.
        picture: File (.svg or .png) for a picture of the losses.
        json: File for all numbers.
    """
    if not config:
        raise ValueError("--config must be given: the configuration file of a LightningCLI.")
    if picture is not None:
        require_drawable(picture)
    classes = [_class_at(name, path) for name, path in (("cli", cli), ("model", model), ("data", data))]
    configuration = Configuration(tuple(config), tuple(set), *classes)
    link = None if bandwidth is None else Link(bandwidth, round_trip, loss)
    each, late, away = _numbers(speeds, "speeds"), _numbers(delays, "delays"), tuple(map(_absence, absence))
    if sites is not None:
        if sweep or methods or seeds:
            raise ValueError(
                "--sweep, --methods and --seeds do not go with --sites. Give one run of a federation at a time."
            )
        if step_time is None:
            raise ValueError("--sites needs --step-time: who is late depends on how long an inner step takes.")
        return _federation(configuration, Places(sites, step_time, link, each, late, away), picture, json)
    if delays is not None:
        raise ValueError("--delays is about the sites of a federation. Give --sites too.")
    of_links = {"round-trip": round_trip, "loss": loss, "step-time": step_time, "speeds": speeds, "absence": absence}
    given = [f"--{name}" for name, value in of_links.items() if value]
    if link is None and given:
        raise ValueError(f"{given[0]} tells how long a run takes on a link. Give its --bandwidth too.")
    where = None if link is None else Circumstances(link, step_time, memory_rate * 1e9, each, away)
    if sweep and methods is not None:
        raise ValueError("--sweep and --methods both say what varies. Give one of them.")
    runs = combinations(sweep, groups) if methods is None else named_runs(methods, groups)
    names = names_of(sweep) if methods is None else [METHOD]
    return _worker_groups(configuration, each_with(runs, parsed(seeds)), names, where, picture, json)


def _worker_groups(
    configuration: Configuration,
    runs: list[Planned],
    names: list[str],
    where: Circumstances | None,
    picture: str | None,
    json: str | None,
) -> str:
    for planned in runs:
        check(configuration, planned.groups, planned.choices)
        if where is not None:
            where.check(planned.groups)
    outcomes = []
    with _progress(len(runs)) as begin:
        for planned in runs:
            own = configuration if planned.seed is None else configuration.with_seed(planned.seed)
            stepped = begin(planned.groups, planned.choices)
            done = run(own, planned.groups, planned.choices, stepped, where.speeds if where else None)
            outcomes.append(Outcome(planned, done, predict(done, where) if where else None))
    if json is not None:
        told = {"circumstances": where}
        _write(json, {**told, "runs": [_as_json(outcome) for outcome in outcomes]})
    seeds = len({planned.seed for planned in runs})
    if seeds > 1:
        rows = compared(outcomes, seeds)
        if picture is not None:
            draw_compared(picture, rows, names)
        return compared_as_text(rows, names, where)
    if picture is not None:
        draw(picture, outcomes, names)
    return sweep_as_text(outcomes, names, where) if names else run_as_text(outcomes[0], where)


def _federation(configuration: Configuration, places: Places, picture: str | None, json: str | None) -> str:
    check(configuration, places.sites, {}, site=0)
    with _progress(1) as begin:
        played = play_sites(configuration, places, {}, begin(places.sites, {}))
    if picture is not None:
        draw_sites(picture, played)
    if json is not None:
        _write(json, {"places": places, "sites": [_site_as_json(site) for site in played.sites]})
    return sites_as_text(played, places)


def _site_as_json(site: Site) -> dict[str, Any]:
    return {
        "losses": site.group.losses,
        "outer_loss": site.group.outer_loss,
        "bytes_sent": site.group.bytes_sent,
        "steps_done_at": site.times,
        **{name: getattr(site, name) for name in ("ended", "counted", "late", "missed", "weights")},
    }


def _numbers(text: str | None, name: str) -> tuple[float, ...] | None:
    return tuple(_number(number, name, "1,1,0.5") for number in text.split(",")) if text else None


def _absence(text: str) -> Absence:
    group, _, span = text.partition(":")
    start, _, end = span.partition("-")
    first, last = (_number(number, "absence", "1:30-90") for number in (start, end))
    return Absence(int(_number(group, "absence", "1:30-90")), first, last)


def _number(text: str, name: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} has {text!r} where a number should be. Give it as {example}.") from None


def _class_at(name: str, path: str | None) -> type | None:
    try:
        return None if path is None else class_at(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name}={path!r} cannot be imported: {error}. Give the path of a class: module.Class"
        ) from error


@contextmanager
def _progress(runs: int) -> Iterator[Callable[[int, dict[str, Any]], Callable[[], None]]]:
    """Shows bars on stderr, so that what is printed can be piped: for the runs, and for the inner steps of this one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        every = progress.add_task("runs", total=runs, visible=runs > 1)
        bar = progress.add_task("inner steps of all groups", total=None)
        begun: list[dict[str, Any]] = []

        def begin(groups: int, choices: dict[str, Any]) -> Callable[[], None]:
            progress.update(every, completed=len(begun))
            begun.append(choices)
            told = ", ".join(f"{name}={value}" for name, value in {"groups": groups, **choices}.items())
            progress.reset(bar, description=f"inner steps, {told}")
            return lambda: progress.advance(bar)

        yield begin


def _write(path: str, told: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json_format.dumps(plain(told), indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"json={path!r} cannot be written ({error}). Give another file.") from error


def _as_json(outcome: Outcome) -> dict[str, Any]:
    planned, run, prediction = outcome
    return {
        "name": planned.name,
        "seed": planned.seed,
        "groups": planned.groups,
        "choices": planned.choices,
        "settings": run.settings.described(),
        "parameters": run.model.numel,
        "losses": [group.losses for group in run.groups],
        "outer_losses": [group.outer_loss for group in run.groups],
        "outer_loss": run.outer_loss,
        "validations": [{"step": one.step, **one.metrics} for one in run.validations],
        "bytes_sent": [group.bytes_sent for group in run.groups],
        "inner_steps": [group.inner_steps for group in run.groups],
        "prediction": None
        if prediction is None
        else {
            "step_time": prediction.step_time,
            "seconds": prediction.seconds,
            "utilisation": prediction.utilisation,
            "ddp_seconds": prediction.ddp_seconds,
            "waited": [times.waited for times in prediction.times],
            "steps_done_at": [times.steps for times in prediction.times],
        },
    }
