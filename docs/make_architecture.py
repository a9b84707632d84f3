"""Draws the rooms of the package from its imports, and counts what they come to: python
docs/make_architecture.py.

The picture has an arrow where one room imports another, also inside functions and for type
checkers. An import that goes up, or to a room on the same floor, is drawn in red. Below the
picture's files, the script prints a table of numbers. Other checkouts may stand beside this one:
``python docs/make_architecture.py --tree ../before --tree .``.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
NAME = "lightning_sdiloco"

FACE = "face"
# From top to bottom: the floor, and what the room is for. A room may import those on lower floors.
ROOMS = {
    FACE: (7, "the public names"),
    "tools": (6, "what people run"),
    "lightning": (5, "strategies and callbacks"),
    "federation": (4, "joins sites that come and go"),
    "engine": (3, "launches and lands fragments"),
    "planning": (3, "what a link allows"),
    "algorithm": (2, "when, what, how much"),
    "launch": (2, "how ranks start and meet"),
    "compression": (1, "bits of an outer gradient"),
    "comm": (1, "the door to the network"),
    "errors": (0, "what ends a run, what is refused"),
    "memory": (0, "vectors in pages of their own"),
    "registration": (0, "names for Lightning"),
    "version": (0, "which this is"),
}


# Reading the source


@dataclass(frozen=True)
class Source:
    """The source of the package in a checkout.

    Attributes:
        root: The folder of the checkout.
    """

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """Every file of the package by the name of its module."""
        named = {}
        for path in sorted((self.root / NAME).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return named

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """What every module says."""
        return {module: ast.parse(path.read_text()) for module, path in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules of the package that each module imports, wherever in the file it does so."""
        return {module: self._imported(tree) - {module} for module, tree in self.trees.items()}

    def _imported(self, tree: ast.Module) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= submodules & self.files.keys() or {str(node.module)}
        return names & self.files.keys()

    @cached_property
    def circles(self) -> list[set[str]]:
        """The sets of modules that reach each other by imports."""
        reached = {module: self._reached(module) for module in self.imports}
        found: list[set[str]] = []
        for module, others in reached.items():
            circle = {other for other in others if module in reached[other]}
            if circle and circle not in found:
                found.append(circle)
        return found

    def _reached(self, module: str) -> set[str]:
        seen: set[str] = set()
        left = [module]
        while left:
            new = self.imports[left.pop()] - seen
            seen |= new
            left += new
        return seen

    @cached_property
    def longest_chain(self) -> list[set[str]]:
        """The longest chain of imports, from top to bottom; a circle counts as one link."""
        link = {
            module: next((c for c in self.circles if module in c), {module})
            for module in self.imports
        }
        chains: dict[str, list[set[str]]] = {}

        def chain_from(module: str) -> list[set[str]]:
            if module not in chains:
                below = set().union(*(self.imports[own] for own in link[module])) - link[module]
                longest = max((chain_from(other) for other in sorted(below)), key=len, default=[])
                chains.update(dict.fromkeys(link[module], [link[module], *longest]))
            return chains[module]

        return max(map(chain_from, self.imports), key=len)

    def functions(self) -> Iterator[tuple[int, str]]:
        """Every function, with its lines that are no docstring."""
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    described = node.body[0] if ast.get_docstring(node) else None
                    docstring = described.end_lineno - described.lineno + 1 if described else 0  # type: ignore[operator]
                    yield node.end_lineno - node.lineno + 1 - docstring, f"{module}.{node.name}"  # type: ignore[operator]


def room_of(module: str) -> str:
    """The room of a module; the modules above all rooms are the face."""
    name = (module.split(".") + [FACE])[1]
    return name if name in ROOMS else FACE


def arrows(source: Source) -> Counter[tuple[str, str]]:
    """How many imports lead from a room to another one: pairs of a file and a file that it
    imports.
    """
    pairs = (
        (room_of(module), room_of(other))
        for module, others in source.imports.items()
        for other in others
    )
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def allowed(importer: str, imported: str) -> bool:
    """Whether an import goes down."""
    return ROOMS[imported][0] < ROOMS[importer][0]


# Numbers


def numbers(root: Path) -> dict[str, str]:
    """What the house comes to, by what is counted."""
    source = Source(root)
    lines = {module: len(path.read_text().splitlines()) for module, path in source.files.items()}
    longest = max(lines, key=lambda module: lines[module])
    function_lines, function = max(source.functions())
    return {
        "folders": str(len({path.parent for path in source.files.values()})),
        "files": str(len(lines)),
        "lines": f"{sum(lines.values()):,}",
        "longest file": f"{lines[longest]} ({short(longest)})",
        "longest function": f"{function_lines} ({short(function)})",
        "longest chain of imports": str(len(source.longest_chain)),
        "circles": ", ".join(f"{len(circle)} files" for circle in source.circles) or "0",
    }


def short(name: str) -> str:
    """A dotted name without that of the package."""
    return name.removeprefix(f"{NAME}.")


def print_numbers(roots: list[Path]) -> None:
    """Prints a table with a column for every checkout."""
    columns = [numbers(root) for root in roots]
    print("|  | " + " | ".join(str(root) for root in roots) + " |")
    print("|---|" + "---|" * len(roots))
    for what in columns[0]:
        print(f"| {what} | " + " | ".join(column[what] for column in columns) + " |")


# The picture


class Colors(NamedTuple):
    """The colors of a picture."""

    page: str
    ink: str
    quiet: str
    box: str
    edge: str
    band: str
    line: str
    number: str
    wrong: str


LIGHT = Colors(
    page="#ffffff",
    ink="#263238",
    quiet="#607d8b",
    box="#e8eaf6",
    edge="#3f51b5",
    band="#f5f7f8",
    line="#90a4ae",
    number="#3f51b5",
    wrong="#e53935",
)
# The page of the documentation in its dark scheme has this color.
DARK = Colors(
    page="#1e2129",
    ink="#e2e4e9",
    quiet="#9aa0ac",
    box="#2a3050",
    edge="#7c8ce0",
    band="#252933",
    line="#5c6473",
    number="#8c9eff",
    wrong="#ff6e6e",
)

WIDTH = 2.35
COLUMN = 0.62
ROW = 0.66
BOX = 0.50
ORDER = list(ROOMS)


def column(room: str) -> float:
    """Where what imports a room comes down, from the left."""
    return WIDTH + 0.2 + COLUMN * ORDER.index(room)


def row(room: str) -> float:
    """The middle of a room, from the top."""
    return ROW * (ORDER.index(room) + 0.5)


def draw(source: Source, colors: Colors, path: Path) -> None:
    """Draws the rooms as a staircase: to the right of a room is what it imports, above it what
    imports it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "architecture"})
    width = column(ORDER[-1]) + 0.35
    height = ROW * len(ORDER)
    figure = plt.figure(figsize=(width, height), facecolor=colors.page)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    draw_floors(axes, colors, width)
    draw_legend(axes, colors)
    found = arrows(source)
    for room in ORDER:
        draw_room(axes, colors, room, sum(room_of(module) == room for module in source.files))
        draw_lines(axes, colors, room, found)
    for pair, count in sorted(found.items()):
        draw_number(axes, colors, pair, count)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor=colors.page)
    plt.close(figure)


def draw_floors(axes: Any, colors: Colors, width: float) -> None:
    """Numbers the floors, and draws a band behind every other one."""
    from matplotlib.patches import Rectangle

    for floor in {floor for floor, _ in ROOMS.values()}:
        rooms = [room for room in ORDER if ROOMS[room][0] == floor]
        top = ROW * ORDER.index(rooms[0])
        height = ROW * len(rooms)
        if floor % 2:
            axes.add_patch(
                Rectangle(
                    (0, top), width, height, facecolor=colors.band, edgecolor="none", zorder=0
                )
            )
        if rooms != [FACE]:
            style = {"ha": "center", "va": "center", "fontsize": 9, "color": colors.quiet}
            axes.text(0.16, top + height / 2, str(floor), **style)


def draw_legend(axes: Any, colors: Colors) -> None:
    """Says how to read the picture, where it has room."""
    said = (
        "To the right of a room: what it imports.",
        "Above a room: what imports it.",
        "A number: imports of one file by another.",
        "Rooms on one floor do not know each other.",
    )
    for line, text in enumerate(said):
        axes.text(
            0.42,
            row("compression") + 0.27 * line,
            text,
            va="center",
            fontsize=9,
            color=colors.quiet,
        )


def draw_room(axes: Any, colors: Colors, room: str, files: int) -> None:
    """Draws a room with its name, its files and what it is for."""
    from matplotlib.patches import FancyBboxPatch

    right = column(room) + 0.16
    middle = row(room)
    left = right - WIDTH
    style = {
        "boxstyle": "round,pad=0,rounding_size=0.07",
        "facecolor": colors.box,
        "edgecolor": colors.edge,
    }
    axes.add_patch(
        FancyBboxPatch((left, middle - BOX / 2), WIDTH, BOX, linewidth=1, zorder=3, **style)
    )
    name = {FACE: "the face", "errors": "errors.py", "memory": "memory.py"}.get(room, f"{room}/")
    text = {"va": "center", "zorder": 4}
    axes.text(
        left + 0.12, middle - 0.1, name, color=colors.ink, fontsize=10.5, weight="bold", **text
    )
    axes.text(left + 0.12, middle + 0.125, ROOMS[room][1], color=colors.quiet, fontsize=8.5, **text)
    counted = f"{files} file{'s' * (files > 1)}"
    axes.text(
        right - 0.12, middle - 0.1, counted, color=colors.quiet, fontsize=8, ha="right", **text
    )


def draw_lines(axes: Any, colors: Colors, room: str, found: Counter[tuple[str, str]]) -> None:
    """Draws the line to what a room imports, and the arrow into it from what imports it."""
    imported = [column(other) for one, other in found if one == room and allowed(one, other)]
    importers = [row(one) for one, other in found if other == room and allowed(one, other)]
    if imported:
        axes.plot(
            [column(room) + 0.16, max(imported)],
            [row(room)] * 2,
            color=colors.line,
            linewidth=1.2,
            zorder=1,
        )
    if importers:
        arrow = {
            "arrowstyle": "-|>",
            "color": colors.line,
            "linewidth": 1.2,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        end = (column(room), row(room) - BOX / 2)
        axes.annotate("", end, (column(room), min(importers)), arrowprops=arrow, zorder=1)


def draw_number(axes: Any, colors: Colors, pair: tuple[str, str], count: int) -> None:
    """Writes how many imports there are where the line of a room meets that of what it imports."""
    color = colors.number if allowed(*pair) else colors.wrong
    circle = {
        "boxstyle": "circle,pad=0.25",
        "facecolor": colors.page,
        "edgecolor": color,
        "linewidth": 1,
    }
    style = {
        "ha": "center",
        "va": "center",
        "fontsize": 8,
        "color": color,
        "weight": "bold",
        "bbox": circle,
    }
    axes.text(column(pair[1]), row(pair[0]), str(count), zorder=5, gid=gid(pair, count), **style)


def gid(pair: tuple[str, str], count: int) -> str:
    """Names a number in the file of the picture, so that a test can read it there."""
    return f"{pair[0]}-imports-{pair[1]}-{count}"


def draw_both() -> None:
    """Writes the picture for light and for dark pages."""
    IMAGES.mkdir(exist_ok=True)
    draw(Source(ROOT), LIGHT, IMAGES / "architecture.svg")
    draw(Source(ROOT), DARK, IMAGES / "architecture-dark.svg")


def main() -> None:
    """Writes the pictures, and prints the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree", type=Path, action="append", help="a checkout to count; this one if none is given"
    )
    trees = parser.parse_args().tree or [ROOT]
    draw_both()
    print_numbers([tree.resolve() for tree in trees])


if __name__ == "__main__":
    main()
