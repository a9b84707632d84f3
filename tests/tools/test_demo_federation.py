"""The demo of a federation: what it says and draws follows from the records of its sites; and once, all of it."""

import json
import os
import subprocess
import sys
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.lightning import read_run

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import came_and_went  # noqa: E402

AT = {"founded": 100.0, "killed": 103.0, "started": 106.0, "back": 107.5, "ended": 110.0, "alone": 4}
SITES = ("site-a", "site-b", "site-c")


def lines_of(site: str, moments: list[float], first: int = 1) -> list[dict[str, Any]]:
    """The record of one start of a site that makes a step at each of some moments, and lands after each."""
    settings = {"sync_every": 1, "overlap_steps": 0, "fragments": "strided:1", "mixing": 0.5}
    about = {"rank": 0, "group": 0, "groups": 1, "shard": 0, "shards": 1, "host": "here", "site": site}
    landed = {"kind": "landing", "fragment": 0, "final": False, "bytes_sent": 1, "bytes_received": 1, "counted": [0]}
    landed |= {"outer_grad_norm": 1.0, "group_norms": [1.0], "left_out": [], "outlying": [], "diagnostics": None}
    lines: list[Any] = [{"kind": "start", **about, "settings": settings, "time": moments[0], "step": first - 1}]
    for step, at in enumerate(moments, first):
        sites = SITES[:2] if AT["killed"] < at < AT["back"] else SITES
        moment = {"launched_at": step, "landed_at": step, "spans": {"land": (at, at), "wait": (at, at)}}
        lines.append({"kind": "step", "step": step, "span": (at - 0.1, at), "done": at})
        lines.append({**landed, **moment, "sites": sites})
        lines.append({"kind": "loss", "step": step, "loss": 100.0 / step})
    return lines


def test_it_says_and_draws_what_the_records_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(came_and_went.training(runs["site-a"].heads[0])) == 1
    assert len(came_and_went.training(runs["site-c"].heads[0])) == 2
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
    root = str(EXAMPLES.parent)
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    said = " ".join(told.stdout.split())
    assert "site-c was killed with -9" in said
    assert "all 3 sites ended with the same parameters, bit for bit" in said
    assert (tmp_path / "out" / "federation.svg").exists()
