"""What a CUDA device must show, where there is one; on a pretended device and a CPU, that all of it
runs.

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

from benchmarks.gpu import __main__ as script
from tests.gpu.checks import CHECKS
from tests.gpu.fits import FITS, STEP, waits_in
from tests.gpu.task import DEVICE, Found, NotHere, Outcome, Place, Task, do
from tests.pretend import IS_POSSIBLE

EVERY = CHECKS | FITS
ROOT = Path(__file__).parent.parent.parent


@cache
def device() -> Outcome:
    """Asked in a process of its own, and not before a test wants to know: see `tests.gpu.task`."""
    return do(DEVICE, Place("cuda", Path(os.devnull), quick=True), Path(os.devnull))


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_on_a_cuda_device(name: str, tmp_path: Path) -> None:
    if device().status != "done":
        pytest.skip(f"needs a CUDA device: {device().reason}")
    outcome = do(EVERY[name], Place("cuda", tmp_path, quick=False, seconds=190), tmp_path / "log")
    if outcome.status == "not here":
        pytest.skip(outcome.reason)
    assert outcome.status == "done", outcome.trace or outcome.reason


# Without one

# Whoever asks CUDA for anything in the process that forks makes a device useless for those that it
# forks. Others may import what they find, we nothing but torch and Lightning, apart from what
# pretends to be a device.
SCRIPT = """
import builtins, os, sys, torch

find, own = builtins.__import__, os.getpid()
ours = ("benchmarks", "tests", "lightning_sdiloco", "gpt", "muon", "text_data")
missing = ("pytest", "hypothesis", "rich", "matplotlib", "jsonargparse", "grpc")

def found(name, globals=None, *args, **more):
    by = (globals or {}).get("__name__", "")
    if by.split(".")[0] in ours and name.split(".")[0] in missing and not by.startswith("tests.pretend"):
        raise ModuleNotFoundError(name)
    return find(name, globals, *args, **more)

def asked(answer):
    def asking(*args):
        assert os.getpid() != own, "CUDA was asked in the process that forks"
        return answer
    return asking

builtins.__import__ = found
torch.cuda.is_available, torch.cuda.device_count = asked(False), asked(0)
from benchmarks.gpu.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python")
def test_the_script_runs_on_a_pretended_device_with_torch_and_lightning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does nothing twice."""
    arguments = ["--quick", "--device", "pretend", "--out", str(tmp_path), "--minutes", "4"]
    # Where nobody has computed a gradient yet, as on a command line.
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ": kept" not in done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*/*.json")}
    assert {
        "codecs",
        "waits",
        "bf16-mixed",
        "passes",
        "overhead_125M",
        "two_groups",
    } <= found.keys()
    ended = json.loads((tmp_path / "summary.json").read_text())
    assert {each["status"] for each in ended["ended"].values()} == {"done"}
    assert len(ended["headline"]) >= 12
    rows = {
        name: row for name, row in found["overhead_125M"]["found"].items() if isinstance(row, dict)
    }
    assert rows.keys() == {"offload=True", "DDP"}
    assert all(row["extra_bytes_a_parameter"] > 0 for row in rows.values())
    # Another device is another result.
    for device, kept in (("pretend", 1), ("another", 0)):
        monkeypatch.setattr(
            script, "do", lambda *_, device=device: Outcome("done", 0.0, {"device": device})
        )
        script.main([*arguments, "--only", "codecs"])
        assert capsys.readouterr().err.count(": kept") == kept


def test_without_time_everything_is_left_and_without_a_device_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0"]) == 0
    assert list(tmp_path.glob("*/*.json")) == []
    assert "The same command goes on" in capsys.readouterr().err
    if device().status != "done":
        assert script.main(["--out", str(tmp_path)]) == 1
        assert "sees no CUDA device" in capsys.readouterr().err


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

    for run, status, reason in (
        (failing, "failed", "AssertionError: something is wrong"),
        (hanging, "timed out", "not over within 1 s"),
        (wanting, "not here", "there is none of these"),
    ):
        outcome = do(
            Task("a trial", run), Place("cpu", tmp_path, quick=True, seconds=1), tmp_path / "log"
        )
        assert (outcome.status, outcome.reason) == (status, reason)


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
