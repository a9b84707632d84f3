"""The command ``sdiloco simulate``: text, JSON and picture of one run and of a sweep, and what it refuses."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.algorithm.config import recommended
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.compression import resolve
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.tools.cli import main
from tests.tools.test_simulating import write

LINK = ["--bandwidth=0.001", "--round-trip=0.05", "--step-time=0.1"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    main(["simulate", *args])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *args])
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return " ".join(printed.err.split())


def told(capsys: pytest.CaptureFixture[str], folder: Path, *args: str) -> dict[str, Any]:
    text = run(capsys, f"--config={write(folder)}", f"--json={folder / 'told.json'}", *args)
    return {**json.loads((folder / "told.json").read_text()), "text": text}


def test_one_run_tells_losses_bytes_and_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, f"--config={write(tmp_path)}", "--groups=3", *LINK, "--absence=1:1-4000")
    assert "3 worker groups, 30 inner steps each, 74 parameters" in text
    chosen = recommended()
    assert f"overlap_steps=2, mixing={chosen.mixing}, compression='fp4', outer_lr={chosen.outer_lr}" in text
    assert f", outer_momentum={chosen.outer_momentum}" in text
    rows = [line.split() for line in text.splitlines() if line[:2].strip() in ("0", "1", "2")]
    assert len(rows) == 3
    assert "Outer model: loss " in text
    assert "val_loss" in text
    assert "Predicted on 1 Mbit/s in each direction, 50 ms round trip, 0.1 s per inner step:" in text
    assert "DDP over all groups" in text
    assert "longer than timeout: a real run would end with an ExchangeError" in " ".join(text.split())
    assert max(map(len, text.splitlines()[:-1])) <= 120


def test_the_json_has_all_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = told(capsys, tmp_path, *LINK, "--set=trainer.max_steps=12")
    (only,) = answer["runs"]
    assert [len(losses) for losses in only["losses"]] == [12, 12]
    assert only["inner_steps"] == [12, 12]
    # Two fragments were launched after 6, 9 and 12 inner steps, and once more at the end.
    launches = {"fp4": [0, 1, 0], "fp32": [0, 1]}
    payload = sum(
        resolve(code).wire_bytes(fragment_sizes()[fragment]) + CONTROL_BYTES
        for code, fragments in launches.items()
        for fragment in fragments
    )
    assert payload <= only["bytes_sent"][0] <= payload + 5 * 2 * 8 * 4, "and buffers of BatchNorm"
    prediction = only["prediction"]
    assert prediction["seconds"] > 12 * 0.1
    assert prediction["ddp_seconds"] > prediction["seconds"] * 0.5
    assert answer["circumstances"]["link"] == {"gbit_s": 0.001, "round_trip": 0.05, "loss": 0.0}


def fragment_sizes() -> list[int]:
    from lightning_sdiloco.algorithm.config import Settings
    from lightning_sdiloco.planning.workload import Model
    from tests.simulated import Net

    return list(Model.of_parameters(trainable(Net())).fragments(Settings(fragments="strided:1")))


def test_a_sweep_runs_every_combination_and_tells_them_in_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweeps = ["--sweep=groups=2,3", "--sweep=sync_every=5,10", "--sweep=compression=fp4"]
    file = write(tmp_path, max_steps=20)
    # In the first round a validation takes an exchange of its own.
    choices = ["--set=trainer.limit_val_batches=0", f"--json={tmp_path / 'told.json'}"]
    if find_spec("matplotlib") is not None:
        choices.append(f"--picture={tmp_path / 'sweep.png'}")
    text = run(capsys, f"--config={file}", *sweeps, *choices, *LINK)
    answer = json.loads((tmp_path / "told.json").read_text())
    assert [(one["groups"], one["choices"]["sync_every"]) for one in answer["runs"]] == [
        (2, 5),
        (2, 10),
        (3, 5),
        (3, 10),
    ]
    assert [one["settings"]["sync_every"] for one in answer["runs"]] == ["5", "10", "5", "10"]
    assert [len(one["losses"]) for one in answer["runs"]] == [2, 2, 3, 3]
    assert [line.split()[:3] for line in text.splitlines() if "fp4" in line] == [
        ["2", "5", "fp4"],
        ["2", "10", "fp4"],
        ["3", "5", "fp4"],
        ["3", "10", "fp4"],
    ]
    bytes_sent = [one["bytes_sent"][0] for one in answer["runs"]]
    assert bytes_sent[0] > bytes_sent[1]
    # Twice as many others, but with two shots each gets a part.
    assert bytes_sent[0] < bytes_sent[2] < 2 * bytes_sent[0]
    assert find_spec("matplotlib") is None or len((tmp_path / "sweep.png").read_bytes()) > 10_000


def test_speeds_and_absences_change_the_time_and_no_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (even,) = told(capsys, tmp_path, *LINK)["runs"]
    assert "redicted" not in told(capsys, tmp_path)["text"], "without a link"
    (uneven,) = told(capsys, tmp_path, *LINK, "--speeds=1,0.5", "--absence=0:1-3")["runs"]
    assert even["losses"] == uneven["losses"]
    # Half as fast; a part of the absence of the other falls into the time that it waits anyway.
    assert 3 < uneven["prediction"]["seconds"] - even["prediction"]["seconds"] < 3 + 1.5
    # Three seconds of training; of the two of absence, some may be a wait as well.
    rest = uneven["prediction"]["seconds"] - 3
    assert rest - 2 - 0.1 < uneven["prediction"]["waited"][0] < rest
    assert uneven["prediction"]["ddp_seconds"] > even["prediction"]["ddp_seconds"] + 3


def test_nobody_waits_for_a_group_whose_loader_is_paced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paced = ["--set=data.paced=true", *LINK, "--set=trainer.max_steps=60", "--set=trainer.max_epochs=-1"]
    (run_,) = told(capsys, tmp_path, *paced, "--speeds=1,0.5")["runs"]
    first, second = run_["losses"]
    # Until the first landing nobody knows; then the second group trains every other inner step.
    assert len(first) == 60
    assert 30 < len(second) < 38
    assert run_["prediction"]["seconds"] < 60 * 0.1 + 1.5


REFUSED = [
    ([], "--config must be given"),
    (["--config=missing.yaml"], "config='missing.yaml' is not a file"),
    (["FILE", "--groups=0"], "groups=0 is out of range"),
    (["FILE", "--sweep=width=1,2"], "varies 'width', which is unknown. Choose among groups, sync_every"),
    (["FILE", "--sweep=sync_every"], "has no values"),
    (["FILE", "--sweep=groups=1.5"], "not a whole number"),
    (["FILE", "--sweep=sync_every=5", "--sweep=sync_every=6"], "names something twice"),
    (["FILE", "--sweep=sync_every=10,2"], "overlap_steps=2 is out of range"),
    (["FILE", "--sweep=compression=fp4,fp5"], "compression='fp5'"),
    (["FILE", "--sweep=overlap_steps=2,auto"], "overlap_steps='auto' cannot be simulated"),
    (["FILE", "--round-trip=0.1"], "--round-trip tells how long a run takes on a link. Give its --bandwidth"),
    (["FILE", "--bandwidth=0"], "bandwidth=0.0 is out of range"),
    (["FILE", "--bandwidth=1", "--speeds=1,x"], "speeds has 'x' where a number should be"),
    (["FILE", "--bandwidth=1", "--absence=1"], "absence has '' where a number should be"),
    (["FILE", "--bandwidth=1", "--speeds=1"], "1 speeds for 2 worker groups"),
    (["FILE", "--picture=a.pdf"], "does not end with .svg or .png"),
    (["FILE", "--cli=no_such.CLI"], "cli='no_such.CLI' cannot be imported"),
    (["FILE", "--set=trainer.no_such=1"], "no_such"),
    (["FILE", "--set=trainer.strategy=ddp"], "cannot be simulated"),
    (["FILE", "--seeds=1", "--sweep=sync_every=2,3"], "a comparison takes 2 to 10"),
    (["FILE", "--seeds=1,1", "--sweep=sync_every=2,3"], "not different whole numbers"),
    (["FILE", "--seeds=1,2"], "Say with --sweep or --methods what varies"),
    (["FILE", "--seeds=1,2", "--sites=2", "--step-time=1"], "do not go with --sites"),
    (["FILE", "--sites=2"], "--sites needs --step-time"),
    (["FILE", "--sites=2", "--step-time=1", "--sweep=sync_every=5"], "do not go with --sites"),
    (["FILE", "--sites=2", "--step-time=1", "--delays=1"], "1 delays for 2 sites"),
    (["FILE", "--sites=1", "--step-time=1", "--absence=0:0-5"], "nobody founds the run"),
    (["FILE", "--delays=1,2"], "Give --sites too"),
    (["FILE", "--methods=- a"], "no YAML file that maps names"),
    (["FILE", "--methods=a: {rate: 3}"], "'rate', which is unknown"),
    (["FILE", "--methods=a: 3"], "no YAML file"),
]


def test_what_cannot_be_simulated_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr("lightning_sdiloco.tools.simulate.command.run", never)
    file, methods = write(tmp_path), tmp_path / "methods.yaml"
    for args, words in REFUSED:
        given = [arg.replace("FILE", f"--config={file}") for arg in args]
        for number, arg in enumerate(given):
            if arg.startswith("--methods="):
                methods.write_text(arg.partition("=")[2])
                given[number] = f"--methods={methods}"
        assert words in refused(capsys, *given), args


METHODS = """
as it is: {}
rarer: {schedule: {class_path: lightning_sdiloco.Selective, init_args: {threshold: 1.0e+9}}}
carry: {mixing: {class_path: lightning_sdiloco.Carry}, groups: 3}
"""


def test_methods_are_compared_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "methods.yaml").write_text(METHODS)
    methods, picture = f"--methods={tmp_path / 'methods.yaml'}", f"--picture={tmp_path / 'methods.svg'}"
    answer = told(capsys, tmp_path, methods, picture, *LINK)
    plain, rarer, carry = answer["runs"]
    waited = [one["prediction"]["waited"][0] for one in (plain, rarer)]
    assert waited[1] < waited[0], "what was not launched takes no time"
    assert [one["name"] for one in (plain, rarer, carry)] == ["as it is", "rarer", "carry"]
    assert rarer["bytes_sent"][0] < plain["bytes_sent"][0]
    assert (carry["groups"], carry["settings"]["mixing"]) == (3, "Carry()")
    assert "method" in answer["text"]
    assert "rarer" in answer["text"]


def test_seeds_compare_with_the_first_pair_by_pair(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep, picture = ["--sweep=compression=fp32,fp32", "--seeds=3,4"], f"--picture={tmp_path / 'seeds.svg'}"
    answer = told(capsys, tmp_path, *sweep, picture, "--set=trainer.max_steps=12", *LINK)
    runs = answer["runs"]
    assert [one["seed"] for one in runs] == [3, 4, 3, 4]
    assert runs[0]["losses"] == runs[2]["losses"] != runs[1]["losses"], "the seed alone decides"
    assert "loss above that of the first" in (tmp_path / "seeds.svg").read_text()
    assert "+0.0 ± 0.0" in answer["text"]
    assert "Means over 2 seeds" in answer["text"]
