"""The checks of a CUDA device, where there is one; on a pretended device and a CPU, that all of
them run.

``make gpu`` does the same without pytest.
"""

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as script
from tests.gpu.checks import CHECKS
from tests.gpu.fits import FITS, STEP, waits_in
from tests.gpu.task import DEVICE, Found, NotHere, Outcome, Place, Task, do
from tests.pretend import IS_POSSIBLE
from tests.scripts import ROOT

TASKS = CHECKS | FITS


@cache
def device() -> Outcome:
    """Asked in a process of its own, and not before a test wants to know: see `tests.gpu.task`."""
    return do(DEVICE, Place("cuda", Path(os.devnull), quick=True), Path(os.devnull))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_on_a_cuda_device(name: str, tmp_path: Path) -> None:
    if device().status != "done":
        pytest.skip(f"needs a CUDA device: {device().reason}")
    place = Place("cuda", tmp_path, quick=False, seconds=190)
    outcome = do(TASKS[name], place, tmp_path / "log")
    if outcome.status == "not here":
        pytest.skip(outcome.reason)
    assert outcome.status == "done", outcome.trace or outcome.reason


# Without one

# A process that asks CUDA for anything makes a device useless for those that it forks. Other
# packages may import what they find; ours need nothing but torch and Lightning, apart from
# `tests.pretend`.
SCRIPT = """
import builtins, os, sys, torch

import_module = builtins.__import__
forking_process = os.getpid()
ours = ("benchmarks", "tests", "lightning_sdiloco", "gpt", "muon", "text_data")
missing = ("pytest", "hypothesis", "rich", "matplotlib", "jsonargparse", "grpc")

def import_without_missing(name, globals=None, *args, **more):
    importer = (globals or {}).get("__name__", "")
    is_ours = importer.split(".")[0] in ours and not importer.startswith("tests.pretend")
    if is_ours and name.split(".")[0] in missing:
        raise ModuleNotFoundError(name)
    return import_module(name, globals, *args, **more)

def refusing_in_forking_process(answer):
    def answering(*args):
        assert os.getpid() != forking_process, "CUDA was asked in the process that forks"
        return answer
    return answering

builtins.__import__ = import_without_missing
torch.cuda.is_available = refusing_in_forking_process(False)
torch.cuda.device_count = refusing_in_forking_process(0)
from benchmarks.gpu.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python")
def test_the_script_runs_on_a_pretended_device_with_torch_and_lightning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does nothing twice."""
    arguments = ["--quick", "--device", "pretend", "--out", str(tmp_path), "--minutes", "4"]
    # In a process that has computed no gradient yet, as on a command line.
    command = [sys.executable, "-c", SCRIPT, *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert ": kept" not in process.stderr
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*/*.json")}
    names = {"codecs", "waits", "bf16-mixed", "passes", "overhead_125M", "two_groups"}
    assert names <= results.keys()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {ended["status"] for ended in summary["ended"].values()} == {"done"}
    assert len(summary["headline"]) >= 12
    overhead = results["overhead_125M"]["found"]
    rows = {name: row for name, row in overhead.items() if isinstance(row, dict)}
    assert rows.keys() == {"offload=True", "DDP"}
    for row in rows.values():
        assert row["extra_bytes_a_parameter"] > 0

    def results_kept_on(device: str) -> int:
        """How many results it keeps when it runs again."""
        outcome = Outcome("done", 0.0, {"device": device})
        monkeypatch.setattr(script, "do", lambda *_: outcome)
        script.main([*arguments, "--only", "codecs"])
        return capsys.readouterr().err.count(": kept")

    assert results_kept_on("pretend") == 1
    assert results_kept_on("another") == 0


def test_without_time_everything_is_left_and_without_a_device_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0"]) == 0
    assert list(tmp_path.glob("*/*.json")) == []
    assert "The same command goes on" in capsys.readouterr().err
    if device().status != "done":
        assert script.main(["--out", str(tmp_path)]) == 1
        assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_groups_of_several_processes_are_timed_beside_ddp(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--only", "4 devices"]
    assert script.main(arguments) == 0
    headline = json.loads((tmp_path / "summary.json").read_text())["headline"]
    assert len(headline) == 2
    assert all(ratio > 0 for ratio in headline.values())


def test_on_too_few_devices_the_pieces_for_several_say_what_they_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place = Place("cuda", tmp_path, quick=True)
    for name, groups in (("2 devices", 2), ("4 devices", 2), ("8 devices", 4)):
        task = script.NUMBERS[name]
        layout = f"{groups} groups, devices of each: {task.ranks // groups}"
        with pytest.raises(NotHere, match=f"has 1 of {task.ranks} devices.*{layout} would be"):
            task.run(place, 0, task.ranks)


def test_checks_that_fail_hang_or_cannot_run_are_reported_and_spoil_no_others(
    tmp_path: Path,
) -> None:
    def failing(place: Place, rank: int, world_size: int) -> Found:
        raise AssertionError("something is wrong")

    def hanging(place: Place, rank: int, world_size: int) -> Found:
        time.sleep(60)
        return {}

    def wanting(place: Place, rank: int, world_size: int) -> Found:
        raise NotHere("there is none of these")

    place = Place("cpu", tmp_path, quick=True, seconds=1)
    for run, status, reason in (
        (failing, "failed", "AssertionError: something is wrong"),
        (hanging, "timed out", "not over within 1 s"),
        (wanting, "not here", "there is none of these"),
    ):
        outcome = do(Task("a trial", run), place, tmp_path / "log")
        assert outcome.status == status
        assert outcome.reason == reason


def test_a_wait_is_found_in_a_trace_by_the_thread_and_the_time_of_a_step() -> None:
    def event(name: str, category: str, thread: int, began: float, lasted: float) -> dict[str, Any]:
        return {"name": name, "cat": category, "pid": 1, "tid": thread, "ts": began, "dur": lasted}

    events = [
        event(STEP, "user_annotation", 7, 100, 50),
        event("cudaStreamSynchronize", "cuda_runtime", 7, 120, 5),
        event("cudaStreamSynchronize", "cuda_runtime", 8, 120, 5),  # the background
        event("cudaStreamSynchronize", "cuda_runtime", 7, 160, 5),  # between two steps
        event("cudaLaunchKernel", "cuda_runtime", 7, 130, 5),
    ]
    assert waits_in(events, [STEP]) == [
        {"call": "cudaStreamSynchronize", "range": STEP, "microseconds": 5}
    ]
