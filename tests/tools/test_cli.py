"""The command line, in this process through ``main`` and once as a command of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.tools.cli import COMMANDS, main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    main(list(args))
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_schedule_prints_the_table_of_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "schedule") == Schedule(100, 5, 8).table() + "\n"


def test_schedule_prints_the_example_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "schedule", "--fragments", "2", "--last", "205").splitlines()
    assert [line.split() for line in lines] == [
        ["step", "launches", "lands"],
        ["100", "0", "-"],
        ["105", "-", "0"],
        ["150", "1", "-"],
        ["155", "-", "1"],
        ["200", "0", "-"],
        ["205", "-", "0"],
    ]


def test_options_may_be_spelled_with_dashes_or_as_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    dashes = run(capsys, "schedule", "--sync-every=12", "--overlap-steps", "3", "--fragments", "4")
    underscores = run(capsys, "schedule", "--sync_every", "12", "--overlap_steps=3", "--fragments=4")
    assert dashes == underscores == Schedule(12, 3, 4).table() + "\n"


def test_schedule_starts_at_first_and_ends_with_last(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "schedule", "--first", "1000", "--last", "1105", "--fragments", "1").splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == [1000, 1005, 1100, 1105]


def test_without_last_every_fragment_launches_and_lands_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for first in (1, 7, 1_000):
        out = run(capsys, "schedule", "--first", str(first), "--sync-every", "10", "--overlap-steps", "3")
        _, launches, landings = zip(*(line.split() for line in out.splitlines()[1:]), strict=True)
        for fragment in map(str, range(8)):
            assert launches.count(fragment) >= 2
            assert landings.count(fragment) >= 2


def test_bad_values_are_refused_those_of_the_settings_with_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    for sync_every, overlap_steps in ((0, 0), (-3, 0), (10, 10), (10, 11), (10, -1)):
        with pytest.raises(ValueError, match="out of range") as error:
            Settings(sync_every=sync_every, overlap_steps=overlap_steps)
        told = refused(capsys, "schedule", f"--sync-every={sync_every}", f"--overlap-steps={overlap_steps}")
        assert str(error.value) in told
    for args, message in (
        (["--fragments=0"], "fragments=0 is out of range: it must be at least 1"),
        (["--first=0"], "first=0 is out of range: it must be at least 1"),
        (["--first=9", "--last=8"], "last=8 is out of range: it must be at least 9"),
        (["--sync-every=1.5"], "sync_every"),
        (["--overlap-steps=none"], "overlap_steps"),
        (["--no-such-option=1"], "--no-such-option"),
    ):
        assert message in refused(capsys, "schedule", *args), args


@pytest.mark.parametrize("args", [[], ["no-such-command"]])
def test_without_a_known_subcommand_the_known_ones_are_named(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert "schedule" in refused(capsys, *args)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for function in COMMANDS[name][1]:
        with pytest.raises(SystemExit) as exit_:
            main([name, *([] if function == name else [function]), "--help"])
        text = capsys.readouterr().out
        assert exit_.value.code == 0
        assert "--sync-every SYNC_EVERY, --sync_every SYNC_EVERY" in text or name != "schedule"
        # Without a description there are the type and the default, in brackets, alone.
        bare = re.sub(r"\s+", " ", text)
        assert re.findall(r" (--[a-z-]+(?: \S+)?) \((?:type|default|required)", bare) == []


def test_as_a_command_of_its_own() -> None:
    command = [sys.executable, "-m", "lightning_sdiloco.tools.cli", "schedule"]
    good = subprocess.run([*command, "--fragments=2"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, Schedule(100, 5, 2).table() + "\n")
    bad = subprocess.run([*command, "--sync-every=0"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "sync_every=0 is out of range" in bad.stderr
    assert "Traceback" not in bad.stderr


def in_folder(folder: Path, *args: str) -> str:
    """Runs a command as it is installed: the folder of its script is on the path, and no current folder."""
    script = folder.parent / "bin" / "sdiloco"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from lightning_sdiloco.tools.cli import main\nmain()\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100).stdout


def test_what_lies_in_the_current_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for module in ("grpc", "a"):
        (folder / f"{module}.py").write_text("print('it was run')")
    told = in_folder(folder, "status", "--hub", "a.example:1", "--run", "llm", "--insecure")
    assert "it was run" not in told


def test_a_class_path_may_name_a_module_in_the_current_folder_which_is_searched_last(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.py").write_text("import sys, torch\nprint(sys.path[-1] == '')\nNet = torch.nn.Linear\n")
    width = ("--model.in_features=10", "--model.out_features=10")
    told = in_folder(folder, "plan", "--model", "own.Net", *width, "--step-time=0.1", "--bandwidth=1")
    assert told.startswith("True\n100 parameters")


def test_files_and_values_that_hold_no_class_path_are_refused_where_they_are_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "picture.yaml").write_bytes(b"\xff\xfe")
    assert "own" in refused(capsys, "simulate", "--config", str(tmp_path / "picture.yaml"), "--model", "own" * 2000)
    assert "config" in refused(capsys, "simulate", "--set", f"trainer.callbacks={'x' * 5000}", "--config=")
    assert "" not in sys.path
