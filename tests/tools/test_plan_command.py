"""The command ``sdiloco plan``: what it prints, draws and refuses."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.algorithm.config import recommended
from lightning_sdiloco.planning.paper import table_4
from lightning_sdiloco.tools.cli import main

SIZE = ["--params=1e9", "--layers=24"]
ASKED = [*SIZE, "--step-time=0.1", "--bandwidth=1"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    main(["plan", *args])
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    answer = json.loads(run(capsys, *args, "--format=json"))
    assert isinstance(answer, dict)
    return answer


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *args])
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--bandwidth=2", "--round-trip=0.03", "--loss=0.001", "--groups=3", "--group-size=4", "--memory-rate=50"]
    settings = ["--sync-every=50", "--overlap-steps=2", "--fragments=strided:6", "--compression=bf16", "--steps=77"]
    answer = told(capsys, *SIZE, "--step-time=0.2", *link, *settings)
    assert answer["link"] == {"gbit_s": 2.0, "round_trip": 0.03, "loss": 0.001}
    assert (answer["groups"], answer["group_size"], answer["step_time"]) == (3, 4, 0.2)
    assert answer["memory_rate"] == 5e10
    assert answer["steps"] == 77
    assert answer["settings"] == {
        "sync_every": 50,
        "overlap_steps": 2,
        "fragments": "strided:6",
        "compression": "bf16",
        **recommended()._asdict(),
        "number_of_fragments": 4,
    }
    assert answer["methods"]["streaming_overlap"] == answer["compressions"]["bf16"]


def test_a_recommendation_says_what_to_set_and_what_memory_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = told(capsys, *ASKED)["recommendation"]
    assert chosen["utilisation"] >= chosen["utilisation_with_margin"] >= 0.95
    settings = ("sync_every", "overlap_steps", "fragments", "compression")
    again = told(capsys, *ASKED, *(f"--{name.replace('_', '-')}={chosen[name]}" for name in settings))
    assert again["methods"]["streaming_overlap"]["utilisation"] == chosen["utilisation"]
    assert again["memory"] == chosen["memory"]
    assert set(chosen["memory"]) == {"device_bytes", "host_bytes", "evaluation_bytes"}


def test_the_text_says_the_same_as_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    text, answer = run(capsys, *ASKED, "--round-trip=0.05"), told(capsys, *ASKED, "--round-trip=0.05")
    assert "1,000,000,000 parameters in 8 fragments, 2 groups of 1 rank\n10,000 inner steps of 0.1 s\n" in text
    assert "1 Gbit/s in each direction, 50 ms round trip, no loss" in text
    rows = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert f"{int(answer['methods']['diloco']['utilisation'] * 1000) / 10:g} %" in rows["DiLoCo"]
    assert "5.16 MB" in rows["... with overlap"]
    assert "never" in rows["DDP"]
    chosen = answer["recommendation"]
    assert f"Recommended:\n\n  sync_every={chosen['sync_every']}, overlap_steps={chosen['overlap_steps']}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert set(answer["methods"]) == {"ddp", "diloco", "streaming", "streaming_overlap"}
    assert answer["methods"]["streaming_overlap"] == answer["compressions"]["fp4"]
    # Where nothing suffices, that is said.
    assert "No settings reach 95 % on this link; closest" in run(capsys, *SIZE, "--step-time=0.01", "--bandwidth=0.1")


def test_table_4_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(run(capsys, "--paper-table-4", "--format", "json"))
    assert len(entries) == 75
    assert all(list(entry) == ["model", "method", "target", "gbit_s", "paper"] for entry in entries)
    assert sum(entry["gbit_s"] == entry["paper"] for entry in entries) == 73
    assert entries == [entry._asdict() for entry in table_4()]
    # As text, both numbers stand where they differ.
    text = run(capsys, "--paper-table-4")
    assert "1.4 (1.7)" in text
    assert "4.3 (5.2)" in text
    assert text.count("(") == 2
    assert "86.8  152.6  184.2      222.3  569.0" in text


# A model by its class path

MODULE = """
import lightning
import torch


class Net(lightning.LightningModule):
    def __init__(self, width: int, depth: int = 6):
        super().__init__()
        self.width, self.depth = width, depth

    def configure_model(self):
        self.layers = torch.nn.ModuleList(torch.nn.Linear(self.width, self.width) for _ in range(self.depth))


class Early(Net):
    def __init__(self, width: int):
        super().__init__(width)
        self.scale = torch.nn.Parameter(torch.ones(3))
        assert self.scale.detach().sum().item() == 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *model: str) -> dict[str, Any]:
    return told(capsys, *model, "--step-time=0.1", "--bandwidth=1", "--fragments=strided:2")


def test_a_module_in_the_current_folder_is_planned_without_memory(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    # 60 billion values.
    answer = planned(capsys, "--model=own_module.Net", "--model.width=100000")
    assert answer["parameters"] == 6 * (100_000**2 + 100_000)
    assert answer["settings"]["number_of_fragments"] == 3


def test_a_module_that_looks_at_its_values_is_made_in_memory(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert planned(capsys, "--model=own_module.Early", "--model.width=10")["parameters"] == 3 + 6 * 110


WIDTHS = ["--model.in_features=-1", "--model.out_features=3"]
REFUSED = [
    ([], "--params, --layers, --step-time, --bandwidth must be given"),
    ([*SIZE, "--step-time=0.1"], "--bandwidth must be given"),
    (["--params=1e9", "--step-time=0.1", "--bandwidth=1"], "--layers must be given"),
    ([*ASKED, "--params=10.5"], "params=10.5 is not a whole number"),
    ([*ASKED, "--params=.inf"], "params=inf is not a whole number"),
    ([*ASKED, "--layers=0"], "layers=0 is out of range"),
    ([*ASKED, "--groups=1"], "groups=1 is out of range"),
    ([*ASKED, "--step-time=0"], "step_time=0.0 is out of range"),
    ([*ASKED, "--bandwidth=-1"], "bandwidth=-1.0 is out of range"),
    ([*ASKED, "--round-trip=50"], "50 ms is 0.05"),
    ([*ASKED, "--loss=2"], "0.1 % is 0.001"),
    ([*ASKED, "--steps=0"], "steps=0 is out of range"),
    ([*ASKED, "--sync-every=4"], "overlap_steps=5 is out of range"),
    ([*ASKED, "--compression=fp5"], "'fp32', 'bf16', 'fp8'"),
    ([*ASKED, "--format=yaml"], "text"),
    ([*ASKED, "--picture=plan.pdf"], "does not end with .svg or .png"),
    ([*ASKED, "--model=torch.nn.Linear", *WIDTHS], "given together with"),
    (["--model=no_such.Thing", "--step-time=1", "--bandwidth=1"], "no_such"),
    (["--model=torch.nn.Flatten", "--step-time=1", "--bandwidth=1"], "no trainable parameters"),
    (
        ["--model=torch.nn.Linear", *WIDTHS, "--step-time=1", "--bandwidth=1"],
        "The model could not be made: RuntimeError",
    ),
    ([*ASKED, "--quorum=3"], "--quorum 3 is about the sites of a federation"),
    ([*ASKED, "--grace=3"], "--grace is about rounds that close by a quorum"),
    ([*ASKED, "--hub-bandwidth=1", "--quorum=0"], "quorum=0 is out of range"),
    ([*ASKED, "--hub-bandwidth=1", "--quorum=9"], "there are 2: none would ever close"),
    ([*ASKED, "--hub-bandwidth=1", "--quorum=1", "--delays=0,1,2"], "are no 2 numbers of seconds"),
    ([*ASKED, "--hub-bandwidth=1", "--quorum=1", "--grace=-1"], "grace=-1.0 is out of range"),
]


def test_what_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in REFUSED:
        assert words in " ".join(refused(capsys, *args).split()), args


# A hub


def test_a_hub_carries_a_payload_of_each_site_to_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--groups=4", "--compression=bf16", "--hub-bandwidth=0.5"]
    hub = json.loads(run(capsys, *asked, "--format=json"))["hub"]
    assert (hub["bytes_in"], hub["bytes_out"]) == (4 * 2 * 10**9, 4 * 3 * 2 * 10**9)
    # 24 GB at 0.5 Gbit/s are 384 s: in 100 steps of 0.1 s that is 38.4 times what there is, and 500 do not suffice.
    assert hub["share"] == pytest.approx(38.4)
    assert hub["enough"] is None
    # 1.03 GB at 10 Gbit/s are 0.825 s, which is less than 0.8 of 30 steps.
    text = run(capsys, *ASKED, "--hub-bandwidth=10")
    assert "1.03 GB in and 1.03 GB out" in text
    assert "Enough: sync_every=30, overlap_steps=" in text
    assert "hub_bandwidth=0.0 is out of range" in refused(capsys, *ASKED, "--hub-bandwidth=0")


def test_a_quorum_says_whom_a_round_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--groups=4", "--compression=bf16", "--hub-bandwidth=1"]
    told = json.loads(run(capsys, *asked, "--quorum=4", "--format=json"))
    # Where nobody is late it is the flight through the hub, however many are needed.
    assert told["waits"]["usual"] == told["waits"]["all"] == told["waits"]["longest"]
    assert told["waits"]["usual"]["seconds"] == pytest.approx(told["hub"]["flight_seconds"])
    late = [*asked, "--delays=0,0,0,60", "--grace=5"]
    grace = json.loads(run(capsys, *late, "--quorum=3", "--format=json"))["waits"]
    first, *_, last = grace["arrives"].values()
    assert (last - first, grace["usual"]["closes"] - first) == (pytest.approx(60), pytest.approx(5))
    assert grace["usual"]["counted"] == ["site 0", "site 1", "site 2"]
    assert grace["all"]["closes"] == last
    # With all four a round can only wait.
    assert json.loads(run(capsys, *late, "--quorum=4", "--format=json"))["waits"]["usual"] == grace["all"]
    dynamic = json.loads(run(capsys, *late, "--quorum=DynamicBackup", "--quorum.least=0.5", "--format=json"))["waits"]
    # It waits for nobody who is late, but for its grace in every eighth round.
    assert (dynamic["usual"]["closes"], dynamic["longest"]) == (pytest.approx(first), grace["usual"])
    assert "site 3" in (text := run(capsys, *late, "--quorum=3"))
    assert text.count("late") == 2


# The picture


def test_the_same_plan_draws_the_same_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix, args in (("svg", ASKED), ("png", ["--paper-table-4"])):
        files = [tmp_path / f"{name}.{suffix}" for name in ("one", "other")]
        printed = [run(capsys, *args, f"--picture={file}") for file in files]
        assert printed[0] == printed[1]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert len(files[0].read_bytes()) > 10_000
    assert "cannot be written" in refused(capsys, *ASKED, f"--picture={tmp_path / 'missing' / 'plan.svg'}")


def test_a_missing_matplotlib_is_told_and_needed_for_a_picture_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install matplotlib" in refused(capsys, *ASKED, f"--picture={tmp_path / 'plan.svg'}")
    assert "Recommended" in run(capsys, *ASKED)


def test_links_of_the_groups_tell_what_suitable_parts_bring(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = [word for word in ASKED if not word.startswith("--bandwidth")]
    given = tmp_path / "links.yaml"
    given.write_text("{paris: 1, milan: 1, rome: 1, lisbon: 0.5}")
    told = json.loads(run(capsys, *asked, f"--links={given}", "--format=json"))
    assert told["groups"] == 4
    assert told["link"]["gbit_s"] == 0.5
    assert told["links"]["equal_seconds"] / told["links"]["round_seconds"] == pytest.approx(1.5, rel=1e-3)
    assert told["links"]["shares"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    text = run(capsys, *asked, f"--links={given}")
    assert "exchange=TwoShot('by_bandwidth', links=[1, 1, 1, 0.5])" in text
    assert "1.50 times as long" in text
    assert "Leave one of them out" in refused(capsys, *asked, "--bandwidth=1", f"--links={given}")
    given.write_text("fast")
    assert "a list of at least two numbers" in refused(capsys, *asked, f"--links={given}")
