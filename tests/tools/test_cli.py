"""The command ``sdiloco``, its options, ``schedule`` and ``plan``: what they print, draw and
refuse.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_sdiloco.algorithm.config import Settings, recommended
from lightning_sdiloco.algorithm.schedule import DenseBeginning, Schedule
from lightning_sdiloco.planning.paper import table_4
from lightning_sdiloco.tools import cli
from lightning_sdiloco.tools.cli import COMMANDS
from tests.ranks import PATIENCE
from tests.tools import command
from tests.tools.command import not_refused_with, ran, refused


def test_schedule_prints_launches_and_landings() -> None:
    assert ran("schedule") == (Schedule(100, 5, 8).table() + "\n", "", 0)
    dashes = command.told("schedule", "--sync-every=12", "--overlap-steps", "3", "--fragments", "4")
    underscores = command.told(
        "schedule", "--sync_every", "12", "--overlap_steps=3", "--fragments=4"
    )
    assert dashes == underscores == Schedule(12, 3, 4).table() + "\n"
    assert (
        command.told("schedule", "--first", "7", "--last=140")
        == Schedule(100, 5, 8).table(7, 140) + "\n"
    )
    # A default gives way to what is given.
    assert (
        command.told("schedule", "--sync-every=4", "--fragments=2")
        == Schedule(4, 3, 2).table() + "\n"
    )
    assert (
        command.told("schedule", "--sync-every=1", "--fragments=1")
        == Schedule(1, 0, 1).table() + "\n"
    )
    dense = Schedule(20, 5, 4, DenseBeginning(3, 6)).table() + "\n"
    options = ("--sync-every=20", "--fragments=4", "--dense-rounds=3", "--dense-sync-every=6")
    assert command.told("schedule", *options) == dense
    # Without a last step every fragment launches and lands twice.
    steps, *columns = zip(
        *(line.split() for line in ran("schedule", "--first=1000").out.splitlines()[1:]),
        strict=True,
    )
    assert int(steps[0]) >= 1000
    assert min(column.count(str(p)) for column in columns for p in range(8)) >= 2


def test_bad_values_are_refused_those_of_the_settings_with_their_words() -> None:
    cases = [
        (["--first=0"], "first=0 is out of range: it must be at least 1"),
        (["--first=9", "--last=8"], "last=8 is out of range: it must be at least 9"),
        (
            ["--overlap-steps=none"],
            "--overlap-steps none: not a whole number. It takes: Inner steps from the launch",
        ),
        (["--no-such-option=1"], "--no-such-option"),
        (["--layers-per-fragment=3"], "is part of fragments: give fragments='strided:3'"),
        (["--tau", "3"], "tau='3' is called overlap_steps here"),
    ]
    for sync_every, overlap_steps in ((0, 0), (10, 10), (10, -1)):
        with pytest.raises(ValueError, match="out of range") as error:
            Settings(sync_every=sync_every, overlap_steps=overlap_steps)
        cases.append(
            ([f"--sync-every={sync_every}", f"--overlap-steps={overlap_steps}"], str(error.value))
        )
    assert not_refused_with("schedule", cases) == {}
    assert "plan" in refused()
    assert "schedule" in refused("no-such-command")


def test_numbers_may_have_units_and_typos_get_a_suggestion_in_three_lines() -> None:
    plain = (
        "--params=1e9",
        "--layers=24",
        "--step-time",
        "0.1",
        "--bandwidth=0.1Gbit",
        "--round-trip",
        "0.05",
    )
    people = (
        "--params",
        "1B",
        "--layers=24",
        "--step_time=100ms",
        "--bandwidth=100Mbit/s",
        "--round-trip",
        "50 ms",
    )
    assert command.told("plan", *plain) == command.told("plan", *people)
    cases = {
        ("plna",): "Did you mean plan? sdiloco --help",
        ("hub", "evit"): "Did you mean evict? sdiloco hub --help",
        ("plan", "--parms=1"): "Did you mean --params? sdiloco plan --help",
        (
            "plan",
            "--params=1Q",
            "--layers=2",
        ): "1Q has the unknown unit 'Q'. Give one of k, M, B, T.",
    }
    for args, words in cases.items():
        assert words in refused(*args)
        assert "usage" not in refused(*args)


def test_an_unsuitable_value_is_refused_in_one_line_with_the_accepted_ones() -> None:
    rates = "Give one of kbit, Mbit, Gbit, Tbit, kbit/s, Mbit/s, Gbit/s, Tbit/s"
    cases = {
        (
            "plan",
            "--bandwidth=100Mbps",
        ): f"--bandwidth 100Mbps has the unknown unit 'Mbps'. {rates}.",
        (
            "plan",
            "--bandwidth",
            "12MB/s",
        ): f"--bandwidth 12MB/s has the unknown unit 'MB/s'. {rates}.",
        ("plan", "--bandwidth", "100"): f"--bandwidth 100 has no unit. {rates}, as in 100Mbit.",
        ("simulate", "--bandwidth=0.1"): f"--bandwidth 0.1 has no unit. {rates}, as in 0.1Mbit.",
        ("plan", "--hub_bandwidth=1"): f"--hub-bandwidth 1 has no unit. {rates}, as in 1Mbit.",
        ("plan", "--params", "1b"): "--params 1b has the unknown unit 'b'. Give one of k, M, B, T.",
        (
            "plan",
            "--params",
            "many",
        ): "--params many: not a number. It takes: Number of parameters, such as 1e9 or 1B",
        (
            "plan",
            "--step-time=5min",
        ): "--step-time 5min has the unknown unit 'min'. Give one of us, ms, s.",
        (
            "plan",
            "--groups=two",
        ): "--groups two: not a whole number. It takes: Number of worker groups.",
        (
            "plan",
            "--format=xml",
        ): "--format xml: not one of 'text', 'json'. It takes: Output format.",
        (
            "plan",
            "--model=no_such.Net",
        ): "--model no_such.Net: No module named 'no_such'. It takes: LightningModule",
        (
            "plan",
            "--model=torch.nn.Lin",
        ): "--model torch.nn.Lin: module 'torch.nn' has no attribute 'Lin'. It takes: ",
        (
            "plan",
            "--model=torch.nn",
        ): "--model torch.nn: neither a class nor a function. It takes: LightningModule",
        (
            "plan",
            "--model=Nowhere",
            "--step-time=1s",
            "--bandwidth=1Gbit",
        ): "--model Nowhere: not the path of a class",
        (
            "demo",
            "--settings",
            "ddpp",
        ): "settings='ddpp' is unknown. It is one of ddp, diloco, streaming_fp4.",
    }
    for args, words in cases.items():
        done = ran(*args)
        first, *others = done.err.splitlines()
        assert first.startswith(f"error: {words}"), (first, words)
        assert (done.code, others) == (2, [f"sdiloco {args[0]} --help lists what there is."])


def test_every_option_has_help() -> None:
    for name, (_, functions) in COMMANDS.items():
        for function in functions:
            text = command.told(name, *([] if function == name else [function]), "--help")
            assert "--sync-every SYNC_EVERY, --sync_every SYNC_EVERY" in text or name != "schedule"
            # Without a description there are the type and the default, in brackets, alone.
            bare = re.findall(
                r" (--[a-z-]+(?: \S+)?) \((?:type|default|required)", " ".join(text.split())
            )
            assert bare == [], name


def test_examples_of_the_help_are_commands_that_it_takes() -> None:
    """They are read, and not run; the shell's parts around them are not read."""
    examples = 0
    for name, (_, functions) in COMMANDS.items():
        for function in functions:
            text = command.told(name, *([] if function == name else [function]), "--help")
            for line in re.findall(
                r"^  .*?\bsdiloco (\w.*?)(?: > .*)?$",
                text.partition("\nexamples:")[2],
                re.MULTILINE,
            ):
                args = line.split()
                assert cli.parser_of([args[0]]).parse_args(cli.without_units(args)).command == name
                examples += 1
    assert examples >= len(COMMANDS) - 1


def test_a_shell_completes_subcommands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "sdiloco"
    script.write_text(command.told("completion", "bash"))
    for words, found in {
        "pl": ["plan"],
        "hub evi": ["evict"],
        "plan --rou": ["--round-trip", "--round_trip"],
    }.items():
        typed = f"source {script}; COMP_WORDS=(sdiloco {words}); COMP_CWORD={len(words.split())}; _shtab_sdiloco"
        done = subprocess.run(
            ["bash", "-c", f"{typed}; echo ${{COMPREPLY[@]}}"], capture_output=True, text=True
        )
        assert done.stdout.split() == found, done.stderr
    assert "shell='ksh' is not supported. Give one of bash, zsh" in refused("completion", "ksh")
    with patch.dict(sys.modules, shtab=None):
        assert "pip install shtab" in refused("completion", "bash")


def test_the_current_folder_is_searched_last_and_for_class_paths_alone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    script = tmp_path / "bin" / "sdiloco"
    folder.mkdir()
    script.parent.mkdir()
    script.write_text("from lightning_sdiloco.tools.cli import main\nmain()\n")
    for module in ("grpc", "a"):
        (folder / f"{module}.py").write_text("print('it was run')")
    (folder / "own.py").write_text(
        "import sys, torch\nprint(sys.path[-1] == '')\nNet = torch.nn.Linear\n"
    )

    def installed(*args: str) -> subprocess.CompletedProcess[str]:
        # As it is installed: the folder of the script is on the path, and no current folder.
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        line = [sys.executable, str(script), *args]
        return subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )

    assert (
        "it was run"
        not in installed("status", "--hub", "a.example:1", "--run", "llm", "--insecure").stdout
    )
    width = ("--model.in_features=10", "--model.out_features=10")
    planned = installed(
        "plan", "--model", "own.Net", *width, "--step-time=0.1", "--bandwidth=1Gbit"
    )
    assert planned.stdout.startswith("True\n100 parameters")

    # Files and values that hold no class path are refused where they are used.
    picture = tmp_path / "picture.yaml"
    picture.write_bytes(b"\xff\xfe")
    with patch.object(sys, "path", [entry for entry in sys.path if entry]):
        assert "own" in refused("simulate", "--config", str(picture), "--model", "own" * 2000)
        assert "config" in refused(
            "simulate", "--set", f"trainer.callbacks={'x' * 5000}", "--config="
        )
        assert "" not in sys.path


# Plans

SIZE = ["--params=1e9", "--layers=24"]
STEP = [*SIZE, "--step-time=0.1"]
ASKED = [*STEP, "--bandwidth=1Gbit"]


text_of = partial(command.told, "plan")


def told(*args: str) -> dict[str, Any]:
    return dict(json.loads(text_of(*args, "--format=json")))


def test_a_plan_is_alike_as_text_and_json_and_recommends_settings_that_it_would_plan() -> None:
    link = [
        "--bandwidth=2Gbit",
        "--round-trip=0.03",
        "--loss=0.001",
        "--groups=3",
        "--group-size=4",
        "--memory-rate=50",
    ]
    settings = [
        "--sync-every=50",
        "--overlap-steps=2",
        "--fragments=strided:6",
        "--compression=bf16",
        "--steps=77",
    ]
    answer = told(*SIZE, "--step-time=0.2", *link, *settings)
    assert answer["link"] == {"gbit_s": 2.0, "round_trip": 0.03, "loss": 0.001}
    names = ("groups", "group_size", "step_time", "memory_rate", "steps")
    assert [answer[name] for name in names] == [3, 4, 0.2, 5e10, 77]
    chosen = {"sync_every": 50, "overlap_steps": 2, "fragments": "strided:6", "compression": "bf16"}
    assert answer["settings"] == {**chosen, **recommended()._asdict(), "number_of_fragments": 4}
    assert answer["methods"]["streaming_overlap"] == answer["compressions"]["bf16"]

    asked = [*ASKED, "--round-trip=0.05"]
    text = text_of(*asked)
    answer = told(*asked)
    chosen = answer["recommendation"]
    rows = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    for said in (
        "1,000,000,000 parameters in 8 fragments, 2 groups of 1 rank\n10,000 inner steps of 0.1"
        " s\n",
        "1 Gbit/s in each direction, 50 ms round trip, no loss",
        f"Recommended:\n\n  sync_every={chosen['sync_every']},"
        f" overlap_steps={chosen['overlap_steps']}",
    ):
        assert said in text
    assert f"{int(answer['methods']['diloco']['utilisation'] * 1000) / 10:g} %" in rows["DiLoCo"]
    assert "5.16 MB" in rows["... with overlap"]
    assert "never" in rows["DDP"]
    assert max(map(len, text.splitlines())) <= 80
    assert set(answer["methods"]) == {"ddp", "diloco", "streaming", "streaming_overlap"}
    assert chosen["utilisation"] >= chosen["utilisation_with_margin"] >= 0.95
    given = ("sync_every", "overlap_steps", "fragments", "compression")
    again = told(*asked, *(f"--{name.replace('_', '-')}={chosen[name]}" for name in given))
    assert again["methods"]["streaming_overlap"]["utilisation"] == chosen["utilisation"]
    assert again["memory"] == chosen["memory"]
    assert set(chosen["memory"]) == {"device_bytes", "host_bytes", "evaluation_bytes"}
    assert told(*asked, "--sync-every=4")["settings"]["overlap_steps"] == 3
    assert "No settings reach 95 % on this link; closest" in text_of(
        *SIZE, "--step-time=0.01", "--bandwidth=0.1Gbit"
    )


def test_the_page_of_the_planner_shows_the_output_of_the_commands() -> None:
    """Each text of the page is a part of what the command before it prints."""
    root = Path(__file__).parents[2]
    printed = ""
    compared = 0
    page = (root / "docs" / "planner.md").read_text()
    for kind, block in re.findall(r"^```(console|text)\n(.*?)^```$", page, re.M | re.S):
        if kind == "text":
            compared += 1
            assert block.rstrip() in re.sub(r" +$", "", printed, flags=re.M)
        else:
            first = (
                block.replace("\\\n", " ")
                .split("$ sdiloco ")[1]
                .replace("examples/", f"{root}/examples/")
            )
            printed = command.told(*first.split())
    assert compared >= 4


def test_table_4_is_printed() -> None:
    entries = json.loads(text_of("--paper-table-4", "--format", "json"))
    assert entries == [entry._asdict() for entry in table_4()]
    # As text, both numbers stand where they differ.
    text = text_of("--paper-table-4")
    assert text.count("(") == text.count("1.4 (1.7)") + text.count("4.3 (5.2)") == 2
    assert "86.8  152.6  184.2      222.3  569.0" in text


MODULE = """
import lightning
import torch


class Net(lightning.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def configure_model(self):
        self.layers = torch.nn.ModuleList(torch.nn.Linear(self.width, self.width) for _ in range(6))


class Early(Net):
    def __init__(self, width: int):
        super().__init__(width)
        self.scale = torch.nn.Parameter(torch.ones(3))
        assert self.scale.detach().sum().item() == 3
"""


def test_a_local_module_is_planned_without_memory_unless_it_looks_at_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is in the current folder."""
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    small = ["--step-time=0.1", "--bandwidth=1Gbit", "--fragments=strided:2"]
    # 60 billion values.
    answer = told("--model=own_module.Net", "--model.width=100000", *small)
    assert (answer["parameters"], answer["settings"]["number_of_fragments"]) == (
        6 * (100_000**2 + 100_000),
        3,
    )
    assert told("--model=own_module.Early", "--model.width=10", *small)["parameters"] == 3 + 6 * 110


HUB = [*ASKED, "--hub-bandwidth=1Gbit"]
LINEAR = ["--model=torch.nn.Linear", "--model.in_features=-1", "--model.out_features=3"]
REFUSED = [
    ([], "--params, --layers, --step-time, --bandwidth must be given"),
    (["--params=1e9", "--step-time=0.1", "--bandwidth=1Gbit"], "--layers must be given"),
    ([*ASKED, "--params=10.5"], "params=10.5 is not a whole number"),
    ([*ASKED, "--layers=0"], "layers=0 is out of range"),
    ([*ASKED, "--groups=1"], "at least 2, or nothing travels"),
    ([*ASKED, "--bandwidth=-1Gbit"], "it must be a positive number of Gbit/s"),
    ([*ASKED, "--round-trip=50"], "50 ms is 0.05"),
    ([*ASKED, "--loss=2"], "0.1 % is 0.001"),
    ([*ASKED, "--sync-every=4", "--overlap-steps=5"], "overlap_steps=5 is out of range"),
    ([*ASKED, "--compression=fp5"], "'fp32', 'bf16', 'fp8'"),
    ([*ASKED, "--picture=plan.pdf"], "does not end with .svg or .png"),
    ([*ASKED, "--picture=/missing/plan.svg"], "cannot be written"),
    ([*ASKED, *LINEAR], "given together with"),
    (["--model=no_such.Thing", "--step-time=1", "--bandwidth=1Gbit"], "no_such"),
    (["--model=torch.nn.Flatten", "--step-time=1", "--bandwidth=1Gbit"], "no trainable parameters"),
    ([*LINEAR, "--step-time=1", "--bandwidth=1Gbit"], "The model could not be made: RuntimeError"),
    ([*ASKED, "--quorum=3"], "--quorum 3 is about the sites of a federation"),
    ([*ASKED, "--grace=3"], "--grace needs a quorum by which rounds close"),
    ([*ASKED, "--hub-bandwidth=0Gbit"], "hub_bandwidth=0.0 is out of range"),
    ([*HUB, "--quorum=9"], "there are 2: no round would ever close"),
    ([*HUB, "--quorum=1", "--delays=0,1,2"], "must be 2 numbers of seconds"),
    ([*HUB, "--quorum=1", "--grace=-1"], "grace=-1.0 is out of range"),
]


def test_impossible_plans_are_refused() -> None:
    pytest.importorskip("matplotlib")
    assert not_refused_with("plan", REFUSED) == {}


def test_a_hub_relays_every_payload_to_every_other_site_and_a_quorum_shortens_rounds() -> None:
    asked = [*ASKED, "--groups=4", "--compression=bf16"]
    answer = told(*asked, "--hub-bandwidth=0.5Gbit", "--quorum=4")
    hub = answer["hub"]
    waits = answer["waits"]
    assert (hub["bytes_in"], hub["bytes_out"]) == (4 * 2 * 10**9, 4 * 3 * 2 * 10**9)
    # 24 GB at 0.5 Gbit/s are 384 s: in 100 steps of 0.1 s that is 38.4 times what there is, and 500
    # do not suffice.
    assert (hub["share"], hub["enough"]) == (pytest.approx(38.4), None)
    # Where nobody is late it is the flight through the hub, however many are needed.
    assert waits["usual"] == waits["all"] == waits["longest"]
    assert waits["usual"]["seconds"] == pytest.approx(hub["flight_seconds"])
    # 1.03 GB at 10 Gbit/s are 0.825 s, which is less than 0.8 of 30 steps.
    text = text_of(*ASKED, "--hub-bandwidth=10Gbit")
    assert "1.03 GB in and 1.03 GB out" in text
    assert "Enough: sync_every=30, overlap_steps=" in text

    late = [*asked, "--hub-bandwidth=1Gbit", "--delays=0,0,0,60", "--grace=5"]
    grace = told(*late, "--quorum=3")["waits"]
    first, *_, last = grace["arrives"].values()
    assert (last - first, grace["usual"]["closes"] - first) == (pytest.approx(60), pytest.approx(5))
    assert grace["usual"]["counted"] == ["site 0", "site 1", "site 2"]
    assert grace["all"]["closes"] == last
    # This one waits for nobody who is late, but for its grace in every eighth round.
    dynamic = told(*late, "--quorum=DynamicBackup", "--quorum.least=0.5")["waits"]
    assert (dynamic["usual"]["closes"], dynamic["longest"]) == (
        pytest.approx(first),
        grace["usual"],
    )
    text = text_of(*late, "--quorum=3")
    assert "site 3" in text
    assert text.count("late") == 2


def test_links_of_the_groups_give_the_gain_of_suitable_parts(tmp_path: Path) -> None:
    given = tmp_path / "links.yaml"
    given.write_text("{paris: 1, milan: 1, rome: 1, lisbon: 0.5}")
    answer = told(*STEP, f"--links={given}")
    assert (answer["groups"], answer["link"]["gbit_s"]) == (4, 0.5)
    assert answer["links"]["equal_seconds"] / answer["links"]["round_seconds"] == pytest.approx(
        1.5, rel=1e-3
    )
    assert answer["links"]["shares"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    text = text_of(*STEP, f"--links={given}")
    assert "exchange=TwoShot('by_bandwidth', links=[1, 1, 1, 0.5])" in text
    assert "1.50 times as long" in text
    assert "Leave one of them out" in refused("plan", *ASKED, f"--links={given}")
    given.write_text("fast")
    assert "a list of at least two numbers" in refused("plan", *STEP, f"--links={given}")


def test_a_plan_draws_the_same_picture_with_matplotlib_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("one.svg", "other.svg")]
    one, other = (text_of(*ASKED, f"--picture={file}") for file in files)
    assert one == other
    assert files[0].read_bytes() == files[1].read_bytes()
    text_of("--paper-table-4", f"--picture={tmp_path / 'table.png'}")
    assert min(len(file.read_bytes()) for file in (files[0], tmp_path / "table.png")) > 10_000
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert "pip install matplotlib" in refused("plan", *ASKED, f"--picture={tmp_path / 'plan.svg'}")
    assert "Recommended" in text_of(*ASKED)
