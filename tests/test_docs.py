"""The blocks of the pages: commands print the lines below them, names of Python exist, and the
quickstart runs.
"""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

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
    """The commands after a $, each with the lines below it."""
    for _, text in blocks(page, "console"):
        for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield shlex.split(command, comments=True), [line for line in lines if line.strip()]


def is_checked(words: list[str], lines: list[str]) -> bool:
    return words[0] == "sdiloco" and words[1] in CHECKED and lines != [] and "--model" not in words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_print_the_lines_that_the_page_shows(page: Path) -> None:
    for words, lines in shown(page):
        if is_checked(words, lines):
            printed = [line.rstrip() for line in told(*words[1:]).splitlines()]
            missing = [line for line in lines if line != "..." and line.rstrip() not in printed]
            assert missing == [], words


def imported_by(tree: ast.Module) -> dict[str, Any]:
    """The objects that a block imports from the package, by name."""
    objects = {}
    for node in ast.walk(tree):
        module_name = str(node.module) if isinstance(node, ast.ImportFrom) else ""
        is_ours = module_name.startswith("lightning_sdiloco")
        if is_ours and module_name != "lightning_sdiloco.ray":  # needs Ray
            module = import_module(module_name)
            objects.update({alias.name: getattr(module, alias.name) for alias in node.names})
    return objects


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_import_existing_names_and_give_accepted_arguments(page: Path) -> None:
    objects: dict[str, Any] = {}
    for _, text in blocks(page, "python"):
        tree = ast.parse(text)
        objects |= imported_by(tree)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in objects:
                name = ast.unparse(call.func)
                parameters = inspect.signature(objects[name]).parameters
                arguments = {keyword.arg for keyword in call.keywords} - {None}
                kinds = {parameter.kind for parameter in parameters.values()}
                takes_any = inspect.Parameter.VAR_KEYWORD in kinds
                assert takes_any or arguments <= parameters.keys(), name


@pytest.mark.slow
def test_the_simulator_prints_the_tables_that_its_page_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The numbers are those of another machine and Python, so that all digits are alike here."""
    page = ROOT / "docs" / "simulate.md"
    commands = [words[2:] for words, _ in shown(page) if words[:2] == ["sdiloco", "simulate"]]
    single_run = next(words for words in commands if "--cli" in words)
    sweep = next(words[1:] for words in commands if "--sweep" in words)
    for name in ("sweep.svg", "sweep.json"):
        sweep[sweep.index(name)] = str(tmp_path / name)
    monkeypatch.chdir(ROOT / "examples")
    single_text, sweep_text = (text for _, text in blocks(page, "text"))
    assert without_digits(single_text) == without_digits(told("simulate", *single_run))
    swept = told("simulate", *single_run, "--set", "trainer.max_steps=100", *sweep)
    assert without_digits(sweep_text) == without_digits(swept)


def without_digits(text: str) -> list[list[str]]:
    """The words of each line, in which every number is a zero."""
    return [re.sub(r"[\d.,]+", "0", line).split() for line in text.splitlines()]


@pytest.mark.slow
def test_the_files_of_the_quickstart_run(tmp_path: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    for title, text in [*blocks(page, "python"), *blocks(page, "yaml")]:
        if title:
            (tmp_path / title).write_text(text)
    configurations = list(tmp_path.glob("*.yaml"))
    assert configurations
    for configuration in configurations:
        run_python("main.py", "--config", configuration.name, folder=tmp_path)
    run_python("train.py", folder=tmp_path)
    run_python("simulate.py", folder=tmp_path)
    assert "fragment 1" in run_python(*TORCHRUN, "--nproc-per-node=2", "loop.py", folder=tmp_path)
