"""What people run, on large models: the simulator, the planner, the monitor's records, the timeline and the report."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_sdiloco
from benchmarks.case import Case
from benchmarks.memory import SIZES, parameters
from benchmarks.sites import Job, run
from lightning_sdiloco.lightning.monitor import read_run
from lightning_sdiloco.tools.cli import main
from tests import fits
from tests.bits import same
from tests.large.models import Data, Large
from tests.ranks import in_ranks, run_processes
from tests.tools.test_simulate import losses, real, simulated

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]


def write(folder: Path, kind: str, steps: int, layers: int) -> str:
    """The file of a LightningCLI."""
    choices = {"sync_every": 4, "overlap_steps": 2, "fragments": f"strided:{layers}"}
    strategy = {"class_path": "lightning_sdiloco.StreamingDiLoCoStrategy", "init_args": choices}
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    config = {
        "seed_everything": 3,
        "trainer": {"accelerator": "cpu", "max_steps": steps, "strategy": strategy, **off},
        "model": {"class_path": "tests.large.models.Large", "init_args": {"kind": kind}},
        "data": {"class_path": "tests.large.models.Data"},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


@pytest.mark.parametrize(("kind", "groups"), [("wide", 3), ("normed", 2)])
def test_the_simulator_gives_the_bits_of_real_processes(kind: str, groups: int, tmp_path: Path) -> None:
    file = write(tmp_path, kind, 9, 40)
    expected = run_processes(real, groups, "lightning.pytorch", [f"--config={file}"], timeout=120.0)
    result = simulated(file, groups)
    assert sum(values.numel() for values in result.outer.values()) >= 100_000
    assert losses(result) == [rank["losses"] for rank in expected]
    for rank, group in zip(expected, result.groups, strict=True):
        assert same(rank["outer"], result.outer)
        assert group.bytes_sent == rank["report"]["bytes_sent"]


def test_the_simulator_and_the_planner_know_a_thousand_tensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write(tmp_path, "deep", 6, 100)
    link = ["--bandwidth=0.01", "--round-trip=0.05", "--step-time=0.1"]
    main(["simulate", f"--config={file}", "--groups=2", f"--json={tmp_path / 'told.json'}", *link])
    assert "2 worker groups, 6 inner steps each, 136,068 parameters" in capsys.readouterr().out
    (told,) = json.loads((tmp_path / "told.json").read_text())["runs"]
    assert told["inner_steps"] == [6, 6]
    assert told["prediction"]["seconds"] > 0.6
    model = ["--model=tests.large.models.Large", "--model.kind=deep"]
    main(["plan", *model, "--step-time=0.1", "--bandwidth=0.001", "--groups=3", "--format=json"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["settings"]["number_of_fragments"] == 168
    assert 0 < planned["recommendation"]["utilisation"] <= 1


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
@in_ranks(4, timeout=120.0)
def test_records_timeline_and_report_tell_of_every_fragment(
    rank: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of 168 in two groups of two ranks, with names of more than 64 characters."""
    monitor: Any = lightning_sdiloco.StreamingDiLoCoMonitor(str(tmp_path), timeline=str(tmp_path / "trace.json"))
    strategy = fits.strategy(worker_groups=2, sync_every=6, overlap_steps=2, fragments="strided:3", exchange="two_shot")
    choices = {"max_steps": 19, "callbacks": [monitor], "log_every_n_steps": 1}
    fits.trainer(strategy=strategy, devices=4, **choices).fit(Large("deep"), Data())
    if rank != 0:
        return
    assert max(len(name) for fragment in strategy.fragments for name in fragment.names) > 64
    ranks = read_run(tmp_path).ranks
    assert [{landed.fragment for landed in rank.landings} for rank in ranks] == [set(range(168))] * 4
    landed = [[landed for landed in rank.landings if not landed.final] for rank in ranks]
    assert len(landed[0]) == strategy.report()["landings"]
    flights = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["name"] == "flight"]
    assert len(flights) >= 4 * 168
    assert sum(e["ph"] == "X" for e in flights) == sum(map(len, landed))
    main(["report", str(tmp_path)])
    assert "Training kept computing for" in capsys.readouterr().out
    assert "Training kept computing for" in (tmp_path / "report" / "report.html").read_text()


def test_a_group_takes_eight_bytes_a_parameter_and_a_flight_over_a_fit_that_knows_no_other() -> None:
    case = Case(SIZES["10M"], 4, step_seconds=0.0, sync_every=8, overlap_steps=1)
    found = {method: run(Job(method, case, 2, None, 1, 22))["memory"] for method in ("lightning_alone", "streaming")}
    if not found["lightning_alone"]:
        pytest.skip("This system does not say how much memory a process has.")
    # Eight for outer parameters and momentum, three for the fragment in flight, and what the allocator keeps.
    assert (found["streaming"] - found["lightning_alone"]) / parameters(case.size) < 14
