"""The demos: what they say and draw follows from the numbers of their runs; and once, all of that of a federation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sdiloco.lightning.monitor import LandingRecord, Rank, Run, Step

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import came_and_went  # noqa: E402
import demo  # noqa: E402
import slow_link  # noqa: E402

SHAPES = {f"net.blocks.{block}.matrix.weight": [100, 100] for block in range(3)} | {"net.head.weight": [256, 100]}


def test_the_demo_says_prints_and_saves_what_follows_from_its_runs_and_the_readme_the_same(tmp_path: Path) -> None:
    runs = json.loads((EXAMPLES.parent / "docs" / "images" / "demo.json").read_text())
    page, sent = " ".join((EXAMPLES.parent / "README.md").read_text().split()), runs["ddp"]["bytes_sent"]
    rows = [" | ".join([demo.SETTINGS[name], *demo.cells(run, sent)]) for name, run in runs.items()]
    assert [said for said in (*rows, *demo.sentences(runs["ddp"], runs["streaming_fp4"])) if said not in page] == []
    runs = {name: {**run, "shapes": SHAPES, "step_seconds": 0.01, "steps": 200} for name, run in runs.items()}
    for loss, run in zip((2.0, 2.2, 2.1), runs.values(), strict=True):
        run |= {"val_loss": loss, "val_losses": {"100": loss + 0.5, "200": loss}}
    demo.add_times(runs)
    ddp, diloco, ours = (run["link_seconds"]["200"] for run in runs.values())
    # In every step a ring all-reduce of float32 gradients, one message for each of two groups, and a round trip.
    assert ddp == pytest.approx(200 * (0.01 + 0.05 + 4 * 55_600 * 8 / 1e8), rel=1e-3)
    assert runs["ddp"]["link_seconds"]["100"] == pytest.approx(ddp / 2)
    # Nine exchanges that training waits for, and that at the end.
    assert diloco == pytest.approx(200 * 0.01 + 10 * (0.05 + 4 * 55_600 * 8 / 1e8), rel=0.1)
    # Training and the last exchange; what is in flight for five steps is there in time, but for a few milliseconds.
    assert 200 * 0.01 + 0.05 < ours < 200 * 0.01 + 0.5
    cost, saved = demo.sentences(runs["ddp"], runs["streaming_fp4"])
    assert "0.100 nats per byte above that of DDP: 5.0 % more loss, 10.5 % more perplexity" in cost
    assert "takes DDP 16 s and Streaming DiLoCo 2 s; computed" in saved
    pytest.importorskip("matplotlib")
    console = Console(record=True, width=200)
    demo.tell(runs, tmp_path / "out", console)
    assert "139,904 parameters" in " ".join(console.export_text().split())
    again = json.loads((tmp_path / "out" / "demo.json").read_text())
    for path in slow_link.draw(tmp_path, again, demo.SETTINGS):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


AT = {"founded": 100.0, "killed": 103.0, "started": 106.0, "back": 107.5, "ended": 110.0, "alone": 4}
SITES = ("site-a", "site-b", "site-c")


def site(number: int, *starts: list[float]) -> Run:
    """The record of a site that makes a step at each of some moments of its starts, and lands after each."""
    rank = Rank(0, {"site": SITES[number], "group": 0, "shard": 0})
    rank.starts += [(moments[0], 25 * start) for start, moments in enumerate(starts)]
    for step, at in [pair for start, moments in enumerate(starts) for pair in enumerate(moments, 25 * start + 1)]:
        rank.steps.append(Step(step, (at - 0.1, at), at))
        rank.losses.append((step, 100.0 / step))
        spans, counting = {"land": (at, at)}, SITES[:2] if AT["killed"] < at < AT["back"] else SITES
        rank.landings.append(
            LandingRecord(0, step, step, False, 1, 1, 1.0, [1.0], [0], [], [], spans, None, sites=counting)
        )
    return Run([rank])


def test_the_demo_of_a_federation_says_and_draws_what_the_records_say(tmp_path: Path) -> None:
    moments = [100 + 0.1 * number for number in range(1, 100)]
    # One step of site-b takes 0.3 s while site-c is away.
    late = [at for at in moments if not 104.05 < at < 104.25]
    away = [[at for at in moments if at < AT["killed"]], [at for at in moments if at > 107]]
    runs = {name: site(at, *own) for at, (name, own) in enumerate(zip(SITES, ([moments], [late], away), strict=True))}
    results = {name: {"val_loss": 2.0, "sha256": "5f"} for name in SITES}
    death, comeback = came_and_went.sentences(runs, results, AT, "site-c")
    assert "after 3 s, and the others trained on" in death
    assert death.endswith("4 rounds later, their slowest inner step took 300 ms, and before its death 100 ms.")
    assert "from inner step 25 of its own checkpoint, counted again 1.5 s after" in comeback
    assert comeback.endswith("all 3 sites ended with the same parameters, bit for bit, at 2.000 nats per byte.")
    results["site-b"]["sha256"] = "60"
    assert "DID NOT" in came_and_went.sentences(runs, results, AT, "site-c")[1]
    pytest.importorskip("matplotlib")
    paths = came_and_went.draw(tmp_path, runs, AT, "site-c")
    assert [(path.name, path.stat().st_size > 1000) for path in paths] == [
        ("federation.svg", True),
        ("federation-dark.svg", True),
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_site_is_killed_and_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    command = [sys.executable, str(EXAMPLES / "demo_federation.py"), "--seconds", "20", "--out", str(tmp_path / "out")]
    paths = os.pathsep.join([str(EXAMPLES.parent), *sys.path])
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": paths}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = " ".join(ended.stdout.split())
    assert "site-c was killed with -9" in said
    assert "all 3 sites ended with the same parameters, bit for bit" in said
    assert (tmp_path / "out" / "federation.svg").exists()
