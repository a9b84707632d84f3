"""Documentation that cannot lie: the picture of the rooms is that of the imports, and the page names what exists."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_rules import FACE, FLOOR, GRAPH, MODULES, PACKAGE, ROOT, room_of, tree_of

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURES = [ROOT / "docs" / "images" / name for name in ("architecture.svg", "architecture-dark.svg")]
DRAW_AGAIN = "imports changed: run python docs/make_architecture.py, and look at the picture"


def script() -> ModuleType:
    """The script that draws, which needs no matplotlib before it does."""
    spec = importlib.util.spec_from_file_location("make_architecture", ROOT / "docs" / "make_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


architecture = script()
SOURCE = architecture.Source(ROOT)
ARROWS = architecture.arrows(SOURCE)


# The picture


def test_the_picture_has_the_floors_of_the_rule_tests() -> None:
    floors = {room: floor for room, (floor, _) in architecture.ROOMS.items()}
    assert floors.pop(architecture.FACE) > max(floors.values())
    assert floors == FLOOR


def test_the_picture_has_the_arrows_that_the_rule_tests_see() -> None:
    def drawn(module: str) -> str:
        room = room_of(module)
        return architecture.FACE if room in FACE else str(room)

    pairs = [(drawn(module), drawn(other)) for module, others in GRAPH.items() for other in others]
    assert Counter(pair for pair in pairs if pair[0] != pair[1]) == ARROWS
    assert ARROWS["lightning", "engine"] > 1


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_the_pictures_are_those_of_the_imports(picture: Path) -> None:
    numbers = re.findall(r'id="(\w+)-imports-(\w+)-(\d+)"', picture.read_text())
    drawn = {(one, other): int(count) for one, other, count in numbers}
    assert drawn == dict(ARROWS), DRAW_AGAIN


def test_chains_and_circles_of_imports_are_found(tmp_path: Path) -> None:
    package = tmp_path / architecture.NAME
    package.mkdir()
    for name, text in {
        "__init__": "from lightning_sdiloco.a import x",
        "a": "def f():\n    from lightning_sdiloco import b",
        "b": "if TYPE_CHECKING:\n    import lightning_sdiloco.c",
        "c": "from lightning_sdiloco.b import y\nfrom lightning_sdiloco.d import z",
        "d": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    source = architecture.Source(tmp_path)
    b, c = f"{architecture.NAME}.b", f"{architecture.NAME}.c"
    assert source.circles == [{b, c}]
    assert [len(link) for link in source.longest_chain] == [1, 1, 2, 1]


# The page


def defined_in(module: str) -> set[str]:
    """The functions, classes, methods and attributes that a module defines, methods also behind their class."""
    names = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def files_without_a_place() -> set[str]:
    """The paths on the page and in CONTRIBUTING.md, in the package or the checkout, that lead nowhere."""
    text = PAGE + (ROOT / "CONTRIBUTING.md").read_text()
    named = {name for name in quoted(text) if re.fullmatch(r"\S+(\.py|\.md|/)", name)}
    assert len(named) > 20
    return {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()}


def names_without_a_definition() -> set[str]:
    """The names on the page, such as of functions, methods and arguments, that nothing in the package has."""
    known = set().union(*map(defined_in, MODULES))
    named = {name.removesuffix("()") for name in quoted(PAGE) if not name.endswith(".py")}
    named = {name for name in named if re.fullmatch(r"\w+(\.\w+)?", name)}
    assert len(named) > 20
    return named - known


def steps_in_other_files() -> set[str]:
    """The steps of the path whose file does not define what the page says."""
    steps = re.findall(r"\| `([\w/]+)\.py`<br>([^|]*)\|", PAGE)
    assert len(steps) > 10
    modules = {file: ".".join([architecture.NAME, *file.split("/")]) for file, _ in steps}
    there = {file: defined_in(module) if module in MODULES else set() for file, module in modules.items()}
    return {f"{file}.py: {name}" for file, names in steps for name in quoted(names) if name not in there[file]}


@pytest.mark.parametrize(
    "missing",
    [
        files_without_a_place,
        names_without_a_definition,
        steps_in_other_files,
    ],
)
def test_what_the_page_names_is_there(missing: Callable[[], set[str]]) -> None:
    assert missing() == set()


def test_the_script_says_what_it_takes() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_architecture.py"), "--help"]
    assert "--tree" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
