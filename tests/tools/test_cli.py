"""The command line, in this process through ``main`` and as a command of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.tools.cli import COMMANDS
from tests.tools.command import not_refused_with, ran, refused, told

PAPER = """
step  launches  lands
 100  0         -
 105  -         0
 150  1         -
 155  -         1
 200  0         -
 205  -         0
"""


def test_schedule_prints_launches_and_landings() -> None:
    assert ran("schedule") == (Schedule(100, 5, 8).table() + "\n", "", 0)
    assert told("schedule", "--fragments", "2", "--last", "205") == PAPER[1:]
    dashes = told("schedule", "--sync-every=12", "--overlap-steps", "3", "--fragments", "4")
    underscores = told("schedule", "--sync_every", "12", "--overlap_steps=3", "--fragments=4")
    assert dashes == underscores == Schedule(12, 3, 4).table() + "\n"
    # Without a last step every fragment launches and lands twice.
    for first in (1, 7, 1_000):
        out = told("schedule", "--first", str(first), "--sync-every", "10", "--overlap-steps", "3")
        steps, launches, landings = zip(*(line.split() for line in out.splitlines()[1:]), strict=True)
        assert int(steps[0]) >= first
        assert all(min(launches.count(str(p)), landings.count(str(p))) >= 2 for p in range(8))


def test_bad_values_are_refused_those_of_the_settings_with_their_words() -> None:
    cases = [
        (["--fragments=0"], "fragments=0 is out of range: it must be at least 1"),
        (["--first=0"], "first=0 is out of range: it must be at least 1"),
        (["--first=9", "--last=8"], "last=8 is out of range: it must be at least 9"),
        (["--sync-every=1.5"], "sync_every"),
        (["--overlap-steps=none"], "overlap_steps"),
        (["--no-such-option=1"], "--no-such-option"),
        (["--layers-per-fragment=3"], "is part of fragments: give fragments='strided:3'"),
        (["--tau", "3"], "tau='3' is called overlap_steps here"),
    ]
    for sync_every, overlap_steps in ((0, 0), (-3, 0), (10, 10), (10, 11), (10, -1)):
        with pytest.raises(ValueError, match="out of range") as error:
            Settings(sync_every=sync_every, overlap_steps=overlap_steps)
        cases.append(([f"--sync-every={sync_every}", f"--overlap-steps={overlap_steps}"], str(error.value)))
    assert not_refused_with("schedule", cases) == {}
    assert "schedule" in refused()
    assert "schedule" in refused("no-such-command")


def test_every_option_has_help() -> None:
    for name, (_, functions) in COMMANDS.items():
        for function in functions:
            text = told(name, *([] if function == name else [function]), "--help")
            assert "--sync-every SYNC_EVERY, --sync_every SYNC_EVERY" in text or name != "schedule"
            # Without a description there are the type and the default, in brackets, alone.
            bare = re.findall(r" (--[a-z-]+(?: \S+)?) \((?:type|default|required)", " ".join(text.split()))
            assert bare == [], name


def test_the_current_folder_is_searched_last_and_for_class_paths_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, script = tmp_path / "folder", tmp_path / "bin" / "sdiloco"
    folder.mkdir()
    script.parent.mkdir()
    script.write_text("from lightning_sdiloco.tools.cli import main\nmain()\n")
    for module in ("grpc", "a"):
        (folder / f"{module}.py").write_text("print('it was run')")
    (folder / "own.py").write_text("import sys, torch\nprint(sys.path[-1] == '')\nNet = torch.nn.Linear\n")

    def installed(*args: str) -> subprocess.CompletedProcess[str]:
        # As it is installed: the folder of the script is on the path, and no current folder.
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, str(script), *args]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)

    assert "it was run" not in installed("status", "--hub", "a.example:1", "--run", "llm", "--insecure").stdout
    width = ("--model.in_features=10", "--model.out_features=10")
    planned = installed("plan", "--model", "own.Net", *width, "--step-time=0.1", "--bandwidth=1")
    assert planned.stdout.startswith("True\n100 parameters")

    # Files and values that hold no class path are refused where they are used.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "picture.yaml").write_bytes(b"\xff\xfe")
    assert "own" in refused("simulate", "--config", str(tmp_path / "picture.yaml"), "--model", "own" * 2000)
    assert "config" in refused("simulate", "--set", f"trainer.callbacks={'x' * 5000}", "--config=")
    assert "" not in sys.path
