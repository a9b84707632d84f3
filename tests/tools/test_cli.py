"""The command ``sdiloco``, its options, ``schedule`` and ``plan``: what they print, draw and
refuse.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
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
from tests.scripts import ROOT
from tests.tools import command
from tests.tools.command import not_refused_with, ran, refused


def printed_by(line: str) -> str:
    """The output of a command line, which succeeds."""
    return command.told(*shlex.split(line))


def helps() -> Iterator[tuple[str, str]]:
    """Yields each command, and the help of each of its functions."""
    for name, (_, functions) in COMMANDS.items():
        for function in functions:
            words = [name] if function == name else [name, function]
            yield name, command.told(*words, "--help")


def test_schedule_prints_launches_and_landings() -> None:
    schedules = {
        "schedule": Schedule(100, 5, 8),
        "schedule --sync-every=12 --overlap-steps 3 --fragments 4": Schedule(12, 3, 4),
        "schedule --sync_every 12 --overlap_steps=3 --fragments=4": Schedule(12, 3, 4),
        # A default gives way to an option.
        "schedule --sync-every=4 --fragments=2": Schedule(4, 3, 2),
        "schedule --sync-every=1 --fragments=1": Schedule(1, 0, 1),
        "schedule --sync-every=20 --fragments=4 --dense-rounds=3 --dense-sync-every=6": Schedule(
            20, 5, 4, DenseBeginning(3, 6)
        ),
    }
    for line, schedule in schedules.items():
        assert printed_by(line) == schedule.table() + "\n"
    assert ran("schedule").err == ""
    part = Schedule(100, 5, 8).table(7, 140)
    assert printed_by("schedule --first 7 --last=140") == part + "\n"


def test_a_schedule_without_a_last_step_shows_two_flights_of_every_fragment() -> None:
    _, *rows = printed_by("schedule --first=1000").splitlines()
    steps, *columns = zip(*map(str.split, rows), strict=True)
    assert int(steps[0]) >= 1000
    for fragment in range(8):
        assert min(column.count(str(fragment)) for column in columns) >= 2


def test_bad_values_are_refused_those_of_the_settings_with_their_words() -> None:
    cases = [
        (["--first=0"], "first=0 is out of range: it must be at least 1"),
        (["--first=9", "--last=8"], "last=8 is out of range: it must be at least 9"),
        (
            ["--overlap-steps=none"],
            "--overlap-steps none: not a whole number. Accepted: Number of inner steps between",
        ),
        (["--no-such-option=1"], "--no-such-option"),
        (["--layers-per-fragment=3"], "is part of fragments: pass fragments='strided:3'"),
        (["--tau", "3"], "tau='3' is called overlap_steps here"),
    ]
    for sync_every, overlap_steps in ((0, 0), (10, 10), (10, -1)):
        with pytest.raises(ValueError, match="out of range") as error:
            Settings(sync_every=sync_every, overlap_steps=overlap_steps)
        options = [f"--sync-every={sync_every}", f"--overlap-steps={overlap_steps}"]
        cases.append((options, str(error.value)))
    assert not_refused_with("schedule", cases) == {}
    assert "plan" in refused()
    assert "schedule" in refused("no-such-command")


def test_numbers_may_have_units_and_typos_get_a_suggestion_in_three_lines() -> None:
    plain = "--params=1e9 --layers=24 --step-time 0.1 --bandwidth=0.1Gbit --round-trip 0.05"
    with_units = (
        "--params 1B --layers=24 --step_time=100ms --bandwidth=100Mbit/s --round-trip '50 ms'"
    )
    assert printed_by(f"plan {plain}") == printed_by(f"plan {with_units}")
    cases = {
        "plna": "Did you mean plan? sdiloco --help",
        "hub evit": "Did you mean evict? sdiloco hub --help",
        "demo --setting=ddp": "Did you mean --settings? sdiloco demo --help",
        "plan --parms=1": "Did you mean --params? sdiloco plan --help",
        "plan --params=1Q --layers=2": "1Q has the unknown unit 'Q'. Use one of k, M, B, T.",
    }
    for line, words in cases.items():
        refusal = refused(*line.split())
        assert words in refusal
        assert "usage" not in refusal


RATES = "Use one of kbit, Mbit, Gbit, Tbit, kbit/s, Mbit/s, Gbit/s, Tbit/s"
UNSUITABLE = {
    "plan --bandwidth=100Mbps": f"--bandwidth 100Mbps has the unknown unit 'Mbps'. {RATES}.",
    "plan --bandwidth 12MB/s": f"--bandwidth 12MB/s has the unknown unit 'MB/s'. {RATES}.",
    "plan --bandwidth 100": f"--bandwidth 100 has no unit. {RATES}, as in 100Mbit.",
    "simulate --bandwidth=0.1": f"--bandwidth 0.1 has no unit. {RATES}, as in 0.1Mbit.",
    "plan --hub_bandwidth=1": f"--hub-bandwidth 1 has no unit. {RATES}, as in 1Mbit.",
    "plan --params 1b": "--params 1b has the unknown unit 'b'. Use one of k, M, B, T.",
    "plan --params many": (
        "--params many: not a number. Accepted: Number of parameters, as an alternative to"
    ),
    "plan --step-time=5min": "--step-time 5min has the unknown unit 'min'. Use one of us, ms, s.",
    "plan --groups=two": "--groups two: not a whole number. Accepted: Number of worker groups.",
    "plan --format=xml": "--format xml: not one of 'text', 'json'. Accepted: Output format.",
    "plan --model=no_such.Net": (
        "--model no_such.Net: No module named 'no_such'. Accepted: Class path"
    ),
    "plan --model=torch.nn.Lin": (
        "--model torch.nn.Lin: module 'torch.nn' has no attribute 'Lin'. Accepted: "
    ),
    "plan --model=torch.nn": (
        "--model torch.nn: neither a class nor a function. Accepted: Class path"
    ),
    "plan --model=Nowhere --step-time=1s --bandwidth=1Gbit": (
        "--model Nowhere: not the path of a class"
    ),
    "demo --settings ddpp": (
        "settings='ddpp' is unknown. Choose one of ddp, diloco, streaming_fp4."
    ),
    "demo --steps 0": "steps=0 is out of range: it must be at least 1.",
    "demo --steps 1.5": "--steps 1.5: not a whole number. Accepted: Number of inner steps",
    f"demo --out {__file__}": f"The results cannot be written to out={__file__!r} ([Errno 17]",
}


def test_an_unsuitable_value_is_refused_in_one_line_with_the_accepted_ones() -> None:
    for line, words in UNSUITABLE.items():
        words_of_line = line.split()
        printed = ran(*words_of_line)
        error, hint = printed.err.splitlines()
        assert error.startswith(f"error: {words}"), (error, words)
        assert hint == f"sdiloco {words_of_line[0]} --help lists all options."
        assert printed.code == 2


def test_every_option_has_help() -> None:
    for name, text in helps():
        assert "  --sync-every SYNC_EVERY\n" in text or name != "schedule"
        # Without a description only the type and the default follow, in brackets.
        on_one_line = " ".join(text.split())
        bare = re.findall(r" (--[a-z-]+(?: \S+)?) \((?:number|whole|default)", on_one_line)
        assert bare == [], name
        # In one spelling, with types and defaults as people write them.
        assert not re.search(r"--\w+_|\(type|null|Optional|Union", text), name


def test_help_tells_units_and_defaults_in_eighty_columns() -> None:
    helps_by_name = dict(helps())
    plan = " ".join(helps_by_name["plan"].split())
    assert "in each direction. (number, for example 100Mbit)" in plan
    assert "--layers LAYERS Number of layers, required with --params. (whole number) " in plan
    assert (
        "Number of inner steps in the whole run, for the total number of bytes. (whole number, default: 10000)"
        in plan
    )
    for name, text in helps_by_name.items():
        assert max(map(len, text.splitlines())) <= 80, name


def test_examples_of_the_help_are_commands_that_it_takes() -> None:
    """They are parsed, and not run, without the parts of the shell around them."""
    examples = 0
    for name, text in helps():
        _, _, end = text.replace("\\\n", "").partition("\nexamples:")
        for line in re.findall(r"^  .*?\bsdiloco (\w.*?)(?: > .*)?$", end, re.MULTILINE):
            words = line.split()
            parser = cli.parser_of(words[:1])
            assert parser.parse_args(cli.without_units(words)).command == name
            examples += 1
    assert examples >= len(COMMANDS) - 1


def test_a_shell_completes_subcommands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "sdiloco"
    script.write_text(printed_by("completion bash"))
    completions = {
        "pl": ["plan"],
        "hub evi": ["evict"],
        "plan --rou": ["--round-trip", "--round_trip"],
    }
    for words, expected in completions.items():
        position = len(words.split())
        lines = [
            f"source {script}",
            f"COMP_WORDS=(sdiloco {words})",
            f"COMP_CWORD={position}",
            "_shtab_sdiloco",
            "echo ${COMPREPLY[@]}",
        ]
        completed = subprocess.run(["bash", "-c", "; ".join(lines)], capture_output=True, text=True)
        assert completed.stdout.split() == expected, completed.stderr
    assert "shell='ksh' is not supported. Choose one of bash, zsh" in refused("completion", "ksh")
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
    own_module = "import sys, torch\nprint(sys.path[-1] == '')\nNet = torch.nn.Linear\n"
    (folder / "own.py").write_text(own_module)

    def installed(line: str) -> str:
        # As it is installed: the folder of the script is on the path, and no current folder.
        process = subprocess.run(
            [sys.executable, str(script), *line.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return process.stdout

    assert "it was run" not in installed("status --hub a.example:1 --run llm --insecure")
    width = "--model.in_features=10 --model.out_features=10"
    planned = installed(f"plan --model own.Net {width} --step-time=0.1 --bandwidth=1Gbit")
    assert planned.startswith("True\n100 parameters")

    # Files and values that hold no class path are refused where they are used.
    picture = tmp_path / "picture.yaml"
    picture.write_bytes(b"\xff\xfe")
    long_value = "x" * 5000
    with patch.object(sys, "path", [entry for entry in sys.path if entry]):
        assert "own" in refused("simulate", "--config", str(picture), "--model", "own" * 2000)
        setting = f"trainer.callbacks={long_value}"
        assert "config" in refused("simulate", "--set", setting, "--config=")
        assert "" not in sys.path


# Plans

SIZE = ["--params=1e9", "--layers=24"]
STEP = [*SIZE, "--step-time=0.1"]
ON_1_GBIT = [*STEP, "--bandwidth=1Gbit"]


text_of = partial(command.told, "plan")


def plan(*args: str) -> dict[str, Any]:
    return dict(json.loads(text_of(*args, "--format=json")))


def test_a_plan_shows_the_link_the_groups_and_the_settings_that_it_was_given() -> None:
    link = "--bandwidth=2Gbit --round-trip=0.03 --loss=0.001"
    groups = "--groups=3 --group-size=4 --step-time=0.2 --memory-rate=50 --steps=77"
    settings = "--sync-every=50 --overlap-steps=2 --fragments=strided:6 --compression=bf16"
    answer = plan(*SIZE, *f"{link} {groups} {settings}".split())
    assert answer["link"] == {"gbit_s": 2.0, "round_trip": 0.03, "loss": 0.001}
    numbers = {"groups": 3, "group_size": 4, "step_time": 0.2, "memory_rate": 5e10, "steps": 77}
    assert answer.items() >= numbers.items()
    assert answer["settings"] == {
        "sync_every": 50,
        "overlap_steps": 2,
        "fragments": "strided:6",
        "compression": "bf16",
        **recommended()._asdict(),
        "number_of_fragments": 4,
    }
    assert answer["methods"]["streaming_overlap"] == answer["compressions"]["bf16"]


def test_a_plan_is_alike_as_text_and_json_and_recommends_settings_that_it_would_plan() -> None:
    options = [*ON_1_GBIT, "--round-trip=0.05"]
    text = text_of(*options)
    answer = plan(*options)
    methods = answer["methods"]
    advice = answer["recommendation"]
    size = "1,000,000,000 parameters in 8 fragments, 2 groups of 1 rank"
    assert f"{size}\n10,000 inner steps of 0.1 s\n" in text
    assert "1 Gbit/s in each direction, 50 ms round trip, no loss" in text
    advised = f"sync_every={advice['sync_every']}, overlap_steps={advice['overlap_steps']}"
    assert f"Recommended:\n\n  {advised}" in text
    rows = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert f"{int(methods['diloco']['utilisation'] * 1000) / 10:g} %" in rows["DiLoCo"]
    assert "5.16 MB" in rows["... with overlap"]
    assert "never" in rows["DDP"]
    assert max(map(len, text.splitlines())) <= 80
    assert set(methods) == {"ddp", "diloco", "streaming", "streaming_overlap"}
    assert advice["utilisation"] >= advice["utilisation_with_margin"] >= 0.95
    assert set(advice["memory"]) == {"device_bytes", "host_bytes", "evaluation_bytes"}

    advised_options = [
        f"--{name.replace('_', '-')}={advice[name]}"
        for name in ("sync_every", "overlap_steps", "fragments", "compression")
    ]
    as_advised = plan(*options, *advised_options)
    assert as_advised["methods"]["streaming_overlap"]["utilisation"] == advice["utilisation"]
    assert as_advised["memory"] == advice["memory"]


def test_a_plan_shortens_the_overlap_of_short_rounds_and_names_a_slow_link() -> None:
    answer = plan(*ON_1_GBIT, "--round-trip=0.05", "--sync-every=4")
    assert answer["settings"]["overlap_steps"] == 3
    slow_link = text_of(*SIZE, "--step-time=0.01", "--bandwidth=0.1Gbit")
    assert "No settings reach 95 % on this link. The closest settings are:" in slow_link


def test_the_page_of_the_planner_shows_the_output_of_the_commands() -> None:
    """Each text of the page is a part of the output of the command before it."""
    printed = ""
    texts = 0
    page = (ROOT / "docs" / "planner.md").read_text()
    for kind, block in re.findall(r"^```(console|text)\n(.*?)^```$", page, re.M | re.S):
        if kind == "text":
            texts += 1
            assert block.rstrip() in re.sub(r" +$", "", printed, flags=re.M)
        else:
            _, line, *_ = block.replace("\\\n", " ").split("$ sdiloco ")
            printed = command.told(*line.replace("examples/", f"{ROOT}/examples/").split())
    assert texts >= 4


def test_table_4_is_printed() -> None:
    entries = json.loads(text_of("--paper-table-4", "--format", "json"))
    assert entries == [entry._asdict() for entry in table_4()]
    # The text shows both numbers where they differ.
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
    options = ["--step-time=0.1", "--bandwidth=1Gbit", "--fragments=strided:2"]
    sixty_billion = plan("--model=own_module.Net", "--model.width=100000", *options)
    assert sixty_billion["parameters"] == 6 * (100_000**2 + 100_000)
    assert sixty_billion["settings"]["number_of_fragments"] == 3
    early = plan("--model=own_module.Early", "--model.width=10", *options)
    assert early["parameters"] == 3 + 6 * 110


LINEAR = "--model=torch.nn.Linear --model.in_features=-1 --model.out_features=3"
REFUSED = {
    "": "--params, --layers, --step-time, --bandwidth must be given",
    "--params=1e9 --step-time=0.1 --bandwidth=1Gbit": "--layers must be given",
    "--model=no_such.Thing --step-time=1 --bandwidth=1Gbit": "no_such",
    "--model=torch.nn.Flatten --step-time=1 --bandwidth=1Gbit": "no trainable parameters",
    f"{LINEAR} --step-time=1 --bandwidth=1Gbit": "The model could not be created: RuntimeError",
}
# beyond `ON_1_GBIT`
REFUSED_OPTIONS = {
    "--params=10.5": "params=10.5 is not a whole number",
    "--layers=0": "layers=0 is out of range",
    "--groups=1": "at least 2, or nothing is sent",
    "--bandwidth=-1Gbit": "it must be a positive number of Gbit/s",
    "--round-trip=50": "50 ms is 0.05",
    "--loss=2": "0.1 % is 0.001",
    "--sync-every=4 --overlap-steps=5": "overlap_steps=5 is out of range",
    "--compression=fp5": "'fp32', 'bf16', 'fp8'",
    "--picture=plan.pdf": "does not end with .svg or .png",
    "--picture=/missing/plan.svg": "cannot be written",
    LINEAR: "given together with",
    "--quorum=3": "--quorum 3 applies only to the sites of a federation",
    "--grace=3": "--grace requires a quorum that closes rounds",
    "--hub-bandwidth=0Gbit": "hub_bandwidth=0.0 is out of range",
    "--hub-bandwidth=1Gbit --quorum=9": "there are only 2, so no round would ever close",
    "--hub-bandwidth=1Gbit --quorum=1 --delays=0,1,2": "must contain 2 numbers of at least 0",
    "--hub-bandwidth=1Gbit --quorum=1 --grace=-1": "grace=-1.0 is out of range",
}


def test_impossible_plans_are_refused() -> None:
    pytest.importorskip("matplotlib")
    cases = [(line.split(), words) for line, words in REFUSED.items()]
    for line, words in REFUSED_OPTIONS.items():
        cases.append(([*ON_1_GBIT, *line.split()], words))
    assert not_refused_with("plan", cases) == {}


def test_a_hub_relays_every_payload_to_every_other_site() -> None:
    four_groups = [*ON_1_GBIT, "--groups=4", "--compression=bf16"]
    answer = plan(*four_groups, "--hub-bandwidth=0.5Gbit", "--quorum=4")
    hub = answer["hub"]
    assert hub["bytes_in"] == 4 * 2 * 10**9
    assert hub["bytes_out"] == 4 * 3 * 2 * 10**9
    # 24 GB at 0.5 Gbit/s are 384 s: in 100 steps of 0.1 s that is 38.4 times the bandwidth, and
    # 500 steps do not suffice.
    assert hub["share"] == pytest.approx(38.4)
    assert hub["enough"] is None
    # If nobody is late, a round takes the flight through the hub, whatever the quorum.
    waits = answer["waits"]
    assert waits["usual"] == waits["all"] == waits["longest"]
    assert waits["usual"]["seconds"] == pytest.approx(hub["flight_seconds"])
    # 1.03 GB at 10 Gbit/s are 0.825 s, which is less than 0.8 of 30 steps.
    text = text_of(*ON_1_GBIT, "--hub-bandwidth=10Gbit")
    assert "1.03 GB in and 1.03 GB out" in text
    assert "Enough: sync_every=30, overlap_steps=" in text


def test_a_quorum_shortens_rounds_in_which_a_site_is_late() -> None:
    four_groups = [*ON_1_GBIT, "--groups=4", "--compression=bf16", "--hub-bandwidth=1Gbit"]
    with_a_late_site = [*four_groups, "--delays=0,0,0,60", "--grace=5"]
    waits = plan(*with_a_late_site, "--quorum=3")["waits"]
    first, *_, last = waits["arrives"].values()
    assert last - first == pytest.approx(60)
    assert waits["usual"]["closes"] - first == pytest.approx(5)
    assert waits["usual"]["counted"] == ["site 0", "site 1", "site 2"]
    assert waits["all"]["closes"] == last
    # A dynamic quorum waits for a late site only in every eighth round, for its grace.
    dynamic_quorum = ["--quorum=DynamicBackup", "--quorum.least=0.5"]
    dynamic_waits = plan(*with_a_late_site, *dynamic_quorum)["waits"]
    assert dynamic_waits["usual"]["closes"] == pytest.approx(first)
    assert dynamic_waits["longest"] == waits["usual"]
    text = text_of(*with_a_late_site, "--quorum=3")
    assert "site 3" in text
    assert text.count("late") == 2


def test_links_of_the_groups_give_the_gain_of_suitable_parts(tmp_path: Path) -> None:
    file = tmp_path / "links.yaml"
    file.write_text("{paris: 1, milan: 1, rome: 1, lisbon: 0.5}")
    option = f"--links={file}"
    answer = plan(*STEP, option)
    assert answer["groups"] == 4
    assert answer["link"]["gbit_s"] == 0.5
    links = answer["links"]
    assert links["equal_seconds"] / links["round_seconds"] == pytest.approx(1.5, rel=1e-3)
    assert links["shares"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    text = text_of(*STEP, option)
    assert "exchange=TwoShot('by_bandwidth', links=[1, 1, 1, 0.5])" in text
    assert "1.50 times as long" in text
    assert "Omit one of the two options" in refused("plan", *ON_1_GBIT, option)
    file.write_text("fast")
    assert "a list of at least two numbers" in refused("plan", *STEP, option)


def test_a_plan_draws_the_same_picture_with_matplotlib_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.svg"
    repeated = tmp_path / "repeated.svg"
    table = tmp_path / "table.png"
    text = text_of(*ON_1_GBIT, f"--picture={picture}")
    assert text_of(*ON_1_GBIT, f"--picture={repeated}") == text
    assert repeated.read_bytes() == picture.read_bytes()
    text_of("--paper-table-4", f"--picture={table}")
    assert picture.stat().st_size > 10_000
    assert table.stat().st_size > 10_000
    for module in list(sys.modules):
        if module.split(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, module, None)
    assert "pip install matplotlib" in refused("plan", *ON_1_GBIT, f"--picture={picture}")
    assert "Recommended" in text_of(*ON_1_GBIT)
