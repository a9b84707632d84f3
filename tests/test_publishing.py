"""What is published says the same everywhere: versions of Python, pages, addresses, and one owner
of each number.
"""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_every_python_that_is_named_is_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", PROJECT)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["run"]["strategy"]["matrix"]["python"] == named
    assert f'requires-python = ">={named[0]}"' in PROJECT


def test_the_newest_torch_is_tested_beside_the_pinned_one() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["newest"]["steps"]]
    assert "make newest" in commands
    pinned = re.findall(
        r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    page = (ROOT / "docs" / "works-with.md").read_text()
    assert f"torch {pinned[0]}" in page, "the page says what is tried"
    assert f"torch {re.findall(r'torch>=([0-9.]+)', PROJECT)[0]}" in page


def test_every_package_that_developers_install_has_its_version_in_the_constraints() -> None:
    pinned = re.findall(
        r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text().lower(), flags=re.MULTILINE
    )
    (groups,) = re.findall(r"\[dependency-groups\]\n(.*?)\n\[tool", PROJECT, flags=re.DOTALL)
    (needed,) = re.findall(r"\ndependencies = \[\n(.*?)\n\]", PROJECT, flags=re.DOTALL)
    names = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', groups + needed))
    assert len(names) > 30
    assert {name.replace("_", "-") for name in names} - {
        name.replace("_", "-") for name in pinned
    } == set()


def test_a_release_refuses_every_address_that_is_still_to_be_given() -> None:
    (pattern,) = re.findall(r"--extended-regexp '(.*)'", RELEASE)
    assert re.search(pattern, RELEASE) is None  # or it would refuse itself
    for file in (
        "pyproject.toml",
        "CITATION.cff",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "README.md",
    ):
        text = (ROOT / file).read_text()
        assert re.findall(r"[\w-]+\.invalid", text) == re.findall(r"to-be-given\.invalid", text), (
            file
        )
        if "invalid" in text or "<this" in text:
            assert re.search(pattern, text), file


def test_llms_txt_names_every_page() -> None:
    text = (ROOT / "llms.txt").read_text()
    linked = re.findall(r"\]\((\S+?)\)", text)
    assert [path for path in linked if not (ROOT / path).exists()] == []
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    # Pages of the site that only include a file of the repository.
    pages -= {f"docs/{name}.md" for name in ("index", "changelog", "contributing")}
    assert pages - set(linked) == set()
