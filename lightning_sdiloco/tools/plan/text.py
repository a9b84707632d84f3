"""Formats a plan, and the paper's Table 4, as tables for a terminal."""

import io
import math
from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.planning import (
    MARGIN,
    TARGET,
    TARGETS,
    Entry,
    HubLoad,
    Memory,
    Plan,
    Prediction,
    Round,
    SharedOut,
    Waits,
    readable,
    readable_rate,
    short,
)

NAMES: Mapping[str, str] = {
    "ddp": "DDP",
    "diloco": "DiLoCo",
    "streaming": "Streaming DiLoCo",
    "streaming_overlap": "... with overlap",
    "streaming_overlap_fp4": "... and FP4",
}
"""The methods, as the tables call them."""

_WIDTH = 80
_SHOWN = ("0.8", "0.95")


def plan_as_text(plan: Plan) -> str:
    """Formats a plan."""
    settings = plan.settings
    overlap = f"overlap_steps={settings.overlap_steps}"
    asked = f"sync_every={settings.sync_every}, {overlap}, layers_per_fragment={settings.layers_per_fragment}"
    return "\n".join(
        [
            *_circumstances(plan),
            "",
            f"With {asked}, compression={settings.compression!r}:",
            "",
            _predictions(plan.methods, "method", NAMES),
            "",
            f"Streaming DiLoCo with {overlap}, by compression:",
            "",
            _predictions(plan.compressions, "compression", {}),
            "",
            "Memory in each rank, beside ordinary training:",
            f"  {_memory(plan.memory)}",
            "",
            *_recommendation(plan),
        ]
    )


def hub_as_text(hub: HubLoad, settings: Settings) -> str:
    """Formats what goes through a hub."""
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


def waits_as_text(waits: Waits, step_time: float) -> str:
    """Formats whom the rounds of a federation wait for."""

    def told(round: Round) -> str:
        steps = max(1, math.ceil(round.seconds / step_time))
        return f"closes after {round.closes:.3g} s, is there after {round.seconds:.3g} s, {steps} inner steps"

    table = new_table(["site", "at the hub\nafter, s", "counts"], left=1)
    for site, seconds in waits.arrives.items():
        table.add_row(site, f"{seconds:.3g}", "yes" if site in waits.usual.counted else "late")
    more = [f"  at times it {told(waits.longest)}"] if waits.longest != waits.usual else []
    return "\n".join(
        [
            "With that quorum a round of the largest fragment",
            f"  {told(waits.usual)}",
            *more,
            f"  if it waited for all: {told(waits.all)}",
            "",
            rendered(table),
        ]
    )


def links_as_text(shared: SharedOut, names: list[str], settings: Settings) -> str:
    """Formats what parts that suit the links bring."""
    table = new_table(["link", "Gbit/s", "share", "bytes\nin a round", "seconds\nin a round"], left=1)
    for name, link, share, sent, seconds in zip(names, *shared[:4], strict=True):
        table.add_row(name, short(link), percent(share), readable(sent), short(seconds))
    given = ", ".join(short(link) for link in shared.links)
    lines = [
        f"Two shots with exchange=TwoShot('by_bandwidth', links=[{given}]), compression={settings.compression!r}:",
        "",
        rendered(table),
        "",
        f"  a round of all fragments keeps the busiest link busy for {short(shared.round_seconds)} s,",
        f"  with equal parts for {short(shared.equal_seconds)} s: {shared.gain:.2f} times as long",
    ]
    return "\n".join(lines)


def table_4_as_text(entries: Iterable[Entry]) -> str:
    """Formats Table 4: what the closed form gives, followed by the paper's own number where it differs."""
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        shown = f"{entry.gbit_s}" if entry.gbit_s == entry.paper else f"{entry.gbit_s} ({entry.paper})"
        rows.setdefault((entry.model, entry.method), []).append(shown)
    columns = ["model", "method", *(percent(target) for target in TARGETS)]
    table = new_table(columns, left=2)
    for (model, method), values in rows.items():
        table.add_row(model, NAMES[method], *values, end_section=method == "streaming_overlap_fp4")
    title = "Gbit/s for a compute utilisation; in brackets what the paper has instead"
    return f"{title}\n\n{rendered(table)}"


def _circumstances(plan: Plan) -> list[str]:
    groups, link = plan.groups, plan.link
    ranks = "1 rank" if groups.group_size == 1 else f"{groups.group_size} ranks"
    loss = f"{link.loss:.3g} of the packets lost" if link.loss else "no loss"
    return [
        f"{plan.model.numel:,} parameters in {_fragments(plan.fragments)}, {groups.groups} groups of {ranks}",
        f"{plan.steps:,} inner steps of {groups.step_time:g} s",
        f"{readable_rate(link.gbit_s)} in each direction, {link.round_trip * 1000:g} ms round trip, {loss}",
    ]


def _predictions(rows: Mapping[str, Prediction], kind: str, names: Mapping[str, str]) -> str:
    columns = [kind, "compute\nutilisation", "bytes\nper step", "bytes\nin all", "peak\nGbit/s"]
    table = new_table([*columns, *(f"Gbit/s\nfor {percent(float(target))}" for target in _SHOWN)], left=1)
    for name, row in rows.items():
        peak = short(row.peak_gbit_s)
        numbers = [percent(row.utilisation), readable(row.bytes_per_step), readable(row.bytes), peak]
        needs = [row.gbit_s_for[target] for target in _SHOWN]
        table.add_row(names.get(name, name), *numbers, *("never" if need is None else short(need) for need in needs))
    return rendered(table)


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
        f" layers_per_fragment={settings.layers_per_fragment}, compression={settings.compression!r}",
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


def new_table(columns: list[str], left: int) -> Table:
    """Returns an empty table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", vertical="bottom", no_wrap=True)
    return table


def rendered(table: Table, width: int = _WIDTH) -> str:
    """Formats a table as text."""
    # As plain text of a fixed width: the same in a terminal, a file and a test.
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(lines).strip("\n")


def percent(share: float) -> str:
    """Formats a share in percent, to a tenth."""
    # Cut rather than rounded: 100 % is said only where nothing waits.
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"
