"""The timeline of a run with faults, as a picture: a row for the hub and each site, for light and for dark pages."""

from pathlib import Path
from typing import Any

from benchmarks.chaos.checks import Told
from benchmarks.chaos.faults import ALL, HUB

Timeline = dict[str, Any]

LABELS = {
    "kill": "killed",
    "lose": "killed, disk lost",
    "blackout": "all killed",
    "stop": "stopped",
    "cut": "cut off",
    "cut_out": "cut off, outwards",
    "cut_in": "cut off, inwards",
    "loss": "packets lost",
    "slow": "1 Mbit/s",
    "nat": "NAT forgets",
    "cut_5": "cut off",
    "cut_15": "cut off",
    "cut_60": "cut off",
    "move": "moved",
    "kill_before_send": "killed",
    "kill_in_upload": "killed",
    "kill_before_record": "killed",
    "kill_in_download": "killed",
    "kill_at_landing": "killed",
}
_GROUPS = {"killed": 0, "moved": 0, "all killed": 0, "stopped": 1, "cut off": 2}
_SHOWN = 150.0  # seconds that are drawn, from the first record on
_WIDTH = 13.0  # of a label, in seconds
_LEGEND = ("killed", "stopped", "cut off", "bad link")
_THEMES = {
    "": {"ink": "#1f2933", "quiet": "#5f6c7b", "grid": "#d9dfe6", "paper": "#ffffff", "trains": "#c4cfda"},
    "-dark": {"ink": "#e6ebf0", "quiet": "#9fb0c0", "grid": "#34404c", "paper": "#171c22", "trains": "#4a5866"},
}
_COLORS = {
    "": ("#d32f2f", "#8e3fbf", "#d9541e", "#a67c00", "#1f6fd6"),
    "-dark": ("#ff6b6b", "#cf9bff", "#ff9b63", "#e8c24a", "#6fb1ff"),
}


def timeline(told: Told) -> Timeline:
    """Returns what is drawn of a run: its beginning, in seconds since its first record.

    Returns:
        ``faults``: kind, victim, beginning and end; ``rounds``: time, fragment and sites that count; ``trains``: for
        each site, spans in which it made steps.
    """
    rounds = [note for note in told.hub if note["what"] == "append"]
    zero = rounds[0]["at"] if rounds else 0.0
    rounds = [note for note in rounds if note["at"] < zero + _SHOWN]
    faults = [span for span in told.spans() if span.began < zero + _SHOWN]
    steps = {site: [note["at"] - zero for note in told.steps(site)] for site in told.sites}
    return {
        "faults": [[own.kind, own.victim, own.began - zero, own.ended - zero] for own in faults],
        "rounds": [[n["at"] - zero, n["fragment"], [site for site, *_ in n["counted"]]] for n in rounds],
        "trains": {site: _spans([at for at in own if at < _SHOWN]) for site, own in steps.items()},
    }


def _spans(times: list[float], gap: float = 1.0) -> list[list[float]]:
    spans: list[list[float]] = []
    for at in times:
        if spans and at < spans[-1][1] + gap:
            spans[-1][1] = at
        else:
            spans.append([at, at])
    return spans


def draw(told: Timeline, path: Path) -> None:
    """Draws it, for light pages and, beside it, for dark ones.

    Args:
        told: What `timeline` returned.
        path: The file for light pages; the other one is named ``-dark``.
    """
    import matplotlib as mpl

    # With a salt of its own, and without a date, the same numbers give the same file.
    mpl.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "chaos"})
    for name, theme in _THEMES.items():
        figure = _figure(told, theme, _COLORS[name])
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        file = path.with_stem(path.stem + name)
        figure.savefig(file, facecolor=theme["paper"], dpi=190, metadata=metadata)


def _figure(told: Timeline, theme: dict[str, str], colors: tuple[str, ...]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [HUB, *told["trains"]]
    figure = Figure(figsize=(9.2, 0.62 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(theme["paper"])
    for row, name in enumerate(rows):
        for first, last in told["trains"].get(name, [[0.0, told["rounds"][-1][0]]]):
            axes.barh(row, last - first, 0.26, first, color=theme["trains"], zorder=1)
        times = [at for at, _, sites in told["rounds"] if name in (HUB, *sites)]
        axes.vlines(times, row - 0.13, row + 0.13, color=colors[4], linewidth=1.0, zorder=3)
    labelled = dict.fromkeys(rows, -_WIDTH)
    for kind, victim, began, ended in sorted(told["faults"], key=lambda fault: fault[2]):
        for name in rows if victim == ALL else [victim]:
            row, color = rows.index(name), colors[_GROUPS.get(LABELS[kind].partition(",")[0], 3)]
            axes.barh(row, max(ended - began, 0.25), 0.46, began, color=color, alpha=0.55, zorder=2)
            # What would be written over another label goes below.
            above = began > labelled[name] + _WIDTH
            labelled[name] = began if above else labelled[name]
            at, side = (row - 0.27, "bottom") if above else (row + 0.27, "top")
            axes.text(began, at, LABELS[kind], color=theme["ink"], fontsize=6.5, va=side, zorder=4)
    axes.set_yticks(range(len(rows)), ["hub", *(f"site {name}" for name in rows[1:])])
    axes.set_ylim(len(rows) - 0.4, -0.75)
    axes.set_xlim(-1, told["rounds"][-1][0] + 3)
    axes.set_xlabel("seconds since the first record", color=theme["ink"])
    axes.grid(axis="x", color=theme["grid"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme["ink"], length=0, pad=6)
    for side in axes.spines.values():
        side.set_visible(False)
    marks = [Patch(color=theme["trains"], label="trains"), Patch(color=colors[4], label="a round closes and counts it")]
    marks += [Patch(color=color, alpha=0.55, label=label) for color, label in zip(colors[:4], _LEGEND, strict=True)]
    style = {"ncols": 6, "frameon": False, "labelcolor": theme["ink"], "fontsize": 9}
    figure.legend(handles=marks, loc="outside lower center", **style)
    return figure
