"""The demos: what they say and draw follows from the numbers of their runs; and once, all of that of a federation."""

import json
import math
import os
import subprocess
import sys
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_sdiloco.lightning.monitor import read_run

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import came_and_went  # noqa: E402
import demo  # noqa: E402
import slow_link  # noqa: E402

STEPS = 200
SHAPES = {f"net.blocks.{block}.matrix.weight": [100, 100] for block in range(3)} | {"net.head.weight": [256, 100]}


def results(ours: float) -> dict[str, dict[str, Any]]:
    """What runs of a model of three blocks write down."""
    runs = {}
    for name, loss, bytes_sent, step_seconds in (
        ("ddp", 2.0, 44_480_000, 0.02),
        ("diloco", 2.2, 2_000_000, 0.011),
        ("streaming_fp4", ours, 300_000, 0.01),
    ):
        took = {"train_seconds": STEPS * step_seconds, "step_seconds": step_seconds}
        losses = {
            "val_loss": loss,
            "val_perplexity": math.exp(loss),
            "val_losses": {"100": loss + 0.5, str(STEPS): loss},
        }
        size = {"parameters": 55_600, "shapes": SHAPES, "tokens": STEPS * 1024, "passes": 0.25}
        runs[name] = {**took, **losses, **size, "steps": STEPS, "ranks": 2, "bytes_sent": bytes_sent}
    demo.add_times(runs)
    return runs


def test_the_demo_says_what_follows_from_its_runs() -> None:
    runs = results(2.1)
    ddp, diloco, ours = (run["link_seconds"][str(STEPS)] for run in runs.values())
    # In every step a ring all-reduce of float32 gradients, one message for each of two groups, and a round trip.
    assert ddp == pytest.approx(STEPS * (0.01 + 0.05 + 4 * 55_600 * 8 / 1e8), rel=1e-3)
    # Nine exchanges that training waits for, and that at the end.
    assert diloco == pytest.approx(STEPS * 0.01 + 10 * (0.05 + 4 * 55_600 * 8 / 1e8), rel=0.1)
    # Training and the last exchange; what is in flight for five steps is there in time, but for a few milliseconds.
    assert STEPS * 0.01 + 0.05 < ours < STEPS * 0.01 + 0.5
    assert runs["ddp"]["link_seconds"]["100"] == pytest.approx(ddp / 2)
    for own, says in (
        (runs, "0.100 nats per byte above that of DDP: 5.0 % more loss, 10.5 % more perplexity; one seed each."),
        (results(1.9), "0.100 nats per byte below that of DDP: 5.0 % less loss, 9.5 % less perplexity; one seed each."),
    ):
        cost, saved = demo.sentences(own["ddp"], own["streaming_fp4"])
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


AT = {"founded": 100.0, "killed": 103.0, "started": 106.0, "back": 107.5, "ended": 110.0, "alone": 4}
SITES = ("site-a", "site-b", "site-c")
SETTINGS = {"sync_every": 1, "overlap_steps": 0, "fragments": "strided:1", "mixing": 0.5}
LANDING = {"kind": "landing", "fragment": 0, "final": False, "bytes_sent": 1, "bytes_received": 1, "counted": [0]}
LANDING |= {"outer_grad_norm": 1.0, "group_norms": [1.0], "left_out": [], "outlying": [], "diagnostics": None}


def lines_of(site: str, moments: list[float], first: int = 1) -> list[dict[str, Any]]:
    """The record of one start of a site that makes a step at each of some moments, and lands after each."""
    about = {"rank": 0, "group": 0, "groups": 1, "shard": 0, "shards": 1, "host": "here", "site": site}
    lines = [{"kind": "start", **about, "settings": SETTINGS, "time": moments[0], "step": first - 1}]
    for step, at in enumerate(moments, first):
        counting = SITES[:2] if AT["killed"] < at < AT["back"] else SITES
        landed = {"launched_at": step, "landed_at": step, "spans": {"land": (at, at), "wait": (at, at)}}
        lines += [
            {"kind": "step", "step": step, "span": (at - 0.1, at), "done": at},
            {**LANDING, **landed, "sites": counting},
            {"kind": "loss", "step": step, "loss": 100.0 / step},
        ]
    return lines


def test_the_demo_of_a_federation_says_and_draws_what_the_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = [100 + 0.1 * number for number in range(1, 100)]
    # One step of site-b takes 0.3 s while site-c is away.
    late = [at for at in moments if not 104.05 < at < 104.25]
    lines = {"site-a": lines_of("site-a", moments), "site-b": lines_of("site-b", late)}
    lines["site-c"] = lines_of("site-c", [at for at in moments if at < AT["killed"]])
    lines["site-c"] += lines_of("site-c", [at for at in moments if at > 107], first=26)
    runs, results = {}, {}
    for site, own in lines.items():
        (tmp_path / site).mkdir()
        (tmp_path / site / "rank_00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
        runs[site] = read_run(tmp_path / site)
        results[site] = {"val_loss": 2.0, "sha256": "5f"}
    death, comeback = came_and_went.sentences(runs, results, AT, "site-c")
    assert "after 3 s, and the others trained on" in death
    assert death.endswith("4 rounds later, their slowest inner step took 300 ms, and before its death 100 ms.")
    assert "from inner step 25 of its own checkpoint, counted again 1.5 s after" in comeback
    assert comeback.endswith("all 3 sites ended with the same parameters, bit for bit, at 2.000 nats per byte.")
    results["site-b"]["sha256"] = "60"
    assert "DID NOT" in came_and_went.sentences(runs, results, AT, "site-c")[1]
    assert [len(came_and_went.training(runs[site].heads[0])) for site in ("site-a", "site-c")] == [1, 2]
    # Nothing is drawn from the last step before its death to the first after it.
    monkeypatch.setattr(came_and_went, "PAUSE", 0.5)
    moments, values = came_and_went.smooth(runs["site-c"].heads[0], 0.0)
    assert sum(map(isnan, values)) == 2
    assert not [at for at in moments if AT["killed"] < at < 107]
    pytest.importorskip("matplotlib")
    paths = came_and_went.draw(tmp_path, runs, AT, "site-c")
    assert [path.name for path in paths] == ["federation.svg", "federation-dark.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)


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
