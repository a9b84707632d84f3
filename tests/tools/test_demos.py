"""The demos: what they say and draw follows from the numbers of their runs; that of a federation
is run, and read.
"""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sdiloco.tools import demo
from tests.scripts import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = {f"net.blocks.{block}.matrix.weight": [100, 100] for block in range(3)} | {
    "net.head.weight": [256, 100]
}


def test_the_demo_prints_and_saves_the_results_of_its_runs_as_the_readme_shows_them(
    tmp_path: Path,
) -> None:
    runs = json.loads((EXAMPLES.parent / "docs" / "images" / "demo.json").read_text())
    page = " ".join((EXAMPLES.parent / "README.md").read_text().split())
    sent = runs["ddp"]["bytes_sent"]
    rows = [" | ".join([demo.SETTINGS[name], *demo.cells(run, sent)]) for name, run in runs.items()]
    assert [
        said
        for said in (*rows, *demo.sentences(runs["ddp"], runs["streaming_fp4"]))
        if said not in page
    ] == []
    runs = {
        name: {**run, "shapes": SHAPES, "step_seconds": 0.01, "steps": 200}
        for name, run in runs.items()
    }
    for loss, run in zip((2.0, 2.2, 2.1), runs.values(), strict=True):
        run |= {"val_loss": loss, "val_losses": {"100": loss + 0.5, "200": loss}}
    demo.add_times(runs)
    ddp, diloco, ours = (run["link_seconds"]["200"] for run in runs.values())
    # In every step a ring all-reduce of float32 gradients, one message for each of two groups, and
    # a round trip.
    assert ddp == pytest.approx(200 * (0.01 + 0.05 + 4 * 55_600 * 8 / 1e8), rel=1e-3)
    assert runs["ddp"]["link_seconds"]["100"] == pytest.approx(ddp / 2)
    # Nine exchanges that training waits for, and that at the end.
    assert diloco == pytest.approx(200 * 0.01 + 10 * (0.05 + 4 * 55_600 * 8 / 1e8), rel=0.1)
    # Training and the last exchange; what is in flight for five steps is there in time, but for a
    # few milliseconds.
    assert 200 * 0.01 + 0.05 < ours < 200 * 0.01 + 0.5
    cost, saved = demo.sentences(runs["ddp"], runs["streaming_fp4"])
    assert "0.100 nats per byte above that of DDP: 5.0 % more loss, 10.5 % more perplexity" in cost
    assert "takes DDP 16 s and Streaming DiLoCo 2 s; computed" in saved
    pytest.importorskip("matplotlib")
    console = Console(record=True, width=200)
    assert demo.tell(runs, tmp_path / "out", console).count(str(tmp_path)) == 3
    assert "139,904 parameters" in " ".join(console.export_text().split())
    again = json.loads((tmp_path / "out" / "demo.json").read_text())
    for path in demo.draw(tmp_path, again):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_site_is_killed_and_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    words = (EXAMPLES / "demo_federation.py", "--seconds", "20", "--out", tmp_path / "out")
    said = " ".join(run_python(*words, folder=tmp_path, seconds=500, COLUMNS="200").split())
    for told in (
        r"site-c was killed with -9 after \d+ s, and the others trained on",
        r" \d+ rounds later, their slowest inner step took \d+ ms, and before its death \d+ ms\.",
        r"from inner step \d+ of its own checkpoint, counted again [\d.]+ s after",
        r"all 3 sites ended with the same parameters, bit for bit, at [\d.]+ nats per byte\.",
    ):
        assert re.search(told, said), said
    assert all(
        (tmp_path / "out" / f"federation{theme}.svg").stat().st_size > 1000
        for theme in ("", "-dark")
    )
