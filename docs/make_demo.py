"""Draws the terminal of ``sdiloco demo`` as an animation, light and dark: python docs/make_demo.py.

The numbers are those of the recorded run in ``images/demo.json``, and the demo's own code prints
them. A bar is as fast as its setting was trained, at an even pace; the picture runs ten times as
fast, and leaves out the seconds in which processes start. Without motion, if the reader prefers
that, it shows the end. The same numbers give the same files, byte for byte.
"""

import io
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.segment import Segment

from lightning_sdiloco.tools import demo
from lightning_sdiloco.tools.output import DARK, LIGHT, Theme

IMAGES = Path(__file__).resolve().parent / "images"
COLUMNS = 80
CHARACTER = 8.4
LINE = 19.0
MARGIN = 16.0

SPEED = 10
"""Seconds of training in a second of the picture."""
FRAMES = 12
"""Pictures of each bar."""
FIRST_BAR = 1.0
PAUSE = 0.4
"""Seconds of the picture before the first bar, and after each."""
READING = 12.0
"""Seconds for which the results are shown, before all begins again."""

Row = list[Segment]


class Shown(NamedTuple):
    """A row of the terminal, and from when until when it is seen, in seconds of the picture."""

    number: int
    row: Row
    start: float
    end: float | None


def rows_of(renderable: RenderableType) -> list[Row]:
    """Prints an object as the terminal would, and returns its rows."""
    console = Console(file=io.StringIO(), width=COLUMNS, force_terminal=True, legacy_windows=False)
    if isinstance(renderable, str):
        renderable = console.render_str(renderable, highlight=False)
    return console.render_lines(renderable, console.options, pad=False)


def frames_of(setting: str, run: dict[str, Any]) -> list[Row]:
    """Returns the bar of a setting on its way, with the time left at the pace of the run."""
    now = 0.0
    progress = Progress(
        *Progress.get_default_columns(),
        console=Console(file=io.StringIO(), width=COLUMNS, force_terminal=True),
        get_time=lambda: now,
        auto_refresh=False,
    )
    bar = progress.add_task(demo.description_of(setting), total=run["steps"])
    frames = rows_of(progress.get_renderable())
    for frame in range(1, FRAMES + 1):
        now = run["train_seconds"] * frame / FRAMES
        progress.update(bar, completed=run["steps"] * frame // FRAMES)
        frames += rows_of(progress.get_renderable())
    return frames


def screen(runs: dict[str, dict[str, Any]]) -> list[Shown]:
    """Returns all rows that the terminal shows while the demo runs."""
    shown = [Shown(0, [Segment("$ sdiloco demo")], 0.0, None)]
    start = FIRST_BAR
    for number, (setting, run) in enumerate(runs.items(), start=1):
        *moving, last = frames_of(setting, run)
        seconds = run["train_seconds"] / SPEED / len(moving)
        for row in moving:
            shown.append(Shown(number, row, start, start + seconds))
            start += seconds
        shown.append(Shown(number, last, start, None))
        start += PAUSE
    results = rows_of(demo.results_table(runs))
    for sentence in demo.sentences(runs["ddp"], runs["streaming_fp4"]):
        results += [[], *rows_of(sentence)]
    for number, row in enumerate(results, start=len(runs) + 2):
        shown.append(Shown(number, row, start, None))
    return shown


def color_of(segment: Segment, theme: Theme) -> str:
    """Returns the color of a page for one of the terminal's."""
    style = segment.style
    if style is None or style.color is None:
        quiet = style is not None and (style.dim or style.italic)
        return theme.quiet if quiet else theme.ink
    colors = {
        "rgb(249,38,114)": theme.line(0),  # of a bar on its way
        "rgb(114,156,31)": theme.line(2),  # and of one at its end
        "magenta": theme.line(3),
        "cyan": theme.line(5),
        "grey23": theme.grid,
        "bright_black": theme.quiet,
    }
    return colors.get(style.color.name, theme.ink)


def texts(row: Row, top: float, theme: Theme) -> Iterable[str]:
    """Writes the words of a row where the terminal has them, whatever the font of the reader."""
    column = 0
    for segment in row:
        words = segment.text.strip()
        if words:
            left = MARGIN + CHARACTER * (column + segment.text.index(words[0]))
            weight = ' font-weight="bold"' if segment.style and segment.style.bold else ""
            yield (
                f'<text x="{left:.1f}" y="{top:.1f}" textLength="{CHARACTER * len(words):.1f}"'
                f' fill="{color_of(segment, theme)}"{weight}>{escape(words)}</text>'
            )
        column += len(segment.text)


def keyframes(shown: Shown, end: float) -> tuple[str, str]:
    """Returns the name and the text of the animation that shows a row in its time."""
    start = 100 * shown.start / end
    name = f"r{shown.start:.2f}".replace(".", "-")
    steps = f"0%{{opacity:0}}{start:.2f}%{{opacity:1}}"
    if shown.end is not None:
        name += f"-{shown.end:.2f}".replace(".", "-")
        steps += f"{100 * shown.end / end:.2f}%{{opacity:0}}"
    return name, f"@keyframes {name}{{{steps}}}"


def picture(runs: dict[str, dict[str, Any]], theme: Theme) -> str:
    """Returns the animation as SVG."""
    shown = screen(runs)
    end = max(row.start for row in shown) + READING
    width = 2 * MARGIN + CHARACTER * COLUMNS
    height = 2 * MARGIN + LINE * (1 + max(row.number for row in shown))
    animations: dict[str, str] = {}
    groups = []
    for row in shown:
        content = "".join(texts(row.row, MARGIN + LINE * (row.number + 0.75), theme))
        if not content:
            continue
        attributes = ""
        if row.start > 0:
            name, animations[name] = keyframes(row, end)
            passing = " passing" if row.end is not None else ""
            attributes = f' class="row{passing}" style="animation-name:{name}"'
        groups.append(f"<g{attributes}>{content}</g>")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
            ' role="img">',
            "<title>sdiloco demo trains three settings with a bar each, and prints a table of"
            " their losses, bytes and times.</title>",
            "<style>",
            "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',"
            "monospace;white-space:pre}",
            ".passing{opacity:0}",
            "@media (prefers-reduced-motion:no-preference){"
            f".row{{animation:{end:.2f}s step-end infinite}}}}",
            *animations.values(),
            "</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{theme.paper}" stroke="{theme.grid}"/>',
            *groups,
            "</svg>\n",
        ]
    )


def pictures() -> dict[Path, str]:
    """Returns the files with their contents."""
    runs = json.loads((IMAGES / "demo.json").read_text(encoding="utf-8"))
    return {
        IMAGES / "demo-terminal.svg": picture(runs, LIGHT),
        IMAGES / "demo-terminal-dark.svg": picture(runs, DARK),
    }


if __name__ == "__main__":
    for file, text in pictures().items():
        file.write_text(text, encoding="utf-8")
