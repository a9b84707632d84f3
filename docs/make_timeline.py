"""Draws the timeline of the pages from the real schedule, light and dark: python
docs/make_timeline.py.

Two worker groups train without pause; one fragment after the other launches, is in flight for a few
inner steps, and lands. The same schedule gives the same files, byte for byte.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from lightning_sdiloco import Schedule
from lightning_sdiloco.tools.output import save_picture

SCHEDULE = Schedule(sync_every=16, overlap_steps=3, fragments=4)
FIRST = 15
LAST = 40
IMAGES = Path(__file__).resolve().parent / "images"

# Rows from top to bottom: group 0 with its inner steps above, the link, group 1 with its inner
# steps below.
STEPS = (1.0, 11.9)
FIRST_FRAGMENT = (2.1, 7.6)
LINK = (5.85, 6.85)

QUIET = "C9"
COLORS = ("C0", "C1", "C2", "C3")


def flights() -> list[tuple[int, int]]:
    """Fragment and inner step of every launch that is drawn, each with its landing."""
    steps = range(FIRST, LAST - SCHEDULE.overlap_steps + 1)
    return [(fragment, step) for step in steps for fragment in SCHEDULE.launches(step)]


def draw_group(axes: Axes, group: int) -> None:
    """Draws the inner steps of a worker group, and a row for each fragment."""
    row = STEPS[group]
    for step in range(FIRST, LAST + 1):
        axes.add_patch(
            Rectangle(
                (step - 0.97, row - 0.36), 0.94, 0.72, facecolor=QUIET, alpha=0.15, linewidth=0
            )
        )
        axes.text(step - 0.5, row + 0.02, str(step), ha="center", va="center", fontsize=8)
    label(axes, row, "inner steps")
    for fragment in range(SCHEDULE.fragments):
        label(axes, FIRST_FRAGMENT[group] + fragment, f"fragment {fragment}")
        axes.plot(
            [FIRST - 1, LAST],
            [FIRST_FRAGMENT[group] + fragment] * 2,
            color=QUIET,
            alpha=0.4,
            linewidth=1,
            zorder=0,
        )
    middle = (row + FIRST_FRAGMENT[group] + (SCHEDULE.fragments - 1) * (1 - group)) / 2
    axes.text(
        FIRST - 5.6,
        middle,
        f"group {group}",
        rotation=90,
        ha="center",
        va="center",
        fontsize=12,
    )


def label(axes: Axes, row: float, text: str) -> None:
    """Writes the name of a row to its left."""
    axes.text(FIRST - 1.4, row, text, ha="right", va="center", fontsize=10)


def draw_flight(axes: Axes, fragment: int, step: int) -> None:
    """Draws a fragment from its launch to its landing, in both groups, and the exchange between
    them.
    """
    color = COLORS[fragment]
    lands = step + SCHEDULE.overlap_steps
    assert fragment in SCHEDULE.landings(lands), "the picture shows what the schedule says"
    rows = [first + fragment for first in FIRST_FRAGMENT]
    for row in rows:
        axes.plot(
            [step, lands],
            [row, row],
            color=color,
            linewidth=7,
            alpha=0.3,
            solid_capstyle="butt",
            zorder=2,
        )
        axes.plot(step, row, marker=">", markersize=9, color=color, markeredgewidth=0, zorder=4)
        axes.plot(lands, row, marker="o", markersize=9, color=color, markeredgewidth=0, zorder=4)
    middle = step + SCHEDULE.overlap_steps / 2
    arrow = {"arrowstyle": "<->", "color": color, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate(
        "", (middle, rows[0] + 0.12), (middle, rows[1] - 0.12), arrowprops=arrow, zorder=3
    )


def draw_link(axes: Axes) -> None:
    """Draws the slow link that the groups are joined by."""
    top, bottom = LINK
    axes.add_patch(
        Rectangle(
            (FIRST - 1, top), LAST - FIRST + 1, bottom - top, facecolor="C4", alpha=0.2, linewidth=0
        )
    )
    label(axes, (top + bottom) / 2, "slow link")


def draw_measures(axes: Axes) -> None:
    """Draws how many inner steps lie between two launches of a fragment, and between launch and
    landing.
    """
    first = SCHEDULE.sync_every
    measure(
        axes,
        first,
        first + SCHEDULE.sync_every,
        FIRST_FRAGMENT[0] - 2.05,
        f"sync_every = {SCHEDULE.sync_every}",
    )
    for step in (first, first + SCHEDULE.sync_every):
        axes.plot(
            [step, step],
            [-0.2, FIRST_FRAGMENT[0]],
            color=QUIET,
            linewidth=0.8,
            linestyle=":",
            zorder=1,
        )
    landing = first + SCHEDULE.overlap_steps
    text = f"overlap_steps = {SCHEDULE.overlap_steps}"
    style = {"va": "center", "color": QUIET, "fontsize": 9, "backgroundcolor": axes.get_facecolor()}
    axes.text(landing + 0.5, FIRST_FRAGMENT[0] - 0.02, text, **style)


def measure(axes: Axes, start: float, end: float, row: float, text: str) -> None:
    """Draws a dimension line with its text in the middle."""
    arrow = {"arrowstyle": "<->", "color": QUIET, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (start, row), (end, row), arrowprops=arrow)
    middle = (start + end) / 2
    axes.text(
        middle,
        row,
        text,
        ha="center",
        va="center",
        color=QUIET,
        fontsize=9,
        backgroundcolor=axes.get_facecolor(),
    )


def draw_legend(axes: Axes) -> None:
    """Says what the marks mean."""
    launch = Line2D([], [], marker=">", markersize=9, color=QUIET, linestyle="none", label="launch")
    flight = Patch(facecolor=QUIET, alpha=0.3, label="in flight, while training goes on")
    land = Line2D([], [], marker="o", markersize=9, color=QUIET, linestyle="none", label="land")
    axes.legend(
        handles=[launch, flight, land],
        loc="upper center",
        bbox_to_anchor=((FIRST + LAST) / 2 - 0.5, 12.4),
        bbox_transform=axes.transData,
        ncols=3,
        frameon=False,
        fontsize=10,
    )


def draw(figure: Figure) -> None:
    """Draws all of it."""
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(FIRST - 6.2, LAST + 0.3)
    axes.set_ylim(13.3, -0.6)
    axes.axis("off")
    draw_link(axes)
    draw_measures(axes)
    for group in range(2):
        draw_group(axes, group)
    for fragment, step in flights():
        draw_flight(axes, fragment, step)
    draw_legend(axes)


if __name__ == "__main__":
    save_picture(str(IMAGES / "timeline.svg"), draw, (8.4, 5.2))
