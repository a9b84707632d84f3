"""The blocks of the pages: commands print what is shown, Python names what there is, and the
quickstart runs.
"""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.scripts import ROOT, TORCHRUN, run_python
from tests.tools.command import told

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```', re.DOTALL | re.MULTILINE)
CHECKED = ("plan", "schedule")


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """The blocks of a language, each behind its title."""
    for indent, kind, title, text in BLOCK.findall(page.read_text()):
        if kind == language:
            yield title, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def shown(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """The commands after a $, each with the lines that stand below it."""
    for _, text in blocks(page, "console"):
        for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield shlex.split(command, comments=True), [line for line in lines if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_print_the_lines_that_the_page_shows(page: Path) -> None:
    for words, lines in shown(page):
        if words[0] == "sdiloco" and words[1] in CHECKED and lines and "--model" not in words:
            printed = [line.rstrip() for line in told(*words[1:]).splitlines()]
            assert [
                line for line in lines if line != "..." and line.rstrip() not in printed
            ] == [], words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_import_existing_names_and_give_accepted_arguments(page: Path) -> None:
    known: dict[str, object] = {}
    for _, text in blocks(page, "python"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                "lightning_sdiloco"
            ):
                if node.module == "lightning_sdiloco.ray":  # needs Ray
                    continue
                module = import_module(str(node.module))
                known |= {alias.name: getattr(module, alias.name) for alias in node.names}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in known
            ):
                taken = inspect.signature(known[node.func.id]).parameters  # type: ignore[arg-type]
                names = {word.arg for word in node.keywords} - {None}
                assert names <= taken.keys() or any(
                    one.kind is one.VAR_KEYWORD for one in taken.values()
                ), node.func.id


@pytest.mark.slow
def test_the_simulator_prints_the_tables_that_its_page_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The numbers are those of another machine and Python, so that all digits are alike here."""
    page = ROOT / "docs" / "simulate.md"
    commands = [words[2:] for words, _ in shown(page) if words[:2] == ["sdiloco", "simulate"]]
    one = next(words for words in commands if "--cli" in words)
    sweep = next(words[1:] for words in commands if "--sweep" in words)
    for name in ("sweep.svg", "sweep.json"):
        sweep[sweep.index(name)] = str(tmp_path / name)
    monkeypatch.chdir(ROOT / "examples")
    texts = [text for _, text in blocks(page, "text")]
    for text, words in zip(
        texts, (one, [*one, "--set", "trainer.max_steps=160", *sweep]), strict=True
    ):
        printed = told("simulate", *words)
        lines = [
            [re.sub(r"[\d.,]+", "0", line).split() for line in of.splitlines()]
            for of in (text, printed)
        ]
        assert lines[0] == lines[1]


@pytest.mark.slow
def test_the_files_of_the_quickstart_run(tmp_path: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    files = {
        title: text for kind in ("python", "yaml") for title, text in blocks(page, kind) if title
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    configurations = [name for name in files if name.endswith(".yaml")]
    assert configurations
    for config in configurations:
        run_python("main.py", "--config", config, folder=tmp_path)
    run_python("train.py", folder=tmp_path)
    run_python("simulate.py", folder=tmp_path)
    assert "fragment 1" in run_python(*TORCHRUN, "--nproc-per-node=2", "loop.py", folder=tmp_path)
