"""The demos: what they say and draw follows from the numbers of their runs; that of a federation
is run, and read.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from lightning_sdiloco.tools import demo
from tests.scripts import ROOT, run_python

sys.path.insert(0, str(ROOT / "docs"))
import make_demo

SHAPES = {
    "net.blocks.0.matrix.weight": [100, 100],
    "net.blocks.1.matrix.weight": [100, 100],
    "net.blocks.2.matrix.weight": [100, 100],
    "net.head.weight": [256, 100],
}
STEPS = 200
STEP_SECONDS = 0.01


def recorded_runs() -> dict[str, dict[str, Any]]:
    """The runs whose numbers the README shows."""
    return dict(json.loads((ROOT / "docs" / "images" / "demo.json").read_text()))


def invented_runs() -> dict[str, dict[str, Any]]:
    """Runs with losses and times of known consequences."""
    runs = recorded_runs()
    for loss, run in zip((2.0, 2.2, 2.1), runs.values(), strict=True):
        run |= {"shapes": SHAPES, "step_seconds": STEP_SECONDS, "steps": STEPS}
        run |= {"val_loss": loss, "val_losses": {"100": loss + 0.5, "200": loss}}
    demo.add_times(runs)
    return runs


def test_the_readme_shows_the_results_of_the_demo() -> None:
    runs = recorded_runs()
    page = " ".join((ROOT / "README.md").read_text().split())
    bytes_of_ddp = runs["ddp"]["bytes_sent"]
    for name, run in runs.items():
        row = " | ".join([demo.SETTINGS[name], *demo.cells(run, bytes_of_ddp)])
        assert row in page
    for sentence in demo.sentences(runs["ddp"], runs["streaming_fp4"]):
        assert sentence in page


def test_the_picture_of_the_terminal_is_that_of_the_recorded_run() -> None:
    runs = recorded_runs()
    for file, picture in make_demo.pictures().items():
        assert file.read_text() == picture, "run python docs/make_demo.py, and look at the picture"
        assert len(picture) < 100_000
        text = " ".join(" ".join(ElementTree.fromstring(picture).itertext()).split())
        for run in runs.values():
            for cell in demo.cells(run, runs["ddp"]["bytes_sent"]):
                assert cell in text
        for sentence in demo.sentences(runs["ddp"], runs["streaming_fp4"]):
            assert sentence in text


def test_the_demo_computes_the_times_of_its_runs_on_a_link() -> None:
    runs = invented_runs()
    ddp, diloco, streaming = (run["link_seconds"]["200"] for run in runs.values())
    training = STEPS * STEP_SECONDS
    # Of all float32 gradients, in a ring of two groups, with a round trip.
    exchange = 0.05 + 4 * 55_600 * 8 / 1e8
    assert ddp == pytest.approx(training + STEPS * exchange, rel=1e-3)
    assert runs["ddp"]["link_seconds"]["100"] == pytest.approx(ddp / 2)
    # Nine exchanges that training waits for, and that at the end.
    assert diloco == pytest.approx(training + 10 * exchange, rel=0.1)
    # Training and the last exchange; a flight of five steps lands in time, but for a few
    # milliseconds.
    assert training + 0.05 < streaming < training + 0.5
    cost, saving = demo.sentences(runs["ddp"], runs["streaming_fp4"])
    assert (
        "0.100 nats per byte higher than with DDP (5.0 % higher loss and 10.5 % higher perplexity)"
        in cost
    )
    assert "takes 16 s with DDP and 2 s with Streaming DiLoCo." in saving
    no_cost, _ = demo.sentences(runs["streaming_fp4"], runs["ddp"])
    assert no_cost.startswith("Cost: none. After the same number of tokens")
    assert (
        "0.100 nats per byte lower than with DDP (4.8 % lower loss and 9.5 % lower perplexity)"
        in no_cost
    )


def test_the_demo_prints_saves_and_draws_the_results_of_its_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "out"
    folder.mkdir()
    console = Console(record=True, width=200)
    assert demo.tell(invented_runs(), folder, console).count(str(tmp_path)) == 3
    assert "139,904 parameters" in " ".join(console.export_text().split())
    saved_runs = json.loads((folder / "demo.json").read_text())
    for path in demo.draw(tmp_path, saved_runs):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_an_interrupted_demo_trains_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = recorded_runs()
    begun = []
    interrupted = {"diloco"}

    def train(setting: str, command: list[str], steps: int, console: Console) -> None:
        begun.append(setting)
        if setting in interrupted:
            raise KeyboardInterrupt
        run = runs[setting] | {"shapes": SHAPES, "steps": steps}
        Path(command[-1].removeprefix("--result=")).write_text(json.dumps(run))

    monkeypatch.setattr(demo, "train", train)
    folder = tmp_path / "out"
    with pytest.raises(SystemExit, match="were kept: ddp. To train the remaining settings, run"):
        demo.demo(steps=2186, out=str(folder))
    interrupted.clear()
    demo.demo(steps=2186, out=str(folder))
    assert begun == ["ddp", "diloco", "diloco", "streaming_fp4"]
    # Nothing of a demo that has ended is taken for a new one's.
    assert not (folder / "ddp.json").exists()
    assert (
        "pretrain_text.py fit" in json.loads((folder / "demo.json").read_text())["ddp"]["command"]
    )
    interrupted.add("ddp")
    with pytest.raises(SystemExit):
        demo.demo(steps=2186, out=str(folder))
    assert begun[-1] == "ddp"


@pytest.mark.timeout(60)
def test_an_interrupted_setting_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))"
    code += "; print('step 1', flush=True); time.sleep(50)"

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Progress, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.train("ddp", ["python", "-c", code], 1, Console())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_site_is_killed_and_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    script = ROOT / "examples" / "demo_federation.py"
    folder = tmp_path / "out"
    options = ("--seconds", "20", "--out", folder)
    printed = run_python(script, *options, folder=tmp_path, seconds=500, COLUMNS="200")
    text = " ".join(printed.split())
    for pattern in (
        r"site-c was killed with -9 after \d+ s, and the others trained on",
        r" \d+ rounds later, their slowest inner step took \d+ ms, and before its death \d+ ms\.",
        r"from inner step \d+ of its own checkpoint, counted again [\d.]+ s after",
        r"all 3 sites ended with the same parameters, bit for bit, at [\d.]+ nats per byte\.",
    ):
        assert re.search(pattern, text), text
    for name in ("federation.svg", "federation-dark.svg"):
        assert (folder / name).stat().st_size > 1000
