"""Documentation that cannot lie: pictures are those of the imports, and what pages name exists and is described."""

import ast
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import lightning_sdiloco
from tests.test_rules import NAME, PACKAGE, ROOT, SOURCE, architecture, nodes_of, room_of

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_pictures_are_those_of_the_imports() -> None:
    for picture in ("architecture", "architecture-dark"):
        text = (ROOT / "docs" / "images" / f"{picture}.svg").read_text()
        drawn = re.findall(r'id="(\w+)-imports-(\w+)-(\d+)"', text)
        assert {(one, other): int(count) for one, other, count in drawn} == dict(architecture.arrows(SOURCE)), (
            "imports changed: run python docs/make_architecture.py, and look at the picture"
        )


def test_chains_and_circles_of_imports_are_found(tmp_path: Path) -> None:
    package = tmp_path / NAME
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
    assert source.circles == [{f"{NAME}.b", f"{NAME}.c"}]
    assert [len(link) for link in source.longest_chain] == [1, 1, 2, 1]
    words = [sys.executable, str(ROOT / "docs" / "make_architecture.py"), "--help"]
    assert "--tree" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


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
    there = {module: defined_in(module) for module in SOURCE.files}
    wrong = {name for name in files if not (PACKAGE / name).exists() and not (ROOT / name).exists()}
    wrong |= names - set().union(*there.values())
    for file, told in steps:
        wrong |= {
            f"{file}: {name}" for name in set(quoted(told)) - there.get(f"{NAME}.{file.replace('/', '.')}", set())
        }
    assert wrong == set()


def test_the_tests_that_a_page_names_exist_and_every_row_of_what_works_with_what_names_one() -> None:
    for name in ("works-with.md", "methods.md"):
        named = re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / "docs" / name).read_text())
        assert named
        for file, test in named:
            assert any(f"\ndef {test}(" in path.read_text() for path in (ROOT / "tests").rglob(file)), (file, test)
    rows = [line for line in (ROOT / "docs" / "works-with.md").read_text().splitlines() if line.startswith("| ")]
    heads = ("| what ", "| works ", "| refused ")
    assert [row for row in rows if not row.startswith(heads) and "::test_" not in row] == []


def test_public_names_appear_once_are_in_the_api_reference_and_have_docstrings() -> None:
    """What users can name, with the public members that the package defines; internals describe themselves."""
    names = lightning_sdiloco.__all__
    assert len(set(names)) == len(names)
    assert "StreamingDiLoCoStrategy" in names
    page = (ROOT / "docs" / "api.md").read_text()
    assert set(names) - {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", page, flags=re.M)} == set()
    found: dict[str, object] = {}
    for room in (lightning_sdiloco, lightning_sdiloco.compression):
        found |= {f"{room.__name__}.{name}": getattr(room, name) for name in room.__all__}
    for thing in list(found.values()):
        for base in getattr(thing, "__mro__", ()):
            # Methods that override Lightning's are described there.
            if base.__module__.startswith(f"{NAME}.") and room_of(base.__module__) not in (
                "lightning",
                architecture.FACE,
            ):
                members = [(name, member) for name, member in vars(base).items() if not name.startswith("_")]
                found |= {f"{base.__qualname__}.{name}": member for name, member in members}
    assert {"StreamingDiLoCo.step", "Compression.encode", f"{NAME}.FP4"} <= found.keys()
    described = (type, types.FunctionType, property, classmethod, staticmethod)
    assert [name for name, thing in found.items() if isinstance(thing, described) and not inspect.getdoc(thing)] == []
