"""The examples of the methods: each runs, is short, and is named in the docs."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "methods"
SHARED = ("side_by_side.py", "local_momentum.py")
"""What several examples import."""
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in SHARED)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER.parent), *sys.path])
    import side_by_side

    whole = side_by_side.train
    monkeypatch.setattr(side_by_side, "train", lambda groups, steps, *how: whole(groups, min(steps, 45), *how))
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_short_and_in_the_docs(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    assert f"examples/methods/{path.name}" in (FOLDER.parents[1] / "docs" / "methods.md").read_text()
