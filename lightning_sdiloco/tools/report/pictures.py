"""Draws the pictures of a report, each for light and for dark pages."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_sdiloco.lightning import Rank, Run
from lightning_sdiloco.tools.report import series


@dataclass(frozen=True)
class Theme:
    """The colors of a picture."""

    ink: str
    quiet: str
    grid: str
    paper: str
    groups: tuple[str, ...]
    training: str
    waiting: str

    def of(self, group: int) -> str:
        """Returns the color of a group."""
        return self.groups[group % len(self.groups)]


THEMES: Mapping[str, Theme] = {
    "light": Theme(
        ink="#1f2933",
        quiet="#5f6c7b",
        grid="#d9dfe6",
        paper="#ffffff",
        groups=("#1f6fd6", "#d9541e", "#1d8f5a", "#8e3fbf", "#a67c00", "#00838f", "#c2185b", "#4e5d6c"),
        training="#c4cfda",
        waiting="#d32f2f",
    ),
    "dark": Theme(
        ink="#e6ebf0",
        quiet="#9fb0c0",
        grid="#34404c",
        paper="#171c22",
        groups=("#6fb1ff", "#ff9b63", "#5fd49b", "#cf9bff", "#e8c24a", "#4dd0e1", "#ff8ab5", "#b0bec5"),
        training="#4a5866",
        waiting="#ff6b6b",
    ),
}
"""The themes, by name."""

_SIZE = 9.2, 3.1
_ROUNDS = 2
"""How many rounds of flights are drawn."""

_GROUPS = 4
"""The most groups whose flights are drawn, from the first on."""

_POINTS = 1000
"""The most points of a line; where there are more, means of neighbours are drawn."""


def drawn(draw: Callable[[Any, Run, Theme], None], run: Run, theme: Theme, format: str) -> bytes:
    """Draws a picture, and returns it as a file."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "A report needs matplotlib, which is not installed. Install it (pip install matplotlib)."
        ) from error
    # Glyphs as paths: the picture looks the same wherever it is opened.
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "svg.hashsalt": "report"}):
        figure = Figure(figsize=_SIZE, facecolor=theme.paper, layout="constrained")
        draw(figure, run, theme)
        file = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else {"Software": None}
        figure.savefig(file, format=format, dpi=160, metadata=metadata, facecolor=theme.paper)
    return file.getvalue()


def draw_losses(figure: Any, run: Run, theme: Theme) -> None:
    """Draws the training loss of every group, and the losses of validation."""
    axes = _axes(figure, theme, "inner step", "loss")
    for rank in run.heads:
        _line(axes, rank.losses, theme.of(rank.group), 0.35, 1)
        _line(axes, _smoothed(rank.losses), theme.of(rank.group), 1, 2, rank.name)
    told = run.heads[0].validations
    for name in sorted({name for validation in told for name in validation.metrics if "loss" in name}):
        points = [(v.step, v.metrics[name]) for v in told if name in v.metrics]
        axes.plot(*zip(*points, strict=True), "o", color=theme.ink, markersize=5, label=f"{name} (outer parameters)")
    _legend(axes, theme)


def draw_utilisation(figure: Any, run: Run, theme: Theme) -> None:
    """Draws the share of every round in which training did not wait."""
    axes = _axes(figure, theme, "seconds since the first inner step", "compute utilisation")
    for rank in run.heads:
        _line(axes, series.utilisation_over_time(rank, run.began), theme.of(rank.group), 1, 2, rank.name)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(axes, theme)


def draw_bandwidth(figure: Any, run: Run, theme: Theme) -> None:
    """Draws what every group sent over time, and what data-parallel training would have needed."""
    needed = series.ddp_gbit_s(run)
    unit, name = (1.0, "Gbit/s") if needed >= 1 else (1000.0, "Mbit/s")
    axes = _axes(figure, theme, "seconds since the first inner step", name)
    rates = []
    for head in run.heads:
        ranks = [rank for rank in run.ranks if rank.group == head.group]
        points = [(at, unit * rate) for at, rate in series.gbit_s_over_time(ranks, run.began)]
        rates += [rate for _, rate in points]
        if points:
            x, y = zip(*points, strict=True)
            axes.step(x, y, where="post", color=theme.of(head.group), linewidth=1.5, label=head.name)
    if any(rates):
        label = f"DDP at this speed: {unit * needed:.3g} {name}"
        if needed:
            axes.axhline(unit * needed, color=theme.ink, linewidth=1.6, linestyle="--", label=label)
        # Where nothing was sent there is no logarithm: the axis ends at a thousandth of the most.
        axes.set_yscale("log")
        axes.set_ylim(max(max(rates) / 1000, min(rate for rate in rates if rate)) / 2, 3 * max([unit * needed, *rates]))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
    _legend(axes, theme)


def draw_flights(figure: Any, run: Run, theme: Theme) -> None:
    """Draws the last rounds: inner steps and waits of every group, and the flights of its fragments below."""
    axes = _axes(figure, theme, "seconds since the first inner step", "")
    heads = run.heads[:_GROUPS]
    figure.set_size_inches(_SIZE[0], 1.2 + 0.2 * sum(1 + len(head.fragments) for head in heads))
    window = _last_rounds(run)
    row, ticks = 0, list[tuple[int, str]]()
    for head in heads:
        row = _draw_group(axes, head, run, window, theme, row, ticks)
    axes.set_xlim(window[0] - run.began, window[1] - run.began)
    axes.set_ylim(row - 0.5, -0.8)
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
    axes.grid(visible=False, axis="y")
    for color, label in ((theme.training, "inner step"), (theme.waiting, "waits")):
        axes.barh([0], [0], color=color, label=label)
    for name, alpha in _SHADES.items():
        axes.barh([0], [0], color=theme.quiet, alpha=alpha, label=name)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, labelcolor=theme.ink, fontsize=9)


_SHADES = {"in flight": 0.25, "in the background": 0.55, "on the link": 1.0}


def _draw_group(
    axes: Any, head: Rank, run: Run, window: tuple[float, float], theme: Theme, row: int, ticks: list[tuple[int, str]]
) -> int:
    def bars(place: int, spans: list[tuple[float, float]], color: str, alpha: float, height: float) -> None:
        seen = [(began - run.began, ended - began) for began, ended in spans if ended > window[0] and began < window[1]]
        axes.broken_barh(seen, (place - height / 2, height), color=color, alpha=alpha, linewidth=0)

    # A hair apart, so that single steps can be told.
    gap = (window[1] - window[0]) / 1500
    ticks.append((row, head.name))
    bars(row, [(step.span[0], max(step.span[1] - gap, step.span[0])) for step in head.steps], theme.training, 1, 0.8)
    bars(row, [landed.spans["wait"] for landed in head.landings], theme.waiting, 1, 0.8)
    for fragment in range(len(head.fragments)):
        place = row + 1 + fragment
        flights = [landed for landed in head.landings if landed.fragment == fragment]
        ticks.append((place, f"fragment {fragment}"))
        bars(place, [landed.spans["flight"] for landed in flights], theme.of(head.group), _SHADES["in flight"], 0.7)
        for name, spans in (
            ("in the background", [span for landed in flights for span in series.in_background(landed)]),
            ("on the link", [span for landed in flights for span in series.on_the_link(landed)]),
        ):
            bars(place, spans, theme.of(head.group), _SHADES[name], 0.7)
    return row + 1 + len(head.fragments)


def _last_rounds(run: Run) -> tuple[float, float]:
    every = int(run.ranks[0].about["settings"]["sync_every"])
    steps = run.heads[0].steps
    ended = max((landed.spans["land"][1] for rank in run.ranks for landed in rank.landings), default=steps[-1].done)
    return steps[max(0, len(steps) - _ROUNDS * every)].span[0], max(ended, steps[-1].done)


def draw_agreement(figure: Any, run: Run, theme: Theme) -> None:
    """Draws how far the outer gradients of the groups agree in direction and in length."""
    cosines, norms = series.cosines(run), series.norms(run)
    axes = _axes(figure, theme, "inner step", "cosine with the mean", 121 if cosines else 122)
    for group, curve in cosines.items():
        _line(axes, curve, theme.of(group), 1, 2, f"group {group}")
    if cosines:
        axes.set_ylim(min(0.0, *(value for curve in cosines.values() for _, value in curve)), 1.04)
        axes = _axes(figure, theme, "inner step", "norm of the outer gradient", 122)
    else:
        axes.set_ylabel("norm of the outer gradient", color=theme.ink)
    for of, curve in norms.items():
        color, label = (theme.ink, "mean") if of is None else (theme.of(of), f"group {of}")
        _line(axes, curve, color, 1, 2, label)
    axes.set_ylim(bottom=0)
    _legend(axes, theme)


def draw_sites(figure: Any, run: Run, theme: Theme) -> None:
    """Draws in which rounds each site counted, as one of them saw it, and when that one was started."""
    head = run.heads[0]
    sites = sorted({site for landed in head.landings for site in landed.sites})
    axes = _axes(figure, theme, "seconds since the first inner step", "")
    figure.set_size_inches(_SIZE[0], 1.2 + 0.3 * max(len(sites), 2))
    for row, site in enumerate(sites):
        moments = [landed.spans["land"][1] - run.began for landed in head.landings if site in landed.sites]
        axes.plot(moments, [row] * len(moments), "|", color=theme.of(row), markersize=12, markeredgewidth=1.6)
    for number, (moment, _) in enumerate(head.starts):
        label = None if number else f"{head.name} starts"
        axes.axvline(moment - run.began, color=theme.ink, linewidth=1.4, linestyle="--", label=label)
    axes.set_yticks(range(len(sites)), sites)
    axes.set_ylim(len(sites) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    _legend(axes, theme)


def pictures_of(run: Run) -> Mapping[str, Callable[[Any, Run, Theme], None]]:
    """Returns the pictures that tell something of a run; one site knows nothing of how well all of them agree."""
    own = "sites" if run.heads[0].about.get("site") is not None else "agreement"
    return {name: draw for name, draw in PICTURES.items() if name not in {"sites", "agreement"} - {own}}


PICTURES: Mapping[str, Callable[[Any, Run, Theme], None]] = {
    "losses": draw_losses,
    "utilisation": draw_utilisation,
    "bandwidth": draw_bandwidth,
    "flights": draw_flights,
    "agreement": draw_agreement,
    "sites": draw_sites,
}
"""The functions that draw, by the names of the files."""


def _axes(figure: Any, theme: Theme, x: str, y: str, place: int = 111) -> Any:
    axes = figure.add_subplot(place, facecolor=theme.paper)
    axes.set_xlabel(x, color=theme.ink)
    axes.set_ylabel(y, color=theme.ink)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, which="both", length=0, pad=5)
    for side in axes.spines.values():
        side.set_visible(False)
    return axes


def _line(axes: Any, points: series.Curve, color: str, alpha: float, width: float, label: str | None = None) -> None:
    if points:
        x, y = zip(*series.rounds(points, -(-len(points) // _POINTS)), strict=True)
        marker = "o" if len(points) == 1 else None
        axes.plot(x, y, color=color, alpha=alpha, linewidth=width, label=label, marker=marker, markersize=4)


def _legend(axes: Any, theme: Theme) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=theme.ink, fontsize=9, loc="best", ncols=2)


def _smoothed(points: series.Curve) -> series.Curve:
    """Averages up to each point the last twentieth of all points, at most fifty."""
    width = max(1, min(50, len(points) // 20))
    values = [value for _, value in points]
    return [
        (step, sum(values[max(0, place - width + 1) : place + 1]) / len(values[max(0, place - width + 1) : place + 1]))
        for place, (step, _) in enumerate(points)
    ]
