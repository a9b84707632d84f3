"""The notebook runs from its first cell to its last and shows what it says; a mixture of experts
is watched rightly.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import ROOT, run_python

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "notebooks" / "from_ddp_to_streaming_diloco.ipynb"
sys.path.append(str(EXAMPLES))

import moe  # noqa: E402


def outputs_of(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def test_the_notebook_is_kept_without_outputs() -> None:
    assert outputs_of(NOTEBOOK) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_shows_the_promised_results(tmp_path: Path) -> None:
    for package in ("matplotlib", "nbconvert", "ipykernel"):
        pytest.importorskip(package)
    about = ("--to", "notebook", "--execute", NOTEBOOK, "--output-dir", tmp_path)
    run_python("-m", "nbconvert", *about, folder=tmp_path, seconds=550)
    outputs = outputs_of(tmp_path / NOTEBOOK.name)
    printed = "".join(text for output in outputs for text in output.get("text", ()))

    def numbers(pattern: str) -> list[float]:
        (found,) = re.findall(pattern, printed)
        return [float(number) for number in ([found] if isinstance(found, str) else found)]

    (parameters,) = numbers(r"(\d+),\d{3} parameters, [\d,]+ windows")
    assert parameters >= 100
    ddp, ours = (
        numbers(rf"\n{name} +(\S+) +(\S+) +(\S+)\n") for name in ("DDP", "Streaming DiLoCo")
    )
    for first, last, _ in (ddp, ours):
        assert last < 0.95 * first
    assert ours[1] < 1.15 * ddp[1]
    assert ddp[2] > 50 * ours[2]
    assert numbers(r"Streaming DiLoCo sent 1/(\d+) of the bytes\.") == [
        pytest.approx(ddp[2] / ours[2], rel=0.02)
    ]
    slow, fast = (
        numbers(rf"{name}: .*; \d+ steps take (\d+) s on this link")
        for name in ("DDP", "Streaming DiLoCo")
    )
    assert slow[0] > 3 * fast[0]
    shown = [
        (kind, "".join(data)) for output in outputs for kind, data in output.get("data", {}).items()
    ]
    assert sum(kind == "image/png" and len(data) > 10_000 for kind, data in shown) == 2, (
        "the schedule, and both losses"
    )
    assert any(kind == "image/svg+xml" and "</svg>" in data for kind, data in shown), (
        "the planner's picture"
    )
    assert any(kind == "text/html" and "Streaming DiLoCo run" in data for kind, data in shown), (
        "the report"
    )


def test_distance_overlap_and_use_of_routers_have_known_answers() -> None:
    router = torch.randn(8, 4)
    chosen = torch.tensor([[0, 1], [2, 3]])
    assert moe.distance(router, router) == 0
    assert moe.distance(router, -router) == pytest.approx(2)
    for other, share in (([[1, 0], [2, 3]], 1), ([[1, 5], [4, 3]], 0.5), ([[2, 3], [0, 1]], 0)):
        assert moe.overlap(chosen, torch.tensor(other)) == share
    assert moe.use_of(torch.tensor([[0, 1], [0, 7]])).tolist() == [0.5, 0.25, 0, 0, 0, 0, 0, 0.25]


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_landing_makes_routers_as_much_alike_as_mixing_says(
    mixing: float, tmp_path: Path
) -> None:
    """All parameters land together, so groups that keep nothing of their own are the same model."""
    settings = f"sync_every=6, overlap_steps=1, mixing={mixing}, fragments=[['*']]"
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys, torch\nsys.path.insert(0, {str(EXAMPLES)!r})\nimport moe\nwatch ="
        f" moe.train(26, {settings})\nmoe.rank_zero_only(torch.save)(watch.seen,"
        " 'seen.pt')\nmoe.tell(watch)\n"
    )
    printed = run_python(script, folder=tmp_path)
    seen = torch.load(tmp_path / "seen.pt")
    assert list(seen) == [(step, layer) for step in (7, 13, 19, 25) for layer in range(moe.LAYERS)]
    for (apart, alike, use), (apart_after, alike_after, use_after) in seen.values():
        assert 0 < apart < 2
        assert apart_after == pytest.approx(mixing * apart, rel=0.2)
        assert 0.25 < alike < 1
        assert alike_after == 1 if mixing == 0 else alike_after > alike - 0.1
        assert float(use.sum()) == pytest.approx(float(use_after.sum())) == pytest.approx(1)
    assert len(re.findall(r"\d\.\d{3} -> \d\.\d{3}", printed)) == 2 * len(seen)
