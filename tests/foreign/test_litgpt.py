"""litgpt's own pretraining, which never calls ``finish()``: what it saves has been trained."""

import re
from pathlib import Path

import pytest

from tests.foreign.test_accelerate import HERE, torchrun

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(300)]


def test_the_files_of_a_loop_that_never_finishes_are_as_good_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 steps, in which nothing launches: the last file held the initial model, whose loss is 5.5."""
    pytest.importorskip("litgpt")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # litgpt compiles the model, which is not asked about here
    lines = torchrun(2, HERE / "litgpt_loop.py", tmp_path, folder=tmp_path)
    said = [float(loss) for loss in re.findall(r"val loss:? (\d+\.\d+)", lines)]
    held = [float(loss) for loss in re.findall(r"holds (\d+\.\d+)", lines)[:2]]
    assert len(said) == len(held) == 2
    assert held == pytest.approx(said, rel=0.01)
