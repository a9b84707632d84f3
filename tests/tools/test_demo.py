"""The demo: what it says of loss and time follows from the numbers of its runs, and so does its picture."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import demo  # noqa: E402
import slow_link  # noqa: E402

STEPS = 200


def result(loss: float, bytes_sent: int, step_seconds: float) -> dict[str, Any]:
    """What a run of a model of three blocks writes down."""
    shapes = {f"net.blocks.{block}.matrix.weight": [100, 100] for block in range(3)} | {"net.head.weight": [256, 100]}
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(loss),
        "val_losses": {"100": loss + 0.5, str(STEPS): loss},
        "steps": STEPS,
        "ranks": 2,
        "tokens": STEPS * 1024,
        "passes": 0.25,
        "parameters": 55_600,
        "shapes": shapes,
        "bytes_sent": bytes_sent,
        "train_seconds": STEPS * step_seconds,
        "step_seconds": step_seconds,
    }


def results(ours: float) -> dict[str, dict[str, Any]]:
    runs = {
        "ddp": result(2.0, 44_480_000, 0.02),
        "diloco": result(2.2, 2_000_000, 0.011),
        "streaming_fp4": result(ours, 300_000, 0.01),
    }
    demo.add_times(runs)
    return runs


def test_the_times_are_those_of_the_link_and_of_a_step_without_an_exchange() -> None:
    runs = results(2.1)
    ddp, diloco, ours = (run["link_seconds"][str(STEPS)] for run in runs.values())
    # In every step a ring all-reduce of float32 gradients, one message for each of two groups, and a round trip.
    assert ddp == pytest.approx(STEPS * (0.01 + 0.05 + 4 * 55_600 * 8 / 1e8), rel=1e-3)
    # Nine exchanges that training waits for, and that at the end.
    assert diloco == pytest.approx(STEPS * 0.01 + 10 * (0.05 + 4 * 55_600 * 8 / 1e8), rel=0.1)
    # Training and the last exchange; what is in flight for five steps is there in time, but for a few milliseconds.
    assert STEPS * 0.01 + 0.05 < ours < STEPS * 0.01 + 0.5
    assert runs["ddp"]["link_seconds"]["100"] == pytest.approx(ddp / 2)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (2.1, "0.100 nats per byte above that of DDP: 5.0 % more loss, 10.5 % more perplexity; one seed each."),
        (1.9, "0.100 nats per byte below that of DDP: 5.0 % less loss, 9.5 % less perplexity; one seed each."),
    ],
)
def test_the_sentences_say_what_it_cost_and_what_it_saved(loss: float, says: str) -> None:
    runs = results(loss)
    cost, saved = demo.sentences(runs["ddp"], runs["streaming_fp4"])
    assert cost.endswith(says)
    assert "takes DDP 16 s and Streaming DiLoCo 2 s; computed" in saved
    assert saved.endswith("from the 10 ms that a step took here, not measured on a link.")


def test_numbers_and_pictures_are_saved_and_their_paths_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    console = Console(record=True, width=200)
    demo.tell(results(2.1), tmp_path / "out", console)
    printed = " ".join(console.export_text().split())
    for path in (tmp_path / "out" / name for name in ("demo.json", "demo.svg", "demo-dark.svg")):
        assert path.stat().st_size > 1000
        assert str(path) in printed
    assert "55,600 parameters" in printed
    assert "3.68 per parameter, 0.25 passes over the text" in printed
    again = json.loads((tmp_path / "out" / "demo.json").read_text())
    for path in slow_link.draw(tmp_path, again, demo.SETTINGS):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_the_readme_says_what_the_demo_said() -> None:
    runs = json.loads((EXAMPLES.parent / "docs" / "images" / "demo.json").read_text())
    page = " ".join((EXAMPLES.parent / "README.md").read_text().split())
    for setting, run in runs.items():
        row = [demo.SETTINGS[setting], *demo.cells(run, runs["ddp"]["bytes_sent"])]
        assert f"| {' | '.join(row)} |" in page
    for sentence in demo.sentences(runs["ddp"], runs["streaming_fp4"]):
        assert sentence in page
