"""Published files agree: versions of Python, pages, addresses, and one owner of each number."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
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
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", CONSTRAINTS, flags=re.MULTILINE)
    (oldest,) = re.findall(r"torch>=([0-9.]+)", PROJECT)
    page = (ROOT / "docs" / "works-with.md").read_text()
    assert f"torch {pinned}" in page, "the page names the versions that are tried"
    assert f"torch {oldest}" in page


def test_every_package_that_developers_install_has_its_version_in_the_constraints() -> None:
    constraints = CONSTRAINTS.lower().replace("_", "-")
    pinned = re.findall(r"^([\w.-]+)==", constraints, flags=re.MULTILINE)
    (groups,) = re.findall(r"\[dependency-groups\]\n(.*?)\n\[tool", PROJECT, flags=re.DOTALL)
    (needed,) = re.findall(r"\ndependencies = \[\n(.*?)\n\]", PROJECT, flags=re.DOTALL)
    names = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', groups + needed))
    assert len(names) > 30
    assert {name.replace("_", "-") for name in names} - set(pinned) == set()


FILES_WITH_ADDRESSES = ("pyproject.toml", "CITATION.cff", "SECURITY.md")
FILES_WITH_ADDRESSES += ("CODE_OF_CONDUCT.md", "README.md", "hub/pyproject.toml", "hub/README.md")


def test_a_release_refuses_every_address_that_is_still_to_be_given() -> None:
    (pattern,) = re.findall(r"--extended-regexp '(.*)'", RELEASE)
    assert re.search(pattern, RELEASE) is None  # or it would refuse itself
    for file in FILES_WITH_ADDRESSES:
        text = (ROOT / file).read_text()
        assert set(re.findall(r"[\w-]+\.invalid", text)) <= {"to-be-given.invalid"}, file
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
