"""The notebook runs from its first cell to its last and keeps its promises; the routers of a mixture
of experts are measured rightly.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_processes
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


class Printed(str):
    """The printed text of the notebook."""

    def numbers(self, pattern: str) -> list[float]:
        """The groups of a pattern that occurs once."""
        (match,) = re.finditer(pattern, self)
        return [float(number) for number in match.groups()]

    def row(self, method: str) -> list[float]:
        """The first loss, the last loss, and the bytes of a method."""
        return self.numbers(rf"\n{method} +(\S+) +(\S+) +(\S+)\n")

    def seconds(self, method: str) -> float:
        (seconds,) = self.numbers(rf"{method}: .*; \d+ steps take (\d+) s on this link")
        return seconds


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_shows_the_promised_results(tmp_path: Path) -> None:
    for package in ("matplotlib", "nbconvert", "ipykernel"):
        pytest.importorskip(package)
    convert = ("-m", "nbconvert", "--to", "notebook", "--execute", NOTEBOOK)
    run_python(*convert, "--output-dir", tmp_path, folder=tmp_path, seconds=550)
    outputs = outputs_of(tmp_path / NOTEBOOK.name)
    texts = ["".join(output.get("text", ())) for output in outputs]
    check_printed_numbers(Printed("".join(texts)))
    check_pictures(outputs)


def check_printed_numbers(printed: Printed) -> None:
    (parameters,) = printed.numbers(r"(\d+),\d{3} parameters, [\d,]+ windows")
    assert parameters >= 100
    ddp_first, ddp_last, ddp_bytes = printed.row("DDP")
    first, last, sent_bytes = printed.row("Streaming DiLoCo")
    assert ddp_last < 0.95 * ddp_first
    assert last < 0.95 * first
    assert last < 1.15 * ddp_last
    assert ddp_bytes > 50 * sent_bytes
    (times_less,) = printed.numbers(r"Streaming DiLoCo sent 1/(\d+) of the bytes\.")
    assert times_less == pytest.approx(ddp_bytes / sent_bytes, rel=0.02)
    assert printed.seconds("DDP") > 3 * printed.seconds("Streaming DiLoCo")


def check_pictures(outputs: list[dict[str, Any]]) -> None:
    """Those of the schedule and of both losses; the planner's picture; and the report."""
    texts: dict[str, list[str]] = {"image/png": [], "image/svg+xml": [], "text/html": []}
    for output in outputs:
        for kind, text in output.get("data", {}).items():
            texts.setdefault(kind, []).append("".join(text))
    assert sum(len(text) > 10_000 for text in texts["image/png"]) == 2
    assert any("</svg>" in text for text in texts["image/svg+xml"])
    assert any("Streaming DiLoCo run" in text for text in texts["text/html"])


def test_distance_overlap_and_use_of_routers_have_known_answers() -> None:
    router = torch.randn(8, 4)
    chosen = torch.tensor([[0, 1], [2, 3]])
    assert moe.distance(router, router) == 0
    assert moe.distance(router, -router) == pytest.approx(2)
    assert moe.overlap(chosen, torch.tensor([[1, 0], [2, 3]])) == 1
    assert moe.overlap(chosen, torch.tensor([[1, 5], [4, 3]])) == 0.5
    assert moe.overlap(chosen, torch.tensor([[2, 3], [0, 1]])) == 0
    assert moe.use_of(torch.tensor([[0, 1], [0, 7]])).tolist() == [0.5, 0.25, 0, 0, 0, 0, 0, 0.25]


def routers_at_landings(rank: int, world_size: int, mixing: float) -> tuple[Any, str]:
    """The distances, overlaps and uses of routers by step and layer, and the lines that a rank
    prints about them.
    """
    settings = {"sync_every": 6, "overlap_steps": 1, "mixing": mixing, "fragments": [["*"]]}
    watch = moe.train(26, **settings)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        moe.tell(watch)
    return watch.seen, printed.getvalue()


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_landing_makes_routers_as_much_alike_as_mixing_says(mixing: float) -> None:
    """All parameters land together, so groups without mixing become the same model."""
    (seen, printed), (_, nothing) = run_processes(routers_at_landings, 2, mixing)
    assert list(seen) == [(step, layer) for step in (7, 13, 19, 25) for layer in range(moe.LAYERS)]
    for (apart, alike, use), (apart_after, alike_after, use_after) in seen.values():
        assert 0 < apart < 2
        assert apart_after == pytest.approx(mixing * apart, rel=0.2)
        assert 0.25 < alike < 1
        assert alike_after == 1 if mixing == 0 else alike_after > alike - 0.1
        assert float(use.sum()) == pytest.approx(float(use_after.sum())) == pytest.approx(1)
    assert len(re.findall(r"\d\.\d{3} -> \d\.\d{3}", printed)) == 2 * len(seen)
    assert nothing == "", "only the first rank tells"
