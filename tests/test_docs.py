"""Documentation that cannot lie: the picture of the rooms is that of the imports, and the page names what exists."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_rules import FACE, FLOOR, MODULES, PACKAGE, ROOT, graph, nodes_of, room_of

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SCRIPT = ROOT / "docs" / "make_architecture.py"


def script() -> ModuleType:
    """The script that draws, which needs no matplotlib before it does."""
    spec = importlib.util.spec_from_file_location("make_architecture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


architecture = script()


@cache
def arrows() -> Counter[tuple[str, str]]:
    return Counter(architecture.arrows(architecture.Source(ROOT)))


def test_the_picture_has_the_floors_and_arrows_that_the_rule_tests_see() -> None:
    floors = {room: floor for room, (floor, _) in architecture.ROOMS.items()}
    assert floors.pop(architecture.FACE) > max(floors.values())
    assert floors == FLOOR
    drawn = {module: architecture.FACE if room_of(module) in FACE else room_of(module) for module in MODULES}
    pairs = [(drawn[module], drawn[other]) for module, others in graph().items() for other in others]
    assert Counter(pair for pair in pairs if pair[0] != pair[1]) == arrows()
    assert arrows()["lightning", "engine"] > 1


@pytest.mark.parametrize("picture", ["architecture", "architecture-dark"])
def test_the_pictures_are_those_of_the_imports(picture: str) -> None:
    text = (ROOT / "docs" / "images" / f"{picture}.svg").read_text()
    drawn = {(one, other): int(count) for one, other, count in re.findall(r'id="(\w+)-imports-(\w+)-(\d+)"', text)}
    assert drawn == dict(arrows()), "imports changed: run python docs/make_architecture.py, and look at the picture"


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
    assert source.circles == [{f"{architecture.NAME}.{name}" for name in "bc"}]
    assert [len(link) for link in source.longest_chain] == [1, 1, 2, 1]


def defined_in(module: str) -> set[str]:
    """The functions, classes, methods and attributes that a module defines, methods also behind their class."""
    names = set()
    for node in nodes_of(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def test_what_the_page_names_is_there() -> None:
    """Files, also those of CONTRIBUTING.md; names, such as of functions and arguments; what a step's file defines."""
    page = quoted(PAGE)
    files = {
        name
        for name in page + quoted((ROOT / "CONTRIBUTING.md").read_text())
        if re.fullmatch(r"\S+(\.py|\.md|/)", name)
    }
    names = {name.removesuffix("()") for name in page if not name.endswith(".py")}
    names = {name for name in names if re.fullmatch(r"\w+(\.\w+)?", name)}
    steps = re.findall(r"\| `([\w/]+)\.py`<br>([^|]*)\|", PAGE)
    assert min(len(files), len(names), 2 * len(steps)) > 20
    there = {module: defined_in(module) for module in MODULES}
    wrong = {name for name in files if not (PACKAGE / name).exists() and not (ROOT / name).exists()}
    wrong |= names - set().union(*there.values())
    for file, told in steps:
        wrong |= {
            f"{file}: {name}"
            for name in set(quoted(told)) - there.get(f"{architecture.NAME}.{file.replace('/', '.')}", set())
        }
    assert wrong == set()


def test_the_script_says_what_it_takes() -> None:
    told = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True).stdout
    assert "--tree" in told
